"""Too few descriptors or threads are reported before C++ aborts."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.spawn import wait_until
from torchrl_dist import ConfigurationError, local_cluster
from torchrl_dist.runtime import limits

NONE = resource.RLIM_INFINITY


@pytest.fixture
def set_limits(monkeypatch: pytest.MonkeyPatch) -> dict[int, tuple[int, int]]:
    """Replace the limits that this process sees."""
    found = {resource.RLIMIT_NOFILE: (1024, 1 << 20), resource.RLIMIT_NPROC: (NONE, NONE)}
    monkeypatch.setattr(resource, "getrlimit", found.__getitem__)
    monkeypatch.setattr(resource, "setrlimit", found.__setitem__)
    monkeypatch.setattr(os, "getuid", lambda: 1000)
    monkeypatch.setattr(limits, "_threads_of", lambda uid, **_: 30)
    return found


def test_soft_limits_are_raised_if_they_do_not_suffice(set_limits) -> None:
    limits.check_limits(1, one_node=True, starts=1, driver=True)
    assert set_limits[resource.RLIMIT_NOFILE] == (1024, 1 << 20)  # enough, so unchanged
    set_limits[resource.RLIMIT_NPROC] = (200, NONE)
    limits.check_limits(300, one_node=False, starts=8, driver=True)
    assert set_limits[resource.RLIMIT_NOFILE] == (1 << 16, 1 << 20)
    assert set_limits[resource.RLIMIT_NPROC] == (NONE, NONE)


def test_too_few_descriptors_are_reported_before_anything_is_started(set_limits) -> None:
    set_limits[resource.RLIMIT_NOFILE] = (40, 40)
    with pytest.raises(ConfigurationError, match=r"have 40 files .* 3 processes .*ulimit -n 4096"):
        with local_cluster({"learner": 1, "collector": 2}):
            pass
    with pytest.raises(ConfigurationError, match="a job of one process .*ulimit -n 4096"):
        limits.check_limits(1, one_node=True, starts=1, driver=True)
    held = limits.descriptors_of(64, one_node=False)
    set_limits[resource.RLIMIT_NOFILE] = (held // 2, held // 2)
    with pytest.raises(ConfigurationError, match=f"up to {held}; "):
        limits.check_limits(64, one_node=False, starts=1, driver=True)
    limits.check_limits(64, one_node=False, starts=1, driver=False)  # connected to the driver


def test_too_few_threads_are_reported(set_limits: dict[int, tuple[int, int]]) -> None:
    set_limits[resource.RLIMIT_NPROC] = (45, 45)
    with pytest.raises(ConfigurationError, match=r"45 processes and threads, 30 .*ulimit -u 4096"):
        limits.check_limits(2, one_node=True, starts=2, driver=True)
    # ranks of a launcher count what all of them will need
    set_limits[resource.RLIMIT_NPROC] = (70, 70)
    limits.check_limits(3, one_node=True, starts=1, driver=True)
    with pytest.raises(ConfigurationError, match="starts about 42"):
        limits.check_limits(3, one_node=True, starts=3, driver=True, launched=True)


def test_threads_are_counted() -> None:
    own, user = len(os.listdir("/proc/self/task")), os.getuid()
    # other processes of this user start and end meanwhile
    wait_until(
        lambda: (
            own <= limits._threads_of(user) - limits._threads_of(user, but_children_of=os.getppid())
        )
    )


# ---- real processes


USER = 65532  # because root has no limit of processes
LIMITED = [
    *("setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups"),
    # the interpreter may be in a folder that only root can read
    *("--inh-caps=-all,+dac_read_search", "--ambient-caps=-all,+dac_read_search", "--"),
]
SESSION = "import torchrl_dist\nwith torchrl_dist.session(): print('up')"
CLUSTER = "import torchrl_dist\nwith torchrl_dist.local_cluster({'a': 4}): print('up')"
TRAIN = ["-m", "torchrl_dist", "train", "ddppo", "--learners", "2", "--output-dir", "run"]
RANKS = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3"]
STARTS = {
    "session": ["-c", SESSION],
    "torchrun": [*RANKS, "session.py"],
    "local_cluster": ["-c", CLUSTER],
    "train": TRAIN,
}


@pytest.fixture
def work() -> Iterator[Path]:
    """Make a folder that other users can reach, too."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        (work := Path(folder, "work")).mkdir()
        yield work


@pytest.mark.parametrize(
    ("start", "limit"),
    [("session", "-n 15"), ("local_cluster", "-n 40"), ("torchrun", "-u 30"), ("train", "-u 45")],
)
def test_a_program_under_a_low_limit_says_so_and_does_not_abort(start, limit, work) -> None:
    by_user = limit.startswith("-u")
    if by_user and (os.getuid() != 0 or shutil.which("setpriv") is None):
        pytest.skip("needs root and setpriv, to become a user with a limit of processes")
    if by_user:
        os.chown(work, USER, USER)
    (work.parent / "session.py").write_text(SESSION)
    command = [sys.executable, *STARTS[start]]
    command = [each.replace("session.py", str(work.parent / "session.py")) for each in command]
    ended = subprocess.run(
        ["bash", "-c", f'ulimit {limit}; exec "$@"', "-", *(LIMITED if by_user else []), *command],
        cwd=work,
        env={
            **{name: value for name, value in os.environ.items() if name != "RANK"},
            **{"OMP_NUM_THREADS": "1", "HOME": str(work), "TMPDIR": str(work)},
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        },
        capture_output=True,
        text=True,
        timeout=100,
    )
    said = ended.stdout + ended.stderr
    number = limit.split()[1]
    told = f"may have {number} " + ("processes and threads" if by_user else "files and sockets")
    assert told in said and f"ulimit {limit[:2]} 4096" in said, said
    for sign in ("terminate called", "SIGABRT", "SIGSEGV", "what():", "Errno", "up\n"):
        assert sign not in said, said
    if start == "train":
        assert ended.returncode == 2 and "Traceback" not in said, said
    assert not (work / "run").exists()
