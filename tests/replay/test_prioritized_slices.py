"""Prioritized slices: the law of their first rows, weights, and priorities that find their rows."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from scipy.stats import chisquare
from torchrl.data import (
    TensorDictReplayBuffer,
)

from tests.replay.test_slices import assert_slices, trajectory
from torchrl_dist import (
    ConfigurationError,
    SharedPrioritizedSliceSampler,
)

LENGTHS = (7, 3, 12, 1, 9)  # 32 rows
ALPHA, BETA = 0.7, 0.5


@pytest.fixture
def make(make_buffer) -> Callable[..., TensorDictReplayBuffer]:
    def make(capacity: int = 64, *, batch_size: int = 4000, **options) -> TensorDictReplayBuffer:
        sampler = SharedPrioritizedSliceSampler(capacity, ALPHA, BETA, **options)
        return make_buffer(capacity, sampler=sampler, batch_size=batch_size)

    return make


def fill(buffer: TensorDictReplayBuffer) -> np.ndarray:
    """Write trajectories of several lengths. Return the rows' priorities."""
    for number, length in enumerate(LENGTHS):
        buffer.extend(trajectory(number, range(length)))
    priority = torch.linspace(0.1, 3.0, sum(LENGTHS))[torch.randperm(sum(LENGTHS))]
    buffer.update_priority(torch.arange(sum(LENGTHS)), priority)
    return priority.double().numpy()


def left_in_run() -> np.ndarray:
    return np.concatenate([np.arange(length, 0, -1) for length in LENGTHS])


@pytest.mark.parametrize(
    ("options", "wanted", "any_first"),
    [
        ({}, 4, False),
        ({"span": (False, 2)}, 2, False),
        ({"span": (False, True)}, 2, False),
        ({"strict_length": False}, 4, True),
        ({"fragmented": True}, 4, False),
    ],
)
def test_first_rows_follow_the_priorities_of_rows_that_may_begin_a_slice(
    make, options, wanted: int, any_first: bool
) -> None:
    rb = make(slice_len=4, traj_key=("collector", "traj_ids"), **options)
    leaf = (fill(rb) + 1e-8) ** ALPHA
    left = left_in_run()
    allowed = (left >= wanted) | (any_first & np.isin(np.arange(32), np.cumsum((0, *LENGTHS[:-1]))))
    batch = rb.sample()
    first = np.concatenate([[0], np.flatnonzero(batch["next", "truncated"].squeeze(-1)) + 1])
    first = first[first < len(batch)]
    slots = batch["index"].reshape(-1).numpy()
    counts = np.bincount(slots[first], minlength=32)
    assert counts[~allowed].sum() == 0 and counts.sum() == 1000
    expected = np.where(allowed, leaf, 0) / leaf[allowed].sum() * 1000
    assert chisquare(counts[allowed], expected[allowed]).pvalue > 1e-5
    # slices are consecutive rows, as long as their run allows; all have the weight of the first
    lengths = np.diff(np.append(first, len(batch)))
    assert (lengths == np.minimum(left[slots[first]], 4)).all()
    assert (slots == np.repeat(slots[first] - first, lengths) + np.arange(len(batch))).all()
    weights = np.repeat((leaf[slots[first]] / leaf.min()) ** -BETA, lengths)
    np.testing.assert_allclose(batch["priority_weight"].numpy(), weights, rtol=1e-5)


def test_one_row_in_a_thousand_that_may_begin_a_slice_is_found(make) -> None:
    rb = make(4096, batch_size=64, slice_len=8, traj_key=("collector", "traj_ids"))
    for start in range(0, 4000, 400):  # singles, of which no slice can begin
        single = trajectory(0, range(400))
        single["collector", "traj_ids"] = torch.arange(start, start + 400) + 10
        rb.extend(single)
    with pytest.raises(RuntimeError, match="Did not find 8 consecutive rows"):
        rb.sample()
    rb.extend(trajectory(1, range(8)))
    batch = rb.sample()
    assert_slices(batch, 8)
    assert (batch["collector", "traj_ids"] == 1).all()
    assert not rb.sample()["is_init"].reshape(-1, 8)[:, 1:].any()


def test_impossible_options_are_refused_and_a_span_to_the_left_is_turned_off(make) -> None:
    with pytest.raises(ConfigurationError, match="pad_output"):
        SharedPrioritizedSliceSampler(
            8, 1.0, 1.0, slice_len=2, traj_key="episode", pad_output=True, strict_length=False
        )
    with pytest.warns(UserWarning, match="turns off the span to the left"):
        sampler = SharedPrioritizedSliceSampler(8, 1.0, 1.0, slice_len=2, span=True)
    assert sampler.span == (False, True)
    with pytest.raises(ConfigurationError, match="alpha and beta"):
        SharedPrioritizedSliceSampler(8, -1.0, 1.0, slice_len=2)
    with pytest.raises(ConfigurationError, match="capacity 8, but its storage has 64"):
        rb = make(64, slice_len=2)
        rb.set_sampler(SharedPrioritizedSliceSampler(8, ALPHA, BETA, slice_len=2))
        rb.extend(trajectory(0, range(4)))
        rb.sample(4)
