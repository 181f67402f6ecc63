"""Manage the learner's workers: request rollouts, take deliveries, and handle lost workers.

If the policy lag allows it, a worker has two requests at a time. With only one request, the worker
would idle while its answer and the next request are in transit. Answers arrive in threads of the
transport. One condition guards all state, and the caller of :meth:`Crew.gather` waits on this
condition.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for_futures
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from tensordict import TensorDict

from torchrl_dist.collect.learner.budget import FrameBudget, Share
from torchrl_dist.collect.learner.handles import CallersHandle, Handle
from torchrl_dist.collect.learner.readiness import Readiness
from torchrl_dist.collect.loop.exploration import held_up
from torchrl_dist.collect.worker.shared_block import PackedRows
from torchrl_dist.collect.worker.worker import RolloutStats
from torchrl_dist.errors import (
    ConfigurationError,
    DeadlineError,
    PeerLostError,
    RemoteError,
)
from torchrl_dist.forks import now_and_in_children
from torchrl_dist.runtime.awake import awake, result_of, start_clock
from torchrl_dist.weights import PackedWeights

Delivery = tuple[RolloutStats, TensorDict | None]

# RPC requires a deadline for each call. The deadline of a call for a rollout is longer than any
# rollout, because only the wait for a batch should end at a deadline. A rollout that arrives after
# this wait is kept for the next batch.
_ROLLOUT_LIMIT_S = 7 * 24 * 3600.0
_MAX_IN_FLIGHT = 2
_GLANCE_S = 0.25  # interval at which waits check for a stop, because signals do not wake them
_BUILD_S = 120.0  # limit in seconds for building or closing a successor
_WARN_AT_CALLER = 7  # stack frames from a warning here to the loop over the collector


@dataclass(frozen=True)
class RolloutRequest:
    number: int  # numbers of a worker's requests are consecutive, from 0
    round: int
    share: Share
    begun: float  # time of the request, by the clock awake()


Arrival = tuple[RolloutRequest, RolloutStats, TensorDict | None]


@dataclass
class Worker:
    """The crew's record of one worker. The crew's condition guards all attributes."""

    index: int
    name: str
    handle: Handle
    num_envs: int
    steps: int
    max_ahead: int
    specs: dict[str, str]
    ragged: bool = False  # whether shapes may differ between the worker's rows
    in_flight: list[RolloutRequest] = field(default_factory=list)
    requests: int = 0
    settled: int = 0  # all requests with smaller numbers are answered or given up
    # Answers that arrived before answers to earlier requests, by request number. None stands for an
    # answer without rows.
    overtook: dict[int, Arrival | None] = field(default_factory=dict)
    cut_through: int = -1  # requests up to this number were told to end early
    inbox: deque[Arrival] = field(default_factory=deque)
    busy_since: float = 0.0  # when the first request in flight began, by the clock awake()
    given_up: int = 0  # requests in flight whose answers will be dropped
    callers: CallersHandle | None = None  # set if the caller's thread steps the envs
    has_gap: bool = False  # rows were dropped, so the worker must begin new episodes
    failure: BaseException | None = None
    lost: bool = False
    weights: PackedWeights | None = None  # the newest weights for this worker
    has_newest: bool = True  # whether ``weights`` were sent to the worker
    frames: int = 0


def _is_busy(worker: Worker) -> bool:
    """Whether the worker is stepping envs. A worker in the caller's thread pauses when a batch's
    deadline has passed, and is then not busy."""
    return bool(worker.in_flight) and (worker.callers is None or worker.callers.running)


class Successors(Protocol):
    """See :class:`torchrl_dist.collect.learner.start.Replacer`."""

    def may_replace(self, lost: Worker) -> bool: ...

    def replace(self, lost: Worker, limit_s: float) -> Worker: ...


@dataclass(eq=False, repr=False)
class Crew:
    """Request as many rollouts as the policy lag allows, and gather the rollouts of a batch.

    Args:
        workers: the workers, at least one.
        names_of_unstarted: names of the workers that were lost before their first rollout.
        min_workers: ``gather`` raises PeerLostError if fewer workers than this are alive.
        worker_timeout_s: limit of a rollout's duration, in seconds. A worker whose rollout takes
            longer counts as lost until it answers.
        replacer: builds successors of workers that died.
        random_frames: a rollout uses random actions if fewer frames than this number were requested
            before this rollout.
        stopped: returns True once no more batches are wanted; ``gather`` then returns None.
    """

    workers: list[Worker]
    names_of_unstarted: list[str]
    budget: FrameBudget
    readiness: Readiness
    min_workers: int
    worker_timeout_s: float | None = None
    random_frames: int = 0
    stopped: Callable[[], bool] | None = None
    replacer: Successors | None = None

    def __post_init__(self) -> None:
        self._by_index = {worker.index: worker for worker in self.workers}
        self._arrivals: list[int] = []
        self._replacing = self._paused = 0
        self._names_of_replaced: list[str] = []
        self._waiting = self.is_closed = False
        self._pid = os.getpid()
        start_clock()
        now_and_in_children(self, Crew._renew)

    def _renew(self) -> None:
        self._cond = threading.Condition()
        self.is_closed = self.is_closed or not self.is_here

    @property
    def lost(self) -> list[str]:
        """Names of the workers that have died so far."""
        lost = [w.name for w in self.workers if w.lost]
        return self.names_of_unstarted + self._names_of_replaced + lost

    @property
    def alive(self) -> int:
        return sum(not worker.lost for worker in self.workers)

    @property
    def frames(self) -> dict[int, int]:
        """Number of frames in all batches so far, by worker index."""
        return {worker.index: worker.frames for worker in self.workers}

    def send_weights(self, by_worker: Mapping[int, PackedWeights]) -> None:
        """Store weights by worker index. Each worker gets its weights with its next request.

        The weights must be complete, because a worker may never have received the previous weights.
        """
        with self._cond:
            for worker in self.workers:
                if worker.index in by_worker:
                    worker.weights, worker.has_newest = by_worker[worker.index], False

    # ---- a batch

    def gather(self, timeout_s: float) -> list[Delivery] | None:
        """Wait until the readiness rule accepts a batch. Return None if all frames were delivered
        or the job was told to stop.

        Raises:
            DeadlineError: no batch was complete within ``timeout_s`` seconds. Call again to
                continue waiting.
            PeerLostError: fewer than ``min_workers`` workers are alive.
            RemoteError: a worker raised an exception.
        """
        begun = awake()
        for worker in self.workers:
            if worker.callers is not None:
                worker.callers.require_thread("iterating")
        with self._cond:
            self._waiting = True
            try:
                while True:
                    if self.stopped is not None and self.stopped():
                        return None
                    self.require_open()
                    for worker in self.workers:
                        self._request(worker)
                    self._give_up_hanging()
                    if self._note_failures():
                        continue
                    arrived, expected = self._standing()
                    if not expected and not self._replacing:
                        return None
                    waited_s = awake() - begun
                    chosen = expected and self.readiness.take(arrived, expected, waited_s)
                    if chosen:
                        return self._take(chosen)
                    missing = set(expected) - set(arrived)
                    self._cut_short(self.readiness.least_part(arrived, expected), missing)
                    self._wait(waited_s, timeout_s, missing)
            finally:
                self._waiting = False
                for worker in self.workers:
                    self._request(worker)

    def _wait(self, waited_s: float, timeout_s: float, missing: set[int]) -> None:
        left_s = timeout_s - waited_s
        rule_s = self.readiness.deadline_s
        if rule_s is not None and waited_s < rule_s:
            left_s = min(left_s, rule_s - waited_s)
        if self.worker_timeout_s is not None and left_s > 0:
            since = min((w.busy_since for w in self.workers if w.in_flight), default=None)
            if since is not None:
                hangs_in_s = since + self.worker_timeout_s - awake()
                left_s = min(left_s, max(0.001, hangs_in_s))
        if left_s <= 0:
            now = awake()
            names = ", ".join(
                f"{w.name} (asked for {w.in_flight[0].share.steps} steps "
                f"{now - w.in_flight[0].begun:.1f} s ago)"
                for w in self.workers
                if w.index in missing and w.in_flight
            )
            if self._replacing:
                names += f"{', ' * bool(names)}{self._replacing} workers that are being replaced"
            if others := held_up():  # policy calls in this process that make other calls wait
                names += f" (held up by {others})"
            raise DeadlineError(
                f"no batch within {timeout_s:g} s; waiting for {names or 'no worker'}. Iterate "
                "again to continue waiting, or raise timeout_s= of the collector"
            )
        for worker in self.workers:
            if worker.callers is not None and worker.callers.asked and not self._paused:
                self._work(worker.callers, awake() + left_s)
                return
        if self.stopped is not None:
            left_s = min(left_s, _GLANCE_S)
        self._cond.wait(left_s)

    def _work(self, own: CallersHandle, until: float) -> None:
        """Make a rollout in the calling thread. The caller must hold the condition, which is
        released during the rollout."""
        own.running = True  # set while the condition is held, so that other threads see the change
        self._cond.release()
        try:
            own.work(until)
        except BaseException as error:  # usually Ctrl-C
            self._waiting = False
            own.drop(error)
            raise
        finally:
            own.running = False
            self._cond.acquire()
            self._cond.notify_all()

    def _standing(self) -> tuple[list[int], list[int]]:
        """Return two lists: the workers that have delivered for this batch, in order of arrival,
        and all workers that are expected to deliver."""
        if not self.readiness.in_rounds:
            expected = [w.index for w in self.workers if w.inbox or w.in_flight]
            return list(dict.fromkeys(self._arrivals)), expected
        expected = self.budget.expected()
        round_ = self.budget.round
        here = {w.index for w in self.workers if w.inbox and w.inbox[0][0].round == round_}
        # _arrivals may contain a worker several times if the worker collects ahead.
        arrived = dict.fromkeys(self._arrivals)
        return [index for index in arrived if index in here], expected

    def _take(self, chosen: Sequence[int]) -> list[Delivery]:
        taken = []
        ready = [self._by_index[index] for index in chosen]
        if not self.readiness.in_rounds:  # only rollouts of equal length can be joined
            steps = ready[0].inbox[0][0].share.steps
            ready = [w for w in ready if w.inbox[0][0].share.steps == steps]
        for worker in ready:
            _, stats, rows = worker.inbox.popleft()
            self._arrivals.remove(worker.index)
            worker.frames += stats.frames
            taken.append((stats, rows))
        if self.readiness.in_rounds:
            self.budget.finish_round()
        return taken

    def _cut_short(self, least_part: float | None, missing: set[int]) -> None:
        """Tell the workers ``missing`` to stop after ``least_part`` of the rollout, or immediately
        if they are already past that part."""
        if least_part is None:
            return
        for worker in self.workers:
            if worker.index not in missing or not worker.in_flight:
                continue
            request = worker.in_flight[0]
            if request.number > worker.cut_through:
                worker.cut_through = request.number
                least = math.ceil(least_part * request.share.steps)
                worker.handle.submit("cut", request.number, least)

    def _give_up_hanging(self) -> None:
        """Treat workers whose rollout takes too long as lost, and return the shares of these
        workers to the budget."""
        limit_s = self.worker_timeout_s
        if limit_s is None:
            return
        for worker in self.workers:
            if worker.in_flight and awake() - worker.busy_since > limit_s:
                worker.failure = PeerLostError(
                    f"{worker.name} delivered no rollout within worker_timeout_s={limit_s:g} s; if "
                    "its environments are only slow, raise worker_timeout_s"
                )
                worker.given_up += len(worker.in_flight)
                for request in worker.in_flight:
                    self.budget.give_back(worker.index, request.round, request.share)
                    worker.overtook[request.number] = None
                worker.in_flight.clear()
                self._settle(worker)

    # ---- requests

    def _request(self, worker: Worker) -> None:
        """Request as many rollouts from a worker as the policy lag allows. The caller must hold the
        condition."""
        ahead = worker.max_ahead + (1 if self._waiting else 0)
        while (
            not self.is_closed
            and not self._paused
            and not worker.lost
            and worker.failure is None
            and len(worker.in_flight) < _MAX_IN_FLIGHT
            and len(worker.in_flight) + len(worker.overtook) + len(worker.inbox) < ahead
            and self._send_request(worker)
        ):
            pass

    def _send_request(self, worker: Worker) -> bool:
        alive = {w.index: w.num_envs for w in self.workers if w.failure is None}
        planned = self.budget.next_share(worker.index, alive, worker.steps)
        if planned is None:
            return False
        round_, share = planned
        weights = None if worker.has_newest else worker.weights
        worker.has_newest = True
        request = RolloutRequest(worker.requests, round_, share, awake())
        try:
            future = worker.handle.submit(
                "collect",
                steps=share.steps,
                num_envs=share.num_envs,
                weights=weights,
                request=request.number,
                anew=worker.has_gap,
                at_random=self.budget.frames_before(round_, share) < self.random_frames,
                timeout_s=_ROLLOUT_LIMIT_S,
            )
        except ConfigurationError as error:  # gather() raises this error
            worker.failure = error
            return False
        worker.requests += 1
        worker.has_gap = False
        if not worker.in_flight:
            worker.busy_since = request.begun
        worker.in_flight.append(request)
        future.add_done_callback(partial(self._arrived, worker, request))
        return True

    def _arrived(self, worker: Worker, request: RolloutRequest, future: Future) -> None:
        """Take the rollout that a request returned, or the error that it raised. Threads of the
        transport call this method."""
        with self._cond:
            error = future.exception()
            if request not in worker.in_flight:
                self._arrived_late(worker, error)
                return
            worker.in_flight.remove(request)
            worker.busy_since = awake()
            worker.overtook[request.number] = None
            if error is not None and not isinstance(error, Exception) and worker.callers:
                # The rollout was interrupted, and the interruption was raised in the caller.
                worker.has_gap = True
                self.budget.give_back(worker.index, request.round, request.share)
            elif error is not None:
                worker.failure = error
                if isinstance(error, PeerLostError):
                    self.budget.give_back(worker.index, request.round, request.share)
            else:
                rows, stats = future.result()
                if isinstance(rows, PackedRows):
                    rows = rows.unpack()
                if stats.frames:  # 0 frames mean that the worker was closed
                    worker.overtook[request.number] = (request, stats, rows)
                    self.budget.return_frames(request.share.frames - stats.frames)
            self._settle(worker)
            self._request(worker)
            self._cond.notify_all()

    def _arrived_late(self, worker: Worker, error: BaseException | None) -> None:
        """Drop the answer to a request that was given up, because other workers collect the frames
        of that request. After the last such answer, the worker is no longer lost."""
        worker.given_up -= 1
        worker.has_gap = True
        if error is not None:
            worker.failure = error
            worker.lost = isinstance(error, PeerLostError)  # _note_failures raises any other error
        elif worker.given_up == 0:
            worker.failure, worker.lost = None, False
        self._cond.notify_all()

    def _settle(self, worker: Worker) -> None:
        """Move answers to the inbox in the order of their requests."""
        while worker.settled in worker.overtook:
            arrival = worker.overtook.pop(worker.settled)
            worker.settled += 1
            if arrival is not None:
                worker.inbox.append(arrival)
                self._arrivals.append(worker.index)

    def _note_failures(self) -> bool:
        """Warn about newly lost workers, and raise other new errors. Return whether workers were
        newly lost."""
        failed = [w for w in self.workers if w.failure is not None and not w.lost]
        for worker in failed:
            assert worker.failure is not None
            if not isinstance(worker.failure, PeerLostError):
                raise worker.failure
            worker.lost = True
            replaced = self._replace(worker)
            left = sum(not w.lost for w in self.workers)
            if left + self._replacing < self.min_workers:
                raise PeerLostError(
                    f"only {left} workers are left; expected at least "
                    f"min_workers={self.min_workers}. Lost workers: "
                    f"{', '.join(w.name for w in self.workers if w.lost)}. See the output of the "
                    "lost workers, or lower min_workers"
                ) from worker.failure
            warnings.warn(
                f"{worker.failure}; collecting continues with {left} "
                f"workers{', and a successor is built' * replaced}",
                stacklevel=_WARN_AT_CALLER,
            )
        return bool(failed)

    def _replace(self, lost: Worker) -> bool:
        """Start to build a successor, and return whether a successor may be built. The caller must
        hold the condition."""
        # A worker whose requests were given up needs no successor, because it may still answer.
        if self.replacer is None or lost.given_up or not self.replacer.may_replace(lost):
            return False
        self._replacing += 1
        build = threading.Thread(
            target=self._build_successor, args=(lost,), name="torchrl_dist-replace", daemon=True
        )
        build.start()
        return True

    def _build_successor(self, lost: Worker) -> None:
        assert self.replacer is not None
        new, error = None, None
        try:
            new = self.replacer.replace(lost, _BUILD_S)
        except Exception as e:  # gather() raises this error
            error = e
        with self._cond:
            self._replacing -= 1
            if new is not None and not self.is_closed:
                new.inbox, new.frames = lost.inbox, lost.frames
                new.weights, new.has_newest = lost.weights, False
                self._names_of_replaced.append(lost.name)
                self.workers[self.workers.index(lost)] = self._by_index[lost.index] = new
                new = None
                if self._waiting:
                    self._request(self._by_index[lost.index])
            elif error is not None:
                lost.failure, lost.lost = error, False  # _note_failures handles the error
            self._cond.notify_all()
        if new is not None:  # the crew was closed meanwhile
            new.handle.submit("close", step_limit_s=_BUILD_S, timeout_s=_BUILD_S)

    # ---- all workers together

    @contextlib.contextmanager
    def idle(self, timeout_s: float) -> Iterator[None]:
        """Wait until no rollout is under way. No rollout begins inside the ``with`` block. Rollouts
        that have arrived are kept.

        Raises:
            DeadlineError: rollouts did not end within ``timeout_s``.
        """
        with self._cond:
            self._paused += 1
        try:
            with self._cond:
                busy = [w for w in self.workers if not w.lost]
                if not self._cond.wait_for(lambda: not any(map(_is_busy, busy)), timeout_s):
                    names = ", ".join(w.name for w in busy if _is_busy(w))
                    raise DeadlineError(
                        f"the rollouts of {names} did not end within {timeout_s:g} s; try again "
                        "later, or raise timeout_s= of the collector"
                    )
            yield
        finally:
            with self._cond:
                self._paused -= 1
                for worker in self.workers if not self.is_closed else ():
                    self._request(worker)

    def ask_all(self, method: str, *args: Any, timeout_s: float) -> list[Any]:
        """Call a method of every living worker, and block until all results have arrived or their
        common deadline has passed."""
        self.require_open()
        alive = [w for w in self.workers if not w.lost and w.failure is None]
        futures = [w.handle.submit(method, *args, timeout_s=timeout_s) for w in alive]
        results = []
        for future in futures:
            try:
                results.append(result_of(future, timeout_s + 1))
            except PeerLostError:
                continue  # the next request to this worker reports the loss
        if len(results) < self.min_workers:
            raise PeerLostError(
                f"{method}: only {len(results)} workers answered; expected at least "
                f"min_workers={self.min_workers}. See the output of the lost workers, or lower "
                "min_workers"
            )
        return results

    def move_to_own_thread(self) -> None:
        """If the caller's thread steps envs, let a separate thread step and close these envs from
        now on.

        Raises:
            ConfigurationError: the calling thread is not the thread that steps the envs, or a
                rollout is not complete.
        """
        for worker in self.workers:
            if worker.callers is not None:
                worker.handle, worker.callers = worker.callers.moved(worker.requests), None

    @property
    def in_callers_thread(self) -> bool:
        """Whether the thread that built the collector also steps the envs."""
        return any(worker.callers is not None for worker in self.workers)

    @property
    def is_here(self) -> bool:
        """Whether this process built the collector. False in a forked child."""
        return os.getpid() == self._pid

    def require_here(self) -> None:
        if not self.is_here:
            raise ConfigurationError(
                f"process {os.getpid()} was forked from process {self._pid}, which built this "
                f"collector; the envs and workers stay in process {self._pid}. Build another "
                "collector in this process, or send batches to this process"
            )

    def require_open(self) -> None:
        self.require_here()
        if self.is_closed:
            raise ConfigurationError("this collector was shut down; build a new collector")

    def close(self, limit_s: float, close_env: bool = True) -> list[RemoteError]:
        """Stop the rollouts in flight and, with ``close_env``, close all envs. Block at most
        ``limit_s`` seconds. Idempotent.

        Returns:
            the errors that envs raised while they were closed.

        Raises:
            ConfigurationError: only another thread may close the envs, and that thread makes no
                rollout now.
        """
        for worker in self.workers if not self.is_closed else ():
            if worker.callers is not None:
                worker.callers.require_closable()
        with self._cond:
            if self.is_closed:
                return []
            self.is_closed = True
            alive = [w for w in self.workers if not isinstance(w.failure, PeerLostError)]
            self._cond.notify_all()
        futures: list[Future] = []
        for worker in alive:
            try:
                futures.append(
                    worker.handle.submit(
                        "close", step_limit_s=limit_s, close_env=close_env, timeout_s=limit_s
                    )
                )
            except ConfigurationError:
                return []  # the session and its processes have ended
        wait_for_futures(futures, limit_s)
        with self._cond:
            for worker in self.workers:
                worker.inbox.clear()
        errors = [future.exception() for future in futures if future.done()]
        return [
            error
            for error in errors
            if isinstance(error, RemoteError) and not isinstance(error.__cause__, DeadlineError)
        ]
