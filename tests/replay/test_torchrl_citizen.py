"""The shared parts beside TorchRL's: same numbers, schedulers, pickling, the buffer of #1397."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import chisquare
from tensordict import NonTensorData, TensorDict
from torchrl.data import (
    FlatStorageCheckpointer,
    LazyTensorStorage,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    RandomSampler,
    ReplayBuffer,
    SamplerWithoutReplacement,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    TensorDictMaxValueWriter,
    TensorDictReplayBuffer,
    TensorDictRoundRobinWriter,
)
from torchrl.data.replay_buffers import Sequence
from torchrl.data.replay_buffers.samplers import ConsumingSampler
from torchrl.data.replay_buffers.scheduler import LambdaScheduler, LinearScheduler, StepScheduler

from tests.replay.conftest import make_rows
from torchrl_dist import (
    CheckpointError,
    ConfigurationError,
    DirectoryError,
    SharedCursorWriter,
    SharedMemmapStorage,
    SharedPrioritizedSampler,
    SharedRandomSampler,
    SharedReplayBuffer,
)

_FORK = multiprocessing.get_context("fork")


def torchrl_buffer(capacity: int, **kwargs) -> TensorDictReplayBuffer:
    try:
        sampler = PrioritizedSampler(capacity, alpha=0.7, beta=0.5, **kwargs)
    except RuntimeError as error:
        if "SegmentTree" not in str(error):
            raise
        pytest.skip("TorchRL's compiled priority trees do not load with this torch")
    return TensorDictReplayBuffer(
        storage=LazyTensorStorage(capacity), sampler=sampler, batch_size=16
    )


@pytest.mark.parametrize("within", [False, True])
def test_the_same_operations_give_the_tree_and_weights_of_torchrl(folder: Path, within) -> None:
    capacity = 40
    peer = torchrl_buffer(capacity, max_priority_within_buffer=within)
    ours = TensorDictReplayBuffer(
        storage=SharedMemmapStorage(capacity, scratch_dir=folder, job_id="test"),
        sampler=SharedPrioritizedSampler(
            capacity, alpha=0.7, beta=0.5, max_priority_within_buffer=within
        ),
        writer=SharedCursorWriter(),
        batch_size=16,
    )
    random = np.random.default_rng(0)
    for step in range(30):
        rows = make_rows(range(10 * step, 10 * step + 5))
        if step % 3 == 0:
            rows["td_error"] = torch.from_numpy(random.random(5))
        index = torch.from_numpy(random.integers(0, min(5 * step + 5, capacity), 6)).unique()
        priority = torch.from_numpy(random.exponential(size=index.numel())).float()
        for buffer in (peer, ours):
            given = rows.clone() if step >= 1 else rows.clone().set("td_error", torch.ones(5))
            if "td_error" not in given:
                given["td_error"] = torch.full((5,), float(buffer.sampler.default_priority))
            buffer.extend(given.set("td_error", given["td_error"].float()))
            buffer.update_priority(index, priority)
        theirs = torch.as_tensor([peer.sampler._sum_tree[i] for i in range(len(peer))])
        np.testing.assert_allclose(
            ours.storage.directory.tree.leaves[: len(peer)], theirs.numpy(), rtol=1e-6
        )
        assert float(ours.sampler.default_priority) == pytest.approx(
            float(peer.sampler.default_priority), rel=1e-6
        )
    leaves = ours.storage.directory.tree.leaves
    for buffer in (peer, ours):
        batch = buffer.sample(4000)
        expected = (leaves[batch["index"].numpy()] / leaves.min()) ** -0.5
        np.testing.assert_allclose(batch["priority_weight"].numpy(), expected, rtol=1e-4)
        counts = np.bincount(batch["index"], minlength=capacity)
        assert chisquare(counts, leaves / leaves.sum() * 4000).pvalue > 1e-5
    ours.storage.close()


def test_torchrls_schedulers_move_beta_and_alpha(make_buffer) -> None:
    rb = make_buffer(16, alpha=1.0, beta=0.4)
    rb.extend(make_rows(range(16)))
    rb.update_priority(torch.arange(16), torch.arange(1.0, 17.0))
    linear = LinearScheduler(rb, "beta", final_value=1.0, num_steps=10)
    for _ in range(5):
        linear.step()
    assert float(rb.sampler.beta) == pytest.approx(0.7)
    StepScheduler(rb, "beta", gamma=0.5, n_steps=1).step()
    assert float(rb.sampler.beta) == pytest.approx(0.35)
    LambdaScheduler(rb, "alpha", lambda step: 0.5).step()
    np.testing.assert_allclose(rb.storage.directory.tree.leaves, np.arange(1, 17) ** 0.5, rtol=1e-6)
    rb.sample()


class ScheduledBuffer(TensorDictReplayBuffer):
    """The buffer of pytorch/rl#1397: beta is annealed by hand, can_sample is overridden."""

    def __init__(self, beta_start: float, beta_end: float, beta_steps: int, **kwargs) -> None:
        super().__init__(**kwargs)
        self.beta_end = beta_end
        self._beta_current = beta_start
        self._beta_step_size = (beta_end - beta_start) / beta_steps

    def can_sample(self) -> bool:
        return len(self) >= self.batch_size

    def step(self) -> None:
        self._beta_current = min(self._beta_current + self._beta_step_size, self.beta_end)
        self._sampler._beta = self._beta_current


def test_the_scheduled_buffer_of_1397_works_unchanged(folder: Path) -> None:
    rb = ScheduledBuffer(
        0.4, 1.0, 100,
        storage=SharedMemmapStorage(1000, scratch_dir=folder, job_id="test"),
        sampler=SharedPrioritizedSampler(1000, alpha=0.6, beta=0.4),
        writer=SharedCursorWriter(),
        batch_size=128 // 4, prefetch=128, priority_key="priority",
        pin_memory=torch.cuda.is_available(),
    )  # fmt: skip
    rb.extend(make_rows(range(20)))
    assert not rb.can_sample()
    rb.extend(make_rows(range(20, 200)))
    assert rb.can_sample()
    for _ in range(300):
        batch = rb.sample()
        batch["priority"] = torch.rand(32)
        rb.update_tensordict_priority(batch)
        rb.step()
    assert rb.sampler.beta == pytest.approx(1.0)
    assert rb.storage.directory.counters["unverified_updates"] == 0
    rb.storage.close()


@pytest.mark.parametrize(("reduction", "expected"), [("max", 3.0), ("min", 1.0), ("mean", 2.0)])
def test_priorities_of_several_elements_are_reduced_as_asked(folder, reduction, expected) -> None:
    rb = TensorDictReplayBuffer(
        storage=SharedMemmapStorage(8, scratch_dir=folder, job_id="test"),
        sampler=SharedPrioritizedSampler(8, 1.0, 0.4, reduction=reduction),
        writer=SharedCursorWriter(),
        batch_size=4,
    )
    rb.extend(make_rows(range(8)))
    batch = rb.sample()
    batch["td_error"] = torch.tensor([[1.0, 2.0, 3.0]]).expand(4, 3)
    rb.update_tensordict_priority(batch)
    leaves = rb.storage.directory.tree.leaves[batch["index"]]
    np.testing.assert_allclose(leaves, expected, rtol=1e-6)
    rb.storage.close()


BUFFERS = pytest.mark.parametrize("kind", [TensorDictReplayBuffer, SharedReplayBuffer])


@BUFFERS
@pytest.mark.parametrize("part", ["all", "clone", "sorted", "some", "one"])
def test_a_late_priority_for_a_recycled_slot_is_dropped(make_buffer, kind, part) -> None:
    rb = make_buffer(16, alpha=1.0, kind=kind)
    rb.extend(make_rows(range(16)))
    batch = rb.sample(8)
    batch["td_error"] = torch.full((8,), 100.0)
    _in_a_forked_process(lambda: rb.extend(make_rows(range(16, 24))))  # slots 0 to 7
    late = {
        "all": batch,
        "clone": batch.clone(),
        "sorted": batch[batch["index"].argsort(stable=True)],
        "some": batch[2:6],
        "one": batch[3],
    }[part]
    rb.update_tensordict_priority(late)
    counters = rb.storage.directory.counters
    stale = int((late["index"] < 8).sum())
    leaves = rb.storage.directory.tree.leaves
    fresh = np.unique(late["index"][late["index"] >= 8].numpy())
    np.testing.assert_allclose(leaves[fresh], 100.0)
    if kind is SharedReplayBuffer or part in ("all", "clone"):
        assert counters["stale_updates"] == stale and counters["unverified_updates"] == 0
        np.testing.assert_allclose(np.delete(leaves, fresh), 1.0)
    else:  # TorchRL's class passes slots only: a part of a batch is not recognised, but counted
        assert counters["unverified_updates"] == late.numel()


def _in_a_forked_process(work: Callable[[], object]) -> None:
    process = _FORK.Process(target=work)
    process.start()
    process.join(60)
    assert process.exitcode == 0


def test_generations_of_is_the_same_number_in_every_process(make_buffer) -> None:
    rb = make_buffer(16)
    rb.extend(make_rows(range(12)))
    before = rb.writer.generations_of(torch.arange(16))
    assert before.tolist() == [1] * 12 + [-1] * 4
    _in_a_forked_process(lambda: rb.extend(make_rows(range(12))))
    now = rb.writer.generations_of(torch.tensor([0, 7, 8, 15, -1]))
    assert now.tolist() == [2, 2, 1, 1, -1]
    index = torch.tensor([[0, 8], [15, 11]])
    assert rb.writer.generations_of(index).tolist() == [[2, 1], [1, 1]]


@BUFFERS
def test_the_handles_of_a_sample_that_is_written_again_stay_those_of_its_draw(
    make_buffer, kind
) -> None:
    rb = make_buffer(16, alpha=1.0, kind=kind)
    first = rb.extend(make_rows(range(8)))
    batch = rb.sample(8)  # as in relabelling: sampled, changed, written as new rows
    second = rb.extend(batch.set("obs", -batch["obs"]))
    batch["td_error"] = torch.full((8,), 5.0)
    rb.update_tensordict_priority(batch)
    drawn = set(batch["index"].tolist())
    expected = [5.0 if slot in drawn else 1.0 for slot in first.tolist()]
    np.testing.assert_allclose(rb.storage.directory.tree.leaves[first], expected)
    rb.update_priority(second, torch.full((8,), 9.0))
    np.testing.assert_allclose(rb.storage.directory.tree.leaves[second], 9.0)
    np.testing.assert_allclose(rb.storage.directory.tree.leaves[first], expected)


def test_rows_appear_with_their_own_priority_in_one_publication(make_buffer, monkeypatch) -> None:
    rb = make_buffer(64, alpha=1.0, kind=SharedReplayBuffer)
    rb.extend(make_rows(range(64)).set("td_error", torch.full((64,), 7.0)))
    directory = rb.storage.directory
    publish, seen = directory.kernel.publish, []

    def leaves() -> set[float]:
        published = directory.versions & 1 == 0
        return {round(leaf, 6) for leaf in directory.tree.leaves[published].tolist()}

    def look(*args: Any) -> Any:
        seen.append(leaves())
        generations = publish(*args)
        seen.append(leaves())
        return generations

    monkeypatch.setattr(directory.kernel, "publish", look)
    rb.extend(make_rows(range(8)).set("td_error", torch.full((8,), 3.0)))
    assert seen == [{7.0}, {3.0, 7.0}]
    rb.add(make_rows(range(1))[0].set("td_error", torch.tensor(11.0)))
    rb.extend(make_rows(range(2)).set("td_error", torch.ones(2)), update_priority=False)
    assert directory.tree.leaves[8:11] == pytest.approx([11.0] * 3)  # the largest one seen


def test_rows_with_bad_priorities_are_refused_before_they_are_written(make_buffer) -> None:
    rb = make_buffer(8, kind=SharedReplayBuffer)
    rb.extend(make_rows(range(3)).set("td_error", torch.ones(3)))
    with pytest.raises(ConfigurationError, match="finite"):
        rb.extend(make_rows(range(2)).set("td_error", torch.tensor([1.0, torch.nan])))
    assert len(rb) == 3 and rb.write_count == 3
    with pytest.raises(ConfigurationError, match="no 'index'"):
        rb.update_tensordict_priority(make_rows(range(2)))
    with pytest.raises(ConfigurationError, match="to_tensordict"):
        rb.extend([make_rows(range(2))])


def test_another_threads_sampling_does_not_hold_up_writes_and_updates(make_buffer) -> None:
    rb = make_buffer(64, kind=SharedReplayBuffer)
    rb.extend(make_rows(range(32)))
    batch = rb.sample(8).set("td_error", torch.ones(8))
    inside, leave = threading.Event(), threading.Event()
    original = rb.storage.hand_over

    def stay_inside(*args) -> None:
        inside.set()
        assert leave.wait(30)
        original(*args)

    rb.storage.hand_over = stay_inside
    sampling = threading.Thread(target=rb.sample)
    sampling.start()
    try:
        assert inside.wait(30)
        rb.extend(make_rows(range(32, 40)))
        rb.add(make_rows(range(1))[0])
        rb.update_tensordict_priority(batch)
        assert rb.write_count == 41 and sampling.is_alive()
    finally:
        leave.set()
        sampling.join(30)


class _OwnWriter(TensorDictRoundRobinWriter):
    """A user's, with TorchRL's cursor."""


def _options(name: str) -> dict:
    """Constructor arguments that cannot be right over rows that others write."""
    samplers = {
        "RandomSampler": RandomSampler,
        "SamplerWithoutReplacement": SamplerWithoutReplacement,
        "ConsumingSampler": lambda: ConsumingSampler(1),
        "SliceSampler": lambda: SliceSampler(slice_len=2, traj_key="id"),
        "SliceSamplerWithoutReplacement": lambda: SliceSamplerWithoutReplacement(slice_len=2),
        "PrioritizedSampler": lambda: PrioritizedSampler(16, 0.6, 0.4),
        "PrioritizedSliceSampler": lambda: PrioritizedSliceSampler(16, 0.6, 0.4, slice_len=2),
    }
    if name in samplers:
        try:
            return {"sampler": samplers[name]()}
        except RuntimeError as error:
            if "SegmentTree" not in str(error):
                raise
            pytest.skip("TorchRL's compiled priority trees do not load with this torch")
    return {
        "no writer": {"writer": None},
        "no sampler": {"sampler": None},
        "made writer": {"writer": lambda: TensorDictRoundRobinWriter()},
        "MaxValueWriter": {"writer": TensorDictMaxValueWriter(rank_key="id")},
        "own writer": {"writer": _OwnWriter()},
        "delayed": {"writer": None, "delayed_init": True},
        "sample_unit": {"sample_unit": Sequence(length=2)},
        "consume_after_n_samples": {"consume_after_n_samples": 1},
        "shared": {"shared": True},
        "dim_extend": {"dim_extend": 1},
        "compilable": {"compilable": True},
        "checkpointer": {"checkpointer": FlatStorageCheckpointer()},
    }[name]


@BUFFERS
@pytest.mark.parametrize(
    ("option", "message"),
    [
        *[
            (name, f"{name}, .* build it with sampler={ours}.* writer=SharedCursorWriter")
            for name, ours in (
                ("RandomSampler", "SharedRandom"),
                ("SamplerWithoutReplacement", "SharedSamplerWithoutReplacement"),
                ("ConsumingSampler", "SharedRandom"),
                ("SliceSampler", "SharedSliceSampler"),
                ("SliceSamplerWithoutReplacement", "SharedSliceSampler"),
                ("PrioritizedSampler", "SharedPrioritizedSampler"),
                ("PrioritizedSliceSampler", "SharedPrioritizedSliceSampler"),
            )
        ],
        ("no writer", "RoundRobinWriter, also where no .* writer=SharedCursorWriter"),
        ("no sampler", "RandomSampler, also where no .* sampler=SharedRandomSampler"),
        ("made writer", "RoundRobinWriter, .* writer=SharedCursorWriter"),
        ("MaxValueWriter", "MaxValueWriter, .* writer=SharedCursorWriter"),
        ("own writer", "_OwnWriter, .* writer=SharedCursorWriter"),
        ("delayed", "RoundRobinWriter, .* writer=SharedCursorWriter"),
        ("consume_after_n_samples", "ConsumingSampler"),
        ("sample_unit", "SharedSliceSampler"),
        ("shared", "leave it out"),
        ("dim_extend", "dim_extend=1"),
        ("compilable", "leave it out"),
        ("checkpointer", "leave it out"),
    ],
)
def test_what_cannot_be_right_is_refused_when_the_buffer_is_built(
    folder: Path, kind, option: str, message: str
) -> None:
    storage = SharedMemmapStorage(16, scratch_dir=folder, job_id="test")
    options = _options(option)
    arguments = {"sampler": SharedRandomSampler(), "writer": SharedCursorWriter(), **options}
    brings_its_own = kind is SharedReplayBuffer and None in options.values()
    if kind is SharedReplayBuffer and "writer" in options:
        message += "|leave writer= out"
    with pytest.raises(ConfigurationError, match=message) if not brings_its_own else nullcontext():
        kind(storage=storage, batch_size=4, **arguments).extend(make_rows(range(4)))
    assert bool(len(storage)) == brings_its_own
    rb = kind(  # the same storage is good for a right one
        storage=storage, sampler=SharedRandomSampler(), writer=SharedCursorWriter(), batch_size=4
    )
    rb.extend(make_rows(range(8)))
    assert len(rb.sample()) == 4
    if options.get("sampler") is not None:
        rb.set_sampler(options["sampler"])
        with pytest.raises((ConfigurationError, RuntimeError, KeyError)):
            rb.sample()
    if "writer" in options:
        written = rb.write_count
        rb.set_writer(TensorDictRoundRobinWriter())
        with pytest.raises(ConfigurationError, match="RoundRobinWriter"):
            TensorDictReplayBuffer.extend(rb, make_rows(range(8)))
        assert storage.write_count == written
    storage.close()


def test_a_buffer_of_ours_needs_only_a_storage(folder: Path) -> None:
    rb = SharedReplayBuffer(
        storage=lambda: SharedMemmapStorage(8, scratch_dir=folder, job_id="test"), batch_size=4
    )
    rb.extend(make_rows(range(8)).set("td_error", torch.ones(8)))  # not prioritized: ignored
    rb.update_tensordict_priority(rb.sample())
    assert isinstance(rb.sampler, SharedRandomSampler)
    with pytest.raises(ConfigurationError, match="leave writer= out"):
        SharedReplayBuffer(storage=LazyTensorStorage(8), writer=TensorDictRoundRobinWriter())
    rb.storage.close()


@BUFFERS
def test_rows_written_in_place_are_new_rows_and_parts_of_rows_are_refused(
    make_buffer, kind
) -> None:
    rb = make_buffer(16, alpha=1.0, kind=kind)
    rb.extend(make_rows(range(10)))
    sampled = rb.sample(64).set("td_error", torch.full((64,), 9.0))
    new = make_rows(range(70, 80))
    rb[3] = new[3]
    rb[4:6] = new[4:6]
    rb[torch.tensor([7, 6])] = new[[7, 6]]
    rb[-2] = new[8]
    rb.write_all(new[:1])
    generation = rb.writer.generations_of(torch.arange(10))
    assert generation.tolist() == [2, 1, 1, 2, 2, 2, 2, 2, 2, 1]
    expected = [70 + i if g == 2 else i for i, g in enumerate(generation.tolist())]
    for change in (
        lambda: rb.set_at_("id", torch.zeros(1, dtype=torch.int64), torch.tensor([1])),
        lambda: rb.set_("id", torch.zeros(10, dtype=torch.int64)),
        lambda: rb.update_({"id": torch.zeros(10, dtype=torch.int64)}),
        lambda: rb.__setitem__("id", torch.zeros(10, dtype=torch.int64)),
        lambda: rb.__setitem__(("next", "obs"), torch.zeros(10, 4)),
        lambda: rb.__setitem__(1, {"id": torch.tensor(0)}),
        lambda: rb.__setitem__(1, new[1].exclude("obs")),
        lambda: rb.update_if_present(
            index=torch.tensor([1]), generation=generation[1:2], patch={"id": torch.tensor([0])}
        ),
    ):
        with pytest.raises(RuntimeError):  # ConfigurationError, or TorchRL's own
            change()
    assert rb[:]["id"].tolist() == rb[...]["id"].tolist() == expected
    assert rb.writer.generations_of(torch.arange(10)).tolist() == generation.tolist()
    rb.update_tensordict_priority(sampled)  # of the rows that were there before
    old = set(sampled["index"].tolist()) & {1, 2, 9}
    leaves = rb.storage.directory.tree.leaves
    np.testing.assert_allclose(leaves[:10], [9.0 if i in old else 1.0 for i in range(10)])


@pytest.mark.parametrize("kind", [ReplayBuffer, TensorDictReplayBuffer, SharedReplayBuffer])
@pytest.mark.parametrize("data", ["tensor", "object", "one row"])
def test_what_cannot_be_a_row_is_refused_before_anything_is_stored(
    folder: Path, kind, data: str
) -> None:
    rb = kind(
        storage=SharedMemmapStorage(8, scratch_dir=folder, job_id="test"),
        sampler=SharedRandomSampler(),
        writer=SharedCursorWriter(),
    )
    given = {
        "tensor": torch.zeros(3),
        "object": TensorDict({"obs": torch.zeros(3), "name": NonTensorData({1, 2})}, [3]),
        "one row": TensorDict({"obs": torch.zeros(3)}, []),
    }[data]
    with pytest.raises(ValueError):  # ConfigurationError is one, TorchRL's own class raises it
        rb.extend(given)
    with pytest.raises(
        (ValueError, AttributeError) if kind is TensorDictReplayBuffer else ValueError
    ):
        rb.add({"obs": torch.zeros(3)})
    assert rb.storage.directory.rows is None
    with pytest.raises(ConfigurationError, match="host memory, got device=cuda"):
        SharedPrioritizedSampler(8, 0.6, 0.4, device="cuda")
    SharedPrioritizedSampler(8, 0.6, 0.4, device="cpu")
    rb.extend(TensorDict({"obs": torch.zeros(3)}, [3]))
    assert len(rb) == 3
    rb.storage.close()


def test_another_row_spec_or_capacity_in_another_process_is_an_error_there(make_buffer) -> None:
    rb = make_buffer(16)
    rb.extend(make_rows(range(8)))
    folder = rb.storage.scratch_dir

    def other() -> None:
        with pytest.raises(ConfigurationError, match="missing 'obs'; unknown 'pixels'"):
            rb.extend(make_rows(range(2)).rename_key_("obs", "pixels"))
        with pytest.raises(ConfigurationError, match="is torch.float32 .4. per row, stored as"):
            rb.extend(make_rows(range(2)).float().set("id", torch.arange(2)))
        with pytest.raises(DirectoryError, match="capacity 16, asked for 32"):
            SharedMemmapStorage(32, scratch_dir=folder, job_id="test")

    _in_a_forked_process(other)
    assert rb[:]["id"].tolist() == list(range(8)) and len(rb) == 8


def test_a_forked_buffer_with_prefetched_batches_goes_on_in_both_processes(make_buffer) -> None:
    rb = make_buffer(64, kind=SharedReplayBuffer, prefetch=4)
    rb.extend(make_rows(range(32)))
    for _ in range(3):
        rb.sample()
    again = pickle.dumps(rb)

    def attach() -> None:
        mine = pickle.loads(again)  # TorchRL's prefetch threads do not survive a fork
        mine.extend(make_rows(range(100, 116)))
        for _ in range(8):
            mine.update_tensordict_priority(mine.sample().set("td_error", torch.ones(16)))

    _in_a_forked_process(attach)
    assert len(rb) == 48
    seen = {i for _ in range(20) for i in rb.sample()["id"].tolist()}
    assert seen & set(range(100, 116))


def test_a_dump_replaces_an_earlier_one_as_a_whole(make_buffer, tmp_path: Path) -> None:
    rb = make_buffer(64)
    for rows in (range(32), range(0)):
        if len(rows):
            rb.extend(make_rows(rows))
        else:
            rb.empty()
        rb.dumps(tmp_path)
        rb.extend(make_rows(range(50, 60)))
        rb.loads(tmp_path)
        assert len(rb) == len(rows) and rb[:]["id"].tolist() == list(rows)
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize("name", ["allocate", "write_json", "map_file"])
@pytest.mark.parametrize("call", [1, 2, 3])
def test_killed_while_the_directory_is_created_the_next_one_creates_it(
    folder: Path, name: str, call: int
) -> None:
    def create_and_die() -> None:
        from torchrl_dist.replay.node import directory, mapping, opening

        original: Callable = getattr(mapping, name)
        calls = 0

        def die(*args):
            nonlocal calls
            calls += 1
            if calls == call:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*args)

        for module in (directory, opening):
            setattr(module, name, die)
        storage = SharedMemmapStorage(64, scratch_dir=folder, job_id="test")
        storage.append(make_rows(range(8)))
        os._exit(0)

    process = _FORK.Process(target=create_and_die)
    process.start()
    process.join(20)
    assert process.exitcode in (-signal.SIGKILL, 0)
    storage = SharedMemmapStorage(64, scratch_dir=folder, job_id="test")
    before = len(storage)
    assert before in (0, 8)
    storage.append(make_rows(range(8, 16)))
    assert storage[:]["id"].tolist() == [*range(before), *range(8, 16)]
    storage.close()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB."""
    point = tmp_path / "disk"
    point.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(point)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("needs root and the right to mount a small tmpfs")
    yield point
    subprocess.run(["umount", "-l", str(point)], check=True)


def test_a_disk_that_fills_up_is_an_error_and_the_rows_of_others_stay(small_disk: Path) -> None:
    first = SharedMemmapStorage(64, scratch_dir=small_disk / "a", job_id="test")
    first.append(make_rows(range(8)))
    second = SharedMemmapStorage(4096, scratch_dir=small_disk / "b", job_id="test")
    big = TensorDict({"x": torch.zeros(4, 1024)}, [4])
    with pytest.raises(DirectoryError, match="16 MiB for 4096 rows"):
        second.append(big)
    assert len(second) == 0 and not (small_disk / "b" / "data").exists()
    with pytest.raises(DirectoryError, match="could not allocate the tables"):
        SharedMemmapStorage(10_000_000, scratch_dir=small_disk / "c", job_id="test")
    first.append(make_rows(range(8, 16)))
    assert first[:]["id"].tolist() == list(range(16))
    first.close()
    second.close()


def test_a_dump_that_does_not_fit_is_an_error_and_leaves_the_earlier_one(
    small_disk: Path, folder: Path
) -> None:
    storage = SharedMemmapStorage(4096, scratch_dir=folder, job_id="test")
    storage.append(TensorDict({"x": torch.ones(64, 1024)}, [64]))
    storage.dumps(small_disk / "dump")
    storage.append(TensorDict({"x": torch.ones(2048, 1024)}, [2048]))
    with pytest.raises(CheckpointError, match="No space left on device; an earlier one"):
        storage.dumps(small_disk / "dump")
    storage.loads(small_disk / "dump")
    assert len(storage) == 64
    assert len(list((small_disk / "dump").iterdir())) == 2
    storage.close()


def _write_and(fail: bool, folder: Path) -> None:
    SharedMemmapStorage(64, scratch_dir=folder, job_id="test").append(make_rows(range(8)))
    if fail:
        raise ArithmeticError("on purpose")


@pytest.mark.parametrize("fail", [False, True])
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_the_last_process_removes_the_directory_at_a_clean_end_only(
    folder: Path, method: str, fail: bool
) -> None:
    process = multiprocessing.get_context(method).Process(target=_write_and, args=(fail, folder))
    process.start()
    process.join(60)
    assert process.exitcode == int(fail)
    assert folder.exists() == fail
    if fail:  # what torchrun would restart finds the rows
        storage = SharedMemmapStorage(64, scratch_dir=folder, job_id="test")
        assert storage[:]["id"].tolist() == list(range(8))
        storage.close()
