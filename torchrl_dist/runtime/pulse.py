"""A job's counts in a small file for ``torchrl-dist top``, and warnings about stalls.

The process of the learner keeps the counts in memory. Once a second, a thread writes them to this
user's folder in /dev/shm. If a process makes no progress for a minute, the thread warns once, and
says what that process waits for. ``top`` reads the file without a lock, so it does not delay the
job.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import FrameType
from typing import Any

from .. import own_files
from . import proc
from .peer import Peer
from .session import Session
from .world import has_ended, is_stamp, process_stamp

PREFIX = "pulse-"
FORMAT = 1
PATIENCE_S = 60.0
_EVERY_S = 1.0
_ANSWER_S = 3.0
_FRAMES = 3  # number of stack frames that a warning shows, starting with the innermost
# A warning leaves out the innermost stack frames of these modules, and begins with their caller.
_LIBRARIES = sys.stdlib_module_names | {"numpy", "tensordict", "torch", "torchrl"}
_numbers = itertools.count()
_log = logging.getLogger("torchrl_dist")


class Progress:
    """Find out which processes make no progress. This class reads no clock, because counts and
    times are passed in.

    A process is reported once, and again only if it has made progress since.
    """

    def __init__(self, patience_s: float = PATIENCE_S) -> None:
        self.patience_s = patience_s
        self._seen: dict[str, tuple[int, float]] = {}
        self._told: set[str] = set()

    def stalled(self, counts: Mapping[str, int], now: float) -> list[str]:
        """Return unreported names whose count has not changed for ``patience_s``."""
        for name, count in counts.items():
            if name not in self._seen or self._seen[name][0] != count:
                self._seen[name] = (count, now)
                self._told.discard(name)
        late = [
            name
            for name in counts
            if name not in self._told and now - self._seen[name][1] >= self.patience_s
        ]
        self._told.update(late)
        return late

    def excuse(self, names: Sequence[str], seconds: float) -> None:
        """Do not count the last ``seconds`` as a stall of ``names``, because their progress was not
        visible then."""
        for name in names:
            if name in self._seen:
                count, since = self._seen[name]
                self._seen[name] = (count, since + seconds)


class Pulse:
    """Writes the file and the warnings of one collector, in the process that takes its batches.

    The thread that takes the batches calls ``waits``, ``took`` and ``close``. Calls of ``waits``
    and ``took`` are cheap.

    Args:
        workers: the collector's workers, by index; empty if this process steps the environments.
        figures: returns plain values for the file; called in the writing thread.
    """

    def __init__(
        self,
        session: Session,
        workers: Sequence[Peer],
        figures: Callable[[], dict[str, Any]],
        *,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self._session = weakref.ref(session)
        self._workers = tuple(workers)
        self._figures = weakref.WeakMethod(figures)
        self._progress = Progress(patience_s)
        self._pid = os.getpid()
        self._caller: int | None = None
        self._waiting_since: float | None = None
        self._batches = self._known = 0
        self._looked = time.monotonic()
        self._frames: dict[int, int] = {}
        self._started = time.time()
        self._end = threading.Event()
        self._thread: threading.Thread | None = None
        self._name = f"{PREFIX}{process_stamp(self._pid)}-{next(_numbers)}.json"
        self.path: Path | None = None  # where the file was last written

    def waits(self) -> None:
        """Record that the caller is about to block for a batch."""
        self._caller = threading.get_ident()
        self._waiting_since = time.time()
        if self._thread is None and not self._end.is_set():
            remove_pulses_of_the_dead()
            thread = threading.Thread(target=self._run, name="torchrl_dist-pulse", daemon=True)
            thread.start()
            # Assigned after the start, because Ctrl-C may come before the start, and close() can
            # join only a started thread.
            self._thread = thread

    def took(self, frames_by_worker: Mapping[int, int]) -> None:
        """Record that the caller has got a batch. ``frames_by_worker`` has all frames so far, by
        worker index."""
        self._waiting_since = None
        self._batches += 1
        self._frames = dict(frames_by_worker)

    def close(self) -> None:
        """Remove the file; idempotent."""
        self._end.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_ANSWER_S)

    def _run(self) -> None:
        try:
            while not self._end.wait(_EVERY_S):
                session = self._session()
                if session is None or session._closed or os.getpid() != self._pid:
                    return
                if not self._write(session):
                    return
                for name in self._progress.stalled(self._counts(session), time.monotonic()):
                    _log.warning("%s", self._describe(session, name))
                del session
        finally:
            with contextlib.suppress(OSError):
                if self.path is not None:
                    self.path.unlink(missing_ok=True)
                    own_files.leave_user_folder()

    # ---- the file

    def _write(self, session: Session) -> bool:
        figures = self._figures()
        if figures is None:
            return False
        # If there is no folder or space for the file, the job continues without it.
        with contextlib.suppress(OSError):
            text = json.dumps(self._content(session, figures())).encode()
            self.path = own_files.user_folder() / self._name
            own_files.atomic_write(self.path, lambda file: file.write(text), sync=False)
        return True

    def _content(self, session: Session, figures: dict[str, Any]) -> dict[str, Any]:
        lost = set(session.lost())
        return {
            "format": FORMAT,
            "unix_time_s": time.time(),
            "started_unix_s": self._started,
            "job_id": session.world.job_id,
            "launcher": session.world.launcher,
            "host": session.me.host,
            "directory": os.getcwd(),
            "processes": [
                {
                    "name": peer.name,
                    "role": peer.role,
                    "host": peer.host,
                    "pid": session.pid_of(peer),
                    "lost": session.lost_reason(peer) if peer in lost else None,
                }
                for peer in session.peers
            ],
            "learner": session.me.name,
            "workers": [peer.name for peer in self._workers],
            "waiting_since": self._waiting_since,
            "batches": self._batches,
            **figures,
        }

    # ---- the watchdog

    def _counts(self, session: Session) -> dict[str, int]:
        """Return the progress of this process and its workers. Time in which a process must wait
        for another process does not count as a stall."""
        own = session.me.name
        lost = {peer.name for peer in session.lost()} | {own}
        workers = {
            peer.name: self._frames.get(k, 0)
            for k, peer in enumerate(self._workers)
            if peer.name not in lost
        }
        now = time.monotonic()
        passed, self._looked = now - self._looked, now
        taking = self._waiting_since is not None or self._batches != self._known
        self._known = self._batches
        if not taking:  # the caller is working and does not ask for rollouts
            self._progress.excuse(list(workers), passed)
        if workers and self._waiting_since is not None:
            self._progress.excuse([own], passed)
        return {own: self._batches, **workers}

    def _describe(self, session: Session, name: str) -> str:
        told = f"{name} made no progress for {self._progress.patience_s:g} s"
        if name == session.me.name:
            frame = sys._current_frames().get(self._caller or 0)
            return f"{told}: {_place(frame) if frame else 'its thread has ended'}"
        (peer,) = (peer for peer in self._workers if peer.name == name)
        told += f" (pid {session.pid_of(peer)} on {peer.host})"
        asked: Future[Any] = session.submit(peer, places, timeout_s=_ANSWER_S)
        try:
            return f"{told}: {asked.result(2 * _ANSWER_S)}"
        except Exception as error:
            pid, state = session.pid_of(peer), ""
            if peer.host == session.me.host and proc.state(pid) in ("T", "t"):
                state = f", because it is stopped; kill -CONT {pid} continues it"
            return f"{told}: it does not answer{state} ({type(error).__name__})"


def places() -> str:
    """Describe where this process's collecting threads are; runs in a worker."""
    found = []
    frames = sys._current_frames()
    # otherwise the current frame would keep itself and its callers alive
    del frames[threading.get_ident()]
    for frame in frames.values():
        if any(_module(each).startswith("torchrl_dist.collect.") for each in _stack(frame)):
            found.append(_place(frame))
    return "; ".join(found) or "none of its threads is collecting"


def _stack(frame: FrameType | None) -> list[FrameType]:
    found = []
    while frame is not None:
        found.append(frame)
        frame = frame.f_back
    return found


def _module(frame: FrameType) -> str:
    """Return the module's name, which does not depend on where the package is installed."""
    return str(frame.f_globals.get("__name__", ""))


def _place(frame: FrameType) -> str:
    """Return ``in step (env.py:12) < rollout (rollout.py:30)``, the innermost frame first."""
    frames = _stack(frame)
    modules = [_module(each).partition(".")[0] for each in frames]
    known = next((k for k, name in enumerate(modules) if name not in _LIBRARIES), 0)
    told = [
        f"{each.f_code.co_name} ({Path(each.f_code.co_filename).name}:{each.f_lineno})"
        for each in frames[known : known + _FRAMES]
    ]
    return "it is in " + " < ".join(told)


def remove_pulses_of_the_dead() -> None:
    """Remove the files that this user's processes left because they were killed."""
    for folder in own_files.user_folders():
        with contextlib.suppress(OSError):
            for path in folder.iterdir():
                if (stamp := stamp_of(path)) is not None and has_ended(stamp):
                    path.unlink(missing_ok=True)


def stamp_of(path: Path) -> str | None:
    """Return the ``process_stamp`` in the name of a pulse file, or None if the name is that of
    another file.

    The file may be a temporary file that :func:`own_files.atomic_write` has not yet renamed.
    """
    name = path.name.removeprefix(".")
    stamp = name.removeprefix(PREFIX).rpartition("-")[0]
    return stamp if name.startswith(PREFIX) and is_stamp(stamp) else None
