"""Ape-X: many actors, one shared prioritized buffer, one learner (Horgan et al. 2018).

``build`` is the program's topology; ``run`` is what the learner does with it. The other processes
serve. Environments: gymnasium's with flat Box observations and Discrete actions.
"""

from __future__ import annotations

import contextlib
import copy
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from torchrl.data import TensorDictReplayBuffer

from ..checkpoint import Checkpoint, load_checkpoint, rng_state, save_checkpoint, set_rng_state
from ..collect import RPCBatchedCollector
from ..errors import ConfigurationError, PeerLostError
from ..replay import (
    SharedCursorWriter,
    SharedMemmapStorage,
    SharedPrioritizedSampler,
    anneal_beta,
)
from ..runtime import Session
from .apex_actor import EpsilonGreedy, RowsWithPriority, actor_epsilons
from .apex_config import RECIPE, ApexConfig
from .dqn_learner import DQNLearner
from .environments import DiscreteTask, discrete_task
from .evaluator import Evaluations, EvaluatorConfig
from .monitor import Monitor
from .plots import Evaluation
from .q_network import QNetwork

__all__ = ["ApexConfig", "build", "run"]

_FINAL = 2**20  # numbers the final evaluations apart from those during training


@dataclass
class Apex:
    """The job's parts, as the learner's process holds them."""

    network: QNetwork
    learner: DQNLearner
    buffer: TensorDictReplayBuffer
    collector: RPCBatchedCollector

    def close(self) -> None:
        """Stop the workers, then leave the buffer's directory."""
        try:
            self.collector.shutdown()
        finally:
            self.buffer.storage.close()


def build(
    config: ApexConfig,
    task: DiscreteTask,
    session: Session,
    *,
    frames_done: int = 0,
    resumes: int = 0,
) -> Apex:
    """Create every part of the job and hand each the others it needs.

    Args:
        config: what to build.
        task: sizes of ``config.env``.
        session: the learner's; its collectors serve.
        frames_done: frames of the run that is resumed.
        resumes: how often it was resumed; the environments start differently each time.
    """

    def network() -> QNetwork:
        return QNetwork(task.observation_size, task.num_actions, config.hidden)

    def actor(worker_index: int, num_workers: int) -> EpsilonGreedy:
        n = config.envs_per_collector
        epsilons = actor_epsilons(num_workers * n, config.epsilon, config.epsilon_alpha)
        return EpsilonGreedy(network(), epsilons[worker_index * n : (worker_index + 1) * n])

    def rows(policy: EpsilonGreedy) -> RowsWithPriority:
        return RowsWithPriority(policy.network, gamma=config.gamma, n_steps=config.n_steps)

    learned = network()
    learner = DQNLearner(
        learned,
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
            resume=resumes > 0,
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
        config.env,
        EpsilonGreedy(learned),
        session=session,
        frames_per_batch=config.frames_per_batch,
        total_frames=config.total_frames - frames_done,
        policy_factory=actor,
        num_envs=config.envs_per_collector,
        max_policy_lag=config.max_policy_lag,
        replay_buffer=buffer,
        postproc_factory=rows,
        seed=config.seed + 1_000_003 * resumes,
        categorical_action_encoding=True,
        timeout_s=config.timeout_s,
    )
    return Apex(learned, learner, buffer, collector)


def run(config: ApexConfig, session: Session, *, resume: bool = False) -> dict[str, Any]:
    """Train, and return the result as plain values. Called by the learner's process; blocks.

    Leaves ``checkpoint.pt``, ``learning_curve.png``, logs and the replay directory in the run's
    folder. After a stop signal it finishes the batch at hand, writes the checkpoint and returns.

    Raises:
        ConfigurationError: the job spans several machines, or the environment does not fit.
        CheckpointError: ``resume``, and the checkpoint is missing or damaged.
        DirectoryError: the replay directory cannot be used.
        PeerLostError: all collectors are lost. A checkpoint has been written.
    """
    if not session.world.one_node:
        raise ConfigurationError(
            "this recipe's replay buffer is shared by the processes of one machine, but the job "
            f"has {session.world.world_size} processes of which "
            f"{session.world.local_world_size} are here; start it on one node"
        )
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the matrices are small, and the collectors need the cores
    try:
        with contextlib.closing(Training(config, session, resume=resume)) as training:
            try:
                training.train()
            except PeerLostError as error:
                training.save()
                raise PeerLostError(
                    f"{error}. {config.checkpoint_path} was written; --resume goes on from it"
                ) from error
            return training.finish()
    finally:
        torch.set_num_threads(threads)


class Training:
    """One run of the learner: its parts, its best policy, what has been seen so far."""

    def __init__(self, config: ApexConfig, session: Session, *, resume: bool) -> None:
        self.config = config
        self.session = session
        self.task = discrete_task(config.env)
        before = load_checkpoint(config.checkpoint_path, recipe=RECIPE) if resume else None
        history = dict(before.extra["history"]) if before else {}
        self.resumes: int = before.counters["resumes"] + 1 if before else 0
        self.lost: list[str] = list(before.extra["lost_collectors"]) if before else []
        self.best: Evaluation | None = None
        self._generator = torch.Generator().manual_seed(config.seed)
        torch.manual_seed(config.seed)
        self.apex = build(
            config, self.task, session,
            frames_done=min(history.get("frames", 0), config.total_frames - 1),
            resumes=self.resumes,
        )  # fmt: skip
        self.apex.buffer.set_rng(self._generator)
        self.best_weights = copy.deepcopy(self.apex.network.state_dict())
        if before is not None:
            self._restore(before)
        self.monitor = Monitor(
            config.output_path,
            total_frames=config.total_frames,
            title=f"Ape-X on {config.env}, seed {config.seed}",
            threshold=self.task.reward_threshold,
            history=history,
        )
        self.evaluations = Evaluations(
            session,
            EvaluatorConfig(
                config.env,
                self.task.observation_size,
                self.task.num_actions,
                config.hidden,
                config.eval_episodes,
                config.eval_max_steps,
            ),
            self.monitor.say,
        )
        if before is not None and len(self.apex.buffer) == 0:
            self.monitor.say(
                f"the replay directory {config.replay_path} was gone: the buffer fills anew"
            )
        self._next_evaluation = self.monitor.frames + config.eval_interval_frames
        self.save()

    def train(self) -> None:
        """Until ``total_frames`` or a stop signal."""
        config, monitor = self.config, self.monitor
        if monitor.frames >= config.total_frames:
            return
        for report in self.apex.collector:
            monitor.collected(report.frames, report.episode_returns, lag=report.policy_lag)
            self._note_losses()
            self._learn()
            self._take_evaluation(self.evaluations.poll())
            if monitor.frames >= self._next_evaluation and not self.evaluations.under_way:
                self._begin_evaluation()
            monitor.show()
            if time.monotonic() - self._saved_at >= config.checkpoint_interval_s:
                self.save()
            if self.session.stop_requested:
                break

    def finish(self) -> dict[str, Any]:
        """Evaluate, save, draw; returns the result."""
        seconds = self.monitor.seconds
        self._take_evaluation(self.evaluations.finish())
        seen = self.monitor.evaluations
        if not (seen and seen[-1].frames == self.monitor.frames):
            self._begin_evaluation()
            self._take_evaluation(self.evaluations.finish())
        self.monitor.show(force=True)
        self.save()
        self.evaluations.begin(self.best_weights, self._seed(_FINAL + self.resumes))
        returns = self.evaluations.finish()
        curve = self.monitor.picture(self.best)
        return self._result(returns or [], seconds, curve)

    def save(self) -> None:
        """Write the checkpoint."""
        state = self.apex.learner.state_dict()
        save_checkpoint(
            self.config.checkpoint_path,
            Checkpoint(
                recipe=RECIPE,
                config=self.config.as_plain(),
                policy=self.best_weights if self.best else self.apex.network.state_dict(),
                policy_info={
                    "env": self.config.env,
                    "observation_size": self.task.observation_size,
                    "num_actions": self.task.num_actions,
                    "hidden": self.config.hidden,
                    "evaluation": list(vars(self.best).values()) if self.best else None,
                },
                model=state["model"],
                optimizer=state["optimizer"],
                counters={"updates": state["updates"], "resumes": self.resumes},
                rng={**rng_state(), "sampler": self._generator.get_state()},
                extra={"history": self.monitor.state(), "lost_collectors": self.lost},
            ),
        )
        self._saved_at = time.monotonic()

    def close(self) -> None:
        """Stop the workers, release the buffer, end the progress line."""
        try:
            self.apex.close()
        finally:
            self.monitor.close()

    def _restore(self, before: Checkpoint) -> None:
        self.apex.learner.load_state_dict(
            {
                "model": before.model,
                "optimizer": before.optimizer,
                "updates": before.counters["updates"],
            }
        )
        self.best_weights = dict(before.policy)
        if before.policy_info["evaluation"] is not None:
            self.best = Evaluation(*before.policy_info["evaluation"])
        rng = dict(before.rng)
        self._generator.set_state(rng.pop("sampler"))
        set_rng_state(rng)
        self.apex.collector.update_policy_weights_()

    def _learn(self) -> None:
        config, buffer, learner = self.config, self.apex.buffer, self.apex.learner
        if len(buffer) < config.learning_starts:
            return
        anneal_beta(
            buffer.sampler,
            self.monitor.frames,
            start=config.beta_start,
            end=config.beta_end,
            steps=config.total_frames,
        )
        share = min(1.0, self.monitor.frames / config.total_frames)
        learner.set_learning_rate(
            config.learning_rate + share * (config.learning_rate_end - config.learning_rate)
        )
        before = learner.updates
        for _ in range(config.updates_per_batch):
            batch = buffer.sample()
            loss = learner.update(batch)
            buffer.update_tensordict_priority(batch)
            if self.session.stop_requested:
                break
        self.monitor.learned(learner.updates - before, loss)
        self.apex.collector.update_policy_weights_()

    def _begin_evaluation(self) -> None:
        """Have the weights of this moment played, while training goes on."""
        weights = copy.deepcopy(self.apex.network.state_dict())
        self._evaluated = (weights, self.monitor.moment())
        self.evaluations.begin(weights, self._seed(len(self.monitor.evaluations) + 1))
        self._next_evaluation = self.monitor.frames + self.config.eval_interval_frames

    def _take_evaluation(self, returns: list[float] | None) -> None:
        if returns is None:
            return
        weights, moment = self._evaluated
        evaluation = self.monitor.evaluated(returns, moment)
        if self.best is None or self.monitor.rank(evaluation) >= self.monitor.rank(self.best):
            self.best, self.best_weights = evaluation, weights

    def _seed(self, number: int) -> int:
        """Of the environments of an evaluation."""
        seed = np.random.SeedSequence([self.config.seed, number]).generate_state(1)[0]
        return int(seed) % 2**31

    def _note_losses(self) -> None:
        """Say once of each collector that died that the others go on."""
        for peer in self.session.lost():
            if peer.role != "collector":
                continue
            name = peer.name
            if name not in self.lost:
                self.lost.append(name)
                why = self.session.lost_reason(peer)
                self.monitor.say(f"{name} is lost ({why}); training goes on without it")

    def _result(self, returns: list[float], seconds: float, curve: Path) -> dict[str, Any]:
        monitor, best, solved = self.monitor, self.best, self.monitor.solved
        number = self.session.stop_signal
        return {
            "mean_return": fmean(returns) if returns else (best.mean if best else None),
            "mean_return_is_of": (
                f"the best policy by evaluation, {len(returns)} fresh episodes"
                if returns
                else "the best policy, the evaluation that chose it (stopped early)"
            ),
            "frames": monitor.frames,
            "updates": monitor.updates,
            "seconds": round(seconds, 2),
            "sps": round(monitor.frames / seconds, 1),
            "updates_per_second": round(monitor.updates / seconds, 1),
            "best_evaluation": vars(best) if best else None,
            "solved": {"return": monitor.threshold, **vars(solved)} if solved else None,
            "env": self.config.env,
            "seed": self.config.seed,
            "collectors": max(1, len(self.session.of_role("collector"))),
            "lost_collectors": self.lost,
            "stopped_by": signal.Signals(number).name if number else None,
            "resumes": self.resumes,
            "checkpoint": str(self.config.checkpoint_path),
            "learning_curve": str(curve),
        }
