"""Attacks by another user of the machine with prepared folders, links, pipes and huge files.

Nothing of ours is changed or read, nothing hangs, and nothing of theirs is removed.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import signal
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.replay.faults import kill_self, rows_of, run_forked
from torchrl_dist import own_files
from torchrl_dist.checkpoint import Checkpoint, save_checkpoint
from torchrl_dist.cli import main as cli
from torchrl_dist.errors import CheckpointError, ConfigurationError, DirectoryError
from torchrl_dist.recipes.parts.plots import draw_learning_curve
from torchrl_dist.recipes.training.run_directory import check_rows, claim, claim_rows
from torchrl_dist.replay import SharedMemmapStorage
from torchrl_dist.runtime import pulse
from torchrl_dist.runtime.world import process_stamp

VICTIM, OTHER = 65532, 65533
ESCAPE = "\x1b]0;mine\x07"


def become(uid: int) -> None:
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    os.umask(0o022)


def run_as(uid: int, function: Callable[..., None], *arguments: Any) -> None:
    def body() -> None:
        become(uid)
        function(*arguments)

    assert run_forked(body) == 0


@contextlib.contextmanager
def common_ground() -> Iterator[Path]:
    """A folder like /dev/shm: all users can create files, and remove their own."""
    path = Path(tempfile.mkdtemp(prefix="torchrl_dist-test-", dir="/dev/shm"))
    path.chmod(0o1777)
    (path / "home").mkdir(0o755)
    (path / "home" / "notes").write_text("measured for a year")
    for each in (path / "home", path / "home" / "notes"):
        os.chown(each, VICTIM, VICTIM)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def ground(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    if os.geteuid() != 0:
        pytest.skip("needs root, to become two other users")
    with common_ground() as path:
        monkeypatch.setattr(own_files, "_MEMORY", str(path))
        yield path


def contents(folder: Path) -> dict[str, Any]:
    """Return each name below the folder, with its owner and its kind."""
    found: dict[str, Any] = {}
    for each in sorted(folder.rglob("*")):
        status = each.lstat()
        plain = stat.S_ISREG(status.st_mode) and status.st_size < 1 << 20
        content = each.read_bytes() if plain else status.st_size
        found[str(each.relative_to(folder))] = (status.st_uid, status.st_mode, content)
    return found


# ---- preparations by another user


def _links(folder: Path, notes: Path) -> None:
    """Make links to a file of the victim, with the names of files that get written."""
    folder.mkdir()
    (folder / "lock").touch()
    for name in (
        "header.json.new", ".header.json.tmp", ".checkpoint.pt.tmp", "checkpoint.pt",
        ".run.json.tmp", ".learning_curve.png.tmp", ".config.yaml.tmp", ".torchrl_dist-rows",
        ".torchrl_dist-rows.tmp",
    ):  # fmt: skip
        (folder / name).symlink_to(notes)
    folder.chmod(0o777)


def _empty(folder: Path, notes: Path) -> None:
    folder.mkdir()
    folder.chmod(0o777)


def _link(folder: Path, notes: Path) -> None:
    """Prepare a link to a folder of the victim, which is in order itself."""
    folder.symlink_to(notes.parent)


def _above(folder: Path, notes: Path) -> None:
    """Let the victim make the folder itself, in one that can be replaced later."""
    folder.parent.mkdir()
    folder.parent.chmod(0o1777)


def _pipe(folder: Path, notes: Path) -> None:
    folder.mkdir()
    for name in ("lock", "header.json", "checkpoint.json", "run.json"):
        os.mkfifo(folder / name)
    folder.chmod(0o777)


PREPARED = {"links": _links, "empty": _empty, "a link": _link, "above": _above, "pipes": _pipe}


def _store(folder: Path) -> None:
    SharedMemmapStorage(64, scratch_dir=folder).append(rows_of(range(8)))


def _dump(folder: Path) -> None:
    home = next(each / "home" for each in folder.parents if (each / "home").exists())
    storage = SharedMemmapStorage(64, scratch_dir=home / "rows")
    try:
        storage.dumps(folder)
    finally:
        storage.close()


def _save(folder: Path) -> None:
    save_checkpoint(folder / "checkpoint.pt", Checkpoint("x", {}, {"w": torch.zeros(2)}))


def _begin(folder: Path) -> None:
    with contextlib.ExitStack() as held:
        claim(
            folder,
            checkpoint=folder / "checkpoint.pt",
            replay=None,
            job_id="1",
            restart_count=0,
            resume=(folder / "checkpoint.pt").exists(),
            held=held,
        )


WRITERS = {"replay": _store, "dumps": _dump, "checkpoint": _save, "run": _begin}


@pytest.mark.parametrize("prepared", PREPARED)
def test_files_that_another_user_prepared_are_refused_and_change_nothing(ground, prepared) -> None:
    folder = ground / ("above/share-example" if prepared == "above" else "share-example")
    notes = ground / "home" / "notes"
    run_as(OTHER, PREPARED[prepared], folder, notes)
    before = contents(ground)

    def use() -> None:
        for name, write in WRITERS.items():
            signal.alarm(20)  # it would wait for a pipe
            with pytest.raises((DirectoryError, CheckpointError, ConfigurationError)) as raised:
                write(folder)
            assert f"user {OTHER}" in str(raised.value), name
            assert str(folder) in str(raised.value), name

    run_as(VICTIM, use)
    assert contents(ground) == before


def test_the_folder_of_readme_is_made_for_this_user_alone(ground: Path) -> None:
    folder = ground / "share-example"

    def use() -> None:
        for mode in (0o700, 0o755):  # made by us; exists, and is ours
            storage = SharedMemmapStorage(64, scratch_dir=folder, job_id="1")
            storage.append(rows_of(range(8)))
            assert {each.stat().st_mode & 0o077 for each in folder.rglob("*")} == {0}
            assert stat.S_IMODE(folder.stat().st_mode) == mode
            storage.close()
            assert not folder.exists()
            folder.mkdir()

    run_as(VICTIM, use)


def test_a_folder_that_a_group_can_write_to_needs_permission(ground: Path, monkeypatch) -> None:
    def use(folder: Path, accepted: bool) -> None:
        if accepted:
            own_files.make_folder(folder)
            own_files.make_folder(folder / "below")
        else:
            with pytest.raises(own_files.NotOurs, match="chmod go-w|belongs to"):
                own_files.make_folder(folder)

    for name, owner, mode in (("mine", VICTIM, 0o770), ("theirs", OTHER, 0o2775)):
        (folder := ground / name).mkdir()
        os.chown(folder, owner, VICTIM)
        folder.chmod(mode)
        run_as(VICTIM, use, folder, False)
        monkeypatch.setenv(own_files.GROUP, str(VICTIM))
        run_as(VICTIM, use, folder, True)
        folder.chmod(0o777)
        run_as(VICTIM, use, folder, False)
        monkeypatch.delenv(own_files.GROUP)


def test_taking_the_name_of_a_users_folder_gives_no_access_to_its_files(ground: Path) -> None:
    (ground / f"torchrl_dist-{VICTIM}").mkdir()

    def use() -> None:
        first = own_files.user_folder()
        assert first == own_files.user_folder() != ground / f"torchrl_dist-{VICTIM}"
        assert stat.S_IMODE(first.stat().st_mode) == 0o700
        own_files.leave_user_folder()
        assert own_files.user_folders() == []

    run_as(VICTIM, use)


# ---- commands


def litter(ground: Path) -> None:
    """Make files that look like a job's or a buffer's, and others that do not."""
    stamp = process_stamp(os.getpid())
    squatted = ground / f"torchrl_dist-{VICTIM}"
    squatted.mkdir()
    figures = {"format": pulse.FORMAT, "job_id": ESCAPE, "started_unix_s": 0, "directory": "/"}
    for folder in (squatted, ground):
        (folder / f"{pulse.PREFIX}{stamp}-0.json").write_text(json.dumps(figures))
        os.mkfifo(folder / f"{pulse.PREFIX}{stamp}-1.json")
        (folder / f".torchrl_dist-pulse-{stamp}-0.json").write_text(json.dumps(figures))
    header = {"format": 2, "capacity": 1 << 40, "job_id": ESCAPE, "starter": "1-1-1-0"}
    for name, pipe in (("sparse", None), ("pipe", "header.json"), ("locked", "lock")):
        for folder in (ground / f"{name}{ESCAPE}", ground / f".{name}.removed-3"):
            folder.mkdir()
            folder.chmod(0o777)
            (folder / "lock").write_text("" if name == "sparse" else "mine")
            (folder / "header.json").write_text(json.dumps(header))
            for table in ("control.bin", "versions.bin", "tree.bin"):
                (folder / table).touch()
                os.truncate(folder / table, 8 << 40)
            if pipe is not None:
                (folder / pipe).unlink()
                os.mkfifo(folder / pipe)
    (by_name := ground / ".app.removed-3").mkdir()
    (by_name / "lock").write_text("pid 1")
    for number, note in enumerate(("{}", "[]", '{"job_id": 7}', ESCAPE, None)):
        (run := ground / "work" / "runs" / str(number)).mkdir(parents=True)
        (logs := run / "csv" / "scalars").mkdir(parents=True)
        os.mkfifo(logs / "loss.csv")
        if note is None:
            os.mkfifo(run / "run.json")
        else:
            (run / "run.json").write_text(note)
        os.chmod(run, 0o777)
    for each in (ground / "work", ground / "work" / "runs"):
        each.chmod(0o1777)


def said_by(*arguments: str) -> tuple[int, str]:
    """Return a command's exit code and what it prints; it has 100 s."""
    signal.alarm(100)
    printed, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(errors):
        try:
            code = cli(arguments)
        except SystemExit as error:
            code = int(error.code or 0)
    signal.alarm(0)
    said = printed.getvalue() + errors.getvalue()
    assert code in (0, 1, 2), said
    assert "\x1b" not in said and "\x07" not in said and "Traceback" not in said, said
    return code, said


def test_results_go_to_a_file_of_this_users_only(ground: Path) -> None:
    notes = ground / "home" / "notes"

    def prepare() -> None:
        (ground / "link").symlink_to(notes)
        os.mkfifo(ground / "pipe", 0o666)
        (ground / "file").write_text("theirs")
        (ground / "file").chmod(0o666)

    def use() -> None:
        signal.alarm(20)
        for name in ("link", "pipe", "file"):
            for append in (True, False):
                with pytest.raises(PermissionError):  # of ours, or the kernel's own
                    own_files.open_named(ground / name, append=append)
        (ground / "home" / "mine").symlink_to("results")
        for append, text in ((True, "a"), (True, "b"), (False, "c")):
            with own_files.open_named(ground / "home" / "mine", append=append) as file:
                file.write(text)
        assert (ground / "home" / "results").read_text() == "c"

    run_as(OTHER, prepare)
    run_as(VICTIM, use)
    assert notes.read_text() == "measured for a year"
    assert (ground / "file").read_text() == "theirs"


def test_root_removes_nothing_of_another_user_and_nothing_by_its_name(ground: Path) -> None:
    def leave() -> None:
        storage = SharedMemmapStorage(64, scratch_dir=ground / "left")
        storage.append(rows_of(range(8)))
        kill_self()

    def body() -> None:
        become(VICTIM)
        leave()

    assert run_forked(body) < 0  # as a job that was killed
    (ground / ".app.removed-3").mkdir(0o700)
    (ground / ".app.removed-3" / "lock").write_text("pid 1")
    (ground / ".app.removed-4").mkdir(0o700)
    (ground / ".app.removed-4" / "lock").touch()
    before = contents(ground)
    for place in (ground, ground / "left", ground / ".app.removed-3"):
        _, said = said_by("clean", str(place), "--remove", "--json")
        assert json.loads(said) == {"directories": []}
    assert contents(ground) == before
    run_as(VICTIM, lambda: said_by("clean", str(ground), "--remove"))
    assert not (ground / "left").exists()


# ---- without another user's files


def test_a_picture_replaces_a_link_and_follows_none(tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("mine")
    (tmp_path / ".learning_curve.png.tmp").symlink_to(tmp_path / "notes")
    path = tmp_path / "learning_curve.png"
    draw_learning_curve(path, title="", training=[], evaluations=[])
    assert path.read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "notes").read_text() == "mine"
    assert {each.name for each in tmp_path.iterdir()} == {"notes", "learning_curve.png"}


def test_a_file_that_cannot_be_written_leaves_the_old_one(tmp_path: Path) -> None:
    own_files.atomic_write(tmp_path / "file", lambda file: file.write(b"first"))

    def fail(file: Any) -> None:
        file.write(b"second")
        raise OSError("full")

    with pytest.raises(OSError, match="full"):
        own_files.atomic_write(tmp_path / "file", fail)
    assert [each.read_bytes() for each in tmp_path.iterdir()] == [b"first"]


def test_only_plain_files_of_a_sane_size_are_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "huge")
    (tmp_path / "huge").touch()
    os.truncate(tmp_path / "huge", 10 << 40)
    for read in (own_files.read_ours, own_files.read_plain):
        for name in ("pipe", "link", "huge", ""):
            with pytest.raises(OSError):
                read(tmp_path / name)
    for flags in (os.O_RDWR, os.O_WRONLY):
        with pytest.raises(own_files.NotOurs):
            own_files.open_ours(tmp_path / "pipe", flags)


def test_no_link_is_followed_and_no_existing_file_counts_as_new(tmp_path: Path) -> None:
    (notes := tmp_path / "notes").write_text("mine")
    (tmp_path / "link").symlink_to(notes)
    (tmp_path / "dangling").symlink_to(tmp_path / "none")
    for flags in (os.O_RDONLY, os.O_RDWR, os.O_WRONLY):
        with pytest.raises(own_files.NotOurs, match="not a plain file"):
            own_files.open_ours(tmp_path / "link", flags)
    for name in ("notes", "link", "dangling"):
        with pytest.raises(FileExistsError):
            own_files.open_new(tmp_path / name)
    assert notes.read_text() == "mine" and not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    "path", ["a/b", "a/../b", "link/b", "link/../b", "/", "gone/../b", "link", "chain/x"]
)
def test_links_are_resolved_as_the_system_does_it(tmp_path, monkeypatch, path: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a" / "c").mkdir(parents=True)
    (tmp_path / "link").symlink_to("a/c")
    (tmp_path / "chain").symlink_to(tmp_path / "link")
    assert own_files.resolved(path) == Path(os.path.realpath(path))


def test_control_characters_are_printed_as_text() -> None:
    assert own_files.printable(f"ä{ESCAPE}\n\udcff") == "ä\\x1b]0;mine\\x07\\n\\udcff"
    assert own_files.printable("a\nb\x9b", lines=True) == "a\nb\\x9b"


# ---- which run the rows belong to


def test_a_copied_run_is_refused_the_rows_of_the_first(tmp_path: Path) -> None:
    def begin(name: str) -> Path:
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.json").write_text('{"job_id": "1"}')
        return tmp_path / name

    rows, first = tmp_path / "rows", begin("first")
    check_rows(first, rows)  # none yet
    storage = SharedMemmapStorage(64, scratch_dir=rows, job_id="1", keep=True)
    claim_rows(first, rows)
    storage.close()
    check_rows(first, rows)
    copy = Path(shutil.copytree(first, tmp_path / "copy"))
    with pytest.raises(ConfigurationError, match=f"the rows of the run in {first}.*--replay-dir"):
        check_rows(copy, rows)
    check_rows(first, rows)
    for own in (shutil.copytree(rows, tmp_path / "rows-2"), copy / "replay", None):
        check_rows(copy, None if own is None else Path(own))
    first.rename(tmp_path / "moved")
    check_rows(tmp_path / "moved", rows)
    claim_rows(tmp_path / "moved", rows)
    with pytest.raises(ConfigurationError, match="moved"):
        check_rows(copy, rows)
    again = SharedMemmapStorage(64, scratch_dir=rows, job_id="2", resume=True)
    again.close()
    (folder,) = [each for each in (tmp_path / "rows", tmp_path / "none") if each.exists()]
    assert json.loads((folder / "claim.json").read_text())["run"] == str(tmp_path / "moved")
