"""``update_if_present``: rows change as a whole, and keep their generation and priority."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import NonTensorData, TensorDict
from torchrl.data import (
    LazyTensorStorage,
    Sequence,
    TensorDictReplayBuffer,
    TensorDictRoundRobinWriter,
)

from tests.contracts.conftest import HOSTED, KINDS
from tests.replay.faults import (
    Dying,
    assert_lock_is_free,
    attach,
    end_of,
    interrupt_points,
    kill_points,
    published,
    start,
)
from torchrl_dist.errors import ConfigurationError
from torchrl_dist.replay import SharedMemmapStorage, SharedReplayBuffer, SharedSliceSampler
from torchrl_dist.replay.node import patches
from torchrl_dist.replay.node.tables import Word

WIDTH = 64


def rows(count: int, first: int = 0) -> TensorDict:
    number = torch.arange(first, first + count)
    return TensorDict(
        {
            "id": number,
            "a": number[:, None].expand(-1, WIDTH).clone(),
            ("next", "b"): number[:, None].expand(-1, WIDTH).clone(),
            "v": torch.zeros(count, 1, dtype=torch.int64),
            "priority": torch.ones(count),
        },
        [count],
    )


def new_values(values: torch.Tensor) -> dict[Any, torch.Tensor]:
    wide = values[:, None].expand(-1, WIDTH).clone()
    return {"a": wide, ("next", "b"): wide}


def make(folder: Path, capacity: int = 16, **options: Any) -> SharedReplayBuffer:
    options = {"alpha": 1.0, "batch_size": 8, "priority_key": "priority"} | options
    return attach(folder, capacity, kind=SharedReplayBuffer, **options)


# --- TorchRL's buffer is the model ---------------------------------------------------------------


@pytest.mark.parametrize("newer", [True, False, None], ids=["newer", "not older", "no version"])
@pytest.mark.parametrize("bytes_at_once", [1, 2**18])
def test_results_and_rows_are_those_of_torchrls_buffer(
    folder: Path, newer: bool | None, bytes_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patches, "_BYTES_AT_ONCE", bytes_at_once)
    rng = torch.Generator().manual_seed(5)
    ours = make(folder)
    theirs = TensorDictReplayBuffer(
        storage=LazyTensorStorage(16), writer=TensorDictRoundRobinWriter(track_generations=True)
    )
    handles: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
    at = 0
    for step in range(60):
        count = int(torch.randint(1, 9, (), generator=rng))
        index = ours.extend(rows(count, at))
        theirs.extend(rows(count, at))
        at += count
        handles.append(
            (index, ours.writer.generations_of(index), theirs.writer.generations_of(index))
        )
        known = [torch.cat(part) for part in zip(*handles[-4:], strict=True)]
        some = torch.randint(len(known[0]), (12,), generator=rng)  # with repetitions
        index, mine, other = (part[some] for part in known)
        options: dict[str, Any] = {"patch": new_values(1000 * step + torch.arange(12))}
        if newer is not None:
            versions = torch.randint(0, 4, (12,), generator=rng)
            options |= {"version_key": "v", "version": versions, "require_newer": newer}
        found = ours.update_if_present(index=index, generation=mine, **options)
        expected = theirs.update_if_present(index=index, generation=other, **options)
        assert (found.updated == expected.updated).all()
        if newer is not None:
            assert (found.version_rejected == expected.version_rejected).all()
        for name in ("updated_count", "stale_count", "version_rejected_count"):
            assert getattr(found, name) == getattr(expected, name)
        assert (ours[:] == theirs[:].exclude("index")).all()


def test_priority_generation_and_counts_stay(folder: Path) -> None:
    rb = make(folder)
    index = rb.extend(rows(16))
    batch = rb.sample()
    rb.update_priority(index, torch.arange(1.0, 17.0))
    before = rb.writer.generations_of(index), rb.storage.directory.tree.leaves.copy()
    result = rb.update_if_present(
        index=index, generation=before[0], patch=new_values(torch.arange(50, 66))
    )
    assert result.updated.all() and result.version_rejected is None and len(rb) == 16
    assert (rb.writer.generations_of(index) == before[0]).all()
    assert (rb.storage.directory.tree.leaves == before[1]).all() and rb.write_count == 16
    batch["priority"] = torch.full((8,), 100.0)
    rb.update_tensordict_priority(batch)  # computed before the patch, for the same rows
    assert rb.storage.counters["stale_updates"] == 0
    future = rb.submit_update_if_present(
        index=index[:2], generation=before[0][:2], patch={"id": torch.tensor([7, 8])}
    )
    assert future.result().updated_count == 2 and rb[:2]["id"].tolist() == [7, 8]
    rb.shutdown()


def test_an_index_below_zero_names_no_row(folder: Path) -> None:
    """An index of -1 stands for a row that was not kept; the last slot is of another row."""
    rb = make(folder)
    rb.extend(rows(16))
    result = rb.update_if_present(
        index=torch.tensor([-1, 3]),
        generation=torch.tensor([1, 1]),
        patch={"id": torch.tensor([70, 80])},
    )
    assert result.updated.tolist() == [False, True] and result.stale_count == 1
    assert rb[15]["id"] == 15 and rb[3]["id"] == 80


# --- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"patch": {"c": torch.ones(2)}}, KeyError, "no 'c'"),
        ({"patch": {"a": torch.ones(2, WIDTH)}}, ValueError, "torch.float32"),
        ({"patch": {"id": torch.ones(3, dtype=torch.int64)}}, ValueError, "one value per index"),
        ({"version_key": "v"}, ValueError, "pass both"),
        ({"version_key": "v", "version": torch.ones(2)}, ValueError, "torch.float32"),
        ({"version_key": "a", "version": 1}, ValueError, "got"),
        (
            {"patch": {"v": torch.ones(2, 1, dtype=torch.int64)}, "version_key": "v", "version": 1},
            ValueError,
            "patch must not contain version_key",
        ),
        ({"version_key": "c64", "version": torch.ones(2) * 1j}, ValueError, "no order"),
        ({"index": torch.tensor([0, 99])}, IndexError, "below 16"),
        ({"generation": torch.tensor([1])}, ValueError, "2 indices and 1 generations"),
        ({"patch": {"text": torch.ones(2)}}, ValueError, "not tensors"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_wrong_arguments_change_nothing(folder: Path, arguments, error, message) -> None:
    rb = make(folder)
    text = NonTensorData("x", batch_size=[4])
    rb.extend(rows(4).set("text", text).set("c64", torch.zeros(4, dtype=torch.complex64)))
    before = rb[:]
    given = {"index": torch.tensor([0, 1]), "generation": torch.tensor([1, 1])}
    given |= {"patch": {"id": torch.tensor([5, 6])}}
    with pytest.raises(error, match=message):
        rb.update_if_present(**given | arguments)
    for key in ("id", "a", "v"):
        assert (rb[:][key] == before[key]).all()


def test_columns_by_which_samplers_find_trajectories_are_refused(folder: Path) -> None:
    slices = SharedSliceSampler(slice_len=2, traj_key="id")
    storage = SharedMemmapStorage(16, scratch_dir=folder, job_id="test")
    rb = SharedReplayBuffer(storage=storage, sampler=slices, batch_size=4)
    rb.extend(torch.cat([rows(1)] * 8))
    other = make(folder)
    patch = {"index": torch.tensor([0]), "generation": torch.tensor([1])}
    one = torch.tensor([5])
    assert other.update_if_present(patch={"id": one * 0}, **patch).updated_count == 1
    rb.sample()
    with pytest.raises(ConfigurationError, match="to find or rank rows"):
        other.update_if_present(patch={"id": one}, **patch)
    assert other.update_if_present(patch=new_values(one), **patch).updated_count == 1
    other.storage.close()
    storage.close()


def test_frames_that_rows_share_are_refused_and_other_values_are_not(folder: Path) -> None:
    storage = SharedMemmapStorage(16, scratch_dir=folder, job_id="test", frames={"a": 1})
    rb = SharedReplayBuffer(storage=storage, batch_size=4)
    rb.extend(rows(8).exclude("priority"))
    given = {"index": torch.tensor([3]), "generation": torch.tensor([1])}
    with pytest.raises(ConfigurationError, match="frames that several rows share"):
        rb.update_if_present(patch={"a": torch.ones(1, WIDTH, dtype=torch.int64)}, **given)
    assert rb.update_if_present(patch={"id": torch.tensor([9])}, **given).updated_count == 1
    assert rb[3]["id"] == 9 and (rb[3]["a"] == 3).all()


# --- while others read, write and die ------------------------------------------------------------


def patch_until(end: Path, folder: Path, seed: int) -> None:
    """Patch random rows, which all processes read, until the file ``end`` exists."""
    rb = make(folder, 64)
    rng = torch.Generator().manual_seed(seed)
    value = 10_000 * (seed + 1)
    while not end.exists():
        batch = rb.sample()
        value += 10
        index, stamps = batch["index"], batch["index_generation"]
        rb.update_if_present(
            index=index, generation=stamps, patch=new_values(torch.full((8,), value))
        )
        if torch.rand((), generator=rng) < 0.2:
            rb.extend(rows(5, value))
    rb.storage.close()


def assert_whole(batch: TensorDict) -> None:
    assert (batch["a"] == batch["a"][:, :1]).all()
    assert (batch["a"] == batch["next", "b"]).all()


@pytest.mark.parametrize("unit", [None, Sequence(3, done_key=None)], ids=["rows", "windows"])
def test_no_row_is_torn_by_patches(folder: Path, tmp_path: Path, unit: Sequence | None) -> None:
    rb = make(folder, 64, sample_unit=unit)
    rb.extend(rows(64))
    writers = [start(patch_until, tmp_path / "end", folder, seed) for seed in range(2)]
    words = rb.storage.directory.words
    start_s = time.monotonic()
    reads, enough = 0, False
    try:
        while (spent := time.monotonic() - start_s) < 3.5 or (not enough and spent < 60):
            assert_whole(rb.sample())
            assert_whole(rb.storage[:])
            reads += 1
            enough = reads > 100 and words[Word.PATCHES] > 200
            if reads % 50 == 0:
                rb.dumps(tmp_path / "dump")
                copy = SharedReplayBuffer(
                    storage=SharedMemmapStorage(64, scratch_dir=f"{folder}-copy", job_id="copy"),
                    batch_size=8,
                    priority_key="priority",
                )
                copy.loads(tmp_path / "dump")
                assert_whole(copy[:])
                copy.storage.close()
    finally:
        (tmp_path / "end").touch()
    assert [end_of(pid) for pid in writers] == [0, 0]
    assert enough, (reads, words[Word.PATCHES])


def test_a_process_killed_during_a_patch_leaves_whole_rows(folder: Path) -> None:
    """A row is the old one, the new one, or lost."""
    torch.set_num_threads(1)
    rb = make(folder)
    rb.extend(rows(16))
    index = torch.arange(16)
    died = lost = new = 0
    patch = new_values(torch.full((16,), 7000))

    def victim(dying: Dying) -> None:
        stamps = rb.writer.generations_of(index)
        with dying:
            rb.update_if_present(index=index, generation=stamps, patch=patch)

    for _, killed in kill_points(victim, every=4):
        died += killed
        assert_lock_is_free(rb.storage.directory)
        with rb.storage.directory.lock():  # repairs
            pass
        there = published(rb.storage.directory)
        assert len(rb) == there.sum()
        assert ((rb.storage.directory.tree.leaves > 0) == there).all()
        assert rb.storage.directory.words[Word.PATCHES] % 2 == 0
        left = rb.storage[:]
        assert_whole(left)
        lost += 16 - len(rb)
        new += killed and int((left["a"][:, 0] == 7000).sum())
        assert set(left["a"][:, 0].tolist()) <= {*range(16), 7000}
        rb.extend(rows(16))
        assert len(rb) == 16
    assert died > 20 and lost and new


def test_an_interrupted_patch_leaves_whole_rows(folder: Path) -> None:
    """Ctrl-C at any point: a row is the old one, the new one, or lost."""
    rb = make(folder)
    index = torch.arange(16)
    interrupted = 0

    def change() -> None:
        stamps = rb.writer.generations_of(index)
        patch = new_values(torch.full((16,), 7000))
        rb.update_if_present(index=index, generation=stamps, patch=patch)

    for _ in interrupt_points(change, every=2, prepare=lambda: rb.extend(rows(16))):
        interrupted += 1
        left = rb.storage[:]
        assert_whole(left)
        assert len(left) == len(rb)
        assert set(left["a"][:, 0].tolist()) <= {*range(16), 7000}
        with rb.storage.directory.lock():
            assert rb.storage.directory.words[Word.PATCHES] % 2 == 0
    assert interrupted > 20


# --- over hosts ----------------------------------------------------------------------------------


@pytest.fixture
def kept(request: pytest.FixtureRequest, folder: Path, make_hosted) -> SharedReplayBuffer:
    kind = request.param
    if kind == "local":
        return make(folder, 64)
    return make_hosted(
        2 if "shards" in kind else 1,
        capacity=64,
        batch_size=8,
        shortcut="on this node" in kind,
        priority_key="priority",
        write_to="all",
        prefetch=0,
    )


@pytest.mark.parametrize("kept", [kind for kind in KINDS if kind in HOSTED], indirect=True)
def test_patches_reach_the_rows_of_all_hosts(kept: SharedReplayBuffer) -> None:
    rb = kept
    parts = [rb.extend(rows(8, 8 * step)) for step in range(4)]
    getattr(rb.storage, "flush", lambda: None)()
    index = torch.cat(parts)
    stamps = rb.writer.generations_of(index)
    versions = {"version_key": "v", "version": torch.arange(32), "require_newer": True}
    result = rb.update_if_present(
        index=index, generation=stamps, patch=new_values(torch.arange(100, 132)), **versions
    )
    assert (result.updated == (torch.arange(32) > 0)).all()
    assert (result.version_rejected == (torch.arange(32) == 0)).all()
    found = rb[index]
    assert_whole(found)
    assert found["a"][:, 0].tolist() == [0, *range(101, 132)]
    assert (rb.writer.generations_of(index) == stamps).all()
    unfilled = rb.update_if_present(
        index=torch.full((2,), -1), generation=stamps[:2], patch={"id": torch.tensor([1, 2])}
    )
    assert unfilled.stale_count == 2
    shaped = {key: value.reshape(4, 8, WIDTH) for key, value in new_values(index + 200).items()}
    again = rb.update_if_present(
        index=index.reshape(4, 8), generation=stamps.reshape(4, 8), patch=shaped
    )
    assert again.updated.all() and (rb[index]["a"][:, 0] == index + 200).all()
    late = rb.update_if_present(
        index=index, generation=stamps + 1, patch=new_values(torch.arange(32))
    )
    assert late.stale_count == 32
    with pytest.raises((KeyError, RuntimeError), match="no 'c'"):
        rb.update_if_present(index=index, generation=stamps, patch={"c": torch.ones(32)})
    with pytest.raises((ValueError, RuntimeError), match="one value per index"):
        rb.update_if_present(
            index=index, generation=stamps, patch={"id": torch.ones(31, dtype=torch.int64)}
        )
    assert np.isfinite(rb.sample()["priority_weight"].numpy()).all()
