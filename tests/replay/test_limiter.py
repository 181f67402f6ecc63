"""The arithmetic of the rate limiter: which operations wait, and that no wait is endless."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchrl_dist.errors import ConfigurationError
from torchrl_dist.replay import RateLimiter
from torchrl_dist.replay.law.limiter import Counts

ratios = st.floats(0.01, 64)
rows = st.integers(1, 512)


@st.composite
def limiters_and_batches(draw: st.DrawFn) -> tuple[RateLimiter, int]:
    batch = draw(rows)
    margin = draw(st.floats(batch / 2, 1e4))
    limiter = RateLimiter(draw(rows), draw(ratios), margin)
    limiter.check_batch(batch)
    return limiter, batch


@given(
    limiters_and_batches(),
    st.integers(0, 10**9),
    st.integers(0, 10**9),
    st.integers(0, 10**6),
)
def test_a_sample_and_a_write_never_wait_for_each_other(
    case: tuple[RateLimiter, int], inserts: int, samples: int, size: int
) -> None:
    limiter, batch = case
    # around the range, too, where both conditions are near
    for counts in (
        Counts(inserts, samples, size),
        Counts(inserts, max(0, int(limiter.samples_per_insert * inserts - limiter.range[0])), size),
        Counts(inserts, max(0, int(limiter.samples_per_insert * inserts - limiter.range[1])), size),
    ):
        may_sample = limiter.missing_inserts(counts, batch) == 0
        may_write = limiter.missing_samples(counts) == 0
        assert may_sample or may_write


@given(limiters_and_batches(), st.lists(st.tuples(st.booleans(), rows), max_size=300))
@settings(max_examples=60)
def test_the_difference_stays_in_its_range(
    case: tuple[RateLimiter, int], steps: list[tuple[bool, int]]
) -> None:
    limiter, batch = case
    lower, upper = limiter.range
    counts, sampled = Counts(0, 0, 0), False
    for write, count in steps:
        if write and not limiter.missing_samples(counts):
            inserts = counts.inserts + count
            counts = Counts(inserts, counts.samples, inserts)
            overshoot = limiter.samples_per_insert * count
            first = counts.size - count < limiter.min_size_to_sample
            assert first or limiter.difference(counts) <= upper + overshoot + 1e-6
        elif not write and not limiter.missing_inserts(counts, batch):
            assert counts.size >= limiter.min_size_to_sample
            counts = counts._replace(samples=counts.samples + batch)
            sampled = True
        assert not sampled or limiter.difference(counts) >= lower - 1e-6


@given(limiters_and_batches(), st.integers(0, 10**6), st.integers(0, 10**6))
def test_the_missing_rows_suffice_and_one_row_less_does_not(
    case: tuple[RateLimiter, int], inserts: int, samples: int
) -> None:
    limiter, batch = case
    counts = Counts(inserts, samples, inserts)
    missing = limiter.missing_inserts(counts, batch)
    later = Counts(inserts + missing, samples, inserts + missing)
    assert limiter.missing_inserts(later, batch) <= 1  # 1 where the product was rounded down
    if missing > 1:
        sooner = Counts(inserts + missing - 2, samples, inserts + missing - 2)
        assert limiter.missing_inserts(sooner, batch) > 0
    missing = limiter.missing_samples(counts)
    assert limiter.missing_samples(counts._replace(samples=samples + missing)) <= 1
    if missing > 1:
        assert limiter.missing_samples(counts._replace(samples=samples + missing - 2)) > 0


def test_a_minimum_size_alone_never_holds_up_writes() -> None:
    limiter = RateLimiter(min_size_to_sample=100)
    limiter.check_batch(10**6)
    assert limiter.range == (-math.inf, math.inf)
    assert limiter.missing_inserts(Counts(99, 0, 99), 32) == 1
    assert limiter.missing_inserts(Counts(100, 10**9, 100), 32) == 0
    assert limiter.missing_samples(Counts(10**9, 0, 10**6)) == 0


def test_rows_that_are_all_used_up_let_writes_through_whatever_the_difference() -> None:
    limiter = RateLimiter(32, samples_per_insert=1.0, error_buffer=32, max_times_sampled=2)
    assert limiter.missing_samples(Counts(1000, 0, 31)) == 0
    assert limiter.missing_samples(Counts(1000, 0, 32)) == 936
    assert limiter.missing_inserts(Counts(1000, 0, 31), 32) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"min_size_to_sample": 0}, "at least 1, got 0"),
        ({"samples_per_insert": 2.0}, "give both or neither"),
        ({"error_buffer": 2.0}, "give both or neither"),
        ({"samples_per_insert": 0.0, "error_buffer": 1.0}, "above 0, got 0.0"),
        ({"samples_per_insert": math.nan, "error_buffer": 1.0}, "above 0, got nan"),
        ({"samples_per_insert": 1.0, "error_buffer": math.inf}, "above 0, got inf"),
        ({"max_times_sampled": 0}, "1 to 32767, got 0"),
        (
            {"samples_per_insert": 3.0, "error_buffer": 9.0, "max_times_sampled": 2},
            "cannot be reached",
        ),
    ],
)
def test_impossible_arguments_are_refused(arguments: dict, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        RateLimiter(**arguments)


def test_a_range_that_must_deadlock_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="min_size_to_sample=65 is above the capacity 64"):
        RateLimiter(65).check_capacity(64)
    limiter = RateLimiter(1, samples_per_insert=1.0, error_buffer=16)
    limiter.check_batch(32)
    with pytest.raises(
        ConfigurationError, match="too small for batches of 33 rows.*error_buffer=16.5 or more"
    ):
        limiter.check_batch(33)
    with pytest.raises(ConfigurationError, match="size_to_sample=31 is too small .*=32 or more"):
        RateLimiter(31, max_times_sampled=4).check_batch(32)
