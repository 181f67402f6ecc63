from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from torchrl_dist.collect.learner.budget import FrameBudget, plan_shares

# An example's time says nothing where others use the cores.
untimed = settings(deadline=None)


@untimed
@given(
    total=st.integers(1, 5000),
    workers=st.dictionaries(st.integers(0, 9), st.integers(1, 17), min_size=1, max_size=5),
    steps=st.integers(1, 50),
)
def test_shares_add_up_to_the_budget_exactly(total, workers, steps) -> None:
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


def test_a_worker_that_comes_back_joins_the_current_round_not_those_it_missed() -> None:
    budget = FrameBudget(None, in_rounds=True)
    both = {0: 1, 1: 1}
    for worker in both:
        round_, share = budget.next_share(worker, both, 5)
        assert round_ == 0
    budget.give_back(1, round_, share)
    for round_ in range(1, 4):
        assert budget.expected() == [0]
        budget.finish_round()
        assert budget.next_share(0, {0: 1}, 5)[0] == round_
    assert budget.next_share(1, both, 5)[0] == 4 and budget.round == 3


@untimed
@given(
    total=st.integers(1, 3000),
    sizes=st.lists(st.integers(1, 9), min_size=2, max_size=5),
    steps=st.integers(1, 20),
    in_rounds=st.booleans(),
    turns=st.lists(st.integers(0, 99), max_size=60),
    dies_after=st.integers(0, 30),
)
def test_the_total_is_exact_in_any_order_of_requests_and_deaths(
    total: int, sizes: list[int], steps: int, in_rounds: bool, turns: list[int], dies_after: int
) -> None:
    budget = FrameBudget(total, in_rounds)
    alive = dict(enumerate(sizes))
    delivered = 0
    lengths: dict[int, set[int]] = {}
    order = itertools.chain(turns, itertools.count())
    idle: set[int] = set()
    for turn in order:
        worker = sorted(alive)[turn % len(alive)]
        planned = budget.next_share(worker, alive, steps)
        if planned is None:
            idle.add(worker)
            if idle >= alive.keys():  # no worker gets any more
                break
            continue
        idle.clear()
        round_, share = planned
        dies_after -= 1
        if dies_after == 0 and len(alive) > 1:
            del alive[worker]
            budget.give_back(worker, round_, share)
            continue
        delivered += share.frames
        lengths.setdefault(round_, set()).add(share.steps)
    assert delivered == total
    assert budget.remaining == 0
    if in_rounds:
        assert all(len(each) == 1 for each in lengths.values())
