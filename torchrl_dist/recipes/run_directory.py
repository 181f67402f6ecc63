"""Who may write into a run's folder: one fresh run, or one that continues it. Pure."""

from __future__ import annotations

import json
import os
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

    Raises:
        ConfigurationError: a fresh run in a folder with files, nothing to resume, or a folder
            that cannot be written.
    """
    if output.exists() and not output.is_dir():
        raise ConfigurationError(f"--output-dir: {output} is a file, expected a folder")
    if restart_count > 0 and _owner(output) == job_id:
        return checkpoint.is_file()
    if resume:
        if not checkpoint.is_file():
            raise ConfigurationError(
                f"--resume: there is no {checkpoint}; leave --resume out to start a new run"
            )
    elif output.is_dir() and not _holds_at_most_our_note(output):
        raise ConfigurationError(
            f"--output-dir: {output} is not empty; add --resume to continue the run in it, or "
            "choose another folder"
        )
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
    _write(output / _NOTE, {"job_id": job_id})
    return resume


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
