"""Greedy episodes of a policy, many in parallel, in this process."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from ...errors import ConfigurationError
from .environments import MAX_EPISODE_STEPS, as_number, for_collectors, is_flattened, make_env
from .networks import Act


class GreedyEpisodes:
    """Play ``episodes`` environments in parallel, for one episode each.

    The same seed and number of episodes give the same episodes. If the environment has its own
    vectorized form, this form is used (for CartPole, 30 times faster than separate environments).

    Args:
        act: the policy.
        env: gymnasium id, or ``package.module:make``.
        seed: seed of the environments.
        max_steps: an episode ends after this many steps at the latest.
    """

    def __init__(
        self,
        act: Act,
        env: str,
        *,
        episodes: int,
        seed: int,
        max_steps: int = MAX_EPISODE_STEPS,
    ) -> None:
        import gymnasium

        self._act = act
        self._steps_left = max_steps
        self._returns = np.zeros(episodes, dtype=np.float64)
        self._running = np.ones(episodes, dtype=bool)
        make = for_collectors(env)
        if isinstance(make, str) and _is_vectorized(make):
            self._envs = _flat(gymnasium.make_vec(make, num_envs=episodes))
        else:
            envs = [lambda: _numbered(make_env(env))] * episodes
            self._envs = gymnasium.vector.SyncVectorEnv(envs)
        self._observation, _ = self._envs.reset(seed=seed)

    @torch.no_grad()
    def step(self) -> bool:
        """Take one step of every environment. Return whether this was the last step."""
        action = self._act(torch.as_tensor(np.asarray(self._observation)))
        self._observation, reward, terminated, truncated, _ = self._envs.step(action.numpy())
        # Once an environment's first episode has ended, its rewards belong to another episode.
        self._returns += reward * self._running
        self._running &= ~(terminated | truncated)
        self._steps_left -= 1
        return not self._running.any() or self._steps_left <= 0

    @property
    def returns(self) -> list[float]:
        """Undiscounted returns so far."""
        return self._returns.tolist()

    def close(self) -> None:
        self._envs.close()


def _is_vectorized(env: str) -> bool:
    """Whether gymnasium has a vectorized form of the environment with this id."""
    import gymnasium

    module, _, name = env.rpartition(":")
    if module:
        importlib.import_module(module)  # registers the id
    spec = gymnasium.spec(name)  # gymnasium refuses a vectorized form with wrappers
    return spec.vector_entry_point is not None and not spec.additional_wrappers


def _flat(envs: Any) -> Any:
    """Return ``envs`` with observations flattened as :func:`make_env` flattens them."""
    from gymnasium.wrappers.vector import FlattenObservation

    return FlattenObservation(envs) if is_flattened(envs.single_observation_space) else envs


def _numbered(env: Any) -> Any:
    """Return ``env`` with rewards converted to numbers, which a vector environment needs."""
    from gymnasium.wrappers import TransformReward

    return TransformReward(env, as_number)


def evaluate(
    act: Act,
    env: str,
    *,
    episodes: int,
    seed: int,
    max_steps: int = MAX_EPISODE_STEPS,
) -> list[float]:
    """Return the undiscounted returns of :class:`GreedyEpisodes`. Blocks until all episodes have
    ended."""
    with contextlib.closing(
        GreedyEpisodes(act, env, episodes=episodes, seed=seed, max_steps=max_steps)
    ) as playing:
        while not playing.step():
            pass
        return playing.returns


def play_rendered(
    act: Act,
    env: str,
    *,
    seed: int,
    keep: Callable[[Any], None] | None = None,
    max_steps: int = MAX_EPISODE_STEPS,
) -> float:
    """Play one episode in a window, and return its undiscounted return.

    Args:
        keep: called with each picture, uint8 ``[height, width, 3]``. If given, no window is shown.
        max_steps: the episode ends after this many steps at the latest.
    """
    mode = "human" if keep is None else "rgb_array"
    try:
        made = make_env(env, render_mode=mode)
    except Exception as error:
        raise ConfigurationError(f"{env} cannot be shown here: {error}") from error
    with contextlib.closing(made):
        observation, _ = made.reset(seed=seed)
        total = 0.0
        for _ in range(max_steps):
            if keep is not None:
                picture: Any = made.render()
                if not isinstance(picture, np.ndarray):
                    raise ConfigurationError(
                        f"{env} cannot be shown here: its render() returned a "
                        f"{type(picture).__name__}, expected an array [height, width, 3]"
                    )
                keep(picture)
            with torch.no_grad():
                action = act(torch.as_tensor(observation)).numpy()
            action = action if action.ndim else action.item()  # pass a number, as collectors do
            observation, reward, terminated, truncated, _ = made.step(action)
            total += as_number(reward)
            if terminated or truncated:
                break
        return total
