"""The collection benchmark's table and plot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torchrl_dist.recipes.parts.plots import save_figure
from torchrl_dist.ui import show_table

_LINE = ("env", "workers", "envs", "step_s", "steps_per_message")


def _lines(cells: list[dict[str, Any]]) -> dict[tuple[Any, ...], dict[str, dict[str, Any]]]:
    lines: dict[tuple[Any, ...], dict[str, dict[str, Any]]] = {}
    for cell in cells:
        line = tuple(cell[name] for name in _LINE)
        lines.setdefault(line, {})[cell["peer"]] = cell
    return lines


def print_table(cells: list[dict[str, Any]]) -> None:
    """Print a column per peer: steps/s, efficiency, and the fraction of the floor."""
    peers = list(dict.fromkeys(cell["peer"] for cell in cells))
    left = ("env", "workers", "envs", "step s", "steps")
    rows = [
        [f"{x:g}" if isinstance(x, float) else str(x) for x in line]
        + [_figures(found.get(peer)) for peer in peers]
        for line, found in _lines(cells).items()
    ]
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
    from matplotlib.figure import Figure

    panels = _lines([cell for cell in cells if cell["efficiency"] is not None])
    if not panels:
        return
    columns = min(4, len(panels))
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(4 * columns, 2.4 * rows), layout="constrained")
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axis, (line, found) in zip(axes, panels.items(), strict=False):
        colors = ["tab:blue" if peer.startswith("ours") else "tab:gray" for peer in found]
        axis.barh(list(found), [cell["efficiency"] for cell in found.values()], color=colors)
        axis.invert_yaxis()
        env, workers, envs, step_s, steps = line
        duration = f", {step_s:g} s" if step_s else ""
        axis.set_title(f"{env}{duration}, {workers} x {envs}, {steps} per message", fontsize=8)
        axis.set_xlabel("efficiency", fontsize=8)
        axis.tick_params(labelsize=7)
    for axis in axes[len(panels) :]:
        axis.set_visible(False)
    figure.suptitle(title, fontsize=10)
    save_figure(figure, path)


_CELL = ("peer", "env", "workers", "envs", "steps_per_message", "durations", "network",
         "deadline_s", "sps", "workers_per_receive", "smallest_share", "largest_share",
         "seconds_per_100k_frames", "message_bytes", "bytes_per_s", "learner_cpu_us_per_message",
         "pack_s", "delay_s", "copy_s", "sent_bytes_per_update")  # fmt: skip


def print_plain(cells: list[dict[str, Any]]) -> None:
    """Print a line per cell, with the columns that differ or were measured."""
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
    """Plot the workers per receive and the time for 100,000 frames over the deadline.

    There is one line per distribution of step times, network and number of envs.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    lines: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for cell in cells:
        lines.setdefault((cell["durations"], cell["network"], cell["envs"]), []).append(cell)
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
