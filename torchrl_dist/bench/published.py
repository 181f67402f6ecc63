"""Do the recipes reproduce results that others published?

    torchrl-dist bench published --rows zoo-dqn-cartpole --seeds 5 --json published.jsonl

Each row of the table is a published result. The command repeats this result with the source's
environment and number of frames, and measures two figures of each run:

- training: mean return of the last 100 episodes of training, with their exploration;
- final: mean return of greedy episodes of the last policy, not of the best one.

For each row, the command compares the figure that the row's source gives with ours. The row is
"reproduced" if the 95 % interval of the mean over our seeds (by bootstrap) overlaps the 95 %
interval of the source's mean. If the source gives no spread, the interval is the source's mean
alone. With fewer than three seeds, no verdict is given.

Each run is one line of the --json file. Runs that are in the file are not repeated, so the command
continues where it was stopped; a run that was stopped starts over. A run does not count if the
settings or the number of frames of its row were changed after the run. The table and --plot show
all other runs of the file.

With several --processes, a second table shows how the results depend on the number of processes.
All jobs of a row have the same number of frames and, except with impala, the same number of
environments. --processes counts the learners of ddppo, and the collectors of other recipes; 0 means
a single process. "Whole run" is the mean of the training return over all frames, so a job that
learns faster has a higher mean.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from operator import itemgetter
from pathlib import Path
from statistics import fmean, median
from typing import Any

from torchrl_dist import own_files
from torchrl_dist.bench import command
from torchrl_dist.bench.published_rows import FIGURES, LEAST, ROWS, SOURCES, interval, verdict
from torchrl_dist.bench.results import append_json, by, grid
from torchrl_dist.bench.train_plan import spread
from torchrl_dist.errors import ConfigurationError, TorchRLDistError
from torchrl_dist.recipes.catalog import RECIPES
from torchrl_dist.recipes.parts.plots import draw_band, read_curve, save_figure
from torchrl_dist.recipes.training.config import RecipeConfig
from torchrl_dist.ui import at_least, show_table

_EVALUATIONS, _EPISODES = 20, 20
"""Evaluations per run, and greedy episodes of each."""

_MOST = 1 << 28  # limit of a results file's size, in bytes; large, because its lines contain curves

Line = Mapping[str, Any]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's description and options to ``parser``."""
    command.describe(parser, __doc__, run)
    command.add_names(parser, "--rows", ROWS)
    command.add_number(parser, "--seeds", int, 5, "runs of each row")
    text = "processes that collect (or, for ddppo, learn)"
    command.add_list(parser, "--processes", at_least(0), "0", text)
    command.add_figures(
        parser, timeout_s=7200.0, timed="a run", line_per="run", plot="training returns"
    )


def run(options: argparse.Namespace) -> int:
    """Train what is missing, and print the table. Blocks for minutes to hours.

    Returns:
        0; 1 if a run failed; 130 or 143 after SIGINT or SIGTERM.

    Raises:
        ConfigurationError: an output file cannot be written, or has other contents.
    """
    command.check_folders(options.json, options.plot)
    lines = read_lines(options.json)

    def train_all() -> int:
        failed: set[str] = set()
        for seed in range(options.seeds):
            for name in options.rows:
                for processes in options.processes:
                    if name not in failed and not _is_done(lines, name, seed, processes):
                        failed |= train_one(name, seed, processes)
        return 1 if failed else 0

    def train_one(name: str, seed: int, processes: int) -> set[str]:
        label = f"{name}, seed {seed}, {_layout(name, processes)}"
        try:
            line = measure(name, seed, processes, options.timeout_s)
        except TorchRLDistError as error:
            command.say(f"{label}: failed: {error}")
            return {name}
        lines.append(line)
        append_json(options.json, "published", [line])
        command.say(f"{label}: training {_said(line['training'])}, final {_said(line['final'])}")
        return set()

    status = command.until_stopped(train_all)
    mine = [line for line in lines if line["row"] in options.rows]
    show(mine)
    if options.plot is not None and mine:
        plot(options.plot, mine)
    return status


def read_lines(path: Path | None) -> list[Line]:
    """Return the lines that earlier runs of this command wrote, if the settings and the number of
    frames of their rows are unchanged.

    Raises:
        ConfigurationError: this command did not write the file."""
    if path is None or not path.is_file():
        return []
    text = own_files.read_plain(path, _MOST)
    if text and not text.endswith("\n"):  # a process was killed while it wrote this line
        raise ConfigurationError(
            f"{path}: the last line is incomplete; remove it, and run the command again"
        )
    try:
        lines = [json.loads(line) for line in text.splitlines()]
        if all(line["bench"] == "published" for line in lines):
            known = [line for line in lines if line["row"] in ROWS]
            fit = [line for line in known if _fits(line)]
            if len(fit) < len(known):
                command.say(
                    f"{path}: {len(known) - len(fit)} runs do not count, because the settings or "
                    "frames of their rows have changed"
                )
            return fit
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigurationError(
            f"{path} has a line that this command did not write ({error!r}); choose another file"
        ) from error
    raise ConfigurationError(f"{path} holds results of another benchmark; choose another file")


def _fits(line: Line) -> bool:
    """Say if a run was made with its row's present settings and number of frames. A run ends with
    a whole batch, so it may have somewhat more frames than the row says."""
    wanted = ROWS[line["row"]].frames
    return line["settings"] == _settings(line["row"]) and wanted <= line["frames"] < 1.05 * wanted


def _settings(name: str) -> Any:
    return json.loads(json.dumps(ROWS[name].settings))  # tuples become lists


def _is_done(lines: Sequence[Line], name: str, seed: int, processes: int) -> bool:
    wanted = (name, seed, processes)
    return any((line["row"], line["seed"], line["processes"]) == wanted for line in lines)


def _layout(name: str, processes: int) -> str:
    if not processes:
        return "one process"
    return f"{processes} {'learner' if ROWS[name].recipe == 'ddppo' else 'collector'}(s)"


def config_of(name: str, seed: int, processes: int) -> RecipeConfig:
    """Return the configuration of a row's job."""
    row = ROWS[name]
    settings = {
        "eval_interval_frames": max(1, row.frames // _EVALUATIONS),
        "eval_episodes": _EPISODES,
        "device": "cpu",
        **row.settings,
    }
    config = RECIPES[row.recipe].config(env=row.env, seed=seed, total_frames=row.frames, **settings)
    return spread(config, processes)


def measure(name: str, seed: int, processes: int, timeout_s: float) -> dict[str, Any]:
    """Train in other processes, and return the line of the run.

    Raises:
        TorchRLDistError: the run failed, or took longer than ``timeout_s``.
    """
    from torchrl_dist.bench.processes import start_training

    with command.folder_in(Path(tempfile.gettempdir())) as folder:
        config = replace(config_of(name, seed, processes), output_dir=str(folder / "run"))
        with start_training(config, folder, "--json", stderr=subprocess.PIPE) as process:
            try:
                said, errors = process.communicate(timeout=timeout_s)
            except subprocess.TimeoutExpired as error:
                raise TorchRLDistError(
                    f"the run took longer than {timeout_s:g} s; pass a larger --timeout-s"
                ) from error
            finally:
                process.kill()
        if process.returncode != 0 or not said:
            last = (errors.strip().splitlines() or ["it printed nothing"])[-1]
            raise TorchRLDistError(f"exit code {process.returncode}: {last}")
        result = json.loads(said.splitlines()[-1])
        curve = read_curve(folder / "run/csv/scalars/train/return.csv")
    if result["stopped_by"] is not None:
        raise TorchRLDistError(
            f"the run was stopped early ({result['stopped_by']}); run the command again"
        )
    if result["training_return"] is None:
        raise TorchRLDistError(
            f"no episode ended within the run's {ROWS[name].frames:,} frames; check that the "
            f"episodes of {ROWS[name].env} end earlier"
        )
    return {
        "row": name, "seed": seed, "processes": processes, "settings": _settings(name),
        "training": result["training_return"], "final": result["last_return"],
        "best": result["mean_return"], "frames": result["frames"], "seconds": result["seconds"],
        "curve": curve,
    }  # fmt: skip


# ---- results


def show(lines: Sequence[Line]) -> None:
    """Print how each row compares with its source, for each number of processes."""
    groups = by(lines, "row", "processes")
    table = []
    for (name, processes), runs in groups.items():
        row, source = ROWS[name], SOURCES[ROWS[name].source]
        values = [run[source.figure] for run in runs]
        low, high = interval(values)
        other = next(figure for figure in FIGURES if figure != source.figure)
        published = f"{row.mean:g}" + (f" ± {row.spread:g}" if row.spread is not None else "")
        found = verdict((low, high), row.interval) if len(runs) >= LEAST else "too few seeds"
        table.append(
            (name, str(processes), source.figure, _said(fmean(values)),
             f"{_said(low)} to {_said(high)}", published, found,
             _said(fmean(run[other] for run in runs)), str(len(runs)), f"{row.frames:,}",
             f"{median(run['seconds'] for run in runs):,.0f}")
        )  # fmt: skip
    columns = ("row", "processes", "figure", "ours", "95 %", "published", "result", "other figure",
               "seeds", "frames", "seconds")  # fmt: skip
    show_table(
        "published results: means over seeds", columns, table,
        left=("row", "figure", "result"), width=160,
    )  # fmt: skip
    layouts = Counter(name for name, _ in groups)
    spreads = [runs for (name, _), runs in groups.items() if layouts[name] > 1]
    if spreads:
        show_table(
            "what distribution changes: means over seeds (95 % intervals)",
            ("row", "processes", "seeds", "training", "final", "whole run", "seconds"),
            [
                (runs[0]["row"], str(runs[0]["processes"]), str(len(runs)),
                 *(_mean([of(run) for run in runs]) for of in _WHAT_CHANGES),
                 f"{median(run['seconds'] for run in runs):,.0f}")
                for runs in spreads
            ],
            left=("row",), width=130,
        )  # fmt: skip
    for name in dict.fromkeys(line["row"] for line in lines):
        if ROWS[name].differs:
            command.say(f"{name} differs: {ROWS[name].differs}")


def whole_run(line: Line) -> float:
    """Return the mean of a run's training return over all frames, by the trapezoidal rule. Frames
    before the first point of the curve count with the return of the first point. The mean of a run
    without a curve is NaN."""
    if not line["curve"]:
        return math.nan
    frames, returns = zip(*line["curve"], strict=True)
    area = frames[0] * returns[0]
    for at in range(1, len(frames)):
        area += (frames[at] - frames[at - 1]) * (returns[at] + returns[at - 1]) / 2
    return area / frames[-1]


_WHAT_CHANGES = (itemgetter("training"), itemgetter("final"), whole_run)


def _mean(values: Sequence[float]) -> str:
    low, high = interval(values)
    return f"{_said(fmean(values))} ({_said(low)} to {_said(high)})"


def _said(value: float) -> str:
    return f"{value:.1f}" if abs(value) >= 2 else f"{value:.3f}"


def plot(path: Path, lines: Sequence[Line]) -> None:
    """Plot the training returns of each row over frames: mean and range over seeds."""
    from matplotlib.ticker import EngFormatter

    names = list(dict.fromkeys(line["row"] for line in lines))
    figure = grid(len(names), most=3, height=3)
    for axis, name in zip(figure.axes, names, strict=True):
        row = ROWS[name]
        for (_, processes), runs in by(lines, "row", "processes").items():
            curves = [run["curve"] for run in runs if run["curve"]]
            if runs[0]["row"] == name and curves:
                draw_band(axis, curves, _layout(name, processes))
        axis.axhspan(*row.interval, color="black", alpha=0.15)
        axis.axhline(row.mean, color="black", linewidth=0.8, linestyle=":")
        axis.set_title(name, fontsize=9)
        axis.xaxis.set_major_formatter(EngFormatter(sep=""))
        axis.tick_params(labelsize=7)
        if axis.lines[1:]:
            axis.legend(fontsize=6)
    figure.suptitle("training return over frames, mean and range of seeds; dotted: published")
    save_figure(figure, path)
