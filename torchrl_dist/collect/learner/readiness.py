"""When is a batch complete? Rules over sets of workers. Those here are pure: no waiting, no
processes; DD-PPO's, which asks other learners, is ``recipes/ddppo/preempt_all.py``.

The collector asks its rule whenever a rollout has arrived, and once more when the rule's own
deadline has passed. The deadline counts from the beginning of the call for a batch and bounds the
whole call, however many workers there are. What is not taken now belongs to a later batch.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from torchrl_dist.errors import ConfigurationError


class Readiness(ABC):
    """Decides which rollouts make a batch."""

    @property
    def in_rounds(self) -> bool:
        """Whether a batch joins the rollouts that all workers began for it (which then are of one
        length), or takes rollouts one by one as they come."""
        return True

    @property
    def deadline_s(self) -> float | None:
        """Seconds after which ``take`` may answer otherwise without a new arrival; None: never."""
        return None

    @property
    def cuts(self) -> bool:
        """Whether ``least_part`` may ever name a part: then batches carry a mask."""
        return False

    def rollouts_per_batch(self, num_workers: int) -> int:
        """Rollouts in a batch when all workers are well; frames_per_batch is divided by this."""
        return num_workers

    @abstractmethod
    def take(
        self, arrived: Sequence[int], expected: Sequence[int], waited_s: float
    ) -> tuple[int, ...]:
        """The workers whose rollouts are the batch, or nothing: wait on.

        Args:
            arrived: workers with a rollout that is ready, in the order of arrival.
            expected: workers that live and were asked for this batch; includes ``arrived``
                (and some that died after their rollout had arrived).
        """

    def least_part(self, arrived: Sequence[int], expected: Sequence[int]) -> float | None:
        """The part of its rollout with which a worker that has not arrived may stop now; None: it
        is to finish."""
        return None


@dataclass(frozen=True)
class WaitAll(Readiness):
    """A batch is one rollout of every worker, in the order of their indices.

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
    """A batch is the rollout that has been ready for longest; no worker waits for another.

    Rollouts of the others are older by one update or more when their turn comes, even with
    ``max_policy_lag=0``: the batch says so in ``policy_version``.

    Example:
        >>> FirstReady().take(arrived=[1, 0], expected=[0, 1], waited_s=0.0)
        (1,)
    """

    @property
    def in_rounds(self) -> bool:
        return False

    def rollouts_per_batch(self, num_workers: int) -> int:
        return 1

    def take(
        self, arrived: Sequence[int], expected: Sequence[int], waited_s: float
    ) -> tuple[int, ...]:
        return tuple(arrived[:1])


@dataclass(frozen=True)
class Quorum(Readiness):
    """A batch is one rollout of every worker, or of those that have one after ``timeout_s``.

    At that instant at least ``min_workers`` must have delivered (of those that live), else the
    batch waits for as many. A late rollout is whole and belongs to a later batch, where it is older
    by an update (``policy_version`` says so). Rollouts of one batch are of one length: near
    ``total_frames``, where they get shorter, batches may have fewer of them.

    Args:
        min_workers: at least 1.
        timeout_s: counts from the beginning of the call for the batch, once for all workers.

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

    @property
    def in_rounds(self) -> bool:
        return False

    def rollouts_per_batch(self, num_workers: int) -> int:
        if self.min_workers > num_workers:
            raise ConfigurationError(f"{self}: there are only {num_workers} workers")
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
    """Once ``fraction`` of the workers have delivered, the others stop early.

    They hand in what they have, but at least ``min_part`` of a rollout, so that a batch waits for a
    slow env neither long nor in vain (DD-PPO, Wijmans et al. 2020, section 3.1, which preempts when
    60 % have finished, after at least a quarter of the steps). The batch stays ``[N, T]``: rows
    that a worker did not collect are zero, with trajectory id -1 and False in
    ``("collector", "mask")``. The last row before them is ``truncated`` (and ``done``), so that
    advantages bootstrap there; its episode goes on in the next batch under a new trajectory id.

    Args:
        fraction: of the workers asked for this batch, above 0, at most 1 (never cuts).
        min_part: above 0, at most 1.

    Example:
        >>> Preempt(fraction=0.6, min_part=0.25).least_part(arrived=[0, 2], expected=[0, 1, 2])
        0.25
    """

    fraction: float = 0.6
    min_part: float = 0.25

    def __post_init__(self) -> None:
        if not (0 < self.fraction <= 1 and 0 < self.min_part <= 1):
            raise ConfigurationError(f"{self}: expected both above 0 and at most 1")

    @property
    def cuts(self) -> bool:
        return True

    def take(
        self, arrived: Sequence[int], expected: Sequence[int], waited_s: float
    ) -> tuple[int, ...]:
        return tuple(sorted(arrived)) if set(arrived) >= set(expected) else ()

    def least_part(self, arrived: Sequence[int], expected: Sequence[int]) -> float | None:
        ready = len(arrived) >= self.fraction * len(set(expected) | set(arrived))
        return self.min_part if arrived and ready else None
