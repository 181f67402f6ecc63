from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from tests.replay import faults
from tests.replay.faults import attach
from torchrl_dist import HostedReplayBuffer, Session, local_cluster, own_files, replay_buffer
from torchrl_dist.replay.node.leftovers import find
from torchrl_dist.runtime import ForkServer


@pytest.fixture
def folder() -> Iterator[Path]:
    """Yield the path of a replay directory in memory, which is removed after the test."""
    path = Path("/dev/shm") / f"torchrl_dist-test-{os.getpid()}-{uuid.uuid4().hex[:8]}"
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture(params=["as_rows", "as_frames"])
def kept_as(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run a test of ``faults.attach`` twice: with plain rows, and with rows of frames."""
    if request.param == "as_frames":
        monkeypatch.setenv(faults.FRAMES, "1")
    return request.param


def make_rows(values: torch.Tensor | range, width: int = 4) -> TensorDict:
    """Make rows whose fields all repeat one value, so that a mix of two rows is recognised."""
    value = torch.as_tensor(list(values), dtype=torch.int64)
    n = value.numel()
    return TensorDict(
        {
            "id": value,
            "obs": value[:, None].expand(n, width).double().clone(),
            "next": {"obs": value[:, None].expand(n, width).double() + 0.5},
        },
        batch_size=[n],
    )


@pytest.fixture
def make_buffer(folder: Path) -> Iterator[Callable[..., Any]]:
    """Open buffers as ``faults.attach`` does, in a folder that the last buffer removes."""
    built: list[Any] = []

    def make(capacity: int = 64, **options: Any) -> Any:
        built.append(attach(folder, capacity, **{"keep": False, "batch_size": 16, **options}))
        return built[-1]

    yield make
    for buffer in built:
        buffer.storage.close()


@pytest.fixture
def cluster(folder: Path, fork_server: ForkServer) -> Iterator[Session]:
    with local_cluster({"learner": 1, "owner": 3}, timeout_s=20, fork_server=fork_server) as job:
        yield job
    # also where a host was killed; in a folder of the user's, its rows are for a later job
    assert not [each for each in find(own_files.user_folders()) if each.job_id == job.world.job_id]


@pytest.fixture
def make_hosted(cluster: Session, folder: Path) -> Callable[..., HostedReplayBuffer]:
    """Make a buffer whose rows are in the first owners. The test uses it by RPC."""

    def make(shards: int = 1, **options: Any) -> HostedReplayBuffer:
        where = {"hosts": cluster.of_role("owner")[:shards], "scratch_dir": folder}
        return replay_buffer(cluster, **{"batch_size": 16, "shortcut": False, **where, **options})

    return make
