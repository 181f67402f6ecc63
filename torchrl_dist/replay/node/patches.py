"""Change some values of published rows. The rows keep their generation.

A reader copies rows without the lock, and compares their versions to notice changes during the
copy. But a patched row gets its old version back. Therefore the word ``PATCHES`` grows by 1 when a
patch begins and when it ends, and readers compare it, too (:func:`copied`). The word is odd during
a patch. Patches happen under the lock. If a process is killed or interrupted during a patch, the
rows' versions stay odd, and repair drops these rows. A row thus has all its old values, has all its
new values, or is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from tensordict import NestedKey, TensorDictBase, unravel_key

from torchrl_dist.errors import ConfigurationError
from torchrl_dist.replay.node.directory import ReplayDirectory
from torchrl_dist.replay.node.tables import Word
from torchrl_dist.replay.row.spec import HIDDEN, RowSpec
from torchrl_dist.tensors import array_of

_BYTES_AT_ONCE = 2**18  # how many bytes of rows are copied before the lock is released
_T = TypeVar("_T")


class Patch(NamedTuple):
    """New values for rows.

    Attributes:
        columns: the new values [n, ...], by the number of their column.
        version: the number of a column in ``columns`` that holds one number per row. A row is
            patched only if its new number is not below the stored one. If None, every row is
            patched.
        newer: whether the new number must be above the stored number, so that an equal number is
            rejected.
    """

    columns: dict[int, np.ndarray]
    version: int | None = None
    newer: bool = False


def patch_of(
    spec: RowSpec,
    count: int,
    values: Mapping[NestedKey, Any] | TensorDictBase,
    version_key: NestedKey | None,
    version: Any,
    newer: bool,
) -> Patch:
    """Return the patch of ``count`` rows that the given arguments of ``update_if_present``
    describe.

    Raises:
        KeyError: the rows do not have one of the keys.
        ConfigurationError: values do not have the dtype and shape of the rows, or only one of
            ``version_key`` and ``version`` was given.
    """
    if (version_key is None) != (version is None):
        raise ConfigurationError(
            f"got version_key={version_key!r} and version={version!r}: pass both, or neither"
        )
    numbers = {column.key: at for at, column in enumerate(spec.columns) if column not in HIDDEN}
    columns: dict[int, np.ndarray] = {}

    def add(key: Any, value: Any) -> int:
        path = unravel_key(key)
        number = numbers.get((path,) if isinstance(path, str) else path)
        if number is None:
            raise KeyError(f"the rows have no {key!r}, only {list(numbers)}; patch one of these")
        column, tensor = spec.columns[number], torch.as_tensor(value).detach()
        if column.text or column.stack:
            kind = (
                "values that are not tensors" if column.text else "frames that several rows share"
            )
            raise ConfigurationError(
                f"{key!r} holds {kind}, which cannot be patched; write whole rows instead, with "
                "storage[index] = rows"
            )
        if tensor.dtype != column.dtype or tensor.numel() != count * np.prod(column.shape):
            raise ConfigurationError(
                f"got {tensor.dtype} {list(tensor.shape)} for {key!r}, expected {column.dtype} "
                f"[{', '.join(map(str, (count, *column.shape)))}]; pass one value per index"
            )
        columns[number] = array_of(tensor.cpu().reshape(count, *column.shape).contiguous())
        return number

    for key, value in (
        values.items(True, True) if isinstance(values, TensorDictBase) else values.items()
    ):
        add(key, value)
    if version_key is None:
        return Patch(columns)
    if isinstance(version_key, str) and "." in version_key:
        raise ConfigurationError(
            f"version_key={version_key!r}: expected a tuple for a nested key; pass "
            f"{tuple(version_key.split('.'))!r}"
        )
    version = torch.as_tensor(version)
    own = set(columns)
    number = add(version_key, version.expand(count) if not version.ndim else version)
    if number in own:
        raise ConfigurationError(
            f"patch must not contain version_key={version_key!r}; leave this key out of patch, "
            "because the value of version= is written to this key of each patched row"
        )
    if np.prod(spec.columns[number].shape) != 1:
        raise ConfigurationError(
            f"version_key={version_key!r} holds {list(spec.columns[number].shape)} per row, "
            "expected one number per row; name a key with one number per row"
        )
    if spec.columns[number].dtype.is_complex:
        raise ConfigurationError(
            f"version_key={version_key!r} holds {spec.columns[number].dtype}, which has no order; "
            "name a key with real numbers"
        )
    return Patch(columns, number, newer)


def copied(directory: ReplayDirectory, copy: Callable[[], _T]) -> _T:
    """Return the copy of rows that ``copy()`` makes, with no patch half applied.

    The caller does not hold the lock, and compares the rows' versions afterwards."""
    words = directory.words
    patches = words[Word.PATCHES]
    rows = copy()
    if words[Word.PATCHES] != patches or patches & 1:
        with directory.lock():
            rows = copy()
    return rows


def apply_patch(
    directory: ReplayDirectory, slots: np.ndarray, generation: np.ndarray, patch: Patch
) -> tuple[np.ndarray, np.ndarray]:
    """Patch rows. Skip a row if its slot now holds another row.

    Other processes may use the directory between two parts of a long patch.

    Args:
        slots, generation: int64 [n]. Slots below 0 name no row.

    Returns:
        Which rows were patched, and which were rejected because of their version, bool [n] each. If
        a row is named several times, it gets the values with the highest version or, without
        versions, the last values.

    Raises:
        ConfigurationError: a sampler finds rows, or a writer ranks rows, by one of the columns.
    """
    row_bytes = sum(values[:1].nbytes for values in patch.columns.values())
    at_once = max(1, _BYTES_AT_ONCE // max(1, row_bytes))
    order = np.argsort(slots, kind="stable")
    updated, rejected = np.zeros(slots.size, bool), np.zeros(slots.size, bool)
    first = 0
    while first < order.size:
        # all values for a row that is named several times are in one part
        last = order[min(first + at_once, order.size) - 1]
        stop = int(np.searchsorted(slots, slots[last], "right", sorter=order))
        part = order[first:stop]
        with directory.lock():
            updated[part], rejected[part] = _apply(directory, slots, generation, patch, part)
        first = stop
    return updated, rejected


def _apply(
    directory: ReplayDirectory,
    slots: np.ndarray,
    generation: np.ndarray,
    patch: Patch,
    part: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Patch the rows at positions ``part``, which is ordered by slot. Called under the lock."""
    words, arrays = directory.words, directory.arrays
    check_columns(directory, patch)
    versions = directory.versions[slots[part]]
    fresh = (versions & 1 == 0) & (versions > 0) & (versions >> 1 == generation[part])
    live = part[fresh & (slots[part] >= 0)]
    accepted = np.ones(live.size, bool)
    if patch.version is not None:
        new = patch.columns[patch.version][live].reshape(-1)
        stored = arrays[patch.version][slots[live]].reshape(-1)
        order = np.lexsort((np.arange(live.size), new, slots[live]))
        live, new, stored = live[order], new[order], stored[order]
        accepted = new > stored if patch.newer else new >= stored
    last = np.append(slots[live[1:]] != slots[live[:-1]], True)[: live.size]
    if patch.version is not None:
        accepted &= last
    chosen = live[accepted & last]
    if chosen.size:
        where = slots[chosen]
        directory.begin()
        words[Word.PATCHES] += 1
        directory.versions[where] |= 1
        for number, values in patch.columns.items():
            arrays[number][where] = values[chosen]
        directory.versions[where] -= 1
        words[Word.PATCHES] += 1
        directory.commit()
    return np.isin(part, live[accepted]), np.isin(part, live[~accepted])


def check_columns(directory: ReplayDirectory, patch: Patch) -> None:
    """
    Raises:
        ConfigurationError: a sampler finds rows, or a writer ranks rows, by one of the columns.
    """
    used = directory.words[Word.STRUCTURE]
    for number in patch.columns:
        if used >> bit_of(number) & 1:
            assert directory.rows is not None
            key = ".".join(directory.rows.columns[number].key)
            raise ConfigurationError(
                f"the patch changes {key!r}, but a sampler or writer uses this key to find or rank "
                "rows; leave the key out of the patch, or write whole rows with storage[index] = "
                "rows"
            )


def bit_of(column: int) -> int:
    """Return the bit of a column in the word ``STRUCTURE``. Columns from 62 on share a bit."""
    return min(column, 62)


class NoColumnError(ConfigurationError):
    """The rows do not have the key."""


def column_of(directory: ReplayDirectory, key: NestedKey, *, locked: bool = False) -> np.ndarray:
    """Return a column with one number per slot, in shared memory, and forbid patches of this
    column.

    Args:
        locked: whether the caller holds the directory's lock.

    Raises:
        NoColumnError: the rows do not have the key.
        ConfigurationError: the rows have the key, but its values are not one number per row.
    """
    spec = directory.rows
    assert spec is not None
    name = unravel_key(key)
    path = (name,) if isinstance(name, str) else name
    for number, (column, tensor) in enumerate(zip(spec.columns, directory.tensors, strict=True)):
        if column.key == path:
            if column.text or column.stack:
                raise ConfigurationError(
                    f"{key!r} holds text, or frames that several rows share; name a key with one "
                    "number per row"
                )
            if tensor.numel() != directory.capacity:
                raise ConfigurationError(
                    f"{key!r} has shape {list(column.shape)} per row; name a key with one number "
                    "per row"
                )
            with nullcontext() if locked else directory.lock():
                directory.words[Word.STRUCTURE] |= 1 << bit_of(number)
            return tensor.reshape(-1).numpy()
    raise NoColumnError(
        f"the rows have no {key!r}, only "
        f"{[column.key for column in spec.columns if column not in HIDDEN]}; name one of these"
    )
