"""The two tasks of an actor with a memory: explore, and turn rollouts into rows with states."""

from __future__ import annotations

import torch
from tensordict import TensorDictBase

from ..apex.actor import EpsilonGreedy, kept
from ..parts.environments import TRANSITION, check_finite
from ..parts.networks import CELL, HIDDEN, RecurrentQNetwork


class RecurrentEpsilonGreedy(EpsilonGreedy):
    """Like :class:`~..apex.actor.EpsilonGreedy`, for a network with a memory.

    It also reads the states of the LSTM and ``is_init``, and writes the next states."""

    in_keys = ["observation", HIDDEN, CELL, "is_init"]  # noqa: RUF012 (TorchRL's convention)
    out_keys = ["action", ("next", HIDDEN), ("next", CELL)]  # noqa: RUF012

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        network: RecurrentQNetwork = self.network
        step = tensordict.select(HIDDEN, CELL, "is_init")
        step.set("features", network.features(tensordict.get("observation")))
        step = network.memory(step)
        for key in (("next", HIDDEN), ("next", CELL)):
            tensordict.set(key, step.get(key))
        return tensordict.set("action", self.chosen(network.head(step.get("features"))))


def rows_with_states(rollout: TensorDictBase, env: str = "the environment") -> TensorDictBase:
    """Return the rows of a rollout ``[N, T]``, with the LSTM's states before each step.

    The rows have no priorities, so the buffer gives them the largest priority until they have been
    sampled.

    Raises:
        TorchRLDistError: a value is not finite.
    """
    rows = rollout.select(*TRANSITION, HIDDEN, CELL, ("collector", "traj_ids"))
    for key in ("observation", ("next", "observation")):
        rows.set(key, kept(rows.get(key)))
    rows.set(("next", "reward"), rows.get(("next", "reward")).to(torch.float32))
    check_finite(rows, env)
    return rows
