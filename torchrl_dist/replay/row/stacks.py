"""Rows in their *stored form*, which has each frame once. Checkpoints and messages use this form.

The stored form of ``n`` rows is a list of arrays. First comes one array for each column of the
spec. It holds the column's values, [n, ...]. If the values are stacks of frames, it instead holds
the positions of their frames, int64 [n, stack]. Then comes one array of frames, [k, *frame_shape],
for each ring (see :attr:`RowSpec.rings`); the positions refer to this array. Without stacks there
are no rings, so the stored form consists of the columns only.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from torchrl_dist.replay.row.spec import ColumnSpec, RowSpec


class Stacks:
    """Stacks of frames, [n, ...]. A slice such as ``stacks[5:9]`` returns an array of whole stacks.

    Args:
        numbers: int64 [n, stack], positions in ``frames``.
        frames: [k, *frame_shape].
        shape: the shape of one value.
    """

    def __init__(self, numbers: np.ndarray, frames: np.ndarray, shape: tuple[int, ...]) -> None:
        self.numbers, self.frames = numbers, frames
        self.shape, self.dtype = (len(numbers), *shape), frames.dtype

    def __len__(self) -> int:
        return len(self.numbers)

    def fit(self, column: ColumnSpec) -> bool:
        """Whether these stacks have the column's shape, and all numbers are valid positions of
        frames."""
        numbers, frames = self.numbers, self.frames
        if numbers.dtype != np.int64 or numbers.shape[1:] != (column.stack,):
            return False
        if frames.shape[1:] != column.frame_shape:
            return False
        return not numbers.size or 0 <= numbers.min() <= numbers.max() < len(frames)

    def __getitem__(self, rows: slice) -> np.ndarray:
        numbers = self.numbers[rows]
        return self.frames.take(numbers.reshape(-1), 0).reshape(len(numbers), *self.shape[1:])


Column = np.ndarray | Stacks
"""The values of a column, [n, ...]. A slice of the values is always an array."""


def as_columns(stored: Sequence[np.ndarray], spec: RowSpec) -> list[Column]:
    """Return the columns of rows in their stored form, without copying values."""
    columns: list[Column] = list(stored[: len(spec.columns)])
    for numbers, frames in zip(spec.rings.values(), stored[len(columns) :], strict=True):
        for number in numbers:
            shape = spec.columns[number].shape
            columns[number] = Stacks(stored[number], frames, shape)
    return columns


def values(stored: Sequence[np.ndarray], spec: RowSpec) -> list[np.ndarray]:
    """Take rows in their stored form, and return their values, one array [n, ...] per column."""
    return [column[:] for column in as_columns(stored, spec)]


def as_stored(columns: Sequence[Column], spec: RowSpec) -> list[np.ndarray]:
    """Return the stored form of columns: the inverse of :func:`as_columns`."""
    first = [columns[numbers[0]] for numbers in spec.rings.values()]
    return [
        *(each.numbers if isinstance(each, Stacks) else each for each in columns),
        *(each.frames for each in first if isinstance(each, Stacks)),
    ]


def joined(parts: Sequence[Sequence[np.ndarray]], spec: RowSpec) -> list[np.ndarray]:
    """Concatenate rows in their stored form."""
    known = [0] * len(spec.rings)
    moved = []
    for part in parts:
        moved.append(renumbered(part, spec, known))
        frames = part[len(spec.columns) :]
        known = [before + len(more) for before, more in zip(known, frames, strict=True)]
    return [np.concatenate(arrays) for arrays in zip(*moved, strict=True)]


def renumbered(
    stored: Sequence[np.ndarray], spec: RowSpec, first: Sequence[int]
) -> list[np.ndarray]:
    """Return the stored form with ``first[k]`` added to each position in the frames of ring ``k``,
    so that ``first[k]`` other frames can be put before these frames."""
    found = list(stored)
    for numbers, before in zip(spec.rings.values(), first, strict=True):
        for number in numbers:
            found[number] = found[number] + before
    return found
