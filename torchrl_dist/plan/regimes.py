"""When does a receive deadline pay? Simulates a learner that takes only the rollouts that have
arrived by a deadline.

    python -m torchrl_dist.plan.regimes --plot regimes.png

A learner without policy lag waits until all ``workers`` have delivered a rollout, or until a
deadline has passed and at least one worker has delivered (``Quorum(1, timeout_s)``). The learner
learns from the rollouts that have arrived. Their workers then start new rollouts, while the other
workers continue theirs. Two conditions decide whether a deadline brings more frames per second:

- how much the times of *rollouts* vary. If the time of a step varies by a fraction s (its standard
  deviation over its mean), the time of a rollout of n envs and K steps varies by the fraction
  s / sqrt(n K). With more envs, rollouts differ by more seconds, but by a smaller fraction of their
  length.
- whether the learner's time grows with the number of batches or with the number of rows. With a
  small network, a batch takes the same time for any number of rows. With a large network, the time
  grows with the rows, so smaller batches cost no extra time.

All times are in units of a mean rollout. The map shows the gain of the best deadline over no
deadline. If any deadline pays, the shortest deadline pays most, because workers then wait least. A
deadline also makes some rows one update older, and leaves fewer rows for each update. The user must
weigh these effects against the gain.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from torchrl_dist import own_files
from torchrl_dist.planner import MIN_GAIN
from torchrl_dist.recipes.parts.plots import save_figure
from torchrl_dist.ui import show_table

SPREADS = (0.01, 0.03, 0.1, 0.3, 1.0, 1.5)
WORKERS = (2, 4, 8, 16, 32, 128)
DEADLINES = (0.1, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 3.0)
NETWORKS = {
    "small, 1 % of a rollout": (0.01, 0.0),
    "half a rollout, by batch": (0.5, 0.0),
    "half a rollout, by row": (0.0, 0.5),
    "as long as a rollout, by row": (0.0, 1.0),
}
"""The learner's time for a batch with a rollout of each worker, as two numbers. The first number is
the part of this time that does not depend on the number of rows. The second number is the part that
is proportional to the number of rows."""
_ROUNDS, _REPLICAS = 60, 24


@dataclass(frozen=True)
class Received:
    """The result of a simulated run: the number of rollouts that the learner receives per mean
    rollout time, and the mean number of workers whose rollouts arrive in one receive."""

    rate: float
    workers: float


def simulate(
    workers: int,
    spread: float,
    *,
    batch_s: float = 0.0,
    rows_s: float = 0.0,
    deadline_s: float = math.inf,
    rounds: int = _ROUNDS,
    replicas: int = _REPLICAS,
    seed: int = 0,
) -> Received:
    """Simulate collecting with a deadline. A rollout's time is lognormal with mean 1.

    Args:
        spread: standard deviation of a rollout's time.
        batch_s: the learner's time for a batch, whatever its number of rows.
        rows_s: the learner's additional time for a batch with a rollout of each worker. For a
            smaller batch, this time is shorter in proportion.
        deadline_s: the deadline, counted from the beginning of a receive. If it is infinite, the
            learner waits for all workers.
        rounds: number of receives in each run.
        replicas: number of independent runs.
    """
    rng = np.random.default_rng(seed)
    sigma = math.sqrt(math.log1p(spread**2))

    def draw() -> np.ndarray:  # [replicas, workers]
        return rng.lognormal(-(sigma**2) / 2, sigma, (replicas, workers))

    now = np.zeros(replicas)
    ready = draw()
    taken_so_far = np.zeros(replicas)
    for _ in range(rounds):
        first, last = ready.min(1), ready.max(1)
        until = np.minimum(last, np.maximum(now + deadline_s, first))
        until = np.maximum(until, now)
        taken = ready <= until[:, None]
        count = taken.sum(1)
        taken_so_far += count
        now = until + batch_s + rows_s * count / workers
        ready = np.where(taken, now[:, None] + draw(), ready)
    return Received(float((taken_so_far / now).mean()), float(taken_so_far.mean() / rounds))


@dataclass(frozen=True)
class Gain:
    """The best deadline, and its gain over waiting for all workers.

    ``gain`` is a factor. If no deadline pays, ``deadline_s`` is infinite and ``gain`` is 1.
    ``workers_per_receive`` is the mean number of rollouts in a batch of the learner.
    """

    gain: float
    deadline_s: float
    workers_per_receive: float


def best_deadline(
    workers: int, spread: float, *, batch_s: float = 0.0, rows_s: float = 0.0
) -> Gain:
    """Return the deadline, in units of a mean rollout, that gives the most frames per second."""
    work: dict[str, Any] = {"batch_s": batch_s, "rows_s": rows_s}
    patient = simulate(workers, spread, **work)
    best = Gain(1.0, math.inf, patient.workers)
    for deadline_s in DEADLINES:
        hurried = simulate(workers, spread, deadline_s=deadline_s, **work)
        if hurried.rate > best.gain * patient.rate:
            best = Gain(hurried.rate / patient.rate, deadline_s, hurried.workers)
    return best


def regimes() -> list[dict[str, Any]]:
    """Return the map: one entry per network, number of workers and spread of a rollout."""
    return [
        {
            "network": name,
            "workers": workers,
            "spread": spread,
            **asdict(best_deadline(workers, spread, batch_s=batch_s, rows_s=rows_s)),
        }
        for (name, (batch_s, rows_s)), workers, spread in itertools.product(
            NETWORKS.items(), WORKERS, SPREADS
        )
    ]


def print_table(lines: Sequence[dict[str, Any]]) -> None:
    """Print one table per network: the gain and the best deadline for each number of workers and
    each spread."""
    for name in dict.fromkeys(line["network"] for line in lines):
        title = f"gain of the best deadline (and that deadline); learner: {name}"
        rows = [
            [str(workers)]
            + [_cell(x) for x in lines if (x["network"], x["workers"]) == (name, workers)]
            for workers in WORKERS
        ]
        show_table(title, ("workers", *(f"spread {spread:g}" for spread in SPREADS)), rows)


def _cell(line: dict[str, Any]) -> str:
    if line["gain"] < MIN_GAIN:
        return f"{line['gain']:.2f}"
    return f"[bold]{line['gain']:.2f}[/] ({line['deadline_s']:g})"


def plot(path: Path, lines: Sequence[dict[str, Any]]) -> None:
    """Plot one panel per network: gain over spread and workers, with a line at ``MIN_GAIN``."""
    from matplotlib.figure import Figure

    rows = -(-len(NETWORKS) // 2)
    figure = Figure(figsize=(8, 3.7 * rows), layout="constrained")
    for axis, name in zip(figure.subplots(rows, 2).flat, NETWORKS, strict=False):
        gains = np.array([line["gain"] for line in lines if line["network"] == name])
        gains = gains.reshape(len(WORKERS), len(SPREADS))
        image = axis.imshow(gains, vmin=1.0, vmax=2.5, origin="lower", cmap="viridis")
        axis.contour(gains, [MIN_GAIN], colors="white")
        axis.set_xticks(range(len(SPREADS)), [f"{s:g}" for s in SPREADS])
        axis.set_yticks(range(len(WORKERS)), [str(w) for w in WORKERS])
        axis.set_xlabel("spread of a rollout")
        axis.set_ylabel("workers")
        axis.set_title(f"learner: {name}", fontsize=10)
        for (i, j), gain in np.ndenumerate(gains):
            color = "black" if gain > 2 else "white"
            axis.text(j, i, f"{gain:.2f}", ha="center", va="center", fontsize=8, color=color)
    figure.colorbar(image, ax=figure.axes, label="frames/s, best deadline over none")
    save_figure(figure, path)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the map. Takes a few seconds of one core."""
    parser = argparse.ArgumentParser(
        prog="python -m torchrl_dist.plan.regimes",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write the map as one JSON object per line"
    )
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="plot the map")
    options = parser.parse_args(argv)
    lines = regimes()
    print_table(lines)
    if options.json is not None:
        with own_files.open_named(options.json, append=False) as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)
    if options.plot is not None:
        plot(options.plot, lines)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
