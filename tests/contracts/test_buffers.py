"""Promises of every kind of buffer, which TorchRL's own buffer keeps, too, in one process."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Iterator
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, RandomSampler, TensorDictReplayBuffer
from torchrl.data.replay_buffers.writers import TensorDictRoundRobinWriter
from torchrl.envs import DoubleToFloat

from tests.contracts.conftest import release
from tests.replay.conftest import make_rows
from tests.replay.faults import attach
from tests.replay.hosted_helpers import settle
from tests.replay.test_rows import agents_rows, check_agents_rows
from torchrl_dist import (
    RemoteStorage,
    RPCPrioritizedSampler,
    Session,
    SharedCursorWriter,
    SharedReplayBuffer,
    host_replay,
    replay_buffer,
)
from torchrl_dist.errors import ConfigurationError

CAPACITY = 24


LOCAL = ["torchrl", "shared uniform", "shared prioritized", "exact", "attached by pickle", "frames"]
HOSTED = ["owner by RPC", "owner by RPC, stock class", "owner on this node"]
SHARDED = [
    "shards by RPC", "uniform shards by RPC", "shards on this node", "pickled shards",
    "shards with frames",
]  # fmt: skip
FRAMES = {"obs": 1}


@pytest.fixture(params=[*LOCAL, *HOSTED, *SHARDED])
def buffer(
    request: pytest.FixtureRequest, folder: Path, job: Session, where: Any
) -> Iterator[TensorDictReplayBuffer]:
    if request.param in HOSTED + SHARDED:
        yield from hosted_buffer(request.param, job, where(request.param))
        return
    if request.param == "torchrl":
        yield TensorDictReplayBuffer(
            storage=LazyTensorStorage(CAPACITY),
            sampler=RandomSampler(),
            writer=TensorDictRoundRobinWriter(track_generations=True),
            batch_size=8,
        )
        return
    kind = SharedReplayBuffer if request.param == "exact" else TensorDictReplayBuffer
    options: dict[str, Any] = {"keep": False, "batch_size": 8}
    if request.param == "frames":
        options["frames"] = FRAMES
    uniform = request.param == "shared uniform"
    rb = attach(folder, CAPACITY, uniform=uniform, kind=kind, **options)
    used = pickle.loads(pickle.dumps(rb)) if request.param == "attached by pickle" else rb
    yield used
    used.storage.close()
    rb.storage.close()


def hosted_buffer(form: str, job: Session, where: dict) -> Iterator[TensorDictReplayBuffer]:
    """One or two other processes keep the rows; this one writes to the first of them."""
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
    options = {"uniform": "uniform" in form, "batch_size": 8, "prefetch": 0, **where}
    if "frames" in form:
        options["frames"] = FRAMES
    rb = replay_buffer(job, capacity=len(where["hosts"]) * CAPACITY, **options)
    used = pickle.loads(pickle.dumps(rb)) if "pickled" in form else rb
    yield used
    used.close()
    release(rb)


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
    square = torch.arange(4).reshape(2, 2)
    assert buffer.writer.generations_of(square).tolist() == after[square].tolist()


def test_single_rows_slices_lists_and_tensors_index_alike(buffer) -> None:
    buffer.extend(make_rows(range(10)))
    assert int(buffer[3]["id"]) == 3
    assert ids(buffer[2:5]) == [2, 3, 4] and ids(buffer[-3:-1]) == [7, 8]
    assert ids(buffer[torch.tensor([7, 1])]) == [7, 1]
    assert ids(buffer[[7, 1]]) == [7, 1]
    assert ids(buffer[...]) == ids(buffer[:]) == list(range(10))


@pytest.mark.parametrize("buffer", ["shards by RPC"], indirect=True)
def test_a_slice_over_shards_counts_from_the_end_with_both_bounds_or_none(buffer) -> None:
    buffer.extend(make_rows(range(10)))
    for mixed in (slice(2, -1), slice(None, -1), slice(-3, 5)):
        with pytest.raises(IndexError, match="expected both bounds to count"):
            buffer[mixed]
    buffer.storage[-3:-1] = make_rows([50, 51])
    assert ids(buffer[:]) == [0, 1, 2, 3, 4, 5, 6, 50, 51, 9]


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
    storage[-1] = make_rows([61])[0]
    assert ids(buffer[:10]) == [0, 60, 60, 60, 60, 5, 6, 7, 8, 61]
    assert ids(storage.get(torch.tensor([1, 9], dtype=torch.int32))) == [60, 61]
    one = storage[torch.tensor(7)]
    assert one.batch_size == () and one["id"] == 7
    assert torch.equal(storage.get("id"), buffer[:]["id"])
    assert torch.equal(storage.get(("next", "obs")), buffer[:]["next", "obs"])
    with pytest.raises(IndexError, match="uint8, which may be a mask"):
        storage[torch.tensor([0, 1, 1], dtype=torch.uint8)]


@pytest.mark.parametrize("buffer", OURS, indirect=True)
def test_rows_are_added_and_extended_with_their_priorities(buffer) -> None:
    priority = torch.tensor([100.0] + (CAPACITY - 1) * [0.01])
    for lap in range(3):  # only the index tensor tells the laps apart
        rows = make_rows(range(CAPACITY * lap, CAPACITY * (lap + 1)))
        rows["td_error"] = priority = priority.flip(0)
        for row in rows[:4]:
            buffer.add(row)
        buffer.extend(rows[4:])
        settle(buffer)
        (saved, *_) = (each for each in buffer.storage.snapshot() if each.leaf.size)
        if hasattr(buffer.sampler, "alpha"):
            assert saved.leaf == pytest.approx(priority.numpy() ** 0.6, 1e-4)
            assert buffer.storage.counters["stale_updates"] == 0


@pytest.mark.parametrize(
    "buffer", [kind for kind in [*OURS, "torchrl"] if "frames" not in kind], indirect=True
)
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


@pytest.mark.parametrize("buffer", OURS, indirect=True)
def test_rows_that_require_grad_are_stored_without_it(buffer) -> None:
    rows = make_rows(range(8))
    rows["obs"] = rows["obs"].requires_grad_() * 1.0
    buffer.extend(rows)
    settle(buffer)
    buffer.storage.write_at(torch.tensor([3, 1]), rows[:2])
    assert not buffer.sample()["obs"].requires_grad
    assert ids(buffer[:8]) == [0, 1, 2, 0, 4, 5, 6, 7]


@pytest.mark.parametrize("buffer", OURS, indirect=True)
def test_equal_seeds_draw_different_batches(buffer) -> None:
    buffer.extend(make_rows(range(CAPACITY)))
    settle(buffer)
    copied = pickle.loads(pickle.dumps(buffer))
    drawn = []
    for each in (buffer, copied):
        torch.manual_seed(0)
        np.random.seed(0)
        drawn.append(ids(each.sample(64)))
    assert drawn[0] != drawn[1]
    copied.storage.close()


@pytest.fixture(params=["local", "local, stock class", "owner by RPC", "shards by RPC"])
def drawing_ahead(
    request: pytest.FixtureRequest, folder: Path, job: Session, where: Any
) -> Iterator[TensorDictReplayBuffer]:
    options: dict[str, Any] = {"batch_size": 8, "prefetch": 3}
    if "local" in request.param:
        kind = TensorDictReplayBuffer if "stock" in request.param else SharedReplayBuffer
        rb = attach(folder, 64, kind=kind, keep=False, **options)
        yield rb
        rb.storage.close()
    else:
        rb = replay_buffer(job, capacity=64, **where(request.param), **options)
        yield rb
        release(rb)


def test_batches_drawn_ahead_end_with_their_rows(drawing_ahead, tmp_path: Path) -> None:
    rb = drawing_ahead
    other = pickle.loads(pickle.dumps(rb))
    rb.extend(make_rows(range(8)))
    settle(rb)
    rb.storage.dumps(tmp_path)  # without a state of the sampler
    saved = rb.storage.state_dict()
    ends = [rb.empty, rb.storage.empty, rb.empty]
    if type(rb) is SharedReplayBuffer:
        ends[2] = other.empty  # as in another process
    restores = [
        lambda: rb.storage.loads(tmp_path),
        lambda: rb.storage.load_state_dict(saved),
        lambda: rb.storage.loads(tmp_path),
    ]
    for end, restore in zip(ends, restores, strict=True):
        for change, first in ((end, 50), (restore, 0)):
            rb.sample()
            wait(getattr(rb, "_prefetch_queue", ()))
            change()
            if first:
                rb.extend(make_rows(range(50, 58)))
            for _ in range(5):
                assert set(ids(rb.sample())) <= {*range(first, first + 8)}
    other.storage.close()


PRIORITIZED = [kind for kind in OURS if "uniform" not in kind]


@pytest.mark.parametrize("buffer", PRIORITIZED, indirect=True)
def test_a_late_priority_for_a_recycled_slot_is_dropped(buffer) -> None:
    buffer.extend(make_rows(range(CAPACITY)))
    settle(buffer)
    batch = buffer.sample()
    buffer.extend(make_rows(range(100, 100 + CAPACITY)))
    batch["td_error"] = torch.full((8,), 1e6)
    buffer.update_tensordict_priority(batch)
    settle(buffer)
    assert buffer.storage.counters["stale_updates"] == 8
    assert (buffer.sample()["priority_weight"] == 1).all()


@pytest.mark.parametrize("buffer", PRIORITIZED, indirect=True)
def test_alpha_changes_for_every_user(buffer) -> None:
    rows = make_rows(range(4)).set("td_error", torch.tensor([1.0, 4.0, 9.0, 16.0]))
    buffer.extend(rows)
    settle(buffer)
    other = pickle.loads(pickle.dumps(buffer))
    assert len(buffer.sample()) == len(other.sample()) == 8
    for user, alpha in ((buffer, 0.5), (other, 0.0), (buffer, 1.0)):
        user.sampler.alpha = alpha
        settle(user)
        (saved, *_) = (each for each in buffer.storage.snapshot() if each.leaf.size)
        # the exponent 0 makes all priorities 1, which stay
        assert saved.leaf == pytest.approx([1, 2, 3, 4] if alpha == 0.5 else 1, 1e-5)
        for each in (buffer, other):
            assert each.sample()["priority_weight"].min() > 0
            assert each.sampler.alpha == each.sampler.state_dict()["_alpha"] == alpha
    other.storage.close()


def row_with(**changes: Any) -> TensorDict:
    return make_rows([50]).set("td_error", torch.ones(1)).update(changes)


REFUSED_ROWS = {
    "missing 'obs'": row_with().exclude("obs"),
    "unknown 'extra'": row_with(extra=torch.zeros(1)),
    "'obs' is torch.float32": row_with().exclude("obs").update({"obs": torch.zeros(1, 4)}),
    r"\[5\] per row": row_with().exclude("obs").update({"obs": torch.zeros(1, 5).double()}),
    "name": row_with().set_non_tensor("name", "x"),
    "at least one tensor": TensorDict({}, [3]),
}


@pytest.mark.parametrize("buffer", OURS, indirect=True)
def test_wrong_rows_slots_and_priorities_are_refused_and_change_nothing(buffer) -> None:
    buffer.extend(make_rows(range(10)).set("td_error", torch.ones(10)))
    settle(buffer)
    storage, row, beyond = buffer.storage, row_with(), torch.tensor([buffer.storage.max_size])
    one, refused = torch.tensor([1]), []

    def refuse(words: str, call: Any, *arguments: Any, error: Any = ConfigurationError, **named):
        refused.append((error, words, lambda: call(*arguments, **named)))

    for words, rows in REFUSED_ROWS.items():
        refuse(words, buffer.extend, rows)
    for place in (beyond, -beyond - 1):
        refuse("capacity|expected slots|beyond|before", storage.get, place, error=IndexError)
        refuse("capacity|expected slots|beyond|before", storage.set, place, row, error=IndexError)
    for place in (torch.tensor([1.9]), [0.0, 1.0], 2.5):
        refuse("index of integers, got torch.float32", storage.get, place, error=IndexError)
        refuse("index of integers", storage.write_at, place, row, error=IndexError)
    refuse("expected slots|got -1", storage.write_at, -one, row, error=IndexError)
    refuse("1 rows for 2 slots", storage.write_at, torch.tensor([1, 2]), row)
    refuse("batch of rows", storage.append, row[0])
    refuse("expected rows in a TensorDict", storage.set, 3, "a row")
    if hasattr(buffer.sampler, "alpha"):
        update, two = buffer.sampler.update_priority, torch.ones(2)
        refuse("prior", update, one, two, storage=storage)
        refuse("finite", buffer.writer.extend, row_with(), priority=np.array([1 + 1j]))
        for bad in (-1.0, math.nan, math.inf, 1 + 1j):
            refuse(">= 0", update, one, torch.tensor([bad]), storage=storage)
            if type(buffer) is not TensorDictReplayBuffer:  # which writes the rows first
                refuse("finite", buffer.extend, row_with(td_error=torch.tensor([bad])))
        refuse("capacity|expected slots", update, beyond, 1.0, storage=storage, error=IndexError)
        refuse(
            "index of integers", update, torch.tensor([1.9]), 3.0, storage=storage, error=IndexError
        )
        refuse("mask", update, torch.arange(8) == 5, 9.0, storage=storage, error=IndexError)
        wrong = torch.tensor([2, 2])
        refuse("generation", update, one, 1.0, storage=storage, generation=wrong)
    handles = storage.generations_of(torch.arange(10)).tolist()
    for error, words, call in refused:
        with pytest.raises(error, match=words):
            call()
            settle(buffer)
    assert ids(buffer[:10]) == list(range(10)) and len(buffer) == buffer.write_count == 10
    assert storage.generations_of(torch.arange(10)).tolist() == handles
    assert set(ids(buffer.sample())) <= set(range(10))
    index = buffer.extend(row)
    settle(buffer)
    assert ids(buffer[index]) == [50]
