"""A client's link to one replay host by RPC. Callers queue operations, and the host gets them in
order.

A link has at most one call in flight. This call has no timeout: it ends with the host's answer, or
when the session knows that the host is lost. It is never repeated, so its operations are applied
once, no matter how long the host was stopped. A caller that waits has a deadline, and every answer
of the host restarts this deadline.

Operations that come during a call are queued, and small operations are merged. A busy host
therefore gets fewer and larger calls. The link limits the size of a call, so that the host needs
only a part of the deadline for the call. Threads of the transport and of the link make the calls.
An exception that a signal handler raises in the main thread therefore leaves no call incomplete.
"""

from __future__ import annotations

import math
import threading
import traceback
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from torchrl_dist.errors import (
    ConfigurationError,
    DeadlineError,
    DirectoryError,
    PeerLostError,
    RemoteError,
)
from torchrl_dist.forks import now_and_in_children
from torchrl_dist.replay.hosts.link import Link, Made, Written, await_answer
from torchrl_dist.replay.hosts.merging import merged
from torchrl_dist.replay.hosts.messages import (
    UNIFORM,
    Answer,
    CountSamples,
    Failure,
    HostState,
    Invoke,
    Law,
    Operation,
    Reply,
    Request,
    Write,
)
from torchrl_dist.replay.law.limiter import Counts
from torchrl_dist.runtime import Remote
from torchrl_dist.runtime.awake import awake

# Priorities wait this long for a draw, so that one message carries both. A learner that samples at
# least this often sends one message per batch instead of two.
_COMPANY_S = 0.02

# The maximum number of operations in one request. A large operation counts once per 32 KiB. A
# request is therefore limited to about 16 MiB, unless a single operation is larger. The host needs
# about 100 us per counted operation, that is, a twentieth of a second for a full request.
_MOST_OPERATIONS = 512
_BYTES_PER_OPERATION = 2**15
# The maximum number of operations in the first request. The first request is small, because the
# connection may be slow.
_FIRST_OPERATIONS = 8
# A fraction of the deadline. After a call that takes longer than this fraction, the next calls are
# smaller.
_LONG_CALL = 0.25
# Calls of at most this many bytes measure the round trip. The fastest of the last ``_LATELY`` such
# calls counts, because slower calls had to wait for the host or the connection.
_SHORT_CALL_BYTES = 2**14
_LATELY = 16


@dataclass
class _Queued:
    """An entry of the queue: an operation or, if ``operation`` is None, a request for rows.

    Only a ``Write`` may have ``written``. An ``Invoke`` may have a ``future``, and a request for
    rows always has a ``future``. A request whose ``count`` is None only waits for earlier
    operations."""

    operation: Made | None = None
    size: int = 0
    written: Written | None = None
    future: Future[Any] | None = None
    count: int | None = None
    law: Law | None = None

    @property
    def cost(self) -> int:
        return max(1, self.size // _BYTES_PER_OPERATION)

    def made(self) -> Operation:
        """Return the operation."""
        assert self.operation is not None
        return self.operation() if callable(self.operation) else self.operation

    def start(self) -> bool:
        """Return False if the entry was cancelled. Otherwise return True, and the entry can no
        longer be cancelled."""
        future = self.future
        return future is None or future.running() or future.set_running_or_notify_cancel()


@dataclass
class _Call:
    """The call in flight, with the queue entries that its reply completes: operations, and requests
    for rows."""

    queued: list[_Queued]
    asks: list[_Queued]
    law: Law
    draw: int | None
    sent_at: float
    merged: list[tuple[Operation, int]] = field(default_factory=list)
    """The operations that are sent, each with the number of entries of ``queued`` that it
    replaces."""

    @property
    def size(self) -> int:
        return sum(each.size for each in self.queued)


class RemoteLink(Link):
    """A link to a host in another process.

    ``put``, ``order`` and ``ask`` do not wait while the queue has room. If the host answers late,
    no operation is lost. Once the host itself is lost, all calls raise PeerLostError.

    Args:
        host: a handle to a ``ReplayHost``.
        timeout_s: if the host does not answer within this time, it counts as silent (see
            ``problem``), and callers that wait for room in the queue get an error.
        max_queued_bytes: the most bytes of operations that are queued or in flight.
        merged_rows: the most rows of a merged ``Write``, see ``merging``.
    """

    def __init__(
        self, host: Remote[Any], *, timeout_s: float, max_queued_bytes: int, merged_rows: int
    ) -> None:
        self.name = str(host.peer)
        self._state: HostState | None = None
        self._uncounted = 0  # sampled rows that ``_state`` does not count yet
        self._host = host
        self._timeout_s = timeout_s
        self._max_queued_bytes = max_queued_bytes
        self._merged_rows = merged_rows
        self._queue: deque[_Queued] = deque()
        self._bytes = 0  # queued and in flight
        # callers that wait for room, in order of arrival, so that each gets its turn
        self._line: deque[object] = deque()
        self._under_way: _Call | None = None
        self._most = _FIRST_OPERATIONS
        self._since: float | None = None
        """When the current wait for the host began; None if nothing is queued or in flight."""
        self._due = False  # whether to send the queue now
        self._errors: deque[Exception] = deque(maxlen=8)
        self._lost: PeerLostError | None = None
        self._closed = False
        self._sender: threading.Thread | None = None
        self._short_calls: deque[float] = deque(maxlen=_LATELY)
        self.messages = 0
        self.bytes_sent = 0
        self.bytes_received = 0
        now_and_in_children(self, RemoteLink._renew)

    def _renew(self) -> None:
        # ``with`` statements must use the lock itself, not a condition. With a condition, a signal
        # handler could raise an exception after the lock is taken and before the block that
        # releases it begins.
        self._lock = threading.RLock()
        self._room = threading.Condition(self._lock)
        self._work = threading.Condition(self._lock)

    # --- the caller's side -------------------------------------------------------------------

    def put(
        self, operation: Made, *, size: int = 0, urgent: bool = True, written: Written | None = None
    ) -> None:
        """Queue an operation. Blocks only while the queue is full.

        Args:
            operation: the operation, or a function that returns it. The link calls the function
                when all earlier operations have been answered or are in the same message.
            size: the operation's bytes. With 0, ``put`` never waits for room.
            urgent: whether to send the operation immediately. Otherwise the operation may wait 20
                ms, to be sent together with a draw.
            written: called in another thread when a ``Write`` has been applied.

        Raises:
            DeadlineError: the queue had no room, and the host did not answer within the deadline.
                The operation was not queued.
            PeerLostError: the host is lost.
        """
        with self._lock:
            self._wait_for_room(size)
            self._uncounted += _samples(operation)
            self._add(_Queued(operation, size, written), urgent)

    def order(self, method: str, *args: Any, size: int = 0) -> Future[Any]:
        future: Future[Any] = Future()
        with self._lock:
            self._wait_for_room(size)
            self._add(_Queued(Invoke(method, args), size, None, future), True)
        return future

    def ask(self, count: int | None, law: Law | None) -> Future[Answer | None]:
        future: Future[Answer | None] = Future()
        with self._lock:
            self._require_host()
            self._add(_Queued(future=future, count=count, law=law), True)
        return future

    def _add(self, item: _Queued, urgent: bool) -> None:
        self._bytes += item.size
        self._due |= urgent
        if self._since is None:
            self._since = awake()
        first = not self._queue
        self._queue.append(item)
        if self._sender is None:
            sender = threading.Thread(
                target=self._send_all, name="torchrl_dist-replay", daemon=True
            )
            sender.start()
            self._sender = sender
        if self._under_way is None and (urgent or first):
            self._work.notify()

    def _wait_for_room(self, size: int) -> None:
        self._require_host()
        if not size or not (self._line or self._is_full(size)):
            return
        turn, begin = object(), awake()
        self._line.append(turn)
        try:
            while self._line[0] is not turn or self._is_full(size):
                left = max(begin, self.answered_at) + self._timeout_s - awake()
                if left <= 0:
                    raise DeadlineError(
                        f"{self.name} has not taken any of {self._bytes / 2**20:.1f} MiB of queued "
                        f"operations within {self._timeout_s:g} s, so there is no room for {size} "
                        "more bytes; check whether the host's process hangs, or cannot be reached"
                    )
                self._room.wait(left)
                self._require_host()
        finally:
            self._line.remove(turn)
            self._room.notify_all()

    def _is_full(self, size: int) -> bool:
        return self._bytes > 0 and self._bytes + size > self._max_queued_bytes

    def _require_host(self) -> None:
        if self._lost is not None:
            raise PeerLostError(str(self._lost)) from self._lost
        if self._closed:
            raise PeerLostError(f"this client of {self.name} was closed; build the buffer again")

    @property
    def waiting(self) -> int:
        with self._lock:
            queued = [] if self._under_way is None else self._under_way.queued
            return len(queued) + sum(each.operation is not None for each in self._queue)

    def submit(self, method: str, *args: Any, timeout_s: float) -> Future[Any]:
        return self._host.submit(method, *args, timeout_s=timeout_s)

    def counts(self) -> Counts | None:
        with self._lock:
            state = self._state
            if state is None:
                return None
            return Counts(state.inserts, state.samples + self._uncounted, state.size)

    def check_entry(self) -> None:
        if self._lock._is_owned():  # type: ignore[attr-defined]  # not in typeshed
            raise DirectoryError(
                "a signal handler that interrupted a use of the buffer cannot use the buffer. "
                "Have the handler only set a flag, and act on the flag between two uses of the "
                "buffer"
            )

    def failure(self) -> Exception | None:
        with self._lock:
            return self._errors.popleft() if self._errors else None

    @property
    def fine(self) -> bool:
        return not self._errors and self._lost is None and not self._is_silent()

    @property
    def problem(self) -> Exception | None:
        """The error if the host is lost or silent, otherwise None. A silent host has not answered
        within the deadline, but may still answer."""
        if self._lost is None and self._is_silent():
            return DeadlineError(
                f"{self.name} did not answer within {self._timeout_s:g} s; check that its process "
                "still runs, or allow a longer timeout_s"
            )
        return self._lost

    def _is_silent(self) -> bool:
        since = self._since
        return since is not None and awake() - since > self._timeout_s

    def close(self, flush_s: float) -> None:
        with self._lock:
            if self._lost is not None or self._closed:
                return
            asked = self.ask(None, None)
            asked.set_running_or_notify_cancel()  # so that a timeout cannot cancel the call
            self._closed = True
            self._room.notify_all()
        await_answer(asked, self, awake(), flush_s)

    # --- sending -----------------------------------------------------------------------------

    def _send_all(self) -> None:
        """Send requests, in the link's thread, until the link is closed or the host is lost."""
        while True:
            with self._lock:
                while (wait_s := self._wait_s()) is None or wait_s > 0:
                    if self._lost is not None or (self._closed and not self._queue):
                        return
                    self._work.wait(wait_s)
            self._pump()

    def _wait_s(self) -> float | None:
        """Return the seconds until the queue must be sent. Return None if the queue is empty, a
        call is in flight, or the host is lost."""
        if self._under_way is not None or not self._queue or self._lost is not None:
            return None
        if self._due:
            return 0.0
        assert self._since is not None
        return max(0.0, self._since + _COMPANY_S - awake())

    def _pump(self) -> None:
        """Send the due part of the queue, if no call is in flight."""
        with self._lock:
            wait_s = self._wait_s()
            if wait_s is None or wait_s > 0:
                if self._queue and self._under_way is None:
                    self._work.notify()  # the link's thread then sends at the right time
                return
            call = self._take()
            if call is None:
                return
            self._under_way = call
        self._send(call)

    def _take(self) -> _Call | None:
        """Take as much from the head of the queue as one request may hold. A request holds draws of
        only one law, so a draw of another law stays in the queue for the next request."""
        queued: list[_Queued] = []
        asks: list[_Queued] = []
        law, left = None, self._most
        while self._queue and left > 0:
            item = self._queue[0]
            if law is not None and item.law not in (None, law):
                break
            if queued and item.cost > left:
                break
            if item.start():
                law = law or item.law
                if item.operation is None:
                    asks.append(item)
                else:
                    queued.append(item)
                left -= item.cost
            else:
                self._bytes -= item.size
                self._room.notify_all()
            self._queue.popleft()
        if not self._queue:
            self._due = False
            # summed anew, because an exception may have interrupted ``_add`` after it had
            # increased the sum
            self._bytes = sum(each.size for each in queued)
        if not queued and not asks:  # all of them were cancelled
            self._since = None
            return None
        counts = [ask.count for ask in asks if ask.count is not None]
        draw = sum(counts) if counts else 0 if self.limited else None
        return _Call(queued, asks, law or UNIFORM, draw, awake())

    def _send(self, call: _Call) -> None:
        try:
            operations = [each.made() for each in call.queued]
            call.merged = merged(operations, self._merged_rows)
            request = Request(
                tuple(operation for operation, _ in call.merged),
                draw=call.draw,
                law=call.law,
                max_priority=self.max_priority,
                era=self.era,
            )
            self.messages += 1
            self.bytes_sent += call.size
            future = self._serve(request)
        except Exception as error:  # for example, an argument cannot be sent
            future = Future()
            future.set_exception(error)
        future.add_done_callback(lambda done: self._arrived(call, done))

    def _serve(self, request: Request) -> Future[Any]:
        try:
            return self._host.submit("serve", request, timeout_s=math.inf)
        except ConfigurationError as error:  # the session of this process has ended
            raise PeerLostError(str(error)) from error

    def _arrived(self, call: _Call, future: Future[Any]) -> None:
        """Handle a reply, in a thread of the transport. Does not block."""
        try:
            error = future.exception()
            if error is None:
                self._take_over(call, future.result())
            elif isinstance(error, PeerLostError):
                self._note_loss(call, error)
            else:
                self._note_refusal(call, error)
        except Exception as error:  # a bug, which the future would hide
            traceback.print_exc()
            self._note_refusal(call, error)
            raise
        self._pump()

    def _take_over(self, call: _Call, reply: Reply) -> None:
        received = sum(tensor.nbytes for tensor in reply.packed)
        self.bytes_received += received
        if call.size + received <= _SHORT_CALL_BYTES:
            self._short_calls.append(awake() - call.sent_at)
            self.round_trip_s = min(self._short_calls)
        told = self._hand_out(call, reply)
        untold = [each for each in reply.failures if each.position not in told]
        draw_error = None
        if reply.draw_failure is not None:
            draw_error = self._as_error(reply.draw_failure)
            if not any(ask.count is not None for ask in call.asks):
                untold.append(reply.draw_failure)
        with self._lock:
            self.replies += 1
            self.largest = reply.largest
            self._state = reply.state or self._state
            self._uncounted -= sum(_samples(each.operation) for each in call.queued)
            self._errors.extend(map(self._as_error, untold))
        self._finish(call)
        self._pump()  # the host works on the next request while this process unpacks this reply
        self._answer(call, reply, draw_error)

    def _as_error(self, failure: Failure) -> RemoteError:
        return RemoteError(
            failure.message,
            peer=self._host.peer.name,
            host=self.name,
            remote_traceback=failure.trace,
        )

    def _hand_out(self, call: _Call, reply: Reply) -> set[int]:
        """Give results and failures to the callers that wait for them. Return the positions of
        the operations for which a caller waits."""
        failures = {failure.position: failure for failure in reply.failures}
        told = set()
        queued, written, results = iter(call.queued), iter(reply.written), iter(reply.results)
        for position, (operation, parts) in enumerate(call.merged):
            whose = [next(queued) for _ in range(parts)]
            if isinstance(operation, Write):
                slot, generation = next(written)
                start = 0
                for each, (_, count) in zip(whose, operation.parts, strict=True):
                    if each.written is not None:
                        stop = start + count
                        each.written(slot[start:stop], generation[start:stop])
                    start += count
            elif isinstance(operation, Invoke):
                result, failure, future = next(results), failures.get(position), whose[0].future
                if future is None:
                    continue
                told.add(position)
                if failure is None:
                    future.set_result(result)
                else:
                    future.set_exception(self._as_error(failure))
        return told

    def _answer(self, call: _Call, reply: Reply, draw_error: Exception | None) -> None:
        start = 0
        for ask in call.asks:
            future = ask.future
            assert future is not None
            if ask.count is None:
                future.set_result(None)
            elif draw_error is not None:
                future.set_exception(draw_error)
            else:
                assert reply.state is not None
                count = min(ask.count, reply.count - start)
                rows = reply.rows.part(start, start + count) if count else None
                start += count
                future.set_result(Answer(reply.state, rows))

    def _finish(self, call: _Call) -> None:
        with self._lock:
            if self._under_way is not call:
                return
            now = awake()
            took = now - call.sent_at
            if took > _LONG_CALL * self._timeout_s:
                self._most = max(1, self._most // 2)
            elif took < _LONG_CALL / 2 * self._timeout_s:
                self._most = min(_MOST_OPERATIONS, 2 * self._most)
            self.answered_at = now
            self._under_way = None
            self._since = now if self._queue else None
            self._bytes -= call.size
            self._room.notify_all()
            if self._closed:
                self._work.notify()

    def _note_refusal(self, call: _Call, error: BaseException) -> None:
        """Handle the error of a request that could not be sent, or that the host could not read."""
        self._finish(call)
        # A caller that waits gets the error from its future. If no caller waits for an operation,
        # the next call raises the error.
        untold = any(each.future is None for each in call.queued) or not (call.queued or call.asks)
        with self._lock:
            if isinstance(error, Exception) and untold:
                self._errors.append(error)
        self._fail([*call.asks, *call.queued], error)

    def _note_loss(self, call: _Call, error: PeerLostError) -> None:
        with self._lock:
            rest = [*call.asks, *call.queued, *self._queue]
            queued = [each for each in rest if each.operation is not None]
            self._lost = PeerLostError(
                f"{error}; {len(queued)} operations of this process were not applied, or it is "
                "not known whether the host applied them"
                if queued
                else str(error)
            )
            self._queue.clear()
            self._bytes = 0
            self._under_way = None
            self._since = None
            self._room.notify_all()
            self._work.notify()
        self._fail(rest, self._lost)

    @staticmethod
    def _fail(waiting: list[_Queued], error: BaseException) -> None:
        for each in waiting:
            if each.written is not None and isinstance(each.operation, Write):
                lost = np.full(each.operation.count, -1, dtype=np.int64)
                each.written(lost, lost)
        for each in waiting:
            future = each.future
            if future is not None and not future.done() and each.start():
                future.set_exception(error)


def _samples(operation: Made | None) -> int:
    return operation.rows if isinstance(operation, CountSamples) else 0
