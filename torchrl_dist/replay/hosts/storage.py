"""TorchRL's storage and samplers for rows that lie in other processes."""

from __future__ import annotations

import functools
import itertools
import secrets
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

import numpy as np
import torch
from tensordict import TensorDictBase
from torchrl.data.replay_buffers.samplers import PrioritizedSampler, RandomSampler
from torchrl.data.replay_buffers.storages import Storage, TensorStorage

from torchrl_dist.errors import ConfigurationError, RemoteError, TorchRLDistError
from torchrl_dist.forks import now_and_in_children
from torchrl_dist.replay.hosts.batches import Batch, BatchSource
from torchrl_dist.replay.hosts.client import ReplayClient
from torchrl_dist.replay.hosts.messages import Empty, SetAlpha, UsePriorities
from torchrl_dist.replay.hosts.owner import DirectStorage, ReplayOwner, open_directly
from torchrl_dist.replay.hosts.totals import TotalsGate
from torchrl_dist.replay.law.limiter import Counts, RateLimiter
from torchrl_dist.replay.law.placement import as_slots
from torchrl_dist.replay.law.shard_law import global_index, importance_weights, split_index
from torchrl_dist.replay.node.priorities import check_priorities
from torchrl_dist.replay.parts.sampler import (
    EMPTY,
    SharedPrioritizedSampler,
    SharedRandomSampler,
    SharedSampler,
    checked_exponents,
    exponents_in,
    priorities_for,
)
from torchrl_dist.replay.parts.storage import NoRowsError, check_batch_size
from torchrl_dist.replay.row import _torchrl, rows
from torchrl_dist.replay.row.packing import pack, spec_from_text, unpack
from torchrl_dist.replay.row.spec import RowSpec
from torchrl_dist.replay.saving.snapshot import Chunk, Head, SavedShard
from torchrl_dist.replay.saving.storage import SavedStorage, Sink

_CHUNKS_AHEAD = 2
_CHUNKS_WRITTEN = 16  # what has to reach the disk within the deadline of one call


class RemoteStorage(_torchrl.ChecksBuffers, SavedStorage, TensorStorage):
    """Rows that other processes of the job keep; goes with :class:`RPCPrioritizedSampler` or
    :class:`RPCRandomSampler`, and :class:`SharedCursorWriter`, in any TorchRL buffer.

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
        "PrioritizedSampler": (
            "RPCPrioritizedSampler({capacity}, alpha={alpha}, beta={beta}, owner=owner)"
        ),
    }

    def __new__(cls, owner: ReplayOwner) -> Any:
        address = owner.direct()
        if address is not None:
            storage = open_directly(address, owner, _DirectStorage)
            storage.owner = owner
            return storage
        return super().__new__(cls)

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
        self._samplers: weakref.WeakSet[_RPCSampler] = weakref.WeakSet()
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
            DeadlineError, PeerLostError: the owner does not answer.
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
        return len(self) > 0

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
        leaves = rows.matching_leaves(data, spec)
        # as ``append`` sends them: of another device, or with a gradient, too
        data = rows.build(rows.tensors(leaves, spec), spec, (index.numel(),))
        row_bytes = sum(leaf.nbytes for leaf in leaves) // max(1, index.numel())
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
        index = self._as_index(cursor)
        if isinstance(cursor, (int, np.integer)):
            data = data.unsqueeze(0)
        self.write_at(index, data.expand(index.numel(), *data.batch_size[1:]))

    def empty(self, *, reset_write_count: bool = True) -> None:
        """Drop every row, for all processes; of a host that does not answer, on its return."""
        try:
            self.client.apply_everywhere(Empty(reset_write_count, secrets.randbits(62)))
            self.client.flush()
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
        return batch.generation if batch is not None and batch.index is index else None

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
        :class:`SharedMemmapStorage`, over all shards' slots where there are several.

        Raises:
            RemoteError: a slot was never written.
        """
        batch = getattr(self._handed, "batch", None)
        if batch is not None and batch.index is index:
            self._handed.batch = None
            return rows.build(batch.tensors, batch.spec, (index.numel(),))
        if isinstance(index, tuple) and len(index) == 1:
            index = index[0]
        found = self._as_index(index)
        if isinstance(index, slice) or index is Ellipsis:
            found = found[self.generations_of(found) >= 0]
        data = self._read(found.reshape(-1).numpy())
        if isinstance(index, (int, np.integer)):
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
        parts = self._by_shard(index) or [(0, index, index)]
        calls = [(shard, (torch.from_numpy(slots),)) for shard, _, slots in parts]
        spec, found = None, []
        for text, packed in self.client.call_each("read", calls):
            own = spec_from_text(text)
            spec = spec or own
            found.append(rows.fitted(unpack(packed), own, spec))
        assert spec is not None
        order = np.argsort(np.concatenate([where for _, where, _ in parts]))
        leaves = [np.concatenate(leaf)[order] for leaf in zip(*found, strict=True)]
        return rows.build(rows.tensors(leaves, spec), spec, (index.size,))

    def _by_shard(self, index: np.ndarray) -> list[tuple[int, np.ndarray, np.ndarray]]:
        """``(shard, positions, slots)`` of the entries >= 0."""
        if index.size and index.max() >= self.max_size:
            raise IndexError(f"index {index.max()} is beyond the capacity {self.max_size}")
        shards, slots = split_index(index, self.owner.shard_capacity)
        positions = [(int(s), np.flatnonzero(shards == s)) for s in np.unique(shards) if s >= 0]
        return [(shard, where, slots[where]) for shard, where in positions]

    def _drop_drawn_ahead(self) -> None:
        """The rows are other ones: no batch drawn before is to be handed out after."""
        for sampler in list(self._samplers):
            sampler._empty()

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

    # --- moving between processes ------------------------------------------------------------

    def __reduce__(self) -> tuple[Any, ...]:
        return RemoteStorage, (self.owner,), {"attached": self._attached_entities_list}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._attached_entities_list = state["attached"]

    def __repr__(self) -> str:
        names = ", ".join(link.name for link in self.client.links)
        return f"{type(self).__name__}(max_size={self.max_size}, hosts=[{names}])"


class RemoteShard:
    """A host's directory, for saving: few chunks at a time, so that every call is short.

    Args:
        era: that a restore begins, the same for all shards; see ``HostState``.
        host_writes: a host that sees the folder of a checkpoint writes its rows there itself;
            ``False``, for measurements: they are sent, as by one that does not.
    """

    def __init__(
        self, client: ReplayClient, shard: int, era: int, host_writes: bool = True
    ) -> None:
        self._client = client
        self._shard = shard
        self._era = era
        self._host_writes = host_writes

    def _call(self, method: str, *args: Any) -> Any:
        return self._client.call(self._shard, method, *args)

    def head(self) -> Head:
        return self._call("head")

    def save(self, head: Head, sink: Sink) -> None:
        if head.spec is None:
            return
        folder = sink.folder if self._host_writes else None
        if folder is not None and self._call("reaches", str(folder)):
            self._have_written(str(folder), head, sink)
        else:
            self._fetch(head, sink)

    def _have_written(self, folder: str, head: Head, sink: Sink) -> None:
        ranges, row = head.chunks(), 0
        while some := list(itertools.islice(ranges, _CHUNKS_WRITTEN)):
            try:
                chunks: list[Chunk] = self._call(
                    "save_chunks_to", folder, row, head.cursor, head.alpha, some
                )
            except RemoteError as error:
                cause = error.__cause__
                if isinstance(cause, OSError) and not isinstance(cause, TorchRLDistError):
                    where = f"{cause.strerror} (in {error.peer} on {error.host})"
                    raise OSError(cause.errno, where) from error
                raise
            for chunk in chunks:
                sink.append(chunk)
                row += chunk.leaf.size

    def _fetch(self, head: Head, sink: Sink) -> None:
        def ask(chunk: tuple[int, int]) -> Any:
            return self._call("save_chunk", head.cursor, head.alpha, *chunk)

        assert head.spec is not None
        # the next chunks are on their way while one is being written
        with ThreadPoolExecutor(_CHUNKS_AHEAD, "torchrl_dist-checkpoint") as pool:
            chunks = head.chunks()
            asked = deque(
                pool.submit(ask, each) for each in itertools.islice(chunks, _CHUNKS_AHEAD)
            )
            while asked:
                chunk, packed = asked.popleft().result()
                asked.extend(pool.submit(ask, each) for each in itertools.islice(chunks, 1))
                sink.write(unpack(packed))
                sink.append(chunk)

    def make_room(self, spec: RowSpec) -> None:
        self._client.order(self._shard, "make_room", spec)

    def begin_restore(self, head: Head) -> int:
        return self._client.order(self._shard, "begin_restore", head, self._era)

    def restore_rows(
        self,
        since: int,
        slot: int,
        version: int,
        leaf: np.ndarray,
        alpha: float | None,
        arrays: list[np.ndarray],
    ) -> None:
        packed = pack(arrays, copy=False)
        size = sum(part.nbytes for part in packed)
        self._client.order(
            self._shard, "restore_rows", since, slot, version, leaf, alpha, packed, size=size
        )


class _DirectStorage(DirectStorage):
    """What ``RemoteStorage(owner)`` gives on the owner's node."""

    owner: ReplayOwner
    attaches_by_session = True

    def flush(self) -> None:
        """Nothing is queued here."""

    def __reduce__(self) -> tuple[Any, ...]:
        return RemoteStorage, (self.owner,), {"attached": self._attached_entities_list}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._attached_entities_list = state["attached"]


class _RPCSampler(SharedSampler):
    """What both samplers have in common: batches that come from a client of the owner."""

    _prioritized: bool

    def _set_owner(self, owner: ReplayOwner, prefetch: int, batches_per_call: int) -> None:
        if prefetch < 0 or batches_per_call < 1:
            raise ConfigurationError(
                f"prefetch={prefetch}, batches_per_call={batches_per_call}: expected at least 0 "
                "and 1"
            )
        if batches_per_call > max(1, prefetch):
            raise ConfigurationError(
                f"batches_per_call={batches_per_call} draws ahead of use: prefetch at least as "
                f"many batches, got prefetch={prefetch}"
            )
        self.owner = owner
        self._prefetch = prefetch
        self._batches_per_call = batches_per_call
        self._storage: RemoteStorage | None = None
        self._source: BatchSource | None = None

    def attach(self, storage: Storage) -> RemoteStorage:
        """Bind to the storage's client; called when the buffer is built. Idempotent."""
        if self._storage is not None and self._storage is storage:
            return self._storage
        if not isinstance(storage, RemoteStorage) or storage.owner != self.owner:
            raise ConfigurationError(
                f"{type(self).__name__} samples from RemoteStorage(owner) with its own owner, got "
                f"{type(storage).__name__}: pass the same owner to both"
            )
        self._prepare(storage)
        self._storage = storage
        self._source = BatchSource(
            storage.client,
            prioritized=self._prioritized,
            prefetch=self._prefetch,
            batches_per_call=self._batches_per_call,
            uniforms=self._uniforms,
        )
        storage._samplers.add(self)
        return storage

    def _prepare(self, storage: RemoteStorage) -> None:
        """Before the first draw."""

    def _next(self, storage: Storage, batch_size: int) -> Batch:
        remote = self.attach(storage)
        source, gate = self._source, remote.gate
        assert source is not None

        if gate is None:
            batch = source.next(batch_size)
        else:
            batch = gate.sample(batch_size, source, remote)
        remote.hand_over(batch)
        return batch

    def _no_rows(self, storage: Storage, batch_size: int) -> torch.Tensor:
        """The index of a batch of 0 rows, which TorchRL draws, too."""
        check_batch_size(batch_size)
        if not len(self.attach(storage)):
            raise NoRowsError(EMPTY)
        return torch.empty(0, dtype=torch.int64)

    def can_sample(self, storage: Storage, batch_size: int) -> bool:
        """Whether ``sample`` would begin at once. Blocks for a call."""
        remote = self.attach(storage)
        source, gate = self._source, remote.gate
        assert source is not None
        return len(remote) > 0 and (gate is None or gate.can_sample(batch_size, source))

    def note_written(self, index: torch.Tensor, generation: torch.Tensor) -> None:
        pass  # the client notes them when they are known

    def _empty(self) -> None:
        if self._source is not None:
            self._source.drop()

    def _rebuild(self) -> Any:
        """A function that makes this sampler again, in any process."""
        raise NotImplementedError

    def __reduce__(self) -> tuple[Any, ...]:
        return self._rebuild(), ()


class RPCRandomSampler(_RPCSampler, RandomSampler):
    """Uniform sampling with replacement of rows that other processes keep.

    With several shards each row of each has the same probability, by the lengths in the replies
    to the very batch. On the node of a single owner this is a :class:`SharedRandomSampler`.

    Args:
        owner: the storage's.
        prefetch, batches_per_call: see :class:`RPCPrioritizedSampler`.

    Example:
        >>> with session() as me:
        ...     owner = host_replay(me, capacity=1_000, shortcut=False)
        ...     sampler = RPCRandomSampler(owner=owner, prefetch=0)
        ...     buffer = TensorDictReplayBuffer(
        ...         storage=RemoteStorage(owner), sampler=sampler, writer=SharedCursorWriter()
        ...     )
        ...     slots = buffer.extend(TensorDict({"obs": torch.zeros(10, 4)}, [10]))
        ...     buffer.sample(8)["obs"].shape
        torch.Size([8, 4])
    """

    _prioritized = False

    def __new__(cls, *, owner: ReplayOwner, prefetch: int = 2, batches_per_call: int = 1) -> Any:
        if owner.direct() is not None:
            return _DirectRandomSampler(owner, prefetch, batches_per_call)
        return super().__new__(cls)

    def __init__(self, *, owner: ReplayOwner, prefetch: int = 2, batches_per_call: int = 1) -> None:
        super().__init__()
        self._setup()
        self._set_owner(owner, prefetch, batches_per_call)

    def sample(self, storage: Storage, batch_size: int) -> tuple[torch.Tensor, dict[Any, Any]]:
        """Returns global indices, int64 [batch_size], and no further information."""
        if batch_size < 1:
            return self._no_rows(storage, batch_size), {}
        return self._next(storage, batch_size).index, {}

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._empty()

    def _rebuild(self) -> Any:
        return functools.partial(
            RPCRandomSampler,
            owner=self.owner,
            prefetch=self._prefetch,
            batches_per_call=self._batches_per_call,
        )


class _DirectRandomSampler(SharedRandomSampler):
    """What ``RPCRandomSampler`` gives on the owner's node."""

    def __init__(self, owner: ReplayOwner, prefetch: int, batches_per_call: int) -> None:
        super().__init__()
        self._remote = functools.partial(
            RPCRandomSampler, owner=owner, prefetch=prefetch, batches_per_call=batches_per_call
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return self._remote, ()


class RPCPrioritizedSampler(_RPCSampler, PrioritizedSampler):
    """Proportional prioritized sampling of rows that other processes keep.

    The law, the weights and the defaults are those of :class:`SharedPrioritizedSampler`. With
    several shards they are still those of one buffer that holds all rows: row ``i`` is drawn with
    probability ``p_i / sum(p)`` over all shards, exactly, for the sums that the shards' replies
    to the very batch report, and has the weight ``(p_i / min(p)) ** -beta`` with the minimum over
    all shards (``shard_law`` has the proof). On the node of a single owner this is a
    :class:`SharedPrioritizedSampler` over the owner's directory.

    One call per batch returns rows, indices and weights, and carries this process's priorities
    along. With ``prefetch=0`` a batch reflects all that this process wrote before; otherwise an
    operation shows at the latest ``prefetch + batches_per_call`` batches later. Random numbers are
    drawn at the owner, so that ranks with equal seeds draw different batches.

    Args:
        max_capacity: the buffer's capacity in rows, over all shards.
        alpha: priority exponent, >= 0; shared by all processes, which must agree on it.
        beta: exponent of the importance weights, >= 0; belongs to this process, and is applied
            when a batch is used, not when it is drawn.
        eps, dtype, reduction: as in :class:`SharedPrioritizedSampler`.
        owner: the storage's.
        prefetch: batches to draw ahead, which hides the round trip: once less than half of them
            are left, one call asks for the rest.
        batches_per_call: the fewest in such a call, at most ``prefetch``: fewer messages, older
            rows.

    Raises:
        ConfigurationError: as :class:`SharedPrioritizedSampler`.
        RuntimeError: from ``sample``, if no row is published.
        DeadlineError, PeerLostError: from any call, if the owner, or too many of several, do not
            answer.

    Example:
        >>> with session() as me:
        ...     owner = host_replay(me, capacity=1_000, shortcut=False)
        ...     sampler = RPCPrioritizedSampler(1_000, alpha=0.6, beta=0.4, owner=owner)
        ...     buffer = TensorDictReplayBuffer(
        ...         storage=RemoteStorage(owner), sampler=sampler, writer=SharedCursorWriter()
        ...     )
        ...     slots = buffer.extend(TensorDict({"obs": torch.zeros(10, 4)}, [10]))
        ...     batch = buffer.sample(8)
        ...     batch["td_error"] = torch.rand(8)
        ...     buffer.update_tensordict_priority(batch)
        ...     batch["priority_weight"].shape
        torch.Size([8])
    """

    _prioritized = True

    def __new__(
        cls,
        max_capacity: int,
        alpha: float,
        beta: float,
        eps: float = 1e-8,
        dtype: torch.dtype = torch.float,
        reduction: str = "max",
        *,
        owner: ReplayOwner,
        prefetch: int = 2,
        batches_per_call: int = 1,
    ) -> Any:
        if owner.direct() is not None:
            return _DirectPrioritizedSampler(
                max_capacity, alpha, beta, eps, dtype, reduction, owner, prefetch, batches_per_call
            )
        return super().__new__(cls)

    def __init__(
        self,
        max_capacity: int,
        alpha: float,
        beta: float,
        eps: float = 1e-8,
        dtype: torch.dtype = torch.float,
        reduction: str = "max",
        *,
        owner: ReplayOwner,
        prefetch: int = 2,
        batches_per_call: int = 1,
    ) -> None:
        # PrioritizedSampler.__init__ would build process-local trees
        self._alpha, self._beta, self._eps = checked_exponents(alpha, beta, eps)
        if max_capacity != owner.capacity:
            raise ConfigurationError(
                f"the sampler has capacity {max_capacity}, its owner {owner.capacity} over "
                f"{len(owner.hosts)} hosts"
            )
        self._max_capacity = max_capacity
        self.dtype = dtype
        self.reduction = reduction
        self._setup()
        self._set_owner(owner, prefetch, batches_per_call)

    def _prepare(self, storage: RemoteStorage) -> None:
        client = storage.client
        client.apply_everywhere(UsePriorities(self._alpha, self._eps))
        try:
            client.flush()
        except RemoteError:  # of one host; the others have refused for the same reason
            for link in client.links:
                link.failure()
            raise

    @property
    def alpha(self) -> float:
        """The priority exponent, shared by all processes; set here, it is changed everywhere.
        Reading it blocks for a call."""
        if self._storage is not None:
            self._alpha = self._storage.client.states()[0].alpha
        return self._alpha

    @alpha.setter
    def alpha(self, value: float) -> None:
        self._alpha = checked_exponents(value, 0.0, self._eps)[0]
        if self._storage is not None:
            self._storage.client.apply_everywhere(SetAlpha(self._alpha))

    @property
    def beta(self) -> float:
        """Exponent of the importance weights; of this process."""
        return self._beta

    @beta.setter
    def beta(self, value: float) -> None:
        self._beta = value

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def _max_priority(self) -> tuple[float | None, int | None]:
        if self._storage is None:
            return None, None
        found = [state.max_priority for state in self._storage.client.states()]
        return max((value for value in found if value == value), default=None), None

    @property
    def default_priority(self) -> float:
        """The largest priority seen, 1 before any; blocks for a call."""
        raw = self._max_priority[0]
        return 1.0 if raw is None else raw

    def _maybe_init_from_storage(self, storage: Storage | None) -> None:
        if storage is not None:
            self.attach(storage)

    def sample(self, storage: Storage, batch_size: int) -> tuple[torch.Tensor, dict[Any, Any]]:
        """Returns ``(index, {"priority_weight": weight})``: int64 and float32, [batch_size]."""
        if batch_size < 1:
            return self._no_rows(storage, batch_size), {"priority_weight": torch.empty(0)}
        batch = self._next(storage, batch_size)
        remote = self._storage
        assert remote is not None
        remote.client.recent.remember(batch.index, batch.generation, written=False)
        weight = importance_weights(batch.leaf.numpy(), np.array(batch.minimum), self._beta)
        return batch.index, {"priority_weight": torch.from_numpy(weight)}

    def add(self, index: torch.Tensor | int) -> None:
        pass  # publishing did it

    def extend(self, index: torch.Tensor | tuple[Any, ...]) -> None:
        pass

    @torch.no_grad()
    def update_priority(
        self,
        index: int | torch.Tensor,
        priority: float | torch.Tensor,
        *,
        storage: Storage | None = None,
        generation: torch.Tensor | None = None,
    ) -> None:
        """Queue priorities for rows; see :meth:`SharedPrioritizedSampler.update_priority`."""
        remote = self._storage if storage is None else self.attach(storage)
        if remote is None:
            raise ConfigurationError(
                "the sampler is not bound to a storage yet: update priorities through the "
                "replay buffer, or pass storage="
            )
        if any(
            _torchrl.sampler_of(buffer) is self and _torchrl.is_being_built(buffer)
            for buffer in _torchrl.buffers_over(remote)
        ):
            return  # a process that joins must not reset what the others share
        if not isinstance(index, torch.Tensor):
            index = as_slots(index)
        raw = priorities_for(index, priority)
        check_priorities(raw)
        if generation is not None:
            generation = generation.detach().cpu().reshape(-1)
        if index.dtype != torch.int64 or index.device.type != "cpu" or index.ndim != 1:
            index = as_slots(index).reshape(-1)
        remote.client.set_priorities(index, generation, raw)

    def mark_update(self, index: int | torch.Tensor, *, storage: Storage | None = None) -> None:
        """Give rows the default priority, as after a change of their content."""
        self.update_priority(index, self.default_priority, storage=storage)

    def state_dict(self) -> dict[str, Any]:
        return {"_alpha": self.alpha, "_beta": self._beta, "_eps": self._eps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        alpha, beta = exponents_in(state_dict)
        self._empty()
        self.alpha = alpha
        self._beta = beta

    def _rebuild(self) -> Any:
        return functools.partial(
            RPCPrioritizedSampler,
            self._max_capacity,
            self.alpha,
            self._beta,
            self._eps,
            self.dtype,
            self.reduction,
            owner=self.owner,
            prefetch=self._prefetch,
            batches_per_call=self._batches_per_call,
        )

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(alpha={self._alpha}, beta={self._beta}, eps={self._eps}, "
            f"reduction={self.reduction!r})"
        )


class _DirectPrioritizedSampler(SharedPrioritizedSampler):
    """What ``RPCPrioritizedSampler`` gives on the owner's node."""

    def __init__(
        self,
        max_capacity: int,
        alpha: float,
        beta: float,
        eps: float,
        dtype: torch.dtype,
        reduction: str,
        owner: ReplayOwner,
        prefetch: int,
        batches_per_call: int,
    ) -> None:
        super().__init__(max_capacity, alpha, beta, eps, dtype, reduction)
        self._elsewhere = owner, prefetch, batches_per_call

    def __reduce__(self) -> tuple[Any, ...]:
        owner, prefetch, batches_per_call = self._elsewhere
        rebuild = functools.partial(
            RPCPrioritizedSampler,
            self._max_capacity,
            self.alpha,
            self._beta,
            self._eps,
            self.dtype,
            self.reduction,
            owner=owner,
            prefetch=prefetch,
            batches_per_call=batches_per_call,
        )
        return rebuild, ()
