"""A server process that imports torch and torchrl once and forks processes that need them.

The server forks the children of ``local_cluster`` and the env processes of node workers. Each env
process gets one end of a socket pair. Importing takes seconds of CPU per process; a fork takes
milliseconds. Forking is safe only in a process that has one thread and uses neither RPC nor CUDA.
The server therefore only forks, waits and reports.

A child that starts processes itself becomes another client of the server that forked it. The
processes that it starts need not import anything, either. The server accepts only clients of this
user.

Lifetimes. When a client is gone, the server ends the client's children. When the server's first
client (its parent) is gone, the server also ends itself. When the server dies, the kernel kills the
children, and each client kills all processes that remain in its children's process groups.

    client --commands (a stream)-->  server  --fork-->  child
    client <--reports (datagrams)--  server and children
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import os
import pickle
import secrets
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from typing import Any

from ..errors import ConfigurationError, DeadlineError, PeerLostError, RemoteError
from ..forks import TO_BE_FORKED, imports_to_be_forked
from .outputs import flush, outlive_readers
from .signals import STOP_SIGNALS, outlive_stop_signals

_PRELOAD = (
    "numpy",
    "torch",
    "torch.distributed.rpc",
    "tensordict",
    "torchrl.data",
    "torchrl.envs",
    "torchrl.modules",
    "torchrl.collectors",
    "gymnasium",
    "torchrl_dist.runtime.local",
)
_MAX_REPORT_BYTES = 64 * 1024
_PR_SET_PDEATHSIG = 1
# This limit is long, because imports are slow if many servers start on few cores.
_BOOT_TIMEOUT_S = 120.0
_KILL_TIMEOUT_S = 5.0
_JOIN_S = 1.0  # how long a new connection may take to send its descriptors
_FULL_S = 0.01
# Address of the server that forked this process. Tests set this variable to the address of a server
# that they share.
_address: str | None = None


@dataclass
class ChildState:
    pid: int | None = None
    ready: bool = False
    failure: tuple[str, str] | None = None  # (summary, traceback) of the child's exception
    exit: str | None = None  # how the child ended, such as "killed by SIGKILL"


@dataclass
class Children:
    """The state of the processes of one cluster, as their parent knows it. The monitor thread
    updates the states."""

    job: int
    states: dict[int, ChildState]
    changed: threading.Condition = field(default_factory=threading.Condition)
    on_exit: Callable[[int, str], None] | None = None

    def watch(self, on_exit: Callable[[int, str], None]) -> None:
        """Call ``on_exit(rank, how)`` for every past and future death of a child, in any thread."""
        with self.changed:
            self.on_exit = on_exit
            dead = [(rank, state.exit) for rank, state in self.states.items() if state.exit]
        for rank, how in dead:
            on_exit(rank, how)

    def wait_ready(self, timeout_s: float, describe: Callable[[int], tuple[str, str]]) -> None:
        """Block until every child has finished its start-up.

        ``describe(rank)`` returns the (name, host) that errors mention.

        Raises:
            RemoteError: a child's start-up raised.
            PeerLostError: a child died during start-up.
            DeadlineError: some children were not ready in time.
        """

        def settled() -> bool:
            states = self.states.values()
            return all(s.ready for s in states) or any(s.failure or s.exit for s in states)

        with self.changed:
            self.changed.wait_for(settled, timeout_s)
            for rank, state in self.states.items():
                name, host = describe(rank)
                if state.failure:
                    summary, trace = state.failure
                    raise RemoteError(
                        f"{name} failed at start-up: {summary}",
                        peer=name,
                        host=host,
                        remote_traceback=trace,
                    )
                if state.exit:
                    raise PeerLostError(
                        f"{name} on {host} died at start-up: {state.exit}; see its output"
                    )
            late = [describe(rank)[0] for rank, state in self.states.items() if not state.ready]
        if late:
            raise DeadlineError(
                f"{', '.join(late)} did not start within {timeout_s:g} s: check init_fn, or "
                "raise timeout_s."
            )

    def wait_gone(self, timeout_s: float) -> bool:
        """Wait at most ``timeout_s`` for every child to end. Return whether all have ended."""
        with self.changed:
            return self.changed.wait_for(
                lambda: all(state.exit for state in self.states.values()), timeout_s
            )


class ForkServer:
    """The parent's side of a fork server. A server may serve several clusters, one after the other:

        with ForkServer() as server:
            with local_cluster({"learner": 1, "collector": 2}, fork_server=server) as s: ...

    Children do not see later changes of modules that the server has imported.

    Args:
        fork: fork the server from this process, with its imports. Set this only in a program that
            has only imported modules and has not run user code. If this process has more than one
            thread, the server is nevertheless started as a new process.
    """

    def __init__(self, *, fork: bool = False) -> None:
        self._jobs = 0
        self._children: Children | None = None
        self._up = threading.Event()
        self._error: str | None = None
        self._closed = False
        # in a fork, which has a copy of this object, os.getpid() differs from this number
        self._owner = os.getpid()
        # None: another client started the server.
        self._process: subprocess.Popen[bytes] | _Fork | None = None
        self._command_lock = threading.RLock()  # held while a command and its descriptors are sent
        self._link, commands = _pair(socket.SOCK_STREAM)
        self._commands = Connection(os.dup(self._link.fileno()))
        self._reports, reports = _pair(socket.SOCK_SEQPACKET)
        fds = (commands.fileno(), reports.fileno())
        self.pid = 0
        if _address is not None:
            self.address = _address
            with contextlib.suppress(OSError):  # raised if the server at that address has ended
                self.pid = self._join(fds)
        if not self.pid:
            self.address = f"\0torchrl_dist-{secrets.token_hex(16)}"
            forked = self._fork(fds) if fork else None
            self._process = forked or self._start_process(fds)
            self.pid = self._process.pid
        commands.close()
        reports.close()
        self._pidfd = os.pidfd_open(self.pid)
        self._monitor = threading.Thread(
            target=self._watch, name="torchrl_dist-forkserver", daemon=True
        )
        self._monitor.start()

    def _join(self, fds: tuple[int, int]) -> int:
        """Become another client of a running server; return its pid."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as link:
            link.settimeout(_JOIN_S)
            until = time.monotonic() + _JOIN_S
            while True:
                try:
                    link.connect(self.address)
                    break
                # the server's queue is full, possibly because another user fills it
                except BlockingIOError:
                    if time.monotonic() > until:
                        raise
                    time.sleep(_FULL_S)
            pid, uid = _peer(link)
            if uid != os.getuid():
                raise ConnectionError(
                    "the fork server belongs to another user; expected a server of this user"
                )
            socket.send_fds(link, [b"client"], fds)
            return pid

    def _fork(self, fds: tuple[int, int]) -> _Fork | None:
        with imports_to_be_forked():
            for name in _PRELOAD:
                importlib.import_module(name)
        if len(os.listdir("/proc/self/task")) > 1:
            return None
        parent = os.getpid()
        flush(sys.stdout, sys.stderr)
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        try:
            pid = os.fork()
            if pid:
                return _Fork(pid)
        finally:
            if os.getpid() == parent:
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        try:
            for number in STOP_SIGNALS:
                signal.signal(number, signal.SIG_IGN)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
            os.setsid()  # a terminal's Ctrl-C does not reach this session
            _keep_only(fds)
            os.environ.update(TO_BE_FORKED)
            serve(*fds, parent, self.address)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)

    def _start_process(self, fds: tuple[int, int]) -> subprocess.Popen[bytes]:
        numbers = [int(number) for number in STOP_SIGNALS]
        code = (
            # no garbage collection: it would take a quarter of the imports' time and find nothing
            "import gc, signal, sys; gc.disable(); "
            f"[signal.signal(n, signal.SIG_IGN) for n in {numbers}]; "
            f"signal.pthread_sigmask(signal.SIG_UNBLOCK, {numbers}); "
            f"sys.path[:] = {sys.path!r}; "
            "from torchrl_dist.runtime.forkserver import serve; "
            f"serve({fds[0]}, {fds[1]}, {os.getpid()}, {self.address!r})"
        )
        # Slurm sends stop signals to every process that it finds. The parent handles these signals
        # and ends the children cleanly. In the server, the signals are blocked until the server
        # ignores them.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        try:
            return subprocess.Popen(
                [sys.executable, "-c", code],
                pass_fds=fds,
                env={**os.environ, **TO_BE_FORKED},
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # a terminal's Ctrl-C does not reach that session
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def start(self, job: Any, ranks: range, ends: Sequence[int] = ()) -> Children:
        """Fork one child per rank, which runs ``job.run(rank, ready)``. Does not wait for the
        children.

        Args:
            ends: one descriptor per rank, such as an end of a socket pair. Only the child of that
                rank inherits the descriptor, and runs ``job.run(rank, ready, descriptor)``. The
                caller must close its own copy.

        Raises:
            PeerLostError: the server died.
            ConfigurationError: another cluster's children still run.
            DeadlineError: the server did not start in time.
        """
        assert len(ends) in (0, len(ranks))
        self.wait_up()
        if self._children is not None and not self._children.wait_gone(0):
            raise ConfigurationError(
                "this fork server still has running children of another cluster; leave that "
                "cluster first, or use one fork server per cluster"
            )
        self._jobs += 1
        self._children = Children(self._jobs, {rank: ChildState() for rank in ranks})
        self._send((self._jobs, list(ranks), pickle.dumps(job), bool(ends)), ends)
        return self._children

    def wait_up(self) -> None:
        """Block until the server can fork, which takes seconds after its start.

        Raises:
            PeerLostError: the server died.
            DeadlineError: the server did not start in time.
        """
        if not self._up.wait(_BOOT_TIMEOUT_S):
            raise DeadlineError(
                "the fork server did not finish its imports within "
                f"{_BOOT_TIMEOUT_S:g} s; check the load of this machine and of its file system, "
                "and start again"
            )
        if self._error is not None:
            raise self._gone()

    def _gone(self) -> PeerLostError:
        return PeerLostError(
            f"the fork server (pid {self.pid}) can start no more processes: {self._error}; use a "
            "new ForkServer, or start the job again"
        )

    def restart(self, job: Any, rank: int, end: int | None = None) -> None:
        """Fork a child that replaces an ended one. Does not wait. ``end`` is like one of the
        ``ends`` of :meth:`start`.

        Raises:
            PeerLostError: the server died, or the old child has not ended.
        """
        children = self._children
        assert children is not None
        if self._error is not None:
            raise self._gone()
        with children.changed:
            state = children.states[rank]
            if state.exit is None:
                what = "ready" if state.ready else "not ready"
                raise PeerLostError(
                    f"process {rank} (pid {state.pid}, {what}) cannot be replaced, because it has "
                    "not ended; end it, or start the job again"
                )
            children.states[rank] = ChildState()
        ends = () if end is None else (end,)
        self._send((children.job, [rank], pickle.dumps(job), bool(ends)), ends)

    def kill_children(self) -> None:
        """End the children of the last cluster now. Blocks until the children are gone, which takes
        seconds.

        Does nothing in a fork of this process, because the children do not belong to the fork.
        """
        children = self._children
        if children is None or os.getpid() != self._owner:
            return
        if not children.wait_gone(0) and self._error is None:
            self._send(None)
            children.wait_gone(_KILL_TIMEOUT_S)

    def close(self) -> None:
        """End all children of this client, and the server unless another client started it.

        Idempotent; blocks for at most a few seconds. In a fork of this process, this method only
        closes the descriptors.
        """
        if self._closed:
            return
        self._closed = True
        self._hang_up()  # the server notices the end of the stream and kills the children
        if self._process is not None and os.getpid() == self._owner:
            try:
                self._process.wait(_KILL_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._monitor.join(_KILL_TIMEOUT_S)
        if not self._monitor.is_alive():  # a monitor that is still alive polls these descriptors
            self._reports.close()
            os.close(self._pidfd)

    def __enter__(self) -> ForkServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _send(self, command: Any, ends: Sequence[int] = ()) -> None:
        if os.getpid() != self._owner:
            raise ConfigurationError(
                f"this fork server belongs to process {self._owner}, and this process is a fork of "
                "it; make another fork server here"
            )
        with self._command_lock:
            if self._commands.closed:
                return
            try:
                self._commands.send(command)
                for end in ends:
                    socket.send_fds(self._link, [b"\0"], [end])
            except (BrokenPipeError, ConnectionResetError):
                pass  # the monitor handles a dead server
            # hang up, because the server must not wait for the rest of this command
            except BaseException:
                self._hang_up()
                raise

    def _hang_up(self) -> None:
        if os.getpid() == self._owner:
            with contextlib.suppress(OSError):  # the link is already closed, here or by the server
                # close() is not enough, because processes that were forked meanwhile have copies
                self._link.shutdown(socket.SHUT_RDWR)
        self._commands.close()
        self._link.close()

    def _watch(self) -> None:
        poller = select.poll()
        poller.register(self._reports, select.POLLIN)
        poller.register(self._pidfd, select.POLLIN)
        alive = True
        try:
            while alive:
                alive = self._pidfd not in [fd for fd, _ in poller.poll()]
                while (report := self._next_report()) is not None:
                    if report[0] == "end":
                        self._lose_children(report[3] or "closed")
                        return
                    self._take(*report)
        except EOFError:
            if self._process is None:  # the server has not accepted this client, or is dying
                self._lose_children("closed")
                return
            poller.unregister(self._reports)
            poller.poll()
        self._server_died()

    def _next_report(self) -> tuple[Any, ...] | None:
        """Return the next report, or None if none has arrived.

        Raises:
            EOFError: no report will come, because no process has the other end.
        """
        try:
            data = self._reports.recv(2 * _MAX_REPORT_BYTES, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return None
        if not data:
            raise EOFError
        content: tuple[Any, ...] = pickle.loads(data)
        return content

    def _take(self, kind: str, job: int, rank: int, content: Any) -> None:
        if kind == "up":
            self._up.set()
            return
        children = self._children
        if children is None or children.job != job:
            return
        with children.changed:
            state = children.states[rank]
            if kind == "forked":
                state.pid = content
            elif kind == "ready":
                state.ready = True
            elif kind == "failed":
                state.failure = content
            else:
                if state.failure:
                    content = f"{content} after {state.failure[0]}\n{state.failure[1]}"
                state.exit = content
            children.changed.notify_all()
            on_exit = children.on_exit
        if kind == "exit" and on_exit is not None:
            on_exit(rank, content)

    def _server_died(self) -> None:
        if self._process is None:
            self._lose_children("ended")
        else:
            code = self._process.wait()
            self._lose_children(_how_it_ended(-code if code < 0 else code << 8))

    def _lose_children(self, how: str) -> None:
        """Record how this client lost the server and therefore the children."""
        self._error = how
        self._up.set()
        children = self._children
        if children is None:
            return
        for rank, state in children.states.items():
            if state.exit is None:
                if state.pid is not None:
                    _kill_group(state.pid)
                self._take("exit", children.job, rank, f"the fork server was {how}")


class _Fork:
    """A server forked from this process. This class has the methods of ``Popen`` that are used
    here."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._lock = threading.Lock()
        self._code: int | None = None

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code.

        Raises:
            subprocess.TimeoutExpired: the process has not ended.
        """
        with self._lock:
            if self._code is None:
                try:
                    self._code = self._wait(timeout)
                # SIGCHLD is ignored, so the exit code is lost; Popen returns 0 in this case, too
                except (ProcessLookupError, ChildProcessError):
                    self._code = 0
            return self._code

    def _wait(self, timeout: float | None) -> int:
        pidfd = os.pidfd_open(self.pid)
        try:
            poller = select.poll()
            poller.register(pidfd, select.POLLIN)
            if not poller.poll(None if timeout is None else timeout * 1000):
                raise subprocess.TimeoutExpired("fork server", timeout or 0.0)
        finally:
            os.close(pidfd)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def kill(self) -> None:
        with self._lock, contextlib.suppress(ProcessLookupError):
            if self._code is None:
                os.kill(self.pid, signal.SIGKILL)


# ---- the server's side


def _keep_only(fds: tuple[int, int]) -> None:
    """Close all descriptors inherited from the parent, except ``fds`` and the outputs."""
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in (0, 1, 2, *fds):
            with contextlib.suppress(OSError):  # listdir's own descriptor is closed already
                os.close(int(name))


def serve(command_fd: int, report_fd: int, parent_pid: int, address: str) -> None:
    """Run the server process from start to end. Called by ForkServer only."""
    global _address
    outlive_readers()
    # If SIGCHLD is ignored, waiting for a child fails.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    parent = os.pidfd_open(parent_pid)
    if os.getppid() != parent_pid:
        return  # the parent died before this process could watch it
    outlive_stop_signals()
    with imports_to_be_forked():
        for name in _PRELOAD:
            importlib.import_module(name)
    # All children share this resource tracker. A child's own tracker would be killed with the
    # child's process group, and could not unlink, for example, the semaphores of envs in /dev/shm.
    resource_tracker.ensure_running()
    threads = len(os.listdir("/proc/self/task"))
    if threads != 1:
        raise RuntimeError(
            f"the fork server has {threads} threads after its imports, but a process with several "
            "threads cannot fork safely. A preloaded library started a thread; find this library, "
            "and prevent it from starting threads when it is imported"
        )
    gc.collect()
    gc.freeze()  # otherwise children would copy every page that garbage collection touches
    gc.enable()
    flush(sys.stdout, sys.stderr)  # otherwise every child would write the buffered output again
    _address = address
    _Server(_Client(command_fd, report_fd, parent), address).run()
    # Exit without finalizing. At a normal exit, nanobind (in triton, which tensordict imports with
    # torch 2.15) would print the frozen objects as leaked.
    flush(sys.stdout, sys.stderr)
    os._exit(0)


def report(reports: socket.socket, kind: str, job: int, rank: int, content: Any) -> None:
    """Send a report to the client, as one datagram, so that writers need no lock."""
    with contextlib.suppress(OSError):  # the client is gone
        reports.send(pickle.dumps((kind, job, rank, content)))


def _peer(link: socket.socket) -> tuple[int, int]:
    """Return pid and uid of the process at the other end of a connection."""
    pid, uid, _ = struct.unpack("3i", link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return pid, uid


class _Client:
    """A client of the server, with the server's ends of its connections.

    Attributes:
        children: pidfd -> pid, job number, rank.
        waiting: job number, rank and pickled job of children whose descriptors have not arrived
            yet.
        problem: why the server drops this client, if the client has not ended by itself.
    """

    def __init__(self, command_fd: int, report_fd: int, process: int) -> None:
        self.reports = socket.socket(fileno=report_fd)  # raises if the descriptor is not a socket
        try:
            link = os.dup(command_fd)
            try:
                self.link = socket.socket(fileno=link)
            except OSError:
                os.close(link)
                raise
        except OSError:
            self.reports.detach()  # the caller closes this descriptor
            raise
        self.link.setblocking(True)
        self.commands = Connection(command_fd)
        self.process = process
        self.children: dict[int, tuple[int, int, int]] = {}
        self.waiting: deque[tuple[int, int, bytes]] = deque()
        self.problem: str | None = None

    def kill_children(self) -> None:
        for pid, _, _ in self.children.values():
            _kill_group(pid)

    def close(self) -> None:
        self.commands.close()
        self.link.close()
        self.reports.close()
        for fd in (self.process, *self.children):
            os.close(fd)


class _Server:
    def __init__(self, parent: _Client, address: str) -> None:
        self._parent = parent
        self._door = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._door.bind(address)
        self._door.listen()
        self._poller = select.poll()
        self._poller.register(self._door, select.POLLIN)
        self._clients: list[_Client] = []
        self._ended: list[_Client] = []  # kept until their last child is reaped
        self._take_in(parent)
        self._libc = ctypes.CDLL(None, use_errno=True)

    def run(self) -> None:
        """Fork, wait and report until the parent is gone or closes the command stream."""
        try:
            while self._parent in self._clients:
                events = [fd for fd, _ in self._poller.poll()]
                door = self._door.fileno()  # served last, because existing clients do not need it
                # Handle one event at a time, because handling an event may close the descriptors of
                # other events.
                self._serve(next((fd for fd in events if fd != door), door))
        finally:
            for client in self._clients + self._ended:
                client.kill_children()
            if self._parent.problem is not None:
                report(self._parent.reports, "end", 0, 0, self._parent.problem)

    def _serve(self, fd: int) -> None:
        if fd == self._door.fileno():
            self._open_door()
            return
        for client in self._clients + self._ended:
            if fd in client.children:
                self._reap(client, fd)
                return
        for client in self._clients:
            if fd == client.process:
                self._end(client)
                return
            if fd == client.commands.fileno():
                try:
                    self._obey(client)
                except OSError as error:  # a limit of processes or descriptors is reached
                    client.problem = f"unable to fork: {error.strerror}"
                    self._end(client)
                return

    def _open_door(self) -> None:
        """Accept a client, if it belongs to this user."""
        try:
            link, _ = self._door.accept()
        # no descriptors are left: poll() would return again and again for the waiting connection
        except OSError:
            self._poller.unregister(self._door)
            return
        with link, contextlib.suppress(OSError, ValueError):
            pid, uid = _peer(link)
            # no other check, because processes of this user may do anything here
            if uid == os.getuid():
                link.settimeout(_JOIN_S)
                self._admit(pid, list(socket.recv_fds(link, 16, 2)[1]))

    def _admit(self, pid: int, fds: list[int]) -> None:
        try:
            fds.append(os.pidfd_open(pid))
            commands, reports, process = fds
            client = _Client(commands, reports, process)
        except (OSError, ValueError):
            for fd in fds:
                os.close(fd)
            raise
        self._take_in(client)

    def _take_in(self, client: _Client) -> None:
        self._clients.append(client)
        self._poller.register(client.commands.fileno(), select.POLLIN)
        self._poller.register(client.process, select.POLLIN)
        report(client.reports, "up", 0, 0, None)

    def _end(self, client: _Client) -> None:
        client.kill_children()
        self._clients.remove(client)
        self._poller.unregister(client.commands.fileno())
        self._poller.unregister(client.process)
        self._ended.append(client)
        self._forget_ended()

    def _forget_ended(self) -> None:
        for client in [client for client in self._ended if not client.children]:
            self._ended.remove(client)
            report(client.reports, "end", 0, 0, client.problem)
            client.close()
        self._poller.register(self._door, select.POLLIN)  # some descriptors may be free again

    def _obey(self, client: _Client) -> None:
        if client.waiting:
            self._take_end(client)
            return
        try:
            command = client.commands.recv()
        except (EOFError, OSError):
            self._end(client)
            return
        if command is None:
            client.kill_children()
            return
        job, ranks, blob, with_ends = command
        if with_ends:
            client.waiting.extend((job, rank, blob) for rank in ranks)
            return
        for rank in ranks:
            self._fork(client, job, rank, blob, None)

    def _take_end(self, client: _Client) -> None:
        """Receive one descriptor and fork the child that waits for it.

        The server takes one descriptor at a time, so that no child inherits the descriptor of
        another child. The server does not wait for the next descriptor, because the client may have
        been stopped.
        """
        data, ends, _, _ = socket.recv_fds(client.link, 1, 1)
        if not ends:
            if data:  # a descriptor was sent, but this process cannot open another one
                client.problem = "out of descriptors (ulimit -n)"
            self._end(client)
            return
        (end,) = ends
        os.set_inheritable(end, False)
        job, rank, blob = client.waiting.popleft()
        try:
            self._fork(client, job, rank, blob, end)
        finally:
            os.close(end)

    def _fork(self, client: _Client, job: int, rank: int, blob: bytes, end: int | None) -> None:
        server_pid = os.getpid()
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        try:
            pid = os.fork()
            if pid == 0:
                code = 1
                try:
                    reports = self._become_child(server_pid, client)
                    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
                    code = _run_child(reports, job, rank, blob, end)
                finally:
                    try:
                        flush(sys.stdout, sys.stderr)
                    finally:
                        os._exit(code)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        with contextlib.suppress(OSError):
            os.setpgid(pid, pid)  # done in both processes, so that neither sees the old group
        try:
            child = os.pidfd_open(pid)
        except OSError:
            _kill_group(pid)
            os.waitpid(pid, 0)
            raise
        client.children[child] = (pid, job, rank)
        self._poller.register(child, select.POLLIN)
        report(client.reports, "forked", job, rank, pid)

    def _become_child(self, server_pid: int, of: _Client) -> socket.socket:
        self._libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != server_pid:
            os._exit(1)
        outlive_stop_signals()
        # A separate process group, so that processes that the child starts can be ended with the
        # child.
        os.setpgid(0, 0)
        self._door.close()  # closed first, because the next line needs a descriptor
        reports = of.reports.dup()
        for client in self._clients + self._ended:
            client.close()
        self._clients.clear()
        self._ended.clear()
        return reports

    def _reap(self, client: _Client, fd: int) -> None:
        pid, job, rank = client.children.pop(fd)
        self._poller.unregister(fd)
        os.close(fd)
        # kill before waitpid(), because no other process can get this pid before waitpid()
        _kill_group(pid)
        _, status = os.waitpid(pid, 0)
        how = _how_it_ended(status)
        if client.problem is not None:
            how = f"{how}: the fork server was {client.problem}"
        report(client.reports, "exit", job, rank, how)
        self._forget_ended()


def _pair(kind: socket.SocketKind) -> tuple[socket.socket, socket.socket]:
    """Return a pair of connected sockets that block, even if ``socket.setdefaulttimeout`` was
    called."""
    pair = socket.socketpair(socket.AF_UNIX, kind)
    for end in pair:
        end.setblocking(True)
    return pair


def _run_child(reports: socket.socket, job: int, rank: int, blob: bytes, end: int | None) -> int:
    try:
        given = () if end is None else (end,)
        pickle.loads(blob).run(rank, lambda: report(reports, "ready", job, rank, None), *given)
    except BaseException as error:
        trace = "".join(traceback.format_exception(error))[-_MAX_REPORT_BYTES // 2 :]
        summary = traceback.format_exception_only(error)[-1].strip()[:1000]
        # Flush first, because the client may kill this process once it gets the report.
        flush(sys.stdout, sys.stderr)
        report(reports, "failed", job, rank, (summary, trace))
        return 1
    return 0


def _kill_group(pid: int) -> None:
    """Kill a child and all other processes in its process group."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _how_it_ended(status: int) -> str:
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        with contextlib.suppress(ValueError):
            return f"killed by {signal.Signals(number).name}"
        return f"killed by signal {number}"
    return f"exited with status {os.WEXITSTATUS(status)}"
