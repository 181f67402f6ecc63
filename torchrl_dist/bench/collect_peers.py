"""The collectors that are compared. All of them step the same environments with the same policy."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from torchrl_dist.bench.collect_cells import (
    Greedy,
    make_env,
    make_policy,
    set_step_s,
    single_env,
    steps_so_far,
    vector_env,
)
from torchrl_dist.bench.collect_plan import AUTO, Cell, Result
from torchrl_dist.bench.processes import ForkedWorker

_GIB = 1 << 30
_MANY = 10**12  # used instead of -1 (no limit), because some collectors read -1 as 0 frames


@dataclass
class Peer:
    """A way to collect. The modules in ``requires`` must be installed."""

    name: str
    requires: tuple[str, ...] = field(default=(), kw_only=True)
    sends_single_steps: ClassVar[bool] = False
    """Whether each message has one step, regardless of the requested length."""

    def missing(self) -> str | None:
        """Return why this peer cannot be measured here, or None."""
        absent = (name for name in self.requires if importlib.util.find_spec(name) is None)
        return next((f"{name} is not installed" for name in absent), None)

    def refuses(self, cell: Cell) -> str | None:
        """Return why this peer cannot measure this cell, or None."""
        return None

    def open(self, cell: Cell, folder: str) -> contextlib.AbstractContextManager[Iterator[Any]]:
        """Start the workers. The iterator blocks for the next batch and never ends."""
        raise NotImplementedError


# ---- the floor


class Floor(Peer):
    """Every worker steps its envs with the policy and does nothing else: no data, no messages."""

    @contextlib.contextmanager
    def open(self, cell: Cell, folder: str) -> Iterator[Iterator[Any]]:
        workers = [ForkedWorker(contextlib.ExitStack()) for _ in range(cell.workers)]
        loops = [worker.submit(bare_loop, cell, folder) for worker in workers]

        def wait() -> Iterator[None]:
            while True:
                time.sleep(0.02)
                yield

        yield wait()
        Path(folder, "stop").touch()
        for loop in loops:
            loop.result(30)
        for worker in workers:
            worker.close()


def bare_loop(_: Any, cell: Cell, folder: str) -> None:
    """Observe, call the policy and step, without keeping data, until a file ``stop`` exists."""
    torch.set_num_threads(1)
    env = make_env(cell, folder)()
    torch.manual_seed(0)
    policy = Greedy(cell.env)
    stop = Path(folder, "stop")
    vectorized = hasattr(env, "num_envs")
    envs = [env] if vectorized else [env, *(make_env(cell, folder)() for _ in range(cell.envs - 1))]
    seen = [each.reset()[0] for each in envs]
    step, done = 0, False
    until = 0.0
    with torch.no_grad():
        while not done:
            if vectorized:
                seen[0] = env.step(policy(torch.from_numpy(seen[0])).numpy())[0]
            else:
                tensors = [torch.as_tensor(each) for each in seen]
                stacked = tensors[0][None] if len(tensors) == 1 else torch.stack(tensors)
                actions = policy(stacked)
                actions = actions.numpy() if policy.continuous else actions.tolist()
                for i, each in enumerate(envs):
                    seen[i], _, ended, cut, _ = each.step(actions[i])
                    if ended or cut:
                        seen[i] = each.reset()[0]
            step += 1
            now = time.monotonic()
            if now > until:
                until = now + 0.2
                done = stop.exists()


# ---- ours


@dataclass
class Ours(Peer):
    """``RPCBatchedCollector``. No worker waits for another.

    Attributes:
        node: whether all processes belong to a single worker, which sends one message for all of
            them. Otherwise each process is a worker.
        groups: number of groups of envs in each process. The policy runs at the learner, and a
            process steps one group while the other groups wait for their actions. If 0, each
            process runs the policy itself.
    """

    node: bool = False
    groups: int = 0

    def refuses(self, cell: Cell) -> str | None:
        alike = not self.groups or cell.env == "sleep"
        return None if alike else "it is only measured with --env sleep"

    @contextlib.contextmanager
    def open(self, cell: Cell, folder: str) -> Iterator[Iterator[Any]]:
        from torchrl_dist.collect import FirstReady, RPCBatchedCollector
        from torchrl_dist.runtime import local_cluster

        workers, processes = (1, cell.workers) if self.node else (cell.workers, 0)
        envs = cell.envs * max(1, self.groups)
        options: dict[str, Any] = {"num_envs": envs, "env_processes": processes}
        if self.groups:
            options |= {"inference": "learner", "env_groups": self.groups}
        if cell.steps != AUTO:
            options["frames_per_batch"] = cell.steps * envs * max(1, processes)
        with (
            local_cluster({"learner": 1, "collector": workers}) as session,
            RPCBatchedCollector(
                make_env(cell, folder),
                make_policy(cell.env),
                session=session,
                readiness=FirstReady(),
                max_policy_lag=1,
                categorical_action_encoding=True,
                timeout_s=cell.timeout_s,
                **options,
            ) as collector,
        ):
            yield iter(collector)


# ---- TorchRL


def torchrl_env(cell: Cell, folder: str) -> Any:
    """Return one worker's envs for TorchRL's collectors, which accept gymnasium's vector envs."""
    from torchrl.envs import GymWrapper

    if cell.envs == 1:
        env = single_env(cell.env, folder)
    else:
        env = vector_env(cell.env, folder, cell.envs)
    return GymWrapper(env, categorical_action_encoding=True)


@dataclass
class TorchRL(Peer):
    """One of TorchRL's collectors. If it is asynchronous, a batch is one worker's message."""

    class_name: str
    options: Callable[[Cell, str], dict[str, Any]]

    @contextlib.contextmanager
    def open(self, cell: Cell, folder: str) -> Iterator[Iterator[Any]]:
        from torchrl import collectors
        from torchrl.collectors import distributed

        # Use the spawn start method, as a separate program would, because DistributedCollector's
        # processes hang if they are forked.
        torch.multiprocessing.set_start_method("spawn", force=True)
        name, options = self.class_name, self.options(cell, folder)
        made = getattr(collectors, name, None) or getattr(distributed, name)
        envs = [functools.partial(torchrl_env, cell, folder)] * cell.workers
        yield iter(made(envs, make_policy(cell.env), total_frames=_MANY, **options))
        # The collector is not shut down, because some collectors would hang. The process group is
        # killed instead.


def _asynchronous(cell: Cell, **options: Any) -> dict[str, Any]:
    return {"frames_per_batch": cell.steps * cell.envs, "sync": False, **options}


def _by_port(cell: Cell, folder: str) -> dict[str, Any]:
    return _asynchronous(cell, launcher="mp", tcp_port=_free_port())


def _by_gloo(cell: Cell, folder: str) -> dict[str, Any]:
    return _by_port(cell, folder) | {"backend": "gloo"}


def _in_lockstep(cell: Cell, folder: str) -> dict[str, Any]:
    """Return the options of a collector that, by design, waits for a message from every worker for
    each batch."""
    return {"frames_per_batch": cell.steps * cell.envs * cell.workers}


def _by_ray(cell: Cell, folder: str) -> dict[str, Any]:
    from torchrl.collectors.distributed.ray import DEFAULT_RAY_INIT_CONFIG

    return _asynchronous(
        cell,
        ray_init_config=DEFAULT_RAY_INIT_CONFIG | _ray_options(folder),
        # Request nothing, because most actors would wait indefinitely if all actors together
        # requested more cores than exist.
        remote_configs={"num_cpus": 0, "num_gpus": 0, "memory": 0},
        num_collectors=cell.workers,
    )


def _ray_options(folder: str) -> dict[str, Any]:
    return {
        "include_dashboard": False,
        "object_store_memory": _GIB,
        "_temp_dir": folder,
        "log_to_driver": False,
    }


# ---- vector environments


@dataclass
class Vector(Peer):
    """Envs that step in lockstep in other processes, with the policy in this process.

    Attributes:
        make: makes the vector env, and returns it with a function that closes it.
        resets: whether the vector env itself resets its envs.
    """

    make: Callable[[list[Callable[[], Any]], str], tuple[Any, Callable[[], Any]]]
    resets: bool = False
    sends_single_steps = True

    def refuses(self, cell: Cell) -> str | None:
        processes = cell.workers * cell.envs
        return None if processes <= 64 else f"it would need {processes} processes"

    @contextlib.contextmanager
    def open(self, cell: Cell, folder: str) -> Iterator[Iterator[Any]]:
        single = functools.partial(single_env, cell.env, folder)
        envs, close = self.make([single] * (cell.workers * cell.envs), folder)
        torch.manual_seed(0)
        policy = Greedy(cell.env)

        def batches() -> Iterator[None]:
            seen, _ = envs.reset()
            with torch.no_grad():
                while True:
                    for _ in range(cell.steps):
                        actions = policy(torch.from_numpy(seen)).numpy()
                        seen, _, ended, cut, _ = envs.step(actions)
                        if not self.resets and len(done := np.flatnonzero(ended | cut)):
                            seen[done] = envs.reset(done)[0]  # like tianshou's collector
                    yield

        yield batches()
        close()


def _gymnasium(envs: list[Callable[[], Any]], folder: str) -> tuple[Any, Callable[[], Any]]:
    from gymnasium.vector import AsyncVectorEnv

    made = AsyncVectorEnv(envs)
    return made, functools.partial(made.close, terminate=True)


def _tianshou(envs: list[Callable[[], Any]], folder: str) -> tuple[Any, Callable[[], Any]]:
    from tianshou.env import SubprocVectorEnv

    made = SubprocVectorEnv(envs)
    return made, made.close


def _tianshou_by_ray(envs: list[Callable[[], Any]], folder: str) -> tuple[Any, Callable[[], Any]]:
    from tianshou.env import RayVectorEnv

    importlib.import_module("ray").init(**_ray_options(folder))
    made = RayVectorEnv(envs)  # one actor per env
    return made, made.close


def _free_port() -> str:
    """Return a free port. Another process is unlikely to take the port before TorchRL's collectors
    use it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


_ALL: tuple[Peer, ...] = (
    Floor("floor"),
    Ours("ours"),
    Ours("ours-node", node=True),
    Ours("ours-inference-1", node=True, groups=1),
    Ours("ours-inference-2", node=True, groups=2),
    TorchRL("torchrl-rpc", "RPCCollector", _by_port),
    TorchRL("torchrl-distributed", "DistributedCollector", _by_gloo),
    TorchRL("torchrl-multisync", "MultiSyncCollector", _in_lockstep),
    TorchRL("torchrl-ray", "RayCollector", _by_ray, requires=("ray",)),
    Vector("gymnasium-async", _gymnasium, resets=True),
    Vector("tianshou-subproc", _tianshou, requires=("tianshou",)),
    Vector("tianshou-ray", _tianshou_by_ray, requires=("tianshou", "ray")),
)
PEERS = {peer.name: peer for peer in _ALL}


# ---- the clock


def measure(start: Sequence[Cell], folder: str) -> list[Result]:
    """Run one peer in this process. Blocks.

    The cells of ``start`` differ only in ``step_s``. They are measured one after the other, each
    for its ``seconds``. Each measurement begins after the time that two messages take with the
    cell's ``step_s``.
    """
    torch.set_num_threads(1)
    set_step_s(folder, start[0].step_s)
    begun = time.perf_counter()
    with contextlib.ExitStack() as stack:
        batches = stack.enter_context(PEERS[start[0].peer].open(start[0], folder))
        next(batches)
        startup_s = time.perf_counter() - begun
        results = []
        for cell in start:
            set_step_s(folder, cell.step_s)
            _take(batches, 2 * cell.steps * cell.envs * cell.step_s)
            steps, cpu = steps_so_far(folder), time.process_time()
            elapsed = _take(batches, cell.seconds)
            made = steps_so_far(folder) - steps
            results.append(Result(made / elapsed, startup_s, (time.process_time() - cpu) / elapsed))
        return results


def _take(batches: Iterator[Any], seconds: float) -> float:
    """Take batches until ``seconds`` have passed, but at least one. Return the seconds that
    passed."""
    begun = time.perf_counter()
    while True:
        next(batches)
        if (elapsed := time.perf_counter() - begun) >= seconds:
            return elapsed
