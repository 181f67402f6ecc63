"""The session in the ranks of torchrun, and in processes that look like SLURM's."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tensordict import TensorDict

from tests import warm
from tests.runtime.helpers import Counter, listening_addresses
from tests.spawn import run_job, spawn, start_slurm_tasks, wait_until
from torchrl_dist.errors import ConfigurationError
from torchrl_dist.replay import SharedMemmapStorage
from torchrl_dist.runtime import session

ROLES = {"learner": 1, "collector": -1}


def the_driver_calls_and_the_others_serve_until_it_is_done() -> None:
    with session(ROLES, timeout_s=30) as me:
        assert me.world.launcher == "torchrun" and me.world.world_size == 3
        if me.role == "learner":
            counters = [me.remote(peer, Counter, 10) for peer in me.of_role("collector")]
            assert [counter.call("add", 1) for counter in counters] == [11, 11]
            assert counters[1].call("sleep", 0) == me.pid_of(counters[1].peer)
            # The store belongs to torchrun and listens everywhere; the session's own sockets do
            # not.
            assert listening_addresses([me.pid_of(peer) for peer in me.peers]) == {"0100007F"}
        else:
            me.serve()
            assert me.stop_requested


def ranks_with_code_of_their_own_meet_at_barriers_and_wait_for_the_slowest() -> None:
    with session(timeout_s=30) as me:
        counter = me.remote(me.me, Counter)
        start = time.monotonic()
        time.sleep(0.3 * me.me.index)
        me.barrier()
        assert time.monotonic() - start > 0.55
        # Rank 0 leaves first, and still answers the others.
        if me.me.index:
            time.sleep(0.5)
            assert me.call(me.peers[0], os.getpid) == me.pid_of(me.peers[0])
        assert counter.call("add", 1) == 1


def each_role_gets_a_process_group_of_its_own() -> None:
    with session({"learner": 2, "collector": 1}, timeout_s=30, process_group="gloo") as me:
        total = torch.ones(1)
        dist.all_reduce(total, group=me.process_group)
        assert total.item() == len(me.of_role(me.role))
        if me.is_driver:  # gloo as well
            assert listening_addresses([me.pid_of(peer) for peer in me.peers]) == {"0100007F"}
    assert not dist.is_initialized()


def ranks_that_disagree_about_roles_are_told() -> None:
    mine = {"a": 1, "b": 2} if os.environ["RANK"] == "0" else {"a": 3}
    with pytest.raises(ConfigurationError, match="entered the session with roles"):
        with session(mine, timeout_s=30):
            pass


@spawn(nproc=3, timeout_s=120)
def test_in_one_job_sessions_of_each_kind_follow_one_another():
    the_driver_calls_and_the_others_serve_until_it_is_done()
    ranks_with_code_of_their_own_meet_at_barriers_and_wait_for_the_slowest()
    each_role_gets_a_process_group_of_its_own()
    ranks_that_disagree_about_roles_are_told()
    the_driver_calls_and_the_others_serve_until_it_is_done()


def the_driver_fails(killed: bool) -> None:
    with session(ROLES, timeout_s=100) as me:
        if me.is_driver:
            if killed:
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("the driver's own mistake")
        me.serve()


@pytest.mark.parametrize("killed", [False, True])
def test_an_exception_in_the_driver_or_its_death_ends_the_others(killed: bool):
    job = run_job(the_driver_fails, {"killed": killed}, nproc=2)
    assert job.returncode != 0 and job.seconds < 60
    assert ("ValueError: the driver's own mistake" in job.log(0)) != killed


def a_peer_is_killed_once(folder: str) -> None:
    storage = SharedMemmapStorage(64, scratch_dir=folder)
    with session(ROLES, timeout_s=30) as me:
        if me.role != "learner":
            me.serve()
            return
        assert me.call(me.peers[1], os.getpid) == me.pid_of(me.peers[1])
        if me.world.restart_count == 0:
            storage.append(TensorDict({"number": torch.arange(8)}, [8]))
            os.kill(me.pid_of(me.peers[2]), signal.SIGKILL)
            assert me.wait_stop(20)  # torchrun's SIGTERM
            print("stopping", [peer.name for peer in me.lost()], flush=True)
        else:
            print("finished with", len(storage), "rows", flush=True)


def test_after_a_lost_rank_torchrun_restarts_all_and_they_meet_again(tmp_path):
    """All rows are kept, although the other ranks ended cleanly, because they were told to."""
    folder = tmp_path / "replay"
    arguments = {"folder": str(folder)}
    job = run_job(a_peer_is_killed_once, arguments, nproc=3, max_restarts=1)
    assert job.returncode == 0, str(job)
    assert "stopping ['collector1']" in job.log(0, restart=0), str(job)
    assert "finished with 8 rows" in job.log(0, restart=1), str(job)
    assert not folder.exists()  # the second job ended cleanly


def the_driver_waits_for_a_stop(folder: str) -> None:
    with session(ROLES, timeout_s=30) as me:
        if me.role == "learner":
            # it answers once its session is open, which also handles signals from then on
            me.call(me.peers[1], os.getpid)
            Path(folder, "ready").touch()
            assert me.wait_stop(40)
            answer = me.call(me.peers[1], os.getpid)
            Path(folder, "answer").write_text(str(answer == me.pid_of(me.peers[1])))


def test_a_signal_to_torchrun_lets_the_driver_finish_through_the_others(tmp_path):
    """Tests SIGTERM. tests/learn/test_failures.py tests SIGINT, with calls afterwards."""

    def interrupt(agent: warm.Running) -> None:
        wait_until((tmp_path / "ready").exists)
        agent.send_signal(signal.SIGTERM)

    job = run_job(the_driver_waits_for_a_stop, {"folder": str(tmp_path)}, nproc=2,
                  on_start=interrupt)  # fmt: skip
    assert (tmp_path / "answer").exists(), str(job)
    assert (tmp_path / "answer").read_text() == "True"


SLURM_TASK = """
import os, signal, sys
from torchrl_dist.runtime import session
with session({"learner": 1, "collector": -1}, timeout_s=200) as me:
    assert me.world.launcher == "slurm" and me.world.job_id == "77.0", me.world
    if me.role == "learner":
        print("called", me.call(me.peers[1], os.getpid) == me.pid_of(me.peers[1]), flush=True)
        if sys.argv[1] == "die":
            os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("end", ["live", "die"])
def test_slurm_tasks_meet_at_rank_0_and_end_with_it(tmp_path, end: str):
    tasks = start_slurm_tasks(SLURM_TASK, tmp_path, end)
    codes = [task.process.wait(60) for task in tasks]  # the session's deadline is later
    assert tasks[0].printed() == "called True\n", tasks
    if end == "live":
        assert codes == [0, 0] and [task.errors() for task in tasks] == ["", ""], tasks
    else:
        assert codes[0] == -signal.SIGKILL, tasks
