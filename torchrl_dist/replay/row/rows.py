"""Between TensorDicts and the flat columns of a row: checked on the way in, built on the way out.

What is not a tensor is stored as text: JSON in a field of fixed size, so that it is shared, sent,
saved and checked like any other column, and reading it runs no code.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import (
    LazyStackedTensorDict,
    NonTensorData,
    NonTensorStack,
    TensorDict,
    TensorDictBase,
    is_non_tensor,
    is_tensor_collection,
    is_tensorclass,
)

from torchrl_dist.errors import ConfigurationError
from torchrl_dist.replay.row import _torchrl
from torchrl_dist.replay.row.spec import STREAM, ColumnSpec, NodeSpec, RowSpec
from torchrl_dist.tensors import array_of

SAMPLING_KEYS = frozenset({"index", "index_generation", "priority_weight"})
"""What a buffer adds to a sample. They describe the draw, not the row, and are not stored."""

SHORTEST_TEXT = 256
"""Bytes of a field for text. Longer texts in the first rows make it longer, with room to spare."""

Path = tuple[str, ...]


def _name(path: Path) -> str:
    return path[0] if len(path) == 1 else str(path)


# --- what is not a tensor ------------------------------------------------------------------------


@dataclass(frozen=True)
class _Text:
    """Values that are not tensors, encoded: one per cell of ``shape``, [n, ...]."""

    cells: list[bytes]
    shape: tuple[int, ...]

    @property
    def longest(self) -> int:
        return max(map(len, self.cells), default=0)

    def as_array(self, width: int) -> np.ndarray:
        """uint8 [n, ..., width]."""
        return np.array(self.cells, dtype=f"S{width}").view(np.uint8).reshape(*self.shape, width)


def _encoded(value: Any, path: Path) -> _Text:
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
    return _Text(cells, tuple(value.batch_size))


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
        f"key {_name(path)!r} holds a {kind.__name__}; a row keeps tensors, and beside them text, "
        "numbers, None, lists and dictionaries by name of these: encode it as one, or drop it"
    )


def _decoded(field_: torch.Tensor) -> Any:
    """Inverse of ``_Text.as_array``, as the stack that TorchRL's storages give."""
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


# --- tensorclasses -------------------------------------------------------------------------------

_classes: dict[str, type] = {}
"""Tensorclasses of which this process wrote rows, by name; they may be local to a function."""


def _class_name(data: Any) -> str:
    cls = type(data)
    module = "__main__" if cls.__module__ == "__mp_main__" else cls.__module__
    name = f"{module}:{cls.__qualname__}"
    _classes[name] = cls
    return name


def _class_named(name: str) -> type[Any]:
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


# --- from TensorDicts ----------------------------------------------------------------------------


class _Parts(NamedTuple):
    """A batch taken apart: columns, and the nodes that do not follow from them, by path."""

    columns: dict[Path, torch.Tensor | _Text]
    nodes: dict[Path, tuple[torch.Size, str]]

    def node_specs(self) -> tuple[NodeSpec, ...]:
        return tuple(
            NodeSpec(path, tuple(size[1:]), kind)
            for path, (size, kind) in sorted(self.nodes.items())
        )


def _parts_of(data: Any) -> _Parts:
    """
    Raises:
        ConfigurationError: if ``data`` holds something that cannot be stored.
    """
    plain = _torchrl.plain_leaves(data)
    if plain is not None:
        columns, sizes = plain
        parts = _Parts(columns, {path: (size, "") for path, size in sizes.items()} if sizes else {})
    elif not is_tensor_collection(data) or is_non_tensor(data):
        raise ConfigurationError(
            f"shared storages hold TensorDicts and tensorclasses, got {type(data).__name__}; wrap "
            "the data in a TensorDict"
        )
    else:
        parts = _Parts({}, {})
        _take_apart(data, (), data.batch_size, parts)
    if not SAMPLING_KEYS.isdisjoint(_torchrl.names_in(data)):
        _leave_out_draw(parts)
    if not parts.columns:
        raise ConfigurationError("a row needs at least one tensor, got an empty TensorDict")
    return parts


def _leave_out_draw(parts: _Parts) -> None:
    """Drop what a sample says of its draw, out of rows that come from one.

    Raises:
        ConfigurationError: it is a column of the user's own, which no sample would show.
    """
    found = {path[0] for path in (*parts.columns, *parts.nodes) if path} & SAMPLING_KEYS
    if "index" not in found or len(found) == 1:
        name = min(found)
        raise ConfigurationError(
            f"the rows have a column {name!r}, a name under which a sample says which rows it "
            f"drew: rename it, rows.rename_key_({name!r}, 'row_{name}'); if it came with the rows "
            f"out of another buffer, leave it out, rows.exclude({name!r})"
        )
    for kept in (parts.columns, parts.nodes):
        for path in [path for path in kept if path and path[0] in found]:
            del kept[path]


def _take_apart(data: Any, path: Path, rows: torch.Size, parts: _Parts) -> None:
    """:func:`_torchrl.plain_leaves` for any kind of tensor collection."""
    size, kind = data.batch_size, ""
    if is_tensorclass(data):
        kind = _class_name(data)
        odd = [name for name, value in data._non_tensordict.items() if value is not None]
        if odd:
            raise ConfigurationError(
                f"field {odd[0]!r} of a {type(data).__name__} is neither a tensor nor kept as "
                "one of its TensorDict's values"
            )
        data = data._tensordict
    keys = list(data.keys())
    if (size != rows or kind or not keys) and (path or kind):
        parts.nodes[path] = (size, kind)
    if isinstance(data, LazyStackedTensorDict):
        extra = {key for each in data.tensordicts for key in each.keys()}.difference(keys)
        if extra:
            raise ConfigurationError(
                f"keys {sorted(map(str, extra))} are in some of the stacked rows only"
            )
    for key in keys:
        below = (*path, key)
        try:
            value = data.get(key)
        except RuntimeError as error:  # a stack of tensors of several shapes
            raise ConfigurationError(
                f"key {_name(below)!r} has another shape in some rows: {error}"
            ) from error
        if isinstance(value, torch.Tensor):
            parts.columns[below] = value
        elif is_non_tensor(value):
            parts.columns[below] = _encoded(value, below)
        elif is_tensor_collection(value):
            _take_apart(value, below, rows, parts)
        else:
            raise ConfigurationError(f"key {_name(below)!r} holds a {type(value).__name__}")


def spec_of(data: TensorDictBase) -> RowSpec:
    """The row spec of a batch ``[n, ...]``: what follows the first dimension."""
    parts = _parts_of(data)
    return RowSpec(
        tuple(_column_spec(path, value) for path, value in sorted(parts.columns.items())),
        tuple(data.batch_size[1:]),
        parts.node_specs(),
    )


def _column_spec(path: Path, value: torch.Tensor | _Text) -> ColumnSpec:
    if not isinstance(value, _Text):
        return ColumnSpec(path, value.dtype, tuple(value.shape[1:]))
    width = max(SHORTEST_TEXT, 1 << (2 * value.longest - 1).bit_length())
    return ColumnSpec(path, torch.uint8, (*value.shape[1:], width), True)


def matching_columns(
    data: TensorDictBase, spec: RowSpec, stream: Callable[[], int] = int
) -> list[np.ndarray]:
    """The columns of a batch in the order of the spec, as :func:`array_of` gives them.

    Args:
        stream: gives the number for ``spec.STREAM``, where rows have it.

    Raises:
        ConfigurationError: naming every key that is missing, unknown, or of another shape or
            dtype. Nothing was written then.
    """
    parts = _parts_of(data)
    found = parts.columns
    problems = []
    ordered = []
    rows = data.batch_size[0]
    for column in spec.columns:
        if column.key == STREAM.key and column == STREAM:  # the first is faster
            found[column.key] = torch.empty(0)  # whatever came out of another buffer
            ordered.append(np.full(rows, stream()))
            continue
        value = found.get(column.key)
        if value is None:
            problems.append(f"missing {_name(column.key)!r}")
            continue
        if column.text or isinstance(value, _Text):
            problem = _text_problem(value, column, rows)
            if problem is None:
                assert isinstance(value, _Text)
                ordered.append(value.as_array(column.shape[-1]))
            else:
                problems.append(problem)
        elif value.dtype != column.dtype or value.shape != (rows, *column.shape):
            problems.append(
                f"{_name(column.key)!r} is {value.dtype} {list(value.shape[1:])} per row, stored "
                f"as {column.dtype} {list(column.shape)}"
            )
        else:
            ordered.append(array_of(value))
    if len(found) > len(spec.columns) - sum(p.startswith("missing") for p in problems):
        known = {column.key for column in spec.columns}
        problems += [f"unknown {_name(path)!r}" for path in found if path not in known]
    if parts.nodes or spec.nodes:
        problems += _node_problems(parts.node_specs(), spec)
    if problems:
        raise ConfigurationError(_DIFFERENT + "; ".join(problems))
    return ordered


_DIFFERENT = "the data does not match the rows of the shared buffer: "


def _text_problem(value: torch.Tensor | _Text, column: ColumnSpec, rows: int) -> str | None:
    name = _name(column.key)
    if not isinstance(value, _Text):
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


def _node_problems(given: tuple[NodeSpec, ...], spec: RowSpec) -> list[str]:
    here = {node.key: node for node in given}
    there = {node.key: node for node in spec.nodes}
    return [
        f"{_name(key) if key else 'a row'!r} is {_node_text(here.get(key))}, stored as "
        f"{_node_text(there.get(key))}"
        for key in sorted({*here, *there})
        if here.get(key) != there.get(key)
    ]


def _node_text(node: NodeSpec | None) -> str:
    if node is None:
        return "a TensorDict of the rows' batch size, or not there"
    kind = node.tensorclass.partition(":")[2] or "TensorDict"
    return f"a {kind} of batch size [n, {', '.join(map(str, node.batch_dims))}]".replace(", ]", "]")


# --- to TensorDicts ------------------------------------------------------------------------------


def tensors(columns: list[np.ndarray], spec: RowSpec) -> list[torch.Tensor]:
    """The inverse of :func:`array_of` for the columns of a batch; no copy."""
    return [
        value if value.dtype == column.dtype else value.view(column.dtype)
        for value, column in zip(map(torch.from_numpy, columns), spec.columns, strict=True)
    ]


@dataclass
class _Node:
    """A TensorDict of a row, with the numbers of its columns and its nodes, by name."""

    batch_dims: tuple[int, ...]
    tensorclass: str = ""
    columns: list[tuple[str, int]] = field(default_factory=list)
    nodes: dict[str, _Node] = field(default_factory=dict)

    @classmethod
    def of(cls, spec: RowSpec) -> _Node:
        root = cls(spec.batch_dims)
        for number, column in enumerate(spec.columns):
            if column == STREAM:
                continue
            root._at(column.key[:-1]).columns.append((column.key[-1], number))
        for node in spec.nodes:
            found = root._at(node.key)
            found.batch_dims, found.tensorclass = node.batch_dims, node.tensorclass
        return root

    def _at(self, path: Path, root: _Node | None = None) -> _Node:
        node = root = root or self
        for part in path:
            node = node.nodes.setdefault(part, _Node(root.batch_dims))
        return node


def build(
    columns: Sequence[torch.Tensor], spec: RowSpec, batch: tuple[int, ...], *, raw: bool = False
) -> TensorDict:
    """A TensorDict, or tensorclass, of the columns, with batch size ``(*batch, *spec.batch_dims)``.

    Args:
        raw: TensorDicts of tensors only, also where the rows hold something else; for rows that
            may be torn, or that nobody is going to see.

    Raises:
        ConfigurationError: rows of a tensorclass that this process has not imported.
    """
    plan = spec.__dict__.get("_plan")  # a cache: specs are few, and compared by their fields
    if plan is None:
        plan = spec.__dict__["_plan"] = _Node.of(spec)
    return _built(plan, columns, spec, batch, raw)


def _built(
    node: _Node, columns: Sequence[torch.Tensor], spec: RowSpec, batch: tuple[int, ...], raw: bool
) -> Any:
    kind = _class_named(node.tensorclass) if node.tensorclass and not raw else None
    source: dict[str, Any] = {}
    for name, number in node.columns:
        text = spec.columns[number].text and not raw
        source[name] = _decoded(columns[number]) if text else columns[number]
    for name, below in node.nodes.items():
        source[name] = _built(below, columns, spec, batch, raw)
    data = _torchrl.unchecked_tensordict(source, torch.Size((*batch, *node.batch_dims)))
    return data if kind is None else kind.from_tensordict(data)


# --- between specs -------------------------------------------------------------------------------


def fitted(arrays: list[np.ndarray], spec: RowSpec, own: RowSpec) -> list[np.ndarray]:
    """Columns of rows with ``spec`` for a buffer whose rows have ``own``; fields for text may
    differ in size.

    Raises:
        ConfigurationError: naming what does not match. Nothing was written then.
    """
    if spec is own or spec == own:
        return arrays
    given = {
        column.key: (column, array) for column, array in zip(spec.columns, arrays, strict=True)
    }
    problems = []
    ordered = []
    for column in own.columns:
        other, array = given.pop(column.key, (None, None))
        if column == STREAM and array is None:
            ordered.append(np.zeros(len(arrays[0]), np.int64))
            continue
        if other is None or array is None:
            problems.append(f"missing {_name(column.key)!r}")
        elif column.text and other.text and column.shape[:-1] == other.shape[:-1]:
            resized = _resized(array, column.shape[-1])
            if resized is None:
                problems.append(
                    f"{_name(column.key)!r} takes more than the {column.shape[-1]} bytes of text "
                    "that the first rows of the buffer made it: write the longest first"
                )
            else:
                ordered.append(resized)
        elif column != other:
            problems.append(
                f"{_name(column.key)!r} is {other.dtype} {list(other.shape)} per row, stored as "
                f"{column.dtype} {list(column.shape)}"
            )
        else:
            ordered.append(array)
    given.pop(STREAM.key, None)
    problems += [f"unknown {_name(key)!r}" for key in given]
    problems += _node_problems(spec.nodes, own)
    if spec.batch_dims != own.batch_dims:
        problems.append(
            f"the batch size is [n, {list(spec.batch_dims)}], stored [n, {list(own.batch_dims)}]"
        )
    if problems:
        raise ConfigurationError(_DIFFERENT + "; ".join(problems))
    return ordered


def _resized(array: np.ndarray, width: int) -> np.ndarray | None:
    """A field for text with another size; None if something does not fit."""
    if array[..., width:].any():
        return None
    resized = np.zeros((*array.shape[:-1], width), np.uint8)
    kept = min(width, array.shape[-1])
    resized[..., :kept] = array[..., :kept]
    return resized
