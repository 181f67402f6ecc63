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
    """Return the env that ``make_env`` names or makes, with episodes truncated after ``steps``.

    Raises:
        ConfigurationError: the env is a vector env, which cannot be limited from outside, or a
            TorchRL env that already counts steps.
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
                f"max_frames_per_traj={steps}: the env counts its steps already ({counted}); pass "
                "max_steps= to its StepCounter instead"
            )
        return TransformedEnv(env, StepCounter(max_steps=steps))
    if is_vector_env(env):
        raise ConfigurationError(
            f"max_frames_per_traj={steps}: {env} resets its envs itself, so its episodes cannot be "
            "limited from outside; pass max_episode_steps= when the env is made, or let make_env "
            "return single envs and pass num_envs="
        )
    return TimeLimit(env, steps) if isinstance(env, gymnasium.Env) else env
