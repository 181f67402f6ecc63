"""SIGINT and SIGTERM as a request to finish, and an event that a signal handler may set."""

from __future__ import annotations

import os
import select
import signal
import threading
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Latch:
    """An event that stays set.

    Setting it is safe inside a signal handler (``threading.Event`` may deadlock there), and
    several of them can be awaited at once.
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
                os.write(self._write_fd, b"!")  # never read: stays readable for every waiter

    def wait(self, timeout_s: float) -> bool:
        """Block until set, at most ``timeout_s``; whether it is set."""
        return wait_any((self,), timeout_s)

    def close(self) -> None:
        """Give the file descriptors back. Whether it was set stays readable."""
        fds, self._read_fd, self._write_fd = (self._read_fd, self._write_fd), -1, -1
        for fd in fds:
            if fd >= 0:
                os.close(fd)


def wait_any(latches: tuple[Latch, ...], timeout_s: float | None) -> bool:
    """Block until one of them is set, at most ``timeout_s`` (None: for ever)."""
    poller = select.poll()
    for latch in latches:
        if latch.is_set() or latch._read_fd < 0:
            return latch.is_set()
        poller.register(latch._read_fd, select.POLLIN)
    return bool(poller.poll(None if timeout_s is None else timeout_s * 1000))


class StopSignals:
    """While installed, SIGINT and SIGTERM set ``latch``; a second SIGINT raises KeyboardInterrupt.

    Python delivers signals to the main thread only: ``install`` elsewhere does nothing.
    """

    def __init__(self, latch: Latch) -> None:
        self._latch = latch
        self._previous: dict[int, object] = {}
        self._interrupted = False
        self.received: int | None = None  # the first one

    def install(self) -> None:
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                self._previous[number] = signal.signal(number, self._handle)

    def restore(self) -> None:
        """Put the previous handlers back, unless somebody replaced ours meanwhile."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number, previous in self._previous.items():
            # None: the previous handler was not installed from Python and cannot be put back.
            if signal.getsignal(number) == self._handle and previous is not None:
                signal.signal(number, previous)  # type: ignore[arg-type]
        self._previous.clear()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.received is None:
            self.received = number
        again = self._interrupted
        self._interrupted = self._interrupted or number == signal.SIGINT
        self._latch.set()
        if again and number == signal.SIGINT:
            raise KeyboardInterrupt
