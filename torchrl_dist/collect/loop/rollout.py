"""Make rollouts: T steps of N envs as one TensorDict ``[N, T]``, with the same entries as a batch
of TorchRL's ``Collector``.

:class:`GymnasiumRollout` steps gymnasium envs. This class calls the policy once per step for all
envs and writes results into preallocated tensors, because every step of a TorchRL env costs about
300 us in addition to the env's own work. :class:`TorchRLRollout` steps TorchRL envs.
:class:`TorchRLRollout` also steps gymnasium envs, inside TorchRL's wrapper, if ``GymnasiumRollout``
does not support their spaces.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Generator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Protocol

import numpy as np
import torch
from gymnasium import spaces
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor, nn
from torchrl.data import StackedComposite
from torchrl.envs import EnvBase, GymWrapper, SerialEnv
from torchrl.envs.libs.gym import _gym_to_torchrl_spec_transform
from torchrl.envs.utils import ExplorationType, RandomPolicy
from torchrl.modules import AdditiveGaussianModule
from torchrl.modules.tensordict_module.exploration import set_exploration_modules_spec_from_env

from torchrl_dist.collect.loop.drivers import (
    EnvDriver,
    EnvListDriver,
    make_driver,
    require_different,
)
from torchrl_dist.collect.loop.joining import is_ragged, stack
from torchrl_dist.collect.loop.policies import (
    Compilation,
    Policy,
    PolicyCalls,
    Values,
    flat,
    nested,
    on_tensordicts,
)
from torchrl_dist.collect.loop.recurrent import IS_INIT, carried_state, with_state_of
from torchrl_dist.collect.loop.spaces import (
    Key,
    ObservationLeaf,
    UnknownSpaceError,
    action_codec,
    has_start,
    join_key,
    observation_leaves,
    refuse_stamps,
)
from torchrl_dist.errors import ConfigurationError

_DONE_KEYS = ("done", "terminated", "truncated")
# With next-step autoreset, envs that reset less often get ahead of the other envs. If all envs are
# alike, this lead grows slowly, like a random walk, so a small lead needs no warning.
_WARN_ROLLOUTS_AHEAD = 4
_MAX_ROLLOUTS_AHEAD = 200
_CHUNK = 256  # number of steps for which views of the blocks are made at once
_DRAWS = 64  # number of random actions that are drawn at once for each env
_DRAWN = 8  # number of TorchRL's random actions that are compared with the action space


def never(_: int) -> bool:
    return False


class RolloutStopped(Exception):
    """The rollout was told to stop, and its steps are discarded. The worker catches this error."""


class Rollout(Protocol):
    """N envs and a policy that make rollouts on request.

    Every transition contains the value of ``policy_version`` at the time of its step. If
    ``at_random`` is true, the next rollout uses random actions, and all other outputs of the policy
    are zero.
    """

    num_envs: int
    steps: int
    policy_version: int
    at_random: bool
    ragged: bool  # shapes may differ between rows
    target: Any  # the argument ``envs`` of :func:`torchrl_dist.collect.loop.access.visit`

    def seed(self, seeds: Sequence[int]) -> None:
        """Seed the envs (one seed per env) and start new episodes in all envs."""

    def run(self, steps: int, enough: Callable[[int], bool] = never) -> TensorDict:
        """Return ``steps`` transitions of each env, ``[N, steps]``. These transitions continue the
        previous rollout.

        Args:
            steps: at most ``self.steps``, the usual length.
            enough: called after every step with the number of transitions that each env has. If it
                returns true, the rollout ends after that step.

        Raises:
            RolloutStopped: :meth:`stop` was called from another thread.
        """

    def call_policy_once(self) -> None:
        """Initialize the policy's lazy layers by a call outside rollouts. No env is stepped."""

    def reset(self, envs: Sequence[int] | None = None) -> None:
        """Start new episodes in all envs or, if ``envs`` is given, only in the envs with these
        indices.

        Raises:
            ConfigurationError: the envs cannot be reset one by one.
        """

    def resize(self, steps: int) -> None:
        """Set the usual number of steps of a rollout."""

    @property
    def specs(self) -> dict[str, str]:
        """Descriptions of the specs or spaces, by name. They must be equal in all workers."""

    def stop(self) -> None: ...

    def close(self) -> None: ...


@dataclass
class Episodes:
    """Track the episodes of N envs through consecutive rollouts. This class does not step envs.

    Trajectory ids are ``base + k * stride + offset`` for k = 0, 1, .... If the stride is the number
    of workers of the job and each worker has a different offset, no two workers use the same id.
    """

    num_envs: int
    offset: int = 0
    stride: int = 1
    base: int = 0
    numbered: int = 0
    _current: np.ndarray = field(init=False)
    _returns: np.ndarray = field(init=False)
    _lengths: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        self.restart()

    def restart(self, envs: Sequence[int] | None = None) -> list[int]:
        """Abandon the running episodes and begin new episodes, in all envs or only in ``envs``.

        Returns:
            the ids of the abandoned trajectories if ``envs`` is given, else an empty list.
        """
        if envs is not None:
            abandoned = self._current[envs].tolist()
            self._current[envs] = self._take(len(envs))
            self._returns[envs], self._lengths[envs] = 0.0, 0
            return abandoned
        self._current = self._take(self.num_envs)
        self._returns = np.zeros(self.num_envs)
        self._lengths = np.zeros(self.num_envs, dtype=np.int64)
        return []

    def split(self) -> None:
        """Continue the running episodes under new trajectory ids. The episodes keep their returns
        and lengths."""
        self._current = self._take(self.num_envs)

    def count_steps(self, done: np.ndarray) -> np.ndarray:
        """Return, for each step of a rollout, the number of earlier steps in the same episode,
        ``[N, T]``. Call this method with the rollout's ``done [N, T]``, before :meth:`advance`
        updates the lengths of the running episodes."""
        steps = np.arange(done.shape[1])
        begun = np.zeros(done.shape, np.int64)
        begun[:, 1:] = np.where(done[:, :-1], steps[1:], 0)
        begun = np.maximum.accumulate(begun, 1)
        return steps - begun + np.where(begun > 0, 0, self._lengths[:, None])

    def _take(self, n: int) -> np.ndarray:
        taken = np.arange(self.numbered, self.numbered + n, dtype=np.int64)
        self.numbered += n
        return self.base + taken * self.stride + self.offset

    def advance(
        self, reward: np.ndarray, done: np.ndarray
    ) -> tuple[np.ndarray, list[float], list[int]]:
        """Add a rollout with ``reward [N, T]`` and ``done [N, T]`` to the running episodes.

        Returns:
            trajectory ids ``[N, T]``, and the returns and lengths of the episodes that ended.
        """
        n, steps = done.shape
        ids = np.repeat(self._current[:, None], steps, 1)
        if not done.any():
            self._returns += reward.sum(1, dtype=np.float64)
            self._lengths += steps
            return ids, [], []
        ends = done.ravel()
        # Divide the rollout into parts of episodes, env by env. A part begins at the first step of
        # an env, or after the end of an episode.
        begins = np.zeros(n * steps, bool)
        begins[1:] = ends[:-1]
        begins[::steps] = True
        starts = begins.nonzero()[0]
        env, lasts = starts // steps, np.append(starts[1:], n * steps) - 1
        ended = ends[lasts]
        going_on = starts % steps == 0
        numbers = self._take(int(ended.sum()))
        before = (np.cumsum(done) - ends).reshape(n, steps)  # episodes that ended before each step
        anew = before > before[:, :1]
        ids[anew] = numbers[before[anew] - 1]
        self._current[env[ended]] = numbers  # if an env got several new ids, keep the last one
        # Sum each part separately. If sums were differences of a running sum, an infinite or huge
        # reward in one episode would spoil the sums of all later episodes.
        with np.errstate(invalid="ignore"):
            sums = np.add.reduceat(reward.ravel(), starts, dtype=np.float64)
            sums[going_on] += self._returns
        lengths = lasts + 1 - starts
        lengths[going_on] += self._lengths
        self._returns, self._lengths = np.zeros(n), np.zeros(n, np.int64)
        self._returns[env[~ended]] = sums[~ended]
        self._lengths[env[~ended]] = lengths[~ended]
        return ids, sums[ended].tolist(), lengths[ended].tolist()


class _Given:
    """The inputs that the policy gets from the envs in a rollout, with separate memory for every
    step.

    Attributes:
        places: the views that the last call of ``values`` returned, by key.
    """

    def __init__(
        self,
        leaves: Sequence[ObservationLeaf],
        first: Sequence[np.ndarray],
        n: int,
        steps: int,
    ) -> None:
        self._keys: list[Key] = [leaf.key for leaf in leaves] + list(_DONE_KEYS)
        self._observations = [np.empty((steps + 1, n, *leaf.shape), leaf.dtype) for leaf in leaves]
        for block, now in zip(self._observations, first, strict=True):
            block[0] = now
        # The done flags at a rollout's root are always false, because an observation at the root
        # comes from a reset or from inside an episode.
        ends = [np.zeros((steps, n, 1), bool) for _ in _DONE_KEYS]
        self._blocks = [torch.from_numpy(array) for array in (*self._observations, *ends)]
        self._steps: list[tuple[Tensor, ...]] = []
        self.places: Values = {}
        self._size = (n, steps)

    def values(self, t: int) -> Values:
        """Return the policy's inputs of step ``t``. Call this method once for each step, in
        order."""
        i = t % _CHUNK
        if i == 0:
            # Leave out the entry with the index ``steps`` of each block, because this entry is the
            # observation after the last step.
            end = min(t + _CHUNK, self._size[1])
            views = [block[t:end].unbind(0) for block in self._blocks]
            self._steps = list(zip(*views, strict=True))
        self.places = dict(zip(self._keys, self._steps[i], strict=True))
        return self.places.copy()

    def after(self, t: int) -> list[np.ndarray]:
        """Return the arrays into which the caller must write the observations of step ``t + 1``."""
        return [block[t + 1] for block in self._observations]

    def share_changes(self, following: Sequence[np.ndarray], done: np.ndarray) -> None:
        """If the policy changed observations in place, copy the changes to ("next", ...) of the
        step before.

        The reason is that in TorchRL, an observation and the ("next", ...) observation of the step
        before are the same tensor, unless an env was reset between the two steps.
        """
        _, steps = self._size
        for block, after in zip(self._blocks, following, strict=False):
            if block._version:
                for t in range(1, steps):
                    if not done[:, t - 1].any():
                        after[:, t - 1] = block[t].numpy()

    def recorded(self, without: Collection[Key]) -> dict[Key, Tensor]:
        """Return copies of all values, ``[N, T, ...]``, by key, except for the keys ``without``."""
        _, steps = self._size
        return {
            key: block[:steps].transpose(0, 1).clone(memory_format=torch.contiguous_format)
            for key, block in zip(self._keys, self._blocks, strict=True)
            if key not in without
        }


class _Made:
    """The policy's outputs in a rollout. Memory is allocated for the keys that the policy writes in
    the first step.

    Attributes:
        actions: NumPy array ``[T, N, ...]``.
        carried: keys of the outputs that the policy gets as inputs of the next step, in addition to
            the env's values.
        overwritten: keys of observations that the policy replaces with other tensors.
    """

    def __init__(self, out: Values, given: _Given, n: int, steps: int) -> None:
        first = given.places
        self._given = given
        self._keys = len(out)
        self._kept: list[Key] = []
        self._stores: dict[Key, Tensor] = {}
        self._parts: dict[Key, list[Any]] = {}
        self.overwritten: set[Key] = set()
        for key, value in out.items():
            if key in first and value is first[key]:
                self._kept.append(key)
            elif _is_private(key):
                continue
            elif isinstance(value, Tensor):
                if key in first:
                    self.overwritten.add(key)
                self._stores[key] = torch.empty((n, steps, *value.shape[1:]), dtype=value.dtype)
            else:
                self._parts[key] = []
        self._slots: list[tuple[Key, tuple[Tensor, ...]]] = []
        self.actions = self._stores["action"].numpy().swapaxes(0, 1)
        self.carried = [key for key in out if key not in first and _of_root(key)]

    def record(self, t: int, out: Values) -> None:
        if len(out) != self._keys:
            raise ConfigurationError(
                f"the policy wrote the keys {sorted(map(str, out))} in step {t} of a rollout, but "
                f"{sorted(map(str, self._expected()))} in the first step; write the same keys in "
                "each step"
            )
        i = t % _CHUNK
        if i == 0:
            self._slots = [
                (key, store[:, t : t + _CHUNK].unbind(1)) for key, store in self._stores.items()
            ]
        for key, views in self._slots:
            self._write(views[i], key, out[key])
        if self._kept:
            places = self._given.places
            for key in self._kept:
                if out[key] is not places[key]:
                    self._write(places[key], key, out[key])
        for key, parts in self._parts.items():
            parts.append(out[key])

    @staticmethod
    def _write(place: Tensor, key: Key, value: Tensor) -> None:
        # Check dtype and shape, because copy_ would convert the dtype and broadcast the shape.
        if value.dtype is not place.dtype or value.shape != place.shape:
            raise ConfigurationError(
                f"the policy wrote {key!r} as {value.dtype} {list(value.shape)}, but as "
                f"{place.dtype} {list(place.shape)} in the first step of this rollout; write the "
                "same dtype and shape in each step"
            )
        place.copy_(value)

    def _expected(self) -> list[Key]:
        return [*self._stores, *self._parts, *self._kept]

    def recorded(self) -> dict[Key, Any]:
        parts = {key: torch.stack(parts, 1) for key, parts in self._parts.items()}
        return self._stores | parts


class _Followed:
    """The results of all steps of the envs in a rollout.

    Attributes:
        observations: for each tensor of an observation, its values ``[N, T, ...]`` after each step,
            before any reset.
        valid: bool ``[N, T]``, False where a step only reset its env; None if the driver has no
            such steps.
    """

    def __init__(self, leaves: Sequence[ObservationLeaf], driver: EnvDriver, steps: int) -> None:
        n = driver.num_envs
        self._driver = driver
        self._keys = [join_key("next", leaf.key) for leaf in leaves]
        self.observations = [np.empty((n, steps, *leaf.shape), leaf.dtype) for leaf in leaves]
        self._reward = np.empty((n, steps, 1), np.float32)
        self._terminated = np.empty((n, steps, 1), bool)
        self._truncated = np.empty((n, steps, 1), bool)
        self.valid = None if driver.valid is None else np.empty((n, steps), bool)
        # These views are [T, N, ...], because indexing by [t] takes half the time of indexing by
        # [:, t].
        self._nexts = [array.swapaxes(0, 1) for array in self.observations]
        self._rewards = self._reward[:, :, 0].T
        self._ends = self._terminated[:, :, 0].T
        self._cuts = self._truncated[:, :, 0].T

    def record(self, t: int, actions: Any, current: Sequence[np.ndarray]) -> np.ndarray:
        """Step the envs, and write the policy's next inputs into ``current``. Return which envs
        begin an episode in the next step, bool ``[N]``."""
        self._rewards[t], done, cut = self._driver.step(
            actions, [array[t] for array in self._nexts], current
        )
        self._ends[t] = done
        self._cuts[t] = cut
        if self.valid is None:
            return done | cut
        valid = self._driver.valid
        assert valid is not None
        self.valid[:, t] = valid
        return ~valid

    def transitions(self, t: int) -> int:
        """Return the number of transitions that each env has after step ``t``. If the numbers
        differ, return the smallest number."""
        return t + 1 if self.valid is None else int(self.valid[:, : t + 1].sum(1).min())

    @property
    def done(self) -> np.ndarray:
        return self._terminated | self._truncated

    def observed(self) -> dict[Key, Tensor]:
        return {
            key: torch.from_numpy(array)
            for key, array in zip(self._keys, self.observations, strict=True)
        }

    def ended(self) -> dict[Key, Tensor]:
        return {
            ("next", "reward"): torch.from_numpy(self._reward),
            ("next", "terminated"): torch.from_numpy(self._terminated),
            ("next", "truncated"): torch.from_numpy(self._truncated),
            ("next", "done"): torch.from_numpy(self.done),
        }


def _like(mask: Tensor, value: Tensor) -> Tensor:
    """Return ``mask [N]`` with as many dimensions as ``value``."""
    return mask.reshape(-1, *[1] * (value.ndim - 1))


def _unwritten(given: Values, made: Values) -> Values:
    """Return zeros for the tensors that a policy adds to its input."""
    added = {key: value for key, value in made.items() if key not in given}
    return {key: torch.zeros_like(v) for key, v in added.items() if isinstance(v, Tensor)}


def _is_private(key: Key) -> bool:
    """Whether a name in the key begins with an underscore. Batches leave such keys out, as in
    TorchRL."""
    return any(name.startswith("_") for name in ((key,) if isinstance(key, str) else key))


def _of_root(key: Key) -> bool:
    return isinstance(key, str) or key[0] != "next"


def _set_specs(policy: nn.Module, space: spaces.Space, categorical: bool) -> None:
    """Set the env's action spec in exploration modules that have no spec, as TorchRL's collectors
    do."""
    if any(isinstance(module, AdditiveGaussianModule) for module in policy.modules()):
        spec = _gym_to_torchrl_spec_transform(
            space, device="cpu", categorical_action_encoding=categorical
        )
        env: Any = SimpleNamespace(action_spec_unbatched=spec)
        set_exploration_modules_spec_from_env(policy, env)


class _Loop:
    """The common part of the classes that implement :class:`Rollout` in this module."""

    steps: int
    ragged = False
    policy_version = 0
    at_random = False
    _unwritten: Values | None = None  # zeros for the policy's other outputs, if actions are random
    _stop = False

    def resize(self, steps: int) -> None:
        self.steps = steps

    def stop(self) -> None:
        self._stop = True

    def _ends(self, done: int, enough: Callable[[int], bool]) -> bool:
        """Return whether the rollout ends now that each env has ``done`` transitions. If
        :meth:`stop` was called, raise RolloutStopped."""
        if self._stop:
            raise RolloutStopped
        return enough(done)


class GymnasiumRollout(_Loop):
    """The fast loop over gymnasium envs. Not thread-safe, except for :meth:`stop`.

    The policy may keep the tensors that it gets in a step, because these tensors are not reused. If
    the policy changes these tensors in place, the rollout contains the changed values, as with
    TorchRL's ``Collector``.
    """

    def __init__(
        self,
        driver: EnvDriver,
        policy: Policy | None,
        frames: int,
        *,
        exploration_type: ExplorationType = ExplorationType.RANDOM,
        categorical_action_encoding: bool = False,
        compilation: Compilation | None = None,
        alone: bool = False,
    ) -> None:
        self.driver = driver
        self.target = driver.target
        self.one_seed_only = driver.one_seed_only  # whether the envs cannot be seeded one by one
        self.num_envs = n = driver.num_envs
        self.steps = -(-frames // n)
        leaves = observation_leaves(driver.single_observation_space, categorical_action_encoding)
        driver.leaves = leaves
        self._leaves = leaves
        self._codec = action_codec(driver.single_action_space, categorical_action_encoding)
        self._rngs = [np.random.default_rng() for _ in range(n)]
        self._draws: list[Tensor] = []
        if type(policy) is RandomPolicy and getattr(policy, "action_spec", None) is None:
            policy = None  # draw actions from the env's action space, as in TorchRL's collectors
        if isinstance(policy, nn.Module):
            _set_specs(policy, driver.single_action_space, categorical_action_encoding)
        self._new_state = carried_state(policy, n)
        # the keys that the policy can read
        self.observed = {leaf.key for leaf in leaves} | {*_DONE_KEYS} | {*self._new_state}
        compilation = compilation or Compilation()
        self._policy: PolicyCalls | None = None
        if policy is not None:
            takes_tensordicts = on_tensordicts(policy, [leaf.key for leaf in leaves])
            self._policy = compilation.calls(takes_tensordicts, exploration_type, alone)
        # Kept from one rollout to the next: the observations in the order of the leaves, a
        # recurrent policy's state, and the policy's other outputs.
        self._current = [np.zeros((n, *leaf.shape), leaf.dtype) for leaf in leaves]
        self._state = dict(self._new_state)
        self._others: Values = {}
        self._surplus: list[TensorDict | None] = [None] * n
        self._started = False
        self._warned = False

    def _act(self, values: Values) -> Values:
        if self._policy is None:
            values["action"] = self._draw()
            return values
        if not self.at_random:
            return self._policy.on_values(values, self.num_envs)
        if self._unwritten is None:  # random rows need the same keys as the policy's rows
            asked = {key: value.clone() for key, value in values.items()}
            self._unwritten = _unwritten(values, self._policy.on_values(asked, self.num_envs))
        return self._unwritten | values | {"action": self._draw()}

    def _draw(self) -> Tensor:
        if not self._draws:  # draw env by env, because each env has its own generator
            by_env = [self._codec.sample(rng, _DRAWS) for rng in self._rngs]
            self._draws = list(torch.stack(by_env, 1).unbind(0))
        return self._draws.pop()

    def call_policy_once(self) -> None:
        """Call the policy with zeros as observations."""
        first = [np.zeros_like(now) for now in self._current]
        values = _Given(self._leaves, first, self.num_envs, 1).values(0)
        self._act(values | self._state)

    def seed(self, seeds: Sequence[int]) -> None:
        """Seed the envs as TorchRL does: reset all envs with the seeds, then reset all envs again
        without seeds to begin episodes."""
        self._reset(seeds)
        self._reset(None)
        # The generators of random actions must differ from the envs' own generators, which
        # gymnasium seeds with the seed alone.
        self._rngs = [np.random.default_rng([seed, 1]) for seed in seeds]
        self._draws = []
        self._started = True

    def _reset(self, seeds: Sequence[int] | None) -> None:
        self.driver.reset(seeds, self._current)
        self._surplus = [None] * self.num_envs
        self._others = {}
        self._state = dict(self._new_state)

    def _carry_on(self, out: Values, carried: Sequence[Key], begins: np.ndarray) -> None:
        """Pass the policy's state and its other outputs to the next step.

        In envs where an episode ``begins``, the state is that of a new episode, and all other
        outputs are zero. TorchRL does the same if only some envs are reset, but keeps the old
        outputs if all envs are reset. This method never keeps old outputs, because rows must not
        depend on how envs are divided among workers.
        """
        self._others = {key: out[key] for key in carried}
        which = begins.tobytes()
        if 1 in which:  # ``1 in`` takes a tenth of the time of any()
            kept = torch.from_numpy(~begins) if 0 in which else None
            self._forget_others(kept)
        if not self._new_state:
            return
        first = torch.from_numpy(begins)
        for key, new in self._new_state.items():
            if key == IS_INIT:
                self._state[key] = first.reshape(-1, 1).clone()
                continue
            after = out.get(join_key("next", key), self._state[key])
            self._state[key] = torch.where(_like(first, new), new, after)

    def _forget_others(self, kept: Tensor | None) -> None:
        """Set the policy's outputs other than its state to zero, except in the envs where
        ``kept [N]`` is true. None means no env."""
        for key, value in self._others.items():
            if isinstance(value, Tensor):
                self._others[key] = (
                    torch.zeros_like(value)
                    if kept is None
                    else torch.where(_like(kept, value), value, 0)
                )

    def reset(self, envs: Sequence[int] | None = None) -> None:
        if envs is None or not self._started:
            self._started = False
            return
        self.driver.reset_some(envs, self._current)
        first = torch.zeros(self.num_envs, dtype=torch.bool)
        first[list(envs)] = True
        self._forget_others(~first)
        for key, new in self._new_state.items():
            begins = _like(first, new)
            new = begins if key == IS_INIT else new
            self._state[key] = torch.where(begins, new, self._state[key])

    @property
    def specs(self) -> dict[str, str]:
        return {
            "observation space": repr(self.driver.single_observation_space),
            "action space": repr(self.driver.single_action_space),
        }

    def close(self) -> None:
        self.driver.close()

    def run(self, steps: int, enough: Callable[[int], bool] = never) -> TensorDict:
        self._begin()
        with torch.no_grad():
            if self.driver.valid is None:
                return self._run(steps, enough)[0]
            return self._run_ragged(steps, enough)

    def steps_one_by_one(
        self, steps: int, enough: Callable[[int], bool] = never
    ) -> Generator[Values, Values, TensorDict]:
        """Run a rollout for a policy in another process.

        The generator yields the observations ``[N, ...]`` of each step, receives the policy's
        outputs by ``send()``, and returns the rollout.
        """
        self._begin()
        return (yield from self._loop(steps, enough))[0]

    def _begin(self) -> None:
        if not self._started:
            self._reset(None)
            self._started = True
        if self._policy is not None:
            self._policy.begin()

    def _run(
        self, steps: int, enough: Callable[[int], bool]
    ) -> tuple[TensorDict, np.ndarray | None]:
        loop, act = self._loop(steps, enough), self._act
        values = next(loop)
        while True:
            # Call the policy outside the try block, because a StopIteration that the policy raises
            # must not end the rollout.
            out = act(values)
            try:
                values = loop.send(out)
            except StopIteration as end:
                return end.value

    def _loop(
        self, steps: int, enough: Callable[[int], bool]
    ) -> Generator[Values, Values, tuple[TensorDict, np.ndarray | None]]:
        """Yield the policy's inputs ``steps`` times, and receive its outputs by ``send()``."""
        n, to_env = self.num_envs, self._codec.to_env
        given = _Given(self._leaves, self._current, n, steps)
        made: _Made | None = None
        followed = _Followed(self._leaves, self.driver, steps)
        for t in range(steps):
            values = given.values(t)
            values.update(self._others)
            if self._state:
                values.update(self._state)
            out = yield values
            if made is None:
                made = _Made(self._checked(out), given, n, steps)
            made.record(t, out)
            # The env gets the recorded copy, because the policy may reuse its own tensor.
            self._current = given.after(t)
            resets = followed.record(t, to_env(made.actions[t]), self._current)
            self._carry_on(out, made.carried, resets)
            if self._ends(followed.transitions(t), enough):
                break
        assert made is not None
        self._current = [now.copy() for now in self._current]
        given.share_changes(followed.observations, followed.done)
        data = given.recorded(made.overwritten) | followed.observed() | made.recorded()
        if IS_INIT in self._state:  # as InitTracker does, set is_init to false in "next"
            data["next", IS_INIT] = torch.zeros(n, steps, 1, dtype=torch.bool)
        data |= followed.ended()
        if "policy_version" not in data:  # a policy at the learner writes this key
            data["policy_version"] = torch.full((n, steps), self.policy_version)
        rollout = nested(data, [n, steps], names=[None, "time"])
        return (rollout if t + 1 == steps else rollout[:, : t + 1]), followed.valid

    def _checked(self, out: Values) -> Values:
        """Return the policy's outputs, or raise ConfigurationError if they cannot be recorded.
        Called once per rollout."""
        if self._policy is not None:  # only a policy at the learner may write "policy_version"
            refuse_stamps(out, "the policy")
        action = out.get("action")
        expected = (self.num_envs, *self._codec.shape)
        if not isinstance(action, Tensor) or tuple(action.shape) != expected:
            got, hint = "nothing", "; let the policy write it into the TensorDict of observations"
            if action is not None:
                got, hint = f"shape {tuple(action.shape)}", self._codec.hint
            raise ConfigurationError(
                f"the policy wrote {got} as 'action'; expected shape {expected} for the action "
                f"space {self.driver.single_action_space} and {self.num_envs} envs{hint}"
            )
        for key, value in out.items():
            if tuple(value.shape[:1]) != (self.num_envs,):
                raise ConfigurationError(
                    f"the policy wrote {key!r} with shape {tuple(value.shape)}; expected shape "
                    f"[{self.num_envs}, ...], because each of the {self.num_envs} envs needs one "
                    "row. Correct the policy's output"
                )
        return out

    def _run_ragged(self, steps: int, enough: Callable[[int], bool]) -> TensorDict:
        """Drop steps that only reset an env, and continue until each env has ``steps`` transitions.

        Envs that reset less often then have more than ``steps`` transitions. The additional
        transitions become the beginning of the next rollout.
        """
        have = [0 if part is None else part.shape[0] for part in self._surplus]
        while (ahead := min(have)) < steps and not enough(ahead):

            def with_surplus(done: int, ahead: int = ahead) -> bool:
                return enough(ahead + done)

            chunk, valid = self._run(steps - ahead, with_surplus)
            assert valid is not None
            for i in range(self.num_envs):
                rows = chunk[i][torch.from_numpy(valid[i, : chunk.shape[1]])]
                before = self._surplus[i]
                kept = rows if before is None else torch.cat([before, rows], 0)
                self._surplus[i] = kept
                have[i] = kept.shape[0]
        steps = min(steps, *have)
        # ``parts`` has an entry for each env, because steps > 0
        parts = [part for part in self._surplus if part is not None]
        out: TensorDict = torch.stack([part[:steps] for part in parts], 0)
        self._surplus = [part[steps:].clone() for part in parts]
        out.names = [None, "time"]
        self._check_surplus(max(have) - steps)
        return out

    def _check_surplus(self, rows: int) -> None:
        ahead = rows / self.steps
        advice = (
            f"{self.driver} uses a separate step to reset an env (next-step autoreset), so the "
            f"envs that end episodes least often are {rows} steps ahead of the other envs, and "
            f"rows of these envs are delivered {ahead:.0f} rollouts late. If possible, build the "
            "vector env with same-step autoreset or with autoreset disabled"
        )
        if ahead > _MAX_ROLLOUTS_AHEAD:
            raise ConfigurationError(advice)
        if ahead > _WARN_ROLLOUTS_AHEAD and not self._warned:
            self._warned = True
            warnings.warn(advice, stacklevel=2)


class TorchRLRollout(_Loop):
    """Step a TorchRL env as TorchRL's ``Collector`` does."""

    def __init__(
        self,
        env: EnvBase,
        policy: Policy | None,
        frames: int,
        *,
        exploration_type: ExplorationType = ExplorationType.RANDOM,
        compilation: Compilation | None = None,
    ) -> None:
        self.env = self.target = env = with_state_of(policy, env)
        self.num_envs = max(1, env.batch_size.numel())
        self.steps = -(-frames // self.num_envs)
        if policy is None:
            policy = RandomPolicy(env.full_action_spec)
        elif isinstance(policy, RandomPolicy):
            policy.set_action_spec_from_env(env)
        if isinstance(policy, nn.Module):
            set_exploration_modules_spec_from_env(policy, env)
        compilation = compilation or Compilation()
        takes_tensordicts = on_tensordicts(
            policy, list(env.observation_spec.keys(True, True)), list(env.action_keys)
        )
        self._policy = compilation.calls(takes_tensordicts, exploration_type)
        # If the env's transforms contain policies, these policies also use the exploration type.
        inside = any(isinstance(module, TensorDictModuleBase) for module in env.modules())
        step = env.step_and_maybe_reset
        self._step = self._policy.exploring(step) if inside else step
        self._carrier: TensorDictBase | None = None
        self.ragged = any(
            isinstance(spec, StackedComposite) or -1 in spec.shape
            for spec in env.specs.values(True)
        )

    def seed(self, seeds: Sequence[int]) -> None:
        static = len(set(seeds)) == 1 and len(seeds) > 1
        self.env.set_seed(seeds[0], static_seed=static)
        self._carrier = None

    def run(self, steps: int, enough: Callable[[int], bool] = never) -> TensorDict:
        rows: list[TensorDictBase] = []
        with torch.no_grad():
            if self._carrier is None:
                self._carrier = self._without_device(self.env.reset())
            for t in range(steps):
                carrier = self._carrier
                self._act(carrier)
                row, following = self._step(carrier)
                if row is not carrier:
                    carrier.set("next", row.get("next"))
                rows.append(self._without_device(carrier))
                self._carrier = self._without_device(following)
                if self._ends(t + 1, enough):
                    break
            batch = stack(rows, -1)
        private = [key for key in batch.keys(True) if _is_private(key)]
        batch = _of_envs(batch.exclude(*private))
        batch.names = [None, "time"]
        refuse_stamps(batch.keys(), "the policy or the env")
        batch.set("policy_version", torch.full(batch.shape, self.policy_version))
        return batch

    def call_policy_once(self) -> None:
        """Call the policy with zeros that have the shapes and dtypes of the env's specs."""
        seen = self.env.fake_tensordict().exclude("next", *self.env.action_keys)
        self._policy.on_tensordict(seen)

    def _act(self, carrier: TensorDictBase) -> None:
        if self.at_random:
            if self._unwritten is None:
                made = self._policy.on_tensordict(carrier.clone())
                self._unwritten = _unwritten(flat(carrier), flat(made))
            for key, value in self._unwritten.items():
                carrier.set(key, value)
            self.env.rand_action(carrier)
            return
        made = self._policy.on_tensordict(carrier)
        if made is not carrier:
            carrier.update(made)

    @staticmethod
    def _without_device(td: TensorDictBase) -> TensorDictBase:
        return td if td.device is None else td.clear_device_()

    def reset(self, envs: Sequence[int] | None = None) -> None:
        carrier, env = self._carrier, self.env
        if envs is None or carrier is None or self.num_envs == 1:
            self._carrier = None
            return
        for reset_key, done_keys in zip(env.reset_keys, env.done_keys_groups, strict=True):
            mask = torch.zeros(env.full_done_spec[done_keys[0]].shape, dtype=torch.bool)
            mask.view(self.num_envs, -1)[list(envs)] = True
            carrier.set(reset_key, mask)
        carrier.update(env.reset(carrier, select_reset_only=True))
        self._carrier = carrier.exclude(*env.reset_keys)

    @property
    def specs(self) -> dict[str, str]:
        env = self.env
        return {
            "observation spec": repr(env.observation_spec),
            "action spec": repr(env.full_action_spec),
            "reward spec": repr(env.full_reward_spec),
        }

    def close(self) -> None:
        if not self.env.is_closed:
            self.env.close()


def _of_envs(batch: TensorDictBase) -> TensorDictBase:
    """Reshape ``[*batch_size of the env, T]`` to ``[N, T]``."""
    if batch.ndim == 1:
        return batch.unsqueeze(0)
    if batch.ndim == 2:
        return batch
    if is_ragged(batch):  # reshape() does not reshape lazy stacks (tensordict 0.14.3)
        by_env = [batch[index] for index in np.ndindex(*batch.shape[:-1])]
        return stack(by_env, 0)
    return batch.reshape(-1, batch.shape[-1])


def make_rollout(
    make_env: str | Callable[[], Any],
    policy: Policy | None,
    *,
    frames: int = 1,
    num_envs: int = 1,
    exploration_type: ExplorationType = ExplorationType.RANDOM,
    categorical_action_encoding: bool = False,
    compilation: Compilation | None = None,
    alone: bool = False,
) -> GymnasiumRollout | TorchRLRollout:
    """Build the envs in this process, and return a rollout object of the class that can step them.

    Each env makes ``frames / num_envs`` steps per rollout, rounded up. ``resize`` changes this
    number later. ``alone`` says whether no other thread of this process calls a policy.

    Raises:
        ConfigurationError: ``make_env`` does not return an env, or the env's spaces are not
            supported.
    """
    first = make_env if isinstance(make_env, str) else make_env()
    acting: Any = {"exploration_type": exploration_type, "compilation": compilation}
    if isinstance(first, EnvBase):
        if num_envs > 1:
            assert callable(make_env)
            first.close()
            first = SerialEnv(num_envs, _different(make_env, first))
        return TorchRLRollout(first, policy, frames, **acting)
    driver = make_driver(first, make_env, num_envs)
    try:
        if isinstance(driver, EnvListDriver) and _has_reward_space(driver.envs[0]):
            raise UnknownSpaceError(
                f"{driver.envs[0]} has a reward_space; expected an env without this attribute"
            )
        categorical = categorical_action_encoding
        return GymnasiumRollout(
            driver, policy, frames, categorical_action_encoding=categorical, alone=alone, **acting
        )
    except UnknownSpaceError as error:
        if not isinstance(driver, EnvListDriver):
            driver.close()
            raise
        observed, taken = driver.single_observation_space, driver.single_action_space
        if has_start(observed) or has_start(taken):
            driver.close()
            raise ConfigurationError(
                f"{error}. TorchRL's GymWrapper, which steps such envs, does not accept a Discrete "
                "space whose start is not 0; let the space start at 0"
            ) from None
        env = _wrapped(driver.envs, categorical_action_encoding, error, at_random=policy is None)
    return TorchRLRollout(env, policy, frames, **acting)


def _require_random_actions(env: GymWrapper, space: Any) -> None:
    """Raise ConfigurationError if TorchRL draws random actions that are not in the action space.
    Examples are Text spaces, and a Box with one bound, for which TorchRL may draw infinity."""
    with torch.random.fork_rng(devices=[]):
        for _ in range(_DRAWN):
            drawn = env.full_action_spec.rand()
            one = len(env.action_keys) == 1
            action = env.read_action(drawn[env.action_key] if one else drawn.to_dict())
            if not space.contains(action):
                raise ConfigurationError(
                    f"TorchRL drew the random action {action}, which is not in the action space "
                    f"{space}; pass policy=, because random actions do not work with this space"
                )


def _different(make_env: Callable[[], Any], first: EnvBase) -> Callable[[], EnvBase]:
    """Wrap ``make_env``, so that the wrapper raises if ``make_env`` returns the same env twice.
    ``first`` is an env that ``make_env`` has already returned."""
    made = [first]

    def make() -> EnvBase:
        made.append(make_env())
        require_different(made)
        return made[-1]

    return make


def _has_reward_space(env: Any) -> bool:
    try:
        return env.get_wrapper_attr("reward_space") is not None
    except AttributeError:
        return False


def _wrapped(
    envs: Sequence[Any], categorical: bool, reason: UnknownSpaceError, *, at_random: bool
) -> EnvBase:
    """Return one TorchRL env that steps these gymnasium envs in TorchRL's GymWrapper."""
    try:
        wrapped = [GymWrapper(env, categorical_action_encoding=categorical) for env in envs]
        if at_random:
            _require_random_actions(wrapped[0], envs[0].action_space)
        env = (
            wrapped[0]
            if len(wrapped) == 1
            else SerialEnv(len(wrapped), [lambda env=env: env for env in wrapped])
        )
        env.reset()
    except Exception as error:
        for env in envs:
            env.close()
        raise ConfigurationError(
            f"{reason}. TorchRL's GymWrapper does not accept this env either "
            f"({type(error).__name__}: {error})"
        ) from error
    return env
