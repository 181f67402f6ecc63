"""The rows that an actor writes, and what DQNLoss makes of them, against hand computations."""

from __future__ import annotations

import math

import pytest
import torch
from tensordict import TensorDict
from torchrl.envs.utils import ExplorationType, set_exploration_type

from torchrl_dist.recipes.apex.actor import EpsilonGreedy, RowsWithPriority, actor_epsilons
from torchrl_dist.recipes.apex.dqn_learner import DQNLearner, DQNLoss
from torchrl_dist.recipes.parts.environments import Images
from torchrl_dist.recipes.parts.networks import QNetwork

GAMMA = 0.9
N_STEPS = 3
ENDS = {2: "terminated", 5: "truncated"}  # step -> how the episode ends; 8 steps in all
LENGTHS = [3, 2, 1, 3, 2, 1]  # of each step's window; those of the last two are not complete


def rollout(envs: int = 2, steps: int = 8) -> TensorDict:
    """Two envs with equal ends. Observations name (env, step); the true last ones are apart."""
    generator = torch.Generator().manual_seed(0)
    observation = torch.randn(envs, steps, 4, generator=generator)
    following = torch.cat([observation[:, 1:], torch.randn(envs, 1, 4, generator=generator)], 1)
    for step in ENDS:  # after a reset the next root is not the last observation
        following[:, step] = torch.randn(envs, 4, generator=generator)
    flags = {
        name: torch.zeros(envs, steps, 1, dtype=torch.bool) for name in ("terminated", "truncated")
    }
    for step, name in ENDS.items():
        flags[name][:, step] = True
    trajectory = torch.tensor([sum(step > end for end in ENDS) for step in range(steps)])
    return TensorDict(
        {
            "observation": observation,
            "collector": {"traj_ids": trajectory + 10 * torch.arange(envs)[:, None]},
            "action": torch.randint(0, 2, (envs, steps), generator=generator),
            "next": {
                "observation": following,
                "reward": torch.randn(envs, steps, 1, generator=generator),
                "done": flags["terminated"] | flags["truncated"],
                **flags,
            },
        },
        batch_size=[envs, steps],
        names=[None, "time"],
    )


def window_by_hand(data: TensorDict, env: int, step: int) -> tuple[float, int, bool]:
    """(discounted reward, last step of the window, whether it ends in a terminal state)."""
    total, last = 0.0, step
    for k in range(N_STEPS):
        last = step + k
        total += GAMMA**k * float(data["next", "reward"][env, last])
        if last in ENDS:
            break
    return total, last, ENDS.get(last) == "terminated"


def test_rows_equal_the_windows_by_hand() -> None:
    data = rollout()
    rows = RowsWithPriority(QNetwork(4, 2, (8,)), gamma=GAMMA, n_steps=N_STEPS)(data.clone())
    assert rows.shape == (2, 6)
    for env in range(2):
        for step in range(6):
            reward, last, terminal = window_by_hand(data, env, step)
            row = rows[env, step]
            assert float(row["next", "reward"]) == pytest.approx(reward, abs=1e-5)
            assert int(row["steps_to_next_obs"]) == last - step + 1 == LENGTHS[step]
            assert bool(row["next", "terminated"]) is terminal
            assert torch.equal(row["observation"], data["observation"][env, step])
            assert torch.equal(row["next", "observation"], data["next", "observation"][env, last])


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint16, torch.int64, torch.float64])
def test_observations_of_any_type_become_float32(dtype: torch.dtype) -> None:
    data = rollout()
    for key in ("observation", ("next", "observation")):
        data.set(key, (9 * data.get(key)).abs().to(dtype))
    before = data.clone()
    rows = RowsWithPriority(QNetwork(4, 2, (8,)), gamma=GAMMA, n_steps=N_STEPS)(data)
    assert rows["observation"].dtype == torch.float32
    assert torch.equal(rows["observation"], before["observation"][:, :6].to(torch.float32))
    assert data["next", "observation"].dtype == dtype  # the rollout itself is not changed


@pytest.mark.parametrize("length", [1, 2, 3, 5])
def test_windows_cross_the_ends_of_rollouts(length: int) -> None:
    """However short the messages are: no window of n steps becomes one of fewer."""
    data, network = rollout(), QNetwork(4, 2, (8,))
    whole = RowsWithPriority(network, gamma=GAMMA, n_steps=N_STEPS)(data.clone())
    parts = RowsWithPriority(network, gamma=GAMMA, n_steps=N_STEPS)
    memory = data[:, :length].clone()  # which a collector may use again for every rollout
    rows = []
    for part in data.split(length, dim=1):
        memory[:, : part.shape[1]].copy_(part)
        rows.append(parts(memory[:, : part.shape[1]]).clone())
    joined = torch.cat(rows, 1)
    assert joined.shape == (2, 6)
    for key in whole.keys(True, True):
        assert torch.allclose(joined[key], whole[key], atol=1e-6), key


@pytest.mark.parametrize("images", [None, Images((4, 5, 5), 255.0)])
def test_a_rollout_shorter_than_a_window_gives_no_row_yet(images: Images | None) -> None:
    data = rollout()
    if images is not None:
        pixels = torch.randint(0, 255, (*data.shape, *images.shape), dtype=torch.uint8)
        data["observation"], data["next", "observation"] = pixels, pixels.clone()
    rows = RowsWithPriority(QNetwork(images or 4, 2, (8,)), gamma=GAMMA, n_steps=N_STEPS)
    counts = [rows(data[:, step : step + 1]).shape[1] for step in range(5)]
    assert counts == [0, 0, 1, 1, 1]


def test_no_window_crosses_a_new_beginning_between_two_rollouts() -> None:
    """A worker that comes back starts new episodes: what waited ends there and bootstraps."""
    data = rollout()
    data["collector", "traj_ids"][:, 4:] += 100
    rows = RowsWithPriority(QNetwork(4, 2, (8,)), gamma=GAMMA, n_steps=N_STEPS)
    assert rows(data[:, :4]).shape == (2, 2)
    after = rows(data[:, 4:])[0]  # steps 2 to 5
    assert after["steps_to_next_obs"].squeeze(-1).tolist() == [1, 1, 2, 1]
    assert torch.equal(after["next", "observation"][1], data["next", "observation"][0, 3])
    assert after["next", "terminated"].squeeze(-1).tolist() == [True, False, False, False]


def target_by_hand(data: TensorDict, env: int, step: int, online, target) -> float:
    """Double DQN: the online network chooses, the target network values."""
    reward, last, terminal = window_by_hand(data, env, step)
    if terminal:
        return reward
    after = data["next", "observation"][env, last]
    choice = int(online(after).argmax())
    return reward + GAMMA ** (last - step + 1) * float(target(after)[choice])


@torch.no_grad()
def test_the_actors_priority_is_the_td_error_of_its_own_network() -> None:
    torch.manual_seed(1)
    data, network = rollout(), QNetwork(4, 2, (8,))
    rows = RowsWithPriority(network, gamma=GAMMA, n_steps=N_STEPS)(data.clone())
    for env in range(2):
        for step in range(6):
            expected = target_by_hand(data, env, step, network, network) - float(
                network(data["observation"][env, step])[data["action"][env, step]]
            )
            assert float(rows[env, step]["td_error"]) == pytest.approx(abs(expected), abs=1e-5)


def test_dqn_loss_bootstraps_after_truncation_only_and_discounts_by_the_windows_length() -> None:
    """Terminated: no bootstrap; truncated: gamma^length, true last obs."""
    torch.manual_seed(2)
    data, online, target = rollout(), QNetwork(4, 2, (8,)), QNetwork(4, 2, (8,))
    rows = RowsWithPriority(online, gamma=GAMMA, n_steps=N_STEPS)(data.clone()).reshape(-1)
    learner = DQNLearner(
        DQNLoss(online, GAMMA), learning_rate=1e-3, target_tau=0.5, max_grad_norm=10.0
    )
    learner.loss.target.load_state_dict(target.state_dict())
    with torch.no_grad():
        errors = [
            target_by_hand(data, env, step, online, target)
            - float(online(data["observation"][env, step])[data["action"][env, step]])
            for env in range(2)
            for step in range(6)
        ]
    weights = torch.rand(12)
    rows["priority_weight"] = weights
    loss = float(learner.update(rows))
    assert rows["td_error"].squeeze(-1).tolist() == pytest.approx(
        [abs(e) for e in errors], abs=1e-5
    )
    huber = [0.5 * e * e if abs(e) < 1 else abs(e) - 0.5 for e in errors]
    mean = sum(w * h for w, h in zip(weights.tolist(), huber, strict=True)) / len(huber)
    normalized = mean * len(huber) / float(weights.sum())
    assert any(loss == pytest.approx(value, rel=1e-4) for value in (mean, normalized))


def test_updates_change_the_network_given_and_pull_the_target_along() -> None:
    torch.manual_seed(3)
    network = QNetwork(4, 2, (8,))
    before = network[0].weight.detach().clone()
    learner = DQNLearner(
        DQNLoss(network, GAMMA), learning_rate=1e-2, target_tau=0.25, max_grad_norm=10.0
    )
    rows = RowsWithPriority(network, gamma=GAMMA, n_steps=N_STEPS)(rollout()).reshape(-1)
    learner.update(rows)
    assert not torch.equal(network[0].weight, before)
    state = learner.state_dict()["model"]
    target = next(v for k, v in state.items() if k.startswith("target") and v.shape == before.shape)
    expected = before + 0.25 * (network[0].weight.detach() - before)
    assert torch.allclose(target, expected, atol=1e-6)


@pytest.mark.parametrize("actors", [1, 2, 8])
def test_epsilons_follow_the_papers_formula(actors: int) -> None:
    epsilons = actor_epsilons(actors, 0.4, 7.0)
    expected = [0.4 ** (1 + i / max(1, actors - 1) * 7) for i in range(actors)]
    assert epsilons.tolist() == pytest.approx(expected)


def test_each_environment_explores_at_its_own_rate_and_not_at_all_when_greedy() -> None:
    torch.manual_seed(5)
    network = QNetwork(4, 2, (8,))
    policy = EpsilonGreedy(network, torch.tensor([0.0, 0.5, 1.0]))
    observation = torch.randn(4).expand(3, 4)
    greedy = int(network(observation[0]).argmax())
    draws = 4000
    with set_exploration_type(ExplorationType.RANDOM):
        actions = torch.stack(
            [policy(TensorDict({"observation": observation}, [3]))["action"] for _ in range(draws)]
        )
    others = (actions != greedy).float().mean(0)
    for rate, epsilon in zip(others.tolist(), (0.0, 0.5, 1.0), strict=True):
        assert rate == pytest.approx(epsilon / 2, abs=5 * math.sqrt(0.25 / draws) * (epsilon > 0))
    with set_exploration_type(ExplorationType.DETERMINISTIC):
        assert (policy(TensorDict({"observation": observation}, [3]))["action"] == greedy).all()


def test_epsilons_are_not_part_of_the_weights() -> None:
    policy = EpsilonGreedy(QNetwork(4, 2, (8,)), torch.tensor([0.3]))
    assert all(key.startswith("network.") for key in policy.state_dict())
