"""The collection benchmark's table and plot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torchrl_dist.bench.collect_plan import LINE
from torchrl_dist.bench.results import by, plot_bars
from torchrl_dist.recipes.parts.plots import save_figure
from torchrl_dist.ui import show_table


def print_table(cells: list[dict[str, Any]]) -> None:
    """Print a column per peer: steps/s, efficiency, and the fraction of the floor."""
    peers = list(dict.fromkeys(cell["peer"] for cell in cells))
    left = ("env", "workers", "envs", "step s", "steps")
    rows = []
    for line, of_line in by(cells, *LINE).items():
        found = {cell["peer"]: cell for cell in of_line}
        words = [f"{x:g}" if isinstance(x, float) else str(x) for x in line]
        rows.append(words + [_figures(found.get(peer)) for peer in peers])
    title = "median steps/s, efficiency, and the fraction of the floor"
    show_table(title, (*left, *peers), rows, left=left, width=max(100, 40 + 17 * len(peers)))


def _figures(cell: dict[str, Any] | None) -> str:
    if cell is None:
        return "-"
    text = f"{cell['sps']:,.0f}"
    for name in ("efficiency", "of_floor"):
        text += "\n-" if cell[name] is None else f"\n{cell[name]:.3f}"
    return text


def plot(path: Path, cells: list[dict[str, Any]], title: str) -> None:
    """Plot one panel of bars (efficiency) per line of the table, as a PNG."""
    lines = by((cell for cell in cells if cell["efficiency"] is not None), *LINE)
    panels = []
    for (env, workers, envs, step_s, steps), of_line in lines.items():
        duration = f", {step_s:g} s" if step_s else ""
        name = f"{env}{duration}, {workers} x {envs}, {steps} per message"
        bars = {cell["peer"]: cell["efficiency"] for cell in of_line}
        panels.append((name, "efficiency", bars))
    plot_bars(path, title, panels)


_CELL = ("peer", "env", "workers", "envs", "steps_per_message", "durations", "network",
         "deadline_s", "sps", "workers_per_receive", "smallest_share", "largest_share",
         "seconds_per_100k_frames", "message_bytes", "bytes_per_s", "learner_cpu_us_per_message",
         "pack_s", "delay_s", "copy_s", "sent_bytes_per_update")  # fmt: skip


def print_plain(cells: list[dict[str, Any]]) -> None:
    """Print a line per cell: peer, steps/s, and the columns whose values differ between cells."""
    shown = [
        name
        for name in _CELL
        if any(name in cell for cell in cells)
        and (name in ("peer", "sps") or len({cell.get(name) for cell in cells}) > 1)
    ]
    rows = [[_plain(cell.get(name)) for name in shown] for cell in cells]
    columns = [name.replace("_", " ") for name in shown]
    show_table("medians", columns, rows, width=max(100, 16 * len(shown)))


def _plain(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
    return "none" if value is None else str(value)


def plot_deadlines(path: Path, cells: list[dict[str, Any]]) -> None:
    """Plot the workers per receive and the time for 100,000 frames against the deadline.

    There is one line per distribution of step times, network and number of envs.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    lines = by(cells, "durations", "network", "envs")
    for axis, name in zip(
        figure.subplots(1, 2), ("workers_per_receive", "seconds_per_100k_frames"), strict=True
    ):
        for (law, network, envs), found in lines.items():
            labels = [_plain(cell["deadline_s"]) for cell in found]
            values = [cell[name] for cell in found]
            axis.plot(labels, values, "o-", label=f"{law}, {network}, {envs} envs")
        axis.set_xlabel("deadline of a receive, s")
        axis.set_title(name.replace("_", " "), fontsize=10)
        axis.set_ylim(bottom=0)
    figure.axes[0].legend(fontsize=7)
    save_figure(figure, path)
