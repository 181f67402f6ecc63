"""Handles to objects that live in other processes."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from ..errors import ConfigurationError
from .peer import Peer

T = TypeVar("T")


class Caller(Protocol):
    """What a handle needs from the session: calls to the object's process."""

    session_id: str
    me: Peer

    def _call(self, peer: Peer, operation: tuple[Any, ...], timeout_s: float | None) -> Any: ...

    def _submit(
        self, peer: Peer, operation: tuple[Any, ...], timeout_s: float | None
    ) -> Future[Any]: ...


_current: Caller | None = None


@dataclass(frozen=True)
class Remote(Generic[T]):
    """A handle to an object in another process (or in this one), made by ``Session.remote``.

    The handle can be pickled, so any process of the same session may call the object. Calls run
    concurrently and in no particular order, each in a thread of the object's process. Of these
    threads, 64 run at once; further calls wait in a queue. The object must do its own locking. If a
    method returns a ``concurrent.futures.Future``, the caller gets the future's result, and no
    thread waits for it. Arguments and results are copies, except within one process. Tensors are
    read while they are sent: do not change tensors in arguments until the answer has arrived. A
    method must return a copy of each tensor that the object may change later. The object lives
    until the session ends.

    Example:
        >>> with session() as me:
        ...     rows = me.remote(me.me, list)  # an object in that process
        ...     rows.call("append", "row")
        ...     rows.submit("count", "row").result()
        1
    """

    peer: Peer
    key: int
    session_id: str

    def call(self, method: str, *args: Any, timeout_s: float | None = None, **kwargs: Any) -> Any:
        """Call ``method`` of the object and block for its result, at most ``timeout_s``.

        The default is the session's ``timeout_s``. A method that misses the deadline still runs to
        its end.

        Raises:
            RemoteError: the method raised; ``__cause__`` is its exception if this exception can be
                pickled.
            DeadlineError: there was no answer in time.
            PeerLostError: the process is gone; raised at once if the loss is already known.
        """
        operation = ("method", self.key, method, args, kwargs)
        return self._session()._call(self.peer, operation, timeout_s)

    def submit(
        self, method: str, *args: Any, timeout_s: float | None = None, **kwargs: Any
    ) -> Future[Any]:
        """Like ``call``, without blocking.

        The future fails with the errors of ``call``. The future cannot be cancelled. Its callbacks
        must not block the thread in which they run. With ``timeout_s=math.inf``, the future fails
        only once the process is known to be gone: its connection broke, or it gave no sign of life
        for the session's ``timeout_s``.
        """
        operation = ("method", self.key, method, args, kwargs)
        return self._session()._submit(self.peer, operation, timeout_s)

    def _session(self) -> Caller:
        session = current()
        if session.session_id != self.session_id:
            raise ConfigurationError(
                f"This handle to an object of {self.peer} belongs to a session that has ended. "
                "Make a new one with session.remote(...)."
            )
        return session


def current() -> Caller:
    """Return the session that this process is in.

    Raises:
        ConfigurationError: this process is not in a session.
    """
    if _current is None:
        raise ConfigurationError("This process is not in a session; enter one with session(...).")
    return _current


_taken = threading.Lock()  # held while this process is in, enters or leaves a session


@contextlib.contextmanager
def only_session() -> Iterator[None]:
    """Refuse a second session in this process, because a process has one RPC agent."""
    if not _taken.acquire(blocking=False):
        where = "" if _current is None else f" as {_current.me.name}"
        raise ConfigurationError(
            f"This process is already in a session{where}, or is entering one; leave that session "
            "first. Two sessions need two processes; two threads are not enough."
        )
    try:
        yield
    finally:
        _taken.release()


def set_current(session: Caller | None) -> None:
    global _current
    _current = session
