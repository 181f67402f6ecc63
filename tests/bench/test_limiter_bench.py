"""The benchmark of the rate limiter at toy size."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from torchrl_dist.bench import limiter
from torchrl_dist.cli import main as cli


@pytest.mark.timeout(100)
def test_every_case_is_measured(tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(limiter, "_IDLE_S", 0.2)
    path = tmp_path / "lines.jsonl"
    assert cli(["bench", "limiter", "--wakes", "3", "--json", str(path)]) == 0
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["case"] for line in lines] == list(limiter.CASES)
    for line in lines:
        assert 0 < line["p50_us"] <= line["p99_us"]
        assert 0 < line["cpu_ms_per_s"] < 1000
    assert "one node" in capsys.readouterr().out
