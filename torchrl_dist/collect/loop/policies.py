"""Call a collector's policy with a TensorDict or, if the result is known to be the same, with plain
values.

``TensorDictModule.__call__`` takes more time than a small network, because it dispatches arguments.
If pandas is not installed, the call also searches the disk for pandas, once for every tensor that
it writes (``TensorDictBase.from_any``, tensordict 0.14.3). For a few known classes, :func:`act`
therefore does the work of ``__call__`` itself. ``act`` does so only for exactly these classes, not
for subclasses, and only if no method was replaced and no hook is set. The modules inside policies
of these classes, and all other policies, are called as usual.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase, is_leaf_nontensor, is_tensor_collection
from tensordict.nn import (
    CudaGraphModule,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictModuleBase,
    TensorDictSequential,
    skip_existing,
)
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized
from torchrl import compile_with_warmup
from torchrl.envs.utils import ExplorationType, exploration_type
from torchrl.modules import (
    Actor,
    ProbabilisticActor,
    QValueActor,
    QValueModule,
    SafeModule,
    SafeProbabilisticModule,
    SafeProbabilisticTensorDictSequential,
    SafeSequential,
)

from torchrl_dist.collect.loop.exploration import Exploring
from torchrl_dist.collect.loop.spaces import Key, plain_key
from torchrl_dist.errors import ConfigurationError

Policy = Callable[[TensorDictBase], Any]
Values = dict[Key, Any]  # tensors [N, ...], and non-tensor data

# ---- the known classes, and their methods at the time of the import

_WRITERS = (TensorDictModule, SafeModule, Actor)
_CHAINS = (TensorDictSequential, SafeSequential, QValueActor)
_PROBABILISTIC = (
    ProbabilisticTensorDictSequential,
    SafeProbabilisticTensorDictSequential,
    ProbabilisticActor,
)
_SAMPLERS = (ProbabilisticTensorDictModule, SafeProbabilisticModule)
_METHODS = (
    "__call__",
    "__getattr__",
    "_call_impl",
    "forward",
    "_call_module",
    "_write_to_tensordict",
    "_module_iter",
    "_run_module",
    "get_dist_params",
    "det_part",
    "get_dist",
    "_dist_sample",
    "_resolve_generator",
    "_update_td_lp",
)
_q_values = inspect.unwrap(QValueModule.forward)
_sample = inspect.unwrap(ProbabilisticTensorDictModule.forward)
_sample_and_log_prob = inspect.unwrap(SafeProbabilisticModule.forward)


def _methods(kind: type) -> tuple[Any, ...]:
    return tuple(getattr(kind, name, None) for name in _METHODS)


_AS_IMPORTED = {
    kind: _methods(kind)
    for kind in (*_WRITERS, *_CHAINS, *_PROBABILISTIC, *_SAMPLERS, QValueModule)
}


def known_classes() -> frozenset[type]:
    """Return the known classes whose methods have not been replaced. If modules skip existing
    keys (``skip_existing``), return an empty set. Call once per rollout."""
    called = (_q_values, _sample, _sample_and_log_prob)
    if skip_existing() or not all(map(inspect.isfunction, called)):
        return frozenset()
    return frozenset(kind for kind, methods in _AS_IMPORTED.items() if methods == _methods(kind))


def _is_plain(module: nn.Module) -> bool:
    """Whether a call of this module does what its class defines: no hook is set on the module, and
    no method is replaced."""
    own = module.__dict__
    return not (
        own.get("_forward_hooks")
        or own.get("_forward_pre_hooks")
        or own.get("_backward_hooks")
        or own.get("_backward_pre_hooks")
        or own.get("_compiled_call_impl")
        or "forward" in own
        or "_call_impl" in own
        or "_call_module" in own
        or "_write_to_tensordict" in own
        or "_module_iter" in own
        or "_run_module" in own
        or "get_dist_params" in own
        or "get_dist" in own
        or "_dist_sample" in own
        or "_resolve_generator" in own
        or "_update_td_lp" in own
    )


# ---- a call


class UnfitPolicyError(ConfigurationError, TypeError):
    """The policy cannot be called with the observations of its env."""


_EXPECTED = (
    "A policy is called with a TensorDict, and must return a TensorDict. A module or function "
    "that takes tensors must name its arguments after the observations, or be wrapped: "
    "TensorDictModule(module, in_keys=['observation'], out_keys=['action'])"
)


def act(policy: Policy, values: Values, n: int, known: Collection[type]) -> Values:
    """Call the policy, and return its inputs and outputs by key.

    The values are those that a TensorDict ``td [n]`` of ``values`` contains after ``policy(td)``.
    The result is ``values`` itself, changed in place. If the policy returns another TensorDict or a
    dict, the entries of the returned object are added.

    Args:
        known: result of :func:`known_classes`.
    """
    if torch.nn.modules.module._has_any_global_hook():
        known = ()
    out = _call(policy, values, n, known)
    if out is not values:
        values.update(out)
    return values


def _call(module: Any, values: Values, n: int, known: Collection[type]) -> Values:
    """Call the module, and return the resulting values. The result is ``values`` itself if the
    module wrote its outputs into ``values``, as most modules do."""
    kind = type(module)
    if kind in known and _is_plain(module):
        if kind in _WRITERS:
            if _writes_its_outputs(module):
                inputs = [values.get(plain_key(key)) for key in module.in_keys]
                if all(value is not None for value in inputs):
                    # this lookup takes a quarter of the time of the attribute ``module.module``
                    inner = module._modules.get("module")
                    made = (module.module if inner is None else inner)(*inputs)
                    keys = module.out_keys
                    # size(0), because len() of a tensor takes a microsecond
                    if type(made) is Tensor and len(keys) == 1 and made.ndim and made.size(0) == n:
                        values[plain_key(keys[0])] = made
                    else:
                        _write(keys, made, values, n)
                    return values
        elif kind is QValueModule:
            if all(type(key) is str for key in (*module.in_keys, *module.out_keys)):
                return _q_values(module, values)
        elif kind in _SAMPLERS:
            if _only_samples(module, values):
                return _draw(module, kind, values, n)
        elif (parts := _parts(module, kind)) is not None:
            out = values
            for part in parts:
                out = _call(part, out, n, known)
            if module.inplace is True and out is not values:
                values.update({key: out[key] for key in module.out_keys if key in out})
                return values
            return out
    return _call_with_tensordict(module, values, n)


def _writes_its_outputs(module: TensorDictModule) -> bool:
    """Whether a call of the module only reads ``in_keys``, calls the inner module and writes
    ``out_keys``."""
    return (
        module.inplace is True
        and module._kwargs is None
        and not module._get_kwargs
        and module.method is None
        and not module.method_kwargs
        and module.out_keys == module.out_keys_source
        and "_" not in module.out_keys
    )


def _parts(module: TensorDictSequential, kind: type) -> Iterable[nn.Module] | None:
    """Return the parts that the module calls one after another, or None if the module also does
    something else."""
    if (
        module.inplace not in (None, True)
        or module.partial_tolerant
        or module._select_before_return
    ):
        return None
    if kind in _CHAINS:
        return module._module_iter()
    if (
        module.return_composite
        or module._requires_sample is not True
        or exploration_type() is None
        or type(module._last_module) not in _SAMPLERS
    ):
        return None
    return module._det_part, module._last_module


def _only_samples(module: ProbabilisticTensorDictModule, values: Values) -> bool:
    """Whether a call of the module only draws one sample, by torch's global generator, from a
    distribution whose parameters are among ``values``."""
    return (
        module.num_samples is None
        and module._generator is None
        and module._generator_key is None
        and all(type(key) is str and key in values for key in module.in_keys)
        and all(type(key) is str for key in module.out_keys)
    )


class _Entries:
    """Stands in for the TensorDict with which a sampling module is called. The module reads its
    inputs from ``values``, and its outputs are kept in ``made``."""

    def __init__(self, values: Values) -> None:
        self._values = values
        self.made: Values = {}

    def get(self, key: Key, default: Any = None) -> Any:
        return self._values.get(key, default)

    def keys(self) -> Collection[Key]:
        return self._values.keys()

    def set(self, key: Key, value: Any) -> None:
        self.made[key] = value

    def update(self, other: TensorDictBase | dict[Key, Any]) -> None:
        self.made.update(other if isinstance(other, dict) else flat(other))


def _draw(module: ProbabilisticTensorDictModule, kind: type, values: Values, n: int) -> Values:
    entries = _Entries(values)
    random = (exploration_type() or module.default_interaction_type) is ExplorationType.RANDOM
    # In this case, SafeProbabilisticModule computes the log-probability together with the sample.
    # In all other cases, it calls its base class.
    scores = kind is SafeProbabilisticModule and module.return_log_prob and random
    (_sample_and_log_prob if scores else _sample)(module, entries)
    for key, value in entries.made.items():
        if type(value) is Tensor and value.ndim and value.size(0) == n:
            values[plain_key(key)] = value
        else:  # let TensorDict convert or refuse the value
            values.update(flat(TensorDict(batch_size=[n]).set(key, value)))
    return values


def _write(keys: Iterable[Key], made: Any, values: Values, n: int) -> None:
    """Write the result of a module to ``values``, as ``TensorDictModule`` does."""
    keys = list(keys)
    if isinstance(made, (dict, TensorDictBase)) and all(key in made for key in keys):
        made = tuple(made.get(key) for key in keys)
    elif made is None:
        made = ()
    elif not isinstance(made, tuple):
        made = (made,)
    if len(made) != len(keys):
        raise RuntimeError(
            f"a module of the policy returned {len(made)} tensors; expected one tensor for each of "
            f"its out_keys {keys}. Correct the module or its out_keys"
        )
    for key, value in zip(keys, made, strict=True):
        if type(value) is Tensor and value.ndim and value.size(0) == n:
            values[plain_key(key)] = value
        else:  # let TensorDict convert or refuse the value
            td = TensorDict(batch_size=[n])
            td.set(key, TensorDict.from_any(value))
            values.update(flat(td))


def _call_with_tensordict(policy: Policy, values: Values, n: int) -> Values:
    td = nested(values, [n])
    try:
        out = policy(td)
    except (TypeError, AttributeError) as error:
        if isinstance(policy, nn.Module) and not isinstance(policy, TensorDictModuleBase):
            raise UnfitPolicyError(f"{_EXPECTED}; this policy raised {error!r}") from error
        raise
    values.clear()
    values.update(flat(td))  # TorchRL reads ``td``, too, if ``out`` is another TensorDict
    if out is td or out is None:
        return values
    if isinstance(out, dict):
        out = TensorDict(out, batch_size=[n])
    if not is_tensor_collection(out):
        raise UnfitPolicyError(f"{_EXPECTED}; this policy returned {type(out).__name__}")
    return flat(out)


def flat(td: TensorDictBase) -> Values:
    """Return the tensors and non-tensor data in ``td`` by key, including those of nested
    TensorDicts."""
    return dict(td.items(True, True, is_leaf=is_leaf_nontensor))


def nested(
    data: Mapping[Key, Any], batch_size: list[int], names: list[str | None] | None = None
) -> TensorDict:
    """Build a nested TensorDict from tensors by key. The shapes of the tensors must begin with
    ``batch_size``.

    This function skips TensorDict's checks, because they would take much of the time of a short
    rollout.
    """
    size = torch.Size(batch_size)
    root: dict[str, Any] = {}
    deeper: dict[str, dict[Key, Any]] = {}
    for key, value in data.items():
        if isinstance(key, str):
            root[key] = value
        else:
            first, *rest = key
            deeper.setdefault(first, {})[plain_key(tuple(rest))] = value
    for name, part in deeper.items():
        root[name] = nested(part, batch_size, names)
    return TensorDict._new_unsafe(root, batch_size=size, names=names)


class PolicyCalls:
    """Call a policy under an exploration type of TorchRL.

    Args:
        clones: whether to clone results, because the next call of a compiled policy may overwrite
            the results of the call before.
        alone: whether no other thread of this process calls a policy. Calls then need no lock.
    """

    def __init__(
        self,
        policy: Policy,
        exploration_type: ExplorationType,
        clones: bool = False,
        alone: bool = False,
    ) -> None:
        self._policy = policy
        self._exploring = Exploring(exploration_type, f"a call of {_name(policy)}")
        self._clones = clones
        self._alone = alone
        self._known = known_classes()

    def begin(self) -> None:
        """Check which classes are known. Call this method at the beginning of a rollout."""
        self._known = known_classes()

    def on_values(self, values: Values, n: int) -> Values:
        """Call :func:`act` under the exploration type."""
        call = self._exploring.call_alone if self._alone else self._exploring.call
        out = call(act, self._policy, values, n, self._known)
        return {key: value.clone() for key, value in out.items()} if self._clones else out

    def exploring(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function that calls policies, so that these policies use the exploration type."""
        return partial(self._exploring.call, call)

    def on_tensordict(self, td: TensorDictBase) -> TensorDictBase:
        """Call the policy with a TensorDict."""
        out = self._exploring.call(self._policy, td)
        out = td if out is None else out
        return out.clone() if self._clones else out


def _name(policy: Policy) -> str:
    inner = policy.policy if isinstance(policy, _OnTensors) else policy
    return f"the policy {getattr(inner, '__name__', type(inner).__name__)}"


# ---- policies of the user


def cpu_copy(policy: nn.Module, *, travels: bool) -> nn.Module:
    """Return a copy of the policy on the CPU, because the learner may change or move the original.

    Args:
        travels: whether the copy will be pickled for another process.

    Raises:
        ConfigurationError: the policy cannot be copied or pickled.
    """
    parametrized = [name for name, module in policy.named_modules() if is_parametrized(module)]
    if travels and parametrized:
        raise ConfigurationError(
            f"the policy's {', '.join(map(repr, parametrized[:3]))} is parametrized (by "
            "torch.nn.utils.parametrize, which spectral_norm and weight_norm use), and torch "
            f"cannot pickle parametrized modules. {_BUILD_THERE}"
        )
    try:
        return copy.deepcopy(policy).to("cpu")
    except Exception as error:
        raise ConfigurationError(
            f"the policy cannot be copied for the workers ({error}). {_BUILD_THERE}"
        ) from error


_BUILD_THERE = (
    "Let each worker build its own policy: pass policy_factory=make_policy, together with policy= "
    "for the weights"
)


@dataclass(frozen=True)
class Compilation:
    """``compile_policy=`` and ``cudagraph_policy=`` of TorchRL's collectors: True, or keyword
    arguments for ``torch.compile`` and ``CudaGraphModule``. The arguments of ``compile_policy`` may
    also contain ``warmup``, the number of calls before the compilation."""

    compile_policy: bool | Mapping[str, Any] | None = None
    cudagraph_policy: bool | Mapping[str, Any] | None = None

    def calls(
        self, policy: Policy, exploration_type: ExplorationType, alone: bool = False
    ) -> PolicyCalls:
        """Return :class:`PolicyCalls` that call the policy, compiled or as a CUDA graph if so
        requested.

        Raises:
            ConfigurationError: a CUDA graph is requested for a policy on the CPU, although there is
                a GPU.
        """
        compiles = self.compile_policy not in (None, False)
        graphs = self.cudagraph_policy not in (None, False)
        if graphs and torch.cuda.is_available() and (device := _device(policy)) != "cuda":
            raise ConfigurationError(
                f"cudagraph_policy={self.cudagraph_policy} needs a policy on 'cuda', because a "
                "CUDA graph contains only work of a GPU, but the policy of this worker is on "
                f"{device!r}; let policy_factory= build the policy on a GPU, or leave "
                "cudagraph_policy= out"
            )
        if compiles:
            policy = compile_with_warmup(policy, **_options(self.compile_policy))
        if graphs:
            options = _options(self.cudagraph_policy)
            policy = CudaGraphModule(policy, in_keys=[], out_keys=[], **options)
        return PolicyCalls(policy, exploration_type, clones=compiles or graphs, alone=alone)


def _device(policy: Policy) -> str:
    module = policy.policy if isinstance(policy, _OnTensors) else policy
    parameters = module.parameters() if isinstance(module, nn.Module) else ()
    return next((parameter.device.type for parameter in parameters), "cpu")


def _options(given: bool | Mapping[str, Any] | None) -> dict[str, Any]:
    return dict(given) if isinstance(given, Mapping) else {}


def on_tensordicts(
    policy: Policy, observed: Collection[Key], action_keys: list[Key] | None = None
) -> Policy:
    """Return a policy that takes a TensorDict.

    If every required argument of the policy has the name of an observation, return a wrapper that
    calls the policy with tensors, as TorchRL's collectors do. Otherwise, return the policy itself.
    A wrapped policy must return the action, or a tuple: the action, followed by tensors that get
    the keys ``"output1"``, ``"output2"``, ...

    Raises:
        ConfigurationError: the policy is not callable.
        UnfitPolicyError: the policy takes neither a TensorDict nor these observations.
    """
    if not callable(policy):
        raise ConfigurationError(
            f"policy={policy!r} cannot be called; expected a module or function that takes a "
            "TensorDict, or None for random actions"
        )
    if (
        isinstance(policy, (TensorDictModuleBase, torch._dynamo.eval_frame.OptimizedModule))
        or hasattr(policy, "in_keys")
        or hasattr(policy, "out_keys")
    ):
        return policy
    try:
        signature = inspect.signature(getattr(policy, "forward", policy))
    except (TypeError, ValueError):
        # The policy has no signature, because it is not written in Python.
        return policy
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    named = {name: p for name, p in signature.parameters.items() if p.kind in kinds}
    needed = [name for name, p in named.items() if p.default is inspect.Parameter.empty]
    takes = [name for name in named if name in observed]
    if not takes or not set(needed) <= set(takes):
        try:
            signature.bind(None)
        except TypeError as error:
            raise UnfitPolicyError(
                "Arguments to policy.forward are incompatible with entries in the observations: "
                f"the policy takes {list(signature.parameters)}, but the env gives "
                f"{sorted(observed, key=str)}; the policy cannot be called with a single "
                f"TensorDict either. {_EXPECTED}"
            ) from error
        return policy
    return _OnTensors(policy, takes, action_keys or ["action"])


class _OnTensors:
    """A policy that takes a TensorDict and calls a policy that takes tensors."""

    def __init__(self, policy: Callable[..., Any], names: list[str], action_keys: list[Key]):
        self.policy = policy
        self._names = names
        self._action_keys = action_keys

    def __call__(self, td: TensorDictBase) -> TensorDictBase:
        made = self.policy(**{name: td.get(name) for name in self._names})
        made = made if isinstance(made, tuple) else (made,)
        surplus = range(1, len(made) - len(self._action_keys) + 1)
        keys = [*self._action_keys, *(f"output{i}" for i in surplus)]
        for key, value in zip(keys, made, strict=True):
            td.set(key, TensorDict.from_any(value))
        return td
