"""Shared parts compared with TorchRL's: equal numbers, refusals, and the buffer of #1397."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import chisquare
from torchrl.data import (
    LazyTensorStorage,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    SamplerWithoutReplacement,
    SliceSampler,
    TensorDictMaxValueWriter,
    TensorDictReplayBuffer,
    TensorDictRoundRobinWriter,
)
from torchrl.data.replay_buffers import Sequence
from torchrl.data.replay_buffers.samplers import PromptGroupSampler, StalenessAwareSampler

from tests.replay.conftest import make_rows
from torchrl_dist import (
    ConfigurationError,
    SharedCursorWriter,
    SharedMemmapStorage,
    SharedPrioritizedSampler,
    SharedRandomSampler,
    SharedReplayBuffer,
)


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
def test_the_same_operations_give_the_tree_and_weights_of_torchrl(make_buffer, within) -> None:
    capacity = 40
    peer = torchrl_buffer(capacity, max_priority_within_buffer=within)
    sampler = SharedPrioritizedSampler(capacity, 0.7, 0.5, max_priority_within_buffer=within)
    ours = make_buffer(capacity, sampler=sampler)
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
    for _ in range(120):
        batch = rb.sample()
        batch["priority"] = torch.rand(32)
        rb.update_tensordict_priority(batch)
        rb.step()
    assert rb.sampler.beta == pytest.approx(1.0)
    assert rb.storage.directory.counters["unverified_updates"] == 0
    rb.storage.close()


@pytest.mark.parametrize(("reduction", "expected"), [("max", 3.0), ("min", 1.0), ("mean", 2.0)])
def test_priorities_of_several_elements_are_reduced_as_asked(
    make_buffer, reduction, expected
) -> None:
    sampler = SharedPrioritizedSampler(8, 1.0, 0.4, reduction=reduction)
    rb = make_buffer(8, sampler=sampler, batch_size=4)
    rb.extend(make_rows(range(8)))
    batch = rb.sample()
    batch["td_error"] = torch.tensor([[1.0, 2.0, 3.0]]).expand(4, 3)
    rb.update_tensordict_priority(batch)
    leaves = rb.storage.directory.tree.leaves[batch["index"]]
    np.testing.assert_allclose(leaves, expected, rtol=1e-6)


BUFFERS = pytest.mark.parametrize("kind", [TensorDictReplayBuffer, SharedReplayBuffer])


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
    """A user's writer, with TorchRL's cursor."""


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (lambda: {"sampler": None}, "RandomSampler .*the default.* sampler=SharedRandomSampler"),
        (lambda: {"writer": None}, "RoundRobinWriter .*the default.* writer=SharedCursorWriter"),
        (
            lambda: {"sampler": SamplerWithoutReplacement()},
            "build the .* sampler=SharedSamplerWithoutReplacement.* writer=SharedCursorWriter",
        ),
        (
            lambda: {"sampler": SliceSampler(slice_len=2, traj_key="id")},
            "SliceSampler .* build the buffer with sampler=SharedSliceSampler",
        ),
        (
            lambda: {"sampler": PrioritizedSampler(16, alpha=0.7, beta=0.5)},
            r"build the buffer with sampler=SharedPrioritizedSampler\(16, alpha=0.7, beta=0.5\)",
        ),
        (
            lambda: {"sampler": PrioritizedSliceSampler(16, 0.7, 0.5, slice_len=2)},
            r"sampler=SharedPrioritizedSliceSampler\(16, 0.7, 0.5, ...\)",
        ),
        (lambda: {"writer": lambda: TensorDictRoundRobinWriter()}, "RoundRobinWriter .* writer="),
        (lambda: {"writer": _OwnWriter()}, "_OwnWriter .* writer=SharedCursorWriter"),
        (
            lambda: {"writer": TensorDictMaxValueWriter(rank_key="score", reduction="max")},
            r"writer=SharedMaxValueWriter\(rank_key='score', reduction='max'\)",
        ),
        (lambda: {"sampler": StalenessAwareSampler()}, "call buffer.retire_older_than"),
        (lambda: {"sampler": PromptGroupSampler(num_groups=2)}, "rows that hold a whole group"),
        (lambda: {"writer": None, "delayed_init": True}, "RoundRobinWriter .* writer="),
        (lambda: {"consume_after_n_samples": 1}, "ConsumingSampler"),
        (lambda: {"sample_unit": Sequence(length=2)}, "build a SharedReplayBuffer"),
        (lambda: {"shared": True}, "leave shared=True out"),
        (lambda: {"dim_extend": 1}, "dim_extend=1"),
    ],
)
def test_parts_of_torchrl_are_refused_with_advice(
    folder: Path, options: Callable, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PrioritizedSampler, "_init", lambda _: None)  # its tree may not load
    storage = SharedMemmapStorage(16, scratch_dir=folder, job_id="test")
    right = {"sampler": SharedRandomSampler(), "writer": SharedCursorWriter(), "batch_size": 4}
    with pytest.raises(ConfigurationError, match=message):
        TensorDictReplayBuffer(storage=storage, **right | options()).extend(make_rows(range(4)))
    rb = TensorDictReplayBuffer(storage=storage, **right)
    rb.extend(make_rows(range(8)))
    assert len(rb.sample()) == 4
    if options().get("sampler") is not None:
        rb.set_sampler(options()["sampler"])
        with pytest.raises((RuntimeError, KeyError, AttributeError, TypeError, ValueError)):
            rb.sample()
    rb.set_writer(TensorDictRoundRobinWriter())
    with pytest.raises(ConfigurationError, match="RoundRobinWriter"):
        rb.extend(make_rows(range(8)))
    assert storage.write_count == 8
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


def _write_and(fail: bool, folder: Path) -> None:
    SharedMemmapStorage(64, scratch_dir=folder, job_id="test").append(make_rows(range(8)))
    if fail:
        raise ArithmeticError("on purpose")


@pytest.mark.parametrize("fail", [True, False])
def test_the_last_process_removes_the_directory_at_a_clean_end_only(
    folder: Path, fail: bool
) -> None:
    context = multiprocessing.get_context("fork")
    process = context.Process(target=_write_and, args=(fail, folder))
    process.start()
    process.join(60)
    assert process.exitcode == int(fail)
    assert folder.exists() == fail
    if fail:  # what torchrun would restart finds the rows
        storage = SharedMemmapStorage(64, scratch_dir=folder, job_id="test")
        assert storage[:]["id"].tolist() == list(range(8))
        storage.close()
