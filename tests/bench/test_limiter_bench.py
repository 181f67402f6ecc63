"""The benchmark of the rate limiter at toy size."""

from __future__ import annotations

from pathlib import Path

from tests.bench.conftest import measured
from torchrl_dist.bench import limiter


def test_every_case_is_measured(tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(limiter, "_IDLE_S", 0.2)
    lines = measured(limiter, ["--wakes", "3"], tmp_path, picture=False)
    assert [line["case"] for line in lines] == list(limiter.CASES)
    for line in lines:
        assert 0 < line["p50_us"] <= line["p99_us"]
        assert 0 < line["cpu_ms_per_s"] < 1000
    assert "one node" in capsys.readouterr().out
