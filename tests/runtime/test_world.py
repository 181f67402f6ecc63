"""World.from_env reads from the launcher's variables, if any, which process this is."""

from __future__ import annotations

import dataclasses
import os
import shlex
import socket
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from torchrl_dist.errors import ConfigurationError
from torchrl_dist.runtime import session
from torchrl_dist.runtime.roles import assign_roles
from torchrl_dist.runtime.world import World, expand_hosts, has_ended, is_stamp, process_stamp

HOST = socket.gethostname()
OWN, PARENT = process_stamp(os.getpid()), process_stamp(os.getppid())


def variables(text: str) -> dict[str, str]:
    return dict(word.split("=", 1) for word in text.split())


TORCHRUN = variables(
    "RANK=5 WORLD_SIZE=8 LOCAL_RANK=1 LOCAL_WORLD_SIZE=4 GROUP_RANK=1 MASTER_ADDR=node0 "
    "MASTER_PORT=1234 TORCHELASTIC_RUN_ID=job7 TORCHELASTIC_RESTART_COUNT=2"
)
SLURM = variables(
    "SLURM_PROCID=5 SLURM_NTASKS=7 SLURM_LOCALID=1 SLURM_NODEID=1 SLURM_JOB_ID=99 "
    "SLURM_STEP_ID=0 SLURM_STEP_NODELIST=gpu[03-04] SLURM_STEP_TASKS_PER_NODE=4,3"
)


FABRIC = variables("WORLD_SIZE=4 NODE_RANK=0 LOCAL_RANK=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=1234")


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        (TORCHRUN, World(5, 8, 1, 4, 1, HOST, "node0", 1234, "job7", 2, "torchrun")),
        ({**SLURM, **TORCHRUN}, World(5, 8, 1, 4, 1, HOST, "node0", 1234, "job7", 2, "torchrun")),
        (
            {**SLURM, "MASTER_PORT": "7"},
            World(5, 7, 1, 3, 1, HOST, "gpu03", 7, "99.0", 0, "slurm"),
        ),
        (FABRIC, World(2, 4, 2, 4, 0, HOST, "127.0.0.1", 1234, PARENT, 0, "fabric")),
        (
            {**FABRIC, "LOCAL_RANK": "0"},  # the script that started the others
            World(0, 4, 0, 4, 0, HOST, "127.0.0.1", 1234, OWN, 0, "fabric"),
        ),
        ({}, World(0, 1, 0, 1, 0, HOST, "127.0.0.1", None, OWN, 0, "single")),
        # an sbatch script, which has Slurm's variables although it is a single process
        (
            {name: value for name, value in SLURM.items() if name != "SLURM_STEP_ID"},
            World(0, 1, 0, 1, 0, HOST, "127.0.0.1", None, OWN, 0, "single"),
        ),
        (
            {"TORCHRL_DIST_JOB_ID": "12-34"},  # started by a child of local_cluster
            World(0, 1, 0, 1, 0, HOST, "127.0.0.1", None, "12-34", 0, "single"),
        ),
    ],
)  # fmt: skip
def test_the_environment_of_each_launcher_is_read_completely(env, expected) -> None:
    world = World.from_env(env)
    assert dataclasses.replace(world, master_hosts=()) == expected
    assert world.one_node == (world.launcher in ("single", "fabric"))


def test_tasks_of_a_slurm_job_agree_on_a_port_that_another_job_does_not_use() -> None:
    port = World.from_env(SLURM).master_port
    assert 20_000 <= port < 32_000
    assert World.from_env({**SLURM, "SLURM_PROCID": "0"}).master_port == port
    assert World.from_env({**SLURM, "SLURM_JOB_ID": "100"}).master_port != port


# As Slurm 22.05 set them: lists are sorted by name, node ids follow the components.
HET_STEP = variables(
    "SLURM_NTASKS=5 SLURM_STEP_NUM_TASKS=5 SLURM_JOB_ID=7 SLURM_STEP_ID=0 "
    "SLURM_STEP_NODELIST=cpu[11-12],gpu1 SLURM_STEP_TASKS_PER_NODE=3,1(x2) "
    "SLURM_HET_SIZE=2 SLURM_JOB_NODELIST_PACK_GROUP_0=gpu1 "
    "SLURM_JOB_NODELIST_PACK_GROUP_1=cpu[11-12]"
)
ARBITRARY_STEP = variables(
    "SLURM_NTASKS=3 SLURM_JOB_ID=8 SLURM_STEP_ID=0 SLURM_STEP_NODELIST=cpu[11-12] "
    "SLURM_STEP_TASKS_PER_NODE=2,1"
)


def task(step: dict[str, str], rank: int, local: int, node: int, host: str) -> World:
    place = {"SLURM_PROCID": rank, "SLURM_LOCALID": local, "SLURM_NODEID": node}
    own = {name: str(number) for name, number in place.items()}
    return World.from_env({**step, **own, "SLURMD_NODENAME": host})


def test_in_a_heterogeneous_step_the_master_is_the_first_components_first_host():
    tasks = [
        task(HET_STEP, 0, 0, 0, "gpu1"),
        *(task(HET_STEP, 1 + k, k, 1, "cpu11") for k in range(3)),
        task(HET_STEP, 4, 0, 2, "cpu12"),
    ]
    assert {world.master_addr for world in tasks} == {"gpu1"}
    assert [world.local_world_size for world in tasks] == [1, 3, 3, 3, 1]
    assert [world.node_rank for world in tasks] == [0, 1, 1, 1, 2]
    assert len({world.master_port for world in tasks}) == 1
    # names of later versions; and a step of the second component alone
    later = {name.replace("PACK", "HET"): value for name, value in HET_STEP.items()}
    assert task(later, 4, 0, 2, "cpu12").master_addr == "gpu1"
    second = {**HET_STEP, "SLURM_STEP_NODELIST": "cpu[11-12]", "SLURM_STEP_TASKS_PER_NODE": "3,1"}
    assert task(second, 3, 0, 1, "cpu12").master_addr == "cpu11"


def test_any_host_may_be_rank_0s_if_slurm_does_not_say_where_it_is():
    first = task(ARBITRARY_STEP, 0, 0, 1, "cpu12")
    others = [task(ARBITRARY_STEP, 1 + k, k, 0, "cpu11") for k in range(2)]
    assert (first.master_addr, first.master_hosts) == ("cpu12", ())
    assert [world.master_hosts for world in others] == [("cpu11", "cpu12")] * 2
    assert [world.local_world_size for world in (first, *others)] == [1, 2, 2]
    told = task({**ARBITRARY_STEP, "MASTER_ADDR": "10.0.0.7"}, 1, 0, 0, "cpu11")
    assert (told.master_addr, told.master_hosts) == ("10.0.0.7", ())


UNLAUNCHED = [
    # for example, the rest of Slurm's variables in a container
    {"SLURM_PROCID": "{rank}", "SLURM_NTASKS": "3", "SLURM_JOB_ID": "7"},
    {"OMPI_COMM_WORLD_RANK": "{rank}", "OMPI_COMM_WORLD_SIZE": "3"},
    {"PMI_RANK": "{rank}", "PMI_SIZE": "3"},
]


@pytest.mark.parametrize("env", UNLAUNCHED, ids=["slurm", "open-mpi", "mpi"])
def test_ranks_that_would_each_be_a_separate_job_get_a_warning_or_an_error(env, monkeypatch):
    for rank, told in (
        (0, pytest.warns(UserWarning, match="task 0 of 3 .*srun")),
        (2, pytest.raises(ConfigurationError, match="task 2 of 3 .*SLURM_STEP_ID")),
    ):
        for name, value in env.items():
            monkeypatch.setenv(name, value.format(rank=rank))
        with told, session({"learner": 1, "collector": -1}) as alone:
            assert alone.peers == (alone.me,)
    with session({"learner": 1}, world=World.from_env({})):  # intended, so no warning
        pass


def test_the_shell_of_an_allocation_gets_a_warning_and_a_single_task_does_not(monkeypatch, recwarn):
    monkeypatch.setenv("SLURM_NTASKS", "1")
    monkeypatch.setenv("SLURM_PROCID", "0")
    with session():
        pass
    assert not recwarn
    monkeypatch.setenv("SLURM_NTASKS", "3")
    monkeypatch.delenv("SLURM_PROCID")
    with pytest.warns(UserWarning, match="task 0 of 3 that SLURM started"), session():
        pass


@pytest.mark.parametrize(
    ("env", "named"),
    [
        *(
            ({name: value for name, value in TORCHRUN.items() if name != missing}, missing)
            for missing in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
        ),
        (
            {name: value for name, value in SLURM.items() if name != "SLURM_LOCALID"},
            "SLURM_LOCALID",
        ),
        ({**TORCHRUN, "RANK": "8"}, "rank 8 in a world of 8"),
        ({**TORCHRUN, "RANK": "x"}, "RANK='x'"),
        ({**TORCHRUN, "LOCAL_RANK": "4"}, "local rank 4 of 4"),
        ({**TORCHRUN, "WORLD_SIZE": "0"}, "WORLD_SIZE=0: expected at least 1"),
        ({**TORCHRUN, "MASTER_PORT": "0"}, "MASTER_PORT=0: expected at least 1"),
        ({**FABRIC, "MASTER_ADDR": "node0"}, "several nodes .* torchrun"),
    ],
)
def test_an_environment_that_is_half_set_or_cannot_be_right_is_refused(env, named):
    with pytest.raises(ConfigurationError, match=named):
        World.from_env(env)


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("n1", ["n1"]),
        ("n[1-3]", ["n1", "n2", "n3"]),
        ("n[08-10,12],gpu3", ["n08", "n09", "n10", "n12", "gpu3"]),
        ("r[1-2]n[1-2].x", ["r1n1.x", "r1n2.x", "r2n1.x", "r2n2.x"]),
    ],
)
def test_host_lists_expand(text, hosts):
    assert expand_hosts(text) == hosts


def test_roles_are_assigned_in_rank_order_and_one_takes_the_rest():
    assert assign_roles({"learner": 1, "collector": -1}, 3) == [
        ("learner", 0),
        ("collector", 0),
        ("collector", 1),
    ]
    assert assign_roles({"learner": 1, "collector": -1}, 1) == [("learner", 0)]


@pytest.mark.parametrize("roles", [{"a": 1, "b": 1}, {"a": 4}, {"a": -1, "b": -1}, {"a": -2}])
def test_roles_that_do_not_fit_the_world_are_refused(roles):
    with pytest.raises(ConfigurationError):
        assign_roles(roles, 3)


# --- the stamp of a process ----------------------------------------------------------------------


def test_a_stamp_says_when_its_process_has_ended() -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE
    )
    stamp = process_stamp(child.pid)
    assert is_stamp(stamp) and not is_stamp("7.0") and not is_stamp(str(uuid.uuid4()))
    assert not has_ended(stamp) and not has_ended(process_stamp(os.getpid()))
    child.stdin.close()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert has_ended(stamp)  # a zombie
    child.wait()
    assert has_ended(stamp)
    pid, started, namespace, boot = process_stamp(os.getpid()).split("-")
    assert has_ended(f"{pid}-{int(started) - 1}-{namespace}-{boot}")
    assert has_ended(f"{pid}-{started}-{namespace}-00000000")
    assert not has_ended(f"{pid}-{started}-1-{boot}")  # unknown
    assert not has_ended(f"{pid}-{started}-{namespace}-")


def test_jobs_in_pid_namespaces_with_one_proc_have_ids_of_their_own() -> None:
    code = (
        "import os, sys, types; sys.path.insert(0, sys.argv[1])\n"
        "package = types.ModuleType('torchrl_dist.runtime')  # without torch\n"
        "package.__path__ = [sys.argv[1] + '/torchrl_dist/runtime']\n"
        "sys.modules[package.__name__] = package\n"
        "from torchrl_dist.runtime.world import World, process_stamp\n"
        "print(World.from_env({}).job_id, process_stamp(os.getppid()), os.getpid())"
    )
    root = str(Path(__file__).parents[2])
    # Each Python is the second process of its namespace, and sees the /proc of this one.
    inner = f'{shlex.quote(sys.executable)} -c "$0" "$1"; true'
    command = ["unshare", "--pid", "--fork", "sh", "-c", inner, code, root]
    if subprocess.run(["unshare", "--pid", "--fork", "true"], capture_output=True).returncode:
        pytest.skip("needs the right to make a pid namespace")
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    (own, parent, pid), (own2, parent2, pid2) = (p.communicate(timeout=60)[0].split() for p in both)
    assert pid == pid2 and own.split("-")[0] == own2.split("-")[0] == pid
    assert own != own2 and parent != parent2
    assert own.split("-")[1] != "0" and parent.split("-")[1] != "0"


@pytest.mark.parametrize(
    ("run_id", "known"),
    [("none", True), ("18f84c14-42f3-4715-9112-0499bf6dfada", True), ("mine", False)],
)
def test_a_job_that_cannot_come_back_names_its_starter(run_id: str, known: bool) -> None:
    world = World.from_env({**TORCHRUN, "TORCHELASTIC_RUN_ID": run_id})
    assert world.starter == (process_stamp(os.getppid()) if known else None)
    # torchrun's default names all jobs alike
    assert world.job_id == (process_stamp(os.getppid()) if run_id == "none" else run_id)
    assert World.from_env({}).starter == process_stamp(os.getpid())
