"""The replay benchmark's table, JSON objects and plot."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Collection, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchrl_dist.bench.results import by, medians, plot_bars
from torchrl_dist.ui import show_table

if TYPE_CHECKING:
    from torchrl_dist.bench.replay_cells import Cell, Result

_LINE = ("kind", "op", "batch", "processes", "unit")
_FIGURES = ("rate", "p50_ms", "p99_ms", "page_faults_per_call")


def to_cells(
    found: Mapping[Cell, list[list[Result]]], ours: Collection[str], floor: str
) -> list[dict[str, Any]]:
    """Return one JSON object per peer and line of the table, with medians over rounds.

    Ratios are relative to the first peer of ``ours`` that was measured.
    """
    results = [
        {"kind": cell.kind, "peer": cell.peer, **asdict(result)}
        for cell, rounds in found.items()
        for result in itertools.chain(*rounds)
    ]
    entries = by(results, *_LINE, "peer")
    rates = {key: [each["rate"] for each in of] for key, of in entries.items()}
    middle = {key: statistics.median(of) for key, of in rates.items()}
    cells = []
    for key, of in entries.items():
        of_line = {k[-1]: rate for k, rate in middle.items() if k[:-1] == key[:-1]}
        base = next((of_line[name] for name in ours if name in of_line), None)
        cells.append(
            {
                **dict(zip((*_LINE, "peer"), key, strict=True)),
                **medians(of, *_FIGURES),
                "rounds": len(of),
                "rates": rates[key],
                "ratio_to_ours": middle[key] / base if base else None,
                "floor_rate": of_line.get(floor),
            }
        )
    return cells


def print_rates(cells: list[dict[str, Any]], peers: list[str]) -> None:
    """Print the tables: rates by peer with their ratios to ours, the learner's calls, latencies."""
    throughput = [cell for cell in cells if not is_latency(cell)]
    width = max(100, 40 + 17 * len(peers))
    left = ("kind", "operation", "batch", "processes")
    if throughput:
        columns = [peer for peer in peers if any(cell["peer"] == peer for cell in throughput)]
        rows = []
        for line, of_line in by(throughput, *_LINE).items():
            found = {cell["peer"]: cell for cell in of_line}
            rows.append([*map(str, line[:-1]), *(_rate(found.get(peer)) for peer in columns)])
        title = "median rate, and its ratio to ours"
        show_table(title, (*left, *columns), rows, left=left, width=width)
    faults = [cell for cell in cells if cell["page_faults_per_call"] is not None]
    if faults:
        rows = [
            [cell["kind"], cell["op"], cell["peer"], f"{cell['p50_ms']:.3f}",
             f"{cell['p99_ms']:.3f}", f"{cell['page_faults_per_call']:.2f}"]
            for cell in faults
        ]  # fmt: skip
        columns = ["kind", "operation", "peer", "p50 ms", "p99 ms", "page faults per call"]
        show_table("the learner's calls", columns, rows, left=columns[:3], width=width)
    latencies = [cell for cell in cells if is_latency(cell)]
    if latencies:
        bare = next((cell["p50_ms"] for cell in latencies if cell["op"] == "lock-bare"), None)
        rows = [
            [cell["op"], str(cell["batch"] or ""), cell["peer"],
             f"{1e3 * cell['p50_ms']:.1f}", f"{1e3 * cell['p99_ms']:.1f}",
             f"{cell['p50_ms'] / bare:.1f}" if bare else ""]
            for cell in latencies
        ]  # fmt: skip
        columns = ["operation", "batch", "peer", "p50 us", "p99 us", "ratio"]
        title = "latencies; ratio: p50 divided by that of a bare lock and unlock"
        show_table(title, columns, rows, left=columns[:3], width=width)


def is_latency(cell: Mapping[str, Any]) -> bool:
    """Whether the cell measured a latency instead of a throughput."""
    return cell["unit"] == "calls/s"


def _rate(cell: dict[str, Any] | None) -> str:
    if cell is None:
        return "-"
    ratio = cell["ratio_to_ours"]
    return _short(cell["rate"]) + ("" if ratio is None else f"\n× {ratio:.2f}")


def _short(number: float) -> str:
    for limit, divisor, suffix in ((1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if number >= limit:
            return f"{number / divisor:.3g}{suffix}"
    return f"{number:.3g}" if number < 1e3 else f"{number:.0f}"


def plot(path: Path, cells: list[dict[str, Any]], title: str) -> None:
    """Plot one panel of bars per line of the table, as a PNG."""
    lines = by((cell for cell in cells if not is_latency(cell)), *_LINE)
    panels = [
        (f"{kind} {op}, batch {batch}, {processes} proc.", unit,
         {cell["peer"]: cell["rate"] for cell in of})
        for (kind, op, batch, processes, unit), of in lines.items()
    ]  # fmt: skip
    plot_bars(path, title, panels)
