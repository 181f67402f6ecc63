"""Keep the best rows: a new row replaces the row with the lowest rank, or is not kept.

The rank of a row is a number that is computed from one of its columns, so no shared table of ranks
has to be kept in step with the rows. Slots are chosen, written and published while the lock is
held, and while no process writes a row outside the lock. The choice therefore considers all rows.
If a process is killed or interrupted while it holds the lock, the versions of the chosen slots stay
odd, as after an interrupted patch. Repair then drops up to ``_BYTES_AT_ONCE`` bytes of rows, and
the next rows take their slots.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from torchrl_dist.errors import ConfigurationError
from torchrl_dist.replay.node.cursor import SharedCursor
from torchrl_dist.replay.node.directory import ReplayDirectory
from torchrl_dist.replay.node.patches import bit_of
from torchrl_dist.replay.node.priorities import default_leaf, leaves_of_new, track_maximum
from torchrl_dist.replay.node.tables import Word

REDUCTIONS = ("sum", "mean", "max", "min", "median")
_BYTES_AT_ONCE = 2**18  # how many bytes of rows are copied before the lock is released
_LOWEST = -np.finfo(np.float64).max


def reduced(values: torch.Tensor, reduction: str) -> np.ndarray:
    """Reduce values [n, ...] to one number per row, and return these as float64 [n]. NaN stays
    NaN."""
    rows = values.detach().cpu().reshape(len(values), -1).double()
    if reduction == "median":
        return rows.median(1).values.numpy()
    with np.errstate(invalid="ignore"):  # inf - inf is NaN, which is not a valid rank
        found: np.ndarray = getattr(rows.numpy(), reduction)(1)
    return found


class Ranks:
    """This process's copy of the ranks of all rows. Every method is called under the lock.

    Args:
        column: the number of the column. From now on, no patch may change this column.
        reduction: one of :data:`REDUCTIONS`, over the values of a row.

    Raises:
        ConfigurationError: another process ranks by another column or reduction.
    """

    def __init__(self, directory: ReplayDirectory, column: int, reduction: str) -> None:
        words, law = directory.words, 1 + REDUCTIONS.index(reduction) + len(REDUCTIONS) * column
        if words[Word.RANKED] not in (0, law):
            other, how = divmod(words[Word.RANKED] - 1, len(REDUCTIONS))
            assert directory.rows is not None
            raise ConfigurationError(
                f"the rows in {directory.path} are ranked by the {REDUCTIONS[how]} of "
                f"{directory.rows.columns[other].key}; pass the same rank_key and reduction in "
                "every process, or choose a new scratch_dir for another ranking"
            )
        words[Word.STRUCTURE] |= 1 << bit_of(column)
        words[Word.RANKED] = law
        self.law = column, reduction
        self._directory = directory
        self._versions = np.zeros(directory.capacity, np.int64)
        self._ranks = np.full(directory.capacity, -np.inf)

    def _refresh(self) -> None:
        """Read the rows that have changed. A slot without a row has the rank -inf."""
        versions, (column, reduction) = self._directory.versions, self.law
        changed = np.flatnonzero(versions != self._versions)
        if not changed.size:
            return
        now = self._versions[changed] = versions[changed]
        values = self._directory.tensors[column][torch.from_numpy(changed)]
        ranks = np.nan_to_num(reduced(values, reduction), nan=_LOWEST, posinf=np.inf)
        self._ranks[changed] = np.where((now & 1 == 0) & (now > 0), _above(ranks), -np.inf)

    def choose(self, new: np.ndarray, most: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the positions in ``new`` of the rows that are kept, in ascending order, and one
        slot for each of these rows, int64 [m] each.

        A new row may always take a slot that holds no row. To replace another row, it must have a
        higher rank. If ranks are equal, the earlier row stays.

        Args:
            new: the ranks of new rows, float64 [n].
            most: return at most this many rows, the best ones.
        """
        self._refresh()
        better = np.flatnonzero(_above(new) > self._ranks.min())
        best = better[np.argsort(-new[better], kind="stable")][: min(most, self._ranks.size)]
        if not best.size:
            return best, best
        count = best.size
        slots = np.flatnonzero(self._ranks <= np.partition(self._ranks, count - 1)[count - 1])
        slots = slots[np.argsort(self._ranks[slots], kind="stable")][:count]
        kept = np.count_nonzero(_above(new[best]) > self._ranks[slots])  # the first of ``best``
        return np.sort(best[:kept]), slots[:kept]


def _above(ranks: np.ndarray) -> np.ndarray:
    """Return the ranks, with -inf replaced by the lowest finite number, because -inf marks a slot
    without a row."""
    return np.maximum(ranks, _LOWEST)


def keep_best(
    cursor: SharedCursor,
    ranks: Ranks,
    new: np.ndarray,
    left: np.ndarray,
    source: list[np.ndarray],
    priority: np.ndarray | None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
    """Write some of the best new rows. Called under the lock.

    Args:
        new: the ranks of the new rows, float64 [n].
        left: the rows that are not written yet, int64 [m], m > 0.
        source: the values of the rows, [n, ...] per column.
        priority: float64 [n], valid according to ``priorities.check_new``. If None, the rows get
            the largest priority seen.

    Returns:
        Positions in ``left`` of the rows that were written, their slots and generations, int64 [k]
        each. If k is 0, none of the rows in ``left`` is good enough to be kept. The result is None,
        and nothing was changed, if another process is writing rows.
    """
    if cursor.rows_under_way():  # the call also ends claims of dead members
        return None
    directory = cursor.directory
    row_bytes = sum(values[:1].nbytes for values in source)
    kept, slots = ranks.choose(new[left], max(1, _BYTES_AT_ONCE // max(1, row_bytes)))
    if not kept.size:
        return kept, slots, slots
    rows = left[kept]
    words, versions, tree = directory.words, directory.versions, directory.tree
    leaves: Any = default_leaf(directory)
    if priority is not None:
        leaves = leaves_of_new(directory, priority[rows])
    directory.begin()
    words[Word.IN_PLACE] = max(words[Word.IN_PLACE], int(slots.max()) + 1)
    # the count is stored first, so that readers, which compare it, notice the changes even after a
    # kill
    words[Word.WRITE_COUNT] += kept.size
    gone = int(np.count_nonzero((versions[slots] & 1 == 0) & (versions[slots] > 0)))
    words[Word.LENGTH] -= gone
    words[Word.AVAILABLE] -= gone
    versions[slots] |= 1
    tree.set(slots, 0.0)
    if (slots == words[Word.MAX_SLOT]).any():
        words[Word.MAX_SLOT] = -1
    for target, values in zip(directory.arrays, source, strict=True):
        target[slots] = values[rows]
    tree.set(slots, leaves)
    if priority is not None:
        track_maximum(directory, slots, priority[rows])
    versions[slots] += 1
    words[Word.LENGTH] += kept.size
    words[Word.AVAILABLE] += kept.size
    directory.commit()
    return kept, slots, versions[slots] >> 1
