"""Evaluations during training: where they run, and that they end in time."""

from __future__ import annotations

import functools
import os
import signal
import sys
import threading
import time

import gymnasium
import pytest

from tests.recipes.jobs import Endless
from torchrl_dist import local_cluster
from torchrl_dist.recipes.parts.evaluate import evaluate
from torchrl_dist.recipes.parts.networks import PolicySpec, QNetwork
from torchrl_dist.recipes.training.evaluator import Evaluations, Evaluator, EvaluatorConfig

ENDLESS = "torchrl_dist_test/Endless-v0"
CONFIG = EvaluatorConfig(
    PolicySpec("CartPole-v1", 4, (8,), num_actions=2), episodes=4, max_steps=10_000
)


@pytest.fixture(autouse=True)
def endless_is_registered():
    gymnasium.register(ENDLESS, entry_point=Endless)
    yield
    del gymnasium.registry[ENDLESS]


def test_an_endless_episode_is_ended_after_the_given_steps() -> None:
    returns = evaluate(QNetwork(4, 2, (8,)).greedy, ENDLESS, episodes=2, seed=0, max_steps=30)
    assert returns == [30.0, 30.0]


def test_an_evaluator_plays_a_moment_per_call_and_the_same_episodes_in_the_end() -> None:
    network = QNetwork(4, 2, (8,))
    player = Evaluator(CONFIG, {})
    returns = player.play((network.state_dict(), 3), limit_s=0)
    calls = 1
    while returns is None:
        returns = player.play(None, limit_s=0)
        calls += 1
    assert returns == evaluate(network.greedy, "CartPole-v1", episodes=4, seed=3)
    assert calls == max(returns)


def test_another_process_plays_what_only_this_one_has_registered_and_stops_when_told(
    fork_server,
) -> None:
    endless = EvaluatorConfig(
        PolicySpec(ENDLESS, 4, (8,), num_actions=2), episodes=2, max_steps=10**9
    )
    weights = QNetwork(4, 2, (8,)).state_dict()
    with local_cluster(
        {"learner": 1, "collector": 1, "evaluator": 1}, fork_server=fork_server
    ) as session:
        evaluations = Evaluations(session, endless, print)
        evaluations.begin(weights, seed=0)
        for _ in range(3):
            assert evaluations.poll(1.0) is None
        session._stop.set()  # as a signal does
        assert evaluations.finish() is None  # although the episodes have no end
        assert not evaluations.under_way


@pytest.mark.parametrize("collectors", [1, 3])
def test_an_evaluation_that_is_lost_with_its_process_is_not_repeated_and_few_processes_are_risked(
    fork_server, collectors
) -> None:
    """A collector takes the place of the evaluator where another one is left, and no more do when
    it is lost as well. One that dies while it plays nothing is replaced in any case."""
    said: list[str] = []
    network = QNetwork(4, 2, (8,))
    with local_cluster(
        {"learner": 1, "collector": collectors, "evaluator": 1}, fork_server=fork_server
    ) as session:
        evaluations = Evaluations(session, CONFIG, said.append)

        def kill(name: str, *, before: bool = False) -> None:
            (peer,) = (peer for peer in session.peers if peer.name == name)
            if not before:
                os.kill(session.pid_of(peer), signal.SIGSTOP)  # or it may be done before
                evaluations.begin(network.state_dict(), seed=1)
            os.kill(session.pid_of(peer), signal.SIGKILL)
            while peer not in session.lost():
                time.sleep(0.01)

        evaluations.begin(network.state_dict(), seed=0)
        assert evaluations.finish() is not None
        kill("evaluator0")
        assert evaluations.finish() is None and evaluations.failed == 1
        evaluations.begin(network.state_dict(), seed=2)
        returns = evaluations.finish()
        if collectors == 1:
            assert returns is None and not evaluations.under_way
            assert said[-1].endswith("no more evaluations will be played")
            return
        assert returns == evaluate(network.greedy, "CartPole-v1", episodes=4, seed=2)
        assert said[-1].startswith("evaluator0 no longer evaluates")
        assert said[-1].endswith("collector2 evaluates from now on")
        kill("collector2", before=True)
        evaluations.begin(network.state_dict(), seed=3)
        assert evaluations.finish() is not None and evaluations.failed == 1
        kill("collector1")
        evaluations.finish()
        assert said[-1].endswith("no more evaluations will be played")  # collector0 is the last
        assert evaluations.failed == 2


def test_an_evaluation_that_raises_is_reported_and_counted_and_the_next_is_played(
    fork_server,
) -> None:
    wrong = EvaluatorConfig(
        PolicySpec("CartPole-v1", 3, (8,), num_actions=2), episodes=1, max_steps=10
    )
    said: list[str] = []
    with local_cluster({"learner": 1, "evaluator": 1}, fork_server=fork_server) as session:
        evaluations = Evaluations(session, wrong, said.append)
        for seed in range(2):
            evaluations.begin(QNetwork(3, 2, (8,)).state_dict(), seed)
            assert evaluations.finish() is None
    assert evaluations.failed == len(said) == 2
    for line in said:
        assert "evaluator0" in line and "mat1 and mat2" in line
    assert "Traceback" in said[0] and "Traceback" not in said[1]


@pytest.mark.parametrize("how", ["hangs", "exits"])
def test_a_process_that_plays_itself_waits_for_itself_with_a_deadline_and_outlives_an_exit(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    free = threading.Event()
    fault = free.wait if how == "hangs" else functools.partial(sys.exit, 3)
    monkeypatch.setattr(Endless, "step", lambda self, action: fault())
    monkeypatch.setattr("torchrl_dist.recipes.training.evaluator._LATE_S", 0.0)
    endless = EvaluatorConfig(PolicySpec(ENDLESS, 4, (8,), num_actions=2), 2, 10)
    with local_cluster({"learner": 1}, timeout_s=0.5) as session:
        evaluations = Evaluations(session, endless, said.append)
        evaluations.begin(QNetwork(4, 2, (8,)).state_dict(), seed=0)
        assert evaluations.finish() is None
        free.set()
    assert evaluations.failed == 1
    late = "did not answer a call of the evaluation within 0.5 s"
    text = {"hangs": late, "exits": "SystemExit: 3"}[how]
    assert text in said[0] and "learner0" in said[0]
