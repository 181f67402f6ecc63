"""torch.distributed's store, with a deadline for every operation and for connecting.

The server of a TCPStore enforces the deadlines of operations. If the server's process is stopped,
most operations of other processes therefore block indefinitely. Connecting also blocks indefinitely
if a silent program listens at the port. In this module, a thread makes these calls, and the caller
waits for the thread only until a deadline.
"""

from __future__ import annotations

import contextlib
import errno
import os
import queue
import socket
import threading
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ..errors import ConfigurationError, DeadlineError
from .awake import awake

_LEAST_S = 0.001  # with a timeout of 0, a store waits indefinitely
_ANSWER_S = 1.0
_BACKLOG = 1024
# The deadline of an operation if the previous operation was not answered.
_AGAIN_S = 0.1
_NOTHING = "\0"  # stands for the value of a missing key


class StoreSilent(dist.DistError):
    """The store did not answer in time; it may answer later."""


class _Task:
    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self.function, self.args = function, args
        self.result: Any = None
        self.error: BaseException | None = None
        self.done, self.is_dropped = threading.Event(), False


class AnsweringStore:
    """Operations of ``store`` that raise StoreSilent if no answer comes within about a second.

    An operation that raised StoreSilent may still take effect later. Other errors are those of the
    store.

    Args:
        until: before this time on ``awake()``, an operation may wait longer than a second for its
            answer.
    """

    def __init__(self, store: dist.Store, *, until: float = 0.0) -> None:
        self._store = store
        self._until = until
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._answers = True
        # The thread is a daemon, because its call may never return.
        threading.Thread(target=_work, args=(self._tasks,), daemon=True).start()
        weakref.finalize(self, self._tasks.put, None)

    def set(self, key: str, value: str) -> None:
        self._do(self._store.set, key, value)

    def get(self, key: str) -> str:
        return self._do(self._store.get, key).decode()

    def multi_get(self, keys: list[str]) -> list[str]:
        return [value.decode() for value in self._do(self._store.multi_get, keys)]

    def check(self, key: str) -> bool:
        return self._do(self._store.check, [key])

    def found(self, key: str) -> str | None:
        """Return the value of the key without waiting for it; None if the key is missing."""
        # If the key is missing, compare_set does not set it, and returns the expected value.
        value: str = self._do(self._store.compare_set, key, _NOTHING, _NOTHING).decode()
        return None if value == _NOTHING else value

    def delete_key(self, key: str) -> None:
        self._do(self._store.delete_key, key)

    def add(self, key: str, amount: int, timeout_s: float) -> int:
        return self._do(self._store.add, key, amount, wait_s=timeout_s)

    def wait(self, keys: list[str], timeout_s: float) -> bool:
        """Whether all keys are set within ``timeout_s``."""
        try:
            self._do(self._store.wait, keys, timedelta(seconds=timeout_s), wait_s=timeout_s)
        # the deadline has passed (a lost store raises other errors)
        except (dist.DistStoreError, StoreSilent):
            return False
        return True

    def _do(self, function: Callable[..., Any], *args: Any, wait_s: float = 0.0) -> Any:
        task = _Task(function, args)
        self._tasks.put(task)
        wait_s += _ANSWER_S if self._answers else _AGAIN_S
        while not task.done.wait(max(wait_s, self._until - awake())):
            if awake() < self._until:
                continue  # this process was stopped meanwhile
            task.is_dropped, self._answers = True, False
            raise StoreSilent("the store of the ranks does not answer")
        self._answers = True
        if task.error is not None:
            raise task.error
        return task.result


def _work(tasks: queue.SimpleQueue[_Task | None]) -> None:
    while (task := tasks.get()) is not None:
        if not task.is_dropped:
            try:
                task.result = task.function(*task.args)
            except BaseException as error:
                task.error = error
            task.done.set()


def connect_store(host: str, port: int, timeout_s: float) -> dist.TCPStore:
    """Connect to the store that another process keeps.

    Raises:
        DeadlineError: there is no store, or another program listens at its port.
    """
    return _make(host, port, timeout_s)


def keep_store(
    host: str, port: int, timeout_s: float, *, everywhere: bool = False
) -> tuple[dist.TCPStore, int]:
    """Make a store that this process keeps. Return the store and the port at which it listens.

    Args:
        port: 0 chooses any free port.
        everywhere: whether to listen on all addresses, as a plain TCPStore always does, instead of
            only on the address of ``host``.

    Raises:
        ConfigurationError: this process cannot listen at that address and port.
    """
    try:
        listener = _listen(host, port, everywhere)
    except OSError as error:
        raise ConfigurationError(
            f"the store of the job cannot be kept at {host}:{port}: {error.strerror or error}. "
            + (
                "Another program or an earlier job listens at that port: end it, or start all "
                "processes of the job with another MASTER_PORT"
                if error.errno == errno.EADDRINUSE
                else "MASTER_ADDR must be an address of the machine of rank 0; in a job of "
                "one machine the loopback interface must be up"
            )
        ) from error
    with listener:
        port = listener.getsockname()[1]
        # The store's daemon closes this descriptor, sometimes even if the store could not be made.
        fd = os.dup(listener.fileno())
        try:
            return _make(host, port, timeout_s, is_master=True, master_listen_fd=fd), port
        except BaseException:
            with contextlib.suppress(OSError):
                if os.fstat(fd).st_ino == os.fstat(listener.fileno()).st_ino:
                    os.close(fd)
            raise


def _listen(host: str, port: int, everywhere: bool) -> socket.socket:
    if everywhere and socket.has_dualstack_ipv6():
        return socket.create_server(
            ("", port), family=socket.AF_INET6, backlog=_BACKLOG, dualstack_ipv6=True
        )
    family, _, _, _, address = socket.getaddrinfo(
        None if everywhere else host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    return socket.create_server(address[:2], family=family, backlog=_BACKLOG)


def _make(host: str, port: int, timeout_s: float, **options: Any) -> dist.TCPStore:
    result: list[dist.TCPStore | BaseException] = []
    done = threading.Event()

    def make() -> None:
        try:
            timeout = timedelta(seconds=max(_LEAST_S, timeout_s))
            result.append(
                dist.TCPStore(host, port, timeout=timeout, wait_for_workers=False, **options)
            )
        except BaseException as error:
            result.append(error)
        done.set()

    before = _connections_to(port)
    threading.Thread(target=make, name="torchrl_dist-connect", daemon=True).start()
    # The store's own deadline is earlier, unless the store is connected and waits for an answer.
    due = awake() + timeout_s + _ANSWER_S
    while not done.wait(max(0.0, due - awake())):
        if awake() >= due:
            for connection, fd in _connections_to(port).items():
                if connection not in before:
                    _break(fd)
            done.wait(_ANSWER_S)
            raise DeadlineError(
                f"{host}:{port} accepts connections, but did not answer as the store of rank 0 "
                f"within {timeout_s:g} s: another program listens there, or the process that keeps "
                "the store is stopped. Start all processes of the job with a MASTER_PORT that "
                "nothing else uses"
            )
    (made,) = result
    if isinstance(made, dist.DistError):
        raise DeadlineError(
            f"no store at {host}:{port} within {timeout_s:g} s. Check that rank 0 is running, "
            "that this machine may connect to it, and that no other program uses that port "
            f"({str(made).splitlines()[0]})"
        ) from made
    if isinstance(made, BaseException):
        raise made
    return made


def _connections_to(port: int) -> dict[str, int]:
    """Return the descriptors of the connections to a port. The keys are the kernel's names of the
    sockets."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # not connected, or closed meanwhile
            kind = os.readlink(f"/proc/self/fd/{name}")
            if kind.startswith("socket:"):
                with _copy_of(int(name)) as copy:
                    if copy.family in (socket.AF_INET, socket.AF_INET6):
                        if copy.getpeername()[1] == port:
                            found[kind] = int(name)
    return found


def _copy_of(fd: int) -> socket.socket:
    copy = os.dup(fd)
    try:
        return socket.socket(fileno=copy)
    except BaseException:
        os.close(copy)
        raise


def _break(fd: int) -> None:
    with contextlib.suppress(OSError), _copy_of(fd) as copy:
        copy.shutdown(socket.SHUT_RDWR)
