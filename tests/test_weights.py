"""Weights are packed once, and reach modules of any form."""

from __future__ import annotations

import pickle

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn
from torchrl.data import OneHot
from torchrl.modules import EGreedyModule, QValueActor

from torchrl_dist.collect.worker.shared_block import SharedWeights, WeightsView
from torchrl_dist.errors import ConfigurationError
from torchrl_dist.weights import completed, pack, unpack


class Mixed(nn.Module):
    """Parameters and buffers of several dtypes, odd sizes and no dimensions."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        g = torch.Generator().manual_seed(seed)
        self.bf16 = nn.Parameter(torch.randn(3, generator=g).to(torch.bfloat16))
        self.f64 = nn.Parameter(torch.randn(2, 5, generator=g).double())
        self.register_buffer("flag", torch.randint(0, 2, (7,), generator=g).bool())
        self.register_buffer("count", torch.randint(0, 99, (), generator=g))
        self.register_buffer("empty", torch.zeros(0, 4))
        self.norm = nn.BatchNorm1d(3)
        with torch.no_grad():
            self.norm.running_mean += torch.randn(3, generator=g)


def assert_same_state(a: nn.Module, b: nn.Module) -> None:
    for name, tensor in a.state_dict().items():
        assert torch.equal(tensor, b.state_dict()[name]), name


def test_an_unpacked_module_equals_the_packed_one_whatever_its_dtypes_and_its_form() -> None:
    source = Mixed(0)
    for form in (source, TensorDict.from_module(source).data, source.state_dict()):
        packed = pickle.loads(pickle.dumps(pack(form, version=7)))
        unpack(packed, target := Mixed(1))
        assert_same_state(source, target)
        assert packed.version == 7 and packed.data.dtype == torch.uint8


def test_packed_weights_are_a_snapshot() -> None:
    source, target = nn.Linear(3, 2), nn.Linear(3, 2)
    packed = pack(source)
    before = source.weight.detach().clone()
    with torch.no_grad():
        source.weight.zero_()
    unpack(packed, target)
    assert torch.equal(target.weight, before)


def test_a_worker_keeps_the_epsilon_that_wraps_the_learners_policy() -> None:
    spec = OneHot(2)

    def actor() -> QValueActor:
        return QValueActor(nn.Linear(4, 2), in_keys=["observation"], spec=spec)

    learner = actor()
    exploration = EGreedyModule(spec, eps_init=0.37, eps_end=0.37)
    worker = TensorDictSequential(actor(), exploration)
    unpack(pack(learner), worker)
    assert_same_state(learner, worker[0])
    assert exploration.eps.item() == pytest.approx(0.37)


def test_weights_that_do_not_fit_are_refused_by_name_and_change_nothing() -> None:
    target = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    before = {k: v.clone() for k, v in target.state_dict().items()}
    other = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 5))
    with pytest.raises(ConfigurationError, match=r"1\.weight"):
        unpack(pack(other), target)
    assert all(torch.equal(v, before[k]) for k, v in target.state_dict().items())
    twins = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    with pytest.raises(ConfigurationError, match="equally well"):
        unpack(pack(nn.Linear(2, 2)), twins)
    lazy = TensorDictModule(nn.LazyLinear(2), in_keys=["observation"], out_keys=["action"])
    with pytest.raises(ConfigurationError, match="run the module once"):
        pack(lazy)


class Tied(nn.Module):
    def __init__(self, *, tie: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        for each in (self.first, self.second):
            each.scale = nn.Parameter(torch.rand(()))
        if tie:
            self.second.weight = self.first.weight
            self.second.scale = self.first.scale


def deliver(weights: object, worker: nn.Module, shared: bool) -> None:
    if shared:
        owner, view = SharedWeights(), WeightsView()
        owner.write(pack(weights))
        view.take(owner.address, worker)
    else:
        unpack(pack(weights), worker)


@pytest.mark.parametrize("shared", [False, True])
def test_tied_tensors_reach_a_module_that_has_them_apart(shared: bool) -> None:
    learner, worker = Tied(tie=True), Tied(tie=False)
    assert len(pack(learner).entries) == 4  # each tied tensor once
    deliver(learner, worker, shared)
    for name in ("first", "second"):
        for ours, theirs in zip(
            worker.get_submodule(name).parameters(),
            learner.get_submodule(name).parameters(),
            strict=True,
        ):
            assert torch.equal(ours, theirs), name
    unpack(pack(worker), learner)
    worker.second.weight.data = worker.second.weight.detach() + 1
    with pytest.raises(ConfigurationError, match="are one tensor in the policy but have diff"):
        unpack(pack(worker), learner)


@pytest.mark.parametrize("shared", [False, True])
def test_a_tied_module_takes_its_own_state_in_every_form(shared: bool) -> None:
    learner = Tied(tie=True)
    state = learner.state_dict()
    for form in (
        state,
        TensorDict.from_module(learner),
        TensorDict.from_module(learner).data,
        {name: tensor.clone() for name, tensor in sorted(state.items(), reverse=True)},
    ):
        deliver(form, worker := Tied(tie=True), shared)
        assert_same_state(worker, learner)
        assert worker.second.weight is worker.first.weight


def test_parts_of_a_policy_add_up_whatever_their_names() -> None:
    source = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2), nn.Linear(2, 3))
    target = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2), nn.Linear(2, 3))
    last = {name: value for name, value in source.state_dict().items() if name.startswith("2.")}
    first = completed(pack(source[0], 1), pack(target), source)
    both = completed(pack(source[1], 2), first, source)  # "weight" and "bias" again
    every = completed(pack(last, 3), both, source)
    assert every.version == 3 and len(every.entries) == 6
    unpack(every, target)
    assert_same_state(source, target)
    whole = pack(source, 4)
    assert completed(whole, every, source) is whole


def test_a_part_keeps_tied_tensors_tied_and_others_apart() -> None:
    def tied() -> nn.Sequential:
        found = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1))
        found[1].weight = found[0].weight
        return found

    source, apart = tied(), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1))
    before = pack(source)
    with torch.no_grad():
        source[2].weight.fill_(7.0)
    unpack(completed(pack(source[2], 1), before, source), apart)
    assert_same_state(source, apart)


@pytest.mark.parametrize("module", [None, nn.Linear(9, 9)])
def test_equal_names_mean_equal_tensors_if_only_the_workers_have_the_policy(module) -> None:
    before = pack({"a": torch.zeros(2), "b": torch.zeros(3)})
    found = completed(pack({"b": torch.ones(3)}, 1), before, module).tensors()
    assert found["a"].tolist() == [0, 0] and found["b"].tolist() == [1, 1, 1]
    more = pack({"a": torch.ones(2), "b": torch.ones(3), "c": torch.ones(1)}, 1)
    assert completed(more, before, module) is more
    with pytest.raises(ConfigurationError, match="Send all weights of the policy in one call"):
        completed(pack({"c": torch.ones(3)}, 1), before, module)
