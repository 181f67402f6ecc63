"""TorchRL's exploration type in calls that are interrupted, and in forked children."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torchrl.envs.utils import ExplorationType, exploration_type, set_exploration_type

from tests.collect.envs import Counter
from tests.replay.faults import end_of, start
from torchrl_dist.collect.loop import exploration
from torchrl_dist.collect.loop.exploration import Exploring
from torchrl_dist.collect.loop.rollout import make_rollout

RANDOM, MEAN, MODE = ExplorationType.RANDOM, ExplorationType.MEAN, ExplorationType.MODE
_INTERRUPTS = 1000


@pytest.fixture
def alarm() -> Iterator[Callable[[float], Any]]:
    """Return a function that raises KeyboardInterrupt here after some seconds, as Ctrl-C does."""

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    yield lambda seconds: signal.setitimer(signal.ITIMER_REAL, seconds)
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def test_wherever_a_call_is_interrupted_nothing_is_left_of_it(alarm: Any) -> None:
    outer, inner = Exploring(RANDOM, "a call"), Exploring(MEAN, "a call inside")

    def nested() -> None:
        assert exploration_type() is RANDOM
        inner.call(exploration_type)
        assert exploration_type() is RANDOM

    rng = random.Random(0)
    for _ in range(_INTERRUPTS):
        with set_exploration_type(MODE):
            with pytest.raises(KeyboardInterrupt):
                alarm(rng.uniform(2e-5, 2e-4))
                while True:
                    outer.call(nested)
            assert exploration_type() is MODE
        assert not exploration._now.calls and not exploration._now.waits
        assert not exploration._now.lock.locked()


def test_a_call_that_is_interrupted_as_it_waits_holds_up_no_other(alarm: Any) -> None:
    first, second = Exploring(RANDOM, "a policy"), Exploring(MEAN, "another")
    go, begun = threading.Event(), threading.Event()

    def hold() -> None:
        begun.set()
        go.wait(30)

    holder = threading.Thread(target=first.call, args=(hold,))
    holder.start()
    begun.wait(30)
    try:
        for _ in range(20):
            with pytest.raises(KeyboardInterrupt):
                alarm(0.005)
                second.call(exploration_type)
            assert not exploration._now.waits and not exploration.held_up()
            assert first.call(exploration_type) is RANDOM  # while the other one runs
    finally:
        go.set()
        holder.join(30)
    assert second.call(exploration_type) is MEAN
    assert exploration_type() is None


def test_a_forked_child_has_no_calls_and_no_type_of_other_threads() -> None:
    exploring = Exploring(RANDOM, "a policy")
    stop = threading.Event()

    def hammer() -> None:
        while not stop.is_set():
            exploring.call(time.sleep, 0)
            with exploration._now.lock:
                time.sleep(0)

    def child() -> None:
        assert exploration_type() is MODE
        assert Exploring(MEAN, "a policy").call(exploration_type) is MEAN
        assert exploration_type() is MODE

    threads = [threading.Thread(target=hammer, daemon=True) for _ in range(2)]
    with set_exploration_type(MODE):
        for thread in threads:
            thread.start()
        try:
            for _ in range(15):
                assert end_of(start(child), 20) == 0
        finally:
            stop.set()
            for thread in threads:
                thread.join(30)
        assert exploration_type() is MODE


def test_a_child_forked_by_a_policy_goes_on_under_its_type() -> None:
    def child() -> None:
        assert exploration_type() is RANDOM
        os._exit(7)

    exploring = Exploring(RANDOM, "a policy")
    assert exploring.call(lambda: end_of(start(child), 20)) == 7


@pytest.mark.parametrize("alone", [False, True])
def test_a_rollout_uses_its_type_and_restores_it_even_after_an_error(
    alone: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    in_env: list[Any] = []

    def policy(td: Any) -> Any:
        seen.append(exploration_type())
        if len(seen) == 20:
            raise ValueError("the policy failed")
        return td.set("action", torch.tensor([[1, 0, 0]]))

    class Env(Counter):
        def step(self, action: Any) -> Any:
            in_env.append(exploration_type())
            return super().step(action)

    with set_exploration_type(MODE):
        rollout = make_rollout(Env, policy, frames=8, exploration_type=MEAN, alone=alone)
        rollout.call_policy_once()
        for _ in range(2):
            rollout.run(8)
            assert exploration_type() is MODE
        with pytest.raises(ValueError, match="the policy failed"):
            rollout.run(8)
        assert exploration_type() is MODE and not exploration._now.calls
    assert set(seen) == {MEAN}
    assert set(in_env) == {MODE}  # a policy inside an env must not depend on where the env runs
