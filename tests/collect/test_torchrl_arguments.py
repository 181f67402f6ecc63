"""Arguments and methods of TorchRL's collectors: the same data, or a refusal with the reason."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from tensordict import LazyStackedTensorDict, TensorDictBase, assert_close
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn
from torchrl.collectors import Collector
from torchrl.data import LazyTensorStorage, OneHot, TensorDictReplayBuffer
from torchrl.envs import (
    EnvBase,
    EnvCreator,
    GymEnv,
    GymWrapper,
    InitTracker,
    ParallelEnv,
    SerialEnv,
    TransformedEnv,
)
from torchrl.modules import GRUModule, QValueActor, RandomPolicy
from torchrl.testing.mocking_classes import CountingEnv

from tests.collect.envs import Counter, Growing, Talking, before_steps, wait_for
from torchrl_dist.collect import Preempt, RPCBatchedCollector
from torchrl_dist.collect.learner.arguments import _ANYTHING, _REFUSED
from torchrl_dist.errors import ConfigurationError, DeadlineError, RemoteError
from torchrl_dist.runtime import Session, local_cluster


class Plain(Counter):
    """Its observations do not depend on how often it was reset."""

    def _observe(self) -> np.ndarray:
        return np.array([self.t, self.length], np.float32)


class Turning(nn.Module):
    """The action follows from the observation."""

    def __init__(self, turn: int = 0) -> None:
        super().__init__()
        self.turn = nn.Parameter(torch.tensor(float(turn)))

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        action = (observation[..., 0] + self.turn).long() % 3
        return nn.functional.one_hot(action, 3).float()


def turning(turn: int = 0) -> QValueActor:
    return QValueActor(Turning(turn), in_keys=["observation"], spec=OneHot(3))


@pytest.fixture(scope="module")
def alone() -> Iterator[Session]:
    with local_cluster({"learner": 1}) as session:
        yield session


def require_equal(got: TensorDictBase, expected: TensorDictBase) -> None:
    """Compare rows except for version and worker. Trajectories may have other ids, one for each."""
    got = got.exclude("policy_version", ("collector", "worker_index"))
    assert set(got.keys(True, True)) == set(expected.keys(True, True))
    assert got.shape == expected.shape
    ids = [rows["collector", "traj_ids"].flatten() for rows in (got, expected)]
    pairs = {*zip(ids[0].tolist(), ids[1].tolist(), strict=True)}
    assert len(pairs) == len(ids[0].unique()) == len(ids[1].unique())  # the same by other names
    assert_close(got.exclude("collector"), expected.exclude("collector"), rtol=0, atol=0)
    for key in expected.keys(True, True):
        assert got[key].dtype == expected[key].dtype, key


@pytest.mark.parametrize("make", [Plain, lambda: GymWrapper(Plain())], ids=["gym", "torchrl"])
@pytest.mark.parametrize(
    "options",
    [
        {"max_frames_per_traj": 3},
        {"max_frames_per_traj": 5},
        {"max_frames_per_traj": 20},
        {"reset_at_each_iter": True},
        {"set_truncated": True},
        {"compact_obs": True, "max_frames_per_traj": 3},
        {"max_frames_per_traj": 4, "reset_at_each_iter": True, "set_truncated": True},
        {"total_frames": None, "init_random_frames": -1},
    ],
    ids=str,
)
def test_batches_are_those_of_torchrls_collector(build, make, options) -> None:
    common = {"frames_per_batch": 7, "total_frames": 28} | options
    theirs = Collector(lambda: GymWrapper(Plain()), turning(), **common)
    expected = [next(batches) for batches in [iter(theirs)] for _ in range(4)]
    theirs.shutdown()
    ours = build(make, turning(), **common)
    got = [ours.next() for _ in range(4)]
    require_equal(torch.cat(got, 1)[0], torch.cat(expected, 0))
    if not options.get("reset_at_each_iter"):
        ids = torch.cat(got, 1)["collector", "traj_ids"][0]
        ends = torch.cat(got, 1)["next", "done"][0, :-1, 0]
        if not options.get("set_truncated"):
            assert ids.diff().ne(0).equal(ends)


class Memory(nn.Module):
    """The action follows from the state of a GRU."""

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return nn.functional.one_hot(features.argmax(-1), 3).float()


def remembering() -> TensorDictSequential:
    torch.manual_seed(0)
    reads, writes = ["observation", "state", "is_init"], ["features", ("next", "state")]
    gru = GRUModule(input_size=2, hidden_size=3, in_keys=reads, out_keys=writes)
    return TensorDictSequential(
        gru, TensorDictModule(Memory(), in_keys=["features"], out_keys=["action"])
    )


@pytest.mark.parametrize("given", [None, True, False])
@pytest.mark.parametrize(
    "make",
    [
        lambda: GymWrapper(Plain(3)),
        lambda: TransformedEnv(GymWrapper(Plain(3)), InitTracker()),
        lambda: SerialEnv(2, [lambda: GymWrapper(Plain(3)), lambda: GymWrapper(Plain(4))]),
        lambda: GymWrapper(Plain(3), policy=remembering()),
    ],
    ids=["bare", "tracked", "serial", "complete"],
)
def test_torchrl_envs_get_the_state_that_a_recurrent_policy_reads(
    build: Any, make: Any, given: bool | None
) -> None:
    common = {"frames_per_batch": 20, "total_frames": 40}
    theirs = Collector(make(), remembering(), auto_register_policy_transforms=True, **common)
    ours = build(make, remembering(), auto_register_policy_transforms=given, **common)
    for got, expected in zip(ours, theirs, strict=True):
        require_equal(got if got.shape[0] > 1 else got[0], expected)
        assert got["is_init"].any() and got["state"][got["is_init"][..., 0]].eq(0).all()
        assert got["next", "state"].ne(0).all()
    theirs.shutdown()


def test_a_buffer_of_several_dimensions_gets_rollouts_as_they_are(build: Any) -> None:
    rows = TensorDictReplayBuffer(storage=LazyTensorStorage(100, ndim=2), batch_size=4)
    collector = build(
        lambda: SerialEnv(2, lambda: GymWrapper(Plain())), frames_per_batch=8, replay_buffer=rows
    )
    collector.next(), collector.next()
    assert rows[:].shape == (2, 8) and rows[:]["collector", "traj_ids"][1].unique().numel() >= 1
    assert rows[:]["observation"][:, 1:, 0].ne(rows[:]["observation"][:, :-1, 0]).all()


@pytest.mark.parametrize("torchrl", [False, True])
@pytest.mark.parametrize("random_frames", [14, 15])
def test_the_first_frames_are_of_random_actions(build, torchrl: bool, random_frames: int) -> None:
    common = {"frames_per_batch": 7, "total_frames": 42, "init_random_frames": random_frames}
    theirs = Collector(lambda: GymWrapper(Plain()), turning(), **common)
    make = (lambda: GymWrapper(Plain())) if torchrl else Plain
    ours = build(make, turning(), max_policy_lag=2, **common)
    for number, (got, expected) in enumerate(zip(ours, theirs, strict=True)):
        at_random = number < -(-random_frames // 7)
        require_equal(
            got[0].exclude("action", "action_value", "chosen_action_value"),
            expected.exclude("action", "action_value", "chosen_action_value"),
        )
        assert set(got.keys()) - {"policy_version"} == set(expected.keys())
        chosen = got["action"].float().argmax(-1) == got["observation"][..., 0] % 3
        assert chosen.all() != at_random
        if at_random and not torchrl:
            assert got["action_value"].eq(0).all() and got["action"].sum(-1).eq(1).all()
    theirs.shutdown()


def test_random_frames_count_those_of_an_earlier_run_and_of_the_buffer(build: Any) -> None:
    def at_random(rows: TensorDictBase) -> bool:
        return not rows["action_value"].any()

    common = {"frames_per_batch": 10, "init_random_frames": 30}
    first = build(Plain, turning(), **common)
    assert all(at_random(first.next()) for _ in range(2))
    second = build(Plain, turning(), **common)
    second.load_state_dict(first.state_dict())
    assert [at_random(second.next()) for _ in range(3)] == [True, False, False]
    rows = buffer()
    rows.extend(first.next()[0])
    third = build(Plain, turning(), replay_buffer=rows, **common)
    for _ in range(3):
        third.next()
    assert [at_random(part) for part in rows[:].split(10)] == [True, True, True, False]
    with pytest.raises(ConfigurationError, match="which keys the policy writes"):
        build(Plain, turning(), inference="learner", **common)


def test_step_counts_go_on_over_rollouts_and_envs(build: Any) -> None:
    lengths = iter([3, 8, 100])
    collector = build(
        lambda: Counter(next(lengths)), None, num_envs=3, frames_per_batch=6, max_frames_per_traj=5
    )
    rows = torch.cat([collector.next() for _ in range(10)], 1)
    for i, length in enumerate([3, 5, 5]):
        expected = [t % length for t in range(20)]
        assert rows["step_count"][i, :, 0].tolist() == expected
        assert rows["next", "step_count"][i, :, 0].tolist() == [t + 1 for t in expected]
        assert rows["next", "truncated"][i, :, 0].tolist() == [
            length == 5 and t == 4 for t in expected
        ]


def test_set_truncated_needs_somewhere_to_say_so(build: Any) -> None:
    env = CountingEnv()
    assert "truncated" not in env.done_keys
    collector = build(env, None, frames_per_batch=3, set_truncated=True)
    with pytest.raises(RemoteError, match="add_truncated_keys"):
        collector.next()


def test_hooks_run_around_each_rollout_and_can_be_replaced(build: Any) -> None:
    seen: list[Any] = []

    def before() -> None:
        seen.append("before")

    def behind(rows: TensorDictBase) -> None:
        seen.append(rows)

    hooks = {"pre_collect_hook": before, "post_collect_hook": behind}
    hooks["postproc"] = lambda rows: rows.set("more", torch.ones(rows.shape))
    collector = build(Plain, turning(), frames_per_batch=5, **hooks)
    assert not seen
    batches = [collector.next(), collector.next()]
    assert seen[::2] == ["before"] * 2
    for rows, batch in zip(seen[1::2], batches, strict=True):
        assert_close(rows, batch)
        assert "more" in rows
    assert (collector.pre_collect_hook, collector.post_collect_hook) == (before, behind)
    collector.pre_collect_hook = None
    collector.set_post_collect_hook(lambda rows: rows.fill_("more", 2.0))
    assert collector.next()["more"].eq(2).all() and len(seen) == 4

    def fail() -> None:
        raise ZeroDivisionError("a hook")

    collector.pre_collect_hook = fail
    with pytest.raises(RemoteError, match="a hook"):
        collector.next()


@pytest.mark.parametrize("cat", ["stack", 0, 1, -1, None])
def test_cat_results_joins_as_multi_sync_collector_does(build: Any, alone: Any, cat: Any) -> None:
    workers = [alone.me] * 3
    common = {"session": alone, "workers": workers, "num_envs": 2, "frames_per_batch": 24}
    common |= {"total_frames": 48}
    parts = build(Plain, turning(), **common).next().split(2)
    batch = build(Plain, turning(), cat_results=cat, **common).next()
    dim = cat or 0
    expected = torch.stack(parts) if cat == "stack" else torch.cat(parts, dim)
    assert_close(batch, expected, rtol=0, atol=0)
    assert batch.shape == {"stack": (3, 2, 4), 1: (2, 12), -1: (2, 12)}.get(cat, (6, 4))


@pytest.mark.parametrize(
    "options",
    [
        {"readiness": Preempt()},
        {"trajs_per_batch": 2},
        {"split_trajs": True},
        {"init_random_frames": 4},
    ],
    ids=str,
)
def test_options_that_would_pad_rows_of_dynamic_specs_are_refused(options: dict[str, Any]) -> None:
    threads = threading.active_count()
    with pytest.raises(ConfigurationError, match=r"(?s)differ in shape.*observation"):
        RPCBatchedCollector(Growing, None, frames_per_batch=8, **options)
    wait_for(lambda: threading.active_count() <= threads)


def test_rows_of_dynamic_specs_are_changed_and_put_together(build: Any) -> None:
    def make() -> EnvBase:
        return Growing().add_truncated_keys()

    batch = build(make, None, num_envs=2, frames_per_batch=8, set_truncated=True).next()
    assert isinstance(batch, LazyStackedTensorDict) and batch.shape == (2, 4)
    assert batch["next", "truncated"][:, -1].all() and batch["next", "done"][:, -1].all()
    whole = build(make, None, frames_per_batch=8, trajs_per_batch=3, traj_format="cat").next()
    assert whole["next", "done"].sum() == 3 and whole["next", "done"][-1].all()
    lengths = [len(row["observation"]) for row in whole.unbind(0)]
    assert lengths == [i + 1 for i in whole_steps(whole)]


def whole_steps(trajectories: TensorDictBase) -> list[int]:
    steps, done = [0], trajectories["next", "done"].flatten().tolist()
    for end in done[:-1]:
        steps.append(0 if end else steps[-1] + 1)
    return steps


def test_unsupported_arguments_are_refused_with_the_reason(build: Any) -> None:
    for name, (harmless, reason) in _REFUSED.items():
        if _ANYTHING in harmless:
            continue
        assert len(reason) > 10
        with pytest.raises(ConfigurationError, match=f"{name}=.* is not supported"):
            RPCBatchedCollector(Plain, frames_per_batch=4, **{name: "something"})
    quiet = {name: harmless[0] for name, (harmless, _) in _REFUSED.items()}
    collector = build(create_env_fn=Plain, frames_per_batch=4, **quiet)
    with pytest.raises(TypeError, match="frames_per_bath"):
        RPCBatchedCollector(Plain, frames_per_bath=4)
    with pytest.raises(ConfigurationError, match="update_policy_weights_"):
        collector.weight_updater = object()
    assert collector.weight_updater is None
    for method, instead in {
        "receive_weights": "call update_policy_weights_",
        "register_scheme_receiver": "call update_policy_weights_",
        "init_updater": "call update_policy_weights_",
        "enable_profile": "start and stop a profiler there",
        "fake_tensordict": r"call next\(\) for a batch",
    }.items():
        with pytest.raises(ConfigurationError, match=instead):
            getattr(collector, method)()
    assert collector.next().numel() == 4


def cartpole() -> gymnasium.Env:
    return gymnasium.make("CartPole-v1")


@pytest.mark.parametrize(
    "env",
    [
        cartpole(),
        gymnasium.make_vec("CartPole-v1", 1),
        GymEnv("CartPole-v1"),
        EnvCreator(lambda: GymEnv("CartPole-v1")),
        lambda: ParallelEnv(2, partial(GymEnv, "CartPole-v1"), mp_start_method="fork"),
    ],
    ids=["gym", "vec", "torchrl", "creator", "parallel"],
)
def test_envs_may_be_given_and_made_in_all_forms(build: Any, env: Any) -> None:
    collector = build(env, None, frames_per_batch=20, total_frames=40, seed=3)
    batches = list(collector)
    assert sum(batch.numel() for batch in batches) == 40
    assert batches[0]["observation"].shape[-1] == 4
    collector.shutdown()
    assert getattr(env, "is_closed", True)


def test_an_env_of_the_callers_may_stay_open(build: Any) -> None:
    class Fails(Plain):
        closed = False

        def close(self) -> None:
            self.closed = True
            raise ZeroDivisionError("cannot close")

    kept, env = Fails(), Fails()
    collector = build(kept, None, frames_per_batch=4)
    collector.next()
    collector.shutdown(close_env=False)
    assert not kept.closed
    collector = build(env, None, frames_per_batch=4)
    with pytest.raises(RemoteError, match="cannot close"):
        collector.shutdown()
    assert env.closed
    build(Fails, None, frames_per_batch=4).shutdown(raise_on_error=False)


def test_envs_policies_and_weights_may_differ_from_worker_to_worker(build, alone) -> None:
    common = {"session": alone, "workers": [alone.me] * 2, "frames_per_batch": 20}
    collector = build(
        [lambda: Plain(3), lambda: Plain(7)],
        policy_factory=[lambda: turning(0), lambda: turning(1)],
        **common,
    )

    def turns(batch: TensorDictBase) -> list[float]:
        turned = batch["action"].argmax(-1) - batch["observation"][..., 0]
        return (turned % 3).float().mean(1).tolist()

    batch = collector.next()
    assert batch["observation"][:, 0, 1].tolist() == [3, 7] and turns(batch) == [0, 1]
    collector.update_policy_weights_({1: turning(2)})
    batch = collector.next()
    assert turns(batch) == [0, 2] and batch["policy_version"][:, 0].tolist() == [0, 1]
    collector.update_policy_weights_({0: turning(1), 1: turning(0)})
    assert turns(collector.next()) == [1, 0]
    collector.update_policy_weights_(turning(2), worker_ids=[0])
    assert turns(collector.next()) == [2, 0]
    collector.update_policy_weights_(turning(1))
    assert turns(collector.next()) == [1, 1]
    kwargs = [{"length": 2}, {"length": 4}]
    collector = build(Plain, turning(), create_env_kwargs=kwargs, **common)
    assert collector.next()["observation"][:, 0, 1].tolist() == [2, 4]


def test_a_policy_factory_is_called_as_it_wants_to_be(build: Any) -> None:
    seen: list[tuple] = []

    def ours(worker_index: int = 7, num_workers: int = 7) -> Any:
        seen.append((worker_index, num_workers))
        return turning()

    def theirs(turn: int = 2, other: int = 0) -> Any:  # would take two, and means something else
        seen.append((turn, other))
        return turning(turn)

    for factory in (ours, lambda i, n: ours(i, n), theirs, partial(theirs, 2), partial(turning, 2)):
        build(Plain, policy_factory=factory, frames_per_batch=4).next()
    assert seen == [(0, 1), (0, 1), (2, 0), (2, 0)]
    collector = build(lambda: GymWrapper(Plain()), policy_factory=RandomPolicy, frames_per_batch=4)
    assert collector.next()["action"].sum(-1).eq(1).all()


def test_a_torchrl_env_stays_seeded_as_it_was_made(build: Any) -> None:
    def make() -> Any:
        env = GymEnv("CartPole-v1")
        env.set_seed(3)
        return env

    def observed(**kwargs: Any) -> torch.Tensor:
        rows = build(make, None, frames_per_batch=1, **kwargs).next()
        return rows["observation"][0, 0]

    theirs = Collector(make, None, frames_per_batch=1, total_frames=-1)
    assert observed().equal(theirs.next()["observation"][0])
    assert not observed(seed=4).equal(observed())
    theirs.shutdown()


def test_batches_go_to_the_storing_device(build: Any) -> None:
    assert build(Plain, frames_per_batch=4).next().device is None
    assert build(Plain, frames_per_batch=4, device="cpu").next().device == torch.device("cpu")
    batch = build(Plain, frames_per_batch=4, device="cpu", storing_device="meta").next()
    assert batch.device == batch["observation"].device == torch.device("meta")


@pytest.mark.parametrize("make", [Plain, lambda: GymWrapper(Plain()), GymWrapper(Plain())])
def test_lazy_layers_of_the_policy_get_their_shapes(build: Any, make: Any) -> None:
    net = nn.Sequential(nn.LazyLinear(8), nn.Tanh(), nn.LazyLinear(3))
    policy = TensorDictModule(net, ["observation"], ["action"])
    collector = build(make, policy, frames_per_batch=5, exploration_type=None)
    assert net[0].weight.shape == (8, 2) and net.training
    assert collector.next()["action"].shape == (1, 5, 3)
    nn.init.ones_(net[2].bias), nn.init.zeros_(net[2].weight)
    collector.update_policy_weights_()
    assert collector.next()["action"].eq(1).all()
    lone = TensorDictModule(nn.LazyLinear(3), ["elsewhere"], ["action"])
    with pytest.raises(ConfigurationError, match="call the policy once"):
        build(make, lone, frames_per_batch=5)


def test_a_policy_that_cannot_be_called_is_refused_as_by_torchrl(build: Any) -> None:
    class Unfit(nn.Module):
        def forward(self, observation: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
            return observation

    for policy in (Unfit(), lambda: None, lambda observation, other: observation):
        for make in (lambda: GymWrapper(Plain()), Plain):
            with pytest.raises(
                TypeError, match="Arguments to policy.forward are incompatible with entries in"
            ):
                build(make, policy, frames_per_batch=5)


def test_versions_are_stamped_if_wanted(build: Any) -> None:
    rows = build(Plain, frames_per_batch=4).next()
    assert "policy_version" in rows and "policy_version" not in rows["next"]
    common = {"frames_per_batch": 4, "total_frames": 12, "track_policy_version": True}
    theirs = Collector(lambda: GymWrapper(Plain()), turning(), **common)
    ours = build(Plain, turning(), **common)
    for _ in range(3):
        versions = [each.next()["next", "policy_version"].flatten() for each in (theirs, ours)]
        assert versions[0].dtype == versions[1].dtype and versions[0].equal(versions[1])
        theirs.update_policy_weights_(), ours.update_policy_weights_()
    theirs.shutdown()
    collector = build(Plain, frames_per_batch=4, track_policy_version=False)
    assert "policy_version" not in collector.next()
    assert collector.get_policy_version() == 0


def test_stats_have_what_torchrls_have(build: Any) -> None:
    common = {"frames_per_batch": 4, "total_frames": 8}
    theirs = Collector(lambda: GymWrapper(Plain()), turning(), **common)
    ours = build(Plain, turning(), **common)
    for _ in range(3):
        expected, got = theirs.stats(), ours.stats()
        assert {key: got[key] for key in expected} == expected
        assert got["workers"] == got["workers_alive"] == 1 and got["policy_version"] == 0
        theirs.next(), ours.next()
    assert ours.stats("both")["worker_0/frames"] == 8
    assert ours.stats("per_worker") == {"workers": 1, "workers_alive": 1, "worker_0/frames": 8}
    with pytest.raises(ConfigurationError, match="per_worker"):
        ours.stats("none")
    theirs.shutdown()


def test_a_threshold_lets_the_others_stop(build: Any, alone: Session) -> None:
    four = {"session": alone, "workers": [alone.me] * 4, "frames_per_batch": 40}
    assert build(Plain, preemptive_threshold=0.6, **four).readiness.fraction == 0.5
    assert build(Plain, preemptive_threshold=0.0, **four).readiness.fraction == 0.25
    assert not build(Plain, preemptive_threshold=1.0, **four).readiness.cuts


@pytest.mark.parametrize(
    "make",
    [
        Plain,
        lambda: gymnasium.vector.SyncVectorEnv([lambda: Plain(9)] * 3),
        lambda: GymWrapper(Plain(9)),
    ],
    ids=["gym", "vec", "torchrl"],
)
def test_some_envs_can_be_reset(build: Any, make: Any) -> None:
    collector = build(make, turning(), num_envs=3, frames_per_batch=12)
    before = collector.next()["collector", "traj_ids"][:, -1]
    for index, anew in [
        (1, [1]),
        ([0, 2], [0, 2]),
        (torch.tensor([True, False, True]), [0, 2]),
        (slice(1, None), [1, 2]),
        (-1, [2]),
        ([], []),
    ]:
        collector.reset()
        first = collector.next()
        collector.reset(index)
        second = collector.next()
        for i in range(3):
            begins = 0 if i in anew else 4
            assert second["observation"][i, 0, 0] == begins
            went_on = second["collector", "traj_ids"][i, 0] == first["collector", "traj_ids"][i, 3]
            assert went_on == (i not in anew)
    assert len(before.unique()) == 3
    for index in (3, -4, "all", [0, 3]):
        with pytest.raises(ConfigurationError, match="3 envs each"):
            collector.reset(index)


def test_rows_that_wait_for_the_end_of_an_episode_are_dropped_with_it(build: Any) -> None:
    collector = build(Plain, None, num_envs=2, frames_per_batch=6, trajs_per_batch=1)
    assert collector.next()["observation"][0, :, 0].tolist() == [0, 1, 2, 3, 4]
    collector.reset(0)  # drops one step, the first of its second episode
    lengths = [len(collector.next()[0]) for _ in range(6)]
    assert lengths == [5] * 6


def test_vector_envs_that_reset_themselves_say_so(build: Any) -> None:
    env = gymnasium.vector.SyncVectorEnv(
        [Plain] * 2, autoreset_mode=gymnasium.vector.AutoresetMode.SAME_STEP
    )
    collector = build(env, None, frames_per_batch=6)
    collector.next()
    with pytest.raises(RemoteError, match="resets its envs itself"):
        collector.reset(1)


class Halting(Talking):
    """Episodes of 1 to 4 steps that say something."""

    def step(self, action: Any) -> Any:
        *given, _, info = super().step(action)
        return *given, bool(self.np_random.integers(3) == 0), info


@pytest.mark.parametrize("format_", ["padded", "cat"])
def test_batches_of_whole_trajectories_are_torchrls(build: Any, format_: str) -> None:
    common = {"frames_per_batch": 16, "total_frames": 48, "trajs_per_batch": 3}
    common["traj_format"] = format_
    env = SerialEnv(2, lambda: GymWrapper(Halting()))
    env.set_seed(3)
    policy = TensorDictModule(
        lambda x: nn.functional.one_hot((x[..., 0] > 0).long(), 3), ["number"], ["action"]
    )
    theirs = Collector(env, policy, **common)
    expected = list(theirs)
    theirs.shutdown()
    got = list(build(Halting, policy, num_envs=2, seed=3, **common))
    assert len(got) == len(expected) > 3
    for ours, wanted in zip(got, expected, strict=True):
        for key in ("word", ("next", "word")):
            assert ours.pop(key).tolist() == wanted.pop(key).tolist()
        if format_ == "padded":
            for batch in (ours, wanted):
                batch["collector", "traj_ids"][~batch["collector", "mask"]] = -1
        require_equal(ours, wanted)


# ---- with a replay buffer


def buffer(size: int = 1000) -> TensorDictReplayBuffer:
    return TensorDictReplayBuffer(storage=LazyTensorStorage(size), batch_size=4)


@pytest.mark.parametrize("torchrl", [False, True])
def test_whole_trajectories_reach_the_buffer_as_torchrl_writes_them(build, torchrl: bool) -> None:
    common = {"frames_per_batch": 7, "total_frames": 28, "trajs_per_batch": 2}
    expected, got = buffer(), buffer()
    for _ in Collector(lambda: GymWrapper(Plain()), turning(), replay_buffer=expected, **common):
        pass
    make = (lambda: GymWrapper(Plain())) if torchrl else Plain
    reports = list(build(make, turning(), replay_buffer=got, **common))
    assert sum(report.frames for report in reports) == 28
    assert len(got) == len(expected) == 25  # the last three steps belong to no whole one
    require_equal(got[:].exclude("index"), expected[:].exclude("index"))


def test_interrupted_trajectories_are_never_written(build: Any) -> None:
    rows = buffer()
    options = {"num_envs": 2, "frames_per_batch": 14, "trajs_per_batch": 1}
    collector = build(lambda: Plain(5), turning(), replay_buffer=rows, **options)
    collector.next()
    collector.reset()  # drops two steps of each env
    collector.next()
    done = rows[:]["next", "done"].flatten().nonzero().flatten().tolist()
    assert done == [4, 9, 14, 19]
    assert rows[:]["observation"][:, 0].tolist() == [float(t % 5) for t in range(20)]


@pytest.mark.parametrize("factory", [True, False])
def test_collection_in_the_background_pauses_and_ends(build: Any, factory: bool) -> None:
    rows = buffer()
    env = Plain(5)
    collector = build(
        (lambda: env) if factory else env, turning(), frames_per_batch=10, replay_buffer=rows
    )
    if not factory:
        collector.next()  # in this thread, before the env moves to another one
    assert not collector.is_running()
    collector.start()
    collector.start()
    wait_for(lambda: len(rows) >= 30)
    collector.update_policy_weights_(turning(1))
    for _ in range(2):
        with collector.pause(), collector.pause():
            stats, t = collector.stats(), env.t
            time.sleep(0.05)
            assert collector.stats() == stats and env.t == t and collector.is_running()
        wait_for(lambda now=stats["frames"]: collector.stats()["frames"] > now)
    collector.async_shutdown()
    assert not collector.is_running()
    assert collector.stats()["frames"] >= len(rows[:]) - 10  # a rollout under way is dropped
    assert rows[:]["policy_version"].unique().tolist() == [0, 1]
    with pytest.raises(ConfigurationError, match="shut down"):
        collector.start()


def test_an_env_that_was_given_moves_between_rollouts_only(build: Any) -> None:
    class Slow(Plain):
        def step(self, action: Any) -> Any:
            time.sleep(0.05)
            return super().step(action)

    options = {"frames_per_batch": 20, "replay_buffer": buffer(), "timeout_s": 0.1}
    collector = build(Slow(), turning(), **options)
    with pytest.raises(DeadlineError):
        collector.next()
    with pytest.raises(ConfigurationError, match="during a rollout; call next"):
        collector.start()


@pytest.mark.parametrize("torchrl", [False, True])
def test_trajectory_ids_may_be_left_out(build: Any, torchrl: bool) -> None:
    common = {"frames_per_batch": 7, "total_frames": 21, "track_traj_ids": False}
    expected = list(Collector(lambda: GymWrapper(Plain()), turning(), **common))
    make = (lambda: GymWrapper(Plain())) if torchrl else Plain
    got = list(build(make, turning(), track_policy_version=False, **common))
    assert [set(batch["collector"].keys()) for batch in got] == [{"worker_index"}] * 3
    assert_close(torch.cat(got, 1)[0].exclude("collector"), torch.cat(expected, 0))


def test_trajectories_need_their_ids(build: Any) -> None:
    for options in ({"trajs_per_batch": 2}, {"split_trajs": True}, {"readiness": Preempt(0.5)}):
        with pytest.raises(ConfigurationError, match="track_traj_ids=False cannot be combined"):
            build(Plain, turning(), frames_per_batch=7, track_traj_ids=False, **options)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_error_that_ends_background_collection_is_raised(build: Any) -> None:
    class Broken(Plain):
        def step(self, action: Any) -> Any:
            raise ZeroDivisionError("the pole is gone")

    for ask in (lambda c: c.start(), lambda c: c.pause().__enter__(), lambda c: c.async_shutdown()):
        collector = build(Broken, frames_per_batch=10, replay_buffer=buffer())
        collector.start()
        wait_for(lambda c=collector: not c.is_running())
        with pytest.raises((RemoteError, ConfigurationError), match="pole is gone|shut down"):
            ask(collector)
    with pytest.raises(ConfigurationError, match="pass replay_buffer="):
        build(Plain, frames_per_batch=10).start()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_pause_has_a_deadline(build: Any) -> None:
    gate, stuck = threading.Event(), threading.Event()
    Stuck = before_steps(lambda: stuck.set() or gate.wait(30), Plain)
    collector = build(Stuck, frames_per_batch=10, replay_buffer=buffer(), timeout_s=0.3)
    collector.timeout_s = 0.05
    collector.start()
    assert stuck.wait(5)
    with pytest.raises(DeadlineError), collector.pause():
        pass
    gate.set()
