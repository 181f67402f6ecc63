"""Buffers of every kind: on this node, or kept by one or two other processes."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torchrl.data import ReplayBuffer

from tests.replay.conftest import folder  # noqa: F401
from torchrl_dist import (
    HostedReplayBuffer,
    RemoteStorage,
    RPCPrioritizedSampler,
    Session,
    SharedCursorWriter,
    SharedMemmapStorage,
    SharedPrioritizedSampler,
    host_replay,
    local_cluster,
)
from torchrl_dist.runtime import ForkServer

HOSTED = ["owner by RPC", "owner on this node", "shards by RPC", "shards on this node"]
KINDS = ["local", *HOSTED]


@pytest.fixture(scope="module")
def job(fork_server: ForkServer) -> Iterator[Session]:
    """One for all tests of a module: each builds its buffer there, and releases it."""
    with local_cluster({"learner": 1, "owner": 2}, fork_server=fork_server, timeout_s=20) as job:
        yield job


@pytest.fixture
def where(folder: Path, job: Session) -> Callable[[str], dict[str, Any]]:  # noqa: F811
    """The arguments that say where the rows of a kind of buffer are."""
    return lambda kind: {
        "hosts": job.of_role("owner")[: 2 if "shards" in kind else 1],
        "shortcut": "on this node" in kind,
        "scratch_dir": folder,
    }


@pytest.fixture(params=KINDS)
def plain(
    request: pytest.FixtureRequest,
    folder: Path,  # noqa: F811
    job: Session,
    where: Callable[[str], dict[str, Any]],
) -> Iterator[ReplayBuffer]:
    """TorchRL's ``ReplayBuffer`` over rows of each kind, with priorities."""
    parts: dict[str, Any] = {"writer": SharedCursorWriter(), "batch_size": 8}
    if request.param == "local":
        storage = SharedMemmapStorage(32, scratch_dir=folder, job_id="test")
        sampler: Any = SharedPrioritizedSampler(32, 1.0, 1.0)
        yield ReplayBuffer(storage=storage, sampler=sampler, **parts)
        storage.close()
        return
    owner = host_replay(job, 32, **where(request.param), write_to="all")
    sampler = RPCPrioritizedSampler(owner.capacity, 1.0, 1.0, owner=owner, prefetch=0)
    buffer = ReplayBuffer(storage=RemoteStorage(owner), sampler=sampler, **parts)
    yield buffer
    buffer.storage.close()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # this process has a directory of its node still open
        owner.release()


def release(buffer: HostedReplayBuffer) -> None:
    buffer.close()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # this process has a directory of its node still open
        buffer.release()
