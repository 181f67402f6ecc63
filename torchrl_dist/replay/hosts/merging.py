"""Merge a client's small operations, because each operation costs the host time and adds bytes to
the message.

Only neighbouring operations are merged, so that their order stays. They are merged only if the
merged operation has the same effect.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import cast

import numpy as np

from torchrl_dist.replay.hosts.messages import CountSamples, Operation, SetPriorities, Write
from torchrl_dist.replay.row.packing import pack, spec_from_text, unpack
from torchrl_dist.replay.row.stacks import joined

_MOST_ENTRIES = 4096  # the most entries of merged priority updates


def merged(operations: Sequence[Operation], most_rows: int) -> list[tuple[Operation, int]]:
    """Return fewer operations with the same effect, each with the number of operations that it
    replaces.

    Args:
        most_rows: the most rows of a merged ``Write``. They must fit into one reservation of the
            host, so that they are written as a whole or not at all.
    """
    if len(operations) < 2:
        return [(operation, 1) for operation in operations]
    found = []
    run: list[Operation] = []
    kind: Hashable = None
    entries = 0
    slots: set[int] = set()
    for operation in operations:
        own_kind, size = _kind(operation)
        own_slots = operation.slot.tolist() if isinstance(operation, SetPriorities) else []
        if (
            not run
            or own_kind is None
            or own_kind != kind
            or entries + size > (most_rows if isinstance(operation, Write) else _MOST_ENTRIES)
            # an update with two priorities for a row might store the earlier one
            or not slots.isdisjoint(own_slots)
        ):
            if run:
                found.append((_joined(run), len(run)))
            run, kind, entries, slots = [], own_kind, 0, set()
        run.append(operation)
        entries += size
        slots.update(own_slots)
    found.append((_joined(run), len(run)))
    return found


def _kind(operation: Operation) -> tuple[Hashable, int]:
    """Return a key and the operation's number of entries.

    Operations with equal keys may be merged. Operations whose key is None are never merged."""
    if isinstance(operation, Write):
        return (operation.spec, operation.priority is None), operation.count
    if isinstance(operation, SetPriorities):
        return operation.generation is None, operation.slot.size
    if isinstance(operation, CountSamples):
        return CountSamples, 0
    return None, 0


def _joined(run: list[Operation]) -> Operation:
    first = run[0]  # all have the same type, because their ``_kind`` is the same
    if len(run) == 1:
        return first
    if isinstance(first, Write):
        writes = cast(list[Write], run)
        rows = [unpack(each.packed) for each in writes]
        arrays = joined(rows, spec_from_text(first.spec))
        return Write(
            first.spec,
            sum(each.count for each in writes),
            pack(arrays, copy=False),
            _concatenated([each.priority for each in writes]),
            tuple(part for each in writes for part in each.parts),
        )
    if isinstance(first, SetPriorities):
        updates = cast(list[SetPriorities], run)
        return SetPriorities(
            np.concatenate([each.slot for each in updates]),
            _concatenated([each.generation for each in updates]),
            np.concatenate([each.priority for each in updates]),
            tuple(each.slot.size for each in updates),
        )
    return CountSamples(sum(each.rows for each in cast(list[CountSamples], run)))


def _concatenated(arrays: list[np.ndarray | None]) -> np.ndarray | None:
    """Concatenate arrays. If the first is None, all are None, and the result is None."""
    return None if arrays[0] is None else np.concatenate(cast(list[np.ndarray], arrays))


def parts_of(operation: Operation) -> list[Operation]:
    """Split a merged operation into its parts."""
    if isinstance(operation, SetPriorities) and operation.parts:
        ends = np.cumsum(operation.parts).tolist()
        return [
            SetPriorities(
                operation.slot[start:stop],
                None if operation.generation is None else operation.generation[start:stop],
                operation.priority[start:stop],
            )
            for start, stop in zip([0, *ends[:-1]], ends, strict=True)
        ]
    if isinstance(operation, Write) and len(operation.parts) > 1:
        arrays, of_rows = unpack(operation.packed), len(spec_from_text(operation.spec).columns)
        found: list[Operation] = []
        start = 0
        for number, count in operation.parts:
            rows = slice(start, start + count)
            # each part gets all frames of the operation
            part = [array[rows] for array in arrays[:of_rows]] + arrays[of_rows:]
            packed = pack(part, copy=False)
            priority = None if operation.priority is None else operation.priority[rows]
            found.append(Write(operation.spec, count, packed, priority, ((number, count),)))
            start += count
        return found
    return [operation]
