"""A TorchRL loss whose gradients are computed from the batches of all ranks."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from tensordict import TensorDictBase
from torch import Tensor, nn
from torchrl.modules import NoisyLinear, ValueNorm
from torchrl.objectives import KLPENPPOLoss, LossModule, PPOLoss, REDQLoss

from ..errors import ConfigurationError, DriftError
from ..weights import named_tensors, pack
from .gradients import GradientAverage
from .likeness import card, description
from .ranks import Ranks, backends
from .reductions import (
    Call,
    Weight,
    estimator_refusal,
    leaves,
    map_outputs,
    normalized,
    refusal,
)

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


if TYPE_CHECKING:  # _subclass combines the classes below with a loss class of TorchRL
    from torchrl.objectives import LossModule as _Loss
else:
    _Loss = object


class DistributedLoss(_Loss):
    """Turn a TorchRL loss into a loss of all ranks: ``loss = DistributedLoss(DQNLoss(...))``.

    Returns ``loss_module`` itself. The loss remains a ``DQNLoss`` with its attributes, parameters
    and ``state_dict`` keys, so target updaters, optimizers, ``set_keys`` and
    ``make_value_estimator`` work on it, before or after this call. (As with
    ``torch.distributed.fsdp.fully_shard``, the loss gets a new class, derived from its original
    class and this class.) The loss changes in these ways:

    - All ranks start from rank 0's parameters, targets and buffers. If parameters are added later,
      in the same way on all ranks, their gradients are also averaged, from the next call of the
      loss on.
    - After each backward pass, the gradients of the parameters that it reached are averaged over
      the ranks, no matter how the loss was computed (``loss(batch)``, ``loss.actor_loss(batch)``,
      one forward with several backward passes). Clip and step afterwards, as usual.
      ``torch.autograd.grad`` returns this rank's own gradients.
    - Each gradient equals that of a single process with all rows. For this, each rank weights each
      mean inside the loss by the divisor of the mean: the number of rows, the number of rows that a
      mask leaves, or the sum of importance weights. ``reduction="sum"`` sums over all ranks. The
      PPO losses normalize advantages by the statistics of all ranks.
    - If the loss cannot compute this gradient exactly, the backward pass raises with the reason.
      The reason may be a class that is not TorchRL's (including your own subclasses),
      ``reduction="none"``, or statistics of a batch such as ``average_rewards``. In these cases,
      state the weight of this rank: ``loss.set_rows(len(batch))``.
    - Terms that do not come from the loss, such as a penalty on parameters, have the same weight on
      each rank. Call ``backward()`` only on sums of losses, with or without coefficients. Any other
      function of losses, such as a square, raises no error but gives the ranks wrong weights.
    - ``loss.ranks`` has methods for decisions on which ranks must agree, and for work that only one
      rank should do.
    - ``with DistributedLoss(...) as loss:`` closes the loss at the end of the block. An exception
      in the block is also raised on the ranks that wait, as a ``RemoteError`` with its traceback.
      A ``DeadlineError`` or ``PeerLostError`` keeps its type and message, but not its traceback.

    Every rank must make the same calls of the loss, of ``set_rows`` and of ``ranks``, and run the
    same backward passes, in the same order. (Under ``torch.no_grad()`` the calls of the loss may
    differ.) Each of these calls blocks until all ranks have made the same call, on the CPU for at
    most ``timeout_s``, and raises the errors of :class:`~torchrl_dist.learn.Ranks`. A rank without
    rows calls the loss with an empty batch. If you load a state dict, do so before the loss is
    distributed, or afterwards on all ranks.

    Args:
        loss_module: a loss that every rank builds in the same way, on the device where it will
            stay.
        group: a torch.distributed group. The default is the group of all processes. A single
            process needs no group, and its gradients do not change.
        timeout_s: the longest wait for other ranks.

    Raises:
        ConfigurationError: the ranks' losses differ; a layer has no shape yet; the loss keeps
            statistics of this rank's rows (a batch norm, a ValueNorm, KLPENPPOLoss's adaptive
            ``beta``); a parameter belongs to another distributed loss; the group has no backend for
            the loss's device; two ranks use one GPU with NCCL; or there are several processes but
            no torch.distributed group.

    Example:
        >>> from torchrl.modules import MLP, QValueActor
        >>> from torchrl.objectives import DQNLoss
        >>> actor = QValueActor(MLP(4, 2), in_keys=["observation"], action_space="categorical")
        >>> loss = DistributedLoss(DQNLoss(actor, action_space="categorical"))
        >>> isinstance(loss, DQNLoss), loss.ranks.size  # this process alone
        (True, 1)
    """

    ranks: Ranks
    _gradients: GradientAverage
    _weight: Weight
    _call: Call | None
    _likeness: str | None
    _keepers: list[nn.Module]  # modules with statistics, which must stay in eval mode
    _is_closed: bool

    def __new__(
        cls,
        loss_module: LossModule,
        *,
        group: dist.ProcessGroup | None = None,
        timeout_s: float = 300.0,
    ) -> Any:
        if not isinstance(loss_module, LossModule):
            raise ConfigurationError(
                f"got {type(loss_module).__name__}, expected a torchrl.objectives.LossModule"
            )
        if isinstance(loss_module, DistributedLoss):
            raise ConfigurationError(
                f"this {type(loss_module).__name__} is distributed already; use it as it is"
            )
        _refuse_statistics(loss_module)
        keepers = [m for _, m in _modules_of(loss_module) if _statistics_in(m)]
        ranks = Ranks(group, timeout_s=timeout_s)
        weight = Weight()
        gradients = GradientAverage(ranks, after=weight.age)
        if ranks.size > 1:
            _compare(loss_module, ranks)
            _take_from_first(loss_module, ranks)
            gradients.attach(dict(loss_module.named_parameters()))
        loss_class: Any = type(loss_module)
        loss_module.__class__ = _subclass(loss_class)
        loss_module.ranks = ranks
        loss_module._gradients = gradients
        loss_module._weight = weight
        loss_module.__dict__["_call"] = None
        loss_module.__dict__["_likeness"] = None
        loss_module.__dict__["_keepers"] = keepers
        loss_module._is_closed = False
        return loss_module

    def __init__(self, loss_module: LossModule, **_: Any) -> None:
        # Python calls this method after __new__. The loss must not be built a second time.
        pass

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Only accumulate this rank's gradients in this block, and average nothing.

        The next backward pass outside the block averages the accumulated gradients. Divide each
        loss by the number of passes, as is usual when gradients are accumulated.
        """
        return self._gradients.paused()

    def set_rows(self, rows: float | Tensor) -> None:
        """Give this rank the weight ``rows`` (a count >= 0) in the next backward passes.

        Gradients are then means over the ranks, weighted by ``rows`` instead of the observed
        divisors. The weight is dropped at the first call of the loss after gradients have been
        averaged.

        Call this method on all ranks before the backward pass. Blocks until all ranks have called
        it.

        Raises:
            ConfigurationError: ``rows`` is not a finite count >= 0, or is 0 on all ranks.
        """
        count = float(rows)
        if not 0 <= count < float("inf"):
            raise ConfigurationError(f"set_rows({rows}): expected a finite count >= 0")
        total = self.ranks.add_up("set_rows", [count])[0]
        if not total:
            raise ConfigurationError(
                "all ranks called set_rows(0), but at least one rank must have rows; skip this "
                "update on all ranks"
            )
        self._weight.state(self.ranks.size * count / total)

    def check_drift(self) -> str:
        """Compare all parameters, targets and buffers between ranks, and return their checksum.

        Blocks until all ranks have called this method. State other than tensors, and the noise of
        NoisyLinear layers, may differ between ranks and is not compared.

        Raises:
            DriftError: some tensors differ between ranks. The error names the tensors and ranks.
        """
        noise = _noise_of(self)
        tensors = named_tensors(self).items()
        digests = {name: _digest(tensor) for name, tensor in tensors if name not in noise}
        told = self.ranks.exchange(digests, "the comparison of parameters")
        differing = {
            name: [i for i, theirs in enumerate(told) if theirs.get(name) != told[0].get(name)]
            for name in {name for theirs in told for name in theirs}
        }
        differing = {name: ranks for name, ranks in sorted(differing.items()) if ranks}
        if differing:
            shown = "; ".join(f"{n} (ranks {r})" for n, r in list(differing.items())[:5])
            raise DriftError(
                f"{len(differing)} of {len(digests)} tensors differ from rank 0's: {shown}. Every "
                "rank must take the same steps: use equal learning rates and numbers of updates, "
                "clip gradients after backward(), and use no modules that keep statistics of a "
                "rank's own batches.",
                names=tuple(differing),
            )
        return hashlib.blake2b("".join(digests.values()).encode(), digest_size=8).hexdigest()

    def close(self) -> None:
        """Stop averaging, so that another loss may use the networks. May be called repeatedly.

        Afterwards, call the loss only under ``torch.no_grad()``.
        """
        self._is_closed = True
        self._gradients.detach()

    def __enter__(self) -> Any:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            self.ranks.report(error)
        self.close()

    # ---- methods that TorchRL's losses call

    def _reduce_loss(
        self,
        loss: Tensor,
        tensordict: TensorDictBase | None = None,
        *,
        mask: Tensor | None = None,
        reduction: str | None = None,
        weights: Tensor | None = None,
    ) -> Tensor:
        reduce = functools.partial(
            super()._reduce_loss, tensordict=tensordict, mask=mask, weights=weights
        )
        how = self.reduction if reduction is None else reduction
        if self._call is None:
            return reduce(loss, reduction=how)
        return self._call.reduce(reduce, loss, how)

    @property
    def value_estimator(self) -> Any:
        estimator = super().value_estimator
        if self._call is not None and (reason := estimator_refusal(estimator)):
            self._call.refuse(reason)
        return estimator

    @value_estimator.setter
    def value_estimator(self, value: Any) -> None:
        self._value_estimator = value
        self._forget_likeness()

    # ---- methods that change what must be equal on all ranks

    def make_value_estimator(self, *args: Any, **kwargs: Any) -> Any:
        self._forget_likeness()
        return super().make_value_estimator(*args, **kwargs)

    def set_keys(self, **kwargs: Any) -> None:
        self._forget_likeness()
        super().set_keys(**kwargs)

    def _forget_likeness(self) -> None:
        """Make the next call of the loss compare the ranks' value estimators and keys."""
        self.__dict__["_likeness"] = None

    def _description(self) -> dict[str, str]:
        """Describe only what may have changed since ``__new__``, which compared everything."""
        kinds = ("value_type", "the key", "value_estimator")
        return {name: text for name, text in description(self).items() if name.startswith(kinds)}

    def _digest_of_likeness(self) -> str:
        if self._likeness is None:
            text = repr(sorted(self._description().items())).encode()
            self.__dict__["_likeness"] = hashlib.blake2b(text, digest_size=8).hexdigest()
        return str(self._likeness)

    def _compare_again(self) -> None:
        """Raise an error that names the difference between the ranks' losses. All ranks call this
        method once they notice that their losses differ."""
        self._gradients.compare()
        _refuse_difference(
            self.ranks.exchange(self._description(), "the comparison of the ranks' losses")
        )

    # ---- methods that change parameters

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        result = super()._apply(*args, **kwargs)  # .to(), .cuda() and .double() call _apply()
        self._attach_again()
        return result

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        result = super().load_state_dict(*args, **kwargs)
        self._attach_again()  # attach again, because assign=True replaces parameters
        return result

    def _attach_again(self) -> None:
        if self.ranks.size > 1 and not self._is_closed:
            self._gradients.attach(dict(self.named_parameters()))

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ConfigurationError(
            "a distributed loss cannot be copied or pickled, because it is connected to the other "
            "ranks: copy or save its state_dict()"
        )


class _NormalizedByAll(_Loss):
    """Added to PPO losses: normalizes advantages by the statistics of all ranks."""

    def _maybe_normalize_advantage(
        self, advantage: Tensor, tensordict: TensorDictBase, *, update_norm: bool
    ) -> Tensor:
        if self._call is None or self.advantage_norm is not None or not self.normalize_advantage:
            return super()._maybe_normalize_advantage(
                advantage, tensordict, update_norm=update_norm
            )
        if 0 in {dim % advantage.ndim for dim in self.normalize_advantage_exclude_dims}:
            self._call.refuse("normalize_advantage_exclude_dims excludes the dimension of rows")
            return advantage
        return normalized(self, advantage, tensordict, self.ranks.add_up)


class _DrawnByFirst(_Loss):
    """Added to REDQLoss: all ranks use the target networks that rank 0 draws.

    Each call of REDQLoss draws some of the target networks. All ranks must use the same networks,
    because a single process would use the same networks for all rows.
    """

    def __getattr__(self, item: str) -> Any:
        value = super().__getattr__(item)
        if item == "target_qvalue_network_params" and self.__dict__.get("_call") is not None:
            return _Drawn(value, self.ranks)
        return value


class _Drawn:
    """Parameters of several networks. An index into these parameters is replaced by rank 0's
    index."""

    def __init__(self, networks: Any, ranks: Ranks) -> None:
        self._networks, self._ranks = networks, ranks

    def __getitem__(self, index: Tensor) -> Any:
        own = index.tolist() if self._ranks.is_first else [0] * len(index)
        drawn = self._ranks.add_up("the choice of target networks", own)
        return self._networks[index.new_tensor(drawn)]


@functools.cache
def _subclass(loss_class: type[LossModule]) -> type:
    """Return ``loss_class`` with the additions of :class:`DistributedLoss`.

    Reductions are observed in every method that returns losses: in ``forward``, and in methods
    whose names end with "loss" or begin with "loss_", as the names of TorchRL's loss methods do.
    """
    methods = {
        name: _observed(getattr(loss_class, name), loss_class)
        for name in dir(loss_class)
        if (name == "forward" or name.endswith("loss") or name.startswith("loss_"))
        and not name.startswith("_")
        and inspect.isfunction(inspect.getattr_static(loss_class, name))
    }
    added: tuple[type, ...] = (_NormalizedByAll,) if issubclass(loss_class, PPOLoss) else ()
    if issubclass(loss_class, REDQLoss):
        added = (_DrawnByFirst,)
    metaclass: Any = type(loss_class)
    return metaclass(
        f"Distributed{loss_class.__name__}",
        (DistributedLoss, *added, loss_class),
        {**methods, "__module__": __name__},
    )


def _observed(method: Callable[..., Any], loss_class: type[LossModule]) -> Callable[..., Any]:
    name = method.__name__

    # This function communicates with other ranks, so it cannot be compiled. Compiled networks that
    # the method calls stay compiled.
    @torch.compiler.disable
    @functools.wraps(method)
    def observed(self: Any, *args: Any, **kwargs: Any) -> Any:
        # forward() calls the other methods, which must not be observed again.
        if self._call is not None or self.ranks.size == 1 or not torch.is_grad_enabled():
            return method(self, *args, **kwargs)
        if self._is_closed:
            raise ConfigurationError(
                "this distributed loss was closed, so gradients would no longer be averaged: use "
                "torch.no_grad(), or distribute a new loss"
            )
        if self._gradients.is_outdated(self.parameters()):
            self._attach_again()
        _refuse_training(self)
        self._weight.forget_old()
        call = self.__dict__["_call"] = Call(self._weight)
        try:
            result = method(self, *args, **kwargs)
        except Exception as error:
            if _has_no_rows([*args, *kwargs.values()]):
                raise ConfigurationError(
                    f"rank {self.ranks.index} has no rows, and {loss_class.__name__}.{name} "
                    f"cannot be computed without rows ({type(error).__name__}: {error}). Give "
                    "each rank at least one row, or use loss.ranks.any(...) to skip the update on "
                    "all ranks"
                ) from error
            raise
        finally:
            self.__dict__["_call"] = None
        _refuse_training(self)  # check again, because CrossQLoss's methods call train()
        if name == "forward" and not args and isinstance(result, tuple):
            keys = getattr(self, "out_keys", ())
            # The arguments were passed by keyword, so the tuple has the order of out_keys.
            if len(keys) == len(result):
                named = dict(zip(map(str, keys), result, strict=True))
                return tuple(_shared(self, loss_class, call, name, named, None).values())
        batch = args[0] if args else kwargs.get("tensordict")
        return _shared(self, loss_class, call, name, result, batch)

    return observed


def _has_no_rows(inputs: list[Any]) -> bool:
    sizes = [
        value.batch_size if isinstance(value, TensorDictBase) else value.shape
        for value in inputs
        if isinstance(value, (Tensor, TensorDictBase))
    ]
    return any(0 in size for size in sizes)


def _shared(
    loss: Any, loss_class: type[LossModule], call: Call, name: str, result: Any, batch: Any
) -> Any:
    """Return the result of a call, with gradients weighted for the average over all ranks."""
    outputs: list[tuple[Tensor, str | None]] = []
    sums = getattr(loss, "reduction", None) == "sum"

    def watch(part: str, output: Tensor) -> Tensor:
        reason = refusal(loss_class, loss, call, part) or call.trace(output, sums=sums)
        outputs.append((output, reason and f"{part} of {loss_class.__name__}: {reason}"))
        # Put the hook on a view, because a hook on the output itself would also be called for
        # gradients that come from other parts of the loss.
        shown = output.view_as(output)
        shown.register_hook(
            functools.partial(_passed, loss._gradients, loss._weight, outputs[-1][1])
        )
        return shown

    result = map_outputs(result, watch, name, skip=batch)
    _refuse_foreign(loss, [output for output, _ in outputs])
    own = [reduction.divisor or 0.0 for reduction in call.reductions]
    sums_of_all = loss.ranks.add_up(
        f"a call of {name}",
        own,
        details=f"{loss._gradients.digest()} {loss._digest_of_likeness()}, {len(own)} means",
        compare=loss._compare_again,
        agreed=loss._gradients.digest(),
    )
    for reduction, total in zip(call.reductions, sums_of_all, strict=True):
        reduction.share(total, loss.ranks.size)
    return result


def _passed(
    gradients: GradientAverage, weight: Weight, reason: str | None, gradient: Tensor
) -> Tensor | None:
    """Handle a backward pass that reaches a part of the loss."""
    gradients.begin()
    if weight.stated is not None:
        # Without rows, the gradient may be NaN, and NaN times zero would still be NaN.
        return gradient * weight.stated if weight.stated else torch.zeros_like(gradient)
    if reason is not None:
        raise ConfigurationError(
            f"{reason}, so the gradient over the rows of all ranks cannot be computed. On all "
            "ranks, call set_rows(rows) before backward(), with each rank's number of rows as its "
            "weight."
        )
    return None


def _refuse_foreign(loss: LossModule, outputs: list[Tensor]) -> None:
    """Raise if a gradient reaches a parameter that belongs to the loss's networks, but not to the
    loss."""
    mine = {id(parameter) for parameter in loss.parameters()}
    for leaf in leaves(outputs):
        if isinstance(leaf, nn.Parameter) and id(leaf) not in mine:
            for name, network in loss.__dict__.items():
                if not isinstance(network, nn.Module):
                    continue
                for path, parameter in network.named_parameters(name):
                    if parameter is leaf:
                        raise ConfigurationError(
                            f"{path} was added to its network after the loss was built, so the "
                            "loss does not train it: build and distribute the loss with the whole "
                            "network"
                        )


def _modules_of(loss: LossModule) -> Iterator[tuple[str, nn.Module]]:
    """Yield the loss, its submodules and its networks, by name."""
    # These networks are not submodules of the loss (``likeness._modules``).
    networks = {k: v for k, v in loss.__dict__.items() if isinstance(v, nn.Module)}
    for name, network in {"": loss, **networks}.items():
        yield from network.named_modules(prefix=name)


def _refuse_statistics(loss: LossModule) -> None:
    """Raise if a call of the loss would update a tensor from this rank's rows alone."""
    for path, module in _modules_of(loss):
        if module.training and (what := _statistics_in(module)):
            where = f"{path} ({type(module).__name__})" if path else type(module).__name__
            raise ConfigurationError(f"{where} {what}")


def _refuse_training(loss: Any) -> None:
    """Raise if a module that was in eval mode when the loss was distributed is in training mode
    now."""
    if any(module.training for module in loss._keepers):
        _refuse_statistics(loss)


def _statistics_in(module: nn.Module) -> str | None:
    """Return what is wrong with the module and what to do, or None."""
    if isinstance(module, nn.SyncBatchNorm):
        return None
    if getattr(module, "running_mean", None) is not None or isinstance(module, _BATCH_NORMS):
        return (
            "would normalize each rank's rows separately and keep statistics of its own. "
            "Convert the network with torch.nn.SyncBatchNorm.convert_sync_batchnorm() before the "
            "loss is built (GPUs only), freeze it with eval(), or use LayerNorm."
        )
    if isinstance(module, ValueNorm):
        return (
            "would scale by the values that this rank alone has seen. Before you call the loss, "
            "scale rewards or advantages by statistics of all ranks (ranks.means)."
        )
    if isinstance(module, KLPENPPOLoss) and not module.increment == module.decrement == 1:
        return (
            "adapts beta to the divergence of this rank's rows. Build the loss with increment=1 "
            "and decrement=1, and set loss.beta yourself from ranks.means({'kl': ...})."
        )
    return None


def _compare(loss: LossModule, ranks: Ranks) -> None:
    """Raise unless all ranks built the same loss.

    Tensors must have equal names, types and shapes, and the same tensors must be frozen, because
    gloo aborts the process if sizes in a collective differ.
    """
    tensors = named_tensors(loss)
    # Only the first difference is shown. Differences of class come first, because they explain
    # other differences.
    mine = {**description(loss), **{name: card(tensor) for name, tensor in tensors.items()}}
    devices = sorted({str(t.device) for t in tensors.values()})
    assert ranks.group is not None
    served = backends(ranks.group)
    _refuse_devices(devices, served)
    nccl = "nccl" in served.values()
    cards = ranks.exchange([mine, devices, nccl], "the comparison of the ranks' losses")
    _refuse_difference([card[0] for card in cards])
    if nccl:
        _compare_devices(
            [(who.host, card[1]) for who, card in zip(ranks.members, cards, strict=True)]
        )


def _refuse_devices(devices: Iterable[str], backends: Mapping[str, str]) -> None:
    for device in devices:
        if device.partition(":")[0] not in backends:
            raise ConfigurationError(
                f"the loss has tensors on {device}, but the torch.distributed group works on "
                f"{sorted(backends)} only ({dict(backends)}). Move the loss first, or initialize "
                "the group with 'cpu:gloo,cuda:nccl'."
            )


def _refuse_difference(ranks: list[Mapping[str, str]]) -> None:
    """Raise for the first name whose value is different or missing on a rank."""
    for index, theirs in enumerate(ranks):
        for name in {**ranks[0], **theirs}:
            first, other = ranks[0].get(name, "missing"), theirs.get(name, "missing")
            if first != other:
                raise ConfigurationError(
                    f"{name} is {first} on rank 0 and {other} on rank {index}; "
                    "expected the same loss on every rank. Check what its constructor depends "
                    "on: configuration, environment variables, arguments."
                )


def _compare_devices(ranks: list[tuple[str, list[str]]]) -> None:
    seen: dict[tuple[str, str], int] = {}
    for index, (host, devices) in enumerate(ranks):
        for device in devices:
            other = seen.setdefault((host, device), index)
            if device.startswith("cuda") and other != index:
                raise ConfigurationError(
                    f"ranks {other} and {index} on {host} both have their loss on {device}, but "
                    "NCCL needs one GPU per rank. Call torch.cuda.set_device(int(os.environ["
                    "'LOCAL_RANK'])) first, and put the networks on 'cuda'."
                )


@torch.no_grad()
def _take_from_first(loss: LossModule, ranks: Ranks) -> None:
    """Copy rank 0's parameters, targets and buffers. State that is not a tensor is not copied."""
    tensors = {name: t for name, t in named_tensors(loss).items() if not _is_expanded(t)}
    packed = pack(tensors)
    data = packed.data.to(next(iter(tensors.values())).device) if tensors else packed.data
    if not ranks.is_first:
        data.zero_()
    ranks.all_reduce(data, "the copy of rank 0's parameters")
    packed.data.copy_(data)
    for name, tensor in packed.tensors().items():
        tensors[name].copy_(tensor)


def _noise_of(loss: LossModule) -> set[str]:
    """Return the names of the buffers into which layers draw noise."""
    found: dict[str, nn.Module] = {"": loss}
    # The loss keeps the tensors of functional networks under these names.
    for name, network in loss.__dict__.items():
        if isinstance(network, nn.Module):
            found |= {f"{name}_params.": network, f"target_{name}_params.": network}
    return {
        f"{prefix}{path}{'.' if path else ''}{buffer}"
        for prefix, network in found.items()
        for path, module in network.named_modules()
        if isinstance(module, NoisyLinear)
        for buffer in ("weight_epsilon", "bias_epsilon")
    }


def _is_expanded(tensor: Tensor) -> bool:
    """Whether ``tensor`` repeats one value. Such a tensor is a view of a parameter, and the
    parameter is copied anyway."""
    return any(n > 1 and step == 0 for n, step in zip(tensor.shape, tensor.stride(), strict=True))


def _digest(tensor: Tensor) -> str:
    data = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data
    return hashlib.blake2b(data, digest_size=8).hexdigest()
