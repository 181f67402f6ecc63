"""A TorchRL collector whose workers are other processes of the session."""

from __future__ import annotations

import contextlib
import threading
import time
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
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
from torchrl_dist.weights import PackedWeights, completed, find_target, pack

Weights: TypeAlias = nn.Module | TensorDictBase | Mapping[str, Any]

_SHUTDOWN_S = 10.0
_ONE_POLICY = "with inference='learner' all have one policy, the learner's"
# Trajectory ids of a resumed job start above all that earlier runs can have given out.
_RUN_EPOCH_S = 1_704_067_200  # 2024-01-01
_RUN_SHIFT = 32


class RPCBatchedCollector(BaseCollector):
    """Collects with the workers of a session, T steps of all of a worker's envs per message.

    Iterating yields a TensorDict ``[N, T]`` per batch, joined along the envs, with the keys of
    TorchRL's ``Collector`` and ``"policy_version"``, ``("collector", "worker_index")`` and
    ``("collector", "traj_ids")``, which are unique in the job. With ``replay_buffer`` the workers
    write their rows there themselves, and iterating yields a :class:`CollectReport`. The report of
    the last batch is ``collector.report`` in both cases. Iteration ends at ``total_frames``, or
    after the batch at hand when the session was told to stop (``session.stop_requested``), except
    where several processes have this one's role, who must agree after which update they stop.

    Args:
        make_env: a gymnasium id, or a callable that returns a ``gymnasium.Env``, a
            ``gymnasium.vector.VectorEnv`` or a TorchRL env. Called on the workers; may be a lambda.
            A list has one for each worker. Also known as ``create_env_fn``. An env itself will do
            for the only worker, in this process. Every call must make another env. A vector env of
            torch tensors, on the CPU or a GPU, may also be one as Isaac Lab's, which is no
            ``VectorEnv``. An env is made, stepped and closed in one thread: that of the caller for
            the only worker in this process without ``replay_buffer``, the main thread of a rank or
            env process otherwise, or a thread of its own (see the guide).
            Workers know the gymnasium environments that are registered in this process.
            An EnvPool is seeded only when it is made: pass ``seed=np.random.randint(2**31)`` to
            ``envpool.make``; NumPy's seed there follows from ``seed`` and differs per worker.
        policy: the learner's module; each worker gets a copy on its CPU, and a new state of it
            after ``update_policy_weights_()``. None (and no factory): random actions. Lazy layers
            that were never called get their shapes here, for which an env is built and closed.
        session: where the workers live; None: one worker in this process.
        frames_per_batch: frames that a batch is to have. T is this, divided by the rollouts of a
            batch (the number of workers; ``FirstReady``: 1) and by the envs of a worker, rounded
            up, with a warning if that makes batches larger. None: T follows from how long a step
            takes, which is measured at the start (the envs begin anew afterwards): a rollout lasts
            about half a second (longer where more than four processes share a core) and has at most
            8 MiB, or is one step. Short rollouts cost a message each, a millisecond of the
            learner and two of the worker; the attribute tells what came of it.
        total_frames: iteration ends after exactly so many; -1: never. The last batches are shorter.
        policy_factory: ``(worker_index, num_workers) -> policy``, called on each worker instead
            of copying ``policy``; one that needs no arguments (and has no ``worker_index``) is
            called without. A list has one for each worker. The weights of ``policy``, if that is
            given, go into the worker's module or the part of it that they fit.
        num_envs: envs per process; a vector env brings its own number.
        env_processes: 0: a worker steps its envs itself. K: in K processes of its node, which
            send one rollout together; then one worker per node is enough. One of them that dies is
            replaced (a warning; what it had not handed in is collected again), but its third death
            in a row is an error. They are forked from a server.
        step_timeout_s: an env process that makes no step for so long (it hangs, or was paused) is
            killed and replaced; default: never.
        workers: peers to use; default ``session.of_role("collector")``, or this process if there
            are none.
        readiness: when a batch is complete: ``WaitAll()``, ``FirstReady()``, ``Quorum(...)`` or
            ``Preempt(...)``.
        max_policy_lag: 0: while the caller has a batch no new rollout begins, so that (with
            ``WaitAll``) all data come from the newest weights. k: meanwhile every worker may
            collect up to k rollouts ahead and then waits; with ``WaitAll`` and one update per
            batch, data are at most k versions old. A worker of the caller's own process never runs
            ahead: TorchRL's exploration type, which it sets, is one per process.
        replay_buffer: pickled to the workers, where ``extend(rows.reshape(-1))`` is called; over a
            ``SharedMemmapStorage``, unless the worker is this process.
        inference: where the policy runs: ``"worker"``, or ``"learner"``: workers send the
            observations of each step and get actions, from a copy of ``policy`` on the learner's
            CPU that ``update_policy_weights_()`` updates. For workers that cannot hold the policy.
        env_groups: with ``inference="learner"``: the envs of a worker, or of each of its env
            processes, are divided into so many groups, and one is stepped while the others wait
            for actions.
        trajs_per_batch: batches are so many complete trajectories ``[trajs_per_batch, longest]``,
            zero-padded, with ``("collector", "mask")``, as TorchRL's. What is unfinished at
            ``total_frames``, or makes no whole batch, is not delivered. With ``replay_buffer`` each
            complete trajectory is written there, by itself and unpadded, by the process that made
            it, and batches are rollouts.
        traj_format: ``"cat"``: these trajectories one behind the other, ``[steps of all]``;
            ``"padded"`` (default): as above.
        split_trajs: each batch through TorchRL's ``split_trajectories``.
        postproc: rollout ``[N, T]`` -> rows, run on the worker.
        postproc_factory: ``policy of the worker -> postproc``, called there once.
        seed: of all envs and of the workers' random numbers; default: drawn from torch's, and
            TorchRL envs stay seeded as ``make_env`` left them, as in TorchRL's collectors. Env i
            of the job gets the i-th seed of TorchRL's chain, however the job is divided. A vector
            env that takes one seed for all its envs is therefore refused (but gymnasium's native
            CartPole, which is given them one by one, and EnvPools, with a warning).
        min_workers: with fewer living workers, iteration raises.
        worker_timeout_s: a worker whose rollout takes longer (it hangs, or was paused) counts as
            lost until it answers: others collect its frames, its late rows are dropped (with
            ``replay_buffer`` they are in the buffer, beyond ``total_frames``), and it begins new
            episodes. Default: never.
        replace_lost: under ``local_cluster`` a worker whose process died is replaced: its envs then
            run in new processes that this one forks and speaks with, in new episodes. Its third
            successor is its last. Meanwhile the others collect.
        timeout_s: bounds the wait for each batch as a whole, and other calls; default the
            session's, which also bounds building the workers.
        categorical_action_encoding: as in TorchRL's ``GymEnv``; for gymnasium envs.
        init_random_frames: batches act at random until so many frames have been collected, those
            of a resumed job and rows in ``replay_buffer`` included; what the policy writes beside
            the action is zero there.
        create_env_kwargs: for ``make_env``; a list has one dict for each worker.
        reset_at_each_iter: each rollout begins new episodes.
        max_frames_per_traj: episodes are truncated after so many steps, and rows have
            ``"step_count"``. Not for vector envs.
        set_truncated: the last step of each rollout is marked as truncated and done.
        track_policy_version: True writes ``("next", "policy_version")`` beside
            ``"policy_version"``, as TorchRL does; False leaves both out.
        pre_collect_hook, post_collect_hook: called before a rollout, and behind it with its rows,
            in the process that makes it.
        cat_results: ``"stack"`` gives batches ``[workers, N, T]``; 0, 1 or -1 is the dimension
            along which the workers' rollouts are joined. Default: 0, where TorchRL's
            ``MultiSyncCollector`` stacks.
        preemptive_threshold: once this part of the workers is ready the others stop: short for
            ``readiness=Preempt(...)``.
        device, storing_device: where batches are put. The workers themselves run on the CPU.
        compile_policy, cudagraph_policy: as in TorchRL's collectors: true, or the arguments of
            ``torch.compile`` (and ``warmup``) and ``CudaGraphModule``, through which every process
            that runs the policy calls it.
        **torchrl: arguments of TorchRL's collectors that have no meaning here. Those that ask for
            something are refused with the reason (``torchrl_dist/collect/learner/arguments.py``).

    Raises:
        ConfigurationError: arguments that cannot work together; ``make_env`` makes one env twice.
        RemoteError: building a worker failed; carries host and traceback.

    Iterating raises:
        DeadlineError: no batch within ``timeout_s``; names who is waited for. Nothing is lost:
            iterate again to go on. In the caller's own thread the envs are asked after each step,
            so that a step that never ends is ended by Ctrl-C only.
        RemoteError: an env or the policy raised on a worker; the collector is shut down.
        PeerLostError: fewer than ``min_workers`` are alive; the collector is shut down. Up to that,
            the death of a worker is one warning, ``report.lost_workers``, and smaller batches;
            the frames that it had not delivered are collected by the others.

    Example:
        >>> collector = RPCBatchedCollector(
        ...     "CartPole-v1", None, num_envs=4, frames_per_batch=32, total_frames=64
        ... )
        >>> for batch in collector:  # [N, T]; here in this process, with ``session`` in others
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
        given = dict(locals())  # what Settings takes as it is goes by the same names
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
        """What is known before there are workers."""
        self._settings = settings
        self._num_workers = settings.num_workers
        self.readiness: Readiness = settings.readiness
        self.trajs_per_batch = settings.trajs_per_batch
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
        self._sent: dict[int, PackedWeights] = {}  # the last ones, by worker
        self._version = 0
        self._frames = 0
        self._iter = -1  # as TorchRL counts: batches delivered, less one
        self._run = 0
        self._totals = dict.fromkeys(("wait_s", "messages", "data_bytes"), 0.0)
        self._busy_s: dict[int, float] = {}

    def _start(self, session: Session | None, peers: Sequence[Peer]) -> None:
        """Build the workers; blocks until they are there."""
        settings, policy = self._settings, self.policy
        if isinstance(policy, nn.Module):
            initialize(
                policy,
                settings.make_envs[0],
                close=not isinstance(settings.make_envs[0], GivenEnv),
                exploration_type=settings.exploration_type,
                categorical_action_encoding=settings.categorical_action_encoding,
            )
        # Packing also refuses a policy that cannot be packed, at once.
        initial = pack(policy, 0) if isinstance(policy, nn.Module) else None
        config = settings.worker_config()
        if settings.inference == "learner":
            config = self._infer_here(session, peers, config)
        try:
            self._crew = self._start_crew(session, peers, config)
        except BaseException:
            if self._inference is not None:
                self._inference.close(_SHUTDOWN_S)
            raise
        self._abandoned = weakref.finalize(self, _close_soon, self._crew, self._inference)
        self._abandoned.atexit = False  # the process takes everything with it
        if initial is not None and settings.policy_factories is not None:
            self._send_weights({worker.index: initial for worker in self._crew.workers})
        self._pulse = None if session is None else Pulse(session, peers, self._figures)
        self._note_frames()

    def _note_frames(self) -> None:
        """How many a batch has, now that the workers have said how many envs they step."""
        first, asked = self._crew.workers[0], self._settings.frames_per_batch
        rollouts = self._settings.rollouts_per_batch
        self.frames_per_batch = rollouts * first.num_envs * first.steps
        self._check_workers()
        self.requested_frames_per_batch = asked or self.frames_per_batch
        if self.frames_per_batch > self.requested_frames_per_batch:
            warnings.warn(
                f"frames_per_batch={asked} is no multiple of {rollouts} rollouts x "
                f"{first.num_envs} envs: batches will have {self.frames_per_batch}",
                stacklevel=4,
            )

    def _infer_here(
        self,
        session: Session | None,
        peers: Sequence[Peer],
        config: WorkerConfig,
    ) -> WorkerConfig:
        """Keep the policy in this process; returns what the workers are built from then."""
        policy = self.policy
        unfit = {
            "policy_factory": self._settings.policy_factories,
            "postproc_factory": self._settings.postproc_factory,
            "readiness": self.readiness.cuts,
        }
        check_inference(session, peers, policy, unfit)
        assert session is not None and isinstance(policy, nn.Module)
        self._inference = LearnerInference(
            session, policy, config.exploration_type, config.compilation
        )
        groups = min(self._settings.env_groups, config.num_envs)
        asked = Inference(self._inference.handle, self._inference.inputs, groups, self.timeout_s)
        return replace(config, policy=None, inference=asked)

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
        self, session: Session | None, peers: Sequence[Peer], config: WorkerConfig
    ) -> Crew:
        limit_s = self.timeout_s if session is None else max(self.timeout_s, session.timeout_s)
        config = replace(config, call_timeout_s=limit_s)
        self._replacer = None
        if self._settings.replace_lost:
            self._replacer = Replacer(session, config, self.max_policy_lag)
        workers, lost, errors = start_workers(
            session, peers, config, max_ahead=self.max_policy_lag, limit_s=limit_s
        )
        random_frames = self._settings.init_random_frames
        budget = FrameBudget(
            self.total_frames if self.total_frames >= 0 else None, self.readiness.in_rounds
        )
        # TorchRL counts what the buffer has been given, by whomever.
        budget.assigned = getattr(self.replay_buffer, "write_count", 0) if random_frames else 0
        crew = Crew(
            workers,
            lost,
            budget,
            self.readiness,
            self.min_workers,
            self.worker_timeout_s,
            random_frames,
            # Several learners must stop after the same update: see DistributedLoss.ranks.
            stopped=(lambda: session.stop_requested)
            if session is not None and len(session.of_role(session.role)) == 1
            else None,
            replacer=self._replacer,
        )
        if not errors and len(workers) < self.min_workers:
            errors = [
                PeerLostError(
                    f"{len(workers)} of {config.num_workers} workers could be started, "
                    f"min_workers={self.min_workers}"
                )
            ]
        if errors:
            crew.close(_SHUTDOWN_S)
            raise errors[0]
        return crew

    # ---- what TorchRL's trainers ask for

    @property
    def init_random_frames(self) -> int:
        """Frames that act at random first; TorchRL's trainers learn from then on."""
        return self._settings.init_random_frames

    def getattr_rb(self, attr: str) -> Any:
        """An attribute of ``replay_buffer``."""
        return getattr(self.replay_buffer, attr)

    def getattr_env(self, attr: str) -> Any:
        """An attribute of the first env; see :meth:`get_attr`."""
        return self.get_attr(attr, 0)[0]

    # ---- weights

    @property
    def policy_version(self) -> int:
        """Number of calls of ``update_policy_weights_`` so far."""
        return self._version

    def get_policy_version(self) -> int:
        """As :attr:`policy_version`."""
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
        """Pack the weights once; every worker gets them before its next rollout. Does not block.

        Args:
            policy_or_weights: a module, a TensorDict or a (nested) state dict; as ``{0: ..., 1:
                ...}`` by worker index, where workers that are not named keep theirs; or as
                ``{"policy": ...}``. Default: the policy given to the collector.
            weights, policy: the same by another name.
            worker_ids: the workers that are to get them; default: all.
            model_id: ``"policy"``, the only model here.
            weights_dict: ``{"policy": ...}``.

        Raises:
            ConfigurationError: no weights, or some that do not fit the policy; workers that are not
                there; an option of TorchRL's collectors that has no meaning here. Then nothing has
                changed, the version neither.
        """
        self._crew.require_here()
        given = [x for x in (policy_or_weights, weights, policy, weights_dict) if x is not None]
        unsupported = [name for name, value in kwargs.items() if value is not None]
        if len(given) > 1 or unsupported:
            raise ConfigurationError(
                f"expected one source of weights, got {len(given)}; not supported: {unsupported}"
            )
        if model_id not in (None, "policy") or not {"policy"} >= set(weights_dict or ()):
            raise ConfigurationError(
                f"model_id={model_id!r}, weights_dict={list(weights_dict or ())}: the workers have "
                "one model, 'policy'"
            )
        source: Any = given[0] if given else self.policy
        version = self._version + 1
        by_worker: dict[tuple[int, ...] | None, PackedWeights] = {}
        if _by_worker(source):
            if worker_ids is not None:
                raise ConfigurationError("weights by worker index do not go with worker_ids=")
            for worker, each in source.items():
                by_worker[(worker,)] = self._pack(each, version)
        else:
            chosen = (worker_ids,) if isinstance(worker_ids, int) else worker_ids
            packed = self._pack(source, version)
            by_worker[None if chosen is None else tuple(chosen)] = packed
        known = {worker.index for worker in self._crew.workers}
        for workers in by_worker:
            if workers is not None and (self._inference is not None or not known >= set(workers)):
                raise ConfigurationError(
                    f"weights for workers {list(workers)}: "
                    + (f"there are {sorted(known)}" if self._inference is None else _ONE_POLICY)
                )
        if self._inference is not None:
            self._version = version
            for packed in by_worker.values():
                self._inference.take_weights(packed)
            return
        whole: dict[int, PackedWeights] = {}
        for workers, packed in by_worker.items():
            whole |= self._completed(packed, known if workers is None else workers)
        self._version = version
        self._send_weights(whole)

    def _completed(
        self, packed: PackedWeights, workers: Collection[int]
    ) -> dict[int, PackedWeights]:
        """By worker, with what it was sent before where that is not replaced."""
        module = self.policy if isinstance(self.policy, nn.Module) else None
        pending = self._crew.pending
        found: dict[tuple[int, bool], PackedWeights] = {}  # mostly one
        whole = {}
        for worker in workers:
            before = self._sent.get(worker)
            case = id(before), worker in pending
            if case not in found:
                found[case] = completed(packed, before, module, pending=case[1])
            whole[worker] = found[case]
        return whole

    def _pack(self, source: Any, version: int) -> PackedWeights:
        if isinstance(source, Mapping) and set(source.keys()) == {"policy"}:
            if not isinstance(source["policy"], Tensor):
                source = source["policy"]
        if not isinstance(source, nn.Module | TensorDictBase | Mapping):
            raise ConfigurationError(
                "no weights to send: pass the learner's module as policy= to the collector "
                f"(also with policy_factory=), or to this call; got {type(source).__name__}"
            )
        packed = pack(source, version)
        if self._settings.policy_factories is None and source is not self.policy:
            if not isinstance(self.policy, nn.Module):
                raise ConfigurationError(
                    f"the workers' policy is {type(self.policy).__name__}, which has no weights to "
                    "set: pass an nn.Module as policy= to the collector"
                )
            find_target(packed, self.policy)
        return packed

    def _send_weights(self, whole: Mapping[int, PackedWeights]) -> None:
        self._sent.update(whole)
        self._crew.send_weights(whole)

    # ---- iteration

    def __iter__(self) -> Iterator[Any]:
        self._iteration_started = True
        with self._shut_down_by_errors():
            yield from self.iterator()

    def iterator(self) -> Iterator[Any]:
        """The batches that are left; each ``next`` blocks at most ``timeout_s``."""
        while True:
            batch = self._next_batch()
            if batch is None:
                return
            yield batch

    def next(self) -> Any:
        """The next batch, or None after the last."""
        # Without an iterator that is kept, which would keep this collector.
        self._iteration_started = True
        with self._shut_down_by_errors():
            return self._next_batch()

    @contextlib.contextmanager
    def _shut_down_by_errors(self) -> Iterator[None]:
        try:
            yield
        except DeadlineError:
            raise  # the rollouts go on, and so may the caller
        except Exception:
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
        self.report = summarize(
            [stats for stats, _ in taken],
            total_frames=self._frames,
            total_frames_by_worker=self._crew.frames,
            policy_version=self._version,
            wait_s=time.monotonic() - begun,
            lost_workers=self._crew.lost,
        )
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
        """For ``top``, of the job so far; called by another thread."""
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
        """Collect into the replay buffer in a thread, until ``total_frames`` are there or
        :meth:`async_shutdown`. Weights may be updated meanwhile, and :meth:`stats` asked.

        Raises:
            ConfigurationError: there is no ``replay_buffer``, or the env was made already, in
                another thread than the one that would step it.
            Exception: what collection in the background ended with.
        """
        if self.replay_buffer is None:
            raise ConfigurationError("start() collects into replay_buffer=, and there is none")
        self._crew.require_open()
        if self._background is not None:
            self._background.raise_error()
        if not self.is_running():
            if self._crew.in_callers_thread:
                raise ConfigurationError(
                    "start() collects in a thread of its own, and this env was made in another "
                    "one; pass a function that makes it, such as make_env=lambda: MyEnv()"
                )
            self._background = Background(self)
            if (session := self._session()) is not None:
                session.on_leave(self._background.stopper())

    def is_running(self) -> bool:
        """Whether a thread collects."""
        return self._background is not None and self._background.running

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """No env is stepped inside: waits for the rollouts under way, at most ``timeout_s``.

        Raises:
            DeadlineError: they did not end in time.
            Exception: what collection in the background ended with.
        """
        self._crew.require_here()
        with contextlib.ExitStack() as stack:
            if self._background is not None:
                stack.enter_context(self._background.between_batches(self.timeout_s))
            self._crew.require_open()
            stack.enter_context(self._crew.idle(self.timeout_s))
            yield

    def async_shutdown(self, timeout: float | None = None, close_env: bool = True) -> None:
        """As :meth:`shutdown`.

        Raises:
            Exception: what collection in the background ended with.
        """
        self.shutdown(timeout, close_env)
        if self._background is not None:
            self._background.raise_error()

    # ---- hooks

    @property
    def pre_collect_hook(self) -> Callable[[], Any] | None:
        """Called before each rollout, where it is made."""
        return self._pre_collect_hook

    @pre_collect_hook.setter
    def pre_collect_hook(self, hook: Callable[[], Any] | None) -> None:
        self._set_hooks(hook, self._post_collect_hook)

    @property
    def post_collect_hook(self) -> Callable[[TensorDictBase], Any] | None:
        """Called behind each rollout, where it is made, with its rows."""
        return self._post_collect_hook

    @post_collect_hook.setter
    def post_collect_hook(self, hook: Callable[[TensorDictBase], Any] | None) -> None:
        self._set_hooks(self._pre_collect_hook, hook)

    def _set_hooks(self, before: Any, behind: Any) -> None:
        self._crew.ask_all("set_hooks", (before, behind), timeout_s=self.timeout_s)
        self._pre_collect_hook, self._post_collect_hook = before, behind
        if self._replacer is not None:
            self._replacer.config = replace(self._replacer.config, hooks=(before, behind))

    # ---- what TorchRL's base class offers and this one has another way for

    @property
    def weight_updater(self) -> None:
        """None: see :meth:`update_policy_weights_`."""
        return None

    @weight_updater.setter
    def weight_updater(self, value: Any) -> None:
        refuse({"weight_updater": value})

    def receive_weights(self, *args: Any, **kwargs: Any) -> None:
        """Refuses: call :meth:`update_policy_weights_` at the learner."""
        raise ConfigurationError("receive_weights: call update_policy_weights_() at the learner")

    def register_scheme_receiver(self, *args: Any, **kwargs: Any) -> None:
        """Refuses: there are no weight sync schemes; call :meth:`update_policy_weights_`."""
        raise ConfigurationError("there are no weight sync schemes: call update_policy_weights_()")

    def init_updater(self, *args: Any, **kwargs: Any) -> None:
        """Refuses: there is no weight updater; call :meth:`update_policy_weights_`."""
        raise ConfigurationError("there is no weight updater: call update_policy_weights_()")

    def enable_profile(self, *args: Any, **kwargs: Any) -> None:
        """Refuses: the rollouts run elsewhere; profile them with ``pre_collect_hook`` and
        ``post_collect_hook``."""
        raise ConfigurationError(
            "enable_profile: the rollouts run in other threads and processes; profile there, with "
            "pre_collect_hook= and post_collect_hook="
        )

    # ---- the rest of TorchRL's interface

    def stats(
        self, workers: Literal["aggregate", "per_worker", "both"] = "aggregate"
    ) -> dict[str, int | float | bool]:
        """Counters, as TorchRL's collectors with several workers answer it; asks nobody, so that
        any thread may call it.

        Args:
            workers: with ``"per_worker"`` or ``"both"`` also each worker's frames, as
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
        chain, whichever worker it belongs to. Blocks; a rollout in flight ends first.

        Returns:
            the seed after those used.
        """
        seed = choose_seed(seed)
        return self._crew.ask_all("set_seed", seed, static_seed, timeout_s=self.timeout_s)[0]

    def get_attr(self, name: str, env: int | None = None) -> list[Any]:
        """An attribute of every env of the job in their order, or of one, as a list. Looked up
        through gymnasium's wrappers; blocks until the rollouts in flight have ended, as the next
        three do.

        Raises:
            RemoteError: there is no such attribute.
            ConfigurationError: no env has that number.
        """
        return self._visit(env, "get", name)

    def set_attr(self, name: str, value: Any, env: int | None = None) -> None:
        """Set an attribute of every env, or of one."""
        self._visit(env, "set", name, value)

    def call(self, method: str, *args: Any, env: int | None = None, **kwargs: Any) -> list[Any]:
        """Call a method of every env, or of one, such as ``reset_task``; a result per env.

        Running episodes go on; see :meth:`reset`.
        """
        return self._visit(env, "call", method, *args, **kwargs)

    def render(self, env: int = 0) -> Any:
        """What ``render()`` of that env returns; ``make_env`` chooses the ``render_mode``."""
        return self._visit(env, "call", "render")[0]

    def reset(self, index: Any = None) -> None:
        """Start new episodes in all envs before the next rollout that is asked for. Trajectories
        that wait to be completed or delivered are dropped. Rollouts that were begun ahead (see
        ``max_policy_lag``) still come.

        Args:
            index: of the job's envs in their order, as for a tensor ``[envs]``: a number, several,
                a slice or a mask. Only these begin anew, and only their unfinished trajectories
                are dropped. Not for vector envs that reset their envs themselves.

        Raises:
            ConfigurationError: there are no such envs.
            RemoteError: they cannot be reset one by one.
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
                f"index={index!r}: there are {self._num_workers} workers with {size} envs each"
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
                f"{asked}: the living workers {sorted(workers)} have "
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
        """Progress, small and plain. Envs start anew on loading; weights are the caller's."""
        return OrderedDict(
            frames=self._frames, batches=self._iter + 1, policy_version=self._version, run=self._run
        )

    def load_state_dict(self, state_dict: Mapping[str, int]) -> None:
        """Go on counting where a saved collector stopped. Load the policy's own weights first:
        they are sent from here on.

        Trajectories get new ids, above those of all earlier runs.

        Raises:
            ConfigurationError: this collector has been iterated already, or that is not what
                ``state_dict`` returned; nothing has changed.
        """
        self._crew.require_here()
        if self._crew.budget.begun:
            raise ConfigurationError("load_state_dict comes before the first batch")
        try:
            frames, batches, version, run = (
                int(state_dict[name]) for name in ("frames", "batches", "policy_version", "run")
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigurationError(
                f"load_state_dict takes what a collector's state_dict() returned, got "
                f"{state_dict!r:.200}"
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
                self._send_weights({worker.index: packed for worker in self._crew.workers})
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
        """Stop the rollouts in flight after their current step and close all envs. Idempotent;
        blocks at most ``timeout`` seconds (default 10), dead or stuck workers or not. In a forked
        child it does nothing: the workers are the parent's.

        Args:
            close_env: False lets envs be that others hold as well, such as one that was given to
                the constructor.

        Raises:
            RemoteError: an env raised as it was closed, unless ``raise_on_error`` is False.
        """
        self._abandoned.detach()
        if not self._crew.is_here:
            return  # it is not a forked child's to end
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
            "process: build one where it is needed, and hand over its state_dict()"
        )

    def __repr__(self) -> str:
        alive = self._crew.alive
        return (
            f"{type(self).__name__}(workers={alive}, frames_per_batch={self.frames_per_batch}, "
            f"readiness={self.readiness}, max_policy_lag={self.max_policy_lag})"
        )


def _close_soon(crew: Crew, inference: LearnerInference | None) -> None:
    """For a collector that nobody shut down. In a thread: it may be collected as garbage anywhere,
    also where locks are held."""
    if not crew.is_here:
        return  # the parent still has it, perhaps

    def close() -> None:
        with contextlib.suppress(ConfigurationError):
            crew.close(_SHUTDOWN_S)
        if inference is not None:
            inference.close(_SHUTDOWN_S)

    if crew.in_callers_thread:
        close()  # or, found by another thread's garbage collection, let the envs be garbage, too
        return
    threading.Thread(target=close, name="torchrl_dist-close", daemon=True).start()


def _by_worker(source: Any) -> bool:
    """Whether these are weights by the indices of workers (a TensorDict is a Mapping, too)."""
    keys = list(source.keys()) if isinstance(source, Mapping) else []
    return bool(keys) and all(type(key) is int for key in keys)
