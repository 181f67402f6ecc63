"""A TorchRL storage for rows in other processes."""

from __future__ import annotations

import secrets
import time
import warnings
import weakref
from collections.abc import Mapping
from operator import itemgetter
from typing import Any, ClassVar

import numpy as np
import torch
from tensordict import NestedKey, TensorDictBase
from torchrl.data.replay_buffers.storages import Storage

from torchrl_dist.errors import ConfigurationError
from torchrl_dist.replay.hosts.lifetimes import DirectStorage, open_directly
from torchrl_dist.replay.hosts.owner import ReplayOwner
from torchrl_dist.replay.hosts.shard import Pace, RemoteShard
from torchrl_dist.replay.hosts.totals_gate import TotalsGate
from torchrl_dist.replay.law.limiter import Counts, RateLimiter
from torchrl_dist.replay.law.shard_law import global_index
from torchrl_dist.replay.node.priorities import check_priorities
from torchrl_dist.replay.parts.base import RowStorage, check_batch
from torchrl_dist.replay.parts.sampler import SharedSampler
from torchrl_dist.replay.row import _torchrl, rows, trees
from torchrl_dist.replay.row.packing import spec_from_text, unpack
from torchrl_dist.replay.saving.snapshot import CHUNK_BYTES


class _StorageOfOwner(Storage):
    """A storage whose pickle contains only its owner. The process that unpickles it builds its own
    storage from the owner."""

    owner: ReplayOwner

    def __reduce__(self) -> tuple[Any, ...]:
        _torchrl.check_copying(self)
        return RemoteStorage, (self.owner,), {"attached": self._attached_entities_list}

    def __setstate__(self, state: dict[str, Any]) -> None:
        _torchrl.arrive_with(self, state["attached"])


class RemoteStorage(_StorageOfOwner, RowStorage):
    """A storage for rows that are in other processes of the job.

    Use it in any TorchRL buffer, with :class:`SharedCursorWriter` and with
    :class:`RPCPrioritizedSampler`, :class:`RPCRandomSampler`,
    :class:`RPCSamplerWithoutReplacement`, :class:`RPCSliceSampler` or
    :class:`RPCPrioritizedSliceSampler`.

    If the buffer has a single host, processes on the host's node do not use RPC. There,
    ``RemoteStorage(owner)`` returns a :class:`SharedMemmapStorage` for the host's directory, and
    the samplers draw from this directory. A copy that is unpickled on another node uses RPC.

    ``extend`` and ``update_priority`` queue their work and return. ``extend`` returns the index,
    and sets it in the data. The index is -1 until the host's answer fills it in; :meth:`flush`
    waits for that answer. If an operation fails at the host, a later call raises the error.
    ``len``, reading by index, ``empty`` and saving block for one or more calls, which the host
    answers after all earlier operations.

    Args:
        owner: the result of :func:`host_replay`.

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

    attaches_by_session = True
    """Whether the process that unpickles a copy must be in the session."""

    samplers_to_use: ClassVar[Mapping[str, str]] = {
        name: form.replace("Shared", "RPC").replace(")", ", owner=owner)").replace("(, ", "(")
        for name, form in DirectStorage.samplers_to_use.items()
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

    _pace: Pace | None = None  # for reads by index

    def __init__(self, owner: ReplayOwner) -> None:
        self.owner = owner
        self._set_up(owner.capacity)
        # How often this process has emptied or restored the buffer, see
        # :attr:`SharedMemmapStorage.emptied`.
        self.emptied = 0
        self._samplers: weakref.WeakSet[SharedSampler] = weakref.WeakSet()
        """The samplers that draw ahead from this storage."""
        self.client = owner.connect()
        self.gate = None if owner.limiter is None else TotalsGate(self.client, owner.limiter)

    def check_entry(self) -> None:
        """See :meth:`ReplayClient.check_entry`."""
        self.client.check_entry()

    def flush(self) -> None:
        """Block until the hosts have applied everything that this process queued.

        Raises:
            DeadlineError: a host did not answer in time, or operations of this process still wait
                for a host that does not answer. These operations stay queued.
            PeerLostError: the only host, or too many of several hosts, are lost.
            RemoteError: an operation failed at a host.
        """
        self.client.flush()

    def close(self) -> None:
        """Flush, and end this process's use of the storage. The end of the session also closes the
        storage."""
        self.client.close()

    @property
    def counters(self) -> dict[str, int]:
        """The same counters as on one node, summed over the hosts that answer."""
        total: dict[str, int] = {}
        client = self.client
        calls: dict[int, Any] = dict.fromkeys(client.answering(), ())
        for found in client.call_each("counters", calls, client.note_trouble).values():
            for name, count in found.items():
                total[name] = total.get(name, 0) + count
        return total

    # --- size --------------------------------------------------------------------------------

    def __len__(self) -> int:
        return sum(state.length for state in self.client.states())

    @property
    def shape(self) -> torch.Size:
        return torch.Size([sum(state.high for state in self.client.states())])

    @property
    def write_count(self) -> int:
        """Number of rows ever written by all processes."""
        return sum(state.write_count for state in self.client.states())

    @property
    def next_slot(self) -> int:
        """The slot of the next row if there is one shard, otherwise 0."""
        if len(self.client.links) > 1:
            return 0
        return self.client.states()[0].cursor % self.max_size

    # --- writing -----------------------------------------------------------------------------

    @property
    def limiter(self) -> RateLimiter | None:
        """The rate limiter of all processes, or None."""
        return self.owner.limiter

    @property
    def limiter_counts(self) -> Counts:
        """The counts that the limiter uses, summed over the hosts.

        Blocks for one call, which the hosts answer after all operations of this process."""
        self.client.states()
        counts = self.client.counts()
        assert counts is not None
        return counts

    def append(
        self, data: TensorDictBase, priority: np.ndarray | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Queue rows, see :meth:`SharedMemmapStorage.append`.

        The returned slots and generations are -1 until the host has answered. If a limiter limits
        writes, ``append`` blocks for one call to the hosts, and then until the limiter admits the
        rows. If one shard cannot hold all rows, ``append`` blocks until the hosts have written
        them."""
        check_batch(data)
        if priority is not None:
            check_priorities(priority)
        if self.gate is not None:
            self.gate.wait_to_write(self)
        if rows.batch_of(data)[0] <= self.owner.shard_capacity or len(self.client.links) == 1:
            return self.client.write(data, priority)
        return self._append_in_parts(data, priority)

    def _append_in_parts(
        self, data: TensorDictBase, priority: np.ndarray | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append more rows than one shard can hold. Parts of the rows go to the shards in turn."""
        count, room = rows.batch_of(data)[0], self.owner.shard_capacity
        if self.client.own_shard is not None:
            warnings.warn(
                f"an extend of {count} rows keeps only the last {room}, because rows of this "
                f"process go to the shard of its node, which has room for {room}; extend with "
                "fewer rows, or build the buffer with write_to='all'",
                stacklevel=5,
            )
            return self.client.write(data, priority)
        index, generation = (torch.from_numpy(np.full(count, -1, np.int64)) for _ in range(2))
        first = max(0, count - self.max_size)
        parts = []
        for where in np.array_split(np.arange(first, count), -(-(count - first) // room)):
            part = slice(int(where[0]), int(where[-1]) + 1)
            own = None if priority is None else priority[part]
            parts.append((part, self.client.write(trees.mapped(itemgetter(part), data), own)))
        self.client.flush()
        for part, handles in parts:
            index[part], generation[part] = handles
        self.client.recent.remember(index, generation, written=True)
        return index, generation

    def _replace(self, index: torch.Tensor, data: TensorDictBase) -> torch.Tensor:
        generation = torch.empty_like(index)
        parts = self.client.by_shard(index.numpy())
        spec = self.client.agreed_spec(data)
        columns = rows.matching_columns(data, spec)
        # rebuilt as in ``append``, because data may be on another device or have gradients
        data = rows.build(rows.tensors(columns, spec), spec, (index.numel(),))
        row_bytes = sum(column.nbytes for column in columns) // max(1, index.numel())
        written = self.client.order_each(
            "write_at",
            {
                shard: (
                    torch.from_numpy(slots),
                    trees.mapped(itemgetter(torch.from_numpy(where)), data),
                )
                for shard, where, slots in parts
            },
            {shard: slots.size * row_bytes for shard, _, slots in parts},
        )
        for shard, where, _ in parts:
            generation[torch.from_numpy(where)] = written[shard]
        self.client.recent.remember(index, generation, written=True)
        return generation

    def _patch(
        self, slots: np.ndarray, generation: np.ndarray, *how: Any
    ) -> tuple[np.ndarray, np.ndarray]:
        """See the base class. Rows in a shard that does not answer are not patched."""
        values, version_key, version, newer = how
        given = dict(values.items(True, True) if isinstance(values, TensorDictBase) else values)
        given = {key: torch.as_tensor(value).detach().cpu() for key, value in given.items()}
        if version is not None:
            version = torch.as_tensor(version).detach().cpu()
        updated, rejected = np.zeros(slots.size, bool), np.zeros(slots.size, bool)
        calls, sizes, places = {}, {}, {}
        for shard, where, own in self.client.by_shard(slots):
            at = torch.from_numpy(where)
            part = {key: _part_of(value, at, slots.size, key) for key, value in given.items()}
            mine = version
            if version is not None and version.ndim:
                mine = _part_of(version, at, slots.size, "version").reshape(-1)
            calls[shard] = (own, generation[where], part, version_key, mine, newer)
            sizes[shard] = sum(value.nbytes for value in part.values())
            places[shard] = where
        found = self.client.order_each("update_if_present", calls, sizes, self.client.note_trouble)
        for shard, (done, refused) in found.items():
            updated[places[shard]], rejected[places[shard]] = done, refused
        return updated, rejected

    def retire(self, oldest: int, version_key: NestedKey) -> int:
        """See the base class. Blocks for one call.

        Raises:
            DeadlineError, PeerLostError: a host did not answer. The other hosts have retired their
                rows.
        """
        calls = {shard: (oldest, version_key) for shard in range(len(self.client.links))}
        return sum(self.client.order_each("retire", calls).values())

    def empty(self, *, reset_write_count: bool = True) -> None:
        """Drop all rows, for all processes. A host that does not answer now will drop its rows when
        it answers again."""
        try:
            self.client.invoke_everywhere("empty", reset_write_count, secrets.randbits(62))
            self.client.apply_queued()
        finally:
            self._drop_drawn_ahead()

    # --- reading -----------------------------------------------------------------------------

    def generations_of(self, index: torch.Tensor) -> torch.Tensor:
        """Return the generation in each slot. Blocks.

        The generation is -1 for an index outside the buffer, for a slot without a published row,
        and in a shard that does not answer."""
        found = np.full(index.numel(), -1, dtype=np.int64)
        known = index.reshape(-1).numpy()
        parts = self.client.by_shard(np.where(known < self.max_size, known, -1))
        calls = {s: (slots,) for s, _, slots in parts if self.client.answers_now(s)}
        answers = self.client.call_each("generations_of", calls, self.client.note_trouble)
        for shard, where, _ in parts:
            if shard in answers:
                found[where] = answers[shard]
        return torch.from_numpy(found).reshape(index.shape)

    def _slots_in(self, span: slice) -> torch.Tensor:
        if len(self.client.links) == 1:
            return super()._slots_in(span)
        if not self._is_from_the_end(span):
            return torch.arange(*span.indices(self.max_size), device="cpu")
        used = self.shape[0]
        return self._from_the_end(torch.arange(*span.indices(used), device="cpu") - used)

    @staticmethod
    def _is_from_the_end(index: slice) -> bool:
        """Return whether a slice counts from the last written slot, as ``-5:`` and ``-5:-2`` do.

        Raises:
            IndexError: one bound counts from the first slot and the other from the last, as in
                ``:-2``. With several shards, such a slice has no clear meaning, because counting
                from the first slot includes unused slots, and counting from the last does not.
        """
        bounds = [bound for bound in (index.start, index.stop) if bound is not None]
        if not any(bound < 0 for bound in bounds):
            return False
        if index.start is None or any(bound >= 0 for bound in bounds):
            raise IndexError(
                f"got the slice {index.start}:{index.stop} of a buffer with several shards, "
                "expected both bounds to count from the end, or neither; name the rows by the "
                "indices that extend returned"
            )
        return True

    def _from_the_end(self, index: torch.Tensor) -> torch.Tensor:
        """Convert -1, -2, ... to the indices of the last written slots, in the order of the
        shards."""
        states = self.client.states_by_shard()
        high = np.array([0 if state is None else state.high for state in states])
        ends = np.cumsum(high)
        place = index.clamp_max(-1).numpy() + ends[-1]
        if (place < 0).any():
            raise IndexError(
                f"index {index.min()} is before the first of the {ends[-1]} slots in use; pass an "
                "index that sample or extend returned"
            )
        shard = np.searchsorted(ends, place, side="right")
        slot = place - (ends - high)[shard]
        return torch.from_numpy(global_index(shard, slot, self.owner.shard_capacity))

    def _rows_at(self, index: np.ndarray, *, wait: bool = True) -> TensorDictBase:
        """Read rows in parts. Each part has its own deadline, because the connection's speed is
        unknown."""
        left = self.client.by_shard(index) or [(0, index, index)]
        self._pace = pace = self._pace or Pace(self.client.timeout_s, CHUNK_BYTES)
        spec, found, places = None, [], []
        while left:
            most, begin = max(1, pace.bytes // self.client.row_bytes), time.monotonic()
            calls = {shard: (torch.from_numpy(slots[:most]),) for shard, _, slots in left}
            for text, packed in self.client.call_each("read", calls).values():
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

    def _drop_drawn_ahead(self) -> None:
        self.emptied += 1
        for sampler in list(self._samplers):
            sampler._empty()
        super()._drop_drawn_ahead()

    # --- saving ------------------------------------------------------------------------------

    def shards(self) -> list[RemoteShard | None]:
        """Return the shards, for saving. A shard is None if its host does not answer."""
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
    """The result of ``RemoteStorage(owner)`` if the buffer has only one host, and this process runs
    on that host's node."""

    attaches_by_session = True

    def flush(self) -> None:
        """Do nothing, because no operations are queued."""


def _part_of(value: torch.Tensor, at: torch.Tensor, count: int, key: Any) -> torch.Tensor:
    """Return the values of some rows.

    Raises:
        ConfigurationError: the number of values is not a multiple of the number of rows.
    """
    if value.numel() % max(1, count):
        raise ConfigurationError(
            f"got values of shape {list(value.shape)} for {key!r}; pass one value per index, that "
            f"is, [{count}, ...]"
        )
    return value.reshape(count, -1)[at] if count else value
