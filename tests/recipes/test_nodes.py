"""The recipes over nodes, which are network namespaces."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests import netns
from tests.netns import Host, run_tasks, run_torchrun, wait_until_all_are_up
from tests.recipes.jobs import progress
from torchrl_dist.checkpoint import load_checkpoint
from torchrl_dist.cli import main

pytestmark = [
    pytest.mark.skipif(netns.missing() is not None, reason=f"no hosts here: {netns.missing()}"),
]
SMALL = [
    *("--hidden", "8", "--envs-per-collector", "2", "--eval-interval-frames", "100_000"),
    *("--eval-episodes", "2", "--eval-max-steps", "20", "--timeout-s", "60"),
]
ROWS = [*SMALL, "--replay-dir", "/dev/shm/rows", "--batch-size", "16", "--learning-starts", "32"]
APEX = ["train", "apex", *ROWS, "--frames-per-batch", "48", "--updates-per-batch", "2"]
R2D2 = ["train", "r2d2", *ROWS, "--frames-per-batch", "48", "--lstm", "8", "--learners", "2"]
SAC = ["train", "sac", *ROWS, "--frames-per-batch", "12", "--updates-per-frame", "0.25"]
IMPALA = ["train", "impala", *SMALL, "--frames-per-batch", "40"]
DDPPO = ["train", "ddppo", *SMALL, "--frames-per-batch", "128"]


@pytest.fixture
def network() -> Iterator[list[Host]]:
    with netns.hosts(3) as network:
        yield network
    assert netns.leftovers() == []


def trained(arguments: list[str]) -> dict:
    """What the command prints on the first rank; {} on the others."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert main(arguments) == 0
    lines = printed.getvalue().splitlines()
    return json.loads(lines[-1]) if lines else {}


def each_recipe_in_turn(folder: str) -> None:
    os.chdir(folder)
    runs = {
        "apex": [*APEX, "--total-frames", "480"],
        "apex resumed": [*APEX, "--total-frames", "960", "--resume", "--learning-starts", "400"],
        "apex by two": [*APEX, "--total-frames", "480", "--learners", "2", "--seed", "1"],
        "r2d2": [*R2D2, "--refresh-states", "--total-frames", "480"],
        "sac": [*SAC, "--total-frames", "240"],
        "impala": [*IMPALA, "--total-frames", "400"],
        "ddppo": [*DDPPO, "--total-frames", "256"],
    }
    for name, arguments in runs.items():
        arguments += ["--output-dir", name.split(" r")[0]]
        if "--replay-dir" in arguments:
            arguments[arguments.index("--replay-dir") + 1] += name.split(" r")[0][-3:]
        result = trained(arguments)
        if result:
            Path(folder, f"{name}.json").write_text(json.dumps(result))


def test_every_recipe_runs_on_two_nodes_under_torchrun(network, tmp_path: Path) -> None:
    job = run_torchrun(
        network[:2], each_recipe_in_turn, {"folder": str(tmp_path)}, tmp_path, nproc=[2, 2]
    )
    assert job.wait(200) == [0, 0], str(job)
    results = {path.stem: json.loads(path.read_text()) for path in tmp_path.glob("*.json")}
    counted = {name: (r["learners"], r["collectors"]) for name, r in results.items()}
    assert counted == {
        "apex": (1, 3),
        "apex resumed": (1, 3),
        "apex by two": (2, 2),
        "r2d2": (2, 2),
        "sac": (1, 3),
        "impala": (1, 3),
        "ddppo": (4, 4),
    }
    assert all(r["updates"] > 0 and r["lost_collectors"] == [] for r in results.values())
    assert results["apex resumed"]["resumes"] == 1
    # Only with the earlier rows can it learn from its first batch on.
    assert results["apex resumed"]["updates"] == results["apex"]["updates"] + 2 * 10
    assert 0.1 < results["sac"]["updates"] / results["sac"]["frames"] < 0.4
    for name in ("pex", "two", "2d2", "sac"):  # a shard on each node
        assert all(list(host.shm.glob(f"rows{name}/*")) for host in network[:2])


def trains_until_told(arguments: list[str], folder: str) -> None:
    os.chdir(folder)
    wait_until_all_are_up(Path(folder))
    sys.exit(main(arguments))


def test_training_goes_on_without_a_node_that_was_killed(network, tmp_path: Path) -> None:
    """As under ``srun --kill-on-bad-exit=0``; a collector and a shard go with it."""
    run = tmp_path / "run"
    often = ["--checkpoint-interval-s", "0.2", "--total-frames", "100_000_000", "--timeout-s", "60"]
    arguments = [*APEX, *often, "--output-dir", str(run)]
    job = run_tasks(
        network, trains_until_told, {"arguments": arguments, "folder": str(tmp_path)}, tmp_path
    )

    def until(condition: Callable[[], bool]) -> None:
        give_up = time.monotonic() + 120
        while not condition():
            assert job.processes[0].poll() is None and time.monotonic() < give_up, str(job)
            time.sleep(0.1)

    until(progress(run))
    network[2].kill()
    until(lambda: "collector1 is lost (" in job.log(0))
    until(progress(run, more_than=load_checkpoint(run / "checkpoint.pt").counters["updates"]))
    job.processes[0].send_signal(signal.SIGTERM)
    assert job.wait(60, hosts=[0, 1]) == [128 + signal.SIGTERM, 0], str(job)
    result = json.loads(job.log(0).splitlines()[-1])
    assert result["lost_collectors"] == ["collector1"]
    assert result["stopped_by"] == "SIGTERM" and "Traceback" not in job.log(0), str(job)
