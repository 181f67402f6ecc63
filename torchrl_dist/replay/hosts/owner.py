"""The handle by which every process reaches the hosts of a buffer: one process of the job, or
several that keep a shard each."""

from __future__ import annotations

import contextlib
import os
import secrets
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torchrl_dist.errors import ConfigurationError, TorchRLDistError
from torchrl_dist.replay.hosts.client import ReplayClient
from torchrl_dist.replay.hosts.host import ReplayHost
from torchrl_dist.replay.hosts.keeper import HostAddress, open_host, remove_what_the_dead_left
from torchrl_dist.replay.hosts.lifetimes import LOCKS, DirectStorage, clients_of, open_directly
from torchrl_dist.replay.hosts.link import Link
from torchrl_dist.replay.hosts.local_link import LocalLink
from torchrl_dist.replay.hosts.remote_link import RemoteLink
from torchrl_dist.replay.law.limiter import Counts, RateLimiter
from torchrl_dist.replay.law.placement import largest_reservation
from torchrl_dist.runtime import Peer, Remote, Session, current_session

_MAX_QUEUED_BYTES = 2**26


_terms: dict[tuple[str, str], dict[str, Any]] = {}
"""In the driver's process: what the users of a buffer agreed on, by session and name."""


@dataclass(frozen=True)
class ReplayOwner:
    """The keepers of one buffer, made by :func:`host_replay`; the same in every process.

    It pickles; any process of the session may use it. Of the arguments of :func:`host_replay` it
    keeps those that concern its users.

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
        """Rows of the whole buffer."""
        return self.shard_capacity * len(self.hosts)

    def direct(self) -> HostAddress | None:
        """The only host, if its directory is to be used without RPC."""
        if self.shortcut and len(self.hosts) == 1 and self.hosts[0].is_here():
            return self.hosts[0]
        return None

    def release(self) -> None:
        """Have the hosts give up the buffer, for all processes, and forget its name; blocks.

        Warns:
            UserWarning: another process of a host's node still has the directory open; it is
                removed when that one has closed its buffer. Not said of one that is kept.

        Raises:
            DeadlineError, PeerLostError: a host did not answer; the others have done it.
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
                        f"{address.path} on {address.host.peer} is still in use by another process "
                        "there: it is removed when that has closed its buffer",
                        stacklevel=3,
                    )
            except Exception as error:
                problems.append(error)
        session.call(session.peers[0], _withdraw, self.name, timeout_s=self.timeout_s)
        if problems:
            raise problems[0]

    def connect(self) -> ReplayClient:
        """A client of this process; it is closed when the session ends, or after nobody holds it
        any more."""
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
        clients_of(session).add(client)
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
    timeout_s: float | None = None,
    sampling: tuple[Any, ...] | None = None,
) -> ReplayOwner:
    """Have processes of the job keep a replay buffer; find it, where it is kept already.

    Every process that uses the buffer calls this with the same arguments, in any order; or one
    does, and passes the result on. (``min_shards``, ``shortcut``, ``max_queued_bytes`` and
    ``timeout_s`` are each process's own.) Blocks for a call of the driver and two per host (of
    several hosts three or four in the first process that does), which must be in their session.

    Args:
        session: the session of this process.
        capacity: rows in all. Each host keeps ``ceil(capacity / len(hosts))``.
        hosts: who keeps the rows, best one process per node; default: the driver alone. Shards
            are numbered in this order, and row ``slot`` of shard ``s`` has the index
            ``s * shard_capacity + slot``.
        name: tells buffers of one job apart.
        scratch_dir: folder on each host in which its directory is made; default: this user's own
            in ``/dev/shm``, or else in the folder for temporary files.
        resume, keep: as in :class:`SharedMemmapStorage`. A job that its launcher restarts finds
            its rows again without either. With one of them, or a ``scratch_dir``, the directory
            goes by the buffer's ``name`` alone, so that a later job finds it with ``resume``, and
            two jobs at a time are refused; else each job has its own, and what a job left that
            cannot come back is removed when the next buffer is made.
        write_to: ``"own"``: rows go to the shard of the writer's node, where it has one, else to
            all in turn; ``"all"``: always in turn. A turn takes a whole ``extend``, or as much as
            a shard has room for.
        min_shards: calls go on while that many shards answer; below, they raise.
        shortcut: whether processes on a host's node use its directory instead of RPC; ``False``
            is for measurements.
        max_queued_bytes: that a process queues for one host before ``extend`` waits.
        limiter: of the whole buffer; whose counters it goes by, and how fresh they are, is defined
            in ``torchrl_dist.replay.hosts.totals_gate``.
        timeout_s: deadline of every call and wait; default: the session's.
        sampling: anything else that all who give it must give alike.

    Raises:
        ConfigurationError: the arguments cannot be right, or differ from those of another process.
        RemoteError: a host could not open its directory, or keeps another one by this name still.
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
    if hosts is not None:
        session.check_peers("hosts", hosts)
    peers = tuple(session.peers[:1] if hosts is None else hosts)
    if not peers or capacity < len(peers):
        raise ConfigurationError(
            f"capacity={capacity} over {len(peers)} hosts: expected a host and a row on each"
        )
    if write_to not in ("own", "all"):
        raise ConfigurationError(f"write_to={write_to!r}: expected 'own' or 'all'")
    if not 1 <= min_shards <= len(peers):
        raise ConfigurationError(f"min_shards={min_shards}: expected 1 to {len(peers)}")
    shard_capacity = -(-capacity // len(peers))
    if limiter is not None:
        limiter.check_capacity(capacity)
    parent = None if scratch_dir is None else os.fspath(scratch_dir)
    terms = {
        "capacity": capacity,
        "hosts": [peer.name for peer in peers],
        "write_to": write_to,
        "scratch_dir": parent,
        "resume": resume,
        "keep": keep,
        "limiter": limiter,
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
                shard_capacity,
                parent,
                resume,
                keep,
                limiter,
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
        if new:  # so that it can be tried again with other arguments
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
    """
    Raises:
        ConfigurationError: two shards are one directory. Tasks with one local rank do that whose
            launcher calls a single machine several nodes.
    """
    shards: dict[tuple[str, int, int], int] = {}
    for shard, address in enumerate(addresses):
        other = shards.setdefault(address.identity, shard)
        if other != shard:
            peers = [addresses[each].host.peer for each in (other, shard)]
            raise ConfigurationError(
                f"replay shards {other} and {shard} ({peers[0]} and {peers[1]}) are one folder, "
                f"{address.path}: the launcher calls one machine several nodes. Pass hosts= with "
                "one process of each machine"
            )


def _settle(
    remotes: Sequence[Remote[Any]], limiter: RateLimiter | None, timeout_s: float | None
) -> None:
    """Have shards go on together that were not made together: after a restart some may be new, or
    lost.

    They agree on one era, or largest priorities would never go from one to the other. What was
    inserted in a lost shard and what was sampled from it is not known any more; where the limiter's
    difference lies outside of its range without that, writers or samples would wait for what nobody
    is going to do, so the samples are counted up or down to the nearer end of the range.
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
    """Whether these are the first terms for a buffer of this name.

    Raises:
        ConfigurationError: another process uses others.
    """
    known = session.call(session.peers[0], _terms_of, name, terms, timeout_s=timeout_s)
    differ = [
        f"{key}={known[key]!r}, here {key}={value!r}"
        for key, value in terms.items()
        if known is not None and value != known[key] and not (key == "sampling" and value is None)
    ]
    if differ:
        raise ConfigurationError(
            f"replay buffer {name!r} is used already, but with {'; '.join(differ)}: use the same "
            "arguments in every process, or another name"
        )
    return known is None


def _terms_of(name: str, terms: dict[str, Any]) -> dict[str, Any] | None:
    """Runs in the driver: what was agreed on before, or None, and these are agreed on."""
    session = current_session()
    with LOCKS.hosts:
        known = _terms.get((session.session_id, name))
        if known is not None:
            if known["sampling"] is None:  # of a buffer that was built of its parts
                known["sampling"] = terms["sampling"]
            return dict(known)
        _terms[session.session_id, name] = terms
    session.on_end(lambda clean: _end(session, name, terms["scratch_dir"], clean))
    return None


def _end(session: Session, name: str, parent: str | None, clean: bool) -> None:
    """Runs in the driver when its session ends."""
    _withdraw(name, session.session_id)
    if clean and session.lost() and parent is None:  # in a scratch_dir a later job finds its rows
        remove_what_the_dead_left(session.world, name)


def _withdraw(name: str, session_id: str | None = None) -> None:
    """Runs in the driver: a buffer of this name may be built anew."""
    with LOCKS.hosts:
        _terms.pop((session_id or current_session().session_id, name), None)
