"""Storages with ``ndim=2`` give what TorchRL's give, and steps of several processes stay whole."""

from __future__ import annotations

import copy
import multiprocessing
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from tensordict import TensorDict, TensorDictBase
from torchrl.data import LazyMemmapStorage, ReplayBuffer, Sequence, TensorDictReplayBuffer

from torchrl_dist import (
    RateLimiter,
    SharedCursorWriter,
    SharedMaxValueWriter,
    SharedMemmapStorage,
    SharedPrioritizedSampler,
    SharedRandomSampler,
    SharedReplayBuffer,
    SharedSamplerWithoutReplacement,
    SharedSliceSampler,
)
from torchrl_dist.errors import ConfigurationError

CAPACITY = 24


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Any]:
    made = []

    def open_(name: str = "rb", capacity: int = CAPACITY, **options: Any) -> Any:
        options = {"ndim": 2, "job_id": "test"} | options
        made.append(SharedMemmapStorage(capacity, scratch_dir=tmp_path / name, **options))
        return made[-1]

    yield open_
    for storage in made:
        storage.close()


def steps(first: int, stop: int, envs: int = 3) -> TensorDict:
    """Rows [envs, T]: env ``e`` at time ``t`` has the number ``10 * t + e``."""
    number = 10 * torch.arange(first, stop) + torch.arange(envs)[:, None]
    return TensorDict({"number": number, "obs": torch.stack([number, -number], -1)}, number.shape)


def ours(storage: Any, kind: Any = SharedReplayBuffer, **options: Any) -> Any:
    options = {"sampler": SharedRandomSampler(), "batch_size": 64} | options
    return kind(storage=storage, writer=SharedCursorWriter(), **options)


@pytest.mark.parametrize("dim_extend", [None, 0])
@pytest.mark.parametrize("kind", [ReplayBuffer, TensorDictReplayBuffer, SharedReplayBuffer])
def test_the_same_as_over_a_storage_of_torchrl(
    kind: Any, dim_extend: Any, opened: Any, tmp_path: Path
) -> None:
    rb = ours(opened(), kind, dim_extend=dim_extend)
    their_kind = TensorDictReplayBuffer if kind is SharedReplayBuffer else kind
    # with a folder, because the storage installs signal handlers otherwise
    storage = LazyMemmapStorage(CAPACITY, scratch_dir=tmp_path / "theirs", ndim=2)
    theirs = their_kind(storage=storage, dim_extend=dim_extend)
    for first in (0, 3, 6):  # the third wraps around
        data = steps(first, first + 3)
        assert torch.equal(rb.extend(data.clone()), theirs.extend(data.clone()))
        assert (rb.storage.shape, len(rb)) == (theirs.storage.shape, len(theirs))
    assert rb.storage.max_size == theirs.storage.max_size
    assert rb.writer._cursor == theirs.writer._cursor
    index = torch.tensor([1, 5, 0])
    for at in (0, slice(1, 3), (index, index % 3), (slice(None), 1), (2, 2), index):
        assert (rb.storage[at].exclude("index") == theirs.storage[at].exclude("index")).all()
    assert (rb[:].exclude("index") == theirs[:].exclude("index")).all()
    data, info = rb.sample(return_info=True)
    assert [part.shape for part in info["index"]] == [(64,), (64,)]
    assert torch.equal(data["number"], theirs.storage[info["index"]]["number"])
    assert torch.equal(rb.storage[info["index"]]["number"], data["number"])
    assert (info["index_generation"] == rb.writer.generations_of(info["index"])).all()
    if kind is not ReplayBuffer:
        assert torch.equal(data["index"], torch.stack(info["index"], -1))
    random = rb.storage._rand_given_ndim(50)
    assert all(part.max() < size for part, size in zip(random, rb.storage.shape, strict=True))


def test_an_added_step_and_rows_that_are_replaced(opened: Any) -> None:
    rb = ours(opened())
    rb.extend(steps(0, 2))
    assert rb.add(steps(2, 3)[:, 0]).tolist() == [[2, 0], [2, 1], [2, 2]]
    with pytest.raises(ConfigurationError, match="storage.index. = rows"):
        rb[0, 1] = steps(7, 8)[0, 0]
    rb.storage[1] = steps(7, 8)[:, 0]
    rb.storage[torch.tensor([0, 2]), torch.tensor([2, 0])] = steps(9, 10)[:2, 0]
    assert rb.storage[:]["number"].tolist() == [[0, 1, 90], [70, 71, 72], [91, 21, 22]]
    pairs = torch.tensor([[0, 0], [1, 2]])
    result = rb.update_if_present(
        index=pairs,
        generation=rb.writer.generations_of(pairs),
        patch={"number": torch.tensor([5, 6])},
    )
    assert result.updated.all()
    assert rb.storage[:]["number"].tolist() == [[5, 1, 90], [70, 71, 6], [91, 21, 22]]


def test_an_index_that_may_mean_slots_or_lines_is_refused(opened: Any) -> None:
    rb = ours(opened(), sampler=SharedPrioritizedSampler(CAPACITY, alpha=1.0, beta=1.0))
    rb.extend(steps(0, 4))
    lines = torch.tensor([1, 2])
    given = {"generation": rb.writer.generations_of(lines), "patch": {"number": lines}}
    with pytest.raises(IndexError, match=r"both coordinates of each row, \[n, 2\]"):
        rb.update_if_present(index=lines, **given)
    for wrong in (torch.ones(2, 3, dtype=torch.int64), (lines, lines, lines)):
        with pytest.raises(IndexError, match=r"both coordinates of each row, \[..., 2\]"):
            rb.update_priority(wrong, 9.0)
        with pytest.raises(IndexError, match="both coordinates"):
            rb.writer.write_at(wrong, steps(0, 2).reshape(-1))
    assert torch.equal(rb.storage[:]["number"], steps(0, 4)["number"].T)
    assert rb.update_if_present(index=(lines, lines), **given).updated.all()
    assert rb.storage[:]["number"][lines, lines].tolist() == [1, 2]
    rb.update_priority((torch.tensor(1), torch.tensor(2)), 9.0)
    leaves = rb.storage.directory.tree.leaves[[1, 2, 5]]
    assert leaves == pytest.approx([1, 1, 9])


@pytest.mark.parametrize("kind", [TensorDictReplayBuffer, SharedReplayBuffer])
def test_the_law_of_the_draw(kind: Any, opened: Any) -> None:
    sampler = SharedPrioritizedSampler(CAPACITY, alpha=1.0, beta=1.0)
    rb = ours(opened(), kind, sampler=sampler, batch_size=20_000)
    priority = torch.rand(3, 4) + 0.1
    rb.extend(steps(0, 4).set("td_error", priority))
    for again in range(2):
        batch = rb.sample()
        time, env = batch["index"].unbind(-1)
        assert torch.equal(batch["number"], 10 * time + env)
        counts = torch.zeros(4, 3).index_put((time, env), torch.ones(()), accumulate=True)
        law = (priority.T.double() / priority.double().sum()).reshape(-1)
        assert stats.chisquare(counts.double().reshape(-1), 20_000 * law).pvalue > 1e-4
        weight = (priority.T / priority.min())[time, env] ** -1
        torch.testing.assert_close(batch["priority_weight"], weight)
        if not again:  # the priorities of the elements that were drawn, all of them
            priority = priority.flip(0, 1) + 1
            rb.update_tensordict_priority(batch.set("td_error", priority.T[time, env]))
    index, third = torch.tensor([[1, 2], [3, 0]]), torch.tensor([9.0, 9.0])
    rb.update_priority(tuple(index.unbind(-1)), third)
    assert rb.storage.directory.tree.leaves[[5, 9]] == pytest.approx(9)
    rb.update_priority(torch.tensor([5, 9]), third + 1)  # slots, as in TorchRL
    assert rb.storage.directory.tree.leaves[[5, 9]] == pytest.approx(10)


def test_several_priorities_per_element(opened: Any) -> None:
    sampler = SharedPrioritizedSampler(CAPACITY, alpha=1.0, beta=1.0, reduction="max")
    rb = ours(opened(), sampler=sampler, batch_size=500)
    priority = torch.rand(3, 4, 2)
    rb.extend(steps(0, 4).set("td_error", priority))
    expected = priority.amax(-1).T.reshape(-1).double().numpy()
    assert rb.storage.directory.tree.leaves[:12] == pytest.approx(expected)
    batch = rb.sample()
    batch["td_error"] = torch.stack([batch["number"] + 1.0, torch.zeros(500)], -1)
    rb.update_tensordict_priority(batch)
    assert rb.storage.directory.tree.leaves[5] == pytest.approx(13)


def test_a_pass_visits_each_element_once(opened: Any) -> None:
    rb = ours(opened(), sampler=SharedSamplerWithoutReplacement(), batch_size=4)
    rb.extend(steps(0, 4))
    numbers = torch.cat([batch["number"] for batch in rb])
    assert sorted(numbers.tolist()) == sorted(steps(0, 4)["number"].reshape(-1).tolist())


def _write(folder: Path, process: int, extends: int) -> None:
    storage = SharedMemmapStorage(9_000, scratch_dir=folder, job_id="test", ndim=2)
    rb = ours(storage)
    for number in range(extends):
        rb.extend(
            steps(number, number + 1 + number % 40).set(
                "process", torch.full((3,), process)[:, None].expand(3, 1 + number % 40)
            )
        )
        if not number % 5:  # claims slots in the middle of lines
            index = torch.randint(len(rb), (7,))
            rows = rb.storage[index // 3, index % 3]
            rb.storage[index // 3, index % 3] = rows
    storage.close()


def test_steps_of_two_processes_stay_whole(tmp_path: Path) -> None:
    storage = SharedMemmapStorage(9_000, scratch_dir=tmp_path / "rb", job_id="test", ndim=2)
    rb = ours(storage)
    rb.extend(steps(0, 500).set("process", torch.zeros(3, 500, dtype=torch.int64)))
    context = multiprocessing.get_context("fork")
    arguments = [(tmp_path / "rb", number, 200) for number in (1, 2)]
    processes = [context.Process(target=_write, args=each) for each in arguments]
    for process in processes:
        process.start()
    seen: set[int] = set()
    while any(process.is_alive() for process in processes):
        batch = rb.sample()
        seen.update(batch["process"].tolist())
        assert torch.equal(batch["number"] % 10, batch["index"][:, 1])
    for process in processes:
        process.join()
        assert process.exitcode == 0
    stored = storage[:]
    # one process may end so early that the other overwrites all its rows
    assert seen | set(stored["process"].unique().tolist()) >= {1, 2}
    assert storage.directory.words[1] % 3 == 0
    assert torch.equal(stored["number"] % 10, torch.arange(3).expand(len(stored), 3))
    storage.close()


def _die_in_a_write(folder: Path) -> None:
    storage = SharedMemmapStorage(CAPACITY, scratch_dir=folder, job_id="test", ndim=2)
    ours(storage).extend(steps(1, 2))
    storage._cursor.reserve(3)
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_step_whose_writer_was_killed_is_left_out(opened: Any, tmp_path: Path) -> None:
    rb = ours(opened())
    rb.extend(steps(0, 1))
    context = multiprocessing.get_context("fork")
    process = context.Process(target=_die_in_a_write, args=(tmp_path / "rb",))
    process.start()
    process.join(30)
    assert process.exitcode == -signal.SIGKILL
    assert rb.extend(steps(3, 4)).tolist() == [[3, 0], [3, 1], [3, 2]]
    for index in (slice(None), ...):
        assert rb.storage[index]["number"].tolist() == [[0, 1, 2], [10, 11, 12], [30, 31, 32]]
    assert rb[:].shape == (3, 3) and len(rb.storage[2:3]) == 0
    assert rb.storage[1:, 0]["number"].tolist() == [10, 30]
    assert rb.storage[3, 0]["number"] == 30
    with pytest.raises(IndexError, match="the process that was writing there died"):
        rb.storage[2]


@pytest.mark.parametrize(("capacity", "slot", "lines"), [(24, 1, [1]), (60, 7, [0, 1, 3, 4])])
def test_writes_leave_out_lines_that_another_write_has_claimed_in_part(
    opened: Any, capacity: int, slot: int, lines: list[int]
) -> None:
    rb = ours(opened(capacity=capacity))
    rb.extend(steps(0, capacity // 3))
    (held,) = rb.storage._cursor.claim_slots(np.array([slot]))
    index = rb.extend(steps(90, 90 + len(lines)))  # four lines are two reservations
    assert index.tolist() == [[line, env] for line in lines for env in range(3)]
    rb.storage._cursor.abandon(held)
    for number, line in enumerate(lines):
        assert rb.storage[line]["number"].tolist() == [10 * (90 + number) + e for e in range(3)]


def test_writes_that_are_split_keep_steps_whole(opened: Any) -> None:
    rb = ours(opened(limiter=RateLimiter(min_size_to_sample=1)))
    index = rb.extend(steps(0, 9))  # an eighth of the slots is one step; one step too many
    assert index[:3].tolist() == [[-1, -1]] * 3
    assert index[3:6].tolist() == [[1, 0], [1, 1], [1, 2]]
    assert rb.storage[0]["number"].tolist() == [80, 81, 82]


def test_checkpoints(opened: Any, tmp_path: Path) -> None:
    sampler = SharedPrioritizedSampler(CAPACITY, alpha=1.0, beta=1.0)
    rb = ours(opened(), sampler=sampler)
    rb.extend(steps(0, 10).set("td_error", torch.rand(3, 10)))
    rb.dumps(tmp_path / "saved")
    sampler = SharedPrioritizedSampler(CAPACITY, alpha=1.0, beta=1.0)
    other = ours(opened("other"), sampler=sampler)
    other.loads(tmp_path / "saved")
    assert (other[:] == rb[:]).all() and other.storage.shape == (8, 3)
    assert (other.storage.directory.tree.leaves == rb.storage.directory.tree.leaves).all()
    assert other.extend(steps(10, 11).set("td_error", torch.rand(3, 1)))[0].tolist() == [2, 0]
    with pytest.raises(ConfigurationError, match="max_size=24"):
        ours(opened("larger", 30)).loads(tmp_path / "saved")
    with pytest.raises(ConfigurationError, match=r"SharedMemmapStorage\(24, ndim=2"):
        ours(opened("flat", ndim=1)).loads(tmp_path / "saved")
    flat = ours(opened("rows", ndim=1))
    flat.extend(steps(0, 2).reshape(-1))
    with pytest.raises(ConfigurationError, match="saved with ndim=1"):
        other.storage.load_state_dict(flat.storage.state_dict())
    assert other.storage.shape == (8, 3)


def test_other_shapes_are_refused_before_a_write(opened: Any) -> None:
    rb = ours(opened())
    with pytest.raises(ConfigurationError, match=r"max_size=25"):
        rb.extend(steps(0, 2, envs=5))
    with pytest.raises(ConfigurationError, match=r"takes rows \[n, width, ...\], got rows \[6\]"):
        rb.extend(steps(0, 2).reshape(-1))
    rb.extend(steps(0, 2))
    for wrong in (steps(0, 2, envs=4), steps(0, 2, envs=6)):
        with pytest.raises(ConfigurationError, match=r"rows \[n, 3, ...\].*same shape"):
            rb.extend(wrong)
    second = ours(opened(), TensorDictReplayBuffer)
    with pytest.raises(ConfigurationError, match=r"rows \[n, 3, ...\].*same shape"):
        second.extend(steps(0, 2, envs=2))
    with pytest.raises(ConfigurationError, match="pass the same ndim="):
        opened(ndim=1)
    assert rb.write_count == 6 and second.extend(steps(2, 4))[0].tolist() == [2, 0]
    index = torch.tensor([[0, 3]])
    with pytest.raises(IndexError, match="from 0 to 2"):
        rb.update_if_present(index=index, generation=index[:, 0], patch={})
    one = ours(opened("one", ndim=1))
    one.extend(steps(0, 2).reshape(-1))
    with pytest.raises(ConfigurationError, match="pass the same ndim="):
        opened("one")


def test_a_storage_built_before_the_others_learns_the_dimensions(opened: Any) -> None:
    early = ours(opened(ndim=1))
    best = opened(ndim=1)
    rb = ours(opened())
    row = steps(0, 1)[:1, 0]
    with pytest.raises(ConfigurationError, match="pass the same ndim="):
        early.extend(TensorDict({"other": torch.zeros(2)}, [2]))  # decides nothing for the others
    for write in (
        lambda: early.extend(steps(0, 2).reshape(-1)),
        lambda: early.storage.write_at(torch.tensor([3]), row),
        lambda: best.keep_best(row, "number", "sum"),
    ):
        with pytest.raises(ConfigurationError, match="pass the same ndim="):
            write()
    with pytest.raises(IndexError, match="expected slots >= 0 and below 0"):
        rb.storage.write_at(torch.tensor([0]), row)
    assert rb.extend(steps(0, 1)).tolist() == [[0, 0], [0, 1], [0, 2]]
    with pytest.raises(IndexError, match="expected slots >= 0 and below 3"):
        rb.writer.write_at(torch.tensor([[1, 0]]), row)
    copied = copy.deepcopy(rb.storage)
    assert copied.shape == (1, 3) and len(rb) == 3
    copied.close()


def test_what_needs_rows_in_order_is_refused_when_built(opened: Any) -> None:
    advice = r"call buffer.extend\(data.reshape\(-1\)\)"
    storage = opened()
    with pytest.raises(ConfigurationError, match=advice):
        ours(storage, sampler=SharedSliceSampler(slice_len=2))
    with pytest.raises(ConfigurationError, match=advice):
        ours(storage, sample_unit=Sequence(length=2))
    with pytest.raises(ConfigurationError, match="ndim=2"):
        SharedReplayBuffer(storage=storage, writer=SharedMaxValueWriter())
    with pytest.raises(ConfigurationError, match=advice):
        ours(storage).query()
    with pytest.raises(ConfigurationError, match="leave ndim out"):
        storage.fill_once(steps(0, 2))
    for options in ({"frames": {"obs": 1}}, {"ndim": 3}):
        with pytest.raises(ConfigurationError, match=advice):
            opened("refused", **options)


def test_an_extended_batch_may_be_extended_again(opened: Any) -> None:
    rb = ours(opened(), TensorDictReplayBuffer)
    data: TensorDictBase = steps(0, 2)
    index = rb.extend(data)
    data["index"] = index.unflatten(0, data.shape)  # as TorchRL's buffers set it
    rb.extend(data)
    assert set(rb.storage[0].keys()) == {"number", "obs"}
