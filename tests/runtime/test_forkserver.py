"""A fork server with several clients."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import pickle
import re
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests import warm
from tests.spawn import stop_self, wait_until
from torchrl_dist.errors import ConfigurationError, PeerLostError, RemoteError
from torchrl_dist.runtime import ForkServer, Session, local_cluster
from torchrl_dist.runtime import forkserver as module

pytestmark = pytest.mark.timeout(90)
_own: list[ForkServer] = []


@dataclass(frozen=True)
class Task:
    """A child's job: it stays, or raises."""

    fails: bool = False

    def run(self, rank: int, ready: Callable[[], None]) -> None:
        if self.fails:
            raise ValueError("no task")
        ready()
        time.sleep(60)


@dataclass(frozen=True)
class Speaker:
    """The job of a child with a socket: it sends its rank and the ends that it has."""

    def run(self, rank: int, ready: Callable[[], None], end: int) -> None:
        with socket.socket(fileno=end) as link:
            own = []
            for name in os.listdir("/proc/self/fd"):
                with contextlib.suppress(FileNotFoundError):  # the listing's own descriptor
                    own.append(os.readlink(f"/proc/self/fd/{name}"))
            link.send(f"{rank} {os.get_inheritable(end)} {own}".encode())
            link.recv(1)


@pytest.fixture
def cluster(fork_server: ForkServer) -> Iterator[Session]:
    with local_cluster({"a": 1, "b": 2}, timeout_s=30, fork_server=fork_server) as job:
        yield job


def start_in_child(fails: bool = False) -> tuple[int, list[int]]:
    """Return the pids of the server and of two children."""
    _own.append(ForkServer())
    children = _own[-1].start(Task(fails), range(2))
    children.wait_ready(30, describe)
    return _own[-1].pid, [state.pid for state in children.states.values()]


def close_in_child() -> None:
    _own.pop().close()


def wait_gone(pids: list[int]) -> None:
    wait_until(lambda: not any(map(psutil.pid_exists, pids)), f"{pids} end")


def descriptors(server: int) -> set[int]:
    return {int(name) for name in os.listdir(f"/proc/{server}/fd")}


@contextlib.contextmanager
def room_for(more: int, server: int) -> Iterator[None]:
    """Limit the server to this many additional descriptors."""
    before = resource.prlimit(server, resource.RLIMIT_NOFILE)
    taken = set[int]()
    while taken != (taken := descriptors(server)):
        time.sleep(0.3)  # it may still be closing those of earlier clients
    free = (number for number in itertools.count() if number not in taken)
    soft = next(itertools.islice(free, more, None))
    resource.prlimit(server, resource.RLIMIT_NOFILE, (soft, before[1]))
    try:
        yield
    finally:
        if psutil.pid_exists(server):
            resource.prlimit(server, resource.RLIMIT_NOFILE, before)


def describe(rank: int) -> tuple[str, str]:
    return f"child {rank}", "here"


@pytest.fixture
def client(fork_server: ForkServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[ForkServer]:
    """Make a client with a child, of a server with other clients."""
    monkeypatch.setattr(module, "_address", fork_server.address)
    with ForkServer() as client:
        client.start(Task(), range(1)).wait_ready(30, describe)
        yield client


def test_only_the_child_itself_has_its_end(fork_server: ForkServer) -> None:
    pairs = [socket.socketpair() for _ in range(3)]
    names = [os.readlink(f"/proc/self/fd/{theirs.fileno()}") for _, theirs in pairs]
    children = fork_server.start(Speaker(), range(3), [theirs.fileno() for _, theirs in pairs])
    try:
        for rank, (ours, theirs) in enumerate(pairs):
            theirs.close()
            ours.settimeout(20)
            number, inheritable, others = ours.recv(4096).decode().split(" ", 2)
            assert (int(number), inheritable) == (rank, "False")
            assert [name in others for name in names] == [rank == other for other in range(3)]
        for rank in (1, 0, 2):  # its end is the only one, so the connection closes with it
            os.kill(children.states[rank].pid, signal.SIGKILL)
            assert pairs[rank][0].recv(1) == b""
        assert children.wait_gone(10)
        again, theirs = socket.socketpair()
        with again, theirs:
            fork_server.restart(Speaker(), 1, theirs.fileno())
            theirs.close()
            again.settimeout(20)
            assert again.recv(4096).startswith(b"1 ")
    finally:
        fork_server.kill_children()
        for ours, _ in pairs:
            ours.close()


def test_a_descriptor_that_cannot_be_passed_ends_the_client_instead_of_the_wait(
    fork_server: ForkServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server waits for the rest of an incomplete command."""

    def out_of_descriptors(*_: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(module, "_address", fork_server.address)
    with ForkServer() as client:
        ours, theirs = socket.socketpair()
        with ours, theirs, monkeypatch.context() as broken:
            broken.setattr(module.socket, "send_fds", out_of_descriptors)
            with pytest.raises(OSError, match="Too many open files"):
                client.start(Speaker(), range(1), [theirs.fileno()])
        began = time.monotonic()
        with pytest.raises(PeerLostError, match="no more processes: closed"):
            while time.monotonic() - began < 10:
                with contextlib.suppress(ConfigurationError):  # refused until the server reports it
                    client.start(Speaker(), range(1))
    assert psutil.pid_exists(fork_server.pid)


def test_default_timeouts_of_sockets_change_nothing(fork_server, monkeypatch) -> None:
    monkeypatch.setattr(module, "_address", fork_server.address)
    socket.setdefaulttimeout(0.01)
    try:
        with ForkServer() as client:
            ours, theirs = socket.socketpair()
            with ours, theirs:
                client.start(Speaker(), range(1), [theirs.fileno()])
                for end in ours, theirs:
                    end.settimeout(20)
                assert ours.recv(4096).startswith(b"0 ")
                assert os.get_blocking(client._link.fileno())
    finally:
        socket.setdefaulttimeout(None)


def stop_in_a_command() -> None:
    """Run in a client, which is stopped after it announced a descriptor."""
    server = ForkServer()
    server.wait_up()
    server._commands.send((1, [0], pickle.dumps(Speaker()), True))
    stop_self()


def test_a_client_stopped_between_a_command_and_its_ends_holds_up_no_other(cluster) -> None:
    first, second = cluster.of_role("b")
    answer = cluster.submit(first, stop_in_a_command)
    stopped = psutil.Process(cluster.pid_of(first))
    wait_until(lambda: stopped.status() == psutil.STATUS_STOPPED)
    cluster.call(second, start_in_child)
    os.kill(stopped.pid, signal.SIGKILL)
    with contextlib.suppress(PeerLostError):  # unless another thread answered before it stopped
        answer.result(20)


def test_children_have_children_of_the_same_server_which_end_with_their_client(
    cluster: Session, fork_server: ForkServer
) -> None:
    first, second = cluster.of_role("b")
    with pytest.raises(RemoteError, match="no task"):
        cluster.call(first, start_in_child, True)
    cluster.call(first, close_in_child)
    server, pids = cluster.call(first, start_in_child)  # continues as a later client
    _, others = cluster.call(second, start_in_child)
    assert server == fork_server.pid
    assert {psutil.Process(pid).ppid() for pid in pids + others} == {server}
    assert len({os.getpgid(pid) for pid in pids + others}) == 4
    cluster.call(first, close_in_child)
    wait_gone(pids)
    _, pids = cluster.call(first, start_in_child)
    os.kill(cluster.pid_of(first), signal.SIGSTOP)
    cluster.call(second, start_in_child)  # no process waits for a stopped one
    assert all(map(psutil.pid_exists, pids))
    os.kill(cluster.pid_of(first), signal.SIGKILL)
    wait_gone(pids)
    assert all(map(psutil.pid_exists, others))
    assert cluster.call(second, os.getpid) == cluster.pid_of(second)


def test_a_process_whose_server_has_ended_starts_its_own_with_which_all_children_end(monkeypatch):
    monkeypatch.setattr(module, "_address", "\0torchrl_dist-absent")
    with ForkServer() as server:
        with local_cluster({"a": 1, "b": 2}, timeout_s=30, fork_server=server) as job:
            assert psutil.Process(server.pid).ppid() == os.getpid()
            child = job.of_role("b")[0]
            pids = [*map(job.pid_of, job.of_role("b")), *job.call(child, start_in_child)[1]]
            os.kill(server.pid, signal.SIGKILL)
            with pytest.raises(PeerLostError):
                job.call(child, time.sleep, 20)
            wait_until(lambda: len(job.lost()) == 2)
            wait_gone(pids)


def test_connections_of_strangers_are_refused(fork_server: ForkServer) -> None:
    def knock(*, says: bytes | None, fds: list[int] = []) -> None:  # noqa: B006
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as link:
            link.connect(fork_server.address)
            if says is not None:
                socket.send_fds(link, [says], fds)

    with local_cluster({"a": 1, "b": 1}, timeout_s=30, fork_server=fork_server):
        pass
    before = len(descriptors(fork_server.pid))
    read, write = os.pipe()
    for _ in range(5):
        knock(says=None)
        knock(says=b"")
        knock(says=b"client")
        knock(says=b"client", fds=[read])
        knock(says=b"client", fds=[read, read, write])
        knock(says=b"client", fds=[read, write])  # not sockets
    os.close(read)
    os.close(write)
    with local_cluster({"a": 1, "b": 1}, timeout_s=30, fork_server=fork_server) as job:
        assert job.call(job.of_role("b")[0], os.getpid)
    wait_until(lambda: len(descriptors(fork_server.pid)) <= before)


COUNTS = """
import importlib, os, torch
from torchrl_dist.forks import imports_to_be_forked
from torchrl_dist.runtime.forkserver import _PRELOAD
seen = []
torch.cuda.device_count = lambda: seen.append(os.environ["CUDA_VISIBLE_DEVICES"]) or 0
with imports_to_be_forked():
    for name in _PRELOAD:
        importlib.import_module(name)
assert seen, "nothing counts the GPUs any more, so they need not be hidden"
assert set(seen) == {""}, seen
assert os.environ["CUDA_VISIBLE_DEVICES"] == "0"
"""


def test_imports_do_not_count_the_gpus_because_that_starts_a_thread() -> None:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "0"}
    subprocess.run([sys.executable, "-c", COUNTS], env=environment, check=True, timeout=120)


FORKS = """
import os, sys, threading, time
from torchrl_dist.forks import TO_BE_FORKED, imports_to_be_forked
with imports_to_be_forked():
    from torchrl_dist.runtime import ForkServer, local_cluster
import psutil
if "thread" in sys.argv:
    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
secret = open(sys.argv[1])  # not for the server
os.environ["MINE"] = "here"
before = {name: os.environ.get(name) for name in TO_BE_FORKED}
with ForkServer(fork=True) as server:
    assert before == {name: os.environ.get(name) for name in TO_BE_FORKED}
    process = psutil.Process(server.pid)
    is_fork = process.cmdline() == psutil.Process().cmdline()
    assert process.ppid() == os.getpid()
    for number in range(3):
        with local_cluster({"a": 1, "b": 2}, timeout_s=30, fork_server=server) as job:
            assert os.getsid(server.pid) == server.pid
            there = job.of_role("b")[0]
            assert job.call(there, os.getenv, "MINE") == "here"
            assert job.call(there, os.getenv, "OMP_NUM_THREADS") == "1"
            assert psutil.Process(job.pid_of(there)).ppid() == server.pid
            files = [file.path for pid in (server.pid, job.pid_of(there))
                     for file in psutil.Process(pid).open_files()]
            assert sys.argv[1] not in files, files
            print("fork" if is_fork else "fresh", server.pid, job.pid_of(there), flush=True)
            if "wait" in sys.argv:
                time.sleep(60)
            if number == 2:
                os.kill(server.pid, 9)
                try:
                    job.call(there, time.sleep, 20)
                except Exception as error:
                    print(type(error).__name__)
print("ended", process.is_running())
"""


def run_forks(start: Callable, folder: Path, how: str = "") -> warm.Running:
    (folder / "forks.py").write_text(FORKS)
    (folder / "secret").write_text("x")
    command = [sys.executable, str(folder / "forks.py"), str(folder / "secret"), how]
    with open(folder / "out", "w") as out:
        return start(command, stdout=out)


@pytest.mark.parametrize(
    ("start", "how", "kind"),
    [(subprocess.Popen, "", "fork"), (warm.start, "thread", "fresh")],
    ids=["fork", "fresh"],
)
def test_a_fork_of_this_process_serves_if_it_has_no_threads(tmp_path, start, how, kind) -> None:
    run_forks(start, tmp_path, how).wait(80)
    printed = (tmp_path / "out").read_text()
    kinds = re.sub(r"[\d ]+\n", "\n", printed).splitlines()
    assert kinds == [kind, kind, kind, "PeerLostError", "ended False"], printed


def test_a_forked_server_ends_with_the_process_it_comes_from(tmp_path: Path) -> None:
    job = run_forks(warm.start, tmp_path, "wait")
    pids = wait_until((tmp_path / "out").read_text).split()[1:]
    job.kill()
    job.wait(30)
    wait_gone([int(pid) for pid in pids])


def test_a_client_gets_an_error_if_nothing_can_be_forked_and_the_others_go_on(cluster, fork_server):
    children = psutil.Process(fork_server.pid).children
    before = children()
    first, second = cluster.of_role("b")
    with room_for(5, fork_server.pid):  # four for the client and one for a child
        with pytest.raises(RemoteError, match="unable to fork: Too many open files"):
            cluster.call(first, start_in_child)
    wait_until(lambda: set(children()) <= set(before))
    assert cluster.lost() == ()
    for peer in first, second:
        assert len(cluster.call(peer, start_in_child)[1]) == 2


def test_the_parent_gets_the_error_too_before_the_server_ends() -> None:
    with ForkServer() as server:
        server.wait_up()
        with room_for(1, server.pid):
            children = server.start(Task(), range(2))
            assert children.wait_gone(20)
        with pytest.raises(PeerLostError, match="unable to fork: Too many open files"):
            children.wait_ready(0, describe)


def test_a_client_that_cannot_be_accepted_does_not_disturb_the_server(
    cluster: Session, fork_server: ForkServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_address", fork_server.address)
    first, second = cluster.of_role("b")
    process = psutil.Process(fork_server.pid)
    with room_for(0, fork_server.pid):
        with ForkServer():
            began = sum(process.cpu_times()[:2])
            time.sleep(1)
            assert sum(process.cpu_times()[:2]) - began < 0.5
            os.kill(cluster.pid_of(first), signal.SIGKILL)
            wait_until(lambda: first in cluster.lost())
    with room_for(0, fork_server.pid):
        late = ForkServer()
        time.sleep(0.5)
    with late:
        os.kill(cluster.pid_of(second), signal.SIGKILL)  # something is closed
        late.wait_up()


@pytest.mark.parametrize("room", [1, 2, 3, 4])
def test_a_client_that_is_not_accepted_gets_an_error(fork_server, monkeypatch, room: int) -> None:
    monkeypatch.setattr(module, "_address", fork_server.address)
    fork_server.wait_up()
    before = len(descriptors(fork_server.pid))
    with room_for(room, fork_server.pid), ForkServer() as client:
        with pytest.raises(PeerLostError, match="no more processes: closed"):
            client.wait_up()
        assert not client._monitor.is_alive()
    # it closes them after it told the client
    wait_until(lambda: len(descriptors(fork_server.pid)) <= before)


def test_a_process_that_was_forked_meanwhile_does_not_keep_the_children_alive(client) -> None:
    children = client._children
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(write)
        os.read(read, 1)
        os._exit(0)
    try:
        client._hang_up()
        assert children.wait_gone(20)
        client.close()
        assert not client._monitor.is_alive()
    finally:
        os.close(write)
        os.close(read)
        os.waitpid(pid, 0)


def test_a_process_that_was_forked_meanwhile_ends_no_children(client: ForkServer) -> None:
    children = client._children
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            client.kill_children()
            with pytest.raises(ConfigurationError, match="this process is a fork of it"):
                client._send(None)
            client.close()
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert not children.wait_gone(1)
    client.kill_children()
    assert children.wait_gone(10)


def test_a_child_that_has_not_ended_is_not_replaced(client: ForkServer) -> None:
    pid = client._children.states[0].pid
    with pytest.raises(PeerLostError, match=rf"process 0 \(pid {pid}, ready\) .* not ended"):
        client.restart(Task(), 0)


ODD = """
import os, signal, sys, time
from torchrl_dist.forks import imports_to_be_forked
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
with imports_to_be_forked():
    from torchrl_dist.runtime import ForkServer, local_cluster

def fail():
    print("a child's last words")
    raise RuntimeError("no licence")

with open(sys.argv[1], "w") as log, ForkServer(fork="fork" in sys.argv[2]) as server:
    print("has an output", sys.stdout is not None, file=log)
    try:
        with local_cluster({"a": 1, "b": 1}, timeout_s=30, init_fn=fail, fork_server=server):
            pass
    except Exception as error:
        print(type(error).__name__, file=log)
    with local_cluster({"a": 1, "b": 2}, timeout_s=30, fork_server=server) as job:
        first, second = job.of_role("b")
        os.kill(job.pid_of(first), signal.SIGKILL)
        deadline = time.monotonic() + 20
        while not job.lost() and time.monotonic() < deadline:
            time.sleep(0.02)
        print(job.lost_reason(first), job.call(second, abs, -1), file=log)
"""


@pytest.mark.parametrize("how", ["fresh", "fork", "fork closed"])
def test_a_program_may_ignore_its_children_and_have_no_output(tmp_path: Path, how: str) -> None:
    """The output of a child whose start-up fails is not lost either."""
    (tmp_path / "odd.py").write_text(ODD)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    environment.pop("PYTHONUNBUFFERED", None)
    command = [sys.executable, str(tmp_path / "odd.py"), str(tmp_path / "log"), how]
    closed = how.endswith("closed")
    with open(tmp_path / "out", "w") as out:
        if closed:
            command = ["sh", "-c", 'exec "$@" >&-', "sh", *command]
            done = subprocess.Popen(command, env=environment)
        else:
            done = warm.start(command, env=environment, stdout=out)
    assert done.wait(80) == 0
    log = (tmp_path / "log").read_text().splitlines()
    assert log == [f"has an output {not closed}", "RemoteError", "killed by SIGKILL 1"], log
    assert (tmp_path / "out").read_text() == ("" if closed else "a child's last words\n")
