"""Processors that may reorder loads, or whose system call numbers are not known.

There, rows are copied under the lock, and a waiting process polls instead of sleeping in a futex.
These tests repeat tests of both in processes that treat this machine as such a processor.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent.parent
# Tests of reading and waiting that check results only.
CHOSEN = [
    "test_torn.py::test_no_row_is_torn_while_writers_lap_readers_and_each_other[as_rows-4096-64-8000]",
    "test_slices.py::test_slices_never_run_across_writers_nor_hold_torn_rows[True-80]",
    "test_passes.py::test_overwritten_rows_are_left_out_and_new_ones_wait_for_the_next_pass",
    "test_passes.py::test_processes_share_a_pass_also_if_one_is_killed",
    "test_passes.py::test_a_full_batch_waits_for_rows_that_are_written_anew",
    "test_gate.py::test_several_processes_sample_each_row_once",
    "test_gate.py::test_a_wait_for_a_writer_that_was_killed_ends_with_an_error_that_says_so",
]


@pytest.mark.timeout(240)
@pytest.mark.skipif(sys.platform != "linux", reason="needs the paths of Linux")
def test_rows_are_whole_and_waits_end_where_loads_are_not_ordered() -> None:
    chosen = [str(TESTS / "replay" / name) for name in CHOSEN]
    options = ["-q", "-n", "0", "-p", "no:cacheprovider"]
    program = (
        "import pytest\n"
        "from torchrl_dist.replay.node import futex, tables\n"
        "assert not tables.ORDERED_LOADS and futex._NUMBER is None\n"
        f"raise SystemExit(pytest.main({options + chosen}))"
    )
    environment = {**os.environ, "PYTHONPATH": f"{TESTS / 'elsewhere'}{os.pathsep}{TESTS.parent}"}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={k: v for k, v in environment.items() if not k.startswith("PYTEST_")},
        cwd=TESTS.parent,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout or "100%" in done.stdout
