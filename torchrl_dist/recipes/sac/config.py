"""Configuration of the SAC recipe, which the command line shows without importing torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..parts.environments import Continuous
from ..training.config import JOB, LEARNING, REPLAY, WATCHING, RecipeConfig, ReplayConfig
from ..training.options import option


@dataclass(frozen=True)
class SACConfig(ReplayConfig):
    """Soft actor-critic (Haarnoja et al. 2018, arXiv:1812.05905). A rate limiter keeps the
    collectors in step with the learner."""

    recipe: ClassVar[str] = "sac"
    title: ClassVar[str] = "SAC"
    policy_kind: ClassVar[str] = "squashed_gaussian"
    continuous: ClassVar[Continuous] = "bounded"
    fixed_on_resume: ClassVar[tuple[str, ...]] = (
        *RecipeConfig.fixed_on_resume,
        "capacity",
        "reward_clip",  # rows hold clipped rewards
        "normalize_observations",
    )

    env: str = option(
        "Pendulum-v1", "gymnasium environment id, or package.module:function that makes one",
        group=JOB,
    )  # fmt: skip
    envs_per_collector: int = option(4, "environments per collector", minimum=1, group=JOB)
    total_frames: int = option(20_000, "length of the run", unit="frames", minimum=1, group=JOB)
    frames_per_batch: int = option(
        32, "frames from all collectors together between two updates of their weights", minimum=1,
        group=JOB,
    )  # fmt: skip
    eval_interval_frames: int = option(
        2_000, "frames between two evaluations", unit="frames", minimum=1,
        group=WATCHING,
    )  # fmt: skip

    updates_per_frame: float = option(
        1.0, "gradient steps per frame, enforced by the buffer's limiter", above=0, group=LEARNING
    )
    batch_size: int = option(128, "rows per gradient step", minimum=1, group=LEARNING)
    target_tau: float = option(
        0.005, "fraction by which each update moves the target networks towards the trained ones",
        above=0, maximum=1, group=LEARNING,
    )  # fmt: skip
    normalize_observations: bool = option(
        False, "normalize flat observations by the mean and standard deviation of the rows that "
        "updates have sampled", group=LEARNING,
    )  # fmt: skip
    learning_starts: int = option(
        256, "rows in the buffer before the first update; actions are random until then",
        minimum=1, group=LEARNING,
    )  # fmt: skip

    capacity: int = option(100_000, "maximum number of rows in the buffer", minimum=1, group=REPLAY)
