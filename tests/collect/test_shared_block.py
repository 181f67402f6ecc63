from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tensordict import TensorDict
from torch import nn

from torchrl_dist.collect.worker.shared_block import (
    BlockRows,
    PackedRows,
    RolloutLayout,
    SharedBlock,
    packable,
)


def rollout(envs: int, steps: int) -> TensorDict:
    seen = torch.randn(envs, steps, 3)
    following = TensorDict({"reward": torch.randn(envs, steps, 1)}, [envs, steps])
    done = torch.rand(envs, steps, 1) < 0.5
    return TensorDict({"seen": seen, "done": done, "next": following}, [envs, steps])


def test_parts_of_several_make_one_rollout() -> None:
    whole = rollout(5, 4)
    layout = RolloutLayout.of(whole[:2], 5, 4)
    block = SharedBlock(layout.size_bytes)
    rows = BlockRows(layout, block.data)
    assert rows.write(whole[2:], 2) and rows.write(whole[:2], 0)
    assert (PackedRows(layout, block.data, (5, 4)).unpack() == whole).all()
    short = rollout(2, 3)  # the others' rows stay
    assert rows.write(short, 3)
    found = layout.view(block.data)
    assert (found[3:, :3] == short).all() and (found[:3] == whole[:3]).all()


MISFITS: dict[str, Callable[[TensorDict], object]] = {
    "a key more": lambda rows: rows.set("more", torch.zeros(2, 4)),
    "a key less": lambda rows: rows.pop("seen"),
    "another dtype": lambda rows: rows.set("seen", rows["seen"].double()),
    "another shape": lambda rows: rows.set("seen", rows["seen"][..., :1]),
    "no plain tensor": lambda rows: rows.set("seen", nn.Parameter(rows["seen"])),
    "a tensor with gradient": lambda rows: rows.set("seen", rows["seen"].requires_grad_()),
    "a conjugate": lambda rows: rows.set("seen", torch.randn(2, 4, 3, dtype=torch.cfloat).conj()),
    "words": lambda rows: rows.set_non_tensor("words", "as TorchRL's language envs"),
}


@pytest.mark.parametrize("misfit", MISFITS)
def test_rows_that_do_not_fit_change_nothing(misfit: str) -> None:
    layout = RolloutLayout.of(rollout(1, 1), 4, 4)
    block = SharedBlock(layout.size_bytes)
    rows = rollout(2, 4)
    assert packable(rows)
    MISFITS[misfit](rows)
    assert not BlockRows(layout, block.data).write(rows, 0)
    assert not block.data.any()


@pytest.mark.parametrize("misfit", list(MISFITS)[-4:])
def test_only_plain_arrays_travel_as_arrays(misfit: str) -> None:
    rows = rollout(2, 4)
    MISFITS[misfit](rows)
    assert not packable(rows)


@pytest.mark.parametrize(("envs", "steps", "first_env"), [(2, 4, 3), (5, 4, 0), (2, 5, 0)])
def test_rows_beyond_the_block_are_refused(envs: int, steps: int, first_env: int) -> None:
    layout = RolloutLayout.of(rollout(1, 1), 4, 4)
    block = SharedBlock(layout.size_bytes)
    assert not BlockRows(layout, block.data).write(rollout(envs, steps), first_env)
    assert not block.data.any()
