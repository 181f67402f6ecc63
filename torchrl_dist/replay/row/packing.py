"""Pack rows for a message: small columns as arrays, which become part of the message's bytes, and
large ones as tensors, whose memory is sent without a copy (``runtime/wire.py``)."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence

import numpy as np
import torch

from torchrl_dist.replay.row.spec import RowSpec

_LARGEST_INSIDE_BYTES = 2**16  # copying a larger array costs more than one more tensor in a message

Part = np.ndarray | torch.Tensor


def pack(arrays: Sequence[np.ndarray], *, copy: bool) -> list[Part]:
    """Return the arrays in a form that can be sent.

    Args:
        arrays: as ``tensors.array_of`` returns them.
        copy: whether to copy the arrays. Needed if the caller may change them before they are sent.
    """
    found: list[Part] = []
    for array in arrays:
        own = array.copy() if copy else array
        if own.nbytes > _LARGEST_INSIDE_BYTES:
            found.append(torch.from_numpy(np.ascontiguousarray(own)))
        else:
            found.append(own)
    return found


def unpack(packed: Sequence[Part]) -> list[np.ndarray]:
    """Return the arrays that were passed to :func:`pack`."""
    return [part if isinstance(part, np.ndarray) else part.numpy() for part in packed]


@functools.lru_cache(maxsize=64)
def spec_from_text(text: str) -> RowSpec:
    """Return the spec with this ``text``. Equal texts give the same object."""
    return RowSpec.from_json(json.loads(text))
