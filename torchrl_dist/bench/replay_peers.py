"""The replay buffers that are compared. Each is a subclass of :class:`Peer`.

The learner's process builds a peer, and ``open`` starts its workers, which write. Methods import
TorchRL and other packages, so that importing this module is cheap.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torchrl_dist.bench.processes import ForkedWorker, Host, Pending, Worker, die_with_parent
from torchrl_dist.bench.workloads import make_rows

ALPHA, BETA = 0.6, 0.4
SAMPLE_BATCH = 256
WINDOWS, WINDOW, BURN_IN = 32, 80, 40  # windows per batch, rows per window, earlier rows of burn-in
_CALL_S = 60.0
_QUEUED_CALLS = 16


@dataclass
class Peer:
    """A replay buffer to measure. The learner and each worker have a peer for the same buffer.

    Args:
        kind: kind of the rows, a key of ``KINDS``.
        capacity: maximum number of rows.
        folder: an empty folder in memory, which is removed after the measurement.
        op: the operation to measure; ``"sequences"`` needs a buffer that samples windows, and
            ``"patch"`` one that tracks the generations of its rows.
    """

    name: ClassVar[str]
    in_one_process: ClassVar[bool] = False
    """Whether the learner itself must write, because no other process can."""
    environment: ClassVar[Mapping[str, str]] = {}
    """Environment variables of all processes of the measurement."""
    module: ClassVar[str | None] = None
    """The module that this peer imports. ``requirement`` is the package for ``pip install``."""
    requirement: ClassVar[str | None] = None
    needs_trees: ClassVar[bool] = False
    """Whether the peer needs TorchRL's compiled segment trees."""
    extra_ops: ClassVar[tuple[str, ...]] = ()
    """Which of ``"sequences"`` and ``"patch"`` the peer supports."""

    kind: str
    capacity: int
    folder: str
    op: str = ""
    workers: list[Worker] = field(default_factory=list, init=False, repr=False)
    batches: list[Any] = field(default_factory=list, init=False, repr=False)
    """Prepared batches that this process writes repeatedly."""

    @classmethod
    def missing(cls) -> str | None:
        """Return why this peer cannot be measured here, or None. May import TorchRL."""
        if cls.module is not None and importlib.util.find_spec(cls.module) is None:
            return f"not installed: pip install '{cls.requirement}'"
        return _no_trees() if cls.needs_trees else None

    def open(self, workers: int) -> None:
        """Start ``workers`` processes that write."""
        self.workers = [ForkedWorker(self) for _ in range(workers)]

    def prepare(self, rows: Any) -> Any:
        """Convert a TensorDict of rows to the type that ``extend`` takes."""
        return rows

    def extend(self, rows: Any) -> None:
        """Write a prepared batch."""
        raise NotImplementedError

    def sample(self) -> Any:
        """Return a batch of 256 rows with their indices and weights."""
        raise NotImplementedError

    def update(self, batch: Any, priorities: Any) -> None:
        """Set new priorities (a float32 tensor [256]) for the rows of a sampled batch."""
        raise NotImplementedError

    def patch(self, batch: Any, actions: Any) -> None:
        """Replace the actions (int64 [256]) in the rows of a sampled batch."""
        raise NotImplementedError

    def close(self) -> None:
        """End the workers and the buffer."""
        for worker in self.workers:
            if isinstance(worker, ForkedWorker):
                worker.close()


class TorchRLBuffer(Peer):
    """A peer with the methods of TorchRL's TensorDictReplayBuffer."""

    buffer: Any

    def extend(self, rows: Any) -> None:
        self.buffer.extend(rows)

    def sample(self) -> Any:
        return self.buffer.sample()

    def update(self, batch: Any, priorities: Any) -> None:
        batch.set("td_error", priorities)
        self.buffer.update_tensordict_priority(batch)

    def patch(self, batch: Any, actions: Any) -> None:
        index, generation = batch["index"].reshape(-1), batch["index_generation"].reshape(-1)
        self.buffer.update_if_present(index=index, generation=generation, patch={"action": actions})

    def sampling(self) -> dict[str, Any]:
        """Return the arguments of a buffer that say what it samples."""
        from torchrl.data import Sequence

        if self.op != "sequences":
            return {"batch_size": SAMPLE_BATCH}
        unit = Sequence(WINDOW, burn_in=BURN_IN)
        return {"batch_size": WINDOWS, "sample_unit": unit}


# ---- ours


class Ours(TorchRLBuffer):
    """Our shared buffer, without the C kernel. Each process opens the buffer itself."""

    name = "ours-numpy"
    environment: ClassVar[Mapping[str, str]] = {"TORCHRL_DIST_KERNEL": "numpy"}
    extra_ops: ClassVar[tuple[str, ...]] = ("sequences", "patch")
    gather_threads: ClassVar[int] = 1
    stock: ClassVar[bool] = False
    """Whether to build a TensorDictReplayBuffer instead of a SharedReplayBuffer."""

    @functools.cached_property
    def buffer(self) -> Any:
        from torchrl.data import TensorDictReplayBuffer

        from torchrl_dist import replay

        storage = replay.SharedMemmapStorage(
            self.capacity, scratch_dir=f"{self.folder}/replay", job_id="bench",
            gather_threads=self.gather_threads, frames=self._frames(),
        )  # fmt: skip
        return (TensorDictReplayBuffer if self.stock else replay.SharedReplayBuffer)(
            storage=storage,
            sampler=self._sampler(),
            writer=replay.SharedCursorWriter(),
            priority_key="td_error",
            **self.sampling(),
        )

    def _frames(self) -> dict[str, int] | None:
        return {"observation": 4} if (self.op, self.kind) == ("sequences", "L") else None

    def _sampler(self) -> Any:
        from torchrl_dist import replay

        if self.op in self.extra_ops:  # like TorchRL's uniform buffer
            return replay.SharedRandomSampler()
        return replay.SharedPrioritizedSampler(self.capacity, alpha=ALPHA, beta=BETA)

    def close(self) -> None:
        super().close()
        if "buffer" in self.__dict__:
            self.buffer.storage.close()


class OursWithKernel(Ours):
    """Our shared buffer with the C kernel."""

    name = "ours-c"
    environment: ClassVar[Mapping[str, str]] = {"TORCHRL_DIST_KERNEL": "c"}

    @classmethod
    def missing(cls) -> str | None:
        if importlib.util.find_spec("torchrl_dist.replay.law._kernel") is not None:
            return None
        return "the C kernel was not built: reinstall torchrl-dist with a C compiler"


class OursInStockBuffer(OursWithKernel):
    """Our storage, sampler and writer, with the C kernel, in TorchRL's own buffer class."""

    name = "ours-c-stock"
    extra_ops = ()
    stock = True


class OursWithTwoThreads(OursWithKernel):
    """Our shared buffer with the C kernel. Each process gathers rows with two threads."""

    name = "ours-c-2t"
    gather_threads = 2


# ---- TorchRL


def _no_trees() -> str | None:
    from torchrl.data.replay_buffers.samplers import PrioritizedSampler

    try:
        PrioritizedSampler(1, ALPHA, BETA)
    except RuntimeError:
        import torch
        import torchrl

        return (
            f"torchrl {torchrl.__version__}'s compiled extension does not load with torch "
            f"{torch.__version__}: install a torch release that matches it"
        )
    return None


def _prioritized_buffer(capacity: int, storage: Any = None, **options: Any) -> Any:
    from torchrl.data import LazyTensorStorage, TensorDictPrioritizedReplayBuffer

    storage = LazyTensorStorage(capacity) if storage is None else storage
    return TensorDictPrioritizedReplayBuffer(
        alpha=ALPHA, beta=BETA, storage=storage, batch_size=SAMPLE_BATCH, **options
    )


class TorchRL(TorchRLBuffer):
    """TensorDictPrioritizedReplayBuffer in the learner's process."""

    name = "torchrl"
    in_one_process = True
    needs_trees = True

    def open(self, workers: int) -> None:
        self.buffer = _prioritized_buffer(self.capacity)


class TorchRLUniform(TorchRLBuffer):
    """A TensorDictReplayBuffer that samples uniformly, in the learner's process."""

    name = "torchrl-uniform"
    in_one_process = True
    extra_ops = ("sequences", "patch")

    def open(self, workers: int) -> None:
        from torchrl.data import (
            LazyTensorStorage,
            TensorDictReplayBuffer,
            TensorDictRoundRobinWriter,
        )

        self.buffer = TensorDictReplayBuffer(
            storage=LazyTensorStorage(self.capacity),
            writer=TensorDictRoundRobinWriter(track_generations=True),
            **self.sampling(),
        )


class TorchRLShared(TorchRLBuffer):
    """TorchRL's shared buffer. Writers inherit its lock, and only the learner has priorities."""

    name = "torchrl-shared"
    needs_trees = True

    def open(self, workers: int) -> None:
        from torchrl.data import LazyMemmapStorage

        storage = LazyMemmapStorage(
            self.capacity, scratch_dir=f"{self.folder}/torchrl", shared_init=True
        )
        self.buffer = _prioritized_buffer(self.capacity, storage, shared=True, sync=False)
        super().open(workers)


class TorchRLQueue(Peer):
    """A TorchRL buffer in its own process, which gets all calls through a multiprocessing queue."""

    name = "torchrl-queue"
    needs_trees = True

    def open(self, workers: int) -> None:
        import torch.multiprocessing

        context = torch.multiprocessing.get_context("fork")
        self._requests = context.Queue(_QUEUED_CALLS)
        self._batches = context.Queue()
        self._owner = context.Process(target=self._own, daemon=True)
        self._owner.start()
        super().open(workers)

    def _own(self) -> None:
        die_with_parent()
        buffer = _prioritized_buffer(self.capacity)
        while (request := self._requests.get()) is not None:
            operation, data = request
            if operation == "extend":
                buffer.extend(data)
            elif operation == "update":
                buffer.update_tensordict_priority(data)
            else:
                self._batches.put(buffer.sample())

    def extend(self, rows: Any) -> None:
        self._requests.put(("extend", rows), timeout=_CALL_S)

    def sample(self) -> Any:
        self._requests.put(("sample", None), timeout=_CALL_S)
        return self._batches.get(timeout=_CALL_S)

    def update(self, batch: Any, priorities: Any) -> None:
        update = batch.select("index")
        update.set("td_error", priorities)
        self._requests.put(("update", update), timeout=_CALL_S)

    def close(self) -> None:
        if self.workers:  # only in the learner
            # End the workers after the owner, because the owner fetches queued tensors from them.
            self._requests.put(None, timeout=_CALL_S)
            self._owner.join(_CALL_S)
        super().close()


class TorchRLRemote(TorchRLBuffer):
    """RemoteTensorDictReplayBuffer in its own process, called by torch.distributed.rpc."""

    name = "torchrl-rpc"
    needs_trees = True

    def open(self, workers: int) -> None:
        from torchrl_dist.runtime import local_cluster

        self._end = contextlib.ExitStack()
        roles = {"learner": 1, "owner": 1, "writer": workers}
        session = self._end.enter_context(local_cluster(roles, timeout_s=_CALL_S))
        owner = session.remote(session.of_role("owner")[0], _remote_buffer, self.capacity)
        self.buffer = _Calls(owner)
        for writer in session.of_role("writer"):
            view = TorchRLRemote(self.kind, self.capacity, self.folder)
            view.buffer = self.buffer
            self.workers.append(RPCWorker(session.remote(writer, Host, view)))

    def close(self) -> None:
        self._end.close()


def _remote_buffer(capacity: int) -> Any:
    from torchrl.data import LazyTensorStorage, RemoteTensorDictReplayBuffer
    from torchrl.data.replay_buffers.samplers import PrioritizedSampler

    return RemoteTensorDictReplayBuffer(
        storage=LazyTensorStorage(capacity),
        sampler=PrioritizedSampler(capacity, ALPHA, BETA),
        batch_size=SAMPLE_BATCH,
        priority_key="td_error",
    )


@dataclass
class _Calls:
    """Has the methods of a buffer, and forwards each call to a Remote."""

    remote: Any

    def extend(self, rows: Any) -> None:
        self.remote.call("extend", rows)

    def sample(self) -> Any:
        return self.remote.call("sample")

    def update_tensordict_priority(self, batch: Any) -> None:
        self.remote.call("update_tensordict_priority", batch.select("index", "td_error"))


@dataclass
class RPCWorker:
    remote: Any

    def submit(self, function: Any, *args: Any) -> Pending:
        return self.remote.submit("run", function, *args)


# ---- others


class CPPRB(Peer):
    """cpprb's MPPrioritizedReplayBuffer: NumPy arrays in shared memory, trees in C++."""

    name = "cpprb"
    module, requirement = "cpprb", "torchrl-dist[bench]"

    def open(self, workers: int) -> None:
        import multiprocessing

        cpprb = importlib.import_module("cpprb")
        arrays = self.prepare(make_rows(self.kind, 1))
        spec = {
            key: {"dtype": array.dtype, "shape": array.shape[1:] or 1}
            for key, array in arrays.items()
        }
        self.buffer = cpprb.MPPrioritizedReplayBuffer(
            self.capacity, spec, alpha=ALPHA, ctx=multiprocessing.get_context("fork")
        )
        super().open(workers)

    def prepare(self, rows: Any) -> Any:
        return _arrays(rows)

    def extend(self, rows: Any) -> None:
        self.buffer.add(**rows)

    def sample(self) -> Any:
        return self.buffer.sample(SAMPLE_BATCH, beta=BETA)

    def update(self, batch: Any, priorities: Any) -> None:
        self.buffer.update_priorities(batch["indexes"], priorities.numpy())


class Ray(TorchRLBuffer):
    """TorchRL's RayReplayBuffer: the buffer is a Ray actor."""

    name = "ray"
    module, requirement, needs_trees = "ray", "ray", True
    environment: ClassVar[Mapping[str, str]] = {
        "RAY_AUTH_MODE": "disabled",  # otherwise Ray writes a token into the home folder
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_DEDUP_LOGS": "0",
    }

    def open(self, workers: int) -> None:
        from torchrl.data import LazyTensorStorage, RayReplayBuffer, TensorDictReplayBuffer
        from torchrl.data.replay_buffers.samplers import PrioritizedSampler

        self._ray = importlib.import_module("ray")
        self.buffer = RayReplayBuffer(
            replay_buffer_cls=TensorDictReplayBuffer,
            storage=functools.partial(LazyTensorStorage, self.capacity),
            sampler=functools.partial(PrioritizedSampler, self.capacity, ALPHA, BETA),
            batch_size=SAMPLE_BATCH,
            priority_key="td_error",
            remote_config={"num_cpus": 0},
            ray_init_config={
                "num_cpus": 1,
                "object_store_memory": 2**29,
                "include_dashboard": False,
                "log_to_driver": False,
                "_temp_dir": str(self.folder),
                "runtime_env": {"env_vars": {"PYTHONPATH": os.pathsep.join(sys.path)}},
            },
        )
        remote = self._ray.remote(num_cpus=0)(Host)
        for _ in range(workers):
            view = TorchRLBuffer(self.kind, self.capacity, self.folder)
            view.buffer = self.buffer.client()
            self.workers.append(_RayWorker(self._ray, remote.remote(view)))

    def close(self) -> None:
        if hasattr(self, "buffer"):  # there is no buffer if Ray failed to start
            self.buffer.close()
        self._ray.shutdown()


@dataclass
class _RayWorker:
    ray: Any
    actor: Any
    call: Any = None

    def submit(self, function: Any, *args: Any) -> Pending:
        self.call = self.actor.run.remote(function, *args)
        return self

    def result(self, timeout: float | None = None) -> Any:
        return self.ray.get(self.call, timeout=timeout)


class Reverb(Peer):
    """A Reverb server in its own process. The learner reads batches from a TensorFlow dataset,
    which prefetches them."""

    name = "reverb"
    module, requirement = "reverb", "dm-reverb[tensorflow]"
    environment: ClassVar[Mapping[str, str]] = {
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "GRPC_VERBOSITY": "ERROR",
    }
    extra_ops = ("sequences",)

    def _rows_per_item(self) -> int:
        return BURN_IN + WINDOW if self.op == "sequences" else 1

    def _batch(self) -> int:
        return WINDOWS if self.op == "sequences" else SAMPLE_BATCH

    def open(self, workers: int) -> None:
        # TensorFlow does not survive a fork, so each process imports it after the fork.
        self._server = ForkedWorker(self)
        self._address = f"localhost:{self._server.submit(_serve_reverb).result(_CALL_S)}"
        super().open(workers)

    @functools.cached_property
    def _client(self) -> Any:
        return importlib.import_module("reverb").Client(self._address)

    @functools.cached_property
    def _writer(self) -> Any:
        return self._client.trajectory_writer(num_keep_alive_refs=self._rows_per_item())

    @functools.cached_property
    def _batches(self) -> Iterator[Any]:
        reverb = importlib.import_module("reverb")
        shape = importlib.import_module("tensorflow").TensorShape
        arrays = self.prepare(make_rows(self.kind, 1))
        steps, batch = self._rows_per_item(), self._batch()
        before = () if steps == 1 else (steps,)
        dataset = reverb.TrajectoryDataset(
            self._address,
            "replay",
            dtypes={key: array.dtype for key, array in arrays.items()},
            shapes={key: shape((*before, *array.shape[1:])) for key, array in arrays.items()},
            max_in_flight_samples_per_worker=2 * batch,
        )
        return dataset.batch(batch).as_numpy_iterator()

    def prepare(self, rows: Any) -> Any:
        return _arrays(rows)

    def extend(self, rows: Any) -> None:
        writer, steps = self._writer, self._rows_per_item()
        for row in range(len(rows["action"])):
            writer.append({key: array[row] for key, array in rows.items()})
            if writer.episode_steps < steps:
                continue
            newest = {
                key: column[-1] if steps == 1 else column[-steps:]
                for key, column in writer.history.items()
            }
            writer.create_item("replay", priority=1.0, trajectory=newest)
        writer.flush()

    def sample(self) -> Any:
        return next(self._batches)

    def update(self, batch: Any, priorities: Any) -> None:
        updates = dict(zip(batch.info.key.tolist(), priorities.tolist(), strict=True))
        self._client.mutate_priorities("replay", updates=updates)

    def close(self) -> None:
        super().close()
        if "_server" in self.__dict__:
            self._server.close()


def _serve_reverb(peer: Reverb) -> int:
    """Start the server in this process, and return its port."""
    reverb = importlib.import_module("reverb")
    selectors, uniform = reverb.selectors, peer.op == "sequences"
    table = reverb.Table(
        "replay",
        sampler=selectors.Uniform() if uniform else selectors.Prioritized(ALPHA),
        remover=selectors.Fifo(),
        max_size=peer.capacity,
        rate_limiter=reverb.rate_limiters.MinSize(1),
    )
    peer.tables = reverb.Server([table])  # type: ignore[attr-defined]  # ends with the process
    return peer.tables.port  # type: ignore[attr-defined]  # set above


def _arrays(rows: Any) -> dict[str, Any]:
    """Return the entries of a TensorDict as NumPy arrays, under flat keys."""
    leaves = rows.items(include_nested=True, leaves_only=True)
    return {key if isinstance(key, str) else "_".join(key): leaf.numpy() for key, leaf in leaves}


# ---- the floor


class Floor(Peer):
    """The limit that memory sets: copies between tensors, without lock, tree or TensorDict."""

    name = "floor"

    def open(self, workers: int) -> None:
        import numpy as np
        import torch

        rows = self.prepare(make_rows(self.kind, 1))
        self._ring = [
            leaf.new_zeros(self.capacity, *leaf.shape[1:]).share_memory_() for leaf in rows
        ]
        self._batch = [leaf.new_empty(SAMPLE_BATCH, *leaf.shape[1:]) for leaf in rows]
        self._priorities = torch.zeros(self.capacity)
        self._random = np.random.default_rng()
        share = self.capacity // max(1, workers)
        started: list[Worker] = []
        for index in range(workers):  # each worker writes its own part of the ring
            self._part = range(index * share, (index + 1) * share)
            self._at = self._part.start
            started.append(ForkedWorker(self))
        self.workers = started

    def prepare(self, rows: Any) -> Any:
        return list(rows.values(include_nested=True, leaves_only=True))

    def extend(self, rows: Any) -> None:
        count = len(rows[0])
        if self._at + count > self._part.stop:
            self._at = self._part.start
        for ring, leaf in zip(self._ring, rows, strict=True):
            ring[self._at : self._at + count].copy_(leaf)
        self._at += count

    def sample(self) -> Any:
        import torch

        index = torch.from_numpy(self._random.integers(0, self.capacity, SAMPLE_BATCH))
        for ring, out in zip(self._ring, self._batch, strict=True):
            torch.index_select(ring, 0, index, out=out)
        return index

    def update(self, batch: Any, priorities: Any) -> None:
        self._priorities.index_copy_(0, batch, priorities)


_ALL = (
    Ours, OursWithKernel, OursInStockBuffer, OursWithTwoThreads, TorchRL, TorchRLUniform,
    TorchRLShared, TorchRLQueue, TorchRLRemote, CPPRB, Ray, Reverb, Floor,
)  # fmt: skip
PEERS: dict[str, type[Peer]] = {peer.name: peer for peer in _ALL}
