"""Convert TensorDicts into the flat columns of a row, with checks, and back. ``text`` handles
values that are not tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import (
    LazyStackedTensorDict,
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
from torchrl_dist.tensors import array_of

SAMPLING_KEYS = frozenset({"index", "index_generation", "priority_weight"})
"""The keys that a buffer adds to a sample. They describe the draw, not the row, so they are not
stored."""


_TENSOR = "torch:Tensor"
"""What a spec says of rows that are plain tensors. They are in the only column."""


def batch_of(data: Any) -> torch.Size:
    """Return the batch size of rows, ``[n, ...]``; ``[n]`` if they are a tensor or a tree."""
    if trees.is_tree(data):
        return trees.batch_of(data)
    return data.shape[:1] if isinstance(data, torch.Tensor) else data.batch_size


# --- from TensorDicts ----------------------------------------------------------------------------


class _Parts(NamedTuple):
    """The parts of a batch, by path: columns, and the nodes that do not follow from columns."""

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
        raise ConfigurationError("a row needs at least one tensor, got an empty TensorDict")
    return parts


def _leave_out_draw(parts: _Parts) -> None:
    """If the rows come from a sample, drop the columns that describe its draw.

    Raises:
        ConfigurationError: the rows have a column of the user's own under such a name, so no sample
            could show it.
    """
    found = {path[0] for path in (*parts.columns, *parts.nodes) if path} & SAMPLING_KEYS
    if "index" not in found or len(found) == 1:
        name = min(found)
        raise ConfigurationError(
            f"the rows have a column {name!r}, but a sample uses this name to say which rows it "
            f"drew: rename it, rows.rename_key_({name!r}, 'row_{name}'); if the rows are a sample "
            f"of another buffer, leave it out, rows.exclude({name!r})"
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
                "its TensorDict; make it a tensor or text, or drop it"
            )
        data = data._tensordict
    keys = list(data.keys())
    if (size != rows or kind or not keys) and (path or kind):
        parts.nodes[path] = (size, kind)
    if isinstance(data, LazyStackedTensorDict):
        extra = {key for each in data.tensordicts for key in each.keys()}.difference(keys)
        if extra:
            raise ConfigurationError(
                f"keys {sorted(map(str, extra))} are in some of the stacked rows only; give all "
                "rows the same keys"
            )
    for key in keys:
        below = (*path, key)
        try:
            value = data.get(key)
        except RuntimeError as error:  # a stack of tensors of several shapes
            raise ConfigurationError(
                f"key {shown(below)!r} has another shape in some rows; pad it to one shape: {error}"
            ) from error
        if isinstance(value, torch.Tensor):
            parts.columns[below] = value
        elif is_non_tensor(value):
            parts.columns[below] = encoded(value, below)
        elif is_tensor_collection(value):
            _take_apart(value, below, rows, parts)
        else:
            raise ConfigurationError(
                f"key {shown(below)!r} holds a {type(value).__name__}; make it a tensor, or drop it"
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
        return ColumnSpec(path, value.dtype, tuple(value.shape[1:]))
    return ColumnSpec(path, torch.uint8, (*value.shape[1:], value.width), True)


_HIDDEN_KEYS = frozenset(column.key for column in HIDDEN)


def matching_columns(
    data: TensorDictBase, spec: RowSpec, numbers: RowNumbers | None = None
) -> list[np.ndarray]:
    """Return the columns of a batch in the order of the spec, as :func:`array_of` returns them.

    Args:
        numbers: gives the numbers for hidden columns, if rows have some. Default: zeros.

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
        if column.key in _HIDDEN_KEYS and column in HIDDEN:  # keys first: faster
            unknown = np.zeros(rows, np.int64)
            ordered.append(unknown if numbers is None else numbers.of(column, rows, found))
            found[column.key] = torch.empty(0)  # replaces the numbers from another buffer
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
                f"{shown(column.key)!r} is {value.dtype} {list(value.shape[1:])} per row, stored "
                f"as {column.dtype} {list(column.shape)}"
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


_DIFFERENT = "the data does not match the rows of the shared buffer: "


def node_problems(given: tuple[NodeSpec, ...], spec: RowSpec) -> list[str]:
    """Return how nodes differ from those of a spec. Dictionaries may have their keys in any
    order."""
    here = {node.key: node for node in given}
    there = {node.key: node for node in spec.nodes}
    return [
        f"{shown(key) if key else 'a row'!r} is {_node_text(here.get(key))}, stored as "
        f"{_node_text(there.get(key))}"
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
        return "a TensorDict of the rows' batch size, or not there"
    if node.tensorclass.startswith(trees.KIND):
        return f"a tree {node.tensorclass.removeprefix(trees.KIND)}"
    kind = node.tensorclass.partition(":")[2] or "TensorDict"
    return f"a {kind} of batch size [n, {', '.join(map(str, node.batch_dims))}]".replace(", ]", "]")


# --- to TensorDicts ------------------------------------------------------------------------------


def tensors(columns: list[np.ndarray], spec: RowSpec) -> list[torch.Tensor]:
    """Invert :func:`array_of` for the columns of a batch, or the arrays of its stored form (see
    ``row.stacks``), without a copy."""
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

    def _at(self, path: Path, root: _Node | None = None) -> _Node:
        node = root = root or self
        for part in path:
            node = node.nodes.setdefault(part, _Node(root.batch_dims))
        return node


def build(
    columns: Sequence[torch.Tensor], spec: RowSpec, batch: tuple[int, ...], *, raw: bool = False
) -> Any:
    """Return a TensorDict or tensorclass of the columns, of size ``(*batch, *spec.batch_dims)``, or
    the tensor or the tree if rows are plain tensors or trees.

    Args:
        raw: whether to leave texts undecoded and use plain TensorDicts instead of tensorclasses.
            Use it for rows that are not used, or that another process may be overwriting.

    Raises:
        ConfigurationError: the rows have a tensorclass that this process has not imported.
    """
    plan = spec.__dict__.get("_plan")  # cached on the spec, because there are few specs
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
                    "that the first rows of the buffer allow: write the longest text first"
                )
            else:
                ordered.append(resized)
        elif column != other:
            problems.append(
                f"{shown(column.key)!r} is {other.dtype} {list(other.shape)} per row, stored as "
                f"{column.dtype} {list(column.shape)}"
            )
        else:
            ordered.append(array)
    for hidden in HIDDEN:
        given.pop(hidden.key, None)
    problems += [f"unknown {shown(key)!r}" for key in given]
    problems += node_problems(spec.nodes, own)
    if spec.batch_dims != own.batch_dims:
        problems.append(
            f"the batch size is [n, {list(spec.batch_dims)}], stored [n, {list(own.batch_dims)}]"
        )
    if problems:
        raise ConfigurationError(_DIFFERENT + "; ".join(problems))
    return ordered
