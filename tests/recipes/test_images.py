"""Environments that show images, from the spaces to whole runs at toy size."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from tensordict import TensorDict

from torchrl_dist import local_cluster
from torchrl_dist.checkpoint import load_checkpoint
from torchrl_dist.cli import main
from torchrl_dist.errors import ConfigurationError
from torchrl_dist.recipes.apex.actor import RowsWithPriority
from torchrl_dist.recipes.parts import environments
from torchrl_dist.recipes.parts.environments import Images, look_at, make_env
from torchrl_dist.recipes.parts.networks import PolicySpec, QNetwork, ValueNetwork, saved_policy
from torchrl_dist.recipes.sac import SACConfig
from torchrl_dist.recipes.sac import recipe as sac

ATARI, GRID = "ALE/Pong-v5", "MiniGrid-Empty-5x5-v0"
for package in ("ale_py", "cv2", "minigrid"):
    pytest.importorskip(package)
PIXELS, CELLS = Images((4, 84, 84), 255.0), Images((20, 7, 7), 1.0)


@pytest.mark.parametrize(("env", "images"), [(ATARI, PIXELS), (GRID, CELLS)])
def test_images_are_seen_as_channels_height_width_of_bytes(env: str, images: Images) -> None:
    task = look_at(env, continuous="none")
    assert task.images == images
    assert task.frames == {"observation": images.shape[0] if env == ATARI else 1}
    made = make_env(env)
    observation, _ = made.reset(seed=0)
    assert observation.dtype == np.uint8 and observation.shape == images.shape
    assert 0 < observation.max() <= images.high
    made.close()
    if env == GRID:  # one thing, one colour and one state in each cell
        assert (observation.sum(0) == 3).all()
        assert look_at(env, continuous="bounded") == task


class Picture(gymnasium.Env):
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, space: gymnasium.Space) -> None:
        self.observation_space = space


def small_picture() -> gymnasium.Env:
    return Picture(gymnasium.spaces.Box(0, 255, (3, 2, 9), np.uint8))


def float_picture() -> gymnasium.Env:
    return Picture(gymnasium.spaces.Box(0.0, 1.0, (3, 9, 9), np.float32))


def steered_picture() -> gymnasium.Env:
    made: gymnasium.Env = Picture(gymnasium.spaces.Box(0, 255, (3, 9, 9), np.uint8))
    made.action_space = gymnasium.spaces.Box(-1, 1, (1,))
    return made


def test_a_gaussian_policy_sees_images_which_are_not_normalized() -> None:
    task = look_at(f"{__name__}:steered_picture", continuous="any")
    spec = PolicySpec.of(task, "categorical", (8,), normalized=True)
    assert (spec.kind, spec.images, spec.normalized) == ("gaussian", task.images, False)
    assert spec.images is not None
    rows = torch.randint(0, 256, (5, *spec.images.shape), dtype=torch.uint8)
    assert spec.network().greedy(rows).shape == (5, 1)
    with pytest.raises(ConfigurationError, match="expected a Box with one dimension; to"):
        look_at(f"{__name__}:steered_picture", continuous="bounded")


@pytest.mark.parametrize("shape", [(96, 96, 3), (64, 48, 3), (84, 84, 4), (10, 10, 6), (9, 9, 1)])
def test_pictures_whose_last_axis_is_the_channels_are_refused(shape: Any, monkeypatch) -> None:
    """They would be seen as many narrow channels, and learned from."""
    space = gymnasium.spaces.Box(0, 255, shape, np.uint8)
    monkeypatch.setattr(environments, "make_env", lambda env: Picture(space))
    with pytest.raises(ConfigurationError) as refused:
        look_at("mine", continuous="none")
    wrapper = re.search(r"gymnasium.wrappers.TransformObservation\(.*\)", str(refused.value))
    assert wrapper is not None
    wrapped = eval(wrapper[0], {"gymnasium": gymnasium, "numpy": np, "env": Picture(space)})
    monkeypatch.setattr(environments, "make_env", lambda env: wrapped)
    assert look_at("mine", continuous="none").images == Images((shape[2], *shape[:2]), 255.0)
    assert wrapped.observation_space.contains(wrapped.observation(space.sample()))


def test_other_pictures_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="uint8 .channels, height, width"):
        look_at(f"{__name__}:float_picture", continuous="none")
    task = look_at(f"{__name__}:small_picture", continuous="none")
    with pytest.raises(ConfigurationError, match="at least 3 x 3"):
        QNetwork(task.inputs, 2, (8,))


NETWORKS = """
import torch

def flat(inputs, outputs):
    channels, height, width = inputs
    return torch.nn.Sequential(
        torch.nn.Flatten(), torch.nn.Linear(channels * height * width, outputs)
    )
"""


@pytest.mark.parametrize("images", [PIXELS, CELLS])
@pytest.mark.parametrize("make", [None, "networks_of_images_of_a_test:flat"])
def test_networks_scale_images_and_take_any_number_of_batch_dimensions(
    images: Images, make: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "networks_of_images_of_a_test.py").write_text(NETWORKS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", list(sys.path))
    env = ATARI if images == PIXELS else GRID
    task = look_at(env, continuous="none")
    seen = torch.randint(0, int(images.high) + 1, (2, 3, *images.shape), dtype=torch.uint8)
    for kind in ("values", "categorical"):
        spec = PolicySpec.of(task, kind, (16,), make)
        network = spec.network()
        again = PolicySpec.from_plain(json.loads(json.dumps(spec.as_plain()))).network()
        again.load_state_dict(network.state_dict())
        with torch.no_grad():
            answers = network(seen)
            assert answers.shape == (2, 3, task.num_actions)
            torch.testing.assert_close(again(seen), answers)
            torch.testing.assert_close(network(seen[1, 2]), answers[1, 2], atol=1e-5, rtol=1e-4)
            body = network[0].body
            torch.testing.assert_close(body(seen[0] / images.high), answers[0])
    assert ValueNetwork(task.inputs, (16,), make)(seen).shape == (2, 3, 1)


def test_rows_keep_bytes() -> None:
    torch.manual_seed(0)
    observation = torch.randint(0, 2, (2, 6, *CELLS.shape), dtype=torch.uint8)
    flags = torch.zeros(2, 5, 1, dtype=torch.bool)
    rollout = TensorDict(
        {
            "observation": observation[:, :-1],
            "action": torch.zeros(2, 5, dtype=torch.int64),
            "collector": {"traj_ids": torch.zeros(2, 5, dtype=torch.int64)},
            "next": {
                "observation": observation[:, 1:],
                "reward": torch.ones(2, 5, 1),
                "done": flags,
                "terminated": flags.clone(),
            },
        },
        [2, 5],
        names=[None, "time"],
    )
    rows = RowsWithPriority(QNetwork(CELLS, 3, (8,)), gamma=0.9, n_steps=3)(rollout)
    assert rows["observation"].dtype == rows["next", "observation"].dtype == torch.uint8
    assert torch.equal(rows["observation"], observation[:, :3])
    assert torch.equal(rows["next", "observation"], observation[:, 3:])


TOY = [
    *("--collectors", "0", "--envs-per-collector", "2", "--hidden", "16"),
    *("--eval-episodes", "1", "--eval-max-steps", "3", "--output-dir", "run"),
]
RUNS = {
    "apex": [
        *("--env", ATARI, "--frames-per-batch", "16", "--updates-per-batch", "1"),
        *("--learning-starts", "16", "--capacity", "100", "--batch-size", "4"),
    ],
    "r2d2": [
        *("--env", GRID, "--frames-per-batch", "16", "--updates-per-batch", "1", "--lstm", "8"),
        *("--learning-starts", "16", "--capacity", "100", "--batch-size", "4"),
    ],
    "impala": ["--env", GRID, "--frames-per-batch", "16"],
    "ddppo": ["--env", GRID, "--frames-per-batch", "16", "--learners", "1", "--epochs", "1"],
}


@pytest.mark.parametrize("recipe", RUNS)
def test_a_run_with_images_learns_and_resumes(recipe: str, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    updates = []
    for more in (["--total-frames", "32"], ["--total-frames", "48", "--resume"]):
        assert main(["train", recipe, *TOY, *RUNS[recipe], *more]) == 0
        updates.append(json.loads(capsys.readouterr().out.splitlines()[-1])["updates"])
    assert 0 < updates[0] < updates[1]
    assert load_checkpoint("run/checkpoint.pt").policy_info["images"] is not None
    if recipe == "apex":  # each image is stored once
        columns = json.loads(Path("run/replay/rows.json").read_text())["leaves"]
        stacks = {tuple(each["key"]): each["stack"] for each in columns if "stack" in each}
        assert stacks == {("observation",): 4, ("next", "observation"): 4}
    if recipe != "apex":  # an episode of Pong is long
        assert main(["play", "run", "--episodes", "1"]) == 0


def test_sac_learns_from_images_if_actions_are_discrete(tmp_path: Path) -> None:
    config = SACConfig(
        env=GRID, envs_per_collector=2, total_frames=200, batch_size=8, learning_starts=64,
        hidden=(8,), updates_per_frame=0.2, eval_episodes=1, eval_max_steps=10,
        output_dir=str(tmp_path), device="cpu",
    )  # fmt: skip
    with local_cluster({"learner": 1}) as session:
        result = sac.run(config, session)
    assert result["updates"] > 0 and result["frames"] >= 200
    spec, network = saved_policy(tmp_path)
    assert (spec.kind, spec.images) == ("categorical", CELLS)
    rows = torch.zeros(3, *CELLS.shape, dtype=torch.uint8)
    assert network.player()(rows).dtype == torch.int64
