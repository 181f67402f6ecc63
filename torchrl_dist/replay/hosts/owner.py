"""The handle through which every process reaches the hosts of a buffer.

A buffer has one host, or several hosts in different processes of the job, with a shard each."""

from __future__ import annotations

import contextlib
import os
import secrets
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tensordict import NestedKey

from torchrl_dist.errors import ConfigurationError, TorchRLDistError
from torchrl_dist.replay.hosts.client import ReplayClient
from torchrl_dist.replay.hosts.host import ReplayHost
from torchrl_dist.replay.hosts.keeper import (
    HostAddress,
    HostTerms,
    open_host,
    remove_what_the_dead_left,
)
from torchrl_dist.replay.hosts.lifetimes import LOCKS, DirectStorage, close_at_end, open_directly
from torchrl_dist.replay.hosts.link import Link
from torchrl_dist.replay.hosts.local_link import LocalLink
from torchrl_dist.replay.hosts.remote_link import RemoteLink
from torchrl_dist.replay.law.limiter import Counts, RateLimiter
from torchrl_dist.replay.law.placement import largest_reservation
from torchrl_dist.replay.parts.storage import checked_frames
from torchrl_dist.runtime import Peer, Remote, Session, current_session
from torchrl_dist.runtime.session import check_session

_MAX_QUEUED_BYTES = 2**26


_terms: dict[tuple[str, str], dict[str, Any]] = {}
"""The arguments on which the processes of a buffer agree, by session and name. Only the driver has
these arguments."""


@dataclass(frozen=True)
class ReplayOwner:
    """The handle to all hosts of one buffer, made by :func:`host_replay`.

    It is the same in every process, can be pickled, and may be used in any process of the session.
    It keeps the arguments of :func:`host_replay` that processes need to use the buffer.

    Example:
        >>> with session() as me:
        ...     owner = host_replay(me, capacity=1_000)
        ...     owner.capacity
        1000
    """

    hosts: tuple[HostAddress, ...]
    shard_capacity: int
    shortcut: bool
    write_to: Literal["own", "all"]
    min_shards: int
    max_queued_bytes: int
    timeout_s: float
    limiter: RateLimiter | None = None
    name: str = "replay"

    @property
    def capacity(self) -> int:
        """Number of rows of the whole buffer."""
        return self.shard_capacity * len(self.hosts)

    def direct(self) -> HostAddress | None:
        """Return the only host if this process uses the host's directory without RPC, otherwise
        None."""
        if self.shortcut and len(self.hosts) == 1 and self.hosts[0].is_here():
            return self.hosts[0]
        return None

    def release(self) -> None:
        """Let the hosts release the buffer for all processes, and free its name. Blocks.

        Warns:
            UserWarning: another process of a host's node still has the directory open. The
                directory is removed when that process closes its buffer. There is no warning for a
                directory that is kept anyway.

        Raises:
            DeadlineError, PeerLostError: a host did not answer. The other hosts have released the
                buffer.
        """
        session = current_session()
        futures = [
            (address, address.host.submit("release", timeout_s=self.timeout_s))
            for address in self.hosts
        ]
        problems: list[Exception] = []
        for address, future in futures:
            try:
                if future.result():
                    warnings.warn(
                        f"the directory {address.path} of {address.host.peer} is still in use by "
                        "another process of its node; it is removed when that process has closed "
                        "its buffer",
                        stacklevel=3,
                    )
            except Exception as error:
                problems.append(error)
        session.call(session.peers[0], _withdraw, self.name, timeout_s=self.timeout_s)
        if problems:
            raise problems[0]

    def connect(self) -> ReplayClient:
        """Return a client of this process.

        The client is closed when the session ends, or some time after nothing refers to it."""
        session = current_session()
        session.check_process()
        here = [shard for shard, address in enumerate(self.hosts) if address.is_here()]
        links: list[Link] = []
        for shard, address in enumerate(self.hosts):
            if self.shortcut and shard in here:
                storage = open_directly(
                    address.path,
                    address.job_id,
                    self.shard_capacity,
                    self.timeout_s,
                    DirectStorage,
                )
                link: Link = LocalLink(ReplayHost(storage), "this node")
            else:
                link = RemoteLink(
                    address.host,
                    timeout_s=self.timeout_s,
                    max_queued_bytes=self.max_queued_bytes,
                    merged_rows=largest_reservation(self.shard_capacity),
                )
            links.append(link)
        mine = [shard for shard in here if self.hosts[shard].host.peer == session.me] or here
        rank = session.me.global_rank
        own = mine[rank % len(mine)] if mine and self.write_to == "own" else None
        client = ReplayClient(
            links,
            self.shard_capacity,
            own_shard=own,
            first_shard=rank,
            min_shards=self.min_shards,
            timeout_s=self.timeout_s,
            limiter=self.limiter,
        )
        close_at_end(session, client)
        return client


def host_replay(
    session: Session,
    capacity: int,
    *,
    hosts: Sequence[Peer] | None = None,
    name: str = "replay",
    scratch_dir: str | os.PathLike[str] | None = None,
    resume: bool = False,
    keep: bool = False,
    write_to: Literal["own", "all"] = "own",
    min_shards: int = 1,
    shortcut: bool = True,
    max_queued_bytes: int = _MAX_QUEUED_BYTES,
    limiter: RateLimiter | None = None,
    frames: Mapping[NestedKey, int] | None = None,
    timeout_s: float | None = None,
    sampling: tuple[Any, ...] | None = None,
) -> ReplayOwner:
    """Store a replay buffer in processes of the job, or find it there.

    Every process that uses the buffer calls this function with the same arguments, in any order.
    Alternatively, one process calls this function and sends the result to the others.
    ``min_shards``, ``shortcut``, ``max_queued_bytes`` and ``timeout_s`` may differ between
    processes. The function blocks for one call to the driver and two calls per host. With several
    hosts, the first process needs three or four calls per host. The driver and the hosts must have
    entered the session.

    Args:
        session: the session of this process.
        capacity: number of rows of the whole buffer. Each host stores
            ``ceil(capacity / len(hosts))``.
        hosts: the processes that store the rows, preferably one per node. Default: only the driver.
            Shards are numbered in the order of ``hosts``. The row in ``slot`` of shard ``s`` has
            the index ``s * shard_capacity + slot``.
        name: distinguishes the buffers of one job.
        scratch_dir: folder on each host's node in which the host makes its directory. Default: this
            user's folder in ``/dev/shm``, or in the folder for temporary files.
        resume, keep: as in :class:`SharedMemmapStorage`. If the launcher restarts a job, the job
            finds its rows even without these arguments. With one of them, or with a
            ``scratch_dir``, the directory's name depends only on the buffer's name, not on the job.
            With ``resume``, a later job then finds the directory. Two jobs cannot use it at the
            same time. Without any of the three arguments, each job has its own directory, and the
            next buffer removes the directories of jobs that cannot be restarted.
        write_to: with ``"own"``, rows go to the shard of the writer's node, or to all shards in
            turn if the node has none. With ``"all"``, rows always go to all shards in turn. In its
            turn, a shard takes all rows of an ``extend``, or as many as it has room for.
        min_shards: calls succeed while at least this many shards answer, and raise otherwise.
        shortcut: whether processes on a host's node use its directory instead of RPC. ``False`` is
            for measurements.
        max_queued_bytes: the most bytes that a process queues for one host. If the queue is full,
            ``extend`` waits.
        limiter: the rate limiter of the whole buffer. ``torchrl_dist.replay.hosts.totals_gate``
            defines which counts the limiter uses, and how fresh these counts are.
        frames: as in :class:`SharedMemmapStorage`. A host finds repeated frames among the frames
            that it stored recently, regardless of which process sent them.
        timeout_s: deadline of every call and wait. Default: the session's ``timeout_s``.
        sampling: values that describe how the buffer is sampled. All processes that pass this
            argument must pass equal values.

    Raises:
        ConfigurationError: arguments are invalid, or differ from those of another process.
        RemoteError: a host could not open its directory, or still has a buffer of this name with
            other arguments.
        DeadlineError, PeerLostError: a host did not answer.

    Example:
        >>> with session() as me:
        ...     owner = host_replay(me, capacity=1_000, name="rows")
        ...     buffer = TensorDictReplayBuffer(
        ...         storage=RemoteStorage(owner),
        ...         sampler=RPCRandomSampler(owner=owner),
        ...         writer=SharedCursorWriter(),
        ...         batch_size=4,
        ...     )
        ...     slots = buffer.extend(TensorDict({"obs": torch.zeros(10, 4)}, [10]))
        ...     buffer.sample()["obs"].shape
        torch.Size([4, 4])
    """
    check_session(session)
    if hosts is not None:
        session.check_peers("hosts", hosts)
    peers = tuple(session.peers[:1] if hosts is None else hosts)
    if not peers or capacity < len(peers):
        raise ConfigurationError(
            f"got capacity={capacity} over {len(peers)} hosts, expected at least one host, and a "
            "capacity of at least one row per host"
        )
    if write_to not in ("own", "all"):
        raise ConfigurationError(f"got write_to={write_to!r}, expected 'own' or 'all'")
    if not 1 <= min_shards <= len(peers):
        raise ConfigurationError(
            f"got min_shards={min_shards}, expected 1 to {len(peers)}, the number of hosts"
        )
    shard_capacity = -(-capacity // len(peers))
    if limiter is not None:
        limiter.check_capacity(capacity)
    parent = None if scratch_dir is None else os.fspath(scratch_dir)
    stacks = None if frames is None else checked_frames(frames)
    asked = HostTerms(shard_capacity, parent, resume, keep, limiter, stacks)
    terms = asked._asdict() | {
        "capacity": capacity,
        "hosts": [peer.name for peer in peers],
        "write_to": write_to,
        "sampling": sampling,
    }
    new = _agree(session, name, terms, timeout_s)
    remotes: list[Remote[Any]] = []
    try:
        for shard, peer in enumerate(peers):
            remote = session.remote(
                peer,
                open_host,
                f"{name}-{peers[:shard].count(peer)}",
                asked,
                timeout_s=timeout_s,
            )
            remotes.append(remote)
        addresses = tuple(
            HostAddress(remote, *remote.call("whereabouts", timeout_s=timeout_s))
            for remote in remotes
        )
        _check_apart(addresses)
        if new and len(remotes) > 1:
            _settle(remotes, limiter, timeout_s)
    except BaseException:
        if new:  # so that the caller can try again with other arguments
            for remote in remotes:
                with contextlib.suppress(TorchRLDistError):
                    remote.call("give_up", timeout_s=timeout_s)
            with contextlib.suppress(TorchRLDistError):
                session.call(session.peers[0], _withdraw, name, timeout_s=timeout_s)
        raise
    return ReplayOwner(
        addresses,
        shard_capacity,
        shortcut,
        write_to,
        min_shards,
        max_queued_bytes,
        session.timeout_s if timeout_s is None else timeout_s,
        limiter,
        name,
    )


def _check_apart(addresses: Sequence[HostAddress]) -> None:
    """Check that each shard has its own directory.

    Raises:
        ConfigurationError: two shards would share one directory. This happens if a launcher
            presents one machine as several nodes, with one local rank each.
    """
    shards: dict[tuple[str, int, int], int] = {}
    for shard, address in enumerate(addresses):
        other = shards.setdefault(address.identity, shard)
        if other != shard:
            peers = [addresses[each].host.peer for each in (other, shard)]
            raise ConfigurationError(
                f"replay shards {other} and {shard} ({peers[0]} and {peers[1]}) share one folder, "
                f"{address.path}, because the launcher presents one machine as several nodes; pass "
                "hosts= with one process of each machine"
            )


def _settle(
    remotes: Sequence[Remote[Any]], limiter: RateLimiter | None, timeout_s: float | None
) -> None:
    """Let the shards continue together after a restart, although some may be new or lost.

    All shards get the same era, because largest priorities are not passed between shards of
    different eras. The inserts and samples of a lost shard are unknown. Without these counts, the
    limiter's difference (see ``law.limiter``) may be outside its range, and writes or samples would
    wait indefinitely. In this case, the number of samples is changed so that the difference is at
    the nearer end of the range.
    """
    standings = [remote.call("standing", timeout_s=timeout_s) for remote in remotes]
    eras = [era for era, _ in standings]
    agreed = eras[0]
    if len(set(eras)) > 1 or agreed < 0:
        agreed = max(eras) if max(eras) > 0 else secrets.randbits(62)
    counted = [counts for _, counts in standings if counts is not None]
    left = 0
    if limiter is not None and counted:
        left = limiter.samples_to_settle(Counts(*map(sum, zip(*counted, strict=True))))
    for remote, (era, counts) in zip(remotes, standings, strict=True):
        samples = left if counts is None or left > 0 else max(left, -counts.samples)
        left -= samples
        if samples or era != agreed:
            remote.call("settle", era, agreed, samples, timeout_s=timeout_s)


def _agree(session: Session, name: str, terms: dict[str, Any], timeout_s: float | None) -> bool:
    """Agree with the other processes on the arguments of the buffer (``terms``). Return whether
    this process is the first.

    Raises:
        ConfigurationError: another process uses other arguments.
    """
    known = session.call(session.peers[0], _terms_of, name, terms, timeout_s=timeout_s)
    differ = [
        f"{key}={known[key]!r}, but here {key}={value!r}"
        for key, value in terms.items()
        if known is not None and value != known[key] and not (key == "sampling" and value is None)
    ]
    if differ:
        raise ConfigurationError(
            f"replay buffer {name!r} is already in use with {'; '.join(differ)}; use the same "
            "arguments in every process, or another name"
        )
    return known is None


def _terms_of(name: str, terms: dict[str, Any]) -> dict[str, Any] | None:
    """Return the terms of an earlier call. If there was no such call, record ``terms`` and return
    None. Runs in the driver."""
    session = current_session()
    with LOCKS.hosts:
        known = _terms.get((session.session_id, name))
        if known is not None:
            if known["sampling"] is None:  # the buffer was not built by replay_buffer
                known["sampling"] = terms["sampling"]
            return dict(known)
        _terms[session.session_id, name] = terms
    session.on_end(lambda clean: _end(session, name, terms["scratch_dir"], clean))
    return None


def _end(session: Session, name: str, parent: str | None, clean: bool) -> None:
    """Forget the terms of a buffer. Runs in the driver when the driver's session ends."""
    _withdraw(name, session.session_id)
    if clean and session.lost() and parent is None:  # rows in a scratch_dir stay for a later job
        remove_what_the_dead_left(session.world, name)


def _withdraw(name: str, session_id: str | None = None) -> None:
    """Free a buffer's name for a new buffer. Runs in the driver."""
    with LOCKS.hosts:
        _terms.pop((session_id or current_session().session_id, name), None)
