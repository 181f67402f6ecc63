"""Batches of offline data and of rows that processes are writing, in an exact ratio."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.data import OfflineToOnlineReplayBuffer, ReplayBuffer

from torchrl_dist.errors import ConfigurationError
from torchrl_dist.replay.parts.buffer import SharedReplayBuffer
from torchrl_dist.replay.row import _torchrl

_NOT_KNOWN = {"index": -1, "index_generation": -1, "priority_weight": 1.0}
"""For each entry, the value that a row gets if the samples of its buffer do not have this entry."""


class SharedOfflineToOnlineReplayBuffer(OfflineToOnlineReplayBuffer):
    """TorchRL's ``OfflineToOnlineReplayBuffer`` with an online buffer that processes share.

    TorchRL's class builds its online buffer itself, for one process. This class takes an existing
    online buffer, so each rank of a job learns from the rows of all ranks. Each batch begins with
    exactly ``round(offline_fraction * batch_size)`` offline rows, followed by online rows. As long
    as the online buffer is empty, a batch has only offline rows. ``extend`` writes to the online
    buffer, and ``anneal(step, total_steps)`` decreases the fraction to 0.

    The entry ``"offline"`` of a batch, bool [n], tells which rows are offline rows. Both buffers
    may sample by priority, because ``update_tensordict_priority`` gives each buffer the priorities
    of its own rows. A row's weight corrects for the priorities in its buffer, but not for the
    ratio. The weight is 1 for a row from a buffer that samples uniformly.

    Args:
        offline: a ``ReplayBuffer``, such as a data set of TorchRL
            (``torchrl.data.datasets.MinariExperienceReplay``), or a :class:`SharedReplayBuffer`
            over rows that :meth:`SharedMemmapStorage.fill_once` has written. The offline rows must
            have the same keys and dtypes as the online rows.
        online: the online buffer. It may come from :func:`replay_buffer`.

    Keyword Args:
        offline_fraction: the fraction of a batch that is offline, above 0 and below 1.
        batch_size: rows per sample.
        transform: called with each batch.

    Raises:
        ConfigurationError: a buffer has the wrong class, fetches batches ahead (``prefetch=``),
            samples windows, or has a storage with ``ndim=2``. ``sample`` raises this error if the
            rows of the two buffers differ in keys or dtypes, or if a buffer does not return as many
            rows as it was asked for.

    Example:
        >>> data = TensorDict({"obs": torch.zeros(50, 4)}, [50])
        >>> storage = SharedMemmapStorage(50, scratch_dir="/dev/shm/example-offline")
        >>> storage.fill_once(data)
        >>> online = SharedMemmapStorage(100, scratch_dir="/dev/shm/example")
        >>> buffer = SharedOfflineToOnlineReplayBuffer(
        ...     SharedReplayBuffer(storage=storage),
        ...     SharedReplayBuffer(storage=online),
        ...     offline_fraction=0.25,
        ...     batch_size=8,
        ... )
        >>> slots = buffer.extend(TensorDict({"obs": torch.ones(9, 4)}, [9]))
        >>> buffer.sample()["offline"].sum()
        tensor(2)
    """

    def __init__(
        self,
        offline: ReplayBuffer,
        online: SharedReplayBuffer,
        *,
        offline_fraction: float = 0.5,
        batch_size: int | None = None,
        transform: Callable[[TensorDictBase], TensorDictBase] | None = None,
    ) -> None:
        for name, buffer, kind in (
            ("offline", offline, ReplayBuffer),
            ("online", online, SharedReplayBuffer),
        ):
            if not isinstance(buffer, kind):
                raise ConfigurationError(
                    f"{name} is a {type(buffer).__name__}, expected a {kind.__name__}; pass an "
                    "existing buffer or data set"
                )
            if getattr(buffer.storage, "ndim", 1) > 1:
                raise ConfigurationError(
                    f"the {name} buffer has a storage with ndim={buffer.storage.ndim}, so its "
                    "index has several coordinates; build it without ndim="
                )
            if _torchrl.prefetches(buffer):
                raise ConfigurationError(
                    f"the {name} buffer has prefetch=..., so it draws batches before their size is "
                    "known; build it without prefetch="
                )
            if getattr(buffer, "windows", None) is not None:
                raise ConfigurationError(
                    f"the {name} buffer has sample_unit=Sequence(...), so its batches have more "
                    "rows than batch_size; build it without sample_unit="
                )
        super().__init__(
            offline,
            online_capacity=1,
            offline_fraction=offline_fraction,
            batch_size=batch_size,
            transform=transform,
        )
        _torchrl.set_online_buffer(self, online)

    def sample(self, batch_size: int | None = None) -> TensorDictBase:
        """Return a batch [n] with ``"offline"``, and with the entries of both buffers' samples.

        If only one buffer's samples have ``"index"``, ``"index_generation"`` or
        ``"priority_weight"``, the rows of the other buffer get -1, -1 or 1 under this key."""
        size = _torchrl.batch_size_of(self) if batch_size is None else batch_size
        if size is None:
            raise ConfigurationError(
                "no batch size is known; pass batch_size= to sample or to the constructor"
            )
        count = round(self.offline_fraction * size)
        if len(self.online_buffer) == 0:
            count = size
        parts = []
        for buffer, rows in ((self.offline_buffer, count), (self.online_buffer, size - count)):
            if rows:
                part = buffer.sample(rows)
                if part.shape != (rows,):
                    raise ConfigurationError(
                        f"a buffer returned a batch of size {list(part.shape)}, expected [{rows}]; "
                        "use samplers that draw single rows with replacement"
                    )
                part["offline"] = torch.full((rows,), buffer is self.offline_buffer)
                parts.append(part)
        data = parts[0] if len(parts) == 1 else _joined(*parts)
        return data if self._transform is None else self._transform(data)

    def update_tensordict_priority(self, data: TensorDictBase) -> None:
        """Set the priorities of a sample, or of a part of a sample, in the buffers that sample by
        priority."""
        offline = data.get("offline", None)
        if offline is None:
            raise ConfigurationError(
                "the data have no entry 'offline', which says which buffer each row came "
                "from; pass a sample of this buffer"
            )
        for buffer, mine in ((self.offline_buffer, offline), (self.online_buffer, ~offline)):
            if hasattr(buffer, "update_tensordict_priority") and mine.any():
                buffer.update_tensordict_priority(data[mine])


def _joined(offline: TensorDictBase, online: TensorDictBase) -> TensorDictBase:
    """Join two samples whose rows have the same keys and dtypes.

    Raises:
        ConfigurationError: the samples differ in their keys, or in the dtype of a key, which
            ``torch.cat`` would silently convert.
    """
    parts = [_with_info(part) for part in (offline, online)]
    keys = [set(part.keys(True, True)) for part in parts]
    if keys[0] != keys[1]:
        only = [sorted(map(str, here - there)) for here, there in (keys, reversed(keys))]
        raise ConfigurationError(
            f"only offline rows have the keys {only[0]}, and only online rows have the keys "
            f"{only[1]}; write the same keys to both buffers, or exclude these keys by a transform "
            "of the buffer"
        )
    for key in keys[0] - _NOT_KNOWN.keys():
        here, there = (getattr(part.get(key), "dtype", None) for part in parts)
        if here != there:
            raise ConfigurationError(
                f"{key!r} is {here} in offline rows, but {there} in online rows; write the same "
                "dtype to both buffers, or convert it by a transform of one buffer, such as "
                "torchrl.envs.DTypeCastTransform"
            )
    return torch.cat(parts, 0)


def _with_info(part: TensorDictBase) -> TensorDictBase:
    found: Any = TensorDict(dict(part.items()), [part.shape[0]], device=part.device)
    for name, value in _NOT_KNOWN.items():
        given = part.get(name, None)
        if given is None:
            found[name] = torch.full((part.shape[0],), value, device=part.device)
        elif given.shape != part.batch_size:
            found[name] = given.reshape(part.shape[0], -1)[:, 0]
    return found
