"""Decide which tests run at the same time, in runs with several workers or under one name."""

from __future__ import annotations

import contextlib
import fcntl
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

ALONE = "runs_alone"


def is_alone(test: str) -> bool:
    """Whether a test must run alone, which its name says: ``test_times[runs_alone]``."""
    return ALONE in test.partition("[")[2].rstrip("]").split("-")


class Turns:
    """Let processes with the same ``run`` take turns: any number at a time, or one alone.

    A process that wants to be alone locks the door while those inside finish. Without the door,
    others that come and go could overlap indefinitely.
    """

    def __init__(self, run: str, folder: str | None = None) -> None:
        stem = Path(folder or tempfile.gettempdir(), f"torchrl_dist-tests-{run}")
        self._door, self._room, self._users = (
            open(f"{stem}.{name}", "w") for name in ("door", "room", "users")
        )
        fcntl.flock(self._users, fcntl.LOCK_SH)

    @contextlib.contextmanager
    def take(self, *, alone: bool) -> Iterator[None]:
        """Wait for the turn and hold it. One thread at a time; what runs inside has a deadline."""
        with _locked(self._door, fcntl.LOCK_EX):
            fcntl.flock(self._room, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        try:
            yield
        finally:  # closing is not enough, because a child may have inherited the file
            fcntl.flock(self._room, fcntl.LOCK_UN)

    def close(self) -> None:
        """Remove the files, as the last one."""
        files = (self._door, self._room, self._users)
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(self._users, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for file in files:
                Path(file.name).unlink(missing_ok=True)
        for file in files:
            file.close()


@contextlib.contextmanager
def _locked(file: IO[str], how: int) -> Iterator[None]:
    fcntl.flock(file, how)
    try:
        yield
    finally:
        fcntl.flock(file, fcntl.LOCK_UN)
