"""The collectors that are compared. Each steps the same environments with one policy."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import socket
import time
from collections.abc import Callable, Iterator, Sequence
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
_MANY = 10**12  # stands for endless frames, because some collectors take -1 as no frames


class Peer:
    """A way to collect. Peers are used through their class and never instantiated."""

    name: ClassVar[str]
    sends_single_steps: ClassVar[bool] = False  # no matter which length of a message is requested

    @classmethod
    def missing(cls) -> str | None:
        """Return why this peer cannot be measured here, or None."""
        return None

    @classmethod
    def refuses(cls, cell: Cell) -> str | None:
        """Return why this peer cannot measure this cell, or None."""
        return None

    @classmethod
    def open(cls, cell: Cell, folder: str) -> contextlib.AbstractContextManager[Iterator[Any]]:
        """Start the workers. The iterator blocks for the next batch and never ends."""
        raise NotImplementedError


# ---- the floor


class Floor(Peer):
    """Every worker steps its envs with the policy and does nothing else: no data, no messages."""

    name = "floor"

    @classmethod
    @contextlib.contextmanager
    def open(cls, cell: Cell, folder: str) -> Iterator[Iterator[Any]]:
        workers = [ForkedWorker(_Nothing()) for _ in range(cell.workers)]
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


class _Nothing:
    def close(self) -> None:
        pass


def bare_loop(_: Any, cell: Cell, folder: str) -> None:
    """Observe, call the policy and step, keeping nothing, until a file named ``stop`` exists."""
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
                stacked = torch.as_tensor(seen[0])[None] if len(seen) == 1 else _stack(seen)
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


def _stack(seen: list[Any]) -> torch.Tensor:
    return torch.stack([torch.as_tensor(observation) for observation in seen])


# ---- ours


class Ours(Peer):
    """``RPCBatchedCollector`` with one process per worker. No worker waits for another."""

    name = "ours"

    @classmethod
    def ranks(cls, cell: Cell) -> tuple[int, int]:
        """Return the number of workers of the session, and of the env processes of each worker."""
        return cell.workers, 0

    @classmethod
    def options(cls, cell: Cell) -> dict[str, Any]:
        """Return the arguments of the collector."""
        return {}

    @classmethod
    @contextlib.contextmanager
    def open(cls, cell: Cell, folder: str) -> Iterator[Iterator[Any]]:
        from torchrl_dist.collect import FirstReady, RPCBatchedCollector
        from torchrl_dist.runtime import local_cluster

        workers, processes = cls.ranks(cell)
        options = {"num_envs": cell.envs, "env_processes": processes, **cls.options(cell)}
        if cell.steps != AUTO:
            per_process = cell.steps * options["num_envs"]
            options["frames_per_batch"] = per_process * max(1, processes)
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


class OursOnOneNode(Ours):
    """Ours with a single worker, whose env processes collect, and send one message together."""

    name = "ours-node"

    @classmethod
    def ranks(cls, cell: Cell) -> tuple[int, int]:
        return 1, cell.workers


class OursWithLearnersPolicy(OursOnOneNode):
    """The policy is at the learner. An env process steps one group of envs and waits for
    actions."""

    name = "ours-inference-1"
    groups: ClassVar[int] = 1

    @classmethod
    def options(cls, cell: Cell) -> dict[str, Any]:
        return {
            "inference": "learner",
            "env_groups": cls.groups,
            "num_envs": cell.envs * cls.groups,
        }

    @classmethod
    def refuses(cls, cell: Cell) -> str | None:
        return None if cell.env == "sleep" else "it is only measured with --env sleep"


class OursWithTwoGroups(OursWithLearnersPolicy):
    """Two groups of envs per process: one steps while the other waits for its actions."""

    name = "ours-inference-2"
    groups: ClassVar[int] = 2


# ---- TorchRL


def torchrl_env(cell: Cell, folder: str) -> Any:
    """Return one worker's envs for TorchRL's collectors, which accept gymnasium's vector envs."""
    from torchrl.envs import GymWrapper

    if cell.envs == 1:
        env = single_env(cell.env, folder)
    else:
        env = vector_env(cell.env, folder, cell.envs, native=False)
    return GymWrapper(env, categorical_action_encoding=True)


class _TorchRLCollector(Peer):
    """One of TorchRL's collectors. If it is asynchronous, a batch is one worker's message."""

    class_name: ClassVar[str]

    @classmethod
    def build(cls, cell: Cell, envs: Sequence[Callable[[], Any]], **options: Any) -> Any:
        from torchrl import collectors
        from torchrl.collectors import distributed

        made = getattr(collectors, cls.class_name, None) or getattr(distributed, cls.class_name)
        return made(envs, make_policy(cell.env), total_frames=_MANY, **options)

    @classmethod
    def options(cls, cell: Cell, folder: str) -> dict[str, Any]:
        return {"frames_per_batch": cell.steps * cell.envs, "sync": False}

    @classmethod
    @contextlib.contextmanager
    def open(cls, cell: Cell, folder: str) -> Iterator[Iterator[Any]]:
        # Spawn, as a separate program would, because DistributedCollector's processes hang if
        # forked.
        torch.multiprocessing.set_start_method("spawn", force=True)
        envs = [functools.partial(torchrl_env, cell, folder)] * cell.workers
        collector = cls.build(cell, envs, **cls.options(cell, folder))
        yield iter(collector)
        # The collector is not shut down, because some collectors hang then. The process group is
        # killed instead.


class TorchRLRPC(_TorchRLCollector):
    name = "torchrl-rpc"
    class_name = "RPCCollector"

    @classmethod
    def options(cls, cell: Cell, folder: str) -> dict[str, Any]:
        return super().options(cell, folder) | {"launcher": "mp", "tcp_port": _free_port()}


class TorchRLDistributed(_TorchRLCollector):
    name = "torchrl-distributed"
    class_name = "DistributedCollector"

    @classmethod
    def options(cls, cell: Cell, folder: str) -> dict[str, Any]:
        more = {"launcher": "mp", "tcp_port": _free_port(), "backend": "gloo"}
        return super().options(cell, folder) | more


class TorchRLMultiSync(_TorchRLCollector):
    """Lockstep by design: each batch needs a message of every worker."""

    name = "torchrl-multisync"
    class_name = "MultiSyncCollector"

    @classmethod
    def options(cls, cell: Cell, folder: str) -> dict[str, Any]:
        return {"frames_per_batch": cell.steps * cell.envs * cell.workers}


class TorchRLRay(_TorchRLCollector):
    name = "torchrl-ray"
    class_name = "RayCollector"

    @classmethod
    def missing(cls) -> str | None:
        return None if importlib.util.find_spec("ray") else "ray is not installed"

    @classmethod
    def options(cls, cell: Cell, folder: str) -> dict[str, Any]:
        from torchrl.collectors.distributed.ray import DEFAULT_RAY_INIT_CONFIG

        # If actors together ask for more cores than there are, most wait indefinitely.
        few = {"num_cpus": 0, "num_gpus": 0, "memory": 0}
        return super().options(cell, folder) | {
            "ray_init_config": {
                **DEFAULT_RAY_INIT_CONFIG,
                "include_dashboard": False,
                "object_store_memory": _GIB,
                "_temp_dir": folder,
                "log_to_driver": False,
            },
            "remote_configs": few,
            "num_collectors": cell.workers,
        }


# ---- gymnasium


class GymnasiumAsync(Peer):
    """``AsyncVectorEnv``: envs in processes, the policy here, every step in lockstep."""

    name = "gymnasium-async"
    sends_single_steps = True

    @classmethod
    @contextlib.contextmanager
    def open(cls, cell: Cell, folder: str) -> Iterator[Iterator[Any]]:
        from gymnasium.vector import AsyncVectorEnv

        single = functools.partial(single_env, cell.env, folder)
        envs = AsyncVectorEnv([single] * (cell.workers * cell.envs))
        torch.manual_seed(0)
        policy = Greedy(cell.env)

        def batches() -> Iterator[None]:
            seen, _ = envs.reset()
            with torch.no_grad():
                while True:
                    for _ in range(cell.steps):
                        seen = envs.step(policy(torch.from_numpy(seen)).numpy())[0]
                    yield

        yield batches()
        envs.close(terminate=True)

    @classmethod
    def refuses(cls, cell: Cell) -> str | None:
        processes = cell.workers * cell.envs
        return None if processes <= 64 else f"it would need {processes} processes"


# ---- tianshou


class TianshouSubproc(Peer):
    """tianshou's ``SubprocVectorEnv``: envs in processes, the policy here, in lockstep."""

    name = "tianshou-subproc"
    sends_single_steps = True
    class_name: ClassVar[str] = "SubprocVectorEnv"

    @classmethod
    def missing(cls) -> str | None:
        return None if importlib.util.find_spec("tianshou") else "tianshou is not installed"

    @classmethod
    @contextlib.contextmanager
    def open(cls, cell: Cell, folder: str) -> Iterator[Iterator[Any]]:
        from tianshou import env as tianshou_env

        cls.prepare(folder)
        single = functools.partial(single_env, cell.env, folder)
        envs = getattr(tianshou_env, cls.class_name)([single] * (cell.workers * cell.envs))
        torch.manual_seed(0)
        policy = Greedy(cell.env)

        def batches() -> Iterator[None]:
            seen, _ = envs.reset()
            with torch.no_grad():
                while True:
                    for _ in range(cell.steps):
                        actions = policy(torch.from_numpy(seen)).numpy()
                        seen, _, ended, cut, _ = envs.step(actions)
                        done = np.flatnonzero(ended | cut)
                        if len(done):  # like tianshou's collector, because these envs do not reset
                            seen[done] = envs.reset(done)[0]
                    yield

        yield batches()
        envs.close()

    @classmethod
    def prepare(cls, folder: str) -> None:
        """Prepare what must exist before the envs are made."""

    @classmethod
    def refuses(cls, cell: Cell) -> str | None:
        return GymnasiumAsync.refuses(cell)


class TianshouRay(TianshouSubproc):
    """tianshou's ``RayVectorEnv``: one actor per env."""

    name = "tianshou-ray"
    class_name = "RayVectorEnv"

    @classmethod
    def missing(cls) -> str | None:
        return super().missing() or TorchRLRay.missing()

    @classmethod
    def prepare(cls, folder: str) -> None:
        importlib.import_module("ray").init(
            include_dashboard=False,
            object_store_memory=_GIB,
            _temp_dir=folder,
            log_to_driver=False,
        )


def _free_port() -> str:
    """Return a free port for TorchRL's collectors. It is unlikely to be taken before they use
    it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


PEERS: dict[str, type[Peer]] = {
    peer.name: peer
    for peer in (
        Floor,
        Ours,
        OursOnOneNode,
        OursWithLearnersPolicy,
        OursWithTwoGroups,
        TorchRLRPC,
        TorchRLDistributed,
        TorchRLMultiSync,
        TorchRLRay,
        GymnasiumAsync,
        TianshouSubproc,
        TianshouRay,
    )
}


# ---- the clock


def measure(start: Sequence[Cell], folder: str) -> list[Result]:
    """Run one peer in this process. Blocks.

    The cells of ``start`` differ only in ``step_s``. They are measured one after the other, each
    for its ``seconds``. The first measurement begins after the first batches, each later one after
    two messages with its own ``step_s``.
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
    """Take at least one batch, until ``seconds`` have passed, and return the time it took."""
    begun = time.perf_counter()
    while True:
        next(batches)
        if (elapsed := time.perf_counter() - begun) >= seconds:
            return elapsed
