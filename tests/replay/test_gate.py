"""The rate limiter on one node: threads and processes wait for each other's rows."""

from __future__ import annotations

import collections
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests import warm
from tests.replay.conftest import make_rows
from tests.replay.faults import (
    attach,
    end_of,
    forked,
    in_thread,
    is_stopped,
    kill_self,
    run_forked,
    start,
    wait_until,
)
from torchrl_dist.errors import ConfigurationError, RateLimitError
from torchrl_dist.replay import (
    RateLimiter,
    SharedReplayBuffer,
    SharedSliceSampler,
)
from torchrl_dist.replay.node.directory import ReplayDirectory
from torchrl_dist.replay.node.lock import is_held
from torchrl_dist.replay.node.tables import Word
from torchrl_dist.replay.parts import storage


def shared(
    folder: Path, limiter: RateLimiter | None, capacity: int = 512, **more: Any
) -> SharedReplayBuffer:
    options = {"kind": SharedReplayBuffer, "batch_size": 16, "limiter": limiter, **more}
    return attach(folder, capacity, **options)


# --- waiting and being woken ---------------------------------------------------------------------


def test_rows_that_others_are_writing_count_before_the_next_write(make_buffer) -> None:
    rb = make_buffer(256, limiter=RateLimiter(1, 1.0, 20.0), timeout_s=0.2)
    rb.extend(make_rows(range(16)))
    writing = rb.storage._cursor.reserve(8)
    with pytest.raises(RateLimitError, match="3 more rows to be sampled before the next write"):
        rb.extend(make_rows(range(4)))
    rb.storage._cursor.abandon(writing)
    assert len(rb.extend(make_rows(range(4)))) == 4


def test_a_waiting_thread_of_the_stock_buffer_holds_no_lock_of_it(make_buffer: Callable) -> None:
    limiter = RateLimiter(8, samples_per_insert=1.0, error_buffer=16)
    rb = make_buffer(prefetch=3, limiter=limiter, timeout_s=20.0)
    rb.extend(make_rows(range(16)))
    rb.sample()  # three more are fetched ahead, of which one may go on
    wait_until(lambda: rb.storage.directory.counters["limiter_waits"] >= 1)
    for at in range(10):  # these need the buffer's lock
        rb.extend(make_rows(range(16)))
        rb.update_tensordict_priority(rb.sample())
        assert len(rb) == min(64, 16 * (at + 2))
    for future in rb._prefetch_queue:
        future.cancel()


def test_batches_fetched_ahead_are_admitted_in_their_order(
    make_buffer: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``sample`` waits for the oldest batch, and the same thread must also write."""
    limiter = RateLimiter(8, samples_per_insert=1.0, error_buffer=16)
    rb = make_buffer(prefetch=3, limiter=limiter, timeout_s=5.0)
    draw, late = rb._sample, []

    def draw_late(batch_size: int) -> Any:  # before it takes the buffer's lock
        if threading.current_thread() is not threading.main_thread() and not late:
            late.append(time.sleep(0.2))
        return draw(batch_size)

    monkeypatch.setattr(rb, "_sample", draw_late)
    for _ in range(6):
        rb.extend(make_rows(range(16)))
        rb.sample()
    assert late
    for future in rb._prefetch_queue:
        future.cancel()


@pytest.mark.alone
def test_waiting_costs_no_cpu_time(make_buffer: Callable) -> None:
    rb = make_buffer(timeout_s=2.0, limiter=RateLimiter(40))
    rb.extend(make_rows(range(8)))
    used = time.thread_time()
    with pytest.raises(RateLimitError):
        rb.sample()
    assert time.thread_time() - used < 0.05  # of 2 s


def test_a_failed_sample_is_not_counted(make_buffer: Callable) -> None:
    rb = make_buffer(kind=SharedReplayBuffer, limiter=RateLimiter(1))
    rb.extend(make_rows(range(8)))
    with torch.random.fork_rng():
        rb.sampler.draw = lambda *_: 1 / 0  # type: ignore[method-assign]
        with pytest.raises(ZeroDivisionError):
            rb.sample()
    assert rb.storage.limiter_counts.samples == 0


def test_a_sample_that_finds_the_buffer_emptied_is_not_counted_after_it(
    make_buffer: Callable,
) -> None:
    rb = make_buffer(kind=SharedReplayBuffer, limiter=RateLimiter(1))
    rb.extend(make_rows(range(8)))
    rb.sample()
    draw = rb.sampler.draw

    def draw_late(*args: Any) -> Any:
        rb.storage.empty()
        return draw(*args)

    rb.sampler.draw = draw_late  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="empty storage"):
        rb.sample()
    assert rb.storage.limiter_counts == (0, 0, 0)


def test_emptying_starts_the_counts_anew(make_buffer: Callable) -> None:
    rb = make_buffer(limiter=RateLimiter(8, samples_per_insert=1.0, error_buffer=16))
    rb.extend(make_rows(range(24)))
    rb.sample()
    waiting = in_thread(lambda: [rb.extend(make_rows(range(24))) for _ in range(2)])
    wait_until(lambda: rb.storage.directory.counters["limiter_waits"] >= 1)
    assert not waiting.done()
    rb.empty()
    waiting.result(30)
    assert rb.storage.limiter_counts == (24, 0, 24)


# --- ranks that do both --------------------------------------------------------------------------


def test_a_thread_that_asks_first_can_do_both(make_buffer: Callable) -> None:
    limiter = RateLimiter(32, samples_per_insert=4.0, error_buffer=64)
    rb = make_buffer(limiter=limiter)
    for at in range(100):
        rb.extend(make_rows(range(8 * at, 8 * at + 8)))
        while rb.can_sample():
            rb.sample()
    counts = rb.storage.limiter_counts
    assert counts.inserts == 800
    assert limiter.range[0] <= limiter.difference(counts) < limiter.range[0] + 16 + 1
    assert rb.storage.directory.counters["limiter_waits"] == 0


@pytest.mark.parametrize("ratio", [1.0, 8.0])
def test_the_error_of_a_thread_that_waits_for_itself_says_what_to_do(
    make_buffer: Callable, ratio: float
) -> None:
    limiter = RateLimiter(16, samples_per_insert=ratio, error_buffer=32)
    rb = make_buffer(limiter=limiter, timeout_s=0.3)
    with pytest.raises(RateLimitError, match="both writes and samples must .* can_sample"):
        for _ in range(100):  # four samples per insert
            rb.extend(make_rows(range(8)))
            if rb.storage.write_count >= 16:
                rb.sample()
                rb.sample()
    # the limiter's range was kept, and a thread that does what is missing goes on
    difference = limiter.difference(rb.storage.limiter_counts)
    assert limiter.range[0] <= difference <= limiter.range[1] + 8 * ratio


def test_a_process_that_opens_the_directory_before_the_limiter_is_stored_has_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limiter = RateLimiter(16, samples_per_insert=1.0, error_buffer=32)
    opened, parent = storage.open_directory, os.getpid()

    def open_slowly(*arguments: Any, **options: Any) -> ReplayDirectory:
        view = opened(*arguments, **options)
        if os.getpid() == parent:
            with forked(_extend_once, folder, limiter):
                wait_until(lambda: view.length == 8)
        return view

    with monkeypatch.context() as patch:
        patch.setattr(storage, "open_directory", open_slowly)
        rb = shared(folder, limiter, 64)
    rb.extend(make_rows(range(8)))
    assert len(rb.sample(16)) == 16 and rb.storage.limiter_counts == (16, 16, 16)


def _extend_once(folder: Path, limiter: RateLimiter) -> None:
    shared(folder, limiter, 64).extend(make_rows(range(8)))
    while True:
        time.sleep(1)


# --- several processes ---------------------------------------------------------------------------


def _write(folder: Path, limiter: RateLimiter | None) -> None:
    rb = shared(folder, limiter)
    while True:
        rb.extend(make_rows(range(16)))


def _sample(folder: Path, limiter: RateLimiter) -> None:
    rb = shared(folder, limiter)
    while True:
        rb.sample()


def test_processes_keep_to_the_range(folder: Path) -> None:
    limiter = RateLimiter(64, samples_per_insert=2.0, error_buffer=40)
    rb = shared(folder, limiter)
    lower, upper = limiter.range
    seen = []
    with (
        forked(_write, folder, limiter),
        forked(_write, folder, limiter),
        forked(_sample, folder, limiter),
        forked(_sample, folder, limiter),
    ):

        def look() -> bool:
            directory = rb.storage.directory
            with directory.lock():
                counts = rb.storage.limiter_counts
            seen.append(limiter.difference(counts))
            return counts.inserts > 3000

        wait_until(look)
    assert min(difference for difference in seen if difference >= lower) >= lower
    assert seen[-1] >= lower
    # one extend of 16 rows beyond the range, however many writers wake up
    assert max(seen) <= upper + 2.0 * 16


def test_a_kill_of_a_waiting_process_leaves_nothing_behind(folder: Path) -> None:
    limiter = RateLimiter(8, samples_per_insert=1.0, error_buffer=16)
    rb = shared(folder, limiter, timeout_s=10.0)
    rb.extend(make_rows(range(32)))
    with forked(_write, folder, limiter):
        wait_until(lambda: rb.storage.directory.counters["limiter_waits"] > 0)
    assert rb.storage.limiter_counts == (32, 0, 32)
    rb.sample()
    rb.sample()
    rb.extend(make_rows(range(8)))
    assert rb.storage.limiter_counts == (40, 32, 40)


def _die_while_sampling(folder: Path) -> None:
    rb = attach(folder, 512, batch_size=16)
    rb.sampler.draw = lambda *_: kill_self()
    rb.sample()


def test_samples_that_a_killed_process_did_not_return_count_no_more(folder: Path) -> None:
    limiter = RateLimiter(8, samples_per_insert=1.0, error_buffer=16)
    rb = shared(folder, limiter, timeout_s=10.0)
    rb.extend(make_rows(range(24)))  # for 32 rows of samples
    rb.sample()
    assert run_forked(_die_while_sampling, folder) < 0
    assert rb.storage.limiter_counts.samples == 32
    rb.sample()  # would have to wait
    assert rb.storage.limiter_counts == (24, 32, 24)
    assert not rb.can_sample()
    reader = start(_die_while_sampling, folder)
    rb.extend(make_rows(range(16)))
    assert end_of(reader) < 0
    assert rb.storage.limiter_counts.samples == 48
    assert rb.can_sample()
    for _ in range(2):  # its place in the table is another's: taken back only once
        attach(folder, 512, batch_size=16).storage.close()
    assert rb.storage.limiter_counts == (40, 32, 40)


def test_a_wait_for_a_writer_that_was_killed_ends_with_an_error_that_says_so(folder: Path) -> None:
    limiter = RateLimiter(8, samples_per_insert=1.0, error_buffer=16)
    rb = shared(folder, limiter, timeout_s=1.0)
    with forked(_write, folder, limiter) as writer:
        wait_until(lambda: rb.storage.directory.counters["limiter_waits"] > 0)

        def stopped_outside_the_lock() -> bool:
            os.kill(writer, signal.SIGSTOP)
            wait_until(lambda: is_stopped(writer))
            if held := is_held(rb.storage.directory.lock_fd, 0, 2):
                os.kill(writer, signal.SIGCONT)
            return not held

        wait_until(stopped_outside_the_lock)
        with pytest.raises(RateLimitError, match=rf"processes that share the buffer: \[{writer}\]"):
            while True:
                rb.sample()
    with pytest.raises(RateLimitError, match=r"more rows to be written.*none is left"):
        rb.sample()
    # rows that a killed writer was writing do not count: others may write in its place
    rb.extend(make_rows(range(16)))
    rb.sample()


def test_a_restarted_job_goes_on_with_the_counts(folder: Path) -> None:
    limiter = RateLimiter(8, samples_per_insert=1.0, error_buffer=16)

    def first() -> None:
        rb = shared(folder, limiter, 64)
        rb.extend(make_rows(range(32)))
        rb.sample()
        os._exit(9)  # as if killed

    assert run_forked(first) == 9
    rb = shared(folder, limiter, 64)
    assert rb.storage.limiter_counts == (32, 16, 32)


def test_a_process_whose_prefetching_waits_can_end(folder: Path) -> None:
    code = f"""
from tests import warm
from tests.replay.conftest import make_rows
from torchrl.data import TensorDictReplayBuffer
from torchrl_dist import *
rb = TensorDictReplayBuffer(
    storage=SharedMemmapStorage(64, scratch_dir={str(folder)!r}, job_id="test", timeout_s=100.0,
        limiter=RateLimiter(8, samples_per_insert=1.0, error_buffer=16)),
    sampler=SharedRandomSampler(), writer=SharedCursorWriter(), batch_size=16, prefetch=3)
rb.extend(make_rows(range(16)))
rb.sample()
"""
    assert warm.start([sys.executable, "-c", code], cwd=Path(__file__).parents[2]).wait(60) == 0


# --- one limiter for all -------------------------------------------------------------------------


def test_all_processes_use_the_same_limiter(folder: Path) -> None:
    limiter = RateLimiter(8, samples_per_insert=1.5, error_buffer=16, max_times_sampled=3)
    with forked(_write, folder, RateLimiter(8)):
        wait_until(lambda: (folder / "limiter.bin").exists())
        rb = attach(folder, 512)
        assert rb.storage.limiter == RateLimiter(8)
        wait_until(lambda: len(rb) > 32)
        with pytest.raises(ConfigurationError, match=r"use RateLimiter.*_sample=8.*but this"):
            shared(folder, limiter)
        rb.storage.close()
        with pytest.raises(ConfigurationError, match="pass the same limiter in every process"):
            shared(folder, limiter)
    rb = shared(folder, limiter, batch_size=8)  # alone: from now on this one
    assert rb.storage.limiter == limiter
    counts = rb.storage.limiter_counts
    assert (counts.inserts, counts.samples, counts.size) == (8, 0, len(rb))


def test_a_limiter_for_rows_that_are_there_is_refused_while_others_run_without(
    folder: Path,
) -> None:
    with forked(_write, folder, None):
        wait_until(lambda: (folder / "rows.json").exists())
        with pytest.raises(ConfigurationError, match="use no limiter, but this process asks for"):
            shared(folder, RateLimiter(8))


# --- how often a row is sampled ------------------------------------------------------------------


def test_rows_stay_used_up_after_a_repair_and_a_restore(make_buffer: Callable) -> None:
    limiter = RateLimiter(8, max_times_sampled=1)
    rb = make_buffer(limiter=limiter, timeout_s=0.1, batch_size=8)
    rb.extend(make_rows(range(32)))
    seen = rb.sample()["id"].tolist() + rb.sample()["id"].tolist()
    directory = rb.storage.directory
    directory.words[Word.DIRTY] = 1  # as a killed process leaves it
    assert rb.storage.limiter_counts.size == 16
    with directory.lock():
        assert directory.words[Word.AVAILABLE] == 16
    saved = rb.state_dict()
    rb.extend(make_rows(range(100, 164)))
    rb.load_state_dict(saved)
    assert rb.storage.limiter_counts == (32, 16, 16)
    with directory.lock():
        directory.begin()  # once more, with the restored rows
    assert rb.can_sample() and directory.words[Word.DIRTY]
    seen += rb.sample()["id"].tolist() + rb.sample()["id"].tolist()
    assert sorted(seen) == list(range(32))
    with pytest.raises(RateLimitError):
        rb.sample()


def _consume(folder: Path, limiter: RateLimiter, out: Path, uniform: bool) -> None:
    rb = shared(folder, limiter, uniform=uniform, timeout_s=2.0)
    ids = []
    try:
        while True:
            batch = rb.sample()
            ids += batch["id"].tolist()
            if not uniform:
                batch["td_error"] = torch.rand(16)
                rb.update_tensordict_priority(batch)
    except RateLimitError:
        beside = out.with_suffix(".new")
        np.save(beside.open("wb"), np.array(ids))
        os.replace(beside, out)


@pytest.mark.parametrize("uniform", [False, True])
def test_several_processes_sample_each_row_once(
    folder: Path, tmp_path: Path, uniform: bool
) -> None:
    limiter = RateLimiter(16, samples_per_insert=1.0, error_buffer=256, max_times_sampled=1)
    files = [tmp_path / "one", tmp_path / "two"]
    rb = shared(folder, limiter, uniform=uniform, timeout_s=2.0)
    with (
        forked(_consume, folder, limiter, files[0], uniform),
        forked(_consume, folder, limiter, files[1], uniform),
    ):
        for at in range(0, 2048, 32):  # four laps
            rb.extend(make_rows(range(at, at + 32)))
        wait_until(lambda: all(file.exists() for file in files))
    ids = np.concatenate([np.load(file) for file in files])
    assert np.unique(ids).size == ids.size == rb.storage.limiter_counts.samples > 1024


@pytest.mark.parametrize(
    ("by", "uniform", "new"),
    [
        ("reopening", True, RateLimiter(4, max_times_sampled=3)),
        ("loading", False, RateLimiter(4, max_times_sampled=3)),
        ("reopening", False, RateLimiter(4, None)),
        ("loading", True, RateLimiter(4, 50.0, 900.0)),
    ],
)
def test_rows_that_were_used_up_may_be_sampled_under_another_limiter(
    folder: Path, tmp_path: Path, uniform: bool, new: RateLimiter, by: str
) -> None:
    rb = shared(folder, RateLimiter(4, max_times_sampled=1), 16, uniform=uniform, batch_size=4)
    rb.extend(make_rows(range(16)))
    for _ in range(3):
        rb.sample()
    if by == "loading":
        rb.dumps(tmp_path / "saved")
    rb.storage.close()
    path = folder if by == "reopening" else tmp_path / "other"
    rb = shared(path, new, 16, uniform=uniform, batch_size=4, timeout_s=5.0)
    if by == "loading":
        rb.loads(tmp_path / "saved")
    assert (rb.storage.directory.tree.leaves[:16] > 0).all()
    seen: collections.Counter[int] = collections.Counter()
    while sum(seen.values()) < 200 and rb.can_sample():
        seen.update(rb.sample()["id"].tolist())
    assert len(seen) > 12  # four had been left
    if new.max_times_sampled:  # until fewer than four rows may be sampled
        least = 36 if by == "reopening" else 30  # a checkpoint says which had been used up
        assert max(seen.values()) == 3 and sum(seen.values()) >= least
    rb.storage.close()


@pytest.mark.parametrize("pad", [False, True])
def test_rows_of_slices_count_as_they_are_returned(folder: Path, pad: bool) -> None:
    sampler = SharedSliceSampler(
        slice_len=10, traj_key="trajectory", strict_length=False, pad_output=pad
    )
    rb = shared(folder, RateLimiter(4, 9.0, 900.0), sampler=sampler, batch_size=40)
    rows = make_rows(range(32))
    rows["trajectory"] = torch.arange(32) // 4
    rb.extend(rows)
    returned = sum(rb.sample().numel() for _ in range(5))
    assert returned == (200 if pad else 80) == rb.storage.limiter_counts.samples
    rb.storage.close()


def _until_it_waits(folder: Path, timeout_s: float) -> SharedReplayBuffer:
    """Return a buffer whose batches fetched ahead wait for rows."""
    limiter = RateLimiter(8, samples_per_insert=1.0, error_buffer=16.0)
    rb = shared(folder, limiter, uniform=True, batch_size=8, prefetch=2, timeout_s=timeout_s)
    rb.extend(make_rows(range(24)))
    while rb.can_sample():
        rb.sample()
    return rb


def test_a_failed_fetch_ahead_fails_no_later_sample(folder: Path) -> None:
    rb = _until_it_waits(folder, 0.3)
    wait_until(lambda: all(each.done() for each in list(rb._prefetch_queue)))
    assert rb._prefetch_queue
    rb.extend(make_rows(range(100)))
    for _ in range(6):
        assert len(rb.sample()) == 8
    rb.storage.close()


def test_saving_and_restoring_do_not_wait_for_rows_of_others(folder: Path, tmp_path: Path) -> None:
    rb = _until_it_waits(folder, 250.0)
    state = rb.state_dict()
    rb.dumps(tmp_path / "dump")
    rb.loads(tmp_path / "dump")
    rb.load_state_dict(state)
    with pytest.raises(RateLimitError):
        rb.storage.timeout_s = 0.1
        for _ in range(50):
            rb.sample()
    assert len(rb) == 24
    rb.storage.close()
