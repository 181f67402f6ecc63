"""A collector's call of a policy has the same result as a plain call, even if it is an error."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase, is_leaf_nontensor
from tensordict.nn import (
    CompositeDistribution,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictModuleBase,
    TensorDictModuleWrapper,
    TensorDictSequential,
    set_skip_existing,
)
from torch import Tensor, nn
from torch.distributions import Categorical, OneHotCategorical
from torchrl.data import Bounded, OneHot
from torchrl.envs.utils import ExplorationType, set_exploration_type
from torchrl.modules import (
    Actor,
    EGreedyModule,
    ProbabilisticActor,
    QValueActor,
    SafeModule,
    SafeProbabilisticModule,
    SafeSequential,
    TanhNormal,
)

from torchrl_dist.collect.loop.policies import act, known_classes, on_tensordicts

_ROWS = 5
Log = list[str]  # what hooks and overridden methods did

# ---- modules of tensors, [*, 4] -> [*, 2]


class Own(nn.Module):
    def __init__(self, log: Log) -> None:
        super().__init__()
        self.log = log
        self.layer = nn.Linear(4, 2)

    def forward(self, observation: Tensor) -> Tensor:
        self.log.append("own")
        return 3 * self.layer(observation)


class CallsItself(Own):
    def __call__(self, observation: Tensor) -> Tensor:
        return -super().__call__(observation)


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def with_hooks(log: Log) -> nn.Module:
    net = mlp()
    net[0].register_forward_hook(lambda *_: log.append("hook"))
    net[2].register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    net.register_forward_hook(lambda module, args, out: 2 * out)
    return net


def counts(log: Log) -> nn.Module:
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2))
    return net.train()


INNER: dict[str, Callable[[Log], Any]] = {
    "mlp": lambda log: mlp(),
    "own": Own,
    "own __call__": CallsItself,
    "hooks": with_hooks,
    "training": counts,
    "compiled": lambda log: torch.compile(mlp(), backend="eager"),
    "function": lambda log: lambda x: x[..., :2] * 2,
    "partial": lambda log: functools.partial(torch.narrow, dim=-1, start=1, length=2),
}

# ---- what is around them: observation -> action


class OverriddenForward(TensorDictModule):
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        super().forward(tensordict)
        return tensordict.set("action", -tensordict["action"])


class OverriddenCall(TensorDictModule):
    def __call__(self, tensordict: TensorDictBase) -> TensorDictBase:
        return super().__call__(tensordict).set("called", torch.ones(len(tensordict)))


class OverriddenWrite(TensorDictModule):
    def _write_to_tensordict(self, tensordict: TensorDictBase, *args: Any, **kw: Any) -> Any:
        return super()._write_to_tensordict(tensordict, *args, **kw).set("wrote", torch.ones(_ROWS))


class OfTensorDicts(nn.Module):
    def __init__(self, net: Any) -> None:
        super().__init__()
        self.net = net

    def forward(self, td: TensorDictBase) -> TensorDictBase:
        return td.clone().update({"action": self.net(td["observation"]), "mine": td["observation"]})


class Selects(TensorDictModuleBase):
    in_keys = ["observation"]  # noqa: RUF012
    out_keys = ["action"]  # noqa: RUF012

    def __init__(self, net: Any) -> None:
        super().__init__()
        self.net = net

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        tensordict["observation"] = tensordict["observation"] / 2
        tensordict.set("action", self.net(tensordict["observation"]))
        return tensordict.select("action")


class OwnQValue(QValueActor):
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        out = super().forward(tensordict)
        return out.set("action", out["action"].flip(-1))


def plain(net: Any, out: str = "action", **kwargs: Any) -> TensorDictModule:
    return TensorDictModule(net, in_keys=["observation"], out_keys=[out], **kwargs)


def hooked(net: Any, log: Log) -> Any:
    module = plain(net)
    module.register_forward_hook(
        lambda m, a, out: log.append("td hook") or out.set("h", out["action"])
    )
    return module


def pre_hooked(net: Any, log: Log) -> Any:
    module = plain(net)
    module.register_forward_pre_hook(lambda m, args: (args[0].copy().set("p", args[0]["extra"]),))
    return module


def instance(net: Any, log: Log) -> Any:
    module = plain(net)
    module.forward = lambda td: td.set("action", net(td["observation"]) + 1)
    return module


def selected(net: Any, log: Log) -> Any:
    pair = TensorDictModule(net, ["observation"], ["hidden"])
    both = TensorDictSequential(pair, TensorDictModule(torch.neg, ["hidden"], ["action"]))
    return both.select_out_keys("action")


def hook_inside(net: Any, log: Log) -> Any:
    actor = QValueActor(net, in_keys=["observation"], spec=OneHot(2))
    actor[1].register_forward_hook(lambda *_: log.append("q"))
    return actor


def q_actor(net: Any, **kwargs: Any) -> QValueActor:
    return QValueActor(net, in_keys=["observation"], spec=OneHot(2), **kwargs)


def probabilistic(net: Any, kind: Any = OneHotCategorical, **kwargs: Any) -> ProbabilisticActor:
    return ProbabilisticActor(
        plain(net, "logits"),
        in_keys=["logits"],
        distribution_class=kind,
        **{"return_log_prob": True, **kwargs},
    )


def sampling(net: Any, **kwargs: Any) -> ProbabilisticTensorDictSequential:
    sampler = ProbabilisticTensorDictModule(
        ["logits"], ["action"], distribution_class=OneHotCategorical
    )
    return ProbabilisticTensorDictSequential(plain(net, "logits"), sampler, **kwargs)


def gaussian(net: Any, **kwargs: Any) -> ProbabilisticActor:
    return ProbabilisticActor(
        TensorDictModule(lambda x: (net(x), net(x).exp()), ["observation"], ["loc", "scale"]),
        in_keys=["loc", "scale"],
        distribution_class=TanhNormal,
        **kwargs,
    )


def composite(net: Any, log: Log) -> Any:
    """Its sample is a TensorDict."""
    nested = TensorDictModule(
        lambda x: (net(x), net(-x)), ["observation"], [("params", k, "logits") for k in "ab"]
    )
    return ProbabilisticActor(
        nested,
        in_keys=["params"],
        out_keys=["a", "b"],
        distribution_class=CompositeDistribution,
        distribution_kwargs={"distribution_map": {"a": OneHotCategorical, "b": Categorical}},
        return_log_prob=True,
    )


class OwnCategorical(Categorical):
    """It draws and scores in one step."""

    def sample_and_log_prob(self, sample_shape: Any = ()) -> Any:
        action = self.sample(sample_shape)
        return action, self.log_prob(action) + 1


class ByKey(Categorical):
    """Its sample is a TensorDict, which need not have the actor's keys."""

    def sample(self, sample_shape: Any = ()) -> Any:
        action = super().sample(sample_shape)
        return TensorDict({"action": action, "as": {"float": action.float()}}, action.shape)


class OwnSampler(ProbabilisticTensorDictModule):
    def get_dist(self, tensordict: TensorDictBase) -> Any:
        return OneHotCategorical(logits=-tensordict["logits"])


def instance_dist(net: Any, log: Log) -> Any:
    actor = sampling(net)
    actor.module[1].get_dist = lambda td: OneHotCategorical(logits=-td["logits"])
    return actor


def sampler_hooked(net: Any, log: Log) -> Any:
    actor = probabilistic(net)
    actor.module[1].register_forward_hook(
        lambda m, a, out: log.append("s") or out.set("h", out["action"])
    )
    return actor


def swapped(net: Any, log: Log) -> Any:
    """A part was exchanged after the actor was built: its deterministic part has the old one."""
    actor = probabilistic(net)
    actor.module[0] = plain(nn.Linear(4, 2), "logits")
    return actor


OUTER: dict[str, Callable[[Any, Log], Any]] = {
    "TensorDictModule": lambda net, log: plain(net),
    "SafeModule": lambda net, log: SafeModule(net, ["observation"], ["action"], spec=None),
    "Actor": lambda net, log: Actor(net, spec=OneHot(2)),
    "safe": lambda net, log: SafeModule(
        net, ["observation"], ["action"], spec=Bounded(-0.1, 0.1, (2,)), safe=True
    ),
    "forward overridden": lambda net, log: OverriddenForward(net, ["observation"], ["action"]),
    "__call__ overridden": lambda net, log: OverriddenCall(net, ["observation"], ["action"]),
    "write overridden": lambda net, log: OverriddenWrite(net, ["observation"], ["action"]),
    "instance forward": instance,
    "hook": hooked,
    "pre-hook": pre_hooked,
    "not in place": lambda net, log: plain(net, inplace=False),
    "into empty": lambda net, log: plain(net, inplace="empty"),
    "keywords": lambda net, log: TensorDictModule(
        lambda *, x: net(x), in_keys={"x": "observation"}, out_keys=["action"]
    ),
    "method": lambda net, log: TensorDictModule(
        _Method(net), ["observation"], ["action"], method="other"
    ),
    "tuple": lambda net, log: TensorDictModule(
        lambda x, e: (net(x), e + 1), ["observation", "extra"], ["action", ("deep", "er")]
    ),
    "dict": lambda net, log: plain(lambda x: {"action": net(x), "more": x}),
    "tensordict": lambda net, log: TensorDictModule(
        lambda x: TensorDict({"a": net(x), "b": {"c": x}}, [len(x)]), ["observation"], ["action"]
    ),
    "numpy": lambda net, log: plain(lambda x: net(x).detach().numpy()),
    "ignored output": lambda net, log: TensorDictModule(
        lambda x: (net(x), x), ["observation"], ["action", "_"]
    ),
    "overwrites": lambda net, log: TensorDictSequential(
        TensorDictModule(lambda x: x / 2, ["observation"], ["observation"]), plain(net)
    ),
    "sequence": lambda net, log: TensorDictSequential(
        TensorDictSequential(plain(net, "hidden")),
        TensorDictModule(torch.tanh, ["hidden"], ["action"]),
    ),
    "sequence in place, parts not": lambda net, log: TensorDictSequential(
        plain(net, "hidden", inplace=False),
        TensorDictModule(torch.tanh, ["hidden"], ["action"], inplace=False),
        inplace=True,
    ),
    "sequence, other inside": lambda net, log: SafeSequential(
        OverriddenForward(net, ["observation"], ["action"]),
        TensorDictModule(lambda a: a * 2, ["action"], ["action"]),
    ),
    "sequence, clone inside": lambda net, log: TensorDictSequential(
        plain(net), OfTensorDictsModule(), TensorDictModule(torch.neg, ["made"], ["last"])
    ),
    "partial": lambda net, log: TensorDictSequential(
        plain(net), TensorDictModule(torch.neg, ["absent"], ["x"]), partial_tolerant=True
    ),
    "selected": selected,
    "QValueActor": lambda net, log: q_actor(net),
    "QValueActor, mask": lambda net, log: q_actor(net, action_mask_key="mask"),
    "QValueActor, hook inside": hook_inside,
    "QValueActor derived": lambda net, log: OwnQValue(net, in_keys=["observation"], spec=OneHot(2)),
    "epsilon": lambda net, log: TensorDictSequential(
        q_actor(net), EGreedyModule(spec=OneHot(2), eps_init=0.5)
    ),
    "ProbabilisticActor": lambda net, log: probabilistic(net),
    "ProbabilisticActor, part exchanged": swapped,
    "ProbabilisticActor, without scores": lambda net, log: gaussian(net),
    "ProbabilisticActor, Gaussian": lambda net, log: gaussian(net, return_log_prob=True),
    "ProbabilisticActor, own key": lambda net, log: gaussian(
        net, return_log_prob=True, log_prob_key="score"
    ),
    "ProbabilisticActor, nested key": lambda net, log: gaussian(
        net, return_log_prob=True, out_keys=[("agent", "action")]
    ),
    "ProbabilisticActor, composite": composite,
    "ProbabilisticActor, scores with the sample": lambda net, log: probabilistic(
        net, kind=OwnCategorical
    ),
    "ProbabilisticActor, own generator": lambda net, log: probabilistic(
        net, generator=torch.Generator().manual_seed(3)
    ),
    "ProbabilisticActor, samples by key": lambda net, log: probabilistic(
        net, kind=ByKey, return_log_prob=False
    ),
    "ProbabilisticActor, hook at the end": sampler_hooked,
    "probabilistic sequence, own distribution": lambda net, log: TensorDictSequential(
        plain(net, "logits"), OwnSampler(["logits"], ["action"])
    ),
    "probabilistic sequence, other distribution": instance_dist,
    "probabilistic module in a chain": lambda net, log: TensorDictSequential(
        plain(net, "logits"),
        SafeProbabilisticModule(
            ["logits"], ["action"], spec=None, distribution_class=Categorical, return_log_prob=True
        ),
        TensorDictModule(torch.neg, ["action"], ["last"]),
    ),
    "probabilistic sequence": lambda net, log: sampling(net),
    "probabilistic sequence, composite": lambda net, log: sampling(net, return_composite=True),
    "wrapper": lambda net, log: TensorDictModuleWrapper(plain(net)),
    "of a TensorDict": lambda net, log: OfTensorDicts(net),
    "selects": lambda net, log: Selects(net),
    "function": lambda net, log: lambda td: td.set("action", net(td["observation"])),
    "returns nothing": lambda net, log: lambda td: (td.set("action", net(td["extra"])), None)[1],
    "by name": lambda net, log: on_tensordicts(
        lambda observation, absent=1: (net(observation), observation), ["observation", "extra"]
    ),
    "compiled": lambda net, log: torch.compile(plain(net), backend="eager"),
}


class _Method(nn.Module):
    def __init__(self, net: Any) -> None:
        super().__init__()
        self.net = net

    def other(self, x: Tensor) -> Tensor:
        return self.net(x) - 1


class OfTensorDictsModule(TensorDictModuleBase):
    in_keys = ["action"]  # noqa: RUF012
    out_keys = ["made"]  # noqa: RUF012

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        return tensordict.clone().set("made", tensordict["action"] + 1).exclude("extra")


def inputs() -> dict[Any, Tensor]:
    torch.manual_seed(1)
    mask = torch.ones(_ROWS, 2, dtype=torch.bool)
    mask[0, 1] = False
    return {
        "observation": torch.randn(_ROWS, 4),
        "extra": torch.randn(_ROWS, 4),
        ("inner", "x"): torch.randn(_ROWS, 1),
        "mask": mask,
    }


def left_by_the_plain_call(policy: Any) -> dict[Any, Any]:
    td = TensorDict({}, [_ROWS])
    for key, value in inputs().items():
        td.set(key, value)
    torch.manual_seed(2)
    out = policy(td)
    if out is not None and out is not td:
        td.update(out)
    return dict(td.items(True, True, is_leaf=is_leaf_nontensor))


def left_by_act(policy: Any) -> dict[Any, Any]:
    values = inputs()
    torch.manual_seed(2)
    return act(policy, values, _ROWS, known_classes())


def assert_same(got: dict[Any, Any], expected: dict[Any, Any]) -> None:
    assert set(got) == set(expected)
    for key, value in expected.items():
        assert got[key].dtype == value.dtype and torch.equal(got[key], value), key


def assert_as_called_plainly(make: Callable[[Log], Any], kind: ExplorationType) -> None:
    logs: list[Log] = [[], []]
    policies = []
    for log in logs:
        torch.manual_seed(0)
        policies.append(make(log))
    with torch.no_grad(), set_exploration_type(kind):
        for _ in range(2):  # hooks count, layers learn
            module = policies[1]
            before = _shape(module)
            assert_same(left_by_act(module), left_by_the_plain_call(policies[0]))
            assert _shape(module) == before  # nothing of the user's was touched
    assert logs[0] == logs[1]


def _shape(policy: Any) -> list[Any]:
    modules = list(policy.modules()) if isinstance(policy, nn.Module) else []
    return [(type(module), sorted(module.__dict__)) for module in modules]


_COMMON_INNER = ["mlp", "own __call__", "hooks"]
_COMMON_OUTER = ["TensorDictModule", "QValueActor", "sequence"]


def _check(outer: str, inner: str, kind: ExplorationType = ExplorationType.RANDOM) -> None:
    try:
        assert_as_called_plainly(lambda log: OUTER[outer](INNER[inner](log), log), kind)
    except AssertionError as error:
        raise AssertionError(f"{outer}, {inner}, {kind}: {error}") from error


@pytest.mark.parametrize("outer", OUTER)
def test_every_policy_does_what_its_plain_call_does(outer: str) -> None:
    for inner in _COMMON_INNER[: 1 if outer == "compiled" else 3]:
        _check(outer, inner)
    if "rob" in outer or outer == "epsilon":
        _check(outer, "mlp", ExplorationType.DETERMINISTIC)


@pytest.mark.parametrize("inner", INNER)
def test_every_module_is_called_as_it_is(inner: str) -> None:
    for outer in _COMMON_OUTER[: 1 if inner == "compiled" else 3]:
        _check(outer, inner)


def test_later_changes_of_a_policy_count_from_the_next_call() -> None:
    policy = q_actor(mlp())
    assert "late" not in left_by_act(policy)
    handle = policy[0].register_forward_hook(lambda m, a, out: out.set("late", out["extra"]))
    assert "late" in left_by_act(policy)
    handle.remove()
    assert "late" not in left_by_act(policy)
    policy[1].forward = lambda td: td.set("action", torch.full((_ROWS, 2), 7))
    assert (left_by_act(policy)["action"] == 7).all()
    del policy[1].forward
    policy[0].module = nn.Linear(4, 2)
    assert_same(left_by_act(policy), left_by_the_plain_call(policy))
    with torch.no_grad():
        policy[0].module.weight.zero_()
    assert_same(left_by_act(policy), left_by_the_plain_call(policy))


def test_hooks_of_all_modules_and_methods_exchanged_in_a_class_are_heeded(monkeypatch) -> None:
    policy, seen = q_actor(mlp()), []
    handle = nn.modules.module.register_module_forward_hook(lambda m, *_: seen.append(type(m)))
    left_by_act(policy)
    handle.remove()
    assert {QValueActor, TensorDictModule, nn.Linear} <= set(seen)
    forward = TensorDictModule.forward

    def other(self: Any, tensordict: TensorDictBase, **kwargs: Any) -> Any:
        return forward(self, tensordict, **kwargs).set("other", tensordict["extra"])

    monkeypatch.setattr(TensorDictModule, "forward", other)
    assert "other" in left_by_act(policy)


def test_existing_entries_are_skipped_where_the_user_wants_that() -> None:
    policy = plain(mlp(), "extra")
    with set_skip_existing(True):
        assert torch.equal(left_by_act(policy)["extra"], inputs()["extra"])


def test_outputs_that_do_not_fit_are_refused_as_by_tensordict() -> None:
    for wrong in (
        plain(lambda x: (x, x)),
        plain(lambda x: x[0, 0]),
        TensorDictModule(lambda x: x, ["observation"], ["a", "b"]),
    ):
        with pytest.raises(RuntimeError):
            left_by_the_plain_call(wrong)
        with pytest.raises(RuntimeError):
            left_by_act(wrong)
    with pytest.raises(KeyError, match="absent"):
        left_by_act(TensorDictModule(torch.neg, ["absent"], ["action"]))


@set_exploration_type(ExplorationType.RANDOM)
def test_the_usual_actors_are_called_past_tensordict(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(TensorDict, "from_any", classmethod(lambda cls, x: calls.append(x) or x))
    chain = TensorDictSequential(plain(mlp()))
    for policy in (plain(mlp()), q_actor(mlp()), chain, probabilistic(mlp()), sampling(mlp())):
        expected = left_by_the_plain_call(policy)
        assert calls
        calls.clear()
        assert_same(left_by_act(policy), expected)
        assert not calls


def test_copies_are_what_they_were() -> None:
    policy = q_actor(mlp())
    left_by_act(policy)
    twin = copy.deepcopy(policy)
    assert _shape(twin) == _shape(policy)
