"""The replay directory: all that the processes of one node share about a buffer.

Files::

    header.json     format, capacity, job; written last when the directory is created
    lock            locks on its bytes: the fair lock, and one byte per live member
    control.bin     counters and tables, see ``Word`` and the claim and member columns below
    versions.bin    int64 [capacity]; odd while a row is absent or being written
    tree.bin        priority tree
    rows.json       spec of a row; written before the data files, when the first rows come, so
                    that whoever removes them knows their names
    data/*.bin      one file per leaf of a row, [capacity, ...]
    limiter.bin     with a rate limiter: who waits, and how often rows were sampled; see ``gate``
    pass.bin        with sampling without replacement: what is still to be drawn; see ``passes``

Which of them are made, adopted and removed when is the matter of ``files``.

What holds at every instant, whoever is killed:

1. A slot is *published* exactly when its version is even and above 0. Only published slots have a
   leaf above 0 in the tree, so only they are drawn; all of them have, but for those whose row was
   sampled as often as the limiter allows.
2. Shared state changes only under the lock, and ``DIRTY`` is set before the first and cleared
   after the last store. Who enters and finds it set repairs what the killed holder left
   (:meth:`ReplayDirectory.lock`, ``cursor.repair``).
3. Rows are written outside the lock, only by the member whose claim covers their slots, while
   their versions are odd. Claims of live members never share a slot; those of dead ones lapse.
4. Versions and tickets never go back, so (slot, version // 2) names one row for ever.
"""

from __future__ import annotations

import atexit
import contextlib
import enum
import json
import math
import mmap
import multiprocessing.util
import os
import platform
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import numpy as np
import torch

from torchrl_dist.errors import ConfigurationError, DeadlineError, DirectoryError
from torchrl_dist.forks import now_and_in_children
from torchrl_dist.replay.law.kernel import address
from torchrl_dist.replay.law.limiter import Admission
from torchrl_dist.replay.law.tree import PriorityTree, tree_bytes
from torchrl_dist.replay.node import files
from torchrl_dist.replay.node.files import Header, damaged, read_header
from torchrl_dist.replay.node.lock import (
    MEMBER_BYTES,
    FairLock,
    close_lock_file,
    is_held,
    is_on_stack,
    lock_byte,
    open_lock_file,
    unlock_byte,
)
from torchrl_dist.replay.row.spec import STREAM, LeafSpec, RowSpec, array_of, checked_spec
from torchrl_dist.stopping import stop_requested_since

MAX_MEMBERS = 1024
MAX_CLAIMS = 1024
_CONTROL_WORDS = 64

# columns of the claim table, int64 [MAX_CLAIMS, 4]
CLAIM_COUNT, CLAIM_FIRST, CLAIM_MEMBER, CLAIM_STATE = range(4)
CLAIM_WRITING, CLAIM_PUBLISHING, CLAIM_DISCARDED = 1, 2, 3
_RETRY_S = 1e-3
# columns of the user table, int64 [MAX_MEMBERS, 5], see ``gate``: whose row it is, threads that
# write or sample, how many of them found at this ring of the bell that they must wait, and rows of
# samples that are admitted, and counted, but not returned yet
USER_MEMBER, USER_THREADS, USER_STUCK, USER_RUNG, USER_UNRETURNED = range(5)
USER_COLUMNS = 5
# columns of the member table, int64 [MAX_MEMBERS, 2]
MEMBER_PID, MEMBER_SERIAL = range(2)

# A reader compares versions before and after its copy. That is sound where loads are not
# reordered with loads and stores not with stores, as on x86-64; elsewhere it copies under the lock.
ORDERED_LOADS = platform.machine().lower() in ("x86_64", "amd64")

_NETWORK_FILE_SYSTEMS = frozenset(
    "nfs nfs4 cifs smb3 smbfs lustre gpfs beegfs ceph glusterfs afs 9p ncpfs orangefs".split()
)


class Word(enum.IntEnum):
    """Index of each int64 of the control block; those marked float64 hold its bits.

    Free: 27, 39 and from 56 on.
    """

    DIRTY = 0
    CURSOR = 1  # next ticket
    BASE = 2  # ticket at which the buffer was last emptied
    LENGTH = 3  # published rows
    WRITE_COUNT = 4  # rows ever published
    ROWS_READY = 5  # rows.json and the data files exist
    ALPHA_SET = 6
    ALPHA = 7  # float64
    EPS = 8  # float64
    MAX_PRIORITY = 9  # float64, raw; NaN before the first priority
    MAX_SLOT = 10  # where it was seen, -1 if not known
    JOINS = 11  # members ever; makes member ids unique although rows of the table are reused
    KEEP = 12  # do not remove the directory when the last member leaves
    CLAIM_ROWS = 13  # rows of the claim table that were ever used
    MAX_WITHIN = 14  # MAX_PRIORITY is the largest among the rows present, not ever
    NEXT_WRITE_COUNT = 15  # what the publication in progress makes of WRITE_COUNT
    # counters, see ReplayDirectory.counters
    REREAD_ROWS = 16
    LOCKED_READS = 17
    STALE_UPDATES = 18
    UNVERIFIED_UPDATES = 19
    TAKEN_OVER_CLAIMS = 20
    REPAIRS = 21
    RESCALING = 22  # alpha is being changed to NEXT_ALPHA, see ``priorities.finish_rescaling``
    NEXT_ALPHA = 23  # float64
    WAITING = 24  # somebody waits for the lock, see ``FairLock``
    EMPTYING = 25  # the buffer is being emptied, see ``cursor.finish_emptying``
    IN_PLACE = 26  # slots up to here have been written in place since it was emptied
    JOURNAL = 28  # to 38: of :meth:`ReplayDirectory.store_all`, a count and up to 5 pairs
    # the rate limiter, see ``gate``; four words as in ``RateLimiter``, 0 for None
    LIMITED = 40  # 1: by the next four words, 2: not at all, 0: nobody has said yet
    MIN_SIZE_TO_SAMPLE = 41
    SAMPLES_PER_INSERT = 42  # float64
    ERROR_BUFFER = 43  # float64
    MAX_TIMES_SAMPLED = 44
    SAMPLED = 45  # rows returned by samples
    INSERT_BASE = 46  # the write count at which inserts are counted from 0
    AVAILABLE = 47  # with MAX_TIMES_SAMPLED: published rows that may be sampled
    BELL_WAITED = 48
    BELL_RUNG = 49
    LIMITER_WAITS = 50  # a counter
    ERA = 51  # of a shard, see ``host.HostState``
    STREAMS = 52  # rows say which stream they are of, see ``STREAM``
    RESTORES = 53  # how often a checkpoint was given back
    DRAWN = 54  # rows that samples drew, where no limiter counts them; see ``count``
    INTERRUPTED = 55  # a member left after a stop signal or an exception: nothing is removed


JOURNAL_ENTRIES = 5
FLOAT_WORDS = frozenset({Word.ALPHA, Word.EPS, Word.MAX_PRIORITY})

COUNTERS = {
    word.name.lower(): word
    for word in (
        Word.REREAD_ROWS,
        Word.LOCKED_READS,
        Word.STALE_UPDATES,
        Word.UNVERIFIED_UPDATES,
        Word.TAKEN_OVER_CLAIMS,
        Word.REPAIRS,
        Word.LIMITER_WAITS,
    )
}


def control_tables(control: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Words, claims and members, int64 [64], [MAX_CLAIMS, 4], [MAX_MEMBERS, 2], of the control
    block as int64."""
    words, claims, members = np.split(control, [_CONTROL_WORDS, _CONTROL_WORDS + 4 * MAX_CLAIMS])
    return words, claims.reshape(MAX_CLAIMS, 4), members.reshape(MAX_MEMBERS, 2)


def counters_in(words: Sequence[int] | np.ndarray) -> dict[str, int]:
    """What happened so far, by name."""
    return {name: int(words[word]) for name, word in COUNTERS.items()}


def read_spec(folder: Path) -> RowSpec:
    """What ``rows.json`` says.

    Raises:
        DirectoryError: it is damaged.
    """
    try:
        return checked_spec(json.loads((folder / files.ROWS).read_text()))
    except (OSError, ValueError, RecursionError) as error:
        raise damaged(folder, f"{files.ROWS} does not say what a row is ({error})") from error


class Held(NamedTuple):
    """A write of this process: slots that it has claimed and not published yet."""

    reservation: Any
    frame: FrameType
    """While it is on the thread's stack, the write goes on."""
    thread: int


def default_job_id() -> str:
    """The launcher's id of this job (torchrun, SLURM), or this process's own."""
    from torchrl_dist.runtime.world import World

    return World.from_env().job_id


def _starter_of(job_id: str) -> str | None:
    """Without which process the job does not come back, see ``World.starter``."""
    from torchrl_dist.runtime.world import World, is_stamp

    if is_stamp(job_id):
        return job_id
    with contextlib.suppress(ConfigurationError):
        world = World.from_env()
        return world.starter if world.job_id == job_id else None
    return None


class ReplayDirectory:
    """This process's view of a replay directory. Get one with :func:`open_directory`.

    Attributes:
        path: absolute path.
        capacity: slots of the ring.
        job_id: the job that the directory belongs to.
        words: int64 [64], a memoryview; see :class:`Word`.
        versions: int64 [capacity].
        claims: int64 [MAX_CLAIMS, 4].
        tree: the priority tree.
        member: id of this process, ``serial * MAX_MEMBERS + index``; unique in the directory.
        gate: what limits samples and writes, or None.
        users: int64 [MAX_MEMBERS, 5], with a limiter; see ``gate``.
        times_sampled: int64 [capacity], of the rows, with a limiter that asks for it.
    """

    gate: Admission | None = None
    users: np.ndarray
    times_sampled: np.ndarray | None = None

    def __init__(self, path: Path, capacity: int, job_id: str, timeout_s: float) -> None:
        self.path = path
        self.capacity = capacity
        self.job_id = job_id
        self.timeout_s = timeout_s
        self.member = -1
        self._users = 0
        self._pid = os.getpid()
        self._opened_at = time.monotonic()
        self._closing = False
        self._rows: RowSpec | None = None
        self._tensors: list[torch.Tensor] = []
        self._arrays: list[np.ndarray] = []
        self._repair: Callable[[ReplayDirectory], None] = _no_repair
        self._held: dict[int, Held] = {}

    # --- lock --------------------------------------------------------------------------------

    def lock(self) -> contextlib.AbstractContextManager[None]:
        """Exclusive use of the shared state, with the state repaired if its holder was killed.

        A context manager; not to be entered again inside. Changes belong between :meth:`begin`
        and :meth:`commit`.

        Raises:
            DeadlineError: on entry, after ``timeout_s``, naming the holder.
            DirectoryError: on entry, if the directory was closed.
        """
        return self

    def __enter__(self) -> None:
        if self._pid != os.getpid():
            self._join_after_fork()
        fair_lock = self._fair_lock
        fair_lock.check_entry()
        try:
            fair_lock.__enter__()  # which looks again whether it was closed, after the wait
            if self.words[Word.DIRTY]:
                self._repair(self)
            fair_lock.inside = sys._getframe(1)
        except BaseException:
            fair_lock.leave_if_inside()
            raise

    def __exit__(self, *raised: object) -> None:
        # An interrupt that Python delivers on entering this very function cannot be helped: the
        # lock is then free with this thread's next use of the directory, or the process's end.
        fair_lock = self._fair_lock
        try:
            fair_lock.__exit__(None, None, None)
        except BaseException:
            fair_lock.leave_if_inside()
            raise

    def check_entry(self) -> None:
        """To be called before this thread waits for a lock that others hold while they wait for
        this directory's.

        Raises:
            DirectoryError: it has the latter itself, so it is a signal handler that interrupted a
                use of the directory.
        """
        if self._pid == os.getpid():
            self._fair_lock.check_entry()
        else:
            _once(_LOCKS.joining)

    def begin(self) -> None:
        """Announce a change, first thing under the lock."""
        self.words[Word.DIRTY] = 1

    def commit(self) -> None:
        """The change is complete, last thing under the lock."""
        self.words[Word.DIRTY] = 0

    def store_all(self, values: Mapping[int, int]) -> None:
        """Store several words, between :meth:`begin` and :meth:`commit`: all of them, whoever is
        killed in the middle.

        Args:
            values: by :class:`Word`, or by :meth:`cell` of the user table.
        """
        words = self.words
        at: int = Word.JOURNAL
        assert len(values) <= JOURNAL_ENTRIES
        for entry in values.items():
            words[at + 1], words[at + 2] = entry
            at += 2
        words[Word.JOURNAL] = len(values)  # from here on repair stores them
        self.finish_storing()

    def finish_storing(self) -> None:
        """What :meth:`store_all` has written down; repeated after a kill."""
        words = self.words
        for at in range(words[Word.JOURNAL]):
            where, value = words[Word.JOURNAL + 1 + 2 * at], words[Word.JOURNAL + 2 + 2 * at]
            if where < _CONTROL_WORDS:
                words[where] = value
            else:
                self.users.flat[where - _CONTROL_WORDS] = value
        words[Word.JOURNAL] = 0

    @staticmethod
    def cell(row: int, column: int) -> int:
        """A place in the user table, for :meth:`store_all`."""
        return _CONTROL_WORDS + row * USER_COLUMNS + column

    def is_alive(self, member: int) -> bool:
        """Whether the member's process lives (also if it is stopped)."""
        if member == self.member:
            return True
        serial, index = divmod(member, MAX_MEMBERS)
        return self.members[index, MEMBER_SERIAL] == serial and is_held(
            self._fd, MEMBER_BYTES + index
        )

    @property
    def stays(self) -> bool:
        """Whether the last process that closes it leaves the folder."""
        return bool(self.words[Word.KEEP] or self.words[Word.INTERRUPTED])

    def live_members(self) -> list[int]:
        """Ids of the members whose process lives."""
        serials = self.members[:, MEMBER_SERIAL]
        ids = [int(serials[i]) * MAX_MEMBERS + int(i) for i in np.flatnonzero(serials)]
        return [member for member in ids if self.is_alive(member)]

    def pid_of(self, member: int) -> int:
        """Process id of a member, as it was when it joined."""
        return int(self.members[member % MAX_MEMBERS, MEMBER_PID])

    # --- writes of this process --------------------------------------------------------------

    def hold(self, reservation: Any, frame: FrameType) -> None:
        """Note that this thread is going to write, until ``frame`` has returned. Called under the
        lock, before the claim: an interrupt may come between.

        Raises:
            DirectoryError: this process is leaving the directory.
        """
        if self._closing:
            raise DirectoryError(
                f"replay directory {self.path} was closed in this process; build the storage "
                "again to use it"
            )
        self._held[id(reservation)] = Held(reservation, frame, threading.get_ident())

    def let_go(self, reservation: Any) -> None:
        """The write has ended."""
        self._held.pop(id(reservation), None)

    def holds_its_equal(self, reservation: Any) -> bool:
        """Whether another write has the same slots: this one was interrupted before it claimed
        them. Called under the lock."""
        return any(
            held.reservation == reservation and held.reservation is not reservation
            for held in list(self._held.values())
        )

    def interrupted_writes(self) -> list[Any]:
        """Reservations that an interrupt (Ctrl-C) between two instructions left of this thread.

        Not those of writes that a signal handler has interrupted, which go on afterwards.
        """
        if not self._held:
            return []
        thread, top = threading.get_ident(), sys._getframe()
        return [
            held.reservation
            for held in list(self._held.values())
            if held.thread == thread and not is_on_stack(held.frame, top)
        ]

    def check_wait(self) -> None:
        """To be called before waiting for slots or rows that others are writing, by who has no
        write of his own under way.

        Raises:
            DirectoryError: this thread has, so this is a signal handler that interrupted it.
        """
        thread, top = threading.get_ident(), sys._getframe()
        if any(
            held.thread == thread and is_on_stack(held.frame, top)
            for held in list(self._held.values())
        ):
            raise DirectoryError(
                f"a signal handler that interrupted a write to {self.path} would wait for rows "
                "that are being written, perhaps by the very thread. Have the handler set a flag, "
                "and act on it between two uses"
            )

    def _threads_that_write(self) -> set[int]:
        """Of this process. What was interrupted for good is none."""
        tops = sys._current_frames()
        try:
            return {
                held.thread
                for held in list(self._held.values())
                if is_on_stack(held.frame, tops.get(held.thread))
            }
        finally:
            tops.clear()  # this frame is among them, and would keep all of them

    # --- scalars -----------------------------------------------------------------------------

    @property
    def length(self) -> int:
        """Published rows; the same number on every rank."""
        return self.words[Word.LENGTH]

    @property
    def high(self) -> int:
        """Slots from 0 on that have been reserved since the buffer was last empty, or lie before
        one that was written in place: 0 .. capacity."""
        words = self.words
        return min(max(words[Word.CURSOR] - words[Word.BASE], words[Word.IN_PLACE]), self.capacity)

    def get_float(self, word: Word) -> float:
        return self.floats[word]

    def set_float(self, word: Word, value: float) -> None:
        self.floats[word] = value

    def count(self, word: Word, amount: int = 1) -> None:
        """Add to a counter, with or without the lock: without it two adds may fall together, and
        one be missing; they are statistics."""
        self.words[word] += amount

    @property
    def counters(self) -> dict[str, int]:
        """What happened in this directory so far, over all processes."""
        return counters_in(self.words)

    # --- rows --------------------------------------------------------------------------------

    @property
    def rows(self) -> RowSpec | None:
        """The spec of a row, or None before the first write of any process."""
        if self._rows is None and self.words[Word.ROWS_READY]:
            self._map_rows()
        return self._rows

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The shared rows, one tensor [capacity, ...] per leaf of :attr:`rows`."""
        if self._rows is None and self.rows is None:
            return []
        return self._tensors

    @property
    def arrays(self) -> list[np.ndarray]:
        """:attr:`tensors` as :func:`array_of` gives them."""
        if self._rows is None and self.rows is None:
            return []
        return self._arrays

    def create_rows(self, spec: RowSpec) -> None:
        """Allocate the data files; called by the first writer. Blocks while others do it.

        Raises:
            DirectoryError: if the disk has no room for them; nothing is left behind.
        """
        with self.lock():
            if self.words[Word.ROWS_READY]:
                return
            if self.words[Word.STREAMS] and STREAM not in spec.leaves:
                spec = replace(spec, leaves=(*spec.leaves, STREAM))
            files.remove_data(self.path)  # of a first writer that was killed in here
            folder = self.path / files.DATA
            try:
                _write_json(self.path / files.ROWS, spec.as_json())
                folder.mkdir(mode=0o700)
                for leaf in spec.leaves:
                    _allocate(folder / leaf.file_name, _data_bytes(leaf, self.capacity))
            except FileExistsError as error:
                (self.path / files.ROWS).unlink()
                raise DirectoryError(
                    f"{folder} holds files that are not of this buffer: remove them"
                ) from error
            except OSError as error:
                files.remove_data(self.path)
                wanted = self.capacity * spec.row_bytes / 2**20
                raise DirectoryError(
                    f"could not allocate {wanted:.0f} MiB for {self.capacity} rows in "
                    f"{self.path}: {error}; free space there, choose another scratch_dir or a "
                    "smaller capacity"
                ) from error
            self.words[Word.ROWS_READY] = 1

    def _map_rows(self) -> None:
        spec = read_spec(self.path)
        tensors = []
        for leaf in spec.leaves:
            shape = (self.capacity, *leaf.shape)
            file = self.path / files.DATA / leaf.file_name
            buffer = _map(file, _data_bytes(leaf, self.capacity))
            if leaf.row_bytes == 0:
                tensors.append(torch.empty(shape, dtype=leaf.dtype))
                continue
            with torch.inference_mode(False):  # else later writes outside that mode would fail
                tensors.append(torch.frombuffer(buffer, dtype=leaf.dtype).reshape(shape))
        self._tensors = tensors
        self._arrays = [array_of(tensor) for tensor in tensors]
        self._rows = spec

    # --- joining and leaving -----------------------------------------------------------------

    def _map_state(self) -> None:
        control = _map(self.path / "control.bin", control_bytes())
        # memoryviews give plain Python numbers, faster than NumPy its scalars
        self.words = memoryview(control)[: 8 * _CONTROL_WORDS].cast("q")
        self.floats = memoryview(control)[: 8 * _CONTROL_WORDS].cast("d")
        self._fair_lock.share_waiting(self.words, Word.WAITING)
        _, self.claims, self.members = control_tables(np.frombuffer(control, dtype=np.int64))
        self.versions = np.frombuffer(
            _map(self.path / "versions.bin", 8 * self.capacity), dtype=np.int64
        )
        self.tree = PriorityTree(
            self.capacity, _map(self.path / "tree.bin", tree_bytes(self.capacity))
        )
        self.words_address = address(np.frombuffer(control, dtype=np.int64))
        self.versions_address = address(self.versions)
        if self.tree.kernel is not None:
            leaves, marks, capacity = self.tree.update_arguments
            self.kernel_arguments = (
                self.words_address, address(self.claims), self.versions_address,
                leaves, marks, capacity,
            )  # fmt: skip
        if self.words[Word.LIMITED] == 1:
            self.map_limiter_tables()

    @property
    def used_more_than_once(self) -> bool:
        """Whether several storages of this process share this view."""
        return self._users > 1

    def create_limiter_tables(self) -> None:
        """Called under the lock, once the limiter is stored."""
        _allocate(self.path / "limiter.bin", self._limiter_bytes())
        self.map_limiter_tables()

    def map_limiter_tables(self) -> None:
        """Called where the limiter is stored."""
        tables = np.frombuffer(
            _map(self.path / "limiter.bin", self._limiter_bytes()), dtype=np.int64
        )
        users = USER_COLUMNS * MAX_MEMBERS
        self.users = tables[:users].reshape(MAX_MEMBERS, USER_COLUMNS)
        self.times_sampled = tables[users:] if self.words[Word.MAX_TIMES_SAMPLED] else None

    def ask_for_streams(self) -> None:
        """Have rows say which stream they are of; called before the first one is written.

        Raises:
            ConfigurationError: they are there already, and do not.
        """
        with self.lock():
            spec = self.rows
            if spec is None:
                self.words[Word.STREAMS] = 1
            elif STREAM not in spec.leaves:
                raise ConfigurationError(
                    f"the rows in {self.path} do not say who wrote them, since none of the buffers "
                    "asked for it before the first one was written: give the buffers of all "
                    "processes the same sampler, or store a trajectory id per row and pass "
                    "traj_key="
                )

    def map_pass_table(self, size: int) -> np.ndarray:
        """The table of ``passes``, int64, zeros if there was none. Called under the lock."""
        file = self.path / files.PASS
        if not file.exists() or file.stat().st_size != size:  # whoever made it was killed
            _allocate(file, size)
        return np.frombuffer(_map(file, size), dtype=np.int64)

    def _limiter_bytes(self) -> int:
        per_row = 8 * self.capacity if self.words[Word.MAX_TIMES_SAMPLED] else 0
        return 8 * USER_COLUMNS * MAX_MEMBERS + per_row

    def _open_lock(self, flags: int = 0) -> None:
        self._fd = open_lock_file(self.path / "lock", flags)
        status = os.fstat(self._fd)
        self._identity = (status.st_dev, status.st_ino)
        self._fair_lock = FairLock(
            self._fd, timeout_s=self.timeout_s, name=f"the lock of replay directory {self.path}"
        )

    def _take_member_byte(self) -> None:
        """Called under the lock."""
        for index in range(MAX_MEMBERS):
            if lock_byte(self._fd, MEMBER_BYTES + index):
                self.words[Word.JOINS] += 1
                serial = self.words[Word.JOINS]
                self.members[index] = (os.getpid(), serial)
                self.member = serial * MAX_MEMBERS + index
                return
        raise DirectoryError(f"more than {MAX_MEMBERS} processes share {self.path}")

    def _join_after_fork(self) -> None:
        """A forked child inherits the mappings but no lock: it joins as a new member."""
        with _once(_LOCKS.joining):
            if self._pid == os.getpid():
                return  # another thread did it
            old = self._fd, self._fair_lock, self._identity
            if self._fair_lock.closed:
                raise DirectoryError(
                    f"replay directory {self.path} was closed before the fork of this process; "
                    "build the storage again to use it"
                )
            try:
                self._open_lock()
            except FileNotFoundError:
                found = None
            else:
                found = self._identity
            if found != old[2]:
                if found is not None:
                    self._fair_lock.close()
                self._fd, self._fair_lock, self._identity = old
                raise DirectoryError(
                    f"replay directory {self.path} was removed before this forked process first "
                    "used it: fork while another process has it open, or build it with keep=True"
                )
            close_lock_file(old[0])
            self._fair_lock.share_waiting(self.words, Word.WAITING)
            self._held.clear()
            self._closing = False
            with self._fair_lock:
                self._take_member_byte()
            self._pid = os.getpid()
            _leave_at_exit()

    def _is_at_path(self) -> bool:
        """Whether the directory at our path is still the one that we have open."""
        try:
            status = os.stat(self.path / "lock")
        except OSError:
            return False
        return (status.st_dev, status.st_ino) == self._identity

    def _leave(self, clean: bool) -> None:
        """End this process's membership; the last one to leave at a clean end removes all.

        Others may write wherever a process that is no member does, so its own writes end first;
        none begins meanwhile.

        Raises:
            DeadlineError: some write of another thread did not end within ``timeout_s``.
            DirectoryError: this thread is inside a write itself.
        """
        if self._fair_lock.closed or self._pid != os.getpid():
            return
        self._closing = True
        try:
            doomed = self._leave_between_writes(clean)
        except BaseException:
            self._closing = False
            raise
        if doomed is not None:
            files.remove(doomed)

    def _leave_between_writes(self, clean: bool) -> Path | None:
        """Returns the folder that is to be removed."""
        deadline = time.monotonic() + self.timeout_s
        while True:
            self._fair_lock.check_entry()
            try:
                with self.lock():
                    writing = self._threads_that_write()
                    if not writing:
                        doomed = self._give_up_membership(clean)
                        self._fair_lock.close()
                        return doomed
            except OSError:  # among them DeadlineError: somebody who has the lock is stopped
                writing = self._threads_that_write()
                if not writing:
                    if not self._fair_lock.close_from_outside():
                        raise
                    return None
            if threading.get_ident() in writing:
                raise DirectoryError(
                    f"replay directory {self.path} cannot be closed by a signal handler that "
                    "interrupted a write of the same thread. Have the handler set a flag, and "
                    "close afterwards"
                )
            if time.monotonic() > deadline:
                raise DeadlineError(
                    f"waited {self.timeout_s:g} s to close replay directory {self.path}: other "
                    "threads of this process are still writing to it"
                )
            time.sleep(_RETRY_S)

    def _give_up_membership(self, clean: bool) -> Path | None:
        """Called under the lock. Returns the folder that is to be removed, under its new name."""
        index = self.member % MAX_MEMBERS
        self.members[index] = 0
        unlock_byte(self._fd, MEMBER_BYTES + index)
        self.member = -1
        if not clean or stop_requested_since(self._opened_at):
            self.words[Word.INTERRUPTED] = 1  # those who leave after this one did not see it
        if self.stays or self.live_members() or not self._is_at_path():
            return None
        # under the lock: whoever opens the path now makes a new directory
        return files.retire(self.path)


def _no_repair(directory: ReplayDirectory) -> None:
    directory.commit()


_OPEN: dict[tuple[int, int], ReplayDirectory] = {}
"""One view per directory and process, hence one member."""


class _Locks:
    """Between the threads of this process."""

    opening: threading.RLock
    """Held while directories come to :data:`_OPEN` and go."""
    joining: threading.RLock
    """Held while a forked child joins."""

    def renew(self) -> None:
        self.opening, self.joining = threading.RLock(), threading.RLock()


_LOCKS = _Locks()
now_and_in_children(_LOCKS, _Locks.renew)


def _once(lock: threading.RLock) -> threading.RLock:
    """The lock, unless this thread has it already.

    Raises:
        DirectoryError: a signal handler interrupted what the lock guards.
    """
    if lock._is_owned():  # type: ignore[attr-defined]
        raise DirectoryError(
            "a signal handler cannot open, close or look for a replay directory while the thread "
            "that it interrupted does so. Have the handler set a flag, and act on it afterwards"
        )
    return lock


def _leave_at_exit() -> None:
    """Have this process leave its directories when it ends.

    Processes of ``multiprocessing`` run its finalizers only, others run ``atexit`` functions too.
    """
    multiprocessing.util.Finalize(None, _leave_all, exitpriority=-100)


def _leave_all() -> None:
    """At the end of the process; after an unhandled exception nothing is removed."""
    clean = getattr(sys, "last_value", None) is None and sys.exc_info()[1] is None
    for view in list(_OPEN.values()):
        # where a write does not end, this process stays a member until it has ended
        with contextlib.suppress(OSError, DirectoryError):
            view._leave(clean)
    _OPEN.clear()


atexit.register(_leave_all)


def open_directory(
    path: str | os.PathLike[str],
    capacity: int,
    *,
    job_id: str | None = None,
    resume: bool = False,
    keep: bool = False,
    timeout_s: float = 60.0,
    repair: Callable[[ReplayDirectory], None] = _no_repair,
) -> ReplayDirectory:
    """Create the directory or join it; every storage of the process over it shares one view.

    Args:
        path: folder on a local file system, best on ``/dev/shm`` or a fast local disk. A new or
            an empty one, or one that a buffer has made; links are followed once.
        capacity: slots of the ring; the same in every process.
        job_id: processes with the same id belong together. Default: torchrun's run id, SLURM's
            job id, else this process's own.
        resume: take over a directory that an earlier job left, with its rows.
        keep: leave the directory in place when the last process closes it.
        timeout_s: longest wait for the lock, in seconds.
        repair: brings the state in order after a killed holder; given by ``cursor``.

    Raises:
        ConfigurationError: the path or the capacity cannot be right.
        DirectoryError: in use by another job, left by another job (without ``resume``), of
            another capacity or format, damaged, on a network file system, with files of somebody
            else, or it cannot be written. Nothing in it was changed.
        DeadlineError: if the lock could not be had.
    """
    if capacity < 1:
        raise ConfigurationError(f"capacity must be at least 1 row, got {capacity}")
    if os.fspath(path) in ("", "."):
        raise ConfigurationError(
            f"scratch_dir={os.fspath(path)!r}: expected a folder of its own for the buffer, which "
            "its last user removes; is a variable unset?"
        )
    job = default_job_id() if job_id is None else str(job_id)
    folder = Path(os.path.realpath(os.fsdecode(path)))
    _refuse_network_file_system(folder)
    not_ours, made = None, False
    with _once(_LOCKS.opening):
        for _ in range(100):
            try:
                made = _make_folder(folder) or made
                view = _joined_view(folder, capacity, job)
                if view is None:
                    files.check_ours(folder)
                    view = _join(folder, capacity, job, resume, timeout_s, repair)
            except FileNotFoundError:
                continue  # its last member has removed it since
            except DirectoryError as error:
                if not_ours is not None:
                    if made:
                        with contextlib.suppress(OSError):
                            folder.rmdir()
                    raise
                not_ours = error  # or it comes or goes at this moment: look again
                time.sleep(0.01)
                continue
            except (FileExistsError, NotADirectoryError) as error:
                raise DirectoryError(
                    f"{error.filename or folder} is no folder; choose another scratch_dir"
                ) from error
            except (TimeoutError, ConnectionError):
                raise
            except OSError as error:
                raise DirectoryError(
                    f"{folder} cannot be used as a replay directory: {error}; choose another "
                    "scratch_dir, or make room or give permission there"
                ) from error
            if view is not None:
                view._users += 1
                if keep:
                    view.words[Word.KEEP] = 1
                return view
        raise DirectoryError(f"{folder} is removed again and again while it is being opened")


def _make_folder(folder: Path) -> bool:
    """False if it is there."""
    try:
        folder.mkdir(mode=0o700, parents=True)
    except FileExistsError:
        if not folder.is_dir():
            raise
        return False
    return True


def close_directory(directory: ReplayDirectory, *, clean: bool = True) -> None:
    """One user less of the view; the last one of the process leaves the directory.

    Raises:
        DeadlineError, DirectoryError: it cannot leave, see there; nothing has changed.
    """
    with _once(_LOCKS.opening):
        if directory._users == 1:
            directory._leave(clean)
            for key, view in list(_OPEN.items()):
                if view is directory:
                    del _OPEN[key]
        directory._users -= 1


def _joined_view(folder: Path, capacity: int, job: str) -> ReplayDirectory | None:
    status = folder.stat()
    view = _OPEN.get((status.st_dev, status.st_ino))
    if view is None or view._fair_lock.closed:
        return None
    if view._pid != os.getpid():
        try:
            # a second view would be a second member
            view._join_after_fork()
        except DirectoryError:  # another directory by now
            return None
    _check_capacity(view, capacity)
    if view.job_id != job:
        raise DirectoryError(
            f"{folder} is open in this process for job {view.job_id!r}, not {job!r}"
        )
    return view


def _check_capacity(view: ReplayDirectory, capacity: int) -> None:
    if view.capacity != capacity:
        raise DirectoryError(
            f"{view.path} holds a buffer of capacity {view.capacity}, asked for {capacity}; use "
            "that capacity or another directory"
        )


def _join(
    folder: Path,
    capacity: int,
    job: str,
    resume: bool,
    timeout_s: float,
    repair: Callable[[ReplayDirectory], None],
) -> ReplayDirectory | None:
    view = ReplayDirectory(folder, capacity, job, timeout_s)
    view._repair = repair
    view._open_lock(os.O_CREAT)
    joined = False
    try:
        with view._fair_lock:
            if not view._is_at_path():
                return None  # the last member removed it while we waited
            if files.is_being_removed(folder):
                files.clear(folder)  # whoever did it was killed
            try:
                header = read_header(folder)
            except FileNotFoundError:
                header = _create_files(folder, capacity, job)
            _adopt(view, header, resume)
            view._take_member_byte()
            joined = True
    finally:
        if not joined:
            close_lock_file(view._fd)
    status = os.stat(folder)
    _OPEN[(status.st_dev, status.st_ino)] = view
    _leave_at_exit()
    return view


def _adopt(view: ReplayDirectory, header: Header, resume: bool) -> None:
    """Called under the lock: check that the directory is sound and ours to use, then repair it.

    Whatever is refused is as it was.
    """
    asked = view.capacity
    view.capacity = header.capacity
    _check_capacity(view, asked)
    view._map_state()
    alive = view.live_members()
    other_job = header.job_id != view.job_id
    if other_job and alive:
        pids = [view.pid_of(member) for member in alive]
        raise DirectoryError(
            f"{view.path} is in use by job {header.job_id!r} (processes {pids}), this is job "
            f"{view.job_id!r}; choose another scratch_dir, or pass the same job_id to processes "
            "that belong together"
        )
    if other_job and not resume and view.words[Word.WRITE_COUNT]:
        raise DirectoryError(
            f"{view.path} was left by job {header.job_id!r} with {view.length} rows; pass "
            "resume=True to go on with them, or remove it or choose another scratch_dir"
        )
    if found := _what_is_wrong(view, bool(alive)):
        raise damaged(view.path, found)
    if view.words[Word.ROWS_READY]:
        view._map_rows()
    if other_job:
        new = Header(header.capacity, view.job_id, _starter_of(view.job_id))
        _write_json(view.path / files.HEADER, new.as_json())
    if not alive:
        view.words[Word.INTERRUPTED] = 0
        view.members[:] = 0
        view.words[Word.DIRTY] = 1
    if view.words[Word.DIRTY]:
        view._repair(view)


LARGEST_COUNT = 2**62
"""Of tickets and counts: no buffer lives that long."""
_AT_LEAST_0 = (
    Word.CURSOR, Word.WRITE_COUNT, Word.NEXT_WRITE_COUNT, Word.SAMPLED,
    Word.MIN_SIZE_TO_SAMPLE, Word.MAX_TIMES_SAMPLED, *COUNTERS.values(),
)  # fmt: skip


def _what_is_wrong(view: ReplayDirectory, alive: bool) -> str | None:
    """A value in the tables that nobody can have written, or None. Changes nothing.

    Called under the lock; a holder that was killed may have left values of two instants. Tables
    with an entry per row are looked at if no process uses them: where one does, it would fail, too.
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
    if alive and not words[Word.DIRTY]:  # else it is counted anew
        ranges[Word.LENGTH] = (0, capacity)
    for word, (low, high) in ranges.items():
        if not low <= words[word] <= high:
            return f"{word.name} is {words[word]}, expected {low} to {high}"
    for at in range(words[Word.JOURNAL]):
        if not 0 <= words[Word.JOURNAL + 1 + 2 * at] < view.cell(MAX_MEMBERS, 0):
            return "a change was written down of a place that is none"
    for word in (Word.ALPHA, Word.NEXT_ALPHA, Word.EPS, Word.SAMPLES_PER_INSERT, Word.ERROR_BUFFER):
        if not 0 <= view.floats[word] < math.inf:
            return f"{word.name} is {view.floats[word]}, expected a finite number from 0 on"
    if not (view.floats[Word.MAX_PRIORITY] >= 0 or math.isnan(view.floats[Word.MAX_PRIORITY])):
        return f"{Word.MAX_PRIORITY.name} is {view.floats[Word.MAX_PRIORITY]}"
    used = claims[claims[:, CLAIM_COUNT] != 0]
    if used.size and not (
        0 < used[:, CLAIM_COUNT].min() <= used[:, CLAIM_COUNT].max() <= capacity
        and 0 <= used[:, CLAIM_FIRST].min() <= used[:, CLAIM_FIRST].max() <= LARGEST_COUNT
        and 0 <= used[:, CLAIM_MEMBER].min()
        and 0 <= used[:, CLAIM_STATE].min() <= used[:, CLAIM_STATE].max() <= CLAIM_DISCARDED
    ):
        return "a claim is of other slots than the ring has"
    if view.members.min() < 0:
        return "a member has a number below 0"
    if alive:
        return None
    if view.versions.min() < 0:
        return "a row has a version below 0"
    signed = words[Word.RESCALING]  # those that are done are negative meanwhile
    if not (np.isfinite(view.tree.leaves) & ((view.tree.leaves >= 0) | bool(signed))).all():
        return "a priority is not finite or below 0"
    return None


def _create_files(folder: Path, capacity: int, job: str) -> Header:
    """Called under the lock. The header comes last: without it the next one starts afresh."""
    try:
        files.check_ours(folder)  # it may have been emptied and filled since
    except DirectoryError:
        (folder / files.LOCK).unlink()
        raise
    with contextlib.suppress(OSError):  # a folder that lists nothing
        for doomed in list(files.half_removed(folder)):
            files.remove(doomed)
    header = Header(capacity, job, _starter_of(job))
    try:
        for name, size in zip(
            files.TABLES, (control_bytes(), 8 * capacity, tree_bytes(capacity)), strict=True
        ):
            _allocate(folder / name, size)
        control = _map(folder / files.TABLES[0], control_bytes())
        words = np.frombuffer(control, dtype=np.int64)
        words[Word.MAX_SLOT] = -1
        words.view(np.float64)[Word.MAX_PRIORITY] = np.nan
        _write_json(folder / files.HEADER, header.as_json())
    except OSError as error:
        files.clear(folder)
        (folder / files.LOCK).unlink()
        raise DirectoryError(
            f"could not allocate the tables of a buffer of {capacity} rows in {folder}: {error}"
        ) from error
    return header


def _data_bytes(leaf: LeafSpec, capacity: int) -> int:
    return max(1, capacity * leaf.row_bytes)


def control_bytes() -> int:
    """Size of ``control.bin``."""
    return 8 * (_CONTROL_WORDS + 4 * MAX_CLAIMS + 2 * MAX_MEMBERS)


def _allocate(path: Path, size: int) -> None:
    """A zeroed file with its blocks reserved; a sparse one on a full disk kills with SIGBUS."""
    path.unlink(missing_ok=True)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError:
        os.unlink(path)
        raise
    finally:
        os.close(fd)


def _map(path: Path, size: int) -> mmap.mmap:
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError as error:
        raise damaged(path.parent, f"{path.name} is missing") from error
    except IsADirectoryError as error:
        raise damaged(path.parent, f"{path.name} is a folder") from error
    try:
        actual = os.fstat(fd).st_size
        if actual != size:
            raise damaged(path.parent, f"{path.name} has {actual} bytes, expected {size}")
        return mmap.mmap(fd, size)
    finally:
        os.close(fd)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    beside = path.with_name(path.name + ".new")
    try:
        with open(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            json.dump(value, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except OSError:
        beside.unlink(missing_ok=True)
        raise


def file_system_of(
    folder: str | os.PathLike[str], mounts: str | os.PathLike[str] = "/proc/self/mounts"
) -> tuple[str, str]:
    """Kind of the file system that a folder is in, and where that is mounted."""
    resolved = os.path.realpath(folder)
    best, kind = "", ""
    with open(mounts) as lines:
        for line in lines:
            _, point, this_kind = line.split()[:3]
            point = point.replace("\\040", " ")
            inside = resolved == point or resolved.startswith(point.rstrip("/") + "/")
            if inside and len(point) >= len(best):
                best, kind = point, this_kind
    return kind, best


def is_network_file_system(kind: str) -> bool:
    """Whether locks and shared mappings in it do not hold between the processes of a machine."""
    return kind in _NETWORK_FILE_SYSTEMS or kind.startswith("fuse.sshfs")


def _refuse_network_file_system(folder: Path) -> None:
    kind, mount = file_system_of(folder)
    if is_network_file_system(kind):
        raise DirectoryError(
            f"{folder} lies on a network file system ({kind} at {mount}); a replay directory must "
            "be local to the node, for example under /dev/shm"
        )
