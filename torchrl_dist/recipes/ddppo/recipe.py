"""DD-PPO: several learners, each with its own environments, that average their gradients.

Each step equals that of a single process with all rows, because the learners normalize advantages,
average gradients and measure the divergence over the valid rows of all learners (Wijmans et al.
2020, arXiv:1911.00357). Once most of the job's collectors are done, the rollouts of the others are
cut short, as in the paper. Without collectors, the learners step environments, and the same rule
applies to them.

Continuous actions are drawn, normalized and clipped as in CleanRL's ppo_continuous_action.py (Huang
et al. 2022, "The 37 Implementation Details of PPO"). Where a time limit ended an episode, values
bootstrap from the next observation. CleanRL's values do not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.objectives.value.functional import (
    generalized_advantage_estimate,
    vec_generalized_advantage_estimate,
)

from ...collect import Preempt, WaitAll
from ...collect.learner.readiness import Readiness
from ...learn import DistributedLoss
from ...learn.ranks import Ranks
from ...runtime import Session
from ..parts.actor_critic import GaussianPPOLoss, PPOLoss
from ..parts.environments import Task
from ..parts.moments import moments_of
from ..parts.networks import PolicySpec, ValueNetwork
from ..parts.policies import categorical_actor, gaussian_actor
from ..training.feed import moved
from ..training.loop import (
    ActorCritic,
    Start,
    choose_device,
    make_collector,
    my_collectors,
    stream_seed,
    train,
)
from .config import DDPPOConfig
from .preempt_all import PreemptAll, tally_of_all

__all__ = ["DDPPO", "DDPPOConfig", "build", "run"]

_KL_MARGIN = 1.5  # as in OpenAI's Spinning Up


class DDPPO(ActorCritic):
    """One of the learners and its collectors. The loss is a distributed PPOLoss."""

    def learn(self, data: TensorDictBase, frames: int) -> dict[str, Any]:
        """Make ``epochs`` passes over all learners' rows. Stop early if the KL divergence is
        large."""
        config = self.config
        share = self.anneal(frames)
        clip = share * config.clip if config.anneal_clip else config.clip
        self.loss.clip_epsilon.fill_(max(clip, 1e-8))
        rows = self._rows(moved(data, self.device))
        steps = 0
        for minibatch in self._minibatches(rows):
            losses = self.loss(minibatch)
            if config.target_kl and self._kl(losses, minibatch) > _KL_MARGIN * config.target_kl:
                break
            self.descend(losses)
            steps += 1
        return {
            **self.finish(rows, losses, share),
            "train/clip_fraction": losses["clip_fraction"].detach(),
            "train/kl": self._kl(losses, minibatch),
            "train/steps_per_batch": steps,
            "train/valid_rows": len(rows) / self.collector.frames_per_batch,
        }

    def _rows(self, data: TensorDictBase) -> TensorDictBase:
        """Return the valid rows of ``data`` ``[N, T]``, with advantages that are normalized over
        all learners."""
        config = self.config
        mask = data.get(("collector", "mask"), None)
        valid = slice(None) if mask is None else mask.reshape(-1)
        reward = self.rewards(data)
        # TorchRL 0.14.1's vectorized form divides by gamma * lambda, and raises IndexError for 0.
        vectorized = config.gae_lambda > 0
        estimate = (
            vec_generalized_advantage_estimate if vectorized else generalized_advantage_estimate
        )
        with torch.no_grad():
            value = self.critic(data["observation"])
            advantage, target = estimate(
                config.gamma,
                config.gae_lambda,
                value,
                self.critic(data["next", "observation"]),
                reward,
                data["next", "done"],
                data["next", "terminated"],
            )
        estimates = {"advantage": advantage, "value_target": target, "state_value": value}
        rows = data.copy().update(estimates).reshape(-1)[valid]
        return rows.set("advantage", normalized(rows["advantage"], self.ranks))

    def _minibatches(self, rows: TensorDictBase) -> Iterator[TensorDictBase]:
        """Yield the same number of minibatches on every learner, so that all take the same
        steps."""
        for _ in range(self.config.epochs):
            order = torch.randperm(len(rows), device=self.device)
            for chosen in order.tensor_split(self.config.minibatches):
                yield rows[chosen]

    def _kl(self, losses: TensorDictBase, rows: TensorDictBase) -> float:
        """Return the KL divergence of the learners' ``rows``. Blocks until all ranks have
        called."""
        sums = [float(losses["kl_approx"]) * len(rows), float(len(rows))]
        total, count = self.ranks.add_up("the divergence", sums)
        return total / count

    def close(self) -> None:
        """Stop the workers, and stop averaging gradients."""
        try:
            super().close()
        finally:
            self.loss.close()


def normalized(advantage: Tensor, ranks: Ranks) -> Tensor:
    """Subtract the mean over all ranks' rows, and divide by their sample standard deviation.

    All rows have the same weight. A mean of the ranks' means would give more weight to the rows of
    ranks whose rollouts were cut, because these ranks have fewer rows. Blocks until all ranks have
    called.
    """
    values = advantage.to(torch.float64)
    total, count = ranks.add_up("the mean advantage", [float(values.sum()), float(values.numel())])
    deviation = values - total / count
    squares = ranks.add_up("the variance of advantages", [float(deviation.square().sum())])[0]
    scale = (squares / max(1.0, count - 1)) ** 0.5
    return (deviation / (scale + 1e-8)).to(advantage.dtype)


def build(
    config: DDPPOConfig, task: Task, policy: PolicySpec, session: Session, start: Start
) -> DDPPO:
    """Create the parts of one learner's process. Each learner calls this function.

    Args:
        task: sizes of ``config.env``.
        policy: how to make the network that is trained.
        session: this learner's session.
        start: where the run begins.
    """
    device = choose_device(config, session)
    workers = my_collectors(session)
    learners = len(session.of_role("learner"))
    network = policy.network().to(device)
    moments = moments_of(network)
    critic = ValueNetwork(task.inputs, config.hidden, config.network, moments).to(device)
    continuous = not task.num_actions
    actor = (gaussian_actor if continuous else categorical_actor)(network, config.env)
    loss = DistributedLoss(
        (GaussianPPOLoss if continuous else PPOLoss)(
            network,
            critic,
            clip=config.clip,
            clip_value=config.clip_value,
            entropy_coef=config.entropy_coef,
            critic_coef=config.critic_coef,
        ),
        group=session.process_group,
        timeout_s=config.timeout_s,
    )
    readiness: Readiness = WaitAll()
    if config.preempt_fraction < 1 and learners > 1:
        tally = tally_of_all(session, loss.ranks, config.preempt_fraction, len(workers))
        readiness = PreemptAll(tally, session.me.index, config.preempt_min_part)
    elif config.preempt_fraction < 1 and len(workers) > 1:
        readiness = Preempt(config.preempt_fraction, config.preempt_min_part)
    collector = make_collector(
        config,
        session,
        start,
        task,
        actor,
        clip_actions=continuous,
        frames_per_batch=config.frames_per_batch // learners,
        # No limit here, because the learners end together, when the sum of their frames reaches it.
        total_frames=-1,
        readiness=readiness,
        seed=stream_seed(config.seed, start.resumes, session.me.index, 1),
    )
    return DDPPO(
        config, network, critic, loss, collector, device, start, loss.ranks,
        scale_rewards=config.scales_rewards(task),
    )  # fmt: skip


def run(config: DDPPOConfig, session: Session, *, resume: bool = False) -> dict[str, Any]:
    """Train; see :func:`~torchrl_dist.recipes.training.loop.train`."""
    return train(build, config, session, resume=resume)
