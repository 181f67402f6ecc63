"""``torchrl-dist slurm -- COMMAND``: a batch script that starts the command's ranks under Slurm.

The script does everything that a job needs and that Slurm does not do by itself. Comments in the
script explain each part. ``script`` is a pure function. A single ``srun`` starts all ranks, so that
``session`` sees one job even if a heterogeneous job has two components.
"""

from __future__ import annotations

import argparse
import math
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from ..errors import ConfigurationError
from ..recipes.catalog import RECIPES
from ..recipes.training.config import RecipeConfig, ReplayConfig
from ..recipes.training.options import add_options as add_fields
from ..recipes.training.options import given_options, read_options
from ..ui import at_least

STOPPED_BY_USR1, STOPPED_BY_TERM = 138, 143
"""Exit codes of ``torchrl-dist train`` if SIGUSR1 or SIGTERM stopped the command and the command
wrote its checkpoint."""

_SBATCH_S = 60.0
_MOST_SIGNAL_S = 65535  # the limit of sbatch --signal


@dataclass(frozen=True)
class Component:
    """Nodes of one kind, and the tasks on them."""

    nodes: int = 1
    tasks_per_node: int = 1
    cpus_per_task: int = 1
    gpus_per_node: int = 0
    partition: str | None = None
    mem: str | None = None

    def header(self) -> list[str]:
        options = {
            "nodes": self.nodes,
            "ntasks-per-node": self.tasks_per_node,
            "cpus-per-task": self.cpus_per_task,
            "gpus-per-node": self.gpus_per_node,
            "partition": self.partition,
            "mem": self.mem,
        }
        return [f"--{name}={value}" for name, value in options.items() if value]

    def step(self) -> str:
        # Since Slurm 22.05, a step does not inherit the job's --cpus-per-task. Without this option,
        # all tasks would share one core.
        return (
            f"--nodes={self.nodes} --ntasks={self.nodes * self.tasks_per_node} "
            f"--ntasks-per-node={self.tasks_per_node} --cpus-per-task={self.cpus_per_task}"
        )


@dataclass(frozen=True)
class Job:
    """What the job starts, and where.

    Attributes:
        command: the command of each rank. ``train ...`` stands for ``torchrl-dist train ...``.
        first: the nodes of all ranks if ``collectors`` is None, otherwise the nodes of rank 0 (the
            learner).
        collectors: the nodes of the other ranks, if these nodes are of another kind (a
            heterogeneous job).
        time: the time limit in one of Slurm's forms.
        requeues: the maximum number of times that the job is queued again after it was stopped and
            wrote a checkpoint.
        signal_s: how many seconds before the time limit Slurm signals the job to stop.
        seeds: seeds in the notation of Slurm's ``--array``. Each seed gets its own job.
        interface: network interface between the nodes, if the kernel would choose the wrong
            interface.
        container: words that run a command in a container, such as ``("apptainer", "exec",
            "image.sif")``.
        torchrun: ranks per node that torchrun starts. With None, srun starts the ranks.
        python: the interpreter for ``torchrl-dist train``.
        setup: lines of shell that run first.
        sbatch: more options of sbatch.
    """

    command: tuple[str, ...]
    first: Component = Component()
    collectors: Component | None = None
    name: str = "torchrl-dist"
    time: str = "04:00:00"
    requeues: int = 3
    signal_s: int = 120
    seeds: str | None = None
    interface: str | None = None
    container: tuple[str, ...] = ()
    torchrun: int | None = None
    python: str = "python"
    setup: tuple[str, ...] = ()
    sbatch: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check(self)

    @property
    def recipe(self) -> bool:
        return self.command[0] == "train"


_ENDLESS = ("infinite", "unlimited")


def seconds_of(time: str) -> float:
    """Return the seconds of a time limit in one of Slurm's forms. The result for ``UNLIMITED`` is
    infinity.

    Raises:
        ConfigurationError: ``time`` has none of these forms.
    """
    if time.lower() in _ENDLESS:
        return math.inf
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", time, re.ASCII)
    if match is None:
        raise ConfigurationError(
            f"--time: got {time!r}, expected one of Slurm's forms: minutes, minutes:seconds, "
            "hours:minutes:seconds, days-hours, days-hours:minutes, days-hours:minutes:seconds, or "
            "UNLIMITED; such as 04:00:00 or 2-12"
        )
    days, *rest = match.groups()
    numbers = [int(each) for each in rest if each is not None]
    if days is not None or len(numbers) == 3:  # hours come first, or after the days
        hours, minutes, seconds = [*numbers, 0, 0][:3]
    else:
        hours, minutes, seconds = 0, *[*numbers, 0][:2]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


def check(job: Job) -> None:
    """Raise ConfigurationError for options that Slurm or the command would otherwise refuse only
    after the job was queued."""
    limit_s = seconds_of(job.time)
    if problem := _problem(job, limit_s):
        raise ConfigurationError(problem)
    if job.recipe:
        config, given = recipe_of(job.command)
        ranks = sum(each.nodes * each.tasks_per_node for each in _components(job))
        config.check_launched(given, ranks)
        config.roles(ranks)
        if job.seeds is not None and {"seed", "output_dir"} & given.keys():
            raise ConfigurationError(
                "--seeds gives each job its own seed and folder; leave --seed and --output-dir out"
            )


def _problem(job: Job, limit_s: float) -> str | None:
    if limit_s == 0:
        return (
            f"--time: got {job.time!r}, which Slurm reads as no limit. Give --time UNLIMITED, "
            "or how long the job may run"
        )
    if job.signal_s >= limit_s:
        return (
            f"--signal-s: the job would be stopped {job.signal_s} s before its limit, but --time "
            f"{job.time} is only {limit_s:g} s, so the job would be stopped as soon as it starts. "
            "Expected fewer seconds than the limit; note that --time without a colon is in minutes"
        )
    if job.signal_s > _MOST_SIGNAL_S:
        return f"--signal-s: got {job.signal_s}, expected at most {_MOST_SIGNAL_S}, Slurm's limit"
    if not job.command:
        return (
            "no command: expected torchrl-dist slurm -- train apex, or torchrl-dist slurm -- "
            "python train.py"
        )
    if job.seeds is not None:
        if job.collectors is not None:
            return (
                "--seeds makes a job array, but Slurm has no arrays of heterogeneous jobs; submit "
                "one job per seed, or leave --collector-nodes out"
            )
        if not re.fullmatch(r"\d+([-,:]\d+)*(%\d+)?", job.seeds):
            return f"--seeds: got {job.seeds!r}, expected a list such as 0-4 or 0,7,9%2"
        for low, high in re.findall(r"(\d+)-(\d+)", job.seeds):
            if int(low) > int(high):
                return f"--seeds: got {low}-{high}, expected the lower number first"
    if job.torchrun is not None and job.collectors is not None:
        return (
            "--torchrun starts the same number of ranks on each node, which does not fit a "
            "heterogeneous job; leave --torchrun out, so that srun starts the ranks"
        )
    if job.torchrun is not None and job.recipe:
        return (
            "--torchrun is only for your own scripts; leave it out here, because srun starts "
            "the ranks of a recipe"
        )
    return None


def recipe_of(command: Sequence[str]) -> tuple[RecipeConfig, dict[str, Any]]:
    """Return the configuration for ``train RECIPE ...``, and the names of the fields that the
    command sets."""
    parser = _Parser(prog="torchrl-dist train", allow_abbrev=False, add_help=False)
    parser.add_argument("recipe", choices=sorted(RECIPES))
    recipe = RECIPES[parser.parse_known_args(command[1:2])[0].recipe]
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--config", dest="config_file")
    add_fields(parser, recipe.config)
    options = parser.parse_args(command[1:])
    given = given_options(options, recipe.config)
    if options.config_file is not None:
        given = {**read_options(options.config_file, recipe.config), **given}
    return recipe.config(**given), given


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigurationError(f"{message} (see {self.prog} --help)")


def _components(job: Job) -> list[Component]:
    return [job.first, *([job.collectors] if job.collectors else [])]


# ---- the script


def script(job: Job) -> str:
    """Return the batch script. The script passes shellcheck."""
    parts = [
        "#!/usr/bin/env bash",
        *(f"#SBATCH {line}" for line in _header(job)),
        *_environment(job),
        *_run(job),
        *_end(job),
    ]
    return "\n".join(parts) + "\n"


def _header(job: Job) -> list[str]:
    # With torchrun, "B:" sends the signal to the batch shell. The shell remembers the signal,
    # because torchrun's exit code does not tell whether its ranks were stopped.
    shell = "B:" if job.torchrun else ""
    both = [f"--time={job.time}", f"--signal={shell}USR1@{job.signal_s}"]
    output = "%x-%A_%a.out" if job.seeds else "%x-%j.out"
    lines = [f"--job-name={job.name}", f"--output={output}", "--open-mode=append"]
    lines += ["--requeue" if job.requeues else "--no-requeue"]
    lines += [f"--array={job.seeds}"] if job.seeds else []
    lines += [*both, *job.sbatch, *job.first.header()]
    if job.collectors:
        lines += ["hetjob", *both, *job.sbatch, *job.collectors.header()]
    return lines


def _environment(job: Job) -> list[str]:
    lines = [""]
    for line in job.setup:
        lines += ["# shellcheck disable=SC1090,SC1091", line]
    lines += [
        "set -u",
        "# This is a host name, because a node may know only a loopback address of itself. Rank 0 "
        "is in component 0.",
        'nodes=$(scontrol show hostnames "${SLURM_JOB_NODELIST_HET_GROUP_0:-$SLURM_JOB_NODELIST}")',
        "MASTER_ADDR=${nodes%%$'\\n'*}",
        "MASTER_PORT=$((20000 + SLURM_JOB_ID % 12000))",
        "export MASTER_ADDR MASTER_PORT PYTHONFAULTHANDLER=1 PYTHONUNBUFFERED=1",
        'export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"',
    ]
    if job.interface:
        name = shlex.quote(job.interface)
        lines += [
            f"export TP_SOCKET_IFNAME={name} GLOO_SOCKET_IFNAME={name} NCCL_SOCKET_IFNAME={name}"
        ]
    if _own_replay_dir(job):
        cleaner = shlex.join([*job.container, job.python, "-m", "torchrl_dist"])
        lines += [
            "# The buffer is in memory, because no buffer can be in a home folder on the network.",
            "# The memory is freed at the end, because the next start may be on another node.",
            'replay=$(mktemp -d "/dev/shm/torchrl_dist-$SLURM_JOB_ID-XXXXXX")',
            "# shellcheck disable=SC2317",
            "clean() {",
            '  [ ! -d "$replay" ] || rmdir "$replay" 2>/dev/null || \\',
            f'    {cleaner} clean --remove "$replay" >&2',
            "}",
        ]
    if job.recipe:
        lines += _OUTCOME
    return [*lines, *_at_exit(job)]


_OUTCOME = (
    "# The learner writes its exit code here, because srun may return a collector's exit code.",
    "TORCHRL_DIST_EXIT_FILE=$(mktemp)",
    "export TORCHRL_DIST_EXIT_FILE",
)
_READ_OUTCOME = (
    'if [ -s "$TORCHRL_DIST_EXIT_FILE" ]; then code=$(cat "$TORCHRL_DIST_EXIT_FILE"); fi'
)
"""The script reads this file because srun returns the highest exit code of its tasks."""


def _at_exit(job: Job) -> list[str]:
    steps = ["clean"] if _own_replay_dir(job) else []
    steps += ['rm -f "$TORCHRL_DIST_EXIT_FILE"'] if job.recipe else []
    return [f"trap {shlex.quote('; '.join(steps))} EXIT"] if steps else []


def _own_replay_dir(job: Job) -> bool:
    """Whether the script makes a replay directory. It does so only on a single node, for a recipe
    that has a buffer but no --replay-dir.

    On several nodes, each node has a shard in memory, which the job itself frees at its end.
    """
    if not job.recipe or sum(each.nodes for each in _components(job)) > 1:
        return False
    config, _ = recipe_of(job.command)
    return isinstance(config, ReplayConfig) and config.replay_dir is None


def _command(job: Job) -> str:
    words = [*job.command]
    if job.recipe:
        words = [job.python, "-m", "torchrl_dist", *words]
    text = shlex.join([*job.container, *words])
    text += ' --seed "$SLURM_ARRAY_TASK_ID"' if job.seeds else ""
    text += ' --replay-dir "$replay"' if _own_replay_dir(job) else ""
    if job.torchrun is None:
        return text
    # is_host is set, because a node may fail to recognize its own name in the endpoint
    # (pytorch#73656).
    torchrun = (
        f"exec torchrun --nnodes={job.first.nodes} --nproc-per-node={job.torchrun} "
        '--rdzv-backend=c10d --rdzv-endpoint="$MASTER_ADDR:$MASTER_PORT" '
        '--rdzv-id="$SLURM_JOB_ID" --rdzv-conf="is_host=$((SLURM_NODEID == 0))" '
        '--local-addr="$SLURMD_NODENAME" --max-restarts=3 '
        "--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1 "
        f'--shutdown-timeout={max(30, job.signal_s - 30)} "$@"'
    )
    words = [*(job.command[1:] if _is_python(job.command[0]) else job.command)]
    text = shlex.join(words) + (' --seed "$SLURM_ARRAY_TASK_ID"' if job.seeds else "")
    inside = shlex.join([*job.container, "bash", "-c"])
    return f"{inside} '{torchrun}' torchrun {text}"


def _is_python(word: str) -> bool:
    return re.fullmatch(r"(.*/)?python[\d.]*", word) is not None


def _run(job: Job) -> list[str]:
    # Without the first two options, one lost collector would end the step, and the step would end
    # all other ranks.
    common = "srun --kill-on-bad-exit=0 --wait=0 --unbuffered --label"
    command = _command(job)
    if job.collectors is None:
        step = [f"{common} {job.first.step()} \\", f"  {command}"]
    else:
        # Slurm places rank 0 in the first group, no matter how the nodes are named.
        threads = f"env OMP_NUM_THREADS={job.first.cpus_per_task} "
        step = [
            f"{common} \\",
            f"  --het-group=0 {job.first.step()} \\",
            f"  {threads}{command} : \\",
            f"  --het-group=1 {job.collectors.step()} \\",
            f"  {command}",
        ]
    if job.torchrun is None:
        return ["", *step, "code=$?", *([_READ_OUTCOME] if job.recipe else [])]
    return [
        "",
        "stopped=0",
        "trap 'stopped=1 interrupted=1; scancel --signal=USR1 \"$SLURM_JOB_ID\"' USR1",
        "# shellcheck disable=SC2016",
        *step[:-1],
        f"{step[-1]} &",
        "step=$!",
        "interrupted=1",
        'while [ "$interrupted" = 1 ]; do # the trap interrupts wait',
        "  interrupted=0",
        '  wait "$step"',
        "  code=$?",
        "done",
        f'if [ "$stopped" = 1 ] && [ "$code" != 0 ]; then code={STOPPED_BY_USR1}; fi',
    ]


def _end(job: Job) -> list[str]:
    if not job.requeues:
        return ['exit "$code"']
    number = "${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}" if job.seeds else "$SLURM_JOB_ID"
    clean = ["  clean"] if _own_replay_dir(job) else []
    return [
        "",
        f"# {STOPPED_BY_USR1} and {STOPPED_BY_TERM}: stopped by USR1 and TERM, after writing the "
        "checkpoint. A job that scancel ended is not queued again.",
        f'if [ "$code" = {STOPPED_BY_USR1} ] || [ "$code" = {STOPPED_BY_TERM} ]; then',
        f'  if [ "${{SLURM_RESTART_COUNT:-0}}" -ge {job.requeues} ]; then',
        f'    echo "stopped, but was already requeued {job.requeues} times" >&2',
        '  elif scontrol show job "$SLURM_JOB_ID" | grep -q JobState=RUNNING; then',
        *("  " + line for line in clean),
        f'    scontrol requeue "{number}" && exit 0',
        "  fi",
        "fi",
        'exit "$code"',
    ]


def submit(text: str) -> str:
    """Submit the script with sbatch, and return the job's id.

    Raises:
        ConfigurationError: sbatch is not installed, or refuses the script.
    """
    if shutil.which("sbatch") is None:
        raise ConfigurationError(
            "--submit: sbatch is not installed here; leave --submit out, and submit the script on "
            "a login node"
        )
    done = subprocess.run(
        ["sbatch", "--parsable"], input=text, capture_output=True, text=True, timeout=_SBATCH_S
    )
    if done.returncode:
        raise ConfigurationError(
            f"sbatch refuses the script: {done.stderr.strip()}. Correct the options, or submit the "
            "script yourself"
        )
    return done.stdout.strip().partition(";")[0]


# ---- the command


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Print a batch script for Slurm that starts COMMAND in every task. COMMAND is a recipe "
        "(train apex ...), or your own script that enters session(...). Before the time limit, "
        "the job is stopped and writes a checkpoint. When Slurm starts the job again, it "
        "continues from this checkpoint."
    )
    parser.epilog = (
        "Example, a learner with a GPU and two nodes of collectors: torchrl-dist slurm --gpus 1 "
        "--cpus-per-task 8 --partition gpu --collector-nodes 2 --collector-cpus-per-task 32 "
        "--collector-partition cpu -- python train.py"
    )
    first = parser.add_argument_group("nodes")
    second = parser.add_argument_group(
        "nodes of another kind for the collectors",
        "These options make a heterogeneous job with the learner in the first component.",
    )
    job = parser.add_argument_group("job")
    tasks = "ranks on each node (default: 1, or all processes of a recipe if there is one node)"
    time = "time limit in Slurm's notation: minutes, 08:00:00, 2-12 (default: 04:00:00)"
    requeues = "how often the job is queued again after the time limit or a preemption (default: 3)"
    signal_s = "how many seconds before the time limit the job is stopped (default: 120)"
    container = (
        "command that runs other commands in a container, such as 'apptainer exec --nv image.sif'"
    )
    setup = "shell command to run first, such as 'source .venv/bin/activate'; may be repeated"
    for group, option, kind, default, metavar, text in (
        (first, "--nodes", at_least(1), 1, "N", "(default: 1)"),
        (first, "--tasks-per-node", at_least(1), None, "N", tasks),
        (first, "--cpus-per-task", at_least(1), 1, "N", "(default: 1)"),
        (first, "--gpus", at_least(0), 0, "N", "per node (default: 0)"),
        (first, "--partition", str, None, "NAME", None),
        (first, "--mem", str, None, "SIZE", "memory per node, including /dev/shm"),
        (second, "--collector-nodes", at_least(1), None, "N", None),
        (second, "--collector-tasks-per-node", at_least(1), None, "N", None),
        (second, "--collector-cpus-per-task", at_least(1), None, "N", None),
        (second, "--collector-partition", str, None, "NAME", None),
        (second, "--collector-mem", str, None, "SIZE", None),
        (job, "--name", str, "torchrl-dist", "NAME", "(default: torchrl-dist)"),
        (job, "--time", str, "04:00:00", "TIME", time),
        (job, "--requeues", at_least(0), 3, "N", requeues),
        (job, "--signal-s", at_least(1), 120, "S", signal_s),
        (job, "--seeds", str, None, "LIST", "start one job per seed of this list, such as 0-4; "
            "each job gets its seed by --seed"),
        (job, "--interface", str, None, "NAME", "network interface between the nodes"),
        (job, "--container", str, "", "WORDS", container),
        (job, "--torchrun", at_least(1), None, "N", "start N ranks on each node with torchrun"),
        (job, "--python", str, None, "PYTHON",
         "interpreter for a recipe (default: the interpreter of this command; with --container: "
         "python)"),
    ):  # fmt: skip
        group.add_argument(option, type=kind, default=default, metavar=metavar, help=text)
    for option, metavar, text in (
        ("--setup", "LINE", setup),
        (
            "--sbatch",
            "OPTION",
            "another option of sbatch, such as --sbatch=--qos=low; may be repeated",
        ),
    ):
        job.add_argument(option, action="append", default=[], metavar=metavar, help=text)
    parser.add_argument(
        "--submit", action="store_true", help="submit the script, and print the job's id"
    )
    parser.add_argument("words", nargs=argparse.REMAINDER, metavar="-- COMMAND")
    parser.set_defaults(command=run)


def job_of(options: argparse.Namespace) -> Job:
    """Return the job that the command line describes."""
    words = tuple(options.words[1:] if options.words[:1] == ["--"] else options.words)
    tasks = options.tasks_per_node
    if tasks is None:
        tasks = 1
        if words[:1] == ("train",) and options.collector_nodes is None and options.nodes == 1:
            roles = recipe_of(words)[0].roles(None)
            tasks = (
                roles["learner"] + roles["collector"]
            )  # no evaluator, because under srun the last collector evaluates
    first = Component(
        options.nodes, tasks, options.cpus_per_task, options.gpus, options.partition, options.mem
    )
    second = None
    if options.collector_nodes is not None:
        second = Component(
            options.collector_nodes,
            options.collector_tasks_per_node or 1,
            options.collector_cpus_per_task or 1,
            partition=options.collector_partition,
            mem=options.collector_mem,
        )
    elif any(value for name, value in vars(options).items() if name.startswith("collector_")):
        raise ConfigurationError(
            "--collector-nodes is missing; add it, because the other --collector- options need it"
        )
    if options.torchrun:
        first = replace(first, tasks_per_node=1)
    container = tuple(shlex.split(options.container))
    same = ("name", "time", "requeues", "signal_s", "seeds", "interface", "torchrun")
    return Job(
        words,
        first,
        second,
        container=container,
        python=options.python or ("python" if container else sys.executable),
        setup=tuple(options.setup),
        sbatch=tuple(options.sbatch),
        **{name: getattr(options, name) for name in same},
    )


def run(options: argparse.Namespace) -> int:
    text = script(job_of(options))
    if options.submit:
        text = submit(text)
    print(text.rstrip("\n"), flush=True)
    return 0
