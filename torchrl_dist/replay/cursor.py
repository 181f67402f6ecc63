"""Who may write which slots: reserve, publish, abandon, and the repair after a kill.

The life of a row::

    reserve   under the lock: tickets are taken, a claim names the owner, the slots' versions
              become odd, their leaves 0, and they no longer count as published
    (copy)    outside the lock: only the claim's owner writes these slots
    publish   under the lock: versions become even, leaves positive, the claim ends

The order of the stores inside each step is what :func:`repair` relies on.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from torchrl_dist.errors import DeadlineError
from torchrl_dist.replay.directory import (
    CLAIM_COUNT,
    CLAIM_DISCARDED,
    CLAIM_FIRST,
    CLAIM_MEMBER,
    CLAIM_PUBLISHING,
    CLAIM_STATE,
    CLAIM_WRITING,
    ReplayDirectory,
    Word,
)
from torchrl_dist.replay.placement import first_free_ticket, largest_reservation, slot_ranges
from torchrl_dist.replay.priorities import default_leaf, leaves_of, track_maximum

_RETRY_S = 1e-3


@dataclass(frozen=True)
class Reservation:
    """Slots that this process may write until it publishes or abandons them."""

    row: int
    first_ticket: int
    count: int
    ranges: tuple[tuple[int, int], ...]
    """Slot ranges ``(start, stop)`` in the order of the tickets: one, or two at the wrap."""


class SharedCursor:
    """The shared write position of a replay directory.

    All methods may be called by any process and thread, and block only for the directory's
    lock (``DeadlineError`` after its timeout).
    """

    def __init__(self, directory: ReplayDirectory) -> None:
        self._directory = directory

    def reserve(self, count: int) -> Reservation:
        """Take the next ``count`` slots that nobody is writing.

        Rows that were published in them are gone from here on. Slots that a live process is
        still writing are passed over; those of a dead one are taken.

        Raises:
            DeadlineError: if live writers hold so many slots that no run of ``count`` is free.
        """
        directory = self._directory
        limit = largest_reservation(directory.capacity)
        if not 0 < count <= limit:
            raise ValueError(f"a reservation takes 1 to {limit} rows, got {count}")
        deadline = time.monotonic() + directory.timeout_s
        while True:
            with directory.lock():
                reservation = self._try_reserve(count)
            if reservation is not None:
                return reservation
            if time.monotonic() > deadline:
                raise DeadlineError(
                    f"no {count} free slots in {directory.path} within "
                    f"{directory.timeout_s:g} s: other processes hold reservations over the "
                    f"whole ring of {directory.capacity}; use a larger capacity or fewer writers"
                )
            time.sleep(_RETRY_S)

    def _try_reserve(self, count: int) -> Reservation | None:
        directory = self._directory
        words, claims = directory.words, directory.claims
        live = [(first, rows) for _, first, rows in self._live_claims()]
        ticket = first_free_ticket(int(words[Word.CURSOR]), count, live, directory.capacity)
        row = self._free_row()
        if ticket is None or row is None:
            return None
        reservation = Reservation(
            row, ticket, count, tuple(slot_ranges(ticket, count, directory.capacity))
        )
        directory.begin()
        words[Word.CURSOR] = ticket + count
        claims[row, CLAIM_FIRST] = ticket
        claims[row, CLAIM_MEMBER] = directory.member
        claims[row, CLAIM_STATE] = CLAIM_WRITING
        directory.held.setdefault(threading.get_ident(), []).append(reservation)
        claims[row, CLAIM_COUNT] = count  # last: the claim holds from here on
        for start, stop in reservation.ranges:
            _unpublish(directory, start, stop)
        directory.commit()
        return reservation

    def publish(self, reservation: Reservation, priority: np.ndarray | None = None) -> np.ndarray:
        """Make the written rows visible to every process, all or (for a lost claim) none.

        Args:
            reservation: from :meth:`reserve`; its rows are written.
            priority: float64 [count], checked, before alpha and eps; without it the rows get the
                largest priority seen.

        Returns:
            The generation of each row, int64 [count]; -1 if the buffer was emptied since the
            reservation, which drops these rows too.
        """
        directory = self._directory
        words = directory.words
        generations = np.empty(reservation.count, dtype=np.int64)
        with directory.lock():
            if not self._owns(reservation):
                raise RuntimeError(
                    f"the reservation of tickets {reservation.first_ticket} to "
                    f"{reservation.first_ticket + reservation.count - 1} in {directory.path} was "
                    "taken over: this process's locks on the directory were dropped. Does some "
                    "code open and close the file 'lock' in it?"
                )
            if directory.claims[reservation.row, CLAIM_STATE] == CLAIM_DISCARDED:
                directory.claims[reservation.row, CLAIM_COUNT] = 0
                self._forget(reservation)
                return np.full(reservation.count, -1, dtype=np.int64)
            leaves = None if priority is None else leaves_of(directory, priority)
            directory.begin()
            words[Word.NEXT_WRITE_COUNT] = words[Word.WRITE_COUNT] + reservation.count
            directory.claims[reservation.row, CLAIM_STATE] = CLAIM_PUBLISHING
            done = 0
            for start, stop in reservation.ranges:
                rows = stop - start
                versions = directory.versions[start:stop]
                versions += 1
                generations[done : done + rows] = versions
                if leaves is None:
                    directory.tree.set_range(start, stop, default_leaf(directory))
                else:
                    directory.tree.set_range(start, stop, leaves[done : done + rows])
                done += rows
            if priority is not None:
                first = reservation.first_ticket
                slots = np.arange(first, first + reservation.count) % directory.capacity
                track_maximum(directory, slots, priority)
            words[Word.LENGTH] += reservation.count
            words[Word.WRITE_COUNT] = words[Word.NEXT_WRITE_COUNT]
            directory.claims[reservation.row, CLAIM_COUNT] = 0
            directory.commit()
        self._forget(reservation)
        generations //= 2
        return generations

    def abandon(self, reservation: Reservation) -> None:
        """Give the slots back unwritten: they stay unpublished until the ring comes round."""
        with self._directory.lock():
            if self._owns(reservation):
                self._directory.claims[reservation.row, CLAIM_COUNT] = 0
        self._forget(reservation)

    def drop_interrupted(self) -> None:
        """Abandon what an interrupt (Ctrl-C) between two instructions left of this thread.

        Called before a write begins, when the thread holds no reservation unless one was lost.
        """
        for reservation in list(self._directory.held.get(threading.get_ident(), ())):
            self.abandon(reservation)

    def _forget(self, reservation: Reservation) -> None:
        held = self._directory.held.get(threading.get_ident(), [])
        if reservation in held:
            held.remove(reservation)

    def claim_slots(self, slots: np.ndarray) -> list[Reservation]:
        """Reserve given slots for writing them in place; they keep their position in the ring.

        Args:
            slots: distinct slots, int64 [n]. Published ones stay unpublished until the write is
                published again, as in any write.

        Returns:
            One reservation per run of neighbouring slots.

        Raises:
            DeadlineError: if other processes keep writing one of them.
        """
        directory = self._directory
        runs = np.split(slots, np.flatnonzero(np.diff(slots) != 1) + 1)
        deadline = time.monotonic() + directory.timeout_s
        taken: list[Reservation] = []
        try:
            for run in runs:
                while True:
                    with directory.lock():
                        reservation = self._try_claim_run(int(run[0]), run.size)
                    if reservation is not None:
                        taken.append(reservation)
                        break
                    if time.monotonic() > deadline:
                        raise DeadlineError(
                            f"slots {run[0]} to {run[-1]} of {directory.path} were being written "
                            f"by others for {directory.timeout_s:g} s"
                        )
                    time.sleep(_RETRY_S)
        except BaseException:
            for reservation in taken:
                self.abandon(reservation)
            raise
        return taken

    def _try_claim_run(self, start: int, count: int) -> Reservation | None:
        directory = self._directory
        claims = directory.claims
        for _, first, rows in self._live_claims():
            ranges = slot_ranges(first, rows, directory.capacity)
            if any(low < start + count and start < high for low, high in ranges):
                return None
        row = self._free_row()
        if row is None:
            return None
        directory.begin()
        if start + count > directory.high:  # written in place before the ring came there
            words = directory.words
            words[Word.BASE] = words[Word.CURSOR] - (start + count)
        reservation = Reservation(row, start, count, ((start, start + count),))
        claims[row, CLAIM_FIRST] = start
        claims[row, CLAIM_MEMBER] = directory.member
        claims[row, CLAIM_STATE] = CLAIM_WRITING
        directory.held.setdefault(threading.get_ident(), []).append(reservation)
        claims[row, CLAIM_COUNT] = count
        _unpublish(directory, start, start + count)
        directory.commit()
        return reservation

    @contextlib.contextmanager
    def quiet(self) -> Iterator[None]:
        """The directory's lock at a moment when nobody is writing rows.

        Raises:
            DeadlineError: if live processes hold reservations all the time.
        """
        directory = self._directory
        deadline = time.monotonic() + directory.timeout_s
        while True:
            with directory.lock():
                if not self._live_claims():
                    yield
                    return
            if time.monotonic() > deadline:
                raise DeadlineError(
                    f"other processes were writing rows of {directory.path} for "
                    f"{directory.timeout_s:g} s without a pause; stop them first"
                )
            time.sleep(_RETRY_S)

    def _live_claims(self) -> list[tuple[int, int, int]]:
        """``(row, first ticket, count)`` of each; those of dead members end here, since their
        slots are unpublished, and free without a claim. Called under the lock."""
        directory = self._directory
        live = []
        for row, (count, first, member, _) in enumerate(
            directory.claims[: directory.words[Word.CLAIM_ROWS]].tolist()
        ):
            if not count:
                continue
            if directory.is_alive(member):
                live.append((row, first, count))
            else:
                directory.claims[row, CLAIM_COUNT] = 0
                directory.count(Word.TAKEN_OVER_CLAIMS)
        return live

    def _free_row(self) -> int | None:
        """A row of the claim table that nobody uses. Called under the lock."""
        claims, words = self._directory.claims, self._directory.words
        used = int(words[Word.CLAIM_ROWS])
        for row in range(used):
            if not claims[row, CLAIM_COUNT]:
                return row
        if used == len(claims):
            return None
        words[Word.CLAIM_ROWS] = used + 1
        return used

    def _owns(self, reservation: Reservation) -> bool:
        claim = self._directory.claims[reservation.row]
        return (
            claim[CLAIM_COUNT] == reservation.count
            and claim[CLAIM_FIRST] == reservation.first_ticket
            and claim[CLAIM_MEMBER] == self._directory.member
        )


def empty(directory: ReplayDirectory, *, reset_write_count: bool = True) -> None:
    """Unpublish every row. Generations go on, so handles from before are stale for ever."""
    with directory.lock():
        directory.begin()
        empty_locked(directory)
        if reset_write_count:
            directory.words[Word.WRITE_COUNT] = 0
        directory.commit()


def empty_locked(directory: ReplayDirectory) -> None:
    """The body of :func:`empty`, for a caller that holds the lock and has begun a change."""
    words, claims = directory.words, directory.claims
    claims[claims[:, CLAIM_COUNT] > 0, CLAIM_STATE] = CLAIM_DISCARDED
    _unpublish(directory, 0, directory.capacity)
    lap = -int(words[Word.CURSOR]) % directory.capacity
    words[Word.CURSOR] += lap  # the next row goes to slot 0
    words[Word.BASE] = words[Word.CURSOR]
    directory.set_float(Word.MAX_PRIORITY, float("nan"))
    words[Word.MAX_SLOT] = -1


def _unpublish(directory: ReplayDirectory, start: int, stop: int) -> None:
    """Take the slots ``start`` to ``stop`` out of the buffer. Called under the lock."""
    versions = directory.versions[start:stop]
    published = (versions & 1 == 0) & (versions > 0)
    directory.words[Word.LENGTH] -= np.count_nonzero(published)
    versions |= 1
    directory.tree.set_range(start, stop, 0.0)
    if start <= directory.words[Word.MAX_SLOT] < stop:
        directory.words[Word.MAX_SLOT] = -1


def repair(directory: ReplayDirectory) -> None:
    """Bring the state in order after a holder of the lock was killed. Called under the lock.

    A publication that had begun is completed, since its rows are whole, also that of a live
    process that was interrupted; other claims of dead members lapse. Then leaves and length follow
    from the versions, and the tree from the leaves.
    """
    claims, versions, tree = directory.claims, directory.versions, directory.tree
    for row in np.flatnonzero(claims[:, CLAIM_COUNT]).tolist():
        count, first, member, state = claims[row].tolist()
        if state == CLAIM_PUBLISHING:
            for start, stop in slot_ranges(first, count, directory.capacity):
                versions[start:stop] += versions[start:stop] & 1
            directory.words[Word.WRITE_COUNT] = directory.words[Word.NEXT_WRITE_COUNT]
        elif directory.is_alive(member):
            continue
        claims[row, CLAIM_COUNT] = 0
        directory.count(Word.TAKEN_OVER_CLAIMS)
    published = (versions & 1 == 0) & (versions > 0)
    tree.leaves[~published] = 0.0
    tree.leaves[published & ~(tree.leaves > 0)] = default_leaf(directory)
    tree.mark_all()
    tree.refresh()
    directory.words[Word.LENGTH] = np.count_nonzero(published)
    directory.count(Word.REPAIRS)
    directory.commit()
