"""The collector in programs that are told to stop."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import gymnasium
import psutil
import pytest

from tests import warm
from tests.collect.envs import Counter, Paced
from tests.spawn import run_job
from torchrl_dist.collect import RPCBatchedCollector
from torchrl_dist.replay import RateLimiter, SharedMemmapStorage, SharedReplayBuffer, replay_buffer
from torchrl_dist.runtime import ForkServer, local_cluster, session

FRAMES = 32


def collect_until_stopped(folder: str) -> None:
    with session({"learner": 1, "collector": -1}, timeout_s=30) as me:
        if me.role != "learner":
            me.serve()
            return
        gymnasium.register("OnlyTheLearnersOwn-v0", lambda: Paced(step_s=0.002))
        options = {"frames_per_batch": FRAMES, "num_envs": 2, "env_processes": 2}
        with RPCBatchedCollector(
            "OnlyTheLearnersOwn-v0", session=me, max_policy_lag=1, **options
        ) as collector:
            frames = 0
            for batch in collector:
                frames += batch.numel()
                Path(folder, "collecting").touch()
                if me.stop_requested:
                    break
            assert collector.report.total_frames == frames
            assert not collector.report.lost_workers and not collector.report.replaced
        Path(folder, "stopped").write_text(str(frames))


def test_after_sigterm_the_learner_ends_in_order_and_nothing_is_left(tmp_path: Path) -> None:
    def when_it_collects(agent: warm.Running) -> None:
        def wait() -> None:
            while not (tmp_path / "collecting").exists() and agent.poll() is None:
                time.sleep(0.05)
            agent.terminate()

        threading.Thread(target=wait, daemon=True).start()

    job = run_job(
        collect_until_stopped, {"folder": str(tmp_path)}, nproc=2, on_start=when_it_collects
    )  # it also fails where a process is left
    frames = int((tmp_path / "stopped").read_text())
    assert frames >= FRAMES and frames % FRAMES == 0, str(job)
    for text in job.logs[0].values():
        assert "Traceback" not in text and "Warning: " not in text, str(job)


INTERRUPTED = """
import pathlib
import time

import gymnasium
import psutil

from torchrl_dist import RPCBatchedCollector, local_cluster


class Hangs(gymnasium.Wrapper):
    def step(self, action):
        if {hangs}:
            pathlib.Path("hangs").touch()
            time.sleep(600)
        return self.env.step(action)


def make():
    return Hangs(gymnasium.make("CartPole-v1"))


if __name__ == "__main__":
    with local_cluster({{"learner": 1, "collector": 2}}) as me:
        with RPCBatchedCollector(
            make, None, session=me, frames_per_batch=40, env_processes={env_processes}, timeout_s=60
        ) as collector:
            print(*(p.pid for p in psutil.Process().children(recursive=True)), flush=True)
            for batch in collector:  # its iteration ends by itself
                pass
            print("stopped", me.stop_signal.name, collector.report.lost_workers, flush=True)
"""


@pytest.mark.parametrize(("env_processes", "hangs"), [(0, False), (2, True)])
def test_ctrl_c_ends_a_collector_and_all_its_processes(tmp_path, env_processes, hangs) -> None:
    script = tmp_path / "collects.py"
    script.write_text(INTERRUPTED.format(env_processes=env_processes, hangs=hangs))
    printed = tmp_path / "printed"
    with printed.open("w") as output:
        learner = warm.start(
            [sys.executable, str(script)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            stdout=output,
            cwd=tmp_path,
        )
    while not (said := printed.read_text()).endswith("\n"):
        assert learner.poll() is None
        time.sleep(0.05)
    others = [psutil.Process(int(pid)) for pid in said.split()]
    assert len(others) >= 3 + 2 * env_processes  # two ranks and their server
    while hangs and not (tmp_path / "hangs").exists():  # at most for this test's time limit
        time.sleep(0.05)
    os.killpg(learner.pid, signal.SIGINT)  # as a terminal does
    if hangs:  # the first one asks, the second one does not
        time.sleep(0.5)
        os.killpg(learner.pid, signal.SIGINT)
    code = learner.wait(40)
    if hangs:
        assert code != 0
    else:
        assert (printed.read_text(), code) == (said + "stopped SIGINT ()\n", 0)
    _, alive = psutil.wait_procs(others, timeout=5)
    assert not alive


class Noted(Counter):
    """Leaves a file when it is closed."""

    def __init__(self, folder: Path) -> None:
        super().__init__(5)
        self.folder = folder

    def close(self) -> None:
        (self.folder / f"closed-{os.getpid()}-{id(self)}").touch()


@pytest.mark.parametrize(
    ("collectors", "env_processes", "by_rpc"),
    [(0, 0, False), (2, 0, False), (1, 2, False), (2, 0, True)],
    ids=["this process", "workers", "env processes", "by RPC"],
)
def test_a_limiter_that_holds_the_writers_does_not_hold_a_shutdown(
    fork_server: ForkServer, tmp_path: Path, collectors: int, env_processes: int, by_rpc: bool
) -> None:
    """Without sampling, waiting rows are dropped and the envs closed. Before this was so, they
    waited for the buffer's deadline, which is later than the shutdown's."""
    limiter = RateLimiter(min_size_to_sample=8, samples_per_insert=1.0, error_buffer=16.0)
    roles = {"learner": 1, "collector": collectors} if collectors else {"learner": 1}
    with local_cluster(roles, fork_server=fork_server) as session:
        if by_rpc:
            buffer = replay_buffer(
                session, capacity=1000, batch_size=8, uniform=True, limiter=limiter,
                shortcut=False, timeout_s=600,
            )  # fmt: skip
        else:
            storage = SharedMemmapStorage(
                1000, scratch_dir=tmp_path / "replay", limiter=limiter, timeout_s=600
            )
            buffer = SharedReplayBuffer(storage=storage, batch_size=8)
        options = {"num_envs": 2, "env_processes": env_processes, "frames_per_batch": 8}
        collector = RPCBatchedCollector(
            lambda: Noted(tmp_path), session=session, replay_buffer=buffer, **options
        )
        collector.start()
        before = -1
        while before < 8 or buffer.storage.write_count != before:  # until no writer makes progress
            before = buffer.storage.write_count
            assert collector.is_running() and before < 1000
            time.sleep(0.3)
        rows = buffer.storage.write_count
        collector.async_shutdown(timeout=8)
        assert not collector.is_running()
        envs = 2 * max(1, collectors) * max(1, env_processes)
        assert len(list(tmp_path.glob("closed-*"))) == envs
        assert buffer.storage.write_count == rows
        assert len(buffer.sample()) == 8  # as before
        buffer.storage.close()


LEAVES = """
import sys, time
from torchrl_dist import RPCBatchedCollector, SharedMemmapStorage, SharedReplayBuffer, local_cluster

with local_cluster({"learner": 1, "collector": 1}) as session:
    storage = SharedMemmapStorage(1000, scratch_dir=sys.argv[1])
    buffer = SharedReplayBuffer(storage=storage, batch_size=8)
    collector = RPCBatchedCollector(
        "CartPole-v1", None, session=session, frames_per_batch=8, replay_buffer=buffer
    )
    collector.start()
    while not len(buffer):
        time.sleep(0.01)
    if sys.argv[2] == "fails":
        raise ZeroDivisionError("the learner's own")
for _ in range(500):
    if not collector.is_running():
        break
    time.sleep(0.01)
collector.async_shutdown()
print("left")
"""


@pytest.mark.parametrize("how", ["leaves", "fails"])
def test_a_session_that_is_left_ends_background_collection_without_a_traceback_of_its_own(
    tmp_path: Path, how: str
) -> None:
    out, err = tmp_path / "out", tmp_path / "err"
    with out.open("w") as stdout, err.open("w") as stderr:
        command = [sys.executable, "-c", LEAVES, str(tmp_path / "replay"), how]
        code = warm.start(command, stdout=stdout, stderr=stderr).wait(80)
    errors = err.read_text()
    if how == "leaves":
        assert (code, out.read_text(), errors) == (0, "left\n", "")
    else:
        assert code == 1 and errors.count("Traceback") == 1, errors
        assert errors.splitlines()[-1] == "ZeroDivisionError: the learner's own"


def test_a_program_that_ends_within_an_iteration_ends_silently() -> None:
    code = """
from torchrl_dist import RPCBatchedCollector
collector = RPCBatchedCollector("CartPole-v1", frames_per_batch=8)
batches = iter(collector)
assert next(batches).numel() == 8
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
