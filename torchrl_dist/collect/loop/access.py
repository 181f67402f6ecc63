"""Access to attributes and methods of a worker's envs, for calls from the learner."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import gymnasium
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv, VectorEnv
from torchrl.envs import EnvBase

from torchrl_dist.errors import ConfigurationError


def visit(envs: Any, index: int | None, what: str, name: str, args: tuple, kwargs: dict) -> list:
    """Get or set an attribute of envs, or call a method.

    Args:
        envs: a sequence of gymnasium envs, a vector env, or a TorchRL env.
        index: the env's index; None: all envs.
        what: ``"get"``, ``"set"`` (to ``args[0]``) or ``"call"``.

    Returns:
        one result per env. A vector env or TorchRL env without separate envs inside gives a single
        result.

    Raises:
        ConfigurationError: ``index`` is given, but the envs cannot be accessed one by one.
        AttributeError: an env has no attribute of this name.
    """
    if isinstance(envs, SyncVectorEnv):
        envs = envs.envs
    if isinstance(envs, Sequence):
        chosen = envs if index is None else [envs[index]]
        return [_visit_one(env, what, name, args, kwargs) for env in chosen]
    if index not in (None, 0) or (index == 0 and _size(envs) > 1):
        raise ConfigurationError(
            f"{envs} does not give access to one of its envs; choose all (env=None), or build the "
            "worker from single envs (make_env returns one env; pass num_envs=...)"
        )
    if isinstance(envs, AsyncVectorEnv):
        if what == "set":
            # AsyncVectorEnv would divide a value that is a list among the envs
            envs.set_attr(name, [args[0]] * envs.num_envs)
            return [None] * envs.num_envs
        return list(envs.call(name, *args, **kwargs) if what == "call" else envs.get_attr(name))
    return [_visit_one(envs, what, name, args, kwargs)]


def _size(envs: VectorEnv | EnvBase | gymnasium.Env) -> int:
    if isinstance(envs, gymnasium.Env):
        return envs.get_wrapper_attr("num_envs")
    return envs.num_envs if isinstance(envs, VectorEnv) else envs.batch_size.numel()


def _visit_one(env: Any, what: str, name: str, args: tuple, kwargs: dict) -> Any:
    single = isinstance(env, gymnasium.Env)
    if what == "set":
        if single and hasattr(env, "set_wrapper_attr"):
            env.set_wrapper_attr(name, args[0])
        else:
            setattr(getattr(env, "unwrapped", env), name, args[0])
        return None
    found: Callable | Any = env.get_wrapper_attr(name) if single else getattr(env, name)
    return found(*args, **kwargs) if what == "call" else found
