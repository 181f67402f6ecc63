"""The tree, with C or NumPy, whichever is used. ``test_kernel`` shows that both do the same."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchrl_dist.errors import ConfigurationError
from torchrl_dist.replay.law.tree import FANOUT, PriorityTree, tree_bytes


def brute_force(tree: PriorityTree) -> tuple[float, float]:
    positive = tree.leaves[tree.leaves > 0]
    return tree.leaves.sum(), positive.min() if positive.size else np.inf


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 40_000), st.integers(0, 2**32 - 1))
def test_sum_and_minimum_equal_the_leaves_after_any_writes(capacity: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    tree = PriorityTree(capacity)
    for _ in range(6):
        if random.random() < 0.5:
            slots = random.integers(0, capacity, random.integers(1, 50))
            tree.set(slots, random.random(slots.size) * (random.random(slots.size) < 0.8))
        else:
            start = int(random.integers(0, capacity))
            stop = int(random.integers(start, capacity)) + 1
            tree.set_range(start, stop, float(random.random() * (random.random() < 0.7)))
        if random.random() < 0.7:
            tree.refresh()
    tree.refresh()
    total, minimum = brute_force(tree)
    assert tree.total == pytest.approx(total, rel=1e-12)
    assert tree.minimum == minimum


@pytest.mark.parametrize("capacity", [1, 31, 32, 33, 1000, 33_000, 1_100_000])
def test_quantiles_select_the_slot_that_a_cumulative_sum_selects(capacity: int) -> None:
    random = np.random.default_rng(0)
    tree = PriorityTree(capacity)
    tree.set_range(0, capacity, random.integers(0, 4, capacity).astype(float))
    tree.set(np.array([capacity - 1]), 1.0)
    tree.refresh()
    uniforms = random.random(2000)
    slots, leaves = tree.draw(uniforms)
    cumulative = np.cumsum(tree.leaves)
    expected = np.searchsorted(cumulative, uniforms * cumulative[-1], side="right")
    # values are small integers, so the sums are exact; the scaled quantile may round either way
    assert (slots == expected).mean() > 0.999
    assert (leaves > 0).all()
    assert (leaves == tree.leaves[slots]).all()


def test_a_process_killed_between_mark_and_leaf_leaves_a_tree_that_repairs_itself() -> None:
    buffer = bytearray(tree_bytes(5000))
    tree = PriorityTree(5000, buffer)
    tree.set_range(0, 5000, 1.0)
    tree.refresh()

    class Deadly(np.ndarray):
        """Stores half of the data, and then the process dies."""

        def __setitem__(self, slots: np.ndarray, values: float) -> None:
            super().__setitem__(slots[: slots.size // 2], values)
            raise KeyboardInterrupt

    tree.leaves = tree.leaves.view(Deadly)
    with pytest.raises(KeyboardInterrupt):
        tree.set(np.arange(320, 340), 3.0)
    survivor = PriorityTree(5000, buffer)
    survivor.refresh()
    assert survivor.total == survivor.leaves.sum() == 5000 + 20


def test_drawing_from_an_empty_tree_is_an_error() -> None:
    tree = PriorityTree(FANOUT)
    with pytest.raises(ValueError, match="no rows to draw"):
        tree.draw(np.array([0.5]))
    with pytest.raises(ValueError, match="capacity"):
        PriorityTree(0)


def test_a_kernel_that_cannot_be_had_is_an_error(monkeypatch) -> None:
    monkeypatch.setenv("TORCHRL_DIST_KERNEL", "fortran")
    with pytest.raises(ConfigurationError, match="'fortran'"):
        PriorityTree(10)
