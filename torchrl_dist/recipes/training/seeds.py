"""``train --seeds N``: the same run with N seeds, one after the other, and one curve of all."""

from __future__ import annotations

import contextlib
import ctypes
import json
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from ... import own_files
from ...errors import ConfigurationError
from .config import RecipeConfig
from .options import as_flags

_PR_SET_PDEATHSIG = 1
RESULTS, CURVE = "seeds.jsonl", "seeds.png"


def train_seeds(
    config: RecipeConfig,
    given: Mapping[str, Any],
    count: int,
    *,
    resume: bool,
    say: Callable[[str], None],
) -> tuple[dict[str, Any], int]:
    """Run ``torchrl-dist train`` for ``count`` seeds, from ``config.seed`` on. Blocks.

    The folder of all runs is ``--output-dir``, by default ``runs/RECIPE-ENV-seeds``. Each seed has
    a folder there, ``seeds.jsonl`` has the results, and ``seeds.png`` the evaluations as mean and
    range over the seeds.

    Args:
        given: the options that the user gave.
        resume: skip seeds that have all their frames, and continue a seed that was stopped.

    Returns:
        The result of all seeds, and the exit code: that of the first run that did not succeed.

    Raises:
        ConfigurationError: the folder has files, or with ``resume`` none of these runs.
    """
    folder = _folder_of(config)
    done = _claim(folder, resume)
    code = 0
    for seed in range(config.seed, config.seed + count):
        frames = done.get(seed, {}).get("frames", 0)
        if frames >= config.total_frames:
            continue
        say(f"seed {seed}")
        run = folder / f"seed{seed}"
        options = {**given, "seed": seed, "output_dir": str(run)}
        if "replay_dir" in given:
            options["replay_dir"] = f"{given['replay_dir']}-seed{seed}"
        command = [sys.executable, "-m", "torchrl_dist", "train", config.recipe, "--json"]
        command += as_flags(options)
        if (run / "checkpoint.pt").is_file():
            command.append("--resume")
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
        "mean_return_is_of": "the mean over seeds of the best policies",
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
            f"--resume: there is no run of a seed in {folder}; leave --resume out to start"
        )
    if not (folder / RESULTS).is_file():
        return {}
    try:
        lines = own_files.read_ours(folder / RESULTS, 1 << 24).splitlines()
        return {(result := json.loads(line))["seed"]: result for line in lines}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigurationError(
            f"--resume: {folder / RESULTS} is damaged or another user's ({error}); remove it, and "
            "each seed continues from its checkpoint"
        ) from error


def _write(folder: Path, done: Mapping[int, Mapping[str, Any]]) -> None:
    text = "".join(json.dumps(done[seed]) + "\n" for seed in sorted(done))
    own_files.atomic_write(folder / RESULTS, lambda file: file.write(text.encode()))


def _run(command: list[str]) -> tuple[int, str]:
    """Run it, pass stop signals on to it, and return its exit code and output.

    It has a session of its own. Otherwise a terminal's Ctrl-C would reach it twice, and the second
    one ends it without a checkpoint."""
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
        _passed_on(process),
    ):
        said, _ = process.communicate()
    return process.returncode if process.returncode >= 0 else 128 - process.returncode, said


@contextlib.contextmanager
def _passed_on(process: subprocess.Popen) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():  # others cannot set handlers
        yield
        return
    numbers = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
    before = {
        number: signal.signal(number, lambda got, _: process.send_signal(got)) for number in numbers
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


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
