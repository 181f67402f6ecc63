"""Collect in a separate thread while the caller learns from the replay buffer."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from torchrl_dist.errors import DeadlineError
from torchrl_dist.forks import renewed


class Collecting(Protocol):
    def next(self) -> Any:
        """Block until the next batch is complete. Return None after the last batch."""


class Background:
    """Request one batch after another, until there are no more batches, a request raises an error,
    or :meth:`stop` is called.

    This object has only a weak reference to the collector, so it does not keep the collector alive.
    """

    def __init__(self, collector: Collecting) -> None:
        self._cond = renewed(self, "_cond", threading.Condition)
        self._paused = 0
        self._busy = False
        self._stopped = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(
            target=self._run,
            args=(weakref.ref(collector),),
            name="torchrl_dist-collect",
            daemon=True,
        )
        self._thread.start()

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    def _run(self, find: Callable[[], Collecting | None]) -> None:
        try:
            while self._begin():
                collector = find()
                if collector is None or collector.next() is None:
                    return
                del collector
                self._end()
        except BaseException as error:
            if self._stopped:  # the collector is being shut down
                return
            self._error = error
            raise  # Python prints the error even if the caller never calls raise_error()
        finally:
            self._end()

    def _begin(self) -> bool:
        with self._cond:
            self._cond.wait_for(lambda: self._stopped or not self._paused)
            self._busy = not self._stopped
            return self._busy

    def _end(self) -> None:
        with self._cond:
            self._busy = False
            self._cond.notify_all()

    @contextlib.contextmanager
    def between_batches(self, timeout_s: float) -> Iterator[None]:
        """Wait until the current batch is complete. Inside the ``with`` block, no other batch
        begins.

        Raises:
            DeadlineError: the current batch was not complete within ``timeout_s`` seconds.
            Exception: the exception with which collection has ended.
        """
        with self._cond:
            self._paused += 1
        try:
            with self._cond:
                if not self._cond.wait_for(lambda: not self._busy, timeout_s):
                    raise DeadlineError(
                        f"the current batch did not end within {timeout_s:g} s; "
                        "try again later, or raise timeout_s= of the collector"
                    )
            self.raise_error()
            yield
        finally:
            with self._cond:
                self._paused -= 1
                self._cond.notify_all()

    def stop(self) -> None:
        """Request no more batches. This method does not block. A call in the collecting thread has
        no effect, because that thread calls this method only after a failure, which ends collection
        anyway."""
        if threading.current_thread() is self._thread:
            return
        with self._cond:
            self._stopped = True
            self._cond.notify_all()

    def stopper(self) -> Callable[[bool], None]:
        """Return a function that calls :meth:`stop` and does not keep this object alive.

        Call that function before closing objects that collection needs. If closing these objects
        makes collection fail, the failure is then not reported.
        """
        find = weakref.ref(self)

        def stop(clean: bool) -> None:
            if (background := find()) is not None:
                background.stop()

        return stop

    def join(self, timeout_s: float) -> None:
        if threading.current_thread() is not self._thread:
            self._thread.join(max(0.0, timeout_s))

    def raise_error(self) -> None:
        """If collection ended with an exception, raise this exception, but only once."""
        error, self._error = self._error, None
        if error is not None:
            raise error
