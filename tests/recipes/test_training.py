"""What the recipes' learners do alike: losses without a part, resuming, seeds, devices, ends."""

from __future__ import annotations

import dataclasses
import itertools
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import gymnasium
import numpy as np
import pytest
import torch
from tensordict import TensorDict

from tests.recipes.learners import a_learner, recipe_of
from torchrl_dist import SharedMemmapStorage, local_cluster
from torchrl_dist.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from torchrl_dist.errors import (
    ConfigurationError,
    DeadlineError,
    PeerLostError,
    RemoteError,
    TorchRLDistError,
)
from torchrl_dist.recipes.apex.config import ApexConfig
from torchrl_dist.recipes.ddppo.config import DDPPOConfig
from torchrl_dist.recipes.impala import recipe as impala
from torchrl_dist.recipes.impala.config import ImpalaConfig
from torchrl_dist.recipes.parts.environments import look_at
from torchrl_dist.recipes.parts.networks import PolicySpec
from torchrl_dist.recipes.parts.play import play
from torchrl_dist.recipes.sac import recipe as sac
from torchrl_dist.recipes.sac.config import SACConfig
from torchrl_dist.recipes.training.config import RecipeConfig, config_to_resume
from torchrl_dist.recipes.training.loop import Start, choose_device, stream_seed, train
from torchrl_dist.recipes.training.shared_rows import shared_buffer

SMALL: dict[str, Any] = {
    "hidden": (8,), "frames_per_batch": 32, "envs_per_collector": 2, "total_frames": 320,
    "device": "cpu",
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "zero"),
    [
        (DDPPOConfig, "entropy_coef"),
        (DDPPOConfig, "critic_coef"),
        (DDPPOConfig, "gae_lambda"),
        (ImpalaConfig, "entropy_coef"),
        (ImpalaConfig, "critic_coef"),
    ],
)
def test_a_loss_without_a_part_is_learned_from(kind: type, zero: str) -> None:
    alone = {"learners": 1} if kind is DDPPOConfig else {}
    with local_cluster({"learner": 1}) as session:
        learner = a_learner(kind(**SMALL, **alone, **{zero: 0.0}), session)
        before = [p.clone() for p in learner.network.parameters()]
        metrics = learner.learn(next(iter(learner.collector)), 32)
        learner.close()
    assert learner.updates >= 1 and "train/loss" in metrics
    assert any(
        not torch.equal(a, b) for a, b in zip(before, learner.network.parameters(), strict=True)
    )


OTHERS: dict[type, dict[str, float]] = {
    DDPPOConfig: {"entropy_coef": 0.3, "critic_coef": 0.0},
    ImpalaConfig: {"entropy_coef": 0.3, "critic_coef": 0.7},
    SACConfig: {"gamma": 0.5},
}


@pytest.mark.parametrize("kind", OTHERS)
def test_a_resumed_learner_has_the_settings_it_was_given(kind: type, tmp_path: Path) -> None:
    alone: dict[str, Any] = {"learners": 1} if kind is DDPPOConfig else {}
    with local_cluster({"learner": 1}) as session:
        first = a_learner(kind(**SMALL, **alone, output_dir=str(tmp_path / "a")), session)
        if kind is SACConfig:
            first.loss.log_alpha.data.fill_(0.25)
        saved = first.state_dict()
        first.close()
        config = kind(
            **SMALL, **alone, **OTHERS[kind], learning_rate=0.0625, output_dir=str(tmp_path / "b")
        )
        second = a_learner(config, session, seed=1)
        second.load_state_dict(saved)
        loaded = second.state_dict()["model"]
        rates = {group["lr"] for group in second._optimizer.param_groups}
        second.close()
    assert rates == {0.0625}
    torch.testing.assert_close(loaded, dict(saved["model"]))
    if kind is SACConfig:
        assert float(loaded["log_alpha"]) == 0.25
        assert second.loss.gamma == 0.5
    else:
        assert float(second.loss.entropy_coeff) == pytest.approx(0.3)


@pytest.mark.parametrize("kind", [DeadlineError, PeerLostError])
def test_a_run_that_fails_of_others_keeps_what_was_learned(kind, tmp_path, monkeypatch) -> None:
    config = ImpalaConfig(**SMALL, output_dir=str(tmp_path), checkpoint_interval_s=3600.0)

    def fails_at_the_second(config: Any, task: Any, policy: Any, session: Any, start: Any) -> Any:
        learner = impala.build(config, task, policy, session, start)
        learn, turns = learner.learn, itertools.count()

        def learn_once(data: Any, frames: int) -> dict[str, Any]:
            if next(turns):
                raise kind("late")
            return learn(data, frames)

        learner.learn = learn_once
        return learner

    with local_cluster({"learner": 1}) as session, pytest.raises(kind, match="late.*was written"):
        train(fails_at_the_second, config, session)
    assert load_checkpoint(config.checkpoint_path).counters["updates"] == 1


class Spoiled(gymnasium.Wrapper):
    """An environment that breaks after 100 steps."""

    broken: ClassVar[str]

    def step(self, action: Any) -> Any:
        self.steps = getattr(self, "steps", 0) + 1
        observation, reward, *rest = self.env.step(action)
        if self.steps > 100:
            if self.broken == "raises":
                raise ValueError("the axle broke")
            if self.broken == "exits":
                sys.exit(0)
            if self.broken == "NaN observation":
                observation = np.full_like(observation, np.nan)
            else:
                reward = float(self.broken)
        return (observation, reward, *rest)


@pytest.mark.parametrize(
    ("kind", "broken"),
    [
        *((ApexConfig, broken) for broken in ("raises", "NaN observation", "1e39")),
        *((DDPPOConfig, broken) for broken in ("exits", "nan")),
        *((ImpalaConfig, broken) for broken in ("raises", "NaN observation")),
        *((SACConfig, broken) for broken in ("exits", "NaN observation", "nan")),
    ],
)
def test_a_run_whose_environment_breaks_keeps_a_checkpoint_to_go_on_from(
    kind: type, broken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error names the environment, and no row that is not finite reaches a buffer."""
    monkeypatch.setattr(Spoiled, "broken", broken, raising=False)
    sound = "Pendulum-v1" if kind is SACConfig else "CartPole-v1"
    gymnasium.register("Spoiled-v0", lambda: Spoiled(gymnasium.make(sound)))
    given: dict[str, Any] = SMALL | {"env": "Spoiled-v0", "output_dir": str(tmp_path)}
    if kind is DDPPOConfig:
        given["learners"] = 1
    if kind in (ApexConfig, SACConfig):
        given |= {"learning_starts": 64, "batch_size": 16}
    if kind is SACConfig:
        given["updates_per_frame"] = 0.1
    if kind is ApexConfig:
        given["updates_per_batch"] = 2
    config = kind(**given)
    message = {"raises": "the axle broke", "exits": "SystemExit: 0"}.get(broken, "Spoiled-v0")
    errors = RemoteError if broken in ("raises", "exits") else TorchRLDistError
    with local_cluster({"learner": 1}) as session, pytest.raises(errors, match=message):
        train(recipe_of(kind).build, config, session)
    del gymnasium.registry["Spoiled-v0"]
    saved = load_checkpoint(config.checkpoint_path)
    assert all(value.isfinite().all() for value in saved.policy.values())
    if config.replay_path is not None:
        storage = SharedMemmapStorage(config.capacity, scratch_dir=config.replay_path, resume=True)
        rows = storage[:]
        storage.close()
        assert len(rows) and all(value.isfinite().all() for value in rows.values(True, True))


@pytest.mark.parametrize("resumes", [0, 1])
def test_rows_of_an_attempt_that_was_killed_before_its_first_checkpoint_are_dropped(
    resumes: int, tmp_path: Path
) -> None:
    config = SACConfig(output_dir=str(tmp_path), capacity=100, learning_starts=10)
    with local_cluster({"learner": 1}) as session:
        killed = shared_buffer(config, session, Start(), batch_size=4)
        killed.extend(TensorDict({"x": torch.zeros(8, 1)}, [8]))
        killed.storage.close()
        buffer = shared_buffer(config, session, Start(resumes=resumes), batch_size=4)
        assert len(buffer) == 8 * resumes
        buffer.storage.close()


@pytest.mark.parametrize("kind", [ApexConfig, SACConfig])
def test_clipped_rewards_on_disk_stay_clipped(kind: type[RecipeConfig], monkeypatch) -> None:
    saved = SimpleNamespace(config=kind(reward_clip=1.0).as_plain())
    monkeypatch.setattr("torchrl_dist.checkpoint.load_checkpoint", lambda path, recipe: saved)
    with pytest.raises(ConfigurationError, match="--reward-clip: got 0.0, .* has 1.0"):
        config_to_resume(kind, Path("x"), {"reward_clip": 0.0})
    assert config_to_resume(kind, Path("x"), {"gamma": 0.99}).reward_clip == 1.0


def test_tuples_that_begin_alike_have_seeds_of_their_own() -> None:
    tuples = [(5,), (5, 0), (5, 0, 0), (5, 0, 0, 0), (5, 0, 0, 1), (5, 0, 0, 3), (0, 5)]
    assert len({stream_seed(*numbers) for numbers in tuples}) == len(tuples)


def test_all_learners_use_the_cpu_where_gpus_do_not_suffice(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: None)

    def devices(device: str, *hosts: str) -> list[str]:
        peers = [SimpleNamespace(host=h, index=i, name=f"learner{i}") for i, h in enumerate(hosts)]
        config = DDPPOConfig(device=device)
        sessions = [SimpleNamespace(me=me, of_role=lambda role: peers) for me in peers]
        found = []
        for session in sessions:
            try:
                found.append(str(choose_device(config, session)))  # type: ignore
            except ConfigurationError as error:
                found.append(str(error))
        return found

    assert devices("auto", "a", "a", "b") == ["cuda:0", "cuda:1", "cuda:0"]
    assert devices("auto", "a", "a", "a", "b") == ["cpu"] * 4
    told = devices("cuda", "a", "a", "a", "b")  # of all learners, so that none waits for another
    assert all("--device cuda: 3 learners on one node need that many GPUs" in text for text in told)


MINE = """
import numpy

from torchrl_dist.recipes.training.callback import Callback

class Mine(Callback):
    made = []

    def __init__(self):
        self.batches, self.returns, self.paths = [], [], []
        Mine.made.append(self)

    def on_batch(self, frames, metrics):
        self.batches.append((frames, "train/loss" in metrics))
        return numpy.float64(len(self.batches)) == 4

    def on_evaluation(self, evaluation):
        self.returns.append(evaluation.mean)

    def on_checkpoint(self, path):
        self.paths.append(path)
        assert path.exists()

class Counting(Mine):
    def on_batch(self, frames, metrics):
        return frames

other = dict
"""


def test_a_callback_sees_the_run_and_ends_it(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "mine_of_test.py").write_text(MINE)
    monkeypatch.syspath_prepend(tmp_path)
    given = SMALL | {"callback": "mine_of_test:Mine", "total_frames": 100_000}
    config = ImpalaConfig(**given, output_dir=str(tmp_path / "run"))
    with local_cluster({"learner": 1}) as session:
        result = train(impala.build, config, session)
    (mine,) = sys.modules["mine_of_test"].Mine.made
    assert result["stopped_by"] == "callback" and result["frames"] < 1_000
    frames = [frames for frames, _ in mine.batches]
    assert len(frames) == 5 and frames == sorted(frames) and all(has for _, has in mine.batches)
    assert result["best_evaluation"]["mean"] in mine.returns
    assert set(mine.paths) == {config.checkpoint_path} and len(mine.paths) >= 2
    resumed = dataclasses.replace(config, callback=None, total_frames=result["frames"] + 100)
    with local_cluster({"learner": 1}) as session:
        assert train(impala.build, resumed, session, resume=True)["stopped_by"] is None


def test_a_callback_that_returns_another_value_than_true_ends_the_run_with_an_error(
    tmp_path: Path, monkeypatch
) -> None:
    (tmp_path / "mine_of_test.py").write_text(MINE)
    monkeypatch.syspath_prepend(tmp_path)
    given = SMALL | {"callback": "mine_of_test:Counting"}
    config = ImpalaConfig(**given, output_dir=str(tmp_path / "run"))
    with local_cluster({"learner": 1}) as session:
        with pytest.raises(ConfigurationError, match=r"returned \d+, expected None, or True"):
            train(impala.build, config, session)


@pytest.mark.parametrize("name", ["mine", "no_such_module:x", "math:no", "mine_of_test:other"])
def test_other_objects_than_callbacks_are_refused_before_anything_starts(
    name: str, tmp_path: Path, monkeypatch
) -> None:
    (tmp_path / "mine_of_test.py").write_text(MINE)
    monkeypatch.syspath_prepend(tmp_path)
    config = ImpalaConfig(**SMALL, callback=name, output_dir=str(tmp_path / "run"))
    session: Any = None
    with pytest.raises(ConfigurationError, match="--callback"):
        train(impala.build, config, session)


def changing(**_: Any) -> gymnasium.Env:
    return changing.made  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("now", "says"),
    [
        (gymnasium.spaces.Box(-1, 1.5, (1,)), r"action_high is \(1.5,\), expected \(1.0,\)"),
        (gymnasium.spaces.Discrete(3), "num_actions is 3, expected 0"),
    ],
)
def test_an_environment_that_has_changed_is_refused(
    now: gymnasium.Space, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its policy would act with the scale or the number of the earlier actions."""
    made = gymnasium.make("Pendulum-v1")
    made.action_space = gymnasium.spaces.Box(-1, 1, (1,))
    monkeypatch.setattr(changing, "made", made, raising=False)
    env = f"{__name__}:changing"
    spec = PolicySpec.of(look_at(env, continuous="any"), "squashed_gaussian", (8,))
    extra = {"history": {"frames": 1}, "learner": {}, "lost_collectors": []}
    config = SACConfig(env=env, hidden=(8,), output_dir=str(tmp_path))
    checkpoint = Checkpoint(
        "sac", config.as_plain(), spec.network().state_dict(), spec.as_plain(),
        counters={"updates": 1, "resumes": 0}, extra=extra,
    )  # fmt: skip
    save_checkpoint(tmp_path / "checkpoint.pt", checkpoint)
    assert len(play(tmp_path, episodes=1, seed=0)["returns"]) == 1
    made.action_space = now
    with pytest.raises(ConfigurationError, match=f"has changed since .*{says}"):
        play(tmp_path, episodes=1, seed=0)
    with (
        local_cluster({"learner": 1}) as session,
        pytest.raises(ConfigurationError, match=f"has changed since .*{says}"),
    ):
        train(sac.build, config, session, resume=True)
