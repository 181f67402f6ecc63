"""Small environments and policies that the collector's tests share."""

from __future__ import annotations

from typing import Any, ClassVar

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv
from torch import nn


class EpisodeSeeds(gymnasium.Wrapper):
    """Episode k starts from seed ``first + k``, whoever resets the env and with whatever seed."""

    def __init__(self, env: gymnasium.Env, first: int) -> None:
        super().__init__(env)
        self.next_seed = first

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        self.next_seed += 1
        return self.env.reset(**{**kwargs, "seed": self.next_seed})


class Counter(gymnasium.Env):
    """Observes its step count; ends after ``length`` steps; the reward is the step count.

    The first observation of episode k is ``100 * k``, so that every row tells where it comes from.
    """

    observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space = spaces.Discrete(3)

    def __init__(self, length: int = 5, truncate: bool = False) -> None:
        self.length, self.truncate = length, truncate
        self.episode, self.t = 0, 0

    def _observe(self) -> np.ndarray:
        return np.array([100 * self.episode + self.t, self.length], np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.episode, self.t = self.episode + 1, 0
        return self._observe(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert self.action_space.contains(action), action
        assert self.t < self.length, "stepped after the end of an episode"
        self.t += 1
        end = self.t >= self.length
        return self._observe(), float(self.t), end and not self.truncate, end and self.truncate, {}


class Tally(Counter):
    """Counts the steps of all envs in its process, so that others can ask how far they are."""

    steps = 0

    def step(self, action: Any) -> Any:
        Tally.steps += 1
        return super().step(action)


def steps_taken() -> int:
    return Tally.steps


class NextStepVector(VectorEnv):
    """Counters behind next-step autoreset, with no way to reset only some of them."""

    metadata: ClassVar[
        dict[str, Any]
    ] = {}  # as other people's vector envs: no autoreset mode declared

    def __init__(self, lengths: list[int], truncate: bool = False) -> None:
        self.inner = SyncVectorEnv(
            [lambda n=n: Counter(n, truncate) for n in lengths],
            autoreset_mode=AutoresetMode.NEXT_STEP,
            observation_mode="same",
        )
        self.num_envs = len(lengths)
        self.single_observation_space = self.inner.single_observation_space
        self.single_action_space = self.inner.single_action_space
        self.observation_space = self.inner.observation_space
        self.action_space = self.inner.action_space

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        assert options is None
        return self.inner.reset(seed=seed)

    def step(self, actions: Any) -> Any:
        return self.inner.step(actions)


def counters(lengths: list[int], mode: AutoresetMode, truncate: bool = False) -> SyncVectorEnv:
    return SyncVectorEnv([lambda n=n: Counter(n, truncate) for n in lengths], autoreset_mode=mode)


def mlp(inputs: int, outputs: int, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(inputs, 16), nn.Tanh(), nn.Linear(16, outputs))
