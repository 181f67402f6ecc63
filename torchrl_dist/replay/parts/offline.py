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
"""What a batch says about rows whose buffer does not give this entry."""


class SharedOfflineToOnlineReplayBuffer(OfflineToOnlineReplayBuffer):
    """TorchRL's ``OfflineToOnlineReplayBuffer`` with an online buffer that processes share.

    TorchRL's class builds its online buffer itself, for one process. This class takes one, so all
    ranks of a job learn from the rows of all. Each batch has exactly
    ``round(offline_fraction * batch_size)`` offline rows, first, and online rows after them. As
    long as there is no online row, all are offline. ``extend`` writes to the online buffer, and
    ``anneal(step, total_steps)`` decreases the fraction to 0.

    A batch has an entry ``"offline"``, bool [n]. Both buffers may sample by priority:
    ``update_tensordict_priority`` gives each of them the priorities of its own rows. A weight
    corrects for the priorities in its row's buffer, and not for the ratio. It is 1 in a uniform
    buffer.

    Args:
        offline: a ``ReplayBuffer``, such as a data set of TorchRL
            (``torchrl.data.datasets.MinariExperienceReplay``), or a :class:`SharedReplayBuffer`
            over rows that :meth:`SharedMemmapStorage.fill_once` has written. It must have the keys
            of the online rows.
        online: the online buffer, also one of :func:`replay_buffer`.

    Keyword Args:
        offline_fraction: part of a batch that is offline, above 0 and below 1.
        batch_size: rows per sample.
        transform: called with each batch.

    Raises:
        ConfigurationError: a buffer prefetches or samples windows. From ``sample``: the buffers
            have different keys, or one returned another number of rows.

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
                    f"{name} is a {type(buffer).__name__}, expected a {kind.__name__}; pass a "
                    "built buffer or data set"
                )
            if _torchrl.prefetches(buffer):
                raise ConfigurationError(
                    f"{name} has prefetch=..., which draws batches before their size is known; "
                    "build the buffer without it"
                )
            if getattr(buffer, "windows", None) is not None:
                raise ConfigurationError(
                    f"{name} has sample_unit=Sequence(...), whose batches have more rows than "
                    "batch_size; build the buffer without it"
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

        Where a buffer does not give an entry of the other one, ``"index"`` and
        ``"index_generation"`` are -1, and ``"priority_weight"`` is 1."""
        size = _torchrl.batch_size_of(self) if batch_size is None else batch_size
        if size is None:
            raise ConfigurationError("sample needs batch_size=, here or in the constructor")
        count = round(self.offline_fraction * size)
        if len(self.online_buffer) == 0:
            count = size
        parts = []
        for buffer, rows in ((self.offline_buffer, count), (self.online_buffer, size - count)):
            if rows:
                part = buffer.sample(rows)
                if part.shape != (rows,):
                    raise ConfigurationError(
                        f"a buffer returned rows of batch size {list(part.shape)}, asked for "
                        f"{rows}: use samplers that return single rows, with replacement"
                    )
                part["offline"] = torch.full((rows,), buffer is self.offline_buffer)
                parts.append(part)
        data = parts[0] if len(parts) == 1 else _joined(*parts)
        return data if self._transform is None else self._transform(data)

    def update_tensordict_priority(self, data: TensorDictBase) -> None:
        """Set the priorities of a sample, or of a part of one, in the buffers that sample by
        priority."""
        offline = data.get("offline", None)
        if offline is None:
            raise ConfigurationError(
                "the data have no 'offline', which says whose rows they are: pass a sample of this "
                "buffer"
            )
        for buffer, mine in ((self.offline_buffer, offline), (self.online_buffer, ~offline)):
            if hasattr(buffer, "update_tensordict_priority") and mine.any():
                buffer.update_tensordict_priority(data[mine])


def _joined(offline: TensorDictBase, online: TensorDictBase) -> TensorDictBase:
    """Join two samples whose rows have the same keys.

    Raises:
        ConfigurationError: they have not.
    """
    parts = [_with_info(part) for part in (offline, online)]
    keys = [set(part.keys(True, True)) for part in parts]
    if keys[0] != keys[1]:
        only = [sorted(map(str, here - there)) for here, there in (keys, reversed(keys))]
        raise ConfigurationError(
            f"only offline rows have {only[0]}, only online rows have {only[1]}: write the same "
            "keys, or drop the others by a transform of the buffer"
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
