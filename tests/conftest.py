"""Fixtures of all tests: a fork server shared by them, the check that nothing is left, and who
may run beside whom.

A run of the whole suite has three parts side by side: most tests wait for processes more than they
compute. Tests marked ``alone`` (they compare times, say) follow one another at its end, while the
other parts wait or have ended.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from xdist.scheduler import LoadFileScheduling

from tests import warm
from tests.spawn import end_marked, is_helper
from tests.turns import ALONE, Turns, is_alone

_MARK = "TORCHRL_DIST_TEST"
_GRACE_S = 5.0

# What tests start finds tests/children/sitecustomize.py, by whichever of the two it is given.
_CHILDREN = str(Path(__file__).parent / "children")
if _CHILDREN not in sys.path:
    sys.path.append(_CHILDREN)
    os.environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, [_CHILDREN, os.environ.get("PYTHONPATH")])
    )
# Started with & by a script, or under nohup, a process ignores these; so would what tests start.
for _number, _handler in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGHUP, signal.SIG_DFL),
):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, _handler)
# A process that runs tests collects its garbage as a user's does, also where pytest has started it.
gc.set_threshold(700)

_server = None
_turns: Turns | None = None


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Three for the whole suite, whose tests wait for processes a quarter of their time; none for a
    part of it, which would wait for them to start."""
    return 3 if config.args == config.getini("testpaths") else 0


# What forks hundreds of times, while a worker is small: a fork copies the tables of all its pages.
# Then what takes a worker longest, so that none is still at it when the others have nothing left.
_FIRST = (
    "replay/test_kills.py",
    "tests/test_tutorials.py",
    "replay/test_stores.py",
    "replay/test_interrupts.py",
    "recipes/test_apex_job.py",
    "recipes/test_recipe_jobs.py",
    "recipes/test_nodes.py",
    "replay/test_program_fuzz.py",
    "learn/test_jobs.py",
    "ops/test_slurm_script.py",
    "replay/test_shard_hosts.py",
)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A scheduler knows tests by their names: have one say that it must be alone."""
    if metafunc.definition.get_closest_marker("alone"):
        metafunc.fixturenames.append(ALONE)
        metafunc.parametrize(ALONE, [ALONE])


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files first, tests that must be alone last: waiting for one another, even the shortest
    would cost the other parts the rest of what runs just then."""

    def place(item: pytest.Item) -> int:
        name = f"{item.path.parent.name}/{item.path.name}"
        if is_alone(item.nodeid):
            return len(_FIRST) + 1
        return _FIRST.index(name) if name in _FIRST else len(_FIRST)

    items.sort(key=place)


class _Files(LoadFileScheduling):
    """Of each file all tests in one part, one after another; those that must be alone likewise."""

    def _split_scope(self, nodeid: str) -> str:
        return ALONE if is_alone(nodeid) else super()._split_scope(nodeid)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> _Files:
    return _Files(config, log)


def pytest_collection_finish() -> None:
    """Everything is imported now."""
    warm.large_pages()


def pytest_sessionstart(session: pytest.Session) -> None:
    global _turns
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID")
    _turns = None if run is None else Turns(run)


def pytest_sessionfinish(session: pytest.Session) -> None:
    if _turns is not None:
        _turns.close()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Around all else: waiting for the turn is no part of the test's time."""
    if _turns is None:
        return (yield)
    with _turns.take(alone=is_alone(item.nodeid)):
        return (yield)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Figures of a test cross to the controller as plain numbers: no NumPy's."""
    outcome = yield
    report = outcome.get_result()
    report.user_properties = [
        (name, value.item() if isinstance(value, np.generic) else value)
        for name, value in report.user_properties
    ]


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Show a failure when it happens: a run that is cut short comes to no summary."""
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        print(f"\n{report.nodeid} ({report.when})\n{report.longreprtext[-2000:]}", flush=True)


@contextlib.contextmanager
def unmarked() -> Iterator[None]:
    """What is started in here outlives the test."""
    mark = os.environ.pop(_MARK, None)
    try:
        yield
    finally:
        if mark is not None:
            os.environ[_MARK] = mark


@pytest.fixture(scope="session")
def fork_server() -> Iterator:
    """A running fork server: ``local_cluster(..., fork_server=fork_server)`` starts in 0.1 s."""
    global _server
    from torchrl_dist.runtime import ForkServer

    with unmarked():
        server = ForkServer()
    with server:
        _server = server
        yield server
    _server = None


@pytest.fixture(autouse=True)
def no_process_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test after which a process of its lives on; the process is killed."""
    before = frozenset(psutil.pids())
    mark = uuid.uuid4().hex
    os.environ[_MARK] = mark
    try:
        yield
    finally:
        del os.environ[_MARK]
    left = end_marked(_MARK, mark, grace_s=_GRACE_S, known=before)
    left += _end_children_of_server(before)
    assert not left, f"processes outlived the test: {left}"


def _end_children_of_server(known: frozenset[int]) -> list[str]:
    """But for those that were ``known`` before the test: a module's tests may share a cluster."""
    if _server is None or not psutil.pid_exists(_server.pid):
        return []
    server = psutil.Process(_server.pid)
    new = [child for child in server.children(recursive=True) if child.pid not in known]
    children = [child for child in new if _may_be_left(child)]
    _, alive = psutil.wait_procs(children, timeout=_GRACE_S)
    for process in alive:
        process.kill()
    return [f"{process.pid}: child of the fork server" for process in alive]


def _may_be_left(process: psutil.Process) -> bool:
    """Not the helper that the server keeps for its children, and no zombie."""
    try:
        return not is_helper(process)
    except psutil.Error:
        return False
