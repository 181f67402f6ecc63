"""Wakes a thread that waits for sockets when another one has something for it."""

from __future__ import annotations

import contextlib
import os
import threading

from torchrl_dist.forks import now_and_in_children


class Waker:
    """``fileno`` is readable from a ``wake`` on until ``quiet``."""

    def __init__(self) -> None:
        self._event = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        now_and_in_children(self, Waker._renew)

    def _renew(self) -> None:
        self._lock = threading.Lock()  # a closed number may be another file's in the next instant

    def fileno(self) -> int:
        return self._event

    def wake(self) -> None:
        """From any thread; without effect once it is closed."""
        with self._lock:
            if self._event >= 0:
                os.eventfd_write(self._event, 1)

    def quiet(self) -> None:
        with contextlib.suppress(BlockingIOError):  # nobody woke it
            os.eventfd_read(self._event)

    def close(self) -> None:
        """Idempotent."""
        with self._lock:
            event, self._event = self._event, -1
        if event >= 0:
            os.close(event)
