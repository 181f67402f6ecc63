"""What env processes answer, and when: errors, calls that are interrupted or late, last words."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import pickle
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from tensordict import TensorDict

from tests.collect.envs import Counter, Node, nodes, wait_for
from torchrl_dist.collect import RPCBatchedCollector
from torchrl_dist.collect.node.env_process import _dumps
from torchrl_dist.collect.node.relay import send
from torchrl_dist.errors import DeadlineError, PeerLostError, RemoteError
from torchrl_dist.replay import RateLimiter, SharedMemmapStorage, SharedReplayBuffer
from torchrl_dist.runtime import ForkServer, forkserver


@pytest.fixture
def build(fork_server: ForkServer) -> Iterator[Any]:
    with nodes(fork_server, frames_per_rollout=20, num_envs=1) as make:
        yield make


@pytest.fixture(autouse=True)
def near(fork_server: ForkServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Collectors of this process have their env processes forked there, as those of a rank do:
    another server would have to import everything first."""
    monkeypatch.setattr(forkserver, "_address", fork_server.address)


class SimError(Exception):
    """Can be pickled, but not be built again."""

    def __init__(self, code: int, where: str) -> None:
        super().__init__(f"failed with {code} at {where}")


def refuse() -> Any:
    raise SimError(5, "the answer")


class Unreadable:
    """Can be pickled, but not be built again."""

    def __reduce__(self) -> Any:
        return refuse, ()


class Asked(Counter):
    fails: Any = False  # or what it raises

    def __init__(self, go: Path | None = None) -> None:
        super().__init__(10**6)
        self.go = go

    def pid(self) -> int:
        return os.getpid()

    def load(self, task: int) -> str:
        if self.fails:
            raise SimError(3, f"task {task}")
        return f"task {task}"

    def handle(self) -> Any:
        return threading.Lock()

    def unreadable(self) -> Any:
        return Unreadable()

    def hold(self) -> str:
        """Block until the file ``go`` exists."""
        assert self.go is not None
        (self.go.parent / f"held {os.getpid()}").touch()
        wait_for(self.go.exists)
        return "held"

    def step(self, action: Any) -> Any:
        if self.fails:
            raise SimError(3, "joint 4") if self.fails is True else self.fails("joint 4")
        return super().step(action)


def call(worker: Node, name: str, *args: Any, env: int | None = None) -> list[Any]:
    return worker.visit_envs(env, "call", name, args, {})


def test_an_error_that_cannot_be_built_again_keeps_its_text_and_shifts_no_answer(build) -> None:
    worker = build(Asked)
    pids = call(worker, "pid")
    worker.visit_envs(0, "set", "fails", (True,), {})
    with pytest.raises(RemoteError, match="failed with 3 at task 7") as caught:
        call(worker, "load", 7)
    assert caught.value.__cause__ is None and "in load" in caught.value.remote_traceback
    assert call(worker, "pid") == pids
    for request in range(2):
        with pytest.raises(RemoteError, match="failed with 3 at joint 4") as caught:
            worker.collect(request=request)
        assert "env process" in caught.value.peer
        assert not worker._under_way
    for kind in (SystemExit, asyncio.CancelledError, GeneratorExit, KeyboardInterrupt):
        worker.visit_envs(0, "set", "fails", (kind,), {})
        with pytest.raises(RemoteError, match=f"{kind.__name__}: joint 4") as caught:
            worker.collect()
        assert "in step" in caught.value.remote_traceback
    worker.visit_envs(0, "set", "fails", (False,), {})
    assert worker.collect()[1].frames == 20
    assert call(worker, "pid") == pids


def test_unsigned_rows_can_be_built_again() -> None:
    for dtype in (torch.uint8, torch.uint16, torch.uint32, torch.uint64):
        rows = TensorDict({"x": torch.arange(6).to(dtype).reshape(2, 3)}, [2])
        back = pickle.loads(_dumps(rows))
        assert back["x"].dtype == dtype and back["x"].tolist() == [[0, 1, 2], [3, 4, 5]]


def test_envs_that_cannot_be_built_say_why_whatever_they_raise(build: Any) -> None:
    def make() -> Any:
        raise SimError(8, "start")

    with pytest.raises(RemoteError, match="failed with 8 at start"):
        build(make)


@pytest.mark.parametrize(
    ("method", "args", "what"),
    [
        ("handle", (), "cannot pickle"),
        ("unreadable", (), "failed with 5 at the answer"),
        ("load", (Unreadable(),), "failed with 5 at the answer"),
    ],
    ids=["result that does not pickle", "result that cannot be built", "argument that cannot"],
)
def test_values_that_cannot_be_pickled_fail_only_their_own_call(build, method, args, what) -> None:
    worker = build(Asked)
    pids = call(worker, "pid")
    for env in (None, 1):
        with pytest.raises(RemoteError, match=what) as caught:
            call(worker, method, *args, env=env)
        assert "env process" in caught.value.peer and "Traceback" in caught.value.remote_traceback
        assert call(worker, "pid") == pids
    assert worker.collect(request=0)[1].frames == 20 and not worker._pool.replaced


def interrupt_when(condition: Any) -> threading.Thread:
    """Ctrl-C in the main thread."""

    def wait() -> None:
        wait_for(condition)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


def test_after_ctrl_c_in_a_call_every_answer_is_that_of_its_call(tmp_path: Path) -> None:
    go = tmp_path / "go"
    with RPCBatchedCollector(
        lambda: Asked(go), None, frames_per_batch=40, env_processes=2, timeout_s=40.0
    ) as collector:
        pids = collector.call("pid")
        assert len(collector.next()) == 2
        for number in range(2):
            go.unlink(missing_ok=True)
            for old in tmp_path.glob("held*"):
                old.unlink()
            interrupt = interrupt_when(lambda: len(list(tmp_path.glob("held*"))) == 2)
            with pytest.raises(KeyboardInterrupt):
                collector.call("hold")
            interrupt.join()
            go.touch()
            if number:
                assert collector.next().shape == (2, 20)
            assert collector.call("pid") == pids and collector.get_attr("fails") == [False] * 2
        assert collector.call("load", 4) == ["task 4"] * 2 and collector.next().shape == (2, 20)


def test_a_message_that_no_process_reads_in_time_closes_both_ends() -> None:
    ours, theirs = socket.socketpair()
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", 0, 100_000))
    with Connection(ours.detach()) as end, Connection(theirs.detach()) as other:
        send(end, bytes(10**7))  # more than it holds
        assert end.poll(0)
        send(end, b"next")
        with pytest.raises((EOFError, OSError)):
            other.recv_bytes()


def test_a_late_call_is_a_deadline_error_and_its_processes_live_on(tmp_path: Path) -> None:
    go = tmp_path / "go"
    with RPCBatchedCollector(
        lambda: Asked(go), None, frames_per_batch=40, env_processes=2, timeout_s=2.0
    ) as collector:
        pids = collector.call("pid")
        with pytest.raises(DeadlineError, match=r"env processes \[0, 1\] .* within 2 s"):
            collector.call("hold")
        go.touch()
        answers: list[list[int]] = []

        def answered() -> bool:
            with contextlib.suppress(DeadlineError):  # on a busy machine
                answers.append(collector.call("pid"))
            return bool(answers)

        wait_for(answered)
        assert answers == [pids]


def test_a_process_that_waits_for_a_rate_limiter_does_not_hang(build: Any, tmp_path: Path) -> None:
    limiter = RateLimiter(min_size_to_sample=8, samples_per_insert=1.0, error_buffer=16.0)
    storage = SharedMemmapStorage(
        1000, scratch_dir=tmp_path / "replay", limiter=limiter, timeout_s=600
    )
    buffer = SharedReplayBuffer(storage=storage, batch_size=8)
    worker = build(Asked, replay_buffer=buffer, step_timeout_s=0.3, frames_per_rollout=8)

    def collect_until_held() -> None:
        request = 0
        while worker.collect(request=request)[1].frames:
            request += 1

    with ThreadPoolExecutor(1) as pool:
        collecting = pool.submit(collect_until_held)
        try:
            before = -1
            while storage.write_count != before:  # until no writer makes progress
                before = storage.write_count
                time.sleep(3.5)
            assert before >= 8 and not collecting.done()
        finally:
            worker.close()
        collecting.result(40.0)
    assert not worker._pool.replaced
    storage.close()


def test_ctrl_c_while_a_collector_is_built_leaves_no_worker(tmp_path: Path) -> None:
    go = tmp_path / "go"

    def make() -> Any:
        (tmp_path / f"pid-{os.getpid()}").touch()
        wait_for(go.exists)
        return Counter()

    before = psutil.Process().children()
    interrupt = interrupt_when(lambda: len(list(tmp_path.glob("pid-*"))) == 2)
    with pytest.raises(KeyboardInterrupt):
        RPCBatchedCollector(make, None, frames_per_batch=40, env_processes=2)
    interrupt.join()
    pids = [int(path.name.partition("-")[2]) for path in tmp_path.glob("pid-*")]
    assert all(psutil.pid_exists(pid) for pid in pids)  # an interrupt does not wait for them
    go.touch()
    wait_for(lambda: not any(psutil.pid_exists(pid) for pid in pids))
    wait_for(lambda: set(psutil.Process().children()) <= set(before))  # their server


def test_a_worker_of_this_process_whose_envs_kill_theirs_is_named() -> None:
    def make() -> Any:
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(PeerLostError, match="env process . died at start-up: killed by SIGKILL"):
        RPCBatchedCollector(make, None, frames_per_batch=40, env_processes=2)


class Unsaved(Counter):
    step_s = 0.0

    def step(self, action: Any) -> Any:
        time.sleep(self.step_s)
        return super().step(action)

    def close(self) -> None:
        raise OSError("the recording could not be saved")


@pytest.mark.parametrize("env_processes", [0, 2])
def test_shutdown_raises_what_envs_raise_in_close(env_processes: int) -> None:
    collector = RPCBatchedCollector(
        Unsaved, None, frames_per_batch=40, total_frames=80, env_processes=env_processes
    )
    assert len(list(collector)) == 2
    with pytest.raises(RemoteError, match="the recording could not be saved"):
        collector.shutdown()
    collector.shutdown()


def test_a_worker_closed_during_a_rollout_raises_what_envs_raise_in_close(build) -> None:
    worker = build(Unsaved, frames_per_rollout=10**6)
    worker.visit_envs(None, "set", "step_s", (0.01,), {})
    with ThreadPoolExecutor(1) as pool:
        rollout = pool.submit(worker.collect, request=0)
        wait_for(lambda: worker._under_way)
        with pytest.raises(RemoteError, match="the recording could not be saved"):
            worker.close()
        assert rollout.result(40.0)[1].frames == 0
    assert worker._pool.children.wait_gone(0)
    worker.close()


def test_functions_for_the_end_of_a_process_run_at_the_end_of_an_env_process(
    build: Any, tmp_path: Path
) -> None:
    class Registers(Counter):
        def __init__(self) -> None:
            super().__init__()
            atexit.register((tmp_path / f"ended {os.getpid()}").touch)

    build(Registers).close()
    assert len(list(tmp_path.glob("ended*"))) == 2


def test_a_rollout_that_needs_only_a_process_that_is_being_replaced_waits_for_it(
    build: Any, tmp_path: Path
) -> None:
    go, slow = tmp_path / "go", tmp_path / "slow"

    def make() -> Any:
        if slow.exists():
            wait_for(go.exists)
        return Counter(10**6)

    worker = build(make)
    worker.collect(request=0)
    slow.touch()
    state = worker._pool.children.states[0]
    os.kill(state.pid, signal.SIGKILL)
    wait_for(lambda: state.exit)
    stats = worker.collect(request=1)[1]
    assert stats.frames == 10 and len(stats.replaced) == 1
    begin, begun = worker._begin, []
    worker.inner._begin = lambda order: begun.append(order) or begin(order)
    with ThreadPoolExecutor(1) as pool:
        rollout = pool.submit(worker.collect, request=2, num_envs=1)
        time.sleep(1.0)
        assert not rollout.done()
        go.touch()
        assert rollout.result(40.0)[1].frames == 10
    assert len(begun) == 1


def test_output_of_envs_reaches_a_file(build: Any, tmp_path: Path) -> None:
    class Loud(Counter):
        def __init__(self) -> None:
            super().__init__()
            log = os.open(tmp_path / f"log {os.getpid()}", os.O_WRONLY | os.O_CREAT)
            os.dup2(log, 1)
            sys.stdout.reconfigure(line_buffering=False)

        def step(self, action: Any) -> Any:
            print("stepped")
            return super().step(action)

        def close(self) -> None:
            print("closed")

    worker = build(Loud)
    assert worker.collect(request=0)[1].frames == 20
    worker.close()
    logs = [path.read_text().split() for path in tmp_path.glob("log *")]
    assert logs == [["stepped"] * 10 + ["closed"]] * 2
