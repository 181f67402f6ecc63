"""Ape-X: many actors, one shared prioritized buffer, one learner (Horgan et al. 2018).

``build`` is the program's topology; the loop is every recipe's (``training.py``). The other
processes serve. Environments: gymnasium's with flat Box observations and Discrete actions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torchrl.data import TensorDictReplayBuffer

from ..collect import CollectReport, RPCBatchedCollector
from ..errors import ConfigurationError
from ..learn.ranks import Ranks
from ..replay import (
    SharedCursorWriter,
    SharedMemmapStorage,
    SharedPrioritizedSampler,
    anneal_beta,
)
from ..runtime import Session
from .apex_actor import EpsilonGreedy, RowsWithPriority, actor_epsilons
from .apex_config import ApexConfig
from .dqn_learner import DQNLearner
from .environments import Task, for_collectors
from .networks import PolicySpec, QNetwork
from .training import Learner, Start, choose_device, train

__all__ = ["Apex", "ApexConfig", "build", "run"]


class Apex(Learner):
    """The learner, its collectors, and the buffer between them."""

    def __init__(
        self,
        config: ApexConfig,
        session: Session,
        network: QNetwork,
        dqn: DQNLearner,
        buffer: TensorDictReplayBuffer,
        collector: RPCBatchedCollector,
        device: torch.device,
    ) -> None:
        self.config = config
        self.session = session
        self.network = network
        self.dqn = dqn
        self.buffer = buffer
        self.collector = collector
        self.device = device
        self.ranks = Ranks(timeout_s=config.timeout_s)
        self._generator = torch.Generator().manual_seed(config.seed)
        buffer.set_rng(self._generator)

    def learn(self, data: CollectReport, frames: int) -> dict[str, Any]:
        """``updates_per_batch`` gradient steps, once there are ``learning_starts`` rows."""
        config, buffer = self.config, self.buffer
        if len(buffer) < config.learning_starts:
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
        for _ in range(config.updates_per_batch):
            batch = buffer.sample().to(self.device)
            loss = self.dqn.update(batch)
            buffer.update_tensordict_priority(batch.cpu())
            self.updates += 1
            if self.session.stop_requested:
                break
        self.collector.update_policy_weights_()
        return {
            "train/loss": loss,
            "train/replay_ratio": self.updates * config.batch_size / frames,
        }

    def state_dict(self) -> dict[str, Any]:
        state = self.dqn.state_dict()
        extra = {"sampler": self._generator.get_state()}
        return {"model": state["model"], "optimizer": state["optimizer"], "extra": extra}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.dqn.load_state_dict(state)
        self._generator.set_state(state["extra"]["sampler"])
        self.collector.update_policy_weights_()
        if len(self.buffer) == 0:
            self.remarks = (
                f"the replay directory {self.config.replay_path} was gone: the buffer fills anew",
            )

    def close(self) -> None:
        """Stop the workers, then leave the buffer's directory."""
        try:
            super().close()
        finally:
            self.buffer.storage.close()


def build(
    config: ApexConfig, task: Task, policy: PolicySpec, session: Session, start: Start
) -> Apex:
    """Create every part of the job and hand each the others it needs.

    Args:
        config: what to build.
        task: sizes of ``config.env``.
        policy: of the network that is trained.
        session: the learner's; its collectors serve.
        start: where the run begins, if an earlier one is resumed.

    Raises:
        ConfigurationError: the job spans several machines.
    """
    if not session.world.one_node:
        raise ConfigurationError(
            "this recipe's replay buffer is shared by the processes of one machine, but the job "
            f"has {session.world.world_size} processes of which "
            f"{session.world.local_world_size} are here; start it on one node"
        )
    device = choose_device(config, session)

    def new_network() -> QNetwork:
        network = policy.network()
        assert isinstance(network, QNetwork)  # a policy by action values
        return network

    def actor(worker_index: int, num_workers: int) -> EpsilonGreedy:
        n = config.envs_per_collector
        epsilons = actor_epsilons(num_workers * n, config.epsilon, config.epsilon_alpha)
        return EpsilonGreedy(new_network(), epsilons[worker_index * n : (worker_index + 1) * n])

    def rows(policy: EpsilonGreedy) -> RowsWithPriority:
        return RowsWithPriority(policy.network, gamma=config.gamma, n_steps=config.n_steps)

    network = new_network().to(device)
    dqn = DQNLearner(
        network,
        gamma=config.gamma,
        learning_rate=config.learning_rate,
        target_tau=config.target_tau,
        max_grad_norm=config.max_grad_norm,
    )
    buffer = TensorDictReplayBuffer(
        storage=SharedMemmapStorage(
            config.capacity,
            scratch_dir=config.replay_path,
            job_id=session.world.job_id,
            resume=start.resumes > 0,
            keep=True,
            timeout_s=config.timeout_s,
        ),
        sampler=SharedPrioritizedSampler(
            config.capacity, alpha=config.alpha, beta=config.beta_start
        ),
        writer=SharedCursorWriter(),
        batch_size=config.batch_size,
        priority_key="td_error",
    )
    collector = RPCBatchedCollector(
        for_collectors(config.env),
        EpsilonGreedy(network),
        session=session,
        frames_per_batch=config.frames_per_batch,
        total_frames=config.total_frames - min(start.frames, config.total_frames - 1),
        policy_factory=actor,
        num_envs=config.envs_per_collector,
        max_policy_lag=config.max_policy_lag,
        replay_buffer=buffer,
        postproc_factory=rows,
        seed=config.seed + 1_000_003 * start.resumes,
        categorical_action_encoding=True,
        timeout_s=config.timeout_s,
    )
    return Apex(config, session, network, dqn, buffer, collector, device)


def run(config: ApexConfig, session: Session, *, resume: bool = False) -> dict[str, Any]:
    """Train; see :func:`~torchrl_dist.recipes.training.train`. The buffer's rows stay in
    ``config.replay_path``."""
    return train(build, config, session, resume=resume)
