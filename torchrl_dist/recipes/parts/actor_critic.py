"""Losses of a policy and its critic, in plain PyTorch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypeAlias

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn
from torch.nn import functional
from torchrl.objectives import LossModule

from ...learn.reductions import computes_each_row

Rows: TypeAlias = "TensorDictBase | Mapping[str, Tensor]"


@computes_each_row
class A2CLoss(LossModule):
    """Policy gradient with a critic and an entropy bonus (Mnih et al. 2016, section 4).

    Losses and gradients are those of TorchRL's ``A2CLoss`` with squared errors. Computing them
    takes about half of the time that TorchRL's loss takes.

    ``forward`` reads rows ``[B]``, and returns ``loss_objective``, ``loss_critic`` and
    ``loss_entropy``. The last two are multiplied by their coefficients. It also returns
    ``entropy`` in nats, detached from the graph.

    Args:
        network: maps observations to logits ``[B, actions]`` of discrete actions.
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
        """Keep a setting as a tensor on the weights' device. State dicts leave it out, because a
        resumed run uses its own setting."""
        device = next(self.network.parameters()).device
        self.register_buffer(name, torch.tensor(value, device=device), persistent=False)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        observation = tensordict.get("observation")
        return TensorDict(self.of(self.network(observation), self.critic(observation), tensordict))

    def of(self, outputs: Any, value: Tensor, rows: Rows) -> dict[str, Tensor]:
        """Return the result of ``forward`` for outputs of ``network`` and ``critic`` that have
        already been computed."""
        log_prob, entropy = self._log_prob_and_entropy(outputs, rows["action"])
        entropy = entropy.mean()
        losses = {
            "loss_critic": self.critic_coeff * self._error(value, rows),
            "loss_entropy": -self.entropy_coeff * entropy,
            "entropy": entropy.detach(),
        }
        losses |= self._objective(log_prob, rows)
        return losses

    def _log_prob_and_entropy(self, outputs: Any, action: Tensor) -> tuple[Tensor, Tensor]:
        """Return the log-probabilities ``[B, 1]`` of actions, and the entropies ``[B]``."""
        logits = functional.log_softmax(outputs, -1)
        return logits.gather(-1, action.unsqueeze(-1)), -(logits.exp() * logits).sum(-1)

    def _error(self, value: Tensor, rows: Rows) -> Tensor:
        """Return the critic's mean squared error."""
        return functional.mse_loss(value, rows["value_target"])

    def _objective(self, log_prob: Tensor, rows: Rows) -> dict[str, Tensor]:
        return {"loss_objective": -(log_prob * rows["advantage"]).mean()}


@computes_each_row
class PPOLoss(A2CLoss):
    """The clipped objective (Schulman et al. 2017, eq. 7), with critic and entropy bonus.

    Losses and gradients are those of TorchRL's ``ClipPPOLoss`` without its normalization of
    advantages. ``forward`` also returns ``kl_approx``, the mean of log mu - log pi, and
    ``clip_fraction``.

    Args:
        clip_value: whether to also compute the critic's error for values clipped to within ``clip``
            of the rows' ``state_value`` ``[B, 1]``. Each row then counts with the larger of the two
            errors, as in OpenAI's Baselines and CleanRL."""

    clip_epsilon: Tensor

    def __init__(
        self,
        network: nn.Module,
        critic: nn.Module,
        *,
        clip: float,
        clip_value: bool = False,
        **coefs: float,
    ) -> None:
        super().__init__(network, critic, **coefs)
        self._set("clip_epsilon", clip)
        self.clip_value = clip_value

    def _error(self, value: Tensor, rows: Rows) -> Tensor:
        if not self.clip_value:
            return super()._error(value, rows)
        before, target = rows["state_value"], rows["value_target"]
        near = before + (value - before).clamp(-self.clip_epsilon, self.clip_epsilon)
        return torch.maximum((value - target).square(), (near - target).square()).mean()

    def _objective(self, log_prob: Tensor, rows: Rows) -> dict[str, Tensor]:
        advantage = rows["advantage"]
        change = log_prob - rows["action_log_prob"].unsqueeze(-1)
        ratio = change.exp()
        clipped = ratio.clamp(1 - self.clip_epsilon, 1 + self.clip_epsilon)
        gain = torch.minimum(ratio * advantage, clipped * advantage)
        return {
            "loss_objective": -gain.mean(),
            "kl_approx": -change.detach().mean(),
            "clip_fraction": (clipped != ratio).to(torch.float32).mean(),
        }


@computes_each_row
class GaussianPPOLoss(PPOLoss):
    """The loss for actions ``[B, A]``, where ``network`` maps observations to the location and the
    scale ``[B, A]`` of a Gaussian."""

    def _log_prob_and_entropy(self, outputs: Any, action: Tensor) -> tuple[Tensor, Tensor]:
        location, scale = outputs
        log_scale = scale.log()
        deviation = (action - location) / scale
        log_prob = -deviation.square() / 2 - log_scale - math.log(2 * math.pi) / 2
        entropy = log_scale + (1 + math.log(2 * math.pi)) / 2
        return log_prob.sum(-1, keepdim=True), entropy.sum(-1)
