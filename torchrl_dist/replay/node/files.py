"""Check whether a folder may become a replay directory, and remove the files of a directory.

Only files of this project are removed, each by its name, and only if a header marks them as this
project's. The header is removed last. A folder is removed only once it is empty. No file is created
in a folder that holds something else.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from torchrl_dist import own_files
from torchrl_dist.errors import DirectoryError
from torchrl_dist.replay.node.tables import control_bytes, control_tables
from torchrl_dist.replay.row.spec import ColumnSpec, data_file, ring_file

FORMAT = 3
SLURM = "slurm"
LOCK, HEADER, ROWS, DATA = "lock", "header.json", "rows.json", "data"
TABLES = ("control.bin", "versions.bin", "tree.bin")
_BEING_REMOVED = "header.removed.json"
"""The header's name while the other files are removed from a folder that stays."""
FRAMES = "frames.json"
_NEW_HEADER, _NEW_ROWS, _NEW_FRAMES = (
    own_files.temporary(Path(name)).name for name in (HEADER, ROWS, FRAMES)
)
CLAIM = "claim.json"
"""The file that names the recipe's run to which the rows belong; see
``recipes.training.run_directory``."""
_MADE_BEFORE_HEADER = frozenset({LOCK, *TABLES, _NEW_HEADER})
_LIMITER = "limiter.bin"
PASS = "pass.bin"
FRAMES_OF_CLAIMS = "frames=.bin"
"""A file in the data folder, see ``frames``. No column's file can have this name, because of the
"="."""
_MADE = _MADE_BEFORE_HEADER | {
    HEADER, _BEING_REMOVED, ROWS, _NEW_ROWS, DATA, _LIMITER, PASS, CLAIM, FRAMES, _NEW_FRAMES,
}  # fmt: skip


@dataclass(frozen=True)
class Header:
    """The content of ``header.json``.

    Attributes:
        capacity: slots of the ring.
        job_id: the job that the directory belongs to.
        starter: ``world.process_stamp`` of the process without which the job cannot be restarted.
            :data:`SLURM` if Slurm knows the job. None if no such process is known.
    """

    capacity: int
    job_id: str
    starter: str | None = None

    def as_json(self) -> dict[str, Any]:
        return {"format": FORMAT, **vars(self)}


def damaged(path: Path, found: str) -> DirectoryError:
    """Return the error for a directory with damaged files."""
    return DirectoryError(
        f"replay directory {path} is damaged: {found}. Nothing was changed; choose another "
        "scratch_dir, or remove the folder if you do not need its rows"
    )


def read_header(folder: Path, name: str = HEADER) -> Header:
    """Return the header of a replay directory from the file ``name``.

    Raises:
        FileNotFoundError: there is no such file.
        DirectoryError: the file cannot be read, or its format is not that of this version.
    """
    try:
        content = json.loads(own_files.read_ours(folder / name))
    except FileNotFoundError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise damaged(folder, f"{HEADER} cannot be read ({error})") from error
    if not isinstance(content, dict) or type(content.get("format")) is not int:
        raise damaged(folder, f"{HEADER} is not the header of a replay directory")
    if content["format"] != FORMAT:
        raise DirectoryError(
            f"{folder} has format {content['format']}, but this version of torchrl_dist reads only "
            f"format {FORMAT}; remove the folder, or use the version of torchrl_dist that wrote it"
        )
    capacity, job_id = content.get("capacity"), content.get("job_id")
    starter = content.get("starter")
    if type(capacity) is not int or capacity < 1:
        raise damaged(
            folder, f"{HEADER} has capacity={capacity!r}, expected an integer of at least 1"
        )
    if not isinstance(job_id, str) or not isinstance(starter, str | None):
        raise damaged(
            folder,
            f"{HEADER} has job_id={job_id!r} and starter={starter!r}, expected text for job_id, "
            "and text or null for starter",
        )
    return Header(capacity, job_id, starter)


def read_table(folder: Path, name: str, kind: type, count: int) -> np.ndarray:
    """Return the first ``count`` numbers of a file, without joining the directory.

    Raises:
        DirectoryError: the file is cut short.
    """
    with open(own_files.open_ours(folder / name), "rb") as file:
        found: np.ndarray = np.fromfile(file, kind, count)
    if found.size < count:
        raise damaged(folder, f"{name} holds {found.size} numbers, expected {count}")
    return found


def read_control(folder: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the tables in ``control.bin`` (``control_tables``), see :func:`read_table`."""
    return control_tables(read_table(folder, TABLES[0], np.int64, control_bytes() // 8))


def check_ours(folder: Path) -> None:
    """Refuse a folder that is neither empty nor a replay directory, before any file is created.

    Raises:
        FileNotFoundError: the folder, or a file in it that was just listed, does not exist.
        DirectoryError: the path is a file, the folder holds something else, or its header is
            damaged or missing.
    """
    names = set(os.listdir(folder))
    if not names:
        return
    if LOCK not in names or not _is_empty_file(folder / LOCK):
        if HEADER in names:
            read_header(folder)
            raise damaged(folder, f"its file {LOCK!r} is missing or was replaced")
        raise _not_ours(folder, names)
    if HEADER in names:
        read_header(folder)
    elif _BEING_REMOVED not in names and not names <= _MADE_BEFORE_HEADER:
        if names & {ROWS, DATA, _LIMITER, PASS, FRAMES}:
            raise damaged(folder, f"{HEADER} is missing, but there are data files")
        raise _not_ours(folder, names)


def _not_ours(folder: Path, names: set[str]) -> DirectoryError:
    shown = ", ".join(sorted(names)[:5]) + (", ..." if len(names) > 5 else "")
    return DirectoryError(
        f"{folder} holds files that do not belong to a replay buffer ({shown}); choose a "
        "scratch_dir that is new, empty, or left by a buffer, because the last process that uses a "
        "scratch_dir removes it"
    )


def _is_empty_file(path: Path) -> bool:
    status = os.lstat(path)
    return stat.S_ISREG(status.st_mode) and status.st_size == 0


def holds_only_ours(folder: Path) -> bool:
    """Return whether the folder holds only files of this project."""
    names = set(os.listdir(folder))
    if not names <= _MADE or (folder / DATA).is_symlink():
        return False
    return DATA not in names or set(os.listdir(folder / DATA)) <= set(_data_files(folder))


def remove_data(folder: Path) -> None:
    """Remove ``rows.json`` and the data files that it names. Other files stay."""
    for name in () if (folder / DATA).is_symlink() else _data_files(folder):
        with contextlib.suppress(OSError):
            (folder / DATA / name).unlink()
    with contextlib.suppress(OSError):
        (folder / DATA).rmdir()
    for name in (ROWS, _NEW_ROWS):
        with contextlib.suppress(OSError):
            (folder / name).unlink()


def _data_files(folder: Path) -> list[str]:
    try:
        leaves = json.loads(own_files.read_ours(folder / ROWS))["leaves"]
        names = [data_file(leaf["key"]) for leaf in leaves]
        stacks = [ColumnSpec.from_json(leaf) for leaf in leaves if leaf.get("stack")]
        names += [ring_file(column.ring) for column in stacks]
        return [*names, FRAMES_OF_CLAIMS] if stacks else names
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return []  # no rows.json, or its content is unknown


def clear(folder: Path) -> None:
    """Remove this project's files except the lock file. The caller holds the lock.

    If this function is interrupted, the next process that takes the lock calls it again, see
    :func:`is_being_removed`."""
    _clear(folder)
    (folder / _BEING_REMOVED).unlink(missing_ok=True)


def _clear(folder: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.replace(folder / HEADER, folder / _BEING_REMOVED)
    remove_data(folder)
    for name in (_LIMITER, PASS, *TABLES, _NEW_HEADER, CLAIM, FRAMES, _NEW_FRAMES):
        (folder / name).unlink(missing_ok=True)


def is_being_removed(folder: Path) -> bool:
    """Return whether a previous removal was interrupted."""
    return (folder / _BEING_REMOVED).exists() and not (folder / HEADER).exists()


def retire(folder: Path) -> Path | None:
    """Take a directory out of use. The caller holds its lock, and no other process uses it.

    The folder is renamed atomically, and the function returns the new path, for :func:`remove`. If
    the folder cannot be renamed (a mount point) or holds other files, only this project's files in
    it are removed, and the function returns None.
    """
    doomed = folder.with_name(f".{folder.name}.removed-{os.getpid()}")
    if holds_only_ours(folder):
        with contextlib.suppress(OSError):  # fails for a mount point, or in another user's folder
            os.rename(folder, doomed)
            return doomed
    clear(folder)
    (folder / LOCK).unlink()
    with contextlib.suppress(OSError):
        folder.rmdir()
    return None


def remove(doomed: Path) -> bool:
    """Remove this project's files in an unused folder, and the folder if it is then empty.

    Returns:
        Whether the folder was removed."""
    with contextlib.suppress(OSError):
        _clear(doomed)
        (doomed / LOCK).unlink(missing_ok=True)
        # last, because the header marks the folder as this project's
        (doomed / _BEING_REMOVED).unlink(missing_ok=True)
        doomed.rmdir()
    return not doomed.exists()


def half_removed(folder: Path) -> Iterator[Path]:
    """Yield the folders that :func:`retire` renamed from the path ``folder``, and that still exist
    because the process that removed them was killed."""
    name = re.compile(re.escape(f".{folder.name}.removed-") + r"\d+")
    for each in folder.parent.iterdir():
        if name.fullmatch(each.name):
            with contextlib.suppress(OSError):
                each.rmdir()  # the process that removed it was killed after removing the header
            if is_half_removed(each):
                yield each


def is_half_removed(folder: Path) -> bool:
    """Return whether :func:`retire` renamed the folder.

    A folder counts as renamed only if it belongs to this user and holds only this project's files,
    among them a header."""
    if re.fullmatch(r"\..+\.removed-\d+", folder.name) is None or not own_files.is_ours(folder):
        return False
    with contextlib.suppress(OSError, DirectoryError):
        if holds_only_ours(folder) and not _is_foreign_lock(folder / LOCK):
            name = HEADER if (folder / HEADER).exists() else _BEING_REMOVED
            return read_header(folder, name).capacity > 0
    return False


def _is_foreign_lock(path: Path) -> bool:
    return os.path.lexists(path) and not _is_empty_file(path)
