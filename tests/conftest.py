"""Fixtures for all tests: a shared fork server, a check for leftover processes, and scheduling.

A run of the whole suite has three parts in parallel, because most tests wait for processes more
than they compute. Tests marked ``alone``, for example because they compare times, run one after
another at the end, while the other parts wait or have ended.
"""

from __future__ import annotations

import contextlib
import faulthandler
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
from _pytest.faulthandler import fault_handler_stderr_fd_key
from xdist.scheduler import LoadFileScheduling

from tests import warm
from tests.spawn import end_marked, is_helper
from tests.turns import ALONE, Turns, is_alone

_MARK = "TORCHRL_DIST_TEST"
_GRACE_S = 5.0
# A test ends within the timeout of pyproject.toml, unless that timeout itself fails: some tests use
# the same timer, and it does not cover the wait for a turn. Then the process shows where it hangs,
# and ends.
_HANGS_AFTER_S = 1500.0

# Programs that tests start find tests/children/sitecustomize.py by either of these two.
_CHILDREN = str(Path(__file__).parent / "children")
if _CHILDREN not in sys.path:
    sys.path.append(_CHILDREN)
    os.environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, [_CHILDREN, os.environ.get("PYTHONPATH")])
    )
# A process started with & by a script, or under nohup, ignores these signals, and so would its
# children.
for _number, _handler in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGHUP, signal.SIG_DFL),
):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, _handler)
# A process that runs tests collects garbage as a user's does, even if pytest has started it.
gc.set_threshold(700)

_server = None
_turns: Turns | None = None


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Return three for the whole suite, whose tests spend a quarter of their time waiting.

    Return zero for a part of it, which would have to wait until the workers start.
    """
    return 3 if config.args == config.getini("testpaths") else 0


# The longest files begin first, so that no worker still runs one when the others are done. Files
# that fork hundreds of times come before files of the same length, while a worker is small, because
# a fork copies the tables of all its pages.
_FIRST = [
    *("replay/test_kills.py", "tests/test_tutorials.py", "ops/test_slurm_script.py"),
    *("replay/test_stores.py", "replay/test_interrupts.py", "bench/test_train_bench.py"),
    *("recipes/test_apex_job.py", "collect/test_same_data.py", "collect/test_answers.py"),
    *("recipes/test_recipe_jobs.py", "bench/test_collect_bench.py", "replay/test_shard_hosts.py"),
    *("collect/test_rollout.py", "collect/test_node.py", "learn/test_jobs.py"),
    *("bench/test_remote_bench.py", "collect/test_stops.py", "bench/test_replay_bench.py"),
    *("collect/test_collector_cluster.py", "recipes/test_nodes.py", "runtime/test_forkserver.py"),
    *("ops/test_second_user.py", "runtime/test_hosts.py"),
]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Mark tests that must run alone in their names, which are all that the scheduler knows."""
    if metafunc.definition.get_closest_marker("alone"):
        metafunc.fixturenames.append(ALONE)
        metafunc.parametrize(ALONE, [ALONE])


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort long files first and tests that must run alone last.

    Anywhere else, even the shortest would wait until the other parts finish their tests.
    """

    def place(item: pytest.Item) -> int:
        name = f"{item.path.parent.name}/{item.path.name}"
        if is_alone(item.nodeid):
            return len(_FIRST) + 1
        return _FIRST.index(name) if name in _FIRST else len(_FIRST)

    items.sort(key=place)


class _Files(LoadFileScheduling):
    """Run all tests of a file in one part, one after another, and likewise those that run alone.

    Notebooks, which share nothing, run in any part.
    """

    def _split_scope(self, nodeid: str) -> str:
        if is_alone(nodeid):
            return ALONE
        file = super()._split_scope(nodeid)
        return nodeid if file.endswith("test_tutorials.py") else file


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> _Files:
    return _Files(config, log)


def pytest_collection_finish() -> None:
    """Compact the memory once everything is imported."""
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
    """Wait for the turn outside all other hooks, so that the wait does not count as test time."""
    stderr = item.config.stash[fault_handler_stderr_fd_key]  # not the captured one
    faulthandler.dump_traceback_later(_HANGS_AFTER_S, exit=True, file=stderr)
    try:
        if _turns is None:
            return (yield)
        with _turns.take(alone=is_alone(item.nodeid)):
            return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Convert a test's figures to plain numbers: NumPy's cannot be sent to the controller."""
    outcome = yield
    report = outcome.get_result()
    report.user_properties = [
        (name, value.item() if isinstance(value, np.generic) else value)
        for name, value in report.user_properties
    ]


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Show a failure when it happens, because an interrupted run prints no summary."""
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        print(f"\n{report.nodeid} ({report.when})\n{report.longreprtext[-2000:]}", flush=True)


@contextlib.contextmanager
def unmarked() -> Iterator[None]:
    """Mark processes that are started in here as outliving the test."""
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
    """Fail a test that leaves a process behind, and kill the process."""
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
    """Skip processes ``known`` before the test, because a module's tests may share a cluster."""
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
    """Skip zombies and the helper process that the server keeps for its children."""
    try:
        return not is_helper(process)
    except psutil.Error:
        return False
