"""A fork of a session's member is not a member: it gets an error, and never waits."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

from tests.replay.faults import end_of, start
from tests.runtime.helpers import Counter
from torchrl_dist import (
    ConfigurationError,
    HostedReplayBuffer,
    Session,
    local_cluster,
    replay_buffer,
)
from torchrl_dist.forks import now_and_in_children

_FORKS = 20
# Threads of RPC hold a lock of Python itself when they start and end (python/cpython#112275). The
# child then hangs in ``os.fork``.
_PYTHON_MAY_HANG = sys.version_info < (3, 10, 15) or (3, 11) <= sys.version_info < (3, 11, 10)


@pytest.fixture
def job(fork_server) -> Iterator[Session]:
    roles = {"learner": 1, "owner": 1}
    with local_cluster(roles, timeout_s=30, fork_server=fork_server) as session:
        yield session


@pytest.fixture
def buffer(job: Session, tmp_path: Path) -> HostedReplayBuffer:
    owners = job.of_role("owner")
    buffer = replay_buffer(
        job, "rows", capacity=64, batch_size=8, hosts=owners, alpha=0.6, beta=0.4,
        scratch_dir=tmp_path / "rows", shortcut=False, prefetch=2,
    )  # fmt: skip
    buffer.extend(_rows())
    buffer.flush()
    return buffer


def _rows() -> TensorDict:
    return TensorDict({"key": torch.arange(16)}, [16])


def _refuse(uses: dict[str, Callable[[], object]]) -> None:
    for name, use in uses.items():
        with pytest.raises(ConfigurationError, match="forked from"):
            use()
            print(f"{name} did not raise", flush=True)


def _begins_and_ends(function: Callable[[], object]) -> bool:
    """Run it in a forked child, which must succeed; return False if Python hung before."""
    begun, begins = os.pipe()

    def child() -> None:
        os.write(begins, b".")
        function()

    pid = start(child)
    began = not _PYTHON_MAY_HANG or bool(select.select([begun], [], [], 10)[0])
    os.close(begun)
    os.close(begins)
    if began:
        assert end_of(pid, 20) == 0
    else:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return began


@pytest.mark.timeout(240)
def test_a_forked_child_is_not_a_member_and_gets_an_error(job: Session, buffer, tmp_path) -> None:
    """Fork while threads use everything that has a lock of ours.

    Torch's generator has a lock that a child inherits locked if a thread draws numbers at that
    moment. No thread does so here.
    """
    torch.set_num_threads(1)
    peer = job.of_role("owner")[0]
    counter = job.remote(peer, Counter)
    batch = buffer.sample()
    priorities = torch.rand(8)

    def update() -> None:
        sampled = buffer.sample()
        buffer.update_priority(sampled["index"], priorities, generation=sampled["index_generation"])

    def extend() -> None:
        buffer.extend(_rows())

    def child() -> None:
        assert not job.lost()
        _refuse(
            {
                "call": lambda: counter.call("add", 1),
                "submit": lambda: job.submit(peer, os.getpid),
                "barrier": job.barrier,
                "remote": lambda: job.remote(peer, Counter),
                "sample": buffer.sample,
                "extend": lambda: buffer.extend(_rows()),
                "update": lambda: buffer.update_priority(batch["index"], priorities),
                "len": lambda: len(buffer),
                "read": lambda: buffer[:],
                "empty": buffer.empty,
                "save": lambda: buffer.dumps(tmp_path / "saved"),
                "flush": buffer.flush,
                "another one": lambda: replay_buffer(
                    job, "more", capacity=8, batch_size=8, hosts=(peer,)
                ),
            }
        )
        job.close()  # as the end of the block would

    uses = (lambda: counter.call("add", 1), lambda: job.submit(peer, os.getpid).result(), update,
            extend)  # fmt: skip
    stop, errors = threading.Event(), []

    def hammer(use: Callable[[], object]) -> None:
        try:
            while not stop.is_set():
                use()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=hammer, args=(use,), daemon=True) for use in uses]
    for thread in threads:
        thread.start()
    try:
        hung = sum(not _begins_and_ends(child) for _ in range(_FORKS))
    finally:
        stop.set()
        for thread in threads:
            thread.join(30)
    assert not errors
    assert hung <= _FORKS // 10
    assert counter.call("add", 1) > 1 and len(buffer) == 64  # the parent's session continues


@pytest.mark.timeout(120)
def test_a_forked_child_has_no_part_in_what_was_drawn_ahead(buffer) -> None:
    """Its futures have locks of their own, which other threads also hold for a moment."""
    buffer.sample()
    ahead = [future for round_ in buffer.sampler._source._rounds for future in round_.futures]
    assert ahead
    held, release = threading.Event(), threading.Event()

    def hold() -> None:
        with contextlib.ExitStack() as stack:
            for future in ahead:
                stack.enter_context(future._condition)
            held.set()
            release.wait(60)

    thread = threading.Thread(target=hold, daemon=True)
    thread.start()
    assert held.wait(10)
    try:
        assert end_of(start(_refuse, {"empty": buffer.empty, "sample": buffer.sample}), 20) == 0
    finally:
        release.set()
        thread.join(10)
    assert len(buffer.sample()) == 8


def test_a_failed_renewal_is_reported_and_the_others_still_run(capfd) -> None:
    class Owner:
        pid = 0

        def renew(self) -> None:
            self.pid = os.getpid()

        def fail(self) -> None:
            if self.pid:
                raise ValueError("cannot be renewed")

    first, second = Owner(), Owner()
    now_and_in_children(first, Owner.fail)
    now_and_in_children(second, Owner.renew)
    first.pid = 1

    def child() -> None:
        assert second.pid == os.getpid()

    assert end_of(start(child), 20) == 0
    assert "cannot be renewed" in capfd.readouterr().err
