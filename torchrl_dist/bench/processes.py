"""Fresh processes for measurements: started fast, ended for certain.

A launcher process imports torch and TorchRL once, on one thread, and forks a clean child for each
measurement. The child is the leader of a process group; it forks workers of its own. Whatever
happens to the caller (Ctrl-C, a deadline, kill -9), the group ends: the caller kills it, and each
process asks the kernel to be killed when its parent dies.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import multiprocessing
import os
import pickle
import selectors
import signal
import struct
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any, Protocol

from torchrl_dist.errors import DeadlineError, PeerLostError, TorchRLDistError

_PR_SET_PDEATHSIG = 1
_START_S = 120.0  # importing torch and TorchRL takes seconds, minutes on a busy machine
_END_S = 5.0
# Imports leave no garbage, and looking for it is a quarter of their time.
_SERVE = "import gc; gc.disable(); from torchrl_dist.bench.processes import _serve; _serve()"


class MeasurementError(TorchRLDistError):
    """A measurement failed in its process; the message ends with what it printed last."""


# ---- the caller's side


class Launcher:
    """Starts one measurement after the other, each in a fresh process. A context manager."""

    def __init__(self) -> None:
        variables = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
            "MKL_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        }
        self._process = subprocess.Popen(
            [sys.executable, "-c", _SERVE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=variables,
            start_new_session=True,  # Ctrl-C is for the caller, who then ends this one in order
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._requests, self._answers = self._process.stdin, self._process.stdout
        self._child = 0
        try:
            self._answer(time.monotonic() + _START_S, "import torch and torchrl")
        except BaseException:
            self.close()
            raise

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
            function: of a module that the child can import.
            folder: exists; for the child's output and result.
            environment: variables set in the child before the function is imported.

        Raises:
            MeasurementError: it raised or died, or the launcher has.
            DeadlineError: it took longer than ``timeout_s``, and was killed.
        """
        call = (function.__module__, function.__qualname__, pickle.dumps(args))
        try:
            _send(self._requests, (call, str(folder), dict(environment or {})))
        except BrokenPipeError as error:
            raise MeasurementError(
                "the launcher of the measurements died before this one"
            ) from error
        deadline = time.monotonic() + timeout_s
        self._child = self._answer(time.monotonic() + _END_S, "fork")
        try:
            self._answer(deadline, f"measure ({timeout_s:g} s allowed)")
        except BaseException:  # its end must not be taken for the answer of the next
            self._end_child()
            self._answer(time.monotonic() + _END_S, "notice that its child was killed")
            raise
        finally:
            self._end_child()
        result = folder / "result"
        if not result.exists():
            raise MeasurementError(f"the process died\n{_tail(folder / 'log')}")
        succeeded, value = pickle.loads(result.read_bytes())
        if not succeeded:
            raise MeasurementError(f"{value}\n{_tail(folder / 'log')}")
        return value

    def close(self) -> None:
        """End all processes; idempotent, blocks a few seconds at most."""
        self._end_child()
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait(_END_S)
        for stream in (self._requests, self._answers):
            with contextlib.suppress(OSError):
                stream.close()

    def __enter__(self) -> Launcher:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _answer(self, deadline: float, doing: str) -> int:
        with selectors.DefaultSelector() as selector:
            selector.register(self._answers, selectors.EVENT_READ)
            if not selector.select(max(0.0, deadline - time.monotonic())):
                raise DeadlineError(f"the measuring process did not {doing} in time")
        data = self._answers.read(8)
        if len(data) < 8:
            raise MeasurementError(f"the launcher of the measurements died; it had to {doing}")
        return struct.unpack("<q", data)[0]

    def _end_child(self) -> None:
        """Kill what is left of the measurement's group: workers, and all of it after a failure."""
        child, self._child = self._child, 0
        if child:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child, signal.SIGKILL)


def _send(stream: IO[bytes], message: Any) -> None:
    data = pickle.dumps(message)
    stream.write(struct.pack("<q", len(data)) + data)
    stream.flush()


def _tail(path: Path, lines: int = 15) -> str:
    text = path.read_text(errors="replace") if path.exists() else ""
    return "\n".join(text.splitlines()[-lines:])


# ---- the launcher


def _serve() -> None:
    """Fork a child per request from stdin; answer with its pid, then with its wait status."""
    die_with_parent()
    answers = os.dup(1)
    os.dup2(2, 1)  # what libraries print must not look like answers
    import tensordict  # noqa: F401
    import torch
    import torchrl.data  # noqa: F401

    # Outside the groups that are killed: it removes the semaphores that those leave in /dev/shm.
    resource_tracker.ensure_running()
    torch.set_num_threads(1)
    gc.enable()
    requests = sys.stdin.buffer
    os.write(answers, struct.pack("<q", 0))
    while len(head := requests.read(8)) == 8:
        call, folder, environment = pickle.loads(requests.read(struct.unpack("<q", head)[0]))
        child = os.fork()
        if not child:
            os.close(answers)
            _run_child(call, Path(folder), environment)
        with contextlib.suppress(OSError):
            os.setpgid(child, child)  # also here: the caller may kill the group at once
        os.write(answers, struct.pack("<q", child))
        _, status = os.waitpid(child, 0)
        os.write(answers, struct.pack("<q", status))


def _run_child(call: tuple[str, str, bytes], folder: Path, environment: dict[str, str]) -> None:
    status = 1
    try:
        die_with_parent()
        with contextlib.suppress(OSError):
            os.setpgid(0, 0)
        nothing = os.open(os.devnull, os.O_RDONLY)
        log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        for target, source in ((0, nothing), (1, log), (2, log)):
            os.dup2(source, target)
        os.environ.update(environment)
        multiprocessing.set_start_method("fork", force=True)
        outcome = _outcome(call)
        part = folder / "result.part"
        part.write_bytes(pickle.dumps(outcome))
        part.rename(folder / "result")
        status = 0
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _outcome(call: tuple[str, str, bytes]) -> tuple[bool, Any]:
    import importlib

    module, name, args = call
    try:
        return True, getattr(importlib.import_module(module), name)(*pickle.loads(args))
    except BaseException as error:
        traceback.print_exc()
        return False, f"{type(error).__name__}: {error}"


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent ends."""
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended just before
        os._exit(1)


# ---- workers of a measurement


class Pending(Protocol):
    """A call that runs elsewhere."""

    def result(self, timeout: float | None = None) -> Any: ...


class Host:
    """Where a worker keeps its peer; runs functions on it."""

    def __init__(self, peer: Any) -> None:
        self.peer = peer

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """``function(peer, *args)``."""
        return function(self.peer, *args)


class Worker(Protocol):
    """Another process of a measurement."""

    def submit(self, function: Callable[..., Any], *args: Any) -> Pending:
        """Start ``function(its peer, *args)`` there; one call at a time."""


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
            raise DeadlineError(f"a worker did not answer within {timeout:g} s")
        try:
            error, value = self._pipe.recv()
        except EOFError:
            raise PeerLostError("a worker died") from None
        if error is not None:
            raise MeasurementError(error)
        return value

    def close(self) -> None:
        """Let it close its peer, then end it."""
        with contextlib.suppress(OSError):
            self._pipe.send(None)
        self._process.join(_END_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join(_END_S)
        self._pipe.close()


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
