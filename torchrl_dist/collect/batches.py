"""Rollouts ``[N, T]`` of several workers as one batch; and what is left of one that was cut short.

Pure functions over TensorDicts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tensordict import TensorDict, pad

MASK = ("collector", "mask")
_TRAJECTORY = ("collector", "traj_ids")
_TRUNCATED = ("next", "truncated")


def truncate_last(rollout: TensorDict) -> None:
    """Mark the last step of each env as the end of its trajectory, in place; not as terminated."""
    _have_truncated(rollout)
    done = rollout.get(("next", "done"))
    rollout.get(_TRUNCATED)[:, -1] |= ~done[:, -1]
    done[:, -1] = True


def _have_truncated(rollout: TensorDict) -> None:
    """Rows of a TorchRL env that only terminates do not say that they are not truncated."""
    if _TRUNCATED not in rollout.keys(True):
        for key in ("truncated", _TRUNCATED):
            rollout.set(key, torch.zeros_like(rollout.get(("next", "done"))))


def join(rollouts: Sequence[TensorDict], masked: bool) -> TensorDict:
    """Concatenate along the envs.

    Args:
        masked: add a bool ``[N, T]`` at ``("collector", "mask")``; rollouts may then differ in T
            and are padded with zeros, and -1 as trajectory id, to the longest.
    """
    if not masked:
        return rollouts[0] if len(rollouts) == 1 else torch.cat(list(rollouts), 0)
    if any(_TRUNCATED in rollout.keys(True) for rollout in rollouts):
        for rollout in rollouts:
            _have_truncated(rollout)
    longest = max(rollout.shape[1] for rollout in rollouts)
    padded = [_pad(rollout, longest) for rollout in rollouts]
    return padded[0] if len(padded) == 1 else torch.cat(padded, 0)


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
