"""T steps of N envs as one TensorDict ``[N, T]`` that looks like TorchRL's ``Collector`` made it.

TorchRL's own loop costs some 370 us per step whatever the env does; a gymnasium env goes through
:class:`GymnasiumRollout` instead: one policy call per step for all envs on a TensorDict that is
reused, results written into preallocated tensors. TorchRL envs go through TorchRL's ``Collector``.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torchrl.collectors import Collector
from torchrl.envs import EnvBase, SerialEnv
from torchrl.envs.utils import ExplorationType

from torchrl_dist.collect.drivers import EnvDriver, make_driver
from torchrl_dist.collect.exploration import exploring
from torchrl_dist.collect.fast_policy import FastPolicy
from torchrl_dist.collect.recurrent import IS_INIT, carried_state
from torchrl_dist.collect.spaces import (
    Key,
    action_codec,
    join_key,
    observation_leaves,
    plain_key,
)
from torchrl_dist.errors import ConfigurationError

Policy = Callable[[TensorDictBase], Any]
Values = dict[Key, Tensor]
_DONE_KEYS = ("done", "terminated", "truncated")
# With next-step autoreset envs drift apart, like a random walk if they are alike: slowly.
_WARN_ROLLOUTS_AHEAD = 4
_MAX_ROLLOUTS_AHEAD = 200
_DRAWS = 64  # random actions of an env that are drawn together


def never(_: int) -> bool:
    return False


class RolloutStopped(Exception):
    """The rollout was told to stop; its steps are discarded. Never leaves the worker."""


class Rollout(Protocol):
    """N envs and a policy that yield rollouts on request.

    ``policy_version`` is stamped on every transition at the moment it is made. With ``at_random``
    the next one acts at random, and what the policy writes beside the action is zero.
    """

    num_envs: int
    steps: int
    policy_version: int
    at_random: bool

    def seed(self, seeds: Sequence[int]) -> None:
        """Seed the envs (one seed per env) and start new episodes in all of them."""

    def run(self, steps: int, enough: Callable[[int], bool] = never) -> TensorDict:
        """``steps`` transitions of each env, ``[N, steps]``; continues where it left off.

        Args:
            steps: at most the ``steps`` of the rollout, its usual length.
            enough: asked after every step with the number of transitions that each env has; true
                ends the rollout there.

        Raises:
            RolloutStopped: :meth:`stop` was called from another thread.
        """

    def reset(self) -> None:
        """Start new episodes in all envs."""

    def resize(self, steps: int) -> None:
        """Make this the usual length of a rollout."""

    @property
    def specs(self) -> dict[str, str]:
        """What all workers of a job must agree in, in words."""

    @property
    def target(self) -> Any:
        """The envs, as :func:`torchrl_dist.collect.access.visit` takes them."""

    def stop(self) -> None: ...

    def close(self) -> None: ...


@dataclass
class Episodes:
    """Follows the episodes of N envs through consecutive rollouts. Pure bookkeeping.

    Trajectory ids are ``base + k * stride + offset`` for k = 0, 1, ...: with the number of workers
    as the stride and a worker's index as the offset, no two workers give out the same id.
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

    def restart(self) -> None:
        """New episodes begin in all envs; the running ones are abandoned."""
        self._current = self._take(self.num_envs)
        self._returns = np.zeros(self.num_envs)
        self._lengths = np.zeros(self.num_envs, dtype=np.int64)

    def split(self) -> None:
        """The running episodes go on as other trajectories; their returns count as a whole."""
        self._current = self._take(self.num_envs)

    def count_steps(self, done: np.ndarray) -> np.ndarray:
        """Steps of the episode before each step of the next rollout, ``done [N, T]``: ``[N, T]``.
        To be called before it is taken in."""
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
        """Take in a rollout, ``reward [N, T]`` and ``done [N, T]``.

        Returns:
            trajectory ids ``[N, T]``, and the returns and lengths of the episodes that ended.
        """
        ends = np.argwhere(done).tolist()  # env by env
        numbers = self._take(len(ends))
        ids = np.repeat(self._current[:, None], done.shape[1], 1)
        if ends:
            ended = (np.cumsum(done) - done.ravel()).reshape(done.shape)  # so far, in all envs
            anew = ended > ended[:, :1]
            ids[anew] = numbers[ended[anew] - 1]
        total = np.cumsum(reward, 1, dtype=np.float64)
        # Where the running episodes began: before this rollout, if not after an end in it.
        sum_before, steps_before = -self._returns, -self._lengths
        returns: list[float] = []
        lengths: list[int] = []
        for (i, t), number in zip(ends, numbers.tolist(), strict=True):
            returns.append(float(total[i, t] - sum_before[i]))
            lengths.append(int(t + 1 - steps_before[i]))
            sum_before[i], steps_before[i] = total[i, t], t + 1
            self._current[i] = number
        self._returns = total[:, -1] - sum_before
        self._lengths = done.shape[1] - steps_before
        return ids, returns, lengths


class GymnasiumRollout:
    """The fast loop over gymnasium envs. Not thread-safe, but for :meth:`stop`."""

    def __init__(
        self,
        driver: EnvDriver,
        policy: Policy | None,
        frames: int,
        *,
        exploration_type: ExplorationType = ExplorationType.RANDOM,
        categorical_action_encoding: bool = False,
    ) -> None:
        self.driver = driver
        self.num_envs = driver.num_envs
        self.steps = -(-frames // self.num_envs)
        self.exploration_type = exploration_type
        leaves = observation_leaves(driver.single_observation_space, categorical_action_encoding)
        driver.leaves = leaves
        self._leaves = leaves
        self._codec = action_codec(driver.single_action_space, categorical_action_encoding)
        self._rngs = [np.random.default_rng() for _ in range(driver.num_envs)]
        self._draws: list[Tensor] = []
        self._policy = policy or self._random_policy
        self.policy_version = 0
        self.at_random = False
        self._unwritten: Values | None = None
        self._stop = False
        # What the policy sees. The tensors share memory with the arrays that the driver writes.
        n = self.num_envs
        inputs = {
            leaf.key: torch.from_numpy(np.zeros((n, *leaf.shape), leaf.dtype)) for leaf in leaves
        }
        self._current = [inputs[leaf.key].numpy() for leaf in leaves]
        self._state = carried_state(policy, n)
        self._new_episode = {key: value.clone() for key, value in self._state.items()}
        inputs |= {key: torch.zeros(n, 1, dtype=torch.bool) for key in _DONE_KEYS}
        inputs |= self._state
        self._input = nested(inputs, [n])
        self._tensors = inputs
        self._input_keys = set(inputs)
        # A policy that overwrites its input must get a new (shallow) copy of it every step.
        written = {plain_key(k) for k in getattr(policy, "out_keys", ())}
        self._copies_input = bool(written & self._input_keys)
        self._on_tensors = (
            isinstance(policy, FastPolicy)
            and policy.plain
            and {plain_key(k) for k in policy.in_keys} <= self._input_keys
        )
        self._surplus: list[TensorDict | None] = [None] * n
        self._started = False
        self._warned = False

    def _random_policy(self, td: TensorDictBase) -> TensorDictBase:
        return td.set("action", self._draw())

    def _draw(self) -> Tensor:
        if not self._draws:  # by env, so that each one's follow from its own seed
            by_env = [self._codec.sample(rng, _DRAWS) for rng in self._rngs]
            self._draws = list(torch.stack(by_env, 1).unbind(0))
        return self._draws.pop()

    def seed(self, seeds: Sequence[int]) -> None:
        self._reset(seeds)
        # With the seed alone, an env of gymnasium's has the same generator.
        self._rngs = [np.random.default_rng([seed, 1]) for seed in seeds]
        self._draws = []
        self._started = True

    def _reset(self, seeds: Sequence[int] | None) -> None:
        self.driver.reset(seeds, self._current)
        self._surplus = [None] * self.num_envs
        self._carry_on({}, np.ones(self.num_envs, bool))

    def _carry_on(self, out: Any, begins: np.ndarray) -> None:
        """Hand the policy's state to its next step; a new one where an episode ``begins``."""
        first = torch.from_numpy(begins)
        for key, value in self._state.items():
            if key == IS_INIT:
                value[:, 0] = first
                continue
            after = out.get(join_key("next", key), None)
            if after is not None:
                value.copy_(after)
            value[first] = self._new_episode[key][first]

    def reset(self) -> None:
        self._started = False

    def resize(self, steps: int) -> None:
        self.steps = steps

    @property
    def specs(self) -> dict[str, str]:
        return {
            "observation space": repr(self.driver.single_observation_space),
            "action space": repr(self.driver.single_action_space),
        }

    @property
    def target(self) -> Any:
        return self.driver.target

    @property
    def observed(self) -> set[Key]:
        """Keys of what the policy sees."""
        return self._input_keys

    def stop(self) -> None:
        self._stop = True

    def close(self) -> None:
        self.driver.close()

    def run(self, steps: int, enough: Callable[[int], bool] = never) -> TensorDict:
        self._begin()
        with torch.no_grad(), exploring(self.exploration_type):
            if self.driver.valid is None:
                return self._run(steps, enough)[0]
            return self._run_ragged(steps, enough)

    def steps_one_by_one(
        self, steps: int, enough: Callable[[int], bool] = never
    ) -> Generator[Values, Values, TensorDict]:
        """As ``run``, for a policy elsewhere: yields the observations ``[N, ...]`` of each step, is
        sent what a policy makes of them, and returns the rollout. What was yielded changes with
        the next ``send``."""
        self._begin()
        loop = self._loop(steps, enough)
        next(loop)
        while True:
            out = yield self._tensors
            try:
                loop.send(out)
            except StopIteration as end:
                return end.value[0]

    def _begin(self) -> None:
        if not self._started:
            self._reset(None)
            self._started = True

    def _run(
        self, steps: int, enough: Callable[[int], bool]
    ) -> tuple[TensorDict, np.ndarray | None]:
        loop, act = self._loop(steps, enough), self._act
        next(loop)
        try:
            while True:
                loop.send(act())
        except StopIteration as end:
            return end.value

    def _loop(
        self, steps: int, enough: Callable[[int], bool]
    ) -> Generator[None, Any, tuple[TensorDict, np.ndarray | None]]:
        """Is sent what the policy made of the current observations, ``steps`` times."""
        n, driver = self.num_envs, self.driver
        to_env = self._codec.to_env
        root = [np.empty((n, steps, *leaf.shape), leaf.dtype) for leaf in self._leaves]
        following = [np.empty_like(array) for array in root]
        reward = np.empty((n, steps, 1), np.float32)
        terminated = np.empty((n, steps, 1), bool)
        truncated = np.empty((n, steps, 1), bool)
        valid = None if driver.valid is None else np.empty((n, steps), bool)
        state = {
            key: np.empty((n, steps, *value.shape[1:]), value.numpy().dtype)
            for key, value in self._state.items()
        }
        # By step, [T, N, ...]: a plain index is found in half the time of one with a slice.
        step = driver.step
        pairs = [(a.swapaxes(0, 1), now) for a, now in zip(root, self._current, strict=True)]
        pairs += [(state[k].swapaxes(0, 1), value.numpy()) for k, value in self._state.items()]
        nexts = [array.swapaxes(0, 1) for array in following]
        rewards, ends, cuts = (array[:, :, 0].T for array in (reward, terminated, truncated))
        recorded: dict[Key, Tensor] = {}
        slots: list[tuple[Key, tuple[Tensor, ...]]] = []
        actions = np.empty(0)
        for t in range(steps):
            for array, now in pairs:
                array[t] = now
            out = yield
            if t == 0:
                recorded = self._allocate(out, steps)
                slots = [(key, store.unbind(1)) for key, store in recorded.items()]
                actions = recorded["action"].numpy().swapaxes(0, 1)
            for key, views in slots:
                views[t].copy_(out.get(key))
            # The copy, not the policy's own tensor, which it may reuse.
            rewards[t], done, cut = step(
                to_env(actions[t]), [array[t] for array in nexts], self._current
            )
            ends[t] = done
            cuts[t] = cut
            if valid is not None:
                valid[:, t] = driver.valid
            if state:
                self._carry_on(out, done | cut if valid is None else ~driver.valid)
            if self._stop:
                raise RolloutStopped
            if enough(t + 1 if valid is None else int(valid[:, : t + 1].sum(1).min())):
                break
        keys = [leaf.key for leaf in self._leaves]
        data: dict[Key, Tensor] = {}
        for key, at, after in zip(keys, root, following, strict=True):
            data[key] = torch.from_numpy(at)
            data[join_key("next", key)] = torch.from_numpy(after)
        data |= recorded
        data |= {key: torch.from_numpy(array) for key, array in state.items()}
        if IS_INIT in state:  # as InitTracker: only a root can be the first of its episode
            data["next", IS_INIT] = torch.zeros(n, steps, 1, dtype=torch.bool)
        data |= {
            ("next", "reward"): torch.from_numpy(reward),
            ("next", "terminated"): torch.from_numpy(terminated),
            ("next", "truncated"): torch.from_numpy(truncated),
            ("next", "done"): torch.from_numpy(terminated | truncated),
        }
        # The root is always an observation after a reset or in mid-episode.
        data |= {key: torch.zeros(n, steps, 1, dtype=torch.bool) for key in _DONE_KEYS}
        if "policy_version" not in data:  # else the policy's owner has stamped it
            data["policy_version"] = torch.full((n, steps), self.policy_version)
        rollout = nested(data, [n, steps], names=[None, "time"])
        return (rollout if t + 1 == steps else rollout[:, : t + 1]), valid

    def _act(self) -> TensorDictBase | dict[Key, Tensor]:
        """Everything that the policy makes of the current observations, by key."""
        if not self.at_random:
            return self._ask_policy()
        if self._unwritten is None:  # rows have the same keys, whoever chose the action
            made = self._ask_policy()
            items = made.items(True, True) if isinstance(made, TensorDictBase) else made.items()
            self._unwritten = {
                plain_key(key): torch.zeros_like(value)
                for key, value in items
                if isinstance(value, Tensor) and plain_key(key) not in self._input_keys
            }
        return self._unwritten | {"action": self._draw()}

    def _ask_policy(self) -> TensorDictBase | dict[Key, Tensor]:
        policy, td = self._policy, self._input
        if self._on_tensors:
            assert isinstance(policy, FastPolicy)
            return policy.on_tensors(self._tensors)
        if self._copies_input:
            td = td.copy()
        out = policy(td)
        if out is not td and isinstance(out, TensorDictBase):
            td.update(out)
        return td

    def _allocate(self, out: TensorDictBase | dict[Key, Tensor], steps: int) -> dict[Key, Tensor]:
        """Room for everything that the policy wrote; checks the action once per rollout."""
        action = out.get("action", None)
        expected = (self.num_envs, *self._codec.shape)
        if action is None or tuple(action.shape) != expected:
            got, hint = "nothing", "; it is called with a TensorDict of the observations"
            if action is not None:
                got, hint = f"shape {tuple(action.shape)}", self._codec.hint
            raise ConfigurationError(
                f"the policy wrote {got} as 'action'; expected {expected} for "
                f"{self.driver.single_action_space} and {self.num_envs} envs{hint}"
            )
        found: dict[Key, Tensor] = {}
        items = out.items(True, True) if isinstance(out, TensorDictBase) else out.items()
        for raw, value in items:
            key = plain_key(raw)
            if isinstance(value, Tensor) and (key not in self._input_keys or self._copies_input):
                found[key] = torch.empty(
                    (self.num_envs, steps, *value.shape[1:]), dtype=value.dtype
                )
        return found

    def _run_ragged(self, steps: int, enough: Callable[[int], bool]) -> TensorDict:
        """Drop the calls that only reset an env, and step on until each env has its transitions.

        Envs that reset less often get ahead; what they have beyond ``steps`` opens their next
        rollout, so that no transition is lost.
        """
        have = [0 if part is None else part.shape[0] for part in self._surplus]
        while (ahead := min(have)) < steps and not enough(ahead):
            chunk, valid = self._run(steps - ahead, lambda done, a=ahead: enough(a + done))
            for i in range(self.num_envs):
                rows = chunk[i][torch.from_numpy(valid[i, : chunk.shape[1]])]
                before = self._surplus[i]
                self._surplus[i] = rows if before is None else torch.cat([before, rows], 0)
                have[i] = self._surplus[i].shape[0]
        steps = min(steps, *have)
        out = torch.stack([part[:steps] for part in self._surplus], 0)
        self._surplus = [part[steps:].clone() for part in self._surplus]
        out.names = [None, "time"]
        self._check_surplus(max(have) - steps)
        return out

    def _check_surplus(self, rows: int) -> None:
        ahead = rows / self.steps
        advice = (
            f"{self.driver} resets its envs in steps of their own (next-step autoreset), and the "
            f"envs that end episodes least often are {rows} steps ahead of the others: their rows "
            f"wait for {ahead:.0f} rollouts. Build the vector env with same-step autoreset, or "
            "with autoreset disabled, if it can"
        )
        if ahead > _MAX_ROLLOUTS_AHEAD:
            raise ConfigurationError(advice)
        if ahead > _WARN_ROLLOUTS_AHEAD and not self._warned:
            self._warned = True
            warnings.warn(advice, stacklevel=2)


class TorchRLRollout:
    """A TorchRL env, stepped by TorchRL's ``Collector``."""

    def __init__(
        self,
        env: EnvBase,
        policy: Policy | None,
        frames: int,
        *,
        exploration_type: ExplorationType = ExplorationType.RANDOM,
    ) -> None:
        self.env = env
        self.num_envs = env.batch_size.numel()
        self.policy_version = 0
        self.at_random = False
        self._policy = policy
        self._exploration_type = exploration_type
        self._stop = False
        self._taken = 0
        self._enough = never
        self._start(-(-frames // self.num_envs))

    def _start(self, steps: int) -> None:
        self.steps = self._steps_now = steps
        self._collector = Collector(
            self.env,
            self._policy,
            frames_per_batch=steps * self.num_envs,
            total_frames=-1,
            exploration_type=self._exploration_type,
            track_traj_ids=False,  # Episodes numbers them
            trust_policy=True,
            interruptor=self,
        )
        self._batches = iter(self._collector)

    def resize(self, steps: int) -> None:
        self._collector.shutdown(close_env=False)
        self._start(steps)

    def collection_stopped(self) -> bool:
        """Asked by the Collector after every step."""
        self._taken += 1
        return self._stop or self._taken >= self._steps_now or self._enough(self._taken)

    def seed(self, seeds: Sequence[int]) -> None:
        # Collector.set_seed resets the env but keeps the old observation (torchrl 0.14.1), so
        # that the first transition would start from a state that the env is not in.
        static = len(set(seeds)) == 1
        self.env.set_seed(seeds[0], static_seed=static)
        self._collector.reset()

    def run(self, steps: int, enough: Callable[[int], bool] = never) -> TensorDict:
        self._taken, self._steps_now, self._enough = 0, steps, enough
        self._collector.init_random_frames = math.inf if self.at_random else 0
        batch = next(self._batches)
        if self._stop:
            raise RolloutStopped
        batch = batch.reshape(self.num_envs, batch.shape[-1])[:, : self._taken]
        if "collector" in batch.keys():
            batch = batch.exclude("collector")
        batch.names = [None, "time"]
        batch.set("policy_version", torch.full(batch.shape, self.policy_version))
        return batch

    def reset(self) -> None:
        self._collector.reset()

    @property
    def specs(self) -> dict[str, str]:
        env = self.env
        return {
            "observation spec": repr(env.observation_spec),
            "action spec": repr(env.action_spec),
            "reward spec": repr(env.reward_spec),
        }

    @property
    def target(self) -> Any:
        return self.env

    def stop(self) -> None:
        self._stop = True

    def close(self) -> None:
        self._collector.shutdown()


def make_rollout(
    make_env: str | Callable[[], Any],
    policy: Policy | None,
    *,
    frames: int = 1,
    num_envs: int = 1,
    exploration_type: ExplorationType = ExplorationType.RANDOM,
    categorical_action_encoding: bool = False,
) -> Rollout:
    """Build the envs here, in this process, and the loop that fits them.

    ``frames`` per rollout are divided among the envs, rounded up; ``resize`` changes that.

    Raises:
        ConfigurationError: ``make_env`` gives no env, or one whose spaces are not supported.
    """
    first = make_env if isinstance(make_env, str) else make_env()
    if isinstance(first, EnvBase):
        if num_envs > 1:
            first.close()
            first = SerialEnv(num_envs, make_env)
        return TorchRLRollout(first, policy, frames, exploration_type=exploration_type)
    return GymnasiumRollout(
        make_driver(first, make_env, num_envs),
        policy,
        frames,
        exploration_type=exploration_type,
        categorical_action_encoding=categorical_action_encoding,
    )


def nested(
    data: dict[Key, Tensor], batch_size: list[int], names: list[str | None] | None = None
) -> TensorDict:
    """A TensorDict from flat keys and tensors that are known to begin with ``batch_size``.

    Built past TensorDict's checks, which would take a good part of a short rollout's time.
    """
    size = torch.Size(batch_size)
    root: dict[str, Any] = {}
    deeper: dict[str, dict[Key, Tensor]] = {}
    for key, value in data.items():
        if isinstance(key, str):
            root[key] = value
        else:
            first, *rest = key
            deeper.setdefault(first, {})[plain_key(tuple(rest))] = value
    for name, part in deeper.items():
        root[name] = nested(part, batch_size, names)
    return TensorDict._new_unsafe(root, batch_size=size, names=names)
