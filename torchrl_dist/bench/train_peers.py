"""Trains one peer in its own process until it reaches the threshold or a limit."""

from __future__ import annotations

import json
import math
import signal
import subprocess
import time
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch

from torchrl_dist.bench.processes import MeasurementError, start_training
from torchrl_dist.bench.train_plan import (
    EPISODES,
    OURS,
    TORCHRL,
    ZOO,
    Case,
    Point,
    Run,
    config_of,
    up_to,
)
from torchrl_dist.checkpoint import load_checkpoint
from torchrl_dist.collect.loop.one_thread import torch_threads
from torchrl_dist.recipes.parts.environments import look_at, make_env
from torchrl_dist.recipes.parts.evaluate import Act, evaluate
from torchrl_dist.recipes.parts.networks import PolicySpec
from torchrl_dist.recipes.parts.plots import Evaluation

GRACE_S = 120.0
"""Seconds for the start and end of a run, in addition to its limit."""
_LOOK_EVERY_S = 0.05


def measure(case: Case, seed: int, folder: str) -> Run:
    """Learn in this process, or, for ours, in a process that this one starts.

    Args:
        folder: an existing folder for the files of a run.
    """
    if case.peer in OURS:
        return _ours(case, seed, Path(folder))
    with torch_threads(case.threads):
        return (_torchrl if case.peer == TORCHRL else _sb3)(case, seed)


# ---- ours


def _ours(case: Case, seed: int, folder: Path) -> Run:
    """Run ``torchrl-dist train``, and stop it when one of its evaluations reaches the threshold.

    The run is stopped by a signal, as a user would stop it.
    """
    config = replace(config_of(case, seed), output_dir=str(folder / "run"))
    with start_training(config, folder) as process:
        try:
            start_s = _stop_in_time(process, config.output_path / "csv", case)
            said, _ = process.communicate(timeout=GRACE_S)
        finally:
            process.kill()
    if process.returncode not in (0, 128 + signal.SIGTERM) or not said:
        raise MeasurementError(f"torchrl-dist train ended with exit code {process.returncode}")
    result = json.loads(said.splitlines()[-1])
    saved = load_checkpoint(config.checkpoint_path).extra["history"]["evaluations"]
    seen = [Evaluation(*row) for row in saved]
    points = up_to((Point(e.frames, e.seconds, e.mean) for e in seen), case.threshold)
    ended = "time" if result["stopped_by"] else "frames"
    if points and points[-1].mean >= case.threshold:
        ended = "threshold"
    bound = result["bound_by"]
    waits = bound["learner_waits"] if bound else None
    return Run(seed, points, ended, start_s, None, config.as_plain(), waits)


def _stop_in_time(process: subprocess.Popen, logs: Path, case: Case) -> float:
    """Stop the process at the threshold or the limit. Return the seconds until training began."""
    means = logs / "scalars" / "eval" / "return.csv"
    asked = began = time.monotonic()
    training = False
    while process.poll() is None:
        now = time.monotonic()
        if not training:
            training, began = logs.exists(), now
        if now - began > case.limit_s or _best(means) >= case.threshold:
            process.terminate()
            break
        if now - asked > GRACE_S and not training:
            raise MeasurementError(
                f"torchrl-dist train did not begin within {GRACE_S:g} s; check the load of this "
                "machine, and measure again"
            )
        time.sleep(_LOOK_EVERY_S)
    return began - asked


def _best(means: Path) -> float:
    """Return the highest mean of the ``frames,mean`` lines. An incomplete last line is ignored."""
    if not means.exists():
        return -math.inf
    *lines, _ = means.read_text().split("\n")
    return max((float(line.split(",")[1]) for line in lines), default=-math.inf)


# ---- others, in this process


class Watch:
    """Ends a run, and measures its time. The clock stops while the policy is evaluated.

    Args:
        every: frames between two evaluations.
        act: the greedy policy.
        begun: the ``time.monotonic()`` at which the run's process began.
    """

    def __init__(self, case: Case, seed: int, every: int, act: Act, begun: float) -> None:
        self._case, self._seed, self._act = case, seed, act
        self._every = self._next = every
        self._points: list[Point] = []
        self._evaluating_s = 0.0
        self._began = time.monotonic()
        self._start_s = self._began - begun
        self._ended: str | None = None

    def over(self, frames: int) -> bool:
        """Whether the run must end after ``frames``. Evaluates if an evaluation is due."""
        if self._ended is None and frames >= self._next:
            self._evaluate(frames)
            self._next = frames + self._every
        if self._ended is None and self._seconds() > self._case.limit_s:
            self._ended = "time"
        return self._ended is not None

    def run(self, frames: int, settings: dict[str, Any]) -> Run:
        """Return the result after the last frame."""
        if not self._points or self._points[-1].frames < frames:
            self._evaluate(frames)
        points, ended = tuple(self._points), self._ended or "frames"
        return Run(self._seed, points, ended, self._start_s, self._evaluating_s, settings)

    def _seconds(self) -> float:
        return time.monotonic() - self._began - self._evaluating_s

    def _evaluate(self, frames: int) -> None:
        seconds, begun = self._seconds(), time.monotonic()
        first = 1_000_000 * self._seed + EPISODES * len(self._points)  # one seed per episode
        returns = evaluate(self._act, self._case.env, episodes=EPISODES, seed=first)
        self._evaluating_s += time.monotonic() - begun
        self._points.append(Point(frames, seconds, fmean(returns)))
        if self._points[-1].mean >= self._case.threshold:
            self._ended = "threshold"


def _torchrl(case: Case, seed: int) -> Run:
    from torchrl_dist.bench.train_torchrl import LEARNERS

    begun = time.monotonic()
    config = config_of(case, seed)
    torch.manual_seed(seed)
    np.random.seed(seed)
    task = look_at(config.env, continuous=config.continuous)
    policy = PolicySpec.of(task, config.policy_kind, config.hidden, config.network)
    learner = LEARNERS[case.algorithm](config, task, policy)
    frames = 0
    try:
        watch = Watch(case, seed, config.eval_interval_frames, learner.network.greedy, begun)
        for data in learner.collector:
            frames += data.numel()
            learner.learn(data, frames)
            if watch.over(frames):
                break
    finally:
        learner.collector.shutdown()
    return watch.run(frames, config.as_plain())


def _sb3(case: Case, seed: int) -> Run:
    begun = time.monotonic()
    import stable_baselines3
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.logger import Logger
    from stable_baselines3.common.vec_env import VecEnv, VecNormalize

    zoo = ZOO[case.algorithm, case.env]
    arguments = {name: _schedule(value) for name, value in zoo.settings.items()}
    envs: VecEnv = make_vec_env(partial(make_env, case.env), zoo.envs, seed=seed)
    if zoo.normalize:
        envs = VecNormalize(envs, gamma=zoo.settings.get("gamma", 0.99))
    model = getattr(stable_baselines3, zoo.algorithm)(
        "MlpPolicy", envs, seed=seed, device="cpu", **arguments
    )
    # The default logger would leave a folder in /tmp.
    model.set_logger(Logger(folder=None, output_formats=[]))

    def act(observation: torch.Tensor) -> torch.Tensor:
        seen: Any = observation.numpy()
        if isinstance(envs, VecNormalize):
            seen = envs.normalize_obs(seen)
        return torch.as_tensor(model.predict(seen, deterministic=True)[0])

    class Watched(BaseCallback):
        def _on_step(self) -> bool:
            return not watch.over(self.num_timesteps)

    total = case.frames or zoo.frames
    every = config_of(case, seed).eval_interval_frames
    watch = Watch(case, seed, every, act, begun)
    try:
        model.learn(total, callback=Watched())
    finally:
        envs.close()
    return watch.run(model.num_timesteps, asdict(zoo) | {"frames": total})


def _schedule(value: Any) -> Any:
    """Convert the zoo's ``"lin_X"`` to a function of the remaining fraction of the run, which sb3
    expects.
    """
    if not (isinstance(value, str) and value.startswith("lin_")):
        return value
    start = float(value.removeprefix("lin_"))
    return lambda left: left * start
