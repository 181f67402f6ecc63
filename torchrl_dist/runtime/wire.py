"""Serialize any Python object as bytes plus a list of tensors.

cloudpickle handles lambdas, closures and definitions in ``__main__`` or a notebook. Large tensors,
including those in a TensorDict, stay outside the bytes. The transport sends the memory of these
tensors directly, so that pickle does not copy it.
"""

from __future__ import annotations

import io
import pickle
import threading
import weakref
from types import FunctionType
from typing import Any

import cloudpickle
import numpy as np
import torch

from ..tensors import NAMES, is_plain

# Up to this size, copying a tensor into the bytes takes less CPU time than the 55 us that each side
# spends on a tensor outside the bytes.
_INSIDE_BYTES = 2**16
# cloudpickle looks up each class and function by name every time, which takes most of the time of a
# small message. Names in these packages are looked up only once, because they do not change. In
# users' modules, names may change, because a module may be reloaded.
_STABLE = ("torchrl_dist", "torch", "numpy", "tensordict")
_found_by_name: weakref.WeakSet[Any] = weakref.WeakSet()

_table = threading.local()


def dumps(obj: Any) -> tuple[bytes, list[torch.Tensor]]:
    """Split ``obj`` into bytes and tensors.

    Large tensors are not copied: do not change them until the message has arrived. The graph
    of a tensor that was computed from others stays in this process. Such a tensor therefore arrives
    without ``requires_grad``, and ``backward()`` in the other process raises an error instead of
    doing nothing.

    Raises:
        TypeError: ``obj`` holds a tensor that is not in CPU memory.
        Exception: a part of ``obj`` cannot be pickled. The error may have any type.
    """
    buffer = io.BytesIO()
    pickler = _Pickler(buffer)
    pickler.dump(obj)
    return buffer.getvalue(), pickler.tensors


def loads(body: bytes, tensors: list[torch.Tensor]) -> Any:
    """Return the object that ``dumps`` split. Like any unpickling, this function can run code that
    the sender chose."""
    outer = getattr(_table, "tensors", None)
    _table.tensors = tensors
    try:
        return pickle.loads(body)
    finally:
        _table.tensors = outer


class _Pickler(cloudpickle.Pickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.tensors: list[torch.Tensor] = []
        self._dtype_at: dict[int, torch.dtype] = {}

    def reducer_override(self, obj: Any) -> Any:
        kind = type(obj)
        if kind is torch.Tensor:
            if obj.requires_grad and obj.is_leaf:
                return _requiring_grad, (obj.detach(),)
            if obj.layout is torch.strided and not obj.is_nested:
                return self._reduce_tensor(obj)
        elif kind is np.ndarray:
            if obj.dtype.kind in "biufc" and obj.nbytes <= _INSIDE_BYTES:
                return _array_of, (bytearray(obj.tobytes()), obj.dtype.str, obj.shape)
        elif kind is type or kind is FunctionType:
            if obj in _found_by_name:
                return NotImplemented
            reduced = super().reducer_override(obj)
            if reduced is NotImplemented and obj.__module__.partition(".")[0] in _STABLE:
                _found_by_name.add(obj)
            return reduced
        return super().reducer_override(obj)

    def _reduce_tensor(self, tensor: torch.Tensor) -> tuple[Any, ...]:
        if tensor.nbytes <= _INSIDE_BYTES and is_plain(tensor):
            content = bytearray(tensor.detach().numpy().tobytes())
            return _tensor_of, (content, NAMES[tensor.dtype], tuple(tensor.shape))
        return _tensor_at, (self._keep(tensor),)

    def _keep(self, tensor: torch.Tensor) -> int:
        if tensor.device.type != "cpu":
            raise TypeError(
                f"A tensor on {tensor.device} cannot be sent to another process; expected CPU "
                "memory. Move it with .cpu() first."
            )
        tensor = tensor.detach()
        pointer = tensor.untyped_storage().data_ptr()
        if self._dtype_at.setdefault(pointer, tensor.dtype) != tensor.dtype:
            # Two tensors of different dtype in one storage (TensorDict.consolidate) would abort the
            # receiving process.
            tensor = tensor.clone()
        self.tensors.append(tensor)
        return len(self.tensors) - 1


def _array_of(content: bytearray, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    return np.frombuffer(content, dtype).reshape(shape)


def _tensor_of(content: bytearray, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.from_numpy(_array_of(content, dtype, shape))


def _requiring_grad(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.requires_grad_()


def _tensor_at(index: int) -> torch.Tensor:
    return _table.tensors[index]
