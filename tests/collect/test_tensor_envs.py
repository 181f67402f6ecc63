"""Vector envs that take and return torch tensors, as Isaac Lab's do."""

from __future__ import annotations

from typing import Any, ClassVar

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv, VectorWrapper
from tensordict import TensorDictBase

from tests.collect.envs import Counter, Node, counters
from torchrl_dist.collect import RPCBatchedCollector
from torchrl_dist.collect.loop.rollout import make_rollout
from torchrl_dist.collect.worker.worker import WorkerConfig
from torchrl_dist.errors import ConfigurationError
from torchrl_dist.runtime import ForkServer

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
DEVICES = ["cpu", pytest.param("cuda", marks=needs_cuda)]


class Same(VectorWrapper):
    """A wrapper that changes nothing."""


class Tensors(VectorWrapper):
    """As a simulator on a device: what it returns is its own memory, which it goes on changing."""

    def __init__(self, env: VectorEnv, device: str = "cpu") -> None:
        super().__init__(env)
        self.device = device
        self.memory: dict[Any, torch.Tensor] = {}

    def kept(self, name: Any, value: Any) -> torch.Tensor:
        new = torch.as_tensor(np.array(value)).to(self.device)
        return self.memory.setdefault(name, torch.empty_like(new)).copy_(new)

    def reset(self, **kwargs: Any) -> Any:
        observation, info = self.env.reset(**kwargs)
        return self.kept("observation", observation), info

    def step(self, actions: Any) -> Any:
        assert isinstance(actions, torch.Tensor) and actions.device.type == self.device
        *answer, info = self.env.step(actions.cpu().numpy())
        if "final_obs" in info:
            shape = np.zeros(2, np.float32)
            final = [shape if each is None else each for each in info["final_obs"]]
            info["final_obs"] = self.kept("final", np.stack(final))
        names = ("observation", "reward", "terminated", "truncated")
        return *map(self.kept, names, answer), info


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_tensors_give_the_rows_of_arrays(mode: AutoresetMode, device: str) -> None:
    rows = []
    for wrapper in (Same, lambda env: Tensors(env, device)):
        rollout = make_rollout(lambda w=wrapper: w(counters([3, 5], mode)), None, frames=24)
        rollout.seed([0, 1])
        rows.append(torch.cat([rollout.run(12), rollout.run(12)], 1))
        rollout.close()
    ours, arrays = rows
    for key in arrays.keys(True, True):
        assert torch.equal(ours[key], arrays[key]), key


class Simulator(gymnasium.Env):
    """Counters of Isaac Lab's kind: no VectorEnv, its own resets, and no last observations."""

    metadata: ClassVar[dict[str, Any]] = {}

    def __init__(self, lengths: tuple[int, ...] = (3, 5)) -> None:
        self.lengths = torch.tensor(lengths)
        self.num_envs = len(lengths)
        self.single_observation_space = spaces.Dict({"policy": Counter.observation_space})
        self.single_action_space = spaces.Box(-np.inf, np.inf, (1,), np.float32)
        self.observation_space = gymnasium.vector.utils.batch_space(
            self.single_observation_space, self.num_envs
        )
        self.action_space = spaces.Box(-np.inf, np.inf, (self.num_envs, 1), np.float32)

    def observe(self) -> dict[str, torch.Tensor]:
        return {"policy": torch.stack([self.t, self.lengths], 1).float()}

    def reset(self, seed: int | None = None, env_ids: Any = None, options: Any = None) -> Any:
        self.t = torch.zeros(self.num_envs, dtype=torch.long)
        return self.observe(), {}

    def step(self, action: torch.Tensor) -> Any:
        self.t += 1
        reward = self.t + action[:, 0]
        done = self.t == self.lengths
        self.t[done] = 0
        return self.observe(), reward, done, torch.zeros_like(done), {}

    def where(self) -> str:
        return "in the simulator"


IsaacLike = type("IsaacLike", (Simulator,), {"__module__": "isaaclab.envs.manager_based_rl_env"})


def half(td: TensorDictBase) -> TensorDictBase:
    return td.set("action", torch.full((len(td), 1), 0.5))


def check_simulator(rows: TensorDictBase) -> None:
    for i, length in enumerate((3, 5)):
        step = torch.arange(12) % length
        ended = step == length - 1
        assert rows["policy"][i, :, 0].tolist() == step.tolist()
        assert rows["next", "done"][i, :, 0].tolist() == ended.tolist()
        assert rows["next", "reward"][i, :, 0].tolist() == (step + 1.5).tolist()
        following = rows["next", "policy"][i, :, 0]
        assert following.isnan().tolist() == ended.tolist()  # as TorchRL marks what is not known
        assert following[~ended].tolist() == (step + 1)[~ended].tolist()


def test_an_env_of_isaac_labs_kind_is_a_vector_env(fork_server: ForkServer) -> None:
    make = lambda: gymnasium.wrappers.OrderEnforcing(IsaacLike())  # noqa: E731
    with RPCBatchedCollector(make, half, frames_per_batch=24) as collector:
        with pytest.warns(UserWarning, match=r"are therefore NaN"):
            check_simulator(collector.next())
        assert collector.call("where") == ["in the simulator"]
    worker = Node(WorkerConfig(make, half, frames_per_rollout=24, env_processes=1), fork_server)
    rows, _ = worker.collect()
    check_simulator(rows if isinstance(rows, TensorDictBase) else rows.unpack())
    worker.close()


def test_an_unknown_one_must_say_when_it_resets_its_envs() -> None:
    with pytest.raises(ConfigurationError, match="autoreset_mode"):
        make_rollout(Simulator, None)
    said = type("Said", (Simulator,), {"metadata": {"autoreset_mode": AutoresetMode.SAME_STEP}})
    rollout = make_rollout(said, half, frames=4)
    with pytest.raises(ConfigurationError, match="final_obs"):
        rollout.run(4)
