"""The collector in a job of torchrun."""

from __future__ import annotations

import subprocess
import threading
import time
from pathlib import Path

import gymnasium
import pytest

from tests.collect.envs import Counter
from tests.spawn import run_job
from torchrl_dist.collect import RPCBatchedCollector
from torchrl_dist.runtime import session

pytestmark = pytest.mark.timeout(90)
FRAMES = 32


class Slow(Counter):
    def step(self, action: object) -> object:
        time.sleep(0.002)
        return super().step(action)


def collect_until_stopped(folder: str, env_processes: int) -> None:
    with session({"learner": 1, "collector": -1}, timeout_s=30) as me:
        if me.role != "learner":
            me.serve()
            return
        gymnasium.register("OnlyTheLearnersOwn-v0", Slow)
        with RPCBatchedCollector(
            "OnlyTheLearnersOwn-v0",
            session=me,
            frames_per_batch=FRAMES,
            num_envs=2,
            env_processes=env_processes,
            max_policy_lag=1,
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


@pytest.mark.parametrize("env_processes", [0, 2])
def test_after_sigterm_the_learner_ends_in_order_and_nothing_is_left(
    tmp_path: Path, env_processes: int
) -> None:
    def when_it_collects(agent: subprocess.Popen) -> None:
        def wait() -> None:
            while not (tmp_path / "collecting").exists() and agent.poll() is None:
                time.sleep(0.05)
            agent.terminate()

        threading.Thread(target=wait, daemon=True).start()

    job = run_job(
        collect_until_stopped,
        {"folder": str(tmp_path), "env_processes": env_processes},
        nproc=3,
        on_start=when_it_collects,
    )  # it also fails where a process is left
    frames = int((tmp_path / "stopped").read_text())
    assert frames >= FRAMES and frames % FRAMES == 0, job
    for text in job.logs[0].values():
        assert "Traceback" not in text and "Warning: " not in text, job
