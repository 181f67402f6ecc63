"""Initialize policies with lazy layers, whose parameters get their shapes in the first call."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from torchrl_dist.collect.loop.rollout import make_rollout
from torchrl_dist.errors import ConfigurationError


def initialize(
    policy: nn.Module, make_env: str | Callable[[], Any], *, close: bool, **options: Any
) -> None:
    """Give lazy parameters their shapes and values, before copies of the policy are made.

    This function builds an env, because the policy's inputs follow from the env's specs, and calls
    a copy of the policy. In the policy itself, only lazy parameters and buffers change.

    Args:
        close: whether to close the env afterwards.
        options: arguments of :func:`~torchrl_dist.collect.loop.rollout.make_rollout`.

    Raises:
        ConfigurationError: the env could not be built, or the call of the policy failed.
    """
    named = chain(policy.named_parameters(), policy.named_buffers())
    names = {name for name, tensor in named if is_lazy(tensor)}
    if not names:
        return
    try:
        # deepcopy raises for lazy buffers (torch 2.13)
        called = copy.deepcopy(policy).to("cpu").eval()
        rollout = make_rollout(make_env, called, **options)
        try:
            with torch.no_grad():
                rollout.call_policy_once()
        finally:
            if close:
                rollout.close()
        shaped = {key: value for key, value in called.state_dict().items() if key in names}
        policy.load_state_dict(shaped, strict=False)
    except Exception as error:
        raise ConfigurationError(
            f"the policy has lazy parameters ({sorted(names)}), and the call that should give "
            f"shapes to these parameters raised {error!r}; call the policy once before you pass "
            "the policy to the collector"
        ) from error
