"""How fast is the shared replay buffer, compared with other replay buffers?

    torchrl-dist bench replay --json replay.jsonl --plot replay.png

There are two workloads: S (1M rows of 45 B) and L (50k rows of 28 KB). The learner samples batches
of 256 rows with alpha 0.6. Each measurement runs in new processes with one torch thread each. Each
round measures all peers, so that a slow minute of the machine affects all of them. The table shows
medians over rounds.

Operations:

- ``write``: rows/s that 1 and 4 processes write, in batches of 64 and 512.
- ``sample``, ``sample+update``: batches/s of a learner, without writers.
- ``mixed``: 2 writers (batches of 64), and a learner that samples and updates priorities.
- ``sequences``: windows/s of a learner that samples batches of 32 windows uniformly. Each window
  has 80 rows, after 40 rows of burn-in. For L, our buffers store each frame once. TorchRL's buffer
  stores a frame again in each row that contains it.
- ``patch``: rows/s that a learner changes by ``update_if_present``, in batches of 256.
- ``lock``: how long a reader waits for our lock while a writer writes in a tight loop
  (``lock-wait``). For ``lock-wait-busy``, the writer's process also runs a busy Python thread.
- ``cursor``: how long it takes to reserve the slots of an ``extend`` (pytorch/rl#1397) in shared
  memory, by a TCPStore's fetch-add, or by RPC. For comparison, our lock and a bare record lock are
  measured, too.

The peer ``floor`` only copies between tensors, without lock, tree or TensorDict. The additional
time that other peers take is the cost of a buffer.
"""

from __future__ import annotations

import argparse
import itertools
import os
from dataclasses import replace

from torchrl_dist.bench import command
from torchrl_dist.bench.replay_cells import Cell, Result, measure
from torchrl_dist.bench.replay_peers import PEERS, SAMPLE_BATCH
from torchrl_dist.bench.replay_table import plot, print_rates, to_cells
from torchrl_dist.bench.results import append_json
from torchrl_dist.bench.workloads import KINDS
from torchrl_dist.errors import ConfigurationError

OPS = ("write", "sample", "sample+update", "mixed", "sequences", "patch", "lock", "cursor")
# Ratios are relative to the first of these peers that was measured.
_OURS = ("ours-c", "ours-numpy", "ours-c-stock", "ours-c-2t")
_MIXED_WRITERS, _MIXED_BATCH = 2, 64


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's description and options to ``parser``."""
    command.describe(parser, __doc__, run)
    for option, known in (("--peers", PEERS), ("--kinds", KINDS), ("--ops", OPS)):
        command.add_names(parser, option, known)
    command.add_counts(parser, "--batches", "64,512", "batch sizes of writers")
    command.add_counts(parser, "--writers", "1,4", "numbers of writing processes")
    text = "rows of the buffer (default: 1000000 for S, 50000 for L)"
    command.add_number(parser, "--capacity", int, None, text)
    command.add_figures(
        parser,
        rounds=3,
        seconds=2.0,
        timeout_s=180.0,
        timed="one measurement, including the time to fill the buffer",
        plot="rates",
        scratch=True,
    )


def run(options: argparse.Namespace) -> int:
    """Measure, and print tables. Blocks for minutes. After Ctrl-C, prints the results so far.

    Returns:
        0; 1 if a measurement failed; 130 or 143 after SIGINT or SIGTERM.

    Raises:
        ConfigurationError: an option is invalid, or no peer can be measured here.
    """
    command.check_folders(options.json, options.plot)
    least = 2 * max(SAMPLE_BATCH, *options.batches) * max(_MIXED_WRITERS, *options.writers)
    if options.capacity is not None and options.capacity < least:
        raise ConfigurationError(
            f"--capacity: got {options.capacity}, expected at least {least} rows (two batches per "
            "writer)"
        )
    peers = command.available(options.peers, lambda name: PEERS[name].missing())
    found: dict[Cell, list[list[Result]]] = {}
    status = command.in_rounds(
        options.rounds, plan(options, peers), options.scratch_dir, measure, found, _told,
        environment=lambda cell: PEERS[cell.peer].environment,
    )  # fmt: skip
    cells = to_cells(found, _OURS, "floor")
    print_rates(cells, peers)
    append_json(options.json, "replay", cells, peers, seconds=options.seconds)
    if options.plot is not None:
        plot(options.plot, cells, f"median of {options.rounds} rounds, {os.cpu_count()} cores")
    return status


def _told(cell: Cell, results: list[Result]) -> str:
    return ", ".join(
        f"{result.op} {result.rate:,.0f} {result.unit}, p50 {result.p50_ms:.3f} ms, "
        f"p99 {result.p99_ms:.3f} ms"
        for result in results
    )


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
    if cell.op in ("lock", "cursor"):  # our own lock and cursor; the kind of rows does not matter
        return peer in ("ours-numpy", "ours-c") and cell.kind == "S"
    if cell.op in ("sequences", "patch"):
        return cell.op in PEERS[peer].extra_ops
    if peer == "torchrl-uniform":
        return False
    return not PEERS[peer].in_one_process or (cell.op != "mixed" and cell.processes == 1)
