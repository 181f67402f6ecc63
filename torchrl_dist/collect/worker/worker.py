"""A worker has envs and a policy. It returns its rollouts, or writes them to a replay buffer.

A worker is a plain local object. The collector calls the worker through a handle, in the same or
another process.
"""

from __future__ import annotations

import math
import os
import random
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any, TypeVar

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torch import nn
from torch.nn.parameter import is_lazy
from torchrl._utils import seed_generator
from torchrl.envs.utils import ExplorationType

from torchrl_dist.collect.loop.access import visit
from torchrl_dist.collect.loop.groups import Inference, make_grouped_rollout
from torchrl_dist.collect.loop.joining import (
    ends_of,
    rewards_of,
    set_truncated,
    size_bytes,
    truncate_last,
    without_next_observations,
)
from torchrl_dist.collect.loop.policies import Compilation
from torchrl_dist.collect.loop.rollout import (
    Episodes,
    Rollout,
    RolloutStopped,
    TorchRLRollout,
    make_rollout,
    nested,
    never,
)
from torchrl_dist.collect.loop.time_limit import make_limited
from torchrl_dist.collect.loop.trajectories import TrajectoryAssembler
from torchrl_dist.collect.worker.registrations import Registrations
from torchrl_dist.collect.worker.shared_block import PackedRows, packable
from torchrl_dist.errors import ConfigurationError, DeadlineError
from torchrl_dist.forks import renewed
from torchrl_dist.runtime.awake import awake
from torchrl_dist.stopping import giving_up_when
from torchrl_dist.weights import PackedWeights, unpack

Postproc = Callable[[TensorDictBase], TensorDictBase]
_Options = TypeVar("_Options", bound="WorkerOptions")
Hooks = tuple[Callable[[], Any] | None, Callable[[TensorDictBase], Any] | None]

# To measure the duration of a step, a worker steps its envs for about _MEASURED_S seconds, in
# rollouts of at most _MOST_MEASURED steps.
_MEASURED_S = 0.02
_MOST_MEASURED = 64


@dataclass(frozen=True, kw_only=True)
class WorkerOptions:
    """The arguments that a collector passes to its workers unchanged.

    Attributes:
        replay_buffer: if given, ``collect`` writes rollouts into this buffer instead of returning
            rows.
        postproc: a function that converts a rollout ``[N, T]`` to rows.
            ``postproc_factory(policy)`` makes such a function on the worker.
        env_processes: 0, or the number of processes in which the worker's envs run.
        step_timeout_s: the longest time without a step, in seconds. An env process that makes no
            step for longer is replaced.
        compilation: how the policy is compiled.
        reset_at_each_iter, set_truncated, track_traj_ids, compact_obs: as in TorchRL's collectors.
        max_frames_per_traj: as in TorchRL's collectors; 0 means no limit.
        hooks: two functions, each of which may be None. The worker calls the first function before
            each rollout, and the second function after each rollout, with the rollout's rows.
    """

    num_workers: int = 1
    num_envs: int = 1
    env_processes: int = 0
    step_timeout_s: float | None = None
    exploration_type: ExplorationType = ExplorationType.RANDOM
    categorical_action_encoding: bool = False
    replay_buffer: Any = None
    postproc: Postproc | None = None
    postproc_factory: Callable[[Any], Postproc] | None = None
    compilation: Compilation = field(default_factory=Compilation)
    reset_at_each_iter: bool = False
    max_frames_per_traj: int = 0
    set_truncated: bool = False
    track_traj_ids: bool = True
    compact_obs: bool = False
    hooks: Hooks = (None, None)

    def _without(self: _Options, **parts: Any) -> _Options:
        """Return a copy of the options without the user's objects, and with ``parts`` replaced."""
        none = {"postproc": None, "postproc_factory": None, "hooks": (None, None)}
        return replace(self, **(none | parts))


@dataclass(frozen=True)
class WorkerConfig(WorkerOptions):
    """All data from which a worker is built. Configs are sent by cloudpickle, so callables may be
    lambdas.

    Attributes:
        policy: the policy that the worker calls, without a copy. If there is neither a policy nor a
            factory, actions are random.
        policy_factory: ``(worker_index, num_workers) -> module``, called on the worker.
        frames_per_rollout: T is this number divided by the number of envs, rounded up. If the
            number is None, ``describe`` measures the duration of a step, and T is 1 until
            ``set_steps`` is called.
        seed: the job's seed. The envs of all workers get consecutive seeds from TorchRL's chain of
            seeds.
        seed_given: whether the user gave the seed. If so, a worker whose envs cannot be seeded one
            by one raises an error.
        keep_env_seeds: whether TorchRL envs keep the seeds that ``make_env`` gave them.
        own_process: whether the process belongs to the worker alone, so that the worker may seed
            the global random generators.
        packed: whether rows are returned as ``PackedRows``, because they will be sent to another
            process.
        call_timeout_s: the longest time of a call to env processes between rollouts, in seconds.
            Env processes must start within this time or two minutes, whichever is longer.
        inference: how the worker gets actions if the policy stays at the learner, else None.
        stamp_version: if None, rows contain the version of the policy that made the rows. If True,
            rows also contain this version under ``"next"``, as in TorchRL. If False, rows contain
            no version.
        place: the index of this collector among the collectors of the job, and how many collectors
            the job has.
        whole_trajectories: whether the worker writes only complete trajectories to the replay
            buffer, one after another.
        shown_index: the index that rows and statistics contain. In an env process, it is the index
            of the node worker. None means ``worker_index``.
        registrations: gymnasium environments to register in the worker's process.
    """

    make_env: str | Callable[[], Any]
    policy: Callable[[TensorDictBase], Any] | None = None
    policy_factory: Callable[[int, int], nn.Module] | None = None
    frames_per_rollout: int | None = 1
    worker_index: int = 0
    seed: int | None = None
    keep_env_seeds: bool = False
    seed_given: bool = False
    own_process: bool = False
    packed: bool = False
    call_timeout_s: float = 60.0
    shown_index: int | None = None
    inference: Inference | None = None
    registrations: Registrations = field(default_factory=dict)
    stamp_version: bool | None = None
    place: tuple[int, int] = (0, 1)
    whole_trajectories: bool = False

    def without_parts(self) -> WorkerConfig:
        """Return the config without user objects, for a closed worker."""
        return self._without(make_env="", policy=None, policy_factory=None, replay_buffer=None)


@dataclass(frozen=True)
class WorkerInfo:
    """The data about a worker that the collector needs before the first rollout.

    Attributes:
        processes: number of processes that step envs.
        cores: number of cores that these processes may use.
        step_s, step_bytes: duration in seconds and size in bytes of a step of all envs, measured if
            the config leaves T open.
        ragged: whether shapes may differ between rows.
    """

    num_envs: int
    steps: int
    host: str
    pid: int
    specs: dict[str, str]
    processes: int = 1
    cores: int = field(default_factory=lambda: len(os.sched_getaffinity(0)))
    step_s: float = 0.0
    step_bytes: float = 0.0
    ragged: bool = False


@dataclass(frozen=True)
class RolloutStats:
    """The statistics of one rollout whose rows are either sent or written to a replay buffer.

    Attributes:
        frames: number of env steps in the rollout (0 if the worker was closed during the rollout).
        oldest_version, newest_version: the smallest and the largest version of the policy that made
            transitions of the rollout.
        collect_s, write_s: the seconds that stepping took, and the seconds that postproc and
            writing took.
        data_bytes: size of the rollout's rows, in bytes.
        num_envs: number of envs that made the steps.
        numbered: the number of trajectory ids that the worker has used since it was built.
        replaced: for each env process whose part of the rollout is missing, a text that says how
            the process ended.
    """

    worker_index: int
    frames: int
    oldest_version: int = 0
    newest_version: int = 0
    episode_returns: list[float] = field(default_factory=list)
    episode_lengths: list[int] = field(default_factory=list)
    collect_s: float = 0.0
    write_s: float = 0.0
    data_bytes: int = 0
    numbered: int = 0
    num_envs: int = 0
    replaced: tuple[str, ...] = ()


def env_seeds(seed: int, first: int, count: int, static_seed: bool = False) -> list[int]:
    """Return the seeds of the job's envs ``first`` to ``first + count - 1``. Seeds follow one
    another as in TorchRL's batched envs.

    A seed depends only on the env's number in the job, not on how envs are divided into workers.
    """
    if static_seed:
        return [seed] * count
    for _ in range(first):
        seed = seed_generator(seed)
    seeds = []
    for _ in range(count):
        seeds.append(seed)
        seed = seed_generator(seed)
    return seeds


def require_module(policy: Any) -> nn.Module:
    """Return the policy. Raise ConfigurationError if it is not a module and so has no weights."""
    if not isinstance(policy, nn.Module):
        raise ConfigurationError(
            f"the worker's policy is a {type(policy).__name__}, which has no weights to set; "
            "pass an nn.Module as the policy, or do not send weights"
        )
    return policy


def reached_by_session(replay_buffer: Any) -> bool:
    """Whether only processes of the session can reach the buffer."""
    return getattr(getattr(replay_buffer, "storage", None), "attaches_by_session", False)


def write(rows: TensorDictBase, replay_buffer: Any) -> None:
    """Extend a buffer with rows. If the buffer's storage has one dimension, flatten the rows
    first."""
    size = rows.shape.numel()
    if getattr(getattr(replay_buffer, "storage", None), "ndim", 1) == 1:
        rows = rows.reshape(size)  # reshape(-1) would fail if a postproc keeps no row
    if size:
        replay_buffer.extend(rows)


class RolloutWorker:
    """Make rollouts on request, one at a time. Calls from several threads wait for each other.

    Raises:
        ConfigurationError: the env cannot be used. The message says which envs can be used.

    Example:
        >>> from torchrl_dist.collect.worker.worker import RolloutWorker, WorkerConfig
        >>> worker = RolloutWorker(WorkerConfig("CartPole-v1", frames_per_rollout=8, num_envs=4))
        >>> rows, stats = worker.collect()
        >>> rows.shape  # [N, T]
        torch.Size([4, 2])
        >>> worker.close()
    """

    _alone = False  # whether no other thread of this process calls a policy

    def __init__(self, config: WorkerConfig) -> None:
        if config.postproc is not None and config.postproc_factory is not None:
            raise ConfigurationError(
                "got both postproc and postproc_factory; expected only postproc or postproc_factory"
            )
        self.config = config
        self._lock = renewed(self, "_lock", threading.Lock)
        self._shown_index = (
            config.worker_index if config.shown_index is None else config.shown_index
        )
        self._closed = self._stop = False
        self._close_error: Exception | None = None
        self._cut = (-1, 0)
        # the finished steps of a rollout that was interrupted at its deadline
        self._part: TensorDict | None = None
        self._seed_process(config.seed)
        self.policy = config.policy
        if config.policy_factory is not None:
            self.policy = config.policy_factory(config.worker_index, config.num_workers)
        self._may_be_lazy = config.policy_factory is not None
        self._hooks = config.hooks
        self._trajectories = TrajectoryAssembler()
        make_env = config.make_env
        if config.max_frames_per_traj:
            make_env = partial(make_limited, make_env, config.max_frames_per_traj)
        self._postproc = config.postproc
        if config.postproc_factory is not None:
            self._postproc = config.postproc_factory(self.policy)
        # The rollout computes T, because T depends on the number of envs, and only a vector env
        # itself knows how many envs it has.
        envs: dict[str, Any] = {
            "frames": config.frames_per_rollout or 1,
            "num_envs": config.num_envs,
            "categorical_action_encoding": config.categorical_action_encoding,
        }
        self._rollout: Rollout
        if config.inference is not None:
            self._rollout = make_grouped_rollout(make_env, config.inference, **envs)
        else:
            acting = {
                "exploration_type": config.exploration_type,
                "compilation": config.compilation,
                "alone": self._alone,
            }
            self._rollout = make_rollout(make_env, self.policy, **acting, **envs)
        self.num_envs = self._rollout.num_envs
        self.steps = self._rollout.steps
        number, collectors = config.place
        self._episodes = Episodes(
            self.num_envs,
            offset=config.worker_index * collectors + number,
            stride=config.num_workers * collectors,
        )
        if config.seed_given:
            self._require_a_seed_per_env()
        self._seed_envs()

    def describe(self) -> WorkerInfo:
        """Describe the worker. If the config leaves T open, this method also steps the envs to
        measure the duration of a step. In this case, the caller must call ``set_steps`` next."""
        specs = self._rollout.specs
        info = WorkerInfo(
            self.num_envs,
            self.steps,
            socket.gethostname(),
            os.getpid(),
            specs,
            ragged=self._rollout.ragged,
        )
        return info if self.config.frames_per_rollout is not None else self._with_step_time(info)

    def _with_step_time(self, info: WorkerInfo) -> WorkerInfo:
        steps, taken_s, step_s = 1, 0.0, math.inf
        with self._lock:
            self._rollout.resize(_MOST_MEASURED)
            # Do not time the first step, because it includes work that is done only once.
            self._rollout.run(1)
            while taken_s < _MEASURED_S and steps < _MOST_MEASURED:
                steps *= 2
                begun = time.perf_counter()
                rows = self._rollout.run(steps)
                taken_s = time.perf_counter() - begun
                # Use the shortest time, because workers that are still starting also occupy cores.
                step_s = min(step_s, taken_s / steps)
        return replace(info, step_s=step_s, step_bytes=size_bytes(rows) / steps)

    def set_steps(self, steps: int) -> None:
        """Set T. Seed all envs again with the config's seed, and begin new episodes in all envs."""
        with self._lock:
            self.steps = steps
            self._rollout.resize(steps)
            self.config = replace(self.config, frames_per_rollout=steps * self.num_envs)
        self.reset()
        self._seed_envs()

    def _seed_envs(self) -> None:
        kept = self.config.keep_env_seeds and isinstance(self._rollout, TorchRLRollout)
        if self.config.seed is not None and not kept:
            self._set_seed(self.config.seed)

    def _take_weights(self, packed: PackedWeights) -> None:
        """Use these weights from the next step on, unless they are older than the current weights.

        Raises:
            ConfigurationError: the weights fit no module of the policy.
        """
        policy = self._module()
        if packed.version >= self._rollout.policy_version:
            unpack(packed, policy)
            self._rollout.policy_version = packed.version

    def _module(self) -> nn.Module:
        """Return the policy if it can take weights. If a factory made the policy, first initialize
        its lazy layers by a call, because weights arrive before the first step."""
        policy = require_module(self.policy)
        if self._may_be_lazy:
            self._may_be_lazy = False
            tensors = chain(policy.parameters(), policy.buffers())
            if any(is_lazy(tensor) for tensor in tensors):
                training = [module for module in policy.modules() if module.training]
                # use eval(), because the zeros of this call must not change the statistics of a
                # batch norm
                policy.eval()
                with torch.no_grad():
                    self._rollout.call_policy_once()
                for module in training:
                    module.training = True
        return policy

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Seed this worker's envs by their numbers in the job, and start new episodes in all envs.

        Returns:
            the seed that follows the seeds of all envs of the job.

        Raises:
            ConfigurationError: the envs cannot be seeded one by one.
        """
        self._require_a_seed_per_env()
        return self._set_seed(seed, static_seed)

    def _require_a_seed_per_env(self) -> None:
        if getattr(self._rollout, "one_seed_only", False):
            raise ConfigurationError(
                f"{self._rollout.target} accepts only one seed for all its {self.num_envs} envs; "
                "with seed=, each env needs its own seed, because the data would otherwise depend "
                "on how the job is divided into workers. Leave seed= out, or let make_env return "
                "single envs, a SyncVectorEnv or an AsyncVectorEnv"
            )

    def _set_seed(self, seed: int, static_seed: bool = False) -> int:
        with self._lock:
            total = self.num_envs * self.config.num_workers
            first = self.num_envs * self.config.worker_index
            self._rollout.seed(env_seeds(seed, first, self.num_envs, static_seed))
            self._part = None
            self._seed_process(seed)
            self._episodes.restart()
            return env_seeds(seed, total, 1, static_seed)[0]

    def visit_envs(
        self, index: int | None, what: str, name: str, args: tuple, kwargs: dict
    ) -> list[Any]:
        """See :func:`torchrl_dist.collect.loop.access.visit`. This method first waits until the
        current rollout has ended."""
        with self._lock:
            return visit(self._rollout.target, index, what, name, args, kwargs)

    def set_hooks(self, hooks: Hooks) -> None:
        """Use these hooks from the next rollout on."""
        self._hooks = hooks

    def reset(self, envs: Sequence[int] | None = None) -> list[int]:
        """Start new episodes in all envs, or only in ``envs``, before the next rollout.

        Returns:
            if ``envs`` is given, the ids of the trajectories that this call abandoned; else an
            empty list.

        Raises:
            ConfigurationError: the envs cannot be reset one by one.
        """
        with self._lock:
            if envs is None:
                self._begin_anew()
                return []
            if self._part is not None:  # drop an incomplete rollout, in all envs
                self._begin_anew()
                return []
            self._rollout.reset(envs)
            abandoned = self._episodes.restart(envs)
            self._trajectories.forget_parts(abandoned)
            return abandoned

    def _begin_anew(self) -> None:
        self._part = None
        self._rollout.reset()
        self._episodes.restart()
        self._trajectories.forget_parts()

    def _seed_process(self, seed: int | None) -> None:
        """Seed the process's global random generators, because all forks of one server begin with
        the same state of these generators."""
        if not self.config.own_process:
            return
        spawn_key = (self.config.worker_index,)
        state = np.random.SeedSequence(entropy=seed, spawn_key=spawn_key).generate_state(1)
        torch.manual_seed(int(state[0]))
        np.random.seed(int(state[0]))
        random.seed(int(state[0]))

    def set_trajectory_base(self, base: int, numbered: int = 0) -> None:
        """Begin new trajectories with ids from ``base`` upwards.

        Args:
            numbered: how many ids of this worker may be used already. They are skipped."""
        with self._lock:
            self._episodes.base = base
            self._episodes.numbered = max(self._episodes.numbered, numbered)
            self._episodes.restart()

    def collect(
        self,
        steps: int | None = None,
        num_envs: int | None = None,
        weights: PackedWeights | None = None,
        request: int | None = None,
        anew: bool = False,
        at_random: bool = False,
        until: float | None = None,
    ) -> tuple[TensorDict | PackedRows | None, RolloutStats]:
        """Make one rollout, and block while the envs step.

        Args:
            steps: number of transitions per env; at most the worker's T, which is the default.
            num_envs: keep only the rows of the first ``num_envs`` envs. The last rollout of a job
                may need fewer envs than the worker has.
            weights: weights to use from the first step on, if they are not older than the current
                weights.
            request: number of the request, for :meth:`cut`.
            anew: begin new episodes first.
            at_random: use random actions, and set the policy's other outputs to zero.
            until: the deadline, by the clock ``awake()``; None means no limit.

        Raises:
            DeadlineError: ``until`` passed before the last step. The next call continues the same
                rollout.

        Returns:
            the rows (``None`` if they went to the replay buffer or the worker was closed), and the
            statistics. If a ``cut`` ended the rollout early, each env's last step is marked as
            truncated.
        """
        with self._lock:
            if not self._closed:
                try:
                    return self._collect(
                        self.steps if steps is None else steps,
                        self.num_envs if num_envs is None else num_envs,
                        weights, anew, at_random, until, self._watch(request),
                    )  # fmt: skip
                except RolloutStopped:
                    # Close the envs here, because close() may have stopped waiting for this
                    # rollout.
                    self._shut()
            return None, RolloutStats(self._shown_index, 0)

    def _collect(
        self,
        steps: int,
        kept: int,
        weights: PackedWeights | None,
        anew: bool,
        at_random: bool,
        until: float | None,
        enough: Callable[[int], bool],
    ) -> tuple[TensorDict | PackedRows | None, RolloutStats]:
        """See :meth:`collect`. The caller must hold the lock.

        Raises:
            RolloutStopped: the worker was told to stop.
        """
        part, self._part = self._part, None
        if weights is not None:
            self._take_weights(weights)
        before, behind = self._hooks
        if part is None:
            if before is not None:
                before()
            if anew or self.config.reset_at_each_iter:
                self._begin_anew()
        begun = time.perf_counter()
        self._rollout.at_random = at_random
        rollout = self._run_until(until, steps, part, enough)
        returns, lengths = self._stamp(rollout, kept)
        if kept < self.num_envs:
            rollout = rollout[:kept]
            # The next rollout must begin new episodes, because the steps of the other envs were
            # dropped.
            self._rollout.reset()
            self._episodes.restart()
        if rollout.shape[1] < steps:
            truncate_last(rollout)
            self._episodes.split()
        if self.config.set_truncated:
            set_truncated(rollout)
        stepped = time.perf_counter()
        versions = rollout.get("policy_version")
        if self.config.stamp_version is False:
            rollout = rollout.exclude("policy_version")
        elif self.config.stamp_version:
            rollout.set(("next", "policy_version"), versions.clone())
        if not self.config.track_traj_ids:
            rollout = rollout.exclude(("collector", "traj_ids"))
        if self.config.compact_obs:
            rollout = without_next_observations(rollout)
        try:
            with giving_up_when(self._gives_up):
                data, data_bytes = self._deliver(rollout, behind)
        except DeadlineError as error:
            if self._told_to_stop:  # the rate limiter delayed the rows until the stop
                raise RolloutStopped from error
            raise
        finally:
            if kept < self.num_envs:
                # Do this after the delivery, because the delivery may complete trajectories.
                self._trajectories.forget_parts()
        return data, RolloutStats(
            self._shown_index,
            rollout.shape.numel(),
            int(versions.min()),
            int(versions.max()),
            returns,
            lengths,
            stepped - begun,
            time.perf_counter() - stepped,
            data_bytes,
            self._episodes.numbered,
            kept,
        )

    def _run_until(
        self,
        until: float | None,
        steps: int,
        part: TensorDict | None,
        enough: Callable[[int], bool],
    ) -> TensorDict:
        """Return a rollout that begins with ``part``, the steps that an earlier call made."""
        if until is None and part is None:
            return self._rollout.run(steps, enough)
        have = 0 if part is None else part.shape[1]
        late = False

        def watch(done: int) -> bool:
            nonlocal late
            if enough(have + done):
                return True
            late = until is not None and awake() > until
            return late

        rows = self._rollout.run(steps - have, watch)
        if part is not None:
            joined: TensorDict = torch.cat([part, rows], 1)
            joined.names = [None, "time"]
            rows = joined
        if late and rows.shape[1] < steps:
            self._part = rows
            raise DeadlineError(
                f"worker {self.config.worker_index}: the rollout was not complete at the deadline; "
                "the next call continues the rollout"
            )
        return rows

    @property
    def is_incomplete(self) -> bool:
        """Whether a rollout was interrupted at its deadline, so that the next call continues this
        rollout."""
        return self._part is not None

    @property
    def _told_to_stop(self) -> bool:
        return self._stop

    def _gives_up(self) -> bool:
        """Whether to stop waiting for the replay buffer. The wait calls this method repeatedly
        while the buffer accepts no rows."""
        return self._told_to_stop

    def _watch(self, request: int | None) -> Callable[[int], bool]:
        """Return a function that says whether the rollout must end. The caller calls it after every
        step, with the number of steps done. A rollout without a request number is never cut."""
        if request is None:
            return never

        def enough(done: int) -> bool:
            number, least = self._cut
            return number >= request and done >= least

        return enough

    def cut(self, request: int, least: int) -> None:
        """End every rollout whose request number is at most ``request`` as soon as each env has
        made ``least`` steps. The rollout may be running, may have ended, or may begin later."""
        self._cut = (request, least)

    def _stamp(self, rollout: TensorDict, kept: int) -> tuple[list[float], list[int]]:
        shape = rollout.shape
        following = rollout.get("next")
        reward = rewards_of(following).numpy()
        ended = ends_of(following).numpy()
        ended[kept:] = False
        if self.config.max_frames_per_traj and "step_count" not in rollout.keys():
            self._set_step_count(rollout, ended)
        ids, returns, lengths = self._episodes.advance(reward, ended)
        collector: dict[str | tuple[str, ...], torch.Tensor] = {
            "traj_ids": torch.from_numpy(ids),
            "worker_index": torch.full(shape, self._shown_index),
        }
        rollout.set("collector", nested(collector, list(shape), rollout.names))
        return returns, lengths

    def _set_step_count(self, rollout: TensorDict, ended: np.ndarray) -> None:
        """Write ``step_count`` as TorchRL's ``StepCounter`` does."""
        count = torch.from_numpy(self._episodes.count_steps(ended)).unsqueeze(-1)
        rollout.set("step_count", count)
        rollout.set(("next", "step_count"), count + 1)

    def _deliver(
        self, rollout: TensorDict, hook: Callable[[TensorDictBase], Any] | None
    ) -> tuple[TensorDict | PackedRows | None, int]:
        rows = rollout
        if self._postproc is not None:
            with torch.no_grad():
                rows = self._postproc(rollout)
        data_bytes = size_bytes(rows)
        if hook is not None:
            hook(rows)
        if self.config.replay_buffer is None:
            if self.config.packed and packable(rows):
                return PackedRows.of(rows), data_bytes
            return rows, data_bytes
        parts = [rows]
        if self.config.whole_trajectories:
            self._trajectories.add(rows)
            parts = self._trajectories.take_all()
        for part in parts:
            write(part, self.config.replay_buffer)
        return None, data_bytes

    def expect(self, request: int, **options: Any) -> None:
        """Do nothing. Only a :class:`NodeWorker` must know of a request in advance, because it may
        begin the rollout during the previous rollout."""

    def stop(self, limit_s: float | None = None) -> None:
        """End a running rollout after its current step. ``collect`` then closes the envs. Any
        thread may call this method. ``limit_s`` has an effect only on node workers."""
        self._stop = True
        rollout = getattr(self, "_rollout", None)
        if rollout is not None:
            rollout.stop()

    def close(self, step_limit_s: float = 10.0, close_env: bool = True) -> None:
        """Stop a running rollout after its current step and, with ``close_env``, close the envs.
        Idempotent.

        Raises:
            DeadlineError: the step did not end within ``step_limit_s`` seconds. The envs are closed
                when the step ends.
            Exception: the exception that closing an env raised.
        """
        if not self._closed:
            self.stop()
            if not self._lock.acquire(timeout=step_limit_s):
                raise DeadlineError(
                    f"worker {self.config.worker_index}: the current step of a rollout did not end "
                    f"within {step_limit_s:g} s; the envs will be closed when the step ends"
                )
            try:
                self._shut(close_env)
            finally:
                self._lock.release()
        error, self._close_error = self._close_error, None
        if error is not None:
            raise error

    def _shut(self, close_env: bool = True) -> None:
        if self._closed:
            return
        self._closed = True
        rollout = self._rollout
        # Release the user's objects now, because the session keeps this worker object until the
        # session ends.
        del self._rollout
        self._postproc = self.policy = None
        self._hooks = (None, None)
        self.config = self.config.without_parts()
        if close_env:
            try:
                rollout.close()
            # Store the error, because only close() may raise it, even if collect() called this
            # method.
            except Exception as error:
                self._close_error = error
