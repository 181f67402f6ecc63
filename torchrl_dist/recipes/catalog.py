"""The recipes by name. Pure, so that the command line can show them without torch."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .apex.config import ApexConfig
from .ddppo.config import DDPPOConfig
from .impala.config import ImpalaConfig
from .sac.config import SACConfig
from .training.config import RecipeConfig


@dataclass(frozen=True)
class Recipe:
    """A recipe as the command line shows it.

    Attributes:
        config: its configuration.
        summary: half a line.
        description: some lines.
        ranks: what the ranks of a launcher are.
    """

    config: type[RecipeConfig]
    summary: str
    description: str
    ranks: str

    def load_run(self) -> Callable[..., dict[str, Any]]:
        """``run(config, session, resume=)``; imports torch."""
        return importlib.import_module(f".{self.config.recipe}.recipe", __package__).run


RECIPES: dict[str, Recipe] = {
    "apex": Recipe(
        ApexConfig,
        "distributed prioritized n-step double DQN",
        "Train with distributed prioritized n-step double DQN (Ape-X): collectors step "
        "environments and write to one shared replay buffer, one learner learns from it. "
        "Environments: gymnasium's with numbered actions that observe numbers or images.",
        "rank 0 is the learner and the other ranks collect",
    ),
    "ddppo": Recipe(
        DDPPOConfig,
        "PPO by several learners that average their gradients",
        "Train with PPO by several learners, each with environments of its own, that average "
        "their gradients (DD-PPO). Environments: gymnasium's with numbered actions that observe "
        "numbers or images.",
        "all ranks learn; with --collectors K the first do, one in K + 1, and the rest collect",
    ),
    "impala": Recipe(
        ImpalaConfig,
        "actors that run ahead of one learner, corrected by V-trace",
        "Train with IMPALA: collectors run ahead of one learner, which takes each rollout as it "
        "arrives and corrects for older policies by V-trace. Environments: gymnasium's with "
        "numbered actions that observe numbers or images.",
        "rank 0 is the learner and the other ranks collect",
    ),
    "sac": Recipe(
        SACConfig,
        "soft actor-critic with a set number of updates per frame",
        "Train with soft actor-critic: collectors write to one shared replay buffer, whose limiter "
        "keeps gradient steps per frame at a set number. Environments: gymnasium's with flat "
        "observations and bounded continuous actions.",
        "rank 0 is the learner and the other ranks collect",
    ),
}
