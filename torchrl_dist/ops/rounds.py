"""Measure how soon the ranks of a job answer each other, and by how much their clocks differ."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from ..runtime import Session, World, current_session, local_cluster, session

_TRIES = 5


@dataclass(frozen=True)
class Rounds:
    """What the driver measured. A rank's number is its index in ``names``. Times are medians.

    Attributes:
        names: each rank with its node, such as ``"rank3 on node7"``.
        store_s: time to write a key to the job's store and read it back, on the slowest rank.
        all_reduce_s: time of an all-reduce of one number over all ranks.
        rpc_s: time of a call and its answer, for each pair (caller, called rank).
        skew_s: how many seconds each rank's clock is ahead of rank 0's.
        software: versions of packages on each rank.
        elsewhere: by host name, the result of ``look`` on one rank of each node except the
            driver's.
    """

    names: tuple[str, ...]
    store_s: float
    all_reduce_s: float
    rpc_s: Mapping[tuple[int, int], float]
    skew_s: tuple[float, ...]
    software: tuple[frozenset[tuple[str, Any]], ...]
    elsewhere: Mapping[str, Any]


class Served:
    """What :func:`measure` returns on all ranks except the driver. Only the driver has the
    figures."""


def measure(
    software: Callable[[], Mapping[str, Any]], look: Callable[[], Any], *, timeout_s: float
) -> Rounds | Served:
    """Wait until all ranks have joined, and measure. A process without a launcher starts a second
    process as its partner.

    ``software`` and ``look`` are called in other ranks, too. Blocks. Each wait ends after at most
    ``timeout_s``.

    Raises:
        TorchRLDistError: some ranks do not join or answer in time.
    """
    with _job(timeout_s) as me:
        if not me.is_driver:
            me.serve()
            return Served()
        return _measure(me, software, look)


@contextlib.contextmanager
def _job(timeout_s: float) -> Iterator[Session]:
    if World.from_env().launcher == "single":
        opened = local_cluster({"rank": 2}, timeout_s=timeout_s, process_group="gloo")
    else:
        opened = session({"rank": -1}, timeout_s=timeout_s, process_group="gloo")
    with opened as me:
        yield me


def _measure(me: Session, software: Callable, look: Callable) -> Rounds:
    peers = me.peers
    rpc_s: dict[tuple[int, int], float] = {}
    # one rank calls at a time, because concurrent calls slow each other down
    for peer in peers[:-1]:
        answers = me.call(peer, _call_those_above)
        rpc_s |= {(peer.global_rank, rank): seconds for rank, seconds in answers.items()}
    skew_s = [0.0]
    for peer in peers[1:]:
        asked, theirs = time.time(), me.call(peer, time.time)
        skew_s.append(theirs - (asked + time.time()) / 2)
    waiting = [me.submit(peer, _all_reduce) for peer in peers[1:]]
    all_reduce_s = [_all_reduce(), *(each.result(2 * me.timeout_s) for each in waiting)]
    others = {peer.host: peer for peer in reversed(peers) if peer.host != me.me.host}
    return Rounds(
        names=tuple(f"{peer.name} on {peer.host}" for peer in peers),
        store_s=max(me.call(peer, _ask_store) for peer in peers),
        all_reduce_s=max(all_reduce_s),
        rpc_s=rpc_s,
        skew_s=tuple(skew_s),
        software=tuple(frozenset(me.call(peer, software).items()) for peer in peers),
        elsewhere={host: me.call(peer, look) for host, peer in others.items()},
    )


def _call_those_above() -> dict[int, float]:
    """Return, by rank, how long each higher rank takes to answer this rank."""
    me = current_session()
    times = {}
    for peer in me.peers[me.me.global_rank + 1 :]:
        times[peer.global_rank] = _usual(partial(me.call, peer, time.time))
    return times


def _ask_store() -> float:
    me = current_session()
    store = me._member.store
    if store is None:  # a job of one process
        return 0.0
    key = f"doctor/{me.me.global_rank}"

    def write_and_read() -> None:
        store.set(key, "x")
        store.get(key)

    return _usual(write_and_read)


def _all_reduce() -> float:
    number = torch.ones(1)
    return _usual(lambda: dist.all_reduce(number))


def _usual(what: Callable[[], Any]) -> float:
    """Return the median duration of a call in seconds, without the first call, which connects."""
    what()
    times = []
    for _ in range(_TRIES):
        start = time.perf_counter()
        what()
        times.append(time.perf_counter() - start)
    return median(times)
