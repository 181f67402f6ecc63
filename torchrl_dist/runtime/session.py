"""A process's membership in the job: its role, the other processes, and calls to them."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import select
import signal
import threading
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any

import torch.distributed as dist

from ..errors import ConfigurationError, DeadlineError, PeerLostError, RemoteError
from ..forks import renewed
from ..stopping import Stopped
from . import rendezvous, wire
from .awake import awake, check_timeout, result_of, start_clock
from .chores import CHORES
from .limits import check_limits
from .membership import Membership
from .peer import Peer
from .pool import DaemonPool
from .remote import Remote, current, only_session, set_current
from .roles import DEFAULT_ROLES
from .signals import Latch, StopSignals, say
from .signs import SignPost, give_sign
from .transport import Transport
from .world import World, launched_without_us

# How many calls of other processes this process runs concurrently. Further calls wait in a queue.
_MAX_CONCURRENT_CALLS = 64
# After a stop signal, how long the driver waits for processes that do not serve yet. This must be
# less than 30 s, because torchrun and Slurm send SIGKILL 30 s after SIGTERM.
_STOP_GRACE_S = 10.0
_GOODBYE_S = 3.0
_GLANCE_S = 1.0
# How long to wait, after a connection broke, for the fork server's report of how the process died.
_CAUSE_S = 1.0
# The interval of signs of life between nodes is this fraction of the session's deadline, but at
# most this many seconds.
_SIGN_EVERY, _SIGN_AT_LEAST_EVERY_S = 0.1, 10.0


class Session:
    """A process's membership in a job, made by ``session(...)`` or ``local_cluster(...)``.

    The first rank of the first role is the driver: when it leaves its session, the job ends. Any
    thread may call methods of a session; only ``serve`` and ``close`` must stay in one thread.

    Attributes:
        world: this process's place in the job, as the launcher assigned it.
        me: this process.
        peers: all processes of the job in rank order, including this process.
        timeout_s: the default deadline of every call.
        process_group: this role's torch.distributed group, if one was requested; None after the
            session has ended.
        session_id: unique among all sessions.

    Example:
        >>> with session({"learner": 1}) as me:
        ...     me.role, me.is_driver, len(me.peers), me.stop_requested
        ('learner', True, 1, False)
    """

    def __init__(
        self, member: rendezvous.Member, *, timeout_s: float, supervised: bool = False
    ) -> None:
        self.world: World = member.world
        self.peers: tuple[Peer, ...] = member.peers
        self.me: Peer = member.peers[member.world.global_rank]
        self.timeout_s = timeout_s
        self.session_id = member.session_id
        self.process_group: dist.ProcessGroup | None = None
        self._member = member
        self._pids = member.pids
        self._supervised = supervised  # if true, local_cluster calls _lose for each death
        self._driver = member.peers[0]
        self._transport: Transport | None = None
        self._pool = DaemonPool(_MAX_CONCURRENT_CALLS, "torchrl_dist-call")
        self._objects: dict[int, Any] = {}
        self._keys = itertools.count()
        self._barriers = itertools.count()
        self._members = Membership(self.world.world_size, self.me.global_rank)
        self._pid = os.getpid()
        self._lock = renewed(self, "_lock", threading.Lock)
        self._signs_lock = renewed(self, "_signs_lock", threading.Lock)
        self._in_flight: dict[int, set[Future[Any]]] = {p.global_rank: set() for p in self.peers}
        self._suspects: set[int] = set()
        self._watchers: dict[
            int, Callable[[tuple[Any, ...]], None]
        ] = {}  # keyed by the rank that watches this process
        self._stop = Latch()
        self._end = Latch()  # set once the driver has ended the job or is lost
        self._end_reason: str | None = None
        self._serving = False
        self._ending = False
        self._closed = False
        self._signals = StopSignals(self._stop, self._say_stop if self.is_driver else None)
        self._opened = threading.Event()
        self._at_leave: list[Callable[[bool], None]] = []
        self._at_end: list[Callable[[bool], None]] = []
        self._no_more_signs = threading.Event()
        self._sign_every_s = min(_SIGN_EVERY * timeout_s, _SIGN_AT_LEAST_EVERY_S)
        self._sign_post: SignPost | None = None
        self._signs: threading.Thread | None = None
        self._asked: set[int] = set()  # ranks with an unanswered "beat" message
        self._heard: dict[int, float] = {}  # the last sign of each watched rank, on awake()
        if supervised:  # local_cluster supervises, and its children only serve
            for peer in self.peers[1:]:
                self._members.serve(peer.global_rank)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ConfigurationError(
            "a session cannot be copied or pickled, because it is this process's membership in the "
            "job: pass a handle from session.remote(...), or enter a session in the other process"
        )

    def check_process(self) -> None:
        """Check that this process is a member, not a fork of one.

        Raises:
            ConfigurationError: this process was forked from the session's process.
        """
        if os.getpid() != self._pid:
            raise ConfigurationError(
                f"process {os.getpid()} was forked from process {self._pid} ({self.me.name}). It "
                "is not a member of the session, because a forked process does not inherit the "
                "connections. Use local_cluster, torchrun or Slurm to start processes that call "
                "one another"
            )

    # ---- members

    @property
    def role(self) -> str:
        return self.me.role

    @property
    def is_driver(self) -> bool:
        return self.me == self._driver

    def of_role(self, role: str) -> tuple[Peer, ...]:
        """Return the processes of a role in index order; empty if there are none."""
        return tuple(peer for peer in self.peers if peer.role == role)

    def check_peers(self, name: str, peers: Sequence[Peer]) -> None:
        """Check that ``peers``, the value of the argument ``name``, are processes of this session.

        Raises:
            ConfigurationError: ``peers`` is empty, or contains anything else; the message names the
                existing roles.
        """
        if isinstance(peers, str) or not peers or any(peer not in self.peers for peer in peers):
            counts = Counter(peer.role for peer in self.peers)
            roles = ", ".join(f"{role!r} ({count})" for role, count in counts.items())
            raise ConfigurationError(
                f"{name}={peers!r}: expected processes of this session, such as "
                f"session.of_role({self.peers[-1].role!r}); the session's roles are {roles}"
            )

    def lost(self) -> tuple[Peer, ...]:
        """Return the peers known to be lost, in rank order.

        The driver notices losses even without a call, and tells the other processes.
        """
        return tuple(self.peers[rank] for rank in self._members.lost())

    def lost_reason(self, peer: Peer) -> str | None:
        """Return how a lost peer died, such as ``"killed by SIGKILL"``; None if the peer is not
        lost."""
        return self._members.why_lost(peer.global_rank)

    def pid_of(self, peer: Peer) -> int:
        """Return the peer's process id on its own machine."""
        return self._pids[peer.global_rank]

    # ---- calls

    def remote(
        self,
        peer: Peer,
        factory: Callable[..., Any],
        *args: Any,
        timeout_s: float | None = None,
        **kwargs: Any,
    ) -> Remote[Any]:
        """Run ``factory(*args, **kwargs)`` in ``peer``'s process and return a handle to the result.

        The object stays in that process until the session ends. The factory and its arguments may
        be lambdas or closures. Blocks, and raises the errors of ``Remote.call``.
        """
        key = self._call(peer, ("create", factory, args, kwargs), timeout_s)
        return Remote(peer, key, self.session_id)

    def call(
        self,
        peer: Peer,
        fn: Callable[..., Any],
        *args: Any,
        timeout_s: float | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run ``fn(*args, **kwargs)`` in ``peer``'s process and block for its result.

        A tensor that was computed from others arrives without ``requires_grad``, because its graph
        stays in the sender's process.

        Raises the errors of ``Remote.call``.
        """
        return self._call(peer, ("function", fn, args, kwargs), timeout_s)

    def submit(
        self,
        peer: Peer,
        fn: Callable[..., Any],
        *args: Any,
        timeout_s: float | None = None,
        **kwargs: Any,
    ) -> Future[Any]:
        """Like ``call``, without blocking; see ``Remote.submit``."""
        return self._submit(peer, ("function", fn, args, kwargs), timeout_s)

    def _call(self, peer: Peer, operation: tuple[Any, ...], timeout_s: float | None) -> Any:
        timeout_s = self._deadline(timeout_s)
        if peer == self.me:
            return self._run_here(operation)
        future = self._submit(peer, operation, timeout_s)
        try:
            # The transport enforces the deadline. This second deadline is a fallback.
            return result_of(future, timeout_s + 2 * _GOODBYE_S)
        except FutureTimeoutError as error:
            if future.done():
                raise
            raise self._late(peer, operation, timeout_s) from error

    def _submit(
        self, peer: Peer, operation: tuple[Any, ...], timeout_s: float | None
    ) -> Future[Any]:
        endless = timeout_s == float("inf")
        timeout_s = self._deadline(None if endless else timeout_s)
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()
        if peer == self.me:
            self._pool.submit(self._run_into, future, operation)
            return future
        body, tensors = wire.dumps(operation)
        rank = peer.global_rank
        with self._lock:
            self._in_flight[rank].add(future)
        # Checked after the registration, so that no loss is missed: if the peer is lost later,
        # _lose fails the future.
        if self._closed or self._members.why_lost(rank) is not None:
            self._settle(rank, future, error=self._lost_error(peer))
            return future

        def done(answer: tuple[Any, ...] | None, error: Exception | None) -> None:
            if answer is not None:
                self._settle_with(peer, future, answer)
            elif isinstance(error, DeadlineError):
                self._settle(rank, future, error=self._late(peer, operation, timeout_s))
            else:
                self._suspect(rank, f"connection failed: {error}")

        assert self._transport is not None
        limit_s = None if endless else timeout_s
        self._transport.send(rank, "call", body, tensors, timeout_s=limit_s, done=done)
        return future

    def _late(self, peer: Peer, operation: tuple[Any, ...], timeout_s: float) -> DeadlineError:
        what = operation[2] if operation[0] == "method" else operation[1]
        name = what if isinstance(what, str) else getattr(what, "__name__", repr(what))
        return DeadlineError(
            f"{peer} did not answer {name} within {timeout_s:g} s; see its "
            "output, or raise timeout_s"
        )

    def _deadline(self, timeout_s: float | None) -> float:
        self.check_process()
        timeout_s = self.timeout_s if timeout_s is None else timeout_s
        check_timeout(timeout_s)
        if self._closed:
            raise ConfigurationError("this session is closed; enter a new session")
        return timeout_s

    # ---- running calls of other processes, or of this process

    def _execute(self, operation: tuple[Any, ...]) -> Any:
        kind, *rest = operation
        if kind == "method":
            key, method, args, kwargs = rest
            if key not in self._objects:
                raise KeyError(
                    f"{self.me.name} has no object {key}, because its session has ended; make the "
                    "object again in a new session"
                )
            return getattr(self._objects[key], method)(*args, **kwargs)
        fn, args, kwargs = rest
        result = fn(*args, **kwargs)
        if kind == "function":
            return result
        key = next(self._keys)
        self._objects[key] = result
        return key

    def _run_here(self, operation: tuple[Any, ...]) -> Any:
        try:
            result = self._execute(operation)
            return result.result() if isinstance(result, Future) else result
        except (KeyboardInterrupt, Stopped):  # raised by a second stop signal
            raise
        except BaseException as error:  # including SystemExit, which the called code raised
            raise self._remote_error(self.me, _describe(error)) from error

    def _run_into(self, future: Future[Any], operation: tuple[Any, ...]) -> None:
        try:
            future.set_result(self._run_here(operation))
        except BaseException as error:
            future.set_exception(error)

    def _run_for_peer(
        self, body: bytes, tensors: list[Any], answer: Callable[[tuple[Any, ...]], None]
    ) -> None:
        def run() -> Any:
            # RPC may deliver calls before this process has finished _open.
            self._opened.wait(self.timeout_s)
            return self._execute(wire.loads(body, tensors))

        def reply(result: Callable[[], Any]) -> None:
            try:
                content = result()
                if isinstance(content, Future):
                    content.add_done_callback(lambda done: reply(done.result))
                    return
                message = (True, *wire.dumps(content))
            # including SystemExit, because the calling process must handle it
            except BaseException as error:
                message = (False, *_dump_error(error))
            # in a closed session, the agent that would send the answer is gone
            if not self._closed:
                answer(message)

        reply(run)

    def _settle_with(self, peer: Peer, future: Future[Any], answer: tuple[Any, ...]) -> None:
        fine, body, tensors = answer
        try:
            content = wire.loads(body, tensors)
        except Exception as error:
            content = _describe(error)
            fine = False
        if fine:
            self._settle(peer.global_rank, future, result=content)
        else:
            self._settle(peer.global_rank, future, error=self._remote_error(peer, content))

    def _settle(
        self,
        rank: int,
        future: Future[Any],
        *,
        result: Any = None,
        error: BaseException | None = None,
    ) -> None:
        with self._lock:
            self._in_flight[rank].discard(future)
            if future.done():
                return  # the call has already failed, because the peer was lost
        with contextlib.suppress(Exception):  # InvalidStateError: already settled by another thread
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)

    def _remote_error(self, peer: Peer, description: tuple[Any, ...]) -> RemoteError:
        message, trace, cause = description
        error = RemoteError(message, peer=peer.name, host=peer.host, remote_traceback=trace)
        error.__cause__ = cause
        return error

    # ---- losing peers

    def _suspect(self, rank: int, reason: str) -> None:
        """Record that the connection to ``rank`` failed.

        In a local_cluster, first wait a moment for the fork server's report of how the process
        died.
        """
        with self._lock:
            known = rank in self._suspects
            self._suspects.add(rank)
        if not self._supervised or self._ending or self._members.why_lost(rank) is not None:
            self._lose(rank, reason)
        elif not known:
            timer = threading.Timer(_CAUSE_S, self._lose, (rank, reason))
            timer.daemon = True
            timer.start()

    def _lose(self, rank: int, reason: str) -> None:
        """Record that ``rank`` is lost. Called in any thread, also through ``Children.watch``."""
        peer = self.peers[rank]
        new = not self._ending and self._members.lose(rank, reason)
        with self._lock:
            futures = list(self._in_flight[rank])
        for future in futures:
            self._settle(rank, future, error=self._lost_error(peer))
        if not new:
            return
        if peer == self._driver:
            self._end_job(f"{peer} is lost: {reason}")
        elif self.is_driver and self._transport is not None:
            for other in self.peers[1:]:
                if other != peer and self._members.why_lost(other.global_rank) is None:
                    self._tell(other, "lost", rank, reason)

    def _lost_error(self, peer: Peer) -> PeerLostError:
        reason = self._members.why_lost(peer.global_rank) or "the session is ending"
        pid = self._pids[peer.global_rank]
        return PeerLostError(f"{peer} (pid {pid}) is lost: {reason}")

    # ---- control messages, handled in the RPC thread without blocking

    def _receive(
        self, kind: str, body: bytes, tensors: list[Any], answer: Callable[[tuple[Any, ...]], None]
    ) -> None:
        if kind == "call":
            self._pool.submit(self._run_for_peer, body, tensors, answer)
            return
        args = wire.loads(body, tensors)
        # the message is answered when this process leaves, and fails if this process dies
        if kind == "watch":
            with self._lock:
                if not self._ending:
                    self._watchers[args[0]] = answer
                    return
            answer((self._end_reason,))
        elif kind == "barrier":
            number, rank = args
            self._members.arrive(number, rank, lambda: answer(()))
        elif kind == "leaving":
            self._left(*args)
            # A process that leaves closes its connections when it gets this answer. While the job
            # ends, the answer waits until all have left, because they may still call that process.
            if self._ending and self._end_reason is None:
                self._members.when_all_left(lambda: answer(()))
            else:
                answer(())
        else:
            if kind == "serving":
                self._members.serve(*args)
            elif kind == "lost":
                self._lose(*args)
            answer(())

    def _left(self, rank: int, reason: str | None) -> None:
        if reason is None or self._ending:
            self._members.leave(rank)
        else:
            self._lose(rank, reason)

    def _tell(
        self, peer: Peer, kind: str, *args: Any, timeout_s: float | None = _GOODBYE_S
    ) -> Future[Any]:
        """Send a control message. The future never fails; its result is (answer, error)."""
        self.check_process()
        future: Future[Any] = Future()
        assert self._transport is not None
        self._transport.send(
            peer.global_rank,
            kind,
            *wire.dumps(args),
            timeout_s=timeout_s,
            done=lambda answer, error: future.set_result((answer, error)),
        )
        return future

    def _watch(self, peer: Peer) -> None:
        """Send a message that ``peer`` answers when ``peer`` leaves. The message fails if ``peer``
        dies."""

        def told(future: Future[Any]) -> None:
            answer, error = future.result()
            if answer is None:
                self._suspect(peer.global_rank, f"connection failed: {error}")
            elif peer == self._driver:
                self._end_job(answer[0])

        watching = self._tell(peer, "watch", self.me.global_rank, timeout_s=None)
        watching.add_done_callback(told)

    def _hear_signs(self, post: SignPost) -> None:
        """Receive signs of life. Runs on the driver in a separate thread, until the session ends.

        A node that disappears does not close its connections. Without signs of life, the loss of
        the node would be noticed only at the deadline of a call.
        """

        def heard(rank: int) -> tuple[str | None, bool, str | None]:
            self._heard[rank] = awake()
            return self._members.why_lost(rank), self._ending, self._end_reason

        try:
            while post.serve(self._sign_every_s, heard):
                self._check_signs()
        finally:
            post.release()

    def _give_signs(self, card: str) -> None:
        """Send signs of life to the driver. Runs in a thread of every other process.

        The answers tell whether the job has ended, and whether the driver counts this process as
        lost because it was paused or cut off for a while.
        """
        driver = self._driver.global_rank
        wait_s = 0.0
        while not self._no_more_signs.wait(wait_s):
            begin = awake()
            try:
                lost, ended, reason = give_sign(card, self.me.global_rank, self._sign_every_s)
            except OSError:
                pass
            else:
                self._heard[driver] = awake()
                if self._no_more_signs.is_set():
                    return
                if lost is not None:
                    self._end_job(f"{self._driver} counts {self.me.name} as lost: {lost}")
                elif ended:
                    self._end_job(reason)
            self._check_signs()
            wait_s = max(0.0, begin + self._sign_every_s - awake())

    def _check_signs(self) -> None:
        for rank, at in list(self._heard.items()):
            if self._members.gone(rank):
                continue
            if awake() - at > self.timeout_s:
                self._lose(rank, f"no sign of life for {self.timeout_s:g} s")
            elif rank not in self._asked:
                # If the port for signs is blocked, an answer to this message counts as a sign. The
                # message also keeps firewalls from dropping an idle connection.
                self._asked.add(rank)
                with self._signs_lock:  # do not send while the transport closes
                    if self._no_more_signs.is_set():
                        return
                    told = self._tell(self.peers[rank], "beat", timeout_s=None)
                told.add_done_callback(functools.partial(self._answered, rank))

    def _answered(self, rank: int, future: Future[Any]) -> None:
        answer, _ = future.result()
        if answer is not None:
            self._heard[rank] = awake()
            self._asked.discard(rank)

    def _end_job(self, reason: str | None) -> None:
        if self._end.is_set():
            # keep the first reason, because connections also break after the job has ended cleanly
            return
        self._end_reason = reason
        self._stop.set()  # first, so that stop_requested is true when serve() returns
        self._end.set()

    # ---- waiting

    @property
    def stop_requested(self) -> bool:
        """Whether this process should finish its work and leave.

        True once the driver has ended the job, torchrun's process has died, or this process has
        received SIGINT, SIGTERM, SIGHUP, SIGUSR1 or SIGUSR2. :attr:`stop_signal` is the first of
        these signals. The driver prints a line when it receives its first stop signal. The second
        SIGINT, SIGTERM or SIGHUP raises KeyboardInterrupt or SystemExit in the main thread, unless
        the process serves. SIGUSR1 and SIGUSR2 announce SIGTERM (``sbatch --signal=USR1@60``) and
        never raise. If the program has its own handler for SIGUSR1 or SIGUSR2, that signal does not
        request a stop.
        """
        return self._stop.is_set()

    @property
    def stop_signal(self) -> signal.Signals | None:
        """The first stop signal that this process received in its session, if any."""
        return self._signals.received

    def _say_stop(self, name: signal.Signals) -> None:
        say(
            f"torchrl_dist: {name.name} received: {self.me.name} finishes its current work and "
            "stops; a second SIGINT or SIGTERM ends it immediately"
        )

    def wait_stop(self, timeout_s: float) -> bool:
        """Block until ``stop_requested`` is true, at most ``timeout_s``; return whether it is."""
        return self._stop.wait(timeout_s)

    def serve(self) -> None:
        """Answer other processes' calls until the driver ends the job; blocks.

        Every process except the driver calls this method, in its main thread. Stop signals do not
        end the call, because Slurm and torchrun also send them to the driver, and the driver can
        finish its work only while this process still answers.

        Raises:
            PeerLostError: the driver failed or died.
            ConfigurationError: this process is the driver, so the call would never end.
        """
        if self.is_driver:
            raise ConfigurationError(
                f"serve() was called by {self.me.name}, the driver of the job (the first process "
                "of the first role). The driver does the work, and only the other processes "
                "serve; call serve() only if is_driver is False"
            )
        if not self._serving:
            self._serving = True
            self._tell(self._driver, "serving", self.me.global_rank)
        self._signals.patient = True
        try:
            CHORES.run_until(self._end, self._interrupt)
        finally:
            self._signals.patient = False
        if self._end_reason is not None:
            raise PeerLostError(
                f"the job has ended: {self._end_reason}; see the output of {self._driver.name}"
            )

    def _interrupt(self) -> None:
        self._signals.interrupts = True

    def barrier(self, timeout_s: float | None = None) -> None:
        """Block until every living process, except those that serve, has called this method.

        Raises:
            DeadlineError: a process did not call this method in time.
            PeerLostError: the driver, which keeps the barrier, is gone.
        """
        timeout_s = self._deadline(timeout_s)
        number = next(self._barriers)
        if self._transport is None:
            return
        released: Future[Any] = Future()
        if self.is_driver:
            self._members.arrive(
                number, self.me.global_rank, lambda: released.set_result(((), None))
            )
        else:
            released = self._tell(
                self._driver, "barrier", number, self.me.global_rank, timeout_s=timeout_s
            )
        try:
            _, error = result_of(released, timeout_s + (0 if self.is_driver else _GOODBYE_S))
        except FutureTimeoutError:
            names = [self.peers[rank].name for rank in sorted(self._members.missing(number))]
            error = DeadlineError(
                f"barrier: {', '.join(names)} did not call barrier() within {timeout_s:g} s; see "
                "their output, or raise timeout_s"
            )
        if error is not None:
            raise error

    # ---- start and end

    def on_leave(self, callback: Callable[[bool], None]) -> None:
        """Call ``callback(clean)`` before anything else when this process leaves its session.

        ``clean`` is false if the process leaves because of an exception. The other processes still
        answer, so the callback can send them data. The other processes wait at most 3 s for the
        callback. Exceptions of the callback become warnings.
        """
        self._at_leave.append(callback)

    def on_end(self, callback: Callable[[bool], None]) -> None:
        """Like ``on_leave``, but ``callback`` is called last, when no process can call this process
        any more.

        For these callbacks, ``clean`` is also false after a stop signal, and if the driver has
        failed.
        """
        self._at_end.append(callback)

    def _run_callbacks(self, callbacks: list[Callable[[bool], None]], clean: bool) -> None:
        while callbacks:
            callback = callbacks.pop()
            try:
                callback(clean)
            except Exception as error:
                warnings.warn(
                    f"a callback raised at the end of the session: {_summary(error)}", stacklevel=2
                )

    def _open(self, process_group: str | Mapping[str, str] | None) -> None:
        """Connect to all processes. Called once, in the thread that enters the session."""
        world = self.world
        if world.world_size > 1:
            assert self._member.store is not None
            start_clock()
            names = [f"{peer.name}-{self.session_id}" for peer in self.peers]
            if self.is_driver and not world.one_node:
                self._sign_post = SignPost(rendezvous.own_address(world), world.world_size)
                self._member.store.set("signs", self._sign_post.card)
            self._transport = Transport(
                dist.PrefixStore("rpc", self._member.store),
                names,
                world.global_rank,
                one_node=world.one_node,
                timeout_s=self.timeout_s,
                handler=self._receive,
            )
            watched = self.peers[1:] if self.is_driver else self.peers[:1]
            for peer in watched:
                self._watch(peer)
            if not world.one_node:
                self._start_signs(watched)
        self.process_group = rendezvous.make_process_group(
            process_group, self._member, self.timeout_s
        )
        set_current(self)
        self._signals.install()
        CHORES.expected = not self.is_driver
        if self.is_driver and world.launcher == "torchrun" and world.world_size > 1:
            threading.Thread(
                target=self._follow_launcher,
                args=(os.getppid(),),
                name="torchrl_dist-launcher",
                daemon=True,
            ).start()
        self._opened.set()

    def _follow_launcher(self, pid: int) -> None:
        """Request a stop once torchrun's agent, the parent of this process, is dead, because no
        other process would request this stop."""
        try:
            agent = os.pidfd_open(pid)
        except OSError:
            return
        try:
            poller = select.poll()
            poller.register(agent, select.POLLIN)
            while not self._closed:
                if poller.poll(1000 * _GLANCE_S):
                    say(
                        f"torchrl_dist: torchrun's process {pid} is dead: {self.me.name} finishes "
                        "its current work and stops"
                    )
                    self._stop.set()
                    return
        finally:
            os.close(agent)

    def _start_signs(self, watched: tuple[Peer, ...]) -> None:
        assert self._member.store is not None
        self._heard = {peer.global_rank: awake() for peer in watched}
        target: Callable[[], None]
        if self._sign_post is not None:
            target = functools.partial(self._hear_signs, self._sign_post)
        else:
            # The key exists, because the driver sets it before it connects to this process.
            card = self._member.store.get("signs").decode()
            target = functools.partial(self._give_signs, card)
        self._signs = threading.Thread(target=target, name="torchrl_dist-signs", daemon=True)
        self._signs.start()

    def close(self) -> None:
        """Leave the job. Idempotent; never hangs on a dead peer.

        The driver first waits until every living process serves or closes, for at most
        ``timeout_s`` (10 s after a stop signal). Then it ends the job. Other processes serve until
        the job has ended.
        """
        self._close(None)

    def _close(self, error: BaseException | None) -> None:
        if os.getpid() != self._pid:
            return  # a forked child is not a member
        with self._lock:
            if self._closed or self._ending:
                return
        try:
            self._run_callbacks(self._at_leave, error is None)
            if self._transport is not None:
                self._say_goodbye(error)
        finally:
            failed = error is not None or self._end_reason is not None
            self._tear_down(clean=not failed and self.stop_signal is None)

    def _say_goodbye(self, error: BaseException | None) -> None:
        failure = f"{self.me} failed: {_summary(error)}" if error is not None else None
        if self.is_driver:
            if failure is None:
                patience_s = _STOP_GRACE_S if self.stop_requested else self.timeout_s
                busy = self._members.wait_until_all_serve(patience_s)
                if busy:
                    names = ", ".join(self.peers[rank].name for rank in sorted(busy))
                    warnings.warn(
                        f"the job ends although {names} still work: within {patience_s:g} s, they "
                        "neither called serve() nor left the session; let them do one of these "
                        "earlier",
                        stacklevel=4,
                    )
            self._answer_watchers(failure)
            # A long message may delay the message that the job has ended. Processes that give signs
            # of life learn of the end with their next sign, so wait for one sign more.
            by_signs_s = 0.0 if self._signs is None else self._sign_every_s
            self._members.wait_until_all_left(_GOODBYE_S + by_signs_s)
            return
        if failure is None and not self._end.is_set():
            with contextlib.suppress(PeerLostError):
                self.serve()
            # calls of other processes may have added callbacks
            self._run_callbacks(self._at_leave, True)
        self._answer_watchers(failure)
        if self._members.why_lost(self._driver.global_rank) is None:
            told = self._tell(self._driver, "leaving", self.me.global_rank, failure)
            with contextlib.suppress(FutureTimeoutError):
                told.result(_GOODBYE_S)

    def _everybody_left(self) -> bool:
        return not self._members.wait_until_all_left(0)

    def _answer_watchers(self, reason: str | None) -> None:
        assert self._transport is not None
        self._transport.expect_broken_connections()
        with self._lock:
            self._ending = True
            self._end_reason = reason
            watchers, self._watchers = self._watchers, {}
        for rank, answer in watchers.items():
            if self._members.why_lost(rank) is None:
                answer((reason,))

    def _tear_down(self, *, clean: bool = False) -> None:
        self._ending = self._closed = True
        with self._signs_lock:
            self._no_more_signs.set()
        CHORES.expected = False
        set_current(None)
        self._objects.clear()
        with contextlib.ExitStack() as steps:  # these run in reverse order, even if some fail
            steps.callback(self._end.close)
            steps.callback(self._stop.close)
            steps.callback(self._signals.restore)
            steps.callback(self._member.close)
            steps.callback(self._pool.close)
            if self._transport is not None:
                steps.callback(self._transport.close)
            if self.process_group is not None:
                steps.callback(self._destroy_group)
            steps.callback(self._run_callbacks, self._at_end, clean)
            if self._sign_post is not None:
                steps.callback(self._stop_hearing, self._sign_post)
        for rank, futures in self._in_flight.items():
            for future in list(futures):
                self._settle(rank, future, error=self._lost_error(self.peers[rank]))

    def _stop_hearing(self, post: SignPost) -> None:
        post.close()
        if self._signs is None:
            post.release()
        else:
            self._signs.join(_GOODBYE_S)

    def _destroy_group(self) -> None:
        # drop the last reference to the group, because the group holds threads and sockets
        self.process_group = None
        dist.destroy_process_group()


@contextlib.contextmanager
def session(
    roles: Mapping[str, int] | None = None,
    *,
    world: World | None = None,
    timeout_s: float = 60.0,
    process_group: str | Mapping[str, str] | None = None,
) -> Iterator[Session]:
    """Join the job that torchrun or SLURM started; every process of the job calls this function.

    A process without a launcher is a job of one process: nothing is started, and its calls to
    itself are direct. Inside the block, the driver (the first rank of the first role) does the work
    with the help of the other processes. The other processes call ``serve()``, or run their own
    code and serve from the end of their block until the driver is done. If the driver leaves with
    an exception, ``stop_requested`` becomes true in the other processes, and their ``serve`` raises
    PeerLostError.

    Args:
        roles: counts in rank order, e.g. ``{"learner": 1, "collector": -1}``; one count may be -1,
            for all remaining ranks. By default, every rank is a ``"worker"``.
        world: default ``World.from_env()``.
        timeout_s: deadline for start-up and default deadline of every call. In a job of several
            nodes, a process that gives no sign of life for this long is lost permanently.
        process_group: a torch.distributed backend, such as ``"gloo"``. Each role gets a separate
            default group; with a mapping (``{"learner": "nccl"}``), only the given roles get a
            group.

    Raises:
        ConfigurationError: the environment or the roles are invalid, or two processes passed
            different roles.
        DeadlineError: some processes did not join in time; the message names them.

    Example:
        >>> with session({"learner": 1}) as me:  # no launcher: a job of one
        ...     me.me.name, me.call(me.me, max, 1, 2)
        ('learner0', 2)
    """
    check_timeout(timeout_s)
    if world is None:
        world = World.from_env()
        if world.launcher == "single":
            look_for_others("for a job of one process pass world=World.from_env({})")
    roles = DEFAULT_ROLES if roles is None else roles
    with only_session():
        store, world = rendezvous.launcher_store(world, timeout_s)
        with joined(world, roles, store, timeout_s=timeout_s, process_group=process_group) as me:
            yield me


def current_session() -> Session:
    """Return the session that this process is in.

    Raises:
        ConfigurationError: this process is not in a session.

    Example:
        >>> with session() as me:
        ...     current_session() is me
        True
    """
    found = current()
    assert isinstance(found, Session)  # no other type is ever set
    return found


def check_session(given: Any) -> None:
    """Refuse an argument that is not a session, such as the function ``session`` itself.

    Raises:
        ConfigurationError: the argument is not a session.
    """
    if not isinstance(given, Session):
        got = "the function session" if given is session else f"a {type(given).__name__}"
        raise ConfigurationError(
            f"session: got {got}, expected the object that a with block gives; write "
            "'with session(...) as me:' and pass session=me"
        )


def look_for_others(alone: str) -> None:
    """Warn if this process would be a job of one process, but looks like one of several tasks.

    Args:
        alone: text that says how to start a job of one process.

    Raises:
        ConfigurationError: this process looks like one of several tasks, and is not the first.
    """
    others = launched_without_us(os.environ)
    if others is None:
        return
    rank, size, launcher = others
    told = (
        f"this process looks like task {rank} of {size} that {launcher} started, but is not a rank "
        "of a job, so each task would be a separate job. Start all tasks with torchrun or with "
        "srun (srun python ...), whose RANK or SLURM_STEP_ID must reach the program, also in a "
        f"container; {alone}"
    )
    if rank:
        raise ConfigurationError(told)
    warnings.warn(told, stacklevel=4)


@contextlib.contextmanager
def joined(
    world: World,
    roles: Mapping[str, int],
    store: dist.Store | None,
    *,
    timeout_s: float,
    process_group: str | Mapping[str, str] | None,
    supervised: bool = False,
) -> Iterator[Session]:
    """Enter a session over a given store. The launchers of this package call this function."""
    if not supervised:  # local_cluster has already checked the limits
        launched = world.launcher != "local" and world.local_world_size > 1
        check_limits(
            world.world_size,
            one_node=world.one_node,
            starts=world.local_world_size if launched else 1,
            driver=world.global_rank == 0,
            launched=launched,
        )
    member = rendezvous.meet(world, roles, store, timeout_s)
    me = Session(member, timeout_s=timeout_s, supervised=supervised)
    try:
        me._open(process_group)
    except BaseException:
        me._tear_down()
        raise
    try:
        yield me
    except BaseException as error:
        me._close(error)
        raise
    else:
        me.close()


def _describe(error: BaseException) -> tuple[str, str, BaseException | None]:
    trace = "".join(traceback.format_exception(error))
    return _summary(error), trace, error


def _dump_error(error: BaseException) -> tuple[bytes, list[Any]]:
    message, trace, cause = _describe(error)
    try:
        body, tensors = wire.dumps((message, trace, cause))
        wire.loads(body, tensors)  # many exceptions can be pickled but not unpickled
    except Exception:
        body, tensors = wire.dumps((message, trace, None))
    return body, tensors


def _summary(error: BaseException) -> str:
    return traceback.format_exception_only(error)[-1].strip()
