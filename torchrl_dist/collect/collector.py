"""A TorchRL collector whose workers are other processes of the session."""

from __future__ import annotations

import copy
import threading
import time
import warnings
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for_futures
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import nn
from torchrl.collectors import BaseCollector
from torchrl.data import ReplayBuffer
from torchrl.envs.utils import ExplorationType

from torchrl_dist.collect.budget import FrameBudget, Share
from torchrl_dist.collect.handles import Handle, LocalHandle
from torchrl_dist.collect.readiness import Readiness, WaitAll
from torchrl_dist.collect.report import CollectReport, summarize
from torchrl_dist.collect.worker import Postproc, RolloutStats, RolloutWorker, WorkerConfig
from torchrl_dist.errors import ConfigurationError, DeadlineError, PeerLostError
from torchrl_dist.runtime import Peer, Session
from torchrl_dist.weights import PackedWeights, pack

# A rollout has no deadline of its own: the wait for it has one, and what comes after that is kept
# for the next batch. RPC wants a number all the same.
_ROLLOUT_LIMIT_S = 7 * 24 * 3600.0
_SHUTDOWN_S = 10.0
# Trajectory ids of a resumed job start above all that earlier runs can have given out.
_RUN_EPOCH_S = 1_704_067_200  # 2024-01-01
_RUN_SHIFT = 32


@dataclass
class _Worker:
    """The learner's view of one worker. Guarded by the collector's condition."""

    index: int
    name: str
    handle: Handle
    num_envs: int
    steps: int
    max_ahead: int
    in_flight: _Request | None = None
    inbox: deque[tuple[_Request, RolloutStats, TensorDict | None]] = field(default_factory=deque)
    failure: BaseException | None = None
    lost: bool = False
    sent_version: int = -1
    frames: int = 0


@dataclass(frozen=True)
class _Request:
    round: int
    share: Share
    begun: float  # time.monotonic()


class RPCBatchedCollector(BaseCollector):
    """Collects with the workers of a session, T steps of all of a worker's envs per message.

    Iterating yields a TensorDict ``[N, T]`` per batch, joined along the envs, with the keys of
    TorchRL's ``Collector`` and ``"policy_version"``, ``("collector", "worker_index")`` and
    ``("collector", "traj_ids")``, which are unique in the job. With ``replay_buffer`` the workers
    write their rows there themselves, and iterating yields a :class:`CollectReport`. The report of
    the last batch is ``collector.report`` in both cases.

    Args:
        make_env: a gymnasium id, or a callable that returns a ``gymnasium.Env``, a
            ``gymnasium.vector.VectorEnv`` or a TorchRL env. Called on the workers; may be a lambda.
        policy: the learner's module; each worker gets a copy on its CPU, and a new state of it
            after ``update_policy_weights_()``. None (and no factory): random actions.
        session: where the workers live; None: one worker in this process.
        frames_per_batch: frames that a batch is to have. T is this, divided by the rollouts of a
            batch (``WaitAll``: the number of workers, ``FirstReady``: 1) and by the envs of a
            worker, rounded up, with a warning if that makes batches larger.
        total_frames: iteration ends after exactly so many; -1: never. The last batches are shorter.
        policy_factory: ``(worker_index, num_workers) -> policy``, called on each worker instead
            of copying ``policy``. The weights of ``policy``, if that is given, go into the
            worker's module or the part of it that they fit.
        num_envs: envs per worker; a vector env brings its own number.
        workers: peers to use; default ``session.of_role("collector")``, or this process if there
            are none.
        readiness: when a batch is complete: ``WaitAll()`` or ``FirstReady()``.
        max_policy_lag: 0: while the caller has a batch no new rollout begins, so that (with
            ``WaitAll``) all data come from the newest weights. k: meanwhile every worker may
            collect up to k rollouts ahead and then waits; with ``WaitAll`` and one update per
            batch, data are at most k versions old. A worker of the caller's own process never runs
            ahead: TorchRL's exploration type, which it sets, is one per process.
        replay_buffer: pickled to the workers, where ``extend(rows.reshape(-1))`` is called; over a
            ``SharedMemmapStorage``, unless the worker is this process.
        postproc: rollout ``[N, T]`` -> rows, run on the worker.
        postproc_factory: ``policy of the worker -> postproc``, called there once.
        seed: of all envs and of the workers' random numbers; default: drawn from torch's.
        min_workers: with fewer living workers, iteration raises.
        timeout_s: bounds the wait for each batch as a whole, and other calls; default the
            session's, which also bounds building the workers.
        categorical_action_encoding: as in TorchRL's ``GymEnv``; for gymnasium envs.

    Raises:
        ConfigurationError: arguments that cannot work together.
        RemoteError: building a worker failed; carries host and traceback.

    Iterating raises:
        DeadlineError: no batch within ``timeout_s``; names who is waited for. Nothing is lost:
            iterate again to go on.
        RemoteError: an env or the policy raised on a worker; the collector is shut down.
        PeerLostError: fewer than ``min_workers`` are alive; the collector is shut down. Up to that,
            the death of a worker is one warning, ``report.lost_workers``, and smaller batches;
            the frames that it had not delivered are collected by the others.
    """

    def __init__(
        self,
        make_env: str | Callable[[], Any],
        policy: nn.Module | Callable[[TensorDictBase], Any] | None = None,
        *,
        session: Session | None = None,
        frames_per_batch: int,
        total_frames: int = -1,
        policy_factory: Callable[[int, int], nn.Module] | None = None,
        num_envs: int = 1,
        workers: Sequence[Peer] | None = None,
        readiness: Readiness | None = None,
        max_policy_lag: int = 0,
        replay_buffer: Any = None,
        postproc: Postproc | None = None,
        postproc_factory: Callable[[Any], Postproc] | None = None,
        seed: int | None = None,
        exploration_type: ExplorationType = ExplorationType.RANDOM,
        min_workers: int = 1,
        timeout_s: float | None = None,
        categorical_action_encoding: bool = False,
    ) -> None:
        super().__init__()
        self._cond = threading.Condition()
        self._closed = False
        self._waiting = False
        self._workers: list[_Worker] = []
        self._never_started: list[str] = []
        peers = _choose_peers(session, workers)
        num_workers = len(peers) or 1
        _check(
            frames_per_batch=frames_per_batch,
            total_frames=total_frames,
            max_policy_lag=max_policy_lag,
            num_envs=num_envs,
            min_workers=min_workers,
            num_workers=num_workers,
        )
        self.readiness: Readiness = WaitAll() if readiness is None else readiness
        if isinstance(self.readiness, type):
            raise ConfigurationError(f"readiness={readiness.__name__}: pass an instance of it")
        if not isinstance(make_env, str) and not callable(make_env):
            raise ConfigurationError(
                f"make_env is {make_env!r}; expected a gymnasium id or a function that makes the "
                "env on the worker, such as lambda: env_class()"
            )
        if any(session is not None and peer != session.me for peer in peers):
            _require_shared(replay_buffer)
        self.max_policy_lag = max_policy_lag
        self.min_workers = min_workers
        self.timeout_s = timeout_s or (60.0 if session is None else session.timeout_s)
        self.total_frames = total_frames
        self.requested_frames_per_batch = frames_per_batch
        self.replay_buffer = replay_buffer
        self.policy = policy
        self.report = CollectReport()
        self._version = 0
        self._packed: PackedWeights | None = None
        if isinstance(policy, nn.Module):
            initial = pack(policy, 0)  # also refuses a policy that cannot be packed, at once
            self._packed = initial if policy_factory is not None else None
        rollouts = self.readiness.rollouts_per_batch(num_workers)
        config = WorkerConfig(
            make_env,
            policy=None if policy_factory is not None else _cpu_copy(policy),
            policy_factory=policy_factory,
            frames_per_rollout=-(-frames_per_batch // rollouts),
            num_envs=num_envs,
            num_workers=num_workers,
            seed=_draw_seed() if seed is None else seed,
            exploration_type=exploration_type,
            categorical_action_encoding=categorical_action_encoding,
            replay_buffer=replay_buffer,
            postproc=postproc,
            postproc_factory=postproc_factory,
        )
        self._frames = 0
        self._iter = -1  # as TorchRL counts: batches delivered, less one
        self._run = 0
        self._budget = FrameBudget(
            total_frames if total_frames >= 0 else None, self.readiness.in_rounds
        )
        self._arrivals: list[int] = []
        self._start(session, peers, config)
        first = self._workers[0]
        self.frames_per_batch = rollouts * first.num_envs * first.steps
        if self.frames_per_batch > frames_per_batch:
            warnings.warn(
                f"frames_per_batch={frames_per_batch} is no multiple of {rollouts} rollouts x "
                f"{first.num_envs} envs: batches will have {self.frames_per_batch}",
                stacklevel=2,
            )

    # ---- start

    def _start(self, session: Session | None, peers: Sequence[Peer], config: WorkerConfig) -> None:
        limit_s = self.timeout_s if session is None else max(self.timeout_s, session.timeout_s)

        def build(index: int) -> _Worker:
            own = replace(config, worker_index=index)
            if session is None or peers[index] == session.me:
                handle: Handle = LocalHandle(own)
                name, max_ahead = f"worker {index} (this process)", 0
            else:
                own = replace(own, own_process=True)
                handle = session.remote(peers[index], RolloutWorker, own, timeout_s=limit_s)
                name, max_ahead = peers[index].name, self.max_policy_lag
            info = handle.call("describe", timeout_s=limit_s)
            return _Worker(index, name, handle, info.num_envs, info.steps, max_ahead)

        count = len(peers) or 1
        with ThreadPoolExecutor(count) as pool:
            builds = [pool.submit(build, index) for index in range(count)]
        errors: list[BaseException] = []
        for index, building in enumerate(builds):
            error = building.exception()
            if error is None:
                self._workers.append(building.result())
            elif isinstance(error, PeerLostError):
                self._never_started.append(peers[index].name)
                warnings.warn(f"a worker is lost before it began: {error}", stacklevel=3)
            else:
                errors.append(error)
        sizes = {worker.name: worker.num_envs for worker in self._workers}
        if not errors and len(set(sizes.values())) > 1:
            errors.append(
                ConfigurationError(f"make_env gave different numbers of envs on workers: {sizes}")
            )
        if not errors and len(self._workers) < self.min_workers:
            errors.append(
                PeerLostError(
                    f"{len(self._workers)} of {count} workers could be started, "
                    f"min_workers={self.min_workers}"
                )
            )
        if errors:
            self.shutdown()
            raise errors[0]

    # ---- weights

    @property
    def policy_version(self) -> int:
        """Number of calls of ``update_policy_weights_`` so far."""
        return self._version

    def update_policy_weights_(
        self,
        policy_or_weights: nn.Module | TensorDictBase | Mapping[str, Any] | None = None,
        *,
        weights: TensorDictBase | Mapping[str, Any] | None = None,
        policy: nn.Module | None = None,
        **kwargs: Any,
    ) -> None:
        """Pack the weights once; every worker gets them before its next rollout. Does not block.

        Args:
            policy_or_weights: default: the policy given to the collector.

        Raises:
            ConfigurationError: no policy to take weights from, or an option of TorchRL's
                collectors that has no meaning here.
        """
        given = [x for x in (policy_or_weights, weights, policy) if x is not None]
        unsupported = [name for name, value in kwargs.items() if value is not None]
        if len(given) > 1 or unsupported:
            raise ConfigurationError(
                f"expected one source of weights, got {len(given)}; not supported: {unsupported}"
            )
        source = given[0] if given else self.policy
        if not isinstance(source, nn.Module | TensorDictBase | Mapping):
            raise ConfigurationError(
                "no weights to send: pass the learner's module as policy= to the collector "
                f"(also with policy_factory=), or to this call; got {type(source).__name__}"
            )
        packed = pack(source, self._version + 1)
        with self._cond:
            self._version = packed.version
            self._packed = packed

    # ---- iteration

    def __iter__(self) -> Iterator[Any]:
        self._iteration_started = True
        try:
            yield from self.iterator()
        except DeadlineError:
            raise  # the rollouts go on, and so may the caller
        except Exception:
            self.shutdown()
            raise

    def iterator(self) -> Iterator[Any]:
        """The batches that are left; each ``next`` blocks at most ``timeout_s``."""
        while True:
            batch = self._next_batch()
            if batch is None:
                return
            yield batch

    def next(self) -> Any:
        """The next batch, or None after the last."""
        if self._iterator is None:
            self._iterator = iter(self)
        try:
            return next(self._iterator)
        except StopIteration:
            return None
        except DeadlineError:
            self._iterator = None  # a generator that has raised is at its end
            raise

    def _next_batch(self) -> TensorDict | CollectReport | None:
        begun = time.monotonic()
        taken = self._gather(begun)
        if taken is None:
            return None
        self._iter += 1
        self.report = summarize(
            [stats for stats, _ in taken],
            total_frames=self._frames,
            total_frames_by_worker={w.index: w.frames for w in self._workers},
            policy_version=self._version,
            wait_s=time.monotonic() - begun,
            lost_workers=self._never_started + [w.name for w in self._workers if w.lost],
        )
        if self.replay_buffer is not None:
            return self.report
        data = [rows for _, rows in taken if rows is not None]
        return data[0] if len(data) == 1 else torch.cat(data, 0)

    def _gather(self, begun: float) -> list[tuple[RolloutStats, TensorDict | None]] | None:
        """Wait until the readiness rule is content; None when all frames were delivered."""
        with self._cond:
            if self._closed:
                raise ConfigurationError("this collector was shut down; build a new one")
            self._waiting = True
            try:
                while True:
                    for worker in self._workers:
                        self._request(worker)
                    if self._note_failures():
                        continue
                    arrived, expected = self._standing()
                    if not expected:
                        return None
                    waited_s = time.monotonic() - begun
                    chosen = self.readiness.take(arrived, expected, waited_s)
                    if chosen:
                        return self._take(chosen)
                    self._wait(waited_s, set(expected) - set(arrived))
            finally:
                self._waiting = False
                for worker in self._workers:
                    self._request(worker)

    def _wait(self, waited_s: float, missing: set[int]) -> None:
        left_s = self.timeout_s - waited_s
        rule_s = self.readiness.deadline_s
        if rule_s is not None and waited_s < rule_s:
            left_s = min(left_s, rule_s - waited_s)
        if left_s <= 0:
            now = time.monotonic()
            names = ", ".join(
                f"{w.name} (asked for {w.in_flight.share.steps} steps "
                f"{now - w.in_flight.begun:.1f} s ago)"
                for w in self._workers
                if w.index in missing and w.in_flight is not None
            )
            raise DeadlineError(
                f"no batch within {self.timeout_s:g} s; waiting for {names or 'nobody'}. "
                "Iterate again to go on waiting, or raise timeout_s"
            )
        self._cond.wait(left_s)

    def _standing(self) -> tuple[list[int], list[int]]:
        """Workers that have delivered for this batch in order of arrival, and all that shall."""
        if not self.readiness.in_rounds:
            expected = [w.index for w in self._workers if w.inbox or w.in_flight]
            return list(dict.fromkeys(self._arrivals)), expected
        expected = self._budget.expected()
        round_ = self._budget.round
        here = {w.index for w in self._workers if w.inbox and w.inbox[0][0].round == round_}
        arrived = dict.fromkeys(self._arrivals)  # a worker that is ahead is in it several times
        return [index for index in arrived if index in here], expected

    def _take(self, chosen: Sequence[int]) -> list[tuple[RolloutStats, TensorDict | None]]:
        taken = []
        by_index = {w.index: w for w in self._workers}
        for index in chosen:
            worker = by_index[index]
            _, stats, rows = worker.inbox.popleft()
            self._arrivals.remove(index)
            worker.frames += stats.frames
            self._frames += stats.frames
            taken.append((stats, rows))
        if self.readiness.in_rounds:
            self._budget.finish_round()
        return taken

    # ---- requests

    def _request(self, worker: _Worker) -> None:
        """Ask for the next rollout if the policy lag allows; called with the condition held."""
        ahead = worker.max_ahead + (1 if self._waiting else 0)
        if (
            self._closed
            or worker.lost
            or worker.failure is not None
            or worker.in_flight is not None
            or len(worker.inbox) >= ahead
        ):
            return
        alive = {w.index: w.num_envs for w in self._workers if w.failure is None}
        planned = self._budget.next_share(worker.index, alive, worker.steps)
        if planned is None:
            return
        round_, share = planned
        weights = None
        if self._packed is not None and self._packed.version > worker.sent_version:
            weights = self._packed
            worker.sent_version = weights.version
        request = _Request(round_, share, time.monotonic())
        try:
            future = worker.handle.submit(
                "collect",
                steps=share.steps,
                num_envs=share.num_envs,
                weights=weights,
                timeout_s=_ROLLOUT_LIMIT_S,
            )
        except ConfigurationError as error:  # the session is closed; raised at the next batch
            worker.failure = error
            return
        worker.in_flight = request
        future.add_done_callback(partial(self._arrived, worker, request))

    def _arrived(self, worker: _Worker, request: _Request, future: Future) -> None:
        """Called in a thread of the transport when a rollout is here or has failed."""
        with self._cond:
            worker.in_flight = None
            error = future.exception()
            if error is not None:
                worker.failure = error
                if isinstance(error, PeerLostError):
                    self._budget.give_back(worker.index, request.round, request.share)
            else:
                rows, stats = future.result()
                if stats.frames:  # else it was closed meanwhile
                    worker.inbox.append((request, stats, rows))
                    self._arrivals.append(worker.index)
                self._request(worker)
            self._cond.notify_all()

    def _note_failures(self) -> bool:
        """Turn new failures into a warning or an error; whether there were any."""
        failed = [w for w in self._workers if w.failure is not None and not w.lost]
        for worker in failed:
            assert worker.failure is not None
            if not isinstance(worker.failure, PeerLostError):
                raise worker.failure
            worker.lost = True
            left = sum(not w.lost for w in self._workers)
            if left < self.min_workers:
                raise PeerLostError(
                    f"{left} workers are left, min_workers={self.min_workers}; lost: "
                    f"{', '.join(w.name for w in self._workers if w.lost)}"
                ) from worker.failure
            warnings.warn(f"collection goes on with {left} workers: {worker.failure}", stacklevel=6)
        return bool(failed)

    # ---- the rest of TorchRL's interface

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Seed all envs and start new episodes. Env i of the job gets the i-th seed of TorchRL's
        chain, whichever worker it belongs to. Blocks; a rollout in flight ends first.

        Returns:
            the seed after those used.
        """
        answers = self._ask_all("set_seed", seed, static_seed)
        return answers[0]

    def _ask_all(self, method: str, *args: Any) -> list[Any]:
        alive = [w for w in self._workers if not w.lost and w.failure is None]
        futures = [w.handle.submit(method, *args, timeout_s=self.timeout_s) for w in alive]
        results = []
        for future in futures:  # each has the same deadline, from the same instant
            try:
                results.append(future.result(self.timeout_s + 1))
            except PeerLostError:
                continue  # the next request to it reports that
        if len(results) < self.min_workers:
            raise PeerLostError(f"{method}: {len(results)} workers answered")
        return results

    def state_dict(self) -> OrderedDict:
        """Progress, small and plain. Envs start anew on loading; weights are the caller's."""
        return OrderedDict(
            frames=self._frames, batches=self._iter + 1, policy_version=self._version, run=self._run
        )

    def load_state_dict(self, state_dict: Mapping[str, int]) -> None:
        """Go on counting where a saved collector stopped. Load the policy's own weights first:
        they are sent from here on.

        Trajectories get new ids, above those of all earlier runs.

        Raises:
            ConfigurationError: this collector has been iterated already.
        """
        with self._cond:
            if self._budget.begun:
                raise ConfigurationError("load_state_dict comes before the first batch")
            self._frames = int(state_dict["frames"])
            self._iter = int(state_dict["batches"]) - 1
            self._version = int(state_dict["policy_version"])
            self._run = max(int(state_dict["run"]) + 1, int(time.time()) - _RUN_EPOCH_S)
            if self.total_frames >= 0:
                self._budget.remaining = max(0, self.total_frames - self._frames)
            if isinstance(self.policy, nn.Module):
                self._packed = pack(self.policy, self._version)
        self._ask_all("set_trajectory_base", self._run << _RUN_SHIFT)

    def shutdown(
        self,
        timeout: float | None = None,
        close_env: bool = True,
        raise_on_error: bool = True,
    ) -> None:
        """Stop the rollouts in flight after their current step and close all envs. Idempotent;
        blocks at most ``timeout`` seconds (default 10), dead or stuck workers or not."""
        with self._cond:
            if self._closed:
                return
            self._closed = True
            alive = [w for w in self._workers if not isinstance(w.failure, PeerLostError)]
            self._cond.notify_all()
        limit_s = _SHUTDOWN_S if timeout is None else timeout
        futures: list[Future] = []
        for worker in alive:
            try:
                futures.append(
                    worker.handle.submit("close", step_limit_s=limit_s, timeout_s=limit_s)
                )
            except ConfigurationError:
                return  # the session has ended, and its processes with it
        wait_for_futures(futures, limit_s)
        with self._cond:
            for worker in self._workers:
                worker.inbox.clear()

    def __enter__(self) -> RPCBatchedCollector:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.shutdown()

    def __repr__(self) -> str:
        alive = sum(not w.lost for w in self._workers)
        return (
            f"{type(self).__name__}(workers={alive}, frames_per_batch={self.frames_per_batch}, "
            f"readiness={self.readiness}, max_policy_lag={self.max_policy_lag})"
        )


def _choose_peers(session: Session | None, workers: Sequence[Peer] | None) -> tuple[Peer, ...]:
    if workers is not None:
        if session is None or not workers:
            raise ConfigurationError("workers= needs a session and at least one peer")
        return tuple(workers)
    if session is None:
        return ()
    return session.of_role("collector") or (session.me,)


def _require_shared(replay_buffer: Any) -> None:
    """Refuse a buffer of which each worker would fill a copy of its own."""
    if not isinstance(replay_buffer, ReplayBuffer):
        return  # None, or an object of the user's that knows how to travel
    storage = replay_buffer.storage
    if not getattr(storage, "attaches_when_pickled", False):
        raise ConfigurationError(
            f"replay_buffer: its {type(storage).__name__} belongs to this process, and the workers "
            "would write to copies that nobody reads; build it with SharedMemmapStorage and "
            "SharedCursorWriter"
        )


def _check(
    *,
    frames_per_batch: int,
    total_frames: int,
    max_policy_lag: int,
    num_envs: int,
    min_workers: int,
    num_workers: int,
) -> None:
    whole = {"frames_per_batch": frames_per_batch, "total_frames": total_frames}
    whole |= {"num_envs": num_envs, "max_policy_lag": max_policy_lag, "min_workers": min_workers}
    for name, value in whole.items():
        if not isinstance(value, int):
            raise ConfigurationError(f"{name}={value!r}: expected a whole number")
    if frames_per_batch < 1 or num_envs < 1:
        raise ConfigurationError(
            f"expected at least 1: frames_per_batch={frames_per_batch}, num_envs={num_envs}"
        )
    if total_frames < 1 and total_frames != -1:
        raise ConfigurationError(f"total_frames={total_frames}: expected -1 or at least 1")
    if max_policy_lag < 0:
        raise ConfigurationError(f"max_policy_lag={max_policy_lag}: expected 0 or more")
    if not 1 <= min_workers <= num_workers:
        raise ConfigurationError(
            f"min_workers={min_workers}: expected 1 to {num_workers}, the number of workers"
        )


def _cpu_copy(policy: Any) -> Any:
    """The workers' own policy: the learner may go on changing, and moving, its module."""
    return copy.deepcopy(policy).to("cpu") if isinstance(policy, nn.Module) else policy


def _draw_seed() -> int:
    return int(torch.randint(2**31, (1,)).item())
