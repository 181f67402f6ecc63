"""Who keeps a buffer's rows: one process of the job, or several that keep a shard each."""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote

from torchrl_dist.errors import ConfigurationError, TorchRLDistError
from torchrl_dist.forks import now_and_in_children
from torchrl_dist.replay.hosts.client import ReplayClient, close_links
from torchrl_dist.replay.hosts.host import ReplayHost
from torchrl_dist.replay.hosts.link import Link, LocalLink, RemoteLink
from torchrl_dist.replay.hosts.messages import Reply, Request
from torchrl_dist.replay.law.limiter import RateLimiter
from torchrl_dist.replay.law.placement import largest_reservation
from torchrl_dist.replay.node.directory import ReplayDirectory, close_directory
from torchrl_dist.replay.node.gate import set_limiter
from torchrl_dist.replay.node.leftovers import remove_leftovers
from torchrl_dist.replay.parts.storage import SharedMemmapStorage
from torchrl_dist.runtime import Peer, Remote, Session, current_session

_MAX_QUEUED_BYTES = 2**26

_hosts: dict[tuple[str, str], _Keeper] = {}
"""Hosts in this process by session and name."""
_clients: dict[str, _Clients] = {}
"""Clients in this process by session."""
_opened: dict[str, _Opened] = {}
"""Direct storages in this process by session."""
_terms: dict[tuple[str, str], dict[str, Any]] = {}
"""In the driver's process: what the users of a buffer agreed on, by session and name."""


class _Locks:
    hosts: threading.Lock
    """Of the four tables above."""

    def renew(self) -> None:
        self.hosts = threading.Lock()


_LOCKS = _Locks()
now_and_in_children(_LOCKS, _Locks.renew)


@dataclass(frozen=True)
class HostAddress:
    """Where one host is: a handle for calls, and its directory for processes of its node."""

    host: Remote[Any]
    path: str
    job_id: str
    identity: tuple[str, int, int]
    """Boot of the machine, device and inode of the lock file: the same for whoever sees it."""

    def is_here(self) -> bool:
        """Whether this process can use the host's directory itself."""
        try:
            return _identity(Path(self.path)) == self.identity
        except OSError:
            return False


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
        here = [shard for shard, address in enumerate(self.hosts) if address.is_here()]
        links: list[Link] = []
        for shard, address in enumerate(self.hosts):
            if self.shortcut and shard in here:
                storage = open_directly(address, self)
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
        _clients_of(session).add(client)
        return client


class _Clients:
    """The clients of this process in one session.

    Each copy of a buffer that arrives here pickled has one. Those that nobody holds any more are
    closed when the next one comes, which blocks for calls in any case: garbage collection must not.
    """

    def __init__(self) -> None:
        self._alive: weakref.WeakSet[ReplayClient] = weakref.WeakSet()
        self._dropped: deque[tuple[Sequence[Link], float]] = deque()

    def add(self, client: ReplayClient) -> None:
        self._close_dropped()
        self._alive.add(client)
        dropped = (client.links, client.timeout_s)
        weakref.finalize(client, self._dropped.append, dropped).atexit = False

    def _close_dropped(self) -> None:
        with contextlib.suppress(IndexError):  # nothing left, or another thread was faster
            while True:
                close_links(*self._dropped.popleft())

    def close(self) -> None:
        for client in list(self._alive):
            client.close()
        self._close_dropped()


def _clients_of(session: Session) -> _Clients:
    with _LOCKS.hosts:
        clients = _clients.get(session.session_id)
        if clients is None:
            clients = _clients[session.session_id] = _Clients()
            session.on_leave(lambda clean: _leave(session.session_id, clean))
        return clients


def _leave(session_id: str, clean: bool) -> None:
    with _LOCKS.hosts:
        clients = _clients.pop(session_id)
    if clean:
        clients.close()


class DirectStorage(SharedMemmapStorage):
    """A storage over a host's directory in a process of its node, from :func:`open_directly`."""

    _opened: _Opened | None = None

    def __del__(self) -> None:
        if self._opened is not None and not self._closed:
            self._opened.dropped.append(self.directory)


class _Opened:
    """The direct storages of this process in one session. As with clients, those that nobody holds
    any more are closed when the next one is opened."""

    def __init__(self) -> None:
        self._alive: weakref.WeakSet[DirectStorage] = weakref.WeakSet()
        self.dropped: deque[ReplayDirectory] = deque()

    def add(self, storage: DirectStorage) -> None:
        self._close_dropped(clean=False)  # the host removes the directory
        self._alive.add(storage)
        storage._opened = self

    def _close_dropped(self, clean: bool) -> None:
        with contextlib.suppress(IndexError):  # as above
            while True:
                close_directory(self.dropped.popleft(), clean=clean)

    def close(self, clean: bool) -> None:
        for storage in list(self._alive):
            storage.close(clean=clean)
        self._close_dropped(clean)


def open_directly(
    address: HostAddress, owner: ReplayOwner, kind: type[DirectStorage] = DirectStorage
) -> DirectStorage:
    """A storage over the host's directory, for a process of its node; closed with the session."""
    storage = kind(
        owner.shard_capacity,
        scratch_dir=address.path,
        job_id=address.job_id,
        timeout_s=owner.timeout_s,
    )
    session = current_session()
    with _LOCKS.hosts:
        opened = _opened.get(session.session_id)
        if opened is None:
            opened = _opened[session.session_id] = _Opened()
            session.on_end(lambda clean: _opened.pop(session.session_id).close(clean))
    opened.add(storage)
    return storage


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
    ``timeout_s`` are each process's own.) Blocks for a call of the driver and two per host, which
    must be in their session.

    Args:
        session: the session of this process.
        capacity: rows in all. Each host keeps ``ceil(capacity / len(hosts))``.
        hosts: who keeps the rows, best one process per node; default: the driver alone. Shards
            are numbered in this order, and row ``slot`` of shard ``s`` has the index
            ``s * shard_capacity + slot``.
        name: tells buffers of one job apart.
        scratch_dir: folder on each host in which its directory is made; default: ``/dev/shm``,
            or else the folder for temporary files.
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
            in ``torchrl_dist.replay.hosts.totals``.
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
    with _LOCKS.hosts:
        known = _terms.get((session.session_id, name))
        if known is not None:
            if known["sampling"] is None:  # of a buffer that was built of its parts
                known["sampling"] = terms["sampling"]
            return dict(known)
        _terms[session.session_id, name] = terms
    session.on_end(lambda clean: _withdraw(name, session.session_id))
    return None


def _withdraw(name: str, session_id: str | None = None) -> None:
    """Runs in the driver: a buffer of this name may be built anew."""
    with _LOCKS.hosts:
        _terms.pop((session_id or current_session().session_id, name), None)


class _Keeper(ReplayHost):
    """A host that can say where its directory is, and can be released.

    Args:
        key: its session and name.
        asked: the arguments of :func:`open_host` that it was made with, by name.
    """

    def __init__(
        self, storage: SharedMemmapStorage, key: tuple[str, str], asked: dict[str, Any]
    ) -> None:
        super().__init__(storage)
        self._key = key
        self._asked = asked
        self._released = False
        self._releasing = threading.RLock()

    def check_asked(self, asked: dict[str, Any]) -> None:
        """
        Raises:
            ConfigurationError: it was made with other arguments.
        """
        differ = [
            f"{key}={self._asked[key]!r}, here {key}={value!r}"
            for key, value in asked.items()
            if value != self._asked[key]
        ]
        if differ:
            raise ConfigurationError(
                f"{current_session().me.name} keeps {self.storage.directory.path} for replay "
                f"buffer {self._key[1]!r} still, with {'; '.join(differ)}: use the same arguments, "
                "release that buffer, or take another name"
            )

    def serve(self, request: Request) -> Reply:
        if self._released:
            raise ConfigurationError(
                f"replay buffer {self._key[1]!r} was released: build it again to use it"
            )
        return super().serve(request)

    def release(self) -> bool:
        """Close the directory now; whether it is to go, but others still use it. Idempotent.

        Raises:
            DeadlineError: a write did not end in time; nothing has changed, it can be tried again.
        """
        return self._release(clean=True)

    def give_up(self) -> None:
        """As :meth:`release`, of a buffer that was not completed; rows found again stay."""
        self._release(clean=self._released or not self.storage.write_count)

    def _release(self, clean: bool) -> bool:
        with self._releasing:
            if self._released:
                return False
            directory = self.storage.directory
            path, stays = directory.path, directory.stays
            try:
                _close_host(self._key, clean)
            except BaseException:
                with _LOCKS.hosts:  # whoever tries again, or the end of the session, finds it
                    _hosts.setdefault(self._key, self)
                raise
            self._released = True
            # the session keeps this object, and these would keep the memory
            del self._storage, self._shard, self._prioritized
        return not stays and path.exists()

    def whereabouts(self) -> tuple[str, str, tuple[str, int, int]]:
        directory = self.storage.directory
        return str(directory.path), directory.job_id, _identity(directory.path)


def open_host(
    name: str,
    capacity: int,
    parent: str | None,
    resume: bool,
    keep: bool,
    limiter: RateLimiter | None,
) -> ReplayHost:
    """Runs in the host's process: make the host of this name, or find it.

    Raises:
        ConfigurationError: the host of this name was made with other arguments.
    """
    session = current_session()
    asked = {
        "capacity per host": capacity,
        "scratch_dir": parent,
        "resume": resume,
        "keep": keep,
        "limiter": limiter,
    }
    with _LOCKS.hosts:
        host = _hosts.get((session.session_id, name))
        if host is None:
            job_id = session.world.job_id
            # Only what stays when other hosts are lost: after a restart ranks and shards may have
            # other numbers, and this node's directory is to be found again.
            place = f"{name}-{session.world.local_rank}"
            # What is to be found by a later job has a name that the job can give. Otherwise each
            # job has its own, and what it leaves is of no use once it cannot come back.
            named = parent is not None or keep or resume
            prefix = f"torchrl_dist-{os.getuid()}-"
            # A launcher may call one machine several nodes.
            folder = prefix + (place if named else f"{job_id}-{place}-{session.me.host}")
            parent = parent or _default_parent()
            if not named:
                remove_leftovers(Path(parent), prefix)
            storage = SharedMemmapStorage(
                capacity,
                scratch_dir=Path(parent, quote(folder, safe="")),
                job_id=job_id,
                resume=resume,
                keep=keep,
                timeout_s=session.timeout_s,
            )
            try:
                set_limiter(storage.directory, limiter)
            except BaseException:
                storage.close()
                raise
            key = session.session_id, name
            host = _hosts[key] = _Keeper(storage, key, asked)
            session.on_end(lambda clean: _close_host(key, clean))
        else:
            host.check_asked(asked)
    return host


def _close_host(key: tuple[str, str], clean: bool) -> None:
    with _LOCKS.hosts:
        host = _hosts.pop(key, None)
    if host is not None:  # else it was released
        host.close(clean)


def _default_parent() -> str:
    memory = "/dev/shm"
    return memory if os.access(memory, os.W_OK) else tempfile.gettempdir()


def _identity(path: Path) -> tuple[str, int, int]:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    status = os.stat(path / "lock")
    return boot, status.st_dev, status.st_ino
