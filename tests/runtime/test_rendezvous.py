"""How ranks find one another in a store that may remember others."""

from __future__ import annotations

import json
import time
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
import torch.distributed as dist

from torchrl_dist.errors import DeadlineError
from torchrl_dist.runtime.rendezvous import _Exchange

SEATS = [("learner", 0), ("collector", 0), ("collector", 1)]


def join(pool: ThreadPoolExecutor, store: dist.Store, rank: int, timeout_s: float = 10) -> Future:
    card = {"token": f"new{rank}", "pid": rank}
    return pool.submit(lambda: _Exchange(store, SEATS, timeout_s).run(rank, card))


@pytest.mark.timeout(30)
@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0]])
def test_cards_of_ranks_that_are_gone_are_replaced_by_those_of_the_living(order) -> None:
    store = dist.HashStore()
    for rank in range(3):
        store.set(f"card/{rank}", json.dumps({"token": f"old{rank}", "pid": -1}))
    store.set("cards/old0", "what the ranks before agreed on")
    with ThreadPoolExecutor(3) as pool:
        ranks = []
        for rank in order:
            ranks.append(join(pool, store, rank))
            time.sleep(0.7)  # long enough for rank 0 to look at the old cards, and again
        for cards in [rank.result() for rank in ranks]:
            assert [card["token"] for card in cards] == ["new0", "new1", "new2"]


@pytest.mark.timeout(30)
@pytest.mark.parametrize("remembered", [False, True], ids=["fresh store", "old cards"])
@pytest.mark.parametrize("absent", [0, 2])
def test_who_does_not_come_is_named_by_everybody(remembered: bool, absent: int) -> None:
    store = dist.HashStore()
    if remembered:
        for rank in range(3):
            store.set(f"card/{rank}", json.dumps({"token": f"old{rank}", "pid": -1}))
    with ThreadPoolExecutor(3) as pool:
        ranks = [join(pool, store, rank, 1.5) for rank in range(3) if rank != absent]
        name = f"{SEATS[absent][0]}{SEATS[absent][1]} (rank {absent})"
        for rank in ranks:
            with pytest.raises(DeadlineError, match="did not join within 1.5 s") as error:
                rank.result()
            assert name in str(error.value)
