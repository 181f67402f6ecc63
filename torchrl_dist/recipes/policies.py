"""Policies and critics as TorchRL's losses and collectors take them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tensordict.nn import InteractionType, TensorDictModule
from torch import Tensor, nn
from torch.distributions import Categorical
from torchrl.modules import ProbabilisticActor, TanhNormal, ValueOperator


def categorical_actor(network: nn.Module) -> ProbabilisticActor:
    """Draws int64 ``action`` ``[...]`` from the logits that ``network`` gives, and writes its
    ``action_log_prob``: what the acting policy thought of it travels with the data."""
    return ProbabilisticActor(
        TensorDictModule(network, ["observation"], ["logits"]),
        in_keys=["logits"],
        distribution_class=Categorical,
        return_log_prob=True,
        default_interaction_type=InteractionType.RANDOM,
    )


def critic_of(network: nn.Module) -> ValueOperator:
    """Writes ``state_value`` ``[..., 1]``."""
    return ValueOperator(network, in_keys=["observation"])


class _Squashed(TanhNormal):
    """TorchRL's, with bounds that follow the network to another device."""

    def __init__(self, loc: Tensor, scale: Tensor, low: Tensor, high: Tensor) -> None:
        bounds = {"low": low.to(loc.device), "high": high.to(loc.device)}
        super().__init__(loc, scale, tanh_loc=False, **bounds)


def squashed_gaussian_actor(
    network: nn.Module, low: Sequence[float], high: Sequence[float]
) -> ProbabilisticActor:
    """Draws float32 ``action`` ``[..., A]`` between the bounds from the location and scale that
    ``network`` gives."""
    return ProbabilisticActor(
        TensorDictModule(network, ["observation"], ["loc", "scale"]),
        in_keys=["loc", "scale"],
        distribution_class=_Squashed,
        distribution_kwargs={"low": torch.tensor(low), "high": torch.tensor(high)},
        default_interaction_type=InteractionType.RANDOM,
    )


def action_values_of(network: nn.Module) -> ValueOperator:
    """Writes ``state_action_value`` ``[..., 1]``."""
    return ValueOperator(network, in_keys=["observation", "action"])
