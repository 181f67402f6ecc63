"""Attacks by another user of the machine on jobs that are started as users start them.

Nothing of ours changes, no row can be read, nothing hangs, and junk that is sent to a port of ours
has no effect.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gymnasium
import pytest

from tests.recipes.jobs import ENDLESS, Job, ending, progress
from tests.replay.faults import forked, run_forked
from tests.runtime.helpers import listening_addresses
from tests.spawn import run_job, wait_until
from tests.test_own_files import (
    OTHER,
    PREPARED,
    VICTIM,
    become,
    common_ground,
    contents,
    litter,
    run_as,
    said_by,
)
from torchrl_dist import DeadlineError, local_cluster, own_files, session
from torchrl_dist.checkpoint import load_checkpoint
from torchrl_dist.runtime import forkserver
from torchrl_dist.runtime.signs import SignPost, give_sign
from torchrl_dist.runtime.store import connect_store

JUNK = {
    "nothing": b"",
    "a half": b"\x10",
    "zeros": bytes(64),
    "TLS": bytes.fromhex("16030100fa010000f60303") + bytes(range(240)),
    "HTTP": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "much": b"\xff" * (1 << 20),
}
AS_VICTIM = [
    *("setpriv", f"--reuid={VICTIM}", f"--regid={VICTIM}", "--clear-groups"),
    # the interpreter may lie where only root may look
    *("--inh-caps=-all,+dac_read_search", "--ambient-caps=-all,+dac_read_search", "--"),
]
needs_two_users = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("setpriv") is None,
    reason="needs root and setpriv, to become two other users",
)


# ---- junk


@contextlib.contextmanager
def junk(connect: Callable[[], socket.socket], each: int = 60) -> Iterator[None]:
    """Make connections that send junk; a third stay open, a third close, and a third reset."""
    stay = []
    for number in range(each):
        for sent in JUNK.values():
            connection = connect()
            connection.settimeout(0.2)
            with contextlib.suppress(OSError):
                connection.sendall(sent)
            if number % 3 == 0:
                stay.append(connection)
                continue
            if number % 3 == 1 and connection.family != socket.AF_UNIX:
                linger = struct.pack("ii", 1, 0)
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            connection.close()
    try:
        yield
    finally:
        for connection in stay:
            connection.close()


def test_junk_at_the_port_for_signs_of_life_does_not_count_as_a_sign() -> None:
    post, heard = SignPost("127.0.0.1", 2), []
    _, port, *_ = json.loads(post.card)
    thread = threading.Thread(target=post.serve, args=(60.0, lambda rank: heard.append(rank)))
    thread.start()
    try:
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(2):
            with junk(lambda: socket.create_connection(("127.0.0.1", port), 5)):
                assert give_sign(post.card, 1, 5.0) is None
        assert heard == [1, 1]
        give_sign(post.card, 1, 5.0)
        wait_until(lambda: len(os.listdir("/proc/self/fd")) <= before)
    finally:
        post.close()
        thread.join(10)
        post.release()
    assert not thread.is_alive()


def _over_hosts(folder: str) -> None:
    """Run in each of two ranks, as if each were alone on its node."""
    os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", GROUP_RANK=os.environ["RANK"])
    with session({"driver": 1, "worker": 1}, timeout_s=6.0) as me:
        if not me.is_driver:
            me.serve()
            return
        Path(folder, "card").write_text(me._sign_post.card)
        until = time.monotonic() + 60
        while not Path(folder, "stop").exists():
            assert time.monotonic() < until
            me.call(me.peers[1], os.getpid)
            time.sleep(0.05)
        assert not me.lost()


def test_junk_at_the_port_for_signs_does_not_end_a_job_over_hosts(tmp_path: Path) -> None:
    def disturb(_: Any) -> None:
        card = tmp_path / "card"
        address, port, *_ = json.loads(wait_until(lambda: card.exists() and card.read_text()))
        until = time.monotonic() + 8  # longer than the session's deadline
        while time.monotonic() < until:
            with junk(lambda: socket.create_connection((address, port), 5), each=20):
                time.sleep(0.2)
        (tmp_path / "stop").touch()

    job = run_job(_over_hosts, {"folder": str(tmp_path)}, nproc=2, on_start=disturb)
    assert job.returncode == 0, str(job)


@contextlib.contextmanager
def says(answer: bytes, then_silent: bool) -> Iterator[int]:
    """Yield the port of a program that gives this answer to everything."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        stay = []

        def serve() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                    with contextlib.suppress(OSError):
                        connection.sendall(answer)
                except OSError:
                    return
                if then_silent:
                    stay.append(connection)
                else:
                    connection.close()

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield server.getsockname()[1]
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join(10)
            for connection in stay:
                connection.close()


@pytest.mark.parametrize("then_silent", [True, False])
@pytest.mark.parametrize("answer", ["nothing", "a half", "TLS"])
def test_a_wrong_program_in_place_of_the_store_or_the_driver_is_reported(answer, then_silent):
    with says(JUNK[answer], then_silent) as port:
        start = time.monotonic()
        with pytest.raises(DeadlineError, match=f"127.0.0.1:{port}"):
            connect_store("127.0.0.1", port, 0.3)
        with pytest.raises(OSError):
            give_sign(f'["127.0.0.1", {port}, "{"00" * 16}", "{"11" * 16}"]', 1, 0.3)
        assert time.monotonic() - start < 20


@needs_two_users
def test_junk_of_another_user_keeps_no_client_out_of_the_fork_server(monkeypatch) -> None:
    with forkserver.ForkServer() as server:

        def flood() -> None:
            become(OTHER)
            until = time.monotonic() + 60
            while time.monotonic() < until:
                with junk(lambda: knock(server.address), each=100):
                    pass

        with local_cluster({"a": 2}, fork_server=server):
            pass  # now it listens
        monkeypatch.setattr(forkserver, "_address", server.address)
        with forked(flood):
            time.sleep(0.5)
            for _ in range(5):
                with forkserver.ForkServer() as client:
                    assert client.pid == server.pid
                    with local_cluster({"a": 2}, fork_server=client) as me:
                        assert me.call(me.peers[1], os.getuid) == os.getuid()


# ---- real jobs


@pytest.fixture
def ground() -> Iterator[Path]:
    """A folder for all users, in which another user has prepared everything that it can.

    That user has also taken the name of our folder in memory.
    """
    taken = Path(own_files._MEMORY) / f"torchrl_dist-{VICTIM}"
    with common_ground() as path:
        (path / "tmp").mkdir(0o700)
        os.chown(path / "tmp", VICTIM, VICTIM)
        run_as(OTHER, taken.mkdir)
        run_as(OTHER, litter, path)
        for name, prepare in PREPARED.items():
            place = path / f"prepared-{name.replace(' ', '-')}"
            run_as(OTHER, prepare, place / "run" if name == "above" else place, path / "home/notes")
        yield path
    shutil.rmtree(taken, ignore_errors=True)


def variables_of(ground: Path) -> dict[str, str]:
    """Return the environment of the victim's programs, with ``ground/tmp`` for temporary files."""
    own = {k: v for k, v in os.environ.items() if not k.startswith(("TORCHELASTIC", "RANK"))}
    own |= dict.fromkeys(("TMPDIR", "XDG_CACHE_HOME", "MPLCONFIGDIR"), str(ground / "tmp"))
    own |= {"HOME": str(ground / "home"), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    return own | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


@contextlib.contextmanager
def started_as_victim(ground: Path) -> Iterator[Job]:
    """Start an endless run in ``home/run``."""
    home = ground / "home"
    command = [sys.executable, "-m", "torchrl_dist", "train", "apex", *ENDLESS]
    command += ["--output-dir", "run", "--collectors", "1"]
    out, err = ground / "stdout.txt", ground / "stderr.txt"
    out.touch(0o600)
    err.touch(0o600)
    with open(out, "w") as stdout, open(err, "w") as stderr:
        process = subprocess.Popen(
            [*AS_VICTIM, *command],
            cwd=home,
            env=variables_of(ground),
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
        )
    with ending(Job(process, out, err)) as job:
        yield job


def attack(ground: Path, sockets: list[str]) -> None:
    """Try what a user can do with another user's files and sockets."""
    run = ground / "home" / "run"
    for attempt in (
        lambda: os.listdir(run),
        lambda: (run / "checkpoint.pt").read_bytes(),
        lambda: (run / "replay" / "data" / "observation.bin").read_bytes(),
        lambda: os.link(run / "checkpoint.pt", ground / "hard"),
        lambda: os.rename(run, ground / "taken"),
        lambda: os.rename(ground / "home", ground / "taken"),
        lambda: (run / "checkpoint.pt").symlink_to(ground / "mine"),
    ):
        with pytest.raises(PermissionError):
            attempt()
    # where all users can put files, none of the victim's can be read, except the open home
    for place in (Path("/dev/shm"), Path(tempfile.gettempdir()), ground):
        for each in place.iterdir():
            status = each.lstat()
            if status.st_uid == VICTIM and each != ground / "home":
                assert not os.access(each, os.R_OK), each
                assert not os.access(each, os.W_OK), each
    for name in sockets:
        with junk(lambda name=name: knock(name)):
            with knock(name) as link, contextlib.suppress(OSError), open("/dev/null") as null:
                socket.send_fds(link, [b"client"], [null.fileno(), null.fileno()])


def knock(address: str) -> socket.socket:
    """Connect to a fork server's socket, whose queue may be full."""
    link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    wait_until(lambda: link.connect_ex(address) != errno.EAGAIN)
    return link


def sockets_of(pids: list[int]) -> list[str]:
    """Return the abstract addresses on which these processes listen."""
    inodes = set()
    for pid in pids:
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                inodes.add(os.readlink(fd).removeprefix("socket:[").rstrip("]"))
    lines = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    named = [line for line in lines if len(line) == 8 and line[6] in inodes]
    return sorted({"\0" + line[7][1:] for line in named if line[7].startswith("@torchrl_dist-")})


def all_commands(ground: Path) -> None:
    """Run each command at each place that the other user has prepared."""
    become(VICTIM)
    os.chdir(ground / "work")
    home, small = ground / "home", ["--env", "CartPole-v1", "--total-frames", "64"]
    toy = ["train", "apex", *small, "--collectors", "0", "--timeout-s", "10"]
    run = home / "run"
    places = sorted(
        each for each in ground.iterdir() if each.is_dir() and each != home and each.name != "tmp"
    )
    places += sorted((ground / "work" / "runs").iterdir())
    places += [ground / "prepared-above" / "run", Path("/dev/shm") / f"torchrl_dist-{VICTIM}"]
    for number, place in enumerate(places):
        for arguments in (
            ["top", str(place), "--once", "--interval", "0.05"],
            ["clean", str(place)],
            ["clean", "--remove", str(place)],
        ):
            said_by(*arguments)
        for arguments in (
            ["inspect", str(place)],
            [*toy, "--resume", "--output-dir", str(place)],
            [*toy, "--output-dir", str(home / f"new-{number}"), "--replay-dir", str(place)],
            ["play", str(place)],
            ["play", str(place / "checkpoint.pt")],
            [*toy, "--config", str(place / "run.json")],
        ):
            code, said = said_by(*arguments)
            assert code in (1, 2), (arguments, said)
    for arguments in (
        ["top", "--once", "--interval", "0.1"],
        ["top", str(run), "--once", "--interval", "0.1"],
        ["inspect", str(run / "replay")],
        ["play", str(run), "--episodes", "1"],
    ):
        code, said = said_by(*arguments)
        assert code == 0, (arguments, said)
    own = json.loads((run / "run.json").read_text())["job_id"]
    for words in ([], [own], [str(run / "replay")]):
        told = json.loads(said_by("top", *words, "--once", "--json", "--interval", "0.1")[1])
        assert told["job_id"] == own
    assert json.loads(said_by("inspect", "--json", str(run / "replay"))[1])["length"] > 0
    code, said = said_by(*toy, "--resume", "--output-dir", str(run))
    assert code == 2 and "another run uses" in said, said
    for words in ([], [str(ground)], [str(home)]):
        told = json.loads(said_by("clean", "--remove", "--json", *words)[1])
        mine = [each for each in told["directories"] if str(ground) in each["path"]]
        assert all(each["state"] == "in use" for each in mine), mine


@needs_two_users
def test_attacks_by_another_user_on_a_recipe_and_every_command_have_no_effect(ground: Path) -> None:
    run = ground / "home" / "run"
    strange = {name: what for name, what in contents(ground).items() if what[0] == OTHER}
    assert len(strange) > 60
    gymnasium.make("CartPole-v1").close()  # imports what the victim may be unable to read
    with started_as_victim(ground) as job:
        job.until(progress(run), "progress")
        pids = [each.pid for each in job.descendants()]
        assert listening_addresses([job.process.pid, *pids]) == {"0100007F"}
        before = others_than_run(ground / "home")
        (server,) = sockets_of([job.process.pid, *pids])
        run_as(OTHER, attack, ground, [server])
        assert run_forked(all_commands, ground) == 0
        # it starts processes
        command = [*AS_VICTIM, sys.executable, "-m", "torchrl_dist", "doctor", "--clean"]
        done = subprocess.run(
            [*command, "--no-round-trips", "--folder", str(ground)],
            cwd=ground / "work",
            env=variables_of(ground),
            timeout=100,
            capture_output=True,
            text=True,
        )
        said = done.stdout + done.stderr
        assert done.returncode in (0, 1) and "leftovers" in said, said
        assert "\x1b" not in said and "Traceback" not in said, said
        updates = load_checkpoint(run / "checkpoint.pt").counters["updates"]
        job.until(progress(run, more_than=updates), "progress after it")
        assert sorted(each.pid for each in job.descendants()) == sorted(pids), job.said()
        os.kill(job.process.pid, signal.SIGINT)
        job.wait()
        assert job.result["stopped_by"] == "SIGINT" and not job.result["lost_collectors"]
    assert others_than_run(ground / "home") == before
    assert {n: w for n, w in contents(ground).items() if w[0] == OTHER} == strange
    assert {each.lstat().st_uid for each in run.rglob("*")} == {VICTIM}
    left = [n for n in os.listdir("/dev/shm") if os.lstat(f"/dev/shm/{n}").st_uid == VICTIM]
    assert not left


def others_than_run(home: Path) -> dict[str, Any]:
    """Return the contents of the folder, without the run that is going on."""
    return {name: what for name, what in contents(home).items() if name.partition("/")[0] != "run"}
