"""Losses of a policy over numbered actions and its critic, in plain PyTorch."""

from __future__ import annotations

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn
from torch.nn import functional
from torchrl.objectives import LossModule

from ...learn.reductions import computes_each_row


@computes_each_row
class A2CLoss(LossModule):
    """Policy gradient with a critic and an entropy bonus (Mnih et al. 2016, section 4).

    Losses and gradients are those of TorchRL's ``A2CLoss`` with squared errors, in about half the
    time.

    ``forward`` reads rows ``[B]`` and returns ``loss_objective``, ``loss_critic`` and
    ``loss_entropy``, each with its coefficient, and, without gradients, ``entropy`` in nats.

    Args:
        network: maps observations to logits ``[B, actions]``.
        critic: maps observations to values ``[B, 1]``.
    """

    entropy_coeff: Tensor
    critic_coeff: Tensor

    def __init__(
        self, network: nn.Module, critic: nn.Module, *, entropy_coef: float, critic_coef: float
    ) -> None:
        super().__init__()
        self.network, self.critic = network, critic
        self._set("entropy_coeff", entropy_coef)
        self._set("critic_coeff", critic_coef)

    def _set(self, name: str, value: float) -> None:
        """Keep a setting where the weights are. It is not saved: a resumed run has its own."""
        device = next(self.network.parameters()).device
        self.register_buffer(name, torch.tensor(value, device=device), persistent=False)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        observation = tensordict.get("observation")
        return self.of(self.network(observation), self.critic(observation), tensordict)

    def of(self, logits: Tensor, value: Tensor, tensordict: TensorDictBase) -> TensorDictBase:
        """Return the result of ``forward`` for outputs that were computed before."""
        logits = functional.log_softmax(logits, -1)
        log_prob = logits.gather(-1, tensordict.get("action").unsqueeze(-1))
        entropy = -(logits.exp() * logits).sum(-1).mean()
        error = functional.mse_loss(value, tensordict.get("value_target"))
        losses = {
            "loss_critic": self.critic_coeff * error,
            "loss_entropy": -self.entropy_coeff * entropy,
            "entropy": entropy.detach(),
        }
        losses |= self._objective(log_prob, tensordict)
        return TensorDict(losses)

    def _objective(self, log_prob: Tensor, tensordict: TensorDictBase) -> dict[str, Tensor]:
        return {"loss_objective": -(log_prob * tensordict.get("advantage")).mean()}


@computes_each_row
class PPOLoss(A2CLoss):
    """The clipped objective (Schulman et al. 2017, eq. 7), with critic and entropy bonus.

    Losses and gradients are those of TorchRL's ``ClipPPOLoss`` without its normalization of
    advantages. ``forward`` also returns ``kl_approx``, the mean of log mu - log pi, and
    ``clip_fraction``."""

    clip_epsilon: Tensor

    def __init__(self, network: nn.Module, critic: nn.Module, *, clip: float, **coefs: float):
        super().__init__(network, critic, **coefs)
        self._set("clip_epsilon", clip)

    def _objective(self, log_prob: Tensor, tensordict: TensorDictBase) -> dict[str, Tensor]:
        advantage = tensordict.get("advantage")
        change = log_prob - tensordict.get("action_log_prob").unsqueeze(-1)
        ratio = change.exp()
        clipped = ratio.clamp(1 - self.clip_epsilon, 1 + self.clip_epsilon)
        gain = torch.minimum(ratio * advantage, clipped * advantage)
        return {
            "loss_objective": -gain.mean(),
            "kl_approx": -change.detach().mean(),
            "clip_fraction": (clipped != ratio).to(torch.float32).mean(),
        }
