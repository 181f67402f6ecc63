"""Envs whose episodes are cut after so many steps, as by ``max_frames_per_traj`` of TorchRL."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium
from gymnasium.wrappers import TimeLimit
from torchrl.envs import EnvBase, StepCounter, TransformedEnv

from torchrl_dist.collect.loop.drivers import is_vector_env
from torchrl_dist.errors import ConfigurationError


def make_limited(make_env: str | Callable[[], Any], steps: int) -> Any:
    """What ``make_env`` names or makes, truncated after ``steps`` steps of an episode.

    Raises:
        ConfigurationError: a vector env, which has no such limit from outside, or a TorchRL env
            that counts steps already.
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
                f"max_frames_per_traj={steps}: the env counts its steps already ({counted}); give "
                "its StepCounter max_steps= instead"
            )
        return TransformedEnv(env, StepCounter(max_steps=steps))
    if is_vector_env(env):
        raise ConfigurationError(
            f"max_frames_per_traj={steps}: {env} resets its envs itself; pass max_episode_steps= "
            "when it is made, or let make_env return single envs and pass num_envs="
        )
    return TimeLimit(env, steps) if isinstance(env, gymnasium.Env) else env
