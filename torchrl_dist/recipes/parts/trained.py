"""A trained policy of a recipe, for use from Python."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import torch
from tensordict.nn import InteractionType, TensorDictModule
from torch import Tensor, nn
from torch.distributions import Categorical
from torchrl.envs.utils import exploration_type

from ...errors import ConfigurationError
from .networks import PolicySpec, saved_policy
from .policies import Squashed


class TrainedPolicy(TensorDictModule):
    """The policy of a checkpoint, see :func:`~torchrl_dist.load_policy`.

    Reads ``observation`` ``[..., *observation.shape]`` and writes ``action`` ``[...]`` (int64) or
    ``[..., A]`` (float32, within the bounds). It acts greedily, except under
    ``set_interaction_type(InteractionType.RANDOM)``; see :meth:`predict`.

    Attributes:
        env: the environment that it was trained in: a gymnasium id or ``package.module:make``.
        observation_shape: the shape of one observation.
    """

    def __init__(self, policy: PolicySpec, network: Any) -> None:
        super().__init__(_Act(network, policy.kind), ["observation"], ["action"])
        self.env = policy.env
        images = policy.images
        self.observation_shape = (policy.observation_size,) if images is None else images.shape
        self.eval().requires_grad_(False)

    def predict(self, observation: Any, *, explore: bool = False) -> np.ndarray:
        """Return the actions for observations, with or without batch dimensions.

        Args:
            observation: an array or tensor ``[..., *observation_shape]``, as from the environment.
            explore: draw actions from the policy's distribution, with torch's random generator.

        Returns:
            int64 ``[...]``, or float32 ``[..., A]`` for continuous actions.

        Raises:
            ConfigurationError: the observations have another shape, or ``explore`` is set but the
                policy consists of action values (Ape-X) and has no distribution.
        """
        rows = torch.as_tensor(np.asarray(observation), device=next(self.parameters()).device)
        shape = self.observation_shape
        if rows.ndim < len(shape) or tuple(rows.shape[rows.ndim - len(shape) :]) != shape:
            raise ConfigurationError(
                f"got observations of shape {list(rows.shape)}, expected {list(shape)}, with or "
                f"without leading batch dimensions; pass them as {self.env} returns them"
            )
        return self.module.act(rows, explore).cpu().numpy()


class _Act(nn.Module):
    def __init__(self, network: Any, kind: str) -> None:
        super().__init__()
        self.network, self.kind = network, kind

    def forward(self, observation: Tensor) -> Tensor:
        return self.act(observation, exploration_type() is InteractionType.RANDOM)

    @torch.no_grad()
    def act(self, observation: Tensor, explore: bool) -> Tensor:
        if not explore:
            return self.network.greedy(observation)
        if self.kind == "categorical":
            return Categorical(logits=self.network(observation)).sample()
        if self.kind == "squashed_gaussian":
            loc, scale = self.network(observation)
            return Squashed(loc, scale, self.network.low, self.network.high).sample()
        raise ConfigurationError(
            "this policy has action values and no distribution to draw from; use explore=False, or "
            "wrap it in torchrl.modules.EGreedyModule"
        )


def load_policy(path: str | os.PathLike[str]) -> TrainedPolicy:
    """Return the policy of a checkpoint that ``torchrl-dist train`` wrote. Runs no code in it.

        >>> policy = load_policy("runs/apex-CartPole-v1-seed0")  # doctest: +SKIP
        >>> policy.predict([0.0, 0.1, 0.0, -0.1])  # doctest: +SKIP
        array(0)

    Args:
        path: the checkpoint, or the folder of its run.

    Raises:
        CheckpointError: the checkpoint is missing or damaged, or has no policy of a recipe, or your
            own network (``--network``) cannot be imported here.
    """
    return TrainedPolicy(*saved_policy(path))
