"""Buffers of every kind: on this node, or kept by one or two other processes."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.replay.conftest import folder  # noqa: F401
from torchrl_dist import HostedReplayBuffer, Session, local_cluster
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


def release(buffer: HostedReplayBuffer) -> None:
    buffer.close()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # this process has a directory of its node still open
        buffer.release()
