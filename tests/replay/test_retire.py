"""Rows that are too old stay hidden: histories, kills, interrupts, checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.contracts.test_retire import rows
from tests.replay.faults import (
    Dying,
    assert_lock_is_free,
    attach,
    interrupt_points,
    kill_points,
    published,
)
from torchrl_dist import RateLimiter, SharedReplayBuffer
from torchrl_dist.replay.node.tables import Word
from torchrl_dist.replay.node.times_sampled import give_back


def make(folder: Path, times: int = 3, capacity: int = 16, **options: Any) -> SharedReplayBuffer:
    limiter = RateLimiter(min_size_to_sample=4, max_times_sampled=times)
    options = {"batch_size": 4, "limiter": limiter, "kind": SharedReplayBuffer} | options
    return attach(folder, capacity, **options)


def hidden_and_too_old(rb: SharedReplayBuffer) -> tuple[np.ndarray, np.ndarray]:
    directory = rb.storage.directory
    directory.tree.refresh()
    there = published(directory)
    leaves = directory.tree.leaves
    assert directory.words[Word.AVAILABLE] == np.count_nonzero(leaves)
    assert not leaves[~there].any()
    assert directory.tree.total == pytest.approx(leaves.sum())
    bound = directory.words[Word.OLDEST] if directory.words[Word.OLDEST_COLUMN] else -(2**62)
    old = rb.storage[:]["policy_version"].numpy() < bound if there.any() else np.zeros(0, bool)
    return leaves[there] == 0, old


@pytest.mark.parametrize("uniform", [True, False], ids=["uniform", "by priority"])
@pytest.mark.parametrize("seed", range(4))
def test_rows_are_available_as_in_a_plain_model(folder: Path, uniform: bool, seed: int) -> None:
    """Random writes, writes in place, samples and bounds; each row counts its samples."""
    rng = np.random.default_rng(seed)
    rb = make(folder, uniform=uniform)
    ring: dict[int, list[int]] = {}  # slot -> number, version, samples
    bound, number, version = -100, 0, 0
    retired = 0
    for _ in range(120):
        action = rng.integers(4)
        if action == 0 or not ring:
            count = int(rng.integers(1, 6))
            versions = version - rng.integers(0, 5, count)
            numbers = np.arange(number, number + count)
            number += count
            data = rows(numbers, versions)
            if ring and rng.random() < 0.3:
                index = torch.tensor(sorted(rng.choice(list(ring), 1)))
                data = data[:1]
                rb.storage[index] = data
                written = index.tolist()
            else:
                written = rb.extend(data).tolist()
            for slot, each, age in zip(written, numbers.tolist(), versions.tolist(), strict=False):
                ring[slot] = [each, age, 0]
                retired += age < bound
        elif action == 1:
            version += int(rng.integers(0, 3))
            new = version - 2
            expected = sum(bound <= age < new and times < 3 for _, age, times in ring.values())
            assert rb.retire_older_than(new) == (expected if new > bound else 0)
            retired += expected if new > bound else 0
            bound = max(bound, new)
        elif action == 2:
            left = [3 - times for _, age, times in ring.values() if age >= bound and times < 3]
            if len(left) >= 4:
                batch = rb.sample()
                for slot in batch["index"].flatten().tolist():
                    ring[slot][2] += 1
                    assert ring[slot][1] >= bound and ring[slot][2] <= 3
                rb.update_tensordict_priority(batch)
        else:
            slots = torch.as_tensor(list(ring))
            if not uniform:  # of any rows, also hidden ones
                rb.update_priority(slots, torch.rand(len(slots)))
        leaves = rb.storage.directory.tree.leaves
        for slot, (_, age, times) in ring.items():
            assert (leaves[slot] > 0) == (age >= bound and times < 3)
        hidden_and_too_old(rb)
    assert rb.storage.counters["retired_rows"] == retired > 0


def refill(rb: SharedReplayBuffer, where: str) -> None:
    rb.empty()
    rb.extend(rows(range(12), [0, 1, 2] * 4))
    if where == "extend":
        rb.retire_older_than(2)


def change(rb: SharedReplayBuffer, where: str) -> None:
    if where == "retire":
        rb.retire_older_than(2)
    else:
        rb.extend(rows(range(12, 18), [0, 1, 2] * 2))


@pytest.mark.parametrize("where", ["retire", "extend"])
def test_a_killed_process_leaves_no_old_row_to_sample(folder: Path, where: str) -> None:
    torch.set_num_threads(1)
    rb = make(folder)
    died = partly = 0

    def victim(dying: Dying) -> None:
        with dying:
            change(rb, where)

    for step, killed in kill_points(victim, every=13, prepare=lambda: refill(rb, where)):
        died += killed
        assert_lock_is_free(rb.storage.directory)
        with rb.storage.directory.lock():  # repairs
            pass
        hidden, old = hidden_and_too_old(rb)
        assert (hidden == old).all(), step
        partly += bool(killed and old.any())
        assert (rb.sample()["policy_version"] >= (2 if old.any() else 0)).all()
    assert died > 10 and partly


@pytest.mark.parametrize("where", ["retire", "extend"])
def test_an_interrupted_process_leaves_no_old_row_to_sample(folder: Path, where: str) -> None:
    rb = make(folder)
    interrupted = 0
    for point in interrupt_points(
        lambda: change(rb, where), every=3, prepare=lambda: refill(rb, where)
    ):
        interrupted += 1
        rb.extend(rows(range(20, 21), 2))
        hidden, old = hidden_and_too_old(rb)
        assert (hidden == old).all(), point
    assert interrupted > 10


def test_returned_draws_do_not_bring_old_rows_back(folder: Path) -> None:
    rb = make(folder, times=1)
    rb.extend(rows(range(8), [1, 2] * 4))
    batch = rb.sample()
    slots, stamps = (batch[key].flatten().numpy() for key in ("index", "index_generation"))
    rb.retire_older_than(2)
    give_back(rb.storage.directory, slots, stamps, np.ones(slots.size))
    hidden, old = hidden_and_too_old(rb)
    assert (hidden == old).all()


def test_retired_rows_stay_hidden_in_a_checkpoint(folder: Path, tmp_path: Path) -> None:
    rb = make(folder)
    rb.extend(rows(range(12), [0, 1, 2] * 4))
    rb.retire_older_than(2)
    rb.dumps(tmp_path / "dump")
    copy = make(folder.with_name(folder.name + "-copy"), keep=False)
    copy.loads(tmp_path / "dump")
    assert len(copy) == 12
    assert (copy.sample()["policy_version"] == 2).all()
    copy.storage.close()
