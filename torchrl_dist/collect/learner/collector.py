"""A TorchRL collector whose workers are other processes of the session."""

from __future__ import annotations

import contextlib
import threading
import time
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn
from torchrl.collectors import BaseCollector
from torchrl.collectors.utils import split_trajectories
from torchrl.envs.utils import ExplorationType

from torchrl_dist.collect.learner.arguments import (
    GivenEnv,
    Settings,
    check_inference,
    choose_envs,
    choose_peers,
    choose_policy_factories,
    choose_readiness,
    choose_seed,
    choose_storing_device,
    refuse,
)
from torchrl_dist.collect.learner.background import Background
from torchrl_dist.collect.learner.budget import FrameBudget
from torchrl_dist.collect.learner.crew import Crew
from torchrl_dist.collect.learner.handles import Handle
from torchrl_dist.collect.learner.inference import LearnerInference
from torchrl_dist.collect.learner.readiness import Readiness
from torchrl_dist.collect.learner.report import CollectReport, summarize
from torchrl_dist.collect.learner.start import Replacer, start_workers
from torchrl_dist.collect.loop.groups import Inference
from torchrl_dist.collect.loop.joining import join
from torchrl_dist.collect.loop.lazy import initialize
from torchrl_dist.collect.loop.policies import Compilation
from torchrl_dist.collect.loop.trajectories import TrajectoryAssembler
from torchrl_dist.collect.worker.worker import Postproc, WorkerConfig
from torchrl_dist.errors import ConfigurationError, DeadlineError, PeerLostError
from torchrl_dist.runtime import Peer, Session
from torchrl_dist.runtime.pulse import Pulse
from torchrl_dist.runtime.world import World
from torchrl_dist.weights import PackedWeights, completed, find_target, pack

Weights: TypeAlias = nn.Module | TensorDictBase | Mapping[str, Any]

_SHUTDOWN_S = 10.0
_ONE_POLICY = "with inference='learner', all workers use the learner's policy"
# A resumed job numbers trajectories from a base above all ids that earlier runs can have used.
_RUN_EPOCH_S = 1_704_067_200  # 2024-01-01
_RUN_SHIFT = 32


def _argument(name: str) -> Any:
    return property(lambda self: getattr(self._settings, name))


class RPCBatchedCollector(BaseCollector):
    """Collect with the workers of a session. Each message has T steps of all envs of one worker.

    Iterating yields one TensorDict ``[N, T]`` per batch, in which the workers' rollouts are joined
    along the dimension of the envs. A batch has the keys of TorchRL's ``Collector`` and
    ``"policy_version"``, ``("collector", "worker_index")`` and ``("collector", "traj_ids")``.
    Trajectory ids are unique in the job if each rank has at most one collector. With
    ``replay_buffer`` the workers write their rows into the buffer themselves, and iterating yields
    a :class:`CollectReport`. In both cases, ``collector.report`` is the report of the last batch.
    Iteration ends at ``total_frames``, or after the current batch if the session was told to stop
    (``session.stop_requested``). If several processes have this process's role, a stop request does
    not end iteration, because these processes must all stop after the same update.

    Args:
        make_env: a gymnasium id, or a callable that returns a ``gymnasium.Env``, a
            ``gymnasium.vector.VectorEnv`` or a TorchRL env. The workers call the callable, which
            may be a lambda. A list has one id or callable for each worker. ``create_env_fn`` is
            another name of this argument. If the only worker is in this process, an env object may
            be given instead. Every call of ``make_env`` must return a new env. A vector env of
            torch tensors, on the CPU or a GPU, may have the interface of Isaac Lab's envs instead
            of being a ``VectorEnv``. An env is made, stepped and closed in one thread. This thread
            is the caller's thread if an env object was given, or if none of ``session``,
            ``replay_buffer`` and ``env_processes`` was given. Otherwise, the thread is the main
            thread of a rank or env process, or a separate thread (see the guide). The gymnasium
            environments that are registered in this process are registered on the workers, too. An
            EnvPool is seeded only when it is made, so pass ``seed=np.random.randint(2**31)`` to
            ``envpool.make``. This number depends on ``seed``, because before ``make_env`` is
            called, NumPy is seeded from ``seed``, differently on each worker.
        policy: the learner's module. Each worker gets a copy on its CPU, and new weights after
            ``update_policy_weights_()``. Without ``policy`` and ``policy_factory``, actions are
            random. If some lazy layers have no shapes yet, an env is built and closed in this
            process to find these shapes.
        session: the session of the workers. None means one worker in this process.
        frames_per_batch: number of frames in a batch. T is this number, divided by the number of
            rollouts in a batch (one per worker, or only one with ``FirstReady``) and by the number
            of envs of a worker. T is rounded up, with a warning if this makes batches larger. With
            None, the workers measure the duration of a step before the first episodes, and this
            duration determines T. A rollout then lasts about half a second (longer if more than
            four processes share a core) and has at most 8 MiB, but at least one step. Each rollout
            is sent as one message, which takes one millisecond of the learner's time and two of the
            worker's time. The collector's ``frames_per_batch`` is the resulting number of frames.
        total_frames: iteration ends after exactly this many frames, so the last batches may be
            shorter. With -1, iteration never ends.
        policy_factory: ``(worker_index, num_workers) -> policy``, called on each worker instead of
            copying ``policy``. A factory without required arguments (and without ``worker_index``)
            is called without arguments. A list has one factory for each worker. If ``policy`` is
            given, too, its weights are loaded into the module that the factory made, or into the
            part of that module that the weights fit.
        num_envs: number of envs per worker or, with ``env_processes``, per env process. A vector
            env itself says how many envs it has.
        env_processes: the number of processes that step a worker's envs, on the worker's node. With
            0, the worker steps its envs itself. Otherwise, the worker sends one rollout for all of
            these processes, so one worker per node is enough. An env process that dies is replaced,
            with a warning, and the rows that it had not delivered are collected again. If an env
            process and its next two successors all die before they deliver a rollout, iterating
            raises an error. A server process forks the env processes.
        step_timeout_s: an env process that makes no step for this many seconds, because it hangs or
            is paused, is killed and replaced. By default, there is no limit.
        workers: the peers that run the workers. The default is ``session.of_role("collector")``,
            or this process if there are no such peers.
        readiness: the rule for when a batch is complete, ``WaitAll()``, ``FirstReady()``,
            ``Quorum(...)`` or ``Preempt(...)``.
        max_policy_lag: how many rollouts each worker may collect ahead while the caller works on a
            batch. After this many rollouts, the worker waits. With ``WaitAll`` and one update per
            batch, data are at most this many versions old. With 0, no new rollout begins until the
            caller requests the next batch; with ``WaitAll``, all data then come from the newest
            weights. Without ``env_processes``, a worker in the caller's process never collects
            ahead, because it sets TorchRL's exploration type, which applies to the whole process.
        replay_buffer: a buffer that is pickled and sent to the workers, which call
            ``extend(rows.reshape(-1))``, or ``extend(rows)`` if the storage has several dimensions.
            If a worker is in another process, the buffer's storage must be shared, such as a
            ``SharedMemmapStorage``.
        inference: where the policy runs. With ``"worker"``, the policy runs on the workers. With
            ``"learner"``, workers send the observations of each step to the learner, and get
            actions. The actions come from a copy of ``policy`` on the learner's CPU;
            ``update_policy_weights_()`` updates this copy. Use ``"learner"`` if the policy does not
            fit on the workers.
        env_groups: with ``inference="learner"``, the number of groups into which the envs of a
            worker, or of each of its env processes, are divided. One group is stepped while the
            other groups wait for actions.
        trajs_per_batch: each batch consists of this many complete trajectories
            ``[trajs_per_batch, longest]``, padded with zeros, with ``("collector", "mask")``, as in
            TorchRL. At ``total_frames``, trajectories that are unfinished or do not fill a batch
            are not delivered. With ``replay_buffer``, reports count rollouts, not trajectories. The
            process that made a trajectory writes the trajectory to the buffer once it is complete,
            separately from other trajectories and without padding.
        traj_format: with ``trajs_per_batch``, ``"padded"`` (default) pads the trajectories of a
            batch with zeros. ``"cat"`` concatenates them, so the shape of a batch is ``[steps]``,
            where ``steps`` is the sum of their lengths.
        split_trajs: whether to pass each batch through TorchRL's ``split_trajectories``.
        postproc: a function that each worker calls with each of its rollouts ``[N, T]``, and that
            returns the rows to deliver.
        postproc_factory: a function that each worker calls once with its policy, and that returns
            the worker's ``postproc``.
        seed: seed of all envs and of the workers' random numbers. By default, the seed is drawn
            from torch's generator; TorchRL envs then keep the seeds that ``make_env`` gave them, as
            in TorchRL's collectors. Env i of the job gets the i-th seed of TorchRL's chain of
            seeds, however the envs are divided among workers. Vector envs that accept only one seed
            for all their envs are therefore refused if ``seed`` is given. Gymnasium's native
            CartPole is accepted, because its envs are seeded one by one. EnvPools only cause a
            warning.
        min_workers: iteration raises PeerLostError if fewer workers than this are alive.
        worker_timeout_s: limit of a rollout's duration, in seconds. A worker whose rollout takes
            longer, because the worker hangs or is paused, counts as lost until it answers.
            Meanwhile, other workers collect its frames. When the worker answers, its late rows are
            dropped, and it begins new episodes. With ``replay_buffer``, the late rows are in the
            buffer, in addition to ``total_frames``. By default, there is no limit.
        replace_lost: whether to replace a worker whose process died. This works only under
            ``local_cluster``. This process forks new processes for the worker's envs, which begin
            new episodes. A worker gets at most three successors. The other workers collect
            meanwhile.
        timeout_s: limit of the wait for each batch and of other calls, in seconds. The default is
            the session's ``timeout_s``. Building the workers may take this long or as long as the
            session's ``timeout_s``, whichever is longer.
        categorical_action_encoding: as in TorchRL's ``GymEnv``; only for gymnasium envs.
        init_random_frames: actions are random until this many frames have been collected. Frames of
            earlier runs of a resumed job, and rows in ``replay_buffer``, also count. Until then,
            the policy's other outputs are zero.
        create_env_kwargs: keyword arguments for ``make_env``; a list has one dict for each worker.
        reset_at_each_iter: whether each rollout begins new episodes.
        max_frames_per_traj: episodes are truncated after this many steps, and rows have
            ``"step_count"``. Vector envs are refused.
        set_truncated: whether the last step of each rollout is marked as truncated and done.
        track_traj_ids: False leaves ``("collector", "traj_ids")`` out.
        compact_obs: True leaves out the entries of ``"next"`` that the following row repeats, such
            as ``("next", "observation")``. The last observations of episodes and rollouts are then
            missing.
        track_policy_version: True writes ``("next", "policy_version")`` in addition to
            ``"policy_version"``, as TorchRL does. False leaves out both keys.
        pre_collect_hook, post_collect_hook: ``pre_collect_hook()`` is called before each rollout
            and ``post_collect_hook(rows)`` after each rollout, in the process that makes the
            rollout.
        cat_results: ``"stack"`` gives batches ``[workers, N, T]``; 0, 1 or -1 is the dimension
            along which the workers' rollouts are joined. The default is 0 (TorchRL's
            ``MultiSyncCollector`` stacks).
        preemptive_threshold: once this fraction of the workers is ready, the other workers end
            their rollouts early. This argument is a shorthand for ``readiness=Preempt(...)``.
        device, storing_device: the device of batches. The workers themselves run on the CPU.
        compile_policy, cudagraph_policy: as in TorchRL's collectors, True or a dict of keyword
            arguments for ``torch.compile`` or ``CudaGraphModule``. The dict for ``torch.compile``
            may also contain ``warmup``. The two arguments have an effect in every process that runs
            the policy.
        **torchrl: arguments of TorchRL's collectors that have no meaning here. A value that would
            change something is refused, and the error says why
            (``torchrl_dist/collect/learner/arguments.py``).

    Raises:
        ConfigurationError: arguments cannot work together, or ``make_env`` returned the same env
            twice.
        RemoteError: building a worker failed. The message names the node and includes the
            traceback.

    Iterating raises:
        DeadlineError: no batch was complete within ``timeout_s`` seconds. The message names the
            workers that are late. No rows are lost, and you can iterate again to continue. If the
            envs are stepped in the caller's thread, the deadline is checked after each step, so
            only Ctrl-C ends a step that hangs.
        RemoteError: an env or the policy raised an exception on a worker. The collector is then
            shut down.
        PeerLostError: fewer than ``min_workers`` workers are alive. The collector is then shut
            down. As long as enough workers are alive, the death of a worker causes one warning, an
            entry in ``report.lost_workers`` and smaller batches. The other workers collect the
            frames that the dead worker had not delivered.

    Example:
        >>> collector = RPCBatchedCollector(
        ...     "CartPole-v1", None, num_envs=4, frames_per_batch=32, total_frames=64
        ... )
        >>> for batch in collector:  # [N, T]; without ``session``, this process collects
        ...     print(batch.shape, batch["next", "reward"].shape)
        torch.Size([4, 8]) torch.Size([4, 8, 1])
        torch.Size([4, 8]) torch.Size([4, 8, 1])
        >>> collector.shutdown()
    """

    def __init__(
        self,
        make_env: Any = None,
        policy: nn.Module | Callable[[TensorDictBase], Any] | None = None,
        *,
        session: Session | None = None,
        frames_per_batch: int | None = None,
        total_frames: int | None = -1,
        policy_factory: Callable[..., Any] | Sequence[Callable[..., Any]] | None = None,
        num_envs: int = 1,
        env_processes: int = 0,
        step_timeout_s: float | None = None,
        workers: Sequence[Peer] | None = None,
        readiness: Readiness | None = None,
        max_policy_lag: int = 0,
        replay_buffer: Any = None,
        inference: Literal["worker", "learner"] = "worker",
        env_groups: int = 2,
        trajs_per_batch: int | None = None,
        traj_format: Literal["padded", "cat"] | None = None,
        split_trajs: bool | None = False,
        postproc: Postproc | None = None,
        postproc_factory: Callable[[Any], Postproc] | None = None,
        seed: int | None = None,
        exploration_type: ExplorationType = ExplorationType.RANDOM,
        min_workers: int = 1,
        worker_timeout_s: float | None = None,
        replace_lost: bool = False,
        timeout_s: float | None = None,
        categorical_action_encoding: bool = False,
        create_env_kwargs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
        init_random_frames: int | None = None,
        reset_at_each_iter: bool = False,
        max_frames_per_traj: int | None = None,
        set_truncated: bool = False,
        track_traj_ids: bool = True,
        compact_obs: bool = False,
        track_policy_version: bool | None = None,
        pre_collect_hook: Callable[[], Any] | None = None,
        post_collect_hook: Callable[[TensorDictBase], Any] | None = None,
        cat_results: Literal["stack"] | int | None = None,
        preemptive_threshold: float | None = None,
        device: torch.device | str | int | None = None,
        storing_device: torch.device | str | int | None = None,
        compile_policy: bool | Mapping[str, Any] | None = None,
        cudagraph_policy: bool | Mapping[str, Any] | None = None,
        **torchrl: Any,
    ) -> None:
        given = dict(locals())  # Settings has fields with these names
        super().__init__(pre_collect_hook=pre_collect_hook, post_collect_hook=post_collect_hook)
        if make_env is None:
            make_env = torchrl.pop("create_env_fn", None)
        refuse(torchrl)
        peers = choose_peers(session, workers)
        num_workers = len(peers) or 1
        here = not env_processes and all(session is None or peer == session.me for peer in peers)
        one = here and num_workers == 1
        chosen = {
            "num_workers": num_workers,
            "here": here,
            "make_envs": choose_envs(
                make_env, create_env_kwargs, num_workers, here=one, num_envs=num_envs
            ),
            "policy_factories": choose_policy_factories(policy_factory, num_workers),
            "total_frames": -1 if total_frames is None else total_frames,
            "readiness": choose_readiness(readiness, preemptive_threshold, num_workers),
            "split_trajs": bool(split_trajs),
            "seed": None if seed is None else choose_seed(seed),
            "init_random_frames": max(0, init_random_frames or 0),
            "max_frames_per_traj": max_frames_per_traj or 0,
            "hooks": (pre_collect_hook, post_collect_hook),
            "storing_device": choose_storing_device(device, storing_device),
            "compilation": Compilation(compile_policy, cudagraph_policy),
        }
        settings = Settings(**{each.name: (given | chosen)[each.name] for each in fields(Settings)})
        self._begin(settings, session)
        self._start(session, peers)

    def _begin(self, settings: Settings, session: Session | None) -> None:
        """Set all attributes that do not depend on the workers."""
        self._settings = settings
        self._num_workers = settings.num_workers
        self.readiness: Readiness = settings.readiness
        self.trajs_per_batch = settings.trajs_per_batch
        self.traj_format = settings.traj_format
        self.split_trajs = settings.split_trajs
        self.max_policy_lag = settings.max_policy_lag
        self.min_workers = settings.min_workers
        self.worker_timeout_s = settings.worker_timeout_s
        self.timeout_s = settings.timeout_s or (60.0 if session is None else session.timeout_s)
        self.total_frames = settings.total_frames
        self.replay_buffer = settings.replay_buffer
        self.policy = settings.policy
        self.report = CollectReport()
        self._session = weakref.ref(session) if session is not None else lambda: None
        self._background: Background | None = None
        self._inference: LearnerInference | None = None
        self._trajectories = TrajectoryAssembler()
        self._version = 0
        self._frames = 0
        self._iter = -1  # number of delivered batches minus one, as in TorchRL
        self._run = 0
        self._totals = dict.fromkeys(("wait_s", "messages", "data_bytes"), 0.0)
        self._busy_s: dict[int, float] = {}

    def _start(self, session: Session | None, peers: Sequence[Peer]) -> None:
        """Build the workers, and block until they are ready."""
        settings, policy = self._settings, self.policy
        if isinstance(policy, nn.Module):
            initialize(
                policy,
                settings.make_envs[0],
                close=not isinstance(settings.make_envs[0], GivenEnv),
                exploration_type=settings.exploration_type,
                categorical_action_encoding=settings.categorical_action_encoding,
            )
        # Pack the weights before any worker is built, because pack() refuses unsuitable policies.
        initial = pack(policy, 0) if isinstance(policy, nn.Module) else None
        limit_s = self.timeout_s if session is None else max(self.timeout_s, session.timeout_s)
        place = _place(session)
        configs = [replace(config, place=place) for config in settings.worker_configs(limit_s)]
        if settings.inference == "learner":
            asked = self._infer_here(session, peers)
            configs = [replace(config, policy=None, inference=asked) for config in configs]
        try:
            self._crew = self._start_crew(session, peers, configs, limit_s)
        except BaseException:
            if self._inference is not None:
                self._inference.close(_SHUTDOWN_S)
            raise
        self._abandoned = weakref.finalize(self, _close_soon, self._crew, self._inference)
        self._abandoned.atexit = False  # not needed at exit, because the process ends
        if initial is not None and self._inference is None:
            self._crew.send_weights({worker.index: initial for worker in self._crew.workers})
            # without factories, the workers already have copies of the policy
            if settings.policy_factories is None:
                for worker in self._crew.workers:
                    worker.has_newest = True
        self._pulse = None if session is None else Pulse(session, peers, self._figures)
        self._note_frames()

    def _note_frames(self) -> None:
        """Set the number of frames in a batch, which depends on the number of envs of each
        worker."""
        first, asked = self._crew.workers[0], self._settings.frames_per_batch
        rollouts = self._settings.rollouts_per_batch
        self.frames_per_batch = rollouts * first.num_envs * first.steps
        self._check_workers()
        self.requested_frames_per_batch = asked or self.frames_per_batch
        if self.frames_per_batch > self.requested_frames_per_batch:
            warnings.warn(
                f"frames_per_batch={asked} is not a multiple of {rollouts} rollouts x "
                f"{first.num_envs} envs, so each batch has {self.frames_per_batch} frames; pass "
                f"frames_per_batch={self.frames_per_batch} to silence this warning",
                stacklevel=4,
            )

    def _infer_here(self, session: Session | None, peers: Sequence[Peer]) -> Inference:
        """Run the policy in this process. Return how workers request actions from the policy."""
        policy, settings = self.policy, self._settings
        unfit = {
            "policy_factory": settings.policy_factories,
            "postproc_factory": settings.postproc_factory,
            "readiness": self.readiness.cuts,
        }
        check_inference(session, peers, policy, unfit)
        assert session is not None and isinstance(policy, nn.Module)
        self._inference = LearnerInference(
            session, policy, settings.exploration_type, settings.compilation
        )
        groups = min(settings.env_groups, settings.num_envs)
        return Inference(self._inference.handle, self._inference.inputs, groups, self.timeout_s)

    def _check_workers(self) -> None:
        first = self._crew.workers[0]
        try:
            self._settings.check_frames(self.frames_per_batch)
            if first.ragged:
                self._settings.check_ragged(first.specs["observation spec"])
        except ConfigurationError:
            self.shutdown()
            raise

    def _start_crew(
        self,
        session: Session | None,
        peers: Sequence[Peer],
        configs: list[WorkerConfig],
        limit_s: float,
    ) -> Crew:
        self._replacer = None
        if self._settings.replace_lost:
            self._replacer = Replacer(session, configs, self.max_policy_lag)
        workers, lost, errors = start_workers(
            session, peers, configs, max_ahead=self.max_policy_lag, limit_s=limit_s
        )
        random_frames = self._settings.init_random_frames
        budget = FrameBudget(
            self.total_frames if self.total_frames >= 0 else None, self.readiness.in_rounds
        )
        # As in TorchRL, all rows that were ever written to the buffer count towards the random
        # frames, including rows of other writers.
        budget.assigned = getattr(self.replay_buffer, "write_count", 0) if random_frames else 0
        crew = Crew(
            workers,
            lost,
            budget,
            self.readiness,
            self.min_workers,
            self.worker_timeout_s,
            random_frames,
            # A stop request does not end the iteration of several learners, because they must stop
            # after the same update: see DistributedLoss.ranks.
            stopped=(lambda: session.stop_requested)
            if session is not None and len(session.of_role(session.role)) == 1
            else None,
            replacer=self._replacer,
        )
        if not errors and len(workers) < self.min_workers:
            errors = [
                PeerLostError(
                    f"only {len(workers)} of {len(configs)} workers could be started; expected at "
                    f"least min_workers={self.min_workers}; see the workers' output, or lower "
                    "min_workers"
                )
            ]
        if errors:
            crew.close(_SHUTDOWN_S)
            raise errors[0]
        return crew

    # ---- attributes of TorchRL's collectors. These attributes are read-only, because the workers
    # have already been built with their values.

    exploration_type = _argument("exploration_type")
    max_frames_per_traj = _argument("max_frames_per_traj")
    reset_at_each_iter = _argument("reset_at_each_iter")
    set_truncated = _argument("set_truncated")
    postproc = _argument("postproc")
    cat_results = _argument("cat_results")
    storing_device = _argument("storing_device")
    num_workers = _argument("num_workers")
    policy_device = env_device = property(lambda self: torch.device("cpu"))
    track_traj_ids = _argument("track_traj_ids")
    compact_obs = _argument("compact_obs")
    return_same_td = property(lambda self: False)
    extend_buffer = reset_when_done = property(lambda self: True)
    interruptor = property(lambda self: None)

    @property
    def device(self) -> torch.device | None:
        """The device of batches. None means the device of the workers, the CPU."""
        return self._settings.storing_device

    @property
    def closed(self) -> bool:
        """Whether :meth:`shutdown` was called or an error has ended the collector."""
        return self._crew.is_closed

    def getattr_policy(self, attr: str) -> Any:
        """Return an attribute of ``policy``, the learner's module."""
        return getattr(self.policy, attr)

    # ---- attributes and methods that TorchRL's trainers use

    @property
    def init_random_frames(self) -> int:
        """Number of frames with random actions. TorchRL's trainers start to learn after these
        frames."""
        return self._settings.init_random_frames

    def getattr_rb(self, attr: str) -> Any:
        """Return an attribute of ``replay_buffer``."""
        return getattr(self.replay_buffer, attr)

    def getattr_env(self, attr: str) -> Any:
        """Return an attribute of the first env; see :meth:`get_attr`."""
        return self.get_attr(attr, 0)[0]

    # ---- weights

    @property
    def policy_version(self) -> int:
        """Number of calls of ``update_policy_weights_`` so far."""
        return self._version

    def get_policy_version(self) -> int:
        """The same as :attr:`policy_version`."""
        return self._version

    def update_policy_weights_(
        self,
        policy_or_weights: Weights | Mapping[int, Weights] | None = None,
        *,
        weights: Weights | Mapping[int, Weights] | None = None,
        policy: nn.Module | None = None,
        worker_ids: int | Sequence[int] | None = None,
        model_id: str | None = None,
        weights_dict: Mapping[str, Weights] | None = None,
        **kwargs: Any,
    ) -> None:
        """Send weights to the workers. Every worker gets the weights before its next rollout. This
        method does not block.

        Args:
            policy_or_weights: the weights of all workers, as a module, a TensorDict or a (nested)
                state dict. A dict ``{0: ..., 1: ...}`` has the weights of each worker by worker
                index, and workers without an entry keep their weights. A dict ``{"policy": ...}``
                is accepted, too. The default is the policy that was given to the collector.
            weights, policy: other names of ``policy_or_weights``.
            worker_ids: indices of the workers that get the weights; by default, all workers.
            model_id: must be ``"policy"``, because the workers have no other model.
            weights_dict: a dict ``{"policy": ...}`` with the weights.

        Raises:
            ConfigurationError: there are no weights, the weights do not fit the policy, there are
                no workers with these indices, or an argument of TorchRL's collectors is not
                supported. If this error is raised, nothing has changed, not even the version.
        """
        self._crew.require_here()
        given = [x for x in (policy_or_weights, weights, policy, weights_dict) if x is not None]
        unsupported = [name for name, value in kwargs.items() if value is not None]
        if len(given) > 1:
            raise ConfigurationError(
                f"got {len(given)} arguments with weights; expected at most one of "
                "policy_or_weights=, weights=, policy= and weights_dict="
            )
        if unsupported:
            raise ConfigurationError(
                f"got the arguments {unsupported}, which this collector does not support; leave "
                "these arguments out"
            )
        if model_id not in (None, "policy") or not {"policy"} >= set(weights_dict or ()):
            raise ConfigurationError(
                f"model_id={model_id!r}, weights_dict={list(weights_dict or ())}; expected only "
                "'policy', because the workers have no other model"
            )
        source: Any = given[0] if given else self.policy
        version = self._version + 1
        had = {worker.index: worker.weights for worker in self._crew.workers}
        if _by_worker(source):
            if worker_ids is not None:
                raise ConfigurationError(
                    "got worker_ids= together with weights by worker index; pass either a dict of "
                    "weights by worker index, or the weights of one policy and worker_ids="
                )
            packed = {worker: self._pack(each, version) for worker, each in source.items()}
        else:
            chosen = [worker_ids] if isinstance(worker_ids, int) else worker_ids
            packed = dict.fromkeys(had if chosen is None else chosen, self._pack(source, version))
        if self._inference is not None and (worker_ids is not None or _by_worker(source)):
            raise ConfigurationError(
                f"got weights for the workers {list(packed)}; expected weights for all workers, "
                f"because {_ONE_POLICY}. Pass the weights of one policy without worker_ids="
            )
        if unknown := sorted(packed.keys() - had.keys()):
            raise ConfigurationError(
                f"got weights for the workers {unknown}, which do not exist; expected indices of "
                f"the existing workers {sorted(had)}"
            )
        if self._inference is not None:
            self._version = version
            self._inference.take_weights(packed[min(packed)])
            return
        module = self.policy if isinstance(self.policy, nn.Module) else None
        found: dict[tuple[int, int], PackedWeights] = {}  # usually has a single entry
        for worker, part in packed.items():
            case = id(part), id(had[worker])
            if case not in found:
                found[case] = completed(part, had[worker], module)
        whole = {worker: found[id(part), id(had[worker])] for worker, part in packed.items()}
        self._version = version
        self._crew.send_weights(whole)

    def _pack(self, source: Any, version: int) -> PackedWeights:
        if isinstance(source, Mapping) and set(source.keys()) == {"policy"}:
            if not isinstance(source["policy"], Tensor):
                source = source["policy"]
        if not isinstance(source, nn.Module | TensorDictBase | Mapping):
            raise ConfigurationError(
                f"no weights to send: got {type(source).__name__}; pass the learner's module to "
                "this call, or pass it to the collector as policy= (which you may combine with "
                "policy_factory=)"
            )
        packed = pack(source, version)
        if self._settings.policy_factories is None and source is not self.policy:
            if not isinstance(self.policy, nn.Module):
                raise ConfigurationError(
                    f"the workers' policy is a {type(self.policy).__name__}, which has no weights "
                    "to set; pass an nn.Module as policy= to the collector"
                )
            find_target(packed, self.policy)
        return packed

    # ---- iteration

    def __iter__(self) -> Iterator[Any]:
        self._iteration_started = True
        with self._shut_down_by_errors():
            yield from self.iterator()

    def iterator(self) -> Iterator[Any]:
        """Return an iterator over the remaining batches. Each ``next`` blocks at most
        ``timeout_s``."""
        while True:
            batch = self._next_batch()
            if batch is None:
                return
            yield batch

    def next(self) -> Any:
        """Return the next batch, or None after the last batch."""
        # No iterator is stored, because it would keep this collector alive.
        self._iteration_started = True
        with self._shut_down_by_errors():
            return self._next_batch()

    @contextlib.contextmanager
    def _shut_down_by_errors(self) -> Iterator[None]:
        try:
            yield
        # ``except DeadlineError`` could fail at the interpreter's exit, because an iterator may end
        # here after this module's names are gone.
        except Exception as error:
            if not isinstance(error, DeadlineError):  # rollouts continue after a DeadlineError
                self.shutdown(raise_on_error=False)
            raise

    def _next_batch(self) -> TensorDict | CollectReport | None:
        self._crew.require_here()
        if self.trajs_per_batch is None or self.replay_buffer is not None:
            return self._stored(self._next_rollouts())
        while len(self._trajectories) < self.trajs_per_batch:
            batch = self._next_rollouts()
            if batch is None:
                return None
            self._trajectories.add(batch)
            if self._settings.reset_at_each_iter:
                self._trajectories.forget_parts()
        take = self._trajectories.take_padded
        if self._settings.traj_format == "cat":
            take = self._trajectories.take_flat
        return self._stored(take(self.trajs_per_batch))

    def _stored(
        self, batch: TensorDict | CollectReport | None
    ) -> TensorDict | CollectReport | None:
        device = self._settings.storing_device
        if device is None or not isinstance(batch, TensorDictBase):
            return batch
        return batch.to(device)

    def _next_rollouts(self) -> TensorDict | CollectReport | None:
        begun = time.monotonic()
        if self._pulse is not None:
            self._pulse.waits()
        taken = self._crew.gather(self.timeout_s)
        if taken is None:
            return None
        self._iter += 1
        self._frames += sum(stats.frames for stats, _ in taken)
        known = CollectReport(
            total_frames=self._frames,
            total_frames_by_worker=self._crew.frames,
            policy_version=self._version,
            wait_s=time.monotonic() - begun,
            lost_workers=tuple(self._crew.lost),
        )
        self.report = summarize([stats for stats, _ in taken], known)
        for what in self.report.replaced:
            warnings.warn(f"replaced {what}", stacklevel=4)
        if self._pulse is not None:
            self._count()
            self._pulse.took(self.report.total_frames_by_worker)
        if self.replay_buffer is not None:
            return self.report
        rollouts = [rows for _, rows in taken if rows is not None]
        batch = join(rollouts, self.readiness.cuts, self._settings.cat_results or 0)
        return split_trajectories(batch, prefix="collector") if self.split_trajs else batch

    def _count(self) -> None:
        report = self.report
        for name in self._totals:
            self._totals[name] += getattr(report, name)
        for worker, seconds in report.collect_s.items():
            busy = seconds + report.write_s.get(worker, 0.0)
            self._busy_s[worker] = self._busy_s.get(worker, 0.0) + busy

    def _figures(self) -> dict[str, Any]:
        """Return the job's figures so far, which the command ``top`` shows. Another thread calls
        this method."""
        report = self.report
        rows = getattr(getattr(self.replay_buffer, "storage", None), "scratch_dir", None)
        return {
            "replay_dir": rows if isinstance(rows, str) else None,
            "frames": report.total_frames,
            "total_frames": self.total_frames,
            "in_background": self.is_running(),
            "frames_by_worker": dict(report.total_frames_by_worker),
            "busy_s_by_worker": dict(self._busy_s),
            "policy_version": report.policy_version,
            "policy_lag": report.policy_lag,
            **self._totals,
        }

    # ---- in the background

    def start(self) -> None:
        """Collect into the replay buffer in a separate thread, until ``total_frames`` frames are
        collected or :meth:`async_shutdown` is called. Meanwhile, the caller may update weights and
        call :meth:`stats`.

        If an env object was passed to the constructor, a separate thread steps this env from now
        on. If an env may only be used in the thread that made it, pass a function that makes the
        env instead of the env object.

        Raises:
            ConfigurationError: there is no ``replay_buffer``; or the caller's thread steps the
                envs, and this call is in another thread or in the middle of a rollout.
            Exception: the exception with which collection in the background ended.
        """
        if self.replay_buffer is None:
            raise ConfigurationError(
                "start() collects into a replay buffer, but this collector has none; pass "
                "replay_buffer= to the collector"
            )
        self._crew.require_open()
        if self._background is not None:
            self._background.raise_error()
        if not self.is_running():
            self._crew.move_to_own_thread()
            self._background = Background(self)
            if (session := self._session()) is not None:
                session.on_leave(self._background.stopper())

    def is_running(self) -> bool:
        """Whether a thread is collecting in the background."""
        return self._background is not None and self._background.running

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Pause collection, so that no env is stepped inside the ``with`` block. Entering the block
        waits at most ``timeout_s`` seconds, until the current rollouts have ended.

        Raises:
            DeadlineError: the rollouts did not end within ``timeout_s`` seconds.
            Exception: the exception with which collection in the background ended.
        """
        self._crew.require_here()
        with contextlib.ExitStack() as stack:
            if self._background is not None:
                stack.enter_context(self._background.between_batches(self.timeout_s))
            self._crew.require_open()
            stack.enter_context(self._crew.idle(self.timeout_s))
            yield

    def async_shutdown(self, timeout: float | None = None, close_env: bool = True) -> None:
        """Shut down as :meth:`shutdown` does.

        Raises:
            Exception: the exception with which collection in the background ended.
        """
        self.shutdown(timeout, close_env)
        if self._background is not None:
            self._background.raise_error()

    # ---- hooks

    @property
    def pre_collect_hook(self) -> Callable[[], Any] | None:
        """The function that is called before each rollout, in the process that makes the
        rollout."""
        return self._pre_collect_hook

    @pre_collect_hook.setter
    def pre_collect_hook(self, hook: Callable[[], Any] | None) -> None:
        self._set_hooks(hook, self._post_collect_hook)

    @property
    def post_collect_hook(self) -> Callable[[TensorDictBase], Any] | None:
        """The function that is called with the rows of each rollout, in the process that makes the
        rollout."""
        return self._post_collect_hook

    @post_collect_hook.setter
    def post_collect_hook(self, hook: Callable[[TensorDictBase], Any] | None) -> None:
        self._set_hooks(self._pre_collect_hook, hook)

    def _set_hooks(self, before: Any, behind: Any) -> None:
        self._crew.ask_all("set_hooks", (before, behind), timeout_s=self.timeout_s)
        self._pre_collect_hook, self._post_collect_hook = before, behind
        if self._replacer is not None:
            configs = self._replacer.configs
            self._replacer.configs = [replace(each, hooks=(before, behind)) for each in configs]

    # ---- methods of TorchRL's base class that this class refuses

    @property
    def weight_updater(self) -> None:
        """Always None, see :meth:`update_policy_weights_`."""
        return None

    @weight_updater.setter
    def weight_updater(self, value: Any) -> None:
        refuse({"weight_updater": value})

    def receive_weights(self, *args: Any, **kwargs: Any) -> None:
        """Always raise ConfigurationError, because the learner sends weights to the workers. Call
        :meth:`update_policy_weights_` at the learner instead."""
        raise ConfigurationError(
            "receive_weights() is not supported; call update_policy_weights_() at the learner"
        )

    def register_scheme_receiver(self, *args: Any, **kwargs: Any) -> None:
        """Always raise ConfigurationError, because there are no weight sync schemes. Call
        :meth:`update_policy_weights_` instead."""
        raise ConfigurationError(
            "weight sync schemes are not supported; call update_policy_weights_()"
        )

    def init_updater(self, *args: Any, **kwargs: Any) -> None:
        """Always raise ConfigurationError, because there is no weight updater. Call
        :meth:`update_policy_weights_` instead."""
        raise ConfigurationError("weight updaters are not supported; call update_policy_weights_()")

    def enable_profile(self, *args: Any, **kwargs: Any) -> None:
        """Always raise ConfigurationError, because rollouts run in other threads and processes.
        Profile rollouts there with ``pre_collect_hook`` and ``post_collect_hook``."""
        raise ConfigurationError(
            "enable_profile() is not supported, because the rollouts run in other threads and "
            "processes; start and stop a profiler there with pre_collect_hook= and "
            "post_collect_hook="
        )

    def fake_tensordict(self) -> TensorDictBase:
        """Always raise ConfigurationError, because the envs are on the workers. TorchRL's
        collectors with several workers also raise an error. Call :meth:`next` for a batch of real
        rows."""
        raise ConfigurationError(
            "fake_tensordict() is not supported, because the envs are on the workers, which make "
            "only real rows; call next() for a batch. A shared storage needs no example of its "
            "rows"
        )

    # ---- the rest of TorchRL's interface

    def stats(
        self, workers: Literal["aggregate", "per_worker", "both"] = "aggregate"
    ) -> dict[str, int | float | bool]:
        """Return counters, as TorchRL's collectors with several workers do. Any thread may call
        this method, because no worker is asked.

        Args:
            workers: ``"per_worker"`` and ``"both"`` include each worker's frames, as
                ``"worker_0/frames"``.
        """
        if workers not in ("aggregate", "per_worker", "both"):
            raise ConfigurationError(
                f"workers={workers!r}: expected 'aggregate', 'per_worker' or 'both'"
            )
        stats: dict[str, int | float | bool] = {}
        if workers != "per_worker":
            stats |= super().stats()
        stats["workers"] = self._num_workers
        stats["workers_alive"] = self._crew.alive
        if workers != "aggregate":
            stats |= {f"worker_{i}/frames": frames for i, frames in self._crew.frames.items()}
        return stats

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Seed all envs and start new episodes. Env i of the job gets the i-th seed of TorchRL's
        chain of seeds, no matter which worker steps env i. This method blocks until the current
        rollouts have ended.

        Returns:
            the seed that follows the seeds of all envs.
        """
        seed = choose_seed(seed)
        return self._crew.ask_all("set_seed", seed, static_seed, timeout_s=self.timeout_s)[0]

    def get_attr(self, name: str, env: int | None = None) -> list[Any]:
        """Return the values of an attribute of all envs of the job, in the order of the envs. If
        ``env`` is given, the list has only the value of the env with this number.

        The attribute is also found behind gymnasium's wrappers. This method, ``set_attr``, ``call``
        and ``render`` block until the rollouts in flight have ended.

        Raises:
            RemoteError: an env has no attribute of this name.
            ConfigurationError: no env has that number.
        """
        return self._visit(env, "get", name)

    def set_attr(self, name: str, value: Any, env: int | None = None) -> None:
        """Set an attribute of every env, or only of the env with number ``env``."""
        self._visit(env, "set", name, value)

    def call(self, method: str, *args: Any, env: int | None = None, **kwargs: Any) -> list[Any]:
        """Call a method of every env, such as ``reset_task``, or only of the env with number
        ``env``. Return a list with one result per env.

        Running episodes continue; to begin new ones, call :meth:`reset`.
        """
        return self._visit(env, "call", method, *args, **kwargs)

    def render(self, env: int = 0) -> Any:
        """Return the result of an env's ``render()``. ``make_env`` chooses the ``render_mode``."""
        return self._visit(env, "call", "render")[0]

    def reset(self, index: Any = None) -> None:
        """Start new episodes in all envs before the next rollout that is requested. Trajectories
        that wait to be completed or delivered are dropped. Rollouts that were begun ahead (see
        ``max_policy_lag``) are still delivered.

        Args:
            index: selects envs of the job, as an index into a tensor ``[envs]``: a number, several
                numbers, a slice or a mask. Only these envs begin new episodes, and only their
                unfinished trajectories are dropped. Vector envs that reset their envs themselves
                accept no index.

        Raises:
            ConfigurationError: ``index`` is not an index into the job's envs, or selects envs of a
                lost worker.
            RemoteError: the envs cannot be reset one by one.
        """
        if index is None:
            self._crew.ask_all("reset", timeout_s=self.timeout_s)
            self._trajectories.forget()
            return
        self._crew.require_open()
        size = self._crew.workers[0].num_envs
        try:
            chosen = np.arange(self._num_workers * size)[index].reshape(-1).tolist()
        except (IndexError, TypeError, ValueError) as error:
            raise ConfigurationError(
                f"index={index!r}: expected an index into the job's envs; there are "
                f"{self._num_workers} workers with {size} envs each"
            ) from error
        by_worker: dict[int, list[int]] = {}
        for env in dict.fromkeys(chosen):
            by_worker.setdefault(env // size, []).append(env % size)
        asked = f"index={index!r}"
        handles = {number: self._living(number, asked) for number in by_worker}
        for handle, envs in zip(handles.values(), by_worker.values(), strict=True):
            abandoned = handle.call("reset", envs, timeout_s=self.timeout_s)
            self._trajectories.forget_parts(abandoned)

    def _living(self, number: int, asked: str) -> Handle:
        workers = {worker.index: worker for worker in self._crew.workers if not worker.lost}
        if number not in workers:
            raise ConfigurationError(
                f"{asked} selects an env of a lost worker, or an env that does not exist; expected "
                f"an env of the living workers {sorted(workers)}, which have "
                f"{self._crew.workers[0].num_envs} envs each"
            )
        return workers[number].handle

    def _visit(self, env: int | None, what: str, name: str, *args: Any, **kwargs: Any) -> list[Any]:
        if env is None:
            answers = self._crew.ask_all(
                "visit_envs", None, what, name, args, kwargs, timeout_s=self.timeout_s
            )
            return [result for results in answers for result in results]
        self._crew.require_open()
        size = self._crew.workers[0].num_envs
        return self._living(env // size, f"env={env}").call(
            "visit_envs", env % size, what, name, args, kwargs, timeout_s=self.timeout_s
        )

    def state_dict(self) -> OrderedDict[Any, Any]:
        """Return the progress as a small dict. The dict contains no states of envs, so the envs
        start new episodes after loading. The dict contains no weights either, so the caller must
        save the weights."""
        return OrderedDict(
            frames=self._frames, batches=self._iter + 1, policy_version=self._version, run=self._run
        )

    def load_state_dict(self, state_dict: Mapping[str, int]) -> None:
        """Continue the counts of a saved collector. Load the policy's weights first, because this
        call sends the policy's weights to the workers.

        Trajectories get new ids, which are larger than the ids of all earlier runs.

        Raises:
            ConfigurationError: this collector was already iterated, or ``state_dict`` is not a
                result of :meth:`state_dict`. In this case, nothing has changed.
        """
        self._crew.require_here()
        if self._crew.budget.begun:
            raise ConfigurationError(
                "load_state_dict() was called after the first batch was requested; call "
                "load_state_dict() before the first batch"
            )
        try:
            frames, batches, version, run = (
                int(state_dict[name]) for name in ("frames", "batches", "policy_version", "run")
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigurationError(
                f"load_state_dict() got {state_dict!r:.200}; expected a result of a collector's "
                "state_dict()"
            ) from error
        self._frames, self._iter, self._version = frames, batches - 1, version
        self._run = max(run + 1, int(time.time()) - _RUN_EPOCH_S)
        self._crew.budget.assigned = max(self._crew.budget.assigned, self._frames)
        if self.total_frames >= 0:
            self._crew.budget.remaining = max(0, self.total_frames - self._frames)
        if isinstance(self.policy, nn.Module):
            packed = pack(self.policy, self._version)
            if self._inference is not None:
                self._inference.take_weights(packed)
            else:
                self._crew.send_weights({worker.index: packed for worker in self._crew.workers})
        base = self._run << _RUN_SHIFT
        if self._replacer is not None:
            self._replacer.trajectory_base = base
        self._crew.ask_all("set_trajectory_base", base, timeout_s=self.timeout_s)

    def shutdown(
        self,
        timeout: float | None = None,
        close_env: bool = True,
        raise_on_error: bool = True,
    ) -> None:
        """Stop the rollouts in flight after their current step, and close all envs. Idempotent.
        This method blocks at most ``timeout`` seconds (default 10), even if workers are dead or
        hang. In a forked child, this method does nothing, because the workers belong to the parent
        process.

        Args:
            close_env: False leaves the envs open, for example if the caller still uses an env that
                was given to the constructor.

        Raises:
            RemoteError: closing an env raised an exception, and ``raise_on_error`` is True.
        """
        self._abandoned.detach()
        if not self._crew.is_here:
            return  # in a forked child
        if self._pulse is not None:
            self._pulse.close()
        until = time.monotonic() + (_SHUTDOWN_S if timeout is None else timeout)
        if self._background is not None:
            self._background.stop()
        errors = self._crew.close(until - time.monotonic(), close_env)
        if self._inference is not None:
            self._inference.close(until - time.monotonic())
        self._settings = self._settings.without_parts()
        if self._background is not None:
            self._background.join(until - time.monotonic())
        if errors and raise_on_error:
            raise errors[0]

    def __enter__(self) -> RPCBatchedCollector:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        self.shutdown(raise_on_error=error is None)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ConfigurationError(
            "a collector cannot be copied or pickled, because its envs and workers belong to this "
            "process: build another collector in the process that needs one, and pass the "
            "state_dict() of this collector to it"
        )

    def __repr__(self) -> str:
        alive = self._crew.alive
        return (
            f"{type(self).__name__}(workers={alive}, frames_per_batch={self.frames_per_batch}, "
            f"readiness={self.readiness}, max_policy_lag={self.max_policy_lag})"
        )


def _place(session: Session | None) -> tuple[int, int]:
    """Return the index of this collector among the collectors of the job, and how many collectors
    the job has. The result assumes that each process of this role, or each rank of a job without a
    session, builds one collector."""
    if session is not None:
        return session.me.index, len(session.of_role(session.role))
    with contextlib.suppress(ConfigurationError):  # the environment variables may be invalid
        world = World.from_env()
        return world.global_rank, world.world_size
    return 0, 1


def _close_soon(crew: Crew, inference: LearnerInference | None) -> None:
    """Close the workers of a collector that was not shut down. A new thread closes the workers,
    because garbage collection may call this function anywhere, even while locks are held."""
    if not crew.is_here:
        return  # the collector may still be in use in the parent

    def close() -> None:
        with contextlib.suppress(ConfigurationError):
            crew.close(_SHUTDOWN_S)
        if inference is not None:
            inference.close(_SHUTDOWN_S)

    if crew.in_callers_thread:
        # Garbage collection may run in a thread that must not close the envs. ``close`` then closes
        # nothing, and garbage collection frees the envs.
        close()
        return
    threading.Thread(target=close, name="torchrl_dist-close", daemon=True).start()


def _by_worker(source: Any) -> bool:
    """Whether ``source`` is a dict of weights by worker index. (A TensorDict is a Mapping, too, but
    its keys are strings.)"""
    keys = list(source.keys()) if isinstance(source, Mapping) else []
    return bool(keys) and all(type(key) is int for key in keys)
