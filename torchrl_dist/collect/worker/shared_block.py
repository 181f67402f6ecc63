"""Share memory among the processes of a node. The memory has no file name, so no file can be left
behind.

A block is an anonymous file of the process that creates the block. Other processes of the same user
open this file through the creator's entry in ``/proc``. The memory lasts as long as a tensor in any
process uses it.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase, is_leaf_nontensor, is_tensor_collection
from torch import Tensor, nn

from torchrl_dist.collect.loop.joining import is_ragged
from torchrl_dist.collect.loop.rollout import nested
from torchrl_dist.collect.loop.spaces import Key, plain_key
from torchrl_dist.tensors import DTYPES, NAMES, is_plain
from torchrl_dist.weights import PackedWeights, every_name, find_target, untied

_ALIGN_BYTES = 64
_PLACES = 2  # number of versions of the weights that are in memory at once


class SharedBlock:
    """A block of shared memory. Its attribute ``data`` is a tensor, uint8 ``[size_bytes]``. Other
    processes can attach the block only while the process that created it runs."""

    def __init__(self, size_bytes: int) -> None:
        self._fd = os.memfd_create("torchrl_dist", os.MFD_CLOEXEC)
        os.ftruncate(self._fd, max(1, size_bytes))
        self.path = f"/proc/{os.getpid()}/fd/{self._fd}"
        self.data = attach(self.path)

    def close(self) -> None:
        """From now on, prevent other processes from attaching the block. Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        with contextlib.suppress(OSError, AttributeError):
            self.close()


def attach(path: str) -> Tensor:
    """Return the bytes of a block. All processes that attach the block share this memory."""
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        return torch.frombuffer(mmap.mmap(fd, 0), dtype=torch.uint8)
    finally:
        os.close(fd)


@dataclass(frozen=True)
class RolloutLayout:
    """The places of the tensors of a rollout ``[num_envs, steps]`` in a block.

    Attributes:
        entries: for each tensor, its key, NumPy's name of its dtype, and its shape without
            ``[num_envs, steps]``.
        groups: key and additional batch dimensions of each nested TensorDict that has more batch
            dimensions than ``[num_envs, steps]``, such as the TensorDict of an agent. Inner
            TensorDicts precede the TensorDicts that contain them.
    """

    num_envs: int
    steps: int
    entries: tuple[tuple[Key, str, tuple[int, ...]], ...]
    groups: tuple[tuple[Key, tuple[int, ...]], ...] = ()

    @classmethod
    def of(cls, rows: TensorDictBase, num_envs: int, steps: int) -> RolloutLayout:
        """Return a layout for rollouts with the keys of ``rows [n, t]``, which must be
        :func:`packable`."""
        items = sorted(rows.items(True, True), key=lambda item: str(item[0]))
        entries = tuple(
            (plain_key(key), NAMES[value.dtype], tuple(value.shape[2:])) for key, value in items
        )
        groups = [
            (plain_key(key), tuple(value.batch_size[2:]))
            for key, value in rows.items(True)
            if is_tensor_collection(value) and value.ndim > 2
        ]
        groups.sort(key=lambda group: len(group[0]) if isinstance(group[0], tuple) else 1)
        return cls(num_envs, steps, entries, tuple(reversed(groups)))

    def _places(self) -> tuple[list[int], int]:
        places, offset = [], 0
        for _, dtype, shape in self.entries:
            places.append(offset)
            size = math.prod((self.num_envs, self.steps, *shape)) * np.dtype(dtype).itemsize
            offset += -(-size // _ALIGN_BYTES) * _ALIGN_BYTES
        return places, offset

    @property
    def size_bytes(self) -> int:
        return self._places()[1]

    def view(self, data: Tensor) -> TensorDict:
        """Return the rollout as a TensorDict of views of the block."""
        tensors = {key: torch.from_numpy(array) for key, array in self._arrays(data)}
        rows = nested(tensors, [self.num_envs, self.steps], [None, "time"])
        for key, shape in self.groups:
            group = rows.get(key)
            group.batch_size = torch.Size([self.num_envs, self.steps, *shape])
            group.names = [None, "time", *[None] * len(shape)]
        return rows

    def write(self, data: Tensor, rows: TensorDictBase) -> None:
        """Copy rows ``[num_envs, steps]`` into the block."""
        for key, array in self._arrays(data):
            array[...] = rows.get(key).numpy()

    def _arrays(self, data: Tensor) -> Iterator[tuple[Key, np.ndarray]]:
        # Make views with NumPy, because NumPy needs a quarter of the time that torch needs for a
        # view.
        block, size = data.numpy(), (self.num_envs, self.steps)
        for (key, dtype, shape), offset in zip(self.entries, self._places()[0], strict=True):
            yield key, np.ndarray((*size, *shape), dtype, block, offset)


class BlockRows:
    """A block for the rows of one rollout. Each of several processes writes the rows of its envs
    into the block."""

    def __init__(self, layout: RolloutLayout, data: Tensor) -> None:
        self._arrays = dict(layout._arrays(data))
        self._entries = {key: (DTYPES[name], shape) for key, name, shape in layout.entries}
        self._size = layout.num_envs, layout.steps

    def write(self, rows: TensorDictBase, first_env: int) -> bool:
        """Write rows ``[n, t]`` at the places of the envs from ``first_env`` on, and return True.
        If the rows do not fit the layout, write nothing and return False."""
        if rows.ndim != 2 or first_env + rows.shape[0] > self._size[0]:
            return False
        n, t = rows.shape
        found = dict(rows.items(True, True, is_leaf=is_leaf_nontensor))
        if t > self._size[1] or found.keys() != self._entries.keys():
            return False
        for key, value in found.items():
            if not _is_constant(value) or (value.dtype, value.shape[2:]) != self._entries[key]:
                return False
        for key, value in found.items():
            self._arrays[key][first_env : first_env + n, :t] = value.numpy()
        return True


@dataclass(frozen=True)
class PackedRows:
    """Rows ``[n, t]`` as one tensor.

    The rows are packed into one tensor, because sending a tensor to another process costs at least
    about 30 us, however small the tensor is.

    Attributes:
        layout: layout of the block. The rows may fill only its first envs and steps.
        data: the block.
        shape: ``(n, t)``.
    """

    layout: RolloutLayout
    data: Tensor
    shape: tuple[int, int]

    @classmethod
    def of(cls, rows: TensorDictBase) -> PackedRows:
        """Pack a copy of the rows."""
        layout = RolloutLayout.of(rows, *rows.shape)
        data = torch.empty(layout.size_bytes, dtype=torch.uint8)
        layout.write(data, rows)
        return cls(layout, data, (rows.shape[0], rows.shape[1]))

    def unpack(self) -> TensorDict:
        """Return the rows as views of the block."""
        rows = self.layout.view(self.data)
        return rows if rows.shape == self.shape else rows[: self.shape[0], : self.shape[1]]


def packable(rows: TensorDictBase) -> bool:
    """Whether ``rows`` contains only tensors ``[n, t, ...]`` that NumPy can read."""
    if rows.ndim != 2 or is_ragged(rows):
        return False
    return all(_is_constant(value) for value in rows.values(True, True, is_leaf=is_leaf_nontensor))


def _is_constant(value: Any) -> bool:
    return is_plain(value) and not value.requires_grad


class SharedWeights:
    """The weights of a policy, as the node worker writes them. All env processes of the node worker
    share one copy.

    Two blocks are used in turn: new weights are written into one block while processes use the
    other block.
    """

    def __init__(self) -> None:
        # the last entry has the latest weights
        self._places: deque[tuple[WeightsAddress, SharedBlock]] = deque()
        self._made = 0

    def write(self, packed: PackedWeights) -> None:
        """Write new weights over the oldest weights. The caller must ensure that no process still
        uses the oldest weights."""
        address, block = self._places.popleft() if len(self._places) == _PLACES else (None, None)
        layout = (packed.entries, packed.aliases)
        if address is None or block is None or (address.entries, address.aliases) != layout:
            block = SharedBlock(packed.size_bytes)
            address = WeightsAddress(
                packed.version, packed.entries, packed.aliases, block.path, self._made
            )
            self._made += 1
        block.data[: packed.size_bytes].copy_(packed.data)
        self._places.append((replace(address, version=packed.version), block))

    @property
    def address(self) -> WeightsAddress | None:
        """The address of the latest weights, or None if no weights have been written."""
        return self._places[-1][0] if self._places else None


@dataclass(frozen=True)
class WeightsAddress:
    """The data with which a process finds shared weights. Each block of a creator has a number
    ``block`` of its own, because a later block may have the same ``path``."""

    version: int
    entries: tuple
    aliases: tuple
    path: str
    block: int


@dataclass(frozen=True)
class _Place:
    """The tensors of a module, each paired with its counterpart in shared memory."""

    parameters: Sequence[tuple[Tensor, Tensor]]
    buffers: Sequence[tuple[Tensor, Tensor]]


class WeightsView:
    """The shared weights, as a process uses them. The parameters of its module become views of the
    shared memory."""

    def __init__(self) -> None:
        self._used = -1
        self._places: dict[int, _Place] = {}

    def take(self, address: WeightsAddress, module: nn.Module) -> None:
        """Make the module use these weights. If the weights fit only a part of the module, only
        this part uses them.

        This method copies buffers instead of sharing them, because a module may write to its
        buffers.

        Raises:
            ConfigurationError: the weights do not fit the module or any part of it.
        """
        place = self._places.get(address.block)
        if place is None:
            place = self._places[address.block] = _place(address, module)
            while len(self._places) > _PLACES:
                del self._places[min(self._places)]
        if address.block != self._used:
            self._used = address.block
            for own, shared in place.parameters:
                own.data = shared
        for own, shared in place.buffers:
            own.copy_(shared)


def _place(address: WeightsAddress, module: nn.Module) -> _Place:
    packed = PackedWeights(address.version, address.entries, attach(address.path), address.aliases)
    target, shared = find_target(packed, module), packed.tensors()
    own = every_name(target)
    shared.update({alias: shared[name] for alias, name in untied(packed, target).items()})
    pairs = [(own[name], tensor) for name, tensor in shared.items() if name in own]
    return _Place(
        [pair for pair in pairs if isinstance(pair[0], nn.Parameter)],
        [pair for pair in pairs if not isinstance(pair[0], nn.Parameter)],
    )
