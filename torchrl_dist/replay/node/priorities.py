"""Set priorities of rows, convert priorities to leaves, and track the largest priority.

A priority is dropped if its slot now holds another row. New rows start with the largest priority.
``leaf = (priority + eps) ** alpha`` (Schaul et al. 2016, "Prioritized Experience Replay", section
3.3), with the ``alpha`` and ``eps`` of the directory.
"""

from __future__ import annotations

import numpy as np

from torchrl_dist.errors import ConfigurationError
from torchrl_dist.replay.node.directory import ReplayDirectory
from torchrl_dist.replay.node.kernel import (
    LARGEST_LEAF,
    SMALLEST_LEAF,
    WRONG_PRIORITY,
    WRONG_SLOT,
)
from torchrl_dist.replay.node.tables import Word
from torchrl_dist.replay.node.times_sampled import hide_exhausted


def check_priorities(raw: np.ndarray) -> None:
    """Raise ``ConfigurationError`` unless all priorities are real, finite and >= 0."""
    if raw.dtype.kind == "c" or not (
        (raw >= 0).all() and (raw <= LARGEST_LEAF).all()
    ):  # NaN also fails
        raise _not_finite(raw)


def _not_finite(raw: np.ndarray) -> ConfigurationError:
    wrong = raw if raw.dtype.kind == "c" else raw[~((raw >= 0) & (raw <= LARGEST_LEAF))]
    return ConfigurationError(
        f"got {wrong[:4].tolist()} among {raw.size} priorities, expected finite numbers >= 0; no "
        "priority was applied. Pass valid priorities"
    )


def check_generations(count: int, slots: int) -> None:
    """Raise ``ConfigurationError`` unless there is one generation per slot."""
    if count != slots:
        raise ConfigurationError(
            f"got {count} generations for {slots} slots; pass one generation per slot"
        )


def leaves_of(directory: ReplayDirectory, raw: np.ndarray) -> np.ndarray:
    """Return the leaves of priorities, float64 [n]. Called under the lock, because alpha is shared.

    Raises:
        ConfigurationError: a leaf is too large for the tree's sums.
    """
    alpha = directory.get_float(Word.ALPHA)
    with np.errstate(over="ignore"):
        leaves = (raw + directory.get_float(Word.EPS)) ** alpha
    if leaves.size and not leaves.max() <= LARGEST_LEAF:
        raise _too_large(raw.max(), alpha)
    return np.maximum(leaves, SMALLEST_LEAF)


def check_new(directory: ReplayDirectory, raw: np.ndarray, rows: int) -> None:
    """Raise ``ConfigurationError`` unless ``raw`` holds one valid priority for each new row."""
    if raw.shape != (rows,):
        raise ConfigurationError(
            f"got priorities of shape {list(raw.shape)} for {rows} rows; pass one priority per row"
        )
    check_priorities(raw)
    leaves_of(directory, raw)


def leaves_of_new(directory: ReplayDirectory, raw: np.ndarray) -> np.ndarray:
    """Do the work of :func:`leaves_of` for priorities that :func:`check_new` has accepted.

    If another process has changed alpha since the check, a priority may now be too large. Such a
    priority is clipped, not refused, because other rows of the batch may already be published."""
    with np.errstate(over="ignore"):
        leaves = (raw + directory.get_float(Word.EPS)) ** directory.get_float(Word.ALPHA)
    return np.clip(leaves, SMALLEST_LEAF, LARGEST_LEAF)


def check_rescaling(leaves: np.ndarray, power: float) -> None:
    """Raise ``ConfigurationError`` if :func:`rescaled` would return leaves that are too large."""
    if leaves.size and float(leaves.max()) > LARGEST_LEAF ** (1 / max(power, 1.0)):
        raise ConfigurationError(
            f"alpha cannot be made {power:g} times as large: the largest value of "
            f"(priority + eps) ** alpha is now {leaves.max():g}, and would exceed the limit; scale "
            "priorities down, or keep alpha"
        )


def rescaled(leaves: np.ndarray, power: float) -> np.ndarray:
    """Return the leaves under an alpha that is ``power`` times as large. Leaves of 0 stay 0."""
    return np.where(leaves > 0, np.maximum(leaves**power, SMALLEST_LEAF), 0.0)


def under_alpha_now(directory: ReplayDirectory, leaves: np.ndarray, alpha: float) -> np.ndarray:
    """Convert leaves computed under ``alpha`` to the current alpha. Called under the lock.

    A leaf that would become too large becomes the largest valid leaf, as in
    :func:`leaves_of_new`."""
    now = directory.get_float(Word.ALPHA)
    if now == alpha:
        return leaves
    with np.errstate(over="ignore"):
        return np.minimum(rescaled(leaves, _power(alpha, now)), LARGEST_LEAF)


def set_alpha(directory: ReplayDirectory, alpha: float) -> None:
    """Change the exponent and all leaves. Called under the lock.

    Raises:
        ConfigurationError: leaves would become too large. Nothing was changed.
    """
    old = directory.get_float(Word.ALPHA)
    if alpha == old:
        return
    check_rescaling(directory.tree.leaves, _power(old, alpha))
    directory.begin()
    directory.set_float(Word.NEXT_ALPHA, alpha)
    directory.words[Word.RESCALING] = 1  # from here on, repair completes the change
    finish_rescaling(directory)
    directory.commit()


def finish_rescaling(directory: ReplayDirectory) -> None:
    """Raise the leaves to the power that NEXT_ALPHA requires.

    If a process was killed during the conversion, this function completes it. A converted leaf has
    a minus sign until all leaves are converted and ALPHA is set.
    """
    leaves = directory.tree.leaves
    directory.tree.mark_all()
    old, new = directory.get_float(Word.ALPHA), directory.get_float(Word.NEXT_ALPHA)
    if new != old:
        todo = leaves > 0
        leaves[todo] = -rescaled(leaves[todo], _power(old, new))
        directory.set_float(Word.ALPHA, new)
    np.abs(leaves, out=leaves)
    directory.words[Word.RESCALING] = 0


def _power(old: float, new: float) -> float:
    return (
        new / old if old > 0 else 1.0
    )  # alpha == 0 maps every priority to 1, so the old values cannot be recovered


def cover_leaves(directory: ReplayDirectory) -> None:
    """Make the stored largest priority at least as large as the priority of every row. Called under
    the lock.

    This is needed if a process was killed after it stored leaves and before it stored the largest
    priority."""
    words, alpha = directory.words, directory.get_float(Word.ALPHA)
    # the largest priority's slot is unknown; if MAX_WITHIN is 1, the next update looks for it
    words[Word.MAX_SLOT] = -1
    if not (words[Word.ALPHA_SET] and alpha > 0 and directory.length):
        return
    largest = directory.get_float(Word.MAX_PRIORITY)
    with np.errstate(over="ignore"):
        raw = float(directory.tree.leaves.max() ** (1 / alpha)) - directory.get_float(Word.EPS)
    if 1e-9 < raw / (1.0 if largest != largest else max(largest, 1e-300)) - 1 < float("inf"):
        directory.set_float(Word.MAX_PRIORITY, raw)


def _too_large(raw: float, alpha: float) -> ConfigurationError:
    return ConfigurationError(
        f"the priority {raw:g} is too large for alpha={alpha:g}, because sums of priority ** alpha "
        "must stay finite; scale priorities down"
    )


def default_leaf(directory: ReplayDirectory) -> float:
    """Return the leaf of a new row: the leaf of the largest priority seen, so that the row is drawn
    soon.

    Until a sampler sets alpha, the leaf of a new row is 1.
    """
    if not directory.words[Word.ALPHA_SET]:
        return 1.0
    raw = directory.get_float(Word.MAX_PRIORITY)
    if raw != raw:
        raw = 1.0
    try:
        leaf = (raw + directory.get_float(Word.EPS)) ** directory.get_float(Word.ALPHA)
    except OverflowError:  # the priority was set under a smaller alpha
        leaf = LARGEST_LEAF
    return min(max(leaf, SMALLEST_LEAF), LARGEST_LEAF)


def update(
    directory: ReplayDirectory, slots: np.ndarray, raw: np.ndarray, generation: np.ndarray | None
) -> None:
    """Set priorities of rows. Skip a row if its slot now holds another row.

    Args:
        slots: int64 [n]; entries below 0 are skipped.
        raw: float64 [n], priorities.
        generation: int64 [n], generations of the rows. With None, generations are not compared,
            and the row that is now published in a slot is updated.

    Raises:
        ConfigurationError: a priority is negative, not finite or too large, or the lengths differ.
            No priority was applied.
        IndexError: a slot is beyond the capacity. No priority was applied.
    """
    slots = np.ascontiguousarray(slots, dtype=np.int64)
    raw = np.ascontiguousarray(raw, dtype=np.float64)
    if generation is not None:
        generation = np.ascontiguousarray(generation, dtype=np.int64)
    if raw.shape != slots.shape:
        raise ConfigurationError(
            f"got {raw.size} priorities for {slots.size} slots; pass one priority per slot"
        )
    if generation is not None:
        check_generations(generation.size, slots.size)
    with directory.lock():
        wrong, stale, best, moved = directory.kernel.update(slots, raw, generation)
        if wrong:
            raise _refusal(directory, wrong, slots, raw, best)
        if generation is None:
            directory.count(Word.UNVERIFIED_UPDATES, int(np.count_nonzero(slots >= 0)))
        elif stale:
            directory.count(Word.STALE_UPDATES, stale)
        if best >= 0:
            _track(directory, int(slots[best]), float(raw[best]), bool(moved))
            if directory.times_sampled is not None:
                hide_exhausted(directory, slots)
            directory.commit()


def _refusal(
    directory: ReplayDirectory, wrong: int, slots: np.ndarray, raw: np.ndarray, at: int
) -> Exception:
    """Return the error for an update whose item ``at`` is wrong."""
    if wrong == WRONG_PRIORITY:
        return _not_finite(raw)
    if wrong == WRONG_SLOT:
        return IndexError(
            f"there is no slot {slots[at]}, because the capacity is {directory.capacity}; pass an "
            "index from sample() or extend() of this buffer"
        )
    return _too_large(raw[at], directory.get_float(Word.ALPHA))


def track_maximum(directory: ReplayDirectory, slots: np.ndarray, raw: np.ndarray) -> None:
    """Update the largest priority after priorities were set on ``slots``.

    Called under the lock, after the leaves were stored.
    """
    best = int(raw.argmax())
    moved = bool((slots == directory.words[Word.MAX_SLOT]).any())
    _track(directory, int(slots[best]), float(raw[best]), moved)


def _track(directory: ReplayDirectory, slot: int, raw: float, moved: bool) -> None:
    """Update the largest priority after a batch whose largest priority, ``raw``, went to ``slot``.

    ``moved``: whether the batch contains the slot that had the largest priority of all rows."""
    current, words = directory.get_float(Word.MAX_PRIORITY), directory.words
    if not current >= raw:
        directory.set_float(Word.MAX_PRIORITY, raw)
        words[Word.MAX_SLOT] = slot
    elif words[Word.MAX_WITHIN] and (moved or words[Word.MAX_SLOT] < 0):
        alpha, eps = directory.get_float(Word.ALPHA), directory.get_float(Word.EPS)
        if alpha > 0:
            top = int(directory.tree.leaves.argmax())
            value = max(0.0, float(directory.tree.leaves[top]) ** (1 / alpha) - eps)
            directory.set_float(Word.MAX_PRIORITY, value)
            words[Word.MAX_SLOT] = top
