"""How fast is the shared replay buffer, compared with other ways to share one?

    torchrl-dist bench replay --json replay.jsonl --plot replay.png

There are two workloads, S (45 B per row, 1M rows) and L (28 KB, 50k rows), with batches of 256 and
alpha 0.6. Each measurement runs in new processes with one torch thread each. Rounds go over all
peers in turn, so that a slow minute of the machine affects all of them. The table shows medians
over rounds.

Operations:

- ``write``: rows/s of 1 and 4 processes, in batches of 64 and 512.
- ``sample``, ``sample+update``: batches/s of a learner, without writers.
- ``mixed``: 2 writers (batches of 64) and a learner that samples and updates.
- ``lock``: how long a reader waits for our lock, next to a writer in a tight loop (``lock-wait``),
  or to one whose process also runs a busy Python thread (``lock-wait-busy``).
- ``cursor``: what an ``extend`` pays for its slots (pytorch/rl#1397): a reservation in shared
  memory, a fetch-add of a TCPStore, or a call by RPC. A bare record lock and unlock gives the
  scale.

The peer ``floor`` copies between tensors without lock, tree or TensorDict. What the other peers
need in addition is the cost of a buffer.
"""

from __future__ import annotations

import argparse
import itertools
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from torchrl_dist.bench.command import (
    above_zero,
    add_figures,
    check_folders,
    counts,
    describe,
    in_rounds,
    names,
    say,
    until_stopped,
)
from torchrl_dist.bench.replay_cells import Cell, measure
from torchrl_dist.bench.replay_peers import PEERS, SAMPLE_BATCH, versions
from torchrl_dist.bench.workloads import KINDS
from torchrl_dist.errors import ConfigurationError

OPS = ("write", "sample", "sample+update", "mixed", "lock", "cursor")
# Ratios refer to the first of these that was measured.
_OURS = ("ours-c", "ours-numpy", "ours-c-stock", "ours-c-2t")
_MIXED_WRITERS, _MIXED_BATCH = 2, 64


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's description and options to ``parser``."""
    describe(parser, __doc__, run)
    for option, known in (("--peers", list(PEERS)), ("--kinds", list(KINDS)), ("--ops", OPS)):
        parser.add_argument(
            option,
            type=names(known),
            default=list(known),
            metavar="A,B",
            help=f"some of {','.join(known)} (default: all)",
        )
    parser.add_argument(
        "--batches",
        type=counts,
        default=[64, 512],
        metavar="N,M",
        help="batch sizes of writers (default: 64,512)",
    )
    parser.add_argument(
        "--writers",
        type=counts,
        default=[1, 4],
        metavar="N,M",
        help="numbers of writing processes (default: 1,4)",
    )
    parser.add_argument(
        "--capacity",
        type=above_zero(int),
        help="rows of the buffer (default: 1000000 for S, 50000 for L)",
    )
    add_figures(
        parser,
        rounds=3,
        seconds=2.0,
        timeout_s=180.0,
        timed="one measurement, including the filling of the buffer",
        plot="rates",
        scratch=True,
    )


def run(options: argparse.Namespace) -> int:
    """Measure, and print a table. Blocks for minutes. After Ctrl-C, prints what was found and ends.

    Returns:
        0; 1 if a measurement failed; 130 or 143 after SIGINT or SIGTERM.

    Raises:
        ConfigurationError: nothing that was asked for can be measured.
    """
    from torchrl_dist.bench.table import Table, append_json, plot, print_rates

    check_folders(options.json, options.plot)
    least = 2 * max(SAMPLE_BATCH, *options.batches) * max(_MIXED_WRITERS, *options.writers)
    if options.capacity is not None and options.capacity < least:
        raise ConfigurationError(
            f"--capacity: got {options.capacity}, expected at least {least} rows: two "
            "batches per writer"
        )
    peers = _available(options.peers)
    table = Table()
    status = until_stopped(lambda: _measure_all(options, peers, table))
    cells = table.cells("replay", _OURS, "floor")
    print_rates(cells, peers)
    if options.json is not None:
        append_json(
            options.json,
            cells,
            {"seconds": options.seconds, "cpus": os.cpu_count(), "versions": versions(peers)},
        )
    if options.plot is not None:
        title = f"median of {options.rounds} rounds, {os.cpu_count()} cores"
        plot(options.plot, cells, title)
    return status


def _available(names: list[str]) -> list[str]:
    available = []
    for name in names:
        reason = PEERS[name].missing()
        if reason is None:
            available.append(name)
        else:
            say(f"skipped {name}: {reason}")
    if not available:
        raise ConfigurationError(
            "none of the peers can be measured here: see above for the reasons"
        )
    return available


def plan(options: argparse.Namespace, peers: list[str]) -> list[list[Cell]]:
    """Return what one round measures: groups of cells that differ only in the peer."""
    groups = []
    for kind in options.kinds:
        capacity = options.capacity or KINDS[kind].capacity
        for op in options.ops:
            base = Cell("", kind, op, 0, 1, capacity, options.seconds, options.timeout_s)
            if op == "write":
                sizes = itertools.product(options.writers, options.batches)
                cells = [replace(base, batch=b, processes=n) for n, b in sizes]
            elif op == "mixed":
                cells = [replace(base, batch=_MIXED_BATCH, processes=_MIXED_WRITERS)]
            elif op in ("lock", "cursor"):
                cells = [replace(base, batch=_MIXED_BATCH)]
            else:
                cells = [replace(base, batch=SAMPLE_BATCH)]
            for cell in cells:
                groups.append([replace(cell, peer=p) for p in peers if _can(p, cell)])
    return groups


def _can(peer: str, cell: Cell) -> bool:
    if cell.op in ("lock", "cursor"):  # these concern our own parts, so they are measured once
        return peer in ("ours-numpy", "ours-c") and cell.kind == "S"
    return not PEERS[peer].in_one_process or (cell.op != "mixed" and cell.processes == 1)


def _measure_all(options: argparse.Namespace, peers: list[str], table: Any) -> int:
    def run_one(launcher: Any, cell: Cell, folder: Path) -> Any:
        return launcher.run(
            measure,
            cell,
            str(folder),
            folder=folder,
            timeout_s=cell.timeout_s,
            environment=PEERS[cell.peer].environment,
        )

    def take(cell: Cell, results: Any) -> str:
        for result in results:
            table.add(cell.kind, cell.peer, result)
        return ", ".join(
            f"{result.op} {result.rate:,.0f} {result.unit}, p50 {result.p50_ms:.3f} ms, "
            f"p99 {result.p99_ms:.3f} ms"
            for result in results
        )

    def label(cell: Cell) -> str:
        return f"{cell.kind} {cell.op} b{cell.batch} x{cell.processes} {cell.peer}"

    groups = plan(options, peers)
    return in_rounds(options.rounds, groups, options.scratch_dir, run_one, label, take)
