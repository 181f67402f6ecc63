"""The arithmetic of the ring: which slots consecutive tickets have. All functions are pure.

A *ticket* is the number of a reserved row, an int64 that only grows. Its *slot* is ``ticket %
capacity``.
"""

from __future__ import annotations

from typing import Any

import torch


def as_slots(index: Any, width: int = 0) -> torch.Tensor:
    """Return an index of any shape as int64 on the CPU. A tensor that already has this form is
    returned without a copy.

    Args:
        width: if not 0, the size of the rows' second dimension. A tuple, and an index of two or
            more dimensions, then has both coordinates of each row, ``[..., 2]``. Any other index
            has slots, as with one dimension.

    Raises:
        IndexError: the index does not consist of whole numbers, or does not have two coordinates
            per row. If such an index were converted, 1.9 would silently name row 1, and a mask,
            even one of uint8, would name rows 0 and 1.
    """
    if width:
        parts = isinstance(index, tuple)
        found = as_slots(torch.stack(list(map(torch.as_tensor, index)), -1) if parts else index)
        return slots_at(found, width) if parts or found.ndim > 1 else found
    found = torch.as_tensor(index, device="cpu")
    if found.dtype is torch.int64:
        return found
    if found.dtype is torch.bool:
        raise IndexError("expected integer indices of rows, got a mask; pass mask.nonzero()")
    if found.dtype is torch.uint8:  # torch takes uint8 as a mask in an index, but not elsewhere
        raise IndexError(
            "got an index of dtype uint8, which may be a mask or numbers; pass "
            "index.bool().nonzero() for a mask, or index.long() for numbers"
        )
    if found.numel() and (found.is_floating_point() or found.is_complex()):
        raise IndexError(
            f"expected an index of integers, got {found.dtype} {found.reshape(-1)[:4].tolist()}; "
            "pass index.long()"
        )
    return found.to(torch.int64)


def slots_at(coordinates: torch.Tensor, width: int) -> torch.Tensor:
    """Return the slots of rows with two dimensions, int64 [...].

    If the first coordinate of a row is -1, its slot is -1, too.

    Args:
        coordinates: int64 [..., 2].

    Raises:
        IndexError: a second coordinate is not below ``width``, or there are not two coordinates.
    """
    if not coordinates.ndim or coordinates.shape[-1] != 2:
        raise IndexError(
            "expected both coordinates of each row, [..., 2], got an index of shape "
            f"{list(coordinates.shape)}; pass the index of a sample"
        )
    first, second = coordinates.unbind(-1)
    known = first != -1
    if (known & ((second < 0) | (second >= width))).any():
        raise IndexError(
            f"the second coordinates must be from 0 to {width - 1}, got "
            f"{second[known].min()} to {second[known].max()}; pass the index of a sample"
        )
    return torch.where(known, first * width + second, -1)


def coordinates_of(slots: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Invert :func:`slots_at`. A slot of -1 becomes ``(-1, -1)``."""
    first = slots.div(width, rounding_mode="floor")
    return first, torch.where(slots < 0, -1, slots - first * width)


def whole_lines(claims: list[tuple[int, int]], width: int) -> list[tuple[int, int]]:
    """Extend each claim so that it begins and ends at a multiple of ``width``. As a
    result, every reservation that begins at the end of a claim also begins at a multiple."""
    return [
        (first - first % width, rows + first % width + -(first + rows) % width)
        for first, rows in claims
    ]


def largest_reservation(capacity: int) -> int:
    """Return the largest number of rows of one reservation.

    This number is an eighth of the ring. A larger reservation would make ``len`` drop noticeably,
    because ``len`` does not count rows that are being rewritten. Several writers also need room at
    the same time.
    """
    return max(1, capacity // 8)


def split_rows(
    rows: int, capacity: int, most: int | None = None, width: int = 1
) -> list[tuple[int, int]]:
    """Split the rows of an ``extend`` into ranges ``(start, stop)``, each small enough for one
    reservation, and of at most ``most`` rows. The length of each range is a multiple of ``width``.

    If there are more rows than slots, the ranges have only the last ``capacity`` rows, because
    these would overwrite the earlier rows anyway.
    """
    step = min(largest_reservation(capacity), most or capacity)
    step = max(step - step % width, width)
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
    """Return the first ticket, ``cursor`` or later, whose slot and the ``count - 1`` slots after it
    are free of claims.

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
