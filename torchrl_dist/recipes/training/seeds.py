"""``train --seeds N``: the same run with N seeds, one after the other, and a plot of all runs."""

from __future__ import annotations

import ctypes
import dataclasses
import json
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from ... import own_files
from ...errors import ConfigurationError
from ...stopping import handling
from .config import Config, RecipeConfig, config_to_resume
from .options import as_flags

_PR_SET_PDEATHSIG = 1
_PASSED_ON = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
RESULTS, CURVE = "seeds.jsonl", "seeds.png"
_TYPES = {"seed": int, "frames": int, "mean_return": float | int | None, "stopped_by": str | None}


def train_seeds(
    config: RecipeConfig,
    given: Mapping[str, Any],
    count: int,
    *,
    resume: bool,
    say: Callable[[str], None],
) -> tuple[dict[str, Any], int]:
    """Run ``torchrl-dist train`` for ``count`` seeds, from ``config.seed`` on. Blocks.

    The folder of all runs is ``--output-dir``, by default ``runs/RECIPE-ENV-seeds``. It contains a
    folder for each seed, the results as ``seeds.jsonl``, and a plot, ``seeds.png``, which shows the
    mean and the range of the evaluations over the seeds. Resumed runs keep their options. A seed
    that has not begun gets the options of the first run, so that all runs have the same options.

    Args:
        given: the options that the user gave.
        resume: skip seeds that have all their frames, and continue a seed that was stopped.

    Returns:
        The result of all seeds, and the exit code: 0, or that of the first run that failed.

    Raises:
        ConfigurationError: the folder is not empty. With ``resume``: the folder has no run of a
            seed, or ``given`` changes an option that a resumed run cannot change.
        CheckpointError: with ``resume``, the first checkpoint is damaged or of another recipe.
    """
    folder = _folder_of(config)
    done = _claim(folder, resume)
    if resume:
        config = _resumed(folder, config, given)
    code = 0
    for seed in range(config.seed, config.seed + count):
        frames = done.get(seed, {}).get("frames", 0)
        if frames >= config.total_frames:
            continue
        say(f"seed {seed}")
        run = folder / f"seed{seed}"
        begun = (run / "checkpoint.pt").is_file()
        options = {**(given if begun or not resume else config.as_plain()), "seed": seed}
        options["output_dir"] = str(run)
        if options.get("replay_dir") is not None:
            options["replay_dir"] = f"{options['replay_dir']}-seed{seed}"
        command = [sys.executable, "-m", "torchrl_dist", "train", config.recipe, "--json"]
        command += as_flags(options) + ["--resume"] * begun
        code, said = _run(command)
        if said:
            done[seed] = json.loads(said.splitlines()[-1])
            _write(folder, done)
        if code:
            break
    results = [done[seed] for seed in sorted(done)]
    returns = [each["mean_return"] for each in results if each["mean_return"] is not None]
    _draw(folder, config, [folder / f"seed{seed}" for seed in sorted(done)])
    again = ["torchrl-dist", "train", config.recipe, *as_flags(given), "--seeds", str(count)]
    return {
        "mean_return": fmean(returns) if returns else None,
        "deviation": stdev(returns) if len(returns) > 1 else None,
        "mean_return_is_of": "the best policies, as a mean over the seeds",
        "seeds": sorted(done),
        "results": results,
        "learning_curve": str(folder / CURVE),
        "stopped_by": next((r["stopped_by"] for r in results if r["stopped_by"]), None),
        "resume": shlex.join([*again, "--resume"]),
    }, code


def _folder_of(config: RecipeConfig) -> Path:
    if config.output_dir is not None:
        return Path(config.output_dir)
    path = config.output_path
    return path.with_name(path.name.rpartition("seed")[0] + "seeds").absolute()


def _claim(folder: Path, resume: bool) -> dict[int, dict[str, Any]]:
    """Return the results in the folder by seed. Make the folder for new runs."""
    if not resume:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise ConfigurationError(
                f"--output-dir: {folder} is not empty; add --resume to continue its seeds, or "
                "choose another folder"
            )
        try:
            own_files.make_folder(folder)
        except (OSError, own_files.NotOurs) as error:
            raise ConfigurationError(f"--output-dir: {folder}: {error}") from error
        return {}
    if not any(folder.glob("seed*")):
        raise ConfigurationError(
            f"--resume: {folder} contains no run for any seed; leave --resume out to start new runs"
        )
    if not (folder / RESULTS).is_file():
        return {}
    try:
        lines = own_files.read_ours(folder / RESULTS, 1 << 24).splitlines()
        results = [json.loads(line) for line in lines]
        for result in results:
            if wrong := [n for n, kind in _TYPES.items() if not isinstance(result[n], kind)]:
                raise ValueError(f"{wrong[0]} is {result[wrong[0]]!r}")
        return {result["seed"]: result for result in results}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigurationError(
            f"--resume: {folder / RESULTS} is damaged or belongs to another user ({error}); remove "
            "the file, and each seed continues from its checkpoint"
        ) from error


def _resumed(folder: Path, config: Config, given: Mapping[str, Any]) -> Config:
    """Return the configuration of the first run in the folder, with the ``given`` options."""
    found = (re.fullmatch(r"seed(\d+)", each.name) for each in folder.iterdir())
    seeds = sorted(int(match[1]) for match in found if match)
    kept = {name: getattr(config, name) for name in ("output_dir", "replay_dir") if name in given}
    kept["seed"] = given.get("seed", min(seeds, default=config.seed))
    for seed in seeds:
        checkpoint = folder / f"seed{seed}" / "checkpoint.pt"
        if checkpoint.is_file():
            others = {name: value for name, value in given.items() if name not in kept}
            saved = config_to_resume(type(config), checkpoint, others)
            rows = getattr(saved, "replay_dir", None)
            if rows is not None:
                kept.setdefault("replay_dir", rows.removesuffix(f"-seed{seed}"))
            return dataclasses.replace(saved, **kept)
    return dataclasses.replace(config, **kept)


def _write(folder: Path, done: Mapping[int, Mapping[str, Any]]) -> None:
    text = "".join(json.dumps(done[seed]) + "\n" for seed in sorted(done))
    own_files.atomic_write(folder / RESULTS, lambda file: file.write(text.encode()))


def _run(command: list[str]) -> tuple[int, str]:
    """Run the command, pass stop signals on to it, and return its exit code and output.

    The process gets its own OS session. Otherwise a terminal's Ctrl-C would reach the process
    twice, and the second signal would end it without a checkpoint."""
    libc = ctypes.CDLL(None)

    def end_with_parent() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)

    with (
        subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
            preexec_fn=end_with_parent,  # safe, because it only makes a system call
        ) as process,
        handling(dict.fromkeys(_PASSED_ON, lambda got, _: process.send_signal(got))),
    ):
        said, _ = process.communicate()
    return process.returncode if process.returncode >= 0 else 128 - process.returncode, said


def _draw(folder: Path, config: RecipeConfig, runs: list[Path]) -> None:
    from matplotlib.figure import Figure

    from ..parts.plots import draw_band, read_curve, save_figure

    curves = [curve for run in runs if (curve := read_curve(run / "csv/scalars/eval/return.csv"))]
    if not curves:
        return
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    draw_band(axes, curves, f"mean and range of {len(curves)} seeds")
    axes.set_xlabel("frames")
    axes.set_ylabel("return of greedy episodes")
    axes.set_title(f"{config.title} on {config.env}")
    axes.grid(alpha=0.3)
    axes.legend(loc="best", fontsize="small")
    save_figure(figure, folder / CURVE)
