"""Fresh processes for measurements, which start fast and always end.

A fork server forks a clean child for each measurement. The child leads a process group, and forks
its own workers. Whatever happens to the caller (Ctrl-C, a deadline, kill -9), the server kills the
group. In addition, the kernel kills each process when its parent dies.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

from torchrl_dist.errors import DeadlineError, PeerLostError, TorchRLDistError
from torchrl_dist.recipes.training.config import RecipeConfig
from torchrl_dist.recipes.training.options import as_yaml
from torchrl_dist.runtime import forkserver
from torchrl_dist.runtime.forkserver import ForkServer
from torchrl_dist.runtime.signals import STOP_SIGNALS

_PR_SET_PDEATHSIG = 1
_END_S = 5.0


class MeasurementError(TorchRLDistError):
    """A measurement failed in its process. The message ends with the last lines that the process
    printed."""


class Launcher:
    """Starts one measurement after the other, each in a fresh process. A context manager."""

    def __init__(self) -> None:
        self._server = ForkServer()

    def run(
        self,
        function: Callable[..., Any],
        *args: Any,
        folder: Path,
        timeout_s: float,
        environment: Mapping[str, str] | None = None,
    ) -> Any:
        """Call ``function(*args)`` in a fresh process and return its result; blocks.

        Args:
            function: defined in a module that the child can import.
            folder: an existing folder, for the child's output and result.
            environment: variables set in the child before the function is imported.

        Raises:
            MeasurementError: the function raised, or the process died.
            DeadlineError: the process took longer than ``timeout_s``, and was killed.
            PeerLostError: the fork server has died.
        """
        variables = {**import_path(), **(environment or {})}
        call = (function.__module__, function.__qualname__, pickle.dumps(args))
        children = self._server.start(_Measurement(call, folder, variables), range(1))
        try:
            if not children.wait_gone(timeout_s):
                raise DeadlineError(
                    f"the measurement did not end within {timeout_s:g} s: raise --timeout-s"
                )
        finally:
            self._server.kill_children()
        (state,) = children.states.values()
        if state.failure is not None:
            raise MeasurementError(f"{state.failure[0]}\n{_tail(folder / 'log')}")
        result = folder / "result"
        if not result.exists():
            raise MeasurementError(f"the process died ({state.exit})\n{_tail(folder / 'log')}")
        return pickle.loads(result.read_bytes())

    def __enter__(self) -> Launcher:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.close()


def import_path() -> dict[str, str]:
    """Return the environment variable with which a new process finds the modules that this process
    finds."""
    return {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


def start_training(
    config: RecipeConfig, folder: Path, *options: str, **more: Any
) -> subprocess.Popen:
    """Start ``torchrl-dist train`` with this configuration, which is written to a file in
    ``folder``."""
    settings = folder / "config.yaml"
    settings.write_text(as_yaml(config))
    command = [sys.executable, "-m", "torchrl_dist", "train", config.recipe]
    return subprocess.Popen(
        [*command, "--config", str(settings), *options],
        stdout=subprocess.PIPE, text=True, env=os.environ | import_path(), **more,
    )  # fmt: skip


def _tail(path: Path, lines: int = 15) -> str:
    text = path.read_text(errors="replace") if path.exists() else ""
    return "\n".join(text.splitlines()[-lines:])


@dataclass(frozen=True)
class _Measurement:
    """The measurement in the child. Unlike other children of a fork server, this child behaves like
    a separate program: signals end it, and it starts its own fork servers."""

    call: tuple[str, str, bytes]
    folder: Path
    environment: Mapping[str, str]

    def run(self, rank: int, ready: Callable[[], None]) -> None:
        forkserver._address = None
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        log = os.open(self.folder / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        for target in (1, 2):
            os.dup2(log, target)
        os.environ.update(self.environment)
        multiprocessing.set_start_method("fork", force=True)
        module, name, args = self.call
        try:
            result = getattr(importlib.import_module(module), name)(*pickle.loads(args))
        except BaseException:
            traceback.print_exc()
            raise
        part = self.folder / "result.part"
        part.write_bytes(pickle.dumps(result))
        part.rename(self.folder / "result")


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent ends."""
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent ended before the call of prctl
        os._exit(1)


# ---- workers of a measurement


class Pending(Protocol):
    """A call that runs in another process."""

    def result(self, timeout: float | None = None) -> Any: ...


class Host:
    """Keeps a worker's peer, and calls functions with it."""

    def __init__(self, peer: Any) -> None:
        self.peer = peer

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """Return ``function(peer, *args)``."""
        return function(self.peer, *args)


class Worker(Protocol):
    """Another process of a measurement."""

    def submit(self, function: Callable[..., Any], *args: Any) -> Pending:
        """Start ``function(peer, *args)`` in that process, with the peer of that process. Only one
        call may run at a time."""


class ForkedWorker:
    """A child of this process, with a copy of the peer as it was at the fork."""

    def __init__(self, peer: Any) -> None:
        context = multiprocessing.get_context("fork")
        self._pipe, there = context.Pipe()
        self._process = context.Process(target=_work, args=(peer, there, self._pipe), daemon=True)
        self._process.start()
        there.close()

    def submit(self, function: Callable[..., Any], *args: Any) -> Pending:
        self._pipe.send((function, args))
        return self

    def result(self, timeout: float | None = None) -> Any:
        if not self._pipe.poll(timeout):
            raise DeadlineError(
                f"a worker did not answer within {timeout:g} s; check the load of this machine, "
                "and measure again"
            )
        try:
            error, value = self._pipe.recv()
        except EOFError:
            raise PeerLostError("a worker died") from None
        if error is not None:
            raise MeasurementError(error)
        return value

    def close(self) -> None:
        """Let the child close its peer, then end the child."""
        with contextlib.suppress(OSError):
            self._pipe.send(None)
        self._process.join(_END_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join(_END_S)
        self._pipe.close()


def on_ranks(ranks: int, timeout_s: float, function: Callable[..., Any], *args: Any) -> Any:
    """Call ``function(rank, *args)`` in this process as rank 0, and in forks of this process as the
    other ranks. Return the result of rank 0."""
    workers = [ForkedWorker(contextlib.ExitStack()) for _ in range(ranks - 1)]
    try:
        pending = [
            worker.submit(_as_rank, function, rank, *args) for rank, worker in enumerate(workers, 1)
        ]
        result = function(0, *args)
        for other in pending:
            other.result(timeout_s)
    finally:
        for worker in workers:
            worker.close()
    return result


def _as_rank(_: Any, function: Callable[..., Any], *args: Any) -> None:
    function(*args)


def _work(peer: Any, pipe: Connection, other_end: Connection) -> None:
    die_with_parent()
    other_end.close()
    host = Host(peer)
    while (message := pipe.recv()) is not None:
        answer: tuple[str | None, Any]
        try:
            answer = None, host.run(message[0], *message[1])
        except Exception as error:
            traceback.print_exc()
            answer = f"in a worker: {type(error).__name__}: {error}", None
        pipe.send(answer)
    peer.close()
