"""Fixtures of all tests: a fork server shared by them, the check that nothing is left, and who
may run beside whom.

A run of the whole suite has two halves side by side: most tests wait for processes more than they
compute. A test marked ``alone`` (it compares times, say) runs while the other half waits.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest

from tests.spawn import end_marked

_MARK = "TORCHRL_DIST_TEST"
_GRACE_S = 5.0

_server = None


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Two for the whole suite; none for a part of it, which would wait for them to start."""
    return 2 if config.args == config.getini("testpaths") else 0


@pytest.fixture(autouse=True)
def beside_others_or_alone(request: pytest.FixtureRequest) -> Iterator[None]:
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID")
    if run is None:
        yield
        return
    alone = request.node.get_closest_marker("alone") is not None
    with open(Path(tempfile.gettempdir(), f"torchrl_dist-tests-{run}"), "w") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        yield


def pytest_sessionfinish(session: pytest.Session) -> None:
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID")
    if run is not None:
        Path(tempfile.gettempdir(), f"torchrl_dist-tests-{run}").unlink(missing_ok=True)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Figures of a test cross to the other half as plain numbers: no NumPy's."""
    outcome = yield
    report = outcome.get_result()
    report.user_properties = [
        (name, value.item() if isinstance(value, np.generic) else value)
        for name, value in report.user_properties
    ]


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
def no_process_is_left(
    request: pytest.FixtureRequest, beside_others_or_alone: None
) -> Iterator[None]:
    """Fail a test after which a process of its lives on; the process is killed."""
    if "fork_server" in request.fixturenames:
        request.getfixturevalue("fork_server")  # started without this test's mark
    before = frozenset(psutil.pids())
    mark = uuid.uuid4().hex
    os.environ[_MARK] = mark
    try:
        yield
    finally:
        del os.environ[_MARK]
    left = end_marked(_MARK, mark, grace_s=_GRACE_S, known=before) + _end_children_of_server()
    assert not left, f"processes outlived the test: {left}"


def _end_children_of_server() -> list[str]:
    if _server is None or not psutil.pid_exists(_server.pid):
        return []
    server = psutil.Process(_server.pid)
    children = [child for child in server.children(recursive=True) if _may_be_left(child)]
    _, alive = psutil.wait_procs(children, timeout=_GRACE_S)
    for process in alive:
        process.kill()
    return [f"{process.pid}: child of the fork server" for process in alive]


def _may_be_left(process: psutil.Process) -> bool:
    """Not Python's own helper, which the server keeps for its children, and no zombie."""
    try:
        return "multiprocessing.resource_tracker" not in " ".join(process.cmdline())
    except psutil.Error:
        return False
