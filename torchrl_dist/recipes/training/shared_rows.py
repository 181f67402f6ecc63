"""The recipes' replay buffer: a folder on one node, or a shard on each of several nodes."""

from __future__ import annotations

from typing import Any

from ...replay import (
    RateLimiter,
    SharedMemmapStorage,
    SharedPrioritizedSampler,
    SharedRandomSampler,
    SharedReplayBuffer,
    replay_buffer,
)
from ...runtime import Peer, Session
from .config import ReplayConfig
from .loop import Start
from .run_directory import claim_rows


def shared_buffer(
    config: ReplayConfig,
    session: Session,
    start: Start,
    *,
    batch_size: int,
    exponents: tuple[float, float] | None = None,
    limiter: RateLimiter | None = None,
    frames: dict[str, int] | None = None,
    **windows: Any,
) -> SharedReplayBuffer:
    """Return the job's buffer. A resumed run continues with the buffer's rows.

    If an attempt was killed before its first checkpoint, the job starts again and does not count
    the rows of that attempt. The first learner therefore drops these rows in this call. The other
    learners must not collect before it has dropped them.

    On one node, the buffer is in the folder ``config.replay_path``. On several nodes, the first
    process of each node keeps a shard. If ``config.replay_dir`` is given, the shard is in that
    folder, where a later job finds it. Otherwise the shard is in memory, where only a restart by
    the launcher finds it.

    Args:
        batch_size: rows per sample of this process.
        exponents: alpha and beta of prioritized sampling; None: uniform.
        limiter: the rate limiter of the whole buffer.
        frames, windows: the arguments ``frames``, ``sample_unit`` and ``eta`` of
            :func:`~torchrl_dist.replay_buffer`.

    Raises:
        DirectoryError: a folder of this node cannot be used.
        RemoteError: a folder of another node cannot be used.
    """
    resume = start.resumes > 0
    if session.world.one_node:
        storage = SharedMemmapStorage(
            config.capacity,
            scratch_dir=config.replay_path,
            job_id=session.world.job_id,
            resume=resume,
            keep=True,
            timeout_s=config.timeout_s,
            limiter=limiter,
            frames=frames,
        )
        sampler = (
            SharedRandomSampler()
            if exponents is None
            else SharedPrioritizedSampler(config.capacity, *exponents)
        )
        buffer = SharedReplayBuffer(
            storage=storage, sampler=sampler, batch_size=batch_size, **windows
        )
    else:
        alpha, beta = exponents or (0.6, 0.4)
        buffer = replay_buffer(
            session,
            capacity=config.capacity,
            batch_size=batch_size,
            hosts=first_of_each_node(session),
            alpha=alpha,
            beta=beta,
            uniform=exponents is None,
            scratch_dir=config.replay_dir,
            resume=resume and config.replay_dir is not None,
            keep=config.replay_dir is not None,
            limiter=limiter,
            frames=frames,
            timeout_s=config.timeout_s,
            **windows,
        )
    claim_rows(config.output_path, config.replay_path)
    if not resume and session.me.index == 0 and len(buffer):
        buffer.empty()
    return buffer


def first_of_each_node(session: Session) -> tuple[Peer, ...]:
    """Return one process per node, in the order of their ranks. The driver is one of them."""
    nodes: dict[str, Peer] = {}
    for peer in session.peers:
        nodes.setdefault(peer.host, peer)
    return tuple(nodes.values())


def remarks_on_resume(buffer: SharedReplayBuffer) -> tuple[str, ...]:
    """Return a remark if the rows of a resumed run were lost with the nodes' memory."""
    if len(buffer):
        return ()
    return ("the replay buffer's rows are lost; the buffer starts empty",)


def stale_priorities(buffer: SharedReplayBuffer) -> int:
    """Return how many priorities were dropped because their rows had been overwritten.

    The count is over all processes since the buffer was created. If other nodes keep rows, the
    function blocks for one call."""
    return buffer.storage.counters["stale_updates"]
