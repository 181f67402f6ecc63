"""Divide the job's frames among workers before the frames are collected.

Because frames are divided in advance, the total is exact, and no collected frames are discarded. If
a worker dies, the other workers can collect that worker's share.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Share:
    """The frames that one worker must collect in a round: ``steps`` steps of its first ``num_envs``
    envs."""

    num_envs: int
    steps: int

    @property
    def frames(self) -> int:
        return self.num_envs * self.steps


def plan_shares(remaining: int | None, workers: Mapping[int, int], steps: int) -> dict[int, Share]:
    """Divide the remaining frames among workers, in blocks ``[N, T]``.

    Every worker gets ``steps`` steps while enough frames are left. After that, all workers get one
    shorter rollout of equal length. If fewer frames than envs are left, each of these frames is one
    step of a different env.

    Args:
        remaining: frames that may still be collected; None means no limit.
        workers: number of envs of each worker.

    Returns:
        the shares by worker, without the workers that get no share. All shares together have at
        most ``remaining`` frames.
    """
    per_step = sum(workers.values())
    if remaining is None or remaining >= per_step:
        length = steps if remaining is None else min(steps, remaining // per_step)
        return {worker: Share(envs, length) for worker, envs in workers.items()}
    shares = {}
    for worker, envs in workers.items():
        granted = min(envs, remaining)
        if granted > 0:
            shares[worker] = Share(granted, 1)
        remaining -= granted
    return shares


@dataclass
class FrameBudget:
    """Hand out shares until no frames are left.

    Attributes:
        remaining: number of frames that no worker has been asked for yet; None means no limit.
        in_rounds: whether each batch is one round, whose shares all have the same length.
        round: number of the round that will be delivered next, if ``in_rounds``.
        assigned: number of frames that workers were asked for. In a resumed job, this number
            includes the frames of earlier runs.
    """

    remaining: int | None
    in_rounds: bool
    round: int = 0
    assigned: int = 0
    _before: dict[int, int] = field(default_factory=dict)
    _plans: dict[int, dict[int, Share]] = field(default_factory=dict)
    _next_round: dict[int, int] = field(default_factory=dict)

    @property
    def begun(self) -> bool:
        return bool(self._next_round)

    def next_share(
        self, worker: int, alive: Mapping[int, int], steps: int
    ) -> tuple[int, Share] | None:
        """Return the number of the worker's next round and the worker's share of this round, or
        None if no frames are left.

        Args:
            alive: number of envs of each living worker, including this worker.
            steps: usual length of a rollout.
        """
        round_ = self._next_round.get(worker, 0)
        if not self.in_rounds:
            share = self._assign({worker: alive[worker]}, steps).get(worker)
        else:
            round_ = max(round_, self.round)
            share = None
            # This loop ends, because a newly planned round includes this worker, except for the
            # last round, after which no frames are left.
            while share is None:
                if round_ not in self._plans:
                    self._before[round_] = self.assigned
                    plan = self._assign(alive, steps)
                    if not plan:
                        break
                    self._plans[round_] = plan
                share = self._plans[round_].get(worker)
                round_ += share is None
        if share is None:
            return None
        self._next_round[worker] = round_ + 1
        return round_, share

    def frames_before(self, round_: int, share: Share) -> int:
        """Return the number of frames assigned before ``round_``. If rollouts are taken one by one,
        return the number of frames assigned before ``share``, which must be the latest share."""
        return self._before[round_] if self.in_rounds else self.assigned - share.frames

    def _assign(self, workers: Mapping[int, int], steps: int) -> dict[int, Share]:
        shares = plan_shares(self.remaining, workers, steps)
        self.assigned += sum(share.frames for share in shares.values())
        if self.remaining is not None:
            self.remaining -= sum(share.frames for share in shares.values())
        return shares

    def give_back(self, worker: int, round_: int, share: Share) -> None:
        """Take back a lost worker's share of ``round_``, and its shares of later rounds."""
        freed = [share]
        if self.in_rounds:
            freed = [
                plan.pop(worker)
                for number, plan in self._plans.items()
                if number >= round_ and worker in plan
            ]
        self.return_frames(sum(each.frames for each in freed))

    def return_frames(self, frames: int) -> None:
        """Let other workers collect ``frames`` frames, because a worker did not collect these
        frames of its share."""
        self.assigned -= frames
        if self.remaining is not None:
            self.remaining += frames

    def expected(self) -> list[int]:
        """Return the workers that have delivered or must deliver in the current round. After the
        last round, return an empty list."""
        while (plan := self._plans.get(self.round)) is not None and not plan:
            self.finish_round()  # all workers of the round have died
        return list(plan or ())

    def finish_round(self) -> None:
        del self._plans[self.round], self._before[self.round]
        self.round += 1
