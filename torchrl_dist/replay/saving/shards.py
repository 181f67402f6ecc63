"""Save and restore a buffer whose shards may be in several processes."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from torchrl_dist.errors import CheckpointError, DeadlineError, PeerLostError
from torchrl_dist.replay.node.cursor import SharedCursor
from torchrl_dist.replay.row import rows
from torchrl_dist.replay.row.spec import RowSpec
from torchrl_dist.replay.row.stacks import as_columns, as_stored, joined
from torchrl_dist.replay.saving import snapshot
from torchrl_dist.replay.saving.disk import read_dump, writing
from torchrl_dist.replay.saving.snapshot import Chunk, Head, SavedShard
from torchrl_dist.tensors import array_of

Arrays = list[np.ndarray]
"""The columns of some rows."""


class Sink(Protocol):
    """Receives the rows of a shard that is being saved.

    Attributes:
        folder: the folder of the rows' files, or None. If there is a folder, the process that has
            the shard may write the files itself with :class:`disk.RowFiles`, and the caller then
            only calls :meth:`append`. If the folder is None, the shard's process must send the
            rows.
    """

    folder: Path | None

    def write(self, stored: Arrays) -> None:
        """Take the rows of the next chunk in their stored form, see ``row.stacks``. If rows changed
        during a call of ``write``, ``write`` is called again for the same chunk, and only the last
        call counts."""

    def append(self, chunk: Chunk) -> None:
        """Take the slots and leaves of the rows that were written last."""


class RestoredRows(NamedTuple):
    """Neighbouring rows of a checkpoint, see :func:`snapshot.restore_rows`."""

    since: int
    slot: int
    version: int
    leaf: np.ndarray
    alpha: float | None
    arrays: Any
    """The columns, which are packed while they are sent to a host."""


class Shard:
    """One directory, which this process has open. Every method blocks for a bounded time.

    ``ReplayHost`` is a subclass. ``hosts.shard.RemoteShard`` calls a ``ReplayHost`` in another
    process."""

    def __init__(self, cursor: SharedCursor) -> None:
        self._cursor = cursor

    def head(self) -> Head:
        """Return the present state without the rows."""
        return Head.of(self._cursor.directory)

    def save(self, head: Head, sink: Sink) -> None:
        """Write to ``sink`` the rows that existed at the time of ``head`` and still exist, the
        oldest first."""
        for start, stop in head.chunks():
            sink.append(
                snapshot.save_chunk(
                    self._cursor.directory, head.cursor, head.alpha, start, stop, sink.write
                )
            )

    def row_spec(self, spec: RowSpec) -> RowSpec:
        """Return the spec of the shard's rows. If there are no rows yet, return the spec that the
        shard's rows would have if rows of ``spec`` were written."""
        return self._cursor.directory.spec_for(spec)

    def make_room(self, spec: RowSpec) -> None:
        """Make the files of rows, so that a full disk is noticed before any row is changed."""
        self._cursor.directory.create_rows(spec)

    def begin_restore(self, head: Head) -> int:
        """Do what :func:`snapshot.begin_restore` does."""
        return snapshot.begin_restore(self._cursor, head)

    def restore_rows(self, rows: RestoredRows) -> None:
        """Do what :func:`snapshot.restore_rows` does."""
        snapshot.restore_rows(self._cursor, *rows)


class MemorySink:
    """A sink that keeps a copy of the rows in this process."""

    folder: Path | None = None

    def __init__(self, head: Head) -> None:
        self._head = head
        self._rows: list[Arrays] = []
        self._chunks: list[Chunk] = []

    def write(self, stored: Arrays) -> None:
        del self._rows[len(self._chunks) :]
        self._rows.append([array.copy() for array in stored])

    def append(self, chunk: Chunk) -> None:
        self._chunks.append(chunk)

    def saved(self) -> SavedShard:
        if not self._chunks or self._head.spec is None:
            return SavedShard(self._head, np.empty((0, 3), np.int64), np.empty(0), [])
        return SavedShard(
            self._head,
            np.concatenate([chunk.runs for chunk in self._chunks]),
            np.concatenate([chunk.leaf for chunk in self._chunks]),
            as_columns(joined(self._rows, self._head.spec), self._head.spec),
        )


Lost = Callable[[int, Exception], None]
"""A function ``lost(shard, error)`` that is called if a shard did not answer. The function raises
if too few shards are left."""


def save_in_memory(shards: Sequence[Shard | None], lost: Lost) -> list[SavedShard | None]:
    """Return a copy of all rows, with None for shards that do not answer."""

    def save(number: int, shard: Shard) -> SavedShard:
        sink = MemorySink(heads[number])
        shard.save(heads[number], sink)
        return sink.saved()

    heads, answering = _heads(shards, lost)
    return _for_each(answering, save, lost)


def save_to_disk(
    path: Path, shards: Sequence[Shard | None], lost: Lost, extra: Mapping[str, Any] | None = None
) -> None:
    """Write all rows to a folder (see :func:`disk.writing`), while processes may continue to write.

    Shards that do not answer are left out, and the checkpoint says which shards are missing.

    Raises:
        CheckpointError: the disk is full or cannot be written, or the shards hold rows of different
            specs, which could not be loaded. An earlier checkpoint stays.
    """

    def save(number: int, shard: Shard) -> Any:
        with writer.shard(number, heads[number]) as sink:
            shard.save(heads[number], sink)
        return sink.entry()

    with writing(path) as writer:
        heads, answering = _heads(shards, lost)
        entries = _for_each(answering, save, lost)
        specs = {number: head.spec for number, head in heads.items() if head.spec is not None}
        for number in sorted(specs):
            if specs[number] != specs[min(specs)]:
                raise CheckpointError(
                    f"shards {min(specs)} and {number} hold rows with different columns: "
                    f"{specs[min(specs)]} and {specs[number]}; an earlier checkpoint is unchanged. "
                    "Empty the buffer, and write rows with the same columns to all shards"
                )
        writer.commit(entries, extra or {})


def _heads(
    shards: Sequence[Shard | None], lost: Lost
) -> tuple[dict[int, Head], list[Shard | None]]:
    """Return the heads by shard number, and ``shards`` with None for each shard without a head.

    All heads are taken before any row is saved, because otherwise a shard that answers late would
    save rows that were written after the other shards had begun.
    """
    found = _for_each(shards, lambda _, shard: shard.head(), lost)
    heads = {number: head for number, head in enumerate(found) if head is not None}
    return heads, [shard if number in heads else None for number, shard in enumerate(shards)]


def _for_each(
    shards: Sequence[Shard | None], function: Callable[[int, Shard], Any], lost: Lost
) -> list[Any]:
    """Return the results in the order of the shards. Several shards are processed in parallel."""
    if len(shards) == 1:
        assert shards[0] is not None
        return [function(0, shards[0])]
    found: list[Any] = [None] * len(shards)
    with ThreadPoolExecutor(len(shards), "torchrl_dist-checkpoint") as pool:
        futures = {
            number: pool.submit(function, number, shard)
            for number, shard in enumerate(shards)
            if shard is not None
        }
        for number, future in futures.items():
            try:
                found[number] = future.result()
            except (DeadlineError, PeerLostError) as error:
                lost(number, error)
    return found


def restore(shards: Sequence[Shard], capacity: int, saved: Sequence[SavedShard | None]) -> None:
    """Replace the contents of the shards, for all processes. Other processes may write meanwhile.

    Args:
        capacity: slots of each shard.
        saved: any number of saved shards of any capacity; see :func:`snapshot.deal`.

    Warns:
        UserWarning: there is no room for all rows. The message says how many were left out.

    Raises:
        ConfigurationError: the saved rows have another spec. Nothing was changed.
        CheckpointError: the saved data are damaged. Nothing was changed.
        DirectoryError: a disk has no room for the rows. No row was changed.
        DeadlineError, PeerLostError: a shard did not answer, or other processes kept writing some
            of its slots. The buffer is restored in part.
    """
    for each in saved:
        if each is not None:
            each.check()
    saved = snapshot.with_one_alpha(saved)
    targets, left_out = snapshot.deal(saved, len(shards), capacity)
    specs = [head.spec for each in saved if each is not None and (head := each.head).spec]
    if any(spec != specs[0] for spec in specs):
        raise CheckpointError(
            "the saved shards hold rows with different columns; use another checkpoint"
        )
    fitting = [_fitting(shard, saved, specs[0]) if specs else saved for shard in shards]
    for shard in shards:
        if specs:
            shard.make_room(specs[0])
    for shard, target, fit in zip(shards, targets, fitting, strict=True):
        _restore_shard(shard, target, fit)
    if left_out:
        warnings.warn(
            f"the checkpoint has {left_out} more rows than the {capacity * len(shards)} that this "
            "buffer can hold; the oldest rows were left out",
            stacklevel=4,
        )


def _fitting(
    shard: Shard, saved: Sequence[SavedShard | None], spec: RowSpec
) -> Sequence[SavedShard | None]:
    """Convert saved rows with ``spec`` to the spec that the shard's rows have or will have."""
    own = shard.row_spec(spec)
    snapshot.require_same(own, spec)
    if own == spec:
        return saved
    return [
        replace(each, columns=rows.fitted(each.columns, spec, own))
        if each and each.columns
        else each
        for each in saved
    ]


def _restore_shard(
    shard: Shard, target: snapshot.Target, saved: Sequence[SavedShard | None]
) -> None:
    since = shard.begin_restore(target.head)
    for piece in snapshot.pieces_in_chunks(target):
        source = saved[piece.shard]
        assert source is not None
        part = slice(piece.row, piece.row + piece.count)
        arrays = [column[part] for column in source.columns]
        leaf, alpha = source.leaf[part], target.head.alpha
        shard.restore_rows(RestoredRows(since, piece.slot, piece.version, leaf, alpha, arrays))


class SavedStorage:
    """Saving and restoring, for storages over one or more directories.

    A checkpoint can be loaded into a buffer with any number of shards and any capacity. If the
    number and the capacity are the same as in the saved buffer, every row keeps its slot and
    generation. Otherwise :func:`snapshot.deal` assigns new slots and generations.
    """

    max_size: int

    def shards(self) -> Sequence[Shard | None]:
        """Return the shards, with None for a shard that does not answer."""
        raise NotImplementedError

    def shard_lost(self, number: int, error: Exception) -> None:
        """Record that a shard did not answer. Raise the error if too few shards are left."""
        raise error

    def snapshot(self) -> list[SavedShard | None]:
        """Return a copy of all rows, with slots, generations and priorities. Other processes may
        write meanwhile, so rows may be from different instants, but each row is whole."""
        return save_in_memory(self.shards(), self.shard_lost)

    def restore(self, saved: Sequence[SavedShard | None]) -> None:
        """Replace the content by a snapshot, for all processes; see :func:`restore`."""
        restore(shards := self._all_shards(), self.max_size // len(shards), saved)

    def _all_shards(self) -> list[Shard]:
        shards = []
        for number, shard in enumerate(self.shards()):
            if shard is None:
                raise PeerLostError(
                    f"replay shard {number} does not answer; restore when all shards answer"
                )
            shards.append(shard)
        return shards

    def dumps(self, path: str | os.PathLike[str], extra: Mapping[str, Any] | None = None) -> None:
        """Write all rows to a folder, as a checkpoint that replaces an earlier one.

        Blocks for as long as the disk takes. Other processes sample and write meanwhile. The
        checkpoint has the rows that the buffer had at the start, except rows that were overwritten
        before they could be copied. Each row is whole, with a priority that it had during this
        call. After a crash, the earlier checkpoint is still valid. Shards that do not answer are
        left out with a warning, and the checkpoint says which shards are missing.

        Args:
            path: the folder, which is made if it does not exist.
            extra: values that the buffer adds; see :meth:`disk.DumpWriter.commit`.

        Raises:
            CheckpointError: the disk is full or cannot be written, or another process is writing
                there.
        """
        save_to_disk(Path(path), self.shards(), self.shard_lost, extra)

    def loads(self, path: str | os.PathLike[str]) -> None:
        """Restore the checkpoint that :meth:`dumps` wrote; see :func:`restore`.

        Raises:
            CheckpointError: there is no checkpoint, or it is damaged. Nothing was changed.
        """
        self.restore(read_dump(Path(path))[0])

    def state_dict(self) -> dict[str, Any]:
        """Return :meth:`snapshot` as tensors and plain values."""
        return as_state(self.snapshot())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the result of :meth:`state_dict`; see :meth:`restore`."""
        self.restore(from_state(state_dict))


# --- as plain values, for state_dict -------------------------------------------------------------


def as_state(saved: Sequence[SavedShard | None]) -> dict[str, Any]:
    """Return saved shards as tensors and plain values."""
    return {"shards": [None if each is None else _shard_state(each) for each in saved]}


def _shard_state(saved: SavedShard) -> dict[str, Any]:
    spec = saved.head.spec
    return {
        "head": saved.head.as_json(),
        "runs": torch.from_numpy(saved.runs),
        "leaf": torch.from_numpy(saved.leaf),
        "rows": [] if spec is None else rows.tensors(as_stored(saved.columns, spec), spec),
    }


def from_state(state: dict[str, Any]) -> list[SavedShard | None]:
    """Invert :func:`as_state`.

    Raises:
        CheckpointError: ``state`` is something else, such as the state of a TorchRL storage.
    """
    if not isinstance(state, Mapping) or "shards" not in state:
        found = sorted(map(str, state)) if isinstance(state, Mapping) else type(state).__name__
        raise CheckpointError(
            f"expected the state_dict() of a shared storage, got {found}; load the state of a "
            "TorchRL storage into a TorchRL storage of the same class, and pass its rows to "
            "extend() of this buffer"
        )
    try:
        return [None if each is None else _saved_shard(each) for each in state["shards"]]
    except CheckpointError:
        raise
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise CheckpointError(
            f"this state_dict() of a shared storage has missing or wrong entries ({error!r}); load "
            "another state_dict()"
        ) from error


def _saved_shard(state: dict[str, Any]) -> SavedShard:
    head = Head.from_json(state["head"])
    stored = [array_of(tensor) for tensor in state["rows"]]
    columns = [] if head.spec is None else as_columns(stored, head.spec)
    return SavedShard(head, array_of(state["runs"]), array_of(state["leaf"]), columns)
