"""A real Slurm over the hosts of :mod:`tests.netns`: a controller on the first, a slurmd on each.

    with netns.hosts(3) as network, slurm.cluster(network, tmp_path) as run:
        step = run(["srun", "-n3", sys.executable, "-c", "..."])

The daemons, with munge's, belong to the test, and keep their files in its folder. ``gpu`` is the
partition of the last host and ``cpu`` that of the others, so that Slurm's order of names is not the
order of a heterogeneous job's components. This needs root and Debian's slurmctld, slurmd,
slurm-client and munge.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from tests import netns
from tests.netns import Host
from tests.spawn import wait_until

_NEEDED = ("slurmctld", "slurmd", "srun", "scancel", "munged")
_CONFIGURATION = """
ClusterName=test
SlurmctldHost={names[0]}({addresses[0]})
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=bf_interval=1,sched_interval=1,sched_min_interval=0
SlurmdParameters=config_overrides
ReturnToService=2
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
KillWait=30
"""


def missing() -> str | None:
    """Return what is missing to run Slurm here, or None."""
    names = [name for name in _NEEDED if _find(name) is None]
    return f"{', '.join(names)} not installed" if names else netns.missing()


@contextlib.contextmanager
def on_three_hosts(folder: Path) -> Iterator[Callable[..., subprocess.Popen]]:
    """Run a Slurm over three hosts, which the function has as its attribute ``network``."""
    with netns.hosts(3) as network, cluster(network, folder) as run:
        run.network = network  # type: ignore[attr-defined]
        yield run
    assert netns.leftovers() == []


@contextlib.contextmanager
def cluster(network: list[Host], folder: Path) -> Iterator[Callable[..., subprocess.Popen]]:
    """Run a Slurm; yield a function that starts a command on the first host, like ``Popen``.

    At the end all daemons have ended. ``netns.hosts`` ends the jobs.
    """
    folder.mkdir()
    (folder / "state").mkdir()
    names = [host.name for host in network]
    addresses = [host.address for host in network]
    lines = [_CONFIGURATION.format(names=names, addresses=addresses, folder=folder)]
    for host in network:
        lines.append(f"NodeName={host.name} NodeAddr={host.address} CPUs=4 State=UNKNOWN")
    lines.append(f"PartitionName=cpu Nodes={','.join(names[:-1])} Default=YES State=UP")
    lines.append(f"PartitionName=gpu Nodes={names[-1]} State=UP")
    (folder / "slurm.conf").write_text("\n".join(lines) + "\n")
    (folder / "key").write_bytes(os.urandom(1024))
    (folder / "key").chmod(0o400)
    options = {"env": {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}}
    output = {"stdout": subprocess.DEVNULL, "stderr": subprocess.STDOUT}
    munged = [_find("munged"), "--foreground", "--force", f"--key-file={folder}/key"]
    munged += [f"--socket={folder}/munge.socket", f"--pid-file={folder}/munged.pid"]
    munged += [f"--log-file={folder}/munged.log", f"--seed-file={folder}/seed"]
    daemons = [subprocess.Popen(munged, **output)]

    def run(command: list[str], env: dict[str, str] | None = None, **rest: object):
        own = {**options["env"], "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        return network[0].start(command, env={**own, **(env or {})}, **rest)

    try:
        wait_until((folder / "munge.socket").exists, lambda: _logs(folder))
        daemons.append(network[0].start([_find("slurmctld"), "-D"], **options, **output))
        for host in network:
            slurmd = [_find("slurmd"), "-D", "-N", host.name]
            daemons.append(host.start(slurmd, **options, **output))

        def are_idle() -> bool:
            seen = run(["sinfo", "-hN", "-o", "%N %t"], stdout=subprocess.PIPE, text=True)
            states = set(seen.communicate(timeout=30)[0].splitlines())
            return states == {f"{name} idle" for name in names}

        wait_until(are_idle, lambda: _logs(folder))
        yield run
    finally:
        for daemon in reversed(daemons):
            daemon.terminate()
        for daemon in daemons:
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()


def _find(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


def _logs(folder: Path) -> str:
    return "\n".join(f"--- {p.name} ---\n{p.read_text()[-2000:]}" for p in folder.glob("*.log"))
