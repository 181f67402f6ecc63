"""A trained policy of a recipe, for use from Python."""

from __future__ import annotations

import os
from collections.abc import Sequence
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

    Reads ``observation`` ``[..., *observation_shape]`` and writes ``action`` ``[...]`` (int64) or
    ``[..., A]`` (float32, within the bounds). It acts greedily, except under
    ``set_interaction_type(InteractionType.RANDOM)``; see ``predict``.

    A policy with a memory (R2D2) also reads the states of its LSTM and writes the next ones, with
    the keys and shapes of TorchRL's LSTMModule, so collectors carry the states from step to step.
    ``predict`` itself carries them from call to call, until ``reset()``.

    Attributes:
        env: the gymnasium id of the environment that the policy was trained in, or
            ``package.module:make``.
        observation_shape: the shape of one observation.
    """

    def __init__(self, policy: PolicySpec, network: Any) -> None:
        states = [HIDDEN, CELL] if policy.state_size else []
        images = policy.images
        shape = (policy.observation_size,) if images is None else images.shape
        super().__init__(
            _ActWithMemory(network, shape) if states else _Act(network, shape, policy.kind),
            ["observation", *states],
            ["action", *(("next", state) for state in states)],
        )
        # the batch dimensions and the state of the current episodes, if the policy has a memory
        self._episodes: tuple[torch.Size, State] | None = None
        self.env = policy.env
        self.observation_shape = shape
        self.eval().requires_grad_(False)

    def predict(self, observation: Any, *, explore: bool = False) -> np.ndarray:
        """Return the actions for observations, with or without batch dimensions.

        Args:
            observation: an array or tensor ``[..., *observation_shape]``, as from the environment.
            explore: draw actions from the policy's distribution, with torch's random generator.

        Returns:
            int64 ``[...]``, or float32 ``[..., A]`` for continuous actions.

        Raises:
            ConfigurationError: the observations have another shape or type, or contain NaN or
                infinity. With ``explore``: the policy has action values (Ape-X, R2D2) and no
                distribution. If the policy has a memory: the batch dimensions changed without
                ``reset()``."""
        array, shape = _numbers(observation), self.observation_shape
        rows = torch.as_tensor(array, device=next(self.parameters()).device)
        if rows.ndim < len(shape) or tuple(rows.shape[rows.ndim - len(shape) :]) != shape:
            raise ConfigurationError(
                f"got observations of shape {list(rows.shape)}, expected {list(shape)}, with or "
                f"without leading batch dimensions; pass them as {self.env} returns them, and "
                "flattened by gymnasium.wrappers.FlattenObservation if its space is not a Box"
            )
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            raise ConfigurationError(
                "got observations with NaN or infinity, expected finite numbers; check what the "
                "environment and its wrappers return"
            )
        _check_images(rows, shape)
        if isinstance(self.module, _Act):
            return self.module.act(rows, explore).cpu().numpy()
        if explore:
            raise _no_distribution()
        batch = rows.shape[: rows.ndim - len(shape)]
        before, state = self._episodes or (batch, None)
        if batch != before:
            raise ConfigurationError(
                f"got observations with batch dimensions {list(batch)}, but the last call had "
                f"{list(before)}, and the policy remembers the episodes of that call; call reset() "
                "before you begin other episodes"
            )
        action, state = self.module.network.act(rows, state)
        self._episodes = batch, state
        return action.cpu().numpy()

    def reset(self) -> None:
        """Forget the episodes so far, so that the next call of ``predict`` begins new ones.

        Call this method whenever you reset the environments. Policies without a memory ignore
        it."""
        self._episodes = None


class _Act(nn.Module):
    def __init__(self, network: Any, shape: Sequence[int], kind: str) -> None:
        super().__init__()
        self.network, self.shape, self.kind = network, shape, kind

    def forward(self, observation: Tensor) -> Tensor:
        _check_images(observation, self.shape)
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
            return self.network.bounded(Gaussian(*self.network(observation)).sample())
        raise _no_distribution()


class _ActWithMemory(nn.Module):
    def __init__(self, network: RecurrentQNetwork, shape: Sequence[int]) -> None:
        super().__init__()
        self.network, self.shape = network, shape

    def forward(
        self, observation: Tensor, hidden: Tensor, cell: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        if exploration_type() is InteractionType.RANDOM:
            raise _no_distribution()
        _check_images(observation, self.shape)
        shape = hidden.shape  # [..., 1, size]
        state = (_of_lstm(hidden), _of_lstm(cell))
        action, (hidden, cell) = self.network.act(observation, state)
        return action, hidden.transpose(0, 1).reshape(shape), cell.transpose(0, 1).reshape(shape)


def _numbers(observation: Any) -> np.ndarray:
    """Return the observations as an array, after checking its type."""
    if isinstance(observation, Tensor):
        observation = observation.detach().cpu()
    try:
        array = np.asarray(observation)
        kind = f"type {array.dtype}"
    except ValueError:  # lists of different lengths
        array, kind = np.empty(0, object), "different shapes"
    if array.dtype.kind not in "biuf":
        raise ConfigurationError(
            f"got observations of {kind}, expected an array of numbers; pass an array or a tensor"
        )
    return array


def _check_images(observation: Tensor, shape: Sequence[int]) -> None:
    """Refuse floating-point images, because their values are usually between 0 and 1."""
    if len(shape) == 3 and observation.is_floating_point():
        raise ConfigurationError(
            f"got images of type {str(observation.dtype).removeprefix('torch.')}, expected uint8, "
            "which the policy itself scales to 0 .. 1; pass the images as the environment returns "
            "them"
        )


def _no_distribution() -> ConfigurationError:
    return ConfigurationError(
        "this policy has action values and no distribution to draw from; use explore=False, or "
        "wrap the policy in torchrl.modules.EGreedyModule"
    )


def _of_lstm(state: Tensor) -> Tensor:
    """Return a state ``[..., 1, size]`` as an LSTM takes it, ``[1, N, size]``."""
    return state.reshape(-1, *state.shape[-2:]).transpose(0, 1).contiguous()


def load_policy(path: str | os.PathLike[str]) -> TrainedPolicy:
    """Return the policy of a checkpoint that ``torchrl-dist train`` wrote. Runs no code that the
    checkpoint contains.

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
