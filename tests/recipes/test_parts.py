"""The recipe's small parts: who may use a folder, evaluation, the picture, the log files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from torchrl_dist.errors import ConfigurationError
from torchrl_dist.recipes.environments import discrete_task
from torchrl_dist.recipes.evaluate import evaluate
from torchrl_dist.recipes.monitor import Monitor
from torchrl_dist.recipes.plots import Evaluation, draw_learning_curve
from torchrl_dist.recipes.run_directory import claim


def claim_in(
    folder: Path,
    *,
    job: str = "a",
    restarts: int = 0,
    resume: bool = False,
    replay: Path | None = None,
) -> bool:
    return claim(
        folder,
        checkpoint=folder / "checkpoint.pt",
        replay=replay or folder / "replay",
        job_id=job,
        restart_count=restarts,
        resume=resume,
    )


def test_a_restarted_job_continues_its_own_run_without_being_asked(tmp_path: Path) -> None:
    assert claim_in(tmp_path / "run") is False
    assert claim_in(tmp_path / "run", restarts=1) is False  # it died before its first checkpoint
    (tmp_path / "run/checkpoint.pt").touch()
    assert claim_in(tmp_path / "run", restarts=2) is True


def test_a_restart_of_another_job_does_not_continue_a_strangers_run(tmp_path: Path) -> None:
    claim_in(tmp_path / "run", job="a")
    (tmp_path / "run/checkpoint.pt").touch()
    for restarts in (0, 1):  # refused at first, hence restarted by its launcher
        with pytest.raises(ConfigurationError, match="not empty"):
            claim_in(tmp_path / "run", job="b", restarts=restarts)


def test_resume_takes_the_run_over_for_later_restarts(tmp_path: Path) -> None:
    claim_in(tmp_path / "run", job="a")
    (tmp_path / "run/checkpoint.pt").touch()
    assert claim_in(tmp_path / "run", job="b", resume=True) is True
    assert claim_in(tmp_path / "run", job="b", restarts=1) is True


def test_a_run_that_was_stopped_before_it_began_can_be_started_again(tmp_path: Path) -> None:
    assert claim_in(tmp_path / "run", job="a") is False
    assert claim_in(tmp_path / "run", job="b") is False


@pytest.mark.parametrize("text", ['{"job_id": "a", "results": [1]}', "[]", "", '{"job_id": 7}'])
def test_a_users_own_run_json_stays(tmp_path: Path, text: str) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text(text)
    for restart_count in (0, 1):
        with pytest.raises(ConfigurationError, match="is not empty"):
            claim_in(tmp_path / "run", restarts=restart_count)
    assert (tmp_path / "run" / "run.json").read_text() == text


def test_a_buffer_of_an_earlier_run_is_not_taken_by_a_fresh_one(tmp_path: Path) -> None:
    (tmp_path / "buffer").mkdir()
    assert claim_in(tmp_path / "one", replay=tmp_path / "buffer") is False
    (tmp_path / "buffer/header.json").touch()
    with pytest.raises(ConfigurationError, match="--replay-dir.*earlier run"):
        claim_in(tmp_path / "two", replay=tmp_path / "buffer")
    assert not (tmp_path / "two").exists()


def hold_right(observation: torch.Tensor) -> torch.Tensor:
    return torch.tensor([0.0, 1.0]).expand(len(observation), 2)


def test_evaluation_counts_each_environments_first_episode_only() -> None:
    """Pushing right always ends an episode after 8 to 11 steps; the last of 50 takes longest."""
    returns = evaluate(hold_right, "CartPole-v1", episodes=50, seed=0)
    assert len(returns) == 50
    assert 8 <= min(returns) < max(returns) <= 11


def test_evaluation_repeats_with_its_seed_and_differs_without() -> None:
    first, again, other = (
        evaluate(hold_right, "CartPole-v1", episodes=30, seed=seed) for seed in (1, 1, 2)
    )
    assert first == again != other


def test_evaluation_knows_environments_without_a_vectorized_form() -> None:
    def swing(observation: torch.Tensor) -> torch.Tensor:
        return torch.tensor([0.0, 0.0, 1.0]).expand(len(observation), 3)

    assert evaluate(swing, "MountainCar-v0", episodes=2, seed=0) == [-200.0, -200.0]


def test_a_task_has_the_environments_sizes() -> None:
    task = discrete_task("CartPole-v1")
    assert (task.observation_size, task.num_actions, task.reward_threshold) == (4, 2, 475.0)


def evaluations(count: int) -> list[Evaluation]:
    return [Evaluation(100 * i, 10 * i, 2.0 * i, 5.0 * i, 1.0, 9.0 * i) for i in range(1, count)]


@pytest.mark.parametrize("count", [1, 2, 5])
def test_the_picture_is_drawn_from_any_number_of_evaluations(tmp_path: Path, count: int) -> None:
    from matplotlib.image import imread

    draw_learning_curve(
        tmp_path / "curve.png",
        title="t",
        training=[(50.0, 3.0), (150.0, 4.0)][: count - 1],
        evaluations=evaluations(count),
        threshold=20.0,
        best=evaluations(count)[-1] if count > 1 else None,
    )
    pixels = imread(tmp_path / "curve.png")
    assert pixels.shape[0] > 300
    assert np.ptp(pixels) > 0.5
    assert [p.name for p in tmp_path.iterdir()] == ["curve.png"]


def test_a_monitor_goes_on_where_the_resumed_one_stopped(tmp_path: Path) -> None:
    first = Monitor(tmp_path, total_frames=100, title="t", threshold=10.0)
    first.collected(30, [5.0], lag=0)
    first.learned(3, torch.tensor(0.5))
    first.evaluated([9.0, 13.0])
    first.show(force=True)
    first.close()
    saved = first.state()
    second = Monitor(tmp_path, total_frames=100, title="t", threshold=10.0, history=saved)
    second.collected(20, [], lag=1)
    second.close()
    assert (second.frames, second.updates) == (50, 3)
    assert second.seconds > saved["seconds"] > 0
    assert second.solved == first.evaluations[0]
    assert (tmp_path / "csv/scalars/eval/return.csv").read_text() == "30,11.0\n"
    assert (tmp_path / "csv/scalars/train/loss.csv").read_text() == "30,0.5\n"


def test_of_equally_good_policies_the_one_after_a_good_one_ranks_higher(tmp_path: Path) -> None:
    monitor = Monitor(tmp_path, total_frames=100, title="t", threshold=None)
    seen = []
    for mean in (300.0, 500.0, 500.0, 388.0, 500.0, 450.0):
        monitor.collected(10, [], lag=0)
        seen.append(monitor.evaluated([mean]))
    monitor.close()
    assert max(seen, key=monitor.rank) is seen[2]
