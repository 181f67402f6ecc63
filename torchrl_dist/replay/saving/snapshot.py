"""Save and restore a replay directory in chunks, while other processes continue.

Slots are visited in the order in which the ring will overwrite them. The *position* of a slot is
its distance ahead of the cursor at the start, ``(slot - cursor) % capacity``, which is 0 for the
oldest row. Writers reserve slots in the same order, so the n slots that they have reserved since
the start are those with positions below n.

- Saving copies the rows of a chunk without the lock, and compares their versions afterwards. Each
  saved row is whole, with a priority that it had during the save. Slots that were reserved since
  the start, or are being written, are left out.
- Restoring empties the buffer and sets its cursor. It then claims, writes and publishes one chunk
  after another, like any writer. If another writer has reserved a slot first, that writer's row
  stays. The generation of a slot never becomes smaller.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch

from torchrl_dist.errors import CheckpointError, ConfigurationError
from torchrl_dist.replay.node.cursor import SharedCursor
from torchrl_dist.replay.node.directory import ReplayDirectory
from torchrl_dist.replay.node.priorities import check_rescaling, rescaled
from torchrl_dist.replay.node.tables import COUNTERS, LARGEST_COUNT, ORDERED_LOADS, Word
from torchrl_dist.replay.row.rows import node_problems
from torchrl_dist.replay.row.spec import HIDDEN, ColumnSpec, RowSpec, checked_spec
from torchrl_dist.replay.row.stacks import Column, Stacks
from torchrl_dist.tensors import array_of

CHUNK_BYTES = 2**24
_CHUNK_ROWS = 2**16  # copy at most this many versions and leaves each time the lock is held
_ATTEMPTS = 3 if ORDERED_LOADS else 0
_LARGEST_BLOCK = 1024

# columns of `runs`, int64 [n, 3]. A run is a range of slots with equal versions
RUN_SLOT, RUN_VERSION, RUN_COUNT = range(3)

_WHOLE_NUMBERS = (
    "capacity",
    "cursor",
    "high",
    "length",
    "write_count",
    "width",
)  # fields of a head


@dataclass(frozen=True)
class Head:
    """The state of a directory at one instant, without its rows.

    ``max_priority`` (before the exponent alpha), ``alpha`` and ``eps`` are None until they are set,
    and ``spec`` is None before the first row. ``length`` counts published rows. ``limiter`` is
    ``gate.state()`` if the directory has a limiter. ``width`` is ``directory.width``.
    """

    capacity: int
    cursor: int
    high: int
    length: int
    write_count: int
    max_priority: float | None
    alpha: float | None
    eps: float | None
    max_within: bool
    counters: dict[str, int]
    spec: RowSpec | None
    limiter: list[float] | None = None
    width: int = 0

    @property
    def max_times_sampled(self) -> int:
        """The limiter's ``max_times_sampled``, or 0 if there is no such limit."""
        return int(sum((self.limiter or [])[3:4]))

    @classmethod
    def of(cls, directory: ReplayDirectory) -> Head:
        """Return the state of a directory. Blocks for the directory's lock."""
        with directory.lock():
            words = directory.words
            highest = directory.get_float(Word.MAX_PRIORITY)
            set_ = bool(words[Word.ALPHA_SET])
            return cls(
                directory.capacity,
                words[Word.CURSOR],
                directory.high,
                directory.length,
                words[Word.WRITE_COUNT],
                None if math.isnan(highest) else highest,
                directory.get_float(Word.ALPHA) if set_ else None,
                directory.get_float(Word.EPS) if set_ else None,
                bool(words[Word.MAX_WITHIN]),
                directory.counters,
                directory.rows,
                None if directory.gate is None else directory.gate.state(),
                directory.width,
            )

    def check(self) -> None:
        """Raise CheckpointError if a directory cannot have had these values."""
        whole = {name: vars(self)[name] for name in _WHOLE_NUMBERS}
        whole |= {f"the counter {name}": value for name, value in self.counters.items()}
        for name, value in whole.items():
            most = self.capacity if name in ("high", "length") else LARGEST_COUNT
            if type(value) is not int or not (name == "capacity") <= value <= most:
                raise CheckpointError(
                    f"the checkpoint is damaged: {name} is {value!r}; use another checkpoint"
                )
        limiter = self.limiter or []
        for value in (self.alpha, self.eps, self.max_priority, *limiter):
            if value is not None and not (isinstance(value, int | float) and 0 <= value < math.inf):
                raise CheckpointError(
                    f"the checkpoint is damaged: it has {value!r} in place of a finite number >= "
                    "0; use another checkpoint"
                )
        if (self.alpha is None) != (self.eps is None):
            raise CheckpointError(
                "the checkpoint is damaged: it has only one of alpha and eps; use another "
                "checkpoint"
            )

    def as_json(self) -> dict[str, Any]:
        """Return the state as plain values."""
        entry = vars(self) | {"spec": None if self.spec is None else self.spec.as_json()}
        if not self.width:  # earlier versions of the package do not know this entry
            del entry["width"]
        return entry

    @classmethod
    def from_json(cls, entry: dict[str, Any]) -> Head:
        """Invert :meth:`as_json`.

        Raises:
            CheckpointError: the entry is damaged.
        """
        try:
            spec = entry["spec"]
            head = cls(**entry | {"spec": None if spec is None else checked_spec(spec)})
            head.counters.keys()
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(
                f"the checkpoint is damaged: {error!r}; use another checkpoint"
            ) from error
        head.check()
        return head

    def chunks(
        self, most_bytes: Callable[[], int] = lambda: CHUNK_BYTES
    ) -> Iterator[tuple[int, int]]:
        """Yield ranges of slots ``(start, stop)`` that cover the ring, the oldest first.

        Before each range, ``most_bytes()`` is called. It returns how many bytes the rows of that
        range may have. A range has at least one row.
        """
        if self.spec is None:
            return
        first = self.cursor % self.capacity
        for start, stop in ((first, self.capacity), (0, first)):
            at = start
            while at < stop:
                size = min(_CHUNK_ROWS, max(1, most_bytes() // self.spec.stored_row_bytes))
                yield at, min(at + size, stop)
                at += size


@dataclass(frozen=True)
class SavedShard:
    """The rows of one directory, the oldest first, with their slots, versions and leaves.

    Attributes:
        head: the state of the directory when saving began.
        runs: int64 [k, 3], the first slot, the version and the length of each run of slots.
        leaf: float64 [n], leaf of each row in the sum tree.
        columns: the rows, [n, ...] per column of the spec, as ``tensors.array_of`` returns them.
    """

    head: Head
    runs: np.ndarray
    leaf: np.ndarray
    columns: list[Column]

    def check(self) -> None:
        """Raise CheckpointError if a directory cannot have had these rows."""
        self.head.check()
        problem = self._problem()
        if problem is not None:
            raise CheckpointError(f"the checkpoint is damaged: {problem}; use another checkpoint")

    def _problem(self) -> str | None:
        runs, leaf, capacity = self.runs, self.leaf, self.head.capacity
        if runs.dtype != np.int64 or runs.ndim != 2 or runs.shape[1] != 3:
            return f"its table of slots is {runs.dtype} {list(runs.shape)}, expected int64 [n, 3]"
        slot, version, count = runs.T
        if runs.size:
            if count.min() < 1 or count.max() > capacity or count.sum() != leaf.size:
                return (
                    f"its table of slots does not have {leaf.size} rows in total, as its "
                    "priorities do"
                )
            if slot.min() < 0 or slot.max() >= capacity or (slot + count).max() > capacity:
                return f"some rows are in slots that a buffer of capacity {capacity} does not have"
            if version.min() < 1 or version.max() > LARGEST_COUNT or (version & 1).any():
                return "some rows have versions that a complete row cannot have"
            position = (slot - self.head.cursor) % capacity
            if (position + count > np.append(position[1:], capacity)).any():
                return "some rows share a slot, or are not in the order of their age"
        elif leaf.size:
            return f"it has {leaf.size} priorities without rows"
        if leaf.dtype != np.float64 or leaf.ndim != 1:
            return f"its priorities are {leaf.dtype} {list(leaf.shape)}, expected float64 [n]"
        if not (np.isfinite(leaf).all() and (leaf >= 0).all()):
            return "some of its priorities are negative or not finite"
        columns = self.head.spec.columns if self.head.spec is not None else ()
        if len(columns) != len(self.columns) or (leaf.size and self.head.spec is None):
            return (
                f"its description of a row has {len(columns)} columns, but its rows have "
                f"{len(self.columns)}"
            )
        for each, values in zip(columns, self.columns, strict=True):
            kind = array_of(torch.empty(0, dtype=each.dtype)).dtype
            if values.shape != (leaf.size, *each.shape) or values.dtype != kind:
                return (
                    f"{'.'.join(each.key)} is {values.dtype} {list(values.shape)}, unlike its "
                    "description of a row"
                )
            if isinstance(values, Stacks) and not values.fit(each):
                return f"{'.'.join(each.key)} refers to frames that are missing"
        return None

    @property
    def slots(self) -> np.ndarray:
        """The slots of the rows, int64 [n]."""
        first, count = self.runs[:, RUN_SLOT], self.runs[:, RUN_COUNT]
        begin = np.cumsum(count) - count
        return np.repeat(first - begin, count) + np.arange(count.sum())

    @property
    def versions(self) -> np.ndarray:
        """The versions of the rows, int64 [n], which are twice the generations."""
        return np.repeat(self.runs[:, RUN_VERSION], self.runs[:, RUN_COUNT])

    @property
    def overwritten(self) -> int:
        """How many rows existed when saving began, but were not saved."""
        return max(0, self.head.length - self.leaf.size)


# --- saving --------------------------------------------------------------------------------------


class Chunk(NamedTuple):
    """Slots and leaves of saved rows; see :class:`SavedShard`.

    If another process wrote the rows to files, ``parts`` has the length and the CRC-32 of each
    array that it wrote.
    """

    runs: np.ndarray
    leaf: np.ndarray
    parts: tuple[tuple[int, int], ...] = ()


class _Found(NamedTuple):
    keep: np.ndarray
    """bool: whether the slot has a published row that is older than the start of saving."""
    versions: np.ndarray
    leaf: np.ndarray


def save_chunk(
    directory: ReplayDirectory,
    cursor: int,
    alpha: float | None,
    start: int,
    stop: int,
    write: Callable[[list[np.ndarray]], None],
) -> Chunk:
    """Save the rows in slots ``start`` to ``stop - 1`` whose tickets are before ``cursor``.

    Blocks for the directory's lock, and holds it to copy versions and leaves. The function copies
    rows under the lock only if other processes changed the chunk during every earlier attempt.

    Args:
        alpha: the exponent when saving began. Leaves are converted to this exponent.
        write: takes the rows in their stored form, see ``row.stacks``. The arrays may be shared
            memory. If rows changed during a call of ``write``, ``write`` is called again for the
            whole chunk, and only the last call counts.
    """
    for _ in range(_ATTEMPTS):
        with directory.lock():
            found = _look(directory, cursor, alpha, start, stop)
            patches = directory.words[Word.PATCHES]
        write(_copies(directory, found, start, stop))
        changed = (directory.versions[start:stop] != found.versions) & found.keep
        if not changed.any() and directory.words[Word.PATCHES] == patches:
            return _chunk(found, start)
    with directory.lock():
        found = _look(directory, cursor, alpha, start, stop)
        rows = [array.copy() for array in _copies(directory, found, start, stop)]
    write(rows)
    return _chunk(found, start)


def _look(
    directory: ReplayDirectory, cursor: int, alpha: float | None, start: int, stop: int
) -> _Found:
    """Find the rows to keep. Call it under the lock."""
    versions = directory.versions[start:stop].copy()
    leaf = directory.tree.leaves[start:stop].copy()
    now = directory.get_float(Word.ALPHA)
    if alpha and now and now != alpha:
        leaf = rescaled(leaf, alpha / now)
    keep = (versions & 1 == 0) & (versions > 0)
    position = (start - cursor) % directory.capacity
    keep[: max(0, directory.words[Word.CURSOR] - cursor - position)] = False
    return _Found(keep, versions, leaf)


def _copies(directory: ReplayDirectory, found: _Found, start: int, stop: int) -> list[np.ndarray]:
    """Return the rows to keep, as slices of the shared memory if all are kept."""
    if found.keep.all():
        return directory.read_stored(slice(start, stop))
    return directory.read_stored(start + np.flatnonzero(found.keep))


def _chunk(found: _Found, start: int) -> Chunk:
    kept = np.flatnonzero(found.keep)
    return Chunk(_runs(start + kept, found.versions[kept]), found.leaf[kept])


def _runs(slots: np.ndarray, versions: np.ndarray) -> np.ndarray:
    if not slots.size:
        return np.empty((0, 3), dtype=np.int64)
    edges = np.flatnonzero((np.diff(slots) != 1) | (np.diff(versions) != 0)) + 1
    first = np.concatenate([[0], edges])
    count = np.diff(np.append(first, slots.size))
    return np.stack([slots[first], versions[first], count], axis=1)


# --- restoring ---------------------------------------------------------------------------------


class Piece(NamedTuple):
    """``count`` rows of a saved shard, from ``row`` on, for the slots from ``slot`` on."""

    shard: int
    row: int
    count: int  # type: ignore[assignment]  # hides tuple.count, which is not used
    slot: int
    version: int


class Target(NamedTuple):
    """The new content of one directory: its head, and pieces in the order of their positions."""

    head: Head
    pieces: list[Piece]


def deal(
    shards: Sequence[SavedShard | None], count: int, capacity: int
) -> tuple[list[Target], int]:
    """Assign the rows of ``shards`` to ``count`` directories with ``capacity`` slots each.

    If ``count`` and ``capacity`` are those of the saved shards, every row keeps its slot and its
    generation, and a shard that was not saved (None) becomes empty.

    Otherwise blocks of neighbouring rows are dealt evenly, the oldest first. Trajectories stay
    together except at the edges of blocks. Rows get new slots, and generations larger than all
    saved ones, so that a slot and generation from before the save never name another row. If there
    is not enough room, the oldest rows are left out. A row's age is its distance from its shard's
    cursor.

    Returns:
        A target per directory, and the number of rows that were left out.
    """
    known = [shard for shard in shards if shard is not None]
    if not known:
        raise CheckpointError("the checkpoint has no shard; use another checkpoint")
    if len(shards) == count and all(shard.head.capacity == capacity for shard in known):
        return [
            Target(_without_rows(known[0].head), [])
            if shard is None
            else Target(shard.head, _pieces_as_saved(number, shard))
            for number, shard in enumerate(shards)
        ], 0
    rows = sum(shard.leaf.size for shard in known)
    kept = min(rows, count * capacity)
    quotas = [kept // count + (target < kept % count) for target in range(count)]
    slots = [0] * count
    pieces: list[list[Piece]] = [[] for _ in range(count)]
    version = max([int(shard.runs[:, RUN_VERSION].max(initial=0)) for shard in known]) + 2
    leave_out = rows - kept
    size = min(_LARGEST_BLOCK, max(1, rows // (8 * count)))
    for number, row, length in _blocks(shards, size):
        dropped = min(leave_out, length)
        leave_out -= dropped
        row, length = row + dropped, length - dropped
        while length:
            target = max(range(count), key=lambda each: quotas[each] - slots[each])
            taken = min(length, quotas[target] - slots[target])
            pieces[target].append(Piece(number, row, taken, slots[target], version))
            slots[target] += taken
            row, length = row + taken, length - taken
    heads = _dealt_heads([shard.head for shard in known], count, capacity, quotas)
    return [Target(*pair) for pair in zip(heads, pieces, strict=True)], rows - kept


def _without_rows(head: Head) -> Head:
    """Make the head of a shard that was not saved, from another shard's ``head``."""
    counters = dict.fromkeys(head.counters, 0)
    return replace(head, cursor=0, high=0, length=0, write_count=0, counters=counters, limiter=None)


def _pieces_as_saved(number: int, shard: SavedShard) -> list[Piece]:
    count = shard.runs[:, RUN_COUNT]
    rows = (np.cumsum(count) - count).tolist()
    return [
        Piece(number, row, length, slot, version)
        for row, (slot, version, length) in zip(rows, shard.runs.tolist(), strict=True)
    ]


def _blocks(shards: Sequence[SavedShard | None], size: int) -> list[tuple[int, int, int]]:
    """Return ``(shard, first row, number of rows)`` of blocks of at most ``size`` rows, the oldest
    first."""
    found = []
    for number, shard in enumerate(shards):
        if shard is None:
            continue
        capacity, cursor = shard.head.capacity, shard.head.cursor
        slots = shard.slots
        for row in range(0, slots.size, size):
            age = (cursor - 1 - int(slots[row])) % capacity
            found.append((-age, number, row, min(size, slots.size - row)))
    return [(number, row, length) for _, number, row, length in sorted(found)]


def _dealt_heads(heads: list[Head], count: int, capacity: int, quotas: list[int]) -> list[Head]:
    """Return the new heads. The sum of all write counts is divided evenly among them. Each other
    counter is summed over all heads, and the first head gets the sum."""
    highest = [head.max_priority for head in heads if head.max_priority is not None]
    with_alpha = next((head for head in heads if head.alpha is not None), heads[0])
    written = sum(head.write_count for head in heads)
    counters = {
        name: sum(head.counters.get(name, 0) for head in heads) for name in heads[0].counters
    }
    return [
        replace(
            with_alpha,
            capacity=capacity,
            cursor=quotas[target],
            high=quotas[target],
            length=quotas[target],
            write_count=written // count + (target < written % count),
            max_priority=max(highest, default=None),
            counters=counters if target == 0 else dict.fromkeys(counters, 0),
            limiter=_limiter_of_all(heads, first=target == 0),
            spec=next((head.spec for head in heads if head.spec is not None), None),
        )
        for target in range(count)
    ]


def _limiter_of_all(heads: list[Head], *, first: bool) -> list[float] | None:
    """Return the limiter's state if all heads have the same limiter, otherwise None. Its counts are
    the sums over all heads for the ``first`` target, and 0 for the other targets."""
    states = [head.limiter for head in heads if head.limiter is not None]
    if len(states) < len(heads) or any(each[:-2] != states[0][:-2] for each in states):
        return None
    counts = [sum(each[at] for each in states if first) for at in (-2, -1)]
    return states[0][:-2] + counts


def require_same(own: RowSpec, saved: RowSpec) -> None:
    """Refuse to restore rows of another spec.

    Two differences are allowed: either spec may lack hidden columns, and fields for text may have
    other sizes.

    Raises:
        ConfigurationError: the specs differ. The message names every column that differs.
    """
    if own == saved:
        return
    here = {column.key: column for column in own.columns if column not in HIDDEN}
    there = {column.key: column for column in saved.columns if column not in HIDDEN}
    differ = [
        f"{'.'.join(key)!r} is {_column_text(there.get(key))} in the saved rows, but "
        f"{_column_text(here.get(key))} in the buffer"
        for key in sorted({*here, *there})
        if not _fit(there.get(key), here.get(key))
    ]
    if not differ and saved.batch_dims != own.batch_dims:
        differ = [
            f"each row has batch size {saved.batch_dims} in the saved rows, but "
            f"{own.batch_dims} in the buffer"
        ]
    differ = differ or node_problems(saved.nodes, own)
    if not differ:
        return
    raise ConfigurationError(
        "the saved rows do not match the rows of the buffer, which was not changed; load the saved "
        "rows into a new buffer. The differences: " + "; ".join(differ)
    )


def _fit(one: ColumnSpec | None, other: ColumnSpec | None) -> bool:
    if one is None or other is None:
        return False
    return one == other or (one.text and other.text and one.shape[:-1] == other.shape[:-1])


def _column_text(column: Any) -> str:
    return "missing" if column is None else f"{str(column.dtype)[6:]} {list(column.shape)}"


def with_one_alpha(shards: Sequence[SavedShard | None]) -> list[SavedShard | None]:
    """Convert all leaves to the alpha of the first shard that has one. The shards' alphas differ if
    alpha was changed while the shards were saved.

    Raises:
        ConfigurationError: the conversion makes leaves too large.
    """
    known = [each.head.alpha for each in shards if each is not None and each.head.alpha]
    return [_under(each, known[0]) if each is not None and known else each for each in shards]


def _under(shard: SavedShard, alpha: float) -> SavedShard:
    own = shard.head.alpha
    if not own or own == alpha:
        return shard
    check_rescaling(shard.leaf, alpha / own)
    leaf = rescaled(shard.leaf, alpha / own)
    return replace(shard, head=replace(shard.head, alpha=alpha), leaf=leaf)


def begin_restore(cursor: SharedCursor, head: Head) -> int:
    """Empty the directory and restore the saved state except the rows, for all processes.

    Returns:
        The cursor, for :func:`restore_rows`.
    """
    directory = cursor.directory
    values: dict[Word, float] = {
        word: head.counters[name] for name, word in COUNTERS.items() if name in head.counters
    }
    values[Word.WRITE_COUNT] = head.write_count
    values[Word.RESTORED_TIMES] = head.max_times_sampled
    values[Word.MAX_PRIORITY] = math.nan if head.max_priority is None else head.max_priority
    if head.alpha is not None:
        assert head.eps is not None
        values[Word.ALPHA] = head.alpha
        if not directory.words[Word.ALPHA_SET]:  # otherwise the buffer keeps its own values
            values |= {Word.EPS: head.eps, Word.MAX_WITHIN: head.max_within, Word.ALPHA_SET: 1}
    return cursor.start_over(head.cursor, head.high, values, head.limiter, head.length)


def restore_rows(
    cursor: SharedCursor,
    since: int,
    slot: int,
    version: int,
    leaf: np.ndarray,
    alpha: float | None,
    arrays: Sequence[np.ndarray],
) -> None:
    """Publish saved rows in the slots from ``slot`` on, except slots reserved after ``since``.

    Blocks while other processes write these slots.

    Args:
        since: the result of :func:`begin_restore`.
        version: the version of all these rows. A slot whose next version is larger gets that
            version instead.
        leaf: float64 [n], leaves under ``alpha``.
        arrays: [n, ...] per column of the spec.

    Raises:
        DeadlineError: another process did not release these slots before the deadline.
    """
    frames = cursor.directory.frames
    if frames is not None and leaf.size > frames.largest_write:
        for first in range(0, leaf.size, frames.largest_write):
            part = slice(first, first + frames.largest_write)
            own = [array[part] for array in arrays]
            restore_rows(cursor, since, slot + first, version, leaf[part], alpha, own)
        return
    reservation, plan = cursor.planned(
        arrays, 0, leaf.size, cursor.claim_unless_passed, slot, leaf.size, since
    )
    if reservation is None:
        return
    try:
        skipped = leaf.size - reservation.count
        ((start, stop),) = reservation.ranges
        values: Sequence[Any] = arrays
        if plan is not None:
            assert frames is not None
            values = frames.write(plan, arrays, 0, leaf.size)
        for target, rows in zip(cursor.directory.arrays, values, strict=True):
            target[start:stop] = rows[skipped:]
        cursor.publish_saved(reservation, version, leaf[skipped:], alpha)
    except BaseException:
        cursor.abandon(reservation)
        raise


def pieces_in_chunks(target: Target) -> Iterator[Piece]:
    """Yield the pieces, divided so that none is larger than a chunk."""
    spec = target.head.spec
    if spec is None:
        return
    size = min(_CHUNK_ROWS, max(1, CHUNK_BYTES // max(1, spec.row_bytes)))
    for piece in target.pieces:
        for done in range(0, piece.count, size):
            yield piece._replace(
                row=piece.row + done, slot=piece.slot + done, count=min(size, piece.count - done)
            )
