"""Who may write into a run's folder: one fresh run, or one that continues it."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

from ... import own_files
from ...errors import ConfigurationError
from ...replay.node.files import CLAIM
from ...replay.node.leftovers import look, remove

_NOTE = "run.json"


def claim(
    output: Path,
    *,
    checkpoint: Path,
    replay: Path | None,
    job_id: str,
    restart_count: int,
    resume: bool,
    held: contextlib.ExitStack,
) -> bool:
    """Take the folders for this job and say whether to continue from ``checkpoint``.

    A restart by the launcher (``restart_count > 0``) continues its own job's run without being
    asked to, and begins anew if that had written no checkpoint yet.

    Args:
        output: the folder; created if it does not exist.
        checkpoint: where the run's checkpoint is, if it has one.
        replay: folder of the replay buffer, in ``output`` or elsewhere; its parent is created.
            None: there is none.
        job_id: the same before and after a restart of this job, different in any other.
        restart_count: how often the launcher has restarted this job.
        resume: the user asked to continue.
        held: until it is closed, other runs are refused the folder (where its file system locks).

    Raises:
        ConfigurationError: a fresh run in a folder with files, nothing to resume, a folder in which
            another run goes on, one that another user could change, or that cannot be written.
    """
    try:
        if output.exists() and not output.is_dir():
            raise ConfigurationError(f"--output-dir: {output} is a file, expected a folder")
    except OSError as error:  # of too long a name, say
        raise ConfigurationError(f"--output-dir: {output}: {error.strerror}") from error
    for folder, option in ((output, "--output-dir"), (replay, "--replay-dir")):
        if folder is not None:
            _refuse_others(folder, option)
    if restart_count > 0 and _owner(output) == job_id:
        with contextlib.suppress(ConfigurationError):  # its own, of a process that is ending
            _hold(output, held)
        return checkpoint.is_file()
    if resume:
        if not checkpoint.is_file():
            raise ConfigurationError(
                f"--resume: there is no {checkpoint}; leave --resume out to start a new run"
            )
    elif output.is_dir() and not _holds_at_most_our_note(output):
        raise _not_empty(output, checkpoint)
    elif (
        replay is not None
        and replay.exists()
        and not (replay.is_dir() and not _names_in(replay, "--replay-dir"))
    ):
        raise ConfigurationError(
            f"--replay-dir: {replay} is in use or was left by an earlier run; remove it or choose "
            "another folder"
        )
    folders = [(output, "--output-dir")]
    if replay is not None:
        folders.append((replay.parent, "--replay-dir"))
    for folder, option in folders:
        try:
            if folder is output or not folder.exists():
                own_files.make_folder(folder)
            if not os.access(folder, os.W_OK):
                raise PermissionError(13, "Permission denied")
        except OSError as error:
            raise ConfigurationError(
                f"{option}: cannot write to {folder} ({error.strerror})"
            ) from error
    _hold(output, held)
    if not resume and not _holds_at_most_our_note(output):  # another run has been here meanwhile
        raise _not_empty(output, checkpoint)
    _write(output / _NOTE, {"job_id": job_id})
    return resume


def check_rows(output: Path, replay: Path | None) -> None:
    """Refuse a copy of a run the rows of the first, which its configuration names. Where the folder
    is a part of the run's, the copy has its own.

    Raises:
        ConfigurationError: they are the rows of another run, which is still there.
    """
    if replay is None or _is_in(output, replay):
        return
    told = _read(replay / CLAIM)
    other = Path(told.get("run", output))
    here = told.get("replay") == str(replay.resolve())  # else they are a copy, or were moved
    if here and (other / _NOTE).exists() and not other.samefile(output):
        raise ConfigurationError(
            f"--replay-dir: {replay} has the rows of the run in {other}, not of that in {output}: "
            f"give this one a folder of its own, such as --replay-dir {replay}-2, where its buffer "
            "fills anew, or a copy of the other's that was made while no run used it"
        )


def claim_rows(output: Path, replay: Path) -> None:
    """Say in ``replay`` whose rows they are; once the buffer is there."""
    if not _is_in(output, replay) and own_files.is_ours(replay):
        _write(replay / CLAIM, {"run": str(output.resolve()), "replay": str(replay.resolve())})


def _is_in(output: Path, replay: Path) -> bool:
    return output.resolve() in replay.resolve().parents


def _refuse_others(folder: Path, option: str) -> None:
    try:
        if os.path.lexists(folder):
            own_files.check_folder(folder)
        else:
            own_files.resolved(folder)
    except own_files.NotOurs as error:
        raise ConfigurationError(f"{option}: {error}; choose another folder") from error
    except OSError:
        pass  # said below


def forget(output: Path, *, checkpoint: Path, replay: Path | None) -> None:
    """Leave nothing of a fresh run that has failed before its first checkpoint: its folder would
    refuse a new run and a resumed one. What the run did not write stays; its monitor has removed
    its own logs."""
    if checkpoint.is_file():
        return
    found = look(replay) if replay is not None else None
    if found is not None:
        remove(found)
    with contextlib.suppress(OSError):
        (output / _NOTE).unlink()
        output.rmdir()


def _not_empty(output: Path, checkpoint: Path) -> ConfigurationError:
    if checkpoint.is_file():
        what = "is not empty; add --resume to continue the run in it, or choose another folder"
    else:
        what = f"is not empty, and has no {checkpoint.name} to resume from; choose another folder"
    return ConfigurationError(f"--output-dir: {output} {what}")


def _hold(output: Path, held: contextlib.ExitStack) -> None:
    folder = os.open(output, os.O_RDONLY | os.O_DIRECTORY)
    held.callback(os.close, folder)
    if not own_files.lock_folder(folder):
        raise ConfigurationError(
            f"--output-dir: another run is going on in {output}; choose another folder, or wait "
            "for its end"
        )


def _holds_at_most_our_note(output: Path) -> bool:
    names = _names_in(output, "--output-dir")
    return not names or (names == [_NOTE] and _owner(output) is not None)


def _names_in(folder: Path, option: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError as error:
        raise ConfigurationError(f"{option}: cannot read {folder} ({error.strerror})") from error


def _owner(output: Path) -> str | None:
    note = _read(output / _NOTE)
    return note["job_id"] if note.keys() == {"job_id"} else None


def job_of(output: Path) -> str | None:
    """The job that the run in the folder belongs to; None: it is none of this user's."""
    return _read(output / _NOTE).get("job_id")


def _read(path: Path) -> dict[str, str]:
    """Empty if it is no note of this user's."""
    try:
        note = json.loads(own_files.read_ours(path))
    except (OSError, ValueError, RecursionError):
        return {}
    sound = isinstance(note, dict) and all(isinstance(value, str) for value in note.values())
    return note if sound else {}


def _write(path: Path, content: dict[str, str]) -> None:
    text = json.dumps(content) + "\n"
    own_files.atomic_write(path, lambda file: file.write(text.encode()))
