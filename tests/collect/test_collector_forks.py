"""A child forked from the process that has a collector: it is told so, waits for no lock, and
leaves the parent's collector alone."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict.nn import TensorDictModule
from torchrl.data import LazyTensorStorage, ReplayBuffer

from tests.collect.envs import Counter, mlp
from tests.replay.faults import end_of, start
from torchrl_dist import ConfigurationError
from torchrl_dist.collect import RPCBatchedCollector
from torchrl_dist.collect.loop import exploration
from torchrl_dist.collect.worker.pinned import PinnedWorker
from torchrl_dist.runtime import local_cluster

Locks = dict[str, Any]


class OneHot(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(2, 3)

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.one_hot(self.net(observation).argmax(-1), 3)


def _policy() -> TensorDictModule:
    return TensorDictModule(OneHot(), ["observation"], ["action"])


def _here() -> RPCBatchedCollector:
    return RPCBatchedCollector(Counter, _policy(), frames_per_batch=5, timeout_s=20)


def _into_a_buffer() -> RPCBatchedCollector:
    buffer = ReplayBuffer(storage=LazyTensorStorage(1000))
    collector = RPCBatchedCollector(
        Counter, _policy(), frames_per_batch=5, replay_buffer=buffer, timeout_s=20
    )
    collector.start()
    return collector


def _refuses(collector: RPCBatchedCollector) -> None:
    """In the child, call every method that asks the workers."""
    uses: dict[str, Callable[[], object]] = {
        "next": collector.next,
        "iterate": lambda: next(iter(collector)),
        "weights": collector.update_policy_weights_,
        "seed": lambda: collector.set_seed(1),
        "reset": collector.reset,
        "reset some": lambda: collector.reset([0]),
        "call": lambda: collector.call("render"),
        "hook": lambda: setattr(collector, "pre_collect_hook", None),
        "load": lambda: collector.load_state_dict(collector.state_dict()),
        "pause": lambda: collector.pause().__enter__(),
    }
    if collector.replay_buffer is not None:
        uses["start"] = collector.start
    for name, use in uses.items():
        with pytest.raises(ConfigurationError, match="was forked from"):
            use()
            print(f"{name} did not raise", flush=True)
    collector.stats(workers="both")
    assert not exploration.held_up()
    collector.shutdown()
    collector.shutdown()


def _checked_while_held(collector: RPCBatchedCollector, locks: Locks) -> None:
    """Fork with each of the locks held by another thread; none of the children may hang."""

    def child() -> None:
        _refuses(collector)
        for name, lock in locks.items():
            assert lock().acquire(blocking=False), name

    for name, lock in locks.items():
        held, go = threading.Event(), threading.Event()

        def hold(
            lock: Callable[[], Any] = lock, held: threading.Event = held, go: threading.Event = go
        ) -> None:
            with lock():
                held.set()
                go.wait(30)

        holder = threading.Thread(target=hold, daemon=True)
        holder.start()
        assert held.wait(10), name
        try:
            assert end_of(start(child), 20) == 0, name
        finally:
            go.set()
            holder.join(10)


def _in_process(collector: RPCBatchedCollector) -> Locks:
    crew = collector._crew
    worker = crew.workers[0].handle._worker
    calls: Locks = {}
    if isinstance(worker, PinnedWorker):
        pinned, worker = worker, worker._worker
        calls["calls"] = lambda: pinned._lock
    return {
        **calls,
        "crew": lambda: crew._cond,
        "worker": lambda: worker._lock,
        "exploration": lambda: exploration._now.lock,
    }


def test_a_collector_of_this_process() -> None:
    with _here() as collector:
        collector.next()
        _checked_while_held(collector, _in_process(collector))
        assert collector.next().numel() == 5


def test_a_collector_in_the_background() -> None:
    with _into_a_buffer() as collector:
        background = collector._background
        assert background is not None
        locks = {"background": lambda: background._cond}
        _checked_while_held(collector, locks | _in_process(collector))
        before = collector.state_dict()["frames"]
        while collector.state_dict()["frames"] == before:  # at most for this test's time limit
            assert collector.is_running()


def test_a_collector_with_env_processes_and_one_with_the_policy_here(fork_server) -> None:
    with local_cluster({"learner": 1, "collector": 1}, fork_server=fork_server) as session:
        options = {"session": session, "frames_per_batch": 8, "num_envs": 2}
        with RPCBatchedCollector(Counter, _policy(), inference="learner", **options) as collector:
            collector.next()
            inference = collector._inference
            assert inference is not None
            locks = {
                "crew": lambda: collector._crew._cond,
                "inference": lambda: inference._lock,
                "transport": lambda: inference._transport._cond,
            }
            _checked_while_held(collector, locks)
            assert collector.next().numel() == 8
        with RPCBatchedCollector(
            Counter, _policy(), workers=[session.me], env_processes=2, **options
        ) as collector:
            collector.next()
            worker: Any = collector._crew.workers[0].handle._worker
            locks = {
                "calls": lambda: worker._lock,
                "waker": lambda: worker._worker._waker._lock,
            }
            _checked_while_held(collector, locks)
            assert collector.next().numel() == 8 and not collector.report.replaced


def test_a_child_that_drops_its_copy_closes_nothing() -> None:
    closed_r, closed_w = os.pipe()

    class Told(Counter):
        def close(self) -> None:
            os.write(closed_w, b"x")

    kept = [RPCBatchedCollector(Told, _policy(), frames_per_batch=5)]
    kept[0].next()

    def child() -> None:
        threads = threading.active_count()
        kept.clear()
        gc.collect()
        assert threading.active_count() == threads

    assert end_of(start(child), 20) == 0
    os.set_blocking(closed_r, False)
    with pytest.raises(BlockingIOError):
        os.read(closed_r, 1)
    assert kept[0].next().numel() == 5
    kept[0].shutdown()
    assert os.read(closed_r, 2) == b"x"
    os.close(closed_r)
    os.close(closed_w)
