"""The whole job, started from the command line as a user does, at toy size."""

from __future__ import annotations

import importlib.util
import inspect
import shutil
import signal
from pathlib import Path

import pytest

from torchrl_dist.checkpoint import load_checkpoint
from torchrl_dist.cli import main
from torchrl_dist.errors import ConfigurationError
from torchrl_dist.recipes.apex.config import ApexConfig
from torchrl_dist.recipes.training.monitor import check_wandb
from torchrl_dist.recipes.training.options import read_options
from torchrl_dist.recipes.training.run_directory import resumed_at

from .jobs import (
    ENDLESS,
    TORCHRUN,
    TOY,
    Endless,
    Job,
    assert_gone,
    finished,
    finished_here,
    progress,
    started,
    workers_of,
)

RUN = ["train", "apex", "--output-dir", "run"]


NEVER_ENDS = f"""
import gymnasium, numpy as np

{inspect.getsource(Endless)}
gymnasium.register("Endless-v0", entry_point=Endless)
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Job]:
    """A finished run with two collectors: its working directory and the job."""
    cwd = tmp_path_factory.mktemp("trained")
    return cwd, finished([*RUN, *TOY, "--collectors", "2", "--seed", "7"], cwd)


def copy_of(trained: tuple[Path, Job], to: Path) -> Path:
    shutil.copytree(trained[0] / "run", to / "run")
    return to


def test_the_result_is_the_last_line_and_says_what_was_done(trained: tuple[Path, Job]) -> None:
    result = trained[1].result
    assert result["frames"] == 3000
    assert result["updates"] > 0
    assert result["seconds"] > 0
    assert result["sps"] == pytest.approx(result["frames"] / result["seconds"], rel=0.1)
    assert 8 <= result["mean_return"] <= 500
    assert "3 fresh episodes" in result["mean_return_is_of"]
    assert result["collectors"] == 2
    assert result["lost_collectors"] == []
    assert result["stopped_by"] is None


def test_the_run_leaves_checkpoint_picture_and_logs(trained: tuple[Path, Job]) -> None:
    cwd, job = trained
    checkpoint = load_checkpoint(cwd / job.result["checkpoint"], recipe="apex")
    assert checkpoint.counters["updates"] == job.result["updates"]
    assert checkpoint.config["seed"] == 7
    assert (cwd / job.result["learning_curve"]).read_bytes().startswith(b"\x89PNG")
    evaluations = (cwd / "run/csv/scalars/eval/return.csv").read_text().splitlines()
    assert len(evaluations) == len(checkpoint.extra["history"]["evaluations"]) >= 2
    assert list((cwd / "run/tensorboard").glob("events.out.tfevents.*"))
    assert not list((cwd / "run").glob(".*tmp"))


def test_the_run_leaves_its_settings_for_another_run_and_for_tensorboard(
    trained: tuple[Path, Job],
) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    cwd, job = trained
    settings = cwd / "run/config.yaml"
    another = ApexConfig(**read_options(settings, ApexConfig))
    saved = load_checkpoint(cwd / job.result["checkpoint"]).config
    assert another.as_plain() == {**saved, "hidden": (16,), "output_dir": None, "replay_dir": None}
    assert another.seed == 7
    events = EventAccumulator(str(cwd / "run/tensorboard")).Reload()
    start = events.summary_metadata["_hparams_/session_start_info"].plugin_data.content
    logged = HParamsPluginData.FromString(start).session_start_info.hparams
    assert logged["seed"].number_value == 7 and logged["hidden"].string_value == "(16,)"
    assert logged.keys() == saved.keys()


def test_a_second_fresh_run_in_the_same_folder_is_refused(
    trained: tuple[Path, Job],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(copy_of(trained, tmp_path))
    assert main([*RUN, *TOY]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1
    assert "--resume" in printed.err


def test_resume_continues_weights_counters_and_buffer(trained, tmp_path, fork_server) -> None:
    """``learning-starts`` equals the capacity: only a buffer that is still there lets it learn."""
    copy_of(trained, tmp_path)
    before = load_checkpoint(tmp_path / "run/checkpoint.pt")
    more = ["--total-frames", "3512", "--learning-starts", "2000"]
    result = finished_here([*RUN, "--resume", *more], tmp_path, fork_server)
    after = load_checkpoint(tmp_path / "run/checkpoint.pt")
    assert result["frames"] == 3512
    assert result["resumes"] == 1
    assert resumed_at(tmp_path / "run") == before.extra["history"]["frames"]
    assert result["updates"] == before.counters["updates"] + 2 * 4
    assert result["seconds"] > trained[1].result["seconds"]
    assert after.config["hidden"] == (16,)
    history = after.extra["history"]
    assert (
        history["evaluations"][: len(before.extra["history"]["evaluations"])]
        == (before.extra["history"]["evaluations"])
    )
    assert history["frames"] == 3512


def test_no_collectors_means_that_the_learners_collect(tmp_path, monkeypatch) -> None:
    """Two, with one buffer. And Weights & Biases is logged to, where it is installed."""
    toy = [*RUN, *TOY, "--collectors", "0", "--learners", "2", "--total-frames", "1024"]
    has_wandb = importlib.util.find_spec("wandb") is not None
    monkeypatch.setenv("WANDB_MODE", "offline")
    job = finished([*toy, *(["--wandb", "a-test"] if has_wandb else [])], tmp_path)
    assert (job.result["frames"], job.result["learners"]) == (1024, 2)
    assert job.result["updates"] == 2 * 7  # of 8 batches, the first of which has 96 rows
    if has_wandb:
        (log,) = (tmp_path / "run/wandb").glob("offline-run-*/run-*.wandb")
        assert b"eval/return" in log.read_bytes()


def test_wandb_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    check_wandb(None)
    with pytest.raises(ConfigurationError, match=r"torchrl-dist\[wandb\]"):
        check_wandb("a-test")


def test_a_stop_signal_during_an_endless_evaluation_leaves_a_checkpoint_and_no_process(
    tmp_path: Path,
) -> None:
    (tmp_path / "endless.py").write_text(NEVER_ENDS)
    arguments = [*RUN, *ENDLESS, "--collectors", "1", "--eval-max-steps", "1000000000"]
    with started([*arguments, "--env", "endless:Endless-v0"], tmp_path) as job:
        job.until(progress(tmp_path / "run"), "progress")
        processes = job.descendants()
        assert processes
        job.process.send_signal(signal.SIGTERM)
        assert job.wait(40) == 128 + signal.SIGTERM, job.said()
        assert_gone(processes)
    assert job.result["stopped_by"] == "SIGTERM"
    assert "Traceback" not in job.stderr.read_text(), job.said()
    saved = load_checkpoint(tmp_path / job.result["checkpoint"])
    assert saved.counters["updates"] == job.result["updates"] > 0


def test_nothing_outlives_a_learner_that_was_killed(tmp_path: Path) -> None:
    with started([*RUN, *ENDLESS, "--collectors", "2"], tmp_path) as job:
        job.until(progress(tmp_path / "run"), "progress")
        processes = job.descendants()
        assert len(processes) >= 2
        job.process.kill()
        job.process.wait()
        assert_gone(processes, timeout_s=10)
    load_checkpoint(tmp_path / "run/checkpoint.pt")


def test_torchrun_restarts_a_job_that_lost_a_rank_and_it_goes_on(tmp_path: Path) -> None:
    """The learner, and then the collector."""
    launcher = [*TORCHRUN, "--nproc-per-node", "2", "--max-restarts", "2"]
    arguments = [*RUN, *TOY, "--total-frames", "10_000"]
    processes = []
    updates = 0
    with started(arguments, tmp_path, launcher=launcher) as job:
        for victim in ("0", "1"):
            job.until(progress(tmp_path / "run", more_than=updates), "progress")
            processes += job.descendants()
            ranks = {p.environ()["RANK"]: p for p in workers_of(job)}
            ranks[victim].kill()
            assert_gone([ranks[victim]])
            updates = load_checkpoint(tmp_path / "run/checkpoint.pt").counters["updates"]
        assert job.wait() == 0, job.said()
        assert_gone(processes)
    result = job.result
    assert result["resumes"] == 2, job.said()
    assert result["frames"] == 10_000
