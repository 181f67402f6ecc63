"""The recipes' losses are those of TorchRL, and on two ranks those of one process with all rows."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import Tensor, nn
from torch.distributions import normal
from torchrl.data import Sequence
from torchrl.modules import QValueActor
from torchrl.objectives import A2CLoss as TorchRLA2CLoss
from torchrl.objectives import ClipPPOLoss, SoftUpdate
from torchrl.objectives import DiscreteSACLoss as TorchRLDiscreteSACLoss
from torchrl.objectives import DQNLoss as TorchRLDQNLoss
from torchrl.objectives import SACLoss as TorchRLSACLoss

from tests.learn.ranks import LearningRanks
from tests.recipes.test_r2d2 import SIZE, windows
from torchrl_dist import DistributedLoss
from torchrl_dist.recipes.apex.dqn_learner import DQNLoss
from torchrl_dist.recipes.parts.actor_critic import A2CLoss, GaussianPPOLoss, PPOLoss
from torchrl_dist.recipes.parts.environments import look_at
from torchrl_dist.recipes.parts.networks import (
    CategoricalNetwork,
    GaussianNetwork,
    PolicySpec,
    QNetwork,
    RecurrentQNetwork,
    ValueNetwork,
)
from torchrl_dist.recipes.parts.policies import (
    action_values_of,
    categorical_actor,
    critic_of,
    gaussian_actor,
    squashed_gaussian_actor,
)
from torchrl_dist.recipes.parts.targets import Follow, target_of
from torchrl_dist.recipes.r2d2.loss import R2D2Loss
from torchrl_dist.recipes.sac.loss import DiscreteSACLoss, SACLoss
from torchrl_dist.recipes.sac.recipe import ActionValue, target_entropy

ROWS = 24
close = partial(torch.testing.assert_close, rtol=1e-6, atol=1e-6)


def rows_of_dqn(seed: int = 0) -> TensorDict:
    generator = torch.Generator().manual_seed(seed)
    draw = partial(torch.rand, generator=generator)
    after = {
        "observation": draw(ROWS, 4) - 0.5,
        "reward": draw(ROWS, 1) * 6 - 3,
        "terminated": draw(ROWS, 1) < 0.3,
    }
    after["done"] = after["terminated"] | (draw(ROWS, 1) < 0.2)
    return TensorDict(
        {
            "observation": draw(ROWS, 4) - 0.5,
            "action": (draw(ROWS) * 3).long(),
            "priority_weight": draw(ROWS),
            "steps_to_next_obs": (draw(ROWS, 1) * 3).long() + 1,
            "next": after,
        },
        [ROWS],
    )


def weights_of(params: Any) -> list[Tensor]:
    """The weights of two critics, each stacked [2, ...], without their buffers."""
    return [params["module", layer, name] for layer in "02" for name in ("weight", "bias")]


def pairs(networks: Any) -> Any:
    return zip(*(network.parameters() for network in networks), strict=True)


def gradients(network: nn.Module) -> list[Tensor]:
    return [weight.grad.clone() for weight in network.parameters()]


def test_double_q_learning_is_that_of_torchrl() -> None:
    torch.manual_seed(0)
    network = QNetwork(4, 3, (16, 16))
    loss = DQNLoss(network, 0.9)
    for weight in loss.target.parameters():
        nn.init.normal_(weight)
    theirs = copy.deepcopy(network)
    actor = QValueActor(
        TensorDictModule(theirs, ["observation"], ["action_value"]), action_space="categorical"
    )
    other = TorchRLDQNLoss(
        actor, double_dqn=True, delay_value=True, loss_function="smooth_l1",
        action_space="categorical",
    )  # fmt: skip
    other.make_value_estimator(gamma=0.9)
    updater = SoftUpdate(other, tau=0.25)  # sets the targets to the weights
    targets = list(other.target_value_network_params.values(True, True))
    for theirs_, ours in zip(targets, loss.target.parameters(), strict=True):
        theirs_.data.copy_(ours)
    batch, copied = rows_of_dqn(), rows_of_dqn()
    found, expected = loss(batch)["loss"], other(copied)["loss"]
    close(found, expected)
    close(batch["td_error"] ** 2, copied["td_error"])
    found.backward()
    expected.backward()
    for ours, grad in zip(gradients(network), gradients(theirs), strict=True):
        close(ours, grad)
    assert all(weight.grad is None for weight in loss.target.parameters())
    Follow(loss.target, network, 0.25)()
    updater.step()
    for theirs_, ours in zip(targets, loss.target.parameters(), strict=True):
        close(ours, theirs_.data)


def test_soft_actor_critic_is_that_of_torchrl(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the same noise, for actions within bounds that differ by dimension."""
    torch.manual_seed(0)
    task = look_at("Pendulum-v1", continuous="bounded")
    low, high = (-2.0, 0.0, 5.0), (1.0, 0.5, 25.0)
    task = task.__class__(**{**vars(task), "action_low": low, "action_high": high})
    network = PolicySpec("x", 3, (16,), "squashed_gaussian", 0, low, high).network()
    critics: list[nn.Module] = [ActionValue(task, (16,)) for _ in range(2)]
    loss = SACLoss(network, critics, gamma=0.9, target_entropy=target_entropy(task))
    with torch.no_grad():
        loss.log_alpha.fill_(-0.7)
        for weight in loss.target.parameters():
            nn.init.normal_(weight)
    theirs = copy.deepcopy(network)
    other = TorchRLSACLoss(
        squashed_gaussian_actor(theirs, low, high), action_values_of(ActionValue(task, (16,))),
        num_qvalue_nets=2, loss_function="l2", target_entropy=target_entropy(task),
    )  # fmt: skip
    share_critics(loss, other)
    noise = torch.randn(ROWS, 3)
    monkeypatch.setattr(torch, "randn_like", lambda like: noise)
    monkeypatch.setattr(normal, "_standard_normal", lambda *_, **__: noise)
    action = torch.tensor(low) + torch.rand(ROWS, 3) * (torch.tensor(high) - torch.tensor(low))
    terminated = torch.rand(ROWS, 1) < 0.3
    after = {"observation": torch.rand(ROWS, 3), "reward": torch.rand(ROWS, 1)}
    after |= {"terminated": terminated, "done": terminated}
    batch = {"observation": torch.rand(ROWS, 3), "action": action, "next": after}
    same_losses(loss, other, TensorDict(batch, [ROWS]), theirs)


def test_soft_actor_critic_of_discrete_actions_is_that_of_torchrl() -> None:
    torch.manual_seed(0)
    network = CategoricalNetwork(4, 3, (16,))
    nn.init.normal_(network[-1].weight)
    critics: list[nn.Module] = [QNetwork(4, 3, (16,)) for _ in range(2)]
    loss = DiscreteSACLoss(network, critics, gamma=0.9, target_entropy=0.6)
    with torch.no_grad():
        loss.log_alpha.fill_(-0.7)
        for weight in loss.target.parameters():
            nn.init.normal_(weight)
    theirs = copy.deepcopy(network)
    critic = TensorDictModule(QNetwork(4, 3, (16,)), ["observation"], ["action_value"])
    other = TorchRLDiscreteSACLoss(
        categorical_actor(theirs), critic, action_space="categorical", num_actions=3,
        loss_function="l2", target_entropy=0.6,
    )  # fmt: skip
    share_critics(loss, other)
    same_losses(loss, other, rows_of_dqn().exclude("steps_to_next_obs"), theirs)


def share_critics(loss: Any, other: Any) -> None:
    """Give TorchRL's loss the temperature, the critics and the targets of ours."""
    other.make_value_estimator(gamma=0.9)
    with torch.no_grad():
        other.log_alpha.fill_(-0.7)
        for params, networks in (
            (other.qvalue_network_params, loss.critics),
            (other.target_qvalue_network_params, loss.target),
        ):
            for both, pair in zip(weights_of(params), pairs(networks), strict=True):
                both.data.copy_(torch.stack(pair))


def same_losses(loss: Any, other: Any, batch: TensorDict, theirs: nn.Module) -> None:
    """Check the losses and the gradients of all weights. ``theirs`` is the policy of ``other``."""
    found, expected = loss(batch.clone()), other(batch.exclude("priority_weight"))
    for name in ("loss_qvalue", "loss_actor", "loss_alpha", "alpha", "entropy"):
        close(found[name], expected[name].reshape(()), rtol=1e-5)
    for losses in (found, expected):
        (losses["loss_qvalue"] + losses["loss_actor"] + losses["loss_alpha"]).backward()
    for ours, grad in zip(gradients(loss.network), gradients(theirs), strict=True):
        close(ours, grad, rtol=1e-5)
    stacked = weights_of(other.qvalue_network_params)
    for both, pair in zip(stacked, pairs(loss.critics), strict=True):
        close(torch.stack([weight.grad for weight in pair]), both.grad, rtol=1e-5)
    close(loss.log_alpha.grad, other.log_alpha.grad.reshape(()), rtol=1e-5)
    assert all(weight.grad is None for weight in loss.target.parameters())


def rows_of_policy(kind: str = "ppo") -> TensorDict:
    torch.manual_seed(7)
    return TensorDict(
        {
            "observation": torch.randn(ROWS, 4),
            "action": torch.randint(3, (ROWS,)),
            "action_log_prob": -torch.rand(ROWS) - 0.6,
            "advantage": torch.randn(ROWS, 1),
            "value_target": torch.randn(ROWS, 1),
            "state_value": torch.randn(ROWS, 1),
        }
        | ({"action": torch.randn(ROWS, 2) / 2} if kind == "gaussian" else {}),
        [ROWS],
    )


@pytest.mark.parametrize("kind", ["a2c", "ppo", "ppo with clipped values", "gaussian"])
def test_policy_gradients_are_those_of_torchrl(kind: str) -> None:
    torch.manual_seed(1)
    network: Any = CategoricalNetwork(4, 3, (16,))
    if kind == "gaussian":
        network = GaussianNetwork(4, (-1.0, -2.0), (1.0, 2.0), (16,))
        nn.init.normal_(network.log_scale, -0.5, 0.2)
    critic = ValueNetwork(4, (16,))
    nn.init.normal_((network.layers if kind == "gaussian" else network)[-1].weight)
    theirs = copy.deepcopy(nn.ModuleList([network, critic]))
    actor = (gaussian_actor if kind == "gaussian" else categorical_actor)(theirs[0])
    value = critic_of(theirs[1])
    coefs: dict[str, Any] = {"entropy_coeff": 0.1, "critic_coeff": 0.7, "loss_critic_type": "l2"}
    if kind == "a2c":
        loss: Any = A2CLoss(network, critic, entropy_coef=0.1, critic_coef=0.7)
        other: Any = TorchRLA2CLoss(actor, value, **coefs)
    else:
        made, clips = GaussianPPOLoss if kind == "gaussian" else PPOLoss, kind.endswith("values")
        loss = made(network, critic, clip=0.2, clip_value=clips, entropy_coef=0.1, critic_coef=0.7)
        other = ClipPPOLoss(
            actor, value, clip_epsilon=0.2, clip_value=clips, normalize_advantage=False, **coefs
        )
    found, expected = loss(rows_of_policy(kind)), other(rows_of_policy(kind))
    names = {"loss_objective", "loss_critic", "loss_entropy", "entropy"}
    names |= {"kl_approx", "clip_fraction"} if kind != "a2c" else set()
    assert set(found.keys()) == names
    for name in names:
        close(found[name], expected[name].reshape(()))
    if kind != "a2c":
        assert 0 < found["clip_fraction"] < 1
    for losses in (found, expected):
        (losses["loss_objective"] + losses["loss_critic"] + losses["loss_entropy"]).backward()
    ours = [*gradients(network), *gradients(critic)]
    for grad, other_grad in zip(ours, gradients(theirs), strict=True):
        close(grad, other_grad)


def dqn() -> tuple[Any, TensorDict]:
    return DQNLoss(QNetwork(4, 3, (16,)), 0.9), rows_of_dqn()


def r2d2() -> tuple[Any, TensorDict]:
    network = RecurrentQNetwork(3, 4, (6,), SIZE)
    loss = R2D2Loss(network, gamma=0.9, n_steps=2, burn_in=2, length=3)
    torch.manual_seed(3)
    return loss, windows(8, Sequence(3, burn_in=2, bootstrap=1), np.random.default_rng(0))


def gradients_of_two_ranks(make: Callable[[], tuple[Any, TensorDict]]) -> float:
    """Return the largest difference to the gradients of this process alone with all rows."""
    torch.manual_seed(5)
    alone, batch = make()
    torch.manual_seed(5)
    loss = make()[0]
    first = len(batch) // 4
    mine = slice(0, first) if dist.get_rank() == 0 else slice(first, None)
    alone(batch.clone())["loss"].backward()
    with DistributedLoss(loss, timeout_s=30) as loss:
        loss(batch[mine].clone())["loss"].backward()
        pairs = zip(gradients(loss.network), gradients(alone.network), strict=True)
        return max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)


@pytest.mark.parametrize("make", [dqn, r2d2])
def test_gradients_of_two_ranks_are_those_of_all_rows(
    make: Callable[[], tuple[Any, TensorDict]], fork_server: Any
) -> None:
    with LearningRanks.start(2, fork_server) as ranks:
        assert max(ranks.run(gradients_of_two_ranks, make)) < 1e-5


def test_a_target_shares_the_buffers_and_gets_no_gradients() -> None:
    network = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    target = target_of(network)
    network[1].running_mean.fill_(3.0)
    assert (target[1].running_mean == 3).all()
    assert target[0].weight is not network[0].weight
    assert not any(weight.requires_grad for weight in target.parameters())
