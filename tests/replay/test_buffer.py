"""One process: the shared parts inside a stock TensorDictReplayBuffer."""

from __future__ import annotations

import copy
import gc
import io
import math
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
from scipy.stats import chisquare
from tensordict import TensorDict
from torchrl.data import (
    LazyTensorStorage,
    ReplayBuffer,
    TensorDictReplayBuffer,
)
from torchrl.data.replay_buffers.samplers import (
    PrioritizedSampler,
    PrioritizedSliceSampler,
    SamplerWithoutReplacement,
    SliceSampler,
)

from tests.replay.conftest import make_rows
from tests.replay.faults import wait_until
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


def assert_whole(batch: TensorDict) -> None:
    value = batch["id"].double()
    assert (batch["obs"] == value[:, None]).all()
    assert (batch["next", "obs"] == value[:, None] + 0.5).all()


# --- writing and reading -------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 63, 64, 65, 200])
def test_the_last_capacity_rows_of_an_extend_remain(make_buffer, rows) -> None:
    rb = make_buffer(64)
    index = rb.extend(make_rows(range(rows)))
    kept = range(max(0, rows - 64), rows)
    assert len(rb) == len(kept)
    assert (index[: -len(kept)] == -1).all()
    assert sorted(rb[:]["id"].tolist()) == list(kept)
    assert (rb.storage.get(index[-len(kept) :])["id"] == torch.tensor(list(kept))).all()


def test_the_ring_wraps_like_torchrls(make_buffer) -> None:
    rb = make_buffer(20)
    peer = TensorDictReplayBuffer(storage=LazyTensorStorage(20), batch_size=4)
    for start in range(0, 130, 13):
        rb.extend(make_rows(range(start, start + 13)))
        peer.extend(make_rows(range(start, start + 13)))
        assert rb[:]["id"].tolist() == peer[:]["id"].tolist()
    assert rb.write_count == peer.write_count == 130


def test_add_and_in_place_writes_advance_the_generation(make_buffer) -> None:
    rb = make_buffer(16)
    rb.extend(make_rows(range(16)))
    assert int(rb.add(make_rows([100])[0])) == 0
    assert rb.writer.generations_of(torch.arange(3)).tolist() == [2, 1, 1]
    rb.storage[torch.tensor([5, 1, 5])] = make_rows([50, 51, 52])
    assert rb.writer.generations_of(torch.tensor([1, 5])).tolist() == [2, 2]
    assert rb[5]["id"] == 52 and rb[1]["id"] == 51 and len(rb) == 16
    rb.storage[7] = make_rows([70])[0]
    assert rb[7]["id"] == 70
    assert rb.writer.generations_of(torch.tensor([7, 8])).tolist() == [2, 1]
    assert_whole(rb[:])


def test_a_generation_is_the_one_of_the_copied_row_even_if_its_slot_is_reused_at_once(
    make_buffer, monkeypatch
) -> None:
    rb = make_buffer(8, batch_size=4)
    rb.extend(make_rows(range(8)))
    hand_over = rb.storage.hand_over

    def reuse_every_slot(index, generation, leaves):
        hand_over(index, generation, leaves)
        rb.storage.append(make_rows(range(100, 108)))

    monkeypatch.setattr(rb.storage, "hand_over", reuse_every_slot)
    batch = rb.sample()
    assert (batch["id"] < 8).all() and (batch["index_generation"] == 1).all()


def test_empty_drops_rows_but_never_lets_old_handles_look_fresh(make_buffer) -> None:
    rb = make_buffer(16)
    rb.extend(make_rows(range(10)))
    old = rb.sample()
    rb.empty()
    assert len(rb) == 0 and rb.write_count == 0
    with pytest.raises(RuntimeError, match="empty"):
        rb.sample()
    assert rb.extend(make_rows(range(20, 26))).tolist() == list(range(6))
    assert len(rb) == 6
    old["td_error"] = torch.full((16,), 1e6)
    rb.update_tensordict_priority(old)
    assert rb.storage.directory.counters["stale_updates"] == 16


# --- priorities ----------------------------------------------------------------------------------


@pytest.mark.parametrize("alpha", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("beta", [0.0, 0.4, 1.0])
def test_law_and_weights_are_those_of_the_paper(make_buffer, alpha, beta) -> None:
    capacity = 50
    rb = make_buffer(capacity, alpha=alpha, beta=beta)
    rb.extend(make_rows(range(120)))
    rb.sample()  # the tree has the sums of these from here on
    priority = np.random.default_rng(0).exponential(size=capacity)
    rb.update_priority(torch.arange(capacity), torch.from_numpy(priority))
    p = (priority + 1e-8) ** alpha
    law = p / p.sum()
    counts = np.zeros(capacity)
    for _ in range(40):
        batch = rb.sample(1000)
        slots = batch["index"].numpy()
        counts += np.bincount(slots, minlength=capacity)
        expected = (capacity * law[slots]) ** -beta / ((capacity * law.min()) ** -beta)
        np.testing.assert_allclose(batch["priority_weight"].numpy(), expected, rtol=1e-5)
    assert chisquare(counts, law * counts.sum()).pvalue > 1e-4


def test_new_rows_get_the_largest_priority_seen(make_buffer) -> None:
    rb = make_buffer(8, alpha=1.0)
    rb.extend(make_rows(range(4)))
    rb.update_priority(torch.tensor([0]), torch.tensor([5.0]))
    rb.update_priority(torch.tensor([0]), torch.tensor([2.0]))
    rb.extend(make_rows(range(4, 6)))
    assert rb.sampler.default_priority == 5.0
    np.testing.assert_allclose(
        rb.storage.directory.tree.leaves, [2, 1, 1, 1, 5, 5, 0, 0], atol=1e-6
    )


def test_the_largest_priority_within_the_buffer_follows_the_rows(folder: Path) -> None:
    storage = SharedMemmapStorage(8, scratch_dir=folder, job_id="test")
    rb = TensorDictReplayBuffer(
        storage=storage,
        sampler=SharedPrioritizedSampler(8, 1.0, 0.4, max_priority_within_buffer=True),
        writer=SharedCursorWriter(),
        batch_size=4,
    )
    rb.extend(make_rows(range(8)))
    rb.update_priority(torch.arange(8), torch.tensor([9.0, 4, 1, 1, 1, 1, 1, 1]))
    assert rb.sampler.default_priority == 9
    rb.update_priority(torch.tensor([0]), torch.tensor([2.0]))
    assert rb.sampler.default_priority == pytest.approx(4, abs=1e-6)
    storage.close()


def test_rows_with_a_priority_key_are_extended_with_that_priority(make_buffer) -> None:
    rb = make_buffer(8, alpha=1.0)
    rows = make_rows(range(4))
    rows["td_error"] = torch.tensor([1.0, 2.0, 3.0, 4.0])
    rb.extend(rows)
    np.testing.assert_allclose(rb.storage.directory.tree.leaves[:4], [1, 2, 3, 4], atol=1e-6)
    assert rb.storage.directory.counters["unverified_updates"] == 0


def test_priorities_of_an_extend_count_on_every_lap_of_the_ring(make_buffer) -> None:
    rb = make_buffer(8, alpha=1.0)
    for lap in range(3):  # the same slots each time: only the index tensor tells the laps apart
        rows = make_rows(range(8 * lap, 8 * lap + 8))
        rows["td_error"] = torch.arange(1.0, 9.0) + lap
        rb.extend(rows)
        expected = np.arange(1, 9) + lap
        np.testing.assert_allclose(rb.storage.directory.tree.leaves, expected, rtol=1e-6)
    assert rb.storage.directory.counters["stale_updates"] == 0


@pytest.mark.parametrize("through", ["batch", "clone", "plain index"])
def test_late_priority_for_a_recycled_slot_is_dropped(make_buffer, through) -> None:
    rb = make_buffer(16, alpha=1.0)
    rb.extend(make_rows(range(16)))
    batch = rb.sample(8)
    rb.extend(make_rows(range(16, 32)))  # every slot is reused
    batch["td_error"] = torch.full((8,), 100.0)
    if through == "plain index":
        rb.update_priority(batch["index"].clone(), batch["td_error"])
    else:
        rb.update_tensordict_priority(batch.clone() if through == "clone" else batch)
    assert rb.storage.directory.counters["stale_updates"] == 8
    np.testing.assert_allclose(rb.storage.directory.tree.leaves, 1.0, atol=1e-6)


def test_an_unknown_index_is_applied_and_counted_and_minus_one_is_skipped(make_buffer) -> None:
    rb = make_buffer(16, alpha=1.0)
    rb.extend(make_rows(range(8)))
    rb.update_priority(torch.tensor([2, -1, 12]), torch.tensor([3.0, 4.0, 5.0]))
    leaves = rb.storage.directory.tree.leaves
    np.testing.assert_allclose(leaves[[2, 7, 12]], [3, 1, 0], atol=1e-6)
    assert rb.storage.directory.counters["unverified_updates"] == 2


def test_bad_priorities_change_nothing(make_buffer) -> None:
    rb = make_buffer(16)
    rb.extend(make_rows(range(8)))
    before = rb.storage.directory.tree.leaves.copy()
    for bad in (float("nan"), float("inf"), -1.0):
        with pytest.raises(ConfigurationError, match="finite"):
            rb.update_priority(torch.arange(3), torch.tensor([1.0, bad, 2.0]))
    with pytest.raises(ConfigurationError, match="priorities"):
        rb.update_priority(torch.arange(3), torch.tensor([1.0, 2.0]))
    assert (rb.storage.directory.tree.leaves == before).all()


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


def test_changing_alpha_changes_the_tree_for_every_sampler(make_buffer) -> None:
    rb, other = make_buffer(8, alpha=1.0), make_buffer(8, alpha=1.0)
    rb.extend(make_rows(range(8)))
    rb.update_priority(torch.arange(8), torch.arange(1.0, 9.0))
    rb.sampler.alpha = 0.5
    assert other.sampler.alpha == 0.5
    np.testing.assert_allclose(
        other.storage.directory.tree.leaves, np.arange(1, 9) ** 0.5, rtol=1e-6
    )
    with pytest.raises(ConfigurationError, match="alpha"):
        make_buffer(8, alpha=1.0)


@pytest.mark.parametrize("beta", [-0.1, math.nan, math.inf])
def test_a_beta_that_makes_no_weights_is_refused_and_the_old_one_stays(make_buffer, beta) -> None:
    rb = make_buffer(64, beta=0.4)
    rb.extend(make_rows(range(10)))
    with pytest.raises(ConfigurationError, match="beta must be >= 0"):
        rb.sampler.beta = beta
    assert rb.sampler.beta == 0.4


def test_beta_is_annealed_by_the_jobs_step(make_buffer) -> None:
    rb = make_buffer(8)
    assert anneal_beta(rb.sampler, 0, steps=100) == 0.4
    with pytest.raises(ConfigurationError, match="ReplayBuffer; pass buffer.sampler"):
        anneal_beta(rb, 0, steps=100)
    assert anneal_beta(rb.sampler, 50, steps=100) == pytest.approx(0.7)
    assert anneal_beta(rb.sampler, 50, steps=100) == pytest.approx(0.7)
    assert anneal_beta(rb.sampler, 500, steps=100) == rb.sampler.beta == 1.0


def test_ranks_with_equal_seeds_draw_different_batches(make_buffer) -> None:
    torch.manual_seed(0)
    np.random.seed(0)
    one = make_buffer(64)
    one.extend(make_rows(range(64)))
    first = one.sample(64)["index"]
    torch.manual_seed(0)
    np.random.seed(0)
    assert (make_buffer(64).sample(64)["index"] != first).any()
    draws = []
    for _ in range(2):  # but a generator that the user sets is obeyed
        one.set_rng(torch.Generator().manual_seed(7))
        draws.append(one.sample(64)["index"])
    assert (draws[0] == draws[1]).all()


# --- bad input -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda td: td.exclude("obs"), "missing 'obs'"),
        (lambda td: td.set("extra", torch.zeros(4)), "unknown 'extra'"),
        (lambda td: td.set("obs", torch.zeros(4, 3)), "'obs' is torch.float32"),
        (lambda td: td.set("obs", torch.zeros(4, 5).double()), r"\[5\] per row"),
        (lambda td: td.set_non_tensor("name", "x"), "name"),
    ],
)
def test_rows_that_do_not_match_are_refused_and_harm_nothing(make_buffer, change, message) -> None:
    rb = make_buffer(16)
    rb.extend(make_rows(range(8)))
    before = rb[:].clone()
    with pytest.raises(ConfigurationError, match=message):
        rb.extend(change(make_rows(range(4))))
    assert (rb[:] == before).all() and len(rb) == 8
    assert rb.extend(make_rows(range(4))).tolist() == [8, 9, 10, 11]


def test_parts_that_do_not_fit_together_are_refused(folder: Path, make_buffer) -> None:
    with pytest.raises(ConfigurationError, match="SharedMemmapStorage"):
        TensorDictReplayBuffer(storage=LazyTensorStorage(8), writer=SharedCursorWriter())
    make_buffer(16)
    with pytest.raises(DirectoryError, match="capacity 16, asked for 32"):
        make_buffer(32)
    with pytest.raises(ConfigurationError, match="capacity 8"):
        TensorDictReplayBuffer(
            storage=SharedMemmapStorage(16, scratch_dir=folder, job_id="test"),
            sampler=SharedPrioritizedSampler(8, 0.6, 0.4),
            writer=SharedCursorWriter(),
        )
    with pytest.raises(ConfigurationError, match="ndim"):
        SharedMemmapStorage(8, scratch_dir=folder, ndim=2)
    with pytest.raises(ConfigurationError, match="device"):
        SharedMemmapStorage(8, scratch_dir=folder, device="cuda")
    with pytest.raises(ConfigurationError, match="alpha"):
        SharedPrioritizedSampler(8, -1.0, 0.4)
    with pytest.raises(ConfigurationError, match="capacity"):
        SharedMemmapStorage(0, scratch_dir=folder)


@pytest.mark.parametrize(
    ("sampler", "advice"),
    [
        (lambda: None, "sampler=SharedRandomSampler(), writer=SharedCursorWriter()"),
        (
            lambda: PrioritizedSampler(16, alpha=0.7, beta=0.5),
            "sampler=SharedPrioritizedSampler(16, alpha=0.7, beta=0.5), writer=Shared",
        ),
        (
            SamplerWithoutReplacement,
            "sampler=SharedSamplerWithoutReplacement(), writer=SharedCursorWriter()",
        ),
        (
            lambda: SliceSampler(slice_len=2, traj_key="episode"),
            "sampler=SharedSliceSampler(...), writer=",
        ),
        (
            lambda: PrioritizedSliceSampler(16, 0.7, 0.5, slice_len=2, traj_key="episode"),
            "sampler=SharedPrioritizedSliceSampler(16, 0.7, 0.5, ...), writer=",
        ),
        (
            lambda: SharedPrioritizedSampler(16, 0.7, 0.5),
            "build it with writer=SharedCursorWriter()",
        ),
    ],
    ids=["none", "prioritized", "passes", "slices", "prioritized slices", "ours"],
)
def test_who_forgot_the_writer_is_told_of_the_sampler_in_place_of_the_one_given(
    folder: Path, sampler, advice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PrioritizedSampler, "_init", lambda _: None)  # its tree may not load
    storage = SharedMemmapStorage(16, scratch_dir=folder, job_id="test")
    with pytest.raises(ConfigurationError) as told:
        TensorDictReplayBuffer(storage=storage, sampler=sampler(), batch_size=4)
    assert advice in str(told.value)
    storage.close()


def test_sampling_where_nothing_was_written_says_what_to_do(make_buffer) -> None:
    with pytest.raises(RuntimeError, match=r"empty storage.*extend it first.*RateLimiter"):
        make_buffer(8, timeout_s=0.2).sample()


def test_without_its_key_rows_get_the_largest_priority_as_in_torchrl(make_buffer) -> None:
    """TorchRL's TensorDictReplayBuffer takes its sampler's default there, the largest seen."""
    rb = make_buffer(8)
    rb.extend(make_rows(range(8)))
    rb.update_priority(torch.arange(8), torch.arange(1.0, 9.0))
    batch = rb.sample()
    rb.update_tensordict_priority(batch.exclude(rb.priority_key))
    leaves = rb.storage.directory.tree.leaves
    assert (leaves[batch["index"].numpy()] == leaves.max()).all()
    assert (leaves < leaves.max()).sum() == 8 - len(set(batch["index"].tolist()) | {7})


def test_reading_where_nothing_was_written_is_an_error(make_buffer) -> None:
    rb = make_buffer(8, timeout_s=0.2)
    with pytest.raises(IndexError, match="no row was ever written"):
        rb.storage[0]
    rb.extend(make_rows(range(2)))
    with pytest.raises(IndexError, match="0 .. 1"):
        rb.storage[5]


# --- moving, saving, 64 bit ----------------------------------------------------------------------


def test_a_pickled_buffer_attaches_to_the_same_rows(make_buffer) -> None:
    rb = make_buffer(16)
    rb.extend(make_rows(range(4)))
    data = pickle.dumps(rb)
    assert len(data) < 20_000  # coordinates, not rows
    copy = pickle.loads(data)
    copy.extend(make_rows(range(4, 8)))
    assert len(rb) == 8 and rb[:]["id"].tolist() == list(range(8))
    assert_whole(copy.sample())
    copy.storage.close()


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


@pytest.mark.parametrize("kind", [SharedReplayBuffer, TensorDictReplayBuffer])
@pytest.mark.parametrize("prefetch", [None, 2])
def test_a_closed_buffer_holds_no_memory_once_it_is_dropped(
    folder: Path, prefetch: int | None, kind: type[ReplayBuffer]
) -> None:
    """Also where nobody searches for garbage: a sweep makes one large buffer after another."""

    def held() -> tuple[int, int]:
        maps = Path("/proc/self/maps").read_text().splitlines()
        return len(os.listdir("/proc/self/fd")), sum(folder.name in line for line in maps)

    def use() -> None:
        storage = SharedMemmapStorage(64, scratch_dir=folder)
        sampler = SharedPrioritizedSampler(64, alpha=0.6, beta=0.4)
        rb = kind(
            storage=storage,
            sampler=sampler,
            writer=SharedCursorWriter(),
            batch_size=8,
            prefetch=prefetch,
        )
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
    with pytest.raises(DirectoryError, match="open in this process for job 'one'"):
        storage("two")
    first.append(make_rows(range(3)))
    first.close()
    with pytest.raises(DirectoryError, match="left by job 'one' with 3 rows"):
        storage("two")
    second = storage("two", resume=True)
    assert len(second) == 3
    second.close()


def test_a_full_disk_is_an_error_before_any_row_is_damaged(make_buffer, monkeypatch) -> None:
    rb = make_buffer(16)

    def no_space(fd: int, offset: int, size: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", no_space)
        with pytest.raises(DirectoryError, match="No space left"):
            rb.extend(make_rows(range(4)))
    assert len(rb) == 0 and not (Path(rb.storage.scratch_dir) / "data").exists()
    rb.extend(make_rows(range(4)))
    assert len(rb) == 4


def test_a_network_file_system_is_refused(folder: Path, monkeypatch) -> None:
    from torchrl_dist.replay.node import mapping

    monkeypatch.setattr(mapping, "_NETWORK_FILE_SYSTEMS", frozenset({"tmpfs"}))
    with pytest.raises(DirectoryError, match="network file system"):
        SharedMemmapStorage(8, scratch_dir=folder)


# --- what reviews found --------------------------------------------------------------------------


def test_a_restore_waits_for_who_writes_its_slots(make_buffer) -> None:
    rb = make_buffer(64, timeout_s=0.5)
    rb.extend(make_rows(range(64)))
    state = rb.state_dict()
    writing = rb.storage._cursor.reserve(8)
    with pytest.raises(DeadlineError, match="slots 0 to 63 .* written by others for 0.5 s"):
        rb.load_state_dict(state)
    rb.storage._cursor.publish(writing)
    rb.load_state_dict(state)
    assert len(rb) == 64 and rb[:]["id"].tolist() == list(range(64))


def test_a_snapshot_taken_while_the_last_slot_is_written_restores_the_others(make_buffer) -> None:
    rb = make_buffer(64, uniform=True)
    rb.extend(make_rows(range(64)))
    rb.extend(make_rows(range(64, 120)))
    writing = rb.storage._cursor.reserve(8)
    state = rb.state_dict()
    rb.storage._cursor.publish(writing)
    rb.load_state_dict(state)
    assert len(rb) == 56 and rb.storage.directory.high == 64
    assert set(rb.sample(500)["id"].tolist()) <= set(range(64, 120))


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
        with pytest.raises(DeadlineError, match=f"being written, by processes .{os.getpid()}"):
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
        with pytest.raises(RuntimeError, match="empty storage"):  # nobody writes any longer
            rb.sample()
        second.result(30)


def test_many_separate_slots_are_written_in_place(make_buffer) -> None:
    rb = make_buffer(4096)
    rb.extend(make_rows(range(4096)))
    rb.storage[torch.arange(0, 4096, 2)] = make_rows(range(10_000, 12_048))
    assert len(rb) == 4096
    assert rb[:]["id"][::2].tolist() == list(range(10_000, 12_048))
    assert rb[:]["id"][1::2].tolist() == list(range(1, 4096, 2))


def test_slices_and_negative_slots_mean_the_same_for_reading_and_writing(make_buffer) -> None:
    rb = make_buffer(100, uniform=True)
    rb.storage[torch.arange(10)] = make_rows(range(10))
    assert len(rb) == 10 and set(rb.sample(200)["id"].tolist()) <= set(range(10))
    rb.storage[-3:] = make_rows([70, 80, 90])
    rb.storage[-4] = make_rows([60])[0]
    assert len(rb) == 10 and rb[-4:]["id"].tolist() == [60, 70, 80, 90]
    rb.storage[:] = make_rows(range(10))
    assert rb[:]["id"].tolist() == list(range(10))


def test_rows_that_require_grad_are_stored_without_it(make_buffer) -> None:
    rb = make_buffer(16)
    rows = make_rows(range(8))
    rows["obs"] = rows["obs"].requires_grad_() * 1.0
    rb.extend(rows)
    rb.extend(rows)
    assert not rb.sample()["obs"].requires_grad


def test_a_default_device_does_not_reach_into_the_buffer(make_buffer) -> None:
    rb = make_buffer(16, batch_size=16)
    rb.extend(make_rows(range(16), 2048))
    torch.set_default_device("meta")
    try:
        batch = rb.sample()
    finally:
        torch.set_default_device(None)
    assert batch.device.type == batch["obs"].device.type == "cpu"


def test_priorities_set_by_hand_count_although_the_slots_were_written_before(make_buffer) -> None:
    rb = make_buffer(16, alpha=1.0)
    for lap in range(3):
        rb.extend(make_rows(range(16 * lap, 16 * lap + 8)))
        rb.extend(make_rows(range(16 * lap + 8, 16 * lap + 16)))
    rb.update_priority(torch.arange(8), torch.full((8,), 3.0))
    np.testing.assert_allclose(rb.storage.directory.tree.leaves, [3] * 8 + [1] * 8, rtol=1e-6)


def test_a_priority_whose_sum_would_overflow_is_refused(make_buffer) -> None:
    rb = make_buffer(8, alpha=1.0)
    rb.extend(make_rows(range(8)))
    with pytest.raises(ConfigurationError, match="finite"):
        rb.update_priority(torch.arange(8), torch.full((8,), 1e308, dtype=torch.float64))
    rb.sample()


def test_remembering_many_small_batches_takes_little_memory() -> None:
    recent = RecentGenerations()
    batches = [torch.tensor([k]) for k in range(20_000)]
    for index in batches:
        recent.remember(index, index + 1, written=True)
    assert len(recent._batches) < 10_000
    assert recent.recall(batches[-1]).tolist() == [20_000]
    assert recent.recall(batches[-1].clone()).tolist() == [20_000]
    assert recent.recall(batches[0]) is None
    for index in batches:
        recent.remember(index, index + 2, written=True)
    assert recent.recall(batches[-1].clone()).tolist() == [20_001]
    assert len(recent._by_values) + len(recent._unhashed) < 20_000


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
    with pytest.raises(ConfigurationError, match="too large"):
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
    """What it knows, a tree or a pass, is of the first one's rows."""
    sampler = sampler()

    def build(name: str) -> TensorDictReplayBuffer:
        storage = SharedMemmapStorage(64, scratch_dir=folder / name)
        return TensorDictReplayBuffer(
            storage=storage, sampler=sampler, writer=SharedCursorWriter(), batch_size=8
        )

    first = build("first")
    first.extend(make_rows(range(20)))
    with pytest.raises(ConfigurationError, match="create one sampler per storage"):
        build("second").extend(make_rows(range(20)))
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
    found.sampler.alpha = 0.7  # somebody's wish, not what it was copied with
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


def test_a_mask_does_not_name_rows_one_and_zero(make_buffer) -> None:
    rb = make_buffer(64)
    rb.extend(make_rows(range(8)))
    mask = torch.arange(8) == 5
    with pytest.raises(IndexError, match="mask"):
        rb.update_priority(mask, torch.full((8,), 9.0))
    assert (rb[:8]["id"][mask] == 5).all()


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
        with pytest.raises(DirectoryError, match="the rows of this copy are gone"):
            load(copied)
    assert not folder.exists()
    other = make_buffer(16)  # at the same path
    other.extend(make_rows(range(7)))
    for copied in copies:
        with pytest.raises(DirectoryError, match="the rows of this copy are gone"):
            load(copied)
    assert len(other) == 7 and other.storage.directory.sharers == 1
    with pytest.raises(DirectoryError, match="closed in this process: copy or pickle it while"):
        save(rb)
    with pytest.raises(DirectoryError, match="closed in this process"):
        rb.sample()


def test_a_copy_of_rows_that_were_kept_finds_them(make_buffer) -> None:
    rb = make_buffer(16, keep=True)
    rb.extend(make_rows(range(4)))
    copied = pickle.dumps(rb)
    rb.storage.close()
    found = pickle.loads(copied)
    assert found[:]["id"].tolist() == [0, 1, 2, 3]
    found.storage.close()


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda rb: pickle.loads(pickle.dumps(rb))])
@pytest.mark.parametrize("kind", [SharedReplayBuffer, TensorDictReplayBuffer])
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
    assert len(set(drawn)) == len(drawn) == 80  # nobody got what another had drawn ahead
    for each in others:
        each.storage.close()


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
    pid = os.fork()
    if not pid:
        os.write(write, bytes(rb.sample()["id"].tolist()))
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    assert list(os.read(read, 64)) != rb.sample()["id"].tolist()


def test_a_copied_sampler_takes_its_alpha_of_no_other_directory(make_buffer, folder: Path) -> None:
    rb = make_buffer(64, alpha=0.6)
    copied = copy.deepcopy(rb.sampler)
    storage = SharedMemmapStorage(64, scratch_dir=folder / "other", job_id="test")
    SharedPrioritizedSampler(64, 0.9, 0.4).attach(storage)
    with pytest.raises(ConfigurationError, match="alpha=0.6.*use alpha=0.9"):
        copied.attach(storage)
    storage.close()


@pytest.mark.parametrize("kind", [SharedReplayBuffer, TensorDictReplayBuffer])
def test_batches_drawn_ahead_end_with_their_rows(make_buffer, kind: type, tmp_path: Path) -> None:
    rb = make_buffer(64, kind=kind, prefetch=3)
    rb.extend(make_rows(range(20)))
    rb.storage.dumps(tmp_path)
    other = pickle.loads(pickle.dumps(rb))
    ends = [rb.empty, rb.storage.empty, lambda: rb.storage.loads(tmp_path)]
    if kind is SharedReplayBuffer:
        ends.append(other.empty)  # as in another process
    for number, end in enumerate(ends):
        rb.sample()
        wait(rb._prefetch_queue)
        end()
        first = 1000 * (number + 1)
        if len(rb):
            rb.empty()
        rb.extend(make_rows(range(first, first + 20)))
        for _ in range(5):
            assert (rb.sample()["id"] >= first).all()
    other.storage.close()


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
