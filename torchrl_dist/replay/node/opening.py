"""Create, join or refuse a replay directory, and close it."""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import shlex
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from torchrl_dist import own_files
from torchrl_dist.errors import ConfigurationError, DirectoryError
from torchrl_dist.replay.law.tree import tree_bytes
from torchrl_dist.replay.node import files
from torchrl_dist.replay.node.directory import (
    LOCKS,
    OPEN,
    ReplayDirectory,
    leave_at_exit,
    once,
)
from torchrl_dist.replay.node.files import Header, damaged, read_header
from torchrl_dist.replay.node.lock import (
    close_lock_file,
)
from torchrl_dist.replay.node.mapping import (
    allocate,
    map_file,
    refuse_network_file_system,
    write_json,
)
from torchrl_dist.replay.node.tables import (
    CLAIM_COUNT,
    CLAIM_DISCARDED,
    CLAIM_FIRST,
    CLAIM_MEMBER,
    CLAIM_STATE,
    COUNTERS,
    JOURNAL_ENTRIES,
    LARGEST_COUNT,
    MAX_CLAIMS,
    MAX_MEMBERS,
    Word,
    control_bytes,
)
from torchrl_dist.runtime.signals import say

_AT_LEAST_0 = (
    Word.CURSOR, Word.WRITE_COUNT, Word.NEXT_WRITE_COUNT, Word.SAMPLED,
    Word.MIN_SIZE_TO_SAMPLE, Word.MAX_TIMES_SAMPLED, Word.RANKED, Word.OLDEST_COLUMN,
    *COUNTERS.values(),
)  # fmt: skip


def no_repair(directory: ReplayDirectory) -> None:
    directory.commit()


def open_directory(
    path: str | os.PathLike[str],
    capacity: int,
    *,
    job_id: str | None = None,
    resume: bool = False,
    keep: bool = False,
    timeout_s: float = 60.0,
    repair: Callable[[ReplayDirectory], None] = no_repair,
    identity: int | None = None,
) -> ReplayDirectory:
    """Create the directory or join it. All storages of a process on it share one view, which this
    function returns.

    Args:
        path: folder on a local file system, preferably in ``/dev/shm`` or on a fast local disk. It
            must be new, empty, or created by a buffer. Symbolic links are resolved once. A new
            folder gets mode 0700. An existing folder must belong to this user, and no other user
            may write to it.
        capacity: number of slots of the ring, the same in every process.
        job_id: processes with the same id belong together. Default: torchrun's run id, SLURM's
            job id, or this process's own id.
        resume: take over a directory that an earlier job left, with its rows.
        keep: keep the directory when the last process closes it.
        timeout_s: longest wait for the lock, in seconds.
        repair: the function that repairs the state after a holder of the lock was killed. The
            module ``cursor`` passes it.
        identity: join only the directory with this identity; never create one.

    Raises:
        ConfigurationError: the path or the capacity is invalid.
        DirectoryError: the directory is in use by another job, was left by another job (without
            ``resume``), has another capacity or format, is damaged, is on a network file system,
            holds foreign files, belongs to another user, or cannot be written. The directory
            was not changed.
        DeadlineError: the lock was not free in time.
    """
    if capacity < 1:
        raise ConfigurationError(f"capacity must be at least 1 row, got {capacity}")
    if os.fspath(path) in ("", "."):
        raise ConfigurationError(
            f"scratch_dir={os.fspath(path)!r}: expected a folder for this buffer alone, because "
            "the last process that uses the buffer removes the folder; name a folder, and check "
            "that no variable in the path is unset"
        )
    job = default_job_id() if job_id is None else str(job_id)
    try:
        folder = own_files.resolved(os.fsdecode(path))
    except OSError as error:
        raise _unusable(os.fsdecode(path), error) from error
    refuse_network_file_system(folder)
    asked = _Asked(folder, capacity, job, resume, timeout_s, repair, identity)
    refused = False
    with once(LOCKS.opening):
        for _ in range(100):
            found = _attempt(asked)
            if isinstance(found, ReplayDirectory):
                found.sharers += 1
                if keep:
                    found.words[Word.KEEP] = 1
                return found
            if found is None:
                continue
            if refused:
                if asked.made:
                    with contextlib.suppress(OSError):
                        folder.rmdir()
                raise found
            refused = True  # try again: another process may be making or removing the folder
            time.sleep(0.01)
        raise DirectoryError(
            f"other processes removed {folder} repeatedly while this process was opening it; try "
            "again, or choose another scratch_dir"
        )


@dataclass
class _Asked:
    """The arguments of :func:`open_directory`. ``made``: whether this call created the folder."""

    folder: Path
    capacity: int
    job: str
    resume: bool
    timeout_s: float
    repair: Callable[[ReplayDirectory], None]
    identity: int | None
    made: bool = False


def _attempt(asked: _Asked) -> ReplayDirectory | DirectoryError | None:
    """Return the directory, or the reason to refuse it at this moment.

    Returns:
        None if the directory's last member has just removed it."""
    folder = asked.folder
    try:
        if asked.identity is None:
            asked.made |= own_files.make_folder(folder)
        else:
            own_files.check_folder(folder)
        view = _joined_view(asked)
        if view is None:
            files.check_ours(folder)
            view = _join(asked)
        return view
    except FileNotFoundError as error:
        if asked.identity is not None:
            raise _gone(folder) from error
        return None
    except DirectoryError as error:
        return error
    except (TimeoutError, ConnectionError):
        raise
    except OSError as error:
        raise _unusable(folder, error) from error


def _unusable(folder: str | Path, error: OSError) -> DirectoryError:
    if isinstance(error, own_files.NotOurs):
        return DirectoryError(
            f"{error}: another user could read or change the rows of a buffer there; choose "
            "another scratch_dir"
        )
    if isinstance(error, FileExistsError | NotADirectoryError):
        return DirectoryError(
            f"{error.filename or folder} is not a folder; choose another scratch_dir"
        )
    return DirectoryError(
        f"{folder} cannot be used as a replay directory: {error}; free space there or permit "
        "writing to it, or choose another scratch_dir"
    )


def close_directory(directory: ReplayDirectory, *, clean: bool = True) -> None:
    """End one use of the view. When the last use in the process ends, the process leaves the
    directory.

    Raises:
        DeadlineError, DirectoryError: the process cannot leave, see ``leave``. Nothing has changed.
    """
    with once(LOCKS.opening):
        if directory.sharers == 1:
            directory.leave(clean)
            for key, view in list(OPEN.items()):
                if view is directory:
                    del OPEN[key]
        directory.sharers -= 1


def default_job_id() -> str:
    """Return the launcher's id of this job (torchrun, SLURM), or this process's own id."""
    from torchrl_dist.runtime.world import World

    return World.from_env().job_id


def _starter_of(job_id: str) -> str | None:
    """Return the process without which the job cannot be restarted, see ``World.starter``."""
    from torchrl_dist.runtime.world import World, is_of_this_boot, is_stamp

    if is_stamp(job_id) and is_of_this_boot(job_id):
        return job_id
    with contextlib.suppress(ConfigurationError):
        world = World.from_env()
        if world.launcher == "slurm" and world.job_id == job_id:
            return files.SLURM
        # If ``job_id`` is the stamp of a process of another machine, take a local process instead,
        # because the other process cannot be seen here.
        return world.starter if is_stamp(job_id) or world.job_id == job_id else None
    return None


def _gone(folder: Path) -> DirectoryError:
    return DirectoryError(
        f"the rows of this copy of the buffer are gone, because {folder} was removed or replaced; "
        "a pickle of a buffer has only the path of the rows, not the rows. Load a pickle while a "
        "process has the buffer open, build the buffer with keep=True, or save rows with "
        "buffer.dumps(path)"
    )


def _check_identity(view: ReplayDirectory, identity: int | None) -> None:
    if identity not in (None, view.identity):
        raise _gone(view.path)


def _joined_view(asked: _Asked) -> ReplayDirectory | None:
    status = asked.folder.stat()
    view = OPEN.get((status.st_dev, status.st_ino))
    if view is None or view.fair_lock.closed:
        return None
    if view.pid != os.getpid():
        try:
            # use the parent's view, because a second view would be a second member
            view.join_after_fork()
        except DirectoryError:  # another directory has this path now
            return None
    _check_identity(view, asked.identity)
    _check_capacity(view, asked.capacity)
    if view.job_id != asked.job:
        raise DirectoryError(
            f"this process has already opened {asked.folder} for job {view.job_id!r}, so it cannot "
            f"open this folder for job {asked.job!r}; pass the same job_id, or choose another "
            "scratch_dir"
        )
    return view


def _check_capacity(view: ReplayDirectory, capacity: int) -> None:
    if view.capacity != capacity:
        raise DirectoryError(
            f"{view.path} holds a buffer of capacity {view.capacity}, but capacity {capacity} was "
            "asked for; pass the capacity of that buffer, or choose another scratch_dir"
        )


def _join(asked: _Asked) -> ReplayDirectory | None:
    folder = asked.folder
    view = ReplayDirectory(folder, asked.capacity, asked.job, asked.timeout_s, asked.repair)
    view.open_lock(os.O_CREAT if asked.identity is None else 0)
    joined = False
    try:
        with view.fair_lock:
            if not view.is_at_path():
                return None  # the last member removed the folder during the wait
            if files.is_being_removed(folder):
                files.clear(folder)  # a process was killed while it removed the files
            try:
                header = read_header(folder)
            except FileNotFoundError:
                if asked.identity is not None:
                    raise
                header = _create_files(folder, asked.capacity, asked.job)
            _adopt(view, header, asked)
            view.take_member_byte()
            joined = True
    finally:
        if not joined:
            close_lock_file(view.lock_fd)
    status = os.stat(folder)
    OPEN[(status.st_dev, status.st_ino)] = view
    leave_at_exit()
    return view


def _adopt(view: ReplayDirectory, header: Header, asked: _Asked) -> None:
    """Check that the directory is undamaged and usable, then repair it. Called under the lock.

    A directory that is refused stays unchanged.
    """
    view.capacity = header.capacity
    if asked.identity is None:
        _check_capacity(view, asked.capacity)
    view.map_state()
    _check_identity(view, asked.identity)
    alive = view.live_members()
    other_job = header.job_id != view.job_id
    if other_job and alive:
        pids = [view.pid_of(member) for member in alive]
        raise DirectoryError(
            f"{view.path} is in use by job {header.job_id!r} (processes {pids}), but this process "
            f"belongs to job {view.job_id!r}; choose another scratch_dir, or pass the same job_id "
            "to processes that belong together"
        )
    if other_job and not asked.resume and view.words[Word.WRITE_COUNT]:
        raise DirectoryError(
            f"{view.path} was left by job {header.job_id!r} with {view.length} rows; pass "
            "resume=True to continue with these rows, choose another scratch_dir, or remove the "
            f"folder (torchrl-dist clean {shlex.quote(str(view.path))} --remove)"
        )
    if found := _what_is_wrong(view, bool(alive)):
        raise damaged(view.path, found)
    if view.words[Word.ROWS_READY]:
        view.map_rows()
    if other_job:
        new = Header(header.capacity, view.job_id, _starter_of(view.job_id))
        write_json(view.path / files.HEADER, new.as_json())
    if not view.words[Word.IDENTITY]:  # made by a version of torchrl_dist without identities
        view.words[Word.IDENTITY] = _new_identity()
    if not alive:
        view.words[Word.INTERRUPTED] = 0
        view.members[:] = 0
        view.words[Word.DIRTY] = 1
    if view.words[Word.DIRTY]:
        view.repair(view)
    if view.length and not alive:
        whose = "another" if other_job else "an earlier start of this"
        say(
            f"torchrl_dist: the buffer in {view.path} continues with {view.length} rows of {whose} "
            "job"
        )


def _what_is_wrong(view: ReplayDirectory, alive: bool) -> str | None:
    """Return a description of an impossible value in the tables, or None. Changes nothing.

    Called under the lock. A killed holder may have changed only some values, so each value is
    checked on its own. Tables with an entry per row are checked only if no process uses the
    directory. Processes that use it would notice damage in these tables themselves.
    """
    words, claims, capacity = view.words, view.claims, view.capacity
    ranges = dict.fromkeys(_AT_LEAST_0, (0, LARGEST_COUNT)) | {
        Word.BASE: (-capacity, words[Word.CURSOR]),
        Word.JOINS: (0, LARGEST_COUNT // MAX_MEMBERS),
        Word.ROWS_READY: (0, 1),
        Word.ALPHA_SET: (0, 1),
        Word.MAX_SLOT: (-1, capacity - 1),
        Word.CLAIM_ROWS: (0, MAX_CLAIMS),
        Word.LIMITED: (0, 2),
        Word.RESCALING: (0, 1),
        Word.EMPTYING: (0, 2),
        Word.IN_PLACE: (0, capacity),
        Word.JOURNAL: (0, JOURNAL_ENTRIES),
    }
    if alive and not words[Word.DIRTY]:  # otherwise repair counts the rows again
        ranges[Word.LENGTH] = (0, capacity)
    for word, (low, high) in ranges.items():
        if not low <= words[word] <= high:
            return f"{word.name} in control.bin is {words[word]}, expected {low} to {high}"
    for at in range(words[Word.JOURNAL]):
        if not 0 <= words[Word.JOURNAL + 1 + 2 * at] < view.cell(MAX_MEMBERS, 0):
            return "its journal names a word of shared memory that does not exist"
    for word in (Word.ALPHA, Word.NEXT_ALPHA, Word.EPS, Word.SAMPLES_PER_INSERT, Word.ERROR_BUFFER):
        if not 0 <= view.floats[word] < math.inf:
            return (
                f"{word.name} in control.bin is {view.floats[word]}, expected a finite number of "
                "at least 0"
            )
    if not (view.floats[Word.MAX_PRIORITY] >= 0 or math.isnan(view.floats[Word.MAX_PRIORITY])):
        return (
            f"{Word.MAX_PRIORITY.name} in control.bin is {view.floats[Word.MAX_PRIORITY]}, "
            "expected NaN or a number of at least 0"
        )
    used = claims[claims[:, CLAIM_COUNT] != 0]
    if used.size and not (
        0 < used[:, CLAIM_COUNT].min() <= used[:, CLAIM_COUNT].max() <= capacity
        and 0 <= used[:, CLAIM_FIRST].min() <= used[:, CLAIM_FIRST].max() <= LARGEST_COUNT
        and 0 <= used[:, CLAIM_MEMBER].min()
        and 0 <= used[:, CLAIM_STATE].min() <= used[:, CLAIM_STATE].max() <= CLAIM_DISCARDED
    ):
        return "the record of a write names slots that the buffer does not have"
    if view.members.min() < 0:
        return "its table of processes has a negative number"
    if alive:
        return None
    if view.versions.min() < 0:
        return "a row has a negative version"
    signed = words[Word.RESCALING]  # while alpha changes, converted leaves are negative
    if not (np.isfinite(view.tree.leaves) & ((view.tree.leaves >= 0) | bool(signed))).all():
        return "a priority is negative or not finite"
    return None


def _new_identity() -> int:
    return secrets.randbits(62) | 1


def _create_files(folder: Path, capacity: int, job: str) -> Header:
    """Create the files. Called under the lock.

    The header comes last, because a process that finds no header creates all files again."""
    try:
        files.check_ours(folder)  # other files may have appeared since the first check
    except DirectoryError:
        (folder / files.LOCK).unlink()
        raise
    with contextlib.suppress(OSError):  # raised if the parent folder cannot be listed
        for doomed in list(files.half_removed(folder)):
            files.remove(doomed)
    header = Header(capacity, job, _starter_of(job))
    try:
        for name, size in zip(
            files.TABLES, (control_bytes(), 8 * capacity, tree_bytes(capacity)), strict=True
        ):
            allocate(folder / name, size)
        control = map_file(folder / files.TABLES[0], control_bytes())
        words = np.frombuffer(control, dtype=np.int64)
        words[Word.MAX_SLOT] = -1
        words[Word.IDENTITY] = _new_identity()
        words.view(np.float64)[Word.MAX_PRIORITY] = np.nan
        write_json(folder / files.HEADER, header.as_json())
    except OSError as error:
        files.clear(folder)
        (folder / files.LOCK).unlink()
        raise DirectoryError(
            f"could not allocate the tables of a buffer of {capacity} rows in {folder}: {error}; "
            "free space there, or choose another scratch_dir"
        ) from error
    return header
