"""Several processes on one replay directory: exact under load, safe under SIGSTOP. test_torn.py
tests torn rows; test_kills.py and test_stores.py test kill -9."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torchrl.data import LazyMemmapStorage, TensorDictReplayBuffer

from tests.replay.conftest import make_rows
from tests.replay.faults import attach, end_of, forked, is_stopped, wait_until
from tests.spawn import spawn, stop_self
from torchrl_dist.errors import DirectoryError
from torchrl_dist.replay import (
    SharedCursorWriter,
    SharedMemmapStorage,
    SharedPrioritizedSampler,
)
from torchrl_dist.replay.node.tables import Word
from torchrl_dist.replay.parts import storage

_FORK = multiprocessing.get_context("fork")


def torn(batch: TensorDict) -> int:
    value = batch["id"].double()[:, None]
    ok = (batch["obs"] == value).all(1) & (batch["next", "obs"] == value + 0.5).all(1)
    return int((~ok).sum())


def assert_consistent(rb: TensorDictReplayBuffer) -> None:
    """Check that sums match leaves, only published rows have leaves, and the length counts them."""
    directory = rb.storage.directory
    with directory.lock():
        directory.tree.refresh()
        versions = directory.versions
        published = (versions & 1 == 0) & (versions > 0)
        assert ((directory.tree.leaves > 0) == published).all()
        assert directory.length == published.sum()
        assert directory.tree.total == pytest.approx(directory.tree.leaves.sum())
    assert torn(rb[:]) == 0


# --- pytorch/rl#1397 -----------------------------------------------------------------------------


@spawn(nproc=4, timeout_s=90)
def test_four_ranks_that_extend_2500_rows_each_see_10000_rows_and_2500_with_torchrls_parts(
    tmp_path: Path,
) -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    mine = [range(at, at + 50) for at in range(2500 * rank, 2500 * (rank + 1), 50)]
    if rank == 3:  # joins late: the others have written and set priorities by then
        dist.barrier()
    rb = TensorDictReplayBuffer(
        storage=SharedMemmapStorage(20_000, scratch_dir=tmp_path / "replay"),
        sampler=SharedPrioritizedSampler(20_000, alpha=0.6, beta=0.4),
        writer=SharedCursorWriter(),
        batch_size=32,
    )
    if rank < 3:
        index = torch.cat([rb.extend(make_rows(keys)) for keys in mine])
        rb.update_priority(index, 1.0 + rb[index]["id"].double())
        dist.barrier()
    else:
        assert len(rb) == 7500
        for keys in mine:
            index = rb.extend(make_rows(keys))
            rb.update_priority(index, torch.tensor(keys).double() + 1)
    dist.barrier()
    assert len(rb) == 10_000
    rows = rb[:]
    assert sorted(rows["id"].tolist()) == list(range(10_000))
    assert torn(rows) == 0
    expected = (rows["id"].double().numpy() + 1 + 1e-8) ** 0.6
    np.testing.assert_allclose(rb.storage.directory.tree.leaves[:10_000], expected, rtol=1e-9)
    dist.barrier()

    stock = TensorDictReplayBuffer(
        storage=LazyMemmapStorage(20_000, scratch_dir=tmp_path / "stock", existsok=True),
        batch_size=32,
    )
    for turn in range(4):  # one after the other, so that creating the files does not race too
        if turn == rank:
            for keys in mine:
                stock.extend(make_rows(keys))
        dist.barrier()
    assert len(stock) == 2500
    dist.destroy_process_group()


# --- concurrency ---------------------------------------------------------------------------------


def test_a_stopped_writer_keeps_its_slots_and_harms_no_other(folder: Path) -> None:
    capacity = 80
    rb = attach(folder, capacity, timeout_s=20)
    rb.extend(make_rows(range(capacity)))
    reserved = _FORK.Event()

    def write() -> None:
        mine = attach(folder, capacity)
        storage.SMALL_BYTES = 0  # small batches are copied under the lock
        fill = mine.storage._fill

        def stop_between_reserve_and_copy(reservation, *args):
            reserved.set()
            stop_self()
            return fill(reservation, *args)

        mine.storage._fill = stop_between_reserve_and_copy
        mine.extend(make_rows(range(500, 510)))

    with forked(write) as writer:
        assert reserved.wait(20)
        wait_until(lambda: is_stopped(writer))
        assert len(rb) == capacity - 10
        for lap in range(5):
            rb.extend(make_rows(range(1000 * lap, 1000 * lap + capacity)))
        assert len(rb) == capacity - 10
        assert not (rb[:]["id"] // 10 == 50).any()
        os.kill(writer, signal.SIGCONT)
        assert end_of(writer) == 0
    assert len(rb) == capacity
    assert sorted(rb[:10]["id"].tolist()) == list(range(500, 510))
    assert_consistent(rb)


def test_a_running_job_keeps_others_out(folder: Path) -> None:
    ready = _FORK.Event()

    def other_job() -> None:
        SharedMemmapStorage(64, scratch_dir=folder, job_id="other", keep=True)
        ready.set()
        time.sleep(60)

    with forked(other_job) as pid:
        assert ready.wait(20)
        with pytest.raises(DirectoryError, match=f"job 'other' .processes .{pid}"):
            SharedMemmapStorage(64, scratch_dir=folder, job_id="test", resume=True)


def test_an_exception_inside_a_critical_section_is_repaired_by_the_next(
    folder: Path, monkeypatch
) -> None:
    monkeypatch.setenv("TORCHRL_DIST_KERNEL", "numpy")
    rb = attach(folder, 80)
    rb.extend(make_rows(range(80)))
    repairs = rb.storage.directory.counters["repairs"]

    tree = rb.storage.directory.tree
    set_range = tree.set_range

    def interrupted(start: int, stop: int, values: float) -> None:
        if values > 0:  # publishing
            raise KeyboardInterrupt
        set_range(start, stop, values)

    with monkeypatch.context() as patch:
        patch.setattr(tree, "set_range", interrupted)
        with pytest.raises(KeyboardInterrupt):
            rb.extend(make_rows(range(90, 100)))
    assert len(rb.sample()) == 64
    assert rb.storage.directory.counters["repairs"] == repairs + 1
    assert rb.storage.directory.words[Word.DIRTY] == 0
    rb.extend(make_rows(range(200, 280)))
    assert len(rb) == 80
    assert_consistent(rb)
