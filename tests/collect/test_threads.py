"""One env, one thread, from make to close, wherever the worker is."""

from __future__ import annotations

import asyncio
import gc
import signal
import sqlite3
import threading
import time
from typing import Any, ClassVar

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer

from tests.collect.envs import wait_for
from torchrl_dist.collect import RPCBatchedCollector
from torchrl_dist.errors import ConfigurationError, DeadlineError
from torchrl_dist.runtime import ForkServer, local_cluster


class Affine(gymnasium.Env):
    """Notes whether it is used in the thread that made it, and whether that is the main one.

    ``kind``: what it needs the one or the other for.
    """

    observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float64)
    action_space = spaces.Discrete(2)
    closed: ClassVar[list[tuple[bool, bool]]] = []

    def __init__(self, kind: str = "none") -> None:
        self.kind, self.t = kind, 0
        if kind == "sqlite":
            self.db = sqlite3.connect(":memory:")
        if kind == "asyncio":
            asyncio.set_event_loop(asyncio.new_event_loop())
        if kind == "signal":
            self.before = signal.signal(signal.SIGALRM, lambda *_: None)
        self.made_in = threading.get_ident()

    def places(self) -> tuple[bool, bool]:
        if self.kind == "sqlite":
            self.db.execute("select 1")
        if self.kind == "signal":
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, signal.getsignal(signal.SIGALRM))
        here = threading.get_ident() == self.made_in
        return here, threading.current_thread() is threading.main_thread()

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return np.array(self.places(), np.float64), {}

    def step(self, action: Any) -> Any:
        self.t += 1
        return np.array(self.places(), np.float64), 0.0, self.t % 7 == 0, False, {}

    def close(self) -> None:
        Affine.closed.append(self.places())
        if self.kind == "signal":
            signal.signal(signal.SIGALRM, self.before)
        if self.kind == "sqlite":
            self.db.close()


def closings() -> list[tuple[bool, bool]]:
    found, Affine.closed[:] = list(Affine.closed), []
    return found


def places_of(collector: RPCBatchedCollector, batches: int = 2) -> set[tuple[bool, ...]]:
    """Return what all steps and resets noted, with calls between them."""
    found: set[tuple[bool, ...]] = set()
    for _ in range(batches):
        batch = collector.next()
        for key in ("observation", ("next", "observation")):
            found |= {tuple(map(bool, row)) for row in batch[key].flatten(0, 1).tolist()}
        found |= set(collector.call("places"))
        collector.set_seed(1)
    collector.reset()
    return found


@pytest.mark.parametrize("kind", ["none", "sqlite", "signal", "asyncio"])
@pytest.mark.parametrize("lag", [0, 1])
def test_here_it_is_the_callers(kind: str, lag: int) -> None:
    closings()
    with RPCBatchedCollector(
        lambda: Affine(kind), None, num_envs=2, frames_per_batch=20, max_policy_lag=lag
    ) as collector:
        assert places_of(collector) == {(True, True)}
    assert closings() == [(True, True)] * 2


def test_an_env_that_was_made_already_is_used_where_it_was_made() -> None:
    with local_cluster({"learner": 1}) as session:
        for of in (None, session):
            with RPCBatchedCollector(
                Affine("sqlite"), None, session=of, frames_per_batch=20
            ) as collector:
                assert places_of(collector) == {(True, True)}


def test_with_a_replay_buffer_it_is_a_thread_of_the_worker() -> None:
    closings()
    rows = TensorDictReplayBuffer(storage=LazyTensorStorage(100), batch_size=1)
    collector = RPCBatchedCollector(
        lambda: Affine("sqlite"), None, frames_per_batch=10, replay_buffer=rows, total_frames=40
    )
    collector.next()
    assert collector.call("places") == [(True, False)]
    collector.start()
    wait_for(lambda: not collector.is_running())
    assert len(rows) == 40 and collector.stats()["completed"]
    collector.async_shutdown()
    assert rows[:]["next", "observation"].unique(dim=0).tolist() == [[1.0, 0.0]]
    assert closings() == [(True, False)]


def in_a_thread(call: Any) -> Any:
    answers: list[Any] = []

    def run() -> None:
        try:
            answers.append(call())
        except Exception as error:
            answers.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(20)
    assert answers
    return answers[0]


def test_an_error_tells_another_thread_where_the_envs_are() -> None:
    collector = RPCBatchedCollector(Affine, None, frames_per_batch=10)
    for call in (collector.next, lambda: collector.call("places"), collector.shutdown):
        error = in_a_thread(call)
        assert isinstance(error, ConfigurationError) and "'MainThread'" in str(error)
    assert collector.next().numel() == 10
    collector.shutdown()
    assert in_a_thread(collector.shutdown) is None  # there is nothing left to do
    # One that was built in a thread that has ended may be shut down anywhere.
    closings()
    in_a_thread(lambda: RPCBatchedCollector(Affine, None, frames_per_batch=10)).shutdown()
    assert closings() == [(False, True)]


def test_another_thread_may_end_a_rollout_and_the_envs_are_closed_in_theirs() -> None:
    closings()
    stepping, told = threading.Event(), threading.Event()

    class Endless(Affine):
        def step(self, action: Any) -> Any:
            stepping.set()
            told.wait(0.01)
            return super().step(action)

    collector = RPCBatchedCollector(Endless, None, frames_per_batch=10**6)

    def end() -> None:
        assert stepping.wait(20)
        collector.shutdown()
        told.set()

    thread = threading.Thread(target=end)
    thread.start()
    with pytest.raises(ConfigurationError, match="shut down"):
        collector.next()
    thread.join(20)
    assert closings() == [(True, True)]


def test_garbage_is_closed_in_its_thread() -> None:
    closings()
    collector = RPCBatchedCollector(Affine, None, frames_per_batch=10)
    collector.next()
    del collector
    gc.collect()
    assert closings() == [(True, True)]


class Counting(Affine):
    """Observes the number of its step; may do something there."""

    def __init__(self, act: Any) -> None:
        super().__init__()
        self.act = act

    def step(self, action: Any) -> Any:
        self.act(self.t)
        _, *rest = super().step(action)
        return np.array([self.t, 0.0]), *rest


def test_a_deadline_between_two_steps_loses_nothing() -> None:
    late = iter([3, 6, 13])
    due = [next(late)]

    def slow(t: int) -> None:
        if t == due[0]:
            due[0] = next(late, -1)
            time.sleep(0.3)

    collector = RPCBatchedCollector(
        lambda: Counting(slow), None, frames_per_batch=10, total_frames=20, timeout_s=0.25
    )
    batches, late_ones = [], 0
    for _ in range(10):
        try:
            batch = collector.next()
        except DeadlineError as error:
            late_ones += 1
            assert "worker 0 (this process)" in str(error)
            with collector.pause():
                pass
            continue
        if batch is None:
            break
        batches.append(batch)
    assert late_ones >= 3
    numbers = [t for batch in batches for t in batch["next", "observation"][0, :, 0].tolist()]
    assert numbers == [float(t) for t in range(1, 21)]
    ids = np.concatenate([batch["collector", "traj_ids"][0].numpy() for batch in batches])
    assert (ids - ids[0]).tolist() == [t // 7 for t in range(20)]
    collector.shutdown()


def test_after_a_ctrl_c_collection_goes_on_with_new_episodes() -> None:
    strikes = iter([KeyboardInterrupt()])

    def struck(t: int) -> None:
        if t == 12:
            for strike in strikes:
                raise strike

    collector = RPCBatchedCollector(
        lambda: Counting(struck), None, frames_per_batch=10, total_frames=30
    )
    batches = [collector.next()]
    with pytest.raises(KeyboardInterrupt):
        collector.next()
    batches += list(collector)
    assert [batch.numel() for batch in batches] == [10, 10, 10]
    numbers = [t for batch in batches for t in batch["next", "observation"][0, :, 0].tolist()]
    assert numbers == [*map(float, range(1, 11)), *map(float, range(13, 33))]
    ids = [each for batch in batches for each in batch["collector", "traj_ids"][0].tolist()]
    assert ids[9] != ids[10]
    collector.shutdown()


def test_over_ranks_it_is_their_main_thread(fork_server: ForkServer) -> None:
    with local_cluster({"learner": 1, "collector": 1}, fork_server=fork_server) as session:
        peer = session.of_role("collector")[0]
        common = {"session": session, "frames_per_batch": 20}
        for kind, lag in (("sqlite", 1), ("signal", 0), ("signal", 1), ("asyncio", 1)):
            collector = RPCBatchedCollector(
                lambda kind=kind: Affine(kind), num_envs=2, max_policy_lag=lag, **common
            )
            assert places_of(collector, 4) == {(True, True)}
            collector.shutdown()
            assert session.call(peer, closings) == [(True, True)] * 2
        # Another worker at the same time has a thread of its own.
        both = [RPCBatchedCollector(lambda: Affine("sqlite"), **common) for _ in range(2)]
        assert [places_of(each) for each in both] == [{(True, True)}, {(True, False)}]
        for each in both:
            each.shutdown()
        # The job ends although a step does not.
        stuck = RPCBatchedCollector(
            lambda: Counting(lambda t: time.sleep(1000)), timeout_s=0.2, **common
        )
        with pytest.raises(DeadlineError):
            stuck.next()
