"""The arithmetic of the rate limiter, without processes or waiting.

The terms are Reverb's (Cassirer et al. 2021, "Reverb: A Framework For Experience Replay", section
3.2). All numbers are counts of rows since the buffer was last emptied or its limiter was set:

    inserts      rows published, including rows that were overwritten later
    samples      rows returned by samples; a row counts each time that it is returned
    size         rows that may be sampled: min(inserts, capacity); with max_times_sampled, the
                 published rows that have not been sampled that often
    difference   samples_per_insert * inserts - samples
    range        samples_per_insert * min_size_to_sample -+ error_buffer, from lower to upper

A sample of ``k`` rows waits until ``size >= min_size_to_sample`` and ``difference - k`` is not
below the range. A write waits while ``difference`` is above the range, unless ``size <
min_size_to_sample``. When a write no longer has to wait, all its rows are written. The difference
therefore stays in the range, except that writes in progress may take it above the upper end.

*No process waits indefinitely* as long as some process samples and some process writes. This holds
because a sample and a write never wait at the same time if ``k <= 2 * error_buffer``. A sample
waits in two cases:

- ``size < min_size_to_sample``. Then writes do not wait.
- ``difference < lower + k``. Then ``difference < lower + 2 * error_buffer = upper``, and writes do
  not wait either.

With ``max_times_sampled``, a batch of ``k`` rows also requires that all rows together have at least
``k`` draws left. ``size >= k`` ensures this, so ``k <= min_size_to_sample`` is required.
:meth:`RateLimiter.check_batch` refuses batches that break these conditions.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

from torchrl_dist.errors import ConfigurationError

MOST_TIMES = 2**15 - 1

_T = TypeVar("_T")


class Counts(NamedTuple):
    """Counts of rows, as the module's docstring defines them."""

    inserts: int
    samples: int
    size: int


@dataclass(frozen=True)
class RateLimiter:
    """Keeps samples and inserts of a replay buffer in proportion. The module's docstring has the
    formula.

    Args:
        min_size_to_sample: samples wait until this many rows may be sampled. At least 1.
        samples_per_insert: average number of times that each row is sampled. Above 0. A sample of
            256 rows counts 256. If None, writes never wait.
        error_buffer: number of rows by which ``samples_per_insert * inserts - samples`` may deviate
            from the middle of its range before a process waits. At least half a batch. With a
            larger value, processes wait less often when their speeds vary.
        max_times_sampled: a row that was sampled this many times (1 to 32767) is not sampled again.
            Such a row keeps its slot, and ``len`` counts it.

    Raises:
        ConfigurationError: a value is out of range, or ``samples_per_insert`` is larger than
            ``max_times_sampled``.

    Example:
        >>> limiter = RateLimiter(min_size_to_sample=100, samples_per_insert=4.0, error_buffer=128)
        >>> limiter.range
        (272.0, 528.0)
    """

    min_size_to_sample: int = 1
    samples_per_insert: float | None = None
    error_buffer: float | None = None
    max_times_sampled: int | None = None

    def __post_init__(self) -> None:
        ratio, margin, most = self.samples_per_insert, self.error_buffer, self.max_times_sampled
        if self.min_size_to_sample < 1:
            raise ConfigurationError(
                f"min_size_to_sample must be at least 1, got {self.min_size_to_sample}"
            )
        if (ratio is None) != (margin is None):
            raise ConfigurationError(
                f"got samples_per_insert={ratio} and error_buffer={margin}: give both or neither"
            )
        if ratio is not None and not 0 < ratio < math.inf:
            raise ConfigurationError(f"samples_per_insert must be above 0, got {ratio}")
        if margin is not None and not 0 < margin < math.inf:
            raise ConfigurationError(f"error_buffer must be above 0, got {margin}")
        if most is not None and not 1 <= most <= MOST_TIMES:
            raise ConfigurationError(f"max_times_sampled must be 1 to {MOST_TIMES}, got {most}")
        if ratio is not None and most is not None and ratio > most:
            raise ConfigurationError(
                f"samples_per_insert={ratio} is larger than max_times_sampled={most}, so it cannot "
                "be reached; pass a smaller samples_per_insert, or a larger max_times_sampled"
            )

    @property
    def range(self) -> tuple[float, float]:
        """The range of the difference. Without ``samples_per_insert``, the range is unlimited."""
        if self.samples_per_insert is None or self.error_buffer is None:
            return -math.inf, math.inf
        lower = self.samples_per_insert * self.min_size_to_sample - self.error_buffer
        return lower, lower + 2 * self.error_buffer

    def difference(self, counts: Counts) -> float:
        """``samples_per_insert * inserts - samples``."""
        return (self.samples_per_insert or 0.0) * counts.inserts - counts.samples

    def missing_inserts(self, counts: Counts, batch_size: int) -> int:
        """Return how many rows must be written before ``batch_size`` rows may be sampled, or 0."""
        missing = max(0, self.min_size_to_sample - counts.size)
        if self.samples_per_insert is not None:
            short = self.range[0] + batch_size - self.difference(counts)
            if short > 0:
                missing = max(missing, 1, math.ceil(short / self.samples_per_insert))
        return missing

    def missing_samples(self, counts: Counts) -> int:
        """Return how many rows must be sampled before a write may begin, or 0."""
        if self.samples_per_insert is None or counts.size < self.min_size_to_sample:
            return 0
        return max(0, math.ceil(self.difference(counts) - self.range[1]))

    def samples_to_settle(self, counts: Counts) -> int:
        """Return the number to add to ``samples`` after a part of the counts was lost. The number
        may be negative.

        Adding this number brings the difference back into its range. The result is 0 if no row has
        been sampled and more rows must be written first."""
        lower, upper = self.range
        difference = self.difference(counts)
        if difference > upper:
            return math.ceil(difference - upper)
        return -min(counts.samples, math.ceil(lower - difference)) if difference < lower else 0

    def check_capacity(self, capacity: int) -> None:
        """Raise ConfigurationError if the buffer can never hold enough rows for a sample to
        begin."""
        if self.min_size_to_sample > capacity:
            raise ConfigurationError(
                f"min_size_to_sample={self.min_size_to_sample} is above the capacity {capacity}: "
                "no sample would ever begin; pass a smaller min_size_to_sample, or a larger "
                "capacity"
            )

    def check_batch(self, batch_size: int) -> None:
        """Raise ConfigurationError if samples of ``batch_size`` rows could wait indefinitely."""
        if self.error_buffer is not None and batch_size > 2 * self.error_buffer:
            raise ConfigurationError(
                f"error_buffer={self.error_buffer} is too small for batches of {batch_size} rows, "
                "because a sample and a write could wait for each other; pass "
                f"error_buffer={batch_size / 2:g} or more, or sample fewer rows at once"
            )
        if self.max_times_sampled is not None and batch_size > self.min_size_to_sample:
            raise ConfigurationError(
                f"min_size_to_sample={self.min_size_to_sample} is too small for batches of "
                f"{batch_size} rows: with max_times_sampled={self.max_times_sampled}, fewer than "
                f"{batch_size} rows in the buffer may not have enough draws left; pass "
                f"min_size_to_sample={batch_size} or more, or sample fewer rows at once"
            )


class Admission(Protocol):
    """The interface of ``node.gate.Gate``, which admits samples and writes of a replay directory.

    The module ``directory`` uses only this interface, because it cannot import ``gate``, which
    imports ``directory``. All numbers count rows. A ``storage`` is a TorchRL storage. During a
    wait, the calling thread does not hold the locks of the storage's buffers.
    """

    limiter: RateLimiter

    def counts(self, under_way: int = 0) -> Counts: ...

    def count_samples(self, rows: int) -> None: ...

    def state(self) -> list[float]: ...

    def set_state(self, state: list[float] | None, rows: int) -> None: ...

    def ring(self) -> None: ...

    def can_sample(self, count: int) -> bool: ...

    def draw(self, count: int, draw: Callable[[], _T], storage: Any) -> _T: ...

    def reserve(self, cursor: Any, count: int, storage: Any, plan: Any = None) -> Any: ...

    def wait_to_write(self, cursor: Any, storage: Any) -> None: ...
