"""The same policy with less overhead per call, for a loop that calls it on small batches.

``TensorDictModule.__call__`` costs more than a small network does: argument dispatch and, for every
tensor that it writes where pandas is not installed, a search of the disk for pandas
(``TensorDictBase.from_any``, tensordict 0.14.3). Plain modules are therefore called directly.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import Tensor, nn

Policy = Callable[[TensorDictBase], Any]


def fast_policy(policy: Policy | None) -> Policy | None:
    """A callable that writes to a TensorDict what ``policy`` would, reading its current weights.

    What is not known to be plain (hooks, keyword inputs, an overridden ``forward``) is called as it
    is. The result has the policy's ``out_keys``.
    """
    if not isinstance(policy, TensorDictModule):
        return policy
    return FastPolicy(_calls(policy), list(policy.out_keys))


class FastPolicy:
    def __init__(self, calls: list[Policy], out_keys: list[Any]) -> None:
        self.calls = calls
        self.out_keys = out_keys

    def __call__(self, td: TensorDictBase) -> TensorDictBase:
        for call in self.calls:
            td = call(td)
        return td


def _calls(module: nn.Module) -> list[Policy]:
    if _has_hooks(module) or getattr(module, "inplace", None) not in (None, True):
        return [module]
    if isinstance(module, TensorDictSequential):
        plain = (
            type(module).forward is TensorDictSequential.forward
            and not module.partial_tolerant
            and not module._select_before_return
        )
        return [call for m in module._module_iter() for call in _calls(m)] if plain else [module]
    if (
        isinstance(module, TensorDictModule)
        and type(module).forward is TensorDictModule.forward
        and type(module)._call_module is TensorDictModule._call_module
        and type(module)._write_to_tensordict is TensorDictModule._write_to_tensordict
        and module._kwargs is None
        and not module._get_kwargs
        and module.method is None
        and not module.method_kwargs
        and "_" not in module.out_keys_source
    ):
        return [_direct(module)]
    return [module]


def _has_hooks(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)


def _direct(module: TensorDictModule) -> Policy:
    function, in_keys, out_keys = module.module, list(module.in_keys), module.out_keys_source
    write = module._write_to_tensordict

    def call(td: TensorDictBase) -> TensorDictBase:
        inputs = [td.get(key) for key in in_keys]
        if any(value is None for value in inputs):
            return module(td)  # its own error names what is missing
        out = function(*inputs)
        if isinstance(out, Tensor):
            out = (out,)
        elif isinstance(out, (dict, TensorDictBase)) and all(key in out for key in out_keys):
            out = tuple(out.get(key) for key in out_keys)
        elif not isinstance(out, tuple):
            out = () if out is None else (out,)
        if len(out) != len(out_keys) or not all(isinstance(value, Tensor) for value in out):
            return write(td, out, td)
        for key, value in zip(out_keys, out, strict=True):
            td.set(key, value)
        return td

    return call
