"""Checkpoints of one directory: their content, during writes of others and after a crash."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import pickle
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from tensordict import NonTensorData, TensorDict
from torchrl.data import TensorDictReplayBuffer
from torchrl.envs import VecNorm

from tests.replay.conftest import make_rows
from tests.replay.faults import (
    LONG,
    Dying,
    assert_lock_is_free,
    assert_sound,
    attach,
    forked,
    kill_points,
    priority_of,
    rows_of,
    torn_rows,
    wait_until,
)
from torchrl_dist import (
    CheckpointError,
    ConfigurationError,
    SharedMemmapStorage,
    SharedPrioritizedSampler,
    SharedReplayBuffer,
    SharedSliceSampler,
)
from torchrl_dist.errors import DirectoryError
from torchrl_dist.replay.node.tables import Word
from torchrl_dist.replay.row import rows
from torchrl_dist.replay.saving import disk, snapshot
from torchrl_dist.replay.saving import shards as saving
from torchrl_dist.replay.saving.disk import read_dump
from torchrl_dist.replay.saving.snapshot import SavedShard

CAPACITY = 80


@pytest.fixture
def rb(folder: Path) -> Iterator[TensorDictReplayBuffer]:
    buffer = attach(folder, CAPACITY)
    yield buffer
    buffer.storage.close()


def fill(rb: TensorDictReplayBuffer, first: int, count: int) -> None:
    """Write rows with these keys, each with its own priority."""
    for at in range(first, first + count, CAPACITY // 8):
        keys = range(at, min(at + CAPACITY // 8, first + count))
        rb.update_priority(rb.extend(rows_of(keys)), priority_of(torch.tensor(list(keys))))


def rows_in(saved: SavedShard) -> TensorDict:
    assert saved.head.spec is not None
    spec = saved.head.spec
    return rows.build(
        rows.tensors([each[:] for each in saved.columns], spec), spec, (saved.leaf.size,)
    )


def only(path: Path) -> SavedShard:
    ((saved,), _) = read_dump(path)
    assert saved is not None
    return saved


def keys_in(path: Path) -> list[int]:
    return rows_in(only(path))["key"].tolist()


def assert_own_priorities(saved: SavedShard) -> None:
    wanted = (priority_of(rows_in(saved)["key"]).numpy() + 1e-8) ** 0.6
    np.testing.assert_allclose(saved.leaf, wanted, rtol=1e-12)


@contextlib.contextmanager
def before_rows_are_written(function: Callable[[], None]) -> Iterator[None]:
    """Call ``function`` in another thread before rows of each chunk are written to disk."""
    original = disk.ShardFiles.write

    def write(self: disk.ShardFiles, arrays: list[np.ndarray]) -> None:
        thread = threading.Thread(target=function)
        thread.start()
        thread.join(20)
        assert not thread.is_alive(), "the lock is held while rows are written"
        original(self, arrays)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(disk.ShardFiles, "write", write)
        yield


# --- what is saved -------------------------------------------------------------------------------


def test_everything_is_back_in_a_new_directory(folder: Path, tmp_path: Path) -> None:
    first, second = folder / "first", folder / "second"
    rb = attach(first, CAPACITY)
    fill(rb, 0, 100)
    rb.storage.set(torch.tensor([3, 4, 60]), rows_of(range(500, 503)))
    index = torch.arange(40)
    rb.sampler.update_priority(index, torch.rand(40), generation=torch.zeros(40, dtype=torch.int64))
    rb.sampler.alpha = 0.9
    before = rb.storage.directory
    assert before.counters["stale_updates"] == 40
    rb.dumps(tmp_path / "saved")

    new = attach(second, CAPACITY, alpha=0.3, beta=0.8)
    new.loads(tmp_path / "saved")
    after = new.storage.directory
    assert (new[:] == rb[:]).all() and len(new) == CAPACITY
    assert (after.tree.leaves == before.tree.leaves).all()
    assert (after.versions == before.versions).all()
    assert new.sampler.alpha == 0.9 and new.sampler.beta == 0.4
    assert new.sampler.default_priority == rb.sampler.default_priority
    assert new.write_count == rb.write_count and new.writer._cursor == rb.writer._cursor
    assert after.counters == before.counters
    assert new.extend(rows_of([7])).tolist() == rb.extend(rows_of([7])).tolist()
    assert_sound(new)
    # a handle from before the checkpoint still names its row
    fresh = rb.sample()
    fresh["td_error"] = torch.full((64,), 7.0)
    new.update_priority(fresh["index"], fresh["td_error"])
    for each in (rb, new):
        each.storage.close()


def test_a_checkpoint_of_a_buffer_without_rows_empties(rb, tmp_path: Path) -> None:
    rb.storage.dumps(tmp_path)
    fill(rb, 0, 20)
    rb.storage.loads(tmp_path)
    assert len(rb) == 0
    rb.extend(rows_of(range(5)))
    rb.storage.dumps(tmp_path)
    rb.storage.loads(tmp_path)
    assert rb[:]["key"].tolist() == list(range(5))


def test_rows_of_any_dtype_and_without_elements_are_saved(folder: Path, tmp_path: Path) -> None:
    data = TensorDict(
        {
            "half": torch.rand(6, 3).bfloat16(),
            "complex": torch.rand(6, 2, dtype=torch.complex64),
            "bool": torch.rand(6) > 0.5,
            "nothing": torch.empty(6, 0),
            "a/b": {"..": torch.rand(6)},
        },
        [6],
    )
    storage = SharedMemmapStorage(8, scratch_dir=folder, job_id="test")
    storage.append(data)
    storage.dumps(tmp_path / "saved")
    state = storage.state_dict()
    for restore in (
        lambda: storage.loads(tmp_path / "saved"),
        lambda: storage.load_state_dict(state),
    ):
        storage.empty()
        restore()
        assert (storage[:] == data).all()
    storage.close()


def test_the_size_is_that_of_the_rows_and_their_priorities(rb, tmp_path: Path) -> None:
    fill(rb, 0, 50)
    rb.storage.dumps(tmp_path)
    size = sum(each.stat().st_size for each in tmp_path.rglob("*.bin"))
    row_bytes = rb.storage.directory.rows.row_bytes
    assert size == 50 * (row_bytes + 8) + 24


def test_our_class_saves_beta_transforms_and_generator_and_pickles_nothing(
    folder: Path, tmp_path: Path, monkeypatch
) -> None:
    def make(beta: float) -> SharedReplayBuffer:
        buffer = SharedReplayBuffer(
            storage=SharedMemmapStorage(64, scratch_dir=folder, job_id="test"),
            sampler=SharedPrioritizedSampler(64, alpha=0.6, beta=beta),
            batch_size=8,
            transform=VecNorm(in_keys=["obs"]),
        )
        buffer.set_rng(torch.Generator().manual_seed(1))
        return buffer

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("something was pickled")

    for module in (pickle, torch):
        for name in {"dump", "dumps", "load", "loads", "save", "Pickler"} & set(vars(module)):
            monkeypatch.setattr(module, name, refuse)
    rb = make(0.4)
    rb.extend(make_rows(range(32)))
    for _ in range(3):
        rb.sample()
    rb.dumps(tmp_path / "saved")
    known = str(rb.transform.state_dict())
    assert "obs_sum" in known
    rb.empty()
    other = make(1.0)
    other.loads(tmp_path / "saved")
    assert len(other) == 32 and other.sampler.beta == 0.4
    assert other._rng.get_state().tolist() == rb._rng.get_state().tolist()
    assert str(other.transform.state_dict()) == known
    assert other.sample()["id"].numel() == 8
    for each in (rb, other):
        each.shutdown()
        each.storage.close()


# --- while others go on --------------------------------------------------------------------------


@pytest.fixture
def small_chunks(monkeypatch) -> None:
    monkeypatch.setattr(snapshot, "_CHUNK_ROWS", 8)


def test_writers_that_are_slower_overwrite_nothing_that_is_saved(
    rb, tmp_path: Path, small_chunks
) -> None:
    fill(rb, 0, 100)
    before = rb[:]["key"].sort().values.tolist()
    following = iter(range(1000, 10**6))

    def write() -> None:
        rb.extend(rows_of([next(following)]))

    with before_rows_are_written(write):
        rb.storage.dumps(tmp_path)
    saved = only(tmp_path)
    keys = rows_in(saved)["key"]
    # they took rows out of the first chunk while it was written, and never caught up again
    assert keys.tolist() == before[3:] and saved.overwritten == 3
    assert torn_rows(rows_in(saved)) == 0
    assert_own_priorities(saved)


def test_rows_that_were_overwritten_are_missing_and_counted(
    rb, tmp_path: Path, small_chunks
) -> None:
    fill(rb, 0, 100)
    before = set(rb[:]["key"].tolist())
    following = iter(range(1000, 10**6, 10))

    def write() -> None:
        for _ in range(2):
            rb.extend(rows_of(range(first := next(following), first + 10)))

    with before_rows_are_written(write):
        rb.storage.dumps(tmp_path)
    saved = only(tmp_path)
    keys = rows_in(saved)["key"].tolist()
    assert set(keys) < before and len(set(keys)) == len(keys)  # none with a later ticket
    assert 0 < saved.overwritten == CAPACITY - len(keys)
    assert torn_rows(rows_in(saved)) == 0
    assert_own_priorities(saved)
    rb.storage.loads(tmp_path)
    assert sorted(rb[:]["key"].tolist()) == sorted(keys)
    assert rb.extend(rows_of([1])).tolist() == [20]
    assert_sound(rb)


@pytest.mark.parametrize("ordered", [True, False])
def test_rows_that_change_all_the_time_are_saved_whole(
    rb, tmp_path: Path, small_chunks, monkeypatch, ordered: bool
) -> None:
    if not ordered:
        monkeypatch.setattr(snapshot, "_ATTEMPTS", 0)
    fill(rb, 0, 80)
    keys = iter(range(1000, 10**6))
    calls = 0

    def rewrite() -> None:
        nonlocal calls
        calls += 1
        rb.storage.set(torch.arange(0, 80, 3), rows_of([next(keys) for _ in range(27)]))

    with before_rows_are_written(rewrite):
        rb.storage.dumps(tmp_path)
    assert calls == (40 if ordered else 10)  # three times, then under the lock
    saved = only(tmp_path)
    assert saved.slots.tolist() == list(range(80))
    data = rows_in(saved)
    assert torn_rows(data) == 0
    new = [slot % 3 == 0 and (ordered or slot >= 8) for slot in range(80)]
    assert [int(key) >= 1000 for key in data["key"]] == new
    assert (saved.versions <= rb.storage.directory.versions).all()


def test_a_change_of_alpha_does_not_mix_priorities(rb, tmp_path: Path, small_chunks) -> None:
    fill(rb, 0, 80)
    alphas = iter([0.7, 1.2, 0.3] * 10)

    def change() -> None:
        rb.sampler.alpha = next(alphas)

    with before_rows_are_written(change):
        rb.storage.dumps(tmp_path)
    saved = only(tmp_path)
    assert saved.head.alpha == 0.6
    wanted = (priority_of(rows_in(saved)["key"]).numpy() + 1e-8) ** 0.6
    np.testing.assert_allclose(saved.leaf, wanted, rtol=1e-6)


def test_our_class_saves_while_another_thread_samples(make_buffer, tmp_path: Path) -> None:
    rb = make_buffer(kind=SharedReplayBuffer)
    rb.extend(make_rows(range(64)))
    with before_rows_are_written(lambda: rb.sample()):
        rb.dumps(tmp_path)


def test_a_restore_lets_newer_rows_stay(rb, tmp_path: Path, monkeypatch, small_chunks) -> None:
    fill(rb, 0, 100)
    rb.storage.dumps(tmp_path)
    fill(rb, 100, 40)
    original, calls = snapshot.restore_rows, 0

    def write_and_restore(*args) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:  # oldest slots first: 20 ... and these rows take slots 20 to 49
            fill(rb, 1000, 30)
        original(*args)

    monkeypatch.setattr(snapshot, "restore_rows", write_and_restore)
    rb.storage.loads(tmp_path)
    assert sorted(rb[:]["key"].tolist()) == [*range(50, 100), *range(1000, 1030)]
    assert_sound(rb)


@pytest.mark.parametrize("alpha", [1.1, 0.0])
def test_an_alpha_that_is_set_during_a_restore_is_that_of_all_rows(
    rb, tmp_path: Path, monkeypatch, small_chunks, alpha: float
) -> None:
    fill(rb, 0, CAPACITY)
    rb.storage.dumps(tmp_path)
    original, calls = snapshot.restore_rows, 0

    def set_and_restore(*args) -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            rb.sampler.alpha = alpha  # as another process might
        original(*args)

    monkeypatch.setattr(snapshot, "restore_rows", set_and_restore)
    rb.storage.loads(tmp_path)
    wanted = (priority_of(rb[:]["key"]).numpy() + 1e-8) ** alpha
    np.testing.assert_allclose(rb.storage.directory.tree.leaves[:CAPACITY], wanted, rtol=1e-9)
    assert_sound(rb)


def test_a_restore_without_room_in_one_shard_empties_none(rb, folder: Path, monkeypatch) -> None:
    fill(rb, 0, CAPACITY)
    full = SharedMemmapStorage(CAPACITY, scratch_dir=folder / "full", job_id="test")
    saved, rows = rb.storage.snapshot(), rb[:]

    def allocate(fd: int, *_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", allocate)
        with pytest.raises(DirectoryError, match="No space left.*another scratch_dir"):
            saving.restore([*rb.storage.shards(), *full.shards()], CAPACITY, saved)
    assert (rb[:] == rows).all()
    saving.restore([*rb.storage.shards(), *full.shards()], CAPACITY, saved)
    assert len(rb) == len(full) == CAPACITY / 2
    full.close()


# --- crashes -------------------------------------------------------------------------------------


@pytest.mark.timeout(600 if LONG else 120)
def test_killed_anywhere_the_earlier_or_the_new_checkpoint_is_whole(
    rb, tmp_path: Path, request
) -> None:
    saver = SharedReplayBuffer(storage=rb.storage, sampler=rb.sampler, batch_size=8)
    saver.set_rng(torch.Generator())
    target = tmp_path / "saved"
    fill(rb, 0, 60)
    saver.dumps(target)
    before = keys_in(target)
    kills = new = 0
    fills = itertools.count(100, 20)

    def victim(dying: Dying) -> None:
        with dying:
            saver.dumps(target)

    for step, killed in kill_points(
        victim, every=1 if LONG else 17, prepare=lambda: fill(rb, next(fills), 20)
    ):
        after = sorted(rb[:]["key"].tolist())
        found = sorted(keys_in(target))
        assert found in (sorted(before), after), f"after a kill at step {step}"
        assert_lock_is_free(rb.storage.directory)
        new += found == after and killed
        before = found
        kills += killed
    assert kills > 10 and new > 0
    request.node.user_properties.append(("kills", kills))
    assert sorted(each.name[:5] for each in target.iterdir()) == ["check", "rows-"]
    saver.loads(target)
    assert sorted(rb[:]["key"].tolist()) == before
    assert_sound(rb)


def test_all_is_on_the_disk_before_the_new_checkpoint_is_valid(
    rb, tmp_path: Path, monkeypatch
) -> None:
    synced: set[str] = set()
    fsync, replace = os.fsync, os.replace
    at_rename: list[set[str]] = []

    def note_sync(fd: int) -> None:
        synced.add(os.readlink(f"/proc/self/fd/{fd}"))
        fsync(fd)

    def note_rename(source: Path, target: Path) -> None:
        if Path(target).name == "checkpoint.json":
            at_rename.append(set(synced))
            synced.clear()
        replace(source, target)

    monkeypatch.setattr(os, "fsync", note_sync)
    monkeypatch.setattr(os, "replace", note_rename)
    fill(rb, 0, 60)
    synced.clear()
    rb.storage.dumps(tmp_path)
    (data,) = tmp_path.glob("rows-*")
    wanted = {str(data), str(data / "checkpoint.json")}
    wanted |= {str(each) for each in data.rglob("*")}
    assert len(at_rename) == 1 and at_rename[0] >= wanted
    assert str(tmp_path) in synced


def test_a_failed_write_leaves_the_earlier_checkpoint_and_no_files(
    rb, tmp_path: Path, monkeypatch
) -> None:
    fill(rb, 0, 60)
    rb.storage.dumps(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    fill(rb, 60, 20)
    for name in ("pwrite", "fsync", "replace", "ftruncate"):
        with monkeypatch.context() as patch:

            def fail(*_: object) -> None:
                raise OSError(28, "No space left on device")

            patch.setattr(os, name, fail)
            with pytest.raises(CheckpointError, match="could not write .* No space left"):
                rb.storage.dumps(tmp_path)
        assert sorted(tmp_path.rglob("*")) == before
        assert keys_in(tmp_path) == list(range(60))


def test_one_writes_at_a_time(rb, tmp_path: Path) -> None:
    fill(rb, 0, 60)
    errors = []

    def dump_too() -> None:
        try:
            rb.storage.dumps(tmp_path)
        except CheckpointError as error:
            errors.append(str(error))

    with before_rows_are_written(dump_too):
        rb.storage.dumps(tmp_path)
    assert errors and all("is writing a checkpoint" in error for error in errors)
    rb.storage.dumps(tmp_path)
    assert keys_in(tmp_path) == list(range(60))


def test_a_checkpoint_is_read_while_new_ones_take_its_place(rb, tmp_path: Path) -> None:
    fill(rb, 0, 60)
    rb.storage.dumps(tmp_path)

    def save() -> None:
        while True:
            rb.storage.dumps(tmp_path)

    with forked(save):
        for _ in range(100):
            saved = only(tmp_path)
            assert torn_rows(rows_in(saved)) == 0 and saved.leaf.size == 60


# --- refusals ------------------------------------------------------------------------------------


def test_rows_of_another_kind_are_refused_and_the_buffer_stays(
    rb, folder: Path, tmp_path: Path
) -> None:
    other = SharedMemmapStorage(16, scratch_dir=folder / "other", job_id="test")
    other.append(TensorDict({"key": torch.zeros(4), "new": torch.zeros(4, 2)}, [4]))
    other.dumps(tmp_path)
    other.close()
    fill(rb, 0, 60)
    versions = rb.storage.directory.versions.copy()
    with pytest.raises(ConfigurationError) as error:
        rb.storage.loads(tmp_path)
    for part in (
        "'key' is float32 [] in the saved rows, but int64 []",
        "but missing in the buffer",
    ):
        assert part in str(error.value)
    assert (rb.storage.directory.versions == versions).all() and len(rb) == 60
    assert_sound(rb)


# --- another capacity ----------------------------------------------------------------------------


@pytest.mark.parametrize("capacity", [40, 200])
def test_another_capacity_keeps_the_newest_rows_in_their_order(
    rb, folder: Path, tmp_path: Path, capacity: int
) -> None:
    fill(rb, 0, 100)
    rb.storage.dumps(tmp_path)
    other = attach(folder / "other", capacity)
    expected = list(range(100))[-min(capacity, CAPACITY) :]
    missing = CAPACITY - len(expected)
    told = pytest.warns(UserWarning, match=f"{missing} more rows")
    with told if missing else contextlib.nullcontext():
        other.storage.loads(tmp_path)
    assert other[:]["key"].tolist() == expected
    directory = other.storage.directory
    wanted = (priority_of(torch.tensor(expected)).numpy() + 1e-8) ** 0.6
    np.testing.assert_allclose(directory.tree.leaves[: len(expected)], wanted, rtol=1e-12)
    assert other.write_count == 100
    # no handle from before names a row: its generation has not been there
    assert (directory.versions[: len(expected)] > rb.storage.directory.versions.max()).all()
    assert other.extend(rows_of([5])).tolist() == [len(expected) % capacity]
    assert directory.words[Word.DIRTY] == 0
    assert_sound(other)
    other.storage.close()


def test_counts_of_transforms_are_saved_whole_while_they_change(
    folder: Path, tmp_path: Path
) -> None:
    def build(name: str) -> SharedReplayBuffer:
        storage = SharedMemmapStorage(64, scratch_dir=folder / name, job_id="test")
        transform = VecNorm(in_keys=["obs"], new_api=False)
        return SharedReplayBuffer(storage=storage, batch_size=8, transform=transform)

    rb, other = build("one"), build("other")
    for buffer in (rb, other):
        buffer.extend(make_rows(range(20)))
        buffer.sample()
    original = disk._bytes_of

    def counts_on(array: np.ndarray) -> memoryview:
        content = original(array)
        rb.sample()  # after what is written was taken, before it is summed
        return content

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(disk, "_bytes_of", counts_on)
        rb.dumps(tmp_path / "dump")
    other.loads(tmp_path / "dump")
    assert len(other.sample()) == 8
    for buffer in (rb, other):
        buffer.storage.close()


def test_a_batch_ahead_that_failed_does_not_fail_a_restore(make_buffer, tmp_path: Path) -> None:
    rb = make_buffer(64, kind=SharedReplayBuffer, batch_size=8, prefetch=2)
    rb.extend(make_rows(range(20)))
    rb.dumps(tmp_path / "dump")
    rb.extend(make_rows(range(20, 30)))
    rb.sample()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SharedReplayBuffer, "_sample", lambda *_: 1 / 0)
        for _ in range(2):
            rb.sample()
    wait_until(lambda: all(each.done() for each in rb._prefetch_queue))
    rb.loads(tmp_path / "dump")
    assert len(rb) == 20 and len(rb.sample()) == 8


def test_rows_with_and_without_streams_and_wider_text_are_restored(
    folder: Path, tmp_path: Path
) -> None:
    """Streams are then unknown. A field for text has room for the saved text."""

    def rows_with(text: str, first: int) -> TensorDict:
        found = make_rows(range(first, first + 10))
        found["done"] = torch.zeros(10, 1, dtype=torch.bool)
        return found.set("text", NonTensorData(text, batch_size=[10]))

    def build(name: str, by_end: bool) -> SharedReplayBuffer:
        sampler = SharedSliceSampler(slice_len=4, end_key="done") if by_end else None
        storage = SharedMemmapStorage(64, scratch_dir=folder / name, job_id="test")
        return SharedReplayBuffer(storage=storage, sampler=sampler, batch_size=8)

    one, two, three = (build(*args) for args in (("1", False), ("2", True), ("3", True)))
    one.extend(rows_with("short", 0))
    three.extend(rows_with("long" * 99, 50))
    one.dumps(tmp_path / "one")
    three.dumps(tmp_path / "three")
    for buffer in (two, three):
        buffer.loads(tmp_path / "one")
        assert buffer[:]["id"].tolist() == list(range(10))
        assert buffer[:]["text"] == "short" or set(buffer[:]["text"]) == {"short"}
    two.load_state_dict(one.state_dict())
    with pytest.raises(ConfigurationError, match="more than"):  # of what one's rows have room for
        one.loads(tmp_path / "three")
    assert one[:]["id"].tolist() == list(range(10)) and len(one.sample()) == 8
    for buffer in (one, two, three):
        buffer.storage.close()


def test_the_state_of_a_uniform_buffer_leaves_alpha_and_beta(folder: Path) -> None:
    uniform = attach(folder / "1", uniform=True)
    uniform.extend(make_rows(range(9)))
    prioritized = attach(folder / "2", alpha=0.7, beta=0.3)
    prioritized.load_state_dict(uniform.state_dict())
    assert len(prioritized) == 9 and len(prioritized.sample()) == 64
    assert (prioritized.sampler.alpha, prioritized.sampler.beta) == (0.7, 0.3)
    for buffer in (uniform, prioritized):
        buffer.storage.close()


@pytest.mark.parametrize("kinds", [(0, 1), (1, 0), (1, 1)], ids=str)
def test_batches_drawn_ahead_go_with_a_state_to_either_class(folder: Path, kinds) -> None:
    options = {"uniform": True, "batch_size": 8, "prefetch": 2}
    classes = (TensorDictReplayBuffer, SharedReplayBuffer)
    one, other = (
        attach(folder / str(number), kind=classes[kind], **options)
        for number, kind in enumerate(kinds)
    )
    one.extend(make_rows(range(20)))
    one.sample()
    state = one.state_dict()
    ahead = [each.result() for each in one._prefetch_queue]
    assert len(ahead) == 2
    other.load_state_dict(state)
    for each in ahead:
        expected = each[0][0] if kinds[0] else each[0]
        given = other.sample()
        assert given["id"].tolist() == expected["id"].tolist()
        assert given["index"].tolist() == expected["id"].tolist()
    for buffer in (one, other):
        buffer.storage.close()
