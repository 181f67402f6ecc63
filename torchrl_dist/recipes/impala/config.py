"""Configuration of the IMPALA recipe, which the command line shows without importing torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..training.config import JOB, LEARNING, RecipeConfig
from ..training.options import option


@dataclass(frozen=True)
class ImpalaConfig(RecipeConfig):
    """Actors that run ahead of one learner, which corrects for their older policies with V-trace
    (Espeholt et al. 2018, "IMPALA", arXiv:1802.01561)."""

    recipe: ClassVar[str] = "impala"
    title: ClassVar[str] = "IMPALA"
    policy_kind: ClassVar[str] = "categorical"
    fixed_on_resume: ClassVar[tuple[str, ...]] = (
        *RecipeConfig.fixed_on_resume,
        "normalize_observations",
        "normalize_rewards",
    )

    envs_per_collector: int = option(8, "environments per collector", minimum=1, group=JOB)
    frames_per_batch: int = option(
        40, "frames of one collector's rollout, which is one batch: the number of its "
        "environments times the steps of each", minimum=1, group=JOB,
    )  # fmt: skip
    learning_rate: float = option(
        2e-3, "initial step size of Adam without momentum", above=0, group=LEARNING
    )
    anneal: bool = option(True, "decay the learning rate linearly to 0", group=LEARNING)
    rho_bar: float = option(
        1.0, "maximum importance weight in value targets and policy gradient", above=0,
        group=LEARNING,
    )  # fmt: skip
    c_bar: float = option(1.0, "maximum importance weight along a trace", above=0, group=LEARNING)
    entropy_coef: float = option(1e-3, "weight of the entropy bonus", minimum=0, group=LEARNING)
    critic_coef: float = option(0.5, "weight of the critic's loss", minimum=0, group=LEARNING)
    max_grad_norm: float = option(
        0.5, "maximum norm of the gradients of the mean losses", above=0, group=LEARNING
    )
    normalize_observations: bool = option(
        False,
        "normalize flat observations by their mean and standard deviation so far",
        group=LEARNING,
    )
    normalize_rewards: bool = option(
        True,
        "divide rewards by the standard deviation of the discounted return so far; evaluations sum "
        "unscaled rewards",
        group=LEARNING,
    )
