"""TorchRL's samplers for rows that lie in other processes."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
from torchrl.data.replay_buffers.samplers import PrioritizedSampler, RandomSampler
from torchrl.data.replay_buffers.storages import Storage

from torchrl_dist.errors import ConfigurationError, RemoteError
from torchrl_dist.replay.hosts.batches import Batch, BatchSource
from torchrl_dist.replay.hosts.messages import SetAlpha, UsePriorities
from torchrl_dist.replay.hosts.owner import ReplayOwner
from torchrl_dist.replay.hosts.storage import RemoteStorage
from torchrl_dist.replay.law.placement import as_slots
from torchrl_dist.replay.law.shard_law import importance_weights
from torchrl_dist.replay.node.priorities import check_generations, check_priorities
from torchrl_dist.replay.parts.sampler import (
    EMPTY,
    SharedPrioritizedSampler,
    SharedRandomSampler,
    SharedSampler,
    SharesPriorities,
    checked_exponents,
    priorities_for,
)
from torchrl_dist.replay.parts.storage import NoRowsError, check_batch_size
from torchrl_dist.replay.row import _torchrl


class _SamplerOfOwner:
    """In another process it is made anew there, by RPC or over the directory, as is right there."""

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
        """How many batches are drawn ahead of their use at the moment; see ``prefetch``."""
        return 0

    def _made_from(self) -> tuple[type, tuple[Any, ...]]:
        """The class that is called, with its arguments but for the owner's."""
        raise NotImplementedError

    def __reduce__(self) -> tuple[Any, ...]:
        kind, arguments = self._made_from()
        make = functools.partial(
            kind,
            *arguments,
            owner=self.owner,
            prefetch=self._prefetch,
            batches_per_call=self._batches_per_call,
        )
        return make, ()


class _Random(_SamplerOfOwner):
    def _made_from(self) -> tuple[type, tuple[Any, ...]]:
        return RPCRandomSampler, ()


class _Prioritized(_SamplerOfOwner):
    def _made_from(self: Any) -> tuple[type, tuple[Any, ...]]:
        exponents = (self.alpha, self._beta, self._eps)  # others may have changed them
        return RPCPrioritizedSampler, (self._max_capacity, *exponents, self.dtype, self.reduction)


class _RPCSampler(_SamplerOfOwner, SharedSampler):
    """What both samplers have in common: batches that come from a client of the owner."""

    _prioritized: bool

    def _set_owner(self, owner: ReplayOwner, prefetch: int | None, batches_per_call: int) -> None:
        super()._set_owner(owner, prefetch, batches_per_call)
        self._storage: RemoteStorage | None = None
        self._source: BatchSource | None = None

    @property
    def batches_ahead(self) -> int:
        return 0 if self._source is None else self._source.batches_ahead

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


class RPCRandomSampler(_Random, _RPCSampler, RandomSampler):
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

    def __new__(
        cls, *, owner: ReplayOwner, prefetch: int | None = None, batches_per_call: int = 1
    ) -> Any:
        if owner.direct() is not None:
            direct = _DirectRandomSampler()
            direct._set_owner(owner, prefetch, batches_per_call)
            return direct
        return super().__new__(cls)

    def __init__(
        self, *, owner: ReplayOwner, prefetch: int | None = None, batches_per_call: int = 1
    ) -> None:
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


class _DirectRandomSampler(_Random, SharedRandomSampler):
    """What ``RPCRandomSampler`` gives on the owner's node."""


class RPCPrioritizedSampler(SharesPriorities, _Prioritized, _RPCSampler, PrioritizedSampler):
    """Proportional prioritized sampling of rows that other processes keep.

    The law, the weights and the defaults are those of :class:`SharedPrioritizedSampler`. With
    several shards they are still those of one buffer that holds all rows: row ``i`` is drawn with
    probability ``p_i / sum(p)`` over all shards, exactly, for the sums that the shards' replies
    to the very batch report, and has the weight ``(p_i / min(p)) ** -beta`` with the minimum over
    all shards (``shard_law`` has the proof). On the node of a single owner this is a
    :class:`SharedPrioritizedSampler` over the owner's directory.

    One call per batch returns rows, indices and weights, and carries this process's priorities
    along. With ``prefetch=0`` a batch reflects all that this process wrote before; otherwise an
    operation shows at the latest ``batches_ahead + batches_per_call`` batches later. Random numbers
    are drawn at the owner, so that ranks with equal seeds draw different batches.

    Args:
        max_capacity: the buffer's capacity in rows, over all shards.
        alpha: priority exponent, >= 0; shared by all processes, which must agree on it.
        beta: exponent of the importance weights, >= 0; belongs to this process, and is applied
            when a batch is used, not when it is drawn.
        eps, dtype, reduction: as in :class:`SharedPrioritizedSampler`.
        owner: the storage's.
        prefetch: batches to draw ahead, which hides the round trip: once less than half of them
            are left, one call asks for the rest. None: two, and where the round trip is long (2 ms
            and more) as many as hide it, up to 256 and 16 MiB; with a rate limiter two.
            ``batches_ahead`` tells how many.
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
        prefetch: int | None = None,
        batches_per_call: int = 1,
    ) -> Any:
        if owner.direct() is not None:
            direct = _DirectPrioritizedSampler(max_capacity, alpha, beta, eps, dtype, reduction)
            direct._set_owner(owner, prefetch, batches_per_call)
            return direct
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
    def _max_priority(self) -> tuple[float | None, int | None]:
        if self._storage is None:
            return None, None
        found = [state.max_priority for state in self._storage.client.states()]
        return max((value for value in found if value == value), default=None), None

    def sample(self, storage: Storage, batch_size: int) -> tuple[torch.Tensor, dict[Any, Any]]:
        """Returns ``(index, {"priority_weight": weight})``: int64 and float32, [batch_size]."""
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
            check_generations(generation.numel(), raw.size)
        if index.dtype != torch.int64 or index.device.type != "cpu" or index.ndim != 1:
            index = as_slots(index).reshape(-1)
        remote.client.set_priorities(index, generation, raw)

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(alpha={self._alpha}, beta={self._beta}, eps={self._eps}, "
            f"reduction={self.reduction!r})"
        )


class _DirectPrioritizedSampler(_Prioritized, SharedPrioritizedSampler):
    """What ``RPCPrioritizedSampler`` gives on the owner's node."""
