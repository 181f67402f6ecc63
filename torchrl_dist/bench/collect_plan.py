"""The choices of the collection benchmark.

This module must not import torch, because the command line imports this module."""

from __future__ import annotations

from dataclasses import dataclass

AUTO = 0  # instead of a number of steps per message: the collector chooses this number
ENVS = ("sleep", "cartpole", "cartpole-native", "halfcheetah")
QUESTIONS = ("busy", "ingest", "deadlines", "weights")
DURATIONS = ("normal", "lognormal", "slow")
NETWORKS = ("small", "large")
FLOOR = "floor"
OURS = ("ours", "ours-node", "ours-inference-1", "ours-inference-2")
OTHERS = (
    "torchrl-rpc",
    "torchrl-distributed",
    "torchrl-multisync",
    "torchrl-ray",
    "gymnasium-async",
    "tianshou-subproc",
    "tianshou-ray",
)
LINE = ("env", "workers", "envs", "step_s", "steps_per_message")
"""Cells that have the same values for these keys differ only in the peer."""


@dataclass(frozen=True)
class Cell:
    """One measurement. ``envs`` is per worker. ``steps`` is per message and env, or ``AUTO``.
    ``step_s`` is how long a step sleeps."""

    peer: str
    env: str
    workers: int
    envs: int
    step_s: float
    steps: int
    seconds: float
    timeout_s: float


@dataclass(frozen=True)
class Result:
    """``sps``: steps per second; ``startup_s``: seconds until the first batch; ``learner_cpu``: CPU
    seconds of the learner's process per second."""

    sps: float
    startup_s: float
    learner_cpu: float
