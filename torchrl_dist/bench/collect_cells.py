"""The envs and the policy of all collectors in the benchmark. The envs count their steps."""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch
from tensordict.nn import TensorDictModule
from torch import Tensor, nn

from torchrl_dist.bench.collect_plan import Cell

NATIVE = "cartpole-native"
_IDS = {"cartpole": "CartPole-v1", NATIVE: "CartPole-v1", "halfcheetah": "HalfCheetah-v5"}
# (observation size, action size, continuous)
_SHAPES = {
    "sleep": (4, 2, False),
    "cartpole": (4, 2, False),
    NATIVE: (4, 2, False),
    "halfcheetah": (17, 6, True),
}


# ---- counting steps in the envs


class _Tally:
    """Counts the steps of one process in a file. :func:`steps_so_far` adds up the files."""

    def __init__(self, folder: str) -> None:
        path = Path(folder, f"steps-{os.getpid()}-{threading.get_ident()}")
        path.write_bytes(bytes(8))
        self._count = np.memmap(path, np.int64, "r+")
        self._folder = folder

    def __reduce__(self) -> Any:  # tianshou sends envs to other processes, which count separately
        return tally, (self._folder,)

    def add(self, n: int) -> None:
        self._count[0] += n


_tallies: dict[tuple[int, str], _Tally] = {}


def tally(folder: str) -> _Tally:
    """Return this process's counter."""
    key = (os.getpid(), folder)
    if key not in _tallies:
        _tallies[key] = _Tally(folder)
    return _tallies[key]


def set_step_s(folder: str, step_s: float) -> None:
    """Set the duration of all later steps of the sleeping envs that use ``folder``."""
    path = Path(folder, "step_s")
    if not path.exists():
        path.write_bytes(bytes(8))
    np.memmap(path, np.float64, "r+")[0] = step_s


def steps_so_far(folder: str) -> int:
    """Return the number of env steps that all processes have made."""
    return sum(
        int(np.fromfile(path, np.int64, 1)[0])
        for path in Path(folder).glob("steps-*")
        if path.stat().st_size == 8
    )


class SleepEnv(gymnasium.Env):
    """An env whose step takes ``step_s`` seconds and no CPU."""

    observation_space = gymnasium.spaces.Box(-1, 1, (4,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._observation = np.zeros(4, np.float32)

    def reset(self, **_: Any) -> tuple[np.ndarray, dict[str, Any]]:
        return self._observation, {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        time.sleep(self._step_s)
        return self._observation, 1.0, False, False, {}


class _Pace:
    """Reads the duration that :func:`set_step_s` writes."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._step_s = np.memmap(Path(folder, "step_s"), np.float64, "r")

    def __reduce__(self) -> Any:  # a copied array would not see later changes
        return _Pace, (self._folder,)

    def step_s(self) -> float:
        return float(self._step_s[0])


class _PacedEnv(SleepEnv):
    """An env whose steps take as long as the last call of :func:`set_step_s` says."""

    def __init__(self, pace: _Pace) -> None:
        super().__init__(pace.step_s())
        self._pace = pace

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self._step_s = self._pace.step_s()
        return super().step(action)


def _counted(env: Any, folder: str, steps: int) -> Any:
    """Make ``env`` count its steps. A wrapper would be slower, and would hide the env's type."""
    count, step = tally(folder), env.step

    def counting(action: Any) -> Any:
        count.add(steps)
        return step(action)

    env.step = counting
    return env


def single_env(env: str, folder: str) -> gymnasium.Env:
    """Make one environment. Call :func:`set_step_s` before you make an environment that sleeps."""
    made = _PacedEnv(_Pace(folder)) if env == "sleep" else gymnasium.make(_IDS[env])
    return _counted(made, folder, 1)


def vector_env(env: str, folder: str, envs: int) -> Any:
    """Make a gymnasium vector env of single environments, or CartPole's own vector version."""
    if env == NATIVE:
        made = gymnasium.make_vec(_IDS[env], envs, vectorization_mode="vector_entry_point")
        return _counted(made, folder, envs)
    return gymnasium.vector.SyncVectorEnv(
        [functools.partial(single_env, env, folder)] * envs,
        autoreset_mode=gymnasium.vector.AutoresetMode.SAME_STEP,
    )


def make_env(cell: Cell, folder: str) -> Callable[[], Any]:
    """Return a picklable function that makes the envs of our collector and the floor."""
    if cell.env == NATIVE:
        return functools.partial(vector_env, cell.env, folder, cell.envs)
    return functools.partial(single_env, cell.env, folder)


# ---- the policy: two layers


class Greedy(nn.Module):
    """Maps an observation ``[*, n]`` to the best discrete action ``[*]``, or, in an env with
    continuous actions, to an action ``[*, m]``."""

    def __init__(self, env: str, width: int = 64) -> None:
        super().__init__()
        inputs, outputs, self.continuous = _SHAPES[env]
        layers = [nn.Linear(inputs, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh()]
        self.layers = nn.Sequential(*layers, nn.Linear(width, outputs))

    def forward(self, observation: Tensor) -> Tensor:
        out = self.layers(observation.float())
        return out.tanh() if self.continuous else out.argmax(-1)


def make_policy(env: str, width: int = 64) -> TensorDictModule:
    """Return a policy that has the same weights in every process."""
    torch.manual_seed(0)
    return TensorDictModule(Greedy(env, width), in_keys=["observation"], out_keys=["action"])
