"""Whole trajectories from a ring that many processes write, for TorchRL's ``query``."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from tensordict import NestedKey, TensorDict, TensorDictBase

from torchrl_dist.errors import ConfigurationError
from torchrl_dist.replay.row import rows
from torchrl_dist.replay.saving.snapshot import SavedShard

# TorchRL looks for the keys in this order
_USUAL_KEYS: tuple[NestedKey, ...] = (("collector", "traj_ids"), "traj_ids", "episode")
_END_KEYS = ("done", "terminated", "truncated")


def trajectories(
    saved: Sequence[SavedShard | None], key: NestedKey | None
) -> Iterator[tuple[TensorDictBase, NestedKey]]:
    """Yield parts of the rows, ``[n]``, ordered by trajectory, and the key of their trajectory ids.

    In each part, the rows of a trajectory follow one another in the order of writing. Trajectories
    that follow one another have different ids, and the oldest trajectory comes first.

    Raises:
        KeyError: the rows do not have that key.
        ConfigurationError: the rows have no trajectory ids, or a trajectory is in several shards.
    """
    seen: dict[float, int] = {}
    for number, shard in enumerate(saved):
        if shard is None or not shard.leaf.size:
            continue
        assert shard.head.spec is not None
        spec = shard.head.spec
        data = rows.build(
            rows.tensors([column[:] for column in shard.columns], spec), spec, (shard.leaf.size,)
        )
        found, ids = _ids_of(data, key)
        _check_one_shard(ids, number, seen)
        order, parts = _order(ids, _ends_of(data))
        if (np.diff(order) != 1).any():
            data = data[order]
        for start, stop in parts:
            yield data[start:stop], found


def _ids_of(data: TensorDict, key: NestedKey | None) -> tuple[NestedKey, np.ndarray]:
    keys = _USUAL_KEYS if key is None else (key,)
    for each in keys:
        ids = data.get(each, None)
        if ids is None:
            continue
        if not isinstance(ids, torch.Tensor) or ids.numel() != len(data):
            raise ConfigurationError(
                f"{each!r} is a {type(ids).__name__} of shape {list(ids.shape)}, expected one "
                "number per row; pass another trajectory_key="
            )
        return each, ids.reshape(-1).numpy()
    if key is not None:
        found = sorted(map(str, data.keys(True, True)))
        raise KeyError(f"trajectory_key {key!r} not found in data. Pass one of {found}")
    raise ConfigurationError(
        f"the rows have no trajectory id under {', '.join(map(str, keys))}; pass trajectory_key=. "
        "Flags at the ends of episodes do not suffice, because rows of several processes may "
        "alternate"
    )


def _ends_of(data: TensorDict) -> np.ndarray:
    """Return for each row whether an episode ends there, bool [n]. If the rows have no flags for
    ends of episodes, the result is False everywhere."""
    for place in ((("next", key) for key in _END_KEYS), _END_KEYS):
        flags = [flag for key in place if (flag := data.get(key, None)) is not None]
        if flags:
            return np.any([flag.reshape(len(data), -1).any(-1).numpy() for flag in flags], 0)
    return np.zeros(len(data), dtype=bool)


def _check_one_shard(ids: np.ndarray, number: int, seen: dict[float, int]) -> None:
    for one in np.unique(ids).tolist():
        other = seen.setdefault(one, number)
        if other != number:
            raise ConfigurationError(
                f"rows of trajectory {one} are in shards {other} and {number}, so it is not known "
                "in which order they were written; make trajectory ids unique in the job, and "
                "build the buffer with write_to='own'"
            )


def _order(ids: np.ndarray, ends: np.ndarray) -> tuple[np.ndarray, list[tuple[int, int]]]:
    """Order rows by trajectory. Return the row numbers, int64 [n], and the order's parts.

    The given rows are in the order of writing. In each part ``(start, stop)``, neighbouring
    trajectories have different ids. Rows of other writers divide a trajectory into pieces. A piece
    continues the previous piece of the same id, unless an episode ended with the previous piece.
    """
    first = np.flatnonzero(np.append(True, ids[1:] != ids[:-1]))  # first row of each piece
    length = np.diff(np.append(first, ids.size))
    by_id = np.argsort(ids[first], kind="stable")
    same = ids[first][by_id[1:]] == ids[first][by_id[:-1]]
    begins = np.append(True, ~same | ends[first + length - 1][by_id[:-1]])
    # for each piece, the number of its trajectory's first piece
    group = np.empty(first.size, np.int64)
    group[by_id] = by_id[begins][np.cumsum(begins) - 1]
    order = np.argsort(np.repeat(group, length), kind="stable")
    ordered = np.repeat(group, length)[order]
    cuts = np.flatnonzero((ordered[1:] != ordered[:-1]) & (ids[order][1:] == ids[order][:-1])) + 1
    edges = [0, *cuts.tolist(), ids.size]
    return order, list(itertools.pairwise(edges))
