"""The programs of README and of the site's pages run as they stand; README's commands are CI's."""

from __future__ import annotations

import functools
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torchrl.data import ReplayBuffer

import torchrl_dist
from tests import warm
from tests.spawn import run_job, wait_until
from torchrl_dist.ops.slurm import recipe_of
from torchrl_dist.replay.node.directory import data_size
from torchrl_dist.replay.row.spec import ColumnSpec, RowSpec
from torchrl_dist.runtime import ForkServer

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
PAGES = {path: path.read_text() for path in [ROOT / "README.md", *ROOT.glob("tutorials/**/*.md")]}
# A block that begins so is a program; other blocks of Python are parts, which must compile.
PROGRAM = re.compile(
    r"```python\n# (\w+\.py), run with: (?:python|torchrun --nproc-per-node (\d)) \1\n(.*?)```",
    re.S,
)
PROGRAMS = {
    name: (int(nproc or 0), text)
    for page in PAGES.values()
    for name, nproc, text in PROGRAM.findall(page)
}
RANKS = {name for name, (ranks, _) in PROGRAMS.items() if ranks}
FRESH = {"collect.py", "with_fabric.py", "tune.py"}  # run in a separate process, as users run them
# What each program prints; if it has several ranks, what each rank prints.
PRINTS = {
    "share.py": r"rank \d sees 10000 rows\n",
    "learn.py": r"rank \d: \w{16}\n",
    "collect.py": r"(torch\.Size\(\[16, 64\]\) 1\.0\n){4}",
    "shards.py": r"3000 rows, one batch from shards \[0, 1, 2\]\n",
    "moved.py": r"torch\.Size\(\[2, 100\]\) policy version 2\n",
    "off_policy.py": r"2048 rows by 2 workers\n",
    "async_sac.py": r"3000 rows, [56]\d\d updates\n",
    "table.py": r"400 rows written, 1\d\d\d sampled\n",
    "episodes.py": r"\[0\.3, 0\.3\]\n(\d+ poles fell; workers' shares: \{0: .*, 1: .*\}\n)+",
    "own_env.py": r"lowest cell \d of torch\.Size\(\[8, 50\]\)\n",
    "atari.py": r"256 torch\.Size\(\[32, 4, 84, 84\]\) 565\d\d bytes per row\n",
    "with_trainer.py": r"rank [01]: \d+ frames, \d+ rows, \w{16}\n",
    "four_ranks.py": r"rank \d: 8[45] updates, 6400 rows, \w{16}\n",
    "tune.py": r"4 trials, the best return is \d+\.\d\n",
    "own_loop.py": r"rank [01]: step 60, \d+ rows, \w{16}\n",
    "minari_data.py": r"458 rows torch\.Size\(\[32, 4\]\) torch\.float64\n",
    "with_fabric.py": r"(rank [01]: 200 rows, parameters (\w{16})\n){2}",
}


@pytest.fixture
def program(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path = tmp_path / request.param
    path.write_text(
        re.sub(r"/dev/shm/\w+-example", str(tmp_path / "replay"), PROGRAMS[path.name][1])
    )
    return path


def files_next_to(program: Path) -> set[str]:
    return {path.name for path in program.parent.iterdir()} - {program.name, "__pycache__"}


@pytest.mark.parametrize(
    "program", sorted(RANKS - {"own_loop.py", "with_trainer.py"}), indirect=True
)
def test_a_program_for_torchrun_prints_what_its_page_says(program: Path) -> None:
    ranks, _ = PROGRAMS[program.name]
    # one of them as users start it
    job = run_job([str(program)], nproc=ranks, cold=program.name == "share.py")
    assert job.returncode == 0, str(job)
    lines = [job.log(rank).splitlines()[-1] + "\n" for rank in range(ranks)]
    assert all(re.fullmatch(PRINTS[program.name], line) for line in lines), lines
    if program.name in ("learn.py", "four_ranks.py"):
        assert len({line.split(": ")[1] for line in lines}) == 1, lines
    assert not files_next_to(program)


@pytest.mark.parametrize("program", ["own_loop.py"], indirect=True)
def test_the_loop_of_its_page_goes_on_where_it_was_interrupted(program: Path) -> None:
    """It has the rows of its checkpoint, although those in memory are gone, as on another node."""
    steps, run = "STEPS, ROWS, BATCH = 2_000", program.parent / "own-loop"
    text = program.read_text().replace('Path("own-loop")', f'Path("{run}")')
    assert steps in text
    program.write_text(text.replace(steps, "STEPS, ROWS, BATCH = 60"))
    logged = run / "metrics" / "scalars"

    def interrupt(agent: warm.Running) -> None:
        wait_until((logged / "rows.csv").exists, timeout_s=100)
        agent.send_signal(signal.SIGTERM)

    first = run_job([str(program)], nproc=4, timeout_s=150, on_start=interrupt)
    assert first.returncode, first
    ended = [re.search(r"step (\d+), (\d+) rows, (\w+)\n", first.log(r)) for r in (0, 1)]
    assert all(ended) and ended[0].groups() == ended[1].groups(), first
    step, rows, _ = ended[0].groups()
    assert 10 <= int(step) < 60, first
    shutil.rmtree(program.parent / "replay")
    second = run_job([str(program)], nproc=4, timeout_s=150)
    assert second.returncode == 0, second
    for rank in (0, 1):
        begun, line = second.log(rank).splitlines(keepends=True)
        assert begun == f"rank {rank}: from step {step}, {rows} rows\n", second
        assert re.fullmatch(PRINTS[program.name], line), second
    numbers = {
        name: [line.split(",") for line in (logged / f"{name}.csv").read_text().splitlines()]
        for name in ("rows", "rows_written", "sum_over_ranks/frames", "mean_over_ranks/loss")
    }
    for name, points in numbers.items():
        assert [int(at) for at, _ in points] == [10, 20, 30, 40, 50, 60], (name, points)
    frames = [float(value) for _, value in numbers["sum_over_ranks/frames"]]
    assert frames == [128 * at for at in range(10, 61, 10)], frames  # both runs', all collectors'
    assert frames == [float(value) for _, value in numbers["rows_written"]]


@pytest.mark.parametrize("program", ["with_trainer.py"], indirect=True)
@pytest.mark.parametrize("way", ["in memory", "by RPC"])
def test_the_trainer_of_its_page_goes_on_where_it_was_interrupted(program: Path, way: str) -> None:
    run = program.parent / "trainer-run"
    text = program.read_text().replace('Path("trainer-run")', f'Path("{run}")')
    assert "FRAMES = 20_000" in text and "batch_size=64)" in text
    if way == "by RPC":
        text = text.replace("batch_size=64)", "batch_size=64, shortcut=False)")
    program.write_text(text)
    logged = run / "metrics" / "scalars" / "loss.csv"

    def interrupt(agent: warm.Running) -> None:
        wait_until(logged.exists, timeout_s=100)
        agent.send_signal(signal.SIGTERM)

    first = run_job([str(program)], nproc=2, timeout_s=150, on_start=interrupt)
    assert first.returncode, first
    ended = [re.search(r"rank \d: (\d+) frames, (\d+) rows, (\w+)\n", first.log(r)) for r in (0, 1)]
    assert all(ended) and ended[0].groups() == ended[1].groups(), first
    frames, rows = map(int, ended[0].groups()[:2])
    assert 512 < frames < 20_000 and rows == 2 * frames, first
    program.write_text(text.replace("FRAMES = 20_000", f"FRAMES = {frames + 640}"))
    second = run_job([str(program)], nproc=2, timeout_s=150)
    assert second.returncode == 0, second
    for rank in (0, 1):
        begun, line = second.log(rank).splitlines(keepends=True)[-2:]
        assert begun == f"rank {rank}: from frame {frames}\n", second
        assert re.fullmatch(PRINTS[program.name], line), second
        assert line.startswith(f"rank {rank}: {frames + 640} frames, {rows + 1280} rows"), second
    steps = [int(line.split(",")[0]) for line in logged.read_text().splitlines()]
    assert steps == sorted(steps) and steps[0] <= frames


@pytest.mark.parametrize("program", sorted(FRESH), indirect=True)
def test_a_program_prints_what_its_page_says(program: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(program)],
        capture_output=True, text=True, timeout=90, cwd=program.parent,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(PRINTS[program.name], done.stdout), done.stdout + done.stderr
    assert files_next_to(program) <= {"runs"}  # what it trained


@pytest.mark.parametrize("program", sorted(PROGRAMS.keys() - FRESH - RANKS), indirect=True)
def test_a_program_prints_what_its_page_says_in_this_process(
    program: Path,
    fork_server: ForkServer,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """It saves the imports of a fresh process and of its children, its main cost."""
    cluster = functools.partial(torchrl_dist.local_cluster, fork_server=fork_server)
    monkeypatch.setattr(torchrl_dist, "local_cluster", cluster)
    monkeypatch.chdir(program.parent)
    space = runpy.run_path(str(program), run_name="__main__")
    shared = [value for value in space.values() if isinstance(value, ReplayBuffer)]
    for buffer in shared:  # the end of a process would do so
        getattr(buffer.storage, "close", lambda: None)()
    printed = capfd.readouterr()
    assert re.fullmatch(PRINTS[program.name], printed.out), printed
    if program.name == "shards.py":
        assert not printed.err
    assert not files_next_to(program)


def test_every_program_has_an_expectation() -> None:
    assert PROGRAMS.keys() == PRINTS.keys()


def test_blocks_of_python_compile() -> None:
    for path, page in PAGES.items():
        for block in re.findall(r"```python\n(.*?)```", page, re.S):
            compile(block, str(path), "exec")


def test_the_limiter_of_its_page_fits_its_buffer(tmp_path: Path) -> None:
    page = PAGES[ROOT / "tutorials" / "guide" / "limiter.md"]
    (block,) = re.findall(r"```python\n(.*?)```", page, re.S)
    space: dict[str, object] = {}
    exec(block.replace("/dev/shm/limited-example", str(tmp_path / "replay")), space)
    assert space["storage"].limiter == space["limiter"]
    space["storage"].close()


def test_the_page_on_atari_counts_its_memory_and_its_command_is_understood() -> None:
    page = PAGES[ROOT / "tutorials" / "how_to" / "atari.md"]
    lines = re.findall(r"^\| ([\d,]+).* \| ([\d.]+) GiB \| ([\d.]+) GiB \|$", page, re.M)
    assert len(lines) == 3
    images = [ColumnSpec(key, torch.uint8, (4, 84, 84), stack=4) for key in (("x",), ("next", "x"))]
    for rows, gib, plain in lines:
        count = int(rows.replace(",", ""))
        assert float(plain) == pytest.approx(count * 2 * 4 * 84 * 84 / 2**30, rel=0.02), rows
        taken = data_size(RowSpec(tuple(images)), count) / 2**30
        assert float(gib) == pytest.approx(taken, abs=0.1), rows
    (command,) = re.findall(r"^    torchrl-dist (train apex .*?[^\\])$", page[500:], re.M | re.S)
    config, given = recipe_of(command.replace("\\\n", " ").split())
    assert given["capacity"] == 1_000_000 and config.learning_rate == config.learning_rate_end
    assert config.updates_per_batch * 4 == config.frames_per_batch
    default = f"{type(config)().capacity:,} (the recipe's default)"
    assert default in page


def test_ci_runs_the_test_command_as_it_stands() -> None:
    command = next(line for line in README.splitlines() if line.endswith("python -m pytest"))
    assert command.strip() in (ROOT / ".ci" / "run").read_text().splitlines()


def test_the_top_folder_has_only_the_named_entries() -> None:
    listed = subprocess.run(
        ["git", "ls-tree", "--name-only", "HEAD"], cwd=ROOT, capture_output=True, text=True
    )
    allowed = {"pyproject.toml", "torchrl_dist", "tests", "tutorials", "README.md", "LICENSE"}
    assert {name for name in listed.stdout.split() if not name.startswith(".")} <= allowed
