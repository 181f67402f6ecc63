"""The benchmark of gradient steps at toy size."""

from __future__ import annotations

from pathlib import Path

from tests.bench.conftest import measured
from torchrl_dist.bench import learner


def test_every_peer_takes_steps(tmp_path: Path, capsys) -> None:
    recipes = ("dqn", "sac", "ppo", learner.TWO_RANKS, "vtrace")
    options = ["--rounds", "1", "--seconds", "0.01", "--recipes", ",".join(recipes)]
    lines = measured(learner, options, tmp_path, picture=False)
    found = [(line["recipe"], line["peer"]) for line in lines]
    assert found == [(recipe, peer) for recipe in recipes for peer in learner.PEERS]
    assert all(line["ms"] > 0 for line in lines)
    assert all(line["ranks"] == 1 + (line["recipe"] == learner.TWO_RANKS) for line in lines)
    assert "vtrace" in capsys.readouterr().out
