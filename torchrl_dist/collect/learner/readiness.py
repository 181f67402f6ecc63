"""Rules that decide when a batch is complete. All rules are pure functions of sets of workers,
except the rule of the recipe DD-PPO, which asks other learners (``recipes/ddppo/preempt_all.py``).

The collector asks its rule whenever a rollout arrives, and once more when the rule's deadline has
passed. The deadline is counted from the time when the caller began to wait for the batch. The
deadline is the same for all workers. If the rule does not take a rollout into the current batch,
the rollout is kept for a later batch.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torchrl_dist.errors import ConfigurationError


class Readiness(ABC):
    """Decide which rollouts form a batch.

    Attributes:
        in_rounds: whether all workers begin a rollout of the same length for each batch. Otherwise,
            batches take rollouts one by one as they arrive.
        cuts: whether ``least_part`` may return a fraction, so that rollouts are cut. Batches then
            have a mask.
    """

    in_rounds: ClassVar[bool] = True
    cuts: ClassVar[bool] = False

    @property
    def deadline_s(self) -> float | None:
        """Seconds of waiting after which the result of ``take`` may change although no rollout has
        arrived. None if the result changes only when a rollout arrives."""
        return None

    def rollouts_per_batch(self, num_workers: int) -> int:
        """Return how many rollouts a batch has if no worker is lost or late. The collector rounds
        ``frames_per_batch`` up to a multiple of this number."""
        return num_workers

    @abstractmethod
    def take(
        self, arrived: Sequence[int], expected: Sequence[int], waited_s: float
    ) -> tuple[int, ...]:
        """Return the workers whose rollouts form the batch, or an empty tuple to continue waiting.

        Args:
            arrived: workers whose rollout has arrived, in the order of arrival.
            expected: workers that were asked for a rollout of this batch, except workers that died
                before their rollout arrived. Includes ``arrived``.
            waited_s: seconds since the caller began to wait for this batch.
        """

    def least_part(self, arrived: Sequence[int], expected: Sequence[int]) -> float | None:
        """Return the fraction of a rollout after which workers that have not delivered may stop, or
        None if these workers must finish the rollout."""
        return None


@dataclass(frozen=True)
class WaitAll(Readiness):
    """A batch is one rollout of every worker, in the order of the workers' indices.

    Example:
        >>> WaitAll().take(arrived=[1], expected=[0, 1], waited_s=3.0)
        ()
        >>> WaitAll().take(arrived=[1, 0], expected=[0, 1], waited_s=3.0)
        (0, 1)
    """

    def take(
        self, arrived: Sequence[int], expected: Sequence[int], waited_s: float
    ) -> tuple[int, ...]:
        return tuple(sorted(arrived)) if set(arrived) >= set(expected) else ()


@dataclass(frozen=True)
class FirstReady(Readiness):
    """A batch is the rollout that has been ready longest, so no worker waits for another worker.

    The other rollouts form later batches. Their rows then lag by one update or more, even with
    ``max_policy_lag=0``, as the rows' ``policy_version`` shows.

    Example:
        >>> FirstReady().take(arrived=[1, 0], expected=[0, 1], waited_s=0.0)
        (1,)
    """

    in_rounds = False

    def rollouts_per_batch(self, num_workers: int) -> int:
        return 1

    def take(
        self, arrived: Sequence[int], expected: Sequence[int], waited_s: float
    ) -> tuple[int, ...]:
        return tuple(arrived[:1])


@dataclass(frozen=True)
class Quorum(Readiness):
    """A batch is one rollout of every worker, or of those workers that have delivered by
    ``timeout_s``.

    If fewer than ``min_workers`` workers have delivered at this deadline, the batch waits until
    ``min_workers`` workers, or all living workers, have delivered. A late rollout is not cut. It
    becomes part of a later batch, where its rows lag by one more update (see ``policy_version``).
    All rollouts of a batch have the same length. Near ``total_frames``, rollouts may differ in
    length, so a batch may have fewer rollouts.

    Args:
        min_workers: number of workers that must have delivered, at least 1.
        timeout_s: deadline for all workers, in seconds since the caller began to wait for the
            batch.

    Example:
        >>> Quorum(min_workers=1, timeout_s=0.5).take(arrived=[1], expected=[0, 1], waited_s=0.1)
        ()
        >>> Quorum(min_workers=1, timeout_s=0.5).take(arrived=[1], expected=[0, 1], waited_s=0.6)
        (1,)
    """

    min_workers: int
    timeout_s: float

    def __post_init__(self) -> None:
        if self.min_workers < 1 or not 0 <= self.timeout_s < math.inf:
            raise ConfigurationError(
                f"{self}: expected min_workers of at least 1 and a finite timeout_s of at least 0"
            )

    in_rounds = False

    def rollouts_per_batch(self, num_workers: int) -> int:
        if self.min_workers > num_workers:
            raise ConfigurationError(
                f"{self}: expected min_workers of at most {num_workers}, the number of workers"
            )
        return num_workers

    @property
    def deadline_s(self) -> float | None:
        return self.timeout_s

    def take(
        self, arrived: Sequence[int], expected: Sequence[int], waited_s: float
    ) -> tuple[int, ...]:
        enough = waited_s >= self.timeout_s and len(arrived) >= self.min_workers
        return tuple(sorted(arrived)) if enough or set(arrived) >= set(expected) else ()


@dataclass(frozen=True)
class Preempt(Readiness):
    """Once ``fraction`` of the workers have delivered, the other workers stop early.

    Workers that stop early deliver the rows that they have, but at least ``min_part`` of a rollout.
    A batch thus does not wait long for a slow env, and still contains rows of the slow env. In
    DD-PPO, the source of this rule (Wijmans et al. 2020, section 3.1), workers stop when 60 % of
    the workers have finished, but not before a quarter of the steps.

    The batch keeps its shape ``[N, T]``. Rows that a worker did not collect are zero, with
    trajectory id -1 and False in ``("collector", "mask")``. The last row before the zeros is
    ``truncated`` (and ``done``), so that advantages bootstrap there. The episode continues in the
    next batch under a new trajectory id.

    Args:
        fraction: a number above 0 and at most 1. When this fraction of the batch's workers has
            delivered, the other workers stop early. With 1, no rollout is cut.
        min_part: the fraction of a rollout that a worker must make before it may stop early, above
            0 and at most 1.

    Example:
        >>> Preempt(fraction=0.6, min_part=0.25).least_part(arrived=[0, 2], expected=[0, 1, 2])
        0.25
    """

    fraction: float = 0.6
    min_part: float = 0.25

    def __post_init__(self) -> None:
        if not (0 < self.fraction <= 1 and 0 < self.min_part <= 1):
            raise ConfigurationError(
                f"{self}: expected fraction and min_part, each above 0 and at most 1"
            )

    cuts = True

    def take(
        self, arrived: Sequence[int], expected: Sequence[int], waited_s: float
    ) -> tuple[int, ...]:
        return tuple(sorted(arrived)) if set(arrived) >= set(expected) else ()

    def least_part(self, arrived: Sequence[int], expected: Sequence[int]) -> float | None:
        ready = len(arrived) >= self.fraction * len(set(expected) | set(arrived))
        return self.min_part if arrived and ready else None
