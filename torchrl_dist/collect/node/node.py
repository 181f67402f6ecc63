"""A worker whose envs run in several processes of its node.

The env processes are forked from a server that has already imported all modules. Together they
write one rollout into shared memory. They also read the policy's weights from shared memory. An env
process that dies, hangs or is paused is killed and replaced. The rollouts in progress are delivered
without the parts of that env process.

Env processes do not wait for the slowest env process. After its part of a rollout, an env process
begins the next rollout if the collector has already requested that rollout.
"""

from __future__ import annotations

import math
import os
import selectors
import statistics
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import cloudpickle
from tensordict import TensorDict

from torchrl_dist.collect.loop.joining import join
from torchrl_dist.collect.node.env_process import (
    CUT_LEAST,
    CUT_REQUEST,
    STOP,
    RowsAddress,
)
from torchrl_dist.collect.node.process_pool import CLOSE_S, EnvProcess, ProcessPool
from torchrl_dist.collect.node.relay import Relay
from torchrl_dist.collect.node.waker import Waker
from torchrl_dist.collect.worker.shared_block import (
    PackedRows,
    RolloutLayout,
    SharedBlock,
    SharedWeights,
    packable,
)
from torchrl_dist.collect.worker.specs import require_equal_specs
from torchrl_dist.collect.worker.worker import (
    Hooks,
    RolloutStats,
    WorkerConfig,
    WorkerInfo,
    reached_by_session,
    write,
)
from torchrl_dist.errors import ConfigurationError, DeadlineError, PeerLostError, RemoteError
from torchrl_dist.runtime import ForkServer
from torchrl_dist.runtime.awake import awake, start_clock
from torchrl_dist.stopping import giving_up_when
from torchrl_dist.weights import PackedWeights

# The number of rollouts that are in shared memory at a time. Two suffice, because the collector has
# at most two requests in flight.
_BLOCKS = 2
_GLANCE_S = 1.0  # the period of checks for dead processes that no connection reports
# If rows go to a replay buffer, the limit of a step is at least this long, because an env process
# that waits for the buffer increases its count of steps only every half second.
_LEAST_LIMIT_S = 2.0
# Env processes that still run are killed after this fraction of the time limit for closing, so that
# the rest of the time suffices to close everything else.
_PATIENCE = 0.8


@dataclass(frozen=True)
class _Piece:
    """One env process's part of a rollout. ``rows`` is None if the rows are in the shared block."""

    index: int
    rows: TensorDict | None
    stats: RolloutStats


@dataclass(frozen=True, eq=False)
class _Order:
    """The arguments of one ``collect`` call; see ``RolloutWorker.collect``."""

    steps: int
    num_envs: int
    weights: PackedWeights | None = None
    request: int | None = None
    anew: bool = False
    at_random: bool = False


@dataclass(eq=False)
class _Calls:
    """Calls of a method in several processes, such as the calls that make one rollout.

    Attributes:
        order: the requested rollout, if the calls make a rollout, else None.
        block: number of the shared block with the rollout's rows.
        pending: number of the awaited answer, by index of each process that has not answered.
        answers: results, or RemoteErrors, by index of the process, in the order of their arrival.
        failure: the error that was raised because a process could not be replaced, else None.
    """

    order: _Order | None = None
    block: int = 0
    pending: dict[int, int] = field(default_factory=dict)
    answers: dict[int, Any] = field(default_factory=dict)
    failure: PeerLostError | None = None


class NodeWorker:
    """Do what a :class:`RolloutWorker` does, with ``config.env_processes`` processes.

    Env i of the job has the same seed, weights and place in the batch, no matter how envs are
    divided into workers and env processes. Call all methods in one thread, except for ``expect``,
    ``cut`` and ``stop``. In a main thread, Ctrl-C could leave a message to a process unfinished.
    :class:`PinnedWorker` therefore calls the methods in another thread, where no signal handler
    runs.

    Args:
        server: the fork server that starts the env processes. None means a new server, which needs
            seconds for its imports.

    Raises:
        RemoteError: a process could not build its envs.
        ConfigurationError: the processes built different envs.
        PeerLostError, DeadlineError: a process died, or took too long to start.
    """

    def __init__(self, config: WorkerConfig, server: ForkServer | None = None) -> None:
        if config.env_processes < 1:
            raise ConfigurationError(
                f"env_processes={config.env_processes}: expected at least 1; for a worker without "
                "env processes, build a RolloutWorker"
            )
        start_clock()
        # Only processes of the session can reach a buffer over hosts. Env processes are not in the
        # session, so this process writes the rows for them.
        self._buffer: Any = None
        if reached_by_session(config.replay_buffer):
            self._buffer = config.replay_buffer
            config = replace(config, replay_buffer=None, packed=False)
        self.config = config
        self._count = config.env_processes
        self._closed = False
        self._kill: threading.Timer | None = None
        self._weights = SharedWeights()
        self._blocks: list[SharedBlock] = []
        self._views: list[TensorDict] = []
        self._layout: RolloutLayout | None = None
        self._expected: dict[int, _Order] = {}  # requested rollouts, by request number
        self._under_way: list[_Calls] = []
        self._unnumbered = 0  # calls of ``collect`` without a request number
        self._selector = selectors.DefaultSelector()
        self._waker = Waker()  # wakes the thread when a rollout was requested
        self._selector.register(self._waker, selectors.EVENT_READ, self._begin_ahead)
        self._relay = None if config.inference is None else Relay(config.inference)
        if self._relay is not None:
            self._selector.register(self._relay, selectors.EVENT_READ, self._relay.deliver)
        self._pool = ProcessPool(config, server, self._selector, self._relay)
        try:
            infos = self._pool.start()
            require_equal_specs({f"env process {i}": info.specs for i, info in enumerate(infos)})
        except BaseException:
            self._end()
            raise
        self._envs = infos[0].num_envs
        self.steps = infos[0].steps
        self.num_envs = self._envs * self._count
        self._note_numbers_at_stake()
        self._info = replace(
            infos[0],
            num_envs=self.num_envs,
            processes=self._count,
            pid=os.getpid(),
            step_s=statistics.median(info.step_s for info in infos),
            step_bytes=sum(info.step_bytes for info in infos),
        )

    def describe(self) -> WorkerInfo:
        return self._info

    def set_steps(self, steps: int) -> None:
        """See ``RolloutWorker.set_steps``. Call before the first rollout."""
        self._tell_all("set_steps", steps)
        self.steps = steps
        self.config = replace(self.config, frames_per_rollout=steps * self.num_envs)
        self._pool.job = replace(self._pool.job, config=cloudpickle.dumps(self.config))
        self._note_numbers_at_stake()

    def _note_numbers_at_stake(self) -> None:
        self._pool.numbers_at_stake = _BLOCKS * self._envs * (self.steps + 1)

    def _take_weights(self, packed: PackedWeights) -> None:
        """Use these weights, unless they are older than the current weights. All env processes
        share one copy."""
        address = self._weights.address
        if address is None or packed.version >= address.version:
            self._weights.write(packed)

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """See ``RolloutWorker.set_seed``."""
        return self._tell_all("set_seed", seed, static_seed)[0]

    def set_trajectory_base(self, base: int) -> None:
        """See ``RolloutWorker.set_trajectory_base``."""
        self._pool.job = replace(self._pool.job, trajectory_base=base)
        self._tell_all("set_trajectory_base", base)

    def set_hooks(self, hooks: Hooks) -> None:
        """See ``RolloutWorker.set_hooks``. Set the hooks in all env processes."""
        self.config = replace(self.config, hooks=hooks)
        self._pool.job = replace(self._pool.job, config=cloudpickle.dumps(self.config))
        self._tell_all("set_hooks", hooks)

    def reset(self, envs: Sequence[int] | None = None) -> list[int]:
        """See ``RolloutWorker.reset``."""
        if envs is None:
            self._tell_all("reset")
            return []
        abandoned = []
        for process in sorted({env // self._envs for env in envs}):
            inside = [env % self._envs for env in envs if env // self._envs == process]
            abandoned += self._tell_all("reset", inside, only=process)[0]
        return abandoned

    def visit_envs(
        self, index: int | None, what: str, name: str, args: tuple, kwargs: dict
    ) -> list[Any]:
        """See ``RolloutWorker.visit_envs``."""
        if index is None:
            answers = self._tell_all("visit_envs", None, what, name, args, kwargs)
            return [result for results in answers for result in results]
        process, inside = divmod(index, self._envs)
        return self._tell_all("visit_envs", inside, what, name, args, kwargs, only=process)[0]

    def _tell_all(self, method: str, *args: Any, only: int | None = None) -> list[Any]:
        """Call a method in all env processes, or only in the env process with index ``only``.
        Return each answer. If a process ended during the call, its successor answers instead.

        Raises:
            RemoteError: the method raised.
            PeerLostError: a process and its next two successors ended in a row.
            DeadlineError: not all processes answered within ``config.call_timeout_s``. The late
                calls continue in their processes.
        """
        until = awake() + self.config.call_timeout_s
        asked = [p for p in self._pool.processes if only in (None, p.index)]
        answers: dict[int, Any] = {}
        while missing := [p for p in asked if p.index not in answers]:
            if self._pool.stopped:
                raise ConfigurationError(
                    "this worker is closed, so its envs cannot be called; build a new collector"
                )
            self._finish_all(until)
            self._pool.welcome(missing, until, all_of_them=True)
            if awake() >= until:
                raise DeadlineError(
                    f"{method}: env processes {[process.index for process in missing]} did not "
                    f"answer within {self.config.call_timeout_s:g} s. If their envs do not hang, "
                    "raise timeout_s= of the collector"
                )
            # All processes are ready here, unless this worker is being closed.
            if all(process.ready for process in missing):
                answers |= self._ask(missing, until, method, *args)
        _raise_first(answers)
        return [answers[process.index] for process in asked]

    def _ask(
        self, asked: Sequence[EnvProcess], until: float, method: str, *args: Any
    ) -> dict[int, Any]:
        """Call a method in processes that are ready and idle, and block until they have answered.

        Args:
            until: the deadline, by the clock ``awake()``.

        Returns:
            answers by index of the process. An error that the method raised counts as an answer.
            Processes that were late or were replaced have no answer.

        Raises:
            PeerLostError: a process and its next two successors ended in a row.
        """
        calls = _Calls()
        self._under_way.append(calls)
        for process in asked:
            calls.pending[process.index] = self._pool.send(process, method, *args)
        return self._answers_of(calls, until)

    def _answers_of(self, calls: _Calls, until: float = math.inf) -> dict[int, Any]:
        try:
            self._finish(calls, until)
        finally:
            self._under_way.remove(calls)
        if calls.failure is not None:
            raise calls.failure
        return calls.answers

    def cut(self, request: int, least: int) -> None:
        """See ``RolloutWorker.cut``."""
        # CUT_LEAST is written first, because the next line puts the cut into effect.
        self._pool.words[CUT_LEAST] = least
        self._pool.words[CUT_REQUEST] = request

    def expect(self, request: int | None, **options: Any) -> None:
        """Record that a rollout was requested, so that env processes can begin it before the
        previous rollout has ended. Any thread may call this method."""
        if request is not None:
            self._expected[request] = self._order(request, **options)
            self._waker.wake()

    def _order(self, request: int | None, **options: Any) -> _Order:
        given = {name: value for name, value in options.items() if value is not None}
        return _Order(**{"steps": self.steps, "num_envs": self.num_envs, **given}, request=request)

    def collect(
        self, request: int | None = None, **options: Any
    ) -> tuple[TensorDict | PackedRows | None, RolloutStats]:
        """See ``RolloutWorker.collect``. If an env process ended, its rows are missing and the
        statistics name the process. ``PackedRows`` stay valid until the rollout after the next
        rollout is requested, by ``expect`` or ``collect``.

        Raises:
            RemoteError: an env raised.
            PeerLostError: a process and its next two successors ended in a row.
        """
        order = self._expected.get(-1 if request is None else request)
        order = order or self._order(request, **options)
        if self._closed:
            return None, RolloutStats(self.config.worker_index, 0)
        while True:
            rollout = next((each for each in self._under_way if each.order is order), None)
            rollout = rollout or self._begin(order)
            self._expected.pop(-1 if request is None else request, None)
            answers = self._answers_of(rollout)
            _raise_first(answers)
            pieces = [_Piece(index, *answers[index]) for index in sorted(answers)]
            pieces = [piece for piece in pieces if piece.stats.frames]
            if pieces or self._pool.stopped:
                break
        replaced, self._pool.replaced = self._pool.replaced, []
        stats = self._join_stats([piece.stats for piece in pieces], replaced)
        rows = self._join(pieces, order.steps, rollout.block)
        return (rows, stats) if self._buffer is None else self._write(rows, stats)

    def _write(self, rows: Any, stats: RolloutStats) -> tuple[None, RolloutStats]:
        """Write the rows of a rollout to the buffer over hosts."""
        begun = time.perf_counter()
        try:
            if rows is not None:
                with giving_up_when(lambda: self._pool.stopped):
                    write(rows, self._buffer)
        except DeadlineError:
            # If the pool is stopped, this error is expected, because the rate limiter delayed the
            # rows until the stop.
            if not self._pool.stopped:
                raise
            return None, RolloutStats(self.config.worker_index, 0)
        return None, replace(stats, write_s=stats.write_s + time.perf_counter() - begun)

    def _begin_ahead(self) -> None:
        """Let the env processes begin the next rollout during the current rollout, if the next
        rollout was requested."""
        self._waker.quiet()
        # If an env process was replaced, do not begin the next rollout yet, because the successor
        # of that process must be added first.
        complete = all(process.ready for process in self._pool.processes)
        if complete and len(self._under_way) == 1 and not self._pool.stopped:
            current = self._under_way[0].order
            request = None if current is None else current.request
            order = None if request is None else self._expected.get(request + 1)
            if order is not None:
                self._begin(order)

    def _begin(self, order: _Order) -> _Calls:
        """Request a rollout from all env processes that are ready. The env processes finish earlier
        rollouts first."""
        if order.request is None:
            number = self._unnumbered = self._unnumbered + 1
        else:
            number = order.request
        wanted = [p for p in self._pool.processes if order.num_envs > p.index * self._envs]
        self._pool.welcome(wanted)
        if order.weights is not None:
            self._take_weights(order.weights)
        busy = {index for rollout in self._under_way for index in rollout.pending}
        rollout = _Calls(order, number % _BLOCKS)
        for process in wanted:
            if not process.ready:
                continue
            if process.index not in busy:
                process.seen_at = awake()
            rollout.pending[process.index] = self._pool.send(
                process,
                "collect",
                steps=order.steps,
                num_envs=min(self._envs, order.num_envs - process.index * self._envs),
                request=order.request,
                weights=self._weights.address,
                rows=self._rows_address(process.index, rollout.block),
                anew=order.anew,
                at_random=order.at_random,
            )
        self._under_way.append(rollout)
        return rollout

    def _finish(self, calls: _Calls, until: float = math.inf) -> None:
        """Read and relay messages until every process in ``calls`` has answered or has ended.
        Return at the latest when the clock ``awake()`` reaches ``until``."""
        limit_s, relay = self.config.step_timeout_s, self._relay
        if calls.order is None:
            limit_s = None  # no limit, because processes count steps only in rollouts
        elif limit_s is not None and self.config.replay_buffer is not None:
            limit_s = max(limit_s, _LEAST_LIMIT_S)
        glance_s = _GLANCE_S if limit_s is None else min(_GLANCE_S, limit_s / 4)
        self._begin_ahead()
        flush_s = math.inf
        while calls.pending and (left_s := until - awake()) > 0:
            events = self._selector.select(min(left_s, glance_s, flush_s))
            for key, _ in events:
                if isinstance(key.data, EnvProcess):
                    self._take_answer(key.data)
                else:
                    key.data()
            busy = {index for each in self._under_way for index in each.pending}
            if relay is not None:
                flush_s = relay.flush(most=len(busy))
            for index in busy:
                process = self._pool.processes[index]
                if limit_s is not None and self._pool.hangs(process, limit_s):
                    self._bury(process, f"made no step for {limit_s:g} s")
                elif not events and self._pool.has_ended(process):
                    self._bury(process, "")

    def _finish_all(self, until: float = math.inf) -> None:
        """Wait until all processes are idle, because they answer calls only between rollouts."""
        for rollout in self._under_way:
            self._finish(rollout, until)
        # Also read answers that no call waits for, because a process that is blocked in sending
        # such an answer would not read its next call.
        for key, _ in self._selector.select(0):
            if isinstance(key.data, EnvProcess):
                self._take_answer(key.data)

    def _take_answer(self, process: EnvProcess) -> None:
        try:
            answer = self._pool.receive(process)
        except EOFError as error:
            self._bury(process, str(error))
            return
        calls = next((each for each in self._under_way if process.index in each.pending), None)
        if answer is None or calls is None or answer.number != calls.pending[process.index]:
            # The message was a question to the learner, or an answer for which no call waits any
            # longer.
            return
        del calls.pending[process.index]
        calls.answers[process.index] = answer.content
        if calls.order is not None and not isinstance(answer.content, RemoteError):
            _, stats = answer.content
            process.deaths = 0
            process.numbered = max(process.numbered, stats.numbered)

    def _bury(self, process: EnvProcess, reason: str) -> None:
        """Replace an env process, and continue without this process until its successor is
        ready."""
        for rollout in self._under_way:
            rollout.pending.pop(process.index, None)
        try:
            self._pool.replace(process, reason)
        except PeerLostError as error:
            # The error is raised later, after the other processes have delivered their parts.
            if not self._under_way:
                raise
            first = self._under_way[0]
            first.failure = first.failure or error

    def _rows_address(self, index: int, block: int) -> RowsAddress | None:
        if self._layout is None or self.config.replay_buffer is not None:
            return None
        return RowsAddress(self._blocks[block].path, self._layout, index * self._envs)

    def _join(self, pieces: list[_Piece], steps: int, block: int) -> TensorDict | PackedRows | None:
        """Join the parts of all env processes into one rollout. If the shared block contains all
        rows, the rollout is taken from the block without joining."""
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
            # copy the rows, because the caller may keep them
            return self._views[block][:, :steps].clone()
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

    def stop(self, limit_s: float = CLOSE_S) -> None:
        """End a running rollout after the current steps of the envs. Shortly before ``limit_s``
        seconds have passed, kill the env processes that still run. Any thread may call this method.
        Call ``close`` next."""
        self._pool.words[STOP] = 1
        if self._kill is None:
            self._kill = threading.Timer(_PATIENCE * limit_s, self._pool.kill)
            self._kill.daemon = True
            self._kill.start()

    def close(self, step_limit_s: float = CLOSE_S, close_env: bool = True) -> None:
        """Stop a running rollout after its current steps, close the envs, and end the env
        processes, even processes that hang. Block for about ``step_limit_s`` seconds at most.
        Idempotent.

        Raises:
            RemoteError: an env raised while it was closed. All env processes have ended
                nevertheless.
        """
        if self._closed:
            return
        self.stop(step_limit_s)
        self._closed = True
        until = awake() + _PATIENCE * step_limit_s
        try:
            self._finish_all(until)
            ready = [process for process in self._pool.processes if process.ready]
            answers = self._ask(ready, min(until, awake() + CLOSE_S), "close")
            self._pool.children.wait_gone(max(0.0, until - awake()))
            self._let_go()
        finally:
            self._end()
        _raise_first(answers)

    def _let_go(self) -> None:
        """Release memory and the user's objects now, because the session keeps this worker object
        until the session ends."""
        self._blocks, self._views, self._weights = [], [], SharedWeights()
        self._pool.forget()
        self._buffer = None
        self.config = self.config.without_parts()

    def _end(self) -> None:
        if self._kill is not None:
            self._kill.cancel()
        self._pool.close()
        if self._relay is not None:
            self._relay.close()
        self._selector.close()
        self._waker.close()


def _raise_first(answers: dict[int, Any]) -> None:
    for answer in answers.values():
        if isinstance(answer, RemoteError):
            raise answer
