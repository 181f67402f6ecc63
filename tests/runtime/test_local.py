"""local_cluster: a session over processes of this machine, and the loss of such processes."""

from __future__ import annotations

import contextlib
import functools
import gc
import multiprocessing
import operator
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
import warnings
from concurrent.futures import Future

import numpy as np
import psutil
import pytest
import torch

from tests import warm
from tests.runtime.helpers import Counter, Meeting, listening_addresses
from tests.spawn import stop, wait_until
from torchrl_dist import RPCBatchedCollector, replay_buffer
from torchrl_dist.errors import ConfigurationError, DeadlineError, PeerLostError, RemoteError
from torchrl_dist.runtime import Peer, World, current_session, local_cluster, session

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
        wait_until(lambda: promises.call("count") == len(asked))  # noqa: B023
        assert not any(future.done() for future in asked)
        assert promises.call("keep") == len(asked)
        errors = [future.exception(10) for future in asked]  # calls come in any order
        kept = [f.result() for f, error in zip(asked, errors, strict=True) if error is None]
        assert sorted(kept) == list(range(0, len(asked), 2))
        broken = [error for error in errors if error is not None]
        assert len(broken) == len(asked) // 2
        assert all(isinstance(error, RemoteError) and "broken" in str(error) for error in broken)


def test_calls_that_wait_hold_up_no_others(cluster):
    meeting = cluster.remote(cluster.of_role("collector")[0], Meeting, 9)
    slow = [meeting.submit("meet") for _ in range(8)]
    wait_until(lambda: meeting.call("waiting") == 8)
    assert not any(future.done() for future in slow)
    meeting.call("meet")
    for future in slow:
        future.result(20)


def test_a_deadline_is_kept_and_names_whom_it_waited_for(cluster):
    meeting = cluster.remote(cluster.of_role("collector")[0], Meeting, 2)
    with pytest.raises(DeadlineError, match=r"collector0 .* meet within 0.3 s"):
        meeting.call("meet", timeout_s=0.3)
    meeting.call("meet")  # the first call still waited
    assert cluster.lost() == ()


def test_a_killed_peer_fails_its_calls_at_once_and_the_others_go_on(fork_server):
    deadline_s = 100.0
    start = time.monotonic()
    with local_cluster({"a": 1, "b": 3}, timeout_s=deadline_s, fork_server=fork_server) as me:
        dead, alive, leaver = me.of_role("b")
        meeting = me.remote(dead, Meeting, 2)
        pending = meeting.submit("meet")
        wait_until(lambda: meeting.call("waiting") == 1)
        grandchild = psutil.Process(me.call(dead, lambda: subprocess.Popen(["sleep", "200"]).pid))
        os.kill(me.pid_of(dead), signal.SIGKILL)
        with pytest.raises(PeerLostError, match=r"b0 .*killed by SIGKILL"):
            pending.result(deadline_s)
        assert me.lost() == (dead,) and "SIGKILL" in me.lost_reason(dead)
        with pytest.raises(PeerLostError):
            meeting.call("meet")
        assert me.call(alive, abs, -1) == 1
        # a separate message tells the survivors
        wait_until(lambda: me.call(alive, lambda: current_session().lost()) == (dead,))
        grandchild.wait(deadline_s)
        with pytest.raises(PeerLostError, match="exited with status 7"):
            me.call(leaver, os._exit, 7)
    assert time.monotonic() - start < deadline_s / 2


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
        stop(me.pid_of(counter.peer))
        with pytest.raises(DeadlineError):
            counter.call("add", 1, timeout_s=0.5)
        start = time.monotonic()
    assert time.monotonic() - start < 10


def _fail() -> None:
    raise LookupError("no such environment")


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _fail_later() -> None:
    def fail(*args, **kwargs):
        raise OSError("no network today")

    sys.modules["torchrl_dist.runtime.local"].joined = fail


@pytest.mark.parametrize(
    ("init", "timeout_s", "error", "told"),
    [
        (_fail, 20, RemoteError, r"(?s)collector.*no such environment.*in _fail"),
        (_die, 20, PeerLostError, "died at start-up: killed by SIGKILL"),
        (_fail_later, 20, RemoteError, "no network today"),
        (
            functools.partial(time.sleep, 30), 0.5, DeadlineError,
            r"collector0, collector1 did not start within 0\.5 s",
        ),
    ],
)  # fmt: skip
def test_a_child_that_does_not_start_raises_in_the_caller(
    fork_server, init, timeout_s, error, told
):
    with pytest.raises(error) as raised:
        with local_cluster(ROLES, init_fn=init, timeout_s=timeout_s, fork_server=fork_server):
            pass
    assert re.search(told, f"{raised.value}\n{getattr(raised.value, 'remote_traceback', '')}")


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


def draw() -> tuple[float, float, float]:
    return torch.rand(1).item(), np.random.random(), random.random()


def test_children_belong_to_the_callers_job_and_have_no_state_of_the_server(cluster):
    job_id = cluster.call(cluster.peers[1], lambda: World.from_env().job_id)
    assert job_id == cluster.world.job_id == World.from_env().job_id
    drawn = [cluster.call(peer, draw) for peer in cluster.peers]
    assert all(len(set(numbers)) == 3 for numbers in zip(*drawn, strict=True)), drawn
    # the server does not collect garbage while it imports
    assert all(cluster.call(peer, gc.isenabled) for peer in cluster.peers)


def test_everything_listens_on_loopback_only(fork_server):
    gc.collect()  # until then, stores of earlier tests in this process still listen
    with local_cluster(
        {"learner": 2, "collector": 1}, timeout_s=20, process_group="gloo", fork_server=fork_server
    ) as me:
        pids = [me.pid_of(peer) for peer in me.peers]
        addresses = listening_addresses(pids)
        # Each role has a gloo group; this process's group has both learners.
        assert torch.distributed.get_world_size() == 2
    assert addresses == {"0100007F"}  # 127.0.0.1, as the kernel prints it


def test_a_session_and_its_process_group_leave_no_thread_and_no_descriptor(fork_server):
    """Not even without garbage collection."""

    def use() -> tuple[int, int]:
        with local_cluster(
            {"learner": 2}, timeout_s=60, process_group="gloo", fork_server=fork_server
        ) as me:
            assert me.process_group is torch.distributed.group.WORLD
            assert me.remote(me.peers[1], Counter).call("add", 1) == 1
        assert me.process_group is None
        return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))

    gc.collect()
    gc.disable()
    try:
        first = use()
        # threads end when they notice
        wait_until(lambda: not any(map(operator.gt, use(), first)), first, timeout_s=30)
    finally:
        gc.enable()


def test_an_exception_in_the_caller_ends_the_children_at_once(fork_server):
    with pytest.raises(ZeroDivisionError):
        with local_cluster(ROLES, timeout_s=100, fork_server=fork_server) as me:
            pids = [me.pid_of(peer) for peer in me.peers[1:]]
            me.remote(me.peers[1], Counter).submit("sleep", 100)
            start = time.monotonic()
            raise ZeroDivisionError
    assert time.monotonic() - start < 50
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


STARTER = """
import contextlib, sys, time
from torchrl_dist.runtime import ForkServer, local_cluster

def wait_for_stop(seconds):
    time.sleep(seconds)

server = ForkServer(fork=True) if "fork" in sys.argv else contextlib.nullcontext()
with server as own, local_cluster(
    {"learner": 1, "collector": 2}, timeout_s=30, fork_server=own
) as me:
    print(*(me.pid_of(peer) for peer in me.peers[1:]), flush=True)
    me.submit(me.peers[1], wait_for_stop, 40)
    stopped = me.wait_stop(40)
    print("stopped", stopped, [peer.name for peer in me.lost()], flush=True)
"""


@pytest.mark.parametrize(
    ("number", "server", "status", "printed"),
    [(signal.SIGINT, "fork", 0, ["stopped True []"]), (signal.SIGKILL, "own", -9, [])],
)
def test_all_end_with_the_caller_which_an_interrupt_lets_finish(
    tmp_path, number, server, status, printed
):
    """In 15 s, although they have a call that takes 40 s."""
    out = tmp_path / "out"
    with out.open("w") as stdout:
        starter = warm.start([sys.executable, "-c", STARTER, server], stdout=stdout)
    children = wait_until(lambda: out.read_text().partition("\n")[1] and out.read_text()).split()
    others = [psutil.Process(int(pid)) for pid in children]
    others.append(others[0].parent())
    assert others[-1].ppid() == starter.pid
    starter.send_signal(number)
    assert starter.wait(20) == status
    _, alive = psutil.wait_procs(others, timeout=15)
    assert not alive and out.read_text().splitlines()[1:] == printed


_KEPT = []


def _make_semaphore() -> str:
    lock = multiprocessing.get_context("spawn").Lock()
    _KEPT.append(lock)
    return f"/dev/shm/sem.{lock._semlock.name[1:]}"


def test_semaphores_of_children_that_are_killed_are_unlinked():
    with contextlib.suppress(ZeroDivisionError), local_cluster({"a": 1, "b": 2}) as job:
        paths = [job.call(there, _make_semaphore) for there in job.of_role("b")]
        assert all(map(os.path.exists, paths))
        os.kill(job.pid_of(job.peers[1]), signal.SIGKILL)
        raise ZeroDivisionError  # ends the other one
    wait_until(lambda: not any(map(os.path.exists, paths)), paths)


def test_the_driver_may_not_serve():
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
    assert (
        worked == "worked"
        and "leave that session first. Two sessions need two processes" in refused
    )
    with session() as alone:  # the other one has ended
        assert alone.peers == (alone.me,)


def test_a_collector_or_buffer_without_a_cluster_gets_a_message_with_the_likely_line(fork_server):
    with local_cluster({"learner": 1, "actor": 1}, timeout_s=60, fork_server=fork_server) as me:
        collector = functools.partial(
            RPCBatchedCollector, "CartPole-v1", frames_per_batch=4, total_frames=4
        )
        for given, told in (
            ({}, r"no session= was given, .*: 'actor' \(1\). Pass session="),
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
        roles = r"the session's roles are 'learner' \(1\), 'actor' \(1\)"
        for hosts in (me.of_role("actors"), "actor", [], [Peer("actor", 7, 8, "elsewhere")]):
            with pytest.raises(ConfigurationError, match=roles):
                replay_buffer(me, capacity=8, batch_size=2, hosts=hosts)
            with pytest.raises(ConfigurationError, match=roles):
                collector(session=me, workers=hosts)


@pytest.mark.parametrize("size", [1, 2])
def test_a_launched_rank_of_several_starts_no_cluster(size: int, monkeypatch) -> None:
    rank = size - 1
    for name, value in {
        "RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size,
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1,
    }.items():  # fmt: skip
        monkeypatch.setenv(name, str(value))
    expected = contextlib.nullcontext()
    if size > 1:
        expected = pytest.raises(ConfigurationError, match=r"rank 1 of 2.*Write session\(roles\)")
    with expected, local_cluster({"learner": 1}) as me:
        assert me.world.launcher == "local"
