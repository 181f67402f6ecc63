"""Arithmetic of the ring: the slots of a run of tickets. Pure functions on whole numbers.

A *ticket* is an int64 that counts rows ever reserved; a *slot* is ``ticket % capacity``.
"""

from __future__ import annotations

from typing import Any

import torch


def as_slots(index: Any) -> torch.Tensor:
    """Return an index of any shape as int64 on the CPU. Such a tensor itself is returned as it is.

    Raises:
        IndexError: the index has no whole numbers. 1.9 would silently name row 1, and a mask, also
            one of uint8, rows 0 and 1.
    """
    found = torch.as_tensor(index, device="cpu")
    if found.dtype is torch.int64:
        return found
    if found.dtype is torch.bool:
        raise IndexError("rows are named by their numbers here, got a mask; pass mask.nonzero()")
    if found.dtype is torch.uint8:  # which indexing takes for a mask, and a list of numbers not
        raise IndexError(
            "uint8 might be a mask or numbers; pass index.bool().nonzero() or index.long()"
        )
    if found.numel() and (found.is_floating_point() or found.is_complex()):
        raise IndexError(
            f"rows are named by whole numbers, got {found.dtype}: {found.reshape(-1)[:4].tolist()}"
        )
    return found.to(torch.int64)


def largest_reservation(capacity: int) -> int:
    """Return the most rows of one reservation.

    It is an eighth of the ring, so that ``len``, which omits rows being rewritten, stays high and
    several writers find room at once.
    """
    return max(1, capacity // 8)


def split_rows(rows: int, capacity: int, most: int | None = None) -> list[tuple[int, int]]:
    """Return row ranges ``(start, stop)`` of an extend, each small enough for one reservation.

    They have at most ``most`` rows.

    Of an extend longer than the ring, only the last ``capacity`` rows are kept, as if all had been
    written.
    """
    step = min(largest_reservation(capacity), most or capacity)
    first = max(0, rows - capacity)
    return [(start, min(start + step, rows)) for start in range(first, rows, step)]


def slot_ranges(first_ticket: int, count: int, capacity: int) -> list[tuple[int, int]]:
    """Return the slots of ``count`` tickets as one range, or two at the wrap-around.

    Requires ``count <= capacity``.
    """
    start = first_ticket % capacity
    stop = start + count
    if stop <= capacity:
        return [(start, stop)]
    return [(start, capacity), (0, stop - capacity)]


def overlaps(
    first_ticket: int, count: int, other_first: int, other_count: int, capacity: int
) -> bool:
    """Return whether two runs of tickets share a slot."""
    return (other_first - first_ticket) % capacity < count or (
        first_ticket - other_first
    ) % capacity < other_count


def first_free_ticket(
    cursor: int, count: int, claims: list[tuple[int, int]], capacity: int
) -> int | None:
    """Return the first ticket from ``cursor`` on whose ``count`` slots touch no claim.

    Args:
        cursor: the next ticket.
        count: rows wanted, at most ``capacity``.
        claims: ``(first_ticket, count)`` of every reservation in progress.
        capacity: slots of the ring.

    Returns:
        The ticket, or None if there is no such run within one lap.
    """
    ticket = cursor
    moved = True
    while moved:
        moved = False
        for first, rows in claims:
            if overlaps(ticket, count, first, rows, capacity):
                ticket += (first + rows - ticket) % capacity or capacity
                if ticket - cursor > capacity:
                    return None
                moved = True
    return ticket
