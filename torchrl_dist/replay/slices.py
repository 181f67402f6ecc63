"""Slices of trajectories out of a ring that many processes write."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tensordict import NestedKey, TensorDict, unravel_key
from torchrl.data.replay_buffers.samplers import SliceSampler
from torchrl.data.replay_buffers.storages import Storage

from torchrl_dist.errors import ConfigurationError
from torchrl_dist.replay.directory import ORDERED_LOADS, ReplayDirectory, Word
from torchrl_dist.replay.placement import slot_ranges
from torchrl_dist.replay.sampler import EMPTY, SharedSampler
from torchrl_dist.replay.storage import _REDRAWS, NoRowsError, SharedMemmapStorage

_USUAL_KEYS = (("collector", "traj_ids"), ("episode",))


@dataclass(frozen=True)
class _Runs:
    """Stretches of rows that are consecutive steps of one trajectory, at one moment.

    Attributes:
        state: what the directory counted then; other counts, other rows.
        boundaries: first position, last position, int64 [runs, 1], and length, int64 [runs].
        slots: the slot of each position, int64 [n]; None where they are the same.
    """

    state: tuple[int, ...]
    boundaries: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    slots: torch.Tensor | None = None


class _Columns:
    """This process's copy of versions and trajectory ids, brought up to date slot by slot.

    Args:
        directory: with rows.
        columns: numbers per slot in shared memory: trajectory ids, and steps if rows are to be
            ordered by them.
    """

    def __init__(self, directory: ReplayDirectory, columns: list[np.ndarray]) -> None:
        capacity = directory.capacity
        self.directory = directory
        self._columns = columns
        self.versions = np.zeros(capacity, dtype=np.int64)
        self._copies = [np.zeros(capacity, dtype=column.dtype) for column in columns]
        self._published = np.zeros(capacity, dtype=bool)
        # whether a row continues the one in the slot before, which of slot 0 is the last
        self._follows = np.zeros(capacity, dtype=bool)

    def refresh(self, cursor: int) -> None:
        """Read what changed.

        Args:
            cursor: the ticket counter, read under the lock: no reservation was half made then.
        """
        directory, capacity = self.directory, self.directory.capacity
        changed = np.flatnonzero(directory.versions != self.versions)
        versions = directory.versions[changed]
        for copy, column in zip(self._copies, self._columns, strict=True):
            copy[changed] = column[changed]
        settled = directory.versions[changed] == versions
        self.versions[changed] = np.where(settled, versions, -1)  # -1: look again
        self._published[changed] = settled & (versions & 1 == 0) & (versions > 0)
        # Old rows in slots that were reserved meanwhile may have been seen before that. Beside
        # new rows of the same trajectory they would look like its continuation.
        reserved = min(int(directory.words[Word.CURSOR]) - cursor, capacity)
        for start, stop in slot_ranges(cursor, reserved, capacity):
            self.versions[start:stop] = -1
            self._published[start:stop] = False
            changed = np.concatenate([changed, np.arange(start, stop)])
        touched = np.concatenate([changed, (changed + 1) % capacity])
        before = touched - 1  # of slot 0: the last one
        ids = self._copies[0]
        self._follows[touched] = (
            self._published[touched] & self._published[before] & (ids[touched] == ids[before])
        )

    def runs_by_position(self, state: tuple[int, ...], cursor: int) -> _Runs:
        """Runs of neighbouring slots; the oldest row of the ring, at the cursor, begins one."""
        newest_to_oldest = self._follows[cursor]
        self._follows[cursor] = False
        start = np.flatnonzero(self._published & ~self._follows)
        stop = np.flatnonzero(self._published & ~np.roll(self._follows, -1))
        self._follows[cursor] = newest_to_oldest
        if start.size and stop[0] < start[0]:  # runs over the end of the ring
            start = np.roll(start, 1)
        length = (stop - start) % self.directory.capacity + 1
        return _Runs(state, _as_boundaries(start, stop, length))

    def runs_by_step(self, state: tuple[int, ...], step_key: NestedKey) -> _Runs:
        """Runs of consecutive steps of a trajectory, wherever they lie."""
        slots = np.flatnonzero(self._published)
        ids, steps = (copy[slots] for copy in self._copies)
        order = np.lexsort((steps, ids))
        slots, ids, steps = slots[order], ids[order], steps[order]
        same = ids[1:] == ids[:-1]
        twice = np.flatnonzero(same & (steps[1:] == steps[:-1]))
        if twice.size:
            at = int(twice[0])
            raise ConfigurationError(
                f"slots {slots[at]} and {slots[at + 1]} both hold step {steps[at]} ({step_key!r}) "
                f"of trajectory {ids[at]}: trajectory ids must be unique in the job"
            )
        first = np.ones(slots.size, dtype=bool)
        first[1:] = ~(same & (steps[1:] == steps[:-1] + 1))
        start = np.flatnonzero(first)
        stop = np.append(start[1:], slots.size)[: start.size] - 1
        return _Runs(state, _as_boundaries(start, stop, stop - start + 1), torch.from_numpy(slots))


def _as_boundaries(
    start: np.ndarray, stop: np.ndarray, length: np.ndarray
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    first, last, count = map(torch.from_numpy, (start, stop, length))
    return first[:, None], last[:, None], count


class _View:
    """What ``SliceSampler`` asks of a storage (seen in torchrl 0.14.1), answered from the runs."""

    ndim = 1

    def __init__(self, storage: SharedMemmapStorage, runs: _Runs) -> None:
        self._storage = storage
        self._slots = runs.slots
        self.boundaries = runs.boundaries
        self.shape = torch.Size([storage.max_size if runs.slots is None else len(runs.slots)])
        self.slots: torch.Tensor = torch.empty(0, dtype=torch.int64)
        self.leaves: list[torch.Tensor] = []

    def __len__(self) -> int:
        return len(self.boundaries[0])

    def __getitem__(self, positions: tuple[torch.Tensor, ...]) -> TensorDict:
        """The rows of a draw; they are copied once and kept for the buffer."""
        self.slots = positions[0] if self._slots is None else self._slots[positions[0]]
        self.leaves = self._storage.copy_rows(self.slots.numpy())
        return self._storage.as_rows(self.leaves, raw=True)  # not known to be whole yet


class SharedSliceSampler(SharedSampler, SliceSampler):
    """TorchRL's ``SliceSampler`` over rows that many processes write.

    Takes the place of ``SliceSampler(traj_key=..., ...)`` and means the same by its arguments. It
    sees the trajectories of every process, and a slice holds whole rows, one after the other, of
    one trajectory: it does not run over rows that are being written, nor from the newest row of
    the ring to the oldest. Trajectory ids must be unique in the job (as those of
    ``RPCBatchedCollector`` are): equal ids of two writers look like one trajectory.

    Writers that extend by turns cut each other's trajectories into short stretches of
    neighbouring rows. Either extend whole trajectories, or number the steps and pass
    ``fragmented=True``: then slices follow ``step_key`` wherever the rows lie.

    A draw after a write looks through the versions of the whole ring, as TorchRL's looks through
    its trajectory ids; ``fragmented`` sorts all rows by trajectory and step.

    Args:
        num_slices, slice_len: exactly one of them; see ``SliceSampler``.
        traj_key: integer or float, one per row. Default: ``("collector", "traj_ids")`` or
            ``"episode"``, whichever the rows have.
        step_key: integer, one per row; used with ``fragmented`` only.
        end_key, end_keys: accepted beside ``traj_key``, not used.
        fragmented, truncated_key, init_key, strict_length, pad_output, span: as in
            ``SliceSampler``.

    Raises:
        ConfigurationError: for what cannot be right over a shared buffer: trajectories told apart
            by ``end_key`` alone (the next row may be another process's), ``cache_values``,
            ``ends``, ``trajectories``, ``compile`` and ``use_gpu``; rows without the keys.
        RuntimeError: from ``sample``, if there is no row and none is being written, or no run that
            is long enough.
    """

    def __init__(
        self,
        *,
        traj_key: NestedKey | None = None,
        end_key: NestedKey | None = None,
        end_keys: Sequence[NestedKey] | None = None,
        step_key: NestedKey = "step_count",
        fragmented: bool = False,
        **options: Any,
    ) -> None:
        for name in ("cache_values", "ends", "trajectories", "compile", "use_gpu"):
            given = options.pop(name, None)
            if given is not None and given is not False:
                raise ConfigurationError(
                    f"{type(self).__name__} does not support {name}={given!r}: other processes "
                    "change the rows between two samples; leave it out"
                )
        if traj_key is None and (end_key is not None or end_keys is not None):
            raise ConfigurationError(
                f"{type(self).__name__} needs a traj_key: after a row without an end flag the next "
                "one may be another process's; store a trajectory id per row, unique in the job"
            )
        super().__init__(traj_key=traj_key, **options)
        self.step_key = step_key
        self._by_step = fragmented
        self._setup()

    def _setup(self) -> None:
        super()._setup()
        self._columns: _Columns | None = None
        self._runs: _Runs | None = None
        self._own_rng: torch.Generator | None = None
        self._given_rng: torch.Generator | None = None

    @property
    def _rng(self) -> torch.Generator:
        """TorchRL's draws take their randomness from here."""
        if self._given_rng is not None:
            return self._given_rng
        if self._own_rng is None or self._random_pid != os.getpid():
            self._own_rng, self._random_pid = torch.Generator(), os.getpid()
            self._own_rng.seed()
        return self._own_rng

    @_rng.setter
    def _rng(self, generator: torch.Generator | None) -> None:
        self._given_rng = generator

    def sample(
        self, storage: Storage, batch_size: int
    ) -> tuple[tuple[torch.Tensor, ...], dict[NestedKey, torch.Tensor]]:
        """Returns the slots, int64 [batch_size] in a tuple of one, and the flags of the slices."""
        gate = self.attach(storage).gate
        assert isinstance(storage, SharedMemmapStorage)

        def draw() -> tuple[tuple[torch.Tensor, ...], dict[NestedKey, torch.Tensor]]:
            return storage.once_rows_are_published(lambda: self._sample(storage, batch_size))

        return draw() if gate is None else gate.draw(batch_size, draw, storage)

    def attach(self, storage: Storage) -> ReplayDirectory:
        directory = super().attach(storage)
        if directory.draws is not None:
            self._directory = None
            raise ConfigurationError(
                f"{type(self).__name__} takes rows as they lie in their trajectories, whatever "
                "their counts: use a limiter without max_times_sampled"
            )
        return directory

    def _sample(
        self, storage: SharedMemmapStorage, batch_size: int
    ) -> tuple[tuple[torch.Tensor, ...], dict[NestedKey, torch.Tensor]]:
        directory = storage.directory
        if ORDERED_LOADS:
            for attempt in range(_REDRAWS):
                try:
                    drawn = self._draw(storage, batch_size, fresh=attempt > 0, locked=False)
                except RuntimeError:
                    break  # too few rows, perhaps for this moment only
                if drawn is not None:
                    return drawn
            directory.count(Word.LOCKED_READS)
        with directory.lock():
            drawn = self._draw(storage, batch_size, fresh=True, locked=True)
        assert drawn is not None, "rows changed under the lock"
        return drawn

    def can_sample(self, storage: Storage, batch_size: int) -> bool:
        """Whether a run is long enough."""
        directory = self.attach(storage)
        assert isinstance(storage, SharedMemmapStorage)
        if not super().can_sample(storage, batch_size):
            return False
        with nullcontext() if ORDERED_LOADS else directory.lock():
            runs = self._read_runs(directory, fresh=False, locked=not ORDERED_LOADS)
        view = _View(storage, runs)
        return SliceSampler.can_sample(self, view, batch_size)

    def _draw(
        self, storage: SharedMemmapStorage, batch_size: int, *, fresh: bool, locked: bool
    ) -> tuple[tuple[torch.Tensor, ...], dict[NestedKey, torch.Tensor]] | None:
        """One batch, or None if one of its rows was rewritten before it was copied."""
        directory = storage.directory
        view = _View(storage, self._read_runs(directory, fresh=fresh, locked=locked))
        if not len(view):
            raise NoRowsError(EMPTY)
        _, info = super().sample(view, batch_size)
        slots = view.slots.numpy()
        assert self._columns is not None
        versions = self._columns.versions[slots]
        changed = np.count_nonzero(directory.versions[slots] != versions)
        if changed:
            directory.count(Word.REREAD_ROWS, changed)
            return None
        storage.hand_over(view.slots, torch.from_numpy(versions // 2), view.leaves)
        return (view.slots,), info

    def _get_stop_and_length(
        self, storage: _View, fallback: bool = True
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Where TorchRL's ``SliceSampler`` gets its trajectories from."""
        return storage.boundaries

    def _read_runs(self, directory: ReplayDirectory, *, fresh: bool, locked: bool) -> _Runs:
        words = directory.words
        with nullcontext() if locked else directory.lock():
            ticket = int(words[Word.CURSOR])
            state = (ticket, *(int(words[w]) for w in (Word.WRITE_COUNT, Word.LENGTH, Word.BASE)))
        if self._runs is not None and self._runs.state == state and not fresh:
            return self._runs
        if self._columns is None or self._columns.directory is not directory:
            keys = [self._key_of_trajectory(directory)] + [self.step_key] * self._by_step
            self._columns = _Columns(directory, [_column(directory, key) for key in keys])
        self._columns.refresh(ticket)
        if self._by_step:
            self._runs = self._columns.runs_by_step(state, self.step_key)
        else:
            self._runs = self._columns.runs_by_position(state, ticket % directory.capacity)
        return self._runs

    def _key_of_trajectory(self, directory: ReplayDirectory) -> NestedKey:
        if self.traj_key is None:
            stored = {leaf.key for leaf in directory.rows.leaves} if directory.rows else set()
            if not stored:
                raise RuntimeError(EMPTY)
            found = next((key for key in _USUAL_KEYS if key in stored), None)
            if found is None:
                raise ConfigurationError(
                    f"the rows have no trajectory id under {' or '.join(map(str, _USUAL_KEYS))}; "
                    "pass traj_key="
                )
            self.traj_key = unravel_key(found)
        return self.traj_key

    def __repr__(self) -> str:
        return super().__repr__().replace("fragmented=False", f"fragmented={self._by_step}")

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        for name in ("_columns", "_runs", "_own_rng", "_given_rng"):
            state.pop(name, None)
        return state


def _column(directory: ReplayDirectory, key: NestedKey) -> np.ndarray:
    """One number per slot, in shared memory."""
    if directory.rows is None:
        raise RuntimeError(EMPTY)
    name = unravel_key(key)
    path = (name,) if isinstance(name, str) else name
    for leaf, tensor in zip(directory.rows.leaves, directory.tensors, strict=True):
        if leaf.key == path:
            if tensor.numel() != directory.capacity:
                raise ConfigurationError(
                    f"{key!r} has shape {list(leaf.shape)} per row, expected one number"
                )
            return tensor.reshape(-1).numpy()
    raise ConfigurationError(
        f"the rows have no {key!r}, only {[leaf.key for leaf in directory.rows.leaves]}"
    )
