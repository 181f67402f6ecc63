"""Slices of trajectories: TorchRL's law on a quiet ring, consecutive rows on a busy one."""

from __future__ import annotations

import itertools
import multiprocessing
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, SliceSampler, TensorDictReplayBuffer

from tests.replay.conftest import make_rows
from torchrl_dist import (
    ConfigurationError,
    SharedMemmapStorage,
    SharedReplayBuffer,
    SharedSliceSampler,
)
from torchrl_dist.replay.parts.slices import NoSlicesError
from torchrl_dist.replay.row.rows import matching_columns, spec_of

_FORK = multiprocessing.get_context("fork")


def trajectory(number: int, steps: range, width: int = 2) -> TensorDict:
    """Make rows in which every field tells the trajectory and the step."""
    step = torch.arange(steps.start, steps.stop)
    value = (number * 10_000 + step).double()[:, None].expand(-1, width).clone()
    return TensorDict(
        {
            "obs": value,
            "is_init": step[:, None] == 0,
            "step_count": step,
            "collector": {"traj_ids": torch.full_like(step, number)},
            "next": {
                "obs": value + 0.5,
                "done": step[:, None] == 6,
                "terminated": torch.zeros(step.numel(), 1, dtype=torch.bool),
            },
        },
        [step.numel()],
    )


@pytest.fixture
def make_buffers(make_buffer) -> Callable[..., SharedReplayBuffer]:
    def make(capacity: int = 64, *, batch_size: int = 32, **options: Any) -> SharedReplayBuffer:
        sampler = SharedSliceSampler(**options)
        return make_buffer(
            capacity, sampler=sampler, batch_size=batch_size, kind=SharedReplayBuffer
        )

    return make


def assert_slices(batch: TensorDict, slice_len: int) -> None:
    """Check that rows are whole, and slices are ``slice_len`` consecutive steps of a trajectory."""
    traj = batch["collector", "traj_ids"].reshape(-1, slice_len)
    step = batch["step_count"].reshape(-1, slice_len)
    assert (traj == traj[:, :1]).all()
    assert (step.diff(dim=1) == 1).all(), step
    value = (batch["collector", "traj_ids"] * 10_000 + batch["step_count"]).double()
    assert (batch["obs"] == value[:, None]).all()
    assert (batch["next", "obs"] == value[:, None] + 0.5).all()


# --- the same as TorchRL's on a quiet ring -------------------------------------------------------

OPTIONS = [
    {"slice_len": 4},
    {"num_slices": 8},
    {"slice_len": 8, "strict_length": False},
    {"slice_len": 8, "strict_length": False, "pad_output": True},
    {"num_slices": 4, "strict_length": False, "truncated_key": None},
    {"slice_len": 4, "truncated_key": None, "init_key": None},
    {"slice_len": 4, "truncated_key": ("next", "cut"), "init_key": None},
    {"slice_len": 4, "span": True, "init_key": None},
    {"slice_len": 4, "span": (2, False)},
    {"slice_len": 4, "span": (False, 3)},
    {"slice_len": 4, "end_key": ("next", "done")},
    {"slice_len": 4, "end_key": ("next", "done"), "traj_key": None},
    {"num_slices": 4, "end_keys": [("next", "done"), ("next", "absent")], "traj_key": None},
    {"slice_len": 4, "cache_values": True},
    {"slice_len": 4, "fragmented": True},
    {"slice_len": 8, "fragmented": True, "strict_length": False, "pad_output": True},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("rows", [40, 100])
def test_the_same_seed_gives_the_batches_of_torchrls_sampler(make_buffers, options, rows) -> None:
    options = {"traj_key": ("collector", "traj_ids"), **options}
    ours = make_buffers(**options)
    theirs = TensorDictReplayBuffer(
        storage=LazyTensorStorage(64), sampler=SliceSampler(**options), batch_size=32
    )
    lengths = itertools.cycle([7, 3, 11, 1, 9])
    written = 0
    for number in range(rows):
        part = trajectory(number, range(min(next(lengths), rows - written)))
        written += len(part)
        for buffer in (ours, theirs):
            buffer.extend(part)
        if written == rows:
            break
    for buffer in (ours, theirs):
        buffer.set_rng(torch.Generator().manual_seed(rows))
    for _ in range(5):
        mine, other = ours.sample(), theirs.sample()
        assert set(mine.keys(True, True)) == {*other.keys(True, True), "index_generation"}
        for key, value in other.items(True, True):
            assert mine[key].dtype == value.dtype and mine[key].shape == value.shape, key
            assert (mine[key] == value).all(), key
        slots = mine["index"].squeeze(-1)
        assert (mine["index_generation"] == ours.writer.generations_of(slots)).all()
    assert ours.can_sample() == theirs.can_sample()
    assert ours.can_sample(320) == theirs.can_sample(320)


def test_rows_that_are_being_written_end_a_slice_and_are_not_drawn(make_buffers) -> None:
    rb = make_buffers(slice_len=4, strict_length=False, batch_size=4000)
    storage = rb.storage
    rb.extend(trajectory(1, range(12)))
    reservation = storage._cursor.reserve(4)  # slots 12 to 15, another writer at work
    rb.extend(trajectory(1, range(12, 20)))  # slots 16 to 23
    batch = rb.sample()
    slots = set(batch["index"].squeeze(-1).tolist())
    assert slots == {*range(12), *range(16, 24)}
    first = batch["index"].reshape(-1, 4)[:, 0]  # runs 0-11 and 16-23 are long enough
    assert set(first.tolist()) == {*range(9), *range(16, 21)}
    storage._cursor.abandon(reservation)
    storage.write_at(torch.arange(4, 6), trajectory(2, range(2)))
    batch = rb.sample()
    assert set(batch["collector", "traj_ids"].tolist()) == {1, 2}
    traj = batch["collector", "traj_ids"]
    ends = batch["next", "truncated"].squeeze(-1).nonzero().squeeze(-1)
    assert (traj[1:] == traj[:-1])[~torch.isin(torch.arange(len(traj) - 1), ends)].all()


def test_newest_and_oldest_row_of_one_trajectory_are_not_neighbours(make_buffers) -> None:
    rb = make_buffers(32, slice_len=8, batch_size=8000)
    for start in range(0, 120, 5):  # longer than the ring, which ends in the middle of it
        rb.extend(trajectory(1, range(start, start + 5)))
        if start > 5:
            assert_slices(rb.sample(), 8)
    starts = set(rb.sample()["step_count"].reshape(-1, 8)[:, 0].tolist())
    assert starts == set(range(120 - 32, 120 - 7))


def test_fragments_of_a_trajectory_are_joined_by_their_steps(make_buffers) -> None:
    rb = make_buffers(64, slice_len=10, fragmented=True, batch_size=200)
    for start in range(0, 20, 4):  # two writers by turns
        rb.extend(trajectory(1, range(start, start + 4)))
        rb.extend(trajectory(2, range(start, start + 4)))
    batch = rb.sample()
    assert_slices(batch, 10)
    assert set(batch["collector", "traj_ids"].tolist()) == {1, 2}
    rb.extend(trajectory(2, range(19, 20)))
    with pytest.raises(ConfigurationError, match="both hold step 19"):
        rb.sample()


# --- many writers --------------------------------------------------------------------------------


def _write_trajectories(folder: Path, capacity: int, writer: int, longest: int) -> None:
    storage = SharedMemmapStorage(capacity, scratch_dir=folder, job_id="test")
    random = np.random.default_rng(writer)
    for number in itertools.count():
        steps = int(random.integers(8, longest))
        name = number * 10 + writer
        for start in range(0, steps, 16):
            storage.append(trajectory(name, range(start, min(start + 16, steps)), width=512))


@pytest.mark.parametrize(("fragmented", "longest"), [(False, 80), (True, 80), (False, 10**6)])
def test_slices_never_run_across_writers_nor_hold_torn_rows(
    folder, make_buffers, fragmented: bool, longest: int
) -> None:
    """Writers write many trajectories, or a single one that wraps around the ring."""
    capacity, writers = 512, 3 if longest < 512 else 1
    rb = make_buffers(capacity, slice_len=8, batch_size=64, fragmented=fragmented)
    processes = [
        _FORK.Process(target=_write_trajectories, args=(folder, capacity, w, longest), daemon=True)
        for w in range(writers)
    ]
    for process in processes:
        process.start()
    try:
        deadline = time.monotonic() + 60
        while not rb.can_sample() and time.monotonic() < deadline:
            time.sleep(0.01)
        before, seen = rb.write_count, set()
        for _ in range(150):
            batch = rb.sample()
            assert_slices(batch, 8)
            seen |= set((batch["collector", "traj_ids"] % 10).tolist())
        while rb.write_count < before + 5 * capacity and time.monotonic() < deadline:
            assert_slices(rb.sample(), 8)
        assert seen == set(range(writers)), "trajectories of every process are seen"
        assert rb.write_count >= before + 5 * capacity
    finally:
        for process in processes:
            process.kill()
            process.join()


def test_a_sampler_that_keeps_losing_rows_ends_under_the_lock(make_buffers, monkeypatch) -> None:
    rb = make_buffers(16, slice_len=2, batch_size=16)
    rb.extend(trajectory(0, range(16)))
    gather, turns = rb.storage._gather, itertools.count(1)

    def copy_while_others_write(slots: np.ndarray) -> list[np.ndarray]:
        leaves = gather(slots)
        if not rb.storage.directory.fair_lock._threads._is_owned():  # no process can then
            rb.storage.write_at(torch.arange(16), trajectory(next(turns), range(16)))
        return leaves

    monkeypatch.setattr(rb.storage, "_gather", copy_while_others_write)
    assert_slices(rb.sample(), 2)
    counters = rb.storage.directory.counters
    assert counters["locked_reads"] == 1 and counters["reread_rows"] == 9 * 16


# --- in a buffer ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"end_key": ("next", "done"), "fragmented": True}, "needs traj_key="),
        ({"cache_values": True, "ends": torch.ones(3, dtype=torch.bool)}, "ends"),
        ({"trajectories": torch.ones(3)}, "trajectories"),
        ({"compile": {"mode": "default"}}, "compile"),
        ({"use_gpu": True}, "use_gpu"),
    ],
)
def test_impossible_options_are_refused_when_the_sampler_is_built(options, message) -> None:
    with pytest.raises(ConfigurationError, match=message):
        SharedSliceSampler(slice_len=4, **options)


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        (TensorDict({"x": torch.zeros(8)}, [8]), {}, "no trajectory id"),
        (TensorDict({"x": torch.zeros(8)}, [8]), {"traj_key": "traj"}, "no 'traj', only"),
        (TensorDict({"episode": torch.zeros(8, 2)}, [8]), {}, "one number per row"),
        (TensorDict({"episode": torch.zeros(8)}, [8]), {"fragmented": True}, "no 'step_count'"),
    ],
)
def test_rows_without_the_keys_are_an_error(make_buffers, rows, options, message) -> None:
    rb = make_buffers(slice_len=4, **options)
    rb.extend(rows)
    with pytest.raises(ConfigurationError, match=message):
        rb.sample()


def test_ids_may_be_floats_under_the_usual_name_and_one_element_wide(make_buffers) -> None:
    rb = make_buffers(slice_len=4)
    episode = torch.arange(4.0).repeat_interleave(6)[:, None]
    rb.extend(TensorDict({"episode": episode}, [24]))
    batch = rb.sample()["episode"].reshape(-1, 4)
    assert (batch == batch[:, :1]).all() and len(batch.unique()) > 1


def _unnamed(number: int, steps: range) -> TensorDict:
    """Make rows without an id. A test can still tell them apart."""
    data = trajectory(number, steps).exclude(("collector", "traj_ids"))
    return data.set("who", torch.full((len(steps),), number))


def assert_one_writer_each(batch: TensorDict, slice_len: int) -> None:
    who, step = (batch[key].reshape(-1, slice_len) for key in ("who", "step_count"))
    assert (who == who[:, :1]).all() and (step.diff(dim=1) == 1).all(), (who, step)


END = {"slice_len": 3, "end_key": ("next", "done")}


def test_slices_that_end_at_flags_do_not_mix_writers_that_take_turns(make_buffers) -> None:
    rb = make_buffers(256, batch_size=300, **END)
    there, done = _FORK.Event(), _FORK.Event()

    def write(number: int, start: int = 0) -> None:
        for step in range(start, start + 60, 4):
            rb.extend(_unnamed(number, range(100 + step, 104 + step)))
            time.sleep(1e-4)

    def child() -> None:
        there.set()
        write(2)
        done.set()

    rb.extend(_unnamed(0, range(100, 104)))  # a forked child does not continue it
    process = _FORK.Process(target=child)
    process.start()
    assert there.wait(30)
    threads = [threading.Thread(target=write, args=(number,)) for number in (3, 4)]
    for thread in threads:
        thread.start()
    batches = 0
    while not done.is_set() or any(thread.is_alive() for thread in threads):
        if rb.can_sample():
            assert_one_writer_each(rb.sample(), 3)
            batches += 1
    process.join(30)
    assert process.exitcode == 0 and batches
    rb.extend(_unnamed(0, range(104, 108)))
    batch = rb.sample(3000)
    assert_one_writer_each(batch, 3)
    assert set(batch["who"].tolist()) == {0, 2, 3, 4}
    assert not any("torchrl_dist" in str(key) for key in [*batch.keys(True), *rb[:].keys(True)])


def test_rows_before_and_after_a_restore_are_not_joined_and_replaced_ones_stay(
    make_buffers, tmp_path: Path
) -> None:
    rb = make_buffers(64, batch_size=300, **END)
    rb.extend(_unnamed(1, range(10, 20)))
    rb[4] = _unnamed(5, range(14, 15))[0]
    replaced = rb.sample()
    assert (replaced["step_count"].reshape(-1, 3).diff(dim=1) == 1).all()
    assert {1, 5} == set(replaced["who"].tolist())
    assert any({*who} == {1, 5} for who in replaced["who"].reshape(-1, 3).tolist())
    rb.dumps(tmp_path)
    state = rb.state_dict()
    for restore in (lambda: rb.loads(tmp_path), lambda: rb.load_state_dict(state)):
        restore()
        rb.extend(_unnamed(1, range(20, 24)))
        steps = rb.sample()["step_count"].reshape(-1, 3)
        assert (steps.diff(dim=1) == 1).all()
        assert not ((steps <= 19).any(1) & (steps > 19).any(1)).any()
        assert (steps > 19).any()


def test_rows_of_unknown_writers_are_not_joined(make_buffers) -> None:
    rb = make_buffers(64, batch_size=30, **END)
    data = _unnamed(1, range(10, 20))
    spec = spec_of(data)
    rb.storage.append_columns(spec, matching_columns(data, spec))  # as a host does with a client's
    with pytest.raises(RuntimeError, match="sufficient length"):
        rb.sample()
    assert len(rb[:]) == 10


def test_flags_must_be_asked_for_before_the_first_row(folder: Path) -> None:
    storage = SharedMemmapStorage(64, scratch_dir=folder, job_id="test")
    rb = SharedReplayBuffer(storage=storage, batch_size=3)
    rb.extend(_unnamed(1, range(10)))
    with pytest.raises(ConfigurationError, match="do not record which row follows"):
        SharedReplayBuffer(storage=storage, sampler=SharedSliceSampler(**END), batch_size=3)
    storage.close()
    storage = SharedMemmapStorage(64, scratch_dir=folder, job_id="test")
    SharedReplayBuffer(storage=storage, sampler=SharedSliceSampler(**END), batch_size=3)
    other = SharedReplayBuffer(storage=storage, batch_size=3)  # samples otherwise, and writes first
    other.extend(_unnamed(1, range(10, 16)))
    rb = SharedReplayBuffer(storage=storage, sampler=SharedSliceSampler(**END), batch_size=3)
    assert_one_writer_each(rb.sample(), 3)
    wrong = SharedSliceSampler(slice_len=3, end_keys=["a", "b"])
    rb = SharedReplayBuffer(storage=storage, sampler=wrong, batch_size=3)
    with pytest.raises(ConfigurationError, match="no 'a', only"):
        rb.sample()
    storage.close()


def test_columns_of_the_rows_stay_when_what_the_sampler_adds_is_left_out(folder: Path) -> None:
    storage = SharedMemmapStorage(64, scratch_dir=folder, job_id="test")
    sampler = SharedSliceSampler(slice_len=4, traj_key="episode")
    rb = SharedReplayBuffer(storage=storage, sampler=sampler, batch_size=8)
    rows = make_rows(range(32))
    rows["episode"] = torch.arange(32) // 8
    rows["next", "done"] = torch.zeros(32, 1, dtype=torch.bool)
    rb.extend(rows)
    with pytest.warns(UserWarning, match="include_info"):
        batch = rb.sample(include_info=False)
        alike, info = rb.sample(return_info=True, include_info=False)
    for each in (batch, alike):
        assert set(each.keys(True, True)) == set(rows.keys(True, True))
        assert not each["next", "done"].any()
    assert ("next", "truncated") in info and info["index"][0].shape == (8,)
    assert rb.sample()["next", "truncated"].sum() == 2
    storage.close()


def test_what_the_error_about_dimensions_says_to_write_works(folder: Path) -> None:
    storage = SharedMemmapStorage(120, scratch_dir=folder, job_id="test", ndim=2)
    with pytest.raises(ConfigurationError, match=r"call buffer.extend\(data.reshape\(-1\)\)"):
        SharedReplayBuffer(storage=storage, sampler=SharedSliceSampler(slice_len=3))
    storage.close()
    storage = SharedMemmapStorage(100, scratch_dir=folder, job_id="test")
    rb = SharedReplayBuffer(storage=storage, sampler=SharedSliceSampler(slice_len=3), batch_size=30)
    data = torch.stack([trajectory(number, range(20)) for number in range(4)])
    rb.extend(data[:, :10].reshape(-1))
    rb.extend(data[:, 10:].reshape(-1))
    for _ in range(20):
        assert_slices(rb.sample(), 3)
    storage.close()


def test_the_error_that_no_run_is_long_enough_is_known_by_the_runs(
    make_buffers, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("other words")

    rb = make_buffers(64, traj_key=("collector", "traj_ids"), slice_len=4)
    rb.extend(trajectory(1, range(3)))
    monkeypatch.setattr(SliceSampler, "sample", fail)
    with pytest.raises(NoSlicesError, match="other words"):
        rb.sample()
    rb.extend(trajectory(1, range(3, 8)))
    with pytest.raises(RuntimeError, match="other words") as raised:
        rb.sample()
    assert type(raised.value) is RuntimeError
