"""Deadlines that advance only while this process runs.

When a process continues after a stop (by SIGSTOP, a suspended machine or a debugger), deadlines on
the usual clock may have passed, although the other processes had no time to answer. Waits are
therefore measured on the clock :func:`awake`. A thread of the process advances this clock, so the
clock stops with the process.
"""

from __future__ import annotations

import itertools
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import TypeVar

from ..errors import ConfigurationError
from ..forks import now_and_in_children

_T = TypeVar("_T")
_TICK_S = 0.25
# Two consecutive ticks are further apart than this only if the process was stopped or got no CPU
# time.
_MOST_S = 2 * _TICK_S
_LONGEST_S = 1e9


class _Clock:
    def __init__(self) -> None:
        self._keys = itertools.count()
        now_and_in_children(self, _Clock._renew)

    def _renew(self) -> None:
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._sooner = threading.Event()
        self._next_look = 0.0
        # The time of the last tick on time.monotonic() (None before the first tick), and the total
        # time for which this process was stopped. The two values are in one tuple, because other
        # threads read them without a lock.
        self._ticked: tuple[float | None, float] = (None, 0.0)
        self._due: dict[int, tuple[float, Callable[[], None]]] = {}

    def now(self) -> float:
        """Return ``time.monotonic()`` minus the time for which this process was stopped.

        Stops of less than half a second, and stops before :func:`start_clock`, are not subtracted.
        """
        tick, stopped = self._ticked
        now = time.monotonic()
        return now - stopped - (0.0 if tick is None else max(0.0, now - tick - _MOST_S))

    def start(self) -> None:
        """Notice stops from now on; idempotent. Starts a thread that lives as long as this
        process."""
        with self._lock:
            if self._thread is None:
                self._ticked = (time.monotonic(), self._ticked[1])
                self._thread = threading.Thread(
                    target=self._run, name="torchrl_dist-clock", daemon=True
                )
                self._thread.start()

    def call_at(self, due: float, function: Callable[[], None]) -> int:
        """Call ``function()`` in the clock's thread when :func:`awake` reaches ``due``.

        The function must not block. Returns a key for :func:`forget`.
        """
        if self._thread is None:
            self.start()
        key = next(self._keys)
        self._due[key] = (due, function)
        if due < self._next_look:
            self._sooner.set()
        return key

    def forget(self, key: int) -> bool:
        """Cancel a call that :func:`call_at` scheduled. Return whether it was still pending."""
        return self._due.pop(key, None) is not None

    def _run(self) -> None:
        while True:
            # set before _due is read, so that no concurrent call_at is missed
            self._next_look = self.now() + _TICK_S
            soonest = min((due for due, _ in list(self._due.values())), default=self._next_look)
            self._next_look = min(self._next_look, soonest)
            self._sooner.wait(max(0.0, self._next_look - self.now()))
            self._sooner.clear()
            tick, stopped = self._ticked
            now = time.monotonic()
            assert tick is not None
            self._ticked = (now, stopped + max(0.0, now - tick - _MOST_S))
            now = self.now()
            for key, (due, function) in list(self._due.items()):
                if due <= now and self.forget(key):
                    try:
                        function()
                    # continue, because the calls for the other deadlines must still be made
                    except Exception:
                        traceback.print_exc()


_clock = _Clock()
awake, start_clock, call_at, forget = _clock.now, _clock.start, _clock.call_at, _clock.forget


def check_timeout(timeout_s: float) -> None:
    """Raise ConfigurationError unless the timeout is above 0 and fits the clocks of C++."""
    if not 0 < timeout_s <= _LONGEST_S:
        raise ConfigurationError(
            f"timeout_s={timeout_s}: expected a positive, finite number of seconds, at most "
            f"{_LONGEST_S:g}"
        )


def result_of(future: Future[_T], timeout_s: float) -> _T:
    """Return ``future.result(timeout_s)``, with the deadline measured on :func:`awake`."""
    due = awake() + timeout_s
    while True:
        try:
            return future.result(max(0.0, due - awake()))
        except FutureTimeoutError:
            if future.done() or awake() >= due:
                raise
