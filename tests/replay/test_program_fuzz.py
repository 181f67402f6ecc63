"""Programs of two processes, with threads, forks, signals and deaths at any store, on one buffer.

The model is plain: whatever happened, every row is whole, and its mass in the tree is that of the
priority that follows from its key, under the exponent that the directory names at the end.
``PROGRAM_FUZZ_ROUNDS`` sets how many pairs of programs run.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import platform
import random
import signal
import threading
from pathlib import Path
from types import FrameType

import numpy as np
import pytest
import torch

from tests.replay.faults import (
    Stores,
    assert_lock_is_free,
    attach,
    end_of,
    priority_of,
    published,
    rows_of,
    run_forked,
    start,
    torn_rows,
)
from torchrl_dist.errors import DirectoryError
from torchrl_dist.replay import SharedReplayBuffer
from torchrl_dist.replay.node.directory import CLAIM_COUNT, CLAIM_MEMBER, Word

_CAPACITY, _EPS = 48, 1e-8
_LARGEST = 20  # rows of a batch
_ALPHAS = (0.5, 1.0, 1.25)
_ROUNDS = int(os.environ.get("PROGRAM_FUZZ_ROUNDS", "9"))


def build(folder: Path) -> SharedReplayBuffer:
    rb = attach(folder, _CAPACITY, kind=SharedReplayBuffer, alpha=0.5, timeout_s=20, batch_size=8)
    assert isinstance(rb, SharedReplayBuffer)
    return rb


def reopen(folder: Path) -> SharedReplayBuffer:
    """Whatever alpha the others have set meanwhile, which the constructor must name."""
    while True:
        for alpha in _ALPHAS:
            with contextlib.suppress(ValueError):
                return attach(
                    folder,
                    _CAPACITY,
                    kind=SharedReplayBuffer,
                    alpha=alpha,
                    timeout_s=20,
                    batch_size=8,
                )


class Program:
    """What one process does: a sequence of operations that follows from the seed."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.random = folder, random.Random(seed)
        # a number per batch, which also a signal handler may take
        self.batches = itertools.count(1000 * seed)
        self.rb = reopen(folder)

    def rows(self, count: int, width: int = 8):
        first = _LARGEST * next(self.batches)
        rows = rows_of(range(first, first + count), width)
        return rows, priority_of(rows["key"]).numpy()

    def extend(self) -> None:
        rows, priority = self.rows(self.random.randint(1, 14))
        self.rb.writer.extend(rows, priority=priority)

    def refused(self) -> None:
        rows, priority = self.rows(12)
        priority = priority.copy()
        priority[-1] = 1e190
        self.rb.sampler.alpha = 1.25  # nobody else changes it: this program runs alone
        with pytest.raises(ValueError):
            self.rb.writer.extend(rows, priority=priority)
        if len(self.rb):
            assert not {*rows["key"].tolist()} & {*self.rb[:]["key"].tolist()}

    def update(self) -> None:
        with contextlib.suppress(RuntimeError):  # no rows
            batch = self.rb.sample()
            assert torn_rows(batch) == 0
            self.rb.update_priority(
                batch["index"], priority_of(batch["key"]), generation=batch["index_generation"]
            )

    def alpha(self) -> None:
        self.rb.sampler.alpha = self.random.choice(_ALPHAS)

    def empty(self) -> None:
        self.rb.empty()

    def fork(self) -> None:
        def child() -> None:
            with contextlib.suppress(RuntimeError):
                assert torn_rows(self.rb.sample()) == 0
            for _ in range(500):
                next(self.batches)
            self.extend()

        assert run_forked(child, timeout_s=30) == 0

    def close(self) -> None:
        self.rb.storage.close()
        self.rb = reopen(self.folder)

    def handle(self, number: int, frame: FrameType | None) -> None:
        with contextlib.suppress(DirectoryError):
            self.random.choice((self.extend, self.update))()

    def run(self, steps: int, armed: bool, alone: bool = False) -> None:
        """``armed``: it will die at a store, so it keeps the tables where they are watched."""
        signal.signal(signal.SIGALRM, self.handle)
        signal.setitimer(signal.ITIMER_REAL, 0.01, 0.017)
        operations = [self.extend] * 6 + [self.update] * 4 + [self.alpha] * 3 + [self.empty]
        operations += [self.refused] * alone + ([] if armed else [self.fork, self.close])
        stop = threading.Event()

        def beside() -> None:
            while not stop.is_set():
                with contextlib.suppress(DirectoryError):  # closed at this moment
                    self.extend()

        thread = threading.Thread(target=beside, daemon=True)
        thread.start()
        for _ in range(steps):
            self.random.choice(operations)()
        signal.setitimer(signal.ITIMER_REAL, 0)
        stop.set()
        thread.join(30)
        assert not thread.is_alive()
        self.rb.storage.close()


def check(folder: Path) -> None:
    rb = reopen(folder)
    directory = rb.storage.directory
    assert_lock_is_free(directory)
    with directory.lock():
        visible = published(directory)
        leaves, alpha = directory.tree.leaves.copy(), directory.get_float(Word.ALPHA)
        assert directory.length == visible.sum()
        assert ((leaves > 0) == visible).all()
        directory.tree.refresh()
        assert directory.tree.total == pytest.approx(leaves.sum())
        claimed = directory.claims[directory.claims[:, CLAIM_COUNT] > 0]
        assert not any(map(directory.is_alive, claimed[:, CLAIM_MEMBER].tolist()))
    if visible.any():
        rows = rb.storage.get(torch.from_numpy(np.flatnonzero(visible)))
        assert torn_rows(rows) == 0
        assert len(set(rows["key"].tolist())) == visible.sum()
        wanted = (priority_of(rows["key"]).numpy() + _EPS) ** alpha
        np.testing.assert_allclose(leaves[visible], wanted, rtol=1e-8)
    path = folder.with_name(folder.name + "-dump")
    rb.dumps(path)
    keys = sorted(rb[:]["key"].tolist()) if visible.any() else []
    rb.empty()
    rb.loads(path)
    assert (sorted(rb[:]["key"].tolist()) if len(rb) else []) == keys
    for file in sorted(path.rglob("*"), reverse=True):
        file.rmdir() if file.is_dir() else file.unlink()
    path.rmdir()
    rb.storage.close()


@pytest.mark.skipif(platform.machine() != "x86_64", reason="single steps of an x86-64 processor")
@pytest.mark.timeout(600)
def test_programs_leave_whole_rows_with_their_mass(folder: Path, tmp_path: Path, request) -> None:
    torch.set_num_threads(1)
    rb = build(folder)
    rb.writer.extend(rows_of(range(_CAPACITY)), priority=priority_of(torch.arange(48)).numpy())
    rb.storage.close()
    stores, seeds = Stores(tmp_path), random.Random(os.environ.get("PROGRAM_FUZZ_SEED", "0"))
    killed = 0
    for turn in range(_ROUNDS):

        def armed(seed: int, alone: bool = bool(turn % 3)) -> None:
            program = Program(folder, seed)
            stores.watch(program.rb.storage.directory)
            with stores.dying_at(seeds.randint(1, 1500)):
                program.run(30, armed=True, alone=alone)

        def free(seed: int) -> None:
            Program(folder, seed).run(30, armed=False)

        pids = [start(armed, 1000 + 2 * turn)]
        if turn % 3 == 0:  # alone, what it leaves is looked at before anybody writes over it
            pids.append(start(free, 1001 + 2 * turn))
        seeds.random()
        statuses = [end_of(pid, 60) for pid in pids]
        assert statuses[0] in (0, -signal.SIGKILL) and not any(statuses[1:]), (turn, statuses)
        killed += statuses[0] != 0
        assert run_forked(check, folder, timeout_s=60) == 0, f"round {turn}"
    request.node.user_properties.append(("kills", killed))
    assert killed
