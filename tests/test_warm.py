"""A program that ``tests.warm`` forks is like one that was started."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests import warm

PROBE = """
import json, os, pickle, signal, sys, tempfile, threading
import numpy, torch

class Own:
    pass

me = os.getpid()
print(json.dumps({
    "argv": sys.argv, "orig_argv": sys.orig_argv, "path": sys.path, "name": __name__,
    "file": globals().get("__file__"), "pickles": type(pickle.loads(pickle.dumps(Own()))) is Own,
    "cwd": os.getcwd(), "variables": dict(os.environ), "leads": os.getsid(0) == os.getpgid(0) == me,
    "parent": os.getppid(), "files": sorted(os.listdir("/proc/self/fd"))[:-1],
    "handlers": [str(signal.getsignal(n)) for n in (1, 2, 15)],
    "mask": [int(n) for n in signal.pthread_sigmask(signal.SIG_BLOCK, [])],
    "threads": threading.active_count(), "torch_threads": torch.get_num_threads(),
    "input": sys.stdin.read(),
    "words": open("/proc/self/cmdline").read().rstrip(chr(0)).split(chr(0)),
    "temporary": tempfile.gettempdir(),
    "mark": "MARK=x" in open("/proc/self/environ").read().split(chr(0)),
}))
print(numpy.random.random(), torch.rand(1), file=sys.stderr)
sys.exit(3)
"""


@pytest.mark.parametrize("words", [["-u", "probe.py"], ["-c", PROBE], ["-m", "probe"]])
def test_a_fork_has_the_state_of_a_new_interpreter(tmp_path: Path, words: list[str]) -> None:
    (tmp_path / "probe.py").write_text(PROBE)
    command = [sys.executable, *words, "an", "argument"]
    env = {
        **os.environ,
        "MARK": "x",
        "PYTHONPATH": str(tmp_path),
        "OMP_NUM_THREADS": "1",
        "TMPDIR": str(tmp_path),
    }
    seen, drawn = [], []
    for start in (subprocess.Popen, warm.start, warm.start):
        out, err = tmp_path / "out", tmp_path / "err"
        with out.open("w") as stdout, err.open("w") as stderr:
            options = {"stdin": subprocess.DEVNULL} if start is subprocess.Popen else {}
            process = start(
                command, env=env, cwd=tmp_path, stdout=stdout, stderr=stderr,
                start_new_session=True, **options,
            )  # fmt: skip
        assert process.wait(60) == 3, err.read_text()
        seen.append(json.loads(out.read_text()))
        drawn.append(err.read_text())
    cold, first, second = seen
    assert cold == first == second
    assert cold["parent"] == os.getpid()
    assert len(set(drawn)) == 3  # random numbers of their own


def test_a_signal_ends_a_fork_even_before_its_program_has_begun() -> None:
    for number in (signal.SIGKILL, *[signal.SIGTERM] * 20):
        process = warm.start([sys.executable, "-c", "import time; time.sleep(60)"])
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0)
        assert process.poll() is None
        process.send_signal(number)
        assert process.wait(20) == process.poll() == -number
        process.send_signal(number)  # it has ended


def test_torchrun_is_forked_if_a_door_is_open(tmp_path: Path) -> None:
    """It has its starter's mounts, folder, environment and output, and the starter its status."""
    (tmp_path / "rank.py").write_text(
        "import os, sys, torch\n"
        "is_warm = 'tests.warm' in sys.modules\n"
        "words = os.environ['RANK'], os.environ['MARK'], os.listdir(sys.argv[1]), is_warm\n"
        "os.write(1, f'{words}\\n'.encode())\n"
        "sys.exit(int(sys.argv[2]))\n"
    )
    (tmp_path / "here").mkdir()
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "file").touch()
    script = "exec torchrun --standalone --nproc-per-node 2 rank.py here $0 2>&1"
    command = ["sh", "-c", script]
    where = "[]"
    if os.getuid() == 0 and not subprocess.run(["unshare", "--mount", "true"]).returncode:
        command = ["unshare", "--mount", "sh", "-c", f"mount --bind there here && {script}"]
        where = "['file']"
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    with warm.door(tmp_path / "door") as variables:
        for status in (0, 1):
            done = subprocess.run(
                [*command, str(status)], cwd=tmp_path, capture_output=True, text=True, timeout=120,
                env={**os.environ, **variables, "PATH": path, "MARK": "x"},
            )  # fmt: skip
            assert done.returncode == status, done.stdout
            for rank in range(2):
                assert f"('{rank}', 'x', {where}, {not warm.is_cold()})" in done.stdout
    assert not (tmp_path / "door").exists()
