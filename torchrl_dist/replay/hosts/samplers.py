"""Samplers for rows in other processes.

Each sampler inherits from a sampler for one node, but gets its batches from a client of the hosts.
If a buffer has a single host, processes on the host's node use the host's directory. In these
processes, the sampler draws from the directory, like its base class.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torchrl.data.replay_buffers.storages import Storage

from torchrl_dist.errors import ConfigurationError, RemoteError
from torchrl_dist.replay.hosts.batches import BatchSource
from torchrl_dist.replay.hosts.messages import PRIORITIZED, UNIFORM, Law, SliceLaw
from torchrl_dist.replay.hosts.owner import ReplayOwner
from torchrl_dist.replay.hosts.passes import PassSource
from torchrl_dist.replay.hosts.storage import RemoteStorage
from torchrl_dist.replay.node.priorities import check_generations, check_priorities
from torchrl_dist.replay.parts.drawn import Drawn
from torchrl_dist.replay.parts.passes import OVER, PassOverError, SharedSamplerWithoutReplacement
from torchrl_dist.replay.parts.sampler import (
    EMPTY,
    SharedPrioritizedSampler,
    SharedRandomSampler,
    SharedSampler,
)
from torchrl_dist.replay.parts.slices import (
    SharedPrioritizedSliceSampler,
    SharedSliceSampler,
    shape_of,
)
from torchrl_dist.replay.parts.storage import NoRowsError, check_batch_size
from torchrl_dist.replay.row.spec import RowSpec


class _SamplerOfOwner(SharedSampler):
    """The base of the samplers for rows in other processes. Such a sampler is bound either
    to a directory, as every SharedSampler is, or to a client."""

    _prioritized = False

    def __init__(
        self,
        *args: Any,
        owner: ReplayOwner,
        prefetch: int | None = None,
        batches_per_call: int = 1,
        **options: Any,
    ) -> None:
        super().__init__(*args, **options)
        self._set_owner(owner, prefetch, batches_per_call)

    def _set_owner(self, owner: ReplayOwner, prefetch: int | None, batches_per_call: int) -> None:
        """Record the owner and the options."""
        if (prefetch is not None and prefetch < 0) or batches_per_call < 1:
            raise ConfigurationError(
                f"prefetch={prefetch}, batches_per_call={batches_per_call}: expected prefetch of "
                "at least 0, and batches_per_call of at least 1"
            )
        if prefetch is not None and batches_per_call > max(1, prefetch):
            raise ConfigurationError(
                f"batches_per_call={batches_per_call} draws that many batches ahead, but "
                f"prefetch={prefetch} allows fewer; pass prefetch= of at least batches_per_call"
            )
        self.owner = owner
        self._prefetch = prefetch
        self._batches_per_call = batches_per_call

    def _setup(self) -> None:
        super()._setup()
        self._storage: RemoteStorage | None = None
        self._source: Any = None  # a BatchSource, or a PassSource

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_storage": None, "_source": None}

    @property
    def batches_ahead(self) -> int:
        """The number of batches that are drawn ahead at present, see ``prefetch``."""
        return 0 if self._source is None else self._source.batches_ahead

    def attach(self, storage: Storage) -> Any:
        """Bind to the storage's client or directory. The buffer's constructor calls this method.

        Idempotent."""
        if self._directory is not None:
            return super().attach(storage)
        if self._storage is not None and self._storage is storage:
            return self._storage
        if getattr(storage, "owner", None) != self.owner:
            raise ConfigurationError(
                f"{type(self).__name__} can sample only from a RemoteStorage with the same owner= "
                f"as the sampler, got a {type(storage).__name__} without this owner; pass the same "
                "owner to the sampler and to the storage"
            )
        if not isinstance(storage, RemoteStorage):  # on the node of a single host
            return super().attach(storage)
        if getattr(self, "_max_priority_within_buffer", False):
            raise ConfigurationError(
                "max_priority_within_buffer=True does not work over hosts, where new rows get the "
                "largest priority ever set, because no host knows the priorities of the other "
                "hosts; leave it out, or pass priorities when you write rows"
            )
        self._check_limiter(storage)
        self._prepare(storage)
        self._storage = storage
        self._source = self._new_source(storage)
        storage._samplers.add(self)
        return storage

    def _new_source(self, storage: RemoteStorage) -> Any:
        """Return a new source of batches."""
        return BatchSource(
            storage.client,
            law=self._law,
            prefetch=self._prefetch,
            batches_per_call=self._batches_per_call,
            uniforms=self._uniforms,
        )

    def _prepare(self, storage: RemoteStorage) -> None:
        """Prepare the first draw."""

    def _law(self, batch_size: int) -> tuple[Law, int]:
        """Return the law for a batch of that many rows, and its number of units."""
        if self._window is None:
            return PRIORITIZED if self._prioritized else UNIFORM, batch_size
        return Law(self._prioritized, window=self._window), batch_size // self._window.size

    def _ask_for_numbers(self) -> None:
        if self._storage is None:
            super()._ask_for_numbers()
        else:
            self._invoke(self._storage, "number_rows")

    def _invoke(self, storage: RemoteStorage, method: str, *args: Any) -> None:
        """Call a method of all hosts, and wait until they have run it."""
        client = storage.client
        client.invoke_everywhere(method, *args)
        try:
            client.apply_queued()
        except RemoteError:  # drop the other hosts' errors, which have the same reason
            for link in client.links:
                link.failure()
            raise

    def _completed(self, batch: Drawn, count: int) -> Drawn:
        """Return a batch of ``count`` rows in the form in which the base class draws it."""
        return batch

    def _next(self, storage: Storage, batch_size: int) -> Drawn:
        remote = self.attach(storage)
        if self._source is None:
            return super()._next(storage, batch_size)
        count = self._rows_of(batch_size)
        if count < 1:  # TorchRL also draws batches of 0 rows
            check_batch_size(count)
            if not len(remote):
                raise NoRowsError(EMPTY)
            nothing = torch.empty(0, dtype=torch.int64)
            return Drawn(RowSpec(()), nothing, nothing, np.empty(0), [])
        source, gate = self._source, remote.gate
        batch = source.next(count) if gate is None else gate.sample(count, source, remote)
        batch = self._completed(batch, count)
        remote.hand_over(batch)
        return batch

    def can_sample(self, storage: Storage, batch_size: int) -> bool:
        """Return whether ``sample`` could begin now. Over hosts, this method blocks for one
        call."""
        remote = self.attach(storage)
        if self._source is None:
            return super().can_sample(storage, batch_size)
        gate = remote.gate
        count = self._rows_of(batch_size)
        return len(remote) > 0 and (gate is None or gate.can_sample(count, self._source))

    def note_written(self, index: torch.Tensor, generation: torch.Tensor) -> None:
        if self._source is None:  # otherwise the client notes rows when the host answers
            super().note_written(index, generation)

    def _empty(self) -> None:
        super()._empty()
        if self._source is not None:
            self._source.drop()


class RPCRandomSampler(_SamplerOfOwner, SharedRandomSampler):
    """Sample rows of other processes uniformly with replacement.

    Every row of all shards has the same probability. The number of rows of a shard is the one that
    the shard reports in its reply for the batch. If the buffer has only one host, and this process
    runs on this host's node, the sampler works as a :class:`SharedRandomSampler`.

    Args:
        owner: the storage's owner.
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


class RPCPrioritizedSampler(_SamplerOfOwner, SharedPrioritizedSampler):
    """Sample rows of other processes in proportion to their priorities.

    Law, weights and defaults are those of :class:`SharedPrioritizedSampler`. With several shards,
    law and weights are those of one buffer that holds all rows. Row ``i`` is drawn with probability
    exactly ``p_i / sum(p)``, given the sums in the shards' replies for that batch. Its weight is
    ``(p_i / min(p)) ** -beta``. The sum and the minimum are over all shards (``shard_law`` has the
    proof). If the buffer has only one host, and this process runs on this host's node, the sampler
    works as a :class:`SharedPrioritizedSampler` over the host's directory.

    One call per batch sends this process's priorities, and returns rows, indices and weights. With
    ``prefetch=0``, a batch reflects everything that this process wrote before. With other values,
    an operation takes effect at most ``batches_ahead + batches_per_call`` batches later. If this
    process sets a row's priority above all earlier priorities, new rows in other shards get this
    priority only after the row's host has answered, because the host drops the priority if the row
    was overwritten. Hosts draw the random numbers, so ranks with equal seeds draw different
    batches.

    Args:
        max_capacity: the buffer's capacity in rows, over all shards.
        alpha: priority exponent, >= 0. All processes share the exponent, and must pass the same
            value.
        beta: exponent of the importance weights in this process, >= 0. A change also applies to
            batches that were drawn ahead.
        eps, dtype, reduction: as in :class:`SharedPrioritizedSampler`.
        owner: the storage's owner.
        prefetch: number of batches to draw ahead, so that the learner does not wait for the round
            trip. Once less than half of these batches are left, one call asks for the missing
            batches. Default: two, or ``batches_per_call`` if that is more. If the round trip takes
            2 ms or more, the number grows until the learner no longer waits for the round trip, up
            to 256 batches and 16 MiB. With a rate limiter, the number does not grow. The attribute
            ``batches_ahead`` is the current number.
        batches_per_call: the smallest number of batches that a call asks for, at most ``prefetch``.
            A larger number saves messages, but makes rows older.

    Raises:
        ConfigurationError: as :class:`SharedPrioritizedSampler`.
        RuntimeError: from ``sample``, if no row is published.
        DeadlineError, PeerLostError: from any call, if fewer than ``owner.min_shards`` hosts
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
        prefetch: int | None = None,
        batches_per_call: int = 1,
    ) -> None:
        SharedPrioritizedSampler.__init__(self, max_capacity, alpha, beta, eps, dtype, reduction)
        self._set_owner(owner, prefetch, batches_per_call)

    def _set_owner(self, owner: ReplayOwner, *ahead: Any) -> None:
        if self._max_capacity != owner.capacity:
            raise ConfigurationError(
                f"the sampler has capacity {self._max_capacity}, but the buffer of its owner has "
                f"{owner.capacity} over {len(owner.hosts)} hosts; pass max_capacity=owner.capacity"
            )
        super()._set_owner(owner, *ahead)

    def _prepare(self, storage: RemoteStorage) -> None:
        self._invoke(storage, "use_priorities", self._alpha, self._eps)
        self._recent = storage.client.recent

    def _alpha_now(self) -> float:
        if self._storage is not None:
            self._alpha = self._storage.client.states()[0].alpha
        return super()._alpha_now()

    def _share_alpha(self, value: float) -> None:
        super()._share_alpha(value)
        if self._storage is not None:
            self._storage.client.invoke_everywhere("set_alpha", value)

    @property
    def _max_priority(self) -> tuple[float | None, int | None]:
        if self._storage is None:
            return super()._max_priority
        found = [state.max_priority for state in self._storage.client.states()]
        return max((value for value in found if value == value), default=None), None

    def _update(
        self, index: torch.Tensor, generation: torch.Tensor | None, priority: np.ndarray
    ) -> None:
        if self._storage is None:
            super()._update(index, generation, priority)
            return
        check_priorities(priority)
        if generation is not None:
            check_generations(generation.numel(), priority.size)
        self._storage.client.set_priorities(index, generation, priority)


class _SlicesOfOwner(_SamplerOfOwner, SharedSliceSampler):
    """The base of the samplers of slices. Each host chooses slices among its own rows."""

    def _set_owner(self, owner: ReplayOwner, *ahead: Any) -> None:
        if self._by_end:
            raise ConfigurationError(
                "rows that come by RPC do not say which process wrote them, so flags at the ends "
                "of episodes cannot distinguish trajectories; write trajectory ids, and pass "
                "traj_key= instead of end_key="
            )
        if self.pad_output and self.span[1]:
            raise ConfigurationError(
                "with a buffer over hosts, pad_output=True cannot be combined with a span to the "
                "right, because a slice may then have no row that can be repeated as padding; "
                "leave out pad_output= or the span"
            )
        super()._set_owner(owner, *ahead)

    def _law(self, batch_size: int) -> tuple[Law, int]:
        length, count = self._adjusted_batch_size(batch_size)
        slices = SliceLaw(
            length,
            self.traj_key,
            self.step_key,
            self._by_step,
            self.strict_length,
            self.span,
            consecutive=len(self.owner.hosts) > 1,
        )
        return Law(self._prioritized, slices), count

    def _rows_of(self, batch_size: int) -> int:
        return batch_size * (self._batch_size_multiplier or 1)  # like TorchRL's class

    def _completed(self, batch: Drawn, count: int) -> Drawn:
        length, _ = self._adjusted_batch_size(count)
        lengths = batch.lengths
        assert lengths is not None
        shape = shape_of(lengths, length)
        if self.pad_output:  # the rest of a slice is filled with its last row
            step = torch.arange(length)
            first = lengths.cumsum(0) - lengths
            places = (first[:, None] + torch.minimum(step, lengths[:, None] - 1)).reshape(-1)
            padded = torch.full_like(lengths, length)
            batch = batch.chosen(lambda tensor: tensor[places], slice(None), padded)
            shape |= {"seq_length": lengths, "target_seq_length": length}
            shape["mask_flat"] = (step < lengths[:, None]).reshape(-1)
        batch.shape = shape
        return batch

    def can_sample(self, storage: Storage, batch_size: int) -> bool:
        """Return whether any run of rows is long enough for a slice. Over hosts, this method blocks
        for two calls."""
        if not super().can_sample(storage, batch_size):
            return False
        return self._source is None or self._source.can_draw(batch_size)


class RPCSliceSampler(_SlicesOfOwner):
    """Sample slices of trajectories from rows of other processes.

    It replaces TorchRL's ``SliceSampler``, and draws as :class:`SharedSliceSampler` does. With
    several shards, the law is that of one buffer that holds all rows. Every run (consecutive rows
    of one trajectory) that is long enough has exactly the same probability, given the numbers of
    runs in the shards' replies for that batch. All rows of a slice are in one shard, and are read
    together or not at all. If the buffer has only one host, and this process runs on this host's
    node, the sampler works as a :class:`SharedSliceSampler`.

    With several hosts, rows must number the steps of their trajectory (``step_key``), as TorchRL's
    ``StepCounter`` does. Rows of a trajectory may be in several shards, for example because a host
    did not answer for a while. Such a trajectory has a gap in each shard, and no slice crosses a
    gap.

    The first draw after a write scans the versions of all slots of the host.

    Args:
        owner: the storage's owner.
        prefetch, batches_per_call: see :class:`RPCPrioritizedSampler`.
        options: those of :class:`SharedSliceSampler` except ``end_key`` and ``end_keys``. With
            ``pad_output``, every batch has a mask.

    Raises:
        ConfigurationError: for the same reasons as in :class:`SharedSliceSampler`, or because
            ``end_key`` is given, or ``pad_output`` with a ``span`` to the right.
        RuntimeError: from ``sample``, if there is no row, or no run is long enough.
        RemoteError: from ``sample``, if the rows do not have the keys that the sampler needs.
        DeadlineError, PeerLostError: from any call, if fewer than ``owner.min_shards`` hosts
            answer.

    Example:
        >>> with session() as me:
        ...     owner = host_replay(me, capacity=1_000, shortcut=False)
        ...     sampler = RPCSliceSampler(slice_len=3, traj_key="episode", owner=owner)
        ...     buffer = SharedReplayBuffer(
        ...         storage=RemoteStorage(owner), sampler=sampler, batch_size=6
        ...     )
        ...     episode, step = torch.arange(4).repeat_interleave(5), torch.arange(5).repeat(4)
        ...     rows = {"episode": episode, "step_count": step}
        ...     slots = buffer.extend(TensorDict(rows, [20]))
        ...     buffer.sample()["step_count"].reshape(2, 3).diff()
        tensor([[1, 1],
                [1, 1]])
    """


class RPCPrioritizedSliceSampler(
    _SlicesOfOwner, RPCPrioritizedSampler, SharedPrioritizedSliceSampler
):
    """Sample slices from rows of other processes. The first row of a slice is drawn by priority.

    It replaces TorchRL's ``PrioritizedSliceSampler``. Law and weights are those of
    :class:`SharedPrioritizedSliceSampler` over one buffer that holds the rows of all shards. A row
    that may begin a slice is drawn with probability exactly ``p_i / sum(p)``. The sum is over all
    such rows, and is taken from the shards' replies for that batch. See :class:`RPCSliceSampler`
    for hosts, and :class:`RPCPrioritizedSampler` for priorities.

    Args:
        max_capacity, alpha, beta, eps, dtype, reduction: as in :class:`RPCPrioritizedSampler`.
        owner, prefetch, batches_per_call: as in :class:`RPCPrioritizedSampler`.
        options: those of :class:`RPCSliceSampler` except ``pad_output``. Like TorchRL's class, this
            class turns off a ``span`` to the left, with a warning.

    Example:
        >>> with session() as me:
        ...     owner = host_replay(me, capacity=1_000, shortcut=False)
        ...     sampler = RPCPrioritizedSliceSampler(
        ...         1_000, alpha=0.6, beta=0.4, slice_len=2, traj_key="episode", owner=owner
        ...     )
        ...     buffer = SharedReplayBuffer(
        ...         storage=RemoteStorage(owner), sampler=sampler, batch_size=4
        ...     )
        ...     rows = {"episode": torch.zeros(5), "td_error": torch.tensor([0.0, 0, 5, 0, 0])}
        ...     slots = buffer.extend(TensorDict(rows, [5]))
        ...     buffer.sample()["index"].squeeze(-1)
        tensor([2, 3, 2, 3])
    """

    __init__ = _SamplerOfOwner.__init__  # else the signature would be RPCPrioritizedSampler's


class RPCSamplerWithoutReplacement(SharedSamplerWithoutReplacement, _SamplerOfOwner):
    """Sample rows of other processes uniformly without replacement, over the whole job.

    It replaces TorchRL's ``SamplerWithoutReplacement``, and draws as
    :class:`SharedSamplerWithoutReplacement` does. During a pass over all shards, all processes
    together draw each row at most once. The next pass begins when a sample finds no rows left in
    the shards that answer. If a shard does not answer at that moment, the pass that ended omits
    this shard's remaining rows. Nothing is drawn ahead, so each sample waits for a call. Rows of a
    batch are in the order of their shards. If the buffer has only one host, and this process runs
    on this host's node, the sampler works as a :class:`SharedSamplerWithoutReplacement`.

    Args:
        drop_last: omit the last batch of a pass if it is not full.
        shuffle: with ``False``, rows come in the order of the shards and their slots.
        owner: the storage's owner.

    Raises:
        ConfigurationError: as :class:`SharedSamplerWithoutReplacement`.
        RuntimeError: from ``sample``, if no row is published.
        DeadlineError, PeerLostError: from any call, if fewer than ``owner.min_shards`` hosts
            answer.

    Example:
        >>> with session() as me:
        ...     owner = host_replay(me, capacity=1_000, shortcut=False)
        ...     buffer = SharedReplayBuffer(
        ...         storage=RemoteStorage(owner),
        ...         sampler=RPCSamplerWithoutReplacement(owner=owner),
        ...         batch_size=4,
        ...     )
        ...     slots = buffer.extend(TensorDict({"number": torch.arange(10)}, [10]))
        ...     sorted(int(i) for batch in buffer for i in batch["number"])
        [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    """

    def __init__(
        self, drop_last: bool = False, shuffle: bool = True, *, owner: ReplayOwner
    ) -> None:
        SharedSamplerWithoutReplacement.__init__(self, drop_last, shuffle)
        self._set_owner(owner, None, 1)

    def _new_source(self, storage: RemoteStorage) -> PassSource:
        self._passes = source = PassSource(storage.client, self)
        return source

    def _ask_for_numbers(self) -> None:
        if self._storage is not None:
            raise ConfigurationError(
                f"{type(self).__name__} draws no windows; with sample_unit=Sequence(...), use "
                "RPCRandomSampler or RPCPrioritizedSampler"
            )
        super()._ask_for_numbers()

    def _begins(self, number: int) -> None:
        if self._only_one and self._pass not in (None, number):
            raise PassOverError(OVER)
        self._pass = number

    def _next(self, storage: Storage, batch_size: int) -> Drawn:
        self._batch_size = max(1, batch_size)
        return super()._next(storage, batch_size)
