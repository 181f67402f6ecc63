"""``retire_older_than``: rows of older policies are not sampled, wherever the rows are kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import chisquare
from tensordict import TensorDict

from tests.contracts.conftest import KINDS, release
from tests.replay.faults import attach
from tests.replay.hosted_helpers import settle
from torchrl_dist import (
    ConfigurationError,
    RateLimiter,
    RemoteError,
    Session,
    SharedReplayBuffer,
    replay_buffer,
)

CAPACITY = 64
BATCH = 8
LIMITER = RateLimiter(min_size_to_sample=BATCH, max_times_sampled=32_767)
Make = Callable[..., SharedReplayBuffer]


def rows(numbers: Any, versions: Any) -> TensorDict:
    """Rows with the priority number + 1."""
    number = torch.as_tensor(numbers)
    version = torch.as_tensor(versions).expand(len(number)).clone()
    data = {"number": number, "policy_version": version, "td_error": number + 1.0}
    return TensorDict(data, [len(number)])


@pytest.fixture
def make(folder: Path, job: Session, where) -> Iterator[Make]:
    built: list[Any] = []

    def build(kind: str, uniform: bool, limiter: RateLimiter | None = LIMITER) -> Any:
        shared: dict[str, Any] = {"batch_size": BATCH, "uniform": uniform, "limiter": limiter}
        shared |= {"alpha": 0.7, "beta": 0.5}
        if kind == "local":
            buffer = attach(folder, CAPACITY, kind=SharedReplayBuffer, keep=False, **shared)
            built.append(buffer.storage.close)
            return buffer
        place = where(kind)
        capacity = len(place["hosts"]) * CAPACITY
        buffer = replay_buffer(
            job, capacity=capacity, prefetch=0, write_to="all", **place, **shared
        )
        built.append(lambda: release(buffer))
        return buffer

    yield build
    for end in built:
        end()


@pytest.mark.parametrize("uniform", [True, False], ids=["uniform", "by priority"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_law_is_that_of_the_rows_that_are_left(make: Make, kind: str, uniform: bool) -> None:
    rb = make(kind, uniform)
    versions = np.random.default_rng(0).integers(0, 10, 48)
    index = torch.cat(  # interleaved versions, over all shards
        [rb.extend(rows(np.arange(k, k + 12), versions[k : k + 12])) for k in range(0, 48, 12)]
    )
    priority = torch.arange(48) + 1.0
    settle(rb)
    assert rb.retire_older_than(4) == (versions < 4).sum()
    assert rb.retire_older_than(2) == 0  # an older bound changes nothing
    rb.extend(rows(np.arange(48, 56), [3, 4] * 4))  # some come late
    settle(rb)
    versions = np.append(versions, [3, 4] * 4)
    assert len(rb) == 56
    assert rb.storage.counters["retired_rows"] == (versions < 4).sum()
    drawn = np.zeros(56, np.int64)
    for _ in range(400):
        batch = rb.sample()
        assert (batch["policy_version"] >= 4).all()
        drawn += np.bincount(batch["number"].numpy(), minlength=56)
        if not uniform:  # priorities of retired rows do not bring them back
            rb.update_priority(index, priority)
    mass = (versions >= 4) * (np.ones(56) if uniform else (np.arange(56) + 1.0) ** 0.7)
    expected = mass / mass.sum() * drawn.sum()
    there = mass > 0
    assert chisquare(drawn[there], expected[there]).pvalue > 1e-4
    if not uniform:
        weight = batch["priority_weight"].numpy()
        number = batch["number"].numpy()
        smallest = mass[there].min()
        assert weight == pytest.approx((mass[number] / smallest) ** -0.5, rel=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_empty_starts_over(make: Make, kind: str) -> None:
    rb = make(kind, False)
    rb.extend(rows(range(8), 1))
    settle(rb)
    assert rb.retire_older_than(5) == 8
    rb.empty()
    rb.extend(rows(range(8), 0))
    settle(rb)
    assert (rb.sample()["policy_version"] == 0).all()


@pytest.mark.parametrize("kind", KINDS)
def test_what_cannot_be_retired_is_refused(make: Make, kind: str) -> None:
    rb = make(kind, True)
    refused = (ConfigurationError, RemoteError)
    with pytest.raises(refused, match="no row has been written"):
        rb.retire_older_than(1)
    rb.extend(rows(range(8), 1))
    settle(rb)
    with pytest.raises(refused, match="the rows have no 'version'"):
        rb.retire_older_than(1, version_key="version")
    with pytest.raises(TypeError):
        rb.retire_older_than(1.5)  # type: ignore[arg-type]
    assert rb.retire_older_than(1) == 0
    with pytest.raises(refused, match="62 bits"):
        rb.retire_older_than(2**64)
    with pytest.raises(refused, match="already retired by version_key='policy_version'"):
        rb.retire_older_than(1, version_key="number")
    batch = rb.sample()
    with pytest.raises(refused, match="to find or rank rows"):
        rb.update_if_present(
            index=batch["index"].flatten(),
            generation=batch["index_generation"].flatten(),
            patch={"policy_version": torch.full((BATCH,), 9)},
        )


@pytest.mark.parametrize("kind", KINDS)
def test_a_buffer_without_counts_is_refused(make: Make, kind: str) -> None:
    rb = make(kind, True, None)
    rb.extend(rows(range(8), 1))
    settle(rb)
    with pytest.raises((ConfigurationError, RemoteError), match="max_times_sampled=n"):
        rb.retire_older_than(1)
