"""SAC's rows and targets."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torch import nn

from torchrl_dist import RPCBatchedCollector, local_cluster
from torchrl_dist.errors import ConfigurationError
from torchrl_dist.recipes.parts import environments
from torchrl_dist.recipes.parts.environments import Task, look_at
from torchrl_dist.recipes.parts.moments import moments_of
from torchrl_dist.recipes.parts.networks import (
    PolicySpec,
    SquashedGaussianNetwork,
    saved_policy,
)
from torchrl_dist.recipes.parts.policies import squashed_gaussian_actor
from torchrl_dist.recipes.sac.config import SACConfig
from torchrl_dist.recipes.sac.loss import SACLoss
from torchrl_dist.recipes.sac.recipe import (
    ActionValue,
    frames_of_a_batch,
    limiter_of,
    rows,
    run,
    target_entropy,
)

TASK = look_at("Pendulum-v1", continuous="bounded")


def loss_of(task: Task) -> SACLoss:
    network = PolicySpec.of(task, "squashed_gaussian", (8,)).network()
    critics = [ActionValue(task, (8,)) for _ in range(2)]
    return SACLoss(network, critics, gamma=0.99, target_entropy=target_entropy(task))


def test_a_cut_episode_bootstraps_and_a_terminated_one_does_not() -> None:
    torch.manual_seed(0)
    loss = loss_of(TASK)
    with torch.no_grad():  # every state is worth 100
        for critic in (*loss.critics, *loss.target):
            critic[-1].weight.zero_()
            critic[-1].bias.fill_(100.0)
    after = {"observation": torch.randn(1, 3), "reward": torch.zeros(1, 1)}
    batch = {"observation": torch.randn(1, 3), "action": torch.zeros(1, 1)}
    errors = []
    for terminated in (True, False):
        after["terminated"] = torch.tensor([[terminated]])
        losses = loss(TensorDict({**batch, "next": after}, [1]))
        errors.append(float((losses["loss_qvalue"] / 2).detach().sqrt()))
    assert errors[0] == pytest.approx(100)
    assert errors[1] < 20


def test_pendulum_is_cut_and_never_terminated_and_keeps_its_last_observation() -> None:
    collector = RPCBatchedCollector(
        "Pendulum-v1", None, frames_per_batch=402, total_frames=402, num_envs=2, postproc=rows
    )
    (batch,) = collector
    collector.shutdown()
    done = batch["next", "done"].squeeze(-1)
    assert done[:, 199].all() and int(done.sum()) == 2
    assert not batch["next", "terminated"].any()
    last, begun = batch[:, 199]["next", "observation"], batch[:, 200]["observation"]
    assert not torch.allclose(last, begun, atol=1e-3)
    torch.testing.assert_close(batch[:, 10]["next", "observation"], batch[:, 11]["observation"])
    assert all(value.dtype != torch.float64 for value in batch.values(True, True))


def test_the_greedy_action_is_the_middle_of_what_the_actor_draws() -> None:
    spec = PolicySpec("x", 3, (8,), "squashed_gaussian", 0, (-1.0, 0.0), (3.0, 0.5))
    network = spec.network()
    actor = squashed_gaussian_actor(network, spec.action_low, spec.action_high)
    observation = torch.randn(4, 3)
    drawn = actor(TensorDict({"observation": observation.repeat(2000, 1)}, [8000]))["action"]
    low, high = torch.tensor(spec.action_low), torch.tensor(spec.action_high)
    assert (drawn >= low).all() and (drawn <= high).all()
    medians = drawn.reshape(2000, 4, 2).median(0).values
    torch.testing.assert_close(medians, network.greedy(observation), atol=0.06, rtol=0.1)


def test_losses_do_not_depend_on_the_unit_of_actions() -> None:
    """Nor do rewards: the density of actions in another unit would add a bonus to each step."""
    scaled = torch.rand(20, 1) * 1.9 - 0.95
    rows_of = {name: torch.randn(20, 3) for name in ("before", "after")}
    reward, terminated = torch.randn(20, 1), torch.rand(20, 1) < 0.2
    found = []
    for bound in (1.0, 1e-3, 1e3):
        torch.manual_seed(0)
        task = dataclasses.replace(TASK, action_low=(-bound,), action_high=(bound,))
        loss = loss_of(task)
        after = {"observation": rows_of["after"], "reward": reward, "terminated": terminated}
        batch = {"observation": rows_of["before"], "action": scaled * bound}
        torch.manual_seed(1)
        losses = loss(TensorDict({**batch, "next": {**after, "done": terminated}}, [20]))
        found.append({name: float(value.detach()) for name, value in losses.items()})
    assert {"loss_qvalue", "loss_actor", "loss_alpha", "entropy"} <= found[0].keys()
    for other in found[1:]:
        assert other == pytest.approx(found[0], rel=1e-4, abs=1e-4)
    assert target_entropy(dataclasses.replace(TASK, action_low=(-1.0,), action_high=(1.0,))) == -1


class OtherActions(gymnasium.ActionWrapper):
    """Pendulum that takes actions of ``space`` and refuses all others."""

    def __init__(self, space: gymnasium.Space) -> None:
        super().__init__(gymnasium.make("Pendulum-v1"))
        self.action_space = space

    def action(self, action: Any) -> Any:
        assert self.action_space.contains(action), action
        return np.asarray(action, np.float32)


@pytest.mark.parametrize(
    ("low", "high", "dtype", "what"),
    [
        (-2, 2, np.int64, "floating-point"),
        (1, 1, np.float32, "low < high"),
        (-np.finfo(np.float32).max, np.finfo(np.float32).max, np.float32, "finite float32"),
        (-1e300, 1e300, np.float64, "finite float32"),
        (-np.inf, np.inf, np.float32, "finite float32"),
    ],
)
def test_actions_that_no_policy_can_learn_are_refused_at_once(
    low: float, high: float, dtype: Any, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    space = gymnasium.spaces.Box(low, high, (1,), dtype)
    monkeypatch.setattr(environments, "make_env", lambda env: OtherActions(space))
    with pytest.raises(ConfigurationError, match=f"--env.*{what}"):
        environments.look_at("other", continuous="bounded")


def test_actions_in_double_precision_are_taken(tmp_path: Path) -> None:
    """Bounds that float32 cannot hold are rounded inwards."""
    space = gymnasium.spaces.Box(-0.1, 0.7, (1,), np.float64)
    gymnasium.register("Doubled-v0", lambda: OtherActions(space))
    config = SACConfig(
        env="Doubled-v0", envs_per_collector=2, total_frames=128, batch_size=8,
        learning_starts=32, hidden=(8,), updates_per_frame=0.1, eval_episodes=1,
        eval_max_steps=20, output_dir=str(tmp_path), device="cpu",
    )  # fmt: skip
    with local_cluster({"learner": 1}) as session:
        result = run(config, session)
    del gymnasium.registry["Doubled-v0"]
    assert result["updates"] > 0


def test_discrete_actions_are_learned(tmp_path: Path) -> None:
    """Of two actions the first pays, and observations are numbers."""
    gymnasium.register("Paying-v0", lambda: Paying())
    config = SACConfig(
        env="Paying-v0", envs_per_collector=2, total_frames=600, batch_size=32, learning_starts=64,
        hidden=(16,), gamma=0.5, eval_episodes=2, eval_interval_frames=300, learning_rate=1e-2,
        output_dir=str(tmp_path), device="cpu",
    )  # fmt: skip
    with local_cluster({"learner": 1}) as session:
        result = run(config, session)
    del gymnasium.registry["Paying-v0"]
    assert result["last_return"] == 10
    assert target_entropy(look_at("CartPole-v1", continuous="none")) > 0


class Paying(gymnasium.Env):
    observation_space = gymnasium.spaces.Discrete(3)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, **_: Any) -> Any:
        self.steps = 0
        return 0, {}

    def step(self, action: Any) -> Any:
        assert self.action_space.contains(action), action
        self.steps += 1
        return self.steps % 3, 1.0 - float(action), False, self.steps == 10, {}


def test_observations_are_normalized_for_the_policy_and_the_critics(tmp_path: Path) -> None:
    """By the moments of sampled rows, which the checkpoint keeps."""
    gymnasium.register("Far-v0", far)
    config = SACConfig(
        env="Far-v0", envs_per_collector=2, total_frames=1_600, batch_size=64, learning_starts=64,
        hidden=(16,), eval_episodes=2, eval_interval_frames=800, normalize_observations=True,
        output_dir=str(tmp_path), device="cpu", updates_per_frame=0.5,
    )  # fmt: skip
    with local_cluster({"learner": 1}) as session:
        run(config, session)
    spec, network = saved_policy(tmp_path)
    del gymnasium.registry["Far-v0"]
    moments = moments_of(network)
    assert spec.normalized and moments is not None and moments.count > 500
    torch.testing.assert_close(
        moments.mean, torch.tensor([100.0, 100.0, 100.0]).double(), atol=1.5, rtol=0
    )
    task = look_at("Pendulum-v1", continuous="bounded")
    assert isinstance(network, SquashedGaussianNetwork)
    critics: list[nn.Module] = [ActionValue(task, (8,)) for _ in range(2)]
    loss = SACLoss(network, critics, gamma=0.9, target_entropy=-1.0)
    seen: list[torch.Tensor] = []
    for critic in (*loss.critics, *loss.target):
        critic.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    rows_ = torch.randn(8, 3) + 100
    after = {"observation": rows_, "reward": torch.zeros(8, 1)}
    after["terminated"] = torch.zeros(8, 1, dtype=torch.bool)
    loss(TensorDict({"observation": rows_, "action": torch.zeros(8, 1), "next": after}, [8]))
    assert len(seen) == 6 and all(inputs.abs().max() <= 10 for inputs in seen)


def far() -> gymnasium.Env:
    """Pendulum whose observations are far from 0."""
    made = gymnasium.make("Pendulum-v1")
    space = gymnasium.spaces.Box(-np.inf, np.inf, (3,), np.float32)
    return gymnasium.wrappers.TransformObservation(made, lambda x: x + np.float32(100), space)


def test_the_limiter_lets_in_the_batches_that_collectors_bring() -> None:
    """A collector steps each environment at least once, however few frames are asked for."""
    config = SACConfig(collectors=4, envs_per_collector=64, updates_per_frame=0.05)
    assert frames_of_a_batch(config, 4) == 256 > config.frames_per_batch
    limiter = limiter_of(config, 4)
    low, high = limiter.range
    assert high - low >= 256 * (limiter.samples_per_insert or 0) + config.batch_size
    assert limiter.error_buffer == pytest.approx(3 * 256 * 128 * 0.05)
    assert limiter_of(SACConfig(updates_per_frame=1e-4), 2).error_buffer == 128


@pytest.mark.filterwarnings("ignore:frames_per_batch=")
@pytest.mark.parametrize(("frames", "envs"), [(4, 6), (33, 4), (32, 4)])
def test_a_batch_has_as_many_frames_as_were_reckoned(frames: int, envs: int) -> None:
    config = SACConfig(frames_per_batch=frames, envs_per_collector=envs)
    collector = RPCBatchedCollector(
        "Pendulum-v1", None, frames_per_batch=frames, total_frames=-1, num_envs=envs
    )
    assert collector.frames_per_batch == frames_of_a_batch(config, 1)
    collector.shutdown()
