"""TorchRL's ``TensorDictReplayBuffer`` for a shared storage, sampler and writer."""

from __future__ import annotations

import contextlib
import copy
import operator
import os
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from tensordict import NestedKey, TensorDictBase
from torchrl.data import ReplayBuffer, TensorDictReplayBuffer, Trajectory
from torchrl.data.replay_buffers.replay_buffers.base import ConditionalUpdateResult
from torchrl.data.replay_buffers.sample_units import SampleUnit, Sequence
from torchrl.data.replay_buffers.samplers import PrioritizedSampler, Sampler

from torchrl_dist.errors import CheckpointError, ConfigurationError, RateLimitError
from torchrl_dist.replay.law.placement import slots_at
from torchrl_dist.replay.parts.passes import PassOverError, SharedSamplerWithoutReplacement
from torchrl_dist.replay.parts.query import trajectories
from torchrl_dist.replay.parts.sampler import SharedRandomSampler, as_float64, exponents_in
from torchrl_dist.replay.parts.slices import NoSlicesError
from torchrl_dist.replay.parts.storage import NoRowsError
from torchrl_dist.replay.parts.writer import SharedCursorWriter
from torchrl_dist.replay.row import _torchrl
from torchrl_dist.replay.saving.disk import MANIFEST, read_dump


class SharedReplayBuffer(TensorDictReplayBuffer):
    """``TensorDictReplayBuffer`` with exact priorities and the same constructor arguments.

    With a :class:`SharedMemmapStorage` and a :class:`SharedCursorWriter`, it differs from TorchRL's
    class as follows:

    - A priority reaches the row for which it was computed, or no row.
      ``update_tensordict_priority`` uses ``"index_generation"`` of the batch. The batch may be the
      sample itself, a clone of the sample, or a part of the sample. Priorities for overwritten rows
      are dropped and counted (``storage.counters["stale_updates"]``).
    - ``extend`` and ``add`` publish rows together with the priorities under ``priority_key``
      (reduced per row by the sampler's ``reduction``). If a priority is invalid, no row is written.
    - ``extend``, ``add`` and ``update_priority`` wait only for the directory's lock. TorchRL's
      buffer holds another lock while it samples. These three methods do not take that lock, so
      sampling or prefetching in another thread does not delay them.

    - ``sample_unit=Sequence(...)`` of TorchRL expands each drawn row, the *anchor*, into a window
      of consecutive rows of its trajectory. These rows may be in any slots. See "Windows" below.

    Without ``sampler=``, the buffer samples uniformly. Without ``writer=``, the buffer creates a
    :class:`SharedCursorWriter`.

    **Windows.** A batch of ``Sequence(length, burn_in=..., bootstrap=...)`` has ``batch_size``
    windows one after the other. The batch has the entries that TorchRL's buffer returns, plus
    ``"anchor_generation"``. The sampler draws the anchors, and each row of a window has the
    ``"priority_weight"`` of its anchor. A window is read as a whole: all its rows were in the
    buffer at the same moment. Rows count as consecutive if one thread wrote them one after the
    other. If rows have a trajectory id (``("collector", "traj_ids")`` or ``"episode"``),
    consecutive rows must also have the same id. Use the same ``sample_unit`` in the buffers of all
    processes, including those that only write. A limiter counts all rows of a window.

    Args:
        priority_key: key of the priorities, one per row.
        eta: how strongly the largest priority in a window counts in the priority of the window's
            anchor, from 0 to 1. ``update_tensordict_priority`` sets ``eta * max + (1 - eta) *
            mean``, as in Kapturowski et al. 2019, "Recurrent Experience Replay in Distributed
            Reinforcement Learning", eq. 1, where ``eta`` is 0.9. The maximum is over the valid
            rows, as in TorchRL. The mean is over the valid rows of the learning region
            (``"learning_mask"``). Default: 1, so that only the maximum counts, as in TorchRL.
        kwargs: the arguments of ``TensorDictReplayBuffer``.

    Raises:
        ConfigurationError: the writer is not a :class:`SharedCursorWriter`, ``sample_unit`` asks
            for windows that the sampler cannot draw, or data for ``update_tensordict_priority``
            have no ``"index"``.

    Example:
        >>> storage = SharedMemmapStorage(100, scratch_dir="/dev/shm/example")
        >>> sampler = SharedPrioritizedSampler(100, alpha=0.6, beta=0.4)
        >>> buffer = SharedReplayBuffer(storage=storage, sampler=sampler, batch_size=4)
        >>> rows = {"obs": torch.zeros(8, 4), "td_error": torch.rand(8)}
        >>> slots = buffer.extend(TensorDict(rows, [8]))
        >>> batch = buffer.sample()
        >>> batch["td_error"] = torch.rand(4)
        >>> buffer.update_tensordict_priority(batch[:2])  # a part will do
    """

    draws_anew = True
    """A copy of the buffer does not have the batches that were drawn ahead, see
    ``__getstate__``."""

    _replay_lock = _torchrl.EntryLock()
    _futures_lock = _torchrl.EntryLock()

    windows: Sequence | None = None
    """The ``sample_unit`` if it is a ``Sequence``, otherwise None. The sampler then draws the
    windows."""

    def __init__(self, *, priority_key: str = "td_error", eta: float = 1.0, **kwargs: Any) -> None:
        if not 0 <= eta <= 1 or (eta != 1 and type(kwargs.get("sample_unit")) is not Sequence):
            raise ConfigurationError(
                f"eta={eta!r}: expected 1, or a number from 0 to 1 together with "
                "sample_unit=Sequence(...). eta combines the priorities of a window's rows, and "
                "only Sequence draws windows"
            )
        self.eta = eta
        kwargs["writer"] = kwargs.get("writer") or SharedCursorWriter
        kwargs["sampler"] = kwargs.get("sampler") or SharedRandomSampler
        super().__init__(priority_key=priority_key, **kwargs)

    @property
    def _sample_unit(self) -> SampleUnit | None:
        """The unit that TorchRL's class expands, or None if the sampler itself draws windows."""
        return self.__dict__.get("_unit")

    @_sample_unit.setter
    def _sample_unit(self, unit: SampleUnit | None) -> None:
        if type(unit) is Sequence:
            self.windows = unit
        else:
            self.__dict__["_unit"] = unit

    def _init(self) -> None:
        super()._init()
        if not isinstance(self._writer, SharedCursorWriter):
            raise ConfigurationError(
                f"{type(self).__name__} writes through a SharedCursorWriter, got "
                f"{type(self._writer).__name__}; leave writer= out"
            )

    def extend(
        self, tensordicts: TensorDictBase, *, update_priority: bool | None = None
    ) -> torch.Tensor:
        """Write a batch and publish it.

        Args:
            tensordicts: ``[n, ...]``; the inverses of the buffer's transforms are applied first.
            update_priority: with ``False``, new rows get the largest priority seen, and
                ``priority_key`` of the batch is ignored.

        Returns:
            The slots, int64 [n]; -1 for rows that were not kept because the batch has more rows
            than the ring.
        """
        return self._write(tensordicts, update_priority is not False)

    def add(self, data: TensorDictBase) -> torch.Tensor:
        """Write one row of batch size []; see :meth:`extend`.

        Returns:
            The row's slot, int64 [].
        """
        _torchrl.initialize(self)
        dim = self._dim_extend
        # ``_write`` raises for other types
        rows = data.unsqueeze(dim) if isinstance(data, TensorDictBase) else data
        index = self._write(rows, True)
        return index[0] if index.numel() and self._storage.ndim == 1 else index

    def _write(self, data: TensorDictBase, with_priority: bool) -> torch.Tensor:
        _torchrl.initialize(self)
        if not isinstance(data, TensorDictBase):
            raise ConfigurationError(
                f"{type(self).__name__} stores TensorDicts, got {type(data).__name__}. For a list "
                "of rows, pass torch.stack(rows). For rows of a tensorclass, pass "
                "rows.to_tensordict(), or build TorchRL's ReplayBuffer with the same storage, "
                "sampler and writer"
            )
        if self._transform is not None and len(self._transform):
            data = self._transform.inv(data)
            if data is None:
                return torch.zeros((0, 1), dtype=torch.long)  # as TorchRL does
        # the storage refuses rows of one dimension, so these need no transposition
        if self._dim_extend and getattr(data, "ndim", 2) > 1:
            data = self._transpose(data)
        priority = None
        if with_priority and isinstance(self._sampler, PrioritizedSampler):
            if _torchrl.value_of(data, self.priority_key) is not None:
                several = self._storage.ndim > 1
                flat = self._storage.flat(data.select(self.priority_key)) if several else data
                vector = self._priority_per_row(flat)
                priority = as_float64(vector).numpy()
        return self._writer.extend(data, priority=priority)

    def __setitem__(self, index: Any, value: Any) -> None:
        if isinstance(index, tuple) and len(index) > 1 and not isinstance(index[0], str):
            # TorchRL's method would change a copy of the rows
            raise ConfigurationError(
                f"buffer[index] = rows takes an index with one part, got {len(index)} parts; "
                "assign to the storage instead: buffer.storage[index] = rows, with the parts in "
                "the order of the storage's dimensions"
            )
        super().__setitem__(index, value)

    def update_if_present(
        self,
        *,
        index: torch.Tensor,
        generation: torch.Tensor,
        patch: Mapping[NestedKey, torch.Tensor] | TensorDictBase,
        version_key: NestedKey | None = None,
        version: int | torch.Tensor | None = None,
        require_newer: bool = False,
    ) -> ConditionalUpdateResult:
        """Change some values, such as stored recurrent states, of rows that were not overwritten.

        A row keeps its slot, generation and priority. Every process reads the row as it was before
        or after the patch, never a mixture. Batches that were drawn ahead have the old values. If a
        process is killed or interrupted (Ctrl-C) during a patch, the rows that it was changing at
        that moment are lost.

        Keyword Args:
            index: int64 [n], ``"index"`` of a sample, or the index that an extend returned. Over
                hosts, call ``flush`` before you pass the index of an extend. Entries of -1 are
                skipped.
            generation: int64 [n], ``"index_generation"`` of the sample, or
                ``writer.generations_of(index)``.
            patch: new values by key, [n, ...]. If ``index`` names a row twice, the row gets the
                last values given for it.
            version_key: key of the row's version, one number per row. A row is patched, and gets
                ``version``, only if its stored version is not above ``version``. If ``index`` names
                a row twice, only the highest version counts.
            version: the new version: a number, or a tensor [n].
            require_newer: patch a row only if its stored version is below ``version``.

        Returns:
            The result as in TorchRL, with ``updated`` and ``version_rejected``, bool [n] each. A
            row for which both are false was overwritten or, over several hosts, is in a shard that
            does not answer.

        Raises:
            KeyError: the rows do not have one of the given keys.
            ConfigurationError: values do not fit the rows, or a column cannot be patched. A column
                cannot be patched if it holds text, or frames that rows share, or if a sampler finds
                trajectories by this column. No row is changed.
            RemoteError: over hosts, the errors above arrive as RemoteError.
            DeadlineError, PeerLostError: over hosts, too few hosts answer.
        """
        _torchrl.initialize(self)
        updated, rejected = self._storage.update_if_present(
            index, generation, patch, version_key, version, require_newer
        )
        return ConditionalUpdateResult(
            updated=updated,
            version_rejected=None if version_key is None else rejected,
            batch_size=updated.shape,
        )

    def retire_older_than(self, version: int, *, version_key: NestedKey = "policy_version") -> int:
        """Stop all processes from sampling rows of policies older than ``version``.

        Call this method after each update of the policy.

        For example, with ``version = collector.policy_version - 4``, batches contain rows of the
        newest policy and of the four before it. Rows with an older version are not sampled even if
        they are written later. Batches that were drawn ahead may still have such rows. The
        remaining rows are sampled as if no other rows existed. Retired rows keep their slots, and
        ``len`` counts them. ``storage.counters["retired_rows"]`` is the number of retired rows. If
        too many rows are retired before they are sampled, pass ``samples_per_insert`` to the
        storage's limiter, which then makes the writers wait.

        The storage needs a :class:`RateLimiter` with ``max_times_sampled``. A call with a lower
        version than an earlier call changes nothing. ``empty`` and ``loads`` forget the versions of
        earlier calls. A call reads the versions of all rows once, under the lock (about 3 ms per
        million rows).

        Args:
            version: the smallest version that may still be sampled.
            version_key: key of the policy version, one number per row, as ``RPCBatchedCollector``
                writes it. All processes must use the same key.

        Returns:
            The number of rows that this call has retired.

        Raises:
            ConfigurationError: the limiter has no ``max_times_sampled``, no row was written yet, or
                the rows do not have the key.
            RemoteError: over hosts, the error above arrives as RemoteError.
            DeadlineError, PeerLostError: over hosts, a host does not answer. The other hosts have
                retired their rows.
        """
        _torchrl.initialize(self)
        return self._storage.retire(operator.index(version), version_key)

    def stats(self) -> dict[str, int | float | bool]:
        """Return the statistics that TorchRL's buffers have, and ``storage.counters``, by name.
        TorchRL's ``LoggerMonitor`` logs these numbers. Any thread may call this method. The method
        does not wait for samples in progress."""
        if not self.initialized:
            return super().stats()
        size, capacity = len(self), self._storage.max_size
        return {
            "size": size,
            "write_count": self._storage.write_count,
            "prefetch_queue_size": len(self._prefetch_queue),
            "initialized": True,
            "capacity": capacity,
            "utilization": size / capacity,
            **self._storage.counters,
        }

    def set_sampler(self, sampler: Sampler) -> Sampler:
        """Replace the sampler, and return the previous sampler.

        Raises:
            ConfigurationError: the sampler is not for shared rows, or does not draw the windows of
                ``sample_unit``. The buffer keeps its sampler.
        """
        _torchrl.initialize(self)
        before = self._sampler
        super().set_sampler(sampler)
        try:
            _torchrl.check_buffer(self, self._storage)
        except Exception:
            super().set_sampler(before)
            raise
        return before

    def set_storage(self, storage: Any, collate_fn: Any = None) -> Any:
        """Refuse another storage.

        Raises:
            ConfigurationError: always, because the writer would continue to write to the current
                storage.
        """
        raise ConfigurationError(
            f"a {type(self).__name__} keeps its storage, because its writer and sampler belong to "
            "this storage; build another buffer over the other storage"
        )

    # --- copies ------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without batches drawn ahead, and without the generator of ``set_rng``.

        This buffer itself will still return those batches. A copy draws with its own random
        numbers."""
        _torchrl.initialize(self)
        attributes = self.__dict__
        with self._futures_lock:
            ahead, attributes["_prefetch_queue"] = attributes["_prefetch_queue"], deque()
            try:
                state = super().__getstate__()
            finally:
                attributes["_prefetch_queue"] = ahead
        return state | {"_rng": None}

    def share(self, shared: bool = True) -> SharedReplayBuffer:
        """Do nothing, because copies in other processes have the same rows, and need no common
        lock."""
        # The base class's constructor also calls this method. In that call, the base class's own
        # method checks the options.
        return self if "_write_lock" in self.__dict__ else super().share(shared)

    def query(
        self,
        predicate: Callable[[Trajectory], bool] | None = None,
        *,
        trajectory_key: NestedKey | None = None,
    ) -> list[Trajectory]:
        """Return the trajectories that match, the oldest first. Other processes may write during
        the call.

        The call copies all rows of the buffer, as a checkpoint does, and omits rows that are being
        written. If rows of several writers alternate, the call joins the pieces of each trajectory.

        Args:
            predicate: the condition for a match, built from TorchRL's ``traj``, or given as a
                function of a ``Trajectory``. Default: all trajectories match.
            trajectory_key: key of the trajectory ids, one number per row. The ids must be unique in
                the job. Default: the first of ``("collector", "traj_ids")``, ``"traj_ids"`` and
                ``"episode"`` that the rows have.

        Raises:
            ConfigurationError: the rows have no trajectory ids, rows of one trajectory are in
                several shards, or a :class:`SharedMaxValueWriter` writes the rows.
        """
        _torchrl.initialize(self)
        self._storage.check_order("queries of trajectories")
        found = []
        for part, key in trajectories(self._storage.snapshot(), trajectory_key):
            found += _torchrl.query_rows(part, self, predicate, key)
        return found

    # --- saving ------------------------------------------------------------------------------

    def dumps(self, path: str | os.PathLike[str]) -> None:
        """Write a checkpoint of the buffer to a folder.

        The checkpoint has the rows with their priorities and generations, the cursor, the counters,
        alpha and beta, and the states of the transforms and of the generator of ``set_rng``. It
        replaces an earlier checkpoint atomically. The storage's ``dumps`` describes how long the
        call blocks, and which errors it raises. Batches drawn ahead are not saved. Nothing is
        pickled.

        Raises:
            ConfigurationError: a transform's state holds something other than tensors, numbers,
                strings, lists and dictionaries.
        """
        _torchrl.initialize(self)
        rng = self._rng
        extra = {
            "batch_size": self._batch_size,
            "sampler": self._sampler.state_dict(),
            "transforms": self._transform.state_dict(),
            "rng": None if rng is None else {"device": str(rng.device), "state": rng.get_state()},
        }
        self._storage.dumps(path, extra)

    def loads(self, path: str | os.PathLike[str]) -> None:
        """Restore a checkpoint of :meth:`dumps`; see the storage's ``loads``.

        If ``TensorDictReplayBuffer`` saved the checkpoint from a shared storage, only the rows are
        restored.

        Raises:
            CheckpointError: there is no checkpoint, or it is damaged or has other transforms. The
                buffer is unchanged. The storage's ``loads`` may raise further errors.
        """
        _torchrl.initialize(self)
        if not Path(path, MANIFEST).exists() and Path(path, "storage", MANIFEST).exists():
            path = Path(path, "storage")
        saved, extra = read_dump(Path(path))
        batch_size, sampler, own_transforms, rng = self._checked(extra)
        transforms = copy.deepcopy(self._transform.state_dict())
        try:
            if own_transforms:
                try:
                    self._transform.load_state_dict(own_transforms)
                except (RuntimeError, KeyError, TypeError, ValueError) as error:
                    raise CheckpointError(
                        f"the checkpoint {path} was saved with other transforms ({error}); "
                        "build the buffer with the transforms that it had when it was saved"
                    ) from error
            self._storage.restore(saved)
        except BaseException:
            self._transform.load_state_dict(transforms)
            raise
        _torchrl.drop_prefetched(self)
        self._batch_size = batch_size
        if sampler:
            self._sampler.load_state_dict(sampler)
        if rng is not None:
            self.set_rng(rng)

    def _checked(
        self, extra: dict[str, Any]
    ) -> tuple[int | None, dict[str, Any], dict[str, Any], torch.Generator | None]:
        """Return the batch size, the states of sampler and transforms, and the generator.

        Raises:
            CheckpointError: ``extra`` is damaged.
        """
        batch_size = extra.get("batch_size", self._batch_size)
        sampler, rng = extra.get("sampler") or {}, extra.get("rng")
        transforms = extra.get("transforms") or {}
        try:
            if batch_size is not None and (type(batch_size) is not int or batch_size < 1):
                raise ValueError(f"its batch size is {batch_size!r}")
            if sampler:
                exponents_in(sampler)
            if rng is not None:
                generator = torch.Generator(rng["device"])
                generator.set_state(rng["state"])
                rng = generator
            return batch_size, dict(sampler), dict(transforms), rng
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise CheckpointError(
                f"the checkpoint does not fit this buffer, or is damaged: {error}. The buffer is "
                "unchanged; load another checkpoint"
            ) from error

    # TorchRL's other names for these methods
    save = dump = dumps
    load = loads

    def _priority_per_row(self, data: TensorDictBase) -> torch.Tensor:
        priority = data.get(self.priority_key, None)
        if priority is not None and priority.numel() == data.shape[0]:
            # there is nothing to reduce, and a call to reduce would cost more than the update
            return priority.reshape(-1)
        if priority is not None and self._storage.ndim > 1:
            # TorchRL would mistake the priorities' second dimension for a dimension of the storage.
            return _torchrl.reduced(priority.reshape(len(priority), -1), self._sampler.reduction)
        return self._get_priority_vector(data)

    def sample(
        self,
        batch_size: int | None = None,
        return_info: bool = False,
        include_info: bool | None = None,
    ) -> Any:
        """Return a batch with ``"index"``, ``"index_generation"`` and the sampler's entries.

        With ``include_info=False``, the batch does not have these entries. With ``return_info``,
        these entries are also returned as a dictionary."""
        if include_info is not None:
            warnings.warn(
                "include_info is TorchRL's older name for return_info; pass return_info= instead",
                UserWarning,
                stacklevel=2,
            )
        _torchrl.check_prefetching(self)
        data, info = self._next_sample(batch_size)
        if include_info is not False:
            _torchrl.add_columns(data, info)
        return (data, info) if return_info else data

    @contextlib.contextmanager
    def _capture_prefetch_state(self, **how: Any) -> Iterator[dict[str, Any]]:
        """Yield the prefetching state in the form that TorchRL's class also accepts."""
        if self._storage.limiter is not None:
            _torchrl.drop_waiting(self)
        with super()._capture_prefetch_state(**how) as state:
            yield state | {"queue": tuple(drawn[:2] for drawn, _ in state["queue"])}

    def _restore_prefetch_queue_locked(
        self, prefetch_state: dict[str, Any] | None, **how: Any
    ) -> None:
        self._validate_prefetch_state(prefetch_state)
        if prefetch_state is not None and prefetch_state["queue"]:
            now = self._storage.emptied
            queue = tuple(((data, info, now), info) for data, info in prefetch_state["queue"])
            prefetch_state = prefetch_state | {"queue": queue}
        super()._restore_prefetch_queue_locked(prefetch_state, **how)

    def _next_sample(self, batch_size: int | None) -> tuple[TensorDictBase, dict[str, Any]]:
        # Skip batches fetched ahead whose draw failed (the draw timed out at the rate limiter, its
        # pass was over, or another process had emptied the buffer and not yet written new rows).
        # Also skip batches that were drawn before the buffer was emptied.
        for _ in range(len(self._prefetch_queue) if self._prefetch else 0):
            with contextlib.suppress(RateLimitError, PassOverError, NoRowsError, NoSlicesError):
                data, info, drawn_of = ReplayBuffer.sample(self, batch_size)
                if drawn_of == self._storage.emptied:
                    return data, info
        data, info, _ = ReplayBuffer.sample(self, batch_size)
        return data, info

    def __iter__(self) -> Iterator[Any]:
        """Yield batches indefinitely.

        With a :class:`SharedSamplerWithoutReplacement`, stop at the end of the pass, even if
        another process draws the pass's last row."""
        _torchrl.initialize(self)
        if not isinstance(self._sampler, SharedSamplerWithoutReplacement):
            yield from super().__iter__()
            return
        with self._sampler.one_pass(), contextlib.suppress(PassOverError):
            while True:
                yield self.sample()

    def _sample(self, batch_size: int) -> tuple[Any, dict[str, Any]]:
        """Return ``((batch, info, emptied), info)``, where ``emptied`` is the value of
        ``storage.emptied`` before the draw.

        TorchRL's ``sample`` returns the first item, whether the batch was fetched ahead or not."""
        drawn_of = self._storage.emptied
        if self._pin_memory or self._sample_unit is not None or len(self._transform or ()):
            data, info = super()._sample(batch_size)
        else:
            with self._replay_lock, self._write_lock:
                index, info = self._sampler.sample(self._storage, batch_size)
                info["index"] = index
                info["index_generation"] = self._writer.generations_of(index)
                data = self._collate_fn(self._storage.get(index))
        return (data, info, drawn_of), info

    def update_tensordict_priority(self, data: TensorDictBase) -> None:
        """Set the priorities of a sample, or of a part of a sample, from ``data[priority_key]``.

        Rows that were overwritten after they were sampled are skipped and counted. If ``data`` has
        no ``priority_key``, the rows silently get the largest priority seen, like new rows. TorchRL
        does the same. A misspelled key therefore makes sampling nearly uniform.

        Args:
            data: a batch with ``"index"`` and, like every sample, ``"index_generation"``. Without
                generations, rows are matched as in :meth:`update_priority`. For windows, ``data``
                has a priority for each row. The priorities of the anchors are computed from those
                of the rows, see ``eta``.
        """
        _torchrl.initialize(self)
        if not isinstance(self._sampler, PrioritizedSampler):
            return
        if self.windows is not None and data.get("anchor_index", None) is not None:
            index, generation, priority = self._of_anchors(data)
            self.update_priority(index, priority, generation=generation)
            return
        index = _torchrl.value_of(data, "index")
        generation = _torchrl.value_of(data, "index_generation")
        if index is None:
            raise ConfigurationError(
                f"the data has the keys {sorted(map(str, data.keys()))}, but no 'index'; pass a "
                "sample of this buffer"
            )
        if self._storage.ndim > 1:
            index = slots_at(torch.as_tensor(index), self._storage.width)
        if data.ndim:
            priority = self._priority_per_row(data)
        else:
            priority = torch.as_tensor(self._get_priority_item(data))
        self.update_priority(
            _per_row(index, priority),
            priority,
            generation=None if generation is None else _per_row(generation, priority),
        )

    def _of_anchors(self, data: TensorDictBase) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the index, generation and priority of each anchor. ``data`` holds windows, with
        any batch size."""
        names = ("anchor_index", "anchor_generation", "validity_mask", "learning_mask")
        missing = [name for name in names if data.get(name, None) is None]
        if missing:
            raise ConfigurationError(
                f"the windows have no {missing}, although each sample of this buffer has these "
                "entries; pass a sample, or some of its rows, without removing entries"
            )
        flat = data.select(*names, self.priority_key, strict=False)
        if flat.ndim != 1:
            flat = flat.reshape(flat.numel())
        priority = self._priority_per_row(flat)
        index, generation, valid, learning = (
            _per_row(flat.get(name), priority).cpu() for name in names
        )
        priority = priority.detach().cpu()
        pairs = torch.stack([index, generation], 1)[valid]
        anchors, which = torch.unique(pairs, dim=0, return_inverse=True)
        value, learning = priority[valid], learning[valid]
        found = value.new_zeros(len(anchors))
        found.scatter_reduce_(0, which, value, "amax", include_self=False)
        if self.eta < 1:
            mean = found.clone()  # for windows without a row of the learning region
            which, value = which[learning], value[learning]
            mean.scatter_reduce_(0, which, value, "mean", include_self=False)
            found = self.eta * found + (1 - self.eta) * mean
        return anchors[:, 0], anchors[:, 1], found

    def update_priority(
        self,
        index: int | torch.Tensor | tuple[torch.Tensor, ...],
        priority: float | torch.Tensor,
        *,
        generation: torch.Tensor | None = None,
    ) -> None:
        """Set the priority of rows, unless they were overwritten.

        Args:
            index: slots, int64 [n], or coordinates, [n, 2]; see ``ndim=``. Entries of -1 are
                skipped.
            priority: >= 0, a single number or [n].
            generation: int64 [n], ``"index_generation"`` of these rows. Without this argument,
                generations are looked up among recent samples and extends of this process. A slot
                that is not found there is updated regardless of which row it holds now, and counted
                (``"unverified_updates"``).
        """
        _torchrl.initialize(self)
        if isinstance(index, tuple):
            index = torch.stack(list(map(torch.as_tensor, index)), -1)
            index = index if index.ndim > 1 else index[None]
        index = torch.as_tensor(index)
        if index.ndim == 2 and index.shape[-1] == 1:
            index = index.squeeze(-1)
        more: dict[str, Any] = {} if generation is None else {"generation": generation}
        self._sampler.update_priority(index, priority, storage=self._storage, **more)


def _per_row(values: torch.Tensor, priority: torch.Tensor) -> torch.Tensor:
    """Return one value per priority, without TorchRL's repetitions over further batch
    dimensions."""
    while values.ndim > priority.ndim:
        values = values[..., 0]
    return values
