"""The recipes' algorithms, as a user of TorchRL would write them for one process.

Network, hyper-parameters, exploration and number of environments are those of the recipe's
configuration, for a job with all environments in one process. Collector, replay buffer, sampler,
losses and optimizer are TorchRL's and torch's, combined as in TorchRL's ``sota-implementations``.
The environments form one vector environment of gymnasium, which TorchRL wraps. Among TorchRL's ways
to step several environments in one process, this is the fastest.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from tensordict import TensorDictBase
from torch import nn
from torchrl.collectors import Collector
from torchrl.data import (
    LazyTensorStorage,
    PrioritizedSampler,
    SamplerWithoutReplacement,
    TensorDictReplayBuffer,
)
from torchrl.envs import DoubleToFloat, EnvBase, GymWrapper, TransformedEnv
from torchrl.modules import QValueActor
from torchrl.objectives import A2CLoss, ClipPPOLoss, DQNLoss, SACLoss, SoftUpdate
from torchrl.objectives.value import GAE

from torchrl_dist.learn.ranks import Ranks
from torchrl_dist.recipes.apex.actor import EpsilonGreedy, actor_epsilons, n_step
from torchrl_dist.recipes.apex.config import ApexConfig
from torchrl_dist.recipes.ddppo.config import DDPPOConfig
from torchrl_dist.recipes.impala.config import ImpalaConfig
from torchrl_dist.recipes.impala.recipe import Impala
from torchrl_dist.recipes.parts.environments import TRANSITION, Task, make_env
from torchrl_dist.recipes.parts.moments import RewardScale
from torchrl_dist.recipes.parts.networks import PolicySpec, ValueNetwork
from torchrl_dist.recipes.parts.policies import action_values_of, categorical_actor, critic_of
from torchrl_dist.recipes.parts.policies import squashed_gaussian_actor as gaussian_actor
from torchrl_dist.recipes.sac.config import SACConfig
from torchrl_dist.recipes.sac.recipe import ActionValue, target_entropy
from torchrl_dist.recipes.training.loop import ActorCritic


class Alone(ABC):
    """A learner that steps its environments itself.

    Attributes:
        network: the policy's network.
        collector: yields batches ``[N, T]``.
    """

    network: Any
    collector: Collector
    loss: Any
    optimizer: torch.optim.Adam

    @abstractmethod
    def learn(self, data: TensorDictBase, frames: int) -> None:
        """Learn from ``data``, the latest batch. ``frames`` counts the frames of all batches so
        far."""

    def _step(self, total: torch.Tensor, max_grad_norm: float | None = None) -> None:
        self.optimizer.zero_grad()
        total.backward()
        if max_grad_norm is not None:
            nn.utils.clip_grad_norm_(self.optimizer.param_groups[0]["params"], max_grad_norm)
        self.optimizer.step()

    def _set_learning_rate(self, learning_rate: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate


def _collector(config: Any, policy: Callable[..., Any], **options: Any) -> Collector:
    envs = SyncVectorEnv(
        [partial(make_env, config.env)] * config.envs_per_collector,
        autoreset_mode=AutoresetMode.SAME_STEP,
    )
    # Categorical, because the recipes' policies write discrete actions as numbers, not one-hot.
    wrapped: EnvBase = GymWrapper(envs, categorical_action_encoding=True)
    if envs.single_observation_space.dtype == np.float64:
        wrapped = TransformedEnv(wrapped, DoubleToFloat())  # recipes' networks convert, too
    wrapped.set_seed(config.seed)
    return Collector(
        wrapped,
        policy,
        frames_per_batch=config.frames_per_batch,
        total_frames=config.total_frames,
        max_frames_per_traj=-1,
        **options,
    )


def double_dqn(network: nn.Module, config: ApexConfig) -> tuple[DQNLoss, SoftUpdate]:
    """Return the loss of Ape-X's algorithm, and the updater of its target network."""
    kind = "categorical"
    actor = QValueActor(network, in_keys=["observation"], action_space=kind)
    loss = DQNLoss(
        actor, double_dqn=True, delay_value=True, loss_function="smooth_l1", action_space=kind
    )
    loss.make_value_estimator(gamma=config.gamma)
    return loss, SoftUpdate(loss, tau=config.target_tau)


class DQN(Alone):
    """Ape-X's algorithm without its actors."""

    def __init__(self, config: ApexConfig, task: Task, policy: PolicySpec) -> None:
        self.config = config
        self.network = policy.network()
        self.loss, self.target = double_dqn(self.network, config)
        self.optimizer = torch.optim.Adam(self.loss.parameters(), lr=config.learning_rate)
        self.buffer = TensorDictReplayBuffer(
            storage=LazyTensorStorage(config.capacity),
            sampler=PrioritizedSampler(config.capacity, alpha=config.alpha, beta=config.beta_start),
            batch_size=config.batch_size,
            priority_key="td_error",
        )
        epsilons = actor_epsilons(config.envs_per_collector, config.epsilon, config.epsilon_alpha)
        self.actor = EpsilonGreedy(self.network, epsilons)
        self.collector = _collector(
            config, self.actor, postproc=n_step(config.gamma, config.n_steps)
        )

    def learn(self, data: TensorDictBase, frames: int) -> None:
        config = self.config
        self.buffer.extend(data.select(*TRANSITION, "steps_to_next_obs").reshape(-1))
        if len(self.buffer) < config.learning_starts:
            return
        share = min(1.0, frames / config.total_frames)
        self.buffer.sampler.beta = config.beta_start + share * (config.beta_end - config.beta_start)
        self._set_learning_rate(
            config.learning_rate + share * (config.learning_rate_end - config.learning_rate)
        )
        for _ in range(config.updates_per_batch):
            batch = self.buffer.sample()
            self._step(self.loss(batch)["loss"], config.max_grad_norm)
            self.target.step()
            batch["td_error"] = batch["td_error"].sqrt()  # the loss writes squared errors
            self.buffer.update_tensordict_priority(batch)


class SAC(Alone):
    """Soft actor-critic."""

    def __init__(self, config: SACConfig, task: Task, policy: PolicySpec) -> None:
        self.config = config
        self.network = policy.network()
        actor = gaussian_actor(self.network, task.action_low, task.action_high)
        self.loss = SACLoss(
            actor,
            action_values_of(ActionValue(task, config.hidden, config.network)),
            num_qvalue_nets=2,
            loss_function="l2",
            target_entropy=target_entropy(task),
        )
        self.loss.make_value_estimator(gamma=config.gamma)
        self.target = SoftUpdate(self.loss, tau=config.target_tau)
        self.optimizer = torch.optim.Adam(self.loss.parameters(), lr=config.learning_rate)
        self.buffer = TensorDictReplayBuffer(
            storage=LazyTensorStorage(config.capacity), batch_size=config.batch_size
        )
        self.collector = _collector(config, actor, init_random_frames=config.learning_starts)
        self._owed = 0.0

    def learn(self, data: TensorDictBase, frames: int) -> None:
        self.buffer.extend(data.select(*TRANSITION).reshape(-1))
        if frames < self.config.learning_starts:
            return
        self._owed += data.numel() * self.config.updates_per_frame
        while self._owed >= 1:
            self._owed -= 1
            self.update(self.buffer.sample())

    def update(self, batch: TensorDictBase) -> None:
        """Take one gradient step."""
        losses = self.loss(batch)
        self._step(losses["loss_qvalue"] + losses["loss_actor"] + losses["loss_alpha"])
        self.target.step()


class _OnPolicy(Alone):
    """The common base of PPO and A2C.

    Args:
        make_loss: makes the loss of actor and critic.
        estimate: arguments of the advantage estimator.
    """

    betas = ActorCritic.betas

    def __init__(
        self, config: Any, task: Task, policy: PolicySpec, make_loss: Callable, **estimate: Any
    ) -> None:
        self.config = config
        self.network = policy.network()
        actor = categorical_actor(self.network)
        critic = critic_of(ValueNetwork(task.inputs, config.hidden, config.network))
        self.advantage = GAE(gamma=config.gamma, value_network=critic, **estimate)
        self.loss = make_loss(
            actor,
            critic,
            entropy_coeff=config.entropy_coef,
            critic_coeff=config.critic_coef,
            loss_critic_type="l2",
        )
        self.optimizer = torch.optim.Adam(
            self.loss.parameters(), lr=config.learning_rate, eps=1e-5, betas=self.betas
        )
        self.collector = _collector(config, actor)
        self._frames = 0

    def _prepare(self, data: TensorDictBase, frames: int) -> float:
        """Write the advantages, and set the learning rate. Return the rate divided by the initial
        rate."""
        share = 1 - self._frames / self.config.total_frames if self.config.anneal else 1.0
        self._frames = frames
        self._set_learning_rate(share * self.config.learning_rate)
        with torch.no_grad():
            self.advantage(data)
        return share

    def _learn_from(self, batch: TensorDictBase) -> None:
        losses = self.loss(batch)
        total = losses["loss_objective"] + losses["loss_critic"]
        if self.config.entropy_coef:  # else the loss has no entropy
            total = total + losses["loss_entropy"]
        self._step(total, self.config.max_grad_norm)


class PPO(_OnPolicy):
    """DD-PPO's algorithm with one learner."""

    def __init__(self, config: DDPPOConfig, task: Task, policy: PolicySpec) -> None:
        # The loss must not normalize advantages, because GAE already does, over the whole batch.
        make_loss = partial(ClipPPOLoss, clip_epsilon=config.clip, normalize_advantage=False)
        estimate = {"lmbda": config.gae_lambda, "average_gae": True}
        super().__init__(config, task, policy, make_loss, **estimate)
        self.buffer = TensorDictReplayBuffer(
            storage=LazyTensorStorage(config.frames_per_batch),
            sampler=SamplerWithoutReplacement(),
            batch_size=config.frames_per_batch // config.minibatches,
        )

    def learn(self, data: TensorDictBase, frames: int) -> None:
        share = self._prepare(data, frames)
        self.loss.clip_epsilon.fill_(max(share * self.config.clip, 1e-8))
        self.buffer.extend(data.reshape(-1))
        for _ in range(self.config.epochs):
            for batch in self.buffer:
                self._learn_from(batch)


class A2C(_OnPolicy):
    """IMPALA's algorithm for data that always come from the current policy. For such data, V-trace
    is the same as GAE with lambda = 1."""

    betas = Impala.betas

    def __init__(self, config: ImpalaConfig, task: Task, policy: PolicySpec) -> None:
        super().__init__(config, task, policy, A2CLoss, lmbda=1.0)
        self._scale = RewardScale(config.gamma, Ranks()) if config.normalize_rewards else None

    def learn(self, data: TensorDictBase, frames: int) -> None:
        if self._scale is not None:
            data["next", "reward"] = self._scale(data)
        self._prepare(data, frames)
        self._learn_from(data.reshape(-1))


LEARNERS: dict[str, Callable[[Any, Task, PolicySpec], Alone]]
LEARNERS = {"apex": DQN, "ddppo": PPO, "impala": A2C, "sac": SAC}
"""The learner for the settings of each recipe."""
