"""The rate limiter on a node, over one host by RPC, and over several shards."""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torchrl.data import TensorDictReplayBuffer

from tests.replay.conftest import make_rows
from tests.replay.faults import attach, in_thread, wait_until
from tests.replay.hosted_helpers import (
    sample_times,
    sample_until_refused,
    slow_down,
    write_until,
)
from torchrl_dist import (
    ConfigurationError,
    DeadlineError,
    HostedReplayBuffer,
    RateLimiter,
    RateLimitError,
    RemoteStorage,
    RPCPrioritizedSampler,
    Session,
    SharedCursorWriter,
    SharedReplayBuffer,
    replay_buffer,
    session,
)
from torchrl_dist.replay.parts.drawn import Drawn
from torchrl_dist.stopping import giving_up_when

pytestmark = pytest.mark.timeout(90)

Make = Callable[..., SharedReplayBuffer]


@pytest.fixture
def make(make_hosted: Make, folder: Path) -> Make:
    def make(shards: int = 1, **options) -> SharedReplayBuffer:
        if shards:
            return make_hosted(shards, **{"capacity": 256 * shards, "prefetch": 0, **options})
        options.pop("prefetch", None)
        return attach(folder, 256, kind=SharedReplayBuffer, batch_size=16, **options)

    return make


@pytest.mark.parametrize(("shards", "prefetch"), [(0, 0), (1, 2), (2, 0), (2, 2)])
def test_a_sample_waits_until_the_minimum_size_is_there(
    make: Make, cluster: Session, shards: int, prefetch: int
) -> None:
    buffer = make(shards, prefetch=prefetch, limiter=RateLimiter(60))
    waiting = in_thread(buffer.sample)
    writer = cluster.of_role("owner")[2]
    cluster.call(writer, write_until, buffer, 56, 28)
    assert not buffer.can_sample() and not waiting.done()
    cluster.call(writer, write_until, buffer, 8, 8)
    assert len(waiting.result(30)) == 16
    assert buffer.can_sample()
    assert buffer.storage.limiter_counts == (64, 16, 64)


@pytest.mark.parametrize("shards", [0, 1, 2])
def test_a_write_waits_until_enough_was_sampled(make: Make, shards: int) -> None:
    limiter = RateLimiter(8, samples_per_insert=2.0, error_buffer=16)
    buffer = make(shards, limiter=limiter)
    buffer.extend(make_rows(range(32)))
    waiting = in_thread(lambda: buffer.extend(make_rows(range(8))))
    buffer.sample()
    wait([waiting], 0.2)
    assert not waiting.done() and buffer.storage.write_count == 32
    buffer.sample()
    waiting.result(30)
    assert buffer.storage.limiter_counts == (40, 32, 40)


@pytest.mark.parametrize("shards", [1, 2])
def test_a_sample_never_counts_twice(
    make: Make, shards: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer = make(shards, limiter=RateLimiter(8, samples_per_insert=2.0, error_buffer=16))
    buffer.extend(make_rows(range(32)))
    client = buffer.storage.client
    count_samples, looks = client.count_samples, []

    def count_and_look(index: torch.Tensor) -> None:
        count_samples(index)
        looks.append(in_thread(buffer.storage.gate.counts))
        wait([looks[-1]], 0.2)

    monkeypatch.setattr(client, "count_samples", count_and_look)
    buffer.sample()
    assert [look.result(30).samples for look in looks] == [16]


@pytest.mark.parametrize("shards", [1, 2])
def test_one_reader_and_one_writer_are_exact(make: Make, cluster: Session, shards: int) -> None:
    limiter = RateLimiter(32, samples_per_insert=2.0, error_buffer=24)
    buffer = make(shards, limiter=limiter)
    done = threading.Event()
    seen = []

    def watch() -> None:
        while not done.is_set():
            seen.append(limiter.difference(buffer.storage.limiter_counts))

    watching = in_thread(watch)
    writing = in_thread(
        lambda: cluster.call(cluster.of_role("owner")[2], write_until, buffer, 320, 8)
    )
    sample_times(buffer, 37)  # to 48, of 40 at least
    writing.result(30)
    done.set()
    watching.result(30)
    seen.append(limiter.difference(buffer.storage.limiter_counts))
    started = [difference for difference in seen if difference > limiter.range[0]]
    assert seen[-1] == 2 * 320 - 37 * 16
    assert min(seen[seen.index(started[0]) :]) >= limiter.range[0]
    assert max(seen) <= limiter.range[1] + 2 * 8


@pytest.mark.parametrize("shards", [0, 1, 2])
def test_at_the_deadline_the_error_says_what_is_missing(make: Make, shards: int) -> None:
    limiter = RateLimiter(40, samples_per_insert=1.0, error_buffer=16)
    buffer = make(shards, limiter=limiter)
    (buffer.storage.client if shards else buffer.storage).timeout_s = 0.5
    buffer.extend(make_rows(range(10)))
    with pytest.raises(RateLimitError, match="waited 0.5 s for 30 more rows to be written"):
        buffer.sample()
    buffer.extend(make_rows(range(60)))
    with pytest.raises(RateLimitError, match="for 14 more rows to be sampled before the next"):
        buffer.extend(make_rows(range(8)))
    with (
        giving_up_when(lambda: True),
        pytest.raises(RateLimitError, match="stopped waiting for 14 more rows .* told to stop"),
    ):
        buffer.extend(make_rows(range(8)))
    assert buffer.storage.write_count == 70
    buffer.sample()  # and the owner was never held up


def sample_all(
    buffer: SharedReplayBuffer, batch_size: int = 16, new_priorities: bool = False
) -> collections.Counter:
    """Count the samples of each id until the limiter refuses and says how many rows are missing."""
    seen: collections.Counter = collections.Counter()
    with pytest.raises(RateLimitError, match=r"for \d+ more rows to be written before the next"):
        while True:
            batch = buffer.sample(batch_size)
            seen.update(batch["id"].tolist())
            if new_priorities:
                batch["td_error"] = torch.rand(batch_size)
                buffer.update_tensordict_priority(batch)
                buffer.sampler.alpha = 0.5 + 0.4 * torch.rand(()).item()
    return seen


@pytest.mark.parametrize(
    ("shards", "uniform", "prefetch", "per_call"),
    [
        (0, True, 0, 1),
        (0, False, 0, 1),
        (1, True, 4, 2),
        (2, True, 0, 1),
        (2, False, 4, 2),
    ],
)
def test_rows_are_sampled_as_often_as_allowed_and_not_more(
    make: Make, shards: int, uniform: bool, prefetch: int, per_call: int
) -> None:
    """A new priority or exponent brings no row back."""
    options = {"prefetch": prefetch, "batches_per_call": per_call} if shards else {}
    limiter = RateLimiter(16, max_times_sampled=3)
    buffer = make(shards, uniform=uniform, limiter=limiter, **options)
    (buffer.storage.client if shards else buffer.storage).timeout_s = 0.6
    buffer.extend(make_rows(range(64)))
    buffer.extend(make_rows(range(64, 128)))
    seen = sample_all(buffer, new_priorities=not uniform)
    assert max(seen.values()) == 3
    assert sum(seen.values()) > 3 * (128 - 16)  # fewer than 16 rows do not make a batch
    left = buffer.storage.limiter_counts.size
    assert left < 16
    if not shards:
        assert left == 128 - sum(count == 3 for count in seen.values())
        assert left == np.count_nonzero(buffer.storage.directory.tree.leaves)
    buffer.extend(make_rows(range(128, 384)))  # on one node over all slots, which start anew
    assert len(buffer.sample()) == 16
    assert buffer.storage.limiter_counts.size >= 256 - 16 // 3


def test_draws_of_batches_that_are_dropped_count_no_more(make: Make) -> None:
    """A change of the batch size drops the batches that were drawn ahead."""
    buffer = make(2, limiter=RateLimiter(16, max_times_sampled=1), prefetch=4)
    buffer.storage.client.timeout_s = 0.6
    buffer.extend(make_rows(range(64)))
    buffer.extend(make_rows(range(64, 128)))
    seen: collections.Counter = collections.Counter()
    for _ in range(3):  # some of what was drawn ahead is here then, and some is on its way
        seen.update(buffer.sample()["id"].tolist())
    seen += sample_all(buffer, 8)
    assert max(seen.values()) == 1 and len(seen) > 128 - 16


def test_draws_that_came_too_late_are_returned_once(
    make: Make, cluster: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer = make(1, limiter=RateLimiter(16, max_times_sampled=1), timeout_s=1.5)
    buffer.extend(make_rows(range(64)))
    buffer.flush()
    cluster.call(cluster.of_role("owner")[0], slow_down, 2.0, 1)
    client = buffer.storage.client
    returned: collections.Counter[int] = collections.Counter()
    return_draws = client.return_draws

    def noted(rows: Drawn, *which: Any) -> None:
        returned.update(rows.index.tolist())
        return_draws(rows, *which)

    monkeypatch.setattr(client, "return_draws", noted)
    with pytest.raises(DeadlineError):
        buffer.sample()

    def answers_again() -> bool:
        try:
            buffer.flush()
        except DeadlineError:
            return False
        return True

    wait_until(answers_again)
    wait_until(lambda: len(returned) == 16)
    time.sleep(0.2)  # a second return would free rows that others drew meanwhile
    assert set(returned.values()) == {1}
    assert len(sample_all(buffer)) == 64


def test_several_readers_share_the_draws(make: Make, cluster: Session) -> None:
    buffer = make(2, limiter=RateLimiter(16, max_times_sampled=1), capacity=1024)
    for first in range(0, 512, 64):
        buffer.extend(make_rows(range(first, first + 64)))
    buffer.flush()
    other = cluster.submit(cluster.of_role("owner")[2], sample_until_refused, buffer, 0.5)
    buffer.storage.client.timeout_s = 0.5
    seen = sample_all(buffer)
    seen += collections.Counter(other.result(60))
    assert max(seen.values()) == 1 and len(seen) > 512 - 16


@pytest.mark.parametrize("limiter", [RateLimiter(16), RateLimiter(16, max_times_sampled=4)])
def test_after_another_emptied_the_buffer_the_limiters_error_says_what_is_missing(
    make: Make, cluster: Session, limiter: RateLimiter
) -> None:
    buffer = make(2, limiter=limiter)
    buffer.extend(make_rows(range(64)))
    buffer.sample()
    cluster.call(cluster.of_role("owner")[2], HostedReplayBuffer.empty, buffer)
    buffer.storage.client.timeout_s = 0.6
    with pytest.raises(RateLimitError, match="for 16 more rows to be written"):
        buffer.sample()


def test_the_stock_buffer_holds_no_lock_while_it_waits(make: Make, cluster: Session) -> None:
    limiter = RateLimiter(20, samples_per_insert=1.0, error_buffer=16)
    owner = make(1, limiter=limiter).storage.owner
    buffer = TensorDictReplayBuffer(
        storage=RemoteStorage(owner),
        sampler=RPCPrioritizedSampler(owner.capacity, 0.6, 0.4, owner=owner, prefetch=0),
        writer=SharedCursorWriter(),
        batch_size=16,
    )
    waiting = in_thread(buffer.sample)
    wait_until(lambda: buffer.storage.gate is not None)
    buffer.extend(make_rows(range(12)))
    buffer.extend(make_rows(range(12)))
    assert len(waiting.result(30)) == 16


def test_on_the_owners_node_its_counters_are_used(
    cluster: Session,
    folder: Path,
) -> None:
    limiter = RateLimiter(20, samples_per_insert=1.0, error_buffer=16)
    options = {"capacity": 64, "batch_size": 16, "scratch_dir": folder, "limiter": limiter}
    hosts = cluster.of_role("owner")[:1]
    near = replay_buffer(cluster, hosts=hosts, **options)
    far = replay_buffer(cluster, hosts=hosts, shortcut=False, prefetch=0, **options)
    assert near.storage.limiter == far.storage.limiter == limiter
    near.extend(make_rows(range(24)))
    far.sample()
    far.flush()
    assert near.storage.limiter_counts == far.storage.limiter_counts == (24, 16, 24)
    near.close()


def test_impossible_options_are_refused(make: Make, cluster: Session) -> None:
    with pytest.raises(ConfigurationError, match="above the capacity 512"):
        make(2, limiter=RateLimiter(513))
    with pytest.raises(ConfigurationError, match="too small for batches of 16"):
        make(2, name="other", limiter=RateLimiter(1, samples_per_insert=1.0, error_buffer=7))
    make(2, limiter=RateLimiter(512))  # more than one shard could hold
    with pytest.raises(Exception, match="use the same arguments in every process"):
        make(2, limiter=RateLimiter(8))


@pytest.mark.parametrize("shortcut", [True, False], ids=["through memory", "by messages"])
def test_the_limiter_waits_as_long_as_this_buffer_may(shortcut: bool, tmp_path: Path) -> None:
    with session() as me:
        buffer = replay_buffer(
            me,
            capacity=64,
            batch_size=4,
            limiter=RateLimiter(min_size_to_sample=50),
            shortcut=shortcut,
            prefetch=0,
            scratch_dir=tmp_path,
            timeout_s=0.5,
        )
        buffer.extend(TensorDict({"number": torch.arange(8)}, [8]))
        with ThreadPoolExecutor(1) as other:  # which does not write itself
            with pytest.raises(RateLimitError, match="waited 0.5 s for 42 more rows"):
                other.submit(buffer.sample).result(20)
