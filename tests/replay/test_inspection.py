"""``torchrl-dist inspect`` shows the right figures, and changes nothing."""

from __future__ import annotations

import json
import os
import re
import signal
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import rich.console  # noqa: F401  before a child drops its rights
import torch
from torchrl.data import TensorDictReplayBuffer

from tests.replay.faults import (
    assert_sound,
    attach,
    forked,
    is_stopped,
    kill_self,
    rows_of,
    run_forked,
    wait_until,
)
from tests.spawn import stop_self
from torchrl_dist import (
    CheckpointError,
    DirectoryError,
    RateLimiter,
    SharedMemmapStorage,
    SharedReplayBuffer,
)
from torchrl_dist.cli import main as cli
from torchrl_dist.replay.inspection import inspect, show
from torchrl_dist.replay.node.tables import Word

CAPACITY = 80


@pytest.fixture
def rb(folder: Path) -> Iterator[TensorDictReplayBuffer]:
    buffer = attach(folder, CAPACITY)
    for at in range(0, 100, 10):
        buffer.extend(rows_of(range(at, at + 10)))
    buffer.update_priority(torch.arange(80), torch.arange(1.0, 81.0))
    yield buffer
    buffer.storage.close()


def contents(folder: Path) -> dict[str, tuple[bytes, int]]:
    return {
        str(each): (each.read_bytes(), each.stat().st_mtime_ns)
        for each in sorted(folder.rglob("*"))
        # opened and closed here, the lock file would lose this process's locks
        if each.is_file() and each.name != "lock"
    }


def test_it_says_what_the_directory_holds(rb, folder: Path) -> None:
    reservation = rb.storage._cursor.reserve(4)
    found = inspect(folder)
    assert found["kind"] == "directory" and found["job_id"] == "test"
    assert (found["capacity"], found["length"], found["cursor"]) == (80, 76, 104)
    assert found["write_count"] == 100 and found["row_bytes"] == 136
    assert [leaf["key"] for leaf in found["row"]["leaves"]] == [
        ["first"],
        ["key"],
        ["next", "last"],
    ]
    assert found["alpha"] == 0.6 and found["max_priority"] == 80.0
    assert found["counters"] == rb.storage.directory.counters
    (member,) = found["members"]
    assert member["pid"] == os.getpid() and member["alive"] and "python" in member["command"]
    assert found["claims"] == [
        {
            "member": member["member"],
            "alive": True,
            "rows": 4,
            "first_ticket": 100,
            "slots": [(20, 24)],
            "state": "writing",
        }
    ]
    # slots 20 to 23 were the oldest: their rows are gone, priorities 21 to 24
    kept = [p for p in range(1, 81) if not 21 <= p <= 24]
    quantiles = found["priority"]["quantiles"]
    assert quantiles["0%"] == pytest.approx(1) and quantiles["100%"] == pytest.approx(80)
    assert quantiles["50%"] == pytest.approx(np.median(kept), abs=1)
    assert sum(each["rows"] for each in found["priority"]["histogram"]) == 76
    leaf = np.array(kept) ** 0.6
    assert found["priority"]["mass"] == pytest.approx(leaf.sum())
    assert found["priority"]["largest_1_percent_have"] == pytest.approx(leaf.max() / leaf.sum())
    assert found["age"]["quantiles"]["0%"] == 4 and found["age"]["quantiles"]["100%"] == 79
    rb.storage._cursor.abandon(reservation)


@pytest.mark.parametrize("uniform", [True, False])
def test_a_buffer_without_rows_can_be_shown(folder: Path, uniform: bool, capsys) -> None:
    buffer = attach(folder, CAPACITY, uniform=uniform)
    found = inspect(folder)
    assert found["row"] is None and found["length"] == 0
    assert found["priority"]["quantiles"] is None and found["priority"]["histogram"] == []
    show(found)
    assert "none yet" in capsys.readouterr().out
    buffer.storage.close()


def test_it_shows_what_a_limiter_has_counted(folder: Path, capsys) -> None:
    limiter = RateLimiter(min_size_to_sample=20, samples_per_insert=2.0, error_buffer=100)
    storage = SharedMemmapStorage(CAPACITY, scratch_dir=folder, job_id="test", limiter=limiter)
    buffer = SharedReplayBuffer(storage=storage, batch_size=16)
    buffer.extend(rows_of(range(30)))
    buffer.sample()
    assert inspect(folder)["limiter"] == {
        "min_size_to_sample": 20,
        "samples_per_insert": 2.0,
        "error_buffer": 100.0,
        "max_times_sampled": None,
        "inserts": 30,
        "samples": 16,
    }
    assert cli(["inspect", str(folder)]) == 0
    assert "limiter: samples per insert" in capsys.readouterr().out
    buffer.storage.close()


def test_it_tells_the_living_the_stopped_and_the_dead(rb, folder: Path, capsys) -> None:
    def reserve_and(end) -> None:
        attach(folder, CAPACITY).storage._cursor.reserve(5)
        end()

    assert run_forked(reserve_and, kill_self) == -signal.SIGKILL
    with forked(reserve_and, stop_self) as stopped:
        wait_until(lambda: is_stopped(stopped))
        found = inspect(folder)
        states = {each["pid"]: each["state"] for each in found["members"]}
        assert states[os.getpid()] == "alive" and states[stopped] == "stopped"
        assert sorted(claim["alive"] for claim in found["claims"]) == [False, True]
        show(found)
        shown = capsys.readouterr().out
        assert "(dead)" in shown and "stopped" in shown
    found = inspect(folder)
    assert [each["alive"] for each in found["members"]].count(True) == 1


def test_rows_that_stay_are_not_called_removed(folder: Path, capsys) -> None:
    def build() -> SharedMemmapStorage:
        return SharedMemmapStorage(CAPACITY, scratch_dir=folder, job_id="test")

    def left_behind() -> None:
        build()
        kill_self()

    run_forked(left_behind)
    assert not inspect(folder)["removed_at_the_end"]
    show(inspect(folder))
    assert re.search(r"after its last process +kept", capsys.readouterr().out)
    storage = build()
    assert inspect(folder)["removed_at_the_end"]
    storage.directory.words[Word.INTERRUPTED] = 1
    assert not inspect(folder)["removed_at_the_end"]
    storage.directory.words[Word.INTERRUPTED] = 0
    storage.close()


def test_it_needs_no_lock_and_names_the_process_that_holds_it(rb, folder: Path) -> None:
    def hold() -> None:
        with rb.storage.directory.lock():
            stop_self()

    with forked(hold) as holder:
        wait_until(lambda: is_stopped(holder))
        assert inspect(folder)["lock"]["holder_pid"] == holder


def test_nothing_is_changed_and_the_inspecting_process_keeps_its_own_locks(
    rb, folder: Path, tmp_path: Path
) -> None:
    rb.storage.dumps(tmp_path)
    before = contents(folder), contents(tmp_path)
    show(inspect(folder))
    show(inspect(tmp_path))
    assert (contents(folder), contents(tmp_path)) == before
    member = rb.storage.directory.member

    def look() -> None:
        joins = rb.storage.directory.words[Word.JOINS]
        found = inspect(folder)
        assert found["members"][0]["alive"], "the owner's lock is gone"
        assert rb.storage.directory.words[Word.JOINS] == joins

    assert run_forked(look) == 0
    assert rb.storage.directory.is_alive(member)
    assert_sound(rb)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become another user")
def test_files_that_cannot_be_written_are_enough(rb, folder: Path) -> None:
    rb.storage.dumps(folder / "saved")
    for each in [folder, *folder.rglob("*")]:
        os.chmod(each, 0o555 if each.is_dir() else 0o444)
        os.chown(each, 65534, 65534)

    def look() -> None:
        os.setgroups([])
        os.setresgid(65534, 65534, 65534)
        os.setresuid(65534, 65534, 65534)
        assert not os.access(folder / "control.bin", os.W_OK)
        show(inspect(folder))
        show(inspect(folder / "saved"))

    try:
        assert run_forked(look) == 0
    finally:
        os.chmod(folder, 0o700)


def test_a_checkpoint_is_shown_shard_by_shard(rb, tmp_path: Path, capsys) -> None:
    rb.dumps(tmp_path)  # TorchRL's class writes the rows to a folder inside
    found = inspect(tmp_path)
    assert found["kind"] == "checkpoint" and found["path"] == str(tmp_path / "storage")
    (shard,) = found["shards"]
    assert shard["length"] == 80 and shard["overwritten"] == 0 and shard["cursor"] == 100
    assert shard["priority"]["quantiles"]["100%"] == pytest.approx(80)
    manifest = tmp_path / "storage" / "checkpoint.json"
    entry = json.loads(manifest.read_text())
    entry["shards"].append(None)
    del entry["checksum"]
    entry["checksum"] = zlib.crc32(json.dumps(entry, sort_keys=True).encode())
    manifest.write_text(json.dumps(entry))
    assert cli(["inspect", str(tmp_path)]) == 0
    assert "did not answer" in capsys.readouterr().out


def test_the_command_prints_one_object_and_fails_with_2(rb, folder, tmp_path, capsys) -> None:
    assert cli(["inspect", str(folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["length"] == 80
    assert cli(["inspect", str(folder)]) == 0
    shown = capsys.readouterr().out
    assert "80 of 80" in shown and "processes" in shown and "next.last" in shown
    assert cli(["inspect", str(tmp_path / "nowhere")]) == 2
    assert "is not a folder" in capsys.readouterr().err
    assert cli(["inspect", str(tmp_path)]) == 2
    assert "neither a replay directory nor a checkpoint" in capsys.readouterr().err


def test_folders_that_are_neither_are_refused(rb, folder: Path, tmp_path: Path) -> None:
    with pytest.raises(DirectoryError, match=f"try these folders in it: .*{folder.name}"):
        inspect(folder.parent)
    (tmp_path / "header.json").write_text('{"format": 99}')
    with pytest.raises(DirectoryError, match="use the version of torchrl_dist that wrote it"):
        inspect(tmp_path)
    (tmp_path / "checkpoint.json").write_text("{")
    with pytest.raises(CheckpointError, match="is damaged"):
        inspect(tmp_path)
