"""Too few descriptors or threads are told before C++ aborts."""

from __future__ import annotations

import os
import resource

import pytest

from torchrl_dist import ConfigurationError, local_cluster
from torchrl_dist.runtime import limits

NONE = resource.RLIM_INFINITY


@pytest.fixture
def set_limits(monkeypatch: pytest.MonkeyPatch) -> dict[int, tuple[int, int]]:
    """The limits that this process seems to have."""
    found = {resource.RLIMIT_NOFILE: (1024, 1 << 20), resource.RLIMIT_NPROC: (NONE, NONE)}
    monkeypatch.setattr(resource, "getrlimit", found.__getitem__)
    monkeypatch.setattr(resource, "setrlimit", found.__setitem__)
    monkeypatch.setattr(os, "getuid", lambda: 1000)
    monkeypatch.setattr(limits, "_threads_of", lambda uid: 30)
    return found


def test_soft_limits_are_raised(set_limits: dict[int, tuple[int, int]]) -> None:
    set_limits[resource.RLIMIT_NPROC] = (200, NONE)
    limits.check_limits(300, one_node=False, starts=8, driver=True)
    assert set_limits[resource.RLIMIT_NOFILE] == (1 << 16, 1 << 20)
    assert set_limits[resource.RLIMIT_NPROC] == (NONE, NONE)


def test_too_few_descriptors_are_told_before_anything_is_started(
    set_limits: dict[int, tuple[int, int]],
) -> None:
    set_limits[resource.RLIMIT_NOFILE] = (40, 40)
    with pytest.raises(ConfigurationError, match=r"have 40 files .* 3 processes .*ulimit -n 4096"):
        with local_cluster({"learner": 1, "collector": 2}):
            pass
    held = limits.descriptors_of(64, one_node=False)
    set_limits[resource.RLIMIT_NOFILE] = (held // 2, held // 2)
    with pytest.raises(ConfigurationError, match=f"up to {held}: "):
        limits.check_limits(64, one_node=False, starts=1, driver=True)
    limits.check_limits(64, one_node=False, starts=1, driver=False)  # connected to the driver


def test_too_few_threads_are_told(set_limits: dict[int, tuple[int, int]]) -> None:
    set_limits[resource.RLIMIT_NPROC] = (45, 45)
    with pytest.raises(ConfigurationError, match=r"45 processes and threads, 30 .*ulimit -u 4096"):
        limits.check_limits(2, one_node=True, starts=2, driver=True)


def test_threads_are_counted() -> None:
    assert limits._threads_of(os.getuid()) >= len(os.listdir("/proc/self/task"))
