"""Whose files and locks are whose: what a replay directory adopts, refuses, keeps and removes."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from tests.replay.faults import end_of, kill_self, run_forked, start
from torchrl_dist.errors import DeadlineError
from torchrl_dist.replay import SharedMemmapStorage
from torchrl_dist.replay.directory import open_directory


def store(folder: Path, capacity: int = 64, **options) -> SharedMemmapStorage:
    return SharedMemmapStorage(capacity, scratch_dir=folder, job_id="test", **options)


# --- locks ---------------------------------------------------------------------------------------


def test_a_process_that_copies_its_own_folder_keeps_its_locks(folder: Path, tmp_path: Path) -> None:
    directory = store(folder, timeout_s=0.2).directory
    with directory.lock():
        shutil.copytree(folder, tmp_path / "copy")
        (folder / "lock").read_bytes()

        def look() -> None:
            open_directory(folder, 64, job_id="test")  # joins: waits for the lock

        def seen() -> None:
            with pytest.raises(DeadlineError, match=f"process {os.getppid()}"):
                look()

        assert run_forked(seen) == 0

    def member_lives() -> None:
        assert open_directory(folder, 64, job_id="test").is_alive(directory.member)

    assert run_forked(member_lives) == 0


def test_a_child_of_a_killed_member_does_not_keep_it_alive(folder: Path) -> None:
    directory = store(folder).directory
    ended, end = os.pipe()
    told, tell = os.pipe()

    def member() -> None:
        os.close(end)
        own = open_directory(folder, 64, job_id="test")
        with own.lock():  # joins
            pass
        if start(os.read, ended, 1):  # the child waits until the test lets go of the pipe
            os.write(tell, own.member.to_bytes(8, "little"))
            kill_self()

    try:
        assert end_of(start(member)) < 0
        assert not directory.is_alive(int.from_bytes(os.read(told, 8), "little"))
        with directory.lock():
            pass
    finally:
        for fd in (ended, end, told, tell):
            os.close(fd)
