"""Greedy episodes next to the training: played in another process, a second at a time.

:class:`Evaluator` is a plain local object; :class:`Evaluations` is the learner's handle to one. A
call to it is short, so a learner that is told to stop waits for one step of the environments at
most, and an evaluator that dies or hangs is noticed as any other process of the job.

An evaluation may be what kills or hangs its process. One that fails is therefore never repeated
elsewhere, and one process at most takes the place of the first that is lost in this way: training
must not lose its collectors, and then its learner, to an environment that fails when it is
evaluated.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass

from torch import Tensor

from ...collect.worker.registrations import Registrations, adopt_registrations, dump_registrations
from ...errors import DeadlineError, PeerLostError, RemoteError, TorchRLDistError
from ...runtime import Peer, Remote, Session
from ..parts.evaluate import GreedyEpisodes
from ..parts.networks import PolicySpec

_CALL_S = 0.5  # of playing in one call
_GLANCE_S = 0.1
_LATE_S = 5.0  # later than the deadline of a call to another process, which says more


@dataclass(frozen=True)
class EvaluatorConfig:
    """What is played: see :class:`~torchrl_dist.recipes.parts.evaluate.GreedyEpisodes`."""

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
        playing, self._playing = self._playing, None
        if playing is not None:
            playing.close()


class Evaluations:
    """The learner's handle to an :class:`Evaluator`, which it chooses: a process of the role
    "evaluator", else the last collector, else this process.

    An evaluation that raises, dies or hangs has failed: it is said and counted, and forgotten.
    When its process was lost or hangs, a collector that its learner can do without plays the later
    ones. When that one is lost as well, before an evaluation has ended, no more are played.

    Args:
        session: the learner's.
        config: what is played.
        say: called with a line about each that has failed.
        failed: how many had failed before a run was resumed.

    Attributes:
        failed: how many evaluations have failed.
    """

    def __init__(
        self,
        session: Session,
        config: EvaluatorConfig,
        say: Callable[[str], None],
        *,
        failed: int = 0,
    ) -> None:
        self._session = session
        self._config = config
        self._say = say
        candidates = session.of_role("evaluator") + session.of_role("collector")[::-1]
        self._candidates: list[Peer] = list(candidates) or [session.me]
        self._may_replace = True  # no process was lost in vain since an evaluation ended
        self._remote: Remote | None = None
        self._under_way = False
        self._answer: Future | None = None
        self._asked_at = 0.0
        self._trace_shown = False
        self.failed = failed

    @property
    def under_way(self) -> bool:
        return self._under_way

    def begin(self, weights: Mapping[str, Tensor], seed: int) -> None:
        """Start playing with a copy of ``weights``, if there is a process for it. Blocks only for
        the first call to that process."""
        assert not self.under_way
        copy = {name: value.detach().clone() for name, value in weights.items()}
        try:
            if self._choose():
                self._submit((copy, seed))
        except TorchRLDistError as error:
            self._fail(error)

    def poll(self, wait_s: float = 0.0) -> list[float] | None:
        """The returns of what was begun, once; None until then, and when it has failed. Blocks at
        most ``wait_s``."""
        if self._answer is None:
            return None
        try:
            if not wait([self._answer], wait_s).done:
                if time.monotonic() - self._asked_at > self._session.timeout_s + _LATE_S:
                    # calls to this process itself have no deadline of their own
                    raise DeadlineError(
                        f"{self._candidates[0]} did not answer play within "
                        f"{self._session.timeout_s:g} s"
                    )
                return None
            returns = self._answer.result()
            if returns is None:
                self._submit(None)
                return None
        except TorchRLDistError as error:
            self._fail(error)
            return None
        self.drop()
        self._may_replace = True
        return returns

    def finish(self) -> list[float] | None:
        """Block until what was begun has ended; None if it has failed, or the session is told to
        stop before."""
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
        self._under_way = False
        self._answer = None

    def _choose(self) -> bool:
        """Pass over processes that were lost while they played nothing; whether one is left."""
        while self._candidates and (lost := self._candidates[0]) in self._session.lost():
            self._pass_over(f"it is lost ({self._session.lost_reason(lost)})")
        return bool(self._candidates)

    def _submit(self, begin: tuple[dict[str, Tensor], int] | None) -> None:
        self._under_way = True
        if self._remote is None:
            self._remote = self._session.remote(
                self._candidates[0], Evaluator, self._config, dump_registrations()
            )
        self._asked_at = time.monotonic()
        self._answer = self._remote.submit("play", begin)

    def _fail(self, error: TorchRLDistError) -> None:
        """What was begun has failed with this; it is not repeated."""
        self.drop()
        self.failed += 1
        name = self._candidates[0].name
        if isinstance(error, PeerLostError | DeadlineError):
            self._say(f"an evaluation failed: {error}; training goes on")
            safe = [peer for peer in self._candidates[1:] if self._has_another(peer)]
            self._candidates[1:] = safe if self._may_replace else []
            self._may_replace = False
            self._pass_over("it died or hung while it played")
            return
        message = error.message if isinstance(error, RemoteError) else str(error)
        if isinstance(error, RemoteError) and not self._trace_shown:
            self._trace_shown = True
            message += f"\n{error.remote_traceback.rstrip()}\nThis was in {name} on {error.host}"
        self._say(f"an evaluation failed in {name}: {message}; training goes on")

    def _pass_over(self, why: str) -> None:
        before = self._candidates.pop(0)
        self._remote = None
        instead = "no more evaluations are played"
        if self._candidates:
            instead = f"{self._candidates[0].name} does so from now on"
        self._say(f"{before.name} evaluates no more, because {why}; {instead}")

    def _has_another(self, peer: Peer) -> bool:
        """Whether the learner of this collector can go on without it."""
        learners = len(self._session.of_role("learner"))
        group = self._session.of_role("collector")[peer.index % learners :: learners]
        return any(other != peer and other not in self._session.lost() for other in group)
