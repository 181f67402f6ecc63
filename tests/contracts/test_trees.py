"""Rows that are dictionaries, lists and tuples of tensors in TorchRL's ``ReplayBuffer``."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from torch.utils._pytree import tree_flatten, tree_map
from torchrl.data import LazyTensorStorage, ReplayBuffer, TensorDictReplayBuffer

from tests.replay.faults import run_forked
from tests.replay.hosted_helpers import settle
from torchrl_dist import (
    ConfigurationError,
    SharedCursorWriter,
    SharedMaxValueWriter,
    SharedMemmapStorage,
    SharedRandomSampler,
    SharedReplayBuffer,
    SharedSliceSampler,
)
from torchrl_dist.replay.row import trees

CAPACITY = 32


class Pair(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor


def tree(first: int, count: int) -> dict[Any, Any]:
    """Rows whose tensors all show the row's number."""
    number = torch.arange(first, first + count)
    wide = number[:, None].expand(-1, 3).float()
    return {"z": number, "b": {"c": [wide, (wide + 0.5,)], "none": {}}, 30: wide[..., None]}


def flat(data: Any) -> list[Any]:
    leaves, spec = tree_flatten(data)
    return [[leaf.tolist() for leaf in leaves], str(spec)]


# --- a tree and its form -------------------------------------------------------------------------

_LEAF = st.builds(lambda value: torch.full((2,), value), st.integers(0, 99))
_KEY = st.text(max_size=3).filter(lambda key: not key.startswith("[")) | st.integers(-3, 3)
_TREES = st.recursive(
    _LEAF,
    lambda below: (
        st.lists(below, max_size=3)
        | st.lists(below, max_size=3).map(tuple)
        | st.dictionaries(_KEY, below, max_size=3)
    ),
    max_leaves=8,
)


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(_KEY, _TREES, min_size=1, max_size=4))
def test_a_tree_is_put_together_as_it_was(data: dict[Any, Any]) -> None:
    columns, kind = trees.take_apart(data)
    assert flat(trees.put_together(kind, columns)) == flat(data)
    assert len(columns) == len(tree_flatten(data)[0])
    backwards = dict(reversed(data.items()))
    other = trees.take_apart(backwards)[1]
    assert trees.in_order(other) == trees.in_order(kind)
    assert (
        trees.in_order(trees.take_apart({**data, "new": torch.ones(2)})[1]) != trees.in_order(kind)
        or "new" in data
    )
    assert json.loads(kind.removeprefix(trees.KIND))[0] == "dict"


# --- TorchRL's buffer is the model ---------------------------------------------------------------


def test_the_same_rows_as_over_torchrls_storage(plain: ReplayBuffer) -> None:
    theirs = ReplayBuffer(storage=LazyTensorStorage(plain.storage.max_size), batch_size=8)
    for buffer in (plain, theirs):
        buffer.extend(tree(0, 10))
        settle(buffer)
        buffer.add(tree_map(lambda value: value[0], tree(10, 1)))
        settle(buffer)
    if "Remote" in type(plain.storage).__name__:  # several shards hold rows in slots of their own
        assert sorted(plain[:]["z"].tolist()) == list(range(11))
        return
    buffer.extend(tree(11, 4))
    plain.extend(tree(11, 4))
    settle(plain)
    assert flat(plain[:]) == flat(theirs[:])
    assert flat(plain[3]) == flat(theirs[3])
    assert flat(plain[torch.tensor([4, 2])]) == flat(theirs[torch.tensor([4, 2])])
    assert [flat(each) for each in plain.storage] == [
        flat(tree_map(lambda value, row=row: value[row], theirs[:])) for row in range(15)
    ]


def test_trees_are_sampled_replaced_and_saved(plain: ReplayBuffer, tmp_path: Path) -> None:
    index = plain.extend(tree(0, 20))
    settle(plain)
    batch, info = plain.sample(return_info=True)
    assert flat(batch) == flat(plain[info["index"]])
    assert (batch["b"]["c"][1][0][:, 0] - 0.5 == batch["z"]).all() and batch["b"]["none"] == {}
    plain[index[3]] = tree_map(lambda value: value[0], tree(100, 1))
    plain[index[:2]] = tree(101, 2)
    assert plain[index[:4]]["z"].tolist() == [101, 102, 2, 100]
    assert plain[index[:4].reshape(2, 2)]["b"]["c"][0].shape == (2, 2, 3)
    assert sorted(plain[:][30][:, 0, 0].tolist()) == [2, *range(4, 20), 100, 101, 102]
    plain.dumps(tmp_path)
    plain.empty()
    plain.loads(tmp_path)
    assert sorted(plain[:]["z"].tolist()) == [2, *range(4, 20), 100, 101, 102]
    copy = pickle.loads(pickle.dumps(plain))
    assert set(copy.sample(50)["z"].tolist()) <= set(plain[:]["z"].tolist())
    copy.storage.close()


def test_more_rows_than_fit_and_lists_of_rows(plain: ReplayBuffer) -> None:
    plain.extend([tree_map(lambda value: value[0], tree(number, 1)) for number in range(3)])
    settle(plain)
    assert sorted(plain[:]["z"].tolist()) == [0, 1, 2]
    plain.extend(tree(0, 0))
    plain.extend(tree(10, plain.storage.max_size + 5))
    settle(plain)
    assert sorted(plain[:]["z"].tolist()) == list(range(15, 15 + plain.storage.max_size))


def test_the_order_of_keys_is_that_of_the_first_rows(plain: ReplayBuffer) -> None:
    plain.extend(tree(0, 2))
    settle(plain)
    plain.extend(dict(reversed(tree(2, 2).items())))
    settle(plain)
    assert list(plain[:]) == ["z", "b", 30] and sorted(plain[:]["z"].tolist()) == [0, 1, 2, 3]


def test_other_trees_are_refused(plain: ReplayBuffer) -> None:
    one = tree_map(lambda value: value[0], tree(0, 1))
    nothing: Any = [
        ({"a": 3}, "value of type int at"),
        ({"a": TensorDict({"b": torch.zeros(2)}, [2])}, "value of type TensorDict at"),
        ({(1, 2): torch.zeros(2)}, "keys must be ints, or strings"),
        ({"[0]": torch.zeros(2)}, "keys must be ints, or strings"),
        ({"a": torch.zeros(2), "b": torch.zeros(3)}, "first dimensions"),
        ({}, "at least one tensor"),
        ([one, {"a": torch.zeros(())}], "different keys"),
        ([{"a": torch.zeros(2)}, {"a": torch.zeros(3)}], "different shapes"),
        ([torch.zeros(2), torch.zeros(3)], "Stacking the elements of the list"),
        (Pair(torch.zeros(2), torch.zeros(2)), "got Pair"),
        ({"a": Pair(torch.zeros(2), torch.zeros(2))}, "value of type Pair at"),
    ]
    for wrong, message in nothing:
        with pytest.raises(ConfigurationError, match=message):
            plain.extend(wrong)
    assert plain.storage.write_count == 0
    plain.extend(tree(0, 4))
    settle(plain)
    for wrong, message in (
        *nothing,
        (one, "first dimensions|without a batch dimension"),
        ({**tree(0, 2), "more": torch.zeros(2)}, "unknown 'more'"),
        ({**tree(0, 2), 30: torch.zeros(2)}, r"\[30\]"),
        (
            {**tree(0, 2), "b": {"c": (torch.zeros(2, 3), (torch.zeros(2, 3),))}},
            "as a tree",
        ),
        (TensorDict(z=torch.zeros(2).long(), batch_size=[2]), "as a tree"),
        (torch.zeros(2), "as a tree"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            plain.extend(wrong)
    assert len(plain) == 4


def test_checkpoints_fit_trees_of_the_same_form(plain: ReplayBuffer, tmp_path: Path) -> None:
    plain.extend(tree(0, 4))
    settle(plain)
    plain.storage.dumps(tmp_path / "dump")
    for number, (rows, fits) in enumerate(
        [
            (dict(reversed(tree(5, 2).items())), True),
            ({**tree(5, 2), "b": {"c": (*tree(5, 2)["b"]["c"],), "none": {}}}, False),
        ]
    ):
        storage = SharedMemmapStorage(
            plain.storage.max_size, scratch_dir=tmp_path / str(number), job_id="test"
        )
        storage.append(rows)
        if not fits:
            with pytest.raises(ConfigurationError, match="not changed.* 'a row' is a tree"):
                storage.loads(tmp_path / "dump")
        else:
            storage.loads(tmp_path / "dump")
            assert list(storage[:]) == list(rows)
            assert sorted(storage[:]["z"].tolist()) == [0, 1, 2, 3]
        storage.close()


# --- with the other parts ------------------------------------------------------------------------


def test_trees_with_other_parts(folder: Path) -> None:
    storage = SharedMemmapStorage(CAPACITY, scratch_dir=folder, job_id="test")
    sampler = SharedSliceSampler(slice_len=3, traj_key=("b", "episode"), strict_length=True)
    rb = ReplayBuffer(storage=storage, sampler=sampler, writer=SharedCursorWriter(), batch_size=6)
    number = torch.arange(20)
    rb.extend({"n": number, "b": {"episode": number // 5}})
    batch = rb.sample()
    assert (batch["n"].reshape(2, 3).diff() == 1).all()
    assert (batch["b"]["episode"] == batch["n"] // 5).all()

    def write() -> None:
        rb.extend({"n": torch.tensor([70]), "b": {"episode": torch.tensor([9])}})

    assert run_forked(write) == 0 and rb[20]["n"] == 70
    best = TensorDictReplayBuffer(
        storage=storage, sampler=SharedRandomSampler(), writer=SharedMaxValueWriter("n")
    )
    with pytest.raises(ConfigurationError, match="expects data to be a tensor collection"):
        best.writer.extend({"n": number})
    with pytest.raises(ConfigurationError, match="stores TensorDicts"):
        SharedReplayBuffer(storage=storage, batch_size=4).extend({"n": number})  # type: ignore[arg-type]
    storage.close()
