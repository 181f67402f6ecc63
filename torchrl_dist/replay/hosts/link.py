"""A client's interface to a replay host. Calls are local (``local_link``) or by RPC
(``remote_link``)."""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any, Protocol

import numpy as np

from torchrl_dist.errors import DeadlineError
from torchrl_dist.replay.hosts.messages import Answer, Law, Operation
from torchrl_dist.replay.law.limiter import Counts
from torchrl_dist.runtime.awake import awake

# If several calls share a deadline, the last of them gets at least this time.
SHORTEST_CALL_S = 0.05


Made = Operation | Callable[[], Operation]
"""An operation, or a function that returns it when it is sent."""

Written = Callable[[np.ndarray, np.ndarray], None]
"""A function that is called with slots and generations, int64 [n] each, of written rows."""


class Link(Protocol):
    """A client's interface to a host. Thread-safe."""

    name: str
    max_priority: float = math.nan
    """The largest priority of the buffer, as far as the link's client knows; NaN if no priority is
    known."""
    era: int = 0
    """The era of the host and of ``max_priority``, as far as the link's client knows."""
    largest: tuple[float, int] = (math.nan, 0)
    """The largest priority in the host's last reply, or NaN, and its era."""
    replies: int = 0
    """How often the host has answered."""
    answered_at: float = 0.0
    """The time of the host's last answer, by the clock ``awake()``."""
    round_trip_s: float = 0.0
    """The shortest duration of recent short calls; 0 if there was none."""

    sends_rows: bool = True
    """Whether rows are sent to another process. If so, sending fewer bytes is faster."""
    limited: bool = False
    """Whether the buffer has a rate limiter, so that every reply must have the host's state."""

    def counts(self) -> Counts | None:
        """Return the counts in the host's last reply plus the samples that were queued here since
        then. Return None before the first reply."""

    def put(
        self, operation: Made, *, size: int = 0, urgent: bool = True, written: Written | None = None
    ) -> None:
        """Queue an operation, see ``RemoteLink.put``."""

    def order(self, method: str, *args: Any, size: int = 0) -> Future[Any]:
        """Call a method of the host after all earlier operations.

        If the future is cancelled before the call is sent, the call is not made."""

    def ask(self, count: int | None, law: Law | None) -> Future[Answer | None]:
        """Draw ``count`` rows or slices after all earlier operations. If ``count`` is None, only
        wait for these operations.

        ``law`` also defines the masses in the answer. It may be None if the masses do not matter.
        """

    @property
    def waiting(self) -> int:
        """The number of operations that are queued or in flight."""

    def submit(self, method: str, *args: Any, timeout_s: float) -> Future[Any]:
        """Call a read-only method. The host may run it before earlier operations.

        After a timeout, the call may still run at the host."""

    def check_entry(self) -> None:
        """Raise DirectoryError if this is a signal handler that interrupted a use of this link.

        Other threads may wait for the interrupted use while they hold a lock that the handler
        needs."""

    def failure(self) -> Exception | None:
        """Return an error that has not been raised yet, or None."""

    @property
    def fine(self) -> bool:
        """Whether there is neither a ``failure`` nor a ``problem``."""

    @property
    def problem(self) -> Exception | None:
        """None if the host answers, otherwise the error."""

    def close(self, flush_s: float) -> None:
        """Flush and close the link.

        If operations are still queued after ``flush_s`` seconds, the link may still send them until
        the session ends."""


def await_answer(future: Future[Any], link: Link, begin: float, timeout_s: float) -> Any:
    """Return the answer to a request that was made at ``begin``, by the clock ``awake()``.

    Every answer of the host restarts the deadline of ``timeout_s``, because the host answers
    earlier requests first.

    Raises:
        DeadlineError: the host sent no answer for ``timeout_s``. If the request is still queued at
            that time, it will not be sent.
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
                continue  # too early, because ``awake`` stands still while this process is stopped
            if link.answered_at == answered_at:
                future.cancel()
                raise DeadlineError(
                    f"{link.name} did not answer within {round(timeout_s, 3):g} s; check that its "
                    "process still runs, or allow a longer timeout_s"
                ) from error
