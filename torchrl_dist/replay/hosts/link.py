"""A client's interface to a replay host, near (``local_link``) or far (``remote_link``)."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any, Protocol

import numpy as np

from torchrl_dist.errors import (
    DeadlineError,
)
from torchrl_dist.replay.hosts.messages import (
    Answer,
    Law,
    Operation,
)
from torchrl_dist.replay.law.limiter import Counts
from torchrl_dist.runtime.awake import awake

# The least time for the last of several calls under one deadline.
SHORTEST_CALL_S = 0.05


Written = Callable[[np.ndarray, np.ndarray], None]
"""A function that is called with slots and generations, int64 [n] each, of written rows."""


class Link(Protocol):
    """A client's interface to a host, near or far. Thread-safe."""

    name: str
    max_priority: float
    """The largest priority of the buffer, as far as its client knows; NaN before the first."""
    era: int
    """The eras of the host and of ``max_priority``, as far as its client knows."""
    replies: int
    """How often the host has answered."""
    answered_at: float
    """The time of its last answer, on ``awake()``."""
    round_trip_s: float
    """The shortest duration of recent short calls; 0 before the first."""

    limited: bool
    """Whether the buffer has a rate limiter, so that every reply must have the host's state."""

    def counts(self) -> Counts | None:
        """The host's counts, plus this link's since its last reply; None before the first reply."""

    def put(
        self,
        operation: Operation | Callable[[], Operation],
        *,
        size: int = 0,
        urgent: bool = True,
        written: Written | None = None,
    ) -> None:
        """Queue an operation, see ``RemoteLink.put``."""

    def order(self, method: str, *args: Any, size: int = 0) -> Future[Any]:
        """Call another method of the host, after all earlier operations.

        A future that is cancelled before the call was sent has no effect."""

    def ask(self, count: int | None, law: Law | None) -> Future[Answer | None]:
        """Draw rows or slices after all earlier operations; with None, only wait for these.

        ``law`` also defines the masses of the answer; None if they do not matter.
        """

    @property
    def waiting(self) -> int:
        """The number of operations that are queued or in flight."""

    def submit(self, method: str, *args: Any, timeout_s: float) -> Future[Any]:
        """Call a method that changes nothing, in no order with the operations.

        A call that timed out still runs at the host."""

    def check_entry(self) -> None:
        """Raise DirectoryError in a signal handler that interrupted a use of this link.

        Other threads may wait for the interrupted use while they hold a lock that the handler would
        wait for."""

    def failure(self) -> Exception | None:
        """An error that has not been raised yet, or None."""

    @property
    def fine(self) -> bool:
        """Whether there is neither a ``failure`` nor a ``problem``."""

    @property
    def problem(self) -> Exception | None:
        """None if the host answers, otherwise the error."""

    def close(self, flush_s: float) -> None:
        """Flush. The link cannot be used afterwards.

        Operations that are still queued then are sent while the session lasts."""


def await_answer(future: Future[Any], link: Link, begin: float, timeout_s: float) -> Any:
    """Return the answer to a request that was made at ``begin``, on ``awake()``.

    The deadline, ``timeout_s``, restarts with every answer of the host, because earlier requests
    come first.

    Raises:
        DeadlineError: the host did not answer anything for that long. If the request is still
            queued, it will not be sent.
    """
    while True:
        answered_at = link.answered_at
        deadline = max(begin, answered_at) + timeout_s
        try:
            return future.result(max(0.0, deadline - awake()))
        except FutureTimeoutError as error:
            if future.done() and not future.cancelled():
                raise
            if awake() < deadline:
                continue  # this process was stopped in between
            if link.answered_at == answered_at:
                future.cancel()
                raise DeadlineError(
                    f"{link.name} did not answer within {round(timeout_s, 3):g} s"
                ) from error
