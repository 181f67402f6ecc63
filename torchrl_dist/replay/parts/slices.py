"""Draw slices of trajectories from a ring that many processes write."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from tensordict import NestedKey, TensorDictBase, unravel_key
from torchrl.data.replay_buffers.samplers import PrioritizedSliceSampler, SliceSampler
from torchrl.data.replay_buffers.storages import Storage

from torchrl_dist.errors import ConfigurationError
from torchrl_dist.replay.law.placement import slot_ranges
from torchrl_dist.replay.node.directory import ReplayDirectory
from torchrl_dist.replay.node.patches import NoColumnError, column_of
from torchrl_dist.replay.node.tables import ORDERED_LOADS, Word
from torchrl_dist.replay.parts.drawn import Drawn
from torchrl_dist.replay.parts.sampler import (
    EMPTY,
    SharedPrioritizedSampler,
    SharedSampler,
)
from torchrl_dist.replay.parts.storage import REDRAWS, NoRowsError, SharedMemmapStorage
from torchrl_dist.replay.row import rows
from torchrl_dist.replay.row.numbers import TRAJECTORY_KEYS
from torchrl_dist.replay.row.spec import STREAM


@dataclass(frozen=True)
class _Runs:
    """Runs of rows that are consecutive steps of one trajectory, at one moment.

    Attributes:
        state: the directory's counters at that moment. If the counters differ now, the rows have
            changed.
        boundaries: first and last position of each run, int64 [runs, 1], and the run's length,
            int64 [runs].
        slots: the slot of each position, int64 [n]; None if slots and positions are equal.
    """

    state: tuple[int, ...]
    boundaries: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    slots: torch.Tensor | None = None

    def remaining(self, capacity: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return three arrays of shape [capacity] (int64, int64 and bool), with one entry per slot.

        For each slot, the arrays hold the number of rows from this slot to the end of its run (0 if
        the slot has no row), the position of the slot's row, and whether this row is the first of
        its run."""
        start, length = self.boundaries[0][:, 0].numpy(), self.boundaries[2].numpy()
        begin = np.cumsum(length) - length
        offset = np.arange(length.sum()) - np.repeat(begin, length)
        position = np.repeat(start, length) + offset
        if self.slots is None:
            position %= capacity
            slots = position
        else:
            slots = self.slots.numpy()[position]
        left, where = np.zeros(capacity, np.int64), np.zeros(capacity, np.int64)
        first = np.zeros(capacity, dtype=bool)
        left[slots], where[slots] = np.repeat(length, length) - offset, position
        first[slots[begin]] = True
        return left, where, first


class NoSlicesError(RuntimeError):
    """No run of rows is long enough for a slice."""

    @classmethod
    def of(cls, length: int) -> NoSlicesError:
        return cls(
            f"Did not find {length} consecutive rows of one trajectory for a slice; pass "
            "strict_length=False, or a smaller slice_len, to sample shorter slices"
        )


class _Columns:
    """This process's copy of versions and trajectory ids. Only changed slots are read again.

    Args:
        directory: a directory that has rows.
        columns: arrays in shared memory, one number per slot. The first array has trajectory ids
            or, with ``ends``, numbers of rows (see ``row.numbers``). If rows are ordered by step,
            or if neighbours must be consecutive steps, a second array has the steps.
        ends: flags per slot. After a row whose flag is true, another trajectory begins.
    """

    def __init__(
        self,
        directory: ReplayDirectory,
        columns: list[np.ndarray],
        ends: Sequence[np.ndarray] | None = None,
    ) -> None:
        capacity = directory.capacity
        self.directory = directory
        self._columns = columns
        self._end_columns = ends
        self._ends = np.zeros(capacity, dtype=bool)
        self.versions = np.zeros(capacity, dtype=np.int64)
        self._copies = [np.zeros(capacity, dtype=column.dtype) for column in columns]
        self._published = np.zeros(capacity, dtype=bool)
        # whether each slot's row continues the trajectory of the row in the previous slot. Slot 0
        # follows the last slot.
        self._follows = np.zeros(capacity, dtype=bool)

    def refresh(self, cursor: int) -> None:
        """Read the slots that have changed.

        Args:
            cursor: the next ticket. It was read under the lock, so no reservation was incomplete.
        """
        directory, capacity = self.directory, self.directory.capacity
        changed = np.flatnonzero(directory.versions != self.versions)
        versions = directory.versions[changed]
        for copy, column in zip(self._copies, self._columns, strict=True):
            copy[changed] = column[changed]
        if self._end_columns is not None:
            self._ends[changed] = np.any([column[changed] for column in self._end_columns], 0)
        settled = directory.versions[changed] == versions
        self.versions[changed] = np.where(settled, versions, -1)  # -1: the next call reads the slot
        self._published[changed] = settled & (versions & 1 == 0) & (versions > 0)
        # Drop slots that were reserved since ``cursor`` was read. Otherwise their old rows could
        # look consecutive with new rows of the same trajectory.
        reserved = min(int(directory.words[Word.CURSOR]) - cursor, capacity)
        for start, stop in slot_ranges(cursor, reserved, capacity):
            self.versions[start:stop] = -1
            self._published[start:stop] = False
            changed = np.concatenate([changed, np.arange(start, stop)])
        touched = np.concatenate([changed, (changed + 1) % capacity])
        before = touched - 1  # for slot 0, this is the last slot
        ids = self._copies[0]
        numbered = self._end_columns is not None
        self._follows[touched] = (
            self._published[touched]
            & self._published[before]
            & (ids[touched] == (ids[before] + 1 if numbered else ids[before]))
        )
        if len(self._copies) > 1:
            steps = self._copies[1]
            self._follows[touched] &= steps[touched] == steps[before] + 1
        if self._end_columns is not None:  # the number 0 means that the row's place is unknown
            self._follows[touched] &= (ids[before] != 0) & ~self._ends[before]

    def runs_by_position(self, state: tuple[int, ...], cursor: int) -> _Runs:
        """Return runs of neighbouring slots. The oldest row of the ring always begins a run."""
        newest_to_oldest = self._follows[cursor]
        self._follows[cursor] = False
        start = np.flatnonzero(self._published & ~self._follows)
        stop = np.flatnonzero(self._published & ~np.roll(self._follows, -1))
        self._follows[cursor] = newest_to_oldest
        if start.size and stop[0] < start[0]:  # a run crosses the end of the ring
            start = np.roll(start, 1)
        length = (stop - start) % self.directory.capacity + 1
        return _Runs(state, _as_boundaries(start, stop, length))

    def runs_by_step(self, state: tuple[int, ...], step_key: NestedKey) -> _Runs:
        """Return runs of consecutive steps of a trajectory. The steps may be in any slots."""
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
                f"of trajectory {ids[at]}; give every trajectory of the job its own id"
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
    """Takes the place of the storage in ``SliceSampler`` (torchrl 0.14.1), and presents each run as
    a trajectory."""

    ndim = 1

    def __init__(self, capacity: int, runs: _Runs) -> None:
        self.slots = runs.slots
        self.boundaries = runs.boundaries
        self.shape = torch.Size([capacity if runs.slots is None else len(runs.slots)])

    def __len__(self) -> int:
        return len(self.boundaries[0])


class _Rows:
    """Takes the place of the storage when ``SliceSampler`` reads the flags of drawn rows."""

    def __init__(self, rows: TensorDictBase) -> None:
        self._rows = rows

    def __getitem__(self, index: Any) -> TensorDictBase:
        return self._rows


@dataclass(frozen=True)
class _Slices:
    """Chosen slices.

    Attributes:
        shape: ``num_slices``, ``seq_length``, ``target_seq_length`` and ``mask_flat`` of
            ``SliceSampler._finalize_index``.
        leaf: float64 [num_slices], ``(priority + eps) ** alpha`` of the first row of each slice; 1
            in uniform sampling.
        minimum: the smallest leaf in the directory.
        mass: the mass of all possible slices, if requested.
    """

    shape: dict[str, Any]
    leaf: np.ndarray
    minimum: float = 1.0
    mass: float = 0.0

    @property
    def lengths(self) -> torch.Tensor:
        """The number of rows of each slice, int64 [num_slices]."""
        length = self.shape["target_seq_length"] or self.shape["seq_length"]
        if isinstance(length, torch.Tensor):
            return length
        return torch.full((self.shape["num_slices"],), length)


class SharedSliceSampler(SharedSampler, SliceSampler):
    """TorchRL's ``SliceSampler`` over rows that many processes write.

    It replaces ``SliceSampler(traj_key=..., ...)``, and its arguments have the same meaning. It
    draws from the trajectories of all processes. A slice has consecutive, whole rows of one
    trajectory. A slice never includes rows that are being written, and never continues from the
    newest row of the buffer to the oldest. Trajectory ids must be unique in the job, because rows
    of two writers with the same id look like one trajectory. The ids of ``RPCBatchedCollector`` are
    unique.

    If several writers take turns, only short runs of a trajectory's rows are in neighbouring slots.
    Therefore either extend whole trajectories, or number the steps and pass ``fragmented=True``.
    With ``fragmented=True``, a slice follows the values of ``step_key``, regardless of the slots of
    its rows.

    The first draw after a write scans the versions of all slots. TorchRL's sampler likewise scans
    the trajectory ids of all slots. With ``fragmented``, the first draw also sorts all rows by
    trajectory and step.

    Args:
        num_slices, slice_len: pass exactly one of them, as for ``SliceSampler``.
        traj_key: key of the trajectory ids, an integer or float per row. Default: ``("collector",
            "traj_ids")`` or ``"episode"``, whichever the rows have.
        step_key: key of the steps, an integer per row. It is used only with ``fragmented``.
        end_key, end_keys: key or keys of flags, one per row, for rows without a trajectory id.
            After a row whose flag is true, another trajectory begins. With ``traj_key``, flags are
            ignored. With flags, a slice consists of rows that one thread of one process wrote
            consecutively, so each ``extend`` must hold consecutive steps. Use this sampler in the
            buffers of all processes, even of processes that only write, because from the first row
            on, each row must record which thread wrote it. Rows that came by RPC never follow each
            other in a slice.
        cache_values: has no effect. Trajectories are looked up again when rows have changed.
        fragmented, truncated_key, init_key, strict_length, pad_output, span: as in
            ``SliceSampler``.

    Raises:
        ConfigurationError: an argument cannot work over a shared buffer (``ends``,
            ``trajectories``, ``compile`` and ``use_gpu``), ``fragmented`` is used without
            trajectory ids, the rows do not have the keys, or rows were written before the first
            sampler with ``end_key`` was built.
        RuntimeError: from ``sample``, if there is no row and no process is writing one, or if no
            trajectory has enough consecutive rows.

    Example:
        >>> storage = SharedMemmapStorage(100, scratch_dir="/dev/shm/example")
        >>> sampler = SharedSliceSampler(slice_len=3, traj_key="episode")
        >>> buffer = SharedReplayBuffer(storage=storage, sampler=sampler, batch_size=6)
        >>> episode, step = torch.arange(4).repeat_interleave(5), torch.arange(5).repeat(4)
        >>> rows = {"episode": episode, "step": step}
        >>> slots = buffer.extend(TensorDict(rows, [20]))
        >>> buffer.sample()["step"].reshape(2, 3).diff()
        tensor([[1, 1],
                [1, 1]])
    """

    _knows_rows = True
    _not_copied = (*SharedSampler._not_copied, "_columns", "_runs", "_own_rng", "_given_rng")
    _no_counts = "draws the rows of a slice regardless of how often they were sampled"
    _no_windows = "draws slices, not rows"

    consecutive = False
    """Whether neighbouring rows of a slice must be consecutive steps. True over several shards,
    because the steps between two neighbours may be in another shard."""

    # TorchRL's class sets these attributes
    slice_len: int | None
    traj_key: NestedKey | None
    span: tuple[bool | int, bool | int]

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
        options.pop("cache_values", None)  # no effect: results are kept until the rows change
        for name in ("ends", "trajectories", "compile", "use_gpu"):
            given = options.pop(name, None)
            if given is not None and given is not False:
                raise ConfigurationError(
                    f"{type(self).__name__} does not support {name}={given!r}, because other "
                    "processes change the rows between two samples; leave this argument out"
                )
        self._by_end = traj_key is None and (end_key is not None or end_keys is not None)
        if self._by_end and fragmented:
            raise ConfigurationError(
                "fragmented=True needs traj_key=, because flags at the ends of trajectories do "
                "not say to which trajectory a row belongs if trajectories are interleaved; pass "
                "traj_key=, or leave fragmented= out"
            )
        if self._by_end:
            options |= {"end_key": end_key, "end_keys": end_keys}
        SliceSampler.__init__(self, traj_key=traj_key, **options)
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
        """The generator of TorchRL's draws."""
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
        """Return the slots, a tuple of one tensor, int64 [batch_size], and the flags of the
        slices."""
        drawn = self._next(storage, batch_size)
        return (drawn.index,), self._info(drawn)

    def _info(self, drawn: Drawn) -> dict[Any, torch.Tensor]:
        """Return the entries that TorchRL's sampler adds to a batch. They depend on the number of
        slots, not on which slots these are."""
        count = drawn.index.numel()
        if drawn.shape is None:  # an empty batch over hosts
            return {}
        found = _Rows(rows.build(drawn.tensors, drawn.spec, (count,), raw=True))
        index = torch.empty(count, 1, dtype=torch.int64)
        return SliceSampler._finalize_index(self, index=index, storage=found, **drawn.shape)[1]

    def draw(
        self, storage: Storage, count: int, with_mass: bool = False, *, stored: bool = False
    ) -> Drawn:
        """Draw slices with ``count`` rows in total. All these rows were in the buffer at the same
        moment."""
        directory, fresh = self.attach(storage), False
        assert isinstance(storage, SharedMemmapStorage)
        if not (self._by_end or self._by_step):
            storage.check_order("slices by traj_key without fragmented=True")

        def draw(count: int, locked: bool) -> tuple[np.ndarray, np.ndarray, _Slices]:
            nonlocal fresh
            try:
                runs = self._read_runs(directory, fresh=fresh, locked=locked)
                fresh = True
                with nullcontext() if locked else self._lock_of(directory):
                    slots, slices = self._choose(directory, runs, count, with_mass)
            except NoRowsError:
                raise
            except RuntimeError:  # too few rows, but perhaps only at this moment
                if locked:
                    raise
                with directory.lock():
                    return draw(count, True)
            assert self._columns is not None
            return slots, self._columns.versions[slots], slices

        slots, generation, slices, columns = storage.once_rows_are_published(
            lambda: storage.read_rows(draw, count, whole=True, stored=stored)
        )
        facts = slices.leaf, columns, slices.minimum, slices.mass, slices.lengths, slices.shape
        return Drawn.of(directory.rows, slots, generation, *facts)

    def _lock_of(self, directory: ReplayDirectory) -> Any:
        """Return the lock that must be held while slices are chosen."""
        return nullcontext()

    def draw_slices(
        self, storage: Storage, count: int, *, stored: bool = False
    ) -> tuple[Drawn | None, float, float]:
        """Draw ``count`` slices of ``slice_len`` rows for a host. If ``count`` is 0, or no run is
        long enough, return None instead of slices.

        Also return the total mass of all possible slices, and the smallest leaf of any row."""
        directory = self.attach(storage)
        assert self.slice_len is not None
        if count and directory.length:
            with suppress(NoRowsError, NoSlicesError):
                drawn = self.draw(storage, count * self.slice_len, with_mass=True, stored=stored)
                return drawn, drawn.mass, drawn.minimum
        if not directory.length:
            return None, 0.0, math.inf
        with directory.lock():
            runs = self._read_runs(directory, fresh=False, locked=True)
            return None, *self._mass(directory, runs, self.slice_len)

    def _check_order(self, storage: SharedMemmapStorage) -> None:
        storage.check_order("slices")

    def _bind(self, storage: SharedMemmapStorage, directory: ReplayDirectory) -> None:
        super()._bind(storage, directory)
        if self._by_end:
            directory.ask_for_numbers(STREAM)

    def can_sample(self, storage: Storage, batch_size: int) -> bool:
        """Return whether a run is long enough for a slice."""
        directory = self.attach(storage)
        assert isinstance(storage, SharedMemmapStorage)
        if not super().can_sample(storage, batch_size):
            return False
        with nullcontext() if ORDERED_LOADS else directory.lock():
            runs = self._read_runs(directory, fresh=False, locked=not ORDERED_LOADS)
        return SliceSampler.can_sample(self, _View(directory.capacity, runs), batch_size)

    def _choose(
        self, directory: ReplayDirectory, runs: _Runs, batch_size: int, with_mass: bool
    ) -> tuple[np.ndarray, _Slices]:
        """Return the slots of a batch, int64 [n]. TorchRL's method draws these slots."""
        view = _View(directory.capacity, runs)
        if not len(view):
            raise NoRowsError(EMPTY)
        if not with_mass:
            try:
                return SliceSampler.sample(self, view, batch_size)
            except RuntimeError as error:
                length, _ = self._adjusted_batch_size(batch_size)
                if self._mass(directory, runs, length)[0]:
                    raise
                raise NoSlicesError(*error.args) from None
        length, _ = self._adjusted_batch_size(batch_size)
        mass, minimum = self._mass(directory, runs, length)
        if not mass:
            raise NoSlicesError.of(length)
        slots, slices = SliceSampler.sample(self, view, batch_size)
        return slots, replace(slices, mass=mass, minimum=minimum)

    def _mass(self, directory: ReplayDirectory, runs: _Runs, length: int) -> tuple[float, float]:
        """Return the total mass of all possible slices, and the smallest leaf of any row.

        In TorchRL's law, all runs have the same probability, and all slices of a run have the same
        probability. Called under the lock."""
        lengths = runs.boundaries[2]
        return float((lengths >= length).sum() if self.strict_length else len(lengths)), 1.0

    def _finalize_index(self, *, index: torch.Tensor, storage: _View, **shape: Any) -> Any:
        """Defer the last step of TorchRL's draw until the rows have been copied, because this step
        reads the rows."""
        positions = index[:, 0]
        slots = positions if storage.slots is None else storage.slots[positions]
        return slots.numpy(), _Slices(shape, np.ones(shape["num_slices"]))

    def _get_stop_and_length(
        self, storage: _View, fallback: bool = True
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the trajectories for TorchRL's ``SliceSampler``."""
        return storage.boundaries

    def _read_runs(self, directory: ReplayDirectory, *, fresh: bool, locked: bool) -> _Runs:
        words = directory.words
        with nullcontext() if locked else directory.lock():
            ticket = int(words[Word.CURSOR])
            state = (ticket, *(int(words[w]) for w in (Word.WRITE_COUNT, Word.LENGTH, Word.BASE)))
        if self._runs is not None and self._runs.state == state and not fresh:
            return self._runs
        if self._columns is None or self._columns.directory is not directory:
            if directory.rows is None:
                raise RuntimeError(EMPTY)
            if self._by_end:
                stream = column_of(directory, STREAM.key, locked=locked)
                self._columns = _Columns(directory, [stream], self._end_flags(directory, locked))
            else:
                columns = [column_of(directory, self._key_of_trajectory(directory), locked=locked)]
                if self._by_step or self.consecutive:
                    columns.append(column_of(directory, self.step_key, locked=locked))
                self._columns = _Columns(directory, columns)
        self._columns.refresh(ticket)
        if self._by_step:
            self._runs = self._columns.runs_by_step(state, self.step_key)
        else:
            self._runs = self._columns.runs_by_position(state, ticket % directory.capacity)
        return self._runs

    def _end_flags(self, directory: ReplayDirectory, locked: bool) -> list[np.ndarray]:
        if self.end_keys is None:
            return [column_of(directory, self.end_key, locked=locked)]
        found = []
        for key in self.end_keys:  # as in TorchRL, one of the keys suffices
            with suppress(NoColumnError):
                found.append(column_of(directory, key, locked=locked))
        return found or [column_of(directory, self.end_keys[0], locked=locked)]

    def _key_of_trajectory(self, directory: ReplayDirectory) -> NestedKey:
        if self.traj_key is None:
            stored = {column.key for column in directory.rows.columns} if directory.rows else set()
            if not stored:
                raise RuntimeError(EMPTY)
            found = next((key for key in TRAJECTORY_KEYS if key in stored), None)
            if found is None:
                raise ConfigurationError(
                    f"the rows have no trajectory id under "
                    f"{' or '.join(map(str, TRAJECTORY_KEYS))}; "
                    "pass traj_key=, or end_key= in the buffers of all processes"
                )
            self.traj_key = unravel_key(found)
        return self.traj_key

    def __repr__(self) -> str:
        return super().__repr__().replace("fragmented=False", f"fragmented={self._by_step}")


class SharedPrioritizedSliceSampler(
    SharedSliceSampler, SharedPrioritizedSampler, PrioritizedSliceSampler
):
    """TorchRL's ``PrioritizedSliceSampler`` over rows that many processes write.

    It replaces ``PrioritizedSliceSampler(capacity, alpha, beta, ...)``. The first row ``i`` of a
    slice is drawn with probability ``p_i / sum(p)`` over the rows that may begin a slice. Here
    ``p_i = (priority_i + eps) ** alpha`` comes from the tree that all processes share. All rows of
    the slice have the weight ``(p_i / min(p)) ** -beta``, with the minimum over all rows of the
    buffer. A *run* consists of consecutive rows of one trajectory, see :class:`SharedSliceSampler`.
    A row may begin a slice if its run has ``slice_len`` rows from that row on. With a ``span`` to
    the right, fewer rows suffice. With ``strict_length=False``, the first row of a run may always
    begin a slice. ``fragmented=True`` also works.

    Only the priority of a slice's first row counts in the draw, so the other rows of the slice may
    have low priorities. Priorities for overwritten rows are dropped, as in
    :class:`SharedPrioritizedSampler`.

    Example:
        >>> sampler = SharedPrioritizedSliceSampler(
        ...     1_000_000, alpha=0.6, beta=0.4, slice_len=8, traj_key="episode"
        ... )

    Args:
        max_capacity, alpha, beta, eps, dtype, reduction, max_priority_within_buffer: as in
            :class:`SharedPrioritizedSampler`.
        options: those of :class:`SharedSliceSampler` except ``pad_output``. A ``span`` to the left
            is turned off with a warning, as in TorchRL's class.

    Raises:
        ConfigurationError: as in :class:`SharedPrioritizedSampler` and :class:`SharedSliceSampler`.
        RuntimeError: from ``sample``, as in :class:`SharedSliceSampler`.
    """

    _not_copied = (*SharedSliceSampler._not_copied, "_starts")

    def __init__(
        self,
        max_capacity: int,
        alpha: float,
        beta: float,
        eps: float = 1e-8,
        dtype: torch.dtype = torch.float,
        reduction: str = "max",
        *,
        max_priority_within_buffer: bool = False,
        **options: Any,
    ) -> None:
        if options.get("pad_output"):
            raise ConfigurationError(
                f"{type(self).__name__} does not pad slices; leave pad_output out, and split the "
                "batch by its truncated flags"
            )
        SharedSliceSampler.__init__(self, **options)
        SharedPrioritizedSampler.__init__(
            self, max_capacity, alpha, beta, eps, dtype, reduction, max_priority_within_buffer
        )
        if self.span[0]:
            warnings.warn(
                f"{type(self).__name__} draws the first row of each slice, so it turns off "
                "the span to the left; pass span=(False, ...)",
                stacklevel=2,
            )
            self.span = (False, self.span[1])

    def _setup(self) -> None:
        super()._setup()
        self._starts: tuple[_Runs, int, tuple[np.ndarray, np.ndarray, np.ndarray]] | None = None

    def _info(self, drawn: Drawn) -> dict[Any, torch.Tensor]:
        return super()._info(drawn) | SharedPrioritizedSampler._info(self, drawn)

    def _lock_of(self, directory: ReplayDirectory) -> Any:
        return directory.lock()

    def _choose(
        self, directory: ReplayDirectory, runs: _Runs, batch_size: int, with_mass: bool
    ) -> tuple[np.ndarray, _Slices]:
        length, count = self._adjusted_batch_size(batch_size)
        starts, leaves, minimum = self._draw_starts(directory, runs, length, count)
        left, position, _ = self._may_start(directory, runs, length)[1]
        # a slice that reaches the end of its run is cut off there
        lengths = np.minimum(left[starts], length)
        within = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        index = np.repeat(position[starts], lengths) + within
        if runs.slots is None:
            slots = index % directory.capacity
        else:
            slots = runs.slots.numpy()[index]
        shape = shape_of(torch.from_numpy(lengths), length)
        mass = self._mass(directory, runs, length)[0] if with_mass else 0.0
        return slots, _Slices(shape, leaves, minimum, mass)

    def _mass(self, directory: ReplayDirectory, runs: _Runs, length: int) -> tuple[float, float]:
        tree = directory.tree
        tree.refresh()
        allowed, _ = self._may_start(directory, runs, length)
        return float(tree.leaves[allowed].sum()), tree.minimum

    def _may_start(
        self, directory: ReplayDirectory, runs: _Runs, length: int
    ) -> tuple[np.ndarray, tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Return which slots may begin a slice, bool [capacity], and ``runs.remaining``."""
        if self._starts is None or self._starts[0] is not runs:
            self._starts = runs, length, runs.remaining(directory.capacity)
        left, _, first = self._starts[2]
        span = self.span[1]
        wanted = 2 if span is True else length - int(span)
        allowed = left >= max(1, wanted)
        return allowed if self.strict_length else allowed | first, self._starts[2]

    def _draw_starts(
        self, directory: ReplayDirectory, runs: _Runs, length: int, count: int
    ) -> tuple[np.ndarray, np.ndarray, float]:
        """Draw the first slots of slices, int64 [count]. Return these slots, their leaves, and the
        smallest leaf of a row.

        Called under the lock. If a drawn row cannot begin a slice, another row is drawn instead, so
        the slots are distributed as if the tree did not have the rows that cannot begin a slice.
        """
        tree = directory.tree
        tree.refresh()
        if not tree.total > 0:
            raise NoRowsError(EMPTY)
        allowed, _ = self._may_start(directory, runs, length)
        slots, leaves = np.empty(0, np.int64), np.empty(0)
        for _ in range(REDRAWS):
            drawn, masses = tree.draw(self._uniforms(2 * (count - slots.size)))
            kept = np.flatnonzero(allowed[drawn] & (masses > 0))[: count - slots.size]
            slots = np.concatenate([slots, drawn[kept]])
            leaves = np.concatenate([leaves, masses[kept]])
            if slots.size == count:
                return slots, leaves, tree.minimum
        running = np.cumsum(np.where(allowed, tree.leaves, 0.0))
        if not running[-1] > 0:
            raise NoSlicesError.of(length)
        more = np.searchsorted(running, self._uniforms(count - slots.size) * running[-1], "right")
        more = np.minimum(more, int(np.flatnonzero(allowed & (tree.leaves > 0))[-1]))
        return np.append(slots, more), np.append(leaves, tree.leaves[more]), tree.minimum

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(num_slices={self.num_slices}, slice_len={self.slice_len}, "
            f"traj_key={self.traj_key}, strict_length={self.strict_length}, "
            f"{self._exponents()})"
        )


def shape_of(lengths: torch.Tensor, length: int) -> dict[str, Any]:
    """Describe slices of these lengths, int64 [slices], as ``SliceSampler`` does if it is asked for
    slices of ``length`` rows."""
    return {
        "num_slices": lengths.numel(),
        "seq_length": length if bool((lengths == length).all()) else lengths,
        "target_seq_length": None,
        "mask_flat": None,
    }
