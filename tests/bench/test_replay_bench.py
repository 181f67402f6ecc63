"""The replay benchmark at toy size."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from tests import warm
from tests.bench.conftest import measured, parsed, run_bench
from torchrl_dist.bench import processes, replay
from torchrl_dist.bench.command import available
from torchrl_dist.bench.processes import MeasurementError
from torchrl_dist.bench.replay_cells import Cell, Result
from torchrl_dist.bench.replay_peers import PEERS
from torchrl_dist.bench.replay_table import to_cells
from torchrl_dist.errors import ConfigurationError, DeadlineError

TOY = ["--rounds", "1", "--seconds", "0.1", "--capacity", "4096", "--kinds", "S"]


def test_two_peers_give_cells_with_sane_content(tmp_path: Path, capsys) -> None:
    options = ["--peers", "ours-numpy,floor", "--ops", "sample+update,mixed,lock,cursor"]
    lines = measured(replay, [*TOY, *options, "--writers", "2", "--batches", "32"], tmp_path)
    latencies = {cell["op"]: cell for cell in lines if cell["unit"] == "calls/s"}
    cells = [cell for cell in lines if cell["unit"] != "calls/s"]
    found = {(cell["peer"], cell["op"], cell["batch"], cell["processes"]) for cell in cells}
    lines = {("sample+update", 256, 1), ("mixed-write", 64, 2), ("mixed-learn", 256, 1)}
    assert found == {(peer, *line) for peer in ("ours-numpy", "floor") for line in lines}
    for cell in [*cells, *latencies.values()]:
        assert cell["bench"] == "replay" and cell["kind"] == "S"
        assert cell["rate"] > 0 and 0 < cell["p50_ms"] <= cell["p99_ms"]
        assert {"torch", "torchrl", "python"} <= set(cell["versions"])
    for cell in cells:
        assert cell["unit"] == ("rows/s" if "write" in cell["op"] else "batches/s")
        assert cell["floor_rate"] > 0 and cell["ratio_to_ours"] > 0
        assert (cell["page_faults_per_call"] is None) == ("write" in cell["op"])
        # The rate and p50 describe the same calls: half of them take at least p50.
        calls = cell["rate"] / (cell["batch"] if cell["unit"] == "rows/s" else 1)
        assert calls * cell["p50_ms"] / 1e3 < 2.5 * cell["processes"]
    p50 = {op: cell["p50_ms"] for op, cell in latencies.items()}
    assert p50["lock-bare"] < p50["lock-ours"] < p50["cursor-shared"] < p50["cursor-rpc"]
    assert {"lock-wait", "lock-wait-busy", "cursor-tcpstore"} <= set(p50)
    shown = capsys.readouterr().out
    assert "ours-numpy" in shown and "floor" in shown and "× 1.00" in shown


def test_sequences_and_patches_are_measured_for_torchrl_too(tmp_path: Path) -> None:
    options = ["--peers", "ours-numpy,torchrl-uniform", "--ops", "sequences,patch"]
    cells = measured(replay, [*TOY, "--kinds", "S,L", *options], tmp_path)
    names = ("kind", "peer", "op", "batch", "unit")
    assert {tuple(cell[name] for name in names) for cell in cells} == {
        (kind, peer, *line)
        for kind in "SL"
        for peer in ("ours-numpy", "torchrl-uniform")
        for line in (("sequences", 32, "windows/s"), ("patch", 256, "rows/s"))
    }
    for cell in cells:
        assert cell["rate"] > 0 and 0 < cell["p50_ms"] <= cell["p99_ms"]


def test_a_capacity_too_small_for_the_batches_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="--capacity: got 100, expected at least"):
        run_bench(replay, ["--capacity", "100"])


def test_peers_that_cannot_be_measured_are_named_with_the_reason(monkeypatch, capsys) -> None:
    monkeypatch.setattr(PEERS["ray"], "missing", classmethod(lambda cls: "not installed"))
    assert available(["ours-numpy", "ray"], lambda name: PEERS[name].missing()) == ["ours-numpy"]
    assert "skipped ray: not installed" in capsys.readouterr().err


def test_writers_of_a_buffer_in_one_process_are_not_measured_together() -> None:
    groups = replay.plan(parsed(replay), ["ours-c", "torchrl", "floor"])
    measured = {(cell.peer, cell.op, cell.processes) for group in groups for cell in group}
    assert ("torchrl", "write", 1) in measured and ("ours-c", "write", 4) in measured
    assert ("torchrl", "write", 4) not in measured and ("torchrl", "mixed", 2) not in measured
    assert not {peer for peer, op, _ in measured if op == "cursor"} - {"ours-c"}


def test_medians_and_ratios_are_over_rounds_and_lines() -> None:
    figures = {"ours-c": [100, 300, 200], "other": [50, 60, 900], "floor": [400]}
    found = {
        Cell(peer, "S", "sample", 256, 1, 4096, 1.0, 9.0): [
            [Result("sample", 256, 1, rate, "batches/s", 1.0, 2.0, 0.5)] for rate in rates
        ]
        for peer, rates in figures.items()
    }
    cells = {cell["peer"]: cell for cell in to_cells(found, ["ours-c"], "floor")}
    assert cells["ours-c"]["rate"] == 200 and cells["ours-c"]["ratio_to_ours"] == 1
    assert cells["other"]["rate"] == 60 and cells["other"]["ratio_to_ours"] == 0.3
    assert cells["other"]["floor_rate"] == 400 and cells["other"]["rates"] == [50, 60, 900]


# ---- failures


def fail() -> None:
    print("about to fail")
    raise ValueError("as asked")


def hang_with_a_child() -> None:
    if not os.fork():
        time.sleep(60)
    time.sleep(60)


def answer() -> int:
    return 42


def test_a_measurement_that_fails_or_hangs_is_reported_and_ended(tmp_path: Path) -> None:
    for name in "abc":
        (tmp_path / name).mkdir()
    with processes.Launcher() as launcher:
        with pytest.raises(MeasurementError, match="(?s)ValueError: as asked.*about to fail"):
            launcher.run(fail, folder=tmp_path / "a", timeout_s=20)
        with pytest.raises(DeadlineError):
            launcher.run(hang_with_a_child, folder=tmp_path / "b", timeout_s=0.5)
        assert launcher.run(answer, folder=tmp_path / "c", timeout_s=20) == 42
    # conftest checks after every test that the forked child of the hanging one is gone.


def test_ctrl_c_ends_everything_and_prints_what_was_measured(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torchrl_dist", "bench", "replay", *TOY]
    command += ["--peers", "floor", "--ops", "sample", "--rounds", "10000"]
    out, err = tmp_path / "out", tmp_path / "err"
    with out.open("w") as stdout, err.open("w") as stderr:
        process = warm.start(command, stdout=stdout, stderr=stderr, start_new_session=True)
    while "floor: sample" not in err.read_text():
        assert process.poll() is None, err.read_text()
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(40) == 130, err.read_text()
    assert "sample" in out.read_text()
