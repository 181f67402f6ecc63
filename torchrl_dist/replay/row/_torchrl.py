"""All uses of private names of TorchRL's buffers, except for methods that subclasses override.

Written for torchrl 0.14.1 and tensordict 0.14.3.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from multiprocessing.context import get_spawning_popen
from typing import Any, ClassVar

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.utils import expand_as_right
from torchrl.data import RemoteTensorDictReplayBuffer, ReplayBuffer, TensorDictReplayBuffer
from torchrl.data.replay_buffers.sample_units import Sequence, Transition
from torchrl.data.replay_buffers.samplers import Sampler
from torchrl.data.replay_buffers.storages import Storage
from torchrl.data.replay_buffers.utils import _reduce
from torchrl.data.replay_buffers.writers import (
    ImmutableDatasetWriter,
    TensorDictMaxValueWriter,
    Writer,
)

from torchrl_dist.errors import ConfigurationError, DirectoryError
from torchrl_dist.replay.law.placement import coordinates_of
from torchrl_dist.replay.row import trees
from torchrl_dist.stopping import giving_up


def buffers_over(storage: Storage) -> list[Any]:
    """Return the replay buffers of this process that were built on the storage."""
    return list(storage._attached_entities)


def detach(storage: Storage, buffer: Any) -> None:
    """Undo ``storage.attach`` of a buffer that could not be built."""
    storage._attached_entities.remove(buffer)


def sampler_of(buffer: Any) -> Any:
    """Return the buffer's sampler, or None while the buffer is being built."""
    return getattr(buffer, "_sampler", None)


def writer_of(buffer: Any) -> Any:
    """Return the buffer's writer, or None while the buffer is being built."""
    return getattr(buffer, "_writer", None)


def batch_size_of(buffer: Any) -> int | None:
    """Return the number of rows per sample, or None if the buffer was built without one."""
    size, unit = getattr(buffer, "_batch_size", None), windows_of(buffer)
    return (
        size if unit is None or not size else size * (unit.burn_in + unit.length + unit.bootstrap)
    )


@contextlib.contextmanager
def locks_given_back(storage: Storage) -> Iterator[None]:
    """Return a context manager in which this thread does not hold the locks of the storage's
    buffers.

    TorchRL's buffers hold their locks while they sample and write. If a thread waits inside such a
    call until another thread of the process writes or samples, the other thread needs these locks.
    """
    given_back = []
    for buffer in buffers_over(storage):
        with contextlib.suppress(RuntimeError):  # raised once this thread does not hold the lock
            while True:
                buffer._replay_lock.release()
                given_back.append(buffer._replay_lock)
    try:
        yield
    finally:
        for lock in given_back:
            lock.acquire()


class EntryLock:
    """A lock of TorchRL's buffers. A thread that holds the directory's lock gets an error instead
    of this lock.

    A signal handler may interrupt a thread that holds the directory's lock. If the handler waited
    for the buffer's lock, it could wait indefinitely, because another thread may hold the buffer's
    lock while it waits for the directory's lock.
    """

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, buffer: Any, owner: type | None = None) -> Any:
        if buffer is None:
            return self
        attributes = buffer.__dict__
        check_entry = getattr(attributes.get("_storage"), "check_entry", None)
        if check_entry is not None:
            check_entry()
        return attributes[self._name]

    def __set__(self, buffer: Any, lock: Any) -> None:
        buffer.__dict__[self._name] = lock


def check_prefetching(buffer: Any) -> None:
    """Check that this thread may sample. Call this function before each sample.

    Raises:
        DirectoryError: the caller is a signal handler. The handler would wait for a batch
            that another thread fetches, while that thread waits for the code that the handler
            interrupted.
    """
    if buffer._prefetch and (buffer._futures_lock._is_owned() or buffer._replay_lock._is_owned()):
        raise DirectoryError(
            "a signal handler that interrupted a use of a buffer with prefetch cannot sample from "
            "that buffer. Have the handler set a flag, and sample after the interrupted use has "
            "ended"
        )


def renew_after_fork(buffer: Any) -> None:
    """Give new, free locks to a buffer that a forked child has inherited.

    Batches fetched ahead are dropped, because the fetching threads do not exist in this process.
    The generator of ``set_rng`` is dropped, because the parent still draws from the same sequence.
    """
    forget_generator(buffer)
    attributes = buffer.__dict__  # not by getattr: an EntryLock checks before it returns a lock
    for name in ("_replay_lock", "_futures_lock"):
        if isinstance(attributes.get(name), type(threading.RLock())):
            attributes[name] = threading.RLock()
    for name in ("_prefetch_queue", "_pending_update_futures"):
        if isinstance(getattr(buffer, name, None), deque):
            setattr(buffer, name, deque())
    if getattr(buffer, "_sample_dependency", None) is not None:
        buffer._sample_dependency = None
    if getattr(buffer, "_update_executor", None) is not None:
        buffer._update_executor = None
    pool = getattr(buffer, "_prefetch_executor", None)
    if pool is not None:
        buffer._prefetch_executor = ThreadPoolExecutor(pool._max_workers)


def forget_generator(buffer: Any) -> None:
    """Undo the buffer's ``set_rng``, so that its sampler uses this process's random generator."""
    if getattr(buffer, "_rng", None) is not None:
        for part in (buffer, buffer._storage, buffer._sampler, buffer._writer):
            part._rng = None


def arrive_with(storage: Storage, buffers: list[Any]) -> None:
    """Attach buffers that were copied together with their storage, and let them draw independently.

    The copies do not get the original's generator. They do not get its batches drawn ahead either,
    because the original will return these batches. If a copy is not complete yet, its
    ``__setstate__`` completes it later. To make such a copy draw independently, this function
    replaces, for one call, the last method that ``__setstate__`` calls. After ``copy.copy`` of a
    storage alone, its buffers stay with the original storage.
    """
    for buffer in buffers:
        of = buffer.__dict__.get("_storage", storage)
        if of is not storage and type(of) is type(storage):
            continue
        storage._attached_entities.append(buffer)
        if "_prefetch_queue" in buffer.__dict__:
            _draw_for_itself(buffer)
        elif hasattr(type(buffer), _LAST_CALL):
            buffer.__dict__[_LAST_CALL] = functools.partial(_draw_for_itself, buffer)


def check_copying(storage: Storage) -> None:
    """Check that a storage may be copied with its buffers. Call this function before copying.

    Raises:
        ConfigurationError: ``share()`` was called on a buffer, or a buffer of TorchRL's class is
            sent to a process being spawned and has batches drawn ahead. These batches are sent as
            open files, some of which would be closed in the child.
    """
    for buffer in buffers_over(storage):
        if buffer.shared:
            raise ConfigurationError(f"a buffer over shared rows cannot have {_SHARED}")
        if get_spawning_popen() is None:
            continue
        if getattr(buffer, "_prefetch_queue", ()) and not getattr(buffer, "draws_anew", False):
            raise ConfigurationError(
                f"this {type(buffer).__name__} has drawn batches ahead, which cannot be sent to a "
                "process that is being spawned; build a SharedReplayBuffer, whose copies draw for "
                "themselves, or start the process before the first sample"
            )


_LAST_CALL = "_restore_prefetch_queue_locked"


def _draw_for_itself(buffer: Any, *_: Any, **__: Any) -> None:
    buffer.__dict__.pop(_LAST_CALL, None)
    forget_generator(buffer)
    buffer._prefetch_queue.clear()


def is_being_built(buffer: Any) -> bool:
    """Return whether ``ReplayBuffer._init`` has not finished yet for this buffer.

    At its end, ``_init`` resets the priorities of all rows in the storage
    (``_initialize_prioritized_sampler``). In a process that joins a running job, this would destroy
    the priorities that all processes share. Calls from ``_init`` must therefore have no effect.
    """
    return getattr(buffer, "_init_storage", None) is not None


def initialize(buffer: Any) -> None:
    """Build the parts of a buffer that has ``delayed_init``, as its public methods do."""
    if not buffer.initialized:
        buffer._init()


def drop_prefetched(buffer: Any) -> None:
    """Forget the batches that the buffer has drawn ahead, and the errors of these draws."""
    with buffer._futures_lock, giving_up(_fetching_threads(buffer)):
        buffer._clear_prefetch_queue_locked()


def drop_waiting(buffer: Any) -> None:
    """Forget batches drawn ahead that are not complete, so that no thread waits for them any
    more."""
    with buffer._futures_lock, giving_up(_fetching_threads(buffer)):
        queue = list(buffer._prefetch_queue)
        for future in queue:
            future.cancel()
        wait(queue)
        kept = [each for each in queue if not each.cancelled() and each.exception() is None]
        buffer._prefetch_queue.clear()
        buffer._prefetch_queue.extend(kept)


def _fetching_threads(buffer: Any) -> Iterable[threading.Thread]:
    return list(getattr(getattr(buffer, "_prefetch_executor", None), "_threads", ()))


def forget_drawn_ahead(storage: Storage) -> None:
    """Drop batches drawn ahead by buffers on a storage that was closed or emptied.

    If closing interrupts a draw, the draw's traceback would otherwise keep the buffer alive, and
    with it the rows' memory. If a thread is sampling at this moment, or this call interrupted
    sampling, the batches stay.
    """
    for buffer in buffers_over(storage):
        # not by getattr, because an EntryLock checks before it returns a lock
        attributes = buffer.__dict__
        lock, queue = attributes.get("_futures_lock"), attributes.get("_prefetch_queue")
        if not isinstance(queue, deque) or not hasattr(lock, "_is_owned") or lock._is_owned():
            continue
        if lock.acquire(blocking=False):
            try:
                for future in queue:
                    future.cancel()
                queue.clear()
            finally:
                lock.release()


_CPU = torch.device("cpu")


class _InOrder:
    """Takes the place of a buffer and its storage in ``ReplayBuffer.query``, and returns given
    rows."""

    _delayed_init = False
    _is_full = False
    _last_cursor_index = None

    def __init__(self, rows: TensorDictBase, transform: Any) -> None:
        self._rows = rows
        self._transform = transform
        self._replay_lock = contextlib.nullcontext()
        self._storage = self

    def __len__(self) -> int:
        return self._rows.batch_size[0]

    def __getitem__(self, index: slice) -> TensorDictBase:
        return self._rows[index]


def query_rows(rows: TensorDictBase, buffer: Any, predicate: Any, trajectory_key: Any) -> list[Any]:
    """Call TorchRL's ``query`` with the buffer's transforms on rows in the order of writing.

    The rows of a trajectory must be neighbours."""
    source: Any = _InOrder(rows, buffer._transform)
    return ReplayBuffer.query(source, predicate, trajectory_key=trajectory_key)


def unchecked_tensordict(source: dict[str, Any], batch_size: torch.Size) -> TensorDict:
    """Return ``TensorDict(source, batch_size, "cpu")`` without checking that the values fit.

    The checks would take seven times as long as the rest of the call.
    """
    data = TensorDict._new_unsafe(source, batch_size=batch_size)
    data._device = _CPU  # passing the device as an argument would double the time
    return data


def fetch_one_by_one(storage: Storage) -> None:
    """Let each buffer on the storage fetch batches ahead in one thread, in order.

    TorchRL's pool has a thread per batch, and ``sample`` waits for the oldest batch. If a rate
    limiter admits a later batch first, the oldest batch may wait for rows that no thread writes any
    more. Call this before a buffer's first sample, which starts the pool's first thread.
    """
    for buffer in buffers_over(storage):
        pool = getattr(buffer, "_prefetch_executor", None)
        if pool is not None and pool._max_workers > 1:
            buffer._prefetch_executor = ThreadPoolExecutor(1)


def prefetches(buffer: Any) -> bool:
    """Return whether a buffer fetches batches before they are asked for."""
    return bool(getattr(buffer, "_prefetch", False))


def set_online_buffer(buffer: Any, online: Any) -> None:
    """Replace the online buffer of TorchRL's ``OfflineToOnlineReplayBuffer``."""
    buffer._online_buffer = online


def windows_of(buffer: Any) -> Sequence | None:
    """Return the buffer's ``sample_unit`` if its sampler draws windows, otherwise None."""
    return getattr(buffer, "windows", None)


def check_buffer(buffer: Any, storage: Storage) -> None:
    """Refuse a buffer over shared rows that would lose rows or break the sampling law.

    Storage and writer call this while the buffer is being built, and when its parts change. A
    buffer that is refused while it is being built is detached, so that a correct buffer can be
    built on the storage afterwards.

    Raises:
        ConfigurationError: the buffer is refused. The message says why, and with which arguments to
            build it.
    """
    try:
        wrong = what_cannot_be_shared(buffer, getattr(storage, "samplers_to_use", {}))
        if wrong is not None:
            raise ConfigurationError(f"a buffer over shared rows cannot have {wrong}")
        attach = getattr(sampler_of(buffer), "attach", None)
        if attach is not None:
            attach(storage)
        draw_windows = getattr(sampler_of(buffer), "draw_windows", None)
        if draw_windows is not None:
            draw_windows(windows_of(buffer), storage)
        check_batch = getattr(storage, "check_batch", None)
        if check_batch is not None:
            check_batch(batch_size_of(buffer))
    except Exception:
        if is_being_built(buffer) and buffer in buffers_over(storage):
            detach(storage, buffer)
        raise


class ChecksBuffers:
    """A storage that refuses buffers which cannot work with shared rows.

    ``ReplayBuffer._init`` sets the storage's checkpointer once storage, sampler, writer and
    transforms are there. This is the only moment at which a storage sees the complete buffer, so
    the setter checks the buffer.
    """

    samplers_to_use: ClassVar[Mapping[str, str]]
    """Code that error messages show: for each name of a TorchRL sampler, the code that builds its
    replacement. The key ``""`` stands for all other samplers. Capacity, alpha and beta are filled
    in where their names are in braces."""

    _checkpointer: Any  # of TorchRL's Storage

    @property
    def checkpointer(self) -> Any:
        return self._checkpointer

    @checkpointer.setter
    def checkpointer(self, value: Any) -> None:
        Storage.checkpointer.fset(self, value)
        for buffer in buffers_over(self):
            if is_being_built(buffer) and writer_of(buffer) is not None:
                check_buffer(buffer, self)

    def check_writers(self) -> None:
        """Refuse to write if a writer that has its own cursor was set after the buffer was
        built."""
        for buffer in buffers_over(self):
            wrong = _wrong_writer(buffer, self.samplers_to_use)
            # another thread may be building the buffer; then its writer may still be replaced
            if wrong is not None and not is_being_built(buffer):
                raise ConfigurationError(f"a buffer over shared rows cannot have {wrong}")


_BUFFERS = (ReplayBuffer, TensorDictReplayBuffer, RemoteTensorDictReplayBuffer)
"""TorchRL's classes that only ask a storage for rows in given slots."""


_OF_NEIGHBOURS = (
    "this method of TorchRL assumes that neighbouring rows of storage[:] are neighbouring steps, "
    "but other processes write rows between them: for rb.query(), build a SharedReplayBuffer over "
    "the storage; for slices, give the buffer a SharedSliceSampler"
)


class SparseSlots:
    """Overrides the methods of TorchRL's storages that rely on rows being in the first slots. Here
    rows may lie in any slots, and ``storage[:]`` leaves out rows that are being written."""

    max_size: int
    width: int
    _rng: torch.Generator | None
    generations_of: Callable[[torch.Tensor], torch.Tensor]

    @property
    def supports_conditional_update(self) -> bool:
        """TorchRL's ``update_if_present`` reads this, and then checks and writes in two steps.

        Raises:
            ConfigurationError: always, because other processes may write between these steps.
        """
        raise ConfigurationError(
            "conditional updates of shared rows must be atomic, because other processes may write "
            "between the check and the update; build a SharedReplayBuffer with the same arguments, "
            "and call its update_if_present"
        )

    def __iter__(self) -> Iterator[TensorDictBase]:
        rows = self[:]  # type: ignore[index]  # of TorchRL's Storage
        return trees.rows_in(rows)

    def contains(self, item: int | torch.Tensor) -> Any:
        """Return whether a slot, or each of several slots, has a row: ``item in storage``."""
        slots = torch.as_tensor(item, device="cpu").long()
        slots = torch.where(slots < 0, slots + self.shape[0], slots)  # type: ignore[attr-defined]
        slots = slots * (self.width or 1)  # in two dimensions, ``width`` slots per index
        known = (slots >= 0) & (slots < self.max_size)
        found = known & (self.generations_of(torch.where(known, slots, -1)) >= 0)
        return found if isinstance(item, torch.Tensor) else bool(found)

    def _rand_given_ndim(self, batch_size: int) -> Any:
        """Return random slots, or coordinates, that have rows, for samplers that users have
        written."""
        slots = (self.generations_of(torch.arange(self.max_size)) >= 0).nonzero()[:, 0]
        slots = slots[torch.randint(len(slots), (batch_size,), generator=self._rng)]
        return coordinates_of(slots, self.width) if self.width else slots

    @property
    def _last_cursor_index(self) -> Any:
        raise ConfigurationError(_OF_NEIGHBOURS)

    _last_cursor = _last_cursor_index

    def _bump_mutation_revision(self) -> None:
        """Refuse a change that was made to a copy. Users must replace whole rows: ``buffer[index] =
        rows``."""
        # TorchRL calls this after set_, set_at_ and update_ of a buffer have written to the result
        # of ``storage[:]``.
        raise ConfigurationError(
            "set_, set_at_ and update_ would change a copy of shared rows; replace whole rows "
            "instead, with rb[index] = rows"
        )


def _of_torchrl(part: Any, *harmless: type) -> bool:
    """Return whether the part's class, or one of its base classes, is a class of TorchRL's that is
    not ``harmless``."""
    return any(
        base.__module__.startswith("torchrl.") and base not in harmless
        for base in type(part).__mro__
    )


def _build_with(buffer: Any, samplers_to_use: Mapping[str, str]) -> str:
    """Return the arguments with which to build the buffer: the writer, and a sampler if the
    buffer's sampler cannot be used."""
    parts = []
    sampler = sampler_of(buffer)
    if samplers_to_use and getattr(sampler, "attach", None) is None:
        names = [base.__name__ for base in type(sampler).__mro__]
        form = next((samplers_to_use[n] for n in names if n in samplers_to_use), None)
        filled = (form or samplers_to_use[""]).format(
            capacity=getattr(getattr(buffer, "_storage", None), "max_size", "capacity"),
            alpha=getattr(sampler, "_alpha", 0.6),
            beta=getattr(sampler, "_beta", 0.4),
        )
        parts.append(f"sampler={filled}")
    instead, writer = "SharedCursorWriter()", writer_of(buffer)
    if isinstance(writer, TensorDictMaxValueWriter):
        law = f"rank_key={writer._rank_key!r}, reduction={writer._reduction!r}"
        instead = f"SharedMaxValueWriter({law})"
    return f"; build the buffer with {', '.join([*parts, f'writer={instead}'])}"


def _wrong_writer(buffer: Any, samplers_to_use: Mapping[str, str]) -> str | None:
    writer = writer_of(buffer)
    if getattr(writer, "writes_shared_rows", False):
        return None
    if not _of_torchrl(writer, Writer, ImmutableDatasetWriter):
        return None
    return (
        f"the writer {type(writer).__name__} (TorchRL may have added it as the default), because "
        "its cursor belongs to this process only, so processes would overwrite each other's "
        f"rows{_build_with(buffer, samplers_to_use)}"
    )


_SHARED = (
    "shared=True, because TorchRL's lock for it would stay locked if its holder is killed; leave "
    "shared=True out, because processes share the rows anyway. If a TorchRL collector calls "
    "share(), pass it a SharedReplayBuffer"
)


def what_cannot_be_shared(buffer: Any, samplers_to_use: Mapping[str, str]) -> str | None:
    """Return why the buffer's parts or options would give wrong samples, lose rows, or hang if
    other processes write rows.

    Return None if nothing is wrong with the parts that the buffer has so far.
    """
    if _of_torchrl(buffer, *_BUFFERS):
        return (
            f"the methods of {type(buffer).__name__}, which assume that slots hold what this "
            "process wrote, or that neighbouring slots hold steps of one episode; build a "
            f"SharedReplayBuffer instead{_build_with(buffer, samplers_to_use)}. For hindsight "
            "goals, relabel each episode before extend writes it; a buffer that only one process "
            "uses may keep storage=LazyMemmapStorage(capacity)"
        )
    wrong_writer = _wrong_writer(buffer, samplers_to_use)
    if wrong_writer is not None:
        return wrong_writer
    sampler = sampler_of(buffer)
    if getattr(sampler, "attach", None) is None and _of_torchrl(sampler, Sampler):
        return (
            f"the sampler {type(sampler).__name__} (TorchRL may have added it as the default), "
            "because it counts only the rows that this process wrote, and other processes "
            f"overwrite these rows{_build_with(buffer, samplers_to_use)}"
        )
    unit = buffer._sample_unit  # never a Sequence in a SharedReplayBuffer, see ``windows_of``
    if type(unit) is Sequence:
        return (
            f"sample_unit=Sequence(...) in a {type(buffer).__name__}, which takes the rows in the "
            "next slots, although other processes write rows there; build a SharedReplayBuffer "
            "with the same arguments"
        )
    if not isinstance(unit, (Transition, type(None))):
        return (
            f"sample_unit={type(unit).__name__}, because other processes write rows between "
            "neighbouring steps; use torchrl.data.replay_buffers.Sequence"
        )
    if (buffer._dim_extend or 0) >= getattr(buffer._storage, "ndim", 1):
        return (
            f"dim_extend={buffer._dim_extend}, because the storage has "
            f"ndim={buffer._storage.ndim}; leave dim_extend out"
        )
    if buffer.shared:
        return _SHARED
    if getattr(buffer, "_init_compilable", None):
        return (
            "compilable=True, because compiled code cannot take the lock that processes share; "
            "leave it out"
        )
    checkpointer = getattr(buffer, "_init_checkpointer", None)
    if checkpointer is not None and checkpointer is not buffer._storage.checkpointer:
        return (
            "a checkpointer, because the storage saves rows, priorities and cursor itself; leave "
            "it out"
        )
    return None


def reduced(values: torch.Tensor, reduction: str) -> torch.Tensor:
    """Combine the priorities of each row, [n, k], as TorchRL's buffers do."""
    return _reduce(values, reduction, dim=1)


Path = tuple[str, ...]
"""Where a value sits in nested TensorDicts."""


def plain_leaves(
    data: TensorDictBase,
) -> tuple[dict[Path, Any], dict[Path, torch.Size]] | None:
    """Return two dictionaries for a plain ``TensorDict``, and None for any other ``data``.

    The first dictionary has the tensors by path, like ``data.items(True, True)``, which takes five
    times as long. The second dictionary has the batch sizes, by path, of nested TensorDicts that
    are empty or whose batch size is not that of ``data``.
    """
    found: dict[Path, torch.Tensor] = {}
    nodes: dict[Path, torch.Size] = {}
    return (found, nodes) if _collect(data, (), data.batch_size, found, nodes) else None


def _collect(
    data: Any,
    path: Path,
    rows: torch.Size,
    found: dict[Path, torch.Tensor],
    nodes: dict[Path, torch.Size],
) -> bool:
    if type(data) is not TensorDict:
        return False
    for key, value in data._tensordict.items():
        below = (*path, key)
        # the first test is faster
        if type(value) is torch.Tensor or isinstance(value, torch.Tensor):
            found[below] = value
            continue
        if not _collect(value, below, rows, found, nodes):
            return False
        if value.batch_size != rows or not value._tensordict:
            nodes[below] = value.batch_size
    return True


def names_in(data: Any) -> Iterable[Any]:
    """Return ``data.keys()``, in a tenth of the time for a plain ``TensorDict``."""
    return data._tensordict if type(data) is TensorDict else data.keys()


def value_of(data: TensorDictBase, key: Any) -> Any:
    """Return ``data.get(key, None)``, in a tenth of the time for a plain ``TensorDict``."""
    if type(data) is TensorDict and type(key) is str:
        return data._tensordict.get(key)
    return data.get(key, None)


def add_columns(data: TensorDictBase, columns: dict[str, Any]) -> None:
    """Add columns with one value per row, as ``TensorDictReplayBuffer.sample`` does.

    If ``data`` is a plain TensorDict, values with its shape and device are set without checks.
    """
    plain, device = type(data) is TensorDict and not data.is_locked, data.device
    with contextlib.nullcontext() if plain else data.unlock_():
        for key, value in columns.items():
            if (
                plain
                and isinstance(key, str)
                and isinstance(value, torch.Tensor)
                and value.shape == data.batch_size
                and (device is None or value.device == device)
            ):
                data._tensordict[key] = value
                continue
            if isinstance(value, tuple):  # an index per dimension of the storage
                value = torch.stack(value, -1)
            value = torch.as_tensor(value, device=device)
            if value.ndim < data.ndim:
                value = expand_as_right(value, data)
            data.set(key, value)
