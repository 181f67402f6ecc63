"""Configuration of the DD-PPO recipe, which the command line shows without importing torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from ...errors import ConfigurationError
from ..parts.environments import Continuous, Task
from ..training.config import JOB, LEARNING, MEASURED, RecipeConfig, or_if_continuous
from ..training.options import option

_CONTINUOUS = "if actions are continuous"


@dataclass(frozen=True)
class DDPPOConfig(RecipeConfig):
    """PPO with several learners, each with its own environments (Wijmans et al. 2020, "DD-PPO",
    arXiv:1911.00357; Schulman et al. 2017, arXiv:1707.06347). Continuous actions are handled as in
    CleanRL's ppo_continuous_action.py.
    """

    recipe: ClassVar[str] = "ddppo"
    title: ClassVar[str] = "DD-PPO"
    policy_kind: ClassVar[str] = "categorical"
    continuous: ClassVar[Continuous] = "any"
    fixed_on_resume: ClassVar[tuple[str, ...]] = (
        *RecipeConfig.fixed_on_resume,
        "normalize_observations",
        "normalize_rewards",
    )

    learners: int = option(
        2, "processes that learn together; with a launcher, its ranks set this number", minimum=1,
        group=JOB, otherwise=MEASURED,
    )  # fmt: skip
    collectors: int = option(
        0, "processes per learner that step environments; 0: the learner steps them",
        minimum=0, group=JOB,
    )  # fmt: skip
    envs_per_collector: int = option(
        4, "environments per collector, or per learner without collectors", minimum=1, group=JOB
    )
    frames_per_batch: int = option(
        1024, "frames of the whole job between two updates of the policy", minimum=1, group=JOB
    )
    max_policy_lag: int = option(
        0, "rollouts by which a collector may be ahead; above 0, data are off-policy", minimum=0,
        group=JOB,
    )  # fmt: skip
    preempt_fraction: float = option(
        0.6, "once this fraction of all collectors (without collectors: of all learners) is done, "
        "the others stop early; 1: never", above=0, maximum=1, group=JOB,
    )  # fmt: skip
    preempt_min_part: float = option(
        0.25, "fraction of a rollout that must be done before it may stop early", above=0,
        maximum=1, group=JOB,
    )  # fmt: skip

    epochs: int = option(4, "passes over each batch", minimum=1, group=LEARNING)
    minibatches: int = option(
        4, "gradient steps per pass, each with a part of every learner's rows", minimum=1,
        group=LEARNING,
    )  # fmt: skip
    gae_lambda: float = option(
        0.95, "lambda of the advantage estimate", minimum=0, maximum=1, group=LEARNING
    )
    clip: float = option(
        0.2, "initial clip range: the policy's ratio is kept between 1 - clip and 1 + clip",
        above=0, maximum=1, group=LEARNING,
    )  # fmt: skip
    clip_value: bool = option(
        False, "also keep the critic's values within the clip range around the earlier values",
        group=LEARNING,
    )  # fmt: skip
    anneal: bool = option(
        True,
        "decay learning rate and clip range linearly to 0 over the job's frames",
        group=LEARNING,
    )
    anneal_clip: bool = option(
        True, "with --no-anneal-clip, only the learning rate decays", group=LEARNING
    )
    normalize_observations: bool | None = option(
        None, "normalize flat observations by their mean and standard deviation so far, over all "
        "learners", group=LEARNING, otherwise=_CONTINUOUS,
    )  # fmt: skip
    normalize_rewards: bool | None = option(
        None, "divide rewards by the standard deviation of the discounted return so far, over all "
        "learners; evaluations sum unscaled rewards", group=LEARNING, otherwise=_CONTINUOUS,
    )  # fmt: skip
    entropy_coef: float = option(0.01, "weight of the entropy bonus", minimum=0, group=LEARNING)
    critic_coef: float = option(0.5, "weight of the critic's loss", minimum=0, group=LEARNING)
    max_grad_norm: float = option(0.5, "maximum norm of the gradients", above=0, group=LEARNING)
    target_kl: float = option(
        0.0, "end a batch's updates when the KL divergence (mean over all rows) exceeds 1.5 times "
        "this; 0: never", minimum=0, group=LEARNING,
    )  # fmt: skip

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_frames(self.learners)

    def scales_rewards(self, task: Task) -> bool:
        """Whether the learners of ``task`` scale rewards."""
        return or_if_continuous(self.normalize_rewards, task)

    def _check_frames(self, learners: int) -> None:
        """Check that each learner has a row per minibatch, even after its rollout was cut short."""
        cut = self.preempt_fraction < 1 and learners * max(1, self.collectors) > 1
        part = self.preempt_min_part if cut else 1.0
        least = learners * math.ceil(self.minibatches / part)
        if self.frames_per_batch < least:
            of_which = f", because rollouts may be cut to {part:g} of their length" if cut else ""
            raise ConfigurationError(
                f"--frames-per-batch: got {self.frames_per_batch}, expected at least {least} for "
                f"{learners} learners and {self.minibatches} minibatches{of_which}"
            )

    def roles(self, launched: int | None) -> dict[str, int]:
        if launched is None:
            others = self.learners * (1 + self.collectors) - 1
            return {
                "learner": self.learners,
                "collector": self.learners * self.collectors,
                "evaluator": int(others > 0),
            }
        learners, left = divmod(launched, 1 + self.collectors)
        if left or not learners:
            raise ConfigurationError(
                f"--collectors: got {self.collectors} collectors for each learner, expected a "
                f"number n such that 1 + n divides the launcher's {launched} ranks; change "
                "--collectors or the number of ranks"
            )
        self._check_frames(learners)
        return {"learner": learners, "collector": launched - learners}

    def check_launched(self, given: Mapping[str, Any], launched: int) -> None:
        learners = self.roles(launched)["learner"]
        if given.get("learners", learners) != learners:
            raise ConfigurationError(
                f"--learners: got {given['learners']}, but {learners} of the launcher's {launched} "
                "ranks learn; leave the option out"
            )
