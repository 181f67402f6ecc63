"""Replay buffers that many processes share."""

from torchrl_dist.replay.buffer import SharedReplayBuffer
from torchrl_dist.replay.hosted import HostedReplayBuffer, replay_buffer
from torchrl_dist.replay.limiter import RateLimiter
from torchrl_dist.replay.owner import ReplayOwner, host_replay
from torchrl_dist.replay.remote import RemoteStorage, RPCPrioritizedSampler, RPCRandomSampler
from torchrl_dist.replay.sampler import (
    SharedPrioritizedSampler,
    SharedRandomSampler,
    anneal_beta,
)
from torchrl_dist.replay.slices import SharedSliceSampler
from torchrl_dist.replay.storage import SharedMemmapStorage
from torchrl_dist.replay.writer import SharedCursorWriter

__all__ = [
    "HostedReplayBuffer",
    "RPCPrioritizedSampler",
    "RPCRandomSampler",
    "RateLimiter",
    "RemoteStorage",
    "ReplayOwner",
    "SharedCursorWriter",
    "SharedMemmapStorage",
    "SharedPrioritizedSampler",
    "SharedRandomSampler",
    "SharedReplayBuffer",
    "SharedSliceSampler",
    "anneal_beta",
    "host_replay",
    "replay_buffer",
]
