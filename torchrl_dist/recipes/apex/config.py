"""Configuration of the Ape-X recipe, which the command line shows without importing torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ...errors import ConfigurationError
from ..training.config import JOB, LEARNING, REPLAY, RecipeConfig, ReplayConfig
from ..training.options import flag, option

EXPLORATION = "exploration"


@dataclass(frozen=True)
class ApexConfig(ReplayConfig):
    """Distributed prioritized n-step double DQN (Horgan et al. 2018, "Ape-X", arXiv:1803.00933)."""

    recipe: ClassVar[str] = "apex"
    title: ClassVar[str] = "Ape-X"
    policy_kind: ClassVar[str] = "values"
    fixed_on_resume: ClassVar[tuple[str, ...]] = (
        *RecipeConfig.fixed_on_resume,
        "gamma",
        "n_steps",
        "capacity",
        "alpha",
        "reward_clip",  # rows hold clipped rewards
    )

    learners: int = option(
        1, "processes that learn together, each from its part of every batch", minimum=1, group=JOB
    )
    hidden: tuple[int, ...] = option(
        (128, 128), "widths of the hidden layers; for images, of the layers after the convolutions",
        minimum=1, group=LEARNING,
    )  # fmt: skip
    updates_per_batch: int = option(
        32, "gradient steps per batch of frames; proportionally fewer for a smaller batch",
        minimum=1, group=LEARNING,
    )  # fmt: skip
    batch_size: int = option(256, "rows per gradient step", minimum=1, group=LEARNING)
    learning_rate_end: float = option(
        1e-4, "final learning rate; the rate changes linearly", above=0, group=LEARNING
    )
    max_grad_norm: float = option(10.0, "maximum norm of the gradients", above=0, group=LEARNING)
    n_steps: int = option(5, "rewards summed before the bootstrap", minimum=1, group=LEARNING)
    target_tau: float = option(
        0.02, "fraction by which each update moves the target network towards the trained one",
        above=0, maximum=1, group=LEARNING,
    )  # fmt: skip

    alpha: float = option(
        0.6, "rows are drawn in proportion to priority^alpha", minimum=0, group=REPLAY
    )
    beta_start: float = option(
        0.4, "exponent of the importance weights at the start", minimum=0, maximum=1, group=REPLAY
    )
    beta_end: float = option(
        1.0, "exponent of the importance weights at the end", minimum=0, maximum=1, group=REPLAY
    )

    epsilon: float = option(
        0.4, "epsilon of the actor that explores most", minimum=0, maximum=1,
        group=EXPLORATION,
    )  # fmt: skip
    epsilon_alpha: float = option(
        7.0, "actor i of N explores with epsilon^(1 + i / (N - 1) * this)", minimum=0,
        group=EXPLORATION,
    )  # fmt: skip

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("batch_size", "frames_per_batch"):
            if getattr(self, name) % self.learners:
                raise ConfigurationError(
                    f"{flag(name)}: got {getattr(self, name)}, expected a multiple of --learners "
                    f"({self.learners})"
                )

    def roles(self, launched: int | None) -> dict[str, int]:
        collectors = self.collectors if launched is None else launched - self.learners
        if collectors and collectors < self.learners:
            raise ConfigurationError(
                f"--learners: got {self.learners} with {collectors} collectors, expected at least "
                "one collector per learner, or no collectors"
            )
        roles = {"learner": self.learners, "collector": collectors}
        if launched is None:
            roles["evaluator"] = int(collectors > 0)
        return roles
