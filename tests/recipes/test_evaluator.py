"""Evaluations beside the training: where they run, and that they end when they are to."""

from __future__ import annotations

import time

import gymnasium
import numpy as np
import pytest

from torchrl_dist import local_cluster
from torchrl_dist.errors import RemoteError
from torchrl_dist.recipes.evaluate import evaluate
from torchrl_dist.recipes.evaluator import Evaluations, Evaluator, EvaluatorConfig
from torchrl_dist.recipes.networks import PolicySpec, QNetwork

ENDLESS = "torchrl_dist_test/Endless-v0"
CONFIG = EvaluatorConfig(
    PolicySpec("CartPole-v1", 4, (8,), num_actions=2), episodes=4, max_steps=10_000
)


class Endless(gymnasium.Env):
    """One reward a step, no end."""

    observation_space = gymnasium.spaces.Box(-1, 1, (4,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(4, np.float32), {}

    def step(self, action):
        return np.zeros(4, np.float32), 1.0, False, False, {}


@pytest.fixture(autouse=True)
def endless_is_registered():
    gymnasium.register(ENDLESS, entry_point=Endless)
    yield
    del gymnasium.registry[ENDLESS]


def test_an_episode_without_an_end_is_ended_after_so_many_steps() -> None:
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
        asked = time.monotonic()
        assert evaluations.finish() is None
        assert not evaluations.under_way
        assert time.monotonic() - asked < 2


@pytest.mark.parametrize("collectors", [0, 1])
def test_an_evaluator_that_dies_is_replaced_by_the_next_process(fork_server, collectors) -> None:
    import os
    import signal

    said: list[str] = []
    network = QNetwork(4, 2, (8,))
    with local_cluster(
        {"learner": 1, "collector": collectors, "evaluator": 1}, fork_server=fork_server
    ) as session:
        evaluations = Evaluations(session, CONFIG, said.append)
        evaluations.begin(network.state_dict(), seed=0)
        evaluations.finish()
        evaluator = session.pid_of(session.of_role("evaluator")[0])
        os.kill(evaluator, signal.SIGSTOP)  # or it may be done before it is killed
        evaluations.begin(network.state_dict(), seed=1)
        os.kill(evaluator, signal.SIGKILL)
        returns = evaluations.finish()
        while evaluations.under_way:
            returns = evaluations.finish()
    assert returns == evaluate(network.greedy, "CartPole-v1", episodes=4, seed=1)
    (line,) = said
    assert line.startswith("evaluator0 evaluates no more")
    assert line.endswith("collector0 does now" if collectors else "learner0 does now")


def test_an_error_of_the_environment_reaches_the_learner(fork_server) -> None:
    wrong = EvaluatorConfig(
        PolicySpec("CartPole-v1", 3, (8,), num_actions=2), episodes=1, max_steps=10
    )
    with local_cluster({"learner": 1, "evaluator": 1}, fork_server=fork_server) as session:
        evaluations = Evaluations(session, wrong, print)
        evaluations.begin(QNetwork(3, 2, (8,)).state_dict(), seed=0)
        with pytest.raises(RemoteError, match="mat1 and mat2"):
            evaluations.finish()
