"""Where rows go when a checkpoint is restored to another number of shards. Needs no files."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchrl_dist.errors import CheckpointError
from torchrl_dist.replay.row.spec import ColumnSpec, RowSpec
from torchrl_dist.replay.saving.snapshot import (
    Head,
    SavedShard,
    _runs,
    deal,
    pieces_in_chunks,
    with_one_alpha,
)

SPEC = RowSpec((ColumnSpec(("key",), torch.int64, ()),))


def saved_shard(number: int, capacity: int, cursor: int, gaps: set[int], alpha=0.6) -> SavedShard:
    """Make a shard after ``cursor`` rows. Keys tell shard and ticket; ``gaps`` are empty slots."""
    tickets = [t for t in range(max(0, cursor - capacity), cursor) if t % capacity not in gaps]
    slots = np.array([t % capacity for t in tickets], dtype=np.int64)
    versions = np.array([2 * (t // capacity + 1) for t in tickets], dtype=np.int64)
    high = min(cursor, capacity)
    head = Head(
        capacity, cursor, high, len(tickets), cursor, 2.0 + number, alpha, 1e-8, False,
        {"repairs": number}, SPEC,
    )  # fmt: skip
    keys = np.array([10**6 * number + t for t in tickets], dtype=np.int64)
    return SavedShard(head, _runs(slots, versions), 1.0 + keys, [keys])


shards = st.lists(
    st.tuples(st.integers(1, 30), st.integers(0, 90), st.sets(st.integers(0, 29), max_size=5)),
    min_size=1,
    max_size=4,
).map(lambda each: [saved_shard(number, *entry) for number, entry in enumerate(each)])


def keys_dealt(saved: list[SavedShard], target) -> np.ndarray:
    parts = [
        saved[piece.shard].columns[0][piece.row : piece.row + piece.count]
        for piece in pieces_in_chunks(target)
    ]
    return np.concatenate([np.empty(0, np.int64), *parts])


@given(shards, st.integers(1, 5), st.integers(1, 40))
def test_every_row_goes_to_one_place_and_the_oldest_are_left_out(saved, count, capacity) -> None:
    targets, left_out = deal(saved, count, capacity)
    total = sum(each.leaf.size for each in saved)
    assert left_out == max(0, total - count * capacity)
    dealt = [keys_dealt(saved, target) for target in targets]
    kept = np.concatenate(dealt)
    assert np.unique(kept).size == kept.size == total - left_out
    for target in targets:
        slots = [(p.slot, p.slot + p.count) for p in target.pieces]
        assert all(0 <= start < stop <= capacity for start, stop in slots)
        taken = [slot for start, stop in slots for slot in range(start, stop)]
        assert len(set(taken)) == len(taken)
    assert sum(target.head.write_count for target in targets) == sum(
        each.head.write_count for each in saved
    )
    assert sum(target.head.counters["repairs"] for target in targets) == sum(
        each.head.counters["repairs"] for each in saved
    )
    same = len(saved) == count and all(each.head.capacity == capacity for each in saved)
    for number, (target, keys) in enumerate(zip(targets, dealt, strict=True)):
        if same:
            assert target.head == saved[number].head
            slots = [slot for p in target.pieces for slot in range(p.slot, p.slot + p.count)]
            assert slots == saved[number].slots.tolist()
            continue
        # in the order of their tickets, one after another from slot 0
        for source in range(len(saved)):
            assert (np.diff(keys[keys // 10**6 == source]) > 0).all()
        assert target.head.cursor == target.head.high == keys.size
        assert abs(keys.size - kept.size / count) < 1
        old = max((int(each.versions.max(initial=0)) for each in saved), default=0)
        assert all(piece.version > old for piece in target.pieces)
        assert target.head.max_priority == max(each.head.max_priority for each in saved)


def test_neighbors_stay_together_except_at_the_edges_of_blocks() -> None:
    saved = [saved_shard(0, 20_000, 50_000, set()), saved_shard(1, 20_000, 50_000, set())]
    targets, _ = deal(saved, 3, 20_000)
    for target in targets:
        keys = keys_dealt(saved, target)
        assert np.count_nonzero(np.diff(keys) != 1) <= keys.size / 1024 + 3


def test_a_lost_shard_is_empty_in_its_place_and_nothing_elsewhere() -> None:
    saved = [saved_shard(0, 30, 100, set()), None]
    targets, _ = deal(saved, 2, 30)
    assert targets[0].head == saved[0].head
    assert not targets[1].pieces and targets[1].head.cursor == targets[1].head.length == 0
    targets, _ = deal(saved, 3, 30)
    assert [target.head.length for target in targets] == [10, 10, 10]
    with pytest.raises(CheckpointError, match="the checkpoint has no shard"):
        deal([None, None], 2, 30)


def test_masses_of_another_alpha_are_those_of_the_first() -> None:
    saved = [saved_shard(0, 30, 30, set()), None, saved_shard(1, 30, 30, set(), alpha=1.2)]
    first, _, other = with_one_alpha(saved)
    assert other.head.alpha == 0.6 and first is saved[0]
    np.testing.assert_allclose(other.leaf, saved[2].leaf ** 0.5)
