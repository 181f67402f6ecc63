"""Convert values of gymnasium spaces to tensors as TorchRL's ``GymEnv`` does (torchrl 0.14.1).

The reference is ``convert_*_spec`` in ``torchrl/envs/libs/gym.py``:

- Discrete spaces are one-hot, unless categorical encoding is requested.
- A scalar Box becomes ``[1]``.
- The leaves of a Dict are at the root of the TensorDict. The Dict's key ``"state"`` becomes
  ``"observation"``, unless the Dict has a key ``"observation"``.
- A single image with three colours gets the key ``"pixels"``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from gymnasium import spaces

from torchrl_dist.errors import ConfigurationError


class UnknownSpaceError(ConfigurationError):
    """This module does not support the gymnasium space. TorchRL's ``GymWrapper`` may support it."""


Key = str | tuple[str, ...]


def plain_key(key: Any) -> Key:
    """Convert ``("a",)`` to ``"a"``; leave other keys as they are."""
    return key if isinstance(key, str) or len(key) > 1 else key[0]


def join_key(first: str, key: Key) -> tuple[str, ...]:
    """Return ``(first, *key)``."""
    return (first, key) if isinstance(key, str) else (first, *key)


@dataclass(frozen=True)
class ObservationLeaf:
    """One tensor of an observation, with its place in the env's observation and its key and format
    in a TensorDict.

    Attributes:
        key: the tensor's key in the TensorDict.
        path: keys that lead to the tensor in the env's observation (a nested dict); empty if the
            observation is not a dict.
        shape: shape per env.
        one_hot: number of classes if integers must be written one-hot, else 0.
        start: the smallest value of a Discrete space, or the smallest values of a MultiDiscrete
            space; None if they are 0. In the TensorDict, observations and actions count classes
            from 0.
    """

    key: Key
    path: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: np.dtype
    one_hot: int = 0
    start: Any = None

    @property
    def plain(self) -> bool:
        """Whether the env's observation needs no conversion."""
        return not (self.path or self.one_hot) and self.start is None

    def read(self, observation: Any) -> Any:
        for name in self.path:
            observation = observation[name]
        return observation

    def write(self, out: np.ndarray, observation: Any) -> None:
        """Write the observation of one env into ``out [*shape]``, or the observations of all envs
        into ``out [N, *shape]``.

        Raises:
            ConfigurationError: the observation's shape differs from the declared shape by more than
                axes of length one, or the value is not in its Discrete space.
        """
        value = np.asarray(self.read(observation) if self.path else observation)
        if self.one_hot:
            start = self.start or 0
            index = self._shaped(value, out.shape[:-1])[..., None].astype(np.int64) - start
            if index.min() < 0 or index.max() >= self.one_hot:
                raise ConfigurationError(
                    f"the env returned {value} as observation {self.key!r}; expected a value from "
                    f"{start} to {start + self.one_hot - 1}, as the observation space declares. "
                    "Correct the env or its observation space"
                )
            out[...] = 0
            np.put_along_axis(out, index, 1, axis=-1)
        elif self.start is None:
            out[...] = self._shaped(value, out.shape)
        else:
            out[...] = self._shaped(value, out.shape) - self.start

    def _shaped(self, value: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        """Return ``value``, reshaped to ``shape`` if only axes of length one differ. The shape is
        checked here, because NumPy's assignment would broadcast ``[1]`` to any shape."""
        if value.shape == shape:
            return value
        # Axes of length one may differ, because some envs return an array with one axis for a
        # scalar Box, whose shape has no axis.
        if [n for n in value.shape if n != 1] == [n for n in shape if n != 1]:
            return value.reshape(shape)
        raise ConfigurationError(
            f"the env returned observation {self.key!r} with shape {value.shape}; expected "
            f"{shape}, as the observation space declares. Correct the env or its observation space"
        )


def has_start(space: spaces.Space) -> bool:
    """Whether the space is, or contains, a (Multi)Discrete space that does not start at 0.
    TorchRL's ``GymWrapper`` ignores the start of such a space."""
    if isinstance(space, spaces.Dict | spaces.Tuple):
        parts = space.spaces.values() if isinstance(space, spaces.Dict) else space.spaces
        return any(map(has_start, parts))
    return bool(np.any(getattr(space, "start", 0)))


# An observation must not have one of these keys, because a rollout's root uses them for other
# values.
_TAKEN = frozenset(
    ("action", "collector", "done", "next", "policy_version", "reward", "terminated", "truncated")
)

_STAMPS = frozenset(("collector", "policy_version"))


def refuse_stamps(keys: Iterable[Key], author: str) -> None:
    """Raise ConfigurationError if one of ``keys``, at the root of a rollout, is reserved for the
    collector."""
    for key in keys:
        if (key if isinstance(key, str) else key[0]) in _STAMPS:
            raise ConfigurationError(
                f"{author} wrote the key {key!r}, which is reserved for values that the collector "
                "writes; write the value under another key"
            )


def observation_leaves(space: spaces.Space, categorical: bool) -> tuple[ObservationLeaf, ...]:
    """Return the tensors that make up an observation of a single env, in the space's order.

    Raises:
        UnknownSpaceError: this module does not support the space.
        ConfigurationError: the space is an empty Dict, or one of its parts has a name that rollouts
            use for other values.
    """
    if isinstance(space, spaces.Dict):
        leaves = tuple(_dict_leaves(space, (), (), categorical))
        if not leaves:
            raise ConfigurationError(
                "the observation space is an empty Dict; expected a Dict with at least one part"
            )
        for leaf in leaves:
            if (name := leaf.key if isinstance(leaf.key, str) else leaf.key[0]) in _TAKEN:
                raise ConfigurationError(
                    f"the observation space has a part named {name!r}, but rollouts use this name "
                    "for other values; rename the part, for example with "
                    "gymnasium.wrappers.TransformObservation"
                )
        return leaves
    name = "pixels" if _is_image(space) else "observation"
    return (_leaf(space, name, (), categorical),)


def _is_image(space: spaces.Space) -> bool:
    return (
        isinstance(space, spaces.Box)
        and len(space.shape) == 3
        and space.shape[-1] == 3
        and bool((space.low == 0).all() and (space.high == 255).all())
    )


def _dict_leaves(
    space: spaces.Dict, path: tuple[str, ...], names: tuple[str, ...], categorical: bool
) -> list[ObservationLeaf]:
    found = []
    for name, sub in space.spaces.items():
        renamed = "observation" if name == "state" and "observation" not in space.spaces else name
        inner_path, inner_names = (*path, name), (*names, renamed)
        if isinstance(sub, spaces.Dict):
            found += _dict_leaves(sub, inner_path, inner_names, categorical)
        else:
            key = inner_names[0] if len(inner_names) == 1 else inner_names
            found.append(_leaf(sub, key, inner_path, categorical))
    return found


def _leaf(
    space: spaces.Space, key: Key, path: tuple[str, ...], categorical: bool
) -> ObservationLeaf:
    if isinstance(space, spaces.Box):
        return ObservationLeaf(key, path, space.shape or (1,), space.dtype)
    if isinstance(space, spaces.Discrete):
        if categorical:
            return ObservationLeaf(key, path, (), space.dtype, start=int(space.start) or None)
        n = int(space.n)
        return ObservationLeaf(key, path, (n,), np.dtype(np.int64), n, int(space.start) or None)
    if isinstance(space, spaces.MultiBinary):
        return ObservationLeaf(key, path, space.shape, space.dtype)
    if isinstance(space, spaces.MultiDiscrete) and categorical:
        start = space.start if space.start.any() else None
        return ObservationLeaf(key, path, space.shape, space.dtype, start=start)
    raise UnknownSpaceError(
        f"observation {key!r} has the space {space}, which is not supported; expected Box, "
        "Discrete, MultiBinary, MultiDiscrete (with categorical_action_encoding=True) or a Dict "
        "of these. Wrap the env in gymnasium.wrappers.FlattenObservation, or return a TorchRL env "
        "from make_env"
    )


@dataclass(frozen=True)
class ActionCodec:
    """Convert between the policy's actions and the env's actions.

    Attributes:
        shape: shape of the policy's action, per env.
        to_env: converts the policy's NumPy array ``[N, *shape]`` to the argument of
            ``VectorEnv.step``. ``to_env`` always makes a new array, because an env may change or
            keep its argument.
        sample: a function that takes a random generator and N, and draws N actions in the policy's
            format with the distribution of the space's own ``sample()``.
        hint: text added to the error message if the policy's action has another shape.
    """

    shape: tuple[int, ...]
    to_env: Callable[[np.ndarray], np.ndarray]
    sample: Callable[[np.random.Generator, int], torch.Tensor]
    hint: str = ""


def action_codec(space: spaces.Space, categorical: bool) -> ActionCodec:
    """Return the codec for the action space of a single env.

    Raises:
        UnknownSpaceError: the space is not Discrete, MultiDiscrete, MultiBinary or Box.
    """
    if isinstance(space, spaces.Discrete):
        return _discrete_codec(int(space.n), int(space.start), space.dtype, categorical)
    if isinstance(space, spaces.MultiDiscrete) and space.nvec.ndim == 1:
        return _multi_discrete_codec(space, categorical)
    if isinstance(space, spaces.MultiBinary):
        return ActionCodec(
            space.shape,
            lambda a: a.astype(space.dtype),
            lambda rng, n: torch.from_numpy(rng.integers(0, 2, (n, *space.shape), space.dtype)),
        )
    if isinstance(space, spaces.Box):
        return _box_codec(space)
    raise UnknownSpaceError(
        f"action space {space} is not supported; expected Discrete, MultiDiscrete (one axis), "
        "MultiBinary or Box. Flatten the action space with a wrapper, or return a TorchRL env "
        "from make_env"
    )


_ONE_HOT_HINT = (
    "; actions are one-hot by default, as in TorchRL's GymEnv. If the policy writes integer "
    "actions, pass categorical_action_encoding=True to the collector"
)
_CATEGORICAL_HINT = (
    "; actions are integers, because the collector was built with categorical_action_encoding=True"
)


def _discrete_codec(n: int, start: int, dtype: np.dtype, categorical: bool) -> ActionCodec:
    def sample_class(rng: np.random.Generator, envs: int) -> torch.Tensor:
        return torch.from_numpy(rng.integers(0, n, envs, dtype=np.int64))

    if categorical and not start:
        return ActionCodec((), lambda a: a.astype(dtype), sample_class, _CATEGORICAL_HINT)
    if categorical:
        return ActionCodec(
            (), lambda a: (a + start).astype(dtype, copy=False), sample_class, _CATEGORICAL_HINT
        )

    def to_env(action: np.ndarray) -> np.ndarray:
        classes = action.argmax(-1)
        return (classes + start if start else classes).astype(dtype, copy=False)

    return ActionCodec(
        (n,),
        to_env,
        lambda rng, envs: torch.nn.functional.one_hot(sample_class(rng, envs), n),
        _ONE_HOT_HINT,
    )


def _multi_discrete_codec(space: spaces.MultiDiscrete, categorical: bool) -> ActionCodec:
    nvec, start, dtype = space.nvec, space.start, space.dtype

    def sample_classes(rng: np.random.Generator, envs: int) -> torch.Tensor:
        return torch.from_numpy(rng.integers(0, nvec, (envs, len(nvec)), dtype=np.int64))

    if categorical:
        return ActionCodec(
            (len(nvec),),
            lambda a: (a + start).astype(dtype, copy=False),
            sample_classes,
            _CATEGORICAL_HINT,
        )
    if len(set(nvec.tolist())) == 1:  # TorchRL stacks parts of equal size, and concatenates others
        n = int(nvec[0])
        return ActionCodec(
            (len(nvec), n),
            lambda a: (a.argmax(-1) + start).astype(dtype, copy=False),
            lambda rng, envs: torch.nn.functional.one_hot(sample_classes(rng, envs), n),
            _ONE_HOT_HINT,
        )
    borders = np.cumsum(nvec)[:-1]

    def to_env(action: np.ndarray) -> np.ndarray:
        classes = [part.argmax(-1) for part in np.split(action, borders, axis=-1)]
        return (np.stack(classes, -1) + start).astype(dtype, copy=False)

    def sample(rng: np.random.Generator, envs: int) -> torch.Tensor:
        classes = sample_classes(rng, envs).unbind(-1)
        return torch.cat(
            [torch.nn.functional.one_hot(c, int(n)) for c, n in zip(classes, nvec, strict=True)],
            -1,
        )

    return ActionCodec((int(nvec.sum()),), to_env, sample, _ONE_HOT_HINT)


def _box_codec(space: spaces.Box) -> ActionCodec:
    shape = space.shape or (1,)
    draw = _integer_box(space) if space.dtype.kind in "iub" else _float_box(space)

    def sample(rng: np.random.Generator, envs: int) -> torch.Tensor:
        drawn = draw(rng, (envs, *space.shape))
        return torch.from_numpy(drawn.astype(space.dtype, copy=False).reshape(envs, *shape))

    def to_env(action: np.ndarray) -> np.ndarray:
        return action.astype(space.dtype).reshape(len(action), *space.shape)

    return ActionCodec(shape, to_env, sample)


_Draw = Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]
# A draw with a single bound is at most this far from the bound. In practice, no draw reaches this
# limit, because P(distance > 40) < 1e-17.
_FARTHEST = 10**6


def _float_box(space: spaces.Box) -> _Draw:
    """Return a function that makes many draws with the distribution of ``space.sample()``: uniform
    between two bounds, exponential from a single bound, and normal without bounds."""
    below, above = space.bounded_below, space.bounded_above
    both = below & above
    low = np.where(below, space.low, 0).astype(np.float64)
    high = np.where(above, space.high, 0).astype(np.float64)
    start, stop = np.where(both, low, 0), np.where(both, high, 0)
    with np.errstate(over="ignore"):
        # ``finite`` is false if the difference of the bounds overflows, as for a Box of all float64
        # values.
        finite = np.isfinite(stop - start).all()

    def between(rng: np.random.Generator, size: tuple[int, ...]) -> np.ndarray:
        if finite:
            return rng.uniform(start, stop, size)
        part = rng.random(size)
        return start * (1 - part) + stop * part

    def any_kind(rng: np.random.Generator, size: tuple[int, ...]) -> np.ndarray:
        away = rng.standard_exponential(size)
        drawn = [between(rng, size), low + away, high - away]
        return np.select([both, below, above], drawn, rng.standard_normal(size))

    return between if both.all() else any_kind


def _integer_box(space: spaces.Box) -> _Draw:
    """Return a function like the one that :func:`_float_box` returns, but with each draw rounded
    down to an integer. Draws between two bounds may equal either bound."""
    below, above, dtype = space.bounded_below, space.bounded_above, space.dtype
    both = below & above
    low = np.where(below, space.low, 0).astype(dtype)
    high = np.where(above, space.high, 0).astype(dtype)
    start, stop = np.where(both, low, 0), np.where(both, high, 0)

    def between(rng: np.random.Generator, size: tuple[int, ...]) -> np.ndarray:
        return rng.integers(start, stop, size, dtype=dtype.type, endpoint=True)

    if both.all():
        return between
    info = np.iinfo(str(dtype))

    def room(bounds: np.ndarray, end: int) -> np.ndarray:
        """Return, for each bound, how far a draw may be from it without an overflow."""
        steps = [min(_FARTHEST, abs(end - int(bound))) for bound in bounds.flat]
        return np.array(steps).reshape(bounds.shape)

    upwards, downwards = room(low, info.max), room(high, info.min)

    def any_kind(rng: np.random.Generator, size: tuple[int, ...]) -> np.ndarray:
        away = np.floor(rng.standard_exponential(size))
        free = np.floor(rng.standard_normal(size)).clip(info.min, info.max)
        drawn = [
            between(rng, size),
            low + np.minimum(away, upwards).astype(dtype),
            high - np.minimum(away, downwards).astype(dtype),
        ]
        return np.select([both, below, above], drawn, free.astype(dtype))

    return any_kind
