"""Collecting experience with many processes: workers that step envs, and who waits for whom."""

from __future__ import annotations

from torchrl_dist.collect.collector import RPCBatchedCollector
from torchrl_dist.collect.readiness import FirstReady, Preempt, Quorum, WaitAll
from torchrl_dist.collect.report import CollectReport
from torchrl_dist.collect.worker import RolloutWorker

__all__ = [
    "CollectReport",
    "FirstReady",
    "Preempt",
    "Quorum",
    "RPCBatchedCollector",
    "RolloutWorker",
    "WaitAll",
]
