"""Replay buffers that many processes share."""

from torchrl_dist.replay.buffer import SharedReplayBuffer
from torchrl_dist.replay.sampler import (
    SharedPrioritizedSampler,
    SharedRandomSampler,
    anneal_beta,
)
from torchrl_dist.replay.slices import SharedSliceSampler
from torchrl_dist.replay.storage import SharedMemmapStorage
from torchrl_dist.replay.writer import SharedCursorWriter

__all__ = [
    "SharedCursorWriter",
    "SharedMemmapStorage",
    "SharedPrioritizedSampler",
    "SharedRandomSampler",
    "SharedReplayBuffer",
    "SharedSliceSampler",
    "anneal_beta",
]
