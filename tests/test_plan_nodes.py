"""The planner's prediction for two nodes, beside two hosts that are network namespaces."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

from tests import netns
from tests.test_planner import COSTS

STEP_S, PROCESSES, STEPS = 0.03, 3, 8


class Sleepy(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1, 1, (4,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, **_: Any) -> tuple[np.ndarray, dict[str, Any]]:
        return np.zeros(4, np.float32), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        time.sleep(STEP_S)
        return np.zeros(4, np.float32), 1.0, False, False, {}


def collect_over_nodes(folder: str) -> None:
    from tests.netns import wait_until_all_are_up
    from tests.test_plan_nodes import PROCESSES, STEPS, Sleepy
    from torchrl_dist import FirstReady, RPCBatchedCollector, session

    wait_until_all_are_up(Path(folder))
    with session({"learner": 1, "collector": -1}, timeout_s=60) as me:
        if me.me.role != "learner":
            me.serve()
            return
        with RPCBatchedCollector(
            Sleepy, None, session=me, readiness=FirstReady(), max_policy_lag=1,
            env_processes=PROCESSES, frames_per_batch=PROCESSES * STEPS,
            categorical_action_encoding=True,
        ) as collector:  # fmt: skip
            for _ in range(6):
                collector.next()
            frames, begun = 0, time.perf_counter()
            while time.perf_counter() - begun < 3:
                frames += collector.next().numel()
            rate = frames / (time.perf_counter() - begun)
        Path(folder, "rate").write_text(json.dumps(rate))


@pytest.mark.alone
@pytest.mark.timeout(200)
@pytest.mark.skipif(netns.missing() is not None, reason=str(netns.missing()))
def test_two_nodes_collect_as_predicted(tmp_path: Path) -> None:
    from dataclasses import replace

    from torchrl_dist.planner import Layout, predict

    with netns.hosts(3) as network:  # the learner has a host of its own
        job = netns.run_tasks(network, collect_over_nodes, {"folder": str(tmp_path)}, tmp_path)
        assert job.wait(150) == [0, 0, 0], str(job)
    measured = json.loads((tmp_path / "rate").read_text())
    costs = replace(COSTS, idle_s=STEP_S, spread=0.0)
    one, two = (
        predict(costs, Layout(n, PROCESSES, 1, STEPS, True, 1, False), 2).frames_per_s
        for n in (1, 2)
    )
    print(f"predicted {two:.0f} frames/s, measured {measured:.0f}")
    assert two == pytest.approx(2 * one, rel=0.05)
    assert 0.3 < measured / two < 1.2  # a busy machine keeps sleepers, too, from waking in time
