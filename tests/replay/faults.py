"""Faults for the shared replay: processes that die, stop or are interrupted at a chosen instant.

The package has no code for these faults. An instant is chosen in one of four ways:

- by *step*: the n-th function call, line or return in ``torchrl_dist/replay`` (:func:`at_step`), so
  that a sweep over n passes through every point of an operation;
- by *store*: the n-th instruction that stores to the shared tables, of Python, NumPy or the C
  kernel (:class:`Stores`), so that a sweep over n leaves out none;
- by *page*: the first store to a page of the shared memory (:func:`die_on_store`), which also
  falls into the middle of a NumPy operation, a copy or the C kernel;
- by *time*: a signal from another process.
"""

from __future__ import annotations

import contextlib
import ctypes
import dis
import faulthandler
import gc
import itertools
import mmap
import os
import resource
import select
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torchrl.data import TensorDictReplayBuffer

import torchrl_dist.replay
from torchrl_dist.replay import (
    SharedCursorWriter,
    SharedMemmapStorage,
    SharedPrioritizedSampler,
    SharedRandomSampler,
)
from torchrl_dist.replay.node.directory import ReplayDirectory
from torchrl_dist.replay.node.lock import is_held
from torchrl_dist.replay.node.tables import CLAIM_COUNT, CLAIM_MEMBER, Word

LONG = bool(int(os.environ.get("TORCHRL_DIST_LONG_TESTS", "0")))
"""Set by hand for many times as many faults and rows."""

FRAMES = "TORCHRL_DIST_TESTS_FRAMES"
"""Set by ``kept_as`` if :func:`attach` keeps the large columns of rows as frames."""

_PACKAGE = str(Path(torchrl_dist.replay.__file__).parent)
_libc = ctypes.CDLL(None, use_errno=True)


# --- rows that show whether they are whole --------------------------------------------------------


def rows_of(keys: np.ndarray | range, width: int = 8) -> TensorDict:
    """Make rows in which the row's key and an element's position determine the element."""
    key = torch.as_tensor(np.asarray(keys), dtype=torch.int64)
    return TensorDict(
        {
            "key": key,
            "first": (key & 0xFF).to(torch.uint8)[:, None].expand(-1, 8 * width).clone(),
            "next": {"last": key[:, None] + torch.arange(width)},
        },
        batch_size=[key.numel()],
    )


def torn_rows(batch: TensorDict) -> int:
    """Count the rows that mix two writes at any element."""
    key = batch["key"][:, None]
    last = batch["next", "last"]
    whole = (last - torch.arange(last.shape[1]) == key).all(1)
    whole &= (batch["first"] == (key & 0xFF).to(torch.uint8)).all(1)
    return int((~whole).sum())


def priority_of(keys: torch.Tensor) -> torch.Tensor:
    """Return a priority per key, float64, scattered over 0.1 .. 10.1."""
    return 0.1 + (keys * 2654435761 % 1000).double() / 100


def attach(
    folder: Path,
    capacity: int = 64,
    *,
    sampler: Any = None,
    uniform: bool = False,
    alpha: float = 0.6,
    beta: float = 0.4,
    kind: Any = TensorDictReplayBuffer,
    batch_size: int = 64,
    **more: Any,
) -> Any:
    """Open a buffer over the rows in the folder. ``more`` is for the buffer, or for its storage.

    In a test with the fixture ``kept_as``, the rows may be kept as frames, also in its children."""
    of_storage = ("job_id", "keep", "timeout_s", "limiter", "resume", "gather_threads", "frames")
    options = {name: more.pop(name) for name in of_storage if name in more}
    if os.environ.get(FRAMES):
        options.setdefault("frames", {"first": 1, "last": 1})
    options = {"job_id": "test", "keep": True, "timeout_s": 30.0} | options
    if sampler is None and uniform:
        sampler = SharedRandomSampler()
    return kind(
        storage=SharedMemmapStorage(capacity, scratch_dir=folder, **options),
        sampler=sampler or SharedPrioritizedSampler(capacity, alpha, beta),
        writer=SharedCursorWriter(),
        batch_size=batch_size,
        **more,
    )


# --- what must hold ------------------------------------------------------------------------------


def published(directory: ReplayDirectory) -> np.ndarray:
    versions = directory.versions
    return (versions & 1 == 0) & (versions > 0)


def assert_lock_is_free(directory: ReplayDirectory) -> None:
    """Check that no other process holds the turnstile or the mutex."""
    assert not is_held(directory.lock_fd, 0, 2)


def assert_sound(rb: TensorDictReplayBuffer) -> None:
    """Check the invariants of ``directory.py``, the tree, the length, and that rows are whole."""
    directory = rb.storage.directory
    assert_lock_is_free(directory)
    with directory.lock():
        assert directory.words[Word.DIRTY] == 0
        visible = published(directory)
        tree = directory.tree
        leaves = tree.leaves.copy()
        assert ((leaves > 0) == visible).all()
        assert directory.length == visible.sum()
        tree.refresh()
        np.testing.assert_allclose(tree.total, leaves.sum(), rtol=1e-12)
        assert tree.minimum == (leaves[visible].min() if visible.any() else np.inf)
        if visible.any():  # every node on the way to every leaf
            middles = (np.cumsum(leaves) - leaves / 2)[visible] / leaves.sum()
            np.testing.assert_array_equal(tree.draw(middles)[0], np.flatnonzero(visible))
        for count, _, member, _ in directory.claims[directory.claims[:, CLAIM_COUNT] > 0].tolist():
            assert count <= directory.capacity and member > 0
    rows = rb.storage.get(torch.from_numpy(np.flatnonzero(visible)))
    assert torn_rows(rows) == 0


def start_at(directory: ReplayDirectory, count: int) -> int:
    """Pretend that each slot was written ``count`` times. Return the first ticket."""
    words, ticket = directory.words, count // directory.capacity * directory.capacity
    words[Word.CURSOR] = words[Word.BASE] = ticket
    words[Word.WRITE_COUNT] = words[Word.INSERT_BASE] = count
    directory.versions[:] = 2 * count + 1
    return ticket


def own_claims(directory: ReplayDirectory) -> int:
    """Count this process's reservations that are neither published nor abandoned."""
    claims = directory.claims
    return int(((claims[:, CLAIM_COUNT] > 0) & (claims[:, CLAIM_MEMBER] == directory.member)).sum())


# --- processes -----------------------------------------------------------------------------------


def start(function: Callable[..., Any], *arguments: Any) -> int:
    """Fork and return the pid. This takes a few ms, however many modules are loaded."""
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        faulthandler.disable()
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        gc.freeze()  # this process must not finalize the parent's objects
        torch.set_num_threads(1)
        function(*arguments)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def end_of(pid: int, timeout_s: float = 60.0) -> int:
    """Wait for a child. Return its exit status, or minus the signal that ended it."""
    fd = os.pidfd_open(pid)
    try:
        waiter = select.poll()  # select() refuses descriptors from 1024 on
        waiter.register(fd, select.POLLIN)
        in_time = waiter.poll(timeout_s * 1000)
    finally:
        os.close(fd)
    if not in_time:
        os.kill(pid, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert in_time, f"the process did not end within {timeout_s:g} s"
    return status


def run_forked(function: Callable[..., Any], *arguments: Any, timeout_s: float = 60.0) -> int:
    """Run in a forked child. Return its exit status, or minus the signal that ended it."""
    return end_of(start(function, *arguments), timeout_s)


@contextlib.contextmanager
def forked(function: Callable[..., Any], *arguments: Any) -> Iterator[int]:
    """Yield the pid of a child, which is killed at the end of the block if it still runs."""
    pid = start(function, *arguments)
    fd = os.pidfd_open(pid)
    try:
        yield pid
    finally:
        with contextlib.suppress(ProcessLookupError, ChildProcessError):  # the caller did it
            signal.pidfd_send_signal(fd, signal.SIGKILL)
            os.waitpid(pid, 0)
        os.close(fd)


def is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def wait_until(condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        time.sleep(1e-3)


def in_thread(function: Callable[[], Any]) -> Future:
    """Call ``function`` in another thread. The process ends without waiting for that thread."""
    future: Future = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


# --- faults --------------------------------------------------------------------------------------


def kill_self() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@contextlib.contextmanager
def at_step(step: int, fault: Callable[[], None]) -> Iterator[None]:
    """Call ``fault`` once, at the given step (from 1) of this thread inside the replay package.

    A step is the entry of a function, a line, or a return.
    """
    done = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal done
        if not frame.f_code.co_filename.startswith(_PACKAGE):
            return None
        done += 1
        if done == step:
            fault()
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


Dying = contextlib.AbstractContextManager[None]
"""What :func:`kill_points` gives to its victim."""


def kill_points(
    victim: Callable[[Dying], object],
    *,
    every: int,
    first: int = 1,
    prepare: Callable[[], object] = lambda: None,
) -> Iterator[tuple[int, bool]]:
    """Kill a forked child at every n-th step of what ``victim`` does in the context that it is
    given. After the end of each child, yield the step and whether it was killed. The last was not.
    ``prepare`` is called before each fork."""
    for step in itertools.count(first, every):
        prepare()
        status = run_forked(victim, at_step(step, kill_self))
        assert status in (0, -signal.SIGKILL), f"it ended with {status} at step {step}"
        yield step, status != 0
        if status == 0:
            return


def interrupt_points(
    change: Callable[[], object], *, every: int, prepare: Callable[[], object] = lambda: None
) -> Iterator[int]:
    """Raise KeyboardInterrupt at every n-th point of ``change``, see :func:`at_point`. Yield each
    point after the interrupt. ``prepare`` is called before each change."""
    for point in itertools.count(1, every):
        prepare()
        try:
            with interrupted_at(point) as points:
                change()
        except KeyboardInterrupt:
            yield point
        if points() < point:
            return


def interrupted_at(point: int) -> contextlib.AbstractContextManager[Callable[[], int]]:
    """Raise KeyboardInterrupt at the given point; see :func:`at_point`."""

    def interrupt() -> None:
        raise KeyboardInterrupt

    return at_point(point, interrupt)


@contextlib.contextmanager
def at_point(point: int, handler: Callable[[], object]) -> Iterator[Callable[[], int]]:
    """Call ``handler`` at the given point (from 1) of this thread inside the replay package.

    At a point, Python may handle a signal. It is the entry of a function, or just after a call
    except the call that enters a ``with`` block. Yields a function that returns the number of
    points. As with a signal, the handler interrupts the code at the point.
    """
    done = 0

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal done
        if event == "c_call" or not frame.f_code.co_filename.startswith(_PACKAGE):
            return
        if event == "return":
            code, at = frame.f_back.f_code.co_code, frame.f_back.f_lasti
            if dis.opname[code[at]] in ("BEFORE_WITH", "SETUP_WITH"):
                return
        done += 1
        if done == point:
            handler()

    sys.setprofile(profile)
    try:
        yield lambda: done
    finally:
        sys.setprofile(None)


class Stores:
    """Counts the stores of a forked child to a directory's tables, and kills it at one of them.

    Args:
        build: folder for the compiled helper.
    """

    def __init__(self, build: Path) -> None:
        source, library = Path(__file__).with_name("stores.c"), build / "stores.so"
        subprocess.run(
            ["cc", "-O1", "-shared", "-fPIC", str(source), "-o", str(library)],
            check=True,
            timeout=60,
        )
        self._library = ctypes.CDLL(str(library))
        self._library.disarm.restype = ctypes.c_long

    def watch(self, directory: ReplayDirectory) -> None:
        """Count the child's stores. The child calls this after joining."""
        tables = [
            (directory.words_address, "control.bin"),
            (directory.versions.ctypes.data, "versions.bin"),
            (directory.tree.leaves.ctypes.data, "tree.bin"),
        ]
        if directory.words[Word.LIMITED] == 1:
            tables.append((directory.users.ctypes.data, "limiter.bin"))
        for start, name in tables:
            assert start % mmap.PAGESIZE == 0
            size = -(-(directory.path / name).stat().st_size // mmap.PAGESIZE) * mmap.PAGESIZE
            self._library.watch(ctypes.c_void_p(start), ctypes.c_size_t(size))

    @contextlib.contextmanager
    def dying_at(self, store: int) -> Iterator[None]:
        """Kill this process before the store with this number, from 1. With 0, never kill it."""
        self._library.arm(ctypes.c_long(store))
        try:
            yield
        finally:
            self._library.disarm()


def die_on_store(address: int) -> None:
    """Let this process die (SIGSEGV) when it first stores to the page at the address."""
    start = address // mmap.PAGESIZE * mmap.PAGESIZE
    if _libc.mprotect(ctypes.c_void_p(start), ctypes.c_size_t(mmap.PAGESIZE), 1):
        raise OSError(ctypes.get_errno(), "mprotect")
