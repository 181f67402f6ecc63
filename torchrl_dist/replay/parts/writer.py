"""The writer that many processes share."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import NestedKey, TensorDict, TensorDictBase, is_tensor_collection
from torchrl.data.replay_buffers.storages import Storage
from torchrl.data.replay_buffers.writers import Writer

from torchrl_dist import own_files
from torchrl_dist.errors import ConfigurationError
from torchrl_dist.replay.law.placement import as_slots, coordinates_of, slots_at
from torchrl_dist.replay.node.ranking import REDUCTIONS
from torchrl_dist.replay.parts.base import check_rows, joined_rows
from torchrl_dist.replay.row import _torchrl, rows, trees

_MARKS = 32


class SharedCursorWriter(Writer):
    """Round-robin writer whose cursor, length and generations belong to the storage's directory.

    It replaces ``TensorDictRoundRobinWriter``. Each process reserves its own slots for a write, and
    readers see only whole rows. If a sampled row is overwritten, the new row has another generation
    than ``"index_generation"`` of the sample. A priority computed from the sample can therefore be
    told from a priority of the new row.

    An extend of more than ``max_size`` rows keeps the last ``max_size`` rows. The rows that are not
    kept get the index -1. If each process writes to its own shard of a :class:`RemoteStorage`, an
    extend keeps only as many rows as this shard can hold, and warns. The batch itself is not
    changed.

    Raises:
        ConfigurationError: the storage is neither a :class:`SharedMemmapStorage` nor a
            :class:`RemoteStorage`, or rows do not match the buffer's rows.

    Example:
        >>> storage = SharedMemmapStorage(100, scratch_dir="/dev/shm/example")
        >>> writer, sampler = SharedCursorWriter(), SharedRandomSampler()
        >>> buffer = TensorDictReplayBuffer(
        ...     storage=storage, sampler=sampler, writer=writer, batch_size=4
        ... )
        >>> buffer.extend(TensorDict({"obs": torch.zeros(3, 4)}, [3]))
        tensor([0, 1, 2])
        >>> buffer.sample()["index_generation"]
        tensor([1, 1, 1, 1])
    """

    tracks_generations = True
    writes_shared_rows = True

    def __init__(self) -> None:
        super().__init__(compilable=False)
        self._written: deque[torch.Tensor] = deque(maxlen=_MARKS)

    def register_storage(self, storage: Storage) -> None:
        if not callable(getattr(storage, "append", None)):  # this package's storages have it
            raise ConfigurationError(
                f"SharedCursorWriter writes to a SharedMemmapStorage or RemoteStorage, got "
                f"{type(storage).__name__}; build the buffer with "
                "storage=SharedMemmapStorage(capacity, scratch_dir=...)"
            )
        super().register_storage(storage)
        self._check_buffers()

    def _check_buffers(self) -> None:
        """Raise if a buffer that uses this writer combines unsupported parts."""
        for buffer in _torchrl.buffers_over(self._storage):
            if _torchrl.writer_of(buffer) is self:
                _torchrl.check_buffer(buffer, self._storage)

    def extend(self, data: Sequence[Any], *, priority: np.ndarray | None = None) -> torch.Tensor:
        """Write a batch. Each row becomes visible together with its priority.

        Args:
            data: ``[n, ...]``.
            priority: float64 [n], finite and >= 0. Default: the largest priority seen.

        Returns:
            The slots, int64 [n]; -1 for rows that were not kept.
        """
        if not getattr(data, "batch_size", True):
            raise ConfigurationError("extend takes a batch of rows [n, ...], got one row; use add")
        if not (rows.batch_of(data)[:1].numel() if trees.is_tree(data) else len(data)):
            return torch.zeros((0, 2)[: self._storage.ndim], dtype=torch.int64)
        data = joined_rows(data)
        if self._storage.ndim > 1:
            data = self._storage.flat(data)
        index, generation = self._store(self._without_mark(data), priority)
        self._written.append(index)
        self._announce(index, generation)
        if self._storage.ndim > 1:
            return torch.stack(coordinates_of(index, self._storage.width), -1)
        return index

    def _store(self, data: Any, priority: np.ndarray | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Write rows. Return their index and generation, int64 [n] each; -1 for rows that were not
        kept."""
        return self._storage.append(data, priority)

    def _without_mark(self, data: Any) -> Any:
        """Return ``data`` without the ``"index"`` that TorchRL's buffer set in an earlier
        extend."""
        if type(data) is not TensorDict and not is_tensor_collection(data):  # type() is faster
            return data
        mark = _torchrl.value_of(data, "index")
        width = self._storage.width
        if isinstance(mark, torch.Tensor) and width and mark.shape[1:] == (2,):
            # sorted, because TorchRL's buffers do not set the coordinates in the order of the rows
            mine = slots_at(mark.cpu(), width).sort()[0]
            same = any(torch.equal(mine, each.sort()[0]) for each in list(self._written))
            return data.exclude("index") if same else data
        if mark is None or not isinstance(mark, torch.Tensor) or mark.ndim != len(data.batch_size):
            return data
        if not {"index_generation", "priority_weight"}.isdisjoint(data.keys()):
            return data  # this index is from a sample, not from an extend
        slots = mark.reshape(len(mark), -1)[:, 0].cpu()
        if any(torch.equal(slots, each) for each in list(self._written)):
            return data.exclude("index")
        return data

    def add(self, data: TensorDictBase) -> torch.Tensor:
        check_rows(data)
        index = self.extend(trees.mapped(lambda value: value.unsqueeze(0), data))
        return index if self._storage.ndim > 1 else index.squeeze(0)

    def write_at(self, index: int | torch.Tensor, data: Any) -> torch.Tensor:
        """Replace the rows at given slots without moving the cursor."""
        slots = as_slots(index, self._storage.width)
        if slots.ndim == 0:
            data = trees.mapped(lambda value: value.unsqueeze(0), data)
        flat = slots if slots.ndim == 1 else slots.reshape(-1)  # samplers recognise this tensor
        self._announce(flat, self._storage.write_at(flat, data))
        return slots

    def _announce(self, index: torch.Tensor, generation: torch.Tensor) -> None:
        """Report written rows to the samplers of this process's buffers over the storage."""
        for buffer in _torchrl.buffers_over(self._storage):
            note_written = getattr(_torchrl.sampler_of(buffer), "note_written", None)
            # a sampler with note_written needs no mark_update: publishing has set the priorities
            if note_written is not None:
                note_written(index, generation)
            elif not _torchrl.is_being_built(buffer):  # another thread may be building it
                buffer.mark_update(index)

    def generations_of(self, index: int | torch.Tensor) -> torch.Tensor:
        """Return how many times processes have written each slot.

        The result is -1 for a slot without a published row, and for an index of -1.
        """
        handed = self._storage.handed_generation(index)
        if handed is not None:
            return handed
        self._check_buffers()  # set_sampler does not notify the writer
        width = self._storage.width
        if width and isinstance(index, tuple):
            index = slots_at(torch.stack([torch.as_tensor(part) for part in index], -1), width)
        elif width:
            index = torch.as_tensor(index)
            pairs = index.ndim > 1 and index.shape[-1] == 2
            index = slots_at(index, width) if pairs else index * width
        index = torch.as_tensor(index[0] if isinstance(index, tuple) else index)
        return self._storage.generations_of(index.cpu().long()).to(index.device)

    @property
    def _write_count(self) -> int:
        return self._storage.write_count

    @property
    def _cursor(self) -> int:
        return self._storage.next_slot // (self._storage.width or 1)

    def _empty(self, empty_write_count: bool = True) -> None:
        self._storage.empty(reset_write_count=empty_write_count)

    # The cursor belongs to the directory, so the storage saves and restores the cursor.

    def dumps(self, path: str | Path) -> None:
        own_files.make_folder(path)

    def loads(self, path: str | Path) -> None:
        pass

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        pass

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_written": deque(maxlen=_MARKS)}

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


class SharedMaxValueWriter(SharedCursorWriter):
    """Keep the rows with the highest ranks among the rows that all processes write.

    It replaces ``TensorDictMaxValueWriter``. The rank of a row is a float64: the ``reduction`` of
    its values under ``rank_key``. A new row takes a free slot. If all slots are in use, the new row
    replaces the row with the lowest rank, but only if the new row's rank is higher. A new row with
    the same or a lower rank is not kept. After any number of writes by any processes, the buffer
    therefore holds the ``max_size`` best rows. To keep the best trajectories, store each trajectory
    as one row, that is, extend with ``[n, T]``.

    Pass the same arguments in the buffers of all processes. A write copies the kept rows in parts
    of up to 256 KiB, and holds the lock of the buffer during each part. This writer is therefore
    best if rows are seldom replaced. If a process is killed or interrupted during a write, the rows
    that it was replacing at that moment are lost, and so are the new rows, although ``write_count``
    may count the new rows. Rows that are written by ``buffer[i] = rows`` have ranks like all other
    rows. Do not write while a process restores a checkpoint. If a checkpoint has more rows than
    there is room for, the rows that are left out are not chosen by rank.

    Args:
        rank_key: key of the numbers that rank a row. ``update_if_present`` cannot change these
            numbers.
        reduction: ``"sum"``, ``"mean"``, ``"max"``, ``"min"`` or ``"median"`` (the lower of two
            middle values) over the values of a row.

    Raises:
        ConfigurationError: the arguments differ from those of another process; the storage is not a
            :class:`SharedMemmapStorage`, because shards would each keep their own best rows; or the
            storage has a ``limiter`` or ``frames``. Writes raise this error if rows have no real
            numbers under the key, or have NaN under it, and then write no row. Samplers and
            ``query`` raise this error if they need rows in the order of writing, as slices without
            ``fragmented=True`` do.
        DeadlineError: a write waited too long, because another process was stopped during its own
            write.

    Example:
        >>> storage = SharedMemmapStorage(3, scratch_dir="/dev/shm/example")
        >>> writer = SharedMaxValueWriter(rank_key="score")
        >>> buffer = SharedReplayBuffer(storage=storage, writer=writer, batch_size=4)
        >>> buffer.extend(TensorDict({"score": torch.tensor([5.0, 1.0, 3.0, 2.0, 4.0])}, [5]))
        tensor([ 0, -1,  1, -1,  2])
        >>> buffer.extend(TensorDict({"score": torch.tensor([2.5, 3.5])}, [2]))
        tensor([-1,  1])
    """

    def __init__(self, rank_key: NestedKey = ("next", "reward"), reduction: str = "sum") -> None:
        if reduction not in REDUCTIONS:
            raise ConfigurationError(f"reduction={reduction!r}: expected one of {REDUCTIONS}")
        super().__init__()
        self.rank_key = rank_key
        self.reduction = reduction

    def register_storage(self, storage: Storage) -> None:
        # a storage with an owner is refused, because its copy on another node is a RemoteStorage
        if not hasattr(storage, "keep_best") or hasattr(storage, "owner"):
            raise ConfigurationError(
                "SharedMaxValueWriter writes to a SharedMemmapStorage, got "
                f"{type(storage).__name__}. A storage with hosts is refused, because each shard "
                "would keep its own best rows. Let the processes of one node write to "
                "SharedMemmapStorage(capacity, scratch_dir=...)"
            )
        storage.check_ranked()
        super().register_storage(storage)

    def _store(self, data: Any, priority: np.ndarray | None) -> tuple[torch.Tensor, torch.Tensor]:
        return self._storage.keep_best(data, self.rank_key, self.reduction, priority)

    @property
    def _cursor(self) -> int:
        """The number of slots in use, or 0 if all are in use, as in TorchRL's class."""
        return self._storage.shape[0] % self._storage.max_size

    def __repr__(self) -> str:
        return f"{type(self).__name__}(rank_key={self.rank_key!r}, reduction={self.reduction!r})"
