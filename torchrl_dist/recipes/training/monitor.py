"""The visible side of a run: a progress line, TensorBoard, CSV files, and a picture."""

from __future__ import annotations

import contextlib
import importlib.util
import math
import os
import secrets
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from ... import own_files
from ...errors import ConfigurationError
from ...runtime.outputs import BestEffort
from ..parts.plots import Evaluation, draw_learning_curve

_LOG_INTERVAL_S = 1.0
_EVEN = 0.1  # smaller differences between shares of time do not count
_PIPE_INTERVAL_S = 10.0  # between progress lines if stderr is not a terminal
# A progress line must fit into _WIDTH columns. Without the bar, the part to the left of {postfix}
# needs _LEFT columns.
_LINE = "{percentage:3.0f}%|{bar}|{n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]"
_WIDTH, _LEFT = 80, 40


@dataclass(frozen=True)
class Bound:
    """Which side limits a run's speed, with the shares of time as evidence.

    Attributes:
        by: ``"collectors"``, ``"learner"`` or ``"both"``.
        learner_waits: share of the time that the learners, on average, wait for data.
        collectors_wait: share of the time that the collectors wait for the learner or for a core.
    """

    by: str
    learner_waits: float
    collectors_wait: float

    @classmethod
    def of(cls, learner_waits: float, collectors_wait: float) -> Bound:
        difference = learner_waits - collectors_wait
        by = "both" if abs(difference) < _EVEN else "collectors" if difference > 0 else "learner"
        return cls(by, round(learner_waits, 3), round(collectors_wait, 3))

    def text(self, processes: int) -> str:
        """Return a line for the user of a job with this number of processes."""
        if processes == 1:
            return (
                f"one process: it spent {self.learner_waits:.0%} of the time on collecting and "
                f"{1 - self.learner_waits:.0%} on learning"
            )
        return (
            f"bound by: {self.by} (the learner waits {self.learner_waits:.0%} of the time for "
            f"data, the collectors {self.collectors_wait:.0%} for the learner)"
        )


@dataclass(frozen=True)
class Iteration:
    """The data of all learners' collectors in one iteration of the loop.

    Attributes:
        frames: new frames, in which episodes with these ``returns`` ended.
        lag: policy lag of the oldest of these frames.
        waited_s: seconds that a learner waited for these frames (mean over the learners).
        busy_s: seconds of stepping and writing, summed over all workers.
        ended: whether a learner got no data; if so, no learner learns in this iteration.
        stop: whether a learner must stop after this iteration.
    """

    frames: int
    returns: Sequence[float]
    lag: int
    waited_s: float = 0.0
    busy_s: float = 0.0
    workers: int = 1
    ended: bool = False
    stop: bool = False


class Monitor:
    """Record and show the events of one training loop. Only one thread may use a monitor.

    In a resumed run, frames, updates and seconds continue where the earlier run stopped. The
    monitor writes these tags to TensorBoard, CSV files and wandb. The step of each entry is the
    number of frames of the whole job.

    ============================  ==========================================================
    ``eval/return``               mean return of greedy episodes; ``eval/lowest``: the lowest
    ``train/return``              mean return of the exploring episodes that ended since the
                                  last entry
    ``train/sps``                 frames per second; ``train/updates_per_second``: gradient
                                  steps per second
    ``train/updates``             gradient steps so far
    ``train/policy_lag``          policy lag of the oldest data of the last batch;
                                  ``train/policy_lag_mean``: mean over that batch's rows
                                  (ddppo, impala)
    ``train/replay_ratio``        rows (apex, sac) or sequences (r2d2) sampled per row collected
    ``train/stale_priorities``    share of the new priorities that were dropped because their
                                  rows had been overwritten (apex, r2d2)
    ``time/learner_waits``        share of the time since the last entry in which the learners,
                                  on average, waited for data
    ``time/collectors_wait``      share of this time in which the collectors waited for the
                                  learner or a core
    ``train/loss``                loss of the policy or the values
    ``train/loss_critic``         loss of the critic (ddppo, impala); ``train/loss_actor``:
                                  loss of the actor (sac)
    ``train/entropy``             entropy of the policy (ddppo, impala, sac);
                                  ``train/alpha``: its weight (sac)
    ``train/learning_rate``       learning rate of the last step (ddppo, impala)
    ``train/rho_mean``            mean importance weight of V-trace; ``train/rho_clipped``:
                                  share of the weights that are clipped (impala)
    ``train/kl``                  KL divergence from the policy that collected the batch (ddppo)
    ``train/clip_fraction``       share of the rows whose ratio is clipped;
                                  ``train/steps_per_batch``: gradient steps (ddppo)
    ``train/valid_rows``          valid rows / frames per batch, which is less than 1 if
                                  rollouts of late collectors were cut (ddppo)
    ============================  ==========================================================

    Args:
        output: folder for ``tensorboard/``, ``csv/`` and ``learning_curve.png``.
        total_frames: length of the run.
        threshold: the mean return that counts as solved.
        history: what :meth:`state` returned in the run that is resumed.
        wandb: project of Weights & Biases, or None.

    Raises:
        ConfigurationError: wandb does not start.
    """

    def __init__(
        self,
        output: Path,
        *,
        total_frames: int,
        title: str,
        threshold: float | None,
        history: dict[str, Any] | None = None,
        wandb: str | None = None,
    ) -> None:
        from torchrl.record.loggers import CSVLogger, TensorboardLogger
        from tqdm import tqdm

        history = history or {}
        self.frames: int = history.get("frames", 0)
        self.updates: int = history.get("updates", 0)
        self.evaluations = [Evaluation(*row) for row in history.get("evaluations", [])]
        self.training = [(float(x), float(y)) for x, y in history.get("training", [])]
        self.threshold = threshold
        self._output = output
        self._title = title
        self._seconds_before: float = history.get("seconds", 0.0)
        self._started = self._window_started = time.monotonic()
        self._window = (self.frames, self.updates)
        self._window_returns: list[float] = []
        self._recent = deque[float](maxlen=100)
        self._lag = self.max_lag = 0
        self._lags = [0, 0]  # sum of the lags of all batches, and the number of batches
        self._metrics: Mapping[str, Any] = {}
        # In seconds: the waits of the learner, the work of a collector (mean), the elapsed time.
        self._times = self._times_shown = (0.0, 0.0, 0.0)
        self._turned = time.monotonic()
        # TorchRL's loggers print to stdout, which must contain only the run's result.
        self._stderr: Any = BestEffort(sys.stderr)
        csv = output / "csv"
        folders = (*(csv / name for name in ("scalars", "videos", "texts")), csv)
        folders = (output / "tensorboard", *folders)
        self._made_folders = [each for each in folders if not each.exists()]
        with contextlib.redirect_stdout(self._stderr):
            tensorboard = TensorboardLogger("tensorboard", log_dir=str(output))
            writer = tensorboard.experiment.file_writer.event_writer
            # no public attribute contains the file's name (tensorboard 2.21)
            self._event_file: str | None = getattr(writer, "_file_name", None)
            self._loggers = [tensorboard, CSVLogger("csv", log_dir=str(output))]
            self._wandb_id: str = history.get("wandb_id") or secrets.token_hex(6)
            if wandb is not None:
                try:
                    self._loggers.append(_wandb_logger(wandb, self._wandb_id, title, output))
                except BaseException:
                    self._remove_logs()
                    raise
        watched = self._stderr.isatty()

        class Bar(tqdm):
            """A bar with a plain lock, because tqdm's own lock starts a process."""

        Bar.set_lock(threading.RLock())
        self._bar = Bar(
            total=total_frames,
            initial=min(self.frames, total_frames),
            unit_scale=True,
            bar_format=_LINE,
            ncols=None if watched else _WIDTH,
            mininterval=0.2 if watched else _PIPE_INTERVAL_S,
            dynamic_ncols=watched,
            file=self._stderr,
        )

    @property
    def seconds(self) -> float:
        """Training time so far, in seconds."""
        return self._seconds_before + time.monotonic() - self._started

    @property
    def solved(self) -> Evaluation | None:
        """The first evaluation that reached the threshold, or None."""
        if self.threshold is None:
            return None
        return next((e for e in self.evaluations if e.mean >= self.threshold), None)

    def rank(self, evaluation: Evaluation) -> tuple[float, float]:
        """Return a key to compare evaluations: the mean, then the mean of the previous evaluation.

        Many evaluations reach the highest possible return, some of them by luck. Luck is less
        likely if the previous evaluation was good, too.
        """
        before = [e.mean for e in self.evaluations if e.frames < evaluation.frames]
        mean, earlier = evaluation.mean, before[-1] if before else -math.inf
        # Comparisons with NaN are false, so an evaluation whose mean is NaN would stay the best.
        return (
            -math.inf if math.isnan(mean) else mean,
            -math.inf if math.isnan(earlier) else earlier,
        )

    @property
    def mean_lag(self) -> float:
        """The policy lag of a batch's oldest data, as a mean over all batches."""
        return self._lags[0] / max(1, self._lags[1])

    @property
    def training_return(self) -> float | None:
        """Mean return of the last 100 training episodes since the run was started or resumed."""
        return fmean(self._recent) if self._recent else None

    @property
    def last(self) -> dict[str, float]:
        """The recipe's latest metrics."""
        return {name: float(value) for name, value in self._metrics.items()}

    def bound_by(self) -> Bound | None:
        """Return what limits the run so far, or None if there are no data."""
        return _bound((0.0, 0.0, 0.0), self._times)

    def collected(self, iteration: Iteration) -> None:
        """Record new frames."""
        self.frames += iteration.frames
        now = time.monotonic()
        waited, busy, available = self._times
        self._times = (
            waited + iteration.waited_s,
            busy + iteration.busy_s / max(1, iteration.workers),
            available + now - self._turned,
        )
        self._turned = now
        self._lag = iteration.lag
        self.max_lag = max(self.max_lag, iteration.lag)
        self._lags[0] += iteration.lag
        self._lags[1] += 1
        self._window_returns.extend(iteration.returns)
        self._recent.extend(iteration.returns)
        self._bar.update(iteration.frames)

    def learned(self, updates: int, metrics: Mapping[str, Any]) -> None:
        """Record ``updates`` new gradient steps, and ``metrics``, scalars by tag."""
        self.updates += updates
        self._metrics = {**self._metrics, **metrics}

    def moment(self) -> tuple[int, int, float]:
        """Return the current frames, updates and seconds. Pass them to :meth:`evaluated`, together
        with the returns of the current weights."""
        return self.frames, self.updates, self.seconds

    def evaluated(
        self, returns: list[float], moment: tuple[int, int, float] | None = None
    ) -> Evaluation:
        """Record the returns of greedy episodes with the weights of a ``moment`` (default: now)."""
        frames, updates, seconds = self.moment() if moment is None else moment
        evaluation = Evaluation(
            frames=frames,
            updates=updates,
            seconds=seconds,
            mean=fmean(returns),
            lowest=min(returns),
            highest=max(returns),
        )
        self.evaluations.append(evaluation)
        self._log({"eval/return": evaluation.mean, "eval/lowest": evaluation.lowest}, frames)
        return evaluation

    def show(self, *, force: bool = False) -> None:
        """Log rates and metrics, at most once a second unless ``force``."""
        now = time.monotonic()
        elapsed = now - self._window_started
        if elapsed < _LOG_INTERVAL_S and not force:
            return
        frames, updates = self._window
        values = {
            "train/updates": float(self.updates),
            "train/policy_lag": float(self._lag),
            **self.last,
        }
        shown = []
        if self.frames > frames:
            sps = values["train/sps"] = (self.frames - frames) / elapsed
            per_second = values["train/updates_per_second"] = (self.updates - updates) / elapsed
            shown.append(f"{sps:.0f} SPS")
        bound = _bound(self._times_shown, self._times)
        if bound is not None:
            values["time/learner_waits"] = bound.learner_waits
            values["time/collectors_wait"] = bound.collectors_wait
        self._times_shown = self._times
        if self._window_returns:
            values["train/return"] = fmean(self._window_returns)
            self.training.append((float(self.frames), values["train/return"]))
            self._window_returns = []
        self._log(values)
        if (recent := self.training_return) is not None:
            shown.append(f"return {recent:.4g}")
        if self.evaluations:
            shown.append(f"greedy {self.evaluations[-1].mean:.4g}")
        if bound is not None:
            shown.append(f"bound by {bound.by}")
        if self.frames > frames:
            shown.append(f"{per_second:.0f} updates/s")
        self._window, self._window_started = (self.frames, self.updates), now
        while shown and len(", ".join(shown)) > (self._bar.ncols or _WIDTH) - _LEFT:
            shown.pop()
        self._bar.set_postfix_str(", ".join(shown), refresh=False)

    def log_settings(self, values: Mapping[str, Any]) -> None:
        """Log the run's configuration for TensorBoard's hyperparameter page and for wandb."""
        from torch.utils.tensorboard.summary import hparams

        tensorboard, _csv, *others = self._loggers
        plain = {k: v if isinstance(v, int | float) else str(v) for k, v in values.items()}
        for summary in hparams(plain, {"eval/return": 0.0}):
            # The writer's add_hparams would make another folder.
            tensorboard.experiment.file_writer.add_summary(summary)
        for wandb in others:
            wandb.log_hparams(dict(values))

    def say(self, text: str) -> None:
        """Print a line on stderr without breaking the progress line."""
        self._bar.write(text, file=self._stderr)

    def picture(self, best: Evaluation | None) -> Path:
        """Draw the learning curve so far."""
        path = self._output / "learning_curve.png"
        draw_learning_curve(
            path,
            title=self._title,
            training=self.training,
            evaluations=self.evaluations,
            threshold=self.threshold,
            best=best,
        )
        return path

    def state(self) -> dict[str, Any]:
        """Plain values for a checkpoint."""
        return {
            "frames": self.frames,
            "updates": self.updates,
            "seconds": self.seconds,
            "evaluations": [list(vars(e).values()) for e in self.evaluations],
            "training": [list(point) for point in self.training],
            "wandb_id": self._wandb_id,
        }

    def discard(self) -> None:
        """Close the monitor, and remove the file and the folders that the loggers made.

        Call this before anything is logged. A folder with other contents stays."""
        self.close()
        self._remove_logs()

    def _remove_logs(self) -> None:
        self._loggers[0].experiment.close()  # a second close creates no file
        if self._event_file is not None:
            with contextlib.suppress(OSError):
                os.unlink(self._event_file)
        for folder in self._made_folders:
            with contextlib.suppress(OSError):
                folder.rmdir()

    def close(self) -> None:
        """End the progress line and flush the logs. Idempotent."""
        self._bar.close()
        tensorboard, csv, *others = self._loggers
        for file in csv.experiment.files.values():
            with contextlib.suppress(OSError):  # ``_log`` has raised it
                file.close()
        with self._naming_the_folder():
            tensorboard.experiment.close()
        for wandb in others:
            wandb.experiment.finish()

    def _log(self, values: dict[str, float], frames: int | None = None) -> None:
        with self._naming_the_folder():
            for logger in self._loggers:
                for name, value in values.items():
                    logger.log_scalar(name, value, step=self.frames if frames is None else frames)

    @contextlib.contextmanager
    def _naming_the_folder(self) -> Iterator[None]:
        """Add the run's folder to errors of writes, because these errors name no file."""
        try:
            yield
        except OSError as error:
            own_files.name_file(error, self._output)
            raise


def check_wandb(project: str | None) -> None:
    """Raise ConfigurationError if wandb is requested but not installed."""
    if project is not None and importlib.util.find_spec("wandb") is None:
        raise ConfigurationError(
            "--wandb needs a package that is not installed: pip install 'torchrl-dist[wandb]'"
        )


def _wandb_logger(project: str, run_id: str, title: str, output: Path) -> Any:
    """Return the logger. A resumed run keeps its id.

    The logger sends neither the printed output nor the list of installed packages.
    """
    from torchrl.record.loggers import WandbLogger

    try:
        return WandbLogger(
            title,
            project=project,
            id=run_id,
            save_dir=str(output),
            log_env_packages=False,
            settings={"console": "off"},
        )
    except Exception as error:
        raise ConfigurationError(
            f"--wandb: cannot log to {project} ({error}); run wandb login and check the network, "
            "or leave the option out"
        ) from error


def _bound(before: tuple[float, float, float], now: tuple[float, float, float]) -> Bound | None:
    waited, busy, seconds = (b - a for a, b in zip(before, now, strict=True))
    if seconds <= 0:
        return None
    return Bound.of(min(1.0, waited / seconds), max(0.0, 1 - busy / seconds))
