"""What a recipe must know of a gymnasium environment before it starts any process."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

from ..errors import ConfigurationError

MAX_EPISODE_STEPS = 10_000
"""Where an evaluation ends an episode: there are environments that never end one themselves."""


@dataclass(frozen=True)
class DiscreteTask:
    """Sizes of an environment with flat observations and numbered actions."""

    env: str
    observation_size: int
    num_actions: int
    reward_threshold: float | None


def discrete_task(env: str) -> DiscreteTask:
    """Build ``env`` once, look at its spaces, close it.

    Raises:
        ConfigurationError: there is no such environment, it cannot be built here, its
            observations are no flat Box, or its actions are not Discrete from 0.
    """
    import gymnasium

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            made = gymnasium.make(env)
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ConfigurationError(
            f"--env: got {env!r}, expected the id of an environment that gymnasium can build here "
            f"({reason})"
        ) from error
    try:
        observations, actions = made.observation_space, made.action_space
        threshold = made.spec.reward_threshold if made.spec is not None else None
    finally:
        made.close()
    if not isinstance(observations, gymnasium.spaces.Box) or len(observations.shape) != 1:
        raise ConfigurationError(
            f"--env: {env} observes {observations}, expected a Box with one dimension"
        )
    if not isinstance(actions, gymnasium.spaces.Discrete) or int(actions.start) != 0:
        raise ConfigurationError(
            f"--env: {env} takes actions {actions}, expected Discrete, starting at 0"
        )
    return DiscreteTask(env, int(observations.shape[0]), int(actions.n), threshold)
