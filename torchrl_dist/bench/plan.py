"""Do the planner's predictions come true? The benchmark compares them with measurements.

    torchrl-dist bench plan

The planner measures the costs from which it predicts. The benchmark has three parts:

- ``grid``: settings to which the planner was not fitted. Some are measured as in ``bench collect``,
  with several numbers of workers, steps of 0 to 100 ms, and 1 to 256 steps per message. In the
  other settings, the learner waits for all workers, whose step times are normal or heavy-tailed.
- ``verdicts``: compares one process with the processes that the planner would start, for learners
  that need more or less time per frame.
- ``bounds``: jobs that, according to the planner, are bound by the learner, the environment or the
  messages. The benchmark reduces only the work that bounds the job, and shows whether the job
  gets faster.

The benchmark needs a quiet machine and takes about five minutes.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from torchrl_dist.bench import command
from torchrl_dist.bench.results import append_json
from torchrl_dist.planner import MIN_GAIN, Costs, Layout, predict

CHECKS = ("grid", "verdicts", "bounds")
_TIMEOUT_S = 150.0


@dataclass(frozen=True)
class Job:
    """A job that is predicted and measured.

    Attributes:
        env: an env of ``bench collect``. ``step_s`` is how long a step of a sleeping env takes.
        learn_s: how long the learner computes per frame.
        durations: distribution of the step times. None: each step takes ``step_s``.
    """

    env: str
    step_s: float
    layout: Layout
    learn_s: float = 0.0
    durations: str | None = None

    def describe(self) -> str:
        layout = self.layout
        if layout.alone:
            kind = "one process"
        else:
            kind = f"{layout.processes} {'processes' if layout.node_workers else 'ranks'}"
        law = f" {self.durations}" if self.durations else ""
        learn = f", learner {1e6 * self.learn_s:g} us/frame" if self.learn_s else ""
        step = f" {1e3 * self.step_s:g} ms{law}" if self.env == "sleep" else ""
        return f"{self.env}{step}, {kind} x {layout.envs}, {layout.steps} per message{learn}"


# ---- the jobs


def grid() -> list[Job]:
    """Return settings to which no constant of the planner was fitted."""
    jobs = []
    for processes, steps, node in itertools.product((2, 8, 32), (1, 16, 256), (False, True)):
        layout = Layout(1, processes, 1, steps, node, 1, False)
        for step_s in (0.0, 0.001, 0.01, 0.1):
            # With longer messages, a measurement would count two messages at most.
            if steps * step_s <= 0.3:
                jobs.append(Job("sleep", step_s, layout))
    waiting = Layout(1, 8, 1, 8)
    for law, envs in itertools.product(("normal", "lognormal", "slow"), (1, 8)):
        jobs.append(Job("sleep", 0.004, replace(waiting, envs=envs), durations=law))
    return jobs


def verdicts() -> list[tuple[Job, list[Job]]]:
    """Return one-process jobs. Each comes with several distributed jobs, from which the planner
    chooses the best."""
    cases = [
        ("sleep", 0.001, 1, 0.0), ("sleep", 0.01, 1, 0.0), ("sleep", 0.05, 1, 0.0),
        ("sleep", 0.01, 1, 0.02), ("sleep", 0.001, 1, 0.002), ("cartpole", 0.0, 1, 0.0),
        ("cartpole", 0.0, 64, 0.0), ("cartpole", 0.0, 64, 3e-5), ("cartpole", 0.0, 512, 1e-5),
        ("cartpole", 0.0, 8, 1e-3),
    ]  # fmt: skip
    found = []
    for env, step_s, envs, learn_s in cases:
        steps = max(1, min(256, int(0.2 / max(step_s, 2e-4))))
        alone = Job(env, step_s, Layout(envs=envs, steps=steps), learn_s)
        several = [
            Job(env, step_s, Layout(1, n, envs, steps, node, 1, False), learn_s)
            for n, node in itertools.product((1, 2, 8), (False, True))
        ]
        found.append((alone, several))
    return found


def bounds() -> list[tuple[str, Job, Job]]:
    """Return, for each bound, its name, a job with this bound, and an easier form of this job.

    Each job has exactly one bound. The easier form differs only in the work that causes this bound.
    """
    base = Layout(1, 8, 1, 16, True, 1, False)
    single = Layout(1, 8, 1, 1, False, 1, False)
    learner = Job("sleep", 0.01, base, learn_s=0.005)
    return [
        ("learner", learner, replace(learner, learn_s=0.0025)),
        ("environment", Job("sleep", 0.04, base), Job("sleep", 0.02, base)),
        ("messages", Job("sleep", 0.001, single),
         Job("sleep", 0.001, replace(single, steps=4))),
    ]  # fmt: skip


def ten_ms() -> Any:
    """Return an env whose steps sleep 10 ms:
    ``torchrl-dist plan --env torchrl_dist.bench.plan:ten_ms``."""
    from torchrl_dist.bench.collect_cells import SleepEnv

    return SleepEnv(0.01)


# ---- predictions


@functools.cache
def _costs(env: str, step_s: float, seconds: float) -> Costs:
    """Let the planner measure the costs of this env.

    Costs differ between envs, because a process that sleeps between steps finds colder caches.
    """
    from torchrl_dist.bench.collect_cells import SleepEnv, make_policy
    from torchrl_dist.plan.measure import Subject, envs_of, measure

    if env == "sleep":
        sleeper = functools.partial(SleepEnv, step_s)
        subject = Subject(lambda _: sleeper, False, make_policy(env), update_s=0.0)
    else:
        make_env, native = envs_of("CartPole-v1")
        subject = Subject(make_env, native, make_policy(env), update_s=0.0)
    return measure(subject, seconds=seconds).costs(subject)


def predicted(job: Job, seconds: float) -> float:
    """Return the frames per second that the model predicts."""
    costs = _costs(job.env, job.step_s, seconds)
    costs = replace(costs, update_s=job.learn_s, updates_per_frame=1.0)
    if job.durations is not None:  # the env of _costs() has steps of equal duration
        spreads = {"normal": 0.1, "lognormal": 1.31, "slow": 1.42}
        costs = replace(costs, spread=spreads[job.durations])
    return predict(costs, job.layout, os.cpu_count() or 1).frames_per_s


# ---- measurements


def measured(job: Job, folder: Path, seconds: float, launcher: Any) -> float:
    """Measure the frames per second in new processes. Blocks for seconds."""
    seconds = max(seconds, 6 * job.layout.steps * job.layout.envs * job.step_s)
    call: Callable[..., float] = _in_rounds if job.durations else _stepped
    return launcher.run(
        call, job, str(folder), seconds, folder=folder, timeout_s=_TIMEOUT_S + 2 * seconds
    )


def _in_rounds(job: Job, folder: str, seconds: float) -> float:
    from torchrl_dist.bench import collect_learner

    layout = job.layout
    question = collect_learner.Question(
        "ours", "sleep", layout.processes, layout.envs, job.step_s, layout.steps, seconds,
        _TIMEOUT_S, durations=str(job.durations),
    )  # fmt: skip
    return collect_learner.measure_alone(question, folder)["sps"]


def _stepped(job: Job, folder: str, seconds: float) -> float:
    """Return the number of frames per second that the learner received and processed.

    Measures at least six rollouts of each process, no matter how many processes share a core.
    """
    import torch

    from torchrl_dist.bench.collect_cells import set_step_s

    torch.set_num_threads(1)
    set_step_s(folder, job.step_s)
    with _batches(job, folder) as batches:
        for _ in range(max(3, 2 * job.layout.messages)):
            next(batches)
        frames, begun = 0, time.perf_counter()
        while time.perf_counter() - begun < seconds or frames < 6 * job.layout.frames:
            frames_now = next(batches).numel()
            frames += frames_now
            until = time.thread_time() + job.learn_s * frames_now
            while time.thread_time() < until:
                pass
        return frames / (time.perf_counter() - begun)


@contextlib.contextmanager
def _batches(job: Job, folder: str) -> Iterator[Iterator[Any]]:
    from torchrl_dist.bench.collect_cells import make_env, make_policy
    from torchrl_dist.bench.collect_peers import PEERS
    from torchrl_dist.bench.collect_plan import Cell
    from torchrl_dist.collect import RPCBatchedCollector

    layout = job.layout
    size = (layout.processes, layout.envs, job.step_s, layout.steps)
    cell = Cell("", job.env, *size, seconds=0.0, timeout_s=_TIMEOUT_S)
    if not layout.alone:
        with PEERS["ours-node" if layout.node_workers else "ours"].open(cell, folder) as batches:
            yield batches
        return
    with RPCBatchedCollector(
        make_env(cell, folder), make_policy(job.env), num_envs=layout.envs,
        frames_per_batch=layout.envs * layout.steps, categorical_action_encoding=True,
    ) as collector:  # fmt: skip
        yield iter(collector)


# ---- the command


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's description and options to ``parser``."""
    command.describe(parser, __doc__, run)
    command.add_names(parser, "--checks", CHECKS)
    command.add_number(parser, "--seconds", float, 1.0, "per measurement")
    command.add_number(parser, "--every", int, 1, "measure only every Nth setting")
    parser.add_argument("--json", type=Path, metavar="FILE", help="append one line per setting")


def run(options: argparse.Namespace) -> int:
    """Measure and print. Return 0. If a measurement fails, raise its error."""
    from torchrl_dist.bench.processes import Launcher

    command.check_folders(options.json)
    lines: list[dict[str, Any]] = []
    with Launcher() as launcher:

        def both(job: Job) -> tuple[float, float]:
            guess = predicted(job, seconds=options.seconds)
            with command.folder_in(command.MEMORY) as folder:
                found = measured(job, folder, options.seconds, launcher)
            lines.append({**asdict(job), "predicted": guess, "measured": found})
            command.say(f"{job.describe()}: predicted {guess:,.0f}, measured {found:,.0f} "
                f"({guess / found - 1:+.0%})")  # fmt: skip
            return guess, found

        guess_of = functools.partial(predicted, seconds=options.seconds)
        checks: dict[str, Callable[..., str]] = {
            "grid": check_grid,
            "verdicts": functools.partial(check_verdicts, guess_of=guess_of),
            "bounds": check_bounds,
        }
        for name in options.checks:
            print(checks[name](both, options.every), flush=True)
    append_json(options.json, "plan", lines)
    return 0


Both = Callable[[Job], tuple[float, float]]


def check_grid(both: Both, every: int = 1) -> str:
    """Return a sentence about the errors of all settings."""
    errors = [abs(guess / found - 1) for guess, found in map(both, grid()[::every])]
    near = sum(error <= 0.2 for error in errors) / len(errors)
    return (
        f"grid: {len(errors)} settings, median error {statistics.median(errors):.1%}, "
        f"{near:.0%} within 20 %, largest {max(errors):.0%}"
    )


def check_verdicts(both: Both, every: int, guess_of: Callable[[Job], float]) -> str:
    """Return how often the planner's choice is the measured winner, and the cost of its errors."""
    agree, regrets = 0, []
    cases = verdicts()[::every]
    for alone, several in cases:
        best = max(several, key=lambda job: guess_of(job))
        (alone_guess, alone_found), (guess, found) = both(alone), both(best)
        chosen = guess >= MIN_GAIN * alone_guess
        winner = found >= MIN_GAIN * alone_found
        agree += chosen == winner
        regret = max(found, alone_found) / (found if chosen else alone_found) - 1
        regrets.append(regret if chosen != winner else 0.0)
        command.say(f"    {'distribute' if chosen else 'do not distribute'}: "
            f"{'right' if chosen == winner else f'wrong, costs {regret:.0%}'}")  # fmt: skip
    return (
        f"verdicts: {agree} of {len(cases)} as measured; a wrong verdict costs at most "
        f"{max(regrets):.0%}"
    )


def check_bounds(both: Both, every: int = 1) -> str:
    """Return whether the predicted bounds are the real ones."""
    says = []
    for name, job, easier in bounds()[::every]:
        (guess, found), (easier_guess, easier_found) = both(job), both(easier)
        says.append(
            f"{name}: made easier, {easier_found / found:.2f} times as fast "
            f"(predicted {easier_guess / guess:.2f})"
        )
    return "bounds: " + "; ".join(says)
