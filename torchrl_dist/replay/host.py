"""The process that keeps a replay directory for clients on other nodes: a plain local object.

A client sends :class:`Request` after :class:`Request`, each with operations and a draw, and gets a
:class:`Reply` to each. The host applies the operations in order, *exactly once*: requests of a
client are numbered, a repeated one changes nothing and gets the same reply. (A call that ran out of
time still runs, so whoever sends it again must not apply it twice.) Then it draws, so the rows
reflect all operations of the same request: a client reads its own writes.

One host serves a buffer by itself, or keeps one shard of a larger one; it does not know which.
"""

from __future__ import annotations

import contextlib
import functools
import math
import threading
import traceback
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import TensorDictBase

from torchrl_dist.errors import ConfigurationError
from torchrl_dist.replay import rows
from torchrl_dist.replay.directory import Word, array_of
from torchrl_dist.replay.draws import TooFewDrawsError, give_back
from torchrl_dist.replay.dump import RowFiles
from torchrl_dist.replay.packing import (
    columns_of,
    pack,
    spec_from_text,
    unpack,
)
from torchrl_dist.replay.priorities import update
from torchrl_dist.replay.sampler import Drawn, SharedPrioritizedSampler, SharedRandomSampler
from torchrl_dist.replay.snapshot import Chunk, Head, save_chunk
from torchrl_dist.replay.storage import SharedMemmapStorage

# Writes whose slots the host remembers per client, for priorities that were sent before the client
# knew the slots. It remembers all of the last request: such priorities are in it or in the next.
_REMEMBERED_WRITES = 64


# ---- operations


@dataclass(frozen=True)
class Write:
    """Append rows.

    Attributes:
        spec: the row spec as text, see ``packing``.
        count: number of rows.
        packed: their tensors.
        priority: float64 [count], before alpha and eps; None: the largest one seen.
        number: counts the writes of the client, so that ``SetWrittenPriorities`` can name this.
    """

    spec: str
    count: int
    packed: Sequence[torch.Tensor]
    priority: np.ndarray | None
    number: int


@dataclass(frozen=True)
class SetPriorities:
    """New priorities, float64 [n], for slots; rows of other generations are left alone."""

    slot: np.ndarray
    generation: np.ndarray | None
    priority: np.ndarray


@dataclass(frozen=True)
class SetWrittenPriorities:
    """New priorities for the rows of an earlier ``Write`` of this client."""

    number: int
    priority: np.ndarray


@dataclass(frozen=True)
class SetAlpha:
    """Change the priority exponent, for everybody."""

    alpha: float


@dataclass(frozen=True)
class UsePriorities:
    """See ``ReplayHost.use_priorities``."""

    alpha: float
    eps: float


@dataclass(frozen=True)
class Empty:
    """Drop all rows, for everybody."""

    reset_write_count: bool
    era: int


@dataclass(frozen=True)
class CountSamples:
    """So many rows of this host were returned by samples; for the rate limiter."""

    rows: int


@dataclass(frozen=True)
class ReturnDraws:
    """Drawn rows that nobody is going to use, with the leaves they were drawn by, [n] each; they
    are not to count for ``max_times_sampled``."""

    slot: np.ndarray
    generation: np.ndarray
    leaf: np.ndarray


Operation = (
    Write
    | SetPriorities
    | SetWrittenPriorities
    | SetAlpha
    | UsePriorities
    | Empty
    | CountSamples
    | ReturnDraws
)


# ---- messages


@dataclass(frozen=True)
class Request:
    """What a client sends.

    Attributes:
        client: its name, unique in the job.
        incarnation: grows each time that a client of this name starts anew; its numbering starts
            again at 1 then.
        sequence: 1, 2, ...; the next is sent when the last was answered.
        operations: applied in this order, whatever becomes of the others.
        draw: rows wanted; 0: the state only; None: neither.
        prioritized: whether rows are drawn by priority or uniformly.
        max_priority: the largest priority that the client knows of, NaN for none: in a sharded
            buffer the other shards' rows count, too.
        era: of that priority; in another one the host leaves it alone.
    """

    client: str
    incarnation: int
    sequence: int
    operations: tuple[Operation, ...] = ()
    draw: int | None = None
    prioritized: bool = True
    max_priority: float = math.nan
    era: int = 0


class HostState(NamedTuple):
    """A host's directory at one instant.

    ``mass`` and ``minimum``: sum and smallest of all rows' masses, 0 and inf if there are none.
    ``max_priority``: before alpha; NaN before the first. ``era``: another number after each
    emptying and restore of the buffer, equal in all its shards; -1 while one is under way. Largest
    priorities go from shard to shard within an era only: a client that remembers one from before
    does not bring it back. The last three are for the rate limiter.
    """

    length: int
    high: int
    cursor: int
    write_count: int
    mass: float
    minimum: float
    max_priority: float
    alpha: float
    era: int
    inserts: int = 0
    samples: int = 0
    size: int = 0


class Failure(NamedTuple):
    """An operation that raised; the others were applied."""

    message: str
    trace: str


@dataclass(frozen=True)
class Reply:
    """The host's answer.

    Attributes:
        sequence: of the request.
        written: slot and generation, int64 [n] each, of every ``Write`` in the request; -1 for
            rows that were not kept.
        failures: of operations, or of the draw.
        state: at the draw; None if none was asked for.
        count: rows drawn: as many as wanted; fewer if those that may be sampled do not have so many
            draws left; 0 if the buffer is empty.
        spec: row spec of the drawn rows as text.
        packed: slot, generation, mass of each row, then the rows; see ``unpack_rows``.
    """

    sequence: int
    written: tuple[tuple[np.ndarray, np.ndarray], ...] = ()
    failures: tuple[Failure, ...] = ()
    state: HostState | None = None
    count: int = 0
    spec: str = ""
    packed: Sequence[torch.Tensor] = ()

    def unpack_rows(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[torch.Tensor]]:
        """``(slot, generation, leaf, tensors)``: int64, int64, float64 [count], rows [count, ...]
        in the order of the spec."""
        handles = [(dtype, (self.count,)) for dtype in (torch.int64, torch.int64, torch.float64)]
        columns = handles + columns_of(spec_from_text(self.spec), self.count)
        slot, generation, leaf, *tensors = unpack(self.packed, columns)
        return slot, generation, leaf, tensors


# ---- the host


@dataclass
class _Client:
    """What the host keeps about a client: one reply, and the slots of its last writes."""

    incarnation: int
    sequence: int = 0
    reply: Reply | None = None
    written: OrderedDict[int, tuple[np.ndarray, np.ndarray]] = field(default_factory=OrderedDict)
    lock: threading.Lock = field(default_factory=threading.Lock)


def _trim(client: _Client, at_least: int) -> None:
    """Forget the oldest writes, but for so many."""
    while len(client.written) > max(_REMEMBERED_WRITES, at_least):
        client.written.popitem(last=False)


class ReplayHost:
    """Serves one replay directory. All methods may be called by any thread.

    Memory per client: its last reply, and slots and generations of its last 64 writes and of all in
    its last request. ``forget`` drops both.

    Args:
        storage: the directory's storage in this process; closed by ``close``.
    """

    def __init__(self, storage: SharedMemmapStorage) -> None:
        self._storage = storage
        (self._shard,) = storage.shards()
        self._uniform = SharedRandomSampler()
        self._prioritized: SharedPrioritizedSampler | None = None
        self._clients: dict[str, _Client] = {}
        self._lock = threading.Lock()

    @property
    def storage(self) -> SharedMemmapStorage:
        return self._storage

    def use_priorities(self, alpha: float, eps: float) -> None:
        """Prepare prioritized draws; every prioritized client calls it once, before them.

        Raises:
            ConfigurationError: others use another ``alpha`` or ``eps``.
        """
        sampler = SharedPrioritizedSampler(self._storage.max_size, alpha, 0.0, eps)
        sampler.attach(self._storage)
        self._prioritized = sampler

    def serve(self, request: Request) -> Reply:
        """Apply the operations once, then draw. Blocks for the directory's lock only.

        Operations that fail are listed in the reply.

        Raises:
            ConfigurationError: the request is older than what the client sent last, or one
                before it never came.
        """
        client = self._client_of(request)
        with client.lock:  # a repeated request waits for the first one
            if request.sequence == client.sequence:
                assert client.reply is not None
                return client.reply
            if request.sequence != client.sequence + 1:
                raise ConfigurationError(
                    f"client {request.client} sent request {request.sequence}, expected "
                    f"{client.sequence + 1}: an earlier one was lost, or this one came late"
                )
            client.reply = self._run(request, client)
            client.sequence = request.sequence
            return client.reply

    def _client_of(self, request: Request) -> _Client:
        with self._lock:
            client = self._clients.get(request.client)
            if client is None or client.incarnation < request.incarnation:
                client = self._clients[request.client] = _Client(request.incarnation)
            elif client.incarnation > request.incarnation:
                raise ConfigurationError(
                    f"client {request.client} has started anew; this request is of its earlier life"
                )
            return client

    def forget(self, name: str) -> None:
        """The client of this name has ended."""
        with self._lock:
            self._clients.pop(name, None)

    def _run(self, request: Request, client: _Client) -> Reply:
        failures: list[Failure] = []

        def attempt(function: Callable[..., Any], *args: Any) -> Any:
            try:
                return function(*args)
            except Exception as error:
                message = traceback.format_exception_only(error)[-1].strip()
                failures.append(Failure(message, traceback.format_exc()))
                return None

        if not math.isnan(request.max_priority):
            attempt(self._raise_max_priority, request.max_priority, request.era)
        written = []
        for operation in request.operations:
            result = attempt(self._apply, operation, client)
            if isinstance(operation, Write):
                lost = np.full(operation.count, -1, dtype=np.int64)
                written.append((lost, lost) if result is None else result)
        _trim(client, len(written))
        answer = None
        if request.draw is not None:
            answer = attempt(self._draw_packed, request.draw, request.prioritized)
        return Reply(request.sequence, tuple(written), tuple(failures), *(answer or ()))

    def apply(
        self,
        operation: Operation,
        client: str,
        incarnation: int,
        *,
        max_priority: float = math.nan,
        era: int = 0,
    ) -> Any:
        """Apply one operation of a client in this very process; raises what it raises.

        Returns:
            For a ``Write`` slot and generation, int64 [n] each.
        """
        if not math.isnan(max_priority):
            self._raise_max_priority(max_priority, era)
        known = self._client_of(Request(client, incarnation, 0))
        result = self._apply(operation, known)
        _trim(known, 0)
        return result

    def _apply(self, operation: Operation, client: _Client) -> Any:
        if isinstance(operation, Write):
            return self._write(operation, client)
        if isinstance(operation, SetAlpha):
            self._sampler().alpha = operation.alpha
            return None
        if isinstance(operation, UsePriorities):
            self.use_priorities(operation.alpha, operation.eps)
            return None
        if isinstance(operation, Empty):
            with self._new_era(operation.era):
                self._storage.empty(reset_write_count=operation.reset_write_count)
            return None
        if isinstance(operation, CountSamples):
            if self._storage.directory.gate is not None:
                self._storage.directory.gate.count_samples(operation.rows)
            return None
        if isinstance(operation, ReturnDraws):
            directory = self._storage.directory
            if directory.draws is not None and directory.gate is not None:
                give_back(directory, operation.slot, operation.generation, operation.leaf)
                directory.gate.ring()
            return None
        if isinstance(operation, SetPriorities):
            slot, generation = operation.slot, operation.generation
        elif operation.number in client.written:
            slot, generation = client.written[operation.number]
        else:  # so many writes ago that the rows count as gone
            self._storage.directory.count(Word.STALE_UPDATES, operation.priority.size)
            return None
        self._sampler()  # or an error
        update(self._storage.directory, slot, operation.priority, generation)
        return None

    def _write(self, write: Write, client: _Client) -> tuple[np.ndarray, np.ndarray]:
        spec = spec_from_text(write.spec)
        tensors = unpack(write.packed, columns_of(spec, write.count))
        data = rows.build(tensors, spec, (write.count,))
        index, generation = self._storage.append(data, write.priority, limited=False)
        written = index.numpy(), generation.numpy()
        client.written[write.number] = written
        return written

    def _sampler(self) -> SharedPrioritizedSampler:
        if self._prioritized is None:
            raise ConfigurationError("no client of this buffer samples by priority")
        return self._prioritized

    @contextlib.contextmanager
    def _new_era(self, era: int) -> Iterator[None]:
        """While the rows are dropped, no largest priority goes to other shards, or comes."""
        words = self._storage.directory.words
        words[Word.ERA] = -1
        try:
            yield
        finally:
            words[Word.ERA] = era

    def _raise_max_priority(self, value: float, era: int) -> None:
        directory = self._storage.directory
        if not directory.get_float(Word.MAX_PRIORITY) >= value:
            with directory.lock():
                known = directory.get_float(Word.MAX_PRIORITY)
                if directory.words[Word.ERA] == era and not known >= value:
                    directory.set_float(Word.MAX_PRIORITY, value)
                    directory.words[Word.MAX_SLOT] = -1

    def draw(
        self, count: int, prioritized: bool, max_priority: float = math.nan, era: int = 0
    ) -> tuple[HostState, Drawn | None]:
        """``count`` rows for a client in this very process, and the state they were drawn from;
        fewer, or None, as in a :class:`Reply`."""
        if not math.isnan(max_priority):
            self._raise_max_priority(max_priority, era)
        return self._draw(count, prioritized)

    def _draw(self, count: int, prioritized: bool) -> tuple[HostState, Drawn | None]:
        directory = self._storage.directory
        words = directory.words
        sampler = self._sampler() if prioritized else self._uniform
        drawn = None
        while count and drawn is None and directory.length:
            try:
                drawn = sampler.draw(self._storage, count)
            except TooFewDrawsError as error:
                count = error.left  # no thread of the host waits for the limiter: what there is
            except RuntimeError:
                if directory.length:
                    raise
        if drawn is not None:
            mass, minimum = drawn.mass, drawn.minimum
        elif prioritized:
            with directory.lock():
                directory.tree.refresh()
                mass, minimum = directory.tree.total, directory.tree.minimum
        else:
            used_up = directory.draws is not None
            mass, minimum = float(words[Word.AVAILABLE] if used_up else directory.length), 1.0
        era = words[Word.ERA]  # before the largest priority, which may be of a later one then
        state = HostState(
            directory.length,
            directory.high,
            int(words[Word.CURSOR]),
            int(words[Word.WRITE_COUNT]),
            mass,
            minimum,
            directory.get_float(Word.MAX_PRIORITY),
            directory.get_float(Word.ALPHA),
            era,
            *(() if directory.gate is None else directory.gate.counts()),
        )
        return state, drawn

    def _draw_packed(self, count: int, prioritized: bool) -> tuple[Any, ...]:
        """The last fields of a reply."""
        state, drawn = self._draw(count, prioritized)
        return state, *(self._pack(drawn) if drawn is not None else ())

    def _pack(self, drawn: Drawn) -> tuple[int, str, list[torch.Tensor]]:
        spec = self._storage.directory.rows
        assert spec is not None
        handles = [drawn.index.numpy(), drawn.generation.numpy(), drawn.leaf]
        # not copied: nobody else has these tensors
        packed = pack([*handles, *map(array_of, drawn.tensors)], copy=False)
        return drawn.index.numel(), spec.text, packed

    # --- reading and replacing, outside the numbered requests --------------------------------

    def read(self, slots: torch.Tensor) -> TensorDictBase:
        """Rows at slots, as ``SharedMemmapStorage.get`` gives them."""
        return self._storage.get(slots)

    def generations_of(self, slots: np.ndarray) -> np.ndarray:
        """int64 [n]; -1 where no row is published."""
        return self._storage.generations_of(torch.from_numpy(slots)).numpy()

    def write_at(self, slots: torch.Tensor, data: TensorDictBase) -> torch.Tensor:
        """As ``SharedMemmapStorage.write_at``; returns the new generations, int64 [n]."""
        return self._storage.write_at(slots, data)

    # --- saving; see ``snapshot`` ------------------------------------------------------------

    def head(self) -> Head:
        """The directory's state but for the rows."""
        return self._shard.head()

    def save_chunk(
        self, cursor: int, alpha: float | None, start: int, stop: int
    ) -> tuple[Chunk, list[torch.Tensor]]:
        """The rows in a range of slots, copied and packed; see ``snapshot.save_chunk``."""
        copied: list[np.ndarray] = []

        def copy(arrays: list[np.ndarray]) -> None:
            copied[:] = [array.copy() for array in arrays]

        directory = self._storage.directory
        chunk = save_chunk(directory, cursor, alpha, start, stop, copy)
        return chunk, pack(copied, copy=False)

    def reaches(self, folder: str) -> bool:
        """Whether this process sees the files of a shard that are being written there, and may
        write to them. No other folder has that name: a part of it is random."""
        with contextlib.ExitStack() as steps:
            try:
                RowFiles(Path(folder), self._storage.directory.rows, steps)
            except OSError:
                return False
            return True

    def save_chunks_to(
        self,
        folder: str,
        row: int,
        cursor: int,
        alpha: float | None,
        ranges: Sequence[tuple[int, int]],
    ) -> list[Chunk]:
        """Write the rows in ranges of slots to the files of a shard, behind ``row`` rows.

        Blocks until they are on the disk. Nothing goes on here that is not asked for by a call.

        Raises:
            OSError: the disk is full, or the files are gone.
        """
        directory = self._storage.directory
        chunks = []
        with contextlib.ExitStack() as steps:
            files = RowFiles(Path(folder), directory.rows, steps)
            for start, stop in ranges:
                write = functools.partial(files.write, row)
                chunks.append(save_chunk(directory, cursor, alpha, start, stop, write))
                row += chunks[-1].leaf.size
            files.end(row)
        return chunks

    def begin_restore(self, head: Head, era: int) -> int:
        """Empty the directory; see ``snapshot.begin_restore``."""
        with self._new_era(era):
            return self._shard.begin_restore(head)

    def restore_rows(
        self, since: int, slot: int, version: int, leaf: np.ndarray, packed: list[torch.Tensor]
    ) -> None:
        """Publish saved rows; see ``snapshot.restore_rows``."""
        spec = self._storage.directory.rows
        assert spec is not None
        tensors = unpack(packed, columns_of(spec, leaf.size))
        arrays = [array_of(tensor) for tensor in tensors]
        self._shard.restore_rows(since, slot, version, leaf, arrays)

    def counters(self) -> dict[str, int]:
        """``directory.counters``."""
        return self._storage.directory.counters

    def close(self, clean: bool = True) -> None:
        """Leave the directory; ``clean``: remove it if this was its last process. Idempotent."""
        self._storage.close(clean=clean)
