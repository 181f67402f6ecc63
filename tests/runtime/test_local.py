"""local_cluster: a session over processes of this machine, and the loss of such processes."""

from __future__ import annotations

import contextlib
import functools
import gc
import multiprocessing
import operator
import os
import random
import signal
import subprocess
import sys
import threading
import time
import warnings
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from tensordict import TensorDict

from tests.runtime.helpers import Counter, listening_addresses
from torchrl_dist import RPCBatchedCollector, replay_buffer
from torchrl_dist.errors import ConfigurationError, DeadlineError, PeerLostError, RemoteError
from torchrl_dist.runtime import ForkServer, Peer, World, current_session, local_cluster, session

ROLES = {"learner": 1, "collector": 2}


@pytest.fixture
def cluster(fork_server):
    with local_cluster(ROLES, timeout_s=20, fork_server=fork_server) as me:
        yield me


def test_objects_live_in_their_peer_and_closures_travel(cluster):
    first, second = cluster.of_role("collector")
    start = 40
    counter = cluster.remote(first, lambda: Counter(start))
    assert counter.call("add", 2) == 42
    assert counter.call("sleep", 0) == cluster.pid_of(first) != os.getpid()
    # A handle is an argument like any other, and works from every process.
    assert cluster.call(second, lambda handle: handle.call("add", 1), counter) == 43
    # The driver can be called too.
    mine = cluster.remote(cluster.me, Counter)
    assert cluster.call(second, lambda handle: handle.call("sleep", 0), mine) == os.getpid()


class Promises:
    """Keeps promises when told to."""

    def __init__(self) -> None:
        self.made: list[Future] = []

    def promise(self) -> Future:
        self.made.append(Future())
        return self.made[-1]

    def count(self) -> int:
        return len(self.made)

    def keep(self) -> int:
        for number, future in enumerate(self.made):
            if number % 2:
                future.set_exception(ValueError(f"broken {number}"))
            else:
                future.set_result(number)
        return len(self.made)


def test_a_method_that_returns_a_future_is_answered_when_that_is_done(cluster):
    for peer in (cluster.of_role("collector")[0], cluster.me):
        promises = cluster.remote(peer, Promises)
        # More calls than there are threads, which would be too few if they waited.
        asked = [promises.submit("promise") for _ in range(80 if peer != cluster.me else 2)]
        deadline = time.monotonic() + 10
        while promises.call("count") < len(asked):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert not any(future.done() for future in asked)
        assert promises.call("keep") == len(asked)
        errors = [future.exception(10) for future in asked]  # calls come in any order
        kept = [f.result() for f, error in zip(asked, errors, strict=True) if error is None]
        assert sorted(kept) == list(range(0, len(asked), 2))
        broken = [error for error in errors if error is not None]
        assert len(broken) == len(asked) // 2
        assert all(isinstance(error, RemoteError) and "broken" in str(error) for error in broken)


def test_tensordicts_cross_whole(cluster):
    peer = cluster.of_role("collector")[0]
    data = TensorDict(
        {"pixels": torch.randint(0, 255, (8, 4, 20, 20), dtype=torch.uint8), "x": torch.rand(8, 3)},
        [8],
    )
    for sent in (data, data[::2], data.consolidate()):
        back = cluster.call(peer, lambda td: td.apply(lambda x: x + 1), sent)
        assert (back == sent + 1).all() and back.batch_size == sent.batch_size


@pytest.mark.alone
def test_a_slow_call_does_not_hold_up_others(cluster):
    counter = cluster.remote(cluster.of_role("collector")[0], Counter)
    slow = [counter.submit("sleep", 1.0) for _ in range(8)]
    start = time.monotonic()
    assert counter.call("add", 1) == 1
    assert time.monotonic() - start < 0.8
    for future in slow:
        future.result(10)
    assert time.monotonic() - start < 4  # eight seconds of sleep, in parallel


def test_an_exception_arrives_with_role_host_traceback_and_cause(cluster):
    peer = cluster.of_role("collector")[1]
    with pytest.raises(RemoteError) as info:
        cluster.remote(peer, Counter).call("fail")
    error = info.value
    assert (error.peer, error.host) == ("collector1", peer.host)
    assert "ValueError: no such thing" in str(error) and "in fail" in error.remote_traceback
    assert isinstance(error.__cause__, ValueError)


@pytest.mark.alone
def test_a_deadline_is_kept_and_names_whom_it_waited_for(cluster):
    counter = cluster.remote(cluster.of_role("collector")[0], Counter)
    start = time.monotonic()
    with pytest.raises(DeadlineError, match=r"collector0 .* sleep within 0.3 s"):
        counter.call("sleep", 2.0, timeout_s=0.3)
    assert time.monotonic() - start < 1.5
    assert counter.call("add", 1) == 1 and cluster.lost() == ()


@pytest.mark.alone
def test_a_killed_peer_fails_its_calls_at_once_and_the_others_go_on(fork_server):
    with local_cluster(ROLES, timeout_s=20, fork_server=fork_server) as me:
        dead, alive = (me.remote(peer, Counter) for peer in me.of_role("collector"))
        pending = dead.submit("sleep", 15)
        time.sleep(0.2)
        start = time.monotonic()
        os.kill(me.pid_of(dead.peer), signal.SIGKILL)
        with pytest.raises(PeerLostError, match=r"collector0 .*killed by SIGKILL"):
            pending.result(5)
        assert time.monotonic() - start < 2
        assert me.lost() == (dead.peer,) and "SIGKILL" in me.lost_reason(dead.peer)
        start = time.monotonic()
        with pytest.raises(PeerLostError):
            dead.call("add", 1)
        assert time.monotonic() - start < 0.1
        assert alive.call("add", 1) == 1
        deadline = time.monotonic() + 5  # a separate message tells the survivors
        while me.call(alive.peer, lambda: current_session().lost()) != (dead.peer,):
            assert time.monotonic() < deadline
        start = time.monotonic()
    assert time.monotonic() - start < 3


def test_a_child_that_leaves_by_itself_is_lost_with_its_exit_status(fork_server):
    with local_cluster(ROLES, timeout_s=20, fork_server=fork_server) as me:
        peer = me.of_role("collector")[0]
        with pytest.raises(PeerLostError, match="exited with status 7"):
            me.call(peer, os._exit, 7)


def test_what_a_killed_child_started_ends_with_it(fork_server):
    with local_cluster(ROLES, timeout_s=20, fork_server=fork_server) as me:
        peer = me.of_role("collector")[0]
        pid = me.call(peer, lambda: subprocess.Popen(["sleep", "60"]).pid)
        grandchild = psutil.Process(pid)
        os.kill(me.pid_of(peer), signal.SIGKILL)
        psutil.wait_procs([grandchild], timeout=5)
        assert not grandchild.is_running() or grandchild.status() == psutil.STATUS_ZOMBIE


def test_the_last_call_of_a_child_reaches_another_that_left_earlier(fork_server, tmp_path):
    def say_later(listener) -> None:
        def say(clean: bool) -> None:
            time.sleep(0.5)  # the others have said goodbye by now
            (tmp_path / "answer").write_text(str(listener.call("add", 1)))

        current_session().on_leave(say)

    with local_cluster({"driver": 1, "worker": 3}, timeout_s=20, fork_server=fork_server) as me:
        first, _, last = me.of_role("worker")
        me.call(first, say_later, me.remote(last, Counter, 6))
    assert (tmp_path / "answer").read_text() == "7"


def test_a_stopped_child_is_a_deadline_and_does_not_hold_up_the_end(fork_server):
    with local_cluster(ROLES, timeout_s=20, fork_server=fork_server) as me:
        counter = me.remote(me.of_role("collector")[0], Counter)
        child = psutil.Process(me.pid_of(counter.peer))
        child.suspend()
        while child.status() != psutil.STATUS_STOPPED:  # one thread stops the others
            time.sleep(0.01)
        with pytest.raises(DeadlineError):
            counter.call("add", 1, timeout_s=0.5)
        start = time.monotonic()
    assert time.monotonic() - start < 5


def test_sigterm_to_a_child_lets_it_serve_for_a_while(cluster):
    counter = cluster.remote(cluster.of_role("collector")[0], Counter)
    os.kill(cluster.pid_of(counter.peer), signal.SIGTERM)
    time.sleep(0.3)
    assert counter.call("add", 1) == 1


def test_a_failing_init_fn_raises_in_the_caller(fork_server):
    def init() -> None:
        raise LookupError("no such environment")

    with pytest.raises(RemoteError, match=r"collector.*no such environment") as info:
        with local_cluster(ROLES, init_fn=init, timeout_s=20, fork_server=fork_server):
            pass
    assert "in init" in info.value.remote_traceback


def test_a_child_that_dies_in_init_fn_raises_in_the_caller(fork_server):
    with pytest.raises(PeerLostError, match="died at start-up: killed by SIGKILL"):
        with local_cluster(
            ROLES,
            init_fn=lambda: os.kill(os.getpid(), signal.SIGKILL),
            timeout_s=20,
            fork_server=fork_server,
        ):
            pass


def test_a_child_that_fails_between_init_fn_and_rpc_raises_in_the_caller(fork_server):
    def init() -> None:
        def fail(*args, **kwargs):
            raise OSError("no network today")

        sys.modules["torchrl_dist.runtime.local"].joined = fail

    with pytest.raises(RemoteError, match="no network today"):
        with local_cluster(ROLES, init_fn=init, timeout_s=2, fork_server=fork_server):
            pass


def test_an_init_fn_that_takes_too_long_is_a_deadline(fork_server):
    with pytest.raises(DeadlineError, match=r"collector0, collector1 did not start within 0\.5 s"):
        with local_cluster(
            ROLES, init_fn=lambda: time.sleep(30), timeout_s=0.5, fork_server=fork_server
        ):
            pass


def test_children_get_environment_directory_arguments_path_init_and_threads(
    fork_server, tmp_path, monkeypatch
):
    monkeypatch.setenv("TORCHRL_DIST_A", "from the caller")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["train.py", "--env", "mine"])

    def init() -> None:
        os.environ["TORCHRL_DIST_C"] = "by init_fn"

    def look() -> tuple:
        names = ("TORCHRL_DIST_A", "TORCHRL_DIST_B", "TORCHRL_DIST_C")
        values = [os.environ[name] for name in names]
        return (*values, os.getcwd(), sys.path[0], torch.get_num_threads(), *sys.argv)

    with local_cluster(
        ROLES,
        init_fn=init,
        env={"TORCHRL_DIST_B": "by env"},
        timeout_s=20,
        threads_per_process=2,
        fork_server=fork_server,
    ) as me:
        seen = me.call(me.of_role("collector")[1], look)
    assert seen[:3] == ("from the caller", "by env", "by init_fn")
    assert seen[3:] == (str(tmp_path), str(tmp_path), 2, "train.py", "--env", "mine")


def test_children_belong_to_the_job_of_the_caller(cluster):
    job_id = cluster.call(cluster.peers[1], lambda: World.from_env().job_id)
    assert job_id == cluster.world.job_id == World.from_env().job_id


def test_children_collect_garbage(cluster):
    """Their server does not collect garbage while it imports."""
    assert all(cluster.call(peer, gc.isenabled) for peer in cluster.peers)


def draw() -> tuple[float, float, float]:
    return torch.rand(1).item(), np.random.random(), random.random()


def test_children_draw_different_random_numbers(cluster):
    """None of the three generators has the server's state."""
    drawn = [cluster.call(peer, draw) for peer in cluster.peers]
    assert all(len(set(numbers)) == 3 for numbers in zip(*drawn, strict=True)), drawn


def test_everything_listens_on_loopback_only(fork_server):
    gc.collect()  # until then, stores of earlier tests in this process still listen
    with local_cluster(
        {"learner": 2, "collector": 1},
        timeout_s=20,
        process_group="gloo",
        fork_server=fork_server,
    ) as me:
        pids = [me.pid_of(peer) for peer in me.peers]
        addresses = listening_addresses(pids)
        # Each role has a gloo group; this process's group has both learners.
        assert torch.distributed.get_world_size() == 2
    assert addresses == {"0100007F"}  # 127.0.0.1, as the kernel prints it


def test_no_file_descriptor_is_left(fork_server):
    def count() -> int:
        return len(os.listdir("/proc/self/fd"))

    with local_cluster(ROLES, timeout_s=20, fork_server=fork_server):
        pass  # the first one opens descriptors that stay open
    before = count()
    for _ in range(2):
        with local_cluster(ROLES, timeout_s=20, fork_server=fork_server) as me:
            me.remote(me.peers[1], Counter).call("add", 1)
    deadline = time.monotonic() + 5  # the store's thread closes its sockets when it notices
    while count() > before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert count() <= before


def test_a_process_group_ends_with_its_session(fork_server):
    """Its threads and sockets end even without garbage collection."""

    def use() -> tuple[int, int]:
        with local_cluster(
            {"learner": 2}, timeout_s=60, process_group="gloo", fork_server=fork_server
        ) as me:
            assert me.process_group is torch.distributed.group.WORLD
        assert me.process_group is None
        return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))

    gc.collect()
    gc.disable()
    try:
        first = use()
        deadline = time.monotonic() + 20  # threads end when they notice
        while any(map(operator.gt, now := use(), first)) and time.monotonic() < deadline:
            pass
        assert not any(map(operator.gt, now, first)), (first, now)
    finally:
        gc.enable()


def test_an_exception_in_the_caller_ends_the_children_quickly(fork_server):
    with pytest.raises(ZeroDivisionError):
        with local_cluster(ROLES, timeout_s=20, fork_server=fork_server) as me:
            pids = [me.pid_of(peer) for peer in me.peers[1:]]
            me.remote(me.peers[1], Counter).submit("sleep", 30)
            start = time.monotonic()
            raise ZeroDivisionError
    assert time.monotonic() - start < 8
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_invalid_roles_are_refused():
    for roles in ({"learner": 1, "collector": -1}, {}, {"learner": 0}):
        with pytest.raises(ConfigurationError), local_cluster(roles):
            pass


def test_a_cluster_of_one_starts_nothing():
    before = psutil.Process().children()
    with local_cluster({"learner": 1}) as me:
        assert me.peers == (me.me,) and me.call(me.me, os.getpid) == os.getpid()
        assert psutil.Process().children() == before


def test_a_killed_fork_server_takes_its_children_and_the_caller_is_told():
    with ForkServer() as server, local_cluster(ROLES, timeout_s=20, fork_server=server) as me:
        children = [psutil.Process(me.pid_of(peer)) for peer in me.peers[1:]]
        counter = me.remote(me.peers[1], Counter)
        pending = counter.submit("sleep", 15)
        os.kill(server.pid, signal.SIGKILL)
        with pytest.raises(PeerLostError):
            pending.result(5)
        deadline = time.monotonic() + 5
        while len(me.lost()) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        _, alive = psutil.wait_procs(children, timeout=5)
        assert all(process.status() == psutil.STATUS_ZOMBIE for process in alive)


STARTER = """
import os, signal, sys, time
from torchrl_dist.runtime import local_cluster

def wait_for_stop(seconds):
    time.sleep(seconds)

with local_cluster({"learner": 1, "collector": 2}, timeout_s=30) as me:
    print(os.getpid(), *(me.pid_of(peer) for peer in me.peers[1:]), flush=True)
    me.submit(me.peers[1], wait_for_stop, 25)
    stopped = me.wait_stop(25)
    print("stopped", stopped, [peer.name for peer in me.lost()], flush=True)
"""


def start_script(tmp_path: Path) -> tuple[subprocess.Popen, list[psutil.Process]]:
    script = tmp_path / "starter.py"
    script.write_text(STARTER)
    starter = subprocess.Popen(
        [sys.executable, str(script)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        text=True,
    )
    starter_pid, *children = map(int, starter.stdout.readline().split())
    server = psutil.Process(children[0]).parent()
    assert server.ppid() == starter_pid
    return starter, [psutil.Process(pid) for pid in children] + [server]


def test_kill_9_of_the_caller_ends_everything_within_seconds(tmp_path):
    starter, others = start_script(tmp_path)
    starter.kill()
    starter.wait(5)
    _, alive = psutil.wait_procs(others, timeout=5)
    starter.stdout.close()
    assert not alive


def test_an_interrupt_of_the_caller_is_a_request_and_the_children_stay_until_the_end(tmp_path):
    starter, others = start_script(tmp_path)
    starter.send_signal(signal.SIGINT)
    output, _ = starter.communicate(timeout=15)
    assert output.strip() == "stopped True []" and starter.returncode == 0
    _, alive = psutil.wait_procs(others, timeout=1)
    assert not alive


_KEPT = []


def _make_semaphore() -> str:
    lock = multiprocessing.get_context("spawn").Lock()
    _KEPT.append(lock)
    return f"/dev/shm/sem.{lock._semlock.name[1:]}"


@pytest.mark.parametrize("killed", [False, True])
def test_semaphores_of_children_that_are_killed_are_unlinked(killed):
    with contextlib.suppress(ZeroDivisionError), local_cluster({"a": 1, "b": 1}) as job:
        there = job.of_role("b")[0]
        path = job.call(there, _make_semaphore)
        assert os.path.exists(path)
        if killed:
            os.kill(job.pid_of(there), signal.SIGKILL)
        raise ZeroDivisionError
    deadline = time.monotonic() + 20
    while os.path.exists(path):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_the_driver_is_told_that_it_does_not_serve():
    with session() as alone, pytest.raises(ConfigurationError, match="driver"):
        alone.serve()


def test_one_of_two_clusters_in_two_threads_is_refused_and_the_other_works(fork_server):
    both = threading.Barrier(2)
    outcomes: list[str] = []

    def run() -> None:
        both.wait()
        try:
            with local_cluster({"a": 1, "b": 1}, timeout_s=60, fork_server=fork_server) as me:
                assert me.call(me.peers[1], os.getpid) == me.pid_of(me.peers[1])
                while len(outcomes) < 1:
                    time.sleep(0.01)
                assert me.call(me.peers[1], os.getpid) == me.pid_of(me.peers[1])
                outcomes.append("worked")
        except ConfigurationError as error:
            outcomes.append(str(error))

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(90)
    refused, worked = outcomes
    assert worked == "worked" and "leave that one first. Two sessions at a time" in refused
    with session() as alone:  # the other one has ended
        assert alone.peers == (alone.me,)


def test_a_collector_or_buffer_without_a_cluster_is_told_the_likely_line(fork_server):
    with local_cluster({"learner": 1, "actor": 1}, timeout_s=60, fork_server=fork_server) as me:
        collector = functools.partial(
            RPCBatchedCollector, "CartPole-v1", frames_per_batch=4, total_frames=4
        )
        for given, told in (
            ({}, r"no session= was given, but the session has 'actor' \(1\). Pass session="),
            (
                {"session": me},
                r"no process has the role 'collector', .* Pass workers=session.of_role",
            ),
        ):
            with pytest.warns(UserWarning, match=told):
                collector(**given).shutdown()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            collector(session=me, workers=[me.me]).shutdown()
            collector(session=me, workers=me.of_role("actor")).shutdown()
        roles = r"its roles are 'learner' \(1\), 'actor' \(1\)"
        for hosts in (me.of_role("actors"), "actor", [], [Peer("actor", 7, 8, "elsewhere")]):
            with pytest.raises(ConfigurationError, match=roles):
                replay_buffer(me, capacity=8, batch_size=2, hosts=hosts)
            with pytest.raises(ConfigurationError, match=roles):
                collector(session=me, workers=hosts)
