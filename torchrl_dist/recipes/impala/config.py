"""Configuration of the IMPALA recipe. Pure, so that the command line can show it without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..training.config import JOB, LEARNING, RecipeConfig
from ..training.options import option


@dataclass(frozen=True)
class ImpalaConfig(RecipeConfig):
    """Actors that run ahead of one learner, which corrects for it by V-trace (Espeholt et al. 2018,
    "IMPALA", arXiv:1802.01561)."""

    recipe: ClassVar[str] = "impala"
    title: ClassVar[str] = "IMPALA"
    policy_kind: ClassVar[str] = "categorical"

    total_frames: int = option(400_000, "length of the run", unit="frames", minimum=1, group=JOB)
    frames_per_batch: int = option(
        320, "frames of one collector's rollout, which is a batch; its steps are this by its "
        "environments", minimum=1, group=JOB,
    )  # fmt: skip
    learning_rate: float = option(2e-3, "step size of Adam at the start", above=0, group=LEARNING)
    anneal: bool = option(True, "the learning rate goes to 0, linearly", group=LEARNING)
    rho_bar: float = option(
        1.0, "importance weights of the values and the policy are clipped to it", above=0,
        group=LEARNING,
    )  # fmt: skip
    c_bar: float = option(
        1.0, "importance weights along a trace are clipped to it", above=0, group=LEARNING
    )
    entropy_coef: float = option(0.01, "weight of the entropy bonus", minimum=0, group=LEARNING)
    critic_coef: float = option(0.5, "weight of the critic's loss", minimum=0, group=LEARNING)
    max_grad_norm: float = option(
        0.5, "gradients (of means over rows) are clipped to it", above=0, group=LEARNING
    )
