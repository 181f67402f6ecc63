"""Whole trajectories out of batches that cut them anywhere. Pure bookkeeping over TensorDicts."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import torch
from tensordict import TensorDict, TensorDictBase, pad

from torchrl_dist.collect.loop.joining import MASK, ends_of
from torchrl_dist.collect.loop.policies import flat


class TrajectoryAssembler:
    """Holds the parts of trajectories until they end, then hands them out whole: batch by batch,
    those that ended in it in the order in which they began, as TorchRL does."""

    def __init__(self) -> None:
        self._open: dict[int, list[TensorDictBase]] = {}  # as they began
        self._whole: deque[TensorDictBase] = deque()

    def __len__(self) -> int:
        """Whole trajectories that wait."""
        return len(self._whole)

    def add(self, batch: TensorDictBase) -> None:
        """Take in a batch ``[N, T]`` with trajectory ids; its rows are kept, not copied."""
        ids = batch.get(("collector", "traj_ids"))
        done = ends_of(batch.get("next"))
        starts = [(0, row) for row in range(len(batch))]
        starts += [(t + 1, row) for row, t in (ids[:, 1:] != ids[:, :-1]).nonzero().tolist()]
        end_of: dict[int, int] = {}  # of what follows in a row
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
        """What is unfinished, of these trajectories or of all, will not be finished."""
        for trajectory in list(self._open) if ids is None else ids:
            self._open.pop(trajectory, None)

    def forget(self) -> None:
        """Hold nothing."""
        self._open.clear()
        self._whole.clear()

    def take_all(self) -> list[TensorDictBase]:
        """All that are whole, each ``[steps]``."""
        chosen = list(self._whole)
        self._whole.clear()
        return chosen

    def take_flat(self, count: int) -> TensorDictBase:
        """The next ``count`` of them, one behind the other: ``[steps of all]``."""
        return torch.cat([self._whole.popleft() for _ in range(count)], 0)

    def take_padded(self, count: int) -> TensorDict:
        """The next ``count`` of them, ``[count, longest]``, padded with zeros; valid steps are true
        in ``("collector", "mask")``. Data that are no tensors are padded with their last."""
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
        if not isinstance(value, torch.Tensor):  # these pad drops (tensordict 0.14.3)
            out.set(key, torch.cat([value, *[value[-1:]] * steps], 0))
    return out
