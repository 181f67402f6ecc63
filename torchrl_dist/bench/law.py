"""Does a buffer that is spread over workers sample like a single buffer?

    torchrl-dist bench law --json law.jsonl --plot law.png

The same rows are stored twice: in one buffer, and split over 4 shards. Each way of drawing batches
of 256 is compared with the distribution of the single buffer. The measure is the total variation
distance between this distribution and the frequencies with which the rows were drawn. The distance
is 0 if the two are equal, and 1 if they have no row in common. The column ``single`` is the
distance for draws from the single buffer itself, which is due to chance alone.

Ways:

- ``per worker``: each worker draws its part of the batch from its own buffer, and the parts are
  joined, as with DDP and a buffer per rank (pytorch/rl#1397). All workers get the same weight, no
  matter which priorities their rows have.
- ``stale``: shards are chosen by outdated masses (sums of priority^alpha), and the draw is not
  corrected. In every second shard, the outdated mass is 10 times the present one.
- ``sharded``: ours (``replay/law/shard_law.py``). It starts from the same outdated masses as
  ``stale``, and corrects the draw.

Cases:

- ``alike``: every shard has the same priorities.
- ``equal``: all shards have equally many rows. All priorities are drawn from one distribution.
- ``unequal rows``: the shards' numbers of rows are in the ratio 1 : 2 : 3 : ... All priorities are
  drawn from one distribution.
- ``unequal priorities``: all shards have equally many rows. Their mean priorities are in the ratio
  1 : 3 : 9 : ...

Each case is measured with prioritized (alpha 0.6) and with uniform sampling (alpha 0). ``exact`` is
the distance of ``per worker``, computed from the probabilities instead of draws.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from torchrl_dist.bench import command
from torchrl_dist.bench.results import append_json, by
from torchrl_dist.errors import ConfigurationError
from torchrl_dist.recipes.parts.plots import save_figure
from torchrl_dist.ui import show_table

WAYS = ("single", "per worker", "stale", "sharded")
CASES = ("alike", "equal", "unequal rows", "unequal priorities")
ALPHAS = {"prioritized": 0.6, "uniform": 0.0}
_OLD_MASS = 10.0  # the outdated mass, divided by the present one


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's description and options to ``parser``."""
    command.describe(parser, __doc__, run)
    command.add_number(parser, "--workers", int, 4, "shards")
    command.add_number(parser, "--rows", int, 256, "rows per shard, on average")
    command.add_number(parser, "--batch", int, 256, "rows per batch")
    command.add_number(parser, "--draws", int, 400_000, "rows drawn per round")
    text = "rounds with different random numbers; the table shows medians"
    command.add_number(parser, "--rounds", int, 3, text)
    command.add_figures(parser, plot="distances")


def run(options: argparse.Namespace) -> int:
    """Measure, and print a table. Blocks for about half a minute.

    Returns:
        0.

    Raises:
        ConfigurationError: an option has an invalid value.
    """
    if options.workers < 2:
        raise ConfigurationError(f"--workers: got {options.workers}, expected at least 2")
    if options.batch % options.workers:
        raise ConfigurationError(
            f"--batch: got {options.batch}, expected a multiple of --workers {options.workers}, so "
            "that every worker can draw an equal part of it"
        )
    command.check_folders(options.json, options.plot)
    lines = [line for kind in ALPHAS for case in CASES for line in measure(case, kind, options)]
    _print(lines)
    settings = {name: getattr(options, name) for name in ("workers", "rows", "batch", "draws")}
    append_json(options.json, "law", lines, **settings)
    if options.plot is not None:
        _plot(options.plot, lines, options)
    return 0


def measure(case: str, kind: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Draw in every way, and compare with the distribution of the single buffer.

    Returns:
        One JSON object per way.
    """
    priorities = _priorities(case, options.workers, options.rows)
    leaves = [part ** ALPHAS[kind] for part in priorities]
    everything = np.concatenate(leaves)
    law = everything / everything.sum()
    per_worker = np.concatenate([part / part.sum() / len(leaves) for part in leaves])
    distances: dict[str, list[float]] = {way: [] for way in WAYS}
    for round_ in range(options.rounds):
        for number, way in enumerate(WAYS):
            draw = Drawer(leaves, np.random.default_rng([round_, number])).way(way)
            counts = np.zeros(law.size, dtype=np.int64)
            for _ in range(-(-options.draws // options.batch)):
                counts += np.bincount(draw(options.batch), minlength=law.size)
            distances[way].append(variation(counts / counts.sum(), law))
    return [
        {
            "case": case,
            "kind": kind,
            "way": way,
            "distance": statistics.median(found),
            "distances": found,
            "ratio_to_floor": statistics.median(found) / statistics.median(distances["single"]),
            "exact_per_worker": variation(per_worker, law),
        }
        for way, found in distances.items()
    ]


def variation(one: np.ndarray, other: np.ndarray) -> float:
    """Return the total variation distance of two distributions over the same rows."""
    return float(np.abs(one - other).sum() / 2)


class Drawer:
    """The ways of drawing a batch of global row numbers, int64 [batch], from the same leaves
    (priorities^alpha).
    """

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
    if case == "alike":
        return [random.exponential(size=rows)] * workers
    parts = np.arange(1, workers + 1)
    if case == "unequal rows":
        counts = [max(1, round(rows * workers * part / parts.sum())) for part in parts]
        return [random.exponential(size=count) for count in counts]
    base = 3.0 if case == "unequal priorities" else 1.0
    return [base**worker * random.exponential(size=rows) for worker in range(workers)]


def _print(lines: list[dict[str, Any]]) -> None:
    left = ("priorities", "shards")
    columns = (*left, "single\n(chance)", *WAYS[1:], "per worker,\nexact")
    rows = [
        [*names, *(f"{x['distance']:.4f}" for x in ways), f"{ways[0]['exact_per_worker']:.4f}"]
        for names, ways in by(lines, "kind", "case").items()
    ]
    title = "total variation distance to the distribution of a single buffer"
    show_table(title, columns, rows, left=left)


def _plot(path: Path, lines: list[dict[str, Any]], options: argparse.Namespace) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.5 * len(ALPHAS), 3.4), layout="constrained")
    colors = ("tab:gray", "tab:orange", "tab:red", "tab:blue")
    place = np.arange(len(CASES))
    for axis, kind in zip(figure.subplots(1, len(ALPHAS), sharey=True), ALPHAS, strict=True):
        for number, (way, color) in enumerate(zip(WAYS, colors, strict=True)):
            heights = [x["distance"] for x in lines if (x["kind"], x["way"]) == (kind, way)]
            axis.bar(place + 0.2 * (number - 1.5), heights, 0.2, label=way, color=color)
        axis.set_xticks(place, [case.replace(" ", "\n") for case in CASES], fontsize=8)
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
