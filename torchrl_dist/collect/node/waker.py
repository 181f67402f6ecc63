"""Wake a thread that waits for sockets, from another thread."""

from __future__ import annotations

import contextlib
import os
import threading

from torchrl_dist.forks import renewed


class Waker:
    """``fileno`` is readable from a call of ``wake`` until the next call of ``quiet``."""

    def __init__(self) -> None:
        self._event = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        # Without the lock, ``wake`` could write to another file that was opened under the number of
        # the closed file.
        self._lock = renewed(self, "_lock", threading.Lock)

    def fileno(self) -> int:
        return self._event

    def wake(self) -> None:
        """Make ``fileno`` readable. Any thread may call this. After ``close``, it does nothing."""
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
