"""Memory for sampled batches that is reused once the caller has dropped the batch.

A new tensor of 7 MiB per batch costs 1,800 page faults, which take longer than the copy into it.
"""

from __future__ import annotations

import math
import sys

import numpy as np

_SMALLEST_BYTES = 2**16  # smaller blocks are recycled by the allocator itself
_BLOCKS_PER_SIZE = 16
_SIZES = 16


def _first_with(references: int, blocks: list[np.ndarray]) -> np.ndarray | None:
    """Return the first block whose ``sys.getrefcount`` is ``references``."""
    for block in blocks:
        if sys.getrefcount(block) == references:
            return block
    return None


# The ``sys.getrefcount`` of a block to which only the pool's list refers. It is measured, because
# Python 3.14 counts fewer of the references from local variables than earlier versions do.
_UNUSED = next(n for n in range(1, 9) if _first_with(n, [np.empty(0)]) is not None)


class BatchMemory:
    """Makes arrays over blocks of memory to which nothing else refers. Thread-safe.

    An array, its views, and tensors made from it refer to its block as long as they exist. The
    block's reference count therefore shows exactly when the block is free. A thread that checks a
    block refers to it, too, so at most one of several threads finds it free. There is no lock,
    because a signal handler or a forked child could find the lock taken. If threads change the
    table of sizes at the same time, a change may get lost. The blocks concerned then return to the
    allocator.
    """

    def __init__(self) -> None:
        self._blocks: dict[int, list[np.ndarray]] = {}

    def empty(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """Return an uninitialized array, like ``numpy.empty``."""
        size = math.prod(shape) * dtype.itemsize
        if size < _SMALLEST_BYTES:
            return np.empty(shape, dtype)
        # the most recently used sizes come last
        blocks = self._blocks[size] = self._blocks.pop(size, [])
        for oldest in list(self._blocks)[:-_SIZES]:
            self._blocks.pop(oldest, None)  # arrays that use a block keep it alive
        block = _first_with(_UNUSED, blocks)
        if block is None:
            block = np.empty(size, dtype=np.uint8)
            if len(blocks) < _BLOCKS_PER_SIZE:
                blocks.append(block)
        return block.view(dtype).reshape(shape)
