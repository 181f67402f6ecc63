"""Every class of ``torchrl.objectives``: exact on two ranks with unequal rows, or refused."""

from __future__ import annotations

import contextlib
import importlib
import pkgutil
from collections.abc import Iterator

import torch
import torch.distributed as dist
import torchrl.objectives as objectives
from tensordict import TensorDict
from torch import Tensor
from torchrl.objectives import LossModule

from tests.learn.losses import LOSSES, batch_for, gradients, make, pinned
from tests.learn.ranks import LearningRanks
from torchrl_dist import ConfigurationError, DistributedLoss, TorchRLDistError
from torchrl_dist.learn.reductions import KNOWN, Call, Weight, refusal

ROWS = 16

# Parts that are refused although rows are averaged, and the modes in which they are. (): all modes.
REFUSED = {
    ("CQLLoss", "loss_cql"): ("mask", "accumulated"),
    ("CQLLoss", "loss_alpha_prime"): (),
    ("DDPGLoss", "pred_value"): (),  # one number per row
    ("TD3BCLoss", "loss_actor"): (),
}
# Refused because these are not means over single rows.
STATISTICS = (("TD3BCLoss", "loss_actor"),)
# What one process cannot do, because TorchRL raises.
IMPOSSIBLE = {
    *((name, "keywords") for name in ("ACTLoss", "DiffusionBCLoss", "DistributionalDQNLoss")),
    *((name, "keywords") for name in ("IPPOLoss", "MAPPOLoss", "QMixerLoss", "RNDLoss")),
    ("WorldModelLoss", "keywords"),
}
HAVE_SCALARS = ("CQLLoss", "CrossQLoss", "DiscreteIQLLoss", "DiscreteSACLoss", "IQLLoss")
HAVE_SCALARS += ("OnlineDTLoss", "SACLoss", "TQCLoss")
MODES = ("plain", "mask", "weights", "accumulated", "keywords", "sum", "none")

# The others raise for an empty batch.
WORK_WITHOUT_ROWS = ["A2CLoss", "ACTLoss", "BCLoss", "DQNLoss", "DTLoss", "DiffusionBCLoss"]
WORK_WITHOUT_ROWS += ["DiscreteCQLLoss", "DiscreteIQLLoss", "DiscreteSACLoss", "GAILLoss"]
WORK_WITHOUT_ROWS += ["DistributionalDQNLoss", "KLPENPPOLoss", "PPOLoss", "QMixerLoss", "RNDLoss"]
WORK_WITHOUT_ROWS += ["ReinforceLoss", "TD3BCLoss", "TD3Loss", "WorldModelLoss"]

Parts = dict[str, Tensor]


def mask_rows(batch: TensorDict) -> None:
    """Leave two of rank 0's rows and nine of rank 1's."""
    mask = torch.arange(ROWS) % 5 > 0
    mask[1:3] = False
    shape = [ROWS] + [1] * batch.batch_dims
    batch["collector", "mask"] = mask.reshape(shape).expand(*batch.shape, 1).clone()


def weigh_rows(batch: TensorDict) -> None:
    """Give rank 0's rows small weights."""
    batch["priority_weight"] = torch.linspace(0.05, 1, batch.numel()).reshape(batch.shape) ** 2


def batches_for(name: str, mode: str) -> list[TensorDict]:
    """Return all rows for the first and the second backward pass."""
    batches = [batch_for(name, ROWS, seed) for seed in (1, 2)]
    for batch in batches:
        if mode in ("mask", "accumulated"):
            mask_rows(batch)
        if mode in ("weights", "accumulated"):
            weigh_rows(batch)
    return batches


def parts_of(loss: LossModule, batch: TensorDict, mode: str) -> Parts:
    """Return the outputs that have a gradient, each reduced to one number."""
    if mode == "keywords":
        keys = [(key if isinstance(key, str) else "_".join(key), key) for key in loss.in_keys]
        found = {name: batch.get(key, None) for name, key in keys}
        out = loss(**{name: value for name, value in found.items() if value is not None})
        out = out if isinstance(out, tuple) else (out,)
        out = dict(zip(loss.out_keys, out, strict=True))
    else:
        out = loss(batch)
    return {k: v.mean() if mode == "none" else v.sum() for k, v in out.items() if v.requires_grad}


def is_refused(name: str, part: str, mode: str) -> bool:
    modes = REFUSED.get((name, part), ("none",))
    return mode == "none" or not modes or mode in modes


def update(loss: LossModule, name: str, mode: str, first: int) -> Parts:
    """Return the gradients of one update: of all rows, or, for a distributed loss, of this rank's.

    Rank 0 has the ``first`` rows.
    """
    is_shared = isinstance(loss, DistributedLoss)
    batches = batches_for(name, mode)
    if is_shared:
        mine = slice(0, first) if dist.get_rank() == 0 else slice(first, ROWS)
        batches = [batch[mine].clone() for batch in batches]
    for number, batch in enumerate(batches if mode == "accumulated" else batches[:1]):
        parts = parts_of(loss, batch, mode)
        refused = {part for part in parts if is_refused(name, part, mode)}
        if is_shared:
            for part in refused:
                check_refusal(parts[part])
        if mode == "none":
            refused = {part for part in parts if (name, part) in STATISTICS}
            if is_shared:
                loss.set_rows(len(batch))
        local = is_shared and mode == "accumulated" and number == 0
        with loss.no_sync() if local else contextlib.nullcontext():
            sum(value for part, value in parts.items() if part not in refused).backward()
    return gradients(loss)


def check_refusal(part: Tensor) -> None:
    try:
        part.backward(retain_graph=True)
    except ConfigurationError as error:
        assert "set_rows(rows)" in str(error)
    else:
        raise AssertionError("it was not refused")


def difference(found: Parts, expected: Parts) -> float:
    """Return the difference, relative to the largest gradient."""
    if found.keys() != expected.keys():
        return float("inf")
    size = max(float(x.abs().max()) for x in expected.values())
    return max(float((found[name] - x).abs().max()) for name, x in expected.items()) / size


def outcome(name: str, mode: str, first: int) -> str:
    """Return what is wrong, or ``""``."""
    if (name, mode) in IMPOSSIBLE:
        return ""
    options = {"scalar_output_mode": "exclude"} if mode == "none" and name in HAVE_SCALARS else {}
    if (name, mode) == ("CQLLoss", "none"):
        options["with_lagrange"] = False  # TorchRL cannot do both
    alone, loss = make(name, **options), make(name, **options)
    if mode in ("sum", "none"):
        if not hasattr(loss, "reduction"):
            return ""
        alone.reduction = loss.reduction = mode
    loss = DistributedLoss(loss, timeout_s=30)
    try:
        with pinned():
            found = update(loss, name, mode, first)
            if dist.get_rank():
                return ""
            off = difference(found, update(alone, name, mode, first))
    except Exception as error:
        loss.ranks.report(error)
        return f"{name}, {mode}: {error!r}"
    finally:
        loss.close()
    return "" if off < 1e-5 else f"{name}, {mode}: off by {off:.2g}"


def outcomes(names: list[str], modes: tuple[str, ...] = MODES, first: int = 5) -> list[str]:
    found = []
    for name in names:
        # So that a difference is not due to rounding. (Two classes work in float32 only.)
        torch.set_default_dtype(torch.float32 if name in ("GAILLoss", "RNDLoss") else torch.float64)
        try:
            found += [outcome(name, mode, first) for mode in modes]
        finally:
            torch.set_default_dtype(torch.float32)
    return [text for text in found if text]


def test_every_class_that_is_known_is_exact(two_ranks: LearningRanks) -> None:
    names = sorted(loss_class.__name__ for loss_class in KNOWN)
    assert names == sorted(LOSSES), "a class without a case here"
    wrong = two_ranks.run(outcomes, names)
    assert wrong == [[], []], "\n".join(wrong[0] + wrong[1])


def without_rows() -> tuple[list[str], str]:
    found = outcomes(WORK_WITHOUT_ROWS, ("accumulated",), first=0)
    try:
        with DistributedLoss(make("ClipPPOLoss"), timeout_s=30) as loss:
            update(loss, "ClipPPOLoss", "plain", first=0)
    except TorchRLDistError as error:
        return found, str(error)
    return found, ""


def test_a_rank_without_rows_adds_nothing_or_gets_an_error(two_ranks: LearningRanks) -> None:
    for wrong, told in two_ranks.run(without_rows):
        assert wrong == [], "\n".join(wrong)
        assert "rank 0 has no rows, and ClipPPOLoss.forward cannot be computed without rows" in told


def all_classes() -> Iterator[type[LossModule]]:
    for module in pkgutil.walk_packages(objectives.__path__, f"{objectives.__name__}."):
        with contextlib.suppress(ImportError):  # of a library that is not installed
            importlib.import_module(module.name)
    pending, seen = [LossModule], set()
    while pending:
        for found in pending.pop().__subclasses__():
            if found.__module__.startswith(objectives.__name__) and found not in seen:
                seen.add(found)
                pending.append(found)
    yield from seen


def test_every_other_class_is_refused() -> None:
    """New classes of TorchRL are found here, and refused until a person has examined them."""
    found = set(all_classes())
    assert len(found) > 40 and set(KNOWN) <= found
    for loss_class in found - set(KNOWN):
        loss = loss_class.__new__(loss_class)
        torch.nn.Module.__init__(loss)
        reason = refusal(loss_class, loss, Call(Weight()), "loss")
        assert reason is not None and loss_class.__name__ in reason
