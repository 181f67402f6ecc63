"""The replay directory: everything that the processes of one node share about a buffer.

Files::

    header.json     format, capacity, job; written last when the directory is created
    lock            locks on its bytes: the fair lock, and one byte per live member
    control.bin     words, counters, claims and members, see ``tables``
    versions.bin    int64 [capacity]; 0 or odd while a slot has no row or is being written
    tree.bin        priority tree
    rows.json       spec of a row; written with the first rows, before the data files, so that a
                    process that removes the data files knows their names
    data/*.bin      one file per column of a row, [capacity, ...]
    limiter.bin     with a rate limiter: waiting processes, and how often rows were sampled; see
                    ``gate``
    pass.bin        with sampling without replacement: the rows left in the pass; see ``passes``
    frames.json     with ``frames=``: the keys whose frames are stored once; see ``frames``

The module ``opening`` creates a directory or joins an existing one, and the module ``files``
removes its files.

Invariants, even if processes are killed:

1. A slot is *published* exactly when its version is even and above 0. Except during a change (see
   2), only published slots have a leaf above 0 in the tree. Draws happen under the lock, so they
   return only published slots. Every published slot has a leaf above 0, unless its row is hidden,
   see ``times_sampled``.
2. Shared state changes only under the lock, and ``DIRTY`` is set before the first store and cleared
   after the last one. A process that takes the lock and finds ``DIRTY`` set repairs what the killed
   holder left (:meth:`ReplayDirectory.lock`, ``cursor.repair``).
3. Rows are written outside the lock, only by the member whose claim covers their slots, while
   their versions are odd. Claims of live members never share a slot. Claims of dead members lapse.
   Patches and ranked rows (``ranking``) are written under the lock.
4. Versions and tickets never decrease, so (slot, version // 2) permanently names one row. The only
   exception is the odd version of a row that is being patched (``patches``).
"""

from __future__ import annotations

import atexit
import contextlib
import json
import multiprocessing.util
import os
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

from torchrl_dist import own_files
from torchrl_dist.errors import ConfigurationError, DeadlineError, DirectoryError
from torchrl_dist.forks import renewed
from torchrl_dist.replay.law.kernel import address
from torchrl_dist.replay.law.limiter import Admission
from torchrl_dist.replay.law.tree import PriorityTree, tree_bytes
from torchrl_dist.replay.node import files
from torchrl_dist.replay.node.files import damaged
from torchrl_dist.replay.node.frames import Frames, file_sizes, frames_in, shown, with_stacks
from torchrl_dist.replay.node.kernel import Tables, kernel_of
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
from torchrl_dist.replay.node.mapping import (
    allocate,
    map_file,
    write_json,
)
from torchrl_dist.replay.node.tables import (
    CONTROL_WORDS,
    JOURNAL_ENTRIES,
    MAX_MEMBERS,
    MEMBER_PID,
    MEMBER_SERIAL,
    USER_COLUMNS,
    Word,
    control_bytes,
    control_tables,
    counters_in,
)
from torchrl_dist.replay.row.spec import HIDDEN, ColumnSpec, RowSpec, checked_spec
from torchrl_dist.stopping import stop_requested_since
from torchrl_dist.tensors import array_of

_RETRY_S = 1e-3


def read_spec(folder: Path) -> RowSpec:
    """Return the spec in ``rows.json``.

    Raises:
        DirectoryError: the file is damaged.
    """
    try:
        return checked_spec(json.loads(own_files.read_ours(folder / files.ROWS)))
    except (OSError, ValueError, RecursionError) as error:
        raise damaged(folder, f"{files.ROWS} does not describe a row ({error})") from error


class Held(NamedTuple):
    """A write of this process: slots that it has claimed but not published yet."""

    reservation: Any
    frame: FrameType
    """The stack frame of the write. The write continues as long as this frame is on its thread's
    stack."""
    thread: int


class ReplayDirectory:
    """This process's view of a replay directory. Get one with ``opening.open_directory``.

    Attributes:
        path: absolute path.
        capacity: slots of the ring.
        job_id: the job that the directory belongs to.
        words: int64 [64], a memoryview; see ``tables.Word``.
        versions: int64 [capacity].
        claims: int64 [MAX_CLAIMS, 4].
        tree: the priority tree.
        kernel: the object that changes the tables, see the module ``kernel``.
        member: id of this process, ``serial * MAX_MEMBERS + index``; unique in the directory.
        sharers: number of storages of this process that share the view.
        pid: id of this member's process. In a forked child, this is the parent's id until the child
            first uses the directory.
        fair_lock: the lock on bytes of the file ``lock_fd``. Entering it does not repair the state.
        repair: the function that repairs the state after a holder of the lock was killed.
        gate: the gate of the rate limiter, or None.
        users: int64 [MAX_MEMBERS, 5] if there is a limiter; see ``gate``.
        times_sampled: int64 [capacity] if the limiter has ``max_times_sampled``; see the
            module ``times_sampled``.
    """

    gate: Admission | None = None
    users: np.ndarray
    times_sampled: np.ndarray | None = None

    def __init__(
        self,
        path: Path,
        capacity: int,
        job_id: str,
        timeout_s: float,
        repair: Callable[[ReplayDirectory], None],
    ) -> None:
        self.path = path
        self.capacity = capacity
        self.job_id = job_id
        self.timeout_s = timeout_s
        self.member = -1
        self.sharers = 0
        self.pid = os.getpid()
        self._opened_at = time.monotonic()
        self._closing = False
        self._rows: RowSpec | None = None
        self._tensors: list[torch.Tensor] = []
        self._arrays: list[np.ndarray] = []
        self._frames: Frames | None = None
        self.repair = repair
        self._held: dict[int, Held] = {}

    # --- lock --------------------------------------------------------------------------------

    def lock(self) -> contextlib.AbstractContextManager[None]:
        """Return a context manager for exclusive use of the shared state.

        Entering repairs the state if a holder was killed. A thread that holds the lock must not
        enter again. Changes belong between :meth:`begin` and :meth:`commit`.

        Raises:
            DeadlineError: on entry, if the lock was not free within ``timeout_s``. The message
                names the holder.
            DirectoryError: on entry, if the directory was closed.
        """
        return self

    def __enter__(self) -> None:
        if self.pid != os.getpid():
            self.join_after_fork()
        fair_lock = self.fair_lock
        fair_lock.check_entry()
        try:
            fair_lock.__enter__()  # raises if the lock was closed during the wait
            if self.words[Word.DIRTY]:
                self.repair(self)
            fair_lock.inside = sys._getframe(1)
        except BaseException:
            fair_lock.leave_if_inside()
            raise

    def __exit__(self, *raised: object) -> None:
        # An interrupt that Python delivers on entry to this function cannot be handled. The lock is
        # then released at this thread's next use of the directory, or at the process's end.
        fair_lock = self.fair_lock
        try:
            fair_lock.__exit__(None, None, None)
        except BaseException:
            fair_lock.leave_if_inside()
            raise

    def check_entry(self) -> None:
        """Check that this thread is not inside a use of this directory.

        Call it before waiting for another lock, because the holder of that lock may be waiting for
        :meth:`lock`.

        Raises:
            DirectoryError: this thread holds the directory's lock, so it is in a signal handler
                that interrupted a use of the directory.
        """
        if self.pid == os.getpid():
            self.fair_lock.check_entry()
        else:
            once(LOCKS.joining)

    def begin(self) -> None:
        """Announce a change. Call this method under the lock, before the first store."""
        self.words[Word.DIRTY] = 1

    def commit(self) -> None:
        """Mark the change as complete. Call this method under the lock, after the last store."""
        self.words[Word.DIRTY] = 0

    def store_all(self, values: Mapping[int, int]) -> None:
        """Store several words between :meth:`begin` and :meth:`commit`.

        Even if the process is killed during the call, either all words are stored, or none of them.

        Args:
            values: the new values. A key is a :class:`Word`, or a cell of the user table, see
                :meth:`cell`.
        """
        words = self.words
        at: int = Word.JOURNAL
        assert len(values) <= JOURNAL_ENTRIES
        for entry in values.items():
            words[at + 1], words[at + 2] = entry
            at += 2
        words[Word.JOURNAL] = len(values)  # from here on, repair can complete the stores
        self.finish_storing()

    def finish_storing(self) -> None:
        """Make the stores that :meth:`store_all` put into the journal. After a kill, repair makes
        them again."""
        words = self.words
        for at in range(words[Word.JOURNAL]):
            where, value = words[Word.JOURNAL + 1 + 2 * at], words[Word.JOURNAL + 2 + 2 * at]
            if where < CONTROL_WORDS:
                words[where] = value
            else:
                self.users.flat[where - CONTROL_WORDS] = value
        words[Word.JOURNAL] = 0

    @staticmethod
    def cell(row: int, column: int) -> int:
        """Return a cell of the user table as a key for :meth:`store_all`."""
        return CONTROL_WORDS + row * USER_COLUMNS + column

    def is_alive(self, member: int) -> bool:
        """Return whether the member's process is alive. A stopped process is alive, too."""
        if member == self.member:
            return True
        serial, index = divmod(member, MAX_MEMBERS)
        return self.members[index, MEMBER_SERIAL] == serial and is_held(
            self.lock_fd, MEMBER_BYTES + index
        )

    @property
    def identity(self) -> int:
        """The identity of this directory. A later directory at the same path has another
        identity."""
        return self.words[Word.IDENTITY]

    @property
    def emptied(self) -> tuple[int, int]:
        """A value that changes whenever any process empties or restores the buffer."""
        return self.words[Word.BASE], self.words[Word.RESTORES]

    @property
    def stays(self) -> bool:
        """Whether the last process that closes the directory keeps the folder."""
        return bool(self.words[Word.KEEP] or self.words[Word.INTERRUPTED])

    def live_members(self) -> list[int]:
        """Return the ids of members whose process is alive."""
        serials = self.members[:, MEMBER_SERIAL]
        ids = [int(serials[i]) * MAX_MEMBERS + int(i) for i in np.flatnonzero(serials)]
        return [member for member in ids if self.is_alive(member)]

    def pid_of(self, member: int) -> int:
        """Return the process id that a member had when it joined."""
        return int(self.members[member % MAX_MEMBERS, MEMBER_PID])

    # --- writes of this process --------------------------------------------------------------

    def hold(self, reservation: Any, frame: FrameType) -> None:
        """Record that this thread writes until ``frame`` has returned.

        Called under the lock before the claim, so that the claim is recorded even if an interrupt
        follows.

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
        """Record that the write has ended."""
        self._held.pop(id(reservation), None)

    def holds_its_equal(self, reservation: Any) -> bool:
        """Return whether another write of this process has the same slots. Called under the lock.

        If so, the write of ``reservation`` was interrupted before it claimed the slots, and the
        other write claimed them later."""
        return any(
            held.reservation == reservation and held.reservation is not reservation
            for held in list(self._held.values())
        )

    def interrupted_writes(self) -> list[Any]:
        """Return this thread's reservations that an interrupt (Ctrl-C) left behind.

        Writes that a signal handler interrupted are not included, because they continue.
        """
        if not self._held:
            return []
        thread, top = threading.get_ident(), sys._getframe()
        return [
            held.reservation
            for held in list(self._held.values())
            if held.thread == thread and not is_on_stack(held.frame, top)
        ]

    def _threads_that_write(self) -> set[int]:
        """Return the threads that write. Writes that an interrupt cut off do not count."""
        tops = sys._current_frames()
        try:
            return {
                held.thread
                for held in list(self._held.values())
                if is_on_stack(held.frame, tops.get(held.thread))
            }
        finally:
            # the values include this frame, and this cycle of references would keep them alive
            tops.clear()

    # --- scalars -----------------------------------------------------------------------------

    @property
    def length(self) -> int:
        """Number of published rows, the same in every process."""
        return self.words[Word.LENGTH]

    @property
    def high(self) -> int:
        """Number of slots in use, 0 .. capacity.

        These are the slots from 0 on that were reserved since the buffer was last emptied. If a
        slot was written in place, it and all slots before it are in use, too."""
        words = self.words
        return min(max(words[Word.CURSOR] - words[Word.BASE], words[Word.IN_PLACE]), self.capacity)

    @property
    def width(self) -> int:
        """The size of the rows' second dimension, or 0; see ``dimensions``."""
        return max(0, self.words[Word.WIDTH])

    def get_float(self, word: Word) -> float:
        return self.floats[word]

    def set_float(self, word: Word, value: float) -> None:
        self.floats[word] = value

    def count(self, word: Word, amount: int = 1) -> None:
        """Add to a counter, with or without the lock.

        Without the lock, one of two simultaneous additions may be lost, which is harmless in
        statistics."""
        self.words[word] += amount

    @property
    def counters(self) -> dict[str, int]:
        """The counters of this directory, over all processes."""
        return counters_in(self.words)

    # --- rows --------------------------------------------------------------------------------

    @property
    def rows(self) -> RowSpec | None:
        """The spec of a row, or None before the first write of any process."""
        if self._rows is None and self.words[Word.ROWS_READY]:
            self.map_rows()
        return self._rows

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The shared rows, one tensor [capacity, ...] per column of :attr:`rows`.

        The tensor of a column whose frames are stored once is all zeros, which take no memory; see
        :meth:`read`."""
        if self._rows is None and self.rows is None:
            return []
        return self._tensors

    @property
    def arrays(self) -> list[np.ndarray]:
        """:attr:`tensors` as arrays, see :func:`array_of`.

        The array of a column whose frames are stored once contains the numbers of the cells that
        hold its frames, int32 [capacity, stack], see ``frames``."""
        if self._rows is None and self.rows is None:
            return []
        return self._arrays

    @property
    def frames(self) -> Frames | None:
        """The frames that are stored once, or None if no row with such frames was written."""
        if self._rows is None and self.rows is None:
            return None
        return self._frames

    def read(self, slots: np.ndarray | slice) -> list[np.ndarray]:
        """Return the values in these slots, [n, ...] per column, without checking their versions.

        The values are copies, unless the slots are a slice and the column has no stored frames."""
        columns = self._taken(slots)
        return columns if self._frames is None else self._frames.expand(columns, _take)

    def read_stored(self, slots: np.ndarray | slice) -> list[np.ndarray]:
        """Return what :meth:`read` returns, but in the stored form of the rows, see
        ``row.stacks``."""
        columns = self._taken(slots)
        return columns if self._frames is None else self._frames.stored(columns, _take)

    def _taken(self, slots: np.ndarray | slice) -> list[np.ndarray]:
        if isinstance(slots, slice):
            return [array[slots] for array in self.arrays]
        return _take(self.arrays, slots)

    def set_frames(self, stacks: Mapping[tuple[str, ...], int]) -> None:
        """Set the keys whose frames are stored once, for all processes.

        Call it before the first row is written.

        Args:
            stacks: number of frames per value, by key.

        Raises:
            ConfigurationError: the directory was set up with other keys or other numbers of frames,
                or already has rows that were written without ``frames=``.
        """
        with self.lock():
            known = self._stacks()
            if self.words[Word.ROWS_READY] or self.words[Word.FRAMES_SET]:
                if known != stacks:
                    raise ConfigurationError(
                        f"frames={shown(stacks)}: {self.path} was set up with "
                        f"{f'frames={shown(known)}' if known else 'no frames'}; pass the same "
                        "frames= in every process, or choose a new scratch_dir for other frames="
                    )
                return
            entries = [{"key": list(key), "stack": stack} for key, stack in stacks.items()]
            write_json(self.path / files.FRAMES, {"frames": entries})
            self.words[Word.FRAMES_SET] = 1

    def _stacks(self) -> dict[tuple[str, ...], int]:
        if not self.words[Word.FRAMES_SET]:
            return {}
        try:
            content = json.loads(own_files.read_ours(self.path / files.FRAMES))
            return {tuple(each["key"]): int(each["stack"]) for each in content["frames"]}
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise damaged(self.path, f"{files.FRAMES} cannot be read ({error})") from error

    def spec_for(self, spec: RowSpec) -> RowSpec:
        """Return the spec of the rows. Before the first row is written, return the spec that rows
        with ``spec`` would get."""
        if self.rows is not None:
            return self.rows
        spec = with_stacks(spec, self._stacks())
        asked = [each for bit, each in enumerate(HIDDEN) if self.words[Word.HIDDEN] >> bit & 1]
        more = [each for each in asked if each not in spec.columns]
        return replace(spec, columns=(*spec.columns, *more)) if more else spec

    def create_rows(self, spec: RowSpec) -> None:
        """Allocate the data files before the first row is written. Blocks while another process
        allocates them.

        Raises:
            ConfigurationError: the rows lack a key of ``frames=``, or its values are not stacks of
                frames.
            DirectoryError: the disk has no room for the files. No file is left behind.
        """
        with self.lock():
            if self.words[Word.ROWS_READY]:
                return
            spec = self.spec_for(spec)
            frame_files = file_sizes(self.capacity, spec)
            files.remove_data(self.path)  # a writer that was killed here may have left them
            folder = self.path / files.DATA
            try:
                write_json(self.path / files.ROWS, spec.as_json())
                folder.mkdir(mode=0o700)
                for column in spec.columns:
                    allocate(folder / column.file_name, data_bytes(column, self.capacity))
                for name, size in frame_files.items():
                    allocate(folder / name, size)
            except FileExistsError as error:
                (self.path / files.ROWS).unlink()
                raise DirectoryError(
                    f"{folder} already exists, with files of another program; remove them, or "
                    "choose another scratch_dir"
                ) from error
            except OSError as error:
                files.remove_data(self.path)
                wanted = data_size(spec, self.capacity) / 2**20
                raise DirectoryError(
                    f"could not allocate {wanted:.0f} MiB for {self.capacity} rows in {self.path}: "
                    f"{error}; free space there, or choose another scratch_dir or a smaller "
                    "capacity"
                ) from error
            self.words[Word.ROWS_READY] = 1

    def map_rows(self) -> None:
        spec = read_spec(self.path)
        tensors = []
        arrays = []
        for column in spec.columns:
            shape = (self.capacity, *column.shape)
            file = self.path / files.DATA / column.file_name
            buffer = map_file(file, data_bytes(column, self.capacity))
            # because writes outside inference mode fail for tensors created in this mode
            with torch.inference_mode(False):
                if column.stack:
                    tensors.append(torch.zeros((), dtype=column.dtype).expand(shape))
                    cells = np.frombuffer(buffer, np.int32).reshape(self.capacity, column.stack)
                    arrays.append(cells)
                    continue
                if column.row_bytes == 0:
                    tensors.append(torch.empty(shape, dtype=column.dtype))
                else:
                    tensors.append(torch.frombuffer(buffer, dtype=column.dtype).reshape(shape))
            arrays.append(array_of(tensors[-1]))
        if frames_in(spec):
            self._frames = Frames(
                self.path / files.DATA, spec, self.versions, self.claims, self.words, self.kernel
            )
        self.kernel.use_columns(arrays)
        self._tensors = tensors
        self._arrays = arrays
        self._rows = spec

    # --- joining and leaving -----------------------------------------------------------------

    def map_state(self) -> None:
        control = map_file(self.path / "control.bin", control_bytes())
        # a memoryview is faster than an array, and returns plain Python numbers, not NumPy scalars
        self.words = memoryview(control)[: 8 * CONTROL_WORDS].cast("q")
        self.floats = memoryview(control)[: 8 * CONTROL_WORDS].cast("d")
        self.fair_lock.share_waiting(self.words, Word.WAITING)
        _, self.claims, self.members = control_tables(np.frombuffer(control, dtype=np.int64))
        self.versions = np.frombuffer(
            map_file(self.path / "versions.bin", 8 * self.capacity), dtype=np.int64
        )
        self.tree = PriorityTree(
            self.capacity, map_file(self.path / "tree.bin", tree_bytes(self.capacity))
        )
        self.words_address = address(np.frombuffer(control, dtype=np.int64))
        tables = Tables(self.words, self.floats, self.claims, self.versions, self.tree)
        self.kernel = kernel_of(tables)
        if self.words[Word.LIMITED] == 1:
            self.map_limiter_tables()

    @property
    def used_more_than_once(self) -> bool:
        """Whether several storages of this process share this view."""
        return self.sharers > 1

    def create_limiter_tables(self) -> None:
        """Create the limiter's tables. Called under the lock, once the limiter is stored."""
        allocate(self.path / "limiter.bin", self._limiter_bytes())
        self.map_limiter_tables()

    def map_limiter_tables(self) -> None:
        """Map the limiter's tables, once the limiter is stored."""
        tables = np.frombuffer(
            map_file(self.path / "limiter.bin", self._limiter_bytes()), dtype=np.int64
        )
        users = USER_COLUMNS * MAX_MEMBERS
        self.users = tables[:users].reshape(MAX_MEMBERS, USER_COLUMNS)
        self.times_sampled = tables[users:] if self.words[Word.MAX_TIMES_SAMPLED] else None

    def ask_for_numbers(self, hidden: ColumnSpec) -> None:
        """Add the column ``hidden``, which numbers the rows. Call this before the first write.

        Raises:
            ConfigurationError: there are already rows without numbers.
        """
        with self.lock():
            spec = self.rows
            if spec is None:
                self.words[Word.HIDDEN] |= 1 << HIDDEN.index(hidden)
            elif hidden not in spec.columns:
                raise ConfigurationError(
                    f"the rows in {self.path} do not record which row follows which, because no "
                    "buffer needed this when the first row was written; use the same sampler and "
                    "sample_unit in the buffers of all processes. To sample slices, you can also "
                    "store a trajectory id per row and pass traj_key="
                )

    def map_pass_table(self, size: int) -> np.ndarray:
        """Map the table of ``passes``, int64, or create it with zeros. Called under the lock."""
        file = self.path / files.PASS
        if not file.exists() or file.stat().st_size != size:  # its creator was killed
            allocate(file, size)
        return np.frombuffer(map_file(file, size), dtype=np.int64)

    def _limiter_bytes(self) -> int:
        per_row = 8 * self.capacity if self.words[Word.MAX_TIMES_SAMPLED] else 0
        return 8 * USER_COLUMNS * MAX_MEMBERS + per_row

    def open_lock(self, flags: int = 0) -> None:
        self.lock_fd = open_lock_file(self.path / "lock", flags)
        status = os.fstat(self.lock_fd)
        self._identity = (status.st_dev, status.st_ino)
        self.fair_lock = FairLock(
            self.lock_fd, timeout_s=self.timeout_s, name=f"the lock of replay directory {self.path}"
        )

    def take_member_byte(self) -> None:
        """Lock a free member byte. Called under the lock."""
        for index in range(MAX_MEMBERS):
            if lock_byte(self.lock_fd, MEMBER_BYTES + index):
                self.words[Word.JOINS] += 1
                serial = self.words[Word.JOINS]
                self.members[index] = (os.getpid(), serial)
                self.member = serial * MAX_MEMBERS + index
                return
        raise DirectoryError(
            f"{MAX_MEMBERS} processes share {self.path} already, and no more can join; end some of "
            "these processes, or let some use the buffer over RPC (replay_buffer)"
        )

    def join_after_fork(self) -> None:
        """Join as a new member, because a forked child inherits the mappings but no lock."""
        with once(LOCKS.joining):
            if self.pid == os.getpid():
                return  # another thread has joined
            old = self.lock_fd, self.fair_lock, self._identity
            if self.fair_lock.closed:
                raise DirectoryError(
                    f"replay directory {self.path} was closed before this process was forked; "
                    "build the storage again to use it"
                )
            try:
                self.open_lock()
            except FileNotFoundError:
                found = None
            else:
                found = self._identity
            if found != old[2]:
                if found is not None:
                    self.fair_lock.close()
                self.lock_fd, self.fair_lock, self._identity = old
                raise DirectoryError(
                    f"replay directory {self.path} was removed before this forked process first "
                    "used it; let another process keep it open until then, or build it with "
                    "keep=True"
                )
            close_lock_file(old[0])
            self.fair_lock.share_waiting(self.words, Word.WAITING)
            self._held.clear()
            self._closing = False
            with self.fair_lock:
                self.take_member_byte()
            self.pid = os.getpid()
            leave_at_exit()

    def is_at_path(self) -> bool:
        """Return whether the directory at the path is still the one that this view has open."""
        try:
            status = os.stat(self.path / "lock")
        except OSError:
            return False
        return (status.st_dev, status.st_ino) == self._identity

    def leave(self, clean: bool) -> None:
        """End this process's membership.

        The last process that leaves removes all files, unless :attr:`stays` is true. If a process
        leaves with ``clean=False`` or after a stop signal, :attr:`stays` becomes true.

        Other processes may take the slots of a process that is not a member. This method therefore
        waits until the writes of this process have ended and no new write can begin.

        Raises:
            DeadlineError: a write of another thread did not end within ``timeout_s``, or the lock
                was not free in time.
            DirectoryError: this thread itself is inside a write.
        """
        if self.fair_lock.closed or self.pid != os.getpid():
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
        """Leave when this process has no write in progress. Return the result of
        :meth:`_give_up_membership`."""
        deadline = time.monotonic() + self.timeout_s
        while True:
            self.fair_lock.check_entry()
            with self.lock():
                writing = self._threads_that_write()
                if not writing:
                    doomed = self._give_up_membership(clean)
                    self.fair_lock.close()
                    return doomed
            if threading.get_ident() in writing:
                raise DirectoryError(
                    f"replay directory {self.path} cannot be closed by a signal handler that "
                    "interrupted a write of the same thread. Have the handler set a flag, and "
                    "close afterwards"
                )
            if time.monotonic() > deadline:
                raise DeadlineError(
                    f"waited {self.timeout_s:g} s to close replay directory {self.path}: other "
                    "threads of this process are still writing to it; close it after these writes "
                    "have ended"
                )
            time.sleep(_RETRY_S)

    def _give_up_membership(self, clean: bool) -> Path | None:
        """End the membership. Return the folder's new path if it was renamed for removal, otherwise
        None.

        Called under the lock."""
        index = self.member % MAX_MEMBERS
        self.members[index] = 0
        unlock_byte(self.lock_fd, MEMBER_BYTES + index)
        self.member = -1
        if not clean or stop_requested_since(self._opened_at):
            self.words[Word.INTERRUPTED] = 1  # so that processes that leave later keep the folder
        if self.stays or self.live_members() or not self.is_at_path():
            return None
        # A process that opens the path now waits for the lock, and then creates a new directory.
        return files.retire(self.path)


OPEN: dict[tuple[int, int], ReplayDirectory] = {}
"""The views of the directories that this process has open, by device and inode of the lock file.
There is only one view per directory, so this process is only one member."""


class _Locks:
    """Locks between the threads of this process."""

    def __init__(self) -> None:
        self.opening = renewed(self, "opening", threading.RLock)
        """Held while directories are added to and removed from :data:`OPEN`."""
        self.joining = renewed(self, "joining", threading.RLock)
        """Held while a forked child joins."""


LOCKS = _Locks()


def once(lock: threading.RLock) -> threading.RLock:
    """Return the lock, unless this thread already holds it.

    Raises:
        DirectoryError: a signal handler interrupted code that the lock guards.
    """
    if lock._is_owned():  # type: ignore[attr-defined]  # not in typeshed
        raise DirectoryError(
            "a signal handler cannot open, close or look for a replay directory if it interrupted "
            "a thread that was doing one of these. Have the handler set a flag, and act on it "
            "afterwards"
        )
    return lock


def leave_at_exit() -> None:
    """Let this process leave its directories when it ends.

    Processes that ``multiprocessing`` starts run only its finalizers, not ``atexit`` functions.
    """
    multiprocessing.util.Finalize(None, _leave_all, exitpriority=-100)


def _leave_all() -> None:
    """Leave all directories at the end of the process. After an unhandled exception, keep their
    files."""
    clean = getattr(sys, "last_value", None) is None and sys.exc_info()[1] is None
    for view in list(OPEN.values()):
        # leave() raises if a write of this process has not ended; the process then stays a member
        # until it has exited
        with contextlib.suppress(OSError, DirectoryError):
            view.leave(clean)
    OPEN.clear()


atexit.register(_leave_all)


def _take(arrays: Sequence[np.ndarray], slots: np.ndarray) -> list[np.ndarray]:
    return [array.take(slots, 0) for array in arrays]


def data_size(spec: RowSpec, capacity: int) -> int:
    """Return the bytes of all files with rows and frames."""
    rows = sum(data_bytes(column, capacity) for column in spec.columns)
    return rows + sum(file_sizes(capacity, spec).values())


def data_bytes(column: ColumnSpec, capacity: int) -> int:
    return max(1, capacity * (4 * column.stack or column.row_bytes))
