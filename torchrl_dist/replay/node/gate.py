"""A replay directory's rate limiter: shared counters, and how processes wait for them.

The counters are words of the directory, and change under its lock. A process holds the lock from
the admission of a write until the write has its slots, and from the admission of a sample until the
sample is counted. When a write asks for admission, rows that other processes are writing count as
inserts. Otherwise all writers that wake up together would be admitted. While a thread waits for the
limiter, it holds neither the directory's lock nor the locks of TorchRL's buffers.

From a sample's admission to its return, the user table holds the sample's number of rows. If the
process is killed before the return, these rows stop counting as soon as another process would have
to wait. For ``max_times_sampled``, a drawn row counts as sampled even if it is never returned.
"""

from __future__ import annotations

import concurrent.futures.thread  # noqa: F401
import threading
import time
from collections.abc import Callable
from dataclasses import astuple
from typing import NamedTuple, TypeVar

import numpy as np
from torchrl.data.replay_buffers.storages import Storage

from torchrl_dist.errors import ConfigurationError, RateLimitError
from torchrl_dist.replay.law.limiter import Counts, RateLimiter
from torchrl_dist.replay.node.cursor import Reservation, SharedCursor
from torchrl_dist.replay.node.directory import ReplayDirectory
from torchrl_dist.replay.node.frames import Plan
from torchrl_dist.replay.node.futex import Bell
from torchrl_dist.replay.node.priorities import default_leaf
from torchrl_dist.replay.node.tables import (
    MAX_MEMBERS,
    USER_MEMBER,
    USER_UNRETURNED,
    Word,
)
from torchrl_dist.replay.node.times_sampled import TooFewDrawsError
from torchrl_dist.replay.row import _torchrl
from torchrl_dist.stopping import gives_up

# waiting threads look again this often, because the bell does not ring when a process ends, or when
# a thread must stop waiting
_LOOK_AGAIN_S = 0.5

_T = TypeVar("_T")

process_ends = threading.Event()
# At its end, a process first joins the threads that fetch batches ahead, and these threads may be
# waiting for the limiter. The event must be set before that join. Functions that are registered
# later are called earlier, so the import above, which registers the join, must come before this
# line.
threading._register_atexit(process_ends.set)  # type: ignore[attr-defined]  # not in typeshed


def told_to_stop(for_what: str) -> RateLimitError:
    """Return the error for a wait that ended because the process or the thread must stop."""
    ends = process_ends.is_set()
    why = "this process is ending" if ends else "this thread was told to stop"
    return RateLimitError(f"stopped waiting for {for_what}, because {why}")


class Missing(NamedTuple):
    """The reason for a wait. ``for_what`` completes the sentence "waited for ..."."""

    for_what: str


class Gate:
    """The gate of one directory in this process, ``directory.gate``."""

    def __init__(self, directory: ReplayDirectory, limiter: RateLimiter) -> None:
        self.limiter = limiter
        self._directory = directory
        self._bell = Bell(
            directory.words, Word.BELL_WAITED, Word.BELL_RUNG, directory.words_address
        )

    # --- counters ----------------------------------------------------------------------------

    def counts(self, under_way: int = 0) -> Counts:
        """Return the current counts, including ``under_way`` rows that are not published yet."""
        directory = self._directory
        words = directory.words
        inserts = words[Word.WRITE_COUNT] - words[Word.INSERT_BASE] + under_way
        if directory.times_sampled is None:
            size = min(inserts, directory.capacity)
        else:
            size = words[Word.AVAILABLE] + under_way
        return Counts(inserts, words[Word.SAMPLED], size)

    def count_samples(self, rows: int) -> None:
        """Add to the number of samples."""
        directory = self._directory
        with directory.lock():
            directory.words[Word.SAMPLED] += rows
        self.ring()

    def set_samples(self, rows: int) -> None:
        """Restart the count of samples at ``rows``. Samples that are in progress do not change the
        new count. Called under the lock."""
        self._directory.words[Word.SAMPLED] = rows
        unreturned = self._directory.users[:, USER_UNRETURNED]
        unreturned[unreturned != 0] = 0

    def state(self) -> list[float]:
        """Return the limiter and its counts, for :meth:`set_state`."""
        counts = self.counts()
        return [*_numbers(self.limiter), counts.inserts, counts.samples]

    def set_state(self, state: list[float] | None, rows: int) -> None:
        """Continue with these counts if they belong to an equal limiter. Called under the lock.

        If they do not, or if ``state`` is None, the ``rows`` in the buffer count as inserts, but at
        most as many as the first sample needs.
        """
        words = self._directory.words
        inserts, samples = min(rows, self.limiter.min_size_to_sample), 0
        if state is not None and state[:-2] == _numbers(self.limiter):
            inserts, samples = map(int, state[-2:])
        words[Word.INSERT_BASE] = words[Word.WRITE_COUNT] - inserts
        self.set_samples(samples)

    def ring(self) -> None:
        """Wake waiting threads after a change of the counts."""
        self._bell.ring()

    # --- writing -----------------------------------------------------------------------------

    def reserve(
        self, cursor: SharedCursor, count: int, storage: Storage, plan: Plan | None = None
    ) -> Reservation:
        """Wait until a write may begin, then reserve slots for its first ``count`` rows, and room
        for their frames.

        Raises:
            RateLimitError: the write was not admitted within the storage's ``timeout_s``. No row
                was written.
        """

        def attempt() -> Reservation | Missing:
            missing = self._missing_samples(cursor)
            reservation = cursor.try_reserve(count, plan) if missing is None else None
            return (
                reservation
                or missing
                or Missing(
                    "other processes to finish their writes, because these take all slots of the "
                    "buffer"
                )
            )

        return self._admit(attempt, storage)

    def wait_to_write(self, cursor: SharedCursor, storage: Storage) -> None:
        """Wait like :meth:`reserve`, but take no slots, so other processes may take slots first."""
        self._admit(lambda: self._missing_samples(cursor) or True, storage)

    def _missing_samples(self, cursor: SharedCursor) -> Missing | None:
        missing = self.limiter.missing_samples(self.counts(cursor.rows_under_way()))
        if not missing:
            return None
        return Missing(f"{missing} more rows to be sampled before the next write")

    # --- sampling ----------------------------------------------------------------------------

    def can_sample(self, count: int) -> bool:
        """Return whether a sample of ``count`` rows would begin without a wait."""
        if not self.limiter.missing_inserts(self.counts(), count):
            return True
        with self._directory.lock():
            self._forget_unreturned()
        return not self.limiter.missing_inserts(self.counts(), count)

    def draw(self, count: int, draw: Callable[[], _T], storage: Storage) -> _T:
        """Wait until a sample of ``count`` rows is admitted, and return the rows of ``draw()``.

        Raises:
            RateLimitError: the sample was not admitted within the storage's ``timeout_s``.
            ConfigurationError: samples of ``count`` rows could wait indefinitely.
        """
        self.limiter.check_batch(count)
        _torchrl.fetch_one_by_one(storage)

        def attempt() -> Missing | bool:
            missing = self.limiter.missing_inserts(self.counts(), count)
            if missing:
                return Missing(f"{missing} more rows to be written before the next sample")
            self._count_unreturned(self._own_row(), count)
            return True

        deadline = time.monotonic() + getattr(storage, "timeout_s", self._directory.timeout_s)
        while True:
            self._admit(attempt, storage)
            try:
                drawn = draw()
            except BaseException as error:
                self._note_end(count, returned=False)
                if not isinstance(error, TooFewDrawsError) or time.monotonic() > deadline:
                    raise
            else:
                self._note_end(count, returned=True)
                return drawn

    def _note_end(self, count: int, *, returned: bool) -> None:
        """Record the end of an admitted sample. The sample does not count if it was not
        returned."""
        with self._directory.lock():
            row = self._own_row()
            count = min(
                count, int(row[USER_UNRETURNED])
            )  # 0 if the counts were restarted since the draw
            if returned:
                row[USER_UNRETURNED] -= count
            else:
                self._count_unreturned(row, -count)
        self.ring()

    def _forget_unreturned(self) -> None:
        """Stop counting the samples of processes that ended before they returned these samples.

        Called under the lock."""
        users = self._directory.users
        for row in np.flatnonzero(users[:, USER_UNRETURNED]).tolist():
            if not self._directory.is_alive(int(users[row, USER_MEMBER])):
                self._count_unreturned(users[row], -int(users[row, USER_UNRETURNED]))

    def _count_unreturned(self, row: np.ndarray, rows: int) -> None:
        """Add ``rows`` to the number of samples, and to the number of unreturned samples in
        ``row``, a row of the user table.

        Called under the lock."""
        directory = self._directory
        at = int(row[USER_MEMBER]) % MAX_MEMBERS
        directory.begin()
        directory.store_all(
            {
                Word.SAMPLED: directory.words[Word.SAMPLED] + rows,
                directory.cell(at, USER_UNRETURNED): int(row[USER_UNRETURNED]) + rows,
            }
        )
        directory.commit()

    # --- waiting -----------------------------------------------------------------------------

    def _admit(self, attempt: Callable[[], _T | Missing], storage: Storage) -> _T:
        """Call ``attempt`` under the lock until its result is not ``Missing``. Return the
        result."""
        directory = self._directory
        with directory.lock():
            result = attempt()
        if not isinstance(result, Missing):
            return result
        directory.count(Word.LIMITER_WAITS)
        timeout_s = getattr(storage, "timeout_s", directory.timeout_s)
        deadline = time.monotonic() + timeout_s
        with _torchrl.locks_given_back(storage):
            while True:
                with directory.lock():
                    self._forget_unreturned()
                    result = attempt()
                    armed = self._bell.arm()
                if not isinstance(result, Missing):
                    return result
                left = deadline - time.monotonic()
                if left <= 0 or process_ends.is_set() or gives_up():
                    raise self._error(result, timeout_s if left <= 0 else None)
                self._bell.wait(armed, min(left, _LOOK_AGAIN_S))

    def _error(self, missing: Missing, waited_s: float | None) -> RateLimitError:
        directory = self._directory
        counts = self.counts()
        if waited_s is None:
            return told_to_stop(missing.for_what)
        others = [
            directory.pid_of(member)
            for member in directory.live_members()
            if member != directory.member
        ]
        return RateLimitError(
            f"waited {waited_s:g} s for {missing.for_what} in {directory.path}: {counts.inserts} "
            f"rows were written and {counts.samples} were sampled so far, and {counts.size} rows "
            f"may be sampled now; the limiter is {self.limiter}. Other processes that share the "
            f"buffer: {others or 'none is left'}. Check whether these processes are stuck or have "
            "ended. A thread that both writes and samples must keep to the limiter's proportion of "
            "samples to inserts, or ask can_sample() first"
        )

    def _own_row(self) -> np.ndarray:
        """Return this process's row of the user table. Called under the lock."""
        directory = self._directory
        row = directory.users[directory.member % MAX_MEMBERS]
        if row[USER_MEMBER] != directory.member:
            self._forget_unreturned()
            row[:] = 0
            row[USER_MEMBER] = directory.member
        return row


def set_limiter(directory: ReplayDirectory, limiter: RateLimiter | None) -> None:
    """Set the directory's limiter for all processes. Called when a storage opens the directory.

    Args:
        limiter: None to use the limiter of the other processes.

    Raises:
        ConfigurationError: the other processes use another limiter.
    """
    words = directory.words
    with directory.lock():
        known = read_limiter(directory)
        if limiter is None and not words[Word.LIMITED]:
            words[Word.LIMITED] = 2
        if limiter is not None and known != limiter:
            others = [m for m in directory.live_members() if m != directory.member]
            if words[Word.LIMITED] and (others or directory.used_more_than_once):
                raise ConfigurationError(
                    f"the other processes that share {directory.path} use {known or 'no limiter'}, "
                    f"but this process asks for {limiter}; pass the same limiter in every process"
                )
            _store_limiter(directory, limiter)
        elif known is not None and directory.gate is None:
            directory.map_limiter_tables()  # another process may have just stored the limiter
            directory.gate = Gate(directory, known)


def read_limiter(directory: ReplayDirectory) -> RateLimiter | None:
    """Return the directory's limiter. Call it under the lock."""
    words = directory.words
    if words[Word.LIMITED] != 1:
        return None
    ratio, margin = (directory.get_float(w) for w in (Word.SAMPLES_PER_INSERT, Word.ERROR_BUFFER))
    return RateLimiter(
        words[Word.MIN_SIZE_TO_SAMPLE],
        ratio or None,
        margin or None,
        words[Word.MAX_TIMES_SAMPLED] or None,
    )


def _store_limiter(directory: ReplayDirectory, limiter: RateLimiter) -> None:
    """Store the limiter. Called under the lock, when no other process uses the directory."""
    words = directory.words
    directory.begin()
    # if the process is killed before LIMITED is 1 again, repair makes hidden rows visible
    words[Word.LIMITED] = 0
    size, ratio, margin, times = _numbers(limiter)
    words[Word.MIN_SIZE_TO_SAMPLE] = int(size)
    directory.set_float(Word.SAMPLES_PER_INSERT, ratio)
    directory.set_float(Word.ERROR_BUFFER, margin)
    words[Word.MAX_TIMES_SAMPLED] = int(times)
    words[Word.AVAILABLE] = directory.length
    directory.create_limiter_tables()
    directory.gate = Gate(directory, limiter)
    directory.gate.set_state(None, directory.length)
    # make the rows visible that another limiter's max_times_sampled hid, and restart their counts
    published = (directory.versions & 1 == 0) & (directory.versions > 0)
    hidden = np.flatnonzero(published & ~(directory.tree.leaves > 0))
    directory.tree.set(hidden, default_leaf(directory))
    words[Word.LIMITED] = 1
    directory.commit()


def _numbers(limiter: RateLimiter) -> list[float]:
    """Return the limiter's numbers, with 0 for None."""
    return [float(value or 0) for value in astuple(limiter)]
