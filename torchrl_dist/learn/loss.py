"""A TorchRL loss whose gradients, after each backward pass, are those of all ranks' batches."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from tensordict import TensorDictBase
from torch import Tensor, nn
from torchrl.modules import ValueNorm
from torchrl.objectives import KLPENPPOLoss
from torchrl.objectives.common import AUTO_LOSS_MASK_KEYS, LossModule

from ..errors import ConfigurationError, DriftError
from ..weights import named_tensors, pack
from .gradients import GradientAverage
from .ranks import Ranks

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


class DistributedLoss:
    """Makes a TorchRL loss one of all ranks: ``loss = DistributedLoss(DQNLoss(...))``.

    Returns ``loss_module`` itself, which stays what it was: a ``DQNLoss`` with its attributes,
    parameters and ``state_dict`` keys, so that target updaters, optimizers, ``set_keys`` and
    ``make_value_estimator`` work on it, before or after this call. (Its class becomes a subclass of
    its own and of this one, as ``torch.distributed.fsdp.fully_shard`` does it.) New are:

    - All ranks start from rank 0's parameters, targets and buffers.
    - After each backward pass, gradients are averaged over the ranks: those that the pass reached,
      wherever its loss came from (``loss(batch)``, ``loss.actor_loss(batch)``, one forward with
      several backward passes). Clip and step afterwards, as ever. ``torch.autograd.grad`` gives
      this rank's own.
    - A rank weighs as much as its batch has rows (valid ones, where ``loss_mask_key`` finds a
      mask; with their importance weights, where there are some, because TorchRL's losses divide by
      the sum of these). So the average is the gradient of one process on all rows, if the loss is a
      mean over rows. It is not for what is computed over a rank's rows first, as a normalized
      advantage: normalize over all rows before. With ``reduction="sum"`` all ranks weigh the same.
      Calls count whether or not they go backward: use ``torch.no_grad()`` for those that do not.
    - ``loss.ranks`` answers what ranks must agree on, and does what only one of them should.
    - ``with DistributedLoss(...) as loss:`` tells the waiting ranks the exception that leaves the
      block, with its traceback, and closes the loss.

    Every rank must run the same number of backward passes, between the same calls of ``ranks``.
    Each one blocks until all ranks have come, on the CPU for at most ``timeout_s``, and raises as
    :class:`Ranks` says. A state is loaded on every rank, or before this call.

    Args:
        loss_module: built alike on every rank, on the device where it will stay.
        group: a torch.distributed group; default: all its processes. A process that was started
            alone needs none, and nothing changes there.
        timeout_s: longest wait for other ranks.

    Raises:
        ConfigurationError: the ranks' losses differ, a layer has no shape yet, the loss keeps
            statistics of a rank's own rows (a batch norm, a ValueNorm, KLPENPPOLoss's adaptive
            ``beta``), a parameter belongs to another distributed loss, the group has no backend for
            the loss's device, two ranks use one GPU with NCCL, or there are several processes
            without a torch.distributed group.
    """

    ranks: Ranks
    _gradients: GradientAverage
    _inside: bool
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
            raise ConfigurationError(f"this {type(loss_module).__name__} is distributed already")
        _refuse_statistics(loss_module)
        ranks = Ranks(group, timeout_s=timeout_s)
        gradients = GradientAverage(ranks)
        if ranks.size > 1:
            _compare(loss_module, ranks)
            _take_from_first(loss_module, ranks)
            gradients.attach(dict(loss_module.named_parameters()))
        loss_module.__class__ = _subclass(type(loss_module))
        loss_module.ranks = ranks
        loss_module._gradients = gradients
        loss_module._inside = loss_module._is_closed = False
        return loss_module

    def __init__(self, loss_module: LossModule, **_: Any) -> None:
        # Python calls it after __new__; the loss must not be built a second time.
        pass

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Backward passes in this block only accumulate gradients on this rank; the next one
        outside averages the sum. Divide each loss by the number of passes, as ever."""
        return self._gradients.paused()

    def set_rows(self, rows: float | Tensor) -> None:
        """Let this rank weigh ``rows`` (a count >= 0) until the coming average, in place of what
        calls of the loss have counted since the last one: for losses that are not called with a
        TensorDict, or that are reduced by the caller."""
        self._gradients.set_weight(rows)

    def check_drift(self) -> str:
        """A checksum of all parameters, targets and buffers, after comparing it between ranks.

        Blocks until all ranks have come. State that is no tensor is each rank's own.

        Raises:
            DriftError: tensors differ between ranks; names them and the ranks.
        """
        digests = {name: _digest(tensor) for name, tensor in named_tensors(self).items()}
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
                "rank must take the same steps: equal learning rates and updates, gradients "
                "clipped after backward(), no statistics of a rank's own batches in buffers.",
                names=tuple(differing),
            )
        return hashlib.blake2b("".join(digests.values()).encode(), digest_size=8).hexdigest()

    def close(self) -> None:
        """Average nothing any more: its networks may be given to another loss. May be called
        again. From now on it is called under ``torch.no_grad()`` only."""
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

    # ---- what else changes parameters

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        result = super()._apply(*args, **kwargs)  # .to(), .cuda(), .double()
        self._attach_again()
        return result

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        result = super().load_state_dict(*args, **kwargs)
        self._attach_again()  # assign=True puts new parameters in place
        return result

    def _attach_again(self) -> None:
        if self.ranks.size > 1 and not self._is_closed:
            self._gradients.attach(dict(self.named_parameters()))

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ConfigurationError(
            "a distributed loss cannot be copied or pickled, because it belongs to its ranks: copy "
            "or save its state_dict()"
        )


@functools.cache
def _subclass(loss_class: type[LossModule]) -> type:
    """``loss_class`` with what :class:`DistributedLoss` adds, and rows counted in every method
    that returns losses: ``forward``, and those that TorchRL names so."""
    methods = {
        name: _counting(getattr(loss_class, name))
        for name in dir(loss_class)
        if (name == "forward" or name.endswith("loss") or name.startswith("loss_"))
        and not name.startswith("_")
        and inspect.isfunction(inspect.getattr_static(loss_class, name))
    }
    return type(loss_class)(
        f"Distributed{loss_class.__name__}",
        (DistributedLoss, loss_class),
        {**methods, "__module__": __name__},
    )


def _counting(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self._inside or self.ranks.size == 1:  # forward calls the others
            return method(self, *args, **kwargs)
        if self._is_closed and torch.is_grad_enabled():
            raise ConfigurationError(
                "this distributed loss was closed, so that its ranks would train apart: use "
                "torch.no_grad(), or distribute a new loss"
            )
        if self._gradients.is_outdated():
            self._attach_again()
        self.__dict__["_inside"] = True
        try:
            result = method(self, *args, **kwargs)
        finally:
            self.__dict__["_inside"] = False
        if torch.is_grad_enabled():
            batch = args[0] if args else kwargs.get("tensordict")
            self._gradients.weigh(_count_rows(self, batch))
        return result

    return counted


def _count_rows(loss: LossModule, batch: Any) -> float | Tensor:
    """What the losses' mean divides by: the count of rows, or the sum of their weights; 1 if that
    cannot be seen."""
    if not isinstance(batch, TensorDictBase) or getattr(loss, "reduction", "mean") == "sum":
        return 1.0
    key = loss.loss_mask_key
    keys = AUTO_LOSS_MASK_KEYS if key == "auto" else () if key is None else (key,)
    factors = [mask for key in keys if (mask := batch.get(key, default=None)) is not None]
    weight_key = getattr(loss.tensor_keys, "priority_weight", None)
    if weight_key is not None and loss.use_prioritized_weights in (True, "auto"):
        weights = batch.get(weight_key, default=None)
        if weights is not None:
            # TorchRL divides by the sum of the weights of the rows that it has, not by their count.
            factors.append(weights)
    if not factors:
        return float(batch.batch_size.numel())  # batch.numel() is 1 where it is empty
    return functools.reduce(torch.mul, _aligned(factors, batch.batch_dims)).sum()


def _aligned(factors: list[Tensor], batch_dims: int) -> list[Tensor]:
    """The same rows at the same place, as TorchRL aligns masks and weights with losses: a trailing
    dimension of one, like that of rewards, is dropped, and further ones are added at the end."""
    shapes = [list(factor.shape) for factor in factors]
    for shape in shapes:
        while len(shape) > max(batch_dims, 1) and shape[-1] == 1:
            shape.pop()
    dims = max(map(len, shapes))
    return [
        factor.reshape(shape + [1] * (dims - len(shape)))
        for factor, shape in zip(factors, shapes, strict=True)
    ]


def _refuse_statistics(loss: LossModule) -> None:
    """Raise if its calls would change tensors as this rank's rows have it."""
    # TorchRL keeps the networks out of the loss's modules, because it calls them with parameters
    # of its own.
    networks = {k: v for k, v in loss.__dict__.items() if isinstance(v, nn.Module)}
    for name, network in {"": loss, **networks}.items():
        for path, module in network.named_modules(prefix=name):
            if module.training and (what := _statistics_in(module)):
                where = f"{path} ({type(module).__name__})" if path else type(module).__name__
                raise ConfigurationError(f"{where} {what}")


def _statistics_in(module: nn.Module) -> str | None:
    """What is wrong with it, and what to do."""
    if isinstance(module, nn.SyncBatchNorm):
        return None
    if getattr(module, "running_mean", None) is not None or isinstance(module, _BATCH_NORMS):
        return (
            "would normalize each rank's rows by themselves and keep statistics of its own. "
            "Convert the network with torch.nn.SyncBatchNorm.convert_sync_batchnorm() before the "
            "loss is built (GPUs only), freeze it with eval(), or use LayerNorm."
        )
    if isinstance(module, ValueNorm):
        return (
            "would scale by what this rank has seen. Scale rewards or advantages before the loss, "
            "by statistics of all ranks (ranks.means)."
        )
    if isinstance(module, KLPENPPOLoss) and not module.increment == module.decrement == 1:
        return (
            "adapts beta to the divergence of this rank's rows. Build it with increment=1 and "
            "decrement=1, and set loss.beta yourself by ranks.means({'kl': ...})."
        )
    return None


def _compare(loss: LossModule, ranks: Ranks) -> None:
    """Raise unless all ranks hold tensors of the same names, types and shapes, frozen or not: with
    other sizes in a collective, gloo aborts the process."""
    tensors = named_tensors(loss)
    mine = {name: _card(tensor) for name, tensor in tensors.items()}
    devices = sorted({str(t.device) for t in tensors.values()})
    # Such as "cpu:gloo,cuda:nccl".
    config = str(dist.get_backend_config(ranks.group))
    backends = dict(entry.split(":") for entry in config.split(","))
    _refuse_devices(devices, backends)
    nccl = "nccl" in backends.values()
    cards = ranks.exchange([mine, devices, nccl], "the comparison of the ranks' losses")
    _compare_tensors([card[0] for card in cards])
    if nccl:
        _compare_devices(
            [(who.host, card[1]) for who, card in zip(ranks.members, cards, strict=True)]
        )


def _refuse_devices(devices: Iterable[str], backends: Mapping[str, str]) -> None:
    for device in devices:
        if device.partition(":")[0] not in backends:
            raise ConfigurationError(
                f"the loss has tensors on {device}, and the torch.distributed group works on "
                f"{sorted(backends)} only ({dict(backends)}). Move the loss first, or start the "
                "group with 'cpu:gloo,cuda:nccl'."
            )


def _card(tensor: Tensor) -> str:
    frozen = isinstance(tensor, nn.Parameter) and not tensor.requires_grad
    return f"{tensor.dtype} {list(tensor.shape)}{' (frozen)' if frozen else ''}"


def _compare_tensors(ranks: list[Mapping[str, str]]) -> None:
    for index, theirs in enumerate(ranks):
        for name in {**ranks[0], **theirs}:
            first, other = ranks[0].get(name, "missing"), theirs.get(name, "missing")
            if first != other:
                raise ConfigurationError(
                    f"{name} is {first} on rank 0 and {other} on rank {index}; expected the same "
                    "loss on every rank. Look at what its construction reads: configuration, "
                    "environment, arguments."
                )


def _compare_devices(ranks: list[tuple[str, list[str]]]) -> None:
    seen: dict[tuple[str, str], int] = {}
    for index, (host, devices) in enumerate(ranks):
        for device in devices:
            other = seen.setdefault((host, device), index)
            if device.startswith("cuda") and other != index:
                raise ConfigurationError(
                    f"ranks {other} and {index} on {host} both have their loss on {device}; NCCL "
                    "needs a GPU per rank. Call torch.cuda.set_device(int(os.environ['LOCAL_RANK'"
                    "])) first, and put the networks on 'cuda'."
                )


@torch.no_grad()
def _take_from_first(loss: LossModule, ranks: Ranks) -> None:
    """Copy rank 0's parameters, targets and buffers; state that is no tensor stays as it is."""
    tensors = {name: t for name, t in named_tensors(loss).items() if not _is_expanded(t)}
    packed = pack(tensors)
    data = packed.data.to(next(iter(tensors.values())).device) if tensors else packed.data
    if not ranks.is_first:
        data.zero_()
    ranks.all_reduce(data, "the copy of rank 0's parameters")
    packed.data.copy_(data)
    for name, tensor in packed.tensors().items():
        tensors[name].copy_(tensor)


def _is_expanded(tensor: Tensor) -> bool:
    """Whether it shows one value in several places: a view of a parameter that is copied anyway."""
    return any(n > 1 and step == 0 for n, step in zip(tensor.shape, tensor.stride(), strict=True))


def _digest(tensor: Tensor) -> str:
    data = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
    return hashlib.blake2b(data, digest_size=8).hexdigest()
