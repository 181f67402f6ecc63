"""Whole trajectories out of batches that cut them anywhere. Pure bookkeeping over TensorDicts."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import torch
from tensordict import TensorDict, TensorDictBase, pad

from torchrl_dist.collect.loop.batches import MASK, ends_of


class TrajectoryAssembler:
    """Holds the parts of trajectories until they end, then hands them out whole, in the order in
    which they ended."""

    def __init__(self) -> None:
        self._open: dict[int, list[TensorDictBase]] = {}
        self._whole: deque[TensorDictBase] = deque()

    def __len__(self) -> int:
        """Whole trajectories that wait."""
        return len(self._whole)

    def add(self, batch: TensorDictBase) -> None:
        """Take in a batch ``[N, T]`` with trajectory ids; its rows are kept, not copied."""
        ids = batch.get(("collector", "traj_ids"))
        done = ends_of(batch.get("next"))
        ends = (ids[:, 1:] != ids[:, :-1]).nonzero().tolist()
        borders: list[list[int]] = [[0] for _ in range(len(batch))]
        for row, column in ends:
            borders[row].append(column + 1)
        finished: list[tuple[int, int, int]] = []
        for row, starts in enumerate(borders):
            for start, end in zip(starts, [*starts[1:], ids.shape[1]], strict=True):
                trajectory = int(ids[row, start])
                self._open.setdefault(trajectory, []).append(batch[row, start:end])
                if done[row, end - 1]:
                    finished.append((end, row, trajectory))
        for _, _, trajectory in sorted(finished):
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

    def take(self, count: int) -> TensorDict:
        """The next ``count`` of them, ``[count, longest]``, padded with zeros; valid steps are true
        in ``("collector", "mask")``."""
        chosen = [self._whole.popleft() for _ in range(count)]
        longest = max(len(trajectory) for trajectory in chosen)
        padded = []
        for trajectory in chosen:
            trajectory.set(MASK, torch.ones(len(trajectory), dtype=torch.bool))
            padded.append(pad(trajectory, [0, longest - len(trajectory)]))
        batch = torch.stack(padded, 0)
        batch.names = [None, "time"]
        return batch
