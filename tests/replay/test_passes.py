"""Sampling without replacement: each row at most once per pass, over all processes."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torchrl.data import ReplayBuffer

from tests.replay.conftest import make_rows
from torchrl_dist import (
    DeadlineError,
    SharedReplayBuffer,
    SharedSamplerWithoutReplacement,
)

_FORK = multiprocessing.get_context("fork")


@pytest.fixture
def make(make_buffer) -> Callable[..., ReplayBuffer]:
    def make(capacity: int = 64, drop_last: bool = False, shuffle: bool = True, **options):
        sampler = SharedSamplerWithoutReplacement(drop_last, shuffle)
        return make_buffer(capacity, sampler=sampler, **{"batch_size": 8, **options})

    return make


def ids(buffer: ReplayBuffer, batches: int) -> list[int]:
    return [number for _ in range(batches) for number in buffer.sample()["id"].tolist()]


def test_without_shuffle_rows_come_by_their_slots_and_a_generator_repeats_an_order(make) -> None:
    rb = make(shuffle=False)
    rb.extend(make_rows(range(20)))
    assert ids(rb, 3) == list(range(20))
    rb = make()
    orders = []
    for _ in range(2):
        rb.set_rng(torch.Generator().manual_seed(3))
        orders.append(ids(rb, 3))
    assert orders[0] == orders[1] and sorted(orders[0]) == list(range(20))


def test_overwritten_rows_are_left_out_and_new_ones_wait_for_the_next_pass(make) -> None:
    rb = make(64)
    rb.extend(make_rows(range(60)))
    drawn = ids(rb, 3)
    rb.extend(make_rows(range(100, 124)))  # four in free slots, twenty over 0 to 19
    left = set(range(20, 60)) - set(drawn)
    batches = -(-len(left) // 8)
    rest = ids(rb, batches)
    assert len(rest) == len(left) and set(rest) == left
    assert rb.sampler.ran_out
    assert sorted(ids(rb, 8)) == [*range(20, 60), *range(100, 124)]


def test_rows_that_change_while_they_are_copied_are_not_returned(make, monkeypatch) -> None:
    rb = make(64, batch_size=16)
    rb.extend(make_rows(range(64)))
    storage, written, plain = rb.storage, [], rb.storage._gather

    def overwrite_first(slots: np.ndarray) -> list[np.ndarray]:
        leaves = plain(slots)
        if len(written) < 40 and storage.directory.words[0] == 0 and slots.size:
            number = 1000 + len(written)
            written.append(int(slots[0]))
            if len(written) % 10:  # under the lock no process could
                storage.write_at(torch.tensor([written[-1]]), make_rows(range(number, number + 1)))
        return leaves

    monkeypatch.setattr(storage, "_gather", overwrite_first)
    monkeypatch.setattr("torchrl_dist.replay.parts.storage.REDRAWS", 1000)  # so it holds no lock
    found = ids(rb, 2)
    assert written and len(set(found)) == len(found) and max(found) < 64
    gone = {slot for count, slot in enumerate(written, 1) if count % 10}
    assert not gone & set(found)


def _draw_until_the_pass_is_over(rb: ReplayBuffer, file: Path, deadly_batch: int | None) -> None:
    with open(file, "a", buffering=1) as out:
        for count, batch in enumerate(rb):
            if count == deadly_batch:
                os.kill(os.getpid(), signal.SIGKILL)
            out.write(" ".join(map(str, batch["id"].tolist())) + "\n")
            if rb.sampler._passes.number > 1:  # of which the first batch came too late to stop
                break


@pytest.mark.parametrize("kill", [False, True])
def test_processes_share_a_pass_also_if_one_is_killed(make, tmp_path: Path, kill: bool) -> None:
    rb = make(4096, kind=SharedReplayBuffer, batch_size=16)
    rb.extend(make_rows(range(4096)))
    files = [tmp_path / str(number) for number in range(3)]
    processes = [
        _FORK.Process(
            target=_draw_until_the_pass_is_over, args=(rb, file, 5 if kill and not number else None)
        )
        for number, file in enumerate(files)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [-9 if kill else 0, 0, 0]
    lines = [[int(word) for word in line.split()] for f in files for line in f.open()]
    # a process that found nothing left began the next pass, with its first batches
    over = len(lines) * 16 - 4096 + (16 if kill else 0)
    assert 0 <= over <= 3 * 16
    counts = np.bincount(np.concatenate(lines), minlength=4096)
    assert (counts > 1).sum() <= over and (counts == 0).sum() <= (16 if kill else 0)
    assert counts.max() <= 2


def test_a_restarted_job_goes_on_with_the_pass(make) -> None:
    rb = make(64, keep=True)
    rb.extend(make_rows(range(48)))
    first = ids(rb, 2)
    rb.storage.close()
    again = make(64, resume=True)
    assert sorted(first + ids(again, 4)) == list(range(48))
    again.storage.directory.words[12] = 0  # KEEP
    folder = Path(again.storage.scratch_dir)
    again.storage.close()
    assert not folder.exists()


@contextlib.contextmanager
def writing(buffer: ReplayBuffer, count: int, seconds: float) -> Iterator[None]:
    """In another thread, reserve rows at once, and publish them after at most ``seconds``."""
    cursor, begun, end = buffer.storage._cursor, threading.Event(), threading.Event()

    def write() -> None:
        reservation = cursor.reserve(count)
        begun.set()
        end.wait(seconds)
        cursor.publish(reservation)

    thread = threading.Thread(target=write)
    thread.start()
    assert begun.wait(10)
    yield
    end.set()
    thread.join()


def test_a_full_batch_waits_for_rows_that_are_written_anew(make) -> None:
    buffer = make(drop_last=True, batch_size=60)
    buffer.extend(make_rows(range(64)))
    with writing(buffer, 8, seconds=0.3):
        assert len(buffer) == 56
        assert len(buffer.sample()) == 60


def test_a_full_batch_of_rows_that_no_process_writes_is_an_error(make) -> None:
    buffer = make(drop_last=True, timeout_s=0.5)
    buffer.extend(make_rows(range(1)))
    buffer.storage.set(torch.tensor([63]), make_rows([63]))  # in use as far as there, but 2 rows
    assert buffer.storage.directory.high == 64
    with pytest.raises(RuntimeError, match="a batch has 8 rows and the buffer only 2"):
        buffer.sample()
    buffer.extend(make_rows(range(1, 8)))
    with writing(buffer, 4, seconds=60):  # nor rows whose writer does not finish
        assert len(buffer.sample()) == 8
        with pytest.raises(DeadlineError, match="waited 0.5 s for 20 published rows"):
            buffer.sample(20)


@pytest.mark.parametrize("drop_last", [False, True])
def test_a_batch_of_nothing_is_of_no_pass(make, drop_last: bool) -> None:
    buffer = make(drop_last=drop_last, batch_size=4)
    with pytest.raises(RuntimeError):
        buffer.sample(0)
    buffer.extend(make_rows(range(20)))
    seen = buffer.sample(8)["id"].tolist()
    assert buffer.sample(0).batch_size == (0,)
    seen += [i for _ in range(3) for i in buffer.sample(4)["id"].tolist()]
    assert sorted(seen) == list(range(20)) and buffer.sampler._passes.number == 1
    with pytest.raises(ValueError):
        buffer.sample(-1)


@pytest.mark.parametrize("prefetch", [0, 3])
@pytest.mark.parametrize("drop_last", [False, True])
def test_an_iteration_ends_with_its_pass_if_another_process_takes_the_last_row(
    make, monkeypatch, prefetch: int, drop_last: bool
) -> None:
    """The other process takes it after this process has seen that rows are left."""
    options = {"kind": SharedReplayBuffer, "drop_last": drop_last, "batch_size": 4}
    one, other = make(prefetch=prefetch, **options), make(**options)
    one.extend(make_rows(range(42)))
    monkeypatch.setattr(
        SharedSamplerWithoutReplacement, "ran_out", property(lambda self: False, lambda *_: None)
    )
    seen: list[int] = []
    for number, batch in enumerate(one):
        seen += batch["id"].tolist()
        if number == 3:
            with other.sampler.one_pass(), contextlib.suppress(RuntimeError):
                while True:
                    seen += other.sample()["id"].tolist()
    assert len(seen) == len(set(seen)) and len(seen) in ((40,) if drop_last else (42,))
    assert one.sampler._passes.number == 1
    assert len(one.sample()) == 4 and one.sampler._passes.number == 2  # the next one is begun


def test_after_leaving_an_iteration_the_caller_can_sample(make) -> None:
    buffer = make(kind=SharedReplayBuffer, prefetch=2, batch_size=4)
    buffer.extend(make_rows(range(20)))
    for _ in range(3):
        for batch in buffer:
            assert len(batch) == 4
            break
        assert [len(buffer.sample()) for _ in range(9)] == [4] * 9


def test_an_iteration_samples_as_the_users_class_does(make) -> None:
    class Doubled(SharedReplayBuffer):
        def sample(self, *args, **kwargs):
            batch = super().sample(*args, **kwargs)
            batch["obs"] *= 2
            return batch

    buffer = make(kind=Doubled, batch_size=4)
    buffer.extend(make_rows(range(10)))
    for batch in buffer:
        assert (batch["obs"][:, 0] == 2 * batch["id"]).all()
