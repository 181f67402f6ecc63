"""Store each frame once, in a second ring of the replay directory. Rows refer to frames.

Without this ring, a frame would be stored up to eight times if each row has a stack of four frames
and the stack of the next step. For the keys that ``frames=`` names, the directory has two more
kinds of files, and a row holds numbers that name frames, instead of the frames' bytes::

    data/frames=.bin          int64 [MAX_CLAIMS + capacity]: starts of claims, marks of slots
    data/frames=DIGEST.bin    a ring of frames, [size, ...], one per key; the key and
                              ("next", key) share it

A frame has a *ticket*: its number, counted from the first frame ever reserved. The frame lies in
the *cell* ``ticket % size`` of its ring. A ticket reserves its cell in every ring. The *cursor*,
``Word.FRAME_CURSOR``, is the next ticket. A write

1. looks for its frames among those that this process wrote recently, by comparing bytes. Two frames
   are the same only if their bytes are equal, so a sample returns what was written, regardless of
   the wrapper that built the stacks;
2. reserves slots and, under the same lock, tickets for the frames that it did not find;
3. copies these frames, then the rows, and publishes the rows.

Invariants at every instant:

- The slot of a row has a *mark*: the oldest ticket that the row refers to. When the row was
  written, its mark was at most :func:`window_of` tickets before the cursor.
- If the cell of a new ticket holds a frame that a published row refers to, the writer unpublishes
  that row before it reserves the ticket. So if a row's version is the same after a reader's copy,
  the frames did not change during the copy.
- A claim has a *start*: the oldest ticket that its rows refer to. While the claim exists, frames
  with this ticket or a later one stay in their cells. A writer that needs such a cell waits.

Two alternatives were rejected. Taking frames from neighbouring slots (Dopamine) requires a single
writer of whole episodes. Storing a stream in chunks, and keeping each chunk until its last row is
gone (Reverb), requires a count of references, and a killed process would leave a wrong count.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from torchrl_dist.errors import ConfigurationError
from torchrl_dist.replay.law.kernel import address, find_copier
from torchrl_dist.replay.node.files import FRAMES_OF_CLAIMS
from torchrl_dist.replay.node.mapping import map_file
from torchrl_dist.replay.node.tables import CLAIM_COUNT, MAX_CLAIMS, Word
from torchrl_dist.replay.row.spec import ColumnSpec, RowSpec, ring_file
from torchrl_dist.tensors import array_of

if TYPE_CHECKING:
    from torchrl_dist.replay.node.kernel import NumpyKernel

_SPARE = 0.07  # extra frames per row, because an episode has more frames than rows
_WINDOW = 32  # the window is the number of rows divided by this
_FEW = 4096  # minimum size of window and ring, in frames, unless the buffer never needs that many
_MOST_KNOWN = 2**17
_DROPPED_AT_ONCE = 256  # each drop frees the needed cells, and 1/256 of the ring more
_MOST_FRAMES = 2**31 - 1  # rows store cells as int32
_NEVER = 2**61  # larger than any ticket

Gather = Callable[[Sequence[np.ndarray], np.ndarray], list[np.ndarray]]


class StalePlanError(Exception):
    """Other processes wrote so many frames that a :class:`Plan` is outdated and must be made
    again."""


def frames_in(spec: RowSpec) -> int:
    """Return the number of frames that a row refers to."""
    return sum(column.stack for column in spec.columns)


def window_of(capacity: int) -> int:
    """Return how many tickets the mark of a new row may be behind the cursor."""
    return max(capacity // _WINDOW, min(4 * capacity, _FEW))


def ring_size(capacity: int, spec: RowSpec) -> int:
    """Return the number of frames of each ring."""
    few = min(frames_in(spec) * capacity, _FEW)
    return max(math.ceil((1 + _SPARE) * capacity), few) + window_of(capacity)


def largest_write(capacity: int, spec: RowSpec) -> int:
    """Return the largest number of rows that one reservation may have.

    The frames of these rows fit into the ring even if all frames differ.
    """
    return max(1, (ring_size(capacity, spec) - window_of(capacity)) // frames_in(spec))


def file_sizes(capacity: int, spec: RowSpec) -> dict[str, int]:
    """Return the size in bytes of each file in ``data`` that a directory needs for frames.

    Raises:
        ConfigurationError: a ring would have too many frames.
    """
    if not frames_in(spec):
        return {}
    size = ring_size(capacity, spec)
    if size > _MOST_FRAMES:
        raise ConfigurationError(
            f"with frames=, a buffer of {capacity} rows needs room for {size} frames, but can have "
            f"room for at most {_MOST_FRAMES}; use a smaller max_size, or several hosts"
        )
    sizes = {FRAMES_OF_CLAIMS: 8 * (MAX_CLAIMS + capacity)}
    for column in spec.columns:
        if column.stack:
            sizes[ring_file(column.ring)] = size * column.frame_bytes
    return sizes


def with_stacks(spec: RowSpec, stacks: Mapping[tuple[str, ...], int]) -> RowSpec:
    """Return the spec in which the values of each key in ``stacks`` are stacks of ``stacks[key]``
    frames.

    Raises:
        ConfigurationError: the rows have a batch size, lack a key of ``stacks``, or hold values of
            this key that are not stacks of that many frames.
    """
    if stacks and spec.batch_dims:
        shape = ", ".join(map(str, ("n", *spec.batch_dims)))
        raise ConfigurationError(
            f"frames={shown(stacks)}: the written data have batch size [{shape}], expected [n]; "
            "write data.reshape(-1), or leave frames= out"
        )
    columns = []
    found: dict[tuple[str, ...], ColumnSpec] = {}
    for column in spec.columns:
        stack = stacks.get(column.ring, 0)
        if column.stack and not stack:
            # a checkpoint's spec may have a stack for a key that ``stacks`` lacks
            column = replace(column, stack=0)
        if stack:
            column = column.as_stack(stack)
            first = found.setdefault(column.ring, column)
            if not column.frame_bytes:
                raise ConfigurationError(
                    f"frames={shown(stacks)}: {'.'.join(column.key)!r} has the shape "
                    f"{list(column.shape)} per row, so its frames have no elements; leave this key "
                    "out of frames="
                )
            if (column.frame_shape, column.dtype) != (first.frame_shape, first.dtype):
                raise ConfigurationError(
                    f"frames={shown(stacks)}: {'.'.join(column.key)!r} has frames of "
                    f"{column.dtype} {list(column.frame_shape)}, but {'.'.join(first.key)!r} has "
                    f"frames of {first.dtype} {list(first.frame_shape)}; give both the same shape "
                    "and dtype, or leave the key out of frames="
                )
        columns.append(column)
    missing = [key for key in stacks if key not in found]
    if missing:
        raise ConfigurationError(
            f"frames={shown(stacks)}: the rows have no {'.'.join(missing[0])!r}, only "
            f"{['.'.join(column.key) for column in spec.columns]}; pass keys that the rows have"
        )
    return RowSpec(tuple(columns), spec.batch_dims, spec.nodes)


def shown(stacks: Mapping[tuple[str, ...], int]) -> str:
    """Return the argument ``frames=`` as a user writes it."""
    return str({key[0] if len(key) == 1 else key: stack for key, stack in stacks.items()})


class _Found(NamedTuple):
    """The result of a finder. A reference is a frame's ticket, or ``-1 - k`` for the k-th new
    frame."""

    refs: list[np.ndarray]
    """The references, int64 [rows * stack] per column."""
    fresh: Any
    """The new frames, in the form that the finder's ``keep`` needs."""
    new: int
    """Number of new frames."""


class _NumpyFinder:
    """Finds recent frames of this process in one ring by their bytes.

    A finder compares each candidate with the frame in the ring, byte by byte. Wrong entries in its
    table therefore do no harm, so several threads may use a finder at the same time. A frame that
    the finder has forgotten is stored again."""

    def __init__(self, ring: np.ndarray, most: int) -> None:
        self._ring = ring
        self._most = most
        self._known: dict[bytes, int] = {}

    def find(self, values: Sequence[np.ndarray], oldest: int) -> _Found:
        """Look in the ring for the frames of each of ``values``, uint8 [n, stack, bytes]. Ignore
        frames with tickets below ``oldest``."""
        fresh: list[np.ndarray] = []
        by_digest: dict[bytes, int] = {}
        digests: list[bytes] = []
        refs = []
        for value in values:
            frames = value.reshape(-1, value.shape[-1])
            found = np.empty(len(frames), np.int64)
            for number, frame in enumerate(frames):
                digest = hashlib.blake2b(frame.data, digest_size=16).digest()
                new = by_digest.get(digest, -1)
                ticket = self._known.get(digest, -1)
                if new >= 0 and np.array_equal(fresh[new], frame):
                    found[number] = -1 - new
                elif ticket >= max(0, oldest) and np.array_equal(self._cell(ticket), frame):
                    found[number] = ticket
                else:
                    found[number] = -1 - len(fresh)
                    by_digest[digest] = len(fresh)
                    fresh.append(frame)
                    digests.append(digest)
            refs.append(found)
        return _Found(refs, (fresh, digests), len(fresh))

    def keep(self, found: _Found, first: int) -> None:
        """Copy the new frames into the ring, from ticket ``first`` on, and remember them."""
        for ticket, (frame, digest) in enumerate(zip(*found.fresh, strict=True), first):
            self._cell(ticket)[:] = frame
            self._known.pop(digest, None)
            self._known[digest] = ticket
        for digest in list(self._known)[: -self._most]:
            self._known.pop(digest, None)

    def _cell(self, ticket: int) -> np.ndarray:
        return self._ring[ticket % len(self._ring)]


class _CFinder(_NumpyFinder):
    """A finder in C, with a table of hashes and tickets, int64 [entries, 2]."""

    def __init__(self, ring: np.ndarray, most: int) -> None:
        super().__init__(ring, most)
        copier = find_copier()
        assert copier is not None
        self._find, self._keep = copier.replay_find_frames, copier.replay_keep_frames
        entries = 1 << (2 * most - 1).bit_length()
        self._table = np.zeros((entries, 2), np.int64)

    def find(self, values: Sequence[np.ndarray], oldest: int) -> _Found:
        ring, table = self._ring, self._table
        columns = np.array([(address(each), each[..., 0].size, each.shape[1]) for each in values])
        most = int(columns[:, 1].sum())
        batch = np.zeros((1 << (2 * most + 1).bit_length(), 2), np.int64)
        fresh = np.empty((most, 3), np.int64)
        hints = np.zeros(columns[:, 2].max(), np.int64)
        refs = np.empty(most, np.int64)
        new = self._find(
            address(columns), len(columns), ring.shape[1], address(ring), len(ring),
            address(table), len(table), max(0, oldest), address(batch), len(batch),
            address(fresh), address(hints), address(refs),
        )  # fmt: skip
        parts = np.split(refs, np.cumsum(columns[:-1, 1]))
        return _Found(parts, (fresh, values), new)

    def keep(self, found: _Found, first: int) -> None:
        ring, table = self._ring, self._table
        self._keep(
            address(found.fresh[0]), found.new, ring.shape[1], address(ring), len(ring), first,
            address(table), len(table),
        )  # fmt: skip


def _finder(ring: np.ndarray, most: int) -> _NumpyFinder:
    return (_NumpyFinder if find_copier() is None else _CFinder)(ring, most)


def _frames_of(values: np.ndarray, column: ColumnSpec) -> np.ndarray:
    """Return the frames of stacks as bytes, uint8 [n, stack, bytes]."""
    shape = len(values), column.stack, column.frame_bytes
    return np.ascontiguousarray(values).reshape(-1).view(np.uint8).reshape(shape)


def each_once(columns: Sequence[np.ndarray], spec: RowSpec) -> list[np.ndarray]:
    """Return the stored form of rows (see ``row.stacks``). Frames with equal bytes are stored
    once."""
    found = list(columns)
    for numbers in spec.rings.values():
        column = spec.columns[numbers[0]]
        size = column.frame_bytes
        values = [_frames_of(columns[each], spec.columns[each]) for each in numbers]
        known = _finder(np.empty((1, size), np.uint8), 1).find(values, 0)
        frames = np.empty((known.new, size), np.uint8)
        _finder(frames, 1).keep(known, 0)
        for number, refs, value in zip(numbers, known.refs, values, strict=True):
            found[number] = (-1 - refs).reshape(value.shape[:2])
        shape = known.new, *column.frame_shape
        found.append(frames.reshape(-1).view(columns[numbers[0]].dtype).reshape(shape))
    return found


@dataclass(eq=False)
class Plan:
    """The frames of rows that are about to be written, for one reservation.

    Attributes:
        columns: the numbers of the columns with frames.
        found: the result of the finder, per ring.
        count: number of tickets that the plan needs.
        known: int64 [rows], the oldest ticket among each row's known frames.
        new: int64 [rows], each row's first new frame, as ``k`` in ``-1 - k``.
        oldest: the smallest of ``known``.
        first: the ticket of the first new frame, once reserved.
    """

    columns: list[list[int]]
    found: list[_Found]
    count: int
    known: np.ndarray
    new: np.ndarray
    oldest: int
    first: int = field(default=-1, init=False)


class Frames:
    """The frames of one directory, as this process sees them."""

    def __init__(
        self,
        folder: Any,
        spec: RowSpec,
        versions: np.ndarray,
        claims: np.ndarray,
        words: memoryview,
        kernel: NumpyKernel,
    ) -> None:
        self._words, self._versions, self._claims = words, versions, claims
        self._kernel = kernel
        capacity = len(versions)
        self.size, self.window = ring_size(capacity, spec), window_of(capacity)
        self.largest_write = largest_write(capacity, spec)
        sizes = file_sizes(capacity, spec)
        tables = np.frombuffer(
            map_file(folder / FRAMES_OF_CLAIMS, sizes[FRAMES_OF_CLAIMS]), dtype=np.int64
        )
        self._starts, self._marks = tables[:MAX_CLAIMS], tables[MAX_CLAIMS:]
        self._spec = spec
        self._numbers = list(spec.rings.values())
        self._rings: list[np.ndarray] = []
        self._finders: list[_NumpyFinder] = []
        most = min(_MOST_KNOWN, self.window)
        for key, numbers in spec.rings.items():
            column = spec.columns[numbers[0]]
            buffer = map_file(folder / ring_file(key), sizes[ring_file(key)])
            with torch.inference_mode(False):
                tensor = torch.frombuffer(buffer, dtype=column.dtype)
            self._rings.append(array_of(tensor.reshape(self.size, *column.frame_shape)))
            data = np.frombuffer(buffer, np.uint8).reshape(self.size, column.frame_bytes)
            self._finders.append(_finder(data, most))

    # --- reading -----------------------------------------------------------------------------

    def expand(self, columns: list[np.ndarray], gather: Gather) -> list[np.ndarray]:
        """Replace each cell's number in ``columns`` with the frame in that cell. Return
        ``columns``.

        Args:
            columns: copies of the columns of rows.
            gather: ``gather([array], indices)`` returns copies of the rows ``indices`` of the
                array.
        """
        for numbers, ring in zip(self._numbers, self._rings, strict=True):
            for number in numbers:
                cells = columns[number]
                (frames,) = gather([ring], cells.reshape(-1))
                columns[number] = frames.reshape(len(cells), *self._spec.columns[number].shape)
        return columns

    def stored(self, columns: list[np.ndarray], gather: Gather) -> list[np.ndarray]:
        """Return the stored form (see ``row.stacks``) of rows whose copied columns hold cells."""
        columns = list(columns)
        for numbers, ring in zip(self._numbers, self._rings, strict=True):
            cells = [columns[number] for number in numbers]
            found = np.concatenate([each.reshape(-1) for each in cells])
            cell, position = np.unique(found, return_inverse=True)
            edges = np.cumsum([each.size for each in cells])[:-1]
            for number, part in zip(numbers, np.split(position, edges), strict=True):
                columns[number] = part.reshape(columns[number].shape)
            columns += gather([ring], cell)
        return columns

    # --- writing -----------------------------------------------------------------------------

    def plan(self, source: Sequence[np.ndarray | None], start: int, stop: int) -> Plan:
        """Look for the frames of the rows ``start`` to ``stop`` among recently written frames."""
        oldest = self._words[Word.FRAME_CURSOR] - self.window // 2
        columns, found = [], []
        for numbers, finder in zip(self._numbers, self._finders, strict=True):
            given = [(number, source[number]) for number in numbers]
            columns.append([number for number, value in given if value is not None])
            values = [
                _frames_of(value[start:stop], self._spec.columns[number])
                for number, value in given
                if value is not None
            ]
            found.append(finder.find(values, oldest))
        refs = [each.reshape(stop - start, -1) for ring in found for each in ring.refs]
        every = np.concatenate(refs, axis=1)
        known = every.min(1, where=every >= 0, initial=_NEVER)
        new = -1 - every.max(1, where=every < 0, initial=-_NEVER)
        count = max(each.new for each in found)
        return Plan(columns, found, count, known, new, int(known.min()))

    def admits(self, row: int, plan: Plan | None) -> bool:
        """Return whether the plan's new frames can get tickets now. Called under the lock.

        The caller then calls :meth:`reserve` without releasing the lock.

        Args:
            row: an unused row of the claim table.
            plan: None for rows without frames.

        Returns:
            False if the new frames would overwrite frames of another claim.

        Raises:
            StalePlanError: the plan is outdated; make another one.
        """
        cursor = self._words[Word.FRAME_CURSOR]
        if plan is None:
            self._starts[row] = cursor
            return True
        if plan.oldest < cursor - self.window:
            raise StalePlanError
        self._starts[row] = min(plan.oldest, cursor)
        return self._oldest_start() >= cursor + plan.count - self.size

    def _oldest_start(self) -> int:
        """Return the oldest start of a claim, or ``_NEVER`` if there is no claim."""
        used = self._words[Word.CLAIM_ROWS]
        starts = self._starts[:used][self._claims[:used, CLAIM_COUNT] != 0]
        return int(starts.min(initial=_NEVER))

    def reserve(self, plan: Plan | None, ranges: Sequence[tuple[int, int]]) -> None:
        """Reserve tickets for new frames, mark the slots, and drop rows whose frames will be
        overwritten. Called under the lock, after the claim was made.
        """
        words = self._words
        first = words[Word.FRAME_CURSOR]
        count = 0 if plan is None else plan.count
        needed = first + count - self.size  # the smallest allowed mark from now on
        words[Word.DIRTY] = 1
        if plan is not None and plan.oldest < words[Word.FRAME_LOW]:
            words[Word.FRAME_LOW] = plan.oldest  # a row of this plan will have the oldest mark
        if needed > words[Word.FRAME_LOW]:
            self._drop(needed)
        rows = sum(stop - start for start, stop in ranges)
        marks = np.full(rows, first) if plan is None else np.minimum(plan.known, first + plan.new)
        marks = marks[marks.size - rows :]  # a restore may leave out the plan's first rows
        for start, stop in ranges:
            self._marks[start:stop], marks = np.split(marks, [stop - start])
        words[Word.FRAME_CURSOR] = first + count
        words[Word.DIRTY] = 0
        if plan is not None:
            plan.first = first

    def _drop(self, needed: int) -> None:
        """Unpublish the rows with marks below ``needed``."""
        words, marks = self._words, self._marks
        published = (self._versions & 1 == 0) & (self._versions > 0)
        if marks.min(where=published, initial=_NEVER) < needed:
            # every drop looks at all slots, so drop more rows than needed, to drop less often
            gone = np.flatnonzero(published & (marks < needed + self.size // _DROPPED_AT_ONCE))
            published[gone] = False
            runs = np.split(gone, np.flatnonzero(np.diff(gone) != 1) + 1)
            for run in runs:
                self._kernel.unpublish(int(run[0]), int(run[-1]) + 1)
            words[Word.DROPPED_ROWS] += gone.size
        low = int(marks.min(where=published, initial=words[Word.FRAME_CURSOR]))
        words[Word.FRAME_LOW] = min(low, self._oldest_start())

    def write(
        self, plan: Plan, source: Sequence[np.ndarray | None], start: int, stop: int
    ) -> list[np.ndarray | None]:
        """Copy the plan's new frames, and return the columns of the rows ``start`` to ``stop``.

        The values of a column with stacks become cells, int32 [n, stack]. Called between reserving
        and publishing."""
        columns = [None if value is None else value[start:stop] for value in source]
        for numbers, found, finder in zip(plan.columns, plan.found, self._finders, strict=True):
            finder.keep(found, plan.first)
            for number, refs in zip(numbers, found.refs, strict=True):
                tickets = np.where(refs < 0, plan.first - 1 - refs, refs)
                cells = (tickets % self.size).astype(np.int32)
                columns[number] = cells.reshape(stop - start, -1)
        return columns
