"""Networks of the recipes' policies.

A :class:`PolicySpec` contains all that a process needs to build a policy's network and to act with
its weights."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrize
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from ...checkpoint import load_checkpoint
from ...errors import CheckpointError, ConfigurationError
from .environments import Images, Task, function_of
from .moments import Moments

Act = Callable[[Tensor], Tensor]
"""Observations ``[episodes, ...]`` -> actions ``[episodes, ...]``."""


def mlp(
    sizes: Sequence[int], activation: type[nn.Module], *, last_gain: float | None = None
) -> list[nn.Module]:
    """Return the layers of a perceptron.

    Args:
        last_gain: if given, layers start with zero biases and orthogonal weights, as in
            implementations of PPO. The last layer has this gain, and the others have gain sqrt 2.
            If None, layers keep torch's initial values."""
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(sizes):
        linear = nn.Linear(before, after)
        if last_gain is not None:
            last = len(layers) == 2 * (len(sizes) - 2)
            nn.init.orthogonal_(linear.weight, last_gain if last else math.sqrt(2))
            nn.init.zeros_(linear.bias)
        layers += [linear, activation()]
    return layers[:-1]


class Scaled(nn.Module):
    """Apply ``body`` to images as float32 in [0, 1], with all batch dimensions merged into one.

    ``forward``: ``[..., channels, height, width]`` -> ``[..., outputs]``.
    """

    def __init__(self, images: Images, body: nn.Module) -> None:
        super().__init__()
        self.high = images.high
        self.body = body

    def forward(self, observation: Tensor) -> Tensor:
        *batch, channels, height, width = observation.shape
        rows = observation.reshape(-1, channels, height, width) / self.high
        made = self.body(rows)
        return made.reshape(*batch, made.shape[-1])  # reshape cannot infer -1 if there are no rows


_NATURE_SIDE = 36  # the three layers need images of at least this width and height, in pixels


def convolutions(images: Images, *, orthogonal: bool) -> nn.Module:
    """Return TorchRL's ConvNet, ``[N, channels, height, width]`` -> ``[N, features]``.

    Its layers are the three of Mnih et al. 2015 or, for small images, the one of Young and Tian
    2019 (MinAtar).

    Raises:
        ConfigurationError: an image is smaller than the kernel.
    """
    from torchrl.modules import ConvNet

    channels, *sides = images.shape
    if min(sides) < 3:
        raise ConfigurationError(
            f"--env: got images {images.shape}, expected at least 3 x 3; choose another "
            "environment, or let it return larger images"
        )
    layers: dict[str, Any] = {"num_cells": [16], "kernel_sizes": [3], "strides": [1]}
    if min(sides) >= _NATURE_SIDE:
        layers = {"num_cells": [32, 64, 64], "kernel_sizes": [8, 4, 3], "strides": [4, 2, 1]}
    net = ConvNet(in_features=channels, activation_class=nn.ReLU, **layers)
    for layer in net:
        if orthogonal and isinstance(layer, nn.Conv2d):
            nn.init.orthogonal_(layer.weight, math.sqrt(2))
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
    return net


def layers(
    make: str | None,
    inputs: int | Images,
    hidden: Sequence[int],
    outputs: int,
    activation: type[nn.Module],
    *,
    last_gain: float | None = None,
) -> list[nn.Module]:
    """Return the layers of :func:`mlp`. For images, :func:`convolutions` come first.

    If ``make`` names a function of the user, return the module that this function makes.

    Raises:
        ConfigurationError: there is no such function, or the ``nn.Module`` that it makes returns
            the wrong shape."""
    if isinstance(inputs, int):
        if make is None:
            return mlp([inputs, *hidden, outputs], activation, last_gain=last_gain)
        return [_made(make, inputs, outputs)]
    if make is not None:
        return [Scaled(inputs, _made(make, inputs.shape, outputs))]
    seen = convolutions(inputs, orthogonal=last_gain is not None)
    with torch.no_grad():
        features = seen(torch.zeros(1, *inputs.shape)).shape[-1]
    behind = mlp([features, *hidden, outputs], activation, last_gain=last_gain)
    return [Scaled(inputs, nn.Sequential(seen, *behind))]


def _made(make: str, inputs: int | tuple[int, ...], outputs: int) -> nn.Module:
    """Return the module of the user's function, after checking it."""
    function = function_of("--network", make)
    try:
        made = function(inputs, outputs)
    except Exception as error:
        raise _failed(make, inputs, outputs, error) from error
    if not isinstance(made, nn.Module):
        raise ConfigurationError(
            f"--network: {make} returned a {type(made).__name__}, expected a torch.nn.Module"
        )
    for name, module in made.named_modules():
        if _keeps_statistics(module):
            why = (
                "whose batch statistics would differ between learners, collectors and target "
                "networks; use LayerNorm or GroupNorm"
            )
        elif _computes_its_weights(module):
            why = (
                "which recomputes its weights before each call (weight_norm, spectral_norm): "
                "such weights cannot be sent to collectors or followed by a target network. Use "
                "plain layers, or LayerNorm"
            )
        else:
            continue
        where = f"{name} ({type(module).__name__})" if name else type(module).__name__
        raise ConfigurationError(f"--network: {make} returned a module with {where}, {why}")
    rows = torch.zeros(2, inputs) if isinstance(inputs, int) else torch.zeros(2, *inputs)
    try:
        with torch.no_grad():
            answer = made(rows)
    except Exception as error:
        raise _failed(make, inputs, outputs, error) from error
    if getattr(answer, "shape", None) != (2, outputs):
        raise ConfigurationError(
            f"--network: the module of {make}({inputs}, {outputs}) returned shape "
            f"{list(getattr(answer, 'shape', []))} for inputs of shape {list(rows.shape)}, "
            f"expected [2, {outputs}]; return a module with {outputs} outputs per row"
        )
    return made


def _keeps_statistics(module: nn.Module) -> bool:
    """Whether the output for a row depends on other rows of the batch, or on past batches."""
    is_batch_norm = isinstance(module, nn.modules.batchnorm._BatchNorm)
    return is_batch_norm or getattr(module, "running_mean", None) is not None


def _computes_its_weights(module: nn.Module) -> bool:
    hooks = module._forward_pre_hooks.values()
    return parametrize.is_parametrized(module) or any(
        isinstance(hook, WeightNorm | SpectralNorm) for hook in hooks
    )


def _failed(make: str, inputs: Any, outputs: int, error: Exception) -> ConfigurationError:
    reason = " ".join(str(error).split()) or type(error).__name__
    return ConfigurationError(
        f"--network: {make}({inputs}, {outputs}) failed: {reason}; correct this function"
    )


class QNetwork(nn.Sequential):
    """Map observations to one value per action.

    ``forward``: any real dtype ``[..., inputs]`` -> float32 ``[..., num_actions]``.
    """

    def __init__(
        self,
        inputs: int | Images,
        num_actions: int,
        hidden: Sequence[int],
        make: str | None = None,
    ) -> None:
        super().__init__(*layers(make, inputs, hidden, num_actions, nn.ReLU))

    def forward(self, observation: Tensor) -> Tensor:
        return super().forward(observation.to(torch.float32))

    def greedy(self, observation: Tensor) -> Tensor:
        """Return the greedy actions, int64 ``[...]``."""
        return self(observation).argmax(-1)

    def player(self) -> Act:
        """Return the function that plays one episode, or many in parallel, greedily."""
        return self.greedy


State = tuple[Tensor, Tensor]
"""Hidden and cell state of an LSTM, float32 ``[1, N, size]`` each."""

HIDDEN, CELL = "recurrent_state_h", "recurrent_state_c"


class RecurrentQNetwork(nn.Module):
    """Map sequences of observations to one value per action.

    Hidden layers come first, then an LSTM, and then a linear layer.

    Attributes:
        memory: TorchRL's LSTMModule, which carries the state from step to step in a collector. Each
            state is float32 ``[N, 1, size]``.
    """

    def __init__(
        self,
        inputs: int | Images,
        num_actions: int,
        hidden: Sequence[int],
        size: int,
        make: str | None = None,
    ) -> None:
        from torchrl.modules import LSTMModule

        super().__init__()
        *before, width = hidden
        self.encoder = nn.Sequential(*layers(make, inputs, before, width, nn.ReLU), nn.ReLU())
        self.memory = LSTMModule(
            width,
            size,
            in_keys=["features", HIDDEN, CELL],
            out_keys=["features", ("next", HIDDEN), ("next", CELL)],
        )
        self.head = nn.Linear(size, num_actions)

    def features(self, observation: Tensor) -> Tensor:
        """Return the LSTM inputs ``[..., width]``, float32, for observations ``[..., inputs]``."""
        return self.encoder(observation.to(torch.float32))

    def forward(self, observation: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """Return the values, float32 ``[N, T, num_actions]``, and the state after the last step.

        Args:
            observation: ``[N, T, inputs]``.
            state: the state before the first step; None: the beginning of an episode."""
        seen, state = self.memory.lstm(self.features(observation), state)
        return self.head(seen), state

    @torch.no_grad()
    def act(self, observation: Tensor, state: State | None) -> tuple[Tensor, State]:
        """Return the greedy actions of one step, int64 ``[...]``, and the next state.

        Args:
            observation: ``[..., inputs]``.
            state: the state that the last call returned. None: all episodes begin."""
        features = self.features(observation)
        seen, state = self.memory.lstm(features.reshape(-1, 1, features.shape[-1]), state)
        return self.head(seen).argmax(-1).reshape(features.shape[:-1]), state

    def player(self) -> Act:
        """Return a function that plays one episode, or many in parallel, greedily.

        Each call is the next step of these episodes."""
        state: State | None = None

        def act(observation: Tensor) -> Tensor:
            nonlocal state
            action, state = self.act(observation, state)
            return action

        return act


class CategoricalNetwork(QNetwork):
    """Map observations to a categorical policy's logits, which are nearly equal at the start.

    Args:
        moments: normalize the observations; None: no normalization.
    """

    def __init__(
        self,
        inputs: int | Images,
        num_actions: int,
        hidden: Sequence[int],
        make: str | None = None,
        moments: Moments | None = None,
    ) -> None:
        made = layers(make, inputs, hidden, num_actions, nn.Tanh, last_gain=0.01)
        nn.Sequential.__init__(self, *_first(moments), *made)


class ValueNetwork(nn.Sequential):
    """Map ``[..., inputs]`` to the state's value, float32 ``[..., 1]``.

    Args:
        moments: normalize the observations; None: no normalization.
    """

    def __init__(
        self,
        inputs: int | Images,
        hidden: Sequence[int],
        make: str | None = None,
        moments: Moments | None = None,
    ) -> None:
        made = layers(make, inputs, hidden, 1, nn.Tanh, last_gain=1.0)
        super().__init__(*_first(moments), *made)

    def forward(self, observation: Tensor) -> Tensor:
        return super().forward(observation.to(torch.float32))


def _first(moments: Moments | None) -> list[nn.Module]:
    return [] if moments is None else [moments]


class _Bounded(nn.Module):
    """A policy of continuous actions, whose bounds ``low`` and ``high`` are buffers, float32
    ``[action_size]``."""

    low: Tensor
    high: Tensor

    def __init__(
        self, layers: Sequence[nn.Module], low: Sequence[float], high: Sequence[float]
    ) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)
        for name, bounds in (("low", low), ("high", high)):
            self.register_buffer(name, torch.tensor(bounds, dtype=torch.float32), persistent=False)

    def bounded(self, raw: Tensor) -> Tensor:
        """Return actions ``[..., action_size]`` as the environment gets them: within the bounds."""
        return raw.clamp(self.low, self.high)

    def greedy(self, observation: Tensor) -> Tensor:
        """Return the action at the location, float32 ``[..., action_size]``."""
        return self.bounded(self(observation)[0])

    def player(self) -> Act:
        """Return the function that plays one episode, or many in parallel, greedily."""
        return self.greedy


class GaussianNetwork(_Bounded):
    """A Gaussian policy whose scale does not depend on the observation, as in CleanRL's PPO.

    Actions are drawn without bounds. The environment gets them clipped to its bounds.

    ``forward``: ``[..., inputs]`` -> location and scale, float32 ``[..., action_size]``. The scale
    is 1 at the start.

    Args:
        low, high: the bounds of actions, which may be infinite.
        moments: normalize the observations; None: no normalization.
    """

    def __init__(
        self,
        inputs: int | Images,
        low: Sequence[float],
        high: Sequence[float],
        hidden: Sequence[int],
        make: str | None = None,
        moments: Moments | None = None,
    ) -> None:
        made = layers(make, inputs, hidden, len(low), nn.Tanh, last_gain=0.01)
        super().__init__([*_first(moments), *made], low, high)
        self.log_scale = nn.Parameter(torch.zeros(len(low)))

    def forward(self, observation: Tensor) -> tuple[Tensor, Tensor]:
        location = self.layers(observation.to(torch.float32))
        return location, self.log_scale.exp().expand_as(location)


class SquashedGaussianNetwork(_Bounded):
    """A Gaussian whose tanh, scaled to the bounds, is the action (Haarnoja et al. 2018).

    ``forward``: ``[..., observation_size]`` -> location and scale, float32 ``[..., action_size]``;
    the scale is between e^-5 and e^2.

    Args:
        moments: normalize the observations; None: no normalization.
    """

    def __init__(
        self,
        observation_size: int,
        low: Sequence[float],
        high: Sequence[float],
        hidden: Sequence[int],
        make: str | None = None,
        moments: Moments | None = None,
    ) -> None:
        made = layers(make, observation_size, hidden, 2 * len(low), nn.ReLU)
        super().__init__([*_first(moments), *made], low, high)

    def forward(self, observation: Tensor) -> tuple[Tensor, Tensor]:
        location, log_scale = self.layers(observation.to(torch.float32)).chunk(2, -1)
        return location, (3.5 * log_scale.tanh() - 1.5).exp()

    def drawn(self, observation: Tensor) -> tuple[Tensor, Tensor]:
        """Draw actions, float32 ``[..., action_size]``, with gradients.

        Returns:
            The actions, and the log-densities [...] of these actions scaled to -1 .. 1."""
        location, scale = self(observation)
        noise = torch.randn_like(location)
        raw = location + scale * noise
        log_prob = -(noise**2 + math.log(2 * math.pi)) / 2 - scale.log()
        # log(1 - tanh(x)^2) = 2 (log 2 - x - softplus(-2 x)), stable for large x
        log_prob = log_prob - 2 * (math.log(2) - raw - functional.softplus(-2 * raw))
        return self.bounded(raw), log_prob.sum(-1)

    def bounded(self, raw: Tensor) -> Tensor:
        """Return the tanh, scaled to the bounds."""
        action = self.low + (raw.tanh() + 1) / 2 * (self.high - self.low)
        return super().bounded(action)  # rounding may exceed the bounds


Network = QNetwork | RecurrentQNetwork | GaussianNetwork | SquashedGaussianNetwork


@dataclass(frozen=True)
class PolicySpec:
    """How to make the network of a policy.

    Attributes:
        kind: ``"values"``, ``"recurrent_values"``, ``"categorical"``, ``"gaussian"`` or
            ``"squashed_gaussian"``.
        env: the gymnasium id of the policy's environment, or ``package.module:make``.
        make: the user's function that replaces ``hidden``, as in :func:`layers`.
        num_actions: 0 for continuous actions, which are between ``action_low`` and ``action_high``.
        images: the form of the observations, or None if they are flat.
        state_size: size of the LSTM; 0: the policy has no memory.
        normalized: whether a categorical or Gaussian policy normalizes its observations, which are
            flat, by :class:`~.moments.Moments`.
    """

    env: str
    observation_size: int
    hidden: tuple[int, ...]
    kind: str = "values"
    num_actions: int = 0
    action_low: tuple[float, ...] = ()
    action_high: tuple[float, ...] = ()
    make: str | None = None
    images: Images | None = None
    state_size: int = 0
    normalized: bool = False

    @classmethod
    def of(
        cls,
        task: Task,
        kind: str,
        hidden: Sequence[int],
        make: str | None = None,
        state_size: int = 0,
        normalized: bool = False,
    ) -> PolicySpec:
        """Return the spec for the observations and actions of ``task``.

        With continuous actions, ``"categorical"`` becomes ``"gaussian"``; with discrete ones,
        ``"squashed_gaussian"`` becomes ``"categorical"``. Images are never ``normalized``."""
        if kind == "categorical" and not task.num_actions:
            kind = "gaussian"
        elif kind == "squashed_gaussian" and task.num_actions:
            kind = "categorical"
        sizes = (task.num_actions, task.action_low, task.action_high)
        about = (task.observation_size, tuple(hidden), kind, *sizes, make, task.images)
        return cls(task.env, *about, state_size, normalized and task.images is None)

    @classmethod
    def from_plain(cls, info: Mapping[str, Any]) -> PolicySpec:
        """Return the spec in a checkpoint's ``policy_info``.

        Raises:
            KeyError: ``info`` describes no policy.
            ValueError: a size is not a whole number."""
        known = {name: info[name] for name in cls.__dataclass_fields__ if name in info}
        for name in ("env", "observation_size", "hidden"):
            known[name] = info[name]
        if known.get("images") is not None:
            known["images"] = Images(tuple(known["images"]["shape"]), known["images"]["high"])
        sizes = [known["observation_size"], *known["hidden"]]
        sizes += [known.get("num_actions", 0), known.get("state_size", 0)]
        if known.get("images") is not None:
            sizes += known["images"].shape
        if any(type(size) is not int or size < 0 for size in sizes):
            raise ValueError(f"its sizes are {sizes}, expected whole numbers")
        return cls(**known)

    def as_plain(self) -> dict[str, Any]:
        """Return plain values for a checkpoint."""
        return asdict(self)

    def check_task(self, task: Task) -> None:
        """Raise ConfigurationError if the environment now has other observations or actions."""
        for name in ("observation_size", "images", "num_actions", "action_low", "action_high"):
            before, now = getattr(self, name), getattr(task, name)
            if before != now:
                raise ConfigurationError(
                    f"{task.env} has changed since its policy was trained: {name} is {now}, "
                    f"expected {before}; undo the change, or train a new policy"
                )

    def network(self) -> Network:
        """Return a new network with random weights. Raises KeyError for an unknown kind."""
        inputs = self.observation_size if self.images is None else self.images
        moments = Moments(self.observation_size) if self.normalized else None
        discrete = (inputs, self.num_actions, self.hidden)
        bounded = (self.action_low, self.action_high, self.hidden, self.make, moments)
        if self.kind == "squashed_gaussian":
            return SquashedGaussianNetwork(self.observation_size, *bounded)
        if self.kind == "gaussian":
            return GaussianNetwork(inputs, *bounded)
        if self.kind == "categorical":
            return CategoricalNetwork(*discrete, self.make, moments)
        if self.kind == "recurrent_values":
            return RecurrentQNetwork(*discrete, self.state_size, self.make)
        if self.kind == "values":
            return QNetwork(*discrete, self.make)
        raise KeyError(self.kind)


def checkpoint_in(path: str | os.PathLike[str]) -> Path:
    """Return the checkpoint in the folder of a run, or ``path`` itself if it is not a folder."""
    path = Path(path)
    return path / "checkpoint.pt" if path.is_dir() else path


def saved_policy(path: str | os.PathLike[str]) -> tuple[PolicySpec, Network]:
    """Return the policy of a checkpoint, and its network with the saved weights.

    Args:
        path: the checkpoint, or the folder of its run.

    Raises:
        CheckpointError: the checkpoint is missing or damaged, or its policy cannot be built here.
    """
    path = checkpoint_in(path)
    checkpoint = load_checkpoint(path)
    try:
        policy = PolicySpec.from_plain(checkpoint.policy_info)
        network = policy.network()
        network.load_state_dict(dict(checkpoint.policy))
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError(
            f"the policy in {path} (recipe {checkpoint.recipe!r}) cannot be used: {error}"
        ) from error
    network.eval()
    return policy, network
