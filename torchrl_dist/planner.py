"""How fast will a job be? A pure cost model: measured costs and a layout in, frames per second out.

Nothing is measured here and nothing is started; ``torchrl_dist.plan`` does both. Seconds are
seconds of one core where they are called CPU, and of a clock otherwise. The model in three parts:

**Processes that share cores.** A process steps its environments, which takes CPU time D and idle
time Z (asleep, on a GPU, in another process), and does so again. P such processes on C cores are
the machine-repair model; where cores are shared as Linux shares them (processor sharing), its
throughput depends on nothing but the means D and Z::

    p(n) ~ P! / (P - n)! (D / Z)^n / prod_{i <= n} min(i, C),     X = sum_n p(n) min(n, C) / D

(M/M/m with a finite population: Kleinrock, Queueing Systems I, chapter 3; for any law of D and Z:
Baskett, Chandy, Muntz and Palacios, J. ACM 22(2), 1975.)

**A learner that takes one message after the other.** It pays m for a message and b for a byte, and
u for learning from a frame, so that X can be no more than 1 / (m / F + b * bytes + u) for F frames
per message. With a lag the workers step meanwhile; without, these seconds come on top.

**Waiting for the slowest.** A round ends with the slowest of W rollouts. A rollout is a sum of K
step times; with relative spread s of one step it is taken as lognormal with spread s / sqrt(K)
(Fenton, IRE Trans. 8(1), 1960), and E[max] = integral of F^-1(u^(1/W)) over 0 < u < 1.
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
"""A job of more processes, or nodes, that gains less than this is not worth what it adds: one more
thing to start, to watch and to lose. The planner's figures are no better than a tenth either."""

_POINTS = 1024  # of the integral for the slowest; 4096 change it by less than 0.1 %


# ---- what was measured


@dataclass(frozen=True)
class Costs:
    """What things cost, as ``torchrl_dist.plan.measure`` finds them on a machine.

    Attributes:
        step_cpu_s: ``(envs, CPU seconds)``, ascending: one step of so many envs in one process
            together with policy, rollout loop and resets.
        idle_s: of one env's step; envs of a process are stepped one after the other. Of a
            vectorized env's step: divided by its envs.
        spread: standard deviation of one env's step time over its mean.
        frame_bytes: of a row in a message.
        message_worker_s, message_learner_s: CPU of one message, whatever its size.
        byte_worker_s, byte_learner_s: CPU per byte on top.
        process_s: CPU of one env process's part in a node worker's message, on the node.
        latency_s: from a message's end on the worker to its batch at the learner, and back.
        broadcast_s: learner's CPU for new weights, per worker.
        request_s: learner's CPU for an inference request, policy included, per env process.
        request_latency_s: until the env process has its actions, when nobody else asks.
        update_s: of one update of the learner; ``updates_per_frame`` how many each frame causes.
        startup_s: of the processes of a job.
        bytes_per_s: of the network between nodes.
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
        """CPU seconds of a step of ``envs`` envs: on straight lines between what was measured."""
        counts, seconds = zip(*self.step_cpu_s, strict=True)
        if envs <= counts[0]:
            return seconds[0] * envs / counts[0]
        if envs <= counts[-1] or len(counts) == 1:
            return float(np.interp(envs, counts, seconds)) * max(1.0, envs / counts[-1])
        slope = (seconds[-1] - seconds[-2]) / (counts[-1] - counts[-2])
        return seconds[-1] + max(0.0, slope) * (envs - counts[-1])

    @property
    def learn_s(self) -> float:
        """Learner's CPU per frame for its updates."""
        return self.update_s * self.updates_per_frame


@dataclass(frozen=True)
class Layout:
    """What is started where.

    Attributes:
        nodes: machines with collectors; the learner is on the first.
        processes: env processes per node; 0: the learner steps the envs itself, one process in all.
        envs: per env process (and group).
        steps: of each env in a message.
        node_workers: a node sends one message for all of its processes.
        lag: 0: nobody steps while the learner learns.
        wait_all: a batch has a rollout of everybody; False: of whoever is first.
        groups: of envs whose policy runs at the learner; 0: workers have their own.
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
        """One process does it all."""
        return self.processes == 0

    @property
    def stepping(self) -> int:
        """Processes that step envs, on all nodes."""
        return self.nodes * max(1, self.processes)

    @property
    def messages(self) -> int:
        """Per round."""
        return 0 if self.alone else self.nodes if self.node_workers else self.stepping

    @property
    def frames(self) -> int:
        """Per round."""
        return self.stepping * self.envs * max(1, self.groups) * self.steps


@dataclass(frozen=True)
class Prediction:
    """What a layout will do.

    Attributes:
        frames_per_s: as the learner gets, and learns from, them.
        efficiency: of what the same processes would step with a core each, without messages and
            without a learner.
        bound_by: "environment", "cores", "learner", "messages", "network" or "stragglers".
        learner_busy: part of the time in which the learner's process has work.
    """

    frames_per_s: float
    efficiency: float
    bound_by: str
    learner_busy: float


# ---- the parts of the model


def machine_repair(processes: int, cpu_s: float, idle_s: float, cores: float) -> float:
    """Cycles per second of ``processes`` that compute ``cpu_s`` on shared ``cores`` (a fraction is
    allowed) and are idle for ``idle_s``, again and again."""
    if processes < 1 or cores <= 0:
        return 0.0
    if idle_s <= 0:
        return min(processes, cores) / cpu_s if cpu_s > 0 else math.inf
    if cpu_s <= 0:
        return processes / idle_s
    weights, busy, weight = 1.0, 0.0, 1.0
    for n in range(1, processes + 1):
        weight *= (processes - n + 1) * cpu_s / idle_s / min(n, cores)
        if weight > 1e200:  # only ratios count
            weights, busy, weight = weights / weight, busy / weight, 1.0
        weights += weight
        busy += weight * min(n, cores)
    return busy / weights / cpu_s


@functools.cache
def _normal_quantiles(count: int) -> np.ndarray:
    """Of the greatest of ``count`` standard normal numbers, at evenly spread probabilities."""
    return np.array(
        [NormalDist().inv_cdf(((i + 0.5) / _POINTS) ** (1 / count)) for i in range(_POINTS)]
    )


def slowest(count: int, spread: float) -> float:
    """Expected greatest of ``count`` lognormal durations of mean 1 and that standard deviation."""
    if count <= 1 or spread <= 0:
        return 1.0
    sigma = math.sqrt(math.log1p(spread**2))
    with np.errstate(over="ignore"):
        return float(np.exp(sigma * _normal_quantiles(count) - sigma**2 / 2).mean())


# ---- the model


def predict(costs: Costs, layout: Layout, cores: int) -> Prediction:
    """Frames per second of ``layout`` on nodes of ``cores`` cores each.

    Raises:
        ConfigurationError: a layout that cannot be.
    """
    if min(layout.nodes, layout.envs, layout.steps, cores) < 1 or layout.processes < 0:
        raise ConfigurationError(f"{layout} on {cores} cores: expected counts of at least 1")
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
    """The seconds of which a round, or a frame, of a distributed layout is made."""

    def __init__(self, costs: Costs, layout: Layout, cores: int) -> None:
        self._costs, self._layout, self._cores = costs, layout, cores
        in_step = layout.envs  # of one group
        step_cpu_s = costs.step_s(in_step)
        self._frames = layout.frames / layout.messages  # per message
        size = self._frames * costs.frame_bytes
        per_process = layout.processes if layout.node_workers else 1
        own_s = costs.message_worker_s + size * costs.byte_worker_s
        own_s += layout.processes * costs.process_s if layout.node_workers else 0.0
        # of one step of an env process, for one group
        self._step_s = step_cpu_s
        self._cpu_s = step_cpu_s + own_s / (per_process * layout.steps * max(1, layout.groups))
        self._idle_s = in_step * costs.idle_s
        self._alone_s = self._step_s + self._idle_s
        # of the learner, per frame
        self._message_s = (costs.message_learner_s + size * costs.byte_learner_s) / self._frames
        self._learn_s = costs.learn_s
        if layout.groups:
            self._message_s += costs.request_s / in_step
            wait_s = costs.request_latency_s
            if layout.groups > 1:  # the other groups are stepped meanwhile
                wait_s = max(0.0, wait_s - (layout.groups - 1) * self._alone_s) / layout.groups
            self._idle_s += wait_s

    def _steps_per_s(self, learner_load: float) -> float:
        """Steps of all env processes, while the learner takes ``learner_load`` of a core."""
        layout = self._layout
        with_learner = max(self._cores - learner_load, self._cores / (layout.processes + 1))
        first = machine_repair(layout.processes, self._cpu_s, self._idle_s, with_learner)
        others = machine_repair(layout.processes, self._cpu_s, self._idle_s, self._cores)
        return first + (layout.nodes - 1) * others

    def _limits(self) -> dict[str, float]:
        """Frames per second that the learner and its network take in."""
        learner_s = self._message_s + self._learn_s
        kind = "messages" if self._message_s > self._learn_s else "learner"
        limits = {kind: 1 / learner_s if learner_s > 0 else math.inf}
        if self._layout.nodes > 1:
            away = (self._layout.nodes - 1) / self._layout.nodes
            limits["network"] = self._costs.bytes_per_s / (self._costs.frame_bytes * away)
        return limits

    def overlapped(self) -> Prediction:
        """The workers step while the learner works."""
        layout, learner_s = self._layout, self._message_s + self._learn_s
        rate, load = 0.0, 0.0
        for _ in range(50):  # the learner's load follows from the rate, and the rate from the load
            rate = layout.envs * self._steps_per_s(load)
            load += 0.5 * (min(1.0, rate * learner_s) - load)
        slow = 1.0
        if layout.wait_all:  # who may run ahead by k rollouts need not wait for each of the slowest
            count = layout.envs * layout.steps * (1 + layout.lag)
            slow = slowest(layout.stepping, self._costs.spread / math.sqrt(count))
        return self._result(rate / slow, slow)

    def in_rounds(self) -> Prediction:
        """All step, then the learner works, then all step again."""
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
        """What would help most if it were less."""
        if limit:
            return limit
        if busy > 0.5:
            return "messages" if self._message_s > self._learn_s else "learner"
        steps = rate / self._layout.envs / self._layout.nodes
        if steps * self._cpu_s + busy > 0.9 * self._cores:
            return "messages" if self._cpu_s > 2 * self._step_s else "cores"
        return "stragglers" if slow > 1.5 else "environment"


# ---- which layout, and whether to distribute at all


def time_to(frames: float, prediction: Prediction, layout: Layout, costs: Costs) -> float:
    """Seconds to that many frames, start included."""
    return frames / prediction.frames_per_s + (0.0 if layout.alone else costs.startup_s)


def rank(costs: Costs, layouts: Iterable[Layout], cores: int) -> list[tuple[Layout, Prediction]]:
    """Fastest first; of layouts within 1 % of one another the one with fewer processes."""
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
    """What to do.

    Attributes:
        word: "do not distribute", "do not distribute across nodes" or "distribute".
        layout, prediction: what to start.
        reason: a sentence.
    """

    word: str
    layout: Layout
    prediction: Prediction
    reason: str


def decide(ranked: Sequence[tuple[Layout, Prediction]]) -> Verdict:
    """The smallest kind of job that is not beaten by ``MIN_GAIN`` by a larger one."""

    def best(kept: Iterable[tuple[Layout, Prediction]]) -> tuple[Layout, Prediction] | None:
        return max(kept, key=lambda each: each[1].frames_per_s, default=None)

    alone = best(each for each in ranked if each[0].alone)
    node = best(each for each in ranked if not each[0].alone and each[0].nodes == 1)
    nodes = best(each for each in ranked if each[0].nodes > 1)
    if alone is None:
        raise ConfigurationError("expected a layout of one process among those to compare")
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
