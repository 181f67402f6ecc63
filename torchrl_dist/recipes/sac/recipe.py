"""SAC: collectors write to one shared buffer, whose rate limiter keeps the collectors and the
learner in step.

The replay ratio is a hyper-parameter of SAC (Haarnoja et al. 2018, arXiv:1812.05905). It would
drift if processes ran as fast as they can. Here, it is always the batch size times the updates per
frame, even if each node keeps a shard.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

from ...collect import CollectReport, RPCBatchedCollector
from ...learn.ranks import Ranks
from ...replay import RateLimiter, SharedReplayBuffer
from ...runtime import Session
from ..parts.environments import TRANSITION, Task, check_finite
from ..parts.moments import moments_of
from ..parts.networks import PolicySpec, QNetwork, layers
from ..parts.policies import categorical_actor, squashed_gaussian_actor
from ..parts.targets import Follow
from ..training.feed import Feed
from ..training.loop import LossLearner, Start, choose_device, make_collector, my_collectors, train
from ..training.shared_rows import remarks_on_resume, shared_buffer
from ..training.updates import graphed
from .config import SACConfig
from .loss import DiscreteSACLoss, SACLoss, SoftActorCritic

__all__ = ["SAC", "SACConfig", "build", "rows", "run"]


_ENTROPY_PART = 0.5


class ActionValue(nn.Sequential):
    """Map observation and action ``[..., *]`` to the value, float32 ``[..., 1]``.

    The layers see actions scaled to -1 .. 1, so the unit of the actions does not matter."""

    middle: Tensor
    half_width: Tensor

    def __init__(self, task: Task, hidden: tuple[int, ...], make: str | None = None) -> None:
        inputs = task.observation_size + len(task.action_low)
        super().__init__(*layers(make, inputs, hidden, 1, nn.ReLU))
        low, high = torch.tensor(task.action_low), torch.tensor(task.action_high)
        self.register_buffer("middle", (low + high) / 2, persistent=False)
        self.register_buffer("half_width", (high - low) / 2, persistent=False)

    def forward(  # type: ignore[override]  # two inputs, unlike a Sequential
        self, observation: Tensor, action: Tensor
    ) -> Tensor:
        scaled = (action - self.middle) / self.half_width
        return super().forward(torch.cat([observation, scaled], -1))


def critic_of(task: Task, config: SACConfig) -> nn.Module:
    """Return a critic. It maps an observation to a value per action if actions are discrete, or
    else an observation and an action to one value."""
    if task.num_actions:
        return QNetwork(task.inputs, task.num_actions, config.hidden, config.network)
    return ActionValue(task, config.hidden, config.network)


def rows(rollout: TensorDictBase, env: str = "the environment") -> TensorDictBase:
    """Convert a rollout ``[N, T]`` of ``env`` into rows to learn from.

    Where an episode was cut off, ``terminated`` is false, and the target bootstraps from the next
    observation, which is the episode's true last one.

    Raises:
        TorchRLDistError: a value is not finite. In the buffer, such a value would spoil this run
            and every resumed run.
    """
    kept = rollout.select(*TRANSITION)
    kept.set(("next", "reward"), kept.get(("next", "reward")).to(torch.float32))
    if kept.get("action").is_floating_point():
        kept.set("action", kept.get("action").to(torch.float32))
    for key in ("observation", ("next", "observation")):
        if kept.get(key).dtype != torch.uint8:  # images
            kept.set(key, kept.get(key).to(torch.float32))
    check_finite(kept, env)
    return kept


def frames_of_a_batch(config: SACConfig, workers: int) -> int:
    """Return the number of frames that ``workers`` workers deliver for a batch.

    The collector rounds up, because each environment takes the same number of steps."""
    steps = math.ceil(math.ceil(config.frames_per_batch / workers) / config.envs_per_collector)
    return steps * config.envs_per_collector * workers


def target_entropy(task: Task) -> float:
    """Return the target for ``task``, in nats.

    It is -1 per dimension of continuous actions (Haarnoja et al. 2018, appendix D), because the
    policy's density is that of actions scaled to -1 .. 1. For discrete actions, it is half of the
    largest possible entropy. With 98 % of the largest entropy, as in Christodoulou 2019, actions
    stay nearly random."""
    if task.num_actions:
        return _ENTROPY_PART * math.log(task.num_actions)
    return -float(len(task.action_low))


def limiter_of(config: SACConfig, workers: int) -> RateLimiter:
    """Return a limiter whose range has room for all batches in progress and one more.

    With less room, a batch could exceed what the limiter admits. The learner would then wait for
    the end of the batch, and the collectors for updates."""
    samples_per_insert = config.batch_size * config.updates_per_frame
    frames = max(config.frames_per_batch, frames_of_a_batch(config, workers))
    batches = config.max_policy_lag + 2
    return RateLimiter(
        min_size_to_sample=config.learning_starts,
        samples_per_insert=samples_per_insert,
        error_buffer=max(config.batch_size, batches * frames * samples_per_insert),
    )


class SAC(LossLearner):
    """The learner, its collectors, and the buffer between them."""

    def __init__(
        self,
        config: SACConfig,
        session: Session,
        network: nn.Module,
        loss: SoftActorCritic,
        buffer: SharedReplayBuffer,
        collector: RPCBatchedCollector,
        device: torch.device,
    ) -> None:
        # One optimizer suffices, because each part of the loss has gradients only for its own
        # weights.
        super().__init__(loss, collector, lr=config.learning_rate)
        self.config = config
        self.session = session
        self.network = network
        self.buffer = buffer
        self.device = device
        self.ranks = Ranks(timeout_s=config.timeout_s)
        self._moments = moments_of(network)
        self._follow = Follow(loss.target, loss.critics, config.target_tau)
        self._feed = Feed(self._draw, device)
        self._update = graphed(self._step, device, known=config.network is None)

    def learn(self, data: CollectReport, frames: int) -> dict[str, Any]:
        """Take as many gradient steps as the limiter allows after these frames."""
        losses, observations = None, torch.empty(0)
        while (batch := self._feed.take()) is not None:
            observations = batch.get("observation")
            losses = self._update(batch)
            self.updates += 1
            self._feed.prepare()
        if losses is None:
            return {}
        # The last batch suffices, because it is a uniform sample of all rows.
        if self._moments is not None:
            self._moments.update(observations, self.ranks, f"observations of {self.config.env}")
        self.collector.update_policy_weights_()
        return {
            "train/loss": losses["loss_qvalue"],
            "train/loss_actor": losses["loss_actor"],
            "train/entropy": losses["entropy"],
            "train/alpha": losses["alpha"],
            "train/replay_ratio": self.updates * self.config.batch_size / frames,
        }

    def _draw(self) -> TensorDictBase | None:
        go_on = self.buffer.can_sample() and not self.session.stop_requested
        return self.buffer.sample() if go_on else None

    def _step(self, batch: TensorDictBase) -> TensorDictBase:
        losses = self.loss(batch)
        self._optimizer.descend(losses["loss_qvalue"] + losses["loss_actor"] + losses["loss_alpha"])
        self._follow()
        return losses.detach()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.remarks = remarks_on_resume(self.buffer)

    def close(self) -> None:
        """Stop the workers, then leave the buffer."""
        try:
            super().close()
        finally:
            self.buffer.storage.close()


def build(config: SACConfig, task: Task, policy: PolicySpec, session: Session, start: Start) -> SAC:
    """Create all parts of the job in the learner's process, and connect them.

    Args:
        task: sizes of ``config.env``.
        policy: how to make the network that is trained.
        session: the learner's session, which also contains the collectors.
        start: where the run begins.
    """
    device = choose_device(config, session)
    network: Any = policy.network().to(device)
    if task.num_actions:
        actor, kind = categorical_actor(network, config.env), DiscreteSACLoss
    else:
        actor, kind = squashed_gaussian_actor(network, task.action_low, task.action_high), SACLoss
    loss = kind(
        network,
        [critic_of(task, config).to(device) for _ in range(2)],
        gamma=config.gamma,
        target_entropy=target_entropy(task),
    )
    limiter = limiter_of(config, len(my_collectors(session)))
    buffer = shared_buffer(
        config,
        session,
        start,
        batch_size=config.batch_size,
        limiter=limiter,
        frames=task.frames,
    )
    collector = make_collector(
        config,
        session,
        start,
        task,
        actor,
        init_random_frames=config.learning_starts,
        replay_buffer=buffer,
        postproc=partial(rows, env=config.env),
    )
    return SAC(config, session, network, loss, buffer, collector, device)


def run(config: SACConfig, session: Session, *, resume: bool = False) -> dict[str, Any]:
    """Train; see :func:`~torchrl_dist.recipes.training.loop.train`. The buffer's rows stay
    in ``config.replay_path``."""
    return train(build, config, session, resume=resume)
