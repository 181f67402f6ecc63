"""Let one thread wake another thread that waits for sockets."""

from __future__ import annotations

import contextlib
import os
import threading

from torchrl_dist.forks import renewed


class Waker:
    """A file that selectors can wait for. The file is readable from a call of ``wake`` until the
    next call of ``quiet``."""

    def __init__(self) -> None:
        self._event = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        # Without the lock, ``wake`` could write to the wrong file, because a file that was opened
        # after ``close`` may get the number of the closed file.
        self._lock = renewed(self, "_lock", threading.Lock)

    def fileno(self) -> int:
        return self._event

    def wake(self) -> None:
        """Make the file readable. Any thread may call this method. After ``close``, this method
        does nothing."""
        with self._lock:
            if self._event >= 0:
                os.eventfd_write(self._event, 1)

    def quiet(self) -> None:
        with contextlib.suppress(BlockingIOError):  # ``wake`` was not called
            os.eventfd_read(self._event)

    def close(self) -> None:
        """Close the file. Idempotent."""
        with self._lock:
            event, self._event = self._event, -1
        if event >= 0:
            os.close(event)
