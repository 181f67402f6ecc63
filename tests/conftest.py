"""Fixtures of all tests: a fork server shared by them, and the check that nothing is left."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator

import psutil
import pytest

from tests.spawn import end_marked

_MARK = "TORCHRL_DIST_TEST"
_GRACE_S = 5.0

_server = None


@pytest.fixture(scope="session")
def fork_server() -> Iterator:
    """A running fork server: ``local_cluster(..., fork_server=fork_server)`` starts in 0.1 s."""
    global _server
    from torchrl_dist.runtime import ForkServer

    with ForkServer() as server:
        _server = server
        yield server
    _server = None


@pytest.fixture(autouse=True)
def no_process_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test after which a process of its lives on; the process is killed."""
    if "fork_server" in request.fixturenames:
        request.getfixturevalue("fork_server")  # started without this test's mark
    mark = uuid.uuid4().hex
    os.environ[_MARK] = mark
    try:
        yield
    finally:
        del os.environ[_MARK]
    left = end_marked(_MARK, mark, grace_s=_GRACE_S) + _end_children_of_server()
    assert not left, f"processes outlived the test: {left}"


def _end_children_of_server() -> list[str]:
    if _server is None or not psutil.pid_exists(_server.pid):
        return []
    # all but Python's own helper, which the server keeps for its children
    children = [
        child
        for child in psutil.Process(_server.pid).children(recursive=True)
        if "multiprocessing.resource_tracker" not in " ".join(child.cmdline())
    ]
    _, alive = psutil.wait_procs(children, timeout=_GRACE_S)
    for process in alive:
        process.kill()
    return [f"{process.pid}: child of the fork server" for process in alive]
