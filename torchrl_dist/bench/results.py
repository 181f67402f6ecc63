"""Process the benchmarks' results: medians over rounds, JSON lines, bar charts."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import platform
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torchrl_dist import own_files
from torchrl_dist.recipes.parts.plots import save_figure

_PACKAGES = {  # packages by bench peer; under "", the packages of all benchmarks
    "": ("torchrl-dist", "torch", "torchrl", "tensordict", "numpy"),
    "cpprb": ("cpprb",),
    "ray": ("ray",),
    "reverb": ("dm-reverb",),
    "tianshou": ("tianshou",),
    "sb3": ("stable-baselines3",),
}


def medians(rounds: Sequence[Mapping[str, Any]], *names: str) -> dict[str, Any]:
    """Return the median over rounds of each named figure or, without names, of all figures.

    If a figure is None in any round, its median is None.
    """
    columns = {name: [figures[name] for figures in rounds] for name in names or rounds[0]}
    return {name: None if None in of else statistics.median(of) for name, of in columns.items()}


def by(lines: Iterable[Mapping[str, Any]], *names: str) -> dict[tuple[Any, ...], list[Any]]:
    """Group lines by their values for ``names``."""
    groups: dict[tuple[Any, ...], list[Any]] = {}
    for line in lines:
        groups.setdefault(tuple(line[name] for name in names), []).append(line)
    return groups


def versions(peers: Collection[str]) -> dict[str, str]:
    """Return the versions of Python and of the packages that the named peers use."""
    found = {"python": platform.python_version()}
    for peer, packages in _PACKAGES.items():
        for package in packages if not peer or peer in peers else ():
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                found[package] = importlib.metadata.version(package)
    return found


def append_json(
    path: Path | None,
    bench: str,
    lines: Iterable[Mapping[str, Any]],
    peers: Collection[str] = (),
    **more: Any,
) -> None:
    """Append each of ``lines`` to ``path`` as a JSON object that also has the entries ``more``.
    Without ``path``, do nothing."""
    if path is None:
        return
    more |= {"cpus": os.cpu_count(), "versions": versions(peers)}
    with own_files.open_named(path, append=True) as file:
        file.writelines(json.dumps({"bench": bench, **line, **more}) + "\n" for line in lines)


def grid(count: int, *, most: int, height: float) -> Any:
    """Return a figure with ``count`` panels. A row has up to ``most`` panels, and is ``height``
    inches high."""
    from matplotlib.figure import Figure

    columns = min(most, count)
    rows = -(-count // columns)
    figure = Figure(figsize=(4 * columns, height * rows), layout="constrained")
    for place in range(count):
        figure.add_subplot(rows, columns, place + 1)
    return figure


def plot_bars(
    path: Path, title: str, panels: Sequence[tuple[str, str, Mapping[str, float]]]
) -> None:
    """Plot bars as a PNG. Each panel has a title, a unit, and figures by peer."""
    if not panels:
        return
    figure = grid(len(panels), most=4, height=2.5)
    for axis, (name, unit, bars) in zip(figure.axes, panels, strict=True):
        colors = ["tab:blue" if peer.startswith("ours") else "tab:gray" for peer in bars]
        axis.barh(list(bars), list(bars.values()), color=colors)
        axis.invert_yaxis()
        axis.set_title(name, fontsize=8)
        axis.set_xlabel(unit, fontsize=8)
        axis.tick_params(labelsize=7)
    figure.suptitle(title, fontsize=10)
    save_figure(figure, path)
