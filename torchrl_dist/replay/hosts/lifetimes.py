"""Close the objects that belong to a session's buffers in this process.

These objects are closed when the session ends, or some time after nothing refers to them."""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

from torchrl_dist.forks import renewed
from torchrl_dist.replay.hosts.client import ReplayClient, close_links
from torchrl_dist.replay.node.opening import close_directory
from torchrl_dist.replay.parts.storage import SharedMemmapStorage
from torchrl_dist.runtime import Session, current_session

_clients: dict[str, _InUse] = {}
"""The clients of this process, by session."""
_opened: dict[str, _InUse] = {}
"""The direct storages of this process, by session."""


class _Locks:
    def __init__(self) -> None:
        self.hosts = renewed(self, "hosts", threading.Lock)
        """The lock of the tables above, and of the tables in ``keeper`` and ``owner``."""


LOCKS = _Locks()


class _InUse:
    """The clients or the direct storages of this process in one session.

    Each copy of a buffer that this process unpickles has its own client or storage. When nothing
    refers to such a client or storage any more, it is closed as soon as the next one is opened,
    because opening blocks for calls anyway. Garbage collection does not close it, because garbage
    collection must not block.
    """

    def __init__(self, close: Callable[[Any, bool], None]) -> None:
        self._close = close
        self._alive: weakref.WeakSet[Any] = weakref.WeakSet()
        self.dropped: deque[Callable[..., None]] = deque()
        """Functions that take ``clean``. Each closes an object to which nothing refers any more."""

    def add(self, user: Any) -> None:
        self._close_dropped(clean=False)  # leaves the removal of the directory to the host
        self._alive.add(user)

    def _close_dropped(self, clean: bool) -> None:
        with contextlib.suppress(IndexError):  # no function is left, or another thread was faster
            while True:
                self.dropped.popleft()(clean=clean)

    def close(self, clean: bool) -> None:
        for user in list(self._alive):
            self._close(user, clean)
        self._close_dropped(clean)


def close_at_end(session: Session, client: ReplayClient) -> None:
    """Close a client when the session ends cleanly, or some time after nothing refers to it."""
    key, links, timeout_s = session.session_id, client.links, client.timeout_s
    with LOCKS.hosts:
        clients = _clients.get(key)
        if clients is None:
            clients = _clients[key] = _InUse(lambda client, clean: client.close())
            session.on_leave(lambda clean: _leave(key, clean))
    clients.add(client)
    # a function that referred to the client would keep the client from being freed
    weakref.finalize(
        client, clients.dropped.append, lambda clean: close_links(links, timeout_s)
    ).atexit = False


def _leave(session_id: str, clean: bool) -> None:
    with LOCKS.hosts:
        clients = _clients.pop(session_id)
    if clean:
        clients.close(clean)


class DirectStorage(SharedMemmapStorage):
    """A storage for a host's directory, in another process of the host's node. See
    :func:`open_directly`."""

    _opened: _InUse | None = None

    def __del__(self) -> None:
        if self._opened is not None and not self._closed:
            self._opened.dropped.append(functools.partial(close_directory, self.directory))


_Direct = TypeVar("_Direct", bound=DirectStorage)


def open_directly(
    path: str, job_id: str, capacity: int, timeout_s: float, kind: type[_Direct]
) -> _Direct:
    """Return a storage for a host's directory, in another process of the host's node. The
    storage is closed when the session ends."""
    storage = kind(capacity, scratch_dir=path, job_id=job_id, timeout_s=timeout_s)
    session = current_session()
    key = session.session_id
    with LOCKS.hosts:
        opened = _opened.get(key)
        if opened is None:
            opened = _opened[key] = _InUse(lambda storage, clean: storage.close(clean=clean))
            session.on_end(lambda clean: _opened.pop(key).close(clean))
    opened.add(storage)
    storage._opened = opened
    return storage
