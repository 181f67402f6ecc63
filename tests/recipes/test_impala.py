"""V-trace of the batch's own actions, against the paper's formula."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict
from torch.distributions import Categorical

from tests.recipes.learners import a_learner
from torchrl_dist import session
from torchrl_dist.recipes.ddppo import DDPPOConfig
from torchrl_dist.recipes.impala import ImpalaConfig
from torchrl_dist.recipes.impala.recipe import vtrace
from torchrl_dist.recipes.parts.networks import CategoricalNetwork, ValueNetwork
from torchrl_dist.recipes.training.updates import Adam

GAMMA = 0.9


def networks() -> tuple[CategoricalNetwork, ValueNetwork]:
    torch.manual_seed(0)
    network, critic = CategoricalNetwork(4, 3, (8,)), ValueNetwork(4, (8,))
    with torch.no_grad():
        network[-1].weight.mul_(100)  # else all actions are alike
    return network, critic


def rollout(network: CategoricalNetwork, ends: dict[int, str], steps: int = 9) -> TensorDict:
    """``[2, steps]`` acted by ``network``; ``ends``: step -> how an episode ends there."""
    torch.manual_seed(1)
    observation = torch.randn(2, steps, 4)
    policy = Categorical(logits=network(observation).detach())
    action = policy.sample()
    flags = {k: torch.zeros(2, steps, 1, dtype=torch.bool) for k in ("terminated", "truncated")}
    following = torch.cat([observation[:, 1:], torch.randn(2, 1, 4)], 1)
    for step, how in ends.items():
        flags[how][:, step] = True
        following[:, step] = torch.randn(2, 4)  # not the first of the next episode
    after = {"observation": following, "reward": torch.randn(2, steps, 1), **flags}
    after["done"] = flags["terminated"] | flags["truncated"]
    log_prob = policy.log_prob(action)
    data = {"observation": observation, "action": action, "action_log_prob": log_prob}
    return TensorDict({**data, "next": after}, [2, steps])


ENDS = [{}, {3: "terminated"}, {3: "truncated"}, {2: "terminated", 6: "truncated", 8: "truncated"}]


@torch.no_grad()
def by_hand(data, network, critic, rho_bar: float, c_bar: float):
    """Section 4.1 of arXiv:1802.01561, in the recursive form of its remark 1, for one row."""
    steps = data.shape[0]
    chosen = Categorical(logits=network(data["observation"])).log_prob(data["action"])
    ratio = (chosen - data["action_log_prob"]).exp().tolist()
    value = critic(data["observation"]).squeeze(-1).tolist()
    following = critic(data["next", "observation"]).squeeze(-1).tolist()
    reward = data["next", "reward"].squeeze(-1).tolist()
    done = data["next", "done"].squeeze(-1).tolist()
    terminated = data["next", "terminated"].squeeze(-1).tolist()
    target, advantage = [0.0] * steps, [0.0] * steps
    for s in reversed(range(steps)):
        rho, c = min(rho_bar, ratio[s]), min(c_bar, ratio[s])
        after = 0.0 if terminated[s] else following[s]
        goes_on = s + 1 < steps and not done[s]
        trace = GAMMA * c * (target[s + 1] - value[s + 1]) if goes_on else 0.0
        target[s] = value[s] + rho * (reward[s] + GAMMA * after - value[s]) + trace
        best = target[s + 1] if goes_on else after
        advantage[s] = rho * (reward[s] + GAMMA * best - value[s])
    return target, advantage, ratio


@pytest.mark.parametrize("ends", ENDS)
@pytest.mark.parametrize(("rho_bar", "c_bar"), [(1.0, 1.0), (2.0, 0.5), (1e9, 1e9)])
def test_data_of_another_policy_are_corrected_as_the_paper_says(ends, rho_bar, c_bar) -> None:
    network, critic = networks()
    data = rollout(network, ends)
    with torch.no_grad():
        network[-1].weight.add_(torch.randn_like(network[-1].weight))  # it has learned since
    outputs = (
        network(data["observation"]),
        *(critic(x["observation"]) for x in (data, data["next"])),
    )
    reward = data["next", "reward"]
    traced = vtrace(data, *outputs, reward=reward, gamma=GAMMA, rho_bar=rho_bar, c_bar=c_bar)
    for row in range(2):
        target, advantage, ratio = by_hand(data[row], network, critic, rho_bar, c_bar)
        assert traced.value_target[row, :, 0].tolist() == pytest.approx(target, rel=1e-4)
        assert traced.advantage[row, :, 0].tolist() == pytest.approx(advantage, rel=1e-4, abs=1e-6)
        assert traced.rho[row, :, 0].tolist() == pytest.approx(ratio, rel=1e-4)
    assert (traced.rho - 1).abs().max() > 0.1
    assert not (traced.value_target.requires_grad or traced.advantage.requires_grad)


def test_rows_of_the_present_policy_have_weight_one_with_normalized_observations() -> None:
    with session({"learner": 1}) as me:
        config = ImpalaConfig(
            collectors=0, envs_per_collector=4, frames_per_batch=64, max_policy_lag=0,
            normalize_observations=True,
        )  # fmt: skip
        learner = a_learner(config, me)
        batches = iter(learner.collector)
        for _ in range(3):
            assert float(learner.learn(next(batches), 64)["train/rho_mean"]) == pytest.approx(1)
        learner.close()


def test_scaled_rewards_are_learned_from_and_their_moments_saved() -> None:
    with session({"learner": 1}) as me:
        config = ImpalaConfig(
            collectors=0, envs_per_collector=4, frames_per_batch=64, max_policy_lag=0,
            normalize_rewards=True,
        )  # fmt: skip
        learner = a_learner(config, me)
        batches = iter(learner.collector)
        for _ in range(3):
            data = next(batches)
            before = data["next", "reward"].clone()
            learner.learn(data, 64)
            assert torch.equal(data["next", "reward"], before)  # which metrics read
        scale = learner.reward_scale.moments
        data = next(batches)
        scaled = learner.rewards(data)
        assert torch.allclose(scaled, (before[:1, :1] / scale.deviation).float())  # rewards are 1
        assert float(scale.deviation) > 2
        later = a_learner(config, me, seed=1)
        assert float(later.reward_scale.moments.mean) == 0
        later.load_state_dict(learner.state_dict())
        assert torch.equal(later.reward_scale.moments.mean, scale.mean)
        learner.close()
        later.close()


def test_steps_have_no_momentum() -> None:
    """As in the paper, a step follows the present gradient only."""
    with session({"learner": 1}) as me:
        config = ImpalaConfig(
            collectors=0, envs_per_collector=4, frames_per_batch=64, max_policy_lag=0
        )
        learner = a_learner(config, me)
        learner.learn(next(iter(learner.collector)), 64)
        (optimizer,) = {id(x): x for x in vars(learner).values() if isinstance(x, Adam)}.values()
        before = [weight.clone() for weight in optimizer.weights]
        assert any(weight.grad.any() for weight in optimizer.weights)
        optimizer.descend(sum(weight.sum() for weight in optimizer.weights) * 0.0)
        assert all(map(torch.equal, optimizer.weights, before))
        learner.close()


@pytest.mark.parametrize("config", [ImpalaConfig, DDPPOConfig])
def test_the_batch_of_an_update_stays_as_it_was_collected(config) -> None:
    with session({"learner": 1}) as me:
        sizes = {"envs_per_collector": 4, "frames_per_batch": 64, "hidden": (8,)}
        if config is ImpalaConfig:
            sizes |= {"collectors": 0, "max_policy_lag": 0}
        learner = a_learner(config(**sizes), me)
        data = next(iter(learner.collector))
        before = data.clone()
        learner.learn(data, 64)
        assert set(data.keys(True, True)) == set(before.keys(True, True))
        assert (data == before).all()
        learner.close()
