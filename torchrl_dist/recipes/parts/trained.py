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
from .networks import CELL, HIDDEN, PolicySpec, RecurrentQNetwork, State, saved_policy
from .policies import Gaussian, Squashed


class TrainedPolicy(TensorDictModule):
    """The policy of a checkpoint, see :func:`~torchrl_dist.load_policy`.

    Reads ``observation`` ``[..., *observation.shape]`` and writes ``action`` ``[...]`` (int64) or
    ``[..., A]`` (float32, within the bounds). It acts greedily, except under
    ``set_interaction_type(InteractionType.RANDOM)``; see ``predict``.

    A policy with a memory (R2D2) also reads the states of its LSTM and writes the next ones, with
    the keys and shapes of TorchRL's LSTMModule, so collectors carry them. ``predict`` carries them
    itself, from call to call, until ``reset()``.

    Attributes:
        env: the environment that it was trained in: a gymnasium id or ``package.module:make``.
        observation_shape: the shape of one observation.
    """

    def __init__(self, policy: PolicySpec, network: Any) -> None:
        states = [HIDDEN, CELL] if policy.state_size else []
        super().__init__(
            _ActWithMemory(network) if states else _Act(network, policy.kind),
            ["observation", *states],
            ["action", *(("next", state) for state in states)],
        )
        self._episodes: tuple[torch.Size, State] | None = None  # of a policy with a memory
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
                policy consists of action values (Ape-X, R2D2) and has no distribution. For a policy
                with a memory also if the batch dimensions changed without ``reset()``.
        """
        rows = torch.as_tensor(np.asarray(observation), device=next(self.parameters()).device)
        shape = self.observation_shape
        if rows.ndim < len(shape) or tuple(rows.shape[rows.ndim - len(shape) :]) != shape:
            raise ConfigurationError(
                f"got observations of shape {list(rows.shape)}, expected {list(shape)}, with or "
                f"without leading batch dimensions; pass them as {self.env} returns them"
            )
        if isinstance(self.module, _Act):
            return self.module.act(rows, explore).cpu().numpy()
        if explore:
            raise _no_distribution()
        batch = rows.shape[: rows.ndim - len(shape)]
        before, state = self._episodes or (batch, None)
        if batch != before:
            raise ConfigurationError(
                f"got observations with batch dimensions {list(batch)}, but the last call had "
                f"{list(before)}, whose episodes the policy remembers; call reset() before you "
                "begin other episodes"
            )
        action, state = self.module.network.act(rows, state)
        self._episodes = batch, state
        return action.cpu().numpy()

    def reset(self) -> None:
        """Forget the episodes so far, so that the next call of ``predict`` begins new ones.

        Call it whenever you reset the environments. Policies without a memory ignore it."""
        self._episodes = None


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
        if self.kind == "gaussian":
            return self.network.clipped(Gaussian(*self.network(observation)).sample())
        raise _no_distribution()


class _ActWithMemory(nn.Module):
    def __init__(self, network: RecurrentQNetwork) -> None:
        super().__init__()
        self.network = network

    def forward(
        self, observation: Tensor, hidden: Tensor, cell: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        if exploration_type() is InteractionType.RANDOM:
            raise _no_distribution()
        shape = hidden.shape  # [..., 1, size]
        state = (_of_lstm(hidden), _of_lstm(cell))
        action, (hidden, cell) = self.network.act(observation, state)
        return action, hidden.transpose(0, 1).reshape(shape), cell.transpose(0, 1).reshape(shape)


def _no_distribution() -> ConfigurationError:
    return ConfigurationError(
        "this policy has action values and no distribution to draw from; use explore=False, or "
        "wrap it in torchrl.modules.EGreedyModule"
    )


def _of_lstm(state: Tensor) -> Tensor:
    """Return a state ``[..., 1, size]`` as an LSTM takes it, ``[1, N, size]``."""
    return state.reshape(-1, *state.shape[-2:]).transpose(0, 1).contiguous()


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
