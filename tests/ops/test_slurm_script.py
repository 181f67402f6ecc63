"""The batch scripts: their text, shells accept it, and a real Slurm runs it.

Write the golden files again: python -m tests.ops.test_slurm_script
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests import slurm
from tests.recipes.jobs import TOY, progress
from tests.spawn import wait_until
from torchrl_dist.cli import main
from torchrl_dist.ops.slurm import Component, Job, script, seconds_of

pytestmark = pytest.mark.timeout(400)  # a busy machine imports torch slowly, seven times
GOLDEN = Path(__file__).parent / "golden"
APEX = ("train", "apex", "--env", "CartPole-v1")
VARIANTS = {
    "apex": Job(APEX, Component(tasks_per_node=3)),
    "gpu-learner-two-cpu-nodes": Job(
        ("python", "train.py", "--note", "it's quoted"),
        Component(cpus_per_task=8, gpus_per_node=1, partition="gpu"),
        Component(nodes=2, cpus_per_task=32, partition="cpu", mem="0"),
        interface="ib0",
        setup=("source .venv/bin/activate",),
        sbatch=("--account=lab",),
    ),
    "seeds-in-a-container": Job(
        APEX, Component(tasks_per_node=3), seeds="0-4%2",
        container=("apptainer", "exec", "image.sif"), requeues=0,
    ),
    "torchrun": Job(("python", "train.py"), Component(nodes=2, gpus_per_node=4), torchrun=4),
    "own-replay-dir": Job((*APEX, "--replay-dir", "/scratch/x y"), Component(tasks_per_node=3)),
}  # fmt: skip


@pytest.mark.parametrize("name", VARIANTS)
def test_the_script_is_the_golden_one_and_shells_accept_it(name: str) -> None:
    text = script(VARIANTS[name])
    assert text == (GOLDEN / f"{name}.sh").read_text()
    checked = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed")
    checked = subprocess.run(["shellcheck", "-"], input=text, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout


@pytest.mark.parametrize(
    ("told", "of_all", "ends", "requeued"),
    [
        ("138", 137, 0, True),  # stopped, and a collector was lost before
        ("0", 137, 0, False),
        ("1", 137, 1, False),
        ("", 138, 0, True),  # no rank left a code, so srun's counts
        ("", 137, 137, False),
    ],
)
def test_a_recipes_job_ends_by_its_learners_code(told, of_all, ends, requeued, tmp_path) -> None:
    """Other programs play Slurm's commands and the learner."""
    commands = {
        "srun": f'printf "%s" "{told}" > "$TORCHRL_DIST_EXIT_FILE"; exit {of_all}',
        "scontrol": 'echo "$@" >> calls; echo JobState=RUNNING',
    }
    for name, body in commands.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    left = tmp_path / "left"
    left.mkdir()
    path = f"{tmp_path}:{os.environ['PATH']}"
    env = {"PATH": path, "TMPDIR": str(left), "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1"}
    text = script(Job((*APEX, "--replay-dir", "/scratch/x"), Component(tasks_per_node=3)))
    done = subprocess.run(["bash"], input=text, env=env, cwd=tmp_path, text=True, timeout=60)
    assert done.returncode == ends
    assert ("requeue 7" in (tmp_path / "calls").read_text()) == requeued
    assert not list(left.iterdir())


@pytest.mark.parametrize("rank", [0, 1])
def test_the_first_rank_writes_its_exit_code_to_the_scripts_file(rank, tmp_path, monkeypatch):
    place = f"RANK={rank} LOCAL_RANK={rank} WORLD_SIZE=2 LOCAL_WORLD_SIZE=2"
    for word in (*place.split(), "MASTER_ADDR=localhost", "MASTER_PORT=1"):
        monkeypatch.setenv(*word.split("="))
    monkeypatch.setenv("TORCHRL_DIST_EXIT_FILE", str(tmp_path / "code"))
    assert main(["train", "apex", "--envs-per-collector", "none"]) == 2
    assert not (tmp_path / "code").exists()  # the script makes it
    (tmp_path / "code").touch()
    assert main(["train", "apex", "--envs-per-collector", "none"]) == 2
    assert (tmp_path / "code").read_text() == ("2" if rank == 0 else "")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("", "no command"),
        ("--seeds 0-4 --collector-nodes 2 -- python t.py", "no arrays of heterogeneous jobs"),
        ("--seeds all -- python t.py", "--seeds: got 'all'"),
        ("--torchrun 2 --collector-nodes 2 -- python t.py", "--torchrun starts the same number"),
        ("--torchrun 2 -- train apex", "srun starts the ranks of a recipe"),
        ("--nodes 3 -- train apex --learners 2", "--learners: got 2"),
        ("--tasks-per-node 3 -- train apex --collectors 3", "--collectors: got 3"),
        ("-- train apex --collectors many", "many"),
        ("-- train apex --gamma 2", "--gamma: got 2.0"),
        ("-- train nothing", "invalid choice: 'nothing'"),
        ("--nodes 3 -- train ddppo --collectors 1", "divides the launcher's 3 ranks"),
        ("--seeds 0-4 -- train apex --output-dir x", "leave --seed and --output-dir out"),
        ("--collector-mem 2G -- python t.py", "--collector-nodes is missing"),
        ("--nodes 0 -- python t.py", "--nodes"),
        ("--time soon -- python t.py", "--time: got 'soon', expected one of Slurm's forms"),
        ("--time 8h -- python t.py", "--time: got '8h'"),
        ("--time 1:2:3:4 -- python t.py", "--time: got '1:2:3:4'"),
        ("--time -5 -- python t.py", "--time"),
        ("--time 00:00 -- python t.py", "which Slurm reads as no limit"),
        ("--time 2 -- python t.py", "stopped 120 s before its limit, but --time 2 is only 120 s"),
        ("--time 00:10:00 --signal-s 900 -- python t.py", "--time 00:10:00 is only 600 s"),
        ("--requeues -1 -- python t.py", "got '-1', expected a whole number, at least 0"),
        ("--nodes two -- python t.py", "got 'two', expected a whole number, at least 1"),
        ("--seeds 4-0 -- python t.py", "got 4-0, expected the lower number first"),
        ("--signal-s 70000 --time 2-0 -- python t.py", "expected at most 65535"),
    ],
)
def test_a_job_that_would_fail_in_the_queue_is_refused(arguments: str, says: str, capsys) -> None:
    assert main(["slurm", *arguments.split()]) == 2
    said = capsys.readouterr()
    assert says in said.err and said.out == "" and said.err.count("\n") == 1


@pytest.mark.parametrize(
    ("time", "seconds"),
    [
        ("90", 5400), ("90:30", 5430), ("04:00:00", 14400), ("2-12", 216000), ("1-0:30", 88200),
        ("1-02:03:04", 93784), ("UNLIMITED", float("inf")), ("infinite", float("inf")),
    ],
)  # fmt: skip
def test_a_time_limit_is_read_as_slurm_reads_it(time: str, seconds: float) -> None:
    assert seconds_of(time) == seconds
    assert f"--time={time}" in script(Job(("python", "t.py"), time=time))


def test_the_command_line_makes_the_job(capsys: pytest.CaptureFixture) -> None:
    line = "slurm --python python -- train apex --env CartPole-v1".split()
    assert main(line) == 0
    assert capsys.readouterr().out == (GOLDEN / "apex.sh").read_text()
    line = (
        "slurm --gpus 1 --cpus-per-task 8 --partition gpu --collector-nodes 2 --interface ib0 "
        "--collector-cpus-per-task 32 --collector-partition cpu --collector-mem 0"
    ).split()
    line += ["--setup", "source .venv/bin/activate", "--sbatch=--account=lab"]
    assert main([*line, "--", "python", "train.py", "--note", "it's quoted"]) == 0
    golden = (GOLDEN / "gpu-learner-two-cpu-nodes.sh").read_text()
    assert capsys.readouterr().out == golden
    assert main(["slurm", "--collector-nodes", "1", "--", "python", "t.py", "--", "--nodes"]) == 0
    assert "python t.py -- --nodes :" in capsys.readouterr().out
    for recipe in ("impala", "apex"):  # over nodes, a buffer is in their memory
        assert main(["slurm", "--collector-nodes", "2", "--", "train", recipe]) == 0
        text = capsys.readouterr().out
        assert text.count(f"-m torchrl_dist train {recipe}") == 2 and "replay" not in text


def test_submit_without_slurm_is_an_error(capsys, monkeypatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert main(["slurm", "--submit", "--", "python", "train.py"]) == 2
    assert "sbatch is not installed" in capsys.readouterr().err


# ---- on a real Slurm


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., subprocess.Popen]]:
    if slurm.missing() is not None:
        pytest.skip(f"no Slurm here: {slurm.missing()}")
    with slurm.on_three_hosts(tmp_path_factory.mktemp("cluster") / "slurm") as run:
        yield run


class Submitted:
    """A job as its user sees it. Its output is ``folder/out``."""

    def __init__(self, run: Callable, folder: Path, arguments: list[str]) -> None:
        self._run, self.folder = run, folder
        command = [sys.executable, "-m", "torchrl_dist", "slurm", "--submit"]
        command += [f"--sbatch=--output={folder}/out", f"--sbatch=--chdir={folder}", *arguments]
        self.id = self._ask(command).strip()
        assert self.id.isdigit(), self.id

    def _ask(self, command: list[str]) -> str:
        asked = self._run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        return asked.communicate(timeout=60)[0]

    def said(self) -> str:
        out = self.folder / "out"
        return out.read_text() if out.exists() else ""

    def state(self) -> str:
        return self._ask(["squeue", "-h", "-j", self.id, "-t", "all", "-o", "%T"]).split("\n")[0]

    def until(self, condition: Callable[[], bool], what: str) -> None:
        wait_until(condition, lambda: f"{what}; {self.state()}\n{self.said()}", 150)

    def signal(self, name: str, *more: str) -> None:
        assert self._ask(["scancel", f"--signal={name}", *more, self.id]) == ""

    def cancel(self) -> None:
        assert self._ask(["scancel", self.id]) == ""

    def start_again(self) -> None:
        """Start a requeued job now. Slurm would wait for two minutes, until its end is over."""

        def over() -> bool:
            jobs = self._ask(["squeue", "-h", "-t", "all", "-j", self.id, "-o", "%T"]).split()
            nodes = self._ask(["sinfo", "-h", "-N", "-o", "%T"]).split()
            return set(jobs) == {"PENDING"} and set(nodes) == {"idle"}

        self.until(over, "requeue")
        time.sleep(1)  # Slurm counts in seconds
        self._ask(["scontrol", "update", f"JobId={self.id}", "StartTime=now"])


def test_apex_is_stopped_by_usr1_queued_again_and_goes_on_to_its_end(run, tmp_path: Path) -> None:
    toy = [*TOY, "--total-frames", "12_000", "--eval-interval-frames", "100_000"]
    apex = ["--", "train", "apex", *toy, "--output-dir", "run", "--collectors", "1"]
    job = Submitted(run, tmp_path, ["--requeues=1", *apex])
    job.until(progress(tmp_path / "run"), "progress")
    job.signal("USR1")
    job.until(lambda: "stopped_by" in job.said(), "result")
    job.start_again()
    job.until(lambda: job.state() in ("COMPLETED", "FAILED"), "end")
    results = [line.partition("{")[2] for line in job.said().splitlines() if '"frames":' in line]
    assert len(results) == 2, job.said()
    first, second = (json.loads("{" + each) for each in results)
    assert first["stopped_by"] == "SIGUSR1" and first["frames"] < 12_000, job.said()
    assert second["stopped_by"] is None and second["resumes"] == 1 and second["frames"] == 12_000
    assert job.state() == "COMPLETED", job.said()
    assert [list(host.shm.iterdir()) for host in run.network] == [[], [], []]  # released


TASK = """
echo "$SLURM_PROCID $SLURMD_NODENAME $MASTER_ADDR ${SLURM_RESTART_COUNT:-0}" >>tasks
if [ "${SLURM_RESTART_COUNT:-0}" = "$1" ]; then exit 0; fi
if [ "$SLURM_PROCID" = 0 ]; then trap 'exit 138' USR1; else trap 'exit 0' USR1 TERM; fi
touch "up$SLURM_PROCID-${SLURM_RESTART_COUNT:-0}"
for _ in $(seq 600); do sleep 0.1; done
exit 1
"""


def tasks_of(job: Submitted) -> list[list[str]]:
    return sorted(line.split() for line in (job.folder / "tasks").read_text().splitlines())


def test_a_heterogeneous_job_has_rank_0_on_the_first_component_and_is_requeued(run, tmp_path):
    (tmp_path / "task.sh").write_text(TASK)
    both = ["--partition=gpu", "--collector-nodes=2", "--collector-partition=cpu"]
    job = Submitted(run, tmp_path, [*both, "--", "bash", "task.sh", "1"])
    job.until(lambda: len(list(tmp_path.glob("up*-0"))) == 3, "tasks")
    job.signal("USR1")
    job.start_again()
    job.until(lambda: len(tasks_of(job)) == 6, "second start")
    job.until(lambda: job.state() in ("COMPLETED", "FAILED"), "end")
    hosts = {rank: {row[1] for row in tasks_of(job) if row[0] == rank} for rank in "012"}
    assert hosts["0"] == {"host2"} and hosts["1"] | hosts["2"] == {"host0", "host1"}
    assert {row[2] for row in tasks_of(job)} == {"host2"}  # MASTER_ADDR
    assert job.state() == "COMPLETED", job.said()


def test_a_job_is_not_requeued_beyond_its_limit_nor_after_it_was_cancelled(run, tmp_path) -> None:
    (tmp_path / "task.sh").write_text(TASK)
    job = Submitted(run, tmp_path, ["--requeues=1", "--", "bash", "task.sh", "9"])
    job.until(lambda: (tmp_path / "up0-0").exists(), "first start")
    job.signal("USR1")
    job.start_again()
    job.until(lambda: (tmp_path / "up0-1").exists(), "second start")
    job.signal("USR1")
    job.until(lambda: job.state() == "FAILED", "end")
    assert "was already requeued 1 times" in job.said()
    (tmp_path / "tasks").unlink()
    (tmp_path / "up0-0").unlink()
    ended = Submitted(run, tmp_path, ["--", "bash", "task.sh", "9"])
    ended.until(lambda: (tmp_path / "up0-0").exists(), "start")
    ended.cancel()
    ended.until(lambda: ended.state() == "CANCELLED", "end")
    time.sleep(1)
    assert ended.state() == "CANCELLED" and len(tasks_of(ended)) == 1


RANK = """
import os, pathlib, signal, sys, time
rank, restarts = os.environ["RANK"], os.environ.get("SLURM_RESTART_COUNT", "0")
pathlib.Path(f"rank{rank}-{restarts}").write_text(os.environ["WORLD_SIZE"])
if restarts == "1":
    sys.exit(0)
def stop(number, frame):
    pathlib.Path(f"stopped{rank}").write_text(str(number))
    sys.exit(1)
signal.signal(signal.SIGUSR1, stop)
pathlib.Path(f"up{rank}").touch()
time.sleep(60)
"""


def test_ranks_of_torchrun_are_stopped_and_queued_again(run, tmp_path: Path) -> None:
    (tmp_path / "rank.py").write_text(RANK)
    (tmp_path / "torchrun").write_text(
        f'#!/bin/sh\nexec {sys.executable} -m torch.distributed.run "$@"\n'
    )
    (tmp_path / "torchrun").chmod(0o755)
    both = ["--nodes=2", "--torchrun=1", f"--setup=PATH={tmp_path}:$PATH"]
    job = Submitted(run, tmp_path, [*both, "--", "python", "rank.py"])
    job.until(lambda: len(list(tmp_path.glob("up?"))) == 2, "ranks")
    job.signal("USR1", "--batch")  # as B:USR1@ does: to the script alone
    job.start_again()
    job.until(lambda: job.state() in ("COMPLETED", "FAILED"), "end")
    assert job.state() == "COMPLETED", job.said()
    assert [(tmp_path / f"stopped{rank}").read_text() for rank in (0, 1)] == ["10", "10"]
    assert [(tmp_path / f"rank{rank}-1").read_text() for rank in (0, 1)] == ["2", "2"]


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    for name, job in VARIANTS.items():
        (GOLDEN / f"{name}.sh").write_text(script(job))
