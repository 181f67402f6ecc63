"""``torchrl-dist plan``: predicts the speed of a job, and whether it pays to distribute the job."""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from torchrl_dist.errors import ConfigurationError
from torchrl_dist.planner import MIN_GAIN, Costs, Layout, Prediction, decide, predict, rank, time_to
from torchrl_dist.recipes.catalog import RECIPES
from torchrl_dist.ui import above_zero, at_least, show_table

if TYPE_CHECKING:
    from .measure import Measured, Subject

# The collector's defaults: a message has the steps of _MESSAGE_S seconds, or more if more than
# _PROCESSES_PER_CORE processes share a core. A message never has more than _MESSAGE_BYTES.
_MESSAGE_S, _MESSAGE_BYTES, _PROCESSES_PER_CORE = 0.5, 8 << 20, 4
_MOST_PER_CORE, _MOST = 32, 256  # the planner considers at most this many env processes
_DRAWS = 100  # how often measurements are resampled, to find the interval of a prediction
NEARLY = 0.9  # a layout with this fraction of the best rate counts as nearly as fast
_BUSY = 0.5  # a node with at least this load average per core counts as busy


@dataclass(frozen=True)
class Learning:
    """The learner's work, if the options of the command do not change it.

    Attributes:
        hidden: widths of each network's layers.
        networks: number of networks that an update trains.
        batch_size: rows of an update.
    """

    env: str | None = None
    hidden: tuple[int, ...] = (64, 64)
    networks: int = 1
    updates_per_frame: float = 1 / 32
    batch_size: int = 128


def learning_of(recipe: str) -> Learning:
    """Return the work of a recipe's learner with default options."""
    config: Any = RECIPES[recipe].config()
    updates, rows, networks = updates_of(config)
    return Learning(config.env, config.hidden, networks, updates / config.frames_per_batch, rows)


def updates_of(config: Any) -> tuple[float, int, int]:
    """Return updates per batch, rows of an update, and the number of networks that each update
    trains."""
    return _LEARNING[config.recipe](config)


# By recipe: updates per batch, rows of an update, and number of networks that each update trains.
# r2d2 is missing, because only networks of plain layers are measured, and r2d2's network has an
# LSTM.
_LEARNING: dict[str, Callable[[Any], tuple[float, int, int]]] = {
    "apex": lambda config: (config.updates_per_batch, config.batch_size, 1),
    "ddppo": lambda config: (
        config.epochs * config.minibatches,
        config.frames_per_batch // config.minibatches // config.learners,
        2,
    ),
    "impala": lambda config: (1, config.frames_per_batch, 2),
    "sac": lambda config: (
        config.updates_per_frame * config.frames_per_batch,
        config.batch_size,
        3,
    ),
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's description and options to ``parser``."""
    parser.description = (
        "Measure on this machine, in under a minute, how long a step, a message and an update "
        "take. Predict frames per second for one process, several processes, several nodes, and "
        "a learner that computes all actions. Print up to three layouts and whether to "
        "distribute at all."
    )
    parser.epilog = "Example: torchrl-dist plan --env my_package:make --nodes 4 --cores 48"
    for option, kind, default, metavar, text in (
        ("--env", str, None, "ID|PACKAGE:MAKE",
         "gymnasium id, or a function that makes an env (default: the recipe's env)"),
        ("--policy", str, None, "PACKAGE:MAKE",
         "a function that returns the policy's module (default: the recipe's layers, or two layers "
         "of 64 units; if observations are not vectors, random actions)"),
        ("--cores", at_least(1), None, "N", "cores per node (default: those of this machine)"),
        ("--nodes", at_least(1), 1, "N", "maximum number of nodes (default: 1)"),
        ("--frames", above_zero(float), 1e6, "N", "frames of the whole job (default: 1e6)"),
        ("--updates-per-frame", at_least(0, float), None, "X",
         "the learner's updates per frame (default: the recipe's, or 1/32, as with four epochs of "
         "minibatches of 128 rows)"),
        ("--update-s", at_least(0, float), None, "S",
         "seconds of one update (default: measured with the recipe's networks, or with a network "
         "of two layers of 64 units)"),
        ("--batch-size", at_least(1), None, "N",
         "rows of an update (default: the recipe's, or 128)"),
        ("--gbit-s", above_zero(float), 10.0, "X",
         "bandwidth of the network between nodes, which is not measured (default: 10)"),
        ("--seconds", above_zero(float), 1.0, "S", "time per measurement (default: 1)"),
        ("--timeout-s", above_zero(float), 120.0, "S",
         "longest wait for the processes (default: 120)"),
    ):  # fmt: skip
        parser.add_argument(option, type=kind, default=default, metavar=metavar, help=text)
    parser.add_argument(
        "--recipe", choices=sorted(_LEARNING),
        help="plan for the networks, batches and updates per frame of this recipe's defaults",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    parser.set_defaults(command=run)


def run(options: argparse.Namespace) -> int:
    """Measure, predict and print."""
    sys.path.insert(0, "")  # find package:make in the working directory, as python -m does
    learning = Learning() if options.recipe is None else learning_of(options.recipe)
    env = options.env or learning.env
    if env is None:
        raise ConfigurationError(
            "got neither --env nor --recipe; pass a gymnasium id or package:make as --env, or pass "
            "--recipe"
        )
    from .measure import Subject, envs_of, measure, named, small_policy, usable_cores

    if options.recipe is not None:  # refuse an env that `train` would refuse
        from torchrl_dist.recipes.parts.environments import look_at

        look_at(env, continuous=RECIPES[options.recipe].config.continuous)
    make_env, native = envs_of(env)
    if options.policy:
        policy = named(options.policy)()
    else:
        policy = small_policy(make_env(1), learning.hidden)
    updates, rows = options.updates_per_frame, options.batch_size
    subject = Subject(
        make_env, native, policy, options.update_s,
        learning.updates_per_frame if updates is None else updates,
        learning.batch_size if rows is None else rows,
        options.gbit_s * 1e9 / 8, learning.hidden, learning.networks,
    )  # fmt: skip
    here = usable_cores()
    cores = options.cores or here
    load = os.getloadavg()[0]  # before the measurement adds its own load
    measured = measure(subject, seconds=options.seconds, timeout_s=options.timeout_s)
    found = plan(measured, subject, cores, options.nodes, options.frames, env, options.recipe)
    found["load"] = {"average": load, "cores": here, "busy": load > _BUSY * here}
    if options.json:
        print(json.dumps(found), flush=True)
    else:
        show(found)
    return 0


# ---- the plan


def candidates(costs: Costs, cores: int, nodes: int) -> list[Layout]:
    """Return all layouts to compare."""
    counts = [envs for envs, _ in costs.step_cpu_s]
    most = min(_MOST, _MOST_PER_CORE * cores)
    processes = sorted({2**i for i in range(9)} | {max(1, cores - 1), cores})
    layouts = [Layout(envs=envs) for envs in counts]
    for envs in counts:
        for number, lag in itertools.product((p for p in processes if p <= most), (0, 1)):
            steps = steps_per_message(costs, envs, number / cores, 1)
            rank_ = Layout(1, number, envs, steps, False, lag, lag == 0)
            joined = steps_per_message(costs, envs, number / cores, number)
            node = replace(rank_, steps=joined, node_workers=True)
            layouts += [rank_, *(replace(node, nodes=n) for n in sorted({1, *_doubled(nodes)}))]
            if lag and costs.request_s > 0:
                layouts += [replace(node, groups=groups) for groups in (1, 2)]
    return layouts


def _doubled(most: int) -> Iterable[int]:
    return {*(2**i for i in range(1, most.bit_length()) if 2**i <= most), most}


def steps_per_message(costs: Costs, envs: int, per_core: float, joined: int) -> int:
    """Return the steps that ``RPCBatchedCollector`` chooses with ``frames_per_batch=None``.

    Args:
        envs: number of envs of each env process.
        per_core: number of env processes that share a core.
        joined: number of env processes whose steps are sent in one message.
    """
    step_s = costs.step_s(envs) + envs * costs.idle_s
    seconds = _MESSAGE_S * max(1.0, per_core / _PROCESSES_PER_CORE)
    by_bytes = _MESSAGE_BYTES / (envs * joined * costs.frame_bytes)
    return max(1, int(min(seconds / step_s, by_bytes)))


def plan(
    measured: Measured,
    subject: Subject,
    cores: int,
    nodes: int,
    frames: float,
    env: str,
    recipe: str | None = None,
) -> dict[str, Any]:
    """Return the object that ``--json`` prints.

    Args:
        frames: frames of the job, to predict its duration.
        env: the user's name for the env, for the printed commands.
        recipe: the recipe to plan for.
    """
    costs = measured.costs(subject)
    layouts = candidates(costs, cores, nodes)
    if recipe:  # keep only layouts that the recipe's options can express
        layouts = [each for each in layouts if not each.node_workers and not each.groups]
    if recipe == "ddppo":  # each learner steps its own envs, so there is no policy lag
        layouts = [each for each in layouts if each.alone or (each.stepping > 1 and not each.lag)]
    ranked = rank(costs, layouts, cores)
    verdict = decide(ranked)
    import numpy as np

    rng = np.random.default_rng(0)
    drawn = [measured.costs(subject, rng) for _ in range(_DRAWS)]
    chosen_first = thriftiest(ranked, verdict.layout)
    pay = {
        several: processes_that_pay(ranked, several) for several in {e[0].nodes > 1 for e in ranked}
    }
    best = _different([chosen_first, *(e for e in ranked if e[0].stepping <= pay[e[0].nodes > 1])])

    def described(layout: Layout, prediction: Prediction) -> dict[str, Any]:
        rates = sorted(predict(each, layout, cores).frames_per_s for each in drawn)
        return {
            **asdict(prediction),
            "interval": [rates[_DRAWS // 20], rates[-1 - _DRAWS // 20]],
            "seconds_to_frames": time_to(frames, prediction, layout, costs),
            "layout": asdict(layout),
            "name": name_of(layout),
            "start": start_of(layout, env, recipe),
        }

    chosen = [described(*each) for each in best]
    return {
        "verdict": verdict.word,
        "reason": f"{verdict.reason}; {_limit(chosen_first[1])}",
        "processes_that_pay": pay[False],
        "deadline": deadline_of(costs, ranked),
        "interval": chosen[0]["interval"],
        "predicted": chosen,
        "measured": measured.as_json(),
        "settings": {
            "env": env, "recipe": recipe, "cores": cores, "nodes": nodes, "frames": frames,
            "most_processes": max(each.processes for each in layouts),
            "updates_per_frame": subject.updates_per_frame, "batch_size": subject.batch_size,
            "hidden": list(subject.hidden), "networks": subject.networks,
            "assumed_bytes_per_s": subject.bytes_per_s,
        },
    }  # fmt: skip


def thriftiest(
    ranked: Sequence[tuple[Layout, Prediction]], best: Layout
) -> tuple[Layout, Prediction]:
    """Of the layouts that are nearly as fast as the fastest one, return the layout with the fewest
    env processes.

    Considers only layouts of the same kind as ``best``: one process, one node or several nodes.
    The planner recommends the returned layout, because more processes would bring little more
    speed. If this layout has several processes, :func:`processes_that_pay` returns their number.
    """
    kind = (best.alone, best.nodes > 1)
    alike = [each for each in ranked if (each[0].alone, each[0].nodes > 1) == kind]
    enough = NEARLY * max(prediction.frames_per_s for _, prediction in alike)
    alike = [e for e in alike if e[1].frames_per_s >= enough]
    return min(alike, key=lambda e: (e[0].stepping, -e[1].frames_per_s))


def _different(ranked: Iterable[tuple[Layout, Prediction]]) -> list[tuple[Layout, Prediction]]:
    """Return the first layout of each kind, at most three."""
    chosen: dict[tuple[Any, ...], tuple[Layout, Prediction]] = {}
    for layout, prediction in ranked:
        kind = (layout.alone, layout.nodes > 1, layout.node_workers, layout.lag, layout.groups)
        chosen.setdefault(kind, (layout, prediction))
        if len(chosen) == 3:
            break
    return list(chosen.values())


def processes_that_pay(ranked: Sequence[tuple[Layout, Prediction]], several: bool = False) -> int:
    """Return the smallest number of env processes with which a layout is nearly as fast as the
    fastest layout.

    1 means that a single process suffices.

    Args:
        several: compare the layouts on several nodes, not those on one node.
    """
    alike = [each for each in ranked if (each[0].nodes > 1) == several]
    enough = NEARLY * max(prediction.frames_per_s for _, prediction in alike)
    return min(lay.stepping for lay, prediction in alike if prediction.frames_per_s >= enough)


def deadline_of(costs: Costs, ranked: Sequence[tuple[Layout, Prediction]]) -> dict[str, Any] | None:
    """Return the effect of a receive deadline on the best layout that waits for all workers and has
    no policy lag, or None if there is no such layout.

    ``gain`` is the factor by which the deadline increases frames per second. ``spread`` is the
    standard deviation of a rollout's time, divided by the mean. ``deadline_s`` is None if no
    deadline makes the layout faster.
    """
    from .regimes import best_deadline

    in_rounds = (lay for lay, _ in ranked if lay.wait_all and lay.lag == 0 and lay.messages > 1)
    layout = next(in_rounds, None)
    if layout is None:
        return None
    count = layout.envs * layout.steps
    rollout_s = layout.steps * (costs.step_s(layout.envs) + layout.envs * costs.idle_s)
    rows_s = costs.learn_s * layout.frames + layout.messages * costs.message_learner_s
    spread = costs.spread / math.sqrt(count)
    found = best_deadline(
        layout.messages, spread, batch_s=costs.latency_s / rollout_s, rows_s=rows_s / rollout_s
    )
    deadline_s = found.deadline_s * rollout_s if found.gain > 1.0 else None
    return {
        "layout": name_of(layout), "spread": spread, "gain": found.gain, "deadline_s": deadline_s
    }  # fmt: skip


def _limit(prediction: Prediction) -> str:
    cures = {
        "environment": "most of the time goes into stepping the environments",
        "cores": "all cores are busy",
        "learner": "most of the time goes into the learner's updates, which no collector changes",
        "messages": "most of the time goes into messages: put more steps or envs into each message",
        "network": "the network between the nodes is saturated",
        "stragglers": "most of the time goes into waiting for the slowest worker",
    }
    return cures[prediction.bound_by]


def name_of(layout: Layout) -> str:
    """Describe ``layout`` in words."""
    envs = f"{layout.envs} env{'s' * (layout.envs > 1)}"
    if layout.alone:
        return f"one process, {envs}"
    where = f"{layout.nodes} nodes x " if layout.nodes > 1 else ""
    kind = "env processes of a node worker" if layout.node_workers else "collector ranks"
    how = f"policy at the learner, {layout.groups} group{'s' * (layout.groups > 1)}"
    how = how if layout.groups else f"lag {layout.lag}"
    return f"{where}{layout.processes} {kind}, {envs} each, {how}"


def start_of(layout: Layout, env: str, recipe: str | None = None) -> str:
    """Return what starts ``layout``: a recipe's command, or a call of the collector."""
    if recipe:
        train = f"train {recipe} --env {env} --envs-per-collector {layout.envs}"
        if not layout.alone and layout.lag != RECIPES[recipe].config().max_policy_lag:
            train += f" --max-policy-lag {layout.lag}"
        ranks = 0 if layout.alone else layout.stepping
        if layout.nodes > 1:  # every task except the learner collects
            learners = int(recipe != "ddppo")  # ddppo's learners step environments themselves
            tasks = -(-(ranks + learners) // layout.nodes)
            nodes = f"--nodes {layout.nodes} --tasks-per-node {tasks}"
            return f"torchrl-dist slurm {nodes} -- {train}"
        number = f"--learners {max(1, ranks)}" if recipe == "ddppo" else f"--collectors {ranks}"
        return f"torchrl-dist {train} {number}"
    if layout.alone:
        return f"RPCBatchedCollector(make_env, policy, num_envs={layout.envs})"
    more = f", num_envs={layout.envs * max(1, layout.groups)}, max_policy_lag={layout.lag}"
    more += f", env_processes={layout.processes}" if layout.node_workers else ""
    more += "" if layout.wait_all else ", readiness=FirstReady()"
    more += f", inference='learner', env_groups={layout.groups}" if layout.groups else ""
    collector = f"RPCBatchedCollector(make_env, policy, session=session{more})"
    workers = layout.nodes if layout.node_workers else layout.stepping
    if layout.nodes == 1:
        return f'local_cluster({{"learner": 1, "collector": {workers}}}); {collector}'
    slurm = f"torchrl-dist slurm --collector-nodes {layout.nodes} --collector-cpus-per-task"
    return f"{slurm} {layout.processes} -- python train.py; in it {collector}"


# ---- output as text


def show(found: dict[str, Any]) -> None:
    """Print the verdict, the layouts and the measurements."""
    from rich.console import Console
    from rich.markup import escape

    console = Console(width=max(100, Console().width))
    console.print(f"[bold]{found['verdict']}[/]: {escape(found['reason'])}")
    load = found.get("load")
    if load is not None and load["busy"]:
        console.print(
            f"[bold]a busy machine[/]: the load average was {load['average']:.1f} on "
            f"{load['cores']} cores before the measurement. Other work makes these figures worse "
            "and less certain; run this command again when the machine is idle",
            highlight=False,
        )
    count = found["processes_that_pay"]
    if count > 1:
        most = " (more were not considered)" if count >= found["settings"]["most_processes"] else ""
        console.print(f"up to {count} env processes pay on one node{most}")
    if deadline := found["deadline"]:
        pays = "would make" if deadline["gain"] >= MIN_GAIN else "does not pay: it would make"
        console.print(
            f"a receive deadline {pays} {deadline['gain']:.2f} times as many frames per second "
            f"with {deadline['layout']} (the time of a rollout varies by {deadline['spread']:.1%})",
            highlight=False,
        )
    length = f"{found['settings']['frames']:,.0f} frames"
    rows = [
        (each["name"], f"{each['frames_per_s']:,.0f}",
         f"{each['interval'][0]:,.0f} - {each['interval'][1]:,.0f}", f"{each['efficiency']:.0%}",
         f"{each['seconds_to_frames']:,.0f} s", each["bound_by"])
        for each in found["predicted"]
    ]  # fmt: skip
    columns = ("layout", "frames/s", "interval", "efficiency", length, "bound by")
    show_table(None, columns, rows, left=("layout", "bound by"), width=console.width)
    for number, each in enumerate(found["predicted"], 1):
        console.print(f"{number}. {escape(each['start'])}", highlight=False, soft_wrap=True)
    measured = found["measured"]
    t = {name: shown_time(s) for name, s in measured.items() if isinstance(s, float)}
    steps = ", ".join(f"{n}: {shown_time(s)}" for n, s in measured["step_cpu_s"].items())
    console.print(
        f"step of an env {t['step_s']}, spread {measured['spread']:.2f}, idle {t['idle_s']}, "
        f"reset {t['reset_s']}; CPU of a step with policy and loop, by number of envs: {steps}; "
        f"message {t['message_worker_s']} on the worker and {t['message_learner_s']} on the "
        f"learner; update {t['update_s']}",
        highlight=False,
        style="dim",
    )


def shown_time(seconds: float) -> str:
    """Return ``seconds`` with three digits and a unit."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-6:.2g} us"
