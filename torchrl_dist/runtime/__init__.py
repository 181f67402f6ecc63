"""How the processes of a job start, find and call one another, and end.

    with local_cluster({"learner": 1, "collector": 4}) as session:   # a script or a notebook
        counter = session.remote(session.of_role("collector")[0], Counter)
        counter.call("add", 3)

    with session({"learner": 1, "collector": -1}) as me:             # every rank of torchrun
        ... if me.role == "learner" else me.serve()

RPC unpickles messages, so any program that can connect to a process's RPC port can run code there.
Jobs of one node listen only on loopback, where every local user can connect. A job of several nodes
listens on the interface that TP_SOCKET_IFNAME names.
"""

from __future__ import annotations

from .forkserver import ForkServer
from .local import local_cluster
from .peer import Peer
from .remote import Remote
from .session import Session, current_session, session
from .world import World

__all__ = [
    "ForkServer",
    "Peer",
    "Remote",
    "Session",
    "World",
    "current_session",
    "local_cluster",
    "session",
]
