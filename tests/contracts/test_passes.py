"""Passes without replacement, wherever the rows are kept."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import chisquare, hypergeom

from tests.contracts.conftest import HOSTED, KINDS
from tests.replay.conftest import make_rows
from tests.replay.faults import attach
from tests.replay.hosted_helpers import sample_times, settle
from torchrl_dist import (
    ConfigurationError,
    HostedReplayBuffer,
    RateLimiter,
    RemoteStorage,
    RPCSamplerWithoutReplacement,
    Session,
    SharedReplayBuffer,
    SharedSamplerWithoutReplacement,
    host_replay,
)

CAPACITY = 64


@pytest.fixture
def make(folder: Path, job: Session, where) -> Iterator[Callable[..., SharedReplayBuffer]]:
    built: list[Callable[[], Any]] = []

    def build(kind: str, batch_size: int, limiter: Any = None, **options: Any):
        if kind == "local":
            sampler: Any = SharedSamplerWithoutReplacement(**options)
            kinds = {"sampler": sampler, "kind": SharedReplayBuffer, "keep": False}
            buffer = attach(folder, CAPACITY, batch_size=batch_size, limiter=limiter, **kinds)
            built.append(buffer.storage.close)
            return buffer
        place = where(kind)
        capacity = len(place["hosts"]) * CAPACITY
        owner = host_replay(job, capacity, write_to="all", limiter=limiter, **place)
        storage = RemoteStorage(owner)
        built.extend((owner.release, storage.close))
        sampler = RPCSamplerWithoutReplacement(owner=owner, **options)
        return HostedReplayBuffer(storage=storage, sampler=sampler, batch_size=batch_size)

    yield build
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # this process has a directory of its node still open
        while built:
            built.pop()()


def one_pass(buffer: SharedReplayBuffer) -> list[int]:
    return [number for batch in buffer for number in batch["id"].tolist()]


@pytest.mark.parametrize("kind", KINDS)
def test_a_pass_has_each_row_once_and_ends_and_the_next_has_the_new_ones(
    make, kind, tmp_path
) -> None:
    rb = make(kind, 8)
    assert not rb.can_sample()
    with pytest.raises(RuntimeError, match="empty storage"):
        rb.sample()
    for start in (0, 30):
        rb.extend(make_rows(range(start, start + (30 if not start else 7))))
    settle(rb)
    assert rb.can_sample()
    first, second = one_pass(rb), one_pass(rb)
    assert sorted(first) == sorted(second) == list(range(37)) and first != second
    batch = rb.sample()
    slots = batch["index"].reshape(-1)
    assert (rb[slots]["id"] == batch["id"]).all()
    assert (batch["index_generation"] == rb.writer.generations_of(slots)).all()
    seen = batch["id"].tolist()
    rb.extend(make_rows(range(100, 110)))  # these wait for the next pass
    settle(rb)
    while len(seen) < 37:
        seen += rb.sample()["id"].tolist()
    assert sorted(seen) == list(range(37))
    assert sorted(one_pass(rb)) == [*range(37), *range(100, 110)]
    copy = pickle.loads(pickle.dumps(rb))
    assert sorted(one_pass(copy)) == [*range(37), *range(100, 110)]
    copy.storage.close()
    rb.empty()
    with pytest.raises(RuntimeError, match="empty storage"):
        rb.sample()
    rb.extend(make_rows(range(50, 60)))
    settle(rb)
    assert sorted(one_pass(rb)) == list(range(50, 60))
    rb.sample()
    rb.dumps(tmp_path)
    rb.loads(tmp_path)  # begins a new pass
    assert sorted(one_pass(rb)) == list(range(50, 60))


@pytest.mark.parametrize("kind", KINDS)
def test_drop_last_leaves_out_what_fills_no_batch(make, kind) -> None:
    rb = make(kind, 8, drop_last=True)
    rb.extend(make_rows(range(5)))
    settle(rb)
    assert not rb.can_sample()
    with pytest.raises(ConfigurationError, match="there is no full batch"):
        rb.sample()
    rb.extend(make_rows(range(5, 21)))
    settle(rb)
    for _ in range(5):
        batches = [batch["id"].tolist() for batch in rb]
        assert [len(each) for each in batches] == [8, 8]
        assert len({number for each in batches for number in each}) == 16


@pytest.mark.parametrize("kind", ["shards by RPC", "shards on this node"])
def test_the_shards_of_a_batch_are_drawn_by_what_they_have_left(make, kind) -> None:
    rb = make(kind, 8)
    for start, count in ((0, 24), (24, 8)):
        rb.extend(make_rows(range(start, start + count)))
    settle(rb)
    counts, position = np.zeros(9), np.zeros(32)
    for _ in range(300):
        batch = rb.sample()
        counts[int((batch["index"] < CAPACITY).sum())] += 1
        position[batch["id"].numpy()] += 1
        rest = rb.sample(24)["id"].tolist()
        assert sorted([*batch["id"].tolist(), *rest]) == list(range(32))
    law = hypergeom(32, 24, 8).pmf(np.arange(9)) * 300
    few = law < 5
    found, wanted = (np.append(each[~few], each[few].sum()) for each in (counts, law))
    assert chisquare(found, wanted * found.sum() / wanted.sum()).pvalue > 1e-6
    assert abs(position / 300 - 0.25).max() < 0.14  # five standard deviations


@pytest.mark.parametrize("kind", HOSTED)
def test_processes_share_a_pass_that_they_draw_from_at_the_same_time(make, job, kind) -> None:
    rb = make(kind, 4)
    for start in (0, 60):
        rb.extend(make_rows(range(start, start + (60 if not start else 4))))
    settle(rb)
    found = [job.submit(peer, sample_times, rb, 5) for peer in job.of_role("owner")]
    drawn = [number for _ in range(6) for number in rb.sample()["id"].tolist()]
    for each in found:
        drawn += each.result()
    assert sorted(drawn) == list(range(64))


def test_counts_of_rows_are_refused(make) -> None:
    for kind in ("local", "owner by RPC"):
        with pytest.raises(ConfigurationError, match="without max_times_sampled"):
            make(kind, 4, limiter=RateLimiter(1, max_times_sampled=2))


@pytest.mark.parametrize("kind", KINDS)
def test_a_limiter_counts_what_a_pass_has_returned(make, kind) -> None:
    rb = make(kind, 8, limiter=RateLimiter(8, samples_per_insert=2.0, error_buffer=64.0))
    rb.extend(make_rows(range(20)))
    settle(rb)
    assert sorted(number for _ in range(3) for number in rb.sample()["id"].tolist()) == list(
        range(20)
    )
    assert rb.storage.limiter_counts.samples == 20
