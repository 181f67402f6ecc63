"""A link that calls a host in this process, which uses a directory of this node."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from torchrl_dist.replay.hosts.host import ReplayHost
from torchrl_dist.replay.hosts.link import Link, Made, Written
from torchrl_dist.replay.hosts.messages import UNIFORM, Answer, Law
from torchrl_dist.replay.law.limiter import Counts


class LocalLink(Link):
    """Calls a host in this process. The host uses a directory of this node."""

    fine = True
    sends_rows = False
    problem = None
    waiting = 0

    def __init__(self, host: ReplayHost, name: str) -> None:
        self.name = name
        self._host = host

    def counts(self) -> Counts:
        return self._host.storage.limiter_counts

    def put(
        self, operation: Made, *, size: int = 0, urgent: bool = True, written: Written | None = None
    ) -> None:
        if callable(operation):
            operation = operation()
        self._host.raise_max_priority(self.max_priority, self.era)
        result = self._host.apply(operation)
        self.largest = self._host.largest_priority()
        if written is not None:
            written(*result)

    def order(self, method: str, *args: Any, size: int = 0) -> Future[Any]:
        return self.submit(method, *args, timeout_s=0)

    def ask(self, count: int | None, law: Law | None) -> Future[Answer | None]:
        if count is None:  # operations are applied immediately
            return _done(lambda: None)

        def draw() -> Answer:
            self._host.raise_max_priority(self.max_priority, self.era)
            answer = self._host.draw(count, law or UNIFORM)
            self.replies += 1
            return Answer(*answer)

        return _done(draw)

    def submit(self, method: str, *args: Any, timeout_s: float) -> Future[Any]:
        return _done(lambda: getattr(self._host, method)(*args))

    def check_entry(self) -> None:
        self._host.storage.check_entry()

    def failure(self) -> Exception | None:
        return None

    def close(self, flush_s: float) -> None:
        """Close the storage, which was opened for this link, and release its memory.

        No operations are queued, because they are applied immediately."""
        host = self.__dict__.pop("_host", None)
        if host is not None:
            host.close()


def _done(call: Callable[[], Any]) -> Future[Any]:
    """Return a future that has the result of ``call()``, or its exception."""
    future: Future[Any] = Future()
    try:
        future.set_result(call())
    except Exception as error:
        future.set_exception(error)
    return future
