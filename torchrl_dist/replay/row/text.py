"""What is not a tensor in a row, as a column; and tensorclasses by their names.

A value is stored as text: JSON in a field of fixed size, so that it is shared, sent, saved and
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
"""Bytes of a field for text. Longer texts in the first rows make it longer, with room to spare."""

Path = tuple[str, ...]


def shown(path: Path) -> str:
    """The path in messages."""
    return path[0] if len(path) == 1 else str(path)


@dataclass(frozen=True)
class Text:
    """Values that are not tensors, encoded: one per cell of ``shape``, [n, ...]."""

    cells: list[bytes]
    shape: tuple[int, ...]

    @property
    def longest(self) -> int:
        return max(map(len, self.cells), default=0)

    @property
    def width(self) -> int:
        """Bytes of a field for such texts."""
        return max(_SHORTEST, 1 << (2 * self.longest - 1).bit_length())

    def as_array(self, width: int) -> np.ndarray:
        """uint8 [n, ..., width]."""
        return np.array(self.cells, dtype=f"S{width}").view(np.uint8).reshape(*self.shape, width)


def encoded(value: Any, path: Path) -> Text:
    """
    Raises:
        ConfigurationError: a value that would not come back from JSON as it is.
    """
    known: dict[int, bytes] = {}  # most values of a batch are one and the same object
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
    """Of a NonTensorData or a stack of some, the objects in the order of the cells."""
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
        f"key {shown(path)!r} holds a {kind.__name__}; a row can hold tensors, text, "
        "numbers, None, and lists and dictionaries by name of these; encode it as one, or drop it"
    )


def decoded(field_: torch.Tensor) -> Any:
    """Inverse of ``Text.as_array``, as the stack that TorchRL's storages give."""
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
    """Why the values of a column of ``rows`` rows cannot be stored where one of them is text."""
    name = shown(column.key)
    if not isinstance(value, Text):
        return f"{name!r} is a tensor, stored as a value that is not one"
    if not column.text:
        return f"{name!r} is not a tensor, stored as {column.dtype} {list(column.shape)}"
    if value.shape != (rows, *column.shape[:-1]):
        return f"{name!r} has batch size {list(value.shape)}, stored as {list(column.shape[:-1])}"
    if value.longest > column.shape[-1]:
        return (
            f"{name!r} takes {value.longest} bytes as text, and the first rows of the buffer made "
            f"that {column.shape[-1]}: write the longest first, or encode it as a tensor"
        )
    return None


def in_width(array: np.ndarray, width: int) -> np.ndarray | None:
    """A field for text with another size; None if something does not fit."""
    if array[..., width:].any():
        return None
    resized = np.zeros((*array.shape[:-1], width), np.uint8)
    kept = min(width, array.shape[-1])
    resized[..., :kept] = array[..., :kept]
    return resized


# --- tensorclasses -------------------------------------------------------------------------------

_classes: dict[str, type] = {}
"""Tensorclasses of which this process wrote rows, by name; they may be local to a function."""


def class_name(data: Any) -> str:
    cls = type(data)
    module = "__main__" if cls.__module__ == "__mp_main__" else cls.__module__
    name = f"{module}:{cls.__qualname__}"
    _classes[name] = cls
    return name


def class_named(name: str) -> type[Any]:
    """
    Raises:
        ConfigurationError: this process does not have it. It is not imported: a name in a file must
            not run code.
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
            "imported: import it before reading them"
        )
    return found
