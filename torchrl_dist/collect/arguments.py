"""What a collector refuses before anything is started."""

from __future__ import annotations

import math
from collections.abc import Sequence
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


def check_parts(make_env: Any, readiness: Any, replay_buffer: Any, postproc: Any) -> None:
    if not isinstance(readiness, Readiness):
        got = readiness.__name__ if isinstance(readiness, type) else repr(readiness)
        raise ConfigurationError(
            f"readiness={got}: pass an instance of WaitAll, FirstReady, Quorum or Preempt"
        )
    if readiness.cuts and (replay_buffer is not None or postproc is not None):
        raise ConfigurationError(
            f"{readiness} cuts rollouts short and pads the batch: it goes neither with "
            "replay_buffer= (use FirstReady(), which waits for nobody) nor with postproc="
        )
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


def check_trajectories(
    trajs_per_batch: int | None, split_trajs: bool, readiness: Readiness, others: dict[str, Any]
) -> None:
    """Refuse what makes no whole rollouts here, where trajectories would be put together."""
    if trajs_per_batch is None and not split_trajs:
        return
    given = [name for name, value in others.items() if value is not None]
    if trajs_per_batch is not None and (trajs_per_batch < 1 or split_trajs):
        raise ConfigurationError(
            f"trajs_per_batch={trajs_per_batch}, split_trajs={split_trajs}: expected a number of "
            "at least 1, or split_trajs, not both"
        )
    if given or readiness.cuts:
        raise ConfigurationError(
            f"trajs_per_batch= and split_trajs= need whole rollouts at the learner; they do not go "
            f"with {', '.join(given) or readiness}"
        )


def check_numbers(
    *,
    frames_per_batch: int | None,
    total_frames: int,
    max_policy_lag: int,
    num_envs: int,
    min_workers: int,
    env_processes: int,
    env_groups: int,
    num_workers: int,
) -> None:
    frames = 1 if frames_per_batch is None else frames_per_batch
    whole = {"frames_per_batch": frames, "total_frames": total_frames}
    whole |= {"num_envs": num_envs, "max_policy_lag": max_policy_lag, "min_workers": min_workers}
    whole |= {"env_processes": env_processes, "env_groups": env_groups}
    for name, value in whole.items():
        if not isinstance(value, int):
            raise ConfigurationError(f"{name}={value!r}: expected a whole number")
    if frames < 1 or num_envs < 1 or env_groups < 1:
        raise ConfigurationError(
            f"expected at least 1: frames_per_batch={frames_per_batch}, num_envs={num_envs}, "
            f"env_groups={env_groups}"
        )
    if total_frames < 1 and total_frames != -1:
        raise ConfigurationError(f"total_frames={total_frames}: expected -1 or at least 1")
    for name in ("max_policy_lag", "env_processes"):
        if whole[name] < 0:
            raise ConfigurationError(f"{name}={whole[name]}: expected 0 or more")
    if not 1 <= min_workers <= num_workers:
        raise ConfigurationError(
            f"min_workers={min_workers}: expected 1 to {num_workers}, the number of workers"
        )


def check_timeouts(**timeouts: float | None) -> None:
    for name, seconds in timeouts.items():
        if seconds is not None and not 0 < seconds < math.inf:
            raise ConfigurationError(
                f"{name}={seconds}: expected a positive, finite number of seconds, or None"
            )
