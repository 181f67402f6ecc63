"""Join rollouts ``[N, T]`` of several workers into one batch, and mark the last steps of rollouts
as truncated.

All functions of this module work on TensorDicts and keep no state.
"""

from __future__ import annotations

from collections.abc import Sequence
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
    """Return at which steps an episode ends, bool ``[N, T]``. An episode ends at a step where any
    done entry of ``following [N, T]`` is true, even if only the entry of a single agent is true.
    TorchRL's collectors use the same rule."""
    return _joined(following, "done").any(-1)


def rewards_of(following: TensorDictBase) -> Tensor:
    """Return the reward of each step, ``[N, T]``: the sum of all reward entries, including the
    entries of single agents."""
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
    """Mark the last step of each env as truncated and done, in place, unless the step is already
    done."""
    _have_truncated(rollout)
    following = rollout.get("next")
    for key in [key for key in following.keys(True, True) if _last(key) == "done"]:
        _end_last(following, key, even_if_done=False)


def set_truncated(rollout: TensorDict) -> None:
    """Mark the last step of each env as truncated and done, in place, as TorchRL does, even if the
    step is already done. The env itself continues its episode."""
    following = rollout.get("next")
    found = [key for key in following.keys(True, True) if _last(key) == "truncated"]
    if not found:
        raise ConfigurationError(
            "set_truncated=True needs the key 'truncated', which the env does not have; add this "
            "key with TorchRL's env.add_truncated_keys()"
        )
    for key in found:
        _end_last(following, _beside(key, "done"), even_if_done=True)


def without_next_observations(rollout: TensorDict) -> TensorDict:
    """Return ``rollout`` without the entries of ``"next"`` that the following row repeats, as
    TorchRL's ``compact_obs`` does. These entries are all keys that ``rollout`` has both inside and
    outside ``"next"``, except done flags and rewards."""
    here = set(rollout.keys(True, True, is_leaf=is_leaf_nontensor))
    kept = ("reward", "done", "terminated", "truncated")
    following = rollout.get("next").keys(True, True, is_leaf=is_leaf_nontensor)
    again = [key for key in following if key in here and not _last(key).endswith(kept)]
    return rollout.exclude(*(("next", *((key,) if isinstance(key, str) else key)) for key in again))


def _end_last(following: TensorDictBase, key: Key, *, even_if_done: bool) -> None:
    """Set the done entry ``key`` of each env's last step. Also set the truncated entry of the same
    level if the step was not done before, or if ``even_if_done`` is true."""
    done, truncated = following.get(key), following.get(_beside(key, "truncated"))
    truncated[:, -1] |= even_if_done | ~done[:, -1]
    done[:, -1] = True
    # write the entries back, because a lazy stack returns copies
    following.set(key, done).set(_beside(key, "truncated"), truncated)


def is_ragged(td: TensorDictBase) -> bool:
    """Whether ``td`` contains lazy stacks of tensors. The parts of a lazy stack may have different
    shapes or keys, as with envs that have dynamic specs."""
    if isinstance(td, LazyStackedTensorDict):
        return not is_non_tensor(td)
    return any(is_ragged(part) for part in td.values() if is_tensor_collection(part))


def stack(parts: Sequence[TensorDictBase], dim: int) -> TensorDictBase:
    """Stack ``parts`` into a TensorDict or, if shapes differ, into a lazy stack, as TorchRL's
    ``Collector`` does. Unlike ``maybe_dense_stack`` of tensordict 0.14.3, this function also works
    if only some of ``parts`` are lazy stacks."""
    try:
        return TensorDict.maybe_dense_stack(parts, dim=dim)
    except RuntimeError:
        if not any(map(is_ragged, parts)):
            raise
        return LazyStackedTensorDict.lazy_stack(parts, dim)


def size_bytes(rows: TensorDictBase) -> int:
    """Return the total size of all tensors in ``rows``, in bytes."""
    if isinstance(rows, LazyStackedTensorDict) and not is_non_tensor(rows):
        return sum(size_bytes(part) for part in rows.tensordicts)
    values = rows.values(is_leaf=is_leaf_nontensor)
    return sum(size_bytes(v) if is_tensor_collection(v) else v.nbytes for v in values)


def _last(key: str | tuple[str, ...]) -> str:
    return key if isinstance(key, str) else key[-1]


def _beside(key: Key, name: str) -> Key:
    return name if isinstance(key, str) else (*key[:-1], name)


def _have_truncated(rollout: TensorDict) -> None:
    """Add missing ``truncated`` entries, filled with False. They are missing, for example, if a
    TorchRL env reports ``terminated`` but not ``truncated``."""
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
    """Concatenate rollouts along the dimension of the envs or another dimension, or stack rollouts
    along a new first dimension.

    Args:
        masked: add a mask of the valid steps, bool ``[N, T]``, at ``("collector", "mask")``.
            Rollouts may then differ in T. Shorter rollouts are padded with zeros, and their
            trajectory ids are padded with -1.
        dim: the dimension along which rollouts are concatenated (0 is the dimension of the envs),
            or ``"stack"``.
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
