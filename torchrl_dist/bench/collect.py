"""How busy do collectors keep the cores, depending on the duration of a step?

    torchrl-dist bench collect --env sleep --json collect.jsonl --plot collect.png

Workers step environments that sleep (``sleep``: 4, 8, 16 and 32 workers by default) or compute
(``cartpole``, ``halfcheetah``: 2 workers). Their policy has two layers of 64 units, and they send
their steps to a learner that ignores them. Steps are counted on the workers. Each peer starts in
new processes with one torch thread each, and measures all step durations one after the other.
Rounds go over all peers in turn, so that a slow minute of the machine affects all of them. The
table shows medians over rounds.

- ``floor``: the same environments and policy in the same number of processes, without data and
  messages.
- ``ideal_sps``: workers / step_s for environments that sleep, the floor for others.
- ``efficiency``: sps / ideal_sps.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import statistics
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torchrl_dist.bench.collect_plan import (
    AUTO,
    DURATIONS,
    ENVS,
    FLOOR,
    NETWORKS,
    OTHERS,
    OURS,
    QUESTIONS,
    Cell,
    Result,
)
from torchrl_dist.bench.command import (
    above_zero,
    add_figures,
    check_folders,
    counts,
    describe,
    in_rounds,
    names,
    say,
    until_stopped,
)
from torchrl_dist.errors import ConfigurationError

_SLEEPERS, _COMPUTERS = [4, 8, 16, 32], [2]  # default numbers of workers
_STEP_S = [0.1, 0.01, 0.001]
_LONGEST_MESSAGE_S = 5.0


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's description and options to ``parser``."""
    describe(parser, __doc__, run)
    parser.add_argument("--env", choices=ENVS, default="sleep", help="(default: sleep)")
    parser.add_argument("--workers", type=counts, metavar="N,M", help="worker processes")
    parser.add_argument(
        "--envs", type=counts, default=[1], metavar="N,M", help="envs per worker (default: 1)"
    )
    parser.add_argument(
        "--step-s",
        type=lambda text: [above_zero(float)(part) for part in text.split(",")],
        metavar="S,T",
        help="seconds that a step sleeps (default: 0.1,0.01,0.001)",
    )
    parser.add_argument(
        "--steps-per-message",
        type=_steps,
        default=[8, 64, AUTO],
        metavar="N,M",
        help="steps of each env in a message; auto: the collector chooses (default: 8,64,auto)",
    )
    parser.add_argument(
        "--ours",
        type=names(OURS),
        default=list(OURS),
        metavar="A,B",
        help=f"some of {','.join(OURS)} (default: all)",
    )
    known = ["none", "all", *OTHERS]
    parser.add_argument(
        "--peers",
        type=names(known),
        default=["all"],
        metavar="A,B",
        help="other peers, in addition to ours and the floor: none, all, or some of "
        f"{','.join(OTHERS)} (default: all)",
    )
    parser.add_argument(
        "--question",
        choices=QUESTIONS,
        default="busy",
        help="busy: as described above; ingest: rows per second that one learner can receive; "
        "deadlines: whether a receive timeout pays (steps sleep with --env sleep, and compute as "
        "long as those of HalfCheetah with --env cartpole); weights: delay of a policy of 50 MB "
        "(default: busy)",
    )
    parser.add_argument(
        "--deadlines",
        type=lambda text: [math.inf if part == "none" else float(part) for part in text.split(",")],
        default=[0.0001, 0.01, 0.1, math.inf],
        metavar="S,T",
        help="deadlines of a receive, in seconds, or none (default: 0.0001,0.01,0.1,none)",
    )
    parser.add_argument(
        "--durations",
        type=names(DURATIONS),
        default=list(DURATIONS),
        metavar="A,B",
        help=f"distributions of step times, for deadlines (default: {','.join(DURATIONS)})",
    )
    parser.add_argument(
        "--networks",
        type=names(NETWORKS),
        default=list(NETWORKS),
        metavar="A,B",
        help=f"networks, for deadlines (default: {','.join(NETWORKS)})",
    )
    add_figures(
        parser,
        rounds=3,
        seconds=3.0,
        timeout_s=150.0,
        timed="a start and its first measurement",
        line_per="cell",
        plot="efficiencies",
    )


def _steps(text: str) -> list[int]:
    return [AUTO if part == "auto" else counts(part)[0] for part in text.split(",")]


def run(options: argparse.Namespace) -> int:
    """Measure, and print a table. Blocks for minutes. After Ctrl-C, prints what was found and ends.

    Returns:
        0; 1 if a measurement failed; 130 or 143 after SIGINT or SIGTERM.

    Raises:
        ConfigurationError: nothing that was asked for can be measured.
    """
    check_folders(options.json, options.plot)
    if options.question != "busy":
        return _ask(options)
    groups = plan(options, _chosen(options))
    if not any(groups):
        raise ConfigurationError(
            "nothing can be measured with these options: see above what was skipped and why"
        )
    found: dict[Cell, Figures] = {}
    status = until_stopped(lambda: _measure_all(options.rounds, groups, found))
    from torchrl_dist.bench.collect_table import plot, print_table
    from torchrl_dist.bench.replay_peers import versions
    from torchrl_dist.bench.table import append_json

    cells = to_cells(found)
    print_table(cells)
    if options.json is not None:
        extra = {"seconds": options.seconds, "cpus": os.cpu_count()}
        peers = [p for p in ("ray", "tianshou") if any(p in cell["peer"] for cell in cells)]
        append_json(options.json, cells, {**extra, "versions": versions(peers)})
    if options.plot is not None:
        plot(options.plot, cells, f"median of {options.rounds} rounds, {os.cpu_count()} cores")
    return status


def _ask(options: argparse.Namespace) -> int:
    """Answer another question than how busy the cores are."""
    from torchrl_dist.bench import collect_learner
    from torchrl_dist.bench.collect_table import plot_deadlines, print_plain
    from torchrl_dist.bench.table import append_json

    if options.env == "halfcheetah":
        _require_mujoco()
    questions = collect_learner.plan(options)
    found: dict[Any, list[dict[str, Any]]] = {}

    def run_one(launcher: Any, cell: Any, folder: Path) -> dict[str, Any]:
        return launcher.run(
            collect_learner.measure_alone, cell, folder=folder, timeout_s=cell.timeout_s
        )

    def take(cell: Any, figures: dict[str, Any]) -> str:
        found.setdefault(cell, []).append(figures)
        return f"{figures['sps']:,.0f} steps/s"

    def measure_all() -> int:
        groups = [[cell] for cell in questions]
        return in_rounds(options.rounds, groups, Path("/dev/shm"), run_one, str, take)

    status = until_stopped(measure_all)
    cells = [collect_learner.to_cell(cell, rounds) for cell, rounds in found.items()]
    print_plain(cells)
    if options.json is not None:
        append_json(options.json, cells, {"cpus": os.cpu_count()})
    if options.plot is not None and options.question == "deadlines":
        plot_deadlines(options.plot, cells)
    return status


def _require_mujoco() -> None:
    import importlib.util

    if importlib.util.find_spec("mujoco") is None:
        raise ConfigurationError(
            "--env halfcheetah needs MuJoCo: pip install 'torchrl-dist[bench-mujoco]'"
        )


def _chosen(options: argparse.Namespace) -> list[str]:
    if options.env == "halfcheetah":
        _require_mujoco()
    from torchrl_dist.bench.collect_peers import PEERS

    asked = set(options.peers)
    chosen = [FLOOR, *(name for name in OURS if name in options.ours)]
    for name in OTHERS:
        if "all" in asked or name in asked:
            reason = PEERS[name].missing()
            if reason is None:
                chosen.append(name)
            else:
                say(f"skipped {name}: {reason}")
    return chosen


def plan(options: argparse.Namespace, peers: list[str]) -> list[list[tuple[Cell, ...]]]:
    """Return what one round measures: groups whose members differ only in the peer.

    A member of a group is what one start of its peer measures: cells that differ only in
    ``step_s``, the shortest first. A collector that chooses the length of its messages does so once
    per start, so each duration then has its own start.
    """
    from torchrl_dist.bench.collect_peers import PEERS

    sleeps = options.env == "sleep"
    if options.step_s and not sleeps:
        raise ConfigurationError(
            "--step-s is for --env sleep, because other environments compute: leave it out"
        )
    workers = options.workers or (_SLEEPERS if sleeps else _COMPUTERS)
    durations = sorted(options.step_s or _STEP_S) if sleeps else [0.0]
    groups = []
    for processes, envs, steps in itertools.product(
        workers, options.envs, options.steps_per_message
    ):
        cells = []
        for step_s in durations:
            message_s = steps * envs * step_s
            if message_s > _LONGEST_MESSAGE_S:
                say(f"skipped {steps} steps of {step_s:g} s: a message would take {message_s:g} s")
                continue
            seconds = max(options.seconds, 3 * message_s)
            cells.append(
                Cell("", options.env, processes, envs, step_s, steps, seconds, options.timeout_s)
            )
        for start in [(cell,) for cell in cells] if steps == AUTO else [tuple(cells)]:
            chosen = []
            for name in peers if start else []:
                if steps == AUTO and name in OTHERS:
                    continue
                reason = PEERS[name].refuses(start[0])
                if PEERS[name].sends_single_steps and steps != options.steps_per_message[0]:
                    reason = "it sends single steps, so one length suffices"
                if reason is None:
                    chosen.append(tuple(replace(cell, peer=name) for cell in start))
                else:
                    say(f"skipped {name} with {processes} x {envs}, {steps} steps: {reason}")
            groups.append(chosen)
    return groups


@dataclass
class Figures:
    """The results of one cell. Lists have one entry per round."""

    results: list[Result] = field(default_factory=list)

    def median(self, name: str) -> float:
        return statistics.median(getattr(result, name) for result in self.results)


def _measure_all(
    rounds: int, groups: list[list[tuple[Cell, ...]]], found: dict[Cell, Figures]
) -> int:
    from torchrl_dist.bench.collect_peers import measure

    def run_one(launcher: Any, start: tuple[Cell, ...], folder: Path) -> list[Result]:
        timeout_s = start[0].timeout_s + sum(3 * cell.seconds for cell in start[1:])
        return launcher.run(measure, start, str(folder), folder=folder, timeout_s=timeout_s)

    def label(start: tuple[Cell, ...]) -> str:
        first = start[0]
        line = f"{first.peer} {first.env} {first.workers} x {first.envs}"
        return f"{line}, {first.steps or 'auto'} per message"

    def take(start: tuple[Cell, ...], results: list[Result]) -> str:
        text = f"first batch after {results[0].startup_s:.1f} s"
        for cell, result in zip(start, results, strict=True):
            found.setdefault(cell, Figures()).results.append(result)
            text += f"\n    step {cell.step_s:g} s: {result.sps:,.0f} steps/s"
        return text

    return in_rounds(rounds, groups, Path("/dev/shm"), run_one, label, take)


def to_cells(found: dict[Cell, Figures]) -> list[dict[str, Any]]:
    """Return one JSON object per cell."""
    floors = {cell.line: f.median("sps") for cell, f in found.items() if cell.peer == FLOOR}
    cells = []
    for cell, figures in found.items():
        floor = floors.get(cell.line)
        ideal = cell.workers / cell.step_s if cell.step_s else floor
        sps = figures.median("sps")
        cells.append(
            {
                "bench": "collect",
                "peer": cell.peer,
                "env": cell.env,
                "workers": cell.workers,
                "envs": cell.envs,
                "step_s": cell.step_s,
                "steps_per_message": cell.steps if cell.steps != AUTO else "auto",
                "sps": sps,
                "ideal_sps": ideal,
                "floor_sps": floor,
                "efficiency": sps / ideal if ideal else None,
                "of_floor": sps / floor if floor else None,
                "startup_s": figures.median("startup_s"),
                "learner_cpu": figures.median("learner_cpu"),
                "rounds": len(figures.results),
                "sps_of_rounds": [result.sps for result in figures.results],
            }
        )
    return cells
