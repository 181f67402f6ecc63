"""Steps several gymnasium envs at once and hides how each kind of vector env resets itself.

A driver's ``step`` writes the true next observation (also where an episode ended) and, separately,
the observation that the policy sees next (after a reset where one was due). Every mode but
next-step autoreset gives one real transition per env and call; there, a call that merely resets an
env is marked in ``valid`` and dropped by the rollout.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import gymnasium
import numpy as np
from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv
from gymnasium.utils import seeding
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv

from torchrl_dist.collect.loop.spaces import ObservationLeaf
from torchrl_dist.errors import ConfigurationError

# Of the native vector envs only this one can be seeded env by env, by CartPoleDriver.
_CARTPOLE = (
    CartPoleVectorEnv,
    "gymnasium.envs.classic_control.cartpole:CartPoleVectorEnv",
)
_STARTS = 16
Arrays = Sequence[np.ndarray]
StepResult = tuple[Any, Any, Any]  # reward, terminated, truncated, each [N]


class EnvDriver(Protocol):
    """N envs stepped together. ``leaves`` is set by the rollout before the first reset."""

    num_envs: int
    one_seed_only: bool  # the envs cannot be seeded one by one
    single_observation_space: gymnasium.Space
    single_action_space: gymnasium.Space
    leaves: tuple[ObservationLeaf, ...]
    valid: np.ndarray | None  # bool [N] of the last step; None: every step is a real transition

    def reset(self, seeds: Sequence[int] | None, current: Arrays) -> None:
        """Start new episodes in all envs and write their observations."""

    def reset_some(self, envs: Sequence[int], current: Arrays) -> None:
        """Start new episodes in these and write their observations.

        Raises:
            ConfigurationError: they cannot be reset one by one.
        """

    def step(self, actions: np.ndarray, following: Arrays, current: Arrays) -> StepResult:
        """One step of all envs; ``following`` gets ("next", obs), ``current`` the next root."""

    def close(self) -> None: ...

    @property
    def target(self) -> Any:
        """What :func:`torchrl_dist.collect.loop.access.visit` is to visit."""


class EnvListDriver:
    """Plain envs in a row. Cheaper than SyncVectorEnv, which merges infos and copies results."""

    valid: np.ndarray | None = None
    one_seed_only = False

    def __init__(self, envs: Sequence[gymnasium.Env]) -> None:
        self.envs = list(envs)
        self.num_envs = len(self.envs)
        self.single_observation_space = self.envs[0].observation_space
        self.single_action_space = self.envs[0].action_space
        self.leaves = ()
        self._reward = np.zeros(self.num_envs)
        self._terminated = np.zeros(self.num_envs, dtype=bool)
        self._truncated = np.zeros(self.num_envs, dtype=bool)
        # Envs expect an action of the type their own space samples: an int, not an array.
        self._scalar_action = isinstance(self.single_action_space, gymnasium.spaces.Discrete)

    @property
    def leaves(self) -> tuple[ObservationLeaf, ...]:
        """Of the observations."""
        return self._leaves

    @leaves.setter
    def leaves(self, leaves: tuple[ObservationLeaf, ...]) -> None:
        self._leaves = leaves
        # One array as it is, of this shape, saves a tenth of a CartPole step.
        self._plain = leaves[0].shape if len(leaves) == 1 and leaves[0].plain else None

    def reset(self, seeds: Sequence[int] | None, current: Arrays) -> None:
        for i, env in enumerate(self.envs):
            observation, _ = env.reset(seed=None if seeds is None else seeds[i])
            self._write(current, i, observation)

    def reset_some(self, envs: Sequence[int], current: Arrays) -> None:
        for i in envs:
            observation, _ = self.envs[i].reset()
            self._write(current, i, observation)

    def step(self, actions: np.ndarray, following: Arrays, current: Arrays) -> StepResult:
        per_env = actions.tolist() if self._scalar_action else actions
        plain = self._plain
        for i, env in enumerate(self.envs):
            observation, reward, terminated, truncated, _ = env.step(per_env[i])
            try:
                self._reward[i] = 0.0 if reward is None else reward  # as GymWrapper
                self._terminated[i] = terminated
                self._truncated[i] = truncated
            except (TypeError, ValueError):  # arrays of one element, which GymWrapper takes
                self._reward[i] = np.asarray(reward).item()
                self._terminated[i] = np.asarray(terminated).item()
                self._truncated[i] = np.asarray(truncated).item()
            is_plain = type(observation) is np.ndarray and observation.shape == plain
            if is_plain:
                following[0][i] = observation
            else:
                self._write(following, i, observation)
            if terminated or truncated:
                observation, _ = env.reset()
                is_plain = type(observation) is np.ndarray and observation.shape == plain
            if is_plain:
                current[0][i] = observation
            else:
                self._write(current, i, observation)
        return self._reward, self._terminated, self._truncated

    @property
    def target(self) -> Any:
        return self.envs

    def _write(self, outs: Arrays, i: int, observation: Any) -> None:
        for leaf, out in zip(self.leaves, outs, strict=True):
            leaf.write(out[i, ...], observation)

    def close(self) -> None:
        for env in self.envs:
            env.close()


class _VectorDriver:
    """What all drivers of a ``gymnasium.vector.VectorEnv`` share."""

    valid: np.ndarray | None = None

    def __init__(self, env: VectorEnv) -> None:
        self.env = env
        self.num_envs = env.num_envs
        self.single_observation_space = env.single_observation_space
        self.single_action_space = env.single_action_space
        self.leaves: tuple[ObservationLeaf, ...] = ()
        self.one_seed_only = self.num_envs > 1 and not isinstance(
            env.unwrapped, SyncVectorEnv | AsyncVectorEnv
        )

    def __repr__(self) -> str:
        return repr(self.env)

    @property
    def target(self) -> Any:
        return self.env

    def _write(self, observation: Any, outs: Arrays) -> None:
        for leaf, out in zip(self.leaves, outs, strict=True):
            leaf.write(out, observation)

    def reset(self, seeds: Sequence[int] | None, current: Arrays) -> None:
        seed: Any = None
        if seeds is not None:
            several = isinstance(self.env.unwrapped, SyncVectorEnv | AsyncVectorEnv)
            seed = list(seeds) if several else seeds[0]
        observation, _ = self.env.reset(seed=seed)
        self._write(observation, current)

    def reset_some(self, envs: Sequence[int], current: Arrays) -> None:
        if envs:
            raise ConfigurationError(
                f"{self.env} resets its envs itself; reset() without an index starts new episodes "
                "in all of them"
            )

    def close(self) -> None:
        self.env.close()


class MaskedResetDriver(_VectorDriver):
    """DISABLED autoreset, and gymnasium's own Sync/AsyncVectorEnv in next-step mode: there, a reset
    by mask before the next step takes the place of the automatic one."""

    def reset_some(self, envs: Sequence[int], current: Arrays) -> None:
        mask = np.zeros(self.num_envs, dtype=bool)
        mask[list(envs)] = True
        if mask.any():
            observation, _ = self.env.reset(options={"reset_mask": mask})
            self._write(observation, current)

    def step(self, actions: np.ndarray, following: Arrays, current: Arrays) -> StepResult:
        observation, reward, terminated, truncated, _ = self.env.step(actions)
        self._write(observation, following)
        done = np.logical_or(terminated, truncated)
        if done.any():
            observation, _ = self.env.reset(options={"reset_mask": done})
        self._write(observation, current)
        return reward, terminated, truncated


class SameStepDriver(_VectorDriver):
    """The env resets inside the step that ended the episode and passes the last one in ``info``."""

    def step(self, actions: np.ndarray, following: Arrays, current: Arrays) -> StepResult:
        observation, reward, terminated, truncated, info = self.env.step(actions)
        self._write(observation, following)
        done = np.logical_or(terminated, truncated)
        if done.any():
            final = info.get("final_obs", info.get("final_observation"))
            if final is None:
                raise ConfigurationError(
                    f"{self.env} declares same-step autoreset, but the info of a step that ended "
                    f"an episode has no 'final_obs' (it has {sorted(info)}): without it the last "
                    "observation of the episode is lost"
                )
            for i in np.flatnonzero(done).tolist():
                last = final[i] if not isinstance(final, dict) else _index(final, i)
                for leaf, out in zip(self.leaves, following, strict=True):
                    leaf.write(out[i, ...], last)
        self._write(observation, current)
        return reward, terminated, truncated


def _index(tree: Any, i: int) -> Any:
    return {k: _index(v, i) for k, v in tree.items()} if isinstance(tree, dict) else tree[i]


class NextStepDriver(_VectorDriver):
    """Any other env with next-step autoreset: its reset steps are reported as not valid."""

    def __init__(self, env: VectorEnv) -> None:
        super().__init__(env)
        self._resets_now = np.zeros(self.num_envs, dtype=bool)
        self.valid = np.ones(self.num_envs, dtype=bool)

    def reset(self, seeds: Sequence[int] | None, current: Arrays) -> None:
        super().reset(seeds, current)
        self._resets_now = np.zeros(self.num_envs, dtype=bool)

    def step(self, actions: np.ndarray, following: Arrays, current: Arrays) -> StepResult:
        observation, reward, terminated, truncated, _ = self.env.step(actions)
        self._write(observation, following)
        self._write(observation, current)
        self.valid = ~self._resets_now
        self._resets_now = np.logical_or(terminated, truncated) & self.valid
        return reward, terminated, truncated


class EnvPoolDriver(NextStepDriver):
    """EnvPool resets envs in the next step, and takes its seed only when it is made."""

    DEFAULT_SEED = 42

    env: Any  # EnvPool's own class, which has a config

    def __init__(self, env: Any) -> None:
        super().__init__(env)
        self.one_seed_only = False  # which is what it warns of
        if env.is_async:
            raise ConfigurationError(
                f"make_env gave an EnvPool with batch_size={env.config['batch_size']} of "
                f"{self.num_envs} envs, whose steps are those of some envs only; leave batch_size "
                "out, and use more workers or env_processes so that slow envs hold up fewer"
            )
        self._seeds: list[int] | None = None  # asked for first

    def reset(self, seeds: Sequence[int] | None, current: Arrays) -> None:
        if seeds is not None and self._seeds is None:
            self._seeds = list(seeds)
            in_vain = self.env.config["seed"] == self.DEFAULT_SEED
        else:
            in_vain = seeds is not None and list(seeds) != self._seeds
        if in_vain:
            warnings.warn(
                "an EnvPool cannot be seeded once it is made: its episodes go on with seed "
                f"{self.env.config['seed']}. For seeds that differ per worker and follow from the "
                "collector's, let make_env pass seed=np.random.randint(2**31) to envpool.make: "
                "NumPy was seeded before make_env is called",
                stacklevel=2,
            )
        super().reset(None, current)


class CartPoleDriver(_VectorDriver):
    """Gymnasium's native vector CartPole, reset in the step that ends an episode.

    It knows next-step autoreset only, which makes rollouts ragged. Its state is plain arrays, so
    the reset that it would do in its next step is done here at once.
    """

    ATTRIBUTES = ("state", "steps", "prev_done", "low", "high")

    def __init__(self, env: VectorEnv) -> None:
        super().__init__(env)
        self.one_seed_only = False
        # One per env, as single ones have, so that an env's episodes follow from its own seed.
        self._generators: list[np.random.Generator] = []
        self._starts: list[list[np.ndarray]] = []  # of the next episodes, drawn together

    def reset(self, seeds: Sequence[int] | None, current: Arrays) -> None:
        env: Any = self.env
        observation, _ = env.reset(seed=None if seeds is None else seeds[0])
        if seeds is not None:
            self._generators = [seeding.np_random(seed)[0] for seed in seeds]
            self._starts = [[] for _ in seeds]
        if self._generators:
            self._draw(range(self.num_envs))
            observation = env.state.T.astype(np.float32)
        self._write(observation, current)

    def _draw(self, chosen: Iterable[int]) -> None:
        env: Any = self.env
        for i in chosen:
            if not self._starts[i]:
                drawn = self._generators[i].uniform(env.low, env.high, (_STARTS, 4))
                self._starts[i] = list(drawn[::-1])
            env.state[:, i] = self._starts[i].pop()

    def step(self, actions: np.ndarray, following: Arrays, current: Arrays) -> StepResult:
        env: Any = self.env
        observation, reward, terminated, truncated, _ = env.step(actions)
        self._write(observation, following)
        if env.prev_done.any():
            done = env.prev_done
            if self._generators:
                self._draw(np.flatnonzero(done).tolist())
            else:
                size = (4, int(done.sum()))
                env.state[:, done] = env.np_random.uniform(env.low, env.high, size)
            env.steps[done] = 0
            env.prev_done = np.zeros_like(done)
            observation = env.state.T.astype(np.float32)
        self._write(observation, current)
        return reward, terminated, truncated


def vector_driver(env: VectorEnv) -> EnvDriver:
    """The driver for a vector env, by its declared autoreset mode (next-step where it has none)."""
    if type(env) is CartPoleVectorEnv and all(
        hasattr(env, name) for name in CartPoleDriver.ATTRIBUTES
    ):
        return CartPoleDriver(env)
    if _of_envpool(env):
        return EnvPoolDriver(env)
    declared = env.metadata.get("autoreset_mode", AutoresetMode.NEXT_STEP)
    mode = AutoresetMode(declared)
    if mode is AutoresetMode.SAME_STEP:
        return SameStepDriver(env)
    base = env.unwrapped
    # Without shared memory AsyncVectorEnv's workers do not notice such a reset (gymnasium 1.4.0).
    maskable = isinstance(base, SyncVectorEnv) or (
        isinstance(base, AsyncVectorEnv) and base.shared_memory
    )
    if mode is AutoresetMode.DISABLED or maskable:
        return MaskedResetDriver(env)
    return NextStepDriver(env)


def _of_envpool(env: Any) -> bool:
    return any(kind.__module__.startswith("envpool") for kind in type(env).__mro__)


def make_driver(first: Any, make_env: str | Callable[[], Any], num_envs: int) -> EnvDriver:
    """A driver for what ``make_env`` names or has just returned (``first``).

    Raises:
        ConfigurationError: not a gymnasium env, or a vector env of another size than asked for.
    """
    if isinstance(first, str):
        return _driver_from_id(first, num_envs)
    if isinstance(first, VectorEnv):
        if num_envs not in (1, first.num_envs):
            raise ConfigurationError(
                f"make_env returned a vector env of {first.num_envs} envs, but num_envs={num_envs}"
                f"; leave num_envs out or pass {first.num_envs}"
            )
        return vector_driver(first)
    if _of_envpool(first):
        raise ConfigurationError(
            "make_env gave an EnvPool that is no gymnasium.vector.VectorEnv; make it with "
            "env_type='gymnasium', by a newer EnvPool (1.2.5 is one), or return "
            "torchrl.envs.MultiThreadedEnv(num_workers=..., env_name=...), which steps it"
        )
    if isinstance(first, gymnasium.Env) and callable(make_env):
        return EnvListDriver([first, *(make_env() for _ in range(num_envs - 1))])
    raise ConfigurationError(
        f"make_env gave {type(first)}; expected a gymnasium id, a gymnasium.Env, a "
        "gymnasium.vector.VectorEnv or a torchrl.envs.EnvBase"
    )


def _driver_from_id(env_id: str, num_envs: int) -> EnvDriver:
    module, _, name = env_id.rpartition(":")
    if module:
        importlib.import_module(module)  # as gymnasium.make does: it registers the env
    spec = gymnasium.spec(name)
    if num_envs > 1 and spec.vector_entry_point in _CARTPOLE and not spec.additional_wrappers:
        return vector_driver(
            gymnasium.make_vec(env_id, num_envs, vectorization_mode="vector_entry_point")
        )
    return EnvListDriver([gymnasium.make(env_id) for _ in range(num_envs)])
