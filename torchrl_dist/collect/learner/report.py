"""The statistics of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torchrl_dist.collect.worker.worker import RolloutStats
from torchrl_dist.errors import ConfigurationError

_REQUIRED = object()


@dataclass(frozen=True)
class CollectReport:
    """The statistics of a batch. With ``replay_buffer=``, the collector yields objects of this
    class.

    Counts cover all workers of the collector. The keys of all mappings are worker indices.
    ``shares`` and ``episode_lengths_by_worker`` show whether fast workers or short episodes
    dominate the data.

    Attributes:
        frames: number of env steps in this batch.
        total_frames: number of env steps so far, including the steps of earlier runs if the job was
            resumed.
        frames_by_worker: ``frames`` by worker.
        total_frames_by_worker: ``total_frames`` by worker.
        episode_returns: sums of rewards of the episodes that ended in this batch.
        episode_lengths: steps of the episodes that ended in this batch.
        episode_lengths_by_worker: ``episode_lengths`` by worker.
        policy_version: version of the newest weights given to the collector.
        policy_lag: ``policy_version`` minus the oldest policy version in this batch.
        messages: number of rollouts in this batch. Each rollout is sent as one message.
        data_bytes: size of this batch's rollouts, in bytes.
        wait_s: seconds for which the caller was blocked until this batch was complete.
        collect_s: seconds that stepping the envs took, by worker.
        write_s: seconds that postproc and writing to the replay buffer took, by worker.
        lost_workers: names of the workers that have died so far.
        replaced: for each env process that ended in this batch and was replaced, a text that names
            the process and says how it ended.

    Example:
        >>> report = CollectReport(total_frames=100, total_frames_by_worker={0: 75, 1: 25})
        >>> report.shares
        {0: 0.75, 1: 0.25}
    """

    frames: int = 0
    total_frames: int = 0
    frames_by_worker: dict[int, int] = field(default_factory=dict)
    total_frames_by_worker: dict[int, int] = field(default_factory=dict)
    episode_returns: tuple[float, ...] = ()
    episode_lengths: tuple[int, ...] = ()
    episode_lengths_by_worker: dict[int, tuple[int, ...]] = field(default_factory=dict)
    policy_version: int = 0
    policy_lag: int = 0
    messages: int = 0
    data_bytes: int = 0
    wait_s: float = 0.0
    collect_s: dict[int, float] = field(default_factory=dict)
    write_s: dict[int, float] = field(default_factory=dict)
    lost_workers: tuple[str, ...] = ()
    replaced: tuple[str, ...] = ()

    @property
    def shares(self) -> dict[int, float]:
        """Each worker's fraction of all frames so far. The fractions are equal if all workers have
        collected the same number of frames."""
        total = max(1, sum(self.total_frames_by_worker.values()))
        return {worker: n / total for worker, n in self.total_frames_by_worker.items()}

    # ---- methods that TorchRL's trainers call on a batch to count its frames

    def numel(self) -> int:
        """The same as :attr:`frames`."""
        return self.frames

    def keys(self, *_: Any) -> tuple[()]:
        """Return no keys, because the rows are in the replay buffer."""
        return ()

    def get(self, key: Any, default: Any = _REQUIRED) -> Any:
        """Return ``default``, because the rows are in the replay buffer.

        Raises:
            ConfigurationError: no default was given.
        """
        if default is _REQUIRED:
            raise ConfigurationError(
                f"a CollectReport has no {key!r}, because the workers wrote the rows into the "
                "replay buffer. In a trainer, register sample() and update_priority() of "
                "ReplayBufferTrainer, but not extend(). To log values, register a hook for "
                "'post_optim_log', which gets sampled batches, or read collector.report"
            )
        return default

    __getitem__ = get


def summarize(rollouts: Sequence[RolloutStats], known: CollectReport) -> CollectReport:
    """Return the report ``known`` with the statistics of these rollouts filled in."""
    frames: dict[int, int] = {}
    collect_s: dict[int, float] = {}
    write_s: dict[int, float] = {}
    lengths: dict[int, tuple[int, ...]] = {}
    for r in rollouts:
        lengths[r.worker_index] = (*lengths.get(r.worker_index, ()), *r.episode_lengths)
        frames[r.worker_index] = frames.get(r.worker_index, 0) + r.frames
        collect_s[r.worker_index] = collect_s.get(r.worker_index, 0.0) + r.collect_s
        write_s[r.worker_index] = write_s.get(r.worker_index, 0.0) + r.write_s
    return replace(
        known,
        frames=sum(frames.values()),
        frames_by_worker=frames,
        episode_returns=tuple(x for r in rollouts for x in r.episode_returns),
        episode_lengths=tuple(n for r in rollouts for n in r.episode_lengths),
        episode_lengths_by_worker=lengths,
        policy_lag=known.policy_version - min(r.oldest_version for r in rollouts),
        messages=len(rollouts),
        data_bytes=sum(r.data_bytes for r in rollouts),
        collect_s=collect_s,
        write_s=write_s,
        replaced=tuple(
            f"{what}, of worker {r.worker_index}" for r in rollouts for what in r.replaced
        ),
    )
