"""A few jobs in which processes fail; ``python -m tests.recipes.matrix`` runs all of them."""

from __future__ import annotations

import os
import signal

import pytest

from torchrl_dist.checkpoint import load_checkpoint

from .jobs import assert_gone, progress, started
from .matrix import BASES, ENVIRONMENT, OFTEN, RECIPE, SMALL, Cell, run

RUDE = """
os.chdir("/")

def step(self, action, step=Faulty.step):
    if self.steps % 10 == 0:
        print("ten steps", file=sys.stderr, flush=True)
    return step(self, action)

Faulty.step = step
"""


# Of the others, kill and stop are those of test_apex_job.py and test_recipe_jobs.py, and what an
# environment does in the learner, or an evaluation, of test_training.py and test_evaluator.py.
@pytest.mark.parametrize(("recipe", "place", "fault"), [("impala", "store", "kill")])
def test_a_failing_process_ends_the_job_or_does_not(recipe, place, fault, tmp_path) -> None:
    run(Cell(recipe, place, fault), tmp_path, frames=1000, timeout_s=20.0, collectors=1)


def test_a_run_goes_on_without_a_reader_and_saves_when_the_terminal_is_closed(tmp_path) -> None:
    """Its environment prints, changes the working directory, and ends the process that evaluates
    it."""
    text = ENVIRONMENT.format(fault="exit", place="evaluation", after=5, base=BASES["apex"])
    (tmp_path / "faulty.py").write_text(text + RUDE)
    arguments = ["train", "apex", "--env", "faulty:Faulty-v0", "--output-dir", "run"]
    arguments += [*SMALL, *OFTEN, *RECIPE["apex"], "--eval-interval-frames", "300"]
    arguments += ["--collectors", "2", "--total-frames", "100_000_000"]
    reader, pipe = os.pipe()
    checkpoint = tmp_path / "run/checkpoint.pt"

    def failed(number: int) -> bool:
        learning = progress(tmp_path / "run")()
        return learning and (
            load_checkpoint(checkpoint).extra["history"]["failed_evaluations"] == number
        )

    with started(arguments, tmp_path, pipe=pipe) as job:
        job.until(lambda: failed(2), "evaluations that kill")
        os.close(reader)
        updates = load_checkpoint(checkpoint).counters["updates"]
        job.until(progress(tmp_path / "run", more_than=updates), "progress without a reader")
        processes = job.descendants()
        job.process.send_signal(signal.SIGHUP)
        assert job.wait() == 128 + signal.SIGHUP, job.said()
        assert_gone(processes)
    result = job.result
    assert result["stopped_by"] == "SIGHUP" and result["failed_evaluations"] == 2
    assert result["lost_collectors"] == ["collector1"]  # it took the evaluator's place
    assert load_checkpoint(checkpoint).counters["updates"] == result["updates"]
