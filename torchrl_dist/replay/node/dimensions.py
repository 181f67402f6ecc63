"""Rows with two dimensions over a directory: slot ``s`` is element ``(s // width, s % width)``.

``width``, the size of the second dimension, is the same in all processes. Writers reserve whole
lines of ``width`` slots, and the capacity is a multiple of ``width``, so a line never spans the end
of the ring. Everything else in the directory uses only slots. ``Word.WIDTH`` is 0 if rows have one
dimension, and -1 before the first write if they have two.
"""

from __future__ import annotations

from torchrl_dist.errors import ConfigurationError
from torchrl_dist.replay.node.directory import ReplayDirectory
from torchrl_dist.replay.node.tables import Word


def agree_on_dimensions(directory: ReplayDirectory, ndim: int) -> None:
    """Check or set the number of dimensions of the directory's rows. A new storage calls this.

    Raises:
        ConfigurationError: the other processes use another number of dimensions.
    """
    words = directory.words
    if ndim == 1:
        if words[Word.WIDTH]:
            raise other_dimensions(directory, 0)
        return
    with directory.lock():
        if words[Word.WIDTH]:
            return
        if any(words[word] for word in (Word.ROWS_READY, Word.FRAMES_SET, Word.FILLER)):
            raise other_dimensions(directory, -1)
        words[Word.WIDTH] = -1


def agree_on_width(directory: ReplayDirectory, width: int) -> None:
    """Check or set the width of the directory's rows. A storage calls this before it writes.

    Raises:
        ConfigurationError: the rows in the directory have another width, or the capacity is not a
            multiple of the width.
    """
    words, capacity = directory.words, directory.capacity
    with directory.lock():
        known = words[Word.WIDTH]
        if known == width:
            return
        if known > 0 and words[Word.ROWS_READY]:
            raise other_dimensions(directory, width)
        if width < 1 or capacity % width:
            room = capacity - capacity % max(width, 1) + max(width, 1)
            raise ConfigurationError(
                f"max_size must be a multiple of the second dimension of the rows, {width}, got "
                f"max_size={capacity}; build the storage with max_size={room} and a new scratch_dir"
            )
        words[Word.WIDTH] = width


def other_dimensions(directory: ReplayDirectory, width: int) -> ConfigurationError:
    """Return the error for a process whose rows have another width, see ``Word.WIDTH``."""
    return ConfigurationError(
        f"the processes that share {directory.path} store {_shown(directory.words[Word.WIDTH])}, "
        f"but this process stores {_shown(width)}; pass the same ndim= and write rows of the same "
        "shape in every process, or choose a new scratch_dir"
    )


def _shown(width: int) -> str:
    if width == 0:
        return "rows [n, ...] of one dimension"
    return f"rows [n, {'any' if width < 0 else width}, ...] of two dimensions (ndim=2)"
