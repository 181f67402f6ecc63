"""``load_policy``: a trained policy, used from Python as it was trained."""

from __future__ import annotations

from pathlib import Path

import gymnasium
import numpy as np
import pytest
import torch
from scipy import stats
from tensordict import TensorDict
from tensordict.nn import InteractionType, TensorDictModule, set_interaction_type

from torchrl_dist import load_policy
from torchrl_dist.checkpoint import Checkpoint, save_checkpoint
from torchrl_dist.errors import CheckpointError, ConfigurationError
from torchrl_dist.learn.ranks import Ranks
from torchrl_dist.recipes.parts.environments import look_at
from torchrl_dist.recipes.parts.moments import moments_of
from torchrl_dist.recipes.parts.networks import PolicySpec

KINDS = {
    "values": "CartPole-v1",
    "categorical": "CartPole-v1",
    "gaussian": "Pendulum-v1",
    "squashed_gaussian": "Pendulum-v1",
}


def saved(folder: Path, kind: str) -> tuple[Path, PolicySpec, torch.nn.Module]:
    task, normalized = look_at(KINDS[kind], discrete=None), kind in ("categorical", "gaussian")
    spec = PolicySpec.of(task, kind, (8,), normalized=normalized)
    network = spec.network()
    if normalized:
        moments_of(network).update(5 + 3 * torch.randn(9, task.observation_size), Ranks(), "x")
    checkpoint = Checkpoint("mine", {}, network.state_dict(), policy_info=spec.as_plain())
    return save_checkpoint(folder / "checkpoint.pt", checkpoint), spec, network


@pytest.mark.parametrize("kind", KINDS)
def test_the_actions_are_those_of_the_saved_network(tmp_path: Path, kind: str) -> None:
    path, _spec, network = saved(tmp_path, kind)
    env = gymnasium.make(KINDS[kind])
    observation, _ = env.reset(seed=0)
    for where in (path, tmp_path, str(tmp_path)):
        policy = load_policy(where)
        assert isinstance(policy, TensorDictModule) and policy.env == KINDS[kind]
        action = policy.predict(observation)
        assert isinstance(action, np.ndarray) and env.action_space.contains(
            action if action.ndim else int(action)
        )
        many = np.stack([observation, -observation])
        rows = torch.as_tensor(many)
        assert np.array_equal(policy.predict(many), network.greedy(rows).detach().numpy())
        assert np.array_equal(policy.predict(rows[None])[0], policy.predict(many))
        data = policy(TensorDict({"observation": rows}, [2]))
        assert np.array_equal(data["action"].numpy(), policy.predict(many))
    assert not any(each.requires_grad for each in policy.parameters())
    for wrong in (observation[:-1], np.float32(0), many[..., None]):
        with pytest.raises(ConfigurationError, match="got observations of shape"):
            policy.predict(wrong)


def test_exploring_draws_from_the_policys_distribution(tmp_path: Path) -> None:
    path, _, network = saved(tmp_path, "categorical")
    policy, rows = load_policy(path), torch.randn(1, 4).expand(20_000, 4)
    torch.manual_seed(0)
    drawn = [policy.predict(rows, explore=True)]
    with set_interaction_type(InteractionType.RANDOM):
        drawn.append(policy(TensorDict({"observation": rows}, [20_000]))["action"].numpy())
    for actions in drawn:
        expected = network(rows[:1]).double().softmax(-1)[0].detach().numpy() * 20_000
        assert stats.chisquare(np.bincount(actions, minlength=2), expected).pvalue > 1e-4
    path, _, network = saved(tmp_path, "squashed_gaussian")
    policy, rows = load_policy(path), torch.randn(1, 3).expand(20_000, 3)
    loc, scale = (each[0].detach().numpy() for each in network(rows[:1]))
    drawn = np.arctanh((policy.predict(rows, explore=True) / 2).clip(-1 + 1e-6, 1 - 1e-6))
    assert stats.kstest(drawn[:, 0], "norm", (loc[0], scale[0])).pvalue > 1e-4
    path, _, network = saved(tmp_path, "gaussian")
    loc, scale = (float(each[0].detach()) for each in network(rows[:1]))
    drawn = load_policy(path).predict(rows, explore=True)[:, 0]
    inside = drawn[np.abs(drawn) < 2]
    bounds = (-2 - loc) / scale, (2 - loc) / scale
    assert np.abs(drawn).max() == 2 and len(inside) > 18_000
    assert stats.kstest(inside, "truncnorm", (*bounds, loc, scale)).pvalue > 1e-4
    path, *_ = saved(tmp_path, "values")
    with pytest.raises(ConfigurationError, match="explore=False"):
        load_policy(path).predict(np.zeros(4), explore=True)


def test_a_checkpoint_without_a_policy_is_refused(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path / "checkpoint.pt", Checkpoint("mine", {}, {"x": torch.ones(1)}))
    with pytest.raises(CheckpointError, match="cannot be used"):
        load_policy(path)
    with pytest.raises(CheckpointError, match="does not exist"):
        load_policy(tmp_path / "nothing.pt")
