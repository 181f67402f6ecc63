"""Who may write into a run's folder: one fresh run, or one that continues it. Pure."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
from pathlib import Path

from ..errors import ConfigurationError

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
            another run goes on, or one that cannot be written.
    """
    try:
        if output.exists() and not output.is_dir():
            raise ConfigurationError(f"--output-dir: {output} is a file, expected a folder")
    except OSError as error:  # of too long a name, say
        raise ConfigurationError(f"--output-dir: {output}: {error.strerror}") from error
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
        and not (replay.is_dir() and not any(replay.iterdir()))
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
            folder.mkdir(parents=True, exist_ok=True)
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


def forget(output: Path, *, checkpoint: Path, replay: Path | None) -> None:
    """Leave nothing of a fresh run that has failed before its first checkpoint: its folder would
    refuse a new run and a resumed one. What the run did not write stays."""
    if checkpoint.is_file():
        return
    for folder in (replay, output / "tensorboard", output / "csv"):
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
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
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConfigurationError(
            f"--output-dir: another run is going on in {output}; choose another folder, or wait "
            "for its end"
        ) from None
    except OSError:
        pass  # some network file systems lock no folders


def _holds_at_most_our_note(output: Path) -> bool:
    names = [path.name for path in output.iterdir()]
    return not names or (names == [_NOTE] and _owner(output) is not None)


def _owner(output: Path) -> str | None:
    try:
        note = json.loads((output / _NOTE).read_text())
    except (OSError, ValueError, RecursionError):
        return None
    ours = isinstance(note, dict) and note.keys() == {"job_id"}
    return note["job_id"] if ours and isinstance(note["job_id"], str) else None


def _write(path: Path, content: dict[str, str]) -> None:
    beside = path.with_name(f".{path.name}.tmp")
    beside.write_text(json.dumps(content) + "\n")
    os.replace(beside, path)
