"""Ranks find one another in a store that may hold cards of earlier ranks."""

from __future__ import annotations

import json
import os
import socket
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch.distributed as dist

from tests.spawn import reserved_port
from torchrl_dist.errors import ConfigurationError, DeadlineError
from torchrl_dist.runtime.rendezvous import _Exchange, _launcher_store, launcher_store
from torchrl_dist.runtime.store import keep_store
from torchrl_dist.runtime.world import World

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


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("absent", "remembered"), [(0, True), (2, True), (2, False)])
def test_all_others_name_a_missing_rank(absent: int, remembered: bool) -> None:
    """Even if the store remembers the cards of earlier ranks."""
    store = dist.HashStore()
    for rank in range(3 * remembered):
        store.set(f"card/{rank}", json.dumps({"token": f"old{rank}", "pid": -1}))
    with ThreadPoolExecutor(3) as pool:
        ranks = [join(pool, store, rank, 1.5) for rank in range(3) if rank != absent]
        name = f"{SEATS[absent][0]}{SEATS[absent][1]} (rank {absent})"
        for rank in ranks:
            with pytest.raises(DeadlineError, match="did not join within 1.5 s") as error:
                rank.result()
            assert name in str(error.value)


def slurm_rank(rank: int, job: str, port: int, hosts: tuple[str, ...]) -> World:
    return World(
        rank, 2, 0, 1, rank, f"host{rank}", hosts[0], port, job, 0, "slurm", hosts if rank else ()
    )


@pytest.mark.timeout(60)
def test_rank_0_is_found_on_its_host_and_another_jobs_store_is_not_used_instead() -> None:
    port = reserved_port()
    # A job of one node listens on its own address only; 127.0.0.1 to 3 stand for three hosts.
    stranger = replace(slurm_rank(0, "1.0", port, ("127.0.0.1",)), local_world_size=2)
    launcher_store(stranger, 10)
    world = slurm_rank(1, "2.0", port, ("127.0.0.1", "127.0.0.2", "127.0.0.3"))
    with pytest.raises(DeadlineError, match=r"127.0.0.2 .*set MASTER_ADDR"):
        launcher_store(world, 0.5)
    with ThreadPoolExecutor(1) as pool:
        searching = pool.submit(launcher_store, world, 20)
        mine = replace(slurm_rank(0, "2.0", port, ("127.0.0.3",)), local_world_size=2)
        kept, _ = launcher_store(mine, 10)
        found, where = searching.result()
    assert where.master_addr == "127.0.0.3"
    kept.underlying_store.set("from rank 0", "here")
    assert found.underlying_store.get("from rank 0") == b"here"
    _launcher_store.cache_clear()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("hosts", [("127.0.0.1",), ("127.0.0.1", "127.0.0.2")], ids=["one", "some"])
def test_connecting_to_a_program_that_stays_silent_ends_at_the_deadline(hosts) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        world = slurm_rank(1, "3.0", port, hosts)
        start = time.monotonic()
        told = f"127.0.0.1:{port} accepts connections.*MASTER_PORT"
        with pytest.raises(DeadlineError, match=told):
            launcher_store(world, 0.5)
        assert time.monotonic() - start < 15
        silent.settimeout(10)
        for _ in range(len(hosts)):  # the connections are closed
            connection, _ = silent.accept()
            with connection:
                connection.settimeout(10)
                while connection.recv(1000):
                    pass


@pytest.mark.parametrize("one_node", [True, False])
def test_rank_0_says_that_its_port_is_taken(one_node: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        world = slurm_rank(0, "4.0", port, ("127.0.0.1",))
        world = replace(world, local_world_size=2 if one_node else 1)
        told = f"kept at 127.0.0.1:{port}: Address already in use.* another MASTER_PORT"
        with pytest.raises(ConfigurationError, match=told):
            launcher_store(world, 5)


@pytest.mark.parametrize("closes", [True, False])
def test_a_store_that_cannot_be_made_closes_its_descriptor_once_and_says_why(monkeypatch, closes):
    others = []

    def fail(*args: object, master_listen_fd: int, **options: object) -> None:
        if closes:
            os.close(master_listen_fd)  # as torch does once it owns it
            others.append(os.open(os.devnull, os.O_RDONLY))  # as another thread may
            assert others == [master_listen_fd]
        raise dist.DistNetworkError("the cause")

    monkeypatch.setattr(dist, "TCPStore", fail)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(DeadlineError, match="the cause"):
        keep_store("127.0.0.1", 0, 5)
    for fd in others:
        os.close(fd)
    assert os.listdir("/proc/self/fd") == before
