"""The collection benchmark at toy size."""

from __future__ import annotations

import functools
import time
from pathlib import Path

import cloudpickle
import numpy as np
import pytest

from tests.bench.conftest import measured, parsed
from torchrl_dist.bench import collect, collect_learner
from torchrl_dist.bench.collect_cells import set_step_s, single_env, steps_so_far
from torchrl_dist.bench.collect_learner import draw_durations
from torchrl_dist.bench.collect_peers import PEERS
from torchrl_dist.bench.collect_plan import FLOOR, OTHERS, OURS, Cell, Result
from torchrl_dist.errors import ConfigurationError
from torchrl_dist.runtime import ForkServer

FIELDS = """peer env workers step_s steps_per_message sps ideal_sps floor_sps efficiency
    startup_s""".split()


parse = functools.partial(parsed, collect)


@pytest.mark.alone
def test_a_toy_run_gives_cells_with_sane_content(tmp_path: Path, capsys) -> None:
    options = ["--env", "sleep", "--workers", "2", "--step-s", "0.02,0.005", "--rounds", "1"]
    options += ["--steps-per-message", "4", "--seconds", "0.5", "--peers", "gymnasium-async"]
    options += ["--ours", "ours,ours-inference-2"]
    lines = measured(collect, options, tmp_path)
    cells = {(cell["peer"], cell["step_s"]): cell for cell in lines}
    peers = ("floor", "ours", "ours-inference-2", "gymnasium-async")
    assert set(cells) == {(peer, step_s) for peer in peers for step_s in (0.005, 0.02)}
    for (_, step_s), cell in cells.items():
        assert set(FIELDS) <= set(cell)
        assert cell["bench"] == "collect" and cell["env"] == "sleep"
        assert (cell["workers"], cell["steps_per_message"]) == (2, 4)
        assert cell["ideal_sps"] == 2 / step_s
        assert cell["floor_sps"] == cells["floor", step_s]["sps"]
        assert cell["efficiency"] == cell["sps"] / cell["ideal_sps"]
        assert 0.05 < cell["efficiency"] < 1.1  # sleeps cannot be shorter than asked for
        assert cell["startup_s"] > 0
    assert "gymnasium-async" in capsys.readouterr().out


@pytest.mark.parametrize("env", ["cartpole", "cartpole-native"])
def test_envs_that_compute_are_compared_with_the_floor(env: str, tmp_path: Path) -> None:
    options = ["--env", env, "--workers", "1", "--envs", "8", "--peers", "none"]
    options += ["--rounds", "1", "--seconds", "0.3", "--steps-per-message", "16"]
    options += ["--ours", "ours-node"]
    lines = measured(collect, options, tmp_path, picture=False)
    cells = {cell["peer"]: cell for cell in lines}
    assert cells["floor"]["efficiency"] == 1.0
    assert set(cells) == {"floor", "ours-node"}
    assert cells["ours-node"]["ideal_sps"] == cells["floor"]["sps"]
    assert cells["ours-node"]["step_s"] == 0 and cells["ours-node"]["envs"] == 8


def test_medians_and_efficiencies_are_over_rounds_and_lines() -> None:
    def cell(peer: str) -> Cell:
        return Cell(peer, "sleep", 4, 1, 0.1, 8, 1.0, 9.0)

    found = {
        (cell(peer),): [[Result(sps, 1.0, 0.1)] for sps in rates]
        for peer, rates in {"floor": [38, 40, 36], "ours": [10, 30, 20]}.items()
    }
    ours = next(c for c in collect.to_cells(found) if c["peer"] == "ours")
    assert (ours["sps"], ours["ideal_sps"], ours["floor_sps"]) == (20, 40, 38)
    assert (ours["efficiency"], ours["rounds"]) == (0.5, 3)


def test_the_defaults_measure_the_sleepers_and_leave_out_endless_messages(capsys) -> None:
    groups = collect.plan(parse("--step-s", "1,0.1", "--steps-per-message", "4,64"), ["ours"])
    cells = [cell for group in groups for start in group for cell in start]
    assert {cell.workers for cell in cells} == {4, 8, 16, 32}
    assert {(cell.step_s, cell.steps) for cell in cells} == {(1.0, 4), (0.1, 4)}
    assert all(cell.seconds >= 3 * cell.steps * cell.step_s for cell in cells)
    assert "a message would take 64 s" in capsys.readouterr().err


def test_peers_that_cannot_be_measured_are_named_with_the_reason(monkeypatch, capsys) -> None:
    monkeypatch.setattr(PEERS["torchrl-ray"], "missing", lambda: "no ray")
    assert "torchrl-ray" not in collect._chosen(parse("--peers", "torchrl-ray"))
    assert "skipped torchrl-ray: no ray" in capsys.readouterr().err
    assert collect._chosen(parse("--peers", "none", "--ours", "ours-node")) == [FLOOR, "ours-node"]
    assert collect._chosen(parse("--peers", "none")) == [FLOOR, *OURS]
    collect.plan(parse("--workers", "32", "--envs", "64"), ["gymnasium-async"])
    assert "2048 processes" in capsys.readouterr().err
    with pytest.raises(ConfigurationError, match="--step-s"):
        collect.plan(parse("--env", "cartpole", "--step-s", "1"), ["ours"])


def test_one_start_measures_all_durations_but_not_where_the_length_is_chosen(capsys) -> None:
    asked = ["--workers", "2", "--step-s", "0.1,0.001", "--steps-per-message", "4,8,auto"]
    fours, eights, *autos = collect.plan(parse(*asked), ["floor", "ours", "tianshou-subproc"])
    assert [[cell.step_s for cell in start] for start in fours] == [[0.001, 0.1]] * 3
    assert [start[0].peer for start in fours] == ["floor", "ours", "tianshou-subproc"]
    assert [start[0].peer for start in eights] == ["floor", "ours"]  # steps of tianshou are single
    assert "it always sends single steps" in capsys.readouterr().err
    assert [[cell.step_s for cell in start] for group in autos for start in group] == [
        [0.001], [0.001], [0.1], [0.1]
    ]  # fmt: skip


def test_an_env_that_is_sent_elsewhere_counts_its_steps_and_keeps_pace(tmp_path: Path) -> None:
    set_step_s(str(tmp_path), 1e-4)
    env = cloudpickle.loads(cloudpickle.dumps(single_env("sleep", str(tmp_path))))
    for _ in range(3):
        env.step(0)
    assert steps_so_far(str(tmp_path)) == 3
    set_step_s(str(tmp_path), 0.1)
    begun = time.perf_counter()
    env.step(0)
    assert time.perf_counter() - begun >= 0.1


def test_the_command_knows_every_peer() -> None:
    assert list(PEERS) == [FLOOR, *OURS, *OTHERS]


def question(*arguments: str) -> list[collect_learner.Question]:
    return collect_learner.plan(parse("--seconds", "0.3", *arguments))


@pytest.mark.alone
def test_one_learner_takes_in_prepared_rows(fork_server: ForkServer) -> None:
    cells = []
    for asked in question("--question", "ingest", "--workers", "1"):
        cells.append(collect_learner.to_cell(asked, [collect_learner.measure(asked, fork_server)]))
        assert set(FIELDS) <= set(cells[-1])
    assert [(cell["env"], cell["steps_per_message"]) for cell in cells] == [
        ("cartpole-rows", 64), ("cartpole-rows", 1024), ("84x84x4-rows", 8), ("84x84x4-rows", 64)
    ]  # fmt: skip
    for cell in cells:
        row_bytes = 2 * 84 * 84 * 4 if "84" in cell["env"] else 2 * 4 * 4
        assert cell["message_bytes"] > cell["steps_per_message"] * row_bytes
    assert cells[1]["sps"] > 2 * cells[0]["sps"]  # a message has its price


def test_deadlines_change_which_workers_are_in_a_receive(tmp_path: Path) -> None:
    options = ["--question", "deadlines", "--workers", "3", "--envs", "20", "--rounds", "1"]
    options += ["--durations", "slow", "--networks", "small", "--deadlines", "0.0001,none"]
    options += ["--seconds", "0.5", "--steps-per-message", "8"]
    for _ in range(3):  # on a busy machine all may have arrived before the learner looks
        hurried, patient = measured(collect, options, tmp_path)[-2:]
        if hurried["workers_per_receive"] < 3:
            break
    assert set(FIELDS) <= set(hurried)
    assert (hurried["deadline_s"], patient["deadline_s"]) == (0.0001, None)
    assert 1 <= hurried["workers_per_receive"] < patient["workers_per_receive"] == 3


def test_a_node_gets_new_weights_once_for_all_its_processes(fork_server: ForkServer) -> None:
    asked = question("--question", "weights", "--workers", "3", "--seconds", "0.1")
    ranks, node = (collect_learner.measure(each, fork_server) for each in asked)
    size = node["policy_bytes"]
    assert size <= node["sent_bytes_per_update"] < 1.1 * size
    assert 3 * size <= ranks["sent_bytes_per_update"] < 3.3 * size


@pytest.mark.parametrize("law", ["normal", "lognormal", "slow"])
def test_step_times_of_every_law_have_the_same_mean(law: str) -> None:
    drawn = draw_durations(np.random.default_rng(0), law, 0.01, 200_000)
    assert abs(drawn.mean() / 0.01 - 1) < 0.02 and drawn.min() >= 0
    assert (np.median(drawn) < 0.008) == (law != "normal")
