"""Rows that are plain tensors in TorchRL's ``ReplayBuffer``, wherever they are kept."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict
from torchrl.data import ReplayBuffer

from tests.replay.hosted_helpers import settle
from torchrl_dist import ConfigurationError


def test_tensors_are_written_sampled_read_and_replaced(plain: ReplayBuffer) -> None:
    parts = [
        plain.extend(torch.arange(10)[:, None] + torch.zeros(3)),
        plain.add(torch.full((3,), 10.0)),
    ]
    settle(plain)
    index = torch.cat([parts[0], parts[1].reshape(1)])
    assert plain[index].tolist() == [[float(n)] * 3 for n in range(11)]
    batch, info = plain.sample(return_info=True)
    assert batch.shape == (8, 3) and (batch == plain[info["index"]]).all()
    assert (info["index_generation"] == 1).all() and (info["priority_weight"] == 1).all()
    plain.update_priority(index, torch.tensor([1e-6] * 10 + [100.0]))
    settle(plain)
    assert (plain.sample(100) == 10).float().mean() > 0.9
    plain[index[3]] = torch.full((3,), -1.0)
    plain[index[:2]] = torch.tensor([[7.0], [8.0]]).expand(2, 3)
    assert plain[index[:4]][:, 0].tolist() == [7, 8, 2, -1]
    assert plain[index[:4].reshape(2, 2)].shape == (2, 2, 3) and plain[int(index[5])].shape == (3,)
    assert sorted(plain[:][:, 0].tolist()) == [-1, 2, 4, 5, 6, 7, 7, 8, 8, 9, 10]


def test_tensors_survive_checkpoints_and_copies(plain: ReplayBuffer, tmp_path: Path) -> None:
    plain.extend(torch.arange(20))
    settle(plain)
    plain.dumps(tmp_path)
    plain.empty()
    assert len(plain) == 0
    plain.loads(tmp_path)
    assert sorted(plain[:].tolist()) == list(range(20))
    copy = pickle.loads(pickle.dumps(plain))
    assert set(copy.sample(50).tolist()) <= set(range(20))
    copy.storage.close()


def test_other_rows_are_refused(plain: ReplayBuffer) -> None:
    plain.extend(torch.arange(4))
    settle(plain)
    for wrong, message in (
        (TensorDict({"a": torch.zeros(3)}, [3]), "stores it as a Tensor"),
        (torch.zeros(3), "torch.float32"),
        (torch.zeros(3, 2, dtype=torch.int64), r"\[2\] per row"),
        ([(torch.zeros(3), torch.zeros(3))] * 2, "is a tree"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            plain.extend(wrong)
    assert len(plain) == 4
    far = torch.tensor([-1, 10**6])
    assert plain.writer.generations_of(far).tolist() == [-1, -1]
