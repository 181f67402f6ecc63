"""Memory for sampled batches that is used again once the caller has dropped the batch.

A new 7 MiB tensor per batch costs 1,800 page faults, more than the copy into it.
"""

from __future__ import annotations

import math
import sys
import threading

import numpy as np

from torchrl_dist.forks import now_and_in_children

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
    batch that holds either, so the block's reference count says exactly when it is free.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._blocks: dict[int, list[np.ndarray]] = {}
        now_and_in_children(self, BatchMemory._renew)

    def _renew(self) -> None:
        if not self._lock.acquire(blocking=False):  # a thread that is not here was changing them
            self._blocks = {}
        self._lock = threading.RLock()

    def empty(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """An uninitialized array, like ``numpy.empty``."""
        size = math.prod(shape) * dtype.itemsize
        if size < _SMALLEST_BYTES:
            return np.empty(shape, dtype)
        if self._lock._is_owned():  # type: ignore[attr-defined]
            return np.empty(shape, dtype)  # in a signal handler that interrupted the lines below
        with self._lock:
            blocks = self._blocks.pop(size, [])
            self._blocks[size] = blocks  # the sizes used last come last
            if len(self._blocks) > _SIZES:  # blocks in use live on in their arrays
                del self._blocks[next(iter(self._blocks))]
            block = _first_with(_UNUSED, blocks)
            if block is None:
                block = np.empty(size, dtype=np.uint8)
                if len(blocks) < _BLOCKS_PER_SIZE:
                    blocks.append(block)
            return block.view(dtype).reshape(shape)
