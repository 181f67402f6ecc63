"""The state that a recurrent policy carries from one step to the next."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torchrl.envs import EnvBase, InitTracker
from torchrl.modules import OrnsteinUhlenbeckProcessModule
from torchrl.modules.utils import get_primers_from_module

from torchrl_dist.collect.loop.spaces import Key, join_key, plain_key
from torchrl_dist.errors import ConfigurationError

IS_INIT = "is_init"


def carried_state(policy: Any, num_envs: int) -> dict[Key, Tensor]:
    """Return the policy's state at the start of ``num_envs`` episodes, by key.

    The state consists of the values that the policy reads at a key and writes at ``("next", key)``,
    as TorchRL's LSTMModule and GRUModule do. If the policy reads ``"is_init"``, as
    Ornstein-Uhlenbeck noise does, the state also has this key, with True for every env (bool
    ``[num_envs, 1]``). If the policy does neither, the state is empty.

    Raises:
        ConfigurationError: the policy has a state, but no module of the policy defines the state of
            a new episode.
    """
    reads = {plain_key(key) for key in getattr(policy, "in_keys", ())}
    writes = {plain_key(key) for key in getattr(policy, "out_keys", ())}
    keys = [key for key in reads if join_key("next", key) in writes]
    specs = {
        plain_key(key): spec
        for primer in (_primers(policy) if keys else ())
        for key, spec in primer.primers.items(True, True)
    }
    state: dict[Key, Tensor] = {k: specs[k].zero((num_envs,)) for k in keys if k in specs}
    if missing := [key for key in keys if key not in state]:
        raise ConfigurationError(
            f"the policy reads the keys {missing} and writes the next values of these keys, but "
            "none of its modules has make_tensordict_primer(), which gives the values at the "
            "start of an episode; add this method to a module"
        )
    noises = [m for m in _modules(policy) if isinstance(m, OrnsteinUhlenbeckProcessModule)]
    if IS_INIT in reads or any(noise.is_init_key == IS_INIT for noise in noises):
        state[IS_INIT] = torch.ones(num_envs, 1, dtype=torch.bool)
    return state


def with_state_of(policy: Any, env: EnvBase) -> EnvBase:
    """Return a TorchRL env that writes the policy's state at the start of each episode.

    If ``env`` does not write a key that the policy reads, this function appends the transform that
    writes the key: ``InitTracker``, or a primer of one of the policy's modules.
    """
    specs = (env.full_observation_spec, env.full_state_spec)
    has = {plain_key(key) for spec in specs for key in spec.keys(True, True)}
    missing = {plain_key(key) for key in getattr(policy, "in_keys", ())} - has
    if IS_INIT in missing:
        env = env.append_transform(InitTracker())
    for primer in _primers(policy) if missing else ():
        if missing & {plain_key(key) for key in primer.primers.keys(True, True)}:
            env = env.append_transform(primer)
    return env


def _modules(policy: Any) -> list[nn.Module]:
    return list(policy.modules()) if isinstance(policy, nn.Module) else []


def _primers(policy: Any) -> list[Any]:
    """Return the transforms that write the policy's state at the start of an episode."""
    if not isinstance(policy, nn.Module):
        return []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # ignores the warning about a missing primer
        primer: Any = get_primers_from_module(policy)
    return [] if primer is None else list(getattr(primer, "transforms", [primer]))
