"""One process with the shared storage, sampler and writer in TorchRL's TensorDictReplayBuffer."""

from __future__ import annotations

import copy
import gc
import io
import multiprocessing
import os
import pickle
import shutil
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torchrl.data import (
    ReplayBuffer,
    TensorDictReplayBuffer,
)

from tests.replay.conftest import make_rows
from tests.replay.faults import attach, run_forked, wait_until
from torchrl_dist.errors import ConfigurationError, DeadlineError, DirectoryError
from torchrl_dist.replay import (
    RateLimiter,
    SharedCursorWriter,
    SharedMemmapStorage,
    SharedPrioritizedSampler,
    SharedPrioritizedSliceSampler,
    SharedRandomSampler,
    SharedReplayBuffer,
    SharedSamplerWithoutReplacement,
    SharedSliceSampler,
    anneal_beta,
)
from torchrl_dist.replay.node.cursor import Reservation
from torchrl_dist.replay.parts.sampler import RecentGenerations

BUFFERS = pytest.mark.parametrize("kind", [TensorDictReplayBuffer, SharedReplayBuffer])


def assert_whole(batch: TensorDict) -> None:
    value = batch["id"].double()
    assert (batch["obs"] == value[:, None]).all()
    assert (batch["next", "obs"] == value[:, None] + 0.5).all()


# --- writing and reading -------------------------------------------------------------------------


def test_a_generation_is_the_one_of_the_copied_row_even_if_its_slot_is_reused_at_once(
    make_buffer, monkeypatch
) -> None:
    rb = make_buffer(8, batch_size=4)
    rb.extend(make_rows(range(8)))
    hand_over = rb.storage.hand_over

    def reuse_every_slot(drawn):
        hand_over(drawn)
        rb.storage.append(make_rows(range(100, 108)))

    monkeypatch.setattr(rb.storage, "hand_over", reuse_every_slot)
    batch = rb.sample()
    assert (batch["id"] < 8).all() and (batch["index_generation"] == 1).all()


# --- priorities ----------------------------------------------------------------------------------


@BUFFERS
@pytest.mark.parametrize("part", ["all", "clone", "sorted", "some", "one", "plain index"])
def test_late_priority_for_a_recycled_slot_is_dropped(make_buffer, kind, part) -> None:
    rb = make_buffer(16, alpha=1.0, kind=kind)
    rb.extend(make_rows(range(16)))
    batch = rb.sample(8)
    while (batch["index"].diff() >= 0).all():  # else "sorted" would be the batch itself
        batch = rb.sample(8)
    batch["td_error"] = torch.full((8,), 100.0)
    assert run_forked(lambda: rb.extend(make_rows(range(16, 24)))) == 0  # slots 0 to 7
    late = {
        "clone": batch.clone(),
        "sorted": batch[batch["index"].argsort(stable=True)],
        "some": batch[2:6],
        "one": batch[3],
    }.get(part, batch)
    if part == "plain index":
        rb.update_priority(batch["index"].clone(), batch["td_error"])
    else:
        rb.update_tensordict_priority(late)
    counters = rb.storage.directory.counters
    stale = int((late["index"] < 8).sum())
    leaves = rb.storage.directory.tree.leaves
    fresh = np.unique(late["index"][late["index"] >= 8].numpy())
    np.testing.assert_allclose(leaves[fresh], 100.0)
    if kind is SharedReplayBuffer or part in ("all", "clone", "plain index"):
        assert counters["stale_updates"] == stale and counters["unverified_updates"] == 0
        np.testing.assert_allclose(np.delete(leaves, fresh), 1.0)
    else:  # TorchRL's class passes slots only: a part of a batch is not recognized, but counted
        assert counters["unverified_updates"] == late.numel()


def test_an_unknown_index_is_applied_and_counted_and_minus_one_is_skipped(make_buffer) -> None:
    rb = make_buffer(16, alpha=1.0)
    rb.extend(make_rows(range(8)))
    rb.update_priority(torch.tensor([2, -1, 12]), torch.tensor([3.0, 4.0, 5.0]))
    leaves = rb.storage.directory.tree.leaves
    np.testing.assert_allclose(leaves[[2, 7, 12]], [3, 1, 0], atol=1e-6)
    assert rb.storage.directory.counters["unverified_updates"] == 2


def test_building_another_buffer_over_the_rows_keeps_all_priorities(make_buffer) -> None:
    rb = make_buffer(16)
    rb.extend(make_rows(range(16)))
    rb.update_priority(torch.arange(16), torch.arange(1.0, 17.0))
    before = rb.storage.directory.tree.leaves.copy()
    late = make_buffer(16)
    assert len(late) == 16
    assert (late.storage.directory.tree.leaves == before).all()
    late.update_priority(torch.arange(16), torch.full((16,), 2.0))  # afterwards it counts
    assert (late.storage.directory.tree.leaves != before).any()


def test_beta_is_annealed_by_the_jobs_step(make_buffer) -> None:
    rb = make_buffer(8)
    assert anneal_beta(rb.sampler, 0, steps=100) == 0.4
    with pytest.raises(ConfigurationError, match="ReplayBuffer; pass buffer.sampler"):
        anneal_beta(rb, 0, steps=100)
    assert anneal_beta(rb.sampler, 50, steps=100) == pytest.approx(0.7)
    assert anneal_beta(rb.sampler, 50, steps=100) == pytest.approx(0.7)
    assert anneal_beta(rb.sampler, 500, steps=100) == rb.sampler.beta == 1.0


def test_without_its_key_rows_get_the_largest_priority_as_in_torchrl(make_buffer) -> None:
    """TorchRL's TensorDictReplayBuffer then takes its sampler's default, the largest seen."""
    rb = make_buffer(8)
    rb.extend(make_rows(range(8)))
    rb.update_priority(torch.arange(8), torch.arange(1.0, 9.0))
    batch = rb.sample()
    rb.update_tensordict_priority(batch.exclude(rb.priority_key))
    leaves = rb.storage.directory.tree.leaves
    assert (leaves[batch["index"].numpy()] == leaves.max()).all()
    assert (leaves < leaves.max()).sum() == 8 - len(set(batch["index"].tolist()) | {7})


# --- identity and lifetime -----------------------------------------------------------------------


def test_the_directory_is_removed_by_the_last_close_unless_kept(folder: Path, make_buffer) -> None:
    one, two = make_buffer(8), make_buffer(8)
    assert folder.stat().st_mode & 0o777 == 0o700
    one.storage.close()
    one.storage.close()
    assert folder.exists()
    two.storage.close()
    assert not folder.exists()
    kept = make_buffer(8, keep=True)
    kept.extend(make_rows(range(3)))
    kept.storage.close()
    assert folder.exists()
    again = make_buffer(8)
    assert len(again) == 3


@pytest.mark.parametrize(
    ("kind", "prefetch"), [(TensorDictReplayBuffer, None), (SharedReplayBuffer, 2)]
)
def test_a_closed_buffer_holds_no_memory_once_it_is_dropped(
    folder: Path, prefetch: int | None, kind: type[ReplayBuffer]
) -> None:
    """It needs no garbage collection, because a sweep makes one large buffer after another."""

    def held() -> tuple[int, int]:
        maps = Path("/proc/self/maps").read_text().splitlines()
        return len(os.listdir("/proc/self/fd")), sum(folder.name in line for line in maps)

    def use() -> None:
        rb = attach(folder, 64, kind=kind, batch_size=8, prefetch=prefetch, keep=False)
        rb.extend(make_rows(range(80)))
        for _ in range(3):
            batch = rb.sample()
        rb.update_tensordict_priority(batch)
        rb.storage.close()

    gc.collect()
    gc.disable()
    try:
        use()  # what stays with the process
        wait_until(lambda: held()[1] == 0)  # a draw ahead ends by itself
        before = held()
        use()
        wait_until(lambda: held() <= before)
    finally:
        gc.enable()


def test_another_jobs_rows_are_refused_unless_resumed(folder: Path) -> None:
    def storage(job_id: str, **kwargs) -> SharedMemmapStorage:
        return SharedMemmapStorage(8, scratch_dir=folder, job_id=job_id, keep=True, **kwargs)

    first = storage("one")
    with pytest.raises(DirectoryError, match="already opened .* for job 'one'"):
        storage("two")
    first.append(make_rows(range(3)))
    first.close()
    with pytest.raises(DirectoryError, match="left by job 'one' with 3 rows"):
        storage("two")
    second = storage("two", resume=True)
    assert len(second) == 3
    second.close()


def test_a_full_disk_is_an_error_before_any_row_is_damaged(
    make_buffer, folder, monkeypatch
) -> None:
    rb = make_buffer(16)

    def no_space(fd: int, offset: int, size: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", no_space)
        with pytest.raises(DirectoryError, match="No space left"):
            rb.extend(make_rows(range(4)))
        with pytest.raises(DirectoryError, match="could not allocate the tables"):
            attach(folder / "new")
    assert len(rb) == 0 and not (Path(rb.storage.scratch_dir) / "data").exists()
    rb.extend(make_rows(range(4)))
    assert len(rb) == 4


def test_a_network_file_system_is_refused(folder: Path, monkeypatch) -> None:
    from torchrl_dist.replay.node import mapping

    monkeypatch.setattr(mapping, "_NETWORK_FILE_SYSTEMS", frozenset({"tmpfs"}))
    with pytest.raises(DirectoryError, match="network file system"):
        SharedMemmapStorage(8, scratch_dir=folder)


# --- while others write --------------------------------------------------------------------------


def test_a_restore_waits_for_writers_of_its_slots(make_buffer) -> None:
    rb = make_buffer(64, timeout_s=0.5)
    rb.extend(make_rows(range(64)))
    state = rb.state_dict()
    writing = rb.storage._cursor.reserve(8)
    with pytest.raises(DeadlineError, match="waited 0.5 s for slots 0 to 63 .* still writing"):
        rb.load_state_dict(state)
    rb.storage._cursor.publish(writing)
    rb.load_state_dict(state)
    assert len(rb) == 64 and rb[:]["id"].tolist() == list(range(64))


def test_rows_that_were_being_written_when_the_buffer_was_emptied_are_dropped(make_buffer) -> None:
    rb = make_buffer(64)
    rb.extend(make_rows(range(16)))
    writing = rb.storage._cursor.reserve(8)
    rb.empty()
    assert (rb.storage._cursor.publish(writing) == -1).all()
    assert len(rb) == 0
    rb.extend(make_rows(range(8)))
    assert rb[:]["id"].tolist() == list(range(8))


def test_a_slice_leaves_out_rows_whose_writer_does_not_come_back(make_buffer) -> None:
    rb = make_buffer(64, timeout_s=0.5)
    rb.extend(make_rows(range(16)))
    storage = rb.storage
    lost: list[Reservation] = []

    class Disturbed(np.ndarray):
        def take(self, *arguments, **options):
            if not lost:
                lost.extend(storage._cursor.claim_slots(np.array([3, 4, 9])))
            return np.asarray(self).take(*arguments, **options)

    storage.directory._arrays = [array.view(Disturbed) for array in storage.directory.arrays]
    rows = rb[:]
    assert lost
    assert rows["id"].tolist() == [i for i in range(16) if i not in (3, 4, 9)]
    assert_whole(rows)


@pytest.mark.parametrize("kind", ["uniform", "prioritized", "slices"])
def test_a_sample_waits_while_all_rows_are_being_written(make_buffer, kind) -> None:
    rb = make_buffer(8, uniform=kind == "uniform", timeout_s=0.5)
    if kind == "slices":
        rb.set_sampler(SharedSliceSampler(traj_key="id", slice_len=1))
    rb.extend(make_rows(range(8)))
    cursor, taken, go_on = rb.storage._cursor, threading.Event(), threading.Event()

    def rewrite(finish: Callable[[Reservation], object]) -> None:
        (reservation,) = cursor.claim_slots(np.arange(8))
        taken.set()
        assert go_on.wait(30)
        finish(reservation)

    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(rewrite, cursor.publish)
        assert taken.wait(30)
        assert len(rb) == 0
        with pytest.raises(DeadlineError, match=f"but processes .{os.getpid()}"):
            rb.sample()
        rb.storage.timeout_s = 30
        threading.Timer(0.1, go_on.set).start()
        assert rb.sample()["id"].max() < 8
        first.result(30)

        taken.clear()
        go_on.clear()
        second = pool.submit(rewrite, cursor.abandon)
        assert taken.wait(30)
        threading.Timer(0.1, go_on.set).start()
        with pytest.raises(RuntimeError, match="empty storage"):  # no process writes now
            rb.sample()
        second.result(30)


def test_many_separate_slots_are_written_in_place(make_buffer) -> None:
    rb = make_buffer(4096)
    rb.extend(make_rows(range(4096)))
    rb.storage[torch.arange(0, 4096, 2)] = make_rows(range(10_000, 12_048))
    assert len(rb) == 4096
    assert rb[:]["id"][::2].tolist() == list(range(10_000, 12_048))
    assert rb[:]["id"][1::2].tolist() == list(range(1, 4096, 2))


def test_a_default_device_does_not_reach_into_the_buffer(make_buffer) -> None:
    rb = make_buffer(16, batch_size=16)
    rb.extend(make_rows(range(16), 2048))
    torch.set_default_device("meta")
    try:
        batch = rb.sample()
    finally:
        torch.set_default_device(None)
    assert batch.device.type == batch["obs"].device.type == "cpu"


def test_remembering_many_small_batches_takes_little_memory() -> None:
    recent = RecentGenerations()
    batches = [torch.tensor([k]) for k in range(12_000)]
    for index in batches:
        recent.remember(index, index + 1, written=True)
    assert len(recent._batches) < 10_000
    assert recent.recall(batches[-1]).tolist() == [12_000]
    assert recent.recall(batches[-1].clone()).tolist() == [12_000]
    assert recent.recall(batches[0]) is None
    for index in batches:
        recent.remember(index, index + 2, written=True)
    assert recent.recall(batches[-1].clone()).tolist() == [12_001]
    assert len(recent._by_values) + len(recent._unhashed) < 12_000


@pytest.mark.parametrize("count", [0, 1, 300, 2**19 - 1, 2**19, 2**19 + 5])
def test_a_batch_is_remembered_and_not_kept_alive(count: int) -> None:
    recent = RecentGenerations()
    for begin in (7, 0):
        index = torch.arange(begin, begin + count)
        recent.remember(index, index + 1, written=False)
    assert torch.equal(recent.recall(index), index + 1)
    alive, copy = weakref.ref(index), index.clone()
    del index
    assert alive() is None
    assert torch.equal(recent.recall(copy), copy + 1)
    assert recent.recall(copy + 2) is None or not count


def test_a_slot_without_a_row_takes_no_priority_for_generation_zero(make_buffer) -> None:
    rb = make_buffer()
    rb.extend(make_rows(range(10)))
    directory = rb.storage.directory
    rb.sampler.update_priority(
        torch.arange(20), torch.full((20,), 5.0), generation=torch.zeros(20, dtype=torch.int64)
    )
    assert not directory.tree.leaves[10:].any()
    assert directory.counters["stale_updates"] == 20


def test_a_row_stays_visible_however_small_its_priority_becomes(make_buffer) -> None:
    rb = make_buffer(alpha=50.0)
    index = rb.extend(make_rows(range(10)))
    rb.update_priority(index, torch.zeros(10))
    assert set(rb.sample(500)["id"].tolist()) == set(range(10))
    rb.update_priority(index, torch.full((10,), 1e-5, dtype=torch.float64))
    rb.sampler.alpha = 500.0
    assert set(rb.sample(500)["id"].tolist()) == set(range(10))
    assert (rb.storage.directory.tree.leaves[:10] > 0).all()


def test_an_alpha_that_makes_leaves_too_large_is_refused(make_buffer) -> None:
    rb = make_buffer(alpha=1.0)
    index = rb.extend(make_rows(range(10)))
    rb.update_priority(index, torch.full((10,), 1e150, dtype=torch.float64))
    leaves = rb.storage.directory.tree.leaves.copy()
    snapshot = rb.storage.snapshot()
    with pytest.raises(ConfigurationError, match="exceed the limit"):
        rb.sampler.alpha = 2.0
    assert rb.sampler.alpha == 1.0
    assert (rb.storage.directory.tree.leaves == leaves).all()
    rb.update_priority(index, torch.ones(10))
    rb.sampler.alpha = 2.0
    rb.extend(make_rows(range(10, 20)))  # with the largest priority seen, 1e150, as far as it goes
    assert set(rb.sample(500)["id"].tolist()) == set(range(10, 20))
    rb.storage.restore(snapshot)  # with its alpha
    assert len(rb) == 10 and rb.sampler.alpha == 1.0
    assert (rb.storage.directory.tree.leaves == leaves).all()


def test_a_process_that_was_left_behind_does_not_remove_the_directory_of_others(folder) -> None:
    old = SharedMemmapStorage(64, scratch_dir=folder, job_id="test")
    shutil.rmtree(folder)
    new = SharedMemmapStorage(64, scratch_dir=folder, job_id="test")
    new.append(make_rows(range(8)))
    old.close()
    assert folder.exists() and len(new) == 8
    new.close()
    assert not folder.exists()


# --- one sampler, one storage; copies ------------------------------------------------------------


@pytest.mark.parametrize(
    "sampler",
    [
        lambda: SharedPrioritizedSampler(64, alpha=1.0, beta=0.4),
        SharedSamplerWithoutReplacement,
        lambda: SharedPrioritizedSliceSampler(64, 1.0, 0.4, num_slices=2, traj_key="id"),
    ],
)
def test_a_sampler_of_another_storage_is_refused(folder: Path, sampler: Callable) -> None:
    """A sampler refers to the tree or the pass of its first storage."""
    given = sampler()
    first = attach(folder / "first", sampler=given)
    first.extend(make_rows(range(20)))
    with pytest.raises(ConfigurationError, match="create one sampler per storage"):
        attach(folder / "second", sampler=given).extend(make_rows(range(20)))
    assert len(first) == 20
    first.storage.close()


def test_a_copy_follows_an_alpha_that_another_process_has_set(make_buffer) -> None:
    rb = make_buffer(64, alpha=0.6)
    rb.extend(make_rows(range(10)))
    rb.sample()
    other = pickle.loads(pickle.dumps(rb))
    other.sample()
    other.sampler.alpha = 0.9
    late = pickle.dumps(rb)  # as for a worker that starts later
    other.sampler.alpha = 0.5  # and now while it is on its way
    for copied in (late, pickle.dumps(rb)):
        found = pickle.loads(copied)
        found.sample()
        assert found.sampler.alpha == 0.5
    found = pickle.loads(late)
    found.sampler.alpha = 0.7  # set by the user, not copied
    with pytest.raises(ConfigurationError, match="set sampler.alpha afterwards"):
        found.sample()


def test_the_second_buffer_over_a_storage_travels_like_the_first(folder: Path) -> None:
    storage = SharedMemmapStorage(64, scratch_dir=folder)
    for _ in range(2):
        rb = SharedReplayBuffer(
            storage=storage,
            sampler=SharedRandomSampler(),
            writer=SharedCursorWriter(),
            batch_size=4,
        )
    rb.extend(make_rows(range(10)))
    assert len(pickle.loads(pickle.dumps(rb))) == 10
    storage.close()


# --- copies --------------------------------------------------------------------------------------


def _saved(thing: object) -> bytes:
    file = io.BytesIO()
    torch.save(thing, file)
    return file.getvalue()


def _loaded(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=False)


@pytest.mark.parametrize(("save", "load"), [(pickle.dumps, pickle.loads), (_saved, _loaded)])
def test_a_copy_attaches_to_the_very_directory_or_raises(
    make_buffer, folder: Path, save: Callable[[Any], bytes], load: Callable[[bytes], Any]
) -> None:
    rb = make_buffer(16, kind=SharedReplayBuffer)
    rb.extend(make_rows(range(4)))
    copies = [save(part) for part in (rb, rb.storage, rb.writer)]
    rb.storage.close()
    for copied in copies:
        with pytest.raises(DirectoryError, match="the rows of this copy of the buffer are gone"):
            load(copied)
    assert not folder.exists()
    other = make_buffer(16)  # at the same path
    other.extend(make_rows(range(7)))
    for copied in copies:
        with pytest.raises(DirectoryError, match="the rows of this copy of the buffer are gone"):
            load(copied)
    assert len(other) == 7 and other.storage.directory.sharers == 1
    with pytest.raises(DirectoryError, match="closed in this process; copy or pickle it while"):
        save(rb)
    with pytest.raises(DirectoryError, match="closed in this process"):
        rb.sample()


@pytest.mark.parametrize(
    "sampler", [SharedRandomSampler(), SharedSamplerWithoutReplacement(drop_last=True)]
)
def test_questions_about_the_rows_of_a_closed_buffer_are_errors(make_buffer, sampler) -> None:
    rb = make_buffer(16, sampler=sampler)
    index = rb.extend(make_rows(range(4)))
    rb.storage.close()
    for ask in (
        lambda: rb.sample(),
        lambda: sampler.can_sample(rb.storage, 4),
        lambda: sampler.can_sample(rb.storage, 16),
        lambda: rb.storage.generations_of(index),
    ):
        with pytest.raises(DirectoryError, match="the storage over .* was closed in this process"):
            ask()


def test_a_copy_of_rows_that_were_kept_finds_them(make_buffer) -> None:
    rb = make_buffer(16, keep=True)
    rb.extend(make_rows(range(4)))
    copied = pickle.dumps(rb)
    rb.storage.close()
    found = pickle.loads(copied)
    assert found[:]["id"].tolist() == [0, 1, 2, 3]
    found.storage.close()


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda rb: pickle.loads(pickle.dumps(rb))])
@BUFFERS
def test_a_copy_draws_for_itself(make_buffer, kind: type, copied: Callable) -> None:
    rb = make_buffer(
        128, kind=kind, uniform=True, prefetch=3, batch_size=8, generator=torch.Generator(),
        limiter=RateLimiter(8, max_times_sampled=1),
    )  # fmt: skip
    rb.extend(make_rows(range(128)))
    drawn = rb.sample()["id"].tolist()
    wait(rb._prefetch_queue)
    others = [copied(rb) for _ in range(2)]
    for each in (*others, rb):
        assert (each._rng is None) == (each is not rb)
        for _ in range(3):
            drawn += each.sample()["id"].tolist()
    assert len(set(drawn)) == len(drawn) == 80  # no copy got what another had drawn ahead
    for each in others:
        each.storage.close()


@pytest.mark.parametrize("kind", ["uniform", "slices"])
def test_a_draw_ahead_that_another_process_left_without_rows_raises_no_error_later(
    folder: Path, kind: str
) -> None:
    other, storage = (SharedMemmapStorage(64, scratch_dir=folder, job_id="test") for _ in range(2))
    slices = kind == "slices"
    sampler = SharedSliceSampler(slice_len=2) if slices else SharedRandomSampler()
    rb = SharedReplayBuffer(storage=storage, sampler=sampler, batch_size=4, prefetch=2)
    rows = TensorDict({"id": torch.arange(8), "episode": torch.arange(8) // 4}, [8])
    other.append(rows)
    rb.sample()
    wait(rb._prefetch_queue)
    other.empty()
    if slices:
        other.append(rows[::4])
    with pytest.raises(RuntimeError, match="Did not find" if slices else "empty storage"):
        rb.sample()
    wait(rb._prefetch_queue)
    assert any(ahead.exception() is not None for ahead in rb._prefetch_queue)
    other.append(rows)
    assert len(rb.sample()) == 4
    for each in (other, storage):
        each.close()


def test_a_buffer_returns_its_previous_sampler_and_keeps_its_storage(make_buffer) -> None:
    rb = make_buffer(8, kind=SharedReplayBuffer)
    before = rb.sampler
    assert rb.set_sampler(SharedRandomSampler()) is before
    with pytest.raises(ConfigurationError, match="build another buffer"):
        rb.set_storage(rb.storage)
    assert rb.extend(make_rows(range(3))).tolist() == [0, 1, 2] and len(rb) == 3


def test_batches_drawn_ahead_by_torchrls_class_go_to_no_process_being_spawned(make_buffer) -> None:
    rb = make_buffer(64, prefetch=2)
    rb.extend(make_rows(range(20)))
    rb.sample()
    process = multiprocessing.get_context("spawn").Process(target=len, args=(rb,))
    with pytest.raises(ConfigurationError, match="build a SharedReplayBuffer"):
        process.start()


def test_a_forked_child_does_not_repeat_what_its_parent_draws(make_buffer) -> None:
    rb = make_buffer(64, uniform=True, kind=SharedReplayBuffer)
    rb.extend(make_rows(range(64)))
    rb.set_rng(torch.Generator().manual_seed(3))
    read, write = os.pipe()
    assert run_forked(lambda: os.write(write, bytes(rb.sample()["id"].tolist()))) == 0
    assert list(os.read(read, 64)) != rb.sample()["id"].tolist()


def test_any_key_names_a_column_also_in_checkpoints(make_buffer, tmp_path: Path) -> None:
    rb = make_buffer(8)
    long = "状態" * 20
    names = ["priority", "runs", "=priority", long, (long, long), long + "a"]
    rows = TensorDict({name: torch.full((4,), n) for n, name in enumerate(names[:4])}, [4])
    for number, name in enumerate(names[4:], 4):
        rows[name if isinstance(name, str) else ("nested", *name)] = torch.full((4,), number)
    rb.extend(rows)
    rb.dumps(tmp_path)
    rb.empty()
    rb.loads(tmp_path)
    assert (rb[:] == rows).all()
