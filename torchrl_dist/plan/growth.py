"""How does the speed grow with the number of nodes? The planner's model predicts the speed of up to
32 nodes.

    torchrl-dist plan --env CartPole-v1 --json > plan.json
    python -m torchrl_dist.plan.growth plan.json

Prints the efficiencies that tianshou#1172 measured with Ray on nodes of 48 cores, for steps that
sleep 1, 0.1, 0.01 and 0.001 s. Next to these figures are the planner's predictions, for one rank
per core and for one node worker per node. The predictions use the costs of messages in plan.json,
and each prediction names what limits the speed. The lines below the table say how many nodes
saturate one learner.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torchrl_dist import own_files
from torchrl_dist.errors import ConfigurationError
from torchrl_dist.planner import Costs, Layout, predict
from torchrl_dist.ui import show_table

CORES, NODES, STEPS_S = 48, (2, 4, 8, 16, 32), (1.0, 0.1, 0.01, 0.001)
RAY = {
    2: (0.96, 0.71, 0.33, 0.04), 4: (0.95, 0.67, 0.21, 0.02), 8: (0.91, 0.56, 0.11, 0.01),
    16: (0.86, 0.41, 0.05, 0.01), 32: (0.78, 0.26, 0.03, 0.0),
}  # fmt: skip
"""Published efficiencies by number of nodes, one for each of ``STEPS_S``."""
# A message has this many seconds of steps, and at least one step, like the collector's default.
_MESSAGE_S = 0.5


def costs_of(plan: dict[str, Any]) -> Costs:
    """Return the costs that ``torchrl-dist plan --json`` measured.

    Raises:
        ConfigurationError: ``plan`` is not the output of that command.
    """
    try:
        measured, settings = plan["measured"], plan["settings"]
        steps = {int(envs): s for envs, s in measured["step_cpu_s"].items()}
        given = {"step_cpu_s", "updates_per_frame", "bytes_per_s"}
        return Costs(
            step_cpu_s=tuple(sorted(steps.items())),
            updates_per_frame=settings["updates_per_frame"],
            bytes_per_s=settings["assumed_bytes_per_s"],
            **{n: measured[n] for n in Costs.__dataclass_fields__ if n not in given},
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise ConfigurationError(
            "expected the output of torchrl-dist plan --json, but reading the file raised "
            f"{error!r}: run that command again and pass its output"
        ) from error


def sleeping(costs: Costs, step_s: float) -> Costs:
    """Return ``costs`` for an env that only sleeps and a learner that makes no updates. The costs
    of messages and of the loop stay the same."""
    return replace(costs, idle_s=step_s, spread=0.0, update_s=0.0)


def layout_of(nodes: int, step_s: float, node_workers: bool) -> Layout:
    """Return a layout with one process per core, messages with half a second of steps, and no
    waiting for slow workers."""
    steps = max(1, int(_MESSAGE_S / step_s))
    return Layout(nodes, CORES, 1, steps, node_workers, lag=1, wait_all=False)


def growth(costs: Costs) -> list[dict[str, Any]]:
    """Return one line for each number of nodes, step time and kind of worker."""
    lines = []
    for nodes in NODES:
        for step_s, published in zip(STEPS_S, RAY[nodes], strict=True):
            for node_workers in (False, True):
                layout = layout_of(nodes, step_s, node_workers)
                predicted = predict(sleeping(costs, step_s), layout, CORES)
                lines.append(
                    {
                        "nodes": nodes,
                        "step_s": step_s,
                        "workers": "node" if node_workers else "ranks",
                        "steps_per_message": layout.steps,
                        "ray_efficiency": published,
                        "efficiency": predicted.frames_per_s * step_s / layout.stepping,
                        "frames_per_s": predicted.frames_per_s,
                        "learner_busy": predicted.learner_busy,
                        "bound_by": predicted.bound_by,
                    }
                )
    return lines


def full_at(costs: Costs, step_s: float, node_workers: bool) -> float:
    """Return the number of nodes that saturate one learner. With more nodes, the learner receives
    no more frames per second."""
    one = predict(sleeping(costs, step_s), layout_of(1, step_s, node_workers), CORES)
    busy = one.learner_busy
    return math.inf if busy <= 0 else 1 / busy


def print_table(costs: Costs, lines: Sequence[dict[str, Any]]) -> None:
    """Print the efficiencies side by side, then the numbers of nodes that saturate the learner."""
    from rich.console import Console

    console = Console(width=110)
    rows = []
    for ranks, node in zip(lines[::2], lines[1::2], strict=True):
        cells = [
            cell
            for line in (ranks, node)
            for cell in (f"{line['efficiency']:.0%}", line["bound_by"])
        ]
        published = f"{ranks['ray_efficiency']:.0%}"
        rows.append((str(ranks["nodes"]), f"{ranks['step_s']:g}", published, *cells))
    show_table(
        f"predicted efficiency on nodes of {CORES} cores",
        ("nodes", "step s", "Ray, published", "a rank per core", "bound by", "a node worker",
         "bound by"), rows, width=110,
    )  # fmt: skip
    for step_s in STEPS_S:
        by_rank, by_node = (full_at(costs, step_s, joined) for joined in (False, True))
        console.print(
            f"steps of {step_s:g} s: one learner is saturated at {by_rank:,.0f} nodes with one "
            f"rank per core, and at {by_node:,.0f} nodes with one node worker each"
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table. Takes a few seconds of one core."""
    parser = argparse.ArgumentParser(
        prog="python -m torchrl_dist.plan.growth",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "plan", type=Path, metavar="PLAN.json", help="output of torchrl-dist plan --json"
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write one JSON object per prediction"
    )
    options = parser.parse_args(argv)
    costs = costs_of(json.loads(options.plan.read_text().splitlines()[-1]))
    lines = growth(costs)
    print_table(costs, lines)
    if options.json is not None:
        with own_files.open_named(options.json, append=False) as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
