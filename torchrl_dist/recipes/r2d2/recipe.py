"""R2D2: Ape-X for a network with a memory, which learns from sequences (Kapturowski et al. 2019).

Actors store the LSTM's state with each step. The learner samples windows of consecutive rows by
priority, computes the state at the first row to learn from (burn-in), and learns from the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from tensordict import TensorDictBase
from torchrl.data import Sequence

from ...runtime import Session
from ..apex import recipe as apex
from ..parts.networks import CELL, HIDDEN, RecurrentQNetwork
from ..training.loop import train
from .actor import RecurrentEpsilonGreedy, rows_with_states
from .config import R2D2Config
from .loss import R2D2Loss

__all__ = ["R2D2", "R2D2Config", "build", "run"]


class R2D2(apex.Apex):
    """A learner that samples sequences, its collectors, and the buffer between them."""

    config: R2D2Config
    for_priorities = (
        "anchor_index", "anchor_generation", "validity_mask", "learning_mask", "td_error",
    )  # fmt: skip
    has_graph = False  # the CPU reads the lengths of windows, which a CUDA graph does not allow

    @staticmethod
    def actor(
        network: RecurrentQNetwork, epsilons: torch.Tensor | None = None
    ) -> RecurrentEpsilonGreedy:
        return RecurrentEpsilonGreedy(network, epsilons)

    @staticmethod
    def rows(config: R2D2Config, policy: Any) -> Callable[[TensorDictBase], TensorDictBase]:
        return partial(rows_with_states, env=config.env)

    @staticmethod
    def new_loss(config: R2D2Config, network: RecurrentQNetwork) -> R2D2Loss:
        return R2D2Loss(
            network,
            gamma=config.gamma,
            n_steps=config.n_steps,
            burn_in=config.burn_in,
            length=config.sequence,
        )

    @staticmethod
    def windows(config: R2D2Config) -> dict[str, Any]:
        unit = Sequence(
            length=config.sequence,
            burn_in=config.burn_in,
            bootstrap=config.n_steps - 1,
            episode_boundary="stop",
        )
        return {"sample_unit": unit, "eta": config.eta}

    def write_back(self, batch: TensorDictBase) -> None:
        """With ``refresh_states``, write the states from the burn-in into the buffer's rows."""
        if not self.config.refresh_states:
            return
        size = self.dqn.loss.size
        rows = batch.select("index", "index_generation", HIDDEN, CELL)[self.config.burn_in :: size]
        rows = rows.cpu()
        self.buffer.update_if_present(
            index=rows["index"],
            generation=rows["index_generation"],
            patch=rows.select(HIDDEN, CELL),
        )


build = R2D2


def run(config: R2D2Config, session: Session, *, resume: bool = False) -> dict[str, Any]:
    """Train; see :func:`~torchrl_dist.recipes.training.loop.train`. The buffer's rows stay
    in ``config.replay_path``."""
    return train(build, config, session, resume=resume)
