"""Whether this process, or what a thread does, was asked to stop: for parts that know nothing of
sessions or collectors."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator


class Stopped(SystemExit):
    """Ends the main thread after a second stop signal, with the exit code that shells give it."""


_asked_at = -math.inf
_told: set[int] = set()  # threads, by their idents


def note_stop_request() -> None:
    """A stop signal came. Safe in a signal handler."""
    global _asked_at
    _asked_at = time.monotonic()


def stop_requested_since(instant: float) -> bool:
    """Whether one came at or after ``instant``, on ``time.monotonic()``."""
    return _asked_at >= instant


class _Thread(threading.local):
    wanted: Callable[[], bool] | None = None


_thread = _Thread()


@contextlib.contextmanager
def giving_up_when(wanted: Callable[[], bool]) -> Iterator[None]:
    """Inside, long waits of this thread end with their error soon after ``wanted()`` is true."""
    before, _thread.wanted = _thread.wanted, wanted
    try:
        yield
    finally:
        _thread.wanted = before


@contextlib.contextmanager
def giving_up(threads: Iterable[threading.Thread]) -> Iterator[None]:
    """Meanwhile long waits of these threads end with their error soon."""
    told = {thread.ident for thread in threads if thread.ident is not None} - _told
    _told.update(told)
    try:
        yield
    finally:
        _told.difference_update(told)


def gives_up() -> bool:
    """Whether this thread's waits are to end; to be asked while it waits."""
    if _thread.wanted is not None and _thread.wanted():
        return True
    return threading.get_ident() in _told
