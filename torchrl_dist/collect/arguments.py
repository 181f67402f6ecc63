"""What a collector refuses before anything is started."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from torchrl.data import ReplayBuffer

from torchrl_dist.collect.readiness import Readiness
from torchrl_dist.errors import ConfigurationError
from torchrl_dist.runtime import Peer, Session


def choose_peers(session: Session | None, workers: Sequence[Peer] | None) -> tuple[Peer, ...]:
    if workers is not None:
        if session is None or not workers:
            raise ConfigurationError("workers= needs a session and at least one peer")
        return tuple(workers)
    if session is None:
        return ()
    return session.of_role("collector") or (session.me,)


def require_shared(replay_buffer: Any) -> None:
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


def check_env(make_env: Any) -> None:
    if not isinstance(make_env, str) and not callable(make_env):
        raise ConfigurationError(
            f"make_env is {make_env!r}; expected a gymnasium id or a function that makes the "
            "env on the worker, such as lambda: env_class()"
        )


def check_inference(
    session: Session | None, peers: Sequence[Peer], policy: Any, others: dict[str, Any]
) -> None:
    """Refuse what leaves nothing to do for a policy at the learner."""
    if session is None or session.me in peers:
        raise ConfigurationError(
            "inference='learner' is for workers of other processes; pass a session that has some"
        )
    given = [name for name, value in others.items() if value]
    if not isinstance(policy, nn.Module) or given:
        raise ConfigurationError(
            f"inference='learner' needs policy=, a module, and does not go with {given}; got "
            f"policy={type(policy).__name__}"
        )


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a collector is asked for, apart from where it runs and what it steps.

    Attributes:
        see :class:`~torchrl_dist.collect.RPCBatchedCollector`.

    Raises:
        ConfigurationError: a value that is none, or two that cannot work together.
    """

    frames_per_batch: int | None
    total_frames: int
    num_envs: int
    env_processes: int
    step_timeout_s: float | None
    readiness: Readiness
    max_policy_lag: int
    replay_buffer: Any
    inference: str
    env_groups: int
    trajs_per_batch: int | None
    split_trajs: bool
    postproc: Any
    postproc_factory: Any
    min_workers: int
    worker_timeout_s: float | None
    timeout_s: float | None

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
        if self.inference not in ("worker", "learner"):
            raise ConfigurationError(
                f"inference={self.inference!r}: expected 'worker' or 'learner'"
            )

    def _check_numbers(self) -> None:
        least = {
            "num_envs": 1,
            "env_groups": 1,
            "min_workers": 1,
            "env_processes": 0,
            "max_policy_lag": 0,
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

    def _check_readiness(self) -> None:
        readiness = self.readiness
        if not isinstance(readiness, Readiness):
            got = readiness.__name__ if isinstance(readiness, type) else repr(readiness)
            raise ConfigurationError(
                f"readiness={got}: pass an instance of WaitAll, FirstReady, Quorum or Preempt"
            )
        if readiness.cuts and (self.replay_buffer is not None or self.has_postproc):
            raise ConfigurationError(
                f"{readiness} cuts rollouts short and pads the batch: it goes neither with "
                "replay_buffer= (use FirstReady(), which waits for nobody) nor with postproc="
            )

    def _check_trajectories(self) -> None:
        """Refuse what makes no whole rollouts where trajectories would be put together."""
        if self.trajs_per_batch is None and not self.split_trajs:
            return
        if self.trajs_per_batch is not None and (self.trajs_per_batch < 1 or self.split_trajs):
            raise ConfigurationError(
                f"trajs_per_batch={self.trajs_per_batch}, split_trajs={self.split_trajs}: expected "
                "a number of at least 1, or split_trajs, not both"
            )
        names = ("replay_buffer", "postproc", "postproc_factory")
        given = [name for name in names if getattr(self, name) is not None]
        if given or self.readiness.cuts:
            raise ConfigurationError(
                f"trajs_per_batch= and split_trajs= need whole rollouts at the learner; they do "
                f"not go with {', '.join(given) or self.readiness}"
            )

    @property
    def has_postproc(self) -> bool:
        return self.postproc is not None or self.postproc_factory is not None

    def check_workers(self, count: int) -> None:
        """What depends on the number of workers."""
        if self.min_workers > count:
            raise ConfigurationError(
                f"min_workers={self.min_workers}: expected 1 to {count}, the number of workers"
            )
