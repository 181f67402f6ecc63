"""``load_policy``: a trained policy, used from Python as it was trained."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

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
from torchrl_dist.recipes.parts.environments import Images, look_at
from torchrl_dist.recipes.parts.moments import moments_of
from torchrl_dist.recipes.parts.networks import CELL, HIDDEN, PolicySpec

KINDS = {
    "values": "CartPole-v1",
    "categorical": "CartPole-v1",
    "gaussian": "Pendulum-v1",
    "squashed_gaussian": "Pendulum-v1",
}


def saved(folder: Path, kind: str) -> tuple[Path, PolicySpec, torch.nn.Module]:
    task, normalized = look_at(KINDS[kind], continuous="any"), kind in ("categorical", "gaussian")
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


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("left", "of type <U4, expected an array of numbers"),
        ({"position": 1.0}, "of type object, expected an array of numbers"),
        ([[1.0, 2.0], [3.0]], "of different shapes, expected an array of numbers"),
        (np.zeros(4, complex), "of type complex128, expected an array of numbers"),
        ([0.0, 1.0, float("nan"), 0.0], "with NaN or infinity"),
        (torch.tensor([0.0, 1.0, 2.0, float("inf")]), "with NaN or infinity"),
    ],
)
def test_predict_refuses_other_things_than_observations(
    given: Any, says: str, tmp_path: Path
) -> None:
    policy = load_policy(saved(tmp_path, "values")[0])
    with pytest.raises(ConfigurationError, match=f"got observations {says}"):
        policy.predict(given)
    assert policy.predict(torch.zeros(4, requires_grad=True)) in (0, 1)


@pytest.mark.parametrize("state_size", [0, 5])
def test_images_that_are_scaled_already_are_refused(state_size: int, tmp_path: Path) -> None:
    """The network divides by 255, so the policy would see nearly black images."""
    kind = "recurrent_values" if state_size else "values"
    spec = PolicySpec("x", 3 * 9 * 9, (8,), kind, 2, images=Images((3, 9, 9), 255.0))
    spec = dataclasses.replace(spec, state_size=state_size)
    checkpoint = Checkpoint("mine", {}, spec.network().state_dict(), policy_info=spec.as_plain())
    policy = load_policy(save_checkpoint(tmp_path / "checkpoint.pt", checkpoint))
    images = np.random.default_rng(0).integers(0, 256, (2, 3, 9, 9), np.uint8)
    assert policy.predict(images).shape == (2,)
    state = torch.zeros(2, 1, state_size)
    scaled = TensorDict(
        {"observation": torch.tensor(images / 255), HIDDEN: state, CELL: state}, batch_size=[2]
    )
    for call in (lambda: policy.predict(images / 255), lambda: policy(scaled)):
        with pytest.raises(ConfigurationError, match="got images of type float64, expected uint8"):
            call()


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
