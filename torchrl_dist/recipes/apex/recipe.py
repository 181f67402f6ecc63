"""Ape-X: many actors, one shared prioritized buffer, one or several learners (Horgan et al. 2018).

Several learners take each step together: each draws a part of the batch, and the averaged gradients
are those of the whole batch. On several nodes, each node keeps a shard of the buffer, and batches
are drawn as if from a single buffer.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from tensordict import TensorDictBase
from torchrl.objectives import LossModule

from ...collect import CollectReport
from ...errors import TorchRLDistError
from ...learn import DistributedLoss
from ...learn.ranks import Ranks
from ...replay import anneal_beta
from ...runtime import Session
from ..parts.environments import Task
from ..parts.networks import PolicySpec
from ..training.feed import Feed
from ..training.loop import Learner, Start, choose_device, make_collector, stream_seed, train
from ..training.shared_rows import remarks_on_resume, shared_buffer, stale_priorities
from .actor import EpsilonGreedy, RowsWithPriority, actor_epsilons
from .config import ApexConfig
from .dqn_learner import DQNLearner, DQNLoss

__all__ = ["Apex", "ApexConfig", "build", "run"]


class Apex(Learner):
    """A learner, its collectors, and the buffer between them. Each learner's process builds one.

    Args:
        task: sizes of ``config.env``.
        policy: how to make the network that is trained.
        session: this learner's session, which also contains the collectors.
        start: where the run begins.

    Attributes:
        dqn: trains ``network``. ``DistributedLoss`` makes its loss average the learners' gradients.
        for_priorities: the entries of a batch that ``update_tensordict_priority`` needs.
        has_graph: whether an update can be a CUDA graph.
    """

    for_priorities: tuple[str, ...] = ("index", "index_generation", "td_error")
    has_graph = True

    def __init__(
        self, config: ApexConfig, task: Task, policy: PolicySpec, session: Session, start: Start
    ) -> None:
        self.config = config
        self.session = session
        self.device = choose_device(config, session)
        learners, place = len(session.of_role("learner")), session.me.index
        actors = (len(session.of_role("collector")) or learners) * config.envs_per_collector
        kind = type(self)  # functions for the collectors must not contain this learner

        def actor(worker_index: int, num_workers: int) -> EpsilonGreedy:
            n = config.envs_per_collector
            first = (place + worker_index * learners) * n  # see my_collectors
            epsilons = actor_epsilons(actors, config.epsilon, config.epsilon_alpha)
            return kind.actor(policy.network(), epsilons[first : first + n])

        self.network = policy.network().to(self.device)
        self.dqn = DQNLearner(
            kind.new_loss(config, self.network),
            learning_rate=config.learning_rate,
            target_tau=config.target_tau,
            max_grad_norm=config.max_grad_norm,
            graph=kind.has_graph and learners == 1 and config.network is None,
        )
        DistributedLoss(self.dqn.loss, group=session.process_group, timeout_s=config.timeout_s)
        self.ranks: Ranks = self.dqn.loss.ranks
        self.buffer = shared_buffer(
            config,
            session,
            start,
            batch_size=config.batch_size // learners,
            exponents=(config.alpha, config.beta_start),
            frames=task.frames,
            **kind.windows(config),
        )
        # wait until the first learner has dropped old rows
        self.ranks.exchange(None, "the buffer's beginning")
        self.collector = make_collector(
            config,
            session,
            start,
            task,
            kind.actor(self.network),
            frames_per_batch=config.frames_per_batch // learners,
            policy_factory=actor,
            replay_buffer=self.buffer,
            postproc_factory=partial(kind.rows, config),
            seed=stream_seed(config.seed, start.resumes, place, 1),
        )
        self._has_enough = False
        self._frames = start.frames
        self._full_batch = 0  # frames of a batch of all learners, while all collectors are alive
        self._credit = 0  # number of updates that are due, times the frames of a full batch
        seed = stream_seed(config.seed, start.resumes, place, 2)
        self._generator = torch.Generator().manual_seed(seed)
        self.buffer.set_rng(self._generator)
        self._feed = Feed(self.buffer.sample, self.device)

    @staticmethod
    def actor(network: Any, epsilons: torch.Tensor | None = None) -> EpsilonGreedy:
        """Return the policy of a collector. Without ``epsilons``, the policy never explores."""
        return EpsilonGreedy(network, epsilons)

    @staticmethod
    def rows(config: Any, policy: EpsilonGreedy) -> Callable[[TensorDictBase], TensorDictBase]:
        """Return the function that converts rollouts of ``policy`` into rows of the buffer."""
        return RowsWithPriority(
            policy.network, gamma=config.gamma, n_steps=config.n_steps, env=config.env
        )

    @staticmethod
    def new_loss(config: Any, network: Any) -> LossModule:
        """Return the loss that trains ``network``."""
        return DQNLoss(network, config.gamma)

    @staticmethod
    def windows(config: Any) -> dict[str, Any]:
        """Return the options for a buffer that samples windows of rows, or none for single rows."""
        return {}

    def learn(self, data: CollectReport, frames: int) -> dict[str, Any]:
        """Take ``updates_per_batch`` gradient steps per full batch, after ``learning_starts`` rows.

        If collectors were lost, a batch has fewer frames and gets proportionally fewer steps.
        """
        config, buffer = self.config, self.buffer
        new, self._frames = frames - self._frames, frames
        if not self._has_enough:
            # A full ring has fewer rows than its capacity while a collector overwrites some.
            has_enough = len(buffer) >= config.learning_starts or buffer.storage._is_full
            mine = [has_enough, self.collector.frames_per_batch]
            enough, full = zip(
                *self.ranks.exchange(mine, "the question whether to learn"), strict=True
            )
            self._has_enough, self._full_batch = all(enough), sum(full)
        if not self._has_enough:
            return {}
        self._credit += new * config.updates_per_batch
        updates, self._credit = divmod(self._credit, self._full_batch)
        if not updates:
            return {}
        share = min(1.0, frames / config.total_frames)
        anneal_beta(
            buffer.sampler,
            frames,
            start=config.beta_start,
            end=config.beta_end,
            steps=config.total_frames,
        )
        self.dqn.set_learning_rate(
            config.learning_rate + share * (config.learning_rate_end - config.learning_rate)
        )
        for left in reversed(range(updates)):
            batch = self._feed.take()
            assert batch is not None  # a buffer returns a batch, or raises
            loss = self.dqn.update(batch)
            if left:
                self._feed.prepare()
            priorities = batch.select(*self.for_priorities).cpu()
            self._check_errors(priorities["td_error"])
            buffer.update_tensordict_priority(priorities)
            self.write_back(batch)
            self.updates += 1
            # several learners stop together
            if self.session.stop_requested and self.ranks.size == 1:
                break
        self.collector.update_policy_weights_()
        rows = self.updates * config.batch_size
        return {
            "train/loss": loss,
            "train/replay_ratio": rows / frames,
            "train/stale_priorities": stale_priorities(buffer) / rows,
        }

    def write_back(self, batch: TensorDictBase) -> None:
        """Write new values of ``batch`` into the buffer's rows, if the recipe does this."""

    def _check_errors(self, td_error: torch.Tensor) -> None:
        if not td_error.isfinite().all():
            raise TorchRLDistError(
                f"TD errors are not finite after {self.updates} updates: sums of rewards of "
                f"{self.config.env} are too large for float32, or the learning rate is too high; "
                "scale the rewards, pass --reward-clip, or lower --learning-rate"
            )

    def state_dict(self) -> dict[str, Any]:
        return {**self.dqn.state_dict(), "extra": {"sampler": self._generator.get_state()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.dqn.load_state_dict(state)
        # The saved generator is the first learner's. The other learners must draw other rows.
        if self.ranks.is_first:
            self._generator.set_state(state["extra"]["sampler"])
        self.collector.update_policy_weights_()
        self.remarks = remarks_on_resume(self.buffer)

    def close(self) -> None:
        """Stop the workers, then leave the buffer, and stop averaging gradients."""
        with contextlib.ExitStack() as stack:
            stack.callback(self.dqn.loss.close)
            stack.callback(self.buffer.storage.close)
            super().close()


build = Apex


def run(config: ApexConfig, session: Session, *, resume: bool = False) -> dict[str, Any]:
    """Train; see :func:`~torchrl_dist.recipes.training.loop.train`. The buffer's rows stay
    in ``config.replay_path``."""
    return train(build, config, session, resume=resume)
