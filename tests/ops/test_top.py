"""``torchrl-dist top``: snapshots, rates, pictures, and the command in a terminal."""

from __future__ import annotations

import argparse
import dataclasses
import io
import json
import os
import pty
import select
import signal
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from rich.console import Console
from tensordict import TensorDict

from tests import warm
from tests.spawn import wait_until
from torchrl_dist import (
    RateLimiter,
    RPCBatchedCollector,
    SharedCursorWriter,
    SharedMemmapStorage,
    SharedPrioritizedSampler,
    SharedRandomSampler,
    SharedReplayBuffer,
    SharedSamplerWithoutReplacement,
    SharedSliceSampler,
    own_files,
    replay_buffer,
    session,
)
from torchrl_dist.cli import main
from torchrl_dist.errors import ConfigurationError
from torchrl_dist.ops import snapshot, top
from torchrl_dist.ops.snapshot import Buffer, Process, Snapshot, bound_by, find, look, rates
from torchrl_dist.runtime import local_cluster, pulse
from torchrl_dist.runtime.world import process_stamp

COUNTERS = {"stale_updates": 7, "reread_rows": 3}


def at(seconds: float, **changes: object) -> Snapshot:
    """A job in which everything grows evenly."""
    figures = {
        "unix_time_s": 1e9 + seconds, "started_unix_s": 1e9 - 60, "host": "node1",
        "learner": "learner0", "workers": ["collector0", "collector1"], "waiting_since": None,
        "batches": int(seconds), "frames": int(1000 * seconds), "total_frames": 100_000,
        "frames_by_worker": {"0": int(600 * seconds), "1": int(400 * seconds)},
        "busy_s_by_worker": {"0": 0.9 * seconds, "1": 0.7 * seconds},
        "wait_s": 0.25 * seconds, "messages": 4 * seconds, "data_bytes": 2048 * seconds,
        "policy_version": int(seconds), "policy_lag": 1,
    } | changes  # fmt: skip
    processes = (
        Process("learner0", "learner", "node1", 10, "running", 0.5 * seconds),
        Process("collector0", "collector", "node1", 11, "waiting", 0.9 * seconds),
        Process("collector1", "collector", "node2", 12, "elsewhere"),
    )
    buffer = Buffer("/dev/shm/b", 900, 1000, int(500 * seconds), 3, COUNTERS, int(2000 * seconds))
    return Snapshot(
        1e9 + seconds, "77.0", "node1", figures, processes, (buffer,), {"train/return": 21.5}, 8
    )


def text_of(picture: object, width: int = 100) -> str:
    console = Console(file=io.StringIO(), width=width, force_terminal=False)
    console.print(picture)
    return console.file.getvalue()


@pytest.mark.parametrize(
    "sampler",
    [
        SharedRandomSampler,
        lambda: SharedPrioritizedSampler(64, alpha=0.6, beta=0.4),
        SharedSamplerWithoutReplacement,
        lambda: SharedSliceSampler(slice_len=2, traj_key="episode"),
    ],
    ids=["random", "prioritized", "without replacement", "slices"],
)
def test_draws_of_any_sampler_are_counted_without_a_limiter(sampler, tmp_path: Path) -> None:
    storage = SharedMemmapStorage(64, scratch_dir=tmp_path / "replay")
    buffer = SharedReplayBuffer(storage=storage, sampler=sampler(), batch_size=8)
    buffer.extend(TensorDict({"episode": torch.arange(32) // 4}, [32]))
    for _ in range(3):
        assert len(buffer.sample()) == 8
    (seen,) = look(find(str(tmp_path / "replay"))).buffers
    assert (seen.written, seen.sampled) == (32, 24)
    storage.close()


def test_draws_of_other_processes_are_counted_where_the_rows_are(tmp_path: Path) -> None:
    folder = tmp_path / "replay"
    with session() as me:
        buffer = replay_buffer(
            me, capacity=64, batch_size=8, prefetch=0, shortcut=False, scratch_dir=folder
        )
        buffer.extend(TensorDict({"number": torch.arange(32)}, [32]))
        for _ in range(3):
            buffer.sample()
        (shard,) = [path.parent for path in folder.rglob("control.bin")]
        (seen,) = look(find(str(shard))).buffers
        assert (seen.written, seen.sampled) == (32, 24)


def test_two_instants_give_rates() -> None:
    per = rates(at(10), at(20))
    assert (per.frames, per.messages, per.data_bytes) == (1000.0, 4.0, 2048.0)
    assert per.by_worker == {"collector0": 600.0, "collector1": 400.0}
    assert per.learner_waits == pytest.approx(0.25)
    assert per.workers_busy == pytest.approx(0.8)
    assert per.cpu == pytest.approx({"learner0": 0.5, "collector0": 0.9})
    assert per.written == {"/dev/shm/b": 500.0} and per.sampled == {"/dev/shm/b": 2000.0}
    # counts that begin anew, and no time between the instants
    per = rates(at(20), at(10))
    assert per.frames == 0.0 and per.written == {"/dev/shm/b": 0.0}
    per = rates(at(10), at(10))
    assert per.frames == 0.0 and per.learner_waits == 0.0


def limited(inserts: int, samples: int) -> Buffer:
    limiter = {
        "min_size_to_sample": 100, "samples_per_insert": 2.0, "error_buffer": 50.0,
        "max_times_sampled": None, "inserts": inserts, "samples": samples,
    }  # fmt: skip
    return Buffer("b", 900, 1000, inserts, 1, COUNTERS, 0, limiter)


def test_what_limits_the_job_is_said_with_the_reason() -> None:
    def verdict(before: Snapshot, now: Snapshot) -> str:
        return bound_by(now, rates(before, now))

    assert verdict(at(10), at(20)).startswith("both: the learner waits 25%")
    waiting = at(20, wait_s=11.0)
    assert verdict(at(10), waiting) == "collectors: the learner waits for them 85% of the time"
    idle = at(20, busy_s_by_worker={"0": 10.0, "1": 9.0})
    assert verdict(at(10), idle) == (
        "the learner: collectors work 15% of the time, and it runs 50% of the time"
    )
    two = dataclasses.replace(at(20), cores=1)
    assert verdict(at(10), two) == "the 1 cores: all are busy"
    hung = [at(t, waiting_since=5.0, batches=3, wait_s=1.0) for t in (10, 20)]
    assert verdict(*hung).startswith("collectors: the learner waits for them 100%")
    stopped = dataclasses.replace(at(20), processes=[Process("x0", "x", "n", 9, "stopped", 1.0)])
    assert verdict(at(10), stopped) == "x0: it is stopped (kill -CONT 9)"
    for inserts, samples, says in (
        (400, 600, None),
        (400, 560, None),
        (400, 900, "the limiter: sampling waits for 126 rows to be written"),
        (600, 500, "the limiter: writing waits for 450 rows to be sampled"),
    ):
        now = dataclasses.replace(at(20), buffers=[limited(inserts, samples)])
        assert says is None or verdict(at(10), now) == says, verdict(at(10), now)
        assert (says is None) == (snapshot.who_waits(now.buffers[0]) is None)
    assert verdict(at(0), at(0)) == "nothing yet: no batch has arrived"


def test_the_picture_has_every_figure() -> None:
    before, now = at(10), at(20)
    said = top.line(now, rates(before, now))
    assert "20,000 frames (20%), 1,000/s, lag 1, buffer 900/1,000 (+500/s), bound by both" in said
    shown = text_of(top.render(now, rates(before, now), keys=True))
    lines = [" ".join(line.split()) for line in shown.splitlines()]
    assert lines[0] == "job 77.0 on node1, 0:01:20: 20,000 frames (20%), 1,000/s"
    assert "policy 20, lag 1, return 21.5" in lines
    assert "0 learner0 node1 10 running 50%" in lines
    assert "1 collector0 node1 11 waiting 90% 600 60%" in lines
    assert "2 collector1 node2 12 elsewhere 400 40%" in lines
    assert "/dev/shm/b 900/1,000 500 2,000 4.00 7 3" in lines
    assert any("4.0 messages/s, 2 KiB/s" in line for line in lines)
    assert "bound by both" in shown
    limits = dataclasses.replace(now, buffers=[limited(400, 800)])
    assert "2.00 of 2" in text_of(top.render(limits, rates(before, limits)))
    assert "a stack" in text_of(top.render(now, None, "a stack"))
    assert "silent for 60 s" in text_of(
        top.render(dataclasses.replace(now, unix_time_s=1e9 + 80), None)
    )


def test_frames_since_a_restart_are_shown_next_to_those_of_the_run() -> None:
    resumed = dataclasses.replace(at(20), run_frames=150_000, resumed_at=129_000)
    assert "20,000 frames since it was resumed (20% of the frames left), 150,000 of the run" in (
        " ".join(text_of(top.render(resumed, None)).split())
    )
    for behind_or_before in (19_000, 20_500):  # the last point of a run that was not resumed
        first = dataclasses.replace(at(20), run_frames=behind_or_before)
        shown = max(20_000, behind_or_before)
        assert f"{shown:,} frames ({shown / 1000:.0f}%)\n" in text_of(top.render(first, None))


def test_the_learner_does_not_wait_for_background_collection() -> None:
    """A thread takes the rollouts, and always waits for them; the learner does not."""
    before, now = (at(t, in_background=True, wait_s=t, waiting_since=1.0) for t in (10, 20))
    per = rates(before, now)
    assert per.learner_waits is None
    assert bound_by(now, per) == (
        "neither side: rollouts are collected in the background, collectors work 80% of the "
        "time, the learner's process runs 50%"
    )
    said = " ".join(text_of(top.render(now, per)).split())
    assert "rollouts are collected in the background; collectors work 80%" in said
    assert "learner waits" not in said + top.line(now, per)
    busy = dataclasses.replace(now, cores=1)
    assert bound_by(busy, per) == "the 1 cores: all are busy"
    held = dataclasses.replace(now, buffers=[limited(600, 500)])
    assert bound_by(held, per).startswith("the limiter: writing waits")


# ---- finding jobs


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """This user's folder, with nothing of other tests in it."""
    (tmp_path / "memory").mkdir()
    monkeypatch.setattr(own_files, "_MEMORY", str(tmp_path / "memory"))
    return own_files.user_folder()


def write_pulse(folder: Path, job_id: str, number: int = 0, **more: object) -> Path:
    path = own_files.user_folder() / f"{pulse.PREFIX}{process_stamp(os.getpid())}-{number}.json"
    figures = dict(at(20).figures) | {
        "format": pulse.FORMAT, "job_id": job_id, "directory": str(folder), "processes": [],
    }  # fmt: skip
    path.write_text(json.dumps(figures | more))
    return path


def test_a_job_is_found_by_run_buffer_id_or_as_the_only_one(own: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="no job of yours"):
        find(None)
    path = write_pulse(tmp_path, "77.0")
    run = tmp_path / "runs" / "apex"
    run.mkdir(parents=True)
    (run / "run.json").write_text('{"job_id": "77.0"}')
    storage = SharedMemmapStorage(64, scratch_dir=run / "replay", job_id="77.0")
    for name in (None, "77.0", "77", str(run), str(run / "replay")):
        target = find(name)
        assert (target.job_id, target.pulse) == ("77.0", path)
        assert target.buffers == (run / "replay",), name
    with pytest.raises(ConfigurationError, match="7 is neither .*; jobs that do: 77.0"):
        find("7")
    write_pulse(tmp_path, "78.0", 1)
    with pytest.raises(ConfigurationError, match=r"several jobs .* 77.0 .*78.0"):
        find(None)
    path.unlink()
    assert find(str(run)).pulse is None  # its end: buffers and logs are still shown
    assert look(find(str(run))).buffers[0].rows == 0
    storage.close()


def test_dead_jobs_other_files_and_lines_cut_short_are_not_shown(own: Path, tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "60"]) as ended:
        stamp = process_stamp(ended.pid)
        ended.kill()
    write_pulse(tmp_path, "1.0").rename(own / f"{pulse.PREFIX}{stamp}-0.json")
    (own / f"{pulse.PREFIX}{process_stamp(os.getpid())}-5.json").write_text("{")
    assert snapshot.pulses() == {}
    logs = tmp_path / "csv" / "scalars" / "train"
    logs.mkdir(parents=True)
    (logs / "sps.csv").write_text("1,10.0\n2,20.5\n3,3")
    (logs / "empty.csv").write_text("")
    assert snapshot.read_points(tmp_path) == {"train/sps": (2, 20.5)}


def fake(folder: Path, name: str, answer: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{answer}\n")
    (folder / name).chmod(0o755)


def test_slurms_state_of_a_job_without_a_visible_learner_is_shown(tmp_path, monkeypatch, capsys):
    """The job waits to be started again, or has failed."""
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(os, "execvp", lambda *_: pytest.fail("it runs nowhere"))
    (tmp_path / "run.json").write_text('{"job_id": "77.0"}')
    fake(tmp_path, "squeue", '[ "$3" = 77 ] && [ "$5" = all ] && echo "PENDING (BeginTime)"')
    assert main(["top", str(tmp_path), "--once", "--interval", "0.1"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "this job has no learner on this machine; Slurm says PENDING (BeginTime)" in said
    assert main(["top", "77", "--once"]) == 2
    assert "Slurm says PENDING (BeginTime) for job 77" in capsys.readouterr().err
    fake(tmp_path, "squeue", 'echo "slurm_load_jobs error: Invalid job id" >&2; exit 1')
    fake(tmp_path, "sacct", 'echo "FAILED|1:0"')
    top._slurm_state.cache_clear()
    assert main(["top", str(tmp_path), "--once", "--json", "--interval", "0.1"]) == 0
    assert json.loads(capsys.readouterr().out)["slurm"] == "FAILED, exit code 1:0"
    (tmp_path / "run.json").write_text(json.dumps({"job_id": process_stamp(1)}))
    assert top.slurm_state(process_stamp(1)) is None and top.slurm_state(None) is None


def test_the_command_runs_on_the_node_of_a_slurm_job(tmp_path, monkeypatch) -> None:
    fake(tmp_path, "squeue", "echo node7")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(sys, "argv", ["torchrl-dist", "top", "4711", "--once"])
    started = []
    monkeypatch.setattr(os, "execvp", lambda program, words: started.append(words))
    assert main(["top", "4711", "--once"]) == 2  # execvp does not return, ours does
    (step,) = started
    assert step[:6] == ["srun", "--jobid=4711", "--overlap", "-N1", "-n1", "--nodelist=node7"]
    assert step[-5:] == ["-m", "torchrl_dist", "top", "4711", "--once"]


def test_a_wrong_interval_and_a_wrong_job_are_refused(capsys: pytest.CaptureFixture) -> None:
    assert main(["top", "--interval", "0"]) == 2
    assert main(["top", "no-such-job"]) == 2
    said = capsys.readouterr().err
    assert "--interval: got 0" in said and "no-such-job is neither" in said


# ---- a running job


@pytest.fixture
def job(fork_server, tmp_path, monkeypatch) -> Iterator[RPCBatchedCollector]:
    """Two collectors write into a limited buffer; the test takes batches."""
    monkeypatch.setattr(pulse, "_EVERY_S", 0.1)
    monkeypatch.chdir(tmp_path)
    with local_cluster({"learner": 1, "collector": 2}, fork_server=fork_server) as session:
        job_id = session.world.job_id
        storage = SharedMemmapStorage(
            5000, scratch_dir=tmp_path / "replay", job_id=job_id,
            limiter=RateLimiter(min_size_to_sample=32),
        )  # fmt: skip
        buffer = SharedReplayBuffer(
            storage=storage,
            sampler=SharedRandomSampler(),
            writer=SharedCursorWriter(),
            batch_size=8,
        )
        with RPCBatchedCollector(
            "CartPole-v1", session=session, frames_per_batch=64, replay_buffer=buffer
        ) as collector:
            collector.job_id = job_id
            yield collector
        storage.close()


def is_written(figures: pulse.Pulse) -> bool:
    return figures.path is not None and figures.path.exists()


def go_on(collector: RPCBatchedCollector, seconds: float) -> None:
    """Take batches for this time at least, and until a thread has written a pulse."""
    end = time.monotonic() + seconds
    batches = iter(collector)
    while time.monotonic() < end or not is_written(collector._pulse):
        next(batches)
        collector.replay_buffer.sample()


def test_top_reads_a_running_job_and_neither_writes_nor_locks(job, tmp_path: Path) -> None:
    go_on(job, 0.5)
    script = """
import os, sys, time
writes = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
def hook(event, arguments):
    if event == "open" and isinstance(arguments[2], int) and armed:
        assert not arguments[2] & writes, arguments
    assert not (armed and event.startswith(("fcntl.", "os.kill", "os.rename", "os.remove"))), event
armed = False
from torchrl_dist.ops import snapshot
target = snapshot.find(sys.argv[1])
sys.addaudithook(hook)
armed = True
before = snapshot.look(target)
print("ready", flush=True)
while not os.path.exists(sys.argv[2]):
    time.sleep(0.05)
now = snapshot.look(target)
per = snapshot.rates(before, now)
armed = False
(buffer,) = now.buffers
assert per.frames > 0 and per.written[buffer.path] > 0 and per.sampled[buffer.path] > 0, per
assert set(per.by_worker) == {"collector0", "collector1"} and len(now.processes) == 3
assert {each.state for each in now.processes} <= {"running", "waiting", "disk wait"}
"""
    out, go = tmp_path / "out", tmp_path / "go"
    with out.open("w") as output:
        command = [sys.executable, "-c", script, str(tmp_path / "replay"), str(go)]
        watcher = warm.start(command, stdout=output, stderr=subprocess.STDOUT)
    wait_until(lambda: "ready" in out.read_text() or watcher.poll() is not None)
    go_on(job, 0.5)
    go.touch()
    assert watcher.wait(60) == 0, out.read_text()


def screen(fd: int, text: str) -> str:
    """Return what a terminal shows, up to this text."""
    got = ""

    def has_text() -> bool:
        nonlocal got
        if select.select([fd], [], [], 0.2)[0]:
            got += os.read(fd, 65536).decode(errors="replace")
        return text in got

    wait_until(has_text, lambda: got[-3000:])
    return got


def test_in_a_terminal_it_answers_keys_and_restores_the_terminal(job, tmp_path: Path) -> None:
    fake(tmp_path, "py-spy", 'echo "Thread of $3"')
    go_on(job, 0.3)
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(ours, (40, 120))
    before = termios.tcgetattr(theirs)
    command = [sys.executable, "-m", "torchrl_dist", "top", job.job_id, "--interval", "0.3"]
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "TERM": "xterm-256color"}
    env |= {"COLUMNS": "", "LINES": ""}
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=env) as watcher:
        shown = screen(ours, "bound by")
        assert "\x1b[?1049h" in shown and "collector1" in shown and "q: quit" in shown
        os.write(ours, b"1")
        assert f"Thread of {watcher.pid}" not in screen(ours, "Thread of ")
        termios.tcsetwinsize(ours, (30, 90))
        watcher.send_signal(signal.SIGWINCH)
        go_on(job, 0.5)
        os.write(ours, b"q")
        shown = screen(ours, "\x1b[?1049l")
        assert watcher.wait(30) == 0
    assert termios.tcgetattr(theirs) == before
    os.close(ours)
    os.close(theirs)


def test_without_a_terminal_it_prints_a_line_per_interval_and_ends(job, capsys) -> None:
    go_on(job, 0.3)
    timer = threading.Timer(1.0, job.shutdown)
    timer.start()
    options = argparse.Namespace(job=job.job_id, interval=0.2, once=False, json=False)
    assert top.run(options) == 0
    timer.join()
    said = capsys.readouterr()
    lines = said.out.splitlines()
    assert len(lines) >= 2 and all("frames" in line and "bound by" in line for line in lines)
    assert "the job has ended" in said.err


def test_with_start_rollouts_come_in_the_background(job, capsys: pytest.CaptureFixture) -> None:
    job.start()
    wait_until(lambda: job.report.frames and is_written(job._pulse))
    options = argparse.Namespace(job=job.job_id, interval=0.3, once=True, json=True)
    assert top.run(options) == 0
    assert json.loads(capsys.readouterr().out)["rates"]["learner_waits"] is None


def test_once_prints_one_table_or_one_object_of_json(job, capsys: pytest.CaptureFixture) -> None:
    go_on(job, 0.3)
    options = argparse.Namespace(job=job.job_id, interval=0.2, once=True, json=True)
    assert top.run(options) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["job_id"] == job.job_id and told["bound_by"] and len(told["processes"]) == 3
    assert told["buffers"][0]["limiter"]["min_size_to_sample"] == 32
    options.json = False
    assert top.run(options) == 0
    assert "learner0" in capsys.readouterr().out
