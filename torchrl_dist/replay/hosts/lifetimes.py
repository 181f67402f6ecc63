"""Close the objects that belong to a session's buffers in this process.

They are closed when the session ends, or some time after nothing refers to them."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from typing import TypeVar

from torchrl_dist.forks import now_and_in_children
from torchrl_dist.replay.hosts.client import ReplayClient, close_links
from torchrl_dist.replay.hosts.link import Link
from torchrl_dist.replay.node.directory import ReplayDirectory
from torchrl_dist.replay.node.opening import close_directory
from torchrl_dist.replay.parts.storage import SharedMemmapStorage
from torchrl_dist.runtime import Session, current_session

_clients: dict[str, _Clients] = {}
"""The clients of this process, by session."""
_opened: dict[str, _Opened] = {}
"""The direct storages of this process, by session."""


class _Locks:
    hosts: threading.Lock
    """The lock of the tables above, and of the tables in ``keeper`` and ``owner``."""

    def renew(self) -> None:
        self.hosts = threading.Lock()


LOCKS = _Locks()
now_and_in_children(LOCKS, _Locks.renew)


class _Clients:
    """The clients of this process in one session.

    Each copy of a buffer that is unpickled here has a client. Clients to which nothing refers are
    closed when the next client is opened, because opening blocks for calls anyway, and garbage
    collection must not block.
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
        with contextlib.suppress(IndexError):  # none is left, or another thread was faster
            while True:
                close_links(*self._dropped.popleft())

    def close(self) -> None:
        for client in list(self._alive):
            client.close()
        self._close_dropped()


def clients_of(session: Session) -> _Clients:
    with LOCKS.hosts:
        clients = _clients.get(session.session_id)
        if clients is None:
            clients = _clients[session.session_id] = _Clients()
            session.on_leave(lambda clean: _leave(session.session_id, clean))
        return clients


def _leave(session_id: str, clean: bool) -> None:
    with LOCKS.hosts:
        clients = _clients.pop(session_id)
    if clean:
        clients.close()


class DirectStorage(SharedMemmapStorage):
    """A storage for a host's directory, in another process of the host's node. See
    :func:`open_directly`."""

    _opened: _Opened | None = None

    def __del__(self) -> None:
        if self._opened is not None and not self._closed:
            self._opened.dropped.append(self.directory)


_Direct = TypeVar("_Direct", bound=DirectStorage)


class _Opened:
    """The direct storages of this process in one session.

    As with clients, storages to which nothing refers are closed when the next one is opened."""

    def __init__(self) -> None:
        self._alive: weakref.WeakSet[DirectStorage] = weakref.WeakSet()
        self.dropped: deque[ReplayDirectory] = deque()

    def add(self, storage: DirectStorage) -> None:
        self._close_dropped(clean=False)  # the host removes the directory
        self._alive.add(storage)
        storage._opened = self

    def _close_dropped(self, clean: bool) -> None:
        with contextlib.suppress(IndexError):  # none is left, as for clients
            while True:
                close_directory(self.dropped.popleft(), clean=clean)

    def close(self, clean: bool) -> None:
        for storage in list(self._alive):
            storage.close(clean=clean)
        self._close_dropped(clean)


def open_directly(
    path: str, job_id: str, capacity: int, timeout_s: float, kind: type[_Direct]
) -> _Direct:
    """Return a storage for a host's directory, in another process of the host's node. It is closed
    when the session ends."""
    storage = kind(capacity, scratch_dir=path, job_id=job_id, timeout_s=timeout_s)
    session = current_session()
    with LOCKS.hosts:
        opened = _opened.get(session.session_id)
        if opened is None:
            opened = _opened[session.session_id] = _Opened()
            session.on_end(lambda clean: _opened.pop(session.session_id).close(clean))
    opened.add(storage)
    return storage
