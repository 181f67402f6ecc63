"""Policies and critics as TorchRL's losses and collectors take them."""

from __future__ import annotations

from tensordict.nn import InteractionType, TensorDictModule
from torch import nn
from torch.distributions import Categorical
from torchrl.modules import ProbabilisticActor, ValueOperator


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
