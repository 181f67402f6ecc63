"""Count how often rows were sampled, and hide rows that reached the limit or are too old.

``directory.times_sampled`` holds a count and the generation of the counted row in one number. If
the slot holds a newer row, the count of this row is 0, so a write does not have to reset the count.
A row at the limit keeps its slot, with a leaf of 0. All functions need a directory with
``max_times_sampled``. All except :func:`give_back` and :func:`retire` are called under the
directory's lock.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from torchrl_dist.errors import ConfigurationError
from torchrl_dist.replay.law.limiter import MOST_TIMES
from torchrl_dist.replay.node.directory import ReplayDirectory
from torchrl_dist.replay.node.tables import LARGEST_COUNT, Word

_BITS = MOST_TIMES.bit_length()

DrawMore = Callable[[int], tuple[np.ndarray, np.ndarray]]
"""Draws slots with a leaf above 0. Returns the slots, int64 [n], and one number for each slot."""


class TooFewDrawsError(RuntimeError):
    """Too few draws are left: only ``left`` in total, over all rows that may be sampled."""

    def __init__(self, message: str, left: int = 0) -> None:
        super().__init__(message)
        self.left = left


def times_sampled(directory: ReplayDirectory, slots: np.ndarray | slice) -> np.ndarray:
    """Return the counts of the rows in the slots, int64 [n]."""
    assert directory.times_sampled is not None
    drawn = directory.times_sampled[slots]
    same = drawn >> _BITS == directory.versions[slots] >> 1
    return np.where(same, drawn & MOST_TIMES, 0)


def set_times_sampled(
    directory: ReplayDirectory,
    slots: np.ndarray,
    times: np.ndarray | int,
    *,
    published: bool = True,
) -> None:
    """Set the counts of the rows in the slots or, with ``published=False``, of the rows that are
    published there next.

    If a slot occurs twice, the last count stays."""
    assert directory.times_sampled is not None
    versions = directory.versions[slots] + (not published)
    directory.times_sampled[slots] = versions >> 1 << _BITS | times


def exhausted(directory: ReplayDirectory, slots: np.ndarray | slice) -> np.ndarray:
    """Return whether the rows in the slots reached the limit, bool [n]."""
    return times_sampled(directory, slots) >= directory.words[Word.MAX_TIMES_SAMPLED]


def hide_exhausted(directory: ReplayDirectory, slots: np.ndarray) -> None:
    """Set the leaves of rows at the limit to 0 again. Slots below 0 are skipped."""
    slots = slots[slots >= 0]
    directory.tree.set(slots[exhausted(directory, slots)], 0.0)


def is_too_old(directory: ReplayDirectory, slots: np.ndarray | slice) -> np.ndarray:
    """Return whether the rows in the slots, published or not, are too old, bool [n]."""
    words = directory.words
    column = words[Word.OLDEST_COLUMN]
    if not column:
        return np.zeros(directory.versions[slots].size, bool)
    return directory.arrays[column - 1].reshape(-1)[slots] < words[Word.OLDEST]


def hide_too_old(directory: ReplayDirectory) -> int:
    """Hide all rows that are too old, as if they had reached the limit. Return the number of hidden
    rows.

    Called between ``directory.begin()`` and ``directory.commit()``."""
    words, tree = directory.words, directory.tree
    old = is_too_old(directory, slice(directory.high))
    old &= tree.leaves[: directory.high] > 0
    slots = np.flatnonzero(old)
    set_times_sampled(directory, slots, words[Word.MAX_TIMES_SAMPLED])
    tree.set(slots, 0.0)
    words[Word.AVAILABLE] -= slots.size
    return slots.size


def retire(directory: ReplayDirectory, column: int, oldest: int) -> int:
    """Hide the rows whose number in a column is below ``oldest``. Such rows are also hidden if they
    are published later.

    Takes the lock. If a larger ``oldest`` was set before, the larger one stays.

    Returns:
        The number of rows that this call has hidden.

    Raises:
        ConfigurationError: rows were retired by another column before, or ``oldest`` has more
            than 62 bits.
    """
    words = directory.words
    if not -LARGEST_COUNT <= oldest <= LARGEST_COUNT:
        raise ConfigurationError(
            f"got the version {oldest}, expected an integer of at most 62 bits; use smaller "
            "versions"
        )
    with directory.lock():
        before = words[Word.OLDEST_COLUMN]
        if before not in (0, column + 1):
            assert directory.rows is not None
            key = ".".join(directory.rows.columns[before - 1].key)
            raise ConfigurationError(
                f"the rows of {directory.path} are already retired by version_key={key!r}; pass "
                "the same version_key in every call and every process"
            )
        if before and oldest <= words[Word.OLDEST]:
            return 0
        directory.begin()
        words[Word.OLDEST] = oldest
        words[Word.OLDEST_COLUMN] = column + 1  # last, because this store makes the bound valid
        hidden = hide_too_old(directory)
        words[Word.RETIRED_ROWS] += hidden
        directory.commit()
        return hidden


def count_draws(
    directory: ReplayDirectory, slots: np.ndarray, extra: np.ndarray, draw_more: DrawMore
) -> None:
    """Count the drawn slots, and replace slots that are drawn too often.

    Args:
        slots, extra: results of ``draw_more``. They are changed in place.

    Raises:
        TooFewDrawsError: too few draws are left. No draw was counted.
    """
    words, tree, most = directory.words, directory.tree, directory.words[Word.MAX_TIMES_SAMPLED]
    if words[Word.AVAILABLE] < slots.size:
        rows = np.flatnonzero(tree.leaves > 0)
        left = int(rows.size * most - times_sampled(directory, rows).sum())
        if left < slots.size:
            raise TooFewDrawsError(
                f"got a batch of {slots.size} rows, but with max_times_sampled={most}, the "
                f"{rows.size} rows that may still be sampled have fewer draws left in total; "
                "sample fewer rows, or write more",
                left,
            )
    directory.begin()
    todo = np.arange(slots.size)
    while todo.size:
        todo = todo[np.argsort(slots[todo], kind="stable")]
        drawn = slots[todo]
        times = times_sampled(directory, drawn) + 1
        # add how often the same slot was drawn earlier in the batch
        times += np.arange(drawn.size) - np.searchsorted(drawn, drawn)
        set_times_sampled(directory, drawn[times <= most], times[times <= most])
        full = drawn[times == most]
        tree.set(full, 0.0)
        words[Word.AVAILABLE] -= full.size
        todo = todo[times > most]
        if todo.size:
            tree.refresh()
            slots[todo], extra[todo] = draw_more(todo.size)
    directory.commit()


def give_back(
    directory: ReplayDirectory, slots: np.ndarray, generation: np.ndarray, leaves: np.ndarray
) -> None:
    """Uncount draws that will not be used. Takes the lock.

    A hidden row that may now be sampled again gets the leaf that it had when it was drawn. If the
    row's priority or alpha has changed since then, the leaf does not reflect this change.

    Args:
        slots, generation: int64 [n], one per draw. Rows that no longer exist are skipped.
        leaves: float64 [n], the leaf of each row when it was drawn.
    """
    with directory.lock():
        fresh = directory.versions[slots] == 2 * generation
        slots, first, counts = np.unique(slots[fresh], return_index=True, return_counts=True)
        times = times_sampled(directory, slots)
        left = np.maximum(times - counts, 0)  # a restore may have restarted the counts
        left = np.where(is_too_old(directory, slots), times, left)
        again = exhausted(directory, slots) & (left < times)
        directory.begin()
        # Set the leaves first. If the process is killed before the counts are set, the counts are
        # still at the limit, so repair sets the leaves back to 0.
        directory.tree.set(slots[again], leaves[fresh][first[again]])
        set_times_sampled(directory, slots, left)
        directory.words[Word.AVAILABLE] += int(np.count_nonzero(again))
        directory.commit()
