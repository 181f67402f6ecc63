"""Windows of ``sample_unit=Sequence(...)``, wherever the rows are kept."""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from scipy.stats import chisquare
from tensordict.nn import TensorDictModule
from torchrl.data import Sequence

from tests.contracts.conftest import HOSTED, KINDS, release
from tests.replay.faults import attach
from tests.replay.hosted_helpers import settle
from tests.replay.test_windows import expected_window, steps
from torchrl_dist import (
    ConfigurationError,
    RateLimiter,
    RemoteError,
    RemoteStorage,
    RPCBatchedCollector,
    RPCSamplerWithoutReplacement,
    Session,
    SharedReplayBuffer,
    host_replay,
    replay_buffer,
)
from torchrl_dist.replay.parts.windows import Window

CAPACITY = 80
ALPHA, BETA = 0.7, 0.5
Make = Callable[..., SharedReplayBuffer]


@pytest.fixture
def make(folder: Path, job: Session, where) -> Iterator[Make]:
    built: list[Any] = []

    def build(
        kind: str, batch_size: int, unit: Sequence | None, *, uniform: bool = True, **options: Any
    ) -> SharedReplayBuffer:
        shared = {"batch_size": batch_size, "sample_unit": unit, **options}
        if kind == "local":
            shared.pop("write_to", None)
            exponents = {"uniform": True} if uniform else {"alpha": ALPHA, "beta": BETA}
            shared |= {"kind": SharedReplayBuffer, "keep": False, "timeout_s": 2, **exponents}
            buffer = attach(folder, CAPACITY, **shared)
            built.append(buffer.storage.close)
            return buffer
        place = where(kind)
        shared |= {"uniform": uniform, "alpha": ALPHA, "beta": BETA, "prefetch": 0}
        buffer = replay_buffer(job, capacity=len(place["hosts"]) * CAPACITY, **place, **shared)
        built.append(lambda: release(buffer))
        return buffer

    yield build
    for end in built:
        end()


@pytest.mark.parametrize("write_to", ["own", "all"])
@pytest.mark.parametrize("kind", KINDS)
def test_windows_are_consecutive_rows_of_a_trajectory(make, kind, write_to) -> None:
    """Rows of a trajectory in another shard leave a gap that no window crosses."""
    unit = Sequence(4, "stop", burn_in=2, bootstrap=1)
    window = Window.of(unit)
    rb = make(kind, 12, unit, write_to=write_to)
    rng = np.random.default_rng(3)
    current = [0, 1]
    at, new = 0, 1
    written: list[tuple[int, int, int]] = []  # slot, id, trajectory
    for _ in range(14):
        parts = []
        for env in range(2):
            ends = (rng.random(int(rng.integers(1, 5))) < 0.2).tolist()
            rows = steps(at, ends, 0)
            for step, end in enumerate(ends):
                rows["episode"][step] = current[env]
                if end:
                    current[env] = new = new + 1
            at += len(ends)
            parts.append(rows)
        data = torch.cat(parts)
        index = rb.extend(data)
        settle(rb)
        written += zip(index.tolist(), data["id"].tolist(), data["episode"].tolist(), strict=True)
    ring = {slot: (number, episode) for slot, number, episode in written}
    assert len(ring) == len(written)
    order = {number: place for place, (_, number, _) in enumerate(written)}
    slot_of = {number: slot for slot, number, _ in written}
    for _ in range(20):
        batch = rb.sample()
        numbers, valid = (batch[name].reshape(12, -1).tolist() for name in ("id", "validity_mask"))
        for row, anchor in enumerate(batch["anchor_index"].reshape(12, -1)[:, 0].tolist()):
            mine, episode = ring[anchor]
            all_of_it = sorted(
                (number for number, each in ring.values() if each == episode), key=order.get
            )
            rows_of_it: list[int] = []
            for number in all_of_it:  # the piece of the trajectory in this shard, without gaps
                if slot_of[number] // CAPACITY == anchor // CAPACITY:
                    rows_of_it.append(number)
                elif mine in rows_of_it:
                    break
                else:
                    rows_of_it = []
            assert (numbers[row], valid[row]) == expected_window(
                rows_of_it, rows_of_it.index(mine), window
            )
        assert (batch["index_generation"] == 1).all() and (batch["anchor_generation"] == 1).all()
        assert batch["step_in_sequence"].tolist() == list(range(7)) * 12


@pytest.mark.parametrize("kind", KINDS)
def test_anchors_follow_the_priorities_and_get_those_of_their_windows(make, kind) -> None:
    unit = Sequence(3, burn_in=1)
    rb = make(kind, 400, unit, uniform=False, write_to="all", eta=0.9)
    parts = [rb.extend(steps(8 * k, [False] * 7 + [True])) for k in range(9)]
    settle(rb)
    index = torch.cat(parts)
    priority = torch.linspace(0.1, 3, 72)
    rb.update_priority(index, priority)
    leaf = ((priority + 1e-8) ** ALPHA).double().numpy()
    place = torch.zeros(2 * CAPACITY, dtype=torch.int64)
    place[index] = torch.arange(72)
    counts = np.zeros(72)
    for _ in range(10):
        batch = rb.sample().reshape(400, 4)
        anchors = place[batch["anchor_index"][:, 0]].numpy()
        counts += np.bincount(anchors, minlength=72)
        weight = (leaf[anchors] / leaf.min()) ** -BETA
        np.testing.assert_allclose(
            batch["priority_weight"], np.repeat(weight[:, None], 4, 1), rtol=1e-4
        )
    assert chisquare(counts, leaf / leaf.sum() * counts.sum()).pvalue > 1e-6
    batch["td_error"] = torch.rand(400, 4)
    rb.update_tensordict_priority(batch)
    settle(rb)
    for anchor in batch["anchor_index"][:, 0].unique():
        mine = batch["anchor_index"][:, 0] == anchor
        errors, valid = batch["td_error"][mine], batch["validity_mask"][mine]
        learning = valid & batch["learning_mask"][mine]
        expected = 0.9 * errors[valid].max() + 0.1 * errors[learning].mean()
        leaf[place[anchor]] = (float(expected) + 1e-8) ** ALPHA
    again = rb.sample().reshape(400, 4)
    anchors = place[again["anchor_index"][:, 0]].numpy()
    weight = (leaf[anchors] / leaf.min()) ** -BETA
    np.testing.assert_allclose(again["priority_weight"][:, 0], weight, rtol=1e-4)
    assert rb.storage.counters["stale_updates"] == 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_and_batches_drawn_ahead_have_windows(make, kind) -> None:
    rb = make(kind, 4, Sequence(3))
    rb.extend(steps(0, [False] * 20))
    settle(rb)
    copy = pickle.loads(pickle.dumps(rb))
    for buffer in (rb, copy):
        assert buffer.sample(5)["validity_mask"].shape == (15,)
        assert buffer.sample()["sequence_id"].tolist() == [0] * 3 + [1] * 3 + [2] * 3 + [3] * 3
    copy.storage.close()


@pytest.mark.parametrize("kind", KINDS)
def test_the_limiter_counts_the_rows_of_windows(make, kind) -> None:
    limiter = RateLimiter(samples_per_insert=4.0, min_size_to_sample=8, error_buffer=100)
    rb = make(kind, 2, Sequence(3), limiter=limiter)
    rb.extend(steps(0, [False] * 20))
    settle(rb)
    before = rb.storage.limiter_counts.samples
    rb.sample()
    settle(rb)
    assert rb.storage.limiter_counts.samples - before == 6


@pytest.mark.parametrize("kind", HOSTED)
def test_rows_without_numbers_are_refused(make, kind) -> None:
    rb = make(kind, 4, None)
    rb.extend(steps(0, [False] * 20))
    settle(rb)
    with pytest.raises((ConfigurationError, RemoteError), match="which row follows which"):
        make(kind, 4, Sequence(2))


def test_passes_over_hosts_are_refused(job: Session, where) -> None:
    owner = host_replay(job, CAPACITY, **where("owner by RPC"))
    try:
        with pytest.raises(ConfigurationError, match="use RPCRandomSampler"):
            SharedReplayBuffer(
                storage=RemoteStorage(owner),
                sampler=RPCSamplerWithoutReplacement(owner=owner),
                sample_unit=Sequence(2),
            )
    finally:
        owner.release()


@pytest.mark.parametrize("kind", KINDS)
def test_rows_from_before_and_after_a_restore_do_not_follow_each_other(make, kind, tmp_path):
    rb = make(kind, 50, Sequence(3, done_key=None))
    rb.extend(steps(0, [False] * 10))
    settle(rb)
    rb.dumps(tmp_path / "dump")
    for first in (100, 200):
        rb.loads(tmp_path / "dump")
        rb.extend(steps(first, [False] * 10))
        settle(rb)
        windows = rb.sample()["id"].reshape(-1, 3)
        assert ((windows < 100).all(1) | (windows >= 100).all(1)).all()
        assert (windows.diff(dim=1) == 1).any(1).sum() > 20


class _Random(torch.nn.Module):
    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return torch.randint(0, 2, observation.shape[:-1])


@pytest.mark.parametrize("kind", ["owner by RPC", "owner on this node", "shards by RPC"])
def test_windows_of_a_collector_continue_over_its_rollouts(make, job, kind) -> None:
    """Two workers with three envs each write rollouts of eight steps into one ring."""
    rb = make(kind, 32, Sequence(6, burn_in=4))
    policy = TensorDictModule(_Random(), in_keys=["observation"], out_keys=["action"])
    options: dict[str, Any] = {"frames_per_batch": 48, "total_frames": 480, "num_envs": 3}
    collector = RPCBatchedCollector(
        functools.partial(gymnasium.make, "CartPole-v1"),
        policy,
        session=job,
        workers=job.of_role("owner"),
        replay_buffer=rb,
        categorical_action_encoding=True,
        **options,
    )
    for _ in collector:
        pass
    collector.shutdown()
    pairs = 0
    for _ in range(10):
        batch = rb.sample().reshape(32, 10)
        valid, ids = batch["validity_mask"], batch["collector", "traj_ids"]
        assert (ids == ids[:, :1]).all()
        both = valid[:, 1:] & valid[:, :-1]
        follows = batch["next", "observation"][:, :-1] == batch["observation"][:, 1:]
        assert follows.all(-1)[both].all()
        pairs += int(both.sum())
    assert pairs > 1500  # of 2880, since episodes have some twenty steps
