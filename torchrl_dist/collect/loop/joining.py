"""Rollouts ``[N, T]`` of several workers as one batch; and what is left of one that was cut short.

Pure functions over TensorDicts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from tensordict import (
    LazyStackedTensorDict,
    TensorDict,
    TensorDictBase,
    is_leaf_nontensor,
    is_non_tensor,
    is_tensor_collection,
    pad,
)
from torch import Tensor

from torchrl_dist.collect.loop.spaces import Key
from torchrl_dist.errors import ConfigurationError

MASK = ("collector", "mask")
_TRAJECTORY = ("collector", "traj_ids")


def ends_of(following: TensorDictBase) -> Tensor:
    """Where an episode ends, bool ``[N, T]``: where any of the done entries of ``following [N, T]``
    says so, those of agents too, as TorchRL's collectors count trajectories."""
    return _joined(following, "done").any(-1)


def rewards_of(following: TensorDictBase) -> Tensor:
    """The reward of each step, ``[N, T]``: the sum over what there is, of agents too."""
    return _joined(following, "reward").sum(-1)


def _joined(following: TensorDictBase, name: str) -> Tensor:
    found = [following.get(key) for key in following.keys(True, True) if _last(key) == name]
    shape = following.shape
    return (
        found[0].reshape(*shape, -1)
        if len(found) == 1
        else torch.cat([value.reshape(*shape, -1) for value in found], -1)
    )


def truncate_last(rollout: TensorDict) -> None:
    """Mark the last step of each env as the end of its trajectory, in place; not as terminated."""
    _have_truncated(rollout)
    following = rollout.get("next")
    for key in [key for key in following.keys(True, True) if _last(key) == "done"]:
        done, truncated = following.get(key), following.get(_beside(key, "truncated"))
        truncated[:, -1] |= ~done[:, -1]
        done[:, -1] = True
        _put_back(following, {key: done, _beside(key, "truncated"): truncated})


def set_truncated(rollout: TensorDict) -> None:
    """Mark the last step of each env as truncated and done, in place, as TorchRL does. Its episode
    goes on."""
    following = rollout.get("next")
    found = [key for key in following.keys(True, True) if _last(key) == "truncated"]
    if not found:
        raise ConfigurationError(
            "set_truncated=True: the env has no 'truncated'; TorchRL's env.add_truncated_keys() "
            "adds it"
        )
    for key in found:
        truncated, done = following.get(key), following.get(_beside(key, "done"))
        truncated[:, -1] = True
        done[:, -1] = True
        _put_back(following, {key: truncated, _beside(key, "done"): done})


def _put_back(td: TensorDictBase, changed: Mapping[Key, Tensor]) -> None:
    """What a lazy stack gives are copies."""
    for key, value in changed.items():
        td.set(key, value)


def is_ragged(td: TensorDictBase) -> bool:
    """Whether there are lazy stacks in it, whose parts may have tensors of different shapes, or
    different keys, as those of envs with dynamic specs have; not stacks of non-tensor data."""
    if isinstance(td, LazyStackedTensorDict):
        return not is_non_tensor(td)
    return any(is_ragged(part) for part in td.values() if is_tensor_collection(part))


def stack(parts: Sequence[TensorDictBase], dim: int) -> TensorDictBase:
    """A TensorDict, or a lazy stack where shapes differ, as TorchRL's ``Collector`` makes it; which
    fails where only some of the parts are lazy stacks (tensordict 0.14.3)."""
    try:
        return TensorDict.maybe_dense_stack(parts, dim=dim)
    except RuntimeError:
        if not any(map(is_ragged, parts)):
            raise
        return LazyStackedTensorDict.lazy_stack(parts, dim)


def size_bytes(rows: TensorDictBase) -> int:
    """Of all its tensors."""
    if isinstance(rows, LazyStackedTensorDict) and not is_non_tensor(rows):
        return sum(size_bytes(part) for part in rows.tensordicts)
    values = rows.values(is_leaf=is_leaf_nontensor)
    return sum(size_bytes(v) if is_tensor_collection(v) else v.nbytes for v in values)


def _last(key: str | tuple[str, ...]) -> str:
    return key if isinstance(key, str) else key[-1]


def _beside(key: Key, name: str) -> Key:
    return name if isinstance(key, str) else (*key[:-1], name)


def _have_truncated(rollout: TensorDict) -> None:
    """Rows of a TorchRL env that only terminates do not say that they are not truncated."""
    following = rollout.get("next")
    keys = set(following.keys(True, True))
    for key in [key for key in keys if _last(key) == "done"]:
        truncated = _beside(key, "truncated")
        if truncated not in keys:
            for part in (rollout, following):
                part.set(truncated, torch.zeros_like(following.get(key)))


def join(
    rollouts: Sequence[TensorDict], masked: bool, dim: int | Literal["stack"] = 0
) -> TensorDict:
    """Concatenate along the envs, or another dimension, or stack.

    Args:
        masked: add a bool ``[N, T]`` at ``("collector", "mask")``; rollouts may then differ in T
            and are padded with zeros, and -1 as trajectory id, to the longest.
    """
    if masked:
        rollouts = _padded(rollouts)
    if dim == "stack":
        return stack(list(rollouts), 0)
    if len(rollouts) == 1:
        return rollouts[0]
    if dim == 0 and any(map(is_ragged, rollouts)):
        joined = stack([row for rollout in rollouts for row in rollout.unbind(0)], 0)
        joined.names = [None, "time"]
        return joined
    return torch.cat(list(rollouts), dim)


def _padded(rollouts: Sequence[TensorDict]) -> list[TensorDict]:
    if any("truncated" in map(_last, rollout.get("next").keys(True, True)) for rollout in rollouts):
        for rollout in rollouts:
            _have_truncated(rollout)
    longest = max(rollout.shape[1] for rollout in rollouts)
    return [_pad(rollout, longest) for rollout in rollouts]


def _pad(rollout: TensorDict, steps: int) -> TensorDict:
    if rollout.get(MASK, None) is None:
        rollout.set(MASK, torch.ones(rollout.shape, dtype=torch.bool))
    missing = steps - rollout.shape[1]
    if not missing:
        return rollout
    padded = pad(rollout, [0, 0, 0, missing])
    padded.names = rollout.names
    padded.get(_TRAJECTORY)[:, -missing:] = -1
    return padded
