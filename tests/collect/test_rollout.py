from __future__ import annotations

import itertools
import warnings
from collections.abc import Sequence
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn
from torchrl.collectors import Collector
from torchrl.data import Bounded
from torchrl.envs import GymEnv, GymWrapper
from torchrl.modules import (
    AdditiveGaussianModule,
    OrnsteinUhlenbeckProcessModule,
    RandomPolicy,
)

from tests.collect.envs import Counter, DictEnv, NextStepVector, counters, q
from torchrl_dist.collect.loop.access import visit
from torchrl_dist.collect.loop.policies import Compilation
from torchrl_dist.collect.loop.rollout import Episodes, make_rollout
from torchrl_dist.collect.worker.worker import RolloutWorker, WorkerConfig
from torchrl_dist.errors import ConfigurationError


def collect(make_env: Any, policy: Any, frames: int, batches: int = 1, **kwargs: Any) -> TensorDict:
    rollout = make_rollout(make_env, policy, frames=frames, **kwargs)
    parts = [rollout.run(rollout.steps) for _ in range(batches)]
    rollout.close()
    return torch.cat(parts, 1)


def torchrl_data(env: Any, policy: Any, frames: int) -> TensorDictBase:
    collector = Collector(env, policy, frames_per_batch=frames, total_frames=frames)
    data = next(iter(collector))
    collector.shutdown()
    return data.unsqueeze(0)


def assert_equal_data(ours: TensorDictBase, theirs: TensorDictBase) -> None:
    """Same keys, shapes, dtypes, names and values, except what the collector adds itself."""
    ours, theirs = (td.exclude("policy_version", "collector") for td in (ours, theirs))
    assert set(ours.keys(True, True)) == set(theirs.keys(True, True))
    assert (ours.shape, ours.names) == (theirs.shape, theirs.names)
    for key in theirs.keys(True, True):
        assert ours[key].dtype == theirs[key].dtype and torch.equal(ours[key], theirs[key]), key


class Clearing(SyncVectorEnv):
    """A masked reset clears the rewards and flags that the last step returned."""

    results: Sequence[np.ndarray] = ()

    def step(self, actions: Any) -> Any:
        observation, *self.results, info = super().step(actions)
        return observation, *self.results, info

    def reset(self, **how: Any) -> Any:
        for array in self.results:
            array[how["options"]["reset_mask"]] = 0
        return super().reset(**how)


CASES = {
    "disabled, with arrays of its own": lambda lengths, cut: Clearing(
        [lambda n=n: Counter(n, cut) for n in lengths], autoreset_mode=AutoresetMode.DISABLED
    ),
    "disabled": lambda lengths, cut: counters(lengths, AutoresetMode.DISABLED, cut),
    "same step": lambda lengths, cut: counters(lengths, AutoresetMode.SAME_STEP, cut),
    "next step": lambda lengths, cut: counters(lengths, AutoresetMode.NEXT_STEP, cut),
    "next step, undeclared": NextStepVector,
}


class TestVectorEnvs:
    @pytest.mark.parametrize("truncate", [False, True])
    @pytest.mark.parametrize("case", CASES)
    def test_every_autoreset_mode_gives_the_transitions_of_single_envs(
        self, case: str, truncate: bool
    ) -> None:
        lengths = [3, 5, 1, 4]
        got = collect(lambda: CASES[case](lengths, truncate), None, 4 * 7, batches=3)
        singles = [collect(lambda n=n: Counter(n, truncate), None, 7, batches=3) for n in lengths]
        assert_equal_data(got.exclude("action"), torch.cat(singles, 0).exclude("action"))

    @pytest.mark.parametrize("mode", list(AutoresetMode))
    def test_dict_observations(self, mode: AutoresetMode) -> None:
        got = collect(
            lambda: SyncVectorEnv([DictEnv] * 2, autoreset_mode=mode), None, 2 * 11, batches=2
        )
        single = collect(DictEnv, None, 11, batches=2)
        assert_equal_data(got.exclude("action"), torch.cat([single] * 2, 0).exclude("action"))

    @pytest.mark.parametrize("shared_memory", [True, False])
    def test_processes_of_an_async_vector_env(self, shared_memory: bool) -> None:
        lengths = [2, 3]

        def make() -> AsyncVectorEnv:
            return AsyncVectorEnv(  # TorchRL makes "spawn" the usual, which imports it per process
                [lambda n=n: Counter(n) for n in lengths],
                shared_memory=shared_memory,
                context="fork",
            )

        rollout = make_rollout(make, None, frames=20)
        got = rollout.run(10)
        visit(rollout.target, None, "set", "task", ([1, 2],), {})  # a list is one value
        assert visit(rollout.target, None, "get", "task", (), {}) == [[1, 2], [1, 2]]
        rollout.close()
        singles = [collect(lambda n=n: Counter(n), None, 10) for n in lengths]
        assert_equal_data(got.exclude("action"), torch.cat(singles, 0).exclude("action"))

    @pytest.mark.parametrize("kind", [SyncVectorEnv, partial(AsyncVectorEnv, context="fork")])
    def test_an_env_that_overwrites_its_last_observation_causes_a_warning(self, kind: Any) -> None:
        class InPlace(Counter):
            def _observe(self) -> np.ndarray:
                self.seen = self.__dict__.get("seen", np.empty(2, np.float32))
                self.seen[:] = super()._observe()
                return self.seen

        made = []
        for mode in AutoresetMode.SAME_STEP, AutoresetMode.DISABLED:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                made.append(collect(lambda m=mode: kind([InPlace] * 2, autoreset_mode=m), None, 20))
            said = [each for each in caught if "does not copy" in str(each.message)]
            assert len(said) == (mode is AutoresetMode.SAME_STEP)
        lost = (made[0]["next", "observation"] != made[1]["next", "observation"]).any(-1)
        assert torch.equal(lost, made[0]["next", "done"].squeeze(-1))

    def test_native_cartpole_truncates_at_its_limit(self) -> None:
        def make() -> gymnasium.vector.VectorEnv:
            return gymnasium.make_vec("CartPole-v1", num_envs=3, max_episode_steps=4)

        data = collect(make, q(4, 2), 3 * 8)
        expected = torch.tensor([False, False, False, True] * 2).expand(3, 8)
        assert torch.equal(data["next", "truncated"].squeeze(-1), expected)
        assert not data["next", "terminated"].any()

    def test_surplus_steps_of_a_fast_env_open_its_next_rollout(self) -> None:
        rollout = make_rollout(lambda: NextStepVector([1, 50]), None, frames=10)
        first = rollout.run(5)
        rollout.policy_version = 1
        second = rollout.run(5)
        both = torch.cat([first, second], 1)
        assert_no_broken_transition(both)
        assert both["observation"][1, :, 0].tolist() == [100 + t for t in range(10)]
        assert (first["policy_version"] == 0).all()
        assert second["policy_version"][1].tolist() == [0, 0, 0, 0, 1]  # made ahead, and says so

    def test_envs_that_drift_apart_are_reported_and_then_refused(self, monkeypatch) -> None:
        monkeypatch.setattr("torchrl_dist.collect.loop.rollout._MAX_ROLLOUTS_AHEAD", 20)
        rollout = make_rollout(lambda: NextStepVector([1, 50]), None, frames=10)
        with pytest.warns(UserWarning, match="same-step autoreset"):
            for _ in range(10):
                rollout.run(5)
        with pytest.raises(ConfigurationError, match="same-step autoreset"):
            for _ in range(40):
                rollout.run(5)

    def test_an_id_may_name_the_module_that_registers_it(self) -> None:
        data = collect("gymnasium.envs.classic_control:CartPole-v1", None, 6, num_envs=2)
        assert data["observation"].shape == (2, 3, 4)


def assert_no_broken_transition(data: TensorDictBase) -> None:
    """The next observation of a row is the observation of the row after it, unless it ended."""
    going_on = ~data["next", "done"][:, :-1].squeeze(-1)
    after = data["observation"][:, 1:]
    assert torch.equal(data["next", "observation"][:, :-1][going_on], after[going_on])
    assert not data["done"].any()


class TestEpisodes:
    def test_ids_returns_and_lengths_across_rollouts(self) -> None:
        rng = np.random.default_rng(0)
        reward = rng.normal(size=(3, 40))
        done = rng.random((3, 40)) < 0.2
        episodes = Episodes(3, offset=1, stride=4)
        ids, returns, lengths = [], [], []
        for start in range(0, 40, 8):
            part = slice(start, start + 8)
            i, r, n = episodes.advance(reward[:, part], done[:, part])
            ids.append(i)
            returns += r
            lengths += n
        all_ids = np.concatenate(ids, 1)
        expected = []
        for env in range(3):
            borders = [0, *(np.flatnonzero(done[env]) + 1), 40]
            for a, b in itertools.pairwise(borders):
                if a == b:
                    continue
                (trajectory,) = set(all_ids[env, a:b].tolist())
                expected.append((trajectory, reward[env, a:b].sum(), b - a, done[env, b - 1]))
        assert len({e[0] for e in expected}) == len(expected)
        assert all(e[0] % 4 == 1 for e in expected)
        finished = sorted((round(e[1], 9), e[2]) for e in expected if e[3])
        assert sorted((round(r, 9), n) for r, n in zip(returns, lengths, strict=True)) == finished

    def test_an_infinite_or_huge_reward_is_of_its_own_episode(self) -> None:
        for bad in (-np.inf, np.nan, 1e30):
            episodes = Episodes(2)
            reward, done = np.ones((2, 8), np.float32), np.zeros((2, 8), bool)
            done[:, 1::2] = True
            reward[0, 2] = bad
            _, returns, lengths = episodes.advance(reward, done)
            assert returns[:1] + returns[2:] == [2.0] * 7 and lengths == [2] * 8
            assert returns[1] == np.float32(bad) or np.isnan(returns[1])
            reward[0, 7] = bad  # in an episode that goes on
            done[0, 7] = False
            assert episodes.advance(reward, done)[1][-4:] == [2.0] * 4
            _, returns, _ = episodes.advance(np.ones((2, 8), np.float32), done)
            assert not np.isclose(returns[0], 3.0) and returns[1:] == [2.0] * 6


class TestTorchRLEnvs:
    def test_a_static_seed_is_that_of_every_env(self) -> None:
        worker = RolloutWorker(
            WorkerConfig(lambda: GymEnv("CartPole-v1"), q(4, 2), frames_per_rollout=40, num_envs=2)
        )
        for static in (True, False):
            worker.set_seed(5, static_seed=static)
            first = worker.collect()[0]["observation"][:, 0]
            assert torch.equal(first[0], first[1]) == static
        worker.close()

    def test_shorter_rollouts_and_cuts_lose_nothing(self) -> None:
        worker = RolloutWorker(
            WorkerConfig(lambda: GymWrapper(Counter(10**6)), frames_per_rollout=10)
        )
        worker.cut(request=2, least=4)
        rows = [worker.collect(steps, request=n)[0] for n, steps in enumerate([10, 10, 10, 3, 10])]
        assert [part.shape[1] for part in rows] == [4, 4, 4, 3, 10]
        steps = torch.cat([part["next", "observation"][0, :, 0] for part in rows])
        assert torch.equal(steps, 101 + torch.arange(25.0))
        worker.cut(request=9, least=4)
        assert worker.collect()[0].shape[1] == 10, "a request without a number was cut"
        worker.close()


def test_a_vector_env_that_takes_one_seed_for_all_refuses_seeds() -> None:
    def worker(**options: Any) -> RolloutWorker:
        return RolloutWorker(WorkerConfig(lambda: NextStepVector([3, 4]), None, seed=3, **options))

    with pytest.raises(ConfigurationError, match="SyncVectorEnv"):
        worker(seed_given=True)
    unseeded = worker()  # except what a collector draws
    with pytest.raises(ConfigurationError, match="seed= out"):
        unseeded.set_seed(5)
    unseeded.close()


def test_noise_with_a_memory_begins_anew_with_each_episode() -> None:
    spec = Bounded(-9, 9, (1,))
    noise = OrnsteinUhlenbeckProcessModule(spec=spec, sigma=1e-9, theta=0.0, x0=1.0, safe=False)
    zero = TensorDictModule(lambda x: torch.zeros(len(x), 1), ["observation"], ["action"])
    rollout = make_rollout(
        lambda: gymnasium.make("Pendulum-v1", max_episode_steps=5),
        TensorDictSequential(zero, noise),
        frames=2 * 12,
        num_envs=2,
    )
    seen = torch.cat([rollout.run(12), rollout.run(12)], 1)
    begins = torch.cat([torch.ones(2, 1, 1).bool(), seen["next", "done"][:, :-1]], 1)
    assert torch.equal(seen["is_init"], begins)
    assert not [key for key in seen.keys(True) if "_ou" in str(key)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # that "is_init" is missing
        rollout.run(2)
    rollout.close()


def test_observations_that_a_policy_keeps_do_not_change() -> None:
    kept, copies = [], []

    def policy(td: TensorDictBase) -> TensorDictBase:
        kept.append(td["observation"])
        copies.append(td["observation"].clone())
        return td.set("action", torch.eye(3)[:1])

    rows = collect(Counter, policy, 7, batches=2)
    assert len({tuple(seen.flatten().tolist()) for seen in copies}) == 14
    assert all(map(torch.equal, kept, copies))
    for seen in kept:
        seen.zero_()  # nor does what was collected
    assert torch.equal(rows["observation"][0], torch.cat(copies))


@pytest.mark.parametrize("options", [{"backend": "eager"}, {"warmup": 3, "backend": "eager"}])
def test_compiled_policies_choose_the_same_actions(options: Any) -> None:
    expected = collect(Counter, q(2, 3), 9)
    got = collect(Counter, q(2, 3), 9, compilation=Compilation(compile_policy=options))
    assert_equal_data(got, expected)


def test_graphs_are_plain_calls_where_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = Compilation(cudagraph_policy={"warmup": 2})
    if not torch.cuda.is_available():
        with pytest.warns(UserWarning, match="CUDA"):
            assert_equal_data(
                collect(Counter, q(2, 3), 9, compilation=graphs),
                collect(Counter, q(2, 3), 9),
            )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ConfigurationError, match="'cpu'"):
        collect(Counter, q(2, 3), 9, compilation=graphs)


class Says(gymnasium.Env):
    """Observes ``told``, even if it is not in the space."""

    action_space = spaces.Discrete(3)

    def __init__(self, space: spaces.Space, told: Any, later: Any = None, reward: Any = 1.0):
        self.observation_space, self.told, self.reward = space, told, reward
        self.later = told if later is None else later

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return self.told, {}

    def step(self, action: Any) -> Any:
        return self.later, self.reward, False, False, {}


THREE = spaces.Box(-9, 9, (3,), np.float32)
ROW = np.arange(3, dtype=np.float32)


PICTURE = spaces.Box(-9, 9, (2, 3), np.float32)
PAIR = spaces.Dict(a=THREE, b=THREE)
MISFITS = [
    (THREE, ROW, ROW[:1]),
    (THREE, ROW, np.float32(1)),
    (PICTURE, np.zeros((2, 3)), np.zeros((3, 2))),
    (spaces.Discrete(3), 0, -1),
    (spaces.Discrete(3), 0, 3),
    (spaces.Discrete(3, start=5), 5, 4),
    (spaces.Discrete(3), 0, np.zeros(3, np.int64)),
    (PAIR, {"a": ROW, "b": ROW}, {"a": ROW, "b": ROW[:1]}),
]
WRITTEN = ("action", "collector", "done", "next")
WRITTEN += ("policy_version", "reward", "terminated", "truncated")


def named(name: str, space: spaces.Space, told: Any) -> Says:
    return Says(spaces.Dict({name: space, "seen": THREE}), {name: told, "seen": ROW})


def writing(key: str, first: Any, later: torch.Tensor) -> Any:
    """A policy that writes ``later`` in the third step, which may not fit what it wrote before."""

    def policy(td: TensorDictBase) -> TensorDictBase:
        value = later if td["observation"][0, 0] % 100 == 2 else first
        if value is not None:
            td[key] = value
        return td.set("action", torch.eye(3)[:1])

    return policy


def sequences() -> Counter:
    env = Counter()
    env.observation_space = spaces.Sequence(spaces.Discrete(5))
    return env


ENVPOOL = type("Pool", (Counter,), {"__module__": "envpool.python.gymnasium_envpool"})
ONE = torch.ones(1, 3)
REFUSED: list[tuple[Any, Any, str]] = [
    *((lambda s=s, b=bad: Says(s, b), None, "observation") for s, _, bad in MISFITS),
    *((lambda s=s, g=good, b=bad: Says(s, g, b), None, "observation") for s, good, bad in MISFITS),
    *((lambda n=name: named(n, THREE, ROW), None, name) for name in WRITTEN),
    *((lambda n=name: named(n, spaces.Dict(x=THREE), {"x": ROW}), None, name) for name in WRITTEN),
    (sequences, None, r"FlattenObservation.*GymWrapper"),
    (ENVPOOL, None, "MultiThreadedEnv"),
    (Counter, nn.Linear(2, 3), "in_keys"),
    (Counter, nn.Sequential(nn.Linear(2, 3)), "in_keys"),
    (Counter, lambda td: td["observation"], "in_keys"),
    (Counter, "greedy", "policy"),
    (
        Counter,
        TensorDictModule(lambda x: x[..., 0].long(), ["observation"], ["action"]),
        "categorical_action_encoding=True",
    ),
    # It would be missing, be stretched, or lose its fractions.
    (Counter, writing("late", None, torch.ones(1, 2)), "late"),
    (Counter, writing("observation", None, torch.ones(1, 1)), "observation"),
    (Counter, writing("made", ONE, ONE[:, :1]), r"\[1, 1\]"),
    (Counter, writing("made", ONE, ONE.double()), "float64"),
    (Counter, writing("made", ONE.long(), ONE * 2.5), "int64"),
]


@pytest.mark.parametrize(("make", "policy", "hint"), REFUSED)
def test_an_env_or_a_policy_that_does_not_fit_is_refused(make: Any, policy: Any, hint: str) -> None:
    with pytest.raises(ConfigurationError, match=hint):
        collect(make, policy, 7)


def test_a_vector_env_of_another_size_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="num_envs=3"):
        make_rollout(lambda: counters([2, 2], AutoresetMode.SAME_STEP), None, frames=5, num_envs=3)


def test_a_stop_iteration_of_a_policy_is_an_error() -> None:
    def policy(td: TensorDictBase) -> TensorDictBase:
        raise StopIteration("no more actions")

    with pytest.raises(StopIteration, match="no more actions"):
        collect(Counter, policy, 3)


@pytest.mark.parametrize(
    ("space", "told"),
    [
        (THREE, ROW[None]),
        (THREE, [0, 1, 2]),
        (spaces.Box(-9, 9, (1, 3), np.float32), ROW),
        (spaces.Box(-9, 9, (), np.float32), np.ones(1, np.float32)),
        (spaces.Discrete(3), np.array([1])),
        (spaces.Discrete(3), np.array(1)),
    ],
)
def test_observations_with_other_axes_of_one_are_taken_as_torchrl_takes_them(space, told) -> None:
    ours = collect(lambda: Says(space, told, reward=None), None, 3)
    theirs = torchrl_data(GymWrapper(Says(space, told, reward=None)), None, 3)
    for key in ("observation", ("next", "observation"), ("next", "reward")):
        assert torch.equal(ours[key].flatten(), theirs[key].flatten())  # it keeps some axes of one
    assert ours["next", "reward"].eq(0).all()


@pytest.mark.parametrize(
    ("space", "told"),
    [
        (spaces.Discrete(3, start=5), 6),
        (spaces.MultiDiscrete([3, 4], start=[5, -1]), np.array([6, 0])),
    ],
)
def test_classes_count_from_zero_as_those_of_actions_do(space: spaces.Space, told: Any) -> None:
    rows = collect(lambda: Says(space, told), None, 3, categorical_action_encoding=True)
    assert rows["observation"].eq(1).all()
    assert rows["next", "observation"].eq(1).all()


def test_envs_that_are_reset_alone_begin_with_zeros_of_what_a_policy_wrote() -> None:
    def policy(td: TensorDictBase) -> TensorDictBase:
        td["counted"] = td.get("counted", torch.zeros(2, 1)) + 1
        return td.set("action", torch.eye(3)[:2])

    rollout = make_rollout(lambda: Counter(100), policy, frames=2 * 3, num_envs=2)
    rollout.run(3)
    rollout.reset([1])
    assert rollout.run(3)["counted"][..., 0].tolist() == [[4, 5, 6], [1, 2, 3]]
    rollout.close()


def noisy_policy(spec: Any) -> TensorDictSequential:
    torch.manual_seed(0)
    actor = TensorDictModule(nn.Linear(3, 1), in_keys=["observation"], out_keys=["action"])
    return TensorDictSequential(actor, AdditiveGaussianModule(spec=spec, sigma_init=1.0))


def test_exploration_modules_without_a_spec_get_the_envs() -> None:
    spec = GymEnv("Pendulum-v1").action_spec
    actions = []
    for given in (None, spec):
        rollout = make_rollout("Pendulum-v1", noisy_policy(given), frames=20, num_envs=2)
        rollout.seed([1, 2])
        torch.manual_seed(1)
        actions.append(rollout.run(10)["action"])
        rollout.close()
    assert torch.equal(*actions) and actions[0].std() > 0.1
    drawn = collect("Pendulum-v1", RandomPolicy(), 5)["action"]
    assert drawn.shape == (1, 5, 1) and spec.is_in(drawn)


class Clips(gymnasium.Env):
    """Changes its action in place, and keeps it: the next reward depends on it."""

    observation_space = spaces.Box(-1, 1, (1,), np.float32)

    def __init__(self, space: spaces.Space) -> None:
        self.action_space, self.last = space, None

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        before = 0.0 if self.last is None else float(np.sum(self.last))
        self.last = action
        if isinstance(action, np.ndarray):
            action += 1
        return np.zeros(1, np.float32), before, False, False, {}


@pytest.mark.parametrize("vector", [False, True])
@pytest.mark.parametrize(
    ("space", "action", "reward"),
    [
        (spaces.Box(-10, 10, (2,), np.float32), torch.full((2, 2), 5.0), 12.0),
        (spaces.Box(-10, 10, (2,), np.int64), torch.full((2, 2), 5), 12.0),
        (spaces.MultiBinary(2), torch.ones(2, 2, dtype=torch.int8), 4.0),
        (spaces.MultiDiscrete([9, 9]), torch.full((2, 2), 5), 12.0),
    ],
    ids=str,
)
def test_an_action_is_the_envs_own_and_the_batch_is_the_learners(
    space: spaces.Space, action: torch.Tensor, reward: float, vector: bool
) -> None:
    make = (lambda: SyncVectorEnv([lambda: Clips(space)] * 2)) if vector else lambda: Clips(space)
    rollout = make_rollout(
        make,
        lambda td: td.set("action", action),
        frames=6,
        num_envs=2,
        categorical_action_encoding=True,
    )
    first = rollout.run(3)
    assert first["action"].unique().tolist() == action.unique().tolist()
    first["action"].zero_()  # the learner's to change
    assert rollout.run(3)["next", "reward"].unique().tolist() == [reward]
    rollout.close()
