"""TorchRL's exploration type is one per process (tensordict 0.14.3): who may set it when.

Rollouts that want the same type run side by side; for another type they wait for each other. One
that hangs therefore holds up none of its kind, and nobody at all once its worker was closed.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

from torchrl.envs.utils import ExplorationType, exploration_type, set_exploration_type

from torchrl_dist.errors import DeadlineError


def _never() -> bool:
    return False


class Turns:
    """Sets the process's exploration type for those who are in, and restores it behind the last."""

    def __init__(self) -> None:
        self._cond = threading.Condition()
        self._inside: set[object] = set()
        self._type: ExplorationType | None = None
        self._before: ExplorationType | None = None

    @contextlib.contextmanager
    def hold(
        self,
        who: object,
        type_: ExplorationType,
        *,
        timeout_s: float | None = None,
        given_up: Callable[[], bool] = _never,
    ) -> Iterator[None]:
        """Be in, once nobody is who wants another type.

        Args:
            who: for :meth:`forfeit`; not in yet.
            given_up: asked after every :meth:`call_out`; true lets the caller go on without a turn.

        Raises:
            DeadlineError: not within ``timeout_s``.
        """
        with self._cond:
            if not self._cond.wait_for(
                lambda: not self._inside or self._type == type_ or given_up(), timeout_s
            ):
                raise DeadlineError(
                    f"a rollout of this process with exploration type {self._type} has not ended "
                    f"within {timeout_s:g} s, and this one wants {type_}: shut down the collector "
                    "whose env or policy hangs"
                )
            if not given_up():
                if not self._inside:
                    self._before, self._type = exploration_type(), type_
                    _set(type_)
                self._inside.add(who)
        try:
            yield
        finally:
            with self._cond:
                if who in self._inside:
                    self._leave(who)
                else:  # TorchRL's own collector restores what was there when it began
                    _set(self._type if self._inside else self._before)

    def forfeit(self, who: object) -> None:
        """Count that one as out, whatever it does."""
        with self._cond:
            if who in self._inside:
                self._leave(who)

    def call_out(self) -> None:
        """Let those who wait ask again whether they have given up."""
        with self._cond:
            self._cond.notify_all()

    def _leave(self, who: object) -> None:
        self._inside.remove(who)
        if not self._inside:
            _set(self._before)
            self._cond.notify_all()


def _set(type_: ExplorationType | None) -> None:
    set_exploration_type(type_).__enter__()


@contextlib.contextmanager
def exploring(type_: ExplorationType) -> Iterator[None]:
    """As ``set_exploration_type``, but nothing is set, nor restored, where it is that already."""
    if exploration_type() == type_:
        yield
    else:
        with set_exploration_type(type_):
            yield
