"""What every buffer promises its users, and that TorchRL's own keeps it too (with one process)."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, RandomSampler, ReplayBuffer, TensorDictReplayBuffer
from torchrl.data.replay_buffers.writers import RoundRobinWriter, TensorDictRoundRobinWriter
from torchrl.envs import DoubleToFloat

from tests.replay.conftest import folder, make_rows  # noqa: F401
from tests.replay.test_rows import agents_rows, check_agents_rows
from torchrl_dist import (
    RemoteStorage,
    RPCPrioritizedSampler,
    Session,
    SharedCursorWriter,
    SharedMemmapStorage,
    SharedPrioritizedSampler,
    SharedRandomSampler,
    SharedReplayBuffer,
    host_replay,
    local_cluster,
    replay_buffer,
)
from torchrl_dist.errors import ConfigurationError
from torchrl_dist.runtime import ForkServer

CAPACITY = 24


LOCAL = ["torchrl", "shared uniform", "shared prioritized", "exact", "attached by pickle"]
HOSTED = ["owner by RPC", "owner by RPC, stock class", "owner on this node"]
SHARDED = ["shards by RPC", "uniform shards by RPC", "shards on this node", "pickled shards"]


@pytest.fixture(scope="module")
def job(fork_server: ForkServer) -> Iterator[Session]:
    """One for all tests: each builds its buffer there, and gives it back."""
    with local_cluster({"learner": 1, "owner": 2}, fork_server=fork_server, timeout_s=20) as job:
        yield job


@pytest.fixture(params=[*LOCAL, *HOSTED, *SHARDED])
def buffer(
    request: pytest.FixtureRequest,
    folder: Path,  # noqa: F811
    job: Session,
) -> Iterator[TensorDictReplayBuffer]:
    if request.param in HOSTED + SHARDED:
        yield from hosted_buffer(request.param, folder, job)
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
    job: Session,
) -> Iterator[TensorDictReplayBuffer]:
    """Kept by one or two other processes; this one writes to the first of them."""
    shards = 2 if form in SHARDED else 1
    where = {
        "hosts": job.of_role("owner")[:shards],
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
        yield rb
        rb.storage.close()
        owner.release()
        return
    rb = replay_buffer(
        job,
        capacity=shards * CAPACITY,
        batch_size=8,
        prefetch=0,
        uniform="uniform" in form,
        **where,
    )
    used = pickle.loads(pickle.dumps(rb)) if "pickled" in form else rb
    yield used
    used.close()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # this process has a directory of its node still open
        rb.release()


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


def test_information_about_a_sample_can_be_left_out(buffer) -> None:
    buffer.extend(make_rows(range(CAPACITY)))
    with pytest.warns(UserWarning, match="include_info"):
        batch = buffer.sample(include_info=False)
        alike, info = buffer.sample(return_info=True, include_info=False)
    # TorchRL's writers put the index into the rows themselves
    assert set(batch.keys()) - {"index"} == set(alike.keys()) - {"index"} == {"id", "next", "obs"}
    assert info["index"].shape == (8,)


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
    assert ids(buffer[...]) == ids(buffer[:]) == list(range(10))


def test_can_sample_and_sampling_nothing(buffer) -> None:
    assert not buffer.can_sample()
    with pytest.raises(RuntimeError):
        buffer.sample()
    buffer.extend(make_rows(range(3)))
    assert buffer.can_sample() and set(ids(buffer.sample())) <= {0, 1, 2}


def test_a_batch_may_have_no_rows_but_not_less(buffer) -> None:
    buffer.extend(make_rows(range(3)))
    settle(buffer)
    batch = buffer.sample(0)
    assert batch.batch_size == (0,) and batch["obs"].shape == (0, *make_rows([0])["obs"].shape[1:])
    assert batch["index"].dtype == torch.int64 and batch["index"].shape == (0,)
    buffer.update_tensordict_priority(batch)
    with pytest.raises((RuntimeError, ValueError), match="-1"):  # ours are of the latter kind
        buffer.sample(-1)
    assert set(ids(buffer.sample())) <= {0, 1, 2}


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


def test_a_dump_brings_rows_cursor_and_count_back(buffer, tmp_path: Path) -> None:
    buffer.extend(make_rows(range(30)))
    stored = ids(buffer[:])
    buffer.dumps(tmp_path)
    buffer.extend(make_rows(range(90, 100)))
    buffer.loads(tmp_path)
    assert ids(buffer[:]) == stored and buffer.write_count == 30
    index = buffer.extend(make_rows(range(2)))
    settle(buffer)
    assert index.tolist() == [6, 7]


def test_a_single_row_is_added_to_the_others(buffer) -> None:
    buffer.extend(make_rows(range(10)))
    index = buffer.add(make_rows(range(50, 51))[0])
    assert int(buffer[int(index)]["id"]) == 50
    assert sorted(ids(buffer[:])) == [*range(10), 50]


def test_transforms_work_on_the_way_in_and_out(buffer) -> None:
    buffer.append_transform(DoubleToFloat(in_keys=["obs"], in_keys_inv=[]))
    buffer.append_transform(lambda rows: rows.set("twice", 2 * rows["id"]))
    rows = make_rows(range(10))
    buffer.extend(rows)
    batch = buffer.sample()
    assert batch["obs"].dtype == torch.float32 and (batch["twice"] == 2 * batch["id"]).all()
    assert "index" not in rows.keys() and "twice" not in rows.keys()


def test_iteration_goes_on_as_rows_come(buffer) -> None:
    buffer.extend(make_rows(range(4)))
    seen: set[int] = set()
    for turn, batch in enumerate(buffer):
        seen |= set(ids(batch))
        if turn == 20:
            buffer.extend(make_rows(range(4, 8)))
        if turn == 60:
            break
    assert seen == set(range(8))


def test_rows_at_given_slots_are_replaced(buffer) -> None:
    buffer.extend(make_rows(range(10)))
    new = make_rows(range(60, 70))
    buffer[2] = new[2]
    buffer[4:6] = new[4:6]
    buffer[torch.tensor([9, 7])] = new[[9, 7]]
    expected = [60 + i if i in (2, 4, 5, 7, 9) else i for i in range(10)]
    assert ids(buffer[:]) == expected and len(buffer) == 10 and buffer.write_count >= 10
    assert ids(buffer[torch.arange(10) < 3]) == expected[:3]


OURS = [kind for kind in [*LOCAL, *HOSTED, *SHARDED] if kind != "torchrl"]


@pytest.mark.parametrize("buffer", OURS, indirect=True)
def test_query_follows_trajectories_over_the_end_of_the_ring(buffer) -> None:
    for start in range(0, 70, 10):
        rows = make_rows(range(start, start + 10))
        buffer.extend(rows.set("episode", rows["id"] // 7))
    settle(buffer)
    if not isinstance(buffer, SharedReplayBuffer):
        with pytest.raises(ConfigurationError, match="build a SharedReplayBuffer"):
            buffer.query()
        return
    found = [ids(each.data) for each in buffer.query()]
    left = range(70 - CAPACITY, 70)
    assert found == [[i for i in left if i // 7 == episode] for episode in range(6, 10)]


@pytest.mark.parametrize("buffer", OURS, indirect=True)
def test_rows_are_replaced_by_mask_and_from_a_list(buffer) -> None:
    storage = buffer.storage
    buffer.extend(make_rows(range(10)))
    settle(buffer)
    first, second, _, fourth = make_rows([51, 52, 53, 54])
    storage.set(torch.arange(10) % 9 == 0, [first, second])
    storage.set(range(3, 5), torch.stack([second, fourth]))
    assert ids(buffer[:10]) == [51, 1, 2, 52, 54, 5, 6, 7, 8, 52]
    assert not storage._is_full and len(buffer) == storage._len == 10
    assert int(storage[(torch.tensor([9]),)]["id"]) == 52


@pytest.mark.parametrize("buffer", OURS, indirect=True)
def test_rows_are_read_and_replaced_by_indices_of_any_shape(buffer) -> None:
    buffer.extend(make_rows(range(10)))
    settle(buffer)
    storage, square = buffer.storage, torch.tensor([[1, 2], [3, 4]])
    for nothing in (torch.zeros(10, dtype=torch.bool), [], slice(3, 3)):
        storage[nothing] = make_rows(range(0))
    storage[square] = make_rows(range(51, 55)).reshape(2, 2)
    assert ids(storage[square]) == [[51, 52], [53, 54]]
    storage[square] = make_rows([60])[0]
    assert ids(buffer[:10]) == [0, 60, 60, 60, 60, 5, 6, 7, 8, 9]
    one = storage[torch.tensor(7)]
    assert one.batch_size == () and one["id"] == 7
    assert torch.equal(storage.get("id"), buffer[:]["id"])
    assert torch.equal(storage.get(("next", "obs")), buffer[:]["next", "obs"])
    with pytest.raises(IndexError, match="uint8 might be a mask"):
        storage[torch.tensor([0, 1, 1], dtype=torch.uint8)]


@pytest.mark.parametrize("buffer", OURS, indirect=True)
def test_a_row_is_added_with_its_priority(buffer) -> None:
    rows = make_rows(range(8))
    rows["td_error"] = torch.tensor([100.0] + 7 * [0.01])
    for row in rows:
        buffer.add(row)
    settle(buffer)
    (saved, *_) = (each for each in buffer.storage.snapshot() if each.leaf.size)
    if hasattr(buffer.sampler, "alpha"):
        assert saved.leaf[0] == pytest.approx(100**0.6, 1e-4)
        assert saved.leaf[1:] == pytest.approx(0.01**0.6, 1e-4)


@pytest.mark.parametrize("buffer", OURS, indirect=True)
def test_what_is_no_row_or_no_slot_is_refused_and_changes_nothing(buffer) -> None:
    buffer.extend(make_rows(range(10)))
    settle(buffer)
    storage, row, beyond = buffer.storage, make_rows([50]), torch.tensor([buffer.storage.max_size])
    refused = [
        (IndexError, "capacity|must be in|beyond", lambda: storage.get(beyond)),
        (IndexError, "capacity|must be in|beyond", lambda: storage.set(beyond, row)),
        (IndexError, "must be in", lambda: storage.write_at(torch.tensor([-1]), row)),
        (
            ConfigurationError,
            "1 rows for 2 slots",
            lambda: storage.write_at(torch.tensor([1, 2]), row),
        ),
        (ConfigurationError, "batch of rows", lambda: storage.append(row[0])),
        (ConfigurationError, "rows are TensorDicts", lambda: storage.set(3, "a row")),
        (ConfigurationError, "'obs'", lambda: buffer.extend(row.exclude("obs"))),
        (ConfigurationError, "", lambda: buffer.extend(TensorDict({}, [3]))),
    ]
    if hasattr(buffer.sampler, "alpha"):
        one, two = torch.tensor([1]), torch.ones(2)
        update = buffer.sampler.update_priority
        refused += [
            (ConfigurationError, "prior", lambda: update(one, two, storage=storage)),
            (ConfigurationError, ">= 0", lambda: update(one, -two[:1], storage=storage)),
            (IndexError, "capacity", lambda: update(beyond, 1.0, storage=storage)),
            (
                ConfigurationError,
                "generation",
                lambda: update(one, 1.0, storage=storage, generation=torch.tensor([2, 2])),
            ),
        ]
    handles = storage.generations_of(torch.arange(10)).tolist()
    for error, words, call in refused:
        with pytest.raises(error, match=words):
            call()
    settle(buffer)
    assert ids(buffer[:10]) == list(range(10)) and len(buffer) == buffer.write_count == 10
    assert storage.generations_of(torch.arange(10)).tolist() == handles
    assert set(ids(buffer.sample())) <= set(range(10))


def test_rows_keep_nested_batch_sizes_empty_nodes_and_text(buffer, tmp_path: Path) -> None:
    torchrls = isinstance(buffer.storage, LazyTensorStorage)  # whose checkpoints lose the text
    buffer.extend(agents_rows(0, 10))
    settle(buffer)
    check_agents_rows(buffer.sample())
    check_agents_rows(buffer[torch.tensor([7, 2])])
    state = copy.deepcopy(buffer.state_dict())
    buffer.dumps(tmp_path)
    for restore in (lambda: buffer.loads(tmp_path), lambda: buffer.load_state_dict(state)):
        buffer.extend(agents_rows(50, 4))
        restore()
        assert buffer[:]["number"].tolist() == list(range(10))
        check_agents_rows(buffer[:], text=not torchrls)


@pytest.mark.parametrize("kind", ["torchrl", "shared"])
def test_prefetch_and_a_plain_replay_buffer(kind: str, folder: Path) -> None:  # noqa: F811
    shared = kind == "shared"
    buffer = ReplayBuffer(
        storage=SharedMemmapStorage(CAPACITY, scratch_dir=folder, job_id="test")
        if shared
        else LazyTensorStorage(CAPACITY),
        sampler=SharedPrioritizedSampler(CAPACITY, 0.6, 0.4) if shared else RandomSampler(),
        writer=SharedCursorWriter() if shared else RoundRobinWriter(track_generations=True),
        batch_size=8,
        prefetch=3,
    )
    buffer.extend([row for row in make_rows(range(10))])
    buffer.add(make_rows(range(10, 11))[0])
    for _ in range(10):
        batch, info = buffer.sample(return_info=True)
        assert ids(batch) == info["index"].tolist()
        assert (info["index_generation"] == buffer.writer.generations_of(info["index"])).all()
        assert not shared or info["priority_weight"].shape == (8,)
    buffer.shutdown()
    buffer.empty()
    assert len(buffer) == 0
    if shared:
        buffer.storage.close()
