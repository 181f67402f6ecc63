"""TorchRL's storage for rows that lie in other processes."""

from __future__ import annotations

import secrets
import threading
import time
import warnings
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from tensordict import TensorDictBase, is_tensor_collection
from torchrl.data.replay_buffers.storages import Storage, TensorStorage

from torchrl_dist.errors import ConfigurationError
from torchrl_dist.forks import now_and_in_children
from torchrl_dist.replay.hosts.batches import Batch
from torchrl_dist.replay.hosts.lifetimes import DirectStorage, open_directly
from torchrl_dist.replay.hosts.messages import Empty
from torchrl_dist.replay.hosts.owner import ReplayOwner
from torchrl_dist.replay.hosts.shard import Pace, RemoteShard
from torchrl_dist.replay.hosts.totals_gate import TotalsGate
from torchrl_dist.replay.law.limiter import Counts, RateLimiter
from torchrl_dist.replay.law.placement import as_slots
from torchrl_dist.replay.law.shard_law import global_index, split_index
from torchrl_dist.replay.node.priorities import check_priorities
from torchrl_dist.replay.parts.sampler import (
    SharedSampler,
)
from torchrl_dist.replay.parts.storage import names_an_entry, one_row_each, single
from torchrl_dist.replay.row import _torchrl, rows
from torchrl_dist.replay.row.packing import spec_from_text, unpack
from torchrl_dist.replay.saving.shards import SavedStorage
from torchrl_dist.replay.saving.snapshot import CHUNK_BYTES, SavedShard


class _StorageOfOwner(Storage):
    """In another process it is made anew there, by RPC or over the directory, as is right there."""

    owner: ReplayOwner

    def __reduce__(self) -> tuple[Any, ...]:
        _torchrl.check_copying(self)
        return RemoteStorage, (self.owner,), {"attached": self._attached_entities_list}

    def __setstate__(self, state: dict[str, Any]) -> None:
        _torchrl.arrive_with(self, state["attached"])


class RemoteStorage(
    _StorageOfOwner,
    _torchrl.ChecksBuffers,
    _torchrl.SparseSlots,
    SavedStorage,
    TensorStorage,
):
    """Rows that other processes of the job keep; goes with :class:`RPCPrioritizedSampler`,
    :class:`RPCRandomSampler`, :class:`RPCSamplerWithoutReplacement`, :class:`RPCSliceSampler` or
    :class:`RPCPrioritizedSliceSampler`, and :class:`SharedCursorWriter`, in any TorchRL buffer.

    On the node of a single owner, ``RemoteStorage(owner)`` gives a :class:`SharedMemmapStorage`
    over the owner's directory instead, and the samplers likewise: no RPC then. Pickled and sent to
    another node, it is remote there.

    ``extend`` and ``update_priority`` queue and return. The index that ``extend`` returns (and
    sets in the data) is -1 until the owner has answered, which fills it in; :meth:`flush` waits for
    that. What an operation raises at the owner is raised by a later call. ``len``, reading by
    index, ``empty`` and saving block for a call, which comes after everything queued before.

    Args:
        owner: from :func:`host_replay`.

    Example:
        >>> with session() as me:
        ...     owner = host_replay(me, capacity=1_000, shortcut=False)
        ...     storage = RemoteStorage(owner)
        ...     sampler = RPCRandomSampler(owner=owner)
        ...     buffer = TensorDictReplayBuffer(
        ...         storage=storage, sampler=sampler, writer=SharedCursorWriter(), batch_size=4
        ...     )
        ...     slots = buffer.extend(TensorDict({"obs": torch.zeros(10, 4)}, [10]))
        ...     storage.flush()
        ...     len(storage)
        10
    """

    attaches_when_pickled = True
    """A copy in another process has the same rows; collectors ask before they write there."""

    attaches_by_session = True
    """Only in a process of the session, though."""

    samplers_to_use: ClassVar[Mapping[str, str]] = {
        "": "RPCRandomSampler(owner=owner)",
        "PrioritizedSliceSampler": (
            "RPCPrioritizedSliceSampler({capacity}, {alpha}, {beta}, ..., owner=owner)"
        ),
        "SliceSampler": "RPCSliceSampler(..., owner=owner)",
        "SamplerWithoutReplacement": "RPCSamplerWithoutReplacement(owner=owner)",
        "PrioritizedSampler": (
            "RPCPrioritizedSampler({capacity}, alpha={alpha}, beta={beta}, owner=owner)"
        ),
    }

    def __new__(cls, owner: ReplayOwner) -> Any:
        address = owner.direct()
        if address is not None:
            storage = open_directly(
                address.path,
                address.job_id,
                owner.shard_capacity,
                owner.timeout_s,
                _DirectStorage,
            )
            storage.owner = owner
            return storage
        return super().__new__(cls)

    _pace: Pace | None = None  # of reads

    def __init__(self, owner: ReplayOwner) -> None:
        # the base classes' __init__ would set up the length and revision of rows in this process
        self.owner = owner
        self.max_size = owner.capacity
        self.ndim = 1
        self.checkpointer = None
        self._compilable = False
        self._attached_entities_list: list[Any] = []
        self.device = torch.device("cpu")
        self._handed = threading.local()
        self.emptied = 0  # by this process, see :attr:`SharedMemmapStorage.emptied`
        self._samplers: weakref.WeakSet[SharedSampler] = weakref.WeakSet()
        """That draw ahead from it."""
        self.client = owner.connect()
        self.gate = None if owner.limiter is None else TotalsGate(self.client, owner.limiter)
        now_and_in_children(self, RemoteStorage._renew)

    def _renew(self) -> None:
        for buffer in _torchrl.buffers_over(self):
            _torchrl.renew_after_fork(buffer)

    def check_entry(self) -> None:
        """See :meth:`ReplayClient.check_entry`."""
        self.client.check_entry()

    def flush(self) -> None:
        """Block until the owner has applied everything that this process queued.

        Raises:
            DeadlineError, PeerLostError: the owner does not answer; of several hosts, one that is
                left out has not applied what was queued for it.
            RemoteError: an operation failed there.
        """
        self.client.flush()

    def close(self) -> None:
        """Flush and end this process's use. At the end of the session it happens by itself."""
        self.client.close()

    def cleanup(self) -> bool:
        """TorchRL's name for :meth:`close`."""
        self.close()
        return True

    @property
    def counters(self) -> dict[str, int]:
        """As of one node, summed over the hosts that answer."""
        total: dict[str, int] = {}
        client = self.client
        answering = [shard for shard in range(len(client.links)) if client.answers_now(shard)]
        calls = [(shard, ()) for shard in answering]
        for found in client.call_those_that_answer("counters", calls):
            for name, count in (found or {}).items():
                total[name] = total.get(name, 0) + count
        return total

    # --- size --------------------------------------------------------------------------------

    def __len__(self) -> int:
        return sum(state.length for state in self.client.states())

    @property
    def _len(self) -> int:
        return len(self)

    @property
    def _is_full(self) -> bool:
        return sum(state.high for state in self.client.states()) == self.max_size

    @property
    def initialized(self) -> bool:
        """As of :class:`SharedMemmapStorage`."""
        return True

    @initialized.setter
    def initialized(self, value: bool) -> None:
        pass  # TorchRL's base class stores what is asked of the owner here

    @property
    def shape(self) -> torch.Size:
        return torch.Size([sum(state.high for state in self.client.states())])

    @property
    def write_count(self) -> int:
        """Rows ever written, by all processes."""
        return sum(state.write_count for state in self.client.states())

    @property
    def next_slot(self) -> int:
        """Where the next row goes, with one shard; slot 0 of the buffer with several."""
        if len(self.client.links) > 1:
            return 0
        return self.client.states()[0].cursor % self.max_size

    # --- writing -----------------------------------------------------------------------------

    @property
    def limiter(self) -> RateLimiter | None:
        """What limits samples and writes of all processes."""
        return self.owner.limiter

    @property
    def limiter_counts(self) -> Counts:
        """What the limiter goes by, over the hosts that answer; inserts, samples and size are in
        rows. Blocks for a call, and until what this process queued is applied."""
        self.client.states()
        counts = self.client.counts()
        assert counts is not None
        return counts

    def check_batch(self, batch_size: int | None) -> None:
        """As :meth:`SharedMemmapStorage.check_batch`."""
        if self.limiter is not None and batch_size:
            self.limiter.check_batch(batch_size)

    def append(
        self, data: TensorDictBase, priority: np.ndarray | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Queue rows; see :meth:`SharedMemmapStorage.append`. The handles are -1 until the owner
        has answered. With a limiter of inserts it blocks for a call, and until they are allowed;
        with more rows than a shard has room for, until all of them are written."""
        if not getattr(data, "batch_dims", 0):
            raise ConfigurationError("expected a batch of rows [n, ...], got data without batch")
        if priority is not None:
            check_priorities(priority)
        if self.gate is not None:
            self.gate.wait_to_write(self)
        if data.batch_size[0] <= self.owner.shard_capacity or len(self.client.links) == 1:
            return self.client.write(data, priority)
        return self._append_in_parts(data, priority)

    def _append_in_parts(
        self, data: TensorDictBase, priority: np.ndarray | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """More rows than a shard has room for: a part for each, in turn."""
        count, room = data.batch_size[0], self.owner.shard_capacity
        if self.client.own_shard is not None:
            warnings.warn(
                f"an extend of {count} rows keeps the last {room}: rows of this process go to the "
                f"shard of its node, which has room for {room}; extend with fewer, or build the "
                "buffer with write_to='all'",
                stacklevel=5,
            )
            return self.client.write(data, priority)
        index, generation = (torch.from_numpy(np.full(count, -1, np.int64)) for _ in range(2))
        first = max(0, count - self.max_size)
        parts = []
        for where in np.array_split(np.arange(first, count), -(-(count - first) // room)):
            part = slice(int(where[0]), int(where[-1]) + 1)
            own = None if priority is None else priority[part]
            parts.append((part, self.client.write(data[part], own)))
        self.client.flush()
        for part, handles in parts:
            index[part], generation[part] = handles
        self.client.recent.remember(index, generation, written=True)
        return index, generation

    def write_at(self, index: torch.Tensor, data: TensorDictBase) -> torch.Tensor:
        """Replace whole rows at given indices; blocks. Returns the new generations, int64 [n]."""
        index = as_slots(index)
        index = index if index.ndim == 1 else index.reshape(-1)  # the very tensor is remembered
        if data.batch_size[0] != index.numel():
            raise ConfigurationError(f"{data.batch_size[0]} rows for {index.numel()} slots")
        if (index < 0).any():
            raise IndexError(f"slots must lie in 0 .. {self.max_size - 1}, got {index.min()}")
        generation = torch.empty_like(index)
        parts = self._by_shard(index.numpy())
        spec = self.client.agreed_spec(data)
        columns = rows.matching_columns(data, spec)
        # as ``append`` sends them: of another device, or with a gradient, too
        data = rows.build(rows.tensors(columns, spec), spec, (index.numel(),))
        row_bytes = sum(column.nbytes for column in columns) // max(1, index.numel())
        written = self.client.order_each(
            "write_at",
            [
                (
                    shard,
                    (torch.from_numpy(slots), data[torch.from_numpy(where)]),
                    slots.size * row_bytes,
                )
                for shard, where, slots in parts
            ],
        )
        for (_, where, _), found in zip(parts, written, strict=True):
            generation[torch.from_numpy(where)] = found
        self.client.recent.remember(index, generation, written=True)
        return generation

    def set(self, cursor: Any, data: Any, *, set_cursor: bool = True) -> None:
        """TorchRL's write at given slots, as in ``storage[i] = data``; blocks."""
        if set_cursor:
            self.check_writers()
        if isinstance(data, (list, tuple)):
            data = torch.stack(list(data))
        if not is_tensor_collection(data):
            raise ConfigurationError(f"rows are TensorDicts, got {type(data).__name__}")
        index = self._as_index(cursor)
        if isinstance(cursor, (int, np.integer)):
            data = data.unsqueeze(0)
        self.write_at(index, one_row_each(index, data))

    def empty(self, *, reset_write_count: bool = True) -> None:
        """Drop every row, for all processes; of a host that does not answer, on its return."""
        try:
            self.client.apply_everywhere(Empty(reset_write_count, secrets.randbits(62)))
            self.client.apply_queued()
        finally:
            self._drop_drawn_ahead()

    def _empty(self) -> None:
        pass  # ``ReplayBuffer.empty`` calls writer, sampler and storage: the writer's call did it

    # --- reading -----------------------------------------------------------------------------

    def hand_over(self, batch: Batch) -> None:
        """Keep a drawn batch for the calls with which the buffer follows the draw."""
        self._handed.batch = batch

    def handed_generation(self, index: Any) -> torch.Tensor | None:
        """The generations of the batch with this very index tensor, if it was handed over."""
        batch = getattr(self._handed, "batch", None)
        return batch.generation if batch is not None and batch.index is single(index) else None

    def generations_of(self, index: torch.Tensor) -> torch.Tensor:
        """How often each slot was written; -1 where no row is published, at a shard that does not
        answer, and for -1. Blocks."""
        found = np.full(index.numel(), -1, dtype=np.int64)
        parts = self._by_shard(index.reshape(-1).numpy())
        parts = [part for part in parts if self.client.answers_now(part[0])]
        calls = [(shard, (slots,)) for shard, _, slots in parts]
        for (_, where, _), generations in zip(
            parts, self.client.call_those_that_answer("generations_of", calls), strict=True
        ):
            if generations is not None:
                found[where] = generations
        return torch.from_numpy(found).reshape(index.shape)

    def get(self, index: Any) -> TensorDictBase:
        """Whole rows at the given indices; blocks unless they were just drawn.

        A slice leaves out rows that are not published; its bounds count as in
        :class:`SharedMemmapStorage`, over all shards' slots where there are several. A key, or a
        tuple of them, gives that entry of all rows.

        Raises:
            RemoteError: a slot was never written.
        """
        if names_an_entry(index):
            return self.get(slice(None))[index]
        index = single(index)
        batch = getattr(self._handed, "batch", None)
        if batch is not None and batch.index is index:
            self._handed.batch = None
            return rows.build(batch.tensors, batch.spec, (index.numel(),))
        found = self._as_index(index)
        if isinstance(index, slice) or index is Ellipsis:
            found = found[self.generations_of(found) >= 0]
            return self._read(found.numpy()).lock_()  # what is written to a copy would be lost
        data = self._read(found.reshape(-1).numpy())
        if isinstance(index, (int, np.integer)) or getattr(index, "ndim", 1) == 0:
            return data[0]
        return data.reshape(*found.shape, *data.batch_size[1:]) if found.ndim != 1 else data

    def _as_index(self, index: Any) -> torch.Tensor:
        """Global indices >= 0, int64."""
        several = len(self.client.links) > 1
        if index is Ellipsis:
            index = slice(None)
        if isinstance(index, (slice, range)):
            high = self.max_size if several else self.shape[0]
            span = range(*index.indices(high)) if isinstance(index, slice) else index
            return torch.arange(span.start, span.stop, span.step, device="cpu")
        found = torch.as_tensor(index, device="cpu")
        if found.dtype == torch.bool:
            found = found.nonzero().squeeze(-1)
        found = as_slots(found).reshape(found.shape or (1,))
        if (found < 0).any():
            found = torch.where(found < 0, self._from_the_end(found), found)
        return found

    def _from_the_end(self, index: torch.Tensor) -> torch.Tensor:
        """What -1, -2, ... mean: the last slots that were written, in the order of the shards."""
        states = self.client.states_by_shard()
        high = np.array([0 if state is None else state.high for state in states])
        ends = np.cumsum(high)
        place = index.clamp_max(-1).numpy() + ends[-1]
        if (place < 0).any():
            raise IndexError(f"index {index.min()} counts beyond the {ends[-1]} slots in use")
        shard = np.searchsorted(ends, place, side="right")
        slot = place - (ends - high)[shard]
        return torch.from_numpy(global_index(shard, slot, self.owner.shard_capacity))

    def _read(self, index: np.ndarray) -> TensorDictBase:
        """In parts, each with a deadline of its own: nobody knows how fast the connection is."""
        left = self._by_shard(index) or [(0, index, index)]
        self._pace = pace = self._pace or Pace(self.client.timeout_s, CHUNK_BYTES)
        spec, found, places = None, [], []
        while left:
            most, begin = max(1, pace.bytes // self.client.row_bytes), time.monotonic()
            calls = [(shard, (torch.from_numpy(slots[:most]),)) for shard, _, slots in left]
            for text, packed in self.client.call_each("read", calls):
                own = spec_from_text(text)
                spec = spec or own
                found.append(rows.fitted(unpack(packed), own, spec))
            places += [where[:most] for _, where, _ in left]
            if spec is not None:
                self.client.learn_spec(spec)
            rows_each = max(where.size for where in places[-len(left) :])
            pace.note(begin, rows_each * self.client.row_bytes)
            left = [
                (s, where[most:], slots[most:]) for s, where, slots in left if where.size > most
            ]
        assert spec is not None
        order = np.argsort(np.concatenate(places))
        columns = [np.concatenate(column)[order] for column in zip(*found, strict=True)]
        return rows.build(rows.tensors(columns, spec), spec, (index.size,))

    def _by_shard(self, index: np.ndarray) -> list[tuple[int, np.ndarray, np.ndarray]]:
        """``(shard, positions, slots)`` of the entries >= 0."""
        if index.size and index.max() >= self.max_size:
            raise IndexError(f"index {index.max()} is beyond the capacity {self.max_size}")
        shards, slots = split_index(index, self.owner.shard_capacity)
        positions = [(int(s), np.flatnonzero(shards == s)) for s in np.unique(shards) if s >= 0]
        return [(shard, where, slots[where]) for shard, where in positions]

    def _drop_drawn_ahead(self) -> None:
        """The rows are other ones: no batch drawn before is to be handed out after."""
        self.emptied += 1
        for sampler in list(self._samplers):
            sampler._empty()
        _torchrl.forget_drawn_ahead(self)

    # --- saving ------------------------------------------------------------------------------

    def restore(self, saved: Sequence[SavedShard | None]) -> None:
        try:
            super().restore(saved)
        finally:  # it may have replaced some rows before it failed
            self._drop_drawn_ahead()

    def shards(self) -> list[RemoteShard | None]:
        """Of each host that answers, for saving."""
        self.client.check()
        era = secrets.randbits(62)
        return [
            RemoteShard(self.client, shard, era) if self.client.answers_now(shard) else None
            for shard in range(len(self.client.links))
        ]

    def shard_lost(self, number: int, error: Exception) -> None:
        self.client.note_trouble(number, error)

    def __repr__(self) -> str:
        names = ", ".join(link.name for link in self.client.links)
        return f"{type(self).__name__}(max_size={self.max_size}, hosts=[{names}])"


class _DirectStorage(_StorageOfOwner, DirectStorage):
    """What ``RemoteStorage(owner)`` gives on the owner's node."""

    attaches_by_session = True

    def flush(self) -> None:
        """Nothing is queued here."""
