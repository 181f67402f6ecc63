"""Chooses how many processes ``train`` starts if the user gives no number.

A child process steps the environment and takes gradient steps for about a second. The costs of
messages are not measured. ``_MESSAGES`` has typical values of these costs, which ``torchrl-dist
plan`` measured. From all these costs, the planner's model predicts the speed for each number of
processes.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from multiprocessing.connection import wait
from statistics import median
from typing import Any

from torchrl_dist.errors import ConfigurationError, PeerLostError, TorchRLDistError
from torchrl_dist.planner import MIN_GAIN, Costs, Layout, predict
from torchrl_dist.recipes.training.config import RecipeConfig
from torchrl_dist.runtime import ForkServer
from torchrl_dist.runtime.surroundings import Surroundings

from .command import NEARLY, shown_time, updates_of

# Seconds for each of three measurements: steps of training, steps of evaluations, updates.
_MEASURE_S = 0.3
_SLOW_S = 1e-3
# Number of rows in a measured update with images, because an update with all rows would take a
# second.
_FEW_ROWS = 16
_WAIT_S = 15.0  # for the child's answer, because some environments take seconds for a reset
_PER_CORE = 4  # more processes per core are not considered, even if they mostly sleep
# CPU time of a rollout loop per step, in addition to the CPU time of greedy actions and of the
# environment: random actions, their log-probabilities, and the record.
_LOOP_S = 200e-6
# CPU time to begin and to finish a rollout in the learner's process. In other processes, this is
# part of the cost of a message.
_ROLLOUT_S = 1.2e-3
# Seconds to average gradients after each update, if there are several learners.
_AVERAGE_S = 2e-3
_PLAYED = 0.5  # assumed length of an episode in an evaluation, divided by the maximum length
# CPU time of a recipe's update, divided by the CPU time of a gradient step of the policy's network
# on the same number of rows. `torchrl-dist bench learner` measured the updates. For impala, a call
# of the learner's `learn`, which also scales the rewards, was measured. `measure` measured the
# gradient steps.
_UPDATE = {"apex": 2.0, "ddppo": 3.3, "impala": 7.5, "sac": 4.5}
# Medians of the costs that `torchrl-dist plan` measured on CPUs of 2026, with messages of a few
# hundred small rows.
_MESSAGES: dict[str, Any] = {
    "spread": 0.3,
    "frame_bytes": 100.0,
    "message_worker_s": 2e-3,
    "message_learner_s": 1e-3,
    "byte_worker_s": 1e-9,
    "byte_learner_s": 1e-9,
    "process_s": 0.0,
    "latency_s": 1e-3,
    "broadcast_s": 5e-4,
    "request_s": 0.0,
    "request_latency_s": 0.0,
    "startup_s": 2.0,
    "bytes_per_s": math.inf,
}


@dataclass(frozen=True)
class Measured:
    """Times of one process, without its waits for a core.

    Attributes:
        step_cpu_s, step_idle_s: CPU and idle time of a step of ``envs_per_collector`` environments.
        evaluate_cpu_s: CPU time of a step of ``eval_episodes`` environments.
        update_s: CPU time of one update of the learner.
        episode_steps: length of the longest episode.
    """

    step_cpu_s: float
    step_idle_s: float
    evaluate_cpu_s: float
    update_s: float
    episode_steps: int


def choose(config: Any, server: ForkServer) -> tuple[dict[str, int], str]:
    """Return the option that sets the number of processes, with its value, and the reason.

    Args:
        config: the recipe's configuration. Its number of processes does not matter.
        server: the server that starts the measuring process.

    Returns:
        ``{}`` instead of the option if this recipe or environment could not be measured. The number
        in ``config`` is then used.
    """
    name = "learners" if config.recipe == "ddppo" else "collectors"
    if config.recipe not in _UPDATE:
        return (
            {},
            f"{getattr(config, name)} {name}, because train does not know how long an update of "
            f"{config.recipe} takes",
        )
    try:
        measured = _in_a_child(config, server)
    except TorchRLDistError as error:
        return {}, f"{getattr(config, name)} {name}, because the measurement failed: {error}"
    rates = speeds(config, measured, len(os.sched_getaffinity(0)))
    return {name: (number := thriftiest(rates))}, _reason(name, number, rates, config, measured)


def speeds(config: Any, measured: Measured, cores: int) -> dict[int, float]:
    """Return the predicted frames/s for each value of ``collectors``, or of ddppo's ``learners``.

    The smallest value stands for a single process. The predictions include evaluations. A single
    process plays the evaluations itself. In a job of several processes, one process plays the
    evaluations, and thereby takes time from the cores that all processes share.
    """
    envs = config.envs_per_collector
    alone_s = measured.step_cpu_s + _ROLLOUT_S * envs / config.frames_per_batch
    costs = Costs(
        step_cpu_s=((envs, alone_s),),
        idle_s=measured.step_idle_s / envs,
        update_s=measured.update_s,
        updates_per_frame=updates_of(_alone(config))[0] / config.frames_per_batch,
        **_MESSAGES,
    )
    evaluation = _PLAYED * min(measured.episode_steps, config.eval_max_steps)
    evaluate_s = measured.evaluate_cpu_s * evaluation / config.eval_interval_frames
    alone = predict(costs, Layout(envs=envs), cores).frames_per_s
    first = int(config.recipe == "ddppo")
    rates = {first: 1 / (1 / alone + evaluate_s)}
    costs = replace(costs, step_cpu_s=((envs, measured.step_cpu_s),))
    if config.recipe == "ddppo":
        costs = replace(costs, update_s=costs.update_s + _AVERAGE_S)
    most = cores / (measured.step_cpu_s / envs + costs.learn_s + evaluate_s)
    for number in _numbers(config, first, cores):
        batch = config.frames_per_batch // (1 if config.recipe == "impala" else number)
        layout = Layout(
            processes=number,
            envs=envs,
            steps=max(1, batch // envs),
            lag=config.max_policy_lag,
            wait_all=config.recipe == "ddppo",
        )
        rates[number] = min(most, predict(costs, layout, cores).frames_per_s)
    return rates


def _alone(config: Any) -> Any:
    """Return ``config`` for one learner, which learns from all rows of an update."""
    return replace(config, learners=1) if config.recipe == "ddppo" else config


def _numbers(config: Any, first: int, cores: int) -> Iterator[int]:
    """Yield the numbers of processes that ``config`` permits."""
    name = "learners" if first else "collectors"
    for power in range((_PER_CORE * cores).bit_length()):
        with contextlib.suppress(ConfigurationError):
            if (number := 2**power) > first:
                replace(config, **{name: number}).roles(None)
                yield number


def thriftiest(rates: dict[int, float]) -> int:
    """Return the smallest number of processes whose speed is nearly the highest. This is a single
    process, unless several are at least ``MIN_GAIN`` times as fast."""
    best = max(rates.values())
    alone = min(rates)
    if best < MIN_GAIN * rates[alone]:
        return alone
    enough = max(NEARLY * best, MIN_GAIN * rates[alone])
    return min(number for number, rate in rates.items() if rate >= enough)


def _reason(
    name: str, number: int, rates: dict[int, float], config: Any, measured: Measured
) -> str:
    alone = min(rates)
    gain = max(rate for other, rate in rates.items() if other != alone) / rates[alone]
    learn_s = measured.update_s * updates_of(config)[0] / config.frames_per_batch
    collect_s = (measured.step_cpu_s + measured.step_idle_s) / config.envs_per_collector
    collect_s += _ROLLOUT_S / config.frames_per_batch
    frame = (
        f"a frame takes {shown_time(collect_s)} to collect and {shown_time(learn_s)} to learn from"
    )
    if number == alone:
        return f"one process, because {frame}: several would be {gain:.2f} times as fast"
    gain = rates[number] / rates[alone]
    what = name if number > 1 else name[:-1]
    return f"{number} {what}, because {frame}: {gain:.2f} times as fast as one process"


# ---- measuring


def _in_a_child(config: Any, server: ForkServer) -> Measured:
    """Measure in a child process, because the environment may hang, crash or change the process in
    which it runs."""
    ours, theirs = os.pipe()
    try:
        try:
            children = server.start(
                _Job(config, Surroundings.of_this_process(1)), range(1), [theirs]
            )
        finally:
            os.close(theirs)
        try:
            ready = wait([ours], _WAIT_S)
            text = os.read(ours, 4096) if ready else b""
            if not ready:
                raise PeerLostError(
                    f"the process that measures the environment did not answer within {_WAIT_S:g} s"
                )
            if not text:
                children.wait_gone(1.0)
                state = children.states[0]
                raise PeerLostError(state.failure[0] if state.failure else f"{state.exit}")
        finally:
            server.kill_children()
    finally:
        os.close(ours)
    return Measured(**json.loads(text))


@dataclass(frozen=True)
class _Job:
    """The work of the child process, which receives this object as a pickle."""

    config: RecipeConfig
    surroundings: Surroundings

    def run(self, rank: int, ready: Any, end: int) -> None:
        self.surroundings.adopt()
        ready()
        os.write(end, json.dumps(measure(self.config).__dict__).encode())


def measure(config: Any) -> Measured:
    """Measure ``config``'s environment and network in this process, in about a second."""
    import torch

    from torchrl_dist.recipes.parts.environments import look_at, make_env
    from torchrl_dist.recipes.parts.networks import PolicySpec

    from .measure import repeat

    torch.set_num_threads(1)
    task = look_at(config.env, continuous=config.continuous)
    spec = PolicySpec.of(task, config.policy_kind, config.hidden, config.network)
    network = spec.network()
    cpu_s, idle_s = _step(network, config.env, config.envs_per_collector)
    evaluate_s, _ = _step(network, config.env, config.eval_episodes)
    with contextlib.closing(make_env(config.env)) as env:
        longest = env.spec.max_episode_steps if env.spec is not None else None
    wanted = updates_of(_alone(config))[1]
    rows = wanted if task.images is None else min(wanted, _FEW_ROWS)
    shape = (task.observation_size,) if task.images is None else task.images.shape
    dtype = torch.float32 if task.images is None else torch.uint8
    batch = torch.zeros(rows, *shape, dtype=dtype)
    optimizer = torch.optim.Adam(network.parameters(), fused=True)

    def update() -> None:
        optimizer.zero_grad()
        outputs = network(batch)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        torch.stack([each.square().mean() for each in outputs]).sum().backward()
        optimizer.step()

    update_s = median(cpu for cpu, _ in repeat(update, _MEASURE_S))
    return Measured(
        step_cpu_s=cpu_s + _LOOP_S,
        step_idle_s=idle_s,
        evaluate_cpu_s=evaluate_s,
        update_s=_UPDATE[config.recipe] * update_s * wanted / rows,
        episode_steps=longest or config.eval_max_steps,
    )


def _step(network: Any, env: str, envs: int) -> tuple[float, float]:
    """Return CPU and idle time of a step of ``envs`` environments with ``network``."""
    one = _timed(network, env, 1, 0.0)
    if sum(one) > _SLOW_S:  # many such environments would take too long
        cpu_s, idle_s = _timed(network, env, 1, _MEASURE_S)
        return envs * cpu_s, envs * idle_s
    return _timed(network, env, envs, _MEASURE_S)


def _timed(network: Any, env: str, envs: int, seconds: float) -> tuple[float, float]:
    from torchrl_dist.recipes.parts.evaluate import GreedyEpisodes

    from .measure import Clock, often

    episodes = GreedyEpisodes(network.player(), env, episodes=envs, seed=0)
    with contextlib.closing(episodes) as playing:
        playing.step()
        clock, steps = Clock(), often(playing.step, seconds)
        cpu_s, passed_s = clock.read()
    return cpu_s / steps, (passed_s - cpu_s) / steps
