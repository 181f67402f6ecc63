"""Rarer policies, action spaces and arguments: TorchRL's result, or an error that helps."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict import TensorDict, TensorDictBase
from torch import nn
from torchrl.envs import GymEnv, GymWrapper, StepCounter, TransformedEnv
from torchrl.envs.utils import ExplorationType

from tests.collect.envs import Counter
from torchrl_dist.collect import FirstReady, Preempt, RPCBatchedCollector
from torchrl_dist.collect.loop.policies import cpu_copy
from torchrl_dist.collect.worker.worker import RolloutWorker, WorkerConfig
from torchrl_dist.errors import ConfigurationError, RemoteError
from torchrl_dist.replay import replay_buffer
from torchrl_dist.runtime import current_session, local_cluster, session

# ---- actions at random


class Strict(gymnasium.Env):
    """Takes only actions of its space."""

    observation_space = spaces.Box(-1, 1, (2,), np.float32)

    def __init__(self, action_space: spaces.Space) -> None:
        self.action_space = action_space
        self.seen: list[Any] = []

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> Any:
        assert self.action_space.contains(action), (action, self.action_space)
        self.seen.append(np.array(action).tolist())
        return np.zeros(2, np.float32), 0.0, False, False, {}


def test_an_unknown_action_space_is_refused_with_advice() -> None:
    space = spaces.Sequence(spaces.Discrete(2))
    with pytest.raises(ConfigurationError, match="MultiBinary or Box"):
        RolloutWorker(WorkerConfig(lambda: Strict(space), frames_per_rollout=4))


# ---- policies


class Returns(nn.Module):
    """Chooses by the observation, and returns another TensorDict than it was given."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form

    def forward(self, td: TensorDictBase) -> Any:
        chosen = (td["observation"].sum(-1) < 0).long()
        action = nn.functional.one_hot(chosen, 2)
        if self.form == "itself":
            return td.set("action", action)
        if self.form == "nothing":
            td["action"] = action
            return None
        if self.form == "a copy":
            return td.clone().set("action", action)
        if self.form == "only its own":
            return TensorDict({"action": action}, td.batch_size)
        return {"action": action}


FORMS = ["itself", "nothing", "a copy", "only its own"]


def cartpole() -> gymnasium.Env:
    return gymnasium.make("CartPole-v1")


def torchrls() -> GymEnv:
    return GymEnv("CartPole-v1")


@pytest.mark.parametrize(
    ("make", "form"),
    [(make, form) for make in (cartpole, torchrls) for form in FORMS]
    + [(cartpole, "a dictionary")],
)
def test_a_policy_may_return_what_it_made_in_any_form(make: Callable[[], Any], form: str) -> None:
    def rows(form: str) -> TensorDict:
        worker = RolloutWorker(
            WorkerConfig(
                make or (lambda: GymEnv("CartPole-v1")),
                Returns(form),
                frames_per_rollout=50,
                seed=3,
            )
        )
        found, _ = worker.collect()
        worker.close()
        return found

    given, expected = rows(form), rows("itself")
    for key in ("observation", "action", ("next", "observation"), ("next", "done")):
        assert torch.equal(given[key], expected[key]), key
    assert given["action"].sum() == 50 and given["next", "done"].any()


def test_a_row_of_another_number_of_envs_is_refused() -> None:
    class Wrong(nn.Module):
        def forward(self, td: TensorDictBase) -> TensorDictBase:
            action = nn.functional.one_hot(torch.zeros(2, dtype=torch.long), 3)
            return TensorDict({"action": action, "hidden": torch.zeros(3)}, [])

    worker = RolloutWorker(WorkerConfig(Counter, Wrong(), frames_per_rollout=6, num_envs=2))
    with pytest.raises(ConfigurationError, match="'hidden' with shape .3,.; expected"):
        worker.collect()
    worker.close()


@pytest.mark.parametrize("key", ["policy_version", ("collector", "mine")])
@pytest.mark.parametrize("make", [Counter, lambda: GymWrapper(Counter())])
def test_a_policy_that_writes_a_key_of_the_collector_is_refused(make: Any, key: Any) -> None:
    def policy(td: TensorDictBase) -> TensorDictBase:
        action = torch.zeros(*td.batch_size, 3, dtype=torch.long)
        action[..., 0] = 1
        return td.set("action", action).set(key, torch.full(td.batch_size, 7))

    worker = RolloutWorker(WorkerConfig(make, policy, frames_per_rollout=6))
    with pytest.raises(ConfigurationError, match="reserved for values that the collector writes"):
        worker.collect()
    worker.close()


# ---- arguments


def counted() -> TransformedEnv:
    return TransformedEnv(GymWrapper(Counter()), StepCounter())


def native() -> gymnasium.vector.VectorEnv:
    return gymnasium.make_vec("CartPole-v1", 2)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"frames_per_batch": 0}, "frames_per_batch=0"),
    ({"frames_per_batch": 64.0}, "frames_per_batch=64.0: expected a whole number"),
    ({"total_frames": 0}, "total_frames=0"),
    ({"max_policy_lag": -1}, "max_policy_lag=-1"),
    ({"min_workers": 2}, "min_workers=2"),
    ({"timeout_s": 0}, "timeout_s=0"),
    ({"timeout_s": float("nan")}, "expected a positive, finite number of seconds"),
    ({"worker_timeout_s": -1.0}, "worker_timeout_s=-1.0"),
    ({"step_timeout_s": 0.0}, "step_timeout_s=0.0: .*expected a positive, finite number"),
    ({"env_groups": 0}, "env_groups=0"),
    ({"env_processes": -1}, "env_processes=-1"),
    ({"seed": -1}, "seed=-1: expected an int of at least 0"),
    ({"seed": 2.0}, "seed=2.0: expected an int of at least 0"),
    ({"readiness": FirstReady}, "expected an instance"),
    ({"readiness": Preempt(), "replay_buffer": object()}, "Preempt"),
    ({"readiness": Preempt(), "postproc": lambda rows: rows}, "Preempt"),
    ({"replace_lost": True}, "under local_cluster"),
    ({"workers": []}, "without session="),
    ({"inference": "cloud"}, "expected 'worker' or 'learner'"),
    ({"cat_results": "list"}, "expected 'stack'"),
    ({"cat_results": 2}, "expected 'stack'"),
    ({"cat_results": "stack", "total_frames": 10}, "not a multiple"),
    ({"cat_results": 1, "trajs_per_batch": 2}, "batches of rollouts"),
    ({"traj_format": "flat", "trajs_per_batch": 2}, "'padded' or 'cat'"),
    ({"traj_format": "cat"}, "pass trajs_per_batch="),
    ({"trajs_per_batch": 0}, "trajs"),
    ({"trajs_per_batch": 2, "split_trajs": True}, "trajs"),
    ({"trajs_per_batch": 2, "readiness": Preempt()}, "trajs"),
    ({"split_trajs": True, "postproc": lambda rows: rows}, "trajs"),
    ({"preemptive_threshold": 1.5}, "from 0 to 1"),
    ({"preemptive_threshold": 0.5, "readiness": Preempt()}, "not both"),
    ({"device": "cuda"}, "run on the CPU"),
    ({"policy_device": "cuda:0"}, "run on the CPU"),
    ({"storing_device": "nowhere"}, "expected a torch device"),
    ({"storing_device": "cuda", "replay_buffer": object()}, "host memory"),
    ({"init_random_frames": 0.5}, "whole number"),
    ({"max_frames_per_traj": -3}, "at least 0"),
    ({"track_policy_version": object()}, "expected True or False"),
    ({"policy_factory": [object, object]}, "one callable for each of 1"),
    ({"make_env": [Counter, Counter]}, "2 make_env"),
    ({"make_env": None}, "expected a gymnasium id"),
    ({"make_env": 3}, "gymnasium id or a function"),
    ({"make_env": Counter(), "num_envs": 2}, "a function that makes the env"),
    ({"make_env": Counter(), "create_env_kwargs": {"length": 3}}, "made already"),
    ({"create_env_kwargs": [{}, {}]}, "2 create_env_kwargs"),
    ({"make_env": counted, "max_frames_per_traj": 5}, "counts its steps already"),
    ({"make_env": native, "max_frames_per_traj": 5}, "resets its envs itself"),
]


@pytest.mark.parametrize(("wrong", "words"), REFUSED)
def test_arguments_that_cannot_work_are_refused(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        RPCBatchedCollector(**{"make_env": Counter, "frames_per_batch": 4} | wrong)


def test_workers_that_are_lost_with_a_policy_at_the_learner_are_not_replaced() -> None:
    with session() as me, pytest.raises(ConfigurationError, match="replace_lost=True cannot be"):
        RPCBatchedCollector(
            Counter, session=me, frames_per_batch=4, inference="learner", replace_lost=True
        )


def test_a_policy_that_cannot_be_copied_or_pickled_says_what_to_write() -> None:
    policy = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(1, 3)))
    cpu_copy(policy, travels=False)
    with pytest.raises(ConfigurationError, match=r"policy's '0' is parametrized .*policy_factory="):
        cpu_copy(policy, travels=True)
    former = nn.utils.spectral_norm(nn.Linear(1, 3))
    former(torch.zeros(1, 1))  # its weight is not a leaf tensor from now on
    with pytest.raises(ConfigurationError, match=r"cannot be copied .* policy_factory="):
        cpu_copy(former, travels=False)


def test_weights_for_what_has_none_and_two_postprocs() -> None:
    class Plain:
        def __call__(self, td: TensorDictBase) -> TensorDictBase:
            return td.set(
                "action", nn.functional.one_hot(torch.zeros(len(td), dtype=torch.long), 3)
            )

    with RPCBatchedCollector(Counter, Plain(), frames_per_batch=4) as collector:
        collector.next()
        with pytest.raises(ConfigurationError, match="Plain, which has no weights"):
            collector.update_policy_weights_(TensorDict({"w": torch.zeros(1)}))
        collector.next()
        assert "frames_per_batch=4" in repr(collector)
    both = {"postproc": lambda td: td, "postproc_factory": lambda: lambda td: td}
    with pytest.raises(ConfigurationError, match="postproc or postproc_factory"):
        RolloutWorker(WorkerConfig(Counter, None, frames_per_rollout=4, **both))


def test_an_environments_name_takes_arguments() -> None:
    with RPCBatchedCollector(
        "CartPole-v1", None, frames_per_batch=12, create_env_kwargs={"max_episode_steps": 3},
        exploration_type=ExplorationType.RANDOM,
    ) as collector:  # fmt: skip
        rows = collector.next()
    assert rows["next", "truncated"].sum() == 4


def test_an_env_that_is_made_once_for_several_places_is_refused() -> None:
    env, other = Counter(), GymEnv("CartPole-v1")
    sync = gymnasium.vector.SyncVectorEnv
    makes = [
        (lambda: env, {"num_envs": 2}),
        (lambda: gymnasium.wrappers.TimeLimit(env, 5), {"num_envs": 2}),
        (lambda: env, {"num_envs": 2, "max_frames_per_traj": 5}),
        (lambda: other, {"num_envs": 2}),
        (lambda: sync([lambda: env] * 2), {}),
    ]
    for make, options in makes:
        with pytest.raises(ConfigurationError, match="twice.*a new env in each call"):
            RPCBatchedCollector(make, None, frames_per_batch=4, **options)


# ---- the old API of environments, and wrong sessions


class Old(gymnasium.Env):
    """Has the API of gym before 0.26. ``old`` names what is old; the rest is new."""

    observation_space = spaces.Box(-1, 1, (2,), np.float32)  # as long as (observation, info)
    action_space = spaces.Discrete(2)

    def __init__(self, old: str) -> None:
        self.old = old
        self.steps = 0
        if old == "seed":
            self.reset = lambda: (np.zeros(2, np.float32), {})

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        observation = np.zeros(2, np.float32)
        begins_again = self.old == "second reset" and self.steps
        return observation if self.old == "reset" or begins_again else (observation, {})

    def step(self, action: Any) -> Any:
        self.steps += 1
        done = self.steps % 4 == 0
        answer: tuple[Any, ...] = np.zeros(2, np.float32), 0.0, done, False, {}
        return (*answer[:3], {}) if self.old == "step" else answer


class OldVector(gymnasium.vector.VectorEnv):
    num_envs = 2
    single_observation_space = Old.observation_space
    single_action_space = Old.action_space

    def __init__(self, old: str) -> None:
        self.old = old

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        rows = np.zeros((2, 2), np.float32)  # as long as (observation, info)
        return rows if self.old == "reset" else (rows, {})

    def step(self, actions: Any) -> Any:
        return np.zeros((2, 2), np.float32), np.zeros(2), np.zeros(2, bool), {}


@pytest.mark.parametrize("num_envs", [1, 2])
@pytest.mark.parametrize(
    ("make", "old", "words"),
    [
        (Old, "reset", r"reset\(\) returned one value \(ndarray\); expected the tuple"),
        (Old, "second reset", r"reset\(\) returned one value \(ndarray\); expected the tuple"),
        (Old, "seed", r"reset\(\) does not accept seed=; expected reset\(seed=None,"),
        (Old, "step", r"step\(\) returned a tuple of 4 values; expected the tuple \(observation, "),
        (OldVector, "reset", r"reset\(\) returned one value \(ndarray\); expected the tuple"),
        (
            OldVector,
            "step",
            r"step\(\) returned a tuple of 4 values; expected the tuple \(observation, ",
        ),
    ],
)
def test_an_env_of_the_old_api_is_refused(make: Any, old: str, words: str, num_envs: int) -> None:
    with (
        pytest.raises((ConfigurationError, RemoteError), match=f"{words}.*/migration_guide"),
        RPCBatchedCollector(
            lambda: make(old), None, num_envs=num_envs, frames_per_batch=16,
            categorical_action_encoding=True,
        ) as collector,
    ):  # fmt: skip
        collector.next()


def test_the_function_session_is_refused_as_a_session() -> None:
    for given, got in ((session, "the function session"), (session(), "a _GeneratorContext")):
        for build in (
            lambda given=given: RPCBatchedCollector(
                "CartPole-v1", None, session=given, frames_per_batch=8
            ),
            lambda given=given: replay_buffer(given, capacity=8, batch_size=2),
        ):
            with pytest.raises(ConfigurationError, match=f"got {got}.* pass session=me"):
                build()


def _builds_a_collector(**options: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        RPCBatchedCollector(
            "CartPole-v1", None, session=current_session(), frames_per_batch=8,
            categorical_action_encoding=True, **options,
        ).shutdown()  # fmt: skip
    return [str(each.message) for each in said]


@pytest.mark.timeout(120)
def test_a_program_that_builds_its_collector_in_every_process_is_told(fork_server) -> None:
    with local_cluster({"learner": 2, "collector": 1}, fork_server=fork_server) as me:
        (worker,) = me.of_role("collector")
        with pytest.raises(RemoteError, match=r"collector0 builds .* that learner0 builds"):
            me.call(worker, _builds_a_collector)
        assert me.call(worker, lambda: _builds_a_collector(workers=[current_session().me])) == []
        (said,) = me.call(me.of_role("learner")[1], _builds_a_collector)
        assert (
            "uses every process of role 'collector' (1)" in said
            and "session.of_role('collector')[1::2]" in said
        )
        assert _builds_a_collector() == []
