"""``torchrl-dist top``: show live which processes of a running job work and which wait."""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Any

from .. import own_files
from ..errors import ConfigurationError
from ..ui import table

if TYPE_CHECKING:
    from rich.console import RenderableType

    from .snapshot import Rates, Snapshot, Target

_ASK_S = 10.0
_SLURM_EVERY_S = 30.0
_STYLES = {"running": "green", "waiting": "", "stopped": "bold red", "dead": "bold red"}
_HELP = "q: quit, 0-9: show the stack of that process (py-spy)"


# ---- rendering (pure)


def render(
    now: Snapshot, per: Rates | None, note: str = "", *, keys: bool = False
) -> RenderableType:
    """Return the whole screen, with ``note`` (such as a stack) below. With ``keys``, also show help
    about keys."""
    from rich.console import Group
    from rich.text import Text

    def text(words: str, style: str = "") -> Text:
        return Text(own_files.printable(words, lines=True), style)

    parts: list[RenderableType] = [text(_headline(now, per), "bold"), text(_learning(now))]
    if now.processes:
        parts += [_processes(now, per)]
        parts += [text(_traffic(per))] if per is not None else []
    if now.buffers:
        parts += [Text(""), _buffers(now, per)]
    if per is not None and now.figures:
        from .snapshot import bound_by

        parts += [Text(""), text(f"bound by {bound_by(now, per)}", "bold")]
    if note:
        parts += [Text(""), text(note)]
    if keys:
        parts += [Text(_HELP, style="dim")]
    return Group(*parts)


def line(now: Snapshot, per: Rates) -> str:
    """Return the contents of :func:`render` as one line for logs."""
    from .snapshot import bound_by

    words = [time.strftime("%H:%M:%S", time.localtime(now.unix_time_s)), _headline(now, per)]
    words += [f"lag {now.figures['policy_lag']}"] if "policy_lag" in now.figures else []
    words += [
        f"buffer {each.rows:,}/{each.capacity:,} (+{per.written.get(each.path, 0.0):,.0f}/s)"
        for each in now.buffers
    ]
    words += [f"bound by {bound_by(now, per)}"] if now.figures else []
    return own_files.printable(", ".join(words))


def _headline(now: Snapshot, per: Rates | None) -> str:
    figures = now.figures
    text = f"job {now.job_id}"
    if not figures:
        slurm = "" if now.slurm is None else f"; Slurm says {now.slurm}"
        return f"{text}: this job has no learner on this machine{slurm}"
    text += f" on {now.host}, {_duration(now.unix_time_s - figures['started_unix_s'])}"
    frames, of_run = figures["frames"], now.run_frames or 0
    # The run's files may be newer than the pulse, and may count the frames of other learners, too.
    if now.resumed_at is None:
        frames = max(frames, of_run)
    text += f": {frames:,} frames"
    share = frames / figures["total_frames"] if figures["total_frames"] > 0 else None
    if now.resumed_at is not None:
        text += " since it was resumed"
        text += "" if share is None else f" ({share:.0%} of the frames left)"
        text += f", {max(of_run, now.resumed_at + frames):,} of the run"
    elif share is not None:
        text += f" ({share:.0%})"
    if per is not None:
        text += f", {per.frames:,.0f}/s"
    silent = now.unix_time_s - figures["unix_time_s"]
    return text + (f", silent for {silent:.0f} s" if silent > 5 else "")


def _learning(now: Snapshot) -> str:
    scalars = now.scalars or {}
    figures = now.figures
    words = []
    if "policy_lag" in figures:
        words += [f"policy {figures['policy_version']:,}, lag {figures['policy_lag']}"]
    for tag, name in (
        ("train/updates_per_second", "updates/s"), ("train/loss", "loss"),
        ("train/return", "return"), ("eval/return", "greedy"),
    ):  # fmt: skip
        words += [f"{name} {scalars[tag]:.4g}"] if tag in scalars else []
    return ", ".join(words)


def _processes(now: Snapshot, per: Rates | None) -> Any:
    from rich.text import Text

    frames = dict(per.by_worker) if per else {}
    totals = {
        now.figures["workers"][int(k)]: count
        for k, count in now.figures.get("frames_by_worker", {}).items()
        if int(k) < len(now.figures["workers"])
    }
    everything = max(1, sum(totals.values()))
    rows = []
    for number, each in enumerate(now.processes):
        cpu = per.cpu.get(each.name) if per else None
        row = (
            str(number) if number < 10 else "",
            Text(own_files.printable(each.name)),
            Text(own_files.printable(each.host)),
            str(each.pid),
            Text(each.state, style=_STYLES.get(each.state, "")),
            "" if cpu is None else f"{cpu:.0%}",
            f"{frames[each.name]:,.0f}" if each.name in frames else "",
            f"{totals[each.name] / everything:.0%}" if each.name in totals else "",
        )
        rows.append(row)
    names = ("", "process", "host", "pid", "state", "CPU", "frames/s", "share")
    return table(None, names, rows, left=("process", "host", "state"))


def _traffic(per: Rates) -> str:
    busy = "" if per.workers_busy is None else f"; collectors work {per.workers_busy:.0%}"
    waits = "rollouts are collected in the background"
    if per.learner_waits is not None:
        waits = f"the learner waits for rollouts {per.learner_waits:.0%} of the time"
    return f"{waits}{busy}; {per.messages:.1f} messages/s, {_bytes(per.data_bytes)}/s"


def _buffers(now: Snapshot, per: Rates | None) -> Any:
    from rich.text import Text

    from .snapshot import who_waits

    rows = []
    for each in now.buffers:
        limiter: Mapping[str, Any] = each.limiter or {}
        ratio = ""
        if inserts := limiter.get("inserts") or each.written:
            ratio = f"{each.sampled / inserts:.2f}"
            target = limiter.get("samples_per_insert")
            ratio += f" of {target:g}" if target else ""
        inflow = None if per is None else per.written.get(each.path)
        outflow = None if per is None else per.sampled.get(each.path)
        row = (
            Text(own_files.printable(each.path)),
            f"{each.rows:,}/{each.capacity:,}",
            "" if inflow is None else f"{inflow:,.0f}",
            "" if outflow is None else f"{outflow:,.0f}",
            ratio,
            f"{each.counters['stale_updates']:,}",
            f"{each.counters['reread_rows']:,}",
            who_waits(each) or "",
        )
        rows.append(row)
    names = ("buffer", "rows", "in/s", "out/s", "per insert", "stale", "reread", "waits")
    return table(None, names, rows, folded=("buffer", "waits"))


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}"


def _bytes(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"


# ---- the stack of a process


def stack_of(pid: int) -> str:
    """Return what py-spy prints about a process on this machine, or why py-spy failed."""
    if shutil.which("py-spy") is None:
        return "py-spy is not installed: pip install py-spy"
    try:
        done = subprocess.run(
            ["py-spy", "dump", "--pid", str(pid)], capture_output=True, text=True, timeout=_ASK_S
        )
    except subprocess.TimeoutExpired:
        return f"py-spy did not answer within {_ASK_S:g} s"
    return (done.stdout if done.returncode == 0 else done.stderr).strip()


# ---- the command


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Show which processes of a running job work and which wait, and the job's frames, buffers "
        "and rate limiters. This command only reads, and does not affect the job. Without a "
        "terminal, it prints one line per interval."
    )
    parser.add_argument(
        "job", metavar="DIR|RUN|JOB", nargs="?",
        help="a replay directory, a run's folder, or a job's id, such as Slurm's (default: the job "
        "that runs on this machine)",
    )  # fmt: skip
    parser.add_argument(
        "--interval", type=float, default=2.0, metavar="S", help="seconds per interval (default: 2)"
    )
    parser.add_argument("--once", action="store_true", help="show one interval and exit")
    parser.add_argument("--json", action="store_true", help="print one JSON object per interval")
    parser.set_defaults(command=run)


def run(options: argparse.Namespace) -> int:
    if not 0.1 <= options.interval <= 3600:
        raise ConfigurationError(f"--interval: got {options.interval:g}, expected 0.1 to 3600 s")
    from .snapshot import find

    try:
        target = find(options.job)
    except ConfigurationError as error:
        _go_to_its_node(options.job)
        if (state := slurm_state(options.job)) is not None:
            raise ConfigurationError(
                f"{error}; Slurm says {state} for job {options.job}"
            ) from error
        raise
    try:
        if sys.stdout.isatty() and sys.stdin.isatty() and not (options.once or options.json):
            return _live(target, options.interval)
        before = _look(target)
        while before is not None:
            time.sleep(options.interval)
            now = _look(target)
            if now is None:
                break
            _print(before, now, options)
            if options.once:
                return 0
            before = now
    except KeyboardInterrupt:
        return 0
    print("torchrl-dist: the job has ended", file=sys.stderr)
    return 0


def _look(target: Target) -> Snapshot | None:
    from .snapshot import look

    now = look(target)
    if now is None or now.figures:
        return now
    # The job waits, has failed, or is on another node. Ask Slurm, but not in every interval.
    return replace(now, slurm=_slurm_state(now.job_id, time.monotonic() // _SLURM_EVERY_S))


@functools.lru_cache(maxsize=1)
def _slurm_state(job: str, _: float) -> str | None:
    return slurm_state(job)


def _print(before: Snapshot, now: Snapshot, options: argparse.Namespace) -> None:
    from .snapshot import bound_by, rates

    per = rates(before, now)
    if options.json:
        found = now.as_json() | {"rates": vars(per), "bound_by": bound_by(now, per)}
        print(json.dumps(found), flush=True)
    elif options.once:
        from rich.console import Console

        Console().print(render(now, per))
    else:
        print(line(now, per), flush=True)


def _live(target: Target, interval_s: float) -> int:
    from rich.console import Console
    from rich.live import Live

    from .snapshot import rates

    console = Console()
    first = now = _look(target)
    if first is None or now is None:
        return 0
    per, note = None, ""
    with (
        _keys() as pressed,
        Live(
            render(now, None, keys=True), console=console, screen=True, auto_refresh=False
        ) as live,
    ):
        while True:
            live.update(render(now, per, note, keys=True), refresh=True)
            key = pressed(interval_s)
            if key == "q":
                break
            if key.isdigit() and int(key) < len(now.processes):
                chosen = now.processes[int(key)]
                note = f"{chosen.name}, pid {chosen.pid}\n"
                note += (
                    "it runs on another machine" if chosen.cpu_s is None else stack_of(chosen.pid)
                )
                continue
            if key:
                continue
            later = _look(target)
            if later is None:
                break
            per, now = rates(now, later), later
    if key != "q":
        print("torchrl-dist: the job has ended", file=sys.stderr)
    return 0


@contextlib.contextmanager
def _keys() -> Iterator[Any]:
    """Yield a function that returns the next key, or "" if no key is pressed within
    ``timeout_s``."""
    import termios
    import tty

    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)

    def pressed(timeout_s: float) -> str:
        if not wait([fd], timeout_s):
            return ""
        return os.read(fd, 1).decode(errors="replace") or "q"

    try:
        tty.setcbreak(fd)
        yield pressed
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)


def slurm_state(job: str | None) -> str | None:
    """Return Slurm's state of a job, such as ``PENDING (Resources)``.

    Return None if Slurm does not know the job, or there is no Slurm.
    """
    number = re.fullmatch(r"(\d+)(\.\d+)?", job or "")
    if number is None:
        return None
    for asked in (
        ["squeue", "-h", "-j", number[1], "-t", "all", "-o", "%T (%r)"],
        ["sacct", "-n", "-X", "-P", "-j", number[1], "-o", "State,ExitCode"],
    ):
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            done = subprocess.run(asked, capture_output=True, text=True, timeout=_ASK_S)
            state = done.stdout.split("\n")[0].strip()
            if done.returncode == 0 and state:
                return state.removesuffix(" (None)").replace("|", ", exit code ")
    return None


def _go_to_its_node(job: str | None) -> None:
    """If the learner of a Slurm job is on another node, replace this process by a process on that
    node."""
    if job is None or not job.isdigit() or shutil.which("squeue") is None:
        return
    if os.environ.get("SLURM_JOB_ID") == job:  # this process is already on the job's node
        return
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        asked = ["squeue", "-h", "-j", job, "-t", "R", "-o", "%B"]
        done = subprocess.run(asked, capture_output=True, text=True, timeout=_ASK_S)
        node = done.stdout.split("\n")[0].strip()
        if done.returncode == 0 and node:
            step = ["srun", f"--jobid={job}", "--overlap", "-N1", "-n1", f"--nodelist={node}"]
            step += ["--pty"] if sys.stdin.isatty() and sys.stdout.isatty() else []
            os.execvp("srun", [*step, sys.executable, "-m", "torchrl_dist", *sys.argv[1:]])
