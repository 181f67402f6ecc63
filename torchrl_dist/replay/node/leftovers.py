"""Find the replay directories that jobs have left, judge their state, and remove useless ones."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchrl_dist import own_files
from torchrl_dist.errors import DirectoryError
from torchrl_dist.replay.node import files
from torchrl_dist.replay.node.lock import (
    MEMBER_BYTES,
    close_lock_file,
    is_held,
    lock_all,
    open_lock_file,
)
from torchrl_dist.replay.node.mapping import file_system_of, is_network_file_system
from torchrl_dist.replay.node.tables import MAX_MEMBERS, Word
from torchrl_dist.runtime.world import has_ended, is_of_this_boot

IN_USE = "in use"
LEFT = "left"
HALF_REMOVED = "half removed"
KEPT = "kept"
MAY_COME_BACK = "its job may come back"
DAMAGED = "damaged"

_SLURM_ANSWER_HOLDS_S, _SLURM_PATIENCE_S = 5.0, 10.0


@dataclass(frozen=True)
class Found:
    """A replay directory.

    Attributes:
        state: ``"in use"``: a process has it open. ``"left"``: no process has it open, and its job
            cannot be started again. ``"half removed"``: a process was killed while it removed the
            directory. ``"kept"``: it was built with ``keep=True``. ``"its job may come back"``: its
            launcher still runs, Slurm knows the job, or the user gave torchrun an id.
            ``"damaged"``.
        job_id: None if damaged or half removed.
        rows: number of published rows; None if damaged or half removed.
        bytes: size of its files.
        pids: processes that have it open.
    """

    path: Path
    state: str
    job_id: str | None
    rows: int | None
    bytes: int
    pids: tuple[int, ...] = ()

    def as_json(self) -> dict[str, Any]:
        return vars(self) | {"path": str(self.path), "pids": list(self.pids)}


def find(places: Sequence[Path]) -> Iterator[Found]:
    """Yield this user's replay directories among ``places`` and the folders in ``places``.

    The function also searches user folders that it finds there. It changes nothing."""
    for place in places:
        found = look(place)
        if found is not None:
            yield found
            continue
        with contextlib.suppress(OSError):
            for each in sorted(place.iterdir()):
                if (found := look(each)) is not None:
                    yield found
                elif own_files.is_user_folder(each):
                    yield from find([each])


def look(folder: Path) -> Found | None:
    """Return the facts about a replay directory, and change nothing.

    Returns:
        None if the folder is not this user's replay directory, or if another user could change
        it."""
    with contextlib.suppress(OSError):
        if not own_files.is_ours(folder):
            return None
        if files.is_half_removed(folder):
            return Found(folder, HALF_REMOVED, None, None, _size(folder))
        if not {files.LOCK, files.HEADER, files.TABLES[0]} <= set(os.listdir(folder)):
            return None
        try:
            with open(own_files.open_ours(folder / files.LOCK), "rb") as lock:
                return _judge(folder, lock.fileno())
        except (DirectoryError, own_files.NotOurs):
            return Found(folder, DAMAGED, None, None, _size(folder))
    return None


def _judge(folder: Path, fd: int) -> Found:
    header = files.read_header(folder)
    words, _, members = files.read_control(folder)
    pids: tuple[int, ...] = ()
    if is_held(fd, 0, MEMBER_BYTES + MAX_MEMBERS):
        state = IN_USE
        pids = tuple(
            int(members[i, 0]) for i in range(MAX_MEMBERS) if is_held(fd, MEMBER_BYTES + i)
        )
    elif words[Word.KEEP]:
        state = KEPT
    elif header.starter is not None and _has_ended_here(header, header.starter, folder):
        state = LEFT
    else:
        state = MAY_COME_BACK
    return Found(folder, state, header.job_id, int(words[Word.LENGTH]), _size(folder), pids)


def _has_ended_here(header: files.Header, starter: str, folder: Path) -> bool:
    """Return whether the starter of a directory has ended.

    Return False if the folder is on a network file system and the starter may be a process of
    another machine, because this machine cannot tell whether such a process has ended."""
    if starter == files.SLURM:
        # Slurm does not know a job that has ended and will not be started again
        known = _slurm_jobs(int(time.monotonic() // _SLURM_ANSWER_HOLDS_S))
        return known is not None and header.job_id.partition(".")[0] not in known
    if not is_of_this_boot(starter) and is_network_file_system(file_system_of(folder)[0]):
        return False
    return has_ended(starter)


@functools.lru_cache(maxsize=1)
def _slurm_jobs(at: int) -> frozenset[str] | None:
    """Return this user's jobs that Slurm knows, including those that wait for a restart.

    Returns:
        None if Slurm does not answer, or if its answer cannot be read."""
    if (command := shutil.which("squeue")) is None:
        return None
    query = [command, "--noheader", "--all", "--states=all", "--format=%A", f"--user={os.getuid()}"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=_SLURM_PATIENCE_S)
    except (OSError, subprocess.SubprocessError):
        return None
    known = frozenset(answer.stdout.split())
    own = os.environ.get("SLURM_JOB_ID")
    return known if answer.returncode == 0 and (own is None or own in known) else None


def _size(folder: Path) -> int:
    total = 0
    for each in folder.rglob("*"):
        with contextlib.suppress(OSError):
            total += each.lstat().st_blocks * 512
    return total


def remove(found: Found) -> bool:
    """Remove the directory's files, and the folder if it is then empty.

    A directory in use is kept. A damaged directory is kept, too, because its files are unknown.

    Returns:
        Whether the directory was removed."""
    if found.state in (IN_USE, DAMAGED):
        return False
    if found.state == HALF_REMOVED:
        return files.remove(found.path)
    try:
        fd = open_lock_file(found.path / files.LOCK)
    except OSError:
        return False
    try:
        # a process that opens the directory now waits for the lock, and then notices the removal
        if not lock_all(fd, MEMBER_BYTES + MAX_MEMBERS):
            return False
        now = os.stat(found.path / files.LOCK)
        if not os.path.samestat(now, os.fstat(fd)) or _job_of(found) != found.job_id:
            return False
        doomed = files.retire(found.path)
    except OSError:
        return False
    finally:
        close_lock_file(fd)
    return doomed is None or files.remove(doomed)


def _job_of(found: Found) -> str | None:
    """Return the job that the directory belongs to now."""
    try:
        return files.read_header(found.path).job_id
    except (OSError, DirectoryError):
        return None


def remove_leftovers(parent: Path, prefix: str) -> list[Found]:
    """Remove the directories in ``parent`` that dead jobs of this user left and whose names begin
    with ``prefix``."""
    removed = []
    with contextlib.suppress(OSError):
        for each in sorted(parent.iterdir()):
            name = each.name.removeprefix(".")
            if not name.startswith(prefix):
                continue
            found = look(each)
            if found is not None and found.state in (LEFT, HALF_REMOVED) and remove(found):
                removed.append(found)
    return removed
