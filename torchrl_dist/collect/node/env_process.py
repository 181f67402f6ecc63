"""The code of an env process: a rollout worker that a node worker runs in a separate process.

The env process receives calls over a socket, and sends its answers over the same socket. Its rows,
its policy's weights and a count of its steps are in memory that it shares with the node worker. The
node worker reads the count of steps to detect env processes that hang.
"""

from __future__ import annotations

import atexit
import contextlib
import io
import pickle
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import cloudpickle
import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor

from torchrl_dist.collect.node.relay import NodeLearner, is_answer
from torchrl_dist.collect.worker.registrations import Registrations, adopt_registrations
from torchrl_dist.collect.worker.shared_block import (
    BlockRows,
    RolloutLayout,
    WeightsView,
    attach,
)
from torchrl_dist.collect.worker.worker import (
    RolloutStats,
    RolloutWorker,
    WorkerConfig,
)
from torchrl_dist.errors import RemoteError
from torchrl_dist.runtime.surroundings import Surroundings

_SEED_STRIDE = 1_000_003
# Indices of int64 words in the control block. From FIRST_PROGRESS on, the block has one word per
# env process, in which the env process counts its steps.
CUT_REQUEST, CUT_LEAST, STOP, FIRST_PROGRESS = range(4)
# Tensors of these dtypes can be pickled, but not unpickled (torch 2.13).
_UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)
# Number of the first answer of an env process, which says that the envs are built. The env process
# sends this answer without a request.
BUILT = 0


class Message(NamedTuple):
    """A request to an env process to call a method.

    ``call`` holds the pickled arguments. The arguments are pickled separately from the message, so
    that only this call fails if the arguments cannot be unpickled.
    """

    number: int  # number of the request; the answer carries the same number
    method: str
    call: bytes


class Failure(NamedTuple):
    """The exception that a call raised in an env process. ``cause`` is the pickled exception, which
    the node worker may be unable to unpickle. ``cause`` is None if the exception cannot be
    pickled."""

    summary: str
    trace: str
    cause: bytes | None


class Answer(NamedTuple):
    """The answer of an env process to the request with the same number.

    The content is the call's result, or a ``Failure``, which the node worker converts to a
    RemoteError. The content is pickled separately from the number, so that the node worker can read
    the number even if the content cannot be unpickled.
    """

    number: int
    content: Any

    def result(self) -> Any:
        if isinstance(self.content, RemoteError):
            raise self.content
        return self.content


@dataclass(frozen=True)
class RowsAddress:
    """Where an env process writes its rows: in the block at ``path`` with this layout, from env
    ``first_env`` on."""

    path: str
    layout: RolloutLayout
    first_env: int


@dataclass(frozen=True)
class EnvProcessJob:
    """The arguments of an env process. The fork server receives them as a pickle.

    Attributes:
        registrations: result of :func:`dump_registrations`.
        config: the node worker's config, pickled.
        control: path of the control block.
        trajectory_base: argument of ``RolloutWorker.set_trajectory_base``.
        generation: the number of earlier env processes that had the same index and were replaced.
        numbered: the number of trajectory ids that these earlier env processes have used.
    """

    surroundings: Surroundings
    registrations: Registrations
    config: bytes
    control: str
    trajectory_base: int = 0
    generation: int = 0
    numbered: int = 0

    def run(self, index: int, ready: Callable[[], None], end: int) -> None:
        """Run the env process from beginning to end, in a fresh fork of the fork server.

        Args:
            end: file descriptor of one end of a pair of sockets. The node worker has the other end.
        """
        self.surroundings.adopt()
        adopt_registrations(self.registrations)
        # these errors are expected if the node worker has ended
        with Connection(end) as connection, contextlib.suppress(EOFError, ConnectionError):
            self._serve(index, connection, ready)
        # Run exit functions here, because the forked process ends by os._exit(), which does not run
        # exit functions.
        atexit._run_exitfuncs()

    def _serve(self, index: int, connection: Connection, ready: Callable[[], None]) -> None:
        part: _Part | None = None
        learner: NodeLearner | None = None

        def build() -> Any:
            nonlocal part, learner
            words = attach(self.control).numpy().view(np.int64)
            config = config_of_part(cloudpickle.loads(self.config), index, self.generation)
            if config.inference is not None:
                learner = _learner(config, connection, words[FIRST_PROGRESS + index :])
                config = replace(config, inference=replace(config.inference, learner=learner))
            part = _Part(config, words, index)
            if self.trajectory_base or self.numbered:
                part.worker.set_trajectory_base(self.trajectory_base, self.numbered)
            ready()
            return part.worker.describe()

        _answer(connection, BUILT, build)
        while part is not None:
            if learner is not None and learner.calls:
                message = learner.calls.popleft()
            else:
                message = pickle.loads(connection.recv_bytes())
            if is_answer(message):
                continue
            number, method, call = message
            target = part if method == "collect" else part.worker
            _answer(connection, number, partial(_call, target, method, call))
            if method == "close":
                return


def config_of_part(config: WorkerConfig, index: int, generation: int) -> WorkerConfig:
    """Return the config of one env process of a node worker. For seeds and trajectory ids, each env
    process of the job counts as one worker."""
    seed, frames = config.seed, config.frames_per_rollout
    # A successor gets a different seed, because it must not repeat the episodes of the env process
    # that it replaces.
    if seed is not None and generation:
        seed = (seed + generation * _SEED_STRIDE) % 2**31
    return replace(
        config,
        frames_per_rollout=None if frames is None else -(-frames // config.env_processes),
        worker_index=config.worker_index * config.env_processes + index,
        num_workers=config.num_workers * config.env_processes,
        shown_index=config.worker_index,
        own_process=True,
        packed=False,
        env_processes=0,
        seed=seed,
    )


def _learner(config: WorkerConfig, connection: Connection, progress: np.ndarray) -> NodeLearner:
    def beat() -> None:
        progress[0] += 1

    beat_s = None if config.step_timeout_s is None else config.step_timeout_s / 4
    return NodeLearner(connection, beat, beat_s)


def _call(target: Any, method: str, call: bytes) -> Any:
    args, kwargs = pickle.loads(call)
    return getattr(target, method)(*args, **kwargs)


def _answer(connection: Connection, number: int, call: Callable[[], Any]) -> None:
    try:
        content = _dumps(call())
    # Report SystemExit, too, and results that cannot be pickled.
    except BaseException as error:
        content = pickle.dumps(_failure(error))
    connection.send_bytes(pickle.dumps((number, content)))


class _Pickler(cloudpickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is Tensor and obj.dtype in _UNSIGNED:
            return torch.from_numpy, (obj.detach().numpy(),)
        return super().reducer_override(obj)


def _dumps(obj: Any) -> bytes:
    buffer = io.BytesIO()
    _Pickler(buffer).dump(obj)
    return buffer.getvalue()


def _failure(error: BaseException) -> Failure:
    summary = traceback.format_exception_only(error)[-1].strip()
    cause = None
    with contextlib.suppress(Exception):
        cause = cloudpickle.dumps(error)
    return Failure(summary, "".join(traceback.format_exception(error)), cause)


class _Part:
    """The part of the node worker's envs that this env process steps."""

    def __init__(self, config: WorkerConfig, words: np.ndarray, index: int) -> None:
        self.worker = _Watched(config, words, FIRST_PROGRESS + index)
        self._blocks: dict[str, BlockRows] = {}

    def collect(
        self, rows: RowsAddress | None, **options: Any
    ) -> tuple[TensorDictBase | None, RolloutStats]:
        """Do the same as ``RolloutWorker.collect``, but take the weights from a ``WeightsAddress``.
        If the new rows fit into the block at the address ``rows``, write them there, and return
        None instead of the rows."""
        data, stats = self.worker.collect(**options)
        if data is None or rows is None:
            return data, stats
        if data.shape != (stats.num_envs, stats.frames // stats.num_envs):
            # a postproc changed the shape, so the rows do not fill their part of the block
            return data, stats
        if rows.path not in self._blocks:
            self._blocks[rows.path] = BlockRows(rows.layout, attach(rows.path))
        return (None if self._blocks[rows.path].write(data, rows.first_env) else data), stats


class _Watched(RolloutWorker):
    """A rollout worker that shares memory with the node worker. It writes a count of its steps to
    this memory. The memory also holds its weights, and the requests to cut or stop a rollout."""

    _alone = True

    def __init__(self, config: WorkerConfig, words: np.ndarray, progress: int) -> None:
        self._words, self._progress = words, progress
        self._weights = WeightsView()
        super().__init__(config)

    def _take_weights(self, address: Any) -> None:
        """Take weights from a ``WeightsAddress``."""
        self._weights.take(address, self._module())
        self._rollout.policy_version = address.version

    @property
    def _told_to_stop(self) -> bool:
        return bool(self._words[STOP])

    def _gives_up(self) -> bool:
        self._words[self._progress] += 1  # count a step, because waiting must not look like hanging
        return self._told_to_stop

    def _watch(self, request: int | None) -> Callable[[int], bool]:
        words, progress = self._words, self._progress

        def enough(done: int) -> bool:
            words[progress] += 1
            if words[STOP]:
                self._rollout.stop()
            if request is None:
                return False
            return bool(words[CUT_REQUEST] >= request and done >= words[CUT_LEAST])

        return enough
