"""Turns measurements into medians over rounds, a table, JSON lines and a plot."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torchrl_dist import own_files
from torchrl_dist.recipes.parts.plots import save_figure
from torchrl_dist.ui import show_table


@dataclass(frozen=True)
class Key:
    """What a line of the table is about. ``peer`` is its column."""

    kind: str
    op: str
    batch: int
    processes: int
    peer: str


@dataclass
class Entry:
    """One peer's figures for one line. Lists have one entry per round."""

    unit: str
    rates: list[float] = field(default_factory=list)
    p50_ms: list[float] = field(default_factory=list)
    p99_ms: list[float] = field(default_factory=list)
    page_faults_per_call: list[float] = field(default_factory=list)

    @property
    def rate(self) -> float:
        return statistics.median(self.rates)


class Table:
    """Collects the results of all rounds."""

    def __init__(self) -> None:
        self.entries: dict[Key, Entry] = {}

    def add(self, kind: str, peer: str, result: Any) -> None:
        """Add one ``replay_cells.Result``."""
        key = Key(kind, result.op, result.batch, result.processes, peer)
        entry = self.entries.setdefault(key, Entry(result.unit))
        entry.rates.append(result.rate)
        entry.p50_ms.append(result.p50_ms)
        entry.p99_ms.append(result.p99_ms)
        if result.page_faults_per_call is not None:
            entry.page_faults_per_call.append(result.page_faults_per_call)

    def of(self, key: Key, peer: str) -> Entry | None:
        """Return the entry of another peer in the same line."""
        return self.entries.get(Key(key.kind, key.op, key.batch, key.processes, peer))

    def lines(self) -> list[Key]:
        """Return one key per line, in the order of the measurements."""
        found: dict[tuple[Any, ...], Key] = {}
        for key in self.entries:
            found.setdefault((key.kind, key.op, key.batch, key.processes), key)
        return list(found.values())

    def cells(self, bench: str, ours: Iterable[str], floor: str) -> list[dict[str, Any]]:
        """Return one JSON object per entry. Ratios refer to the first measured one of ``ours``."""
        preferred = list(ours)
        cells = []
        for key, entry in self.entries.items():
            bottom = self.of(key, floor)
            base = self._first(key, preferred)
            cells.append(
                {
                    "bench": bench,
                    "peer": key.peer,
                    "kind": key.kind,
                    "op": key.op,
                    "batch": key.batch,
                    "processes": key.processes,
                    "rate": entry.rate,
                    "unit": entry.unit,
                    "p50_ms": statistics.median(entry.p50_ms),
                    "p99_ms": statistics.median(entry.p99_ms),
                    "page_faults_per_call": statistics.median(entry.page_faults_per_call)
                    if entry.page_faults_per_call
                    else None,
                    "rounds": len(entry.rates),
                    "rates": entry.rates,
                    "ratio_to_ours": entry.rate / base.rate if base else None,
                    "floor_rate": bottom.rate if bottom else None,
                }
            )
        return cells

    def _first(self, key: Key, peers: list[str]) -> Entry | None:
        return next((entry for peer in peers if (entry := self.of(key, peer))), None)


def append_json(path: Path, cells: list[dict[str, Any]], extra: Mapping[str, Any]) -> None:
    """Append one line per cell, with ``extra`` in each."""
    with own_files.open_named(path, append=True) as file:
        for cell in cells:
            file.write(json.dumps({**cell, **extra}) + "\n")


def print_rates(cells: list[dict[str, Any]], peers: list[str]) -> None:
    """Print a table with a column per peer: its rate, also as a multiple of ours."""
    throughput = [cell for cell in cells if not is_latency(cell)]
    width = max(100, 40 + 17 * len(peers))
    left = ("kind", "operation", "batch", "processes")
    if throughput:
        columns = [peer for peer in peers if any(cell["peer"] == peer for cell in throughput)]
        rows = []
        for line, of_line in _by_line(throughput).items():
            found = {cell["peer"]: cell for cell in of_line}
            rows.append([*line, *(_rate(found.get(peer)) for peer in columns)])
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
        title = "latencies; ratio: p50 to a bare lock and unlock"
        show_table(title, columns, rows, left=columns[:3], width=width)


def is_latency(cell: Mapping[str, Any]) -> bool:
    """Whether the cell's percentiles say more than its rate."""
    return cell["unit"] == "calls/s"


def _by_line(cells: list[dict[str, Any]]) -> dict[tuple[str, ...], list[dict[str, Any]]]:
    lines: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for cell in cells:
        line = (cell["kind"], cell["op"], str(cell["batch"]), str(cell["processes"]))
        lines.setdefault(line, []).append(cell)
    return lines


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
    from matplotlib.figure import Figure

    panels = _by_line([cell for cell in cells if not is_latency(cell)])
    if not panels:
        return
    columns = min(4, len(panels))
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(4 * columns, 2.6 * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).flat
    for axis, (line, of_line) in zip(axes, panels.items(), strict=False):
        names = [cell["peer"] for cell in of_line]
        colors = ["tab:blue" if name.startswith("ours") else "tab:gray" for name in names]
        axis.barh(names, [cell["rate"] for cell in of_line], color=colors)
        axis.invert_yaxis()
        kind, op, batch, processes = line
        axis.set_title(f"{kind} {op}, batch {batch}, {processes} proc.", fontsize=9)
        axis.set_xlabel(of_line[0]["unit"], fontsize=8)
        axis.tick_params(labelsize=7)
    for axis in list(figure.axes)[len(panels) :]:
        axis.set_visible(False)
    figure.suptitle(title, fontsize=10)
    save_figure(figure, path)
