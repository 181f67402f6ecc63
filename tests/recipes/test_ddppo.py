"""What several learners do together, DD-PPO's and Ape-X's, in the ranks of a real job."""

from __future__ import annotations

import copy
import json
import os
import time
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torchrl.objectives import ClipPPOLoss

from tests.recipes import learners
from tests.spawn import spawn
from torchrl_dist import load_policy, local_cluster, session
from torchrl_dist.checkpoint import load_checkpoint
from torchrl_dist.cli import main
from torchrl_dist.errors import ConfigurationError
from torchrl_dist.recipes.apex import recipe as apex
from torchrl_dist.recipes.apex.config import ApexConfig
from torchrl_dist.recipes.ddppo.config import DDPPOConfig
from torchrl_dist.recipes.ddppo.recipe import DDPPO, normalized
from torchrl_dist.recipes.parts.environments import look_at
from torchrl_dist.recipes.parts.moments import Moments, moments_of
from torchrl_dist.recipes.parts.networks import PolicySpec
from torchrl_dist.recipes.parts.play import play
from torchrl_dist.recipes.parts.policies import categorical_actor, critic_of, gaussian_actor
from torchrl_dist.recipes.training.loop import Start

TASK = look_at("CartPole-v1", continuous="none")


def a_learner(me, **settings) -> DDPPO:
    sizes = {"frames_per_batch": 128, "total_frames": 1000, "hidden": (8,), "learning_rate": 0.1}
    return learners.a_learner(DDPPOConfig(**{**sizes, **settings}), me, frames=250)


def moments_are_those_of_all_rows(ranks) -> None:
    torch.manual_seed(ranks.index)
    mine = 5.0 * ranks.index + torch.randn(10 + 70 * ranks.index, 1)
    parts = [torch.tensor(part) for part in ranks.exchange(mine.tolist())]
    joined = torch.cat(parts)
    expected = (joined - joined.mean()) / (joined.std() + 1e-8)
    torch.testing.assert_close(
        normalized(mine, ranks), expected.split([len(part) for part in parts])[ranks.index]
    )


def cut_rows_are_left_out(learner: DDPPO, data) -> None:
    """Half of rank 1's are padding, of values that would be noticed."""
    mask = torch.ones(data.shape, dtype=torch.bool)
    if learner.ranks.index == 1:
        mask[:, 8:] = False
        data["next", "done"][:, 7] = data["next", "truncated"][:, 7] = True
        data["observation"][:, 8:] = 1e6
        data["next", "reward"][:, 8:] = 1e6
    data["collector", "mask"] = mask
    rows = learner._rows(data.clone())
    assert len(rows) == int(mask.sum())
    assert rows["observation"].abs().max() < 1e3
    assert rows["advantage"].abs().max() < 100
    total, squares, count = learner.ranks.add_up(
        "a test", [float(f(rows["advantage"])) for f in (torch.sum, sum_of_squares, torch.numel)]
    )
    assert count == 64 + 32
    assert abs(total / count) < 1e-5 and abs(squares / count - 1) < 0.05


def sum_of_squares(x: torch.Tensor) -> torch.Tensor:
    return x.square().sum()


def slow_where_told() -> gymnasium.Env:
    """CartPole with slow steps on all ranks but the first."""

    class Slow(gymnasium.Wrapper):
        def step(self, action):
            time.sleep(0.04 * (os.environ["RANK"] != "0"))
            return self.env.step(action)

    return Slow(gymnasium.make("CartPole-v1"))


def gradients(loss, rows, *networks: torch.nn.Module) -> list[torch.Tensor]:
    loss.zero_grad()
    losses = loss(rows)
    (losses["loss_objective"] + losses["loss_critic"] + losses["loss_entropy"]).backward()
    return [weight.grad.clone() for network in networks for weight in network.parameters()]


def gradients_are_those_of_all_rows(learner: DDPPO, rows, make_actor, **options) -> None:
    keys = ("observation", "action", "action_log_prob", "advantage", "value_target", "state_value")
    told = learner.ranks.exchange([rows[key].tolist() for key in keys])
    joined = [torch.cat([torch.tensor(part[k]) for part in told]) for k in range(len(keys))]
    network, critic = copy.deepcopy(learner.network), copy.deepcopy(learner.critic)
    alone = ClipPPOLoss(
        make_actor(network),
        critic_of(critic),
        clip_epsilon=0.15, entropy_coeff=0.01, critic_coeff=0.5, loss_critic_type="l2",
        normalize_advantage=False, **options,
    )  # fmt: skip
    learner.loss.clip_epsilon.fill_(0.15)
    batch = TensorDict(dict(zip(keys, joined, strict=True)), [len(joined[0])])
    of_one = gradients(alone, batch, network, critic)
    of_all = gradients(learner.loss, rows, learner.network, learner.critic)
    for ours, theirs in zip(of_all, of_one, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-4)


class Alone:
    """Like Ranks of one process."""

    def add_up(self, what: str, values: list[float]) -> list[float]:
        return values


def continuous_actions_are_learned_as_by_one_with_all_rows(me) -> None:
    learner = a_learner(me, env="Pendulum-v1", clip_value=True, anneal_clip=False)
    ranks, moments = learner.ranks, moments_of(learner.network)
    assert moments is moments_of(learner.critic)
    of_all, of_returns = Moments(3), Moments(1)
    batches, before = iter(learner.collector), 0.0
    for frames in (250, 378):  # running returns continue in the second batch
        data = next(batches)
        mask = torch.ones(data.shape, dtype=torch.bool)
        if ranks.index == 1 and frames == 378:
            mask[:, 8:] = False
            data["next", "done"][:, 7] = data["next", "truncated"][:, 7] = True
            data["observation"][:, 8:] = data["next", "reward"][:, 8:] = 1e6
            data["collector", "traj_ids"][:, 8:] = -1
        data["collector", "mask"] = mask
        learner.learn(data, frames + 128)
        returns = torch.zeros(data.shape, dtype=torch.float64)
        for step, reward in enumerate(data["next", "reward"][..., 0].double().unbind(1)):
            before = returns[:, step] = reward + 0.99 * before
        told = ranks.exchange([data["observation"][mask].tolist(), returns[mask].tolist()])
        seen, earned = (
            torch.cat([torch.tensor(part[k], dtype=torch.float64) for part in told]) for k in (0, 1)
        )
        assert len(seen) == (128 if frames == 250 else 96)
        of_all.update(seen, Alone(), "x")
        of_returns.update(earned.unsqueeze(-1), Alone(), "x")
        for ours, theirs in ((moments, of_all), (learner.reward_scale.moments, of_returns)):
            for name, value in theirs.state_dict().items():
                torch.testing.assert_close(ours.state_dict()[name], value, rtol=1e-12, atol=1e-12)
    learner.loss.check_drift()  # of the moments, too
    assert float(learner.loss.clip_epsilon) == pytest.approx(0.2)
    rows = learner._rows(data)
    gradients_are_those_of_all_rows(learner, rows, gaussian_actor, clip_value=True)
    learner.close()


def a_slow_rank_is_cut_short_and_its_rows_count_as_those_of_others(me) -> None:
    learner = a_learner(
        me, env=f"{__name__}:slow_where_told", preempt_fraction=0.5, preempt_min_part=0.25,
        envs_per_collector=2,
    )  # fmt: skip
    ranks, batches = learner.ranks, iter(learner.collector)
    for _ in range(2):
        data = next(batches)
        lengths = ranks.exchange(data.shape[1])
        assert lengths[0] == 32 and 8 <= lengths[1] < 32, lengths
        assert bool(data["next", "done"][:, -1].all()) or ranks.is_first
    gradients_are_those_of_all_rows(learner, learner._rows(data), categorical_actor)
    assert learner.learn(data, frames=400)["train/valid_rows"] == lengths[ranks.index] / 32
    learner.loss.check_drift()
    learner.close()


def apexs_learners_stay_alike_and_draw_apart(me, folder: Path) -> None:
    config = ApexConfig(
        learners=2, collectors=0, envs_per_collector=2, frames_per_batch=64, learning_starts=32,
        batch_size=16, updates_per_batch=3, hidden=(8,), capacity=500, output_dir=str(folder),
    )  # fmt: skip
    policy = PolicySpec.of(TASK, config.policy_kind, config.hidden)
    learner = apex.build(config, TASK, policy, me, Start())
    ranks, reports = learner.ranks, iter(learner.collector)
    for frames in (64, 128):
        report = next(reports)
        ranks.exchange("all have written")
        learner.learn(report, frames)
    assert learner.updates == 6
    learner.dqn.loss.check_drift()
    batch = learner.buffer.sample()
    assert len(batch) == 8
    drawn = ranks.exchange(batch["index"].tolist())
    assert drawn[0] != drawn[1]
    learner.close()


@spawn(2)
def test_learners_normalize_stop_anneal_and_end_rollouts_together(tmp_path) -> None:
    torch.set_num_threads(1)
    with session({"learner": 2}, process_group="gloo") as me:
        # It would take 40 steps of a learning rate that tears the policy away at once.
        learner = a_learner(me, epochs=10, target_kl=1e-4)
        ranks = learner.ranks
        moments_are_those_of_all_rows(ranks)
        torch.manual_seed(ranks.index)
        data = next(iter(learner.collector))
        assert data.shape == (4, 16)
        cut_rows_are_left_out(learner, data)
        seen = learner.learn(data, frames=250 + 128)
        assert 0 < seen["train/steps_per_batch"] < 40
        assert seen["train/kl"] > 1.5e-4
        same = [seen["train/steps_per_batch"], seen["train/kl"], learner.updates]
        assert ranks.exchange(same) == [same, same]
        assert seen["train/valid_rows"] == (1.0, 0.5)[ranks.index]
        assert seen["train/learning_rate"] == pytest.approx(0.75 * 0.1)
        assert float(learner.loss.clip_epsilon) == pytest.approx(0.75 * 0.2)
        learner.loss.check_drift()
        # After the frames of all learners.
        assert learner.learn(data, frames=500)["train/learning_rate"] == pytest.approx(0.0622)
        assert float(learner._optimizer.param_groups[0]["lr"]) == pytest.approx(0.0622)
        learner.close()
        a_slow_rank_is_cut_short_and_its_rows_count_as_those_of_others(me)
        apexs_learners_stay_alike_and_draw_apart(me, tmp_path)
        continuous_actions_are_learned_as_by_one_with_all_rows(me)


def test_actions_are_clipped_for_the_environment_and_time_limits_are_bootstrapped() -> None:
    settings = {"learners": 1, "envs_per_collector": 2, "frames_per_batch": 400}
    with local_cluster({"learner": 1}) as me:
        learner = a_learner(me, env="Pendulum-v1", **settings)
        torch.nn.init.constant_(learner.network.log_scale, 1.0)
        torch.nn.init.constant_(learner.critic[-1].bias, 100.0)
        learner.collector.update_policy_weights_()
        data = next(iter(learner.collector))
        action, observation = data["action"].squeeze(-1), data["observation"]
        assert action.abs().max() > 4
        drawn_from_the_network(learner, data)
        cosine, sine, speed = observation.unbind(-1)
        cost = torch.atan2(sine, cosine) ** 2 + 0.1 * speed**2 + 0.001 * action.clamp(-2, 2) ** 2
        torch.testing.assert_close(
            data["next", "reward"].squeeze(-1).float(), -cost, atol=1e-4, rtol=1e-4
        )
        done = data["next", "done"][..., 0]
        assert done[:, -1].all() and done.sum() == 2 and not data["next", "terminated"].any()
        rows = learner._rows(data.clone())
        reward = data["next", "reward"] / learner.reward_scale.moments.deviation
        value = learner.critic(data["next", "observation"])
        expected = (reward + 0.99 * value)[done].float()
        torch.testing.assert_close(rows["value_target"][done.reshape(-1)], expected)
        assert expected.min() > 50
        learner.close()


def drawn_from_the_network(learner: DDPPO, data) -> None:
    density = torch.distributions.Normal(*learner.network(data["observation"]))
    torch.testing.assert_close(
        data["action_log_prob"], density.log_prob(data["action"]).squeeze(-1), atol=1e-5, rtol=1e-4
    )


def test_collectors_act_with_the_learners_moments(fork_server) -> None:
    with local_cluster({"learner": 1, "collector": 1}, fork_server=fork_server) as me:
        learner = a_learner(me, env="Pendulum-v1", learners=1, collectors=1, learning_rate=1e-3)
        batches = iter(learner.collector)
        learner.learn(next(batches), 378)
        assert float(moments_of(learner.network).count) > 100
        data = next(batches)
        drawn_from_the_network(learner, data)
        # the moments do not change between acting and learning
        divergence = learner.loss(learner._rows(data))["kl_approx"]
        assert abs(float(divergence)) < 1e-5
        learner.close()


def test_a_restored_learner_has_the_moments() -> None:
    with local_cluster({"learner": 1}) as me:
        first, second = (
            a_learner(me, env="Pendulum-v1", learners=1, learning_rate=1e-3) for _ in range(2)
        )
        first.learn(next(iter(first.collector)), 378)
        second.load_state_dict(first.state_dict())
        for part in (first, second):
            part.close()
    assert moments_of(second.network) is moments_of(second.critic)
    for ours, theirs in (
        (moments_of(second.network), moments_of(first.network)),
        (second.reward_scale.moments, first.reward_scale.moments),
    ):
        assert float(ours.count) > 100
        for name, value in theirs.state_dict().items():
            assert torch.equal(ours.state_dict()[name], value)


def test_a_run_with_continuous_actions_normalizes_resumes_and_plays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    run = ["train", "ddppo", "--output-dir", "run", "--json", "--eval-episodes", "2"]
    new = ["--env", "MountainCarContinuous-v0", "--learners", "1", "--frames-per-batch", "64"]
    counts = []
    for more in ([*new, "--total-frames", "128"], ["--resume", "--total-frames", "192"]):
        assert main([*run, *more]) == 0, capsys.readouterr().err
        result = json.loads(capsys.readouterr().out)
        checkpoint = load_checkpoint(tmp_path / "run/checkpoint.pt")
        counts += [float(checkpoint.model["network.layers.0.count"])]
        counts += [float(checkpoint.extra["learner"]["returns"]["count"])]
    assert counts == pytest.approx([128, 128, 192, 192])
    assert main([*run, "--resume", "--no-normalize-rewards"]) == 2
    assert "--normalize-rewards: got False" in capsys.readouterr().err
    policy = load_policy(tmp_path / "run")
    assert float(moments_of(policy).count) > 100
    episodes = play(tmp_path / "run", episodes=2, seed=0)
    assert episodes["env"] == result["env"] == "MountainCarContinuous-v0"
    assert policy.predict(np.full(2, 1e6, np.float32)).shape == (1,)


@pytest.mark.parametrize(
    ("settings", "launched", "roles"),
    [
        ({}, None, {"learner": 2, "collector": 0, "evaluator": 1}),
        ({"learners": 1}, None, {"learner": 1, "collector": 0, "evaluator": 0}),
        ({"collectors": 3}, None, {"learner": 2, "collector": 6, "evaluator": 1}),
        ({}, 4, {"learner": 4, "collector": 0}),
        ({"collectors": 1}, 4, {"learner": 2, "collector": 2}),
    ],
)
def test_roles_follow_from_the_options_and_the_launchers_ranks(settings, launched, roles) -> None:
    assert DDPPOConfig(**settings).roles(launched) == roles


def test_ranks_that_do_not_divide_and_batches_too_small_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="--collectors: got 2.* 4 ranks"):
        DDPPOConfig(collectors=2).roles(4)
    with pytest.raises(ConfigurationError, match="--learners: got 3.*4 ranks learn"):
        DDPPOConfig().check_launched({"learners": 3}, 4)
    with pytest.raises(ConfigurationError, match="--frames-per-batch: got 16"):
        DDPPOConfig(frames_per_batch=16)
    with pytest.raises(ConfigurationError, match="--clip: got 1.5, expected at most 1"):
        DDPPOConfig(clip=1.5)  # its objective is a NaN


def test_the_least_batch_follows_what_a_cut_leaves_and_the_launchers_learners() -> None:
    with pytest.raises(ConfigurationError, match="at least 80 for 2 learners"):
        DDPPOConfig(frames_per_batch=79, preempt_min_part=0.1)
    DDPPOConfig(frames_per_batch=80, preempt_min_part=0.1)
    DDPPOConfig(frames_per_batch=8, preempt_fraction=1.0)  # none is cut
    DDPPOConfig(frames_per_batch=4, learners=1)  # there is no other to wait for
    for refused in (
        DDPPOConfig(frames_per_batch=32).roles,
        lambda ranks: DDPPOConfig(frames_per_batch=32).check_launched({}, ranks),
    ):
        with pytest.raises(ConfigurationError, match="at least 64 for 4 learners"):
            refused(4)
    assert DDPPOConfig(frames_per_batch=32).roles(2)["learner"] == 2
