"""Published results, and the verdict about ours."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from torchrl_dist.bench import published
from torchrl_dist.bench.published_rows import ROWS, SOURCES, Published, interval, verdict
from torchrl_dist.cli import main
from torchrl_dist.errors import TorchRLDistError
from torchrl_dist.recipes.catalog import RECIPES

TINY = Published(
    "zoo", "apex", "CartPole-v1", 1024, 20.0, None,
    {"envs_per_collector": 4, "learning_starts": 256, "hidden": (8,)},
)  # fmt: skip


def test_every_row_is_a_valid_job_of_its_source_and_environment() -> None:
    for name, row in ROWS.items():
        assert row.source in SOURCES
        for processes in (0, 1, 2, 4):
            if RECIPES[row.recipe].config().recipe == "r2d2" and processes:
                continue
            config = published.config_of(name, 3, processes)
            assert (config.env, config.total_frames, config.seed) == (row.env, row.frames, 3)


def test_more_processes_keep_the_frames_and_the_environments() -> None:
    jobs = [published.config_of("slm-dqn-lunar", 0, processes) for processes in (0, 1, 2, 4)]
    assert {max(1, job.collectors) * job.envs_per_collector for job in jobs} == {8}
    jobs = [published.config_of("slm-ppo-cartpole", 0, processes) for processes in (1, 2, 4)]
    assert [(job.learners, job.envs_per_collector) for job in jobs] == [(1, 4), (2, 2), (4, 1)]


def test_the_interval_is_the_bootstrap_of_the_mean() -> None:
    # of the 27 resamples, 1/27 has the mean 1.0 and 1/27 the mean 6.0, which is more than 0.025
    assert interval([1.0, 2.0, 6.0]) == (1.0, 6.0)
    assert interval([5.0]) == (5.0, 5.0)
    rng = np.random.default_rng(1)  # for many values it is the normal interval
    many = rng.normal(10, 2, 400)
    half = 1.96 * many.std() / 20
    assert interval(many) == pytest.approx((many.mean() - half, many.mean() + half), abs=0.03)


@pytest.mark.parametrize(
    ("ours", "word"),
    [((1, 2), "below"), ((1, 3), "reproduced"), ((4, 9), "reproduced"), ((5.1, 9), "above")],
)
def test_a_row_is_reproduced_if_the_intervals_overlap(ours: Any, word: str) -> None:
    assert verdict(ours, (3, 5)) == word


def test_a_source_with_a_spread_has_an_interval_of_its_mean() -> None:
    row = ROWS["cleanrl-ppo-hopper"]
    low, high = row.interval
    assert (low + high) / 2 == pytest.approx(row.mean)
    assert high - low == pytest.approx(2 * 1.96 * 271.7 / 3**0.5)
    assert ROWS["zoo-dqn-cartpole"].interval == (500.0, 500.0)
    low, high = ROWS["zoo-sac-pendulum"].interval  # over 750 episodes
    assert high - low == pytest.approx(2 * 1.96 * 88.7 / 750**0.5)


def test_a_row_is_trained_shown_and_not_trained_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    monkeypatch.setitem(ROWS, "tiny", TINY)
    file, picture = tmp_path / "runs.jsonl", tmp_path / "runs.png"
    command = ["bench", "published", "--rows", "tiny", "--seeds", "1", "--json", str(file)]
    assert main([*command, "--plot", str(picture)]) == 0
    (line,) = [json.loads(text) for text in file.read_text().splitlines()]
    assert (line["row"], line["seed"], line["processes"]) == ("tiny", 0, 0)
    assert line["frames"] >= 1024 and line["final"] >= 8 and line["training"] >= 8
    assert picture.read_bytes().startswith(b"\x89PNG")
    shown = capsys.readouterr()
    assert "tiny" in shown.out and "seed 0" in shown.err

    def fails(*_: Any) -> Any:
        raise TorchRLDistError("trained again")

    long = json.dumps({**line, "row": "tiny", "seed": 7, "curve": [[1.5, 2.5]] * 100_000})
    file.write_text(file.read_text() + long + "\n")  # of hours, at a point per second
    monkeypatch.setattr(published, "measure", fails)
    assert main(command) == 0
    assert "trained again" not in capsys.readouterr().err
    assert main([*command[:-3], "2", *command[-2:]]) == 1  # another seed
    assert "seed 1, one process: failed: trained again" in capsys.readouterr().err
    assert len(file.read_text().splitlines()) == 2
    changed = dataclasses.replace(TINY, settings={**TINY.settings, "seed": 1})
    monkeypatch.setitem(ROWS, "tiny", changed)
    assert main(command) == 1
    said = capsys.readouterr()
    assert "2 runs do not count" in said.err and "seed 0, one process: failed" in said.err
    assert "│" not in said.out  # no table of them
    monkeypatch.setitem(ROWS, "tiny", dataclasses.replace(TINY, frames=2 * TINY.frames))
    assert main(command) == 1
    assert "2 runs do not count" in capsys.readouterr().err


def test_a_batch_is_so_small_that_a_run_of_any_row_counts() -> None:
    for name, row in ROWS.items():
        assert published.config_of(name, 0, 4).frames_per_batch < row.frames / 20, name


def test_what_distribution_changes_is_shown_for_rows_with_several_layouts(capsys) -> None:
    """By the means of the whole runs: 200 frames at 10, then up to 30 at frame 400."""
    run = {"training": 30.0, "final": 40.0, "seconds": 5.0, "frames": 400, "seed": 0}
    run |= {"curve": [[200.0, 10.0], [400.0, 30.0]]}
    alone, _, many = lines = [
        {**run, "row": row, "processes": processes}
        for row, processes in [
            ("zoo-ppo-cartpole", 0),
            ("zoo-dqn-lunar", 0),
            ("zoo-ppo-cartpole", 2),
        ]
    ]
    assert published.whole_run(alone) == (200 * 10 + 200 * 20) / 400
    many["curve"] = []
    published.show(lines)
    table = capsys.readouterr().out.partition("what distribution changes")[2].split(" differs:")[0]
    assert "15.0 (15.0 to 15.0)" in table and "nan" in table and "lunar" not in table
    published.show(lines[:2])
    assert "what distribution changes" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('{"bench": "train"}\n', "another benchmark"),
        ("no json\n", "did not write"),
        ('{"bench": "published"}\n', "did not write"),
        ('{"bench": "published", "row": "zoo', "incomplete"),
    ],
)
def test_a_file_of_something_else_is_refused(tmp_path: Path, text: str, why: str, capsys) -> None:
    file = tmp_path / "lines"
    file.write_text(text)
    assert main(["bench", "published", "--json", str(file)]) == 2
    assert why in capsys.readouterr().err
    assert file.read_text() == text


def test_unknown_rows_and_numbers_are_refused(capsys) -> None:
    for wrong in (["--rows", "zoo"], ["--processes", "-1"], ["--seeds", "0"]):
        assert main(["bench", "published", *wrong]) == 2
        assert wrong[0] in capsys.readouterr().err


def test_a_stopped_command_leaves_no_process_and_whole_lines(tmp_path: Path) -> None:
    file = tmp_path / "runs.jsonl"
    command = [sys.executable, "-m", "torchrl_dist", "bench", "published"]
    command += ["--rows", "slm-dqn-acrobot", "--json", str(file)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, env=os.environ) as process:
        import psutil

        me = psutil.Process(process.pid)
        while not (children := me.children(recursive=True)):
            assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 143
        _, left = psutil.wait_procs(children, 30)
        assert not left
    assert not file.exists()
