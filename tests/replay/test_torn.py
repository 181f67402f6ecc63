"""Whatever writers do, no reader sees a row that mixes two writes, and no reader starves.

``TORCHRL_DIST_LONG_TESTS=1`` samples twenty times as many rows.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torchrl.data import LazyMemmapStorage, TensorDictReplayBuffer

from tests.replay.faults import (
    LONG,
    assert_sound,
    attach,
    forked,
    is_stopped,
    priority_of,
    rows_of,
    torn_rows,
    wait_until,
)
from torchrl_dist.replay.node.tables import CLAIM_COUNT, CLAIM_MEMBER, MEMBER_PID
from torchrl_dist.replay.parts import storage

_CAPACITY = 64
_MORE = 20 if LONG else 1
_POOL = 16
_READERS = 2
# columns of the table that the readers fill, one row each
SEEN, TORN, WAYS = 0, 1, 4


def shared_table() -> np.ndarray:
    """Return an int64 table [readers, WAYS] that the forked children share."""
    return np.frombuffer(mmap.mmap(-1, 8 * _READERS * WAYS), np.int64).reshape(_READERS, WAYS)


def batches_of(writer: int, rows: int, width: int) -> list[TensorDict]:
    """Make batches beforehand, so that a writer spends its time on writing."""
    first = 1 + writer * _POOL * rows
    return [
        rows_of(np.arange(at, at + rows), width) for at in range(first, first + _POOL * rows, rows)
    ]


def write(make: Callable[[], TensorDictReplayBuffer], writer: int, width: int) -> None:
    """Extend indefinitely, as fast as the processor allows. One writer also writes in place, and
    one copies small batches without the lock, as all copy large ones."""
    rb = make()
    if writer == 2:
        storage.SMALL_BYTES = 0
    batches = batches_of(writer, 8, width)
    singles = batches_of(writer, 1, width)
    randomness = random.Random(writer)
    while True:
        rb.extend(randomness.choice(batches))
        if writer == 0:
            rb.storage.set(
                torch.tensor([randomness.randrange(_CAPACITY)]), randomness.choice(singles)
            )


def count(table: np.ndarray, rows: TensorDict) -> None:
    table[SEEN] += rows.batch_size.numel()
    table[TORN] += torn_rows(rows)


def read_shared(folder: Path, table: np.ndarray, batch_size: int) -> None:
    """Sample by priority and uniformly, read by index in every form; update priorities."""
    prioritized = attach(folder, _CAPACITY, batch_size=batch_size)
    uniform = attach(folder, _CAPACITY, uniform=True, batch_size=batch_size)
    randomness = random.Random()
    while True:
        batch = prioritized.sample()
        count(table, batch)
        batch["td_error"] = priority_of(batch["key"])
        prioritized.update_tensordict_priority(batch)
        count(table, uniform.sample())
        count(table, prioritized[torch.randint(_CAPACITY, (batch_size,))])
        i = randomness.randrange(_CAPACITY)
        count(table, prioritized[i][None])
        count(table, prioritized.storage[i][None])
        count(table, prioritized[:])


def pause_now_and_then(pid: int, rb: TensorDictReplayBuffer, stop: Callable[[], bool]) -> int:
    """Stop the writer repeatedly, until ``stop`` is set and the others have lapped it five times
    while it held slots. Returns how often they did."""
    directory = rb.storage.directory
    wait_until(lambda: (directory.members[:, MEMBER_PID] == pid).any())
    at = int(np.flatnonzero(directory.members[:, MEMBER_PID] == pid)[0])
    member = int(directory.members[at, 1]) * len(directory.members) + at
    randomness = random.Random(0)
    lapped = 0
    while not (stop() and lapped >= 5):
        time.sleep(randomness.random() * 0.05)
        os.kill(pid, signal.SIGSTOP)
        wait_until(lambda: is_stopped(pid))
        mine = directory.claims[:, CLAIM_MEMBER] == member
        holds = bool((directory.claims[mine, CLAIM_COUNT] > 0).any())
        laps = rb.write_count + 3 * _CAPACITY
        deadline = time.monotonic() + (0.5 if holds else 0.0)
        while rb.write_count < laps and time.monotonic() < deadline:
            time.sleep(1e-3)
        lapped += holds and rb.write_count >= laps
        os.kill(pid, signal.SIGCONT)
    return lapped


@pytest.mark.usefixtures("kept_as")
@pytest.mark.timeout(1200 if LONG else 120)
@pytest.mark.parametrize(
    "width, batch_size, wanted", [(8, 1024, 300_000), (256, 256, 30_000), (4096, 64, 8_000)]
)
def test_no_row_is_torn_while_writers_lap_readers_and_each_other(
    folder: Path, width: int, batch_size: int, wanted: int, request
) -> None:
    """Rows of 136 B, 4 KiB and 64 KiB; 338,000 of them in all."""
    torch.set_num_threads(1)
    rb = attach(folder, _CAPACITY)
    rb.extend(rows_of(np.arange(1, _CAPACITY + 1), width))
    table = shared_table()

    def make() -> TensorDictReplayBuffer:
        return attach(folder, _CAPACITY)

    deadline = time.monotonic() + (1000 if LONG else 90)

    def done() -> bool:
        assert table[:, TORN].sum() == 0
        assert time.monotonic() < deadline, f"only {table[:, SEEN].sum()} rows were read"
        return table[:, SEEN].sum() >= wanted * _MORE

    with contextlib.ExitStack() as stack:
        for reader in range(_READERS):
            stack.enter_context(forked(read_shared, folder, table[reader], batch_size))
        writers = [stack.enter_context(forked(write, make, k, width)) for k in range(3)]
        lapped = pause_now_and_then(writers[2], rb, done)
        assert all(Path(f"/proc/{pid}").exists() for pid in writers)
    counters = rb.storage.directory.counters
    request.node.user_properties += [
        ("seen", int(table[:, SEEN].sum())), ("lapped", lapped), ("counters", counters),
        ("writes", rb.write_count),
    ]  # fmt: skip
    assert table[:, TORN].sum() == 0
    assert (table[:, SEEN] > wanted // 20).all()
    assert counters["reread_rows"] > 0
    rb.extend(rows_of(np.arange(1, _CAPACITY + 1), width))
    assert len(rb) == _CAPACITY
    assert_sound(rb)
    rb.storage.close()


def read_stock(make: Callable[[], TensorDictReplayBuffer], table: np.ndarray) -> None:
    rb = make()
    while True:
        count(table, rb.sample())


def test_torchrls_storage_gives_thousands_of_torn_rows_under_the_same_load(
    tmp_path: Path, request
) -> None:
    width = 4096
    torch.set_num_threads(1)
    rb = TensorDictReplayBuffer(
        storage=LazyMemmapStorage(_CAPACITY, scratch_dir=tmp_path / "peer"), batch_size=64
    )
    rb.extend(rows_of(np.arange(1, _CAPACITY + 1), width))
    table = shared_table()
    deadline = time.monotonic() + 60
    with contextlib.ExitStack() as stack:
        for reader in range(_READERS):
            stack.enter_context(forked(read_stock, lambda: rb, table[reader]))
        for writer in range(3):
            stack.enter_context(forked(write, lambda: rb, writer, width))
        while table[:, TORN].sum() <= 1000 and time.monotonic() < deadline:
            time.sleep(0.05)
    request.node.user_properties += [
        ("seen", int(table[:, SEEN].sum())), ("torn", int(table[:, TORN].sum()))
    ]  # fmt: skip
    assert table[:, TORN].sum() > 1000


def test_a_reader_is_not_starved_by_writers_that_lap_it(folder: Path, request) -> None:
    width = 4096
    torch.set_num_threads(1)
    rb = attach(folder, _CAPACITY)
    rb.extend(rows_of(np.arange(1, _CAPACITY + 1), width))

    def batches_per_second(seconds: float, rows: int = 0) -> float:
        begin, before, batches = time.monotonic(), rb.write_count, 0
        while time.monotonic() < begin + seconds or rb.write_count < before + rows:
            rb.sample()
            rb[torch.arange(_CAPACITY)]
            batches += 1
        return batches / (time.monotonic() - begin)

    batches_per_second(0.2)
    quiet = batches_per_second(0.8)
    with contextlib.ExitStack() as stack:
        for writer in range(3):
            stack.enter_context(forked(write, lambda: attach(folder, _CAPACITY), writer, width))
        before = rb.write_count
        wait_until(lambda: rb.write_count > before + 10 * _CAPACITY)
        rereads = rb.storage.directory.counters["reread_rows"]
        loaded = batches_per_second(1.6, 50 * _CAPACITY)
    request.node.user_properties += [("quiet", quiet), ("loaded", loaded)]
    assert rb.storage.directory.counters["reread_rows"] > rereads
    assert loaded > quiet / 30
    rb.storage.close()
