"""Configuration of the Ape-X recipe. Pure, so that the command line can show it without torch."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import ConfigurationError
from .environments import MAX_EPISODE_STEPS
from .options import check_options, flag, from_plain, option

RECIPE = "apex"

JOB = "job"
LEARNING = "learning"
REPLAY = "replay"
EXPLORATION = "exploration"
WATCHING = "evaluation and checkpoints"

FIXED_ON_RESUME = (
    "env",
    "hidden",
    "gamma",
    "n_steps",
    "capacity",
    "alpha",
)
"""Fields that describe the data and weights on disk: a resumed run cannot change them."""


@dataclass(frozen=True)
class ApexConfig:
    """Distributed prioritized n-step double DQN (Horgan et al. 2018, "Ape-X", arXiv:1803.00933)."""

    env: str = option("CartPole-v1", "gymnasium environment id", group=JOB)
    seed: int = option(0, "seed of the whole job", minimum=0, maximum=2**31 - 1, group=JOB)
    output_dir: str | None = option(
        None, "folder of this run (default: runs/apex-ENV-seedSEED)", group=JOB
    )
    replay_dir: str | None = option(
        None,
        "folder of the replay buffer, e.g. on /dev/shm (default: OUTPUT_DIR/replay)",
        group=JOB,
    )
    collectors: int = option(
        2, "processes that step environments; 0: this process does it", minimum=0, group=JOB
    )
    envs_per_collector: int = option(16, "environments in each of them", minimum=1, group=JOB)
    total_frames: int = option(200_000, "length of the run", unit="frames", minimum=1, group=JOB)
    frames_per_batch: int = option(
        512, "frames of all collectors between two updates of their weights", minimum=1, group=JOB
    )
    max_policy_lag: int = option(
        1,
        "rollouts that a collector may be ahead of the learner; 0: they take turns",
        minimum=0,
        group=JOB,
    )
    timeout_s: float = option(60.0, "deadline of each remote call", unit="s", above=0, group=JOB)

    updates_per_batch: int = option(
        32, "gradient steps per batch of frames", minimum=1, group=LEARNING
    )
    batch_size: int = option(256, "rows per gradient step", minimum=1, group=LEARNING)
    learning_rate: float = option(1e-3, "step size of Adam at the start", above=0, group=LEARNING)
    learning_rate_end: float = option(
        1e-4, "the same at the end; a straight line between", above=0, group=LEARNING
    )
    max_grad_norm: float = option(10.0, "gradients are clipped to it", above=0, group=LEARNING)
    gamma: float = option(0.99, "discount per step", above=0, maximum=1, group=LEARNING)
    n_steps: int = option(5, "rewards summed before the bootstrap", minimum=1, group=LEARNING)
    target_tau: float = option(
        0.02, "share of the weights that the target network takes over per update",
        above=0, maximum=1, group=LEARNING,
    )  # fmt: skip
    hidden: tuple[int, ...] = option(
        (128, 128), "widths of the network's hidden layers", minimum=1, group=LEARNING
    )
    learning_starts: int = option(
        2_000, "rows in the buffer before the first update", minimum=1, group=LEARNING
    )

    capacity: int = option(50_000, "rows the buffer holds", minimum=1, group=REPLAY)
    alpha: float = option(0.6, "rows are drawn as priority^alpha", minimum=0, group=REPLAY)
    beta_start: float = option(
        0.4, "exponent of the importance weights at the start", minimum=0, maximum=1, group=REPLAY
    )
    beta_end: float = option(
        1.0, "the same at the end of the run", minimum=0, maximum=1, group=REPLAY
    )

    epsilon: float = option(
        0.4, "share of random actions of the most curious actor", minimum=0, maximum=1,
        group=EXPLORATION,
    )  # fmt: skip
    epsilon_alpha: float = option(
        7.0, "actor i of N explores with epsilon^(1 + i / (N - 1) * this)", minimum=0,
        group=EXPLORATION,
    )  # fmt: skip

    eval_interval_frames: int = option(
        5_000, "frames between two evaluations", unit="frames", minimum=1, group=WATCHING
    )
    eval_episodes: int = option(
        20, "greedy episodes per evaluation, and at the end", minimum=1, group=WATCHING
    )
    eval_max_steps: int = option(
        MAX_EPISODE_STEPS, "an episode of an evaluation ends after so many", unit="steps",
        minimum=1, group=WATCHING,
    )  # fmt: skip
    checkpoint_interval_s: float = option(
        15.0, "time between two checkpoints", unit="s", minimum=0, group=WATCHING
    )

    def __post_init__(self) -> None:
        check_options(self)
        if self.learning_starts > self.capacity:
            raise ConfigurationError(
                f"--learning-starts: got {self.learning_starts}, expected at most the capacity "
                f"({self.capacity})"
            )

    @property
    def output_path(self) -> Path:
        """Folder of this run's files."""
        if self.output_dir is not None:
            return Path(self.output_dir)
        return Path("runs") / f"apex-{self.env.replace('/', '-')}-seed{self.seed}"

    @property
    def replay_path(self) -> Path:
        """Folder of the shared replay buffer."""
        return Path(self.replay_dir) if self.replay_dir is not None else self.output_path / "replay"

    @property
    def checkpoint_path(self) -> Path:
        """The one checkpoint of this run: for ``play`` and for ``--resume``."""
        return self.output_path / "checkpoint.pt"

    def as_plain(self) -> dict[str, Any]:
        """Plain values for a checkpoint."""
        return dataclasses.asdict(self)


def config_to_resume(path: Path, given: dict[str, Any]) -> ApexConfig:
    """The configuration in the checkpoint ``path``, with the ``given`` fields replaced.

    Raises:
        CheckpointError: the checkpoint is missing or damaged.
        ConfigurationError: a given field would not fit the weights or rows on disk.
    """
    from ..checkpoint import load_checkpoint  # needs torch

    before = from_plain(ApexConfig, load_checkpoint(path, recipe=RECIPE).config)
    for name in FIXED_ON_RESUME:
        if name in given and given[name] != getattr(before, name):
            raise ConfigurationError(
                f"{flag(name)}: got {given[name]}, but the run to resume has "
                f"{getattr(before, name)}, which cannot change; leave it out"
            )
    return from_plain(ApexConfig, {**before.as_plain(), **given})
