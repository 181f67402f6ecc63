"""Greedy episodes during training, which another process plays in many short calls.

:class:`Evaluator` is a plain local object, and :class:`Evaluations` is the learner's handle to one.
Calls are short, so that a job that must stop does not wait for the end of an evaluation.

An evaluation may kill or hang its process. A failed evaluation is therefore never repeated
elsewhere. If two processes are lost in this way, and no evaluation was completed in between, no
more evaluations are played. Without these rules, an environment that fails in evaluation could end
one collector after another, and then the learner.
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

_CALL_S = 0.5  # duration of one call
_GLANCE_S = 0.1
_LATE_S = 5.0  # added to the deadline, so that the call itself raises a more detailed error first


@dataclass(frozen=True)
class EvaluatorConfig:
    """The arguments of :class:`~torchrl_dist.recipes.parts.evaluate.GreedyEpisodes`."""

    policy: PolicySpec
    episodes: int
    max_steps: int


class Evaluator:
    """Play greedy episodes of one network after another. One call runs at a time."""

    def __init__(self, config: EvaluatorConfig, registrations: Registrations) -> None:
        adopt_registrations(registrations)
        self._config = config
        self._lock = threading.Lock()
        self._playing: GreedyEpisodes | None = None

    def play(
        self, begin: tuple[Mapping[str, Tensor], int] | None, limit_s: float = _CALL_S
    ) -> list[float] | None:
        """Play for about ``limit_s``. Return the episodes' returns, or None before they have ended.

        Args:
            begin: weights and seed of a new evaluation, which replaces the current one. None:
                continue the current one.
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
        network.eval()  # a user's module may contain dropout, for example
        self._playing = GreedyEpisodes(
            network.player(),
            config.policy.env,
            episodes=config.episodes,
            seed=seed,
            max_steps=config.max_steps,
        )

    def _stop(self) -> None:
        playing, self._playing = self._playing, None
        if playing is not None:
            playing.close()


@dataclass(eq=False, repr=False)
class Evaluations:
    """The learner's handle to an :class:`Evaluator` in another process.

    That process has the role "evaluator". If no process has this role, the last collector plays, or
    this process if there are no collectors. An evaluation fails if it raises, or if its process
    dies or hangs. A failed evaluation is reported and counted, and never repeated. If the process
    died or hung, a collector whose learner has other live collectors plays the later evaluations.
    If there is no such collector, or it also dies or hangs before it has completed an evaluation,
    no more evaluations are played.

    Args:
        session: the learner's session.
        config: what to play.
        say: called with a message about each failed evaluation.
        failed: number of failed evaluations, including those before the run was resumed.
    """

    session: Session
    config: EvaluatorConfig
    say: Callable[[str], None]
    failed: int = 0

    def __post_init__(self) -> None:
        session = self.session
        candidates = session.of_role("evaluator") + session.of_role("collector")[::-1]
        self._candidates: list[Peer] = list(candidates) or [session.me]
        # False from the loss of a process until an evaluation completes.
        self._may_replace = True
        self._remote: Remote | None = None
        self.under_way = False
        self._answer: Future | None = None
        self._asked_at = 0.0
        self._trace_shown = False

    def begin(self, weights: Mapping[str, Tensor], seed: int) -> None:
        """Start playing with a copy of ``weights``, if a process is left to play.

        Blocks only at the first call to a process, which creates the evaluator there."""
        assert not self.under_way
        copy = {name: value.detach().clone() for name, value in weights.items()}
        try:
            if self._choose():
                self._submit((copy, seed))
        except TorchRLDistError as error:
            self._fail(error)

    def poll(self, wait_s: float = 0.0) -> list[float] | None:
        """Return the episodes' returns once the evaluation has ended. Later calls return None.

        Blocks at most ``wait_s``.

        Returns:
            None while the evaluation is under way, and if it has failed."""
        if self._answer is None:
            return None
        try:
            if not wait([self._answer], wait_s).done:
                if time.monotonic() - self._asked_at > self.session.timeout_s + _LATE_S:
                    # checked here, because a call to this process itself has no deadline
                    raise DeadlineError(
                        f"{self._candidates[0]} did not answer a call of the evaluation within "
                        f"{self.session.timeout_s:g} s"
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
        """Block until the current evaluation has ended.

        Returns:
            None if the evaluation has failed, or if the session must stop before the end."""
        while self.under_way:
            if self.session.stop_requested:
                self.drop()
                return None
            returns = self.poll(_GLANCE_S)
            if returns is not None:
                return returns
        return None

    def drop(self) -> None:
        """Abandon the current evaluation."""
        self.under_way = False
        self._answer = None

    def _choose(self) -> bool:
        """Skip processes that were lost between evaluations. Return whether a process is left."""
        while self._candidates and (lost := self._candidates[0]) in self.session.lost():
            self._pass_over(f"it is lost ({self.session.lost_reason(lost)})")
        return bool(self._candidates)

    def _submit(self, begin: tuple[dict[str, Tensor], int] | None) -> None:
        self.under_way = True
        if self._remote is None:
            self._remote = self.session.remote(
                self._candidates[0], Evaluator, self.config, dump_registrations()
            )
        self._asked_at = time.monotonic()
        self._answer = self._remote.submit("play", begin)

    def _fail(self, error: TorchRLDistError) -> None:
        """Record that the current evaluation failed, and do not repeat it."""
        self.drop()
        self.failed += 1
        name = self._candidates[0].name
        if isinstance(error, PeerLostError | DeadlineError):
            self.say(f"an evaluation failed: {error}; training continues")
            safe = [peer for peer in self._candidates[1:] if self._has_another(peer)]
            self._candidates[1:] = safe if self._may_replace else []
            self._may_replace = False
            self._pass_over("it died or hung while it played")
            return
        message = error.message if isinstance(error, RemoteError) else str(error)
        if isinstance(error, RemoteError) and not self._trace_shown:
            self._trace_shown = True
            message += f"\n{error.remote_traceback.rstrip()}\nThis was in {name} on {error.host}"
        self.say(f"an evaluation failed in {name}: {message}; training continues")

    def _pass_over(self, why: str) -> None:
        before = self._candidates.pop(0)
        self._remote = None
        instead = "no more evaluations will be played"
        if self._candidates:
            instead = f"{self._candidates[0].name} evaluates from now on"
        self.say(f"{before.name} no longer evaluates, because {why}; {instead}")

    def _has_another(self, peer: Peer) -> bool:
        """Whether the learner of this collector can continue without it."""
        learners = len(self.session.of_role("learner"))
        group = self.session.of_role("collector")[peer.index % learners :: learners]
        return any(other != peer and other not in self.session.lost() for other in group)
