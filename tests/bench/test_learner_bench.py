"""The benchmark of gradient steps at toy size."""

from __future__ import annotations

from pathlib import Path

from tests.bench.conftest import measured
from torchrl_dist.bench import learner


def test_every_peer_takes_steps(tmp_path: Path, capsys) -> None:
    options = ["--rounds", "1", "--seconds", "0.01", "--recipes", "dqn,sac,ppo,vtrace"]
    lines = measured(learner, options, tmp_path, picture=False)
    found = [(line["recipe"], line["peer"]) for line in lines]
    assert found == [(r, p) for r in ("dqn", "sac", "ppo", "vtrace") for p in learner.PEERS]
    assert all(line["ms"] > 0 for line in lines)
    assert "vtrace" in capsys.readouterr().out
