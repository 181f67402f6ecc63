from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from torchrl_dist.collect.readiness import FirstReady, WaitAll, plan_shares


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


@given(
    total=st.integers(1, 5000),
    workers=st.dictionaries(st.integers(0, 9), st.integers(1, 17), min_size=1, max_size=5),
    steps=st.integers(1, 50),
)
def test_shares_add_up_to_the_budget_exactly(
    total: int, workers: dict[int, int], steps: int
) -> None:
    remaining, rounds = total, 0
    while remaining:
        shares = plan_shares(remaining, workers, steps)
        used = sum(share.frames for share in shares.values())
        assert 0 < used <= remaining
        assert len({share.steps for share in shares.values()}) == 1  # so that they can be joined
        assert all(s.num_envs <= workers[w] and s.steps <= steps for w, s in shares.items())
        remaining -= used
        rounds += 1
    full = total // (sum(workers.values()) * steps)
    assert rounds <= full + 2  # one shorter round, one cut step


def test_without_a_limit_every_round_is_full() -> None:
    shares = plan_shares(None, {0: 4, 3: 2}, 16)
    assert {w: (s.num_envs, s.steps) for w, s in shares.items()} == {0: (4, 16), 3: (2, 16)}
    assert plan_shares(0, {0: 4}, 16) == {}
