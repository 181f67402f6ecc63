"""Small environments and policies that the collector's tests share."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, ClassVar

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv
from tensordict import TensorDict
from torch import nn
from torchrl.data import Binary, Categorical, Composite, OneHot, Unbounded
from torchrl.envs import EnvBase
from torchrl.envs.utils import ExplorationType
from torchrl.modules import QValueActor

from torchrl_dist.collect.node.node import NodeWorker
from torchrl_dist.collect.worker.pinned import _IN_THE_THREAD, OwnThread, PinnedWorker
from torchrl_dist.collect.worker.worker import WorkerConfig
from torchrl_dist.errors import RemoteError
from torchrl_dist.runtime import ForkServer


def wait_for(condition: Callable[[], Any], limit_s: float = 40.0) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


class Node:
    """A node worker in a separate thread, as in a collector. Calls block."""

    def __init__(self, config: WorkerConfig, server: ForkServer) -> None:
        self._pinned = PinnedWorker(partial(NodeWorker, server=server), config, OwnThread())
        self.inner: NodeWorker = self._pinned._worker

    def __getattr__(self, name: str) -> Any:
        if name not in (*_IN_THE_THREAD, "collect", "close"):
            return getattr(self.inner, name)
        return lambda *args, **options: getattr(self._pinned, name)(*args, **options).result()


def node_config(make_env: Any, **options: Any) -> WorkerConfig:
    base = {"num_envs": 1, "env_processes": 2, "seed": 3}
    base["exploration_type"] = ExplorationType.DETERMINISTIC
    return WorkerConfig(make_env, **{**base, **options})


@contextlib.contextmanager
def nodes(server: ForkServer, **base: Any) -> Iterator[Callable[..., Node]]:
    """Return a function that builds node workers, which are closed at the end."""
    built: list[Node] = []

    def make(make_env: Any, **options: Any) -> Node:
        built.append(Node(node_config(make_env, **{**base, **options}), server))
        return built[-1]

    yield make
    for worker in built:
        with contextlib.suppress(RemoteError):  # an env raised it when it was closed
            worker.close()


def trajectories_of(batches: list[Any]) -> list[Any]:
    """The rows of each trajectory, in the order of their steps."""
    rows = torch.cat([batch.reshape(-1) for batch in batches])
    ids = rows["collector", "traj_ids"]
    return [rows[ids == each] for each in ids.unique()]


class Counter(gymnasium.Env):
    """Observes its step count; ends after ``length`` steps; the reward is the step count.

    The first observation of episode k is ``100 * k``, so that every row tells where it comes from.
    """

    observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space = spaces.Discrete(3)

    def __init__(self, length: int = 5, truncate: bool = False) -> None:
        self.length, self.truncate = length, truncate
        self.episode, self.t = 0, 0

    def _observe(self) -> np.ndarray:
        return np.array([100 * self.episode + self.t, self.length], np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.episode, self.t = self.episode + 1, 0
        return self._observe(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert self.action_space.contains(action), action
        assert self.t < self.length, "stepped after the end of an episode"
        self.t += 1
        end = self.t >= self.length
        return self._observe(), float(self.t), end and not self.truncate, end and self.truncate, {}


def before_steps(do: Callable[[], Any], kind: type[gymnasium.Env] = Counter) -> type[gymnasium.Env]:
    """Envs that call ``do()`` at the beginning of each step."""

    class Delayed(kind):  # type: ignore[valid-type, misc]
        def step(self, action: Any) -> Any:
            do()
            return super().step(action)

    return Delayed


class Paced(Counter):
    """Steps take ``step_s`` seconds."""

    def __init__(self, length: int = 5, step_s: float = 0.001) -> None:
        super().__init__(length)
        self.step_s = step_s

    def step(self, action: Any) -> Any:
        time.sleep(self.step_s)
        return super().step(action)


class Tally(Counter):
    """Counts the steps of all envs in its process, so that others can ask how far they are."""

    steps = 0

    def step(self, action: Any) -> Any:
        Tally.steps += 1
        return super().step(action)


def steps_taken() -> int:
    return Tally.steps


class NextStepVector(VectorEnv):
    """Counters behind next-step autoreset, with no way to reset only some of them."""

    metadata: ClassVar[
        dict[str, Any]
    ] = {}  # as other people's vector envs: no autoreset mode declared

    def __init__(self, lengths: list[int], truncate: bool = False) -> None:
        self.inner = SyncVectorEnv(
            [lambda n=n: Counter(n, truncate) for n in lengths],
            autoreset_mode=AutoresetMode.NEXT_STEP,
            observation_mode="same",
        )
        self.num_envs = len(lengths)
        self.single_observation_space = self.inner.single_observation_space
        self.single_action_space = self.inner.single_action_space
        self.observation_space = self.inner.observation_space
        self.action_space = self.inner.action_space

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        assert options is None
        return self.inner.reset(seed=seed)

    def step(self, actions: Any) -> Any:
        return self.inner.step(actions)


def counters(lengths: list[int], mode: AutoresetMode, truncate: bool = False) -> SyncVectorEnv:
    return SyncVectorEnv([lambda n=n: Counter(n, truncate) for n in lengths], autoreset_mode=mode)


def mlp(inputs: int, outputs: int, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(inputs, 16), nn.Tanh(), nn.Linear(16, outputs))


def q(inputs: int, actions: int, seed: int = 0) -> QValueActor:
    return QValueActor(mlp(inputs, actions, seed), in_keys=["observation"], spec=OneHot(actions))


class Agents(EnvBase):
    """Two agents of one group, with rewards and ends of their own: agent i ends after 3 + i steps,
    the episode with the last."""

    def __init__(self) -> None:
        super().__init__(batch_size=[])
        self.observation_spec = Composite(agents=Composite(seen=Unbounded((2, 3)), shape=(2,)))
        self.action_spec = Composite(
            agents=Composite(action=Categorical(3, shape=(2,)), shape=(2,))
        )
        self.reward_spec = Composite(agents=Composite(reward=Unbounded((2, 1)), shape=(2,)))
        ends = {name: Binary(1, shape=(2, 1), dtype=torch.bool) for name in ("done", "terminated")}
        own = {name: Binary(1, shape=(1,), dtype=torch.bool) for name in ("done", "terminated")}
        self.done_spec = Composite(agents=Composite(ends, shape=(2,)), **own)
        self.t, self.generator = 0, torch.Generator()

    def _seen(self) -> torch.Tensor:
        return torch.rand(2, 3, generator=self.generator) + self.t

    def _ends(self) -> dict[str, Any]:
        ends = torch.tensor([[self.t >= 3], [self.t >= 4]])
        one = ends.all(0)
        return {
            "agents": TensorDict(
                {"seen": self._seen(), "done": ends, "terminated": ends.clone()}, [2]
            ),
            "done": one,
            "terminated": one.clone(),
        }

    def _reset(self, tensordict: Any, **kwargs: Any) -> TensorDict:
        self.t = 0
        return TensorDict(self._ends(), [])

    def _step(self, tensordict: Any) -> TensorDict:
        self.t += 1
        out = TensorDict(self._ends(), [])
        action = tensordict["agents", "action"].float().unsqueeze(-1)
        return out.set(("agents", "reward"), action + self.t)

    def _set_seed(self, seed: int | None) -> None:
        self.generator.manual_seed(seed or 0)


class Talking(gymnasium.Env):
    """Observes a number and a word; rewards are arrays of one element."""

    observation_space = spaces.Dict(
        {"number": spaces.Box(-1, 1, (2,), np.float32), "word": spaces.Text(8)}
    )
    action_space = spaces.Discrete(3)

    def _observe(self) -> dict[str, Any]:
        number = self.np_random.uniform(-1, 1, 2).astype(np.float32)
        return {"number": number, "word": f"word {self.t}"}

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.t = 0
        return self._observe(), {}

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        self.t += 1
        return self._observe(), np.array([float(action)]), self.t == 4, False, {}


class Pictures(gymnasium.Env):
    """Observes images; ends at random."""

    observation_space = spaces.Box(0, 255, (6, 6, 3), np.uint8)
    action_space = spaces.MultiDiscrete([3, 2])

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return self.np_random.integers(0, 256, (6, 6, 3), np.uint8), {}

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        seen = self.np_random.integers(0, 256, (6, 6, 3), np.uint8)
        return seen, np.array([1.5 * action[0]]), bool(seen[0, 0, 0] < 40), False, {}


class Seen(gymnasium.Env):
    """Observes what it draws from a space; ends after five steps."""

    action_space = spaces.Discrete(2)

    def __init__(self, space: spaces.Space) -> None:
        self.observation_space = space

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
        self.t = 0
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        self.t += 1
        return self.observation_space.sample(), float(action), self.t == 5, False, {}


class Growing(EnvBase):
    """Observes all that it has drawn in its episode, ``[steps + 1, 2]``; ends at random."""

    def __init__(self) -> None:
        super().__init__(batch_size=[])
        self.observation_spec = Composite(observation=Unbounded((-1, 2)))
        self.action_spec = Unbounded((1,), dtype=torch.int64)
        self.reward_spec = Unbounded((1,))
        self.drawn, self.generator = torch.empty(0, 2), torch.Generator()

    def _draw(self) -> TensorDict:
        new = torch.rand(1, 2, generator=self.generator)
        self.drawn = torch.cat([self.drawn, new])
        return TensorDict({"observation": self.drawn.clone()}, [])

    def _reset(self, tensordict: Any, **kwargs: Any) -> TensorDict:
        self.drawn = self.drawn[:0]
        return self._draw()

    def _step(self, tensordict: Any) -> TensorDict:
        out = self._draw()
        return out.update(
            {
                "reward": out["observation"].sum().reshape(1),
                "done": out["observation"][-1:, 0] > 0.7,
            }
        )

    def _set_seed(self, seed: int | None) -> None:
        self.generator.manual_seed(seed or 0)


class DictEnv(gymnasium.Env):
    """Observes a dictionary with a dictionary inside, and takes several actions at once."""

    observation_space = spaces.Dict(
        {
            "state": spaces.Box(-1, 1, (), np.float64),
            "inner": spaces.Dict({"where": spaces.Box(0, 9, (2,), np.float32)}),
            "bits": spaces.MultiBinary(3),
        }
    )
    action_space = spaces.MultiDiscrete([2, 3])

    def _observe(self) -> dict[str, Any]:
        where = np.array([self.t, 9 - self.t], np.float32)
        bits = np.array([self.t % 2, 1, 0], np.int8)
        return {"state": np.array(self.t / 9), "inner": {"where": where}, "bits": bits}

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.t = 0
        return self._observe(), {}

    def step(self, action: Any) -> Any:
        assert self.action_space.contains(action), action
        self.t += 1
        return self._observe(), 1.0, self.t == 8, False, {}
