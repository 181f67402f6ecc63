"""Assemble whole trajectories from batches that may contain only parts of trajectories."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import torch
from tensordict import TensorDict, TensorDictBase, pad

from torchrl_dist.collect.loop.joining import MASK, ends_of
from torchrl_dist.collect.loop.policies import flat


class TrajectoryAssembler:
    """Keep the parts of each trajectory until the trajectory ends, then return the whole
    trajectory.

    Trajectories are returned in the order of the batches in which they ended and, within a batch,
    in the order in which they began, as in TorchRL.
    """

    def __init__(self) -> None:
        # parts of unfinished trajectories, by trajectory id, in the order in which the trajectories
        # began
        self._open: dict[int, list[TensorDictBase]] = {}
        self._whole: deque[TensorDictBase] = deque()

    def __len__(self) -> int:
        """Return the number of whole trajectories that can be taken."""
        return len(self._whole)

    def add(self, batch: TensorDictBase) -> None:
        """Add a batch ``[N, T]`` with trajectory ids. The rows of the batch are kept without
        copying."""
        ids = batch.get(("collector", "traj_ids"))
        done = ends_of(batch.get("next"))
        starts = [(0, row) for row in range(len(batch))]
        starts += [(t + 1, row) for row, t in (ids[:, 1:] != ids[:, :-1]).nonzero().tolist()]
        end_of: dict[int, int] = {}  # by row of the batch, the step at which the next part begins
        ends = []
        for start, row in sorted(starts, reverse=True):
            ends.append(end_of.get(row, ids.shape[1]))
            end_of[row] = start
        finished = set()
        for (start, row), end in zip(sorted(starts), reversed(ends), strict=True):
            trajectory = int(ids[row, start])
            self._open.setdefault(trajectory, []).append(batch[row, start:end])
            if done[row, end - 1]:
                finished.add(trajectory)
        for trajectory in [each for each in self._open if each in finished]:
            self._whole.append(torch.cat(self._open.pop(trajectory), 0))

    def forget_parts(self, ids: Iterable[int] | None = None) -> None:
        """Drop the unfinished trajectories with these ids or, without ids, all unfinished
        trajectories. Call this method for trajectories that will not be continued."""
        for trajectory in list(self._open) if ids is None else ids:
            self._open.pop(trajectory, None)

    def forget(self) -> None:
        """Drop all trajectories, whole and unfinished."""
        self._open.clear()
        self._whole.clear()

    def take_all(self) -> list[TensorDictBase]:
        """Return all whole trajectories, each ``[steps]``."""
        chosen = list(self._whole)
        self._whole.clear()
        return chosen

    def take_flat(self, count: int) -> TensorDictBase:
        """Return the next ``count`` trajectories, concatenated: ``[steps of all]``."""
        return torch.cat([self._whole.popleft() for _ in range(count)], 0)

    def take_padded(self, count: int) -> TensorDict:
        """Return the next ``count`` trajectories, padded with zeros and stacked to ``[count, steps
        of the longest]``.

        ``("collector", "mask")`` is true for valid steps. Non-tensor data are padded with their
        last value.
        """
        chosen = [self._whole.popleft() for _ in range(count)]
        longest = max(len(trajectory) for trajectory in chosen)
        padded = []
        for trajectory in chosen:
            trajectory.set(MASK, torch.ones(len(trajectory), dtype=torch.bool))
            padded.append(_padded(trajectory, longest - len(trajectory)))
        batch: TensorDict = torch.stack(padded, 0)
        batch.names = [None, "time"]
        return batch


def _padded(trajectory: TensorDictBase, steps: int) -> TensorDictBase:
    if not steps:
        return trajectory
    out = pad(trajectory, [0, steps])
    for key, value in flat(trajectory).items():
        if not isinstance(value, torch.Tensor):  # pad() drops non-tensor data (tensordict 0.14.3)
            out.set(key, torch.cat([value, *[value[-1:]] * steps], 0))
    return out
