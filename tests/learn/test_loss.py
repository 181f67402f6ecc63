"""A distributed loss stays a TorchRL loss; what cannot work is refused before it hangs."""

from __future__ import annotations

import copy
import functools
import gc
import os
import pickle
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import nn
from torch.distributions import Categorical
from torchrl.modules import BatchRenorm1d, PopArtValueNorm, QValueActor
from torchrl.objectives import (
    A2CLoss,
    ClipPPOLoss,
    CrossQLoss,
    DDPGLoss,
    DQNLoss,
    HardUpdate,
    KLPENPPOLoss,
    LossModule,
    PPOLoss,
    SoftUpdate,
    ValueEstimators,
)

from tests.learn.losses import (
    ACTIONS,
    OBSERVATION,
    categorical_actor,
    deterministic_actor,
    gaussian_actor,
    gradients,
    make_batch,
    make_loss,
    mlp,
    state_action_value,
    state_value,
    total,
)
from tests.learn.ranks import LearningRanks
from torchrl_dist import ConfigurationError, DistributedLoss, local_cluster
from torchrl_dist.learn import Ranks
from torchrl_dist.learn.loss import _compare_devices, _refuse_devices

# ---- alone


def test_alone_nothing_changes() -> None:
    alone, plain = DistributedLoss(make_loss("sac")), make_loss("sac")
    for loss in (alone, plain):
        total(loss(make_batch("sac", 6))).backward()
    assert all(torch.equal(g, gradients(plain)[n]) for n, g in gradients(alone).items())
    assert alone.ranks.size == 1 and alone.ranks.is_first
    assert alone.ranks.any(True) and not alone.ranks.any(False)
    assert alone.ranks.sums({"frames": 3}) == {"sum_over_ranks/frames": 3}
    assert len(alone.check_drift()) == 16
    with alone.no_sync():
        alone.set_rows(3)
    assert alone.ranks.on_first(lambda x: x + 1, 1) == 2


def test_it_is_the_loss_it_was() -> None:
    plain = make_loss("td3")
    loss = DistributedLoss(plain)
    assert loss is plain
    assert isinstance(loss, DistributedLoss) and type(loss).__mro__[2].__name__ == "TD3Loss"
    assert loss.state_dict().keys() == make_loss("td3").state_dict().keys()
    assert SoftUpdate(loss, tau=0.5).step() is None
    for updater in (SoftUpdate(loss, tau=0.1), HardUpdate(loss, value_network_update_interval=1)):
        loss.qvalue_network_params.data.add_(1.0)
        updater.step()
        assert loss.target_qvalue_network_params.shape == loss.qvalue_network_params.shape
    loss.set_keys(priority="importance")
    loss.make_value_estimator(ValueEstimators.TD0, gamma=0.5)
    assert loss.value_estimator.gamma == 0.5
    batch = make_batch("td3", 4)
    assert "importance" not in batch.keys()
    loss(batch)
    assert batch["importance"].shape[0] == 4


def test_attributes_of_the_loss_can_still_be_scheduled() -> None:
    loss = DistributedLoss(make_loss("ppo"))
    loss.entropy_coeff = 0.5
    assert loss._buffers["entropy_coeff"] == 0.5
    loss.loss_mask_key = None
    assert loss.loss_mask_key is None


def test_states_pass_between_distributed_and_plain_losses() -> None:
    loss, plain = DistributedLoss(make_loss("sac", seed=1)), make_loss("sac", seed=2)
    plain.load_state_dict(loss.state_dict())
    assert all(
        torch.equal(a, b) for a, b in zip(loss.parameters(), plain.parameters(), strict=True)
    )
    again = DistributedLoss(make_loss("sac", seed=3))
    again.load_state_dict(plain.state_dict())
    assert again.check_drift() == loss.check_drift()


def test_copies_are_refused() -> None:
    loss = DistributedLoss(make_loss("dqn"))
    for attempt in (copy.deepcopy, pickle.dumps):
        with pytest.raises(ConfigurationError, match="state_dict"):
            attempt(loss)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: nn.Linear(1, 1), "got Linear, expected a torchrl.objectives.LossModule"),
        (lambda: DistributedLoss(make_loss("dqn")), "distributed already"),
        (lambda: q_loss(nn.LazyLinear(ACTIONS)), "lazy"),
        (lambda: q_loss(nn.Sequential(mlp(OBSERVATION, 4), nn.BatchNorm1d(4))), "BatchNorm1d"),
        (lambda: q_loss(nn.Sequential(mlp(OBSERVATION, 4), BatchRenorm1d(4))), "BatchRenorm1d"),
        (lambda: ppo_loss(advantage_norm=PopArtValueNorm()), r"advantage_norm \(PopArtValueNorm"),
        (lambda: KLPENPPOLoss(categorical_actor(), state_value()), "KLPENPPOLoss adapts beta"),
    ],
)
def test_losses_that_cannot_be_distributed_are_refused(wrong: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        DistributedLoss(wrong()).check_drift()


def ppo_loss(**options: Any) -> ClipPPOLoss:
    return ClipPPOLoss(categorical_actor(), state_value(), normalize_advantage=False, **options)


def q_loss(network: nn.Module) -> DQNLoss:
    actor = QValueActor(network, in_keys=["observation"], action_space="categorical")
    return DQNLoss(actor, action_space="categorical")


def test_synchronized_and_frozen_batch_norms_are_accepted() -> None:
    network = nn.Sequential(mlp(OBSERVATION, ACTIONS), nn.BatchNorm1d(ACTIONS))
    frozen = copy.deepcopy(network).eval()
    converted = nn.SyncBatchNorm.convert_sync_batchnorm(network)
    for accepted in (frozen, converted):
        DistributedLoss(q_loss(accepted))


def test_a_deadline_must_be_one() -> None:
    for timeout_s in (0, -1, float("inf"), float("nan")):
        with pytest.raises(ConfigurationError, match="timeout_s"):
            DistributedLoss(make_loss("dqn"), timeout_s=timeout_s)


def test_several_processes_without_a_group_are_refused(fork_server, monkeypatch) -> None:
    with local_cluster({"learner": 2}, timeout_s=20, fork_server=fork_server):
        with pytest.raises(ConfigurationError, match=r"process_group=\"gloo\""):
            DistributedLoss(make_loss("dqn"))
    # A learner among collectors is a single learner.
    with local_cluster({"learner": 1, "collector": 1}, timeout_s=20, fork_server=fork_server):
        assert DistributedLoss(make_loss("dqn")).ranks.size == 1
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, "0")
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "2")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")
    with pytest.raises(ConfigurationError, match="init_process_group"):
        DistributedLoss(make_loss("dqn"))


def test_one_gpu_for_two_ranks_is_refused_under_nccl() -> None:
    _compare_devices([("a", ["cuda:0"]), ("a", ["cpu", "cuda:1"]), ("b", ["cuda:0"])])
    with pytest.raises(ConfigurationError, match="ranks 0 and 2 on a both have .* cuda:0"):
        _compare_devices([("a", ["cuda:0"]), ("b", ["cuda:0"]), ("a", ["cuda:0"])])


def test_a_device_that_the_group_does_not_serve_is_refused() -> None:
    _refuse_devices(["cpu", "cuda:1"], {"cpu": "gloo", "cuda": "nccl"})
    with pytest.raises(ConfigurationError, match="tensors on cpu, .* works on .'cuda'. only"):
        _refuse_devices(["cpu", "cuda:1"], {"cuda": "nccl"})


# ---- in two ranks


def dqn_loss(activation: type[nn.Module] = nn.Tanh, **options: Any) -> DQNLoss:
    layers = nn.Sequential(nn.Linear(OBSERVATION, 4), activation(), nn.Linear(4, ACTIONS))
    actor = QValueActor(layers, in_keys=["observation"], action_space="categorical")
    return DQNLoss(actor, action_space="categorical", **options)


class Scaled(nn.Tanh):
    """Counts its calls, which may differ between ranks."""

    def __init__(self, scale: float, device: str) -> None:
        super().__init__()
        self.scale, self.device, self.calls = scale, device, dist.get_rank()


def with_estimator(kind: ValueEstimators) -> DQNLoss:
    loss = dqn_loss()
    loss.make_value_estimator(kind, gamma=0.9)
    return loss


def with_keys(**keys: str) -> DQNLoss:
    loss = dqn_loss()
    loss.set_keys(**keys)
    return loss


def sac_loss(bound: float) -> LossModule:
    loss = make_loss("sac")
    loss.actor_network[-1].distribution_kwargs = {"low": torch.tensor([-bound, 0.0])}
    return loss


# By attribute: how a loss is made with one of two values (the tensors are the same), and how the
# error shows these.
UNLIKE: dict[str, tuple[Callable[[Any], LossModule], tuple[Any, Any], Callable[[Any], str]]] = {
    "the class": (
        lambda kind: kind(categorical_actor(), state_value()),
        (A2CLoss, PPOLoss),
        lambda kind: f"torchrl.objectives.{kind.__name__[:3].lower()}.{kind.__name__}",
    ),
    "loss_function": (lambda how: dqn_loss(loss_function=how), ("l2", "l1"), repr),
    "double_dqn": (
        lambda double: dqn_loss(double_dqn=double, delay_value=True), (False, True), repr,
    ),
    "reduction": (lambda how: dqn_loss(reduction=how), ("mean", "sum"), repr),
    "value_type": (with_estimator, (ValueEstimators.TD0, ValueEstimators.TD1), str),
    "the key 'reward'": (lambda key: with_keys(reward=key), ("reward", "shaped"), repr),
    "value_network.module.0.module.1": (
        dqn_loss, (nn.Tanh, nn.ReLU), lambda kind: f"{kind.__module__}.{kind.__name__}",
    ),
    "value_network.module.0.module.1.negative_slope": (
        lambda slope: dqn_loss(lambda: nn.LeakyReLU(slope)), (0.1, 0.2), repr,
    ),
    "value_network.module.0.module.1.scale": (
        lambda scale: dqn_loss(lambda: Scaled(scale, "cpu")), (1.0, 2.0), repr,
    ),
    "actor_network.module.1.distribution_kwargs": (
        sac_loss, (1.0, 2.0), lambda bound: f"[2] [{-bound}, 0.0]}}",
    ),
}  # fmt: skip


def told(function: Callable[[], Any]) -> str:
    try:
        function()
    except ConfigurationError as error:
        return str(error)
    return ""


def with_unlike_losses() -> dict[str, str]:
    """Return the error of each case. A new estimator and new keys raise at the next call."""
    index = dist.get_rank()
    found = {
        name: told(lambda m=make, v=values[index]: DistributedLoss(m(v), timeout_s=20))
        for name, (make, values, _) in UNLIKE.items()
    }
    for name, change in {
        "value_type later": lambda: loss.make_value_estimator(
            ValueEstimators.TD1 if index else ValueEstimators.TD0, gamma=0.9
        ),
        "the key 'reward' later": lambda: loss.set_keys(reward="shaped" if index else "reward"),
    }.items():
        with DistributedLoss(dqn_loss(), timeout_s=20) as loss:
            batch = make_batch("dqn", 4)
            batch["next", "shaped"] = batch["next", "reward"]
            loss(batch)
            change()
            found[name] = told(functools.partial(loss, batch))
    own = Scaled(1.0, f"cuda:{index}")
    with DistributedLoss(dqn_loss(lambda: own), timeout_s=20) as loss:
        own.scale = float(index)  # meant to differ
        found["alike"] = told(functools.partial(loss, make_batch("dqn", 4)))
    return found


def test_ranks_whose_losses_were_built_differently_get_an_error(two_ranks: LearningRanks) -> None:
    first, second = two_ranks.run(with_unlike_losses)
    assert first == second and first.pop("alike") == ""
    for name, text in first.items():
        kind = name.removesuffix(" later")
        _, values, shown = UNLIKE[kind]
        here, there = map(shown, values)
        assert text.startswith(f"{kind} is ") and f"{there} on rank 1" in text, (name, text)
        assert f"{here} on rank 0" in text, (name, text)
        assert "expected the same loss on every rank" in text


def dropped_losses() -> tuple[int, int]:
    """Return how many losses stay alive, and how many average the gradients of a network that all
    of them had in turn."""
    actor = deterministic_actor()
    dropped = []
    for _ in range(3):
        loss = DDPGLoss(actor, state_action_value(), delay_value=True)
        loss = DistributedLoss(loss, timeout_s=20)
        total(loss(make_batch("ddpg", 4))).backward()
        dropped.append(weakref.ref(loss._gradients))
    ranks = loss.ranks
    before = ranks._calls
    total(loss(make_batch("ddpg", 4))).backward()
    averages = ranks._calls - before - 1  # without the call of the loss
    del loss
    gc.collect()
    return sum(reference() is not None for reference in dropped), averages


def test_unreferenced_losses_are_freed(two_ranks: LearningRanks) -> None:
    assert two_ranks.run(dropped_losses) == [(0, 1), (0, 1)]


def of_a_loss_with_its_own_networks() -> tuple[dict[str, torch.Tensor], str]:
    """With ``functional=False``, the networks are the loss's modules and there are no targets."""
    torch.manual_seed(dist.get_rank())
    loss = DistributedLoss(ppo_loss(functional=False), timeout_s=20)
    half = make_batch("ppo", 8).split(4)[dist.get_rank()]
    total(loss(half)).backward()
    return gradients(loss), loss.check_drift()


def test_a_loss_need_not_be_functional(two_ranks: LearningRanks) -> None:
    torch.manual_seed(0)
    alone = ppo_loss(functional=False)
    total(alone(make_batch("ppo", 8))).backward()
    for found, _ in two_ranks.run(of_a_loss_with_its_own_networks):
        assert found.keys() == gradients(alone).keys()
        for name, expected in gradients(alone).items():
            torch.testing.assert_close(found[name], expected, atol=1e-6, rtol=1e-5)


def frozen_on_one_rank() -> str:
    loss = make_loss("ppo")
    if dist.get_rank() == 1:
        loss.actor_network_params.requires_grad_(False)
    return told(lambda: DistributedLoss(loss, timeout_s=20))


def test_parameters_frozen_on_one_rank_must_be_frozen_on_all(two_ranks: LearningRanks) -> None:
    for text in two_ranks.run(frozen_on_one_rank):
        assert "actor_network_params" in text and "(frozen) on rank 1" in text


def thawed_later() -> list[str]:
    """Freeze batch norms, distribute losses, and let the user or the loss call train()."""
    layers = nn.Sequential(mlp(OBSERVATION, ACTIONS), nn.BatchNorm1d(ACTIONS)).eval()
    actor = QValueActor(layers, in_keys=["observation"], action_space="categorical")
    by_user = DistributedLoss(DQNLoss(actor, action_space="categorical"), timeout_s=20)
    by_user(make_batch("dqn", 4))
    actor.train()
    critic = state_action_value()
    critic.module.layers.append(nn.BatchNorm1d(1))
    by_itself = CrossQLoss(gaussian_actor(), critic.eval(), target_entropy=-2.0)
    by_itself = DistributedLoss(by_itself, timeout_s=20)
    return [
        told(lambda: by_user(make_batch("dqn", 4))),
        told(lambda: by_itself(make_batch("sac", 4))),
    ]


def test_a_batch_norm_that_is_unfrozen_later_is_refused(two_ranks: LearningRanks) -> None:
    for by_user, by_itself in two_ranks.run(thawed_later):
        assert by_user.startswith("value_network.module.0.module.1 (BatchNorm1d)")
        assert by_itself.startswith("qvalue_network.module.layers.3 (BatchNorm1d)")


class OddLoss(LossModule):
    """Holds an optimizer in its state, and returns a distribution in addition to the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(OBSERVATION, ACTIONS)
        self.used = "never"

    def get_extra_state(self) -> dict[str, Any]:
        return {"used": self.used, "optimizer": torch.optim.Adam(self.layer.parameters())}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.used = state["used"]

    def forward(self, batch: TensorDict) -> tuple[torch.Tensor, Categorical]:
        policy = Categorical(logits=self.layer(batch["observation"]))
        return -policy.log_prob(batch["action"]).mean(), policy


def odd_outputs() -> tuple[str, OrderedDict, str]:
    torch.manual_seed(dist.get_rank())
    loss = OddLoss()
    loss.used = f"on rank {dist.get_rank()}"
    loss = DistributedLoss(loss, timeout_s=20)
    value, policy = loss(make_batch("dqn", 4, seed=dist.get_rank()))
    assert policy.entropy().shape == (4,)
    loss.set_rows(4)
    value.backward()
    state = {k: v for k, v in loss.state_dict().items() if isinstance(v, torch.Tensor)}
    return loss.used, state, loss.check_drift() + str(gradients(loss)["layer.bias"].tolist())


def test_state_other_than_tensors_stays_and_outputs_may_be_distributions(two_ranks) -> None:
    (used, state, check), (other_used, other_state, other_check) = two_ranks.run(odd_outputs)
    assert (used, other_used) == ("on rank 0", "on rank 1")
    assert all(torch.equal(state[name], other_state[name]) for name in state)
    assert check == other_check


def with_another_default_device() -> str:
    """The meta device stands for a GPU of another rank."""
    loss, batch = make_loss("dqn", seed=dist.get_rank()), make_batch("dqn", 4)
    with torch.device("meta"):
        loss = DistributedLoss(loss, timeout_s=20)
        assert not loss.ranks.any(False)
        loss.set_rows(4)
        value = loss(batch)["loss"]
    torch.set_default_device("meta")
    try:
        value.backward()
        assert loss.ranks.means({"loss": 1.0}) == {"mean_over_ranks/loss": 1.0}
    finally:
        torch.set_default_device(None)
    assert {p.grad.device.type for p in loss.parameters()} == {"cpu"}
    return loss.check_drift()


def test_new_tensors_lie_where_the_parameters_are(two_ranks: LearningRanks) -> None:
    first, second = two_ranks.run(with_another_default_device)
    assert first == second


def sparse_gradients() -> str:
    network = nn.Sequential(nn.Embedding(5, 4, sparse=True), nn.Flatten(-2), nn.Linear(4, ACTIONS))
    loss = DistributedLoss(q_loss(network), timeout_s=20)
    batch = make_batch("dqn", 4)
    batch["observation"] = batch["next", "observation"] = torch.zeros(4, 1, dtype=torch.long)
    return told(lambda: loss(batch)["loss"].backward())


def test_sparse_gradients_are_refused(two_ranks: LearningRanks) -> None:
    assert all("sparse=False" in text for text in two_ranks.run(sparse_gradients))


def draws(seeded: bool) -> tuple[float, float, int]:
    torch.manual_seed(0)
    np.random.seed(0)
    seed = Ranks(timeout_s=20).seed(7) if seeded else 0
    return torch.rand(()).item(), float(np.random.rand()), seed


def test_ranks_draw_differently_and_every_run_the_same(two_ranks: LearningRanks) -> None:
    first, second = two_ranks.run(draws, False)
    assert first == second, "equal seeds: the trap"
    first, second = two_ranks.run(draws, True)
    assert all(a != b for a, b in zip(first, second, strict=True))
    assert two_ranks.run(draws, True) == [first, second]


def log_and_save(folder: str) -> dict[str, float]:
    ranks = Ranks(timeout_s=20)

    def save() -> int:
        with open(os.path.join(folder, f"written-by-{ranks.index}"), "x"):
            return 42

    assert ranks.on_first(save) == (42 if ranks.is_first else None)
    assert os.listdir(folder) == ["written-by-0"]  # every rank finds the file
    mine = {"loss": 1.0 + 2 * ranks.index}
    return {**ranks.sums({"frames": 10}), **ranks.means(mine), **ranks.own(mine)}


def test_rank_0_writes_and_metrics_say_what_they_count(two_ranks, tmp_path) -> None:
    first, second = two_ranks.run(log_and_save, str(tmp_path))
    of_all = {"sum_over_ranks/frames": 20, "mean_over_ranks/loss": 2}
    assert first == {**of_all, "rank0/loss": 1} and second == {**of_all, "rank1/loss": 3}
