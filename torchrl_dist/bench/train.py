"""How soon does a policy become good, and how much do more processes help?

    torchrl-dist bench train --env CartPole-v1 --json train.jsonl --plot train.png

Each peer trains until the mean return of 20 new greedy episodes reaches the environment's threshold
(CartPole-v1 475, Acrobot-v1 -100, LunarLander-v3 200, Pendulum-v1 -200). Each run has its own
processes. All peers run with one seed before any peer runs with the next seed.

- ``ours-N``: ``torchrl-dist train`` with N processes that collect. Evaluations run in another
  process at the same time. With ``ours-0``, the learner steps the environments itself, and
  evaluations run in its process, concurrently with the training.
- ``torchrl``: the same algorithm, network, settings and number of environments in one process, with
  TorchRL's collector, replay buffer and losses (``bench/train_torchrl.py``).
- ``sb3``: stable-baselines3 with the settings of rl-baselines3-zoo. DQN is compared with apex, PPO
  with ddppo, A2C with impala, SAC with sac.

Only seconds of training count. The start of the processes is excluded. Evaluations of ``torchrl``
and ``sb3`` are excluded, too, because these peers do not train meanwhile. Ours trains during
evaluations, so the cost of evaluations is included. A run that does not reach the threshold within
its frames or its time limit counts as infinitely long, also in the medians.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchrl_dist.bench import command, train_plan
from torchrl_dist.bench.results import append_json
from torchrl_dist.bench.train_plan import OTHERS, PEERS, SB3, TORCHRL, Case, Gain, Row, Run
from torchrl_dist.errors import ConfigurationError
from torchrl_dist.recipes.parts.plots import save_figure
from torchrl_dist.ui import show_table

if TYPE_CHECKING:
    from torchrl_dist.recipes.parts.environments import Task


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's description and options to ``parser``."""
    command.describe(parser, __doc__, run)
    text = "a gymnasium environment (default: CartPole-v1)"
    parser.add_argument("--env", default="CartPole-v1", help=text)
    text = f"some of {','.join(train_plan.REASONS)} (default: those that fit the environment)"
    known = command.names(train_plan.REASONS)
    parser.add_argument("--algorithms", type=known, metavar="A,B", help=text)
    command.add_names(parser, "--peers", PEERS)
    command.add_number(parser, "--seeds", int, 3, "runs of each peer")
    text = "mean return that ends a run (default: the environment's)"
    parser.add_argument("--threshold", type=float, metavar="RETURN", help=text)
    text = "maximum frames of a run (default: the recipe's; for sb3 the zoo's)"
    command.add_number(parser, "--frames", int, None, text)
    text = "torch threads of torchrl and sb3; our processes have one thread each"
    command.add_number(parser, "--threads", int, 1, text)
    command.add_figures(
        parser,
        timeout_s=600.0,
        timed="a run's training",
        line_per="run",
        plot="returns over frames and over seconds",
    )


def run(options: argparse.Namespace) -> int:
    """Measure, and print tables. Blocks for minutes.

    After Ctrl-C, drops the current run and prints the results so far. Each line of the ``--json``
    file is written when its run ends.

    Returns:
        0; 1 if a run failed; 130 or 143 after SIGINT or SIGTERM.

    Raises:
        ConfigurationError: nothing that was asked for can be measured.
    """
    command.check_folders(options.json, options.plot)
    groups = plan(options)
    results: dict[Case, list[Run]] = {}
    status = _measure_all(options, groups, results)
    _print(train_plan.rows(results))
    if options.plot is not None and results:
        _plot(options.plot, results)
    return status


def plan(options: argparse.Namespace) -> list[list[Case]]:
    """Return the cases that can be measured here, one group per algorithm. Print what is left out.

    Raises:
        ConfigurationError: the environment cannot be built, an algorithm does not fit it, its
            threshold is not known, or no case is left.
    """
    tasks = _fitting(options.env, options.algorithms)
    threshold = options.threshold
    if threshold is None:
        own = next(iter(tasks.values())).reward_threshold
        threshold = train_plan.THRESHOLDS.get(options.env, own)
    if threshold is None:
        raise ConfigurationError(
            f"{options.env} has no known threshold; pass one as --threshold RETURN"
        )
    cases = {algorithm: list[Case]() for algorithm in tasks}
    for algorithm in tasks:
        for peer in options.peers:
            reason = missing(algorithm, options.env, peer)
            if reason is not None:
                command.say(f"left out: {algorithm} {peer}: {reason}")
                continue
            limits = options.frames, options.timeout_s, options.threads
            cases[algorithm].append(Case(algorithm, options.env, peer, threshold, *limits))
    if not any(cases.values()):
        raise ConfigurationError(
            "none of the peers can be measured here: see above for the reasons"
        )
    return list(cases.values())


def _fitting(env: str, algorithms: Sequence[str] | None) -> dict[str, Task]:
    """Return the task of each named algorithm or, without names, of each algorithm that can learn
    ``env``."""
    from torchrl_dist.recipes.parts.environments import Continuous, look_at

    tasks, refused = {}, None
    for algorithm in algorithms or train_plan.REASONS:
        try:
            # The other peers support only one kind of actions for each algorithm.
            continuous: Continuous = "bounded" if algorithm == "sac" else "none"
            task = look_at(env, continuous=continuous)
            if continuous != "none" and task.num_actions:
                raise ConfigurationError(
                    f"--env: {env} has discrete actions, which the peers of {algorithm} do not "
                    "take; choose an environment with continuous actions"
                )
            tasks[algorithm] = task
        except ConfigurationError as error:
            refused = error
            if algorithms:
                raise
    if refused is not None and not tasks:
        raise refused
    return tasks


def missing(algorithm: str, env: str, peer: str) -> str | None:
    """Return why the peer cannot be measured here, or None."""
    if algorithm == "ddppo" and peer == "ours-0":
        return "it is the same as ours-1, whose only learner steps the environments itself"
    if peer == TORCHRL and algorithm == "apex":
        from torchrl_dist.bench.replay_peers import PEERS as BUFFERS

        return BUFFERS["torchrl"].missing()
    if peer == SB3:
        if importlib.util.find_spec("stable_baselines3") is None:
            return "not installed: pip install 'torchrl-dist[bench-sb3]'"
        if (algorithm, env) not in train_plan.ZOO:
            return f"the zoo's settings for {env} are not included here"
    return None


def _measure_all(
    options: argparse.Namespace, groups: list[list[Case]], results: dict[Case, list[Run]]
) -> int:
    from torchrl_dist.bench.train_peers import GRACE_S, measure

    def tell(case: Case, run: Run) -> str:
        append_json(options.json, "train", [train_plan.as_line(case, run)], [SB3])
        end = run.reached(case.threshold)
        if end is not None:
            return f"{case.threshold:g} after {end.frames:,} frames and {end.seconds:.1f} s"
        last = f", the last mean was {run.points[-1].mean:.1f}" if run.points else ""
        return f"never reached {case.threshold:g}: out of {run.ended}{last}"

    return command.in_rounds(
        options.seeds, groups, Path(tempfile.gettempdir()), measure, results, tell,
        arguments=lambda case: (case, len(results.get(case, []))),  # (case, seed)
        timeout_s=lambda case: case.limit_s + 2 * GRACE_S,
    )  # fmt: skip


# ---- results


def _print(table: list[Row]) -> None:
    if not table:
        return
    rows = [
        [
            *(row.algorithm, row.env, row.peer),
            f"{row.reached} of {row.runs}",
            _figure(row.frames, ",.0f"),
            _figure(row.seconds, ".1f"),
            f"{row.frames_per_s:,.0f}",
            *(_ratio(row.ratios.get(name)) for name in OTHERS),
            f"{row.start_s:.1f}",
        ]
        for row in table
    ]
    left = ("algorithm", "env", "peer")
    figures = ("reached", "frames", "seconds", "frames/s", *(f"x {name}" for name in OTHERS))
    title = "until the threshold: medians, and our seconds divided by another peer's"
    show_table(title, (*left, *figures, "start, s"), rows, left=left, width=120)
    if found := train_plan.gains(table):
        _print_gains(found)


def _figure(value: float, form: str) -> str:
    return "never" if math.isinf(value) else format(value, form)


def _ratio(value: float | None) -> str:
    if value is None:
        return "-"
    if math.isinf(value):
        return "never"
    return f"{value:.2f}" if value else "only ours"


def _print_gains(found: list[Gain]) -> None:
    rows = [
        [
            *(gain.best.algorithm, gain.best.env, f"{gain.best.peer} by {gain.fewest.peer}"),
            *(f"{figure:.2f}" for figure in (gain.speed_up, gain.frames, gain.pace)),
            "-" if gain.best.learner_waits is None else f"{gain.best.learner_waits:.0%}",
            train_plan.REASONS[gain.best.algorithm],
        ]
        for gain in found
    ]
    left = ("algorithm", "env", "of")
    columns = (*left, "speed-up", "frames", "frames/s", "learner waits", "because")
    title = "gain from more processes: our fastest row against our row with the fewest processes"
    show_table(title, columns, rows, left=(*left, "because"), width=120)


_LINES = {  # strokes and marks, so that lines differ without colour
    "ours-0": ("#9ecae1", ":", "o"),
    "ours-1": ("#6baed6", "-.", "s"),
    "ours-2": ("#08519c", "-", "D"),
    "ours-4": ("#3182bd", "--", "^"),
    TORCHRL: ("#a63603", "-", "x"),
    SB3: ("#31a354", "--", "+"),
}


def _plot(path: Path, results: Mapping[Case, list[Run]]) -> None:
    """Plot a row of two panels per algorithm: returns over frames, and over seconds."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    groups: dict[tuple[str, str], list[Case]] = {}
    for case in results:
        groups.setdefault((case.algorithm, case.env), []).append(case)
    figure = Figure(figsize=(11, 3.6 * len(groups)), layout="constrained")
    panels = figure.subplots(len(groups), 2, squeeze=False)
    for ((algorithm, env), cases), pair in zip(groups.items(), panels, strict=True):
        for axis, over in zip(pair, ("frames", "seconds"), strict=True):
            for case in cases:
                _draw(axis, case, results[case], over)
            axis.axhline(cases[0].threshold, color="black", linewidth=0.8, linestyle=":")
            axis.set(xlabel="frames" if over == "frames" else "training, s")
            axis.set(ylabel=f"return, greedy mean of {train_plan.EPISODES} episodes")
            axis.xaxis.set_major_formatter(EngFormatter(sep=""))  # short (150k), so that labels fit
            axis.set_title(f"{algorithm} on {env}", fontsize=10)
            axis.grid(alpha=0.3)
        if pair[0].lines:
            pair[0].legend(fontsize=8)
    most = max(len(runs) for runs in results.values())
    figure.suptitle(
        f"median and range of up to {most} seeds, {os.cpu_count()} cores; a run stops at the "
        "threshold and keeps its last return",
        fontsize=10,
    )
    save_figure(figure, path)


def _draw(axis: Any, case: Case, runs: list[Run], over: str) -> None:
    curve = train_plan.band(
        [[(getattr(p, over), p.mean) for p in run.points] for run in runs if run.points]
    )
    if curve is None:
        return
    color, stroke, mark = _LINES[case.peer]
    x, low, middle, high = curve
    axis.fill_between(x, low, high, color=color, alpha=0.15, linewidth=0)
    axis.plot(
        x, middle, stroke, color=color, marker=mark, markevery=0.15, markersize=5, label=case.peer
    )
