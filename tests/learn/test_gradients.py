"""The gradients on each rank are those of one process that has all rows."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor, nn
from torchrl.modules import NoisyLinear, QValueActor
from torchrl.objectives import DQNLoss, KLPENPPOLoss, LossModule, SoftUpdate, ValueEstimators

from tests.learn.losses import (
    ACTIONS,
    NAMES,
    OBSERVATION,
    categorical_actor,
    gradients,
    make_batch,
    make_loss,
    state_value,
    total,
)
from tests.learn.ranks import LearningRanks
from torchrl_dist import ConfigurationError, DistributedLoss, DriftError
from torchrl_dist.learn import ranks as ranks_module

ROWS = 12
SPLITS = {"equal": [(0, 6), (6, 12)], "unequal": [(0, 3), (3, 12)], "one rank": [(0, 12), (12, 12)]}


def part_of(batch: TensorDict, split: str) -> TensorDict:
    first, last = SPLITS[split][dist.get_rank()]
    return batch[first:last].clone()


def distributed(name: str, **kwargs: Any) -> LossModule:
    """Distribute a loss. Ranks start from other parameters, rank 0 from ``make_loss(name)``'s."""
    return DistributedLoss(make_loss(name, seed=dist.get_rank()), timeout_s=20, **kwargs)


def collectives(loss: Any) -> int:
    return int(loss.ranks._calls - loss.ranks._exchanges)


def assert_close(
    found: dict[str, Tensor], expected: dict[str, Tensor], atol: float = 1e-6, rtol: float = 1e-5
) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, atol=atol, rtol=rtol, msg=name)


# ---- equal to the whole batch


def masked(batch: TensorDict, valid: Tensor) -> TensorDict:
    batch["collector"] = TensorDict({"mask": valid[:, None]}, [ROWS])
    return batch


def weighted(name: str) -> TensorDict:
    """Rank 0's rows have small weights, and TorchRL divides by the sum of a batch's weights."""
    batch = make_batch(name, ROWS)
    batch["priority_weight"] = torch.linspace(0.05, 1, ROWS) ** 2
    return batch


def some_rows(name: str) -> TensorDict:
    return masked(weighted(name), torch.arange(ROWS) % 4 > 0)


def padded_trajectories() -> TensorDict:
    """``[ROWS]`` trajectories. The batch size does not show their time. Later ones are shorter."""
    batch = make_batch("ppo", ROWS)
    steps = batch.batch_size[1]
    lengths = torch.tensor([steps] * (ROWS // 2) + [1] * (ROWS - ROWS // 2))
    mask = torch.arange(steps) < lengths[:, None]
    batch["collector"] = TensorDict({"mask": mask[..., None]}, batch.batch_size)
    batch.batch_size = [ROWS]
    return batch


def plainly(loss: LossModule, batch: TensorDict) -> None:
    total(loss(batch)).backward()


def with_autocast(loss: LossModule, batch: TensorDict) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        value = total(loss(batch))
    value.backward()


def compiled(loss: LossModule, batch: TensorDict) -> None:
    total(torch.compile(loss, backend="eager")(batch)).backward()


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise ArithmeticError("in the middle of a pass")


def after_a_failed_pass(loss: LossModule, batch: TensorDict) -> None:
    some = next(loss.parameters())
    with pytest.raises(ArithmeticError):
        (loss(batch.clone())["loss"] + Fails.apply(some).sum()).backward()
    loss.zero_grad()
    loss(batch)["loss"].backward()


def two_calls_and_a_penalty(loss: LossModule, batch: TensorDict) -> None:
    other = batch.exclude("priority_weight")
    values = [loss(batch)["loss"], loss(other)["loss"]]
    (values[0] + 3 * values[1] + sum(p.square().sum() for p in loss.parameters())).backward()


@dataclasses.dataclass(frozen=True)
class Case:
    """One backward pass over ``rows`` of all ranks."""

    loss: str
    rows: Callable[[], TensorDict]
    split: str = "unequal"
    way: Callable[[LossModule, TensorDict], None] = plainly
    atol: float = 1e-6


def dqn_rows() -> TensorDict:
    return make_batch("dqn", ROWS)


ROW = torch.arange(ROWS)
MASKED = {
    # Four valid rows on rank 0, one on rank 1.
    "some": Case("dqn", lambda: masked(dqn_rows(), (ROW < 4) | (ROW > 10)), "equal"),
    "none on rank 1": Case("dqn", lambda: masked(dqn_rows(), ROW < 6), "equal"),
    "all on rank 0": Case("dqn", lambda: some_rows("dqn"), "one rank"),
    "steps that the batch size does not show": Case("ppo", padded_trajectories, "equal"),
}
WHOLE = {
    **{name: Case(name, lambda name=name: make_batch(name, ROWS)) for name in NAMES},
    "equal parts": Case("dqn", dqn_rows, "equal"),
    **{
        (name, "weights"): Case(name, lambda name=name: some_rows(name))
        for name in ("dqn", "sac", "discrete_sac", "td3", "ddpg")
    },
    "no rows on rank 1": Case("dqn", dqn_rows, "one rank"),
    "no weights on rank 1": Case("dqn", lambda: weighted("dqn"), "one rank"),
    "mixed precision": Case("dqn", dqn_rows, way=with_autocast, atol=5e-3),
    "compiled": Case("dqn", dqn_rows, way=compiled),
    "after a pass that fails on every rank": Case("dqn", dqn_rows, way=after_a_failed_pass),
    "two calls": Case("dqn", lambda: some_rows("dqn"), way=two_calls_and_a_penalty),
}


def of_cases(table: str) -> dict[Any, dict[str, Tensor]]:
    found = {}
    for name, case in globals()[table].items():
        loss = distributed(case.loss)
        case.way(loss, part_of(case.rows(), case.split))
        found[name] = gradients(loss)
    return found


def require_gradients_of_the_whole_batch(ranks: LearningRanks, table: str) -> None:
    for found in ranks.run(of_cases, table):
        for name, case in globals()[table].items():
            alone = make_loss(case.loss)
            case.way(alone, case.rows())
            assert_close(found[name], gradients(alone), case.atol)


def test_gradients_are_those_of_the_whole_batch(two_ranks: LearningRanks) -> None:
    require_gradients_of_the_whole_batch(two_ranks, "WHOLE")


def test_a_mask_weighs_as_many_rows_as_it_leaves(two_ranks: LearningRanks) -> None:
    require_gradients_of_the_whole_batch(two_ranks, "MASKED")


def of_rows_counted_by_the_caller() -> dict[str, Tensor]:
    loss = distributed("dqn")
    loss.reduction = "none"
    batch = part_of(make_batch("dqn", ROWS), "unequal")
    kept = loss(batch)["loss"][1:]  # the caller drops a row
    loss.set_rows(len(kept))
    kept.mean().backward()
    return gradients(loss)


def of_no_rows_counted_by_the_caller(count: Callable[[float], Any]) -> dict[str, Tensor]:
    loss = distributed("dqn")
    loss.reduction = "none"
    batch = part_of(make_batch("dqn", ROWS), "equal")
    kept = torch.full([len(batch)], 1.0 - dist.get_rank())
    losses = loss(batch)["loss"]
    loss.set_rows(count(kept.sum().item()))
    ((losses * kept).sum() / kept.sum()).backward()  # NaN on rank 1
    return gradients(loss)


def test_the_caller_may_count_rows_or_none(two_ranks: LearningRanks) -> None:
    alone = make_loss("dqn")
    alone.reduction = "none"
    losses = alone(make_batch("dqn", ROWS))["loss"]
    torch.cat([losses[1:3], losses[4:]]).mean().backward()
    for found in two_ranks.run(of_rows_counted_by_the_caller):
        assert_close(found, gradients(alone))
    alone = make_loss("dqn")
    alone(make_batch("dqn", ROWS)[:6])["loss"].backward()
    for count in (float, torch.tensor):
        for found in two_ranks.run(of_no_rows_counted_by_the_caller, count):
            assert_close(found, gradients(alone))


# ---- ways of using losses


class Updates:
    """Updates of one TD3 learner with an optimizer per network, in one of several styles."""

    def __init__(self, loss: LossModule, style: str) -> None:
        self.loss, self.style, self.count = loss, style, 0
        self.target = SoftUpdate(loss, tau=0.1)
        self.actor = torch.optim.Adam(loss.actor_network_params.values(True, True), lr=0.01)
        self.critic = torch.optim.Adam(loss.qvalue_network_params.values(True, True), lr=0.01)

    def __call__(self, batch: TensorDict) -> None:
        getattr(self, self.style)(batch)
        self.target.step()
        self.count += 1

    def methods(self, batch: TensorDict) -> None:
        """Bypasses ``forward``, and delays the actor's update."""
        loss, _ = self.loss.value_loss(batch)
        self.step(self.critic, loss)
        if self.count % 2 == 0:
            loss, _ = self.loss.actor_loss(batch)
            self.step(self.actor, loss)

    def two_passes(self, batch: TensorDict) -> None:
        """Two backward passes of one forward, each followed by a step of its optimizer."""
        losses = self.loss(batch)
        if self.count % 2 == 0:
            self.step(self.actor, losses["loss_actor"])
        self.step(self.critic, losses["loss_qvalue"])

    def clipped(self, batch: TensorDict) -> None:
        """One pass, one norm over all gradients."""
        losses = self.loss(batch)
        for optimizer in (self.actor, self.critic):
            optimizer.zero_grad()
        (losses["loss_qvalue"] + losses["loss_actor"]).backward()
        nn.utils.clip_grad_norm_(self.loss.parameters(), 0.05)
        for optimizer in (self.actor, self.critic):
            optimizer.step()

    def accumulated(self, batch: TensorDict) -> None:
        """Averages with the last of three parts of each rank's rows."""
        for optimizer in (self.actor, self.critic):
            optimizer.zero_grad()
        parts = batch.split(len(batch) // 3)
        for number, part in enumerate(parts):
            last = number == len(parts) - 1
            local = isinstance(self.loss, DistributedLoss) and not last
            with self.loss.no_sync() if local else contextlib.nullcontext():
                losses = self.loss(part)
                ((losses["loss_qvalue"] + losses["loss_actor"]) / len(parts)).backward()
        for optimizer in (self.actor, self.critic):
            optimizer.step()

    def step(self, optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


STYLES = ("methods", "two_passes", "clipped", "accumulated")


def after_updates(style: str) -> tuple[dict[str, Tensor], int, str]:
    loss = distributed("td3")
    update = Updates(loss, style)
    for seed in range(5):
        update(part_of(make_batch("td3", ROWS, seed), "unequal"))
    return dict(loss.state_dict()), collectives(loss), loss.check_drift()


@pytest.mark.parametrize("style", STYLES)
def test_every_style_of_update_gives_one_process_parameters(two_ranks, style: str) -> None:
    alone = make_loss("td3")
    update = Updates(alone, style)
    for seed in range(5):
        update(make_batch("td3", ROWS, seed))
    (first, count, checksum), (second, _, same) = two_ranks.run(after_updates, style)
    assert checksum == same
    assert_close(first, second, atol=0)
    assert_close(first, dict(alone.state_dict()), atol=2e-5)
    calls = {"methods": 5 + 3, "accumulated": 5 * 3}.get(style, 5)
    passes = 5 + 3 if style in ("methods", "two_passes") else 5
    # The copy of the parameters takes two, because the ranks first check that all have come. After
    # a call of the loss, this is known.
    assert count == 2 + calls + passes


def from_afar(direct_bytes: int) -> dict[str, Tensor]:
    ranks_module._DIRECT_BYTES, before = direct_bytes, ranks_module._DIRECT_BYTES
    try:
        loss = distributed("td3")
        loss.ranks.members = tuple(
            dataclasses.replace(who, host=f"host{who.index}") for who in loss.ranks.members
        )
        for seed in range(2):
            total(loss(part_of(make_batch("td3", ROWS, seed), "unequal"))).backward()
        return gradients(loss)
    finally:
        ranks_module._DIRECT_BYTES = before


@pytest.mark.parametrize("direct_bytes", [2**20, -1], ids=["one way", "two ways"])
def test_ranks_on_several_hosts_average_as_those_of_one(two_ranks, direct_bytes: int) -> None:
    alone = make_loss("td3")
    for seed in range(2):
        total(alone(make_batch("td3", ROWS, seed))).backward()
    first, second = two_ranks.run(from_afar, direct_bytes)
    assert_close(first, second, atol=0, rtol=0)
    assert_close(first, gradients(alone), atol=2e-6)


def reached_by_one_rank() -> list[dict[str, Tensor]]:
    """Rank 0 trains both networks, rank 1 the critic only."""
    loss = distributed("td3")
    losses = loss(part_of(make_batch("td3", ROWS), "equal"))
    if dist.get_rank() == 0:
        total(losses).backward()
    else:
        losses["loss_qvalue"].backward()
    both = gradients(loss)
    loss.zero_grad()
    loss.value_loss(part_of(make_batch("td3", ROWS), "equal"))[0].backward()
    return [both, gradients(loss)]


def test_ranks_may_reach_different_parameters(two_ranks: LearningRanks) -> None:
    (first, critic), (second, _) = two_ranks.run(reached_by_one_rank)
    assert_close(first, second, atol=0)
    actor = {name for name in first if name.startswith("actor")}
    assert actor and not actor & critic.keys(), "gradients of what no rank reached"
    alone = make_loss("td3")
    alone(make_batch("td3", ROWS)[:6])["loss_actor"].backward()
    halved = {name: grad / 2 for name, grad in gradients(alone).items() if name in actor}
    assert_close({name: first[name] for name in actor}, halved)


def added_to_by_one_rank() -> dict[str, Tensor]:
    """In a second pass, only rank 0 reaches the actor. Gradients are not cleared."""
    loss = distributed("td3")
    total(loss(part_of(make_batch("td3", ROWS), "equal"))).backward()
    losses = loss(part_of(make_batch("td3", ROWS), "equal"))
    (total(losses) if dist.get_rank() == 0 else losses["loss_qvalue"]).backward()
    return gradients(loss)


def test_gradients_of_an_earlier_pass_stay_in_the_sum(two_ranks: LearningRanks) -> None:
    first, second = two_ranks.run(added_to_by_one_rank)
    assert_close(first, second, atol=0)
    alone = make_loss("td3")
    total(alone(make_batch("td3", ROWS))).backward()
    alone(make_batch("td3", ROWS))["loss_qvalue"].backward()
    (alone(make_batch("td3", ROWS)[:6])["loss_actor"] / 2).backward()
    assert_close(first, gradients(alone))


def scaled_updates(loss: LossModule, batches: list[TensorDict], parts: int) -> list[float]:
    """Update with a scaler, accumulation over ``parts`` and clipping. Return the scale each
    time."""
    optimizer = torch.optim.SGD(loss.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024, growth_interval=2)
    scales = []
    for batch in batches:
        optimizer.zero_grad()
        for number, part in enumerate(batch.split(len(batch) // parts)):
            local = isinstance(loss, DistributedLoss) and number < parts - 1
            with loss.no_sync() if local else contextlib.nullcontext():
                scaler.scale(loss(part)["loss"] / parts).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(loss.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales


def batches_of_which_one_overflows() -> list[TensorDict]:
    batches = [make_batch("dqn", ROWS, seed) for seed in range(5)]
    batches[2]["next", "reward"][-1] = float("inf")  # of rank 1's rows only
    return batches


def with_a_scaler() -> tuple[list[float], dict[str, Tensor], str]:
    loss = distributed("dqn")
    batches = [part_of(batch, "equal") for batch in batches_of_which_one_overflows()]
    return scaled_updates(loss, batches, 3), dict(loss.state_dict()), loss.check_drift()


def test_a_gradient_scaler_skips_on_all_ranks_what_overflows_on_one(two_ranks) -> None:
    alone = make_loss("dqn")
    scales = scaled_updates(alone, batches_of_which_one_overflows(), 1)
    assert scales == [1024, 2048, 1024, 1024, 2048], "the third update was skipped"
    for found, state, _ in two_ranks.run(with_a_scaler):
        assert found == scales
        assert_close(state, dict(alone.state_dict()))


def after_unfreezing() -> tuple[dict[str, Tensor], str]:
    loss = make_loss("ppo")
    loss.actor_network_params.requires_grad_(False)
    loss = DistributedLoss(loss, timeout_s=20)
    loss.actor_network_params.requires_grad_(True)
    total(loss(part_of(make_batch("ppo", ROWS), "equal"))).backward()
    return gradients(loss), loss.check_drift()


def test_parameters_that_are_unfrozen_later_are_averaged(two_ranks: LearningRanks) -> None:
    (first, _), (second, _) = two_ranks.run(after_unfreezing)
    assert len(first) == 8
    assert_close(first, second, atol=0)


def after_conversion(dtype: torch.dtype, of: str) -> dict[str, Tensor]:
    loss = distributed("dqn")
    if of == "loss":
        loss.to(dtype)
    else:  # like Module.to(), which the loss does not notice
        for tensor in [*loss.parameters(), *loss.buffers()]:
            tensor.data = tensor.data.to(dtype)
    batch = part_of(make_batch("dqn", ROWS), "equal")
    batch = batch.apply(lambda x: x.to(dtype) if x.is_floating_point() else x)
    loss(batch)["loss"].backward()
    return gradients(loss)


@pytest.mark.parametrize(
    ("dtype", "of"),
    [(torch.bfloat16, "loss"), (torch.float64, "loss"), (torch.float64, "its networks")],
)
def test_a_loss_may_be_converted_later(two_ranks, dtype: torch.dtype, of: str) -> None:
    alone = make_loss("dqn").to(dtype)
    batch = make_batch("dqn", ROWS)
    alone(batch.apply(lambda x: x.to(dtype) if x.is_floating_point() else x))["loss"].backward()
    first, second = two_ranks.run(after_conversion, dtype, of)
    assert all(grad.dtype == dtype for grad in first.values())
    assert_close(first, second, atol=0)
    assert_close(first, gradients(alone), atol=1e-12 if dtype == torch.float64 else 2e-2, rtol=0)


def what_is_told(break_something: Callable[[LossModule], None]) -> str:
    loss = distributed("ppo")
    batch = part_of(make_batch("ppo", ROWS), "unequal")
    total(loss(batch)).backward()
    try:
        break_something(loss)
        total(loss(batch)).backward()
    except ConfigurationError as error:
        return str(error)
    return ""


def steps_in_backward(loss: LossModule) -> None:
    parameter = loss.get_parameter("critic_network_params.module.0.bias")
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    parameter.register_post_accumulate_grad_hook(lambda _: optimizer.step())


def freezes_on_one_rank(loss: LossModule) -> None:
    loss.get_parameter("critic_network_params.module.2.bias").requires_grad_(loss.ranks.is_first)


def adds_on_one_rank(loss: LossModule) -> None:
    if loss.ranks.is_first:
        loss.extra = nn.Parameter(torch.zeros(3))


def adds_to_the_network(loss: LossModule) -> None:
    layer = nn.Linear(1, 1, bias=False)
    loss.critic_network.late = layer
    loss.critic_network.register_forward_hook(
        lambda _, __, out: out.set("state_value", layer(out["state_value"]))
    )


def test_changes_that_would_train_ranks_apart_are_noticed_and_named(two_ranks) -> None:
    for fault, name in (
        (steps_in_backward, "critic_network_params.module.0.bias was changed during the backward"),
        (freezes_on_one_rank, "such as critic_network_params.module.2.bias"),
        (adds_on_one_rank, "such as extra (here"),
        (adds_to_the_network, "critic_network.late.weight was added to its network after"),
    ):
        for told in two_ranks.run(what_is_told, fault):
            assert name in told, (fault, told)


def with_statistics_of_its_rows(estimator: ValueEstimators, options: dict[str, bool]) -> str:
    loss = make_loss("a2c_vtrace")
    loss.make_value_estimator(estimator, gamma=0.9, **options)
    loss = DistributedLoss(loss, timeout_s=20)
    losses = loss(part_of(make_batch("a2c_vtrace", ROWS), "unequal"))
    try:
        losses["loss_objective"].backward()
    except ConfigurationError as error:
        return str(error)
    return ""


def test_an_estimator_that_averages_over_a_batch_is_refused(two_ranks: LearningRanks) -> None:
    for estimator, name in (("GAE", "average_gae"), ("TDLambda", "average_rewards")):
        arguments = (ValueEstimators[estimator], {name: True})
        for told in two_ranks.run(with_statistics_of_its_rows, *arguments):
            assert f"{name}=True normalizes by statistics of this rank's rows" in told


class Both(LossModule):
    """Make one of two losses that share a network."""

    def __init__(self) -> None:
        super().__init__()
        self.first = make_loss("dqn")
        network = self.first.value_network
        self.second = DQNLoss(network, action_space="categorical", delay_value=False)
        self.second.make_value_estimator(gamma=0.5)
        self.second.value_network_params = self.first.value_network_params

    def forward(self, batch: TensorDict) -> Tensor:
        return self.first(batch)["loss"] + self.second(batch)["loss"]


def sharing_a_network() -> tuple[str, dict[str, Tensor], dict[str, Tensor], int]:
    plain = make_loss("dqn")
    loss = DistributedLoss(plain, timeout_s=20)
    batch = part_of(make_batch("dqn", ROWS), "unequal")
    other = make_loss("dqn")
    other.value_network_params = loss.value_network_params
    try:
        DistributedLoss(other, timeout_s=20)
    except ConfigurationError as error:
        refused = str(error)
    loss(batch.clone())["loss"].backward()
    before = gradients(loss)
    loss.close()
    loss.close()
    with torch.no_grad():
        loss(batch.clone())
    with pytest.raises(ConfigurationError, match="was closed"):
        loss(batch.clone())
    loss.zero_grad()
    other = DistributedLoss(other, timeout_s=20)
    other(batch.clone())["loss"].backward()
    return refused, before, gradients(other), collectives(other)


def test_a_network_is_averaged_by_one_loss_at_a_time(two_ranks: LearningRanks) -> None:
    alone = make_loss("dqn")
    alone(make_batch("dqn", ROWS))["loss"].backward()
    for refused, before, after, count in two_ranks.run(sharing_a_network):
        assert "value_network_params" in refused and "another distributed loss" in refused
        assert_close(before, gradients(alone))
        assert_close(after, gradients(alone))
        assert count == 2 + 1 + 1  # the copy of the parameters, one call, one average


def of_a_nested_loss() -> dict[str, Tensor]:
    torch.manual_seed(dist.get_rank())
    loss = DistributedLoss(Both(), timeout_s=20)
    batch = part_of(make_batch("dqn", ROWS), "unequal")
    value = loss(batch)
    with pytest.raises(ConfigurationError, match="Both is not one of the TorchRL losses"):
        value.backward(retain_graph=True)
    loss.set_rows(len(batch))
    value.backward()
    return gradients(loss)


def test_losses_in_a_loss_are_averaged_once(two_ranks: LearningRanks) -> None:
    alone = Both()
    alone(make_batch("dqn", ROWS)).backward()
    for found in two_ranks.run(of_a_nested_loss):
        assert_close(found, gradients(alone))


def kl_loss(**adaptation: float) -> KLPENPPOLoss:
    torch.manual_seed(0)
    loss = KLPENPPOLoss(categorical_actor(), state_value(), beta=1.0, dtarg=0.2, **adaptation)
    loss.normalize_advantage = False
    return loss


def kl_batch(seed: int) -> TensorDict:
    batch = make_batch("ppo", ROWS, seed)
    random = torch.Generator().manual_seed(seed)
    batch["logits"] = torch.randn(*batch.shape, ACTIONS, generator=random) * seed / 3
    return batch


def betas_of_all_ranks() -> tuple[list[float], dict[str, Tensor]]:
    loss = DistributedLoss(kl_loss(increment=1, decrement=1), timeout_s=20)
    betas = []
    for seed in range(4):
        loss.zero_grad()
        losses = loss(part_of(kl_batch(seed), "equal"))
        total(losses).backward()
        kl = loss.ranks.means({"kl": losses["kl"].mean()})["mean_over_ranks/kl"]
        if kl > loss.dtarg * 1.5:
            loss.beta = float(loss.beta) * 2
        elif kl < loss.dtarg / 1.5:
            loss.beta = float(loss.beta) / 2
        betas.append(float(loss.beta))
    loss.check_drift()
    return betas, gradients(loss)


def test_a_kl_penalty_can_be_adapted_to_the_rows_of_all(two_ranks: LearningRanks) -> None:
    alone = kl_loss(increment=2, decrement=0.5)
    betas = []
    for seed in range(4):
        alone.zero_grad()
        total(alone(kl_batch(seed))).backward()
        betas.append(float(alone.beta))
    assert min(betas) < max(betas)
    for found, gradient in two_ranks.run(betas_of_all_ranks):
        assert found == betas
        assert_close(gradient, gradients(alone))


# ---- 200 updates


def after_200_updates(name: str) -> tuple[str, str]:
    loss = distributed(name)
    before = loss.check_drift()
    target = SoftUpdate(loss, tau=0.05) if name not in ("ppo", "a2c_vtrace") else None
    optimizer = torch.optim.Adam(loss.parameters(), lr=1e-3)
    loss.ranks.seed(0)
    # Other rows on each rank.
    batches = [make_batch(name, 4, int(torch.randint(2**31, ()))) for _ in range(10)]
    for update in range(200):
        optimizer.zero_grad()
        total(loss(batches[update % 10].clone(False))).backward()
        nn.utils.clip_grad_norm_(loss.parameters(), 1.0)
        optimizer.step()
        if target is not None:
            target.step()
    return before, loss.check_drift()


@pytest.mark.parametrize("name", ["sac", "ppo"])
def test_nothing_drifts_in_200_updates(two_ranks: LearningRanks, name: str) -> None:
    checksums = two_ranks.run(after_200_updates, name)
    assert len(set(checksums)) == 1
    assert checksums[0][0] != checksums[0][1]


def drift(what: str) -> tuple[str, ...]:
    loss = distributed("dqn")
    with torch.no_grad():
        if dist.get_rank() == 1 and what == "target":
            loss.target_value_network_params["module", "0", "module", "2", "bias"] += 1e-6
        if dist.get_rank() == 1 and what == "buffer":
            loss.value_estimator.gamma.fill_(0.5)
    try:
        loss.check_drift()
    except DriftError as error:
        assert error.names[0] in str(error) and "ranks [1]" in str(error)
        return error.names
    return ()


def test_the_checksum_names_what_drifts(two_ranks: LearningRanks) -> None:
    assert two_ranks.run(drift, "nothing") == [(), ()]
    for what, part in (("target", "target_value_network_params"), ("buffer", "gamma")):
        first, second = two_ranks.run(drift, what)
        assert first == second and len(first) == 1 and part in first[0]


def with_noise() -> tuple[str, ...]:
    """Let noise differ between ranks, and then a weight as well."""
    layers = nn.Sequential(NoisyLinear(OBSERVATION, 8), nn.Tanh(), NoisyLinear(8, ACTIONS))
    actor = QValueActor(layers, in_keys=["observation"], action_space="categorical")
    loss = DQNLoss(actor, action_space="categorical", delay_value=True)
    loss = DistributedLoss(loss, timeout_s=20)
    torch.manual_seed(dist.get_rank())
    noise = [x for name, x in loss.named_buffers() if name.endswith("_epsilon")]
    assert len(noise) >= 4
    for tensor in noise:
        tensor.normal_()
    loss.check_drift()
    with torch.no_grad():
        next(loss.parameters()).add_(dist.get_rank())
    with pytest.raises(DriftError) as raised:
        loss.check_drift()
    return raised.value.names


def test_the_noise_of_layers_is_not_drift(two_ranks: LearningRanks) -> None:
    for names in two_ranks.run(with_noise):
        assert names == ("value_network_params.module.0.module.0.weight_mu",)
