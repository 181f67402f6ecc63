"""Handles to workers. A handle has the same two methods whether its worker is in this process or in
another process."""

from __future__ import annotations

import socket
import threading
import traceback
from collections import deque
from concurrent.futures import Future
from functools import partial
from typing import Any, Protocol

from torchrl_dist.collect.learner.arguments import GivenEnv
from torchrl_dist.collect.loop.one_thread import one_thread_if_small, use_one_thread_if_small
from torchrl_dist.collect.node.node import NodeWorker
from torchrl_dist.collect.worker.pinned import OwnThread, PinnedWorker, run_on_cpu, settle
from torchrl_dist.collect.worker.registrations import adopt_registrations
from torchrl_dist.collect.worker.worker import RolloutWorker, WorkerConfig
from torchrl_dist.errors import ConfigurationError, DeadlineError, RemoteError
from torchrl_dist.runtime import Remote, current_session
from torchrl_dist.runtime.chores import CHORES
from torchrl_dist.stopping import Stopped

_INTERRUPTS = (KeyboardInterrupt, Stopped)
# After the time limit of a call, a node worker has this many seconds to report which env processes
# are late.
_ANSWERS_LATE_S = 1.0
# Wait at most this many seconds for the main thread of a rank to begin to serve calls.
_SERVES_SOON_S = 5.0


class Handle(Protocol):
    """The part of ``torchrl_dist.runtime.Remote`` that the collector needs."""

    def call(self, method: str, *args: Any, timeout_s: float | None = None, **kwargs: Any) -> Any:
        """Call the method, block until it has ended, and return its result."""

    def submit(
        self, method: str, *args: Any, timeout_s: float | None = None, **kwargs: Any
    ) -> Future:
        """Call the method, and return a future of its result. A call of ``collect`` returns
        immediately. Any other call to a worker in this process may block until the method has
        ended."""


def make_far_worker(config: WorkerConfig) -> PinnedWorker:
    """Make a worker in this process for a learner in another process.

    The main thread makes and steps the worker's envs. If the main thread does not serve calls, or
    already has the envs of another worker, a separate thread makes and steps the envs.
    """
    adopt_registrations(config.registrations)
    if config.env_processes:
        return PinnedWorker(NodeWorker, config, OwnThread())
    main = CHORES.claim(min(_SERVES_SOON_S, current_session().timeout_s / 4))
    return PinnedWorker(RolloutWorker, config, CHORES if main else OwnThread())


def make_far_worker_here(config: WorkerConfig) -> Remote[PinnedWorker]:
    """Make a worker in this process, and return a handle by which the learner calls the worker."""
    session = current_session()
    try:
        return session.remote(session.me, make_far_worker, config)
    except RemoteError as error:  # raise the cause, because the caller's session wraps it again
        raise error.__cause__ or error from None


def make_local_handle(
    config: WorkerConfig, name: str = "this process", *, alone: bool
) -> LocalHandle | CallersHandle:
    """Make a worker in this process. ``name`` is the worker's name in errors.

    If the worker is the collector's only one (``alone``), has no env processes and runs the policy
    itself, the calling thread makes and steps the envs. With a replay buffer, whose writes may
    block, the calling thread steps only an env that the caller built. In all other cases, a
    separate thread or env processes step the envs.
    """
    adopt_registrations(config.registrations)
    given = isinstance(config.make_env, GivenEnv)
    in_the_callers = alone and config.inference is None and (given or config.replay_buffer is None)
    if in_the_callers and not config.env_processes:
        return CallersHandle(config, name)
    thread = OwnThread()
    use_one_thread = partial(use_one_thread_if_small, config.policy)
    if config.env_processes:
        node = PinnedWorker(NodeWorker, config, thread)
        # Submit this call last, because the env processes must inherit the original number of
        # threads.
        thread.submit(use_one_thread)
        return LocalHandle(node, name, _ANSWERS_LATE_S)
    thread.submit(use_one_thread)
    return LocalHandle(PinnedWorker(RolloutWorker, config, thread), name)


def _told(error: BaseException, name: str) -> RemoteError:
    """Wrap an error as if it came from another process. Call this function in the ``except``
    block."""
    told = RemoteError(
        f"{type(error).__name__}: {error}",
        peer=name,
        host=socket.gethostname(),
        remote_traceback="".join(traceback.format_exception(error)),
    )
    told.__cause__ = error
    return told


class LocalHandle:
    """A handle to a worker of this process whose envs are stepped in another thread or in env
    processes.

    Args:
        late_s: how many seconds after a call's time limit the worker itself may still report that
            the call is late.
    """

    def __init__(self, worker: PinnedWorker, name: str, late_s: float = 0.0) -> None:
        self._name = name
        self._worker = worker
        self._late_s = late_s
        self._as_is = (*_INTERRUPTS, DeadlineError) if late_s else _INTERRUPTS

    def call(self, method: str, *args: Any, timeout_s: float | None = None, **kwargs: Any) -> Any:
        """Run the method after the current rollout has ended. Wait at most ``timeout_s`` seconds
        until the rollout and the method have ended.

        Raises:
            DeadlineError: the rollout did not end, or env processes did not answer, in time.
            RemoteError: the method raised. The method's exception is the cause of this error.
        """
        answer = getattr(self._worker, method)(*args, **kwargs)
        if not isinstance(answer, Future):
            return answer
        try:
            return answer.result(None if timeout_s is None else timeout_s + self._late_s)
        except self._as_is:
            raise
        except TimeoutError as error:
            if answer.done() or timeout_s is None:
                raise _told(error, self._name) from error
            answer.cancel()
            raise DeadlineError(
                f"{method}: the rollout under way in this process did not end within {timeout_s:g} "
                "s. Find out whether its env or policy hangs; if a step only takes long, raise "
                "timeout_s= of the collector"
            ) from None
        except BaseException as error:  # including a SystemExit that an env raised
            raise _told(error, self._name) from error

    def submit(
        self, method: str, *args: Any, timeout_s: float | None = None, **kwargs: Any
    ) -> Future:
        future: Future = Future()
        future.set_running_or_notify_cancel()
        if method in ("collect", "close"):
            answer = getattr(self._worker, method)(*args, **kwargs)
            answer.add_done_callback(partial(_pass_on, future, self._name))
            return future
        settle(future, partial(self.call, method, *args, timeout_s=timeout_s, **kwargs))
        return future


def _pass_on(future: Future, name: str, answer: Future) -> None:
    error = answer.exception()
    if error is not None:
        future.set_exception(error if isinstance(error, _INTERRUPTS) else _told(error, name))
    else:
        future.set_result(answer.result())


class CallersHandle:
    """A handle to a worker whose envs are made, stepped and closed in the thread that builds this
    object.

    When that thread needs a batch, the thread calls :meth:`work`, which makes the rollouts.

    Attributes:
        running: whether a rollout is running.
        asked: the rollouts that were requested and are still incomplete, with their futures.
    """

    def __init__(self, config: WorkerConfig, name: str) -> None:
        self._name = name
        self._thread = threading.current_thread()
        self._policy = config.policy
        self.asked: deque[tuple[Future, dict[str, Any]]] = deque()
        self._ended = threading.Event()
        self._to_close: tuple[Future, bool] | None = None
        self.running = False
        self._worker: RolloutWorker = run_on_cpu(partial(RolloutWorker, config))

    def require_thread(self, what: str) -> None:
        """Raise an error unless the calling thread is the thread that steps the envs.

        Raises:
            ConfigurationError: the calling thread is not the thread that steps the envs.
        """
        if threading.current_thread() is not self._thread:
            raise ConfigurationError(
                f"{what} in thread {threading.current_thread().name!r} is not possible, because "
                f"the collector was built in thread {self._thread.name!r}, and only that thread "
                "may step and close the envs. Build and use the collector in one thread, or pass "
                "env_processes=1, so that any thread may use the collector"
            )

    def require_closable(self) -> None:
        """Raise an error if the calling thread cannot close the envs.

        Raises:
            ConfigurationError: only another thread may close the envs, and that thread is alive and
                makes no rollout.
        """
        if not self.running and self._thread.is_alive():
            self.require_thread("shutdown()")

    def moved(self, request: int) -> LocalHandle:
        """Return a new handle to the same worker, whose envs are then stepped and closed in a
        separate thread. Do not use the old handle afterwards.

        Args:
            request: the number of the next request for a rollout.

        Raises:
            ConfigurationError: the calling thread is not the thread that steps the envs, or a
                rollout is not complete.
        """
        self.require_thread("start()")
        if self.running or self.asked:
            raise ConfigurationError(
                "start() was called during a rollout; call next() until it returns the batch, "
                "then call start()"
            )
        worker, thread = self._worker, OwnThread()
        thread.submit(partial(use_one_thread_if_small, self._policy))
        return LocalHandle(
            PinnedWorker(lambda _: worker, worker.config, thread, request), self._name
        )

    def work(self, until: float) -> None:
        """Begin or continue the oldest requested rollout, at most until the clock ``awake()``
        reaches ``until``. Call this method in the thread that steps the envs."""
        future, request = self.asked[0]
        self.running = True
        self._ended.clear()
        result: Any = None
        error: BaseException | None = None
        try:
            with one_thread_if_small(self._policy):
                result = run_on_cpu(partial(self._worker.collect, **request, until=until))
        except DeadlineError as late:
            if self._worker.is_incomplete:
                return
            error = _told(late, self._name)
        except _INTERRUPTS:
            raise
        except BaseException as raised:  # including a SystemExit that an env raised
            error = _told(raised, self._name)
        finally:
            self.running = False
            self._end()
        self.asked.popleft()
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)

    def drop(self, error: BaseException) -> None:
        """Let the oldest request fail with ``error``, because its rollout was interrupted and the
        rows are lost."""
        future, _ = self.asked.popleft()
        future.set_exception(error)

    def call(self, method: str, *args: Any, timeout_s: float | None = None, **kwargs: Any) -> Any:
        """Run the method in the calling thread.

        Raises:
            DeadlineError: the method was called inside a rollout.
            ConfigurationError: the calling thread is not the thread that steps the envs.
            RemoteError: the method raised. The method's exception is the cause of this error.
        """
        self.require_thread(f"{method}()")
        if self.running:
            raise DeadlineError(
                f"{method} was called by an env, a policy or a hook inside a rollout; call "
                f"{method} between rollouts"
            )
        try:
            return run_on_cpu(partial(getattr(self._worker, method), *args, **kwargs))
        except _INTERRUPTS:
            raise
        except BaseException as error:
            raise _told(error, self._name) from error

    def submit(
        self, method: str, *args: Any, timeout_s: float | None = None, **kwargs: Any
    ) -> Future:
        future: Future = Future()
        future.set_running_or_notify_cancel()
        if method == "collect":
            self.asked.append((future, kwargs))
        elif method == "cut":
            self._worker.cut(*args, **kwargs)
            future.set_result(None)
        elif method == "close":
            self._close(future, **kwargs)
        else:
            settle(future, partial(self.call, method, *args, timeout_s=timeout_s, **kwargs))
        return future

    def _close(self, future: Future, step_limit_s: float = 10.0, close_env: bool = True) -> None:
        self._worker.stop()
        self._to_close = future, close_env
        if not self.running:
            self._end()
        elif threading.current_thread() is not self._thread:
            self._ended.wait(step_limit_s)

    def _end(self) -> None:
        """Do the work that was postponed until the end of the rollout: close the worker if this was
        requested, and wake the thread that waits until the worker is closed."""
        asked, self._to_close = self._to_close, None
        if asked is not None:
            future, close_env = asked
            try:
                self._worker.close(0.0, close_env)
            except Exception as error:
                future.set_exception(_told(error, self._name))
            else:
                future.set_result(None)
        self._ended.set()
