"""Examine a machine for ``torchrl-dist doctor``. The module ``doctor`` interprets the result."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from .. import own_files
from ..errors import TorchRLDistError
from ..replay.law.kernel import find_kernel
from ..replay.node import leftovers, lock
from ..replay.node.mapping import file_system_of
from ..runtime import World
from ..runtime.world import launched_without_us

PACKAGES = ("torch", "torchrl", "tensordict", "gymnasium", "numpy")
INTERFACE_VARIABLES = ("TP_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_PROBED_BYTES = 1 << 20
_ASK_S = 10.0
# Program that exits with 0 if another process holds the lock on a file. The program does not import
# the package, because the import takes seconds.
_IS_LOCKED = """
import importlib.util, os, sys
sys.path[:0] = [sys.argv[2]]
spec = importlib.util.spec_from_file_location("lock", sys.argv[1])
lock = importlib.util.module_from_spec(spec)
sys.modules["lock"] = lock
spec.loader.exec_module(lock)
sys.exit(not lock.is_held(os.open(sys.argv[3], os.O_RDWR), 0))
"""


@dataclass(frozen=True)
class Folder:
    """A folder for replay directories. ``error`` says why the folder cannot be used at all."""

    path: str
    file_system: str = ""
    total_bytes: int = 0
    free_bytes: int = 0
    error: str | None = None
    fallocate_error: str | None = None
    lock_error: str | None = None


@dataclass(frozen=True)
class Cuda:
    """``built`` is the CUDA version for which torch was built, or None if torch was built for the
    CPU."""

    built: str | None = None
    devices: int = 0
    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class Probe:
    """One machine as one process sees it. Sizes are in bytes. A limit of None means no limit."""

    host: str
    python: str
    gil: bool
    versions: Mapping[str, str | None]
    kernel: str  # "c", "numpy", or why neither kernel can be used
    torchrl_trees: str | None  # the error if TorchRL's trees cannot be loaded
    folder: Folder
    open_files: int | None
    user_processes: int | None
    cores: int  # cores of the machine
    usable_cores: int  # cores on which this process may be scheduled
    cpu_quota: float | None  # CPU time that the cgroup allows, in cores
    memory_limit: int | None  # bytes that the cgroup allows
    omp_threads: int | None  # the value of OMP_NUM_THREADS
    processes: int  # processes expected on this machine
    world_size: int  # processes expected in the job
    planned_bytes: int  # size of the replay buffer here
    launcher: str
    several_nodes: bool
    world_error: str | None  # what is wrong with the launcher's variables
    lone: str | None  # the launcher, if it started this process as a task but not as a rank
    interfaces: tuple[str, ...]
    # network interfaces that environment variables name, by variable
    wanted_interfaces: Mapping[str, str]
    address: str | None  # address of the host name
    master: tuple[str, str | None] | None  # the name in MASTER_ADDR, and its address
    ignored_signals: tuple[str, ...]
    kill_wait_s: int | None  # Slurm's KillWait, None without Slurm
    leftovers: tuple[leftovers.Found, ...]
    uid: int
    cuda: Cuda
    unix_time_s: float = field(default_factory=time.time)


def probe(
    folder: Path,
    *,
    processes: int | None = None,
    planned_bytes: int = 0,
    env: Mapping[str, str] | None = None,
    proc: Path = Path("/proc"),
    cgroups: Path = Path("/sys/fs/cgroup"),
) -> Probe:
    """Examine this machine. Makes and removes one small file in ``folder``.

    Args:
        folder: where replay directories will be.
        processes: number of processes on this machine. The default is the number that the launcher
            started here, or 4 without a launcher.
        planned_bytes: size of the replay buffer.
        env, proc, cgroups: used instead of this process's environment, /proc and /sys/fs/cgroup.
    """
    env = os.environ if env is None else env
    world, world_error = None, None
    try:
        world = World.from_env(env)
    except TorchRLDistError as error:
        world_error = str(error)
    launched = world is not None and world.launcher != "single"
    lone = launched_without_us(env)
    master = env.get("MASTER_ADDR")
    omp = env.get("OMP_NUM_THREADS", "")
    return Probe(
        host=socket.gethostname(),
        python=platform.python_version(),
        gil=getattr(sys, "_is_gil_enabled", lambda: True)(),
        versions={name: version_of(name) for name in PACKAGES},
        kernel=_kernel(),
        torchrl_trees=_torchrl_trees(),
        folder=look_at(folder, proc / "self/mounts"),
        open_files=_limit(resource.RLIMIT_NOFILE),
        user_processes=_limit(resource.RLIMIT_NPROC),
        cores=os.cpu_count() or 1,
        usable_cores=len(os.sched_getaffinity(0)),
        cpu_quota=cpu_quota(proc / "self/cgroup", cgroups),
        memory_limit=memory_limit(proc / "self/cgroup", cgroups),
        omp_threads=int(omp) if omp.isdigit() and int(omp) else None,
        processes=processes or (world.local_world_size if launched and world else 4),
        world_size=world.world_size if launched and world else processes or 4,
        planned_bytes=planned_bytes,
        launcher="?" if world is None else world.launcher,
        several_nodes=world is not None and not world.one_node,
        world_error=world_error,
        lone=lone[2] if lone is not None and not launched else None,
        interfaces=tuple(name for _, name in socket.if_nameindex()),
        wanted_interfaces={name: env[name] for name in INTERFACE_VARIABLES if env.get(name)},
        address=_address(socket.gethostname()),
        master=(master, _address(master)) if master else None,
        ignored_signals=tuple(
            number.name
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
            if signal.getsignal(number) is signal.SIG_IGN
        ),
        kill_wait_s=_kill_wait_s() if env.get("SLURM_JOB_ID") else None,
        leftovers=tuple(leftovers.find([folder])),
        uid=os.getuid(),
        cuda=_cuda(),
    )


def look_at(folder: Path, mounts: Path = Path("/proc/self/mounts")) -> Folder:
    """Return a folder's file system, its space, and whether files can be allocated and locked."""
    path = str(folder)
    try:
        space = os.statvfs(folder)
        kind, _ = file_system_of(folder, mounts)
        fd, name = tempfile.mkstemp(prefix=".torchrl_dist-doctor-", dir=folder)
    except OSError as error:
        return Folder(path, error=f"{error.strerror} ({error.filename or path})")
    try:
        return Folder(
            path,
            kind,
            space.f_blocks * space.f_frsize,
            space.f_bavail * space.f_frsize,
            None,
            _fallocate_error(fd),
            _lock_error(fd, name),
        )
    finally:
        os.close(fd)
        os.unlink(name)


def _fallocate_error(fd: int) -> str | None:
    try:
        os.posix_fallocate(fd, 0, _PROBED_BYTES)
    except OSError as error:
        return error.strerror
    return None


def _lock_error(fd: int, name: str) -> str | None:
    """Test the kind of locks that buffers use (locks of open file descriptions). Return what is
    wrong, or None."""
    try:
        lock.lock_byte(fd, 0)
    except OSError as error:
        return error.strerror
    package = Path(own_files.__file__).parents[1]
    command = [sys.executable, "-c", _IS_LOCKED, lock.__file__, str(package), name]
    try:
        seen = subprocess.run(command, timeout=_ASK_S, stderr=subprocess.DEVNULL)
    except subprocess.TimeoutExpired:
        return f"another process did not report within {_ASK_S:g} s whether it sees a lock"
    return "another process does not see a lock" if seen.returncode else None


def cpu_quota(own: Path, root: Path) -> float | None:
    """Return the CPU time that the cgroup (version 1 or 2) allows this process, in cores. None
    means no limit."""
    quotas = []
    for group in _groups(own, root, "cpu"):
        with contextlib.suppress(OSError, ValueError):
            most, each = (group / "cpu.max").read_text().split()
            quotas.append(int(most) / int(each))
        with contextlib.suppress(OSError, ValueError):
            quota_us = int((group / "cpu.cfs_quota_us").read_text())
            period_us = int((group / "cpu.cfs_period_us").read_text())
            quotas += [quota_us / period_us] if quota_us > 0 else []
    return min(quotas, default=None)


def memory_limit(own: Path, root: Path) -> int | None:
    """Return how many bytes the cgroup allows this process. Files in /dev/shm count towards this
    limit. None means no limit."""
    limits = []
    for group in _groups(own, root, "memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):
            with contextlib.suppress(OSError, ValueError):
                limits.append(int((group / name).read_text()))
    limits = [
        limit for limit in limits if limit < 1 << 60
    ]  # version 1 writes a huge number for "no limit"
    return min(limits, default=None)


def _groups(own: Path, root: Path, controller: str) -> list[Path]:
    """Return the folders of this process's cgroup and of its parents."""
    found = []
    with contextlib.suppress(OSError):
        for line in own.read_text().splitlines():
            number, controllers, path = line.split(":", 2)
            if number != "0" and controller not in controllers.split(","):
                continue
            top = root if number == "0" else root / controller
            inner = top / path.lstrip("/")
            # The path may exist only outside this process's container. In that case, only the
            # top folder exists inside.
            found += [inner, *(up for up in inner.parents if up == top or top in up.parents)]
    return found


def version_of(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _kernel() -> str:
    try:
        return "numpy" if find_kernel() is None else "c"
    except (TorchRLDistError, OSError, AttributeError) as error:
        return str(error)


def _torchrl_trees() -> str | None:
    try:
        import torchrl._torchrl  # noqa: F401
    except ImportError as error:
        # leaves out the path that precedes "undefined symbol: ..."
        return str(error).split(": ", 1)[-1][:60]
    return None


def _cuda() -> Cuda:
    import torch

    count = torch.cuda.device_count()
    names = tuple(torch.cuda.get_device_name(k) for k in range(count))
    return Cuda(torch.version.cuda, count, names)


def _limit(kind: int) -> int | None:
    # the hard limit, because a session raises the soft limit to it
    hard = resource.getrlimit(kind)[1]
    return None if hard == resource.RLIM_INFINITY else hard


def _address(host: str) -> str | None:
    try:
        return str(socket.getaddrinfo(host, None)[0][4][0]).partition("%")[0]
    except OSError:
        return None


def _kill_wait_s() -> int | None:
    if shutil.which("scontrol") is None:
        return None
    with contextlib.suppress(OSError, ValueError, subprocess.SubprocessError):
        asked = ["scontrol", "show", "config"]
        said = subprocess.run(asked, capture_output=True, text=True, timeout=_ASK_S).stdout
        for line in said.splitlines():
            if line.startswith("KillWait"):
                return int(line.split("=")[1].split()[0])
    return None
