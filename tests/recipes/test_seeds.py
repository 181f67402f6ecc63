"""`train --seeds` and `--video`."""

from __future__ import annotations

import itertools
import json
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.recipes.jobs import assert_gone
from tests.spawn import wait_until
from torchrl_dist.checkpoint import Checkpoint, save_checkpoint
from torchrl_dist.cli import main
from torchrl_dist.recipes.apex.config import ApexConfig
from torchrl_dist.recipes.training import seeds

TOY = ["train", "apex", "--env", "CartPole-v1", "--collectors", "0", "--envs-per-collector", "4"]
TOY += ["--hidden", "8", "--learning-starts", "128", "--eval-episodes", "2"]
TOY += ["--eval-interval-frames", "128", "--frames-per-batch", "128"]


def test_seeds_run_one_after_the_other_and_finished_ones_are_skipped(tmp_path, capsys) -> None:
    folder = tmp_path / "all"
    toy = [*TOY, "--total-frames", "256", "--seed", "3", "--output-dir", str(folder)]
    assert main([*toy, "--seeds", "2"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["seeds"] == [3, 4] == [each["seed"] for each in result["results"]]
    returns = [each["mean_return"] for each in result["results"]]
    assert result["mean_return"] == pytest.approx(sum(returns) / 2)
    assert (folder / "seeds.png").read_bytes().startswith(b"\x89PNG")
    assert {"seed3", "seed4", "seeds.jsonl", "seeds.png"} == {x.name for x in folder.iterdir()}
    assert main([*toy, "--seeds", "3"]) == 2  # a new run needs another folder
    assert "--resume" in capsys.readouterr().err
    at = (folder / "seed3/checkpoint.pt").stat().st_mtime_ns
    assert main([*toy, "--seeds", "3", "--resume"]) == 0
    again = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert again["seeds"] == [3, 4, 5] and again["results"][:2] == result["results"]
    assert (folder / "seed3/checkpoint.pt").stat().st_mtime_ns == at


def test_a_stopped_seed_is_continued(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torchrl_dist", *TOY, "--output-dir", "all", "--seeds", "2"]
    endless = [*command, "--total-frames", "100_000_000", "--json"]
    with subprocess.Popen(endless, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as job:
        logs = tmp_path / "all/seed0/csv/scalars/eval/return.csv"
        wait_until(logs.exists, timeout_s=100)
        children = psutil.Process(job.pid).children(recursive=True)
        job.send_signal(signal.SIGTERM)
        said, _ = job.communicate(timeout=60)
    assert job.returncode == 143
    assert_gone(children)
    (result,) = json.loads(said.splitlines()[-1])["results"]
    assert result["stopped_by"] == "SIGTERM" and not (tmp_path / "all/seed1").exists()
    frames = str(result["frames"] + 256)
    done = subprocess.run(
        [*command, "--total-frames", frames, "--resume", "--json"],
        cwd=tmp_path, stdout=subprocess.PIPE, text=True, timeout=100, check=True,
    )  # fmt: skip
    first, second = json.loads(done.stdout.splitlines()[-1])["results"]
    assert (first["resumes"], second["resumes"]) == (1, 0)
    assert first["frames"] >= int(frames) and second["frames"] >= int(frames)


def test_the_runs_end_with_a_killed_command(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torchrl_dist", *TOY, "--output-dir", "all", "--seeds", "2"]
    with subprocess.Popen([*command, "--total-frames", "100_000_000"], cwd=tmp_path) as job:
        wait_until((tmp_path / "all/seed0/checkpoint.pt").exists, timeout_s=100)
        children = psutil.Process(job.pid).children(recursive=True)
        job.kill()
        job.wait(20)
    assert_gone(children, 30)
    assert not (tmp_path / "all/seed1").exists()


def test_what_seeds_cannot_do_is_refused(tmp_path, monkeypatch, capsys) -> None:
    folder = tmp_path / "all"
    assert main([*TOY, "--seeds", "2", "--resume", "--output-dir", str(folder)]) == 2
    assert "no run for any seed" in capsys.readouterr().err
    assert main([*TOY, "--seeds", "0"]) == 2
    monkeypatch.setenv("RANK", "0")
    assert main([*TOY, "--seeds", "2"]) == 2
    assert "slurm --seeds" in capsys.readouterr().err


def test_each_best_policy_has_a_video(tmp_path: Path, capsys) -> None:
    run = tmp_path / "run"
    toy = [*TOY, "--total-frames", "512", "--eval-max-steps", "20", "--output-dir", str(run)]
    assert main([*toy, "--video"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    import imageio.v2 as imageio

    best = imageio.mimread(run / "videos" / f"{result['best_evaluation']['frames']}.mp4")
    assert 5 < len(best) <= 21 and best[0].shape[2] == 3


def test_a_video_of_what_cannot_be_shown_is_refused_before_the_run(
    tmp_path, monkeypatch, capsys
) -> None:
    text = "import gymnasium\n\ndef make():\n    return gymnasium.make('CartPole-v1')\n"
    (tmp_path / "unseen.py").write_text(text)  # takes no render_mode
    monkeypatch.chdir(tmp_path)
    hidden = [*TOY, "--env", "unseen:make", "--total-frames", "256", "--output-dir", "run"]
    assert main([*hidden, "--video"]) == 2
    assert "--video: unseen:make cannot be shown here" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_seed_that_has_no_checkpoint_yet_begins_anew(tmp_path, capsys) -> None:
    folder = tmp_path / "all"
    (folder / "seed0").mkdir(parents=True)  # as after a kill before the first checkpoint
    toy = [*TOY, "--total-frames", "256", "--output-dir", str(folder), "--seeds", "1", "--resume"]
    assert main(toy) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["seeds"] == [0]
    line = json.loads((folder / "seeds.jsonl").read_text())
    for changed in ({}, line | {"seed": "0"}, line | {"mean_return": "x"}, {"seed": 0}):
        (folder / "seeds.jsonl").write_text(json.dumps(changed))
        assert main(toy) == 2
        assert "is damaged" in capsys.readouterr().err


def test_resumed_seeds_have_the_options_of_the_first_run(tmp_path, monkeypatch, capsys) -> None:
    """A seed that has not begun must not get the defaults, or the result is of several jobs."""
    folder, commands = tmp_path / "all", []
    first = ApexConfig(
        env="Acrobot-v1", hidden=(8, 9), total_frames=300_000, seed=3, gamma=0.9,
        output_dir=str(folder / "seed3"), replay_dir="rows-seed3",
    )  # fmt: skip
    save_checkpoint(folder / "seed3/checkpoint.pt", Checkpoint("apex", first.as_plain(), {}))
    line = {"seed": 3, "frames": 250_000, "mean_return": 1.0, "stopped_by": None}
    (folder / "seeds.jsonl").write_text(json.dumps(line) + "\n")

    def run(command: list[str]) -> tuple[int, str]:
        options = command[command.index("--json") + 1 :]
        commands.append(options)
        seed = int(options[options.index("--seed") + 1])
        return 0, json.dumps({**line, "seed": seed, "frames": 300_000})

    monkeypatch.setattr(seeds, "_run", run)
    resume = ["train", "apex", "--seeds", "2", "--resume", "--output-dir", str(folder)]
    assert main([*resume, "--gamma", "0.9"]) == 0
    continued, begun = commands
    assert "--resume" in continued and "--env" not in continued  # its checkpoint has the options
    assert "--resume" not in begun
    given = dict(itertools.pairwise(begun))
    assert (given["--env"], given["--seed"], given["--total-frames"]) == (
        "Acrobot-v1", "4", "300000",
    )  # fmt: skip
    assert (given["--gamma"], given["--replay-dir"]) == ("0.9", "rows-seed4")
    assert begun[begun.index("--hidden") :][1:3] == ["8", "9"]
    capsys.readouterr()
    for other, says in (
        (["apex", "--env", "CartPole-v1"], "--env: got CartPole-v1, but the run to resume has"),
        (["ddppo"], "was written by the recipe 'apex', expected 'ddppo'"),
    ):
        assert main(["train", *other, *resume[2:]]) == 2
        assert says in capsys.readouterr().err
    assert len(commands) == 2
