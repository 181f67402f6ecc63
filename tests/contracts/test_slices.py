"""Slices of trajectories, wherever the rows are kept: one node, one owner, or several shards."""

from __future__ import annotations

import pickle
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from tests.contracts.conftest import KINDS, release
from tests.replay.faults import attach
from tests.replay.hosted_helpers import settle, write_trajectories
from tests.replay.test_slices import OPTIONS, assert_slices, trajectory
from torchrl_dist import (
    ConfigurationError,
    RateLimiter,
    RateLimitError,
    RemoteError,
    RemoteStorage,
    ReplayOwner,
    RPCPrioritizedSliceSampler,
    RPCSliceSampler,
    Session,
    SharedPrioritizedSliceSampler,
    SharedReplayBuffer,
    SharedSliceSampler,
    host_replay,
    replay_buffer,
)
from torchrl_dist.replay.hosts import keeper

CAPACITY = 64
ALPHA, BETA = 0.7, 0.5
KEY = ("collector", "traj_ids")
Make = Callable[..., SharedReplayBuffer]


@pytest.fixture
def make(folder: Path, job: Session, where) -> Iterator[Make]:
    built: list[Any] = []

    def build(
        kind: str, batch_size: int, *, uniform: bool = True, **options: Any
    ) -> SharedReplayBuffer:
        wanted = {name: options.pop(name) for name in ("limiter", "prefetch") if name in options}
        if kind == "local":
            wanted.pop("prefetch", None)
            exponents = () if uniform else (CAPACITY, ALPHA, BETA)
            sampler = SharedSliceSampler if uniform else SharedPrioritizedSliceSampler
            wanted |= {"sampler": sampler(*exponents, **options), "kind": SharedReplayBuffer}
            buffer = attach(
                folder, CAPACITY, batch_size=batch_size, keep=False, timeout_s=2, **wanted
            )
            built.append(buffer.storage.close)
            return buffer
        place = where(kind)
        options = {
            "capacity": len(place["hosts"]) * CAPACITY,
            "batch_size": batch_size,
            "alpha": ALPHA,
            "beta": BETA,
            "write_to": "all",
            "uniform": uniform,
            "slices": options,
        }
        buffer = replay_buffer(job, **options, **place, **{"prefetch": 0, **wanted})
        built.append(lambda: release(buffer))
        return buffer

    yield build
    for end in built:
        end()


@pytest.fixture
def own(folder: Path, job: Session) -> Iterator[Callable[..., ReplayOwner]]:
    """A buffer that this process keeps itself, used by RPC."""
    built: list[ReplayOwner] = []

    def build(**options: Any) -> ReplayOwner:
        owner = host_replay(job, CAPACITY, scratch_dir=folder, **{"shortcut": False, **options})
        built.append(owner)
        return owner

    yield build
    for owner in {id(each.hosts[0].host): each for each in built}.values():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            owner.release()


def first_rows(batch: Any, slice_len: int) -> np.ndarray:
    """Indices of the first rows of slices that all have that length."""
    return batch["index"].reshape(-1, slice_len)[:, 0].numpy()


@pytest.mark.parametrize("uniform", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_slices_are_consecutive_rows_of_one_trajectory_with_their_flags(make, kind, uniform):
    rb = make(kind, 24, uniform=uniform, slice_len=4, traj_key=KEY)
    assert not rb.can_sample()
    with pytest.raises(RuntimeError, match="empty storage"):
        rb.sample()
    rb.extend(trajectory(0, range(3)))
    assert not rb.can_sample()
    with pytest.raises(RuntimeError, match="4 consecutive rows|sufficient length"):
        rb.sample()
    for number in range(1, 60):  # over the end of each ring
        rb.extend(trajectory(number, range(3 + number % 7)))
        if number % 5 == 0:
            settle(rb)
            assert rb.can_sample()
            batch = rb.sample()
            assert batch.batch_size == (24,)
            assert_slices(batch, 4)
            ends = batch["next", "truncated"].reshape(-1, 4)
            assert ends[:, -1].all() and not ends[:, :-1].any()
            assert batch["is_init"].reshape(-1, 4)[:, 0].all()
            slots = batch["index"].reshape(-1)
            assert (batch["index_generation"] == rb.writer.generations_of(slots)).all()
            assert (rb[slots]["obs"] == batch["obs"]).all()
            assert ("priority_weight" in batch.keys()) is not uniform
    copy = pickle.loads(pickle.dumps(rb))
    assert_slices(copy.sample(), 4)
    assert "slice_len=4" in repr(copy.sampler)
    copy.storage.close()
    rb.empty()
    assert not rb.can_sample()
    with pytest.raises(RuntimeError, match="empty storage"):
        rb.sample()


def runs_of(kind: str, rb: SharedReplayBuffer, lengths: list[int]) -> list[np.ndarray]:
    """Write trajectories, more of them to the first of two shards; the indices of each."""
    index = [rb.extend(trajectory(number, range(each))) for number, each in enumerate(lengths)]
    settle(rb)
    return [each.numpy() for each in index]


LENGTHS = [9, 2, 4, 3, 12, 1, 6, 5]  # in turn to two shards: 31 and 11 rows


@pytest.mark.parametrize(
    ("kind", "prefetch"), [*((kind, 0) for kind in KINDS), ("shards by RPC", 3)]
)
def test_each_run_is_as_likely_over_all_shards_and_so_is_each_of_its_slices(make, kind, prefetch):
    rb = make(kind, 3000, slice_len=3, traj_key=KEY, prefetch=prefetch)
    runs = runs_of(kind, rb, LENGTHS)
    law = np.zeros(rb.storage.max_size)
    for index in runs:
        starts = index[: max(0, len(index) - 2)]
        law[starts] = 1 / max(1, len(starts))
    counts = np.bincount(
        np.concatenate([first_rows(rb.sample(), 3) for _ in range(4)]), minlength=law.size
    )
    assert counts[law == 0].sum() == 0 and counts.sum() == 4000
    expected = law[law > 0] / law.sum() * 4000
    assert chisquare(counts[law > 0], expected).pvalue > 1e-6


@pytest.mark.parametrize("kind", KINDS)
def test_first_rows_follow_the_priorities_in_all_shards_whatever_was_known_before(make, kind):
    rb = make(kind, 30, uniform=False, slice_len=3, traj_key=KEY)
    runs = runs_of(kind, rb, LENGTHS)
    every = np.concatenate(runs)
    allowed = np.isin(every, np.concatenate([index[: max(0, len(index) - 2)] for index in runs]))
    random = np.random.default_rng(0)
    drawn, weights = [], []
    light = random.uniform(0.01, 0.1, every.size)
    heavy = np.where(every < CAPACITY // 2, light, random.uniform(1, 3, every.size))
    for step in range(100):  # masses that move by much between each two batches
        rb.update_priority(torch.from_numpy(every), torch.from_numpy(light))
        rb.sample()
        rb.update_priority(torch.from_numpy(every), torch.from_numpy(heavy))
        batch = rb.sample()
        drawn.append(first_rows(batch, 3))
        weights.append(batch["priority_weight"].reshape(-1, 3)[:, 0].numpy())
        assert_slices(batch, 3)
        assert step or (batch["priority_weight"].reshape(-1, 3).diff(dim=1) == 0).all()
    leaf = (heavy + 1e-8) ** ALPHA
    counts = np.bincount(np.concatenate(drawn), minlength=rb.storage.max_size)[every]
    assert counts[~allowed].sum() == 0 and counts.sum() == 1000
    assert chisquare(counts[allowed], leaf[allowed] / leaf[allowed].sum() * 1000).pvalue > 1e-6
    place = np.full(rb.storage.max_size, -1)
    place[every] = np.arange(every.size)
    wanted = (leaf[place[np.concatenate(drawn)]] / leaf.min()) ** -BETA
    np.testing.assert_allclose(np.concatenate(weights), wanted, rtol=1e-5)


@pytest.mark.parametrize(
    "options", [each for each in OPTIONS if "end_key" not in each and "end_keys" not in each]
)
def test_one_shard_gives_the_batches_of_the_local_sampler(own, options):
    rows, options = 100, {"traj_key": KEY, **options}
    owner = own()
    far = SharedReplayBuffer(
        storage=RemoteStorage(owner),
        sampler=RPCSliceSampler(owner=owner, prefetch=0, **options),
        batch_size=32,
    )
    written = number = 0
    while written < rows:
        part = trajectory(number, range(min([7, 3, 11, 1, 9][number % 5], rows - written)))
        written, number = written + len(part), number + 1
        far.extend(part)
    far.storage.flush()
    (host,) = keeper._hosts.values()  # the driver is the owner
    near = SharedReplayBuffer(
        storage=host.storage, sampler=SharedSliceSampler(**options), batch_size=32
    )
    far.sample()
    (slicer,) = host._slicers.values()
    slicer._rng = torch.Generator().manual_seed(rows)
    near.set_rng(torch.Generator().manual_seed(rows))
    for _ in range(5):
        mine, other = far.sample(), near.sample()
        short = ("collector", "mask") not in other.keys(True)  # if all runs are long enough
        keys = set(mine.keys(True, True)) - ({("collector", "mask")} if short else set())
        assert keys == set(other.keys(True, True))
        for key in keys:
            assert mine[key].dtype == other[key].dtype and mine[key].shape == other[key].shape
            assert (mine[key] == other[key]).all(), key
    assert far.can_sample() == near.can_sample()
    far.storage.close()


def test_a_slice_never_goes_over_rows_that_are_in_another_shard(make) -> None:
    rb = make("shards by RPC", 60, slice_len=3, traj_key=KEY)
    for start in range(0, 40, 4):  # in turn
        rb.extend(trajectory(1, range(start, start + 4)))
    rb.flush()
    for _ in range(20):
        assert_slices(rb.sample(), 3)


@pytest.mark.parametrize("uniform", [True, False])
def test_over_shards_the_rows_must_number_their_steps(make, uniform: bool) -> None:
    rb = make("shards by RPC", 60, uniform=uniform, slice_len=3, traj_key=KEY)
    rb.extend(trajectory(1, range(8)).exclude("step_count"))
    rb.flush()
    with pytest.raises(RemoteError, match="no 'step_count', only"):
        rb.sample()


@pytest.mark.parametrize("kind", ["local", "owner by RPC", "shards by RPC", "shards on this node"])
def test_priorities_reach_the_rows_of_a_slice_unless_they_were_overwritten(make, kind) -> None:
    rb = make(kind, 32, uniform=False, slice_len=4, traj_key=KEY)
    for number in range(8):
        rb.extend(trajectory(number, range(16)))
    settle(rb)
    batch = rb.sample()
    batch["td_error"] = torch.full((32,), 50.0)
    for number in range(2):  # slots 0 to 15 of each shard
        rb.extend(trajectory(20 + number, range(16)))
    settle(rb)
    rb.update_tensordict_priority(batch[5:])
    settle(rb)
    leaves = np.concatenate([each.leaf for each in rb.storage.snapshot()])
    rows = np.concatenate([each.columns[0].reshape(-1) for each in rb.storage.snapshot()])
    assert rows.size == leaves.size * (rows.size // leaves.size)
    index = batch["index"].reshape(-1)[5:]
    fresh = rb.writer.generations_of(index) == batch["index_generation"][5:]
    raised = int(np.isclose(leaves, 50**ALPHA, rtol=1e-5).sum())
    new = sum(16 for _ in range(2))  # written with the largest priority, which was 1 then
    assert raised == len(set(index[fresh].tolist())) and new == 32
    assert rb.storage.counters["unverified_updates"] == 0
    assert rb.storage.counters["stale_updates"] == int((~fresh).sum())


@pytest.mark.parametrize("kind", ["owner by RPC", "shards on this node"])
def test_slices_are_whole_while_writers_go_round_the_rings(make, job, kind) -> None:
    rb = make(kind, 64, slice_len=8, traj_key=KEY)
    writers = [
        job.submit(peer, write_trajectories, rb, number, 2.0)
        for number, peer in enumerate(job.of_role("owner"))
    ]
    deadline = time.monotonic() + 30
    while not rb.can_sample():
        assert time.monotonic() < deadline
    batches, seen = 0, set()
    while not all(writer.done() for writer in writers):
        batch = rb.sample()
        assert_slices(batch, 8)
        seen |= set((batch["collector", "traj_ids"] % 10).tolist())
        batches += 1
    rounds = [writer.result() for writer in writers]
    assert batches and seen == {0, 1} and sum(rounds) > 3 * rb.storage.max_size


def test_the_limiter_counts_the_rows_of_slices(make) -> None:
    for kind in KINDS:
        limiter = RateLimiter(10, samples_per_insert=1.0, error_buffer=64.0)
        rb = make(kind, 32, slice_len=4, traj_key=KEY, limiter=limiter)
        rb.extend(trajectory(1, range(12)))
        settle(rb)
        taken = 0
        while rb.can_sample():
            rb.sample()
            taken += 32
            assert rb.storage.limiter_counts.samples == taken
        assert 0 < taken <= 2 * 64 + 12
        if kind == "local":
            with pytest.raises(RateLimitError):
                rb.sample()
            rb.storage.close()
        else:
            release(rb)


def test_impossible_options_are_refused(own) -> None:
    for shortcut in (True, False):
        owner = own(shortcut=shortcut)
        with pytest.raises(ConfigurationError, match="pass traj_key= instead of end_key="):
            RPCSliceSampler(slice_len=2, end_key=("next", "done"), owner=owner)
        with pytest.raises(ConfigurationError, match="span to the right"):
            RPCSliceSampler(
                slice_len=2, span=True, pad_output=True, strict_length=False, owner=owner
            )
        with pytest.raises(ConfigurationError, match="does not pad slices"):
            RPCPrioritizedSliceSampler(
                CAPACITY, 1.0, 1.0, slice_len=2, pad_output=True, owner=owner
            )
        with pytest.raises(ConfigurationError, match="trajectories"):
            RPCSliceSampler(slice_len=2, trajectories=torch.ones(3), owner=owner)
        with pytest.warns(UserWarning, match="turns off the span to the left"):
            RPCPrioritizedSliceSampler(
                CAPACITY, 1.0, 1.0, slice_len=2, traj_key=KEY, span=True, owner=owner
            )
    storage = RemoteStorage(owner)
    rb = SharedReplayBuffer(
        storage=storage, sampler=RPCSliceSampler(slice_len=3, owner=owner), batch_size=6
    )
    rb.extend(trajectory(0, range(8)))
    with pytest.raises(RuntimeError, match="must be divisible"):
        rb.sample(7)
    assert_slices(rb.sample(9), 3)
    assert rb.sample(0).batch_size == (0,)
    storage.close()
    owner.release()
    often = RateLimiter(1, max_times_sampled=3)
    owner = own(limiter=often)
    storage = RemoteStorage(owner)
    sampler = RPCSliceSampler(slice_len=3, owner=owner)
    with pytest.raises(ConfigurationError, match="without max_times_sampled"):
        SharedReplayBuffer(storage=storage, sampler=sampler)
    storage.close()
