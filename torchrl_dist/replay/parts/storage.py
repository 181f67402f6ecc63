"""A TorchRL storage whose rows are in a replay directory that many processes write and read."""

from __future__ import annotations

import itertools
import math
import os
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch
from tensordict import NestedKey, TensorDict, TensorDictBase, is_tensor_collection, unravel_key
from torchrl.data import ReplayBuffer

from torchrl_dist.errors import ConfigurationError, DeadlineError, DirectoryError
from torchrl_dist.replay.law.limiter import MOST_TIMES, Counts, RateLimiter
from torchrl_dist.replay.law.placement import split_rows
from torchrl_dist.replay.node.cursor import (
    Reservation,
    SharedCursor,
    empty,
    repair,
)
from torchrl_dist.replay.node.directory import ReplayDirectory
from torchrl_dist.replay.node.frames import Plan
from torchrl_dist.replay.node.gate import set_limiter
from torchrl_dist.replay.node.opening import close_directory, open_directory
from torchrl_dist.replay.node.patches import (
    apply_patch,
    check_columns,
    column_of,
    copied,
    patch_of,
)
from torchrl_dist.replay.node.priorities import check_new
from torchrl_dist.replay.node.ranking import Ranks, keep_best, reduced
from torchrl_dist.replay.node.tables import ORDERED_LOADS, Word
from torchrl_dist.replay.node.times_sampled import retire
from torchrl_dist.replay.parts.base import RowStorage, check_batch
from torchrl_dist.replay.parts.drawn import Drawn
from torchrl_dist.replay.row import _torchrl, rows
from torchrl_dist.replay.row.gather import Gatherer
from torchrl_dist.replay.row.numbers import RowNumbers
from torchrl_dist.replay.row.spec import HIDDEN, RowSpec
from torchrl_dist.replay.saving.shards import Shard

REDRAWS = 8
_RETRY_S = 2e-4
_RUNS_AT_ONCE = 32
SMALL_BYTES = 32 << 10
"""Writes up to this size copy their rows under the lock, which takes a few microseconds."""

_T = TypeVar("_T")

Draw = Callable[[int, bool], tuple[np.ndarray, np.ndarray, Any]]
"""``draw(n, locked) -> (slots, versions, extra)``.

It returns at most ``n`` slots, the versions of their published rows, and one more number per row.
With ``locked``, the caller holds the directory's lock."""


def check_batch_size(batch_size: int) -> None:
    """Raise ConfigurationError for an impossible batch size. A batch may have 0 rows."""
    if batch_size < 0:
        raise ConfigurationError(f"batch_size={batch_size}: expected at least 0")


class NoRowsError(RuntimeError):
    """Fewer than ``least`` rows are published at this moment.

    With ``RateLimiter(min_size_to_sample=least)``, samples wait for the rows."""

    def __init__(self, message: str, least: int = 1) -> None:
        super().__init__(message)
        self.least = least


class SharedMemmapStorage(RowStorage):
    """Rows shared by every process of one node that names the same directory.

    Build it with the same arguments in each process. A copy (``pickle``, ``torch.save``, ``spawn``,
    ``deepcopy``) has the path of the directory, not the rows. It attaches to the original's
    directory, or raises ``DirectoryError`` if that directory no longer exists. ``len`` is the
    number of published rows, the same in all processes. It is below ``max_size`` while rows of a
    full ring are being rewritten.

    Args:
        max_size: capacity in rows.

    Keyword Args:
        scratch_dir: the replay directory, on a local file system. In ``/dev/shm/...`` it is in
            memory; on a disk it survives a reboot. It is created for this user alone (mode 0700).
            A directory that another user created or can write to is refused.
        job_id: processes with the same id share the directory. Default: torchrun's run id or
            SLURM's job id. Under another launcher, pass an id.
        resume: continue with the rows that an earlier job left in the directory.
        keep: keep the directory when the last process ends. By default, that process removes it
            at a clean end. It keeps the directory for a restart if a signal asked a process of a
            session to stop, or if an exception ended a process.
        timeout_s: longest wait for another process, in seconds.
        limiter: limits how often rows are sampled, and makes writes wait. Pass the same limiter in
            every process. Default: the limiter of the directory, or none.
        gather_threads: number of threads that copy sampled rows if a batch has more than 1 MiB. The
            gain for images depends on free cores and on the memory's bandwidth.
        frames: number of frames per value, by key, for values that repeat frames: each frame is
            then stored once. Use ``{"pixels": 4}`` if the first dimension of ``"pixels"`` and
            ``("next", "pixels")`` holds 4 frames, also with n-step returns. Use ``{"pixels": 1}``
            if each value is one frame. Batches stay the same, bit for bit. A process recognises
            repeated frames by their bytes, among the frames that it wrote recently. There is room
            for 1.07 new frames per row, plus the frames of 3 % of the rows. Rows need more if
            episodes are shorter than about 15 steps, or if frames do not repeat. The oldest rows
            are then dropped early, with a warning, and counted (``"dropped_rows"``). To avoid this,
            pass a larger ``max_size``. Pass the same ``frames`` in every process. Default: the
            ``frames`` of the directory, or none.

    Raises:
        DirectoryError: the directory belongs to another job or user, has another capacity, or is on
            a network file system, or its disk is full.
        ConfigurationError: from writes, if rows do not match the stored rows.
        DeadlineError: from any operation that waited ``timeout_s`` for another process.

    Example:
        >>> storage = SharedMemmapStorage(100, scratch_dir="/dev/shm/example")
        >>> buffer = SharedReplayBuffer(storage=storage, batch_size=4)
        >>> buffer.extend(TensorDict({"obs": torch.zeros(3, 4)}, [3]))
        tensor([0, 1, 2])
        >>> len(storage), storage[2]["obs"].shape
        (3, torch.Size([4]))
    """

    samplers_to_use: ClassVar[Mapping[str, str]] = {
        "": "SharedRandomSampler()",
        "PrioritizedSliceSampler": (
            "SharedPrioritizedSliceSampler({capacity}, {alpha}, {beta}, ...)"
        ),
        "PrioritizedSampler": "SharedPrioritizedSampler({capacity}, alpha={alpha}, beta={beta})",
        "SliceSampler": "SharedSliceSampler(...)",
        "SamplerWithoutReplacement": "SharedSamplerWithoutReplacement()",
        "StalenessAwareSampler": (
            "SharedRandomSampler() and after each update call buffer.retire_older_than"
        ),
        "PromptGroupSampler": "SharedRandomSampler() over rows that hold a whole group each",
    }

    def __init__(
        self,
        max_size: int,
        *,
        scratch_dir: str | os.PathLike[str],
        job_id: str | None = None,
        resume: bool = False,
        keep: bool = False,
        timeout_s: float = 60.0,
        limiter: RateLimiter | None = None,
        gather_threads: int = 1,
        frames: Mapping[NestedKey, int] | None = None,
        device: torch.device | str = "cpu",
        ndim: int = 1,
        compilable: bool = False,
    ) -> None:
        if torch.device(device).type != "cpu":
            raise ConfigurationError(
                f"shared rows are in host memory, got device={device}; append a transform that "
                "moves samples, such as lambda td: td.to('cuda')"
            )
        if ndim != 1 or compilable:
            raise ConfigurationError(
                f"SharedMemmapStorage supports ndim=1 and compilable=False, got ndim={ndim}, "
                f"compilable={compilable}. Leave both out, call buffer.extend(data.reshape(-1)), "
                "and give each row a trajectory id, as collectors do: a second dimension would "
                "not separate environments, because rows of several processes alternate in it"
            )
        if gather_threads < 1:
            raise ConfigurationError(f"gather_threads must be at least 1, got {gather_threads}")
        self._attach(
            int(max_size),
            os.fspath(scratch_dir),
            timeout_s,
            gather_threads,
            job_id=job_id,
            resume=resume,
            keep=keep,
        )
        try:
            if limiter is not None:
                limiter.check_capacity(self.max_size)
            set_limiter(self._directory, limiter)
            if frames is not None:
                self._directory.set_frames(checked_frames(frames))
        except BaseException:
            self.close()
            raise

    def _attach(
        self, max_size: int, scratch_dir: str, timeout_s: float, gather_threads: int, **options: Any
    ) -> None:
        self._directory = open_directory(
            scratch_dir, max_size, timeout_s=timeout_s, repair=repair, **options
        )
        self._set_up(max_size)
        self.scratch_dir = str(self._directory.path)
        self._cursor = SharedCursor(self._directory)
        self._numbers = RowNumbers()
        self._ranks: Ranks | None = None
        self._gatherer = Gatherer(gather_threads, timeout_s)
        self.timeout_s = timeout_s
        self._closed = False
        self._warned = False

    @property
    def limiter(self) -> RateLimiter | None:
        """The rate limiter of all processes, or None."""
        gate = self._directory.gate
        return None if gate is None else gate.limiter

    @property
    def limiter_counts(self) -> Counts:
        """The inserts, samples and size, in rows, that a limiter would use now."""
        gate = self._directory.gate
        return Counts(self.write_count, 0, len(self)) if gate is None else gate.counts()

    @property
    def directory(self) -> ReplayDirectory:
        """The shared state, which may be read at any time."""
        return self._directory

    @property
    def emptied(self) -> tuple[int, int]:
        """See :attr:`ReplayDirectory.emptied`."""
        return self._directory.emptied

    @property
    def counters(self) -> dict[str, int]:
        """The counters of the buffer over all processes, by name.

        They count stale priorities, rows that were read again, repairs and other events.
        """
        return self._directory.counters

    def check_entry(self) -> None:
        """See :meth:`ReplayDirectory.check_entry`."""
        # a copy that is being unpickled with its buffer has no directory yet
        if "_directory" in self.__dict__:
            self._directory.check_entry()

    def close(self, *, clean: bool = True) -> None:
        """End this process's use. The last process removes or keeps the directory. Idempotent.

        Waits for the writes of other threads of this process. No new write can begin.

        Args:
            clean: pass ``False`` after a failure, to keep the directory for a restarted job.

        Raises:
            DeadlineError: a write did not end within ``timeout_s``. Nothing has changed.
            DirectoryError: called in a signal handler that interrupted a write of the same thread.
                Nothing has changed.
        """
        if not self._closed:
            close_directory(self._directory, clean=clean)
            self._closed = True
            # otherwise batches drawn ahead would keep the memory after the buffer's end
            _torchrl.forget_drawn_ahead(self)
            self._attached_entities_list = []

    def check_open(self, instead: str = "build the storage again to use it") -> None:
        """
        Raises:
            DirectoryError: this storage was closed, even if another storage of this process has the
                same directory open.
        """
        if self._closed:
            raise DirectoryError(
                f"the storage over {self.scratch_dir} was closed in this process: {instead}"
            )

    # --- size --------------------------------------------------------------------------------

    def __len__(self) -> int:
        return self._directory.length

    @property
    def shape(self) -> torch.Size:
        return torch.Size([self._directory.high])

    @property
    def _mutation_revision(self) -> int:
        # samplers with caches derived from the rows compare this number
        words = self._directory.words
        return words[Word.CURSOR] + words[Word.BASE] + words[Word.WRITE_COUNT]

    @property
    def write_count(self) -> int:
        """Number of rows ever written by all processes."""
        return int(self._directory.words[Word.WRITE_COUNT])

    @property
    def next_slot(self) -> int:
        """The slot of the next row."""
        return int(self._directory.words[Word.CURSOR]) % self.max_size

    def generations_of(self, slots: torch.Tensor) -> torch.Tensor:
        """Return how often each slot was written by all processes, int64.

        The number is -1 where no row is published, and for a number outside the buffer."""
        there = (slots >= 0) & (slots < self.max_size)
        versions = torch.from_numpy(self._directory.versions)[torch.where(there, slots, 0)]
        published = (versions & 1 == 0) & (versions > 0) & there
        return torch.where(published, versions // 2, -1)

    @property
    def _storage(self) -> TensorDict | None:
        """All slots in memory, published or not. TorchRL reads keys and dtypes here."""
        spec = self._directory.rows
        if spec is None:
            return None
        return rows.build(self._directory.tensors, spec, (self.max_size,), raw=True)

    # --- writing -----------------------------------------------------------------------------

    def append(
        self,
        data: TensorDictBase,
        priority: np.ndarray | None = None,
        *,
        limited: bool = True,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write a batch at the shared cursor and publish it. The writer calls this.

        Args:
            data: ``[n, ...]``. Of more than ``max_size`` rows, only the last ``max_size`` are kept.
            priority: float64 [n], finite and >= 0, without alpha and eps. Default: the largest
                priority seen.
            limited: whether to wait for the limiter before anything is written.

        Returns:
            ``(index, generation)``, int64 [n] each; -1 for rows that were not kept.

        Raises:
            RateLimitError: the limiter did not admit the rows in time.
        """
        return self._append(
            self._checked(data, self._numbers), rows.batch_of(data)[0], priority, limited
        )

    def keep_best(
        self,
        data: TensorDictBase,
        rank_key: NestedKey,
        reduction: str,
        priority: np.ndarray | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the rows that are among the best. :class:`SharedMaxValueWriter` calls this.

        Args:
            data: ``[n, ...]``.
            rank_key, reduction: of :class:`SharedMaxValueWriter`.
            priority: see :meth:`append`.

        Returns:
            ``(index, generation)``, int64 [n] each; -1 for rows that were not kept.

        Raises:
            ConfigurationError: the rows have no such key, or a rank is NaN. No row was written.
            DeadlineError: another process was writing rows for ``timeout_s``.
        """
        self.check_open()
        self.check_ranked()
        check_batch(data)
        new = _ranks_of(data, rank_key, reduction)
        source = self._checked(data, self._numbers)
        if priority is not None:
            check_new(self._directory, priority, new.size)
        self._cursor.drop_interrupted()
        source = self._after_restores(source)
        index = np.full(new.size, -1, dtype=np.int64)
        generation = np.full(new.size, -1, dtype=np.int64)
        left, deadline = np.arange(new.size), time.monotonic() + self.timeout_s
        while left.size:
            with self._directory.lock():
                ranks = self._ranks_by(rank_key, reduction)
                written = keep_best(self._cursor, ranks, new, left, source, priority)
            if written is None:
                if time.monotonic() > deadline:
                    raise DeadlineError(
                        f"other processes were writing rows of {self.scratch_dir} for "
                        f"{self.timeout_s:g} s; are they stopped? Continue or kill them"
                    )
                time.sleep(_RETRY_S)
                continue
            kept, slots, stamps = written
            index[left[kept]], generation[left[kept]] = slots, stamps
            left = np.delete(left, kept) if kept.size else left[:0]
        return torch.from_numpy(index), torch.from_numpy(generation)

    def _ranks_by(self, rank_key: NestedKey, reduction: str) -> Ranks:
        """Return this process's copy of the ranks. Called under the lock."""
        keys = [column.key for column in self._spec().columns]
        law = keys.index(_path_of(rank_key)), reduction
        if self._ranks is None or self._ranks.law != law:
            self._ranks = Ranks(self._directory, *law)
        return self._ranks

    def check_ranked(self) -> None:
        """
        Raises:
            ConfigurationError: this storage cannot keep the best rows.
        """
        words, why = self._directory.words, ""
        if self.limiter is not None:
            why = "a limiter, which counts rows that are written, although a row may not be kept"
        elif words[Word.FRAMES_SET]:
            why = "frames=, whose room is for recent frames, although the best rows may be old"
        elif words[Word.FILLER]:
            why = "fill_once, after which no process may extend the storage"
        if why:
            raise ConfigurationError(
                f"a SharedMaxValueWriter cannot write to a storage with {why}: leave it out, or "
                "build the buffer with writer=SharedCursorWriter()"
            )

    def check_order(self, use: str) -> None:
        if self._directory.words[Word.RANKED]:
            raise ConfigurationError(
                f"{use} need rows in the order of writing, but a SharedMaxValueWriter puts each "
                "row in the slot of a worse one: store whole trajectories as rows, [n, T]"
            )

    def fill_once(self, data: Any, *, rows_at_once: int = 8192) -> None:
        """Write a data set, unless a process of this node has done so. Each process calls this.

        The first process writes the rows, and the others wait for it. The node then has the data
        set once, whatever the number of its processes. If the writing process ends before it is
        done, another one begins anew. With ``keep=True`` and ``resume=True``, a later job finds the
        rows. No process may extend the storage.

        Args:
            data: has ``len(data)`` rows, and ``data[i:j]`` returns a TensorDict ``[j - i]``. A
                TensorDict, also a memory-mapped one, or a ``ReplayBuffer``, such as a data set of
                TorchRL.
            rows_at_once: rows that are read from ``data`` at once.

        Raises:
            ConfigurationError: the storage has no room for the rows, has a limiter, or has other
                rows; or ``data`` returned another number of rows.
            DeadlineError: the process that fills it wrote nothing for ``timeout_s``.
        """
        self.check_open()
        count, words = len(data), self._directory.words
        if rows_at_once < 1:
            raise ConfigurationError(f"rows_at_once={rows_at_once}: expected at least 1")
        if count > self.max_size or self.limiter is not None:
            raise ConfigurationError(
                f"the data set has {count} rows, the storage room for {self.max_size} and limiter="
                f"{self.limiter}: expected enough room and no limiter, as in "
                f"SharedMemmapStorage({count}, scratch_dir=...)"
            )
        written, deadline = -1, 0.0
        while not self._may_fill():
            if words[Word.FILLER] < 0:
                if self.write_count == count:
                    return
                raise ConfigurationError(
                    f"{self.scratch_dir} was filled with {self.write_count} rows, this data set "
                    f"has {count}: use another folder for each data set, and do not extend it"
                )
            if self.write_count != written:
                written, deadline = self.write_count, time.monotonic() + self.timeout_s
            if time.monotonic() > deadline:
                raise DeadlineError(
                    f"process {self._directory.pid_of(words[Word.FILLER] - 1)} fills "
                    f"{self.scratch_dir}, and wrote nothing for {self.timeout_s:g} s; is it "
                    "stopped? Continue or kill it, or allow more with timeout_s"
                )
            time.sleep(_RETRY_S * 50)
        done = 0
        try:
            self.empty()
            for first in range(0, count, rows_at_once):
                part = data[first : min(first + rows_at_once, count)]
                # TorchRL's buffers store the index of each row in it
                self.append(part.exclude("index") if isinstance(data, ReplayBuffer) else part)
            if self.write_count != count:
                raise ConfigurationError(
                    f"{self.write_count} rows were written to {self.scratch_dir}, but len(data) is "
                    f"{count}: data[i:j] must return j - i rows, and no process may extend the "
                    "storage"
                )
            done = -1
        except BaseException:
            self.empty()
            raise
        finally:
            with self._directory.lock():
                words[Word.FILLER] = done

    def _may_fill(self) -> bool:
        """Note that this process fills the data set, unless another one does or has done so.

        Raises:
            ConfigurationError: there are rows that :meth:`fill_once` did not write.
        """
        directory = self._directory
        with directory.lock():
            filler = directory.words[Word.FILLER]
            if filler < 0 or (filler and directory.is_alive(filler - 1)):
                return False
            if not filler and directory.words[Word.WRITE_COUNT]:
                raise ConfigurationError(
                    f"{self.scratch_dir} has rows that others wrote: use a new folder for a data "
                    "set"
                )
            directory.words[Word.FILLER] = directory.member + 1
            return True

    def append_columns(
        self, spec: RowSpec, columns: list[np.ndarray], priority: np.ndarray | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append rows that are already split, [n, ...] per column of ``spec``, for a host.

        This never waits for the limiter."""
        if self._directory.rows is None:
            self._directory.create_rows(spec)
        source = rows.fitted(columns, spec, self._spec())
        return self._append(source, len(columns[0]), priority, limited=False)

    def _append(
        self, source: list[np.ndarray], count: int, priority: np.ndarray | None, limited: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.check_open()
        if priority is not None:
            check_new(self._directory, priority, count)
        self._cursor.drop_interrupted()
        source = self._after_restores(source)
        frames = self._directory.frames
        most = None if frames is None else frames.largest_write
        parts = split_rows(count, self.max_size, most)
        if parts == [(0, count)]:
            slots, generations = self._append_part(source, 0, count, priority, limited)
            return torch.from_numpy(slots), torch.from_numpy(generations)
        if count > self.max_size:  # the first rows would be overwritten anyway
            if limited and self._directory.gate is not None:
                self._directory.gate.wait_to_write(self._cursor, self)
                limited = False
            self._cursor.skip(count - self.max_size)
        index = np.full(count, -1, dtype=np.int64)
        generation = np.full(count, -1, dtype=np.int64)
        for start, stop in parts:
            part = None if priority is None else priority[start:stop]
            index[start:stop], generation[start:stop] = self._append_part(
                source, start, stop, part, limited
            )
            limited = False
        return torch.from_numpy(index), torch.from_numpy(generation)

    def _after_restores(self, source: list[np.ndarray]) -> list[np.ndarray]:
        """Change the numbers of new rows, so that they follow no row from before a restore."""
        restores = self._directory.words[Word.RESTORES]
        if not restores:
            return source
        return [
            np.where(values == 0, 0, values + (restores << 32)) if column in HIDDEN else values
            for column, values in zip(self._spec().columns, source, strict=True)
        ]

    def _append_part(
        self,
        source: Sequence[np.ndarray],
        start: int,
        stop: int,
        priority: np.ndarray | None,
        limited: bool,
    ) -> tuple[np.ndarray, np.ndarray]:
        gate, cursor, count = self._directory.gate, self._cursor, stop - start
        part = source, start, stop
        small = gate is None and cursor.directory.frames is None
        if small and sum(values.nbytes for values in source) <= SMALL_BYTES:
            written = self._append_at_once(source, start, count, priority)
            if written is not None:
                return written
        if gate is None or not limited:
            reservation, plan = cursor.planned(*part, cursor.reserve, count)
        else:
            reservation, plan = cursor.planned(*part, gate.reserve, cursor, count, self)
        generation = self._fill(reservation, plan, source, start, priority)
        if plan is not None and not self._warned:
            self._warn_of_dropped_rows()
        if generation[0] < 0:  # the buffer was emptied during the write
            return np.full(count, -1, dtype=np.int64), generation
        return reservation.slots(), generation

    def _append_at_once(
        self, source: Sequence[np.ndarray], start: int, count: int, priority: np.ndarray | None
    ) -> tuple[np.ndarray, np.ndarray] | None:
        """Reserve, copy and publish a few rows under one lock, because locking twice takes longer
        than copying. Return None if other writers are in the way."""
        taken: list[Reservation] = []
        try:
            generation = self._write_locked(taken, source, start, count, priority)
        except BaseException:
            for reservation in taken:
                self._cursor.abandon(reservation)
            raise
        return None if generation is None else (taken[0].slots(), generation)

    def _write_locked(
        self,
        taken: list[Reservation],
        source: Sequence[np.ndarray],
        start: int,
        count: int,
        priority: np.ndarray | None,
    ) -> np.ndarray | None:
        # Not in ``_append_at_once``, because a frame that cleans up after an interrupt must not
        # hold the lock, see ``FairLock``.
        with self._directory.lock():
            reservation = self._cursor.try_reserve(count)
            if reservation is None:
                return None
            taken.append(reservation)
            self._copy(reservation, source, start)
            return self._cursor.publish_locked(reservation, priority)

    def _warn_of_dropped_rows(self) -> None:
        directory = self._directory
        if directory.words[Word.DROPPED_ROWS]:
            self._warned = True
            warnings.warn(
                f"the rows in {directory.path} have more different frames than there is room for: "
                f"{directory.words[Word.DROPPED_ROWS]} of the oldest rows were dropped, and "
                f"{directory.length} of {self.max_size} are left. Pass a larger max_size to keep "
                "more rows",
                stacklevel=5,
            )

    def _replace(self, index: torch.Tensor, data: TensorDictBase) -> torch.Tensor:
        """See the base class. Each run of neighbouring slots is published in one step."""
        self.check_open()
        slots = index.numpy()
        given = self._checked(data)
        # the last occurrence of each slot, in slot order
        unique, last = np.unique(slots[::-1], return_index=True)
        order = slots.size - 1 - last
        source: list[np.ndarray | None] = [value[order] for value in given]
        columns = self._spec().columns
        for number, column in enumerate(columns):
            if column in HIDDEN:  # a replaced row keeps its place in its trajectory
                source[number] = None
        self._cursor.drop_interrupted()
        generations = np.empty(unique.size, dtype=np.int64)
        # a few runs of neighbours at a time, because all processes share a limited claim table
        edges = np.flatnonzero(np.diff(unique) != 1) + 1
        frames = self._directory.frames
        at_once = _RUNS_AT_ONCE if frames is None else 1
        starts = [0, *edges[at_once - 1 :: at_once].tolist(), unique.size]
        if frames is not None:
            most = frames.largest_write
            starts = [at for pair in itertools.pairwise(starts) for at in range(*pair, most)]
            starts.append(unique.size)
        for first, last in itertools.pairwise(starts):
            run = unique[first:last]
            taken, plan = self._cursor.planned(source, first, last, self._cursor.claim_slots, run)
            done = first
            for position, reservation in enumerate(taken):
                stop = done + reservation.count
                try:
                    generations[done:stop] = self._fill(reservation, plan, source, done, None)
                except BaseException:
                    for rest in taken[position + 1 :]:
                        self._cursor.abandon(rest)
                    raise
                done = stop
        return torch.from_numpy(generations[np.searchsorted(unique, slots)])

    def _checked(self, data: TensorDictBase, numbers: RowNumbers | None = None) -> list[np.ndarray]:
        check_batch(data)
        spec = self._directory.rows
        if spec is None:
            self._directory.create_rows(rows.spec_of(data))
            spec = self._directory.rows
            assert spec is not None
        return rows.matching_columns(data, spec, numbers)

    def _fill(
        self,
        reservation: Reservation,
        plan: Plan | None,
        source: Sequence[np.ndarray | None],
        offset: int,
        priority: np.ndarray | None,
    ) -> np.ndarray:
        """Copy rows from ``offset`` on into the reserved slots, and publish them.

        Where a column of ``source`` is None, the slots keep their values."""
        try:
            done = offset
            if plan is not None:
                assert self._directory.frames is not None
                source = self._directory.frames.write(
                    plan, source, offset, offset + reservation.count
                )
                done = 0
            self._copy(reservation, source, done)
            generation = self._cursor.publish(reservation, priority)
        except BaseException:
            self._cursor.abandon(reservation)
            raise
        if self._directory.gate is not None:
            self._directory.gate.ring()
        return generation

    def _copy(
        self, reservation: Reservation, source: Sequence[np.ndarray | None], done: int
    ) -> None:
        for start, stop in reservation.ranges:
            for target, value in zip(self._directory.arrays, source, strict=True):
                if value is not None:
                    target[start:stop] = value[done : done + stop - start]
            done += stop - start

    def _patch(
        self, slots: np.ndarray, generation: np.ndarray, *how: Any
    ) -> tuple[np.ndarray, np.ndarray]:
        self.check_open()
        patch = patch_of(self._spec(), slots.size, *how)
        check_columns(self._directory, patch)
        return apply_patch(self._directory, slots, generation, patch)

    def retire(self, oldest: int, version_key: NestedKey) -> int:
        self.check_open()
        directory = self._directory
        if directory.times_sampled is None:
            raise ConfigurationError(
                "retired rows are stored like rows that were sampled often enough: build the "
                "storage with limiter=RateLimiter(max_times_sampled=n), at most "
                f"n={MOST_TIMES}"
            )
        if directory.rows is None:
            raise ConfigurationError(
                f"no row has been written, so it is not known where its {version_key!r} is; call "
                "this after the first extend"
            )
        column_of(directory, version_key)
        key = unravel_key(version_key)
        keys = [column.key for column in directory.rows.columns]
        return retire(directory, keys.index((key,) if isinstance(key, str) else key), oldest)

    def empty(self, *, reset_write_count: bool = True) -> None:
        """Drop every row for all processes. Earlier slots and generations then name no row."""
        self.check_open()
        try:
            empty(self._directory, reset_write_count=reset_write_count)
        finally:
            _torchrl.forget_drawn_ahead(self)

    # --- reading -----------------------------------------------------------------------------

    def once_rows_are_published(self, read: Callable[[], _T]) -> _T:
        """Return the result of ``read``. If ``read`` raises NoRowsError, wait for rows that are
        being written, and call it again.

        Raises:
            NoRowsError: ``read`` raised it, and no process is writing a row.
            DeadlineError: rows were being written, but too few were published in ``timeout_s``.
        """
        self.check_open()
        deadline = math.inf
        while True:
            try:
                return read()
            except NoRowsError as error:
                deadline = min(deadline, time.monotonic() + self.timeout_s)
                if not self._cursor.wait_for_rows(deadline, error.least):
                    raise

    def read_rows(
        self, draw: Draw, count: int, *, whole: bool = False, stored: bool = False
    ) -> tuple[np.ndarray, np.ndarray, Any, list[np.ndarray]]:
        """Copy drawn rows, so that each is one whole published row. The samplers call this.

        Compare the versions of the copied rows, and draw others for the rows that changed. Repeat
        this a few times, and finally under the lock, where no process can rewrite them.

        Args:
            whole: whether to draw all rows again if one changed, as slices need. ``draw`` may then
                return any number of rows, and any object as ``extra``.
            stored: whether to return the rows in their stored form, see ``row.stacks``.

        Returns:
            ``(slots, generation, extra, columns)``, at most ``count`` rows of each.
        """
        directory = self._directory
        stored = stored and directory.frames is not None
        gather = self._gather_stored if stored else self._gather

        def copy(slots: np.ndarray, locked: bool = False) -> list[np.ndarray]:
            return gather(slots) if locked else copied(directory, lambda: gather(slots))

        if not ORDERED_LOADS:
            with directory.lock():
                slots, versions, extra = draw(count, True)
                return slots, versions >> 1, extra, gather(slots)
        slots, versions, extra = draw(count, False)
        columns = copy(slots)
        now = directory.versions[slots]
        if now.tobytes() == versions.tobytes():  # takes a tenth of the time of comparing arrays
            return slots, versions >> 1, extra, columns
        moved, missing = np.flatnonzero(now != versions), []
        for attempt in range(1, REDRAWS + 2):
            directory.count(Word.REREAD_ROWS, moved.size)
            locked = attempt > REDRAWS
            if locked:
                directory.count(Word.LOCKED_READS)
            with directory.lock() if locked else nullcontext():
                if whole:
                    slots, versions, extra = draw(count, locked)
                    columns, moved = copy(slots, locked), np.arange(slots.size)
                else:
                    again, stamps, more = draw(moved.size, locked)
                    missing.append(moved[again.size :])
                    moved = moved[: again.size]
                    slots[moved], versions[moved], extra[moved] = again, stamps, more
                    if stored:  # rows share frames, so all are copied again
                        columns = copy(slots, locked)
                        moved = np.setdiff1d(np.arange(slots.size), np.concatenate(missing))
                    else:
                        for column, part in zip(columns, copy(again, locked), strict=True):
                            column[moved] = part
            moved = moved[directory.versions[slots[moved]] != versions[moved]]
            if locked or not moved.size:
                break
        if any(part.size for part in missing):
            gone = np.concatenate(missing)
            slots, versions, extra = (np.delete(each, gone) for each in (slots, versions, extra))
            of_rows = len(directory.arrays)
            columns[:of_rows] = [np.delete(column, gone, 0) for column in columns[:of_rows]]
        return slots, versions >> 1, extra, columns

    def hand_over(self, drawn: Drawn) -> None:
        self._handed.batches.append(drawn)
        if self._directory.gate is None:  # a gate counts draws itself
            self._directory.count(Word.DRAWN, drawn.index.numel())

    def _rows_at(self, slots: np.ndarray, *, wait: bool = True) -> TensorDict:
        spec = self._spec()
        count, columns = self.columns_at(slots, wait=wait)
        return rows.build(rows.tensors(columns, spec), spec, (count,))

    def columns_at(self, slots: np.ndarray, *, wait: bool = True) -> tuple[int, list[np.ndarray]]:
        """Return the number of rows and their columns [n, ...] at slots >= 0, int64 [n].

        Args:
            wait: if True, wait for unpublished rows; otherwise omit them.
        """
        self.check_open()
        directory = self._directory
        self._spec()
        high = directory.high
        if slots.size and not (0 <= slots.min() and slots.max() < high):
            raise IndexError(
                f"slots must be in 0 .. {high - 1}, got {slots.min()} .. {slots.max()}"
            )
        versions = directory.versions[slots]
        columns = copied(directory, lambda: directory.read(slots))
        ok = (versions & 1 == 0) & (versions > 0) & (directory.versions[slots] == versions)
        todo = np.flatnonzero(~ok) if ORDERED_LOADS else np.arange(slots.size)
        deadline = time.monotonic() + self.timeout_s
        while todo.size:
            directory.count(Word.REREAD_ROWS, todo.size)
            with directory.lock():
                now = directory.versions[slots[todo]]
                published = (now & 1 == 0) & (now > 0)
                ready = todo[published]
                for column, part in zip(columns, directory.read(slots[ready]), strict=True):
                    column[ready] = part
                todo = todo[~published]
                gone = todo[~self._cursor.being_written(slots[todo])] if wait else todo[:0]
            if gone.size:
                raise IndexError(
                    f"there is no row in slots {slots[gone][:8].tolist()} of {directory.path}, and "
                    "no process is writing one: never written, emptied, or its writer died"
                )
            if todo.size and not wait:
                slots, columns = (
                    np.delete(slots, todo),
                    [np.delete(column, todo, 0) for column in columns],
                )
                break
            if todo.size:
                if time.monotonic() > deadline:
                    raise DeadlineError(
                        f"slots {slots[todo][:8].tolist()} of {directory.path} were being written "
                        f"by other processes for {self.timeout_s:g} s; are these stopped?"
                    )
                time.sleep(_RETRY_S)
        return slots.size, columns

    def _spec(self) -> RowSpec:
        spec = self._directory.rows
        if spec is None:
            raise IndexError("cannot read from a shared storage to which no row was ever written")
        return spec

    def _gather(self, slots: np.ndarray) -> list[np.ndarray]:
        directory, gather = self._directory, self._gatherer.gather
        columns = gather(directory.arrays, slots)
        return columns if directory.frames is None else directory.frames.expand(columns, gather)

    def _gather_stored(self, slots: np.ndarray) -> list[np.ndarray]:
        directory, gather = self._directory, self._gatherer.gather
        assert directory.frames is not None
        return directory.frames.stored(gather(directory.arrays, slots), gather)

    # --- saving ------------------------------------------------------------------------------

    def shards(self) -> list[Shard]:
        """Return the directory as the only shard, for saving."""
        self.check_open()
        return [Shard(self._cursor)]

    # --- moving between processes ------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        self.check_open("copy or pickle it while it is open, or save rows with buffer.dumps(path)")
        _torchrl.check_copying(self)
        directory = self._directory
        return {
            "max_size": self.max_size,
            "scratch_dir": self.scratch_dir,
            "job_id": directory.job_id,
            "timeout_s": self.timeout_s,
            "gather_threads": self._gatherer.threads,
            "identity": directory.identity,
            "attached": self._attached_entities_list,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        attached = state.pop("attached")
        self._attach(**state, resume=False, keep=False)
        set_limiter(self._directory, None)  # the limiter that the other processes use
        _torchrl.arrive_with(self, attached)

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(len={len(self)}, max_size={self.max_size}, "
            f"scratch_dir={self.scratch_dir!r})"
        )


def _path_of(key: NestedKey) -> tuple[str, ...]:
    names = unravel_key(key)
    return (names,) if isinstance(names, str) else tuple(names)


def _ranks_of(data: Any, rank_key: NestedKey, reduction: str) -> np.ndarray:
    """Return the ranks of new rows, float64 [n].

    Raises:
        ConfigurationError: the rows have no real numbers under the key, or a rank is NaN.
    """
    plain = not is_tensor_collection(data)
    value = None if plain else data.get(rank_key, None)
    if not isinstance(value, torch.Tensor) or not value.numel() or value.is_complex():
        kind = type(data).__name__ if plain else f"keys {sorted(map(str, data.keys(True, True)))}"
        raise ConfigurationError(
            "a SharedMaxValueWriter expects data to be a tensor collection (a TensorDict or "
            f"tensorclass) with real numbers under rank_key={rank_key!r}, got {kind}; pass "
            "rank_key="
        )
    ranks = reduced(value, reduction)
    if np.isnan(ranks).any():
        raise ConfigurationError(
            f"{np.count_nonzero(np.isnan(ranks))} of {ranks.size} rows have NaN as their "
            f"{reduction} of {rank_key!r}; no row was written. Leave these rows out"
        )
    return ranks


def checked_frames(frames: Mapping[NestedKey, int]) -> dict[tuple[str, ...], int]:
    """Return ``frames=`` with keys as tuples.

    Raises:
        ConfigurationError: it is not a mapping of keys of rows to numbers of frames.
    """
    found: dict[tuple[str, ...], int] = {}
    for key, stack in frames.items() if isinstance(frames, Mapping) else [(None, 0)]:
        path = _path_of(key) if isinstance(key, (str, tuple)) else ()
        if not path or type(stack) is not int or stack < 1 or (path[0] == "next" and path[1:]):
            raise ConfigurationError(
                f"frames={frames!r}: expected the number of frames in a value, by key, such as "
                '{"pixels": 4}; this includes the key ("next", "pixels")'
            )
        found[path] = stack
    return found
