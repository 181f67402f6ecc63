"""Rollouts ``[N, T]`` of several workers as one batch; and what is left of one that was cut short.

Pure functions over TensorDicts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tensordict import TensorDict, pad

MASK = ("collector", "mask")
_TRAJECTORY = ("collector", "traj_ids")


def truncate_last(rollout: TensorDict) -> None:
    """Mark the last step of each env as the end of its trajectory, in place; not as terminated."""
    done = rollout.get(("next", "done"))
    truncated = rollout.get(("next", "truncated"), None)
    if truncated is None:  # a TorchRL env that only terminates
        truncated = torch.zeros_like(done)
        rollout.set(("next", "truncated"), truncated)
        rollout.set("truncated", torch.zeros_like(done))
    truncated[:, -1] |= ~done[:, -1]
    done[:, -1] = True


def join(rollouts: Sequence[TensorDict], masked: bool) -> TensorDict:
    """Concatenate along the envs.

    Args:
        masked: add a bool ``[N, T]`` at ``("collector", "mask")``; rollouts may then differ in T
            and are padded with zeros, and -1 as trajectory id, to the longest.
    """
    if not masked:
        return rollouts[0] if len(rollouts) == 1 else torch.cat(list(rollouts), 0)
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
