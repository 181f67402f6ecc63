"""Convert between torch's and NumPy's dtypes, and view a tensor's memory as an array."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

DTYPES = {
    name: torch.from_numpy(np.empty(0, name)).dtype
    for name in (
        "bool uint8 int8 int16 int32 int64 float16 float32 float64 complex64 complex128".split()
    )
}
"""Maps NumPy's name of a dtype to torch's dtype, for the dtypes that both have."""

NAMES = {dtype: name for name, dtype in DTYPES.items()}
"""Maps torch's dtype to NumPy's name: the inverse of ``DTYPES``."""

_SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def is_plain(value: Any) -> bool:
    """Whether ``value`` is a ``torch.Tensor``, not of a subclass, whose memory a NumPy array can
    share."""
    return (
        type(value) is torch.Tensor
        and value.layout is torch.strided
        and value.dtype in NAMES
        and value.is_cpu
        and not (value.is_nested or value.is_conj() or value.is_neg())
        and (value.data_ptr() != 0 or not value.numel())  # autograd's zeros may have no memory
    )


def array_of(tensor: torch.Tensor) -> np.ndarray:
    """Return the tensor's memory as a NumPy array. A dtype that NumPy lacks becomes an integer
    dtype of the same size.

    The array is a copy if NumPy cannot share the memory, for example on another device. For a few
    rows, NumPy copies in a tenth of the time that torch needs to start a copy.
    """
    try:
        return tensor.numpy()
    # for example because the tensor requires grad, is on a GPU, or has a dtype that NumPy lacks
    except (TypeError, RuntimeError):
        tensor = tensor.detach().cpu().resolve_conj().resolve_neg()
    try:
        return tensor.numpy()
    except TypeError:
        return tensor.view(_SAME_SIZE[tensor.dtype.itemsize]).numpy()
