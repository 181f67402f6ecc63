"""Helpers for all benchmark commands: options, temporary folders, rounds, handling of signals."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from torchrl_dist import own_files
from torchrl_dist.errors import ConfigurationError, TorchRLDistError
from torchrl_dist.stopping import handling
from torchrl_dist.ui import above_zero

MEMORY = Path("/dev/shm")
_REMOVAL_S = 5.0

_Case = TypeVar("_Case")
_Result = TypeVar("_Result")


def describe(parser: argparse.ArgumentParser, text: str | None, run: Callable[..., int]) -> None:
    """Set the command's function and description. ``--help`` keeps the text's line breaks."""
    parser.description = text
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.set_defaults(command=run)


def add_figures(
    parser: argparse.ArgumentParser,
    *,
    rounds: int | None = None,
    seconds: float | None = None,
    timeout_s: float | None = None,
    timed: str = "measurement",
    line_per: str = "result",
    plot: str | None = None,
    scratch: bool = False,
) -> None:
    """Add options for rounds, durations and output files.

    ``rounds``, ``seconds`` and ``timeout_s`` are the defaults of their options. An option whose
    default is None is left out.
    """
    if rounds is not None:
        add_number(parser, "--rounds", int, rounds)
    if seconds is not None:
        add_number(parser, "--seconds", float, seconds, "per measurement")
    if timeout_s is not None:
        add_number(parser, "--timeout-s", float, timeout_s, f"longest duration of {timed}")
    parser.add_argument("--json", type=Path, metavar="FILE", help=f"append one line per {line_per}")
    if plot is not None:
        parser.add_argument("--plot", type=Path, metavar="FILE.png", help=f"plot the {plot}")
    if scratch:
        text = "folder for buffers during a measurement (default: /dev/shm)"
        parser.add_argument("--scratch-dir", type=Path, default=MEMORY, help=text)


def add_number(
    parser: argparse.ArgumentParser, option: str, kind: type, default: Any, text: str = ""
) -> None:
    """Add an option for a number above 0. If ``default`` is None, ``text`` must say what happens
    without the option."""
    if default is not None:
        text = f"{text} (default: {default if kind is int else format(default, 'g')})".lstrip()
    parser.add_argument(option, type=above_zero(kind), default=default, help=text)


def add_list(
    parser: argparse.ArgumentParser,
    option: str,
    kind: Callable[[str], Any],
    default: str | None,
    text: str,
    metavar: str = "N,M",
) -> None:
    """Add an option for comma-separated values. ``kind`` parses each value."""

    def parse(values: str) -> list[Any]:
        return [kind(value) for value in values.split(",")]

    if default is not None:
        text += f" (default: {default})"
    parser.add_argument(option, type=parse, default=default, metavar=metavar, help=text)


def add_counts(
    parser: argparse.ArgumentParser, option: str, default: str | None, text: str
) -> None:
    """Add an option for comma-separated whole numbers above 0."""
    add_list(parser, option, above_zero(int), default, text)


def add_names(
    parser: argparse.ArgumentParser, option: str, known: Collection[str], text: str | None = None
) -> None:
    """Add an option that selects some of the ``known`` names. The default is all names."""
    text = (text or f"some of {','.join(known)}") + " (default: all)"
    parser.add_argument(option, type=names(known), default=[*known], metavar="A,B", help=text)


def names(known: Collection[str]) -> Callable[[str], list[str]]:
    """Return a parser for comma-separated names from ``known``."""

    def parse(text: str) -> list[str]:
        chosen = [name for name in text.split(",") if name]
        unknown = [name for name in chosen if name not in known]
        if unknown or not chosen:
            raise argparse.ArgumentTypeError(
                f"got {text!r}, expected one or more of {','.join(known)}"
            )
        return chosen

    return parse


def available(peers: Iterable[str], missing: Callable[[str], str | None]) -> list[str]:
    """Return the peers that can be measured here. Print why the others are skipped.

    Raises:
        ConfigurationError: no peer can be measured here.
    """
    reasons = {peer: missing(peer) for peer in peers}
    for peer, reason in reasons.items():
        if reason is not None:
            say(f"skipped {peer}: {reason}")
    found = [peer for peer, reason in reasons.items() if reason is None]
    if not found:
        raise ConfigurationError(
            "none of the peers can be measured here: see above for the reasons"
        )
    return found


class _Held:
    """Delays SIGINT and SIGTERM that arrive after :meth:`begin`. :meth:`end` then raises them.

    Blocking the signals would not be enough, because another thread could receive the signal.
    Python would then run the handler in the main thread anyway.
    """

    def __init__(self) -> None:
        self._handlers: dict[int, Any] = {}
        self._noted: set[int] = set()

    def begin(self) -> None:
        if threading.current_thread() is threading.main_thread():  # others cannot set handlers
            for number in (signal.SIGINT, signal.SIGTERM):
                self._handlers[number] = signal.signal(number, self._note)

    def end(self) -> None:
        """Restore the handlers, and raise delayed signals. May be called repeatedly."""
        while self._handlers:
            signal.signal(*self._handlers.popitem())
        while self._noted:
            signal.raise_signal(self._noted.pop())

    def _note(self, number: int, _: Any) -> None:
        self._noted.add(number)


@contextlib.contextmanager
def folder_in(parent: Path) -> Iterator[Path]:
    """Yield a folder for one measurement, and remove it afterwards, even after Ctrl-C.

    The folder's name is short, because Ray appends 63 characters to make the path of a socket, and
    such a path may have at most 107 characters.
    """
    held = _Held()
    try:
        held.begin()
        folder = Path(tempfile.mkdtemp(prefix=f"torchrl-bench-{os.getpid()}-", dir=parent))
        try:
            held.end()
            yield folder
        finally:
            try:
                held.begin()
            finally:
                _remove(folder)
    finally:
        held.end()


def _remove(folder: Path) -> None:
    """Remove a folder, even if processes that were just killed still write to it."""
    deadline = time.monotonic() + _REMOVAL_S
    while folder.exists() and time.monotonic() < deadline:
        shutil.rmtree(folder, ignore_errors=True)
        time.sleep(0.01)


def in_rounds(
    rounds: int,
    groups: Sequence[Sequence[_Case]],
    parent: Path,
    measure: Callable[..., _Result],
    found: dict[_Case, list[_Result]],
    tell: Callable[[_Case, _Result], str],
    *,
    arguments: Callable[[_Case], tuple[Any, ...]] = lambda case: (case,),
    timeout_s: Callable[[Any], float] = lambda case: case.timeout_s,
    environment: Callable[[Any], Mapping[str, str]] = lambda case: {},
    label: Callable[[_Case], str] = str,
) -> int:
    """Measure each case once per round. Each time, start a process with a new folder in ``parent``.

    The order within a group rotates, so that no case is always first. If a case fails, the reason
    is printed, and later rounds leave the case out. A signal ends the measurements.

    Args:
        measure: called in the new process, with the case's ``arguments`` and the folder.
        found: collects the results of each case, one per round.
        tell: returns what to print about a result.
        timeout_s, environment: return the time limit and the variables of the new process.

    Returns:
        0; 1 if a case failed; 130 or 143 after SIGINT or SIGTERM.
    """
    from torchrl_dist.bench.processes import Launcher

    failed: set[_Case] = set()

    def measure_one(launcher: Launcher, case: _Case) -> str:
        with folder_in(parent) as folder:
            result = launcher.run(
                measure, *arguments(case), str(folder), folder=folder, timeout_s=timeout_s(case),
                environment=environment(case),
            )  # fmt: skip
        found.setdefault(case, []).append(result)
        return tell(case, result)

    def measure_all() -> int:
        with Launcher() as launcher:
            for round_, group in itertools.product(range(rounds), groups):
                shift = round_ % max(1, len(group))
                for case in [*group[shift:], *group[:shift]]:
                    if case in failed:
                        continue
                    try:
                        told = measure_one(launcher, case)
                    except TorchRLDistError as error:
                        failed.add(case)
                        told = f"failed: {error}"
                    say(f"round {round_ + 1}: {label(case)}: {told}")
        return 1 if failed else 0

    return until_stopped(measure_all)


class TerminatedError(BaseException):
    """SIGTERM arrived."""


def until_stopped(measure: Callable[[], int]) -> int:
    """Call ``measure``. Return after a signal, too, so that the caller can show the results so far.

    Meanwhile, SIGINT and SIGTERM raise exceptions, so that processes and folders are cleaned up. By
    default, only SIGINT does, and a process that a shell script started with ``&`` ignores even
    SIGINT.

    Returns:
        The result of ``measure``, or 130 or 143 after SIGINT or SIGTERM.
    """

    def terminate(*_: object) -> None:
        raise TerminatedError

    try:
        with handling({signal.SIGTERM: terminate, signal.SIGINT: signal.default_int_handler}):
            return measure()
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except TerminatedError:
        return 128 + signal.SIGTERM


def check_folders(lines: Path | None, picture: Path | None = None) -> None:
    """Check, before anything is measured, that the output files can be written.

    Their folders must exist. If the file ``lines`` exists, lines are appended to it. If the file
    ``picture`` exists, it must be empty or an image (PNG, PDF or SVG).

    Raises:
        ConfigurationError: a file cannot be written. The error names the first such file.
    """
    for path in (lines, picture):
        if path is not None and not path.absolute().parent.is_dir():
            raise ConfigurationError(
                f"{path}: there is no folder {path.absolute().parent}: make it, or choose another "
                "folder"
            )
    if lines is not None and os.path.lexists(lines):
        try:
            own_files.open_named(lines, append=True).close()
        except OSError as error:
            raise ConfigurationError(
                f"cannot append to {lines} ({error}): choose another file"
            ) from error
    if picture is not None and picture.is_file() and picture.stat().st_size:
        with picture.open("rb") as file:
            if not file.read(8).startswith((b"\x89PNG", b"%PDF", b"<?xml")):
                raise ConfigurationError(
                    f"{picture} exists and is not an image (PNG, PDF or SVG): choose another file, "
                    "or remove this one"
                )


def check_memory() -> None:
    """Check that the folder for rows in memory exists."""
    if not MEMORY.is_dir():
        raise ConfigurationError(f"there is no {MEMORY} to keep the rows in: mount a tmpfs there")


def say(text: str) -> None:
    """Print to stderr."""
    print(text, file=sys.stderr, flush=True)
