"""What a recipe must know about a gymnasium environment before processes start."""

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
from typing import TYPE_CHECKING, Any

from ...errors import ConfigurationError, TorchRLDistError

if TYPE_CHECKING:
    import gymnasium
    from tensordict import TensorDictBase

MAX_EPISODE_STEPS = 10_000
"""Length at which an evaluation ends an episode, because some environments never end one."""


ATARI_STACK = 4  # images in an observation


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
        images: None if observations are flat."""

    env: str
    observation_size: int
    reward_threshold: float | None
    num_actions: int = 0
    action_low: tuple[float, ...] = ()
    action_high: tuple[float, ...] = ()
    images: Images | None = None

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

    Also find modules in the working directory. Raises what the import of the module raises.
    """
    module, colon, name = text.partition(":")
    if not colon or not name.isidentifier():
        return None
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)
    return getattr(importlib.import_module(module), name, None)


def env_factory(env: str) -> Callable[..., gymnasium.Env] | None:
    """Return the function that ``env`` names as ``package.module:function``; None for an id.

    gymnasium's own ids may also begin with a module (``module:Name-v0``). If the module has a
    function of this name, the function takes precedence.
    """
    return named_function(env)


@contextlib.contextmanager
def _needs(extra: str) -> Iterator[None]:
    try:
        yield
    except ModuleNotFoundError as error:
        raise ConfigurationError(
            f"{error.name} is not installed: pip install 'torchrl-dist[{extra}]'"
        ) from error


def atari(env: str, **options: Any) -> gymnasium.Env:
    """Make ``ALE/...`` as in Machado et al. 2018.

    Each action is repeated for 4 frames. Version 5 of a game ignores one action in four (sticky
    actions). The maximum of the last two frames becomes one gray image, 84 x 84. The last 4 images
    are an observation, uint8 ``[4, 84, 84]``. An episode begins with up to 30 idle frames."""
    import gymnasium
    from gymnasium.wrappers import AtariPreprocessing, FrameStackObservation

    with _needs("atari"), warnings.catch_warnings():
        # The import registers the ids. Register again, in case gymnasium looked the id up before.
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

    with _needs("minigrid"):
        import minigrid
        from minigrid.wrappers import ImgObsWrapper, OneHotPartialObsWrapper
    gymnasium.register_envs(minigrid)
    made: Any = ImgObsWrapper(OneHotPartialObsWrapper(gymnasium.make(env, **options)))
    height, width, channels = made.observation_space.shape
    space = gymnasium.spaces.Box(0, 1, (channels, height, width), made.observation_space.dtype)
    return gymnasium.wrappers.TransformObservation(made, lambda x: x.transpose(2, 0, 1), space)


_IMAGES: dict[str, Callable[..., Any]] = {"ALE/": atari, "MiniGrid-": minigrid}


def image_factory(env: str) -> Callable[..., gymnasium.Env] | None:
    """Return the function for an id of Atari or MiniGrid; None for other ids."""
    for prefix, make in _IMAGES.items():
        if env.startswith(prefix):
            return functools.partial(make, env)
    return None


def _maker(env: str) -> Callable[..., gymnasium.Env] | None:
    """Return the function that makes ``env``, or None if ``gymnasium.make`` does."""
    return image_factory(env) or env_factory(env)


def make_env(env: str, **options: Any) -> gymnasium.Env:
    """Make one environment. ``options``, such as ``render_mode``, go to gymnasium or the function.

    Ids of Atari and MiniGrid go through :func:`atari` and :func:`minigrid`.
    """
    import gymnasium

    make = _maker(env)
    return gymnasium.make(env, **options) if make is None else make(**options)


def for_collectors(
    env: str, reward_clip: float = 0.0, *, clip_actions: bool = False
) -> str | Callable[[], gymnasium.Env]:
    """Return ``env`` as a collector takes it. If ``env`` names a function, each worker imports it.

    Args:
        reward_clip: rewards are clipped to plus and minus this; 0: no clipping.
        clip_actions: continuous actions are clipped to the environment's bounds.
    """
    if reward_clip or clip_actions:
        return functools.partial(_clipped, env, reward_clip, clip_actions)
    return env if _maker(env) is None else functools.partial(make_env, env)


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
                "numbers; these rows were not written. Check what step() and reset() of the "
                "environment return"
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


def look_at(env: str, *, discrete: bool | None) -> Task:
    """Build ``env`` once, read its spaces, and close it.

    Args:
        env: a gymnasium id, or ``package.module:make``.
        discrete: True: actions must be discrete; False: continuous and bounded, and observations
            flat; None: discrete or continuous.

    Raises:
        ConfigurationError: there is no such environment, it cannot be built here, its
            observations are neither a flat Box nor images, or its actions are not as
            ``discrete`` says.
    """
    import gymnasium
    import numpy as np

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
            reason = f"did you mean {near[0]}?"  # gymnasium's message names no version
        raise ConfigurationError(
            f"--env: got {env!r}, expected the id of an environment that gymnasium can build here, "
            f"or package.module:function that returns one ({reason})"
        ) from error
    full = made.spec.id if made.spec is not None else ""
    name = re.escape(env.rpartition(":")[2])
    if env_factory(env) is None and re.fullmatch(rf"{name}-v\d+", full):
        made.close()
        raise ConfigurationError(f"--env: got {env!r}, which names no version; use {full}")
    try:
        observations, actions = made.observation_space, made.action_space
        threshold = made.spec.reward_threshold if made.spec is not None else None
    finally:
        made.close()
    images = None
    box = observations if isinstance(observations, gymnasium.spaces.Box) else None
    if box is not None and discrete is not False and len(box.shape) == 3 and box.dtype == np.uint8:
        channels, height, width = box.shape
        images = Images((channels, height, width), float(max(1, box.high.max())))
    elif box is None or len(box.shape) != 1:
        more = "" if discrete is False else ", or images: uint8 [channels, height, width]"
        raise ConfigurationError(
            f"--env: {env} observes {_short(observations)}, expected a Box with one dimension{more}"
        )
    size = math.prod(box.shape)
    if discrete or (discrete is None and isinstance(actions, gymnasium.spaces.Discrete)):
        if not isinstance(actions, gymnasium.spaces.Discrete) or int(actions.start) != 0:
            raise ConfigurationError(
                f"--env: {env} takes actions {actions}, expected Discrete, starting at 0"
            )
        return Task(env, size, threshold, num_actions=int(actions.n), images=images)
    if not isinstance(actions, gymnasium.spaces.Box) or len(actions.shape) != 1:
        wanted = "a bounded Box" if discrete is False else "Discrete, or a Box"
        raise ConfigurationError(
            f"--env: {env} takes actions {actions}, expected {wanted} with one dimension"
        )
    if not np.issubdtype(actions.dtype, np.floating):
        raise ConfigurationError(
            f"--env: {env} takes actions {actions}, expected a Box of floating-point numbers; "
            "wrap it in a gymnasium.ActionWrapper that takes floats and rounds them"
        )
    low, high = _within(actions.low, actions.high)
    with np.errstate(over="ignore"):
        width = high - low
    may_be_unbounded = discrete is None
    if not ((np.isfinite(width) | may_be_unbounded) & (width > 0)).all():
        finite = "" if may_be_unbounded else " whose difference is a finite float32"
        raise ConfigurationError(
            f"--env: {env} takes actions {actions}, expected bounds low < high{finite}; wrap it in "
            "gymnasium.wrappers.RescaleAction, or leave out the actions that cannot change"
        )
    return Task(
        env,
        size,
        threshold,
        action_low=tuple(map(float, low.tolist())),
        action_high=tuple(map(float, high.tolist())),
        images=images,
    )


def _within(low: Any, high: Any) -> tuple[Any, Any]:
    """Return the bounds as float32, rounded inwards, because a policy computes in float32."""
    import numpy as np

    with np.errstate(over="ignore"):
        low32, high32 = low.astype(np.float32), high.astype(np.float32)
    low32 = np.where(low32 < low, np.nextafter(low32, np.float32(np.inf)), low32)
    return low32, np.where(high32 > high, np.nextafter(high32, np.float32(-np.inf)), high32)


def _short(space: gymnasium.Space) -> str:
    """Return a short text for a space, because a Box of images prints all its bounds."""
    text = str(space)
    return text if len(text) < 100 else f"{text[:100]}..."
