"""The planner's predictions compared with measurements, at toy size."""

from __future__ import annotations

import pytest

from torchrl_dist.bench import plan
from torchrl_dist.bench.plan import Job, bounds, grid, verdicts
from torchrl_dist.planner import Layout, predict


def test_the_grid_covers_what_is_asked_for() -> None:
    jobs = grid()
    assert len(set(jobs)) == len(jobs)
    assert {job.layout.processes for job in jobs} == {2, 8, 32}
    assert {job.step_s for job in jobs} >= {0.0, 0.001, 0.01, 0.1}
    assert {job.layout.steps for job in jobs} >= {1, 16, 256}
    assert {job.durations for job in jobs} == {None, "normal", "lognormal", "slow"}
    assert len(verdicts()) == 10 and all(alone.layout.alone for alone, _ in verdicts())
    assert [name for name, *_ in bounds()] == ["learner", "environment", "messages"]


def test_the_expected_bounds_are_those_of_the_model() -> None:
    from dataclasses import replace

    from tests.test_planner import COSTS

    for name, job, easier in bounds():
        costs = replace(COSTS, idle_s=job.step_s, update_s=job.learn_s, updates_per_frame=1.0)
        first = predict(costs, job.layout, 2)
        assert first.bound_by == name
        costs = replace(costs, idle_s=easier.step_s, update_s=easier.learn_s)
        assert predict(costs, easier.layout, 2).frames_per_s > 1.4 * first.frames_per_s


def test_errors_and_verdicts_are_counted() -> None:
    one, *_ = grid()
    sentence = plan.check_grid(lambda job: (110.0 if job == one else 100.0, 100.0))
    assert "median error 0.0%" in sentence and "100% within 20 %" in sentence
    assert "largest 10%" in sentence

    def all_right(job: Job) -> tuple[float, float]:
        return (100.0, 100.0) if job.layout.alone else (200.0, 150.0)

    def all_wrong(job: Job) -> tuple[float, float]:
        return (100.0, 100.0) if job.layout.alone else (200.0, 80.0)

    right = plan.check_verdicts(all_right, 1, lambda job: 1.0)
    assert "10 of 10 as measured" in right and "at most 0%" in right
    wrong = plan.check_verdicts(all_wrong, 1, lambda job: 1.0)
    assert "0 of 10 as measured" in wrong and "at most 25%" in wrong


@pytest.mark.alone
def test_sleeping_envs_come_near_what_is_predicted(tmp_path, launchers) -> None:
    """Sleeping needs little of a busy machine, and the test only checks a factor."""
    for layout in (Layout(steps=8), Layout(1, 3, 1, 8, True, 1, False)):
        job = Job("sleep", 0.03, layout)
        found = plan.measured(job, tmp_path, 1.0, launchers())
        for path in tmp_path.iterdir():
            path.unlink()
        assert 0.3 < found / plan.predicted(job, 0.3) < 1.3
