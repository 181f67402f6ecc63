"""Collect experience with many processes: workers step envs, and a rule ends each batch."""

from __future__ import annotations

from torchrl_dist.collect.learner.collector import RPCBatchedCollector
from torchrl_dist.collect.learner.readiness import FirstReady, Preempt, Quorum, WaitAll
from torchrl_dist.collect.learner.report import CollectReport
from torchrl_dist.collect.worker.worker import RolloutWorker

__all__ = [
    "CollectReport",
    "FirstReady",
    "Preempt",
    "Quorum",
    "RPCBatchedCollector",
    "RolloutWorker",
    "WaitAll",
]
