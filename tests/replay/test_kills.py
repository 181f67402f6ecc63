"""kill -9 while rows and tables are copied, at any time, and of all at once: the others go on.

``test_stores`` kills between any two stores to the tables. With ``TORCHRL_DIST_LONG_TESTS=1`` there
are many times as many kills.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from torchrl.data import TensorDictReplayBuffer

from tests.replay.faults import (
    LONG,
    assert_lock_is_free,
    assert_sound,
    at_step,
    attach,
    die_on_store,
    forked,
    is_stopped,
    kill_self,
    priority_of,
    rows_of,
    run_forked,
    torn_rows,
    wait_until,
)
from tests.spawn import stop_self
from torchrl_dist.replay import SharedMemmapStorage
from torchrl_dist.replay.law.kernel import find_kernel
from torchrl_dist.replay.node.tables import CLAIM_COUNT, Word

_STRIDE = 1 if LONG else 20
"""Mean distance of the steps at which a victim dies."""
_CAPACITY = 80


@pytest.fixture(params=["c", "numpy"])
def kernel(monkeypatch, request) -> str:
    if request.param == "c" and find_kernel() is None:
        pytest.skip("the C kernel was not built: no compiler at installation")
    monkeypatch.setenv("TORCHRL_DIST_KERNEL", request.param)
    return request.param


@pytest.fixture
def rb(folder: Path) -> Iterator[TensorDictReplayBuffer]:
    torch.set_num_threads(1)
    buffer = attach(folder, _CAPACITY)
    refill(buffer)
    yield buffer
    buffer.storage.close()


def refill(rb: TensorDictReplayBuffer) -> None:
    """One lap of new rows with priorities of their own; after it every slot is in use."""
    capacity = rb.storage.max_size
    at = rb.storage.directory.words[Word.CURSOR]
    index = rb.extend(rows_of(range(at, at + capacity)))
    rb.update_priority(index, priority_of(rb[index]["key"]))
    assert len(rb) == capacity
    assert not rb.storage.directory.claims[:, CLAIM_COUNT].any()


def update(rb: TensorDictReplayBuffer) -> None:
    batch = rb.sample()
    batch["td_error"] = priority_of(batch["key"] + 1)
    rb.update_tensordict_priority(batch)


@dataclass
class State:
    """What every process sees of a buffer at one moment."""

    versions: np.ndarray
    keys: np.ndarray
    leaves: np.ndarray
    write_count: int

    @classmethod
    def of(cls, rb: TensorDictReplayBuffer) -> State:
        directory = rb.storage.directory
        with directory.lock():
            return cls(
                directory.versions.copy(),
                rb.storage._storage["key"].numpy().copy(),
                directory.tree.leaves.copy(),
                int(directory.words[Word.WRITE_COUNT]),
            )

    @property
    def visible(self) -> np.ndarray:
        return (self.versions & 1 == 0) & (self.versions > 0)


# --- in the middle of one store, copy or call of the C kernel ------------------------------------


@contextlib.contextmanager
def _wide_buffer(folder: Path) -> Iterator[TensorDictReplayBuffer]:
    """Rows of 4 KiB and tables of several pages each."""
    rb = attach(folder, 2048)
    rb.extend(rows_of(range(2048), 256))
    yield rb
    rb.storage.close()


@pytest.mark.parametrize("what", ["leaves", "last"])
def test_killed_in_the_middle_of_a_store_the_others_go_on(folder: Path, what: str, request) -> None:
    """The table of leaves, and a column of the rows."""
    randomness = random.Random(what)
    with _wide_buffer(folder) as rb:
        directory = rb.storage.directory
        leaves, last = directory.tree.leaves, rb.storage._storage["next", "last"]

        def victim(slot: int, count: int) -> None:
            die_on_store(leaves[slot:].ctypes.data if what == "leaves" else last[slot].data_ptr())
            rb.extend(rows_of(range(count), 256))
            rb.update_priority(torch.arange(2048), torch.rand(2048, dtype=torch.float64))
            rb.sample()

        kills = 0
        for _ in range(200 if LONG else 12):
            count = randomness.randint(100, 256)
            first = int(directory.words[Word.CURSOR])
            # the second of the pages that the reservation lies on, if there are two
            slot = first + min(count - 1, 512 - first % 512)
            before = State.of(rb)
            status = run_forked(victim, slot % 2048, count)
            assert status in (0, -signal.SIGSEGV)
            kills += status < 0
            assert_lock_is_free(directory)
            after = State.of(rb)
            new = after.visible & (after.versions != before.versions)
            assert new.sum() in (0, count)
            assert after.write_count == before.write_count + new.sum()
            assert_sound(rb)
            assert torn_rows(rb.sample()) == 0
            rb.extend(rows_of(range(256), 256))
        assert kills > 8
        for at in range(0, 2048, 256):
            rb.extend(rows_of(range(at, at + 256), 256))
        assert len(rb) == 2048
        assert_sound(rb)
    request.node.user_properties.append(("kills", kills))


def test_killed_in_the_middle_of_an_update_the_others_go_on(folder: Path, kernel: str) -> None:
    with _wide_buffer(folder) as rb:
        directory = rb.storage.directory
        new = 2.0 + torch.rand(2048, dtype=torch.float64)
        for slot in (0, 512, 1024, 1536):  # the first one of each page

            def victim(slot: int = slot) -> None:
                die_on_store(directory.tree.leaves[slot:].ctypes.data)
                rb.update_priority(torch.arange(2048), new)

            rb.update_priority(torch.arange(2048), torch.ones(2048))
            before = State.of(rb)
            assert run_forked(victim) == -signal.SIGSEGV
            assert directory.words[Word.DIRTY]
            after = State.of(rb)
            expected = np.where(np.arange(2048) < slot, (new.numpy() + 1e-8) ** 0.6, before.leaves)
            np.testing.assert_allclose(after.leaves, expected, rtol=1e-12)
            assert (after.versions == before.versions).all()
            assert_sound(rb)
            assert torn_rows(rb.sample()) == 0


# --- at any time, several at once ----------------------------------------------------------------


def _work(folder: Path, capacity: int, first: int) -> None:
    rb = attach(folder, capacity)
    for at in range(first, first + 10**6, 20):
        rb.extend(rows_of(range(at, at + 20)))
        update(rb)
        rb.storage.set(torch.tensor([at % capacity]), rows_of(range(at, at + 1)))


def test_killed_at_any_time_the_others_go_on(folder: Path, request) -> None:
    capacity, kills = 256, 1000 if LONG else 50
    rb = attach(folder, capacity)
    refill(rb)
    directory = rb.storage.directory
    randomness = random.Random(0)
    with contextlib.ExitStack() as stack:
        workers = [
            stack.enter_context(forked(_work, folder, capacity, 10**7 * k)) for k in range(2)
        ]
        for kill in range(kills):
            before = rb.write_count
            wait_until(lambda before=before: rb.write_count > before + 60)
            time.sleep(randomness.random() * 0.01)
            at = kill % 2
            os.kill(workers[at], signal.SIGKILL)
            os.waitpid(workers[at], 0)
            if randomness.random() < 0.5:  # the other one has to repair
                after = rb.write_count
                wait_until(lambda after=after: rb.write_count > after + 20)
            assert torn_rows(rb.sample()) == 0
            workers[at] = stack.enter_context(forked(_work, folder, capacity, 10**7 * (kill + 2)))
    assert_lock_is_free(directory)
    assert_sound(rb)
    refill(rb)
    assert_sound(rb)
    assert directory.live_members() == [directory.member]
    rb.storage.close()
    request.node.user_properties.append(("kills", kills))


class _StopsOnStore(np.ndarray):
    """Stops the process at the first store, after half of the rows."""

    def __setitem__(self, where: slice, rows: np.ndarray) -> None:
        half = len(rows) // 2
        np.asarray(self)[where.start : where.start + half] = rows[:half]
        stop_self()


def test_all_killed_and_restarted_every_published_row_is_back(folder: Path, request) -> None:
    capacity = 256

    def first_life() -> None:
        refill(attach(folder, capacity))

    assert run_forked(first_life) == 0

    def tables() -> tuple[np.ndarray, np.ndarray]:
        return (
            np.fromfile(folder / "versions.bin", np.int64, capacity),
            np.fromfile(folder / "tree.bin", np.float64, capacity),
        )

    def stop_in_the_middle_of_a_copy() -> None:
        rb = attach(folder, capacity)
        arrays = rb.storage.directory.arrays
        arrays[0] = arrays[0].view(_StopsOnStore)
        rb.extend(rows_of(range(20)))

    def next_life(versions: np.ndarray, leaves: np.ndarray, keys: np.ndarray) -> None:
        rb = attach(folder, capacity)
        now = State.of(rb)
        visible = (versions & 1 == 0) & (versions > 0)
        assert now.visible[visible].all()
        assert (now.versions[visible] == versions[visible]).all()
        assert (now.keys[visible] == keys[visible]).all()
        known = visible & (leaves > 0)
        assert (now.leaves[known] == leaves[known]).all()
        assert_sound(rb)
        assert rb.storage.directory.counters["repairs"] > 0
        refill(rb)
        assert_sound(rb)

    randomness = random.Random(0)
    lives = 200 if LONG else 8
    for life in range(lives):
        with (
            forked(_work, folder, capacity, 10**7 * (2 * life + 1)) as first,
            forked(_work, folder, capacity, 10**7 * (2 * life + 2)) as second,
        ):
            before = tables()[0].sum()
            wait_until(lambda before=before: tables()[0].sum() > before + 400)
            time.sleep(randomness.random() * 0.01)
            with forked(stop_in_the_middle_of_a_copy) as stopped:
                wait_until(lambda stopped=stopped: is_stopped(stopped))
                for pid in (first, second):  # before its slots are theirs to take over
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
        versions, leaves = tables()
        assert (versions & 1).any()
        keys = np.fromfile(folder / "data" / "key.bin", np.int64)
        assert run_forked(next_life, versions, leaves, keys) == 0
    request.node.user_properties.append(("kills", 3 * lives))


def test_a_child_of_a_killed_holder_does_not_keep_the_lock(rb) -> None:
    directory = rb.storage.directory
    directory.fair_lock.timeout_s = 15.0
    told, tell = os.pipe()

    def holder() -> None:
        with directory.lock():
            if os.fork() == 0:
                os.write(tell, os.getpid().to_bytes(8, "little"))
                time.sleep(60)  # outlives the holder, and its parent's wait for the lock
                os._exit(0)
            directory.begin()
            kill_self()

    assert run_forked(holder) == -signal.SIGKILL
    child = int.from_bytes(os.read(told, 8), "little")
    try:
        with directory.lock():  # waits until the child has begun to run, and let go of its copies
            pass
        os.kill(child, 0)  # it lives
    finally:
        os.kill(child, signal.SIGKILL)
        os.close(told)
        os.close(tell)
    assert_sound(rb)


# --- creation, joining, removal ------------------------------------------------------------------


def _open(folder: Path) -> SharedMemmapStorage:
    return SharedMemmapStorage(64, scratch_dir=folder, job_id="test")


@pytest.mark.timeout(1200 if LONG else 120)
@pytest.mark.parametrize("phase", ["create", "join", "leave"])
def test_killed_while_the_directory_comes_or_goes_the_next_one_works(
    folder: Path, phase: str, request
) -> None:
    randomness = random.Random(phase)

    def victim(step: int) -> None:
        if phase == "leave":
            storage = _open(folder)
            with at_step(step, kill_self):
                storage.close()
            return
        with at_step(step, kill_self):
            storage = _open(folder)
            storage.append(rows_of(range(8)))
        storage.close()

    def earlier() -> None:
        _open(folder).append(rows_of(range(8)))
        kill_self()

    step = kills = 0
    while True:
        step += randomness.randint(1, 2 * _STRIDE - 1)
        if phase != "create":
            assert run_forked(earlier) == -signal.SIGKILL
        status = run_forked(victim, step)
        assert status in (0, -signal.SIGKILL)
        storage = _open(folder)
        assert_lock_is_free(storage.directory)
        before = len(storage)
        allowed = {"create": (0, 8), "join": (0, 8, 16), "leave": (0, 8)}[phase]
        assert before in allowed
        storage.append(rows_of(range(8, 16)))
        assert len(storage) == before + 8
        rows = storage[:]
        assert torn_rows(rows) == 0 and set(rows["key"].tolist()) <= set(range(16))
        storage.close()
        left = [path.name for path in folder.parent.iterdir() if folder.name in path.name]
        assert left == [], f"after a kill at step {step}"
        if status == 0:
            break
        kills += 1
    assert kills > 3
    request.node.user_properties.append(("kills", kills))
