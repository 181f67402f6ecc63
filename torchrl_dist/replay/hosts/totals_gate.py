"""The rate limiter of a buffer in other processes. It uses totals over the buffer's shards.

*One definition for one host and for many shards.* Inserts, samples and size are sums over the
shards. Each shard counts the rows published there. The rows of a batch count at their shards when
the batch is returned to its caller, not when it is drawn ahead. Every reply has the counts. The
processes that sample and write use these counts to decide whether to wait. Shards never delay a
request, so a shard's threads never wait.

*How fresh the counts are.* To the counts in a shard's last reply, a process adds its own operations
since then. The limiter is therefore exact for one process that samples and one that
writes. Each process knows operations of the others only up to the shards' last replies. The
difference that ``law.limiter`` defines may therefore leave its range. Each other process may lower
the difference by up to ``prefetch + batches_per_call + 1`` batches below the range, or raise it by
one ``extend`` above the range. A process that must wait asks the shards at once for their counts,
and again after pauses that grow from 2 ms to 50 ms, so outdated counts do not make it wait for
long.

Each shard enforces ``max_times_sampled`` exactly. A row counts when it is drawn, so all processes
together never return a row more often than allowed. A shard's size leaves out rows whose draws are
used up, even if a process drew them ahead and has not returned them to its caller yet. Each process
therefore adds the rows that it has drawn ahead to the size. Unused draws (spare ones, and those of
dropped batches) are sent back with the next message to the shard. Draws are lost only if a process
died or ended with unused draws. One process loses at most the draws of
``prefetch + batches_per_call`` batches, with their spare draws.

The last known counts of a lost shard stay in the totals. After a restart, and in a process that
starts after the loss, the lost shard's counts are unknown. If the other shards' counts are then
outside the range, the limiter continues at the nearer end of the range.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from torchrl.data.replay_buffers.storages import Storage

from torchrl_dist.errors import PeerLostError, RateLimitError
from torchrl_dist.forks import renewed
from torchrl_dist.replay.hosts.batches import BatchSource
from torchrl_dist.replay.hosts.client import ReplayClient
from torchrl_dist.replay.law.limiter import Counts, RateLimiter
from torchrl_dist.replay.node.gate import process_ends, told_to_stop
from torchrl_dist.replay.parts.drawn import Drawn
from torchrl_dist.replay.parts.storage import NoRowsError
from torchrl_dist.replay.row import _torchrl
from torchrl_dist.runtime.awake import awake
from torchrl_dist.stopping import gives_up

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 2e-3, 5e-2


class TotalsGate:
    """The gate at which a client of the hosts waits. Thread-safe."""

    def __init__(self, client: ReplayClient, limiter: RateLimiter) -> None:
        self.limiter = limiter
        self._client = client
        self._admitted = 0  # sampled rows that their shards have not counted yet
        self._settled: int | None = None  # number of samples that replaces lost shards' counts
        self._lock = renewed(self, "_lock", threading.RLock)

    def counts(self) -> Counts | None:
        """Return the counts that this process knows, or None until every shard that can be called
        has answered once."""
        with self._lock:
            counts = self._client.counts()
            if counts is None:
                return None
            if self._settled is None:
                unknown = self._client.without_counts()
                if all(isinstance(problem, PeerLostError) for problem in unknown):
                    self._settled = self.limiter.samples_to_settle(counts) if unknown else 0
            samples = counts.samples + self._admitted + (self._settled or 0)
            return counts._replace(samples=samples)

    def can_sample(self, count: int, source: BatchSource) -> bool:
        """Return whether a sample of that many rows could begin now. Blocks for one call."""
        self._client.states()
        with self._lock:
            return self._missing_inserts(count, source) is None

    def sample(self, count: int, source: BatchSource, storage: Storage) -> Drawn:
        """Return the next batch of that many rows, once the limiter admits it.

        Raises:
            RateLimitError: within the client's deadline, the limiter did not admit the sample, or
                other processes used up the draws that ``max_times_sampled`` allows.
            NoRowsError: the limiter admits the sample, but the shards that answer have no rows.
            ConfigurationError: samples of that many rows could wait indefinitely.
        """
        self.limiter.check_batch(count)
        _torchrl.fetch_one_by_one(storage)
        deadline = awake() + self._client.timeout_s

        def admit() -> str | None:
            missing = self._missing_inserts(count, source)
            if missing is None:
                self._admitted += count
            return missing

        while True:
            self._wait(admit, deadline, storage)
            batch = None
            try:
                batch = source.next(count)
                return batch
            except NoRowsError as error:
                no_rows = error  # other processes have drawn from the shards since the replies
            finally:
                with self._lock:  # in one step, or other threads would count the rows twice
                    self._admitted -= count
                    if batch is not None:
                        self._client.count_samples(batch.index)
            with _torchrl.locks_given_back(storage):
                if not self.can_sample(count, source):
                    continue
                if self.limiter.max_times_sampled is None:
                    raise no_rows
                if awake() > deadline:
                    raise self._error(
                        "rows that may still be drawn and that no other process has drawn,"
                    )
                time.sleep(_LONGEST_PAUSE_S)

    def wait_to_write(self, storage: Storage) -> None:
        """Block until a write may begin, and earlier writes of this process have been answered.

        Raises:
            RateLimitError: the write was not admitted within the client's deadline. Nothing was
                written.
        """
        if self.limiter.samples_per_insert is None:
            return
        self._client.await_applied()
        deadline = awake() + self._client.timeout_s
        self._wait(self._missing_samples, deadline, storage)

    def _missing_inserts(self, batch_size: int, source: BatchSource) -> str | None:
        counts = self.counts()
        if counts is None:
            return "an answer from the shards"
        if self.limiter.max_times_sampled is not None:
            counts = counts._replace(size=counts.size + source.rows_ahead())
        missing = self.limiter.missing_inserts(counts, batch_size)
        return f"{missing} more rows to be written before the next sample" if missing else None

    def _missing_samples(self) -> str | None:
        counts = self.counts()
        if counts is None:
            return "an answer from the shards"
        missing = self.limiter.missing_samples(counts)
        return f"{missing} more rows to be sampled before the next write" if missing else None

    def _wait(self, missing: Callable[[], str | None], deadline: float, storage: Storage) -> None:
        with self._lock:
            if missing() is None:
                return
        pause = _FIRST_PAUSE_S
        with _torchrl.locks_given_back(storage):
            while True:
                self._client.states()
                with self._lock:
                    text = missing()
                if text is None:
                    return
                left = deadline - awake()
                if process_ends.is_set() or gives_up():
                    raise told_to_stop(text)
                if left <= 0:
                    raise self._error(text)
                time.sleep(min(pause, left))
                pause = min(2 * pause, _LONGEST_PAUSE_S)

    def _error(self, missing: str) -> RateLimitError:
        return RateLimitError(
            f"waited {self._client.timeout_s:g} s for {missing} in the buffer of "
            f"{', '.join(link.name for link in self._client.links)} (counts: {self.counts()}, "
            f"limiter: {self.limiter}). Check whether the processes that write and sample have "
            "ended, or are waiting, too. A thread that both writes and samples must call "
            "can_sample() first"
        )
