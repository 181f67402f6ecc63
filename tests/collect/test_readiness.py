from __future__ import annotations

import pytest

from torchrl_dist.collect.learner.readiness import FirstReady, Preempt, Quorum, Readiness, WaitAll
from torchrl_dist.errors import ConfigurationError

TWO = Quorum(min_workers=2, timeout_s=0.5)
TAKEN = [  # rule, arrived, expected, waited, taken
    (FirstReady(), [], [0, 1], 0.0, ()),
    (FirstReady(), [1, 0], [0, 1], 0.0, (1,)),
    (TWO, [3, 0], [0, 1, 3], 0.4, ()),
    (TWO, [3, 0], [0, 1, 3], TWO.deadline_s, (0, 3)),
    (TWO, [3], [0, 1, 3], 99.0, ()),
    (TWO, [3], [3], 0.0, (3,)),  # fewer live than the quorum wants
]


@pytest.mark.parametrize("rule", [WaitAll(), Preempt(), Quorum(1, 60.0)])
def test_no_rollout_is_taken_until_all_have_arrived(rule: Readiness) -> None:
    assert rule.take([2, 0], [0, 1, 2], 59.0) == ()
    assert rule.take([2, 0, 1], [0, 1, 2], 0.0) == (0, 1, 2)
    assert rule.take([2, 0], [0, 2], 0.0) == (0, 2)  # a dead worker is not awaited,
    assert rule.take([2, 0], [0], 0.0) == (0, 2)  # but what it left is taken


@pytest.mark.parametrize(("rule", "arrived", "expected", "waited_s", "taken"), TAKEN)
def test_a_quorum_is_taken_after_the_deadline_and_awaited_beyond_it(
    rule, arrived, expected, waited_s, taken
) -> None:
    assert rule.take(arrived, expected, waited_s) == taken


@pytest.mark.parametrize(("fraction", "needed"), [(0.6, 3), (0.5, 3), (0.2, 1), (1.0, 5)])
def test_preempt_cuts_once_a_fraction_of_the_workers_is_there(fraction: float, needed: int) -> None:
    rule = Preempt(fraction, min_part=0.25)
    expected = [0, 1, 2, 3, 4]
    for arrived in range(6):
        cut = rule.least_part(expected[:arrived], expected)
        assert cut == (0.25 if arrived >= needed else None)


def test_rules_without_preemption_never_cut() -> None:
    for rule in (WaitAll(), FirstReady(), Quorum(1, 0.0)):
        assert not rule.cuts
        assert rule.least_part([0, 1, 2], [0, 1, 2, 3]) is None


def test_frames_per_batch_is_divided_by_what_a_batch_holds() -> None:
    assert WaitAll().rollouts_per_batch(5) == 5
    assert FirstReady().rollouts_per_batch(5) == 1
    assert Quorum(1, 1.0).rollouts_per_batch(5) == 5


def test_a_quorum_of_more_workers_than_there_are_is_refused() -> None:
    assert Quorum(3, 1.0).rollouts_per_batch(3) == 3
    with pytest.raises(
        ConfigurationError, match=r"min_workers=4.*at most 3, the number of workers"
    ):
        Quorum(4, 1.0).rollouts_per_batch(3)


@pytest.mark.parametrize(
    "build",
    [
        lambda: Quorum(0, 1.0),
        lambda: Quorum(1, -1.0),
        lambda: Quorum(1, float("inf")),
        lambda: Preempt(0.0),
        lambda: Preempt(1.5),
        lambda: Preempt(0.6, 0.0),
    ],
)
def test_rules_that_cannot_work_are_refused(build: object) -> None:
    with pytest.raises(ConfigurationError, match="expected"):
        build()
