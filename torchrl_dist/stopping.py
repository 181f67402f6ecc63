"""Tell whether this process, or the work of one thread, was asked to stop.

Modules that must not import sessions or collectors use this module.
"""

from __future__ import annotations

import contextlib
import math
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping


class Stopped(SystemExit):
    """Ends the main thread after a second stop signal. The exit code is 128 + the signal's number,
    as in a shell."""


_asked_at = -math.inf
_told: set[int] = set()  # idents of the threads whose waits must fail


def note_stop_request() -> None:
    """Record that a stop signal has arrived. May be called in a signal handler."""
    global _asked_at
    _asked_at = time.monotonic()


def stop_requested_since(instant: float) -> bool:
    """Whether a stop signal has arrived at or after ``instant`` (on ``time.monotonic()``)."""
    return _asked_at >= instant


@contextlib.contextmanager
def handling(handlers: Mapping[int, Callable[..., object]]) -> Iterator[None]:
    """Within this context, handle signals with ``handlers``, which are given by signal number. Do
    nothing outside the main thread, because other threads cannot set handlers."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


class _Thread(threading.local):
    wanted: Callable[[], bool] | None = None


_thread = _Thread()


@contextlib.contextmanager
def giving_up_when(wanted: Callable[[], bool]) -> Iterator[None]:
    """Within this context, long waits of this thread fail soon after ``wanted()`` becomes true."""
    before, _thread.wanted = _thread.wanted, wanted
    try:
        yield
    finally:
        _thread.wanted = before


@contextlib.contextmanager
def giving_up(threads: Iterable[threading.Thread]) -> Iterator[None]:
    """Within this context, long waits of these threads fail soon."""
    told = {thread.ident for thread in threads if thread.ident is not None} - _told
    _told.update(told)
    try:
        yield
    finally:
        _told.difference_update(told)


def gives_up() -> bool:
    """Whether this thread must end its wait. A thread that waits calls this function repeatedly."""
    if _thread.wanted is not None and _thread.wanted():
        return True
    return threading.get_ident() in _told
