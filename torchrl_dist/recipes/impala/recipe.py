"""IMPALA: actors run ahead of one learner, which corrects for the lag with V-trace
(arXiv:1802.01561).

The learner takes each actor's rollout as it arrives, and makes one update with it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.objectives.value.functional import vtrace_advantage_estimate

from ...collect import FirstReady
from ...runtime import Session
from ..parts.actor_critic import A2CLoss
from ..parts.environments import Task
from ..parts.moments import moments_of
from ..parts.networks import PolicySpec, ValueNetwork
from ..parts.policies import categorical_actor, check_outputs
from ..training.feed import moved
from ..training.loop import (
    ActorCritic,
    Start,
    choose_device,
    make_collector,
    my_collectors,
    train,
)
from .config import ImpalaConfig

__all__ = ["Impala", "ImpalaConfig", "VTrace", "build", "run", "vtrace"]


class VTrace(NamedTuple):
    """Results of :func:`vtrace`, each ``[N, T, 1]`` and without gradients.

    The fields are the weight of the policy's gradient, the critic's target, and pi(a|s) / mu(a|s)
    before clipping."""

    advantage: Tensor
    value_target: Tensor
    rho: Tensor


@torch.no_grad()
def vtrace(
    data: TensorDictBase,
    logits: Tensor,
    value: Tensor,
    next_value: Tensor,
    *,
    reward: Tensor,
    gamma: float,
    rho_bar: float = 1.0,
    c_bar: float = 1.0,
) -> VTrace:
    """Compute the targets of the paper's section 4.1 for the actions in ``data`` ``[N, T]``.

    The acting policy wrote log mu as ``action_log_prob``. TorchRL's ``VTrace`` module (0.14.1)
    draws new actions and would therefore correct even data of the current policy. This function
    calls TorchRL's ``vtrace_advantage_estimate`` instead, which draws no actions. With data of
    the current policy, rho is 1, and the target is that of GAE with lambda 1. An episode that ended
    without ``terminated`` bootstraps from its true last observation.

    Args:
        logits: the current policy's logits, ``[N, T, actions]``.
        value, next_value: the critic's values of ``observation`` and of the next observation,
            ``[N, T, 1]``.
        reward: float32 ``[N, T, 1]``.
    """
    log_pi = logits.log_softmax(-1).gather(-1, data["action"].unsqueeze(-1))
    log_mu = data["action_log_prob"].unsqueeze(-1)
    advantage, target = vtrace_advantage_estimate(
        gamma,
        log_pi,  # TorchRL's docstring swaps log_pi and log_mu
        log_mu,
        value,
        next_value,
        reward,
        data["next", "done"],
        data["next", "terminated"],
        rho_thresh=rho_bar,
        c_thresh=c_bar,
    )
    return VTrace(advantage, target, (log_pi - log_mu).exp())


class Impala(ActorCritic):
    """The learner and its collectors. The loss is an A2CLoss, whose gradients are those of section
    4.2 of the paper."""

    # Adam without momentum is RMSProp with bias correction; the paper's RMSProp has no momentum
    betas = (0.0, 0.99)

    def learn(self, data: TensorDictBase, frames: int) -> dict[str, Any]:
        """Take one gradient step."""
        config = self.config
        share = self.anneal(frames)
        data = moved(data, self.device)
        logits, value = self.network(data["observation"]), self.critic(data["observation"])
        check_outputs(logits, config.env)
        with torch.no_grad():
            next_value = self.critic(data["next", "observation"])
        traced = vtrace(
            data,
            logits,
            value,
            next_value,
            reward=self.rewards(data),
            gamma=config.gamma,
            rho_bar=config.rho_bar,
            c_bar=config.c_bar,
        )
        losses = self.loss.of(
            logits,
            value,
            {
                "action": data["action"],
                "advantage": traced.advantage,
                "value_target": traced.value_target,
            },
        )
        self.descend(losses)
        return {
            **self.finish(data, losses, share),
            "train/rho_mean": traced.rho.mean(),
            "train/rho_clipped": (traced.rho > config.rho_bar).float().mean(),
        }


def build(
    config: ImpalaConfig, task: Task, policy: PolicySpec, session: Session, start: Start
) -> Impala:
    """Create all parts of the job in the learner's process, and connect them.

    Args:
        task: sizes of ``config.env``.
        policy: how to make the network that is trained.
        session: the learner's session, which also contains the collectors.
        start: where the run begins.
    """
    device = choose_device(config, session)
    network = policy.network().to(device)
    moments = moments_of(network)
    critic = ValueNetwork(task.inputs, config.hidden, config.network, moments).to(device)
    actor = categorical_actor(network, config.env)
    loss = A2CLoss(
        network, critic, entropy_coef=config.entropy_coef, critic_coef=config.critic_coef
    )
    collector = make_collector(
        config,
        session,
        start,
        task,
        actor,
        readiness=FirstReady(),
        # While a collector hangs, the others deliver its frames, and a message reports the hang.
        worker_timeout_s=config.timeout_s if len(my_collectors(session)) > 1 else None,
    )
    return Impala(
        config, network, critic, loss, collector, device, start,
        scale_rewards=config.normalize_rewards,
    )  # fmt: skip


def run(config: ImpalaConfig, session: Session, *, resume: bool = False) -> dict[str, Any]:
    """Train; see :func:`~torchrl_dist.recipes.training.loop.train`."""
    return train(build, config, session, resume=resume)
