"""The benchmark of buffers in other processes, at toy size."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.bench.conftest import measured, parsed
from torchrl_dist.bench import remote
from torchrl_dist.bench.remote import Case

TOY = ["--rounds", "1", "--seconds", "0.2", "--capacity", "4096"]


def test_learners_and_shards_give_lines_with_sane_content(tmp_path: Path, capsys) -> None:
    options = ["--peers", "ours", "--learners", "1,2", "--shards", "1,2"]
    found = measured(remote, [*TOY, *options], tmp_path)
    assert {(line["learners"], line["shards"]) for line in found} == {(1, 1), (2, 1), (1, 2)}
    for line in found:
        assert line["bench"] == "remote" and line["peer"] == "ours"
        assert line["rate"] > 0 and line["empty_call_ms"] > 0
        assert line["bytes"] > 256 * 45  # every row travels
        assert 0 < line["messages"] < 1.5 * line["shards"]
    shown = capsys.readouterr().out
    assert "32 nodes" in shown and "cost of an empty call" in shown


def test_the_bound_and_the_extrapolation_are_straight_lines() -> None:
    assert remote.shard_bound_ms({"batch_ms": 2.0, "empty_call_ms": 0.5}, 8) == 5.5
    assert remote.extrapolated_ms({1: 2.0, 2: 3.0, 4: 5.0}, 32) == pytest.approx(33.0)


def test_shards_are_measured_for_our_buffer_only() -> None:
    cases = remote.plan(parsed(remote, "--peers", "ours,ours-8"))
    assert Case("ours", 1, 8, 1_000_000, 2.0) in cases
    assert {case.peer for case in cases if case.shards > 1} == {"ours"}
    assert len(cases) == len(set(cases)) == 7
