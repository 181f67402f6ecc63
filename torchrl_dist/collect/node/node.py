"""A worker whose envs run in processes of its node: one message per rollout for all of them.

The processes are forked from a server that has imported everything. They fill one rollout in
shared memory and read the policy's weights there. One that dies, hangs or is paused is killed and
replaced: its part of the rollouts at hand is missing, the other parts are delivered.

Nobody waits for the slowest: where the collector has asked for the next rollout already, a process
begins it when it is done with the one before.
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
    STOPPED_S,
    Hooks,
    RolloutStats,
    Turns,
    WorkerConfig,
    WorkerInfo,
    wait_free,
)
from torchrl_dist.errors import ConfigurationError, DeadlineError, PeerLostError, RemoteError
from torchrl_dist.forks import now_and_in_children
from torchrl_dist.runtime import ForkServer
from torchrl_dist.weights import PackedWeights

# Of rollouts: the collector asks for the one after the next when it has got the one at hand.
_BLOCKS = 2
_GLANCE_S = 1.0  # how often deaths are looked for that no connection tells
# A process that waits for a replay buffer says so every half second.
_LEAST_LIMIT_S = 2.0


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
    at_random: bool


@dataclass(eq=False)
class _UnderWay:
    """A rollout that processes work at, or have done. ``pending``: those who work at it, and the
    numbers of their answers; ``block``: where its rows lie."""

    order: _Order
    block: int
    pending: dict[int, int] = field(default_factory=dict)
    pieces: list[_Piece] = field(default_factory=list)
    failure: RemoteError | PeerLostError | None = None


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
        now_and_in_children(self, NodeWorker._renew)
        self._turns = Turns()
        self._closed = False
        self._weights = SharedWeights()
        self._blocks: list[SharedBlock] = []
        self._views: list[TensorDict] = []
        self._layout: RolloutLayout | None = None
        self._announced: dict[int, _Order] = {}  # by request; of threads that wait for their turn
        self._under_way: list[_UnderWay] = []
        self._unnumbered = 0  # calls of ``collect``
        self._selector = selectors.DefaultSelector()
        self._waker = Waker()  # something was announced
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

    def _renew(self) -> None:
        self._lock = threading.Lock()

    def describe(self) -> WorkerInfo:
        return self._info

    def set_steps(self, steps: int) -> None:
        """As ``RolloutWorker.set_steps``; before the first rollout."""
        self._tell_all("set_steps", steps)
        self.steps = steps
        self.config = replace(self.config, frames_per_rollout=steps * self.num_envs)
        self._pool.job = replace(self._pool.job, config=cloudpickle.dumps(self.config))
        self._note_numbers_at_stake()

    def _note_numbers_at_stake(self) -> None:
        self._pool.numbers_at_stake = _BLOCKS * self._envs * (self.steps + 1)

    def set_weights(self, packed: PackedWeights) -> None:
        """As ``RolloutWorker.set_weights``; one copy for all processes."""
        with self._lock:
            self._finish_all()
            self._take_weights(packed)

    def _take_weights(self, packed: PackedWeights) -> None:
        address = self._weights.address
        if address is None or packed.version >= address.version:
            self._weights.write(packed)

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """As ``RolloutWorker.set_seed``."""
        return self._tell_all("set_seed", seed, static_seed)[0]

    def set_trajectory_base(self, base: int) -> None:
        """As ``RolloutWorker.set_trajectory_base``."""
        self._pool.job = replace(self._pool.job, trajectory_base=base)
        self._tell_all("set_trajectory_base", base)

    def set_hooks(self, hooks: Hooks) -> None:
        """As ``RolloutWorker.set_hooks``; in all processes."""
        self.config = replace(self.config, hooks=hooks)
        self._pool.job = replace(self._pool.job, config=cloudpickle.dumps(self.config))
        self._tell_all("set_hooks", hooks)

    def reset(self, envs: Sequence[int] | None = None) -> list[int]:
        """As ``RolloutWorker.reset``."""
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
            DeadlineError: not all answered within ``config.call_timeout_s``. They go on with it.
        """
        with self._lock:
            until = time.monotonic() + self.config.call_timeout_s
            asked = [p for p in self._pool.processes if only in (None, p.index)]
            answers: dict[int, Any] = {}
            while missing := [p for p in asked if p.index not in answers]:
                if self._pool.stopped:
                    raise ConfigurationError("this worker is closed")
                self._finish_all(until)
                self._pool.welcome(missing, until, all_of_them=True)
                if time.monotonic() >= until:
                    raise DeadlineError(
                        f"{method}: env processes {[process.index for process in missing]} did not "
                        f"answer within {self.config.call_timeout_s:g} s"
                    )
                if all(process.ready for process in missing):  # else it is being closed
                    answers |= self._pool.ask(missing, until, method, *args)
            for answer in answers.values():
                if isinstance(answer, RemoteError):
                    raise answer
            return [answers[process.index] for process in asked]

    def cut(self, request: int, least: int) -> None:
        """As ``RolloutWorker.cut``."""
        self._pool.words[CUT_LEAST] = least  # first: it counts from the next line on
        self._pool.words[CUT_REQUEST] = request

    def collect(
        self,
        steps: int | None = None,
        num_envs: int | None = None,
        weights: PackedWeights | None = None,
        request: int | None = None,
        anew: bool = False,
        at_random: bool = False,
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
            at_random,
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
                if rollout.pieces or self._pool.stopped:
                    break
            pieces = sorted(rollout.pieces, key=lambda piece: piece.index)
            replaced, self._pool.replaced = self._pool.replaced, []
            stats = self._join_stats([piece.stats for piece in pieces], replaced)
            return self._join(pieces, order.steps, rollout.block), stats

    def _announce(self, order: _Order) -> None:
        if order.request is None:
            return
        self._announced[order.request] = order
        self._waker.wake()

    def _begin_ahead(self) -> None:
        """Let the processes go on with the rollout after the one at hand, if it was asked for."""
        self._waker.quiet()
        # Some may be to be welcomed first.
        complete = all(process.ready for process in self._pool.processes)
        if complete and len(self._under_way) == 1 and not self._pool.stopped:
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
        wanted = [p for p in self._pool.processes if order.kept > p.index * self._envs]
        self._pool.welcome(wanted)
        if order.weights is not None:
            self._take_weights(order.weights)
        busy = {index for rollout in self._under_way for index in rollout.pending}
        rollout = _UnderWay(order, number % _BLOCKS)
        for process in wanted:
            if not process.ready:
                continue
            if process.index not in busy:
                process.seen_at = time.monotonic()
            rollout.pending[process.index] = self._pool.send(
                process,
                "collect",
                steps=order.steps,
                num_envs=min(self._envs, order.kept - process.index * self._envs),
                request=order.request,
                weights=self._weights.address,
                rows=self._rows_address(process.index, rollout.block),
                anew=order.anew,
                at_random=order.at_random,
            )
        self._under_way.append(rollout)  # last: of who is interrupted above it is nobody's
        return rollout

    def _finish(self, rollout: _UnderWay, until: float = math.inf) -> None:
        """Read and relay until every process has handed in its part of that rollout, or has
        ended; or until then on ``time.monotonic()``."""
        limit_s, relay = self.config.step_timeout_s, self._relay
        if limit_s is not None and self.config.replay_buffer is not None:
            limit_s = max(limit_s, _LEAST_LIMIT_S)
        glance_s = _GLANCE_S if limit_s is None else min(_GLANCE_S, limit_s / 4)
        self._begin_ahead()
        flush_s = math.inf
        while rollout.pending and (left_s := until - time.monotonic()) > 0:
            wait_s, asked = min(left_s, glance_s, flush_s), time.monotonic()
            events = self._selector.select(wait_s)
            waited_s = time.monotonic() - asked
            if waited_s > wait_s + STOPPED_S:  # and its processes as well, perhaps
                for process in self._pool.processes:
                    process.seen_at += waited_s
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
        """Wait until all processes are idle: a call is answered by them between two rollouts."""
        for rollout in self._under_way:
            self._finish(rollout, until)
        # Answers that nobody waits for: a process that cannot get rid of one would not listen.
        for key, _ in self._selector.select(0):
            if isinstance(key.data, EnvProcess):
                self._take_answer(key.data)

    def _take_answer(self, process: EnvProcess) -> None:
        try:
            answer = self._pool.receive(process)
        except EOFError as error:
            self._bury(process, str(error))
            return
        rollout = next((r for r in self._under_way if process.index in r.pending), None)
        if answer is None or rollout is None:
            return
        if answer.number != rollout.pending[process.index]:
            return  # who asked for it was interrupted
        del rollout.pending[process.index]
        if isinstance(answer.content, RemoteError):
            rollout.failure = rollout.failure or answer.content
            return
        rows, stats = answer.content
        process.deaths = 0
        process.numbered = max(process.numbered, stats.numbered)
        if stats.frames:
            rollout.pieces.append(_Piece(process.index, rows, stats))

    def _bury(self, process: EnvProcess, reason: str) -> None:
        """Go on without a process until its successor is ready."""
        for rollout in self._under_way:
            rollout.pending.pop(process.index, None)
        try:
            self._pool.replace(process, reason)
        except PeerLostError as error:  # raised when the others have handed in
            if not self._under_way:
                raise
            first = self._under_way[0]
            first.failure = first.failure or error

    def _rows_address(self, index: int, block: int) -> RowsAddress | None:
        if self._layout is None or self.config.replay_buffer is not None:
            return None
        return RowsAddress(self._blocks[block].path, self._layout, index * self._envs)

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

    def close(self, step_limit_s: float = CLOSE_S, close_env: bool = True) -> None:
        """Stop a running rollout after its current steps, close the envs, end the processes, also
        those that hang: blocks at most about ``step_limit_s``. Idempotent.

        Raises:
            RemoteError: an env raised as it was closed; everything has ended all the same.
        """
        until = time.monotonic() + step_limit_s
        self._pool.words[STOP] = 1
        self._turns.open()
        idle = self._lock.acquire(timeout=step_limit_s)
        errors: list[RemoteError] = []
        try:
            if self._closed:
                return
            self._closed = True
            if idle:
                self._finish_all(until)
                errors = self._pool.close_envs(min(until, time.monotonic() + CLOSE_S))
                self._let_go()
        finally:
            self._end()
            if idle:
                self._lock.release()
        if errors:
            raise errors[0]

    def _let_go(self) -> None:
        """The session keeps this object until it ends; what it refers to may go."""
        self._blocks, self._views, self._weights = [], [], SharedWeights()
        self._pool.forget()
        self.config = self.config.without_parts()

    def wait_idle(self, timeout_s: float) -> bool:
        """As ``RolloutWorker.wait_idle``."""
        return wait_free(self._lock, timeout_s)

    def _end(self) -> None:
        self._pool.close()
        if self._relay is not None:
            self._relay.close()
        self._selector.close()
        self._waker.close()
