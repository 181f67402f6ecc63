"""Programs of two processes, with threads, forks, signals and deaths at any store, on one buffer.

Whatever happened, every row must be whole and as it was written. A row's key determines its
priority, and its leaf must match this priority under the directory's final exponent. Processes that
have left must hold nothing. ``PROGRAM_FUZZ_ROUNDS`` sets the number of rounds.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import platform
import random
import shutil
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import numpy as np
import pytest
import torch
from tensordict import NonTensorStack, TensorDict
from torchrl.data import TensorDictReplayBuffer

from tests.replay.faults import (
    Stores,
    assert_lock_is_free,
    end_of,
    priority_of,
    published,
    rows_of,
    run_forked,
    start,
    torn_rows,
)
from torchrl_dist.errors import ConfigurationError, DirectoryError
from torchrl_dist.replay import (
    SharedCursorWriter,
    SharedMemmapStorage,
    SharedPrioritizedSampler,
    SharedReplayBuffer,
)
from torchrl_dist.replay.node.tables import CLAIM_COUNT, CLAIM_MEMBER, Word

_CAPACITY, _EPS = 48, 1e-8
_LARGEST = 20  # rows of a batch
_WIDTH = 2048  # wide enough that a copy releases the GIL
_ALPHAS = (0.5, 1.0, 1.25)
_ROUNDS = int(os.environ.get("PROGRAM_FUZZ_ROUNDS", "6"))


def rows_with(keys: range, texts: bool) -> TensorDict:
    """Make wide rows with TensorDicts of other batch sizes, empty ones and, if ``texts``, text."""
    rows = rows_of(keys, _WIDTH)
    count = len(keys)
    seen = rows["key"][:, None].expand(count, 3).clone()
    rows["agents"] = TensorDict({"seen": seen, "none": TensorDict({}, [count, 3])}, [count, 3])
    rows["nothing"] = TensorDict({}, [count])
    if texts:
        rows["text"] = NonTensorStack(*[f"row {key}" for key in keys])
    return rows


def assert_as_written(batch: TensorDict) -> None:
    keys = batch["key"]
    assert torn_rows(batch) == 0
    assert batch["agents"].batch_size == (len(keys), 3)
    assert (batch["agents", "seen"] == keys[:, None]).all()
    assert batch["nothing"].batch_size == (len(keys),) and batch["nothing"].is_empty()
    assert batch["agents", "none"].batch_size == (len(keys), 3)
    if "text" in batch.keys():
        assert batch.get("text").tolist() == [f"row {key}" for key in keys.tolist()]


def open_buffer(folder: Path) -> SharedReplayBuffer:
    storage = SharedMemmapStorage(
        _CAPACITY,
        scratch_dir=folder,
        job_id="test",
        keep=True,
        timeout_s=20,
        frames={"first": 1, "last": 1} if folder.name == "texts" else None,
    )
    while True:
        alpha = storage.directory.get_float(Word.ALPHA) or _ALPHAS[0]
        with contextlib.suppress(ConfigurationError):  # others have set another one meanwhile
            sampler = SharedPrioritizedSampler(_CAPACITY, alpha, 0.4)
            return SharedReplayBuffer(storage=storage, sampler=sampler, batch_size=8)


class Program:
    """The operations of one process, which the seed determines."""

    def __init__(self, folder: Path, seed: int, texts: bool) -> None:
        self.folder, self.random, self.texts = folder, random.Random(seed), texts
        self.saved = folder.with_name(f"{folder.name}-saved-{seed}")
        # a number per batch, which also a signal handler may take
        self.batches = itertools.count(1000 * seed)
        self.handlers = 0
        self.rb = open_buffer(folder)

    def rows(self, count: int) -> tuple[TensorDict, np.ndarray]:
        first = _LARGEST * next(self.batches)
        rows = rows_with(range(first, first + count), self.texts)
        return rows, priority_of(rows["key"]).numpy()

    def extend(self) -> None:
        rows, priority = self.rows(self.random.randint(1, 14))
        self.rb.writer.extend(rows, priority=priority)

    def refused(self) -> None:
        rows, priority = self.rows(12)
        priority = priority.copy()
        priority[-1] = 1e190
        self.rb.sampler.alpha = 1.25  # no other process changes it: this program runs alone
        with pytest.raises(ValueError):
            self.rb.writer.extend(rows, priority=priority)
        if len(self.rb):
            assert not {*rows["key"].tolist()} & {*self.rb[:]["key"].tolist()}

    def update(self) -> None:
        with contextlib.suppress(RuntimeError):  # no rows
            batch = self.rb.sample()
            assert_as_written(batch)
            self.rb.update_priority(
                batch["index"], priority_of(batch["key"]), generation=batch["index_generation"]
            )

    def alpha(self) -> None:
        self.rb.sampler.alpha = self.random.choice(_ALPHAS)

    def empty(self) -> None:
        self.rb.empty()

    def save(self) -> None:
        self.rb.dumps(self.saved)

    def restore(self) -> None:
        if (self.saved / "checkpoint.json").exists():
            self.rb.loads(self.saved)

    def build_wrong(self) -> None:
        parts: dict[str, object] = {
            "sampler": SharedPrioritizedSampler(_CAPACITY, self.rb.sampler.alpha, 0.4),
            "writer": SharedCursorWriter(),
        }
        forgotten = self.random.choice([*parts])
        del parts[forgotten]
        with pytest.raises(ConfigurationError, match="cannot have"):
            TensorDictReplayBuffer(storage=self.rb.storage, batch_size=8, **parts)

    def fork(self) -> None:
        def child() -> None:
            with contextlib.suppress(RuntimeError):
                assert_as_written(self.rb.sample())
            for _ in range(500):
                next(self.batches)
            self.extend()

        assert run_forked(child, timeout_s=30) == 0

    def close(self) -> None:
        directory = self.rb.storage.directory
        member, claims = directory.member, directory.claims
        self.rb.storage.close()
        held = claims[(claims[:, CLAIM_COUNT] > 0) & (claims[:, CLAIM_MEMBER] == member)]
        assert not held.size, "it has left, and has still claimed slots"
        self.rb = open_buffer(self.folder)

    def handle(self, number: int, frame: FrameType | None) -> None:
        if self.handlers > 4:  # on a busy machine, the next signal comes before the last is handled
            return
        self.handlers += 1
        try:
            with contextlib.suppress(DirectoryError):
                self.random.choice((self.extend, self.update))()
        finally:
            self.handlers -= 1

    def run(self, steps: int, operations: dict[Callable[[], None], int]) -> None:
        """Run operations by weight. Another thread writes and samples, and a timer interrupts."""
        signal.signal(signal.SIGALRM, self.handle)
        signal.setitimer(signal.ITIMER_REAL, 0.01, 0.017)
        stop, errors = threading.Event(), []

        def beside() -> None:
            for operate in itertools.cycle((self.extend, self.update)):
                if stop.is_set():
                    return
                try:
                    operate()
                except DirectoryError:  # closed at this moment
                    pass
                except BaseException as error:
                    errors.append(error)
                    raise

        thread = threading.Thread(target=beside, daemon=True)
        thread.start()
        for operate in self.random.choices([*operations], [*operations.values()], k=steps):
            operate()
        signal.setitimer(signal.ITIMER_REAL, 0)
        stop.set()
        thread.join(30)
        assert not thread.is_alive() and not errors
        self.rb.storage.close()

    def common(self) -> dict[Callable[[], None], int]:
        return {
            self.extend: 6, self.update: 4, self.alpha: 3, self.empty: 1,
            self.save: 1, self.restore: 1, self.build_wrong: 1,
        }  # fmt: skip

    def run_beside(self) -> None:
        """Run operations that move the watched tables, in a process that will not be killed."""
        self.run(20, self.common() | {self.fork: 8, self.close: 3})

    def run_with_others(self) -> None:
        self.run(20, self.common())

    def run_alone(self) -> None:
        self.run(20, self.common() | {self.refused: 6})

    def change_alpha(self) -> None:
        for _ in range(40):  # a dozen stores each
            self.alpha()


def check(folder: Path, texts: bool) -> None:
    rb = open_buffer(folder)
    directory = rb.storage.directory
    assert_lock_is_free(directory)
    with directory.lock():
        visible = published(directory)
        leaves = directory.tree.leaves.copy()
        assert directory.length == visible.sum()
        assert ((leaves > 0) == visible).all()
        directory.tree.refresh()
        assert directory.tree.total == pytest.approx(leaves.sum())
        claimed = directory.claims[directory.claims[:, CLAIM_COUNT] > 0]
        assert not any(map(directory.is_alive, claimed[:, CLAIM_MEMBER].tolist()))
    if visible.any():
        rows = rb.storage.get(torch.from_numpy(np.flatnonzero(visible)))
        assert_as_written(rows)
        assert ("text" in rows.keys()) == texts
        assert len(set(rows["key"].tolist())) == visible.sum()
        priority = priority_of(rows["key"]).numpy() + _EPS
        for alpha in (directory.get_float(Word.ALPHA), 1.0, 0.5):  # as it is, and set once more
            rb.sampler.alpha = alpha
            leaves = directory.tree.leaves[visible]
            np.testing.assert_allclose(leaves, priority**alpha, rtol=1e-8)
    path = folder.with_name(folder.name + "-dump")
    rb.dumps(path)
    keys = sorted(rb[:]["key"].tolist()) if visible.any() else []
    rb.empty()
    rb.loads(path)
    assert (sorted(rb[:]["key"].tolist()) if len(rb) else []) == keys
    rb.storage.close()


@pytest.fixture
def folders(folder: Path):
    """Return the folders for plain rows, and for rows with text and frames."""
    yield folder / "plain", folder / "texts"


@pytest.mark.skipif(platform.machine() != "x86_64", reason="single steps of an x86-64 processor")
@pytest.mark.timeout(0 if _ROUNDS > 9 else 600)
def test_programs_leave_whole_rows_with_their_mass(
    folders: tuple[Path, Path], tmp_path: Path, request
) -> None:
    torch.set_num_threads(1)
    for texts, folder in enumerate(folders):
        rb = open_buffer(folder)
        keys = range(_CAPACITY)
        rb.writer.extend(
            rows_with(keys, bool(texts)), priority=priority_of(torch.tensor(keys)).numpy()
        )
        rb.storage.close()
    stores, seeds = Stores(tmp_path), random.Random(os.environ.get("PROGRAM_FUZZ_SEED", "0"))
    killed = 0
    for turn in range(_ROUNDS):
        print(f"round {turn}", flush=True)
        kind, texts = turn % 3, bool(turn // 3 % 2)
        folder = folders[texts]

        def dying(seed: int, kind: int = kind, folder: Path = folder, texts: bool = texts) -> None:
            program = Program(folder, seed, texts)
            stores.watch(program.rb.storage.directory)
            with stores.dying_at(seeds.randint(1, 400 if kind == 2 else 1000)):
                (program.run_with_others, program.run_alone, program.change_alpha)[kind]()

        def beside(seed: int, folder: Path = folder, texts: bool = texts) -> None:
            Program(folder, seed, texts).run_beside()

        pids = [start(dying, 1000 + 2 * turn)]
        if kind == 0:  # else alone, so that its rows are checked before they are overwritten
            pids.append(start(beside, 1001 + 2 * turn))
        seeds.random()
        statuses = [end_of(pid, 120) for pid in pids]
        assert statuses[0] in (0, -signal.SIGKILL) and not any(statuses[1:]), statuses
        killed += statuses[0] != 0
        assert run_forked(check, folder, texts, timeout_s=60) == 0
        for saved in folder.parent.glob("*-saved-*"):
            shutil.rmtree(saved)
    request.node.user_properties.append(("kills", killed))
    assert killed
