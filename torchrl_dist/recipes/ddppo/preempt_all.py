"""Ends DD-PPO's rollouts early, once enough of the job's collectors are done."""

from __future__ import annotations

import math
import threading
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import Future

from ...collect.learner.readiness import Readiness
from ...learn.ranks import Ranks
from ...runtime import Remote, Session

_LOOK_S = 0.01  # the longest delay until a rollout is told to end


class Tally:
    """Count how many of the job's collectors are done with a batch. A job has one tally.

    Args:
        fraction: fraction of the job's collectors that must be done before the others may stop.
        workers: the number of workers of each learner at the start.
    """

    def __init__(self, fraction: float, workers: Sequence[int]) -> None:
        self._fraction = fraction
        self._workers = list(workers)
        self._arrived: dict[int, list[int]] = defaultdict(lambda: [0] * len(workers))  # by batch
        self._enough: dict[int, Future[bool]] = defaultdict(Future)
        self._lock = threading.Lock()

    def arrived(self, batch: int, learner: int, count: int, workers: int) -> None:
        """Record that a learner has ``workers`` live workers, of which ``count`` have delivered."""
        with self._lock:
            self._workers[learner] = workers
            counts = self._arrived[batch]
            counts[learner] = max(count, counts[learner])
            future = self._enough[batch]
            enough = sum(counts) >= self._fraction * sum(self._workers)
            for before in (self._arrived, self._enough):
                # no learner asks about earlier batches, because learners wait for each other after
                # each batch
                before.pop(batch - 2, None)
            if enough and not future.done():
                future.set_result(True)

    def enough(self, batch: int) -> Future[bool]:
        """Return a future that becomes true once enough collectors have delivered."""
        with self._lock:
            return self._enough[batch]


class PreemptAll(Readiness):
    """Like :class:`~torchrl_dist.Preempt`, but the fraction counts the collectors of all
    learners.

    A learner without collectors steps its environments itself and counts as a collector. This
    object reports arrivals to the tally and does not wait for answers. All learners must take the
    same number of batches, because the tally counts by the batch's number.

    Args:
        tally: from :func:`tally_of_all`.
        learner: this learner's index.
        min_part: the smallest part of a rollout that may be kept, above 0 and at most 1.
    """

    cuts = True

    def __init__(self, tally: Remote[Tally], learner: int, min_part: float) -> None:
        self._tally = tally
        self._learner = learner
        self._min_part = min_part
        self._batch = 0
        self._told: tuple[int, int] | None = None
        self._enough: Future[bool] | None = None
        self._waited_s = 0.0

    @property
    def deadline_s(self) -> float:
        return self._waited_s + _LOOK_S

    def take(
        self, arrived: Sequence[int], expected: Sequence[int], waited_s: float
    ) -> tuple[int, ...]:
        self._waited_s = waited_s
        self._tell(len(arrived), len(set(expected) | set(arrived)))
        if not set(arrived) >= set(expected):
            return ()
        self._batch += 1
        self._told = self._enough = None
        return tuple(sorted(arrived))

    def least_part(self, arrived: Sequence[int], expected: Sequence[int]) -> float | None:
        if self._enough is None:
            self._enough = self._tally.submit("enough", self._batch, timeout_s=math.inf)
        # An error means that a learner is lost. The next exchange between all learners reports it.
        known = self._enough.done() and self._enough.exception() is None
        return self._min_part if known else None

    def _tell(self, arrived: int, workers: int) -> None:
        if self._told != (arrived, workers):
            self._told = (arrived, workers)
            self._tally.submit("arrived", self._batch, self._learner, arrived, workers)


def tally_of_all(session: Session, ranks: Ranks, fraction: float, workers: int) -> Remote[Tally]:
    """Return the job's tally, which the first learner keeps.

    Each learner calls this with the number of its workers. Blocks until all have called."""
    counts = ranks.exchange(workers, "the number of workers")
    mine = session.remote(session.me, Tally, fraction, counts) if ranks.is_first else None
    key = ranks.exchange(mine.key if mine is not None else None, "the tally")[0]
    return Remote(session.of_role("learner")[0], key, session.session_id)
