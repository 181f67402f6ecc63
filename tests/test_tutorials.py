"""The notebooks run, find what their text says, leave nothing, and are stored as they ran."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest
from jupyter_client import AsyncKernelManager
from jupyter_client.kernelspec import KernelSpecManager
from nbclient import NotebookClient

from tests import warm
from tests.turns import ALONE
from torchrl_dist.cli import main as cli

FOLDER = Path(__file__).parent.parent / "tutorials"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
LARGEST_KB = 500


def near(value: float, within: float) -> Any:
    return pytest.approx(value, abs=within)


class Above(float):
    """Compares equal to any number above it."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, float | int) and other > float(self)

    __hash__ = float.__hash__


# What each notebook's last cell prints at any size, without figures that depend on the machine.
HEADLINES: dict[str, dict[str, Any]] = {
    "1_one_buffer_for_all_ranks": {
        "usual_len": 2500,
        "every_rank_counts_all": True,
        "rows_of_each_writer": [2500],
        "late_rank_law_error": near(0, 0.02),
        "synced_lengths_agree": False,
        "torchrl_recycled_share": 1.0,
        "torchrl_late_rank_share": near(1 / 8, 0.04),
        "recycled_share": near(1 / 8, 0.04),
        "late_rank_share_kept": near(1, 0.05),
        "beta_agrees": True,
        "beta_end": 1.0,
        "fabric_rows": [200, 200],
    },
    "2_is_a_buffer_per_worker_the_same_law": {
        "per worker, each shard the same rows": near(0, 0.001),
        "per worker, 1:2:3:4 rows": near(0.177, 0.01),
        "per worker, priorities 1:3:9:27": near(0.275, 0.01),
        "weights_off": near(0.7, 0.03),
        "updates, dealt out at random": near(1.05, 0.25),
        "updates, one rank acts well": Above(1.6),
        "sharded_to_floor": near(1, 0.15),
        "per_node": Above(0.4),
        "repaired_off_beta_1.0": near(0, 0.001),
        "repaired_off_beta_0.4": Above(0.2),
        "bench_worst_to_floor": near(1, 0.1),
    },
    "3_over_nodes_and_when_things_die": {
        "index_is_shard_and_slot": True,
        "draws_by_shard": [near(n / 6, 0.03) for n in (1, 2, 3)],
        "rows_back": 600,
        "samples_per_insert": near(4, 2),
        "windows_are_consecutive": True,
        "states_are_new_where_refreshed": True,
        "shard_of_the_dead_in_batch": 0,
        "reports": 1,
    },
    "4_collecting_at_every_step_duration": {
        "message_ms": near(0.215, 0.001),
        "formula_error": near(0.057, 0.001),
        "ours_of_floor_at_10_ms": Above(0.6),
        "aggregation_gain": Above(4),
        "ends": [[5, True], [7, False], [5, True]],
        "sums_over_a_reset": 0,
        "one_process_wins_single_steps": True,
    },
    "5_does_a_receive_deadline_pay": {
        "relative_spread_falls_by": near(16, 2),
        "gain_heavy_tail_one_env": Above(1.5),
        "gain_normal_many_envs": near(1, 0.15),
        "slow_share_wait_all": near(0.25, 0.01),
        "slow_share_first_ready": near(0.12, 0.1),  # of frames, by sleeps: 0.25 is fair
    },
    "6_learning_on_several_ranks": {
        "traps_here": near(0, 1e-5),
        "shared_len": 200,
        "important_on_rank_1": near(0.3, 0.1),
        "equal_seeds_alike": True,
        "ranks_seed_alike": False,
    },
    "7_plan_launch_and_watch": {
        "SAC on Pendulum": True,
        "checks": True,
        "script": True,
        "stopped_in_order": True,  # what top sees of such a short job depends on chance
    },
}


COMPARE_TIMES = {"4_collecting_at_every_step_duration"}


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder with a short name, because sockets are below it.

    Kernels of notebooks keep their temporary files there, run at toy size, and find the programs of
    this Python's environment. Their torchrun is forked from a process that has imported torch.
    """
    folder = Path(tempfile.mkdtemp(prefix="torchrl_dist-tutorial-"))
    for name in ("TMPDIR", "IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "work"):
        (folder / name).mkdir()
        monkeypatch.setenv(name, str(folder / name))
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)
    monkeypatch.setenv("TORCHRL_DIST_TOY", "1")
    with warm.door(folder / "door") as variables:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        yield folder
    shutil.rmtree(folder)


@pytest.fixture
def memory() -> Iterator[Path]:
    """The notebook's /dev/shm, without the files of other programs."""
    with tempfile.TemporaryDirectory(prefix="torchrl_dist-test-", dir="/dev/shm") as memory:
        yield Path(memory)


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, id=path.stem + (f"-{ALONE}" if path.stem in COMPARE_TIMES else ""))
        for path in NOTEBOOKS
    ],
)
def test_a_notebook_finds_what_its_text_says_and_leaves_nothing(path, folder, memory) -> None:
    before = set(FOLDER.iterdir())
    notebook = nbformat.read(path, as_version=4)
    run(notebook, folder / "work", memory)
    assert_found(path.stem, notebook)
    assert cli(["clean", "--remove", str(memory)]) == 0  # a killed host leaves files
    assert not list(memory.iterdir())
    assert set(FOLDER.iterdir()) == before
    torchs = ("torchelastic_", "torchinductor_")  # stay behind any program that uses torch
    temporary = {file.name for file in (folder / "TMPDIR").iterdir()}
    assert not {name for name in temporary if not name.startswith(torchs)}


def run(notebook: Any, work: Path, memory: Path) -> None:
    """Run it in a fresh kernel of this Python, not of a registered one.

    ``memory`` is its /dev/shm if namespaces are allowed.
    """
    kernel = AsyncKernelManager(
        kernel_spec_manager=KernelSpecManager(kernel_dirs=[]),
        transport="ipc",  # other programs can take a TCP port before the kernel binds it
        connection_file=str(work.parent / "kernel.json"),
    )
    if shutil.which("unshare") and not subprocess.run(["unshare", "--mount", "true"]).returncode:
        enter = ["unshare", "--mount", "sh", "-c", 'mount --bind "$0" /dev/shm && exec "$@"']
        kernel.kernel_spec.argv[:0] = [*enter, str(memory)]
    client = NotebookClient(
        notebook,
        km=kernel,
        timeout=240,
        coalesce_streams=True,
        resources={"metadata": {"path": str(work)}},
    )
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        client.execute(cleanup_kc=True)  # ends the kernel as well
    finally:  # if the kernel does not start, the client leaves its handlers behind
        for number, handler in handlers.items():
            signal.signal(number, handler)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_stored_as_it_ran(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell.outputs]
    assert not [output for output in outputs if output.output_type == "error"]
    assert not [output for output in outputs if output.get("name") == "stderr"]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert_found(path.stem, notebook)
    assert path.stat().st_size < LARGEST_KB * 1024
    assert not re.search(r"(?<![\w.~])/(home|root|tmp|work|usr)/", json.dumps(outputs))
    assert str(FOLDER.parent) not in path.read_text()


def assert_found(name: str, notebook: Any) -> None:
    (cell,) = [c for c in notebook.cells if "headline" in c.metadata.get("tags", [])]
    found = json.loads(cell.outputs[0].text.splitlines()[-1])
    expected = HEADLINES[name]
    assert {key: found[key] for key in expected} == expected
