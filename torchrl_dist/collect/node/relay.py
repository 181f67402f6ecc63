"""Relay requests for actions from env processes to the learner, through the node worker.

A question is an env process's request for actions. A message between nodes costs a millisecond of
CPU time, whatever its size. A millisecond is more than all other costs of sixteen questions
together. The node worker therefore sends the questions of all waiting env processes to the learner
in one message. While the env processes step other groups of envs, the node worker also waits for
more questions, unless the answers would then be late.
"""

from __future__ import annotations

import contextlib
import math
import os
import pickle
import select
import socket
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch

from torchrl_dist.collect.loop.groups import Inference
from torchrl_dist.collect.loop.rollout import Values
from torchrl_dist.collect.loop.spaces import Key
from torchrl_dist.collect.node.waker import Waker
from torchrl_dist.errors import DeadlineError, PeerLostError

QUESTION = -1  # a message has this number if it is a question, and not the answer to a call

# At most this many messages to the learner are in flight. Two are allowed, so that questions need
# not wait for the answer to the previous message.
_MAX_IN_FLIGHT = 2

# While a question is unanswered, its env process steps its other groups of envs. A question waits
# for other questions for at most this fraction of the time that these steps take. The wait is
# shorter if the wait and the message together would take more than half of the steps' time.
_WAITING_PART = 1 / 3
_SMOOTHING = 0.1


class Array(NamedTuple):
    """An array ``[n, ...]`` in a form that can be sent. This form takes a fifth of the time of
    NumPy's own pickling."""

    key: Key
    dtype: str
    shape: tuple[int, ...]
    content: bytes

    @classmethod
    def of(cls, key: Key, array: np.ndarray) -> Array:
        return cls(key, array.dtype.str, array.shape, array.tobytes())

    def tensor(self) -> torch.Tensor:
        array = np.frombuffer(bytearray(self.content), self.dtype)
        return torch.from_numpy(array.reshape(self.shape))


class Question(NamedTuple):
    """The observations for which an env process requests the policy's outputs."""

    number: int
    values: list[Array]

    @property
    def rows(self) -> int:
        return self.values[0].shape[0]


def _joined(questions: list[Question]) -> Values:
    """Return the observations of all questions by key, concatenated along the dimension of the
    envs."""
    rows = sum(question.rows for question in questions)
    return {
        first.key: Array(
            first.key,
            first.dtype,
            (rows, *first.shape[1:]),
            b"".join(question.values[i].content for question in questions),
        ).tensor()
        for i, first in enumerate(questions[0].values)
    }


class Window:
    """Compute how long a question may wait for other questions. This class itself never waits.

    An env process that asks every d seconds and has g groups of envs needs an answer (g - 1) d
    seconds after its question. If the answer comes later, all envs of the env process wait. On a
    busy node, where messages take long, questions therefore do not wait for other questions.
    """

    def __init__(self, groups: int) -> None:
        self._other_groups = groups - 1
        self._asked: WeakKeyDictionary[Any, float] = WeakKeyDictionary()
        self._between_s = 0.0
        self._message_s = 0.0

    def note_question(self, asker: Any, now_s: float) -> None:
        before = self._asked.get(asker)
        self._asked[asker] = now_s
        if before is not None:
            self._between_s += _SMOOTHING * (now_s - before - self._between_s)

    def note_answer(self, took_s: float) -> None:
        """Record that the learner answered a message after ``took_s`` seconds."""
        self._message_s += _SMOOTHING * (took_s - self._message_s)

    @property
    def length_s(self) -> float:
        needed_in_s = self._other_groups * self._between_s
        return max(0.0, min(_WAITING_PART * needed_in_s, needed_in_s / 2 - self._message_s))


class NodeLearner:
    """The learner as an env process sees it. Questions go over the connection to the node worker,
    which relays them.

    Only one thread uses this object. If calls from the node worker arrive while this object waits
    for an answer, it appends these calls to ``calls``.

    Args:
        beat: called every ``beat_s`` seconds (None: never) while this object waits for an answer,
            so that the node worker does not kill the env process as one that hangs.
    """

    def __init__(
        self,
        connection: Connection,
        beat: Callable[[], None] = lambda: None,
        beat_s: float | None = None,
    ) -> None:
        self.calls: deque[tuple] = deque()
        self._connection = connection
        # This poll object is stored, because ``connection.poll`` would make a new poll object in
        # each call.
        self._readable = select.poll()
        self._readable.register(connection.fileno(), select.POLLIN)
        self._beat, self._beat_s = beat, math.inf if beat_s is None else beat_s
        self._asked = 0
        self._answers: dict[int, list[Array] | BaseException] = {}

    def submit(self, method: str, values: Values, *, timeout_s: float | None = None) -> NodeAnswer:
        """Send a question to the learner without waiting for the answer, as ``Remote.submit``
        does."""
        number = self._asked
        self._asked += 1
        question = Question(number, [Array.of(key, v.numpy()) for key, v in values.items()])
        self._connection.send_bytes(pickle.dumps((QUESTION, question)))
        return NodeAnswer(self, number)

    def wait_for(self, number: int, timeout_s: float) -> Values:
        """Block until the answer to question ``number`` has arrived, and return the answer."""
        deadline = time.monotonic() + timeout_s
        while number not in self._answers:
            left_s = deadline - time.monotonic()
            if self._readable.poll(1000 * max(0.0, min(left_s, self._beat_s))):
                message = pickle.loads(self._connection.recv_bytes())
                if is_answer(message):
                    _, answered, content = message
                    self._answers[answered] = content
                else:
                    self.calls.append(message)
            elif left_s <= 0:
                raise DeadlineError(
                    f"the node worker received no actions from the learner within {timeout_s:g} s; "
                    "check whether the learner still runs, or raise timeout_s= of the collector"
                )
            else:
                self._beat()
        answer = self._answers.pop(number)
        if isinstance(answer, BaseException):
            raise answer
        return {array.key: array.tensor() for array in answer}


@dataclass(frozen=True)
class NodeAnswer:
    learner: NodeLearner
    number: int

    def result(self, timeout: float) -> Values:
        return self.learner.wait_for(self.number, timeout)


_Asked = tuple[Connection, Question]


def is_answer(message: tuple) -> bool:
    """Whether a message to an env process is an answer to a question, rather than a call. An answer
    that arrives between two calls belongs to a rollout that has failed."""
    return message[0] is None


class Relay:
    """Relays questions in the node worker. ``fileno`` is readable when answers from the learner
    have arrived. Call all methods in the thread that uses the connections to the env processes."""

    def __init__(self, inference: Inference) -> None:
        self._inference = inference
        self._waker = Waker()
        self._waiting: list[_Asked] = []
        self._answers: deque[tuple[list[_Asked], Future, float]] = deque()
        self._in_flight = 0
        self._window = Window(inference.groups)
        self._oldest_s = 0.0  # when the oldest waiting question arrived

    def fileno(self) -> int:
        return self._waker.fileno()

    def ask(self, connection: Connection, question: Question) -> None:
        """Queue a question for a later ``flush``. ``deliver`` will send the answer over
        ``connection``."""
        now_s = time.monotonic()
        self._window.note_question(connection, now_s)
        if not self._waiting:
            self._oldest_s = now_s
        self._waiting.append((connection, question))

    def flush(self, most: int) -> float:
        """Send the waiting questions to the learner if they are due and not too many messages are
        in flight. This method does not block.

        Args:
            most: once this many questions wait, they are sent without delay, because no other
                question can come.

        Returns:
            seconds until the next call of ``flush`` is due; infinite if no call is due before a
            question or an answer arrives.
        """
        if not self._waiting or self._in_flight >= _MAX_IN_FLIGHT:
            return math.inf
        left_s = self._oldest_s + self._window.length_s - time.monotonic()
        if left_s > 0 and len(self._waiting) < most:
            return left_s
        asked, self._waiting = self._waiting, []
        values = _joined([question for _, question in asked])
        self._in_flight += 1
        begun_s = time.monotonic()
        inference = self._inference
        future: Any = inference.learner.submit("submit", values, timeout_s=inference.timeout_s)
        future.add_done_callback(lambda done: self._arrived(asked, done, begun_s))
        return math.inf

    def _arrived(self, asked: list[_Asked], done: Future, begun_s: float) -> None:
        self._answers.append((asked, done, begun_s))
        self._waker.wake()

    def deliver(self) -> None:
        """Send the answers that have arrived from the learner to the env processes."""
        self._waker.quiet()
        while self._answers:
            asked, done, begun_s = self._answers.popleft()
            self._in_flight -= 1
            self._window.note_answer(time.monotonic() - begun_s)
            error = done.exception()
            outputs = {} if error else {k: v.numpy() for k, v in done.result().items()}
            first = 0
            for connection, question in asked:
                last = first + question.rows
                part = [Array.of(key, array[first:last]) for key, array in outputs.items()]
                first = last
                _tell(connection, question.number, error or part)

    def close(self) -> None:
        """Release the file. Later answers are not delivered. Idempotent."""
        self._waker.close()


def _tell(connection: Connection, number: int, content: list[Array] | BaseException) -> None:
    try:
        message = pickle.dumps((None, number, content))
    except Exception as error:  # the error cannot be pickled, for example because its cause cannot
        message = pickle.dumps((None, number, PeerLostError(f"{content} ({error})")))
    send(connection, message)


def send(connection: Connection, message: bytes) -> None:
    """Send a message to an env process. If sending fails, because the process has ended, is paused
    or was replaced, shut the connection down for both ends, so that the pool notices the
    failure."""
    try:
        connection.send_bytes(message)
    except OSError:
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as end:
            end.shutdown(socket.SHUT_RDWR)
