"""Rows that are dictionaries, lists and tuples of tensors, as in TorchRL's ``ReplayBuffer``.

Each tensor is a column. The spec of the rows contains the *form* of the tree, from which the tree
is rebuilt around the columns.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from operator import itemgetter
from typing import Any

import torch

from torchrl_dist.errors import ConfigurationError

KIND = "torch:tree:"
"""The start of the name that takes the place of a tensorclass in the spec of rows that are trees.
The form of the tree follows it, as JSON."""

_TYPES: dict[str, Any] = {"list": list, "tuple": tuple}
_Path = tuple[str, ...]


def is_tree(data: Any) -> bool:
    """Whether rows are a tree. A list is not a tree, because TorchRL's buffers treat a list as
    several rows. A tuple is a tree only if it holds a tensor, dictionary, list or tuple."""
    parts = (torch.Tensor, dict, list, tuple)
    return type(data) is dict or (
        type(data) is tuple and any(isinstance(each, parts) for each in data)
    )


def mapped(function: Callable[..., Any], *data: Any) -> Any:
    """Apply a function to the tensors of trees of equal form. Return the tree of the results."""
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
        ConfigurationError: the rows are different trees, or their tensors have different shapes.
    """
    forms = [sorted(take_apart(row)[0]) for row in rows]
    if any(form != forms[0] for form in forms):
        raise ConfigurationError(
            f"the rows in a list have different keys, such as {forms[0]} and "
            f"{next(form for form in forms if form != forms[0])}; give all rows the same keys"
        )
    try:
        return mapped(lambda *values: torch.stack(values), *rows)
    except RuntimeError as error:
        raise ConfigurationError(
            f"the rows in a list have tensors of different shapes ({error}); give the tensors of "
            "all rows the same shapes"
        ) from error


def batch_of(data: Any) -> torch.Size:
    """Return ``[n]`` for a tree of tensors ``[n, ...]``, or ``[]`` for a single row.

    Raises:
        ConfigurationError: ``data`` is not a tree of tensors with equal first dimensions.
    """
    sizes = {value.shape[:1] for value in take_apart(data)[0].values()}
    if not sizes:
        raise ConfigurationError(f"a row needs at least one tensor, got {data}; add a tensor")
    if len(sizes) > 1:
        raise ConfigurationError(
            f"the first dimensions of the tensors are {sorted(map(list, sizes))}, but all of them "
            "must be the number of rows; give each tensor one value per row"
        )
    return sizes.pop()


def take_apart(data: Any) -> tuple[dict[_Path, torch.Tensor], str]:
    """Return the tensors by path, and the form as a text that begins with :data:`KIND`.

    Raises:
        ConfigurationError: the tree contains a value that is neither a tensor nor a dictionary,
            list or tuple, or a key that cannot be part of a path.
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
            f"a row has a value of type {kind.__name__} at {list(path)}, but rows are TensorDicts, "
            "tensors, or dictionaries, lists and tuples of tensors; convert this value to a tensor"
        )
    entries = value.items() if kind is dict else enumerate(value)
    found = [[key, _form(each, (*path, _name(key, path)), leaves)] for key, each in entries]
    return [kind.__name__, found]


def _name(key: Any, path: _Path) -> str:
    """Return the part of a path that stands for a key. Numbers get brackets, so that 1 and "1"
    differ."""
    if type(key) is int:
        return f"[{key}]"
    if type(key) is not str or key.startswith("["):
        raise ConfigurationError(
            f"a row has the key {key!r} at {list(path)}, but keys must be ints, or strings that do "
            "not begin with a bracket; rename the key"
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
    """Return the form with sorted keys, so that the order of a dictionary's keys makes no
    difference."""
    return _sorted(json.loads(kind.removeprefix(KIND)))


def _sorted(form: Any) -> Any:
    if form is None:
        return None
    return [form[0], sorted(([_name(key, ()), _sorted(each)] for key, each in form[1]), key=str)]
