"""Memory for sampled batches that is used again once the caller has dropped the batch.

A new 7 MiB tensor per batch costs 1,800 page faults, more than the copy into it.
"""

from __future__ import annotations

import math
import sys

import numpy as np

_SMALLEST_BYTES = 2**16  # below this the allocator recycles by itself
_BLOCKS_PER_SIZE = 16
_SIZES = 16


def _first_with(references: int, blocks: list[np.ndarray]) -> np.ndarray | None:
    """The first block of which ``sys.getrefcount`` reports that many references."""
    for block in blocks:
        if sys.getrefcount(block) == references:
            return block
    return None


# What it reports of a block that only the pool's list knows; Python 3.14 counts fewer of the
# references that a function's own variables hold.
_UNUSED = next(n for n in range(1, 9) if _first_with(n, [np.empty(0)]) is not None)


class BatchMemory:
    """Hands out arrays over blocks that nobody refers to any more. Thread-safe.

    An array, and a tensor made of it, keeps its block alive as long as itself, a view of it, or a
    batch that holds either, so the block's reference count says exactly when it is free. Who looks
    at a block refers to it, so of several threads at most one finds it free: no lock is needed
    that a signal handler or a forked child could find taken. What two of them change at once in
    the table of sizes may be lost; these blocks go back to the allocator.
    """

    def __init__(self) -> None:
        self._blocks: dict[int, list[np.ndarray]] = {}

    def empty(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """An uninitialized array, like ``numpy.empty``."""
        size = math.prod(shape) * dtype.itemsize
        if size < _SMALLEST_BYTES:
            return np.empty(shape, dtype)
        # the sizes used last come last
        blocks = self._blocks[size] = self._blocks.pop(size, [])
        for oldest in list(self._blocks)[:-_SIZES]:  # blocks in use live on in their arrays
            self._blocks.pop(oldest, None)
        block = _first_with(_UNUSED, blocks)
        if block is None:
            block = np.empty(size, dtype=np.uint8)
            if len(blocks) < _BLOCKS_PER_SIZE:
                blocks.append(block)
        return block.view(dtype).reshape(shape)
