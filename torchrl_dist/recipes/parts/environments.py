"""Facts about a gymnasium environment that a recipe needs before it starts processes."""

from __future__ import annotations

import contextlib
import difflib
import functools
import importlib
import math
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ...errors import ConfigurationError, TorchRLDistError

if TYPE_CHECKING:
    import gymnasium
    from tensordict import TensorDictBase

MAX_EPISODE_STEPS = 10_000
"""An evaluation ends each episode after this many steps, because some environments never do."""

ATARI_STACK = 4  # images in an observation

Continuous = Literal["none", "bounded", "any"]
"""The kinds of continuous actions that a recipe accepts, in addition to discrete ones."""


@dataclass(frozen=True)
class Images:
    """Observations that are uint8 [channels, height, width], with values from 0 to ``high``."""

    shape: tuple[int, int, int]
    high: float


@dataclass(frozen=True)
class Task:
    """Sizes of an environment.

    Attributes:
        observation_size: number of elements of an observation, whether flat or an image.
        num_actions: number of discrete actions; 0 for continuous actions.
        action_low, action_high: bounds of continuous actions, which may be infinite.
        images: None if observations are flat.
        wrapped: whether :func:`make_env` wraps the environment to make its observations flat."""

    env: str
    observation_size: int
    reward_threshold: float | None
    num_actions: int = 0
    action_low: tuple[float, ...] = ()
    action_high: tuple[float, ...] = ()
    images: Images | None = None
    wrapped: bool = False

    @property
    def inputs(self) -> int | Images:
        """The input size of a network."""
        return self.observation_size if self.images is None else self.images

    @property
    def frames(self) -> dict[str, int] | None:
        """The argument ``frames`` of a buffer, to store each image once; None without images."""
        if self.images is None:
            return None
        return {"observation": ATARI_STACK if self.env.startswith("ALE/") else 1}


def named_function(text: str) -> Callable[..., Any] | None:
    """Return the function that ``text`` names as ``package.module:function``, or None.

    Modules in the working directory are found, too. Errors of the module's import are passed on.
    """
    module, colon, name = text.partition(":")
    if not colon or not name.isidentifier():
        return None
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)
    return getattr(importlib.import_module(module), name, None)


def function_of(option: str, text: str) -> Callable[..., Any]:
    """Return the function that the user named with an option of the command line.

    Raises:
        ConfigurationError: there is no such function.
    """
    try:
        function = named_function(text)
    except (ImportError, SystemExit) as error:
        raise ConfigurationError(
            f"{option}: cannot import {text!r} ({error}); expected package.module:function in a "
            "package that Python can import here"
        ) from error
    if function is None:
        raise ConfigurationError(f"{option}: got {text!r}, expected package.module:function")
    return function


@contextlib.contextmanager
def needs(extra: str, what: str = "") -> Iterator[None]:
    """In this context, turn an ImportError into an error that says what to install.

    Args:
        what: the option or file that needs the package; by default, the error names the module.
    """
    expected = ImportError if what else ModuleNotFoundError
    try:
        yield
    except expected as error:
        missing = f"{what} needs a package that" if what else error.name
        raise ConfigurationError(
            f"{missing} is not installed: pip install 'torchrl-dist[{extra}]'"
        ) from error


def atari(env: str, **options: Any) -> gymnasium.Env:
    """Make ``ALE/...`` as in Machado et al. 2018.

    Each action is repeated for 4 frames. Version 5 of a game ignores one action in four (sticky
    actions). The maximum of the last two frames becomes one gray image, 84 x 84. The last 4 images
    are an observation, uint8 ``[4, 84, 84]``. An episode begins with up to 30 idle frames."""
    import gymnasium
    from gymnasium.wrappers import AtariPreprocessing, FrameStackObservation

    with needs("atari"), warnings.catch_warnings():
        # The import registers the ids. gymnasium would warn if they were registered already.
        warnings.filterwarnings("ignore", message=".*Overriding environment")
        import ale_py

        gymnasium.register_envs(ale_py)
    made = gymnasium.make(env, frameskip=1, **options)
    return FrameStackObservation(AtariPreprocessing(made), ATARI_STACK)


def minigrid(env: str, **options: Any) -> gymnasium.Env:
    """Make ``MiniGrid-...``, observed as the 7 x 7 cells in front of the agent.

    Each object, colour and state has a channel of zeros and ones, uint8 ``[20, 7, 7]``.
    Observations leave out the mission, which is a text."""
    import gymnasium

    with needs("minigrid"):
        import minigrid
        from minigrid.wrappers import ImgObsWrapper, OneHotPartialObsWrapper
    gymnasium.register_envs(minigrid)
    made: Any = ImgObsWrapper(OneHotPartialObsWrapper(gymnasium.make(env, **options)))
    height, width, channels = made.observation_space.shape
    space = gymnasium.spaces.Box(0, 1, (channels, height, width), made.observation_space.dtype)
    return gymnasium.wrappers.TransformObservation(made, lambda x: x.transpose(2, 0, 1), space)


_IMAGES: dict[str, Callable[..., Any]] = {"ALE/": atari, "MiniGrid-": minigrid}


def image_factory(env: str) -> Callable[..., gymnasium.Env] | None:
    """Return the function that makes an environment of Atari or MiniGrid; None for other ids."""
    for prefix, make in _IMAGES.items():
        if env.startswith(prefix):
            return functools.partial(make, env)
    return None


def _maker(env: str) -> Callable[..., gymnasium.Env] | None:
    """Return the function that makes ``env``, or None if ``gymnasium.make`` does.

    gymnasium's own ids may also begin with a module (``module:Name-v0``). If the module has a
    function of this name, the function takes precedence.
    """
    return image_factory(env) or named_function(env)


def make_env(env: str, **options: Any) -> gymnasium.Env:
    """Make one environment. ``options``, such as ``render_mode``, go to gymnasium or to the
    function that ``env`` names.

    Ids of Atari and MiniGrid go through :func:`atari` and :func:`minigrid`. Observations that are
    numbers or small groups of them (Discrete, MultiDiscrete, MultiBinary, or a Dict or Tuple of
    these and of flat Boxes) become one vector, by gymnasium's FlattenObservation.
    """
    import gymnasium

    make = _maker(env)
    made = gymnasium.make(env, **options) if make is None else make(**options)
    if isinstance(made, gymnasium.Env) and is_flattened(space := made.observation_space):
        checked = functools.partial(_checked, space)
        made = gymnasium.wrappers.TransformObservation(made, checked, space)
        return gymnasium.wrappers.FlattenObservation(made)
    return made


def _checked(space: gymnasium.Space, observation: Any) -> Any:
    """Return the observation. Raise ConfigurationError if a number is outside of its Discrete or
    MultiDiscrete space, because gymnasium would flatten it to the same vector as another number."""
    import numpy as np
    from gymnasium import spaces

    if isinstance(space, spaces.Dict):
        for name, part in space.spaces.items():
            _checked(part, observation[name])
    elif isinstance(space, spaces.Tuple):
        for part, value in zip(space.spaces, observation, strict=True):
            _checked(part, value)
    elif isinstance(space, spaces.Discrete | spaces.MultiDiscrete):
        number = np.asarray(observation) - space.start
        count = space.n if isinstance(space, spaces.Discrete) else space.nvec
        if not ((number >= 0) & (number < count)).all():
            raise ConfigurationError(
                f"an observation is {observation}, expected values of its space {space}; correct "
                "the environment or its space"
            )
    return observation


_LONGEST = 10_000  # number of elements of the longest observation that is flattened


def is_flattened(space: gymnasium.Space) -> bool:
    """Whether observations are flattened. If the space is a Box, they are not: vectors and images
    need no flattening, and for a Box of any other shape, the user must decide."""
    from gymnasium import spaces

    def of_vectors(part: gymnasium.Space) -> bool:
        if isinstance(part, spaces.Dict):
            return all(map(of_vectors, part.spaces.values()))
        if isinstance(part, spaces.Tuple):
            return all(map(of_vectors, part.spaces))
        if isinstance(part, spaces.Box):
            return len(part.shape) <= 1
        return isinstance(part, spaces.Discrete | spaces.MultiDiscrete | spaces.MultiBinary)

    small = not isinstance(space, spaces.Box) and of_vectors(space)
    return small and spaces.flatdim(space) <= _LONGEST


def for_collectors(
    env: str, reward_clip: float = 0.0, *, wrapped: bool = False, clip_actions: bool = False
) -> str | Callable[[], gymnasium.Env]:
    """Return ``env`` in the form that a collector takes. If ``env`` names a function, each worker
    imports it.

    Args:
        reward_clip: rewards are clipped to -reward_clip .. reward_clip; 0: no clipping.
        wrapped: see :class:`Task`.
        clip_actions: continuous actions are clipped to the environment's bounds.
    """
    if reward_clip or clip_actions:
        return functools.partial(_clipped, env, reward_clip, clip_actions)
    if _maker(env) is None and not wrapped:
        return env
    return functools.partial(make_env, env)


def as_number(reward: Any) -> float:
    """Return a reward as a number. Some environments return an array of one element."""
    return float(reward.item() if hasattr(reward, "item") else reward)


# The keys of a replay row.
TRANSITION = (
    "observation", "action", ("next", "observation"), ("next", "reward"), ("next", "done"),
    ("next", "terminated"),
)  # fmt: skip


def check_finite(rows: TensorDictBase, env: str) -> None:
    """Raise TorchRLDistError if ``rows`` hold a number that is not finite."""
    for key, value in rows.items(True, True):
        if value.is_floating_point() and not value.isfinite().all():
            name = key if isinstance(key, str) else "/".join(key)
            raise TorchRLDistError(
                f"{env}: {name} contains {value[~value.isfinite()][0].item()}, expected finite "
                "numbers; rows with this value were not written to the buffer. Check what step() "
                "and reset() of the environment return"
            )


def _clipped(env: str, bound: float, clip_actions: bool) -> gymnasium.Env:
    from gymnasium.wrappers import ClipAction, TransformReward

    made = make_env(env)
    if clip_actions:
        made = ClipAction(made)
    if not bound:
        return made

    def clip(reward: Any) -> float:
        value = as_number(reward)
        return value if math.isnan(value) else min(bound, max(-bound, value))

    return TransformReward(made, clip)


def look_at(env: str, *, continuous: Continuous) -> Task:
    """Build ``env`` once, read its spaces, and close it.

    Args:
        env: a gymnasium id, or ``package.module:make``.
        continuous: the kinds of continuous actions that are accepted. With ``"bounded"``, an
            environment with continuous actions must have flat observations.

    Raises:
        ConfigurationError: there is no such environment, it cannot be built here, its
            observations are neither flat nor images, or its actions are neither discrete nor
            accepted.
    """
    import gymnasium

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            made = make_env(env)
            if not isinstance(made, gymnasium.Env):
                raise TypeError(f"it returned a {type(made).__name__}")
    except (Exception, SystemExit) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        near = difflib.get_close_matches(env, gymnasium.registry, 1)
        if isinstance(error, gymnasium.error.NameNotFound) and near:
            reason = f"did you mean {near[0]}?"  # gymnasium's own suggestion has no version
        raise ConfigurationError(
            f"--env: got {env!r}, expected the id of an environment that gymnasium can build here, "
            f"or package.module:function that returns an environment ({reason})"
        ) from error
    full = made.spec.id if made.spec is not None else ""
    name = re.escape(env.rpartition(":")[2])
    if named_function(env) is None and re.fullmatch(rf"{name}-v\d+", full):
        made.close()
        raise ConfigurationError(f"--env: got {env!r}, which names no version; use {full}")
    try:
        observations, actions = made.observation_space, made.action_space
        threshold = made.spec.reward_threshold if made.spec is not None else None
        wrapped = isinstance(made, gymnasium.wrappers.FlattenObservation)
    finally:
        made.close()
    is_discrete = isinstance(actions, gymnasium.spaces.Discrete)
    size, images = _observed(env, observations, is_discrete or continuous != "bounded")
    if isinstance(actions, gymnasium.spaces.Discrete):
        if int(actions.start) != 0:
            raise ConfigurationError(
                f"--env: {env} takes actions {actions}, expected Discrete actions that start at 0; "
                "wrap it in gymnasium.wrappers.TransformAction(env, lambda a: a + "
                f"{actions.start}, gymnasium.spaces.Discrete({actions.n}))"
            )
        return Task(
            env, size, threshold, num_actions=int(actions.n), images=images, wrapped=wrapped
        )
    low, high = _bounds(env, actions, continuous)
    return Task(
        env,
        size,
        threshold,
        action_low=tuple(map(float, low.tolist())),
        action_high=tuple(map(float, high.tolist())),
        images=images,
        wrapped=wrapped,
    )


def _observed(env: str, space: gymnasium.Space, may_be_images: bool) -> tuple[int, Images | None]:
    """Return the number of elements of an observation, and the form of images, or None if flat."""
    import gymnasium
    import numpy as np

    box = space if isinstance(space, gymnasium.spaces.Box) else None
    if box is not None and len(box.shape) == 1:
        return box.shape[0], None
    if box is not None and may_be_images and len(box.shape) == 3 and box.dtype == np.uint8:
        channels, height, width = box.shape
        if _has_channels_last(box):
            raise ConfigurationError(
                f"--env: {env} has images of shape {box.shape}, expected [channels, height, "
                "width], but the last axis looks like the channels; wrap it in "
                "gymnasium.wrappers.TransformObservation(env, lambda x: x.transpose(2, 0, 1), "
                f"gymnasium.spaces.Box(0, {box.high.max()}, {(width, channels, height)}, "
                "numpy.uint8))"
            )
        images = Images((channels, height, width), float(max(1, box.high.max())))
        return math.prod(box.shape), images
    more = ", or images: uint8 [channels, height, width]" if may_be_images else ""
    raise ConfigurationError(
        f"--env: {env} has observations {_short(space)}, expected a Box with one dimension{more}; "
        "to learn from one long vector, wrap the environment in "
        "gymnasium.wrappers.FlattenObservation"
    )


def _has_channels_last(box: gymnasium.spaces.Box) -> bool:
    """Whether images are ``[height, width, channels]``, judging by their shape and bounds."""
    first, second, last = box.shape
    is_smallest = last < min(first, second)
    colours = last == 3 and bool((box.low == 0).all() and (box.high == 255).all())
    return colours or (is_smallest and (last <= 4 or first == second))


def _bounds(env: str, actions: gymnasium.Space, continuous: Continuous) -> tuple[Any, Any]:
    """Return the bounds of continuous actions as float32, after checking them."""
    import gymnasium
    import numpy as np

    expected = {"none": "Discrete", "bounded": "Discrete, or a bounded Box with one dimension"}
    wanted = expected.get(continuous, "Discrete, or a Box with one dimension")
    if continuous == "none" or not isinstance(actions, gymnasium.spaces.Box):
        raise ConfigurationError(
            f"--env: {env} takes actions {actions}, expected {wanted}{_numbered(actions)}"
        )
    if len(actions.shape) != 1:
        raise ConfigurationError(
            f"--env: {env} takes actions {_short(actions)}, expected {wanted}; wrap it in "
            "gymnasium.wrappers.TransformAction, with a function that reshapes actions"
        )
    if not np.issubdtype(actions.dtype, np.floating):
        raise ConfigurationError(
            f"--env: {env} takes actions {actions}, expected a Box of floating-point numbers; "
            "wrap it in a gymnasium.ActionWrapper that takes floats and rounds them"
        )
    low, high = _within(actions.low, actions.high)
    with np.errstate(over="ignore"):
        width = high - low
    may_be_unbounded = continuous == "any"
    if not ((np.isfinite(width) | may_be_unbounded) & (width > 0)).all():
        finite = "" if may_be_unbounded else " whose difference is a finite float32"
        raise ConfigurationError(
            f"--env: {env} takes actions {actions}, expected bounds low < high{finite}; wrap it in "
            "gymnasium.wrappers.RescaleAction, or leave out each dimension whose bounds are equal"
        )
    return low, high


_MOST_COMBINATIONS = 10_000  # limit of combined actions: each needs an output of the network


def _numbered(actions: gymnasium.Space) -> str:
    """Return the end of an error message: how to make combined actions discrete, or which recipes
    take continuous actions."""
    from gymnasium import spaces

    wrapper = "gymnasium.wrappers.TransformAction"
    if isinstance(actions, spaces.Box):
        return "; ddppo and sac learn continuous actions"
    sizes: tuple[int, ...] = ()
    if isinstance(actions, spaces.MultiDiscrete) and not actions.start.any():
        sizes = tuple(map(int, actions.nvec.flat))
    elif isinstance(actions, spaces.MultiBinary):
        sizes = (2,) * math.prod(actions.shape)
    if len(actions.shape or ()) != 1 or not 0 < math.prod(sizes) <= _MOST_COMBINATIONS or not sizes:
        return f"; wrap it in {wrapper}, with a function that maps each number to an action"
    return (
        f"; number all combinations: {wrapper}(env, lambda a: numpy.array(numpy.unravel_index(a, "
        f"{sizes})), gymnasium.spaces.Discrete({math.prod(sizes)}))"
    )


def _within(low: Any, high: Any) -> tuple[Any, Any]:
    """Return the bounds as float32, rounded inwards, because policies compute in float32."""
    import numpy as np

    with np.errstate(over="ignore"):
        low32, high32 = low.astype(np.float32), high.astype(np.float32)
    low32 = np.where(low32 < low, np.nextafter(low32, np.float32(np.inf)), low32)
    return low32, np.where(high32 > high, np.nextafter(high32, np.float32(-np.inf)), high32)


def _short(space: gymnasium.Space) -> str:
    """Return a short text for a space, because a Box of images prints all its bounds."""
    text = str(space)
    return text if len(text) < 100 else f"{text[:100]}..."
