"""From priorities to leaves of the tree, and the largest priority that new rows start with.

``leaf = (priority + eps) ** alpha`` (Schaul et al. 2016, "Prioritized Experience Replay", section
3.3), with the ``alpha`` and ``eps`` of the directory.
"""

from __future__ import annotations

import numpy as np

from torchrl_dist.errors import ConfigurationError
from torchrl_dist.replay.directory import ReplayDirectory, Word

_LARGEST_LEAF = 1e200  # sums of these stay finite


def check_priorities(raw: np.ndarray) -> None:
    """Raises ``ConfigurationError`` unless all are finite and >= 0."""
    if not ((raw >= 0).all() and (raw <= _LARGEST_LEAF).all()):  # NaN fails too
        wrong = raw[~((raw >= 0) & (raw <= _LARGEST_LEAF))]
        raise ConfigurationError(
            f"priorities must be finite and >= 0, got {wrong[:4].tolist()} among {raw.size}; "
            "none was applied"
        )


def leaves_of(directory: ReplayDirectory, raw: np.ndarray) -> np.ndarray:
    """Tree values of priorities, float64 [n]; called under the lock, since alpha is shared.

    Raises:
        ConfigurationError: if one is too large for the tree's sums.
    """
    alpha = directory.get_float(Word.ALPHA)
    leaves = (raw + directory.get_float(Word.EPS)) ** alpha
    if leaves.size and not leaves.max() <= _LARGEST_LEAF:
        raise ConfigurationError(
            f"priority {raw.max():g} ** alpha {alpha:g} is too large; scale priorities down"
        )
    return leaves


def default_leaf(directory: ReplayDirectory) -> float:
    """Tree value of a new row: the largest priority seen, so that it is soon drawn once.

    Before any sampler has set alpha the largest priority is 1, whose power is 1 for every alpha.
    """
    if not directory.words[Word.ALPHA_SET]:
        return 1.0
    raw = directory.get_float(Word.MAX_PRIORITY)
    if raw != raw:
        raw = 1.0
    return (raw + directory.get_float(Word.EPS)) ** directory.get_float(Word.ALPHA)


def track_maximum(directory: ReplayDirectory, slots: np.ndarray, raw: np.ndarray) -> None:
    """Note the largest of the priorities just given to ``slots``.

    Called under the lock, after the leaves were stored.
    """
    best = int(raw.argmax())
    current, where = directory.get_float(Word.MAX_PRIORITY), directory.words[Word.MAX_SLOT]
    if not current >= raw[best]:
        directory.set_float(Word.MAX_PRIORITY, float(raw[best]))
        directory.words[Word.MAX_SLOT] = slots[best]
    elif directory.words[Word.MAX_WITHIN] and (where < 0 or (slots == where).any()):
        alpha, eps = directory.get_float(Word.ALPHA), directory.get_float(Word.EPS)
        if alpha > 0:
            top = int(directory.tree.leaves.argmax())
            value = max(0.0, float(directory.tree.leaves[top]) ** (1 / alpha) - eps)
            directory.set_float(Word.MAX_PRIORITY, value)
            directory.words[Word.MAX_SLOT] = top
