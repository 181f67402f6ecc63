"""Sessions in the steps of a real Slurm, whose nodes are network namespaces."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests import slurm
from tests.netns import wait_for
from tests.spawn import rank_script, wait_until
from torchrl_dist.collect import RPCBatchedCollector
from torchrl_dist.runtime import session

pytestmark = [
    pytest.mark.timeout(240),
    pytest.mark.skipif(slurm.missing() is not None, reason=f"no Slurm here: {slurm.missing()}"),
]
ROLES = {"learner": 1, "collector": -1}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., subprocess.Popen]]:
    with slurm.on_three_hosts(tmp_path_factory.mktemp("cluster") / "slurm") as run:
        yield run


def the_driver_calls_all(folder: str) -> None:
    with session(ROLES, timeout_s=100) as me:
        world = me.world
        facts = (world.host, world.node_rank, world.local_world_size, world.master_addr)
        Path(folder, f"facts{world.global_rank}").write_text(json.dumps(facts))
        if me.is_driver:
            hosts = [me.call(peer, lambda: os.environ["SLURMD_NODENAME"]) for peer in me.peers]
            Path(folder, "hosts").write_text(json.dumps(hosts))


def test_in_a_heterogeneous_step_all_meet_at_rank_0(run, tmp_path):
    """Slurm's list of this step's hosts is host[0-2]; rank 0 is on host2."""
    script = [
        sys.executable,
        *rank_script(the_driver_calls_all, {"folder": str(tmp_path)}, tmp_path),
    ]
    step = run(
        ["srun", "-p", "gpu", "-n1", *script, ":", "-p", "cpu", "-N2", "-n3", *script],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    output, _ = step.communicate(timeout=200)
    assert step.returncode == 0, output
    facts = [json.loads((tmp_path / f"facts{rank}").read_text()) for rank in range(4)]
    assert facts == [
        ["host2", 0, 1, "host2"],
        ["host0", 1, 2, "host2"],
        ["host0", 1, 2, "host2"],
        ["host1", 2, 1, "host2"],
    ]
    assert json.loads((tmp_path / "hosts").read_text()) == ["host2", "host0", "host0", "host1"]


def collect_until_stopped(folder: str) -> None:
    with session(ROLES, timeout_s=100) as me:
        if not me.is_driver:
            me.serve()
            Path(folder, f"served{me.me.index}").write_text(str(me.stop_signal))
            return
        with RPCBatchedCollector(
            "CartPole-v1", session=me, frames_per_batch=64, num_envs=2, env_processes=2
        ) as collector:
            for _ in collector:  # without a check of stop_requested
                Path(folder, "collecting").touch()
            stages = [me.stop_signal.name]
            for stage in ("noticed", "terminated"):
                # A call through the worker and its env processes, like one that writes a
                # checkpoint.
                assert collector.get_attr("spec")
                stages.append(me.world.master_addr)
                Path(folder, f"stage {stage}").touch()
                if stage == "noticed":
                    wait_for(Path(folder, "go on"))
            assert not collector.report.lost_workers and not collector.report.replaced
        Path(folder, "stages").write_text(json.dumps(stages))


def test_signals_to_all_processes_of_a_step_let_the_learner_finish_through_them(run, tmp_path):
    """Rank 0 is on the second node, by a distribution that Slurm's variables do not show."""
    (tmp_path / "placement").write_text("host1\nhost0\n")
    body = rank_script(collect_until_stopped, {"folder": str(tmp_path)}, tmp_path)
    step = run(
        ["srun", "-J", "stops", "-m", "arbitrary", "-n2", sys.executable, *body],
        env={"SLURM_HOSTFILE": str(tmp_path / "placement")},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )

    def wait(name: str) -> None:
        exists = (tmp_path / name).exists
        wait_until(lambda: exists() or step.poll() is not None, name, 150)
        assert exists(), step.communicate()[0]

    wait("collecting")
    # What --signal=USR1@60 sends ahead of the time limit, and what the limit or preemption sends.
    assert run(["scancel", "--name=stops", "--signal=USR1"]).wait(30) == 0
    wait("stage noticed")
    assert run(["scancel", "--name=stops"]).wait(30) == 0
    time.sleep(1)
    (tmp_path / "go on").touch()
    wait("stages")
    output, _ = step.communicate(timeout=60)
    assert json.loads((tmp_path / "stages").read_text()) == ["SIGUSR1", "host1", "host1"], output
    assert "SIGUSR1 received: learner0 finishes" in output and "Traceback" not in output
    assert (tmp_path / "served0").read_text() == "10"
