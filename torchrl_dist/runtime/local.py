"""Start a session's processes on this machine, from a script, a notebook or a test."""

from __future__ import annotations

import atexit
import contextlib
import os
import socket
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import cloudpickle
import torch.distributed as dist

from ..errors import ConfigurationError, PeerLostError, TorchRLDistError
from .awake import check_timeout
from .forkserver import ForkServer
from .limits import check_limits
from .remote import only_session
from .roles import assign_roles
from .session import Session, joined
from .store import connect_store, keep_store
from .surroundings import Surroundings
from .world import JOB_ID_VARIABLE, World

_LOOPBACK = "127.0.0.1"
# After the end of a session, its children may take this long to run their exit functions.
_EXIT_S = 3.0


@contextlib.contextmanager
def local_cluster(
    roles: Mapping[str, int],
    *,
    init_fn: Callable[[], Any] | None = None,
    env: Mapping[str, str] | None = None,
    timeout_s: float = 60.0,
    threads_per_process: int = 1,
    process_group: str | Mapping[str, str] | None = None,
    fork_server: ForkServer | None = None,
) -> Iterator[Session]:
    """Start the other processes of a job on this machine and join it as its driver.

    The caller becomes the first process of the first role. The other processes are forked from a
    server that has imported torch and torchrl, and call ``serve()``. The children get this
    process's environment (with ``env`` added), working directory, ``sys.argv`` and ``sys.path``.
    Before serving, they run ``init_fn()``, which may register environments. All processes listen on
    the loopback address only.

    A child that dies does not end the job: ``session.lost()`` lists it, and calls to it raise
    PeerLostError. When the block is left, or this process dies for any reason, all children end.

    Args:
        roles: processes per role, e.g. ``{"learner": 1, "collector": 4}``, including the caller.
        timeout_s: deadline for start-up and default deadline of every call.
        threads_per_process: torch threads of each child; this process keeps its setting.
        process_group: as for ``session``.
        fork_server: a running server. This saves the seconds that a new server needs for imports.

    Raises:
        ConfigurationError: the roles are invalid, this process is in a session already, or a
            launcher started it as one of several.
        RemoteError: ``init_fn`` raised in a child.
        PeerLostError: a child died while starting.
        DeadlineError: some children were not ready in time.

    Example:
        >>> with local_cluster({"learner": 1, "collector": 2}) as me:
        ...     [me.call(peer, sum, [1, 2]) for peer in me.of_role("collector")]
        [3, 3]
    """
    if any(count < 0 for count in roles.values()) or not sum(roles.values()):
        raise ConfigurationError(
            f"roles={dict(roles)}: expected counts >= 0, at least one of them above 0."
        )
    check_timeout(timeout_s)
    _refuse_launchers()
    seats = assign_roles(roles, sum(roles.values()))
    with only_session():
        if len(seats) > 1:
            check_limits(len(seats), one_node=True, starts=len(seats), driver=True)
        host = socket.gethostname()
        store, port = keep_store(_LOOPBACK, 0, timeout_s) if len(seats) > 1 else (None, None)
        job = _Job(
            roles=dict(roles),
            host=host,
            port=port,
            job_id=World.from_env({}).job_id,
            surroundings=Surroundings.of_this_process(threads_per_process, env),
            init_fn=None if init_fn is None else cloudpickle.dumps(init_fn),
            timeout_s=timeout_s,
            process_group=process_group,
        )
        if len(seats) == 1:
            with job.joined(0, None) as alone:
                yield alone
            return
        with contextlib.ExitStack() as stack:
            server = fork_server or stack.enter_context(ForkServer())
            children = server.start(job, range(1, len(seats)))
            stack.callback(server.kill_children)

            def describe(rank: int) -> tuple[str, str]:
                role, index = seats[rank]
                return f"{role}{index}", host

            children.wait_ready(timeout_s, describe)
            with contextlib.ExitStack() as inside:
                try:
                    me = inside.enter_context(job.joined(0, store, supervised=True))
                except TorchRLDistError:
                    # raises the child's error instead, which says more
                    children.wait_ready(0, describe)
                    raise
                children.watch(me._lose)
                yield me
            # Wait only if all have left, because a child that has not left hangs and will not exit.
            if me._everybody_left():
                children.wait_gone(_EXIT_S)


def _refuse_launchers() -> None:
    try:
        world = World.from_env()
    except ConfigurationError:  # leftover variables that do not name a rank
        return
    if world.world_size > 1:
        raise ConfigurationError(
            f"local_cluster starts the processes of a job itself, but {world.launcher} started "
            f"this process as rank {world.global_rank} of {world.world_size}, so each rank would "
            "start a job. Write session(roles) instead of local_cluster(roles), and let the other "
            "roles call serve(); or start this program without the launcher. To start a job in "
            "each rank, remove the launcher's variables (RANK, WORLD_SIZE, SLURM_PROCID) from "
            "os.environ"
        )


@dataclass(frozen=True)
class _Job:
    """The arguments of a child; sent to it as a pickle."""

    roles: dict[str, int]
    host: str
    port: int | None
    job_id: str
    surroundings: Surroundings
    init_fn: bytes | None
    timeout_s: float
    process_group: str | Mapping[str, str] | None

    def joined(
        self, rank: int, store: dist.Store | None, supervised: bool = False
    ) -> contextlib.AbstractContextManager[Session]:
        """Return a context manager that enters the session as this rank."""
        size = sum(self.roles.values())
        world = World(
            global_rank=rank,
            world_size=size,
            local_rank=rank,
            local_world_size=size,
            host=self.host,
            master_addr=_LOOPBACK,
            master_port=self.port,
            job_id=self.job_id,
            launcher="local",
        )
        return joined(
            world,
            self.roles,
            store,
            timeout_s=self.timeout_s,
            process_group=self.process_group,
            supervised=supervised,
        )

    def run(self, rank: int, ready: Callable[[], None]) -> None:
        """Run a child from start to end, in a fresh fork of the server."""
        self.surroundings.adopt()
        os.environ[JOB_ID_VARIABLE] = self.job_id  # for World.from_env()
        if self.init_fn is not None:
            cloudpickle.loads(self.init_fn)()
        assert self.port is not None
        store = connect_store(_LOOPBACK, self.port, self.timeout_s)
        ready()
        with contextlib.suppress(PeerLostError):  # the driver failed, and reports its failure
            with self.joined(rank, store) as me:
                me.serve()
        atexit._run_exitfuncs()  # the child ends by os._exit, which does not run exit functions
