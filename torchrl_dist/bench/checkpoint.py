"""How long does a checkpoint of a replay buffer take, compared with copying the same bytes?

    torchrl-dist bench checkpoint --json checkpoint.jsonl

A full buffer in /dev/shm is saved to a disk: 1,000,000 rows of 45 B (S), or 50,000 rows of 28 KB
(L). Each round measures all cases in turn, and the table shows medians. Each case ends when
everything is synced to the disk.

- ``cp``: ``cp -r`` of the files of a checkpoint in /dev/shm, then ``fsync`` of each.
- ``ours``: the shared buffer of one node. ``ours, written``: the same, while another process
  extends the buffer by batches of 256 rows, at a rate that fills the ring once a minute. The column
  ``longest extend`` is the duration of that process's longest call of ``extend``.
- ``ours by RPC``: another process has the rows, can access the disk, and writes the rows there.
  ``ours by RPC, sent``: that process cannot access the disk, and sends every row to the process
  that saves.
- ``torchrl``: the ``dumps`` of TorchRL's buffer over a LazyMemmapStorage in /dev/shm, then
  ``fsync`` of its files. ``dumps`` rewrites the files in place, so a crash during ``dumps`` leaves
  no intact checkpoint.

``of cp`` is the rate in bytes per second, divided by the rate of ``cp``.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchrl_dist.bench import command
from torchrl_dist.bench.results import append_json
from torchrl_dist.bench.workloads import KINDS, make_rows
from torchrl_dist.ui import show_table

CASES = ("cp", "ours", "ours, written", "ours by RPC", "ours by RPC, sent", "torchrl")
_WRITE_BATCH = 256
_CALL_S = 120.0
_TURN_S = 60.0


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's description and options to ``parser``."""
    command.describe(parser, __doc__, run)
    command.add_names(parser, "--kinds", KINDS)
    command.add_number(parser, "--rows", int, None, "rows (default: 1M for S, 50k for L)")
    text = "folder on the disk to write to (default: the one for temporary files)"
    here = Path(tempfile.gettempdir())
    parser.add_argument("--to", type=Path, default=here, metavar="FOLDER", help=text)
    command.add_figures(parser, rounds=5)


def run(options: argparse.Namespace) -> int:
    """Measure, and print a table. Blocks for a minute or two.

    Returns:
        0; 130 or 143 after SIGINT or SIGTERM.

    Raises:
        ConfigurationError: a folder is missing.
    """
    for path in (options.json, options.to / "x"):
        command.check_folders(path)
    command.check_memory()
    return command.until_stopped(lambda: _measure_all(options))


def _measure_all(options: argparse.Namespace) -> int:
    lines: list[dict[str, Any]] = []
    for kind in options.kinds:
        rows = options.rows or KINDS[kind].capacity
        with command.folder_in(command.MEMORY) as memory, command.folder_in(options.to) as disk:
            lines += to_lines(measure(kind, rows, options.rounds, memory, disk), kind)
    _print(lines)
    append_json(options.json, "checkpoint", lines, rows=options.rows)
    return 0


@dataclass(frozen=True)
class Saved:
    """One checkpoint: the size of its files, and how long it took."""

    bytes: int
    seconds: float
    longest_extend_ms: float | None


def measure(kind: str, rows: int, rounds: int, memory: Path, disk: Path) -> dict[str, list[Saved]]:
    """Measure all cases in turn, ``rounds`` times."""
    from torchrl_dist.runtime import local_cluster

    found: dict[str, list[Saved]] = {case: [] for case in CASES}
    roles = {"learner": 1, "owner": 1, "writer": 1}
    with local_cluster(roles, timeout_s=_CALL_S) as session:
        buffers = _buffers(session, rows, memory)
        for buffer in buffers.values():
            _fill(buffer, kind, rows)
        ours = buffers["ours"]
        ours.dumps(memory / "checkpoint")
        saves: dict[str, Callable[[Path], None]] = {
            "cp": lambda to: _copy(memory / "checkpoint", to),
            "ours": ours.dumps,
            "ours, written": ours.dumps,
            "ours by RPC": buffers["ours by RPC"].dumps,
            "ours by RPC, sent": lambda to: _save_sent(buffers["ours by RPC"].storage, to),
            "torchrl": lambda to: _save_and_sync(buffers["torchrl"], to),
        }
        (peer,) = session.of_role("writer")
        for round_ in range(rounds + 1):  # the first round warms up, and is not recorded
            for case, saved in found.items():
                os.sync()
                written = case == "ours, written"
                if written:
                    pause_s = _TURN_S * _WRITE_BATCH / rows
                    writer = session.remote(peer, Writer, ours, kind, pause_s)
                    running = writer.submit("run")
                begin = time.perf_counter()
                saves[case](disk / case)
                seconds = time.perf_counter() - begin
                if written:
                    writer.call("end")
                longest = running.result(_CALL_S) if written else None
                if round_:
                    saved.append(Saved(_bytes_in(disk / case), seconds, longest))
        for buffer in (ours, buffers["ours by RPC"]):
            buffer.storage.close()
    return found


def _buffers(session: Any, rows: int, memory: Path) -> dict[str, Any]:
    from torchrl.data import LazyMemmapStorage, TensorDictReplayBuffer
    from torchrl.data.replay_buffers.writers import TensorDictRoundRobinWriter

    from torchrl_dist.replay import SharedMemmapStorage, SharedReplayBuffer, replay_buffer

    return {
        "ours": SharedReplayBuffer(
            storage=SharedMemmapStorage(rows, scratch_dir=memory / "ours", job_id="bench"),
            batch_size=_WRITE_BATCH,
        ),
        "ours by RPC": replay_buffer(
            session,
            capacity=rows,
            batch_size=_WRITE_BATCH,
            hosts=session.of_role("owner"),
            uniform=True,
            prefetch=0,
            shortcut=False,
            scratch_dir=memory,
        ),
        "torchrl": TensorDictReplayBuffer(
            storage=LazyMemmapStorage(rows, scratch_dir=memory / "torchrl"),
            writer=TensorDictRoundRobinWriter(),
            batch_size=_WRITE_BATCH,
        ),
    }


def _fill(buffer: Any, kind: str, rows: int) -> None:
    batch = make_rows(kind, KINDS[kind].fill_batch)
    for done in range(0, rows, len(batch)):
        buffer.extend(batch[: rows - done])
    flush = getattr(buffer, "flush", None)
    if flush is not None:
        flush()


class Writer:
    """Extends the buffer in another process, from :meth:`run` until :meth:`end`."""

    def __init__(self, buffer: Any, kind: str, pause_s: float) -> None:
        import torch

        torch.set_num_threads(1)
        self._buffer, self._batch, self._pause_s = buffer, make_rows(kind, _WRITE_BATCH), pause_s
        self._ended = threading.Event()
        buffer.extend(self._batch)

    def run(self) -> float:
        """Extend until :meth:`end`. Return the duration of the longest call, in ms."""
        longest, deadline = 0.0, time.monotonic() + _CALL_S
        while True:
            begin = time.perf_counter()
            self._buffer.extend(self._batch)
            longest = max(longest, time.perf_counter() - begin)
            if self._ended.wait(self._pause_s) or time.monotonic() > deadline:
                return 1e3 * longest

    def end(self) -> None:
        self._ended.set()


def _copy(source: Path, target: Path) -> None:
    shutil.rmtree(target, ignore_errors=True)
    subprocess.run(["cp", "-r", str(source), str(target)], check=True)
    _sync(target)


def _save_sent(storage: Any, target: Path) -> None:
    from torchrl_dist.replay.hosts.shard import RemoteShard
    from torchrl_dist.replay.saving.shards import save_to_disk

    shard = RemoteShard(storage.client, 0, era=0, host_writes=False)
    save_to_disk(target, [shard], storage.shard_lost)


def _save_and_sync(buffer: Any, target: Path) -> None:
    buffer.dumps(target)
    _sync(target)


def _sync(folder: Path) -> None:
    for path in [folder, *folder.rglob("*")]:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def _bytes_in(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def to_lines(found: Mapping[str, list[Saved]], kind: str) -> list[dict[str, Any]]:
    """Return one JSON object per case."""
    rates = {
        case: statistics.median(each.bytes / each.seconds for each in rounds) / 2**20
        for case, rounds in found.items()
    }
    return [
        {
            "kind": kind,
            "case": case,
            "bytes": statistics.median(each.bytes for each in rounds),
            "seconds": [each.seconds for each in rounds],
            "rate_mib_s": rates[case],
            "of_cp": rates[case] / rates["cp"],
            "longest_extend_ms": max(
                (e.longest_extend_ms for e in rounds if e.longest_extend_ms is not None),
                default=None,
            ),
        }
        for case, rounds in found.items()
    ]


def _print(lines: list[dict[str, Any]]) -> None:
    rows = [
        [
            *(line["kind"], line["case"]),
            f"{line['bytes'] / 2**20:.0f}",
            f"{statistics.median(line['seconds']):.2f}",
            f"{line['rate_mib_s']:.0f}",
            f"{line['of_cp']:.2f}",
            "" if line["longest_extend_ms"] is None else f"{line['longest_extend_ms']:.1f} ms",
        ]
        for line in lines
    ]
    columns = ("rows", "case", "MiB", "seconds", "MiB/s", "of cp", "longest extend")
    show_table("saving a full buffer, everything synced", columns, rows, left=("rows", "case"))
