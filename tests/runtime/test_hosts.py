"""Sessions over several nodes, each a network namespace."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import netns
from tests.netns import Host, run_tasks, run_torchrun, wait_for, wait_until_all_are_up
from torchrl_dist.errors import DeadlineError, PeerLostError
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
    assert netns.leftovers() == []


def all_call_all(folder: str) -> None:
    with session(ROLES, timeout_s=30) as me:
        world = me.world
        facts = (world.node_rank, world.local_rank, world.host, world.launcher, world.one_node)
        Path(folder, f"facts{world.global_rank}").write_text(json.dumps(facts))
        answers = [me.call(peer, os.getpid) for peer in me.peers]
        assert answers == [me.pid_of(peer) for peer in me.peers]
        assert len({peer.host for peer in me.peers}) == 3
        me.barrier()


def test_ranks_on_three_hosts_know_their_nodes_and_call_each_other(network, tmp_path):
    job = run_torchrun(network, all_call_all, {"folder": str(tmp_path)}, tmp_path,
                       nproc=[2, 1, 1])  # fmt: skip
    assert job.wait(90) == [0, 0, 0], str(job)
    facts = [json.loads((tmp_path / f"facts{rank}").read_text()) for rank in range(4)]
    places = [(0, 0), (0, 1), (1, 0), (2, 0)]
    assert facts == [[node, local, f"host{node}", "torchrun", False] for node, local in places]


def the_driver_calls(folder: str) -> None:
    wait_until_all_are_up(Path(folder))
    with session(ROLES, timeout_s=30) as me:
        if me.is_driver:
            assert [me.call(peer, os.getpid) for peer in me.peers] == list(me._pids)
        else:
            me.serve()


def test_hosts_without_ipv4_whose_own_names_are_on_loopback_meet(tmp_path):
    with netns.hosts(2, ipv6=True) as network:
        job = run_tasks(network, the_driver_calls, {"folder": str(tmp_path)}, tmp_path)
        assert job.wait(90) == [0, 0], str(job)


# Long enough for an answer on two busy cores; a longer wait is a failure.
TIMEOUT_S = 6.0


def the_driver_loses_a_host(folder: str, while_away: str) -> None:
    """Let the driver wait in a call to the last node, which then disappears."""
    wait_until_all_are_up(Path(folder))
    with session(ROLES, timeout_s=TIMEOUT_S) as me:
        if me.is_driver:
            assert [me.call(peer, os.getpid) for peer in me.peers[1:]]
            Path(folder, "ready").touch()
            wait_for(Path(folder, "disturbed"))
            start = time.monotonic()
            if while_away == "silent":  # its kernel may answer, but the process does not
                with pytest.raises(DeadlineError, match="collector1 on host2 did not answer"):
                    me.call(me.peers[2], os.getpid, timeout_s=0.5)
                assert me.lost() == ()
            with pytest.raises(PeerLostError, match="collector1 on host2"):
                me.call(me.peers[2], time.sleep, 100, timeout_s=100)
            # noticed before the call's own deadline, and within the session's
            assert time.monotonic() - start < 4 * TIMEOUT_S
            assert [peer.name for peer in me.lost()] == ["collector1"]
            report = me.lost_reason(me.peers[2])
            assert me.call(me.peers[1], os.getpid) == me.pid_of(me.peers[1])
            assert me.call(me.peers[1], lambda: remote_lost()) == ["collector1"]
            Path(folder, "report").write_text(report)
            wait_for(Path(folder, "go on"))
        else:
            me.serve()


def remote_lost() -> list[str]:
    from torchrl_dist.runtime import current_session

    return [peer.name for peer in current_session().lost()]


@pytest.mark.parametrize(
    ("disturb", "report", "code", "told"),
    [
        ("unplug", "no sign of life", 1, "job has ended: learner0 on host0 is lost: no sign"),
        ("pause", "no sign of life", 1, "counts collector1 as lost"),
        ("kill", "connection failed", -9, ""),
    ],
)
def test_when_a_host_is_cut_off_paused_or_killed_both_sides_know_and_the_others_go_on(
    network, tmp_path, disturb, report, code, told
):
    arguments = {"folder": str(tmp_path), "while_away": "gone" if disturb == "kill" else "silent"}
    job = run_tasks(network, the_driver_loses_a_host, arguments, tmp_path)
    wait_for(tmp_path / "ready", job=job)
    getattr(network[2], disturb)()
    (tmp_path / "disturbed").touch()
    wait_for(tmp_path / "report", job=job)
    assert report in (tmp_path / "report").read_text()
    if disturb == "pause":
        network[2].resume()
    assert job.wait(60, [2]) == [code], str(job)
    assert told in job.log(2), str(job)
    (tmp_path / "go on").touch()
    assert job.wait(60, [0, 1]) == [0, 0], str(job)


# TCP retransmits 0.2, 0.6, 1.4, 3 and 6.2 s after the first attempt. Data sent in the first 2 s of
# the cut arrives 0.9 s after its end or later, when more than 0.7 of this deadline has passed.
PATIENT_S = 8.0


def a_long_message_and_then_a_cut(folder: str) -> None:
    wait_until_all_are_up(Path(folder))
    with session(ROLES, timeout_s=PATIENT_S) as me:
        if me.is_driver:
            other = me.peers[1]
            me.call(other, os.getpid)
            Path(folder, "ready").touch()
            wait_for(Path(folder, "slow"))
            start = time.monotonic()
            assert me.call(other, len, b" " * 4_000_000, timeout_s=60) == 4_000_000
            assert time.monotonic() - start > 0.9 * PATIENT_S and me.lost() == ()
            Path(folder, "arrived").touch()
            wait_for(Path(folder, "plugged in"))
            assert me.call(other, os.getpid, timeout_s=60) == me.pid_of(other)
            assert me.lost() == ()
        else:
            me.serve()


def test_neither_a_long_message_nor_a_cut_below_the_deadline_loses_a_host(network, tmp_path):
    network = network[:2]
    job = run_tasks(network, a_long_message_and_then_a_cut, {"folder": str(tmp_path)}, tmp_path)
    wait_for(tmp_path / "ready", job=job)
    network[0].slow_down(mbit=4)
    (tmp_path / "slow").touch()
    wait_for(tmp_path / "arrived", job=job)
    network[1].unplug()
    time.sleep(0.66 * PATIENT_S)  # the cut itself
    network[1].plug_in()
    (tmp_path / "plugged in").touch()
    assert job.wait(60) == [0, 0], str(job)


def the_driver_only_starts(folder: str) -> None:
    wait_until_all_are_up(Path(folder))
    with session(ROLES, timeout_s=TIMEOUT_S, process_group={"collector": "gloo"}) as me:
        if me.is_driver:
            assert [me.call(peer, os.getpid) for peer in me.peers[1:]]
            Path(folder, "ready").touch()
            time.sleep(100)
        me.serve()


def test_when_the_drivers_host_vanishes_the_others_end_with_an_error(network, tmp_path):
    job = run_tasks(network, the_driver_only_starts, {"folder": str(tmp_path)}, tmp_path)
    wait_for(tmp_path / "ready", job=job)
    network[0].crash()
    assert job.wait(4 * TIMEOUT_S, [1, 2]) == [1, 1], str(job)
    for host in (1, 2):
        assert "the job has ended: learner0 on host0 is lost: no sign of life" in job.log(host)
