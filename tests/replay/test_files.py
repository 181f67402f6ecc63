"""Files and locks: which of them a replay directory adopts, refuses, keeps and removes."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from tests.replay.faults import (
    Dying,
    end_of,
    kill_points,
    kill_self,
    rows_of,
    run_forked,
    start,
    wait_until,
)
from torchrl_dist.cli import main as cli
from torchrl_dist.errors import ConfigurationError, DeadlineError, DirectoryError
from torchrl_dist.replay import SharedMemmapStorage, SharedReplayBuffer
from torchrl_dist.replay.node.files import TABLES
from torchrl_dist.replay.node.opening import open_directory
from torchrl_dist.replay.node.tables import Word, control_tables


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
        number = int.from_bytes(os.read(told, 8), "little")
        wait_until(lambda: not directory.is_alive(number))  # the child may just have been forked
        with directory.lock():
            pass
    finally:
        for fd in (ended, end, told, tell):
            os.close(fd)


# --- what is adopted, and what is removed --------------------------------------------------------


def contents(folder: Path) -> dict[str, Any]:
    """Return every file below the folder with its bytes, and every folder and link by name."""
    return {
        str(each.relative_to(folder)): os.readlink(each)
        if each.is_symlink()
        else each.read_bytes()
        if each.is_file()
        else None
        for each in sorted(folder.rglob("*"))
    }


def _a_users_folder(folder: Path) -> None:
    (folder / "data").mkdir(parents=True)
    (folder / "data" / "key.bin").write_text("measured for a year")
    (folder / "notes.txt").write_text("notes")


_FOREIGN: dict[str, Callable[[Path], object]] = {
    "files and folders": _a_users_folder,
    "one file": lambda folder: (folder / "tree.bin").write_text("oak"),
    "a lock of its own": lambda folder: (folder / "lock").write_text("pid 1"),
    "an empty lock and more": lambda folder: [
        (folder / name).touch() for name in ("lock", "main.py")
    ],
    "a header of its own": lambda folder: (folder / "header.json").write_text('{"format": "x"}'),
    "an empty folder in it": lambda folder: (folder / "data").mkdir(),
}


@pytest.mark.parametrize("what", _FOREIGN)
def test_a_folder_with_files_of_another_owner_is_refused_as_it_is(folder: Path, what: str) -> None:
    folder.mkdir()
    _FOREIGN[what](folder)
    before = contents(folder)
    with pytest.raises(DirectoryError, match=re.escape(str(folder))):
        store(folder)
    assert contents(folder) == before


@pytest.mark.parametrize("path", ["", ".", Path("")])
def test_no_folder_is_not_the_current_one(
    path: str | Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigurationError, match="no variable in the path is unset"):
        store(path)
    assert not any(tmp_path.iterdir())


def test_files_of_a_user_in_a_replay_directory_stay(folder: Path) -> None:
    storage = store(folder)
    storage.append(rows_of(range(8)))
    storage.dumps(folder / "saved")
    (folder / "data" / "notes.txt").write_text("mine")
    mine = contents(folder / "saved")
    storage.close()
    assert {each.name for each in folder.rglob("*.txt")} == {"notes.txt"}
    assert contents(folder / "saved") == mine
    assert {each.name for each in folder.iterdir()} == {"data", "saved"}
    with pytest.raises(DirectoryError, match="do not belong to a replay buffer"):
        store(folder)


def test_a_link_is_followed_once(folder: Path, tmp_path: Path) -> None:
    (link := tmp_path / "link").symlink_to(folder)
    storage = store(link)
    storage.append(rows_of(range(8)))
    (tmp_path / "other").mkdir()
    link.unlink()
    link.symlink_to(tmp_path / "other")
    assert storage.scratch_dir == str(folder)
    storage.close()
    assert not folder.exists() and link.is_symlink() and not any((tmp_path / "other").iterdir())


def test_only_folders_that_this_project_renamed_are_removed(folder: Path) -> None:
    """Other folders have names like those of partly removed directories."""
    foreign = folder.with_name(f".{folder.name}.removed-1")
    by_name = folder.with_name(f".{folder.name}.removed-old")
    half = folder.with_name(f".{folder.name}.removed-2")
    try:
        for each in (foreign, by_name):
            each.mkdir()
            (each / "notes").touch()
        store(half, keep=True).close()  # all of ours, as a killed process leaves it
        store(folder).close()
        assert [each.exists() for each in (foreign, by_name, half)] == [True, True, False]
    finally:
        for each in (foreign, by_name, half):
            shutil.rmtree(each, ignore_errors=True)


@pytest.fixture
def mount_point(tmp_path: Path) -> Iterator[Path]:
    (point := tmp_path / "disk").mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=4m,mode=700", "tmpfs", str(point)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("needs root and the right to mount a small tmpfs")
    yield point
    subprocess.run(["umount", "-l", str(point)], check=True)


def test_a_mount_point_is_emptied_and_can_be_used_again(mount_point: Path) -> None:
    for _ in range(2):
        storage = store(mount_point)
        assert len(storage) == 0
        storage.append(rows_of(range(8)))
        storage.close()
        assert mount_point.is_dir() and not any(mount_point.iterdir())


@pytest.mark.parametrize("beside", [False, True])
def test_killed_while_files_are_removed_one_by_one_the_next_one_works(
    folder: Path, beside: bool
) -> None:
    """The directory cannot be renamed as a whole. The kill comes at every step of its removal."""

    def close(dying: Dying) -> None:
        storage = store(folder)
        storage.append(rows_of(range(8)))
        if beside:
            (folder / "notes.txt").touch()
        else:  # as a mount point refuses it
            monkeypatch.setattr(os, "rename", lambda *names: os.unlink(folder / "none"))
        with dying:
            storage.close()

    monkeypatch = pytest.MonkeyPatch()
    kills = 0
    for _, killed in kill_points(close, every=13, first=33):
        kills += killed
        (folder / "notes.txt").unlink(missing_ok=True)
        storage = store(folder)
        assert len(storage) in (0, 8)
        storage.append(rows_of(range(8, 16)))
        storage.close()
        assert not folder.exists()
    assert kills > 2


# --- damage --------------------------------------------------------------------------------------


def _write(name: str, text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text(text)


def _cut(name: str) -> Callable[[Path], object]:
    return lambda folder: os.truncate(folder / name, (folder / name).stat().st_size // 2)


def _change_header(**values: Any) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        header = json.loads((folder / "header.json").read_text())
        header |= values
        kept = {name: value for name, value in header.items() if value is not ...}
        (folder / "header.json").write_text(json.dumps(kept))

    return change


def _set_word(word: Word, value: float) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        kind = np.float64 if isinstance(value, float) else np.int64
        np.memmap(folder / "control.bin", kind, "r+")[word] = value

    return change


def _set_claim(column: int, value: int) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        claims = control_tables(np.memmap(folder / "control.bin", np.int64, "r+"))[1]
        claims[3] = (2, 5, 1, 1)
        claims[3, column] = value

    return change


def _set_journal(place: int) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        words = np.memmap(folder / "control.bin", np.int64, "r+")
        words[Word.JOURNAL : Word.JOURNAL + 3] = (1, place, 7)

    return change


def _set_member(value: int) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        control_tables(np.memmap(folder / "control.bin", np.int64, "r+"))[2][3] = value

    return change


def _set_row(name: str, kind: type, value: float) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        np.memmap(folder / name, kind, "r+")[5] = value

    return change


def _replace_by_folder(name: str) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        (folder / name).unlink()
        (folder / name).mkdir()

    return change


_DAMAGE: dict[str, Callable[[Path], object]] = {
    "header empty": _write("header.json", ""),
    "header not text": lambda folder: (folder / "header.json").write_bytes(b"\xff\xfe\0"),
    "header a list": _write("header.json", "[]"),
    "header deep": _write("header.json", "[" * 100_000),
    "header a folder": _replace_by_folder("header.json"),
    "header without job": _change_header(job_id=...),
    "header without capacity": _change_header(capacity=...),
    "header with capacity -1": _change_header(capacity=-1),
    "header with capacity too large": _change_header(capacity=65),
    "header without format": _change_header(format=...),
    "header of a newer format": _change_header(format=99),
    "header missing": lambda folder: (folder / "header.json").unlink(),
    "lock missing": lambda folder: (folder / "lock").unlink(),
    "rows.json cut short": _cut("rows.json"),
    "rows.json missing": lambda folder: (folder / "rows.json").unlink(),
    "rows.json a list": _write("rows.json", "[]"),
    "rows.json with no dtype": lambda folder: (folder / "rows.json").write_text(
        (folder / "rows.json").read_text().replace("int64", "save")
    ),
    "data missing": lambda folder: shutil.rmtree(folder / "data"),
    "data cut short": _cut("data/key.bin"),
    **{f"{name} missing": lambda f, n=name: (f / n).unlink() for name in TABLES},
    **{f"{name} cut short": _cut(name) for name in TABLES},
    **{f"{name} longer": lambda f, n=name: os.truncate(f / n, 10**6) for name in TABLES},
    "control.bin a folder": _replace_by_folder("control.bin"),
    **{
        f"{word.name} {value}": _set_word(word, value)
        for word, values in {
            Word.CURSOR: (-5, 2**63 - 1),
            Word.BASE: (-(2**40), 2**40),
            Word.WRITE_COUNT: (-1,),
            Word.ROWS_READY: (2, -1),
            Word.ALPHA_SET: (7,),
            Word.ALPHA: (math.nan, -1.0, math.inf),
            Word.EPS: (-1.0,),
            Word.MAX_PRIORITY: (-1.0,),
            Word.MAX_SLOT: (64, -2),
            Word.JOINS: (-1, 2**60),
            Word.CLAIM_ROWS: (-1, 5000),
            Word.LIMITED: (3,),
            Word.STALE_UPDATES: (-1,),
        }.items()
        for value in values
    },
    "claim of too many rows": _set_claim(0, 65),
    "claim of fewer than no rows": _set_claim(0, -1),
    "claim before the first ticket": _set_claim(1, -1),
    "claim of no member": _set_claim(2, -1),
    "claim in no state": _set_claim(3, 9),
    "a change of no place": _set_journal(2**40),
    "a change before the first place": _set_journal(-1),
    "member below 0": _set_member(-1),
    "version below 0": _set_row("versions.bin", np.int64, -2),
    "priority not a number": _set_row("tree.bin", np.float64, math.nan),
    "priority below 0": _set_row("tree.bin", np.float64, -1.0),
}


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a directory that a job has left."""
    folder = tmp_path_factory.mktemp("sound") / "replay"
    rb = SharedReplayBuffer(storage=store(folder, keep=True), batch_size=4)
    rb.extend(rows_of(range(40)))
    rb.storage.close()
    return folder


@pytest.mark.parametrize("damage", _DAMAGE)
def test_a_damaged_directory_is_refused_as_it_is(
    sound: Path, tmp_path: Path, damage: str, capsys: pytest.CaptureFixture
) -> None:
    folder = tmp_path / "replay"
    shutil.copytree(sound, folder)
    _DAMAGE[damage](folder)
    before = contents(folder)
    for job in ("test", "other"):
        with pytest.raises(DirectoryError, match=re.escape(str(folder))):
            SharedMemmapStorage(64, scratch_dir=folder, job_id=job, resume=True)
    for arguments in (["inspect", str(folder)], ["inspect", "--json", str(folder)]):
        code = cli(arguments)
        shown = capsys.readouterr()
        if code == 0:
            assert shown.err == ""
        else:
            assert code == 2 and shown.out == "" and str(folder) in shown.err
    if code == 0:
        json.loads(shown.out, parse_constant=pytest.fail)  # NaN, Infinity
    assert contents(folder) == before


def test_a_copy_of_a_directory_is_as_good_as_the_first(sound: Path, tmp_path: Path) -> None:
    shutil.copytree(sound, tmp_path / "replay")
    storage = SharedMemmapStorage(64, scratch_dir=tmp_path / "replay", job_id="2", resume=True)
    assert storage[:]["key"].tolist() == list(range(40))
    storage.close()


def test_a_file_in_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for path in (tmp_path / "file", tmp_path / "file" / "below", tmp_path / "loop"):
        with pytest.raises(DirectoryError, match=re.escape(str(path.parent))):
            store(path)
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become another user")
def test_a_folder_without_permission_is_refused(sound: Path, tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    (tmp_path / "empty").mkdir(mode=0o755)
    shutil.copytree(sound, tmp_path / "replay")
    (tmp_path / "replay").chmod(0o755)
    (tmp_path / "secret").mkdir(mode=0o700)

    def look() -> None:
        os.setresuid(65534, 65534, 65534)
        for name in ("empty", "replay", "secret", "secret/below", "new"):
            with pytest.raises(DirectoryError, match="ermission denied|belongs to user root"):
                store(tmp_path / name, resume=True)

    for each in [tmp_path, *tmp_path.parents][:3]:
        each.chmod(0o755)
    before = contents(tmp_path)
    assert run_forked(look) == 0
    assert contents(tmp_path) == before


def test_without_room_nothing_is_left(mount_point: Path) -> None:
    (mount_point / "fills").write_bytes(bytes(3 * 2**20))
    with pytest.raises(DirectoryError, match="could not allocate the tables"):
        store(mount_point / "new", 10**6)
    (mount_point / "empty").mkdir()
    with pytest.raises(DirectoryError, match="could not allocate the tables"):
        store(mount_point / "empty", 10**6)
    storage = store(mount_point / "rows", 4096)
    with pytest.raises(DirectoryError, match="could not allocate 31 MiB"):
        storage.append(TensorDict({"x": torch.zeros(1, 1000, dtype=torch.float64)}, [1]))
    storage.append(rows_of(range(8)))  # others fit
    storage.close()
    assert {each.name for each in mount_point.rglob("*")} == {"fills", "empty"}
