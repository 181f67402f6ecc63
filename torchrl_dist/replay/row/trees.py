"""Rows that are dictionaries, lists and tuples of tensors, as in TorchRL's ``ReplayBuffer``.

Each tensor is a column. The spec of the rows has the *form* of the tree, which puts the columns
together again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from operator import itemgetter
from typing import Any

import torch

from torchrl_dist.errors import ConfigurationError

KIND = "torch:tree:"
"""What a spec says of rows that are trees; the form follows, as JSON."""

_TYPES: dict[str, Any] = {"list": list, "tuple": tuple}
_Path = tuple[str, ...]


def is_tree(data: Any) -> bool:
    """Whether rows are a tree. A list is not, because TorchRL's buffers take it for several rows,
    nor are a tuple's TensorDicts."""
    parts = (torch.Tensor, dict, list, tuple)
    return type(data) is dict or (
        type(data) is tuple and any(isinstance(each, parts) for each in data)
    )


def mapped(function: Callable[..., Any], *data: Any) -> Any:
    """Return the function of rows, or a tree with its results, for trees of equal form."""
    kind = type(data[0])
    if kind is dict:
        return {key: mapped(function, *(each[key] for each in data)) for key in data[0]}
    if kind in (list, tuple):
        return kind(mapped(function, *values) for values in zip(*data, strict=True))
    return function(*data)


def rows_in(data: Any) -> Iterator[Any]:
    """Yield the single rows of a batch."""
    if not is_tree(data):
        yield from data.unbind(0)
        return
    for row in range(batch_of(data)[0]):
        yield mapped(itemgetter(row), data)


def stacked(rows: list[Any]) -> Any:
    """Join single rows, which are trees.

    Raises:
        ConfigurationError: they are different trees, or their tensors have different shapes.
    """
    forms = [sorted(take_apart(row)[0]) for row in rows]
    if any(form != forms[0] for form in forms):
        raise ConfigurationError(
            f"the rows of a list are different trees, such as {forms[0]} and "
            f"{next(form for form in forms if form != forms[0])}; give all rows the same keys"
        )
    try:
        return mapped(lambda *values: torch.stack(values), *rows)
    except RuntimeError as error:
        raise ConfigurationError(
            f"the rows of a list have different shapes: {error}; give all rows the same shapes"
        ) from error


def batch_of(data: Any) -> torch.Size:
    """Return ``[n]`` for a tree of tensors ``[n, ...]``, or ``[]`` for a single row.

    Raises:
        ConfigurationError: it is not such a tree.
    """
    sizes = {value.shape[:1] for value in take_apart(data)[0].values()}
    if not sizes:
        raise ConfigurationError(f"a row needs at least one tensor, got {data}")
    if len(sizes) > 1:
        raise ConfigurationError(
            f"the tensors of a row have first dimensions {sorted(map(list, sizes))}, expected one "
            "value per row in each"
        )
    return sizes.pop()


def take_apart(data: Any) -> tuple[dict[_Path, torch.Tensor], str]:
    """Return the tensors by path, and :data:`KIND` with the form.

    Raises:
        ConfigurationError: there is something else in the tree.
    """
    leaves: dict[_Path, torch.Tensor] = {}
    return leaves, KIND + json.dumps(_form(data, (), leaves))


def _form(value: Any, path: _Path, leaves: dict[_Path, torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        leaves[path] = value
        return None
    kind = type(value)
    if kind not in (dict, list, tuple):
        raise ConfigurationError(
            f"a row has a value of type {kind.__name__} at {list(path)}: rows are TensorDicts, "
            "tensors, or dictionaries, lists and tuples of tensors; make it a tensor"
        )
    entries = value.items() if kind is dict else enumerate(value)
    found = [[key, _form(each, (*path, _name(key, path)), leaves)] for key, each in entries]
    return [kind.__name__, found]


def _name(key: Any, path: _Path) -> str:
    """Return the part of a path for a key. Numbers are in brackets, so that 1 and "1" differ."""
    if type(key) is int:
        return f"[{key}]"
    if type(key) is not str or key.startswith("["):
        raise ConfigurationError(
            f"a row has the key {key!r} at {list(path)}: keys are strings that do not begin with a "
            "bracket, or ints; rename it"
        )
    return key


def put_together(kind: str, columns: Mapping[_Path, torch.Tensor]) -> Any:
    """Invert :func:`take_apart`."""
    return _built(json.loads(kind.removeprefix(KIND)), (), columns)


def _built(form: Any, path: _Path, columns: Mapping[_Path, torch.Tensor]) -> Any:
    if form is None:
        return columns[path]
    kind, entries = form
    found = {key: _built(each, (*path, _name(key, path)), columns) for key, each in entries}
    return found if kind == "dict" else _TYPES[kind](found.values())


def in_order(kind: str) -> Any:
    """Return a form that is equal for dictionaries that differ only in the order of their keys."""
    return _sorted(json.loads(kind.removeprefix(KIND)))


def _sorted(form: Any) -> Any:
    if form is None:
        return None
    return [form[0], sorted(([_name(key, ()), _sorted(each)] for key, each in form[1]), key=str)]
