"""kill -9 at every point of every operation: the others go on, and nothing is torn or lost.

``TORCHRL_DIST_LONG_TESTS=1`` dies at each step instead of a random choice of them.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
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
from torchrl_dist.replay import SharedMemmapStorage, SharedReplayBuffer
from torchrl_dist.replay.law.kernel import find_kernel
from torchrl_dist.replay.node.priorities import default_leaf
from torchrl_dist.replay.node.tables import CLAIM_COUNT, Word

_STRIDE = 1 if LONG else 9
"""Mean distance of the steps at which a victim dies."""
_CAPACITY = 80
_FIRST_KEY = 10**6
"""Keys of the victims' rows start here; those of the others are below."""


@pytest.fixture(params=["c", "numpy"])
def kernel(monkeypatch, request) -> str:
    if request.param == "c" and find_kernel() is None:
        pytest.skip("the C kernel was not built: no compiler at installation")
    monkeypatch.setenv("TORCHRL_DIST_KERNEL", request.param)
    return request.param


@pytest.fixture
def rb(folder: Path, kernel: str) -> Iterator[TensorDictReplayBuffer]:
    torch.set_num_threads(1)
    buffer = attach(folder, _CAPACITY)
    refill(buffer)
    yield buffer
    buffer.storage.close()


def refill(rb: TensorDictReplayBuffer) -> None:
    """One lap of new rows with priorities of their own; after it every slot is in use."""
    capacity = rb.storage.max_size
    at = rb.storage.directory.words[Word.CURSOR]
    index = rb.extend(rows_of(np.arange(at, at + capacity) % _FIRST_KEY))
    rb.update_priority(index, priority_of(rb[index]["key"]))
    assert len(rb) == capacity
    assert not rb.storage.directory.claims[:, CLAIM_COUNT].any()


# --- operations of a victim ----------------------------------------------------------------------


def victims_rows(count: int, width: int = 8):
    return rows_of(range(_FIRST_KEY, _FIRST_KEY + count), width)


def update(rb: TensorDictReplayBuffer) -> None:
    batch = rb.sample()
    batch["td_error"] = priority_of(batch["key"] + 1)
    rb.update_tensordict_priority(batch)


def extend_with_priorities(rb: TensorDictReplayBuffer) -> None:
    ours = SharedReplayBuffer(storage=rb.storage, sampler=rb.sampler, priority_key="key")
    ours.extend(victims_rows(15))


def change_alpha_and_back(rb: TensorDictReplayBuffer) -> None:
    rb.sampler.alpha = 1.2
    rb.sampler.alpha = 0.6


_SCATTERED = torch.tensor([3, 4, 5, 30, 31, 60, 79])

OPERATIONS: dict[str, Callable[[TensorDictReplayBuffer], object]] = {
    "extend": lambda rb: rb.extend(victims_rows(10)),
    "extend of two reservations": lambda rb: rb.extend(victims_rows(15)),
    "extend with priorities": extend_with_priorities,
    "update": update,
    "write in place": lambda rb: rb.storage.set(_SCATTERED, victims_rows(7)),
    "empty": lambda rb: rb.empty(),
    "alpha": change_alpha_and_back,
    "restore": lambda rb: rb.storage.restore(rb.storage.snapshot()),
}


@dataclass
class State:
    """What everybody can see of a buffer, at one moment."""

    versions: np.ndarray
    keys: np.ndarray
    leaves: np.ndarray
    write_count: int
    alpha: float
    default_leaf: float

    @classmethod
    def of(cls, rb: TensorDictReplayBuffer) -> State:
        directory = rb.storage.directory
        with directory.lock():
            return cls(
                directory.versions.copy(),
                rb.storage._storage["key"].numpy().copy(),
                directory.tree.leaves.copy(),
                int(directory.words[Word.WRITE_COUNT]),
                directory.get_float(Word.ALPHA),
                default_leaf(directory),
            )

    @property
    def visible(self) -> np.ndarray:
        return (self.versions & 1 == 0) & (self.versions > 0)


def assert_what_a_kill_may_leave(before: State, after: State, operation: str) -> None:
    assert (after.versions >= before.versions).all()
    kept = after.visible & (after.versions == before.versions)
    new = after.visible & (after.versions != before.versions)
    if operation == "restore":
        assert set(after.keys[new]) <= set(before.keys)
        return
    # rows that were not written stay the same rows, with their priority or the one asked for
    assert (after.keys[kept] == before.keys[kept]).all()
    same = after.leaves == before.leaves
    if operation == "update":
        raw = priority_of(torch.from_numpy(after.keys + 1)).numpy()
        same |= np.isclose(after.leaves, (raw + 1e-8) ** 0.6, rtol=1e-12)
    elif operation == "alpha":  # possibly an old leaf beside a new one, in whichever order
        for power in (2.0, 0.5, 1.0):
            same |= np.isclose(after.leaves, before.leaves**power, rtol=1e-9)
    assert same[kept].all()
    # a reservation is published whole or not at all, and counted
    assert (after.keys[new] >= _FIRST_KEY).all()
    visible = set((after.keys[new] - _FIRST_KEY).tolist())
    runs = {
        "extend": [range(10)],
        "extend of two reservations": [range(10), range(10, 15)],
        "extend with priorities": [range(10), range(10, 15)],
        "write in place": [range(3), range(3, 5), range(5, 6), range(6, 7)],
    }
    for run in runs.get(operation, []):
        assert visible.issuperset(run) or visible.isdisjoint(run), visible
    if operation == "extend with priorities":  # or, of a kill while they were stored, the default
        wanted = np.isclose(after.leaves[new], (after.keys[new] + 1e-8) ** 0.6, rtol=1e-12)
        assert (wanted | (after.leaves[new] == after.default_leaf)).all()
    if operation == "empty":
        assert after.write_count in (before.write_count, 0)
    else:
        assert after.write_count == before.write_count + len(visible)


@pytest.mark.timeout(1200 if LONG else 120)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_killed_at_any_step_the_others_go_on(rb, kernel: str, operation: str, request) -> None:
    directory = rb.storage.directory
    randomness = random.Random(operation)

    def victim(step: int) -> None:
        with at_step(step, kill_self):
            OPERATIONS[operation](rb)

    step = kills = 0
    # without the kernel an operation has several times as many steps, and each takes longer
    stride = _STRIDE if kernel == "c" or LONG else 2 * _STRIDE
    while True:
        step += randomness.randint(1, 2 * stride - 1)
        before = State.of(rb)
        status = run_forked(victim, step)
        assert status in (0, -signal.SIGKILL)
        assert_lock_is_free(directory)
        after = State.of(rb)  # the first to take the lock repairs
        assert_what_a_kill_may_leave(before, after, operation)
        assert_sound(rb)
        rb.sampler.alpha = 0.6
        if len(rb):
            assert torn_rows(rb.sample()) == 0
        refill(rb)  # no slot is lost
        if status == 0:
            break
        kills += 1
    assert kills > 5
    request.node.user_properties.append(("kills", kills))


# --- in the middle of one store, copy or call of the C kernel ------------------------------------


@contextlib.contextmanager
def _wide_buffer(folder: Path) -> Iterator[TensorDictReplayBuffer]:
    """Rows of 4 KiB and tables of several pages each."""
    rb = attach(folder, 2048)
    rb.extend(rows_of(range(2048), 256))
    yield rb
    rb.storage.close()


@pytest.mark.parametrize("what", ["versions", "leaves", "tree", "first", "last"])
def test_killed_in_the_middle_of_a_store_the_others_go_on(folder: Path, what: str, request) -> None:
    randomness = random.Random(what)
    with _wide_buffer(folder) as rb:
        directory = rb.storage.directory
        rows = rb.storage._storage
        addresses = {
            "versions": lambda slot: directory.versions[slot:].ctypes.data,
            "leaves": lambda slot: directory.tree.leaves[slot:].ctypes.data,
            "tree": lambda slot: directory.tree.leaves.ctypes.data + 8 * 2048 + 8 * (slot // 32),
            "first": lambda slot: rows["first"][slot].data_ptr(),
            "last": lambda slot: rows["next", "last"][slot].data_ptr(),
        }

        def victim(slot: int, count: int) -> None:
            die_on_store(addresses[what](slot))
            rb.extend(victims_rows(count, 256))
            rb.update_priority(torch.arange(2048), torch.rand(2048, dtype=torch.float64))
            rb.sample()

        kills = 0
        for _ in range(200 if LONG else 20):
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
        assert kills > 15
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
    capacity, kills = 256, 1000 if LONG else 100
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
    lives = 200 if LONG else 20
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
