"""Tickets, counts and versions beyond 2**31, 2**32 and what a float64 can count."""

from __future__ import annotations

import pickle
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from torchrl.data import TensorDictReplayBuffer

from tests.replay.faults import (
    assert_sound,
    at_step,
    kill_self,
    priority_of,
    rows_of,
    run_forked,
)
from torchrl_dist.replay.node.tables import MAX_MEMBERS, Word

_CAPACITY = 24  # divides no power of two


def start_at(rb: TensorDictReplayBuffer, count: int) -> int:
    """As if that many rows had been written before, each slot that often; the first ticket."""
    directory = rb.storage.directory
    ticket = count // _CAPACITY * _CAPACITY  # the next row goes to slot 0
    words = directory.words
    words[Word.CURSOR] = words[Word.BASE] = ticket
    words[Word.WRITE_COUNT] = count
    directory.versions[:] = 2 * count + 1
    return ticket


@pytest.mark.parametrize("start", [2**31, 2**32, 2**53, 2**60])
def test_a_buffer_passes_the_number_without_harm(
    make_buffer: Callable[..., TensorDictReplayBuffer], tmp_path: Path, start: int
) -> None:
    rb = make_buffer(_CAPACITY, keep=True)
    directory = rb.storage.directory
    ticket = start_at(rb, start - 40)
    rows = 0

    def extend(n: int) -> torch.Tensor:
        nonlocal rows
        index = rb.extend(rows_of(range(rows, rows + n)))
        assert index.tolist() == [(ticket + rows + k) % _CAPACITY for k in range(n)]
        rows += n
        assert rb.write_count == start - 40 + rows
        assert int(directory.words[Word.CURSOR]) == ticket + rows
        return index

    for n in (5, 24, 3, 17):
        extend(n)
    assert rb.write_count > start and len(rb) == _CAPACITY
    assert sorted(rb[:]["key"].tolist()) == list(range(rows - _CAPACITY, rows))
    rb.update_priority(torch.arange(_CAPACITY), priority_of(rb[:]["key"]))

    # handles: one generation apart is told apart
    batch = rb.sample()
    assert batch["index_generation"].dtype == torch.int64
    expected = directory.versions[batch["index"].numpy()] // 2
    assert batch["index_generation"].tolist() == expected.tolist()
    assert (rb.writer.generations_of(batch["index"]) == batch["index_generation"]).all()
    extend(_CAPACITY)
    fresh = rb.sample()
    assert (rb.writer.generations_of(batch["index"]) == batch["index_generation"] + 1).all()
    leaves = directory.tree.leaves.copy()
    batch["td_error"] = torch.full((16,), 1e6)
    rb.update_tensordict_priority(batch)
    assert (directory.tree.leaves == leaves).all()
    assert directory.counters["stale_updates"] == 16
    fresh["td_error"] = priority_of(fresh["key"])
    rb.update_tensordict_priority(fresh)
    np.testing.assert_allclose(
        directory.tree.leaves[fresh["index"].numpy()],
        (priority_of(fresh["key"]).numpy() + 1e-8) ** 0.6,
    )

    # in place, by another view, from a snapshot
    before = directory.versions.copy()
    rb.storage.set(torch.tensor([3, 4, 20]), rows_of(range(3)))
    assert (directory.versions - before).tolist() == [
        2 if slot in (3, 4, 20) else 0 for slot in range(_CAPACITY)
    ]
    copy = pickle.loads(pickle.dumps(rb.storage))
    assert (copy[:]["key"] == rb[:]["key"]).all()
    copy.close()
    keys, versions = rb[:]["key"].tolist(), directory.versions.copy()
    rb.dumps(tmp_path / "saved")
    (saved,) = rb.storage.snapshot()
    assert sorted(saved.slots.tolist()) == list(range(_CAPACITY))
    assert (saved.versions == versions[saved.slots]).all()
    rb.empty()
    assert len(rb) == 0
    rb.loads(tmp_path / "saved")
    assert rb[:]["key"].tolist() == keys
    assert (directory.versions > versions).all()
    assert int(directory.words[Word.WRITE_COUNT]) == start - 40 + rows + 3
    assert_sound(rb)


@pytest.mark.parametrize("start", [2**31, 2**53])
def test_claims_beyond_the_number_are_kept_apart_and_taken_over(
    make_buffer: Callable[..., TensorDictReplayBuffer], start: int
) -> None:
    """A killed publisher's claim is completed, a live writer's slots are passed over."""
    rb = make_buffer(_CAPACITY, keep=True)
    directory = rb.storage.directory
    ticket = start_at(rb, start - 30)
    directory.words[Word.JOINS] = min(start, 2**62 // MAX_MEMBERS)
    rb.extend(rows_of(range(_CAPACITY)))
    with ThreadPoolExecutor(1) as other_writer:
        held = other_writer.submit(rb.storage._cursor.reserve, 3).result()
        assert held.first_ticket == ticket + _CAPACITY
        for lap in range(5):
            assert 0 not in rb.extend(rows_of(range(100 * lap, 100 * lap + 21)))
        assert len(rb) == 21
        other_writer.submit(rb.storage._cursor.abandon, held).result()

    def victim(step: int) -> None:
        with directory.lock():  # a forked child joins with its first use
            assert directory.member > 2**31
        with at_step(step, kill_self):
            rb.extend(rows_of(range(10**6, 10**6 + 3)))

    for step in range(1, 1000, 23):
        before = rb.write_count
        status = run_forked(victim, step)
        assert status in (0, -signal.SIGKILL)
        assert_sound(rb)
        new = int((rb[:]["key"] >= 10**6).sum())
        assert new in (0, 3) and rb.write_count == before + new
        rb.extend(rows_of(range(_CAPACITY)))
        assert len(rb) == _CAPACITY
        if status == 0:
            break
    assert step > 100 and rb.write_count > start
