"""Start the command as a user would, and look at its processes and its result."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import psutil
import pytest

from tests import warm
from tests.spawn import is_helper
from torchrl_dist import runtime
from torchrl_dist.checkpoint import load_checkpoint
from torchrl_dist.cli import main
from torchrl_dist.errors import CheckpointError


class Endless(gymnasium.Env):
    """One reward a step, no end."""

    observation_space = gymnasium.spaces.Box(-1, 1, (4,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(4, np.float32), {}

    def step(self, action):
        return np.zeros(4, np.float32), 1.0, False, False, {}


TOY = [
    *("--env", "CartPole-v1", "--envs-per-collector", "4", "--frames-per-batch", "128"),
    *("--total-frames", "3000", "--learning-starts", "200", "--capacity", "2000"),
    *("--updates-per-batch", "2", "--batch-size", "32", "--hidden", "16"),
    *("--eval-interval-frames", "1000", "--eval-episodes", "3", "--checkpoint-interval-s", "0.2"),
]
ENDLESS = [*TOY, "--total-frames", "100_000_000"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
DEADLINE_S = 100.0


@dataclass
class Job:
    """A running command. ``result`` is the JSON object of its last stdout line."""

    process: warm.Running
    stdout: Path
    stderr: Path

    def wait(self, timeout_s: float = DEADLINE_S) -> int:
        """Its exit code. Raises if it does not end, with what it said."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still runs after {timeout_s} s\n{self.said()}") from None

    def said(self) -> str:
        return f"--- stdout\n{self.stdout.read_text()}\n--- stderr\n{self.stderr.read_text()}"

    @property
    def result(self) -> dict[str, Any]:
        lines = self.stdout.read_text().splitlines()
        assert lines, self.said()
        return json.loads(lines[-1])

    def descendants(self) -> list[psutil.Process]:
        with contextlib.suppress(psutil.NoSuchProcess):
            return psutil.Process(self.process.pid).children(recursive=True)
        return []

    def until(self, condition: Callable[[], bool], what: str) -> None:
        """Wait for something that the running job does."""
        give_up = time.monotonic() + DEADLINE_S
        while not condition():
            assert self.process.poll() is None, f"ended before {what}\n{self.said()}"
            assert time.monotonic() < give_up, f"no {what} in {DEADLINE_S} s\n{self.said()}"
            time.sleep(0.05)


@contextlib.contextmanager
def started(
    arguments: Sequence[str],
    cwd: Path,
    *,
    launcher: Sequence[str] = (sys.executable,),
    pipe: int | None = None,
) -> Iterator[Job]:
    """``launcher -m torchrl_dist arguments``; ends with everything it started. What it says goes
    to the ``pipe``, if there is one, which is closed here."""
    out, err = cwd / "stdout.txt", cwd / "stderr.txt"
    environment = {
        k: v for k, v in os.environ.items() if not k.startswith(("TORCHELASTIC", "RANK"))
    }
    environment["OMP_NUM_THREADS"] = "1"
    err.touch()
    with open(out, "w") as stdout, open(err if pipe is None else pipe, "w") as stderr:
        process = warm.start(
            [*launcher, "-m", "torchrl_dist", *arguments],
            cwd=cwd,
            env=environment,
            stdout=stdout,
            stderr=stderr,
        )
    with ending(Job(process, out, err)) as job:
        yield job


@contextlib.contextmanager
def ending(job: Job) -> Iterator[Job]:
    """The job and all that it has started end with the block."""
    try:
        yield job
    finally:
        known = job.descendants()
        if job.process.poll() is None:
            job.process.kill()
            job.process.wait()
        for left in known:
            with contextlib.suppress(psutil.NoSuchProcess):
                left.kill()


def finished(arguments: Sequence[str], cwd: Path, **kwargs: Any) -> Job:
    """Run to the end; the job must succeed and leave no process behind."""
    with started(arguments, cwd, **kwargs) as job:
        seen: set[psutil.Process] = set()

        def ended() -> bool:
            seen.update(job.descendants())
            return job.process.poll() is not None

        give_up = time.monotonic() + DEADLINE_S
        while not ended():
            assert time.monotonic() < give_up, f"still runs\n{job.said()}"
            time.sleep(0.1)
        assert job.process.returncode == 0, job.said()
        assert_gone(list(seen))
    return job


def finished_here(
    arguments: Sequence[str], cwd: Path, fork_server: runtime.ForkServer
) -> dict[str, Any]:
    """The result of the same command in this process, with children of a server that is there.

    For what a run makes of its folder and its options: the imports of a fresh process, and those
    of its server, cost more than a toy run.
    """
    with contextlib.ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.chdir(cwd)
        patch.setattr(runtime, "ForkServer", lambda **_: contextlib.nullcontext(fork_server))
        printed = stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        assert main(arguments) == 0
    return json.loads(printed.getvalue().splitlines()[-1])


def assert_gone(processes: Sequence[psutil.Process], timeout_s: float = 10.0) -> None:
    """Within the time, none of them runs (a zombie does not)."""
    _, alive = psutil.wait_procs(processes, timeout=timeout_s)
    left = []
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.status() != psutil.STATUS_ZOMBIE:
                left.append(f"{process.pid} {' '.join(process.cmdline())[:200]}")
    assert not left, f"still running after {timeout_s} s: {left}"


def progress(output: Path, *, more_than: int = 0) -> Callable[[], bool]:
    """Whether the run in ``output`` has saved ``more_than`` that many gradient steps."""

    def learning() -> bool:
        with contextlib.suppress(CheckpointError):
            return load_checkpoint(output / "checkpoint.pt").counters["updates"] > more_than
        return False

    return learning


def workers_of(job: Job) -> list[psutil.Process]:
    """Ranks and collectors: processes without children except helpers."""

    return [
        process
        for process in job.descendants()
        if not is_helper(process) and all(map(is_helper, process.children()))
    ]
