"""A fork server that several processes have children from."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from torchrl_dist.errors import PeerLostError, RemoteError
from torchrl_dist.runtime import ForkServer, Session, current_session, local_cluster
from torchrl_dist.runtime import forkserver as module

pytestmark = pytest.mark.timeout(90)
_own: list[ForkServer] = []


@dataclass(frozen=True)
class Task:
    """Of a child: touches a file and stays, or raises."""

    file: str
    fails: bool = False

    def run(self, rank: int, ready: Callable[[], None]) -> None:
        if self.fails:
            raise ValueError("no task")
        Path(f"{self.file}{rank}").write_text(str(os.getpid()))
        ready()
        time.sleep(60)


@pytest.fixture
def cluster(fork_server: ForkServer) -> Iterator[Session]:
    with local_cluster({"a": 1, "b": 2}, timeout_s=30, fork_server=fork_server) as job:
        yield job


def start_in_child(file: str, fails: bool = False) -> tuple[int, float, list[int]]:
    """The pids of server and children, and the seconds until they were ready."""
    begun = time.monotonic()
    _own.append(ForkServer())
    children = _own[-1].start(Task(file, fails), range(2))
    me = current_session().me
    children.wait_ready(30, lambda rank: (f"child {rank} of {me.name}", me.host))
    pids = [state.pid for state in children.states.values()]
    return _own[-1].pid, time.monotonic() - begun, [pid for pid in pids if pid is not None]


def close_in_child() -> None:
    _own.pop().close()


def gone(pids: list[int], timeout_s: float = 10) -> bool:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if not any(psutil.pid_exists(pid) for pid in pids):
            return True
        time.sleep(0.02)
    return False


def test_children_have_children_of_the_same_server(
    cluster: Session, fork_server: ForkServer, tmp_path: Path
) -> None:
    first, second = cluster.of_role("b")
    server, seconds, pids = cluster.call(first, start_in_child, str(tmp_path / "a"))
    others = cluster.call(second, start_in_child, str(tmp_path / "b"))[2]
    assert server == fork_server.pid and seconds < 10  # imports alone take some seconds
    assert {psutil.Process(pid).ppid() for pid in pids + others} == {server}
    assert len({os.getpgid(pid) for pid in pids + others}) == 4
    cluster.call(first, close_in_child)
    assert gone(pids)
    assert all(psutil.pid_exists(pid) for pid in others)
    # the first goes on as a client of another time
    assert cluster.call(first, start_in_child, str(tmp_path / "c"))[0] == server


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_client_that_is_killed_takes_its_children_with_it(
    cluster: Session, tmp_path: Path, number: signal.Signals
) -> None:
    first, second = cluster.of_role("b")
    mine = cluster.call(first, start_in_child, str(tmp_path / "a"))[2]
    others = cluster.call(second, start_in_child, str(tmp_path / "b"))[2]
    os.kill(cluster.pid_of(first), number)
    if number == signal.SIGSTOP:  # nobody waits for who is paused
        assert cluster.call(second, start_in_child, str(tmp_path / "c"))[1] < 10
        assert all(psutil.pid_exists(pid) for pid in mine)
        os.kill(cluster.pid_of(first), signal.SIGKILL)
    assert gone(mine)
    assert all(psutil.pid_exists(pid) for pid in others)
    assert cluster.call(second, os.getpid) == cluster.pid_of(second)


def test_what_fails_in_a_childs_child_is_told_to_the_child(
    cluster: Session, tmp_path: Path
) -> None:
    first, second = cluster.of_role("b")
    with pytest.raises(RemoteError, match="no task"):
        cluster.call(first, start_in_child, str(tmp_path / "a"), True)
    assert len(cluster.call(second, start_in_child, str(tmp_path / "b"))[2]) == 2


def test_all_end_with_the_server(tmp_path: Path) -> None:
    with ForkServer() as server:
        with local_cluster({"a": 1, "b": 1}, timeout_s=30, fork_server=server) as job:
            child = job.of_role("b")[0]
            pids = job.call(child, start_in_child, str(tmp_path / "a"))[2]
            os.kill(server.pid, signal.SIGKILL)
            with pytest.raises(PeerLostError):
                job.call(child, time.sleep, 20)
            assert gone(pids)


def test_strangers_at_the_door_are_sent_away(fork_server: ForkServer, tmp_path: Path) -> None:
    def knock(*, says: bytes | None, fds: list[int] = []) -> None:  # noqa: B006
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as link:
            link.connect(fork_server.address)
            if says is not None:
                socket.send_fds(link, [says], fds)

    def descriptors() -> int:
        return len(os.listdir(f"/proc/{fork_server.pid}/fd"))

    with local_cluster({"a": 1, "b": 1}, timeout_s=30, fork_server=fork_server):
        pass
    before = descriptors()
    read, write = os.pipe()
    for _ in range(5):
        knock(says=None)
        knock(says=b"")
        knock(says=b"client")
        knock(says=b"client", fds=[read])
        knock(says=b"client", fds=[read, read, write])
        knock(says=b"client", fds=[read, write])  # no sockets
    os.close(read)
    os.close(write)
    with local_cluster({"a": 1, "b": 1}, timeout_s=30, fork_server=fork_server) as job:
        assert job.call(job.of_role("b")[0], os.getpid)
    deadline = time.monotonic() + 5
    while descriptors() > before:
        assert time.monotonic() < deadline, (before, descriptors())
        time.sleep(0.05)


def test_without_the_server_it_came_from_a_process_has_one_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_address", "\0torchrl_dist-nobody")
    with ForkServer() as server, local_cluster({"a": 1, "b": 1}, fork_server=server) as job:
        assert psutil.Process(server.pid).ppid() == os.getpid()
        assert job.call(job.of_role("b")[0], os.getpid)
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(server.pid).wait(5)
