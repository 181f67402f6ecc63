"""The recipe's small parts: use of a folder, evaluation, the picture, the log files."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import re
import sys
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.envs.registration import WrapperSpec

from torchrl_dist import SharedMemmapStorage, local_cluster
from torchrl_dist.checkpoint import Checkpoint, save_checkpoint
from torchrl_dist.collect.worker.registrations import dump_registrations
from torchrl_dist.errors import ConfigurationError
from torchrl_dist.recipes.apex import recipe as apex
from torchrl_dist.recipes.apex.config import ApexConfig
from torchrl_dist.recipes.parts import environments
from torchrl_dist.recipes.parts.environments import for_collectors, look_at, make_env
from torchrl_dist.recipes.parts.evaluate import evaluate, play_rendered
from torchrl_dist.recipes.parts.networks import PolicySpec
from torchrl_dist.recipes.parts.play import play
from torchrl_dist.recipes.parts.plots import Evaluation, draw_learning_curve, read_curve
from torchrl_dist.recipes.training import loop as training
from torchrl_dist.recipes.training import monitor
from torchrl_dist.recipes.training.evaluator import Evaluator, EvaluatorConfig
from torchrl_dist.recipes.training.loop import choose_device
from torchrl_dist.recipes.training.monitor import Bound, Iteration, Monitor
from torchrl_dist.recipes.training.run_directory import claim, forget, note_resumed, resumed_at


def claim_in(
    folder: Path,
    *,
    job: str = "a",
    restarts: int = 0,
    resume: bool = False,
    replay: Path | None = None,
    held: contextlib.ExitStack | None = None,
) -> bool:
    with contextlib.ExitStack() as ended:
        return claim(
            folder,
            checkpoint=folder / "checkpoint.pt",
            replay=replay or folder / "replay",
            job_id=job,
            restart_count=restarts,
            resume=resume,
            held=held or ended,
        )


@pytest.mark.parametrize("saved", [False, True])
def test_a_run_that_fails_before_its_first_checkpoint_leaves_a_folder_for_the_next(
    saved: bool, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    claim_in(run)
    storage = SharedMemmapStorage(4, scratch_dir=run / "replay", keep=True)
    storage.close()
    (run / "replay/mine").touch()
    (run / "notes.txt").touch()
    if saved:
        (run / "checkpoint.pt").touch()
    forget(run, checkpoint=run / "checkpoint.pt", replay=run / "replay")
    assert (run / "replay/header.json").exists() is saved
    assert (run / "replay/mine").exists()
    assert (run / "notes.txt").exists()
    if not saved:
        (run / "notes.txt").unlink()
        (run / "replay/mine").unlink()
        (run / "replay").rmdir()
        assert claim_in(run) is False


@pytest.mark.parametrize(
    ("saved", "again", "goes_on"),
    [
        (False, {"restarts": 1}, False),  # it died before its first checkpoint
        (True, {"restarts": 2}, True),
        (False, {"job": "b"}, False),  # the other was stopped before it began
        (True, {"job": "b"}, None),
        (True, {"job": "b", "resume": True}, True),
    ],
)
def test_a_job_goes_on_with_its_own_run_and_with_others_where_it_is_asked_to(
    saved: bool, again: dict[str, Any], goes_on: bool | None, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    assert claim_in(run) is False
    if saved:
        (run / "checkpoint.pt").touch()
    if goes_on is None:
        for restarts in (0, 1):  # refused at first, hence restarted by its launcher
            with pytest.raises(ConfigurationError, match="not empty"):
                claim_in(run, **again, restarts=restarts)
        return
    assert claim_in(run, **again) is goes_on
    if "resume" in again:  # also for its restarts
        assert claim_in(run, job="b", restarts=1) is True


def test_a_resumed_run_notes_its_frames_and_a_new_one_removes_the_note(tmp_path: Path) -> None:
    run = tmp_path / "run"
    note_resumed(run, 7)  # no job has claimed the folder
    assert not run.exists()
    assert claim_in(run) is False and resumed_at(run) is None
    note_resumed(run, 700)
    assert resumed_at(run) == 700
    assert claim_in(run, restarts=1) is False and resumed_at(run) == 700
    assert claim_in(run, job="b") is False and resumed_at(run) is None


@pytest.mark.parametrize("text", ['{"job_id": "a", "results": [1]}', "[]", "", '{"job_id": 7}'])
def test_a_users_own_run_json_stays(tmp_path: Path, text: str) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text(text)
    for restart_count in (0, 1):
        with pytest.raises(ConfigurationError, match="is not empty"):
            claim_in(tmp_path / "run", restarts=restart_count)
    assert (tmp_path / "run" / "run.json").read_text() == text


def test_while_a_run_goes_on_its_folder_is_refused_to_others(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with contextlib.ExitStack() as held:
        claim_in(run, job="a", held=held)
        with pytest.raises(ConfigurationError, match="another run uses"):
            claim_in(run, job="b")
        (run / "checkpoint.pt").touch()
        with pytest.raises(ConfigurationError, match="another run uses"):
            claim_in(run, job="b", resume=True)
        assert claim_in(run, job="a", restarts=1) is True
    assert claim_in(run, job="b", resume=True) is True


def test_a_run_without_a_checkpoint_is_not_called_resumable(tmp_path) -> None:
    claim_in(tmp_path)
    (tmp_path / "replay").mkdir()
    with pytest.raises(ConfigurationError, match="has no checkpoint.pt to resume from"):
        claim_in(tmp_path)


@pytest.mark.parametrize("option", ["output", "replay"])
def test_a_folder_that_cannot_be_read_is_refused(option: str, tmp_path, monkeypatch) -> None:
    folder = tmp_path / option
    folder.mkdir()

    def listdir(path: Path) -> list[str]:  # root may read all: as for another user with mode 333
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("os.listdir", listdir)
    with pytest.raises(ConfigurationError, match=f"--{option}.*cannot read.*Permission denied"):
        claim_in(tmp_path / "output", replay=folder if option == "replay" else None)


def test_a_buffer_of_an_earlier_run_is_not_taken_by_a_fresh_one(tmp_path: Path) -> None:
    (tmp_path / "buffer").mkdir()
    assert claim_in(tmp_path / "one", replay=tmp_path / "buffer") is False
    (tmp_path / "buffer/header.json").touch()
    with pytest.raises(ConfigurationError, match="--replay-dir.*earlier run"):
        claim_in(tmp_path / "two", replay=tmp_path / "buffer")
    assert not (tmp_path / "two").exists()


def hold_right(observation: torch.Tensor) -> torch.Tensor:
    return torch.ones(len(observation), dtype=torch.int64)


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


def test_a_rendered_episode_returns_its_pictures_and_ends_after_the_given_steps() -> None:
    def push(observation: torch.Tensor) -> torch.Tensor:
        return torch.tensor(1)

    shapes: list[tuple[int, ...]] = []
    total = play_rendered(
        push, "CartPole-v1", seed=0, keep=lambda p: shapes.append(p.shape), max_steps=4
    )
    assert total == 4.0 and len(shapes) == 4
    assert all(shape[2] == 3 for shape in shapes)


def test_environments_that_cannot_be_shown_are_refused(tmp_path, monkeypatch) -> None:
    (tmp_path / "shown_envs.py").write_text(
        "import gymnasium\n"
        "def plain(): return gymnasium.make('CartPole-v1')\n"
        "def blind(render_mode=None): return gymnasium.make('CartPole-v1')\n"
        "def none(): return None\n"
        "class Table(gymnasium.Wrapper):\n"
        "    def step(self, action): return super().step({0: 1, 1: 0}[action])\n"
        "def table(**given): return Table(gymnasium.make('CartPole-v1', **given))\n"
    )
    (tmp_path / "exits.py").write_text("raise SystemExit(0)")
    monkeypatch.syspath_prepend(tmp_path)
    for name, why in (("plain", "unexpected keyword"), ("blind", "render.. returned a NoneType")):
        with pytest.raises(ConfigurationError, match=why):
            play_rendered(lambda x: torch.tensor(0), f"shown_envs:{name}", seed=0, keep=print)
    for name, why in (("shown_envs:none", "returned a NoneType"), ("exits:make", "got 'exits")):
        with pytest.raises(ConfigurationError, match=why):
            look_at(name, continuous="none")
    pictures = []  # of one that looks its actions up: they are numbers, as a collector's
    play_rendered(
        lambda x: torch.tensor(0), "shown_envs:table", seed=0, keep=pictures.append, max_steps=3
    )
    assert len(pictures) == 3


def test_evaluation_knows_environments_without_a_vectorized_form() -> None:
    def swing(observation: torch.Tensor) -> torch.Tensor:
        return torch.full((len(observation),), 2)

    assert evaluate(swing, "MountainCar-v0", episodes=2, seed=0) == [-200.0, -200.0]
    limit = WrapperSpec("Limit", "gymnasium.wrappers:TimeLimit", {"max_episode_steps": 3})
    spec = dataclasses.replace(
        gymnasium.spec("CartPole-v1"), id="Limited-v0", additional_wrappers=(limit,)
    )
    gymnasium.registry["Limited-v0"] = spec  # gymnasium makes no vectorized form with wrappers
    try:
        assert evaluate(hold_right, "Limited-v0", episodes=2, seed=0) == [3.0, 3.0]
    finally:
        del gymnasium.registry["Limited-v0"]


def test_a_task_has_the_environments_sizes() -> None:
    task = look_at("CartPole-v1", continuous="none")
    assert (task.observation_size, task.num_actions, task.reward_threshold) == (4, 2, 475.0)
    task = look_at("Pendulum-v1", continuous="bounded")
    assert (task.observation_size, task.action_low, task.action_high) == (3, (-2.0,), (2.0,))
    for env in ("Pendulum-v1", "nowhere:make"):
        with pytest.raises(ConfigurationError, match=f"--env.*{env}"):
            look_at(env, continuous="none")


def test_a_task_may_take_either_kind_of_actions_and_continuous_ones_without_bounds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    of_either_kind: tuple[environments.Continuous, ...] = ("bounded", "any")
    for continuous in of_either_kind:
        task = look_at("CartPole-v1", continuous=continuous)
        assert task == look_at("CartPole-v1", continuous="none")
        assert PolicySpec.of(task, "squashed_gaussian", (8,)).kind == "categorical"
    assert look_at("Pendulum-v1", continuous="any") == look_at("Pendulum-v1", continuous="bounded")
    made = make_env("Pendulum-v1")
    monkeypatch.setattr(environments, "make_env", lambda env: made)
    box, inf = gymnasium.spaces.Box, np.inf
    for low, high in ((-inf, inf), (0.0, inf), (-inf, 1.0), (-3.0, 1.0)):
        made.action_space = box(low, high, (1,), np.float32)
        task = look_at("mine", continuous="any")
        assert (task.num_actions, task.action_low, task.action_high) == (0, (low,), (high,))
        assert PolicySpec.of(task, "categorical", (8,)).kind == "gaussian"
    for space, expected in (
        (box(1, 1, (1,), np.float32), "low < high; wrap"),
        (box(0, 1, (1, 1), np.float32), "expected Discrete, or a Box with one dimension"),
        (gymnasium.spaces.MultiDiscrete([2, 2]), "expected Discrete, or a Box with one dimension"),
        (gymnasium.spaces.Discrete(2, start=1), "expected Discrete actions that start at 0"),
        (box(0, 9, (1,), np.int64), "floating-point"),
    ):
        made.action_space = space
        with pytest.raises(ConfigurationError, match=f"--env: mine takes.*{expected}"):
            look_at("mine", continuous="any")


@pytest.mark.parametrize(
    ("space", "taken"),
    [
        (gymnasium.spaces.MultiDiscrete([2, 3]), [[i, j] for i in range(2) for j in range(3)]),
        (gymnasium.spaces.MultiBinary(2), [[0, 0], [0, 1], [1, 0], [1, 1]]),
        (gymnasium.spaces.Discrete(3, start=-1), [-1, 0, 1]),
    ],
)
def test_combined_actions_are_refused_with_the_wrapper_that_numbers_them(
    space: gymnasium.Space, taken: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wrapper that the message names is made, and each number is one of the actions."""
    seen: list[Any] = []

    class Recording(gymnasium.Wrapper):
        def step(self, action: Any) -> Any:
            assert space.contains(action), action
            seen.append(np.asarray(action).tolist())
            return self.env.step(0)

    made: Any = Recording(gymnasium.make("CartPole-v1", max_episode_steps=3))
    made.action_space = space
    monkeypatch.setattr(environments, "make_env", lambda env: made)
    with pytest.raises(ConfigurationError, match="--env: mine takes") as caught:
        look_at("mine", continuous="none")
    wrapper = re.search(r"gymnasium.wrappers.TransformAction\(env, .*\)$", str(caught.value))
    assert wrapper is not None, caught.value
    made = eval(wrapper.group(), {"gymnasium": gymnasium, "numpy": np, "env": made})
    assert look_at("mine", continuous="none").num_actions == len(taken)
    for number in range(len(taken)):
        made.reset(seed=0)
        made.step(number)
    assert seen == taken


@pytest.mark.parametrize(
    "space",
    [
        gymnasium.spaces.MultiDiscrete([2, 3], start=[1, 0]),
        gymnasium.spaces.MultiDiscrete([[2, 3]]),
        gymnasium.spaces.MultiBinary(64),
        gymnasium.spaces.Tuple((gymnasium.spaces.Discrete(2),)),
    ],
)
def test_no_wrapper_is_written_out_that_would_not_number_the_actions(
    space: gymnasium.Space, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make_env("CartPole-v1")
    made.action_space = space
    monkeypatch.setattr(environments, "make_env", lambda env: made)
    with pytest.raises(ConfigurationError, match="a function that maps each number to an action"):
        look_at("mine", continuous="none")


class ManyParts(gymnasium.ObservationWrapper):
    """CartPole, observed as a Dict of all spaces that become flat."""

    def __init__(self) -> None:
        super().__init__(gymnasium.make("CartPole-v1"))
        spaces = gymnasium.spaces
        self.observation_space = spaces.Dict(
            cart=spaces.Box(-9, 9, (4,), np.float32),
            more=spaces.Tuple((spaces.Discrete(3, start=1), spaces.MultiBinary(2))),
            sizes=spaces.MultiDiscrete([2, 3]),
        )

    def observation(self, observation: Any) -> Any:
        other = (np.int64(2), np.array([0, 1], np.int8))
        return {"cart": observation, "more": other, "sizes": np.array([1, 0])}


def test_observations_of_numbers_and_groups_become_vectors() -> None:
    """In tasks, evaluations and the environments of collectors."""
    cases = {"FrozenLake-v1": 16, "Blackjack-v1": 32 + 11 + 2, f"{__name__}:ManyParts": 14}
    for env, size in cases.items():
        task = look_at(env, continuous="none")
        assert (task.observation_size, task.images, task.wrapped) == (size, None, True)
        shown: list[torch.Tensor] = []

        def act(observation: torch.Tensor, shown: list[torch.Tensor] = shown) -> torch.Tensor:
            shown.append(observation)
            return torch.zeros(len(observation), dtype=torch.int64)

        evaluate(act, env, episodes=2, seed=0, max_steps=3)
        make = for_collectors(env, wrapped=task.wrapped)
        assert not isinstance(make, str)
        observation, _ = make().reset(seed=0)
        np.testing.assert_allclose(shown[0][0], observation)
        assert shown[0].shape == (2, size)
    np.testing.assert_allclose(observation[4:], [0, 1, 0, 0, 1, 0, 1, 1, 0, 0])


@pytest.mark.parametrize(
    ("space", "outside"),
    [
        (gymnasium.spaces.MultiDiscrete([3, 2]), [[3, 0], [-1, 0]]),
        (gymnasium.spaces.Discrete(3, start=-1), [-2, 2]),
        (gymnasium.spaces.Tuple([gymnasium.spaces.Discrete(3, start=1)]), [(0,), (4,)]),
        (gymnasium.spaces.Dict(a=gymnasium.spaces.Discrete(2)), [{"a": -1}]),
    ],
)
def test_numbers_outside_of_their_space_are_not_flattened(
    space: gymnasium.Space, outside: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gymnasium sets the element of another number for them."""
    made: Any = gymnasium.make("CartPole-v1").unwrapped
    made.observation_space = space
    monkeypatch.setattr(environments, "_maker", lambda env: lambda: made)
    inside = space.sample()
    made.reset = lambda **_: (inside, {})
    np.testing.assert_array_equal(
        make_env("mine").reset()[0], gymnasium.spaces.flatten(space, inside)
    )
    for value in outside:
        made.reset = lambda value=value, **_: (value, {})
        with pytest.raises(ConfigurationError, match="an observation is .*, expected values of"):
            make_env("mine").reset()


def test_other_groups_are_refused_with_the_wrapper_to_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = make_env("CartPole-v1")
    made.observation_space = gymnasium.spaces.Dict(
        picture=gymnasium.spaces.Box(0, 255, (3, 9, 9), np.uint8)
    )
    monkeypatch.setattr(environments, "make_env", lambda env: made)
    with pytest.raises(ConfigurationError, match="mine has observations Dict.*FlattenObservation"):
        look_at("mine", continuous="none")
    assert environments.is_flattened(gymnasium.spaces.Discrete(500))
    assert not environments.is_flattened(gymnasium.spaces.Discrete(10**9))


def test_an_environment_may_be_a_function_of_the_users(tmp_path, monkeypatch) -> None:
    (tmp_path / "my_envs_of_a_test.py").write_text(
        "import gymnasium\n"
        "def short(**options):\n"
        "    return gymnasium.make('CartPole-v1', max_episode_steps=5, **options)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", list(sys.path))
    name = "my_envs_of_a_test:short"
    assert look_at(name, continuous="none").num_actions == 2
    assert evaluate(hold_right, name, episodes=3, seed=0) == [5.0, 5.0, 5.0]


def test_collectors_are_given_clipped_rewards_and_evaluations_are_not() -> None:
    assert for_collectors("Pendulum-v1") == "Pendulum-v1"
    made, whole = for_collectors("Pendulum-v1", 8.0)(), make_env("Pendulum-v1")
    rewards = []
    for env in (made, whole):
        env.reset(seed=3)
        rewards.append([float(env.step(np.zeros(1))[1]) for _ in range(60)])
    assert rewards[0] == [max(-8.0, reward) for reward in rewards[1]]
    assert min(rewards[1]) < -8 < max(rewards[1])


@pytest.mark.parametrize("reward", [2.0, np.array([2.0]), np.float32(2.0), float("nan")])
def test_a_reward_may_be_an_array_and_a_nan_stays_one(reward: Any, monkeypatch) -> None:
    class Giving(gymnasium.Wrapper):
        def step(self, action: Any) -> Any:
            observation, _, *rest = self.env.step(action)
            return (observation, reward, *rest)

    def make(env: str = "", **options: Any) -> gymnasium.Env:
        return Giving(gymnasium.make("CartPole-v1", max_episode_steps=3))

    gymnasium.register("RewardOfATest-v0", entry_point=make)
    try:
        returns = evaluate(hold_right, "RewardOfATest-v0", episodes=2, seed=0)
    finally:
        del gymnasium.registry["RewardOfATest-v0"]
    np.testing.assert_equal(returns, [environments.as_number(3 * reward)] * 2)
    monkeypatch.setattr(environments, "_maker", lambda env: make)
    env = for_collectors("any", 1.0)()
    env.reset()
    np.testing.assert_equal(env.step(0)[1], min(1.0, reward) if reward == reward else reward)
    returns = evaluate(hold_right, "any", episodes=2, seed=0)
    np.testing.assert_equal(returns, [environments.as_number(3 * reward)] * 2)


@pytest.mark.parametrize("env", ["CartPole-v1", "Pendulum-v1"])
def test_a_policy_is_made_again_from_what_a_checkpoint_says_of_it(env: str) -> None:
    discrete = env == "CartPole-v1"
    task = look_at(env, continuous="none" if discrete else "bounded")
    kinds = ("values", "categorical") if discrete else ("gaussian", "squashed_gaussian")
    for kind in kinds:
        spec = PolicySpec.of(task, kind, (8,))
        network, again = spec.network(), PolicySpec.from_plain(spec.as_plain()).network()
        again.load_state_dict(network.state_dict())
        observation = torch.randn(5, task.observation_size)
        action = again.greedy(observation)
        assert torch.equal(action, network.greedy(observation))
        if not discrete:
            assert action.shape == (5, 1)
            far = network.greedy(1e6 * observation)
            assert far.abs().max() <= 2.0


NETWORKS = """
import torch

def wide(inputs, outputs):
    return torch.nn.Sequential(torch.nn.Linear(inputs, 33), torch.nn.GELU(),
                               torch.nn.Linear(33, outputs))

def wrong(inputs, outputs):
    return torch.nn.Linear(inputs, outputs + 1)

def none(inputs, outputs):
    return None

def raises(inputs, outputs):
    raise KeyError('no such thing')

def wrong_inputs(inputs, outputs):
    return torch.nn.Linear(inputs + 1, outputs)

def weight_norm(inputs, outputs):
    return torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(inputs, outputs))

def old_weight_norm(inputs, outputs):
    return torch.nn.utils.weight_norm(torch.nn.Linear(inputs, outputs))

def batch_norm(inputs, outputs):
    return torch.nn.Sequential(torch.nn.Linear(inputs, outputs), torch.nn.BatchNorm1d(outputs))
"""


def test_a_network_may_be_a_function_of_the_users(tmp_path, monkeypatch) -> None:
    (tmp_path / "my_networks_of_a_test.py").write_text(NETWORKS)
    (tmp_path / "leaves.py").write_text("raise SystemExit(0)")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", list(sys.path))
    discrete, continuous = (
        look_at("CartPole-v1", continuous="none"),
        look_at("Pendulum-v1", continuous="bounded"),
    )
    kinds = {"values": discrete, "categorical": discrete, "squashed_gaussian": continuous}
    kinds["gaussian"] = continuous
    for kind, task in kinds.items():
        spec = PolicySpec.of(task, kind, (8,), "my_networks_of_a_test:wide")
        assert PolicySpec.from_plain(spec.as_plain()) == spec
        assert any(p.shape == (33, task.observation_size) for p in spec.network().parameters())
    for name, told in {
        "my_networks_of_a_test:wrong": "expected \\[2, 2\\]",
        "my_networks_of_a_test:none": "NoneType",
        "my_networks_of_a_test:raises": "failed: 'no such thing'",
        "my_networks_of_a_test:wrong_inputs": "failed: mat1 and mat2",
        "leaves:make": "cannot import",
        "my_networks_of_a_test:weight_norm": "Linear.*recomputes its weights",
        "my_networks_of_a_test:old_weight_norm": "Linear.*recomputes its weights",
        "my_networks_of_a_test:batch_norm": "1 \\(BatchNorm1d\\).*LayerNorm",
        "my_networks_of_a_test:gone": "package.module:function",
        "nowhere_to_be_found:f": "cannot import",
    }.items():
        with pytest.raises(ConfigurationError, match=f"--network: .*{told}"):
            PolicySpec.of(discrete, "values", (8,), name).network()


def test_a_gpu_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with local_cluster({"learner": 1}) as session:
        assert choose_device(ApexConfig(), session).type == "cpu"
        with pytest.raises(ConfigurationError, match="--device cuda: 1 learners .* has 0"):
            choose_device(ApexConfig(device="cuda"), session)


def test_the_process_that_waits_less_is_the_bound() -> None:
    assert Bound.of(0.8, 0.1).by == "collectors"
    assert Bound.of(0.1, 0.8).by == "learner"
    assert Bound.of(0.5, 0.45).by == "both"
    assert Bound.of(0.25, 0.75).text(2).startswith("bound by: learner (the learner waits 25%")
    assert (
        Bound.of(0.25, 0.75).text(1).endswith("25% of the time on collecting and 75% on learning")
    )


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
    first.collected(Iteration(30, [5.0], lag=0))
    first.learned(3, {"train/loss": torch.tensor(0.5)})
    first.evaluated([9.0, 13.0])
    first.show(force=True)
    first.close()
    saved = first.state()
    second = Monitor(tmp_path, total_frames=100, title="t", threshold=10.0, history=saved)
    second.collected(Iteration(20, [], lag=1))
    second.close()
    assert (second.frames, second.updates) == (50, 3)
    assert second.seconds > saved["seconds"] > 0
    assert second.solved == first.evaluations[0]
    assert (tmp_path / "csv/scalars/eval/return.csv").read_text() == "30,11.0\n"
    assert (tmp_path / "csv/scalars/train/loss.csv").read_text() == "30,0.5\n"


def test_a_curve_of_a_killed_run_is_that_of_the_run_that_continued_it(tmp_path: Path) -> None:
    """The killed run logged evaluations after its last checkpoint."""
    first = Monitor(tmp_path, total_frames=400, title="t", threshold=None)
    first.collected(Iteration(100, [], lag=0))
    first.evaluated([1.0])
    saved = first.state()
    for returns in (2.0, 3.0):
        first.collected(Iteration(100, [], lag=0))
        first.evaluated([returns])
    first.close()
    second = Monitor(tmp_path, total_frames=400, title="t", threshold=None, history=saved)
    for frames, returns in ((50, 20.0), (150, 30.0)):
        second.collected(Iteration(frames, [], lag=0))
        second.evaluated([returns])
    second.close()
    log = tmp_path / "csv/scalars/eval/return.csv"
    with log.open("a") as file:
        file.write("500,1")  # of 12.0, cut by a kill
    assert read_curve(log) == [(e.frames, e.mean) for e in second.evaluations]
    assert read_curve(tmp_path / "nothing.csv") == []
    log.write_text("".join(f"{frames},0.123456789\n" for frames in range(100_000)))
    assert log.stat().st_size > 1 << 20 and len(read_curve(log)) == 100_000


@pytest.mark.parametrize("watched", [True, False])
def test_a_progress_line_fits_80_columns(watched: bool, tmp_path: Path, monkeypatch) -> None:
    written = io.StringIO()
    monkeypatch.setattr(written, "isatty", lambda: watched, raising=False)
    monkeypatch.setattr(sys, "stderr", written)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("LINES", "24")
    monitor = Monitor(tmp_path, total_frames=10**9, title="t", threshold=None)
    monitor.collected(Iteration(123_456_789, [-123456.78], lag=0, waited_s=1.0))
    monitor.learned(12345, {})
    monitor.evaluated([-98765.4])
    monitor._window_started -= 10.0  # as if the frames had taken some time
    monitor.show(force=True)
    monitor.close()
    lines = re.split("[\r\n]", written.getvalue())
    assert max(map(len, lines)) <= 80
    assert "SPS, return -1.235e+05" in lines[-2] and "123M/1.00G" in lines[-2]


@pytest.mark.parametrize("mine", ["tensorboard/mine", "csv/mine", "csv/scalars/mine/data", None])
def test_a_run_that_fails_before_its_first_checkpoint_removes_the_logs_that_it_made_only(
    mine: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        if mine is not None:
            (tmp_path / mine).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / mine).write_text("measured for a year")
        raise OSError("No space left on device")

    config = ApexConfig(env="CartPole-v1", collectors=0, output_dir=str(tmp_path))
    monkeypatch.setattr(training, "save_checkpoint", fail)
    claim_in(tmp_path)
    with local_cluster({"learner": 1}) as session, pytest.raises(OSError, match="No space"):
        apex.run(config, session)
    forget(tmp_path, checkpoint=config.checkpoint_path, replay=config.replay_path)
    left = {str(each.relative_to(tmp_path)) for each in tmp_path.rglob("*") if each.is_file()}
    assert left == (set() if mine is None else {mine})
    assert tmp_path.exists() is (mine is not None)


def test_logs_go_where_weights_and_biases_does_not_start(tmp_path, monkeypatch) -> None:
    def refuse(*_: object) -> None:
        raise ConfigurationError("--wandb: no")

    monkeypatch.setattr(monitor, "_wandb_logger", refuse)
    (tmp_path / "tensorboard").mkdir()  # empty, and the user's
    with pytest.raises(ConfigurationError, match="--wandb"):
        Monitor(tmp_path, total_frames=100, title="t", threshold=None, wandb="project")
    assert [each.name for each in tmp_path.rglob("*")] == ["tensorboard"]


def test_of_equally_good_policies_the_one_after_a_good_one_ranks_higher(tmp_path: Path) -> None:
    monitor = Monitor(tmp_path, total_frames=100, title="t", threshold=None)
    seen = []
    for mean in (300.0, 500.0, 500.0, 388.0, 500.0, 450.0):
        monitor.collected(Iteration(10, [], lag=0))
        seen.append(monitor.evaluated([mean]))
    monitor.close()
    assert max(seen, key=monitor.rank) is seen[2]


def test_an_evaluation_that_gives_nan_is_never_the_best(tmp_path: Path) -> None:
    monitor = Monitor(tmp_path, total_frames=100, title="t", threshold=None)
    monitor.collected(Iteration(30, [], lag=0))
    unknown = monitor.evaluated([float("nan")])
    monitor.collected(Iteration(30, [], lag=0))
    poor = monitor.evaluated([-1e9])
    monitor.close()
    assert monitor.rank(poor) > monitor.rank(unknown)


def test_a_policys_sizes_are_whole_numbers() -> None:
    plain = PolicySpec.of(look_at("CartPole-v1", continuous="none"), "values", (8,)).as_plain()
    assert PolicySpec.from_plain(plain).num_actions == 2
    for name, value in (
        ("num_actions", "2"),
        ("observation_size", -1),
        ("hidden", ("8",)),
        ("images", {"shape": ("touch", "a file"), "high": 1.0}),
    ):
        with pytest.raises(ValueError, match="whole numbers"):
            PolicySpec.from_plain({**plain, name: value})


def test_evaluation_plays_without_dropout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "dropping.py").write_text(
        "from torch import nn\n"
        "def make(inputs, outputs):\n"
        "    return nn.Sequential(nn.Linear(inputs, outputs), nn.Dropout(0.9))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    policy = PolicySpec.of(
        look_at("CartPole-v1", continuous="none"), "values", (8,), "dropping:make"
    )
    weights = policy.network().state_dict()
    evaluator = Evaluator(EvaluatorConfig(policy, 3, 100), dump_registrations())
    assert evaluator.play((weights, 0), 60.0) == evaluator.play((weights, 0), 60.0)


def test_a_policy_whose_module_is_gone_is_refused(tmp_path: Path) -> None:
    policy = PolicySpec.of(look_at("CartPole-v1", continuous="none"), "values", (8,))
    info = {**policy.as_plain(), "env": "gone_module:make"}
    weights = policy.network().state_dict()
    save_checkpoint(tmp_path / "checkpoint.pt", Checkpoint("apex", {}, weights, policy_info=info))
    with pytest.raises(ConfigurationError, match="gone_module"):
        play(tmp_path, episodes=1, seed=0)
