"""How writes and priority updates change the shared tables, in C or with NumPy.

:class:`NumpyKernel` defines the changes and their order. :class:`CKernel` makes each change in one
call to C code (``law/_kernel.c``). Edit both together. A directory gets one of the two kernels when
it is mapped. All methods are called under the lock. They set DIRTY before their first store and
clear it after their last one, unless their docstring says otherwise.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from torchrl_dist.replay.law.kernel import address, find_kernel
from torchrl_dist.replay.law.placement import overlaps, slot_ranges
from torchrl_dist.replay.law.tree import PriorityTree
from torchrl_dist.replay.node.tables import (
    CLAIM_COUNT,
    CLAIM_FIRST,
    CLAIM_MEMBER,
    CLAIM_PUBLISHING,
    CLAIM_STATE,
    CLAIM_WRITING,
    Word,
)

LARGEST_LEAF = 1e200  # if no leaf is larger, sums of leaves stay finite
SMALLEST_LEAF = sys.float_info.min  # a row with a leaf of 0 would never be drawn
SOUND, WRONG_PRIORITY, WRONG_SLOT, TOO_LARGE = range(4)


class Stored(NamedTuple):
    """The result of an update.

    Attributes:
        wrong: :data:`SOUND`, or a code for what is wrong with an item. If an item is wrong, nothing
            was stored, and ``best`` is the position of that item.
        stale: number of rows that were skipped because their slots hold other rows.
        best: if nothing is wrong, the position of the largest priority that was stored, or -1 if
            no priority was stored.
        moved: whether the slot that had the largest priority of all rows got a new priority.
    """

    wrong: int
    stale: int
    best: int
    moved: int


class Tables(NamedTuple):
    """The tables of one directory, as in ``ReplayDirectory``. ``floats``: the words as float64."""

    words: memoryview
    floats: memoryview[float]
    claims: np.ndarray
    versions: np.ndarray
    tree: PriorityTree


class NumpyKernel:
    """The changes to one directory's tables."""

    appends = False
    """Whether :meth:`append` may succeed."""

    def __init__(self, tables: Tables) -> None:
        self._words, self._floats, self._claims, self._versions, self._tree = tables

    def reserve(
        self, row: int, first: int, count: int, member: int, word: Word, value: int
    ) -> bool:
        """Claim ``count`` slots for a member, beginning with the slot of ticket ``first``.

        Args:
            row: an unused row of the claim table.
            word, value: this method sets the control block's ``word`` to ``value`` before it stores
                the claim.

        Returns:
            False if another claim has one of these slots. Then nothing was changed.
        """
        words, capacity = self._words, self._tree.capacity
        for rows, ticket, _, _ in self._claims[: words[Word.CLAIM_ROWS]].tolist():
            if rows and overlaps(first, count, ticket, rows, capacity):
                return False
        words[Word.DIRTY] = 1
        words[word] = value
        claim = self._claims[row]
        claim[CLAIM_FIRST] = first
        claim[CLAIM_MEMBER] = member
        claim[CLAIM_STATE] = CLAIM_WRITING
        claim[CLAIM_COUNT] = count  # last, because this store makes the claim valid
        for start, stop in slot_ranges(first, count, capacity):
            self.unpublish(start, stop)
        words[Word.DIRTY] = 0
        return True

    def unpublish(self, start: int, stop: int) -> None:
        """Take the slots ``start`` to ``stop`` out of the buffer. Called between begin and
        commit."""
        words, versions = self._words, self._versions[start:stop]
        # published: even and not 0
        words[Word.LENGTH] -= int(np.count_nonzero(versions) - np.count_nonzero(versions & 1))
        words[Word.AVAILABLE] -= int(np.count_nonzero(self._tree.leaves[start:stop]))
        versions |= 1
        self._tree.set_range(start, stop, 0.0)
        if start <= words[Word.MAX_SLOT] < stop:
            words[Word.MAX_SLOT] = -1

    def publish(
        self, row: int, first: int, count: int, member: int, leaf: float
    ) -> np.ndarray | None:
        """Make written rows visible.

        Args:
            leaf: the leaf of each row; 0 if the leaves are already stored.

        Returns:
            The rows' generations, int64 [count]; or None, with nothing changed, if the claim
            belongs to another member or its state is not ``CLAIM_WRITING``.
        """
        words, claim = self._words, self._claims[row]
        if claim.tolist() != [count, first, member, CLAIM_WRITING]:
            return None
        ranges = slot_ranges(first, count, self._tree.capacity)
        words[Word.DIRTY] = 1
        if leaf > 0:
            for start, stop in ranges:
                self._tree.set_range(start, stop, leaf)
        words[Word.NEXT_WRITE_COUNT] = words[Word.WRITE_COUNT] + count
        claim[CLAIM_STATE] = CLAIM_PUBLISHING  # from here on, repair publishes the rows
        published = []
        for start, stop in ranges:
            versions = self._versions[start:stop]
            versions += 1
            published.append(versions >> 1)
        words[Word.LENGTH] += count
        words[Word.AVAILABLE] += count
        words[Word.WRITE_COUNT] = words[Word.NEXT_WRITE_COUNT]
        claim[CLAIM_COUNT] = 0
        words[Word.DIRTY] = 0
        return published[0] if len(published) == 1 else np.concatenate(published)

    def use_columns(self, columns: Sequence[np.ndarray]) -> None:
        """Record where :meth:`append` writes rows: the columns [capacity, ...] of the directory."""

    def append(
        self, addresses: Sequence[int], count: int, member: int, leaf: float
    ) -> tuple[int, np.ndarray] | None:
        """Reserve slots at the cursor, copy rows there and publish them.

        Only C code does all this in one call, because an interrupt (Ctrl-C) could stop Python code
        between two steps.

        Args:
            addresses: the address of each column's first row.

        Returns:
            The first ticket, and the rows' generations, int64 [count]; or None, with nothing
            changed, if the caller must take these steps one by one.
        """
        return None

    def update(self, slots: np.ndarray, raw: np.ndarray, generation: np.ndarray | None) -> Stored:
        """Set priorities of rows. Skip a row if its slot now holds another row.

        If a priority was stored, DIRTY stays set.

        Args:
            slots: int64 [n]; entries below 0 are skipped.
            raw: float64 [n], priorities.
            generation: int64 [n], generations of the rows. If None, any published row is updated.
        """
        beyond, valid = slots >= self._tree.capacity, slots >= 0
        versions = self._versions[np.where(valid & ~beyond, slots, 0)]
        fresh = (versions & 1 == 0) & (versions > 0) & valid & ~beyond
        if generation is not None:
            fresh &= versions >> 1 == generation
        stored = np.flatnonzero(fresh)
        stale = int(np.count_nonzero(valid)) - stored.size
        words, floats = self._words, self._floats
        with np.errstate(over="ignore", invalid="ignore"):
            leaves = (raw[stored] + floats[Word.EPS]) ** floats[Word.ALPHA]
        kinds = np.where(beyond, WRONG_SLOT, SOUND)
        kinds[stored[~(leaves <= LARGEST_LEAF)]] = TOO_LARGE
        kinds[~((raw >= 0) & (raw <= LARGEST_LEAF))] = WRONG_PRIORITY  # NaN too
        if kinds.any():
            first = int((kinds != SOUND).argmax())
            return Stored(int(kinds[first]), 0, first, 0)
        if not stored.size:
            return Stored(SOUND, stale, -1, 0)
        best = int(stored[raw[stored].argmax()])
        moved = bool((slots[stored] == words[Word.MAX_SLOT]).any())
        words[Word.DIRTY] = 1
        self._tree.set(slots[stored], np.maximum(leaves, SMALLEST_LEAF))
        return Stored(SOUND, stale, best, moved)


class CKernel(NumpyKernel):
    """The changes of :class:`NumpyKernel` in C."""

    appends = True

    def __init__(self, tables: Tables) -> None:
        super().__init__(tables)
        library = find_kernel()
        assert library is not None
        self._reserve = library.replay_reserve
        self._publish = library.replay_publish
        self._append = library.replay_append
        self._update = library.replay_update
        words, tree = np.frombuffer(tables.words, dtype=np.int64), tables.tree
        arrays = (words, tables.claims, tables.versions, tree.leaves, tree.marks)
        self._record = np.array([*map(address, arrays), tree.capacity])
        self._at = address(self._record)

    def reserve(
        self, row: int, first: int, count: int, member: int, word: Word, value: int
    ) -> bool:
        return not self._reserve(self._at, row, first, count, member, word, value)

    def publish(
        self, row: int, first: int, count: int, member: int, leaf: float
    ) -> np.ndarray | None:
        generations = np.empty(count, dtype=np.int64)
        if self._publish(self._at, row, first, count, member, leaf, address(generations)):
            return None
        return generations

    def use_columns(self, columns: Sequence[np.ndarray]) -> None:
        array = ctypes.c_int64 * len(columns)
        targets = array(*map(address, columns))
        sizes = array(*(column.nbytes // len(column) for column in columns))
        # Two threads may map the rows at once, so one assignment stores everything. Keep a
        # reference to the columns, because the directory may keep only the other thread's columns.
        self._columns = columns, array, targets, sizes

    def append(
        self, addresses: Sequence[int], count: int, member: int, leaf: float
    ) -> tuple[int, np.ndarray] | None:
        generations = np.empty(count, dtype=np.int64)
        _, array, targets, sizes = self._columns
        first = self._append(
            self._at, count, member, leaf, len(addresses), array(*addresses), targets, sizes,
            address(generations),
        )  # fmt: skip
        return None if first < 0 else (first, generations)

    def update(self, slots: np.ndarray, raw: np.ndarray, generation: np.ndarray | None) -> Stored:
        count = slots.size
        scratch = np.empty(count + 3)
        result = scratch[count:].view(np.int64)
        at = address(scratch)
        wrong = self._update(
            self._at,
            address(slots),
            address(raw),
            None if generation is None else address(generation),
            count,
            LARGEST_LEAF,
            at,
            at + 8 * count,
        )
        return Stored(wrong, *result.tolist())


def kernel_of(tables: Tables) -> NumpyKernel:
    """Return the kernel of a directory's tables, in C if the C kernel was built."""
    return NumpyKernel(tables) if find_kernel() is None else CKernel(tables)
