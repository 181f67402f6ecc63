"""A job continues if standard output has no reader, is on a full disk, or is non-blocking."""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path

import pytest

from tests import warm
from torchrl_dist.runtime.outputs import BestEffort

PROGRAM = """
import os, sys
from torchrl_dist.runtime import outputs
outputs._FULL_S = 0.05
outputs.outlive_readers()
for _ in range(3):
    print("line" * 1000, flush=True)
sys.stdout.buffer.write(b"bytes")
sys.stdout.flush()
problem = outputs.problem_of(sys.stdout)
if isinstance(problem, BrokenPipeError):
    os.write(1, b"of another library")
print("problem:", problem, file=sys.stderr)
"""


@pytest.mark.parametrize("kind", ["file", "no reader", "full disk", "full pipe"])
def test_output_that_cannot_be_written_is_dropped(kind: str, tmp_path: Path) -> None:
    reader = -1
    if kind in ("no reader", "full pipe"):
        reader, writer = os.pipe()
        if kind == "no reader":
            os.close(reader)
        os.set_blocking(writer, kind == "no reader")
        stdout = open(writer, "w")
    else:
        stdout = open("/dev/full" if kind == "full disk" else tmp_path / "out", "w")
    with stdout, open(tmp_path / "err", "w") as stderr:
        if kind == "full pipe":
            with pytest.raises(BlockingIOError):
                while True:
                    os.write(stdout.fileno(), b"x" * 4096)
        program = warm.start([sys.executable, "-c", PROGRAM], stdout=stdout, stderr=stderr)
        assert program.wait(60) == 0
    if kind == "full pipe":
        os.close(reader)
    said = (tmp_path / "err").read_text()
    problem = {"no reader": "Broken pipe", "full disk": "No space left"}.get(kind, "None")
    assert "problem: " in said and problem in said, said
    if kind == "file":
        assert (tmp_path / "out").read_text() == ("line" * 1000 + "\n") * 3 + "bytes"


def test_a_stream_that_is_closed_or_not_there_takes_everything() -> None:
    closed = io.StringIO()
    closed.close()
    for stream in (closed, None):
        print("lost", file=BestEffort(stream), flush=True)
        assert BestEffort(stream).isatty() is False
    kept = io.StringIO()
    print("kept", file=BestEffort(kept), end="")
    assert kept.getvalue() == "kept"
