"""Rollouts ``[N, T]`` of several workers as one batch; and what is left of one that was cut short.

Pure functions over TensorDicts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from tensordict import TensorDict, pad

from torchrl_dist.errors import ConfigurationError

MASK = ("collector", "mask")
_TRAJECTORY = ("collector", "traj_ids")
_TRUNCATED = ("next", "truncated")


def truncate_last(rollout: TensorDict) -> None:
    """Mark the last step of each env as the end of its trajectory, in place; not as terminated."""
    _have_truncated(rollout)
    done = rollout.get(("next", "done"))
    rollout.get(_TRUNCATED)[:, -1] |= ~done[:, -1]
    done[:, -1] = True


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
        done = "done" if isinstance(key, str) else (*key[:-1], "done")
        following.get(key)[:, -1] = True
        following.get(done)[:, -1] = True


def _last(key: str | tuple[str, ...]) -> str:
    return key if isinstance(key, str) else key[-1]


def _have_truncated(rollout: TensorDict) -> None:
    """Rows of a TorchRL env that only terminates do not say that they are not truncated."""
    if _TRUNCATED not in rollout.keys(True):
        for key in ("truncated", _TRUNCATED):
            rollout.set(key, torch.zeros_like(rollout.get(("next", "done"))))


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
        return torch.stack(list(rollouts), 0)
    return rollouts[0] if len(rollouts) == 1 else torch.cat(list(rollouts), dim)


def _padded(rollouts: Sequence[TensorDict]) -> list[TensorDict]:
    if any(_TRUNCATED in rollout.keys(True) for rollout in rollouts):
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
