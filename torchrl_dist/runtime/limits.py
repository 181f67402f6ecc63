"""Check that this process's limits suffice for a job.

At a limit, C++ code would abort without naming the limit. The numbers below were measured with
torch 2.13:

- ``_OF_...``: the driver's descriptors for each process that it is connected to.
- ``_SESSION_...``: the other descriptors, in a session of two processes with the files of a
  recipe's run.
- ``_THREADS_...``: the threads of a process.

The numbers for several nodes are larger, because TensorPipe opens more connections for large
tensors between nodes.
"""

from __future__ import annotations

import os
import resource
from pathlib import Path

from ..errors import ConfigurationError
from . import proc

_OF_ONE_NODE, _OF_SEVERAL = 12, 40
_SESSION_OF_ONE_NODE, _SESSION_OF_SEVERAL = 60, 160
_THREADS_OF_ONE_NODE, _THREADS_OF_SEVERAL, _THREADS_ALONE = 14, 32, 7
# The descriptor limit is not raised above this number, because some programs close every descriptor
# up to the limit when they start, which takes long if the limit is high.
_MOST_RAISED = 1 << 16
_FAR_AWAY = 1 << 14


def descriptors_of(world_size: int, one_node: bool) -> int:
    """Return how many descriptors the driver may have open at once, including some for user
    code."""
    if world_size == 1:
        return _SESSION_OF_ONE_NODE
    if one_node:
        return _SESSION_OF_ONE_NODE + _OF_ONE_NODE * world_size
    return _SESSION_OF_SEVERAL + _OF_SEVERAL * world_size


def check_limits(
    world_size: int, *, one_node: bool, starts: int, driver: bool, launched: bool = False
) -> None:
    """Raise this process's soft limits to its hard limits, and refuse a job that exceeds the hard
    limits.

    Args:
        starts: how many processes of the job this process starts, including itself.
        driver: whether this process is connected to all other processes.
        launched: whether a launcher started this process. ``starts`` then counts all processes that
            the launcher starts on this machine. These processes make the check at about the same
            time. Therefore this function counts the threads that these processes will need, not the
            threads that they have now.

    Raises:
        ConfigurationError: a limit is too low; the message names the limit and the command that
            raises it.
    """
    needed = descriptors_of(world_size if driver else 2, one_node)
    if world_size == 1:
        needed = descriptors_of(1, one_node)
    # A third of the descriptors, those for large tensors and for the user's files, may never be
    # needed.
    least = len(os.listdir("/proc/self/fd")) + needed * 2 // 3
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MOST_RAISED if hard == resource.RLIM_INFINITY else min(hard, _MOST_RAISED)
    enough = least if world_size == 1 else most
    if soft != resource.RLIM_INFINITY and soft < min(enough, most):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit != resource.RLIM_INFINITY and limit < least:
        job = "a job of one process" if world_size == 1 else f"a job of {world_size} processes"
        raise ConfigurationError(
            f"this process may have {limit} files and sockets open, but in {job} it needs up to "
            f"{needed}; raise the limit before the start (ulimit -n {max(4096, needed)}; if this "
            "command is refused, the administrator must raise the hard limit)"
        )
    of_each = _THREADS_OF_ONE_NODE if one_node else _THREADS_OF_SEVERAL
    _check_threads(_THREADS_ALONE if world_size == 1 else starts * of_each, launched=launched)


def _check_threads(needed: int, *, launched: bool) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NPROC)
    if soft != hard and soft != resource.RLIM_INFINITY:
        resource.setrlimit(resource.RLIMIT_NPROC, (hard, hard))
    if os.getuid() == 0 or hard == resource.RLIM_INFINITY or hard > needed + _FAR_AWAY:
        return
    running = _threads_of(os.getuid(), but_children_of=os.getppid() if launched else None)
    if running + needed > hard:
        raise ConfigurationError(
            f"this user may have {hard} processes and threads, {running} are running, and this job "
            f"starts about {needed}; raise the limit before the start (ulimit -u "
            f"{max(4096, running + 2 * needed)}), or start fewer processes"
        )


def _threads_of(uid: int, *, but_children_of: int | None = None) -> int:
    """Count the threads of the user's processes, except children of process ``but_children_of``."""
    count = 0
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            try:
                if process.stat().st_uid != uid:
                    continue
                if but_children_of is not None:
                    words = proc.stat(int(process.name))
                    if words is None or int(words[proc.PARENT]) == but_children_of:
                        continue
                count += len(os.listdir(process / "task"))
            except OSError:  # the process ended meanwhile
                continue
    return count
