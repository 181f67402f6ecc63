"""Configuration of the R2D2 recipe, which the command line shows without importing torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..apex.config import ApexConfig
from ..training.config import JOB, LEARNING, REPLAY, WATCHING
from ..training.options import option


@dataclass(frozen=True)
class R2D2Config(ApexConfig):
    """Recurrent double Q-learning from stored states (Kapturowski et al. 2019, "Recurrent
    Experience Replay in Distributed Reinforcement Learning")."""

    recipe: ClassVar[str] = "r2d2"
    title: ClassVar[str] = "R2D2"
    policy_kind: ClassVar[str] = "recurrent_values"
    fixed_on_resume: ClassVar[tuple[str, ...]] = (*ApexConfig.fixed_on_resume, "lstm")

    collectors: int = option(
        2, "processes that step environments; 0: the learner steps them", minimum=0, group=JOB
    )
    total_frames: int = option(300_000, "length of the run", unit="frames", minimum=1, group=JOB)
    eval_interval_frames: int = option(
        10_000, "frames between two evaluations", unit="frames", minimum=1, group=WATCHING
    )

    hidden: tuple[int, ...] = option(
        (64,), "widths of the layers before the LSTM; for images, of those after the convolutions",
        minimum=1, group=LEARNING,
    )  # fmt: skip
    lstm: int = option(64, "size of the LSTM", minimum=1, group=LEARNING)
    updates_per_batch: int = option(
        16, "gradient steps per batch of frames; proportionally fewer for a smaller batch",
        minimum=1, group=LEARNING,
    )  # fmt: skip
    batch_size: int = option(64, "sequences per gradient step", minimum=1, group=LEARNING)
    burn_in: int = option(
        10, "steps before each sequence, which only serve to compute the LSTM's state",
        unit="steps", minimum=0, group=LEARNING,
    )  # fmt: skip
    sequence: int = option(
        20, "steps of each sequence to learn from", unit="steps", minimum=1, group=LEARNING
    )
    target_tau: float = option(
        0.01, "fraction by which each update moves the target network towards the trained one",
        above=0, maximum=1, group=LEARNING,
    )  # fmt: skip
    refresh_states: bool = option(
        False, "replace the LSTM states in the buffer's rows with those that the learner computes",
        group=LEARNING,
    )  # fmt: skip
    eta: float = option(
        0.9, "priority of a sequence: eta * largest TD error + (1 - eta) * mean TD error",
        minimum=0, maximum=1, group=REPLAY,
    )  # fmt: skip
