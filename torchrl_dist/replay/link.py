"""A client's line to one replay host: operations leave the caller at once and arrive in order.

A link has at most one call under way. What comes meanwhile is merged into the next call, so a
slow host costs the caller nothing until the queue is full, and a busy one gets few, large calls.
"""

from __future__ import annotations

import math
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import torch

from torchrl_dist.errors import DeadlineError, PeerLostError, RemoteError
from torchrl_dist.replay.directory import RowSpec
from torchrl_dist.replay.host import (
    CountSamples,
    HostState,
    Operation,
    ReplayHost,
    Reply,
    Request,
    ReturnDraws,
    Write,
)
from torchrl_dist.replay.limiter import Counts
from torchrl_dist.replay.packing import spec_from_text
from torchrl_dist.runtime import Remote

# Priorities wait this long for a draw to travel with. A learner that samples faster than that
# sends one message per batch instead of two.
_COMPANY_S = 0.02

# The last of several calls under one deadline has at least this long.
SHORTEST_CALL_S = 0.05

Written = Callable[[np.ndarray, np.ndarray], None]
"""Called with slots and generations, int64 [n] each, once rows are written."""


@dataclass(frozen=True)
class Rows:
    """Drawn rows: int64 ``slot`` and ``generation``, float64 ``leaf``, ``tensors``: [n, ...]."""

    spec: RowSpec
    slot: torch.Tensor
    generation: torch.Tensor
    leaf: torch.Tensor
    tensors: list[torch.Tensor]

    def part(self, start: int, stop: int) -> Rows:
        """The rows ``start`` to ``stop``."""
        if start == 0 and stop == self.slot.numel():
            return self
        return Rows(
            self.spec,
            self.slot[start:stop],
            self.generation[start:stop],
            self.leaf[start:stop],
            [tensor[start:stop] for tensor in self.tensors],
        )


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

    limited: bool
    """Whether the buffer has a rate limiter, so that every reply is to tell the host's state."""

    def counts(self) -> Counts | None:
        """The host's, and what this link has counted since its last reply; None before it."""

    def put(
        self,
        operation: Operation,
        *,
        size: int = 0,
        urgent: bool = True,
        written: Written | None = None,
    ) -> None:
        """Hand an operation over; see ``RemoteLink.put``."""

    def ask(self, count: int | None, prioritized: bool | None) -> Future[Answer]:
        """Draw rows after all operations put before; None: only wait for these.

        ``prioritized`` also says what the masses of the answer are; None: it does not matter.
        """

    def submit(self, method: str, *args: Any, timeout_s: float) -> Future:
        """Call another method of the host; in no order with the operations."""

    def failure(self) -> Exception | None:
        """An error that nobody was told yet."""

    @property
    def fine(self) -> bool:
        """Whether there is neither such an error nor a ``problem``."""

    @property
    def problem(self) -> Exception | None:
        """None if the host answers, else what is known to be wrong with it."""

    def close(self, flush_s: float) -> None:
        """Flush, and let the host forget this client."""


class LocalLink:
    """A host in this process, called directly: over the directory of the same node."""

    fine = True
    problem: Exception | None = None
    limited = False

    def counts(self) -> Counts:
        return self._host.storage.limiter_counts

    def __init__(self, host: ReplayHost, client: str, incarnation: int, name: str) -> None:
        self.name = name
        self.max_priority = math.nan
        self.era = 0
        self.replies = 0
        self._host = host
        self._client = client
        self._incarnation = incarnation

    def put(
        self,
        operation: Operation,
        *,
        size: int = 0,
        urgent: bool = True,
        written: Written | None = None,
    ) -> None:
        result = self._host.apply(
            operation,
            self._client,
            self._incarnation,
            max_priority=self.max_priority,
            era=self.era,
        )
        if written is not None:
            written(*result)

    def ask(self, count: int | None, prioritized: bool | None) -> Future[Answer]:
        future: Future[Answer] = Future()
        if count is None:  # operations are applied as they are put
            future.set_result(None)
            return future
        try:
            state, drawn = self._host.draw(count, bool(prioritized), self.max_priority, self.era)
            rows = None
            if drawn is not None:
                spec = self._host.storage.directory.rows
                assert spec is not None
                leaf = torch.from_numpy(drawn.leaf)
                rows = Rows(spec, drawn.index, drawn.generation, leaf, drawn.tensors)
            self.replies += 1
            future.set_result(Answer(state, rows))
        except Exception as error:
            future.set_exception(error)
        return future

    def submit(self, method: str, *args: Any, timeout_s: float) -> Future:
        future: Future = Future()
        try:
            future.set_result(getattr(self._host, method)(*args))
        except Exception as error:
            future.set_exception(error)
        return future

    def failure(self) -> Exception | None:
        return None

    def close(self, flush_s: float) -> None:
        self._host.forget(self._client)


@dataclass
class _Queued:
    operation: Operation
    size: int
    written: Written | None


@dataclass
class _Ask:
    """``count`` None: nothing is drawn, the answer says that the operations were applied."""

    count: int | None
    prioritized: bool | None
    future: Future = field(default_factory=Future)


@dataclass
class _Call:
    """A request under way, and who waits for what of it."""

    request: Request
    queued: list[_Queued]
    asks: list[_Ask]
    size: int


class _Unpacked:
    """A reply's rows, unpacked when the first of several asks wants its part."""

    def __init__(self, reply: Reply) -> None:
        self._reply = reply

    @cached_property
    def rows(self) -> Rows:
        return Rows(spec_from_text(self._reply.spec), *self._reply.unpack_rows())


class RemoteLink:
    """A host in another process.

    ``put`` and ``ask`` return at once while the queue has room. When a call got no answer in
    time, it is sent again under the same number until there is one (the host applies it once),
    and the error is kept for ``failure``. When the host is lost, everything raises PeerLostError.

    Args:
        host: a handle to a ``ReplayHost``.
        client, incarnation: see ``Request``.
        timeout_s: deadline of each call, and the longest wait for room in the queue.
        max_queued_bytes: of operations that have not been applied yet.
    """

    def __init__(
        self,
        host: Remote,
        client: str,
        incarnation: int,
        *,
        timeout_s: float,
        max_queued_bytes: int,
    ) -> None:
        self.name = str(host.peer)
        self.max_priority = math.nan
        self.era = 0
        self.limited = False
        self._state: HostState | None = None
        self._uncounted = 0  # rows of samples that the state does not have yet
        self._host = host
        self._client = client
        self._incarnation = incarnation
        self._timeout_s = timeout_s
        self._max_queued_bytes = max_queued_bytes
        lock = threading.RLock()
        self._changed = threading.Condition(lock)
        self._lonely = threading.Condition(lock)  # apart, so that few calls wake that thread
        self._queue: deque[_Queued] = deque()
        self._asks: deque[_Ask] = deque()
        self._bytes = 0  # queued and under way
        self._under_way: _Call | None = None
        self._sequence = 0
        self._errors: deque[Exception] = deque(maxlen=8)
        self._lost: PeerLostError | None = None
        self._silent: DeadlineError | None = None
        self._closed = False
        self._urgent = False
        self._company: threading.Thread | None = None
        self.replies = 0
        self.messages = 0
        self.bytes_sent = 0
        self.bytes_received = 0

    # --- the caller's side -------------------------------------------------------------------

    def put(
        self,
        operation: Operation,
        *,
        size: int = 0,
        urgent: bool = True,
        written: Written | None = None,
    ) -> None:
        """Queue an operation. Blocks only while the queue is full.

        Args:
            size: its bytes; with 0 it never waits.
            urgent: whether it goes out at once, or may wait 20 ms for a draw to travel with.
            written: called in another thread when a ``Write`` was applied.

        Raises:
            DeadlineError: there was no room within the deadline; it was not queued.
            PeerLostError: the host is gone.
        """
        with self._changed:
            self._wait_for_room(size)
            self._queue.append(_Queued(operation, size, written))
            self._bytes += size
            self._uncounted += _samples(operation)
            self._urgent |= urgent
            if not urgent and self._under_way is None and not self._urgent:
                self._await_company()
        self._pump()

    def _wait_for_room(self, size: int) -> None:
        deadline = time.monotonic() + self._timeout_s
        while size and self._bytes and self._bytes + size > self._max_queued_bytes:
            self._require_host()
            left = deadline - time.monotonic()
            if left <= 0:
                raise DeadlineError(
                    f"{self.name} has not taken {self._bytes / 2**20:.1f} MiB of queued operations "
                    f"within {self._timeout_s:g} s, so there is no room for {size} bytes more: it "
                    "is slower than this process writes, or hangs"
                )
            self._changed.wait(left)
        self._require_host()

    def _require_host(self) -> None:
        if self._lost is not None:
            raise PeerLostError(str(self._lost)) from self._lost
        if self._closed:
            raise PeerLostError(f"this client of {self.name} was closed")

    def ask(self, count: int | None, prioritized: bool | None) -> Future[Answer]:
        ask = _Ask(count, prioritized)
        with self._changed:
            self._require_host()
            self._asks.append(ask)
        self._pump()
        return ask.future

    def submit(self, method: str, *args: Any, timeout_s: float) -> Future:
        return self._host.submit(method, *args, timeout_s=timeout_s)

    def counts(self) -> Counts | None:
        with self._changed:
            state = self._state
            if state is None:
                return None
            return Counts(state.inserts, state.samples + self._uncounted, state.size)

    def failure(self) -> Exception | None:
        with self._changed:
            return self._errors.popleft() if self._errors else None

    @property
    def fine(self) -> bool:
        return not self._errors and self._lost is None and self._silent is None

    @property
    def problem(self) -> Exception | None:
        return self._lost or self._silent

    def close(self, flush_s: float) -> None:
        try:
            if self._lost is None and not self._closed:
                deadline = time.monotonic() + flush_s
                await_answer(self.ask(None, None), deadline, self.name, flush_s)
                left = max(SHORTEST_CALL_S, deadline - time.monotonic())
                self._host.call("forget", self._client, timeout_s=left)
        finally:
            with self._changed:
                self._closed = True
                self._changed.notify_all()
                self._lonely.notify()

    # --- sending -----------------------------------------------------------------------------

    def _pump(self) -> None:
        """Send what is due, if no call is under way."""
        with self._changed:
            due = self._asks or (self._queue and self._urgent)
            if self._under_way is not None or self._lost is not None or not due:
                return
            queued, self._queue = list(self._queue), deque()
            prioritized, asks = self._take_asks()
            self._urgent = False
            self._sequence += 1
            counts = [ask.count for ask in asks if ask.count is not None]
            request = Request(
                self._client,
                self._incarnation,
                self._sequence,
                tuple(each.operation for each in queued),
                draw=sum(counts) if counts else 0 if self.limited else None,
                prioritized=prioritized,
                max_priority=self.max_priority,
                era=self.era,
            )
            call = _Call(request, queued, asks, sum(each.size for each in queued))
            self._under_way = call
        self._send(call)

    def _take_asks(self) -> tuple[bool, list[_Ask]]:
        """Those that one request can answer: it draws by priority or uniformly."""
        kinds = (ask.prioritized for ask in self._asks)
        prioritized = next((kind for kind in kinds if kind is not None), False)
        asks = []
        while self._asks and self._asks[0].prioritized in (None, prioritized):
            asks.append(self._asks.popleft())
        return prioritized, asks

    def _send(self, call: _Call) -> None:
        self.messages += 1
        self.bytes_sent += call.size
        try:
            future = self._host.submit("serve", call.request, timeout_s=self._timeout_s)
        except Exception as error:  # the session of this process has ended
            future = Future()
            future.set_exception(PeerLostError(str(error)))
        future.add_done_callback(lambda done: self._arrived(call, done))

    def _arrived(self, call: _Call, future: Future) -> None:
        """Runs in a thread of the transport; does not block."""
        try:
            error = future.exception()
            if error is None:
                self._take_over(call, future.result())
            elif isinstance(error, DeadlineError):
                self._note_silence(call, error)
            elif isinstance(error, PeerLostError):
                self._note_loss(call, error)
            else:
                self._finish(call)
                self._fail(call.asks, error)
                with self._changed:
                    self._errors.append(error)
        except Exception:  # a bug; without this it would vanish with the thread's future
            traceback.print_exc()
            raise
        self._pump()

    def _take_over(self, call: _Call, reply: Reply) -> None:
        self.bytes_received += sum(tensor.nbytes for tensor in reply.packed)
        writes = [each for each in call.queued if isinstance(each.operation, Write)]
        for each, (slot, generation) in zip(writes, reply.written, strict=True):
            if each.written is not None:
                each.written(slot, generation)
        errors = [
            RemoteError(message, peer=self._host.peer.name, host=self.name, remote_traceback=trace)
            for message, trace in reply.failures
        ]
        draw_error = None
        if call.request.draw is not None and reply.state is None:
            draw_error = errors[-1]
            if any(ask.count is not None for ask in call.asks):
                errors.pop()  # they are told
        with self._changed:
            self._silent = None
            self.replies += 1
            self._state = reply.state or self._state
            self._uncounted -= sum(_samples(each.operation) for each in call.queued)
            self._errors.extend(errors)
        self._finish(call)
        self._pump()  # the host works at the next request while this reply is unpacked
        self._answer(call, reply, draw_error)

    def _answer(self, call: _Call, reply: Reply, draw_error: Exception | None) -> None:
        unpacked = _Unpacked(reply)
        start = 0
        for ask in call.asks:
            if ask.count is None:
                ask.future.set_result(None)
            elif draw_error is not None:
                ask.future.set_exception(draw_error)
            else:
                assert reply.state is not None
                count = min(ask.count, reply.count - start)
                rows = unpacked.rows.part(start, start + count) if count else None
                start += count
                ask.future.set_result(Answer(reply.state, rows))
        if self.limited and start < reply.count:  # who asked was told that the deadline has passed
            rows = unpacked.rows.part(start, reply.count)
            back = ReturnDraws(rows.slot.numpy(), rows.generation.numpy(), rows.leaf.numpy())
            with self._changed:  # without waiting for room: this is a thread of the transport
                self._queue.append(_Queued(back, 0, None))

    def _finish(self, call: _Call) -> None:
        with self._changed:
            self._under_way = None
            self._bytes -= call.size
            if self._queue and not self._urgent and not self._asks:
                self._await_company()
            self._changed.notify_all()

    def _note_silence(self, call: _Call, error: DeadlineError) -> None:
        asks, call.asks = call.asks, []  # whoever waited is told; the operations stay
        with self._changed:
            if self._silent is None:
                self._silent = error
                self._errors.append(error)
            waiting, self._asks = list(self._asks), deque()
            closed = self._closed
        self._fail(asks + waiting, error)
        if not closed:
            self._send(call)

    def _note_loss(self, call: _Call, error: PeerLostError) -> None:
        with self._changed:
            dropped = len(call.queued) + len(self._queue)
            self._lost = PeerLostError(
                f"{error}; {dropped} operations of this process were not applied, or it is not "
                "known whether they were"
                if dropped
                else str(error)
            )
            asks, self._asks = call.asks + list(self._asks), deque()
            self._queue.clear()
            self._bytes = 0
            self._under_way = None
            self._changed.notify_all()
            self._lonely.notify()
        self._fail(asks, self._lost)

    @staticmethod
    def _fail(asks: list[_Ask], error: BaseException) -> None:
        for ask in asks:
            ask.future.set_exception(error)

    # --- company -----------------------------------------------------------------------------

    def _await_company(self) -> None:
        """Called under the condition: make sure that what is queued goes out before long."""
        if self._company is None:
            self._company = threading.Thread(
                target=self._send_lone, name="torchrl_dist-replay", daemon=True
            )
            self._company.start()
        self._lonely.notify()

    def _send_lone(self) -> None:
        while True:
            with self._lonely:
                while not (self._queue and self._under_way is None):
                    if self._closed or self._lost is not None:
                        return
                    self._lonely.wait()
                before = self._sequence
            time.sleep(_COMPANY_S)
            with self._changed:
                self._urgent |= bool(self._queue) and self._sequence == before
            self._pump()


def _samples(operation: Operation) -> int:
    return operation.rows if isinstance(operation, CountSamples) else 0


def await_answer(future: Future, deadline: float, name: str, timeout_s: float) -> Any:
    """The future's result before ``deadline``, in ``time.monotonic()``, ``timeout_s`` after the
    call began.

    Raises:
        DeadlineError: it did not come.
    """
    try:
        return future.result(max(0.0, deadline - time.monotonic()))
    except FutureTimeoutError as error:
        if future.done():
            raise
        raise DeadlineError(f"{name} did not answer within {timeout_s:g} s") from error
