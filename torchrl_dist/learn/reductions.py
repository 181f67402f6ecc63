"""Observe the divisor of each part of a loss, so that ranks can weight their gradients.

If a part is a mean over rows, its gradient on rank r is ``g_r / d_r``. Here, ``g_r`` is the
gradient of the sum over the rank's rows. The divisor ``d_r`` is the number of these rows, the
number of rows that a mask leaves, or the sum of the rows' weights. A single process with the rows
of all ``size`` ranks would compute ``sum_r g_r / sum_r d_r``. Therefore the backward pass
multiplies each mean's gradient by ``size * d_r / sum_r d_r``. A plain average over the ranks is
then exact, even if gradients of other parts of the loss, of other losses or of other backward
passes are added.

Divisors come from two places: from TorchRL's own ``_reduce_loss``, which almost all losses call,
and from the autograd graph of each output, in which ``mean()`` records the number of elements.
Between a mean and the output, only sums and constant factors are allowed, because any other
function would need the mean over all ranks instead of this rank's mean.

The graph does not show statistics of a batch through which no gradient flows, such as the mean and
deviation that normalize advantages. Therefore only loss classes whose statistics are known are
supported (``KNOWN``, for TorchRL 0.14). Other classes are refused unless the caller states the
weight of each rank.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch
import torchrl.objectives as objectives
from tensordict import TensorDictBase, is_tensor_collection
from torch import Tensor
from torchrl.objectives import LossModule, PPOLoss
from torchrl.objectives import value as estimators

_MEAN, _SUM = 1, 2  # torch's numbers for these reductions

# Operations of autograd that are linear in each input that has a gradient.
_LINEAR = frozenset(
    {
        "AddBackward0",
        "AliasBackward0",
        "CloneBackward0",
        "NegBackward0",
        "ReshapeAliasBackward0",
        "SqueezeBackward0",
        "SqueezeBackward1",
        "SqueezeBackward2",
        "SubBackward0",
        "ToCopyBackward0",
        "UnsqueezeBackward0",
        "ViewBackward0",
    }
)


class Weight:
    """The weight of this rank, if the caller stated one.

    The weight is valid until the first call of the loss after gradients have been averaged.

    Attributes:
        stated: number of ranks * this rank's rows / all ranks' rows. None if divisors are observed
            instead.
    """

    stated: float | None = None
    _is_old = False

    def state(self, weight: float) -> None:
        self.stated, self._is_old = weight, False

    def age(self) -> None:
        """Record that gradients have been averaged."""
        self._is_old = True

    def forget_old(self) -> None:
        """Record a call of the loss. Drop the weight if gradients have been averaged with this
        weight."""
        if self._is_old:
            self.stated = None


class Reduction:
    """One mean or sum over this rank's rows.

    Attributes:
        divisor: the divisor on this rank; None for a sum.
        factor: the factor by which the gradient is multiplied. It is 1 until the divisors of all
            ranks are known.
    """

    def __init__(self, divisor: float | None, weight: Weight) -> None:
        self.divisor = divisor
        self.factor = 1.0
        self._weight = weight

    def share(self, total: float, ranks: int) -> None:
        """Compute the factor from the sum of all ranks' divisors."""
        if self.divisor is None:
            self.factor = float(ranks)
        else:
            self.factor = ranks * self.divisor / total if total else 0.0

    def scale(self, gradient: Tensor) -> Tensor:
        """Return the gradient of the mean, weighted for the average over all ranks."""
        return gradient if self._weight.stated is not None else gradient * self.factor

    def scale_node(self, gradients: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (self.scale(gradients[0]), *gradients[1:])


class Call:
    """One call of a loss with gradients enabled, by code outside the loss."""

    def __init__(self, weight: Weight) -> None:
        self.reductions: list[Reduction] = []
        self.is_masked = False
        self.reason: str | None = None
        self._weight = weight
        self._nodes: dict[Any, Reduction] = {}

    def reduce(self, reduce: Callable[..., Tensor], loss: Tensor, how: str) -> Tensor:
        """Return TorchRL's ``reduce(loss, reduction=how)``, and note its divisor."""
        result = reduce(loss, reduction=how)
        if not result.requires_grad or how not in ("mean", "sum"):
            return result
        divisor = None
        if how == "mean":
            with torch.no_grad():  # to get the divisor, sum ones with the same mask and weights
                divisor = float(reduce(torch.ones_like(loss), reduction="sum"))
            self.is_masked |= divisor != loss.numel()
            if divisor == 0:
                # The mean over no rows may be NaN, and NaN times zero would still be NaN.
                result = loss.masked_fill(torch.ones_like(loss, dtype=torch.bool), 0).sum()
        reduction = self._new(result.grad_fn, divisor)
        result.register_hook(reduction.scale)
        return result

    def refuse(self, reason: str) -> None:
        self.reason = self.reason or reason

    def trace(self, output: Tensor, *, sums: bool) -> str | None:
        """Find the reductions of which ``output`` is a linear function.

        Returns:
            None, or the reason why ``output`` cannot be traced back to reductions.
        """
        stack, seen = [output.grad_fn], set()
        while stack:
            node = stack.pop()
            if node is None or node in seen or node in self._nodes:
                continue
            seen.add(node)
            name = node.name()
            inputs = [inner for inner, _ in node.next_functions]
            if (divisor := _divisor(node, name)) is not None:
                reduction = self._new(node, divisor)
                node.register_prehook(reduction.scale_node)
            elif sums and _is_sum(node, name):
                node.register_prehook(self._new(node, None).scale_node)
            elif name in _LINEAR:
                stack.extend(inputs)
            elif name == "MulBackward0" and sum(inner is not None for inner in inputs) == 1:
                stack.extend(inputs)
            elif name == "DivBackward0" and (len(inputs) == 1 or inputs[1] is None):
                stack.append(inputs[0])
            else:
                return f"it is not a sum of means over rows (its graph contains a {name})"
        return None

    def _new(self, node: Any, divisor: float | None) -> Reduction:
        reduction = self._nodes[node] = Reduction(divisor, self._weight)
        self.reductions.append(reduction)
        return reduction


def _divisor(node: Any, name: str) -> float | None:
    """Return the divisor if ``node`` is a mean over all elements, else None."""
    if name == "MeanBackward0":
        return float(node._saved_self_sym_numel)
    if name == "MeanBackward1":
        sizes = node._saved_self_sym_sizes
        # torch saves dimensions as unsigned numbers, for example -1 as 2 ** 64 - 1.
        dims = {dim - 2**64 if dim >= 2**63 else dim for dim in node._saved_dim}
        dims = {dim % len(sizes) for dim in dims}
        kept = [size for dim, size in enumerate(sizes) if dim not in dims]
        return float(node._saved_self_sym_numel) if all(size == 1 for size in kept) else None
    if name == "MseLossBackward0" and node._saved_reduction == _MEAN:
        return float(node._saved_self.numel())
    return None


def _is_sum(node: Any, name: str) -> bool:
    """Whether ``node`` is a sum over all elements."""
    return name == "SumBackward0" or (name == "MseLossBackward0" and node._saved_reduction == _SUM)


def leaves(outputs: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield the tensors in which backward passes from ``outputs`` would accumulate gradients."""
    stack, seen = [output.grad_fn for output in outputs], set()
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.name() == "torch::autograd::AccumulateGrad":
            yield node.variable  # type: ignore[attr-defined]  # nodes with this name have it
        stack.extend(inner for inner, _ in node.next_functions)


def map_outputs(
    result: Any, change: Callable[[str, Tensor], Tensor], part: str, skip: Any = None
) -> Any:
    """Return ``result``, with each tensor that has a gradient replaced by ``change(part, tensor)``.

    The keys of TensorDicts and dicts name the parts. These containers are changed in place, except
    ``skip``, the input of the loss.
    """
    if result is skip:
        return result
    if isinstance(result, Tensor):
        return result if result.grad_fn is None else change(part, result)
    if is_tensor_collection(result):
        with result.unlock_():
            for key in list(result.keys(include_nested=True, leaves_only=True)):
                value = result.get(key)
                if isinstance(value, Tensor) and value.grad_fn is not None:
                    result.set(key, change(key if isinstance(key, str) else key[-1], value))
    elif isinstance(result, dict):
        for key, value in result.items():
            result[key] = map_outputs(value, change, str(key), skip)
    elif isinstance(result, (tuple, list)):
        mapped = [map_outputs(value, change, part, skip) for value in result]
        return type(result)(*mapped) if hasattr(result, "_fields") else type(result)(mapped)
    return result


# ---- rules for TorchRL's classes

Rule = Callable[[LossModule, Call, str], "str | None"]


def _by_row(loss: LossModule, call: Call, part: str) -> str | None:
    """Accept every part, because each row is computed independently."""
    return None


def _cql(loss: LossModule, call: Call, part: str) -> str | None:
    if part in ("loss_actor", "loss_actor_bc", "loss_qvalue", "loss_alpha"):
        return None
    if part in ("actor_loss", "actor_bc_loss", "q_loss", "alpha_loss"):
        return None
    if part not in ("loss_cql", "cql_loss"):
        return "alpha_prime is multiplied by a mean over this rank's rows"
    return (
        "the mask applies to only one of the two summands of this part" if call.is_masked else None
    )


def _gail(loss: LossModule, call: Call, part: str) -> str | None:
    return (
        ("the loss's gradient penalty is a separate mean in each row")
        if loss.use_grad_penalty
        else None
    )


def _rnd(loss: LossModule, call: Call, part: str) -> str | None:
    return None if loss.obs_rms is None else "the loss's obs_rms has seen this rank's rows only"


def _td3_bc(loss: LossModule, call: Call, part: str) -> str | None:
    if part not in ("loss_qvalue", "qvalue_loss"):
        return "the actor's lambda is a mean over this rank's rows"
    return None


# Each class (but not its subclasses) has a rule. The rule refuses the parts of the loss that
# combine several rows before the reduction. tests/learn/test_classes.py compares the gradients of
# each class with those of one process that has all rows.
KNOWN: dict[type[LossModule], Rule] = {
    **dict.fromkeys(
        (
            objectives.A2CLoss,
            objectives.ACTLoss,
            objectives.BCLoss,
            objectives.ClipPPOLoss,
            objectives.CrossQLoss,
            objectives.DDPGLoss,
            objectives.DQNLoss,
            objectives.DTLoss,
            objectives.DiffusionBCLoss,
            objectives.DiscreteCQLLoss,
            objectives.DiscreteIQLLoss,
            objectives.DiscreteSACLoss,
            objectives.DistributionalDQNLoss,
            objectives.IPPOLoss,
            objectives.IQLLoss,
            objectives.KLPENPPOLoss,
            objectives.MAPPOLoss,
            objectives.OnlineDTLoss,
            objectives.PPOLoss,
            objectives.QMixerLoss,
            objectives.REDQLoss,
            objectives.ReinforceLoss,
            objectives.SACLoss,
            objectives.TD3Loss,
            objectives.TQCLoss,
            objectives.WorldModelLoss,
        ),
        _by_row,
    ),
    objectives.CQLLoss: _cql,
    objectives.GAILLoss: _gail,
    objectives.RNDLoss: _rnd,
    objectives.TD3BCLoss: _td3_bc,
}

_OWN: set[type[LossModule]] = set()
_Class = TypeVar("_Class", bound=type[LossModule])


def computes_each_row(loss_class: _Class) -> _Class:
    """A decorator for loss classes of this package. The decorator declares that the class computes
    nothing over several rows before its reductions."""
    _OWN.add(loss_class)
    return loss_class


_ESTIMATORS = (
    estimators.GAE,
    estimators.MultiAgentGAE,
    estimators.TD0Estimator,
    estimators.TD1Estimator,
    estimators.TDLambdaEstimator,
    estimators.VTrace,
)


def refusal(loss_class: type[LossModule], loss: LossModule, call: Call, part: str) -> str | None:
    """Return why the ranks' weights cannot be computed from the divisors of a part of the loss, or
    None if they can."""
    rule = _by_row if loss_class in _OWN else KNOWN.get(loss_class)
    if rule is None:
        return (
            f"{loss_class.__name__} is not one of the TorchRL losses that are known to compute "
            "each row by itself"
        )
    replaced = [name for name in vars(loss) if inspect.isfunction(getattr(loss_class, name, None))]
    if replaced:
        return f"this loss's {replaced[0]} was replaced"
    return call.reason or rule(loss, call, part)


def estimator_refusal(estimator: Any) -> str | None:
    """Return why a loss may not use this estimator, or None if it computes each row separately."""
    if type(estimator) not in _ESTIMATORS:
        return f"it is not known whether {type(estimator).__name__} computes each row by itself"
    for name in ("average_gae", "average_rewards", "average_adv"):
        if getattr(estimator, name, False):
            return f"{name}=True normalizes by statistics of this rank's rows"
    return None


# ---- statistics over all ranks

AddUp = Callable[[str, "list[float]"], "list[float]"]


def normalized(
    loss: PPOLoss, advantage: Tensor, tensordict: TensorDictBase, add_up: AddUp
) -> Tensor:
    """Return ``advantage`` as PPO normalizes it, by the mean and standard deviation over all ranks'
    rows.

    Args:
        add_up: a function that returns the sums of numbers over the ranks. All ranks must make the
            same calls of this function.
    """
    kept = {dim % advantage.ndim for dim in loss.normalize_advantage_exclude_dims}
    dims = [dim for dim in range(advantage.ndim) if dim not in kept]
    if not dims:
        return advantage
    mask = tensordict.get("shifted_valid", default=None)
    if mask is None:
        valid = torch.ones_like(advantage, dtype=torch.float64)
    else:
        valid = mask.reshape(mask.shape + (1,) * (advantage.ndim - mask.ndim))
        valid = valid.expand_as(advantage).double()
    values = advantage.detach().double() * valid
    own = torch.stack([x.sum(dims, keepdim=True) for x in (valid, values, values * values)])
    what = "the statistics of advantages" + ("" if mask is None else " with a mask")
    sums = torch.tensor(add_up(what, own.flatten().tolist()), dtype=torch.float64)
    count, total, squares = sums.view(own.shape).to(advantage.device)
    mean = total / count.clamp_min(1)
    squared = (squares - count * mean * mean).clamp_min(0)
    if mask is not None:
        deviation = (squared / count.clamp_min(1)).sqrt().clamp_min(1e-4)
    elif count.max() <= 1:
        return advantage
    else:
        deviation = (squared / (count - 1)).sqrt().clamp_min(torch.finfo(torch.float).resolution)
    return (advantage - mean.to(advantage.dtype)) / deviation.to(advantage.dtype)
