"""Every kind of space, and every vector wrapper, of the gymnasium at hand against a plain loop.

Both are found by reflection, so that one that gymnasium adds must be placed here.
"""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Callable
from typing import Any, ClassVar

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import SyncVectorEnv, VectorEnv, VectorWrapper
from gymnasium.wrappers import vector
from tensordict import TensorDictBase
from torchrl.envs import GymWrapper

from torchrl_dist.collect import RPCBatchedCollector
from torchrl_dist.collect.loop.rollout import GymnasiumRollout, make_rollout
from torchrl_dist.collect.loop.spaces import action_codec
from torchrl_dist.errors import ConfigurationError

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*precision lowered.*:UserWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning:gymnasium"),
]

INF = np.inf
MIXED = np.array([-1, -INF, 2, -INF]), np.array([1, 3, INF, INF])
BOXES = [
    spaces.Box(-1, 1, (2,), np.float32),
    spaces.Box(-1, 1, (), np.float64),
    spaces.Box(-1, 1, (2,), np.int64),
    spaces.Box(0, 3, (1,), np.uint8),
    spaces.Box(-128, 127, (1,), np.int8),
    spaces.Box(0, INF, (1,), np.float32),
    spaces.Box(-INF, 0, (1,), np.float64),
    spaces.Box(*MIXED, dtype=np.float32),
    spaces.Box(*MIXED, dtype=np.int32),
]
TWO = {"a": spaces.Box(-1, 1, (2,)), "b": spaces.Discrete(3, start=1)}
SIMPLE = {"a": spaces.Box(-1, 1, (2,)), "b": spaces.Discrete(3)}
PLACED: dict[str, list[spaces.Space]] = {
    "Box": BOXES,
    "Dict": [spaces.Dict(TWO), spaces.Dict(SIMPLE)],
    "Discrete": [spaces.Discrete(3), spaces.Discrete(2, start=-4)],
    "Graph": [spaces.Graph(spaces.Box(-1, 1, (2,)), None)],
    "MultiBinary": [spaces.MultiBinary(3), spaces.MultiBinary((2, 2))],
    "MultiDiscrete": [spaces.MultiDiscrete([3, 3]), spaces.MultiDiscrete([2, 4], start=[1, -1])],
    "OneOf": [spaces.OneOf(tuple(TWO.values()))],
    "Sequence": [spaces.Sequence(spaces.Discrete(3))],
    "Text": [spaces.Text(4)],
    "Tuple": [spaces.Tuple(tuple(TWO.values())), spaces.Tuple(tuple(SIMPLE.values()))],
}
ALL = [space for placed in PLACED.values() for space in placed]


def test_every_space_of_gymnasium_is_placed() -> None:
    kinds = inspect.getmembers(spaces, inspect.isclass)
    found = {name for name, kind in kinds if issubclass(kind, spaces.Space)} - {"Space"}
    assert found == set(PLACED)


class Echo(gymnasium.Env):
    """Observes what its space draws; the reward is a function of the action."""

    def __init__(self, observed: spaces.Space, taken: spaces.Space) -> None:
        self.observation_space, self.action_space = observed, taken

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.observation_space.seed(int(self.np_random.integers(2**31)))
        self.t = 0
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> Any:
        assert self.action_space.contains(action), action
        self.t += 1
        flat = spaces.flatten(self.action_space, action).astype(np.float64)
        reward = float(flat @ np.arange(1, flat.size + 1))
        return self.observation_space.sample(), reward, self.t == 5, False, {}


@pytest.mark.parametrize("space", ALL, ids=str)
@pytest.mark.parametrize("which", ["observation", "action", "policy"])
def test_a_space_gives_the_data_of_a_plain_loop(which: str, space: spaces.Space) -> None:
    plain = spaces.Box(-1, 1, (2,))
    pair = (space, plain) if which == "observation" else (plain, space)

    def make() -> Echo:
        return Echo(*copy.deepcopy(pair))

    try:
        wrapped = GymWrapper(make())
    except Exception:
        wrapped = None
    policy = None
    if which == "policy":
        if wrapped is None:
            return
        torch.manual_seed(0)
        drawn = [wrapped.full_action_spec.rand() for _ in range(20)]
        if isinstance(space, spaces.Box) and not all(
            space.contains(decoded(space, each["action"])) for each in drawn
        ):
            pytest.skip("TorchRL draws actions from outside this space")
        left = iter(drawn)

        def policy(td: TensorDictBase) -> TensorDictBase:
            if isinstance(space, spaces.Text):
                return td.set_non_tensor("action", "ab")
            return td.update(next(left).expand(*td.shape))

    try:
        rollout = make_rollout(make, policy, frames=12)
    except ConfigurationError as error:
        refused = "not supported|does not accept|random action"
        assert re.search(refused, str(error)), error
        assert type(space).__name__ in FOREIGN
        return
    rollout.seed([3])
    rows = rollout.run(12)
    rollout.close()
    ours = isinstance(rollout, GymnasiumRollout)
    assert ours or type(space).__name__ in FOREIGN
    env = make()
    env.reset(seed=3)
    observation, _ = env.reset()
    for t in range(12):
        if ours:
            root = rows[0, t]
            seen = root if isinstance(env.observation_space, spaces.Dict) else root["observation"]
            assert same(decoded(env.observation_space, seen), observation)
            action = decoded(env.action_space, root["action"])
        else:
            for key, value in wrapped.read_obs(observation).items():
                seen = rows[0, t][key]
                text = isinstance(seen, str)
                assert seen == observation if text else torch.equal(seen, torch.as_tensor(value))
            one, row = len(wrapped.action_keys) == 1, rows[0, t]
            acted = row["action"] if one else row.select(*wrapped.action_keys).to_dict()
            action = wrapped.read_action(acted)
        observation, reward, done, _, _ = env.step(action)
        assert rows["next", "reward"][0, t].item() == np.float32(reward)
        assert rows["next", "done"][0, t].item() == done
        if done:
            observation, _ = env.reset()


# Stepped by TorchRL's wrapper, or refused.
FOREIGN = {"Dict", "Graph", "OneOf", "Sequence", "Text", "Tuple", "MultiDiscrete"}


def decoded(space: spaces.Space, tensor: Any) -> Any:
    """Return the value of ``space`` for which the tensor stands."""
    if isinstance(space, spaces.Dict):
        return {key: decoded(part, tensor[key]) for key, part in space.spaces.items()}
    if isinstance(space, spaces.Discrete):
        return int(tensor.argmax()) + int(space.start)
    if isinstance(space, spaces.MultiDiscrete):
        parts = tensor.flatten().split(space.nvec.tolist())
        return np.array([int(part.argmax()) for part in parts]) + space.start
    return tensor.numpy().astype(space.dtype).reshape(space.shape)


def same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return all(same(one[key], other[key]) for key in one)
    return np.array_equal(one, other)


def distance(one: np.ndarray, other: np.ndarray) -> float:
    """The largest distance of their distribution functions."""
    where = np.concatenate([one, other])
    below = [np.searchsorted(np.sort(part), where, "right") / len(part) for part in (one, other)]
    return float(np.abs(below[0] - below[1]).max())


DRAWN = [*BOXES, *PLACED["Discrete"], *PLACED["MultiBinary"], *PLACED["MultiDiscrete"]]


@pytest.mark.parametrize("space", DRAWN, ids=str)
def test_random_actions_have_the_distribution_of_the_spaces_own(space: spaces.Space) -> None:
    n = 4000
    codec = action_codec(space, False)
    ours = codec.to_env(codec.sample(np.random.default_rng(0), n).numpy())
    space.seed(1)
    theirs = np.stack([space.sample() for _ in range(n)])
    assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
    assert all(space.contains(each) for each in ours[:100])
    for one, other in zip(ours.reshape(n, -1).T, theirs.reshape(n, -1).T, strict=True):
        assert distance(one, other) < 0.05  # 0.043 is exceeded by chance once in a thousand
        if other.dtype.kind in "iub" and np.ptp(other) < 4:
            assert set(one.tolist()) == set(other.tolist())


def test_a_box_of_all_numbers_can_be_drawn_from() -> None:
    info = np.finfo(np.float64)
    space = spaces.Box(info.min, info.max, (2,), np.float64)  # whose own sample() fails
    codec = action_codec(space, False)
    drawn = codec.to_env(codec.sample(np.random.default_rng(0), 200).numpy())
    assert all(space.contains(each) for each in drawn) and (drawn > 0).any() and (drawn < 0).any()


class Walker(gymnasium.Env):
    """Ends after ``length`` steps; the reward depends on the step and the action."""

    metadata: ClassVar[dict[str, Any]] = {"render_modes": ["rgb_array"], "render_fps": 30}
    action_space = spaces.Box(-1, 1, (1,), np.float32)

    def __init__(self, length: int, kind: str = "plain") -> None:
        self.length, self.kind = length, kind
        self.render_mode = "rgb_array"
        number = spaces.Box(-10, 10, (2,), np.float32)
        self.observation_space = {
            "plain": number,
            "dict": spaces.Dict({"a": number, "b": number}),
            "picture": spaces.Box(0, 255, (8, 8, 3), np.uint8),
        }[kind]

    def observe(self) -> Any:
        now = np.array([self.t, self.length], np.float32)
        picture = np.full((8, 8, 3), 10 * self.t, np.uint8)
        return {"plain": now, "dict": {"a": now, "b": -now}, "picture": picture}[self.kind]

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.t = 0
        return self.observe(), {}

    def step(self, action: Any) -> Any:
        self.t += 1
        reward = float(action[0]) + self.t
        return self.observe(), reward, self.t == self.length, False, {}

    def render(self) -> Any:
        return np.zeros((8, 8, 3), np.uint8)


def walkers(kind: str = "plain") -> VectorEnv:
    return SyncVectorEnv([lambda n=n: Walker(n, kind) for n in (3, 5)])


class Stack(VectorWrapper):
    """The last two observations of each env; what others write, too."""

    def __init__(self, env: VectorEnv) -> None:
        super().__init__(env)
        self.single_observation_space = spaces.Box(-10, 10, (2, 2), np.float32)
        self.observation_space = spaces.Box(-10, 10, (2, 2, 2), np.float32)
        self.ended = np.zeros(2, bool)

    def reset(self, **kwargs: Any) -> Any:
        observation, info = self.env.reset(**kwargs)
        self.stack = np.stack([observation, observation], 1)
        return self.stack, info

    def step(self, actions: Any) -> Any:
        observation, reward, terminated, truncated, info = self.env.step(actions)
        self.stack = np.stack([self.stack[:, 1], observation], 1)
        self.stack[self.ended, 0] = observation[self.ended]
        self.ended = terminated | truncated
        return self.stack, reward, terminated, truncated, info


single = gymnasium.wrappers
WRAPPERS: dict[str, Callable[[], VectorEnv]] = {
    "ClipAction": lambda: vector.ClipAction(walkers()),
    "RescaleAction": lambda: vector.RescaleAction(
        walkers(), np.array([-4], np.float32), np.array([4], np.float32)
    ),
    "TransformAction": lambda: vector.TransformAction(walkers(), lambda action: action / 2),
    "VectorizeTransformAction": lambda: vector.VectorizeTransformAction(
        walkers(), single.ClipAction
    ),
    "VectorizeTransformReward": lambda: vector.VectorizeTransformReward(
        walkers(), single.TransformReward, func=lambda reward: reward - 1
    ),
    "VectorizeTransformObservation": lambda: vector.VectorizeTransformObservation(
        walkers(), single.TransformObservation, func=lambda now: 2 * now, observation_space=None
    ),
    "TransformObservation": lambda: vector.TransformObservation(walkers(), lambda now: 2 * now),
    "FilterObservation": lambda: vector.FilterObservation(walkers("dict"), ["b"]),
    "FlattenObservation": lambda: vector.FlattenObservation(walkers("dict")),
    "GrayscaleObservation": lambda: vector.GrayscaleObservation(walkers("picture")),
    "ResizeObservation": lambda: vector.ResizeObservation(walkers("picture"), (4, 4)),
    "ReshapeObservation": lambda: vector.ReshapeObservation(walkers(), (2, 1)),
    "RescaleObservation": lambda: vector.RescaleObservation(walkers(), 0, 1),
    "DtypeObservation": lambda: vector.DtypeObservation(walkers(), np.float64),
    "NormalizeObservation": lambda: vector.NormalizeObservation(walkers()),
    "TransformReward": lambda: vector.TransformReward(walkers(), lambda reward: reward - 1),
    "ClipReward": lambda: vector.ClipReward(walkers(), 2, 3),
    "NormalizeReward": lambda: vector.NormalizeReward(walkers()),
    "RecordEpisodeStatistics": lambda: vector.RecordEpisodeStatistics(walkers()),
    "DictInfoToList": lambda: vector.DictInfoToList(walkers()),
    "RecordVideo": lambda: vector.RecordVideo(walkers(), "/nowhere"),
    "HumanRendering": lambda: vector.HumanRendering(walkers()),
    "ArrayConversion": lambda: vector.ArrayConversion(walkers(), np, np),
    "NumpyToTorch": lambda: vector.NumpyToTorch(walkers()),
    "JaxToNumpy": lambda: vector.JaxToNumpy(walkers()),
    "JaxToTorch": lambda: vector.JaxToTorch(walkers()),
    "a stack of our own": lambda: Stack(walkers()),
    "two of them": lambda: vector.NormalizeReward(vector.RecordEpisodeStatistics(walkers())),
    "none": walkers,
}
# What they need is not installed everywhere, or there is no window.
ELSEWHERE = {"ArrayConversion", "NumpyToTorch", "JaxToNumpy", "JaxToTorch", "RecordVideo"}
ELSEWHERE |= {"HumanRendering"}
STEPS = 11


def test_every_vector_wrapper_of_gymnasium_is_placed() -> None:
    bases = {"VectorWrapper", "VectorObservationWrapper", "VectorActionWrapper"}
    found = {name for name in vector.__all__ if name[0].isupper()} - bases
    assert found <= set(WRAPPERS)


def made(name: str) -> VectorEnv:
    try:
        return WRAPPERS[name]()
    except Exception as error:
        if name not in ELSEWHERE:
            raise
        pytest.skip(f"{type(error).__name__}: {error}")


def always(td: TensorDictBase) -> TensorDictBase:
    return td.set("action", torch.full((len(td), 1), 1.5))


def plain_loop(env: Any) -> list[list[tuple[Any, float, Any, bool]]]:
    """Return the transitions of each env, without steps that only reset an env."""
    found: list[list[tuple[Any, float, Any, bool]]] = [[], []]
    env.reset(seed=[0, 1])  # as TorchRL does it: the episodes begin with the next one
    observation, _ = env.reset()
    ended = np.zeros(2, bool)
    while min(map(len, found)) < STEPS:
        before = observation
        observation, reward, terminated, truncated, _ = env.step(np.full((2, 1), 1.5, np.float32))
        for i in np.flatnonzero(~ended):
            found[i].append((pick(before, i), reward[i], pick(observation, i), terminated[i]))
        ended = (terminated | truncated) & ~ended
    env.close()
    return found


def pick(observation: Any, i: int) -> dict[str, np.ndarray]:
    if not isinstance(observation, dict):
        observation = {"observation": observation}
    return {key: np.array(value[i]) for key, value in observation.items()}


def require_equal(rows: TensorDictBase, name: str) -> None:
    found = plain_loop(made(name))
    assert rows.shape == (2, STEPS)
    for i, t in np.ndindex(2, STEPS):
        row = rows[i, t]
        before, reward, after, terminated = found[i][t]
        for key in before:
            as_ours = "pixels" if before[key].shape[-1:] == (3,) else key
            assert np.array_equal(row[as_ours].numpy(), before[key]), (i, t, key)
            assert np.array_equal(row["next", as_ours].numpy(), after[key]), (i, t, key)
        assert row["next", "reward"].item() == np.float32(reward), (i, t)
        assert row["next", "terminated"].item() == terminated, (i, t)


@pytest.mark.parametrize("name", WRAPPERS)
def test_a_vector_wrapper_sees_what_it_would_in_a_plain_loop(name: str) -> None:
    made(name).close()
    with RPCBatchedCollector(
        WRAPPERS[name], always, frames_per_batch=2 * STEPS, seed=0
    ) as collector:
        require_equal(collector.next(), name)
        if name == "RecordEpisodeStatistics":
            (lengths,) = collector.get_attr("length_queue")
            assert set(lengths) == {3, 5}
