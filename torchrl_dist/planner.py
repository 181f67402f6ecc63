"""Predict the speed of a job in frames/s from measured costs and a layout of processes.

This module only computes; ``torchrl_dist.plan`` measures and starts processes. Durations named CPU
are seconds of one core; all other durations are seconds of wall-clock time. The model has three
parts:

**Processes that share cores.** A process steps its environments repeatedly. A step takes CPU time D
and idle time Z, in which the process sleeps or waits for a GPU or for another process. P such
processes on C cores are an instance of the machine-repair model. If cores are shared as Linux
shares them (processor sharing), the throughput X depends only on the means D and Z::

    p(n) ~ P! / (P - n)! (D / Z)^n / prod_{i <= n} min(i, C),     X = sum_n p(n) min(n, C) / D

(M/M/m with a finite population: Kleinrock, Queueing Systems I, chapter 3. For any distribution of D
and Z: Baskett, Chandy, Muntz and Palacios, J. ACM 22(2), 1975.)

**A learner that takes one message after the other.** The learner spends m seconds on a message, b
seconds on a byte, and u seconds on learning from a frame. If a message has F frames of B bytes
each, the learner takes at most 1 / (m / F + b * B + u) frames/s. With a policy lag, the workers
step while the learner works. Without a lag, the learner's seconds are added to each round.

**Waiting for the slowest.** A round ends with the slowest of W rollouts. The time of a rollout is a
sum of K step times. In the model, this time is lognormal with spread s / sqrt(K), where s is the
relative spread of one step (Fenton, IRE Trans. 8(1), 1960). If F is the distribution function of
this time, the mean of the longest time is E[max] = integral of F^-1(u^(1/W)) over 0 < u < 1.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from torchrl_dist.errors import ConfigurationError

MIN_GAIN = 1.1
"""The smallest gain that justifies more processes or nodes. A smaller gain does not, because more
processes must be started and watched and may fail, and because predictions are precise only to
10 %."""

# number of points of the integral in `slowest`; 4096 points change the result by less than 0.1 %
_POINTS = 1024


# ---- what was measured


@dataclass(frozen=True)
class Costs:
    """Costs of one job, as ``torchrl_dist.plan.measure`` measures them on a node.

    Attributes:
        step_cpu_s: pairs ``(envs, CPU seconds)`` in ascending order. Each pair has the cost of one
            step of that many envs in one process, including policy, rollout loop and resets.
        idle_s: idle time in one env's step, if a process steps its envs one after the other. For a
            vectorized env, the idle time of a step of all its envs, divided by their number.
        spread: standard deviation of one env's step time, divided by the mean.
        frame_bytes: bytes of one frame in a message.
        message_worker_s, message_learner_s: CPU time per message, independent of its size.
        byte_worker_s, byte_learner_s: additional CPU time per byte.
        process_s: CPU time that each env process adds to a message, if a node worker sends the
            messages of its node.
        latency_s: time from the end of a rollout on the worker until the learner has the batch,
            plus the time from the learner back to the worker.
        broadcast_s: the learner's CPU time to send new weights, per worker.
        request_s: the learner's CPU time per inference request of an env process, including the
            policy.
        request_latency_s: time from a request of an env process until it has its actions, if there
            are no other requests.
        update_s: CPU time of one update of the learner.
        updates_per_frame: updates of the learner for each frame.
        startup_s: time until the processes of a job have started.
        bytes_per_s: bandwidth of the network between nodes.
    """

    step_cpu_s: tuple[tuple[int, float], ...]
    idle_s: float
    spread: float
    frame_bytes: float
    message_worker_s: float
    message_learner_s: float
    byte_worker_s: float
    byte_learner_s: float
    process_s: float
    latency_s: float
    broadcast_s: float
    request_s: float
    request_latency_s: float
    update_s: float
    updates_per_frame: float
    startup_s: float
    bytes_per_s: float

    def step_s(self, envs: int) -> float:
        """Return the CPU seconds of a step of ``envs`` envs, interpolated linearly."""
        counts, seconds = zip(*self.step_cpu_s, strict=True)
        if envs <= counts[0]:
            return seconds[0] * envs / counts[0]
        if envs <= counts[-1] or len(counts) == 1:
            return float(np.interp(envs, counts, seconds)) * max(1.0, envs / counts[-1])
        slope = (seconds[-1] - seconds[-2]) / (counts[-1] - counts[-2])
        return seconds[-1] + max(0.0, slope) * (envs - counts[-1])

    @property
    def learn_s(self) -> float:
        """The learner's CPU time for updates, per frame."""
        return self.update_s * self.updates_per_frame


@dataclass(frozen=True)
class Layout:
    """The processes and envs of a job.

    Attributes:
        nodes: number of nodes with collectors. The learner is on the first node.
        processes: number of env processes per node. With 0, there is a single process, in which the
            learner steps the envs.
        envs: number of envs per env process, or per group of an env process if there are groups.
        steps: number of steps of each env in a message.
        node_workers: whether a node sends one message for all of its processes.
        lag: the maximum policy lag. With 0, workers do not step while the learner learns.
        wait_all: whether a batch has a rollout of every worker. If not, a batch has rollouts only
            of the workers that deliver first.
        groups: number of groups of envs per env process, if the learner computes all actions. With
            0, each worker computes the actions of its own envs.
    """

    nodes: int = 1
    processes: int = 0
    envs: int = 1
    steps: int = 64
    node_workers: bool = False
    lag: int = 0
    wait_all: bool = True
    groups: int = 0

    @property
    def alone(self) -> bool:
        """Whether one process does everything."""
        return self.processes == 0

    @property
    def stepping(self) -> int:
        """Number of processes that step envs, on all nodes."""
        return self.nodes * max(1, self.processes)

    @property
    def messages(self) -> int:
        """Number of messages per round."""
        return 0 if self.alone else self.nodes if self.node_workers else self.stepping

    @property
    def frames(self) -> int:
        """Number of frames per round."""
        return self.stepping * self.envs * max(1, self.groups) * self.steps


@dataclass(frozen=True)
class Prediction:
    """The predicted speed of a layout.

    Attributes:
        frames_per_s: frames per second that the learner gets and learns from.
        efficiency: ``frames_per_s`` divided by the rate of the same processes with one core each,
            without messages and without a learner.
        bound_by: what limits the speed ("environment", "cores", "learner", "messages", "network" or
            "stragglers").
        learner_busy: the fraction of time in which the learner's process has work.
    """

    frames_per_s: float
    efficiency: float
    bound_by: str
    learner_busy: float


# ---- the parts of the model


def machine_repair(processes: int, cpu_s: float, idle_s: float, cores: float) -> float:
    """Return the cycles per second of ``processes`` that share ``cores``.

    Each cycle computes for ``cpu_s`` and is idle for ``idle_s``. ``cores`` may be a fraction.
    """
    if processes < 1 or cores <= 0:
        return 0.0
    if idle_s <= 0:
        return min(processes, cores) / cpu_s if cpu_s > 0 else math.inf
    if cpu_s <= 0:
        return processes / idle_s
    weights, busy, weight = 1.0, 0.0, 1.0
    for n in range(1, processes + 1):
        weight *= (processes - n + 1) * cpu_s / idle_s / min(n, cores)
        if weight > 1e200:  # rescale, because only ratios count
            weights, busy, weight = weights / weight, busy / weight, 1.0
        weights += weight
        busy += weight * min(n, cores)
    return busy / weights / cpu_s


@functools.cache
def _normal_quantiles(count: int) -> np.ndarray:
    """Return evenly spaced quantiles of the greatest of ``count`` standard normal numbers."""
    return np.array(
        [NormalDist().inv_cdf(((i + 0.5) / _POINTS) ** (1 / count)) for i in range(_POINTS)]
    )


def slowest(count: int, spread: float) -> float:
    """Return the mean of the longest of ``count`` lognormal durations.

    The durations have mean 1 and standard deviation ``spread``.
    """
    if count <= 1 or spread <= 0:
        return 1.0
    sigma = math.sqrt(math.log1p(spread**2))
    with np.errstate(over="ignore"):
        return float(np.exp(sigma * _normal_quantiles(count) - sigma**2 / 2).mean())


# ---- the model


def predict(costs: Costs, layout: Layout, cores: int) -> Prediction:
    """Predict ``layout`` on nodes with ``cores`` cores each.

    Raises:
        ConfigurationError: the layout has no node, env or step, or ``cores`` is below 1.
    """
    if min(layout.nodes, layout.envs, layout.steps, cores) < 1 or layout.processes < 0:
        raise ConfigurationError(
            f"got {layout} on {cores} cores; expected at least one node, env, step and core, and "
            "0 or more processes"
        )
    if layout.alone:
        return _alone(costs, layout)
    parts = _Parts(costs, layout, cores)
    return parts.in_rounds() if layout.wait_all and layout.lag == 0 else parts.overlapped()


def _alone(costs: Costs, layout: Layout) -> Prediction:
    collect_s = costs.step_s(layout.envs) / layout.envs + costs.idle_s
    frame_s = collect_s + costs.learn_s
    bound_by = "learner" if costs.learn_s > collect_s else "environment"
    return Prediction(1 / frame_s, collect_s / frame_s, bound_by, 1 - costs.idle_s / frame_s)


class _Parts:
    """The seconds that make up a round, or a frame, of a distributed layout."""

    def __init__(self, costs: Costs, layout: Layout, cores: int) -> None:
        self._costs, self._layout, self._cores = costs, layout, cores
        in_step = layout.envs  # envs of one group
        step_cpu_s = costs.step_s(in_step)
        self._frames = layout.frames / layout.messages  # frames per message
        size = self._frames * costs.frame_bytes
        per_process = layout.processes if layout.node_workers else 1
        own_s = costs.message_worker_s + size * costs.byte_worker_s
        own_s += layout.processes * costs.process_s if layout.node_workers else 0.0
        # The seconds in which an env process steps one group.
        self._step_s = step_cpu_s
        self._cpu_s = step_cpu_s + own_s / (per_process * layout.steps * max(1, layout.groups))
        self._idle_s = in_step * costs.idle_s
        self._alone_s = self._step_s + self._idle_s
        # The learner's seconds per frame.
        self._message_s = (costs.message_learner_s + size * costs.byte_learner_s) / self._frames
        self._learn_s = costs.learn_s
        if layout.groups:
            self._message_s += costs.request_s / in_step
            wait_s = costs.request_latency_s
            if layout.groups > 1:  # the process steps its other groups while one group waits
                wait_s = max(0.0, wait_s - (layout.groups - 1) * self._alone_s) / layout.groups
            self._idle_s += wait_s

    def _steps_per_s(self, learner_load: float) -> float:
        """Return the steps/s of all env processes if the learner takes ``learner_load`` cores."""
        layout = self._layout
        with_learner = max(self._cores - learner_load, self._cores / (layout.processes + 1))
        first = machine_repair(layout.processes, self._cpu_s, self._idle_s, with_learner)
        others = machine_repair(layout.processes, self._cpu_s, self._idle_s, self._cores)
        return first + (layout.nodes - 1) * others

    def _limits(self) -> dict[str, float]:
        """Return the upper limits of frames/s that the learner and its network set, by name."""
        learner_s = self._message_s + self._learn_s
        kind = "messages" if self._message_s > self._learn_s else "learner"
        limits = {kind: 1 / learner_s if learner_s > 0 else math.inf}
        if self._layout.nodes > 1:
            away = (self._layout.nodes - 1) / self._layout.nodes
            limits["network"] = self._costs.bytes_per_s / (self._costs.frame_bytes * away)
        return limits

    def overlapped(self) -> Prediction:
        """Predict the case in which workers step while the learner works."""
        layout, learner_s = self._layout, self._message_s + self._learn_s
        rate, load = 0.0, 0.0
        for _ in range(50):  # find a fixed point, because load and rate depend on each other
            rate = layout.envs * self._steps_per_s(load)
            load += 0.5 * (min(1.0, rate * learner_s) - load)
        slow = 1.0
        # A worker may be up to `lag` rollouts ahead, so differences between workers even out.
        if layout.wait_all:
            count = layout.envs * layout.steps * (1 + layout.lag)
            slow = slowest(layout.stepping, self._costs.spread / math.sqrt(count))
        return self._result(rate / slow, slow)

    def in_rounds(self) -> Prediction:
        """Predict the case in which workers and learner take turns."""
        layout, costs = self._layout, self._costs
        steps_per_s = self._steps_per_s(0.0) / layout.stepping
        slow = slowest(layout.stepping, costs.spread / math.sqrt(layout.envs * layout.steps))
        collect_s = layout.steps * max(1, layout.groups) / steps_per_s * slow
        learner_s = layout.frames * (self._message_s + self._learn_s)
        learner_s += layout.messages * costs.broadcast_s
        round_s = collect_s + costs.latency_s + learner_s
        return self._result(layout.frames / round_s, slow, learner_s / round_s)

    def _result(self, rate: float, slow: float, busy: float | None = None) -> Prediction:
        limits = self._limits()
        kind, limit = min(limits.items(), key=lambda item: item[1])
        limited = min(rate, limit)
        learner_s = self._message_s + self._learn_s
        busy = min(1.0, limited * learner_s) if busy is None else busy
        ideal = self._layout.stepping * self._layout.envs / self._alone_s
        bound_by = self._bound_by(limited, kind if rate >= 0.95 * limit else "", slow, busy)
        return Prediction(limited, limited / ideal, bound_by, busy)

    def _bound_by(self, rate: float, limit: str, slow: float, busy: float) -> str:
        """Return the name of the part whose reduction would increase the speed most."""
        if limit:
            return limit
        if busy > 0.5:
            return "messages" if self._message_s > self._learn_s else "learner"
        steps = rate / self._layout.envs / self._layout.nodes
        if steps * self._cpu_s + busy > 0.9 * self._cores:
            return "messages" if self._cpu_s > 2 * self._step_s else "cores"
        return "stragglers" if slow > 1.5 else "environment"


# ---- choosing a layout


def time_to(frames: float, prediction: Prediction, layout: Layout, costs: Costs) -> float:
    """Return the seconds until ``frames`` frames are collected, including the start."""
    return frames / prediction.frames_per_s + (0.0 if layout.alone else costs.startup_s)


def rank(costs: Costs, layouts: Iterable[Layout], cores: int) -> list[tuple[Layout, Prediction]]:
    """Predict all layouts and sort them, fastest first.

    Speeds are rounded to 1 %. If they are equal, the layout with fewer processes comes first.
    """
    known = [(layout, predict(costs, layout, cores)) for layout in layouts]
    return sorted(
        known,
        key=lambda each: (
            -round(math.log(each[1].frames_per_s) / 0.01),
            each[0].stepping,
            each[0].envs,
        ),
    )


@dataclass(frozen=True)
class Verdict:
    """The recommendation.

    Attributes:
        word: "do not distribute", "do not distribute across nodes" or "distribute".
        layout, prediction: the recommended layout and its prediction.
        reason: one sentence.
    """

    word: str
    layout: Layout
    prediction: Prediction
    reason: str


def decide(ranked: Sequence[tuple[Layout, Prediction]]) -> Verdict:
    """Choose the smallest kind of job (one process, one node, several nodes), unless a larger kind
    is at least ``MIN_GAIN`` times as fast."""

    def best(kept: Iterable[tuple[Layout, Prediction]]) -> tuple[Layout, Prediction] | None:
        return max(kept, key=lambda each: each[1].frames_per_s, default=None)

    alone = best(each for each in ranked if each[0].alone)
    node = best(each for each in ranked if not each[0].alone and each[0].nodes == 1)
    nodes = best(each for each in ranked if each[0].nodes > 1)
    if alone is None:
        raise ConfigurationError(
            "got no layout with one process, with which others could be compared; add one"
        )
    chosen = alone
    says = [f"one process makes {alone[1].frames_per_s:,.0f} frames/s"]
    for other in (node, nodes):
        if other is None:
            continue
        layout, prediction = other
        gain = prediction.frames_per_s / chosen[1].frames_per_s
        name = "several processes" if layout.nodes == 1 else f"{layout.nodes} nodes"
        than = "one process" if chosen[0].alone else "one node"
        says.append(f"{name} {prediction.frames_per_s:,.0f} ({gain:.2f} times {than})")
        if gain >= MIN_GAIN:
            chosen = other
    words = {0: "do not distribute", 1: "do not distribute across nodes"}
    layout, prediction = chosen
    word = words.get(0 if layout.alone else layout.nodes, "distribute")
    return Verdict(word, layout, prediction, ", ".join(says))
