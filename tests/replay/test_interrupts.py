"""A stopped lock holder, and Ctrl-C at every point: no row is lost, and no lock stays held."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torchrl.data import TensorDictReplayBuffer

from tests.replay.faults import (
    assert_lock_is_free,
    assert_sound,
    at_point,
    attach,
    end_of,
    forked,
    interrupted_at,
    is_stopped,
    own_claims,
    priority_of,
    rows_of,
    run_forked,
    torn_rows,
    wait_until,
)
from tests.spawn import stop_self
from torchrl_dist.errors import DeadlineError, DirectoryError
from torchrl_dist.replay import SharedReplayBuffer
from torchrl_dist.replay.node.lock import is_held
from torchrl_dist.replay.node.tables import CLAIM_COUNT, Word

_CAPACITY = 80


@contextlib.contextmanager
def _probe(folder: Path) -> Iterator[Callable[[], bool]]:
    """Tells whether the lock is free, as another process sees it."""
    ours, theirs = socket.socketpair()

    def answer() -> None:
        fd = os.open(folder / "lock", os.O_RDWR)
        while theirs.recv(1):
            held = is_held(fd, 0, 2)
            theirs.send(b"n" if held else b"y")

    def is_free() -> bool:
        ours.send(b"?")
        return ours.recv(1) == b"y"

    with ours, theirs, forked(answer):
        ours.settimeout(20)
        yield is_free


def _update(rb: TensorDictReplayBuffer) -> None:
    batch = rb.sample()
    batch["td_error"] = priority_of(batch["key"])
    rb.update_tensordict_priority(batch)


OPERATIONS: dict[str, Callable[[TensorDictReplayBuffer], object]] = {
    "extend": lambda rb: rb.extend(rows_of(range(1000, 1010))),
    "sample and update": _update,
    "write in place": lambda rb: rb.storage.set(torch.tensor([3, 4, 30]), rows_of(range(3))),
    "read": lambda rb: rb[torch.arange(_CAPACITY)],
}


@pytest.mark.usefixtures("kept_as")
@pytest.mark.parametrize("operation", OPERATIONS)
def test_ctrl_c_at_any_point_loses_and_holds_nothing(folder: Path, operation: str, request) -> None:
    torch.set_num_threads(1)
    rb = attach(folder, _CAPACITY)
    rb.extend(rows_of(range(_CAPACITY)))
    interrupts = held = point = 0
    with _probe(folder) as lock_is_free:
        while True:
            point += 1
            before = rb.write_count
            keys = rb[:]["key"]
            try:
                with interrupted_at(point) as points:
                    OPERATIONS[operation](rb)
            except KeyboardInterrupt:
                interrupts += 1
            held += not lock_is_free()
            # the thread goes on: whatever it held is free with its next operation
            rb.sample()
            rows = rb[:]
            assert lock_is_free()
            if operation in ("extend", "write in place"):
                new = int((rows["key"] >= 1000).sum())
                if operation == "extend":  # all of the reservation or nothing
                    assert new in (0, 10), f"at point {point}"
                    assert rb.write_count == before + new
            else:
                assert (rows["key"] == keys).all() and rb.write_count == before
            assert torn_rows(rows) == 0
            index = rb.extend(rows_of(range(_CAPACITY)))
            assert own_claims(rb.storage.directory) == 0
            assert len(rb) == _CAPACITY and len(set(index.tolist())) == _CAPACITY
            if points() < point:
                break
        assert lock_is_free()
    assert_sound(rb)
    assert interrupts > 30
    request.node.user_properties += [("interrupts", interrupts), ("held", held)]
    assert held <= 2  # on entering the ``__exit__`` of the lock, see there
    rb.storage.close()


HANDLERS: dict[str, Callable[[TensorDictReplayBuffer], object]] = {
    "extend": lambda rb: rb.extend(rows_of(range(2000, 2004))),
    "sample and update": _update,
    "save": lambda rb: rb.storage.state_dict(),
}


@pytest.mark.usefixtures("kept_as")
@pytest.mark.parametrize("handler", HANDLERS)
def test_a_signal_handler_that_uses_the_buffer_at_any_point_harms_nothing(
    folder: Path, handler: str
) -> None:
    """The handler's operation works or is refused. No other process enters the lock of the
    interrupted thread. The interrupted operation ends as usual."""
    torch.set_num_threads(1)
    rb = attach(folder, _CAPACITY, kind=SharedReplayBuffer, timeout_s=5)
    rb.extend(rows_of(range(_CAPACITY)))
    counts = {"done": 0, "refused": 0}

    with _probe(folder) as lock_is_free:

        def handle() -> None:
            free = lock_is_free()
            try:
                HANDLERS[handler](rb)
                counts["done"] += 1
            except DirectoryError as error:
                assert "signal handler" in str(error)
                counts["refused"] += 1
            assert lock_is_free() == free

        for operation, operate in OPERATIONS.items():
            point = 0
            while True:
                point += 5 + point % 3
                done, before = counts["done"], rb.write_count
                with at_point(point, handle) as points:
                    operate(rb)
                assert lock_is_free()
                written = {"extend": 10, "write in place": 3}.get(operation, 0)
                written += 4 * (handler == "extend" and counts["done"] > done)
                assert rb.write_count == before + written
                assert own_claims(rb.storage.directory) == 0
                rows = rb[:]
                assert torn_rows(rows) == 0 and len(rows) == _CAPACITY
                if points() < point:
                    break
                rb.extend(rows_of(range(_CAPACITY)))
    assert counts["done"] > 10 and counts["refused"] > 4
    assert_sound(rb)
    rb.storage.close()


INTERRUPTED: dict[str, Callable[[TensorDictReplayBuffer], object]] = {
    # with no lock of TorchRL's buffer, which another thread can so have
    "write": lambda rb: rb.writer.extend(rows_of(range(8), 1024)),
    "update": lambda rb: rb.sampler.update_priority(torch.arange(8), 0.5),
    "draw": lambda rb: rb.sampler.sample(rb.storage, 8),
    "sample": lambda rb: rb.sample(),
}


@pytest.mark.parametrize(
    ("kind", "prefetch"),
    [(SharedReplayBuffer, None), (SharedReplayBuffer, 2), (TensorDictReplayBuffer, None)],
    ids=["ours", "ours-prefetch", "stock"],
)
def test_a_handler_does_not_wait_for_a_thread_that_waits_for_what_it_interrupted(
    folder: Path, kind: type[TensorDictReplayBuffer], prefetch: int | None
) -> None:
    """At any point of an operation, another thread samples, and then the handler samples. The
    other thread holds the buffer's lock, and may wait for that of the directory or of a table."""
    ours = kind is SharedReplayBuffer

    def program() -> None:
        # TorchRL's buffer takes its lock before we are asked: there the other thread gives up
        timeout_s = 60 if ours else 0.05
        rb = attach(
            folder, _CAPACITY, kind=kind, timeout_s=timeout_s, batch_size=8, prefetch=prefetch
        )
        rb.extend(rows_of(range(_CAPACITY), 1024))  # a leaf of a batch is large enough to be pooled
        counts = {"done": 0, "refused": 0, "late": 0}
        threads: list[threading.Thread] = []

        def beside() -> None:
            try:
                assert torn_rows(rb.sample()) == 0
            except DeadlineError:
                counts["late"] += 1

        def handle() -> None:
            threads.append(threading.Thread(target=beside, daemon=True))
            threads[-1].start()
            threads[-1].join(0.02)
            try:
                assert torn_rows(rb.sample()) == 0
                counts["done"] += 1
            except DirectoryError as error:
                assert "signal handler" in str(error)
                counts["refused"] += 1

        for operate in INTERRUPTED.values():
            point = 0
            while True:
                point += 6 + point % 3
                with at_point(point, handle) as points:
                    operate(rb)
                threads.pop().join(30) if threads else None
                if points() < point:
                    break
        assert counts["done"] > 8 and counts["refused"] > 4, counts
        assert not (ours and counts["late"]), counts
        assert_sound(rb)

    assert run_forked(program, timeout_s=60) == 0


def test_a_handler_waits_in_bounds_for_rows_that_it_interrupted_the_writing_of(
    folder: Path,
) -> None:
    torch.set_num_threads(1)
    rb = attach(folder, 8, timeout_s=0.02, batch_size=4)
    rb.extend(rows_of(range(8)))
    refused: list[str] = []

    def handle() -> None:
        for use in (rb.sample, lambda: rb.writer.extend(rows_of(range(10, 11)))):
            with contextlib.suppress(DirectoryError):  # it has the lock
                try:
                    use()
                except DeadlineError:
                    refused.append(use.__name__)

    point = 0
    while True:
        point += 1
        with at_point(point, handle) as points:
            rb.storage.write_at(torch.arange(8), rows_of(range(8)))
        assert torn_rows(rb[:]) == 0 and len(rb) == 8
        if points() < point:
            break
    assert set(refused) == {"sample", "<lambda>"}
    assert_sound(rb)
    rb.storage.close()


def test_a_signal_handler_that_closes_the_buffer_at_any_point_tears_no_row(folder: Path) -> None:
    """The interrupted operation ends as usual or with an error. A write is never split."""
    torch.set_num_threads(1)
    other = attach(folder, _CAPACITY)
    other.extend(rows_of(range(_CAPACITY)))
    other.storage.close()
    outcomes = {"closed": 0, "refused": 0}
    for operate in OPERATIONS.values():
        point = 0
        while True:
            point += 7 + point % 3
            rb = attach(folder, _CAPACITY, timeout_s=5)
            directory = rb.storage.directory

            def handle(rb=rb, directory=directory) -> None:
                try:
                    rb.storage.close()
                    outcomes["closed"] += 1
                except DirectoryError as error:
                    assert "signal handler" in str(error)
                    outcomes["refused"] += 1
                    assert directory.member in directory.live_members()

            try:
                with at_point(point, handle) as points:
                    operate(rb)
            except DirectoryError as error:
                assert "was closed in this process" in str(error)
            rb.storage.close()
            again = attach(folder, _CAPACITY, timeout_s=5)
            assert torn_rows(again[:]) == 0
            assert not again.storage.directory.claims[:, CLAIM_COUNT].any()
            assert_sound(again)
            again.extend(rows_of(range(_CAPACITY)))
            again.storage.close()
            if points() < point:
                break
    assert min(outcomes.values()) > 4, outcomes


def test_processes_that_wait_for_a_stopped_holder_name_it_in_time_and_go_on_afterwards(
    folder: Path,
) -> None:
    torch.set_num_threads(1)
    rb = attach(folder, _CAPACITY, timeout_s=0.6)
    rb.extend(rows_of(range(_CAPACITY)))
    ours, theirs = socket.socketpair()

    def hold() -> None:
        mine = attach(folder, _CAPACITY)
        with mine.storage.directory.lock():
            stop_self()
        mine.extend(rows_of(range(100, 110)))
        theirs.send(b"d")
        time.sleep(30)

    def wait_in_vain(holder: int) -> None:
        start = time.monotonic()
        message = ""
        try:
            rb.extend(rows_of(range(4)))  # inherited: joins as a member of its own
        except DeadlineError as error:
            message = str(error)
        named = f"held by process {holder}" in message
        in_time = 0.5 < time.monotonic() - start < 10
        theirs.send(b"y" if named and in_time else b"n")
        assert go.recv(1)
        rb.extend(rows_of(range(200, 204)))
        theirs.send(b"d")
        time.sleep(30)

    go, say_go = socket.socketpair()
    with contextlib.ExitStack() as stack:
        for end in (ours, theirs, go, say_go):
            stack.enter_context(end)
        ours.settimeout(30)
        holder = stack.enter_context(forked(hold))
        wait_until(lambda: is_stopped(holder))
        for _ in range(3):
            stack.enter_context(forked(wait_in_vain, holder))
        assert [ours.recv(1) for _ in range(3)] == [b"y"] * 3
        with pytest.raises(DeadlineError, match=f"held by process {holder}"):
            rb.sample()
        os.kill(holder, signal.SIGCONT)
        assert ours.recv(1) == b"d"
        say_go.send(b"ggg")
        assert [ours.recv(1) for _ in range(3)] == [b"d"] * 3
        assert len(rb) == _CAPACITY and rb.write_count == _CAPACITY + 10 + 12
    assert_lock_is_free(rb.storage.directory)
    assert_sound(rb)
    rb.storage.close()


def test_the_next_use_releases_a_lock_that_an_interrupt_left_even_while_others_wait(
    folder: Path,
) -> None:
    rb = attach(folder, _CAPACITY, timeout_s=5)
    rb.extend(rows_of(range(_CAPACITY)))
    directory = rb.storage.directory

    def interrupted() -> None:
        directory.lock().__enter__()  # and never left

    interrupted()
    with forked(lambda: rb.extend(rows_of(range(10)))) as waiting:
        wait_until(lambda: bool(directory.words[Word.WAITING]))
        rb.extend(rows_of(range(20)))
        assert end_of(waiting) == 0
    assert rb.write_count == _CAPACITY + 30
    rb.storage.close()
