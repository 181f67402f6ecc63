"""Jobs in which a process fails: {learner, collector, evaluator, fork server, store} x {kill, stop,
hang, raise, sys.exit, exit in evaluation only} x recipes.

    python -m tests.recipes.matrix                  # all cells, some minutes; see --help

Each cell is a whole job, started from the command line. It must end, or go on, as :func:`expected`
says, name the process in its message, and leave nothing. ``test_matrix.py`` has a few cells.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import signal
import sys
import tempfile
import time
from pathlib import Path

import psutil

from torchrl_dist.checkpoint import load_checkpoint
from torchrl_dist.runtime.pulse import remove_pulses_of_the_dead

from .jobs import TORCHRUN, Job, assert_gone, progress, started

ENVIRONMENT = """
import os, pathlib, sys, threading, time
import gymnasium
from torchrl_dist.runtime import current_session

FAULT, PLACE, AFTER = {fault!r}, {place!r}, {after}
HERE = pathlib.Path(__file__).parent

class Faulty(gymnasium.Wrapper):
    def __init__(self):
        super().__init__(gymnasium.make({base!r}))
        frame, files = sys._getframe(), set()
        while frame is not None:
            files.add(os.path.basename(frame.f_code.co_filename))
            frame = frame.f_back
        self.place, self.steps = "nowhere", 0
        try:
            self.place = current_session().me.name
        except Exception:
            return
        (HERE / (self.place + ".pid")).write_text(str(os.getpid()))
        if "evaluate.py" in files:
            (HERE / "evaluation.pid").write_text(str(os.getpid()))
            self.place += " evaluation"

    def step(self, action):
        self.steps += 1
        if self.steps > AFTER and PLACE in self.place:
            if FAULT == "hang":
                time.sleep(1e6)
            if FAULT == "raise":
                raise ValueError("the axle broke")
            if FAULT == "sys.exit":
                sys.exit(3)
            if FAULT == "exit":
                os._exit(3)
        return self.env.step(action)

gymnasium.register("Faulty-v0", entry_point=Faulty, max_episode_steps=200)
"""
BASES = {
    "apex": "CartPole-v1",
    "ddppo": "CartPole-v1",
    "impala": "CartPole-v1",
    "r2d2": "CartPole-v1",
    "sac": "Pendulum-v1",
}
SMALL = ["--hidden", "8", "--envs-per-collector", "2", "--eval-episodes", "2", "--seed", "1"]
OFTEN = ["--eval-max-steps", "50", "--checkpoint-interval-s", "0.2", "--device", "cpu"]
RECIPE = {
    "apex": ["--frames-per-batch", "64", "--learning-starts", "64", "--capacity", "4000",
             "--updates-per-batch", "1", "--batch-size", "16"],
    "ddppo": ["--frames-per-batch", "128", "--learners", "1"],
    "impala": ["--frames-per-batch", "64"],
    "r2d2": ["--frames-per-batch", "64", "--learning-starts", "64", "--capacity", "4000",
             "--updates-per-batch", "1", "--batch-size", "4", "--lstm", "8"],
    "sac": ["--frames-per-batch", "64", "--learning-starts", "64", "--capacity", "4000",
            "--batch-size", "16", "--updates-per-frame", "0.1"],
}  # fmt: skip
PLACES = ("learner", "collector", "evaluator", "fork server", "store")
FAULTS = ("kill", "stop", "hang", "raise", "sys.exit", "exit in evaluation")
STOPPED_S = 3.0


@dataclasses.dataclass(frozen=True)
class Cell:
    recipe: str
    place: str
    fault: str

    def __str__(self) -> str:
        return f"{self.recipe:7} {self.place:12} {self.fault:18}"

    @property
    def by_environment(self) -> bool:
        return self.fault not in ("kill", "stop")

    @property
    def has_collectors(self) -> bool:
        """An environment that fails in the learner is stepped there."""
        return not (self.place == "learner" and self.by_environment)

    @property
    def exists(self) -> bool:
        """No environment runs in the fork server and in the process that has only the store."""
        return not (self.place in ("fork server", "store") and self.by_environment)


def expected(cell: Cell) -> tuple[int | None, tuple[str, ...]]:
    """Its exit code (None: killed), and what its stderr names."""
    place, fault = cell.place, cell.fault
    evaluates = place == "evaluator" or fault == "exit in evaluation"
    if fault == "exit in evaluation" and place == "learner":
        return 3, ()  # it is the only process
    if evaluates:
        text = {
            "kill": ("evaluator0", "SIGKILL"),
            "stop": (),  # it goes on in time
            "hang": ("evaluator0", "did not answer a call of the evaluation"),
            "raise": ("evaluator0", "the axle broke"),
            "sys.exit": ("evaluator0", "SystemExit: 3"),
            "exit in evaluation": ("evaluator0", "exited with status 3"),
        }[fault]
        return 0, text
    if fault == "stop":
        return 0, ()  # for a moment
    if fault == "kill":
        if place == "collector":
            return 0, ("collector0 is lost", "SIGKILL")
        return (1, ("fork server", "SIGKILL")) if place == "fork server" else (None, ())
    if fault == "hang" and place == "collector" and cell.recipe == "impala":
        return 0, ("collector0", "no rollout within")  # batches come from the others
    text = {
        "hang": ("no batch within",),
        "raise": ("the axle broke",),
        "sys.exit": ("SystemExit: 3",),
    }[fault]
    return 1, (name_of(cell), *text)


def name_of(cell: Cell) -> str:
    """The process that fails; of DD-PPO's learners that step environments themselves the second."""
    if cell.recipe == "ddppo" and cell.place == "learner" and cell.by_environment:
        return "learner0" if cell.fault == "exit in evaluation" else "learner1"
    return f"{cell.place}0"


def run(cell: Cell, cwd: Path, *, frames: int, timeout_s: float, collectors: int = 3) -> str:
    """One job; returns how it ended. Raises AssertionError where that is not as expected."""
    fault = {"exit in evaluation": "exit"}.get(cell.fault, cell.fault)
    place = "evaluation" if cell.fault == "exit in evaluation" else name_of(cell)
    text = ENVIRONMENT.format(
        fault=fault if cell.by_environment else None,
        place=place,
        after=40 if fault != "exit" else 5,
        base=BASES[cell.recipe],
    )
    (cwd / "faulty.py").write_text(text)
    collectors = collectors if cell.has_collectors else 0
    learners = ["--learners", "2"] if name_of(cell) == "learner1" else []
    total = frames if expected(cell)[0] == 0 and cell.by_environment else 10**8
    arguments = [
        *("train", cell.recipe, "--env", "faulty:Faulty-v0", "--output-dir", "run"),
        *(*SMALL, *OFTEN, *RECIPE[cell.recipe], "--timeout-s", str(timeout_s)),
        *("--total-frames", str(total), "--eval-interval-frames", str(max(200, frames // 8))),
    ]
    launcher = [sys.executable]
    if cell.place == "store":  # torchrun's agent has it
        launcher = [*TORCHRUN, "--nproc-per-node", "2"]
        arguments += ["--learners", "1"] if cell.recipe in ("apex", "r2d2") else []
        if cell.recipe == "ddppo":  # all ranks learn
            at = arguments.index("--learners")
            del arguments[at : at + 2]
    else:
        arguments += ["--collectors", str(collectors), *learners]
    started_at = time.monotonic()
    with started(arguments, cwd, launcher=launcher) as job:
        processes: set[psutil.Process] = set()
        if not cell.by_environment:
            _disturb(cell, job, cwd, processes)
        processes.add(psutil.Process(job.process.pid))
        code = _end(job, processes, 60 + 8 * timeout_s)
        assert_gone(list(processes), 40.0)
    seconds = time.monotonic() - started_at
    wanted, names = expected(cell)
    said = job.said()
    if wanted is None:
        assert code != 0, said
    elif total == 10**8 and wanted == 0:
        # it went on until it was stopped; torchrun's agent has a code of its own
        assert code == (1 if cell.place == "store" else 130), said
        assert job.result["stopped_by"] == "SIGINT", said
    else:
        assert code == wanted, f"exit code {code}, expected {wanted}\n{said}"
    for name in names:
        assert name in said, f"{name!r} is not in\n{said}"
    if code in (0, 1, 130):
        load_checkpoint(cwd / "run/checkpoint.pt")
    if code == 1 and cell.place != "store":
        assert "torchrl-dist: failed: " in said and "--resume" in said, said
    remove_pulses_of_the_dead()  # as the next job does
    pids = {f"-{process.pid}-" for process in processes}
    left = [n for n in os.listdir("/dev/shm") if "torchrl" in n and any(p in n for p in pids)]
    assert not left, left
    return f"exit code {code} after {seconds:.0f} s"


def _disturb(cell: Cell, job: Job, cwd: Path, processes: set[psutil.Process]) -> None:
    job.until(progress(cwd / "run"), "progress")
    file = {"evaluator": "evaluator0", "collector": "collector0"}.get(cell.place)
    if file is not None:
        job.until((cwd / f"{file}.pid").exists, f"an environment in {file}")
        pid = int((cwd / f"{file}.pid").read_text())
    else:
        pid = job.process.pid
    processes.update(job.descendants())
    process = psutil.Process(pid)
    if cell.place == "fork server":
        job.until((cwd / "collector0.pid").exists, "an environment")
        process = psutil.Process(int((cwd / "collector0.pid").read_text())).parent()
        assert process is not None and process.pid != job.process.pid
    if cell.fault == "kill":
        process.kill()
    else:
        process.suspend()
        time.sleep(STOPPED_S)
        process.resume()
    if expected(cell)[0] == 0:
        path = cwd / "run/checkpoint.pt"
        updates = load_checkpoint(path).counters["updates"]
        job.until(progress(cwd / "run", more_than=updates), "progress after it")
        for name in expected(cell)[1]:
            job.until(lambda name=name: name in job.said(), name)  # type: ignore[misc]
        processes.update(job.descendants())
        job.process.send_signal(signal.SIGINT)


def _end(job: Job, processes: set[psutil.Process], limit_s: float) -> int:
    give_up = time.monotonic() + limit_s
    while job.process.poll() is None:
        processes.update(job.descendants())
        assert time.monotonic() < give_up, f"still runs after {limit_s} s\n{job.said()}"
        time.sleep(0.1)
    return job.process.returncode


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipes", nargs="+", default=list(RECIPE))
    parser.add_argument("--places", nargs="+", default=list(PLACES))
    parser.add_argument("--faults", nargs="+", default=list(FAULTS))
    parser.add_argument("--frames", type=int, default=2_000)
    parser.add_argument("--timeout-s", type=float, default=15.0)
    options = parser.parse_args()
    failed = 0
    for recipe in options.recipes:
        for place in options.places:
            for fault in options.faults:
                cell = Cell(recipe, place, fault)
                if not cell.exists:
                    continue
                with tempfile.TemporaryDirectory() as folder:
                    try:
                        frames, timeout_s = options.frames, options.timeout_s
                        how = run(cell, Path(folder), frames=frames, timeout_s=timeout_s)
                    except Exception as error:
                        failed += 1
                        how = f"NOT AS EXPECTED: {error}"
                print(f"{cell} {how}", flush=True)
    with contextlib.suppress(Exception):
        print(f"{failed} cells are not as expected")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
