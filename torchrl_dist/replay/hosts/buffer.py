"""Build a process's replay buffer by one call. The rows may be on any node."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from tensordict import NestedKey

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
    """A ``SharedReplayBuffer`` with a :class:`RemoteStorage`. :func:`replay_buffer` returns it.

    ``extend``, ``add`` and ``update_priority`` queue their work and return. They wait neither for
    the host nor for another thread that samples. A ``with`` statement closes the buffer at the end
    of its block.

    Example:
        >>> with session() as me:
        ...     with replay_buffer(me, capacity=100, batch_size=4, shortcut=False) as buffer:
        ...         slots = buffer.extend(TensorDict({"obs": torch.zeros(3, 4)}, [3]))  # queued
        ...         buffer.flush()
        ...         slots
        tensor([0, 1, 2])
    """

    def flush(self) -> None:
        """Block until the hosts have applied everything that this process queued.

        Raises:
            DeadlineError: a host did not answer in time, or operations of this process still wait
                for a host that does not answer. These operations stay queued.
            PeerLostError: the only host, or too many of several hosts, are lost.
            RemoteError: an operation failed at a host.
        """
        self._storage.flush()

    def close(self) -> None:
        """Flush, and end this process's use of the buffer. The end of the session also closes the
        buffer.

        If operations still wait for a host that does not answer, a warning reports them."""
        if isinstance(self._storage, RemoteStorage):
            self._storage.client.apply_queued()
        self._storage.close()

    def release(self) -> None:
        """Close the buffer, and let the hosts release it and its memory now, for all processes.

        The end of the session also releases the buffer. Afterwards, calls of other processes raise,
        and the name may be used for another buffer. If a process on a host's node uses the memory
        directly, the memory stays until that process has closed and dropped the buffer.

        Warns:
            UserWarning: a process of a host's node still has the directory open.

        Raises:
            DeadlineError, PeerLostError: a host did not answer. All other hosts have released the
                buffer.
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
    frames: Mapping[NestedKey, int] | None = None,
    timeout_s: float | None = None,
    **options: Any,
) -> HostedReplayBuffer:
    """Return the replay buffer of this name, in any process of the session.

    Each process that uses the buffer either calls this function with the same arguments, or gets
    the pickled buffer. A collector with ``replay_buffer=`` sends the pickled buffer to its workers.
    With a single host, processes on the host's node use its memory, and other processes use RPC.
    With several hosts, the buffer is sharded over the hosts, and every process samples from all
    shards as from one buffer. Only these arguments may differ between processes: ``batch_size``,
    ``beta``, ``slices``, ``prefetch``, ``batches_per_call``, ``min_shards``, ``shortcut``,
    ``timeout_s`` and ``options``.

    Args:
        session: the session of this process.
        name: distinguishes the buffers of one job.
        capacity: number of rows of the whole buffer.
        batch_size: rows per sample.
        hosts: the processes that store the rows. Default: the driver. :func:`host_replay` describes
            this argument, and also ``scratch_dir``, ``resume``, ``keep``, ``write_to``,
            ``min_shards``, ``shortcut``, ``limiter``, ``frames`` and ``timeout_s``.
        alpha, beta, eps, prefetch, batches_per_call: see :class:`RPCPrioritizedSampler`.
        uniform: whether to sample uniformly instead of by priority.
        slices: options of :class:`RPCSliceSampler`, such as ``{"slice_len": 8}``, to sample slices
            of trajectories. Slices are sampled by priority unless ``uniform`` is true.
        options: options of ``TensorDictReplayBuffer``, such as ``priority_key``, ``transform`` or
            ``pin_memory``.

    Raises:
        ConfigurationError: arguments are invalid, or differ between processes.
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
                f"replay_buffer builds the {part} itself; leave this argument out, or use "
                "host_replay, with which you can pass your own"
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
        frames=frames,
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
