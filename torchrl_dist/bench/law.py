"""Does a buffer that is spread over workers sample like a single one?

    torchrl-dist bench law --json law.jsonl --plot law.png

The same rows are in one buffer, and split over 4 shards. Each way of drawing batches of 256 is
compared with the distribution of the single buffer. The measure is the total variation distance of
how often each row was drawn: 0 means the same distribution, 1 that no row is drawn by both. The
column ``single`` is the distance of the single buffer itself, which is due to chance alone.

Ways:

- ``per worker``: each worker draws its part of the batch from its own buffer, and the parts are
  joined, as with DDP and a buffer per rank (pytorch/rl#1397). All workers get the same weight, no
  matter which priorities their rows have.
- ``stale``: shards are chosen by old masses, which are 10 times the present ones in every second
  shard, and the draw is not corrected.
- ``sharded``: ours (``replay/law/shard_law.py``). It starts from the same old masses, and corrects
  the draw.

Cases:

- ``alike``: every shard has the same priorities.
- ``equal``: equally many rows, with priorities from one distribution.
- ``unequal rows``: 1 : 2 : 3 : ... rows, with priorities from one distribution.
- ``unequal priorities``: equally many rows, with priorities of 1 : 3 : 9 : ...

Each case is measured with priorities (alpha 0.6) and uniformly (alpha 0). ``exact`` is the distance
of ``per worker``, computed without drawing.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from torchrl_dist.bench.command import add_figures, check_folders, describe
from torchrl_dist.errors import ConfigurationError
from torchrl_dist.recipes.parts.plots import save_figure
from torchrl_dist.ui import show_table

WAYS = ("single", "per worker", "stale", "sharded")
CASES = ("alike", "equal", "unequal rows", "unequal priorities")
ALPHAS = {"prioritized": 0.6, "uniform": 0.0}
_OLD_MASS = 10.0  # times the present mass


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's description and options to ``parser``."""
    describe(parser, __doc__, run)
    for option, default, text in (
        ("--workers", 4, "shards"),
        ("--rows", 256, "rows per shard, on average"),
        ("--batch", 256, "rows per batch"),
        ("--draws", 400_000, "rows drawn per round"),
        ("--rounds", 3, "rounds with different random numbers; the table shows medians"),
    ):
        parser.add_argument(option, type=int, default=default, help=f"{text} (default: {default})")
    add_figures(parser, plot="distances")


def run(options: argparse.Namespace) -> int:
    """Measure, and print a table. Blocks for about half a minute.

    Returns:
        0.

    Raises:
        ConfigurationError: an option has an invalid value.
    """
    from torchrl_dist.bench.replay_peers import versions
    from torchrl_dist.bench.table import append_json

    for name, least in (("workers", 2), ("rows", 1), ("draws", 1), ("rounds", 1)):
        if getattr(options, name) < least:
            raise ConfigurationError(
                f"--{name}: got {getattr(options, name)}, expected at least {least}"
            )
    if options.batch < 1 or options.batch % options.workers:
        raise ConfigurationError(
            f"--batch: got {options.batch}, expected a multiple of --workers {options.workers}, so "
            "that every worker can draw an equal part of it"
        )
    check_folders(options.json, options.plot)
    lines = [measure(case, kind, options) for kind in ALPHAS for case in CASES]
    _print(lines)
    if options.json is not None:
        settings = {name: getattr(options, name) for name in ("workers", "rows", "batch", "draws")}
        extra = {**settings, "cpus": os.cpu_count(), "versions": versions([])}
        append_json(options.json, [cell for line in lines for cell in line.cells()], extra)
    if options.plot is not None:
        _plot(options.plot, lines, options)
    return 0


@dataclass
class Line:
    """The distances of one case. ``distances[way]`` has one entry per round."""

    case: str
    kind: str
    exact: float
    distances: dict[str, list[float]] = field(default_factory=dict)

    def distance(self, way: str) -> float:
        return statistics.median(self.distances[way])

    def cells(self) -> list[dict[str, Any]]:
        """Return one JSON object per way."""
        return [
            {
                "bench": "law",
                "case": self.case,
                "kind": self.kind,
                "way": way,
                "distance": self.distance(way),
                "distances": distances,
                "ratio_to_floor": self.distance(way) / self.distance("single"),
                "exact_per_worker": self.exact,
            }
            for way, distances in self.distances.items()
        ]


def measure(case: str, kind: str, options: argparse.Namespace) -> Line:
    """Draw in every way, and compare with the distribution of the single buffer."""
    priorities = _priorities(case, options.workers, options.rows)
    leaves = [part ** ALPHAS[kind] for part in priorities]
    everything = np.concatenate(leaves)
    law = everything / everything.sum()
    per_worker = np.concatenate([part / part.sum() / len(leaves) for part in leaves])
    line = Line(case, kind, exact=variation(per_worker, law))
    for round_ in range(options.rounds):
        for way in WAYS:
            draw = Drawer(leaves, np.random.default_rng([round_, WAYS.index(way)])).way(way)
            counts = np.zeros(law.size, dtype=np.int64)
            for _ in range(-(-options.draws // options.batch)):
                counts += np.bincount(draw(options.batch), minlength=law.size)
            line.distances.setdefault(way, []).append(variation(counts / counts.sum(), law))
    return line


def variation(one: np.ndarray, other: np.ndarray) -> float:
    """Return the total variation distance of two distributions over the same rows."""
    return float(np.abs(one - other).sum() / 2)


class Drawer:
    """The ways of drawing a batch of global row numbers, int64 [batch], from the same leaves."""

    def __init__(self, leaves: list[np.ndarray], random: np.random.Generator) -> None:
        self._random = random
        self._trees = [_tree(part) for part in leaves]
        self._whole = _tree(np.concatenate(leaves))
        self._masses = np.array([tree.total for tree in self._trees])
        self._old_masses = self._masses.copy()
        self._old_masses[::2] *= _OLD_MASS
        self._first_row = np.cumsum([0] + [part.size for part in leaves])[:-1]

    def way(self, name: str) -> Callable[[int], np.ndarray]:
        return getattr(self, "_" + name.replace(" ", "_"))

    def _single(self, batch: int) -> np.ndarray:
        return self._whole.draw(self._random.random(batch))[0]

    def _per_worker(self, batch: int) -> np.ndarray:
        part = batch // len(self._trees)
        return np.concatenate([self._ask(shard, part) for shard in range(len(self._trees))])

    def _stale(self, batch: int) -> np.ndarray:
        from torchrl_dist.replay.law.shard_law import choose_shards

        shards = choose_shards(self._old_masses, batch, self._random.random)
        counts = np.bincount(shards, minlength=len(self._trees))
        return np.concatenate([self._ask(shard, count) for shard, count in enumerate(counts)])

    def _sharded(self, batch: int) -> np.ndarray:
        from torchrl_dist.replay.law.shard_law import KnownMasses, number_rows

        known = KnownMasses(len(self._trees))
        known.learn(self._old_masses)
        request = known.plan(batch, self._random.random)
        replies = [self._ask(shard, count) for shard, count in enumerate(request.rows)]
        shards = request.correct(self._masses, self._random.random)
        _, missing = number_rows(shards, request.rows)
        replies = [
            np.append(rows, self._ask(shard, missing[shard])) for shard, rows in enumerate(replies)
        ]
        row, _ = number_rows(shards, request.rows + missing)
        start = np.cumsum([0] + [rows.size for rows in replies])[:-1]
        return np.concatenate(replies)[start[shards] + row]

    def _ask(self, shard: int, count: int) -> np.ndarray:
        drawn = self._trees[shard].draw(self._random.random(int(count)))[0]
        return self._first_row[shard] + drawn


def _tree(leaves: np.ndarray) -> Any:
    from torchrl_dist.replay.law.tree import PriorityTree

    tree = PriorityTree(leaves.size)
    tree.set_range(0, leaves.size, leaves)
    tree.refresh()
    return tree


def _priorities(case: str, workers: int, rows: int) -> list[np.ndarray]:
    random = np.random.default_rng(0)  # the same rows in every round
    counts = [rows] * workers
    scales = [1.0] * workers
    if case == "unequal rows":
        total, parts = rows * workers, np.arange(1, workers + 1)
        counts = [max(1, round(total * part / parts.sum())) for part in parts]
    if case == "unequal priorities":
        scales = [3.0**worker for worker in range(workers)]
    if case == "alike":
        return [random.exponential(size=rows)] * workers
    sizes = zip(scales, counts, strict=True)
    return [scale * random.exponential(size=count) for scale, count in sizes]


def _print(lines: list[Line]) -> None:
    left = ("priorities", "shards")
    columns = (*left, "single\n(chance)", *WAYS[1:], "per worker,\nexact")
    rows = [
        [x.kind, x.case, *(f"{x.distance(way):.4f}" for way in WAYS), f"{x.exact:.4f}"]
        for x in lines
    ]
    title = "total variation distance to the distribution of a single buffer"
    show_table(title, columns, rows, left=left)


def _plot(path: Path, lines: list[Line], options: argparse.Namespace) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.5 * len(ALPHAS), 3.4), layout="constrained")
    colors = ("tab:gray", "tab:orange", "tab:red", "tab:blue")
    for axis, kind in zip(figure.subplots(1, len(ALPHAS), sharey=True), ALPHAS, strict=True):
        of_kind = [line for line in lines if line.kind == kind]
        place = np.arange(len(of_kind))
        for number, (way, color) in enumerate(zip(WAYS, colors, strict=True)):
            heights = [line.distance(way) for line in of_kind]
            axis.bar(place + 0.2 * (number - 1.5), heights, 0.2, label=way, color=color)
        axis.set_xticks(place, [line.case.replace(" ", "\n") for line in of_kind], fontsize=8)
        axis.set_title(kind, fontsize=9)
    figure.axes[0].set_ylabel("total variation distance", fontsize=8)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, fontsize=8, loc="outside lower center", ncols=len(WAYS))
    figure.suptitle(
        f"distance to a single buffer's distribution: {options.workers} shards, "
        f"{options.draws:,} draws; single = chance",
        fontsize=10,
    )
    save_figure(figure, path)
