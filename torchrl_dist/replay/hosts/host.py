"""Serve a replay directory to clients, as a plain local object.

Clients on other nodes call a host in the process that stores the rows. A client on the node of that
process makes its own host, for the same directory.

A client sends one :class:`Request` after another, each with operations and a draw, and gets a
:class:`Reply` to each. The host applies the operations in order, and then draws. The drawn rows
therefore reflect all operations of the same request, and a client reads its own writes. The host
knows nothing about its clients. All operations are applied once and in order, because a client
sends a request only after the reply to the previous one, and never repeats a request.

A host does not know whether it serves a whole buffer or one shard of a larger buffer.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import math
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase

from torchrl_dist.errors import ConfigurationError
from torchrl_dist.forks import renewed
from torchrl_dist.replay.hosts.merging import parts_of
from torchrl_dist.replay.hosts.messages import (
    CountSamples,
    Failure,
    HostState,
    Invoke,
    Law,
    Operation,
    Reply,
    Request,
    SetPriorities,
    SliceLaw,
    Write,
)
from torchrl_dist.replay.law.limiter import Counts
from torchrl_dist.replay.node.cursor import SharedCursor
from torchrl_dist.replay.node.priorities import update
from torchrl_dist.replay.node.tables import Word
from torchrl_dist.replay.node.times_sampled import TooFewDrawsError, give_back
from torchrl_dist.replay.parts.drawn import Drawn
from torchrl_dist.replay.parts.passes import Passes, take_of_pass
from torchrl_dist.replay.parts.sampler import (
    SharedPrioritizedSampler,
    SharedRandomSampler,
    SharedSampler,
)
from torchrl_dist.replay.parts.slices import SharedPrioritizedSliceSampler, SharedSliceSampler
from torchrl_dist.replay.parts.storage import SharedMemmapStorage
from torchrl_dist.replay.row.packing import Part, pack, spec_from_text, unpack
from torchrl_dist.replay.row.spec import ORDER
from torchrl_dist.replay.row.stacks import values
from torchrl_dist.replay.saving.disk import Ends, RowFiles, after
from torchrl_dist.replay.saving.shards import RestoredRows, Shard
from torchrl_dist.replay.saving.snapshot import Chunk, Head, save_chunk
from torchrl_dist.tensors import array_of

_MOST_SLICERS = 4  # few, because each sampler keeps a copy of the trajectory ids of all rows

_Written = dict[int, tuple[np.ndarray, np.ndarray]]
"""The slots and generations that the writes of a request got, by the numbers of the writes."""


@contextlib.contextmanager
def _listed(failures: list[Failure], position: int) -> Iterator[None]:
    """Append an exception of the block to ``failures`` instead of raising it."""
    try:
        yield
    except Exception as error:
        failures.append(_failure(error, position))


def _failure(error: Exception, position: int) -> Failure:
    message = traceback.format_exception_only(error)[-1].strip()
    return Failure(position, message, "".join(traceback.format_exception(error)))


class ReplayHost(Shard):
    """Serves one replay directory. Every thread may call every method.

    Args:
        storage: the directory's storage in this process. ``close`` closes it.
    """

    def __init__(self, storage: SharedMemmapStorage) -> None:
        super().__init__(SharedCursor(storage.directory))
        self._storage = storage
        self._uniform = SharedRandomSampler()
        self._prioritized: SharedPrioritizedSampler | None = None
        self._slicers: dict[Law, SharedSampler] = {}  # the least recently used first
        self._passes: Passes | None = None
        self._slicing = renewed(self, "_slicing", threading.RLock)

    @property
    def storage(self) -> SharedMemmapStorage:
        return self._storage

    def use_priorities(self, alpha: float, eps: float) -> None:
        """Prepare prioritized draws. Every prioritized client calls this method once before its
        draws.

        Raises:
            ConfigurationError: other clients use another ``alpha`` or ``eps``.
        """
        sampler = SharedPrioritizedSampler(self._storage.max_size, alpha, 0.0, eps)
        sampler.attach(self._storage)
        self._prioritized = sampler

    def serve(self, request: Request) -> Reply:
        """Apply the operations, then draw. Blocks only for the directory's lock.

        The reply lists the operations that failed.
        """
        failures: list[Failure] = []
        with _listed(failures, -1):
            self.raise_max_priority(request.max_priority, request.era)
        known: _Written = {}
        written, results = [], []
        for position, operation in enumerate(request.operations):
            result = self._try(operation, known, failures, position)
            if isinstance(operation, Write):
                written.append(result)
            elif isinstance(operation, Invoke):
                results.append(result)
        drawn: dict[str, Any] = {"largest": self.largest_priority()}
        if request.draw is not None:
            try:
                drawn |= self._draw_packed(request.draw, request.law)
            except Exception as error:
                drawn["draw_failure"] = _failure(error, len(request.operations))
        return Reply(tuple(written), tuple(results), tuple(failures), **drawn)

    def _try(
        self, operation: Operation, known: _Written, failures: list[Failure], position: int
    ) -> Any:
        """Return the result of :meth:`apply`. For a ``Write`` that failed, return slots and
        generations of -1."""
        parts: list[Operation] = []
        with _listed(failures, position):
            try:
                return self.apply(operation, known)
            except ConfigurationError:
                # Nothing was applied, but perhaps only one of the merged parts is invalid.
                parts = parts_of(operation)
                if len(parts) == 1:
                    raise
        if parts[1:]:
            found = [self._try(part, known, failures, position) for part in parts]
            if isinstance(operation, Write):
                return tuple(np.concatenate(column) for column in zip(*found, strict=True))
        elif isinstance(operation, Write):
            lost = np.full(operation.count, -1, dtype=np.int64)
            return lost, lost
        return None

    def apply(self, operation: Operation, known: _Written | None = None) -> Any:
        """Apply one operation. Errors of the operation are raised.

        Args:
            known: the earlier writes of the request. Operations of a client in this process belong
                to no request.

        Returns:
            For a ``Write``, slots and generations, int64 [n] each. For an ``Invoke``, the method's
            result.
        """
        known = {} if known is None else known
        if isinstance(operation, Write):
            return self._write(operation, known)
        if isinstance(operation, Invoke):
            return getattr(self, operation.method)(*operation.args)
        if isinstance(operation, CountSamples):
            if self._storage.directory.gate is not None:
                self._storage.directory.gate.count_samples(operation.rows)
            return None
        if isinstance(operation, SetPriorities):
            slot, generation = operation.slot, operation.generation
        elif operation.number in known:
            slot, generation = known[operation.number]
        else:  # the rows were refused
            self._storage.directory.count(Word.STALE_UPDATES, operation.priority.size)
            return None
        self._sampler()  # raises if there is no sampler
        update(self._storage.directory, slot, operation.priority, generation)
        return None

    def _write(self, write: Write, known: _Written) -> tuple[np.ndarray, np.ndarray]:
        spec = spec_from_text(write.spec)
        index, generation = self._storage.append_columns(
            spec, values(unpack(write.packed), spec), write.priority
        )
        slots, generations = index.numpy(), generation.numpy()
        start = 0
        for number, count in write.parts:
            known[number] = slots[start : start + count], generations[start : start + count]
            start += count
        return slots, generations

    def set_alpha(self, alpha: float) -> None:
        """Change the priority exponent for all processes."""
        self._sampler().alpha = alpha

    def empty(self, reset_write_count: bool, era: int) -> None:
        """Drop all rows for all processes, and begin a new era."""
        with self._new_era(era):
            self._storage.empty(reset_write_count=reset_write_count)

    def return_draws(self, slot: np.ndarray, generation: np.ndarray, leaf: np.ndarray) -> None:
        """Undo draws of rows that will not be used, so that these draws do not count for
        ``max_times_sampled``.

        ``leaf``: the rows' leaves at the draw. All arrays are [n]."""
        directory = self._storage.directory
        if directory.times_sampled is not None and directory.gate is not None:
            give_back(directory, slot, generation, leaf)
            directory.gate.ring()

    def _sampler(self) -> SharedPrioritizedSampler:
        if self._prioritized is None:
            raise ConfigurationError(
                "no client of this buffer samples by priority; use RPCPrioritizedSampler, or do "
                "not set priorities"
            )
        return self._prioritized

    @contextlib.contextmanager
    def _new_era(self, era: int) -> Iterator[None]:
        """Begin a new era. While the ``with`` block drops the rows, hosts and clients do not
        exchange largest priorities."""
        words = self._storage.directory.words
        words[Word.ERA] = -1
        try:
            yield
        finally:
            words[Word.ERA] = era

    def raise_max_priority(self, value: float, era: int) -> None:
        """Record the largest priority that a client knows. Ignore NaN, and priorities of other
        eras."""
        directory = self._storage.directory
        if not math.isnan(value) and not directory.get_float(Word.MAX_PRIORITY) >= value:
            with directory.lock():
                known = directory.get_float(Word.MAX_PRIORITY)
                if directory.words[Word.ERA] == era and not known >= value:
                    directory.set_float(Word.MAX_PRIORITY, value)
                    directory.words[Word.MAX_SLOT] = -1

    def largest_priority(self) -> tuple[float, int]:
        """Return the largest priority seen, or NaN, and its era."""
        # read the era first, so that the largest priority is of this era or a later one
        era = self._storage.directory.words[Word.ERA]
        return self._storage.directory.get_float(Word.MAX_PRIORITY), era

    def draw(self, count: int, law: Law, *, stored: bool = False) -> tuple[HostState, Drawn | None]:
        """Draw ``count`` rows or slices. Return the host's state, and the rows.

        There may be fewer rows than ``count``, or None, as in a :class:`Reply`. With ``stored``,
        the rows are in their stored form, see ``row.stacks``."""
        directory = self._storage.directory
        words = directory.words
        if law.slices is None:
            drawn, mass, minimum = self._draw_rows(count, law, stored)
        else:
            drawn, mass, minimum = self._draw_slices(count, law, law.slices, stored)
        if drawn is not None and directory.gate is None:
            directory.count(Word.DRAWN, drawn.index.numel())
        largest, era = self.largest_priority()
        state = HostState(
            directory.length,
            directory.high,
            int(words[Word.CURSOR]),
            int(words[Word.WRITE_COUNT]),
            mass,
            minimum,
            largest,
            directory.get_float(Word.ALPHA),
            era,
            *(() if directory.gate is None else directory.gate.counts()),
        )
        return state, drawn

    def _draw_rows(self, count: int, law: Law, stored: bool) -> tuple[Drawn | None, float, float]:
        """Draw rows or windows. Return the drawn rows or windows, the mass of all rows, and the
        smallest leaf."""
        if law.window is None:
            return self._draw_by(self._sampler_of(law), count, stored)
        with self._slicing:
            return self._draw_by(self._cached(law, self._windower), count, stored)

    def _sampler_of(self, law: Law) -> SharedSampler:
        return self._sampler() if law.prioritized else self._uniform

    def _draw_by(
        self, sampler: SharedSampler, count: int, stored: bool
    ) -> tuple[Drawn | None, float, float]:
        directory = self._storage.directory
        while count and directory.length:
            try:
                drawn = sampler.draw(self._storage, count, stored=stored)
                return drawn, drawn.mass, drawn.minimum
            except TooFewDrawsError as error:
                count = error.left  # take what is left, because a host must not wait
            except RuntimeError:
                if directory.length:
                    raise
        if isinstance(sampler, SharedPrioritizedSampler):
            with directory.lock():
                directory.tree.refresh()
                return None, directory.tree.total, directory.tree.minimum
        used_up = directory.times_sampled is not None
        return None, float(directory.words[Word.AVAILABLE] if used_up else directory.length), 1.0

    def _draw_slices(
        self, count: int, law: Law, slices: SliceLaw, stored: bool
    ) -> tuple[Drawn | None, float, float]:
        """Draw slices, if there are any. See :meth:`SharedSliceSampler.draw_slices`."""
        key = replace(law, slices=replace(slices, slice_len=1))
        with self._slicing:  # without a deadline, because the work inside has deadlines
            sampler = self._cached(key, self._slicer)
            sampler.slice_len = slices.slice_len
            return sampler.draw_slices(self._storage, count, stored=stored)

    def _cached(self, law: Law, build: Callable[[Law], Any]) -> Any:
        """Return the cached sampler for a law. Such a sampler keeps a copy of the rows' order.
        Called under ``_slicing``."""
        sampler = self._slicers.pop(law, None) or build(law)
        while len(self._slicers) >= _MOST_SLICERS:
            del self._slicers[next(iter(self._slicers))]
        self._slicers[law] = sampler
        return sampler

    def _windower(self, law: Law) -> SharedSampler:
        sampler = copy.copy(self._sampler_of(law))
        sampler.attach(self._storage)
        assert law.window is not None
        sampler.draw_windows(law.window, self._storage)
        return sampler

    def number_rows(self) -> None:
        """See ``ReplayDirectory.ask_for_numbers``."""
        self._storage.directory.ask_for_numbers(ORDER)

    def _slicer(self, law: Law) -> SharedSliceSampler:
        slices, prioritized = law.slices, law.prioritized
        assert slices is not None
        options = {name: value for name, value in vars(slices).items() if name != "consecutive"}
        if prioritized:
            shared = self._sampler()
            capacity, exponents = self._storage.max_size, (shared.alpha, 0.0, shared.eps)
            sampler: Any = SharedPrioritizedSliceSampler(capacity, *exponents, **options)
        else:
            sampler = SharedSliceSampler(**options)
        sampler.consecutive = slices.consecutive
        return sampler

    def _draw_packed(self, count: int, law: Law) -> dict[str, Any]:
        """Draw, and return the fields of a reply that describe the draw."""
        state, drawn = self.draw(count, law, stored=True)
        return {"state": state, **({} if drawn is None else self._pack(drawn))}

    def _pack(self, drawn: Drawn) -> dict[str, Any]:
        handles = [drawn.index.numpy(), drawn.generation.numpy(), drawn.leaf]
        # not copied, because nothing else refers to the tensors
        packed = pack([*handles, *map(array_of, drawn.tensors)], copy=False)
        lengths = None if drawn.lengths is None else drawn.lengths.numpy()
        anchors = None if drawn.anchors is None else drawn.anchors.numpy()
        return {
            "count": drawn.units,
            "spec": drawn.spec.text,
            "packed": packed,
            "lengths": lengths,
            "anchors": anchors,
        }

    # --- reading and replacing rows; clients use ``Invoke`` for methods that change rows -------

    def read(self, slots: torch.Tensor) -> tuple[str, list[Part]]:
        """Return the rows in slots, int64 [n]: their spec as text, and their packed columns.

        This process need not have imported the rows' tensorclasses."""
        _, columns = self._storage.columns_at(slots.numpy())
        assert self._storage.directory.rows is not None
        return self._storage.directory.rows.text, pack(columns, copy=False)

    def take_of_pass(
        self, number: int, count: int, shuffle: bool
    ) -> tuple[int, int, int, str, list[Part]]:
        """Draw rows that no process has drawn yet in pass ``number``, see ``passes``.

        Returns:
            The number of the present pass, how many rows are left in it, how many rows the shard
            has, and the drawn rows: their spec as text, and packed slots, generations and columns.
        """
        directory = self._storage.directory
        if directory.rows is None:
            return 0, 0, 0, "", []
        if self._passes is None:
            with directory.lock():
                self._passes = Passes(directory)
        order = (lambda n: np.random.default_rng().permutation(n)) if shuffle else None
        slots, generation, columns, now, left = take_of_pass(
            self._storage, self._passes, number, count, order
        )
        packed = pack([slots, generation, *columns], copy=False)
        return now, left, directory.length, directory.rows.text, packed

    def generations_of(self, slots: np.ndarray) -> np.ndarray:
        """Return the generations of the rows in slots, int64 [n], with -1 for a slot without a
        published row."""
        return self._storage.generations_of(torch.from_numpy(slots)).numpy()

    def agree_on_rows(self, spec: str) -> str:
        """Create the files for rows of this spec, unless the shard already has files. Return the
        spec of the shard's rows.

        Raises:
            DirectoryError: there is no room for the files.
        """
        directory = self._storage.directory
        directory.create_rows(spec_from_text(spec))
        assert directory.rows is not None
        return directory.rows.text

    def write_at(self, slots: torch.Tensor, data: TensorDictBase) -> torch.Tensor:
        """See ``SharedMemmapStorage.write_at``. Return the new generations, int64 [n]."""
        return self._storage.write_at(slots, data)

    def update_if_present(
        self, slots: np.ndarray, generation: np.ndarray, *how: Any
    ) -> tuple[np.ndarray, np.ndarray]:
        """See ``SharedMemmapStorage.update_if_present``."""
        index, stamps = torch.from_numpy(slots), torch.from_numpy(generation)
        updated, rejected = self._storage.update_if_present(index, stamps, *how)
        return updated.numpy(), rejected.numpy()

    def retire(self, oldest: int, version_key: Any) -> int:
        """See ``SharedMemmapStorage.retire``."""
        return self._storage.retire(oldest, version_key)

    # --- saving; the base class has the rest -------------------------------------------------

    def save_chunk(
        self, cursor: int, alpha: float | None, start: int, stop: int
    ) -> tuple[Chunk, list[Part]]:
        """Return a packed copy of the rows in a range of slots, see ``snapshot.save_chunk``."""
        copied: list[np.ndarray] = []

        def copy(arrays: list[np.ndarray]) -> None:
            copied[:] = [array.copy() for array in arrays]

        directory = self._storage.directory
        chunk = save_chunk(directory, cursor, alpha, start, stop, copy)
        return chunk, pack(copied, copy=False)

    def reaches(self, folder: str) -> bool:
        """Return whether this process can access and write to a shard's files in ``folder``.

        Another machine's disk cannot have a folder of the same name, because a part of the name is
        random."""
        with contextlib.ExitStack() as steps:
            try:
                RowFiles(Path(folder), self._storage.directory.rows, steps)
            except OSError:
                return False
            return True

    def save_chunks_to(
        self,
        folder: str,
        ends: Ends,
        cursor: int,
        alpha: float | None,
        ranges: Sequence[tuple[int, int]],
    ) -> list[Chunk]:
        """Write the rows in ``ranges`` of slots to a shard's files, starting at positions ``ends``.

        Blocks until the rows are on the disk, because a host works only during calls.

        Raises:
            OSError: the disk is full, or the files do not exist any more.
        """
        directory = self._storage.directory
        chunks = []
        with contextlib.ExitStack() as steps:
            files = RowFiles(Path(folder), directory.rows, steps)
            for start, stop in ranges:
                write = functools.partial(files.write, ends)
                chunk = save_chunk(directory, cursor, alpha, start, stop, write)
                chunks.append(chunk._replace(parts=files.parts))
                ends = after(ends, files.parts)
            files.end(ends)
        return chunks

    def begin_restore_of(self, head: Head, era: int) -> int:
        """Do what ``begin_restore`` does, and begin a new era."""
        with self._new_era(era):
            return self.begin_restore(head)

    def restore_rows(self, rows: RestoredRows) -> None:
        """Publish saved rows whose arrays are packed."""
        super().restore_rows(rows._replace(arrays=unpack(rows.arrays)))

    # --- after a restart, see ``owner`` -------------------------------------------------------

    def standing(self) -> tuple[int, Counts | None]:
        """Return the era, and the counts for the rate limiter."""
        directory = self._storage.directory
        counts = None if directory.gate is None else directory.gate.counts()
        return int(directory.words[Word.ERA]), counts

    def settle(self, era: int, agreed: int, samples: int) -> None:
        """Add ``samples`` to the number of samples. Set the era to ``agreed`` if the present era is
        still ``era``."""
        directory = self._storage.directory
        with directory.lock():
            if directory.words[Word.ERA] == era:
                directory.words[Word.ERA] = agreed
            if samples:
                directory.words[Word.SAMPLED] = max(0, directory.words[Word.SAMPLED] + samples)
        if directory.gate is not None:
            directory.gate.ring()

    def counters(self) -> dict[str, int]:
        """Return ``directory.counters``."""
        return self._storage.directory.counters

    def close(self, clean: bool = True) -> None:
        """Leave the directory. Idempotent.

        With ``clean``, remove the directory if this was its last process."""
        self._storage.close(clean=clean)
