"""The cases of the training benchmark, and the evaluation of its runs. Does not import torch."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from torchrl_dist.recipes.catalog import RECIPES
from torchrl_dist.recipes.ddppo.config import DDPPOConfig
from torchrl_dist.recipes.impala.config import ImpalaConfig
from torchrl_dist.recipes.training.config import RecipeConfig

OURS = {f"ours-{n}": n for n in (0, 1, 2, 4)}
"""Number of collecting processes, by peer."""
TORCHRL, SB3 = "torchrl", "sb3"
OTHERS = (TORCHRL, SB3)
PEERS = (*OURS, *OTHERS)

EPISODES = 20
"""Greedy episodes per evaluation; each evaluation plays new ones."""

THRESHOLDS = {
    "CartPole-v1": 475.0, "Pendulum-v1": -200.0, "LunarLander-v3": 200.0, "Acrobot-v1": -100.0
}  # fmt: skip
_EVALUATE_EVERY = {
    "CartPole-v1": 2_000, "Pendulum-v1": 1_000, "LunarLander-v3": 10_000, "Acrobot-v1": 5_000
}  # fmt: skip

_Config = TypeVar("_Config", bound=RecipeConfig)


@dataclass(frozen=True)
class Case:
    """A task for one peer.

    Attributes:
        algorithm: the recipe's name.
        threshold: the mean return of an evaluation at which a run stops.
        frames: a run's length. None: the length that the recipe or the zoo sets.
        limit_s: the time after which a run ends.
        threads: number of torch threads of ``torchrl`` and ``sb3``. Our processes have one thread
            each.
    """

    algorithm: str
    env: str
    peer: str
    threshold: float
    frames: int | None
    limit_s: float
    threads: int

    def __str__(self) -> str:
        return f"{self.algorithm} {self.env} {self.peer}"


@dataclass(frozen=True)
class Point:
    """An evaluation: the policy's mean return after a number of frames and seconds of training."""

    frames: int
    seconds: float
    mean: float


@dataclass(frozen=True)
class Run:
    """The run of one peer with one seed.

    Attributes:
        points: all evaluations, up to the one that reached the threshold.
        ended: why the run ended: ``"threshold"``, ``"frames"`` or ``"time"``.
        start_s: time from the start of the run's process to its first frame. The points do not
            include this time.
        evaluating_s: time of evaluations. The points do not include this time. None: evaluations
            ran at the same time as the training.
        settings: the peer's settings, as plain values.
        learner_waits: share of the time that the learner waited for data. None: unknown.
    """

    seed: int
    points: tuple[Point, ...]
    ended: str
    start_s: float
    evaluating_s: float | None
    settings: dict[str, Any] = field(hash=False)
    learner_waits: float | None = None

    def reached(self, threshold: float) -> Point | None:
        """Return the first evaluation that reached the threshold, or None."""
        return next((point for point in self.points if point.mean >= threshold), None)


def up_to(points: Iterable[Point], threshold: float) -> tuple[Point, ...]:
    """Return the points up to the first one that reaches ``threshold``."""
    every = tuple(points)
    end = next((i for i, point in enumerate(every) if point.mean >= threshold), len(every))
    return every[: end + 1]


# ---- settings


def config_of(case: Case, seed: int) -> RecipeConfig:
    """Return the recipe's configuration, for ours and for TorchRL in one process."""
    settings: dict[str, Any] = {"env": case.env, "seed": seed, "device": "cpu"}
    settings["eval_episodes"] = EPISODES
    if case.env in _EVALUATE_EVERY:
        settings["eval_interval_frames"] = _EVALUATE_EVERY[case.env]
    if case.frames is not None:
        settings["total_frames"] = case.frames
    return spread(RECIPES[case.algorithm].config(**settings), OURS.get(case.peer, 1))


def spread(config: _Config, processes: int) -> _Config:
    """Return the same job with ``processes`` collecting processes. 0: the learner collects.

    The job keeps its number of environments, and therefore the length of its rollouts. An IMPALA
    job keeps the number of environments per collector instead, because its batch is one collector's
    rollout. DD-PPO's processes are learners, each with its own environments.
    """
    if isinstance(config, ImpalaConfig):
        return replace(config, collectors=processes)
    each = max(1, processes)
    if isinstance(config, DDPPOConfig):
        envs = config.learners * config.envs_per_collector
        return replace(config, learners=each, collectors=0, envs_per_collector=max(1, envs // each))
    envs = max(1, config.collectors) * config.envs_per_collector
    return replace(config, collectors=processes, envs_per_collector=max(1, envs // each))


@dataclass(frozen=True)
class Zoo:
    """Settings of rl-baselines3-zoo for one of stable-baselines3's classes.

    Attributes:
        frames: length of a run.
        normalize: whether observations and rewards are normalized by running moments.
        settings: arguments of the class. ``"lin_X"`` is a value that falls linearly from X to 0.
    """

    algorithm: str
    frames: int
    envs: int = 1
    normalize: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)


_DQN: dict[str, Any] = dict(
    learning_rate=6.3e-4, batch_size=128, buffer_size=50_000, learning_starts=0, gamma=0.99,
    target_update_interval=250, train_freq=4, gradient_steps=-1, exploration_fraction=0.12,
    exploration_final_eps=0.1, policy_kwargs={"net_arch": [256, 256]},
)  # fmt: skip
_CARTPOLE: dict[str, Any] = dict(
    learning_rate=2.3e-3, batch_size=64, buffer_size=100_000, learning_starts=1_000,
    target_update_interval=10, train_freq=256, gradient_steps=128, exploration_fraction=0.16,
    exploration_final_eps=0.04,
)  # fmt: skip
# hyperparams/{dqn,ppo,a2c,sac}.yml of DLR-RM/rl-baselines3-zoo, 2026-04-23
ZOO: dict[tuple[str, str], Zoo] = {
    ("apex", "CartPole-v1"): Zoo("DQN", 50_000, settings=_DQN | _CARTPOLE),
    ("apex", "Acrobot-v1"): Zoo("DQN", 100_000, settings=_DQN),
    ("apex", "LunarLander-v3"): Zoo("DQN", 100_000, settings=_DQN),
    ("ddppo", "CartPole-v1"): Zoo("PPO", 100_000, envs=8, settings=dict(
        n_steps=32, batch_size=256, gae_lambda=0.8, gamma=0.98, n_epochs=20, ent_coef=0.0,
        learning_rate="lin_0.001", clip_range="lin_0.2",
    )),
    ("ddppo", "Acrobot-v1"): Zoo("PPO", 1_000_000, envs=16, normalize=True, settings=dict(
        n_steps=256, gae_lambda=0.94, gamma=0.99, n_epochs=4, ent_coef=0.0,
    )),
    ("ddppo", "LunarLander-v3"): Zoo("PPO", 1_000_000, envs=16, settings=dict(
        n_steps=1024, batch_size=64, gae_lambda=0.98, gamma=0.999, n_epochs=4, ent_coef=0.01,
    )),
    ("impala", "CartPole-v1"): Zoo("A2C", 500_000, envs=8, settings=dict(ent_coef=0.0)),
    ("impala", "Acrobot-v1"): Zoo(
        "A2C", 500_000, envs=16, normalize=True, settings=dict(ent_coef=0.0)
    ),
    ("impala", "LunarLander-v3"): Zoo("A2C", 200_000, envs=8, settings=dict(
        gamma=0.995, n_steps=5, learning_rate="lin_0.00083", ent_coef=0.00001,
    )),
    ("sac", "Pendulum-v1"): Zoo("SAC", 20_000, settings=dict(learning_rate=1e-3)),
}  # fmt: skip


# ---- evaluating the runs


@dataclass(frozen=True)
class Row:
    """A line of the table.

    Attributes:
        runs: number of runs.
        reached: number of runs that reached the threshold.
        frames, seconds: frames and seconds until the threshold, as medians over the runs. A run
            that never reaches the threshold counts as infinity.
        frames_per_s: median over the runs.
        learner_waits: median of the runs for which it is known.
        ratios: for one of our peers, its seconds divided by the seconds of each of :data:`OTHERS`.
            At 0.5, ours is twice as fast. None: the other peer was not measured, or neither of the
            two reaches the threshold. 0: only ours reaches the threshold.
    """

    algorithm: str
    env: str
    peer: str
    runs: int
    reached: int
    frames: float
    seconds: float
    frames_per_s: float
    start_s: float
    learner_waits: float | None
    ratios: dict[str, float | None] = field(default_factory=dict, hash=False)


def rows(results: Mapping[Case, list[Run]]) -> list[Row]:
    """Return a row for each case with runs. Each ratio compares cases of the same algorithm and
    environment."""
    found = [_row(case, runs) for case, runs in results.items() if runs]
    by_peer = {(row.algorithm, row.env, row.peer): row for row in found}
    for row in found:
        for name in OTHERS if row.peer in OURS else ():
            row.ratios[name] = ratio(row, by_peer.get((row.algorithm, row.env, name)))
    return found


def ratio(row: Row, other: Row | None) -> float | None:
    """Return the ratio of the seconds of ``row`` and ``other``, as in :class:`Row`."""
    if other is None or (math.isinf(row.seconds) and math.isinf(other.seconds)):
        return None
    return 0.0 if math.isinf(other.seconds) else row.seconds / other.seconds


def _row(case: Case, runs: list[Run]) -> Row:
    ends = [run.reached(case.threshold) for run in runs]
    paces = [run.points[-1].frames / run.points[-1].seconds for run in runs if run.points]
    waits = [run.learner_waits for run in runs if run.learner_waits is not None]
    return Row(
        case.algorithm,
        case.env,
        case.peer,
        len(runs),
        sum(end is not None for end in ends),
        statistics.median(math.inf if end is None else end.frames for end in ends),
        statistics.median(math.inf if end is None else end.seconds for end in ends),
        statistics.median(paces) if paces else 0.0,
        statistics.median(run.start_s for run in runs),
        statistics.median(waits) if waits else None,
    )


def as_line(case: Case, run: Run) -> dict[str, Any]:
    """Return the JSON object of one run."""
    end = run.reached(case.threshold)
    return {
        **{name: getattr(case, name) for name in ("algorithm", "env", "peer", "threshold")},
        **{name: value for name, value in vars(run).items() if name != "points"},
        "reached": end is not None,
        "frames": end.frames if end else None,
        "seconds": end.seconds if end else None,
        "limit_s": case.limit_s,
        "threads": 1 if case.peer in OURS else case.threads,
        "points": [[point.frames, point.seconds, point.mean] for point in run.points],
    }


REASONS = {
    "apex": "collectors add frames, and the updates per frame stay fixed: more collectors pay off "
    "if steps of the environment are expensive, until the learner is the bottleneck",
    "ddppo": "synchronous: learners share the steps and gradients of the same batch, so the number "
    "of frames stays the same (cleanrl's multi-GPU PPO: 30 % faster with the same learning curve)",
    "impala": "no process waits for another, but older data make more frames necessary (RLlib's "
    "examples reach 450 on CartPole after 300k frames of PPO and 2M of IMPALA)",
    "sac": "at one update per frame, the learner takes nearly all of the time: collectors only "
    "take over the steps, which are cheap here",
}
"""Why several collectors help or do not help, for each algorithm that is compared."""


@dataclass(frozen=True)
class Gain:
    """How much one algorithm gained from more processes.

    Attributes:
        fewest: our row with the fewest processes that reached the threshold.
        best: our row with the shortest median time.
    """

    fewest: Row
    best: Row

    @property
    def speed_up(self) -> float:
        """How many times as fast ``best`` reaches the threshold as ``fewest``."""
        return self.fewest.seconds / self.best.seconds

    @property
    def frames(self) -> float:
        """The frames that ``best`` needs, divided by those that ``fewest`` needs."""
        return self.best.frames / self.fewest.frames

    @property
    def pace(self) -> float:
        """The frames per second of ``best``, divided by those of ``fewest``."""
        return self.best.frames_per_s / self.fewest.frames_per_s


def gains(table: Iterable[Row]) -> list[Gain]:
    """Return a gain for each algorithm and environment with several of our rows."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in table:
        if row.peer in OURS and math.isfinite(row.seconds):
            groups.setdefault((row.algorithm, row.env), []).append(row)
    return [
        Gain(min(group, key=lambda r: OURS[r.peer]), min(group, key=lambda r: r.seconds))
        for group in groups.values()
        if len(group) > 1
    ]


def band(curves: Sequence[Sequence[tuple[float, float]]]) -> tuple[Any, Any, Any, Any] | None:
    """Return x values, and the lowest, median and highest value of several curves at each of them.

    Each curve is linear between its points, and constant after its last point. The first x value is
    the first at which every curve has begun. Return None if there are no curves.
    """
    import numpy as np

    if not curves:
        return None
    first = max(curve[0][0] for curve in curves)
    places = np.array(sorted({x for curve in curves for x, _ in curve if x >= first}))
    values = [np.interp(places, *np.transpose(curve)) for curve in curves]
    return places, np.min(values, 0), np.median(values, 0), np.max(values, 0)
