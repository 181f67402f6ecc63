"""Between TensorDicts and the flat leaves of a row: checked on the way in, built on the way out."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from tensordict import (
    TensorDict,
    TensorDictBase,
    is_leaf_nontensor,
    is_tensor_collection,
    is_tensorclass,
)

from torchrl_dist.errors import ConfigurationError
from torchrl_dist.replay import _torchrl
from torchrl_dist.replay.directory import LeafSpec, RowSpec, array_of

SAMPLING_KEYS = frozenset({("index",), ("index_generation",), ("priority_weight",)})
"""What a buffer adds to a sample. They describe the draw, not the row, and are not stored."""


def _path(key: str | tuple[str, ...]) -> tuple[str, ...]:
    return (key,) if isinstance(key, str) else tuple(key)


def _name(path: tuple[str, ...]) -> str:
    return path[0] if len(path) == 1 else str(path)


def leaves_of(data: TensorDictBase) -> dict[tuple[str, ...], torch.Tensor]:
    """The tensors to store, by path.

    Raises:
        ConfigurationError: if ``data`` holds something that is not a tensor.
    """
    if not is_tensor_collection(data) or is_tensorclass(data):
        raise ConfigurationError(
            f"shared storages hold TensorDicts, got {type(data).__name__}; wrap the data in a "
            "TensorDict (of a tensorclass: data.to_tensordict(), and TheClass.from_tensordict of "
            "what is sampled)"
        )
    leaves = _torchrl.plain_leaves(data)
    if leaves:
        for path in SAMPLING_KEYS:
            leaves.pop(path, None)
        return leaves
    leaves = {}
    for key, value in data.items(True, True, is_leaf=is_leaf_nontensor):
        path = _path(key)
        if path in SAMPLING_KEYS:
            continue
        if not isinstance(value, torch.Tensor):
            raise ConfigurationError(
                f"key {_name(path)!r} holds a {type(value).__name__}; only tensors can lie in "
                "shared memory: encode it as a tensor or drop it"
            )
        leaves[path] = value
    if not leaves:
        raise ConfigurationError("a row needs at least one tensor, got an empty TensorDict")
    return leaves


def spec_of(data: TensorDictBase) -> RowSpec:
    """The row spec of a batch ``[n, ...]``: what follows the first dimension."""
    leaves = leaves_of(data)
    return RowSpec(
        tuple(
            LeafSpec(path, value.dtype, tuple(value.shape[1:]))
            for path, value in sorted(leaves.items())
        ),
        tuple(data.batch_size[1:]),
    )


def matching_leaves(data: TensorDictBase, spec: RowSpec) -> list[np.ndarray]:
    """The leaves of a batch in the order of the spec, as :func:`array_of` gives them.

    Raises:
        ConfigurationError: naming every key that is missing, unknown, or of another shape or
            dtype. Nothing was written then.
    """
    found = leaves_of(data)
    problems = []
    ordered = []
    rows = data.batch_size[0]
    for leaf in spec.leaves:
        value = found.get(leaf.key)
        if value is None:
            problems.append(f"missing {_name(leaf.key)!r}")
            continue
        if value.dtype != leaf.dtype or value.shape != (rows, *leaf.shape):
            problems.append(
                f"{_name(leaf.key)!r} is {value.dtype} {list(value.shape[1:])} per row, stored "
                f"as {leaf.dtype} {list(leaf.shape)}"
            )
        else:
            ordered.append(array_of(value))
    if len(found) > len(spec.leaves) - sum(p.startswith("missing") for p in problems):
        known = {leaf.key for leaf in spec.leaves}
        problems += [f"unknown {_name(path)!r}" for path in found if path not in known]
    if problems:
        raise ConfigurationError(
            "the data does not match the rows of the shared buffer: " + "; ".join(problems)
        )
    return ordered


def tensors(leaves: list[np.ndarray], spec: RowSpec) -> list[torch.Tensor]:
    """The inverse of :func:`array_of` for the leaves of a batch; no copy."""
    return [
        value if value.dtype == leaf.dtype else value.view(leaf.dtype)
        for value, leaf in zip(map(torch.from_numpy, leaves), spec.leaves, strict=True)
    ]


def build(leaves: list[torch.Tensor], spec: RowSpec, batch: tuple[int, ...]) -> TensorDict:
    """A TensorDict of the leaves, with batch size ``(*batch, *spec.batch_dims)``."""
    nested: dict[str, Any] = {}
    for leaf, value in zip(spec.leaves, leaves, strict=True):
        folder = nested
        for part in leaf.key[:-1]:
            folder = folder.setdefault(part, {})
        folder[leaf.key[-1]] = value
    return _torchrl.nested_tensordict(nested, torch.Size((*batch, *spec.batch_dims)))
