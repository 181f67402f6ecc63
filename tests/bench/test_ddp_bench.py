"""The benchmark of learning on several ranks, at toy size."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.bench.conftest import measured, run_bench
from torchrl_dist.bench import ddp
from torchrl_dist.errors import ConfigurationError

TOY = ["--ranks", "2", "--batches", "16", "--widths", "8", "--rounds", "1", "--seconds", "0.1"]


def test_updates_are_split_where_their_time_goes(tmp_path: Path, capsys) -> None:
    lines = measured(ddp, [*TOY, "--no-imports"], tmp_path)
    found = {(line["peer"], line["ranks"], line["batch"]) for line in lines}
    alone = {(ddp.ALONE, 1, batch) for batch in (8, 16)}
    peers = {(p, 2, 16) for p in ddp.PEERS.values()}
    assert found == alone | peers
    for line in lines:
        parts = line["parts_ms"]
        assert sum(parts.values()) == pytest.approx(line["update_ms"])
        assert (parts["averaging"] > 0) == (line["peer"] == ddp.OURS)
        assert (line["join_ms"] > 0) == (line["peer"] in (ddp.OURS, ddp.TORCH))
        assert bool(line["verdict"]) == (line["peer"] in (ddp.OURS, ddp.TORCH))
    assert "2 ranks pay off with width 8:" in capsys.readouterr().out


def test_the_verdict_names_the_main_reason() -> None:
    def of(update_ms: float, saved_ms: float, averaging_ms: float, ranks: int = 2) -> str:
        line = {
            "peer": ddp.OURS,
            "device": "cpu",
            "ranks": ranks,
            "update_ms": update_ms,
            "speed_up": 10 / update_ms,
            "saved_ms": saved_ms,
            "part_alone_ms": 10 - saved_ms,
            "parts_ms": {"averaging": averaging_ms},
        }
        return ddp.verdict(line, cpus=2)

    assert of(6, 5, 1) == "pays"
    assert of(12, 0.5, 1) == "too small: only 0.50 of 10.00 ms depend on the batch"
    assert of(12, 4, 6) == "averaging (6.00 ms) costs more than the 4.00 ms that ranks save"
    assert of(12, 4, 1) == "work of 6.00 ms takes 11.00 ms while other ranks compute"
    assert of(12, 4, 3.9, ranks=4) == "4 ranks share 2 cores"
    assert "more time than the 4.00 ms" in of(12, 4, 3.9)


def test_the_point_from_which_ranks_pay() -> None:
    def of(*verdicts: str) -> str:
        return ddp._summary(
            [
                {"ranks": 2, "width": 8, "batch": 10**power, "verdict": verdict}
                for power, verdict in enumerate(verdicts)
            ]
        ).partition(": ")[2]

    assert of("too small", "pays", "pays") == "from batch 10 on"
    assert of("pays", "too small", "pays") == "at batch 1, 100"
    assert of("too small", "too small") == "never here"


def test_a_gpu_per_rank_is_required(monkeypatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    with pytest.raises(ConfigurationError, match=r"found 1 GPU\(s\), expected one per rank"):
        run_bench(ddp, [*TOY, "--device", "cuda"])


def test_batches_must_divide_among_ranks() -> None:
    for options in (["--ranks", "3", "--batches", "128"], ["--ranks", "1"]):
        with pytest.raises(ConfigurationError, match="divided equally among the ranks"):
            run_bench(ddp, options)
