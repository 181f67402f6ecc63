"""A worker of this process behind the same two verbs as one in another process."""

from __future__ import annotations

import socket
import traceback
from concurrent.futures import Future
from typing import Any, Protocol

from torchrl_dist.collect.loop.one_thread import use_one_thread_if_small
from torchrl_dist.collect.node.node import NodeWorker, make_worker
from torchrl_dist.collect.worker.worker import WorkerConfig
from torchrl_dist.errors import DeadlineError, RemoteError
from torchrl_dist.runtime.pool import DaemonPool
from torchrl_dist.stopping import Stopped

_REQUESTS = 2  # as many as the collector sends at a time
_DURING_ROLLOUTS = ("collect", "cut", "close")


class Handle(Protocol):
    """What the collector needs of ``torchrl_dist.runtime.Remote``."""

    def call(self, method: str, *args: Any, timeout_s: float | None = None, **kwargs: Any) -> Any:
        """Block for the method's result."""

    def submit(
        self, method: str, *args: Any, timeout_s: float | None = None, **kwargs: Any
    ) -> Future:
        """The same, without blocking; a worker in this process does all but rollouts at once."""


class LocalHandle:
    """A worker in this process: its rollouts run in threads, one by one in the order of their
    requests, other calls in the caller's. ``name`` is what errors call this process."""

    def __init__(self, config: WorkerConfig, name: str = "this process") -> None:
        self._name = name
        self._worker = make_worker(config)
        self._policy = config.policy
        self._pool = DaemonPool(_REQUESTS, "torchrl_dist-rollout")

    def call(self, method: str, *args: Any, timeout_s: float | None = None, **kwargs: Any) -> Any:
        """Run it here and now. The deadline is that of the rollout under way, which ends first.

        Raises:
            DeadlineError: it did not end in time, or its env processes did not answer in time.
            RemoteError: the method raised; its exception is the cause.
        """
        if timeout_s is not None and method not in _DURING_ROLLOUTS:
            if not self._worker.wait_idle(timeout_s):
                raise DeadlineError(
                    f"{method}: the rollout under way in this process did not end within "
                    f"{timeout_s:g} s; its env or policy hangs, or timeout_s is too short"
                )
        try:
            return getattr(self._worker, method)(*args, **kwargs)
        except (KeyboardInterrupt, Stopped):  # of a second signal
            raise
        except BaseException as error:  # also a SystemExit, of an env
            if isinstance(error, DeadlineError) and isinstance(self._worker, NodeWorker):
                raise  # its own
            raise RemoteError(
                f"{type(error).__name__}: {error}",
                peer=self._name,
                host=socket.gethostname(),
                remote_traceback=traceback.format_exc(),
            ) from error

    def submit(
        self, method: str, *args: Any, timeout_s: float | None = None, **kwargs: Any
    ) -> Future:
        future: Future = Future()
        future.set_running_or_notify_cancel()

        def run() -> None:
            if method == "collect":
                use_one_thread_if_small(self._policy)
            try:
                result = self.call(method, *args, timeout_s=timeout_s, **kwargs)
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)

        if method == "collect":
            self._pool.submit(run)
        else:
            run()
            if method == "close":
                self._pool.close()
        return future
