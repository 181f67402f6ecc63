"""Sessions over several hosts, each a network namespace."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import netns
from tests.netns import Host, run_torchrun
from torchrl_dist.runtime import session

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(netns.missing() is not None, reason=f"no hosts here: {netns.missing()}"),
]
ROLES = {"learner": 1, "collector": -1}


@pytest.fixture
def network() -> Iterator[list[Host]]:
    with netns.hosts(3) as network:
        yield network
    assert not any(name.startswith("rlhosts-") for name in os.listdir("/dev/shm"))
    assert not any(name.startswith("rlhosts-") for name in netns._namespaces())


def everybody_calls_everybody(folder: str) -> None:
    with session(ROLES, timeout_s=30) as me:
        world = me.world
        facts = (world.node_rank, world.local_rank, world.host, world.launcher, world.one_node)
        Path(folder, f"facts{world.global_rank}").write_text(json.dumps(facts))
        answers = [me.call(peer, os.getpid) for peer in me.peers]
        assert answers == [me.pid_of(peer) for peer in me.peers]
        assert len({peer.host for peer in me.peers}) == 3
        me.barrier()


def test_ranks_on_three_hosts_know_their_nodes_and_call_each_other(network, tmp_path):
    job = run_torchrun(network, everybody_calls_everybody, {"folder": str(tmp_path)}, tmp_path,
                       nproc=[2, 1, 1])  # fmt: skip
    assert job.wait(90) == [0, 0, 0], job
    facts = [json.loads((tmp_path / f"facts{rank}").read_text()) for rank in range(4)]
    places = [(0, 0), (0, 1), (1, 0), (2, 0)]
    assert facts == [[node, local, f"host{node}", "torchrun", False] for node, local in places]
