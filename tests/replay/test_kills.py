"""After kill -9 during copies, or while directories come and go, the other processes continue.

``test_stores`` kills between any two stores to the tables, and ``test_soak`` at any time.
``TORCHRL_DIST_LONG_TESTS=1`` multiplies the number of kills.
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
    Dying,
    assert_lock_is_free,
    assert_sound,
    attach,
    die_on_store,
    kill_points,
    kill_self,
    priority_of,
    rows_of,
    run_forked,
    torn_rows,
)
from torchrl_dist.replay import SharedMemmapStorage
from torchrl_dist.replay.node.directory import ReplayDirectory
from torchrl_dist.replay.node.tables import CLAIM_COUNT, Word

pytestmark = pytest.mark.usefixtures("kept_as")

_STRIDE = 1 if LONG else 30
"""Mean distance of the steps at which a victim dies."""
_CAPACITY = 80


@pytest.fixture
def rb(folder: Path) -> Iterator[TensorDictReplayBuffer]:
    torch.set_num_threads(1)
    buffer = attach(folder, _CAPACITY)
    refill(buffer)
    yield buffer
    buffer.storage.close()


def refill(rb: TensorDictReplayBuffer) -> None:
    """Write one lap of new rows, each with its own priority. Then every slot is in use."""
    capacity = rb.storage.max_size
    at = rb.storage.directory.words[Word.CURSOR]
    index = rb.extend(rows_of(range(at, at + capacity)))
    rb.update_priority(index, priority_of(rb[index]["key"]))
    assert len(rb) == capacity
    assert not rb.storage.directory.claims[:, CLAIM_COUNT].any()


@dataclass
class State:
    """A buffer as every process sees it at one moment."""

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
    """Make a buffer with rows of 4 KiB and tables of several pages."""
    rb = attach(folder, 2048)
    rb.extend(rows_of(range(2048), 256))
    yield rb
    rb.storage.close()


def _address(directory: ReplayDirectory, what: str, slot: int) -> int:
    """Return the address of a slot's leaf, or where its ``("next", "last")`` will be stored."""
    if what == "leaves":
        return directory.tree.leaves[slot:].ctypes.data
    frames, spec = directory.frames, directory.rows
    if frames is None:
        return directory.arrays[[each.key for each in spec.columns].index(("next", "last"))][
            slot:
        ].ctypes.data
    ring = frames._rings[list(spec.rings).index(("last",))]
    ticket = directory.words[Word.FRAME_CURSOR] + slot - directory.words[Word.CURSOR] % 2048
    return ring[ticket % len(ring) :].ctypes.data


@pytest.mark.parametrize("what", ["leaves", "last"])
def test_killed_in_the_middle_of_a_store_the_others_go_on(folder: Path, what: str, request) -> None:
    """The kill hits the table of leaves, or a column of the rows."""
    randomness = random.Random(what)
    with _wide_buffer(folder) as rb:
        directory = rb.storage.directory

        def victim(slot: int, count: int) -> None:
            die_on_store(_address(directory, what, slot))
            rb.extend(rows_of(range(10_000, 10_000 + count), 256))
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
    kills = 0

    def victim(dying: Dying) -> None:
        if phase == "leave":
            storage = _open(folder)
            with dying:
                storage.close()
            return
        with dying:
            storage = _open(folder)
            storage.append(rows_of(range(8)))
        storage.close()

    def earlier() -> None:
        _open(folder).append(rows_of(range(8)))
        kill_self()

    def prepare() -> None:
        if phase != "create":
            assert run_forked(earlier) == -signal.SIGKILL

    for step, killed in kill_points(victim, every=_STRIDE, prepare=prepare):
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
        kills += killed
    assert kills > 3
    request.node.user_properties.append(("kills", kills))
