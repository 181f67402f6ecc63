"""Policies and critics for TorchRL's losses and collectors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tensordict.nn import InteractionType, TensorDictModule
from torch import Tensor, nn
from torch.distributions import Categorical, Independent, Normal
from torchrl.modules import ProbabilisticActor, TanhNormal, ValueOperator

from ...errors import TorchRLDistError


def check_outputs(outputs: Tensor, env: str) -> None:
    """If a policy's network computed NaN, raise an error that names the environment."""
    if outputs.isnan().any():
        raise TorchRLDistError(
            f"the policy computed NaN for observations of {env}: the environment returned "
            "observations that are not finite; check what its step() and reset() return"
        )


class _Categorical(Categorical):
    """torch's categorical distribution, which refuses NaN among the logits."""

    def __init__(self, logits: Tensor, env: str) -> None:
        check_outputs(logits, env)
        super().__init__(logits=logits, validate_args=False)

    def sample_and_log_prob(self, sample_shape: Any = ()) -> tuple[Tensor, Tensor]:
        """Return actions and their log-probabilities, without the checks of ``log_prob``."""
        action = self.sample(sample_shape)
        return action, self.logits.gather(-1, action.unsqueeze(-1)).squeeze(-1)


def _actor(
    network: nn.Module, keys: list[str], distribution: type, kwargs: dict[str, Any], **options: Any
) -> ProbabilisticActor:
    return ProbabilisticActor(
        TensorDictModule(network, ["observation"], keys),
        in_keys=keys,
        distribution_class=distribution,
        distribution_kwargs=kwargs,
        default_interaction_type=InteractionType.RANDOM,
        **options,
    )


def categorical_actor(network: nn.Module, env: str = "the environment") -> ProbabilisticActor:
    """Return an actor that draws int64 ``action`` ``[...]`` from the logits of ``network``.

    The actor also writes ``action_log_prob``, so that the data contain the log-probability under
    the acting policy. Errors name ``env``."""
    return _actor(network, ["logits"], _Categorical, {"env": env}, return_log_prob=True)


class Gaussian(Independent):
    """A Gaussian with independent dimensions: actions and location ``[..., A]``, densities
    ``[...]``."""

    def __init__(self, loc: Tensor, scale: Tensor, env: str = "the environment") -> None:
        check_outputs(loc, env)
        super().__init__(Normal(loc, scale, validate_args=False), 1, validate_args=False)


def gaussian_actor(network: nn.Module, env: str = "the environment") -> ProbabilisticActor:
    """Return an actor that draws float32 ``action`` ``[..., A]``, without bounds.

    Like :func:`categorical_actor`, it also writes ``action_log_prob`` ``[...]``."""
    return _actor(network, ["loc", "scale"], Gaussian, {"env": env}, return_log_prob=True)


def critic_of(network: nn.Module) -> ValueOperator:
    """Return a critic that writes ``state_value`` ``[..., 1]``."""
    return ValueOperator(network, in_keys=["observation"])


class Squashed(TanhNormal):
    """TorchRL's ``TanhNormal``, but with the density of actions scaled to -1 .. 1.

    The bounds are moved to the device of the network's outputs. SAC adds the negative log-density
    to every step's reward. With the density of actions in the environment's units, SAC would also
    add the logarithm of the unit, and would therefore favour long or short episodes.
    """

    def __init__(self, loc: Tensor, scale: Tensor, low: Tensor, high: Tensor) -> None:
        bounds = {"low": low.to(loc.device), "high": high.to(loc.device)}
        super().__init__(loc, scale, tanh_loc=False, **bounds)
        self._of_unit = ((bounds["high"] - bounds["low"]) / 2).log().sum(-1)

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log-density [...]; ``value`` [..., A] is in the environment's units."""
        return super().log_prob(value) + self._of_unit

    def rsample_and_log_prob(self, sample_shape: Any = ()) -> tuple[Tensor, Tensor]:
        """Like TorchRL's method, return the action in the environment's units, and its
        log-density when scaled to -1 .. 1."""
        action, log_prob = super().rsample_and_log_prob(sample_shape)
        return action, log_prob + self._of_unit

    def sample_and_log_prob(self, sample_shape: Any = ()) -> tuple[Tensor, Tensor]:
        """Like :meth:`rsample_and_log_prob`, without gradients."""
        action, log_prob = super().sample_and_log_prob(sample_shape)
        return action, log_prob + self._of_unit


def squashed_gaussian_actor(
    network: nn.Module, low: Sequence[float], high: Sequence[float]
) -> ProbabilisticActor:
    """Return an actor that draws float32 ``action`` ``[..., A]`` between the bounds.

    ``network`` returns location and scale. Log-probabilities are those of actions scaled to
    -1 .. 1."""
    bounds = {"low": torch.tensor(low), "high": torch.tensor(high)}
    return _actor(network, ["loc", "scale"], Squashed, bounds)


def action_values_of(network: nn.Module) -> ValueOperator:
    """Return a critic that writes ``state_action_value`` ``[..., 1]``."""
    return ValueOperator(network, in_keys=["observation", "action"])
