"""Average the gradients of parameters over ranks, at the end of every backward pass.

DistributedDataParallel prepares its reducer in the module's ``forward``, and expects one backward
pass per forward, which must reach every parameter. TorchRL's losses are used differently:
``loss.actor_loss(batch)`` does not call ``forward``. If one forward returns several losses, each
loss has its own backward pass, followed by a step of its own optimizer. A delayed actor loss has a
backward pass only in some updates. In these cases DistributedDataParallel does not average the
gradients, or raises in a later forward. In this module, hooks on the parameters record which
parameters a backward pass reaches. The gradients are averaged at the end of the pass, no matter
which method computed the loss.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import hashlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.utils.weak import WeakTensorKeyDictionary

from ..errors import ConfigurationError
from .likeness import card
from .ranks import Ranks

# The GradientAverage of each parameter. A parameter must not have two GradientAverages, because
# each backward pass would then average its gradient twice.
_owners = WeakTensorKeyDictionary()


class GradientAverage:
    """Average the ``grad`` of each attached parameter over the ranks, in place.

    The average covers the whole ``grad``, including gradients that earlier passes accumulated.
    Averaging these gradients again changes nothing, because they are already equal on all ranks.

    After a backward pass, each rank sends one buffer. The buffer holds all gradients, and for each
    parameter a flag that says whether the pass reached the parameter on this rank. The passes of
    different ranks may therefore reach different parameters.

    Args:
        after: a function to call after each average.
    """

    def __init__(self, ranks: Ranks, after: Callable[[], None] = lambda: None) -> None:
        self._ranks = ranks
        self._after = after
        self._parameters: dict[str, nn.Parameter] = {}
        self._hooks: dict[str, torch.utils.hooks.RemovableHandle] = {}
        self._frozen: list[nn.Parameter] = []
        self._identities: set[int] = set()
        self._dtypes: list[torch.dtype] = []
        self._reached: set[str] = set()
        self._local = False
        self._pass = -1
        self._versions: dict[str, int] | None = None
        self._pattern: list[bool] = []
        self._digest = ""
        self._buffer = torch.empty(0)
        self._views: list[Tensor] = []

    def attach(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Average the gradients of exactly these parameters from now on.

        Parameters that require no gradient are left out until a later call of this method finds
        that they require a gradient.

        Raises:
            ConfigurationError: the parameters are on several devices, or one of them is attached to
                another ``GradientAverage``.
        """
        for name, parameter in parameters.items():
            if self._is_taken(parameter):
                raise ConfigurationError(
                    f"{name} belongs to another distributed loss: close() that loss first. To "
                    "train this parameter with both losses, distribute one LossModule that calls "
                    "both losses"
                )
        before = [(name, id(parameter)) for name, parameter in self._parameters.items()]
        for name, identity in before:
            if id(parameters.get(name)) != identity:
                self._release(name)
        for name, parameter in parameters.items():
            if parameter.requires_grad and name not in self._hooks:
                # Use weak references, because otherwise parameters and their GradientAverage would
                # keep each other alive. The garbage collector would not free this cycle, because it
                # does not see torch's hooks.
                note = functools.partial(_note, weakref.ref(self), name)
                self._hooks[name] = parameter.register_post_accumulate_grad_hook(note)
                _owners[parameter] = weakref.ref(self)
        self._parameters = {n: p for n, p in parameters.items() if n in self._hooks}
        self._frozen = [p for n, p in parameters.items() if n not in self._hooks]
        self._identities = set(map(id, parameters.values()))
        if self.is_outdated() or before != [(n, id(p)) for n, p in self._parameters.items()]:
            self._make_buffer()
            self._digest = ""

    def detach(self) -> None:
        """Stop averaging."""
        for name in list(self._hooks):
            self._release(name)
        self._frozen, self._dtypes, self._identities = [], [], set()

    def is_outdated(self, parameters: Iterable[nn.Parameter] | None = None) -> bool:
        """Whether ``parameters`` differ from the attached parameters, or one of them was unfrozen,
        moved or converted since it was attached."""
        here = self._buffer.device
        return (
            (parameters is not None and set(map(id, parameters)) != self._identities)
            or any(parameter.requires_grad for parameter in self._frozen)
            or [parameter.dtype for parameter in self._parameters.values()] != self._dtypes
            or any(parameter.device != here for parameter in self._parameters.values())
        )

    def _is_taken(self, parameter: nn.Parameter) -> bool:
        def is_taken() -> bool:
            return _owners.get(parameter, lambda: None)() not in (None, self)

        if is_taken():
            # Free losses that are no longer referenced, because one of them may own the parameter.
            # Every rank does this at the same point.
            gc.collect()
        return is_taken()

    def _release(self, name: str) -> None:
        self._hooks.pop(name).remove()
        _owners.pop(self._parameters.pop(name), None)
        self._reached.discard(name)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Accumulate gradients without averaging them in this block. The next backward pass after
        the block averages the accumulated gradients."""
        before, self._local = self._local, True
        try:
            yield
        finally:
            self._local = before

    def digest(self) -> str:
        """Return a short hash of :meth:`describe`."""
        pattern = [parameter.requires_grad for parameter in self._parameters.values()]
        if not self._digest or pattern != self._pattern:
            self._pattern = pattern
            self._digest = hashlib.blake2b(
                repr(self.describe()).encode(), digest_size=8
            ).hexdigest()
        return self._digest

    def describe(self) -> dict[str, str]:
        """Return a description of each averaged parameter, by name. The description must be the
        same on all ranks."""
        return {name: card(parameter) for name, parameter in self._parameters.items()}

    # ---- a backward pass and its end

    def begin(self) -> None:
        """Record that a backward pass has reached the loss. May be called several times
        per pass."""
        if self._is_new_pass():
            self._versions = {name: p._version for name, p in self._parameters.items()}
        Variable._execution_engine.queue_callback(self._average)

    def note(self, name: str) -> None:
        """Record that a gradient has been accumulated."""
        if self._is_new_pass():  # the pass did not begin at an output of the loss
            self._versions = None
        self._reached.add(name)
        # The callback is queued for each parameter, because the first parameter of a pass cannot be
        # recognized if the previous pass raised before its end. Only the first callback of a pass
        # has an effect.
        Variable._execution_engine.queue_callback(self._average)

    def _is_new_pass(self) -> bool:
        before, self._pass = self._pass, torch._C._current_graph_task_id()
        return before != self._pass

    @torch.no_grad()
    def _average(self) -> None:
        before, self._versions = self._versions, None
        if before is not None:
            for name in sorted(self._reached):
                if self._parameters[name]._version != before.get(name):
                    raise ConfigurationError(
                        f"{name} was changed during the backward pass, before its gradient was "
                        "averaged: call the optimizer's step() after backward(), not in its hooks"
                    )
        if self._local or not self._reached:
            return
        parameters = list(self._parameters.values())
        # Check grad, too, because ``_reached`` may still name parameters of an earlier backward
        # pass that raised, and the grads of these parameters may be None now.
        reached = [n in self._reached and p.grad is not None for n, p in self._parameters.items()]
        self._reached.clear()
        buffer, count = self._buffer, len(parameters)
        buffer[:count].copy_(torch.tensor(list(map(float, reached)), device="cpu"))
        for (name, parameter), view in zip(self._parameters.items(), self._views, strict=True):
            # Include the gradients of parameters that this pass did not reach on this rank. If
            # another rank reached such a parameter, the average must include the gradient that
            # earlier passes accumulated on this rank.
            if parameter.grad is None:
                view.zero_()
            elif parameter.grad.is_sparse:
                raise ConfigurationError(
                    f"the gradient of {name} is sparse, and sparse gradients cannot be averaged: "
                    "build its embedding with sparse=False"
                )
            else:
                view.copy_(parameter.grad)
        digest = self.digest()
        self._ranks.all_reduce(
            buffer,
            "the averaging of gradients",
            details=digest,
            compare=self.compare,
            agreed=digest,
        )
        buffer[count:].div_(self._ranks.size)
        # Read the flags only if the pass did not reach every parameter on this rank, because
        # reading them waits for the work queued on a GPU.
        somewhere = reached if all(reached) else (buffer[:count] > 0).tolist()
        for parameter, view, there in zip(parameters, self._views, somewhere, strict=True):
            if not there:
                continue
            if parameter.grad is None:
                parameter.grad = torch.empty_like(parameter)
            parameter.grad.copy_(view)
        self._after()

    def compare(self) -> None:
        """Raise unless all ranks train the same parameters. Blocks until all ranks have called this
        method."""
        ranks = self._ranks.exchange(self.describe(), "the comparison of parameters")
        mine = self.describe()
        for index, theirs in enumerate(ranks):
            differing = sorted(n for n in {*mine, *theirs} if mine.get(n) != theirs.get(n))
            if differing:
                raise ConfigurationError(
                    f"this rank and rank {index} train different parameters, such as "
                    f"{differing[0]} (here {mine.get(differing[0], 'missing')}, there "
                    f"{theirs.get(differing[0], 'missing')}): add, freeze, unfreeze and convert "
                    "parameters in the same way on all ranks"
                )

    def _make_buffer(self) -> None:
        devices = {parameter.device for parameter in self._parameters.values()}
        if len(devices) > 1:
            raise ConfigurationError(
                f"the loss has parameters on {sorted(map(str, devices))}; expected all parameters "
                "of a rank on one device. Move the loss to one device before it is distributed."
            )
        sizes = [parameter.numel() for parameter in self._parameters.values()]
        self._dtypes = [parameter.dtype for parameter in self._parameters.values()]
        # at least 32 bits, because 16 bits are too imprecise for sums over many ranks
        dtype = torch.float32
        dtype = functools.reduce(torch.promote_types, self._dtypes, dtype)
        device = devices.pop() if devices else torch.device("cpu")
        self._buffer = torch.zeros(len(sizes) + sum(sizes), dtype=dtype, device=device)
        pieces = self._buffer[len(sizes) :].split(sizes) if sizes else []
        self._views = [
            piece.view(parameter.shape)
            for piece, parameter in zip(pieces, self._parameters.values(), strict=True)
        ]


def _note(average: weakref.ref[GradientAverage], name: str, _: Tensor) -> None:
    if (alive := average()) is not None:
        alive.note(name)
