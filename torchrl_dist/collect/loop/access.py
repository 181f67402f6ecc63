"""Access to attributes and methods of a worker's envs, for calls from the learner."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import gymnasium
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv, VectorEnv
from torchrl.envs import EnvBase

from torchrl_dist.collect.loop.drivers import is_vector_env
from torchrl_dist.errors import ConfigurationError


def visit(envs: Any, index: int | None, what: str, name: str, args: tuple, kwargs: dict) -> list:
    """Get or set an attribute of each env, or call a method of each env.

    Args:
        envs: a sequence of gymnasium envs, a vector env, a TorchRL env, or a sequence of these.
        index: the env's index; None means all envs.
        what: ``"get"``, ``"set"`` (to ``args[0]``) or ``"call"``.

    Returns:
        one result per env. A vector env or TorchRL env that has no separate envs inside gives a
        single result.

    Raises:
        ConfigurationError: ``index`` is given, but the envs cannot be accessed one by one.
        AttributeError: an env has no attribute of this name.
    """
    envs = _single(envs)
    if isinstance(envs, Sequence):
        if index is None:
            return [x for env in envs for x in visit(env, None, what, name, args, kwargs)]
        if not any(map(is_vector_env, envs)):
            return [_visit_one(envs[index], what, name, args, kwargs)]
    if index not in (None, 0) or (index == 0 and _size(envs) > 1):
        raise ConfigurationError(
            f"env={index} selects a single env, but the envs of {envs} cannot be accessed one by "
            "one; pass env=None to select all envs, or build the worker from single envs: let "
            "make_env return one env, and pass num_envs="
        )
    if isinstance(envs, AsyncVectorEnv):
        if what == "set":
            # one copy per env, because AsyncVectorEnv would divide a value that is a list among the
            # envs
            envs.set_attr(name, [args[0]] * envs.num_envs)
            return [None] * envs.num_envs
        return list(envs.call(name, *args, **kwargs) if what == "call" else envs.get_attr(name))
    return [_visit_one(envs, what, name, args, kwargs)]


def _single(envs: Any) -> Any:
    """Return the single envs that ``envs`` contains, in the order of their indices. A vector env or
    TorchRL env that contains no single envs stays as it is."""
    if isinstance(envs, SyncVectorEnv):
        return envs.envs
    if isinstance(envs, Sequence):
        parts = map(_single, envs)
        return [env for part in parts for env in (part if isinstance(part, Sequence) else [part])]
    return envs


def _size(envs: Sequence | VectorEnv | EnvBase | gymnasium.Env) -> int:
    if isinstance(envs, Sequence):
        return len(envs)
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
