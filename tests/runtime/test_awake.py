"""Deadlines stop with the process that waits."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError

import pytest

from torchrl_dist import ConfigurationError, DeadlineError, local_cluster, session
from torchrl_dist.learn import Ranks
from torchrl_dist.runtime import awake, current_session


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> awake._Clock:
    clock = awake._Clock()
    for name, method in (
        ("awake", clock.now),
        ("call_at", clock.call_at),
        ("forget", clock.forget),
    ):
        monkeypatch.setattr(awake, name, method)
    clock.start()
    return clock


def jump(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Simulate the state after a stop of this length."""
    now = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: now() + seconds)


def test_a_stop_does_not_count(clock: awake._Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    before = awake.awake()
    jump(monkeypatch, 1000)
    seen = [awake.awake() - before]
    time.sleep(2 * awake._TICK_S)  # the clock ticks
    seen.append(awake.awake() - before)
    assert 0 <= seen[0] <= seen[1] < 100


@pytest.mark.parametrize("timeout_s", [0, -1, math.nan, math.inf, 1e300])
def test_an_invalid_deadline_is_refused(timeout_s: float) -> None:
    for enter in (
        lambda: session(timeout_s=timeout_s).__enter__(),
        lambda: local_cluster({"learner": 2}, timeout_s=timeout_s).__enter__(),
        lambda: Ranks(timeout_s=timeout_s),
    ):
        with pytest.raises(ConfigurationError, match="timeout_s=.* at most 1e"):
            enter()


def test_calls_are_made_when_due_and_not_after_they_are_forgotten(clock: awake._Clock) -> None:
    made: list[str] = []
    done = threading.Event()
    forgotten = awake.call_at(awake.awake() + 0.02, lambda: made.append("forgotten"))
    assert awake.forget(forgotten) and not awake.forget(forgotten)
    awake.call_at(awake.awake() + 0.02, lambda: made.append("raises") or 1 / 0)
    awake.call_at(awake.awake() + 0.05, done.set)
    assert done.wait(20) and made == ["raises"]


def test_a_result_is_waited_for_after_a_stop(clock: awake._Clock, monkeypatch) -> None:
    future: Future[int] = Future()
    with pytest.raises(FutureTimeoutError):
        awake.result_of(future, 0.01)
    threading.Timer(0.1, lambda: (jump(monkeypatch, 1000), future.set_result(7))).start()
    assert awake.result_of(future, 100) == 7


def test_a_forked_child_has_a_clock_of_its_own(clock: awake._Clock) -> None:
    child = os.fork()
    if child == 0:
        done = threading.Event()
        awake.call_at(awake.awake() + 0.01, done.set)
        os._exit(0 if done.wait(20) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_caller_that_was_stopped_gets_its_answer(fork_server) -> None:
    def stop(process: int) -> None:  # for longer than the caller's deadline
        os.kill(process, signal.SIGSTOP)
        time.sleep(2.0)
        os.kill(process, signal.SIGCONT)
        time.sleep(0.1)

    with local_cluster({"learner": 1, "other": 2}, fork_server=fork_server) as job:
        caller, other = job.peers[1:]

        def call() -> None:
            current_session().call(other, stop, os.getpid(), timeout_s=1.5)

        assert job.call(other, abs, -1) == 1
        job.call(caller, call)
        with pytest.raises(DeadlineError, match=r"did not answer sleep within 0.2 s"):
            job.call(other, time.sleep, 0.4, timeout_s=0.2)
