"""A worker whose envs run in processes of its node: one message per rollout for all of them.

The processes are forked from a server that has imported everything. They fill one rollout in
shared memory and read the policy's weights there. One that dies, hangs or is paused is killed and
replaced: its part of the rollouts at hand is missing, the other parts are delivered.

Nobody waits for the slowest: where the collector has asked for the next rollout already, a process
begins it when it is done with the one before.
"""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import selectors
import signal
import socket
import statistics
import struct
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from typing import Any

import cloudpickle
import numpy as np
import torch
from tensordict import TensorDict

from torchrl_dist.collect.batches import join
from torchrl_dist.collect.bell import Bell
from torchrl_dist.collect.env_process import (
    CUT_LEAST,
    CUT_REQUEST,
    FIRST_PROGRESS,
    STOP,
    EnvProcess,
    RowsTicket,
)
from torchrl_dist.collect.registrations import adopt_registrations, dump_registrations
from torchrl_dist.collect.relay import Question, Relay
from torchrl_dist.collect.shared_block import (
    PackedRows,
    RolloutLayout,
    SharedBlock,
    SharedWeights,
    packable,
)
from torchrl_dist.collect.specs import require_equal_specs
from torchrl_dist.collect.worker import (
    STOPPED_S,
    RolloutStats,
    RolloutWorker,
    Turns,
    WorkerConfig,
    WorkerInfo,
    wait_free,
)
from torchrl_dist.errors import ConfigurationError, DeadlineError, PeerLostError, RemoteError
from torchrl_dist.runtime import ForkServer
from torchrl_dist.runtime.surroundings import Surroundings
from torchrl_dist.weights import PackedWeights

# How often a death is looked for that no socket tells.
_GLANCE_S = 0.2
_START_S = 120.0  # of one process, its envs included
_CALL_S = 60.0
_CLOSE_S = 10.0
_MAX_DEATHS_IN_A_ROW = 3
_WORD_BYTES = 8
# Of rollouts: the collector asks for the one after the next when it has got the one at hand.
_BLOCKS = 2


@dataclass
class _Process:
    """One env process as the node worker sees it."""

    index: int
    connection: Connection | None = None
    ready: bool = False
    generation: int = 0
    forked_at: float = field(default_factory=time.monotonic)
    deaths: int = 0  # since its last rollout
    numbered: int = 0
    steps_seen: int = 0
    seen_at: float = 0.0


@dataclass(frozen=True)
class _Piece:
    """One process's part of a rollout; ``rows`` is None where they lie in the shared block."""

    index: int
    rows: TensorDict | None
    stats: RolloutStats


@dataclass(frozen=True, eq=False)
class _Order:
    """What ``collect`` was asked for."""

    steps: int
    kept: int
    weights: PackedWeights | None
    request: int | None
    anew: bool


@dataclass(eq=False)
class _UnderWay:
    """A rollout that processes work at, or have done. ``pending``: those who work at it;
    ``block``: where its rows lie."""

    order: _Order
    block: int
    pending: set[int]
    pieces: list[_Piece] = field(default_factory=list)
    failure: RemoteError | PeerLostError | None = None


def make_worker(config: WorkerConfig) -> RolloutWorker | NodeWorker:
    """The worker that the config asks for, in a process that knows the learner's environments."""
    adopt_registrations(config.registrations)
    return NodeWorker(config) if config.env_processes else RolloutWorker(config)


class NodeWorker:
    """What a :class:`RolloutWorker` is to the collector, over ``config.env_processes`` processes.

    Env i of the job gets the seed, the weights and the place in the batch that it would have
    in any other division into workers and processes.

    Args:
        server: to fork from; default one of its own, which costs the seconds of its imports.

    Raises:
        RemoteError: a process could not build its envs.
        ConfigurationError: they built different ones.
        PeerLostError, DeadlineError: it died, or took too long.
    """

    def __init__(self, config: WorkerConfig, server: ForkServer | None = None) -> None:
        if config.env_processes < 1:
            raise ConfigurationError(f"env_processes={config.env_processes}: expected at least 1")
        self.config = config
        self._count = config.env_processes
        self._lock = threading.Lock()
        self._turns = Turns()
        self._closed = False
        self._base = 0
        self._weights = SharedWeights()
        self._version = 0
        self._blocks: list[SharedBlock] = []
        self._views: list[TensorDict] = []
        self._layout: RolloutLayout | None = None
        self._announced: dict[int, _Order] = {}  # by request; of threads that wait for their turn
        self._under_way: list[_UnderWay] = []
        self._unnumbered = 0  # calls of ``collect``
        self._replaced: list[str] = []  # since the last rollout
        self._selector = selectors.DefaultSelector()
        self._bell = Bell()  # something was announced
        self._selector.register(self._bell, selectors.EVENT_READ, self._begin_ahead)
        self._control = SharedBlock(_WORD_BYTES * (FIRST_PROGRESS + self._count))
        self._words = self._control.data.numpy().view(np.int64)
        self._words[CUT_REQUEST] = -1
        self._token = secrets.token_hex(16)
        self._address = f"\0torchrl_dist-{secrets.token_hex(8)}"
        self._surroundings = Surroundings.of_this_process(torch.get_num_threads())
        self._registrations = dump_registrations()
        self._config = cloudpickle.dumps(config)
        self._relay = None if config.inference is None else Relay(config.inference)
        if self._relay is not None:
            self._selector.register(self._relay, selectors.EVENT_READ, self._relay.deliver)
        self._own_server = server is None
        self._server = ForkServer() if server is None else server
        self._listener = socket.socket(socket.AF_UNIX)
        self._processes = [_Process(index) for index in range(self._count)]
        try:
            self._listener.bind(self._address)
            self._listener.listen(self._count)
            self._children = self._server.start(self._job(), range(self._count))
            infos = self._await_all(time.monotonic() + _START_S)
            require_equal_specs({f"env process {i}": info.specs for i, info in enumerate(infos)})
        except BaseException:
            self._end()
            raise
        self._envs = infos[0].num_envs
        self.steps = infos[0].steps
        self.num_envs = self._envs * self._count
        self._info = replace(
            infos[0],
            num_envs=self.num_envs,
            processes=self._count,
            pid=os.getpid(),
            step_s=statistics.median(info.step_s for info in infos),
            step_bytes=sum(info.step_bytes for info in infos),
        )

    # ---- processes

    def _job(self, generation: int = 0, numbered: int = 0) -> EnvProcess:
        return EnvProcess(
            address=self._address,
            token=self._token,
            surroundings=self._surroundings,
            registrations=self._registrations,
            config=self._config,
            control=self._control.path,
            trajectory_base=self._base,
            generation=generation,
            numbered=numbered,
        )

    def _await_all(self, deadline: float) -> list[WorkerInfo]:
        """Block until every process has built its envs."""
        infos: dict[int, WorkerInfo] = {}
        while len(infos) < self._count:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise DeadlineError(
                    f"{self._count - len(infos)} of {self._count} env processes did not start "
                    f"within {_START_S:g} s"
                )
            waiting = [p for p in self._processes if p.connection and not p.ready]
            relay = self._relay
            sources: list[Any] = [self._listener, *(p.connection for p in waiting)]
            readable = wait([*sources, relay] if relay else sources, min(left_s, _GLANCE_S))
            if self._listener in readable:
                self._accept()
            for process in waiting:
                if process.connection in readable:
                    answer = self._first_answer(process)
                    if relay is not None and isinstance(answer, Question):
                        relay.ask(process.connection, answer)  # it times its steps
                    else:
                        infos[process.index] = answer
                        self._make_ready(process)
            if relay is not None:
                if relay in readable:
                    relay.deliver()
                relay.flush(most=1)
            self._raise_for_failed_start()
        return [infos[index] for index in range(self._count)]

    def _first_answer(self, process: _Process) -> Any:
        try:
            return self._receive(process)
        except EOFError:
            with self._children.changed:
                state = self._children.states[process.index]
                self._children.changed.wait_for(lambda: state.exit is not None, _CLOSE_S)
            how = state.exit or "it closed its connection"
            raise PeerLostError(f"env process {process.index} died at start-up: {how}") from None

    def _raise_for_failed_start(self) -> None:
        with self._children.changed:
            for index, state in self._children.states.items():
                if state.failure:
                    raise self._error(index, *state.failure, None)
                if state.exit and not self._processes[index].ready:
                    raise PeerLostError(f"env process {index} died at start-up: {state.exit}")

    def _accept(self) -> None:
        link, _ = self._listener.accept()
        if (limit_s := self.config.step_timeout_s) is not None:  # in the middle of a message
            limit = struct.pack("ll", int(limit_s), int(limit_s % 1 * 1e6))
            link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
            link.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        uid = struct.unpack("3i", link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[1]
        connection = Connection(link.detach())
        token, index, generation = "", 0, 0
        if uid == os.getuid() and connection.poll(_CLOSE_S):  # who may do with us what he wants
            with contextlib.suppress(Exception):  # it died meanwhile, or is a stranger
                token, index, generation = connection.recv()
        if token == self._token and generation == self._processes[index].generation:
            self._processes[index].connection = connection
        else:
            connection.close()

    def _make_ready(self, process: _Process) -> None:
        process.ready = True
        self._selector.register(process.connection, selectors.EVENT_READ, process)

    def _receive(self, process: _Process) -> Any:
        """The next answer of a process.

        Raises:
            EOFError: it died, or stopped in the middle of the answer, which the message says.
            RemoteError: the call raised there.
        """
        assert process.connection is not None
        try:
            fine, content = cloudpickle.loads(process.connection.recv_bytes())
        except (EOFError, ConnectionError):
            raise EOFError from None
        except BlockingIOError:
            limit_s = self.config.step_timeout_s
            raise EOFError(f"stopped for {limit_s:g} s in the middle of an answer") from None
        if not fine:
            raise self._error(process.index, *content)
        return content

    def _error(
        self, index: int, summary: str, trace: str, cause: BaseException | None
    ) -> RemoteError:
        error = RemoteError(
            summary,
            peer=f"env process {index} of worker {self.config.worker_index}",
            host=socket.gethostname(),
            remote_traceback=trace,
        )
        error.__cause__ = cause
        return error

    def _send(self, process: _Process, method: str, *args: Any, **kwargs: Any) -> None:
        assert process.connection is not None
        with contextlib.suppress(OSError):  # its death is seen when the answer is awaited
            process.connection.send_bytes(cloudpickle.dumps((method, args, kwargs)))

    def _replace(self, process: _Process, reason: str) -> None:
        """Kill what is left of a process and fork another; does not wait for its envs.

        Args:
            reason: if it is known; else the way in which the process ended.

        Raises:
            PeerLostError: it is not the first in a row.
        """
        index = process.index
        if process.connection is not None:
            if process.ready:
                self._selector.unregister(process.connection)
            process.connection.close()
        state = self._children.states[index]
        with self._children.changed:
            if state.exit is None and state.pid is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(state.pid, signal.SIGKILL)
            self._children.changed.wait_for(lambda: state.exit is not None, _CLOSE_S)
        what = f"env process {index} (pid {state.pid}): {reason or state.exit}"
        self._replaced.append(what)
        process.connection, process.ready = None, False
        process.deaths += 1
        if self._words[STOP]:
            return
        if process.deaths >= _MAX_DEATHS_IN_A_ROW:
            raise PeerLostError(f"{what}; it is the {process.deaths}rd in a row to end like this")
        process.generation += 1
        process.forked_at = time.monotonic()
        # What it may have numbered meanwhile.
        process.numbered += _BLOCKS * self._envs * (self.steps + 1)
        self._server.restart(self._job(process.generation, process.numbered), index)

    def _welcome(self, everybody: bool = False) -> None:
        """Take in replaced processes that are ready by now; block until one is, or all are."""
        while newcomers := [p for p in self._processes if not p.ready]:
            if self._words[STOP]:
                return
            enough = not everybody and len(newcomers) < self._count
            connections = [p.connection for p in newcomers if p.connection is not None]
            readable = wait([self._listener, *connections], 0.0 if enough else _GLANCE_S)
            if self._listener in readable:
                self._accept()
            for process in newcomers:
                if process.connection in readable:
                    self._take_in(process)
                elif process.connection is None and self._children.states[process.index].exit:
                    self._replace(process, "")  # before it could say anything
                elif not readable and time.monotonic() - process.forked_at > _START_S:
                    self._replace(process, f"was not ready within {_START_S:g} s")
            if enough and not readable:
                return

    def _take_in(self, process: _Process) -> None:
        try:
            self._receive(process)
        except EOFError as error:
            self._replace(process, str(error))
        else:
            self._make_ready(process)

    # ---- the verbs of a worker

    def describe(self) -> WorkerInfo:
        return self._info

    def set_steps(self, steps: int) -> None:
        """As ``RolloutWorker.set_steps``; before the first rollout."""
        self._tell_all("set_steps", steps)
        self.steps = steps
        self.config = replace(self.config, frames_per_rollout=steps * self.num_envs)
        self._config = cloudpickle.dumps(self.config)

    def set_weights(self, packed: PackedWeights) -> None:
        """As ``RolloutWorker.set_weights``; one copy for all processes."""
        with self._lock:
            self._finish_all()
            self._take_weights(packed)

    def _take_weights(self, packed: PackedWeights) -> None:
        ticket = self._weights.ticket
        if ticket is None or packed.version >= ticket.version:
            self._weights.write(packed)

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """As ``RolloutWorker.set_seed``."""
        return self._tell_all("set_seed", seed, static_seed)[0]

    def set_trajectory_base(self, base: int) -> None:
        """As ``RolloutWorker.set_trajectory_base``."""
        self._base = base
        self._tell_all("set_trajectory_base", base)

    def reset(self) -> None:
        """As ``RolloutWorker.reset``."""
        self._tell_all("reset")

    def visit_envs(
        self, index: int | None, what: str, name: str, args: tuple, kwargs: dict
    ) -> list[Any]:
        """As ``RolloutWorker.visit_envs``."""
        if index is None:
            answers = self._tell_all("visit_envs", None, what, name, args, kwargs)
            return [result for results in answers for result in results]
        process, inside = divmod(index, self._envs)
        return self._tell_all("visit_envs", inside, what, name, args, kwargs, only=process)[0]

    def _tell_all(self, method: str, *args: Any, only: int | None = None) -> list[Any]:
        """Call a method in all processes, or in one; the answer of each, or of its successor.

        Raises:
            RemoteError: it raised there.
            PeerLostError: a process ended for the third time in a row.
        """
        with self._lock:
            asked = [p for p in self._processes if only in (None, p.index)]
            answers: dict[int, Any] = {}
            failure: RemoteError | None = None
            while missing := [p for p in asked if p.index not in answers]:
                if self._words[STOP]:
                    raise ConfigurationError("this worker is closed")
                self._finish_all()
                self._welcome(everybody=True)
                if not all(process.ready for process in missing):
                    continue  # it is being closed
                for process in missing:
                    self._send(process, method, *args)
                deadline = time.monotonic() + _CALL_S
                ended: list[tuple[_Process, str]] = []
                for process in missing:  # each is read, or it would be taken for the next one's
                    try:
                        answers[process.index] = self._await_answer(process, method, deadline)
                    except EOFError as error:
                        ended.append((process, str(error)))
                    except RemoteError as error:
                        answers[process.index] = None
                        failure = failure or error
                for process, reason in ended:
                    self._replace(process, reason)
            if failure is not None:
                raise failure
            return [answers[process.index] for process in asked]

    def _await_answer(self, process: _Process, method: str, deadline: float) -> Any:
        assert process.connection is not None
        if not process.connection.poll(max(0.0, deadline - time.monotonic())):
            raise EOFError(f"did not answer {method} within {_CALL_S:g} s")
        return self._receive(process)

    def cut(self, request: int, least: int) -> None:
        """As ``RolloutWorker.cut``."""
        self._words[CUT_LEAST] = least  # first: it counts from the next line on
        self._words[CUT_REQUEST] = request

    def collect(
        self,
        steps: int | None = None,
        num_envs: int | None = None,
        weights: PackedWeights | None = None,
        request: int | None = None,
        anew: bool = False,
    ) -> tuple[TensorDict | PackedRows | None, RolloutStats]:
        """As ``RolloutWorker.collect``. Rows of a process that ended are missing, and it is named
        in the statistics. The rows stay as they are until the call after the next one.

        Raises:
            RemoteError: an env raised.
            PeerLostError: a process ended for the third time in a row.
        """
        index = self.config.worker_index
        order = _Order(
            self.steps if steps is None else steps,
            self.num_envs if num_envs is None else num_envs,
            weights,
            request,
            anew,
        )
        self._announce(order)
        with self._turns.wait_for(request), self._lock:
            if self._closed:
                return None, RolloutStats(index, 0)
            while True:
                rollout = self._begun(order)
                try:
                    self._finish(rollout)
                finally:
                    self._under_way.remove(rollout)
                if rollout.failure is not None:
                    raise rollout.failure
                if rollout.pieces or self._words[STOP]:
                    break
            pieces = sorted(rollout.pieces, key=lambda piece: piece.index)
            replaced, self._replaced = self._replaced, []
            stats = self._join_stats([piece.stats for piece in pieces], replaced)
            return self._join(pieces, order.steps, rollout.block), stats

    def _announce(self, order: _Order) -> None:
        if order.request is None:
            return
        self._announced[order.request] = order
        self._bell.ring()

    def _begin_ahead(self) -> None:
        """Let the processes go on with the rollout after the one at hand, if it was asked for."""
        self._bell.quiet()
        complete = all(process.ready for process in self._processes)  # else some are to be welcomed
        if complete and len(self._under_way) == 1 and not self._words[STOP]:
            request = self._under_way[0].order.request
            order = None if request is None else self._announced.get(request + 1)
            if order is not None:
                self._begin(order)

    def _begun(self, order: _Order) -> _UnderWay:
        for rollout in self._under_way:
            if rollout.order is order:
                return rollout
        return self._begin(order)

    def _begin(self, order: _Order) -> _UnderWay:
        """Let all processes that are ready make that rollout when they have made those before."""
        if order.request is None:
            number = self._unnumbered = self._unnumbered + 1
        else:
            number = order.request
            self._announced.pop(number, None)
        self._welcome()
        if order.weights is not None:
            self._take_weights(order.weights)
        chosen = [p for p in self._processes if p.ready and order.kept > p.index * self._envs]
        busy = {index for rollout in self._under_way for index in rollout.pending}
        rollout = _UnderWay(order, number % _BLOCKS, {p.index for p in chosen})
        self._under_way.append(rollout)
        for process in chosen:
            if process.index not in busy:
                process.seen_at = time.monotonic()
            self._send(
                process,
                "collect",
                steps=order.steps,
                num_envs=min(self._envs, order.kept - process.index * self._envs),
                request=order.request or 0,
                weights=self._weights.ticket,
                rows=self._ticket(process.index, rollout.block),
                anew=order.anew,
            )
        return rollout

    def _finish(self, rollout: _UnderWay, timeout_s: float | None = None) -> None:
        """Read and relay until every process has handed in its part of that rollout, or has
        ended; or for so many seconds."""
        until = math.inf if timeout_s is None else time.monotonic() + timeout_s
        limit_s, relay = self.config.step_timeout_s, self._relay
        glance_s = math.inf if limit_s is None else limit_s / 4
        self._begin_ahead()
        flush_s = math.inf
        while rollout.pending and (left_s := until - time.monotonic()) > 0:
            wait_s, asked = min(left_s, glance_s, flush_s), time.monotonic()
            events = self._selector.select(None if wait_s == math.inf else wait_s)
            waited_s = time.monotonic() - asked
            if waited_s > wait_s + STOPPED_S:  # and its processes as well, perhaps
                for process in self._processes:
                    process.seen_at += waited_s
            for key, _ in events:
                if isinstance(key.data, _Process):
                    self._take_answer(key.data)
                else:
                    key.data()
            busy = {index for each in self._under_way for index in each.pending}
            if relay is not None:
                flush_s = relay.flush(most=len(busy))
            for index in busy if limit_s is not None else ():
                process = self._processes[index]
                if self._hangs(process, limit_s):
                    self._bury(process, f"made no step for {limit_s:g} s")

    def _finish_all(self) -> None:
        """Wait until all processes are idle: a call is answered by them between two rollouts."""
        for rollout in self._under_way:
            self._finish(rollout)

    def _take_answer(self, process: _Process) -> None:
        rollout = next((r for r in self._under_way if process.index in r.pending), None)
        answer, failure = None, None
        try:
            answer = self._receive(process)
        except EOFError as error:
            self._bury(process, str(error))
            return
        except RemoteError as error:
            failure = error
        if self._relay is not None and isinstance(answer, Question):
            assert process.connection is not None
            self._relay.ask(process.connection, answer)
            return
        assert rollout is not None, f"env process {process.index} was asked for nothing"
        rollout.pending.discard(process.index)
        if failure is not None:
            rollout.failure = rollout.failure or failure
            return
        rows, stats = answer
        process.deaths = 0
        process.numbered = max(process.numbered, stats.next_trajectory)
        if stats.frames:
            rollout.pieces.append(_Piece(process.index, rows, stats))

    def _bury(self, process: _Process, reason: str) -> None:
        """Go on without a process until its successor is ready."""
        for rollout in self._under_way:
            rollout.pending.discard(process.index)
        try:
            self._replace(process, reason)
        except PeerLostError as error:  # raised when the others have handed in
            first = self._under_way[0]
            first.failure = first.failure or error

    def _hangs(self, process: _Process, limit_s: float) -> bool:
        made, now = int(self._words[FIRST_PROGRESS + process.index]), time.monotonic()
        if made != process.steps_seen:
            process.steps_seen, process.seen_at = made, now
        return now - process.seen_at > limit_s

    def _ticket(self, index: int, block: int) -> RowsTicket | None:
        if self._layout is None or self.config.replay_buffer is not None:
            return None
        return RowsTicket(self._blocks[block].path, self._layout, index * self._envs)

    def _join(self, pieces: list[_Piece], steps: int, block: int) -> TensorDict | PackedRows | None:
        """All pieces as one rollout: the shared block itself where it is whole."""
        if not pieces or self.config.replay_buffer is not None:
            return None
        first = next((piece.rows for piece in pieces if piece.rows is not None), None)
        if first is not None and self._layout is None and packable(first):
            self._layout = RolloutLayout.of(first, self.num_envs, self.steps)
            self._blocks = [SharedBlock(self._layout.size_bytes) for _ in range(_BLOCKS)]
            self._views = [self._layout.view(block.data) for block in self._blocks]
        whole = all(piece.rows is None for piece in pieces) and all(
            piece.stats.frames == self._envs * steps for piece in pieces
        )
        if self._layout is not None and whole and len(pieces) == self._count:
            if self.config.packed:
                return PackedRows(self._layout, self._blocks[block].data, (self.num_envs, steps))
            return self._views[block][:, :steps].clone()  # the caller may keep them
        found = [self._rows_of(piece, block) for piece in pieces]
        cut = len({piece.stats.frames // piece.stats.num_envs for piece in pieces}) > 1
        return join(found, masked=cut)

    def _rows_of(self, piece: _Piece, block: int) -> TensorDict:
        if piece.rows is not None:
            return piece.rows
        first = piece.index * self._envs
        envs = piece.stats.num_envs
        view = self._views[block]
        return view[first : first + envs, : piece.stats.frames // envs].clone()

    def _join_stats(self, parts: Sequence[RolloutStats], replaced: Sequence[str]) -> RolloutStats:
        return RolloutStats(
            self.config.worker_index,
            sum(s.frames for s in parts),
            min((s.oldest_version for s in parts), default=0),
            max((s.newest_version for s in parts), default=0),
            [r for s in parts for r in s.episode_returns],
            [n for s in parts for n in s.episode_lengths],
            max((s.collect_s for s in parts), default=0.0),
            max((s.write_s for s in parts), default=0.0),
            sum(s.data_bytes for s in parts),
            num_envs=sum(s.num_envs for s in parts),
            replaced=tuple(replaced),
        )

    def close(self, step_limit_s: float = _CLOSE_S) -> None:
        """Stop a running rollout after its current steps, close the envs, end the processes, also
        those that hang: blocks at most about ``step_limit_s``. Idempotent."""
        until = time.monotonic() + step_limit_s
        self._words[STOP] = 1
        self._turns.open()
        idle = self._lock.acquire(timeout=step_limit_s)
        try:
            if self._closed:
                return
            self._closed = True
            if idle:
                for rollout in self._under_way:
                    self._finish(rollout, until - time.monotonic())
                for process in self._processes:
                    if process.ready:
                        self._send(process, "close")
                self._children.wait_gone(min(step_limit_s, _CLOSE_S))
                self._let_go()
        finally:
            self._end()
            if idle:
                self._lock.release()

    def _let_go(self) -> None:
        """The session keeps this object until it ends; what it refers to may go."""
        self._blocks, self._views, self._weights = [], [], SharedWeights()
        del self._control
        self._words = self._words.copy()
        self._config = b""
        self.config = self.config.without_parts()

    def wait_idle(self, timeout_s: float) -> bool:
        """As ``RolloutWorker.wait_idle``."""
        return wait_free(self._lock, timeout_s)

    def _end(self) -> None:
        if self._own_server:
            self._server.close()
        else:
            self._server.kill_children()
        self._listener.close()
        if self._relay is not None:
            self._relay.close()
        for process in self._processes:
            if process.connection is not None:
                process.connection.close()
        self._selector.close()
        self._bell.close()
