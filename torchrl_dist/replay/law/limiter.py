"""How often rows may be sampled: the arithmetic, without processes or waiting.

The words are Reverb's (Cassirer et al. 2021, "Reverb: A Framework For Experience Replay", section
3.2). All counts are rows, since the buffer was last empty or its limiter was set:

    inserts      rows published, whatever became of them since
    samples      rows returned by samples; a row counts each time
    size         rows that may be sampled: min(inserts, capacity); with max_times_sampled those
                 that are published and have not been sampled that often
    difference   samples_per_insert * inserts - samples
    range        samples_per_insert * min_size_to_sample -+ error_buffer

A sample of ``k`` rows waits until ``size >= min_size_to_sample`` and ``difference - k`` is not
below the range. A write waits while ``difference`` is above the range, unless ``size <
min_size_to_sample``; then it is written whole. So the difference stays in the range, but for what
the writes under way add beyond its upper end.

*Nobody waits for ever*, as long as some process samples and some process writes: a sample and a
write never wait at the same moment if ``k <= 2 * error_buffer``. For the sample waits because

- ``size < min_size_to_sample``: then writes do not wait; or
- ``difference < lower + k``: then ``difference < lower + 2 * error_buffer = upper``, and writes do
  not wait either.

With ``max_times_sampled`` a batch must also find rows that have that many draws left: ``size >= k``
suffices, hence ``k <= min_size_to_sample`` there. :meth:`RateLimiter.check_batch` refuses what
breaks these conditions.
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
    """Rows, as the module defines them."""

    inserts: int
    samples: int
    size: int


@dataclass(frozen=True)
class RateLimiter:
    """Keeps samples and inserts of a replay buffer in proportion; see the module for the formula.

    Args:
        min_size_to_sample: samples wait until that many rows may be sampled, at least 1.
        samples_per_insert: how often each row is sampled on average, above 0; a sample of 256 rows
            counts 256. Without it writes never wait.
        error_buffer: how many sampled rows the difference may be off before somebody waits; at
            least half a batch. Larger values let fast and slow phases even out.
        max_times_sampled: a row that was sampled that often is not sampled again, 1 to 32767; it
            keeps its slot, and ``len`` counts it.

    Raises:
        ConfigurationError: a value is out of its range, or the ratio cannot be reached.

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
                f"samples_per_insert={ratio} and error_buffer={margin}: give both or neither"
            )
        if ratio is not None and not 0 < ratio < math.inf:
            raise ConfigurationError(f"samples_per_insert must be above 0, got {ratio}")
        if margin is not None and not 0 < margin < math.inf:
            raise ConfigurationError(f"error_buffer must be above 0, got {margin}")
        if most is not None and not 1 <= most <= MOST_TIMES:
            raise ConfigurationError(f"max_times_sampled must be 1 to {MOST_TIMES}, got {most}")
        if ratio is not None and most is not None and ratio > most:
            raise ConfigurationError(
                f"samples_per_insert={ratio} cannot be reached with max_times_sampled={most}: no "
                "row can be sampled more often than that"
            )

    @property
    def range(self) -> tuple[float, float]:
        """Of the difference; without ``samples_per_insert`` everything."""
        if self.samples_per_insert is None or self.error_buffer is None:
            return -math.inf, math.inf
        lower = self.samples_per_insert * self.min_size_to_sample - self.error_buffer
        return lower, lower + 2 * self.error_buffer

    def difference(self, counts: Counts) -> float:
        """``samples_per_insert * inserts - samples``."""
        return (self.samples_per_insert or 0.0) * counts.inserts - counts.samples

    def missing_inserts(self, counts: Counts, batch_size: int) -> int:
        """Rows to be written before that many may be sampled; 0: they may be."""
        missing = max(0, self.min_size_to_sample - counts.size)
        if self.samples_per_insert is not None:
            short = self.range[0] + batch_size - self.difference(counts)
            if short > 0:
                missing = max(missing, 1, math.ceil(short / self.samples_per_insert))
        return missing

    def missing_samples(self, counts: Counts) -> int:
        """Rows to be sampled before a write may begin; 0: it may."""
        if self.samples_per_insert is None or counts.size < self.min_size_to_sample:
            return 0
        return max(0, math.ceil(self.difference(counts) - self.range[1]))

    def samples_to_settle(self, counts: Counts) -> int:
        """Samples to be added (below 0: taken away) until the difference is in its range again,
        where a part of what was counted is lost. Nothing where no row has been sampled and more
        rows are to come first."""
        lower, upper = self.range
        difference = self.difference(counts)
        if difference > upper:
            return math.ceil(difference - upper)
        return -min(counts.samples, math.ceil(lower - difference)) if difference < lower else 0

    def check_capacity(self, capacity: int) -> None:
        """Raises ConfigurationError if the buffer can never hold enough rows to be sampled."""
        if self.min_size_to_sample > capacity:
            raise ConfigurationError(
                f"min_size_to_sample={self.min_size_to_sample} is above the capacity {capacity}: "
                "no sample would ever begin"
            )

    def check_batch(self, batch_size: int) -> None:
        """Raises ConfigurationError if samples of that many rows could wait for ever."""
        if self.error_buffer is not None and batch_size > 2 * self.error_buffer:
            raise ConfigurationError(
                f"error_buffer={self.error_buffer} is too small for batches of {batch_size} rows: "
                "a sample and a write could each wait for the other; pass at least "
                f"{batch_size / 2:g}, or sample fewer rows at once"
            )
        if self.max_times_sampled is not None and batch_size > self.min_size_to_sample:
            raise ConfigurationError(
                f"with max_times_sampled={self.max_times_sampled} a batch of {batch_size} rows "
                f"needs min_size_to_sample >= {batch_size}, got {self.min_size_to_sample}: fewer "
                "rows may not have so many draws left"
            )


class Admission(Protocol):
    """Who admits the samples and writes of a replay directory: ``node.gate.Gate``.

    The directory holds it and knows no more of it than this, so what lies below it need not know
    how one waits. All rows; a ``storage`` is a TorchRL storage, whose buffers' locks are given back
    to others while somebody waits.
    """

    limiter: RateLimiter

    def counts(self, under_way: int = 0) -> Counts: ...

    def count_samples(self, rows: int) -> None: ...

    def state(self) -> list[float]: ...

    def set_state(self, state: list[float] | None, rows: int) -> None: ...

    def ring(self) -> None: ...

    def can_sample(self, count: int) -> bool: ...

    def draw(self, count: int, draw: Callable[[], _T], storage: Any) -> _T: ...

    def reserve(self, cursor: Any, count: int, storage: Any) -> Any: ...

    def wait_to_write(self, cursor: Any, storage: Any) -> None: ...
