"""Each check of ``torchrl-dist doctor`` finds a planted fault, and names the cure."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.replay.faults import kill_self, rows_of, run_forked
from tests.spawn import reserved_port, run_job
from torchrl_dist.cli import main
from torchrl_dist.errors import DeadlineError
from torchrl_dist.ops import doctor
from torchrl_dist.ops.doctor import FAIL, OK, WARN, Finding, examine, exit_code
from torchrl_dist.ops.probe import Cuda, Probe, cpu_quota, look_at, memory_limit, probe
from torchrl_dist.ops.rounds import Rounds
from torchrl_dist.replay import SharedMemmapStorage
from torchrl_dist.replay.node import lock
from torchrl_dist.runtime.world import process_stamp

Plant = Iterator[dict]  # arguments of ``probe``
ROUNDS = Rounds(
    names=("rank0 on a", "rank1 on b", "rank2 on c"),
    store_s=1e-4,
    all_reduce_s=1e-3,
    rpc_s={(0, 1): 1e-3, (0, 2): 1e-3, (1, 2): 2e-3},
    skew_s=(0.0, 0.01, -0.02),
    software=(frozenset({("torch", "2.13")}),) * 3,
    elsewhere={},
)


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Probe:
    """A machine without a fault, whatever this one is like."""
    found = probe(tmp_path_factory.mktemp("healthy"), env={})
    good = {"torch": "2.15.0", "torchrl": "0.14.1", "tensordict": "0.14.3", "gymnasium": "1.4.0"}
    return dataclasses.replace(
        found,
        versions=good,
        kernel="c",
        torchrl_trees=None,
        folder=dataclasses.replace(
            found.folder, path="/dev/shm", file_system="tmpfs", total_bytes=8 << 30,
            free_bytes=8 << 30,
        ),
        open_files=65536, user_processes=None, cores=16, usable_cores=16, cpu_quota=None,
        memory_limit=None, host="node1", address="10.0.0.1", interfaces=("lo", "eth0"),
        leftovers=(), cuda=Cuda(), ignored_signals=(),
    )  # fmt: skip


def found_in(findings: list[Finding], check: str) -> Finding:
    (finding,) = [each for each in findings if each.check == check]
    return finding


def test_a_healthy_machine_passes_every_check(healthy: Probe) -> None:
    findings = examine(healthy, ROUNDS)
    assert {each.state for each in findings} == {OK}, findings
    assert exit_code(findings) == 0
    assert len({each.check for each in findings}) == len(findings) >= 20


# ---- planted faults, as far as possible real ones


@contextlib.contextmanager
def mounted(point: Path, size: str) -> Iterator[None]:
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(point)]
    if os.getuid() or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("may not mount")
    try:
        yield
    finally:
        subprocess.run(["umount", str(point)], check=True)


def small_shm(**arguments: object) -> Callable:
    def small_shm(folder: Path, patch: pytest.MonkeyPatch) -> Plant:
        with mounted(folder, "48m"):
            yield arguments

    return small_shm


def told(**arguments: object) -> Callable:
    def told(folder: Path, patch: pytest.MonkeyPatch) -> Plant:
        yield arguments

    return told


def full_disk(folder: Path, patch: pytest.MonkeyPatch) -> Plant:
    with mounted(folder, "2m"):
        (folder / "rows").write_bytes(bytes(1536 << 10))
        yield {}


def read_only(folder: Path, patch: pytest.MonkeyPatch) -> Plant:
    with mounted(folder, "1m"):
        subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)
        yield {}


def on_nfs(folder: Path, patch: pytest.MonkeyPatch) -> Plant:
    proc = folder / "proc" / "self"
    proc.mkdir(parents=True)
    (proc / "mounts").write_text(f"/dev/vda / ext4 rw 0 0\nserver:/home {folder} nfs4 rw 0 0\n")
    yield {"proc": proc.parent}


def few_files(folder: Path, patch: pytest.MonkeyPatch) -> Plant:
    # only reported, because a process that has run other tests may have more open already
    found = resource.getrlimit
    limits = {resource.RLIMIT_NOFILE: (200, 200)}
    patch.setattr(resource, "getrlimit", lambda what: limits.get(what) or found(what))
    yield {}


def no_kernel(folder: Path, patch: pytest.MonkeyPatch) -> Plant:
    patch.setenv("TORCHRL_DIST_KERNEL", "numpy")
    yield {}


def one_core_by_cgroup(folder: Path, patch: pytest.MonkeyPatch) -> Plant:
    group = folder / "cgroup" / "job"
    group.mkdir(parents=True)
    (group / "cpu.max").write_text("50000 100000\n")
    (folder / "proc" / "self").mkdir(parents=True)
    (folder / "proc" / "self" / "cgroup").write_text("0::/job\n")
    (folder / "proc" / "self" / "mounts").write_text("/dev/vda / ext4 rw 0 0\n")
    yield {"proc": folder / "proc", "cgroups": folder / "cgroup", "processes": 3}


def srun_without_cpus_per_task(folder: Path, patch: pytest.MonkeyPatch) -> Plant:
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        yield {"processes": 4}
    finally:
        os.sched_setaffinity(0, before)


def nameless_host(folder: Path, patch: pytest.MonkeyPatch) -> Plant:
    patch.setattr(socket, "gethostname", lambda: "no-such-host.invalid")
    yield {}


def under_nohup(folder: Path, patch: pytest.MonkeyPatch) -> Plant:
    before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    try:
        yield {}
    finally:
        signal.signal(signal.SIGUSR1, before)


def another_torchrl(folder: Path, patch: pytest.MonkeyPatch) -> Plant:
    info = folder / "torchrl-0.99.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torchrl\nVersion: 0.99.0\n")
    patch.syspath_prepend(folder)
    yield {}


def dead_job(folder: Path, patch: pytest.MonkeyPatch) -> Plant:
    leave(folder / "left")
    yield {}


def leave(path: Path) -> None:
    """Leave what a killed job leaves."""

    def job() -> None:
        stamp = process_stamp(os.getpid())
        SharedMemmapStorage(64, scratch_dir=path, job_id=stamp).append(rows_of(range(8)))
        kill_self()

    assert run_forked(job) < 0


@pytest.mark.parametrize(
    ("plant", "check", "state", "says"),
    [
        (small_shm(), "space", WARN, "48 MiB"),
        (small_shm(planned_bytes=1 << 30), "space", FAIL, "1.0 GiB planned"),
        (full_disk, "fallocate", FAIL, "No space left"),
        (read_only, "file system", FAIL, "Read-only file system"),
        (on_nfs, "file system", FAIL, "nfs4"),
        (few_files, "open files", FAIL, "200"),
        (no_kernel, "kernel", WARN, "NumPy"),
        (one_core_by_cgroup, "cpus", WARN, "CPU time of 0.5"),
        (srun_without_cpus_per_task, "cpus", WARN, "1 of"),
        (told(env={"OMP_NUM_THREADS": "64"}), "cpus", WARN, "64 threads"),
        (
            told(env={"GLOO_SOCKET_IFNAME": "ib7"}), "interfaces", FAIL, "GLOO_SOCKET_IFNAME=ib7",
        ),
        (nameless_host, "host name", WARN, "no-such-host.invalid"),
        (
            told(env={"MASTER_ADDR": "no-such-host.invalid"}), "MASTER_ADDR", FAIL,
            "no-such-host.invalid",
        ),
        (told(env={"RANK": "0"}), "launcher", FAIL, "lacks WORLD_SIZE"),
        (
            told(env={"SLURM_PROCID": "1", "SLURM_NTASKS": "4"}), "launcher", FAIL,
            "a task of SLURM",
        ),
        (under_nohup, "signals", WARN, "SIGUSR1"),
        (another_torchrl, "torchrl", WARN, "0.99.0"),
        (dead_job, "leftovers", WARN, "left"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)  # fmt: skip
def test_a_planted_fault_is_found(plant, check, state, says, tmp_path, monkeypatch) -> None:
    if plant is srun_without_cpus_per_task and os.cpu_count() == 1:
        pytest.skip("needs two cores")
    before = [each.state for each in examine(probe(tmp_path, env={})) if each.check == check]
    with contextlib.contextmanager(plant)(tmp_path, monkeypatch) as arguments:
        found = probe(tmp_path, **{"env": {}, **arguments})
    finding = found_in(examine(found), check)
    assert finding.state == state and says in finding.found and finding.cure, finding
    assert before in ([OK], []), before  # the fault is what made the difference
    assert exit_code([finding]) == {WARN: 1, FAIL: 2}[state]
    assert not list(tmp_path.glob(".torchrl_dist-doctor-*"))


# ---- what cannot be planted here


def test_a_folder_is_tried_with_the_buffers_own_locks(tmp_path, monkeypatch) -> None:
    """A file system may refuse locks of open files, or hide them from other processes."""

    def refuse(fd: int, byte: int) -> bool:
        raise OSError(errno.EINVAL, "no locks of open files")

    assert look_at(tmp_path).lock_error is None
    for lock_byte, error in (
        (refuse, "no locks of open files"),
        (lambda fd, byte: True, "another process does not see a lock"),
    ):
        monkeypatch.setattr(lock, "lock_byte", lock_byte)
        assert look_at(tmp_path).lock_error == error
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("change", "check", "state", "says"),
    [
        ({"python": "3.9.1"}, "python", FAIL, ""),
        ({"gil": False}, "python", FAIL, ""),
        ({"versions": {"torch": "2.12.1"}}, "torch", FAIL, ""),
        ({"versions": {}}, "gymnasium", FAIL, ""),
        ({"memory_limit": 1 << 30, "planned_bytes": 2 << 30}, "memory", FAIL, ""),
        ({"user_processes": 100, "uid": 1000}, "processes", WARN, ""),
        ({"open_files": 4096, "world_size": 128, "several_nodes": True}, "open files", WARN, ""),
        ({"open_files": 4096, "world_size": 256, "several_nodes": True}, "open files", FAIL, ""),
        ({"address": "127.0.1.1", "several_nodes": True}, "host name", WARN, ""),
        ({"address": None, "several_nodes": True}, "host name", FAIL, ""),
        ({"master": ("n", "127.0.1.1"), "several_nodes": True}, "MASTER_ADDR", WARN, ""),
        ({"kill_wait_s": 5}, "signals", WARN, ""),
        ({"launcher": "slurm", "processes": 8}, "cpus", WARN, ""),
        ({"store_s": 0.5}, "store", WARN, "500.00 ms"),
        ({"all_reduce_s": 0.5}, "all-reduce", WARN, "3 processes"),
        (
            {"rpc_s": {(0, 1): 1e-3, (0, 2): 1e-3, (1, 2): 0.2}}, "rpc", WARN,
            "slowest pair: rank1 on b and rank2 on c",
        ),
        ({"skew_s": (0.0, 5.0, 0.0)}, "clocks", WARN, "rank1 on b is +5.000 s"),
        ({"skew_s": (0.0, 0.0, -3600.0)}, "clocks", FAIL, "rank2 on c"),
        (
            {"software": (*ROUNDS.software[:2], frozenset({("torch", "2.15")}))},
            "same software", FAIL, "rank2 on c has torch 2.15",
        ),
    ],
)  # fmt: skip
def test_a_recorded_fault_is_found_and_its_ranks_are_named(healthy, change, check, state, says):
    between = change.keys() & {field.name for field in dataclasses.fields(Rounds)}
    rounds = dataclasses.replace(ROUNDS, **change) if between else ROUNDS
    probed = healthy if between else dataclasses.replace(healthy, **change)
    finding = found_in(examine(probed, rounds), check)
    assert finding.state == state and says in finding.found and finding.cure, finding


def test_faults_of_other_nodes_and_ranks_that_do_not_meet_are_findings(healthy: Probe) -> None:
    other = dataclasses.replace(healthy, open_files=100, host="node2")
    findings = examine(healthy, dataclasses.replace(ROUNDS, elsewhere={"node2": other}))
    assert [each.check for each in findings if each.state != OK] == ["open files on node2"]
    findings = examine(healthy, DeadlineError("rank1 did not join"))
    assert found_in(findings, "round trips").state == FAIL and exit_code(findings) == 2


def test_limits_of_both_versions_of_cgroups_are_read(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.write_text("4:memory:/a/b\n3:cpu,cpuacct:/a/b\n0::/x/y\n")
    for group, name, text in (
        ("cpu/a", "cpu.cfs_quota_us", "150000"),
        ("cpu/a", "cpu.cfs_period_us", "100000"),
        ("memory/a/b", "memory.limit_in_bytes", "9223372036854771712"),
        ("memory/a", "memory.limit_in_bytes", "1000"),
        ("x", "cpu.max", "max 100000"),
    ):
        (tmp_path / group).mkdir(parents=True, exist_ok=True)
        (tmp_path / group / name).write_text(text + "\n")
    (tmp_path / "memory/memory.limit_in_bytes").write_text("5000\n")
    assert cpu_quota(own, tmp_path / "nowhere") is None
    (tmp_path / "cpu,cpuacct").symlink_to(tmp_path / "cpu")
    assert cpu_quota(own, tmp_path) == 1.5
    assert memory_limit(own, tmp_path) == 1000


# ---- the command


def run(*arguments: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "torchrl_dist", "doctor", *arguments]
    own = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "RANK"))}
    return subprocess.run(
        command, capture_output=True, text=True, timeout=120, env=own | (env or {})
    )


def test_the_command_measures_between_two_processes_and_prints_json(tmp_path: Path) -> None:
    done = run("--json", "--folder", str(tmp_path))
    found = json.loads(done.stdout)
    states = {each["check"]: each["state"] for each in found["checks"]}
    for check in ("store", "rpc", "all-reduce", "clocks", "same software", "locks"):
        assert check in states, done.stderr
    worst = max(states.values(), key=[OK, WARN, FAIL].index)
    assert done.returncode == found["exit_code"] == [OK, WARN, FAIL].index(worst)
    assert list(tmp_path.iterdir()) == []


def test_ranks_of_torchrun_are_measured_and_only_rank_0_prints() -> None:
    job = run_job(["-m", "torchrl_dist", "doctor", "--json"], nproc=3)
    text = job.log(0)
    found = json.loads(text[text.index('{"host"') :].splitlines()[0])
    (rpc,) = [each for each in found["checks"] if each["check"] == "rpc"]
    assert "slowest pair: rank" in rpc["found"]
    assert job.log(1) == "" or "host" not in job.log(1)


def test_a_rank_that_waits_alone_names_the_missing_one() -> None:
    alone = {
        "RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(reserved_port()),
    }  # fmt: skip
    done = run("--timeout-s", "1", env=alone)
    assert done.returncode == 2 and "rank1 (rank 1) did not join" in " ".join(done.stdout.split())


def test_clean_removes_what_dead_jobs_left_and_nothing_else(tmp_path, capsys) -> None:
    leave(tmp_path / "left")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes").write_text("x")
    assert (
        main(["doctor", "--no-round-trips", "--folder", str(tmp_path), "--clean", "--report"]) < 2
    )
    said = capsys.readouterr()
    assert f"removed {tmp_path / 'left'}" in said.err
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
    assert said.out.startswith("<details>") and "| torch | ok |" in said.out


def test_the_table_names_check_finding_and_cure(healthy: Probe, capsys) -> None:
    doctor.show(examine(dataclasses.replace(healthy, open_files=100)))
    said = capsys.readouterr().out
    assert "at most 100" in said and "fail open files: raise the limit with ulimit -n 4096" in said
    assert main(["doctor", "--processes", "0"]) == 2
    assert "--processes: got '0'" in capsys.readouterr().err
