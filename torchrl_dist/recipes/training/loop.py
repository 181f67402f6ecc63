"""The loop of all recipes' learners, and the files that the first learner keeps.

A recipe consists only of a configuration and a function ``build``, which makes a :class:`Learner`.
Every learner of a job runs :class:`Training`; the first one also has a :class:`Keeper`.
"""

from __future__ import annotations

import contextlib
import copy
import math
import random
import signal
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, ClassVar

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

from ...checkpoint import Checkpoint, load_checkpoint, rng_state, save_checkpoint, set_rng_state
from ...collect import RPCBatchedCollector
from ...collect.loop.one_thread import torch_threads
from ...errors import (
    CheckpointError,
    ConfigurationError,
    DeadlineError,
    PeerLostError,
    RemoteError,
    TorchRLDistError,
)
from ...learn.ranks import Ranks
from ...runtime import Peer, Session, current_session
from ...runtime.session import check_session
from ..parts.environments import Task, for_collectors, look_at
from ..parts.moments import RewardScale, moments_of
from ..parts.networks import PolicySpec
from ..parts.play import check_video, record
from ..parts.plots import Evaluation
from .callback import Callback, callback_of
from .config import RecipeConfig
from .evaluator import Evaluations, EvaluatorConfig
from .monitor import Iteration, Monitor, check_wandb
from .run_directory import note_resumed, write_settings
from .updates import LossTrainer

_FINAL = 2**20  # makes the final evaluation's seed differ from those of earlier evaluations
_EVALUATION = 3  # the stream of seeds for evaluations; streams 1 and 2: collectors and buffers


class Learner(ABC):
    """The parts of a job in one learner's process. ``build`` returns this object.

    Attributes:
        network: the policy's network, whose weights are evaluated and kept.
        collector: yields the data for :meth:`learn`.
        ranks: the learners of the job.
        updates: gradient steps so far.
        remarks: messages to the user about the start of the job.
    """

    network: nn.Module
    collector: RPCBatchedCollector
    ranks: Ranks
    updates: int = 0
    remarks: tuple[str, ...] = ()

    @abstractmethod
    def learn(self, data: Any, frames: int) -> dict[str, Any]:
        """Learn from what the collector yielded, and send the new weights to the collector.

        Args:
            data: a batch, or a report if the collector writes to a replay buffer.
            frames: frames of the whole job so far, including those in ``data``.

        Returns:
            The scalars to log, by tag.
        """

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return the state for a resumed learner: ``"model"``, ``"optimizer"``, ``"extra"``."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what :meth:`state_dict` returned. Send the weights to the collectors."""

    def close(self) -> None:
        """Stop the workers."""
        self.collector.shutdown()


class LossLearner(LossTrainer, Learner):
    """A learner that trains all weights of a loss, which contains the policy. The policy's weights
    go to the collectors."""

    def __init__(self, loss: Any, collector: RPCBatchedCollector, **adam: Any) -> None:
        super().__init__(loss, **adam)
        self.collector = collector

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "extra": {}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.collector.update_policy_weights_()


def rounded(evaluation: Evaluation) -> dict[str, Any]:
    """Return an evaluation with few digits, because srun breaks lines of more than 1,023 bytes."""
    return {**vars(evaluation), "seconds": round(evaluation.seconds, 2)}


@dataclass(frozen=True)
class Start:
    """The state from which the learners begin.

    Attributes:
        frames: frames that the whole job has already collected.
        resumes: how often the run was resumed. The seeds of its environments depend on this number.
        updates: gradient steps that were already taken.
        state: the learner's state, if the run is resumed.
    """

    frames: int = 0
    resumes: int = 0
    updates: int = 0
    state: Mapping[str, Any] | None = field(default=None, repr=False)

    @classmethod
    def of(cls, before: Checkpoint | None) -> Start:
        if before is None:
            return cls()
        if not {"history", "learner", "lost_collectors"} <= set(before.extra):
            raise CheckpointError(
                "the run to resume was written by another version of torchrl_dist, and this "
                "version cannot resume it; play its policy with torchrl-dist play, or start a new "
                "run in another folder"
            )
        try:
            frames, updates, resumes = (
                int(before.extra["history"]["frames"]),
                int(before.counters["updates"]),
                int(before.counters["resumes"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                "the checkpoint of the run to resume is damaged: its counters are "
                f"{dict(before.counters)}; expected numbers for 'updates' and 'resumes'. Use an "
                "earlier copy of the checkpoint"
            ) from error
        return cls(
            frames,
            resumes + 1,
            updates,
            {
                "model": before.model,
                "optimizer": before.optimizer,
                "extra": before.extra["learner"],
            },
        )


Build = Callable[[Any, Task, PolicySpec, Session, Start], Learner]


def stream_seed(*numbers: int) -> int:
    """Return a seed in [0, 2^31), different for each tuple of numbers >= 0."""
    # NumPy pads with zeros. Without the length, (1, 2) would equal (1, 2, 0).
    sequence = np.random.SeedSequence([len(numbers), *numbers])
    return int(sequence.generate_state(1)[0]) % 2**31


def choose_device(config: RecipeConfig, session: Session) -> torch.device:
    """Return the device of this learner. Each learner of a node has its own GPU.

    With ``--device auto``, all learners compute on the CPU if there are too few GPUs. The other
    nodes are assumed to have as many GPUs as this node.

    Raises:
        ConfigurationError: ``--device cuda`` was given, but a node has fewer GPUs than learners.
    """
    if config.device == "cpu" or (config.device == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    most = max(Counter(peer.host for peer in session.of_role("learner")).values())
    available = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if most > available:
        if config.device == "auto":  # on all learners, because averaging needs equal devices
            return torch.device("cpu")
        # every learner raises this, so that none waits for another
        raise ConfigurationError(
            f"--device {config.device}: {most} learners on one node need that many GPUs, but "
            f"{session.me.host} has {available}; use --device cpu, or fewer learners"
        )
    index = sum(p.host == session.me.host for p in session.of_role("learner")[: session.me.index])
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def my_collectors(session: Session) -> tuple[Peer, ...]:
    """Return this learner's collectors: every L-th one if there are L learners. If the job has no
    collectors, return the learner itself."""
    learners = session.of_role("learner")
    return session.of_role("collector")[session.me.index :: len(learners)] or (session.me,)


class ActorCritic(LossLearner):
    """Learns a policy and a critic. If they normalize observations, both use the same moments.

    Args:
        loss: contains ``network`` and ``critic``.
        ranks: the learners of the job; None: this learner alone.
        scale_rewards: whether to divide rewards by the standard deviation of the discounted return.

    Attributes:
        reward_scale: set if ``scale_rewards``.
    """

    betas: ClassVar[tuple[float, float]] = (0.9, 0.999)
    """Decay rates of Adam's moments."""

    def __init__(
        self,
        config: Any,
        network: nn.Module,
        critic: nn.Module,
        loss: Any,
        collector: RPCBatchedCollector,
        device: torch.device,
        start: Start,
        ranks: Ranks | None = None,
        scale_rewards: bool = False,
    ) -> None:
        super().__init__(loss, collector, lr=config.learning_rate, eps=1e-5, betas=self.betas)
        self.config = config
        self.network, self.critic = network, critic
        self.ranks = ranks or Ranks(timeout_s=config.timeout_s)
        self.reward_scale = (
            RewardScale(config.gamma, self.ranks, config.env) if scale_rewards else None
        )
        self.device = device
        self._frames = start.frames
        self._moments = moments_of(network)

    def anneal(self, frames: int) -> float:
        """Set the learning rate for the batch that brings the job to ``frames`` frames. Return the
        rate divided by the initial rate."""
        config = self.config
        share = 1 - self._frames / config.total_frames if config.anneal else 1.0
        self._frames = frames
        self.set_learning_rate(share * config.learning_rate)
        return share

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        if self.reward_scale is not None:
            state["extra"] = {"returns": copy.deepcopy(self.reward_scale.moments.state_dict())}
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        if self.reward_scale is not None:
            self.reward_scale.moments.load_state_dict(state["extra"]["returns"])

    def rewards(self, data: TensorDictBase) -> Tensor:
        """Return the rewards of ``data [N, T]`` to learn from, float32 ``[N, T, 1]``. Call this
        once per batch, because it adds the batch's returns to the moments."""
        if self.reward_scale is not None:
            return self.reward_scale(data)
        return data["next", "reward"].to(torch.float32)

    def descend(self, losses: Mapping[str, Tensor]) -> None:
        """Take one gradient step on the sum of the losses."""
        total = losses["loss_objective"] + losses["loss_critic"] + losses["loss_entropy"]
        self._optimizer.descend(total, self.config.max_grad_norm)
        self.updates += 1

    def finish(
        self, rows: TensorDictBase, losses: Mapping[str, Tensor], share: float
    ) -> dict[str, Any]:
        """Finish an update on ``rows``: update moments, and send the weights. Return metrics."""
        config = self.config
        if self._moments is not None:  # last, because the policy acted with the earlier moments
            observations = rows["observation"].flatten(0, rows.ndim - 1)
            self._moments.update(observations, self.ranks, f"observations of {config.env}")
        lag = self.collector.policy_version - rows["policy_version"].float().mean()
        self.collector.update_policy_weights_()
        return {
            "train/loss": losses["loss_objective"].detach(),
            "train/loss_critic": losses["loss_critic"].detach(),
            "train/entropy": losses["entropy"].detach(),
            "train/learning_rate": share * config.learning_rate,
            "train/policy_lag_mean": lag,
        }


def make_collector(
    config: RecipeConfig,
    session: Session,
    start: Start,
    task: Task,
    policy: Any,
    *,
    clip_actions: bool = False,
    **options: Any,
) -> RPCBatchedCollector:
    """Build this learner's collector. ``options`` are arguments of the collector. They take
    precedence over the usual arguments, which suit a single learner."""
    left = config.total_frames - min(start.frames, config.total_frames - 1)
    usual: dict[str, Any] = {
        "session": session,
        "workers": my_collectors(session),
        "frames_per_batch": config.frames_per_batch,
        # several learners end together, when the sum of their frames reaches the total
        "total_frames": left if len(session.of_role("learner")) == 1 else -1,
        "num_envs": config.envs_per_collector,
        "max_policy_lag": config.max_policy_lag,
        "categorical_action_encoding": True,
        "seed": stream_seed(config.seed, start.resumes),
        "timeout_s": config.timeout_s,
    }
    make_env = for_collectors(
        config.env, config.reward_clip, wrapped=task.wrapped, clip_actions=clip_actions
    )
    return RPCBatchedCollector(make_env, policy, **(usual | options))


def train(
    build: Build, config: RecipeConfig, session: Session, *, resume: bool = False
) -> dict[str, Any]:
    """Train, and return the result as plain values. The first learner's process calls this. Blocks.

    Writes ``checkpoint.pt``, ``config.yaml``, ``learning_curve.png`` and logs to the run's folder.
    After a stop signal it finishes the current batch, writes the checkpoint and returns.

    Raises:
        ConfigurationError: the environment, the nodes, the device or a logger do not suit
            ``config``, or the environment of a resumed run has changed.
        CheckpointError: with ``resume``, the checkpoint is missing or damaged.
        DirectoryError: the replay directory cannot be used.
        PeerLostError: all collectors of a learner are lost, or a learner is lost. A checkpoint has
            been written.
        DeadlineError: a batch or a learner took longer than ``timeout_s``. A checkpoint has been
            written.
        RemoteError: for example, an environment raised. A checkpoint has been written.
        TorchRLDistError: a weight or a loss is not finite. The earlier checkpoint stays.
    """
    callback = callback_of(config.callback)
    check_session(session)
    config = config.anchored()
    check_wandb(config.wandb)
    if config.video:
        check_video(config.env)
    before = load_checkpoint(config.checkpoint_path, recipe=config.recipe) if resume else None
    start = Start.of(before)
    if before is not None:
        task = look_at(config.env, continuous=config.continuous)
        PolicySpec.from_plain(before.policy_info).check_task(task)
        note_resumed(config.output_path, start.frames)
    others = [
        session.submit(peer, _follow, build, config, start, timeout_s=float("inf"))
        for peer in session.of_role("learner")[1:]
    ]
    try:
        # one thread, because the matrices are small, and the collectors need the cores
        with torch_threads(1), Training(build, config, session, start) as training:
            keeper = Keeper(training, before, callback)
            with contextlib.closing(keeper):
                try:
                    training.run(keeper)
                except (DeadlineError, PeerLostError, RemoteError) as error:
                    keeper.save()
                    written = f"{config.checkpoint_path} was written; --resume continues from it"
                    if isinstance(error, RemoteError):  # raise it unchanged, to show its traceback
                        keeper.monitor.say(written)
                        raise
                    raise type(error)(f"{error}. {written}") from error
                except Exception:
                    keeper.check_weights()  # non-finite weights may be the cause
                    raise
                result = keeper.finish()
    except (DeadlineError, PeerLostError) as error:
        raise _cause(others) or error from error
    for other in others:
        other.result(session.timeout_s)
    return result


def _follow(build: Build, config: RecipeConfig, start: Start) -> None:
    """Run a learner other than the first. The first learner calls this in the processes of the
    other learners."""
    with torch_threads(1), Training(build, config, current_session(), start) as training:
        training.run(None)


def _cause(others: list[Future]) -> BaseException | None:
    """Return the first RemoteError with which another learner has ended, or None."""
    errors = [other.exception() for other in others if other.done()]
    return next((error for error in errors if isinstance(error, RemoteError)), None)


class Training:
    """One learner's part of a run.

    Attributes:
        learner: the parts in this process.
        frames: frames of the whole job so far.
        stop: whether to end after the next batch.
    """

    stop = False

    def __init__(self, build: Build, config: RecipeConfig, session: Session, start: Start) -> None:
        self.config = config
        self.session = session
        self.start = start
        self.frames = start.frames
        self.task = look_at(config.env, continuous=config.continuous)
        self.policy = PolicySpec.of(
            self.task,
            config.policy_kind,
            config.hidden,
            config.network,
            config.state_size,
            config.normalizes(self.task),
        )
        torch.manual_seed(config.seed)  # the same weights for all learners
        self.learner = build(config, self.task, self.policy, session, start)
        try:
            if start.state is not None:
                self.learner.load_state_dict(start.state)
                self.learner.updates = start.updates
            # Each learner draws its own actions, minibatches and noise.
            mine = stream_seed(config.seed, start.resumes, session.me.index)
            torch.manual_seed(mine)
            np.random.seed(mine)
            random.seed(mine)
        except BaseException:
            self.learner.close()
            raise

    def __enter__(self) -> Training:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is not None:
            self.learner.ranks.report(error)
        self.learner.close()

    def run(self, keeper: Keeper | None) -> None:
        """Learn until ``total_frames`` or a stop signal. All learners end together."""
        rollouts = iter(self.learner.collector)
        while self.frames < self.config.total_frames:
            iteration = self._meet(data := next(rollouts, None))
            if iteration.ended:
                break
            self.frames += iteration.frames
            if keeper is not None:
                keeper.collected(iteration)
            metrics = self.learner.learn(data, self.frames)
            self._check_losses(metrics)
            if keeper is not None:
                keeper.learned(metrics)
            if iteration.stop:
                break

    def _check_losses(self, metrics: Mapping[str, Any]) -> None:
        for name, value in metrics.items():
            if name.startswith("train/loss") and not math.isfinite(float(value)):
                raise TorchRLDistError(
                    f"{name} is {float(value)} after {self.learner.updates} updates: "
                    f"{self.config.env} returned observations or rewards that are too large or not "
                    "finite, or the learning rate is too high. Correct the environment, or lower "
                    f"--learning-rate. {self.config.checkpoint_path} still has an earlier state"
                )

    def _meet(self, data: Any) -> Iteration:
        report, lost = self.learner.collector.report, self.session.lost()
        mine = [
            data is None,
            self.session.stop_requested or self.stop,
            report.frames,
            [float(x) for x in report.episode_returns],
            report.policy_lag,
            report.wait_s,
            sum(report.collect_s.values()) + sum(report.write_s.values()),
            sum(peer not in lost for peer in my_collectors(self.session)),
        ]
        told = list(zip(*self.learner.ranks.exchange(mine, "the end of a batch"), strict=True))
        ended, stop, frames, returns, lag, waited, busy, workers = told
        return Iteration(
            sum(frames),
            [x for each in returns for x in each],
            max(lag),
            fmean(waited),
            sum(busy),
            sum(workers),
            any(ended),
            any(stop),
        )


class Keeper:
    """The first learner's other tasks: show, evaluate, keep the best policy, and save.

    Args:
        training: this learner's part of the run.
        before: the checkpoint of the run that is resumed.
        callback: the user's callback.
    """

    def __init__(self, training: Training, before: Checkpoint | None, callback: Callback) -> None:
        self.training = training
        self.callback = callback
        self.config = config = training.config
        self.session = training.session
        self.learner = training.learner
        self.resumes = training.start.resumes
        self.lost: list[str] = list(before.extra["lost_collectors"]) if before else []
        self.best: Evaluation | None = None
        self.best_weights = self._weights()
        # The weights of the evaluation that was begun last, and when they were copied.
        self._evaluated: tuple[dict[str, torch.Tensor], tuple[int, int, float]] | None = None
        if before is not None:
            self.best_weights = dict(before.policy)
            if before.policy_info["evaluation"] is not None:
                self.best = Evaluation(*before.policy_info["evaluation"])
            if self.learner.ranks.size == 1:
                set_rng_state(before.rng)
        self.monitor = Monitor(
            config.output_path,
            total_frames=config.total_frames,
            title=f"{config.title} on {config.env}, seed {config.seed}",
            threshold=training.task.reward_threshold,
            history=dict(before.extra["history"]) if before else {},
            wandb=config.wandb,
        )
        try:
            self.evaluations = Evaluations(
                self.session,
                EvaluatorConfig(training.policy, config.eval_episodes, config.eval_max_steps),
                self.monitor.say,
                failed=before.extra["history"].get("failed_evaluations", 0) if before else 0,
            )
            for remark in self.learner.remarks:
                self.monitor.say(remark)
            self._next_evaluation = self.monitor.frames + config.eval_interval_frames
            self.save()
        except BaseException:
            self.monitor.discard()
            raise
        write_settings(config)
        self.monitor.log_settings(config.as_plain())

    def collected(self, iteration: Iteration) -> None:
        """Record an iteration's data, before the learner learns from them."""
        self.monitor.collected(iteration)
        self._note_losses()

    def learned(self, metrics: Mapping[str, Any]) -> None:
        """Record what the learner has learned."""
        self.monitor.learned(self.learner.updates - self.monitor.updates, metrics)
        self._take_evaluation(self.evaluations.poll())
        if self.monitor.frames >= self._next_evaluation and not self.evaluations.under_way:
            self._begin_evaluation()
        self.monitor.show()
        self._ask(self.callback.on_batch(self.monitor.frames, metrics))
        if time.monotonic() - self._saved_at >= self.config.checkpoint_interval_s:
            self.save()

    def finish(self) -> dict[str, Any]:
        """Evaluate, save and draw. Return the result."""
        self.check_weights()
        monitor = self.monitor
        early = self.training.stop and monitor.frames < self.config.total_frames
        seconds, bound = monitor.seconds, monitor.bound_by()
        monitor.say(f"last evaluations: up to {2 * self.config.eval_episodes} episodes")
        self._take_evaluation(self.evaluations.finish())
        frames = [e.frames for e in monitor.evaluations[-1:]]
        frames += [self._evaluated[1][0]] if self._evaluated else []  # even if it failed
        if monitor.frames not in frames:
            self._begin_evaluation()
            self._take_evaluation(self.evaluations.finish())
        monitor.show(force=True)
        self.save()
        self.evaluations.begin(self.best_weights, self._seed(_FINAL + self.resumes))
        returns = self.evaluations.finish() or []
        plural = "s" * (len(returns) > 1)
        best, solved = self.best, monitor.solved
        number = self.session.stop_signal
        if bound is not None:
            monitor.say(bound.text(self.session.world.world_size))
        return {
            "mean_return": fmean(returns) if returns else (best.mean if best else None),
            "mean_return_is_of": (
                f"the best policy by evaluation, {len(returns)} fresh episode{plural}"
                if returns
                else "the best policy, from the evaluation that chose it (stopped early)"
            ),
            "frames": monitor.frames,
            "updates": monitor.updates,
            "seconds": round(seconds, 2),
            "sps": round(monitor.frames / seconds, 1),
            "updates_per_second": round(monitor.updates / seconds, 1),
            "last_return": monitor.evaluations[-1].mean if monitor.evaluations else None,
            "training_return": monitor.training_return,
            "best_evaluation": rounded(best) if best else None,
            "solved": {"return": monitor.threshold, **rounded(solved)} if solved else None,
            "recipe": self.config.recipe,
            "env": self.config.env,
            "seed": self.config.seed,
            "learners": self.learner.ranks.size,
            "collectors": len(self.session.of_role("collector")) or self.learner.ranks.size,
            "lost_collectors": self.lost,
            "failed_evaluations": self.evaluations.failed,
            "policy_lag": {"mean": round(monitor.mean_lag, 3), "max": monitor.max_lag},
            "bound_by": vars(bound) if bound else None,
            "last": {name: float(f"{value:.6g}") for name, value in monitor.last.items()},
            "stopped_by": signal.Signals(number).name if number else "callback" if early else None,
            "resumes": self.resumes,
            "checkpoint": str(self.config.checkpoint_path),
            "learning_curve": str(monitor.picture(best)),
        }

    def save(self) -> None:
        """Write the checkpoint."""
        self.check_weights()
        state = self.learner.state_dict()
        evaluation = list(vars(self.best).values()) if self.best else None
        save_checkpoint(
            self.config.checkpoint_path,
            Checkpoint(
                recipe=self.config.recipe,
                config=self.config.as_plain(),
                policy=self.best_weights if self.best else self._weights(),
                policy_info={**self.training.policy.as_plain(), "evaluation": evaluation},
                model=state["model"],
                optimizer=state["optimizer"],
                counters={"updates": self.learner.updates, "resumes": self.resumes},
                rng=rng_state(),
                extra={
                    "history": self.monitor.state()
                    | {"failed_evaluations": self.evaluations.failed},
                    "lost_collectors": self.lost,
                    "learner": state["extra"],
                },
            ),
        )
        self._saved_at = time.monotonic()
        self._ask(self.callback.on_checkpoint(self.config.checkpoint_path))

    def _ask(self, stop: Any) -> None:
        """Stop if a method of the callback returned True, or a true scalar of NumPy or torch."""
        if stop is not None and getattr(stop, "dtype", type(stop)) not in (bool, torch.bool):
            raise ConfigurationError(
                f"--callback: a method returned {stop!r}, expected None, or True to end the run"
            )
        self.training.stop = self.training.stop or bool(stop)

    def check_weights(self) -> None:
        """Raise TorchRLDistError if the weights contain NaN or infinity."""
        if all(bool(torch.isfinite(value).all()) for value in self._weights().values()):
            return
        raise TorchRLDistError(
            f"the weights contain NaN or infinity after {self.learner.updates} updates: "
            f"{self.config.env} returned non-finite observations or rewards, or the learning rate "
            "is too high. Correct the environment, or lower --learning-rate. "
            f"{self.config.checkpoint_path} still has an earlier state"
        )

    def close(self) -> None:
        """End the progress line."""
        self.monitor.close()

    def _weights(self) -> dict[str, torch.Tensor]:
        state = self.learner.network.state_dict()
        return {name: value.detach().cpu().clone() for name, value in state.items()}

    def _begin_evaluation(self) -> None:
        """Start an evaluation of the current weights while training continues."""
        weights = self._weights()
        self._evaluated = (weights, self.monitor.moment())
        number = len(self.monitor.evaluations) + self.evaluations.failed + 1
        self.evaluations.begin(weights, self._seed(number))
        self._next_evaluation = self.monitor.frames + self.config.eval_interval_frames

    def _take_evaluation(self, returns: list[float] | None) -> None:
        if returns is None:
            return
        assert self._evaluated is not None
        weights, moment = self._evaluated
        evaluation = self.monitor.evaluated(returns, moment)
        self._ask(self.callback.on_evaluation(evaluation))
        if self.best is None or self.monitor.rank(evaluation) >= self.monitor.rank(self.best):
            self.best, self.best_weights = evaluation, weights
            if self.config.video:
                self._record(evaluation, weights)

    def _record(self, evaluation: Evaluation, weights: Mapping[str, torch.Tensor]) -> None:
        path = self.config.output_path / "videos" / f"{evaluation.frames}.mp4"
        path.parent.mkdir(exist_ok=True)
        seed = self._seed(len(self.monitor.evaluations))
        try:
            record(self.training.policy, weights, path, seed, self.config.eval_max_steps)
        except Exception as error:  # a failed video must not end a run
            self.monitor.say(f"{path} was not written: {error!r}")

    def _seed(self, number: int) -> int:
        """Return the seed of an evaluation's environments."""
        return stream_seed(self.config.seed, number, 0, _EVALUATION)

    def _note_losses(self) -> None:
        """Report each lost collector once."""
        for peer in self.session.lost():
            if peer.role == "collector" and peer.name not in self.lost:
                self.lost.append(peer.name)
                why = self.session.lost_reason(peer)
                self.monitor.say(f"{peer.name} is lost ({why}); training continues without it")
