"""How many processes `train` starts if no number is given."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from torchrl_dist.plan import processes
from torchrl_dist.plan.processes import Measured, choose, speeds, thriftiest
from torchrl_dist.recipes.catalog import RECIPES
from torchrl_dist.runtime import ForkServer

# CartPole on a core of 2026, with the default networks
FAST = Measured(
    step_cpu_s=2e-4, step_idle_s=0.0, evaluate_cpu_s=2e-4, update_s=1.5e-3, episode_steps=500
)
ENVS = """
import os, time
import gymnasium

class Env(gymnasium.Wrapper):
    def __init__(self, act):
        super().__init__(gymnasium.make("CartPole-v1"))
        self.act = act
    def step(self, action):
        self.act()
        return super().step(action)

def slow():
    return Env(lambda: time.sleep(0.02))
def hangs():
    return Env(lambda: time.sleep(1000))
def crashes():
    return Env(lambda: os._exit(3))
def raises():
    return Env(lambda: 1 / 0)
"""


def chosen(recipe: str, cores: int, measured: Measured, **fields: Any) -> int:
    return thriftiest(speeds(replace(RECIPES[recipe].config(), **fields), measured, cores))


def test_a_job_is_one_process_if_its_learner_limits_it_and_several_if_its_envs_do() -> None:
    never = {"eval_interval_frames": 10**9}
    assert chosen("sac", 2, FAST) == chosen("sac", 64, FAST) == 0
    assert chosen("ddppo", 2, FAST, **never) == 1 and chosen("impala", 1, FAST, **never) == 0
    slow = replace(FAST, step_cpu_s=0.1)
    for recipe in ("apex", "ddppo", "impala", "sac"):
        assert chosen(recipe, 1, slow) == int(recipe == "ddppo"), recipe
        few, many = chosen(recipe, 2, slow), chosen(recipe, 16, slow)
        assert 1 <= few < many <= 16, recipe
    asleep = replace(FAST, step_idle_s=0.3)
    assert chosen("impala", 2, asleep) == 8, "sleeping processes share cores"


def test_evaluations_of_a_single_process_take_its_time() -> None:
    config = RECIPES["impala"].config()
    rare = replace(config, eval_interval_frames=10**9)
    slower = speeds(config, FAST, 2)[0] / speeds(rare, FAST, 2)[0]
    frame_s = 1 / speeds(rare, FAST, 2)[0]
    assert slower == pytest.approx(frame_s / (frame_s + 0.5 * 500 * 2e-4 / 5000), rel=1e-4)


def test_short_rollouts_and_updates_cost_a_single_process_more() -> None:
    short = replace(RECIPES["impala"].config(), eval_interval_frames=10**9, frames_per_batch=40)
    frame_s, long_s = (
        1 / speeds(replace(short, frames_per_batch=frames), FAST, 2)[0] for frames in (40, 320)
    )
    each_s = processes._ROLLOUT_S + FAST.update_s
    assert frame_s - long_s == pytest.approx(each_s * (1 / 40 - 1 / 320), rel=1e-3)


def test_a_number_that_the_options_forbid_is_not_considered() -> None:
    slow = replace(FAST, step_cpu_s=0.1)
    assert set(speeds(RECIPES["apex"].config(learners=4), slow, 2)) == {0, 4, 8}
    ppo = RECIPES["ddppo"].config(frames_per_batch=64)  # 4 minibatches, cut to a quarter
    assert set(speeds(ppo, slow, 2)) == {1, 2, 4}


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fork_server: ForkServer) -> ForkServer:
    (tmp_path / "own_envs.py").write_text(ENVS)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    return fork_server


def test_environments_are_measured_in_another_process(server, monkeypatch) -> None:
    monkeypatch.setattr(processes, "_WAIT_S", 60.0)
    options, reason = choose(RECIPES["impala"].config(env="own_envs:slow"), server)
    assert options["collectors"] >= 4 and "ms to collect" in reason
    assert "own_envs" not in sys.modules


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("hangs", "did not answer within 2 s"),
        ("crashes", "exited with status 3"),
        ("raises", "ZeroDiv"),
    ],
)
def test_a_measurement_that_fails_keeps_the_default_and_leaves_nothing(
    name: str, why: str, server: ForkServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "_WAIT_S", 2.0 if name == "hangs" else 60.0)
    descriptors = set(os.listdir("/proc/self/fd"))
    begun = time.monotonic()
    options, reason = choose(RECIPES["apex"].config(env=f"own_envs:{name}"), server)
    assert options == {} and reason.startswith("2 collectors, because the measurement failed")
    assert why in reason
    assert time.monotonic() - begun < 50
    assert set(os.listdir("/proc/self/fd")) == descriptors
