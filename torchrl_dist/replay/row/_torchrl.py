"""All uses of private names of TorchRL's buffers, except for methods that subclasses override.

Seen in torchrl 0.14.1 and tensordict 0.14.3.
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
from torchrl.data.replay_buffers.sample_units import Transition
from torchrl.data.replay_buffers.samplers import Sampler
from torchrl.data.replay_buffers.storages import Storage
from torchrl.data.replay_buffers.writers import ImmutableDatasetWriter, Writer

from torchrl_dist.errors import ConfigurationError, DirectoryError
from torchrl_dist.stopping import giving_up


def buffers_over(storage: Storage) -> list[Any]:
    """Return the replay buffers of this process that were built on the storage."""
    return list(storage._attached_entities)


def detach(storage: Storage, buffer: Any) -> None:
    """Undo ``storage.attach`` of a buffer that could not be built."""
    storage._attached_entities.remove(buffer)


def sampler_of(buffer: Any) -> Any:
    """The buffer's sampler, or None while the buffer is being built."""
    return getattr(buffer, "_sampler", None)


def writer_of(buffer: Any) -> Any:
    """The buffer's writer, or None while the buffer is being built."""
    return getattr(buffer, "_writer", None)


def batch_size_of(buffer: Any) -> int | None:
    """Return the rows per sample, if the buffer was built with a number."""
    return getattr(buffer, "_batch_size", None)


@contextlib.contextmanager
def locks_given_back(storage: Storage) -> Iterator[None]:
    """Release this thread's locks of the buffers on the storage, in a context manager.

    TorchRL's buffers hold their locks while they sample and write. A thread that waits there for
    another thread of the process to write or sample would otherwise wait for itself.
    """
    given_back = []
    for buffer in buffers_over(storage):
        with contextlib.suppress(RuntimeError):  # this thread does not hold it (any more)
            while True:
                buffer._replay_lock.release()
                given_back.append(buffer._replay_lock)
    try:
        yield
    finally:
        for lock in given_back:
            lock.acquire()


class EntryLock:
    """A lock attribute of TorchRL's buffers that a holder of the directory's lock cannot take.

    Other threads wait for the directory while they hold the buffer's lock. A signal handler that
    interrupted a holder of the directory's lock would therefore wait for the buffer's indefinitely.
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
    """Check that this thread may sample. Call it before a sample.

    Raises:
        DirectoryError: in a signal handler. It would wait for a batch that another thread fetches,
            and that thread waits for the interrupted code.
    """
    if buffer._prefetch and (buffer._futures_lock._is_owned() or buffer._replay_lock._is_owned()):
        raise DirectoryError(
            "a signal handler that interrupted a use of a buffer with prefetch cannot sample from "
            "it. Have the handler set a flag, and act on it between two uses"
        )


def renew_after_fork(buffer: Any) -> None:
    """Give a buffer that a forked child has inherited new, free locks.

    Batches fetched ahead are dropped, because the fetching threads are not in this process. So is
    the generator of ``set_rng``, whose numbers the parent draws.
    """
    forget_generator(buffer)
    attributes = buffer.__dict__  # not through an EntryLock, which checks before it returns a lock
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
    """Undo the buffer's ``set_rng``, so that its sampler draws random numbers of this process."""
    if getattr(buffer, "_rng", None) is not None:
        for part in (buffer, buffer._storage, buffer._sampler, buffer._writer):
            part._rng = None


def arrive_with(storage: Storage, buffers: list[Any]) -> None:
    """Attach the buffers that were copied together with their storage, and let them draw anew.

    They have neither the original's batches drawn ahead, which the original returns, nor its
    generator. A buffer that is incomplete at this time becomes complete in its ``__setstate__``,
    whose last call this replaces once. ``copy.copy`` of a storage alone leaves its buffers to the
    original.
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
    """Check that a storage may be copied with its buffers. Call it before copying.

    Raises:
        ConfigurationError: ``share()`` of such a buffer was called, or a buffer of TorchRL's class
            with batches drawn ahead is sent to a process being spawned. The batches are sent as
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
                "process that is being spawned: build a SharedReplayBuffer, whose copies draw for "
                "themselves, or start the process before the first sample"
            )


_LAST_CALL = "_restore_prefetch_queue_locked"


def _draw_for_itself(buffer: Any, *_: Any, **__: Any) -> None:
    buffer.__dict__.pop(_LAST_CALL, None)
    forget_generator(buffer)
    buffer._prefetch_queue.clear()


def is_being_built(buffer: Any) -> bool:
    """Whether the call comes out of ``ReplayBuffer._init``.

    At its end that method resets the priority of every row already in the storage
    (``_initialize_prioritized_sampler``). For a process that joins a running job this would wipe
    the priorities that all the others share, so such calls must have no effect.
    """
    return getattr(buffer, "_init_storage", None) is not None


def initialize(buffer: Any) -> None:
    """Build the parts of a buffer with ``delayed_init``, as each of its public methods does."""
    if not buffer.initialized:
        buffer._init()


def drop_prefetched(buffer: Any) -> None:
    """Forget the batches that the buffer has drawn ahead, and what went wrong with them."""
    with buffer._futures_lock, giving_up(_fetching_threads(buffer)):
        buffer._clear_prefetch_queue_locked()


def drop_waiting(buffer: Any) -> None:
    """Do the same, except for complete batches, so that no thread keeps waiting for the others."""
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

    A draw that the close interrupted would keep the buffer, and so the rows' memory, through its
    traceback. A thread that samples at this moment, or interrupted code that samples, keeps its
    own.
    """
    for buffer in buffers_over(storage):
        attributes = buffer.__dict__  # as in renew_after_fork
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
    """What ``ReplayBuffer.query`` asks of a buffer and its storage, answered from given rows."""

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
    """TorchRL's ``query`` with the buffer's transforms, of rows that lie in the order of writing,
    those of a trajectory next to each other."""
    source: Any = _InOrder(rows, buffer._transform)
    return ReplayBuffer.query(source, predicate, trajectory_key=trajectory_key)


def unchecked_tensordict(source: dict[str, Any], batch_size: torch.Size) -> TensorDict:
    """``TensorDict(source, batch_size, "cpu")`` of values that are known to fit, unchecked.

    The checks take seven times as long as all the rest.
    """
    data = TensorDict._new_unsafe(source, batch_size=batch_size)
    data._device = _CPU  # as an argument it costs as much as all else
    return data


def fetch_one_by_one(storage: Storage) -> None:
    """Let each buffer on the storage fetch batches ahead in one thread, in order.

    TorchRL's pool has a thread per batch, and ``sample`` waits for the oldest batch. If a rate
    limiter admits another batch first, there may be no thread left to write the rows that the
    oldest needs. The first sample of a buffer comes before the pool's first thread.
    """
    for buffer in buffers_over(storage):
        pool = getattr(buffer, "_prefetch_executor", None)
        if pool is not None and pool._max_workers > 1:
            buffer._prefetch_executor = ThreadPoolExecutor(1)


def check_buffer(buffer: Any, storage: Storage) -> None:
    """Refuse a buffer over shared rows that would lose rows or break the law of sampling.

    Called by the storage and by the writer while the buffer is being built, and when its parts
    change; one that is refused while it is being built is forgotten, so that the next one over
    the storage may be right.

    Raises:
        ConfigurationError: what is wrong, and the arguments to build the buffer with.
    """
    try:
        wrong = what_cannot_be_shared(buffer, getattr(storage, "samplers_to_use", {}))
        if wrong is not None:
            raise ConfigurationError(f"a buffer over shared rows cannot have {wrong}")
        attach = getattr(sampler_of(buffer), "attach", None)
        if attach is not None:
            attach(storage)
        check_batch = getattr(storage, "check_batch", None)
        if check_batch is not None:
            check_batch(batch_size_of(buffer))
    except Exception:
        if is_being_built(buffer) and buffer in buffers_over(storage):
            detach(storage, buffer)
        raise


class ChecksBuffers:
    """A storage that refuses a buffer which would go wrong over it, whatever its writer.

    ``ReplayBuffer._init`` hands its checkpointer over when storage, sampler, writer and transforms
    are all there: the one moment at which a storage sees the buffer as it is going to be.
    """

    samplers_to_use: ClassVar[Mapping[str, str]]
    """In place of TorchRL's classes, by their names, as a user would write it; ``""``: any other.
    In braces, what is filled in: capacity, alpha and beta."""

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
        """Refuse a write of a writer that brings a cursor of its own, put in place later."""
        for buffer in buffers_over(self):
            wrong = _wrong_writer(buffer, self.samplers_to_use)
            if wrong is not None and not is_being_built(buffer):  # by another thread
                raise ConfigurationError(f"a buffer over shared rows cannot have {wrong}")


_BUFFERS = (ReplayBuffer, TensorDictReplayBuffer, RemoteTensorDictReplayBuffer)
"""TorchRL's classes that ask of a storage nothing but rows in given slots."""


_OF_NEIGHBOURS = (
    "this use of TorchRL's takes neighbouring rows of storage[:] for neighbouring steps, which "
    "they are not where other processes write: for rb.query() build a SharedReplayBuffer over the "
    "storage, for slices give it a SharedSliceSampler"
)


class SparseSlots:
    """In place of what TorchRL's storages derive from their length: rows lie in any slots here, and
    ``storage[:]`` leaves out rows that are being written."""

    max_size: int
    _rng: torch.Generator | None
    generations_of: Callable[[torch.Tensor], torch.Tensor]

    supports_conditional_update = False
    """A slot's version counts any write, so a changed row would no longer be the same one."""

    def __iter__(self) -> Iterator[TensorDictBase]:
        rows = self[:]  # type: ignore[index]  # of TorchRL's Storage
        return iter(rows.unbind(0))

    def contains(self, item: int | torch.Tensor) -> Any:
        """Whether there is a row in a slot, or in each of some; ``item in storage``."""
        slots = torch.as_tensor(item, device="cpu").long()
        slots = torch.where(slots < 0, slots + self.shape[0], slots)  # type: ignore[attr-defined]
        known = (slots >= 0) & (slots < self.max_size)
        found = known & (self.generations_of(torch.where(known, slots, -1)) >= 0)
        return found if isinstance(item, torch.Tensor) else bool(found)

    def _rand_given_ndim(self, batch_size: int) -> torch.Tensor:
        """Slots with rows, for samplers of a user's own."""
        slots = (self.generations_of(torch.arange(self.max_size)) >= 0).nonzero()[:, 0]
        return slots[torch.randint(len(slots), (batch_size,), generator=self._rng)]

    @property
    def _last_cursor_index(self) -> Any:
        raise ConfigurationError(_OF_NEIGHBOURS)

    _last_cursor = _last_cursor_index

    def _bump_mutation_revision(self) -> None:
        """Refuses: replace whole rows instead, ``buffer[index] = rows``."""
        # TorchRL calls this after a buffer's set_, set_at_ and update_ have written to what
        # ``storage[:]`` gave them.
        raise ConfigurationError(
            "set_, set_at_ and update_ would change a copy of shared rows; replace whole rows "
            "instead: rb[index] = rows"
        )


def _of_torchrl(part: Any, *harmless: type) -> bool:
    """Whether the part works as one of TorchRL's own classes does."""
    return any(
        base.__module__.startswith("torchrl.") and base not in harmless
        for base in type(part).__mro__
    )


def _build_with(buffer: Any, samplers_to_use: Mapping[str, str]) -> str:
    """What to pass to the buffer: the sampler, if it is not right yet, and the writer."""
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
    return f"; build it with {', '.join([*parts, 'writer=SharedCursorWriter()'])}"


def _wrong_writer(buffer: Any, samplers_to_use: Mapping[str, str]) -> str | None:
    writer = writer_of(buffer)
    if getattr(writer, "writes_shared_rows", False):
        return None
    if not _of_torchrl(writer, Writer, ImmutableDatasetWriter):
        return None
    return (
        f"{type(writer).__name__}, also where no writer= was passed: its cursor belongs to this "
        "process, and processes would overwrite each other's rows"
        f"{_build_with(buffer, samplers_to_use)}"
    )


_SHARED = (
    "shared=True guards the buffer with a lock that a killed process never releases; leave it out, "
    "processes share the directory without it; TorchRL's collectors that call "
    "share() take a SharedReplayBuffer"
)


def what_cannot_be_shared(buffer: Any, samplers_to_use: Mapping[str, str]) -> str | None:
    """Why the buffer's parts or options would give wrong samples, lose rows, or hang over rows
    that others write.

    None if nothing is wrong, as far as the buffer has its parts by now.
    """
    if _of_torchrl(buffer, *_BUFFERS):
        return (
            f"the methods of {type(buffer).__name__}, which take slots for what this process wrote "
            "there, or neighbouring ones for steps of one episode: build a SharedReplayBuffer "
            f"instead{_build_with(buffer, samplers_to_use)}. For hindsight goals relabel each "
            "episode before extend writes it; a buffer of one process may keep "
            "storage=LazyMemmapStorage(capacity)"
        )
    wrong_writer = _wrong_writer(buffer, samplers_to_use)
    if wrong_writer is not None:
        return wrong_writer
    sampler = sampler_of(buffer)
    if getattr(sampler, "attach", None) is None and _of_torchrl(sampler, Sampler):
        return (
            f"{type(sampler).__name__}, also where no sampler= was passed: it keeps count of the "
            "rows that this process wrote, which others overwrite"
            f"{_build_with(buffer, samplers_to_use)}"
        )
    unit = buffer._sample_unit
    if not isinstance(unit, (Transition, type(None))):
        return (
            f"sample_unit={type(unit).__name__} looks for neighbouring rows, whichever process "
            "writes them: use SharedSliceSampler"
        )
    if buffer._dim_extend:
        return (
            f"dim_extend={buffer._dim_extend}: rows lie along one dimension, extend with [n, ...]"
        )
    if buffer.shared:
        return _SHARED
    if getattr(buffer, "_init_compilable", None):
        return "compilable=True: the lock cannot be taken in compiled code, leave it out"
    checkpointer = getattr(buffer, "_init_checkpointer", None)
    if checkpointer is not None and checkpointer is not buffer._storage.checkpointer:
        return "checkpointer: the storage saves rows, priorities and cursor itself, leave it out"
    return None


Path = tuple[str, ...]
"""Where a value sits in nested TensorDicts."""


def plain_leaves(
    data: TensorDictBase,
) -> tuple[dict[Path, Any], dict[Path, torch.Size]] | None:
    """The tensors of a plain ``TensorDict`` by path, or None for whatever else ``data`` may be.

    What ``data.items(True, True)`` gives, in a fifth of the time. The second dictionary has the
    batch sizes of nested TensorDicts that are empty, or whose size is not that of ``data``.
    """
    found: dict[Path, torch.Tensor] = {}
    nodes: dict[Path, torch.Size] = {}
    return (found, nodes) if _collect(data, (), found, nodes) else None


def _collect(
    data: Any, path: Path, found: dict[Path, torch.Tensor], nodes: dict[Path, torch.Size]
) -> bool:
    if type(data) is not TensorDict:
        return False
    size = data.batch_size
    for key, value in data._tensordict.items():
        below = (*path, key)
        if type(value) is torch.Tensor or isinstance(value, torch.Tensor):  # the first is faster
            found[below] = value
            continue
        if not _collect(value, below, found, nodes):
            return False
        if value.batch_size != size or not value._tensordict:
            nodes[below] = value.batch_size
    return True


def names_in(data: Any) -> Iterable[Any]:
    """``data.keys()``, in a tenth of the time for a plain ``TensorDict``."""
    return data._tensordict if type(data) is TensorDict else data.keys()


def value_of(data: TensorDictBase, key: Any) -> Any:
    """``data.get(key, None)``, in a tenth of the time for a plain ``TensorDict``."""
    if type(data) is TensorDict and type(key) is str:
        return data._tensordict.get(key)
    return data.get(key, None)


def add_columns(data: TensorDictBase, columns: dict[str, Any]) -> None:
    """Set one value per row under each name, as ``TensorDictReplayBuffer.sample`` does.

    Values of the batch's own shape and device go into a plain TensorDict without its checks.
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
