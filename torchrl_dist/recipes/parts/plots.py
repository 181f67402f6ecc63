"""The picture of a training run."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ... import own_files

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as AnyFigure


@dataclass(frozen=True)
class Evaluation:
    """Greedy episodes at one moment. ``seconds`` is the training time until then. For a resumed
    run, this includes the time before it was resumed."""

    frames: int
    updates: int
    seconds: float
    mean: float
    lowest: float
    highest: float


def draw_learning_curve(
    path: str | os.PathLike[str],
    *,
    title: str,
    training: Sequence[tuple[float, float]],
    evaluations: Sequence[Evaluation],
    threshold: float | None = None,
    best: Evaluation | None = None,
) -> None:
    """Write a PNG of returns over frames, and replace ``path`` atomically.

    Args:
        training: pairs of frames and the mean return of the exploring episodes that ended at these
            frames.
        evaluations: in the order of their frames.
        threshold: the return at which the environment counts as solved.
        best: the evaluation whose weights were kept.
    """
    # The object interface is used, because pyplot would choose a backend for the whole process.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    if training:
        x, y = zip(*training, strict=True)
        axes.plot(x, y, color="tab:gray", alpha=0.6, lw=1, label="training episodes (exploring)")
    if evaluations:
        frames = [e.frames for e in evaluations]
        axes.fill_between(
            frames,
            [e.lowest for e in evaluations],
            [e.highest for e in evaluations],
            color="tab:blue",
            alpha=0.15,
            lw=0,
            label="evaluation, worst to best episode",
        )
        axes.plot(frames, [e.mean for e in evaluations], "o-", color="tab:blue", ms=3, label="mean")
        _seconds_axis(axes, evaluations)
    if threshold is not None:
        axes.axhline(threshold, color="tab:green", ls="--", lw=1, label=f"solved: {threshold:g}")
    if best is not None:
        axes.plot([best.frames], [best.mean], "*", color="tab:red", ms=12, label="kept policy")
    axes.set_xlabel("frames")
    axes.set_ylabel("return")
    axes.set_title(title)
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="best", fontsize="small")
    save_figure(figure, path)


_MOST = 1 << 28  # largest log, in bytes; one line per second for a week takes 2^25 bytes

Curve = Sequence[Sequence[float]]
"""Points (frames, return)."""


def read_curve(path: str | os.PathLike[str]) -> Curve:
    """Return the points in a log ``csv/scalars/TAG.csv``, or an empty list if there is no such
    file.

    If a run was killed after its last checkpoint and then resumed, its log jumps back to earlier
    frames. The points after the jump replace the earlier points of these frames."""
    try:
        lines = own_files.read_plain(path, _MOST).splitlines(keepends=True)
    except FileNotFoundError:
        return []
    points: list[tuple[float, float]] = []
    for line in lines:
        if not line.endswith("\n"):  # a killed run wrote only a part of this line
            break
        with contextlib.suppress(ValueError):  # a resumed run has appended to a partial line
            frames, value = map(float, line.split(","))
            while points and points[-1][0] >= frames:
                points.pop()
            points.append((frames, value))
    return points


def draw_band(axes: Axes, curves: Sequence[Curve], label: str) -> None:
    """Draw the mean and the range of several curves.

    Each curve is linear between its points, and constant after its last point. Mean and range begin
    where all curves have begun."""
    import numpy as np

    columns = [np.transpose(curve) for curve in curves]
    first, last = max(x[0] for x, _ in columns), max(x[-1] for x, _ in columns)
    places = np.linspace(first, last, 200)
    values = np.stack([np.interp(places, x, y) for x, y in columns])
    (line,) = axes.plot(places, values.mean(0), label=label)
    axes.fill_between(places, values.min(0), values.max(0), color=line.get_color(), alpha=0.2, lw=0)


def save_figure(figure: AnyFigure, path: str | os.PathLike[str]) -> None:
    """Replace ``path`` atomically with a picture. Its type is the path's suffix, by default PNG."""
    path = own_files.resolved(path)
    kind = path.suffix.removeprefix(".") or "png"
    own_files.atomic_write(
        path, lambda file: figure.savefig(file, dpi=120, format=kind), sync=False
    )


def _seconds_axis(axes: Axes, evaluations: Sequence[Evaluation]) -> None:
    """Add an axis on top with the training time, in seconds, at each number of frames."""
    import numpy as np

    frames = np.array([0, *(e.frames for e in evaluations)], dtype=float)
    seconds = np.array([0, *(e.seconds for e in evaluations)], dtype=float)
    if (np.diff(frames) <= 0).any() or (np.diff(seconds) <= 0).any():
        return

    def to_seconds(x: Any) -> Any:
        return np.interp(x, frames, seconds) + np.maximum(0, x - frames[-1]) * slope

    def to_frames(x: Any) -> Any:
        return np.interp(x, seconds, frames) + np.maximum(0, x - seconds[-1]) / slope

    slope = seconds[-1] / frames[-1]
    axes.secondary_xaxis("top", functions=(to_seconds, to_frames)).set_xlabel("seconds")
