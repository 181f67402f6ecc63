"""Sampling without replacement over a replay directory, for all processes together.

A *pass* visits the rows that were published when it began. In a pass, all processes together draw
each row at most once. These rules also hold:

- A row that is overwritten before its turn is omitted. Rows that are written during the pass wait
  for the next pass.
- A draw begins the next pass if the current pass has no row left. A draw after ``empty`` or
  ``loads`` also begins a pass, because these methods remove all rows of the current pass.
- Rows that a process drew count as drawn even if the process dies. After ``kill -9``, up to one
  batch (and batches fetched ahead) is missing in that pass.
- The pass is stored in the directory, so a restarted job continues it. Checkpoints do not contain
  the pass.

``pass.bin`` has three counters, an order of slots, and the versions that these slots had when the
pass began. A draw stores one number, the count of entries that were drawn or omitted. The length of
a new order is stored last, because it makes the order valid. If a process is killed at any point,
it therefore leaves a valid pass.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
from torchrl.data.replay_buffers.samplers import SamplerWithoutReplacement
from torchrl.data.replay_buffers.storages import Storage

from torchrl_dist.errors import ConfigurationError
from torchrl_dist.replay.node.directory import ReplayDirectory
from torchrl_dist.replay.parts.drawn import Drawn
from torchrl_dist.replay.parts.sampler import EMPTY, SharedSampler
from torchrl_dist.replay.parts.storage import Draw, NoRowsError, SharedMemmapStorage

# the first words of pass.bin: the number of the pass, counted from 1; the number of entries of its
# order that were drawn or omitted; the length of the order
_NUMBER, _PASSED, _COUNT = range(3)
_HEAD_WORDS = 8
_LOOK_AHEAD = 256
NO_FULL_BATCH = (
    "drop_last=True, but a batch has {} rows and the buffer only {}, so there is no full batch; "
    "pass a smaller batch_size, or drop_last=False"
)
OVER = (
    "no row is left for the current loop over this buffer, because its pass over the rows has "
    "ended; sample after the loop"
)


Take = Callable[[int], tuple[np.ndarray, np.ndarray]]
"""A function ``take(count)`` that returns slots and versions of at most ``count`` rows, int64 [n]
each."""


class Passes:
    """The pass of one directory. Every method is called under the directory's lock."""

    def __init__(self, directory: ReplayDirectory) -> None:
        self._directory = directory
        table = directory.map_pass_table(8 * (_HEAD_WORDS + 2 * directory.capacity))
        self._head = table[:_HEAD_WORDS]
        self._slots, self._versions = table[_HEAD_WORDS:].reshape(2, directory.capacity)

    @property
    def number(self) -> int:
        """The number of the pass, from 1; 0 before the first pass."""
        return int(self._head[_NUMBER])

    @property
    def left(self) -> int:
        """Upper bound on the number of rows that remain in the pass. Some of these rows may have
        been overwritten."""
        return int(self._head[_COUNT] - self._head[_PASSED])

    def begin(self, order: Any, number: int | None = None) -> None:
        """Begin a pass over the rows that are published now.

        Args:
            order: a function that takes ``n`` and returns an order of ``n`` rows, int64 [n]. With
                None, rows come in the order of their slots.
            number: number of the pass. Default: the next number.
        """
        versions = self._directory.versions
        slots = np.flatnonzero((versions & 1 == 0) & (versions > 0))
        if order is not None:
            slots = slots[order(slots.size)]
        self._head[_COUNT] = 0
        self._head[_PASSED] = 0
        self._slots[: slots.size] = slots
        self._versions[: slots.size] = versions[slots]
        self._head[_NUMBER] = self.number + 1 if number is None else number
        self._head[_COUNT] = slots.size

    def take(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Return slots and versions of the pass's next ``count`` rows, int64 [n].

        If the pass has fewer rows left, return only these rows."""
        passed = max(0, int(self._head[_PASSED]))
        stop = min(int(self._head[_COUNT]), self._directory.capacity)
        parts = []
        missing = count
        while missing and passed < stop:
            part = slice(passed, min(passed + missing, stop))
            slots, versions = self._slots[part], self._versions[part]
            there = self._directory.versions[slots] == versions
            parts.append((slots[there], versions[there]))
            missing -= parts[-1][0].size
            passed = part.stop
        while passed < stop:  # skip overwritten rows, so that ``left`` is 0 if only these remain
            part = slice(passed, min(passed + _LOOK_AHEAD, stop))
            there = self._directory.versions[self._slots[part]] == self._versions[part]
            passed += int(there.argmax()) if there.any() else there.size
            if there.any():
                break
        self._head[_PASSED] = passed
        if not parts:
            return np.empty(0, np.int64), np.empty(0, np.int64)
        slots, versions = map(np.concatenate, zip(*parts, strict=True))
        return slots, versions


def draw_of_pass(directory: ReplayDirectory, passes: Passes, begin: Take) -> Draw:
    """Return the ``draw`` for ``storage.read_rows``. All rows that it draws belong to one pass.

    Args:
        begin: a function that returns slots and versions of the first rows, from the current pass
            or a new pass. It is called under the lock.
    """
    number: int | None = None

    def draw(count: int, locked: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        nonlocal number
        with nullcontext() if locked else directory.lock():
            if number is None:
                slots, versions = begin(count)
                number = passes.number
            else:  # take no row if other processes have begun the next pass
                slots, versions = passes.take(count if passes.number == number else 0)
        return slots, versions, np.ones(slots.size)

    return draw


def take_of_pass(
    storage: SharedMemmapStorage, passes: Passes, number: int, count: int, order: Any
) -> tuple[np.ndarray, np.ndarray, list[np.ndarray], int, int]:
    """Draw ``count`` rows of the pass ``number``, or fewer at its end. A host calls this function.

    If the pass has not begun in this directory yet, the call begins it, unless ``count`` is 0.

    Returns:
        Slots, generations, the stored form of the rows (``row.stacks``), the number of the current
        pass, and the number of rows left in it.
    """

    def begin(more: int) -> tuple[np.ndarray, np.ndarray]:
        if passes.number < number and more:
            passes.begin(order, number)
        return passes.take(more if passes.number == number else 0)

    directory = storage.directory
    draw = draw_of_pass(directory, passes, begin)
    slots, generation, _, columns = storage.read_rows(draw, count, stored=True)
    with directory.lock():
        return slots, generation, columns, passes.number, passes.left


class PassOverError(RuntimeError):
    """The pass of the current iteration has no row left."""


class SharedSamplerWithoutReplacement(SharedSampler, SamplerWithoutReplacement):
    """Sample uniformly without replacement, among all processes of the node.

    It replaces ``SamplerWithoutReplacement``. During a *pass*, all processes together draw each row
    at most once. A pass visits the rows that were published when it began. Rows that are
    overwritten before their turn are omitted, and rows that are written during the pass wait for
    the next pass. The next pass begins with the first sample that finds no row left, for example
    after ``empty()`` or ``loads()``. Rows that a process drew count as drawn even if the process is
    killed. The pass is stored in the replay directory, so a restarted job continues it.

    The last batch of a pass is shorter if the rows do not fill it. With a
    :class:`SharedReplayBuffer`, ``for batch in buffer`` ends with the pass in every process.
    TorchRL's buffer checks before each batch whether rows are left. If another process takes these
    rows after the check, the loop over TorchRL's buffer continues with the next pass.

    Example:
        >>> buffer = TensorDictReplayBuffer(
        ...     storage=SharedMemmapStorage(10_000, scratch_dir="/dev/shm/example"),
        ...     sampler=SharedSamplerWithoutReplacement(drop_last=True),
        ...     writer=SharedCursorWriter(),
        ...     batch_size=256,
        ... )

    Args:
        drop_last: omit the last batch of a pass if it is not full.
        shuffle: with ``False``, rows come in the order of their slots.

    Raises:
        ConfigurationError: the storage has a limiter with ``max_times_sampled``, or
            ``drop_last=True`` and the buffer holds fewer rows than a batch.
        RuntimeError: from ``sample``, if too few rows are published and none is being written. A
            sample needs one row, or with ``drop_last=True``, a full batch.
    """

    _knows_rows = True
    _not_copied = (*SharedSampler._not_copied, "_passes", "_pass")
    _no_counts = "draws each row once per pass, regardless of how often it was sampled"

    def __init__(self, drop_last: bool = False, shuffle: bool = True) -> None:
        SamplerWithoutReplacement.__init__(self, drop_last, shuffle)
        self._setup()

    def _setup(self) -> None:
        super()._setup()
        self._passes: Any = None  # a directory's Passes, or the hosts' PassSource
        self._pass: int | None = None  # the pass that this process drew from last
        self._batch_size = 1
        self._only_one = False

    @contextmanager
    def one_pass(self) -> Iterator[None]:
        """While this context is active, only the first draw may begin a pass.

        A draw that would begin the next pass raises :class:`PassOverError`."""
        self._pass, self._only_one = None, True
        try:
            yield
        finally:
            self._only_one = False

    def _bind(self, storage: SharedMemmapStorage, directory: ReplayDirectory) -> None:
        with directory.lock():
            self._passes = Passes(directory)

    def can_sample(self, storage: Storage, batch_size: int) -> bool:
        """Return whether ``sample`` would begin without a wait. Over hosts, this method asks the
        hosts, and waits for their answers."""
        can = super().can_sample(storage, batch_size)
        return can and (not self.drop_last or len(storage) >= batch_size)

    def draw(self, storage: Storage, count: int, *, stored: bool = False) -> Drawn:
        """Draw the next rows of the pass, see the base class. ``mass`` is the buffer's number of
        rows."""
        directory = self.attach(storage)
        assert isinstance(storage, SharedMemmapStorage)
        drawn = storage.once_rows_are_published(lambda: self._draw_rows(storage, count, stored))
        drawn.mass = float(directory.length)
        return drawn

    def _draw_rows(self, storage: SharedMemmapStorage, count: int, stored: bool) -> Drawn:
        """Return copies of one or more rows of the same pass."""
        directory, passes = storage.directory, self._passes
        assert passes is not None
        if count < 1:  # an empty batch belongs to no pass
            if not directory.length:
                raise NoRowsError(EMPTY)
            nothing = np.empty(count, np.int64)  # raises for a negative count
            return self._read_now(storage, lambda *_: (nothing, nothing, np.empty(0)), 0, stored)
        self._batch_size = count
        begin = functools.partial(self._begin, directory, passes)
        while True:
            draw = draw_of_pass(directory, passes, begin)
            found = self._read_now(storage, draw, count, stored)
            # Rows that were overwritten during the copy are missing. If too few rows are left, draw
            # again.
            if found.units == count or (found.units and not self.drop_last):
                return found

    def _begin(
        self, directory: ReplayDirectory, passes: Passes, count: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the first rows of a batch, from the current pass or a new pass. Called under the
        lock."""
        if not directory.length:
            raise NoRowsError(EMPTY)
        if self.drop_last and directory.length < count:
            too_few = NO_FULL_BATCH.format(count, directory.length)
            if directory.high >= count:  # enough slots are in use, but some rows are missing now
                raise NoRowsError(too_few, count)
            raise ConfigurationError(too_few)
        begun = self._only_one and self._pass is not None
        if begun and passes.number != self._pass:
            raise PassOverError(OVER)
        slots, versions = passes.take(count)
        if not slots.size or (self.drop_last and slots.size < count):
            if begun:
                raise PassOverError(OVER)
            passes.begin((lambda n: self._uniforms(n).argsort()) if self.shuffle else None)
            slots, versions = passes.take(count)
        self._pass = passes.number
        return slots, versions

    # --- iteration ---------------------------------------------------------------------------

    @property
    def ran_out(self) -> bool:
        """Return whether the pass that this process drew from last is over."""
        passes = self._passes
        if self._pass is None or passes is None:
            return False
        least = self._batch_size if self.drop_last else 1
        return passes.number != self._pass or passes.left < least

    @ran_out.setter
    def ran_out(self, value: bool) -> None:
        if not value:
            self._pass = None

    @property
    def _remaining_batches(self) -> int:
        """The number of batches that TorchRL's prefetching may draw ahead."""
        left = 0 if self._passes is None else self._passes.left
        return left // self._batch_size if self.drop_last else -(left // -self._batch_size)

    def _empty(self) -> None:
        super()._empty()
        self._pass = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}(drop_last={self.drop_last}, shuffle={self.shuffle})"
