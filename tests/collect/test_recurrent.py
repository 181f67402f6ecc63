"""Recurrent policies, and trajectories that are assembled from batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gymnasium.vector import AutoresetMode
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.data import MultiStep

from tests.collect.envs import Counter, counters
from tests.collect.test_rollout import collect
from torchrl_dist.collect import RPCBatchedCollector
from torchrl_dist.errors import ConfigurationError


@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_memory_counts_the_steps_of_its_own_episode_in_every_autoreset_mode(mode) -> None:
    class Count(nn.Module):
        def forward(self, observation: Any, count: Any, is_init: Any) -> tuple:
            count = torch.where(is_init, 0, count)
            return torch.zeros(len(count), dtype=torch.int64), count + 1

        def make_tensordict_primer(self) -> Any:
            from torchrl.data import Unbounded
            from torchrl.envs import TensorDictPrimer

            return TensorDictPrimer({"count": Unbounded((1,), dtype=torch.int64)})

    policy = TensorDictModule(
        Count(), in_keys=["observation", "count", "is_init"], out_keys=["action", ("next", "count")]
    )
    rows = collect(
        lambda: counters([3, 5], mode), policy, 40, batches=2, categorical_action_encoding=True
    )
    steps = rows["observation"][..., 0] % 100  # which the env counts itself
    assert torch.equal(rows["count"][..., 0].float(), steps)
    assert torch.equal(rows["next", "count"][..., 0].float(), steps + 1)
    assert torch.equal(rows["is_init"][..., 0], steps == 0)


def test_memory_without_a_known_beginning_is_refused() -> None:
    policy = TensorDictModule(
        lambda observation, h: (observation, h),
        in_keys=["observation", "h"],
        out_keys=["action", ("next", "h")],
    )
    with pytest.raises(ConfigurationError, match="make_tensordict_primer"):
        collect(Counter, policy, 10)


def test_split_trajs_is_torchrls() -> None:
    with RPCBatchedCollector(
        lambda: Counter(4), None, frames_per_batch=10, total_frames=20, split_trajs=True
    ) as collector:
        batch = collector.next()
    assert batch.shape == (3, 4)
    assert batch["collector", "mask"].sum(-1).tolist() == [4, 4, 2]


def test_n_step_returns_never_cross_a_reset_or_another_env() -> None:
    gamma, n = 0.5, 3
    with RPCBatchedCollector(
        lambda: Counter(5), None, frames_per_batch=14, total_frames=56, num_envs=2,
        postproc_factory=lambda policy: MultiStep(gamma, n),
    ) as collector:  # fmt: skip
        batches = list(collector)
    for batch in batches:  # the reward of a step is its number in the episode, 1 to 5
        ids = batch["collector", "traj_ids"]
        first = batch["observation"][..., 0] % 100
        for row in range(2):
            for t in range(7):
                inside = [u for u in range(t, min(t + n, 7)) if ids[row, u] == ids[row, t]]
                expected = sum(gamma**k * (first[row, u] + 1) for k, u in enumerate(inside))
                assert batch["next", "reward"][row, t].item() == pytest.approx(expected.item())
