"""Calls to the envs of workers, and what workers must have in common."""

from __future__ import annotations

import os
import signal
import warnings
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode
from torchrl.envs import GymEnv

from tests.collect.envs import Counter, Paced, nodes, trajectories_of, wait_for
from tests.spawn import stop
from torchrl_dist.collect.worker.worker import RolloutWorker, WorkerConfig
from torchrl_dist.errors import ConfigurationError, PeerLostError, RemoteError
from torchrl_dist.runtime import ForkServer


class Task(Counter):
    """A meta-RL env: its reward is its task."""

    task = 0

    def reset_task(self, task: int, offset: int = 0) -> int:
        self.task = task + offset
        return self.task

    def step(self, action: Any) -> Any:
        observation, _, *rest = super().step(action)
        return observation, float(self.task), *rest

    def render(self) -> np.ndarray:
        return np.full((2, 2, 3), self.task, np.uint8)


def wrapped() -> gymnasium.Env:
    return gymnasium.wrappers.TimeLimit(Task(10**6), 1000)


def check(worker: Any, num_envs: int) -> None:
    answers = worker.visit_envs(None, "call", "reset_task", (3,), {"offset": 1})
    assert answers == [4] * num_envs
    assert worker.visit_envs(1, "call", "reset_task", (9,), {}) == [9]
    assert worker.visit_envs(None, "get", "task", (), {}) == [4, 9] + [4] * (num_envs - 2)
    rows, _ = worker.collect(request=0)
    assert rows["next", "reward"][:, -1, 0].tolist() == [4, 9] + [4] * (num_envs - 2)
    worker.visit_envs(0, "set", "task", (7,), {})
    assert worker.visit_envs(0, "get", "task", (), {}) == [7]
    (picture,) = worker.visit_envs(1, "call", "render", (), {})
    assert picture.shape == (2, 2, 3) and picture.max() == 9
    with pytest.raises(Exception, match="no_such"):
        worker.visit_envs(None, "get", "no_such", (), {})
    before, _ = worker.collect(request=1)
    worker.reset()
    after, _ = worker.collect(request=2)
    assert (after["observation"][:, 0, 0] % 100 == 0).all()
    assert (before["observation"][:, 0, 0] % 100 != 0).all()
    ids = [set(td["collector", "traj_ids"].flatten().tolist()) for td in (before, after)]
    assert not ids[0] & ids[1]


def test_envs_of_a_worker_can_be_called_all_or_one() -> None:
    def vector() -> Any:
        return gymnasium.vector.SyncVectorEnv([wrapped] * 3, autoreset_mode=AutoresetMode.SAME_STEP)

    check(RolloutWorker(WorkerConfig(wrapped, frames_per_rollout=12, num_envs=4)), 4)
    check(RolloutWorker(WorkerConfig(vector, frames_per_rollout=12)), 3)


def test_envs_of_node_workers_can_be_called_all_or_one(fork_server: ForkServer) -> None:
    with nodes(fork_server) as build:
        check(build(wrapped, frames_per_rollout=12, num_envs=2), 4)


def test_a_native_vector_env_is_visited_as_a_whole() -> None:
    worker = RolloutWorker(WorkerConfig("CartPole-v1", frames_per_rollout=8, num_envs=4))
    assert worker.visit_envs(None, "get", "num_envs", (), {}) == [4]
    worker.visit_envs(None, "set", "low", (-0.01,), {})
    assert worker.visit_envs(None, "get", "low", (), {}) == [-0.01]
    with pytest.raises(ConfigurationError, match="to select all envs"):
        worker.visit_envs(1, "get", "num_envs", (), {})


def test_torchrl_envs_can_be_called() -> None:
    worker = RolloutWorker(WorkerConfig(lambda: GymEnv("CartPole-v1"), frames_per_rollout=8))
    assert worker.visit_envs(0, "get", "batch_size", (), {}) == [torch.Size([])]


def test_the_collector_numbers_envs_through_the_job(collecting: Any) -> None:
    options = {"frames_per_batch": 16, "num_envs": 2, "max_policy_lag": 1}
    with collecting(2, wrapped, **options) as (collector, _):
        collector.next()
        assert collector.call("reset_task", 2) == [2] * 4
        collector.set_attr("task", 5, env=3)
        assert collector.get_attr("task") == [2, 2, 2, 5]
        assert collector.get_attr("task", env=3) == [5]
        assert collector.render(env=3).max() == 5
        with pytest.raises(RemoteError, match="no_such"):
            collector.get_attr("no_such", env=0)
        with pytest.raises(ConfigurationError, match="env=4"):
            collector.get_attr("task", env=4)
        collector.reset()
        starts = [collector.next()["observation"][:, 0, 0] % 100 for _ in range(4)]
        assert any((start == 0).all() for start in starts)


@pytest.mark.parametrize("processes", [0, 2])
def test_workers_with_different_envs_are_told_apart_at_the_start(
    collecting: Any, tmp_path: Any, processes: int
) -> None:
    class Bigger(Counter):
        action_space = gymnasium.spaces.Discrete(7)

    def make() -> gymnasium.Env:
        try:
            (tmp_path / "flag").touch(exist_ok=False)
        except FileExistsError:
            return Counter()
        return Bigger()

    with pytest.raises((ConfigurationError, RemoteError)) as caught:
        collecting(2, make, frames_per_batch=8, env_processes=processes).__enter__()
    assert "action space is Discrete" in str(caught.value)
    assert "Discrete(3)" in str(caught.value) and "Discrete(7)" in str(caught.value)


def test_a_paused_worker_is_lost_until_it_answers(collecting: Any) -> None:
    # Steps take time, or the other worker would use up all frames meanwhile.
    options = {"frames_per_batch": 20, "total_frames": 6000, "max_policy_lag": 1}
    with (
        collecting(2, lambda: Paced(10**6), worker_timeout_s=2.0, **options) as (
            collector,
            session,
        ),
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        batches = [collector.next()]
        pid = session.pid_of(session.of_role("collector")[1])
        stop(pid)
        try:
            while not collector.report.lost_workers:
                batches.append(collector.next())
            assert collector.report.lost_workers == ("collector1",)
            batches.append(collector.next())
            assert set(batches[-1]["collector", "worker_index"].flatten().tolist()) == {0}
        finally:
            os.kill(pid, signal.SIGCONT)

        def is_back() -> bool:
            batches.append(collector.next())
            return not collector.report.lost_workers

        wait_for(is_back)
        batches += list(collector)
        assert collector.report.lost_workers == ()
    assert any("worker_timeout_s=2" in str(w.message) for w in caught)
    assert sum(batch.numel() for batch in batches) == 6000
    for one in trajectories_of(batches):
        steps = one["next", "observation"][:, 0]
        assert steps.diff().eq(1).all()  # none twice, and none is missing in between


def test_when_all_workers_hang_collection_ends(collecting: Any) -> None:
    with (
        collecting(1, lambda: Paced(5, 5.0), frames_per_batch=20, worker_timeout_s=0.3) as (
            collector, _,
        ),
        pytest.raises(PeerLostError, match="min_workers=1"),
    ):  # fmt: skip
        collector.next()
