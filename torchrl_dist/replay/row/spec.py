"""The spec of a row: the dtype, shape and place of each of its tensors. A spec can be stored as
JSON."""

from __future__ import annotations

import functools
import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import quote

import torch

from torchrl_dist.errors import ConfigurationError

_LONGEST_NAME = 251  # file systems allow 255 bytes, suffix included


def data_file(key: Sequence[str]) -> str:
    """Return the name of the file that holds a column."""
    name = ",".join(quote(part, safe="") for part in key)
    if len(name) > _LONGEST_NAME:  # only shortened names contain "=", because quote() replaces "="
        digest = hashlib.blake2b(name.encode(), digest_size=16).hexdigest()
        name = f"{name[: _LONGEST_NAME - 33]}={digest}"
    return name + ".bin"


def ring_file(key: Sequence[str]) -> str:
    """Return the name of the file with the frames of a key and of ``("next", key)``. A column's
    file never has this name, because its name never begins with "frames="."""
    return f"frames={hashlib.blake2b(data_file(key).encode(), digest_size=16).hexdigest()}.bin"


@dataclass(frozen=True)
class ColumnSpec:
    """One tensor of a row: where it sits in the TensorDict, its dtype and shape.

    If ``text`` is true, the column stores values that are not tensors, as JSON in UTF-8. The
    column's last dimension holds the bytes of a text, padded with zeros.

    If ``stack`` is not 0, the values are stacks of that many frames. Each frame is stored once, see
    ``node.frames``. Specs that differ only in ``stack`` are equal, because their rows have the same
    values.
    """

    key: tuple[str, ...]
    dtype: torch.dtype
    shape: tuple[int, ...]
    text: bool = False
    stack: int = field(default=0, compare=False)

    @property
    def file_name(self) -> str:
        return data_file(self.key)

    @property
    def row_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def ring(self) -> tuple[str, ...]:
        """The key under which the frames are stored. ``("next", key)`` and ``key`` share their
        frames."""
        return self.key[1:] if self.key[0] == "next" and len(self.key) > 1 else self.key

    @property
    def frame_shape(self) -> tuple[int, ...]:
        """The shape of a frame: the shape that a value has with ``stack=1``."""
        if self.stack == 1:
            return self.shape
        return (self.shape[0] // self.stack, *self.shape[1:])

    @property
    def frame_bytes(self) -> int:
        return math.prod(self.frame_shape) * self.dtype.itemsize

    def as_stack(self, stack: int) -> ColumnSpec:
        """Return this column with values that are stacks of frames.

        Raises:
            ConfigurationError: the values cannot be stacks of that many frames.
        """
        if self.text or (stack > 1 and (not self.shape or self.shape[0] % stack)):
            raise ConfigurationError(
                f"{'.'.join(self.key)!r} holds {self.dtype} {list(self.shape)} per row, not a "
                f"stack of {stack} frames; expected a first dimension that is a multiple of "
                f"{stack}; move the dimension of the stack to the front, or pass frames={{key: 1}} "
                "for values that are one frame each"
            )
        return replace(self, stack=stack)

    def as_json(self) -> dict[str, Any]:
        entry = {"key": list(self.key), "dtype": str(self.dtype)[6:], "shape": list(self.shape)}
        more = {"text": self.text, "stack": self.stack}
        return entry | {name: value for name, value in more.items() if value}

    @classmethod
    def from_json(cls, entry: dict[str, Any]) -> ColumnSpec:
        return cls(
            tuple(entry["key"]),
            getattr(torch, entry["dtype"]),
            tuple(entry["shape"]),
            bool(entry.get("text", False)),
            int(entry.get("stack", 0)),
        )


STREAM = ColumnSpec(("_torchrl_dist_stream",), torch.int64, ())
"""A hidden column that numbers the rows of each thread, see ``row.numbers``."""

ORDER = ColumnSpec(("_torchrl_dist_order",), torch.int64, ())
"""A hidden column that numbers the rows of each trajectory, see ``row.numbers``."""

HIDDEN = (STREAM, ORDER)


@dataclass(frozen=True)
class NodeSpec:
    """A TensorDict inside a row, or, if ``key`` is empty, the row itself.

    ``batch_dims`` are its batch dimensions after the dimension of the rows. ``tensorclass`` is its
    class, as ``module:name``, or empty for a plain TensorDict.
    """

    key: tuple[str, ...]
    batch_dims: tuple[int, ...]
    tensorclass: str = ""

    def as_json(self) -> dict[str, Any]:
        entry = {"key": list(self.key), "batch_dims": list(self.batch_dims)}
        return entry | ({"tensorclass": self.tensorclass} if self.tensorclass else {})

    @classmethod
    def from_json(cls, entry: dict[str, Any]) -> NodeSpec:
        return cls(
            tuple(entry["key"]), tuple(entry["batch_dims"]), str(entry.get("tensorclass", ""))
        )


@dataclass(frozen=True)
class RowSpec:
    """The content of one row.

    Attributes:
        columns: its tensors.
        batch_dims: leading dimensions that all columns of a row share.
        nodes: the TensorDicts of a row that cannot be derived from the columns, because they have
            other batch dimensions, no column, or a tensorclass. Sorted by key.
    """

    columns: tuple[ColumnSpec, ...]
    batch_dims: tuple[int, ...] = ()
    nodes: tuple[NodeSpec, ...] = ()

    @functools.cached_property
    def row_bytes(self) -> int:
        return sum(column.row_bytes for column in self.columns)

    @property
    def stored_row_bytes(self) -> int:
        """The size in bytes, at least 1, of a row's stored form with one new frame per ring."""
        return max(1, sum(column.row_bytes for column in self.stored.values()))

    @functools.cached_property
    def rings(self) -> dict[tuple[str, ...], list[int]]:
        """For each key under which frames are stored: the indices in ``columns`` of the columns
        that contain these frames."""
        found: dict[tuple[str, ...], list[int]] = {}
        for number, column in enumerate(self.columns):
            if column.stack:
                found.setdefault(column.ring, []).append(number)
        return found

    @functools.cached_property
    def stored(self) -> dict[str, ColumnSpec]:
        """The arrays of the stored form of rows (see ``row.stacks``), by the names of their files.
        Each shape leaves out the first dimension, which counts the rows or frames."""
        found = {}
        for column in self.columns:
            numbers = replace(column, dtype=torch.int64, shape=(column.stack,), stack=0)
            found[column.file_name] = numbers if column.stack else column
        for ring, (first, *_) in self.rings.items():
            column = self.columns[first]
            found[ring_file(ring)] = ColumnSpec(ring, column.dtype, column.frame_shape)
        return found

    def as_json(self) -> dict[str, Any]:
        entry: dict[str, Any] = {
            "batch_dims": list(self.batch_dims),
            "leaves": [column.as_json() for column in self.columns],
        }
        return entry | ({"nodes": [node.as_json() for node in self.nodes]} if self.nodes else {})

    @functools.cached_property
    def text(self) -> str:
        """The result of :meth:`as_json` as a string, for messages."""
        return json.dumps(self.as_json())

    @classmethod
    def from_json(cls, entry: dict[str, Any]) -> RowSpec:
        return cls(
            tuple(map(ColumnSpec.from_json, entry["leaves"])),
            tuple(entry["batch_dims"]),
            tuple(map(NodeSpec.from_json, entry.get("nodes", ()))),
        )


def checked_spec(entry: Any) -> RowSpec:
    """Call :meth:`RowSpec.from_json` with an entry that may be damaged.

    Raises:
        ValueError: the entry is not a spec.
    """
    try:
        spec = RowSpec.from_json(entry)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not a spec of a row: {error!r}") from error
    for column in spec.columns:
        names = column.key and all(isinstance(part, str) for part in column.key)
        sizes = all(type(size) is int and size >= 0 for size in column.shape)
        if not (names and sizes and isinstance(column.dtype, torch.dtype)):
            raise ValueError(f"not a spec of a row: it has the invalid {column}")
        stacked = column.stack and (column.text or not column.frame_bytes)
        if column.stack < 0 or stacked or (column.stack > 1 and column.shape[0] % column.stack):
            raise ValueError(
                f"not a spec of a row: {column} does not hold stacks of {column.stack} frames"
            )
    return spec
