"""Rows that are plain tensors in TorchRL's ``ReplayBuffer``, wherever they are kept."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torchrl.data import ReplayBuffer

from tests.contracts.conftest import KINDS
from tests.replay.hosted_helpers import settle
from torchrl_dist import (
    ConfigurationError,
    RemoteStorage,
    RPCPrioritizedSampler,
    Session,
    SharedCursorWriter,
    SharedMemmapStorage,
    SharedPrioritizedSampler,
    host_replay,
)

CAPACITY = 32


@pytest.fixture(params=KINDS)
def rb(request: pytest.FixtureRequest, folder: Path, job: Session, where) -> Iterator[ReplayBuffer]:
    parts: dict[str, Any] = {"writer": SharedCursorWriter(), "batch_size": 8}
    if request.param == "local":
        storage = SharedMemmapStorage(CAPACITY, scratch_dir=folder, job_id="test")
        sampler: Any = SharedPrioritizedSampler(CAPACITY, 1.0, 1.0)
        yield ReplayBuffer(storage=storage, sampler=sampler, **parts)
        storage.close()
        return
    owner = host_replay(job, CAPACITY, **where(request.param), write_to="all")
    sampler = RPCPrioritizedSampler(owner.capacity, 1.0, 1.0, owner=owner, prefetch=0)
    buffer = ReplayBuffer(storage=RemoteStorage(owner), sampler=sampler, **parts)
    yield buffer
    buffer.storage.close()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # this process has a directory of its node still open
        owner.release()


def test_tensors_are_written_sampled_read_and_replaced(rb: ReplayBuffer) -> None:
    parts = [rb.extend(torch.arange(10)[:, None] + torch.zeros(3)), rb.add(torch.full((3,), 10.0))]
    settle(rb)
    index = torch.cat([parts[0], parts[1].reshape(1)])
    assert rb[index].tolist() == [[float(n)] * 3 for n in range(11)]
    batch, info = rb.sample(return_info=True)
    assert batch.shape == (8, 3) and (batch == rb[info["index"]]).all()
    assert (info["index_generation"] == 1).all() and (info["priority_weight"] == 1).all()
    rb.update_priority(index, torch.tensor([1e-6] * 10 + [100.0]))
    settle(rb)
    assert (rb.sample(100) == 10).float().mean() > 0.9
    rb[index[3]] = torch.full((3,), -1.0)
    rb[index[:2]] = torch.tensor([[7.0], [8.0]]).expand(2, 3)
    assert rb[index[:4]][:, 0].tolist() == [7, 8, 2, -1]
    assert rb[index[:4].reshape(2, 2)].shape == (2, 2, 3) and rb[int(index[5])].shape == (3,)
    assert sorted(rb[:][:, 0].tolist()) == [-1, 2, 4, 5, 6, 7, 7, 8, 8, 9, 10]


def test_tensors_survive_checkpoints_and_copies(rb: ReplayBuffer, tmp_path: Path) -> None:
    rb.extend(torch.arange(20))
    settle(rb)
    rb.dumps(tmp_path)
    rb.empty()
    assert len(rb) == 0
    rb.loads(tmp_path)
    assert sorted(rb[:].tolist()) == list(range(20))
    copy = pickle.loads(pickle.dumps(rb))
    assert set(copy.sample(50).tolist()) <= set(range(20))
    copy.storage.close()


def test_other_rows_are_refused(rb: ReplayBuffer) -> None:
    rb.extend(torch.arange(4))
    settle(rb)
    for wrong, message in (
        (TensorDict({"a": torch.zeros(3)}, [3]), "stored as a Tensor"),
        (torch.zeros(3), "torch.float32"),
        (torch.zeros(3, 2, dtype=torch.int64), r"\[2\] per row"),
        ([(torch.zeros(3), torch.zeros(3))] * 2, "got tuple"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            rb.extend(wrong)
    assert len(rb) == 4
    far = torch.tensor([-1, 10**6])
    assert rb.writer.generations_of(far).tolist() == [-1, -1]
