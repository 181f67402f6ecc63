"""Benchmarks that answer further questions about our collector.

- ``ingest``: how many rows per second can one learner receive? Workers only send prepared
  rollouts, with rows of CartPole's size or with observations of 84 x 84 x 4 bytes.
- ``deadlines``: does it pay to leave out late workers? Each receive takes one batch, from the
  workers that have delivered by a deadline (``Quorum``). For several deadlines, the benchmark
  measures the number of workers per receive, and the time for a fixed number of frames. Step times
  are normal or lognormal, or one step in ten takes ten times as long as the others. The policy's
  network is small or large (layers of 64 or 512 units).
- ``weights``: how soon do all processes use a new policy, and how many bytes are sent?
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule

from torchrl_dist.bench.collect_cells import SleepEnv, make_policy
from torchrl_dist.bench.collect_plan import Cell
from torchrl_dist.bench.results import medians
from torchrl_dist.collect import FirstReady, Quorum, RPCBatchedCollector, WaitAll
from torchrl_dist.plan.measure import Blank, Heavy
from torchrl_dist.runtime import ForkServer, local_cluster

_STAND_IN_S = 37e-6  # duration of a step of HalfCheetah
_NETWORKS = {"small": 64, "large": 512}
_MEGABYTES = 50
_ROWS = {
    "cartpole-rows": ((4,), torch.float32, (64, 1024)),
    "84x84x4-rows": ((84, 84, 4), torch.uint8, (8, 64)),
}


@dataclass(frozen=True)
class Question(Cell):
    """One cell. Fields that a question does not use keep their defaults.

    Attributes:
        deadline_s: deadline for receiving a batch. If it is infinite, the learner waits for all
            workers.
        durations: distribution of the step times.
    """

    question: str = "deadlines"
    deadline_s: float = math.inf
    durations: str = "normal"
    network: str = "small"


def plan(options: argparse.Namespace) -> list[Question]:
    """Return the jobs to measure for ``options.question``."""
    size = (2, 1, 0.0, 1)
    base = Question("ours", "", *size, options.seconds, options.timeout_s, options.question)
    if options.question == "ingest":
        workers = options.workers or [2]
        return [
            replace(base, env=env, workers=n, steps=steps)
            for n, (env, (_, _, sizes)) in itertools.product(workers, _ROWS.items())
            for steps in sizes
        ]
    if options.question == "weights":
        workers = options.workers or [8]
        return [
            replace(base, env="sleep", peer=peer, workers=n, step_s=0.001, steps=8)
            for n, peer in itertools.product(workers, ("ours", "ours-node"))
        ]
    return [
        replace(base, env=options.env, workers=n, envs=envs, steps=options.steps_per_message[0],
                step_s=0.0 if options.env == "halfcheetah" else _STAND_IN_S,
                deadline_s=deadline_s, durations=law, network=network)
        for n, envs, law, network, deadline_s in itertools.product(
            options.workers or [8], options.envs, options.durations, options.networks,
            options.deadlines)
        # HalfCheetah has step times of its own, so it is measured only once for all distributions
        if options.env != "halfcheetah" or law == options.durations[0]
    ]  # fmt: skip


def measure(cell: Question, server: ForkServer | None = None) -> dict[str, Any]:
    """Measure one cell. Blocks. ``server`` starts the workers. If ``server`` is None, a new fork
    server starts them."""
    answers = {"ingest": _ingest, "deadlines": _deadlines, "weights": _weights}
    return answers[cell.question](cell, server)


def measure_alone(cell: Question, folder: str) -> dict[str, Any]:
    """Set this process to one torch thread, and call ``measure``. Use a separate process."""
    torch.set_num_threads(1)
    return measure(cell)


def to_cell(cell: Question, rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Return one JSON object with medians over rounds."""
    fields = asdict(cell)
    fields["steps_per_message"] = fields.pop("steps")
    if cell.deadline_s == math.inf:
        fields["deadline_s"] = None
    nothing = {"ideal_sps": None, "floor_sps": None, "efficiency": None}
    return {**fields, **nothing, **medians(rounds), "rounds": len(rounds)}


@contextlib.contextmanager
def _collector(
    cell: Question,
    server: ForkServer | None,
    ranks: int,
    make_env: Any,
    policy: Any,
    **options: Any,
) -> Iterator[tuple[RPCBatchedCollector, dict[str, float]]]:
    """Yield a collector that has delivered its first batch, and the seconds that this took."""
    begun = time.perf_counter()
    with (
        local_cluster({"learner": 1, "collector": ranks}, fork_server=server) as session,
        RPCBatchedCollector(
            make_env, policy, session=session, timeout_s=cell.timeout_s,
            categorical_action_encoding=True, **options,
        ) as collector,
    ):  # fmt: skip
        collector.next()
        yield collector, {"startup_s": time.perf_counter() - begun}


# ---- ingest


def _ingest(cell: Question, server: ForkServer | None) -> dict[str, Any]:
    make_env = functools.partial(
        Blank, gymnasium.spaces.Box(-1, 1, (1,)), gymnasium.spaces.Discrete(2)
    )
    with _collector(
        cell, server, cell.workers, make_env, None, frames_per_batch=1, readiness=FirstReady(),
        max_policy_lag=1, postproc_factory=functools.partial(_Prepared, cell.env, cell.steps),
    ) as (collector, startup):  # fmt: skip
        rows = messages = 0
        start, cpu = time.perf_counter(), time.process_time()
        while time.perf_counter() - start < cell.seconds:
            batch = collector.next()
            rows += batch.numel()
            messages += 1
        elapsed, cpu = time.perf_counter() - start, time.process_time() - cpu
        size = sum(value.nbytes for value in batch.values(True, True))
    return {
        "sps": rows / elapsed,
        "message_bytes": size,
        "bytes_per_s": size * messages / elapsed,
        "learner_cpu_us_per_message": 1e6 * cpu / messages,
        **startup,
    }


class _Prepared:
    """A postproc that sends the same rows ``[1, steps]`` each time."""

    def __init__(self, kind: str, steps: int, policy: Any) -> None:
        shape, dtype, _ = _ROWS[kind]
        flag = torch.zeros(1, steps, 1, dtype=torch.bool)
        seen = torch.zeros(1, steps, *shape, dtype=dtype)
        before, after = (
            {"observation": seen.clone()}
            | {name: flag.clone() for name in ("done", "terminated", "truncated")}
            for _ in range(2)
        )
        before["action"] = torch.zeros(1, steps, dtype=torch.int64)
        after["reward"] = torch.zeros(1, steps, 1)
        self._rows = TensorDict({**before, "next": after}, batch_size=[1, steps])

    def __call__(self, rollout: TensorDictBase) -> TensorDictBase:
        return self._rows


# ---- deadlines


def _deadlines(cell: Question, server: ForkServer | None) -> dict[str, Any]:
    patient = cell.deadline_s == math.inf
    make_env: Callable[[], Any] = functools.partial(
        _Drawn, cell.envs, cell.step_s, cell.durations, cell.env == "sleep"
    )
    if cell.env == "halfcheetah":
        make_env = functools.partial(gymnasium.make, "HalfCheetah-v5")
    with _collector(
        cell, server, cell.workers, make_env, make_policy(cell.env, _NETWORKS[cell.network]),
        readiness=WaitAll() if patient else Quorum(min_workers=1, timeout_s=cell.deadline_s),
        frames_per_batch=cell.workers * cell.envs * cell.steps, num_envs=cell.envs,
    ) as (collector, startup):  # fmt: skip
        frames, receives, workers = 0, 0, 0
        start = time.perf_counter()
        while time.perf_counter() - start < cell.seconds:
            collector.next()
            frames += collector.report.frames
            workers += len(collector.report.frames_by_worker)
            receives += 1
        elapsed = time.perf_counter() - start
        shares = list(collector.report.shares.values())
    return {
        "sps": frames / elapsed,
        "workers_per_receive": workers / receives,
        "seconds_per_100k_frames": 1e5 * elapsed / frames,
        "largest_share": max(shares),
        "smallest_share": min(shares),
        **startup,
    }


def draw_durations(rng: np.random.Generator, law: str, mean_s: float, count: int) -> np.ndarray:
    """Draw the durations of ``count`` steps with mean ``mean_s``, as float64 ``[count]``.

    The distribution is normal (standard deviation: a tenth of the mean) or lognormal (sigma 1), or
    one step in ten takes ten times as long as the others.
    """
    if law == "normal":
        return mean_s * np.clip(rng.normal(1.0, 0.1, count), 0.0, None)
    if law == "lognormal":
        return mean_s * rng.lognormal(-0.5, 1.0, count)
    return mean_s / 1.9 * np.where(rng.random(count) < 0.1, 10.0, 1.0)


class _Drawn(gymnasium.vector.VectorEnv):
    """A vector env whose envs step one after the other. Each step sleeps or computes for a random
    time."""

    def __init__(self, envs: int, step_s: float, law: str, asleep: bool) -> None:
        self.num_envs = envs
        self.single_observation_space = gymnasium.spaces.Box(-1, 1, (4,), np.float32)
        self.single_action_space = gymnasium.spaces.Discrete(2)
        self.observation_space = gymnasium.vector.utils.batch_space(
            self.single_observation_space, envs
        )
        self.action_space = gymnasium.vector.utils.batch_space(self.single_action_space, envs)
        self.metadata = {"autoreset_mode": gymnasium.vector.AutoresetMode.SAME_STEP}
        self._seen, self._no = np.zeros((envs, 4), np.float32), np.zeros(envs, bool)
        self._law, self._step_s, self._asleep = law, step_s, asleep
        self._rng = np.random.default_rng()

    def reset(self, **_: Any) -> tuple[np.ndarray, dict[str, Any]]:
        return self._seen, {}

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        total_s = float(draw_durations(self._rng, self._law, self._step_s, self.num_envs).sum())
        if self._asleep:
            time.sleep(total_s)
        else:  # measure CPU time, because a process that waits for a core does not compute
            until = time.thread_time() + total_s
            while time.thread_time() < until:
                pass
        return self._seen, np.ones(self.num_envs), self._no, self._no, {}


# ---- weights


def _weights(cell: Question, server: ForkServer | None) -> dict[str, Any]:
    heavy = Heavy(_MEGABYTES << 18)  # weights of 4 bytes
    policy = TensorDictModule(heavy, in_keys=["observation"], out_keys=["action"])
    ranks, processes = (1, cell.workers) if cell.peer == "ours-node" else (cell.workers, 0)
    with _collector(
        cell, server, ranks, functools.partial(SleepEnv, cell.step_s), policy,
        frames_per_batch=cell.workers * cell.steps, env_processes=processes,
    ) as (collector, startup):  # fmt: skip
        plain: list[float] = []
        updated: list[float] = []
        packing: list[float] = []
        sent: list[int] = []
        start = time.perf_counter()
        while time.perf_counter() - start < cell.seconds or len(updated) < 2:
            before = _written_bytes()
            plain.append(_time(collector.next))
            other = _written_bytes() - before
            packing.append(_time(collector.update_policy_weights_))
            updated.append(_time(collector.next))
            sent.append(_written_bytes() - before - 2 * other)
            if collector.report.policy_lag:
                raise AssertionError(
                    "a batch has a policy lag above 0, expected 0 in every batch of this bench"
                )
        source = torch.zeros(_MEGABYTES << 20, dtype=torch.uint8)
        place = torch.empty_like(source)
        copy_s = min(_time(functools.partial(place.copy_, source)) for _ in range(5))
    return {
        "sps": cell.workers * cell.steps * len(plain) / sum(plain),
        "policy_bytes": source.nbytes,
        "sent_bytes_per_update": statistics.median(sent),
        "pack_s": statistics.median(packing),
        "delay_s": statistics.median(updated) - statistics.median(plain),
        "copy_s": copy_s,
        **startup,
    }


def _written_bytes() -> int:
    """Return the bytes that this process has written so far, including those to sockets."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("wchar")))


def _time(call: Callable[[], Any]) -> float:
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun
