"""Handle the signals that ask a job to finish. The handlers set a :class:`Latch`."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from torchrl_dist.stopping import Stopped, note_stop_request

# A launcher or a terminal may send each of these signals to every process of a job.
_ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# These signals announce SIGTERM (sbatch --signal=USR1@60). Without a handler, they kill the
# process.
_NOTICES = (signal.SIGUSR1, signal.SIGUSR2)
STOP_SIGNALS = (*_ENDS, *_NOTICES)
_Handler = Callable[[int, FrameType | None], Any] | int | signal.Handlers | None
# Slurm and timeout(1) send SIGTERM twice for one stop. Therefore a second SIGTERM within this many
# seconds of the first is ignored. Ctrl-C typed twice always counts.
_SAME_S = 0.25
_LONGEST_POLL_MS = 2**31 - 1


class Latch:
    """An event that stays set.

    Unlike ``threading.Event``, it can be set in a signal handler without a deadlock. Several
    latches can be awaited together.
    """

    def __init__(self) -> None:
        self._read_fd, self._write_fd = os.pipe()
        self._is_set = False

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        if not self._is_set:
            self._is_set = True
            if self._write_fd >= 0:
                os.write(self._write_fd, b"!")  # never read, so that the pipe stays readable

    def wait(self, timeout_s: float) -> bool:
        """Block until the latch is set, at most ``timeout_s``; return whether it is set."""
        return wait_any((self,), timeout_s)

    def add_to(self, poller: select.poll) -> bool:
        """Let the poller wake when the latch is set. Return False if the latch is closed."""
        if self._read_fd >= 0:
            poller.register(self._read_fd, select.POLLIN)
        return self._read_fd >= 0

    def close(self) -> None:
        """Close the file descriptors. ``is_set`` still works."""
        fds, self._read_fd, self._write_fd = (self._read_fd, self._write_fd), -1, -1
        for fd in fds:
            if fd >= 0:
                os.close(fd)


def wait_any(latches: tuple[Latch, ...], timeout_s: float | None) -> bool:
    """Block until one of the latches is set, at most ``timeout_s`` (None: indefinitely)."""
    poller = select.poll()
    for latch in latches:
        if latch.is_set() or latch._read_fd < 0:
            return latch.is_set()
        poller.register(latch._read_fd, select.POLLIN)
    return bool(poller.poll(None if timeout_s is None else min(timeout_s * 1000, _LONGEST_POLL_MS)))


class StopSignals:
    """Handlers with which SIGINT, SIGTERM, SIGHUP, SIGUSR1 and SIGUSR2 set ``latch``.

    A second SIGINT, SIGTERM or SIGHUP raises KeyboardInterrupt or SystemExit in the main thread,
    unless ``patient`` is set. SIGUSR1 and SIGUSR2 never raise, because launchers send them some
    time before SIGTERM. Previously installed handlers are called too, except those that would end
    the process. Ignored signals stay ignored. SIGUSR1 and SIGUSR2 are left alone if the program
    handles them.

    Python handles signals in the main thread only, so ``install`` does nothing in other threads.

    Args:
        first: called with the first signal, in its handler.
    """

    def __init__(self, latch: Latch, first: Callable[[signal.Signals], None] | None = None) -> None:
        self._latch = latch
        self._first = first
        self._previous: dict[int, _Handler] = {}
        self._asked_at: float | None = None
        self._is_over = False
        self.patient = False
        self.interrupts = False  # if true, the next signal raises KeyboardInterrupt
        self.received: signal.Signals | None = None  # the first stop signal

    def install(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        for number in STOP_SIGNALS:
            previous = signal.getsignal(number)
            free = previous is _outlive or not _is_caught(number)
            if previous is not signal.SIG_IGN and (free or number in _ENDS):
                self._previous[number] = previous
                signal.signal(number, self._handle)

    def restore(self) -> None:
        """Restore the previous handlers, unless other code has replaced this object's handlers
        meanwhile."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number, previous in self._previous.items():
            # None: the previous handler was not installed from Python and cannot be restored.
            if signal.getsignal(number) == self._handle and previous is not None:
                signal.signal(number, previous)
        self._is_over = True

    def _handle(self, number: int, frame: FrameType | None) -> None:
        previous = self._previous.get(number)
        if self._is_over:  # other code, such as TorchRL, has put this handler back
            signal.signal(number, previous or signal.SIG_DFL)
            signal.raise_signal(number)
            return
        if self.interrupts:
            self.interrupts = False
            raise KeyboardInterrupt
        name = signal.Signals(number)
        note_stop_request()
        if self.received is None:
            self.received = name
            if self._first is not None:
                self._first(name)
        self._latch.set()
        if callable(previous) and not _ends_process(previous):
            previous(number, frame)
        if number not in _ENDS:
            return
        now = time.monotonic()
        if self._asked_at is None:
            self._asked_at = now
        elif (number == signal.SIGINT or now - self._asked_at > _SAME_S) and not self.patient:
            raise KeyboardInterrupt if number == signal.SIGINT else Stopped(128 + number)


def outlive_stop_signals() -> None:
    """Prevent stop signals from ending this process.

    Call this function in the main thread of a process that another process ends, because that
    other process handles these signals. SIGINT, SIGTERM and SIGHUP still end this process's forked
    children and the programs that it starts. All these children and programs ignore SIGUSR1 and
    SIGUSR2.
    """
    for number in _ENDS:
        # not SIG_IGN, because an ignored signal would stay ignored across exec
        signal.signal(number, _outlive)
        signal.siginterrupt(number, False)
    for number in _NOTICES:
        signal.signal(number, signal.SIG_IGN)


def _outlive(number: int, frame: FrameType | None) -> None:
    pass


def say(line: str) -> None:
    """Print a line to stderr from a signal handler, even one that interrupted another print."""
    with contextlib.suppress(Exception):  # the handler interrupted a print, or stderr is closed
        start = "\n" if sys.stderr.isatty() else ""  # after ^C or a progress bar
        print(start + line, file=sys.stderr, flush=True)


def _ends_process(handler: Callable[..., Any]) -> bool:
    """Whether a handler ends the process.

    Python's default handler of SIGINT and TorchRL's handlers do. TorchRL's handlers first remove
    the files of TorchRL's storages, which TorchRL also removes at a normal exit.
    """
    of_torchrl = getattr(handler, "__module__", "").startswith("torchrl.")
    return handler is signal.default_int_handler or of_torchrl


def _is_caught(number: int) -> bool:
    """Whether this process has a handler for a signal, in Python or in C (such as faulthandler)."""
    if signal.getsignal(number) not in (signal.SIG_DFL, signal.SIG_IGN):
        return True
    status = Path("/proc/self/status").read_text()
    caught = next(line for line in status.splitlines() if line.startswith("SigCgt:"))
    return bool(int(caught.split()[1], 16) >> (number - 1) & 1)


_masks = threading.local()


def _block_at_fork() -> None:
    """Block stop signals until the child has its handlers, because earlier signals would be
    lost."""
    _masks.before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)


def _unblock_after_fork() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _masks.before)


def _forget_in_child() -> None:
    """Remove this module's handlers in a forked child, which is not in the session.

    ``multiprocessing`` ends its children by SIGTERM and waits for them. A handler of this module
    would set the parent's latch instead of ending the child.
    """
    defaults: dict[int, _Handler] = {number: signal.SIG_DFL for number in _ENDS}
    defaults[signal.SIGINT] = signal.default_int_handler
    for number in STOP_SIGNALS:
        handler = signal.getsignal(number)
        owner = getattr(handler, "__self__", None)
        if handler is not _outlive and not isinstance(owner, StopSignals):
            continue
        previous = owner._previous.get(number) if isinstance(owner, StopSignals) else _outlive
        if previous is None or previous is _outlive or number in _NOTICES:
            previous = defaults.get(number, signal.SIG_IGN)
        signal.signal(number, previous)
    _unblock_after_fork()


os.register_at_fork(
    before=_block_at_fork, after_in_parent=_unblock_after_fork, after_in_child=_forget_in_child
)
