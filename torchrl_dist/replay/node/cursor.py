"""Reserve slots, publish or abandon the rows written there, and repair the state after a kill.

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
    whole_lines,
)
from torchrl_dist.replay.node.dimensions import other_dimensions
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
# the methods that reserve slots are in these modules; the function that calls into these modules
# writes the rows
_MODULES = (__name__, "torchrl_dist.replay.node.gate")


class Reservation(NamedTuple):
    """Slots that this process may write until it publishes or abandons them."""

    row: int
    first_ticket: int
    count: int  # type: ignore[assignment]  # hides tuple.count, which is not used
    ranges: tuple[tuple[int, int], ...]
    """Slot ranges ``(start, stop)`` in the order of the tickets: one range, or two if the slots
    continue at slot 0."""

    def slots(self) -> np.ndarray:
        """The slots, int64 [count], in the order of the tickets."""
        return _slots_of(self.ranges)


def _slots_of(ranges: Sequence[tuple[int, int]]) -> np.ndarray:
    runs = [np.arange(start, stop) for start, stop in ranges]
    return runs[0] if len(runs) == 1 else np.concatenate(runs)


class SharedCursor:
    """The shared write position of a replay directory.

    Every process and thread may call all methods. Unless its docstring says otherwise, a method
    blocks only while it waits for the directory's lock (``DeadlineError`` after ``timeout_s``).
    """

    def __init__(self, directory: ReplayDirectory) -> None:
        self._directory = directory
        self.width = 0
        """``Word.WIDTH`` as this process expects it when it writes."""

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
            source: the values of the rows, [n, ...] per column.
            reserve: a method that reserves the slots, called with ``arguments`` and ``plan=``. Its
                module must be in ``_MODULES``. The write belongs to the function outside these
                modules that called into them, and ends at the latest when that function returns.

        Returns:
            The result of ``reserve``, and the plan for the frames. The plan is None if the rows
            have no frames that are stored once.
        """
        frames = self._directory.frames
        while True:
            plan = None if frames is None else frames.plan(source, start, stop)
            try:
                return reserve(*arguments, plan=plan), plan
            except StalePlanError:  # other processes have written many frames since the plan
                continue

    def reserve(self, count: int, plan: Plan | None = None) -> Reservation:
        """Take the next ``count`` slots that no live process is writing.

        Rows published there are dropped. Slots that a live process is still writing are skipped,
        and slots of a dead process are taken.

        Raises:
            DeadlineError: live writers hold so many slots that there are no ``count`` free
                neighbouring slots.
        """
        directory = self._directory
        limit = max(largest_reservation(directory.capacity), self.width)
        if not 0 < count <= limit:
            raise ValueError(
                f"one reservation takes 1 to {limit} rows, got {count}; reserve fewer rows at once"
            )
        deadline = time.monotonic() + directory.timeout_s
        while True:
            with directory.lock():
                reservation = self.try_reserve(count, plan)
            if reservation is not None:
                return reservation
            if time.monotonic() > deadline:
                raise DeadlineError(
                    f"waited {directory.timeout_s:g} s for {count} free neighbouring slots in "
                    f"{directory.path}, but other processes are writing to slots all over the "
                    f"buffer, whose capacity is {directory.capacity}; use a larger capacity or "
                    "fewer writers"
                )
            time.sleep(_RETRY_S)

    def try_reserve(self, count: int, plan: Plan | None = None) -> Reservation | None:
        """Try :meth:`reserve` once, under the lock. Return None if other writers hold too many
        slots."""
        directory = self._directory
        self.check_unranked()
        row, capacity = self._free_row(), directory.capacity
        if row is None or not self._frames_admit(row, plan):
            return None
        ticket = directory.words[Word.CURSOR]
        reservation = self._take(row, ticket, count, Word.CURSOR, ticket + count, plan)
        if reservation is None:
            if self._live_claims(ticket, count):  # this call also ends claims of dead members
                claims = self._live_claims()
                if self.width:
                    claims = whole_lines(claims, self.width)
                free = first_free_ticket(ticket, count, claims, capacity)
                if free is None:
                    return None
                ticket = free
            reservation = self._take(row, ticket, count, Word.CURSOR, ticket + count, plan)
        return reservation

    def append(self, addresses: Sequence[int], count: int) -> tuple[np.ndarray, np.ndarray] | None:
        """Try to write and publish rows in one step, with the largest priority seen.

        Args:
            addresses: the address of each column's first row. The rows of a column are contiguous.

        Returns:
            The rows' slots and generations, int64 [count] each; or None, with nothing changed, if
            the rows must be written by :meth:`reserve` and :meth:`publish`.
        """
        directory = self._directory
        with directory.lock():
            self.check_unranked()
            if directory.words[Word.OLDEST_COLUMN]:
                return None
            leaf = default_leaf(directory)
            done = directory.kernel.append(addresses, count, directory.member, leaf)
        if done is None:
            return None
        first, generations = done
        return _slots_of(slot_ranges(first, count, directory.capacity)), generations

    def check_unranked(self) -> None:
        """
        Raises:
            ConfigurationError: the buffer keeps only its best rows, see ``ranking``; or its rows
                have other dimensions, see ``dimensions``.
        """
        if self._directory.words[Word.WIDTH] != self.width:
            raise other_dimensions(self._directory, self.width)
        if self._directory.words[Word.RANKED]:
            raise ConfigurationError(
                f"the rows in {self._directory.path} are kept by their rank, but the writer of "
                "this process would overwrite the oldest rows, even those with the highest ranks; "
                "build the buffer with writer=SharedMaxValueWriter(...), as in the other processes"
            )

    def _frames_admit(self, row: int, plan: Plan | None) -> bool:
        """Return whether a plan's frames can be reserved. Called under the lock, before
        :meth:`_take`."""
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
            The reservation, or None if another claim has one of the slots."""
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
        """Make all written rows visible to every process, or none if the buffer was emptied.

        Args:
            reservation: from :meth:`reserve`. Its rows have been written.
            priority: float64 [count], before eps and alpha are applied, and valid according to
                ``priorities.check_new``. Default: the largest priority seen.

        Returns:
            The generation of each row, int64 [count]. It is -1 if the buffer was emptied after the
            reservation, because emptying drops the rows.
        """
        with self._directory.lock():
            return self.publish_locked(reservation, priority)

    def publish_locked(
        self, reservation: Reservation, priority: np.ndarray | None = None
    ) -> np.ndarray:
        """Do the work of :meth:`publish` for a caller that holds the lock."""
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
            # the leaves come first, because repair can recover a priority only from them
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
        """Record that the rows that are about to be published in ``slots`` are too old. Called
        between begin and commit."""
        directory = self._directory
        words = directory.words
        set_times_sampled(directory, slots, words[Word.MAX_TIMES_SAMPLED], published=False)
        words[Word.AVAILABLE] -= slots.size  # because publishing adds all rows
        words[Word.RETIRED_ROWS] += slots.size

    def skip(self, count: int) -> None:
        """Skip ``count`` tickets as if their rows had been written and overwritten."""
        directory = self._directory
        words = directory.words
        with directory.lock():
            self.check_unranked()
            directory.begin()
            # INSERT_BASE grows, too, so that the limiter does not count these rows, which can never
            # be sampled
            moved = (Word.CURSOR, Word.WRITE_COUNT, Word.INSERT_BASE)
            directory.store_all({word: words[word] + count for word in moved})
            directory.commit()

    def abandon(self, reservation: Reservation) -> None:
        """Release the slots without publishing them. The slots stay unpublished until the ring
        reaches them again."""
        directory = self._directory
        with directory.lock():
            if self._owns(reservation) and not directory.holds_its_equal(reservation):
                directory.claims[reservation.row, CLAIM_COUNT] = 0
        self._directory.let_go(reservation)

    def drop_interrupted(self) -> None:
        """Abandon this thread's writes that an interrupt (Ctrl-C) cut off.

        Called before a write begins. A write that a signal handler interrupted keeps its slots,
        because the write continues after the handler.
        """
        for reservation in self._directory.interrupted_writes():
            self.abandon(reservation)

    def _hold(self, reservation: Reservation) -> None:
        """Record that this thread writes. Called before the claim, so that each claim is noted."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_globals["__name__"] in _MODULES:
            frame = frame.f_back
        assert frame is not None
        self._directory.hold(reservation, frame)

    def claim_slots(self, slots: np.ndarray, plan: Plan | None = None) -> list[Reservation]:
        """Reserve given slots to write them in place. The slots keep their position in the ring.

        Args:
            slots: distinct slots, int64 [n]. They are unpublished until this write is published,
                as in any write.
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
        # ``claim_slots`` cleans up after an interrupt. At that time, its own stack frame must not
        # hold the lock (see ``FairLock``), so the code that holds the lock is in this method.
        with self._directory.lock():
            return self._try_claim_run(start, count, plan)

    def _await_slots(self, first: int, last: int, deadline: float) -> None:
        """Pause before another attempt to claim the slots."""
        directory = self._directory
        if time.monotonic() > deadline:
            raise DeadlineError(
                f"waited {directory.timeout_s:g} s for slots {first} to {last} of "
                f"{directory.path}, but other processes are still writing to these slots; if these "
                "processes are stopped, continue them (SIGCONT) or kill them"
            )
        time.sleep(_RETRY_S)

    def _try_claim_run(
        self, start: int, count: int, plan: Plan | None = None
    ) -> Reservation | None:
        row, words = self._free_row(), self._directory.words
        if row is None or self._live_claims(start, count) or not self._frames_admit(row, plan):
            return None
        # all slots below ``high`` are in use, even if the cursor has not reached them
        high = max(words[Word.IN_PLACE], start + count)
        return self._take(row, start, count, Word.IN_PLACE, high, plan)

    def wait_for_rows(self, deadline: float, least: int = 1) -> bool:
        """Wait until ``least`` rows are published, but only while a live process is writing rows.

        Args:
            deadline: on ``time.monotonic``.

        Returns:
            Whether ``least`` rows are published. If not, no live process is writing rows.

        Raises:
            DeadlineError: the deadline passed; the message names the writers.
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
                    f"{directory.path}, but processes {sorted(writers)} have not finished the rows "
                    "that they are writing; if these processes are stopped, continue them "
                    "(SIGCONT) or kill them (the unfinished rows of a killed process are dropped), "
                    "or pass a larger timeout_s"
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
            cursor: the next ticket of the saved directory. The next ticket of this
                directory becomes the smallest ticket that has the slot of ``cursor`` and is at
                least as large as ``cursor`` and as the current next ticket. Tickets thus never
                decrease.
            high: number of slots in use.
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
            words[Word.EMPTYING] = _WITH_COUNTS  # after a kill, repair completes the emptying
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
        """Reserve the ``count`` slots from ``slot`` on, except those that have been reserved since
        the cursor was at ticket ``since``.

        The excepted slots are the first ones of the range. Returns ``None`` if no slot is left.
        Blocks while other processes write the remaining slots.

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

        Each row gets the version ``version``, or the next version of its slot if that is larger.
        ``alpha`` is the exponent with which the leaves were computed. If it is given, the leaves
        are converted to the current exponent.
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
            # again if the current limit is higher; the counts of all other rows restart.
            used_up = np.flatnonzero(leaf == 0)
            times = words[Word.RESTORED_TIMES]
            if directory.times_sampled is None or times < words[Word.MAX_TIMES_SAMPLED]:
                leaf = leaf.copy()
                leaf[used_up] = default_leaf(directory)
            directory.tree.set_range(start, stop, leaf)
            words[Word.NEXT_WRITE_COUNT] = words[Word.WRITE_COUNT]
            # odd versions, so the rows are not published yet; repair can publish the rows, because
            # their leaves are stored
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
        """Return for each slot whether a live process will publish a row there, bool [n].

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

        If ``count`` is given, only claims on the slots of the ``count`` tickets from ``first`` on
        are considered. After a claim has ended, another writer may claim its slots, because they
        are unpublished. Called under the lock.
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

        The result is False if the buffer was emptied after the reservation. In this case, this
        method also ends the reservation.

        Raises:
            RuntimeError: other processes took the reservation over although this process is alive.
        """
        directory = self._directory
        if not self._owns(reservation):
            raise RuntimeError(
                "other processes took over the slots that this process had reserved (tickets "
                f"{reservation.first_ticket} to {reservation.first_ticket + reservation.count - 1} "
                f"in {directory.path}), because this process had lost its locks on the directory; "
                "look for code that closes file descriptors that it did not open"
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
    """Unpublish every row. Generations continue to grow, so a slot together with an earlier
    generation never names a new row."""
    with directory.lock():
        directory.begin()
        directory.words[Word.EMPTYING] = _WITH_COUNTS if reset_write_count else _ROWS_ONLY
        finish_emptying(directory)
        directory.commit()
    if directory.gate is not None:
        directory.gate.ring()


_ROWS_ONLY, _WITH_COUNTS = 1, 2  # values of Word.EMPTYING


def finish_emptying(directory: ReplayDirectory) -> None:
    """Empty the buffer in the way that ``Word.EMPTYING`` names. Called under the lock.

    This function also completes an emptying whose process was killed between two stores."""
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
    """Unpublish every row, discard all claims and let the next row go to slot 0.

    The counts of written and sampled rows stay. Called under the lock, between begin and commit.
    """
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

    It completes stores in the journal, a change of alpha, an emptying and publications that had
    begun. Rows are completely written before their publication begins. Therefore repair completes
    every publication that it finds, including those that an interrupt cut off in a live process.
    Other claims of dead members lapse, and the rows of an interrupted patch are dropped. Then
    leaves and length are corrected to fit the versions, and the tree to fit the leaves.
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
