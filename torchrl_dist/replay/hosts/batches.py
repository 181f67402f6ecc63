"""Batches of rows of other nodes, drawn ahead of their use.

With one shard, the law is that of the plain sampler. With several shards, each batch is an exact
draw by the masses in the shards' replies to it (``shard_law``).

Rows of a redraw come from a later state of their shard than the masses by which they were assigned
to it. Their weight corrects this. Such a row was drawn with probability ``r / R * p / r2``, where
``r`` and ``R`` are the masses of its shard and of all shards in the first replies, and ``p`` and
``r2`` are the row's leaf and its shard's mass in the later reply. It therefore has the weight of a
row with the leaf ``p * r / r2`` in the first state, and weighted estimates have no bias.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from torchrl_dist.errors import ConfigurationError, DirectoryError
from torchrl_dist.forks import now_and_in_children
from torchrl_dist.replay.hosts.client import ReplayClient
from torchrl_dist.replay.hosts.link import Answer, Rows
from torchrl_dist.replay.hosts.messages import UNIFORM, Law
from torchrl_dist.replay.law.shard_law import (
    KnownMasses,
    ShardRequest,
    choose_shards,
    number_rows,
    split_index,
)
from torchrl_dist.replay.parts.sampler import EMPTY
from torchrl_dist.replay.parts.slices import NoSlicesError
from torchrl_dist.replay.parts.storage import NoRowsError
from torchrl_dist.replay.row.spec import RowSpec
from torchrl_dist.runtime.awake import awake

Uniforms = Callable[[int], np.ndarray]

# A shorter round trip, as in a local network, costs less than older rows would.
_LONG_ROUND_TRIP_S = 2e-3
_FEWEST_AHEAD, _MOST_AHEAD, _MOST_BYTES_AHEAD = 2, 256, 2**24
# The shortest time per batch, and the number of batches that a pause of the learner counts as.
_SHORTEST_USE_S, _LONGEST_PAUSE = 1e-4, 4.0
_USES = 8  # over which the learner's pace is averaged


@dataclass(frozen=True)
class Batch:
    """Rows of one batch.

    Attributes:
        index, generation: int64 [n]; the index is global.
        leaf: float64 [n].
        tensors: [n, ...], in the order of ``spec``.
        mass: float64 [n], the basis of the weights: the leaf, except for rows of a redraw.
        minimum: the smallest mass of any row of the buffer at the draw.
        lengths: int64 [slices], for slices."""

    spec: RowSpec
    index: torch.Tensor
    generation: torch.Tensor
    leaf: torch.Tensor
    tensors: list[torch.Tensor]
    mass: torch.Tensor
    minimum: float
    lengths: torch.Tensor | None

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)


@dataclass(frozen=True)
class _Round:
    """A request for ``count`` units in total, with one future per shard."""

    count: int
    request: ShardRequest | None
    futures: list[Any]


class BatchSource:
    """Draw batches through a client, ``prefetch`` ahead, at least ``batches_per_call`` per call.

    A prefetched batch does not reflect later operations of this process. With ``prefetch=n`` and
    ``batches_per_call=b``, an operation takes effect at most ``n + b`` batches later. With
    ``prefetch=0``, the next batch reflects all of them.

    Without a number, it draws two batches ahead. If the round trip is long, it draws twice as many
    as the learner uses in a round trip, because one call at a time is in flight and brings half of
    them. More batches would make rows older and hide nothing. ``batches_ahead`` is the present
    number.

    Args:
        law: returns the law of a batch of that many rows, and its number of units.
        uniforms: random numbers for the choice of shards.
    """

    def __init__(
        self,
        client: ReplayClient,
        *,
        law: Callable[[int], tuple[Law, int]],
        prefetch: int | None,
        batches_per_call: int,
        uniforms: Uniforms,
    ) -> None:
        self._client = client
        self._law_of = law
        self._law, self._units = UNIFORM, 1
        self._prefetch = prefetch
        fewest = max(_FEWEST_AHEAD, batches_per_call) if prefetch is None else prefetch
        self.batches_ahead = self._fewest = fewest
        self._per_call = min(batches_per_call, max(1, fewest))
        self._uses = 0
        self._use_s = 0.0
        """Seconds per batch, from one call of ``next`` to the next without waiting, on average."""
        self._returned_at: float | None = None
        self._waited_s = 0.0
        self._uniforms = uniforms
        self._known = KnownMasses(len(client.links))
        self._batch_size = 0
        now_and_in_children(self, BatchSource._renew)

    def _renew(self) -> None:
        self._lock = threading.RLock()  # it knows whether this thread holds it
        # The batches drawn ahead are the parent's, and its threads may hold locks of their futures.
        self._ready: deque[Batch] = deque()
        self._rounds: deque[_Round] = deque()
        self._dropped: dict[Any, int] = {}
        """Futures of dropped draws, and their shards."""

    def next(self, batch_size: int) -> Batch:
        """Return the next batch. Blocks until it arrives.

        It waits at most the client's deadline for each exchange of messages. A second exchange is
        rare.

        Raises:
            RuntimeError: no row is published.
            DeadlineError, PeerLostError: the host, or too many of several hosts, do not answer.
        """
        self._client.check()
        if batch_size < 1:
            raise ConfigurationError(f"batch_size={batch_size}: expected at least 1")
        check_not_sampling(self._lock)
        with self._lock:
            self._waited_s = 0.0
            if self._prefetch is None and not self._batch_size:
                self._client.states()  # a short call to each host measures its round trip
            if batch_size != self._batch_size:
                law, units = self._law_of(batch_size)
                self._drop()
                if law != self._law:
                    self._known = KnownMasses(len(self._client.links))
                self._law, self._units, self._batch_size = law, units, batch_size
            if not self._ready:
                self._return_dropped()
                if not self._rounds:
                    self._rounds.append(self._start(1))
                try:
                    self._top_up(about_to_use=1)
                    batches = self._finish(self._rounds[0])
                except Exception:
                    self._drop()  # later requests failed for the same reason
                    raise
                self._rounds.popleft()
                if not batches:
                    self._drop()
                    raise NoRowsError(EMPTY)
                self._ready.extend(batches)
            batch = self._ready.popleft()
            if self._prefetch is None:
                self._look_ahead(batch)
            self._top_up(about_to_use=0)
            return batch

    def drop(self) -> None:
        """Drop prefetched batches, after a change that makes them invalid."""
        with self._lock:
            self._drop()

    def rows_ahead(self) -> int:
        """Return the number of rows that were received but not returned. Does not block."""
        here = [
            round_.count
            for round_ in list(self._rounds)
            if all(future is None or future.done() for future in round_.futures)
        ]
        return len(self._ready) * self._batch_size + sum(here)

    def _answers(self, futures: list[Any]) -> list[Answer | None]:
        answers: list[Answer | None] = [None] * len(futures)
        began = awake()
        try:
            answers = self._client.answers(futures)
        finally:
            self._waited_s += awake() - began
            if self._client.counts_draws:  # late draws are returned to the hosts
                self._give_up(
                    future if answer is None else None
                    for future, answer in zip(futures, answers, strict=True)
                )
        return answers

    def _give_up(self, futures: Iterable[Any]) -> None:
        """Drop requests, one per shard. Requests that were not sent yet are not drawn."""
        for shard, future in enumerate(futures):
            if future is not None and not future.cancel():
                self._dropped[future] = shard

    def _drop(self) -> None:
        for batch in self._ready if self._client.counts_draws else ():
            shards, slots = split_index(batch.index.numpy(), self._client.shard_capacity)
            for shard in np.unique(shards).tolist():
                part = torch.from_numpy(np.flatnonzero(shards == shard))
                self._client.return_draws(
                    shard,
                    torch.from_numpy(slots)[part],
                    batch.generation[part],
                    batch.leaf[part],
                )
        self._ready.clear()
        for round_ in self._rounds:
            self._give_up(round_.futures)
        self._rounds.clear()
        self._return_dropped()

    def _return_dropped(self) -> None:
        """Return the draws of dropped requests that have arrived."""
        for future in [each for each in self._dropped if each.done()]:
            shard = self._dropped.pop(future)
            if future.exception() is None:
                rows = future.result().rows
                if rows is not None:
                    self._client.return_draws(shard, rows.slot, rows.generation, rows.leaf)

    def _look_ahead(self, batch: Batch) -> None:
        """Choose how many batches to draw ahead, by the learner's pace and the round trip."""
        now, before = awake(), self._returned_at
        self._returned_at = now
        if before is None or self._client.limited:  # a limiter counts batches in hand
            return
        use_s = max(_SHORTEST_USE_S, now - before - self._waited_s)
        if self._uses < _USES:
            self._uses += 1
            self._use_s += (use_s - self._use_s) / self._uses
            return
        self._use_s += (min(use_s, _LONGEST_PAUSE * self._use_s) - self._use_s) / _USES
        ahead = self._fewest
        round_trip_s = self._client.round_trip_s
        if round_trip_s >= _LONG_ROUND_TRIP_S:
            room = min(_MOST_AHEAD, _MOST_BYTES_AHEAD // max(1, batch.nbytes))
            ahead = max(ahead, min(room, 2 * math.ceil(round_trip_s / self._use_s)))
        self.batches_ahead = ahead

    def _top_up(self, about_to_use: int) -> None:
        """Request more once less than half is left, so that one call brings several batches."""
        ahead = len(self._ready) - about_to_use
        ahead += sum(round_.count for round_ in self._rounds) // self._units
        if 2 * ahead < self.batches_ahead:
            missing = self.batches_ahead - ahead
            self._rounds.append(self._start(-(-missing // self._per_call) * self._per_call))

    # --- one request ---------------------------------------------------------------------------

    def _start(self, batches: int) -> _Round:
        count = batches * self._units
        client = self._client
        if len(client.links) == 1:
            return _Round(count, None, client.ask([count], self._law))
        if not self._known.has_mass:
            states = client.answers(client.ask([0] * len(client.links), self._law))
            self._known.learn(self._masses(states))
            if not self._known.has_mass:
                raise self._nothing(states)
        request = self._known.plan(count, self._uniforms)
        return _Round(count, request, client.ask(request.rows.tolist(), self._law))

    @staticmethod
    def _masses(answers: list[Answer | None]) -> np.ndarray:
        return np.array([0.0 if answer is None else answer.state.mass for answer in answers])

    def _finish(self, round_: _Round) -> list[Batch]:
        """Build as many whole batches as the rows allow, and return the other rows to the hosts."""
        answers = self._answers(round_.futures)
        present = [answer for answer in answers if answer is not None]
        self._client.note_states([None if answer is None else answer.state for answer in answers])
        if round_.request is None:
            answer = present[0]
            if answer.rows is None:
                raise self._nothing(answers)
            rows = answer.rows
            self._client.learn_spec(rows.spec)
            batches = self._split(rows, rows.slot, rows.leaf, answer.state.minimum)
            rest = slice(sum(batch.index.numel() for batch in batches), None)
            self._client.return_draws(0, rows.slot[rest], rows.generation[rest], rows.leaf[rest])
            return batches
        masses = self._masses(answers)
        self._known.learn(masses, round_.request)
        if not self._known.has_mass:
            raise self._nothing(answers)
        shards = round_.request.correct(masses, self._uniforms)
        return self._assemble(shards, masses, answers)

    def _assemble(
        self, shards: np.ndarray, masses: np.ndarray, answers: list[Answer | None]
    ) -> list[Batch]:
        """Assign a row to each draw. If the spare rows do not suffice, ask for more."""
        found: list[list[Rows]] = [[] for _ in answers]
        scales: list[list[np.ndarray]] = [[] for _ in answers]
        first_masses, minimum = masses, np.inf
        while True:
            for shard, answer in enumerate(answers):
                if answer is not None:
                    later = answer.state.mass
                    scale = first_masses[shard] / later if later > 0 else 1.0
                    minimum = min(minimum, answer.state.minimum * scale)
                    if answer.rows is not None:
                        found[shard].append(answer.rows)
                        scales[shard].append(np.full(answer.rows.units, scale))
            received = np.array([sum(rows.units for rows in part) for part in found])
            row, missing = number_rows(shards, received)
            if not missing.any():
                break
            asked = [int(count) if count else None for count in missing]
            answers = self._answers(self._client.ask(asked, self._law))
            for shard in np.flatnonzero(missing).tolist():
                answer = answers[shard]
                if answer is None or answer.rows is None:  # lost or emptied at this moment
                    masses = np.where(np.arange(masses.size) == shard, 0.0, masses)
            gone = np.flatnonzero((row < 0) & (masses[shards] == 0))
            if gone.size:
                if not masses.any():
                    if not self._client.counts_draws:
                        raise self._nothing(answers)
                    break
                shards = shards.copy()
                shards[gone] = choose_shards(masses, gone.size, self._uniforms)
        if not received.any():
            return []
        rows = concatenated([each for part in found for each in part])
        self._client.learn_spec(rows.spec)
        first = np.cumsum(received) - received
        if self._client.counts_draws:
            drawn = np.flatnonzero(row >= 0)
            drawn = drawn[: drawn.size // self._units * self._units]
            shards, row = shards[drawn], row[drawn]
            spare = first + np.bincount(shards, minlength=received.size)
            for shard, (start, stop) in enumerate(zip(spare, first + received, strict=True)):
                self._client.return_draws(
                    shard, rows.slot[start:stop], rows.generation[start:stop], rows.leaf[start:stop]
                )
        select = torch.from_numpy(first[shards] + row)
        rows = rows.select(select)
        index = rows.slot + rows.per_row(torch.from_numpy(shards * self._client.shard_capacity))
        mass = rows.leaf
        if any(len(part) > 1 for part in scales):
            every = np.concatenate([each for part in scales for each in part])
            mass = mass * rows.per_row(torch.from_numpy(every).index_select(0, select))
        return self._split(rows, index, mass, float(minimum))

    def _split(
        self, rows: Rows, index: torch.Tensor, mass: torch.Tensor, minimum: float
    ) -> list[Batch]:
        size, begin = self._units, 0
        batches = []
        for start in range(0, rows.units - size + 1, size):
            part = rows.part(start, start + size)
            own = slice(begin, begin + part.slot.numel())
            begin = own.stop
            handles = index[own], part.generation, part.leaf
            batches.append(
                Batch(rows.spec, *handles, part.tensors, mass[own], minimum, part.lengths)
            )
        return batches

    def _nothing(self, answers: list[Answer | None]) -> RuntimeError:
        """Return the reason why nothing could be drawn."""
        rows = any(answer is not None and answer.state.length for answer in answers)
        if rows and self._law.slices is not None:
            return NoSlicesError(self._law.slices.slice_len)
        return NoRowsError(EMPTY)

    def can_draw(self, batch_size: int) -> bool:
        """Return whether there is a row or slice to draw. Blocks for one call."""
        law, _ = self._law_of(batch_size)
        client = self._client
        answers = client.answers(client.ask([0] * len(client.links), law))
        return bool(self._masses(answers).any())


def check_not_sampling(lock: Any) -> None:
    """
    Raises:
        DirectoryError: this thread already holds the lock of a source of batches.
    """
    if lock._is_owned():
        raise DirectoryError(
            "a signal handler that interrupted a sample of the buffer cannot sample from it. "
            "Have the handler set a flag, and act on it between two uses"
        )


def concatenated(parts: list[Rows]) -> Rows:
    spec = parts[0].spec
    for part in parts[1:]:
        if part.spec != spec:
            raise ConfigurationError(
                f"the shards hold different rows: {spec} and {part.spec}; every writer of a "
                "buffer must write the same keys, shapes and dtypes"
            )
    if len(parts) == 1:
        return parts[0]
    return Rows(
        spec,
        torch.cat([part.slot for part in parts]),
        torch.cat([part.generation for part in parts]),
        torch.cat([part.leaf for part in parts]),
        [torch.cat(column) for column in zip(*(part.tensors for part in parts), strict=True)],
        None
        if parts[0].lengths is None
        else torch.cat([part.lengths for part in parts if part.lengths is not None]),
    )
