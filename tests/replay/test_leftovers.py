"""Directories of dead jobs are listed, removed, and found again by their names."""

from __future__ import annotations

import json
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.replay.faults import end_of, forked, kill_self, rows_of, run_forked, start, wait_until
from torchrl_dist.cli import main as cli
from torchrl_dist.errors import TorchRLDistError
from torchrl_dist.replay import (
    HostedReplayBuffer,
    RateLimiter,
    SharedMemmapStorage,
    replay_buffer,
)
from torchrl_dist.replay.hosts import keeper
from torchrl_dist.replay.hosts.messages import CountSamples
from torchrl_dist.replay.node import files, leftovers, opening
from torchrl_dist.replay.node.tables import Word
from torchrl_dist.runtime import Session, local_cluster, session
from torchrl_dist.runtime.world import World, process_stamp


@pytest.fixture(scope="module")
def dead() -> str:
    """Return the stamp of a process that has ended."""
    told, tell = os.pipe()
    end_of(start(lambda: os.write(tell, process_stamp(os.getpid()).encode())))
    stamp = os.read(told, 200).decode()
    os.close(told)
    os.close(tell)
    return stamp


def leave(path: Path, job_id: str, **options: Any) -> None:
    """Leave a directory as a killed process does."""

    def job() -> None:
        storage = SharedMemmapStorage(64, scratch_dir=path, job_id=job_id, **options)
        storage.append(rows_of(range(8)))
        kill_self()

    assert run_forked(job) < 0


def states(place: Path) -> dict[str, str]:
    return {found.path.name: found.state for found in leftovers.find([place])}


@pytest.mark.parametrize("first_to_leave", ["interrupted", "orderly"])
def test_nothing_is_removed_once_a_member_was_interrupted(
    folder: Path, first_to_leave: str
) -> None:
    def open_rows() -> SharedMemmapStorage:
        return SharedMemmapStorage(64, scratch_dir=folder / "rows", job_id="job")

    def member() -> None:
        storage.append(rows_of(range(8)))
        storage.close(clean=first_to_leave == "orderly")

    storage = open_rows()
    assert run_forked(member) == 0
    storage.close(clean=first_to_leave == "interrupted")
    again = open_rows()
    assert len(again) == 8
    again.close()
    assert not (folder / "rows").exists()


def test_the_command_removes_what_dead_jobs_left_and_nothing_else(
    folder: Path, dead: str, capsys: pytest.CaptureFixture
) -> None:
    living = process_stamp(os.getpid())
    leave(folder / "left", dead)
    leave(folder / "with notes", dead)
    (folder / "with notes" / "notes.txt").write_text("mine")
    leave(folder / "kept", dead, keep=True)
    leave(folder / "restarts", living)
    leave(folder / "slurm", "7.0")
    leave(folder / "damaged", dead)
    (folder / "damaged" / "header.json").write_text("{")
    leave(folder / ".gone.removed-7", dead)
    (folder / "foreign").mkdir()
    (folder / "foreign" / "header.json").write_text("{}")
    (folder / "link").symlink_to(folder / "left")
    (folder / "file").touch()

    def use() -> None:
        SharedMemmapStorage(64, scratch_dir=folder / "used", job_id=dead)
        os.read(os.pipe()[0], 1)

    with forked(use) as user:
        wait_until(lambda: (folder / "used").exists() and "used" in states(folder))
        expected = {
            "left": leftovers.LEFT,
            "with notes": leftovers.LEFT,
            "kept": leftovers.KEPT,
            "restarts": leftovers.MAY_COME_BACK,
            "slurm": leftovers.MAY_COME_BACK,
            "damaged": leftovers.DAMAGED,
            ".gone.removed-7": leftovers.HALF_REMOVED,
            "used": leftovers.IN_USE,
        }
        wait_until(lambda: states(folder) == expected)
        before = {each.name for each in folder.iterdir()}
        assert cli(["clean", str(folder)]) == 0
        shown = capsys.readouterr().out
        assert f"used: in use by {user}" in shown and f"job {dead}" in shown
        assert "--remove frees" in shown
        assert {each.name for each in folder.iterdir()} == before
        assert cli(["clean", str(folder), "--remove", "--json"]) == 0
        listed = json.loads(capsys.readouterr().out)["directories"]
        removed = {Path(each["path"]).name for each in listed if each["removed"]}
        assert removed == {"left", "with notes", ".gone.removed-7"}
        assert {each.name for each in folder.iterdir()} == before - removed | {"with notes"}
        assert [each.name for each in (folder / "with notes").iterdir()] == ["notes.txt"]
        assert (folder / "foreign" / "header.json").read_text() == "{}"
        for name in ("used", "damaged"):
            assert cli(["clean", str(folder / name), "--remove"]) == 0
            assert (folder / name).exists()
    for name in ("kept", "slurm"):  # named: the user knows that they are not needed
        assert cli(["clean", str(folder / name), "--remove"]) == 0
        assert not (folder / name).exists()
    assert cli(["clean", str(folder / "nowhere")]) == 2
    capsys.readouterr()


def test_a_job_that_died_leaves_nothing_for_long(folder: Path, monkeypatch) -> None:
    """No later job could find the directory by a name, so the next buffer removes it."""
    folder.mkdir()
    monkeypatch.setattr(keeper, "_default_parent", lambda: str(folder))
    leave(folder / "users", "7.0")

    def job(end: bool, name: str = "replay") -> None:
        with local_cluster({"learner": 1}) as session:
            buffer = replay_buffer(session, name, capacity=64, batch_size=8)
            assert len(buffer) == 0
            buffer.extend(rows_of(range(8)))
            if not end:
                kill_self()

    assert run_forked(job, False) < 0
    (left,) = {each.name for each in folder.iterdir()} - {"users"}
    assert states(folder)[left] == leftovers.LEFT
    assert run_forked(job, False, "another") < 0
    (next_,) = {each.name for each in folder.iterdir()} - {"users"}
    assert next_ != left and "another" in next_
    assert run_forked(job, True) == 0
    assert [each.name for each in folder.iterdir()] == ["users"]


def test_a_job_that_is_named_by_another_machines_process_finds_its_rows_again(
    folder: Path, monkeypatch
) -> None:
    """For torchrun without ``--rdzv-id`` over several nodes, the job id names rank 0's agent. This
    process is the agent of this machine."""
    folder.mkdir()
    monkeypatch.setattr(keeper, "_default_parent", lambda: str(folder))
    elsewhere = re.sub("[^-]*$", "00000000", process_stamp(os.getpid()))
    monkeypatch.delenv("TORCHRL_DIST_JOB_ID", raising=False)

    def rank(rows: int, rank_0: str) -> None:
        world = replace(World.from_env({}), job_id=rank_0, launcher="torchrun")
        with session(world=world) as job:
            buffer = replay_buffer(job, capacity=64, batch_size=8)
            assert len(buffer) == rows
            buffer.extend(rows_of(range(8)))
            kill_self()

    def another_job() -> None:
        with local_cluster({"learner": 1}) as job:
            replay_buffer(job, capacity=64, batch_size=8)

    assert run_forked(lambda: rank(0, elsewhere)) < 0
    assert run_forked(another_job) == 0
    (found,) = leftovers.find([folder])
    assert found.state == leftovers.MAY_COME_BACK and cli(["clean", str(folder), "--remove"]) == 0
    assert run_forked(lambda: rank(8, elsewhere)) < 0
    # of a job whose rank 0 is on another node by now
    assert run_forked(lambda: rank(16, f"1{elsewhere}")) < 0
    header = files.Header(64, elsewhere, elsewhere)  # before this machine was started anew
    assert leftovers._has_ended_here(header, elsewhere, folder)
    monkeypatch.setattr(leftovers, "file_system_of", lambda path: ("nfs4", "/"))
    assert not leftovers._has_ended_here(header, elsewhere, folder)
    for stamp, parent in ((elsewhere, None), (process_stamp(os.getppid()), "of this boot")):
        starter = opening._starter_of(stamp)
        assert starter == (stamp if parent else World.from_env().starter)


def test_files_of_a_slurm_job_are_leftovers_once_slurm_does_not_know_the_job(
    folder: Path, tmp_path: Path, monkeypatch
) -> None:
    places = ("PROCID", "LOCALID", "NODEID", "STEP_ID")
    variables = dict.fromkeys(places, "0") | {"NTASKS": "1", "STEP_NODELIST": "here"}
    for job in ("7", "8"):
        for name, value in {**variables, "JOB_ID": job}.items():
            monkeypatch.setenv(f"SLURM_{name}", value)
        leave(folder / f"{job}.0", f"{job}.0")
    leave(folder / "torchrun", "6.0")  # an id that a user chose
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    answers = {"echo 8; exit 1": None, "echo 8": "7.0", "echo": "7.0 8.0"}
    for answer, left in answers.items():
        (tmp_path / "squeue").write_text(f"#!/bin/sh\n{answer}\n")
        (tmp_path / "squeue").chmod(0o700)
        leftovers._slurm_jobs.cache_clear()
        found = [name for name, state in states(folder).items() if state == leftovers.LEFT]
        assert found == (left or "").split()
    monkeypatch.setenv("SLURM_JOB_ID", "9")  # an answer without the own job
    leftovers._slurm_jobs.cache_clear()
    assert set(states(folder).values()) == {leftovers.MAY_COME_BACK}
    leftovers._slurm_jobs.cache_clear()


@pytest.mark.parametrize("named", ["scratch_dir", "keep"])
def test_a_named_buffer_is_found_by_a_later_job(folder: Path, monkeypatch, named: str) -> None:
    folder.mkdir()
    monkeypatch.setattr(keeper, "_default_parent", lambda: str(folder))
    options = {"scratch_dir": folder} if named == "scratch_dir" else {"keep": True}

    def job(rows: int, **more: Any) -> None:
        with local_cluster({"learner": 1}) as session:
            buffer = replay_buffer(
                session, "cartpole", capacity=64, batch_size=8, **options, **more
            )
            assert len(buffer) == rows
            buffer.extend(rows_of(range(8)))
            kill_self()

    def refused() -> None:
        with local_cluster({"learner": 1}) as session:
            with pytest.raises(TorchRLDistError, match="pass resume=True"):
                replay_buffer(session, "cartpole", capacity=64, batch_size=8, **options)

    assert run_forked(job, 0) < 0
    assert run_forked(refused) == 0
    assert run_forked(lambda: job(8, resume=True)) < 0
    assert run_forked(lambda: job(16, resume=True)) < 0
    assert [each.name for each in folder.iterdir()] == [f"torchrl_dist-{os.getuid()}-cartpole-0-0"]
    shutil.rmtree(folder)


@pytest.mark.parametrize("counted_at", [0, 1])
def test_shards_go_on_together_after_a_restart_in_which_one_is_new(
    folder: Path, counted_at: int, capfd: pytest.CaptureFixture
) -> None:
    """New rows get the largest priority of all shards, and the limiter waits for nothing that was
    lost."""
    limiter = RateLimiter(min_size_to_sample=8, samples_per_insert=4.0, error_buffer=64)

    def build(job: Session) -> HostedReplayBuffer:
        return replay_buffer(
            job,
            capacity=512,
            batch_size=8,
            hosts=[job.me] * 2,
            shortcut=False,
            prefetch=0,
            scratch_dir=folder,
            resume=True,
            keep=True,
            write_to="all",
            limiter=limiter,
            timeout_s=2.0,
        )

    with session() as job:
        buffer = build(job)
        buffer.extend(rows_of(range(8)))
        buffer.empty()
        buffer.storage.client.links[counted_at].put(CountSamples(320))
        for first in (0, 40):
            buffer.extend(rows_of(range(first, first + 40)))
        buffer.flush()
        assert buffer.storage.limiter_counts[:2] == (80, 320)
    assert "continues" not in capfd.readouterr().err
    shutil.rmtree(next(folder.glob("*replay-1-0")))
    with session() as job:
        buffer = build(job)
        told = [line for line in capfd.readouterr().err.splitlines() if "continues" in line]
        assert len(told) == 1 and "continues with 40 rows" in told[0], told
        assert limiter.difference(buffer.storage.limiter_counts) == (96 if counted_at else -32)
        for _ in range(4):  # to both shards
            buffer.extend(rows_of(range(8)))
            for _ in range(4):
                buffer.sample()  # from here on the client knows the shards' eras
            buffer.storage.client.set_priorities(torch.arange(4), None, np.full(4, 50.0))
        shards = [host.storage.directory for host in keeper._hosts.values()]
        assert [each.get_float(Word.MAX_PRIORITY) for each in shards] == [50.0, 50.0]
