"""The learner's half of DQN: one gradient step on a batch of replay rows."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn
from torch.nn import functional
from torchrl.objectives import LossModule

from ...learn.reductions import computes_each_row
from ..parts.networks import QNetwork
from ..parts.targets import Follow, target_of


@computes_each_row
class DQNLoss(LossModule):
    """Double Q-learning of actions ``[B]`` that are numbered (van Hasselt et al. 2016, eq. 4).

    Losses and gradients are those of TorchRL's ``DQNLoss`` with ``double_dqn=True`` and smooth L1
    errors, in about half the time, because TorchRL's takes most of it outside of the networks.

    ``forward`` returns ``"loss"``, the mean error of the rows weighted by ``priority_weight``, and
    writes each row's |TD error|, float32 ``[B, 1]``, to ``"td_error"``. Rewards are sums over
    ``steps_to_next_obs`` steps.

    Args:
        network: its weights are trained and shared.
    """

    def __init__(self, network: QNetwork, gamma: float) -> None:
        super().__init__()
        self.gamma, self.reduction = gamma, "mean"
        self.network, self.target = network, target_of(network)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        after, steps = tensordict.get("next"), tensordict.get("steps_to_next_obs")
        with torch.no_grad():
            best = self.network(after.get("observation")).argmax(-1, keepdim=True)
            value = self.target(after.get("observation")).gather(-1, best)
            value = value * ~after.get("terminated")
            goal = after.get("reward") + self.gamma**steps * value
        values = self.network(tensordict.get("observation"))
        value = values.gather(-1, tensordict.get("action").unsqueeze(-1))
        tensordict.set("td_error", (goal - value.detach()).abs())
        error = functional.smooth_l1_loss(value, goal, reduction="none").squeeze(-1)
        loss = self._reduce_loss(error, weights=tensordict.get("priority_weight"))
        return TensorDict({"loss": loss})


class DQNLearner:
    """Double DQN with a target network that follows slowly.

    Args:
        loss: trains ``loss.network``, and reads ``loss.target``.
    """

    def __init__(
        self,
        loss: Any,
        *,
        learning_rate: float,
        target_tau: float,
        max_grad_norm: float,
    ) -> None:
        self.loss = loss
        self._weights = list(loss.network.parameters())
        self._follow = Follow(loss.target, loss.network, target_tau)
        # Fused, because a step then takes 0.1 ms, instead of 0.5 ms for the default's loop over
        # tensors.
        self._optimizer = torch.optim.Adam(self._weights, lr=learning_rate, fused=True)
        self._max_grad_norm = max_grad_norm

    def set_learning_rate(self, learning_rate: float) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate

    def update(self, batch: TensorDictBase) -> Tensor:
        """Take one step on ``batch`` ``[B]``, and return the loss.

        Writes each row's new priority to ``batch["td_error"]``, float32 ``[B, 1]``."""
        loss = self.loss(batch)["loss"]
        self._optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self._weights, self._max_grad_norm)
        self._optimizer.step()
        self._follow()
        return loss.detach()

    def state_dict(self) -> dict[str, Any]:
        """Return copies of the online and target weights and the optimizer's state."""
        # Copies, because an optimizer keeps the tensors of a state dict that it loads.
        return copy.deepcopy(
            {"model": dict(self.loss.state_dict()), "optimizer": self._optimizer.state_dict()}
        )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what :meth:`state_dict` returned."""
        self.loss.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])
