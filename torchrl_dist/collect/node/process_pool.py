"""Start the env processes of a node worker, exchange messages with them, and replace env processes
that end.

Each env process has one end of a pair of sockets. The node worker has the other ends, and only one
of its threads uses them at a time.
"""

from __future__ import annotations

import contextlib
import math
import os
import pickle
import selectors
import signal
import socket
import struct
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from typing import Any

import cloudpickle
import numpy as np
import torch

from torchrl_dist.collect.node.env_process import (
    CUT_REQUEST,
    FIRST_PROGRESS,
    STOP,
    Answer,
    EnvProcessJob,
    Failure,
    Message,
)
from torchrl_dist.collect.node.relay import QUESTION, Relay, send
from torchrl_dist.collect.worker.registrations import dump_registrations
from torchrl_dist.collect.worker.shared_block import SharedBlock
from torchrl_dist.collect.worker.worker import WorkerConfig, WorkerInfo
from torchrl_dist.errors import DeadlineError, PeerLostError, RemoteError
from torchrl_dist.runtime import ForkServer
from torchrl_dist.runtime.awake import awake
from torchrl_dist.runtime.surroundings import Surroundings

_GLANCE_S = 0.2  # the period of checks for dead processes that no socket reports
_START_S = 120.0  # the least time that a process has to start and build its envs
CLOSE_S = 10.0
_MAX_DEATHS_IN_A_ROW = 3
_WORD_BYTES = 8


@dataclass
class EnvProcess:
    """One env process as the node worker sees it."""

    index: int
    connection: Connection
    ready: bool = False
    info: WorkerInfo | None = None  # None until the process is ready
    sent: int = 0  # number of requests sent to the process; the first request has number 1
    generation: int = 0
    forked_at: float = field(default_factory=awake)
    deaths: int = 0  # processes of this index that ended since the last delivered rollout
    numbered: int = 0
    steps_seen: int = 0
    seen_at: float = 0.0


class ProcessPool:
    """The ``config.env_processes`` processes of a node worker. :meth:`start` forks the processes.

    Args:
        config: the node worker's config.
        server: the fork server that starts the processes. None means a new server, which needs
            seconds for its imports.
        selector: the selector in which the pool registers the connection of each ready process,
            with the :class:`EnvProcess` as data.
        relay: sends questions of the processes to the learner; None if the policy runs in the
            processes.

    Attributes:
        processes: the processes by index.
        words: int64 memory shared with all processes, indexed by the constants of ``env_process``.
        job: the arguments with which the next process will be started.
        numbers_at_stake: the largest number of trajectory ids that a process can have used since
            its last answer.
        replaced: a description of each process that was replaced, and of how it ended. The node
            worker reads and empties this list.
        children: pids and exits of the processes, as the fork server reports them.
    """

    def __init__(
        self,
        config: WorkerConfig,
        server: ForkServer | None,
        selector: selectors.BaseSelector,
        relay: Relay | None,
    ) -> None:
        self._count = config.env_processes
        self._worker_index = config.worker_index
        self._step_timeout_s = config.step_timeout_s
        self._call_timeout_s = config.call_timeout_s
        self._selector = selector
        self._relay = relay
        self._control = SharedBlock(_WORD_BYTES * (FIRST_PROGRESS + self._count))
        self.words = self._control.data.numpy().view(np.int64)
        self.words[CUT_REQUEST] = -1
        self.job = EnvProcessJob(
            surroundings=Surroundings.of_this_process(torch.get_num_threads()),
            registrations=dump_registrations(),
            config=cloudpickle.dumps(config),
            control=self._control.path,
        )
        self.numbers_at_stake = 0
        self.replaced: list[str] = []
        self._started = False
        self.processes: list[EnvProcess] = []
        self._own_server = server is None
        self._server = ForkServer() if server is None else server

    @property
    def stopped(self) -> bool:
        """Whether the processes were told to stop."""
        return bool(self.words[STOP])

    # ---- start

    def start(self) -> list[WorkerInfo]:
        """Fork all processes, and block until each process has built its envs. Return the
        processes' infos in the order of their indices.

        Raises:
            RemoteError: a process could not build its envs.
            PeerLostError, DeadlineError: a process died, or did not start in time.
        """
        # Wait for the server before the sockets are made, because a process that another thread
        # forks during the wait would inherit the sockets.
        self._server.wait_up()
        pairs = [self._pair() for _ in range(self._count)]
        self.processes = [EnvProcess(index, ours) for index, (ours, _) in enumerate(pairs)]
        try:
            ends = [theirs.fileno() for _, theirs in pairs]
            self.children = self._server.start(self.job, range(self._count), ends)
        finally:
            for _, theirs in pairs:
                theirs.close()
        limit_s = self._start_s
        deadline = awake() + limit_s
        while newcomers := [process for process in self.processes if not process.ready]:
            left_s = deadline - awake()
            if left_s <= 0:
                raise DeadlineError(
                    f"{len(newcomers)} of {self._count} env processes did not start within "
                    f"{limit_s:g} s. If make_env takes longer, raise timeout_s= of the collector"
                )
            self._take_in(newcomers, min(left_s, _GLANCE_S))
        self._started = True
        return [process.info for process in self.processes if process.info is not None]

    @property
    def _start_s(self) -> float:
        return max(_START_S, self._call_timeout_s)

    def _failed_start(self, index: int) -> RemoteError | PeerLostError:
        state = self.children.states[index]
        with self.children.changed:
            self.children.changed.wait_for(lambda: state.exit is not None, CLOSE_S)
        if state.failure:
            return self._error(index, Failure(*state.failure, None))
        how = state.exit or "it closed its connection"
        return PeerLostError(f"env process {index} died at start-up: {how}; see its output")

    def _pair(self) -> tuple[Connection, socket.socket]:
        """Create a pair of sockets. Return the node worker's end and the env process's end."""
        ours, theirs = socket.socketpair(socket.AF_UNIX)
        for end in (ours, theirs):
            end.setblocking(True)  # even if socket.setdefaulttimeout() was called
        # Set time limits, because an env process that is paused in the middle of a message would
        # otherwise block this process.
        if (limit_s := self._step_timeout_s) is not None:
            limit = struct.pack("ll", int(limit_s), int(limit_s % 1 * 1e6))
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        return Connection(ours.detach()), theirs

    # ---- messages

    def send(self, process: EnvProcess, method: str, *args: Any, **kwargs: Any) -> int:
        """Tell a ready process to call a method. Return the number of the request, which the
        answer will carry.

        This method does not wait for the answer. Late answers to earlier requests arrive before
        this answer.
        """
        call = cloudpickle.dumps((args, kwargs))
        process.sent += 1
        send(process.connection, pickle.dumps(Message(process.sent, method, call)))
        return process.sent

    def receive(self, process: EnvProcess) -> Answer | None:
        """Block until the next message of a process arrives. If the message is an answer, return
        it. The content of an answer is a RemoteError if the call raised. If the message is a
        question, pass it on to the learner, and return None.

        Raises:
            EOFError: the process died, or was paused in the middle of an answer. The error has a
                message only if the process was paused.
        """
        try:
            message = process.connection.recv_bytes()
        except ConnectionError:
            raise EOFError from None
        except BlockingIOError:
            limit_s = self._step_timeout_s
            raise EOFError(f"paused for {limit_s:g} s in the middle of an answer") from None
        number, said = pickle.loads(message)
        if number == QUESTION:
            assert self._relay is not None
            self._relay.ask(process.connection, said)
            return None
        try:
            content = pickle.loads(said)
        except Exception as error:  # some results can be pickled but not unpickled
            summary = f"an answer cannot be unpickled: {type(error).__name__}: {error}"
            content = Failure(summary, traceback.format_exc(), None)
        if isinstance(content, Failure):
            content = self._error(process.index, content)
        return Answer(number, content)

    def _error(self, index: int, failure: Failure) -> RemoteError:
        error = RemoteError(
            failure.summary,
            peer=f"env process {index} of worker {self._worker_index}",
            host=socket.gethostname(),
            remote_traceback=failure.trace,
        )
        if failure.cause is not None:
            with contextlib.suppress(Exception):  # many errors can be pickled but not unpickled
                error.__cause__ = pickle.loads(failure.cause)
        return error

    # ---- ends

    def has_ended(self, process: EnvProcess) -> bool:
        """Whether a process has ended and all its messages were read.

        The connection alone may not show that a process has ended, because another thread of this
        process may have forked a child while both sockets were open. Such a child keeps both
        sockets open.
        """
        return (
            self.children.states[process.index].exit is not None
            and not process.connection.closed
            and not process.connection.poll(0)
        )

    def hangs(self, process: EnvProcess, limit_s: float) -> bool:
        """Whether a busy process has made no step for ``limit_s`` seconds."""
        made, now = int(self.words[FIRST_PROGRESS + process.index]), awake()
        if made != process.steps_seen:
            process.steps_seen, process.seen_at = made, now
        return now - process.seen_at > limit_s

    def replace(self, process: EnvProcess, reason: str) -> None:
        """Kill a process if it is still alive, and fork a successor without waiting until the
        successor has built its envs. If the processes were told to stop, neither kill nor fork.

        Args:
            reason: why the process is replaced. If the reason is empty, ``replaced`` and errors
                instead say how the process ended.

        Raises:
            PeerLostError: three processes of this index have ended in a row, or the process died
                without an exception before all processes had started.
            RemoteError: the process raised an exception before all processes had started.
        """
        index = process.index
        if process.ready:
            self._selector.unregister(process.connection)
            process.ready = False
        if self.stopped:  # do not kill: exit functions may still run
            return
        if not self._started:
            raise self._failed_start(process.index)
        process.connection.close()
        state = self.children.states[index]
        with self.children.changed:
            if state.exit is None and state.pid is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(state.pid, signal.SIGKILL)
            self.children.changed.wait_for(lambda: state.exit is not None, CLOSE_S)
        what = f"env process {index} (pid {state.pid}): {reason or state.exit}"
        self.replaced.append(what)
        process.deaths += 1
        if process.deaths >= _MAX_DEATHS_IN_A_ROW:
            raise PeerLostError(
                f"{what}; {process.deaths} consecutive env processes with this index ended without "
                "delivering a rollout. Find the cause in their output"
            )
        process.generation += 1
        process.forked_at = awake()
        process.numbered += self.numbers_at_stake
        job = replace(self.job, generation=process.generation, numbered=process.numbered)
        process.connection, theirs = self._pair()
        with theirs:
            self._server.restart(job, index, theirs.fileno())

    def welcome(
        self, wanted: Sequence[EnvProcess], until: float = math.inf, *, all_of_them: bool = False
    ) -> None:
        """Add successors that are ready by now. Block until one of the ``wanted`` processes is
        ready (or, with ``all_of_them``, all of them), or until the clock ``awake()`` reaches
        ``until``.

        Raises:
            RemoteError: a process could not build its envs.
            PeerLostError: a process and its next two successors ended in a row.
        """
        while newcomers := [p for p in self.processes if not p.ready]:
            ready = [process.ready for process in wanted]
            enough = all(ready) if all_of_them or not ready else any(ready)
            if self.stopped or (not enough and awake() >= until):
                return
            if not self._take_in(newcomers, 0.0 if enough else _GLANCE_S) and enough:
                return

    def _take_in(self, newcomers: Sequence[EnvProcess], wait_s: float) -> bool:
        """Add the newcomers that have built their envs, and replace newcomers that ended or are
        late. Return whether a newcomer sent a message within ``wait_s`` seconds.

        Raises:
            RemoteError: a process could not build its envs.
            PeerLostError: a process ended at the start, or for the third time in a row.
        """
        sources: list[Any] = [p.connection for p in newcomers if not p.connection.closed]
        relay: Any = self._relay  # wait() uses its fileno()
        readable = wait([*sources, relay] if relay else sources, wait_s)
        # Relay questions here too, because newcomers ask the learner for actions while they time
        # their steps.
        if relay is not None:
            if relay in readable:
                relay.deliver()
            relay.flush(most=1)
        for process in newcomers:
            # The connection is closed if an earlier call of replace() raised before it forked a
            # successor.
            if process.connection.closed:
                self.replace(process, "")
            elif process.connection in readable:
                try:
                    answer = self.receive(process)
                except EOFError as error:
                    self.replace(process, str(error))
                    continue
                if answer is not None:
                    process.info = answer.result()
                    process.ready = True
                    self._selector.register(process.connection, selectors.EVENT_READ, process)
            elif not readable and self.has_ended(process):
                self.replace(process, "")
            elif not readable and self._started and awake() - process.forked_at > self._start_s:
                self.replace(process, f"did not build its envs within {self._start_s:g} s")
        return bool(readable)

    def kill(self) -> None:
        """Kill all processes. Any thread may call this method."""
        self._server.kill_children()

    def close(self) -> None:
        """End all processes, even processes that hang. The pool cannot be used afterwards.
        Idempotent."""
        if self._own_server:
            self._server.close()
        else:
            self._server.kill_children()
        for process in self.processes:
            process.connection.close()

    def forget(self) -> None:
        """Release memory and the job's config, because no other process will be started."""
        self.words = self.words.copy()
        del self._control
        self.job = replace(self.job, config=b"")
