"""What every buffer promises its users, and that TorchRL's own keeps it too (with one process)."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, RandomSampler, TensorDictReplayBuffer
from torchrl.data.replay_buffers.writers import TensorDictRoundRobinWriter

from tests.replay.conftest import folder, make_rows  # noqa: F401
from torchrl_dist import (
    RemoteStorage,
    RPCPrioritizedSampler,
    SharedCursorWriter,
    SharedMemmapStorage,
    SharedPrioritizedSampler,
    SharedRandomSampler,
    SharedReplayBuffer,
    host_replay,
    local_cluster,
    replay_buffer,
)
from torchrl_dist.runtime import ForkServer

CAPACITY = 24


LOCAL = ["torchrl", "shared uniform", "shared prioritized", "exact", "attached by pickle"]
HOSTED = ["owner by RPC", "owner by RPC, stock class", "owner on this node"]
SHARDED = ["shards by RPC", "uniform shards by RPC", "shards on this node", "pickled shards"]


@pytest.fixture(params=[*LOCAL, *HOSTED, *SHARDED])
def buffer(
    request: pytest.FixtureRequest,
    folder: Path,  # noqa: F811
    fork_server: ForkServer,
) -> Iterator[TensorDictReplayBuffer]:
    if request.param in HOSTED + SHARDED:
        yield from hosted_buffer(request.param, folder, fork_server)
        return
    if request.param == "torchrl":
        yield TensorDictReplayBuffer(
            storage=LazyTensorStorage(CAPACITY),
            sampler=RandomSampler(),
            writer=TensorDictRoundRobinWriter(track_generations=True),
            batch_size=8,
        )
        return
    uniform = request.param == "shared uniform"
    kind = SharedReplayBuffer if request.param == "exact" else TensorDictReplayBuffer
    rb = kind(
        storage=SharedMemmapStorage(CAPACITY, scratch_dir=folder, job_id="test"),
        sampler=SharedRandomSampler() if uniform else SharedPrioritizedSampler(CAPACITY, 0.6, 0.4),
        writer=SharedCursorWriter(),
        batch_size=8,
    )
    yield pickle.loads(pickle.dumps(rb)) if request.param == "attached by pickle" else rb
    rb.storage.close()


def hosted_buffer(
    form: str,
    folder: Path,  # noqa: F811
    fork_server: ForkServer,
) -> Iterator[TensorDictReplayBuffer]:
    """Kept by one or two other processes; this one writes to the first of them."""
    shards = 2 if form in SHARDED else 1
    roles = {"learner": 1, "owner": shards}
    with local_cluster(roles, fork_server=fork_server, timeout_s=20) as job:
        where = {
            "hosts": job.of_role("owner"),
            "shortcut": "on this node" in form,
            "scratch_dir": folder,
        }
        if "stock" in form:
            owner = host_replay(job, CAPACITY, **where)
            rb = TensorDictReplayBuffer(
                storage=RemoteStorage(owner),
                sampler=RPCPrioritizedSampler(CAPACITY, 0.6, 0.4, owner=owner, prefetch=0),
                writer=SharedCursorWriter(),
                batch_size=8,
            )
        else:
            rb = replay_buffer(
                job,
                capacity=shards * CAPACITY,
                batch_size=8,
                prefetch=0,
                uniform="uniform" in form,
                **where,
            )
        yield pickle.loads(pickle.dumps(rb)) if "pickled" in form else rb


def settle(buffer: TensorDictReplayBuffer) -> None:
    """Wait until another process has taken over what was written, where there is one."""
    flush = getattr(buffer.storage, "flush", None)
    if flush is not None:
        flush()


def ids(rows: TensorDict) -> list[int]:
    return rows["id"].tolist()


def test_the_newest_rows_stay_in_ring_order(buffer) -> None:
    for start in range(0, 70, 10):
        index = buffer.extend(make_rows(range(start, start + 10)))
        settle(buffer)
        assert index.tolist() == [slot % CAPACITY for slot in range(start, start + 10)]
    assert len(buffer) == CAPACITY and buffer.write_count == 70
    expected = [max(t for t in range(70) if t % CAPACITY == slot) for slot in range(CAPACITY)]
    assert ids(buffer[:]) == expected


def test_a_sample_is_rows_of_the_buffer_with_their_index_and_generation(buffer) -> None:
    buffer.extend(make_rows(range(CAPACITY)))
    buffer.extend(make_rows(range(100, 106)))
    stored = ids(buffer[:])
    for _ in range(20):
        batch = buffer.sample()
        assert batch.batch_size == (8,)
        assert ids(batch) == [stored[slot] for slot in batch["index"].tolist()]
        assert batch["obs"].dtype == torch.float64
        wanted = buffer.writer.generations_of(batch["index"])
        assert (batch["index_generation"] == wanted).all()


def test_a_write_advances_the_generation_of_its_slots_only(buffer) -> None:
    buffer.extend(make_rows(range(CAPACITY)))
    before = buffer.writer.generations_of(torch.arange(CAPACITY))
    buffer.extend(make_rows(range(5)))
    after = buffer.writer.generations_of(torch.arange(CAPACITY))
    assert (after - before).tolist() == [1] * 5 + [0] * (CAPACITY - 5)


def test_single_rows_slices_lists_and_tensors_index_alike(buffer) -> None:
    buffer.extend(make_rows(range(10)))
    assert int(buffer[3]["id"]) == 3
    assert ids(buffer[2:5]) == [2, 3, 4]
    assert ids(buffer[torch.tensor([7, 1])]) == [7, 1]
    assert ids(buffer[[7, 1]]) == [7, 1]


def test_can_sample_and_sampling_nothing(buffer) -> None:
    assert not buffer.can_sample()
    with pytest.raises(RuntimeError):
        buffer.sample()
    buffer.extend(make_rows(range(3)))
    assert buffer.can_sample() and set(ids(buffer.sample())) <= {0, 1, 2}


def test_empty_starts_over_at_slot_0(buffer) -> None:
    buffer.extend(make_rows(range(10)))
    buffer.empty()
    assert len(buffer) == 0
    index = buffer.extend(make_rows(range(50, 53)))
    settle(buffer)
    assert index.tolist() == [0, 1, 2]
    assert sorted(set(ids(buffer.sample(64)))) == [50, 51, 52]


def test_a_state_dict_brings_the_rows_back(buffer) -> None:
    buffer.extend(make_rows(range(10)))
    state = copy.deepcopy(buffer.state_dict())  # TorchRL hands out views of its rows
    buffer.extend(make_rows(range(90, 120)))
    buffer.load_state_dict(state)
    assert len(buffer) == 10 and ids(buffer[:]) == list(range(10))
