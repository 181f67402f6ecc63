"""Describe how a loss was built, apart from its tensors, so that ranks can compare their losses.

Two losses may hold the same tensors and still compute different gradients, because the losses may
differ in loss function, value estimator, activation (tanh or relu) or keys. Therefore a description
contains the class of each module, and each attribute of the module that has the name of a
constructor parameter. Other attributes, such as counters and caches, may differ between ranks.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import inspect
import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from tensordict.nn import TensorDictParams
from torch import Tensor, nn
from torchrl.data import TensorSpec
from torchrl.objectives import LossModule
from torchrl.objectives.value import ValueEstimatorBase

# Attributes that a description also contains, because TorchRL lets users change them in a loss.
_SETTINGS = (
    "value_type",
    "loss_mask_key",
    "use_prioritized_weights",
    "deterministic_sampling_mode",
    "reduction",
)
# A description contains the elements of a tensor only if the tensor has at most this many elements.
_SHOWN_ELEMENTS = 64
_SHOWN_CHARACTERS = 200
_DEVICE = re.compile(r"(cpu|cuda|mps|xpu|hpu|npu)(:\d+)?")


def description(loss: LossModule) -> dict[str, str]:
    """Return the class of each module and the values of its settings, as text by name.

    Losses that were built alike have equal descriptions, even on different devices.
    """
    found: dict[str, str] = {"the class": _type_name(type(loss))}
    for path, module in _modules(loss):
        if module is not loss:
            found[path] = _type_name(type(module))
        if isinstance(module, TensorDictParams):
            continue
        for name, value in _settings_of(module):
            found[f"{path}.{name}" if path else name] = _short_text(value)
        if isinstance(module, (LossModule, ValueEstimatorBase)):
            keys = module.tensor_keys
            for key in getattr(keys, "__dataclass_fields__", ()):
                name = f"the key {key!r}"
                found[f"{name} of {path}" if path else name] = _text(getattr(keys, key))
    return found


def card(tensor: Tensor) -> str:
    """Describe the properties of a tensor that must be equal on all ranks: type, shape, and whether
    the tensor is a frozen parameter."""
    frozen = isinstance(tensor, nn.Parameter) and not tensor.requires_grad
    return f"{tensor.dtype} {list(tensor.shape)}{' (frozen)' if frozen else ''}"


def _modules(loss: LossModule) -> Iterator[tuple[str, nn.Module]]:
    """Yield each module of ``loss`` once, with its path.

    The networks of a loss are not its submodules, because the loss holds their parameters and calls
    the networks with these parameters. This function yields the networks, too.
    """
    pending, seen = [("", loss)], {id(loss)}
    while pending:
        path, module = pending.pop(0)
        yield path, module
        if isinstance(module, TensorDictParams):
            continue  # contains only tensors
        for name, inner in {**vars(module), **module._modules}.items():
            if isinstance(inner, nn.Module) and id(inner) not in seen:
                seen.add(id(inner))
                shown = name.removeprefix("_") if module is loss else name
                pending.append((f"{path}.{shown}" if path else shown, inner))


def _settings_of(module: nn.Module) -> Iterator[tuple[str, Any]]:
    kind: Any = type(module)
    names, held = _constructor_parameters(kind), vars(module)
    for name in names:
        for stored in (name, f"_{name}"):
            if stored in held and not isinstance(held[stored], nn.Module):
                yield name, held[stored]
                break
    if isinstance(module, LossModule):
        for name in _SETTINGS:
            if name not in names and hasattr(module, name):
                yield name, getattr(module, name)


@functools.cache
def _constructor_parameters(kind: type) -> tuple[str, ...]:
    found: dict[str, None] = {}
    for base in kind.__mro__:
        init = vars(base).get("__init__")
        if base is nn.Module or init is None:
            continue
        try:
            found |= dict.fromkeys(inspect.signature(init).parameters)
        except (TypeError, ValueError):  # the constructor is not written in Python
            continue
    return tuple(name for name in found if name not in ("self", "device", "args", "kwargs"))


def _short_text(value: Any) -> str:
    text = _text(value)
    if len(text) <= _SHOWN_CHARACTERS:
        return text
    digest = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
    return f"{text[:_SHOWN_CHARACTERS]}... ({digest})"


def _text(value: Any) -> str:
    if isinstance(value, enum.Enum):
        return str(value)
    if isinstance(value, str):
        return value.partition(":")[0] if _DEVICE.fullmatch(value) else repr(value)
    if value is None or isinstance(value, (bool, int, float, complex, bytes, torch.dtype)):
        return repr(value)
    if isinstance(value, torch.device):
        return value.type
    if isinstance(value, Tensor):
        return _tensor_text(value)
    if isinstance(value, TensorSpec):
        return f"{type(value).__name__} {list(value.shape)} {value.dtype}"
    if isinstance(value, functools.partial):
        return f"partial of {_text(value.func)} with {_text(value.args)}, {_text(value.keywords)}"
    if isinstance(value, Mapping):
        items = sorted(f"{_text(key)}: {_text(inner)}" for key, inner in value.items())
        return f"{{{', '.join(items)}}}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_text, value))}]"
    if isinstance(value, (set, frozenset)):
        return f"{{{', '.join(sorted(map(_text, value)))}}}"
    if isinstance(value, type) or inspect.isroutine(value):
        return _type_name(value)
    return _type_name(type(value))


def _tensor_text(tensor: Tensor) -> str:
    text = f"{tensor.dtype} {list(tensor.shape)}"
    if tensor.numel() > _SHOWN_ELEMENTS or tensor.is_meta:
        return text
    return f"{text} {tensor.detach().flatten().tolist()}"


def _type_name(kind: Any) -> str:
    name = str(getattr(kind, "__qualname__", None) or getattr(kind, "__name__", type(kind)))
    module = getattr(kind, "__module__", None)
    if module in (None, "builtins"):
        return name
    # "__mp_main__" is the same script in a process that multiprocessing started.
    return f"{'__main__' if module == '__mp_main__' else module}.{name}"
