"""The loss of soft actor-critic, in plain PyTorch."""

from __future__ import annotations

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn
from torch.nn import functional
from torchrl.objectives import LossModule

from ..parts.networks import SquashedGaussianNetwork
from ..parts.targets import target_of


class SACLoss(LossModule):
    """Soft actor-critic with a learned temperature (Haarnoja et al. 2018, arXiv:1812.05905).

    Losses and gradients are those of TorchRL's ``SACLoss`` with squared errors, for actions whose
    density is that of actions scaled to -1 .. 1, in about two thirds of the time.

    ``forward`` reads rows ``[B]`` and returns ``loss_qvalue`` (eq. 5, summed over the critics),
    ``loss_actor`` (eq. 7), ``loss_alpha`` (eq. 18, for log alpha), and, without gradients,
    ``alpha`` and ``entropy``. Each loss has gradients only for its own weights.

    Args:
        network: the policy; its weights are trained and shared.
        critics: map observation and action to a value, float32 ``[B, 1]``.
        target_entropy: in nats.
    """

    def __init__(
        self,
        network: SquashedGaussianNetwork,
        critics: list[nn.Module],
        *,
        gamma: float,
        target_entropy: float,
    ) -> None:
        super().__init__()
        self.gamma, self.target_entropy = gamma, target_entropy
        self.network, self.critics = network, nn.ModuleList(critics)
        self.target = target_of(self.critics)
        device = next(network.parameters()).device
        self.log_alpha = nn.Parameter(torch.zeros((), device=device))

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        observation, after = tensordict.get("observation"), tensordict.get("next")
        alpha = self.log_alpha.detach().exp()
        with torch.no_grad():
            action, log_prob = self.network.drawn(after.get("observation"))
            value = self._least(self.target, after.get("observation"), action)
            value = (value - alpha * log_prob.unsqueeze(-1)) * ~after.get("terminated")
            goal = after.get("reward") + self.gamma * value
        loss_qvalue = sum(
            functional.mse_loss(critic(observation, tensordict.get("action")), goal)
            for critic in self.critics
        )
        action, log_prob = self.network.drawn(observation)
        self.critics.requires_grad_(False)
        value = self._least(self.critics, observation, action).squeeze(-1)
        self.critics.requires_grad_(True)
        entropy = -log_prob.detach().mean()
        return TensorDict(
            {
                "loss_qvalue": loss_qvalue,
                "loss_actor": (alpha * log_prob - value).mean(),
                "loss_alpha": self.log_alpha * (entropy - self.target_entropy),
                "alpha": alpha,
                "entropy": entropy,
            }
        )

    def _least(self, critics: nn.ModuleList, observation: Tensor, action: Tensor) -> Tensor:
        first, second = (critic(observation, action) for critic in critics)
        return torch.minimum(first, second)
