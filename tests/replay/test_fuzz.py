"""Random operations on a shared buffer, against a plain model, in one process and from several."""

from __future__ import annotations

import copy
import itertools
import math
import multiprocessing
import os
import shutil
import sys
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from tensordict import TensorDict

from tests.replay.faults import start_at
from torchrl_dist.errors import RateLimitError
from torchrl_dist.replay import (
    RateLimiter,
    SharedMemmapStorage,
    SharedPrioritizedSampler,
    SharedRandomSampler,
    SharedReplayBuffer,
)
from torchrl_dist.replay.law.limiter import Counts
from torchrl_dist.replay.law.placement import largest_reservation

pytestmark = pytest.mark.timeout(300)
BETA, EPS = 0.5, 1e-8
SMALLEST = sys.float_info.min
TIMEOUT_S = 0.02  # of waits for the limiter, which no other process ends


# --- users of the buffer -------------------------------------------------------------------------


class Actor:
    """One user of the buffer: its operations, and the rows that it sees."""

    def open(self, folder: str, case: Case, uniform: bool) -> None:
        self.rb = SharedReplayBuffer(
            storage=SharedMemmapStorage(
                case.capacity,
                scratch_dir=folder,
                job_id="fuzz",
                keep=True,
                limiter=case.limiter,
                timeout_s=TIMEOUT_S if case.limiter else 60.0,
                frames={"obs": 1} if case.frames else None,
            ),
            sampler=SharedRandomSampler()
            if uniform
            else SharedPrioritizedSampler(case.capacity, case.alpha, BETA, EPS),
            batch_size=case.batch_size,
        )
        self.rb.set_rng(torch.Generator().manual_seed(0))  # an example must repeat itself
        self.saved: dict[int, Any] = {}
        self.uniform = uniform

    def start_at(self, count: int) -> int:
        return start_at(self.rb.storage.directory, count)

    def close(self) -> None:
        self.rb.storage.close()

    def extend(self, ids: list[int], priority: list[float] | None) -> list[int]:
        rows = _rows(ids, priority)
        return self.rb.extend(rows, update_priority=priority is not None).tolist()

    def add(self, key: int, priority: float) -> int:
        return int(self.rb.add(_rows([key], [priority])[0]))

    def write_at(self, slots: list[int], ids: list[int]) -> None:
        self.rb[torch.tensor(slots)] = _rows(ids, None)

    def begin_write(self, ids: list[int]) -> None:
        """Reserve slots in another thread, because a thread's next write abandons its last one."""
        storage, count = self.rb.storage, len(ids)
        self.source = storage._checked(_rows(ids, None))

        def reserve() -> None:
            cursor = storage._cursor
            self.reservation, self.plan = cursor.planned(
                self.source, 0, count, cursor.reserve, count
            )

        thread = threading.Thread(target=reserve)
        thread.start()
        thread.join()

    def end_write(self, publish: bool) -> None:
        storage = self.rb.storage
        if publish:
            storage._fill(self.reservation, self.plan, self.source, 0, None)
        else:
            storage._cursor.abandon(self.reservation)

    def can_sample(self, batch_size: int) -> bool:
        return self.rb.can_sample(batch_size)

    def sample(self, batch_size: int) -> dict[str, list]:
        batch = self.rb.sample(batch_size)
        assert (batch["obs"] == batch["id"][:, None]).all()
        names = ["id", "index", "index_generation"]
        found = {name: batch[name].tolist() for name in names}
        if not self.uniform:
            found["weight"] = batch["priority_weight"].tolist()
        return found

    def update(self, slots: list[int], generation: list[int], priority: list[float]) -> None:
        self.rb.update_priority(
            torch.tensor(slots, dtype=torch.int64),
            torch.tensor(priority, dtype=torch.float64),
            generation=torch.tensor(generation, dtype=torch.int64),
        )

    def empty(self) -> None:
        self.rb.empty()

    def set_alpha(self, alpha: float) -> None:
        self.rb.sampler.alpha = alpha

    def save(self, path: str) -> None:
        self.rb.storage.dumps(path)

    def load(self, path: str) -> None:
        self.rb.storage.loads(path)

    def remember(self, number: int) -> None:
        self.saved[number] = self.rb.storage.state_dict()

    def recall(self, number: int) -> None:
        self.rb.storage.load_state_dict(self.saved[number])

    def look(self) -> dict[str, Any]:
        storage = self.rb.storage
        directory = storage.directory
        slots = torch.arange(storage.max_size)
        with directory.lock():
            directory.tree.refresh()
            total = directory.tree.total
        rows = self.rb[:] if storage.initialized and len(storage) else None
        return {
            "length": len(self.rb),
            "next_slot": storage.next_slot,
            "write_count": storage.write_count,
            "generations": storage.generations_of(slots).tolist(),
            "leaves": directory.tree.leaves.tolist(),
            "total": total,
            "ids": [] if rows is None else rows["id"].tolist(),
            "whole": rows is None or bool((rows["obs"] == rows["id"][:, None]).all()),
            "stale": directory.counters["stale_updates"],
            "counts": tuple(storage.limiter_counts) if storage.limiter else None,
            "repairs": directory.counters["taken_over_claims"],
        }


def _rows(ids: list[int], priority: list[float] | None) -> TensorDict:
    key = torch.tensor(ids, dtype=torch.int64)
    values = torch.tensor(priority or [0.0] * len(ids), dtype=torch.float64)
    return TensorDict(
        {"id": key, "obs": key[:, None].expand(-1, 3).double(), "td_error": values},
        [len(ids)],
    )


class Elsewhere:
    """An actor in its own process, which is used for many examples."""

    def __init__(self, context: Any) -> None:
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs,), daemon=True)
        self._process.start()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            self._pipe.send((name, args))
            assert self._pipe.poll(60), f"{name} did not end"
            worked, found = self._pipe.recv()
            if not worked:
                raise found
            return found

        return call

    def end(self) -> None:
        self._process.kill()
        self._process.join(10)
        self._pipe.close()


def _serve(pipe: Any) -> None:
    torch.set_num_threads(1)
    actor = Actor()
    while True:
        name, args = pipe.recv()
        try:
            pipe.send((True, getattr(actor, name)(*args)))
        except Exception as error:
            pipe.send((False, error))


# --- the model -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    capacity: int
    alpha: float
    batch_size: int
    limiter: RateLimiter | None
    frames: bool


@dataclass
class Row:
    key: int
    leaf: float
    times: int = 0


@dataclass
class Model:
    """The expected rows. ``cursor`` is the next ticket, ``base`` that of the last emptying."""

    capacity: int
    alpha: float
    limiter: RateLimiter | None
    rows: dict[int, Row] = field(default_factory=dict)
    generation: dict[int, int] = field(default_factory=dict)  # of the last write, also if gone
    first_generation: int = 0
    cursor: int = 0
    base: int = 0
    write_count: int = 0
    inserts: int = 0
    samples: int = 0
    largest: float | None = None
    stale: int = 0
    reserved: list[int] | None = None

    def leaf_of(self, priority: float) -> float:
        return max((priority + EPS) ** self.alpha, SMALLEST)

    def used_up(self, row: Row) -> bool:
        most = self.limiter and self.limiter.max_times_sampled
        return most is not None and row.times >= most

    def counts(self) -> Counts:
        if self.limiter is not None and self.limiter.max_times_sampled is not None:
            size = sum(not self.used_up(row) for row in self.rows.values())
        else:
            size = min(self.inserts, self.capacity)
        return Counts(self.inserts, self.samples, size)

    def may_write(self) -> bool:
        return self.limiter is None or not self.limiter.missing_samples(self.counts())

    def may_sample(self, count: int) -> bool:
        if self.limiter is not None and self.limiter.missing_inserts(self.counts(), count):
            return False
        return bool(self.rows)

    def write(self, slot: int, key: int, priority: float | None) -> None:
        largest = 1.0 if self.largest is None else self.largest
        self.generation[slot] = self.generation.get(slot, self.first_generation) + 1
        self.rows[slot] = Row(key, self.leaf_of(largest if priority is None else priority))
        self.write_count += 1
        self.inserts += 1

    def extend(self, ids: list[int], priority: list[float] | None) -> list[int]:
        skipped = max(0, len(ids) - self.capacity)
        self.cursor += skipped
        self.write_count += skipped
        index = [-1] * skipped
        for at in range(skipped, len(ids)):
            slot = self.cursor % self.capacity
            self.write(slot, ids[at], None if priority is None else priority[at])
            self.cursor += 1
            index.append(slot)
        self.saw(priority[skipped:] if priority else [])
        return index

    def begin_write(self, count: int) -> None:
        self.reserved = [(self.cursor + at) % self.capacity for at in range(count)]
        self.cursor += count
        for slot in self.reserved:
            self.rows.pop(slot, None)

    def end_write(self, ids: list[int] | None) -> None:
        for slot, key in zip(self.reserved or (), ids or (), strict=False):
            self.write(slot, key, None)
        self.reserved = None

    def saw(self, priorities: list[float]) -> None:
        for value in priorities:
            self.largest = value if self.largest is None else max(self.largest, value)

    def update(self, slots: list[int], generation: list[int], priority: list[float]) -> None:
        stored = []
        for slot, stamp, value in zip(slots, generation, priority, strict=True):
            if slot < 0:
                continue
            if slot not in self.rows or self.generation[slot] != stamp:
                self.stale += 1
                continue
            if not self.used_up(self.rows[slot]):
                self.rows[slot].leaf = self.leaf_of(value)
            stored.append(value)
        self.saw(stored)

    def empty(self) -> None:
        self.rows.clear()
        self.reserved = self.reserved and []  # what is being written is dropped, too
        self.cursor += -self.cursor % self.capacity
        self.base = self.cursor
        self.write_count = self.inserts = self.samples = 0
        self.largest = None

    def set_alpha(self, alpha: float) -> None:
        power = alpha / self.alpha if self.alpha > 0 else 1.0
        for row in self.rows.values():
            row.leaf = max(row.leaf**power, SMALLEST)
        self.alpha = alpha

    def restore(self, saved: Model) -> None:
        now = self.cursor + -self.cursor % self.capacity
        high = min(saved.cursor - saved.base, self.capacity)
        self.cursor = max(saved.cursor, now + (saved.cursor - now) % self.capacity)
        self.base = self.cursor - high
        self.rows = copy.deepcopy(saved.rows)
        for slot, row in self.rows.items():
            following = self.generation.get(slot, self.first_generation) + 1
            self.generation[slot] = max(following, saved.generation[slot])
            if not self.used_up(row):
                row.times = 0
        for name in ("write_count", "inserts", "samples", "largest", "alpha", "stale"):
            setattr(self, name, getattr(saved, name))


# --- the rules -----------------------------------------------------------------------------------

priorities = st.sampled_from([0.0, 1e-3, 0.5, 1.0, 2.0, 7.0, 1e4])
alphas = st.sampled_from([0.0, 0.3, 0.6, 1.0, 2.0])
LIMITERS = [
    None,
    None,
    RateLimiter(4),
    RateLimiter(3, samples_per_insert=2.0, error_buffer=12.0),
    RateLimiter(4, samples_per_insert=0.5, error_buffer=2.0, max_times_sampled=2),
    RateLimiter(2, max_times_sampled=1),
]


def nothing_is_being_written(machine: Machine) -> bool:
    return machine.model.reserved is None


class Machine(RuleBasedStateMachine):
    """``actors``: two users of one directory; the second one comes and goes."""

    actors: tuple[Any, Any]

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path("/dev/shm", f"torchrl_dist-test-fuzz-{uuid.uuid4().hex[:12]}")
        self.disk = Path(tempfile.mkdtemp())
        self.keys = itertools.count()
        self.handles: list[tuple[int, int]] = [(-1, -1)]
        self.dumped: Model | None = None
        self.remembered: dict[int, Model] = {}
        self.attached: list[Any] = []

    @initialize(
        capacity=st.sampled_from([4, 5, 8, 17, 64]),
        alpha=alphas,
        limiter=st.sampled_from(LIMITERS),
        uniform=st.booleans(),
        start=st.sampled_from([0, *(2**power - 40 for power in (31, 32, 53, 60))]),
        frames=st.booleans(),
    )
    def build(
        self,
        capacity: int,
        alpha: float,
        limiter: RateLimiter | None,
        uniform: bool,
        start: int,
        frames: bool,
    ) -> None:
        """Build a buffer whose counts start at 0 or at a larger number."""
        batch_size = limiter.min_size_to_sample if limiter else 4
        if limiter and limiter.max_times_sampled:
            start = min(start, 2**47)  # counts of samples leave 48 bits to generations
        self.case = Case(capacity, alpha, batch_size, limiter, frames)
        self.uniform = uniform
        self.model = Model(capacity, alpha, limiter, first_generation=start, write_count=start)
        self.attach(0)
        if start:
            self.model.cursor = self.model.base = self.actors[0].start_at(start)
        self.attach(1)

    def attach(self, which: int) -> None:
        actor = self.actors[which]
        # opened again, the sampler has to name the alpha that the others use now
        case = Case(**vars(self.case) | {"alpha": self.model.alpha})
        actor.open(str(self.folder), case, bool(which) and self.uniform)
        self.attached.append(actor)

    def one(self, which: bool) -> Any:
        return self.attached[which % len(self.attached)]

    def has_priorities(self, which: bool) -> bool:
        """Whether the actor samples by priority. If not, its writes also ignore priorities."""
        return not (self.uniform and self.one(which) is self.actors[1])

    def new_keys(self, count: int) -> list[int]:
        return list(itertools.islice(self.keys, count))

    @precondition(nothing_is_being_written)
    @rule(
        which=st.booleans(),
        count=st.one_of(st.integers(1, 9), st.integers(10, 150)),
        values=st.none() | st.lists(priorities, min_size=1, max_size=5),
    )
    def extend(self, which: bool, count: int, values: list[float] | None) -> None:
        ids = self.new_keys(count)
        priority = values and list(itertools.islice(itertools.cycle(values), count))
        if not self.model.may_write():
            with pytest.raises(RateLimitError):
                self.one(which).extend(ids, priority)
            return
        written = self.one(which).extend(ids, priority)
        assert written == self.model.extend(ids, priority if self.has_priorities(which) else None)
        self.remember_handles()

    @precondition(nothing_is_being_written)
    @rule(which=st.booleans(), priority=priorities)
    def add(self, which: bool, priority: float) -> None:
        (key,) = self.new_keys(1)
        if not self.model.may_write():
            with pytest.raises(RateLimitError):
                self.one(which).add(key, priority)
            return
        written = self.one(which).add(key, priority)
        assert [written] == self.model.extend(
            [key], [priority] if self.has_priorities(which) else None
        )

    @precondition(nothing_is_being_written)
    @rule(share=st.sampled_from([0.1, 0.5]))
    def begin_write(self, share: float) -> None:
        """Begin a write. Other users must not see its rows before they are published."""
        count = math.ceil(largest_reservation(self.model.capacity) * share)
        self.in_hand = self.new_keys(count)
        self.actors[0].begin_write(self.in_hand)
        self.model.begin_write(count)

    @precondition(lambda self: self.model.reserved is not None)
    @rule(publish=st.booleans())
    def end_write(self, publish: bool) -> None:
        self.actors[0].end_write(publish)
        self.model.end_write(self.in_hand if publish else None)

    @precondition(lambda self: self.model.rows and nothing_is_being_written(self))
    @rule(which=st.booleans(), data=st.data())
    def write_in_place(self, which: bool, data: st.DataObject) -> None:
        slots = data.draw(st.lists(st.sampled_from(sorted(self.model.rows)), min_size=1))
        ids = self.new_keys(len(slots))
        self.one(which).write_at(slots, ids)
        for slot, key in sorted(dict(zip(slots, ids, strict=True)).items()):
            self.model.write(slot, key, None)

    @precondition(lambda self: self.model.rows or nothing_is_being_written(self))
    @rule(
        which=st.booleans(),
        share=st.sampled_from([1.0, 0.5]),
        value=st.none() | priorities,
    )
    def sample(self, which: bool, share: float, value: float | None) -> None:
        """Sample, and then give these rows a priority, as a learner does."""
        actor, count = self.one(which), math.ceil(self.case.batch_size * share)
        allowed = self.model.may_sample(count)
        assert actor.can_sample(count) == allowed
        if not allowed:
            with pytest.raises(RuntimeError):  # RateLimitError is one, and TorchRL's of no rows
                actor.sample(count)
            return
        before = copy.deepcopy(self.model.rows)
        found = actor.sample(count)
        self.model.samples += count
        least = min(row.leaf for row in before.values() if not self.model.used_up(row))
        for at, (key, slot, stamp) in enumerate(
            zip(found["id"], found["index"], found["index_generation"], strict=True)
        ):
            row = self.model.rows[slot]
            assert (row.key, self.model.generation[slot]) == (key, stamp)
            assert not self.model.used_up(row)
            row.times += 1
            if "weight" in found:
                weight = (before[slot].leaf / least) ** -BETA
                assert found["weight"][at] == pytest.approx(weight, rel=1e-4, abs=1e-30)
        self.handles += zip(found["index"], found["index_generation"], strict=True)
        if value is not None:
            update = found["index"], found["index_generation"], [value] * count
            self.actors[0].update(*update)
            self.model.update(*update)

    def remember_handles(self) -> None:
        model = self.model
        self.handles += [(slot, model.generation[slot]) for slot in list(model.rows)[:4]]
        del self.handles[1:-40]

    @rule(data=st.data())
    def update_priorities(self, data: st.DataObject) -> None:
        """Update present and earlier rows, no row (-1), and one row several times."""
        chosen = data.draw(st.lists(st.sampled_from(self.handles), max_size=12))
        values = data.draw(st.lists(priorities, min_size=len(chosen), max_size=len(chosen)))
        slots, stamps = [slot for slot, _ in chosen], [stamp for _, stamp in chosen]
        self.actors[0].update(slots, stamps, values)
        self.model.update(slots, stamps, values)

    @rule(alpha=alphas)
    def change_alpha(self, alpha: float) -> None:
        self.actors[0].set_alpha(alpha)
        self.model.set_alpha(alpha)

    @rule(which=st.booleans())
    def empty(self, which: bool) -> None:
        self.one(which).empty()
        self.model.empty()

    @rule(which=st.booleans())
    def dump(self, which: bool) -> None:
        self.one(which).save(str(self.disk / "dump"))
        self.dumped = copy.deepcopy(self.model)

    @precondition(lambda self: self.dumped is not None and nothing_is_being_written(self))
    @rule(which=st.booleans())
    def load(self, which: bool) -> None:
        self.one(which).load(str(self.disk / "dump"))
        self.model.restore(self.dumped)

    @precondition(lambda self: self.dumped is not None and nothing_is_being_written(self))
    @rule()
    def load_into_a_new_buffer(self) -> None:
        while self.attached:
            self.attached.pop().close()
        shutil.rmtree(self.folder)
        self.remembered.clear()  # opening an actor forgets what it remembers
        self.model = Model(self.case.capacity, self.model.alpha, self.case.limiter)
        self.attach(0)
        self.attach(1)
        self.load(False)

    @rule(number=st.integers(0, 1))
    def take_state(self, number: int) -> None:
        self.actors[0].remember(number)
        self.remembered[number] = copy.deepcopy(self.model)

    @precondition(lambda self: self.remembered and nothing_is_being_written(self))
    @rule(data=st.data())
    def give_state_back(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.remembered)))
        self.actors[0].recall(number)
        self.model.restore(self.remembered[number])

    @rule()
    def come_or_go(self) -> None:
        if len(self.attached) == 2:
            self.attached.pop().close()
        else:
            self.attach(1)

    @invariant()
    def every_actor_sees_the_model(self) -> None:
        model = getattr(self, "model", None)
        if model is None:
            return
        published = sorted(model.rows)
        used_up = {slot for slot, row in model.rows.items() if model.used_up(row)}
        leaves = [
            model.rows[slot].leaf if slot in model.rows and slot not in used_up else 0.0
            for slot in range(model.capacity)
        ]
        for actor in self.attached:
            seen = actor.look()
            assert seen["whole"] and seen["repairs"] == 0
            assert seen["length"] == len(published)
            assert seen["next_slot"] == model.cursor % model.capacity
            assert seen["write_count"] == model.write_count
            assert seen["ids"] == [model.rows[slot].key for slot in published]
            assert seen["generations"] == [
                model.generation[slot] if slot in model.rows else -1
                for slot in range(model.capacity)
            ]
            np.testing.assert_allclose(seen["leaves"], leaves, rtol=1e-9, atol=0)
            assert seen["total"] == pytest.approx(sum(leaves))
            assert seen["stale"] == model.stale
            if model.limiter is not None:
                assert seen["counts"] == model.counts()

    def teardown(self) -> None:
        for actor in self.attached:
            actor.close()
        shutil.rmtree(self.folder, ignore_errors=True)
        shutil.rmtree(self.disk, ignore_errors=True)


def _run(users: tuple[Any, Any], examples: int = 30) -> None:
    class Here(Machine):
        actors = users

    run_state_machine_as_test(
        Here,
        settings=settings(
            max_examples=int(os.environ.get("FUZZ_EXAMPLES", examples)),
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


@contextmanager
def elsewhere(count: int) -> Iterator[tuple[Elsewhere, ...]]:
    context = multiprocessing.get_context("fork")
    actors = [Elsewhere(context) for _ in range(count)]
    try:
        yield tuple(actors)
    finally:
        for actor in actors:
            actor.end()


def test_two_buffers_of_one_process_do_as_the_model() -> None:
    _run((Actor(), Actor()))


def test_two_processes_do_as_the_model() -> None:
    with elsewhere(2) as actors:
        _run(actors, 15)
