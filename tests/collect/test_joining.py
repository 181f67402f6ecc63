from __future__ import annotations

import torch
from tensordict import TensorDict
from torchrl.collectors.utils import split_trajectories
from torchrl.envs.utils import ExplorationType
from torchrl.objectives.value import GAE

from tests.collect.envs import Counter, q
from torchrl_dist.collect.loop.joining import join, truncate_last
from torchrl_dist.collect.worker.worker import RolloutWorker, WorkerConfig


def cut_batch(least: int) -> TensorDict:
    """A whole rollout of 12 steps and one that was cut after ``least``, of counters of length 5."""
    policy = q(2, 3)
    rollouts = []
    for index in range(2):
        worker = RolloutWorker(
            WorkerConfig(
                lambda: Counter(5),
                policy,
                frames_per_rollout=12,
                worker_index=index,
                num_workers=2,
                exploration_type=ExplorationType.DETERMINISTIC,
            )
        )
        if index == 1:
            worker.cut(request=0, least=least)
        rows, stats = worker.collect(request=0)
        assert stats.frames == rows.shape[1] == (12 if index == 0 else least)
        rollouts.append(rows)
    return join(rollouts, masked=True)


def test_a_cut_rollout_is_padded_masked_and_truncated() -> None:
    batch = cut_batch(8)
    assert batch.shape == (2, 12) and batch.names == [None, "time"]
    mask = batch["collector", "mask"]
    assert mask[0].all() and mask[1].tolist() == [True] * 8 + [False] * 4
    assert batch["collector", "traj_ids"][1, 8:].eq(-1).all()
    assert batch["collector", "traj_ids"][1, :8].ge(0).all()
    following = batch["next"]
    assert following["truncated"][1, :, 0].nonzero().tolist() == [[7]]
    assert following["done"][1, :, 0].nonzero().flatten().tolist() == [4, 7]
    assert following["terminated"][1, :, 0].nonzero().flatten().tolist() == [4]
    assert not following["truncated"][0].any()


def test_a_cut_at_the_end_of_an_episode_stays_terminated() -> None:
    following = cut_batch(5)["next"]
    assert following["terminated"][1, 4].item() and following["done"][1, 4].item()
    assert not following["truncated"].any()


def test_whole_and_cut_rollouts_of_an_env_that_only_terminates_are_joined() -> None:
    def rows(steps: int) -> TensorDict:
        never = torch.zeros(1, steps, 1, dtype=torch.bool)
        ends = {"done": never, "terminated": never}
        ids = torch.zeros(1, steps, dtype=torch.int64)
        content = {**ends, "next": ends, "collector": {"traj_ids": ids}}
        return TensorDict(content, [1, steps], names=[None, "time"]).clone()

    cut = rows(3)
    truncate_last(cut)
    batch = join([rows(5), cut], masked=True)
    assert batch["next", "truncated"].nonzero().tolist() == [[1, 2, 0]]
    assert not batch["truncated"].any()


def test_advantages_of_a_cut_rollout_are_those_of_its_rows_alone() -> None:
    torch.manual_seed(0)
    value = q(2, 3)
    value.module[0].out_keys[-1] = "state_value"  # any value of the right shape will do

    def advantage(batch: TensorDict) -> torch.Tensor:
        batch = batch.clone()
        for part in (batch, batch["next"]):
            part["state_value"] = part["observation"].sum(-1, keepdim=True)
        gae = GAE(gamma=0.9, lmbda=0.8, value_network=None)
        return gae(batch)["advantage"]

    batch = cut_batch(8)
    assert torch.allclose(advantage(batch)[1, :8], advantage(batch[1:, :8])[0])
    last = batch[1, 7]
    delta = last["next", "reward"] + 0.9 * last["next", "observation"].sum(-1, keepdim=True)
    delta -= last["observation"].sum(-1, keepdim=True)
    assert torch.allclose(advantage(batch)[1, 7], delta)  # it bootstraps, and looks no further


def test_padding_is_a_trajectory_of_its_own_when_a_batch_is_split() -> None:
    batch = cut_batch(8)
    split = split_trajectories(batch, prefix="collector")
    padding = split["collector", "traj_ids"][:, 0] == -1
    assert padding.sum() == 1
    kept = split[~padding]
    kept = kept[kept["collector", "mask"]]
    assert len(kept) == 20
    assert kept["next", "observation"][:, 0].sub(kept["observation"][:, 0]).eq(1).all()


def test_after_a_cut_the_episode_goes_on_as_another_trajectory_with_one_return() -> None:
    worker = RolloutWorker(WorkerConfig(lambda: Counter(5), frames_per_rollout=4))
    worker.cut(request=0, least=2)
    first, stats = worker.collect(request=0)
    assert stats.episode_returns == []
    second, stats = worker.collect(request=1)
    assert first.shape == (1, 2) and second.shape == (1, 4)
    assert first["collector", "traj_ids"].unique().tolist() == [0]
    assert second["collector", "traj_ids"][0].tolist() == [1, 1, 1, 2]
    assert torch.equal(first["next", "observation"][0, -1], second["observation"][0, 0])
    assert stats.episode_returns == [1.0 + 2 + 3 + 4 + 5] and stats.episode_lengths == [5]
