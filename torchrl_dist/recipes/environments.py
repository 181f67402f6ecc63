"""What a recipe must know of a gymnasium environment before it starts any process."""

from __future__ import annotations

import functools
import importlib
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ConfigurationError

if TYPE_CHECKING:
    import gymnasium

MAX_EPISODE_STEPS = 10_000
"""Where an evaluation ends an episode: there are environments that never end one themselves."""


@dataclass(frozen=True)
class Task:
    """Sizes of an environment with flat observations: ``num_actions`` numbered actions, or (0)
    continuous ones between ``action_low`` and ``action_high``."""

    env: str
    observation_size: int
    reward_threshold: float | None
    num_actions: int = 0
    action_low: tuple[float, ...] = ()
    action_high: tuple[float, ...] = ()


def named_function(text: str) -> Callable[..., Any] | None:
    """The function that ``text`` names as ``package.module:function``; None: it names none.

    Modules in the working directory are found. Raises what the import of the module raises.
    """
    module, colon, name = text.partition(":")
    if not colon or not name.isidentifier():
        return None
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)
    return getattr(importlib.import_module(module), name, None)


def env_factory(env: str) -> Callable[..., gymnasium.Env] | None:
    """The function that ``env`` names as ``package.module:function``; None: a gymnasium id.

    gymnasium's own ids may begin with a module, too (``module:Name-v0``); a function of that name
    comes first.
    """
    return named_function(env)


def make_env(env: str, **options: Any) -> gymnasium.Env:
    """One environment; ``options``, such as ``render_mode``, are for gymnasium or the function."""
    import gymnasium

    factory = env_factory(env)
    return gymnasium.make(env, **options) if factory is None else factory(**options)


def for_collectors(env: str) -> str | Callable[[], gymnasium.Env]:
    """``env`` as a collector wants it; a function is looked up by name in each worker."""
    return env if env_factory(env) is None else functools.partial(make_env, env)


def look_at(env: str, *, discrete: bool) -> Task:
    """Build ``env`` once, look at its spaces, close it.

    Args:
        env: a gymnasium id, or ``package.module:make``.
        discrete: whether actions are to be numbered, or continuous and bounded.

    Raises:
        ConfigurationError: there is no such environment, it cannot be built here, its
            observations are no flat Box, or its actions are of the other kind.
    """
    import gymnasium
    import numpy as np

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            made = make_env(env)
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ConfigurationError(
            f"--env: got {env!r}, expected the id of an environment that gymnasium can build here, "
            f"or package.module:function that returns one ({reason})"
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
    size = int(observations.shape[0])
    if discrete:
        if not isinstance(actions, gymnasium.spaces.Discrete) or int(actions.start) != 0:
            raise ConfigurationError(
                f"--env: {env} takes actions {actions}, expected Discrete, starting at 0"
            )
        return Task(env, size, threshold, num_actions=int(actions.n))
    if (
        not isinstance(actions, gymnasium.spaces.Box)
        or len(actions.shape) != 1
        or not np.isfinite([actions.low, actions.high]).all()
    ):
        raise ConfigurationError(
            f"--env: {env} takes actions {actions}, expected a bounded Box with one dimension"
        )
    low, high = map(float, actions.low.tolist()), map(float, actions.high.tolist())
    return Task(env, size, threshold, action_low=tuple(low), action_high=tuple(high))
