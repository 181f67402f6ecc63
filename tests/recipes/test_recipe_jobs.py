"""Whole jobs of the other recipes than Ape-X, started from the command line, at toy size."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch

from torchrl_dist import local_cluster
from torchrl_dist.checkpoint import load_checkpoint
from torchrl_dist.recipes.apex.config import ApexConfig
from torchrl_dist.recipes.ddppo.config import DDPPOConfig
from torchrl_dist.recipes.impala.config import ImpalaConfig
from torchrl_dist.recipes.parts.play import play
from torchrl_dist.recipes.r2d2.config import R2D2Config
from torchrl_dist.recipes.sac.config import SACConfig
from torchrl_dist.recipes.training.config import ReplayConfig
from torchrl_dist.runtime import ForkServer

from .jobs import TORCHRUN, assert_gone, finished, finished_here, progress, started, workers_of
from .learners import a_learner

SMALL = ["--hidden", "8", "--eval-episodes", "2", "--eval-max-steps", "20"]
OFTEN = ["--eval-interval-frames", "500", "--checkpoint-interval-s", "0.2"]
TOY = {
    "ddppo": ["--learners", "1", "--collectors", "3", "--frames-per-batch", "192"],
    "impala": ["--collectors", "3", "--frames-per-batch", "80"],
    "r2d2": ["--collectors", "3", "--batch-size", "4", "--lstm", "8", "--frames-per-batch", "96"],
    "sac": ["--collectors", "3", "--batch-size", "16", "--updates-per-frame", "0.25"],
}


@pytest.mark.parametrize("recipe", TOY)
def test_a_job_goes_on_without_a_lost_collector_stops_when_told_and_resumes(
    recipe: str, tmp_path: Path, fork_server: ForkServer
) -> None:
    run = ["train", recipe, "--output-dir", "run"]
    arguments = [*run, *TOY[recipe], *SMALL, *OFTEN, "--total-frames", "100_000_000"]
    with started(arguments, tmp_path) as job:
        job.until(progress(tmp_path / "run"), "progress")
        processes = job.descendants()
        workers_of(job)[0].kill()
        job.until(lambda: " is lost (" in job.stderr.read_text(), "notice of the loss")
        updates = load_checkpoint(tmp_path / "run/checkpoint.pt").counters["updates"]
        job.until(progress(tmp_path / "run", more_than=updates), "progress without it")
        os.killpg(job.process.pid, signal.SIGINT)  # as a terminal does: all get it
        assert job.wait(30) == 128 + signal.SIGINT, job.said()
        assert_gone(processes)
    result = job.result
    assert result["stopped_by"] == "SIGINT"
    assert len(result["lost_collectors"]) == 1
    assert "Traceback" not in job.stderr.read_text(), job.said()
    assert f"kept run; resume: torchrl-dist train {recipe} --resume" in job.stderr.read_text()
    saved = load_checkpoint(tmp_path / "run/checkpoint.pt", recipe=recipe)
    assert saved.counters["updates"] == result["updates"] > 0

    more = str(result["frames"] + 500)
    resumed = finished_here([*run, "--resume", "--total-frames", more], tmp_path, fork_server)
    assert resumed["frames"] >= result["frames"] + 500
    assert resumed["updates"] > result["updates"]
    assert resumed["resumes"] == 1
    assert resumed["mean_return"] is not None
    assert resumed["bound_by"]["by"] in ("collectors", "learner", "both")
    if recipe == "sac":  # a quarter of an update per frame, from the limiter's margin on
        assert 0.15 < resumed["updates"] / resumed["frames"] < 0.35
    tags = {str(p.relative_to(tmp_path / "run/csv/scalars")) for p in tmp_path.rglob("*.csv")}
    expected = {"time/learner_waits", "train/loss", "eval/return", "train/policy_lag"}
    expected |= {"train/replay_ratio"} if recipe in ("r2d2", "sac") else {"train/policy_lag_mean"}
    assert {f"{tag}.csv" for tag in expected} <= tags
    assert len(play(tmp_path / "run", episodes=2, seed=0)["returns"]) == 2


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_run_that_a_second_signal_ends_says_where_it_is_and_how_to_resume_it(
    number: int, tmp_path: Path
) -> None:
    arguments = ["train", "impala", "--output-dir", "my run", "--collectors", "0"]
    with started([*arguments, "--eval-episodes", "100000"], tmp_path) as job:
        job.until((tmp_path / "my run/config.yaml").exists, "checkpoint")
        job.process.send_signal(number)
        job.until(lambda: "a second SIGINT" in job.stderr.read_text(), "notice of the signal")
        job.process.send_signal(number)
        assert job.wait(30) == 128 + number, job.said()
    kept = "kept my run; resume: torchrl-dist train impala --resume --output-dir 'my run'\n"
    assert job.stderr.read_text().count(kept) == 1, job.said()


def test_learners_of_a_launcher_train_and_others_take_the_run_over(tmp_path, fork_server) -> None:
    """Started by torchrun, resumed by one command with its own processes."""
    run = ["train", "ddppo", "--output-dir", "run"]
    toy = [*run, *SMALL, "--frames-per-batch", "128", "--total-frames", "512"]
    result = finished(toy, tmp_path, launcher=[*TORCHRUN, "--nproc-per-node", "2"]).result
    assert (result["learners"], result["frames"]) == (2, 512)
    assert result["updates"] == 4 * 16
    result = finished_here([*run, "--resume", "--total-frames", "768"], tmp_path, fork_server)
    assert (result["learners"], result["frames"]) == (2, 768)
    assert result["updates"] == 6 * 16


def test_a_lost_learner_ends_the_job_with_a_checkpoint(tmp_path: Path) -> None:
    run = ["train", "ddppo", "--output-dir", "run", "--timeout-s", "20", "--learners", "2"]
    toy = [*run, *SMALL, *OFTEN, "--frames-per-batch", "128", "--total-frames", "100_000_000"]
    with started(toy, tmp_path) as job:
        job.until(progress(tmp_path / "run"), "progress")
        processes = job.descendants()
        workers_of(job)[0].kill()
        assert job.wait(60) == 1, job.said()
        assert_gone(processes)
    (line,) = [x for x in job.stderr.read_text().splitlines() if "torchrl-dist: failed" in x]
    assert "learner1" in line or "rank 1" in line
    assert "--resume" in line
    assert load_checkpoint(tmp_path / "run/checkpoint.pt").counters["updates"] > 0


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (DDPPOConfig, {"learners": 1}),
        (ImpalaConfig, {}),
        (ApexConfig, {"envs_per_collector": 2, "batch_size": 8}),
        (R2D2Config, {"envs_per_collector": 2, "batch_size": 4, "lstm": 8, "sequence": 8}),
        (SACConfig, {"learning_starts": 16}),
    ],
)
def test_a_restored_learner_takes_the_same_next_step(kind, settings, tmp_path: Path) -> None:
    config = kind(
        output_dir=str(tmp_path), frames_per_batch=64, collectors=0, hidden=(8,), **settings
    )
    learners = []

    def step(learner, data, frames: int) -> None:
        torch.manual_seed(frames)
        if kind is SACConfig:
            learner._update(data.clone())
        elif issubclass(kind, ApexConfig):
            learner.dqn.update(data.clone())
        else:
            learner.learn(data.clone(), frames)

    with local_cluster({"learner": 1}) as session:
        try:
            for frames in (0, 64):
                learners.append(a_learner(config, session, seed=frames, frames=frames))
            data = next(iter(learners[0].collector))
            if issubclass(kind, ReplayConfig):  # it draws its batches itself
                data = learners[0].buffer.sample()
            before = learners[1].state_dict()["model"]
            step(learners[0], data, 64)
            learners[1].load_state_dict(learners[0].state_dict())
            if kind is ImpalaConfig:  # a resumed run begins new trajectories
                data["collector", "traj_ids"] += 1000
            for learner in learners:
                step(learner, data, 128)
            states = [learner.state_dict()["model"] for learner in learners]
        finally:
            for learner in learners:
                learner.close()
    assert states[0].keys() == states[1].keys()
    for name, value in states[0].items():
        assert torch.equal(value, states[1][name]), name
    # the networks, also those that follow slowly
    assert any(not torch.equal(value, before[name]) for name, value in states[0].items())
