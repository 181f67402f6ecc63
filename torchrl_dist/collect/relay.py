"""Env processes that get their actions from the learner through their node worker.

A message between nodes costs half a millisecond whatever it carries. The node worker therefore
sends the observations of all processes that wait at that moment in one message, and so many more
gather while it is under way as the learner is slow.
"""

from __future__ import annotations

import contextlib
import math
import os
import pickle
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from multiprocessing.connection import Connection

import numpy as np
import torch

from torchrl_dist.collect.groups import Inference
from torchrl_dist.collect.rollout import Values
from torchrl_dist.collect.spaces import Key
from torchrl_dist.errors import DeadlineError, PeerLostError

# With a second message under way, its requests need not wait for the first one's answer.
_MAX_IN_FLIGHT = 2

Arrays = dict[Key, np.ndarray]


@dataclass(frozen=True)
class Question:
    """A process wants to know what the policy makes of these observations."""

    number: int
    values: Arrays


class NodeLearner:
    """The learner as an env process sees it: the other end of its connection.

    Used by one thread, which has no other use for the connection while an answer is missing.

    Args:
        beat: called every ``beat_s`` seconds (None: never) while an answer is awaited, so that who
            waits can be told from who hangs.
    """

    def __init__(
        self,
        connection: Connection,
        beat: Callable[[], None] = lambda: None,
        beat_s: float | None = None,
    ) -> None:
        self._connection = connection
        self._beat, self._beat_s = beat, math.inf if beat_s is None else beat_s
        self._asked = 0
        self._answers: dict[int, Arrays | BaseException] = {}

    def submit(
        self, method: str, values: Values, limit_s: float, *, timeout_s: float | None = None
    ) -> NodeAnswer:
        """As ``Remote.submit``."""
        number = self._asked
        self._asked += 1
        question = Question(number, {key: value.numpy() for key, value in values.items()})
        self._connection.send_bytes(pickle.dumps((True, question)))
        return NodeAnswer(self, number)

    def wait_for(self, number: int, timeout_s: float) -> Values:
        """Block for the answer to that question."""
        deadline = time.monotonic() + timeout_s
        while number not in self._answers:
            left_s = deadline - time.monotonic()
            if self._connection.poll(max(0.0, min(left_s, self._beat_s))):
                _, answered, content = pickle.loads(self._connection.recv_bytes())
                self._answers[answered] = content
            elif left_s <= 0:
                raise DeadlineError(f"the node worker had no actions within {timeout_s:g} s")
            else:
                self._beat()
        answer = self._answers.pop(number)
        if isinstance(answer, BaseException):
            raise answer
        return {key: torch.from_numpy(array) for key, array in answer.items()}


@dataclass(frozen=True)
class NodeAnswer:
    learner: NodeLearner
    number: int

    def result(self, timeout: float) -> Values:
        return self.learner.wait_for(self.number, timeout)


_Asked = tuple[Connection, Question]


def is_late_answer(method: object) -> bool:
    """Whether a message that a process gets between two calls is for a rollout that has failed."""
    return method is None


class Relay:
    """The node worker's side. ``fileno`` is readable when answers have come; everything else is
    called by the thread that reads and writes the processes' connections."""

    def __init__(self, inference: Inference) -> None:
        self._inference = inference
        self._event = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._lock = threading.Lock()  # between ``close`` and a thread of the transport
        self._waiting: list[_Asked] = []
        self._answers: deque[tuple[list[_Asked], Future]] = deque()
        self._in_flight = 0

    def fileno(self) -> int:
        return self._event

    def ask(self, connection: Connection, question: Question) -> None:
        """To be sent by the next ``flush``; the answer goes to the connection, if it is open."""
        self._waiting.append((connection, question))

    def flush(self) -> None:
        """Send what waits, if the messages under way allow it; does not block."""
        if not self._waiting or self._in_flight >= _MAX_IN_FLIGHT:
            return
        asked, self._waiting = self._waiting, []
        arrays = [question.values for _, question in asked]
        values = {
            key: torch.from_numpy(np.concatenate([array[key] for array in arrays]))
            for key in arrays[0]
        }
        limit_s = self._inference.timeout_s
        self._in_flight += 1
        future = self._inference.learner.submit("infer", values, limit_s, timeout_s=limit_s)
        future.add_done_callback(lambda done: self._arrived(asked, done))

    def _arrived(self, asked: list[_Asked], done: Future) -> None:
        self._answers.append((asked, done))
        with self._lock:
            if self._event >= 0:
                os.eventfd_write(self._event, 1)

    def deliver(self) -> None:
        """Pass on the answers that have come."""
        os.eventfd_read(self._event)
        while self._answers:
            asked, done = self._answers.popleft()
            self._in_flight -= 1
            error = done.exception()
            outputs = {} if error else {k: v.numpy() for k, v in done.result().items()}
            first = 0
            for connection, question in asked:
                rows = len(next(iter(question.values.values())))
                part = {key: array[first : first + rows] for key, array in outputs.items()}
                first += rows
                if not connection.closed:  # else its process was replaced meanwhile
                    _tell(connection, question.number, error or part)

    def close(self) -> None:
        """Nothing is asked or delivered any more; idempotent."""
        with self._lock:
            event, self._event = self._event, -1
        if event >= 0:
            os.close(event)


def _tell(connection: Connection, number: int, content: Arrays | BaseException) -> None:
    try:
        message = pickle.dumps((None, number, content))
    except Exception as error:  # of a cause that does not pickle
        message = pickle.dumps((None, number, PeerLostError(f"{content} ({error})")))
    with contextlib.suppress(OSError):  # it died, which is seen elsewhere
        connection.send_bytes(message)
