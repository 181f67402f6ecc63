from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchrl_dist.replay.law.placement import (
    first_free_ticket,
    largest_reservation,
    overlaps,
    slot_ranges,
    split_rows,
)

capacities = st.integers(1, 40)


@given(capacities, st.integers(0, 200))
def test_an_extend_is_split_into_its_last_capacity_rows(capacity: int, rows: int) -> None:
    parts = split_rows(rows, capacity)
    covered = [row for start, stop in parts for row in range(start, stop)]
    assert covered == list(range(max(0, rows - capacity), rows))
    assert all(stop - start <= largest_reservation(capacity) for start, stop in parts)


@given(capacities, st.integers(0, 2**62), st.data())
def test_slot_ranges_are_the_tickets_modulo_the_capacity(capacity, first, data) -> None:
    count = data.draw(st.integers(1, capacity))
    ranges = slot_ranges(first, count, capacity)
    assert [slot for a, b in ranges for slot in range(a, b)] == [
        (first + i) % capacity for i in range(count)
    ]
    assert len(ranges) <= 2


def slots(first: int, count: int, capacity: int) -> set[int]:
    return {(first + i) % capacity for i in range(count)}


@given(capacities, st.data())
def test_overlap_means_a_common_slot(capacity: int, data) -> None:
    a, b = ((data.draw(st.integers(0, 100)), data.draw(st.integers(1, capacity))) for _ in range(2))
    assert overlaps(*a, *b, capacity) == bool(slots(*a, capacity) & slots(*b, capacity))


@given(capacities, st.integers(0, 1000), st.data())
def test_the_first_free_ticket_touches_no_claim_and_is_the_first(capacity, cursor, data) -> None:
    count = data.draw(st.integers(1, largest_reservation(capacity)))
    claims = data.draw(
        st.lists(
            st.tuples(
                st.integers(max(0, cursor - 50), cursor + 50),
                st.integers(1, largest_reservation(capacity)),
            ),
            max_size=5,
        )
    )
    taken = {slot for claim in claims for slot in slots(*claim, capacity)}
    free = [
        ticket
        for ticket in range(cursor, cursor + capacity + 1)
        if not slots(ticket, count, capacity) & taken
    ]
    assert first_free_ticket(cursor, count, claims, capacity) == (free[0] if free else None)


@pytest.mark.parametrize("capacity", [1, 7, 8, 9, 1000])
def test_a_reservation_is_at_most_an_eighth_of_the_ring(capacity: int) -> None:
    assert 1 <= largest_reservation(capacity) <= max(1, capacity / 8)
