"""The pulse of a job: its file, and warnings about stalled processes."""

from __future__ import annotations

import importlib
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import gymnasium
import pytest

from tests.spawn import wait_until
from torchrl_dist import RPCBatchedCollector, own_files
from torchrl_dist.runtime import local_cluster, pulse
from torchrl_dist.runtime.pulse import Progress
from torchrl_dist.runtime.world import process_stamp


def test_a_stalled_process_is_reported_once_until_it_moves_again() -> None:
    progress = Progress(60.0)
    assert progress.stalled({"a": 1, "b": 1}, 0.0) == []
    assert progress.stalled({"a": 1, "b": 2}, 59.0) == []
    assert progress.stalled({"a": 1, "b": 2}, 60.0) == ["a"]
    assert progress.stalled({"a": 1, "b": 2}, 118.0) == []
    assert progress.stalled({"a": 1, "b": 2}, 119.0) == ["b"]
    assert progress.stalled({"a": 2, "b": 2}, 200.0) == []
    assert progress.stalled({"a": 2, "b": 2}, 260.0) == ["a"]


def test_seconds_in_which_progress_could_not_be_seen_do_not_count() -> None:
    progress = Progress(60.0)
    progress.stalled({"a": 1}, 0.0)
    progress.excuse(["a", "unknown"], 50.0)
    assert progress.stalled({"a": 1}, 109.0) == []
    assert progress.stalled({"a": 1}, 110.0) == ["a"]


def test_a_place_in_an_installed_package_is_reported(tmp_path: Path, monkeypatch) -> None:
    """The package's file is then next to those of torch."""
    folder = tmp_path / "lib/python3.11/site-packages/other_learner"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("def update(step):\n    return step()\n")
    (folder / "envs.py").write_text("import threading\n\ndef wait_for(event):\n    event.wait()\n")
    monkeypatch.syspath_prepend(str(folder.parent))
    learner = importlib.import_module("other_learner")
    envs = importlib.import_module("other_learner.envs")
    event = threading.Event()
    thread = threading.Thread(target=learner.update, args=(lambda: envs.wait_for(event),))
    thread.start()
    try:
        frame = lambda: sys._current_frames()[thread.ident]  # noqa: E731
        wait_until(lambda: "wait_for" in pulse._place(frame()))
        place = pulse._place(frame())
    finally:
        event.set()
        thread.join()
    assert place.startswith("it is in wait_for (envs.py:4) < <lambda> (test_pulse.py:"), place
    assert "< update (__init__.py:2)" in place


class Slow(gymnasium.Env):
    """Sleeps in its 300th step."""

    observation_space = gymnasium.spaces.Box(-1, 1, (2,))
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        self.steps = 0
        return self.observation_space.low, {}

    def step(self, action):
        self.steps += 1
        if self.steps == 300:
            time.sleep(4.0)
        return self.observation_space.low, 0.0, False, False, {}


def pulses() -> list[Path]:
    name = f"{pulse.PREFIX}{os.getpid()}-*.json"
    return [path for folder in own_files.user_folders() for path in folder.glob(name)]


def test_a_worker_in_a_slow_step_is_named_with_its_place(fork_server, caplog, monkeypatch) -> None:
    monkeypatch.setattr(pulse, "_EVERY_S", 0.1)
    caplog.set_level(logging.WARNING, "torchrl_dist")
    with local_cluster({"learner": 1, "collector": 2}, fork_server=fork_server) as session:
        pid = session.pid_of(session.of_role("collector")[1])
        with RPCBatchedCollector(
            Slow, session=session, num_envs=1, frames_per_batch=40, total_frames=1000,
            max_policy_lag=0,
        ) as collector:  # fmt: skip
            collector._pulse._progress.patience_s = 1.0
            batches = iter(collector)
            next(batches)
            (path,) = wait_until(pulses)
            assert oct(path.stat().st_mode)[-3:] == "600"
            told = json.loads(path.read_text())
            assert [each["name"] for each in told["processes"]] == [
                "learner0", "collector0", "collector1",
            ]  # fmt: skip
            assert told["processes"][2]["pid"] == pid and told["frames"] >= 40
            caplog.clear()
            for _ in batches:  # until a step sleeps, and on
                pass
            asleep = [r.getMessage() for r in caplog.records if r.name == "torchrl_dist"]
            # both sleep; each is reported once
            assert len(asleep) == 2 and "step (test_pulse.py:" in asleep[0], asleep
            assert "collector0 made no progress for 1 s (pid" in " ".join(asleep)
            assert json.loads(path.read_text())["frames"] <= 1000
        assert pulses() == []


def test_a_stopped_worker_and_a_learner_that_does_something_else_are_reported_differently(
    fork_server, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pulse, "_EVERY_S", 0.1)
    monkeypatch.setattr(pulse, "_ANSWER_S", 0.5)
    caplog.set_level(logging.WARNING, "torchrl_dist")

    def said() -> list[str]:
        return [r.getMessage() for r in caplog.records if r.name == "torchrl_dist"]

    with local_cluster({"learner": 1, "collector": 2}, fork_server=fork_server) as session:
        pid = session.pid_of(session.of_role("collector")[0])
        with RPCBatchedCollector(
            "CartPole-v1", session=session, frames_per_batch=32, max_policy_lag=0
        ) as collector:
            collector._pulse._progress.patience_s = 0.5
            batches = iter(collector)
            next(batches)
            wait_until(said)  # the learner waits here
            assert said()[0].startswith(
                "learner0 made no progress for 0.5 s: it is in wait_until ("
            )
            assert len(said()) == 1
            caplog.clear()
            os.kill(pid, signal.SIGSTOP)
            try:
                timer = subprocess.Popen(["sh", "-c", f"sleep 3; kill -CONT {pid}"])
                next(batches)
                next(batches)
            finally:
                os.kill(pid, signal.SIGCONT)
                timer.wait()
            (stopped,) = [each for each in said() if f"(pid {pid} on" in each]
            assert f"it is stopped; kill -CONT {pid} continues it" in stopped
    assert pulses() == []


def test_the_file_of_a_killed_job_is_removed_by_the_next_and_of_no_other(tmp_path, monkeypatch):
    monkeypatch.setattr(own_files, "_MEMORY", str(tmp_path))
    folder = own_files.user_folder()
    with subprocess.Popen(["sleep", "60"]) as dead:
        stamp = process_stamp(dead.pid)
        dead.kill()
    names = {
        f"{pulse.PREFIX}{stamp}-0.json": False,
        f".{pulse.PREFIX}{stamp}-0.json.tmp": False,
        f"{pulse.PREFIX}{process_stamp(os.getpid())}-0.json": True,
        f"{pulse.PREFIX}notes": True,
        "notes": True,
    }
    for name in names:
        (folder / name).touch()
    pulse.remove_pulses_of_the_dead()
    assert {name: (folder / name).exists() for name in names} == names
