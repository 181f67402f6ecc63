"""Environments that gymnasium does not have, for ``--env torchrl_dist.recipes.tasks:NAME``."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np


def cartpole_without_velocities(**options: Any) -> gymnasium.Env:
    """Make CartPole-v1 whose observations are the position of the cart and the angle of the pole.

    They are float32 ``[2]``. A policy needs a memory, because it must estimate both velocities."""
    made = gymnasium.make("CartPole-v1", **options)
    full = made.observation_space
    assert isinstance(full, gymnasium.spaces.Box)
    space = gymnasium.spaces.Box(full.low[::2], full.high[::2], dtype=np.float32)
    return gymnasium.wrappers.TransformObservation(made, lambda x: x[::2], space)
