"""Pack a module's tensors into one flat byte buffer with a version.

An update is packed once and sent to many workers. The update is packed into a single tensor,
because each tensor of a message has a cost in addition to the cost of its bytes, and a policy has
dozens of small tensors.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

from torchrl_dist.errors import ConfigurationError

_ALIGN_BYTES = (
    16  # a multiple of every dtype's element size, so that the buffer can be viewed in place
)


@dataclass(frozen=True)
class Entry:
    """Position, dtype and shape of one tensor in the buffer."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset_bytes: int

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class PackedWeights:
    """An immutable snapshot of a module's parameters and buffers on the CPU.

    Attributes:
        version: the caller's number of this update, which increases by one with each update.
        entries: name, dtype, shape and position of each tensor, in the module's order.
        data: uint8 ``[size_bytes]``.
        aliases: for each additional name of a tied tensor, a pair of this name and the name of the
            tensor's entry.
    """

    version: int
    entries: tuple[Entry, ...]
    data: Tensor
    aliases: tuple[tuple[str, str], ...] = ()

    @property
    def size_bytes(self) -> int:
        return self.data.numel()

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors by name, as views of the buffer. Do not write to these views."""
        return {
            e.name: self.data[e.offset_bytes : e.offset_bytes + e.size_bytes]
            .view(e.dtype)
            .view(e.shape)
            for e in self.entries
        }


def named_tensors(source: nn.Module | TensorDictBase | Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the tensors of a module, a TensorDict or a state dict by name.

    Names of nested tensors are joined by dots. A module's tensors are its parameters and buffers. A
    shared (tied) parameter appears once. Other state of a module is left out.

    Raises:
        ConfigurationError: a parameter of a lazy layer has no shape yet, or a TensorDict or dict
            contains no tensors, or contains something that is not a tensor.
    """
    if isinstance(source, nn.Module):
        found: dict[str, Tensor] = dict(source.named_parameters())
        found.update(source.named_buffers())
    elif isinstance(source, TensorDictBase):
        leaves = source.items(include_nested=True, leaves_only=True)
        found = {k if isinstance(k, str) else ".".join(k): v for k, v in leaves}
    elif isinstance(source, Mapping):
        found = _flat(source)
    else:
        raise ConfigurationError(
            f"expected weights as an nn.Module, a TensorDict or a state dict, got {type(source)}"
        )
    if not found and not isinstance(source, nn.Module):
        raise ConfigurationError(
            f"this {type(source).__name__} contains no weights; pass a module, TensorDict or dict "
            "that has tensors"
        )
    _refuse_lazy(found)
    return found


def _refuse_lazy(tensors: Mapping[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        if torch.nn.parameter.is_lazy(tensor):
            raise ConfigurationError(
                f"parameter {name!r} belongs to a lazy layer that has no shape yet: run the module "
                "once on a sample input before you pass it"
            )


def _flat(weights: Mapping[Any, Any], prefix: str = "") -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for key, value in weights.items():
        name = f"{prefix}{key}"
        if isinstance(value, Tensor):
            found[name] = value
        elif isinstance(value, Mapping | TensorDictBase):
            found |= _flat(value, f"{name}.")
        elif not name.endswith("_extra_state"):
            raise ConfigurationError(
                f"weights[{name!r}] is of type {type(value).__name__}; expected a tensor, or a "
                "dict or TensorDict of tensors"
            )
    return found


def pack(source: nn.Module | TensorDictBase | Mapping[str, Any], version: int = 0) -> PackedWeights:
    """Copy the tensors of ``source`` into one new buffer. Blocks until the tensors are on the CPU.

    The result shares no memory with the source, so the source may be trained further.

    Raises:
        ConfigurationError: as :func:`named_tensors`.
    """
    entries: list[Entry] = []
    tensors = named_tensors(source)
    offset = 0
    for name, tensor in tensors.items():
        entry = Entry(name, tensor.dtype, tuple(tensor.shape), offset)
        entries.append(entry)
        offset += -(-entry.size_bytes // _ALIGN_BYTES) * _ALIGN_BYTES
    data = torch.empty(
        offset, dtype=torch.uint8, device="cpu"
    )  # not zeroed, because zeroing would double the page faults
    packed = PackedWeights(version, tuple(entries), data, _aliases(source, tensors))
    with torch.no_grad():
        for name, view in packed.tensors().items():
            view.copy_(tensors[name].detach())
    return packed


def _aliases(
    source: nn.Module | TensorDictBase | Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> tuple[tuple[str, str], ...]:
    names = {id(tensor): name for name, tensor in tensors.items()}
    every = every_name(source) if isinstance(source, nn.Module) else {}
    pairs = ((alias, names[id(tensor)]) for alias, tensor in every.items())
    return tuple((alias, name) for alias, name in pairs if alias != name)


def every_name(module: nn.Module) -> dict[str, Tensor]:
    """Like :func:`named_tensors`, but return a tied tensor under each of its names."""
    found: dict[str, Tensor] = dict(module.named_parameters(remove_duplicate=False))
    found.update(module.named_buffers(remove_duplicate=False))
    _refuse_lazy(found)
    return found


def untied(packed: PackedWeights, target: nn.Module) -> dict[str, str]:
    """Return names that are tied to another tensor in the source but not in ``target``.

    Each of these names is mapped to the name of the entry that holds the value.
    """
    have = every_name(target) if packed.aliases else {}
    return {
        alias: name
        for alias, name in packed.aliases
        if alias in have and have[alias] is not have.get(name)
    }


def find_target(packed: PackedWeights, module: nn.Module) -> nn.Module:
    """Return the module itself, or the one submodule, that has every packed name, dtype and shape.

    A worker's policy may thus wrap the learner's module, for example in an exploration module with
    a separate epsilon. Everything that is not packed stays as the worker made it. If several nested
    modules match, the outermost is returned.

    Raises:
        ConfigurationError: nothing matches (the message names the first differences), or two
            submodules at the same depth match.
    """
    expected = {e.name: (e.dtype, e.shape) for e in packed.entries}
    matches: list[tuple[int, str, nn.Module, dict[str, Tensor]]] = []
    for path, candidate in module.named_modules():
        depth = path.count(".") + 1 if path else 0
        if matches and depth > matches[0][0]:
            continue
        have = every_name(candidate)
        if all(
            name in have and (have[name].dtype, tuple(have[name].shape)) == spec
            for name, spec in expected.items()
        ):
            matches = [m for m in matches if m[0] == depth]
            matches.append((depth, path, candidate, have))
    if len(matches) == 1:
        _refuse_torn(packed, matches[0][3])
        return matches[0][2]
    if matches:
        raise ConfigurationError(
            f"the weights fit several parts of the policy equally well: {[m[1] for m in matches]}; "
            "pass the weights of the whole policy"
        )
    have = every_name(module)
    missing = [name for name in expected if name not in have]
    wrong = [
        f"{name}: got {(have[name].dtype, tuple(have[name].shape))}, expected {spec}"
        for name, spec in expected.items()
        if name in have and (have[name].dtype, tuple(have[name].shape)) != spec
    ]
    raise ConfigurationError(
        f"the weights fit neither the policy ({type(module).__name__}) nor a part of it; pass "
        "weights with the policy's names, dtypes and shapes. Missing in the policy: "
        f"{missing[:5]}, different: {wrong[:5]}; the policy has: {list(have)[:8]}"
    )


def _refuse_torn(packed: PackedWeights, have: Mapping[str, Tensor]) -> None:
    """Refuse a state dict in which the copies of a tied tensor have different values."""
    first: dict[int, str] = {}
    again = [
        (other, e.name)
        for e in packed.entries
        if (other := first.setdefault(id(have[e.name]), e.name)) != e.name
    ]
    values = packed.tensors() if again else {}
    for other, name in again:
        one, two = (values[each].reshape(-1).view(torch.uint8) for each in (other, name))
        if not torch.equal(one, two):
            raise ConfigurationError(
                f"{other} and {name} are one tensor in the policy but have different values in "
                "these weights: pass the weights of a module that shares the same layers"
            )


def completed(
    part: PackedWeights, before: PackedWeights | None, module: nn.Module | None = None
) -> PackedWeights:
    """Return ``part``, with its gaps filled from ``before``.

    Thus a worker that never received ``before``, for example because it started late, still gets
    complete weights.

    Args:
        before: the weights that were packed last, or None. If these weights fit ``module``, they
            must contain every weight of ``module``.
        module: the learner's module, or None. If ``part`` fits one of its submodules, ``part`` may
            have the names of that submodule. Otherwise, a name in ``part`` means the tensor of that
            name in ``before``.

    Raises:
        ConfigurationError: it is unknown whether ``part`` replaces ``before`` or adds to it.
    """
    if before is None or part.entries == before.entries:
        return part
    if module is not None:
        # The weights may fit the workers' modules but not the learner's module.
        with contextlib.suppress(ConfigurationError):
            there = every_name(find_target(part, module))
            names = {id(tensor): name for name, tensor in named_tensors(module).items()}
            entries = tuple(replace(e, name=names[id(there[e.name])]) for e in part.entries)
            part = replace(part, entries=entries, aliases=before.aliases)
    old, new = before.tensors(), part.tensors()
    if old.keys() <= new.keys():
        return part
    if not new.keys() <= old.keys():
        raise ConfigurationError(
            f"got weights {list(new)[:5]} after weights {list(old)[:5]}; the learner cannot tell "
            "whether both belong to one policy. Send all weights of the policy in one call, or "
            "pass the learner's module as policy= to the collector"
        )
    return replace(pack(old | new, part.version), aliases=before.aliases)


@torch.no_grad()
def unpack(packed: PackedWeights, module: nn.Module) -> None:
    """Copy the packed tensors in place into ``module``, or into the submodule that they fit.

    Raises:
        ConfigurationError: as :func:`find_target`; in this case, nothing is changed.
    """
    found = find_target(packed, module)
    target, tensors = every_name(found), packed.tensors()
    for name, tensor in tensors.items():
        target[name].copy_(tensor)
    for alias, name in untied(packed, found).items():
        target[alias].copy_(tensors[name])
