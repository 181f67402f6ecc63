"""The command ``torchrl-dist``.

Heavy imports happen inside the commands: ``--help`` and a wrong argument answer at once, and
``play`` starts nothing distributed. A command prints its result as one JSON object in the last line
of stdout; everything else goes to stderr.

Exit codes: 0 done; 1 failed on the way; 2 wrong arguments, nothing was started; 129, 130, 138, 140
and 143 stopped by SIGHUP, SIGINT, SIGUSR1, SIGUSR2 and SIGTERM (the checkpoint is written, the
result is printed; without a result, a second signal stopped it at once).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import sys
from collections.abc import Sequence
from typing import Any

from . import __version__
from .errors import CheckpointError, ConfigurationError, DirectoryError, TorchRLDistError

_STOPS = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
_STOPPED = {number.name: 128 + number for number in _STOPS}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    try:
        options = _parser().parse_args(arguments)
        return options.command(options)
    except SystemExit as exit_:  # argparse: --help, --version, wrong arguments
        return exit_.code if isinstance(exit_.code, int) else 1
    except (ConfigurationError, CheckpointError, DirectoryError) as error:
        return _refuse(str(error))
    except KeyboardInterrupt:
        print("torchrl-dist: interrupted", file=sys.stderr)
        return _STOPPED["SIGINT"]
    except TorchRLDistError as error:
        print(f"torchrl-dist: failed: {error}", file=sys.stderr)
        return 1


class _Parser(argparse.ArgumentParser):
    """Answers a wrong argument with one line, on the first rank only."""

    def error(self, message: str) -> Any:
        raise SystemExit(_refuse(f"{message} (see {self.prog} --help)"))


def _refuse(message: str) -> int:
    if os.environ.get("RANK", "0") == "0":
        print(f"torchrl-dist: error: {' '.join(message.split())}", file=sys.stderr)
    return 2


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="torchrl-dist",
        description="TorchRL's replay buffer and collector, shared by many processes.",
    )
    parser.add_argument("--version", action="version", version=f"torchrl-dist {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_train(commands)
    _add_play(commands)
    _add_inspect(commands)
    _add_clean(commands)
    _add_bench(commands)
    _add_ops(commands)
    return parser


# ---- train


def _add_train(commands: argparse._SubParsersAction) -> None:
    train = commands.add_parser("train", help="train a recipe", description="Train a recipe.")
    recipes = train.add_subparsers(title="recipes", metavar="RECIPE", required=True)
    _add_train_apex(recipes)


def _add_train_apex(recipes: argparse._SubParsersAction) -> None:
    from .recipes.apex_config import ApexConfig
    from .recipes.options import add_options

    apex = recipes.add_parser(
        "apex",
        help="distributed prioritized n-step double DQN",
        description=(
            "Train with distributed prioritized n-step double DQN (Ape-X): collectors step "
            "environments and write to one shared replay buffer, one learner learns from it. "
            "Environments: gymnasium's with flat observations and numbered actions. "
            "Ctrl-C stops in order and leaves a checkpoint; --resume goes on from it."
        ),
        epilog=(
            "Under torchrun, rank 0 is the learner and the other ranks collect: "
            "torchrun --nproc-per-node 4 -m torchrl_dist train apex --env CartPole-v1"
        ),
    )
    apex.add_argument(
        "--resume",
        action="store_true",
        help="continue the run in the output folder, with its configuration and its buffer; "
        "options given here replace the saved ones",
    )
    add_options(apex, ApexConfig)
    apex.set_defaults(command=_train_apex)


def _train_apex(options: argparse.Namespace) -> int:
    from .recipes.apex_config import ApexConfig, config_to_resume
    from .recipes.options import given_options

    given = given_options(options, ApexConfig)
    config = ApexConfig(**given)
    from .runtime import World

    world = World.from_env()
    launched = world.launcher in ("torchrun", "slurm")
    if launched and world.global_rank > 0:
        return _collect_for_rank_zero(config.timeout_s)
    if launched:
        _check_collectors(given, world.world_size - 1)
    from .recipes.environments import discrete_task
    from .recipes.run_directory import claim

    discrete_task(config.env)
    resume = claim(
        config.output_path,
        checkpoint=config.checkpoint_path,
        replay=config.replay_path,
        job_id=world.job_id,
        restart_count=world.restart_count,
        resume=options.resume,
    )
    if resume:
        config = config_to_resume(config.checkpoint_path, given)
    from .runtime import ForkServer, local_cluster, session

    with contextlib.ExitStack() as stack:
        # Started first, because it imports what we import below: on two cores at the same time.
        server = None if launched or config.collectors == 0 else stack.enter_context(ForkServer())
        from .recipes.apex import run

        if launched:
            opened = session({"learner": 1, "collector": -1}, timeout_s=config.timeout_s)
        else:
            others = {"collector": config.collectors, "evaluator": int(config.collectors > 0)}
            opened = local_cluster(
                {"learner": 1, **others},
                timeout_s=config.timeout_s,
                fork_server=server,
            )
        job = stack.enter_context(opened)
        result = run(config, job, resume=resume)
    return _print_result(result)


def _collect_for_rank_zero(timeout_s: float) -> int:
    import torch

    from .runtime import session

    torch.set_num_threads(1)
    with session({"learner": 1, "collector": -1}, timeout_s=timeout_s) as job:
        job.serve()
    return 0


def _check_collectors(given: dict[str, Any], ranks: int) -> None:
    if given.get("collectors", ranks) != ranks:
        raise ConfigurationError(
            f"--collectors: got {given['collectors']}, but the launcher started {ranks} ranks "
            "beside the learner; leave the option out"
        )


def _print_result(result: dict[str, Any]) -> int:
    print(json.dumps(result), flush=True)
    return _STOPPED.get(result.get("stopped_by") or "", 0)


# ---- play


def _add_play(commands: argparse._SubParsersAction) -> None:
    play = commands.add_parser(
        "play",
        help="run a trained policy alone",
        description="Run episodes of a checkpoint's policy, greedily, in this process alone.",
    )
    play.add_argument("checkpoint", metavar="CHECKPOINT", help="a checkpoint.pt, or its folder")
    play.add_argument("--episodes", type=int, default=20, metavar="N", help="(default: 20)")
    play.add_argument("--seed", type=int, default=0, help="of the environment (default: 0)")
    play.add_argument("--render", action="store_true", help="show the episodes in a window")
    play.set_defaults(command=_play)


def _play(options: argparse.Namespace) -> int:
    if options.episodes < 1:
        raise ConfigurationError(f"--episodes: got {options.episodes}, expected at least 1")
    if not 0 <= options.seed < 2**31:
        raise ConfigurationError(f"--seed: got {options.seed}, expected 0 to 2147483647")
    from .recipes.play import play

    return _print_result(
        play(
            options.checkpoint,
            episodes=options.episodes,
            seed=options.seed,
            render=options.render,
        )
    )


# ---- inspect


def _add_inspect(commands: argparse._SubParsersAction) -> None:
    inspect = commands.add_parser(
        "inspect",
        help="show what is in a replay buffer or a checkpoint of one",
        description=(
            "Show rows, priorities, processes and counters of a replay directory, also while a job "
            "uses it, or of a checkpoint. Read-only: nothing is attached, locked or changed."
        ),
    )
    inspect.add_argument("directory", metavar="DIR", help="the scratch_dir, or where dumps wrote")
    inspect.add_argument("--json", action="store_true", help="print one JSON object instead")
    inspect.set_defaults(command=_inspect)


def _inspect(options: argparse.Namespace) -> int:
    from .replay.inspection import finite, inspect, show

    found = inspect(options.directory)
    if options.json:
        print(json.dumps(finite(found), allow_nan=False), flush=True)
    else:
        show(found)
    return 0


# ---- clean


def _add_clean(commands: argparse._SubParsersAction) -> None:
    clean = commands.add_parser(
        "clean",
        help="list replay buffers that jobs have left, and remove those of dead jobs",
        description=(
            "List the replay directories in some folders: in use, kept, or left by a job. --remove "
            "removes those whose job cannot be started again; of a directory that is itself named "
            "also what was kept, or whose job might come back. No file of anybody else is removed, "
            "and nothing that a process uses."
        ),
    )
    clean.add_argument(
        "directories",
        metavar="DIR",
        nargs="*",
        help="folders to look in, or replay directories (default: /dev/shm and the folder for "
        "temporary files)",
    )
    clean.add_argument("--remove", action="store_true", help="remove what is of no use any more")
    clean.add_argument("--json", action="store_true", help="print one JSON object instead")
    clean.set_defaults(command=_clean)


def _clean(options: argparse.Namespace) -> int:
    import tempfile
    from pathlib import Path

    from .replay.node import leftovers

    for each in options.directories:
        if not os.path.isdir(each):
            raise ConfigurationError(f"{each} is no folder")
    named = {Path(os.path.realpath(each)) for each in options.directories}
    places = named or {Path("/dev/shm"), Path(tempfile.gettempdir())}
    removable = (leftovers.LEFT, leftovers.HALF_REMOVED)
    listed = []
    for found in leftovers.find(sorted(places)):
        chosen = options.remove and (found.state in removable or found.path in named)
        listed.append(found.as_json() | {"removed": chosen and leftovers.remove(found)})
    if options.json:
        print(json.dumps({"directories": listed}), flush=True)
        return 0
    for each in listed:
        job = "" if each["job_id"] is None else f", job {each['job_id']}"
        users = f" by {', '.join(map(str, each['pids']))}" if each["pids"] else ""
        print(
            f"{each['path']}: {'removed' if each['removed'] else each['state'] + users}, "
            f"{each['bytes'] / 2**20:.1f} MiB{job}"
        )
    left = sum(each["bytes"] for each in listed if each["state"] in removable)
    if not options.remove and left:
        print(f"--remove frees {left / 2**20:.1f} MiB")
    return 0


# ---- bench


def _add_bench(commands: argparse._SubParsersAction) -> None:
    from .bench import checkpoint, collect, ddp, law, limiter, remote, replay

    bench = commands.add_parser("bench", help="measure", description="Run a benchmark.")
    questions = bench.add_subparsers(title="benchmarks", metavar="BENCHMARK", required=True)
    summary = "the shared replay buffer beside other buffers"
    replay.add_options(questions.add_parser("replay", help=summary))
    summary = "how busy collectors keep the cores, beside other collectors"
    collect.add_options(questions.add_parser("collect", help=summary))
    summary = "a replay buffer in other processes, when every row travels by RPC"
    remote.add_options(questions.add_parser("remote", help=summary))
    summary = "the sampling law of a buffer spread over workers beside a single buffer's"
    law.add_options(questions.add_parser("law", help=summary))
    summary = "from which batch and network on it pays to learn on several ranks"
    ddp.add_options(questions.add_parser("ddp", help=summary))
    summary = "how long a checkpoint of a replay buffer takes, beside a plain copy"
    checkpoint.add_options(questions.add_parser("checkpoint", help=summary))
    summary = "how soon a sample returns that waits for the rate limiter"
    limiter.add_options(questions.add_parser("limiter", help=summary))


# ---- before, beside and after a job


def _add_ops(commands: argparse._SubParsersAction) -> None:
    from .ops import doctor, slurm

    doctor.add_options(commands.add_parser("doctor", help="is this machine fit for a job?"))
    slurm.add_options(commands.add_parser("slurm", help="a batch script that starts a job"))
