"""The crew, with workers that answer when the test tells them."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from torchrl_dist.collect.learner.budget import FrameBudget
from torchrl_dist.collect.learner.crew import Crew, Worker
from torchrl_dist.collect.learner.readiness import WaitAll
from torchrl_dist.collect.worker.worker import RolloutStats
from torchrl_dist.errors import RemoteError

STEPS = 4


class Hand:
    """A handle whose rollouts are answered at once, or by ``answer``."""

    def __init__(self, index: int, prompt: bool) -> None:
        self.index, self.prompt = index, prompt
        self.asked: list[tuple[dict[str, Any], Future]] = []

    def submit(self, method: str, *args: Any, timeout_s: float, **kwargs: Any) -> Future:
        assert method == "collect"
        self.asked.append((kwargs, Future()))
        if self.prompt:
            self.answer()
        return self.asked[-1][1]

    def answer(self, error: Exception | None = None, at: int = -1) -> None:
        asked, future = self.asked[at]
        shape = (asked["num_envs"], asked["steps"])
        if error is not None:
            future.set_exception(error)
            return
        rows = TensorDict({"request": torch.full(shape, asked["request"])}, shape)
        future.set_result((rows, RolloutStats(self.index, rows.numel(), num_envs=len(rows))))


def test_answers_that_overtake_each_other_are_delivered_in_the_order_of_their_requests() -> None:
    hand = Hand(0, False)
    worker = Worker(0, "worker0", hand, 1, STEPS, 1, {})
    crew = Crew([worker], [], FrameBudget(None, True), WaitAll(), 1)
    threading.Timer(0.1, lambda: (hand.answer(at=1), hand.answer(at=0))).start()
    numbers = [crew.gather(5.0)[0][1]["request"][0, 0].item() for _ in range(2)]
    assert numbers == [0, 1]


def test_a_learner_that_was_stopped_does_not_take_the_workers_for_hanging(monkeypatch) -> None:
    crew, (_, late) = crew_of_two(late_s=5.0)
    now = time.monotonic

    def resume() -> None:  # after a minute
        monkeypatch.setattr(time, "monotonic", lambda: now() + 60)
        with crew._cond:
            crew._cond.notify_all()
        time.sleep(0.1)
        late.answer()

    threading.Timer(0.1, resume).start()
    assert len(crew.gather(600.0)) == 2


def crew_of_two(late_s: float) -> tuple[Crew, list[Hand]]:
    """The second worker answers when it is told to, and counts as lost after ``late_s``."""
    hands = [Hand(0, True), Hand(1, False)]
    workers = [Worker(h.index, f"worker{h.index}", h, 1, STEPS, 0, {}) for h in hands]
    return Crew(workers, [], FrameBudget(None, True), WaitAll(), 1, late_s), hands


def test_a_worker_that_comes_back_begins_new_episodes() -> None:
    """Rows were dropped, so old episodes would have a gap."""
    crew, (_, late) = crew_of_two(late_s=0.05)
    with pytest.warns(UserWarning, match="worker_timeout_s=0.05"):
        assert [stats.worker_index for stats, _ in crew.gather(5.0)] == [0]
    late.answer()
    late.prompt = True
    assert not crew.lost
    while len(crew.gather(5.0)) == 1:  # a round that was planned without it
        pass
    crew.gather(5.0)
    assert [asked["anew"] for asked, _ in late.asked] == [False, True, False]


def test_an_exception_of_a_worker_that_was_given_up_is_raised_all_the_same() -> None:
    crew, (_, late) = crew_of_two(late_s=0.05)
    with pytest.warns(UserWarning, match="worker_timeout_s=0.05"):
        crew.gather(5.0)
    late.answer(RemoteError("no pole", peer="worker1", host="here", remote_traceback="step"))
    with pytest.raises(RemoteError, match="no pole"):
        crew.gather(5.0)
