"""The state of a job at one instant, for ``torchrl-dist top``, and the rates between two states.

This module reads only files of this user: the job's pulse (counts that its learner writes, see
``runtime.pulse``), /proc, tables of replay directories, and the run's CSV files. The module does
not attach to buffers, take locks, call processes or write.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from .. import own_files
from ..errors import ConfigurationError, DirectoryError
from ..recipes.training.run_directory import job_of, resumed_at
from ..replay.inspection import limiter_in
from ..replay.law.limiter import Counts, RateLimiter
from ..replay.node import files, leftovers
from ..replay.node.tables import Word, counters_in
from ..runtime import proc, pulse
from ..runtime.world import has_ended

DEAD, ELSEWHERE = "dead", "elsewhere"
_STATES = {
    "R": "running", "S": "waiting", "D": "disk wait", "T": "stopped", "t": "traced", "Z": DEAD,
}  # fmt: skip
_TAIL_BYTES = 4096
# the collectors limit the job's speed if the learner waits for more than this fraction of the time
_WAITS = 0.5
_IDLE = 0.7
_FULL = 0.95


@dataclass(frozen=True)
class Process:
    """A process of the job. ``cpu_s`` is its CPU time so far, or None if the process is on another
    node."""

    name: str
    role: str
    host: str
    pid: int
    state: str
    cpu_s: float | None = None


@dataclass(frozen=True)
class Buffer:
    """A replay directory. ``written`` and ``sampled`` count rows.

    With a rate limiter, ``sampled`` is exact. Without a limiter, ``sampled`` may miss a few rows if
    processes count at the same instant. Rows that are drawn for another node are counted on the
    node that stores them.
    """

    path: str
    rows: int
    capacity: int
    written: int
    processes: int
    counters: Mapping[str, int]
    drawn: int = 0
    limiter: Mapping[str, float | None] | None = None

    @property
    def sampled(self) -> int:
        return self.drawn if self.limiter is None else int(self.limiter["samples"] or 0)


@dataclass(frozen=True)
class Snapshot:
    """A job at ``unix_time_s``.

    Attributes:
        job_id: the launcher's id of the job.
        host: the learner's node.
        figures: the contents of the job's pulse file; empty if there is none.
        scalars: the last values in the run's CSV files, by tag.
        run_frames: frames of the whole run at the last point in these files, including frames
            before a restart.
        resumed_at: frames of the run when this job resumed it; None if the job began the run.
        slurm: Slurm's state of the job, such as "PENDING (Resources)", if the job's learner is
            not on this machine.
    """

    unix_time_s: float
    job_id: str
    host: str
    figures: Mapping[str, Any]
    processes: Sequence[Process] = ()
    buffers: Sequence[Buffer] = ()
    scalars: Mapping[str, float] | None = None
    cores: int = 1
    run_frames: int | None = None
    resumed_at: int | None = None
    slurm: str | None = None

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Rates:
    """Rates per second between two snapshots. Shares are fractions of the time.

    Attributes:
        by_worker: frames per second, by worker name.
        learner_waits: share of the time that the learner waited for rollouts. None if a background
            thread takes the rollouts, because the learner's own waits are then not visible.
        workers_busy: mean share of the time that workers stepped environments or wrote rows.
        cpu: cores used, by process name.
        written, sampled: rows per second, by path of the buffer.
    """

    seconds: float
    frames: float
    by_worker: Mapping[str, float]
    learner_waits: float | None
    workers_busy: float | None
    messages: float
    data_bytes: float
    cpu: Mapping[str, float]
    written: Mapping[str, float]
    sampled: Mapping[str, float]


# ---- finding jobs


@dataclass(frozen=True)
class Target:
    """The files with a job's state: its pulse (if any), its run's folder and its buffers."""

    job_id: str | None
    pulse: Path | None
    run: Path | None = None
    buffers: tuple[Path, ...] = ()


def pulses() -> dict[Path, dict[str, Any]]:
    """Return the pulses of this user's jobs whose learner is on this node, oldest first."""
    found = {}
    for folder in own_files.user_folders():
        for path in folder.glob(f"{pulse.PREFIX}*.json"):
            stamp = pulse.stamp_of(path)
            content = _read_pulse(path)
            if stamp and content and not has_ended(stamp):
                found[path] = content
    return dict(sorted(found.items(), key=lambda e: (e[1]["started_unix_s"], e[1]["job_id"])))


def _read_pulse(path: Path) -> dict[str, Any] | None:
    with contextlib.suppress(OSError, ValueError):
        content = json.loads(own_files.read_ours(path))
        if isinstance(content, dict) and content.get("format") == pulse.FORMAT:
            return content
    return None


def find(name: str | None) -> Target:
    """Find a job by a run's folder, a replay directory or a job's id. With None, find the only job.

    Raises:
        ConfigurationError: no job matches ``name``, or ``name`` is None and several jobs run. The
            error names the jobs.
    """
    jobs = pulses()
    if name is None:
        if len(jobs) == 1:
            path, content = next(iter(jobs.items()))
            return _target(content["job_id"], path, content)
        listed = "; ".join(f"{c['job_id']} ({c['directory']})" for c in jobs.values())
        raise ConfigurationError(
            f"several jobs run on this machine; name one of them: {listed}"
            if jobs
            else "no job of yours collects on this machine; name a run's folder, a replay "
            "directory or a job, or run this command on the machine of the job's learner"
        )
    place = Path(name)
    job_id = _job_of(place) if place.is_dir() else None
    for path, content in jobs.items():
        own = content["job_id"]
        if own == (job_id or name) or (job_id is None and own.startswith(f"{name}.")):
            return _target(own, path, content, place if place.is_dir() else None)
    if job_id is not None:
        return _target(job_id, None, {}, place)
    raise ConfigurationError(
        f"{name} is neither the folder of a run or a buffer, nor a job that collects on this "
        "machine"
        + (f"; jobs that do: {', '.join(c['job_id'] for c in jobs.values())}" if jobs else "")
    )


def _job_of(place: Path) -> str | None:
    with contextlib.suppress(OSError, DirectoryError):
        if (place / files.HEADER).exists():
            return files.read_header(place).job_id
        return job_of(place)
    return None


def _target(
    job_id: str, path: Path | None, content: Mapping[str, Any], place: Path | None = None
) -> Target:
    run = place if place is not None and (place / "run.json").exists() else None
    if run is None and content:  # The job's runs are in the folder in which the job was started.
        for note in sorted(Path(content["directory"]).glob("runs/*/run.json")):
            run = note.parent if _job_of(note.parent) == job_id else run
    places = {Path("/dev/shm")} | set(own_files.user_folders())
    places |= ({place} if place is not None else set()) | ({run} if run else set())
    if content.get("replay_dir"):
        places.add(Path(content["directory"]) / content["replay_dir"])
    found = [each.path for each in leftovers.find(sorted(places)) if each.job_id == job_id]
    return Target(job_id, path, run, tuple(sorted(set(found))))


# ---- one snapshot


def look(target: Target) -> Snapshot | None:
    """Return the job's current state, or None if its learner is gone."""
    figures: dict[str, Any] = {}
    if target.pulse is not None:
        read = _read_pulse(target.pulse)
        if read is None:
            return None
        figures = read
    host = socket.gethostname()
    points = read_points(target.run) if target.run else {}
    return Snapshot(
        time.time(),
        target.job_id or "",
        figures.get("host", host),
        figures,
        tuple(_process(each, host) for each in figures.get("processes", ())),
        tuple(buffer for path in target.buffers if (buffer := read_buffer(path))),
        {tag: value for tag, (_, value) in points.items()} if target.run else None,
        len(os.sched_getaffinity(0)),
        max((frames for frames, _ in points.values()), default=None),
        resumed_at(target.run) if target.run else None,
    )


def _process(told: Mapping[str, Any], here: str) -> Process:
    state, cpu_s = ELSEWHERE, None
    if told["lost"] is not None:
        state = DEAD
    elif told["host"] == here:
        state, cpu_s = _stat(told["pid"])
    return Process(told["name"], told["role"], told["host"], told["pid"], state, cpu_s)


def _stat(pid: int) -> tuple[str, float | None]:
    words = proc.stat(pid)
    if words is None:
        return DEAD, None
    ticks = int(words[proc.USER]) + int(words[proc.SYSTEM])
    letter = words[proc.STATE]
    return _STATES.get(letter, letter), ticks / os.sysconf("SC_CLK_TCK")


def read_buffer(folder: Path) -> Buffer | None:
    """Read a buffer's counters from its first table only. Touches no row, priority or lock."""
    try:
        header = files.read_header(folder)
        words, _, members = files.read_control(folder)
    except (OSError, DirectoryError):
        return None  # the buffer is being made or removed
    return Buffer(
        str(folder),
        int(words[Word.LENGTH]),
        header.capacity,
        int(words[Word.WRITE_COUNT]),
        int(np.count_nonzero(members[:, 0])),
        counters_in(words),
        int(words[Word.DRAWN]),
        limiter_in(words, words.view(np.float64)),
    )


def read_points(run: Path) -> dict[str, tuple[int, float]]:
    """Return the last point of each tag in a run's CSV files, as (frames of the run, value)."""
    found = {}
    for path in sorted(run.glob("csv/scalars/**/*.csv")):
        with contextlib.suppress(OSError, ValueError, IndexError):
            with open(own_files.open_ours(path), "rb") as file:
                file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
                last = file.read().decode().split("\n")[-2]  # the last complete line
            tag = str(path.relative_to(run / "csv" / "scalars").with_suffix(""))
            found[tag] = (int(float(last.split(",")[0])), float(last.split(",")[1]))
    return found


# ---- comparing two snapshots (pure)


def rates(before: Snapshot, now: Snapshot) -> Rates:
    """Return the rates between two snapshots of a job. If a count has decreased, its rate is 0."""
    a, b = before.figures, now.figures
    told_at = [each.get("unix_time_s", each_at.unix_time_s) for each, each_at in
               ((a, before), (b, now))]  # fmt: skip
    figures_s = told_at[1] - told_at[0]
    seconds = now.unix_time_s - before.unix_time_s

    def per_second(name: str) -> float:
        return _over(b.get(name, 0.0) - a.get(name, 0.0), figures_s)

    names = dict(enumerate(b.get("workers", ())))

    def by_worker(name: str) -> dict[str, float]:
        old, new = a.get(name, {}), b.get(name, {})
        return {
            names.get(int(k), f"worker {k}"): _over(new[k] - old.get(k, 0), figures_s) for k in new
        }

    waits = per_second("wait_s")
    if b.get("waiting_since") is not None and b.get("batches") == a.get("batches"):
        waits = 1.0 if b.get("waiting_since") == a.get("waiting_since") else waits
    busy = by_worker("busy_s_by_worker").values()
    old_cpu = {each.pid: each.cpu_s for each in before.processes}
    old_buffers = {each.path: each for each in before.buffers}
    cpu = {
        each.name: _over(each.cpu_s - old, seconds)
        for each in now.processes
        if each.cpu_s is not None and (old := old_cpu.get(each.pid)) is not None
    }
    written, sampled = {}, {}
    for each in now.buffers:
        if (other := old_buffers.get(each.path)) is not None:
            written[each.path] = _over(each.written - other.written, seconds)
            sampled[each.path] = _over(each.sampled - other.sampled, seconds)
    return Rates(
        seconds,
        per_second("frames"),
        by_worker("frames_by_worker"),
        None if b.get("in_background") else min(1.0, waits),
        min(1.0, fmean(busy)) if busy else None,
        per_second("messages"),
        per_second("data_bytes"),
        cpu,
        written,
        sampled,
    )


def _over(difference: float, seconds: float) -> float:
    return max(0.0, difference) / seconds if seconds > 0 else 0.0


def who_waits(buffer: Buffer, batch_size: int = 1) -> str | None:
    """Return which side (sampling or writing) the buffer's rate limiter holds back now. The result
    is None if the limiter holds back neither side, or if there is no limiter."""
    told = buffer.limiter
    if told is None:
        return None
    limiter = RateLimiter(
        int(told["min_size_to_sample"] or 1),
        told["samples_per_insert"],
        told["error_buffer"],
        None if told["max_times_sampled"] is None else int(told["max_times_sampled"]),
    )
    counts = Counts(int(told["inserts"] or 0), int(told["samples"] or 0), buffer.rows)
    rows = limiter.missing_inserts(counts, batch_size)
    if rows:
        return f"sampling waits for {rows:,} rows to be written"
    rows = limiter.missing_samples(counts)
    return f"writing waits for {rows:,} rows to be sampled" if rows else None


def bound_by(now: Snapshot, per: Rates) -> str:
    """Return what limits the job's speed, and the evidence."""
    for process in now.processes:
        if process.state == "stopped":
            return f"{process.name}: it is stopped (kill -CONT {process.pid})"
    if not now.figures.get("frames"):
        return "nothing yet: no batch has arrived"
    for buffer in now.buffers:
        waits = who_waits(buffer)
        if waits is not None:
            return f"the limiter: {waits}"
    busy = per.workers_busy
    full = sum(per.cpu.values()) >= _FULL * now.cores
    cores = f"; all {now.cores} cores are busy" if full else ""
    if per.learner_waits is None:
        own = per.cpu.get(now.figures.get("learner", ""))
        if full:
            return f"the {now.cores} cores: all are busy"
        return (
            "neither side: rollouts are collected in the background"
            + ("" if busy is None else f", collectors work {busy:.0%} of the time")
            + ("" if own is None else f", the learner's process runs {own:.0%}")
        )
    if per.learner_waits > _WAITS:
        return f"collectors: the learner waits for them {per.learner_waits:.0%} of the time{cores}"
    if busy is not None and busy < _IDLE:
        own = per.cpu.get(now.figures.get("learner", ""))
        runs = "" if own is None or own >= _IDLE else f", and it runs {own:.0%} of the time"
        return f"the learner: collectors work {busy:.0%} of the time{runs}{cores}"
    if full:
        return f"the {now.cores} cores: all are busy"
    return f"both: the learner waits {per.learner_waits:.0%}" + (
        f", collectors work {busy:.0%} of the time" if busy is not None else " of the time"
    )
