"""Moments of observations and returns: those of one process with all rows."""

from __future__ import annotations

from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.wrappers import NormalizeObservation, NormalizeReward
from tensordict import TensorDict
from torch import Tensor

from tests.learn.ranks import LearningRanks
from torchrl_dist.errors import TorchRLDistError
from torchrl_dist.learn.ranks import Ranks
from torchrl_dist.recipes.parts import moments as moments_module
from torchrl_dist.recipes.parts.moments import Moments, RewardScale

close = partial(torch.testing.assert_close, rtol=1e-12, atol=0)


def batches(size: int = 70) -> list[Tensor]:
    """Of unequal sizes, means and deviations; one is far from 0. A message has less than 70
    numbers."""
    torch.manual_seed(0)
    numbers = ((40, 0, 1), (7, 1e4, 1e-2), (1, -30, 0), (500, 3, 20))
    return [
        mean + scale * torch.randn(rows, size, dtype=torch.float64) for rows, mean, scale in numbers
    ]


def merged_by_ranks() -> dict[str, Tensor]:
    ranks, moments = Ranks(timeout_s=30), Moments(70)
    for rows in batches():
        moments.update(rows[ranks.index :: ranks.size], ranks, "a test's values")
    return moments.state_dict()


def test_the_moments_of_all_ranks_are_those_of_all_rows(fork_server: Any) -> None:
    alone = Moments(70)
    for rows in batches():
        alone.update(rows, Ranks(), "a test's values")
    joined = torch.cat(batches())
    close(alone.mean, joined.mean(0), rtol=1e-6)  # the prior counts as 1e-4 rows
    close(alone.deviation, joined.std(0, correction=0), rtol=1e-6)
    with LearningRanks.start(2, fork_server) as ranks:
        first, second = ranks.run(merged_by_ranks)  # the second has no row of the third batch
    for name, value in alone.state_dict().items():
        close(first[name], value)
        assert torch.equal(first[name], second[name])


class Told(gymnasium.Env):
    """Rewards and observations that a test gives, in episodes that end where it says."""

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (2,), np.float64)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, rewards: np.ndarray, observations: np.ndarray) -> None:
        self.steps = iter(zip(rewards, observations, strict=True))

    def reset(self, **_: Any) -> Any:
        return np.zeros(2), {}

    def step(self, action: Any) -> Any:
        reward, observation = next(self.steps)
        return observation, reward, False, False, {}


def test_moments_are_those_of_gymnasiums_wrappers() -> None:
    generator = np.random.default_rng(0)
    rewards, observations = generator.normal(3, 2, 60), generator.normal(-5, 9, (60, 2))
    env = Told(rewards, observations)
    env_of_rewards = NormalizeReward(env, gamma=0.9)
    whole = NormalizeObservation(env_of_rewards)
    whole.reset()
    seen = [whole.step(0)[0] for _ in range(60)]
    moments, scale = Moments(2), RewardScale(0.9, Ranks())
    moments.update(torch.cat([torch.zeros(1, 2), torch.tensor(observations)]), Ranks(), "x")
    torch.testing.assert_close(moments.mean.numpy(), whole.obs_rms.mean)
    torch.testing.assert_close(
        moments(torch.tensor(observations[-1])), torch.tensor(seen[-1]).float()
    )
    for part in torch.tensor(rewards).split(25):  # a trajectory continues in the next batch
        scaled = scale(rows(part[None], torch.full((1, len(part)), 7)))
    theirs = env_of_rewards.return_rms
    assert float(scale.moments.deviation**2) == pytest.approx(float(theirs.var), rel=1e-9)
    assert float(scaled[0, -1]) == pytest.approx(rewards[-1] / theirs.var**0.5, rel=1e-6)


def rows(reward: Tensor, ids: Tensor) -> TensorDict:
    shape = reward.shape
    following = {"reward": reward.unsqueeze(-1)}
    return TensorDict({"next": following, "collector": {"traj_ids": ids}}, shape)


def test_running_returns_end_with_their_trajectory_and_leave_out_padding() -> None:
    scale, nan = RewardScale(0.5, Ranks()), float("nan")
    scale(rows(torch.tensor([[4.0, 4.0, 4.0], [8.0, 8.0, nan]]), tensor([[1, 1, 2], [3, 3, -1]])))
    returns = [4, 6, 4, 8, 12]
    assert float(scale.moments.mean) == pytest.approx(np.mean(returns), rel=1e-4)
    # The first environment has another place, and the other one begins a trajectory.
    scaled = scale(rows(torch.tensor([[8.0], [40.0]]), tensor([[4], [2]])))
    returns += [8, 42]
    assert float(scale.moments.mean) == pytest.approx(np.mean(returns), rel=1e-4)
    assert float(scale.moments.deviation) == pytest.approx(np.std(returns), rel=1e-4)
    assert scaled.dtype == torch.float32
    assert float(scaled[1]) == pytest.approx(40 / np.std(returns), rel=1e-4)
    assert float(scale(rows(torch.full((1, 1), -1e6), tensor([[9]])))[0]) > -10.0001


def test_trajectories_of_alternating_collectors_continue_and_old_ones_are_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(moments_module, "_REMEMBERED", 3)
    scale, returns = RewardScale(0.5, Ranks()), []
    running = dict.fromkeys((1, 2), 0.0)
    for step in range(40):  # the batches of two collectors, with an environment each
        which = 1 + step % 2
        running[which] = 1.0 + 0.5 * running[which]
        returns.append(running[which])
        scale(rows(torch.ones(1, 1), tensor([[which]])))
        assert float(scale.moments.mean) == pytest.approx(np.mean(returns), rel=1e-4)
    for ended in range(3, 9):  # these trajectories end, and do not come again
        scale(rows(torch.ones(1, 1), tensor([[ended]])))
        assert len(scale._last) <= 3
    assert set(scale._last) == {6, 7, 8}


def tensor(ids: list[list[int]]) -> Tensor:
    return torch.tensor(ids)


def test_values_far_from_the_mean_are_clipped_and_infinite_ones_are_refused() -> None:
    moments = Moments(2)
    moments.update(torch.randn(100, 2), Ranks(), "observations of X")
    before = {name: value.clone() for name, value in moments.state_dict().items()}
    assert moments(torch.tensor([1e9, -1e9])).tolist() == [10, -10]
    for wrong in (float("inf"), float("nan")):
        with pytest.raises(TorchRLDistError, match="observations of X are too large or not finite"):
            moments.update(torch.full((3, 2), wrong), Ranks(), "observations of X")
    assert all(torch.equal(value, before[name]) for name, value in moments.state_dict().items())
