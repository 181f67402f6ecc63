"""Policies with lazy layers, whose parameters get their shapes from the first call."""

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
    """Give parameters without a shape those that they have with this env, before copies are made.

    An env is built here for that, and nothing of it is used but its specs. It is a copy of the
    policy that is called; of the policy itself nothing changes but what was lazy.

    Args:
        close: that env afterwards.
        options: of :func:`~torchrl_dist.collect.loop.rollout.make_rollout`.

    Raises:
        ConfigurationError: the call failed.
    """
    named = chain(policy.named_parameters(), policy.named_buffers())
    names = {name for name, tensor in named if is_lazy(tensor)}
    if not names:
        return
    try:
        called = copy.deepcopy(policy).to("cpu").eval()  # not with lazy buffers (torch 2.13)
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
            f"the policy has lazy layers ({sorted(names)}), and a call that should give them their "
            f"shapes raised {error!r}; run the policy once before it goes to the collector"
        ) from error
