"""How busy do collectors keep the cores, depending on the duration of a step?

    torchrl-dist bench collect --env sleep --json collect.jsonl --plot collect.png

Workers step environments that sleep (``sleep``: 4, 8, 16 and 32 workers by default) or compute
(``cartpole``, ``halfcheetah``: 2 workers). ``cartpole-native`` is gymnasium's own vector version of
CartPole, and is measured only for our collector and ``floor``. The policy has two layers of 64
units. Workers count their steps, and send the data to a learner, which ignores the data. In each
round, each peer (a library that is compared) starts in new processes with one torch thread each,
and measures all step durations one after the other. Each round measures all peers, so that a slow
minute of the machine affects all of them. The table shows medians over rounds.

- ``floor``: the same environments and policy in the same number of processes, which keep and send
  no data.
- ``ideal_sps``: workers / step_s for environments that sleep. For other environments, this is the
  rate of ``floor``.
- ``efficiency``: sps (steps per second) / ideal_sps.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torchrl_dist.bench import command
from torchrl_dist.bench.collect_plan import (
    AUTO,
    DURATIONS,
    ENVS,
    FLOOR,
    LINE,
    NETWORKS,
    OTHERS,
    OURS,
    QUESTIONS,
    Cell,
    Result,
)
from torchrl_dist.bench.results import append_json, by, medians
from torchrl_dist.errors import ConfigurationError
from torchrl_dist.ui import above_zero, at_least

_SLEEPERS, _COMPUTERS = [4, 8, 16, 32], [2]  # default numbers of workers
_STEP_S = [0.1, 0.01, 0.001]
_LONGEST_MESSAGE_S = 5.0


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's description and options to ``parser``."""
    command.describe(parser, __doc__, run)
    parser.add_argument("--env", choices=ENVS, default="sleep", help="(default: sleep)")
    command.add_counts(parser, "--workers", None, "worker processes")
    command.add_counts(parser, "--envs", "1", "envs per worker")
    text = "seconds that a step sleeps (default: 0.1,0.01,0.001)"
    command.add_list(parser, "--step-s", above_zero(float), None, text, "S,T")
    text = "steps of each env in a message; auto: the collector chooses"
    command.add_list(parser, "--steps-per-message", _steps, "8,64,auto", text)
    command.add_names(parser, "--ours", OURS)
    known = ["none", "all", *OTHERS]
    parser.add_argument(
        "--peers",
        type=command.names(known),
        default=["all"],
        metavar="A,B",
        help="peers to measure in addition to ours and the floor: none, all, or some of "
        f"{','.join(OTHERS)} (default: all)",
    )
    parser.add_argument(
        "--question",
        choices=QUESTIONS,
        default="busy",
        help="busy: as described above; ingest: how many rows per second one learner can receive; "
        "deadlines: whether a deadline of a receive pays off, if steps take as long as "
        "HalfCheetah's and sleep (--env sleep) or compute (--env cartpole); weights: how long a "
        "new policy of 50 MB delays a batch (default: busy)",
    )
    text = "deadlines of a receive in seconds; none: no deadline"
    command.add_list(parser, "--deadlines", _deadline_s, "0.0001,0.01,0.1,none", text, "S,T")
    text = f"distributions of step times for --question deadlines: some of {','.join(DURATIONS)}"
    command.add_names(parser, "--durations", DURATIONS, text)
    text = f"networks for --question deadlines: some of {','.join(NETWORKS)}"
    command.add_names(parser, "--networks", NETWORKS, text)
    command.add_figures(
        parser,
        rounds=3,
        seconds=3.0,
        timeout_s=150.0,
        timed="a start and its first measurement",
        line_per="cell",
        plot="efficiencies",
    )


def _steps(text: str) -> int:
    return AUTO if text == "auto" else above_zero(int)(text)


def _deadline_s(text: str) -> float:
    return math.inf if text == "none" else at_least(0, float)(text)


def run(options: argparse.Namespace) -> int:
    """Measure, and print a table. Blocks for minutes. After Ctrl-C, prints the results so far.

    Returns:
        0; 1 if a measurement failed; 130 or 143 after SIGINT or SIGTERM.

    Raises:
        ConfigurationError: an option is invalid, or nothing can be measured with these options.
    """
    command.check_folders(options.json, options.plot)
    if options.env == "halfcheetah":
        _require_mujoco()
    return _busy(options) if options.question == "busy" else _ask(options)


def _busy(options: argparse.Namespace) -> int:
    from torchrl_dist.bench.collect_peers import measure
    from torchrl_dist.bench.collect_table import plot, print_table

    groups = plan(options, _chosen(options))
    if not any(groups):
        raise ConfigurationError(
            "nothing can be measured with these options: see above what was skipped and why"
        )
    found: dict[tuple[Cell, ...], list[list[Result]]] = {}
    status = command.in_rounds(
        options.rounds, groups, command.MEMORY, measure, found, _told, label=_label,
        timeout_s=lambda cells: cells[0].timeout_s + sum(3 * cell.seconds for cell in cells[1:]),
    )  # fmt: skip
    cells = to_cells(found)
    print_table(cells)
    peers = [p for p in ("ray", "tianshou") if any(p in cell["peer"] for cell in cells)]
    append_json(options.json, "collect", cells, peers, seconds=options.seconds)
    if options.plot is not None:
        plot(options.plot, cells, f"median of {options.rounds} rounds, {os.cpu_count()} cores")
    return status


def _label(start: tuple[Cell, ...]) -> str:
    first = start[0]
    line = f"{first.peer} {first.env} {first.workers} x {first.envs}"
    return f"{line}, {first.steps or 'auto'} per message"


def _told(start: tuple[Cell, ...], results: list[Result]) -> str:
    text = f"first batch after {results[0].startup_s:.1f} s"
    for cell, result in zip(start, results, strict=True):
        text += f"\n    step {cell.step_s:g} s: {result.sps:,.0f} steps/s"
    return text


def _ask(options: argparse.Namespace) -> int:
    """Answer a question (``options.question``) other than ``busy``."""
    from torchrl_dist.bench import collect_learner
    from torchrl_dist.bench.collect_table import plot_deadlines, print_plain

    found: dict[collect_learner.Question, list[dict[str, Any]]] = {}
    status = command.in_rounds(
        options.rounds, [[cell] for cell in collect_learner.plan(options)], command.MEMORY,
        collect_learner.measure_alone, found,
        lambda cell, figures: f"{figures['sps']:,.0f} steps/s",
    )  # fmt: skip
    cells = [collect_learner.to_cell(cell, rounds) for cell, rounds in found.items()]
    print_plain(cells)
    append_json(options.json, "collect", cells)
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
    from torchrl_dist.bench.collect_cells import NATIVE
    from torchrl_dist.bench.collect_peers import PEERS

    asked = set(options.peers)
    chosen = [FLOOR, *(name for name in OURS if name in options.ours)]
    for name in OTHERS:
        if "all" in asked or name in asked:
            reason = PEERS[name].missing()
            if options.env == NATIVE:
                reason = "it is measured with single environments"
            if reason is None:
                chosen.append(name)
            else:
                command.say(f"skipped {name}: {reason}")
    return chosen


def plan(options: argparse.Namespace, peers: list[str]) -> list[list[tuple[Cell, ...]]]:
    """Return what one round measures: groups of starts that differ only in the peer.

    A start is a tuple of cells that a peer measures without a restart. The cells differ only in
    ``step_s``, which increases. A collector that chooses the length of its messages does so once
    per start, so each of its starts has only one cell.
    """
    from torchrl_dist.bench.collect_peers import PEERS

    sleeps = options.env == "sleep"
    if options.step_s and not sleeps:
        raise ConfigurationError(
            "--step-s sets the duration of a step, but only with --env sleep; leave --step-s out, "
            "or pass --env sleep"
        )
    workers = options.workers or (_SLEEPERS if sleeps else _COMPUTERS)
    durations = sorted(options.step_s or _STEP_S) if sleeps else [0.0]
    groups = []
    sizes = itertools.product(workers, options.envs, options.steps_per_message)
    for processes, envs, steps in sizes:
        cells = []
        for step_s in durations:
            message_s = steps * envs * step_s
            if message_s > _LONGEST_MESSAGE_S:
                command.say(
                    f"skipped {steps} steps of {step_s:g} s: a message would take {message_s:g} s"
                )
                continue
            seconds = max(options.seconds, 3 * message_s)
            size = (processes, envs, step_s, steps, seconds, options.timeout_s)
            cells.append(Cell("", options.env, *size))
        for start in [[cell] for cell in cells] if steps == AUTO else [cells]:
            chosen = []
            for name in peers if start else []:
                if steps == AUTO and name in OTHERS:
                    continue
                reason = PEERS[name].refuses(start[0])
                if PEERS[name].sends_single_steps and steps != options.steps_per_message[0]:
                    reason = "it always sends single steps, and has already been measured"
                if reason is None:
                    chosen.append(tuple(replace(cell, peer=name) for cell in start))
                else:
                    command.say(
                        f"skipped {name} with {processes} x {envs}, {steps} steps: {reason}"
                    )
            groups.append(chosen)
    return groups


def to_cells(found: Mapping[tuple[Cell, ...], list[list[Result]]]) -> list[dict[str, Any]]:
    """Return one JSON object per cell, with medians over the rounds in ``found``."""
    lines = [
        {
            **{name: getattr(cell, name) for name in ("peer", "env", "workers", "envs", "step_s")},
            "steps_per_message": cell.steps if cell.steps != AUTO else "auto",
            **medians([vars(results[place]) for results in rounds]),
            "rounds": len(rounds),
            "sps_of_rounds": [results[place].sps for results in rounds],
        }
        for start, rounds in found.items()
        for place, cell in enumerate(start)
    ]
    for of_line in by(lines, *LINE).values():
        floor = next((line["sps"] for line in of_line if line["peer"] == FLOOR), None)
        for line in of_line:
            ideal = line["workers"] / line["step_s"] if line["step_s"] else floor
            line |= {
                "ideal_sps": ideal,
                "floor_sps": floor,
                "efficiency": line["sps"] / ideal if ideal else None,
                "of_floor": line["sps"] / floor if floor else None,
            }
    return lines
