"""``SharedMaxValueWriter``: the best rows of all processes stay, whatever happens."""

from __future__ import annotations

import platform
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from torchrl.data import (
    LazyTensorStorage,
    Sequence,
    TensorDictMaxValueWriter,
    TensorDictReplayBuffer,
)

from tests.replay.faults import (
    Stores,
    assert_sound,
    end_of,
    forked,
    interrupt_points,
    kill_self,
    rows_of,
    run_forked,
    start,
    torn_rows,
)
from tests.replay.test_stores import assert_sound as stores_sound
from torchrl_dist import (
    ConfigurationError,
    DeadlineError,
    RateLimiter,
    RemoteStorage,
    SharedCursorWriter,
    SharedMaxValueWriter,
    SharedMemmapStorage,
    SharedPrioritizedSampler,
    SharedReplayBuffer,
    SharedSamplerWithoutReplacement,
    SharedSliceSampler,
    host_replay,
    session,
)
from torchrl_dist.replay.node import ranking
from torchrl_dist.replay.node.tables import Word

CAPACITY = 8


def make(folder: Path, capacity: int = CAPACITY, **options: Any) -> SharedReplayBuffer:
    more = ("limiter", "frames", "timeout_s", "keep")
    given = {name: options.pop(name) for name in more if name in options}
    storage = SharedMemmapStorage(capacity, scratch_dir=folder, job_id="test", **given)
    options = {"writer": SharedMaxValueWriter("score"), "batch_size": 4} | options
    return SharedReplayBuffer(storage=storage, **options)


@pytest.fixture
def rb(folder: Path) -> Iterator[SharedReplayBuffer]:
    buffer = make(folder)
    yield buffer
    buffer.storage.close()


def scored(scores: Any, first: int = 0) -> TensorDict:
    """Rows that show whether they are whole, with ranks."""
    score = torch.as_tensor(scores, dtype=torch.float64)
    return rows_of(range(first, first + len(score))).set("score", score)


def scores(rb: Any) -> list[float]:
    return sorted(rb[:]["score"].tolist())


# --- TorchRL's writer is the model ---------------------------------------------------------------


@pytest.mark.parametrize("bytes_at_once", [1, 300, 2**18])
@settings(max_examples=30, deadline=None)
@given(st.lists(st.lists(st.integers(-20, 20) | st.just(np.inf), min_size=1, max_size=12)))
def test_the_same_ranks_stay_as_with_torchrls_writer(
    tmp_path_factory: pytest.TempPathFactory, bytes_at_once: int, batches: list[list[float]]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranking, "_BYTES_AT_ONCE", bytes_at_once)
        ours = make(tmp_path_factory.mktemp("ranks"), keep=False)
        theirs = TensorDictReplayBuffer(
            storage=LazyTensorStorage(CAPACITY), writer=TensorDictMaxValueWriter("score")
        )
        at = 0
        for batch in batches:
            rows = scored(batch, at)
            if len(batch) == 1:
                index = ours.add(rows[0]).reshape(1)
                theirs.add(rows[0].clone())
            else:
                index = ours.extend(rows)
                theirs.extend(rows.clone())
            at += len(batch)
            kept = index >= 0
            assert (ours[index[kept]] == rows[kept]).all()
            assert len(index[kept].unique()) == kept.sum()
            assert (ours.writer.generations_of(index) > 0).tolist() == kept.tolist()
            assert scores(ours) == scores(theirs) and len(ours) == len(theirs)
            assert ours.writer._cursor == theirs.writer._cursor
        if batches:
            assert_sound(ours)
        ours.storage.close()


@pytest.mark.parametrize("reduction", ranking.REDUCTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool, torch.bfloat16])
@pytest.mark.parametrize("shape", [(), (1,), (4,), (2, 3)])
def test_the_rank_is_a_reduction_over_the_values_of_a_row(
    folder: Path, reduction: str, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    if dtype == torch.bool and reduction == "mean":
        pytest.skip("torch has no mean of booleans")
    rng = torch.Generator().manual_seed(1)
    value = torch.randint(0, 1000, (20, *shape), generator=rng)
    value = value > 500 if dtype == torch.bool else value.to(dtype)
    rows = TensorDict({"next": {"reward": value}, "id": torch.arange(20)}, [20])
    ours = make(folder, 5, writer=SharedMaxValueWriter(reduction=reduction))
    ours.extend(rows[:10])
    ours.extend(rows[10:])
    plain = [getattr(each.reshape(-1).double(), reduction)().item() for each in value]
    found = [plain[number] for number in ours[:]["id"].tolist()]
    assert sorted(found) == sorted(plain)[-5:]
    ours.storage.close()


def test_nested_rows_of_trajectories(folder: Path) -> None:
    reward = torch.arange(24.0).reshape(6, 4, 1)
    rows = TensorDict({"next": TensorDict({"reward": reward}, [6, 4])}, [6, 4])
    rb = make(folder, 2, writer=SharedMaxValueWriter())
    assert rb.extend(rows).tolist() == [-1] * 4 + [0, 1]
    assert (rb[:] == rows[4:]).all() and rb.sample().batch_size == (4, 4)
    rb.storage.close()


def test_free_slots_come_first_then_the_lowest_rows_and_equal_ones_stay(rb: Any) -> None:
    assert rb.extend(scored([3, 1, 2])).tolist() == [0, 1, 2]
    assert rb.extend(scored([-np.inf] * 5, 3)).tolist() == [3, 4, 5, 6, 7]
    assert rb.extend(scored([-np.inf, 5], 8)).tolist() == [-1, 3]
    assert rb.extend(scored([1, 1, 1, 1, 1], 10)).tolist() == [4, 5, 6, 7, -1]
    assert rb.extend(scored([1], 15)).tolist() == [-1]
    assert rb.write_count == 13


# --- with the other parts ------------------------------------------------------------------------


def test_priorities_generations_and_samples(folder: Path) -> None:
    sampler = SharedPrioritizedSampler(CAPACITY, 1.0, 1.0)
    rb = make(folder, sampler=sampler, priority_key="p")
    rows = scored(range(8)).set("p", torch.arange(1.0, 9.0))
    rb.extend(rows)
    old = rb.sample()
    index = rb.extend(scored([10, -1, 11], 8).set("p", torch.tensor([20.0, 30.0, 40.0])))
    assert index.tolist() == [0, -1, 1]
    assert rb.storage.directory.tree.leaves.round().tolist() == [20.0, 40.0, *range(3, 9)]
    assert rb.writer.generations_of(index).tolist() == [2, -1, 2]
    assert sampler.default_priority == 40  # of the row that was not kept, nothing is known
    old["p"] = torch.full((4,), 100.0)
    rb.update_tensordict_priority(old)
    stale = int((old["index"] < 2).sum())
    assert rb.storage.counters["stale_updates"] == stale
    assert (rb.storage.directory.tree.leaves[:2].round() == [20, 40]).all()
    assert_sound(rb)
    rb.storage.close()


def test_a_pass_skips_replaced_rows(folder: Path) -> None:
    rb = make(folder, sampler=SharedSamplerWithoutReplacement(shuffle=False), batch_size=2)
    rb.extend(scored(range(8)))
    assert rb.sample()["key"].tolist() == [0, 1]
    rb.extend(scored([2.5, 3.5, 4.5], 8))  # in slots 0 to 2
    assert [rb.sample()["key"].tolist() for _ in range(3)] == [[3, 4], [5, 6], [7]]
    rb.storage.close()


def test_windows_follow_the_numbers_of_rows(folder: Path) -> None:
    unit = Sequence(2, done_key=None)
    rb = make(folder, sample_unit=unit)
    rb.extend(scored([5, 1, 6, 7, 2, 8, 9, 4]))
    rb.extend(scored([3, 10], 8))  # in slots 1 and 4
    for _ in range(20):
        batch = rb.sample()
        key = batch["key"].reshape(4, 2)
        valid = batch["validity_mask"].reshape(4, 2)
        assert (key[:, 1] - key[:, 0])[valid[:, 1]].eq(1).all()
    rb.storage.close()


def test_it_goes_on_after_emptying_checkpoints_and_in_place_writes(
    rb: Any, folder: Path, tmp_path: Path
) -> None:
    rb.extend(scored(range(8)))
    rb[torch.tensor([7])] = scored([-5], 50)
    assert rb.extend(scored([0.5, -1], 10)).tolist() == [7, -1]
    rb[3] = scored([np.nan], 60)[0]
    assert rb.extend(scored([-9], 12)).tolist() == [3]
    rb.dumps(tmp_path / "dump")
    rb.empty()
    assert rb.extend(scored([1, 0, 2], 20)).tolist() == [0, 1, 2] and len(rb) == 3
    rb.loads(tmp_path / "dump")
    assert rb.extend(scored([0.25], 30)).tolist() == [3]
    assert scores(rb) == [0, 0.25, 0.5, 1, 2, 4, 5, 6]
    assert_sound(rb)
    other = make(Path(f"{folder}-other"), keep=False)
    other.loads(tmp_path / "dump")
    assert other.extend(scored([0.25], 30)).tolist() == [3]
    assert scores(other) == scores(rb)
    other.storage.close()


# --- refusals ------------------------------------------------------------------------------------


def test_arguments_are_checked_before_anything_is_written(rb: Any, folder: Path) -> None:
    with pytest.raises(ConfigurationError, match="expected one of"):
        SharedMaxValueWriter(reduction="prod")
    wrong: list[Any] = [
        rows_of(range(2)),
        scored([1, np.nan]),
        scored([1, 2]).set("score", torch.zeros(2, dtype=torch.complex64)),
        scored([1, 2]).set("score", torch.zeros(2, 0)),
    ]
    for rows in wrong:
        with pytest.raises(ConfigurationError, match="rank_key='score'|have NaN"):
            rb.extend(rows)
    with pytest.raises(ConfigurationError, match="expects data to be a tensor collection"):
        rb.writer.extend(torch.ones(3))
    assert rb.storage.directory.rows is None and not rb.storage.directory.words[Word.RANKED]
    rb.extend(scored(range(3)))
    with pytest.raises(ConfigurationError, match="does not match"):
        rb.extend(scored([9]).set("more", torch.zeros(1)))
    assert scores(rb) == [0, 1, 2] and rb.write_count == 3


def test_all_processes_rank_alike(rb: Any, folder: Path) -> None:
    rb.extend(scored([1]))
    for writer in (SharedMaxValueWriter("key"), SharedMaxValueWriter("score", "max")):
        other = make(folder, writer=writer)
        with pytest.raises(ConfigurationError, match=r"ranked by the sum of \('score',\)"):
            other.extend(scored([2]))
        other.storage.close()
    other = make(folder, writer=SharedCursorWriter())
    for rows in (scored([2]), scored(range(20))):
        with pytest.raises(ConfigurationError, match="writer=SharedMaxValueWriter"):
            other.extend(rows)
    assert scores(rb) == [1] and rb.write_count == 1 and rb.storage.next_slot == 0
    other.storage.close()


def test_the_rank_cannot_be_patched(rb: Any) -> None:
    index = rb.extend(scored(range(3)))
    given = {"index": index, "generation": rb.writer.generations_of(index)}
    with pytest.raises(ConfigurationError, match="to find or rank rows"):
        rb.update_if_present(patch={"score": torch.ones(3, dtype=torch.float64)}, **given)
    assert rb.update_if_present(patch={"key": torch.zeros(3).long()}, **given).updated.all()


@pytest.mark.parametrize(
    "options", [{"limiter": RateLimiter(min_size_to_sample=2)}, {"frames": {"first": 1}}]
)
def test_storages_that_do_not_fit_are_refused(folder: Path, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="or build the buffer with writer="):
        make(folder, **options)


def test_data_sets_and_readers_of_an_order_are_refused(folder: Path) -> None:
    rb = make(folder, sampler=SharedSliceSampler(slice_len=2, traj_key="key"))
    rb.extend(scored(range(4)))
    with pytest.raises(ConfigurationError, match="slices by traj_key"):
        rb.sample()
    with pytest.raises(ConfigurationError, match="queries of trajectories"):
        rb.query(trajectory_key="key")
    rb.storage.close()
    storage = SharedMemmapStorage(4, scratch_dir=f"{folder}-data", job_id="test")
    storage.fill_once(scored(range(4)))
    with pytest.raises(ConfigurationError, match="fill_once"):
        SharedReplayBuffer(storage=storage, writer=SharedMaxValueWriter("score"))
    storage.close()


def test_hosts_are_refused(folder: Path) -> None:
    with session() as me:
        for shortcut in (True, False):
            owner = host_replay(me, 8, name=str(shortcut), scratch_dir=folder, shortcut=shortcut)
            storage = RemoteStorage(owner)
            with pytest.raises(ConfigurationError, match="each shard would keep its own"):
                SharedReplayBuffer(storage=storage, writer=SharedMaxValueWriter("score"))
            storage.close()
            owner.release()


# --- several processes, some of which die --------------------------------------------------------


def write(folder: Path, seed: int, rounds: int) -> None:
    torch.set_num_threads(1)
    rb = make(folder, 64)
    for rows in batches_of(seed, rounds):
        rb.extend(rows)
    rb.storage.close()


def batches_of(seed: int, rounds: int) -> list[TensorDict]:
    rng = np.random.default_rng(seed)
    return [
        scored(rng.random(rng.integers(1, 40)) * (1 + at), 1000 * (rounds * seed + at))
        for at in range(rounds)
    ]


def test_the_best_rows_of_all_processes_stay(folder: Path) -> None:
    rb = make(folder, 64)
    writers = [start(write, folder, seed, 60) for seed in range(3)]
    read = 0
    while read < 200:
        if len(rb):
            assert torn_rows(rb.sample()) == 0
            assert torn_rows(rb[:]) == 0
            read += 1
    assert [end_of(pid) for pid in writers] == [0, 0, 0]
    everything = torch.cat([rows["score"] for seed in range(3) for rows in batches_of(seed, 60)])
    assert scores(rb) == everything.sort().values[-64:].tolist()
    assert_sound(rb)
    rb.storage.close()


def test_it_waits_for_rows_that_others_are_writing(folder: Path) -> None:
    """Otherwise it would compare with a row that is about to be replaced."""
    rb = make(folder, timeout_s=0.3)
    rb.extend(scored(range(8)))
    claims = rb.storage._cursor.claim_slots(np.array([3]))
    with pytest.raises(DeadlineError, match="if one of these processes is stopped"):
        rb.extend(scored([9], 8))
    assert scores(rb) == [0, 1, 2, 4, 5, 6, 7]
    rb.storage._cursor.abandon(claims[0])
    assert rb.extend(scored([9], 8)).tolist() == [3]

    def die() -> None:
        rb.storage._cursor.claim_slots(np.array([5]))
        kill_self()

    assert run_forked(die) == -signal.SIGKILL
    assert rb.extend(scored([10], 9)).tolist() == [5]
    assert_sound(rb)
    rb.storage.close()


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Stores:
    return Stores(tmp_path_factory.mktemp("stores"))


@pytest.mark.skipif(platform.machine() != "x86_64", reason="single steps of an x86-64 processor")
def test_killed_between_any_two_stores(folder: Path, stores: Stores) -> None:
    """Rows in other slots stay, with their priorities, and so do the invariants."""
    torch.set_num_threads(1)
    rb = make(folder, sampler=SharedPrioritizedSampler(CAPACITY, 0.5, 0.4), priority_key="p")
    directory, status, store = rb.storage.directory, -signal.SIGKILL, 0

    def victim() -> None:
        with directory.lock():
            pass  # joins
        stores.watch(directory)
        with stores.dying_at(store):
            rb.extend(scored([30, -1, 31, 32], 30).set("p", torch.full((4,), 9.0)))

    while status:
        store += 1
        rb.empty()
        rb.extend(scored([5, 0, 6, 1, 2, 7, 8, 9]).set("p", torch.arange(1.0, 9.0)))
        leaves = directory.tree.leaves.copy()
        status = run_forked(victim, timeout_s=20)
        assert status in (0, -signal.SIGKILL)
        with directory.lock():  # repairs
            pass
        stores_sound(rb)
        others = [0, 2, 5, 6, 7]
        assert (rb[torch.tensor(others)]["score"] == torch.tensor([5, 6, 7, 8, 9])).all()
        assert (directory.tree.leaves[others] == leaves[others]).all()
        found = set(rb[:]["score"].tolist()) - {5, 6, 7, 8, 9}
        assert found <= {0, 1, 2, 30, 31, 32}
        assert rb.write_count - 8 in (0, 3)
    assert found == {30, 31, 32} and store > 20
    rb.storage.close()


def test_an_interrupt_at_any_point_leaves_whole_rows(folder: Path) -> None:
    rb = make(folder)
    rb.extend(scored(range(8)))
    interrupted = 0

    def prepare() -> None:  # replaces all rows
        first = int(max(scores(rb))) + 1
        rb.extend(scored(first + np.arange(8.0), first))

    def change() -> None:
        rb.extend(scored([max(scores(rb)) + 0.5]))

    for _ in interrupt_points(change, every=1, prepare=prepare):
        interrupted += 1
        with rb.storage.directory.lock():
            pass
        assert_sound(rb)
        assert len(rb) >= 7
    assert interrupted > 20
    rb.storage.close()


def test_a_forked_child_has_ranks_of_its_own(rb: Any) -> None:
    rb.extend(scored(range(8)))

    def more() -> None:
        rb.extend(scored([20], 20))

    with forked(more) as pid:
        assert end_of(pid) == 0
    assert 20 in scores(rb)
    rb.extend(scored([21, 22], 21))
    assert scores(rb) == [3, 4, 5, 6, 7, 20, 21, 22]
