"""Everything at the same time: writers, learners, checkpoints, kills, pauses and restarts.

Each test takes a few seconds, or several minutes with ``TORCHRL_DIST_LONG_TESTS=1``.
``TORCHRL_DIST_SOAK_S`` sets another number of seconds.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import mmap
import os
import random
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.replay.faults import (
    LONG,
    assert_lock_is_free,
    assert_sound,
    attach,
    priority_of,
    rows_of,
    start,
    torn_rows,
    wait_until,
)
from tests.replay.hosted_helpers import write_by_rpc
from torchrl_dist import (
    HostedReplayBuffer,
    Peer,
    PeerLostError,
    RateLimiter,
    Session,
    local_cluster,
    replay_buffer,
)
from torchrl_dist.replay.inspection import inspect
from torchrl_dist.replay.node.tables import Word
from torchrl_dist.replay.row import rows
from torchrl_dist.replay.saving.disk import MANIFEST, read_dump
from torchrl_dist.runtime.forkserver import ForkServer

SECONDS = float(os.environ.get("TORCHRL_DIST_SOAK_S", 200 if LONG else 5))
CAPACITY = 2048
WIDTH = 256
LIVES = 2
HANG_S = 30.0
WRITERS, LEARNERS, SAVERS = 3, 2, 2
BATCH, LONGEST_EXTEND = 64, 40
LIMITER = RateLimiter(256, samples_per_insert=2.0, error_buffer=1024)
SEQUENCE_BITS = 40
GROWTH = 1.1
_SLACK_BYTES = 16 * 2**20  # above all the rings of recent handles, which fill up once


def shared(*shape: int) -> np.ndarray:
    """Return an int64 array of zeros that forked children share."""
    return np.frombuffer(mmap.mmap(-1, 8 * int(np.prod(shape))), np.int64).reshape(shape)


class Log:
    """The actions of the processes, in memory that outlives these processes."""

    def __init__(self) -> None:
        self.progress = shared(WRITERS + LEARNERS + SAVERS)
        self.sequence = shared(WRITERS)
        """Number of the next row; each is used once."""
        self.key = shared(WRITERS, CAPACITY)
        self.generation = shared(WRITERS, CAPACITY)
        """For each slot, the row that a writer knows to have published there."""
        self.rows_seen = shared(LEARNERS)
        self.rows_saved = shared(SAVERS)


def write(folder: Path, log: Log, number: int, place: int) -> None:
    rb = attach(folder, CAPACITY)
    randomness = random.Random()
    while True:
        count = randomness.randint(1, LONGEST_EXTEND)
        first = int(log.sequence[number])
        log.sequence[number] += count
        key = (number << SEQUENCE_BITS) + np.arange(first, first + count)
        slots = rb.extend(rows_of(key, WIDTH)).numpy()
        generation = rb.storage.generations_of(torch.from_numpy(slots)).numpy()
        now = rb.storage._storage["key"].numpy()[slots] == key  # else overwritten already
        mine = slots[now & (generation > 0)]
        log.key[number, mine] = key[now & (generation > 0)]  # first: a kill may come in between
        log.generation[number, mine] = generation[now & (generation > 0)]
        log.progress[place] += 1


def learn(folder: Path, log: Log, number: int, place: int) -> None:
    rb = attach(folder, CAPACITY, uniform=number == 1)
    while True:
        batch = rb.sample()
        assert torn_rows(batch) == 0
        log.rows_seen[number] += len(batch)
        batch["td_error"] = priority_of(batch["key"])
        rb.update_tensordict_priority(batch)
        log.progress[place] += 1


def save(folder: Path, log: Log, number: int, place: int) -> None:
    rb = attach(folder, CAPACITY)
    words = rb.storage.directory.words
    target = folder.with_name(f"{folder.name}-saved-{number}")
    while True:
        tickets, published = words[Word.CURSOR], words[Word.LENGTH]
        rb.storage.dumps(target)
        overwritten = words[Word.CURSOR] - tickets  # all, if this process was paused meanwhile
        saved = check_saved(target)
        assert saved >= published - overwritten
        log.rows_saved[number] += saved
        log.progress[place] += 1
        time.sleep(0.02)


def check_saved(target: Path) -> int:
    """Check that saved rows are whole, unique and of this test. Return their number."""
    keys = []
    for saved in read_dump(target)[0]:
        if saved is None:
            continue  # of a shard that was lost
        assert saved.head.spec is not None
        spec = saved.head.spec
        data = rows.build(
            rows.tensors([each[:] for each in saved.columns], spec), spec, (saved.leaf.size,)
        )
        assert torn_rows(data) == 0
        assert (saved.leaf > 0).all() and (saved.versions % 2 == 0).all()
        keys += data["key"].tolist()
    assert len(set(keys)) == len(keys)
    return len(keys)


@dataclasses.dataclass
class Worker:
    """One place in the job, whose process the driver restarts."""

    name: str
    function: Callable[..., None]
    spared: bool
    """Never killed within a life, so that its memory can be watched."""
    pid: int = 0
    resume_at: float = 0.0
    """When it must go on; 0 if it is not paused."""
    progress: int = -1
    moved_at: float = 0.0
    footprint: tuple[int, int] = (0, 0)


class Driver:
    """Starts, kills and pauses the processes, and checks that the job continues."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log = Log()
        self.random = random.Random()
        self.counts = dict.fromkeys(("kills", "learners killed", "pauses", "restarts", "jobs"), 0)
        roles = [("writer", write, WRITERS), ("learner", learn, LEARNERS), ("saver", save, SAVERS)]
        self.workers = [
            Worker(f"{name} {number}", function, spared=number == 0)
            for name, function, count in roles
            for number in range(count)
        ]

    def start(self, worker: Worker) -> None:
        place = self.workers.index(worker)
        number = int(worker.name.split()[1])
        worker.pid = start(worker.function, self.folder, self.log, number, place)
        worker.resume_at, worker.moved_at = 0.0, time.monotonic()
        self.counts["restarts"] += 1

    def kill(self, worker: Worker) -> None:
        os.kill(worker.pid, signal.SIGKILL)
        status = os.waitstatus_to_exitcode(os.waitpid(worker.pid, 0)[1])
        assert status == -signal.SIGKILL, f"{worker.name} had ended with {status}"
        worker.pid = 0
        self.counts["kills"] += 1
        self.counts["learners killed"] += worker.function is learn

    def pause(self, worker: Worker) -> None:
        os.kill(worker.pid, signal.SIGSTOP)
        worker.resume_at = time.monotonic() + self.random.random() * 0.3
        self.counts["pauses"] += 1

    def live(self, seconds: float) -> None:
        """Run one life of the job, from the start to the death of all processes."""
        self.counts["jobs"] += 1
        for worker in self.workers:
            self.start(worker)
        begin = time.monotonic()
        measured = False
        while (elapsed := time.monotonic() - begin) < seconds:
            time.sleep(self.random.random() * 0.1)
            self.hurt()
            self.watch()
            if not measured and elapsed > seconds / 3:
                self.measure(first=True)
                measured = True
        for worker in self.workers:
            if worker.resume_at:
                os.kill(worker.pid, signal.SIGCONT)
                worker.resume_at = 0.0
        self.measure(first=False)
        for worker in self.workers:
            self.kill(worker)

    def hurt(self) -> None:
        now = time.monotonic()
        for worker in self.workers:
            if worker.resume_at and now > worker.resume_at:
                os.kill(worker.pid, signal.SIGCONT)
                worker.resume_at, worker.moved_at = 0.0, now
        victims = [worker for worker in self.workers if not worker.spared]
        chance = self.random.random()
        if chance < 0.4:
            killed = [self.random.choice(victims)]
        elif chance < 0.5:  # several at once; the others may have to repair
            killed = self.random.sample(victims, 2)
        else:
            killed = []
            running = [worker for worker in self.workers if not worker.resume_at]
            if running:
                self.pause(self.random.choice(running))
        for worker in killed:
            self.kill(worker)
        if killed and chance < 0.2:  # takes a moment to be started again
            time.sleep(self.random.random() * 0.1)
        for worker in killed:
            self.start(worker)

    def watch(self) -> None:
        """Check that every process is alive and was active a short while ago."""
        now = time.monotonic()
        for place, worker in enumerate(self.workers):
            ended, status = os.waitpid(worker.pid, os.WNOHANG)
            assert not ended, f"{worker.name} ended by itself, with {status}: see its traceback"
            progress = int(self.log.progress[place])
            if progress != worker.progress or worker.resume_at:
                worker.progress, worker.moved_at = progress, now
            assert now - worker.moved_at < HANG_S, f"{worker.name} hangs: {inspect(self.folder)}"
        if self.random.random() < 0.1:
            json.dumps(inspect(self.folder))

    def measure(self, *, first: bool) -> None:
        """Check that memory and open files of processes that are never killed do not grow."""
        for worker in self.workers:
            if not worker.spared:
                continue
            if first:
                worker.footprint = footprint(worker.pid)
            else:
                assert_no_growth(worker.name, worker.footprint, footprint(worker.pid))

    def close(self) -> None:
        for worker in self.workers:
            if worker.pid:
                with contextlib.suppress(ProcessLookupError, ChildProcessError):
                    os.kill(worker.pid, signal.SIGKILL)
                    os.waitpid(worker.pid, 0)


def resume(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # it was killed meanwhile
        os.kill(pid, signal.SIGCONT)


def footprint(pid: int) -> tuple[int, int]:
    """Return the bytes of the process's own memory, and the number of its open files."""
    return anonymous_bytes(pid), len(os.listdir(f"/proc/{pid}/fd"))


def assert_no_growth(name: str, first: tuple[int, int], now: tuple[int, int]) -> None:
    assert now[0] < GROWTH * first[0] + _SLACK_BYTES, f"{name} grew from {first} bytes, files {now}"
    # a saver may have the files of one checkpoint open
    assert now[1] <= first[1] + 16, f"{name}: {first} to {now} bytes, files"


def anonymous_bytes(pid: int) -> int:
    """Return the bytes of the process's own memory, without shared rows and files."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Anonymous:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no line for anonymous memory")


def assert_nothing_published_is_lost(folder: Path, log: Log) -> int:
    """Check that each row that a writer knew to be published is there, or was overwritten.

    Returns the number of rows that were found.
    """
    rb = attach(folder, CAPACITY)
    directory = rb.storage.directory
    versions = directory.versions.copy()
    keys = rb.storage._storage["key"].numpy().copy()
    found = 0
    for number in range(WRITERS):
        known = 2 * log.generation[number]
        assert (versions >= known).all()
        there = (versions == known) & (known > 0)
        assert (keys[there] == log.key[number, there]).all()
        found += int(there.sum())
    visible = (versions & 1 == 0) & (versions > 0)
    assert np.unique(keys[visible]).size == visible.sum()
    for number in range(WRITERS):
        assert (
            keys[visible & (keys >> SEQUENCE_BITS == number)] & (2**SEQUENCE_BITS - 1)
            < log.sequence[number]
        ).all()
    assert_lock_is_free(directory)
    assert_sound(rb)
    rb.storage.close()
    return found


def assert_the_limiter_held(folder: Path, limiter: RateLimiter, driver: Driver) -> None:
    """The counts are in the range, and all that was counted as sampled was returned, except what
    learners had in hand when they were killed."""
    rb = attach(folder, CAPACITY)
    counts = rb.storage.limiter_counts
    rb.storage.close()
    lower, upper = limiter.range
    under_way = WRITERS * LONGEST_EXTEND * limiter.samples_per_insert
    first = CAPACITY * limiter.samples_per_insert  # a buffer that is empty takes any extend
    assert lower <= limiter.difference(counts) <= max(upper + under_way, first)
    returned = int(driver.log.rows_seen.sum())
    assert returned <= counts.samples <= returned + BATCH * driver.counts["learners killed"]


@pytest.fixture
def driver(folder: Path) -> Iterator[Driver]:
    torch.set_num_threads(1)
    found = Driver(folder)
    yield found
    found.close()


def names_in(folder: Path) -> set[str]:
    return {str(each.relative_to(folder)) for each in folder.rglob("*")}


@pytest.mark.timeout(int(SECONDS * 3 + 120))
@pytest.mark.usefixtures("kept_as")
@pytest.mark.parametrize("limiter", [None, LIMITER] if LONG else [LIMITER], ids=str)
def test_soak(folder: Path, driver: Driver, limiter: RateLimiter | None, request) -> None:
    seed = random.randrange(2**32)
    driver.random.seed(seed)
    rb = attach(folder, CAPACITY, limiter=limiter)
    rb.extend(rows_of((WRITERS << SEQUENCE_BITS) + np.arange(CAPACITY), WIDTH))
    rb.storage.close()
    files = names_in(folder)
    found = []
    try:
        for _ in range(LIVES):
            driver.live(SECONDS / LIVES)
            # the whole job was killed: what follows is the first process of its next life
            found.append(assert_nothing_published_is_lost(folder, driver.log))
            if limiter is not None:
                assert_the_limiter_held(folder, limiter, driver)
    except BaseException:
        print(f"seed {seed}, {driver.counts}")
        raise
    assert names_in(folder) == files
    rb = attach(folder, CAPACITY)
    directory = rb.storage.directory
    assert directory.live_members() == [directory.member]
    for number in range(SAVERS):
        target = folder.with_name(f"{folder.name}-saved-{number}")
        check_saved(target)
        rb.storage.dumps(target)  # clears what a killed one left
        assert {each.name[:5] for each in target.iterdir()} == {MANIFEST[:5], "rows-"}
        assert len(list(target.iterdir())) == 2
    for first in range(0, CAPACITY, 128):
        while limiter and limiter.missing_samples(rb.storage.limiter_counts):
            rb.sample()
        rb.extend(rows_of(range(first, first + 128), WIDTH))
    assert len(rb) == CAPACITY  # no slot is lost
    wait_until(lambda: not directory.claims[:, 0].any())
    assert_sound(rb)
    log, counters = driver.log, directory.counters
    figures = {
        "seconds": SECONDS,
        **driver.counts,
        "rows_written": int(log.sequence.sum()),
        "rows_sampled": int(log.rows_seen.sum()),
        "checkpoints": int(log.progress[-SAVERS:].sum()),
        "rows_saved": int(log.rows_saved.sum()),
        "known_rows_found": found,
        "counters": counters,
    }
    print(f"seed {seed}: {json.dumps(figures)}")
    request.node.user_properties += list(figures.items())
    assert driver.counts["kills"] > LIVES * len(driver.workers) and driver.counts["pauses"]
    assert counters["repairs"] >= LIVES
    assert min(found) > CAPACITY // 2 and (log.progress > 2).all()
    rb.storage.close()


@pytest.fixture(autouse=True)
def no_checkpoint_is_left(folder: Path) -> Iterator[None]:
    yield
    for number in range(SAVERS):
        shutil.rmtree(folder.with_name(f"{folder.name}-saved-{number}"), ignore_errors=True)


# --- rows at other processes ---------------------------------------------------------------------


class Service:
    """A job over hosts. This process learns and saves, and kills and pauses the others."""

    def __init__(self, folder: Path, fork_server: ForkServer, shards: int) -> None:
        self.folder, self.shards = folder, shards
        self.target = folder.with_name(f"{folder.name}-saved-0")
        self.fork_server = fork_server
        self.random = random.Random()
        names = ("kills", "pauses", "checkpoints", "rows sampled", "rows written", "jobs")
        self.counts = dict.fromkeys(names, 0)
        self.kept: dict[int, tuple[int, int]] = {}
        """Generation and key of each row that the next job has to find, by index."""

    def live(self, seconds: float, *, last: bool) -> None:
        """Run one job. If it is not the ``last``, all its other processes die at its end."""
        self.counts["jobs"] += 1
        roles = {"learner": 1, "owner": self.shards, "writer": 3}
        with local_cluster(roles, timeout_s=HANG_S, fork_server=self.fork_server) as job:
            owners, writers = job.of_role("owner"), list(job.of_role("writer"))
            buffer = replay_buffer(
                job, capacity=CAPACITY, batch_size=BATCH, hosts=owners, shortcut=False,
                scratch_dir=self.folder, prefetch=1, min_shards=max(1, self.shards - 1),
                limiter=LIMITER,
            )  # fmt: skip
            found = self.content(buffer)
            assert len(self.kept) > CAPACITY / 4 or self.counts["jobs"] == 1
            assert all(found[index] == row for index, row in self.kept.items())
            first_key = 16 * self.counts["jobs"]
            calls = [
                job.submit(writer, write_by_rpc, buffer, first_key + n, timeout_s=10 * HANG_S + 600)
                for n, writer in enumerate(writers)
            ]
            wait_until(buffer.can_sample)
            begin, written = time.monotonic(), buffer.write_count
            spared = {peer.name: job.pid_of(peer) for peer in (owners[0], writers[0])}
            first: dict[str, tuple[int, int]] = {}
            kills = [1 / 3, 2 / 3]  # of writers, at these parts of the life
            alive = list(owners)
            while (elapsed := (time.monotonic() - begin) / seconds) < 1:
                self.learn(buffer)
                if self.random.random() < 0.05:
                    buffer.storage.dumps(self.target)
                    check_saved(self.target)
                    self.counts["checkpoints"] += 1
                if self.random.random() < 0.1:
                    self.pause(job.pid_of(self.random.choice([*alive, *writers])))
                if not first and elapsed > 1 / 3:
                    first = {name: footprint(pid) for name, pid in spared.items()}
                if kills and elapsed > kills[0]:
                    kills.pop(0)
                    self.kill(job, writers.pop(), calls.pop())
                if len(alive) == self.shards > 1 and not last and elapsed > 0.5:
                    self.kill(job, alive.pop())
            for name, pid in spared.items():
                assert_no_growth(name, first[name], footprint(pid))
            self.counts["rows written"] += buffer.write_count - written
            self.kill(job, writers.pop(), calls.pop())
            buffer.flush()
            self.kept = self.content(buffer)
            if last:
                buffer.storage.dumps(self.target)
                buffer.storage.loads(self.target)
                keys = sorted(key for _, key in self.content(buffer).values())
                assert keys == sorted(key for _, key in self.kept.values())
                buffer.close()
            else:
                for owner in alive:
                    self.kill(job, owner)

    def learn(self, buffer: HostedReplayBuffer) -> None:
        batch = buffer.sample()
        assert torn_rows(batch) == 0
        batch["td_error"] = priority_of(batch["key"])
        buffer.update_tensordict_priority(batch)
        self.counts["rows sampled"] += len(batch)

    def pause(self, pid: int) -> None:
        """Pause a process for a moment. The others continue unless they need an answer from it."""
        os.kill(pid, signal.SIGSTOP)
        threading.Timer(self.random.random() * 0.2, resume, (pid,)).start()
        self.counts["pauses"] += 1

    def kill(self, job: Session, peer: Peer, call: Future | None = None) -> None:
        os.kill(job.pid_of(peer), signal.SIGKILL)
        wait_until(lambda: peer in job.lost())
        if call is not None:
            with pytest.raises(PeerLostError):
                call.result(HANG_S)
        self.counts["kills"] += 1

    def content(self, buffer: HostedReplayBuffer) -> dict[int, tuple[int, int]]:
        """Return rows of the shards that answer, after checking that they are whole and unique."""
        generation = buffer.storage.generations_of(torch.arange(buffer.storage.max_size))
        index = (generation >= 0).nonzero().squeeze(-1)
        if not index.numel():
            return {}
        data = buffer.storage.get(index)
        assert torn_rows(data) == 0 and data["key"].unique().numel() == len(data)
        pairs = zip(generation[index].tolist(), data["key"].tolist(), strict=True)
        return dict(zip(index.tolist(), pairs, strict=True))


@pytest.mark.timeout(int(SECONDS * 3 + 120))
@pytest.mark.filterwarnings("ignore:replay shard:UserWarning", "ignore:closing the client")
@pytest.mark.parametrize("shards", [1, 3] if LONG else [3])
def test_soak_of_a_buffer_that_others_keep(folder: Path, fork_server, shards: int, request) -> None:
    """Writers by RPC are killed one after another, of several shards one, and any process is
    paused; the others go on. Then all die, and the next job finds their rows."""
    service = Service(folder, fork_server, shards)
    service.random.seed(seed := random.randrange(2**32))
    try:
        for life in range(LIVES):
            service.live(SECONDS / LIVES, last=life == LIVES - 1)
    finally:
        print(f"seed {seed}: {service.counts}")
    request.node.user_properties += list(service.counts.items())
    counts = service.counts
    assert counts["kills"] == LIVES * 3 + (LIVES - 1) * shards
    assert counts["checkpoints"] > 0 and counts["pauses"] > 0
    assert not list(folder.iterdir())  # the last job ended in order
