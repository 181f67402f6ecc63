"""Let the processes of a job find one another through a store, with a deadline.

Each process puts a card with its name, machine and pid into the store.
"""

from __future__ import annotations

import functools
import ipaddress
import itertools
import json
import os
import socket
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ..errors import ConfigurationError, DeadlineError, PeerLostError
from .awake import awake, start_clock
from .network import addresses_of, interface_of, source_address
from .peer import Peer
from .roles import assign_roles
from .store import AnsweringStore, StoreSilent, connect_store, keep_store
from .world import World

_INTERFACES = ("TP_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
# If a rank does not confirm the card that rank 0 found first, rank 0 looks for a newer card at this
# interval.
_NEWER_CARD_S = 0.5
# For a search of the node of rank 0: how long each node may take to answer, and the pause before
# all nodes are asked again.
_PROBE_S, _PROBE_EVERY_S = 2.0, 0.2
_LEAST_WAIT_S = 0.001  # with a timeout of 0, a store waits indefinitely
# Counts the sessions that this process entered. All ranks of a job enter sessions in the same
# order.
_entered = itertools.count()


@dataclass
class Member:
    """What a process knows after the rendezvous."""

    world: World
    peers: tuple[Peer, ...]
    pids: tuple[int, ...]
    session_id: str
    store: dist.Store | None
    restore_environment: Callable[[], None]

    def close(self) -> None:
        self.store = None
        self.restore_environment()


def launcher_store(world: World, timeout_s: float) -> tuple[dist.Store | None, World]:
    """Return the job's store and the world. If the launcher does not keep a store, rank 0 keeps one
    at MASTER_ADDR:MASTER_PORT.

    The returned world contains the address at which the store was found. The store may hold keys of
    an earlier start of the ranks, because torchrun's store outlives a restart.
    """
    number = next(_entered)
    if world.world_size == 1:
        return None, world
    if world.master_port is None:
        raise ConfigurationError(
            f"a world of {world.world_size} processes needs a master_port; "
            "set MASTER_PORT, or pass World(master_port=...)"
        )
    launcher_keeps_it = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    keep = world.global_rank == 0 and not launcher_keeps_it
    hosts = () if keep else world.master_hosts
    # Another job may use the same port. Keys therefore contain the job's id under Slurm, where all
    # nodes know the same id.
    mine = f"torchrl_dist/{world.job_id}" if world.launcher == "slurm" else "torchrl_dist"
    store, found = _launcher_store(
        hosts or (world.master_addr,),
        world.master_port,
        f"{mine}/kept",
        keep=keep,
        one_node=world.one_node,
        timeout_s=timeout_s,
    )
    return dist.PrefixStore(f"{mine}/{number}", store), replace(world, master_addr=found)


# kept open, because closing the store would race with ranks that enter the next session
@functools.cache
def _launcher_store(
    hosts: tuple[str, ...],
    port: int,
    mark: str,
    *,
    keep: bool,
    one_node: bool,
    timeout_s: float,
) -> tuple[dist.TCPStore, str]:
    """Return the store and its host. ``mark`` is a key that rank 0 sets in the store."""
    if not keep and len(hosts) > 1:
        return _find_store(hosts, port, mark, timeout_s)
    if not keep:
        return connect_store(hosts[0], port, timeout_s), hosts[0]
    # In a job of several nodes, listen on all addresses, because this machine may resolve its own
    # name to a loopback address.
    store, _ = keep_store(hosts[0], port, timeout_s, everywhere=not one_node)
    store.set(mark, "")
    return store, hosts[0]


def _find_store(
    hosts: tuple[str, ...], port: int, mark: str, timeout_s: float
) -> tuple[dist.TCPStore, str]:
    """Ask one node after the other until the store of rank 0 answers."""
    deadline = awake() + timeout_s
    probe_s = min(_PROBE_S, timeout_s)
    errors: dict[str, Exception | str] = {}
    while awake() < deadline:
        for host in hosts:
            try:
                socket.create_connection((host, port), probe_s).close()
                store = connect_store(host, port, probe_s)
                if AnsweringStore(store).wait([mark], probe_s):
                    store.set_timeout(timedelta(seconds=timeout_s))
                    return store, host
                errors[host] = "it has the store of another job, or its store is not ready"
            except (OSError, dist.DistError, DeadlineError) as error:
                errors[host] = error
            if awake() >= deadline and len(errors) == len(hosts):
                break
        time.sleep(_PROBE_EVERY_S)
    tried = ", ".join(f"{host} ({errors[host]})" for host in hosts if host in errors)
    raise DeadlineError(
        f"found no host where rank 0's store answers at port {port} within {timeout_s:g} s. Check "
        f"that rank 0 is running, and that this machine may connect to it. Tried {tried}. If the "
        "host of rank 0 cannot be reached by name, set MASTER_ADDR to the address of rank 0."
    )


def meet(
    world: World, roles: Mapping[str, int], store: dist.Store | None, timeout_s: float
) -> Member:
    """Exchange cards with all processes; blocks for at most ``timeout_s``.

    Raises:
        ConfigurationError: two processes were given different roles.
        DeadlineError: some processes did not come in time; the message names them.
    """
    seats = assign_roles(roles, world.world_size)
    card: dict[str, Any] = {
        "token": uuid.uuid4().hex[:12],
        "host": world.host,
        "node_rank": world.node_rank,
        "address": None if world.one_node else source_address(world.master_addr),
        "pid": os.getpid(),
        "roles": dict(roles),
        "job_id": world.job_id,
        "restart_count": world.restart_count,
    }
    if store is None:
        cards = [card]
    else:
        start_clock()
        cards = _Exchange(store, seats, timeout_s).run(world.global_rank, card)
    for (role, index), other in zip(seats, cards, strict=True):
        if other["roles"] != card["roles"]:
            raise ConfigurationError(
                f"{role}{index} on {other['host']} entered the session with "
                f"roles={other['roles']}, but this process entered it with {card['roles']}. Use "
                "the same roles in all processes."
            )
    peers = tuple(
        Peer(role, index, rank, cards[rank]["host"]) for rank, (role, index) in enumerate(seats)
    )
    session_id = cards[0]["token"]
    return Member(
        world=replace(
            world,
            job_id=cards[0]["job_id"],
            # the maximum, because torchrun counts a restart only on the node where a rank failed
            restart_count=max(other["restart_count"] for other in cards),
        ),
        peers=peers,
        pids=tuple(other["pid"] for other in cards),
        session_id=session_id,
        store=None if store is None else dist.PrefixStore(session_id, store),
        restore_environment=_set_interface(world, cards) if store else lambda: None,
    )


def make_process_group(
    backends: str | Mapping[str, str] | None, member: Member, timeout_s: float
) -> dist.ProcessGroup | None:
    """Make this role's default torch.distributed group if ``backends`` names a backend for it."""
    me = member.peers[member.world.global_rank]
    backend = backends.get(me.role) if isinstance(backends, Mapping) else backends
    if not backend:
        return None
    if dist.is_initialized():
        raise ConfigurationError(
            "process_group was requested, but torch.distributed is already initialized here; "
            "leave process_group out, or do not initialize torch.distributed before the session."
        )
    store = dist.HashStore() if member.store is None else member.store
    dist.init_process_group(
        backend,
        store=dist.PrefixStore(f"group/{me.role}", store),
        rank=me.index,
        world_size=sum(peer.role == me.role for peer in member.peers),
        timeout=timedelta(seconds=timeout_s),
    )
    return dist.group.WORLD


class _Exchange:
    """Exchange the cards of all ranks through a store that may hold cards of dead processes.

    After a restart, torchrun's store still has the cards of the earlier ranks, and in a job of
    several nodes no environment variable distinguishes the starts. Therefore each card has a random
    token. Rank 0 answers each card that it finds. The answer is at a key that only the process with
    this token reads. That process then confirms that it is alive. When all ranks have confirmed,
    rank 0 publishes the cards.
    """

    def __init__(self, store: dist.Store, seats: list[tuple[str, int]], timeout_s: float) -> None:
        self._seats = seats
        self._timeout_s = timeout_s
        self._deadline = awake() + timeout_s
        self._store = AnsweringStore(store, until=self._deadline)

    def run(self, rank: int, card: dict[Any, Any]) -> list[dict[Any, Any]]:
        """Return all cards; blocks for at most ``timeout_s``. A DeadlineError names the missing
        ranks."""
        try:
            return self._collect(card) if rank == 0 else self._join(rank, card)
        except StoreSilent as error:
            raise DeadlineError(
                f"the store of the job did not answer within {self._timeout_s:g} s: the process "
                "that keeps the store is stopped, or its node cannot be reached any more; check "
                "them, then start the job again"
            ) from error
        except dist.DistError as error:
            raise PeerLostError(
                "the process that keeps the store of the job is gone: "
                f"{str(error).splitlines()[0]}; see the output of rank 0, and start the job again"
            ) from error

    def _collect(self, card: dict[Any, Any]) -> list[dict[Any, Any]]:
        session_id = card["token"]
        self._store.set("card/0", json.dumps(card))
        cards = {0: card}
        pending = list(range(1, len(self._seats)))
        while pending:
            self._wait([f"card/{rank}" for rank in pending], self._absent)
            found = self._store.multi_get([f"card/{rank}" for rank in pending])
            for rank, text in zip(pending, found, strict=True):
                cards[rank] = json.loads(text)
                self._store.set(f"found/{cards[rank]['token']}", session_id)
            confirmations = [f"alive/{session_id}/{rank}" for rank in pending]
            if self._store.wait(confirmations, min(_NEWER_CARD_S, self._left_s())):
                break
            keys = zip(pending, confirmations, strict=True)
            pending = [rank for rank, key in keys if not self._store.check(key)]
            if self._left_s() <= _LEAST_WAIT_S:
                raise self._late(pending)
        everybody = [cards[rank] for rank in range(len(self._seats))]
        self._store.set(f"cards/{session_id}", json.dumps(everybody))
        return everybody

    def _join(self, rank: int, card: dict[Any, Any]) -> list[dict[Any, Any]]:
        self._store.set(f"card/{rank}", json.dumps(card))
        found = f"found/{card['token']}"
        self._wait([found], lambda: self._absent() or [0])
        session_id = self._store.get(found)
        self._store.set(f"alive/{session_id}/{rank}", "")

        def silent() -> list[int]:
            keys = {other: f"alive/{session_id}/{other}" for other in range(1, len(self._seats))}
            return [other for other, key in keys.items() if not self._store.check(key)] or [0]

        self._wait([f"cards/{session_id}"], silent)
        return json.loads(self._store.get(f"cards/{session_id}"))

    def _absent(self) -> list[int]:
        return [r for r in range(len(self._seats)) if not self._store.check(f"card/{r}")]

    def _left_s(self) -> float:
        return max(_LEAST_WAIT_S, self._deadline - awake())

    def _wait(self, keys: list[str], missing: Callable[[], list[int]]) -> None:
        while not self._store.wait(keys, self._left_s()):
            if self._left_s() <= _LEAST_WAIT_S:
                raise self._late(missing())

    def _late(self, missing: list[int]) -> DeadlineError:
        names = [f"{self._seats[r][0]}{self._seats[r][1]} (rank {r})" for r in missing]
        return DeadlineError(
            f"{', '.join(names)} did not join within {self._timeout_s:g} s; {len(self._seats)} "
            "processes were expected. Look at the output of the missing processes, or raise "
            "timeout_s."
        )


def _set_interface(world: World, cards: list[dict[Any, Any]]) -> Callable[[], None]:
    """Choose the network interface of RPC and gloo until the returned function is called.

    By default, RPC and gloo listen on the address to which the node's own name resolves. This
    address is often a loopback address, with which a job of several nodes would hang. A job of
    several nodes therefore uses the interface through which this node reaches another node. In a
    job of one node, RPC and gloo listen on loopback only. Under a launcher, an interface that the
    environment already sets (TP_SOCKET_IFNAME, GLOO_SOCKET_IFNAME) has priority.
    """
    before = {name: os.environ.get(name) for name in _INTERFACES}
    interface = "lo" if world.one_node else _interface_towards_others(world, cards)
    for name in _INTERFACES:
        if interface and (world.launcher == "local" or before[name] is None):
            os.environ[name] = interface

    def restore() -> None:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value

    return restore


def _interface_towards_others(world: World, cards: list[dict[Any, Any]]) -> str | None:
    others = [card["address"] for card in cards if card["node_rank"] != world.node_rank]
    # The name of the first node may resolve to a loopback address on that node.
    usable = [a for a in others if a and not ipaddress.ip_address(a).is_loopback]
    source = source_address((usable or [world.master_addr])[0])
    return None if source is None else interface_of(source)


def own_address(world: World) -> str:
    """Return the address at which this process listens for other processes; RPC listens at this
    address, too."""
    interface = os.environ.get(_INTERFACES[0])
    addresses = addresses_of(interface) if interface else []
    return addresses[0] if addresses else str(socket.getaddrinfo(world.host, 0)[0][4][0])
