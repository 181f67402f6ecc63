"""``torchrl-dist doctor``: check whether this machine, or this allocation of machines, is fit for a
job.

``examine`` is a pure function. It judges the results of ``probe`` on machines and of ``rounds``
between ranks, and returns one finding per check. A check never raises. If a check cannot determine
its result, its finding is a warning.
"""

from __future__ import annotations

import argparse
import ipaddress
import json
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
from ..errors import TorchRLDistError
from ..ui import at_least, show_table

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
"""For each package, the first version that works, and the first version that has not been
tested."""

_MIB, _GIB = 1 << 20, 1 << 30
_CONTAINERS_SHM = 64 * _MIB  # Docker's default without --shm-size
_FEW_FILES, _MANY_FILES = 256, 4096
# Warn if the limit of processes is lower than this. The limit also counts threads, and torch starts
# one thread per core.
_FEW_PROCESSES = 1024
_SLOW_S = {"store": 0.02, "rpc": 0.05, "all-reduce": 0.05}
_SLOWEST_PAIR = 10  # a call is slow if it takes this many times the median of all pairs of ranks
_SKEW_S, _BAD_SKEW_S = 1.0, 60.0
_KILL_WAIT_S = 30
_MARKS = {OK: "[green]ok[/]", WARN: "[yellow]warn[/]", FAIL: "[bold red]fail[/]"}


@dataclass(frozen=True)
class Finding:
    """The result of one check: its state (``ok``, ``warn`` or ``fail``), what it found, and a
    remedy."""

    check: str
    state: str
    found: str
    cure: str = ""


def _judge(check: str, state: str, found: str, cure: str) -> Finding:
    """Return a finding, with the remedy only if one is needed."""
    return Finding(check, state, found, "" if state == OK else cure)


def examine(probe: Probe, rounds: Rounds | TorchRLDistError | None = None) -> list[Finding]:
    """Return one finding per check, in a fixed order. For other nodes, return only findings that
    are not ok.

    ``rounds`` is an error if the ranks did not meet, and None if no round trips were measured.
    """
    findings = _machine(probe)
    if isinstance(rounds, TorchRLDistError):
        findings.append(
            Finding(
                "round trips", FAIL, str(rounds),
                "check the interfaces above, the firewall between the nodes, and the output of "
                "the process named above",
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
    """Return the exit code: 0 if all is well, 1 if there are warnings, 2 if something will fail."""
    states = {finding.state for finding in findings}
    return 2 if FAIL in states else 1 if WARN in states else 0


# ---- this machine


def _software(probe: Probe) -> Iterator[Finding]:
    works = _numbers(probe.python) >= (3, 10) and probe.gil
    found = probe.python + ("" if probe.gil else ", free-threaded")
    cure = "use CPython 3.10 or newer, with its GIL"
    yield _judge("python", OK if works else FAIL, found, cure)
    for name, (first, untested) in TESTED.items():
        version = probe.versions.get(name)
        state, found = OK, version or ""
        if version is None:
            state, found = FAIL, "not installed"
        elif _numbers(version) < _numbers(first):
            state, found = FAIL, f"{version}, older than {first}"
        elif _numbers(version) >= _numbers(untested):
            state, found = WARN, f"{version} has not been tested"
        yield _judge(name, state, found, f"pip install '{name}>={first},<{untested}'")
    state, found = {
        "c": (OK, "C"), "numpy": (WARN, "the NumPy kernel is used, which is slower than C")
    }.get(probe.kernel, (FAIL, probe.kernel))  # fmt: skip
    yield _judge(
        "kernel", state, found,
        "install a C compiler and Python's headers, then pip install --force-reinstall "
        "--no-deps torchrl-dist; leave TORCHRL_DIST_KERNEL unset",
    )  # fmt: skip
    if probe.torchrl_trees is None:
        yield Finding("TorchRL's trees", OK, "they load")
        return
    # This finding is not a warning, because this package does not need TorchRL's trees. The check
    # exists because many users ask about these trees.
    yield Finding(
        "TorchRL's trees", OK,
        f"not loaded; only TorchRL's own prioritized sampler needs them ({probe.torchrl_trees})",
        "install the torch for which this torchrl was built (for 0.14: torch 2.14 or newer)",
    )  # fmt: skip


def _memory(probe: Probe) -> Iterator[Finding]:
    from ..replay.node.mapping import is_network_file_system

    folder = probe.folder
    if folder.error is not None:
        found = f"{folder.path}: {folder.error}"
        yield Finding("file system", FAIL, found, "choose a --folder in which you can make files")
        return
    yield _judge(
        "file system", FAIL if is_network_file_system(folder.file_system) else OK,
        f"{folder.path} is {folder.file_system}",
        "choose a scratch_dir (--replay-dir) that is local to the node, for example under /dev/shm",
    )  # fmt: skip
    state = OK
    found = f"{_size(folder.free_bytes)} free of {_size(folder.total_bytes)} in {folder.path}"
    if folder.free_bytes < max(probe.planned_bytes, 16 * _MIB):
        state = FAIL
        found += f", {_size(probe.planned_bytes)} planned" if probe.planned_bytes else ""
    elif folder.total_bytes <= _CONTAINERS_SHM:
        state, found = WARN, f"{found}, the default size in containers"
    cure = (
        "free space with torchrl-dist clean --remove, start the container with docker run "
        "--shm-size=8g or --ipc=host, or use a larger mount"
    )
    yield _judge("space", state, found, cure)
    limit, planned = probe.memory_limit, probe.planned_bytes
    if limit is not None and limit < planned:
        state, found = FAIL, f"the cgroup allows {_size(limit)}, but {_size(planned)} are planned"
    else:
        state, found = OK, "no limit" if limit is None else f"limit {_size(limit)}"
    cure = "raise sbatch --mem or docker run --memory; files in /dev/shm count as memory, too"
    yield _judge("memory", state, found, cure)
    for check, error, well, danger in (
        ("fallocate", folder.fallocate_error, "space can be reserved",
         "a process that writes rows without reserved space may be killed"),
        ("locks", folder.lock_error, "other processes see a lock",
         "processes would overwrite each other's rows"),
    ):  # fmt: skip
        cure = f"choose another --folder: {danger}"
        yield _judge(check, FAIL if error else OK, error or well, cure)


def _limits(probe: Probe) -> Iterator[Finding]:
    from ..runtime.limits import descriptors_of

    files = probe.open_files
    needed = descriptors_of(probe.world_size, not probe.several_nodes)
    few = max(_FEW_FILES, needed * 2 // 3)
    many = max(_MANY_FILES, needed)
    yield _judge(
        "open files", OK if files is None or files >= many else FAIL if files < few else WARN,
        "no limit" if files is None
        else f"at most {files}; rank 0 of {probe.world_size} processes needs up to {needed}",
        f"raise the limit with ulimit -n {many}, or with sbatch --propagate=NONE, which uses the "
        "node's limit",
    )  # fmt: skip
    threads = probe.user_processes
    low = threads is not None and threads < _FEW_PROCESSES and probe.uid != 0
    found = "no limit" if threads is None else f"at most {threads}, including threads"
    cure = f"raise the limit with ulimit -u {4 * _FEW_PROCESSES}"
    yield _judge("processes", WARN if low else OK, found, cure)


def _cpus(probe: Probe) -> Finding:
    cores: float = probe.usable_cores
    found = f"{probe.usable_cores} of {probe.cores} cores usable"
    if probe.cpu_quota is not None and probe.cpu_quota < cores:
        cores = probe.cpu_quota
        found += f", the cgroup allows the CPU time of {cores:g}"
    # torchrun sets OMP_NUM_THREADS to 1, and this package does the same in processes that it
    # starts. srun does not set this variable, so torch starts one thread per core there.
    threads = probe.omp_threads or (probe.usable_cores if probe.launcher == "slurm" else 1)
    found += f"; {probe.processes} processes with {threads} threads each"
    cures = []
    if cores < probe.cores and probe.processes > cores:
        cures.append("raise --cpus-per-task of both sbatch and srun, or docker run --cpus")
    if threads > 1 and probe.processes * threads > cores:
        cures.append("set OMP_NUM_THREADS=1")
    return Finding("cpus", WARN if cures else OK, found, "; ".join(cures))


def _network(probe: Probe) -> Iterator[Finding]:
    state, found, cure = OK, probe.launcher, ""
    if probe.world_error is not None:
        state, found = FAIL, probe.world_error
        cure = "start every process with torchrun or srun"
    elif probe.lone is not None:
        state = FAIL
        found = f"a task of {probe.lone}, but not a rank, so each task would be a separate job"
        cure = "start tasks with srun python ...; pass SLURM's variables into a container"
    yield Finding("launcher", state, found, cure)
    there, wanted = ", ".join(probe.interfaces), probe.wanted_interfaces
    absent = [name for name, value in wanted.items() if not _exists(value, probe.interfaces)]
    named = ", ".join(f"{name}={wanted[name]}" for name in absent or wanted)
    if absent:
        state, found = FAIL, f"{named}, but this machine has {there}"
    else:
        state, found = OK, named or f"no variable names an interface; available: {there}"
    yield _judge("interfaces", state, found, "set these variables to an interface of this machine")
    # A session asks the kernel which address leads to other nodes. Only gloo uses the host name.
    state, found = OK, f"{probe.host} is {probe.address}"
    if probe.address is None:
        state = FAIL if probe.several_nodes else WARN
        found = f"{probe.host} has no address"
    elif ipaddress.ip_address(probe.address).is_loopback:
        state = WARN if probe.several_nodes else OK
        found += ", which other nodes cannot reach"
    cure = "put the node's address in /etc/hosts, and set TP_SOCKET_IFNAME and GLOO_SOCKET_IFNAME"
    yield _judge("host name", state, found, cure)
    if probe.master is not None:
        name, address = probe.master
        state, found, cure = OK, f"{name} is {address}", ""
        if address is None:
            state, found = FAIL, f"{name} has no address"
            cure = "set MASTER_ADDR to a name that all nodes can resolve"
        elif probe.several_nodes and ipaddress.ip_address(address).is_loopback:
            state, found = WARN, f"{found} on this machine"
            cure = "set MASTER_ADDR to the first node's address"
        yield Finding("MASTER_ADDR", state, found, cure)


def _exists(wanted: str, interfaces: Sequence[str]) -> bool:
    """Whether an interface matches ``wanted``, in NCCL's notation.

    ``wanted`` is a list of prefixes. If the list begins with ``=``, its entries are exact names. If
    the list begins with ``^``, its entries are excluded, and the list always counts as matched.
    """
    if wanted.startswith("^"):
        return True
    exact = wanted.startswith("=")
    names = wanted.lstrip("=").split(",")
    return any(
        i == name or (not exact and i.startswith(name)) for name in names for i in interfaces
    )


def _signals(probe: Probe) -> Finding:
    state, found, cure = OK, "none ignored", ""
    if probe.ignored_signals:
        ignored = ", ".join(probe.ignored_signals)
        state, found = WARN, f"ignored here: {ignored}; these signals could not stop a job"
        cure = "start the job without nohup or trap '' (setsid and tmux do not ignore signals)"
    elif probe.kill_wait_s is not None and probe.kill_wait_s < _KILL_WAIT_S:
        state, found = WARN, f"Slurm kills a job {probe.kill_wait_s} s after SIGTERM"
        cure = "use sbatch --signal=USR1@120, as scripts of torchrl-dist slurm do"
    return Finding("signals", state, found, cure)


def _leftovers(probe: Probe) -> Finding:
    from ..replay.node.leftovers import HALF_REMOVED, LEFT

    left = [each for each in probe.leftovers if each.state in (LEFT, HALF_REMOVED)]
    others = len(probe.leftovers) - len(left)
    found = "from dead jobs: " if left else "none"
    found += ", ".join(f"{each.path} ({_size(each.bytes)})" for each in left[:3])
    found += f" and {len(left) - 3} more" if len(left) > 3 else ""
    found += f"; {others} in use or kept" if others else ""
    return _judge("leftovers", WARN if left else OK, found, "torchrl-dist doctor --clean")


def _gpus(probe: Probe) -> Finding:
    cuda = probe.cuda
    if cuda.devices:
        names = ", ".join(sorted(set(cuda.names)))
        return Finding("cuda", OK, f"{cuda.devices} of {names}, torch for CUDA {cuda.built}")
    if cuda.built is None:
        return Finding("cuda", OK, "torch is built for the CPU")
    return Finding(
        "cuda", OK, f"torch for CUDA {cuda.built} sees no GPU",
        "for a GPU: sbatch --gpus-per-node=1, docker run --gpus all, or unset CUDA_VISIBLE_DEVICES",
    )  # fmt: skip


# ---- between the ranks


def _rounds(rounds: Rounds) -> Iterator[Finding]:
    cure = "name a wired interface in GLOO_SOCKET_IFNAME, or start fewer processes per core"
    for name, seconds in (("store", rounds.store_s), ("all-reduce", rounds.all_reduce_s)):
        found = f"{1e3 * seconds:.2f} ms, {len(rounds.names)} processes"
        yield _judge(name, WARN if seconds > _SLOW_S[name] else OK, found, cure)
    (first, second), slowest = max(rounds.rpc_s.items(), key=lambda each: each[1])
    usual = median(rounds.rpc_s.values())
    found = (
        f"{1e3 * usual:.2f} ms; slowest pair: {rounds.names[first]} and {rounds.names[second]} "
        f"with {1e3 * slowest:.2f} ms"
    )
    alone = slowest > _SLOWEST_PAIR * usual or len(rounds.rpc_s) == 1
    slow = usual > _SLOW_S["rpc"] or (slowest > _SLOW_S["rpc"] and alone)
    cure = "check the cable, the interface (TP_SOCKET_IFNAME) and the load of these two nodes"
    yield _judge("rpc", WARN if slow else OK, found, cure)
    rank = max(range(len(rounds.names)), key=lambda k: abs(rounds.skew_s[k]))
    skew = rounds.skew_s[rank]
    state = FAIL if abs(skew) > _BAD_SKEW_S else WARN if abs(skew) > _SKEW_S else OK
    found = f"the clock of {rounds.names[rank]} is {skew:+.3f} s off that of {rounds.names[0]}"
    yield _judge("clocks", state, found, "run NTP (chronyd) on the nodes")
    differing = [
        f"{name} has {', '.join(f'{k} {v}' for k, v in sorted(set(own) - set(rounds.software[0])))}"
        for name, own in zip(rounds.names, rounds.software, strict=True)
        if own != rounds.software[0]
    ]
    found = "; ".join(differing[:3]) + f", unlike {rounds.names[0]}"
    cure = "use one environment on all nodes: activate it in the job's script"
    state = FAIL if differing else OK
    yield _judge("same software", state, found if differing else "on all ranks", cure)


# ---- output


def as_json(probe: Probe, findings: Sequence[Finding]) -> dict[str, Any]:
    return {
        "host": probe.host,
        "exit_code": exit_code(findings),
        "checks": [asdict(finding) for finding in findings],
        "versions": dict(probe.versions) | {"python": probe.python},
    }


def report(probe: Probe, findings: Sequence[Finding]) -> str:
    """Return Markdown to paste into an issue. The Markdown contains host names and paths."""
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
        "Check this machine. Under torchrun or srun, check the machines of all ranks. Print one "
        "row per check, then remedies. The exit code is 0 if all is well, 1 if there are warnings, "
        "and 2 if something will fail."
    )
    parser.epilog = "To check a Slurm job: srun torchrl-dist doctor"
    text = "folder for replay buffers (default: /dev/shm)"
    parser.add_argument("--folder", metavar="DIR", default="/dev/shm", help=text)
    parser.add_argument(
        "--buffer-gib", type=at_least(0, float), default=0.0, metavar="GIB",
        help="planned size of the buffer, in GiB",
    )  # fmt: skip
    parser.add_argument(
        "--processes", type=at_least(1), metavar="N",
        help="planned number of processes on this machine (default: the launcher's, or 4)",
    )  # fmt: skip
    parser.add_argument(
        "--no-round-trips", action="store_true", help="start no process and measure no round trips"
    )
    text = "longest wait until all ranks have joined (default: 60)"
    parser.add_argument("--timeout-s", type=float, default=60.0, metavar="S", help=text)
    parser.add_argument(
        "--clean", action="store_true", help="remove replay directories of your dead jobs"
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    form.add_argument("--report", action="store_true", help="print Markdown to paste into an issue")
    parser.set_defaults(command=run)


def run(options: argparse.Namespace) -> int:
    from .probe import probe

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
            if isinstance(answer, Served):  # rank 0 prints the findings
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
    """Remove those replay directories of this user that no job can use any more."""
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
