"""One replay buffer over three hosts, each in a network namespace, and their failures."""

from __future__ import annotations

import contextlib
import json
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
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
LOST_S, RESTARTED_S = 20.0, 40.0  # of the session before the loss, and of ranks that start anew
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
    """Sample until batches come from exactly these hosts. Return the warnings until then."""
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
    """Sample while failures happen to the last host, one after the other. It comes back after each
    of them except ``"killed"``."""
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
            # the host that does not answer is not asked, so no call waits for it
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
    """Sample until two samples have succeeded."""
    deadline = time.monotonic() + timeout_s
    for _ in range(2):
        while True:
            with contextlib.suppress(DeadlineError):
                assert len(buffer.sample()) == 8
                break
            assert time.monotonic() < deadline, "the only host does not come back"


def disturb(job: HostJob, folder: Path, event: str, by: Callable[[], None]) -> None:
    """Cause a failure, and check that the learner reports it once and continues."""
    wait_for(folder / f"ready to be {event}", job=job)
    by()
    (folder / event).touch()
    wait_for(folder / f"left out when {event}", job=job)
    report = json.loads((folder / f"left out when {event}").read_text())
    assert len(report) == 1, report
    assert "replay shard 2 (collector1 on host2) is left out; the buffer continues" in report[0]


def test_the_others_go_on_without_a_host_that_is_cut_off_or_paused_until_it_is_back_or_killed(
    network, tmp_path
):
    arguments = {"folder": str(tmp_path), "events": ["unplugged", "paused", "killed"]}
    job = run_tasks(network, the_learner_samples, arguments, tmp_path)
    disturb(job, tmp_path, "unplugged", network[2].unplug)
    network[2].plug_in()
    disturb(job, tmp_path, "paused", network[2].pause)
    network[2].resume()
    disturb(job, tmp_path, "killed", network[2].kill)
    assert job.wait(60) == [0, 0, -9], str(job)
    assert [list(host.shm.iterdir()) for host in network[:2]] == [[], []]


def the_job_is_restarted(folder: str) -> None:
    anew = Path(folder, "ready").exists()
    wait_until_all_are_up(Path(folder), 2 if anew else 3)
    with session(ROLES, timeout_s=RESTARTED_S if anew else LOST_S) as job:
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
    from torchrl_dist.replay.hosts import keeper

    (kept,) = keeper._hosts.values()
    return sorted(kept.storage[:ROWS]["id"].tolist())


def test_after_a_host_died_torchrun_goes_on_with_all_rows_of_the_others(network, tmp_path):
    job = run_torchrun(
        network,
        the_job_is_restarted,
        {"folder": str(tmp_path)},
        tmp_path,
        nnodes="2:3",
        max_restarts=1,
        rdzv_id=None,  # each machine knows the job by its own agent
        rdzv_conf="timeout=60,last_call_timeout=25,keep_alive_interval=1,keep_alive_max_attempt=3",
    )
    wait_for(tmp_path / "ready", job=job)
    network[1].crash()  # the last host gets its number then, and still finds its rows
    assert job.wait(150, [0, 2]) == [0, 0], str(job)
    length, hosts, rows = json.loads((tmp_path / "resumed").read_text())
    assert length == 2 * ROWS and hosts == ["host0", "host2"]
    assert rows == [[1000 * k + i for i in range(ROWS)] for k in (0, 2)]
    assert [list(network[k].shm.iterdir()) for k in (0, 2)] == [[], []]


VANISH_S = 6.0  # of the session: a host that gives no sign of life for so long is lost


def write_until_lost(buffer: HostedReplayBuffer, first: int) -> tuple[int, int, str]:
    """Write one row after the other, with ids from ``first`` on. Return how many were accepted, how
    often the host was late, and the error that reported its loss."""
    taken = late = 0
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline:
        try:
            buffer.extend(TensorDict({"id": torch.tensor([first + taken])}, [1]))
            taken += 1
            if taken % 10 == 0:
                buffer.flush()
        except PeerLostError as error:
            return taken, late, str(error)
        except DeadlineError:
            late += 1
        time.sleep(0.005)
    return taken, late, "it was not lost"


def ids_here() -> list[int]:
    from torchrl_dist.replay.hosts import keeper

    (kept,) = keeper._hosts.values()
    return kept.storage[:]["id"].tolist() if len(kept.storage) else []


def two_write_to_the_last_host(folder: str) -> None:
    wait_until_all_are_up(Path(folder))
    with session(ROLES, timeout_s=VANISH_S) as job:
        if not job.is_driver:
            with contextlib.suppress(PeerLostError):  # the last host cannot reach the driver
                job.serve()
            return
        far = job.peers[2]
        buffer = replay_buffer(job, capacity=2**16, batch_size=8, hosts=[far], timeout_s=0.5)
        with ThreadPoolExecutor(1) as pool:
            writers = [
                job.submit(job.peers[1], write_until_lost, buffer, 10**6, timeout_s=120),
                pool.submit(write_until_lost, buffer, 0),
            ]
            for event in ("unplugged", "cut off from host1"):
                before = len(job.call(far, ids_here))
                Path(folder, f"ready to be {event}").touch()
                wait_for(Path(folder, event))
                deadline = time.monotonic() + 30
                while True:  # what was under way and queued is there, once and in order
                    ids = job.call(far, ids_here)
                    for first in (0, 10**6):
                        own = [i for i in ids if i // 10**6 == first // 10**6]
                        assert own == list(range(first, first + len(own))), own
                    if len(ids) > before + 200:
                        break
                    assert time.monotonic() < deadline, "the writers do not go on"
                    time.sleep(0.2)
            Path(folder, "ready to be gone").touch()
            wait_for(Path(folder, "gone"))
            begin = time.monotonic()
            for writer in writers:
                taken, late, message = writer.result(60)
                assert "collector1 on host2" in message and "sign of life" in message, message
                assert late > 0 and taken > 100
            assert time.monotonic() - begin < 2 * VANISH_S
        warnings.simplefilter("ignore")  # closing a client of the lost host is one more warning


def test_calls_outlive_a_cut_and_end_with_a_host_that_vanishes(network, tmp_path):
    job = run_tasks(network, two_write_to_the_last_host, {"folder": str(tmp_path)}, tmp_path)
    for event, begin, end in (
        ("unplugged", network[2].unplug, network[2].plug_in),
        (
            "cut off from host1",
            lambda: network[1].cut_off_from(network[2]),
            lambda: network[1].reach_again(network[2]),
        ),
    ):
        wait_for(tmp_path / f"ready to be {event}", job=job)
        begin()
        time.sleep(1.2)  # more than two deadlines of the buffer, less than the session's
        end()
        (tmp_path / event).touch()
    wait_for(tmp_path / "ready to be gone", job=job)
    network[2].unplug()
    (tmp_path / "gone").touch()
    assert job.wait(60)[:2] == [0, 0], str(job)
