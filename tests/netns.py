"""Several hosts on one machine, for tests: network namespaces joined by a switch.

    with hosts(3) as network:
        first = network[0].start([sys.executable, "-c", "..."])
        network[2].unplug()

Each host has its own network stack, address, hostname, boot id and /dev/shm. Other files and
process ids are shared. Nothing outside the namespaces changes, and nothing in them reaches the
outside. This needs root (CAP_SYS_ADMIN and CAP_NET_ADMIN) and iproute2; ``missing()`` says what is
missing.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import itertools
import os
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import psutil

from tests import warm
from tests.spawn import rank_script, wait_until

INTERFACE = "eth0"
_SUBNET = "10.77.0."
_SUBNET6 = "fd77::"
_PREFIX = "rlhosts"
_BOOT_ID = "/proc/sys/kernel/random/boot_id"
_numbers = itertools.count()
_CLONE_NEWNET, _TUNSETIFF, _IFF_TAP = 0x40000000, 0x400454CA, 0x0002 | 0x1000  # without a header
# Runs in the command's own mount and UTS namespaces, so only the command sees its changes. There is
# no resolver, so lookups of names that are not in the hosts file fail at once.
_BECOME_HOST = (
    'hostname "$1" && mount --bind "$2/$1-names" /etc/hosts'
    f' && mount --bind "$2/$1-boot" {_BOOT_ID}'
    ' && mount --bind /dev/null /etc/resolv.conf && mount --bind "$2/$1" /dev/shm'
    ' && shift 2 && exec "$@"'
)


@dataclass
class Host:
    """One host. ``start`` runs commands on it; most other methods disturb it."""

    name: str
    address: str
    namespace: str
    folder: Path
    _switch: str
    _port: str
    _started: list[warm.Running] = field(default_factory=list)

    @property
    def shm(self) -> Path:
        """The host's /dev/shm, as the test sees it."""
        return self.folder / self.name

    def start(self, command: Sequence[str], **options: object) -> subprocess.Popen:
        """Start a command and return its process. ``options`` are those of ``Popen``."""
        # not "ip netns exec", which mounts a /sys without the cgroups that slurmd needs
        enter = ["nsenter", f"--net=/run/netns/{self.namespace}", "unshare", "--mount", "--uts"]
        become = ["sh", "-c", _BECOME_HOST, "sh", self.name, str(self.folder)]
        process = subprocess.Popen([*enter, *become, *command], **options)  # type: ignore[call-overload]
        self._started.append(process)
        return process

    def start_program(
        self, command: Sequence[str], env: dict[str, str], output: IO[str]
    ) -> warm.Running:
        """Start a Python program, with stdout and stderr in one file."""
        if warm.is_cold():
            return self.start(command, env=env, stdout=output, stderr=subprocess.STDOUT)
        own = warm.Host(
            self.name,
            f"/run/netns/{self.namespace}",
            {
                "/etc/hosts": str(self.folder / f"{self.name}-names"),
                "/etc/resolv.conf": os.devnull,
                _BOOT_ID: str(self.folder / f"{self.name}-boot"),
                "/dev/shm": str(self.shm),
            },
        )
        process = warm.start(command, env=env, stdout=output, stderr=subprocess.STDOUT, host=own)
        self._started.append(process)
        return process

    def unplug(self) -> None:
        """Pull the host's cable: packets in both directions are lost without notice."""
        _ip("-n", self._switch, "link", "set", self._port, "down")

    def plug_in(self) -> None:
        _ip("-n", self._switch, "link", "set", self._port, "up")

    def slow_down(self, mbit: float) -> None:
        """Limit how much the host sends per second from now on."""
        shape = ["tbf", "rate", f"{mbit}mbit", "burst", "16kb", "latency", "400ms"]
        command = ["tc", "-n", self.namespace, "qdisc", "add", "dev", INTERFACE, "root", *shape]
        subprocess.run(command, check=True, capture_output=True, timeout=30)

    def cut_off_from(self, other: Host) -> None:
        """Drop packets to one other host; both still reach all others."""
        _ip("-n", self.namespace, "route", "add", "blackhole", other.address)

    def reach_again(self, other: Host) -> None:
        _ip("-n", self.namespace, "route", "del", "blackhole", other.address)

    def pids(self) -> list[int]:
        return [int(pid) for pid in _ip("netns", "pids", self.namespace).split()]

    def pause(self) -> None:
        """Stop all processes of the host, like a suspended machine; its kernel still answers."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        """End all processes of the host with SIGKILL; block until they are gone."""
        deadline = time.monotonic() + 10
        while pids := [pid for pid in self.pids() if psutil.pid_exists(pid)]:
            assert time.monotonic() < deadline, f"processes of {self.name} do not die: {pids}"
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            for process in self._started:  # our children, which would stay zombies
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(1)
            time.sleep(0.02)

    def crash(self) -> None:
        """Let the host fall silent, as a power failure looks to the others."""
        self.unplug()
        self.kill()

    def _signal(self, number: signal.Signals) -> None:
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)


@contextlib.contextmanager
def hosts(count: int, *, ipv6: bool = False, way_s: float = 0.0) -> Iterator[list[Host]]:
    """Start and connect ``count`` hosts; with ``ipv6``, their only IPv4 address is loopback's.

    At the end their processes are killed and everything is removed, also after a failure.

    Args:
        way_s: how long a packet travels from any host to another.
    """
    _remove_leftovers()
    prefix = f"{_PREFIX}-{os.getpid()}-{next(_numbers)}"
    switch = f"{prefix}-switch"
    folder = Path(tempfile.mkdtemp(prefix=f"{prefix}-", dir="/dev/shm"))
    subnet = _SUBNET6 if ipv6 else _SUBNET
    network = [
        Host(f"host{k}", f"{subnet}{k + 1}", f"{prefix}-{k}", folder, switch, f"port{k}")
        for k in range(count)
    ]
    cables = contextlib.ExitStack()
    try:
        _ip("netns", "add", switch)
        _ip("-n", switch, "link", "add", "bridge", "type", "bridge")
        _ip("-n", switch, "link", "set", "bridge", "up")
        for host in network:
            host.shm.mkdir()
            # as on Debian: the own name is a loopback address, which is useless to others
            names = {other.address: other.name for other in network if other is not host}
            names |= {"127.0.0.1": "localhost", "127.0.1.1": host.name}
            lines = [f"{address} {name}\n" for address, name in names.items()]
            (folder / f"{host.name}-names").write_text("".join(lines))
            (folder / f"{host.name}-boot").write_text(f"{uuid.uuid4()}\n")
            _ip("netns", "add", host.namespace)
            if way_s:
                cables.enter_context(_long_cable(switch, host, way_s / 2))
            else:
                cable = ("link", "add", host._port, "type", "veth")
                _ip("-n", switch, *cable, "peer", "name", INTERFACE, "netns", host.namespace)
            _ip("-n", switch, "link", "set", host._port, "master", "bridge", "up")
            address = [f"{host.address}/64", "nodad"] if ipv6 else [f"{host.address}/24"]
            _ip("-n", host.namespace, "addr", "add", *address, "dev", INTERFACE)
            for interface in ("lo", INTERFACE):
                _ip("-n", host.namespace, "link", "set", interface, "up")
        yield network
    finally:
        cables.close()
        for host in network:
            with contextlib.suppress(subprocess.CalledProcessError):  # it was never created
                host.kill()
        for namespace in _namespaces():
            if namespace.startswith(f"{prefix}-"):
                _ip("netns", "del", namespace)
        shutil.rmtree(folder)


@contextlib.contextmanager
def _long_cable(switch: str, host: Host, way_s: float) -> Iterator[None]:
    """A delayed link between the switch and a host.

    This program reads and writes both ends, because not every kernel has netem.
    """
    ends = [_tap(switch, host._port), _tap(host.namespace, INTERFACE)]
    command = [sys.executable, "-S", "-c", _CARRY, *map(str, ends), str(way_s)]
    with subprocess.Popen(command, pass_fds=ends) as carrier:
        for end in ends:
            os.close(end)
        try:
            yield
        finally:
            carrier.kill()


# Carries packets between two descriptors, each after a delay in seconds.
_CARRY = """
import collections, os, select, sys, time
ends, way_s = [int(end) for end in sys.argv[1:3]], float(sys.argv[3])
waiting = collections.deque()
arrived = select.poll()  # unlike select.select, it takes descriptors above 1,023
for end in ends:
    os.set_blocking(end, False)
    arrived.register(end, select.POLLIN)
while True:
    left_ms = max(0.0, waiting[0][0] - time.monotonic()) * 1e3 if waiting else None
    for end, _ in arrived.poll(left_ms):
        try:
            packet = os.read(end, 2**16)
        except OSError:  # the device is down
            continue
        waiting.append((time.monotonic() + way_s, ends[1 - ends.index(end)], packet))
    while waiting and waiting[0][0] <= time.monotonic():
        _, end, packet = waiting.popleft()
        try:
            os.write(end, packet)
        except OSError:
            pass
"""


def _tap(namespace: str, name: str) -> int:
    """Create a network device whose packets are read from and written to this descriptor."""
    libc = ctypes.CDLL(None, use_errno=True)
    home = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    there = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
    try:
        assert libc.setns(there, _CLONE_NEWNET) == 0, os.strerror(ctypes.get_errno())
        tap = os.open("/dev/net/tun", os.O_RDWR | os.O_CLOEXEC)
        fcntl.ioctl(tap, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TAP))
        return tap
    finally:
        assert libc.setns(home, _CLONE_NEWNET) == 0, os.strerror(ctypes.get_errno())
        os.close(home)
        os.close(there)


@dataclass(repr=False)
class HostJob:
    """One job on several hosts: an agent of torchrun, or a task, per host."""

    processes: list[warm.Running]
    logs: list[Path]

    def wait(self, timeout_s: float, hosts: Sequence[int] | None = None) -> list[int]:
        """Block until the processes of these hosts (default: all) have ended; return exit codes."""
        deadline = time.monotonic() + timeout_s
        chosen = self.processes if hosts is None else [self.processes[k] for k in hosts]
        try:
            return [p.wait(max(0.1, deadline - time.monotonic())) for p in chosen]
        except subprocess.TimeoutExpired:
            raise AssertionError(f"did not end within {timeout_s:g} s\n{self}") from None

    def log(self, host: int) -> str:
        return self.logs[host].read_text(errors="replace")

    def __repr__(self) -> str:
        codes = [process.poll() for process in self.processes]
        parts = [
            f"--- host {k}: {codes[k]} ---\n{self.log(k)[-20_000:]}" for k in range(len(codes))
        ]
        return "\n".join(parts)


def run_torchrun(
    network: list[Host],
    body: Callable,
    arguments: dict[str, Any],
    folder: Path,
    *,
    nproc: Sequence[int] | None = None,
    nnodes: str | None = None,
    max_restarts: int = 0,
    rdzv_conf: str = "timeout=60",
    rdzv_id: str | None = "test",
) -> HostJob:
    """Start ``body(**arguments)`` in ``nproc[k]`` ranks (default: one) on each host under torchrun.
    The rendezvous is on the first host. Logs go to ``folder``."""
    script = rank_script(body, arguments, folder)
    nproc = nproc or [1] * len(network)
    common = [sys.executable, "-m", "torch.distributed.run"]
    common += [f"--nnodes={nnodes or len(network)}", f"--max-restarts={max_restarts}"]
    common += ["--rdzv-backend=c10d", "--monitor-interval=0.1"]
    common += [] if rdzv_id is None else [f"--rdzv-id={rdzv_id}"]
    common += [f"--rdzv-endpoint={network[0].address}:29400"]
    commands = []
    for k, host in enumerate(network):
        own = [f"--nproc-per-node={nproc[k]}", f"--local-addr={host.address}"]
        # a host whose own name is a loopback address does not recognize itself in the endpoint
        own += [f"--rdzv-conf=is_host={int(k == 0)},{rdzv_conf}"]
        commands.append([*common, *own, *script])
    return _start_everywhere(network, commands, [{} for _ in network], folder)


def run_tasks(
    network: list[Host], body: Callable, arguments: dict[str, Any], folder: Path
) -> HostJob:
    """Start ``body(**arguments)`` once per host, as ``srun --kill-on-bad-exit=0`` would.

    When one task is lost, the others are not ended.
    """
    command = [sys.executable, *rank_script(body, arguments, folder)]
    count = len(network)
    variables = [
        {
            "SLURM_PROCID": str(k),
            "SLURM_LOCALID": "0",
            "SLURM_NTASKS": str(count),
            "SLURM_NODEID": str(k),
            "SLURM_JOB_ID": "77",
            "SLURM_STEP_ID": "0",
            "SLURM_STEP_NODELIST": f"host[0-{count - 1}]",
            "SLURM_STEP_TASKS_PER_NODE": f"1(x{count})",
        }
        for k in range(count)
    ]
    return _start_everywhere(network, [command] * count, variables, folder)


def _start_everywhere(
    network: list[Host], commands: list[list[str]], variables: list[dict[str, str]], folder: Path
) -> HostJob:
    job = HostJob([], [])
    path = os.pathsep.join(p for p in sys.path if p)
    for host, command, own in zip(network, commands, variables, strict=True):
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **own}
        job.logs.append(folder / f"{host.name}.log")
        with job.logs[-1].open("w") as log:
            job.processes.append(host.start_program(command, env, log))
    return job


def wait_for(path: Path, timeout_s: float = 100, job: HostJob | None = None) -> None:
    """Block until a process of the job has made this file."""
    wait_until(path.exists, lambda: f"{path.name} does not appear\n{job}", timeout_s)


def wait_until_all_are_up(folder: Path, count: int | None = None) -> None:
    """Wait for all tasks of ``run_tasks``, or ranks of ``run_torchrun``, before their session.

    The session's deadline is meant for failures of hosts, and is too short for the imports of three
    processes on a busy machine. If torchrun starts fewer ranks than ``count`` (default: as many as
    it has), they wait here until torchrun ends them to take in the others.
    """
    environ = os.environ
    if "SLURM_PROCID" in environ:
        rank, world, attempt = environ["SLURM_PROCID"], int(environ["SLURM_NTASKS"]), "0"
    else:
        rank, world = environ["RANK"], int(environ["WORLD_SIZE"])
        attempt = environ["TORCHELASTIC_RESTART_COUNT"]
    (folder / f"up{attempt}-{world}-{rank}").touch()
    for other in range(count or world):
        wait_for(folder / f"up{attempt}-{world}-{other}")


def leftovers() -> list[str]:
    """Return namespaces and folders of this process that still exist."""
    mine = f"{_PREFIX}-{os.getpid()}-"
    return [name for name in [*_namespaces(), *os.listdir("/dev/shm")] if name.startswith(mine)]


@functools.cache
def missing(*, way_s: float = 0.0) -> str | None:
    """Return why hosts with this delay cannot be made here, or None if they can."""
    try:
        with hosts(1, way_s=way_s) as network:
            network[0].start(["true"]).wait(10)
            return None if network[0]._started[0].returncode == 0 else "no mount namespaces"
    except FileNotFoundError as error:
        return f"there is no {error.filename}"
    except OSError as error:
        return f"no network devices of programs: {error}"
    except subprocess.CalledProcessError as error:
        return f"no network namespaces: {error.stderr.strip()}"


def _ip(*arguments: str) -> str:
    return subprocess.run(
        ["ip", *arguments], check=True, capture_output=True, text=True, timeout=30
    ).stdout


def _namespaces() -> list[str]:
    with contextlib.suppress(FileNotFoundError):
        return sorted(os.listdir("/run/netns"))
    return []


def _remove_leftovers() -> None:
    """Remove what a test run left behind when it was killed with SIGKILL."""
    for namespace in _namespaces():
        prefix, _, rest = namespace.partition("-")
        owner = rest.partition("-")[0]
        if prefix == _PREFIX and owner.isdigit() and not psutil.pid_exists(int(owner)):
            # another test run may be removing them too
            with contextlib.suppress(subprocess.CalledProcessError, ProcessLookupError):
                for pid in _ip("netns", "pids", namespace).split():
                    os.kill(int(pid), signal.SIGKILL)
                _ip("netns", "del", namespace)
    for folder in Path("/dev/shm").glob(f"{_PREFIX}-*"):
        if not psutil.pid_exists(int(folder.name.split("-")[1])):
            shutil.rmtree(folder, ignore_errors=True)
