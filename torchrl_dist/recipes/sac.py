"""SAC: collectors write to one shared buffer, whose limiter keeps the learner in step with them.

How often a frame is learned from is a hyper-parameter of SAC, and drifts where processes run as
fast as they can. Here samples per insert are batch size times updates per frame, whoever is faster
(Haarnoja et al. 2018, arXiv:1812.05905). ``build`` is the program's topology; the loop is every
recipe's (``training.py``). The other processes serve. Environments: gymnasium's with flat Box
observations and bounded continuous actions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn
from torchrl.objectives import SACLoss, SoftUpdate

from ..collect import CollectReport, RPCBatchedCollector
from ..errors import ConfigurationError
from ..learn.ranks import Ranks
from ..replay import RateLimiter, SharedMemmapStorage, SharedReplayBuffer
from ..runtime import Session
from .environments import Task, for_collectors
from .networks import PolicySpec, layers
from .policies import action_values_of, squashed_gaussian_actor
from .sac_config import SACConfig
from .training import Learner, Start, choose_device, copied, stream_seed, train

__all__ = ["SAC", "SACConfig", "build", "rows", "run"]

_BATCHES_OFF = 2  # of frames, by which learner and collectors may be apart before one waits


class ActionValue(nn.Sequential):
    """Of observation and action ``[..., *]`` to the value, float32 ``[..., 1]``."""

    def __init__(self, task: Task, hidden: tuple[int, ...], make: str | None = None) -> None:
        inputs = task.observation_size + len(task.action_low)
        super().__init__(*layers(make, [inputs, *hidden, 1], nn.ReLU))

    def forward(  # type: ignore[override]  # it takes two inputs where a Sequential takes one
        self, observation: Tensor, action: Tensor
    ) -> Tensor:
        return super().forward(torch.cat([observation, action], -1))


def rows(rollout: TensorDictBase) -> TensorDictBase:
    """What of a rollout ``[N, T]`` is learned from. Where an episode was cut off, ``terminated`` is
    false and the next observation the true last one: the target bootstraps from it."""
    kept = rollout.select(
        "observation",
        "action",
        ("next", "observation"),
        ("next", "reward"),
        ("next", "done"),
        ("next", "terminated"),
    )
    for key in ("observation", ("next", "observation"), ("next", "reward")):
        kept.set(key, kept.get(key).to(torch.float32))
    return kept


class SAC(Learner):
    """The learner, its collectors, and the buffer between them."""

    def __init__(
        self,
        config: SACConfig,
        session: Session,
        network: nn.Module,
        loss: SACLoss,
        buffer: SharedReplayBuffer,
        collector: RPCBatchedCollector,
        device: torch.device,
    ) -> None:
        self.config = config
        self.session = session
        self.network = network
        self.loss = loss
        self.buffer = buffer
        self.collector = collector
        self.device = device
        self.ranks = Ranks(timeout_s=config.timeout_s)
        self._target = SoftUpdate(loss, tau=config.target_tau)
        # One for all: no part of the loss has gradients for another part's weights.
        self._optimizer = torch.optim.Adam(loss.parameters(), lr=config.learning_rate, fused=True)

    def learn(self, data: CollectReport, frames: int) -> dict[str, Any]:
        """As many gradient steps as the limiter allows after these frames."""
        losses = None
        while self.buffer.can_sample() and not self.session.stop_requested:
            losses = self._update(self.buffer.sample().to(self.device))
        if losses is None:
            return {}
        self.collector.update_policy_weights_()
        return {
            "train/loss": losses["loss_qvalue"].detach(),
            "train/loss_actor": losses["loss_actor"].detach(),
            "train/entropy": losses["entropy"].detach(),
            "train/alpha": losses["alpha"].detach(),
            "train/replay_ratio": self.updates * self.config.batch_size / frames,
        }

    def _update(self, batch: TensorDictBase) -> TensorDictBase:
        losses = self.loss(batch)
        self._optimizer.zero_grad()
        (losses["loss_qvalue"] + losses["loss_actor"] + losses["loss_alpha"]).backward()
        self._optimizer.step()
        self._target.step()
        self.updates += 1
        return losses

    def state_dict(self) -> dict[str, Any]:
        return copied(
            model=dict(self.loss.state_dict()), optimizer=self._optimizer.state_dict(), extra={}
        )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.loss.load_state_dict(dict(state["model"]))
        self._optimizer.load_state_dict(dict(state["optimizer"]))
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


def build(config: SACConfig, task: Task, policy: PolicySpec, session: Session, start: Start) -> SAC:
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
    network = policy.network().to(device)
    actor = squashed_gaussian_actor(network, task.action_low, task.action_high)
    values = action_values_of(ActionValue(task, config.hidden, config.network).to(device))
    loss = SACLoss(
        actor,
        values,
        num_qvalue_nets=2,
        loss_function="l2",
        target_entropy=-float(len(task.action_low)),
    ).to(device)
    loss.make_value_estimator(gamma=config.gamma)
    samples_per_insert = config.batch_size * config.updates_per_frame
    buffer = SharedReplayBuffer(
        storage=SharedMemmapStorage(
            config.capacity,
            scratch_dir=config.replay_path,
            job_id=session.world.job_id,
            resume=start.resumes > 0,
            keep=True,
            timeout_s=config.timeout_s,
            limiter=RateLimiter(
                min_size_to_sample=config.learning_starts,
                samples_per_insert=samples_per_insert,
                error_buffer=max(
                    config.batch_size, _BATCHES_OFF * config.frames_per_batch * samples_per_insert
                ),
            ),
        ),
        batch_size=config.batch_size,
    )
    collector = RPCBatchedCollector(
        for_collectors(config.env),
        actor,
        session=session,
        frames_per_batch=config.frames_per_batch,
        total_frames=config.total_frames - min(start.frames, config.total_frames - 1),
        num_envs=config.envs_per_collector,
        max_policy_lag=config.max_policy_lag,
        init_random_frames=config.learning_starts,
        replay_buffer=buffer,
        postproc=rows,
        seed=stream_seed(config.seed, start.resumes),
        timeout_s=config.timeout_s,
    )
    return SAC(config, session, network, loss, buffer, collector, device)


def run(config: SACConfig, session: Session, *, resume: bool = False) -> dict[str, Any]:
    """Train; see :func:`~torchrl_dist.recipes.training.train`. The buffer's rows stay in
    ``config.replay_path``."""
    return train(build, config, session, resume=resume)
