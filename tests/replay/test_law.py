"""Rows are drawn by the law of the paper, whatever several processes did before.

Chi-square tests have a false alarm rate of 1e-7. They use enough draws to find a bias of 2.5 % for
half of the rows, and each test shows this on its draws.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats
from torchrl.data import TensorDictReplayBuffer

from tests.replay.faults import (
    LONG,
    assert_sound,
    attach,
    end_of,
    forked,
    priority_of,
    rows_of,
    run_forked,
)

_CAPACITY = 200
_BETA = 0.4
_DRAWS = 20_000_000 if LONG else 1_000_000
_BATCH = 50_000
_ALARM = 1e-7
_BIAS = 0.025


def p_value(counts: np.ndarray, law: np.ndarray) -> float:
    """The p-value of a chi-square test of the counts; slots without mass must be empty."""
    possible = law > 0
    assert counts[~possible].sum() == 0
    expected = law[possible] / law[possible].sum() * counts.sum()
    return float(stats.chisquare(counts[possible], expected).pvalue)


def assert_law(counts: np.ndarray, law: np.ndarray) -> None:
    assert p_value(counts, law) > _ALARM
    biased = law * np.where(np.arange(law.size) % 2, 1 + _BIAS, 1 - _BIAS)
    assert p_value(counts, biased) < _ALARM  # else the draws were too few to tell


def draw_counts(rb: TensorDictReplayBuffer, draws: int = _DRAWS) -> np.ndarray:
    counts = np.zeros(rb.storage.max_size, dtype=np.int64)
    for _ in range(draws // _BATCH):
        index, _ = rb.sampler.sample(rb.storage, _BATCH)
        counts += np.bincount(index.numpy(), minlength=counts.size)
    return counts


def disturb(folder: Path, alpha: float, first: int) -> None:
    """Extend over several laps, and set priorities of written, drawn and overwritten rows."""
    rb = attach(folder, _CAPACITY, alpha=alpha)
    randomness = random.Random(first)
    late = []
    for at in range(first, first + 1000, 20):
        index = rb.extend(rows_of(range(at, at + 20)))
        if randomness.random() < 0.5:
            rb.update_priority(index, priority_of(torch.arange(at, at + 20)) * 2)
        batch = rb.sample()
        batch["td_error"] = torch.rand(64, dtype=torch.float64) * 20
        rb.update_tensordict_priority(batch)
        late.append(rb.sample())
        stale = late.pop(randomness.randrange(len(late)))
        stale["td_error"] = torch.full((64,), 15.0)
        rb.update_tensordict_priority(stale)


def settle(folder: Path, alpha: float, part: int) -> None:
    """Give the slots of one part their final priorities, in several steps."""
    rb = attach(folder, _CAPACITY, alpha=alpha)
    slots = torch.arange(_CAPACITY)[part::3]
    for _ in range(20):
        some = slots[torch.randperm(slots.numel())[:20]]
        rb.update_priority(some, torch.rand(20, dtype=torch.float64) * 30)
    rb.update_priority(slots, priority_of(rb[slots]["key"]))


def run_together(function: Callable[..., None], calls: list[tuple]) -> None:
    with contextlib.ExitStack() as stack:
        for pid in [stack.enter_context(forked(function, *arguments)) for arguments in calls]:
            assert end_of(pid, 100) == 0


@pytest.mark.parametrize("alpha", [0.0, 0.6])
def test_the_law_holds_after_what_several_processes_did(folder: Path, alpha: float) -> None:
    """The measuring process never wrote a row or a priority."""
    torch.set_num_threads(1)
    rb = attach(folder, _CAPACITY, alpha=alpha)
    run_together(disturb, [(folder, alpha, 10_000 * k) for k in range(4)])
    assert rb.write_count == 4000 and len(rb) == _CAPACITY
    assert rb.storage.directory.counters["stale_updates"] > 0
    # whatever the leaves are now, draws follow them
    assert_sound(rb)
    run_together(settle, [(folder, alpha, part) for part in range(3)])
    law = (priority_of(rb[:]["key"]).numpy() + 1e-8) ** alpha
    np.testing.assert_allclose(rb.storage.directory.tree.leaves, law, rtol=1e-12)
    assert_law(draw_counts(rb), law)
    assert rb.storage.directory.tree.minimum == pytest.approx(law.min(), rel=1e-12)
    batch = rb.sample()
    weight = (law[batch["index"].numpy()] / law.min()) ** -_BETA
    np.testing.assert_allclose(batch["priority_weight"].numpy(), weight, rtol=1e-6)
    assert (batch["key"] == rb[batch["index"]]["key"]).all()
    rb.storage.close()


def test_rows_that_are_being_written_are_not_drawn_and_the_others_by_the_law(
    folder: Path,
) -> None:
    torch.set_num_threads(1)
    rb = attach(folder, _CAPACITY)
    rb.extend(rows_of(range(_CAPACITY)))
    rb.update_priority(torch.arange(_CAPACITY), priority_of(torch.arange(_CAPACITY)))
    claimed = rb.storage._cursor.reserve(20), rb.storage._cursor.reserve(25)
    hidden = np.concatenate([reservation.slots() for reservation in claimed])
    law = (priority_of(torch.arange(_CAPACITY)).numpy() + 1e-8) ** 0.6
    law[hidden] = 0
    assert_law(draw_counts(rb), law)
    uniform = attach(folder, _CAPACITY, uniform=True)
    assert_law(draw_counts(uniform), (law > 0).astype(float))
    # nearly all of them: what is left is still drawn uniformly
    claimed += tuple(rb.storage._cursor.reserve(25) for _ in range(6))
    left = np.ones(_CAPACITY)
    left[np.concatenate([reservation.slots() for reservation in claimed])] = 0
    assert left.sum() == 5
    counts = draw_counts(uniform, 10 * _BATCH)
    assert p_value(counts, left) > _ALARM
    for reservation in claimed:
        rb.storage._cursor.abandon(reservation)
    rb.storage.close()


def test_a_part_filled_ring_is_drawn_uniformly_up_to_its_end(folder: Path) -> None:
    torch.set_num_threads(1)
    rb = attach(folder, _CAPACITY, uniform=True)
    rb.extend(rows_of(range(130)))
    assert_law(draw_counts(rb), (np.arange(_CAPACITY) < 130).astype(float))
    rb.storage.close()


@pytest.mark.parametrize("uniform", [False, True])
def test_draws_are_repeated_by_a_generator_only_and_never_by_seeds_of_the_process(
    folder: Path, uniform: bool
) -> None:
    rb = attach(folder, _CAPACITY, uniform=uniform)
    rb.extend(rows_of(range(_CAPACITY)))

    def draw() -> torch.Tensor:
        torch.manual_seed(0)
        np.random.seed(0)
        random.seed(0)
        return rb.sample()["index"]

    assert not (draw() == draw()).all()

    def differs(index: torch.Tensor) -> None:
        assert not (draw() == index).all()

    assert run_forked(differs, draw()) == 0
    batches = []
    for _ in range(2):
        rb.set_rng(torch.Generator().manual_seed(7))
        batches.append(torch.cat([draw(), draw()]))
    assert (batches[0] == batches[1]).all()
    assert not (batches[0][:64] == batches[0][64:]).all()
    rb.storage.close()
