"""Measures one replay buffer, in processes that were started for this measurement.

The process that calls :func:`measure` is the learner: it samples, and updates priorities. Its
workers write.
"""

from __future__ import annotations

import contextlib
import itertools
import resource
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torchrl_dist.bench.processes import MeasurementError
from torchrl_dist.bench.replay_peers import PEERS, SAMPLE_BATCH, WINDOWS, Peer
from torchrl_dist.bench.workloads import KINDS, make_rows

_PREPARED_BATCHES = 4
_LEAD_S = 0.5  # from starting the loops to the first count, so that all loops are running by then
_LATE_S = 0.5
_WARM_S = 2.0
_WARM_LAPS = 8  # draws per row; drawing with replacement then misses one row in 3,000
_PRIORITIES = 16
_PAUSE_S = 2e-4  # between two attempts of the reader to acquire the lock


@dataclass(frozen=True)
class Cell:
    """One measurement: a peer, an operation, and sizes."""

    peer: str
    kind: str
    op: str
    batch: int
    processes: int
    capacity: int
    seconds: float
    timeout_s: float

    def __str__(self) -> str:
        return f"{self.kind} {self.op} b{self.batch} x{self.processes} {self.peer}"


@dataclass(frozen=True)
class Result:
    """Figures of one operation. ``rate`` is in ``unit``. Percentiles are of calls' durations."""

    op: str
    batch: int
    processes: int
    rate: float
    unit: str
    p50_ms: float
    p99_ms: float
    page_faults_per_call: float | None = None


def measure(cell: Cell, folder: str) -> list[Result]:
    """Measure one cell. Blocks while it fills the buffer, and then for about ``seconds``."""
    import torch

    torch.set_num_threads(1)
    if cell.op == "cursor":
        return _cursors(cell, folder)
    peer = PEERS[cell.peer](cell.kind, cell.capacity, folder, cell.op)
    with contextlib.ExitStack() as stack:
        stack.callback(peer.close)
        peer.open(0 if peer.in_one_process else cell.processes)
        _fill(peer, cell)
        return _OPERATIONS[cell.op](peer, cell)


def _fill(peer: Peer, cell: Cell) -> None:
    """Let each worker write its share of the rows, so that the buffer is full."""
    if not peer.workers:
        fill(peer, cell.kind, cell.capacity, cell.capacity, cell.batch, 0)
        return
    share = -(-cell.capacity // len(peer.workers))
    pending = [
        worker.submit(fill, cell.kind, share, cell.capacity, cell.batch, index)
        for index, worker in enumerate(peer.workers)
    ]
    for each in pending:
        each.result(cell.timeout_s)


def fill(peer: Peer, kind: str, rows: int, capacity: int, batch: int, seed: int) -> None:
    """Write at least ``rows`` rows, and prepare the batches for :func:`write`.

    A process is slower when it touches a page of the ring for the first time. This process
    therefore writes ``capacity`` rows, but stops after ``_WARM_S`` seconds if it has written
    ``rows`` rows by then.
    """
    size = max(1, min(KINDS[kind].fill_batch, capacity // 16))
    several = peer.prepare(make_rows(kind, size, seed))
    begin = time.monotonic()
    for done in range(0, capacity, size):
        if done >= rows and time.monotonic() - begin > _WARM_S:
            break
        if peer.op == "sequences":  # frames must differ, because equal frames are stored once
            several = peer.prepare(make_rows(kind, size, seed + done))
        peer.extend(several)
    first = seed * _PREPARED_BATCHES
    peer.batches = [
        peer.prepare(make_rows(kind, batch, first + i)) for i in range(_PREPARED_BATCHES)
    ]


# ---- loops


@dataclass(frozen=True)
class Tally:
    """The counts of one loop during its window."""

    calls: int
    seconds: float
    durations_s: Any  # float32 [calls]
    page_faults: int


@dataclass(frozen=True)
class Window:
    """The time in which loops count, on the clock that all processes of a node share."""

    start: float
    stop: float

    @classmethod
    def soon(cls, seconds: float) -> Window:
        start = time.monotonic() + min(_LEAD_S, seconds)
        return cls(start, start + seconds)

    def count(self, call: Callable[[], Any]) -> Tally:
        """Call ``call`` until the window closes. Time the calls in the window, but at least one
        call.

        Raises:
            MeasurementError: counting began too late, when half of the window was already over.
        """
        import numpy as np

        call()
        while time.monotonic() < self.start:
            call()
        durations: list[float] = []
        faults = _page_faults()
        begin = last = time.monotonic()
        if begin - self.start > max(_LATE_S, (self.stop - self.start) / 2):
            raise MeasurementError(
                f"a process began to count {begin - self.start:.1f} s late, in a window of "
                f"{self.stop - self.start:.1f} s: use a longer window with --seconds"
            )
        while last < self.stop or not durations:
            call()
            now = time.monotonic()
            durations.append(now - last)
            last = now
        faults = _page_faults() - faults
        return Tally(len(durations), last - begin, np.array(durations, np.float32), faults)


def _page_faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def write(peer: Peer, window: Window, busy: bool) -> Tally:
    """Write until the window closes. If ``busy``, another Python thread computes meanwhile."""
    stop = threading.Event()
    if busy:
        threading.Thread(target=_compute, args=(stop, window.stop), daemon=True).start()
    batches = itertools.cycle(peer.batches)
    tally = window.count(lambda: peer.extend(next(batches)))
    stop.set()
    return tally


def _compute(stop: threading.Event, until: float) -> None:
    while not stop.is_set() and time.monotonic() < until:
        sum(range(1000))


def learn(peer: Peer, window: Window, *, update: bool) -> Tally:
    """Sample and, with ``update``, set priorities, until the window closes."""
    return window.count(learner_step(peer, update=update))


def learner_step(peer: Peer, *, update: bool) -> Callable[[], None]:
    """Return a function that samples a batch and, with ``update``, sets its priorities."""
    import torch

    priorities = itertools.cycle([torch.rand(SAMPLE_BATCH) for _ in range(_PRIORITIES)])

    def step() -> None:
        batch = peer.sample()
        if update:
            peer.update(batch, next(priorities))

    return step


def _warm_learner(peer: Peer, cell: Cell) -> None:
    """Sample until almost every page was touched, for about ``_WARM_S`` seconds at most.

    In the first sample, TorchRL's shared buffer also catches up with earlier writes.
    """
    end = time.monotonic() + _WARM_S
    for _ in range(-(-_WARM_LAPS * cell.capacity // SAMPLE_BATCH)):
        peer.sample()
        if time.monotonic() > end:
            break


# ---- operations


def _write(peer: Peer, cell: Cell) -> list[Result]:
    window = Window.soon(cell.seconds)
    if peer.in_one_process:
        return [_written(cell, [write(peer, window, False)])]
    return [_written(cell, _collect(_start_writers(peer, window), cell))]


def _start_writers(peer: Peer, window: Window, busy: bool = False) -> list[Any]:
    return [worker.submit(write, window, busy) for worker in peer.workers]


def _collect(pending: list[Any], cell: Cell) -> list[Tally]:
    return [each.result(cell.timeout_s) for each in pending]


def _written(cell: Cell, tallies: list[Tally], op: str | None = None) -> Result:
    import numpy as np

    return Result(
        op=op or cell.op,
        batch=cell.batch,
        processes=cell.processes,
        rate=sum(tally.calls * cell.batch / tally.seconds for tally in tallies),
        unit="rows/s",
        **_percentiles(np.concatenate([tally.durations_s for tally in tallies])),
    )


def _percentiles(durations_s: Any) -> dict[str, float]:
    import numpy as np

    p50, p99 = np.percentile(durations_s, (50, 99)) * 1e3
    return {"p50_ms": float(p50), "p99_ms": float(p99)}


def _called(tally: Tally, op: str, batch: int, unit: str, per_call: int = 1) -> Result:
    """Return the figures of the learner's calls. Each call handles ``per_call`` batches or windows
    (see ``unit``)."""
    rate = per_call * tally.calls / tally.seconds
    return Result(op, batch, 1, rate, unit, **_percentiles(tally.durations_s))


def _learned(tally: Tally, op: str) -> Result:
    faults = tally.page_faults / tally.calls
    return replace(_called(tally, op, SAMPLE_BATCH, "batches/s"), page_faults_per_call=faults)


def _sample(peer: Peer, cell: Cell) -> list[Result]:
    _warm_learner(peer, cell)
    update = cell.op == "sample+update"
    return [_learned(learn(peer, Window.soon(cell.seconds), update=update), cell.op)]


def _mixed(peer: Peer, cell: Cell) -> list[Result]:
    _warm_learner(peer, cell)
    window = Window.soon(cell.seconds)
    pending = _start_writers(peer, window)
    tally = learn(peer, window, update=True)
    return [
        _written(cell, _collect(pending, cell), "mixed-write"),
        _learned(tally, "mixed-learn"),
    ]


def _sequences(peer: Peer, cell: Cell) -> list[Result]:
    _warm_learner(peer, cell)
    tally = learn(peer, Window.soon(cell.seconds), update=False)
    return [_called(tally, cell.op, WINDOWS, "windows/s", WINDOWS)]


def _patch(peer: Peer, cell: Cell) -> list[Result]:
    """Patch the rows of batches that were sampled in advance, one batch per call."""
    import torch

    actions = torch.zeros(SAMPLE_BATCH, dtype=torch.int64)
    batches = itertools.cycle([peer.sample() for _ in range(_PRIORITIES)])
    tally = Window.soon(cell.seconds).count(lambda: peer.patch(next(batches), actions))
    return [_called(tally, cell.op, SAMPLE_BATCH, "rows/s", SAMPLE_BATCH)]


def _lock(peer: Peer, cell: Cell) -> list[Result]:
    """Measure how long a reader waits for our lock while a worker writes in a tight loop."""
    directory = peer.buffer.storage.directory  # type: ignore[attr-defined]  # the peer is ours
    results = []
    for op, busy in (("lock-wait", False), ("lock-wait-busy", True)):
        window = Window.soon(cell.seconds)
        pending = _start_writers(peer, window, busy)
        waits = []
        while time.monotonic() < window.stop:
            time.sleep(_PAUSE_S)
            begin = time.monotonic()
            with directory.lock():
                end = time.monotonic()
            if begin >= window.start:
                waits.append(end - begin)
        _collect(pending, cell)
        results.append(_latency(op, 0, waits))
    return results


def _latency(op: str, batch: int, durations_s: Any) -> Result:
    import numpy as np

    durations = np.array(durations_s)
    return Result(op, batch, 1, float(1 / durations.mean()), "calls/s", **_percentiles(durations))


_OPERATIONS: dict[str, Callable[[Peer, Cell], list[Result]]] = {
    "write": _write,
    "sample": _sample,
    "sample+update": _sample,
    "mixed": _mixed,
    "sequences": _sequences,
    "patch": _patch,
    "lock": _lock,
}


# ---- what a cursor costs per extend (pytorch/rl#1397)


def _cursors(cell: Cell, folder: str) -> list[Result]:
    """Time the reservation of slots: in shared memory, by fetch-add over TCP, and by RPC."""
    from torchrl_dist.replay.node.cursor import SharedCursor

    peer: Any = PEERS[cell.peer](cell.kind, cell.capacity, folder)
    with contextlib.ExitStack() as stack:
        stack.callback(peer.close)
        peer.open(1)
        _fill(peer, cell)
        cursor = SharedCursor(peer.buffer.storage.directory)
        share = cell.seconds / 5
        reservations = []
        end = time.monotonic() + share
        while time.monotonic() < end:
            begin = time.monotonic()
            reservation = cursor.reserve(cell.batch)
            reservations.append(time.monotonic() - begin)
            cursor.abandon(reservation)
        results = [_latency("cursor-shared", cell.batch, reservations)]
        lock = peer.buffer.storage.directory.lock

        def enter() -> None:
            with lock():
                pass

        results.append(_latency("lock-ours", 0, _durations(enter, share)))
    results.append(_latency("lock-bare", 0, _bare_lock(folder, share)))
    with contextlib.ExitStack() as stack:
        for op, call in _remote_cursors(stack, cell.batch):
            results.append(_latency(op, cell.batch, _durations(call, share)))
    return results


def _durations(call: Callable[[], Any], seconds: float) -> Any:
    now = time.monotonic()
    return Window(now, now + seconds).count(call).durations_s


def _bare_lock(folder: str, seconds: float) -> Any:
    """Time acquiring and releasing a record lock by calls of ``fcntl.lockf``."""
    import fcntl

    with Path(folder, "bare-lock").open("w") as file:

        def call() -> None:
            fcntl.lockf(file, fcntl.LOCK_EX)
            fcntl.lockf(file, fcntl.LOCK_UN)

        return _durations(call, seconds)


def _remote_cursors(stack: contextlib.ExitStack, batch: int) -> list[tuple[str, Callable[[], Any]]]:
    """Start a process with a TCPStore and an RPC cursor. Return, for each of the two, a name and a
    function that advances it."""
    from torchrl_dist.runtime import local_cluster
    from torchrl_dist.runtime.store import connect_store

    session = stack.enter_context(local_cluster({"learner": 1, "owner": 1}, timeout_s=60.0))
    owner = session.remote(session.of_role("owner")[0], _Owner)
    store = connect_store("127.0.0.1", owner.call("keep_store"), 60.0)
    return [
        ("cursor-tcpstore", lambda: store.add("cursor", batch)),
        ("cursor-rpc", lambda: owner.call("reserve", batch)),
    ]


class _Owner:
    """A central cursor: a number that other processes advance by RPC."""

    def __init__(self) -> None:
        self._cursor = 0
        self._lock = threading.Lock()

    def keep_store(self) -> int:
        from torchrl_dist.runtime.store import keep_store

        self._store, port = keep_store("127.0.0.1", 0, 60.0)
        return port

    def reserve(self, count: int) -> int:
        with self._lock:
            first = self._cursor
            self._cursor += count
        return first
