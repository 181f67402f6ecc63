"""What crosses a process boundary: any Python object as bytes plus a list of tensors.

cloudpickle carries lambdas, closures and what is defined in ``__main__`` or a notebook; tensors
(the leaves of a TensorDict too) stay outside the bytes, so that the transport moves their memory
without a copy through pickle.
"""

from __future__ import annotations

import io
import pickle
import threading
from typing import Any

import cloudpickle
import torch

_table = threading.local()


def dumps(obj: Any) -> tuple[bytes, list[torch.Tensor]]:
    """Split ``obj`` into bytes and tensors. The tensors are not copied: leave them unchanged
    until the message has arrived.

    Raises:
        TypeError: ``obj`` holds a tensor that is not in CPU memory.
        Exception: whatever pickling one of its parts raises.
    """
    buffer = io.BytesIO()
    pickler = _Pickler(buffer)
    pickler.dump(obj)
    return buffer.getvalue(), pickler.tensors


def loads(body: bytes, tensors: list[torch.Tensor]) -> Any:
    """Join what ``dumps`` split; runs code of the sender's choice, like every unpickling."""
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
        if type(obj) is torch.Tensor and obj.layout is torch.strided and not obj.is_nested:
            return _tensor_at, (self._keep(obj),)
        return super().reducer_override(obj)

    def _keep(self, tensor: torch.Tensor) -> int:
        if tensor.device.type != "cpu":
            raise TypeError(
                f"A tensor on {tensor.device} cannot be sent to another process; expected CPU "
                "memory. Move it with .cpu() first."
            )
        tensor = tensor.detach()
        pointer = tensor.untyped_storage().data_ptr()
        if self._dtype_at.setdefault(pointer, tensor.dtype) != tensor.dtype:
            # Two dtypes over one storage (TensorDict.consolidate) abort the receiving process.
            tensor = tensor.clone()
        self.tensors.append(tensor)
        return len(self.tensors) - 1


def _tensor_at(index: int) -> torch.Tensor:
    return _table.tensors[index]
