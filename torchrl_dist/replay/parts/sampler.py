"""Prioritized and uniform samplers over a replay directory, for all processes of the node."""

from __future__ import annotations

import hashlib
import json
import math
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torchrl.data.replay_buffers.sample_units import Sequence
from torchrl.data.replay_buffers.samplers import PrioritizedSampler, RandomSampler, Sampler
from torchrl.data.replay_buffers.storages import Storage

from torchrl_dist import own_files
from torchrl_dist.errors import CheckpointError, ConfigurationError, DirectoryError
from torchrl_dist.forks import now_and_in_children
from torchrl_dist.replay.law.limiter import RateLimiter
from torchrl_dist.replay.law.placement import as_slots, coordinates_of
from torchrl_dist.replay.node.directory import ReplayDirectory
from torchrl_dist.replay.node.priorities import set_alpha, update
from torchrl_dist.replay.node.tables import Word
from torchrl_dist.replay.node.times_sampled import TooFewDrawsError, count_draws
from torchrl_dist.replay.parts.drawn import Drawn
from torchrl_dist.replay.parts.storage import (
    Draw,
    NoRowsError,
    SharedMemmapStorage,
    check_batch_size,
)
from torchrl_dist.replay.parts.windows import Neighbours, Window, read_windows
from torchrl_dist.replay.row import _torchrl
from torchrl_dist.replay.row.spec import ORDER

EMPTY = (
    "Cannot sample from an empty storage. No row has been written yet, or the buffer was emptied. "
    "Extend the buffer first, or check len(buffer). If its storage has a "
    "RateLimiter(min_size_to_sample=n), sample() waits until n rows exist."
)
_RECENT_ROWS = 2**19  # the slots and generations of these rows take 8 MiB
_ROWS_PER_BATCH = 64  # cost of a batch in memory and hashing, expressed in rows
_SAME_VALUES = 4
# How long a thread waits for other threads to leave :class:`RecentGenerations`. These threads leave
# after microseconds, unless a signal handler interrupted them or they get no core for a while.
_SHORT_PATIENCE_S, _LONG_PATIENCE_S = 0.25, 10.0

_T = TypeVar("_T")


class RecentGenerations:
    """The generations that recent index tensors of this process referred to.

    TorchRL's ``update_priority`` receives slots without generations. This object finds the
    generations if this process drew or wrote a batch with these slots. It first looks for the index
    tensor itself, and then for an index tensor with the same values, because batches are often
    cloned or sent to another device and back.

    The slots and generations are copied into ring buffers. If the small tensors of thousands of
    batches stayed alive instead, they would lie between large tensors, and the allocator could not
    reuse the memory around them.

    In a signal handler that interrupted a use of this object, ``remember`` does nothing, and
    ``recall`` raises. In every thread except the main thread, the methods wait only a limited time
    until no other thread uses this object (``remember`` waits 0.25 s, ``recall`` 10 s). After this
    time, ``remember`` does nothing, and ``recall`` raises, because a signal handler in the main
    thread may be waiting for a lock that the calling thread holds.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._clear()
        now_and_in_children(self, RecentGenerations._renew)

    def _clear(self) -> None:
        self._slots = np.empty(_RECENT_ROWS, np.int64)
        self._generations = np.empty(_RECENT_ROWS, np.int64)
        self._next = 0  # next position; it grows without end, and is taken modulo the rings' size
        self._batches: deque[_Batch] = deque()  # the oldest first
        self._by_identity: dict[int, _Batch] = {}
        # Hashing takes as long as locking, so batches are hashed only when an unknown tensor is
        # looked up.
        self._unhashed: deque[_Batch] = deque()
        self._by_values: dict[bytes, deque[_Batch]] = {}

    def _renew(self) -> None:
        if not self._lock.acquire(blocking=False):
            self._clear()  # a thread of the parent was changing the rings at the fork
        self._lock = threading.RLock()
        self._main_thread = threading.main_thread().ident  # in a child: the thread that forked

    def remember(self, index: torch.Tensor, generation: torch.Tensor, *, written: bool) -> None:
        """Record slots and their generations, both int64 [n]."""
        try:
            self._alone(_SHORT_PATIENCE_S, self._remember, index, generation, written)
        except DirectoryError:
            pass  # treat the batch like a forgotten one

    def _alone(self, patience_s: float, action: Callable[..., _T], *args: Any) -> _T:
        """Return ``action(*args)``, called while no other thread uses this object.

        Raises:
            DirectoryError: the caller is a signal handler that interrupted a use of this object, or
                another thread's use did not end within ``patience_s``.
        """
        lock = self._lock
        owned = lock._is_owned()  # type: ignore[attr-defined]  # not in typeshed
        if not owned and threading.get_ident() == self._main_thread:
            with lock:  # an interrupt after acquire(), but before try, would leave the lock held
                return action(*args)
        if owned or not lock.acquire(timeout=patience_s):
            raise DirectoryError(
                "a signal handler that interrupted a use of the buffer can neither use the buffer "
                "nor wait for a thread that uses it. Have the handler only set a flag, and act on "
                "the flag between two uses of the buffer"
            )
        try:
            return action(*args)
        finally:
            lock.release()

    def _remember(self, index: torch.Tensor, generation: torch.Tensor, written: bool) -> None:
        slots, generations = index.numpy(), generation.numpy()
        count = slots.size
        takes = min(_ROWS_PER_BATCH + count, _RECENT_ROWS)
        start = self._next
        at = start % _RECENT_ROWS
        if at + takes > _RECENT_ROWS:  # a batch must be contiguous
            start, at = start + _RECENT_ROWS - at, 0
        self._next = start + takes
        while self._batches and self._batches[0].start < self._next - _RECENT_ROWS:
            self._forget(self._batches.popleft())
        if count <= takes:
            mine = slice(at, at + count)
            self._slots[mine], self._generations[mine] = slots, generations
            slots, generations = self._slots[mine], self._generations[mine]
        else:
            slots, generations = slots.copy(), generations.copy()
        batch = _Batch(weakref.ref(index), slots, generations, start, written, id(index))
        self._batches.append(batch)
        self._by_identity[id(index)] = batch
        self._unhashed.append(batch)

    def _forget(self, batch: _Batch) -> None:
        if self._by_identity.get(batch.identity) is batch:
            del self._by_identity[batch.identity]
        if self._unhashed and self._unhashed[0] is batch:  # _unhashed is ordered like _batches
            self._unhashed.popleft()
            return
        same = self._by_values.get(batch.digest)
        if same and same[0] is batch:
            same.popleft()
            if not same:
                del self._by_values[batch.digest]

    def recall(self, index: int | torch.Tensor) -> torch.Tensor | None:
        """Return the generations that the index refers to, or None if they are unknown.

        If a cloned index matches several draws, the oldest draw counts, because it is better to
        drop a priority than to set it on another row. Draws before this process's own last write to
        these slots never count.

        Raises:
            DirectoryError: the caller is a signal handler that interrupted a use of this object, or
                another thread's use did not end within 10 s.
        """
        return self._alone(_LONG_PATIENCE_S, self._recall, index)

    def _recall(self, index: int | torch.Tensor) -> torch.Tensor | None:
        known = self._by_identity.get(id(index))
        if known is not None and known.index() is index:
            return torch.from_numpy(known.generations.copy())
        while self._unhashed:
            batch = self._unhashed.popleft()
            batch.digest = _digest(batch.slots)
            self._by_values.setdefault(batch.digest, deque(maxlen=_SAME_VALUES)).append(batch)
        return _oldest_of(self._by_values.get(_digest(as_slots(index).numpy()), ()))


def _oldest_of(batches: Iterable[_Batch]) -> torch.Tensor | None:
    """Return the smallest generation of each slot over ``batches``. All batches have the same
    slots, and the oldest batch comes first.

    Batches that are older than this process's last write to the slots do not count."""
    candidates: list[np.ndarray] = []
    for batch in reversed(list(batches)):
        candidates.append(batch.generations)
        if batch.written:
            break
    return torch.from_numpy(np.minimum.reduce(candidates)) if candidates else None


@dataclass(eq=False)
class _Batch:
    index: weakref.ref[torch.Tensor]
    slots: np.ndarray
    generations: np.ndarray
    start: int
    """The batch's first position in the rings."""
    written: bool
    identity: int
    digest: bytes = b""


def _digest(slots: np.ndarray) -> bytes:
    return hashlib.blake2b(np.ascontiguousarray(slots).data, digest_size=16).digest()


class SharedSampler(Sampler):
    """The base of all samplers. It has the storage's directory and the random numbers.

    Each process has a random generator that the operating system seeds, so ranks draw different
    batches even if their programs set the same seed. ``ReplayBuffer.set_rng`` replaces the
    generator.
    """

    _directory: ReplayDirectory | None
    _knows_rows = False
    """Whether the sampler keeps data about rows. If it does, it cannot change to another
    directory."""
    _no_counts = ""
    """The end of an error message that says why the class cannot obey ``max_times_sampled``."""
    _no_windows = ""
    """The end of an error message that says why the class does not draw anchors of windows."""
    _not_copied: tuple[str, ...] = (
        "_directory",
        "_neighbours",
        "_numbered",
        "_random",
        "_random_pid",
        "_recent",
    )
    """Attributes that ``_setup`` creates anew in a copy."""
    _window: Window | None = None
    """The windows that the buffer's ``sample_unit`` asks for around each drawn row."""
    _serves_buffer = False
    """Whether a buffer has called ``draw_windows``, with windows or with None."""

    def _setup(self) -> None:
        self._directory = None
        self._neighbours: Neighbours | None = None
        self._numbered: Callable[[], Storage | None] = lambda: None  # storage with numbered rows
        self._random = np.random.default_rng()
        self._random_pid = os.getpid()

    def attach(self, storage: Storage) -> ReplayDirectory:
        """Bind to the storage's directory. The buffer's constructor calls this method.
        Idempotent."""
        here: Any = getattr(storage, "directory", None)
        bound = self._directory
        if bound is not None and here is bound:
            return bound
        if bound is not None and self._knows_rows:
            raise ConfigurationError(
                f"this {type(self).__name__} already samples from {bound.path}; create one sampler "
                "per storage"
            )
        if not isinstance(storage, SharedMemmapStorage):
            raise ConfigurationError(
                f"{type(self).__name__} samples from a SharedMemmapStorage, got "
                f"{type(storage).__name__}; build the buffer with "
                "storage=SharedMemmapStorage(capacity, scratch_dir=...)"
            )
        self._check_limiter(storage)
        if storage.ndim > 1:
            self._check_order(storage)
        self._bind(storage, storage.directory)
        self._directory = storage.directory
        return storage.directory

    def _check_limiter(self, storage: Any) -> None:
        """
        Raises:
            ConfigurationError: the class cannot obey the storage's ``max_times_sampled``.
        """
        limiter: RateLimiter | None = storage.limiter if self._no_counts else None
        if limiter is not None and limiter.max_times_sampled is not None:
            raise ConfigurationError(
                f"{type(self).__name__} {self._no_counts}; use a limiter without max_times_sampled"
            )

    def _check_order(self, storage: SharedMemmapStorage) -> None:
        """Raise ConfigurationError if the class needs rows in the order of writing, and the storage
        has two dimensions."""

    def _bind(self, storage: SharedMemmapStorage, directory: ReplayDirectory) -> None:
        """Prepare draws from a directory, or raise ConfigurationError."""

    def draw_windows(self, unit: Sequence | Window | None, storage: Storage) -> None:
        """From now on, draw windows around rows, or single rows if ``unit`` is None. A buffer calls
        this method when it is built, and may call it again.

        Raises:
            ConfigurationError: the class does not draw windows, another buffer wants other windows,
                the rows in the storage do not record which row follows which, or the storage's
                limiter has ``max_times_sampled``.
        """
        window = None if unit is None else Window.of(unit)
        if self._serves_buffer and window != self._window:
            raise ConfigurationError(
                f"this {type(self).__name__} already serves a buffer with the windows "
                f"{self._window}, but another buffer asks for {window} (None means single rows); "
                "create one sampler per buffer"
            )
        if window is None:
            self._serves_buffer = True
        if window is None or self._numbered() is storage:
            return
        if self._no_windows:
            raise ConfigurationError(
                f"{type(self).__name__} {self._no_windows}; with sample_unit=Sequence(...), use a "
                "SharedRandomSampler or SharedPrioritizedSampler"
            )
        if storage.ndim > 1:
            storage.check_order("windows of sample_unit=Sequence(...)")
        limiter: RateLimiter | None = storage.limiter
        if limiter is not None and limiter.max_times_sampled is not None:
            raise ConfigurationError(
                "windows of sample_unit=Sequence(...) include rows regardless of how often they "
                "were sampled; use a limiter without max_times_sampled"
            )
        self._ask_for_numbers()
        self._window, self._numbered, self._serves_buffer = window, weakref.ref(storage), True

    def _ask_for_numbers(self) -> None:
        """Let all processes number the rows that they write, see ``row.numbers``."""
        assert self._directory is not None
        self._directory.ask_for_numbers(ORDER)

    def _rows_of(self, batch_size: int) -> int:
        """Return the number of rows in a batch."""
        return batch_size if self._window is None else batch_size * self._window.size

    def note_written(self, index: torch.Tensor, generation: torch.Tensor) -> None:
        """Record new rows. The writer of this process calls this method after it has published the
        rows."""

    def can_sample(self, storage: Storage, batch_size: int) -> bool:
        """Return whether ``sample`` would begin without a wait.

        Raises:
            DirectoryError: the storage was closed.
        """
        directory = self.attach(storage)
        if isinstance(storage, SharedMemmapStorage):
            storage.check_open()
        gate = directory.gate
        if gate is not None and not gate.can_sample(self._rows_of(batch_size)):
            return False
        return directory.length > 0

    def sample(self, storage: Storage, batch_size: int) -> tuple[Any, dict[Any, Any]]:
        """Return slots, int64 [batch_size], and the entries that the class adds to a batch.

        Raises:
            RuntimeError: no row is published, and none is being written.
        """
        drawn = self._next(storage, batch_size)
        info = self._info(drawn)
        if storage.ndim > 1:
            drawn.index, drawn.second = coordinates_of(drawn.index, storage.width)
            return (drawn.index, drawn.second), info
        return drawn.index, info if self._window is None else info | self._window.info(drawn)

    def draw(self, storage: Storage, count: int, *, stored: bool = False) -> Drawn:
        """Draw rows without waiting for a limiter, and return everything that is known about these
        rows.

        Args:
            count: number of rows, or of windows.
            stored: whether ``tensors`` are the stored form of the rows, see ``row.stacks``.
        """
        raise NotImplementedError

    def _read(self, storage: SharedMemmapStorage, law: Draw, count: int, stored: bool) -> Drawn:
        """Copy the rows that ``law`` draws, or their windows. Wait while rows are being written.

        Raises:
            NoRowsError, DeadlineError: see ``storage.once_rows_are_published``.
            ConfigurationError: ``count`` is negative.
        """
        check_batch_size(count)
        return storage.once_rows_are_published(lambda: self._read_now(storage, law, count, stored))

    def _read_now(self, storage: SharedMemmapStorage, law: Draw, count: int, stored: bool) -> Drawn:
        """Do the work of ``_read`` without waiting."""
        window, near = self._window, self._neighbours
        if window is None or storage.directory.rows is None:
            slots, generation, leaf, columns = storage.read_rows(law, count, stored=stored)
            return Drawn.of(storage.directory.rows, slots, generation, leaf, columns)
        if near is None or near.busy or near.directory is not storage.directory:
            self._neighbours = near = Neighbours(storage.directory, window.end_key)
        return read_windows(storage, near, window, law, count, stored)

    def _info(self, drawn: Drawn) -> dict[Any, torch.Tensor]:
        """Return the entries that the class adds to a batch."""
        return {}

    def _next(self, storage: Storage, batch_size: int) -> Drawn:
        """Wait until the next sample is admitted, draw its rows, and hand them to the storage."""
        gate = self.attach(storage).gate
        if gate is None:
            drawn = self.draw(storage, batch_size)
        else:
            count = self._rows_of(batch_size)
            drawn = gate.draw(count, lambda: self.draw(storage, batch_size), storage)
            # correct the count, because a batch has fewer rows at the end of a pass, or if slices
            # end early
            if drawn.index.numel() != count:
                gate.count_samples(drawn.index.numel() - count)
        storage.hand_over(drawn)
        return drawn

    def _uniforms(self, count: int) -> np.ndarray:
        """Return random numbers, float64 [count] in [0, 1)."""
        if self._rng is not None:
            device = self._rng.device
            drawn = torch.rand(count, generator=self._rng, dtype=torch.float64, device=device)
            return drawn.cpu().numpy()
        if self._random_pid != os.getpid():  # a forked child must not repeat its parent's draws
            self._random, self._random_pid = np.random.default_rng(), os.getpid()
        return self._random.random(count)

    def _empty(self) -> None:
        pass  # the writer empties the directory

    # The storage saves priorities with the rows. The other state belongs to this process.

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._empty()

    def dumps(self, path: str | Path) -> None:
        own_files.make_folder(path)
        text = json.dumps(self.state_dict()).encode()
        own_files.atomic_write(Path(path, "sampler.json"), lambda file: file.write(text))

    def loads(self, path: str | Path) -> None:
        self.load_state_dict(json.loads(own_files.read_plain(Path(path, "sampler.json"))))

    def __getstate__(self) -> dict[str, Any]:
        # not PrioritizedSampler's method, which refuses to copy trees; here, the copy uses the tree
        # that all processes share
        state = Sampler.__getstate__(self)
        for name in self._not_copied:
            state.pop(name, None)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._setup()


class SharedRandomSampler(SharedSampler, RandomSampler):
    """Sample uniformly with replacement among the rows that are published at the time of the draw.

    TorchRL's ``RandomSampler`` draws from ``0 .. len``. While other processes write, such draws
    miss some rows and include unfinished rows. This sampler takes no lock unless the rows that it
    copies keep changing.

    Example:
        >>> storage = SharedMemmapStorage(100, scratch_dir="/dev/shm/example")
        >>> sampler = SharedRandomSampler()
        >>> buffer = SharedReplayBuffer(storage=storage, sampler=sampler, batch_size=4)
        >>> slots = buffer.extend(TensorDict({"obs": torch.zeros(8, 4)}, [8]))
        >>> buffer.sample()["obs"].shape
        torch.Size([4, 4])
    """

    def __init__(self) -> None:
        super().__init__()
        self._setup()

    def draw(self, storage: Storage, count: int, *, stored: bool = False) -> Drawn:
        """Draw rows uniformly, see the base class. ``mass`` is the number of rows in the buffer."""
        directory = self.attach(storage)
        assert isinstance(storage, SharedMemmapStorage)
        mass = directory.length

        def draw_counted(count: int, locked: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
            def draw_more(count: int) -> tuple[np.ndarray, np.ndarray]:
                leaves, high = directory.tree.leaves, directory.high
                drawn = np.empty(0, np.int64)
                tries = 2 * (count + 8) * high // max(directory.words[Word.AVAILABLE], 1)
                if 4 * tries < high:  # trying random slots is faster than listing all
                    drawn = (self._uniforms(tries) * high).astype(np.int64)
                    drawn = drawn[leaves[drawn] > 0][:count]
                if drawn.size < count:
                    available = np.flatnonzero(leaves)
                    if not available.size:
                        raise TooFewDrawsError(EMPTY)
                    more = (self._uniforms(count - drawn.size) * available.size).astype(np.int64)
                    drawn = np.append(drawn, available[more])
                return drawn, leaves[drawn]

            nonlocal mass
            with nullcontext() if locked else directory.lock():
                if not directory.length:
                    raise NoRowsError(EMPTY)
                mass = directory.words[Word.AVAILABLE]
                slots, of_slots = draw_more(count)
                count_draws(directory, slots, of_slots, draw_more)
                return slots, directory.versions[slots], of_slots

        def draw(count: int, locked: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
            slots = np.empty(count, dtype=np.int64)
            versions = np.empty(count, dtype=np.int64)
            todo = np.arange(count)
            for _ in range(100):
                high = directory.high
                if not directory.length or not high:
                    raise NoRowsError(EMPTY)
                slots[todo] = (self._uniforms(todo.size) * high).astype(np.int64)
                versions[todo] = directory.versions[slots[todo]]
                now = versions[todo]
                todo = todo[(now & 1 == 1) | (now == 0)]
                if not todo.size:
                    return slots, versions, np.ones(count)
            # nearly every slot is being rewritten, so choose among the published slots
            now = directory.versions.copy()
            published = np.flatnonzero((now & 1 == 0) & (now > 0))
            if not published.size:
                raise NoRowsError(EMPTY)
            slots[todo] = published[(self._uniforms(todo.size) * published.size).astype(np.int64)]
            versions[todo] = now[slots[todo]]
            return slots, versions, np.ones(count)

        law = draw if directory.times_sampled is None else draw_counted
        drawn = self._read(storage, law, count, stored)
        drawn.mass = float(mass)
        return drawn


class SharedPrioritizedSampler(SharedSampler, PrioritizedSampler):
    """Sample by priority from one sum tree that all processes of the node share.

    The law, the importance weights and the defaults are those of TorchRL's ``PrioritizedSampler``.
    Row ``i`` is drawn with probability ``p_i / sum(p)``, where
    ``p_i = (priority_i + eps) ** alpha``. Its weight is ``(p_i / min(p)) ** -beta`` (Schaul et al.
    2016, "Prioritized Experience Replay", section 3.4 and eq. 1). New rows get the largest priority
    seen so far.

    A priority for a row that has been overwritten is dropped and counted
    (``storage.counters["stale_updates"]``).

    Args:
        max_capacity: the storage's capacity, in rows.
        alpha: priority exponent, >= 0. All processes share the exponent, and must pass the same
            value. Setting ``sampler.alpha`` later changes the exponent for all processes.
        beta: exponent of the importance weights in this process, >= 0.
        eps: added to every priority, so that rows of priority 0 can be drawn, too.
        reduction: how ``TensorDictReplayBuffer`` combines the priorities of a row that has several.
        max_priority_within_buffer: with ``True``, new rows get the largest priority of the rows in
            the buffer, instead of the largest priority ever seen. All processes share this setting,
            like alpha.
        device: ``None`` or the CPU.

    Raises:
        ConfigurationError: alpha or eps differs from the directory's, the capacity is wrong, or
            priorities are negative or not finite. In the last case, no priority is applied.
        RuntimeError: from ``sample``, if no row is published, and none is being written.

    Example:
        >>> storage = SharedMemmapStorage(100, scratch_dir="/dev/shm/example")
        >>> sampler = SharedPrioritizedSampler(100, alpha=1.0, beta=0.4)
        >>> buffer = SharedReplayBuffer(storage=storage, sampler=sampler, batch_size=64)
        >>> rows = {"number": torch.arange(3), "td_error": torch.tensor([0.0, 0.0, 5.0])}
        >>> slots = buffer.extend(TensorDict(rows, [3]))
        >>> buffer.sample()["number"].unique()
        tensor([2])
    """

    def __init__(
        self,
        max_capacity: int,
        alpha: float,
        beta: float,
        eps: float = 1e-8,
        dtype: torch.dtype = torch.float,
        reduction: str = "max",
        max_priority_within_buffer: bool = False,
        *,
        device: torch.device | str | None = None,
    ) -> None:
        if device is not None and torch.device(device).type != "cpu":
            raise ConfigurationError(
                "expected device='cpu', because all processes share the priorities in the CPU's "
                f"memory, got device={device}; leave device= out"
            )
        self._alpha, self._beta, self._eps = checked_exponents(alpha, beta, eps)
        # not PrioritizedSampler.__init__, which would build trees for this process only
        self._max_capacity = max_capacity
        self.dtype = dtype
        self.reduction = reduction
        self._max_priority_within_buffer = bool(max_priority_within_buffer)
        self._setup()

    _knows_rows = True
    _copy_of: int | None = None
    """The identity of the directory whose sampler was copied to make this sampler."""

    def _setup(self) -> None:
        super()._setup()
        self._recent = RecentGenerations()

    def __getstate__(self) -> dict[str, Any]:
        # a copy gets the current alpha; ``_copy_of`` lets it accept a later change of alpha
        bound = self._directory
        copy_of = self._copy_of if bound is None else bound.identity
        return super().__getstate__() | {"_alpha": self.alpha, "_copy_of": copy_of}

    # --- parameters --------------------------------------------------------------------------

    def _bind(self, storage: SharedMemmapStorage, directory: ReplayDirectory) -> None:
        super()._bind(storage, directory)
        if storage.max_size != self._max_capacity:
            raise ConfigurationError(
                f"the sampler has capacity {self._max_capacity}, but its storage has "
                f"{storage.max_size}; pass the same number to both"
            )
        with directory.lock():
            words = directory.words
            if not words[Word.ALPHA_SET]:
                directory.begin()
                directory.set_float(Word.ALPHA, self._alpha)
                directory.set_float(Word.EPS, self._eps)
                words[Word.MAX_WITHIN] = self._max_priority_within_buffer
                words[Word.ALPHA_SET] = 1
                directory.commit()
            shared = directory.get_float(Word.ALPHA), directory.get_float(Word.EPS)
            within = bool(words[Word.MAX_WITHIN])
        # another process may have changed alpha since this sampler was copied
        if self._copy_of == directory.identity:
            self._alpha = shared[0]
        if (*shared, within) != (self._alpha, self._eps, self._max_priority_within_buffer):
            raise ConfigurationError(
                f"the sampler has alpha={self._alpha}, eps={self._eps}, "
                f"max_priority_within_buffer={self._max_priority_within_buffer}; the processes "
                f"that share {directory.path} use alpha={shared[0]}, eps={shared[1]}, "
                f"max_priority_within_buffer={within}. Pass the same values. To change alpha for "
                "all processes, set sampler.alpha afterwards"
            )

    @property
    def alpha(self) -> float:
        """The priority exponent that all processes share. Setting the exponent rebuilds the sum
        tree once.

        If the buffer is over hosts, reading ``alpha`` asks the hosts, and waits for their answers.
        As in TorchRL, setting ``alpha`` to 0 loses all priorities. Even if ``alpha`` is set to
        another value later, the rows are drawn with equal probabilities until their priorities are
        updated. If a new ``alpha`` makes ``(priority + eps) ** alpha`` of a row too large, setting
        it raises ``ConfigurationError`` and changes nothing.
        """
        return self._alpha_now()

    @alpha.setter
    def alpha(self, value: float) -> None:
        if not 0 <= value < math.inf:
            raise ConfigurationError(f"alpha must be >= 0 and finite, got {value}")
        self._share_alpha(float(value))
        self._alpha = float(value)
        self._copy_of = None

    def _alpha_now(self) -> float:
        if self._directory is not None:
            self._alpha = self._directory.get_float(Word.ALPHA)
        return self._alpha

    def _share_alpha(self, value: float) -> None:
        """Set alpha for all processes."""
        directory = self._directory
        if directory is not None:
            with directory.lock():
                set_alpha(directory, value)

    @property
    def beta(self) -> float:
        """Exponent of the importance weights in this process."""
        return self._beta

    @beta.setter
    def beta(self, value: float) -> None:
        self._beta = checked_exponents(0.0, value, 1.0)[1]

    @property
    def eps(self) -> float:
        """The number added to every priority."""
        return self._eps

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def default_priority(self) -> float:
        """The priority that new rows get. It is the largest priority seen, or 1 if no priority was
        set.

        With ``max_priority_within_buffer``, it is the largest priority of the current rows instead.
        If the buffer is over hosts, reading this property asks the hosts, and waits for their
        answers."""
        raw = self._max_priority[0]
        return 1.0 if raw is None else raw

    @property
    def _max_priority(self) -> tuple[float | None, int | None]:
        directory = self._directory
        if directory is None:
            return None, None
        raw, slot = directory.get_float(Word.MAX_PRIORITY), directory.words[Word.MAX_SLOT]
        return (None if raw != raw else raw), (None if slot < 0 else slot)

    # --- drawing -----------------------------------------------------------------------------

    def _info(self, drawn: Drawn) -> dict[Any, torch.Tensor]:
        self._recent.remember(drawn.index, drawn.generation, written=False)
        return {"priority_weight": drawn.weights(self._beta)}

    def draw(self, storage: Storage, count: int, *, stored: bool = False) -> Drawn:
        directory = self.attach(storage)
        assert isinstance(storage, SharedMemmapStorage)
        smallest, mass = math.inf, math.nan

        def draw_more(count: int) -> tuple[np.ndarray, np.ndarray]:
            slots, leaves = directory.tree.draw(self._uniforms(count))
            while not leaves.all():  # rounding can select a leaf of 0
                again = np.flatnonzero(leaves == 0)
                slots[again], leaves[again] = directory.tree.draw(self._uniforms(again.size))
            return slots, leaves

        def draw_locked(count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
            nonlocal smallest, mass
            if not directory.length:
                raise NoRowsError(EMPTY)
            limited = directory.times_sampled is not None
            if limited and not directory.words[Word.AVAILABLE]:
                raise TooFewDrawsError(EMPTY)
            slots, leaves, minimum, total = directory.tree.sample(self._uniforms(count))
            if np.count_nonzero(leaves) < count:  # rounding can select a leaf of 0
                again = np.flatnonzero(leaves == 0)
                slots[again], leaves[again] = draw_more(again.size)
            if limited:
                count_draws(directory, slots, leaves, draw_more)
            smallest = min(smallest, minimum)
            if mass != mass:
                mass = total
            return slots, directory.versions[slots], leaves

        def draw(count: int, locked: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
            if locked:
                return draw_locked(count)
            with directory.lock():
                return draw_locked(count)

        drawn = self._read(storage, draw, count, stored)
        drawn.minimum, drawn.mass = smallest, mass
        return drawn

    # --- priorities --------------------------------------------------------------------------

    def note_written(self, index: torch.Tensor, generation: torch.Tensor) -> None:
        self._recent.remember(index, generation, written=True)

    @torch.no_grad()
    def update_priority(
        self,
        index: int | torch.Tensor,
        priority: float | torch.Tensor,
        *,
        storage: Storage | None = None,
        generation: torch.Tensor | None = None,
    ) -> None:
        """Set the priority of rows, unless they were overwritten after they were drawn.

        Args:
            index: slots, int64 [n]; entries of -1 are skipped.
            priority: a single number or [n], >= 0. The sampler applies ``alpha`` and ``eps``.
            storage: the buffer's storage. It may be omitted once the sampler has been used.
            generation: int64 [n], ``"index_generation"`` of the sample. Without this argument,
                generations are looked up among this process's recent draws and extends. A slot that
                is not found there is updated regardless of which row it holds now, and counted
                (``"unverified_updates"``).
        """
        if storage is not None:
            self.attach(storage)
            if isinstance(storage, SharedMemmapStorage):
                storage.check_open()
            if any(
                _torchrl.sampler_of(buffer) is self and _torchrl.is_being_built(buffer)
                for buffer in _torchrl.buffers_over(storage)
            ):
                return  # a joining process must not reset the shared priorities
        slots = as_slots(index, 0 if self._directory is None else self._directory.width)
        # do not copy the index if it is flat, because ``recall`` may know this tensor
        slots = slots if slots.ndim == 1 else slots.reshape(-1)
        stamps = None if generation is None else generation.detach().cpu().reshape(-1)
        self._update(slots, stamps, priorities_for(slots, priority))

    def _update(
        self, index: torch.Tensor, generation: torch.Tensor | None, priority: np.ndarray
    ) -> None:
        """Set priorities, float64 [n], of rows in slots, int64 [n]."""
        if self._directory is None:
            raise ConfigurationError(
                "the sampler is not bound to a storage yet; update priorities through the "
                "replay buffer, or pass storage="
            )
        if generation is None:
            generation = self._recent.recall(index)
        stamps = None if generation is None else generation.numpy()
        update(self._directory, index.numpy(), priority, stamps)

    def _maybe_init_from_storage(self, storage: Storage | None) -> None:
        if storage is not None:
            self.attach(storage)

    def add(self, index: torch.Tensor | int) -> None:
        pass  # publishing has already set the priority

    def extend(self, index: torch.Tensor | tuple[Any, ...]) -> None:
        pass

    def mark_update(self, index: int | torch.Tensor, *, storage: Storage | None = None) -> None:
        """Set the default priority on rows, for example after their content changed."""
        self.update_priority(index, self.default_priority, storage=storage)

    # --- state: priorities are saved with the rows, by the storage ----------------------------

    def state_dict(self) -> dict[str, Any]:
        return {"_alpha": self.alpha, "_beta": self._beta, "_eps": self._eps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load alpha and beta. If the state is from a uniform sampler, which has neither, change
        nothing."""
        if not state_dict:
            self._empty()
            return
        alpha, beta = exponents_in(state_dict)
        self._empty()
        self.alpha = alpha
        self._beta = beta

    def _exponents(self) -> str:
        """Return the exponents that this process knows, as text, without a call to a host."""
        alpha = SharedPrioritizedSampler._alpha_now(self)
        return f"alpha={alpha}, beta={self._beta}, eps={self._eps}"

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._exponents()}, reduction={self.reduction!r})"


def checked_exponents(alpha: float, beta: float, eps: float) -> tuple[float, float, float]:
    """Return ``(alpha, beta, eps)`` as floats.

    Raises:
        ConfigurationError: one of the values is out of range.
    """
    if not (0 <= alpha < math.inf and 0 <= beta < math.inf):
        raise ConfigurationError(f"alpha and beta must be >= 0 and finite, got {alpha} and {beta}")
    if not 0 < eps < math.inf:
        raise ConfigurationError(f"eps must be above 0 and finite, got {eps}")
    return float(alpha), float(beta), float(eps)


def exponents_in(state_dict: dict[str, Any]) -> tuple[float, float]:
    """Return alpha and beta of a sampler's state.

    Raises:
        CheckpointError: the state is damaged.
    """
    try:
        return checked_exponents(*(state_dict[name] for name in ("_alpha", "_beta", "_eps")))[:2]
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"the sampler's state is damaged: {error!r}; load another checkpoint"
        ) from error


def priorities_for(index: torch.Tensor, priority: float | torch.Tensor) -> np.ndarray:
    """Return one priority per slot, float64 [n].

    Raises:
        ConfigurationError: there is neither one priority per slot nor a single priority, or the
            priorities are complex.
    """
    values = as_float64(torch.as_tensor(priority)).reshape(-1)
    if values.numel() not in (1, index.numel()):
        raise ConfigurationError(
            f"got {values.numel()} priorities for {index.numel()} slots; pass one priority per "
            "slot, or a single number for all slots"
        )
    return values.expand(index.numel()).numpy()


def as_float64(priority: torch.Tensor) -> torch.Tensor:
    """Return priorities as float64 on the CPU.

    Raises:
        ConfigurationError: the priorities are complex.
    """
    if priority.is_complex():
        raise ConfigurationError(
            f"got priorities of dtype {priority.dtype}, expected finite real numbers >= 0; no "
            "priority was applied. Pass real numbers, such as priority.abs()"
        )
    return priority.detach().to("cpu", torch.float64)


def anneal_beta(
    sampler: PrioritizedSampler, step: int, *, start: float = 0.4, end: float = 1.0, steps: int
) -> float:
    """Set beta by the *job's* step, so that beta anneals once per job and not once per rank.

    Beta changes linearly from ``start`` at step 0 to ``end`` at ``steps``, and then stays. Each
    rank calls this function with a count that is the same on all ranks, such as the global number
    of updates or ``replay_buffer.write_count``. TorchRL's schedulers count their own calls, or
    multiply the current value, and therefore advance once per rank and call.

    Returns:
        The new beta.

    Example:
        >>> sampler = SharedPrioritizedSampler(100, alpha=0.6, beta=0.4)
        >>> anneal_beta(sampler, 500, steps=1000)
        0.7
    """
    if not isinstance(sampler, PrioritizedSampler):
        raise ConfigurationError(
            f"expected a prioritized sampler, got {type(sampler).__name__}; pass buffer.sampler"
        )
    if steps < 1:
        raise ConfigurationError(f"steps must be at least 1, got {steps}")
    fraction = min(1.0, max(0.0, step / steps))
    sampler.beta = start + (end - start) * fraction
    return sampler.beta
