"""Threads and forked children of a process that uses the buffer: no row is torn, nothing hangs, and
no thread enters a lock that another thread holds."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import numpy as np
import pytest
import torch
from torchrl.data import TensorDictReplayBuffer

from tests.replay.faults import (
    assert_sound,
    attach,
    priority_of,
    rows_of,
    run_forked,
    start,
    torn_rows,
    wait_until,
)
from torchrl_dist.errors import DirectoryError
from torchrl_dist.replay import SharedReplayBuffer
from torchrl_dist.replay.node.directory import LOCKS
from torchrl_dist.replay.node.lock import FairLock, close_lock_file, is_held, open_lock_file
from torchrl_dist.replay.node.tables import CLAIM_COUNT, Word

pytestmark = pytest.mark.usefixtures("kept_as")

_CAPACITY = 80
_PACKAGE = str(Path(sys.modules[SharedReplayBuffer.__module__].__file__).parent)


@pytest.fixture
def rb(folder: Path) -> Iterator[TensorDictReplayBuffer]:
    torch.set_num_threads(1)
    buffer = attach(folder, _CAPACITY)
    buffer.extend(rows_of(range(_CAPACITY)))
    yield buffer
    buffer.storage.close()


# --- leaving while others write ------------------------------------------------------------------


class Paused(np.ndarray):
    """Rows whose copying stops in the middle until the test lets it continue."""

    here, go_on = threading.Event(), threading.Event()

    def __setitem__(self, where: slice, rows: np.ndarray) -> None:
        half = len(rows) // 2
        np.asarray(self)[where.start : where.start + half] = rows[:half]
        Paused.here.set()
        assert Paused.go_on.wait(30)
        np.asarray(self)[where.start + half : where.stop] = rows[half:]


def write_slowly(rb: TensorDictReplayBuffer, key: int) -> threading.Thread:
    """Start a daemon thread, and wait until it has copied half of its ten rows."""
    Paused.here, Paused.go_on = threading.Event(), threading.Event()
    arrays = rb.storage.directory.arrays
    arrays[0] = arrays[0].view(Paused)
    rb.storage.directory.kernel.appends = False  # NumPy copies, not C
    rows = rows_of(range(key, key + 10))
    thread = threading.Thread(target=rb.extend, args=(rows,), daemon=True)
    thread.start()
    assert Paused.here.wait(30)
    return thread


@pytest.mark.parametrize("way", ["close", "end"])
def test_a_process_leaves_when_the_writes_of_its_threads_have_ended(rb, way: str) -> None:
    directory = rb.storage.directory

    def leave_while_a_thread_writes() -> None:
        thread = write_slowly(rb, 5000)  # joins as a member of its own
        threading.Timer(0.5, Paused.go_on.set).start()
        if way == "close":
            rb.storage.close()
        else:  # what Python does before it stops daemon threads
            multiprocessing.util._exit_function()
        assert Paused.go_on.is_set()
        thread.join(30)
        with pytest.raises(DirectoryError, match="was closed in this process"):
            rb.extend(rows_of(range(4)))

    pid = start(leave_while_a_thread_writes)
    wait_until(lambda: bool(directory.claims[:, CLAIM_COUNT].any()))
    written = 0
    while not (ended := os.waitpid(pid, os.WNOHANG))[0]:
        rb.extend(rows_of(range(10)))
        written += 10
        assert torn_rows(rb[:]) == 0
    assert os.waitstatus_to_exitcode(ended[1]) == 0
    assert torn_rows(rb[:]) == 0
    assert rb.write_count == _CAPACITY + written + 10  # the thread's rows were published
    assert rb.storage.directory.counters["taken_over_claims"] == 0
    assert_sound(rb)


def test_a_thread_that_waits_does_not_enter_a_closed_lock(rb) -> None:
    """It does not lock another file that now has the descriptor's number, either."""
    directory = rb.storage.directory
    errors: list[Exception] = []

    def enter() -> None:
        try:
            rb.sample()
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=enter)
    with directory.lock():
        thread.start()
        wait_until(lambda: _is_entering(sys._current_frames().get(thread.ident)))
        fd = directory.lock_fd
        directory.fair_lock.close()  # as the last of its users does, inside
        reused = open_lock_file(directory.path / "versions.bin")
        assert reused == fd
    thread.join(30)
    other = open_lock_file(directory.path / "versions.bin")
    assert not is_held(other, 0, 2)
    assert [type(error) for error in errors] == [DirectoryError]
    assert "was closed in this process" in str(errors[0])
    close_lock_file(other)
    close_lock_file(reused)
    rb.storage._closed = True


def _is_entering(frame: FrameType | None) -> bool:
    return frame is not None and frame.f_code is FairLock.__enter__.__code__


# --- forks while threads use the buffer ----------------------------------------------------------


def test_every_lock_that_a_thread_may_have_taken_is_new_in_a_child(rb) -> None:
    """Another thread holds each of these locks at a fork, one lock per fork."""
    recent = rb._sampler._recent
    directory = rb.storage.directory
    locks = [
        rb._replay_lock, rb._futures_lock, recent._lock,
        LOCKS.opening, LOCKS.joining, directory.fair_lock._threads,
    ]  # fmt: skip
    held, release = threading.Event(), threading.Event()

    def hold() -> None:
        with contextlib.ExitStack() as stack:
            for lock in locks:
                stack.enter_context(lock)
            held.set()
            assert release.wait(60)

    def child() -> None:
        batch = rb.sample().clone()
        rb.update_priority(batch["index"], priority_of(batch["key"]))
        rb.extend(rows_of(range(10)))
        attach(directory.path, _CAPACITY).sample()
        rb.storage.close()

    thread = threading.Thread(target=hold, daemon=True)
    thread.start()
    assert held.wait(30)
    try:
        assert run_forked(child, timeout_s=20) == 0
    finally:
        release.set()
        thread.join(30)


def test_a_child_that_comes_after_the_removal_gets_an_error(folder: Path) -> None:
    rb = attach(folder, _CAPACITY)
    rb.storage.directory.words[Word.KEEP] = 0
    rb.extend(rows_of(range(_CAPACITY)))
    go, say_go = multiprocessing.Pipe(duplex=False)

    def late(again: bool) -> None:
        assert go.recv()
        with pytest.raises(DirectoryError, match="was removed before this forked process"):
            rb.sample()
        with pytest.raises(DirectoryError, match="was removed before this forked process"):
            rb.extend(rows_of(range(4)))
        assert folder.exists() == again
        fresh = attach(folder, _CAPACITY)  # what the message says
        assert len(fresh) == 4 * again
        fresh.storage.close()

    for again in (False, True):
        pid = start(late, again)
        rb.storage.close()
        assert not folder.exists()
        if again:  # other rows at the same path are not the earlier ones
            rb = attach(folder, _CAPACITY)
            rb.extend(rows_of(range(4)))
        say_go.send(True)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        if not again:
            rb = attach(folder, _CAPACITY)
            rb.storage.directory.words[Word.KEEP] = 0
    rb.storage.close()
