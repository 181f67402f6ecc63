"""``sample_unit=Sequence(...)``: windows of consecutive rows, whichever slots they are in."""

from __future__ import annotations

import itertools
import multiprocessing
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, Sequence, TensorDictReplayBuffer
from torchrl.data.replay_buffers.samplers import RandomSampler

from tests.replay.faults import run_forked
from torchrl_dist.errors import ConfigurationError
from torchrl_dist.replay import (
    RateLimiter,
    SharedMemmapStorage,
    SharedPrioritizedSampler,
    SharedRandomSampler,
    SharedReplayBuffer,
    SharedSamplerWithoutReplacement,
    SharedSliceSampler,
)
from torchrl_dist.replay.node.cursor import SharedCursor
from torchrl_dist.replay.parts.windows import Neighbours, Window

DONE = ("next", "done")


def make(folder: Path, capacity: int = 64, **options: Any) -> SharedReplayBuffer:
    storage = {key: options.pop(key) for key in ("limiter", "frames") if key in options}
    return SharedReplayBuffer(
        storage=SharedMemmapStorage(capacity, scratch_dir=folder, job_id="test", **storage),
        **{"batch_size": 8, "sample_unit": Sequence(length=3), **options},
    )


def steps(first: int, ends: list[bool], episode: int | None = None) -> TensorDict:
    """Rows with the numbers from ``first`` on."""
    count = len(ends)
    rows = TensorDict(
        {
            "id": torch.arange(first, first + count),
            DONE: torch.tensor(ends).reshape(count, 1),
            "td_error": torch.ones(count),
        },
        [count],
    )
    if episode is not None:
        rows["episode"] = torch.full((count,), episode)
    return rows


# --- the same as TorchRL's on a ring that one thread writes --------------------------------------


@pytest.mark.parametrize("boundary", ["pad", "stop", "include_reset"])
@pytest.mark.parametrize("end_key", [DONE, None], ids=str)
@pytest.mark.parametrize("written", [23, 64, 150])
def test_windows_are_those_of_torchrls_unit(folder: Path, boundary, end_key, written) -> None:
    rng = np.random.default_rng(written)
    for _ in range(6):
        unit = Sequence(
            length=int(rng.integers(1, 7)),
            burn_in=int(rng.integers(0, 5)),
            bootstrap=int(rng.integers(0, 4)),
            dilation=int(rng.integers(1, 4)),
            episode_boundary=boundary,
            done_key=end_key,
        )
        ours = make(folder / "ours", sample_unit=unit, batch_size=32)
        theirs = TensorDictReplayBuffer(
            storage=LazyTensorStorage(64), sampler=RandomSampler(), sample_unit=unit, batch_size=32
        )
        at = 0
        while at < written:
            count = min(int(rng.integers(1, 20)), written - at)
            rows = steps(at, (rng.random(count) < 0.15).tolist())
            ours.extend(rows)
            theirs.extend(rows.clone())
            at += count
        batch, info = ours.sample(return_info=True)
        anchors = batch["anchor_index"].reshape(32, -1)[:, 0]
        index, expected = unit.expand(anchors, {}, theirs.storage)
        assert {*expected, "index", "index_generation", "anchor_generation"} == {*info}
        for name, value in (expected | {"index": index}).items():
            assert info[name].dtype == value.dtype and (info[name] == value).all(), name
        assert (batch["id"] == theirs.storage[index]["id"]).all()
        assert (info["index_generation"] == ours.writer.generations_of(index)).all()
        assert (
            info["anchor_generation"] == ours.writer.generations_of(batch["anchor_index"])
        ).all()
        ours.storage.close()


# --- a plain model -------------------------------------------------------------------------------


def expected_window(rows: list[int], at: int, window: Window) -> tuple[list[int], list[bool]]:
    """The window of ``rows[at]``; ``rows`` are those of its trajectory that are in the ring."""
    if window.episode_boundary == "stop":
        beyond = at + window.dilation * (window.length + window.bootstrap - 1) - (len(rows) - 1)
        at -= min(max(beyond, 0), at)
    places = [at + window.dilation * (step - window.burn_in) for step in range(window.size)]
    return (
        [rows[min(max(place, 0), len(rows) - 1)] for place in places],
        [0 <= place < len(rows) for place in places],
    )


@pytest.mark.parametrize("ids", [True, False], ids=["trajectory ids", "writers"])
@pytest.mark.parametrize("boundary", ["pad", "stop"])
def test_windows_follow_trajectories_of_writers_that_take_turns(folder, ids, boundary) -> None:
    """Writers interleave, episodes cross extends, the ring wraps, slots are replaced."""
    rng = np.random.default_rng(1 + ids)
    for _ in range(8):
        unit = Sequence(
            *(int(rng.integers(1, 6)), boundary, DONE),
            burn_in=int(rng.integers(0, 5)),
            bootstrap=int(rng.integers(0, 3)),
            dilation=int(rng.integers(1, 3)),
        )
        window = Window.of(unit)
        writers = [make(folder / "rows", 97, sample_unit=unit) for _ in range(3)]
        environments = 2 if ids else 1
        trajectory_of: dict[int, int] = {}
        ring: dict[int, int] = {}  # the id of each slot
        current = {(w, e): 100 * w + e for w in range(3) for e in range(environments)}
        new = 1000
        at = 0
        for _ in range(60):
            writer = int(rng.integers(3))
            parts = []
            for env in range(environments):
                count = int(rng.integers(1, 9))
                ends = (rng.random(count) < 0.2).tolist()
                rows = steps(at, ends, current[writer, env] if ids else None)
                for step, end in enumerate(ends):
                    trajectory_of[at + step] = current[writer, env]
                    if ids:
                        rows["episode"][step] = current[writer, env]
                    if end:
                        current[writer, env] = new = new + 1
                at += count
                parts.append(rows)
            data = torch.cat(parts)
            for slot, number in zip(
                writers[writer].extend(data).tolist(), data["id"].tolist(), strict=True
            ):
                ring[slot] = number
            if rng.random() < 0.2:  # other values in a row do not change its place
                slot = int(rng.choice(list(ring)))
                writers[0].storage[slot] = writers[0].storage[slot]
            batch = writers[int(rng.integers(3))].sample()
            numbers, valid = (
                batch[name].reshape(8, -1).tolist() for name in ("id", "validity_mask")
            )
            for row, anchor in enumerate(batch["anchor_index"].reshape(8, -1)[:, 0].tolist()):
                mine = ring[anchor]
                rows_of_it = sorted(
                    each for each in ring.values() if trajectory_of[each] == trajectory_of[mine]
                )
                expected = expected_window(rows_of_it, rows_of_it.index(mine), window)
                assert (numbers[row], valid[row]) == expected
        for each in writers:
            each.storage.close()


def test_a_lost_extend_leaves_a_gap_that_no_window_crosses(folder, monkeypatch) -> None:
    rb = make(folder, sample_unit=Sequence(length=4, done_key=None))
    rb.extend(steps(0, [False] * 5))
    with monkeypatch.context() as patch:
        patch.setattr(SharedCursor, "publish_locked", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            rb.extend(steps(5, [False] * 5))
    rb.extend(steps(10, [False] * 5))
    for _ in range(20):
        windows = rb.sample()["id"].reshape(8, 4)
        assert ((windows < 5).all(1) | (windows >= 10).all(1)).all()


def test_rows_of_a_forked_child_do_not_continue_its_parents(folder: Path) -> None:
    rb = make(folder, sample_unit=Sequence(length=4, done_key=None))
    rb.extend(steps(0, [False] * 5))
    assert run_forked(lambda: rb.extend(steps(100, [False] * 5))) == 0
    rb.extend(steps(5, [False] * 5))
    for _ in range(20):
        windows = rb.sample()["id"].reshape(8, 4)
        assert ((windows < 100).all(1) | (windows >= 100).all(1)).all()
        assert (windows.diff(dim=1) <= 1).all()


# --- the law of anchors, and their priorities ----------------------------------------------------


@pytest.mark.parametrize("shape", [(30,), (6, 5)], ids=str)
@pytest.mark.parametrize("eta", [1.0, 0.9])
def test_the_priority_of_a_window_goes_to_its_anchor(folder: Path, eta: float, shape) -> None:
    """A late priority goes to no row, also if the anchor's slot has another row by then. Rows that
    stand in for others do not count, whatever the batch size."""
    sampler = SharedPrioritizedSampler(32, alpha=1.0, beta=1.0, eps=1e-8)
    unit = Sequence(length=3, burn_in=1, bootstrap=1)
    rb = make(folder, 32, sampler=sampler, sample_unit=unit, eta=eta, batch_size=6)
    rb.extend(steps(0, [step % 6 == 5 for step in range(32)]))
    batch = rb.sample()
    errors = torch.rand(30) + 1.5 + 90 * ~batch["validity_mask"]
    batch["td_error"] = errors
    rb.extend(steps(100, [False] * 8))  # over the slots 0 to 7
    rb.update_tensordict_priority(batch.clone().reshape(shape))
    leaves = rb.storage.directory.tree.leaves
    windows = batch.reshape(6, 5)
    late = 0
    for row in range(6):
        anchor = int(windows["anchor_index"][row, 0])
        valid = windows["validity_mask"][row]
        learning = valid & windows["learning_mask"][row]
        mine = errors.reshape(6, 5)[row]
        expected = eta * mine[valid].max() + (1 - eta) * mine[learning].mean()
        if anchor >= 8:
            same = (windows["anchor_index"][:, 0] == anchor).sum()
            assert same > 1 or leaves[anchor] == pytest.approx(float(expected), rel=1e-5)
        else:
            late += 1
            assert leaves[anchor] == pytest.approx(1, abs=1e-6)
    unique = len(windows["anchor_index"][:, 0][windows["anchor_index"][:, 0] < 8].unique())
    assert rb.storage.counters["stale_updates"] == unique and late >= unique
    rb.update_tensordict_priority(batch[10:15])  # a part that is one window


def test_parts_of_windows_without_rows_to_learn_from_count_by_their_maximum(folder: Path) -> None:
    sampler = SharedPrioritizedSampler(32, alpha=1.0, beta=1.0)
    rb = make(folder, 32, sampler=sampler, sample_unit=Sequence(3, burn_in=3), eta=0.5)
    rb.extend(steps(0, [step % 5 == 4 for step in range(30)]))
    batch = rb.sample()
    batch["td_error"] = torch.full((48,), 2.0)
    valid = batch["validity_mask"]
    rb.update_tensordict_priority(batch[~valid])
    rb.update_tensordict_priority(batch[:0])
    leaves = rb.storage.directory.tree.leaves
    assert np.allclose(leaves[:30], 1)
    before = batch[valid & ~batch["learning_mask"]]
    rb.update_tensordict_priority(before)
    assert np.allclose(leaves[before["anchor_index"]], 2)


def test_a_sampler_serves_buffers_with_the_same_windows_only(folder: Path) -> None:
    sampler = SharedRandomSampler()
    rb = make(folder, sampler=sampler)
    for unit in (None, Sequence(2)):
        with pytest.raises(ConfigurationError, match="create one sampler per buffer"):
            SharedReplayBuffer(storage=rb.storage, sampler=sampler, sample_unit=unit)
    plain = SharedRandomSampler()
    SharedReplayBuffer(storage=rb.storage, sampler=plain, batch_size=4)
    with pytest.raises(ConfigurationError, match="create one sampler per buffer"):
        SharedReplayBuffer(storage=rb.storage, sampler=plain, sample_unit=Sequence(3))


def test_a_pass_draws_each_anchor_once(folder: Path) -> None:
    rb = make(folder, sampler=SharedSamplerWithoutReplacement(), batch_size=7)
    rb.extend(steps(0, [step % 9 == 8 for step in range(40)]))
    anchors = torch.cat([batch["anchor_index"].reshape(-1, 3)[:, 0] for batch in rb])
    assert sorted(anchors.tolist()) == list(range(40))


# --- other storages, copies, refusals ------------------------------------------------------------


def test_windows_of_frames_that_are_stored_once(folder: Path) -> None:
    rb = make(folder, frames={"pixels": 2}, sample_unit=Sequence(4, burn_in=1))
    for first in range(0, 90, 6):
        rows = steps(first, [False] * 5 + [True])
        pixel = torch.arange(first, first + 7).to(torch.uint8)
        stack = torch.stack([pixel.roll(1), pixel], 1)[..., None].expand(-1, -1, 8)
        rows["pixels"], rows["next", "pixels"] = stack[:-1].clone(), stack[1:].clone()
        rb.extend(rows)
        batch = rb.sample()
        assert (batch["pixels"][:, 1, 0] == batch["id"]).all()
        assert (batch["next", "pixels"][:, 1, 0] == batch["id"] + 1).all()


def test_a_sample_in_a_signal_handler_does_not_disturb_the_one_that_it_interrupts(folder) -> None:
    rb = make(folder, 2000, batch_size=32, sample_unit=Sequence(20, burn_in=10, done_key=None))
    handled, numbers = [], itertools.count(10_000, 10_000)

    def sample(*_: Any) -> None:
        rows = steps(next(numbers), [False] * 50)
        try:
            rb.extend(rows)
            handled.append(rb.sample())
        except Exception as error:  # an interrupted lock
            handled.append(error)

    before = signal.signal(signal.SIGALRM, sample)
    rng = np.random.default_rng(0)
    try:
        end = time.monotonic() + 3
        while time.monotonic() < end:
            signal.setitimer(signal.ITIMER_REAL, float(rng.uniform(1e-4, 4e-3)))  # once
            rb.extend(steps(0, [False] * 40))
            windows = rb.sample().reshape(32, 30)
            jumps = windows["id"].diff(dim=1)
            valid = windows["validity_mask"]
            inside = valid[:, 1:] & valid[:, :-1]
            wrong = inside & ~torch.isin(jumps, torch.tensor([1, -39])) & (jumps.abs() < 1000)
            assert not wrong.any(), (jumps[wrong], windows["id"][wrong.any(1)])
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert any(isinstance(each, TensorDict) for each in handled)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sampler": SharedSliceSampler(slice_len=2)}, "draws slices"),
        ({"eta": 0.9, "sample_unit": None}, "eta=0.9"),
        ({"eta": 2.0}, "eta=2.0"),
        (
            {"limiter": RateLimiter(min_size_to_sample=30, max_times_sampled=3)},
            "without max_times_sampled",
        ),
        ({"sample_unit": Sequence(2, done_key="absent")}, "no 'absent', only"),
    ],
    ids=["slices", "eta without windows", "eta", "counts", "done_key"],
)
def test_what_cannot_work_is_refused(folder: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        rb = make(folder, **options)
        rb.extend(steps(0, [False] * 9))
        rb.sample()


def test_rows_from_before_are_refused(folder: Path) -> None:
    plain = make(folder, sample_unit=None, sampler=SharedRandomSampler())
    plain.extend(steps(0, [False] * 9))
    with pytest.raises(ConfigurationError, match="same sampler and sample_unit in the buffers of"):
        make(folder)


# --- while others write --------------------------------------------------------------------------


def test_windows_are_whole_while_writers_lap_the_ring(folder: Path) -> None:
    """Each writer's rows are consecutive numbers of its own range; episodes have 25 rows."""
    unit = Sequence(10, burn_in=5)
    rb = make(folder, 300, sample_unit=unit, batch_size=16)
    rb.extend(steps(0, [False] * 10))

    def write(number: int) -> None:
        mine = make(folder, 300, sample_unit=unit)
        at = 1_000_000 * (number + 1)
        end = time.monotonic() + 3
        while time.monotonic() < end:
            mine.extend(steps(at, [step % 25 == 24 for step in range(at, at + 20)]))
            at += 20
        mine.storage.close()

    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=write, args=(number,)) for number in range(2)]
    for each in writers:
        each.start()
    try:
        windows = 0
        while any(each.is_alive() for each in writers):
            batch = rb.sample().reshape(16, 15)
            ids, valid = batch["id"], batch["validity_mask"]
            inside = valid[:, 1:] & valid[:, :-1]
            jumps = ids.diff(dim=1)
            assert ((jumps == 1) == inside).all() and (jumps[~inside] <= 0).all()
            of_one_episode = ids // 25 == ids[:, :1] // 25
            assert of_one_episode[ids[:, 0] >= 1_000_000].all()
            windows += 16
    finally:
        for each in writers:
            each.join(30)
    assert windows > 100 and [each.exitcode for each in writers] == [0, 0]


def test_another_sampler_draws_windows_too_or_is_refused(folder: Path) -> None:
    rb = make(folder)
    rb.extend(steps(0, [False] * 9))
    rb.set_sampler(SharedRandomSampler())
    assert rb.sample()["validity_mask"].shape == (24,)
    with pytest.raises(ConfigurationError, match="draws slices"):
        rb.set_sampler(SharedSliceSampler(slice_len=2))
    assert rb.sample()["validity_mask"].shape == (24,)


def test_neighbours_are_read_again_after_an_interrupted_use(folder: Path) -> None:
    rb = make(folder)
    rb.extend(steps(0, [False] * 9))
    rb.sample()
    near = rb.sampler._neighbours
    near.busy = True
    rb.sample()
    assert isinstance(rb.sampler._neighbours, Neighbours) and rb.sampler._neighbours is not near
