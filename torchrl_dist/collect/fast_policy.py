"""The same policy with less overhead per call, for a loop that calls it on small batches.

``TensorDictModule.__call__`` costs more than a small network does: argument dispatch and, for every
tensor that it writes where pandas is not installed, a search of the disk for pandas
(``TensorDictBase.from_any``, tensordict 0.14.3). Plain modules are therefore called directly.
``nn.Module.__call__`` looks for hooks, which costs a third of the time of two small layers; torch's
own layers are therefore given a class whose call is ``forward``, until a hook is registered. That
of ``nn.Linear`` finds its parameters at once, where an attribute of a module is a search. A policy
with code that may ask for the class of a layer keeps its layers as they are.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import CodeType
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import Tensor, nn

Policy = Callable[[TensorDictBase], Any]
Key = str | tuple[str, ...]


def fast_policy(policy: Policy | None) -> Policy | None:
    """A callable that writes to a TensorDict what ``policy`` would, reading its current weights.

    What is not known to be plain (hooks, keyword inputs, an overridden ``forward``) is called as it
    is. The result has the policy's ``out_keys``. Torch's own layers change their class to one of
    the same name that derives from it, unless a method of somebody's own module in ``policy`` names
    ``type`` or ``__class__``; their copies and pickles have the class they had.
    """
    if not isinstance(policy, TensorDictModule):
        return policy
    if not any(_may_ask_for_a_class(type(module)) for module in policy.modules()):
        for layer in policy.modules():
            _call_directly(layer)
    return FastPolicy(_calls(policy), list(policy.in_keys), list(policy.out_keys), policy)


class FastPolicy:
    """A chain of calls on one TensorDict.

    Attributes:
        in_keys, out_keys: as the policy's.
        module_of_user: the policy.
        plain: the chain needs no TensorDict; then ``on_tensors`` may be used as well.
    """

    def __init__(
        self,
        calls: list[Policy],
        in_keys: list[Key],
        out_keys: list[Key],
        module_of_user: TensorDictModule,
    ) -> None:
        self.module_of_user = module_of_user
        self.in_keys = in_keys
        self.out_keys = out_keys
        self.plain = all(isinstance(call, _Direct) for call in calls)
        self._calls = calls

    def __call__(self, td: TensorDictBase) -> TensorDictBase:
        for call in self._calls:
            td = call(td)
        return td

    def on_tensors(self, values: dict[Key, Tensor]) -> dict[Key, Tensor]:
        """Everything that the policy makes of ``values``, which is not changed."""
        made: dict[Key, Tensor] = {}
        for call in self._calls:
            assert isinstance(call, _Direct)
            inputs = [made[key] if key in made else values[key] for key in call.in_keys]
            for key, value in zip(call.out_keys, call.run(inputs), strict=True):
                made[key] = value
        return made


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
        return [_Direct(module)]
    return [module]


def _has_hooks(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)


class _Direct:
    """A plain TensorDictModule, called past its ``__call__``."""

    def __init__(self, module: TensorDictModule) -> None:
        self.in_keys = list(module.in_keys)
        self.out_keys = list(module.out_keys_source)
        self._module = module
        self._function = module.module
        kind = type(self._function)
        self._is_plain_module = (
            isinstance(self._function, nn.Module)
            and (kind.__call__, kind._call_impl) == (nn.Module.__call__, nn.Module._call_impl)
            and not torch.nn.modules.module._has_any_global_hook()
        )

    def __call__(self, td: TensorDictBase) -> TensorDictBase:
        inputs = [td.get(key) for key in self.in_keys]
        if any(value is None for value in inputs):
            return self._module(td)  # its own error names what is missing
        for key, value in zip(self.out_keys, self.run(inputs), strict=True):
            td.set(key, value)
        return td

    def run(self, inputs: list[Tensor]) -> tuple[Any, ...]:
        function = self._function
        if self._is_plain_module and not (
            function._forward_hooks or function._forward_pre_hooks or function._compiled_call_impl
        ):
            function = function.forward
        out = function(*inputs)
        if isinstance(out, Tensor):
            return (out,)
        if isinstance(out, (dict, TensorDictBase)) and all(key in out for key in self.out_keys):
            return tuple(out.get(key) for key in self.out_keys)
        if isinstance(out, tuple):
            return out
        return () if out is None else (out,)


# ---- layers without the search for hooks

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_NEED_DISPATCH = (
    "register_forward_hook",
    "register_forward_pre_hook",
    "register_full_backward_hook",
    "register_full_backward_pre_hook",
    "register_backward_hook",
    "compile",
)
_LINEAR = nn.Linear.forward


def _may_ask_for_a_class(kind: type[nn.Module]) -> bool:
    """Whether a method that is somebody's own names ``type`` or ``__class__``."""
    members = [
        member
        for base in kind.__mro__
        if base.__module__.partition(".")[0] not in ("torch", "torchrl", "tensordict", "builtins")
        for name, member in vars(base).items()
        if name != "__init__"
    ]
    functions = [getattr(member, "fget", getattr(member, "__func__", member)) for member in members]
    codes = [getattr(inspect.unwrap(function), "__code__", None) for function in functions]
    return any({"type", "__class__"} & _names(code) for code in codes if code is not None)


def _names(code: CodeType) -> set[str]:
    inner = [_names(const) for const in code.co_consts if isinstance(const, CodeType)]
    return set(code.co_names).union(*inner)


def _call_directly(layer: nn.Module) -> None:
    """Spare torch's own layers, those without hooks, the dispatch of their calls."""
    kind = type(layer)
    if (
        kind.__module__.startswith("torch.nn.modules.")
        and kind.__call__ is nn.Module.__call__
        and layer._compiled_call_impl is None
        and not torch.nn.modules.module._has_any_global_hook()
        and not any(getattr(layer, name) for name in _HOOKS)
    ):
        layer.__class__ = _direct_kind(kind)


@functools.cache
def _direct_kind(kind: type[nn.Module]) -> type[nn.Module]:
    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if type(self) is direct:
            return self.forward(*args, **kwargs)  # which may have been set on this layer alone
        return kind.__call__(self, *args, **kwargs)  # somebody has derived from this class

    def call_linear(self: nn.Module, input: Tensor) -> Tensor:
        found = self._parameters
        if (
            type(self) is direct
            and kind.forward is _LINEAR
            and "forward" not in self.__dict__
            and "weight" in found
            and "bias" in found  # else plain tensors stand in for them
        ):
            return nn.functional.linear(input, found["weight"], found["bias"])
        return call(self, input)

    def reduce_as_before(self: nn.Module, protocol: int) -> Any:
        reduced = kind.__reduce_ex__(self, protocol)
        return (object.__new__, (kind,), *reduced[2:]) if type(self) is direct else reduced

    def with_dispatch(name: str) -> Callable[..., Any]:
        def method(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if type(self) is direct:
                self.__class__ = kind
            return getattr(kind, name)(self, *args, **kwargs)

        return method

    members: dict[str, Any] = {name: with_dispatch(name) for name in _NEED_DISPATCH}
    members["__call__"] = call_linear if kind is nn.Linear else call
    members["__reduce_ex__"] = reduce_as_before
    members |= {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    direct = type(kind.__name__, (kind,), members)
    return direct
