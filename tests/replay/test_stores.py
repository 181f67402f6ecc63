"""kill -9 between any two stores of a change of several words: all of it is done, or nothing.

Every instruction that writes to the shared tables counts as a store, see ``faults.Stores``.
"""

from __future__ import annotations

import platform
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from torchrl.data import TensorDictReplayBuffer

from tests.replay.faults import (
    Stores,
    assert_lock_is_free,
    attach,
    priority_of,
    published,
    rows_of,
    run_forked,
    torn_rows,
)
from torchrl_dist.replay import RateLimiter
from torchrl_dist.replay.node.kernel import CKernel
from torchrl_dist.replay.node.priorities import default_leaf
from torchrl_dist.replay.node.tables import CLAIM_COUNT, CLAIM_MEMBER, Word
from torchrl_dist.replay.node.times_sampled import exhausted, give_back

pytestmark = pytest.mark.skipif(
    platform.machine() not in ("x86_64", "AMD64"), reason="single steps of an x86-64 processor"
)
_CAPACITY = 24
_NEW = 10**6
_ALPHA, _EPS = 0.5, 1e-8
_LIMITER = RateLimiter(4, samples_per_insert=2.0, error_buffer=200.0)
_TWICE = RateLimiter(4, samples_per_insert=2.0, error_buffer=200.0, max_times_sampled=2)


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Stores:
    return Stores(tmp_path_factory.mktemp("stores"))


@dataclass
class State:
    """A buffer as every process sees it. It is read under the lock, which repairs it first."""

    versions: np.ndarray
    visible: np.ndarray
    keys: np.ndarray
    leaves: np.ndarray
    alpha: float
    largest: float
    write_count: int
    inserts: int
    samples: int
    high: int

    @classmethod
    def of(cls, rb: TensorDictReplayBuffer) -> State:
        directory = rb.storage.directory
        words = directory.words
        with directory.lock():
            if directory.gate is not None:
                directory.gate._forget_unreturned()
            assert not any(words[w] for w in (Word.RESCALING, Word.EMPTYING, Word.JOURNAL))
            return cls(
                directory.versions.copy(),
                published(directory),
                rb.storage._storage["key"].numpy().copy(),
                directory.tree.leaves.copy(),
                directory.get_float(Word.ALPHA),
                directory.get_float(Word.MAX_PRIORITY),
                words[Word.WRITE_COUNT],
                words[Word.WRITE_COUNT] - words[Word.INSERT_BASE],
                words[Word.SAMPLED],
                directory.high,
            )


def assert_sound(rb: TensorDictReplayBuffer) -> None:
    """Check the invariants of ``directory``."""
    directory = rb.storage.directory
    assert_lock_is_free(directory)
    with directory.lock():
        visible, tree = published(directory), directory.tree
        available = visible.copy()
        if directory.times_sampled is not None:
            available &= ~exhausted(directory, slice(None))
        assert directory.words[Word.AVAILABLE] == available.sum()
        assert ((tree.leaves > 0) == available).all() and (tree.leaves >= 0).all()
        assert directory.length == visible.sum()
        tree.refresh()
        np.testing.assert_allclose(tree.total, tree.leaves.sum(), rtol=1e-12)
        if available.any():  # a new row is drawn as soon as the most important one that is there
            assert default_leaf(directory) >= tree.leaves.max() * (1 - 1e-9)
        claimed = directory.claims[directory.claims[:, CLAIM_COUNT] > 0]
        assert not any(map(directory.is_alive, claimed[:, CLAIM_MEMBER].tolist()))
    if visible.any():
        assert torn_rows(rb.storage.get(torch.from_numpy(np.flatnonzero(visible)))) == 0


# --- changes -------------------------------------------------------------------------------------

Check = Callable[[State, State], None]


def same_rows(before: State, after: State) -> bool:
    kept = after.visible & (after.versions == before.versions)
    return bool((after.keys[kept] == before.keys[kept]).all())


def untouched(before: State, after: State) -> bool:
    """Return whether no row changed. Rows in slots that the killed process reserved may be gone."""
    new = after.visible & (after.versions != before.versions)
    return (
        not new.any()
        and same_rows(before, after)
        and (after.leaves[after.visible] == before.leaves[after.visible]).all()
        and (after.alpha, after.write_count) == (before.alpha, before.write_count)
        and (after.inserts, after.samples) == (before.inserts, before.samples)
    )


def check_written(before: State, after: State, sizes: list[int], leaf: Callable | None) -> None:
    """Check that the first reservations, of these sizes, were written, and no other row changed."""
    new = after.visible & (after.versions != before.versions)
    written = np.sort(after.keys[new]) - _NEW
    whole = np.concatenate([[0], np.cumsum(sizes)])
    assert written.size in whole and (written == np.arange(written.size)).all()
    assert same_rows(before, after)
    assert after.write_count - before.write_count == written.size
    assert after.inserts - before.inserts == written.size and after.samples == before.samples
    kept = after.visible & ~new
    assert (after.leaves[kept] == before.leaves[kept]).all()
    if leaf is not None:
        np.testing.assert_allclose(after.leaves[new], leaf(after.keys[new]), rtol=1e-12)
    assert len(set(after.leaves[new])) <= 1 or leaf is not None


def power(raw: np.ndarray) -> np.ndarray:
    return (np.asarray(raw, dtype=np.float64) + _EPS) ** _ALPHA


def extend_prioritized(rb: TensorDictReplayBuffer) -> None:
    priority = priority_of(torch.arange(_NEW, _NEW + 5)).numpy() * 3
    rb.writer.extend(rows_of(range(_NEW, _NEW + 5)), priority=priority)


_PRIORITY = 50.0


def update(rb: TensorDictReplayBuffer) -> None:
    rb.update_priority(torch.arange(4, 9), torch.full((5,), _PRIORITY, dtype=torch.float64))


def check_update(before: State, after: State) -> None:
    old, new = after.leaves == before.leaves, np.isclose(after.leaves, power(_PRIORITY), rtol=1e-12)
    assert (old | (new & (np.arange(_CAPACITY) >= 4) & (np.arange(_CAPACITY) < 9))).all()
    assert (after.versions == before.versions).all()


def set_alpha(rb: TensorDictReplayBuffer) -> None:
    rb.sampler.alpha = 1.25


def check_alpha(before: State, after: State) -> None:
    assert after.alpha in (_ALPHA, 1.25)
    wanted = before.leaves ** (after.alpha / _ALPHA)
    np.testing.assert_allclose(after.leaves, wanted, rtol=1e-12)
    assert (after.versions == before.versions).all() and after.largest == before.largest


def check_empty(before: State, after: State) -> None:
    if after.visible.all():
        assert untouched(before, after) and after.largest == before.largest
        return
    assert not after.visible.any()
    assert (after.write_count, after.inserts, after.samples, after.high) == (0, 0, 0, 0)
    assert np.isnan(after.largest)


def check_sample(before: State, after: State) -> None:
    assert untouched(before, after)
    assert (after.visible == before.visible).all()


def check_restored(before: State, after: State) -> None:
    """Check that a part of the rows was restored unchanged, or that the buffer was only emptied."""
    assert set(after.keys[after.visible]) <= set(before.keys)
    leaf = dict(zip(before.keys.tolist(), before.leaves.tolist(), strict=True))
    for key, found in zip(after.keys[after.visible], after.leaves[after.visible], strict=True):
        assert found == pytest.approx(leaf[int(key)], rel=1e-12)
    assert after.inserts in (0, before.inserts) and after.samples in (0, before.samples)


def draw_and_give_back(rb: TensorDictReplayBuffer) -> None:
    directory = rb.storage.directory
    slots = np.arange(8)
    draw = directory.tree.leaves[slots].copy()
    give_back(directory, slots, directory.versions[slots] // 2, np.where(draw > 0, draw, _GIVEN))


_GIVEN = 0.75


def check_give_back(before: State, after: State) -> None:
    assert ((after.leaves == before.leaves) | (after.leaves == _GIVEN)).all()
    assert (after.visible == before.visible).all() and after.samples == before.samples


def check_skip(before: State, after: State) -> None:
    assert (after.inserts, after.samples) == (before.inserts, before.samples)
    assert after.write_count in (before.write_count, before.write_count + 30)
    assert (after.versions == before.versions).all()


IN_PLACE = torch.tensor([1, 2, 3, 9, 17, 23])

CHANGES: dict[str, tuple[RateLimiter | None, Callable, Check]] = {
    "extend": (
        _LIMITER,
        lambda rb: rb.storage.append(rows_of(range(_NEW, _NEW + 5))),
        lambda before, after: check_written(before, after, [3, 2], None),
    ),
    "extend a few rows": (  # C does this in one call
        None,
        lambda rb: [rb.storage.append(rows_of(range(n, n + 2))) for n in (_NEW, _NEW + 2)],
        lambda before, after: check_written(before, after, [2, 2], None),
    ),
    "extend with priorities": (
        None,
        extend_prioritized,
        lambda before, after: check_written(
            before, after, [3, 2], lambda keys: power(priority_of(torch.from_numpy(keys)) * 3)
        ),
    ),
    "write in place": (
        None,
        lambda rb: rb.storage.set(IN_PLACE, rows_of(range(_NEW, _NEW + 6))),
        lambda before, after: check_written(before, after, [3, 1, 1, 1], None),
    ),
    "update": (None, update, check_update),
    "alpha": (None, set_alpha, check_alpha),
    "empty": (_LIMITER, lambda rb: rb.empty(), check_empty),
    "limited sample": (_LIMITER, lambda rb: rb.sampler.sample(rb.storage, 4), check_sample),
    "skip": (
        _LIMITER,
        lambda rb: rb.storage._cursor.skip(30),
        check_skip,
    ),
    "restore": (
        _LIMITER,
        lambda rb: rb.storage.restore(rb.storage.snapshot()),
        check_restored,
    ),
    "give back": (_TWICE, draw_and_give_back, check_give_back),
}


_OF_ROWS = ["extend", "extend with priorities", "write in place", "restore"]
_IN_C = [*_OF_ROWS[:3], "extend a few rows", "update", "limited sample"]
_KEPT = [("as_rows", change) for change in CHANGES] + [("as_frames", change) for change in _OF_ROWS]


def build(folder: Path, limiter: RateLimiter | None) -> TensorDictReplayBuffer:
    return attach(folder, _CAPACITY, alpha=_ALPHA, limiter=limiter, batch_size=4, timeout_s=10)


def refill(rb: TensorDictReplayBuffer) -> None:
    """Write the same rows, priorities and counts each time."""
    directory = rb.storage.directory
    rb.sampler.alpha = _ALPHA
    if directory.words[Word.WRITE_COUNT]:
        rb.empty()
    index, _ = rb.storage.append(rows_of(range(_CAPACITY)))
    rb.sampler.update_priority(index, priority_of(torch.arange(_CAPACITY)))
    if directory.times_sampled is not None:
        for _ in range(7):
            rb.sampler.sample(rb.storage, 4)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "kept_as, kernel, change",
    [(kept, "numpy", change) for kept, change in _KEPT]
    + [(kept, "c", change) for kept, change in _KEPT if change in _IN_C],
    indirect=["kept_as"],
)
def test_killed_between_any_two_stores(
    folder: Path, stores: Stores, kept_as: str, kernel: str, change: str, monkeypatch, request
) -> None:
    torch.set_num_threads(1)
    monkeypatch.setenv("TORCHRL_DIST_KERNEL", kernel)
    limiter, make, check = CHANGES[change]
    rb = build(folder, limiter)
    directory = rb.storage.directory
    assert isinstance(directory.kernel, CKernel) == (kernel == "c")

    def victim(store: int) -> None:
        with directory.lock():
            pass  # joins
        stores.watch(directory)
        with stores.dying_at(store):
            make(rb)

    store = 0
    while True:
        store += 1
        refill(rb)
        before = State.of(rb)
        status = run_forked(victim, store, timeout_s=20)
        assert status in (0, -signal.SIGKILL)
        after = State.of(rb)
        if status == 0 and change == "limited sample":
            assert after.samples == before.samples + 4  # it was returned
            break
        try:
            check(before, after)
            assert_sound(rb)
        except AssertionError as error:
            raise AssertionError(f"killed at store {store}: {error}") from error
        if status == 0:
            break
    assert store > 3
    request.node.user_properties.append(("stores", store - 1))
    rb.storage.close()
