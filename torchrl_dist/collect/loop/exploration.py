"""TorchRL's exploration type, which is one per process (tensordict 0.14.3), among several threads.

Calls under the same type run side by side; one under another type waits until they have ended. So
a policy that hangs holds up only those that need another type, and these only for a while.
"""

from __future__ import annotations

import threading
import time
from typing import Any

from torchrl.envs.utils import ExplorationType, set_exploration_type

from torchrl_dist.errors import DeadlineError
from torchrl_dist.forks import now_and_in_children

_WAIT_S = 60.0
# Others could keep a type set for ever by taking turns. They hold back for one who waits, but only
# in the first seconds of that wait, which may be in vain.
_POLITE_S = 5.0


class _UnderWay:
    """The calls of this process. Guarded by ``lock``, which costs less by itself than by the
    condition ``changed`` over it."""

    setting: set_exploration_type  # of the first call

    def __init__(self) -> None:
        self.calls: list[Exploring] = []  # all under one type
        now_and_in_children(self, _UnderWay._renew)

    def _renew(self) -> None:
        self.lock = threading.Lock()
        self.changed = threading.Condition(self.lock)
        self.waits: list[float] = []  # since when, time.monotonic(); longest first
        self.calls = [call for call in self.calls if call.thread == threading.get_ident()]

    def __str__(self) -> str:
        now = time.monotonic()
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        return ", ".join(
            f"{call.what}, in thread {names.get(call.thread)!r} under {call.type}, has run for "
            f"{now - call.since:.1f} s"
            for call in self.calls
            if call.thread is not None  # it has one while it is under way
        )


_now = _UnderWay()


def held_up() -> str:
    """What calls of this process wait for, in words; empty if none waits."""
    with _now.lock:
        return str(_now) if _now.waits else ""


class Exploring:
    """``with`` this, TorchRL's exploration type is ``type``. For one thread at a time.

    Entering raises:
        DeadlineError: calls under another type have not ended within a minute; names them.
    """

    def __init__(self, type: ExplorationType, what: str) -> None:
        self.type, self.what = type, what
        self.thread = 0  # its ident
        self.since = 0.0
        self._setting = set_exploration_type(type)
        self._nested: list[set_exploration_type] = []

    def __enter__(self) -> None:
        me = threading.get_ident()
        with _now.lock:
            if _now.calls or _now.waits:
                if any(call.thread == me for call in _now.calls):
                    self._nested.append(set_exploration_type(self.type))
                    self._nested[-1].__enter__()
                    return
                self._wait_for_turn()
            if not _now.calls:
                self._setting.__enter__()
                _now.setting = self._setting
            self.thread, self.since = me, time.monotonic()
            _now.calls.append(self)

    def __exit__(self, *error: Any) -> None:
        with _now.lock:
            if self._nested:
                self._nested.pop().__exit__(*error)
                return
            _now.calls.remove(self)
            if not _now.calls:
                _now.setting.__exit__(*error)
                if _now.waits:
                    _now.changed.notify_all()

    def _fits(self) -> bool:
        return not _now.calls or _now.calls[0].type is self.type

    def _wait_for_turn(self) -> None:
        begun = time.monotonic()
        if _now.waits and self._fits():
            polite_s = _now.waits[0] + _POLITE_S - begun
            _now.changed.wait_for(lambda: not _now.waits, max(0.0, polite_s))
        if self._fits():
            return
        _now.waits.append(begun)
        try:
            if not _now.changed.wait_for(self._fits, _WAIT_S):
                raise DeadlineError(
                    f"{self.what}, under {self.type}, has waited {_WAIT_S:g} s for its turn: "
                    f"{_now}. TorchRL's exploration type is one per process: let this collector, "
                    "or that one, have the same type, or run in another process"
                )
        finally:
            _now.waits.remove(begun)
            _now.changed.notify_all()
