"""``torchrl-dist doctor``: checks whether this machine, or this allocation, is fit for a job.

``examine`` is pure. From the results of ``probe`` and of ``rounds`` (between the ranks), it makes
one finding per check, with a remedy. A check never raises. If a check cannot determine its result,
the finding is a warning.
"""

from __future__ import annotations

import argparse
import ipaddress
import json
import math
import platform
import re
import socket
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from .. import own_files
from ..errors import ConfigurationError, TorchRLDistError
from ..ui import show_table

if TYPE_CHECKING:
    from .probe import Probe
    from .rounds import Rounds

OK, WARN, FAIL = "ok", "warn", "fail"
TESTED = {
    "torch": ("2.13", "2.16"),
    "torchrl": ("0.14.1", "0.15"),
    "tensordict": ("0.14.3", "0.15"),
    "gymnasium": ("1.1", "1.5"),
}
"""The first version of each package that works, and the first that has not been tested."""

_MIB, _GIB = 1 << 20, 1 << 30
_CONTAINERS_SHM = 64 * _MIB  # Docker's default without --shm-size
_FEW_FILES, _MANY_FILES = 256, 4096
_FEW_PROCESSES = 1024  # threads count, and torch starts one per core
_SLOW_S = {"store": 0.02, "rpc": 0.05, "all-reduce": 0.05}
_SLOWEST_PAIR = 10  # times the median of all pairs
_SKEW_S, _BAD_SKEW_S = 1.0, 60.0
_KILL_WAIT_S = 30
_MARKS = {OK: "[green]ok[/]", WARN: "[yellow]warn[/]", FAIL: "[bold red]fail[/]"}


@dataclass(frozen=True)
class Finding:
    """The result of one check: its state (``ok``, ``warn`` or ``fail``), the finding, a remedy."""

    check: str
    state: str
    found: str
    cure: str = ""


def examine(probe: Probe, rounds: Rounds | TorchRLDistError | None = None) -> list[Finding]:
    """Return one finding per check, in a fixed order. For other nodes, return only findings that
    are not ok.

    ``rounds`` is an error if the ranks did not meet.
    """
    findings = _machine(probe)
    if isinstance(rounds, TorchRLDistError):
        findings.append(
            Finding(
                "round trips", FAIL, str(rounds),
                "check the interfaces above, a firewall between the nodes, and what the named "
                "process printed",
            )
        )  # fmt: skip
    elif rounds is not None:
        findings += _rounds(rounds)
        for host, other in rounds.elsewhere.items():
            bad = [each for each in _machine(other) if each.state != OK]
            findings += [replace(each, check=f"{each.check} on {host}") for each in bad]
    return findings


def _machine(probe: Probe) -> list[Finding]:
    return [
        *_software(probe),
        *_memory(probe),
        *_limits(probe),
        _cpus(probe),
        *_network(probe),
        _signals(probe),
        _leftovers(probe),
        _gpus(probe),
    ]


def exit_code(findings: Sequence[Finding]) -> int:
    """Return 0 if all is well, 1 if something needs a look, 2 if something will fail."""
    states = {finding.state for finding in findings}
    return 2 if FAIL in states else 1 if WARN in states else 0


# ---- this machine


def _software(probe: Probe) -> Iterator[Finding]:
    number = _numbers(probe.python)
    if number < (3, 10) or not probe.gil:
        kind = "" if probe.gil else ", free-threaded"
        yield Finding(
            "python", FAIL, f"{probe.python}{kind}", "CPython 3.10 or newer, with its GIL"
        )
    else:
        yield Finding("python", OK, probe.python)
    for name, (first, untested) in TESTED.items():
        version = probe.versions.get(name)
        cure = f"pip install '{name}>={first},<{untested}'"
        if version is None:
            yield Finding(name, FAIL, "not installed", cure)
        elif _numbers(version) < _numbers(first):
            yield Finding(name, FAIL, f"{version}, older than {first}", cure)
        elif _numbers(version) >= _numbers(untested):
            yield Finding(name, WARN, f"{version} has not been tested", cure)
        else:
            yield Finding(name, OK, version)
    if probe.kernel == "c":
        yield Finding("kernel", OK, "C")
    else:
        numpy = probe.kernel == "numpy"
        yield Finding(
            "kernel",
            WARN if numpy else FAIL,
            "the NumPy kernel is used, which is slower than C" if numpy else probe.kernel,
            "install a C compiler and Python's headers, then pip install --force-reinstall "
            "--no-deps torchrl-dist; leave TORCHRL_DIST_KERNEL unset",
        )
    if probe.torchrl_trees is None:
        yield Finding("TorchRL's trees", OK, "they load")
    else:
        # Not a warning, because this package does not need the trees. The check is here because
        # many users ask about them.
        yield Finding(
            "TorchRL's trees",
            OK,
            "not loaded; only TorchRL's own prioritized sampler needs them "
            f"({probe.torchrl_trees})",
            "install the torch that this torchrl was built with (0.14: torch 2.14 or newer)",
        )


def _memory(probe: Probe) -> Iterator[Finding]:
    from ..replay.node.mapping import is_network_file_system

    folder = probe.folder
    if folder.error is not None:
        found = f"{folder.path}: {folder.error}"
        yield Finding("file system", FAIL, found, "choose a --folder in which files can be made")
        return
    network = is_network_file_system(folder.file_system)
    yield Finding(
        "file system",
        FAIL if network else OK,
        f"{folder.path} is {folder.file_system}",
        "choose a scratch_dir (--replay-dir) that is local to the node, for example under /dev/shm"
        if network
        else "",
    )
    found = f"{_size(folder.free_bytes)} free of {_size(folder.total_bytes)} in {folder.path}"
    cure = "docker run --shm-size=8g or --ipc=host, a larger mount, torchrl-dist clean --remove"
    if folder.free_bytes < max(probe.planned_bytes, 16 * _MIB):
        planned = f", {_size(probe.planned_bytes)} planned" if probe.planned_bytes else ""
        yield Finding("space", FAIL, found + planned, cure)
    elif folder.total_bytes <= _CONTAINERS_SHM:
        yield Finding("space", WARN, f"{found}, a container's default", cure)
    else:
        yield Finding("space", OK, found)
    limit = probe.memory_limit
    if limit is not None and limit < probe.planned_bytes:
        yield Finding(
            "memory", FAIL,
            f"the cgroup allows {_size(limit)}, {_size(probe.planned_bytes)} planned",
            "raise sbatch --mem or docker run --memory; files in /dev/shm count, too",
        )  # fmt: skip
    else:
        yield Finding("memory", OK, "no limit" if limit is None else f"limit {_size(limit)}")
    error = folder.fallocate_error
    yield Finding(
        "fallocate", FAIL if error else OK, error or "space can be reserved",
        "choose another --folder: writing rows to a file without space kills the process"
        if error
        else "",
    )  # fmt: skip
    error = folder.lock_error
    yield Finding(
        "locks", FAIL if error else OK, error or "seen by other processes",
        "choose another --folder: processes would overwrite each other's rows" if error else "",
    )  # fmt: skip


def _limits(probe: Probe) -> Iterator[Finding]:
    from ..runtime.limits import descriptors_of

    files = probe.open_files
    needed = descriptors_of(probe.world_size, not probe.several_nodes)
    few = max(_FEW_FILES, needed * 2 // 3)
    many = max(_MANY_FILES, needed)
    state = OK if files is None or files >= many else FAIL if files < few else WARN
    yield Finding(
        "open files", state,
        "no limit" if files is None
        else f"at most {files}; rank 0 of {probe.world_size} processes needs up to {needed}",
        "" if state == OK else f"ulimit -n {many}; sbatch --propagate=NONE uses the node's limit",
    )  # fmt: skip
    threads = probe.user_processes
    few = threads is not None and threads < _FEW_PROCESSES and probe.uid != 0
    yield Finding(
        "processes", WARN if few else OK,
        "no limit" if threads is None else f"at most {threads}, including threads",
        f"ulimit -u {4 * _FEW_PROCESSES}" if few else "",
    )  # fmt: skip


def _cpus(probe: Probe) -> Finding:
    cores: float = probe.usable_cores
    found = f"{probe.usable_cores} of {probe.cores} cores usable"
    if probe.cpu_quota is not None and probe.cpu_quota < cores:
        cores = probe.cpu_quota
        found += f", the cgroup allows time for {cores:g}"
    # torchrun and our own processes set OMP_NUM_THREADS to 1. Under srun and in a shell, the
    # default is the number of cores.
    threads = probe.omp_threads or (probe.usable_cores if probe.launcher == "slurm" else 1)
    found += f"; {probe.processes} processes with {threads} threads each"
    cures = []
    if cores < probe.cores and probe.processes > cores:
        cures.append("raise --cpus-per-task of both sbatch and srun, or docker run --cpus")
    if threads > 1 and probe.processes * threads > cores:
        cures.append("set OMP_NUM_THREADS=1")
    return Finding("cpus", WARN if cures else OK, found, "; ".join(cures))


def _network(probe: Probe) -> Iterator[Finding]:
    if probe.world_error is not None:
        yield Finding(
            "launcher", FAIL, probe.world_error, "start every process with torchrun or srun"
        )
    elif probe.lone is not None:
        yield Finding(
            "launcher", FAIL,
            f"a task of {probe.lone}, but not a rank, so each task would be a separate job",
            "start it with srun python ...; in a container, pass SLURM's variables on",
        )  # fmt: skip
    else:
        yield Finding("launcher", OK, probe.launcher)
    absent = {
        variable: wanted
        for variable, wanted in probe.wanted_interfaces.items()
        if not _exists(wanted, probe.interfaces)
    }
    there = ", ".join(probe.interfaces)
    if absent:
        names = ", ".join(f"{variable}={value}" for variable, value in absent.items())
        yield Finding(
            "interfaces", FAIL, f"{names}, but this machine has {there}", "name one of these"
        )
    else:
        named = [f"{variable}={value}" for variable, value in probe.wanted_interfaces.items()]
        yield Finding("interfaces", OK, ", ".join(named) or f"none named; available: {there}")
    # Our own sessions ask the kernel which address leads to other nodes. Only gloo uses the host
    # name.
    cure = "put the node's address in /etc/hosts, and set TP_SOCKET_IFNAME and GLOO_SOCKET_IFNAME"
    if probe.address is None:
        state = FAIL if probe.several_nodes else WARN
        yield Finding("host name", state, f"{probe.host} has no address", cure)
    elif ipaddress.ip_address(probe.address).is_loopback:
        state = WARN if probe.several_nodes else OK
        yield Finding(
            "host name",
            state,
            f"{probe.host} is {probe.address}, which other nodes cannot reach",
            cure,
        )
    else:
        yield Finding("host name", OK, f"{probe.host} is {probe.address}")
    if probe.master is not None:
        name, address = probe.master
        if address is None:
            yield Finding(
                "MASTER_ADDR", FAIL, f"{name} has no address", "use a name that all nodes resolve"
            )
        elif probe.several_nodes and ipaddress.ip_address(address).is_loopback:
            yield Finding(
                "MASTER_ADDR", WARN, f"{name} is {address} here", "use the first node's address"
            )
        else:
            yield Finding("MASTER_ADDR", OK, f"{name} is {address}")


def _exists(wanted: str, interfaces: Sequence[str]) -> bool:
    """Whether an interface matches ``wanted``, in NCCL's notation.

    ``wanted`` is a list of prefixes, of exact names after ``=``, or of excluded prefixes after
    ``^``.
    """
    if wanted.startswith("^"):
        return True
    exact = wanted.startswith("=")
    names = wanted.lstrip("=").split(",")
    return any(
        i == name or (not exact and i.startswith(name)) for name in names for i in interfaces
    )


def _signals(probe: Probe) -> Finding:
    ignored = ", ".join(probe.ignored_signals)
    if ignored:
        return Finding(
            "signals", WARN, f"ignored here: {ignored}; these signals could not stop a job",
            "start it without nohup and trap '' (setsid and tmux do not ignore signals)",
        )  # fmt: skip
    if probe.kill_wait_s is not None and probe.kill_wait_s < _KILL_WAIT_S:
        return Finding(
            "signals", WARN, f"Slurm kills {probe.kill_wait_s} s after SIGTERM",
            "use sbatch --signal=USR1@120, which torchrl-dist slurm writes",
        )  # fmt: skip
    return Finding("signals", OK, "none ignored")


def _leftovers(probe: Probe) -> Finding:
    from ..replay.node.leftovers import HALF_REMOVED, LEFT

    left = [each for each in probe.leftovers if each.state in (LEFT, HALF_REMOVED)]
    others = sum(each.state not in (LEFT, HALF_REMOVED) for each in probe.leftovers)
    also = f"; {others} in use or kept" if others else ""
    if not left:
        return Finding("leftovers", OK, f"none{also}")
    shown = ", ".join(f"{each.path} ({_size(each.bytes)})" for each in left[:3])
    more = f" and {len(left) - 3} more" if len(left) > 3 else ""
    return Finding(
        "leftovers", WARN, f"from dead jobs: {shown}{more}{also}", "torchrl-dist doctor --clean"
    )


def _gpus(probe: Probe) -> Finding:
    cuda = probe.cuda
    if cuda.devices:
        names = ", ".join(sorted(set(cuda.names)))
        return Finding("cuda", OK, f"{cuda.devices} of {names}, torch for CUDA {cuda.built}")
    if cuda.built is None:
        return Finding("cuda", OK, "torch is built for the CPU")
    return Finding(
        "cuda", OK, f"torch for CUDA {cuda.built} sees no GPU",
        "to use one: sbatch --gpus-per-node=1, docker run --gpus all, unset CUDA_VISIBLE_DEVICES",
    )  # fmt: skip


# ---- between the ranks


def _rounds(rounds: Rounds) -> Iterator[Finding]:
    for name, seconds in (("store", rounds.store_s), ("all-reduce", rounds.all_reduce_s)):
        slow = seconds > _SLOW_S[name]
        yield Finding(
            name, WARN if slow else OK, f"{1e3 * seconds:.2f} ms, {len(rounds.names)} processes",
            "name a wired interface in GLOO_SOCKET_IFNAME, or start fewer processes per core"
            if slow
            else "",
        )  # fmt: skip
    times = {pair: seconds for pair, seconds in rounds.rpc_s.items()}
    (first, second), slowest = max(times.items(), key=lambda each: each[1])
    usual = median(times.values())
    found = (
        f"{1e3 * usual:.2f} ms; slowest pair: {rounds.names[first]} and {rounds.names[second]} "
        f"with {1e3 * slowest:.2f} ms"
    )
    slow = slowest > _SLOW_S["rpc"] and (slowest > _SLOWEST_PAIR * usual or len(times) == 1)
    slow = slow or usual > _SLOW_S["rpc"]
    cure = "check the cable, the interface (TP_SOCKET_IFNAME) and the load of these two nodes"
    yield Finding("rpc", WARN if slow else OK, found, cure if slow else "")
    rank = max(range(len(rounds.names)), key=lambda k: abs(rounds.skew_s[k]))
    skew = rounds.skew_s[rank]
    state = FAIL if abs(skew) > _BAD_SKEW_S else WARN if abs(skew) > _SKEW_S else OK
    yield Finding(
        "clocks", state, f"{rounds.names[rank]} is {skew:+.3f} s off {rounds.names[0]}",
        "run NTP (chronyd) on the nodes" if state != OK else "",
    )  # fmt: skip
    differing = [
        f"{name} has {', '.join(f'{k} {v}' for k, v in sorted(set(own) - set(rounds.software[0])))}"
        for name, own in zip(rounds.names, rounds.software, strict=True)
        if own != rounds.software[0]
    ]
    yield Finding(
        "same software", FAIL if differing else OK,
        f"{'; '.join(differing[:3])}, unlike {rounds.names[0]}" if differing else "on all ranks",
        "use one environment on all nodes: activate it in the job's script" if differing else "",
    )  # fmt: skip

    # ---- output


def as_json(probe: Probe, findings: Sequence[Finding]) -> dict[str, Any]:
    return {
        "host": probe.host,
        "exit_code": exit_code(findings),
        "checks": [asdict(finding) for finding in findings],
        "versions": dict(probe.versions) | {"python": probe.python},
    }


def report(probe: Probe, findings: Sequence[Finding]) -> str:
    """Return Markdown to paste into an issue. It contains host names and paths."""
    from .. import __version__

    def cell(text: str) -> str:
        return own_files.printable(text.replace("|", "\\|").replace("\n", " "))

    lines = ["<details><summary>torchrl-dist doctor</summary>", ""]
    lines += [f"torchrl-dist {__version__}, {platform.platform()}", ""]
    lines += ["| check | | found |", "|---|---|---|"]
    lines += [f"| {each.check} | {each.state} | {cell(each.found)} |" for each in findings]
    return "\n".join([*lines, "", "</details>"])


def show(findings: Sequence[Finding]) -> None:
    """Print one row per check, then the remedies."""
    from rich.console import Console
    from rich.markup import escape

    def shown(text: str) -> str:
        return escape(own_files.printable(text, lines=True))

    columns = ("check", "", "found")
    rows = [(each.check, _MARKS[each.state], shown(each.found)) for each in findings]
    show_table(None, columns, rows, folded=columns, width=None)
    console = Console()
    for each in findings:
        if each.state != OK and each.cure:
            console.print(f"{_MARKS[each.state]} {each.check}: {shown(each.cure)}")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Check this machine. Under torchrun or srun, check the machines of all ranks. Prints one "
        "row per check with what was found, and remedies. The exit code is 0 if all is well, 1 if "
        "there are warnings, and 2 if something will fail."
    )
    parser.epilog = "To check a Slurm job: srun torchrl-dist doctor"
    parser.add_argument(
        "--folder",
        metavar="DIR",
        default="/dev/shm",
        help="folder for replay buffers (default: /dev/shm)",
    )
    parser.add_argument(
        "--buffer-gib", type=float, default=0.0, metavar="GIB", help="planned size of the buffer"
    )
    parser.add_argument(
        "--processes",
        type=int,
        metavar="N",
        help="planned processes on this machine (default: 4)",
    )
    parser.add_argument(
        "--no-round-trips", action="store_true", help="start no process and send nothing"
    )
    parser.add_argument(
        "--timeout-s",
        type=float,
        default=60.0,
        metavar="S",
        help="longest wait until all ranks have joined (default: 60)",
    )
    parser.add_argument(
        "--clean", action="store_true", help="remove what your dead jobs left behind"
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    form.add_argument("--report", action="store_true", help="print Markdown to paste into an issue")
    parser.set_defaults(command=run)


def run(options: argparse.Namespace) -> int:
    from .probe import probe

    if options.processes is not None and options.processes < 1:
        raise ConfigurationError(f"--processes: got {options.processes}, expected at least 1")
    if not 0 <= options.buffer_gib < math.inf:
        raise ConfigurationError(f"--buffer-gib: got {options.buffer_gib}, expected at least 0")
    folder = Path(options.folder)
    for each in clean(folder) if options.clean else ():
        told = own_files.printable(f"{socket.gethostname()}: removed {each}")
        print(told, file=sys.stderr)

    def look() -> Probe:  # also called in the first rank of every other node
        planned = int(options.buffer_gib * _GIB)
        return probe(folder, processes=options.processes, planned_bytes=planned)

    found = look()
    measured: Rounds | TorchRLDistError | None = None
    if not options.no_round_trips and found.world_error is None and found.lone is None:
        from .rounds import Served, measure

        try:
            answer = measure(_versions, look, timeout_s=options.timeout_s)
            if isinstance(answer, Served):  # rank 0 prints
                return 0
            measured = answer
        except TorchRLDistError as error:
            measured = error
    findings = examine(found, measured)
    if options.json:
        print(json.dumps(as_json(found, findings)), flush=True)
    elif options.report:
        print(report(found, findings))
    else:
        show(findings)
    return exit_code(findings)


def clean(folder: Path) -> list[Path]:
    """Remove this user's replay directories that no job can use any more."""
    from ..replay.node import leftovers

    removed = []
    for found in leftovers.find([folder]):
        if found.state in (leftovers.LEFT, leftovers.HALF_REMOVED):
            removed += [found.path] if leftovers.remove(found) else []
    return removed


def _versions() -> dict[str, Any]:
    """Return the versions that must be equal on all ranks."""
    from .. import __version__
    from .probe import PACKAGES, version_of

    return {name: version_of(name) for name in PACKAGES} | {
        "python": platform.python_version(),
        "torchrl-dist": __version__,
    }


def _numbers(version: str) -> tuple[int, ...]:
    """Return the numbers of a version: (2, 13, 0) for ``"2.13.0+cpu"``."""
    head = re.match(r"[\d.]+", version)
    return tuple(int(part) for part in head.group().strip(".").split(".")) if head else ()


def _size(count: int) -> str:
    return f"{count / _GIB:.1f} GiB" if count >= _GIB else f"{count / _MIB:.0f} MiB"
