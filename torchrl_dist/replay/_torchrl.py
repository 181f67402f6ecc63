"""The private names of TorchRL that the plug-ins rely on, in one place.

Seen in torchrl 0.14.1 and tensordict 0.14.3.
"""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict
from torchrl.data.replay_buffers.storages import Storage


def buffers_over(storage: Storage) -> list[Any]:
    """The replay buffers of this process that were built over the storage."""
    return list(storage._attached_entities)


def sampler_of(buffer: Any) -> Any:
    """The buffer's sampler, or None while the buffer is being built."""
    return getattr(buffer, "_sampler", None)


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


def nested_tensordict(nested: dict[str, Any], batch_size: torch.Size) -> TensorDict:
    """``TensorDict(nested, batch_size)`` of tensors that are known to fit, without the checks.

    The checks take seven times as long as all the rest.
    """
    source = {
        key: nested_tensordict(value, batch_size) if isinstance(value, dict) else value
        for key, value in nested.items()
    }
    return TensorDict._new_unsafe(source, batch_size=batch_size)
