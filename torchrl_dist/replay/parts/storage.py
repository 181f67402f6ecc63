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
from torchrl_dist.replay.law.placement import largest_reservation, split_rows
from torchrl_dist.replay.node.cursor import (
    Reservation,
    SharedCursor,
    empty,
    repair,
)
from torchrl_dist.replay.node.dimensions import (
    agree_on_dimensions,
    agree_on_width,
    other_dimensions,
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
from torchrl_dist.replay.row import _torchrl, rows, trees
from torchrl_dist.replay.row.gather import Gatherer
from torchrl_dist.replay.row.numbers import RowNumbers
from torchrl_dist.replay.row.spec import HIDDEN, RowSpec
from torchrl_dist.replay.saving.shards import Shard
from torchrl_dist.replay.saving.snapshot import Head

REDRAWS = 8
_RETRY_S = 2e-4
_RUNS_AT_ONCE = 32
SMALL_BYTES = 32 << 10
"""Writes up to this size copy their rows under the lock, which takes a few microseconds."""

_T = TypeVar("_T")

Draw = Callable[[int, bool], tuple[np.ndarray, np.ndarray, Any]]
"""A function ``draw(n, locked) -> (slots, versions, extra)``.

It returns at most ``n`` slots, the versions of their published rows, and one more number per row.
If ``locked`` is true, the caller holds the directory's lock."""


def check_batch_size(batch_size: int) -> None:
    """Raise ConfigurationError for a negative batch size. A batch may have 0 rows."""
    if batch_size < 0:
        raise ConfigurationError(f"batch_size={batch_size}: expected at least 0")


class NoRowsError(RuntimeError):
    """Fewer than ``least`` rows are published at this moment.

    With ``RateLimiter(min_size_to_sample=least)``, samples wait for that many rows."""

    def __init__(self, message: str, least: int = 1) -> None:
        super().__init__(message)
        self.least = least


class SharedMemmapStorage(RowStorage):
    """Rows that all processes of a node share if they name the same directory.

    Build the storage with the same arguments in each process. A copy (``pickle``, ``torch.save``,
    ``spawn``, ``deepcopy``) has the path of the directory, not the rows. It attaches to the
    original's directory, or raises ``DirectoryError`` if that directory no longer exists. ``len``
    is the number of published rows, the same in all processes. While rows of a full buffer are
    being rewritten, ``len`` is below ``max_size``.

    Args:
        max_size: capacity in rows.

    Keyword Args:
        scratch_dir: the replay directory, on a local file system. In ``/dev/shm/...`` it is in
            memory. On a disk it survives a reboot. It is created for this user alone (mode 0700). A
            directory that another user created or can write to is refused.
        job_id: processes with the same id share the directory. Default: torchrun's run id or
            SLURM's job id. Under another launcher, pass an id.
        resume: continue with the rows that an earlier job left in the directory.
        keep: keep the directory when the last process ends. By default, the last process removes
            the directory at a clean end. If a signal asked a process of a session to stop, or if an
            exception ended a process, the directory is kept for a restart.
        timeout_s: longest wait for another process, in seconds.
        limiter: limits how often rows are sampled, and makes writes wait for samples. Pass the same
            limiter in every process. Default: the limiter that the directory already has, or none.
        gather_threads: number of threads that copy sampled rows if a batch has more than 1 MiB. The
            gain for images depends on free cores and on the memory's bandwidth.
        frames: for keys whose values repeat frames, a dictionary that maps each such key to the
            number of frames per value. Each frame is then stored once. Use ``{"pixels": 4}`` if the
            first dimension of ``"pixels"`` and ``("next", "pixels")`` holds 4 frames. Frames are
            also stored once if rows have n-step returns. Use ``{"pixels": 1}`` if each value is one
            frame. Batches are the same as without ``frames``, bit for bit. A process recognises
            repeated frames by comparing them, byte by byte, with frames that it wrote recently. The
            storage has room for 1.07 new frames per row, plus a reserve of 0.03 frames per row.
            Rows need more room if episodes are shorter than about 15 steps, or if frames do not
            repeat. The oldest rows are then dropped early, with a warning, and counted
            (``"dropped_rows"``). To keep more rows, pass a larger ``max_size``. Pass the same
            ``frames`` in every process. Default: the ``frames`` that the directory already has, or
            none.
        ndim: with ``ndim=2``, rows have two dimensions as in TorchRL's storages: ``extend`` takes
            ``[B, T, ...]`` (which TorchRL's buffers store as ``[T, B]``), a sample has single
            elements, and their index is a pair of coordinates. ``B`` must be the same in all
            writes of all processes. ``max_size`` and ``write_count`` count elements, and
            ``max_size`` must be a multiple of ``B``. The elements of one time step stay together,
            but steps of several processes alternate along the first dimension. Therefore slices,
            windows and queries are refused, and so are ``frames``, ``fill_once`` and a
            :class:`SharedMaxValueWriter`. A checkpoint can be loaded only into a storage of the
            same capacity. Reading by index waits for elements that are being written. A slice of
            time steps, as in ``storage[:]``, leaves out steps whose writer was killed.

    Raises:
        DirectoryError: the directory belongs to another job or user, has another capacity, is on a
            network file system, or is on a full disk.
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
                "expected device='cpu', because shared rows are in the CPU's memory, got "
                f"device={device}; leave device= out, and append a transform that moves samples, "
                "such as lambda td: td.to('cuda')"
            )
        if ndim not in (1, 2) or compilable:
            raise ConfigurationError(
                f"SharedMemmapStorage supports ndim=1, ndim=2 and compilable=False, got ndim="
                f"{ndim}, compilable={compilable}. Leave both arguments out, and call "
                "buffer.extend(data.reshape(-1))"
            )
        if ndim > 1 and frames is not None:
            raise ConfigurationError(
                f"frames={frames!r} needs ndim=1, got ndim={ndim}; leave ndim out, and call "
                "buffer.extend(data.reshape(-1))"
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
            ndim=ndim,
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
        self,
        max_size: int,
        scratch_dir: str,
        timeout_s: float,
        gather_threads: int,
        *,
        ndim: int = 1,
        **options: Any,
    ) -> None:
        self._directory = open_directory(
            scratch_dir, max_size, timeout_s=timeout_s, repair=repair, **options
        )
        try:
            agree_on_dimensions(self._directory, ndim)
        except BaseException:
            close_directory(self._directory)
            raise
        self._set_up(max_size)
        self.ndim = ndim
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
        """The shared state of the buffer, which may be read at any time."""
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
        """End this process's use of the storage. The last process removes or keeps the directory.
        Idempotent.

        The call waits for the writes of other threads of this process. No new write can begin.

        Args:
            clean: pass ``False`` after a failure, to keep the directory for a restarted job.

        Raises:
            DeadlineError: a write did not end within ``timeout_s``. Nothing has changed.
            DirectoryError: the caller is a signal handler that interrupted a write of the same
                thread. Nothing has changed.
        """
        if not self._closed:
            close_directory(self._directory, clean=clean)
            self._closed = True
            # otherwise batches that were drawn ahead would keep the memory after the buffer is gone
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
                f"the storage over {self.scratch_dir} was closed in this process; {instead}"
            )

    # --- size --------------------------------------------------------------------------------

    def __len__(self) -> int:
        return self._directory.length

    @property
    def shape(self) -> torch.Size:
        if self.ndim > 1:
            width = self.width
            return torch.Size([self._directory.high // (width or 1), width])
        return torch.Size([self._directory.high])

    @property
    def width(self) -> int:  # type: ignore[override]
        return self._directory.width if self.ndim > 1 else 0

    def have_rows(self, slots: torch.Tensor) -> torch.Tensor:
        there = self.generations_of(slots) >= 0
        if there.all():
            return there
        with self._directory.lock():
            written = torch.from_numpy(self._cursor.being_written(slots.numpy()))
            return (self.generations_of(slots) >= 0) | written

    def flat(self, data: Any) -> Any:
        check_batch(data)
        flat = trees.mapped(lambda value: value if value.ndim < 2 else value.flatten(0, 1), data)
        count = rows.batch_of(data)[0]
        width, rest = divmod(rows.batch_of(flat)[0], count or 1)
        if rest or (is_tensor_collection(data) and data.ndim < 2) or flat is data:
            raise ConfigurationError(
                f"a storage with ndim=2 takes rows [n, width, ...], got rows "
                f"{list(getattr(data, 'shape', [count]))}; build the storage without ndim=2 for "
                "rows of one dimension"
            )
        self._check_width(width)
        return flat

    def _check_width(self, width: int) -> None:
        if self._cursor.width != width:
            agree_on_width(self._directory, width)
            self._cursor.width = width

    def _check_dimensions(self, heads: Sequence[Head]) -> None:
        if self.ndim == 1:
            super()._check_dimensions(heads)
            return
        for head in heads:
            if not head.width or head.capacity != self.max_size:
                raise ConfigurationError(
                    f"the rows were saved with ndim={2 if head.width else 1} and "
                    f"max_size={head.capacity}, but this storage has ndim=2 and "
                    f"max_size={self.max_size}; load the rows into a storage with "
                    f"ndim={2 if head.width else 1} and max_size={head.capacity}"
                )
            self._check_width(head.width)

    @property
    def _mutation_revision(self) -> int:
        # samplers compare this number to notice that their caches of rows are outdated
        words = self._directory.words
        return words[Word.CURSOR] + words[Word.BASE] + words[Word.WRITE_COUNT]

    @property
    def write_count(self) -> int:
        """Number of rows ever written by all processes."""
        return int(self._directory.words[Word.WRITE_COUNT])

    @property
    def next_slot(self) -> int:
        """The slot of the next row that is written."""
        return int(self._directory.words[Word.CURSOR]) % self.max_size

    def generations_of(self, slots: torch.Tensor) -> torch.Tensor:
        """Return how many times processes have written each slot, int64.

        The result is -1 for a slot without a published row, and for an index outside the buffer."""
        self.check_open()
        there = (slots >= 0) & (slots < self.max_size)
        versions = torch.from_numpy(self._directory.versions)[torch.where(there, slots, 0)]
        published = (versions & 1 == 0) & (versions > 0) & there
        return torch.where(published, versions // 2, -1)

    @property
    def _storage(self) -> TensorDict | None:
        """The rows of all slots in memory, whether published or not. TorchRL reads keys and dtypes
        from this property."""
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
        """Write a batch at the shared cursor and publish it. The writer calls this method.

        Args:
            data: ``[n, ...]``. If there are more than ``max_size`` rows, only the last ``max_size``
                are kept.
            priority: float64 [n], finite and >= 0, without alpha and eps. Default: the largest
                priority seen.
            limited: whether to wait for the limiter before anything is written.

        Returns:
            ``(index, generation)``, int64 [n] each; -1 for rows that were not kept.

        Raises:
            RateLimitError: the limiter did not admit the rows in time.
        """
        written = None if priority is not None else self._append_plain(data)
        if written is not None:
            return written
        return self._append(
            self._checked(data, self._numbers), rows.batch_of(data)[0], priority, limited
        )

    def _append_plain(self, data: Any) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Write a few rows in one call to C code. Return None, with nothing changed, if this is not
        possible."""
        self.check_open()
        directory = self._directory
        spec = directory.rows
        if not directory.kernel.appends or spec is None or directory.gate is not None:
            return None
        if directory.words[Word.RESTORES]:  # a restore shifts the numbers of new rows
            return None
        columns = rows.plain_columns(data, spec)  # keeps the tensors alive, even if data changes
        if columns is None:
            return None
        count = data.batch_size[0]
        if count > min(SMALL_BYTES // max(1, spec.row_bytes), largest_reservation(self.max_size)):
            return None
        self._cursor.drop_interrupted()
        written = self._cursor.append([column.data_ptr() for column in columns], count)
        if written is None:
            return None
        return torch.from_numpy(written[0]), torch.from_numpy(written[1])

    def keep_best(
        self,
        data: TensorDictBase,
        rank_key: NestedKey,
        reduction: str,
        priority: np.ndarray | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the given rows that rank among the best of the given and the stored rows.
        :class:`SharedMaxValueWriter` calls this method.

        Args:
            data: ``[n, ...]``.
            rank_key, reduction: see :class:`SharedMaxValueWriter`.
            priority: see :meth:`append`.

        Returns:
            ``(index, generation)``, int64 [n] each; -1 for rows that were not kept.

        Raises:
            ConfigurationError: the rows have no such key, or a rank is NaN. No row was written.
            DeadlineError: other processes were writing rows for ``timeout_s`` without a pause.
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
                        f"{self.timeout_s:g} s without a pause; if one of these processes is "
                        "stopped, continue or kill it"
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
        if self.ndim > 1:
            why = "ndim=2 (rows would be kept one by one, and not line by line)"
        elif self.limiter is not None:
            why = "a limiter (limiters count all rows, but this writer drops some of them)"
        elif words[Word.FRAMES_SET]:
            why = "frames= (only recent frames are kept, but the best rows may be old)"
        elif words[Word.FILLER]:
            why = "a data set of fill_once (no process may extend such a storage)"
        if why:
            raise ConfigurationError(
                f"a SharedMaxValueWriter cannot write to a storage with {why}; use a storage "
                "without it, or build the buffer with writer=SharedCursorWriter()"
            )

    def check_order(self, use: str) -> None:
        if self.ndim > 1:
            raise ConfigurationError(
                f"{use} need rows in the order of writing, but with ndim=2 neighbouring rows "
                "come from different environments; build the storage without ndim=2, call "
                "buffer.extend(data.reshape(-1)), and give each row a trajectory id"
            )
        if self._directory.words[Word.RANKED]:
            raise ConfigurationError(
                f"{use} need rows in the order of writing, but a SharedMaxValueWriter puts a new "
                "row in the slot of a row with a lower rank; store each whole trajectory as one "
                "row (extend with [n, T])"
            )

    def fill_once(self, data: Any, *, rows_at_once: int = 8192) -> None:
        """Write a data set, unless another process of this node has already written it. Each
        process calls this method.

        The first process writes the rows, and the other processes wait for it. The node then has
        the data set only once, regardless of the number of processes. If the writing process ends
        before all rows are written, another process starts over. With ``keep=True`` and
        ``resume=True``, a later job finds the rows. Afterwards, no process may extend the storage.

        Args:
            data: an object that has ``len(data)`` rows, and whose ``data[i:j]`` returns a
                TensorDict ``[j - i]``. ``data`` may be a TensorDict, memory-mapped or not, or a
                ``ReplayBuffer``, such as a data set of TorchRL.
            rows_at_once: the number of rows that are read from ``data`` at once.

        Raises:
            ConfigurationError: the storage has no room for the rows, has a limiter, or has other
                rows; or ``data[i:j]`` did not return ``j - i`` rows.
            DeadlineError: the process that fills the storage wrote nothing for ``timeout_s``.
        """
        self.check_open()
        count, words = len(data), self._directory.words
        if rows_at_once < 1:
            raise ConfigurationError(f"rows_at_once={rows_at_once}: expected at least 1")
        if self.ndim > 1:
            raise ConfigurationError("fill_once needs a storage without ndim=2; leave ndim out")
        if count > self.max_size or self.limiter is not None:
            raise ConfigurationError(
                f"the data set has {count} rows, but the storage has max_size={self.max_size} and "
                f"limiter={self.limiter}; use a storage that has enough room and no limiter, such "
                f"as SharedMemmapStorage({count}, scratch_dir=...)"
            )
        written, deadline = -1, 0.0
        while not self._may_fill():
            if words[Word.FILLER] < 0:
                if self.write_count == count:
                    return
                raise ConfigurationError(
                    f"{self.scratch_dir} was filled with {self.write_count} rows, but this data "
                    f"set has {count}; use one folder per data set, and do not extend a storage "
                    "that fill_once has filled"
                )
            if self.write_count != written:
                written, deadline = self.write_count, time.monotonic() + self.timeout_s
            if time.monotonic() > deadline:
                raise DeadlineError(
                    f"process {self._directory.pid_of(words[Word.FILLER] - 1)}, which fills "
                    f"{self.scratch_dir}, wrote nothing for {self.timeout_s:g} s. If it is "
                    "stopped, continue or kill it; otherwise, pass a larger timeout_s"
                )
            time.sleep(_RETRY_S * 50)
        done = 0
        try:
            self.empty()
            for first in range(0, count, rows_at_once):
                part = data[first : min(first + rows_at_once, count)]
                # TorchRL's buffers store each row's index under this key
                self.append(part.exclude("index") if isinstance(data, ReplayBuffer) else part)
            if self.write_count != count:
                raise ConfigurationError(
                    f"{self.write_count} rows were written to {self.scratch_dir}, but len(data) is "
                    f"{count}. Make data[i:j] return j - i rows, let no process extend the "
                    "storage, and call fill_once again"
                )
            done = -1
        except BaseException:
            self.empty()
            raise
        finally:
            with self._directory.lock():
                words[Word.FILLER] = done

    def _may_fill(self) -> bool:
        """Record that this process fills the storage, unless another process fills or has filled
        it.

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
                    f"{self.scratch_dir} has rows that fill_once did not write; use a new folder "
                    "for the data set"
                )
            directory.words[Word.FILLER] = directory.member + 1
            return True

    def append_columns(
        self, spec: RowSpec, columns: list[np.ndarray], priority: np.ndarray | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append rows, given as columns, [n, ...] per column of ``spec``.

        A host calls this method. The method never waits for the limiter."""
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
        parts = split_rows(count, self.max_size, most, self._cursor.width or 1)
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
        """Shift the numbers that the hidden columns of new rows contain (see ``row.numbers``), so
        that no new row counts as the next step of a row that was written before a restore."""
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
        than copying. Return None if the rows cannot be reserved at once, because other processes
        are writing."""
        taken: list[Reservation] = []
        try:
            return self._write_locked(taken, source, start, count, priority)
        except BaseException:
            for reservation in taken:
                self._cursor.abandon(reservation)
            raise

    def _write_locked(
        self,
        taken: list[Reservation],
        source: Sequence[np.ndarray],
        start: int,
        count: int,
        priority: np.ndarray | None,
    ) -> tuple[np.ndarray, np.ndarray] | None:
        # This is a separate method, so that the lock is never held by the stack frame of
        # ``_append_at_once``, which cleans up after an interrupt, see ``FairLock``.
        with self._directory.lock():
            reservation = self._cursor.try_reserve(count)
            if reservation is None:
                return None
            taken.append(reservation)
            self._copy(reservation, source, start)
            return reservation.slots(), self._cursor.publish_locked(reservation, priority)

    def _warn_of_dropped_rows(self) -> None:
        directory = self._directory
        if directory.words[Word.DROPPED_ROWS]:
            self._warned = True
            warnings.warn(
                f"the rows in {directory.path} have more distinct frames than there is room for, "
                f"so {directory.words[Word.DROPPED_ROWS]} of the oldest rows were dropped. "
                f"{directory.length} of at most {self.max_size} rows are left. Pass a larger "
                "max_size to keep more rows",
                stacklevel=5,
            )

    def _replace(self, index: torch.Tensor, data: TensorDictBase) -> torch.Tensor:
        """See the base class. Each run of neighbouring slots is published in one step or, if it is
        long and rows share frames, in several."""
        self.check_open()
        slots = index.numpy()
        given = self._checked(data)
        # keep the last occurrence of each slot, in slot order
        unique, last = np.unique(slots[::-1], return_index=True)
        order = slots.size - 1 - last
        source: list[np.ndarray | None] = [value[order] for value in given]
        columns = self._spec().columns
        for number, column in enumerate(columns):
            if column in HIDDEN:  # a replaced row keeps its place in its trajectory
                source[number] = None
        self._cursor.drop_interrupted()
        generations = np.empty(unique.size, dtype=np.int64)
        # write a few runs of neighbouring slots at a time, because all processes share a small
        # table of claims
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
        if self.ndim == 1 and self._directory.words[Word.WIDTH]:
            raise other_dimensions(self._directory, 0)  # another process uses ndim=2
        spec = self._directory.rows
        if spec is None:
            self._directory.create_rows(rows.spec_of(data))
            return self._checked(data, numbers)  # checks the dimensions again
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
                "retire_older_than needs a limiter with max_times_sampled, because it marks old "
                "rows as if they had been sampled that often; build the storage with "
                f"limiter=RateLimiter(max_times_sampled=n), where n is at most {MOST_TIMES}"
            )
        if directory.rows is None:
            raise ConfigurationError(
                "no row has been written yet, so it is not known whether rows have "
                f"{version_key!r}; call retire_older_than after the first extend"
            )
        column_of(directory, version_key)
        key = unravel_key(version_key)
        keys = [column.key for column in directory.rows.columns]
        return retire(directory, keys.index((key,) if isinstance(key, str) else key), oldest)

    def empty(self, *, reset_write_count: bool = True) -> None:
        """Drop all rows, for all processes. Afterwards, no row has the slot and generation of an
        earlier row."""
        self.check_open()
        try:
            empty(self._directory, reset_write_count=reset_write_count)
        finally:
            _torchrl.forget_drawn_ahead(self)

    # --- reading -----------------------------------------------------------------------------

    def once_rows_are_published(self, read: Callable[[], _T]) -> _T:
        """Return the result of ``read``. If ``read`` raises NoRowsError, wait for rows that are
        being written, and call ``read`` again.

        Raises:
            NoRowsError: ``read`` raised this error, and no process is writing a row.
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
        """Copy drawn rows so that each copy is one whole published row. The samplers call this
        method.

        After the copy, this method compares the versions of the rows, and replaces rows that have
        changed by newly drawn rows. It repeats this a few times. The last time, it holds the lock,
        because no process can rewrite rows while the lock is held.

        Args:
            whole: whether to draw all rows again if one of them changed, as is needed for slices.
                ``draw`` may then return any number of rows, and any object as ``extra``.
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
        if now.tobytes() == versions.tobytes():  # ten times as fast as comparing arrays
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
                    if stored:  # rows share frames, so copy all rows again
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
            wait: whether to wait for unpublished rows. With ``False``, these rows are omitted.
        """
        self.check_open()
        directory = self._directory
        self._spec()
        high = directory.high
        if slots.size and not (0 <= slots.min() and slots.max() < high):
            raise IndexError(
                f"got slots from {slots.min()} to {slots.max()}, expected slots from 0 to "
                f"{high - 1}; pass an index that sample or extend returned"
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
                    "no process is writing one there. The slots were never written, the buffer "
                    "was emptied, or the process that was writing there died. Read only slots "
                    "that extend or a sample returned"
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
                        f"by other processes for {self.timeout_s:g} s; if one of these processes "
                        "is stopped, continue or kill it"
                    )
                time.sleep(_RETRY_S)
        return slots.size, columns

    def _spec(self) -> RowSpec:
        spec = self._directory.rows
        if spec is None:
            raise IndexError(
                "cannot read from a shared storage to which no row was ever written; extend the "
                "buffer first"
            )
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
            "ndim": self.ndim,
            "attached": self._attached_entities_list,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        attached = state.pop("attached")
        self._attach(**state, resume=False, keep=False)
        set_limiter(self._directory, None)  # use the other processes' limiter
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
            f"tensorclass) with real numbers under rank_key={rank_key!r}, got {kind}; write such "
            "data, or pass another rank_key="
        )
    ranks = reduced(value, reduction)
    if np.isnan(ranks).any():
        raise ConfigurationError(
            f"{np.count_nonzero(np.isnan(ranks))} of {ranks.size} rows have NaN as the {reduction} "
            f"of {rank_key!r}; no row was written. Leave these rows out"
        )
    return ranks


def checked_frames(frames: Mapping[NestedKey, int]) -> dict[tuple[str, ...], int]:
    """Return ``frames=`` with keys as tuples.

    Raises:
        ConfigurationError: ``frames`` does not map keys of rows to numbers of frames.
    """
    found: dict[tuple[str, ...], int] = {}
    for key, stack in frames.items() if isinstance(frames, Mapping) else [(None, 0)]:
        path = _path_of(key) if isinstance(key, (str, tuple)) else ()
        if not path or type(stack) is not int or stack < 1 or (path[0] == "next" and path[1:]):
            raise ConfigurationError(
                f"frames={frames!r}: expected a dictionary from a key to the number of frames in a "
                'value; pass, for example, {"pixels": 4}, which also covers ("next", "pixels")'
            )
        found[path] = stack
    return found
