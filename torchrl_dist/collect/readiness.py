"""When is a batch complete? Pure rules over sets of workers; no waiting, no processes.

The collector asks its rule whenever a rollout has arrived, and once more when the rule's own
deadline has passed. The deadline counts from the beginning of the call for a batch and bounds the
whole call, however many workers there are. What is not taken now belongs to a later batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


class Readiness(Protocol):
    """Decides which rollouts make a batch."""

    @property
    def in_rounds(self) -> bool:
        """Whether a batch joins the rollouts that all workers began for it (which then are of one
        length), or takes rollouts one by one as they come."""

    @property
    def deadline_s(self) -> float | None:
        """Seconds after which ``take`` may answer otherwise without a new arrival; None: never."""

    def rollouts_per_batch(self, num_workers: int) -> int:
        """Rollouts in a batch when all workers are well; frames_per_batch is divided by this."""

    def take(
        self, arrived: Sequence[int], expected: Sequence[int], waited_s: float
    ) -> tuple[int, ...]:
        """The workers whose rollouts are the batch, or nothing: wait on.

        Args:
            arrived: workers with a rollout that is ready, in the order of arrival.
            expected: workers that live and were asked for this batch; includes ``arrived``
                (and some that died after their rollout had arrived).
        """


@dataclass(frozen=True)
class WaitAll:
    """A batch is one rollout of every worker, in the order of their indices."""

    in_rounds: bool = True
    deadline_s: float | None = None

    def rollouts_per_batch(self, num_workers: int) -> int:
        return num_workers

    def take(
        self, arrived: Sequence[int], expected: Sequence[int], waited_s: float
    ) -> tuple[int, ...]:
        return tuple(sorted(arrived)) if set(arrived) >= set(expected) else ()


@dataclass(frozen=True)
class FirstReady:
    """A batch is the rollout that has been ready for longest; no worker waits for another.

    Rollouts of the others are older by one update or more when their turn comes, even with
    ``max_policy_lag=0``: the batch says so in ``policy_version``.
    """

    in_rounds: bool = False
    deadline_s: float | None = None

    def rollouts_per_batch(self, num_workers: int) -> int:
        return 1

    def take(
        self, arrived: Sequence[int], expected: Sequence[int], waited_s: float
    ) -> tuple[int, ...]:
        return tuple(arrived[:1])
