from __future__ import annotations

import itertools
import warnings
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
from torch.distributions import Normal
from torchrl.collectors import Collector
from torchrl.data import Bounded, OneHot
from torchrl.envs import GymEnv, GymWrapper, SerialEnv
from torchrl.envs.utils import ExplorationType
from torchrl.modules import (
    AdditiveGaussianModule,
    NormalParamExtractor,
    OrnsteinUhlenbeckProcessModule,
    ProbabilisticActor,
    QValueActor,
    RandomPolicy,
)

from tests.collect.envs import Counter, EpisodeSeeds, NextStepVector, counters, mlp
from torchrl_dist.collect.loop.access import visit
from torchrl_dist.collect.loop.policies import Compilation
from torchrl_dist.collect.loop.rollout import Episodes, make_rollout
from torchrl_dist.collect.worker.worker import RolloutWorker, WorkerConfig
from torchrl_dist.errors import ConfigurationError


def one_hot_policy(inputs: int = 4, actions: int = 2) -> QValueActor:
    return QValueActor(mlp(inputs, actions), in_keys=["observation"], spec=OneHot(actions))


def collect(make_env: Any, policy: Any, frames: int, batches: int = 1, **kwargs: Any) -> TensorDict:
    rollout = make_rollout(make_env, policy, frames=frames, **kwargs)
    parts = [rollout.run(rollout.steps) for _ in range(batches)]
    rollout.close()
    return torch.cat(parts, 1)


def torchrl_data(env: Any, policy: Any, frames: int, **kwargs: Any) -> TensorDictBase:
    collector = Collector(env, policy, frames_per_batch=frames, total_frames=frames, **kwargs)
    data = next(iter(collector))
    collector.shutdown()
    return data if data.ndim == 2 else data.unsqueeze(0)


def assert_equal_data(ours: TensorDictBase, theirs: TensorDictBase) -> None:
    """Same keys, shapes, dtypes, names and values, except what the collector adds itself."""
    ours, theirs = (td.exclude("policy_version", "collector") for td in (ours, theirs))
    assert set(ours.keys(True, True)) == set(theirs.keys(True, True))
    assert ours.shape == theirs.shape
    assert ours.names == theirs.names
    for key in theirs.keys(True, True):
        assert ours[key].dtype == theirs[key].dtype, key
        assert ours[key].shape == theirs[key].shape, key
        assert torch.equal(ours[key], theirs[key]), key


def seeded(env_id: str, first: int, **kwargs: Any) -> gymnasium.Env:
    return EpisodeSeeds(gymnasium.make(env_id, **kwargs), first)


class TestDataEqualTorchRLs:
    def test_cartpole_one_env_with_a_q_value_actor(self) -> None:
        policy = one_hot_policy()
        ours = collect(lambda: seeded("CartPole-v1", 0), policy, 60, batches=3)
        theirs = torchrl_data(GymWrapper(seeded("CartPole-v1", 0)), policy, 180)
        assert ours["next", "terminated"].sum() > 3
        assert_equal_data(ours, theirs)

    def test_cartpole_several_envs(self) -> None:
        policy = one_hot_policy()
        firsts = iter((0, 1000, 2000))
        ours = collect(lambda: seeded("CartPole-v1", next(firsts)), policy, 300, num_envs=3)
        theirs = torchrl_data(
            SerialEnv(
                3, [lambda i=i: GymWrapper(seeded("CartPole-v1", 1000 * i)) for i in range(3)]
            ),
            policy,
            300,
        )
        assert_equal_data(ours, theirs)

    def test_truncation_by_a_time_limit(self) -> None:
        policy = one_hot_policy()
        limit = {"max_episode_steps": 7}
        ours = collect(lambda: seeded("CartPole-v1", 0, **limit), policy, 50)
        theirs = torchrl_data(GymWrapper(seeded("CartPole-v1", 0, **limit)), policy, 50)
        assert ours["next", "truncated"].sum() == 7
        assert not ours["next", "terminated"].any()
        assert_equal_data(ours, theirs)

    def test_categorical_actions(self) -> None:
        policy = TensorDictModule(
            lambda obs: mlp(4, 2)(obs).argmax(-1), in_keys=["observation"], out_keys=["action"]
        )
        ours = collect(
            lambda: seeded("CartPole-v1", 0), policy, 50, categorical_action_encoding=True
        )
        theirs = torchrl_data(
            GymWrapper(seeded("CartPole-v1", 0), categorical_action_encoding=True), policy, 50
        )
        assert_equal_data(ours, theirs)

    def test_continuous_actions_with_log_probability(self) -> None:
        policy = ProbabilisticActor(
            TensorDictModule(
                nn.Sequential(mlp(3, 2), NormalParamExtractor()), ["observation"], ["loc", "scale"]
            ),
            in_keys=["loc", "scale"],
            distribution_class=Normal,
            return_log_prob=True,
        )
        mode = ExplorationType.DETERMINISTIC
        ours = collect(lambda: seeded("Pendulum-v1", 0), policy, 210, exploration_type=mode)
        theirs = torchrl_data(
            GymWrapper(seeded("Pendulum-v1", 0)), policy, 210, exploration_type=mode
        )
        assert {"loc", "scale", "action_log_prob"} <= set(ours.keys())
        assert_equal_data(ours, theirs)

    @pytest.mark.parametrize("mode", ["RANDOM", "DETERMINISTIC", "MODE", "MEAN"])
    def test_exploration_types(self, mode: str) -> None:
        class Seeding(nn.Module):  # what is drawn follows from the observation alone
            def forward(self, observation: torch.Tensor) -> torch.Tensor:
                torch.manual_seed(int(observation.abs().sum() * 1e6))
                return self.net(observation)

        module = Seeding()
        module.net = nn.Sequential(mlp(3, 2), NormalParamExtractor())
        policy = ProbabilisticActor(
            TensorDictModule(module, ["observation"], ["loc", "scale"]),
            in_keys=["loc", "scale"],
            distribution_class=Normal,
            return_log_prob=True,
        )
        kind = ExplorationType[mode]
        ours = collect(lambda: seeded("Pendulum-v1", 0), policy, 60, exploration_type=kind)
        theirs = torchrl_data(
            GymWrapper(seeded("Pendulum-v1", 0)), policy, 60, exploration_type=kind
        )
        assert_equal_data(ours, theirs)

    @pytest.mark.parametrize("categorical", [False, True])
    def test_discrete_observations(self, categorical: bool) -> None:
        options = {"categorical_action_encoding": categorical}

        def act(obs: torch.Tensor) -> torch.Tensor:
            classes = (obs if categorical else obs.argmax(-1)) % 4
            return classes if categorical else nn.functional.one_hot(classes, 4)

        policy = TensorDictModule(act, in_keys=["observation"], out_keys=["action"])
        ours = collect(lambda: seeded("FrozenLake-v1", 0), policy, 60, **options)
        theirs = torchrl_data(GymWrapper(seeded("FrozenLake-v1", 0), **options), policy, 60)
        assert_equal_data(ours, theirs)

    def test_nested_dict_observations_and_multi_discrete_actions(self) -> None:
        policy = TensorDictModule(
            lambda where: nn.functional.one_hot((where[..., :1] > 2).long(), 5).flatten(-2),
            in_keys=[("inner", "where")],
            out_keys=["action"],
        )
        ours = collect(DictEnv, policy, 40)
        theirs = torchrl_data(GymWrapper(DictEnv()), policy, 40)
        assert ("inner", "where") in ours.keys(True)
        assert_equal_data(ours, theirs)


class DictEnv(gymnasium.Env):
    observation_space = spaces.Dict(
        {
            "state": spaces.Box(-1, 1, (), np.float64),
            "inner": spaces.Dict({"where": spaces.Box(0, 9, (2,), np.float32)}),
            "bits": spaces.MultiBinary(3),
        }
    )
    action_space = spaces.MultiDiscrete([2, 3])

    def _observe(self) -> dict[str, Any]:
        where = np.array([self.t, 9 - self.t], np.float32)
        return {
            "state": np.array(self.t / 9),
            "inner": {"where": where},
            "bits": np.array([self.t % 2, 1, 0], np.int8),
        }

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.t = 0
        return self._observe(), {}

    def step(self, action: Any) -> Any:
        assert self.action_space.contains(action), action
        self.t += 1
        return self._observe(), 1.0, self.t == 8, False, {}


CASES = {
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

    def test_native_cartpole_has_real_transitions_only(self) -> None:
        data = collect("CartPole-v1", one_hot_policy(), 64 * 50, num_envs=64, batches=4)
        assert_no_broken_transition(data)
        assert (data["next", "reward"] == 1).all()  # a reset step would have reward 0
        ended = data["next", "done"]
        assert (data["next", "observation"][..., 2:3].abs() > 0.2)[ended].all()
        first = data["observation"][:, 1:][ended[:, :-1].squeeze(-1)]
        assert (first.abs() <= 0.05).all()

    def test_native_cartpole_moves_as_the_single_one(self) -> None:
        data = collect("CartPole-v1", one_hot_policy(), 8 * 40, num_envs=8, batches=2)
        env = gymnasium.make("CartPole-v1").unwrapped
        for row in data[:2].reshape(-1):
            env.reset()
            env.state = row["observation"].double().numpy()
            seen, reward, terminated, _, _ = env.step(int(row["action"].argmax()))
            following = row["next"]
            assert torch.allclose(following["observation"], torch.from_numpy(seen), atol=1e-5)
            assert (following["reward"].item(), following["terminated"].item()) == (
                reward, terminated
            )  # fmt: skip

    def test_native_cartpole_truncates_at_its_limit(self) -> None:
        def make() -> gymnasium.vector.VectorEnv:
            return gymnasium.make_vec("CartPole-v1", num_envs=3, max_episode_steps=4)

        data = collect(make, one_hot_policy(), 3 * 8)
        expected = torch.tensor([False, False, False, True] * 2).expand(3, 8)
        assert torch.equal(data["next", "truncated"].squeeze(-1), expected)
        assert not data["next", "terminated"].any()

    def test_what_a_fast_env_has_too_much_of_opens_its_next_rollout(self) -> None:
        rollout = make_rollout(lambda: NextStepVector([1, 50]), None, frames=10)
        first = rollout.run(5)
        rollout.policy_version = 1
        second = rollout.run(5)
        both = torch.cat([first, second], 1)
        assert_no_broken_transition(both)
        assert both["observation"][1, :, 0].tolist() == [100 + t for t in range(10)]
        assert (first["policy_version"] == 0).all()
        assert second["policy_version"][1].tolist() == [0, 0, 0, 0, 1]  # made ahead, and says so

    def test_envs_that_drift_apart_are_reported_and_then_refused(self) -> None:
        rollout = make_rollout(lambda: NextStepVector([1, 50]), None, frames=10)
        with pytest.warns(UserWarning, match="same-step autoreset"):
            for _ in range(10):
                rollout.run(5)
        with pytest.raises(ConfigurationError, match="same-step autoreset"):
            for _ in range(1000):
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


class TestPolicies:
    def test_weights_changed_in_place_take_effect(self) -> None:
        policy = one_hot_policy()
        rollout = make_rollout("CartPole-v1", policy, frames=30)
        rollout.run(30)
        with torch.no_grad():
            policy.module[0].module[2].weight.zero_()
            policy.module[0].module[2].bias.copy_(torch.tensor([0.0, 1.0]))
        assert rollout.run(30)["action"][..., 1].all()

    def test_a_policy_that_overwrites_its_observation_sees_the_envs_next_one(self) -> None:
        policy = TensorDictSequential(
            TensorDictModule(lambda x: x + 0.5, ["observation"], ["observation"]),
            TensorDictModule(
                lambda x: torch.zeros(1, dtype=torch.int64), ["observation"], ["action"]
            ),
        )
        data = collect(Counter, policy, 5, categorical_action_encoding=True)
        assert data["observation"][0, :, 0].tolist() == [100.5, 101.5, 102.5, 103.5, 104.5]
        assert data["next", "observation"][0, :, 0].tolist() == [101, 102, 103, 104, 105]

    def test_an_action_of_the_wrong_shape_says_what_was_expected(self) -> None:
        policy = TensorDictModule(lambda x: x[..., 0].long(), ["observation"], ["action"])
        with pytest.raises(ConfigurationError, match="categorical_action_encoding=True"):
            collect(Counter, policy, 5)

    def test_random_actions_cover_the_space_and_follow_the_seed(self) -> None:
        def actions(seed: int) -> torch.Tensor:
            rollout = make_rollout(Counter, None, frames=60)
            rollout.seed([seed])
            return rollout.run(60)["action"]

        assert torch.equal(actions(3), actions(3))
        assert not torch.equal(actions(3), actions(4))
        assert actions(3).sum(-1).eq(1).all()
        assert actions(3).any(1).all()


class TestTorchRLEnvs:
    def test_they_go_through_torchrls_collector(self) -> None:
        policy = one_hot_policy()
        ours = collect(lambda: GymWrapper(seeded("CartPole-v1", 0)), policy, 30, batches=2)
        theirs = torchrl_data(GymWrapper(seeded("CartPole-v1", 0)), policy, 60)
        assert_equal_data(ours, theirs)

    def test_seeding_starts_a_trajectory_from_the_seeded_state(self) -> None:
        def run() -> TensorDict:
            rollout = make_rollout(lambda: GymEnv("CartPole-v1"), one_hot_policy(), frames=40)
            rollout.seed([5])
            return rollout.run(40)

        assert torch.equal(run()["observation"], run()["observation"])
        assert_no_broken_transition(run())

    def test_a_static_seed_is_that_of_every_env(self) -> None:
        worker = RolloutWorker(
            WorkerConfig(
                lambda: GymEnv("CartPole-v1"), one_hot_policy(), frames_per_rollout=40, num_envs=2
            )
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


def test_a_space_that_torchrl_does_not_know_either_is_refused_with_advice() -> None:
    class Sequences(Counter):
        observation_space = spaces.Sequence(spaces.Discrete(5))

    with pytest.raises(ConfigurationError, match=r"FlattenObservation.*GymWrapper"):
        make_rollout(Sequences, None, frames=5)


def test_an_envpool_without_gymnasiums_interface_is_refused_with_advice() -> None:
    pool = type("Pool", (Counter,), {"__module__": "envpool.python.gymnasium_envpool"})
    with pytest.raises(ConfigurationError, match="MultiThreadedEnv"):
        make_rollout(pool, None, frames=5)


def test_a_vector_env_of_another_size_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="num_envs=3"):
        make_rollout(lambda: counters([2, 2], AutoresetMode.SAME_STEP), None, frames=5, num_envs=3)


def test_the_native_vector_env_has_a_seed_for_each_of_its_envs() -> None:
    def rows(workers: int, envs: int) -> TensorDict:
        parts = []
        for index in range(workers):
            config = WorkerConfig(
                "CartPole-v1", one_hot_policy(), frames_per_rollout=60 * envs, num_envs=envs,
                worker_index=index, num_workers=workers, seed=3,
            )  # fmt: skip
            worker = RolloutWorker(config)
            parts.append(worker.collect()[0])
            worker.close()
        return torch.cat(parts, 0)

    whole = rows(1, 4)
    assert whole["next", "done"].sum() > 10
    for split in (rows(2, 2), rows(4, 1)):
        assert torch.equal(split["observation"], whole["observation"])
        assert torch.equal(split["next", "observation"], whole["next", "observation"])


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


def test_what_a_policy_keeps_of_an_observation_does_not_change() -> None:
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


@pytest.mark.parametrize(
    ("policy", "hint"),
    [
        (nn.Linear(2, 3), "in_keys"),
        (nn.Sequential(nn.Linear(2, 3)), "in_keys"),
        (lambda td: td["observation"], "in_keys"),
        ("greedy", "policy"),
    ],
)
def test_what_is_no_policy_says_what_is_expected(policy: Any, hint: str) -> None:
    with pytest.raises(ConfigurationError, match=hint):
        collect(Counter, policy, 7)


@pytest.mark.parametrize("options", [{"backend": "eager"}, {"warmup": 3, "backend": "eager"}])
def test_compiled_policies_choose_the_same_actions(options: Any) -> None:
    expected = collect(Counter, three_actions(), 9)
    got = collect(Counter, three_actions(), 9, compilation=Compilation(compile_policy=options))
    assert_equal_data(got, expected)


def three_actions() -> QValueActor:
    return QValueActor(mlp(2, 3), in_keys=["observation"], spec=OneHot(3))


def test_graphs_are_plain_calls_where_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = Compilation(cudagraph_policy={"warmup": 2})
    if not torch.cuda.is_available():
        with pytest.warns(UserWarning, match="CUDA"):
            assert_equal_data(
                collect(Counter, three_actions(), 9, compilation=graphs),
                collect(Counter, three_actions(), 9),
            )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ConfigurationError, match="'cpu'"):
        collect(Counter, three_actions(), 9, compilation=graphs)


class Says(gymnasium.Env):
    """Observes ``told``, whatever its space says."""

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


@pytest.mark.parametrize("later", [False, True], ids=["by a reset", "by a step"])
@pytest.mark.parametrize(
    ("space", "good", "bad"),
    [
        (THREE, ROW, ROW[:1]),
        (THREE, ROW, np.float32(1)),
        (spaces.Box(-9, 9, (2, 3), np.float32), np.zeros((2, 3)), np.zeros((3, 2))),
        (spaces.Discrete(3), 0, -1),
        (spaces.Discrete(3), 0, 3),
        (spaces.Discrete(3, start=5), 5, 4),
        (spaces.Discrete(3), 0, np.zeros(3, np.int64)),
        (spaces.Dict(a=THREE, b=THREE), {"a": ROW, "b": ROW}, {"a": ROW, "b": ROW[:1]}),
    ],
)
def test_observations_that_are_not_of_their_space_are_refused(
    space: spaces.Space, good: Any, bad: Any, later: bool
) -> None:
    told = {"told": good, "later": bad} if later else {"told": bad}
    with pytest.raises(ConfigurationError, match="observation"):
        collect(lambda: Says(space, **told), None, 3)


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
def test_observations_with_other_axes_of_one_are_taken_as_torchrl_takes_them(
    space: spaces.Space, told: Any
) -> None:
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


@pytest.mark.parametrize(
    "name",
    ["action", "collector", "done", "next", "policy_version", "reward", "terminated", "truncated"],
)
@pytest.mark.parametrize("nested", [False, True])
def test_an_observation_that_a_rollout_would_overwrite_is_refused(name: str, nested: bool) -> None:
    space, told = (spaces.Dict(x=THREE), {"x": ROW}) if nested else (THREE, ROW)
    env = Says(spaces.Dict({name: space, "seen": THREE}), {name: told, "seen": ROW})
    with pytest.raises(ConfigurationError, match=name):
        collect(lambda: env, None, 3)


@pytest.mark.parametrize(
    ("key", "first", "later", "hint"),
    [
        ("late", None, torch.ones(1, 2), "late"),
        ("observation", None, torch.ones(1, 1), "observation"),
        ("made", torch.ones(1, 3), torch.ones(1, 1), r"\[1, 1\]"),
        ("made", torch.ones(1, 3), torch.ones(1, 3, dtype=torch.float64), "float64"),
        ("made", torch.ones(1, 3).long(), torch.full((1, 3), 2.5), "int64"),
    ],
)
def test_what_a_policy_writes_later_must_be_as_in_the_first_step(
    key: str, first: torch.Tensor | None, later: torch.Tensor, hint: str
) -> None:
    """It would be missing, be stretched, or lose its fractions."""

    def policy(td: TensorDictBase) -> TensorDictBase:
        value = later if td["observation"][0, 0] % 100 == 2 else first
        if value is not None:
            td[key] = value
        return td.set("action", torch.eye(3)[:1])

    with pytest.raises(ConfigurationError, match=hint):
        collect(Counter, policy, 7)


def test_envs_that_are_reset_alone_begin_with_zeros_of_what_a_policy_wrote() -> None:
    def policy(td: TensorDictBase) -> TensorDictBase:
        td["counted"] = td.get("counted", torch.zeros(2, 1)) + 1
        return td.set("action", torch.eye(3)[:2])

    rollout = make_rollout(lambda: Counter(100), policy, frames=2 * 3, num_envs=2)
    rollout.run(3)
    rollout.reset([1])
    assert rollout.run(3)["counted"][..., 0].tolist() == [[4, 5, 6], [1, 2, 3]]
    rollout.close()


def test_a_stop_iteration_of_a_policy_is_an_error() -> None:
    def policy(td: TensorDictBase) -> TensorDictBase:
        raise StopIteration("no more actions")

    with pytest.raises(StopIteration, match="no more actions"):
        collect(Counter, policy, 3)


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
