"""Convert TensorDicts into flat columns, with checks, and back.

The module ``text`` handles values that are not tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import (
    LazyStackedTensorDict,
    TensorDict,
    TensorDictBase,
    is_non_tensor,
    is_tensor_collection,
    is_tensorclass,
)

from torchrl_dist.errors import ConfigurationError
from torchrl_dist.replay.row import _torchrl, trees
from torchrl_dist.replay.row.numbers import RowNumbers
from torchrl_dist.replay.row.spec import HIDDEN, ColumnSpec, NodeSpec, RowSpec
from torchrl_dist.replay.row.text import (
    Path,
    Text,
    class_name,
    class_named,
    decoded,
    encoded,
    in_width,
    shown,
    text_problem,
)
from torchrl_dist.tensors import array_of, is_plain

SAMPLING_KEYS = frozenset({"index", "index_generation", "priority_weight"})
"""The keys that a buffer adds to a sample. They describe the draw, not the row, so they are not
stored."""


_TENSOR = "torch:Tensor"
"""The name that takes the place of a tensorclass in the spec of rows that are plain tensors. Such
rows have one column."""


def batch_of(data: Any) -> torch.Size:
    """Return the batch size of rows: ``[n, ...]``, or ``[n]`` if the rows are a tensor or a
    tree."""
    if trees.is_tree(data):
        return trees.batch_of(data)
    return data.shape[:1] if isinstance(data, torch.Tensor) else data.batch_size


# --- from TensorDicts ----------------------------------------------------------------------------


class _Parts(NamedTuple):
    """The parts of a batch by path: its columns, and the TensorDicts that cannot be derived from
    columns."""

    columns: dict[Path, torch.Tensor | Text]
    nodes: dict[Path, tuple[torch.Size, str]]

    def node_specs(self) -> tuple[NodeSpec, ...]:
        return tuple(
            NodeSpec(path, tuple(size[1:]), kind)
            for path, (size, kind) in sorted(self.nodes.items())
        )


def _parts_of(data: Any) -> _Parts:
    """Take a batch apart.

    Raises:
        ConfigurationError: ``data`` holds something that cannot be stored.
    """
    if isinstance(data, torch.Tensor):
        return _Parts({("tensor",): data}, {(): (data.shape[:1], _TENSOR)})
    if trees.is_tree(data):
        leaves, kind = trees.take_apart(data)
        return _Parts({**leaves}, {(): (batch_of(data), kind)})
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
        raise ConfigurationError(
            "a row needs at least one tensor, got an empty TensorDict; add a tensor"
        )
    return parts


def _leave_out_draw(parts: _Parts) -> None:
    """If the rows come from a sample, drop the columns that describe its draw.

    Raises:
        ConfigurationError: a column of the user's rows has a name in ``SAMPLING_KEYS``, so a sample
            could not show that column.
    """
    found = {path[0] for path in (*parts.columns, *parts.nodes) if path} & SAMPLING_KEYS
    if "index" not in found or len(found) == 1:
        name = min(found)
        raise ConfigurationError(
            f"the rows have a column {name!r}, but a sample uses this name to say which rows it "
            f"drew; rename the column with rows.rename_key_({name!r}, 'row_{name}'), or if the "
            f"rows are a sample of another buffer, leave the column out with rows.exclude({name!r})"
        )
    for kept in (parts.columns, parts.nodes):
        for path in [path for path in kept if path and path[0] in found]:
            del kept[path]


def _take_apart(data: Any, path: Path, rows: torch.Size, parts: _Parts) -> None:
    """Do what :func:`_torchrl.plain_leaves` does, for any kind of tensor collection."""
    size, kind = data.batch_size, ""
    if is_tensorclass(data):
        kind = class_name(data)
        odd = [name for name, value in data._non_tensordict.items() if value is not None]
        if odd:
            raise ConfigurationError(
                f"field {odd[0]!r} of a {type(data).__name__} is neither a tensor nor stored in "
                "its TensorDict; make it a tensor or text, or leave it out"
            )
        data = data._tensordict
    keys = list(data.keys())
    if (size != rows or kind or not keys) and (path or kind):
        parts.nodes[path] = (size, kind)
    if isinstance(data, LazyStackedTensorDict):
        extra = {key for each in data.tensordicts for key in each.keys()}.difference(keys)
        if extra:
            raise ConfigurationError(
                f"keys {sorted(map(str, extra))} are missing in some of the stacked rows; give all "
                "rows the same keys"
            )
    for key in keys:
        below = (*path, key)
        try:
            value = data.get(key)
        except RuntimeError as error:  # a stack of tensors of several shapes
            raise ConfigurationError(
                f"key {shown(below)!r} has different shapes in different rows; pad its values to "
                f"one shape ({error})"
            ) from error
        if isinstance(value, torch.Tensor):
            parts.columns[below] = value
        elif is_non_tensor(value):
            parts.columns[below] = encoded(value, below)
        elif is_tensor_collection(value):
            _take_apart(value, below, rows, parts)
        else:
            raise ConfigurationError(
                f"key {shown(below)!r} holds a {type(value).__name__}; make it a tensor, or leave "
                "it out"
            )


def spec_of(data: TensorDictBase) -> RowSpec:
    """Return the spec of the rows of a batch ``[n, ...]``."""
    parts = _parts_of(data)
    return RowSpec(
        tuple(_column_spec(path, value) for path, value in sorted(parts.columns.items())),
        tuple(batch_of(data)[1:]),
        parts.node_specs(),
    )


def _column_spec(path: Path, value: torch.Tensor | Text) -> ColumnSpec:
    if not isinstance(value, Text):
        if value.layout is not torch.strided or value.is_nested or value.is_quantized:
            raise ConfigurationError(
                f"key {shown(path)!r} holds a sparse, nested or quantized tensor; make it a dense "
                "tensor, with to_dense(), torch.nested.to_padded_tensor() or int_repr()"
            )
        return ColumnSpec(path, value.dtype, tuple(value.shape[1:]))
    return ColumnSpec(path, torch.uint8, (*value.shape[1:], value.width), True)


_HIDDEN_KEYS = frozenset(column.key for column in HIDDEN)


def matching_columns(
    data: TensorDictBase, spec: RowSpec, numbers: RowNumbers | None = None
) -> list[np.ndarray]:
    """Return the columns of a batch in the order of the spec, as :func:`array_of` returns them.

    Args:
        numbers: gives the numbers for hidden columns, if the rows have such columns. Default:
            zeros.

    Raises:
        ConfigurationError: a key is missing, unknown, or of another shape or dtype. The error
            names every such key.
    """
    parts = _parts_of(data)
    found = parts.columns
    problems = []
    ordered = []
    rows = batch_of(data)[0]
    for column in spec.columns:
        if column.key in _HIDDEN_KEYS and column in HIDDEN:  # testing the key first is faster
            unknown = np.zeros(rows, np.int64)
            ordered.append(unknown if numbers is None else numbers.of(column, rows, found))
            found[column.key] = torch.empty(0)  # ignore numbers from another buffer
            continue
        value = found.get(column.key)
        if value is None:
            problems.append(f"missing {shown(column.key)!r}")
            continue
        if column.text or isinstance(value, Text):
            problem = text_problem(value, column, rows)
            if problem is None:
                assert isinstance(value, Text)
                ordered.append(value.as_array(column.shape[-1]))
            else:
                problems.append(problem)
        elif value.dtype != column.dtype or value.shape != (rows, *column.shape):
            problems.append(
                f"{shown(column.key)!r} is {value.dtype} {list(value.shape[1:])} per row, but the "
                f"buffer stores it as {column.dtype} {list(column.shape)}"
            )
        else:
            ordered.append(array_of(value))
    if len(found) > len(spec.columns) - sum(p.startswith("missing") for p in problems):
        known = {column.key for column in spec.columns}
        problems += [f"unknown {shown(path)!r}" for path in found if path not in known]
    if parts.nodes or spec.nodes:
        problems += node_problems(parts.node_specs(), spec)
    if problems:
        raise ConfigurationError(_DIFFERENT + "; ".join(problems))
    return ordered


def plain_columns(data: Any, spec: RowSpec) -> list[torch.Tensor] | None:
    """Return the columns of a batch in the order of the spec, each contiguous and in memory that
    :func:`array_of` would share.

    Returns:
        None if the columns are not exactly those of the spec, or a column has another form.
    """
    plain = _torchrl.plain_leaves(data) if type(data) is TensorDict and data.batch_size else None
    if plain is None or plain[1] or spec.nodes or len(plain[0]) != len(spec.columns):
        return None
    found, rows, columns = plain[0], tuple(data.batch_size[:1]), []
    for column in spec.columns:
        value = found.get(column.key)
        if (
            value is None
            or not is_plain(value)
            or value.dtype != column.dtype
            or value.shape != rows + column.shape
            or column.stack
            or column.text
            or not value.is_contiguous()
        ):
            return None
        columns.append(value)
    return columns


_DIFFERENT = "the data does not match the rows of the shared buffer: "


def node_problems(given: tuple[NodeSpec, ...], spec: RowSpec) -> list[str]:
    """Return how nodes differ from those of a spec. The order of a dictionary's keys does not
    matter."""
    here = {node.key: node for node in given}
    there = {node.key: node for node in spec.nodes}
    return [
        f"{shown(key) if key else 'a row'!r} is {_node_text(here.get(key))}, but the buffer stores "
        f"it as {_node_text(there.get(key))}"
        for key in sorted({*here, *there})
        if here.get(key) != there.get(key) and not _same_tree(here.get(key), there.get(key))
    ]


def _same_tree(one: NodeSpec | None, other: NodeSpec | None) -> bool:
    """Whether both are trees with the same keys, in any order."""
    kinds = [each.tensorclass for each in (one, other) if each is not None]
    if len(kinds) < 2 or not all(kind.startswith(trees.KIND) for kind in kinds):
        return False
    return trees.in_order(kinds[0]) == trees.in_order(kinds[1])


def _node_text(node: NodeSpec | None) -> str:
    if node is None:
        return "a TensorDict of the rows' batch size (or missing)"
    if node.tensorclass.startswith(trees.KIND):
        return f"a tree {node.tensorclass.removeprefix(trees.KIND)}"
    kind = node.tensorclass.partition(":")[2] or "TensorDict"
    return f"a {kind} of batch size [n, {', '.join(map(str, node.batch_dims))}]".replace(", ]", "]")


# --- to TensorDicts ------------------------------------------------------------------------------


def tensors(columns: list[np.ndarray], spec: RowSpec) -> list[torch.Tensor]:
    """Convert the columns of a batch, or the arrays of its stored form (see ``row.stacks``), back
    to tensors without a copy. This inverts :func:`array_of`."""
    own = spec.columns if len(columns) == len(spec.columns) else spec.stored.values()
    return [
        value if value.dtype == column.dtype else value.view(column.dtype)
        for value, column in zip(map(torch.from_numpy, columns), own, strict=True)
    ]


@dataclass
class _Node:
    """A TensorDict of a row: the numbers of its columns, and the TensorDicts inside it, by name."""

    batch_dims: tuple[int, ...]
    tensorclass: str = ""
    columns: list[tuple[str, int]] = field(default_factory=list)
    nodes: dict[str, _Node] = field(default_factory=dict)

    @classmethod
    def of(cls, spec: RowSpec) -> _Node:
        root = cls(spec.batch_dims)
        for number, column in enumerate(spec.columns):
            if column in HIDDEN:
                continue
            root._at(column.key[:-1]).columns.append((column.key[-1], number))
        for node in spec.nodes:
            found = root._at(node.key)
            found.batch_dims, found.tensorclass = node.batch_dims, node.tensorclass
        return root

    def _at(self, path: Path) -> _Node:
        node = self
        for part in path:
            node = node.nodes.setdefault(part, _Node(self.batch_dims))
        return node


def build(
    columns: Sequence[torch.Tensor], spec: RowSpec, batch: tuple[int, ...], *, raw: bool = False
) -> Any:
    """Build rows from their columns. Return a TensorDict or tensorclass of batch size
    ``(*batch, *spec.batch_dims)``. If rows are plain tensors or trees, return a tensor or a tree.

    Args:
        raw: whether to leave texts undecoded and to use plain TensorDicts instead of tensorclasses.
            Use ``raw`` for rows that nothing will read, or that another process may be overwriting.

    Raises:
        ConfigurationError: the rows have a tensorclass that this process has not imported.
    """
    plan = spec.__dict__.get("_plan")  # cached on the spec, because specs are few
    if plan is None:
        plan = spec.__dict__["_plan"] = _Node.of(spec)
    if plan.tensorclass == _TENSOR:
        value = columns[plan.columns[0][1]]
        return _torchrl.unchecked_tensordict({"tensor": value}, torch.Size(batch)) if raw else value
    if plan.tensorclass.startswith(trees.KIND) and not raw:
        found = {column.key: value for column, value in zip(spec.columns, columns, strict=True)}
        return trees.put_together(plan.tensorclass, found)
    return _built(plan, columns, spec, batch, raw)


def _built(
    node: _Node, columns: Sequence[torch.Tensor], spec: RowSpec, batch: tuple[int, ...], raw: bool
) -> Any:
    kind = class_named(node.tensorclass) if node.tensorclass and not raw else None
    source: dict[str, Any] = {}
    for name, number in node.columns:
        text = spec.columns[number].text and not raw
        source[name] = decoded(columns[number]) if text else columns[number]
    for name, below in node.nodes.items():
        source[name] = _built(below, columns, spec, batch, raw)
    data = _torchrl.unchecked_tensordict(source, torch.Size((*batch, *node.batch_dims)))
    return data if kind is None else kind.from_tensordict(data)


# --- between specs -------------------------------------------------------------------------------


def fitted(arrays: list[Any], spec: RowSpec, own: RowSpec) -> list[Any]:
    """Convert columns of rows with ``spec`` for a buffer whose rows have the spec ``own``.

    The specs may differ only in the sizes of fields for text.

    Raises:
        ConfigurationError: the specs differ in anything else. The error names each difference.
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
        if column in HIDDEN and array is None:
            ordered.append(np.zeros(len(arrays[0]), np.int64))
            continue
        if other is None or array is None:
            problems.append(f"missing {shown(column.key)!r}")
        elif column.text and other.text and column.shape[:-1] == other.shape[:-1]:
            resized = in_width(array, column.shape[-1])
            if resized is None:
                problems.append(
                    f"{shown(column.key)!r} takes more than the {column.shape[-1]} bytes of text "
                    "that the first rows of the buffer allow; write a row with the longest text "
                    "first"
                )
            else:
                ordered.append(resized)
        elif column != other:
            problems.append(
                f"{shown(column.key)!r} is {other.dtype} {list(other.shape)} per row, but the "
                f"buffer stores it as {column.dtype} {list(column.shape)}"
            )
        else:
            ordered.append(array)
    for hidden in HIDDEN:
        given.pop(hidden.key, None)
    problems += [f"unknown {shown(key)!r}" for key in given]
    problems += node_problems(spec.nodes, own)
    if spec.batch_dims != own.batch_dims:
        problems.append(
            f"each row has batch size {list(spec.batch_dims)}, but the buffer stores rows of batch "
            f"size {list(own.batch_dims)}"
        )
    if problems:
        raise ConfigurationError(_DIFFERENT + "; ".join(problems))
    return ordered
