"""Let threads share TorchRL's exploration type. A process has only one exploration type (tensordict
0.14.3).

Calls under the same exploration type run concurrently. A call under another type waits until all
running calls have ended. A policy that hangs therefore delays only calls under other exploration
types, and these calls raise an error after a minute.

Ctrl-C may interrupt a call between any two instructions, even inside a context manager. Every
change is therefore recorded before the change is made. :meth:`Exploring.call` may undo the same
change twice, because a second undo has no effect.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from tensordict.nn import probabilistic
from torchrl.envs.utils import ExplorationType, exploration_type, set_exploration_type

from torchrl_dist.errors import DeadlineError
from torchrl_dist.forks import now_and_in_children

_T = TypeVar("_T")

_WAIT_S = 60.0


def _setter(kind: ExplorationType | None) -> Callable[..., None]:
    """Return a function that sets the exploration type to ``kind``: the ``__exit__`` of a context
    manager that restores ``kind``. No other way to set a type takes less time."""
    setting = set_exploration_type(kind)
    setting.prev = kind
    return setting.__exit__


_SETTERS = {kind: _setter(kind) for kind in (None, *ExplorationType)}


def _set(kind: ExplorationType | None) -> None:
    _SETTERS[kind](None, None, None)


class _Call:
    """One call of a function under an exploration type. ``since`` is the time at which the call
    began to run, by ``time.monotonic()``."""

    __slots__ = ("since", "thread", "type", "what")

    def __init__(self, type: ExplorationType, what: str) -> None:
        self.type, self.what = type, what
        self.thread = threading.get_ident()
        self.since = time.monotonic()


class _UnderWay:
    """The running and waiting calls of this process. ``lock`` guards all attributes. Methods
    acquire ``lock`` itself, because acquiring it through the condition ``changed`` takes longer.

    Attributes:
        calls: the running calls, in the order in which they began. All running calls have the same
            exploration type, except for calls inside other calls.
        waits: the calls that wait until the running calls have ended.
        outside: if ``is_set``, the exploration type that was set before the first running call.
            This type is restored after the last running call.
    """

    def __init__(self) -> None:
        self.calls: list[_Call] = []
        self.is_set = False
        self.outside: ExplorationType | None = None
        now_and_in_children(self, _UnderWay._renew)

    def _renew(self) -> None:
        self.lock = threading.Lock()
        self.changed = threading.Condition(self.lock)
        self.waits: list[_Call] = []
        # After a fork, replace tensordict's lock and restore the exploration type, because a thread
        # of the parent process may have held the lock or set the type.
        kept = getattr(probabilistic, "_interaction_type", None)
        if kept is not None and hasattr(kept, "_lock"):
            kept._lock = threading.Lock()
        self.calls = [call for call in self.calls if call.thread == threading.get_ident()]
        self._restore()

    def begin(self, call: _Call) -> None:
        """Block until the call may run, then make its exploration type current.

        Raises:
            DeadlineError: calls under another type did not end within a minute. The error names
                these calls.
        """
        with self.lock:
            if not self._fits(call):
                self.waits.append(call)
                if not self.changed.wait_for(lambda: self._fits(call), _WAIT_S):
                    raise DeadlineError(
                        f"{call.what} under {call.type} has waited {_WAIT_S:g} s for calls under "
                        f"another exploration type to end: {self}. A process has only one "
                        "exploration type of TorchRL at a time; give all collectors of this "
                        "process the same exploration type, or run one of them in another process"
                    )
                self.waits.remove(call)
                call.since = time.monotonic()
            if not self.calls and not self.is_set:
                self.outside = exploration_type()
                self.is_set = True
            self.calls.append(call)
            _set(call.type)

    def end(self, call: _Call) -> None:
        """Undo the changes that ``begin`` made, even if ``begin`` was interrupted. A second ``end``
        of the same call has no effect."""
        with self.lock:
            for calls in (self.calls, self.waits):
                if call in calls:
                    calls.remove(call)
            self._restore()

    def _restore(self) -> None:
        if self.calls:
            _set(self.calls[-1].type)
        elif self.is_set:
            _set(self.outside)
            self.is_set = False
        if self.waits:
            self.changed.notify_all()

    def _fits(self, call: _Call) -> bool:
        """Whether the call may run now. A call may run if no call under another exploration type is
        running, or if the call's own thread is already inside a call."""
        return (
            not self.calls
            or self.calls[0].type is call.type
            or any(other.thread == call.thread for other in self.calls)
        )

    def __str__(self) -> str:
        now = time.monotonic()
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        return ", ".join(
            f"{call.what}, in thread {names.get(call.thread)!r} under {call.type}, has run for "
            f"{now - call.since:.1f} s"
            for call in self.calls
        )


_now = _UnderWay()


def held_up() -> str:
    """Describe the running calls if other calls of this process wait for them. If no call waits,
    return an empty string."""
    with _now.lock:
        return str(_now) if _now.waits else ""


class Exploring:
    """Call functions under one exploration type."""

    def __init__(self, type: ExplorationType, what: str) -> None:
        self._type, self._what = type, what

    def call_alone(self, function: Callable[..., _T], *args: Any) -> _T:
        """Do the same as :meth:`call`, but without a lock. Call this method only if no other thread
        of the process calls a policy."""
        outside = exploration_type()
        try:
            _set(self._type)
            return function(*args)
        finally:
            _set(outside)

    def call(self, function: Callable[..., _T], *args: Any) -> _T:
        """Return ``function(*args)``, called with TorchRL's exploration type set.

        Raises:
            DeadlineError: calls under another type did not end within a minute. The error names
                these calls.
        """
        call = _Call(self._type, self._what)
        try:
            try:
                _now.begin(call)
                return function(*args)
            finally:
                _now.end(call)
        except BaseException:  # an interrupt may have prevented end() above
            _now.end(call)
            raise
