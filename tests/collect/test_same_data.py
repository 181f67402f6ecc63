"""One contract: the batches are those of TorchRL's ``Collector`` on the same seeds.

In this process, over ranks, and over the processes of a node worker.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import gymnasium
import pytest
import torch
from gymnasium import spaces
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase, is_non_tensor
from tensordict.nn import TensorDictModule, TensorDictModuleBase, TensorDictSequential
from torch import nn
from torch.distributions import Normal
from torchrl.collectors import Collector
from torchrl.data import OneHot
from torchrl.envs import (
    Compose,
    EnvBase,
    GymWrapper,
    InitTracker,
    SerialEnv,
    StepCounter,
    TransformedEnv,
)
from torchrl.envs.utils import ExplorationType
from torchrl.modules import GRUModule, LSTMModule, ProbabilisticActor, QValueActor, TanhNormal
from torchrl.testing.mocking_classes import (
    CountingEnv,
    HeterogeneousCountingEnv,
    HeterogeneousCountingEnvPolicy,
)

from tests.collect.envs import (
    Agents,
    DictEnv,
    Growing,
    Pictures,
    Seen,
    Talking,
    mlp,
    nodes,
    q,
)
from torchrl_dist.collect import RPCBatchedCollector
from torchrl_dist.collect.loop.joining import stack
from torchrl_dist.collect.worker.worker import env_seeds
from torchrl_dist.runtime import ForkServer, local_cluster

_ENVS, _SEED, _BATCHES = 4, 7, 2


def made(env_id: str, *wrappers: Callable[[Any], Any], **options: Any) -> Callable[[], Any]:
    def make() -> gymnasium.Env:
        env = gymnasium.make(env_id, **options)
        for wrapper in wrappers:
            env = wrapper(env)
        return env

    return make


def minigrid() -> gymnasium.Env:
    import minigrid

    assert minigrid
    from minigrid.wrappers import ImgObsWrapper

    return ImgObsWrapper(gymnasium.make("MiniGrid-Empty-Random-5x5-v0"))


def two_by_two(kind: type[EnvBase]) -> Callable[[], EnvBase]:
    return lambda: kind(max_steps=3, batch_size=(2, 2))


# ---- policies


def continuous(inputs: int, outputs: int) -> ProbabilisticActor:
    torch.manual_seed(0)
    net = nn.Linear(inputs, 2 * outputs, dtype=torch.float64)
    return ProbabilisticActor(
        TensorDictModule(Halves(net), ["observation"], ["loc", "scale"]),
        in_keys=["loc", "scale"],
        distribution_class=TanhNormal,
        return_log_prob=True,
    )


class Halves(nn.Module):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, observation: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        loc, scale = self.net(observation.double()).float().chunk(2, -1)
        return loc, scale.exp()


class Brightness(nn.Module):
    """Pixels -> an action that follows from all of them, one-hot [*, actions]."""

    def __init__(self, actions: int) -> None:
        super().__init__()
        self.actions = actions

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        classes = pixels.long().flatten(-3).sum(-1) % self.actions
        return nn.functional.one_hot(classes, self.actions)


def of_pixels(actions: int) -> TensorDictModule:
    return TensorDictModule(Brightness(actions), ["pixels"], ["action"])


def recurrent(kind: type = LSTMModule) -> TensorDictSequential:
    torch.manual_seed(0)
    memory = kind(input_size=4, hidden_size=8, in_key="observation", out_key="embedding")
    head = QValueActor(mlp(8, 2), in_keys=["embedding"], spec=OneHot(2))
    return TensorDictSequential(memory, head)


def with_memory(kind: type = LSTMModule) -> TransformedEnv:
    primer = recurrent(kind)[0].make_tensordict_primer()
    return TransformedEnv(GymWrapper(_CARTPOLE()), Compose(InitTracker(), primer))


class Seeding(nn.Linear):
    """What is drawn next follows from the observations alone."""

    def forward(self, observation: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        torch.manual_seed(int(observation.abs().sum() * 1e6))
        loc, scale = super().forward(observation).chunk(2, -1)
        return loc, scale.exp()


def drawing() -> ProbabilisticActor:
    torch.manual_seed(0)
    return ProbabilisticActor(
        TensorDictModule(Seeding(3, 2), ["observation"], ["loc", "scale"]),
        in_keys=["loc", "scale"],
        distribution_class=Normal,
        return_log_prob=True,
    )


def chosen(observation: torch.Tensor) -> torch.Tensor:
    return nn.functional.one_hot((observation[..., 2] > 0).long(), 2)


class Halving(TensorDictModuleBase):
    """Overwrites what it reads, and returns a clone."""

    in_keys = ["observation"]  # noqa: RUF012
    out_keys = ["observation", "action"]  # noqa: RUF012

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        out = tensordict.clone()
        out["observation"] = out["observation"] / 2
        return out.set("action", chosen(out["observation"]))


def halving(td: TensorDictBase) -> TensorDictBase:
    td["observation"] = td["observation"] / 2
    return td.set("action", chosen(td["observation"]))


def in_place(td: TensorDictBase) -> TensorDictBase:
    td["observation"].mul_(0.5)
    return td.set("action", chosen(td["observation"]))


def selecting(td: TensorDictBase) -> TensorDictBase:
    out = td.select("observation").contiguous()
    return out.set("action", chosen(out["observation"])).set("more", out["observation"] + 1)


class Counts(nn.Module):
    """Reads what it wrote in the step before."""

    def forward(self, td: TensorDictBase) -> TensorDictBase:
        before = td.get("count", torch.zeros_like(td["observation"][..., :1]))
        td.set("_private", before)
        return td.set("count", before + 1).set("action", chosen(td["observation"]))


class Named(nn.Module):
    def forward(self, observation: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return chosen(observation), observation.sum(-1, keepdim=True)


def counting(td: TensorDictBase) -> TensorDictBase:
    return td.set("action", torch.ones(*td.shape, 1, dtype=torch.int64))


class Empty(nn.ModuleList):
    """A module with ``len() == 0``, so that it is false."""

    def forward(self, td: TensorDictBase) -> TensorDictBase:
        return td.set("action", chosen(td["observation"]))


@dataclass(frozen=True)
class Case:
    """What is collected, and with which policy.

    ``theirs``: an env for TorchRL's collector, where it is not GymWrapper's around ``make``.
    ``differs``: in the first steps, as TorchRL calls the policy once before it begins.
    ``batched``: one env of ``make`` is all of them; they are not divided.
    ``singly``: TorchRL's collector cannot step several of them.
    """

    make: Callable[[], Any]
    policy: Callable[[], Any]
    theirs: Callable[[], Any] | None = None
    steps: int = 25
    needs: str = ""
    differs: int = 0
    batched: bool = False
    singly: bool = False
    exploration: ExplorationType = ExplorationType.DETERMINISTIC
    options: dict[str, Any] = field(default_factory=dict)


_CARTPOLE = made("CartPole-v1")
_LAKE = {"categorical_action_encoding": True}
CASES = {
    "classic control": Case(_CARTPOLE, lambda: q(4, 2)),
    "native vector env": Case("CartPole-v1", lambda: q(4, 2), lambda: GymWrapper(_CARTPOLE())),
    "continuous": Case(made("Pendulum-v1", max_episode_steps=9), lambda: continuous(3, 1)),
    "toy text, one-hot": Case(
        made("FrozenLake-v1"),
        lambda: TensorDictModule(lambda o: o[..., :4] + 0, ["observation"], ["action"]),
    ),
    "toy text": Case(
        made("Taxi-v4", max_episode_steps=11),
        lambda: TensorDictModule(lambda o: o % 6, ["observation"], ["action"]),
        options=_LAKE,
    ),
    "MuJoCo": Case(made("InvertedPendulum-v5"), lambda: continuous(4, 1), needs="mujoco"),
    "MiniGrid": Case(minigrid, lambda: of_pixels(7), needs="minigrid"),
    "pixels": Case(Pictures, lambda: of_pixels(5)),
    "words": Case(
        Talking,
        lambda: TensorDictModule(
            lambda x: nn.functional.one_hot((x[..., 0] > 0).long(), 3), ["number"], ["action"]
        ),
    ),
    "agents": Case(
        Agents,
        lambda: TensorDictModule(
            lambda seen: (seen.sum(-1) * 10).long() % 3,
            [("agents", "seen")],
            [("agents", "action")],
        ),
        Agents,
    ),
    "two batch dimensions": Case(two_by_two(CountingEnv), lambda: counting, batched=True),
    "agents with specs of their own": Case(
        two_by_two(HeterogeneousCountingEnv),
        lambda: HeterogeneousCountingEnvPolicy(
            two_by_two(HeterogeneousCountingEnv)().full_action_spec
        ),
        batched=True,
        steps=4,
    ),
    "dynamic specs": Case(Growing, lambda: counting, Growing, singly=True),
    "MultiDiscrete": Case(
        lambda: Seen(spaces.MultiDiscrete([3, 2])),
        lambda: TensorDictModule(lambda o: o[..., :2] + 0, ["observation"], ["action"]),
    ),
    "Tuple": Case(
        lambda: Seen(spaces.Tuple((spaces.Box(-1, 1, (2,)), spaces.Box(-1, 1, (2,))))),
        lambda: TensorDictModule(
            lambda o: nn.functional.one_hot((o[..., 0, 0] > 0).long(), 2),
            ["observation"],
            ["action"],
        ),
    ),
    "a TorchRL env with transforms": Case(
        lambda: TransformedEnv(GymWrapper(_CARTPOLE()), StepCounter(9)),
        lambda: q(4, 2),
        lambda: TransformedEnv(GymWrapper(_CARTPOLE()), StepCounter(9)),
    ),
    "recurrent": Case(_CARTPOLE, recurrent, with_memory),
    "recurrent, GRU": Case(_CARTPOLE, lambda: recurrent(GRUModule), lambda: with_memory(GRUModule)),
    "dictionaries": Case(
        DictEnv,
        lambda: TensorDictModule(
            lambda where: nn.functional.one_hot((where[..., :1] > 2).long(), 5).flatten(-2),
            [("inner", "where")],
            ["action"],
        ),
    ),
    **{
        f"drawn, {mode}": Case(
            made("Pendulum-v1"), drawing, steps=10, exploration=ExplorationType[mode]
        )
        for mode in ("RANDOM", "MODE", "MEAN")
    },
    "overwrites, a module": Case(_CARTPOLE, Halving),
    "overwrites, a function": Case(_CARTPOLE, lambda: halving),
    "overwrites in place": Case(_CARTPOLE, lambda: in_place, differs=1),
    "selects": Case(_CARTPOLE, lambda: selecting),
    "counts": Case(_CARTPOLE, Counts),
    "of tensors": Case(_CARTPOLE, Named),
    "of no length": Case(_CARTPOLE, Empty),
}


# Rows and policies of every kind that other processes send or receive in their own way.
SPLIT = ["classic control", "native vector env", "pixels", "words", "agents", "dynamic specs"]
SPLIT += ["a TorchRL env with transforms", "recurrent", "overwrites, a module", "counts"]
SPLIT += ["of no length", "dictionaries"]


@cache
def theirs(name: str) -> TensorDictBase:
    case = CASES[name]
    if case.needs:
        pytest.importorskip(case.needs)
    if case.batched:
        return _collected_by_torchrl(case, case.make(), _SEED, _ENVS).reshape(_ENVS, -1)
    make = case.theirs or (lambda: GymWrapper(case.make(), **case.options))
    if case.singly:
        seeds = env_seeds(_SEED, 0, _ENVS)
        apart = [_collected_by_torchrl(case, make(), seed, 1) for seed in seeds]
        return LazyStackedTensorDict.lazy_stack(apart, 0)
    return _collected_by_torchrl(case, SerialEnv(_ENVS, make), _SEED, _ENVS)


def _collected_by_torchrl(case: Case, env: EnvBase, seed: int, envs: int) -> TensorDictBase:
    env.set_seed(seed)
    frames = envs * case.steps
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        collector = Collector(
            env,
            case.policy(),
            frames_per_batch=frames,
            total_frames=_BATCHES * frames,
            exploration_type=case.exploration,
            trust_policy=isinstance(case.policy(), (Counts, Empty)),
        )
    batches = [batch.clone() for batch in collector]
    collector.shutdown()
    return torch.cat(batches, -1)


def assert_theirs(name: str, batches: list[TensorDict]) -> None:
    first = CASES[name].differs
    ours = stack([step for batch in batches for step in batch.unbind(1)], 1)
    ours = ours.exclude("policy_version", "collector")[:, first:]
    expected = theirs(name).exclude("collector")[:, first:]
    assert all(batch.names == [None, "time"] for batch in batches)
    assert_equal(ours, expected)


def assert_equal(ours: TensorDictBase, expected: TensorDictBase) -> None:
    assert ours.shape == expected.shape
    if isinstance(expected, LazyStackedTensorDict):  # whose parts have shapes of their own
        for parts in zip(ours.unbind(0), expected.unbind(0), strict=True):
            assert_equal(*parts)
        return
    assert set(ours.keys()) == set(expected.keys())
    for key, wanted in expected.items():
        got = ours.get(key)
        if isinstance(wanted, torch.Tensor):
            assert got.dtype == wanted.dtype and got.shape == wanted.shape, key
            # A network's last bits depend on how many rows it is given.
            atol = 1e-5 if wanted.is_floating_point() else 0
            assert torch.allclose(got, wanted, rtol=0, atol=atol), key
        elif is_non_tensor(wanted):
            assert got.tolist() == wanted.tolist(), key
        else:
            assert_equal(got, wanted)


def options(case: Case, envs: int) -> dict[str, Any]:
    return {
        "num_envs": 1 if case.batched else envs,
        "seed": None if case.batched else _SEED,
        "exploration_type": case.exploration,
        **case.options,
    }


def collected(name: str, session: Any, envs: int) -> list[TensorDict]:
    case, frames = CASES[name], _ENVS * CASES[name].steps
    with RPCBatchedCollector(
        case.make,
        case.policy(),
        session=session,
        frames_per_batch=frames,
        total_frames=_BATCHES * frames,
        **options(case, envs),
    ) as collector:
        return list(collector)


@pytest.mark.parametrize("name", CASES)
def test_in_this_process(name: str) -> None:
    assert theirs(name)["next"].numel()
    assert_theirs(name, collected(name, None, _ENVS))


@pytest.mark.parametrize("name", SPLIT)
def test_over_a_node_worker(name: str, fork_server: ForkServer) -> None:
    case = CASES[name]
    own = {"policy": case.policy(), "frames_per_rollout": _ENVS * case.steps}
    with nodes(fork_server) as build:
        worker = build(case.make, **own, **options(case, _ENVS // 2))
        assert_theirs(name, [worker.collect()[0] for _ in range(_BATCHES)])


def test_over_ranks(fork_server: ForkServer) -> None:
    wrong = {}
    with local_cluster({"learner": 1, "collector": 2}, fork_server=fork_server) as session:
        for name in SPLIT:
            try:
                assert_theirs(name, collected(name, session, _ENVS // 2))
            except Exception as error:
                wrong[name] = f"{type(error).__name__}: {error}"[:500]
    assert not wrong
