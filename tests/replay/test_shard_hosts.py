"""One replay buffer over three hosts, each a network namespace, and what can happen to them."""

from __future__ import annotations

import contextlib
import json
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

from tests import netns
from tests.netns import Host, HostJob, run_tasks, run_torchrun, wait_for, wait_until_all_are_up
from torchrl_dist import (
    DeadlineError,
    HostedReplayBuffer,
    PeerLostError,
    Session,
    replay_buffer,
    session,
)

pytestmark = [
    pytest.mark.timeout(150),
    pytest.mark.skipif(netns.missing() is not None, reason=f"no hosts here: {netns.missing()}"),
]
ROLES = {"learner": 1, "collector": -1}
ROWS = 40  # per host; ids of host k start at 1000 * k
SESSION_S = 20.0  # a host that is away for longer is lost, and what is sent again comes seldom
RESTART_S = 10.0
BUFFER_S = 1.0


@pytest.fixture
def network() -> Iterator[list[Host]]:
    with netns.hosts(3) as network:
        yield network
    assert netns.leftovers() == []


def write_rows(buffer: HostedReplayBuffer, host: int) -> None:
    buffer.extend(TensorDict({"id": torch.arange(ROWS) + 1000 * host}, [ROWS]))
    buffer.flush()


def over_all_hosts(job: Session) -> HostedReplayBuffer:
    return replay_buffer(
        job,
        capacity=64 * len(job.peers),
        batch_size=32,
        hosts=job.peers,
        prefetch=0,
        timeout_s=BUFFER_S,
    )


def sample_until(buffer: HostedReplayBuffer, hosts: set[int], timeout_s: float) -> list[str]:
    """Sample until batches come from exactly these hosts; the warnings on the way."""
    deadline = time.monotonic() + timeout_s
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        while True:
            with contextlib.suppress(DeadlineError):
                batches = [buffer.sample() for _ in range(4)]
                if {int(i) // 1000 for batch in batches for i in batch["id"]} == hosts:
                    len(buffer)  # a call tells what was noticed since the one before
                    return [str(warning.message) for warning in caught]
            assert time.monotonic() < deadline, f"no samples from {hosts} within {timeout_s} s"


def the_learner_samples(folder: str, events: list[str]) -> None:
    """What the learner sees at each of the things that happen to the last host, one after the
    other; it comes back after all but ``"killed"``."""
    wait_until_all_are_up(Path(folder))
    with session(ROLES, timeout_s=SESSION_S) as job:
        if not job.is_driver:
            job.serve()
            return
        buffer = over_all_hosts(job)
        alone = replay_buffer(
            job,
            "alone",
            capacity=64,
            batch_size=8,
            hosts=[job.peers[2]],
            prefetch=0,
            timeout_s=BUFFER_S,
        )
        for peer in job.peers:
            job.call(peer, write_rows, buffer, peer.global_rank)
        write_rows(alone, 0)
        assert len(buffer) == 3 * ROWS
        for event in events:
            sample_until(buffer, {0, 1, 2}, 30)
            sample_alone(alone, 30)
            Path(folder, f"ready to be {event}").touch()
            wait_for(Path(folder, event))

            start = time.monotonic()
            with pytest.raises((DeadlineError, PeerLostError), match="collector1"):
                alone.sample()
            assert time.monotonic() - start < 5 * BUFFER_S
            report = sample_until(buffer, {0, 1}, 20)
            # nobody asks the host that does not answer, so nobody waits for it any more
            start = time.monotonic()
            for _ in range(20):
                batch = buffer.sample()
                batch["td_error"] = torch.rand(32)
                buffer.update_tensordict_priority(batch)
            assert time.monotonic() - start < 10 * BUFFER_S
            assert len(buffer) == 2 * ROWS
            Path(folder, f"left out when {event}").write_text(json.dumps(report))
            if event != "killed":
                back = sample_until(buffer, {0, 1, 2}, 40)
                assert len(buffer) == 3 * ROWS
                assert any("replay shard 2 (collector1 on host2) answers again" in w for w in back)
        warnings.simplefilter("ignore")  # closing a client of the lost host is one more warning


def sample_alone(buffer: HostedReplayBuffer, timeout_s: float) -> None:
    """Until the buffer has no error to tell any more."""
    deadline = time.monotonic() + timeout_s
    for _ in range(2):
        while True:
            with contextlib.suppress(DeadlineError):
                assert len(buffer.sample()) == 8
                break
            assert time.monotonic() < deadline, "the only host does not come back"


def disturb(job: HostJob, folder: Path, event: str, by: Callable[[], None]) -> None:
    """Have it happen, and check that the learner reports it once and goes on."""
    wait_for(folder / f"ready to be {event}", job=job)
    by()
    (folder / event).touch()
    wait_for(folder / f"left out when {event}", job=job)
    report = json.loads((folder / f"left out when {event}").read_text())
    assert len(report) == 1, report
    assert "replay shard 2 (collector1 on host2) is left out, the other 2 go on" in report[0]


def test_the_others_go_on_without_a_host_that_is_cut_off_or_paused_until_it_is_back(
    network, tmp_path
):
    arguments = {"folder": str(tmp_path), "events": ["unplugged", "paused"]}
    job = run_tasks(network, the_learner_samples, arguments, tmp_path)
    disturb(job, tmp_path, "unplugged", network[2].unplug)
    network[2].plug_in()
    disturb(job, tmp_path, "paused", network[2].pause)
    network[2].resume()
    assert job.wait(60) == [0, 0, 0], job
    assert [list(host.shm.iterdir()) for host in network] == [[], [], []]


def test_the_others_go_on_after_a_host_was_killed(network, tmp_path):
    arguments = {"folder": str(tmp_path), "events": ["killed"]}
    job = run_tasks(network, the_learner_samples, arguments, tmp_path)
    disturb(job, tmp_path, "killed", network[2].kill)
    assert job.wait(60) == [0, 0, -9], job
    assert [list(host.shm.iterdir()) for host in network[:2]] == [[], []]


def the_job_is_restarted(folder: str) -> None:
    with session(ROLES, timeout_s=RESTART_S) as job:
        if not job.is_driver:
            job.serve()
            return
        buffer = over_all_hosts(job)
        if job.world.restart_count == 0:
            for peer in job.peers:
                job.call(peer, write_rows, buffer, peer.global_rank)
            Path(folder, "ready").touch()
            job.call(job.peers[1], time.sleep, 100, timeout_s=100)
        rows = [job.call(peer, stored_here, peer.host) for peer in job.peers]
        facts = [len(buffer), [peer.host for peer in job.peers], rows]
        Path(folder, "resumed").write_text(json.dumps(facts))


def stored_here(host: str) -> list[int]:
    from torchrl_dist.replay import owner

    (kept,) = owner._hosts.values()
    return sorted(kept.storage[:ROWS]["id"].tolist())


def test_after_a_host_died_torchrun_goes_on_with_all_rows_of_the_others(network, tmp_path):
    job = run_torchrun(
        network,
        the_job_is_restarted,
        {"folder": str(tmp_path)},
        tmp_path,
        nnodes="2:3",
        max_restarts=1,
        rdzv_conf="timeout=60,last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=3",
    )
    wait_for(tmp_path / "ready", job=job)
    network[1].crash()  # the last host gets its number then, and still finds its rows
    assert job.wait(90, [0, 2]) == [0, 0], job
    length, hosts, rows = json.loads((tmp_path / "resumed").read_text())
    assert length == 2 * ROWS and hosts == ["host0", "host2"]
    assert rows == [[1000 * k + i for i in range(ROWS)] for k in (0, 2)]
    assert [list(network[k].shm.iterdir()) for k in (0, 2)] == [[], []]
