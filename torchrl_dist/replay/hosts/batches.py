"""Draw batches of rows from other nodes before they are needed.

With one shard, the law is that of the plain sampler. With several shards, each batch is drawn in
exact proportion to the masses in the shards' replies for that batch (``shard_law``).

The shard of each draw is chosen by the masses in the first replies. If a row must be redrawn, the
new row comes from a later state of its shard. The weight of a redrawn row corrects for this
difference. The row was drawn with probability ``r / R * p / r2``. Here ``r`` and ``R`` are the
masses of its shard and of all shards in the first replies. ``p`` is the row's leaf, and ``r2`` is
the mass of its shard, both in the later reply. The row therefore gets the weight that a row with
the leaf ``p * r / r2`` would have had in the first reply. Weighted estimates then have no bias.
"""

from __future__ import annotations

import functools
import math
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from torchrl_dist.errors import ConfigurationError, DirectoryError
from torchrl_dist.forks import now_and_in_children
from torchrl_dist.replay.hosts.client import ReplayClient
from torchrl_dist.replay.hosts.messages import UNIFORM, Answer, Law
from torchrl_dist.replay.law.shard_law import (
    KnownMasses,
    ShardRequest,
    Uniforms,
    choose_shards,
    number_rows,
)
from torchrl_dist.replay.parts.drawn import Drawn, joined
from torchrl_dist.replay.parts.sampler import EMPTY
from torchrl_dist.replay.parts.slices import NoSlicesError
from torchrl_dist.replay.parts.storage import NoRowsError
from torchrl_dist.runtime.awake import awake

# If the round trip is shorter than ``_LONG_ROUND_TRIP_S``, the number of batches drawn ahead stays
# at its minimum, because sampling older rows would do more harm than waiting.
_LONG_ROUND_TRIP_S = 2e-3
_FEWEST_AHEAD, _MOST_AHEAD, _MOST_BYTES_AHEAD = 2, 256, 2**24
# The learner is assumed to take at least ``_SHORTEST_USE_S`` per batch. A pause of the learner
# counts as at most ``_LONGEST_PAUSE`` times its average time per batch.
_SHORTEST_USE_S, _LONGEST_PAUSE = 1e-4, 4.0
_USES = 8  # number of batches over which the learner's pace is averaged


@dataclass(frozen=True)
class _Round:
    """A request for ``count`` units in total, with one future per shard."""

    count: int
    request: ShardRequest | None
    futures: list[Any]


class BatchSource:
    """Draw ``prefetch`` batches ahead through a client, at least ``batches_per_call`` in each call.

    A prefetched batch does not reflect later operations of this process. With ``prefetch=n`` and
    ``batches_per_call=b``, an operation takes effect at most ``n + b`` batches later. With
    ``prefetch=0``, the next batch reflects all earlier operations.

    With ``prefetch=None``, two batches are drawn ahead, or ``batches_per_call`` if that is more. If
    the round trip is long, this number grows to twice the number of batches that the learner uses
    during a round trip. The factor is two because only one call at a time is in flight, and a call
    brings half of the batches. More batches would make rows older without saving time. The
    attribute ``batches_ahead`` is the current number of batches.

    Args:
        law: a function that takes a batch's number of rows. It returns the batch's law and its
            number of units.
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
        """Average seconds between two calls of ``next``, without the time spent waiting in them."""
        self._returned_at: float | None = None
        self._waited_s = 0.0
        self._uniforms = uniforms
        self._known = KnownMasses(len(client.links))
        self._batch_size = 0
        now_and_in_children(self, BatchSource._renew)

    def _renew(self) -> None:
        self._lock = threading.RLock()  # an RLock, because it knows whether this thread holds it
        # A forked child drops the batches drawn ahead, because the parent will return them, and
        # because the parent's threads may hold locks of the futures.
        self._ready: deque[Drawn] = deque()
        self._rounds: deque[_Round] = deque()

    def next(self, batch_size: int) -> Drawn:
        """Return the next batch. Blocks until it arrives.

        Each exchange of messages takes at most the client's deadline. A batch rarely needs a second
        exchange.

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
                if not self._rounds:
                    self._rounds.append(self._start(1))
                try:
                    self._top_up(about_to_use=1)
                    batches = self._finish(self._rounds[0])
                except Exception:
                    self._drop()  # later requests have failed for the same reason
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
        """Drop prefetched batches after a change that makes them invalid."""
        with self._lock:
            self._drop()

    def rows_ahead(self) -> int:
        """Return the number of rows that were received but not yet returned by ``next``. Does not
        block."""
        here = [
            round_.count
            for round_ in list(self._rounds)
            if all(future is None or future.done() for future in round_.futures)
        ]
        return len(self._ready) * self._batch_size + sum(here)

    def _answers(self, futures: list[Any]) -> list[Answer | None]:
        """Wait for one answer per shard.

        With ``max_times_sampled``, futures without an answer are given up, so that late draws
        return to the hosts. These futures are removed from ``futures``, so that :meth:`_drop` does
        not give them up again."""
        answers: list[Answer | None] = [None] * len(futures)
        began = awake()
        try:
            answers = self._client.answers(futures)
        finally:
            self._waited_s += awake() - began
            if self._client.counts_draws:
                given_up: list[Any] = [None] * len(futures)
                for shard, answer in enumerate(answers):
                    if answer is None:
                        given_up[shard], futures[shard] = futures[shard], None
                self._give_up(given_up)
        return answers

    def _give_up(self, futures: Iterable[Any]) -> None:
        """Drop requests, one per shard. Requests that were not sent yet are cancelled."""
        for shard, future in enumerate(futures):
            if future is not None and not future.cancel() and self._client.counts_draws:
                future.add_done_callback(functools.partial(self._return_late, shard))

    def _return_late(self, shard: int, future: Any) -> None:
        """Return the draws of a dropped request to the host. Does not block."""
        if future.exception() is None and future.result().rows is not None:
            self._client.return_draws(self._client.in_buffer(shard, future.result().rows))

    def _drop(self) -> None:
        for batch in self._ready:
            self._client.return_draws(batch)
        self._ready.clear()
        for round_ in self._rounds:
            self._give_up(round_.futures)
        self._rounds.clear()

    def _look_ahead(self, batch: Drawn) -> None:
        """Choose how many batches to draw ahead, given the learner's pace and the round trip."""
        now, before = awake(), self._returned_at
        self._returned_at = now
        if before is None or self._client.limited:  # with a limiter, the number does not grow
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
        """Request more batches once less than half of them are left, so that one call brings
        several."""
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

    def _finish(self, round_: _Round) -> list[Drawn]:
        """Build as many whole batches as the rows allow, and return the draws of the other rows to
        the hosts."""
        answers = self._answers(round_.futures)
        self._client.note_states([None if answer is None else answer.state for answer in answers])
        rows: Drawn | None
        if round_.request is None:
            (answer,) = answers
            if answer is None or answer.rows is None:
                raise self._nothing(answers)
            rows = answer.rows
            rows.minimum = answer.state.minimum
        else:
            masses = self._masses(answers)
            self._known.learn(masses, round_.request)
            if not self._known.has_mass:
                raise self._nothing(answers)
            rows = self._gather(round_.request.correct(masses, self._uniforms), masses, answers)
            if rows is None:
                return []
        self._client.learn_spec(rows.spec)
        size = self._units
        whole = rows.units // size * size
        self._client.return_draws(rows, slice(whole, None))
        return [rows.part(start, start + size) for start in range(0, whole, size)]

    def _gather(
        self, shards: np.ndarray, masses: np.ndarray, answers: list[Answer | None]
    ) -> Drawn | None:
        """Return a unit for each draw. If spare units do not suffice, ask for more.

        Return fewer units, or None, if ``max_times_sampled`` leaves too few draws."""
        client = self._client
        gathering = _Gathering(client, shards, masses)
        gathering.add(answers)
        while (missing := gathering.missing()).any():
            answers = self._answers(client.ask([int(n) if n else None for n in missing], self._law))
            gathering.add(answers)
            gone = [
                shard
                for shard in np.flatnonzero(missing).tolist()
                if (answer := answers[shard]) is None or answer.rows is None
            ]  # the shards that have been lost or emptied since the first answers
            if not gathering.reassign(gone, self._uniforms):
                if not client.counts_draws:
                    raise self._nothing(answers)
                break
        return gathering.rows()

    def _nothing(self, answers: list[Answer | None]) -> RuntimeError:
        """Return the error that says why nothing could be drawn."""
        rows = any(answer is not None and answer.state.length for answer in answers)
        if rows and self._law.slices is not None:
            return NoSlicesError.of(self._law.slices.slice_len)
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
            "a signal handler that interrupts sample() cannot sample from the same buffer. Have "
            "the handler only set a flag, and act on the flag between two uses of the buffer"
        )


class _Gathering:
    """The units of several shards for one request. Redraws may add units to those of the first
    answers.

    Args:
        shards: int64 [n], the shard of each draw.
        masses: float64 [shards], the masses in the first answers.
    """

    def __init__(self, client: ReplayClient, shards: np.ndarray, masses: np.ndarray) -> None:
        self._client = client
        self._shards = shards
        self._first_masses = self._masses = masses
        self._minimum = math.inf
        self._found: list[list[Drawn]] = [[] for _ in masses]

    def add(self, answers: Sequence[Answer | None]) -> None:
        """Add the units in answers, one answer per shard."""
        for shard, answer in enumerate(answers):
            if answer is not None:
                mass, rows = answer.state.mass, answer.rows
                scale = self._first_masses[shard] / mass if mass > 0 else 1.0
                self._minimum = min(self._minimum, answer.state.minimum * scale)
                if rows is not None:
                    rows.scale = np.full(rows.units, scale)
                    self._found[shard].append(self._client.in_buffer(shard, rows))

    def missing(self) -> np.ndarray:
        """Give each draw a unit. Return how many units are missing from each shard, [shards]."""
        self._received = np.array([sum(rows.units for rows in part) for part in self._found])
        self._unit, missing = number_rows(self._shards, self._received)
        return missing

    def reassign(self, gone: Sequence[int], uniforms: Uniforms) -> bool:
        """Assign draws that have no unit, and whose shard is gone, to other shards.

        Return whether there is another shard."""
        self._masses = self._masses.copy()
        self._masses[gone] = 0.0
        draws = np.flatnonzero((self._unit < 0) & (self._masses[self._shards] == 0))
        if draws.size and not self._masses.any():
            return False
        if draws.size:
            self._shards = self._shards.copy()
            self._shards[draws] = choose_shards(self._masses, draws.size, uniforms)
        return True

    def rows(self) -> Drawn | None:
        """Return the units in the order of the draws. Unused units go back to the hosts."""
        if not self._received.any():
            return None
        rows = joined([each for part in self._found for each in part])
        drawn = np.flatnonzero(self._unit >= 0)
        first = np.cumsum(self._received) - self._received
        units = first[self._shards[drawn]] + self._unit[drawn]
        if self._client.counts_draws:
            self._client.return_draws(rows, np.delete(np.arange(rows.units), units))
        rows = rows.select(units)
        rows.minimum = float(self._minimum)
        return rows
