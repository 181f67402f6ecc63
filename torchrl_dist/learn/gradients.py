"""Averages the gradients of parameters over ranks, at the end of every backward pass.

DistributedDataParallel arms its reducer in the module's ``forward`` and expects one backward pass
that reaches every parameter. TorchRL's losses are used otherwise: ``loss.actor_loss(batch)`` does
not call ``forward``; the losses of one forward go backward one by one, each before its optimizer's
step; a delayed actor loss goes backward only sometimes. DistributedDataParallel then leaves
gradients as they were on each rank, or raises in a later forward. Here the parameters themselves
notice that a backward pass reached them, and its end averages what it reached, whoever called what.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import weakref
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.utils.weak import WeakTensorKeyDictionary

from ..errors import ConfigurationError
from .ranks import Ranks

# Which parameter is averaged by whom: two averages of one parameter would each use the weights of
# their own loss's calls, whichever of the losses went backward.
_owners = WeakTensorKeyDictionary()


class GradientAverage:
    """Attached to parameters, it leaves in each ``grad`` what one process would compute from the
    rows of all ranks, if the loss is a mean over rows:

        grad = sum_r weight_r * grad_r / sum_r weight_r,

    with what the rank's mean divides by as its weight: its count of rows, as a rule. ``grad_r`` is
    all that has been accumulated there; what was averaged before is the same on all ranks, and
    stays what it is.

    One collective per backward pass: the weight, a flag per parameter (reached by this rank or not)
    and all gradients travel in one buffer, so that ranks may reach different parameters.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._parameters: dict[str, nn.Parameter] = {}
        self._hooks: dict[str, torch.utils.hooks.RemovableHandle] = {}
        self._frozen: list[nn.Parameter] = []
        self._dtypes: list[torch.dtype] = []
        self._is_compared = False
        self._reached: set[str] = set()
        self._local = False
        self._weight: float | Tensor = 1.0
        self._weight_is_old = True
        self._buffer = torch.empty(0)
        self._views: list[Tensor] = []

    def attach(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """From now on average these and no others. Those that need no gradient are left out, until
        they do and this is called again.

        Raises:
            ConfigurationError: they lie on several devices, or another average has one of them.
        """
        for name, parameter in parameters.items():
            if self._is_taken(parameter):
                raise ConfigurationError(
                    f"{name} belongs to another distributed loss: close() that one first, or, to "
                    "train it with both, distribute one LossModule that calls both losses"
                )
        before = [(name, id(parameter)) for name, parameter in self._parameters.items()]
        for name, identity in before:
            if id(parameters.get(name)) != identity:
                self._release(name)
        for name, parameter in parameters.items():
            if parameter.requires_grad and name not in self._hooks:
                # Weak: torch's hooks are invisible to the garbage collector, so that parameters
                # and their average would keep one another for ever.
                note = functools.partial(_note, weakref.ref(self), name)
                self._hooks[name] = parameter.register_post_accumulate_grad_hook(note)
                _owners[parameter] = weakref.ref(self)
        self._parameters = {n: p for n, p in parameters.items() if n in self._hooks}
        self._frozen = [p for n, p in parameters.items() if n not in self._hooks]
        if self.is_outdated() or before != [(n, id(p)) for n, p in self._parameters.items()]:
            self._make_buffer()
            self._is_compared = False

    def detach(self) -> None:
        """Average nothing from now on."""
        for name in list(self._hooks):
            self._release(name)
        self._frozen, self._dtypes = [], []

    def is_outdated(self) -> bool:
        """Whether a parameter needs a gradient first now, or was moved or converted."""
        here = self._buffer.device
        return (
            any(parameter.requires_grad for parameter in self._frozen)
            or [parameter.dtype for parameter in self._parameters.values()] != self._dtypes
            or any(parameter.device != here for parameter in self._parameters.values())
        )

    def _is_taken(self, parameter: nn.Parameter) -> bool:
        def is_taken() -> bool:
            return _owners.get(parameter, lambda: None)() not in (None, self)

        if is_taken():
            gc.collect()  # a loss that nobody holds takes nothing, on each rank
        return is_taken()

    def _release(self, name: str) -> None:
        self._hooks.pop(name).remove()
        _owners.pop(self._parameters.pop(name), None)
        self._reached.discard(name)

    def weigh(self, rows: float | Tensor) -> None:
        """Count ``rows`` for this rank's weight; counts add up until gradients are averaged."""
        self._weight = rows if self._weight_is_old else self._weight + rows
        self._weight_is_old = False

    def set_weight(self, rows: float | Tensor) -> None:
        """Forget what has been counted since the last average, and count ``rows``."""
        self._weight_is_old = True
        self.weigh(rows)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Backward passes in this block only accumulate. The next one after it averages the sum."""
        before, self._local = self._local, True
        try:
            yield
        finally:
            self._local = before

    # ---- the end of a backward pass

    def note(self, name: str) -> None:
        """A gradient has been accumulated."""
        self._reached.add(name)
        # For each parameter, since nothing tells the first one of a pass from a later one (the
        # pass before may have raised half-way); only the first callback finds something to do.
        Variable._execution_engine.queue_callback(self._average)

    @torch.no_grad()
    def _average(self) -> None:
        if self._local or not self._reached:
            return
        if not self._is_compared:
            # With buffers of different sizes, gloo aborts the process.
            self._compare()
        parameters = list(self._parameters.values())
        # Reached earlier, by a pass that raised, and set to None since: not reached.
        reached = [n in self._reached and p.grad is not None for n, p in self._parameters.items()]
        self._reached.clear()
        buffer, count = self._buffer, len(parameters)
        header = torch.tensor([1.0, *map(float, reached)], dtype=buffer.dtype, device="cpu")
        buffer[: 1 + count].copy_(header)
        for (name, parameter), view in zip(self._parameters.items(), self._views, strict=True):
            # Also what this pass did not reach here: if another rank's did, the gradients that an
            # earlier pass left on all ranks must come out as they were.
            if parameter.grad is None:
                view.zero_()
            elif parameter.grad.is_sparse:
                raise ConfigurationError(
                    f"the gradient of {name} is sparse, which cannot be averaged here: build its "
                    "embedding with sparse=False"
                )
            else:
                view.copy_(parameter.grad)
        self._apply_weight(buffer, 1 + count)
        self._ranks.all_reduce(buffer, "the averaging of gradients")
        buffer[1 + count :].div_(buffer[0].clamp_min(torch.finfo(buffer.dtype).tiny))
        # The flags are read only where this rank lacks a gradient: on a GPU that waits for it.
        somewhere = reached if all(reached) else (buffer[1 : 1 + count] > 0).tolist()
        for parameter, view, there in zip(parameters, self._views, somewhere, strict=True):
            if not there:
                continue
            if parameter.grad is None:
                parameter.grad = torch.empty_like(parameter)
            parameter.grad.copy_(view)

    def _apply_weight(self, buffer: Tensor, start: int) -> None:
        """Multiply the gradients, from ``start`` on, by this rank's weight, which comes first."""
        self._weight_is_old = True
        weight, gradients = self._weight, buffer[start:]
        buffer[:1].fill_(weight)
        if not isinstance(weight, Tensor):
            # A mean over no rows is NaN, and NaN times zero as well.
            gradients.mul_(weight) if weight else gradients.zero_()
        else:
            weight = weight.to(buffer)
            gradients.copy_(torch.where(weight > 0, gradients * weight, torch.zeros_like(weight)))

    def _compare(self) -> None:
        """Raise unless all ranks train the same parameters; once after each change of them."""
        mine = {n: f"{p.dtype} {list(p.shape)}" for n, p in self._parameters.items()}
        for index, theirs in enumerate(self._ranks.exchange(mine, "the first averaging")):
            differing = sorted(n for n in {*mine, *theirs} if mine.get(n) != theirs.get(n))
            if differing:
                raise ConfigurationError(
                    f"this rank and rank {index} train different parameters, such as "
                    f"{differing[0]}: freeze, unfreeze and convert on all ranks alike"
                )
        self._is_compared = True

    def _make_buffer(self) -> None:
        devices = {parameter.device for parameter in self._parameters.values()}
        if len(devices) > 1:
            raise ConfigurationError(
                f"the loss has parameters on {sorted(map(str, devices))}; expected one device per "
                "rank"
            )
        sizes = [parameter.numel() for parameter in self._parameters.values()]
        self._dtypes = [parameter.dtype for parameter in self._parameters.values()]
        dtype = torch.float32  # at least: counts of rows do not fit into 16 bits
        dtype = functools.reduce(torch.promote_types, self._dtypes, dtype)
        device = devices.pop() if devices else torch.device("cpu")
        self._buffer = torch.zeros(1 + len(sizes) + sum(sizes), dtype=dtype, device=device)
        pieces = self._buffer[1 + len(sizes) :].split(sizes) if sizes else []
        self._views = [
            piece.view(parameter.shape)
            for piece, parameter in zip(pieces, self._parameters.values(), strict=True)
        ]


def _note(average: weakref.ref[GradientAverage], name: str, _: Tensor) -> None:
    if (alive := average()) is not None:
        alive.note(name)
