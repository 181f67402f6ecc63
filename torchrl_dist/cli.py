"""The command ``torchrl-dist``.

A command imports heavy packages only when it runs, so that ``--help`` and errors about arguments
appear without delay. A command prints its result as one JSON object in the last line of stdout;
``train`` prints a summary instead if stdout is a terminal. All other output goes to stderr.

Exit codes:

- 0: success.
- 1: failure.
- 2: wrong arguments; nothing was started.
- 129, 130, 138, 140, 143: stopped by SIGHUP, SIGINT, SIGUSR1, SIGUSR2 or SIGTERM. The command wrote
  its checkpoint and printed its result, unless a second signal stopped it immediately.
- 141: the reader of stdout is gone, as in ``| head``. ``train`` nevertheless continues and saves.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import dataclasses
import difflib
import errno
import gc
import json
import os
import select
import shlex
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from . import __version__, own_files
from .errors import CheckpointError, ConfigurationError, DirectoryError, TorchRLDistError
from .forks import imports_to_be_forked
from .stopping import Stopped
from .ui import at_least

_STOPS = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
# threads and exit functions of other modules may delay this process's exit by at most this many
# seconds
_END_S = 10.0
_FULL = (errno.ENOSPC, errno.EDQUOT)  # errors of a full disk
_STOPPED = {number.name: 128 + number for number in _STOPS}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    code = _run(arguments)
    if arguments[:1] == ["train"]:
        _tell_batch_script(code)
    return code


def console() -> NoReturn:
    """Entry point of the shell command. Runs the command and exits with its code."""
    global _is_fresh
    _is_fresh = True
    _open_standard_streams()
    code = 1
    try:
        code = main()
        code = _delivered(code)
    except BaseException as error:
        reader = select.poll()
        reader.register(sys.stdout, 0)
        if isinstance(error, BrokenPipeError) and reader.poll(0):
            # stdout has no reader any more, as in "torchrl-dist ... | head"
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            code = 128 + signal.SIGPIPE
        elif isinstance(error, KeyboardInterrupt):
            code = _STOPPED["SIGINT"]
        else:
            # Set these attributes as Python does, because exit functions read them in order to keep
            # the files of a process that failed.
            sys.last_type, sys.last_value, sys.last_traceback = sys.exc_info()
            sys.excepthook(*sys.exc_info())
    finally:
        _end_in_time(code)
    # Wait for threads and run exit functions as Python does, but skip the rest of Python's
    # shutdown, because it would sometimes abort this process ("terminate called without an active
    # exception"). The abort comes from RPC's exit function, or from a daemon thread that still
    # computes in torch, such as an evaluation that a stop signal cut short.
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C would only end an exit function early
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    _leave(code)


def _open_standard_streams() -> None:
    """Open descriptors 0, 1 and 2 on /dev/null where they are closed (``2>&-``).

    Otherwise, a file that is opened later would get one of these numbers, and libraries would print
    into this file.
    """
    while True:
        number = os.open(os.devnull, os.O_RDWR)
        if number > 2:
            os.close(number)
            break
        os.set_inheritable(number, True)
    for name, number in (("stdout", 1), ("stderr", 2)):
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "w", closefd=False))


def _delivered(code: int) -> int:
    """Return ``code``. If ``code`` is 0 but a write to stdout failed, return the code of this
    failure."""
    sys.stdout.flush()
    outputs = sys.modules.get(f"{__package__}.runtime.outputs")
    problem = outputs.problem_of(sys.stdout) if outputs is not None else None
    if problem is None or code:
        return code
    if isinstance(problem, BrokenPipeError):
        return 128 + signal.SIGPIPE
    _say(f"failed: the result could not be written to stdout: {problem.strerror}")
    return 1


def _end_in_time(code: int) -> None:
    """End this process after ``_END_S``, even if a thread or exit function still runs."""

    def end() -> None:
        time.sleep(_END_S)
        frames = sys._current_frames()
        left = []
        for thread in threading.enumerate():
            if thread.daemon or thread is threading.main_thread():
                continue
            frame = frames.get(thread.ident or 0)
            while frame is not None and frame.f_code.co_filename == threading.__file__:
                frame = frame.f_back
            place = f" at {frame.f_code.co_filename}:{frame.f_lineno}" if frame else ""
            left.append(f"thread {thread.name!r}{place}")
        _say(
            f"{_END_S:g} s after the command ended, {', '.join(left) or 'an atexit function'} "
            "still runs; this process exits anyway"
        )
        _leave(code)

    threading.Thread(target=end, name="torchrl_dist-end", daemon=True).start()


def _leave(code: int) -> NoReturn:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(code)


_is_fresh = False  # whether the command is the first thing that this process runs


def _tell_batch_script(code: int) -> None:
    """Write the first rank's exit code to the file that the batch script of ``torchrl-dist slurm``
    reads."""
    path = os.environ.get("TORCHRL_DIST_EXIT_FILE")
    if not path:
        return
    from .runtime import World

    with contextlib.suppress(OSError, ConfigurationError):
        if World.from_env().global_rank == 0:
            # the batch script created this file, on this node
            with open(own_files.open_ours(path, os.O_WRONLY), "w") as file:
                file.write(str(code))


def _run(arguments: Sequence[str]) -> int:
    try:
        try:
            parser = _parser(arguments[:1])
            if not arguments:
                parser.print_help(sys.stderr)
                return 2
            options = parser.parse_args(arguments)
        except SystemExit as exit_:  # argparse: --help, --version, wrong arguments
            return exit_.code if isinstance(exit_.code, int) else 1
        return options.command(options)
    except BaseException as error:
        return _code_of(error, training=arguments[:1] == ["train"])


def _code_of(error: BaseException, *, training: bool) -> int:
    """Print how the command failed, and return its exit code. If ``error`` is of an unknown kind,
    raise it again."""
    interrupt = _interrupt_behind(error)
    if isinstance(interrupt, SystemExit):
        return interrupt.code if isinstance(interrupt.code, int) else 1
    if interrupt is not None:
        _say("interrupted")
        return _STOPPED["SIGINT"]
    if isinstance(error, (ConfigurationError, CheckpointError, DirectoryError)):
        return _refuse(str(error))
    if isinstance(error, SystemExit):
        text = f"something called sys.exit({'' if error.code is None else repr(error.code)})"
    elif isinstance(error, TorchRLDistError):
        text = str(error)
    elif isinstance(error, OSError) and error.filename is not None and error.errno in _FULL:
        text = _without_space(error, training=training)
    else:
        raise error
    _say(f"failed: {text}")
    return 1


def _interrupt_behind(error: BaseException | None) -> KeyboardInterrupt | Stopped | None:
    """Return the exception of the second stop signal that led to ``error``, or None.

    The signal may interrupt any line, and the clean-up of a half-done step may then raise another
    error. Therefore ``error`` need not be the exception of the signal.
    """
    seen: set[int] = set()  # ends the loop if two errors are each other's context
    while error is not None and id(error) not in seen:
        if isinstance(error, (KeyboardInterrupt, Stopped)):
            return error
        seen.add(id(error))
        error = error.__context__
    return None


def _without_space(error: OSError, *, training: bool) -> str:
    """Return a message about a file that was not written because its disk is full."""
    path = Path(error.filename).absolute()
    # If a run failed before its first checkpoint, its folder has been removed.
    folder = next(each for each in path.parents if each.exists())
    text = (
        f"{path} could not be written: {error.strerror}, with {shutil.disk_usage(folder).free:,} "
        f"bytes free in {folder}; free more space, "
    )
    if training and any((each / "checkpoint.pt").exists() for each in (path, path.parent)):
        return text + "and continue with --resume from the last checkpoint, which is intact"
    return text + "and run the command again"


class _Parser(argparse.ArgumentParser):
    """A parser that reports a wrong argument in one line.

    A configuration file names options with underscores, so the parser also accepts
    ``--total_frames`` for ``--total-frames``. The parser accepts no abbreviations, because
    ``--frames`` would then mean ``--frames-per-batch``.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, **options})

    def error(self, message: str) -> Any:
        raise SystemExit(_refuse(f"{message} (see {self.prog} --help)"))

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        # The parser of a command itself refuses unknown arguments, because the parser of all
        # commands, which would do so otherwise, knows neither the command's options nor its help.
        known, unknown = super().parse_known_args(args, namespace)
        if unknown:
            names = [each.partition("=")[0] for each in unknown if each.startswith("-")]
            near = difflib.get_close_matches(_dashed(*names[:1]), self._option_string_actions, 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            self.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
        return known, unknown

    def _parse_optional(self, arg_string: str) -> Any:
        return super()._parse_optional(_dashed(arg_string))


def _dashed(text: str = "") -> str:
    """Return an argument with dashes instead of underscores in the name of a long option."""
    name, equals, value = text.partition("=")
    return name.replace("_", "-") + equals + value if name.startswith("--") else text


def _refuse(message: str) -> int:
    _say(f"error: {' '.join(message.split())}")
    return 2


_RANKS = ("SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")


def _say(text: str) -> None:
    """Print a line to stderr, with this process's rank if a launcher gave it one."""
    rank = os.environ.get("RANK")
    for name in _RANKS:
        # Ignore "0", because a batch script has this value, too, although the script is not a rank.
        if not rank and os.environ.get(name, "0") != "0":
            rank = os.environ[name]
    kind, _, rest = text.partition(": ")
    if rank:
        text = f"{kind}: rank {rank}: {rest}" if rest else f"rank {rank}: {text}"
    with contextlib.suppress(OSError, ValueError):
        text = own_files.printable(text, lines=True)
        print(f"torchrl-dist: {text}", file=sys.stderr, flush=True)


def _parser(command: Sequence[str] = ()) -> argparse.ArgumentParser:
    """Make the parser with the options of all commands.

    The options of ``bench`` and ``plan`` are added only if ``command`` names these commands,
    because their modules import NumPy, which takes longer than everything else.
    """
    parser = _Parser(
        prog="torchrl-dist",
        description="TorchRL's replay buffer and collector, shared by many processes.",
    )
    parser.add_argument("--version", action="version", version=f"torchrl-dist {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_train(commands)
    _add_play(commands)
    _add_export(commands)
    _add_inspect(commands)
    _add_clean(commands)
    bench = commands.add_parser("bench", help="run a benchmark", description="Run a benchmark.")
    if "bench" in command:
        _add_bench(bench)
    _add_ops(commands)
    plan = commands.add_parser("plan", help="predict a job's speed and whether to distribute it")
    if "plan" in command:
        _add_plan(plan)
    return parser


# ---- train


def _add_train(commands: argparse._SubParsersAction) -> None:
    from .recipes.catalog import RECIPES
    from .recipes.training.options import add_options

    train = commands.add_parser("train", help="train a recipe", description="Train a recipe.")
    recipes = train.add_subparsers(title="recipes", metavar="RECIPE", required=True)
    for name, recipe in RECIPES.items():
        parser = recipes.add_parser(
            name,
            help=recipe.summary,
            description=f"{recipe.description} Ctrl-C stops the run cleanly and leaves a "
            "checkpoint; --resume continues from this checkpoint.",
            epilog=f"Under torchrun {recipe.ranks}: "
            f"torchrun --nproc-per-node 4 -m torchrl_dist train {name} --env {recipe.config().env}",
        )
        parser.add_argument(
            "--resume",
            action="store_true",
            help="continue the run in the output folder, with the run's configuration and buffer; "
            "options given here override the saved options",
        )
        parser.add_argument(
            "--config",
            dest="config_file",
            metavar="FILE",
            help="YAML file with any of the options below, named with underscores; options on the "
            "command line override the file",
        )
        parser.add_argument(
            "--print-config",
            action="store_true",
            help="print the whole configuration as YAML and do nothing else",
        )
        parser.add_argument(
            "--seeds",
            type=at_least(1),
            metavar="N",
            help="train with N seeds from --seed on, one after the other, each in its own folder "
            "in OUTPUT_DIR (default: runs/RECIPE-ENV-seeds), and plot the mean and the range of "
            "their returns",
        )
        add_options(parser, recipe.config)
        parser.add_argument(
            "--json",
            action="store_true",
            help="print the result as one JSON object even if stdout is a terminal",
        )
        parser.set_defaults(command=_train, recipe=recipe)


def _train(options: argparse.Namespace) -> int:
    from .recipes.training.config import config_to_resume
    from .recipes.training.options import as_yaml, given_options, read_options

    recipe = options.recipe
    given = given_options(options, recipe.config)
    if options.config_file is not None:
        given = {**read_options(options.config_file, recipe.config), **given}
    config = recipe.config(**given)
    here = config.anchored()
    if options.print_config:
        if options.resume:
            config = config_to_resume(recipe.config, config.checkpoint_path, given)
        print(as_yaml(config), end="")
        return 0
    if options.seeds is not None:
        return _train_seeds(options, config, given)
    # Without a launcher, a server forked from this process starts the job's processes. The imports
    # below must therefore leave this process safe to fork. Under a launcher, nothing is forked, so
    # the imported libraries keep the user's settings.
    forks = _is_fresh and not {"RANK", "SLURM_PROCID"} & os.environ.keys()
    unset = not options.resume and not {"learners", "collectors"} & given.keys()
    if forks and options.resume:
        _say(f"resuming the run in {_short(here.output_path)}")
    elif forks and unset:
        _say("measuring how many processes pay off")
    elif forks:
        number = sum(here.roles(None).values())
        _say(f"starting {number} process{'es' * (number > 1)}")
    with _unsearched_imports(), imports_to_be_forked() if forks else contextlib.nullcontext():
        from .runtime import World
        from .runtime.outputs import outlive_readers
        from .runtime.session import look_for_others

    if _is_fresh:
        outlive_readers()
    world = World.from_env()
    if world.launcher == "single":
        look_for_others("to run a single process, unset the launcher's variables")
    config = here
    given |= {name: getattr(here, name) for name in ("output_dir", "replay_dir") if name in given}
    launched = world.world_size if world.launcher in ("torchrun", "slurm") else None
    if launched is not None:
        config.check_launched(given_options(options, recipe.config), launched)
    if world.global_rank > 0:
        return _serve_rank_zero(config, launched)
    # Under a launcher, each rank derives the roles from its command line, even if it resumes a run,
    # because only the first rank reads the checkpoint.
    for_roles = config
    with contextlib.ExitStack() as stack:
        with _unsearched_imports():
            from .plan.processes import choose
            from .recipes.parts.environments import look_at
            from .recipes.training.run_directory import check_rows, claim, forget
            from .runtime import ForkServer, local_cluster, session

            server = None
            if forks:  # fork the server before any user code runs
                server = stack.enter_context(ForkServer(fork=True))
        look_at(config.env, continuous=config.continuous)
        resume = claim(
            config.output_path,
            checkpoint=config.checkpoint_path,
            replay=config.replay_path,
            job_id=world.job_id,
            restart_count=world.restart_count,
            resume=options.resume,
            held=stack,
        )
        stack.push(
            lambda _, error, __: _say_kept(config, launched) if _interrupt_behind(error) else None
        )
        if resume:
            saved = config_to_resume(recipe.config, config.checkpoint_path, given)
            config = dataclasses.replace(saved, output_dir=here.output_dir)
            if launched is not None:
                _check_shape(config, for_roles, launched)
            check_rows(config.output_path, config.replay_path)
        else:
            stack.callback(
                forget,
                config.output_path,
                checkpoint=config.checkpoint_path,
                replay=config.replay_path,
            )
            if unset and launched is None:
                server = server or stack.enter_context(ForkServer())
                chosen, reason = choose(config, server)
                _say(reason)
                config = dataclasses.replace(config, **chosen)
        if launched is None:
            for_roles = config
        roles = for_roles.roles(launched)
        if launched is not None or sum(roles.values()) == 1:
            if server is not None:
                server.close()
        elif server is None:
            server = stack.enter_context(ForkServer())
        with _unsearched_imports():
            run = recipe.load_run()
        groups = _process_groups(for_roles, roles)
        if launched is not None:
            opened = session(roles, timeout_s=config.timeout_s, process_group=groups)
        else:
            opened = local_cluster(
                roles, timeout_s=config.timeout_s, process_group=groups, fork_server=server
            )
        job = stack.enter_context(opened)
        result = run(config, job, resume=resume)
    # srun --unbuffered gives each task a terminal although the task's output goes to a file
    at_terminal = sys.stdout.isatty() and "SLURM_STEP_ID" not in os.environ
    if options.json or not at_terminal:
        if result["stopped_by"] is not None:
            _say_kept(config, launched)
        return _print_result(result)
    print(own_files.printable(_summary(result, config, launched), lines=True), flush=True)
    return _exit_code(result)


def _train_seeds(options: argparse.Namespace, config: Any, given: dict[str, Any]) -> int:
    from .recipes.training.seeds import train_seeds

    if launcher := {"RANK", "SLURM_PROCID"} & os.environ.keys():
        raise ConfigurationError(
            f"got --seeds in a job that a launcher started ({min(launcher)} is set); expected "
            "no launcher, because each seed is a separate job. Run this command without the "
            "launcher; for Slurm, run torchrl-dist slurm --seeds 0-4 -- train ..."
        )
    result, code = train_seeds(config, given, options.seeds, resume=options.resume, say=_say)
    if options.json or not sys.stdout.isatty():
        _print_result(result)
        return code
    mean, deviation = result["mean_return"], result["deviation"]
    of_all = "no evaluation yet" if mean is None else f"mean return {mean:.1f}"
    of_all += "" if deviation is None else f", standard deviation {deviation:.1f}"
    lines = [
        f"{config.recipe} on {config.env}, {len(result['seeds'])} seeds: {of_all}",
        *(
            f"seed {each['seed']}: {_figure(each['mean_return'])}, {each['frames']:,} frames, "
            f"{each['seconds']:,.0f} s"
            for each in result["results"]
        ),
        f"look:   {result['learning_curve']}",
        f"resume: {result['resume']}",
    ]
    print(own_files.printable("\n".join(lines), lines=True), flush=True)
    return code


def _figure(mean: float | None) -> str:
    return "no evaluation" if mean is None else f"{mean:.1f}"


def _check_shape(saved: Any, here: Any, launched: int) -> None:
    """Refuse to resume if the roles on the command line differ from those in the saved
    configuration."""
    if saved.roles(launched) == here.roles(launched):
        return
    names = [name for name in ("learners", "collectors") if hasattr(saved, name)]
    differ = [name for name in names if getattr(saved, name) != getattr(here, name)]
    options = " ".join(f"--{name} {getattr(saved, name)}" for name in differ)
    raise ConfigurationError(
        f"the run in {here.output_path} was started with {options}, but this rank's command line "
        "has other values. Only the first rank reads the checkpoint, so pass these options to "
        "every rank, with either the run's values or new values"
    )


@contextlib.contextmanager
def _unsearched_imports() -> Iterator[None]:
    """Turn off garbage collection during imports, because collections would take a quarter of the
    time although imports leave no garbage."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def _process_groups(config: Any, roles: dict[str, int]) -> dict[str, str] | None:
    """Return the backend of the learners' torch.distributed group, or None for a single learner."""
    if roles["learner"] == 1:
        return None
    import torch

    gpu = config.device != "cpu" and torch.cuda.is_available()
    return {"learner": "cpu:gloo,cuda:nccl" if gpu else "gloo"}


def _serve_rank_zero(config: Any, launched: int | None) -> int:
    with _unsearched_imports():
        import torch

        from .runtime import session

    torch.set_num_threads(1)
    roles = config.roles(launched)
    groups = _process_groups(config, roles)
    with session(roles, timeout_s=config.timeout_s, process_group=groups) as job:
        job.serve()
    return 0


def _print_result(result: dict[str, Any]) -> int:
    # print null instead of NaN, because JSON has no NaN
    finite = json.loads(json.dumps(result), parse_constant=lambda _: None)
    print(json.dumps(finite), flush=True)
    return _exit_code(result)


def _exit_code(result: dict[str, Any]) -> int:
    return _STOPPED.get(result.get("stopped_by") or "", 0)


def _summary(result: dict[str, Any], config: Any, launched: int | None) -> str:
    """Return five lines for a user at a terminal: the result, and what to do next."""
    mean, stopped = result["mean_return"], result["stopped_by"]
    folder = shlex.quote(_short(config.output_path))
    again = _resumption(config, launched)
    if stopped is None:  # the run is complete
        again += f" --total-frames {2 * result['frames']}"
    end = "" if stopped is None else f", stopped by {stopped}"
    learned = "no evaluation yet"
    if mean is not None:
        learned = f"mean return {mean:.1f}: {result['mean_return_is_of']}"
    return "\n".join(
        (
            f"{config.recipe} on {config.env}, seed {config.seed}: {result['frames']:,} frames, "
            f"{result['updates']:,} updates, {result['seconds']:,.0f} s{end}",
            learned,
            f"play:   {_command()} play {folder}",
            f"resume: {again}",
            f"look:   tensorboard --logdir {folder}, or learning_curve.png in it",
        )
    )


def _resumption(config: Any, launched: int | None) -> str:
    """Return how to resume a run."""
    start = f"{_command()} train {config.recipe}"
    if launched is not None:
        start = "start the ranks again, with"
    return f"{start} --resume --output-dir {shlex.quote(_short(config.output_path))}"


def _say_kept(config: Any, launched: int | None) -> None:
    """If a run that was stopped has a checkpoint, say where it is and how to resume the run."""
    if config.checkpoint_path.is_file():
        _say(f"kept {_short(config.output_path)}; resume: {_resumption(config, launched)}")


def _command() -> str:
    """Return what starts this program in the user's shell: its name, or its path."""
    program = Path(sys.argv[0])
    if program.name != "torchrl-dist" or shutil.which(program.name):
        return "torchrl-dist"
    return shlex.quote(_short(program.absolute()))


def _short(path: Path) -> str:
    """Return ``path``, relative to the working directory if it is inside that directory."""
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


# ---- play


def _add_play(commands: argparse._SubParsersAction) -> None:
    play = commands.add_parser(
        "play",
        help="run a trained policy",
        description="Run episodes with a checkpoint's policy, greedily, in this process only.",
    )
    play.add_argument("checkpoint", metavar="CHECKPOINT", help="a checkpoint.pt, or its folder")
    text = "number of episodes (default: 20)"
    play.add_argument("--episodes", type=at_least(1), default=20, metavar="N", help=text)
    play.add_argument("--seed", type=int, default=0, help="seed of the environment (default: 0)")
    play.add_argument("--render", action="store_true", help="show the episodes in a window")
    play.add_argument(
        "--video", metavar="FILE.mp4", help="write the episodes to a video, one after the other"
    )
    play.set_defaults(command=_play)


def _play(options: argparse.Namespace) -> int:
    if not 0 <= options.seed < 2**31:
        raise ConfigurationError(f"--seed: got {options.seed}, expected 0 to 2147483647")
    from .recipes.parts.play import play

    names = ("episodes", "seed", "render", "video")
    return _print_result(
        play(options.checkpoint, **{name: getattr(options, name) for name in names})
    )


# ---- export


def _add_export(commands: argparse._SubParsersAction) -> None:
    export = commands.add_parser(
        "export",
        help="write a trained policy as a file for torch.export or ONNX",
        description="Write a checkpoint's greedy policy as one file, which maps a batch of "
        "observations to actions without this package. The file is written only if it returns the "
        "same actions as the policy for 100 random observations.",
    )
    export.add_argument("checkpoint", metavar="CHECKPOINT", help="a checkpoint.pt, or its folder")
    export.add_argument(
        "output",
        metavar="OUT.pt2|OUT.onnx",
        help="file for torch.export.load, or an ONNX file (pip install 'torchrl-dist[onnx]')",
    )
    export.set_defaults(command=_export)


def _export(options: argparse.Namespace) -> int:
    from .recipes.parts.export import export

    return _print_result(export(options.checkpoint, options.output))


# ---- inspect


def _add_inspect(commands: argparse._SubParsersAction) -> None:
    inspect = commands.add_parser(
        "inspect",
        help="show the contents of a replay buffer or a buffer's checkpoint",
        description=(
            "Show rows, priorities, processes and counters of a replay directory or a checkpoint. "
            "This command only reads and takes no locks, so a job may use the directory meanwhile."
        ),
    )
    inspect.add_argument(
        "directory", metavar="DIR", help="a buffer's scratch_dir, or a checkpoint's folder"
    )
    inspect.add_argument(
        "--json", action="store_true", help="print one JSON object instead of text"
    )
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
        help="list replay buffers that jobs left behind, or remove those of dead jobs",
        description=(
            "List replay directories, and say whether each is in use, kept, or left behind by a "
            "job. --remove removes the directories whose job cannot be started again. --remove "
            "also removes a replay directory that you name, even if it was kept or its job might "
            "be started again. --remove never removes files of other users, or files that a "
            "process uses."
        ),
    )
    clean.add_argument(
        "directories",
        metavar="DIR",
        nargs="*",
        help="folders to search, or replay directories (default: /dev/shm, the folder for "
        "temporary files, and this user's folder in each)",
    )
    clean.add_argument("--remove", action="store_true", help="remove directories of dead jobs")
    clean.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    clean.set_defaults(command=_clean)


def _clean(options: argparse.Namespace) -> int:
    import tempfile

    from .replay.node import leftovers

    for each in options.directories:
        if not os.path.isdir(each):
            raise ConfigurationError(
                f"{each} is not a folder; pass a replay directory, or a folder to search"
            )
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
        told = (
            f"{each['path']}: {'removed' if each['removed'] else each['state'] + users}, "
            f"{each['bytes'] / 2**20:.1f} MiB{job}"
        )
        print(own_files.printable(told))
    left = sum(each["bytes"] for each in listed if each["state"] in removable)
    if not options.remove and left:
        print(f"--remove frees {left / 2**20:.1f} MiB")
    return 0


# ---- bench


def _add_bench(bench: argparse.ArgumentParser) -> None:
    from .bench import (
        checkpoint,
        collect,
        ddp,
        law,
        learner,
        limiter,
        plan,
        published,
        remote,
        replay,
        train,
    )

    questions = bench.add_subparsers(title="benchmarks", metavar="BENCHMARK", required=True)
    for module, summary in (
        (replay, "the shared replay buffer compared with other buffers"),
        (collect, "how busy collectors keep the cores, compared with other collectors"),
        (remote, "a replay buffer in other processes, with every row sent by RPC"),
        (
            law,
            "how often a buffer spread over workers draws each row, compared with a single buffer",
        ),
        (ddp, "for which batch sizes and network sizes several learner ranks pay off"),
        (learner, "how fast the recipes' gradient steps are, compared with plain PyTorch"),
        (checkpoint, "how long a checkpoint of a replay buffer takes, compared with a plain copy"),
        (plan, "the planner's predictions compared with measurements"),
        (limiter, "how soon a sample that waits for the rate limiter returns"),
        (train, "how soon recipes reach a good policy, compared with other libraries"),
        (published, "whether recipes reach the returns that others published"),
    ):
        name = module.__name__.rpartition(".")[2]
        module.add_options(questions.add_parser(name, help=summary))


# ---- before, during and after a job


def _add_ops(commands: argparse._SubParsersAction) -> None:
    from .ops import doctor, slurm, top

    doctor.add_options(
        commands.add_parser("doctor", help="check whether this machine is fit for a job")
    )
    slurm.add_options(commands.add_parser("slurm", help="print a batch script that starts a job"))
    top.add_options(commands.add_parser("top", help="show which processes of a job work or wait"))


def _add_plan(plan: argparse.ArgumentParser) -> None:
    from .plan import command

    command.add_options(plan)
