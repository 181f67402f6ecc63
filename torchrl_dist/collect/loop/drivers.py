"""Step several gymnasium envs together, and hide how each kind of vector env resets its envs.

A driver's ``step`` writes two observations per env: the true next observation, even at the end of
an episode, and the policy's next input, which after a reset is the first observation of the new
episode. Each call of ``step`` makes one transition per env. With next-step autoreset, however, a
call may reset an env instead of stepping it: ``valid`` is then false for this env, and the rollout
drops the step.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import gymnasium
import numpy as np
import torch
from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv
from gymnasium.utils import seeding
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv

from torchrl_dist.collect.loop.spaces import ObservationLeaf
from torchrl_dist.errors import ConfigurationError

# Apart from SyncVectorEnv and AsyncVectorEnv, only this vector env has envs that can be seeded one
# by one. CartPoleDriver seeds them.
_CARTPOLE = (
    CartPoleVectorEnv,
    "gymnasium.envs.classic_control.cartpole:CartPoleVectorEnv",
)
_STARTS = 16
Arrays = Sequence[np.ndarray]
StepResult = tuple[Any, Any, Any]  # reward, terminated, truncated, each [N]


def observation_of(answer: Any, env: Any) -> Any:
    """Return the observation from the result of ``env.reset``.

    Raises:
        ConfigurationError: the result is not the tuple (observation, info).
    """
    if isinstance(answer, tuple) and len(answer) == 2:
        return answer[0]
    raise ConfigurationError(
        f"{env}: reset() returned {_described(answer)}; expected the tuple (observation, info). "
        f"{_OLD_API}"
    )


def transition_of(answer: Any, env: Any) -> tuple[Any, Any, Any, Any, Any]:
    """Return the result of ``env.step`` as a tuple of five values.

    Raises:
        ConfigurationError: ``env.step`` did not return five values.
    """
    if isinstance(answer, Sequence) and len(answer) == 5:
        return tuple(answer)
    raise ConfigurationError(
        f"{env}: step() returned {_described(answer)}; expected the tuple (observation, reward, "
        f"terminated, truncated, info). {_OLD_API}"
    )


def _described(answer: Any) -> str:
    if isinstance(answer, tuple | list):
        return f"a {type(answer).__name__} of {len(answer)} values"
    return f"one value ({type(answer).__name__})"


_OLD_API = (
    "The env seems to have the old API of gym; change reset() and step() as "
    "https://gymnasium.farama.org/introduction/migration_guide describes"
)


class EnvDriver(Protocol):
    """N envs that are stepped together. The rollout sets ``leaves``, which describe the tensors of
    an observation, before the first reset."""

    num_envs: int
    one_seed_only: bool  # whether the envs cannot be seeded one by one
    single_observation_space: gymnasium.Space
    single_action_space: gymnasium.Space
    leaves: tuple[ObservationLeaf, ...]
    target: Any  # the argument ``envs`` of :func:`torchrl_dist.collect.loop.access.visit`
    valid: np.ndarray | None  # bool [N], for the last step; None if all steps are transitions

    def reset(self, seeds: Sequence[int] | None, current: Arrays) -> None:
        """Start new episodes in all envs, and write the first observations into ``current``."""

    def reset_some(self, envs: Sequence[int], current: Arrays) -> None:
        """Start new episodes in the envs with these indices, and write the first observations into
        ``current``.

        Raises:
            ConfigurationError: the envs cannot be reset one by one.
        """

    def step(self, actions: np.ndarray, following: Arrays, current: Arrays) -> StepResult:
        """Step all envs. Write the true next observations into ``following`` and the policy's next
        inputs into ``current``."""

    def close(self) -> None: ...


class EnvListDriver:
    """A driver of a list of single envs. This driver is faster than SyncVectorEnv, because
    SyncVectorEnv merges infos and copies results."""

    valid: np.ndarray | None = None
    one_seed_only = False

    def __init__(self, envs: Sequence[gymnasium.Env]) -> None:
        self.envs = self.target = list(envs)
        self.num_envs = len(self.envs)
        self.single_observation_space = self.envs[0].observation_space
        self.single_action_space = self.envs[0].action_space
        self.leaves: tuple[ObservationLeaf, ...] = ()
        self._reward = np.zeros(self.num_envs)
        self._terminated = np.zeros(self.num_envs, dtype=bool)
        self._truncated = np.zeros(self.num_envs, dtype=bool)
        # Envs with a Discrete action space expect an int as action, not an array, because the space
        # samples ints.
        self._scalar_action = isinstance(self.single_action_space, gymnasium.spaces.Discrete)

    def reset(self, seeds: Sequence[int] | None, current: Arrays) -> None:
        # An observation that is a single array of this shape is written without conversion, which
        # saves a tenth of the time of a CartPole step.
        first, *more = self.leaves
        self._plain = first.shape if first.plain and not more else None
        for i, env in enumerate(self.envs):
            seed = None if seeds is None else seeds[i]
            try:
                answer = env.reset(seed=seed)
            except TypeError as error:
                if "unexpected keyword argument 'seed'" not in str(error):
                    raise
                raise ConfigurationError(
                    f"{env}: reset() does not accept seed=; expected reset(seed=None, "
                    f"options=None). {_OLD_API}"
                ) from error
            self._write(current, i, observation_of(answer, env))

    def reset_some(self, envs: Sequence[int], current: Arrays) -> None:
        for i in envs:
            env = self.envs[i]
            self._write(current, i, observation_of(env.reset(), env))

    def step(self, actions: np.ndarray, following: Arrays, current: Arrays) -> StepResult:
        per_env = actions.tolist() if self._scalar_action else actions
        plain = self._plain
        for i, env in enumerate(self.envs):
            answer = env.step(per_env[i])
            try:
                observation, reward, terminated, truncated, _ = answer
            except (TypeError, ValueError):
                observation, reward, terminated, truncated, _ = transition_of(answer, env)
            try:
                # GymWrapper also treats a reward of None as 0
                self._reward[i] = 0.0 if reward is None else reward
                self._terminated[i] = terminated
                self._truncated[i] = truncated
            except (TypeError, ValueError):  # accept arrays of one element, as GymWrapper does
                self._reward[i] = np.asarray(reward).item()
                self._terminated[i] = np.asarray(terminated).item()
                self._truncated[i] = np.asarray(truncated).item()
            is_plain = type(observation) is np.ndarray and observation.shape == plain
            if is_plain:
                following[0][i] = observation
            else:
                self._write(following, i, observation)
            if terminated or truncated:
                observation = observation_of(env.reset(), env)
                is_plain = type(observation) is np.ndarray and observation.shape == plain
            if is_plain:
                current[0][i] = observation
            else:
                self._write(current, i, observation)
        return self._reward, self._terminated, self._truncated

    def _write(self, outs: Arrays, i: int, observation: Any) -> None:
        for leaf, out in zip(self.leaves, outs, strict=True):
            leaf.write(out[i, ...], observation)

    def close(self) -> None:
        for env in self.envs:
            env.close()


def _arrays(value: Any) -> Any:
    """Convert tensors, including those in dicts and tuples, to NumPy arrays. Leave everything else
    unchanged."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().numpy()
    if isinstance(value, Mapping):
        return {key: _arrays(part) for key, part in value.items()}
    return tuple(_arrays(part) for part in value) if isinstance(value, tuple) else value


def _device_of(value: Any) -> torch.device | None:
    """Return the device of the first tensor in an observation, or None if the observation has no
    tensor."""
    if isinstance(value, Mapping):
        devices = (_device_of(part) for part in value.values())
        return next((device for device in devices if device is not None), None)
    return value.device if isinstance(value, torch.Tensor) else None


class TensorEnv:
    """A vector env that uses torch tensors, with an interface of NumPy arrays."""

    def __init__(self, env: Any, device: torch.device) -> None:
        self._env, self._device = env, device

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        observation, info = self._env.reset(**kwargs)
        return _arrays(observation), info

    def step(self, actions: np.ndarray) -> tuple[Any, ...]:
        *answer, info = self._env.step(torch.from_numpy(actions).to(self._device))
        return *_arrays(tuple(answer)), info


class _VectorDriver:
    """The base of all drivers of a vector env.

    Attributes:
        arrays: the env, with an interface of NumPy arrays. The attribute is a :class:`TensorEnv`
            around the env if the env's first reset returns tensors, otherwise the env itself.
    """

    valid: np.ndarray | None = None

    def __init__(self, env: Any) -> None:
        self.env = self.arrays = self.target = env
        self.num_envs: int = _of_chain(env, "num_envs")
        self.single_observation_space: gymnasium.Space = _of_chain(env, "single_observation_space")
        self.single_action_space: gymnasium.Space = _of_chain(env, "single_action_space")
        self.leaves: tuple[ObservationLeaf, ...] = ()
        self.one_seed_only = self.num_envs > 1 and not isinstance(
            env.unwrapped, SyncVectorEnv | AsyncVectorEnv
        )

    def __repr__(self) -> str:
        return repr(self.env)

    def _write(self, observation: Any, outs: Arrays) -> None:
        for leaf, out in zip(self.leaves, outs, strict=True):
            leaf.write(out, observation)

    def reset(self, seeds: Sequence[int] | None, current: Arrays) -> None:
        seed: Any = None
        if seeds is not None:
            several = isinstance(self.env.unwrapped, SyncVectorEnv | AsyncVectorEnv)
            seed = list(seeds) if several else seeds[0]
        observation = observation_of(self.arrays.reset(seed=seed), self.env)
        if self.arrays is self.env and (device := _device_of(observation)) is not None:
            self.arrays = TensorEnv(self.env, device)
            observation = _arrays(observation)
        self._write(observation, current)

    def step(self, actions: np.ndarray, following: Arrays, current: Arrays) -> StepResult:
        observation, *results, info = transition_of(self.arrays.step(actions), self.env)
        self._write(observation, following)
        done = np.logical_or(results[1], results[2])
        self._write(self._after(observation, results, done, following, info), current)
        reward, terminated, truncated = results
        return reward, terminated, truncated

    def _after(
        self, observation: Any, results: list[Any], done: np.ndarray, following: Arrays, info: Any
    ) -> Any:
        """Return the policy's next input after a step that ended episodes in the envs ``done [N]``.
        The other arguments are the results of the step: ``results`` are reward, terminated and
        truncated, and ``following`` already contains the observation."""
        raise NotImplementedError

    def reset_some(self, envs: Sequence[int], current: Arrays) -> None:
        if envs:
            raise ConfigurationError(
                f"{self.env} resets its envs itself, so these envs cannot be reset one by one; "
                "call reset() without an index to start new episodes in all envs"
            )

    def close(self) -> None:
        self.env.close()


class MaskedResetDriver(_VectorDriver):
    """A driver that uses a masked reset (``options={"reset_mask": ...}``) to reset the envs whose
    episodes ended, before the next step.

    This driver is used for vector envs with autoreset mode DISABLED, and for gymnasium's
    SyncVectorEnv and AsyncVectorEnv in next-step mode. If a SyncVectorEnv or AsyncVectorEnv in
    next-step mode is wrapped, :class:`NextStepDriver` is used, because a wrapper might reset all
    envs on a masked reset, or ignore the masked reset.
    """

    def reset_some(self, envs: Sequence[int], current: Arrays) -> None:
        mask = np.zeros(self.num_envs, dtype=bool)
        mask[list(envs)] = True
        if mask.any():
            observation, _ = self.arrays.reset(options={"reset_mask": mask})
            self._write(observation, current)

    def _after(
        self, observation: Any, results: list[Any], done: np.ndarray, following: Arrays, info: Any
    ) -> Any:
        if not done.any():
            return observation
        # copied, because the reset may change arrays that the env has returned
        results[:] = map(np.array, results)
        return self.arrays.reset(options={"reset_mask": done})[0]


class SameStepDriver(_VectorDriver):
    """A driver of a vector env that resets an env in the step that ends an episode, and returns the
    episode's last observation in ``info``."""

    _warned = False
    _ended: np.ndarray | None = None  # bool [N], for the last step; None if it ended no episode

    def step(self, actions: np.ndarray, following: Arrays, current: Arrays) -> StepResult:
        results = super().step(actions, following, current)
        if self._ended is not None and not self._warned:
            self._check_kept(self._ended, following, current)
        return results

    def _after(
        self, observation: Any, results: list[Any], done: np.ndarray, following: Arrays, info: Any
    ) -> Any:
        self._ended = done if done.any() else None
        if self._ended is not None:
            final = _arrays(info.get("final_obs", info.get("final_observation")))
            if final is None and _of_isaac_lab(self.env):
                self._mark_lost(np.flatnonzero(done), following)
            elif final is None:
                raise ConfigurationError(
                    f"{self.env} declares same-step autoreset, but the info of a step that ended "
                    f"an episode has no key 'final_obs' (its keys are {sorted(info)}), so the last "
                    "observation of the episode is lost; let the env add 'final_obs' to the info"
                )
            for i in np.flatnonzero(done).tolist() if final is not None else ():
                last = final[i] if not isinstance(final, dict) else _index(final, i)
                for leaf, out in zip(self.leaves, following, strict=True):
                    leaf.write(out[i, ...], last)
        return observation

    def _check_kept(self, ended: np.ndarray, following: Arrays, current: Arrays) -> None:
        """Warn if an env seems to overwrite the last observation of an episode. The env can do so,
        because gymnasium does not copy this observation before it resets the env."""
        if all(np.array_equal(a[ended], b[ended]) for a, b in zip(following, current, strict=True)):
            self._warned = True
            warnings.warn(
                f"the last observation of an episode of {self.env} equals the first observation "
                "of the next episode. If the env changes its observation in place, the last "
                "observation is lost, because gymnasium does not copy the last observation in "
                "same-step autoreset: let the env return copies, or build the vector env with "
                "autoreset disabled",
                stacklevel=2,
            )

    def _mark_lost(self, ended: np.ndarray, following: Arrays) -> None:
        """Replace the unknown last observations of episodes with NaN, as TorchRL does, or with 0 if
        the observations are not floating-point."""
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"{self.env} does not return the last observation of an episode; the ('next', "
                "...) observations of an episode's last step are therefore NaN (0 if they are "
                "not floating-point)",
                stacklevel=2,
            )
        for out in following:
            out[ended] = np.nan if out.dtype.kind == "f" else 0


def _index(tree: Any, i: int) -> Any:
    return {k: _index(v, i) for k, v in tree.items()} if isinstance(tree, dict) else tree[i]


class NextStepDriver(_VectorDriver):
    """A driver of a vector env with next-step autoreset that cannot be reset by mask. ``valid`` is
    false for an env if the last step only reset this env."""

    def __init__(self, env: Any) -> None:
        super().__init__(env)
        self._resets_now = np.zeros(self.num_envs, dtype=bool)
        self.valid = np.ones(self.num_envs, dtype=bool)

    def reset(self, seeds: Sequence[int] | None, current: Arrays) -> None:
        super().reset(seeds, current)
        self._resets_now = np.zeros(self.num_envs, dtype=bool)

    def _after(
        self, observation: Any, results: list[Any], done: np.ndarray, following: Arrays, info: Any
    ) -> Any:
        self.valid = ~self._resets_now
        self._resets_now = done & self.valid
        return observation


class EnvPoolDriver(NextStepDriver):
    """A driver of an EnvPool, which resets an env in the step after the end of an episode, and
    accepts a seed only when the EnvPool is made."""

    DEFAULT_SEED = 42

    env: Any  # typed as Any, because only EnvPool's own class has a config

    def __init__(self, env: Any) -> None:
        super().__init__(env)
        # false, because this driver's reset() warns about seeds instead of refusing them
        self.one_seed_only = False
        if env.is_async:
            raise ConfigurationError(
                f"make_env returned an EnvPool of {self.num_envs} envs with "
                f"batch_size={env.config['batch_size']}, which steps only some of the envs at a "
                "time; expected an EnvPool that steps all envs. Leave batch_size out; if slow "
                "envs delay the others, use more workers or env_processes"
            )
        self._seeds: list[int] | None = None  # the seeds of the first reset with seeds

    def reset(self, seeds: Sequence[int] | None, current: Arrays) -> None:
        if seeds is not None and self._seeds is None:
            self._seeds = list(seeds)
            in_vain = self.env.config["seed"] == self.DEFAULT_SEED
        else:
            in_vain = seeds is not None and list(seeds) != self._seeds
        if in_vain:
            warnings.warn(
                "an EnvPool cannot be seeded once it is made, so its episodes continue with seed "
                f"{self.env.config['seed']}. To derive each worker's seed from the collector's "
                "seed, let make_env pass seed=np.random.randint(2**31) to envpool.make; NumPy is "
                "seeded before make_env is called",
                stacklevel=2,
            )
        super().reset(None, current)


class CartPoleDriver(_VectorDriver):
    """A driver of gymnasium's vector CartPole. The driver resets an env in the step that ends an
    episode.

    Without this driver, gymnasium's vector CartPole resets an env in the step after an episode's
    end, and that step is not a transition. The state of the vector env is in plain arrays, so this
    driver can reset an env in the same step.
    """

    ATTRIBUTES = ("state", "steps", "prev_done", "low", "high")

    def __init__(self, env: VectorEnv) -> None:
        super().__init__(env)
        self.one_seed_only = False
        # One generator per env, so that an env's episodes depend only on its own seed, as with
        # single envs.
        self._generators: list[np.random.Generator] = []
        # for each env, first states of its next episodes, which are drawn together
        self._starts: list[list[np.ndarray]] = []

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


def _of_chain(env: Any, name: str) -> Any:
    """Return an attribute of an env or of an env that it wraps. (``gymnasium.Wrapper`` does not
    pass attributes on.)"""
    return getattr(env, name) if isinstance(env, VectorEnv) else env.get_wrapper_attr(name)


def _is_from(env: Any, *packages: str) -> bool:
    return any(kind.__module__.startswith(packages) for kind in type(env).__mro__)


def _of_envpool(env: Any) -> bool:
    return _is_from(env, "envpool")


def _of_isaac_lab(env: Any) -> bool:
    return _is_from(env.unwrapped, "isaaclab", "omni.isaac.lab")


def is_vector_env(env: Any) -> bool:
    """Whether this is a vector env: a ``VectorEnv``, or an env with the same attributes, like Isaac
    Lab's envs."""
    if isinstance(env, VectorEnv):
        return True
    if not isinstance(env, gymnasium.Env):
        return False
    spaces = ("single_observation_space", "single_action_space")
    base = env.unwrapped
    return isinstance(getattr(base, "num_envs", None), int) and all(
        isinstance(getattr(base, name, None), gymnasium.Space) for name in spaces
    )


def require_different(envs: Iterable[Any]) -> None:
    """Require that no two envs are, or wrap, the same object.

    Raises:
        ConfigurationError: two envs are, or wrap, the same object.
    """
    seen: list[Any] = []
    for env in envs:
        core = env.unwrapped if isinstance(env, gymnasium.Env) else env
        if any(core is other for other in seen):
            raise ConfigurationError(
                f"make_env returned {core} twice, so its episodes would mix; let make_env build a "
                "new env in each call, for example lambda: MyEnv()"
            )
        seen.append(core)


def vector_driver(env: Any) -> EnvDriver:
    """Return the driver that fits the declared autoreset mode of a vector env (default: next-step).

    Raises:
        ConfigurationError: the vector env contains the same env twice, or is of an unknown class
            and does not declare an autoreset mode.
    """
    if type(env) is CartPoleVectorEnv and all(
        hasattr(env, name) for name in CartPoleDriver.ATTRIBUTES
    ):
        return CartPoleDriver(env)
    if _of_envpool(env):
        return EnvPoolDriver(env)
    if type(env) is SyncVectorEnv:
        require_different(env.envs)
    declared = env.metadata.get("autoreset_mode")
    if declared is None and _of_isaac_lab(env):
        declared = AutoresetMode.SAME_STEP
    elif declared is None and not isinstance(env, VectorEnv):
        raise ConfigurationError(
            f"{env} steps {_of_chain(env, 'num_envs')} envs, but does not declare when it resets "
            "these envs; set metadata['autoreset_mode'] of its class to a "
            "gymnasium.vector.AutoresetMode"
        )
    mode = AutoresetMode.NEXT_STEP if declared is None else AutoresetMode(declared)
    if mode is AutoresetMode.SAME_STEP:
        return SameStepDriver(env)
    # Without shared memory, AsyncVectorEnv's workers ignore a masked reset (gymnasium 1.4.0).
    maskable = type(env) is SyncVectorEnv or (type(env) is AsyncVectorEnv and env.shared_memory)
    if mode is AutoresetMode.DISABLED or maskable:
        return MaskedResetDriver(env)
    return NextStepDriver(env)


def make_driver(first: Any, make_env: str | Callable[[], Any], num_envs: int) -> EnvDriver:
    """Return a driver for the env that ``make_env`` names or has just returned (``first``).

    Raises:
        ConfigurationError: ``make_env`` does not give a gymnasium env, or gives a vector env whose
            size is not ``num_envs``.
    """
    if isinstance(first, str):
        return _driver_from_id(first, num_envs)
    if is_vector_env(first):
        size = _of_chain(first, "num_envs")
        if num_envs not in (1, size):
            raise ConfigurationError(
                f"make_env returned a vector env of {size} envs, but num_envs={num_envs}"
                f"; leave num_envs out or pass {size}"
            )
        return vector_driver(first)
    if _of_envpool(first):
        raise ConfigurationError(
            "make_env returned an EnvPool that is not a gymnasium.vector.VectorEnv; make it with "
            "env_type='gymnasium' in a newer EnvPool (such as 1.2.5), or return "
            "torchrl.envs.MultiThreadedEnv(num_workers=..., env_name=...), which steps EnvPool's "
            "envs"
        )
    if isinstance(first, gymnasium.Env) and callable(make_env):
        envs = [first, *(make_env() for _ in range(num_envs - 1))]
        require_different(envs)
        return EnvListDriver(envs)
    raise ConfigurationError(
        f"make_env returned {type(first)}; expected a gymnasium id, a gymnasium.Env, a "
        "gymnasium.vector.VectorEnv or a torchrl.envs.EnvBase"
    )


def _driver_from_id(env_id: str, num_envs: int) -> EnvDriver:
    module, _, name = env_id.rpartition(":")
    if module:
        importlib.import_module(module)  # the import registers the env, as in gymnasium.make
    spec = gymnasium.spec(name)
    if num_envs > 1 and spec.vector_entry_point in _CARTPOLE and not spec.additional_wrappers:
        return vector_driver(
            gymnasium.make_vec(env_id, num_envs, vectorization_mode="vector_entry_point")
        )
    return EnvListDriver([gymnasium.make(env_id) for _ in range(num_envs)])
