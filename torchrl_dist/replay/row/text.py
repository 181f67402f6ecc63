"""Columns for values of a row that are not tensors, and names for tensorclasses.

A value is stored as text: JSON in a field of fixed size. It is therefore shared, sent, saved and
checked like any other column, and reading it runs no code.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tensordict import LazyStackedTensorDict, NonTensorData, NonTensorStack, is_tensorclass

from torchrl_dist.errors import ConfigurationError
from torchrl_dist.replay.row.spec import ColumnSpec

_SHORTEST = 256
"""The smallest size of a field for text, in bytes. A field has room for at least twice the longest
text of the first rows."""

Path = tuple[str, ...]


def shown(path: Path) -> str:
    """Return how messages show a path."""
    return path[0] if len(path) == 1 else str(path)


@dataclass(frozen=True)
class Text:
    """Encoded values that are not tensors, one per cell of ``shape`` [n, ...]."""

    cells: list[bytes]
    shape: tuple[int, ...]

    @property
    def longest(self) -> int:
        return max(map(len, self.cells), default=0)

    @property
    def width(self) -> int:
        """The size in bytes of a field that has room for these texts."""
        return max(_SHORTEST, 1 << (2 * self.longest - 1).bit_length())

    def as_array(self, width: int) -> np.ndarray:
        """Return the texts as uint8 [n, ..., width]."""
        return np.array(self.cells, dtype=f"S{width}").view(np.uint8).reshape(*self.shape, width)


def encoded(value: Any, path: Path) -> Text:
    """Encode values that are not tensors.

    Raises:
        ConfigurationError: JSON would change a value.
    """
    known: dict[int, bytes] = {}  # by id, because most values of a batch are the same object
    cells = []
    for each in _values(value):
        text = known.get(id(each))
        if text is None:
            _check_plain(each, path)
            text = json.dumps(each, ensure_ascii=False, separators=(",", ":")).encode(
                "utf-8", "surrogatepass"
            )
            known[id(each)] = text
        cells.append(text)
    return Text(cells, tuple(value.batch_size))


def _values(value: Any) -> list[Any]:
    """Return the objects of a NonTensorData, or of a stack of them, in the order of the cells."""
    if isinstance(value, LazyStackedTensorDict):
        return [each for part in value.unbind(0) for each in _values(part)]
    return [value.data] * value.numel()


def _check_plain(value: Any, path: Path) -> None:
    kind = type(value)
    if value is None or kind in (str, int, float, bool):
        return
    if kind is list:
        for item in value:
            _check_plain(item, path)
        return
    if kind is dict and all(type(key) is str for key in value):
        for item in value.values():
            _check_plain(item, path)
        return
    raise ConfigurationError(
        f"key {shown(path)!r} holds a {kind.__name__}; a row can hold tensors, text, numbers and "
        "None, and lists and dictionaries (with string keys) of text, numbers and None; convert "
        "the value to one of these types, or leave the key out"
    )


def decoded(field_: torch.Tensor) -> Any:
    """Invert ``encoded`` and ``Text.as_array``. The result is a stack, as in TorchRL's storages."""
    array = np.ascontiguousarray(field_.numpy())
    *shape, width = array.shape
    if not math.prod(shape):
        return NonTensorData(None, batch_size=shape)
    cells = array.reshape(-1).view(f"S{width}").tolist()
    return _stacked([json.loads(text.decode("utf-8", "surrogatepass")) for text in cells], shape)


def _stacked(values: list[Any], shape: Sequence[int]) -> Any:
    if not shape:
        (value,) = values
        return NonTensorData(value, batch_size=())
    size = len(values) // shape[0]
    parts = [
        _stacked(values[start : start + size], shape[1:])
        for start in range(0, len(values), size or 1)
    ]
    return NonTensorStack(*parts)


def text_problem(value: torch.Tensor | Text, column: ColumnSpec, rows: int) -> str | None:
    """Return why values of ``rows`` rows cannot be stored in a column, or None if they can.

    Call this function only if the values or the column are text.
    """
    name = shown(column.key)
    if not isinstance(value, Text):
        return (
            f"{name!r} is a tensor, but the buffer stores values that are not tensors under this "
            "key"
        )
    if not column.text:
        return (
            f"{name!r} is not a tensor, but the buffer stores it as {column.dtype} "
            f"{list(column.shape)}"
        )
    if value.shape != (rows, *column.shape[:-1]):
        return (
            f"{name!r} has batch size {list(value.shape)}, but the buffer stores it with "
            f"{list(column.shape[:-1])} per row"
        )
    if value.longest > column.shape[-1]:
        return (
            f"{name!r} takes {value.longest} bytes as text, but the first rows of the buffer limit "
            f"it to {column.shape[-1]}; write a row with the longest text first, or encode the "
            "text as a tensor"
        )
    return None


def in_width(array: np.ndarray, width: int) -> np.ndarray | None:
    """Resize fields for text. Return None if a text does not fit."""
    if array[..., width:].any():
        return None
    resized = np.zeros((*array.shape[:-1], width), np.uint8)
    kept = min(width, array.shape[-1])
    resized[..., :kept] = array[..., :kept]
    return resized


# --- tensorclasses -------------------------------------------------------------------------------

_classes: dict[str, type] = {}
"""The tensorclasses of rows that this process wrote, by name. They may be local to a function."""


def class_name(data: Any) -> str:
    cls = type(data)
    module = "__main__" if cls.__module__ == "__mp_main__" else cls.__module__
    name = f"{module}:{cls.__qualname__}"
    _classes[name] = cls
    return name


def class_named(name: str) -> type[Any]:
    """Return the tensorclass of this name.

    Raises:
        ConfigurationError: this process has no such tensorclass. This function does not import the
            class's module, because a name in a file must not make a process run code.
    """
    found: Any = _classes.get(name)
    if found is None:
        module, _, path = name.partition(":")
        found = sys.modules.get(module)
        for part in path.split("."):
            found = getattr(found, part, None)
    if not isinstance(found, type) or not is_tensorclass(found):
        raise ConfigurationError(
            f"the rows are of the tensorclass {name.replace(':', '.')}, which this process has not "
            "imported; import it before you read these rows"
        )
    return found
