"""TorchRL's replay buffer and collector, shared by many processes.

Each name is imported on first use, so ``import torchrl_dist`` alone does not import torch.
"""

# ruff: noqa: F401
from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

if not getattr(sys, "_is_gil_enabled", lambda: True)():
    raise ImportError(
        "torchrl_dist needs Python's global interpreter lock, because its shared buffers are "
        "tested only with that lock, but this Python runs without the lock (free-threaded). Run it "
        "with PYTHON_GIL=1, or use the ordinary build of Python."
    )

__version__ = "0.1.0"

_HOMES = {
    "CollectReport": "collect",
    "FirstReady": "collect",
    "Preempt": "collect",
    "Quorum": "collect",
    "RPCBatchedCollector": "collect",
    "WaitAll": "collect",
    "DistributedLoss": "learn",
    "load_policy": "recipes.parts.trained",
    "HostedReplayBuffer": "replay",
    "RPCPrioritizedSampler": "replay",
    "RPCPrioritizedSliceSampler": "replay",
    "RPCRandomSampler": "replay",
    "RPCSamplerWithoutReplacement": "replay",
    "RPCSliceSampler": "replay",
    "RateLimiter": "replay",
    "RemoteStorage": "replay",
    "ReplayOwner": "replay",
    "SharedCursorWriter": "replay",
    "SharedMaxValueWriter": "replay",
    "SharedMemmapStorage": "replay",
    "SharedOfflineToOnlineReplayBuffer": "replay",
    "SharedPrioritizedSampler": "replay",
    "SharedPrioritizedSliceSampler": "replay",
    "SharedRandomSampler": "replay",
    "SharedReplayBuffer": "replay",
    "SharedSamplerWithoutReplacement": "replay",
    "SharedSliceSampler": "replay",
    "anneal_beta": "replay",
    "host_replay": "replay",
    "replay_buffer": "replay",
    "Peer": "runtime",
    "Remote": "runtime",
    "Session": "runtime",
    "World": "runtime",
    "local_cluster": "runtime",
    "session": "runtime",
    "CheckpointError": "errors",
    "ConfigurationError": "errors",
    "DeadlineError": "errors",
    "DirectoryError": "errors",
    "DriftError": "errors",
    "PeerLostError": "errors",
    "RateLimitError": "errors",
    "RemoteError": "errors",
    "TorchRLDistError": "errors",
}

__all__ = ["__version__", *_HOMES]

if TYPE_CHECKING:
    from torchrl_dist.collect import (
        CollectReport,
        FirstReady,
        Preempt,
        Quorum,
        RPCBatchedCollector,
        WaitAll,
    )
    from torchrl_dist.errors import (
        CheckpointError,
        ConfigurationError,
        DeadlineError,
        DirectoryError,
        DriftError,
        PeerLostError,
        RateLimitError,
        RemoteError,
        TorchRLDistError,
    )
    from torchrl_dist.learn import DistributedLoss
    from torchrl_dist.recipes.parts.trained import load_policy
    from torchrl_dist.replay import (
        HostedReplayBuffer,
        RateLimiter,
        RemoteStorage,
        ReplayOwner,
        RPCPrioritizedSampler,
        RPCPrioritizedSliceSampler,
        RPCRandomSampler,
        RPCSamplerWithoutReplacement,
        RPCSliceSampler,
        SharedCursorWriter,
        SharedMaxValueWriter,
        SharedMemmapStorage,
        SharedOfflineToOnlineReplayBuffer,
        SharedPrioritizedSampler,
        SharedPrioritizedSliceSampler,
        SharedRandomSampler,
        SharedReplayBuffer,
        SharedSamplerWithoutReplacement,
        SharedSliceSampler,
        anneal_beta,
        host_replay,
        replay_buffer,
    )
    from torchrl_dist.runtime import Peer, Remote, Session, World, local_cluster, session


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
