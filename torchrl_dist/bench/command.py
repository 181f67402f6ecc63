"""What the commands of all benchmarks share: options, folders that are cleared, an end in order."""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from torchrl_dist.errors import ConfigurationError

_REMOVAL_S = 5.0


def names(known: Sequence[str]) -> Callable[[str], list[str]]:
    """Parse ``a,b`` where both are known."""

    def parse(text: str) -> list[str]:
        chosen = [name for name in text.split(",") if name]
        unknown = [name for name in chosen if name not in known]
        if unknown or not chosen:
            raise argparse.ArgumentTypeError(f"got {text!r}, expected some of {','.join(known)}")
        return chosen

    return parse


def counts(text: str) -> list[int]:
    """Parse ``1,2`` of numbers above 0."""
    chosen = [int(number) for number in text.split(",")]
    if min(chosen) < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected numbers above 0")
    return chosen


def above_zero(kind: type) -> Callable[[str], Any]:
    """Parse a number above 0."""

    def parse(text: str) -> Any:
        if kind(text) <= 0:
            raise argparse.ArgumentTypeError(f"got {text!r}, expected a number above 0")
        return kind(text)

    return parse


@contextlib.contextmanager
def folder_in(parent: Path) -> Iterator[Path]:
    """A folder for one measurement, removed afterwards, also if Ctrl-C comes in this function.

    Its name is short: Ray adds 63 characters, and a socket's path may have 107.
    """
    stops = {signal.SIGINT, signal.SIGTERM}
    try:
        signal.pthread_sigmask(signal.SIG_BLOCK, stops)
        folder = Path(tempfile.mkdtemp(prefix=f"torchrl-bench-{os.getpid()}-", dir=parent))
        try:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, stops)  # what came meanwhile raises here
            yield folder
        finally:
            try:
                signal.pthread_sigmask(signal.SIG_BLOCK, stops)
            finally:
                _remove(folder)
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, stops)


def _remove(folder: Path) -> None:
    """Remove it although processes that were killed a moment ago may still write to it."""
    deadline = time.monotonic() + _REMOVAL_S
    while folder.exists() and time.monotonic() < deadline:
        shutil.rmtree(folder, ignore_errors=True)
        time.sleep(0.01)


class TerminatedError(BaseException):
    """SIGTERM arrived."""


@contextlib.contextmanager
def terminable() -> Iterator[None]:
    """Let SIGTERM and SIGINT unwind the stack, so that processes and folders are cleared.

    SIGINT does so by itself, but is ignored in what a shell script started with ``&``.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def terminate(*_: object) -> None:
        raise TerminatedError

    before = {
        signal.SIGTERM: signal.signal(signal.SIGTERM, terminate),
        signal.SIGINT: signal.signal(signal.SIGINT, signal.default_int_handler),
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def until_stopped(measure: Callable[[], int]) -> int:
    """Call ``measure``; what it has found so far stays usable when a signal ends it.

    Returns:
        What ``measure`` returns, or 130 or 143 after SIGINT or SIGTERM.
    """
    try:
        with terminable():
            return measure()
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except TerminatedError:
        return 128 + signal.SIGTERM


def check_folders(lines: Path | None, picture: Path | None = None) -> None:
    """Refuse files to write that have no folder, before anything is measured.

    Lines are appended to what a file holds; a picture takes the place of another picture only.

    Raises:
        ConfigurationError: naming the first of them.
    """
    for path in (lines, picture):
        if path is not None and not path.absolute().parent.is_dir():
            raise ConfigurationError(f"{path}: there is no folder {path.absolute().parent}")
    if picture is not None and picture.is_file() and picture.stat().st_size:
        with picture.open("rb") as file:
            if not file.read(8).startswith((b"\x89PNG", b"%PDF", b"<?xml")):
                raise ConfigurationError(
                    f"{picture} is there and no picture: choose another file, or remove it"
                )


def say(text: str) -> None:
    """Print to stderr."""
    print(text, file=sys.stderr, flush=True)
