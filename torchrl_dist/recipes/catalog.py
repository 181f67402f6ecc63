"""The recipes by name. Every command line reads this module, so it does not import torch."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .apex.config import ApexConfig
from .ddppo.config import DDPPOConfig
from .impala.config import ImpalaConfig
from .r2d2.config import R2D2Config
from .sac.config import SACConfig
from .training.config import RecipeConfig


@dataclass(frozen=True)
class Recipe:
    """A recipe as the command line shows it.

    Attributes:
        config: its configuration.
        summary: half a line, for the list of recipes.
        description: a few lines, for ``--help``.
        ranks: the roles of a launcher's ranks, in words.
    """

    config: type[RecipeConfig]
    summary: str
    description: str
    ranks: str

    def load_run(self) -> Callable[..., dict[str, Any]]:
        """Return ``run(config, session, resume=)``. Imports torch."""
        return importlib.import_module(f".{self.config.recipe}.recipe", __package__).run


RECIPES: dict[str, Recipe] = {
    "apex": Recipe(
        ApexConfig,
        "distributed prioritized n-step double DQN",
        "Train with distributed prioritized n-step double DQN (Ape-X): collectors step "
        "environments and write to one shared replay buffer, and learners learn from it. "
        "Environments: gymnasium's with discrete actions, and vectors or images as observations.",
        "rank 0 learns (with --learners L, the first L ranks), and the other ranks collect",
    ),
    "ddppo": Recipe(
        DDPPOConfig,
        "PPO with several learners that average their gradients",
        "Train with PPO and several learners, each with its own environments, that average their "
        "gradients (DD-PPO). Environments: gymnasium's with discrete or continuous actions, and "
        "vectors or images as observations.",
        "all ranks learn; with --collectors K, one rank in K + 1 learns, and the others collect",
    ),
    "impala": Recipe(
        ImpalaConfig,
        "actors that run ahead of one learner, which corrects for the lag with V-trace",
        "Train with IMPALA: collectors run ahead of one learner, which takes each rollout as it "
        "arrives and corrects for older policies with V-trace. Environments: gymnasium's with "
        "discrete actions, and vectors or images as observations.",
        "rank 0 is the learner and the other ranks collect",
    ),
    "r2d2": Recipe(
        R2D2Config,
        "Ape-X for a policy with a memory (LSTM), which learns from sequences",
        "Train with recurrent double Q-learning (R2D2), for environments that hide a part of "
        "their state: collectors store the LSTM's state with each step, and learners learn from "
        "sequences of steps. Environments: gymnasium's with discrete actions, and vectors or "
        "images as observations.",
        "rank 0 learns (with --learners L, the first L ranks), and the other ranks collect",
    ),
    "sac": Recipe(
        SACConfig,
        "soft actor-critic with a set number of updates per frame",
        "Train with soft actor-critic: collectors write to one shared replay buffer, whose limiter "
        "keeps the number of gradient steps per frame constant. Environments: gymnasium's with "
        "discrete actions and vectors or images as observations, or with bounded continuous "
        "actions and vectors.",
        "rank 0 is the learner and the other ranks collect",
    ),
}
