"""A rank that raises, dies or is paused: the others are told which and why, and the job ends."""

from __future__ import annotations

import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests import warm
from tests.learn.losses import make_batch, make_loss
from tests.learn.ranks import LearningRanks
from tests.spawn import is_helper, run_job, start_slurm_tasks, stop_self
from torchrl_dist import DistributedLoss, session
from torchrl_dist.learn import Ranks
from torchrl_dist.learn.ranks import Rank
from torchrl_dist.runtime.world import process_stamp

HOST = socket.gethostname()
DEADLINE_S = 60.0


@pytest.fixture
def two_ranks(fork_server) -> Iterator[LearningRanks]:
    """New ones for each test, because an error of one ends them."""
    with LearningRanks.start(2, fork_server) as ranks:
        yield ranks


def learn(updates: int, timeout_s: float, at: Callable[[int], None]) -> None:
    """``at(update)`` is called before each one."""
    with DistributedLoss(make_loss("dqn"), timeout_s=timeout_s) as loss:
        for update in range(updates):
            at(update)
            loss(make_batch("dqn", 4))["loss"].backward()


def told(function: Callable[[], None]) -> tuple[str, str, bool]:
    """The error's name and text, and whether it came long before the deadline of learning."""
    start = time.monotonic()
    try:
        function()
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - start < DEADLINE_S / 2
    return "", "", False


def test_a_rank_in_another_pid_namespace_or_on_another_machine_of_that_name_is_not_gone() -> None:
    stamp = process_stamp(os.getpid())
    pid, start, namespace, boot = stamp.split("-")
    assert Rank(0, HOST, os.getpid(), stamp).state() == "running"
    assert (
        Rank(0, HOST, os.getpid(), f"{pid}-{int(start) + 1}-{namespace}-{boot}").state() == "gone"
    )
    for elsewhere in (f"{pid}-{start}-1-{boot}", f"{pid}-{start}-{namespace}-0"):
        assert Rank(0, HOST, os.getpid(), elsewhere).state() == "unknown"


# ---- in a local cluster


def one_rank_raises() -> tuple[str, str, bool]:
    def at(update: int) -> None:
        if update == 3 and dist.get_rank() == 1:
            raise ZeroDivisionError("in the third update")

    return told(lambda: learn(5, DEADLINE_S, at))


def test_an_exception_reaches_the_waiting_ranks_with_traceback_rank_and_host(three_ranks) -> None:
    first, failed, last = three_ranks.run(one_rank_raises)
    assert failed[0] == "ZeroDivisionError"
    for kind, text, soon in (first, last):
        assert kind == "RemoteError" and soon
        assert f"--- raised in rank 1 on {HOST} ---" in text
        assert "in the third update" in text and "test_failures.py" in text


def one_rank_is_late() -> tuple[str, str, bool]:
    """Rank 2 is paused from outside; the others give up after 4 s."""

    def at(update: int) -> None:
        if update == 2 and dist.get_rank() == 2:
            stop_self()

    return told(lambda: learn(5, 4, at))


def test_a_paused_learner_pauses_the_others_and_is_named_after_the_deadline(three_ranks) -> None:
    session = three_ranks.session
    paused = session.peers[2]
    futures = [session.submit(peer, one_rank_is_late) for peer in session.peers[1:]]
    kind, text, _ = one_rank_is_late()
    pid = session.pid_of(paused)
    assert kind == "DeadlineError"
    # a busy machine's other rank may notice later than is waited for, and is named after it
    assert text.startswith(f"rank 2 (pid {pid} on {HOST}), stopped"), text
    assert "did not reach a call" in text
    kind, text, _ = futures[0].result(20)
    assert kind == "DeadlineError" and text.startswith(f"rank 2 (pid {pid} on")
    os.kill(pid, signal.SIGCONT)
    kind, text, _ = futures[1].result(20)
    assert kind in ("PeerLostError", "DeadlineError", "RemoteError"), text


def pause_for_a_while() -> tuple[str, str, bool]:
    def at(update: int) -> None:
        if update == 2 and dist.get_rank() == 1:
            time.sleep(1.5)

    return told(lambda: learn(4, 20, at))


def test_a_pause_within_the_deadline_is_waited_for(two_ranks: LearningRanks) -> None:
    for kind, text, _ in two_ranks.run(pause_for_a_while):
        assert (kind, text) == ("", "")


def one_rank_dies(before: str) -> tuple[str, str, bool]:
    """Before it answers a question, or before it averages gradients."""

    def at(update: int) -> None:
        if update == 2 and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if before == "question":
            ranks.any(False)

    ranks = Ranks(timeout_s=DEADLINE_S)
    return told(lambda: learn(5, DEADLINE_S, at))


@pytest.mark.parametrize("before", ["question", "averaging"])
def test_a_killed_rank_is_named_at_once(three_ranks: LearningRanks, before: str) -> None:
    session = three_ranks.session
    others = [session.submit(peer, one_rank_dies, before) for peer in session.peers[1:]]
    found = [one_rank_dies(before), others[1].result(20)]
    for kind, text, soon in found:
        assert kind == "PeerLostError" and soon
        assert f"rank 1 (pid {session.pid_of(session.peers[1])} on {HOST}) died" in text


def alone_at_the_meeting() -> tuple[str, str, bool]:
    if dist.get_rank() == 1:
        return told(lambda: None)
    return told(lambda: Ranks(timeout_s=1.5))


def test_a_rank_that_misses_the_meeting_is_named(two_ranks: LearningRanks) -> None:
    (kind, text, soon), _ = two_ranks.run(alone_at_the_meeting)
    assert kind == "DeadlineError" and soon
    assert "rank 1" in text and "did not reach the meeting of the ranks within 1.5 s" in text


def saving_fails() -> tuple[str, str, bool]:
    def save() -> None:
        raise OSError("disk full")

    return told(lambda: Ranks(timeout_s=20).on_first(save))


def test_a_failed_checkpoint_is_an_error_on_every_rank(two_ranks) -> None:
    first, second = two_ranks.run(saving_fails)
    assert first[0] == "OSError"
    assert second[0] == "RemoteError" and "disk full" in second[1] and "rank 0" in second[1]


def at_different_calls(case: str) -> tuple[str, str, bool]:
    def go_apart() -> None:
        loss = make_loss("ppo")
        loss.actor_network_params.requires_grad_(False)
        with DistributedLoss(loss, timeout_s=10):
            if loss.ranks.is_first and case == "a question":
                loss.ranks.any(False)
            elif loss.ranks.is_first and case == "metrics":
                loss.ranks.means({})
            elif case in ("metrics", "a question"):
                loss.ranks.on_first(print)
            elif case == "a call":
                loss(make_batch("ppo", 4))
                if loss.ranks.is_first:
                    loss(make_batch("ppo", 4))
                loss(make_batch("ppo", 4))["loss_critic"].backward()
            else:
                loss.actor_network_params.requires_grad_(loss.ranks.is_first)
                loss(make_batch("ppo", 4))["loss_critic"].backward()

    return told(go_apart)


@pytest.mark.parametrize(
    ("case", "kind", "message"),
    [
        ("metrics", "ConfigurationError", "rank 0 is at the metrics while rank 1 is at a call"),
        ("a question", "ConfigurationError", "rank 0 is at a call of ranks.any() while"),
        (
            "a call",
            "ConfigurationError",
            "is at a call of forward while rank 1 is at the averaging",
        ),
        ("unfreezing", "ConfigurationError", "train different parameters, such as actor_network"),
    ],
)
def test_ranks_at_different_calls_get_an_error(two_ranks, case, kind, message) -> None:
    for found, text, _ in two_ranks.run(at_different_calls, case):
        assert found == kind and message in text, text


def stop_after_different_updates() -> tuple[str, str, bool]:
    def go_apart() -> None:
        with DistributedLoss(make_loss("dqn"), timeout_s=3) as loss:
            for _ in range(2 if loss.ranks.is_first else 3):
                loss(make_batch("dqn", 4))["loss"].backward()
            loss.ranks.any(False)

    return told(go_apart)


def test_a_rank_with_fewer_backward_passes_is_named_with_its_place(two_ranks) -> None:
    first, second = two_ranks.run(stop_after_different_updates)
    for kind, text, _ in (first, second):
        assert kind == "ConfigurationError"
        assert "rank 0 is at a call of ranks.any() while rank 1 is at a call of" in text
        assert "loss.ranks.any(len(buffer) < 1000)" in text


def skip_an_update() -> tuple[str, str, bool]:
    """``if len(buffer) < N: continue`` on rank 2 only, which then leaves its loop early."""

    def go_apart() -> None:
        with DistributedLoss(make_loss("dqn"), timeout_s=20) as loss:
            for update in range(3):
                if update == 0 and dist.get_rank() == 2:
                    continue
                loss(make_batch("dqn", 4))["loss"].backward()
        if dist.get_rank() == 2:
            os._exit(0)  # as a script that has ended

    return told(go_apart)


def test_ranks_that_skip_updates_by_themselves_get_an_error_with_the_remedy(three_ranks) -> None:
    session = three_ranks.session
    others = [session.submit(peer, skip_an_update) for peer in session.peers[1:]]
    for kind, text, _ in (skip_an_update(), others[0].result(20)):
        assert kind == "PeerLostError" and "rank 2 (pid" in text
        assert "the ranks made different numbers of calls" in text
        assert "`if loss.ranks.any(len(buffer) < 1000): continue`" in text


# ---- under torchrun, and in what looks like SLURM's tasks


def a_rank_raises() -> None:
    with session({"learner": -1}, timeout_s=30, process_group="gloo") as me:

        def at(update: int) -> None:
            if update == 2 and me.me.index == 1:
                raise KeyError("missing in the second update")

        learn(1000, 60, at)


def test_under_torchrun_an_exception_in_one_rank_ends_the_job() -> None:
    job = run_job(a_rank_raises, nproc=2)
    assert job.returncode != 0
    assert "missing in the second update" in job.log(1)
    assert "learn(1000, 60, at)" in job.log(1), "its traceback"
    # Of ranks that end between two looks of its agent, torchrun's summary names the lowest first.
    root = job.agent[job.agent.index("Root Cause") :]
    assert re.search(r"rank      : [01] \(local_rank: [01]\)", root) and "host" in root


def learn_until_stopped(folder: str) -> None:
    """Every rank runs as many updates as the others, whenever the signal reaches it, and reaches
    them until the end."""
    with (
        session({"learner": -1}, timeout_s=30, process_group="gloo") as me,
        DistributedLoss(make_loss("dqn"), timeout_s=20) as loss,
    ):
        optimizer = torch.optim.SGD(loss.parameters(), lr=1e-3)
        updates = 0
        while not loss.ranks.any(me.stop_requested):
            optimizer.zero_grad()
            loss(make_batch("dqn", 4, seed=updates))["loss"].backward()
            optimizer.step()
            updates += 1
            if updates == 5:
                Path(folder, f"ready{me.me.index}").touch()
        loss.check_drift()
        other = me.peers[1 - me.me.index]  # torchrun told it, too; it still answers
        assert me.call(other, os.getpid) == me.pid_of(other)
        loss.ranks.on_first(Path(folder, "checkpoint").write_text, str(updates))
        Path(folder, f"stopped{me.me.index}").write_text(str(updates))


@pytest.mark.parametrize("whom", ["torchrun", "one rank"])
def test_ctrl_c_stops_all_ranks_after_the_same_update(tmp_path: Path, whom: str) -> None:
    def interrupt(agent: warm.Running) -> None:
        import psutil

        def when_ready() -> None:
            while len(list(tmp_path.glob("ready*"))) < 2 and agent.poll() is None:
                time.sleep(0.05)
            if whom == "torchrun":
                agent.send_signal(signal.SIGINT)
                return
            ranks = [p for p in psutil.Process(agent.pid).children() if not is_helper(p)]
            ranks[-1].send_signal(signal.SIGINT)

        threading.Thread(target=when_ready, daemon=True).start()

    job = run_job(learn_until_stopped, {"folder": str(tmp_path)}, nproc=2, on_start=interrupt)
    stopped = [(tmp_path / f"stopped{index}").read_text() for index in range(2)]
    assert stopped[0] == stopped[1] == (tmp_path / "checkpoint").read_text(), str(job)
    assert int(stopped[0]) >= 5


SLURM_TASK = """
import os
import re
import torch.distributed as dist
from tests.learn.losses import make_batch, make_loss
from torchrl_dist import DistributedLoss, session

with session({"learner": -1}, timeout_s=30, process_group="gloo") as me:
    assert me.world.launcher == "slurm", me.world
    with DistributedLoss(make_loss("dqn", seed=me.me.index), timeout_s=20) as loss:
        loss(make_batch("dqn", 4, seed=me.me.index))["loss"].backward()
        gradient = sum(p.grad.double().sum().item() for p in loss.parameters())
        print(loss.check_drift(), gradient, loss.ranks.size, flush=True)
"""


def test_slurm_tasks_learn_together(tmp_path: Path) -> None:
    first, second = tasks = start_slurm_tasks(SLURM_TASK, tmp_path)
    assert [task.process.wait(90) for task in tasks] == [0, 0], tasks
    assert first.printed() == second.printed() and first.printed().split()[2] == "2"
