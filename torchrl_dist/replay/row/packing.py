"""Rows as a message takes them: what is small as arrays, which travel inside its bytes, and what is
large as tensors, whose memory is sent as it is (``runtime/wire.py``)."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence

import numpy as np
import torch

from torchrl_dist.replay.row.spec import RowSpec

_LARGEST_INSIDE_BYTES = 2**16  # above this a copy costs more than another tensor in the message

Part = np.ndarray | torch.Tensor


def pack(arrays: Sequence[np.ndarray], *, copy: bool) -> list[Part]:
    """The same arrays, to be sent.

    Args:
        arrays: as ``tensors.array_of`` gives them.
        copy: for a caller that may change them before that.
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
    """The arrays that :func:`pack` was given."""
    return [part if isinstance(part, np.ndarray) else part.numpy() for part in packed]


@functools.lru_cache(maxsize=64)
def spec_from_text(text: str) -> RowSpec:
    """The spec with this ``text``; the same object each time."""
    return RowSpec.from_json(json.loads(text))
