"""Determine from the launcher's environment which process of the job this is.

The launcher is torchrun, SLURM, Lightning Fabric or none. Nothing is started, and torch is not
imported.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ..errors import ConfigurationError
from . import proc

# This variable holds the id of the driver's job. Children of local_cluster have the variable, and
# processes that they start inherit it.
JOB_ID_VARIABLE = "TORCHRL_DIST_JOB_ID"

_UUID = r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[0-9a-f]{4}-[0-9a-f]{12}"
_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# Lightning Fabric sets these variables in the script, and in the copies of the script that it
# starts.
_FABRIC = ("WORLD_SIZE", "NODE_RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
_SLURM = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_JOB_ID")
_CHECK = "Check the launcher's variables."


@dataclass(frozen=True)
class World:
    """This process's place in the job, as the launcher assigned it.

    ``job_id`` is equal in all processes of a node, stays the same when the launcher restarts them,
    and differs between two launches. If the launcher does not say on which machine rank 0 is,
    ``master_addr`` is a guess and ``master_hosts`` has all candidates. ``launcher`` is
    ``"torchrun"``, ``"slurm"``, ``"fabric"`` (Lightning Fabric's own launcher, on one node),
    ``"local"`` (the caller of ``local_cluster``, or a child of it) or ``"single"``.

    Example:
        >>> World.from_env({}).world_size  # no launcher
        1
    """

    global_rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    node_rank: int = 0
    host: str = field(default_factory=socket.gethostname)
    master_addr: str = "127.0.0.1"
    master_port: int | None = None
    job_id: str = field(default_factory=lambda: process_stamp(os.getpid()))
    restart_count: int = 0
    launcher: str = "single"
    master_hosts: tuple[str, ...] = ()

    @property
    def one_node(self) -> bool:
        """Whether every process of the job runs on this machine."""
        return self.local_world_size == self.world_size

    @property
    def starter(self) -> str | None:
        """The ``process_stamp`` of a local process. Once that process has ended, the job cannot
        start again.

        None if no such process is known: SLURM, or a user who gave torchrun an id, may start a job
        with the same id again.
        """
        # with torchrun --standalone, the id is a UUID
        named_by_agent = is_stamp(self.job_id) or re.fullmatch(_UUID, self.job_id)
        if self.launcher == "torchrun" and named_by_agent:
            # In a job of several nodes, the job's id is the stamp of rank 0's agent, which may run
            # on another node.
            return process_stamp(os.getppid())
        return self.job_id if is_stamp(self.job_id) else None

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> World:
        """Read ``environ`` (default: this process's environment).

        torchrun's variables have priority over SLURM's, because ``srun torchrun`` sets both. An
        sbatch script counts as a job of one process, because it has SLURM variables but is not a
        task of a step.

        Raises:
            ConfigurationError: some of a launcher's variables are missing or invalid.
        """
        env = os.environ if environ is None else environ
        if "RANK" not in env and all(env.get(name) for name in _FABRIC):
            world = _from_fabric(env)
        elif "RANK" in env or "WORLD_SIZE" in env:
            world = _from_torchrun(env)
        elif "SLURM_PROCID" in env and "SLURM_STEP_ID" in env:
            world = _from_slurm(env)
        else:
            world = cls(job_id=env.get(JOB_ID_VARIABLE) or process_stamp(os.getpid()))
        _check(world)
        return world


# Names of variables with the rank and the number of ranks. These variables are read if ``from_env``
# finds no launcher that it knows.
_OTHER_LAUNCHERS = {
    "SLURM": ("SLURM_PROCID", "SLURM_NTASKS"),
    "Open MPI": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    "MPI": ("PMI_RANK", "PMI_SIZE"),
}


def launched_without_us(env: Mapping[str, str]) -> tuple[int, int, str] | None:
    """Return (rank, size, launcher) if a process that counts as a job of one process looks like one
    of several tasks.

    If the rank is 0, the process may also be the batch script of a SLURM job with several tasks.
    """
    for launcher, (rank, size) in _OTHER_LAUNCHERS.items():
        if env.get(size, "").isdigit() and int(env[size]) > 1:
            # salloc's shell has no rank
            return int(env[rank]) if env.get(rank, "").isdigit() else 0, int(env[size]), launcher
    return None


def process_stamp(pid: int) -> str:
    """Return a unique name of a process: pid, start time in clock ticks, pid namespace, boot id.

    The namespace is included because processes of containers that share a ``/dev/shm`` may have
    equal pids and start times.
    """
    stat = proc.stat(pid)
    return f"{pid}-{stat[proc.START] if stat else 0}-{_namespace()}-{_boot()}"


def has_ended(stamp: str) -> bool:
    """Whether a process of this machine, named by ``process_stamp``, has certainly ended.

    The caller must know that the process ran on this machine, because a process of another boot
    counts as ended. A process in another pid namespace of this machine counts as running.
    """
    pid, _, namespace, boot = stamp.split("-")
    if not boot or not _boot():
        return False
    if boot != _boot():
        return True
    own = proc.stat(os.getpid())
    if namespace != str(_namespace()) or own is None or own[0] != str(os.getpid()):
        return False  # in the ``/proc`` of this namespace, this pid belongs to another process
    stat = proc.stat(int(pid))
    return stat is None or stat[proc.STATE] == "Z" or process_stamp(int(pid)) != stamp


def is_seen_here(stamp: str) -> bool:
    """Whether a ``process_stamp`` is from this machine and pid namespace.

    If so, the pid in the stamp means the same process here as where the stamp was made.
    """
    own = proc.stat(os.getpid())
    place = [str(_namespace()), _boot()]
    return own is not None and own[0] == str(os.getpid()) and stamp.split("-")[2:] == place


def is_stamp(text: str) -> bool:
    """Whether the text is a ``process_stamp``."""
    return re.fullmatch(r"\d+-\d+-\d+-[0-9a-f]*", text) is not None


def is_of_this_boot(stamp: str) -> bool:
    """Whether a ``process_stamp`` was made on this machine since its last boot."""
    return stamp.rpartition("-")[2] == _boot()


def _namespace() -> int:
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text()[:8]
    except OSError:
        return ""


def expand_hosts(nodelist: str) -> list[str]:
    """Expand SLURM's host list syntax: ``"n[1-2,07],gpu3"`` is ``["n1", "n2", "n07", "gpu3"]``."""
    hosts: list[str] = []
    for item in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", nodelist):
        hosts.extend(_expand_item(item))
    return hosts


def _expand_item(item: str) -> list[str]:
    match = re.search(r"\[([^\]]*)\]", item)
    if match is None:
        return [item]
    head, tail = item[: match.start()], item[match.end() :]
    numbers: list[str] = []
    for part in match.group(1).split(","):
        first, _, last = part.partition("-")
        width = len(first)
        numbers += [f"{n:0{width}d}" for n in range(int(first), int(last or first) + 1)]
    return [head + number + rest for number in numbers for rest in _expand_item(tail)]


def _from_torchrun(env: Mapping[str, str]) -> World:
    _require(env, _TORCHRUN, "torchrun")
    local_world_size = _integer(env, "LOCAL_WORLD_SIZE", at_least=1)
    global_rank = _integer(env, "RANK")
    run_id = env.get("TORCHELASTIC_RUN_ID", "none")
    return World(
        global_rank=global_rank,
        world_size=_integer(env, "WORLD_SIZE", at_least=1),
        local_rank=_integer(env, "LOCAL_RANK"),
        local_world_size=local_world_size,
        node_rank=_integer(env, "GROUP_RANK", default=global_rank // local_world_size),
        master_addr=env["MASTER_ADDR"],
        master_port=_integer(env, "MASTER_PORT", at_least=1),
        # "none" is torchrun's default for every job. Use the stamp of the agent instead, which is
        # the parent of this process.
        job_id=process_stamp(os.getppid()) if run_id == "none" else run_id,
        restart_count=_integer(env, "TORCHELASTIC_RESTART_COUNT", default=0),
        launcher="torchrun",
    )


def _from_fabric(env: Mapping[str, str]) -> World:
    world_size, local_rank = _integer(env, "WORLD_SIZE", at_least=1), _integer(env, "LOCAL_RANK")
    if env["MASTER_ADDR"] not in ("127.0.0.1", "localhost"):
        raise ConfigurationError(
            f"Lightning Fabric started this process for several nodes (MASTER_ADDR="
            f"{env['MASTER_ADDR']}), but its variables do not say how many processes a node has. "
            "Start the job with torchrun, which Fabric recognizes."
        )
    return World(
        global_rank=local_rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=world_size,
        master_addr=env["MASTER_ADDR"],
        master_port=_integer(env, "MASTER_PORT", at_least=1),
        # The script that the user started is local rank 0, and the parent of the other ranks.
        job_id=process_stamp(os.getppid() if local_rank else os.getpid()),
        launcher="fabric",
    )


def _from_slurm(env: Mapping[str, str]) -> World:
    _require(env, _SLURM, "SLURM")
    hosts = expand_hosts(env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST", ""))
    if not hosts and "MASTER_ADDR" not in env:
        raise ConfigurationError(
            "This SLURM task has neither SLURM_STEP_NODELIST nor SLURM_JOB_NODELIST. One of these "
            "lists is needed, because rank 0 listens on its first host. Start the job with srun, "
            "or set MASTER_ADDR."
        )
    host = env.get("SLURMD_NODENAME") or socket.gethostname()
    global_rank, node_rank = _integer(env, "SLURM_PROCID"), _integer(env, "SLURM_NODEID")
    job_id = _integer(env, "SLURM_JOB_ID")
    step_id = env["SLURM_STEP_ID"]
    tasks = env.get("SLURM_STEP_TASKS_PER_NODE") or env.get("SLURM_TASKS_PER_NODE", "")
    step_size = env.get("SLURM_STEP_NUM_TASKS", env["SLURM_NTASKS"])
    world_size = _integer({"SLURM_NTASKS": step_size}, "SLURM_NTASKS", at_least=1)
    # Derived from the job id, so that ranks of a job agree, and two jobs on one node differ.
    port = 20_000 + (job_id * 31 + sum(step_id.encode())) % 12_000
    # The list of hosts and the list of tasks per host are both sorted by host name. Node ids have
    # this order only if the job has one component and the usual distribution of tasks.
    place = hosts.index(host) if host in hosts else node_rank
    masters: list[str] = []
    if not env.get("MASTER_ADDR"):
        masters = [host] if global_rank == 0 else _first_component_first(env, hosts)
    return World(
        global_rank=global_rank,
        world_size=world_size,
        local_rank=_integer(env, "SLURM_LOCALID"),
        local_world_size=_tasks_on_node(tasks, place, world_size, len(hosts)),
        node_rank=node_rank,
        host=host,
        master_addr=env.get("MASTER_ADDR") or masters[0],
        master_port=_integer(env, "MASTER_PORT", at_least=1, default=port),
        job_id=f"{job_id}.{step_id}",
        restart_count=_integer(env, "SLURM_RESTART_COUNT", default=0),
        launcher="slurm",
        master_hosts=tuple(masters[1:] and masters),
    )


def _first_component_first(env: Mapping[str, str], hosts: list[str]) -> list[str]:
    """Sort ``hosts`` by their component of a heterogeneous job, because rank 0 is in an early
    component.

    The variable with a component's hosts has PACK in its name in a step, and HET in a batch script
    (in Slurm, at least up to 22.05). With ``--distribution=arbitrary`` rank 0 may be on any node.
    """
    ordered: list[str] = []
    for group in range(_integer(env, "SLURM_HET_SIZE", default=0)):
        for kind in ("HET", "PACK"):
            ordered += expand_hosts(env.get(f"SLURM_JOB_NODELIST_{kind}_GROUP_{group}", ""))
    return list(dict.fromkeys([host for host in ordered if host in hosts] + hosts))


def _tasks_on_node(tasks_per_node: str, place: int, world_size: int, nodes: int) -> int:
    """Return the tasks on a node: ``"4(x2),3"`` means 4, 4 and 3 tasks on nodes 0, 1 and 2."""
    counts: list[int] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", tasks_per_node):
        counts += [int(count)] * int(times or 1)
    if place < len(counts):
        return counts[place]
    if nodes <= 1:
        return world_size
    raise ConfigurationError(
        f"SLURM_STEP_TASKS_PER_NODE={tasks_per_node!r} does not say how many tasks run on host "
        f"{place} of the step; expected a list such as '4(x2),3'. Do not change the variables that "
        "Slurm sets"
    )


def _require(env: Mapping[str, str], names: tuple[str, ...], launcher: str) -> None:
    missing = [name for name in names if not env.get(name)]
    if missing:
        there = ", ".join(f"{name}={env[name]}" for name in names if env.get(name)) or "none"
        raise ConfigurationError(
            f"The environment looks like {launcher}'s but lacks {', '.join(missing)} (found: "
            f"{there}). Start every process with {launcher}, or unset these variables."
        )


def _integer(
    env: Mapping[str, str], name: str, *, at_least: int = 0, default: int | None = None
) -> int:
    text = env.get(name)
    if text is None and default is not None:
        return default
    try:
        value = int(text or "")
    except ValueError:
        raise ConfigurationError(f"{name}={text!r}: expected an integer. {_CHECK}") from None
    if value < at_least:
        raise ConfigurationError(f"{name}={value}: expected at least {at_least}. {_CHECK}")
    return value


def _check(world: World) -> None:
    if world.global_rank >= world.world_size:
        raise ConfigurationError(
            f"rank {world.global_rank} in a world of {world.world_size}: expected a rank below "
            f"the size of the world. {_CHECK}"
        )
    if world.local_rank >= world.local_world_size or world.local_world_size > world.world_size:
        raise ConfigurationError(
            f"local rank {world.local_rank} of {world.local_world_size} in a world of "
            f"{world.world_size}: expected local rank < local world size <= world size. {_CHECK}"
        )
