"""A thread pool for calls that other processes make."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

from ..forks import renewed


class DaemonPool:
    """A pool of up to ``max_threads`` daemon threads, each started only when it has work.

    A ``concurrent.futures.ThreadPoolExecutor`` joins its threads when the interpreter exits. With
    such a pool, a single call that never returns would keep a finished process alive.
    """

    def __init__(self, max_threads: int, name: str) -> None:
        self._max_threads = max_threads
        self._name = name
        self._work: queue.SimpleQueue[tuple[Callable[..., Any], tuple[Any, ...]] | None]
        self._work = queue.SimpleQueue()
        self._lock = renewed(self, "_lock", threading.Lock)
        self._threads = 0
        self._unfinished = 0

    def submit(self, fn: Callable[..., Any], *args: Any) -> None:
        """Run ``fn(*args)`` soon; does not block. ``fn`` must not raise."""
        with self._lock:
            self._unfinished += 1
            start = self._threads < min(self._unfinished, self._max_threads)
            self._threads += start
        self._work.put((fn, args))
        if start:
            threading.Thread(target=self._run, name=self._name, daemon=True).start()

    def close(self) -> None:
        """Let the threads end once all queued work is done. Does not wait for their end."""
        with self._lock:
            for _ in range(self._threads):
                self._work.put(None)

    def _run(self) -> None:
        while (item := self._work.get()) is not None:
            fn, args = item
            try:
                fn(*args)
            finally:
                with self._lock:
                    self._unfinished -= 1
                del fn, args, item
