"""Small losses of every kind that the tests distribute, and batches for them.

They draw nothing at random when a loss is computed, so a batch gives the same gradients in one
piece and in several.
"""

from __future__ import annotations

import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import Tensor, nn
from torch.distributions import Categorical, Independent, Normal
from torchrl.modules import NormalParamExtractor, ProbabilisticActor, QValueActor, ValueOperator
from torchrl.objectives import (
    A2CLoss,
    ClipPPOLoss,
    DDPGLoss,
    DiscreteSACLoss,
    DQNLoss,
    LossModule,
    SACLoss,
    TD3Loss,
    ValueEstimators,
)

NAMES = ("dqn", "sac", "discrete_sac", "td3", "ddpg", "ppo", "a2c_vtrace")
OBSERVATION, ACTION, ACTIONS, STEPS = 5, 2, 3, 4


class PinnedNormal(Independent):
    """A Gaussian whose noise depends on its mean instead of a generator."""

    def __init__(self, loc: Tensor, scale: Tensor) -> None:
        super().__init__(Normal(loc, scale), 1)

    def rsample(self, sample_shape: torch.Size = torch.Size()) -> Tensor:  # noqa: B008
        normal = self.base_dist
        sample = normal.loc + normal.scale * torch.sin(997 * normal.loc.detach())
        return sample.expand(*sample_shape, *sample.shape)

    def sample(self, sample_shape: torch.Size = torch.Size()) -> Tensor:  # noqa: B008
        return self.rsample(sample_shape).detach()


class StateAction(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp(OBSERVATION + ACTION, 1)

    def forward(self, observation: Tensor, action: Tensor) -> Tensor:
        return self.layers(torch.cat([observation, action], -1))


def mlp(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, 16), nn.Tanh(), nn.Linear(16, outputs))


def gaussian_actor() -> ProbabilisticActor:
    network = nn.Sequential(mlp(OBSERVATION, 2 * ACTION), NormalParamExtractor())
    module = TensorDictModule(network, in_keys=["observation"], out_keys=["loc", "scale"])
    return ProbabilisticActor(
        module, in_keys=["loc", "scale"], distribution_class=PinnedNormal, return_log_prob=True
    )


def categorical_actor() -> ProbabilisticActor:
    module = TensorDictModule(
        mlp(OBSERVATION, ACTIONS), in_keys=["observation"], out_keys=["logits"]
    )
    return ProbabilisticActor(
        module, in_keys=["logits"], distribution_class=Categorical, return_log_prob=True
    )


def deterministic_actor() -> TensorDictModule:
    network = nn.Sequential(mlp(OBSERVATION, ACTION), nn.Tanh())
    return TensorDictModule(network, in_keys=["observation"], out_keys=["action"])


def state_value() -> ValueOperator:
    return ValueOperator(mlp(OBSERVATION, 1), in_keys=["observation"])


def state_action_value() -> ValueOperator:
    return ValueOperator(StateAction(), in_keys=["observation", "action"])


def make_loss(name: str, seed: int = 0) -> LossModule:
    """Make a loss. Equal seeds give equal parameters."""
    torch.manual_seed(seed)
    if name == "dqn":
        actor = QValueActor(
            mlp(OBSERVATION, ACTIONS), in_keys=["observation"], action_space="categorical"
        )
        loss = DQNLoss(actor, action_space="categorical", delay_value=True, double_dqn=True)
    elif name == "sac":
        loss = SACLoss(gaussian_actor(), state_action_value(), target_entropy=-2.0)
    elif name == "discrete_sac":
        critic = TensorDictModule(
            mlp(OBSERVATION, ACTIONS), in_keys=["observation"], out_keys=["action_value"]
        )
        loss = DiscreteSACLoss(
            categorical_actor(),
            qvalue_network=critic,
            num_actions=ACTIONS,
            action_space="categorical",
            target_entropy=1.0,
        )
    elif name == "td3":
        loss = TD3Loss(
            deterministic_actor(),
            state_action_value(),
            bounds=(-1.0, 1.0),
            policy_noise=0.0,
            delay_actor=True,
        )
    elif name == "ddpg":
        loss = DDPGLoss(
            deterministic_actor(), state_action_value(), delay_actor=True, delay_value=True
        )
    elif name == "ppo":
        loss = ClipPPOLoss(categorical_actor(), state_value(), normalize_advantage=False)
    else:
        loss = A2CLoss(categorical_actor(), state_value())
        loss.make_value_estimator(ValueEstimators.VTrace, gamma=0.9)
        return loss
    if name != "ppo":
        loss.make_value_estimator(gamma=0.9)
    return loss


def make_batch(name: str, rows: int, seed: int = 1) -> TensorDict:
    """Make ``[rows]`` transitions, or ``[rows, STEPS]`` if returns are computed over time."""
    random = torch.Generator().manual_seed(seed)
    shape = [rows, STEPS] if name in ("ppo", "a2c_vtrace") else [rows]

    def normal(*last: int) -> Tensor:
        return torch.randn(*shape, *last, generator=random)

    terminated = torch.rand(*shape, 1, generator=random) < 0.1
    following = TensorDict(
        {
            "observation": normal(OBSERVATION),
            "reward": normal(1),
            "terminated": terminated,
            "truncated": torch.zeros_like(terminated),
            "done": terminated.clone(),
        },
        shape,
    )
    batch = TensorDict({"observation": normal(OBSERVATION), "next": following}, shape)
    if name in ("sac", "td3", "ddpg"):
        batch["action"] = torch.tanh(normal(ACTION))
    else:
        batch["action"] = torch.randint(ACTIONS, shape, generator=random)
    if name in ("ppo", "a2c_vtrace"):
        batch["action_log_prob"] = -1.1 + 0.1 * normal()
    if name == "ppo":
        batch["advantage"], batch["value_target"] = normal(1), normal(1)
    return batch


def total(losses: TensorDict) -> Tensor:
    return sum(losses[key] for key in losses.keys() if key.startswith("loss_") or key == "loss")


def gradients(loss: LossModule) -> dict[str, Tensor]:
    """Copy the gradients, without parameters that have none."""
    return {n: p.grad.clone() for n, p in loss.named_parameters() if p.grad is not None}
