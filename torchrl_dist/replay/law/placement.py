"""The arithmetic of the ring: which slots consecutive tickets have. Pure functions on whole
numbers.

A *ticket* is the number of a reserved row, an int64 that only grows. Its *slot* is ``ticket %
capacity``.
"""

from __future__ import annotations

from typing import Any

import torch


def as_slots(index: Any) -> torch.Tensor:
    """Return an index of any shape as int64 on the CPU. A tensor that already has this form is
    returned itself.

    Raises:
        IndexError: the index does not consist of whole numbers. Otherwise 1.9 would silently name
            row 1, and a mask, also one of uint8, would name rows 0 and 1.
    """
    found = torch.as_tensor(index, device="cpu")
    if found.dtype is torch.int64:
        return found
    if found.dtype is torch.bool:
        raise IndexError("rows are named by their numbers here, got a mask; pass mask.nonzero()")
    if found.dtype is torch.uint8:  # torch takes it as a mask in an index, but not elsewhere
        raise IndexError(
            "uint8 might be a mask or numbers; pass index.bool().nonzero() for a mask, or "
            "index.long() for numbers"
        )
    if found.numel() and (found.is_floating_point() or found.is_complex()):
        raise IndexError(
            f"rows are named by whole numbers, got {found.dtype}: {found.reshape(-1)[:4].tolist()}"
            "; pass index.long()"
        )
    return found.to(torch.int64)


def largest_reservation(capacity: int) -> int:
    """Return the largest number of rows of one reservation.

    It is an eighth of the ring, because ``len`` omits rows that are being rewritten, and because
    several writers need room at the same time.
    """
    return max(1, capacity // 8)


def split_rows(rows: int, capacity: int, most: int | None = None) -> list[tuple[int, int]]:
    """Split the rows of an ``extend`` into ranges ``(start, stop)``, each small enough for one
    reservation, and of at most ``most`` rows.

    If there are more rows than slots, the ranges have only the last ``capacity`` rows, which would
    remain if all rows were written.
    """
    step = min(largest_reservation(capacity), most or capacity)
    first = max(0, rows - capacity)
    return [(start, min(start + step, rows)) for start in range(first, rows, step)]


def slot_ranges(first_ticket: int, count: int, capacity: int) -> list[tuple[int, int]]:
    """Return the slots of ``count`` tickets as one range, or as two if they continue at slot 0.

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
    """Return whether two ranges of tickets share a slot."""
    return (other_first - first_ticket) % capacity < count or (
        first_ticket - other_first
    ) % capacity < other_count


def first_free_ticket(
    cursor: int, count: int, claims: list[tuple[int, int]], capacity: int
) -> int | None:
    """Return the first ticket from ``cursor`` on at which ``count`` slots are free of claims.

    Args:
        cursor: the next ticket.
        count: number of rows to reserve, at most ``capacity``.
        claims: ``(first_ticket, count)`` of every reservation in progress.
        capacity: number of slots of the ring.

    Returns:
        The ticket, or None if there is none within one lap of the ring.
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
