"""What Linux reports about a process in ``/proc/PID/stat``."""

from __future__ import annotations

import os
from pathlib import Path

STATE, PARENT, USER, SYSTEM, START = 2, 3, 13, 14, 21  # indices into the result of :func:`stat`


def stat(pid: int) -> list[str] | None:
    """The words of ``/proc/PID/stat``, or None if there is no such process.

    This process and its parent are found even if ``/proc`` belongs to another pid namespace.
    """
    name = str(pid)
    if pid == os.getpid():
        name = "self"
    elif pid == os.getppid():
        own = stat(os.getpid())
        name = own[PARENT] if own else name
    try:
        # The second word is the command in parentheses. The command may contain any characters.
        head, _, tail = Path(f"/proc/{name}/stat").read_text(errors="replace").rpartition(")")
        return [head.split()[0], "", *tail.split()]
    except (OSError, IndexError):
        return None


def state(pid: int) -> str | None:
    """The letter that ``ps`` shows, such as ``"T"`` for stopped; None if there is no process."""
    words = stat(pid)
    return words[STATE] if words else None
