"""The base class of the storages: everything that does not depend on where the rows are."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from tensordict import NestedKey, TensorDict, TensorDictBase, is_tensor_collection
from torchrl.data.replay_buffers.storages import TensorStorage

from torchrl_dist.errors import ConfigurationError
from torchrl_dist.forks import now_and_in_children
from torchrl_dist.replay.law.limiter import RateLimiter
from torchrl_dist.replay.law.placement import as_slots
from torchrl_dist.replay.parts.drawn import Drawn
from torchrl_dist.replay.row import _torchrl, rows, trees
from torchrl_dist.replay.saving.shards import SavedStorage
from torchrl_dist.replay.saving.snapshot import Head, SavedShard


class _Handed(threading.local):
    """Batches that this thread, or a signal handler in this thread, has drawn but not fetched."""

    def __init__(self) -> None:
        self.batches: deque[Drawn] = deque(maxlen=2)


class RowStorage(_torchrl.ChecksBuffers, _torchrl.SparseSlots, SavedStorage, TensorStorage):
    """A storage whose rows belong to all processes. Subclasses define where the rows are."""

    width = 0
    """The size of the rows' second dimension, or 0 if it is unknown or rows have one dimension."""
    attaches_when_pickled = True
    """Whether a copy in another process has the same rows. Collectors check this attribute before
    they write."""

    def _set_up(self, max_size: int) -> None:
        # The ``__init__`` of the base classes is not called, because it would create a length, a
        # revision and a cursor for this process only. Each of them would have a lock of its own, a
        # semaphore that may stay in /dev/shm if the process is killed.
        self.max_size = max_size
        self.ndim = 1
        self.checkpointer = None
        self._compilable = False
        self._attached_entities_list: list[Any] = []
        self.device = torch.device("cpu")
        self._handed = _Handed()
        now_and_in_children(self, RowStorage._renew)

    def _renew(self) -> None:
        for buffer in _torchrl.buffers_over(self):
            _torchrl.renew_after_fork(buffer)

    @property
    def limiter(self) -> RateLimiter | None:
        """The rate limiter of all processes, or None."""
        raise NotImplementedError

    def check_batch(self, batch_size: int | None) -> None:
        """Raise ConfigurationError if samples of this size could wait indefinitely."""
        if self.limiter is not None and batch_size:
            self.limiter.check_batch(batch_size)

    def cleanup(self) -> bool:
        """Call ``close``. The name ``cleanup`` is TorchRL's."""
        self.close()
        return True

    def close(self) -> None:
        """End this process's use of the storage. Idempotent."""
        raise NotImplementedError

    def _empty(self) -> None:
        pass  # ``ReplayBuffer.empty`` also calls the writer, and the writer empties the storage

    def register_save_hook(self, hook: Any) -> None:
        raise ConfigurationError(
            "got a hook for TorchRL's checkpointers, but this storage saves its rows without "
            "them; change the rows before extend instead"
        )

    register_load_hook = register_save_hook

    # --- size --------------------------------------------------------------------------------

    @property
    def _len(self) -> int:
        return len(self)

    @property
    def _is_full(self) -> bool:
        # counts used slots instead of rows, because a full ring has fewer rows while some rows are
        # being rewritten
        return self.shape.numel() == self.max_size

    @property
    def initialized(self) -> bool:
        """True, because nothing must be set up before processes write. If this property were False,
        TorchRL's ``MultiCollector`` would write a dummy row, and then empty the buffer."""
        return True

    @initialized.setter
    def initialized(self, value: bool) -> None:
        pass  # TorchRL's base class sets this property, but here it is always true

    # --- by index ----------------------------------------------------------------------------

    def set(self, cursor: Any, data: Any, *, set_cursor: bool = True) -> None:
        """Write rows to given slots, as in ``storage[i] = data``. See :meth:`write_at`.

        Raises:
            ConfigurationError: a buffer over the storage uses a writer of TorchRL, and such a
                writer keeps its own cursor.
        """
        if set_cursor:
            self.check_writers()
        data = joined_rows(data)
        check_rows(data)
        if self.ndim > 1:
            index = self._grid()[cursor]
            if not index.ndim:
                index, data = index[None], trees.mapped(lambda value: value.unsqueeze(0), data)
            self.write_at(index.reshape(-1), _one_row_each(index, data))
            return
        if isinstance(cursor, (int, np.integer)) or (
            not is_tensor_collection(data) and getattr(cursor, "ndim", 1) == 0
        ):
            data = trees.mapped(lambda value: value.unsqueeze(0), data)
        index = self._slots_named(cursor)
        self.write_at(index, _one_row_each(index, data))

    def write_at(self, index: torch.Tensor, data: TensorDictBase) -> torch.Tensor:
        """Replace whole rows at given slots. Each slot's generation increases, as with any write.

        If ``index`` names a slot twice, the last row for this slot is written.

        Returns:
            The new generations, int64 [n].
        """
        slots = as_slots(index, self.width)
        # do not copy the index if it is flat, because samplers recognise this tensor
        slots = slots if slots.ndim == 1 else slots.reshape(-1)
        check_batch(data)
        count = rows.batch_of(data)[0]
        if count != slots.numel():
            raise ConfigurationError(
                f"got {count} rows for {slots.numel()} slots; pass one row per slot"
            )
        if not slots.numel():
            return torch.empty(0, dtype=torch.int64)
        # with two dimensions, only ``extend`` adds rows, in whole lines of ``width`` slots
        room = self.max_size if self.ndim == 1 else self.shape.numel()
        if not (0 <= slots.min() and slots.max() < room):
            raise IndexError(
                f"got slots from {slots.min()} to {slots.max()}, expected slots >= 0 and below "
                f"{room}; pass an index that sample or extend returned"
            )
        return self._replace(slots, data)

    def check_order(self, use: str) -> None:
        """Raise ConfigurationError if the order of slots is not the order of writing."""

    def update_if_present(
        self,
        index: torch.Tensor,
        generation: torch.Tensor,
        patch: Mapping[NestedKey, Any] | TensorDictBase,
        version_key: NestedKey | None = None,
        version: int | torch.Tensor | None = None,
        require_newer: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Change values of rows that were not overwritten. The rows keep their generation.

        :meth:`SharedReplayBuffer.update_if_present` describes the arguments and the errors.

        Returns:
            Which rows were patched, and which were rejected because of their version, bool [n]
            each.
        """
        if self.ndim > 1 and not isinstance(index, tuple) and torch.as_tensor(index).ndim < 2:
            # an index [n] would mean n whole lines of ``width`` slots, as it does for TorchRL's
            # method and ``writer.generations_of``
            raise IndexError(
                f"the storage has ndim={self.ndim}, so the index must have both coordinates of "
                "each row, [n, 2], got an index of shape "
                f"{list(torch.as_tensor(index).shape)}; pass the entry 'index' of a sampled batch"
            )
        slots = as_slots(index, self.width).reshape(-1)
        stamps = torch.as_tensor(generation).detach().cpu().long().reshape(-1)
        if stamps.numel() != slots.numel():
            raise ConfigurationError(
                f"got {slots.numel()} indices and {stamps.numel()} generations: pass "
                '"index" and "index_generation" of the same rows'
            )
        if slots.numel() and slots.max() >= self.max_size:
            raise IndexError(
                f"indices must be below {self.max_size}, got {slots.max()}; pass the indices of a "
                "sample"
            )
        how = patch, version_key, version, require_newer
        updated, rejected = self._patch(slots.numpy(), stamps.numpy(), *how)
        return torch.from_numpy(updated), torch.from_numpy(rejected)

    def _patch(
        self, slots: np.ndarray, generation: np.ndarray, *how: Any
    ) -> tuple[np.ndarray, np.ndarray]:
        """Do the work of :meth:`update_if_present`."""
        raise NotImplementedError

    def retire(self, oldest: int, version_key: NestedKey) -> int:
        """Do the work of :meth:`SharedReplayBuffer.retire_older_than`."""
        raise NotImplementedError

    def _replace(self, slots: torch.Tensor, data: TensorDictBase) -> torch.Tensor:
        """Do the work of :meth:`write_at` for slots that exist, int64 [n]."""
        raise NotImplementedError

    def hand_over(self, drawn: Drawn) -> None:
        """Keep drawn rows for the calls that the buffer makes after a draw.

        For a sample, TorchRL calls three parts in one thread: the sampler returns index and
        weights, the writer returns generations, and the storage returns rows. If the drawn rows
        were not kept, the writer and the storage might return newer generations and rows than those
        that the sampler drew.
        """
        self._handed.batches.append(drawn)

    def handed_generation(self, index: Any) -> torch.Tensor | None:
        """Return the generations of the rows that were kept for this index tensor, or None."""
        index, second = _parts(index)
        for drawn in tuple(self._handed.batches):
            if drawn.index is index and drawn.second is second:
                return drawn.generation
        return None

    def get(self, index: Any) -> TensorDictBase:
        """Return whole rows at the given slots. Rows that were just drawn are not read again.

        With an int, a tensor or a list of slots, the call waits until the deadline for rows that
        are being written. With a slice, the result omits unpublished rows. With a key, or a tuple
        of keys, the result is that entry of all rows.

        Raises:
            IndexError: a slot has no row, and no process is writing a row there. A
                ``RemoteStorage`` raises RemoteError instead.
            KeyError: the rows do not have the key.
            DeadlineError: a row was still being written at the deadline.
        """
        if _names_an_entry(index):
            return self.get(slice(None))[index]
        first, second = _parts(index)
        for drawn in tuple(self._handed.batches):  # a copy, because a signal handler may append
            if drawn.index is first and drawn.second is second:
                with suppress(ValueError):
                    self._handed.batches.remove(drawn)
                return rows.build(drawn.tensors, drawn.spec, (first.numel(),))
        if self.ndim > 1:
            return self._elements_at(index)
        if second is None:
            index = first
        slots = self._slots_named(index)
        if isinstance(index, slice) or index is Ellipsis:
            published = slots[self.generations_of(slots) >= 0]
            # locked, so that ``rb[key] = value`` raises instead of changing only this copy
            found = self._rows_at(published.numpy(), wait=False)
            return found.lock_() if is_tensor_collection(found) else found
        data = self._rows_at(slots.reshape(-1).numpy())
        if isinstance(index, (int, np.integer)) or getattr(index, "ndim", 1) == 0:
            return trees.mapped(itemgetter(0), data)
        if slots.ndim == 1:
            return data
        return trees.mapped(lambda value: value.reshape(*slots.shape, *value.shape[1:]), data)

    def _grid(self) -> torch.Tensor:
        """Return the slots in use of a storage with two dimensions, int64 [n, width]."""
        n, width = self.shape
        return torch.arange(n * width, device="cpu").view(n, width)

    def _elements_at(self, index: Any) -> TensorDictBase:
        """Do the work of :meth:`get` for a storage with two dimensions. ``index`` is any index of a
        tensor."""
        index = slice(None) if index is Ellipsis else index
        parts = index if isinstance(index, tuple) else (index,)
        slots = self._grid()
        if parts and isinstance(parts[0], slice):
            slots, parts = slots[parts[0]], (slice(None), *parts[1:])
            slots = slots[self.have_rows(slots).all(1)]
        slots = slots[parts]
        data = self._rows_at(slots.reshape(-1).numpy())
        if not slots.ndim:
            return trees.mapped(itemgetter(0), data)
        found = trees.mapped(lambda value: value.reshape(*slots.shape, *value.shape[1:]), data)
        whole = any(isinstance(part, slice) or part is Ellipsis for part in parts)
        # locked for the reason given in ``get``
        return found.lock_() if whole and is_tensor_collection(found) else found

    def have_rows(self, slots: torch.Tensor) -> torch.Tensor:
        """Return for each slot whether it has a row, or a live process is writing one there."""
        raise NotImplementedError

    def flat(self, data: Any) -> Any:
        """Return rows ``[n, width, ...]`` as ``[n * width, ...]``. See ``ndim=``.

        Raises:
            ConfigurationError: the rows have no second dimension, or its size is different.
        """
        raise NotImplementedError

    def _rows_at(self, slots: np.ndarray, *, wait: bool = True) -> TensorDictBase:
        """Return whole rows at slots, int64 [n].

        Args:
            wait: whether to wait for unpublished rows. With ``False``, these rows are omitted.
        """
        raise NotImplementedError

    def _slots_named(self, index: Any) -> torch.Tensor:
        """Return the slots that an index names, int64, all >= 0."""
        if index is Ellipsis:
            index = slice(None)
        if isinstance(index, slice):
            return self._slots_in(index)
        if isinstance(index, range):
            return torch.arange(index.start, index.stop, index.step, device="cpu")
        found = torch.as_tensor(index, device="cpu")
        if found.dtype == torch.bool:
            found = found.nonzero().squeeze(-1)
        found = as_slots(found).reshape(found.shape or (1,))
        if (found < 0).any():
            found = torch.where(found < 0, self._from_the_end(found), found)
        return found

    def _slots_in(self, span: slice) -> torch.Tensor:
        """Apply a slice to the slots in use, or to all slots if none is in use."""
        return torch.arange(*span.indices(self.shape[0] or self.max_size), device="cpu")

    def _from_the_end(self, index: torch.Tensor) -> torch.Tensor:
        """Convert the entries -1, -2, ... of ``index`` to the last slots in use. The caller ignores
        the results for other entries."""
        return index + self.shape[0]

    # --- batches drawn ahead -----------------------------------------------------------------

    def restore(self, saved: Sequence[SavedShard | None]) -> None:
        self._check_dimensions([each.head for each in saved if each and each.head.spec])
        try:
            super().restore(saved)
        finally:  # even after an error, because some rows may have been replaced
            self._drop_drawn_ahead()

    def _check_dimensions(self, heads: Sequence[Head]) -> None:
        """
        Raises:
            ConfigurationError: saved rows do not have the dimensions of this storage.
        """
        widths = sorted({head.width for head in heads} - {0})
        if widths:
            raise ConfigurationError(
                f"the saved rows have two dimensions, [n, {widths[0]}], but this storage has one; "
                f"load them into SharedMemmapStorage({heads[0].capacity}, ndim=2, scratch_dir=...)"
            )

    def _drop_drawn_ahead(self) -> None:
        """Drop batches drawn ahead, because the rows have been replaced."""
        _torchrl.forget_drawn_ahead(self)


def check_rows(data: Any) -> None:
    """Raise ConfigurationError unless ``data`` is a TensorDict, a tensorclass, a tensor, or a tree
    of tensors."""
    if type(data) is not TensorDict and not (  # type() is faster
        isinstance(data, torch.Tensor) or is_tensor_collection(data) or trees.is_tree(data)
    ):
        raise ConfigurationError(
            "expected rows in a TensorDict, a tensorclass, a tensor, or a dictionary, list or "
            f"tuple of tensors, got {type(data).__name__}; wrap the data in a TensorDict"
        )


def joined_rows(data: Any) -> Any:
    """Return rows as one batch ``[n, ...]``. The rows may be in a list."""
    if not (isinstance(data, list) or type(data) is tuple) or trees.is_tree(data):
        return data
    for row in data:
        check_rows(row)
    if any(trees.is_tree(row) for row in data):
        return trees.stacked(list(data))
    try:
        return torch.stack(list(data))
    except RuntimeError as error:
        raise ConfigurationError(
            f"Stacking the elements of the list resulted in an error: {error}; give all rows the "
            "same keys and shapes"
        ) from error


def check_batch(data: Any) -> None:
    """Raise ConfigurationError unless ``data`` is a batch of rows, [n, ...]."""
    check_rows(data)
    if not rows.batch_of(data):
        raise ConfigurationError(
            "expected a batch of rows [n, ...], got data without a batch dimension; pass "
            "data.unsqueeze(0)"
        )


def _parts(index: Any) -> tuple[Any, Any]:
    """Return ``index`` as a pair. ``(i, j)`` stays as it is. ``(i,)``, the form that TorchRL's
    slice samplers return, becomes ``(i, None)``. Any other index becomes ``(index, None)``."""
    if isinstance(index, tuple) and len(index) in (1, 2):
        return index[0], index[1] if len(index) == 2 else None
    return index, None


def _names_an_entry(index: Any) -> bool:
    """Whether ``index`` is a key of rows or a tuple of keys, not slots."""
    parts = index if isinstance(index, tuple) else (index,)
    return bool(parts) and all(isinstance(part, str) for part in parts)


def _one_row_each(index: torch.Tensor, data: TensorDictBase) -> TensorDictBase:
    """Return the rows that ``storage[index] = data`` writes, ``[index.numel(), ...]``.

    There is one row for each element of ``index``, which may have any shape."""

    def expanded(value: Any) -> Any:
        if index.ndim < 2:
            return value.expand(index.numel(), *value.shape[1:])
        rest = value.shape[index.ndim :]
        return value.expand(*index.shape, *rest).reshape(index.numel(), *rest)

    return trees.mapped(expanded, data)
