"""Who may run beside whom, in a test run with several workers or several runs under one name."""

from __future__ import annotations

import contextlib
import fcntl
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

ALONE = "runs_alone"


def is_alone(test: str) -> bool:
    """Whether a test, by its name, runs while no other does: ``test_times[runs_alone]``."""
    return ALONE in test.partition("[")[2].rstrip("]").split("-")


class Turns:
    """Processes that name the same ``run`` take turns: any number of them, or one alone.

    Whoever wants to be alone keeps the door while those inside finish; without the door, others
    that come and go would overlap for ever.
    """

    def __init__(self, run: str, folder: str | None = None) -> None:
        stem = Path(folder or tempfile.gettempdir(), f"torchrl_dist-tests-{run}")
        self._door, self._room, self._users = (
            open(f"{stem}.{name}", "w") for name in ("door", "room", "users")
        )
        fcntl.flock(self._users, fcntl.LOCK_SH)

    @contextlib.contextmanager
    def take(self, *, alone: bool) -> Iterator[None]:
        """Wait for the turn, and have it. One thread at a time; whoever is inside has a deadline
        of its own."""
        with _locked(self._door, fcntl.LOCK_EX):
            fcntl.flock(self._room, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        try:
            yield
        finally:  # not left to closing: a child may have inherited the file
            fcntl.flock(self._room, fcntl.LOCK_UN)

    def close(self) -> None:
        """The last one removes the files."""
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
