"""Results that others published, and the jobs that repeat them. Does not import torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

LEAST = 3
"""With fewer seeds, a row gets no verdict, because its interval would be meaningless."""

FIGURES = {
    "training": "mean return of the last 100 episodes of training",
    "final": "mean return of greedy episodes of the last policy",
}


@dataclass(frozen=True)
class Source:
    """A published table.

    Attributes:
        figure: a key of :data:`FIGURES`. It names the figure of our runs that is measured in the
            same way as the source's figure.
        runs: number of runs in each mean.
    """

    name: str
    url: str
    figure: str
    runs: int


SOURCES = {
    "slm": Source(
        "SLM-Lab, 2026",
        "https://github.com/kengz/SLM-Lab/blob/master/docs/BENCHMARKS.md", "training", 4,
    ),
    "zoo": Source(
        "rl-baselines3-zoo",
        "https://github.com/DLR-RM/rl-baselines3-zoo/blob/master/benchmark.md", "final", 1,
    ),
    "sb3-hub": Source(
        "rl-baselines3-zoo, LSTM",
        "https://github.com/DLR-RM/rl-baselines3-zoo/blob/master/hyperparams/ppo_lstm.yml",
        "final", 1,
    ),
    "hub-minigrid": Source(
        "rl-baselines3-zoo, MiniGrid",
        "https://huggingface.co/sb3/ppo-MiniGrid-DoorKey-5x5-v0", "final", 1,
    ),
    "cleanrl": Source(
        "CleanRL",
        "https://docs.cleanrl.dev/rl-algorithms/ppo/#ppo_continuous_actionpy", "training", 3,
    ),
    "rllib": Source(
        "RLlib's examples",
        "https://github.com/ray-project/ray/tree/master/rllib/examples/algorithms", "training", 1,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Published:
    """A published mean return, and our job with the same environment and number of frames.

    Attributes:
        mean, spread: as published. The spread is a standard deviation, or None if it was not
            published.
        settings: options of the recipe that differ from its defaults.
        differs: how the job differs from the source's, in words.
        episodes: number of episodes, if the spread is over the episodes of one run. If 0, the
            spread is over runs.
    """

    source: str
    recipe: str
    env: str
    frames: int
    mean: float
    spread: float | None = None
    settings: Mapping[str, Any] = field(default_factory=dict, hash=False)
    differs: str = ""
    episodes: int = 0

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % interval of the source's mean; without a spread, only the mean.

        With a spread over episodes, the interval is too narrow, because such a spread leaves out
        the differences between seeds."""
        half = 1.96 * (self.spread or 0.0) / math.sqrt(self.episodes or SOURCES[self.source].runs)
        return self.mean - half, self.mean + half


_OWN = "the recipe's own network and settings"
_DQN = f"{_OWN}, with an update per 4 frames; n-step targets, one epsilon per environment"
_SLM_DQN: dict[str, Any] = dict(
    frames_per_batch=128, updates_per_batch=32, envs_per_collector=4, epsilon=0.1,
    learning_starts=1_000,
)  # fmt: skip
_SLM_PPO: dict[str, Any] = dict(learners=1, frames_per_batch=1024, anneal=False)
_SLM_CARTPOLE = _SLM_PPO | dict(
    minibatches=8, epochs=15, learning_rate=6e-4, gamma=0.9769, gae_lambda=0.9112, clip=0.1312,
    entropy_coef=0.0074, critic_coef=0.6049,
)  # fmt: skip
_SLM_ACROBOT = _SLM_PPO | dict(minibatches=16, epochs=10, learning_rate=3e-4)
_SLM_LUNAR = _SLM_PPO | dict(
    envs_per_collector=8, frames_per_batch=4096, minibatches=16, epochs=15, learning_rate=5.65e-4,
    gamma=0.9914, gae_lambda=0.9527, clip=0.22, entropy_coef=1e-5, critic_coef=1.1395,
    max_grad_norm=1.0, hidden=(128, 128), normalize_observations=True, normalize_rewards=True,
)  # fmt: skip
_ONE_RATE = "the critic learns at the policy's rate"
_SLM_SAC: dict[str, Any] = dict(
    hidden=(256, 256), batch_size=256, learning_rate=3e-4, updates_per_frame=0.25,
    learning_starts=1_000, frames_per_batch=64,
)  # fmt: skip
_HALF = "the temperature aims at half of the largest entropy"
_ZOO_TARGETS = "double DQN; soft target updates and one constant epsilon per environment"
_ZOO_DQN: dict[str, Any] = dict(
    hidden=(256, 256), batch_size=128, learning_rate=6.3e-4, learning_rate_end=6.3e-4, n_steps=1,
    alpha=0.0, frames_per_batch=64, updates_per_batch=64, envs_per_collector=4, epsilon=0.2,
    learning_starts=128, target_tau=0.01,
)  # fmt: skip
_ZOO_CARTPOLE = _ZOO_DQN | dict(
    batch_size=64, learning_rate=2.3e-3, learning_rate_end=2.3e-3, frames_per_batch=256,
    updates_per_batch=128, learning_starts=1_000, capacity=100_000, target_tau=0.005,
    epsilon=0.1, epsilon_alpha=0.0,
)  # fmt: skip
# CleanRL halves squared errors, so its vf_coef is twice our critic_coef.
_CLEANRL: dict[str, Any] = dict(
    learners=1, envs_per_collector=1, frames_per_batch=2048, minibatches=32, epochs=10,
    learning_rate=3e-4, gamma=0.99, gae_lambda=0.95, clip=0.2, entropy_coef=0.0, critic_coef=0.25,
    max_grad_norm=0.5, clip_value=True, anneal_clip=False,
)  # fmt: skip
_ZOO_PPO: dict[str, Any] = dict(
    learners=1, envs_per_collector=8, frames_per_batch=256, minibatches=1, epochs=20, gamma=0.98,
    gae_lambda=0.8, entropy_coef=0.0, learning_rate=1e-3,
)  # fmt: skip
_ZOO_DOORKEY: dict[str, Any] = dict(
    learners=1, envs_per_collector=8, frames_per_batch=1024, minibatches=16, epochs=10, gamma=0.99,
    gae_lambda=0.95, entropy_coef=0.0, critic_coef=0.5, learning_rate=2.5e-4, max_grad_norm=0.5,
    clip=0.2, anneal=False, anneal_clip=False, normalize_rewards=True,
)  # fmt: skip
_CARTPOLE, _ACROBOT, _LUNAR = "CartPole-v1", "Acrobot-v1", "LunarLander-v3"
_HIDDEN_SPEED = "torchrl_dist.recipes.tasks:cartpole_without_velocities"
ROWS: dict[str, Published] = {
    "slm-dqn-cartpole": Published("slm", "apex", _CARTPOLE, 200_000, 451.5, None, _SLM_DQN, _DQN),
    "slm-dqn-acrobot": Published("slm", "apex", _ACROBOT, 300_000, -83.9, None, _SLM_DQN, _DQN),
    "slm-dqn-lunar": Published("slm", "apex", _LUNAR, 300_000, 265.9, None, _SLM_DQN, _DQN),
    "slm-ppo-cartpole": Published(
        "slm", "ddppo", _CARTPOLE, 200_000, 498.9, None, _SLM_CARTPOLE, _ONE_RATE
    ),
    "slm-ppo-acrobot": Published(
        "slm", "ddppo", _ACROBOT, 300_000, -81.3, None, _SLM_ACROBOT, _ONE_RATE
    ),
    "slm-ppo-lunar": Published(
        "slm", "ddppo", _LUNAR, 300_000, 183.3, None, _SLM_LUNAR,
        f"{_ONE_RATE}, and observations and rewards are normalized instead; the clip range is 0.22 "
        "instead of falling from 0.236 to 0.2",
    ),
    "slm-sac-cartpole": Published(
        "slm", "sac", _CARTPOLE, 200_000, 406.1, None, _SLM_SAC, _HALF
    ),
    "slm-sac-acrobot": Published("slm", "sac", _ACROBOT, 300_000, -92.6, None, _SLM_SAC, _HALF),
    "slm-sac-pendulum": Published("slm", "sac", "Pendulum-v1", 300_000, -151.0, None, {}, _OWN),
    "zoo-dqn-cartpole": Published(
        "zoo", "apex", _CARTPOLE, 50_000, 500.0, 0.0, _ZOO_CARTPOLE, _ZOO_TARGETS, 300
    ),
    "zoo-dqn-acrobot": Published(
        "zoo", "apex", _ACROBOT, 100_000, -76.6, 11.8, _ZOO_DQN, _ZOO_TARGETS, 1932
    ),
    "zoo-dqn-lunar": Published(
        "zoo", "apex", _LUNAR, 100_000, 154.4, 79.2, _ZOO_DQN,
        f"{_ZOO_TARGETS}; theirs is LunarLander-v2", 200,
    ),
    "zoo-ppo-cartpole": Published(
        "zoo", "ddppo", _CARTPOLE, 100_000, 500.0, 0.0, _ZOO_PPO, episodes=300
    ),
    "zoo-sac-pendulum": Published(
        "zoo", "sac", "Pendulum-v1", 20_000, -157.0, 88.7,
        {"hidden": (256, 256), "batch_size": 256, "envs_per_collector": 1, "learning_rate": 1e-3},
        episodes=750,
    ),
    "zoo-sac-car": Published(
        "zoo", "sac", "MountainCarContinuous-v0", 50_000, 94.7, 1.1,
        {"learning_rate": 3e-4, "batch_size": 512, "target_tau": 0.01, "gamma": 0.9999},
        "no state-dependent exploration (gSDE), on which the source relies", 1443,
    ),
    "rllib-impala-cartpole": Published(
        "rllib", "impala", _CARTPOLE, 500_000, 450.0, None, {},
        f"{_OWN}; the source ends a run at 450, within 2 million frames",
    ),
    "hub-lstm-cartpole": Published(
        "sb3-hub", "r2d2", _HIDDEN_SPEED, 100_000, 500.0, None, {},
        "R2D2; theirs is PPO with an LSTM",
    ),
    "hub-ppo-doorkey": Published(
        "hub-minigrid", "ddppo", "MiniGrid-DoorKey-5x5-v0", 100_000, 0.97, 0.01, _ZOO_DOORKEY,
        "cells are one-hot and go through convolutions; theirs are flat numbers, normalized", 10,
    ),
    **{
        f"cleanrl-ppo-{name.lower()}": Published(
            "cleanrl", "ddppo", f"{name}-v4", 1_000_000, mean, spread, _CLEANRL,
            "values bootstrap at time limits; advantages and observations are normalized per batch",
        )
        for name, mean, spread in (
            ("HalfCheetah", 1442.6, 46.0), ("Hopper", 2382.9, 271.7), ("Walker2d", 2287.9, 571.8),
            ("InvertedPendulum", 963.1, 22.0),
        )
    },
}  # fmt: skip
"""All rows by name, the quickest of each source first where that is known."""


def interval(values: Sequence[float], draws: int = 10_000) -> tuple[float, float]:
    """Return the 95 % interval of the mean of ``values``, by the percentile bootstrap.

    See Efron and Tibshirani 1993, An Introduction to the Bootstrap, section 13.3. With a single
    value, both bounds are this value.
    """
    import numpy as np

    rng = np.random.default_rng(0)
    means = rng.choice(np.asarray(values), (draws, len(values))).mean(1)
    low, high = np.quantile(means, (0.025, 0.975))
    return float(low), float(high)


def verdict(ours: tuple[float, float], theirs: tuple[float, float]) -> str:
    """Return ``"reproduced"`` if the intervals overlap, else ``"above"`` or ``"below"``."""
    if ours[0] > theirs[1]:
        return "above"
    return "below" if ours[1] < theirs[0] else "reproduced"
