from __future__ import annotations

from torchrl_dist.collect.learner.report import CollectReport, summarize
from torchrl_dist.collect.worker.worker import RolloutStats


def test_a_report_joins_what_the_rollouts_say() -> None:
    rollouts = [
        RolloutStats(0, 30, 4, 5, [1.0], [9], 0.5, 0.1, 300, replaced=("env process 1: gone",)),
        RolloutStats(2, 10, 2, 6, [2.0, 3.0], [4, 5], 0.2, 0.3, 100),
        RolloutStats(0, 20, 5, 6, [], [], 0.25, 0.1, 200),
    ]
    known = CollectReport(
        total_frames=1000,
        total_frames_by_worker={0: 750, 2: 250},
        policy_version=7,
        wait_s=0.5,
        lost_workers=("collector1",),
    )
    report = summarize(rollouts, known)
    assert (report.frames, report.messages, report.data_bytes) == (60, 3, 600)
    assert report.frames_by_worker == {0: 50, 2: 10}
    assert report.shares == {0: 0.75, 2: 0.25}
    assert report.policy_lag == 5  # of the oldest row
    assert report.episode_returns == (1.0, 2.0, 3.0)
    assert report.episode_lengths_by_worker == {0: (9,), 2: (4, 5)}
    assert report.collect_s == {0: 0.75, 2: 0.2} and report.write_s == {0: 0.2, 2: 0.3}
    assert report.replaced == ("env process 1: gone, of worker 0",)
