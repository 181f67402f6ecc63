"""IMPALA: actors run ahead of one learner, which corrects by V-trace (arXiv:1802.01561).

The learner takes each actor's rollout as it arrives, and makes one update from it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn
from torchrl.objectives.value.functional import vtrace_advantage_estimate

from ...collect import FirstReady, RPCBatchedCollector
from ...learn.ranks import Ranks
from ...runtime import Session
from ..parts.actor_critic import A2CLoss
from ..parts.environments import Task, for_collectors
from ..parts.moments import moments_of
from ..parts.networks import PolicySpec, ValueNetwork
from ..parts.policies import categorical_actor, check_outputs
from ..training.feed import moved
from ..training.loop import (
    LossLearner,
    Start,
    choose_device,
    my_collectors,
    seen,
    stream_seed,
    sum_of_losses,
    train,
)
from .config import ImpalaConfig

__all__ = ["Impala", "ImpalaConfig", "VTrace", "build", "run", "vtrace"]

_SHOWN = {
    "train/loss": "loss_objective",
    "train/loss_critic": "loss_critic",
    "train/entropy": "entropy",
}


class VTrace(NamedTuple):
    """Results of :func:`vtrace`, each ``[N, T, 1]`` and without gradients.

    They are the weight of the policy's gradient, the critic's target, and pi(a|s) / mu(a|s) before
    clipping."""

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
    gamma: float,
    rho_bar: float = 1.0,
    c_bar: float = 1.0,
) -> VTrace:
    """Compute the targets of the paper's section 4.1 for the actions in ``data`` ``[N, T]``.

    The acting policy wrote log mu as ``action_log_prob``. TorchRL's ``VTrace`` module (0.14.1)
    draws new actions and would therefore correct even data of the current policy. The function of
    TorchRL that is used here does not. With data of the current policy, rho is 1 and the target
    is that of GAE with lambda 1. An episode that ended without ``terminated`` bootstraps from its
    true last observation.

    Args:
        logits: of the current policy, ``[N, T, actions]``.
        value, next_value: the critic's, of ``observation`` and of the next one, ``[N, T, 1]``.
    """
    log_pi = logits.log_softmax(-1).gather(-1, data["action"].unsqueeze(-1))
    log_mu = data["action_log_prob"].unsqueeze(-1)
    advantage, target = vtrace_advantage_estimate(
        gamma,
        log_pi,  # the function's docstring swaps log_pi and log_mu
        log_mu,
        value,
        next_value,
        data["next", "reward"].to(torch.float32),
        data["next", "done"],
        data["next", "terminated"],
        rho_thresh=rho_bar,
        c_thresh=c_bar,
    )
    return VTrace(advantage, target, (log_pi - log_mu).exp())


class Impala(LossLearner):
    """The learner and its collectors.

    Args:
        loss: an A2CLoss of ``network`` and ``critic``, whose gradients are those of section 4.2.
    """

    def __init__(
        self,
        config: ImpalaConfig,
        network: nn.Module,
        critic: nn.Module,
        loss: A2CLoss,
        collector: RPCBatchedCollector,
        device: torch.device,
        start: Start,
    ) -> None:
        super().__init__(loss, collector, lr=config.learning_rate, eps=1e-5)
        self.config = config
        self.network = network
        self.critic = critic
        self.device = device
        self.ranks = Ranks(timeout_s=config.timeout_s)
        self._frames = start.frames
        self._moments = moments_of(network)

    def learn(self, data: TensorDictBase, frames: int) -> dict[str, Any]:
        """Take one gradient step."""
        config = self.config
        share = 1 - self._frames / config.total_frames if config.anneal else 1.0
        self._frames = frames
        self.set_learning_rate(share * config.learning_rate)
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
            gamma=config.gamma,
            rho_bar=config.rho_bar,
            c_bar=config.c_bar,
        )
        targets = {"advantage": traced.advantage, "value_target": traced.value_target}
        losses = self.loss.of(logits, value, data.select("action").update(targets))
        self.step(sum_of_losses(losses), config.max_grad_norm)
        if self._moments is not None:  # last, because the policy acted with the earlier ones
            observations = data["observation"].flatten(0, 1)
            self._moments.update(observations, self.ranks, f"observations of {config.env}")
        lag = self.collector.policy_version - data["policy_version"].float().mean()
        self.collector.update_policy_weights_()
        return {
            **seen(losses, _SHOWN),
            "train/rho_mean": traced.rho.mean(),
            "train/rho_clipped": (traced.rho > config.rho_bar).float().mean(),
            "train/learning_rate": share * config.learning_rate,
            "train/policy_lag_mean": lag,
        }


def build(
    config: ImpalaConfig, task: Task, policy: PolicySpec, session: Session, start: Start
) -> Impala:
    """Create all parts of the job in the learner's process, and connect them.

    Args:
        task: sizes of ``config.env``.
        policy: how to make the network that is trained.
        session: the learner's session, in which the collectors serve.
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
    collector = RPCBatchedCollector(
        for_collectors(config.env, config.reward_clip),
        actor,
        session=session,
        frames_per_batch=config.frames_per_batch,
        total_frames=config.total_frames - min(start.frames, config.total_frames - 1),
        num_envs=config.envs_per_collector,
        max_policy_lag=config.max_policy_lag,
        readiness=FirstReady(),
        # While a collector hangs, the others deliver its frames, and a message reports the hang.
        worker_timeout_s=config.timeout_s if len(my_collectors(session)) > 1 else None,
        seed=stream_seed(config.seed, start.resumes),
        categorical_action_encoding=True,
        timeout_s=config.timeout_s,
    )
    return Impala(config, network, critic, loss, collector, device, start)


def run(config: ImpalaConfig, session: Session, *, resume: bool = False) -> dict[str, Any]:
    """Train; see :func:`~torchrl_dist.recipes.training.loop.train`."""
    return train(build, config, session, resume=resume)
