"""C and NumPy do the same: after any operations, every shared file has the same bytes."""

from __future__ import annotations

import shutil
import tempfile
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchrl_dist.errors import ConfigurationError
from torchrl_dist.replay import RateLimiter
from torchrl_dist.replay.law import kernel as kernels
from torchrl_dist.replay.law.kernel import find_kernel
from torchrl_dist.replay.law.tree import PriorityTree
from torchrl_dist.replay.node import cursor as cursors
from torchrl_dist.replay.node.cursor import Reservation, SharedCursor, repair
from torchrl_dist.replay.node.gate import set_limiter
from torchrl_dist.replay.node.kernel import CKernel
from torchrl_dist.replay.node.opening import close_directory, open_directory
from torchrl_dist.replay.node.priorities import set_alpha, update
from torchrl_dist.replay.node.tables import Word
from torchrl_dist.replay.node.times_sampled import TooFewDrawsError, count_draws

_EPS = 2.0**-20  # sums of such numbers are exact, in whatever order they are added
_EXACT, _ROUNDED = (1.0, 0.0), (0.6, 1.3)
"""Exponents. C and NumPy may round a power differently."""

numbers = st.integers(0, 2**16)
raw = st.one_of(numbers.map(float), st.sampled_from([-1.0, np.nan, np.inf, 1e150, 1e300, 0.0]))
operations = st.lists(
    st.one_of(
        st.tuples(st.just("reserve"), numbers),
        st.tuples(st.just("publish"), numbers, st.none() | st.lists(numbers, min_size=1)),
        st.tuples(st.just("abandon"), numbers),
        st.tuples(st.just("append"), numbers),
        st.tuples(st.just("claim"), numbers, numbers),
        st.tuples(
            st.just("update"),
            st.lists(st.tuples(st.integers(-2, 2**16), raw), max_size=8),
            st.sampled_from([None, 0, 0, -1]),
        ),
        st.tuples(st.just("draw"), st.integers(0, 2**32 - 1), st.integers(0, 5)),
        st.tuples(st.just("alpha"), st.integers(0, 1)),
        st.tuples(st.just("within"), st.booleans()),
        st.tuples(st.just("empty"), st.booleans()),
        st.tuples(st.just("skip"), st.integers(0, 50)),
        st.tuples(st.just("repair"), st.just(0)),
    ),
    max_size=40,
)


class Side:
    """The C kernel or NumPy, with its own folder."""

    def __init__(
        self, kernel: str, capacity: int, exponents: tuple[float, float], times: int
    ) -> None:
        self.folder = Path(tempfile.mkdtemp(dir="/dev/shm"))
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TORCHRL_DIST_KERNEL", kernel)
            self.directory = open_directory(
                self.folder / "rb", capacity, job_id="test", keep=True, repair=repair
            )
        directory = self.directory
        assert isinstance(directory.kernel, CKernel) == (kernel == "c")
        directory.words[Word.IDENTITY] = 1
        if times:
            set_limiter(directory, RateLimiter(1, max_times_sampled=times))
        directory.words[Word.ALPHA_SET] = 1
        directory.set_float(Word.ALPHA, exponents[0])
        directory.set_float(Word.EPS, _EPS)
        self.exponents = exponents
        self.cursor = SharedCursor(directory)
        self.held: list[Reservation] = []
        self.column = np.zeros((capacity, 3))
        directory.kernel.use_columns([self.column])

    def close(self) -> None:
        close_directory(self.directory)
        shutil.rmtree(self.folder)

    def do(self, name: str, *given: Any) -> Any:
        """Return what the operation returns or raises, as plain values."""
        try:
            answer = getattr(self, f"_{name}")(*given)
        except (ConfigurationError, IndexError, ValueError, TooFewDrawsError) as error:
            return f"{type(error).__name__}: {error}"
        if isinstance(answer, tuple) and isinstance(answer[0], np.ndarray):
            return [np.asarray(each).tolist() for each in answer]
        return answer.tolist() if isinstance(answer, np.ndarray) else answer

    def files(self) -> dict[str, bytes]:
        folder = self.directory.path
        return {each.name: each.read_bytes() for each in sorted(folder.iterdir())}

    def _reserve(self, number: int) -> Any:
        with self.directory.lock():
            found = self.cursor.try_reserve(1 + number % max(1, self.directory.capacity // 8))
        if found is not None:
            self.held.append(found)
        return found and tuple(found)[:3]

    def _append(self, number: int) -> Any:
        count = 1 + number % max(1, self.directory.capacity // 8)
        values = number + np.arange(3.0 * count).reshape(count, 3)
        done = self.cursor.append([values.ctypes.data], count)
        if done is None:
            with self.directory.lock():
                found = self.cursor.try_reserve(count)
            if found is None:
                return None
            self.column[found.slots()] = values
            done = found.slots(), self.cursor.publish(found)
        return *done, self.column

    def _claim(self, start: int, number: int) -> Any:
        start %= self.directory.capacity
        count = 1 + number % min(5, self.directory.capacity - start)
        with self.directory.lock():
            found = self.cursor._try_claim_run(start, count)
        if found is not None:
            self.held.append(found)
        return found and tuple(found)[:3]

    def _publish(self, number: int, values: list[int] | None) -> Any:
        if not self.held:
            return None
        mine = self.held.pop(number % len(self.held))
        priority = None if values is None else np.resize(np.array(values, float), mine.count)
        return self.cursor.publish(mine, priority)

    def _abandon(self, number: int) -> None:
        if self.held:
            self.cursor.abandon(self.held.pop(number % len(self.held)))

    def _update(self, items: list[tuple[int, float]], generation: int | None) -> None:
        capacity = self.directory.capacity
        # beyond the ring: rarely
        slots = np.array([s if s < 0 or s % 64 == 63 else s % capacity for s, _ in items], int)
        values = np.array([value for _, value in items], float)
        meant = None
        if generation is not None:
            meant = self.directory.versions[slots % capacity] // 2 + generation
        update(self.directory, slots, values, meant)

    def _draw(self, seed: int, count: int) -> Any:
        random = np.random.default_rng(seed)
        directory = self.directory
        with directory.lock():
            slots, leaves, minimum, total = directory.tree.sample(random.random(count))
            assert total == directory.tree.total and minimum == directory.tree.minimum
            if directory.times_sampled is not None:
                count_draws(
                    directory, slots, leaves, lambda more: directory.tree.draw(random.random(more))
                )
        return slots, leaves, minimum, total

    def _alpha(self, which: int) -> None:
        with self.directory.lock():
            set_alpha(self.directory, self.exponents[which])

    def _within(self, value: bool) -> None:
        self.directory.words[Word.MAX_WITHIN] = value

    def _empty(self, counts: bool) -> None:
        cursors.empty(self.directory, reset_write_count=counts)

    def _skip(self, count: int) -> None:
        self.cursor.skip(count)

    def _repair(self, _: int) -> None:
        self.directory.words[Word.DIRTY] = 1
        with self.directory.lock():
            pass


def sides(*of: Any) -> tuple[Side, Side]:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("TORCHRL_DIST_KERNEL", raising=False)
        if find_kernel() is None:
            pytest.skip("the C kernel was not built: no compiler at installation")
    return Side("c", *of), Side("numpy", *of)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([1, 7, 40, 200, 1500]), st.booleans(), st.sampled_from([0, 0, 2]), operations
)
def test_both_leave_the_same_bytes(
    capacity: int, exact: bool, times: int, todo: list[tuple[Any, ...]]
) -> None:
    both = sides(capacity, _EXACT if exact else _ROUNDED, times)
    try:
        for operation in todo:
            if not exact and operation[0] == "draw":
                continue  # of sums that differ in the last bits
            answers = [side.do(*operation) for side in both]
            assert repr(answers[0]) == repr(answers[1]), operation
            compare(*both, exact=exact)
    finally:
        for side in both:
            side.close()


def compare(c: Side, numpy: Side, *, exact: bool) -> None:
    of_c, of_numpy = c.files(), numpy.files()
    assert of_c.keys() == of_numpy.keys() >= {"control.bin", "versions.bin", "tree.bin"}
    if not exact:
        for name in ("tree.bin", "control.bin"):
            one, other = of_c.pop(name), of_numpy.pop(name)
            kind = np.float64 if name == "tree.bin" else np.int64
            size = c.directory.capacity if name == "tree.bin" else None
            first, second = (np.frombuffer(each, kind, size or -1) for each in (one, other))
            if name == "control.bin":
                largest = [each.view(np.float64)[Word.MAX_PRIORITY] for each in (first, second)]
                np.testing.assert_allclose(*largest, rtol=1e-12)
                first, second = (np.delete(each, Word.MAX_PRIORITY) for each in (first, second))
                np.testing.assert_array_equal(first, second)
            else:
                np.testing.assert_allclose(first, second, rtol=1e-12)
    for name, content in of_c.items():
        assert content == of_numpy[name], name


def test_both_select_the_same_slots_of_a_large_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(3)
    leaves = random.integers(0, 5, 70_000).astype(float)  # sums of integers are exact
    uniforms = random.random(5000)
    answers = []
    for wanted in ("numpy", ""):
        monkeypatch.setenv("TORCHRL_DIST_KERNEL", wanted)
        tree = PriorityTree(70_000)
        tree.set_range(0, 70_000, leaves)
        tree.refresh()
        tree.set(np.arange(100, 40_000, 77), 9.0)
        answers.append((*tree.sample(uniforms), *tree.draw(uniforms)))
    for one, other in zip(*answers, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.skipif(not kernels._PATH.exists(), reason="the C kernel was not built")
def test_a_kernel_of_another_version_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    functions = kernels._FUNCTIONS | {"of_tomorrow": (None, "p")}
    monkeypatch.setattr(kernels, "_FUNCTIONS", functions)
    with pytest.raises(ConfigurationError, match="another version .* reinstall"):
        kernels._library.__wrapped__()


@pytest.mark.skipif(find_kernel() is None, reason="the C kernel was not built")
def test_the_memory_to_which_rows_are_copied_stays_mapped(tmp_path: Path) -> None:
    directory = open_directory(tmp_path / "rb", 64, repair=repair, job_id="test")
    columns = [np.zeros((64, 3))]
    directory.kernel.use_columns(columns)
    column = weakref.ref(columns[0])
    del columns  # as when another thread has mapped the rows, too, and the directory keeps those
    assert column() is not None
    close_directory(directory)


@pytest.mark.skipif(find_kernel() is None, reason="the C kernel was not built")
def test_rows_of_no_bytes_take_no_bytes_whatever_their_strides(tmp_path: Path) -> None:
    directory = open_directory(tmp_path / "rb", 64, repair=repair, job_id="test")
    cursor, memory, values = SharedCursor(directory), np.zeros(64), np.ones(4)
    directory.kernel.use_columns([np.lib.stride_tricks.as_strided(memory[:0], (64, 0), (8, 8))])
    cursor.abandon(cursor.reserve(1))  # the first claim is not in C
    assert cursor.append([values.ctypes.data], 4) is not None
    assert not memory.any()
    close_directory(directory)
