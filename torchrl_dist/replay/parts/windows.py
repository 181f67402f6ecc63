"""Windows of consecutive rows around drawn rows, for TorchRL's sample unit ``Sequence``.

``Sequence`` expands a drawn row, the *anchor*, into the rows of the neighbouring slots. If many
processes write the ring, the next step of a trajectory may be in any slot. :class:`Neighbours`
finds this slot by the numbers of rows (``row.numbers``).
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from tensordict import NestedKey
from torchrl.data.replay_buffers.sample_units import Sequence

from torchrl_dist.replay.node.directory import ReplayDirectory
from torchrl_dist.replay.node.patches import column_of
from torchrl_dist.replay.parts.drawn import Drawn
from torchrl_dist.replay.parts.storage import REDRAWS, Draw, SharedMemmapStorage
from torchrl_dist.replay.row.spec import ORDER


@dataclass(frozen=True)
class Window:
    """The arguments of TorchRL's ``Sequence``."""

    length: int
    burn_in: int
    bootstrap: int
    dilation: int
    episode_boundary: str
    done_key: NestedKey | None

    @classmethod
    def of(cls, unit: Sequence | Window) -> Window:
        return cls(*(getattr(unit, field.name) for field in fields(cls)))

    @property
    def size(self) -> int:
        """The number of rows of a window."""
        return self.burn_in + self.length + self.bootstrap

    @property
    def end_key(self) -> NestedKey | None:
        """The key of the flags that mark the ends of trajectories, or None. No window continues
        after a row whose flag is true."""
        return None if self.episode_boundary == "include_reset" else self.done_key

    def info(self, drawn: Drawn) -> dict[Any, torch.Tensor]:
        """Return the entries that TorchRL's ``Sequence`` adds to a batch, one value per row.

        In addition, ``"anchor_generation"`` is the generation of the row at ``"anchor_index"``."""
        step = torch.arange(self.size)
        learning = (step >= self.burn_in) & (step < self.burn_in + self.length)
        anchors = torch.empty(0, 3, dtype=torch.int64) if drawn.anchors is None else drawn.anchors
        return {
            "sequence_id": torch.arange(drawn.units).repeat_interleave(self.size),
            "step_in_sequence": step.repeat(drawn.units),
            "learning_mask": learning.repeat(drawn.units),
            "anchor_index": anchors[:, 0],
            "anchor_generation": anchors[:, 1],
            "validity_mask": anchors[:, 2] != 0,
        }


class Neighbours:
    """This process's record of which row follows which.

    Args:
        directory: a directory whose rows are numbered.
        end_key: the key of the flags that mark the ends of trajectories, or None. No row follows a
            row whose flag is true.

    Attributes:
        versions: int64 [capacity], the versions of the rows in this record.
        busy: true while a draw uses the record. If a signal handler, or code that runs after
            Ctrl-C, finds ``busy`` true, the record may be incomplete, and another record must be
            built.
    """

    def __init__(self, directory: ReplayDirectory, end_key: NestedKey | None) -> None:
        capacity = directory.capacity
        self.directory = directory
        self.busy = False
        self.versions = np.zeros(capacity, np.int64)
        self._column = column_of(directory, ORDER.key)
        self._ends = None if end_key is None else column_of(directory, end_key)
        self._numbers = np.zeros(capacity, np.int64)
        self._gone = np.zeros(capacity, bool)
        # the slots of the next and the previous row, or the slot itself if there is no such row
        self._after, self._before = np.arange(capacity), np.arange(capacity)
        # map the number of a row to its slot: _first has the rows without a previous row, and
        # _last has the rows without a next row
        self._first: dict[int, int] = {}
        self._last: dict[int, int] = {}

    def refresh(self) -> None:
        """Read the slots that have changed since the last call."""
        now = self.directory.versions
        changed = np.flatnonzero(now != self.versions)
        if not changed.size:
            return
        versions, numbers = now[changed], self._column[changed]
        ends = np.zeros(changed.size, bool) if self._ends is None else self._ends[changed] != 0
        settled = now[changed] == versions
        self._remove(changed[self._numbers[changed] != 0])
        self.versions[changed] = np.where(settled, versions, -1)  # -1: the next call reads the slot
        there = settled & (versions & 1 == 0) & (versions > 0) & (numbers != 0)
        self._insert(changed[there], numbers[there], ends[there])

    def _remove(self, slots: np.ndarray) -> None:
        self._gone[slots] = True
        for links, back, without, left in (
            (self._before, self._after, self._first, self._last),
            (self._after, self._before, self._last, self._first),
        ):
            near = links[slots]
            for number in self._numbers[slots[near == slots]].tolist():
                without.pop(number, None)
            near = near[~self._gone[near]]
            back[near] = near
            left.update(zip(self._numbers[near].tolist(), near.tolist(), strict=True))
        self._before[slots] = self._after[slots] = slots
        self._numbers[slots] = 0
        self._gone[slots] = False

    def _insert(self, slots: np.ndarray, numbers: np.ndarray, ends: np.ndarray) -> None:
        if not slots.size:
            return
        self._numbers[slots] = numbers
        order = np.argsort(numbers)
        slots, numbers, ends = slots[order], numbers[order], ends[order]
        follows = (numbers[1:] == numbers[:-1] + 1) & ~ends[:-1]
        self._link(slots[:-1][follows], slots[1:][follows])
        for at in np.flatnonzero(np.append(~follows, True) & ~ends).tolist():
            number, slot = int(numbers[at]), int(slots[at])
            after = self._first.pop(number + 1, None)
            if after is None:
                self._last[number] = slot
            else:
                self._link(slot, after)
        for at in np.flatnonzero(np.append(True, ~follows)).tolist():
            number, slot = int(numbers[at]), int(slots[at])
            before = self._last.pop(number - 1, None)
            if before is None:
                self._first[number] = slot
            else:
                self._link(before, slot)

    def _link(self, before: Any, after: Any) -> None:
        self._after[before] = after
        self._before[after] = before

    def _walk(
        self, links: np.ndarray, slots: np.ndarray, steps: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Follow links from each slot. Return the visited slots, int64 [steps + 1, n], and how many
        steps were possible, int64 [n]. A path that has reached its last row repeats the slot of
        this row."""
        path = np.empty((steps + 1, slots.size), np.int64)
        path[0] = slots
        for step in range(steps):
            links.take(path[step], out=path[step + 1], mode="clip")  # "clip" is faster than "raise"
        return path, np.count_nonzero(path[1:] != path[:-1], axis=0)

    def windows(self, window: Window, anchors: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the slots of the anchors' windows, int64 [n, size], and which rows are valid.

        The rows of each window are those that TorchRL's ``Sequence.expand`` (0.14.1) chooses."""
        shifts = window.episode_boundary == "stop"  # shift windows back to the trajectory's end
        ahead = window.dilation * (window.length + window.bootstrap - 1)
        back = window.dilation * window.burn_in + (ahead if shifts else 0)
        after, left = self._walk(self._after, anchors, ahead)
        before, began = self._walk(self._before, anchors, back)
        path = np.concatenate([before[:0:-1], after])  # the anchor is at position ``back``
        shift = np.minimum(ahead - left, began) if shifts else np.zeros_like(left)
        left, began = left + shift, began - shift
        offset = window.dilation * (np.arange(window.size) - window.burn_in)[:, None]
        valid = (offset <= left) & (offset >= -began)
        offset = np.maximum(np.minimum(offset, left), -began)
        places = path[back + offset - shift, np.arange(anchors.size)]
        return np.ascontiguousarray(places.T), valid.T


def read_windows(
    storage: SharedMemmapStorage,
    neighbours: Neighbours,
    window: Window,
    law: Draw,
    count: int,
    stored: bool,
) -> Drawn:
    """Copy the windows of ``count`` anchors that ``law`` draws. All copies are whole published
    rows.

    If a row of a window was rewritten during the copy, all windows are found and copied again.
    An anchor is drawn again only if the anchor itself was rewritten, so the anchors still follow
    ``law``.
    """
    directory = storage.directory
    drawn: list[np.ndarray] = []

    def anchors(count: int, locked: bool) -> None:
        """Draw anchors, unless they are already drawn, and refresh ``neighbours``. If the rows of
        some anchors were overwritten before the refresh, draw these anchors again, and repeat."""
        if not drawn:
            drawn[:] = law(count, locked)
        for attempt in itertools.count():
            neighbours.refresh()
            slots, versions, _ = drawn
            gone = np.flatnonzero(neighbours.versions[slots] != versions)
            if not gone.size:
                return
            if attempt == REDRAWS and not locked:
                with directory.lock():
                    anchors(count, True)
                return
            again = law(gone.size, locked)
            size = again[0].size
            for column, (old, new) in enumerate(zip(drawn, again, strict=True)):
                old[gone[:size]] = new
                drawn[column] = np.delete(old, gone[size:])

    def draw(count: int, locked: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        neighbours.busy = True
        anchors(count, locked)
        places, valid = neighbours.windows(window, drawn[0])
        slots = places.reshape(-1)
        versions = neighbours.versions[slots]
        neighbours.busy = False
        return slots, versions, valid

    slots, generation, valid, columns = storage.read_rows(draw, count, whole=True, stored=stored)
    found = Drawn.of(directory.rows, slots, generation, drawn[2], columns)
    found.lengths = torch.full((found.units,), window.size)
    rows = np.empty((*valid.shape, 3), np.int64)
    rows[..., 0] = drawn[0][:, None]
    rows[..., 1] = (drawn[1] >> 1)[:, None]
    rows[..., 2] = valid
    found.anchors = torch.from_numpy(rows.reshape(-1, 3))
    return found
