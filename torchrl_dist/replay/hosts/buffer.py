"""One call that gives a process its replay buffer, wherever the rows are kept."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from torchrl_dist.errors import ConfigurationError
from torchrl_dist.replay.hosts.owner import host_replay
from torchrl_dist.replay.hosts.samplers import (
    RPCPrioritizedSampler,
    RPCPrioritizedSliceSampler,
    RPCRandomSampler,
    RPCSliceSampler,
)
from torchrl_dist.replay.hosts.storage import RemoteStorage
from torchrl_dist.replay.law.limiter import RateLimiter
from torchrl_dist.replay.parts.buffer import SharedReplayBuffer
from torchrl_dist.runtime import Peer, Session


class HostedReplayBuffer(SharedReplayBuffer):
    """``SharedReplayBuffer`` over a :class:`RemoteStorage`, made by :func:`replay_buffer`.

    ``extend``, ``add`` and ``update_priority`` queue and return: they wait neither for the owner
    nor for another thread that samples. A context manager, which flushes at its end.

    Example:
        >>> with session() as me:
        ...     with replay_buffer(me, capacity=100, batch_size=4, shortcut=False) as buffer:
        ...         slots = buffer.extend(TensorDict({"obs": torch.zeros(3, 4)}, [3]))  # queued
        ...         buffer.flush()
        ...         slots
        tensor([0, 1, 2])
    """

    def flush(self) -> None:
        """Block until everything that this process queued is applied.

        Raises:
            DeadlineError, PeerLostError: the owner does not answer; of several hosts, one that is
                left out has not applied what was queued for it.
            RemoteError: an operation failed there.
        """
        self._storage.flush()

    def close(self) -> None:
        """Flush and end this process's use of the buffer; the session's end does it, too. What
        waits for a host that does not answer is warned about."""
        if isinstance(self._storage, RemoteStorage):
            self._storage.client.apply_queued()
        self._storage.close()

    def release(self) -> None:
        """Close, and have the hosts give up the buffer and its memory now, for all processes;
        the session's end does it, too. Nobody else should use it any more: their calls raise. Its
        name may be used for another one afterwards. A process of a host's node that used the
        memory itself keeps it until it has closed the buffer and dropped it.

        Warns:
            UserWarning: a process of a host's node still has the directory open.

        Raises:
            DeadlineError, PeerLostError: a host did not answer; the others have done it.
        """
        self.close()
        self._storage.owner.release()

    def __enter__(self) -> HostedReplayBuffer:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()


def replay_buffer(
    session: Session,
    name: str = "replay",
    *,
    capacity: int,
    batch_size: int,
    hosts: Sequence[Peer] | None = None,
    alpha: float = 0.6,
    beta: float = 0.4,
    eps: float = 1e-8,
    uniform: bool = False,
    slices: Mapping[str, Any] | None = None,
    prefetch: int | None = None,
    batches_per_call: int = 1,
    scratch_dir: str | os.PathLike[str] | None = None,
    resume: bool = False,
    keep: bool = False,
    write_to: Literal["own", "all"] = "own",
    min_shards: int = 1,
    shortcut: bool = True,
    limiter: RateLimiter | None = None,
    timeout_s: float | None = None,
    **options: Any,
) -> HostedReplayBuffer:
    """The replay buffer of this name, in any process of the session.

    Each process that uses it calls this with the same arguments, or gets the buffer pickled, as a
    collector's ``replay_buffer=``. Processes on the node of a single host use its memory, the
    others RPC; with several hosts the buffer is sharded over them, and every process samples from
    all of them with the law of one buffer. What is each process's own may differ: ``batch_size``,
    ``beta``, ``slices``, ``prefetch``, ``batches_per_call``, ``min_shards``, ``shortcut``,
    ``timeout_s`` and ``options``.

    Args:
        session: the session of this process.
        name: tells buffers of one job apart.
        capacity: rows in all.
        batch_size: rows per sample.
        hosts: who keeps the rows; default: the driver. See :func:`host_replay`, also for
            ``scratch_dir``, ``resume``, ``keep``, ``write_to``, ``min_shards``, ``shortcut``,
            ``limiter`` and ``timeout_s``.
        alpha, beta, eps, prefetch, batches_per_call: see :class:`RPCPrioritizedSampler`.
        uniform: sample uniformly instead of by priority.
        slices: sample slices of trajectories: the options of :class:`RPCSliceSampler`, such as
            ``{"slice_len": 8}``; by priority unless ``uniform``.
        options: of ``TensorDictReplayBuffer``: ``priority_key``, ``transform``, ``pin_memory``, ...

    Raises:
        ConfigurationError: the arguments cannot be right, or differ between processes.
        RemoteError, DeadlineError, PeerLostError: a host could not be set up or reached.

    Example:
        >>> with session() as me:  # in any process of the job
        ...     buffer = replay_buffer(me, capacity=1_000, batch_size=4)
        ...     slots = buffer.extend(TensorDict({"obs": torch.zeros(10, 4)}, [10]))
        ...     len(buffer), buffer.sample()["obs"].shape
        (10, torch.Size([4, 4]))
    """
    for part in ("storage", "sampler", "writer"):
        if part in options:
            raise ConfigurationError(
                f"replay_buffer builds the {part} itself; for one of your own, see host_replay"
            )
    owner = host_replay(
        session,
        capacity,
        hosts=hosts,
        name=name,
        scratch_dir=scratch_dir,
        resume=resume,
        keep=keep,
        write_to=write_to,
        min_shards=min_shards,
        shortcut=shortcut,
        limiter=limiter,
        timeout_s=timeout_s,
        sampling=("uniform",) if uniform else ("alpha", alpha, "eps", eps),
    )
    ahead: dict[str, Any] = {
        "owner": owner,
        "prefetch": prefetch,
        "batches_per_call": batches_per_call,
    }
    exponents = () if uniform else (owner.capacity, alpha, beta, eps)
    kind: Any
    if slices is None:
        kind = RPCRandomSampler if uniform else RPCPrioritizedSampler
    else:
        kind = RPCSliceSampler if uniform else RPCPrioritizedSliceSampler
    sampler = kind(*exponents, **ahead, **(slices or {}))
    return HostedReplayBuffer(
        storage=RemoteStorage(owner), sampler=sampler, batch_size=batch_size, **options
    )
