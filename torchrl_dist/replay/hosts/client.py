"""The client through which a process uses a replay buffer's hosts. It sends rows and priorities to
the right hosts, and knows which hosts are lost."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import threading
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase

from torchrl_dist.errors import ConfigurationError, DeadlineError, PeerLostError, RemoteError
from torchrl_dist.forks import renewed
from torchrl_dist.replay.hosts.link import SHORTEST_CALL_S, Link, Made, await_answer
from torchrl_dist.replay.hosts.messages import (
    Answer,
    CountSamples,
    HostState,
    Invoke,
    Law,
    Operation,
    SetPriorities,
    SetWrittenPriorities,
    Write,
)
from torchrl_dist.replay.law.limiter import Counts, RateLimiter
from torchrl_dist.replay.law.shard_law import global_index, largest_priority, split_index
from torchrl_dist.replay.node.frames import each_once, with_stacks
from torchrl_dist.replay.parts.drawn import Drawn
from torchrl_dist.replay.parts.sampler import RecentGenerations
from torchrl_dist.replay.row import rows
from torchrl_dist.replay.row.numbers import RowNumbers
from torchrl_dist.replay.row.packing import pack, spec_from_text
from torchrl_dist.replay.row.spec import RowSpec
from torchrl_dist.runtime.awake import awake

_FEW_BYTES = 2**10  # assumed bytes of an operation in a queue, without its arrays
_GUESSED_ROW_BYTES = 2**13
_ARRAY_BYTES = 2**8  # assumed bytes of an array, in addition to its values


Trouble = Callable[[int, Exception], None]
"""A function ``trouble(shard, error)`` that is called if a shard did not answer. If it returns, the
call continues with the other shards. It may also raise."""


def _raise(shard: int, error: Exception) -> None:
    raise error


@dataclass
class _PendingWrite:
    """Queued rows, whose slots are unknown until the host has answered.

    Attributes:
        index: the tensor that the caller got.
        slots, generations: None until they are known.
    """

    index: torch.Tensor
    shard: int
    number: int
    slots: np.ndarray | None = None
    generations: np.ndarray | None = None

    def with_priorities(self, priority: np.ndarray) -> Operation:
        """Return the operation that sets the rows' priorities. Call this method when all earlier
        operations have been answered or are in the same message."""
        if self.slots is None:  # the rows are still in the same message
            return SetWrittenPriorities(self.number, priority)
        return SetPriorities(self.slots, self.generations, priority)


class ReplayClient:
    """One buffer's connection to its hosts. Thread-safe.

    The client queues operations per host, and the host applies them in the order of the queue. If
    an operation fails, a later call raises the error. With several hosts, the client continues
    without a host that is lost or does not answer, as long as ``min_shards`` answer. One warning
    reports that host.

    Args:
        links: one per shard.
        shard_capacity: slots of each shard; ``index = shard * shard_capacity + slot``.
        own_shard: the shard to which rows are written, or None to write to all shards in turn.
        first_shard: the shard of the first turn.
        limiter: the buffer's rate limiter, or None.
        min_shards: calls raise if fewer shards answer.
        timeout_s: deadline of every wait.
    """

    def __init__(
        self,
        links: Sequence[Link],
        shard_capacity: int,
        *,
        own_shard: int | None,
        first_shard: int,
        min_shards: int,
        timeout_s: float,
        limiter: RateLimiter | None = None,
    ) -> None:
        self.links = tuple(links)
        self.limited = limiter is not None
        self.counts_draws = limiter is not None and limiter.max_times_sampled is not None
        for link in self.links:
            link.limited = self.limited
        self.shard_capacity = shard_capacity
        self.timeout_s = timeout_s
        self._largest: dict[int, float] = {}
        """With several shards, the largest priority that this client knows, for each era."""
        self.recent = RecentGenerations()
        self.own_shard = own_shard
        self._turn = itertools.count(first_shard)
        self._min_shards = min_shards
        self._numbers = itertools.count(1)
        self._row_numbers = RowNumbers()
        self._spec: RowSpec | None = None
        self._pending: dict[int, _PendingWrite] = {}  # keyed by the index's address
        self._reported: dict[int, int] = {}
        """For each shard that a warning has reported, its number of replies at that time."""
        self._closed = False
        self._pid = os.getpid()
        self._lock = renewed(self, "_lock", threading.RLock)

    def check_entry(self) -> None:
        """Check that this thread may wait for a lock of TorchRL's buffer. Call this method before
        such a wait.

        Raises:
            ConfigurationError: this process was forked from the process that has the connections.
            DirectoryError: see :meth:`Link.check_entry`.
        """
        self._check_process()
        for link in self.links:
            link.check_entry()

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise ConfigurationError(
                f"process {os.getpid()} was forked from process {self._pid}, and a forked process "
                "cannot use its parent's connections; make the process a member of the session, "
                "or spawn it, and in both cases pass it the buffer as an argument"
            )

    # --- hosts that answer ---------------------------------------------------------------------

    def check(self) -> None:
        """Raise the next error of an earlier operation, if there is one.

        Also raise if too few shards answer, or if this process cannot make calls."""
        if self._closed:
            raise ConfigurationError("this buffer was closed in this process; build it again")
        self._check_process()
        for shard, link in enumerate(self.links):
            if link.fine and shard not in self._reported:
                continue
            problem = link.problem
            if problem is not None:
                if len(self.links) > 1:  # perhaps no call has reported the loss yet
                    self.note_trouble(shard, problem)
            elif link.replies > self._reported.get(shard, link.replies):
                with self._lock:
                    self._reported.pop(shard, None)
                warnings.warn(f"replay shard {shard} ({link.name}) answers again", stacklevel=3)
            error = link.failure()
            if isinstance(error, (DeadlineError, PeerLostError)):
                self.note_trouble(shard, error)
            elif error is not None:
                raise error

    def note_trouble(self, shard: int, error: Exception) -> None:
        """Report that a host did not answer. Raise the error if too few hosts are left."""
        answering = sum(
            link.problem is None and link.replies > self._reported.get(other, -1)
            for other, link in enumerate(self.links)
            if other != shard
        )
        if len(self.links) == 1 or answering < self._min_shards:
            # many calls may raise this error, and each of them would add to its traceback
            raise error.with_traceback(None)
        with self._lock:
            new = shard not in self._reported
            self._reported.setdefault(shard, self.links[shard].replies)
        if new:
            warnings.warn(
                f"replay shard {shard} ({self.links[shard].name}) is left out; the buffer "
                f"continues with the other {answering}: {error}",
                stacklevel=3,
            )

    def _each(
        self, step: Callable[[Link, Any], Any], given: Mapping[int, Any], trouble: Trouble
    ) -> dict[int, Any]:
        """Return the results of ``step(link, value)`` by shard. If a shard does not answer, call
        ``trouble``, and leave the shard out of the results."""
        found = {}
        for shard, value in given.items():
            try:
                found[shard] = step(self.links[shard], value)
            except (DeadlineError, PeerLostError) as error:
                trouble(shard, error)
        return found

    def _await(
        self, futures: Mapping[int, Any], begin: float, timeout_s: float, trouble: Trouble
    ) -> dict[int, Any]:
        def wait(link: Link, future: Any) -> Any:
            return await_answer(future, link, begin, timeout_s)

        return self._each(wait, futures, trouble)

    def answering(self) -> list[int]:
        """Return the shards that can be called, see ``answers_now``."""
        return [shard for shard in range(len(self.links)) if self.answers_now(shard)]

    def answers(self, futures: Sequence[Any]) -> list[Answer | None]:
        """Wait for one answer per shard. An answer is None if the shard was not asked or did not
        answer."""
        asked = {shard: future for shard, future in enumerate(futures) if future is not None}
        found = self._await(asked, awake(), self.timeout_s, self.note_trouble)
        return [found.get(shard) for shard in range(len(futures))]

    def ask(self, counts: Sequence[int | None], law: Law | None) -> list[Any]:
        """Ask the shards for ``counts`` units. Return a future for each shard.

        A shard's future is None if its count is None or the shard does not answer."""
        asked = {
            shard: int(count)
            for shard, count in enumerate(counts)
            if count is not None and self.answers_now(shard)
        }
        futures = self._each(lambda link, count: link.ask(count, law), asked, self.note_trouble)
        return [futures.get(shard) for shard in range(len(counts))]

    def states(self) -> list[HostState]:
        """Return the states of the hosts that answer, after all operations of this client.

        Blocks for one call. If the draws are uniform, the mass in each state is the shard's number
        of rows that can be drawn."""
        return [state for state in self.states_by_shard() if state is not None]

    def states_by_shard(self) -> list[HostState | None]:
        """Return what ``states`` returns, with None for a host that does not answer."""
        self.check()
        found = self.answers(self.ask([0] * len(self.links), None))
        return [None if answer is None else answer.state for answer in found]

    def flush(self) -> None:
        """Block until everything in the queues has been applied.

        Raises:
            DeadlineError: a host did not answer in time, or operations wait for a host that is left
                out. The operations stay queued until the host answers again.
            PeerLostError: the only host, or too many of several hosts, are lost.
            RemoteError: an operation failed at a host.
        """
        self.apply_queued()
        for shard, link in enumerate(self.links):
            if link.waiting and isinstance(link.problem, DeadlineError):
                raise DeadlineError(
                    f"{link.waiting} operations of this process for replay shard {shard} "
                    f"({link.name}) are not applied yet, because the shard does not answer. The "
                    "operations stay queued until the shard answers, and the other shards have "
                    "applied all operations. Call flush() again later, or continue"
                )

    def apply_queued(self) -> None:
        """Flush the queues of hosts that answer. Operations for other hosts stay queued."""
        if self._closed:
            return  # ``close`` has flushed
        self.check()
        self.await_applied()
        self.check()

    def await_applied(self) -> None:
        """Block until the hosts that answer have applied their queues."""
        self._apply(self.answering(), self.note_trouble)

    def _apply(self, shards: Iterable[int], trouble: Trouble) -> dict[int, Any]:
        """Block until the shards have applied their queues. The keys of the result are the shards
        that answered."""
        begin = awake()
        asked = self._each(lambda link, _: link.ask(None, None), dict.fromkeys(shards), trouble)
        return self._await(asked, begin, self.timeout_s, trouble)

    @property
    def round_trip_s(self) -> float:
        """The longest round trip to a host that answers, in seconds."""
        return max((link.round_trip_s for link in self.links if link.problem is None), default=0.0)

    def answers_now(self, shard: int) -> bool:
        """Return whether the shard answers, and may therefore be called. A single shard is always
        called."""
        return len(self.links) == 1 or self.links[shard].problem is None

    def count_samples(self, index: torch.Tensor) -> None:
        """Queue the number of rows that a sample returned, for the rate limiter. Does not block."""
        shards = index.numpy() // self.shard_capacity
        for shard, count in enumerate(np.bincount(shards).tolist()):
            if count and self.answers_now(shard):
                with contextlib.suppress(PeerLostError):  # a lost host's counts stay as they are
                    self.links[shard].put(CountSamples(count), urgent=False)

    def by_shard(self, index: np.ndarray) -> list[tuple[int, np.ndarray, np.ndarray]]:
        """Return ``(shard, positions, slots)`` for each shard, without entries below 0.

        ``positions`` are the positions of the shard's entries in ``index``, and ``slots`` are the
        slots of these entries in the shard.

        Raises:
            IndexError: an entry is beyond the buffer's capacity.
        """
        capacity = self.shard_capacity * len(self.links)
        if index.max(initial=-1) >= capacity:
            raise IndexError(
                f"index {index.max()} is beyond the capacity {capacity}; pass an index that "
                "sample() or extend() of this buffer returned"
            )
        if len(self.links) == 1 and index.min(initial=0) >= 0:
            return [(0, np.arange(index.size), index)]
        shards, slots = split_index(index, self.shard_capacity)
        positions = [(int(s), np.flatnonzero(shards == s)) for s in np.unique(shards) if s >= 0]
        return [(shard, where, slots[where]) for shard, where in positions]

    def in_buffer(self, shard: int, rows: Drawn) -> Drawn:
        """Give the rows of a shard their indices in the whole buffer."""
        first = shard * self.shard_capacity
        rows.index = rows.index + first
        if rows.anchors is not None:
            rows.anchors = rows.anchors + torch.tensor([first, 0, 0])
        return rows

    def return_draws(self, rows: Drawn, which: Any = slice(None)) -> None:
        """Queue a message that drawn rows will not be used, so that these draws do not count for
        ``max_times_sampled``."""
        if not self.counts_draws:
            return
        stamps, leaf = rows.generation.numpy()[which], rows.leaf[which]
        for shard, where, slots in self.by_shard(rows.index.numpy()[which]):
            if self.answers_now(shard):
                drawn = Invoke("return_draws", (slots, stamps[where], leaf[where]))
                size = _FEW_BYTES + 3 * slots.nbytes
                with contextlib.suppress(PeerLostError, DeadlineError):  # lost or silent host
                    self.links[shard].put(drawn, size=size, urgent=False)

    def counts(self) -> Counts | None:
        """Return the sums of the shards' counts, as far as this process knows, for the rate
        limiter.

        Returns:
            The sums; None if no shard's counts are known, or if the counts of a shard that answers
            are unknown."""
        known = []
        for shard, link in enumerate(self.links):
            counts = link.counts()
            if counts is not None:
                known.append(counts)
            elif self.answers_now(shard):
                return None
        return Counts(*map(sum, zip(*known, strict=True))) if known else None

    def without_counts(self) -> list[Exception | None]:
        """Return the problem of each shard whose counts this process has never received."""
        return [link.problem for link in self.links if link.counts() is None]

    def call(self, shard: int, method: str, *args: Any) -> Any:
        """Call a read-only method of one host, after all operations that were queued for the host.
        Blocks."""
        return self.call_each(method, {shard: args})[shard]

    def call_each(
        self, method: str, calls: Mapping[int, tuple[Any, ...]], trouble: Trouble = _raise
    ) -> dict[int, Any]:
        """Call a read-only method of several hosts. Return the results by shard.

        At each host, the call comes after all operations of this client. The calls together block
        no longer than one call.

        Args:
            calls: the arguments, by shard.
            trouble: called for a host that does not answer. With :meth:`note_trouble`, the call
                continues without the host's result, unless too few hosts answer.

        Raises:
            DeadlineError, PeerLostError, RemoteError: a host did not answer, is lost, or raised an
                error.
        """
        self.check()
        begin = awake()
        applied = self._apply(calls, trouble)
        left = max(SHORTEST_CALL_S, begin + self.timeout_s - awake())
        sent = self._each(
            lambda link, args: link.submit(method, *args, timeout_s=left),
            {shard: calls[shard] for shard in applied},
            trouble,
        )
        # this deadline is longer than the transport's deadline, so that the transport raises first
        return self._await(sent, awake(), left + SHORTEST_CALL_S, trouble)

    def order(self, shard: int, method: str, *args: Any, size: int = 0) -> Any:
        """Call a method of one host after all operations that were queued for it. Blocks."""
        return self.order_each(method, {shard: args}, {shard: _FEW_BYTES + size})[shard]

    def order_each(
        self,
        method: str,
        calls: Mapping[int, tuple[Any, ...]],
        sizes: Mapping[int, int] | None = None,
        trouble: Trouble = _raise,
    ) -> dict[int, Any]:
        """Call a method of several hosts, like :meth:`call_each`.

        At each host, the call comes after all earlier operations of this client and before all
        later operations. The calls together block no longer than one call.

        Args:
            sizes: bytes of the arguments, by shard. Without ``sizes``, the call does not wait for
                room in the queue.

        Raises:
            DeadlineError: a host did not answer. If the call has not been sent yet, it will not be
                made. Otherwise the host still runs it before this client's next request.
            PeerLostError, RemoteError: a host is lost, or raised an error.
        """
        self.check()
        begin = awake()
        futures = self._each(
            lambda link, call: link.order(method, *call[0], size=call[1]),
            {shard: (args, sizes[shard] if sizes else 0) for shard, args in calls.items()},
            trouble,
        )
        return self._await(futures, begin, self.timeout_s, trouble)

    def invoke_everywhere(self, method: str, *args: Any) -> None:
        """Queue a call of a method at every host. Blocks only if a queue is full.

        A host that does not answer now runs the call as soon as it answers again.

        Raises:
            DeadlineError, PeerLostError: for the same reasons as ``flush``.
        """
        self.check()
        call, links = Invoke(method, args), dict(enumerate(self.links))
        self._each(lambda link, _: link.put(call, size=_FEW_BYTES), links, self.note_trouble)

    def close(self) -> None:
        """Flush, and disconnect from the hosts. Idempotent.

        Problems become warnings, including errors of earlier operations that no call has raised."""
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        close_links(self.links, self.timeout_s)

    # --- writing -----------------------------------------------------------------------------

    def learn_spec(self, spec: RowSpec) -> None:
        """Record the spec of the hosts' rows. From now on, a call that writes rows of another form
        raises."""
        self._spec = spec

    @property
    def row_bytes(self) -> int:
        """The size of a row in bytes, or a guess before the first row."""
        return _GUESSED_ROW_BYTES if self._spec is None else max(1, self._spec.row_bytes)

    def write(
        self, data: TensorDictBase, priority: np.ndarray | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Queue a copy of rows for one shard. Blocks only if the queue is full.

        Returns:
            ``(index, generation)``, int64 [n]. Both are -1 until the host's answer fills them in.
        """
        self.check()
        for link in self.links:
            self._note_max_priority(*link.largest)
        spec = self.agreed_spec(data)
        count = rows.batch_of(data)[0]
        sent, columns = spec, rows.matching_columns(data, spec, self._row_numbers)
        if any(link.sends_rows for link in self.links):
            columns = each_once(columns, spec)
        else:
            sent = with_stacks(spec, {})
        packed = pack(columns, copy=True)
        # NumPy arrays, because another thread fills them later, which fails for tensors created in
        # inference mode
        index, generation = np.full(count, -1, np.int64), np.full(count, -1, np.int64)
        handed = torch.from_numpy(index), torch.from_numpy(generation)
        key = handed[0].data_ptr()
        pending = _PendingWrite(handed[0], -1, next(self._numbers))

        def written(slots: np.ndarray, generations: np.ndarray) -> None:
            kept = slots >= 0
            pending.slots, pending.generations = slots, generations
            generation[:] = generations
            index[kept] = global_index(pending.shard, slots[kept], self.shard_capacity)
            if kept.any():
                self._spec = spec
                self.recent.remember(*handed, written=True)
            # remove the pending write last, because it must stay pending until the generations are
            # known
            self._pending.pop(key, None)

        size = _FEW_BYTES + sum(_ARRAY_BYTES + tensor.nbytes for tensor in packed)
        # copied, because priorities are sent later, and the caller may change its tensors
        own = None if priority is None else priority.copy()
        write = Write(sent.text, count, packed, own, ((pending.number, count),))
        while True:
            pending.shard = self._shard_to_write()
            self._pending[key] = pending
            try:
                self.links[pending.shard].put(write, size=size, written=written)
            except BaseException as error:
                self._pending.pop(key, None)
                if not self._is_left_out(pending.shard, error):
                    raise
            else:
                break
        return handed

    def agreed_spec(self, data: TensorDictBase) -> RowSpec:
        """Return the spec of the buffer's rows, or if there are no rows yet, the spec of ``data``.

        With several hosts, this method blocks for two calls unless this process already knows the
        spec. Afterwards all hosts that answer have the same spec. If several processes write first
        rows at the same time, the first host decides, because all processes ask it first. A single
        host sets the spec when the rows arrive.

        Raises:
            ConfigurationError: hosts have different specs, because processes that wrote first rows
                could not reach the same hosts.
            DeadlineError, PeerLostError, RemoteError: too few shards answer, or a shard has no
                room.
        """
        if self._spec is not None:
            return self._spec
        spec = rows.spec_of(data)
        shards, method = self.answering(), "agree_on_rows"
        found: dict[int, str] = {}
        while shards and not found:
            call = {shards.pop(0): (spec.text,)}
            found = self.order_each(method, call, trouble=self.note_trouble)
        if not found:
            raise self._nobody()
        (first,) = found.values()
        calls = dict.fromkeys(shards, (first,))
        for shard, text in self.order_each(method, calls, trouble=self.note_trouble).items():
            if text != first:
                raise ConfigurationError(
                    f"replay shard {shard} ({self.links[shard].name}) holds rows of another form "
                    f"than the shards before it: {text}, not {first}; every writer of a buffer "
                    "must write the same keys, shapes and dtypes"
                )
        self._spec = spec_from_text(first)
        return self._spec

    def _is_left_out(self, shard: int, error: BaseException) -> bool:
        """Return whether the client continues without ``shard`` after this error."""
        if not isinstance(error, (DeadlineError, PeerLostError)) or self.answers_now(shard):
            return False
        self.note_trouble(shard, error)
        return True

    def _shard_to_write(self) -> int:
        own = self.own_shard
        if own is not None and self.answers_now(own):
            return own
        for _ in self.links:
            shard = next(self._turn) % len(self.links)
            if self.answers_now(shard):
                return shard
        raise self._nobody()

    def _nobody(self) -> PeerLostError:
        problems = "; ".join(str(link.problem) for link in self.links)
        return PeerLostError(f"no replay shard answers ({problems}); check the hosts' processes")

    # --- priorities --------------------------------------------------------------------------

    def set_priorities(
        self, index: torch.Tensor, generation: torch.Tensor | None, priority: np.ndarray
    ) -> None:
        """Queue priorities, float64 [n], for rows. Rows whose index is -1 are skipped.

        Without ``generation``, generations are looked up among this process's recent draws and
        writes.
        """
        self.check()
        if generation is None:
            pending = self._find_pending(index)
            if pending is not None:
                own = priority.copy()
                self._put(pending.shard, lambda: pending.with_priorities(own), own.nbytes)
                return
            generation = self.recent.recall(index)
        # copied, because priorities are sent later, and the caller may change its tensors
        priority, where = priority.copy(), index.numpy().copy()
        stamps = None if generation is None else generation.numpy().copy()
        for shard, part, slots in self.by_shard(where):
            stamp = None if stamps is None else stamps[part]
            self._put(shard, SetPriorities(slots, stamp, priority[part]), priority.nbytes)

    def _find_pending(self, index: torch.Tensor) -> _PendingWrite | None:
        """Return the pending write to which this index belongs. The index may be the tensor that
        the write returned, or a view of this whole tensor, as in TorchRL's ``add``."""
        # no other tensor has this memory while the index is pending
        pending = self._pending.get(index.data_ptr())
        same = pending is not None and pending.index.numel() == index.numel()
        return pending if same and index.is_contiguous() else None

    def _put(self, shard: int, operation: Made, nbytes: int) -> None:
        """Queue priorities, or drop them if the shard does not answer."""
        if not self.answers_now(shard):
            return
        size = _FEW_BYTES + 3 * nbytes
        try:
            self.links[shard].put(operation, size=size, urgent=False)
        except (DeadlineError, PeerLostError) as error:
            if not self._is_left_out(shard, error):
                raise

    def _note_max_priority(self, seen: float, era: int) -> None:
        """Record the largest priority of a host. In this era, new rows of all shards get
        this priority. A single host knows its largest priority itself.

        Call this method only with a priority that a host has reported. A priority that this process
        only sent may have been dropped by the host, because its row was overwritten."""
        known = self._largest.get(era, math.nan)
        if len(self.links) == 1 or era < 0 or math.isnan(seen) or seen <= known:
            return
        largest = largest_priority(known, seen)
        if largest != known:
            self._largest[era] = largest
            for link in self.links:
                if link.era == era:
                    link.max_priority = largest

    def note_states(self, states: Sequence[HostState | None]) -> None:
        """Record the states that draws reported. A state is None if its shard did not answer."""
        for link, state in zip(self.links, states, strict=True):
            if state is not None:
                if link.era != state.era:
                    link.max_priority = self._largest.get(state.era, math.nan)
                    link.era = state.era
                self._note_max_priority(state.max_priority, state.era)
        eras = {link.era for link in self.links}
        self._largest = {era: each for era, each in self._largest.items() if era in eras}


def close_links(links: Sequence[Link], timeout_s: float) -> None:
    """Close links as :meth:`ReplayClient.close` does, even if their client no longer exists.
    Idempotent."""
    begin = awake()
    for link in links:
        with contextlib.suppress(PeerLostError):
            link.ask(None, None)  # so that all links flush at the same time
    for link in links:
        problems: list[Exception] = []
        try:
            # one deadline for all links, so that the waits for hanging hosts do not add up
            left = max(0.0, begin + timeout_s - awake())
            left = max(left, link.answered_at + timeout_s - awake())
            link.close(left if len(links) == 1 or link.problem is None else 0.0)
        except (DeadlineError, PeerLostError, RemoteError) as error:
            problems.append(error)
        while (failed := link.failure()) is not None:
            problems.append(failed)
        for problem in problems:
            warnings.warn(f"closing the client of {link.name} failed: {problem}", stacklevel=4)
