"""Build the workers concurrently, check that their envs are alike, choose the number of steps per
message, and build successors of lost workers."""

from __future__ import annotations

import contextlib
import math
import statistics
import threading
import warnings
from collections import Counter, defaultdict
from collections.abc import Sequence
from concurrent.futures import Future, wait
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import replace
from functools import partial

from torchrl_dist.collect.learner.arguments import GivenEnv
from torchrl_dist.collect.learner.crew import Worker
from torchrl_dist.collect.learner.handles import (
    CallersHandle,
    Handle,
    make_far_worker_here,
    make_local_handle,
)
from torchrl_dist.collect.worker.pinned import PinnedWorker, settle
from torchrl_dist.collect.worker.registrations import dump_registrations
from torchrl_dist.collect.worker.specs import require_equal_specs
from torchrl_dist.collect.worker.worker import WorkerConfig, WorkerInfo
from torchrl_dist.errors import ConfigurationError, DeadlineError, PeerLostError
from torchrl_dist.runtime import Peer, Remote, Session
from torchrl_dist.runtime.awake import result_of

# One message holds about this many seconds of steps. Sending and receiving a message takes three
# milliseconds of CPU time in total. If each process has a core, these milliseconds are less than
# one percent of the time of the steps.
MESSAGE_S = 0.5
# If more processes than this share a core, a message holds more seconds of steps, in proportion to
# the number of processes per core.
_PROCESSES_PER_CORE = 4
MESSAGE_BYTES = 8 << 20
_WARN_AT_CALLER = 5  # the stacklevel at which warnings name the code that builds the collector


def start_workers(
    session: Session | None,
    peers: Sequence[Peer],
    configs: Sequence[WorkerConfig],
    *,
    max_ahead: int,
    limit_s: float,
) -> tuple[list[Worker], list[str], list[BaseException]]:
    """Build a worker on every peer, or one worker in this process if there are no peers. Block at
    most ``limit_s`` seconds. If the call is interrupted, all workers are closed, even workers whose
    construction ends only later.

    Returns:
        the workers that were built, the names of the workers whose process has ended, and the
        errors of all other workers.
    """

    def build(index: int) -> Worker:
        own = configs[index]
        ahead = max_ahead
        if session is None or peers[index] == session.me:
            here = "this process" if session is None else session.me.name
            handle: Handle = make_local_handle(own, here, alone=callers)
            name = f"worker {index} ({here})"
            ahead = max_ahead if own.env_processes else 0
        else:
            own = replace(own, own_process=True, packed=True, registrations=registrations)
            handle = _remote_worker(session, peers[index], own, limit_s)
            name = peers[index].name
        try:
            info = handle.call("describe", timeout_s=limit_s)
        except BaseException:
            handle.submit("close", step_limit_s=limit_s, timeout_s=limit_s)
            raise
        infos.append(info)
        built = Worker(
            index, name, handle, info.num_envs, info.steps, ahead, _specs(info), info.ragged
        )
        built.callers = handle if isinstance(handle, CallersHandle) else None
        return built

    registrations = dump_registrations()
    infos: list[WorkerInfo] = []
    # With a session, the caller's thread steps the env only if the caller passed an env object. A
    # separate thread steps all other envs, because other processes wait for the caller's thread,
    # and would miss their deadlines if a step hung in it.
    first = configs[0]
    callers = len(configs) == 1 and (session is None or isinstance(first.make_env, GivenEnv))
    builds: list[Future[Worker]] = [Future() for _ in configs]
    try:
        for index, building in enumerate(builds):
            run = partial(settle, building, partial(build, index))
            if callers and not first.env_processes:
                run()  # in this thread, which may have to make and step the envs
            else:
                threading.Thread(target=run, name="torchrl_dist-build", daemon=True).start()
        wait(builds)
        workers: list[Worker] = []
        lost: list[str] = []
        errors: list[BaseException] = []
        for index, building in enumerate(builds):
            error = building.exception()
            if error is None:
                workers.append(building.result())
            elif isinstance(error, PeerLostError) and peers:
                lost.append(peers[index].name)
                warnings.warn(
                    f"a worker was lost before its first rollout: {error}",
                    stacklevel=_WARN_AT_CALLER,
                )
            else:
                errors.append(error)
        if not errors and workers:
            try:
                require_equal_specs({worker.name: worker.specs for worker in workers})
                if first.frames_per_rollout is None:
                    _set_steps(workers, infos, limit_s)
            except (ConfigurationError, PeerLostError) as error:
                errors.append(error)
        return workers, lost, errors
    except BaseException:  # usually Ctrl-C
        for building in builds:
            building.add_done_callback(partial(_close, limit_s))
        raise


def _remote_worker(
    session: Session, peer: Peer, config: WorkerConfig, limit_s: float
) -> Remote[PinnedWorker]:
    """Build a worker on a peer. If this takes longer than ``limit_s`` seconds, raise DeadlineError,
    and close the worker when it has been built."""
    built = session.submit(peer, make_far_worker_here, config, timeout_s=math.inf)
    try:
        return result_of(built, limit_s)
    except FutureTimeoutError as error:
        if built.done():
            return built.result()
        built.add_done_callback(partial(_close_late, limit_s))
        raise DeadlineError(
            f"{peer} did not build its envs within {limit_s:g} s. If make_env takes longer, raise "
            "timeout_s= of the collector"
        ) from error


def _close_late(limit_s: float, built: Future[Remote[PinnedWorker]]) -> None:
    with contextlib.suppress(Exception):  # building the worker failed, or the session has ended
        built.result().submit("close", step_limit_s=limit_s, timeout_s=limit_s)


def _close(limit_s: float, building: Future[Worker]) -> None:
    if building.exception() is None:
        handle = building.result().handle
        handle.submit("close", step_limit_s=limit_s, timeout_s=limit_s)


def _set_steps(workers: Sequence[Worker], infos: Sequence[WorkerInfo], limit_s: float) -> None:
    # Use medians, because workers that are still starting disturb the timings.
    steps = steps_per_message(
        statistics.median(info.step_s for info in infos),
        statistics.median(info.step_bytes for info in infos),
        seconds_per_message(infos),
    )
    answers = [worker.handle.submit("set_steps", steps, timeout_s=limit_s) for worker in workers]
    for worker, answer in zip(workers, answers, strict=True):
        result_of(answer, limit_s + 1)
        worker.steps = steps


def seconds_per_message(workers: Sequence[WorkerInfo]) -> float:
    """Return how many seconds of steps a message may hold: ``MESSAGE_S``, or more if more than
    ``_PROCESSES_PER_CORE`` processes share a core."""
    crowds: defaultdict[str, float] = defaultdict(float)  # processes per core, by host
    for worker in workers:
        crowds[worker.host] += worker.processes / worker.cores
    return MESSAGE_S * max(1.0, max(crowds.values()) / _PROCESSES_PER_CORE)


def steps_per_message(step_s: float, step_bytes: float, message_s: float = MESSAGE_S) -> int:
    """Return the number of steps of a message that takes about ``message_s`` seconds to fill. The
    message has at most ``MESSAGE_BYTES`` bytes, but at least one step."""
    return max(1, int(min(message_s / step_s, MESSAGE_BYTES / step_bytes)))


# The largest number of successors of one worker. There is a limit, because another successor would
# probably die, too.
_MOST_REPLACED = 3
_SEED_STRIDE = 1_000_003
# A run has 32 bits for trajectory ids. The two highest of these bits count a worker's successors.
_ID_BITS = 30


class Replacer:
    """Replace a dead worker with new env processes, which this process forks.

    Attributes:
        configs: the configs from which the workers are built, by worker index.
        trajectory_base: argument of ``RolloutWorker.set_trajectory_base``.

    Raises:
        ConfigurationError: the session is not a ``local_cluster``.
    """

    def __init__(
        self, session: Session | None, configs: Sequence[WorkerConfig], max_ahead: int
    ) -> None:
        if session is None or session.world.launcher != "local":
            raise ConfigurationError(
                "got replace_lost=True, expected False, because lost workers can be replaced only "
                "under local_cluster. Leave replace_lost= out; other launchers may restart "
                "processes themselves (torchrun --max-restarts restarts the job)"
            )
        self.configs = configs
        self.trajectory_base = 0
        self._max_ahead = max_ahead
        self._replaced: Counter[int] = Counter()

    def may_replace(self, lost: Worker) -> bool:
        return self._replaced[lost.index] < _MOST_REPLACED

    def replace(self, lost: Worker, limit_s: float) -> Worker:
        """Build a successor of ``lost``, and block until it is ready. The successor begins new
        episodes with other seeds.

        Raises:
            RemoteError: the successor's envs could not be built.
            PeerLostError, DeadlineError: the successor's processes died, or did not start in time.
        """
        self._replaced[lost.index] += 1
        generation = self._replaced[lost.index]
        own = self.configs[lost.index]
        seed = own.seed
        own = replace(
            own,
            env_processes=max(1, own.env_processes),
            seed=None if seed is None else (seed + generation * _SEED_STRIDE) % 2**31,
            frames_per_rollout=lost.steps * lost.num_envs,
        )
        handle = make_local_handle(own, alone=False)
        try:
            info = handle.call("describe", timeout_s=limit_s)
            require_equal_specs({lost.name: lost.specs, "its successor": _specs(info)})
            base = self.trajectory_base + (generation << _ID_BITS)
            handle.call("set_trajectory_base", base, timeout_s=limit_s)
        except BaseException:
            handle.submit("close", step_limit_s=limit_s, timeout_s=limit_s)
            raise
        name = f"worker {lost.index} (env processes of this process, in place of {lost.name})"
        ahead = self._max_ahead
        return Worker(
            lost.index, name, handle, info.num_envs, info.steps, ahead, lost.specs, info.ragged
        )


def _specs(info: WorkerInfo) -> dict[str, str]:
    return {"number of envs": str(info.num_envs), **info.specs}
