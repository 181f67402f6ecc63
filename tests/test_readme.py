"""README's programs run as they stand, and its commands are those that CI runs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.spawn import run_job

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
PROGRAMS = dict(re.findall(r"```python\n# (\w+\.py).*?\n(.*?)```", README, flags=re.DOTALL))


@pytest.fixture
def program(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path = tmp_path / request.param
    text = PROGRAMS[request.param].replace("/dev/shm/share-example", str(tmp_path / "replay"))
    path.write_text(text)
    return path


@pytest.mark.parametrize("program", ["share.py"], indirect=True)
def test_every_rank_sees_the_rows_of_all(program: Path) -> None:
    job = run_job([str(program)], nproc=4)
    assert job.returncode == 0, job
    for rank in range(4):
        assert f"rank {rank} sees 10000 rows" in job.log(rank)
    assert not (program.parent / "replay").exists()


@pytest.mark.parametrize("program", ["learn.py"], indirect=True)
def test_ranks_that_learn_together_end_with_one_checksum(program: Path) -> None:
    job = run_job([str(program)], nproc=2)
    assert job.returncode == 0, job
    (checksum,) = {job.log(rank).splitlines()[-1].split(": ")[1] for rank in range(2)}
    assert len(checksum) == 16


@pytest.mark.parametrize("program", ["collect.py"], indirect=True)
def test_the_collector_example_prints_its_batches(program: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(program)], capture_output=True, text=True, timeout=90
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("torch.Size([16, 64])") == 4


@pytest.mark.parametrize("program", ["shards.py"], indirect=True)
def test_the_sharded_example_samples_from_all_three(program: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(program)], capture_output=True, text=True, timeout=90
    )
    assert done.returncode == 0, done.stderr
    assert "3000 rows, one batch from shards [0, 1, 2]" in done.stdout
    assert not done.stderr


def test_ci_runs_the_test_command_as_it_stands() -> None:
    command = next(line for line in README.splitlines() if line.endswith("python -m pytest"))
    assert command.strip() in (ROOT / ".ci" / "run").read_text().splitlines()


def test_only_the_named_things_lie_at_the_top() -> None:
    listed = subprocess.run(
        ["git", "ls-tree", "--name-only", "HEAD"], cwd=ROOT, capture_output=True, text=True
    )
    allowed = {"pyproject.toml", "torchrl_dist", "tests", "tutorials", "README.md", "LICENSE"}
    assert {name for name in listed.stdout.split() if not name.startswith(".")} <= allowed
