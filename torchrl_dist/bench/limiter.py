"""A sample waits for the rate limiter. How soon does the sample return once the rows are there?

    torchrl-dist bench limiter --json limiter.jsonl

One process samples 64 rows at a time. The limiter allows each sample only after 64 new rows have
been written. While the sample waits, another process extends the buffer by 64 rows. Figures are the
times from the call of ``extend`` to the return of ``sample``, including drawing and copying the
rows.

- ``futex``: no rows are written or sampled. A process only wakes the other one, with the same futex
  as in ``one node``.
- ``one node``: both processes access the same rows in shared memory.
- ``by RPC``, ``by RPC, 3 shards``: other processes keep the rows. The sampling process polls these
  processes, with pauses that grow to 50 ms.

``CPU`` is the CPU time that the waiting process used per second of waiting.
"""

from __future__ import annotations

import argparse
import functools
import mmap
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torchrl_dist.bench import command
from torchrl_dist.bench.results import append_json
from torchrl_dist.bench.workloads import make_rows
from torchrl_dist.ui import show_table

CASES = {"futex": 0, "one node": 0, "by RPC": 1, "by RPC, 3 shards": 3}
"""Number of other processes that keep the rows, by case."""
_BATCH = 64
_PAUSE_S = 0.12  # longer than any pause between polls, so that the other process certainly waits
_READY_S, _IDLE_S = 1.0, 1.0

Wakes = list[tuple[int, float]]
"""For each wait: when it ended, in ``time.monotonic_ns``, and the CPU seconds that it used."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's description and options to ``parser``."""
    command.describe(parser, __doc__, run)
    command.add_number(parser, "--wakes", int, 60, "wake-ups per case")
    command.add_figures(parser)


def run(options: argparse.Namespace) -> int:
    """Measure, and print a table. Blocks for a minute.

    Returns:
        0; 130 or 143 after SIGINT or SIGTERM.

    Raises:
        ConfigurationError: a folder is missing.
    """
    command.check_folders(options.json)
    command.check_memory()
    return command.until_stopped(lambda: _measure_all(options))


def _measure_all(options: argparse.Namespace) -> int:
    from torchrl_dist.runtime import local_cluster

    with (
        command.folder_in(command.MEMORY) as folder,
        local_cluster({"writer": 1, "reader": 1, "owner": 3}) as job,
    ):
        lines = [
            _measure(job, case, f"case-{number}", folder, options.wakes)
            for number, case in enumerate(CASES)
        ]
    _print(lines)
    append_json(options.json, "limiter", lines)
    return 0


def _measure(job: Any, case: str, name: str, folder: Path, wakes: int) -> dict[str, Any]:
    (reader,) = job.of_role("reader")
    limit_s = (wakes + 2) * 2 * _PAUSE_S + 60
    if case == "futex":
        path = str(folder / name)
        Path(path).write_bytes(bytes(mmap.PAGESIZE))
        calls = job.submit(reader, wait_at_bell, path, wakes + 2, timeout_s=limit_s)
        wake = _open_bell(path).ring
    else:
        buffer = _buffer(job, CASES[case], name, folder)
        rows = make_rows("S", _BATCH)
        wake = functools.partial(buffer.extend, rows)
        wake()  # this call and the next one together make the first sample possible
        calls = job.submit(reader, wait_for_rows, buffer, wakes + 2, timeout_s=limit_s)
    begun = _wake_often(wake, wakes)
    found = calls.result(limit_s)
    delays = [1e-3 * (ended - at) for (ended, _), at in zip(found, begun, strict=True)]
    # Leave out the first delay, because caches are cold, and the last, because it follows a long
    # pause.
    ordered = sorted(delays[1:-1])
    return {
        "case": case,
        "wakes": wakes,
        "p50_us": statistics.median(ordered),
        "p99_us": ordered[min(wakes - 1, int(0.99 * wakes))],
        "cpu_ms_per_s": 1e3 * found[-1][1] / _IDLE_S,
    }


def _wake_often(wake: Callable[[], Any], wakes: int) -> list[int]:
    """Wake ``wakes + 2`` times. Return the ``time.monotonic_ns()`` before each wake-up.

    The pause before the first wake-up lets the reader start. The pause before the last one is
    longer than the others.
    """
    begun = []
    for pause_s in [_READY_S, *[_PAUSE_S] * wakes, _IDLE_S]:
        time.sleep(pause_s)
        begun.append(time.monotonic_ns())
        wake()
    return begun


def _buffer(job: Any, shards: int, name: str, folder: Path) -> Any:
    from torchrl_dist.replay import RateLimiter, replay_buffer

    return replay_buffer(
        job,
        name,
        capacity=4096,
        batch_size=_BATCH,
        hosts=job.of_role("owner")[:shards] or job.of_role("writer"),
        shortcut=not shards,
        prefetch=0,
        scratch_dir=folder,
        limiter=RateLimiter(_BATCH, samples_per_insert=1.0, error_buffer=_BATCH / 2),
    )


def wait_for_rows(buffer: Any, times: int) -> Wakes:
    """Run in the reader: sample ``times`` times."""
    return _note_wakes(buffer.sample, times)


def wait_at_bell(path: str, times: int) -> Wakes:
    """Run in the reader: wait at the futex ``times`` times."""
    bell = _open_bell(path)
    return _note_wakes(lambda: bell.wait(bell.arm(), 60.0), times)


def _note_wakes(wait: Callable[[], Any], times: int) -> Wakes:
    found = []
    for _ in range(times):
        cpu = time.process_time()
        wait()
        found.append((time.monotonic_ns(), time.process_time() - cpu))
    return found


def _open_bell(path: str) -> Any:
    import numpy as np

    from torchrl_dist.replay.node.futex import Bell

    with open(path, "r+b") as file:
        memory = mmap.mmap(file.fileno(), mmap.PAGESIZE)
    return Bell(memoryview(memory).cast("q"), 0, 1, np.frombuffer(memory, np.uint8).ctypes.data)


def _print(lines: list[dict[str, Any]]) -> None:
    title = "from the insert to the return of the sample that waits for it"
    figures = ("p50_us", "p99_us", "cpu_ms_per_s")
    rows = [[line["case"], *(f"{line[name]:,.1f}" for name in figures)] for line in lines]
    columns = ("case", "p50, us", "p99, us", "CPU, ms per s of waiting")
    show_table(title, columns, rows, left=("case",))
