"""Numbers in hidden columns that tell which row follows which, wherever the rows are stored.

Each thread that writes gives a number to each of its rows. The first number is random, and each
further row gets the next number. A row therefore follows another row if and only if its
number is larger by one. A row that was lost, or is in another shard, leaves a gap, and so does a
restore. The number 0 means that the row's place in the order is unknown. The column ``STREAM``
numbers all rows of a thread. The column ``ORDER`` numbers the rows of each trajectory separately,
if rows have trajectory ids.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from torchrl_dist.replay.row.spec import ORDER, ColumnSpec

TRAJECTORY_KEYS = (("collector", "traj_ids"), ("episode",))
"""The keys under which rows usually have their trajectory ids."""

_MOST_TRAJECTORIES = 2**14
"""The number of trajectories whose numbers a thread continues. If a thread writes more trajectories
than this at the same time, the numbers of some trajectories have gaps."""


class RowNumbers(threading.local):
    """Gives numbers to the rows of each thread of this process."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._next: OrderedDict[Any, int] = OrderedDict()

    def of(
        self, hidden: ColumnSpec, count: int, columns: Mapping[tuple[str, ...], Any]
    ) -> np.ndarray:
        """Return the next rows' numbers in a hidden column, int64 [count].

        Args:
            columns: the rows' values by key. Trajectory ids are looked up there.
        """
        if self._pid != os.getpid():  # a forked child does not continue its parent's trajectories
            self._pid, self._next = os.getpid(), OrderedDict()
        for key in TRAJECTORY_KEYS if hidden == ORDER else ():
            ids = columns.get(key)
            if isinstance(ids, torch.Tensor) and ids.numel() == count and count:
                return self._by_id(ids.detach().cpu().reshape(-1).numpy())
        start = self._taken(hidden.key, count)
        return np.arange(start, start + count)

    def _by_id(self, ids: np.ndarray) -> np.ndarray:
        numbers = np.empty(ids.size, np.int64)
        edges = np.flatnonzero(ids[1:] != ids[:-1]) + 1
        for first, stop in zip([0, *edges.tolist()], [*edges.tolist(), ids.size], strict=True):
            start = self._taken(ids[first].item(), stop - first)
            numbers[first:stop] = np.arange(start, start + stop - first)
        return numbers

    def _taken(self, trajectory: Any, count: int) -> int:
        """Reserve ``count`` numbers for rows of a trajectory, and return the first."""
        start = self._next.pop(trajectory, 0) or int.from_bytes(os.urandom(8), "little") // 4 + 1
        self._next[trajectory] = start + count
        if len(self._next) > _MOST_TRAJECTORIES:
            self._next.popitem(last=False)
        return start
