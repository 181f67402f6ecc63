from __future__ import annotations

import os
from collections.abc import Iterator

import psutil
import pytest

PREFIX = "torchrl-bench-"


@pytest.fixture(autouse=True)
def nothing_is_left_in_memory() -> Iterator[None]:
    """Folders are named after the process that made them: other benchmarks may run meanwhile."""

    def left() -> set[str]:
        folders = {name for name in os.listdir("/dev/shm") if name.startswith(PREFIX)}
        pids = {name: int(name.removeprefix(PREFIX).split("-")[0]) for name in folders}
        return {n for n, pid in pids.items() if pid == os.getpid() or not psutil.pid_exists(pid)}

    before = left()
    yield
    assert left() <= before
