"""Learners of the recipes, built in this process."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

from torchrl_dist.recipes.parts.environments import look_at
from torchrl_dist.recipes.parts.networks import PolicySpec
from torchrl_dist.recipes.training.loop import Start
from torchrl_dist.runtime import Session


def recipe_of(kind: type) -> Any:
    """The module of the recipe whose options these are."""
    return importlib.import_module(kind.__module__.replace(".config", ".recipe"))


def a_learner(config: Any, session: Session, seed: int = 0, frames: int = 0) -> Any:
    torch.manual_seed(seed)
    task = look_at(config.env, continuous=config.continuous)
    policy = PolicySpec.of(
        task,
        config.policy_kind,
        config.hidden,
        state_size=config.state_size,
        normalized=config.normalizes(task),
    )
    build: Callable[..., Any] = recipe_of(type(config)).build
    return build(config, task, policy, session, Start(frames=frames))
