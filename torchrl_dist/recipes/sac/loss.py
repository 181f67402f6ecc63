"""The losses of soft actor-critic, in plain PyTorch."""

from __future__ import annotations

from abc import abstractmethod

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn
from torch.nn import functional
from torchrl.objectives import LossModule

from ..parts.moments import moments_of
from ..parts.networks import SquashedGaussianNetwork
from ..parts.targets import target_of


class SoftActorCritic(LossModule):
    """Soft actor-critic with a learned temperature, for continuous or discrete actions.

    ``forward`` reads rows ``[B]`` and returns ``loss_qvalue`` (summed over the critics),
    ``loss_actor``, ``loss_alpha`` (for log alpha), and, without gradients, ``alpha`` and
    ``entropy``. Each loss has gradients only for its own weights.

    Args:
        network: the policy. The loss trains this module itself, not a copy. If the policy
            normalizes observations, the critics get normalized observations, too.
        critics: two networks that estimate values of actions.
        target_entropy: in nats.
    """

    def __init__(
        self,
        network: nn.Module,
        critics: list[nn.Module],
        *,
        gamma: float,
        target_entropy: float,
    ) -> None:
        super().__init__()
        self.gamma, self.target_entropy = gamma, target_entropy
        self.network, self.critics = network, nn.ModuleList(critics)
        self.target = target_of(self.critics)
        self._moments = moments_of(network)
        device = next(network.parameters()).device
        self.log_alpha = nn.Parameter(torch.zeros((), device=device))

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        observation, after = tensordict.get("observation"), tensordict.get("next")
        seen = self._seen(observation)
        alpha = self.log_alpha.detach().exp()
        with torch.no_grad():
            value, entropy = self._expected(self.target, after.get("observation"))
            value = (value + alpha * entropy).unsqueeze(-1) * ~after.get("terminated")
            goal = after.get("reward") + self.gamma * value
        loss_qvalue = sum(
            functional.mse_loss(self._value(critic, seen, tensordict.get("action")), goal)
            for critic in self.critics
        )
        self.critics.requires_grad_(False)
        value, entropy = self._expected(self.critics, observation)
        self.critics.requires_grad_(True)
        loss_actor = -(value + alpha * entropy).mean()
        entropy = entropy.detach().mean()
        return TensorDict(
            {
                "loss_qvalue": loss_qvalue,
                "loss_actor": loss_actor,
                "loss_alpha": self.log_alpha * (entropy - self.target_entropy),
                "alpha": alpha,
                "entropy": entropy,
            }
        )

    def _seen(self, observation: Tensor) -> Tensor:
        """Return observations as the critics see them."""
        return observation if self._moments is None else self._moments(observation)

    @abstractmethod
    def _value(self, critic: nn.Module, seen: Tensor, action: Tensor) -> Tensor:
        """Return the values that ``critic`` estimates for the actions, float32 ``[B, 1]``."""

    @abstractmethod
    def _expected(self, critics: nn.ModuleList, observation: Tensor) -> tuple[Tensor, Tensor]:
        """Return two expectations under the policy, ``[B]`` each: the lower of the two critics'
        values, and the entropy.

        Both expectations may be estimated from one action."""


class SACLoss(SoftActorCritic):
    """The loss for continuous actions (Haarnoja et al. 2018, arXiv:1812.05905, eqs. 5, 7 and 18).

    Losses and gradients are those of TorchRL's ``SACLoss`` with squared errors and with densities
    of actions scaled to -1 .. 1. Computing them takes about two thirds of the time
    that TorchRL's loss takes.

    Args:
        network: a :class:`SquashedGaussianNetwork`.
        critics: map observation and action to a value, float32 ``[B, 1]``.
    """

    network: SquashedGaussianNetwork

    def _value(self, critic: nn.Module, seen: Tensor, action: Tensor) -> Tensor:
        return critic(seen, action)

    def _expected(self, critics: nn.ModuleList, observation: Tensor) -> tuple[Tensor, Tensor]:
        action, log_prob = self.network.drawn(observation)
        seen = self._seen(observation)
        first, second = (critic(seen, action) for critic in critics)
        return torch.minimum(first, second).squeeze(-1), -log_prob


class DiscreteSACLoss(SoftActorCritic):
    """The loss for discrete actions (Christodoulou 2019, arXiv:1910.07207, eqs. 10 to 12).

    Expectations are exact, because they are sums over all actions. Losses and gradients are
    those of TorchRL's ``DiscreteSACLoss`` with squared errors. Actions are int64 ``[B]`` or
    ``[B, 1]``.

    Args:
        network: maps observations to logits, float32 ``[B, num_actions]``.
        critics: map observations to a value per action, float32 ``[B, num_actions]``.
    """

    def _value(self, critic: nn.Module, seen: Tensor, action: Tensor) -> Tensor:
        values = critic(seen)
        return values.gather(-1, action.reshape(len(values), 1))

    def _expected(self, critics: nn.ModuleList, observation: Tensor) -> tuple[Tensor, Tensor]:
        log_prob = self.network(observation).log_softmax(-1)
        prob = log_prob.exp()
        with torch.no_grad():  # the values do not depend on the policy
            seen = self._seen(observation)
            least = torch.minimum(*(critic(seen) for critic in critics))
        return (prob * least).sum(-1), -(prob * log_prob).sum(-1)
