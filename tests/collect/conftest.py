from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from torchrl_dist.collect import RPCBatchedCollector
from torchrl_dist.runtime import ForkServer, Session, local_cluster

Job = contextlib.AbstractContextManager[tuple[RPCBatchedCollector, Session]]


@pytest.fixture
def build() -> Iterator[Any]:
    built = []

    def make(*args: Any, **kwargs: Any) -> RPCBatchedCollector:
        built.append(RPCBatchedCollector(*args, **kwargs))
        return built[-1]

    yield make
    for collector in built:
        collector.shutdown()
    deadline = time.monotonic() + 5
    names = [t.name for t in threading.enumerate()]
    while any("rollout" in name for name in names) and time.monotonic() < deadline:
        time.sleep(0.02)
        names = [t.name for t in threading.enumerate()]
    assert not any("rollout" in name for name in names)


@pytest.fixture
def collecting(fork_server: ForkServer) -> Callable[..., Job]:
    """A collector in a cluster of one learner and this number of collector processes."""

    @contextlib.contextmanager
    def start(
        collectors: int, make_env: Any, policy: Any = None, **options: Any
    ) -> Iterator[tuple[RPCBatchedCollector, Session]]:
        roles = {"learner": 1, "collector": collectors}
        with (
            local_cluster(roles, fork_server=fork_server) as session,
            RPCBatchedCollector(make_env, policy, session=session, **options) as collector,
        ):
            yield collector, session

    return start
