from __future__ import annotations

import argparse
import contextlib
import json
import os
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import pytest

from tests.conftest import unmarked
from tests.spawn import end_marked
from torchrl_dist.bench import processes
from torchrl_dist.bench.processes import Launcher
from torchrl_dist.runtime import forkserver

PREFIX = "torchrl-bench-"
_MARK, _VALUE = "TORCHRL_DIST_TEST_LAUNCHER", uuid.uuid4().hex


def parsed(module: Any, *argv: str) -> argparse.Namespace:
    """Return the benchmark's options."""
    parser = argparse.ArgumentParser()
    module.add_options(parser)
    return parser.parse_args(argv)


def run_bench(module: Any, argv: Sequence[str]) -> int:
    """Run the benchmark as ``torchrl-dist bench`` does, except that errors are raised."""
    return module.run(parsed(module, *argv))


def measured(
    module: Any, options: Sequence[str], folder: Path, *, picture: bool = True, code: int = 0
) -> list[dict[str, Any]]:
    """The lines that a benchmark writes to ``folder``, where it also draws a picture."""
    lines, png = folder / "lines.jsonl", folder / "rates.png"
    files = ["--json", str(lines), *(["--plot", str(png)] if picture else [])]
    assert run_bench(module, [*options, *files]) == code
    assert not picture or png.read_bytes().startswith(b"\x89PNG")
    return [json.loads(line) for line in lines.read_text().splitlines()]


@pytest.fixture(scope="session")
def launchers() -> Iterator[Callable[[], Launcher]]:
    """One launcher for all benchmarks, because importing takes seconds. Each measurement forks."""
    running: list[Launcher] = []

    def one() -> Launcher:
        if not running or running[-1]._server._process.poll() is not None:
            own = mock.patch.object(forkserver, "_address", None)
            with unmarked(), own, mock.patch.dict(os.environ, {_MARK: _VALUE}):
                running.append(Launcher())
        return running[-1]

    yield one
    for each in running:
        each._server.close()


@pytest.fixture(autouse=True)
def one_launcher(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make benchmarks use the shared launcher, and check that none of its processes is left."""
    used = []

    def shared() -> contextlib.AbstractContextManager[Launcher]:
        used.append(request.getfixturevalue("launchers")())
        return contextlib.nullcontext(used[-1])

    monkeypatch.setattr(processes, "Launcher", shared)
    yield
    if used:
        known = frozenset({used[-1]._server.pid})
        left = end_marked(_MARK, _VALUE, grace_s=5.0, known=known)
        assert not left, f"processes outlived the measurement: {left}"


@pytest.fixture(autouse=True)
def nothing_is_left_in_memory() -> Iterator[None]:
    """Check folders by the name of this process, because other benchmarks may run meanwhile."""

    def left() -> set[str]:
        folders = {name for name in os.listdir("/dev/shm") if name.startswith(PREFIX)}
        pids = {name: int(name.removeprefix(PREFIX).split("-")[0]) for name in folders}
        return {n for n, pid in pids.items() if pid == os.getpid() or not psutil.pid_exists(pid)}

    before = left()
    yield
    assert left() <= before
