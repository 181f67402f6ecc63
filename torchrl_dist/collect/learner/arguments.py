"""Check a collector's arguments, choose default values, and make the workers' configs from them."""

from __future__ import annotations

import contextlib
import inspect
import math
import operator
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, Literal

import gymnasium
import torch
from torch import nn
from torchrl.data import ReplayBuffer
from torchrl.envs import EnvBase

from torchrl_dist.collect.learner.readiness import Preempt, Readiness, WaitAll
from torchrl_dist.collect.loop.policies import cpu_copy
from torchrl_dist.collect.worker.worker import WorkerConfig, WorkerOptions, reached_by_session
from torchrl_dist.errors import ConfigurationError
from torchrl_dist.runtime import Peer, Session, current_session
from torchrl_dist.runtime.session import check_session

_ONE_STEP = 1e-9  # a fraction of a rollout; less than one step, however long the rollout is

PolicyFactory = Callable[[int, int], Any]


def choose_peers(session: Session | None, workers: Sequence[Peer] | None) -> tuple[Peer, ...]:
    """Return the peers that will run the workers. An empty tuple means one worker in this process.
    Warn if the caller probably wanted workers in other processes.

    Raises:
        ConfigurationError: ``session`` is not a session, ``workers`` are not peers of the session,
            or this process is itself a worker of the driver's collector."""
    if session is not None:
        check_session(session)
    if workers is not None:
        if session is None:
            raise ConfigurationError(
                "got workers= without session=; pass session=, the session of these workers"
            )
        session.check_peers("workers", workers)
        return tuple(workers)
    if session is None:
        with contextlib.suppress(ConfigurationError):  # this process is not in a session
            _say_who_is_idle(current_session(), "no session= was given", "session=session")
        return ()
    collectors = session.of_role("collector")
    if not collectors:
        _say_who_is_idle(
            session, "no process has the role 'collector'", "workers=session.of_role(...)"
        )
    elif not session.is_driver:
        _check_place(session, collectors)
    return collectors or (session.me,)


def _check_place(session: Session, collectors: Sequence[Peer]) -> None:
    """Raise an error if this process builds a collector although it is a worker of the driver's
    collector. Warn if several processes probably build collectors with the same workers."""
    me = session.me
    if me in collectors:
        raise ConfigurationError(
            f"{me.name} builds a collector, but is a worker of the collector that "
            f"{session.peers[0].name} builds. Build a collector only in {session.peers[0].name}, "
            f"and call serve() in {me.name}: if session.role == 'collector': session.serve()"
        )
    alike = session.of_role(me.role)
    if session.peers[0] in alike:
        every = "session.of_role('collector')"
        warnings.warn(
            f"the collector of {me.name} uses every process of role 'collector' "
            f"({len(collectors)}). "
            f"If {alike[0].name} builds a collector, too, both collectors use the same processes. "
            f"Pass workers={every}[{me.index}::{len(alike)}] to divide these processes, or "
            f"workers={every} to share them",
            stacklevel=4,
        )


def _say_who_is_idle(session: Session, reason: str, line: str) -> None:
    counts = Counter(peer.role for peer in session.peers if peer.role != session.role)
    if counts:
        others = ", ".join(f"{role!r} ({count})" for role, count in counts.items())
        warnings.warn(
            f"the environments are stepped in this process alone, because {reason}, although the "
            f"session has other processes: {others}. Pass {line} to use these processes, or "
            "workers=[session.me] if only this process should step environments",
            stacklevel=4,
        )


def require_shared(replay_buffer: Any, assembled_in: int, replace_lost: bool) -> None:
    """Refuse a buffer if workers would write to copies of the buffer, or could not reach the
    buffer.

    Args:
        assembled_in: number of env processes that assemble whole trajectories and write them.
    """
    if not isinstance(replay_buffer, ReplayBuffer):
        return  # None, or an object of the user that defines its own pickling
    storage = replay_buffer.storage
    if not getattr(storage, "attaches_when_pickled", False):
        raise ConfigurationError(
            f"replay_buffer= has a {type(storage).__name__}, which belongs to this process, so the "
            "workers would write to copies that no process reads; build the buffer with "
            "SharedMemmapStorage and SharedCursorWriter"
        )
    if not reached_by_session(replay_buffer):
        return
    reached = f"replay_buffer= has a {type(storage).__name__}, reached through the session"
    if assembled_in:
        raise ConfigurationError(
            f"{reached}. With trajs_per_batch=, env processes (env_processes={assembled_in}) would "
            "write to it, but they are not in the session. Pass env_processes=0, with num_envs= "
            "for several environments per worker, or leave trajs_per_batch= out"
        )
    if replace_lost:
        raise ConfigurationError(
            f"{reached}, but a successor of a lost worker cannot join the session. Pass "
            "replace_lost=False, so that the other workers continue without the lost worker, or "
            "pass a SharedReplayBuffer of this node, or extend the buffer yourself with the "
            "batches that the collector yields"
        )


def check_inference(
    session: Session | None, peers: Sequence[Peer], policy: Any, others: Mapping[str, Any]
) -> None:
    """Refuse arguments that cannot work with the policy at the learner."""
    if session is None or session.me in peers:
        raise ConfigurationError(
            "inference='learner' needs workers in other processes, but there is no session or "
            "this process is itself a worker; pass a session that has workers in other processes"
        )
    if not isinstance(policy, nn.Module):
        raise ConfigurationError(
            f"inference='learner' needs a module as policy=, got {type(policy).__name__}; pass an "
            "nn.Module"
        )
    given = ", ".join(name for name, value in others.items() if value)
    if given:
        raise ConfigurationError(
            f"inference='learner' cannot be combined with {given}; leave these arguments out"
        )


@dataclass(frozen=True, kw_only=True)
class Settings(WorkerOptions):
    """The arguments of a collector, except the arguments that determine where its workers run.

    Attributes:
        here: whether all workers run in this process.
        make_envs, policy_factories: one entry for each worker.
        others: see :class:`~torchrl_dist.collect.RPCBatchedCollector`.

    Raises:
        ConfigurationError: a value is invalid, or two values cannot work together.
    """

    here: bool
    make_envs: tuple[str | Callable[[], Any], ...]
    policy: Any
    policy_factories: tuple[PolicyFactory, ...] | None
    frames_per_batch: int | None
    total_frames: int
    readiness: Readiness
    max_policy_lag: int
    inference: str
    env_groups: int
    trajs_per_batch: int | None
    traj_format: str | None
    split_trajs: bool
    seed: int | None
    min_workers: int
    worker_timeout_s: float | None
    replace_lost: bool
    timeout_s: float | None
    init_random_frames: int
    track_policy_version: bool | None
    cat_results: Literal["stack"] | int | None
    storing_device: torch.device | None

    def __post_init__(self) -> None:
        self._check_numbers()
        for name in ("timeout_s", "worker_timeout_s", "step_timeout_s"):
            seconds = getattr(self, name)
            if seconds is not None and not 0 < seconds < math.inf:
                raise ConfigurationError(
                    f"{name}={seconds}: expected a positive, finite number of seconds, or None"
                )
        self._check_readiness()
        self._check_trajectories()
        self._check_results()
        if not self.here:
            assembled_in = 0 if self.trajs_per_batch is None else self.env_processes
            require_shared(self.replay_buffer, assembled_in, self.replace_lost)
        if self.inference not in ("worker", "learner"):
            raise ConfigurationError(
                f"inference={self.inference!r}: expected 'worker' or 'learner'"
            )
        if self.inference == "learner" and self.replace_lost:
            raise ConfigurationError(
                "replace_lost=True cannot be combined with inference='learner'; leave one of "
                "these arguments out"
            )
        if self.inference == "learner" and self.init_random_frames:
            raise ConfigurationError(
                "init_random_frames= cannot be combined with inference='learner', because the "
                "workers then do not know which keys the policy writes in addition to the action; "
                "leave one of these arguments out"
            )

    def _check_numbers(self) -> None:
        least = {
            "num_envs": 1,
            "env_groups": 1,
            "min_workers": 1,
            "env_processes": 0,
            "max_policy_lag": 0,
            "init_random_frames": 0,
            "max_frames_per_traj": 0,
        }
        if self.frames_per_batch is not None:
            least["frames_per_batch"] = 1
        for name in ("total_frames", *least):
            value = getattr(self, name)
            if not isinstance(value, int):
                raise ConfigurationError(f"{name}={value!r}: expected a whole number")
        for name, bound in least.items():
            if getattr(self, name) < bound:
                raise ConfigurationError(f"{name}={getattr(self, name)}: expected at least {bound}")
        if self.total_frames < 1 and self.total_frames != -1:
            raise ConfigurationError(f"total_frames={self.total_frames}: expected -1 or at least 1")
        if self.min_workers > self.num_workers:
            raise ConfigurationError(
                f"min_workers={self.min_workers}: expected 1 to {self.num_workers}, the number of "
                "workers"
            )

    def _check_readiness(self) -> None:
        readiness = self.readiness
        if not isinstance(readiness, Readiness):
            got = readiness.__name__ if isinstance(readiness, type) else repr(readiness)
            raise ConfigurationError(
                f"readiness={got}: expected an instance of WaitAll, FirstReady, Quorum or Preempt, "
                "such as WaitAll()"
            )
        unfit = (self.replay_buffer, self.postproc, self.postproc_factory)
        if readiness.cuts and any(each is not None for each in unfit):
            raise ConfigurationError(
                f"{readiness} cuts rollouts short and pads the batch, so this rule cannot be "
                "combined with replay_buffer= or postproc=; leave these arguments out, or use "
                "FirstReady(), which never waits for a slow worker"
            )

    def _check_trajectories(self) -> None:
        """Refuse arguments that prevent the assembly of whole trajectories."""
        if self.traj_format not in (None, "padded", "cat"):
            raise ConfigurationError(
                f"traj_format={self.traj_format!r}: expected 'padded' or 'cat'"
            )
        if self.traj_format == "cat" and self.trajs_per_batch is None:
            raise ConfigurationError(
                "traj_format='cat' needs batches of whole trajectories; pass trajs_per_batch=, too"
            )
        if not self.track_traj_ids and (
            self.trajs_per_batch is not None or self.split_trajs or self.readiness.cuts
        ):
            raise ConfigurationError(
                "track_traj_ids=False cannot be combined with trajs_per_batch=, split_trajs= or "
                f"{self.readiness}, which need the ids; to get batches without ids, call "
                "batch.exclude(('collector', 'traj_ids'))"
            )
        if self.trajs_per_batch is None and not self.split_trajs:
            return
        if self.trajs_per_batch is not None and (self.trajs_per_batch < 1 or self.split_trajs):
            raise ConfigurationError(
                f"trajs_per_batch={self.trajs_per_batch}, split_trajs={self.split_trajs}: expected "
                "either trajs_per_batch of at least 1 or split_trajs=True, not both"
            )
        names = ["postproc", "postproc_factory"]
        if self.split_trajs:
            # trajs_per_batch works with a buffer, because the workers assemble the trajectories
            names.append("replay_buffer")
        given = [name for name in names if getattr(self, name) is not None]
        if given or self.readiness.cuts:
            unfit = ", ".join(f"{name}=" for name in given) or f"readiness={self.readiness}"
            whole = "split_trajs=" if self.split_trajs else "trajs_per_batch="
            raise ConfigurationError(
                f"{whole} needs whole rollouts, so it cannot be combined with {unfit}; leave out "
                f"either {whole} or {unfit}"
            )

    def _check_results(self) -> None:
        if self.track_policy_version not in (None, True, False):
            raise ConfigurationError(
                f"track_policy_version={self.track_policy_version!r}: expected True or "
                "False; an object that tracks versions is not supported, because the workers "
                "themselves write the versions into the rows"
            )
        if self.cat_results not in (None, "stack", 0, 1, -1) or self.cat_results is True:
            raise ConfigurationError(
                f"cat_results={self.cat_results!r}: expected 'stack', or the dimension of [N, T] "
                "along which the workers' rollouts are joined: 0, 1 or -1"
            )
        whole = self.trajs_per_batch is None and not self.split_trajs
        if self.cat_results not in (None, 0) and not (whole and self.replay_buffer is None):
            raise ConfigurationError(
                f"cat_results={self.cat_results!r} is for batches of rollouts, so it cannot be "
                "combined with trajs_per_batch=, split_trajs= or replay_buffer=; leave "
                "cat_results= out"
            )
        if self.storing_device is not None and self.replay_buffer is not None:
            if self.storing_device.type != "cpu":
                raise ConfigurationError(
                    f"storing_device={self.storing_device} cannot be combined with replay_buffer=, "
                    "because the workers write to host memory; leave storing_device= out, and let "
                    "the buffer's sample() move batches to a device"
                )

    @property
    def rollouts_per_batch(self) -> int:
        return self.readiness.rollouts_per_batch(self.num_workers)

    def without_parts(self) -> Settings:
        """Return the settings without the user's objects, for a collector that was shut down."""
        factories = None if self.policy_factories is None else ()
        return self._without(make_envs=(), policy_factories=factories)

    def worker_configs(self, call_timeout_s: float) -> list[WorkerConfig]:
        """Return the config of each worker. The config contains a copy of the policy in its current
        state."""
        frames = self.frames_per_batch
        seed = int(torch.randint(2**31, (1,)).item()) if self.seed is None else self.seed
        common: dict[str, Any] = {
            "policy": self._policy_of_workers(),
            "frames_per_rollout": None if frames is None else -(-frames // self.rollouts_per_batch),
            "seed": seed,
            "seed_given": self.seed is not None,
            "keep_env_seeds": self.seed is None,
            "call_timeout_s": call_timeout_s,
            "stamp_version": self.track_policy_version,
            "whole_trajectories": self.trajs_per_batch is not None
            and self.replay_buffer is not None,
            **{option.name: getattr(self, option.name) for option in fields(WorkerOptions)},
        }
        factories = self.policy_factories or (None,) * self.num_workers
        return [
            WorkerConfig(make_env, policy_factory=factory, worker_index=index, **common)
            for index, (make_env, factory) in enumerate(zip(self.make_envs, factories, strict=True))
        ]

    def _policy_of_workers(self) -> Any:
        if self.policy_factories is not None:
            return None
        if not isinstance(self.policy, nn.Module):
            return self.policy
        return cpu_copy(self.policy, travels=not self.here and self.inference == "worker")

    def check_frames(self, frames_per_batch: int) -> None:
        """Check the arguments that depend on the final number of frames per batch."""
        uneven = self.total_frames % frames_per_batch if self.total_frames > 0 else 0
        if uneven and self.cat_results not in (None, 0):
            raise ConfigurationError(
                f"cat_results={self.cat_results!r} needs rollouts of one shape, but the rollouts "
                "of the last batch would have another shape, because "
                f"total_frames={self.total_frames} is not a multiple of {frames_per_batch} frames "
                "per batch; pass a multiple as total_frames="
            )

    def check_ragged(self, specs: str) -> None:
        """Refuse arguments that need equal shapes, for an env whose rows may differ in shape."""
        asked = {
            f"readiness={self.readiness}": self.readiness.cuts,
            f"trajs_per_batch={self.trajs_per_batch} without traj_format='cat'": (
                self.trajs_per_batch is not None
                and self.traj_format != "cat"
                and self.replay_buffer is None
            ),
            "split_trajs=True": self.split_trajs,
            f"init_random_frames={self.init_random_frames}": self.init_random_frames > 0,
        }
        given = [name for name, is_asked in asked.items() if is_asked]
        if given:
            raise ConfigurationError(
                f"{', '.join(given)} cannot be used with this env, because its rows may differ in "
                "shape, so rows can be neither padded nor filled in; leave these arguments out. "
                f"The env's specs are {specs}"
            )


_ANYTHING = object()
_WEIGHTS = "the collector itself packs weights and sends them; call update_policy_weights_()"
_LAUNCHER = (
    "torchrun, srun or local_cluster starts the processes, and determines which devices "
    "and cores each process may use; leave this argument out"
)
_SESSION = "pass session=session({'learner': 1, 'collector': -1}) for workers in other processes"
_CPU = "the workers run on the CPU; to move batches to a device, pass storing_device="
_BUILDS = "this collector builds its workers itself; leave this argument out"
# The arguments of TorchRL's collectors that have no meaning here, each with the values that are
# accepted, and the reason why other values are refused.
_REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "weight_updater": ((None,), _WEIGHTS),
    "weight_sync_schemes": ((None,), _WEIGHTS),
    "weight_recv_schemes": ((None,), _WEIGHTS),
    "policy_device": ((None, "cpu", torch.device("cpu")), _CPU),
    "env_device": ((None, "cpu", torch.device("cpu")), _CPU),
    "extend_buffer": (
        (True,),
        "the workers extend the buffer with whole rollouts; to extend the buffer with the "
        "batches yourself, leave replay_buffer= out",
    ),
    "interruptor": ((None,), "pass readiness=Preempt(...) or preemptive_threshold= instead"),
    "reset_when_done": (
        (True,),
        "the workers always reset an env that is done; leave this argument out",
    ),
    "return_same_td": ((False,), "the caller owns each batch; leave this argument out"),
    "trajs_per_write": (
        (None, 1),
        "each complete trajectory is written at once by one extend(); leave this argument out",
    ),
    "backend": ((None,), _SESSION),
    "backend_options": ((None,), _SESSION),
    "num_collectors": ((None,), "pass a session with that many workers, or pass workers="),
    "sync": ((None,), "pass readiness=WaitAll() or FirstReady() instead"),
    "update_at_each_batch": ((False,), _WEIGHTS),
    "worker_idx": ((None,), "the collector numbers its workers; leave this argument out"),
    # arguments of TorchRL's collectors over Ray, RPC and torch.distributed
    "collector_class": ((None,), _BUILDS),
    "collector_kwargs": ((None,), _BUILDS),
    "num_workers_per_collector": ((1,), "pass env_processes="),
    "ray_init_config": ((None,), _LAUNCHER),
    "remote_configs": ((None,), _LAUNCHER),
    "slurm_kwargs": ((None,), _LAUNCHER),
    "launcher": ((None,), _LAUNCHER),
    "tcp_port": ((None,), _LAUNCHER),
    "visible_devices": ((None,), _CPU),
    "tensorpipe_options": (
        (None,),
        "the session sets these options itself; leave this argument out",
    ),
    "update_after_each_batch": ((False,), _WEIGHTS),
    "max_weight_update_interval": ((-1,), _WEIGHTS),
    "update_interval": ((None,), _WEIGHTS),
    # policies get the state that they need; see with_state_of in collect/loop/recurrent.py
    "auto_register_policy_transforms": ((_ANYTHING,), ""),
    "use_env_creator": ((_ANYTHING,), ""),
    "use_buffers": ((_ANYTHING,), ""),
    "trust_policy": ((_ANYTHING,), ""),
    "no_cuda_sync": ((_ANYTHING,), ""),
}


def refuse(arguments: Mapping[str, Any]) -> None:
    """Refuse arguments of TorchRL's collectors that have no meaning here, with the reason.

    Raises:
        ConfigurationError: ``_REFUSED`` does not accept an argument's value.
        TypeError: TorchRL's collectors have no argument of this name either.
    """
    for name, value in arguments.items():
        if name not in _REFUSED:
            raise TypeError(f"RPCBatchedCollector got an unexpected keyword argument {name!r}")
        harmless, reason = _REFUSED[name]
        if _ANYTHING not in harmless and not any(value is h or value == h for h in harmless):
            raise ConfigurationError(f"{name}={value!r} is not supported: {reason}")


class GivenEnv:
    """An env that the caller has made. The only worker steps this env, in this process."""

    def __init__(self, env: Any) -> None:
        self._env = env

    def __call__(self) -> Any:
        return self._env


def choose_envs(
    make_env: Any, kwargs: Any, num_workers: int, *, here: bool, num_envs: int
) -> tuple[str | Callable[[], Any], ...]:
    """Return each worker's factory of envs.

    Args:
        make_env: a gymnasium id, a callable, an env; or a sequence of these, one per worker.
        kwargs: a dict of keyword arguments for the callable, or a list of such dicts, one per
            worker.
        here: whether the only worker is this process.

    Raises:
        ConfigurationError: ``make_env`` has another type, or a list has the wrong length.
    """
    each = list(make_env) if isinstance(make_env, list | tuple) else [make_env] * num_workers
    options = list(kwargs) if isinstance(kwargs, list | tuple) else [kwargs] * num_workers
    if len(each) != num_workers or len(options) != num_workers:
        raise ConfigurationError(
            f"got {len(each)} make_env and {len(options)} create_env_kwargs for {num_workers} "
            "workers; expected one of each per worker. If a worker should step several envs, pass "
            "num_envs="
        )
    return tuple(
        _choose_env(make, options_, here=here, num_envs=num_envs)
        for make, options_ in zip(each, options, strict=True)
    )


def _choose_env(
    make: Any, kwargs: Mapping[str, Any] | None, *, here: bool, num_envs: int
) -> str | Callable[[], Any]:
    if isinstance(make, EnvBase | gymnasium.Env | gymnasium.vector.VectorEnv):
        if not here or num_envs > 1:
            raise ConfigurationError(
                f"make_env is an env object ({type(make).__name__}), which only a single worker in "
                "this process with num_envs=1 can step; pass a function that makes the env"
            )
        make = GivenEnv(make)
    if not isinstance(make, str) and not callable(make):
        raise ConfigurationError(
            f"make_env is {make!r}; expected a gymnasium id or a function that makes the "
            "env on the worker, such as lambda: env_class()"
        )
    if not kwargs:
        return make
    if isinstance(make, GivenEnv):
        raise ConfigurationError(
            "create_env_kwargs= cannot be combined with an env that was made already; pass a "
            "function that makes the env, or leave create_env_kwargs= out"
        )
    if isinstance(make, str):
        return partial(gymnasium.make, make, **kwargs)
    return partial(make, **kwargs)


def choose_policy_factories(given: Any, num_workers: int) -> tuple[PolicyFactory, ...] | None:
    """Return each worker's factory, which takes ``(worker_index, num_workers)``. If the user's
    factory has no required arguments and no argument ``worker_index``, it is wrapped and called
    without arguments, as in TorchRL.

    Raises:
        ConfigurationError: a factory cannot be called, or there are more or fewer factories than
            workers.
    """
    if given is None:
        return None
    each = list(given) if isinstance(given, list | tuple) else [given] * num_workers
    if len(each) != num_workers or not all(callable(factory) for factory in each):
        raise ConfigurationError(
            f"policy_factory={given!r}: expected a callable, or a list with one callable for each "
            f"of {num_workers} workers"
        )
    return tuple(f if _takes_two(f) else _WithoutArguments(f) for f in each)


def _takes_two(factory: Callable) -> bool:
    try:
        signature = inspect.signature(factory)
    except (TypeError, ValueError):  # the factory has no signature
        return True
    if "worker_index" in signature.parameters:
        return True
    needed = [
        p
        for p in signature.parameters.values()
        if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    return bool(needed)


@dataclass(frozen=True)
class _WithoutArguments:
    factory: Callable[[], Any]

    def __call__(self, worker_index: int, num_workers: int) -> Any:
        return self.factory()


def choose_seed(seed: Any) -> int:
    """Return the seed as an int.

    Raises:
        ConfigurationError: the seed is not an integer, or is negative.
    """
    with contextlib.suppress(TypeError):
        number = operator.index(seed)
        if number >= 0:
            return number
    raise ConfigurationError(f"seed={seed!r}: expected an int of at least 0")


def choose_storing_device(device: Any, storing_device: Any) -> torch.device | None:
    """Return the device of batches. As in TorchRL, ``device`` is the default of all devices."""
    for name, given in {"device": device, "storing_device": storing_device}.items():
        try:
            chosen = None if given is None else torch.device(given)
        except (RuntimeError, TypeError) as error:
            raise ConfigurationError(
                f"{name}={given!r}: expected a torch device such as 'cpu'"
            ) from error
        if name == "device" and chosen is not None and chosen.type != "cpu":
            raise ConfigurationError(f"device={given!r} is not supported: {_CPU}")
    return torch.device(device) if chosen is None and device is not None else chosen


def choose_readiness(
    readiness: Readiness | None, preemptive_threshold: float | None, num_workers: int
) -> Readiness:
    if preemptive_threshold is None:
        return WaitAll() if readiness is None else readiness
    if readiness is not None:
        raise ConfigurationError("pass preemptive_threshold= or readiness=, not both")
    if not 0.0 <= preemptive_threshold <= 1.0:
        raise ConfigurationError(
            f"preemptive_threshold={preemptive_threshold}: expected a number from 0 to 1"
        )
    if preemptive_threshold == 1.0:
        return WaitAll()
    ready = max(1, int(num_workers * preemptive_threshold))
    return Preempt(ready / num_workers, min_part=_ONE_STEP)
