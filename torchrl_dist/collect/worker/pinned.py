"""A worker that any thread may call. The worker makes, steps and closes its envs in one thread.

One thread is needed, because envs with a database, a window, an event loop or a graphics context
may only be used in the thread that made them.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, Protocol

import torch

from torchrl_dist.collect.worker.worker import RolloutStats, WorkerConfig
from torchrl_dist.forks import renewed

_IN_THE_THREAD = (
    "describe",
    "reset",
    "set_hooks",
    "set_seed",
    "set_steps",
    "set_trajectory_base",
    "visit_envs",
)


class EnvThread(Protocol):
    """The thread that makes, steps and closes a worker's envs."""

    def submit(self, call: Callable[[], None]) -> None:
        """Run ``call`` in this thread, after the calls that were submitted earlier. This method
        does not block."""

    def close(self) -> None:
        """Release the thread. Calls that were submitted earlier still run."""


class OwnThread:
    """A daemon thread that serves only one worker."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        thread = threading.Thread(target=self._run, name="torchrl_dist-rollout", daemon=True)
        thread.start()

    def submit(self, call: Callable[[], None]) -> None:
        self._calls.put(call)

    def close(self) -> None:
        self._calls.put(None)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            call()
            del call


def run_on_cpu(call: Callable[[], Any]) -> Any:
    """Run ``call()`` with the CPU as torch's default device, as in a new process, and return its
    result. An earlier ``torch.set_default_device`` therefore has no effect inside the call."""
    if torch.get_default_device().type == "cpu":
        return call()
    with torch.device("cpu"):
        return call()


def settle(future: Future, call: Callable[[], Any]) -> None:
    """Make the call, and store its result or exception in the future."""
    try:
        result = call()
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(result)


def _close_built(building: Future) -> None:
    if building.exception() is None:
        with contextlib.suppress(Exception):
            building.result().close()


class PinnedWorker:
    """A :class:`RolloutWorker` or a node worker whose methods run in an :class:`EnvThread`.

    The constructor calls ``make(config)`` in that thread, and blocks until the worker is built. All
    methods except ``cut`` return a future. Calls run one by one, in the order in which the methods
    were called. Rollouts, however, run in the order of their request numbers, which begin at
    ``first``.

    Raises:
        Exception: the exception that ``make`` raised.
    """

    def __init__(
        self,
        make: Callable[[WorkerConfig], Any],
        config: WorkerConfig,
        thread: EnvThread,
        first: int = 0,
    ) -> None:
        self._index = config.worker_index
        self._thread = thread
        # calls that wait for the calls of earlier requests, by request number
        self._held: dict[int, Callable[[], None]] = {}
        self._answers: dict[int, Future] = {}
        self._next = first
        self._closed = False
        self._lock = renewed(self, "_lock", threading.Lock)
        building = self._run(make, config)
        try:
            self._worker = building.result()
        # This covers Ctrl-C. The other thread still builds the worker, which must then be closed.
        except BaseException:
            thread.submit(partial(_close_built, building))
            thread.close()
            raise

    def _task(self, call: Callable[[], Any]) -> tuple[Callable[[], None], Future]:
        future: Future = Future()

        def run() -> None:
            if future.set_running_or_notify_cancel():
                settle(future, partial(run_on_cpu, call))

        return run, future

    def _run(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Future:
        run, future = self._task(partial(method, *args, **kwargs))
        self._thread.submit(run)
        return future

    def __getattr__(self, name: str) -> Callable[..., Future]:
        if name not in _IN_THE_THREAD:
            raise AttributeError(name)
        return partial(self._run, getattr(self._worker, name))

    def collect(self, request: int | None = None, **kwargs: Any) -> Future:
        """See ``RolloutWorker.collect``."""
        call = partial(self._worker.collect, request=request, **kwargs)
        run, future = self._task(call)
        with self._lock:
            if self._closed:
                future.set_result((None, RolloutStats(self._index, 0)))
            elif request is None:
                self._thread.submit(run)
            else:
                self._worker.expect(request, **kwargs)
                self._held[request], self._answers[request] = run, future
                while self._next in self._held:
                    self._thread.submit(self._held.pop(self._next))
                    del self._answers[self._next]
                    self._next += 1
        return future

    def cut(self, request: int, least: int) -> None:
        """See ``RolloutWorker.cut``. This method also affects a rollout that is running."""
        self._worker.cut(request, least)

    def close(self, step_limit_s: float = 10.0, close_env: bool = True) -> Future:
        """Stop a running rollout after its current step, then close the envs. Idempotent."""
        self._worker.stop(step_limit_s)
        with self._lock:
            closed, self._closed = self._closed, True
            held, self._answers = self._answers, {}
            self._held.clear()
        for future in held.values():
            future.set_result((None, RolloutStats(self._index, 0)))
        if closed:
            done: Future = Future()
            done.set_result(None)
            return done
        done = self._run(self._worker.close, step_limit_s, close_env)
        self._thread.close()
        return done
