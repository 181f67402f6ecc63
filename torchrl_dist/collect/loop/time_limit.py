"""Truncate episodes after a number of steps, as TorchRL's ``max_frames_per_traj`` does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium
from gymnasium.wrappers import TimeLimit
from torchrl.envs import EnvBase, StepCounter, TransformedEnv

from torchrl_dist.collect.loop.drivers import is_vector_env
from torchrl_dist.errors import ConfigurationError


def make_limited(make_env: str | Callable[[], Any], steps: int) -> Any:
    """Return the env that ``make_env`` names or makes, with episodes truncated after ``steps``
    steps.

    Raises:
        ConfigurationError: the env is a vector env, whose episodes cannot be limited from outside,
            or a TorchRL env that already counts steps.
    """
    env = gymnasium.make(make_env) if isinstance(make_env, str) else make_env()
    if isinstance(env, EnvBase):
        counted = [
            key
            for key in env.output_spec.keys(True, True)
            if "step_count" in ((key,) if isinstance(key, str) else key)
        ]
        if counted:
            raise ConfigurationError(
                f"max_frames_per_traj={steps} would add a StepCounter to the env, but the env "
                f"counts its steps already (keys {counted}); leave max_frames_per_traj= out, and "
                "pass max_steps= to the env's own StepCounter"
            )
        return TransformedEnv(env, StepCounter(max_steps=steps))
    if is_vector_env(env):
        raise ConfigurationError(
            f"max_frames_per_traj={steps} cannot limit the episodes of {env}, because a vector env "
            "resets its envs itself; pass max_episode_steps= when the vector env is made, or let "
            "make_env return a single env and pass num_envs="
        )
    return TimeLimit(env, steps) if isinstance(env, gymnasium.Env) else env
