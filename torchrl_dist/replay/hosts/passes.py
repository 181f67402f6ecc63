"""Sampling without replacement over hosts: one pass over the rows of all shards.

Each shard records which of its rows are left in the pass (``parts/passes.py``), so no row is drawn
twice in one pass. Passes are numbered, and a pass of the buffer has the same number in all shards.
A process asks for rows of the latest pass that it knows. A shard in an earlier pass begins the
requested pass, and a shard in a later pass returns no rows. A draw begins the next pass if no shard
that answers has rows left.

The number of rows from each shard is random, and has the same distribution as if one buffer held
all remaining rows. Other processes also draw, so a shard may have fewer rows than its last answer
said. The other shards are then asked for the missing rows.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

from torchrl_dist.errors import ConfigurationError
from torchrl_dist.forks import renewed
from torchrl_dist.replay.hosts.batches import check_not_sampling
from torchrl_dist.replay.hosts.client import ReplayClient
from torchrl_dist.replay.parts.drawn import Drawn, joined
from torchrl_dist.replay.parts.passes import NO_FULL_BATCH
from torchrl_dist.replay.parts.sampler import EMPTY
from torchrl_dist.replay.parts.storage import NoRowsError
from torchrl_dist.replay.row.packing import spec_from_text, unpack
from torchrl_dist.replay.row.stacks import values


class PassSource:
    """Draws the batches of a pass through a client. It draws nothing ahead.

    Args:
        sampler: a sampler with the attributes ``drop_last``, ``shuffle`` and ``_uniforms`` (random
            numbers for the choice of shards), and the method ``_begins``. Before the first rows of
            a batch are drawn, ``_begins`` is called with the number of the pass.
    """

    batches_ahead = 0

    def __init__(self, client: ReplayClient, sampler: Any) -> None:
        self._client, self._sampler = client, sampler
        shards = len(client.links)
        self.number = 0
        """The number of the latest pass that this process knows."""
        self._left = np.zeros(shards, np.int64)  # upper bounds of rows left in the pass
        self._lengths = np.zeros(shards, np.int64)
        self._lock = renewed(self, "_lock", threading.RLock)

    @property
    def left(self) -> int:
        """An upper bound of the number of rows that remain in the pass, over all shards."""
        return int(self._left.sum())

    def drop(self) -> None:
        """Forget how many rows remain, so that the next draw asks again. Call this method after
        rows were replaced."""
        self._left = np.zeros_like(self._left)

    def next(self, count: int) -> Drawn:
        """Return the next ``count`` rows of the pass, or fewer at its end. Usually blocks for one
        call.

        Raises:
            NoRowsError: no row is published.
            ConfigurationError: with ``drop_last``, fewer rows than a batch are published.
            DeadlineError, PeerLostError: too few hosts answer.
        """
        self._client.check()
        check_not_sampling(self._lock)
        with self._lock:
            found: list[Drawn] = []
            looked = False
            while (missing := count - sum(rows.units for rows in found)) > 0:
                if self.left:
                    if not found:
                        self._sampler._begins(self.number)
                    number = self.number
                    found += self._take(self._share(missing))
                    if self.number != number:  # other processes have begun the next pass
                        found = [] if self._sampler.drop_last else found
                        if found:
                            break
                elif not looked:  # other processes may have begun another pass
                    looked = True
                    self._look()
                elif found and not self._sampler.drop_last:
                    break
                else:
                    found, looked = [], False
                    self._check_lengths(count)
                    self._sampler._begins(self.number + 1)
                    self.number, self._left = self.number + 1, self._lengths.copy()
            batch = joined(found)
            self._client.learn_spec(batch.spec)
            return batch

    def _check_lengths(self, count: int) -> None:
        rows = int(self._lengths.sum())
        if not rows:
            raise NoRowsError(EMPTY)
        if self._sampler.drop_last and rows < count:
            raise ConfigurationError(NO_FULL_BATCH.format(count, rows))

    def _share(self, count: int) -> np.ndarray:
        """Draw how many rows come from each shard, int64 [shards], at most ``count`` in total.

        The law is the same as if rows were drawn one by one from all rows left."""
        left = self._left
        if left.size == 1 or left.sum() <= count:
            return np.minimum(left, count)
        if not self._sampler.shuffle:
            before = np.cumsum(left) - left
            return np.clip(count - before, 0, left)
        seed = (self._sampler._uniforms(2) * 2.0**52).astype(np.int64)
        return np.random.default_rng(seed).multivariate_hypergeometric(left, count)

    def _look(self) -> None:
        self._take(np.zeros_like(self._left))

    def _take(self, counts: np.ndarray) -> list[Drawn]:
        """Draw rows of the pass, and note the rows left in all shards that were asked."""
        client, look = self._client, not counts.any()
        calls = {
            shard: (self.number, int(count), self._sampler.shuffle)
            for shard, count in enumerate(counts)
            if (look or count) and client.answers_now(shard)
        }
        answers = client.order_each("take_of_pass", calls, trouble=client.note_trouble)
        left = np.zeros_like(self._left) if look else self._left.copy()
        left[[shard for shard, count in enumerate(counts) if count]] = 0  # until it answers
        found, numbers = [], {}
        if look:
            self._lengths = np.zeros_like(left)
        for shard, answer in answers.items():
            numbers[shard], left[shard], self._lengths[shard], text, packed = answer
            if packed and len(packed[0]):
                slot, generation, *stored = unpack(packed)
                spec = spec_from_text(text)
                leaf = np.ones(slot.size)
                rows = Drawn.of(spec, slot, generation, leaf, values(stored, spec))
                found.append(client.in_buffer(shard, rows))
        newest = max(numbers.values(), default=0)
        if newest > self.number:
            self.number = newest
            if not look:
                self._look()
                return found
        for shard, number in numbers.items():
            if number < self.number:  # the shard begins the pass when its first rows are taken
                left[shard] = self._lengths[shard]
        self._left = left
        return found
