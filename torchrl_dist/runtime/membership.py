"""The states of the other processes: which of them serve, which are lost, and which have left.

This module does not communicate. The session reports events to this module, and acts on the
answers.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from ..forks import renewed
from .awake import awake


class Membership:
    """The states of all other ranks. Thread-safe. Ranks are global; ``me`` is never lost."""

    def __init__(self, world_size: int, me: int) -> None:
        self._others = frozenset(range(world_size)) - {me}
        self._changed = renewed(self, "_changed", threading.Condition)
        self._lost: dict[int, str] = {}
        self._serving: set[int] = set()
        self._left: set[int] = set()
        self._arrived: dict[int, dict[int, Callable[[], None]]] = {}
        self._departing: list[Callable[[], None]] = []

    def lose(self, rank: int, reason: str) -> bool:
        """Record that ``rank`` is lost. Return False if it was already known to be lost, or had
        left cleanly."""
        with self._changed:
            if rank in self._lost or rank in self._left or rank not in self._others:
                return False
            self._lost[rank] = reason
        self._after_change()
        return True

    def serve(self, rank: int) -> None:
        """Record that ``rank`` serves: from now on, it only answers calls."""
        with self._changed:
            self._serving.add(rank)
        self._after_change()

    def leave(self, rank: int) -> None:
        """Record that ``rank`` leaves cleanly."""
        with self._changed:
            self._left.add(rank)
        self._after_change()

    def when_all_left(self, release: Callable[[], None]) -> None:
        """Call ``release()`` once every other rank has left or is lost."""
        with self._changed:
            self._departing.append(release)
        self._after_change()

    def lost(self) -> dict[int, str]:
        """Return the lost ranks and the reasons, in rank order."""
        with self._changed:
            return dict(sorted(self._lost.items()))

    def why_lost(self, rank: int) -> str | None:
        with self._changed:
            return self._lost.get(rank)

    def gone(self, rank: int) -> bool:
        """Whether ``rank`` is lost or has left cleanly."""
        with self._changed:
            return rank in self._gone()

    def wait_until_all_serve(self, timeout_s: float) -> set[int]:
        """Block until every other rank serves or is gone, or the time is over. Return the ranks
        that neither serve nor are gone."""
        return self._wait_for(lambda: self._busy(), timeout_s)

    def wait_until_all_left(self, timeout_s: float) -> set[int]:
        """Block until every other rank has left or is lost, or the time is over. Return the ranks
        that remain."""
        return self._wait_for(lambda: set(self._others - self._gone()), timeout_s)

    def arrive(self, number: int, rank: int, release: Callable[[], None]) -> None:
        """Record that ``rank`` has reached barrier ``number``.

        ``release()`` is called when all ranks that run code of their own have reached the barrier.
        Ranks that serve, have left or are lost do not count.
        """
        with self._changed:
            self._arrived.setdefault(number, {})[rank] = release
        self._after_change()

    def missing(self, number: int) -> set[int]:
        """Return the ranks for which barrier ``number`` still waits."""
        with self._changed:
            return self._busy() - set(self._arrived.get(number, ()))

    def _gone(self) -> set[int]:
        return self._lost.keys() | self._left

    def _busy(self) -> set[int]:
        return set(self._others - self._gone() - self._serving)

    def _after_change(self) -> None:
        released: list[Callable[[], None]] = []
        with self._changed:
            self._changed.notify_all()
            for number, arrived in list(self._arrived.items()):
                # This rank, which keeps the barrier, must also have arrived.
                if not self._busy() - arrived.keys() and arrived.keys() - self._others:
                    released += self._arrived.pop(number).values()
            if not self._others - self._gone():
                released += self._departing
                self._departing = []
        for release in released:
            release()

    def _wait_for(self, remaining: Callable[[], set[int]], timeout_s: float) -> set[int]:
        deadline = awake() + timeout_s
        with self._changed:
            while left := remaining():
                wait_s = deadline - awake()
                if wait_s <= 0:
                    return left
                self._changed.wait(wait_s)
            return set()
