"""What NumPy has of a tensor: its name for the dtype, and its memory as an array."""

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
"""torch's dtype by NumPy's name, where both have it."""

NAMES = {dtype: name for name, dtype in DTYPES.items()}
"""The same the other way round."""

_SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def is_plain(value: Any) -> bool:
    """Whether it is a tensor, and no subclass, whose memory an array can show."""
    return (
        type(value) is torch.Tensor
        and value.layout is torch.strided
        and value.dtype in NAMES
        and value.device.type == "cpu"
        and not (value.is_nested or value.is_conj() or value.is_neg())
    )


def array_of(tensor: torch.Tensor) -> np.ndarray:
    """The tensor's memory as NumPy sees it, as integers for dtypes that NumPy lacks.

    NumPy copies a few rows in a tenth of the time that torch needs to begin.
    """
    try:
        return tensor.numpy()
    except (TypeError, RuntimeError):  # needs a gradient, is elsewhere, of a dtype NumPy lacks ...
        tensor = tensor.detach().cpu().resolve_conj().resolve_neg()
    try:
        return tensor.numpy()
    except TypeError:
        return tensor.view(_SAME_SIZE[tensor.dtype.itemsize]).numpy()
