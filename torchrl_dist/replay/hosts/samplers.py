"""Samplers for rows in other processes."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np
import torch
from tensordict import NestedKey, TensorDictBase
from torchrl.data.replay_buffers.samplers import (
    PrioritizedSampler,
    PrioritizedSliceSampler,
    RandomSampler,
)
from torchrl.data.replay_buffers.storages import Storage

from torchrl_dist.errors import ConfigurationError, RemoteError
from torchrl_dist.replay.hosts.batches import Batch, BatchSource
from torchrl_dist.replay.hosts.messages import (
    PRIORITIZED,
    UNIFORM,
    Law,
    SetAlpha,
    SliceLaw,
    UsePriorities,
)
from torchrl_dist.replay.hosts.owner import ReplayOwner
from torchrl_dist.replay.hosts.passes import PassSource
from torchrl_dist.replay.hosts.storage import RemoteStorage
from torchrl_dist.replay.law.placement import as_slots
from torchrl_dist.replay.law.shard_law import importance_weights
from torchrl_dist.replay.node.priorities import check_generations, check_priorities
from torchrl_dist.replay.parts.passes import (
    OVER,
    PassOverError,
    SharedSamplerWithoutReplacement,
)
from torchrl_dist.replay.parts.sampler import (
    EMPTY,
    SharedPrioritizedSampler,
    SharedRandomSampler,
    SharedSampler,
    SharesPriorities,
    checked_exponents,
    priorities_for,
)
from torchrl_dist.replay.parts.slices import (
    SharedPrioritizedSliceSampler,
    SharedSliceSampler,
    Slices,
    refuse_padding,
    slice_weights,
    turn_off_left_span,
)
from torchrl_dist.replay.parts.storage import NoRowsError, check_batch_size
from torchrl_dist.replay.row import _torchrl, rows


class _SamplerOfOwner:
    """Another process rebuilds it there, by RPC or over the directory."""

    _made_by: Any = None
    """The class that was called, if it returned an object of another class."""
    _options: Mapping[str, Any] = MappingProxyType({})

    def _set_owner(self, owner: ReplayOwner, prefetch: int | None, batches_per_call: int) -> None:
        if (prefetch is not None and prefetch < 0) or batches_per_call < 1:
            raise ConfigurationError(
                f"prefetch={prefetch}, batches_per_call={batches_per_call}: expected at least 0 "
                "and 1"
            )
        if prefetch is not None and batches_per_call > max(1, prefetch):
            raise ConfigurationError(
                f"batches_per_call={batches_per_call} draws ahead of use: prefetch at least as "
                f"many batches, got prefetch={prefetch}"
            )
        self.owner = owner
        self._prefetch = prefetch
        self._batches_per_call = batches_per_call

    @property
    def batches_ahead(self) -> int:
        """The number of batches that are drawn ahead at present, see ``prefetch``."""
        return 0

    def _keep_options(self, options: dict[str, Any]) -> None:
        """Keep the options that the called class does not name."""

    def _arguments(self) -> tuple[Any, ...]:
        """Return the arguments of the called class, except the owner and options."""
        return ()

    def __reduce__(self) -> tuple[Any, ...]:
        kind: Any = self._made_by or type(self)
        make = functools.partial(
            kind,
            *self._arguments(),
            **self._options,
            owner=self.owner,
            prefetch=self._prefetch,
            batches_per_call=self._batches_per_call,
        )
        return make, ()


class _Prioritized(_SamplerOfOwner):
    def _arguments(self: Any) -> tuple[Any, ...]:
        exponents = (self.alpha, self._beta, self._eps)  # other processes may have changed them
        return self._max_capacity, *exponents, self.dtype, self.reduction


class _Slices(_SamplerOfOwner):
    def _keep_options(self: Any, options: dict[str, Any]) -> None:
        if self._by_end:
            raise ConfigurationError(
                "rows that come by RPC do not say which process wrote them, so flags at the ends "
                "of episodes cannot distinguish trajectories; write trajectory ids, and pass "
                "traj_key= instead of end_key="
            )
        if self.pad_output and self.span[1]:
            raise ConfigurationError(
                "pad_output=True over hosts does not work with a span to the right: a slice may "
                "then have no row for padding; pass one of them"
            )
        self._options = options


class _Passes(_SamplerOfOwner):
    def __reduce__(self: Any) -> tuple[Any, ...]:
        make = functools.partial(RPCSamplerWithoutReplacement, owner=self.owner)
        return make, (self.drop_last, self.shuffle)


class _DirectRandomSampler(_SamplerOfOwner, SharedRandomSampler):
    """The result of ``RPCRandomSampler`` on the host's node."""


class _DirectPrioritizedSampler(_Prioritized, SharedPrioritizedSampler):
    """The result of ``RPCPrioritizedSampler`` on the host's node."""


class _DirectSliceSampler(_Slices, SharedSliceSampler):
    """The result of ``RPCSliceSampler`` on the host's node."""


class _DirectPrioritizedSliceSampler(_Slices, _Prioritized, SharedPrioritizedSliceSampler):
    """The result of ``RPCPrioritizedSliceSampler`` on the host's node."""


class _DirectSamplerWithoutReplacement(_Passes, SharedSamplerWithoutReplacement):
    """The result of ``RPCSamplerWithoutReplacement`` on the host's node."""


class _RPCSampler(_SamplerOfOwner, SharedSampler):
    """The base of these samplers: batches come from a client of the owner."""

    _prioritized: bool
    _near: ClassVar[Any]
    """The class of the object on the host's node."""

    def __init_subclass__(cls) -> None:
        # for pages and help(), which would otherwise show ``__new__``
        parameters = list(inspect.signature(cls.__init__).parameters.values())[1:]
        setattr(cls, "__signature__", inspect.Signature(parameters))  # noqa: B010  # for mypy

    def __new__(cls, *args: Any, owner: ReplayOwner, **options: Any) -> Any:
        if owner.direct() is None:
            return super().__new__(cls)
        named = inspect.signature(cls)
        named.bind(*args, owner=owner, **options)  # or TypeError, like ``__init__``
        ahead = options.pop("prefetch", None), options.pop("batches_per_call", 1)
        near = cls._near(*args, **options)
        near._made_by = cls
        near._keep_options({k: v for k, v in options.items() if k not in named.parameters})
        near._set_owner(owner, *ahead)
        return near

    def _set_owner(self, owner: ReplayOwner, prefetch: int | None, batches_per_call: int) -> None:
        super()._set_owner(owner, prefetch, batches_per_call)
        self._storage: RemoteStorage | None = None
        self._source: Any = None  # a BatchSource, or a PassSource

    @property
    def batches_ahead(self) -> int:
        return 0 if self._source is None else self._source.batches_ahead

    def attach(self, storage: Storage) -> RemoteStorage:
        """Bind to the storage's client. The buffer's constructor calls it. Idempotent."""
        if self._storage is not None and self._storage is storage:
            return self._storage
        if not isinstance(storage, RemoteStorage) or storage.owner != self.owner:
            raise ConfigurationError(
                f"{type(self).__name__} samples from RemoteStorage(owner) with its own owner, got "
                f"{type(storage).__name__}; pass the same owner to both"
            )
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
        """Return what is drawn for a batch of that many rows, and the number of units."""
        return PRIORITIZED if self._prioritized else UNIFORM, batch_size

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
        """Return the index of a batch of 0 rows, which TorchRL also draws."""
        check_batch_size(batch_size)
        if not len(self.attach(storage)):
            raise NoRowsError(EMPTY)
        return torch.empty(0, dtype=torch.int64)

    def can_sample(self, storage: Storage, batch_size: int) -> bool:
        """Return whether ``sample`` would begin at once. Blocks for one call."""
        remote = self.attach(storage)
        source, gate = self._source, remote.gate
        assert source is not None
        return len(remote) > 0 and (gate is None or gate.can_sample(batch_size, source))

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._empty()

    def note_written(self, index: torch.Tensor, generation: torch.Tensor) -> None:
        pass  # the client notes them once they are known

    def _empty(self) -> None:
        if self._source is not None:
            self._source.drop()


class RPCRandomSampler(_RPCSampler, RandomSampler):
    """Sample rows of other processes uniformly with replacement.

    With several shards, every row has the same probability, by the lengths in the replies to that
    batch. On the node of a single host this is a :class:`SharedRandomSampler`.

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

    _prioritized = False
    _near: ClassVar[Any] = _DirectRandomSampler

    def __init__(
        self, *, owner: ReplayOwner, prefetch: int | None = None, batches_per_call: int = 1
    ) -> None:
        super().__init__()
        self._setup()
        self._set_owner(owner, prefetch, batches_per_call)

    def sample(self, storage: Storage, batch_size: int) -> tuple[torch.Tensor, dict[Any, Any]]:
        """Return global indices, int64 [batch_size], and no further information."""
        if batch_size < 1:
            return self._no_rows(storage, batch_size), {}
        return self._next(storage, batch_size).index, {}


class RPCPrioritizedSampler(SharesPriorities, _Prioritized, _RPCSampler, PrioritizedSampler):
    """Sample rows of other processes in proportion to their priorities.

    Law, weights and defaults are those of :class:`SharedPrioritizedSampler`. With several shards
    they are those of one buffer that holds all rows. Row ``i`` is drawn with probability exactly
    ``p_i / sum(p)`` over all shards, for the sums in the shards' replies to that batch, and has the
    weight ``(p_i / min(p)) ** -beta`` with the minimum over all shards (``shard_law`` has the
    proof). On the node of a single host this is a :class:`SharedPrioritizedSampler` over the host's
    directory.

    One call per batch returns rows, indices and weights, and carries this process's priorities.
    With ``prefetch=0``, a batch reflects everything that this process wrote before. Otherwise an
    operation takes effect at most ``batches_ahead + batches_per_call`` batches later. Hosts draw
    the random numbers, so ranks with equal seeds draw different batches.

    Args:
        max_capacity: the buffer's capacity in rows, over all shards.
        alpha: priority exponent, >= 0, which all processes share and must agree on.
        beta: exponent of the importance weights in this process, >= 0. It is applied when a batch
            is used, not when it is drawn.
        eps, dtype, reduction: as in :class:`SharedPrioritizedSampler`.
        owner: the storage's owner.
        prefetch: number of batches to draw ahead, which hides the round trip. Once less than half
            of them are left, one call asks for the rest. None: two, or for a round trip of 2 ms or
            more as many as hide it, up to 256 and 16 MiB. With a rate limiter always two.
            ``batches_ahead`` is the present number.
        batches_per_call: the smallest number in such a call, at most ``prefetch``. A larger number
            means fewer messages and older rows.

    Raises:
        ConfigurationError: as :class:`SharedPrioritizedSampler`.
        RuntimeError: from ``sample``, if no row is published.
        DeadlineError, PeerLostError: from any call, if the host, or too many of several hosts, do
            not answer.

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
    _near: ClassVar[Any] = _DirectPrioritizedSampler

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
            client.apply_queued()
        except RemoteError:  # one host's error; the others have refused for the same reason
            for link in client.links:
                link.failure()
            raise

    @property
    def alpha(self) -> float:
        """The priority exponent that all processes share. Setting it changes it everywhere.

        Reading it blocks for one call."""
        if self._storage is not None:
            self._alpha = self._storage.client.states()[0].alpha
        return self._alpha

    @alpha.setter
    def alpha(self, value: float) -> None:
        self._alpha = checked_exponents(value, 0.0, self._eps)[0]
        if self._storage is not None:
            self._storage.client.apply_everywhere(SetAlpha(self._alpha))

    @property
    def _max_priority(self) -> tuple[float | None, int | None]:
        if self._storage is None:
            return None, None
        found = [state.max_priority for state in self._storage.client.states()]
        return max((value for value in found if value == value), default=None), None

    def sample(self, storage: Storage, batch_size: int) -> tuple[torch.Tensor, dict[Any, Any]]:
        """Return ``(index, {"priority_weight": weight})``: int64 and float32, [batch_size]."""
        if batch_size < 1:
            return self._no_rows(storage, batch_size), {"priority_weight": torch.empty(0)}
        batch = self._next(storage, batch_size)
        remote = self._storage
        assert remote is not None
        remote.client.recent.remember(batch.index, batch.generation, written=False)
        weight = importance_weights(batch.mass.numpy(), np.array(batch.minimum), self._beta)
        return batch.index, {"priority_weight": torch.from_numpy(weight)}

    @torch.no_grad()
    def update_priority(
        self,
        index: int | torch.Tensor,
        priority: float | torch.Tensor,
        *,
        storage: Storage | None = None,
        generation: torch.Tensor | None = None,
    ) -> None:
        """Queue priorities for rows, see :meth:`SharedPrioritizedSampler.update_priority`."""
        remote = self._storage if storage is None else self.attach(storage)
        if remote is None:
            raise ConfigurationError(
                "the sampler is not bound to a storage yet; update priorities through the "
                "replay buffer, or pass storage="
            )
        if any(
            _torchrl.sampler_of(buffer) is self and _torchrl.is_being_built(buffer)
            for buffer in _torchrl.buffers_over(remote)
        ):
            return  # a process that joins must not reset the shared values
        if not isinstance(index, torch.Tensor):
            index = as_slots(index)
        raw = priorities_for(index, priority)
        check_priorities(raw)
        if generation is not None:
            generation = generation.detach().cpu().reshape(-1)
            check_generations(generation.numel(), raw.size)
        if index.dtype != torch.int64 or index.device.type != "cpu" or index.ndim != 1:
            index = as_slots(index).reshape(-1)
        remote.client.set_priorities(index, generation, raw)

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(alpha={self._alpha}, beta={self._beta}, eps={self._eps}, "
            f"reduction={self.reduction!r})"
        )


class _RPCSlices(_RPCSampler, SharedSliceSampler):
    """The base of samplers whose slices come from a client of the owner.

    Each host chooses slices among its own rows. The entries of TorchRL's sampler are added here."""

    def _prepare(self, storage: RemoteStorage) -> None:
        _refuse_counts(self, storage)
        super()._prepare(storage)

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

    def sample(
        self, storage: Storage, batch_size: int
    ) -> tuple[tuple[torch.Tensor, ...], dict[NestedKey, torch.Tensor]]:
        """Return global indices, int64 [batch_size] in a tuple of one, and the flags of the
        slices."""
        if self._batch_size_multiplier is not None:  # like TorchRL's class
            batch_size *= self._batch_size_multiplier
        if batch_size < 1:
            return (self._no_rows(storage, batch_size),), {}
        batch = self._next(storage, batch_size)
        length, count = self._adjusted_batch_size(batch_size)
        lengths = batch.lengths
        assert lengths is not None
        first = lengths.cumsum(0) - lengths
        shape: dict[str, Any] = {
            "num_slices": count,
            "seq_length": lengths if bool((lengths != length).any()) else length,
            "target_seq_length": None,
            "mask_flat": None,
        }
        if (
            self.pad_output
        ):  # all slices get the same length: the last row fills the rest of a slice
            step = torch.arange(length)
            places = first[:, None] + torch.minimum(step, lengths[:, None] - 1)
            batch = _select(batch, places.reshape(-1))
            shape |= {"seq_length": lengths, "target_seq_length": length}
            shape["mask_flat"] = (step < lengths[:, None]).reshape(-1)
        self._storage_of_batches().hand_over(batch)
        found = rows.build(batch.tensors, batch.spec, (batch.index.numel(),), raw=True)
        # with a span to the right, TorchRL's draw may give a slice without rows
        leaf = batch.mass[first].numpy() if self._prioritized else None
        slices = Slices(shape, leaf, batch.minimum)
        return (batch.index,), self._flags(slices, found)

    def _storage_of_batches(self) -> RemoteStorage:
        assert self._storage is not None  # a batch has come from there
        return self._storage

    def can_sample(self, storage: Storage, batch_size: int) -> bool:
        """Return whether a run is long enough. Blocks for two calls."""
        if not super().can_sample(storage, batch_size):
            return False
        assert self._source is not None
        return self._source.can_draw(batch_size)


def _refuse_counts(sampler: _RPCSampler, storage: RemoteStorage) -> None:
    """
    Raises:
        ConfigurationError: the limiter has ``max_times_sampled``.
    """
    if storage.limiter is not None and storage.limiter.max_times_sampled is not None:
        raise ConfigurationError(
            f"{type(sampler).__name__} takes rows whatever their counts; use a limiter without "
            "max_times_sampled"
        )


def _select(batch: Batch, places: torch.Tensor) -> Batch:
    """Return the rows at these places of a batch."""
    each = {name: getattr(batch, name)[places] for name in ("index", "generation", "leaf", "mass")}
    return replace(batch, tensors=[tensor[places] for tensor in batch.tensors], **each)


class RPCSliceSampler(_Slices, _RPCSlices):
    """Sample slices of trajectories from rows of other processes.

    It replaces TorchRL's ``SliceSampler``, and means the same as :class:`SharedSliceSampler`. With
    several shards the law is that of one buffer that holds all rows. Every run of rows that is long
    enough has exactly the same probability over all shards, for the numbers of runs in the shards'
    replies to that batch. A slice is in one shard, and is read as a whole or not at all. On the
    node of a single host this is a :class:`SharedSliceSampler`.

    With several hosts, rows must number the steps of their trajectory (``step_key``), as TorchRL's
    ``StepCounter`` does. Rows of a trajectory may be in several shards, for example because a host
    did not answer for a while, and a slice never crosses such a gap.

    After writes, each draw scans the versions of a host's ring once.

    Args:
        owner: the storage's owner.
        prefetch, batches_per_call: see :class:`RPCPrioritizedSampler`.
        options: those of :class:`SharedSliceSampler` except ``end_key`` and ``end_keys``. With
            ``pad_output``, every batch has a mask.

    Raises:
        ConfigurationError: as :class:`SharedSliceSampler`, and for ``end_key``.
        RuntimeError: from ``sample``, if there is no row, or no run is long enough.
        RemoteError: from ``sample``, if the rows do not have the keys.
        DeadlineError, PeerLostError: from any call, if the host, or too many of several hosts, do
            not answer.

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

    _prioritized = False
    _near: ClassVar[Any] = _DirectSliceSampler

    def __init__(
        self,
        *,
        owner: ReplayOwner,
        prefetch: int | None = None,
        batches_per_call: int = 1,
        **options: Any,
    ) -> None:
        SharedSliceSampler.__init__(self, **options)
        self._keep_options(options)
        self._set_owner(owner, prefetch, batches_per_call)


class RPCPrioritizedSliceSampler(
    _Slices, _RPCSlices, RPCPrioritizedSampler, PrioritizedSliceSampler
):
    """Sample slices from rows of other processes, with first rows drawn by priority.

    It replaces TorchRL's ``PrioritizedSliceSampler``. Law and weights are those of
    :class:`SharedPrioritizedSliceSampler`; with several shards they are those of one buffer that
    holds all rows. A row that may begin a slice is drawn with probability exactly ``p_i / sum(p)``
    over such rows of all shards, for the sums in the shards' replies to that batch. See
    :class:`RPCSliceSampler` for hosts, and :class:`RPCPrioritizedSampler` for priorities.

    Args:
        max_capacity, alpha, beta, eps, dtype, reduction: as in :class:`RPCPrioritizedSampler`.
        owner, prefetch, batches_per_call: as in :class:`RPCPrioritizedSampler`.
        options: those of :class:`RPCSliceSampler` except ``pad_output``. A ``span`` to the left is
            turned off with a warning, as in TorchRL's class.

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

    _near: ClassVar[Any] = _DirectPrioritizedSliceSampler

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
        **options: Any,
    ) -> None:
        refuse_padding(self, options)
        SharedSliceSampler.__init__(self, **options)
        turn_off_left_span(self)
        self._keep_options(options)
        exponents = alpha, beta, eps
        ahead: dict[str, Any] = {"prefetch": prefetch, "batches_per_call": batches_per_call}
        RPCPrioritizedSampler.__init__(
            self, max_capacity, *exponents, dtype, reduction, owner=owner, **ahead
        )

    def sample(  # type: ignore[override]  # as above
        self, storage: Storage, batch_size: int
    ) -> tuple[tuple[torch.Tensor, ...], dict[NestedKey, torch.Tensor]]:
        """Return global indices, int64 [batch_size] in a tuple of one, and further entries.

        These are ``"priority_weight"``, float32 [batch_size], and the flags of the slices."""
        index, info = _RPCSlices.sample(self, storage, batch_size)
        if batch_size < 1:
            return index, info | {"priority_weight": torch.empty(0)}
        remote = self._storage_of_batches()
        generation = remote.handed_generation(index)
        assert generation is not None
        remote.client.recent.remember(index[0], generation, written=False)
        return index, info

    def _flags(self, slices: Slices, found: TensorDictBase) -> dict[NestedKey, torch.Tensor]:
        return super()._flags(slices, found) | slice_weights(slices, self._beta)

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(num_slices={self.num_slices}, slice_len={self.slice_len}, "
            f"traj_key={self.traj_key}, strict_length={self.strict_length}, alpha={self._alpha}, "
            f"beta={self._beta}, eps={self._eps})"
        )


class RPCSamplerWithoutReplacement(_Passes, _RPCSampler, SharedSamplerWithoutReplacement):
    """Sample rows of other processes uniformly without replacement, over the whole job.

    It replaces TorchRL's ``SamplerWithoutReplacement``, and means the same as
    :class:`SharedSamplerWithoutReplacement`. In a pass over all shards, each row is drawn at most
    once, by any of the processes. The next pass begins with the first sample that finds nothing
    left in any shard that answers. Rows that are left in a shard that does not answer then are
    omitted. A sample is one call, because nothing is drawn ahead. Rows of a batch come shard by
    shard. On the node of a single host this is a :class:`SharedSamplerWithoutReplacement`.

    Args:
        drop_last: omit the last batch of a pass if it is not full.
        shuffle: with ``False``, rows come in the order of the shards and their slots.
        owner: the storage's owner.

    Raises:
        ConfigurationError: as :class:`SharedSamplerWithoutReplacement`.
        RuntimeError: from ``sample``, if no row is published.
        DeadlineError, PeerLostError: from any call, if the host, or too many of several hosts, do
            not answer.

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

    _prioritized = False
    _near: ClassVar[Any] = _DirectSamplerWithoutReplacement

    def __init__(
        self, drop_last: bool = False, shuffle: bool = True, *, owner: ReplayOwner
    ) -> None:
        SharedSamplerWithoutReplacement.__init__(self, drop_last, shuffle)
        self._set_owner(owner, 0, 1)

    def _prepare(self, storage: RemoteStorage) -> None:
        _refuse_counts(self, storage)

    def _new_source(self, storage: RemoteStorage) -> PassSource:
        return PassSource(
            storage.client,
            drop_last=self.drop_last,
            shuffle=self.shuffle,
            begins=self._begins,
            uniforms=self._uniforms,
        )

    def _begins(self, number: int) -> None:
        if self._only_one and self._pass not in (None, number):
            raise PassOverError(OVER)
        self._pass = number

    def sample(self, storage: Storage, batch_size: int) -> tuple[torch.Tensor, dict[Any, Any]]:
        """Return global indices, int64 [batch_size] (fewer at the end of a pass), and no further
        information."""
        if batch_size < 1:
            return self._no_rows(storage, batch_size), {}
        self._batch_size = batch_size
        return self._next(storage, batch_size).index, {}

    def can_sample(self, storage: Storage, batch_size: int) -> bool:
        """Return whether ``sample`` would begin at once. Blocks for one call."""
        enough = not self.drop_last or len(storage) >= batch_size
        return enough and _RPCSampler.can_sample(self, storage, batch_size)

    @property
    def ran_out(self) -> bool:
        """Return whether the pass that this process drew from last is over, as far as it knows."""
        source = self._source
        if self._pass is None or source is None:
            return False
        least = self._batch_size if self.drop_last else 1
        return source.number != self._pass or source.left.sum() < least

    @ran_out.setter
    def ran_out(self, value: bool) -> None:
        if not value:
            self._pass = None

    @property
    def _remaining_batches(self) -> int:
        left = 0 if self._source is None else int(self._source.left.sum())
        return left // self._batch_size if self.drop_last else -(left // -self._batch_size)

    def _empty(self) -> None:
        self._pass = None
        _RPCSampler._empty(self)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._empty()
