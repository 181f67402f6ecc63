"""Rows as few tensors: a message costs by the tensor, so the small ones travel in one block.

Both ends know the dtypes and shapes (from the row spec and the number of rows), so nothing but
bytes is sent.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Sequence

import numpy as np
import torch

from torchrl_dist.replay.row.spec import RowSpec

_ALIGNMENT = 16  # of every dtype that torch has
_PADDING = np.zeros(_ALIGNMENT, np.uint8)
_LARGEST_PACKED_BYTES = 2**16  # above this a copy costs more than another tensor in the message
_NUMPY = {
    torch.from_numpy(np.empty(0, dtype)).dtype: dtype
    for dtype in map(np.dtype, "? u1 i1 i2 i4 i8 f2 f4 f8 c8 c16".split())
}

Column = tuple[torch.dtype, tuple[int, ...]]
"""dtype and full shape, ``(rows, ...)``, of one tensor."""


def pack(arrays: Sequence[np.ndarray], *, copy: bool) -> list[torch.Tensor]:
    """The same bytes in fewer tensors: one block of the small ones, then the large ones.

    Args:
        arrays: as ``spec.array_of`` gives them.
        copy: whether the large ones are copied too, because the caller may change them.
    """
    large = []
    small = []
    for array in arrays:
        if array.nbytes > _LARGEST_PACKED_BYTES:
            large.append(torch.from_numpy(array.copy() if copy else np.ascontiguousarray(array)))
        else:
            small.append(array.reshape(-1).view(np.uint8))
            padding = -array.nbytes % _ALIGNMENT
            if padding:
                small.append(_PADDING[:padding])
    block = np.concatenate(small) if small else _PADDING[:0]
    return [torch.from_numpy(block), *large]


def unpack(packed: Sequence[torch.Tensor], columns: Sequence[Column]) -> list[torch.Tensor]:
    """The tensors that :func:`pack` was given as arrays; views of ``packed``."""
    block, *large = packed
    following = iter(large)
    tensors = []
    offset = 0
    array = block.numpy()
    for dtype, shape in columns:
        size = math.prod(shape) * dtype.itemsize
        if not size:  # a view cannot change the dtype of nothing
            tensors.append(torch.empty(shape, dtype=dtype, device="cpu"))
        elif size > _LARGEST_PACKED_BYTES:
            tensor = next(following)
            tensors.append(tensor if tensor.dtype == dtype else tensor.view(dtype))
        else:
            part = array[offset : offset + size]
            seen_as = _NUMPY.get(dtype)
            if seen_as is None:
                tensors.append(torch.from_numpy(part).view(dtype).reshape(shape))
            else:  # NumPy slices and views in a fifth of torch's time
                tensors.append(torch.from_numpy(part.view(seen_as).reshape(shape)))
            offset += size + -size % _ALIGNMENT
    return tensors


def columns_of(spec: RowSpec, count: int) -> list[Column]:
    """The columns of ``count`` rows, in the order of the spec."""
    return [(leaf.dtype, (count, *leaf.shape)) for leaf in spec.leaves]


@functools.lru_cache(maxsize=64)
def spec_from_text(text: str) -> RowSpec:
    """The spec with this ``text``; the same object each time."""
    return RowSpec.from_json(json.loads(text))
