"""How the processes of a job find one another: through a store, with a deadline."""

from __future__ import annotations

import functools
import itertools
import json
import os
import socket
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta

import torch.distributed as dist

from ..errors import ConfigurationError, DeadlineError
from .remote import Peer
from .roles import assign_roles
from .world import World

_INTERFACES = ("TP_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
# Sessions that this process entered; every rank of a job enters them in the same order.
_entered = itertools.count()


@dataclass
class Member:
    """What a process knows after it met the others."""

    world: World
    peers: tuple[Peer, ...]
    pids: tuple[int, ...]
    session_id: str
    store: dist.Store | None
    restore_environment: Callable[[], None]

    def close(self) -> None:
        self.store = None
        self.restore_environment()


def launcher_store(world: World, timeout_s: float) -> dist.Store | None:
    """The store of the launcher, or one that rank 0 keeps at MASTER_ADDR:MASTER_PORT.

    Keys are prefixed with the restart count: torchrun's store outlives a restart of the ranks.
    """
    number = next(_entered)
    if world.world_size == 1:
        return None
    if world.master_port is None:
        raise ConfigurationError(f"a world of {world.world_size} processes needs a master_port.")
    launcher_keeps_it = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store = _launcher_store(
        world.master_addr,
        world.master_port,
        keep=world.global_rank == 0 and not launcher_keeps_it,
        one_node=world.one_node,
        timeout_s=timeout_s,
    )
    return dist.PrefixStore(f"torchrl_dist/{world.restart_count}/{number}", store)


@functools.cache  # kept for later sessions: closing it would race with ranks that enter the next
def _launcher_store(
    host: str, port: int, *, keep: bool, one_node: bool, timeout_s: float
) -> dist.TCPStore:
    if not keep:
        return connect_store(host, port, timeout_s)
    if one_node:
        return keep_store(host, port, timeout_s)[0]
    # Several nodes: this machine may know its own name by a loopback address, so listen on all.
    timeout = timedelta(seconds=timeout_s)
    return dist.TCPStore(host, port, is_master=True, timeout=timeout, wait_for_workers=False)


def connect_store(host: str, port: int, timeout_s: float) -> dist.TCPStore:
    try:
        return dist.TCPStore(
            host, port, timeout=timedelta(seconds=timeout_s), wait_for_workers=False
        )
    except dist.DistError as error:
        raise DeadlineError(
            f"no store at {host}:{port} within {timeout_s:g} s: is rank 0 running, and may this "
            f"machine connect to it? ({error})"
        ) from error


def keep_store(host: str, port: int, timeout_s: float) -> tuple[dist.TCPStore, int]:
    """A store that listens on ``host``'s address only (a plain TCPStore listens on all), and its
    port; port 0 takes a free one."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(1024)
        port = listener.getsockname()[1]
        store = dist.TCPStore(
            host,
            port,
            is_master=True,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
            master_listen_fd=listener.fileno(),
        )
    except BaseException:
        listener.close()
        raise
    listener.detach()  # the store's daemon owns it now
    return store, port


def meet(
    world: World, roles: Mapping[str, int], store: dist.Store | None, timeout_s: float
) -> Member:
    """Exchange names, hosts and pids with everybody; blocks for at most ``timeout_s``.

    Raises:
        ConfigurationError: two processes were given different roles.
        DeadlineError: somebody did not come in time; names who.
    """
    seats = assign_roles(roles, world.world_size)
    card = {
        "host": world.host,
        "pid": os.getpid(),
        "roles": dict(roles),
        "job_id": world.job_id,
        "session_id": uuid.uuid4().hex[:12],
    }
    if store is None:
        cards = [card]
    else:
        cards = _exchange(store, world.global_rank, seats, card, timeout_s)
    for (role, index), other in zip(seats, cards, strict=True):
        if other["roles"] != card["roles"]:
            raise ConfigurationError(
                f"{role}{index} on {other['host']} entered the session with roles="
                f"{other['roles']}, this process with {card['roles']}. Use the same in all."
            )
    peers = tuple(
        Peer(role, index, rank, cards[rank]["host"]) for rank, (role, index) in enumerate(seats)
    )
    return Member(
        world=replace(world, job_id=cards[0]["job_id"]),
        peers=peers,
        pids=tuple(other["pid"] for other in cards),
        session_id=cards[0]["session_id"],
        store=store,
        restore_environment=_bind_to_loopback(world) if store else lambda: None,
    )


def make_process_group(
    backends: str | Mapping[str, str] | None, member: Member, timeout_s: float
) -> dist.ProcessGroup | None:
    """Make this role's default torch.distributed group, if ``backends`` asks for one."""
    me = member.peers[member.world.global_rank]
    backend = backends if isinstance(backends, str) or not backends else backends.get(me.role)
    if not backend:
        return None
    if dist.is_initialized():
        raise ConfigurationError(
            "process_group was asked for, but torch.distributed is already initialized here."
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


def _exchange(
    store: dist.Store, rank: int, seats: list[tuple[str, int]], card: dict, timeout_s: float
) -> list[dict]:
    store.set(f"card/{rank}", json.dumps(card))
    keys = [f"card/{other}" for other in range(len(seats))]
    try:
        store.wait(keys, timedelta(seconds=timeout_s))
    except dist.DistError as error:
        missing = [
            f"{role}{index} (rank {other})"
            for other, (role, index) in enumerate(seats)
            if not store.check([keys[other]])
        ]
        raise DeadlineError(
            f"{', '.join(missing)} did not join within {timeout_s:g} s; {len(seats)} processes "
            "were expected. Look at what they print, or raise timeout_s."
        ) from error
    return [json.loads(text) for text in store.multi_get(keys)]


def _bind_to_loopback(world: World) -> Callable[[], None]:
    """In a job of one node, let RPC and gloo listen on loopback only, until the returned function
    is called: whoever reaches RPC's port runs code. Under a launcher, set variables win."""
    before = {name: os.environ.get(name) for name in _INTERFACES}
    for name in _INTERFACES:
        if world.launcher == "local" or (world.one_node and before[name] is None):
            os.environ[name] = "lo"

    def restore() -> None:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value

    return restore
