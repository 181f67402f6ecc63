"""What a client needs of a replay host, near (``local_link``) or far (``remote_link``)."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from torchrl_dist.errors import (
    DeadlineError,
)
from torchrl_dist.replay.hosts.messages import (
    HostState,
    Law,
    Operation,
)
from torchrl_dist.replay.law.limiter import Counts
from torchrl_dist.replay.row.spec import RowSpec
from torchrl_dist.runtime.awake import awake

# The last of several calls under one deadline has at least this long.
SHORTEST_CALL_S = 0.05


Written = Callable[[np.ndarray, np.ndarray], None]
"""Called with slots and generations, int64 [n] each, once rows are written."""


@dataclass(frozen=True)
class Rows:
    """Drawn rows: int64 ``slot`` and ``generation``, float64 ``leaf``, ``tensors``: [n, ...]; with
    ``lengths``, int64 [units], slices of so many rows each, else each row is a unit of its own."""

    spec: RowSpec
    slot: torch.Tensor
    generation: torch.Tensor
    leaf: torch.Tensor
    tensors: list[torch.Tensor]
    lengths: torch.Tensor | None = None

    @property
    def units(self) -> int:
        """What was drawn, and is handed on as a whole: slices, or else rows."""
        return self.slot.numel() if self.lengths is None else self.lengths.numel()

    def _each(self, take: Callable[[torch.Tensor], torch.Tensor], lengths: Any) -> Rows:
        tensors = [take(tensor) for tensor in self.tensors]
        handles = take(self.slot), take(self.generation), take(self.leaf)
        return Rows(self.spec, *handles, tensors, lengths)

    def part(self, start: int, stop: int) -> Rows:
        """The units ``start`` to ``stop``."""
        if start == 0 and stop == self.units:
            return self
        if self.lengths is None:
            return self._each(lambda tensor: tensor[start:stop], None)
        first = int(self.lengths[:start].sum())
        lengths = self.lengths[start:stop]
        last = first + int(lengths.sum())
        return self._each(lambda tensor: tensor[first:last], lengths)

    def select(self, units: torch.Tensor) -> Rows:
        """The units of these numbers, int64 [n]."""
        if self.lengths is None:
            return self._each(lambda tensor: tensor.index_select(0, units), None)
        lengths = self.lengths[units]
        begin = (self.lengths.cumsum(0) - self.lengths)[units]
        places = (begin - lengths.cumsum(0) + lengths).repeat_interleave(lengths)
        places += torch.arange(places.numel())
        return self._each(lambda tensor: tensor.index_select(0, places), lengths)

    def per_row(self, values: torch.Tensor) -> torch.Tensor:
        """One for each unit, as one for each row."""
        return values if self.lengths is None else values.repeat_interleave(self.lengths)


@dataclass(frozen=True)
class Answer:
    """What came back for one draw: the host's state, and rows, maybe fewer, as in a ``Reply``."""

    state: HostState
    rows: Rows | None


class Link(Protocol):
    """What a client needs of a host, near or far. Thread-safe."""

    name: str
    max_priority: float
    """The largest of the buffer, as far as its client knows; NaN before any."""
    era: int
    """The host's, as far as its client knows, and of ``max_priority``; see ``HostState``."""
    replies: int
    """How often the host has answered."""
    answered_at: float
    """When it did so last, on ``awake()``."""
    round_trip_s: float
    """How long a short call to it took lately, at least; 0 before any."""

    limited: bool
    """Whether the buffer has a rate limiter, so that every reply is to tell the host's state."""

    def counts(self) -> Counts | None:
        """The host's, and what this link has counted since its last reply; None before it."""

    def put(
        self,
        operation: Operation | Callable[[], Operation],
        *,
        size: int = 0,
        urgent: bool = True,
        written: Written | None = None,
    ) -> None:
        """Hand an operation over; see ``RemoteLink.put``."""

    def order(self, method: str, *args: Any, size: int = 0) -> Future[Any]:
        """Call another method of the host, after all operations put before. A future that is
        cancelled before the call was sent leaves nothing behind."""

    def ask(self, count: int | None, law: Law | None) -> Future[Answer | None]:
        """Draw rows or slices after all operations put before; None: only wait for these.

        ``law`` also says what the masses of the answer are; None: it does not matter.
        """

    @property
    def waiting(self) -> int:
        """How many operations are queued or under way."""

    def submit(self, method: str, *args: Any, timeout_s: float) -> Future[Any]:
        """Call a method that changes nothing; in no order with the operations. One that ran out of
        time still runs."""

    def check_entry(self) -> None:
        """Raises DirectoryError in a signal handler that interrupted a use of this link: others
        may wait for that while they have a lock for which the handler would wait."""

    def failure(self) -> Exception | None:
        """An error that nobody was told yet."""

    @property
    def fine(self) -> bool:
        """Whether there is neither such an error nor a ``problem``."""

    @property
    def problem(self) -> Exception | None:
        """None if the host answers, else what is known to be wrong with it."""

    def close(self, flush_s: float) -> None:
        """Flush; no use after it. What is still queued then is sent while the session lasts."""


def await_answer(future: Future[Any], link: Link, begin: float, timeout_s: float) -> Any:
    """The result of what the link was asked at ``begin``, on ``awake()``. The deadline,
    ``timeout_s``, runs anew with every answer of the host: what was asked before comes first.

    Raises:
        DeadlineError: the host did not answer anything for so long. What it was asked is not sent
            any more if it is queued still.
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
                continue  # this process was stopped meanwhile
            if link.answered_at == answered_at:
                future.cancel()
                raise DeadlineError(
                    f"{link.name} did not answer within {round(timeout_s, 3):g} s"
                ) from error
