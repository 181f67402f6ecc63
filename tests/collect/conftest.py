from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from torchrl_dist.collect import RPCBatchedCollector


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
