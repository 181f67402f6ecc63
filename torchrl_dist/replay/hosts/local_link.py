"""A link that calls a host in this process, which uses a directory of this node."""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from torchrl_dist.replay.hosts.host import ReplayHost
from torchrl_dist.replay.hosts.link import Written
from torchrl_dist.replay.hosts.messages import (
    UNIFORM,
    Answer,
    Law,
    Operation,
)
from torchrl_dist.replay.law.limiter import Counts


class LocalLink:
    """Calls a host in this process, which uses a directory of this node."""

    fine = True
    problem: Exception | None = None
    sends_rows = False
    limited = False
    waiting = 0
    round_trip_s = 0.0

    def counts(self) -> Counts:
        return self._host.storage.limiter_counts

    def __init__(self, host: ReplayHost, name: str) -> None:
        self.name = name
        self.max_priority = math.nan
        self.era = 0
        self.replies = 0
        self.answered_at = 0.0
        self._host = host

    def put(
        self,
        operation: Operation | Callable[[], Operation],
        *,
        size: int = 0,
        urgent: bool = True,
        written: Written | None = None,
    ) -> None:
        if callable(operation):
            operation = operation()
        result = self._host.apply(operation, max_priority=self.max_priority, era=self.era)
        if written is not None:
            written(*result)

    def order(self, method: str, *args: Any, size: int = 0) -> Future[Any]:
        return self.submit(method, *args, timeout_s=0)

    def ask(self, count: int | None, law: Law | None) -> Future[Answer | None]:
        future: Future[Answer | None] = Future()
        if count is None:  # operations are applied immediately
            future.set_result(None)
            return future
        try:
            state, drawn = self._host.draw(count, law or UNIFORM, self.max_priority, self.era)
            self.replies += 1
            future.set_result(Answer(state, drawn))
        except Exception as error:
            future.set_exception(error)
        return future

    def submit(self, method: str, *args: Any, timeout_s: float) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(getattr(self._host, method)(*args))
        except Exception as error:
            future.set_exception(error)
        return future

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
