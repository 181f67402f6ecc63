"""The two tasks of an Ape-X actor: explore with its own epsilon, and turn rollouts into rows.

Both tasks run on the collector's workers. The formulae are from Horgan et al. 2018
(arXiv:1803.00933).
"""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor
from torchrl.data.postprocs import MultiStep
from torchrl.envs.utils import ExplorationType, exploration_type

from ..parts.environments import TRANSITION, check_finite
from ..parts.networks import QNetwork


def actor_epsilons(num_actors: int, epsilon: float, alpha: float) -> Tensor:
    """Return epsilon^(1 + i / (N - 1) * alpha) (section 4.1), float32 ``[num_actors]``."""
    share = torch.arange(num_actors, dtype=torch.float64) / max(1, num_actors - 1)
    return (epsilon ** (1 + share * alpha)).to(torch.float32)


class EpsilonGreedy(TensorDictModuleBase):
    """Take the action with the highest value or, with probability epsilon, a random action.

    Each environment has its own epsilon.

    Reads ``observation`` ``[N, ...]``, writes ``action`` int64 ``[N]``. The module explores only
    if TorchRL's exploration type is RANDOM. The epsilons are not part of the weights, so the
    learner's weights do not replace them.

    Args:
        network: returns the values.
        epsilons: float32 ``[N]``; None: the module never explores.
    """

    in_keys: list[Any] = ["observation"]  # noqa: RUF012 (TorchRL's convention)
    out_keys: list[Any] = ["action"]  # noqa: RUF012

    def __init__(self, network: Any, epsilons: Tensor | None = None) -> None:
        super().__init__()
        self.network = network
        self.epsilons = epsilons

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        return tensordict.set("action", self.chosen(self.network(tensordict.get("observation"))))

    def chosen(self, values: Tensor) -> Tensor:
        """Return the actions, int64 ``[N]``, for values ``[N, num_actions]``."""
        action = values.argmax(-1)
        if self.epsilons is not None and exploration_type() is ExplorationType.RANDOM:
            curious = torch.rand(action.shape) < self.epsilons
            action = torch.where(curious, torch.randint_like(action, values.shape[-1]), action)
        return action


def n_step(gamma: float, n_steps: int) -> MultiStep:
    """Return TorchRL's n-step transform. Each n-step row keeps the end-of-episode flags of its
    window's last step.

    TorchRL's default combines the flags of the window's *first* step with the observation of its
    last step. The steps before an episode's end would then bootstrap from the terminal observation.
    """
    transform = MultiStep(gamma=gamma, n_steps=n_steps)
    transform.done_keys = ()
    return transform


class RowsWithPriority:
    """Convert rollouts ``[N, T]`` into n-step rows ``[N, T']`` with the actor's own TD errors.

    A window that is incomplete at the end of a rollout waits for the next rollout, so T may be
    arbitrarily small. For the first rollout, T' is T - n + 1, or 0 if this is negative. Once n - 1
    steps wait, T' is T. A window is shorter than n where an episode ends, or where the environments
    were reset between two rollouts. ``steps_to_next_obs`` is the length of the window, by which
    DQNLoss discounts. Rows do not bootstrap from a terminated episode. At any other end, they
    bootstrap from the true last observation.

    ``td_error`` is |R + gamma^n max_a q(S_t+n, a) - q(S_t, A_t)| (algorithm 1, line 11). The same
    network selects and evaluates the action, because an actor has no target network.
    """

    def __init__(
        self, network: QNetwork, *, gamma: float, n_steps: int, env: str = "the environment"
    ) -> None:
        self.network = network
        self.env = env
        self.gamma = gamma
        self.n_steps = n_steps
        self.transform = n_step(gamma, n_steps)
        self._waiting: TensorDictBase | None = None  # [N, at most n - 1]

    @torch.no_grad()
    def __call__(self, rollout: TensorDictBase) -> TensorDictBase:
        steps = self._behind_what_waits(rollout)
        complete = max(0, steps.shape[1] - self.n_steps + 1)
        # Copy these steps, because the next rollout may reuse their memory.
        self._waiting = steps[:, complete:].clone()
        rows = self._rows(self.transform(steps)[:, :complete])
        check_finite(rows, self.env)
        return rows

    def _behind_what_waits(self, rollout: TensorDictBase) -> TensorDictBase:
        steps = rollout.select(*TRANSITION, ("collector", "traj_ids"))
        for key in ("observation", ("next", "observation")):
            steps.set(key, kept(steps.get(key)))  # the transform supports only some dtypes
        if self._waiting is None or self._waiting.shape[1] == 0:
            return steps
        waiting = self._waiting[: steps.shape[0]]  # the job's last rollout may have fewer envs
        trajectory = ("collector", "traj_ids")
        broken = waiting[:, -1].get(trajectory) != steps[:, 0].get(trajectory)
        waiting.get(("next", "done"))[broken, -1] = True
        return torch.cat([waiting, steps], 1)

    def _rows(self, windows: TensorDictBase) -> TensorDictBase:
        shape = windows.batch_size
        steps = windows["steps_to_next_obs"].reshape(*shape, 1)
        action = windows["action"].reshape(*shape, 1)
        after = windows["next"]
        reward = after["reward"].reshape(*shape, 1).to(torch.float32)
        terminated = after["terminated"].reshape(*shape, 1)
        observation, next_observation = windows["observation"], after["observation"]
        bootstrap = self.network(next_observation).max(-1, keepdim=True).values
        target = reward + self.gamma**steps * bootstrap * ~terminated
        value = self.network(observation).gather(-1, action)
        return TensorDict(
            {
                "observation": observation,
                "action": action.squeeze(-1),
                "steps_to_next_obs": steps,
                "td_error": (target - value).abs(),
                "next": {
                    "observation": next_observation,
                    "reward": reward,
                    "done": after["done"].reshape(*shape, 1),
                    "terminated": terminated,
                },
            },
            batch_size=shape,
        )


def kept(observation: Tensor) -> Tensor:
    """Keep images as uint8, which takes a quarter of float32's memory. The network scales them."""
    return observation if observation.dtype == torch.uint8 else observation.to(torch.float32)
