"""Claims with tickets beyond 2**31 and 2**53; ``test_fuzz`` tests other large numbers."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from torchrl.data import TensorDictReplayBuffer

from tests.replay.faults import (
    Dying,
    assert_sound,
    kill_points,
    rows_of,
    start_at,
)
from torchrl_dist.replay.node.tables import MAX_MEMBERS, Word

_CAPACITY = 24


@pytest.mark.parametrize("start", [2**31, 2**53])
def test_claims_beyond_the_number_are_kept_apart_and_taken_over(
    make_buffer: Callable[..., TensorDictReplayBuffer], start: int
) -> None:
    """A killed publisher's claim is completed, and a live writer's slots are skipped."""
    rb = make_buffer(_CAPACITY, keep=True)
    directory = rb.storage.directory
    ticket = start_at(directory, start - 30)
    directory.words[Word.JOINS] = min(start, 2**62 // MAX_MEMBERS)
    rb.extend(rows_of(range(_CAPACITY)))
    with ThreadPoolExecutor(1) as other_writer:
        held = other_writer.submit(rb.storage._cursor.reserve, 3).result()
        assert held.first_ticket == ticket + _CAPACITY
        for lap in range(5):
            assert 0 not in rb.extend(rows_of(range(100 * lap, 100 * lap + 21)))
        assert len(rb) == 21
        other_writer.submit(rb.storage._cursor.abandon, held).result()

    def victim(dying: Dying) -> None:
        with directory.lock():  # a forked child joins with its first use
            assert directory.member > 2**31
        with dying:
            rb.extend(rows_of(range(10**6, 10**6 + 3)))

    before, kills = rb.write_count, 0
    for _, killed in kill_points(victim, every=23):
        kills += killed
        assert_sound(rb)
        new = int((rb[:]["key"] >= 10**6).sum())
        assert new in (0, 3) and rb.write_count == before + new
        rb.extend(rows_of(range(_CAPACITY)))
        assert len(rb) == _CAPACITY
        before = rb.write_count
    assert kills > 4 and rb.write_count > start
