"""Greedy episodes beside the training: played in another process, a second at a time.

:class:`Evaluator` is a plain local object; :class:`Evaluations` is the learner's handle to one. A
call to it is short, so a learner that is told to stop waits for one step of the environments at
most, and an evaluator that dies or hangs is noticed as any other process of the job.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass

from torch import Tensor

from ..collect.worker.registrations import Registrations, adopt_registrations, dump_registrations
from ..errors import DeadlineError, PeerLostError
from ..runtime import Peer, Remote, Session
from .evaluate import GreedyEpisodes
from .networks import PolicySpec

_CALL_S = 0.5  # of playing in one call
_GLANCE_S = 0.1


@dataclass(frozen=True)
class EvaluatorConfig:
    """What is played: see :class:`~torchrl_dist.recipes.evaluate.GreedyEpisodes`."""

    policy: PolicySpec
    episodes: int
    max_steps: int


class Evaluator:
    """Plays greedy episodes of one network after the other; calls wait for each other."""

    def __init__(self, config: EvaluatorConfig, registrations: Registrations) -> None:
        adopt_registrations(registrations)
        self._config = config
        self._lock = threading.Lock()
        self._playing: GreedyEpisodes | None = None

    def play(
        self, begin: tuple[Mapping[str, Tensor], int] | None, limit_s: float = _CALL_S
    ) -> list[float] | None:
        """Play for about ``limit_s``; the returns, or None while episodes are under way.

        Args:
            begin: weights and seed of a new evaluation, which replaces one under way; None: go on.
        """
        with self._lock:
            if begin is not None:
                self._start(*begin)
            assert self._playing is not None
            give_back = time.monotonic() + limit_s
            while not self._playing.step():
                if time.monotonic() >= give_back:
                    return None
            returns = self._playing.returns
            self._stop()
            return returns

    def _start(self, weights: Mapping[str, Tensor], seed: int) -> None:
        self._stop()
        config = self._config
        network = config.policy.network()
        network.load_state_dict(dict(weights))
        network.eval()  # a user's module may have dropout, say
        self._playing = GreedyEpisodes(
            network.greedy,
            config.policy.env,
            episodes=config.episodes,
            seed=seed,
            max_steps=config.max_steps,
        )

    def _stop(self) -> None:
        if self._playing is not None:
            self._playing.close()
            self._playing = None


class Evaluations:
    """The learner's handle to an :class:`Evaluator`, which it chooses: a process of the role
    "evaluator", else the last collector, else this process. When that one is lost, the next.

    Args:
        session: the learner's.
        config: what is played.
        say: called with one line about an evaluator that is lost.
    """

    def __init__(
        self, session: Session, config: EvaluatorConfig, say: Callable[[str], None]
    ) -> None:
        self._session = session
        self._config = config
        self._say = say
        candidates = session.of_role("evaluator") + session.of_role("collector")[::-1]
        self._candidates: list[Peer] = [*candidates, session.me]
        self._remote: Remote | None = None
        self._begin: tuple[dict[str, Tensor], int] | None = None
        self._answer: Future | None = None

    @property
    def under_way(self) -> bool:
        return self._begin is not None

    def begin(self, weights: Mapping[str, Tensor], seed: int) -> None:
        """Start playing with a copy of ``weights``; does not block."""
        assert not self.under_way
        self._begin = ({name: value.detach().clone() for name, value in weights.items()}, seed)
        self._submit(anew=True)

    def poll(self, wait_s: float = 0.0) -> list[float] | None:
        """The returns of what was begun, once; None until then. Blocks at most ``wait_s``.

        Raises:
            RemoteError: the environment or the network raised.
        """
        if self._answer is None or not wait([self._answer], wait_s).done:
            return None
        try:
            returns = self._answer.result()
        except (PeerLostError, DeadlineError) as error:
            self._take_another(error)
            self._submit(anew=True)
            return None
        if returns is None:
            self._submit(anew=False)
        else:
            self._begin = self._answer = None
        return returns

    def finish(self) -> list[float] | None:
        """Block until what was begun has ended; None if the session is told to stop before."""
        while self.under_way:
            if self._session.stop_requested:
                self.drop()
                return None
            returns = self.poll(_GLANCE_S)
            if returns is not None:
                return returns
        return None

    def drop(self) -> None:
        """Forget what was begun; it is not played on."""
        self._begin = self._answer = None

    def _submit(self, *, anew: bool) -> None:
        while self._remote is None:
            try:
                self._remote = self._session.remote(
                    self._candidates[0], Evaluator, self._config, dump_registrations()
                )
            except (PeerLostError, DeadlineError) as error:
                self._take_another(error)
        self._answer = self._remote.submit("play", self._begin if anew else None)

    def _take_another(self, error: Exception) -> None:
        if len(self._candidates) == 1:
            raise error
        lost = self._candidates.pop(0)
        self._remote = None
        self._say(f"{lost.name} evaluates no more: {error}; {self._candidates[0].name} does now")
