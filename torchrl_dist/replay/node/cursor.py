"""The right to write slots: reserve, publish, abandon, and the repair after a kill.

The life of a row::

    reserve   under the lock: tickets are taken, a claim names the member, the slots' versions
              become odd, their leaves become 0, and they no longer count as published
    (copy)    outside the lock: only the claim's member writes these slots
    publish   under the lock: leaves become positive, versions become even, and the claim ends

:func:`repair` relies on the order of the stores in each step, see ``kernel``.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any, NamedTuple, TypeVar

import numpy as np

from torchrl_dist.errors import ConfigurationError, DeadlineError
from torchrl_dist.replay.law.placement import (
    first_free_ticket,
    largest_reservation,
    overlaps,
    slot_ranges,
)
from torchrl_dist.replay.node.directory import ReplayDirectory
from torchrl_dist.replay.node.frames import Plan, StalePlanError
from torchrl_dist.replay.node.priorities import (
    cover_leaves,
    default_leaf,
    finish_rescaling,
    leaves_of_new,
    track_maximum,
    under_alpha_now,
)
from torchrl_dist.replay.node.tables import (
    CLAIM_COUNT,
    CLAIM_DISCARDED,
    CLAIM_PUBLISHING,
    CLAIM_STATE,
    SAVED_FLOAT_WORDS,
    USER_UNRETURNED,
    Word,
)
from torchrl_dist.replay.node.times_sampled import exhausted, is_too_old, set_times_sampled

_RETRY_S = 1e-3
_T = TypeVar("_T")
# reservations return through functions of these modules before the rows are written
_MODULES = (__name__, "torchrl_dist.replay.node.gate")


class Reservation(NamedTuple):
    """Slots that this process may write until it publishes or abandons them."""

    row: int
    first_ticket: int
    count: int  # type: ignore[assignment]  # hides tuple.count, which is not used
    ranges: tuple[tuple[int, int], ...]
    """Slot ranges ``(start, stop)`` in the order of the tickets: one, or two at the wrap-around."""

    def slots(self) -> np.ndarray:
        """The slots, int64 [count], in the order of the tickets."""
        runs = [np.arange(start, stop) for start, stop in self.ranges]
        return runs[0] if len(runs) == 1 else np.concatenate(runs)


class SharedCursor:
    """The shared write position of a replay directory.

    Every process and thread may call all methods. These block only for the directory's lock
    (``DeadlineError`` after its timeout).
    """

    def __init__(self, directory: ReplayDirectory) -> None:
        self._directory = directory

    @property
    def directory(self) -> ReplayDirectory:
        """The directory of this cursor."""
        return self._directory

    def planned(
        self,
        source: Sequence[np.ndarray | None],
        start: int,
        stop: int,
        reserve: Callable[..., _T],
        *arguments: Any,
    ) -> tuple[_T, Plan | None]:
        """Reserve slots for the rows ``start`` to ``stop`` of ``source``, and tickets for frames.

        Args:
            source: [n, ...] per column.
            reserve: a method that reserves the slots, called with ``arguments`` and ``plan=``. Its
                module must be in ``_MODULES``, because a write counts as ended once the frame that
                called these modules has returned.

        Returns:
            The result of ``reserve``, and the plan, which is None without ``frames=``.
        """
        frames = self._directory.frames
        while True:
            plan = None if frames is None else frames.plan(source, start, stop)
            try:
                return reserve(*arguments, plan=plan), plan
            except StalePlanError:  # others wrote many frames since the plan
                continue

    def reserve(self, count: int, plan: Plan | None = None) -> Reservation:
        """Take the next ``count`` slots that no live process is writing.

        Rows published there are dropped. Slots that a live process is still writing are skipped,
        and slots of a dead process are taken.

        Raises:
            DeadlineError: live writers hold so many slots that no run of ``count`` is free.
        """
        directory = self._directory
        limit = largest_reservation(directory.capacity)
        if not 0 < count <= limit:
            raise ValueError(f"a reservation takes 1 to {limit} rows, got {count}")
        deadline = time.monotonic() + directory.timeout_s
        while True:
            with directory.lock():
                reservation = self.try_reserve(count, plan)
            if reservation is not None:
                return reservation
            if time.monotonic() > deadline:
                raise DeadlineError(
                    f"no {count} free slots in {directory.path} within "
                    f"{directory.timeout_s:g} s: other processes hold reservations over the "
                    f"whole ring of {directory.capacity}; use a larger capacity or fewer writers"
                )
            time.sleep(_RETRY_S)

    def try_reserve(self, count: int, plan: Plan | None = None) -> Reservation | None:
        """Do :meth:`reserve` under the lock. Return None if other writers are in the way."""
        directory = self._directory
        self.check_unranked()
        row, capacity = self._free_row(), directory.capacity
        if row is None or not self._frames_admit(row, plan):
            return None
        ticket = directory.words[Word.CURSOR]
        reservation = self._take(row, ticket, count, Word.CURSOR, ticket + count, plan)
        if reservation is None:
            if self._live_claims(ticket, count):  # this call also ends claims of dead members
                free = first_free_ticket(ticket, count, self._live_claims(), capacity)
                if free is None:
                    return None
                ticket = free
            reservation = self._take(row, ticket, count, Word.CURSOR, ticket + count, plan)
        return reservation

    def check_unranked(self) -> None:
        """
        Raises:
            ConfigurationError: only the best rows are kept, see ``ranking``.
        """
        if self._directory.words[Word.RANKED]:
            raise ConfigurationError(
                f"the rows in {self._directory.path} are kept by their rank, and rows in the order "
                "of writing would overwrite the best ones: build the buffer with "
                "writer=SharedMaxValueWriter(...), as in the other processes"
            )

    def _frames_admit(self, row: int, plan: Plan | None) -> bool:
        """Whether a plan's frames can be reserved. Called under the lock, before :meth:`_take`."""
        frames = self._directory.frames
        if frames is None or frames.admits(row, plan):
            return True
        self._live_claims()  # ends the claims of dead members
        return frames.admits(row, plan)

    def _take(
        self, row: int, first: int, count: int, word: Word, value: int, plan: Plan | None
    ) -> Reservation | None:
        """Claim the slots for this process, and set ``word`` to ``value``. Called under the lock.

        Returns:
            None if another claim is in the way."""
        directory = self._directory
        ranges = tuple(slot_ranges(first, count, directory.capacity))
        reservation = Reservation(row, first, count, ranges)
        self._hold(reservation)
        if directory.kernel.reserve(row, first, count, directory.member, word, value):
            if directory.frames is not None:
                directory.frames.reserve(plan, ranges)
            return reservation
        self._directory.let_go(reservation)
        return None

    def publish(self, reservation: Reservation, priority: np.ndarray | None = None) -> np.ndarray:
        """Make the written rows visible to every process: all, or none if the claim was lost.

        Args:
            reservation: from :meth:`reserve`. Its rows have been written.
            priority: float64 [count], checked, without alpha and eps. Default: the largest priority
                seen.

        Returns:
            The generation of each row, int64 [count]. It is -1 if the buffer was emptied after the
            reservation, which also drops these rows.
        """
        with self._directory.lock():
            return self.publish_locked(reservation, priority)

    def publish_locked(
        self, reservation: Reservation, priority: np.ndarray | None = None
    ) -> np.ndarray:
        """Do :meth:`publish` under the lock."""
        directory = self._directory
        row, first, count, _ = reservation
        generations = None
        ages = directory.words[Word.OLDEST_COLUMN] != 0
        if priority is None and not ages:
            leaf = default_leaf(directory)
            generations = directory.kernel.publish(row, first, count, directory.member, leaf)
        if generations is None and not self._still_ours(reservation):
            return np.full(count, -1, dtype=np.int64)
        if priority is not None or ages:
            slots = reservation.slots()
            leaves = (
                np.full(count, default_leaf(directory))
                if priority is None
                else leaves_of_new(directory, priority)
            )
            old = is_too_old(directory, slots)
            directory.begin()
            leaves[old] = 0.0
            # first, because repair can recover a priority only from the leaves
            directory.tree.set(slots, leaves)
            if old.any():
                self._retire(slots[old])
            if priority is not None:
                track_maximum(directory, slots, priority)
            generations = directory.kernel.publish(row, first, count, directory.member, 0.0)
        assert generations is not None
        self._directory.let_go(reservation)
        return generations

    def _retire(self, slots: np.ndarray) -> None:
        """Note that rows to be published are too old. Called between begin and commit."""
        directory = self._directory
        words = directory.words
        set_times_sampled(directory, slots, words[Word.MAX_TIMES_SAMPLED], published=False)
        words[Word.AVAILABLE] -= slots.size  # publishing adds all rows
        words[Word.RETIRED_ROWS] += slots.size

    def skip(self, count: int) -> None:
        """Skip ``count`` tickets as if their rows had been written and overwritten."""
        directory = self._directory
        words = directory.words
        with directory.lock():
            self.check_unranked()
            directory.begin()
            # INSERT_BASE moves too, because these rows can never be sampled
            moved = (Word.CURSOR, Word.WRITE_COUNT, Word.INSERT_BASE)
            directory.store_all({word: words[word] + count for word in moved})
            directory.commit()

    def abandon(self, reservation: Reservation) -> None:
        """Release the slots without publishing them. They stay unpublished until the ring reaches
        them again."""
        directory = self._directory
        with directory.lock():
            if self._owns(reservation) and not directory.holds_its_equal(reservation):
                directory.claims[reservation.row, CLAIM_COUNT] = 0
        self._directory.let_go(reservation)

    def drop_interrupted(self) -> None:
        """Abandon this thread's writes that an interrupt (Ctrl-C) cut off.

        Called before a write begins. A write that a signal handler interrupted keeps its slots,
        because it continues after the handler.
        """
        for reservation in self._directory.interrupted_writes():
            self.abandon(reservation)

    def _hold(self, reservation: Reservation) -> None:
        """Note before the claim that this thread writes, so that no claim is without a note."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_globals["__name__"] in _MODULES:
            frame = frame.f_back
        assert frame is not None
        self._directory.hold(reservation, frame)

    def claim_slots(self, slots: np.ndarray, plan: Plan | None = None) -> list[Reservation]:
        """Reserve given slots to write them in place. They keep their position in the ring.

        Args:
            slots: distinct slots, int64 [n]. Their rows are unpublished until the write is
                published, as in any write.
            plan: the frames of the rows, if the slots are neighbours.

        Returns:
            One reservation per run of neighbouring slots.

        Raises:
            DeadlineError: other processes keep writing one of the slots.
        """
        directory = self._directory
        runs = np.split(slots, np.flatnonzero(np.diff(slots) != 1) + 1)
        deadline = time.monotonic() + directory.timeout_s
        taken: list[Reservation] = []
        try:
            for run in runs:
                while True:
                    reservation = self._claim_run(int(run[0]), run.size, plan)
                    if reservation is not None:
                        taken.append(reservation)
                        break
                    self._await_slots(run[0], run[-1], deadline)
        except BaseException:
            for reservation in taken:
                self.abandon(reservation)
            raise
        return taken

    def _claim_run(self, start: int, count: int, plan: Plan | None) -> Reservation | None:
        # Not in ``claim_slots``, because a frame that cleans up after an interrupt must not hold
        # the lock, see ``FairLock``.
        with self._directory.lock():
            return self._try_claim_run(start, count, plan)

    def _await_slots(self, first: int, last: int, deadline: float) -> None:
        """Pause before another attempt to claim the slots."""
        directory = self._directory
        if time.monotonic() > deadline:
            raise DeadlineError(
                f"slots {first} to {last} of {directory.path} were being written by others for "
                f"{directory.timeout_s:g} s; are they stopped? Continue or kill them"
            )
        time.sleep(_RETRY_S)

    def _try_claim_run(
        self, start: int, count: int, plan: Plan | None = None
    ) -> Reservation | None:
        row, words = self._free_row(), self._directory.words
        if row is None or self._live_claims(start, count) or not self._frames_admit(row, plan):
            return None
        high = max(words[Word.IN_PLACE], start + count)  # the ring may not have reached the slots
        return self._take(row, start, count, Word.IN_PLACE, high, plan)

    def wait_for_rows(self, deadline: float, least: int = 1) -> bool:
        """Wait until ``least`` rows are published, as long as a live process is writing some.

        Args:
            deadline: on ``time.monotonic``.

        Returns:
            False if fewer are published, and no live process is writing any.

        Raises:
            DeadlineError: it passed; the message names the writers.
        """
        directory = self._directory
        self.drop_interrupted()
        while True:
            with directory.lock():
                if directory.length >= least:
                    return True
                writers = {
                    directory.pid_of(member)
                    for count, _, member, state in directory.claims.tolist()
                    if count and state != CLAIM_DISCARDED and directory.is_alive(member)
                }
            if not writers:
                return False
            if time.monotonic() > deadline:
                raise DeadlineError(
                    f"waited {directory.timeout_s:g} s for {least} published rows of "
                    f"{directory.path}, but processes {sorted(writers)} have not published theirs; "
                    "are they stopped? Continue or kill them (rows of a killed one are "
                    "dropped), or allow more with timeout_s"
                )
            time.sleep(_RETRY_S)

    # --- restoring a checkpoint, see ``snapshot`` ------------------------------------------

    def start_over(
        self,
        cursor: int,
        high: int,
        values: Mapping[Word, float],
        limiter: list[float] | None,
        length: int,
    ) -> int:
        """Empty the directory, then set words and the cursor.

        Args:
            cursor: the next ticket of the saved directory. Tickets never decrease, so the next
                ticket here is the first with the same slot that is below neither ``cursor`` nor the
                present one.
            high: slots in use.
            values: other words to set.
            limiter: the limiter's counts, see ``Gate.set_state``.
            length: number of rows that will be published.

        Returns:
            The next ticket.
        """
        directory = self._directory
        words = directory.words
        with directory.lock():
            directory.begin()
            words[Word.EMPTYING] = _WITH_COUNTS  # a kill in here leaves an empty buffer
            empty_locked(directory)
            now = words[Word.CURSOR]
            words[Word.CURSOR] = max(cursor, now + (cursor - now) % directory.capacity)
            lap = directory.capacity if high == directory.capacity else cursor % directory.capacity
            words[Word.BASE] = words[Word.CURSOR] - lap
            words[Word.IN_PLACE] = high
            words[Word.RESTORES] += 1
            for word, value in values.items():
                if word in SAVED_FLOAT_WORDS:
                    directory.set_float(word, value)
                else:
                    words[word] = int(value)
            if directory.gate is not None:
                directory.gate.set_state(limiter, length)
            words[Word.EMPTYING] = 0
            directory.commit()
            return words[Word.CURSOR]

    def claim_unless_passed(
        self, slot: int, count: int, since: int, plan: Plan | None = None
    ) -> Reservation | None:
        """Reserve ``count`` slots from ``slot`` on, except those reserved since ticket ``since``.

        The excepted slots are the first of the run. Returns ``None`` if no slot is left. Blocks
        while other processes write the remaining slots.

        Raises:
            DeadlineError: other processes kept writing the slots.
        """
        directory = self._directory
        position = (slot - since) % directory.capacity
        deadline = time.monotonic() + directory.timeout_s
        while True:
            with directory.lock():
                passed = max(0, directory.words[Word.CURSOR] - since - position)
                if passed >= count:
                    return None
                reservation = self._try_claim_run(slot + passed, count - passed, plan)
            if reservation is not None:
                return reservation
            self._await_slots(slot, slot + count - 1, deadline)

    def publish_saved(
        self, reservation: Reservation, version: int, leaf: np.ndarray, alpha: float | None
    ) -> None:
        """Make written rows visible, with leaves ``leaf``, float64 [count].

        Their version is ``version``, or the next version of their slot if that is larger. The
        leaves are converted if ``alpha``, their exponent, is given and has changed since.
        """
        directory = self._directory
        words = directory.words
        with directory.lock():
            if not self._still_ours(reservation):
                return
            claim = directory.claims[reservation.row]
            directory.begin()
            ((start, stop),) = reservation.ranges
            versions = directory.versions[start:stop]
            if alpha is not None:
                leaf = under_alpha_now(directory, leaf, alpha)
            # Rows with a leaf of 0 had reached the saved ``max_times_sampled``. They may be sampled
            # again if the present limit is higher; the counts of all other rows restart.
            used_up = np.flatnonzero(leaf == 0)
            times = words[Word.RESTORED_TIMES]
            if directory.times_sampled is None or times < words[Word.MAX_TIMES_SAMPLED]:
                leaf = leaf.copy()
                leaf[used_up] = default_leaf(directory)
            directory.tree.set_range(start, stop, leaf)
            words[Word.NEXT_WRITE_COUNT] = words[Word.WRITE_COUNT]
            # odd, so not published yet; repair can publish them, because the leaves are stored
            versions[:] = np.maximum(versions, version - 1)
            claim[CLAIM_STATE] = CLAIM_PUBLISHING
            if directory.times_sampled is not None:
                times = min(times, words[Word.MAX_TIMES_SAMPLED])
                set_times_sampled(directory, start + used_up, times, published=False)
            words[Word.AVAILABLE] += int(np.count_nonzero(leaf))
            versions += 1
            words[Word.LENGTH] += reservation.count
            claim[CLAIM_COUNT] = 0
            directory.commit()
        self._directory.let_go(reservation)

    def rows_under_way(self) -> int:
        """The number of rows that live processes are writing. Called under the lock."""
        return sum(count for _, count in self._live_claims())

    def being_written(self, slots: np.ndarray) -> np.ndarray:
        """Return whether a live process will publish a row in each slot, bool [n].

        Called under the lock."""
        directory = self._directory
        found = np.zeros(slots.shape, dtype=bool)
        for count, first, member, state in directory.claims[
            : directory.words[Word.CLAIM_ROWS]
        ].tolist():
            if count and state != CLAIM_DISCARDED and directory.is_alive(member):
                for start, stop in slot_ranges(first, count, directory.capacity):
                    found |= (slots >= start) & (slots < stop)
        return found

    def _live_claims(self, first: int = 0, count: int | None = None) -> list[tuple[int, int]]:
        """Return ``(first ticket, count)`` of each live claim, and end the claims of dead members.

        With ``count``, only claims on the slots of ``count`` tickets from ``first`` on. The slots
        of dead members are free then, because they are unpublished. Called under the lock.
        """
        directory = self._directory
        claims = directory.claims[: directory.words[Word.CLAIM_ROWS]]
        live = []
        for row, (rows, ticket, member, _) in enumerate(claims.tolist()):
            if not rows or (
                count is not None and not overlaps(first, count, ticket, rows, directory.capacity)
            ):
                continue
            if directory.is_alive(member):
                live.append((ticket, rows))
            else:
                claims[row, CLAIM_COUNT] = 0
                directory.count(Word.TAKEN_OVER_CLAIMS)
        return live

    def _free_row(self) -> int | None:
        """Return an unused row of the claim table, or None. Called under the lock."""
        claims, words = self._directory.claims, self._directory.words
        used = words[Word.CLAIM_ROWS]
        for row, count in enumerate(claims[:used, CLAIM_COUNT].tolist()):
            if not count:
                return row
        if used < len(claims):
            words[Word.CLAIM_ROWS] = used + 1
            return used
        self._live_claims()  # ends the claims of dead members
        free = np.flatnonzero(claims[:, CLAIM_COUNT] == 0)
        return int(free[0]) if free.size else None

    def _still_ours(self, reservation: Reservation) -> bool:
        """Return whether the reservation may be published. Called under the lock.

        It is False if the buffer was emptied after the reservation. The reservation then ends here.

        Raises:
            RuntimeError: other processes took it over although this process lives.
        """
        directory = self._directory
        if not self._owns(reservation):
            raise RuntimeError(
                f"the reservation of tickets {reservation.first_ticket} to "
                f"{reservation.first_ticket + reservation.count - 1} in {directory.path} was "
                "taken over, because this process's locks on the directory were dropped. Did some "
                "code close descriptors that it did not open?"
            )
        claim = directory.claims[reservation.row]
        if claim[CLAIM_STATE] != CLAIM_DISCARDED:
            return True
        claim[CLAIM_COUNT] = 0
        self._directory.let_go(reservation)
        return False

    def _owns(self, reservation: Reservation) -> bool:
        count, first, member, _ = self._directory.claims[reservation.row].tolist()
        return (count, first, member) == (
            reservation.count,
            reservation.first_ticket,
            self._directory.member,
        )


def empty(directory: ReplayDirectory, *, reset_write_count: bool = True) -> None:
    """Unpublish every row. Generations continue to grow, so a slot and an earlier generation name
    no row."""
    with directory.lock():
        directory.begin()
        directory.words[Word.EMPTYING] = _WITH_COUNTS if reset_write_count else _ROWS_ONLY
        finish_emptying(directory)
        directory.commit()
    if directory.gate is not None:
        directory.gate.ring()


_ROWS_ONLY, _WITH_COUNTS = 1, 2  # values of Word.EMPTYING


def finish_emptying(directory: ReplayDirectory) -> None:
    """Empty the buffer as EMPTYING says. Called under the lock.

    It also completes the work of a process that was killed between two of its stores."""
    words = directory.words
    empty_locked(directory)
    if words[Word.EMPTYING] == _WITH_COUNTS:
        words[Word.WRITE_COUNT] = 0
    words[Word.INSERT_BASE] = words[Word.WRITE_COUNT]
    words[Word.SAMPLED] = 0
    if words[Word.LIMITED] == 1:
        unreturned = directory.users[:, USER_UNRETURNED]
        unreturned[unreturned != 0] = 0
    words[Word.EMPTYING] = 0


def empty_locked(directory: ReplayDirectory) -> None:
    """Do :func:`empty` for a caller that holds the lock and has begun a change."""
    words, claims = directory.words, directory.claims
    claims[claims[:, CLAIM_COUNT] > 0, CLAIM_STATE] = CLAIM_DISCARDED
    directory.kernel.unpublish(0, directory.capacity)
    lap = -words[Word.CURSOR] % directory.capacity
    words[Word.CURSOR] += lap  # the next row goes to slot 0
    words[Word.BASE] = words[Word.CURSOR]
    words[Word.IN_PLACE] = 0
    words[Word.OLDEST_COLUMN] = 0
    directory.set_float(Word.MAX_PRIORITY, float("nan"))
    words[Word.MAX_SLOT] = -1


def repair(directory: ReplayDirectory) -> None:
    """Repair the state after a holder of the lock was killed. Called under the lock.

    Stores in the journal, a change of alpha, an emptying and publications are completed if they had
    begun. A publication can be completed, because its rows are whole, even if an interrupt cut it
    off in a live process. Other claims of dead members lapse, and a patch loses its rows. Then
    leaves and length are corrected by the versions, and the tree by the leaves.
    """
    claims, versions, tree = directory.claims, directory.versions, directory.tree
    if directory.words[Word.JOURNAL]:
        directory.finish_storing()
    directory.words[Word.PATCHES] += directory.words[Word.PATCHES] & 1
    if directory.words[Word.RESCALING]:
        finish_rescaling(directory)
    if directory.words[Word.EMPTYING]:
        finish_emptying(directory)
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
    available = published
    if directory.times_sampled is not None:
        old = np.flatnonzero(published)
        old = old[is_too_old(directory, old)]
        set_times_sampled(directory, old, directory.words[Word.MAX_TIMES_SAMPLED])
        available = published & ~exhausted(directory, slice(None))
    tree.leaves[~available] = 0.0
    tree.leaves[available & ~(tree.leaves > 0)] = default_leaf(directory)
    tree.mark_all()
    tree.refresh()
    words = directory.words
    words[Word.LENGTH] = int(np.count_nonzero(published))
    words[Word.AVAILABLE] = int(np.count_nonzero(available))
    cover_leaves(directory)
    directory.count(Word.REPAIRS)
    directory.commit()
