"""Decides which run may write into a run's folder: a fresh run, or one that continues the earlier
run."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from pathlib import Path

from ... import own_files
from ...errors import ConfigurationError
from ...replay.node.files import CLAIM
from ...replay.node.leftovers import look, remove
from .config import RecipeConfig
from .options import as_yaml

_NOTE = "run.json"
_RESUMED = "resumed_at_frames"


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
    """Claim the folders for this job, and return whether to continue from ``checkpoint``.

    After a restart by the launcher (``restart_count > 0``), the job continues its own run even
    without ``resume``. If the run has no checkpoint yet, it starts from the beginning.

    Args:
        output: the folder; created if it does not exist.
        checkpoint: path of the run's checkpoint, if it has one.
        replay: folder of the replay buffer, in ``output`` or elsewhere, or None. Its parent folder
            is created.
        job_id: the same before and after a restart of this job, and different in every other job.
        restart_count: how often the launcher has restarted this job.
        resume: the user asked to continue.
        held: until this is closed, no other run can use ``output`` (if its file system can lock).

    Raises:
        ConfigurationError: the folder of a fresh run has files; there is nothing to resume; or
            another run uses a folder, another user could change it, or it cannot be written.
    """
    try:
        if output.exists() and not output.is_dir():
            raise ConfigurationError(f"--output-dir: {output} is a file, expected a folder")
    except OSError as error:  # for example, the name is too long
        raise ConfigurationError(f"--output-dir: {output}: {error.strerror}") from error
    for folder, option in ((output, "--output-dir"), (replay, "--replay-dir")):
        if folder is not None:
            _refuse_others(folder, option)
    if restart_count > 0 and _owner(output) == job_id:
        with contextlib.suppress(
            ConfigurationError
        ):  # a process of this job that is ending may still hold the folder
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
            f"--replay-dir: {replay} is in use or was left by an earlier run; remove this folder "
            "or choose another one"
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
                f"{option}: cannot write to {folder} ({error.strerror}); choose another folder"
            ) from error
    _hold(output, held)
    if not resume and not _holds_at_most_our_note(output):  # another run has used it meanwhile
        raise _not_empty(output, checkpoint)
    _write(output / _NOTE, {"job_id": job_id})
    return resume


def check_rows(output: Path, replay: Path | None) -> None:
    """Refuse a replay folder with the rows of another run.

    The options of a copied run may name such a folder.

    A replay folder inside the run's folder is never refused, because a copy of the run includes
    its rows.

    Raises:
        ConfigurationError: the rows belong to another run, which still exists.
    """
    if replay is None or _is_in(output, replay):
        return
    told = _read(replay / CLAIM)
    other = Path(told.get("run", output))
    here = told.get("replay") == str(replay.resolve())  # otherwise the rows were copied or moved
    if here and (other / _NOTE).exists() and not other.samefile(output):
        raise ConfigurationError(
            f"--replay-dir: {replay} has the rows of the run in {other}, but this run is in "
            f"{output}; give this run its own folder: --replay-dir {replay}-2 for an empty buffer, "
            f"or a copy of {replay} that was made while no run used it"
        )


def claim_rows(output: Path, replay: Path) -> None:
    """Record in ``replay`` to which run its rows belong. Call this once the buffer exists."""
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
        pass  # ``claim`` meets the same error later, and reports it


def forget(output: Path, *, checkpoint: Path, replay: Path | None) -> None:
    """Remove all files of a fresh run that failed before its first checkpoint.

    Otherwise the folder would be refused for both a new and a resumed run. Files that the run did
    not make stay. The monitor has already removed the logs."""
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
            f"--output-dir: another run uses {output}; choose another folder, or wait until that "
            "run ends"
        )


def _holds_at_most_our_note(output: Path) -> bool:
    names = _names_in(output, "--output-dir")
    return not names or (names == [_NOTE] and _owner(output) is not None)


def _names_in(folder: Path, option: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError as error:
        raise ConfigurationError(
            f"{option}: cannot read {folder} ({error.strerror}); choose another folder"
        ) from error


def _owner(output: Path) -> str | None:
    note = _read(output / _NOTE)
    return note["job_id"] if note.keys() - {_RESUMED} == {"job_id"} else None


def note_resumed(output: Path, frames: int) -> None:
    """Record that the job that claimed the folder continues a run that has ``frames`` frames."""
    if note := _read(output / _NOTE):
        _write(output / _NOTE, note | {_RESUMED: str(frames)})


def resumed_at(output: Path) -> int | None:
    """Return the frames that the run had when it was last resumed, or None if it never was."""
    frames = _read(output / _NOTE).get(_RESUMED, "")
    return int(frames) if frames.isdecimal() else None


def write_settings(config: RecipeConfig) -> None:
    """Write ``config.yaml`` to the run's folder, for ``--config`` of another run.

    The file leaves the folders out, because every run needs its own folders."""
    folders = {name: None for name in ("output_dir", "replay_dir") if hasattr(config, name)}
    text = as_yaml(dataclasses.replace(config, **folders))  # type: ignore[arg-type]  # are fields
    own_files.atomic_write(config.output_path / "config.yaml", lambda f: f.write(text.encode()))


def job_of(output: Path) -> str | None:
    """Return the id of the last job that claimed the folder, or None if this user has no such
    record in the folder."""
    return _read(output / _NOTE).get("job_id")


def _read(path: Path) -> dict[str, str]:
    """Return the content of a JSON file. The result is empty if the file cannot be read or belongs
    to another user."""
    try:
        note = json.loads(own_files.read_ours(path))
    except (OSError, ValueError, RecursionError):
        return {}
    sound = isinstance(note, dict) and all(isinstance(value, str) for value in note.values())
    return note if sound else {}


def _write(path: Path, content: dict[str, str]) -> None:
    text = json.dumps(content) + "\n"
    own_files.atomic_write(path, lambda file: file.write(text.encode()))
