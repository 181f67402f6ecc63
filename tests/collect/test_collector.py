"""The collector with its worker in this process."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictSequential
from torch import nn
from torchrl.collectors import BaseCollector
from torchrl.data import LazyTensorStorage, MultiStep, OneHot, TensorDictReplayBuffer
from torchrl.envs import GymEnv, GymWrapper, SerialEnv
from torchrl.envs.utils import ExplorationType, exploration_type
from torchrl.modules import EGreedyModule, QValueActor

from tests.collect.envs import Counter, Paced, before_steps, q, trajectories_of, wait_for
from torchrl_dist.collect import CollectReport, FirstReady, RPCBatchedCollector, WaitAll
from torchrl_dist.collect.learner import start
from torchrl_dist.collect.learner.start import (
    MESSAGE_BYTES,
    MESSAGE_S,
    seconds_per_message,
    steps_per_message,
)
from torchrl_dist.collect.loop import exploration
from torchrl_dist.collect.worker.worker import RolloutWorker, WorkerConfig, WorkerInfo
from torchrl_dist.errors import ConfigurationError, DeadlineError, RemoteError
from torchrl_dist.weights import pack

SPEC = OneHot(3)


class Constant(nn.Module):
    """The action is always the same: a weight."""

    def __init__(self, action: int) -> None:
        super().__init__()
        self.preference = nn.Parameter(nn.functional.one_hot(torch.tensor(action), 3).float())

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return self.preference.expand(*observation.shape[:-1], 3)


def constant(action: int) -> QValueActor:
    return QValueActor(Constant(action), in_keys=["observation"], spec=SPEC)


@pytest.fixture
def aside(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker has a separate thread, as with a replay buffer or with several workers."""
    monkeypatch.setattr(start, "make_local_handle", partial(_aside, start.make_local_handle))


def _aside(make: Any, config: WorkerConfig, name: str, alone: bool) -> Any:
    return make(config, name, alone=False)


@pytest.mark.parametrize("readiness", [WaitAll(), FirstReady()])
@pytest.mark.parametrize("lag", [0, 2])
@pytest.mark.parametrize("total", [1, 12, 53])
def test_total_frames_are_exact_and_trajectories_are_whole(build, readiness, lag, total) -> None:
    options = {"frames_per_batch": 12, "total_frames": total, "num_envs": 4}
    collector = build(lambda: Counter(5), readiness=readiness, max_policy_lag=lag, **options)
    batches = list(collector)
    assert sum(batch.numel() for batch in batches) == total == collector.report.total_frames
    assert all(batch.shape == (4, 3) for batch in batches[: total // 12])
    for one in trajectories_of(batches):
        first, last = one["observation"][0, 0], one["next", "observation"][-1, 0]
        assert last - first == len(one) <= 5
        assert not one["next", "done"][:-1].any()


def test_it_is_a_torchrl_collector(build: Any) -> None:
    collector = build(Counter, None, frames_per_batch=5, total_frames=20)
    assert isinstance(collector, BaseCollector)
    assert len(collector) == 4
    assert [collector.next().numel() for _ in range(4)] == [5, 5, 5, 5]
    assert collector.next() is None
    assert collector.stats()["frames"] == 20
    assert collector.stats()["completed"]


def test_without_lag_every_row_comes_from_the_newest_weights(build: Any) -> None:
    policy = constant(0)
    collector = build(Counter, policy, frames_per_batch=6, total_frames=24, num_envs=2)
    for number, batch in enumerate(collector):
        assert (batch["policy_version"] == number).all()
        assert batch["action"].argmax(-1).eq(number % 3).all()
        assert collector.report.policy_lag == 0
        policy.load_state_dict(constant((number + 1) % 3).state_dict())
        collector.update_policy_weights_()
        time.sleep(0.02)  # a rollout begun too early would have the old weights
    assert collector.policy_version == 4


def test_weights_that_are_older_than_those_in_use_are_ignored() -> None:
    worker = RolloutWorker(WorkerConfig(Counter, constant(0), frames_per_rollout=5))
    for action, version in ((2, 3), (1, 2)):
        rows, _ = worker.collect(weights=pack(constant(action), version))
    assert rows["action"].argmax(-1).eq(2).all() and rows["policy_version"].eq(3).all()


def test_whole_episodes_follow_a_rollout_of_some_envs() -> None:
    worker = RolloutWorker(WorkerConfig(lambda: Counter(5), frames_per_rollout=10, num_envs=2))
    some, stats = worker.collect(steps=5, num_envs=1)
    assert some.shape == (1, 5) and stats.episode_returns == [15.0]  # not that of the other env
    some, _ = worker.collect(steps=3, num_envs=1)
    rows, stats = worker.collect(steps=5)
    assert stats.episode_returns == [15.0] * 2 and stats.episode_lengths == [5] * 2
    ids = [set(part["collector", "traj_ids"].flatten().tolist()) for part in (some, rows)]
    assert not ids[0] & ids[1]


def test_lazy_layers_of_a_factory_take_the_learners_weights() -> None:
    def make() -> QValueActor:
        layers = nn.Sequential(nn.LazyLinear(8), nn.Tanh(), nn.Dropout(0.5), nn.LazyLinear(3))
        return QValueActor(layers, in_keys=["observation"], spec=OneHot(3))

    mine = make().eval()
    mine(TensorDict({"observation": torch.zeros(1, 2)}, [1]))
    for initial in (mine, None):
        with RPCBatchedCollector(Counter, initial, policy_factory=make, frames_per_batch=8) as it:
            if initial is None:
                it.update_policy_weights_(mine)
            inside = it._crew.workers[0].handle._worker.policy
            it.next()
        assert inside.training
        state = inside.state_dict()
        assert all(torch.equal(state[name], x) for name, x in mine.state_dict().items())


def test_weights_may_be_given_in_all_forms_that_torchrl_knows(build: Any) -> None:
    collector = build(Counter, constant(0), frames_per_batch=4, total_frames=-1)
    version = 0
    for action, give in enumerate(
        [
            lambda m: {"policy_or_weights": m},
            lambda m: {"policy": m},
            lambda m: {"weights": TensorDict.from_module(m).data},
            lambda m: {"weights": TensorDict.from_module(m).data.to_dict()},
            lambda m: {"weights": m.state_dict(), "model_id": "policy"},
            lambda m: {"weights_dict": {"policy": m}},
            lambda m: {"policy_or_weights": {"policy": TensorDict.from_module(m).data}},
            lambda m: {"policy_or_weights": {0: TensorDict.from_module(m).data}},
            lambda m: {"policy_or_weights": m, "worker_ids": 0},
            lambda m: {"policy_or_weights": m, "worker_ids": [0]},
        ]
    ):
        module = constant((action + 1) % 3)
        collector.update_policy_weights_(**give(module))
        version += 1
        batch = collector.next()
        assert batch["action"].argmax(-1).eq((action + 1) % 3).all(), action
        assert batch["policy_version"].eq(version).all()
        assert collector.get_policy_version() == collector.policy_version == version


def test_weights_of_parts_between_two_rollouts_all_arrive(build: Any) -> None:
    """Each update counts as a version, so none may be lost."""
    policy, other, third = (q(2, 3, seed) for seed in range(3))
    collector = build(Counter, policy, frames_per_batch=4, total_frames=-1)

    def batch_of(version: int, wanted: nn.Module) -> None:
        batch = collector.next()
        assert batch["policy_version"].eq(version).all()
        values = wanted(batch.select("observation"))["action_value"]
        torch.testing.assert_close(batch["action_value"], values)

    batch_of(0, policy)
    whole = list(other.state_dict().items())
    assert len(whole) > 1
    for half in (whole[::2], whole[1::2]):
        collector.update_policy_weights_(dict(half))
    batch_of(2, other)
    last = third.state_dict()
    collector.update_policy_weights_(third)
    collector.update_policy_weights_({name: last[name] for name, _ in whole[::2]})
    batch_of(4, third)


def test_a_state_of_something_else_changes_nothing(build: Any) -> None:
    collector = build(Counter, None, frames_per_batch=4, total_frames=8)
    for state in ({"frames": 4}, {"frames": 4, "batches": "x", "policy_version": 0, "run": 0}):
        with pytest.raises(ConfigurationError, match="state_dict"):
            collector.load_state_dict(state)
    assert sum(batch.numel() for batch in collector) == 8


def test_the_last_rollout_of_some_envs_completes_the_trajectories_before_it(build: Any) -> None:
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(100), batch_size=4)
    options = {"num_envs": 2, "frames_per_batch": 4, "total_frames": 9, "trajs_per_batch": 1}
    collector = build(lambda: Counter(5), replay_buffer=buffer, **options)
    for _ in collector:
        pass
    rows = buffer[:]
    assert (rows["next", "observation"][:, 0] % 100).tolist() == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert len(rows["collector", "traj_ids"].unique()) == 1


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"policy_or_weights": {}}, "no weights"),
        ({"weights": TensorDict()}, "no weights"),
        ({"weights_dict": {}}, "no weights"),
        ({"policy_or_weights": {"policy": {}}}, "no weights"),
        ({"policy_or_weights": {"policy": None}}, "no weights to send"),
        ({"policy_or_weights": {0: constant(1), 1: constant(1)}}, r"workers \[1\]"),
        ({"policy_or_weights": {0: {}}}, "no weights"),
        (
            {"policy_or_weights": {0: constant(1)}, "worker_ids": 0},
            "by worker index; pass either a dict",
        ),
        ({"policy": constant(1), "worker_ids": [3]}, r"workers \[3\]"),
        ({"policy": constant(1), "model_id": "critic"}, "no other model"),
        ({"weights_dict": {"policy": constant(1), "critic": constant(1)}}, "no other model"),
        ({"weights": {"a": 1.0}}, "expected a tensor"),
        ({"weights": {"a": torch.zeros(3)}}, "fit neither"),
        ({"policy": nn.Linear(3, 3)}, "fit neither"),
        ({"weights": constant(1), "policy": constant(1)}, "at most one of"),
        ({"policy": constant(1), "timeout": 3}, "does not support"),
    ],
)
def test_weights_that_fit_no_worker_change_nothing(build: Any, given: dict, message: str) -> None:
    collector = build(Counter, constant(0), frames_per_batch=4, total_frames=-1)
    with pytest.raises(ConfigurationError, match=message):
        collector.update_policy_weights_(**given)
    batch = collector.next()
    assert batch["action"].argmax(-1).eq(0).all() and batch["policy_version"].eq(0).all()
    assert collector.policy_version == 0


def test_the_learner_may_change_its_module_without_changing_the_workers(build: Any) -> None:
    policy = constant(0)
    collector = build(Counter, policy, frames_per_batch=4, total_frames=8)
    policy.load_state_dict(constant(1).state_dict())
    assert collector.next()["action"].argmax(-1).eq(0).all()


def test_in_the_callers_process_no_rollout_runs_while_the_caller_works(build: Any) -> None:
    env = Counter(length=10**6)
    collector = build(lambda: env, None, frames_per_batch=10, max_policy_lag=3)
    for batches in range(1, 4):
        collector.next()
        time.sleep(0.05)
        assert env.t == 10 * batches
        assert exploration_type() is not ExplorationType.RANDOM  # which the rollout sets


def test_a_policy_factory_gets_the_learners_weights_and_keeps_its_own(build: Any) -> None:
    def factory(worker_index: int, num_workers: int) -> nn.Module:
        assert (worker_index, num_workers) == (0, 1)
        return TensorDictSequential(constant(0), EGreedyModule(SPEC, eps_init=0.5, eps_end=0.5))

    collector = build(
        lambda: Counter(50), constant(2), policy_factory=factory, frames_per_batch=400
    )
    actions = collector.next()["action"].argmax(-1)
    assert not actions.eq(0).all()  # the factory's own weights would prefer 0
    assert 0.55 < actions.eq(2).float().mean() < 0.78  # 1 - 0.5 * 2 / 3


@pytest.mark.parametrize(
    "take", [RPCBatchedCollector.next, lambda collector: next(iter(collector))]
)
def test_an_exception_of_the_env_arrives_with_place_and_traceback(build: Any, take: Any) -> None:
    class Broken(Counter):
        def step(self, action: Any) -> Any:
            if self.t == 3:
                raise ZeroDivisionError("the pole is gone")
            return super().step(action)

    collector = build(Broken, None, frames_per_batch=10)
    with pytest.raises(RemoteError, match="the pole is gone") as caught:
        take(collector)
    assert "in step" in caught.value.remote_traceback
    assert caught.value.host
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    with pytest.raises(ConfigurationError, match="shut down"):
        take(collector)


def test_batches_that_are_rounded_up_cause_a_warning_where_the_collector_is_built() -> None:
    with pytest.warns(UserWarning, match="not a multiple of 1 rollouts x 3 envs") as warned:
        collector = RPCBatchedCollector(Counter, None, num_envs=3, frames_per_batch=10)
    assert [each.filename for each in warned] == [__file__]
    assert collector.next().shape == (3, 4) and collector.frames_per_batch == 12
    collector.shutdown()


def test_a_collector_that_was_shut_down_keeps_nothing_of_its_callers() -> None:
    env, hook, postproc = Counter(5), lambda: None, lambda rows: rows.clone()
    collector = RPCBatchedCollector(
        env, None, frames_per_batch=10, total_frames=10, pre_collect_hook=hook, postproc=postproc
    )
    assert sum(batch.numel() for batch in collector) == 10
    collector.pre_collect_hook = None
    collector.shutdown()
    held = [weakref.ref(each) for each in (env, hook, postproc)]
    del env, hook, postproc
    gc.collect()
    assert [ref() for ref in held] == [None] * 3


@pytest.mark.parametrize("torchrl", [False, True])
@pytest.mark.parametrize("closed", [False, True])
def test_an_env_that_hangs_holds_up_no_other_collector(build, aside, closed, torchrl) -> None:
    gate, stuck = threading.Event(), threading.Event()
    Stuck = before_steps(lambda: (stuck.set(), gate.wait(30)))
    before = exploration_type()
    make = (lambda: GymWrapper(Stuck())) if torchrl else Stuck
    hanging = build(make, None, frames_per_batch=5, timeout_s=0.1)
    with pytest.raises(DeadlineError):
        hanging.next()
    assert stuck.wait(5)
    seen = set()

    def policy(td: TensorDictBase) -> TensorDictBase:
        seen.add(exploration_type())
        return td.set("action", torch.eye(3)[:1].expand(len(td), 3))

    type_ = ExplorationType.DETERMINISTIC
    if closed:
        hanging.shutdown(timeout=0.1)
    other = build(
        Counter, policy, frames_per_batch=5, exploration_type=type_, timeout_s=5, total_frames=30
    )
    batches = iter(other)
    assert next(batches).numel() == 5
    gate.set()  # what hung goes on, and changes nothing for the others
    assert sum(batch.numel() for batch in batches) == 25
    assert seen == {type_}
    other.shutdown()
    hanging.shutdown()
    wait_for(lambda: exploration_type() == before)


def test_a_policy_that_hangs_holds_up_those_of_another_exploration_type_only_for_a_while(
    build: Any, aside: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, stuck = threading.Event(), threading.Event()
    before = exploration_type()

    def hangs(td: TensorDictBase) -> TensorDictBase:
        stuck.set()
        assert gate.wait(30)
        return td.set("action", torch.eye(3)[:1].expand(len(td), 3))

    hanging = build(Counter, hangs, frames_per_batch=5, timeout_s=0.1, total_frames=5)
    with pytest.raises(DeadlineError):
        hanging.next()
    assert stuck.wait(5)
    of_the_same = build(Counter, constant(1), frames_per_batch=5, timeout_s=5)
    assert of_the_same.next().numel() == 5
    other = {"frames_per_batch": 5, "exploration_type": ExplorationType.DETERMINISTIC}
    waits = build(Counter, constant(2), timeout_s=0.2, total_frames=5, **other)
    with pytest.raises(DeadlineError, match="the policy hangs, in thread .* under random"):
        waits.next()
    assert of_the_same.next().numel() == 5  # whatever waits
    monkeypatch.setattr(exploration, "_WAIT_S", 0.1)
    with pytest.raises(RemoteError, match="has waited 0.1 s for calls under another exp"):
        build(Counter, constant(2), timeout_s=5, **other).next()
    gate.set()
    assert waits.next()["action"].argmax(-1).tolist() == [[2] * 5]
    assert hanging.next().numel() == 5
    assert exploration_type() == before


@pytest.mark.parametrize("used", ["not", "next", "iter", "start"])
def test_a_collector_that_is_deleted_closes_its_envs(used: str) -> None:
    closed = threading.Event()

    class Noted(Counter):
        def close(self) -> None:
            closed.set()

    rows = TensorDictReplayBuffer(storage=LazyTensorStorage(100)) if used == "start" else None
    collector = RPCBatchedCollector(Noted, None, frames_per_batch=5, replay_buffer=rows)
    threads = {t for t in threading.enumerate() if "rollout" in t.name}
    if used == "next":
        collector.next()
    if used == "iter":
        for _ in collector:
            break
    if used == "start":
        collector.start()
        wait_for(lambda: len(rows) > 0)
    del collector
    assert closed.wait(5)
    wait_for(lambda: {t for t in threading.enumerate() if "rollout" in t.name} <= threads)


def test_calls_to_envs_keep_the_deadline_while_a_rollout_is_stuck(build: Any, aside: None) -> None:
    gate = threading.Event()
    Stuck = before_steps(lambda: gate.wait(30))
    collector = build(Stuck, None, frames_per_batch=5, timeout_s=0.2)
    with pytest.raises(DeadlineError):
        collector.next()
    calls = [
        lambda: collector.get_attr("t"),
        lambda: collector.get_attr("t", env=0),
        lambda: collector.set_seed(1),
        collector.reset,
    ]
    for call in calls:
        with pytest.raises(DeadlineError, match=r"rollout .* within 0.2 s"):
            call()
    gate.set()
    assert collector.next().numel() == 5


def test_a_shutdown_ends_a_wait_and_every_later_call_says_so(build: Any, aside: None) -> None:
    gate, stuck = threading.Event(), threading.Event()
    Stuck = before_steps(lambda: (stuck.set(), gate.wait(30)))
    collector = build(Stuck, None, frames_per_batch=5)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(collector.next)
        assert stuck.wait(10)
        for _ in range(2):
            collector.shutdown(timeout=0.2)
        with pytest.raises(ConfigurationError, match="shut down"):
            waiting.result(5)  # although the env still hangs
    gate.set()
    for call in (lambda: collector.get_attr("t"), lambda: collector.render(), collector.reset):
        with pytest.raises(ConfigurationError, match="shut down"):
            call()


@pytest.mark.parametrize("when", ["building", "running"])
def test_envs_of_a_worker_that_cannot_go_on_are_closed(build: Any, aside: None, when: str) -> None:
    gate, closed = threading.Event(), threading.Event()

    class Doomed(Counter):
        def step(self, action: Any) -> Any:
            if when == "building":  # where the step is timed
                raise ZeroDivisionError("the pole is gone")
            gate.wait(30)
            return super().step(action)

        def close(self) -> None:
            closed.set()

    if when == "building":
        with pytest.raises(RemoteError, match="the pole is gone"):
            build(Doomed)
    else:
        collector = build(Doomed, None, frames_per_batch=5, timeout_s=0.1)
        with pytest.raises(DeadlineError):
            collector.next()
        collector.shutdown(timeout=0.1)  # too early for the step under way
        assert not closed.is_set()
        gate.set()
    assert closed.wait(5)


def test_a_closed_worker_lets_go_of_its_policy() -> None:
    policy = constant(1)
    alive = weakref.ref(policy)
    worker = RolloutWorker(WorkerConfig(Counter, policy, frames_per_rollout=5))
    worker.collect()
    worker.close()
    worker.close()
    del policy
    gc.collect()
    assert alive() is None and worker.collect()[1].frames == 0


def test_with_a_replay_buffer_the_worker_writes_and_reports_come_back(build: Any) -> None:
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(1000), batch_size=8)
    options = {"frames_per_batch": 24, "total_frames": 60, "num_envs": 2}
    collector = build(lambda: Counter(4), replay_buffer=buffer, **options)
    reports = list(collector)
    assert [report.frames for report in reports] == [24, 24, 12]
    assert all(isinstance(report, CollectReport) for report in reports)
    assert len(buffer) == 60
    assert buffer.storage[:]["next", "done"].sum() == 2 * 7
    returns = [r for report in reports for r in report.episode_returns]
    lengths = [n for report in reports for n in report.episode_lengths]
    assert returns == [1.0 + 2 + 3 + 4] * 14
    assert lengths == [4] * 14
    last = reports[-1]
    assert last.total_frames == last.total_frames_by_worker[0] == 60
    assert last.messages == 1 and last.data_bytes > 0 and last.lost_workers == ()


@pytest.mark.parametrize("through_factory", [False, True])
def test_postproc_makes_the_rows_before_they_are_written(build: Any, through_factory: bool) -> None:
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(100))
    multi_step = MultiStep(gamma=0.5, n_steps=3)
    policy = constant(1)

    def factory(worker_policy: Any) -> Any:
        def postproc(rollout: TensorDictBase) -> TensorDictBase:
            rows = multi_step(rollout)
            return rows.set("preference", worker_policy(rows.clone())["action_value"])

        return postproc

    chosen = {"postproc_factory": factory} if through_factory else {"postproc": multi_step}
    collector = build(
        lambda: Counter(4), policy, frames_per_batch=8, replay_buffer=buffer, **chosen
    )
    collector.next()
    rows = buffer.storage[:]
    expected = [1 + 1.0 + 0.75, 2 + 1.5 + 1, 3 + 2, 4]  # nothing crosses the reset
    assert rows["next", "reward"].squeeze(-1).tolist() == expected * 2
    assert ("preference" in rows.keys()) == through_factory


@pytest.mark.parametrize("stored", [True, False])
def test_a_postproc_may_keep_no_row_of_a_rollout(build: Any, stored: bool) -> None:
    def ends(rollout: TensorDictBase) -> TensorDictBase:
        return rollout[rollout["next", "done"].squeeze(-1)]

    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(100)) if stored else None
    options = {"frames_per_batch": 3, "total_frames": 15, "postproc": ends}
    collector = build(lambda: Counter(4), constant(1), replay_buffer=buffer, **options)
    found = list(collector)
    if buffer is not None:
        assert len(buffer) == 3 and [report.frames for report in found] == [3] * 5
    else:
        assert [len(batch) for batch in found] == [0, 1, 1, 1, 0]


def test_progress_is_resumed_with_new_trajectory_ids(build: Any) -> None:
    first = build(lambda: Counter(3), constant(0), frames_per_batch=10, total_frames=35)
    ids = set(first.next()["collector", "traj_ids"].flatten().tolist())
    first.update_policy_weights_()
    state = first.state_dict()
    second = build(lambda: Counter(3), constant(0), frames_per_batch=10, total_frames=35)
    second.load_state_dict(state)
    batches = list(second)
    assert sum(batch.numel() for batch in batches) == 25
    assert second.report.total_frames == 35
    assert all((batch["policy_version"] == 1).all() for batch in batches)
    new = {i for batch in batches for i in batch["collector", "traj_ids"].flatten().tolist()}
    assert not ids & new
    with pytest.raises(ConfigurationError, match="before the first batch"):
        second.load_state_dict(state)


def test_a_policy_that_is_resumed_before_its_first_update_reaches_the_workers(build: Any) -> None:
    state = build(Counter, constant(0), frames_per_batch=4).state_dict()
    policy = constant(0)
    collector = build(Counter, policy, frames_per_batch=4)
    policy.load_state_dict(constant(2).state_dict())
    collector.load_state_dict(state)
    assert collector.next()["action"].argmax(-1).eq(2).all() and collector.policy_version == 0


def test_seeds_are_those_of_torchrls_batched_envs(build: Any) -> None:
    theirs = SerialEnv(3, lambda: GymEnv("CartPole-v1"))
    collector = build(lambda: GymEnv("CartPole-v1"), frames_per_batch=60, num_envs=3)
    assert collector.set_seed(11) == theirs.set_seed(11)
    theirs.close()


def test_without_frames_per_batch_a_rollout_lasts_a_fraction_of_a_second(build: Any) -> None:
    collector = build(lambda: Paced(10**6, 0.02), total_frames=30)
    assert 3 <= collector.frames_per_batch <= MESSAGE_S / 0.02
    first = collector.next()
    assert first.numel() == collector.frames_per_batch
    assert first["observation"][0, 0, 0] % 100 == 0  # what was timed is not part of it
    assert first["collector", "traj_ids"].unique().numel() == 1


@pytest.mark.parametrize("make_env", ["CartPole-v1", lambda: GymEnv("CartPole-v1")])
def test_timing_the_steps_leaves_no_trace_in_the_data(build: Any, make_env: Any) -> None:
    policy = q(4, 2)

    def rows(**options: Any) -> tuple[int, torch.Tensor]:
        collector = build(make_env, policy, seed=5, num_envs=2, **options)
        return collector.frames_per_batch, collector.next()["observation"]

    frames, timed = rows()
    _, given = rows(frames_per_batch=frames)
    assert frames >= 2 and torch.equal(timed, given)


@settings(deadline=None)
@given(st.floats(1e-7, 100.0), st.floats(1.0, 1e10))
def test_a_message_takes_neither_microseconds_nor_all_memory(step_s: float, size: float) -> None:
    steps = steps_per_message(step_s, size)
    assert steps == 1 or (steps * step_s <= MESSAGE_S and steps * size <= MESSAGE_BYTES)
    more = steps + 2  # rounded
    assert more * step_s > MESSAGE_S or more * size > MESSAGE_BYTES


def test_messages_are_longer_where_many_processes_share_a_core() -> None:
    def workers(count: int, host: str, cores: int, processes: int = 1) -> list[WorkerInfo]:
        return [WorkerInfo(1, 1, host, pid, {}, processes, cores) for pid in range(count)]

    assert seconds_per_message(workers(1, "a", 64)) == MESSAGE_S
    assert seconds_per_message(workers(256, "a", 64)) == MESSAGE_S
    assert seconds_per_message(workers(32, "a", 2)) == 4 * MESSAGE_S
    assert seconds_per_message(workers(1, "a", 2, processes=32)) == 4 * MESSAGE_S
    # the most crowded node decides: all rollouts of a job are of one length
    assert seconds_per_message(workers(32, "a", 8) + workers(16, "b", 2)) == 2 * MESSAGE_S
