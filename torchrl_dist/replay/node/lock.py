"""A fair lock between processes that is released when its holder dies.

It uses open-file-description locks (``F_OFD_SETLK``) on bytes of one file. Two alternatives were
rejected:

- A process loses its record locks (``lockf``) when it closes *any* descriptor of the file, even one
  that other code opened, for example to copy the folder. Two processes may then write the same rows
  at the same time, without an error. Open-file-description locks rule this out.
- A ``flock`` also belongs to the open file description, but it locks whole files, so each member
  would need a file.

A forked child inherits the open file descriptions, so a killed holder's lock would stay with its
children. A child therefore gives up its inherited descriptors before it does anything else
(``_give_up_copies``), and ``exec`` closes them. If C code forks without Python's hooks and without
``exec``, the child keeps the descriptors until it ends. The threads of a process share the
descriptor, so a ``threading.RLock`` lets in one thread at a time.

Two bytes of the file make up the lock: the *mutex*, and the *turnstile*, which a process holds
while it waits for the mutex. Without the turnstile, a process that unlocks and locks in a loop
starves the other processes, which then wait 5 to 8 ms (median) instead of 50 us. While a process
waits, a word in shared memory is set, and newcomers queue at the turnstile. If no process waits,
newcomers take the mutex directly. If a process is killed while it waits, the word stays set, which
costs the next process two system calls.

The calls go through ``ctypes.PyDLL``, which keeps the GIL. ``fcntl.fcntl`` releases the GIL, so a
holder would keep the lock for a switch interval (5 ms) if its process runs another busy Python
thread.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import itertools
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType, TracebackType

from torchrl_dist import own_files
from torchrl_dist.errors import DeadlineError, DirectoryError

_TURNSTILE, _MUTEX = 0, 1
MEMBER_BYTES = 64
"""Offset of the bytes that members keep locked to show that they are alive."""

_SPINS = 40
_PATIENCE_S = 0.01
_PASSING_S = 1.0
_SLEEPS_S = (20e-6, 50e-6, 100e-6, 200e-6, 500e-6, 1e-3)


class _Flock(ctypes.Structure):
    _fields_ = (
        ("l_type", ctypes.c_short),
        ("l_whence", ctypes.c_short),
        ("l_start", ctypes.c_int64),
        ("l_len", ctypes.c_int64),
        ("l_pid", ctypes.c_int),
    )


_libc = ctypes.PyDLL(None, use_errno=True)
_fcntl = getattr(_libc, "fcntl64", None) or _libc.fcntl
_fcntl.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_void_p)
_fcntl.restype = ctypes.c_int


def _record(kind: int, byte: int) -> _Flock:
    return _Flock(l_type=kind, l_whence=os.SEEK_SET, l_start=byte, l_len=1)


_SETLK = fcntl.F_OFD_SETLK

_descriptors: set[int] = set()
"""The open descriptors of :func:`open_lock_file`."""


def open_lock_file(path: str | os.PathLike[str], flags: int = 0, access: int = os.O_RDWR) -> int:
    """Open a descriptor for locks. A forked child does not have the descriptor.

    Close the descriptor with :func:`close_lock_file`."""
    fd = own_files.open_ours(path, access | flags)
    _descriptors.add(fd)
    return fd


def close_lock_file(fd: int) -> None:
    """Close the descriptor, which releases its locks."""
    _descriptors.discard(fd)
    os.close(fd)


def _give_up_copies() -> None:
    """Release the parent's open file descriptions in a forked child.

    The descriptors' numbers stay in use, so that no other file is mistaken for the lock."""
    if not _descriptors:
        return
    nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for fd in _descriptors:
        os.dup2(nothing, fd, inheritable=False)
    os.close(nothing)


os.register_at_fork(after_in_child=_give_up_copies)


def _try(fd: int, record: _Flock) -> bool:
    return _try_at(fd, ctypes.addressof(record))


def _try_at(fd: int, address: int) -> bool:
    if _fcntl(fd, _SETLK, address) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.EACCES, errno.EAGAIN, errno.EINTR):
        return False
    raise OSError(code, os.strerror(code))


def lock_byte(fd: int, byte: int) -> bool:
    """Take the lock on one byte of the file if it is free. Never blocks."""
    return _try(fd, _record(fcntl.F_WRLCK, byte))


def lock_all(fd: int, count: int) -> bool:
    """Take the first ``count`` bytes of the file if all are free. Never blocks."""
    record = _record(fcntl.F_WRLCK, 0)
    record.l_len = count
    return _try(fd, record)


def unlock_byte(fd: int, byte: int) -> None:
    """Release the lock on one byte."""
    _try(fd, _record(fcntl.F_UNLCK, byte))


def is_held(fd: int, byte: int, count: int = 1) -> bool:
    """Return whether any process holds one of ``count`` bytes through *another* descriptor."""
    record = _record(fcntl.F_WRLCK, byte)
    record.l_len = count
    if _fcntl(fd, fcntl.F_OFD_GETLK, ctypes.addressof(record)) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return record.l_type != fcntl.F_UNLCK


def byte_holder(fd: int, byte: int) -> int | None:
    """Return the pid of the process that holds the byte through another descriptor, or None.

    This is slow, because it reads an entry in ``/proc`` for every open file. Returns 0 if the
    holder is not found there because it is in another pid namespace or belongs to another user.
    """
    if not is_held(fd, byte):
        return None
    status = os.fstat(fd)
    for process in Path("/proc").iterdir():
        if not process.name.isdigit():
            continue
        with contextlib.suppress(OSError):  # the process has ended, or belongs to another user
            for info in (process / "fdinfo").iterdir():
                with contextlib.suppress(OSError):
                    if os.path.samestat(status, os.stat(process / "fd" / info.name)) and _locks(
                        info.read_text(), byte
                    ):
                        return int(process.name)
    return 0


def _locks(fdinfo: str, byte: int) -> bool:
    """Return whether the text of ``/proc/PID/fdinfo/FD`` shows a lock on the byte.

    Each line that describes a lock ends with the lock's first and last byte. Neighbouring locks
    share a line.
    """
    lines = [line.split() for line in fdinfo.splitlines() if line.startswith("lock:")]
    return any(
        int(line[-2]) <= byte and (line[-1] == "EOF" or byte <= int(line[-1])) for line in lines
    )


def is_on_stack(frame: FrameType, top: FrameType | None) -> bool:
    """Return whether ``frame`` is ``top`` or one of its callers."""
    while top is not None:
        if top is frame:
            return True
        top = top.f_back
    return False


class FairLock:
    """Mutual exclusion between all threads of all processes that have the file open.

    Each process has one descriptor. Use the lock as a context manager. Entering blocks at most
    ``timeout_s``.

    A thread that is inside cannot enter again. Otherwise a signal handler that interrupts a change
    to the buffer could use the buffer in the middle of that change. The handler gets an error, and
    the interrupted code keeps the lock. The thread's stack shows whether the thread *is* inside. If
    the thread holds the lock but is not inside, an interrupt (Ctrl-C) cut off entering or leaving.
    When such a thread enters, it first releases the lock.

    Args:
        fd: a descriptor of the lock file, from :func:`open_lock_file`.
        timeout_s: longest wait of one entry, in seconds.
        name: the lock's name in error messages.

    Raises:
        DeadlineError: a thread tried to enter, and the lock was not free within ``timeout_s``.
            The message says what holds the lock.
        DirectoryError: a thread tried to enter after :meth:`close`.
    """

    def __init__(self, fd: int, *, timeout_s: float, name: str) -> None:
        self._fd = fd
        self.timeout_s = timeout_s
        self._name = name
        # an RLock, because an RLock knows its owner
        self._threads = threading.RLock()
        self.inside: FrameType | None = None
        """The stack frame that has entered. A wrapper of this lock stores here the frame that uses
        the wrapper, and later None, to break the cycle of references."""
        self._records = [
            _record(kind, byte)
            for kind in (fcntl.F_WRLCK, fcntl.F_UNLCK)
            for byte in (_TURNSTILE, _MUTEX)
        ]  # kept alive here, because ctypes gets only addresses (which it passes fastest)
        take_turnstile, self._take_mutex, self._give_turnstile, self._give_mutex = map(
            ctypes.addressof, self._records
        )
        self._take = {_TURNSTILE: take_turnstile, _MUTEX: self._take_mutex}
        self._words = memoryview(bytearray(8)).cast("q")
        self._waiting = 0
        self._passing_until = (
            0.0  # until this time.monotonic(), the next process in line is considered stopped
        )

    def share_waiting(self, words: memoryview, index: int) -> None:
        """Use ``words[index]``, in shared memory, as the word that tells whether a process waits.

        Before this call, the lock is exclusive, but not fair.
        """
        self._words, self._waiting = words, index

    def check_entry(self) -> None:
        """Check that this thread may enter. Call it before each entry, if threads share the lock.

        Raises:
            DirectoryError: this thread is inside.
        """
        if not self._threads._is_owned():  # type: ignore[attr-defined]  # not in typeshed
            return
        frame = sys._getframe(1).f_back  # the code that wants to enter
        while frame is not None:
            crossing = frame.f_code in _CROSSING and frame.f_locals.get("self") is self
            if crossing or frame is self.inside:
                raise DirectoryError(
                    f"this thread already holds {self._name}: a signal handler that interrupts a "
                    "use of the buffer cannot use the buffer itself. Have the handler set a flag, "
                    "and act on the flag between two uses of the buffer"
                )
            frame = frame.f_back
        self.leave_if_inside()

    def __enter__(self) -> FairLock:
        deadline = None
        if not self._threads.acquire(blocking=False):
            deadline = time.monotonic() + self.timeout_s
            if not self._threads.acquire(timeout=self.timeout_s):
                raise DeadlineError(
                    f"waited {self.timeout_s:g} s for another thread of this process to release "
                    f"{self._name}; pass a larger timeout_s if that thread only needs more time"
                )
        try:
            if self._fd < 0:
                raise self._closed_error()
            if self._words[self._waiting] or not _try_at(self._fd, self._take_mutex):
                self._queue(deadline)
            self.inside = sys._getframe(1)
        except BaseException as error:
            self.leave_if_inside()
            if self._fd < 0 and isinstance(error, OSError):
                raise self._closed_error() from None
            raise
        return self

    def _closed_error(self) -> DirectoryError:
        return DirectoryError(
            f"{self._name} was closed in this process; build the storage again to use it"
        )

    @property
    def closed(self) -> bool:
        return self._fd < 0

    def close(self) -> None:
        """Close the descriptor. Call it while holding the lock. Later attempts to enter raise
        ``DirectoryError``."""
        fd, self._fd = self._fd, -1
        close_lock_file(fd)

    def _queue(self, deadline: float | None) -> None:
        """Wait for the turnstile, and then for the mutex."""
        # An interrupt may have left the mutex with this thread, so release it first. Otherwise, if
        # another process holds the turnstile and waits for the mutex, this thread would wait for
        # the turnstile, and neither would go on.
        _try_at(self._fd, self._give_mutex)
        if not _try_at(self._fd, self._take[_TURNSTILE]):
            if time.monotonic() < self._passing_until and _try_at(self._fd, self._take_mutex):
                return
            deadline = self._wait_in_line(deadline)
            if deadline is None:
                return
        try:
            self._words[self._waiting] = 1
            if not _try_at(self._fd, self._take_mutex):
                self._wait_for_mutex(deadline)
        finally:
            self._words[self._waiting] = 0
            _try_at(self._fd, self._give_turnstile)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.inside = None
        if self._fd >= 0:
            _try_at(self._fd, self._give_mutex)
        self._leave_threads()

    def leave_if_inside(self) -> None:
        """Leave the lock if an interrupt left it locked while this thread was entering or
        leaving."""
        if self._threads._is_owned():  # type: ignore[attr-defined]  # not in typeshed
            if self._fd >= 0:
                _try_at(self._fd, self._give_turnstile)
            self.__exit__(None, None, None)

    def _leave_threads(self) -> None:
        # the loop runs once, unless interrupts left the lock acquired several times
        while self._threads._is_owned():  # type: ignore[attr-defined]  # not in typeshed
            self._threads.release()

    def _wait_in_line(self, deadline: float | None) -> float | None:
        """Wait for the turnstile. Return None if the mutex was taken without the turnstile.

        The process that holds the turnstile polls the mutex. If the mutex nevertheless stays free
        for longer than ``_PATIENCE_S``, the caller considers that process stopped (for example by
        SIGSTOP), and takes the mutex directly. For up to ``_PASSING_S`` seconds, the caller's
        process then takes the mutex whenever it is free, without waiting in line.
        """
        if deadline is None:
            deadline = time.monotonic() + self.timeout_s
        free_since = None
        for pause in itertools.chain([0.0] * _SPINS, self._pauses()):
            if pause:
                time.sleep(pause)
            if _try_at(self._fd, self._take[_TURNSTILE]):
                self._passing_until = 0.0
                return deadline
            if not pause:
                continue
            now = time.monotonic()
            if is_held(self._fd, _MUTEX):
                free_since = None
            elif free_since is None:
                free_since = now
            elif now - free_since > _PATIENCE_S and _try_at(self._fd, self._take_mutex):
                self._passing_until = now + _PASSING_S
                return None
            if now > deadline:
                raise self._late()
        raise AssertionError("pauses do not end")

    @staticmethod
    def _pauses() -> Iterator[float]:
        """Yield growing pauses in seconds, without end."""
        for pause in _SLEEPS_S:
            yield from itertools.repeat(pause, 8)
        yield from itertools.repeat(_SLEEPS_S[-1])

    def _wait_for_mutex(self, deadline: float | None) -> None:
        """Try repeatedly, with growing pauses, because a blocking ``F_SETLKW`` has no deadline."""
        if deadline is None:
            deadline = time.monotonic() + self.timeout_s
        for _ in range(_SPINS):
            if _try_at(self._fd, self._take_mutex):
                return
        for pause in self._pauses():
            time.sleep(pause)
            if _try_at(self._fd, self._take_mutex):
                return
            if time.monotonic() > deadline:
                raise self._late()

    def _late(self) -> DeadlineError:
        return DeadlineError(
            f"waited {self.timeout_s:g} s for {self._name}, which is held by {self._holder()}; if "
            "that process is stopped, continue it (SIGCONT) or kill it (a killed process frees the "
            "lock), or pass a larger timeout_s"
        )

    def _holder(self) -> str:
        holder, next_in_line = (byte_holder(self._fd, byte) for byte in (_MUTEX, _TURNSTILE))
        if not (holder or next_in_line):
            return "an unknown process"
        waiting = f"process {next_in_line}, the next in line"
        if not holder:
            return waiting
        return f"process {holder}" + (f", followed by {waiting}" if next_in_line else "")


_CROSSING = frozenset(
    function.__code__
    for function in (FairLock.__enter__, FairLock.__exit__, FairLock.leave_if_inside)
)
"""If one of these functions is on a thread's stack, the thread is entering or leaving."""
