"""Whether this process was asked to stop, for parts that know nothing of sessions."""

from __future__ import annotations

import math
import time

_asked_at = -math.inf


def note_stop_request() -> None:
    """A stop signal came. Safe in a signal handler."""
    global _asked_at
    _asked_at = time.monotonic()


def stop_requested_since(instant: float) -> bool:
    """Whether one came at or after ``instant``, on ``time.monotonic()``."""
    return _asked_at >= instant
