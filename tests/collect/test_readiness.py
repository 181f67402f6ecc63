from __future__ import annotations

from torchrl_dist.collect.readiness import FirstReady, WaitAll


def test_wait_all_takes_nobody_until_everybody_is_there() -> None:
    rule = WaitAll()
    assert rule.take([2, 0], [0, 1, 2], 99.0) == ()
    assert rule.take([2, 0, 1], [0, 1, 2], 0.0) == (0, 1, 2)


def test_wait_all_does_not_wait_for_the_dead_but_takes_what_they_left() -> None:
    assert WaitAll().take([2, 0], [0, 2], 0.0) == (0, 2)
    assert WaitAll().take([2, 0], [0], 0.0) == (0, 2)


def test_first_ready_takes_one_at_a_time_in_the_order_of_arrival() -> None:
    rule = FirstReady()
    assert rule.take([], [0, 1], 0.0) == ()
    assert rule.take([1, 0], [0, 1], 0.0) == (1,)


def test_frames_per_batch_is_divided_by_what_a_batch_holds() -> None:
    assert WaitAll().rollouts_per_batch(5) == 5
    assert FirstReady().rollouts_per_batch(5) == 1
