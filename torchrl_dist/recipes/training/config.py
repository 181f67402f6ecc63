"""The common base of the recipes' configurations. ``--help`` reads this module without importing
torch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from ...errors import ConfigurationError
from ..parts.environments import MAX_EPISODE_STEPS, Continuous, Task
from .options import check_options, flag, from_plain, option

JOB = "job"
LEARNING = "learning"
REPLAY = "replay"
WATCHING = "evaluation and checkpoints"

MEASURED = "the number that suits this machine; measuring it takes two seconds"


Config = TypeVar("Config", bound="RecipeConfig")


def or_if_continuous(given: bool | None, task: Task) -> bool:
    """Return ``given`` or, if it is None, whether the actions of ``task`` are continuous."""
    return given if given is not None else not task.num_actions


@dataclass(frozen=True)
class RecipeConfig:
    """The fields and the files that every recipe has. A recipe's class may change the defaults.

    Attributes:
        recipe: the recipe's name on the command line and in checkpoints.
        title: the recipe's name in pictures.
        policy_kind: the kind of the policy's network (see ``PolicySpec.of``).
        continuous: the kind of continuous actions that the recipe takes in addition to discrete
            actions.
        fixed_on_resume: fields that a resumed run cannot change, because they describe the data
            and weights on disk.
    """

    recipe: ClassVar[str]
    title: ClassVar[str]
    policy_kind: ClassVar[str]
    continuous: ClassVar[Continuous] = "none"
    fixed_on_resume: ClassVar[tuple[str, ...]] = ("env", "hidden", "network")

    env: str = option(
        "CartPole-v1", "gymnasium environment id, or package.module:function that makes one",
        group=JOB,
    )  # fmt: skip
    seed: int = option(0, "seed of the whole job", minimum=0, maximum=2**31 - 1, group=JOB)
    output_dir: str | None = option(
        None, "folder of this run (default: runs/RECIPE-ENV-seedSEED)", group=JOB
    )
    collectors: int = option(
        2, "processes that step environments; 0: the learner steps them", minimum=0, group=JOB,
        otherwise=MEASURED,
    )  # fmt: skip
    envs_per_collector: int = option(16, "environments per collector", minimum=1, group=JOB)
    total_frames: int = option(200_000, "length of the run", unit="frames", minimum=1, group=JOB)
    frames_per_batch: int = option(
        512, "frames from all collectors together between two updates of their weights", minimum=1,
        group=JOB,
    )  # fmt: skip
    max_policy_lag: int = option(
        1,
        "rollouts by which a collector may be ahead of the learner; 0: collectors and learner "
        "take turns",
        minimum=0,
        group=JOB,
    )
    timeout_s: float = option(60.0, "deadline of each remote call", unit="s", above=0, group=JOB)
    device: str = option(
        "auto", "where the learner computes: cpu, cuda, or auto (a GPU if there is one)", group=JOB
    )

    learning_rate: float = option(1e-3, "initial step size of Adam", above=0, group=LEARNING)
    gamma: float = option(0.99, "discount per step", above=0, maximum=1, group=LEARNING)
    reward_clip: float = option(
        0.0,
        "X: training clips rewards to the range from -X to X (1 is usual for Atari); 0: no "
        "clipping. The training return sums the clipped rewards; evaluations do not clip rewards",
        minimum=0,
        group=LEARNING,
    )
    hidden: tuple[int, ...] = option(
        (64, 64), "widths of the hidden layers; for images, of the layers after the convolutions",
        minimum=1, group=LEARNING,
    )  # fmt: skip
    network: str | None = option(
        None,
        "package.module:function that makes the layers of each network, instead of --hidden: "
        "function(inputs, outputs) returns a torch module that maps float32 [..., inputs] to "
        "[..., outputs]. With images, inputs is (channels, height, width), and the module gets "
        "float32 [N, *inputs] in [0, 1]",
        group=LEARNING,
    )

    eval_interval_frames: int = option(
        5_000, "frames between two evaluations", unit="frames", minimum=1, group=WATCHING
    )
    eval_episodes: int = option(
        20,
        "greedy episodes per evaluation, during training and at the end",
        minimum=1,
        group=WATCHING,
    )
    eval_max_steps: int = option(
        MAX_EPISODE_STEPS, "maximum length of an episode in an evaluation", unit="steps",
        minimum=1, group=WATCHING,
    )  # fmt: skip
    checkpoint_interval_s: float = option(
        15.0, "time between two checkpoints", unit="s", minimum=0, group=WATCHING
    )
    callback: str | None = option(
        None,
        "package.module:function that returns a Callback, whose methods the run calls after "
        "batches, evaluations and checkpoints; these methods may end the run",
        group=WATCHING,
    )
    video: bool = option(
        False,
        "write a video of one episode of each new best policy to OUTPUT_DIR/videos; training waits "
        "meanwhile",
        group=WATCHING,
    )
    wandb: str | None = option(
        None,
        "also log to this project of Weights & Biases; WANDB_MODE=offline logs to OUTPUT_DIR",
        group=WATCHING,
    )

    def __post_init__(self) -> None:
        check_options(self)
        if self.device not in ("auto", "cpu", "cuda"):
            raise ConfigurationError(f"--device: got {self.device!r}, expected auto, cpu or cuda")

    @property
    def state_size(self) -> int:
        """The size of the policy's LSTM; 0: the policy has no memory."""
        return getattr(self, "lstm", 0)

    def normalizes(self, task: Task) -> bool:
        """Whether the policy of ``task`` normalizes observations that are not images."""
        return or_if_continuous(getattr(self, "normalize_observations", False), task)

    @property
    def output_path(self) -> Path:
        """The folder of this run's files."""
        if self.output_dir is not None:
            return Path(self.output_dir)
        name = self.env.replace("/", "-").replace(":", "-")
        return Path("runs") / f"{self.recipe}-{name}-seed{self.seed}"

    @property
    def replay_path(self) -> Path | None:
        """The folder of the shared replay buffer, if the recipe has one."""
        return None

    @property
    def checkpoint_path(self) -> Path:
        """The checkpoint of this run, for ``play`` and ``--resume``."""
        return self.output_path / "checkpoint.pt"

    def roles(self, launched: int | None) -> dict[str, int]:
        """Return the number of processes per role.

        Args:
            launched: number of ranks that a launcher has started; None: there is no launcher.

        Raises:
            ConfigurationError: the options do not fit this number of ranks.
        """
        if launched is None:
            return {
                "learner": 1,
                "collector": self.collectors,
                "evaluator": int(self.collectors > 0),
            }
        return {"learner": 1, "collector": -1}

    def check_launched(self, given: Mapping[str, Any], launched: int) -> None:
        """Refuse ``given`` options that contradict the number of ``launched`` ranks."""
        learners = getattr(self, "learners", 1)
        others = launched - learners
        if given.get("collectors", others) != others:
            raise ConfigurationError(
                f"--collectors: got {given['collectors']}, but the launcher started {others} ranks "
                f"in addition to the learner{'s' * (learners > 1)}; leave the option out, and "
                "start one rank for each process that you want (torchrun --nproc-per-node, slurm "
                "--tasks-per-node)"
            )

    def anchored(self: Config) -> Config:
        """Return a copy with absolute paths, because an environment may change the working
        directory."""
        folders = {"output_dir": str(self.output_path.absolute())}
        if (replay := getattr(self, "replay_dir", None)) is not None:
            folders["replay_dir"] = str(Path(replay).absolute())
        return dataclasses.replace(self, **folders)  # type: ignore[arg-type]  # they are fields

    def as_plain(self) -> dict[str, Any]:
        """Return plain values for a checkpoint."""
        return dataclasses.asdict(self)


@dataclass(frozen=True)
class ReplayConfig(RecipeConfig):
    """Fields of the recipes with a replay buffer."""

    replay_dir: str | None = option(
        None,
        "folder of the replay buffer, e.g. in /dev/shm (default: OUTPUT_DIR/replay). If there are "
        "several nodes, each keeps a part of the buffer in a folder with this path (default: in "
        "memory, where --resume does not find it). A copied run needs its own folder",
        group=JOB,
    )
    learning_starts: int = option(
        2_000, "rows in the buffer before the first update", minimum=1, group=LEARNING
    )
    capacity: int = option(50_000, "maximum number of rows in the buffer", minimum=1, group=REPLAY)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.learning_starts > self.capacity:
            raise ConfigurationError(
                f"--learning-starts: got {self.learning_starts}, expected at most the capacity "
                f"({self.capacity})"
            )

    @property
    def replay_path(self) -> Path:
        return Path(self.replay_dir) if self.replay_dir is not None else self.output_path / "replay"


def config_to_resume(config_class: type[Config], path: Path, given: dict[str, Any]) -> Config:
    """Return the configuration in the checkpoint ``path``, with the ``given`` fields replaced.

    Raises:
        CheckpointError: the checkpoint is missing or damaged.
        ConfigurationError: a given field does not fit the weights or rows on disk.
    """
    from ...checkpoint import load_checkpoint  # needs torch

    saved = load_checkpoint(path, recipe=config_class.recipe).config
    before = from_plain(config_class, saved)
    for name in config_class.fixed_on_resume:
        if name in given and given[name] != getattr(before, name):
            raise ConfigurationError(
                f"{flag(name)}: got {given[name]}, but the run to resume has "
                f"{getattr(before, name)}, which cannot change; leave the option out"
            )
    values = {**before.as_plain(), **given}
    if before.output_path.resolve() != path.parent.resolve():  # the run was moved or copied
        values["output_dir"] = str(path.parent)
    return from_plain(config_class, values)
