"""Small things that users of TorchRL's buffers try, and their results with shared buffers."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import torch
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer

from tests.replay.conftest import make_rows
from tests.replay.faults import attach, end_of, is_stopped, rows_of, start, wait_until
from torchrl_dist.errors import CheckpointError, ConfigurationError
from torchrl_dist.replay import SharedReplayBuffer
from torchrl_dist.replay.node.tables import CLAIM_COUNT, Word

KINDS = [SharedReplayBuffer, TensorDictReplayBuffer]


@pytest.mark.parametrize("kind", KINDS)
def test_an_empty_batch_is_written_as_nothing(make_buffer, kind) -> None:
    rb = make_buffer(kind=kind)
    for _ in range(2):
        index = rb.extend(make_rows(range(0)))
        assert index.shape == (0,) and index.dtype == torch.int64
        rb.extend(make_rows(range(4)))
    assert len(rb) == rb.write_count == 8


@pytest.mark.parametrize("wrong", [1e150, -1.0, float("nan"), "too few"])
def test_a_refused_batch_has_overwritten_nothing(make_buffer, wrong) -> None:
    """Only the last part of the batch is wrong, and only under this alpha."""
    rb = make_buffer(64, alpha=2.0, kind=SharedReplayBuffer, batch_size=8)
    rb.extend(make_rows(range(64)))
    before = rb.storage.generations_of(torch.arange(64)).tolist(), rb[:]["id"].tolist()
    priority = torch.ones(60, dtype=torch.float64)
    if wrong == "too few":
        priority = priority[:-1]
    else:
        priority[-1] = wrong
    with pytest.raises(ConfigurationError):
        rb.writer.extend(make_rows(range(100, 160)), priority=priority.numpy())
    assert len(rb) == rb.write_count == 64
    after = rb.storage.generations_of(torch.arange(64)).tolist(), rb[:]["id"].tolist()
    assert after == before
    assert not rb.storage.directory.claims[:, CLAIM_COUNT].any()


def test_a_row_in_place_far_ahead_leaves_a_gap_that_is_reported_at_once(make_buffer) -> None:
    rb = make_buffer(64)
    rb.storage.set(50, make_rows(range(1))[0])
    rb.extend(make_rows(range(10)))
    assert rb.storage.shape == (51,) and len(rb) == 11
    assert rb.storage.get(-1)["id"] == 0 and rb.storage.get(3)["id"] == 3
    start = time.monotonic()
    for gap in (20, torch.tensor([3, 20]), [49]):
        with pytest.raises(IndexError, match="no process is writing"):
            rb.storage.get(gap)
    assert time.monotonic() - start < 5
    saved = rb.storage.snapshot()
    rb.storage.restore(saved)
    rb.extend(make_rows(range(5)))
    assert rb.storage.shape == (51,) and len(rb) == 16
    rb.extend(make_rows(range(45)))
    assert rb.storage.shape == (60,)
    rb.empty()
    rb.extend(make_rows(range(3)))
    assert rb.storage.shape == (3,)


def test_the_state_of_a_storage_of_torchrls_is_refused(make_buffer) -> None:
    rb = make_buffer()
    rb.extend(make_rows(range(9)))
    theirs = LazyTensorStorage(64)
    theirs.set(range(4), make_rows(range(4)))
    for state in (theirs.state_dict(), {}, [1]):
        with pytest.raises(CheckpointError, match="of a shared storage"):
            rb.storage.load_state_dict(state)
    assert rb[:]["id"].tolist() == list(range(9))


def test_a_stopped_process_in_the_queue_holds_up_no_other(folder: Path) -> None:
    torch.set_num_threads(1)
    rb = attach(folder, 80, timeout_s=10)
    rb.extend(rows_of(range(80)))
    directory = rb.storage.directory

    with directory.lock():
        pid = start(lambda: rb.extend(rows_of(range(10))))
        wait_until(lambda: bool(directory.words[Word.WAITING]))
        os.kill(pid, signal.SIGSTOP)
        wait_until(lambda: is_stopped(pid))
    begin = time.monotonic()
    for _ in range(50):
        rb.sample()
    assert directory.words[Word.WAITING]
    assert time.monotonic() - begin < 5
    os.kill(pid, signal.SIGCONT)
    assert end_of(pid) == 0
    assert rb.write_count == 90
    rb.storage.close()
