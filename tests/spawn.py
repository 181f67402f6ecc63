"""Run a test's body in the ranks of a real torchrun job.

    @spawn(nproc=4)
    def test_every_rank_sees_every_row(tmp_path):
        ...                                  # runs in each of the four ranks; asserts count there

For jobs that are meant to fail, call ``run_job(body, nproc=2, max_restarts=1)`` and check its
result. Tests choose no fixed port: torchrun rendezvouses on a free one, and a test that must name
one calls :func:`reserved_port`. A job that outlives ``timeout_s`` or leaves a process behind is a
failure.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from tests import warm

_MARK = "TORCHRL_DIST_TEST_JOB"


@dataclass(frozen=True)
class Job:
    """How a torchrun job ended. ``logs[restart][rank]`` holds what the rank printed."""

    returncode: int
    agent: str
    logs: list[dict[int, str]]
    seconds: float

    def log(self, rank: int, restart: int = -1) -> str:
        return self.logs[restart][rank]

    def __str__(self) -> str:
        parts = [f"torchrun returned {self.returncode} after {self.seconds:.1f} s"]
        for restart, ranks in enumerate(self.logs):
            for rank, text in sorted(ranks.items()):
                parts.append(f"--- rank {rank}, start {restart} ---\n{text[-4000:]}")
        return "\n".join([*parts, f"--- torchrun ---\n{self.agent[-4000:]}"])


def spawn(nproc: int, *, timeout_s: float = 120.0) -> Callable:
    """Decorate a test: its body runs in ``nproc`` ranks, with the test's fixtures pickled."""

    def decorate(body: Callable) -> Callable:
        @functools.wraps(body)
        def test(**fixtures: Any) -> None:
            job = run_job(body, fixtures, nproc=nproc, timeout_s=timeout_s)
            assert job.returncode == 0, str(job)

        test.__signature__ = inspect.signature(body)  # pytest reads the fixtures from it
        return test

    return decorate


def run_job(
    body: Callable | list[str],
    arguments: dict[str, Any] | None = None,
    *,
    nproc: int,
    timeout_s: float = 120.0,
    max_restarts: int = 0,
    env: dict[str, str] | None = None,
    on_start: Callable[[warm.Running], None] | None = None,
    cold: bool = False,
) -> Job:
    """Run a body in ``nproc`` ranks under torchrun and block until the job has ended.

    The body is a module-level function, called with ``arguments``, or a list: a script or ``-m
    module`` with its arguments. ``on_start`` is called once with the agent's process, to disturb
    the job. With ``cold``, the agent and the ranks are interpreters that import everything
    themselves.
    """
    mark = uuid.uuid4().hex
    with tempfile.TemporaryDirectory() as directory:
        if callable(body):
            body = rank_script(body, arguments or {}, directory)
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1"]
        command += [f"--nproc-per-node={nproc}", f"--max-restarts={max_restarts}"]
        command += ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "--local-addr=localhost"]
        command += ["--monitor-interval=0.1", f"--log-dir={directory}/logs", "--redirects=3"]
        variables = {**os.environ, "OMP_NUM_THREADS": "1", _MARK: mark, **(env or {})}
        variables["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)
        start = time.monotonic()
        with open(f"{directory}/agent", "w+") as output:
            start_program = subprocess.Popen if cold else warm.start
            agent = start_program(
                [*command, *body],
                env=variables,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                if on_start is not None:
                    on_start(agent)
                agent.wait(timeout_s)
            except subprocess.TimeoutExpired:
                agent.send_signal(signal.SIGTERM)
                raise AssertionError(
                    f"the job did not end within {timeout_s:g} s\n{_read_logs(directory)}"
                ) from None
            finally:
                left = end_marked(_MARK, mark, grace_s=3.0 if agent.poll() is not None else 0.0)
                agent.wait(10)
            output.seek(0)
            job = Job(
                agent.returncode, output.read(), _read_logs(directory), time.monotonic() - start
            )
    assert not left, f"the job left processes behind: {left}\n{job}"
    return job


@dataclass(frozen=True)
class Task:
    """A process as Slurm would start it."""

    process: warm.Running
    folder: Path

    def printed(self) -> str:
        return (self.folder / "out").read_text()

    def errors(self) -> str:
        return (self.folder / "err").read_text()

    def __repr__(self) -> str:
        return f"{self.process.poll()}\n{self.printed()}\n{self.errors()}"


def start_slurm_tasks(code: str, folder: Path, *arguments: str) -> list[Task]:
    """Start two tasks of a step of job 77 on this node; their output goes to ``folder``."""
    step = {
        "SLURM_NTASKS": "2",
        "SLURM_NODEID": "0",
        "SLURM_JOB_ID": "77",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_STEP_TASKS_PER_NODE": "2",
        "MASTER_PORT": str(reserved_port()),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }
    tasks = []
    for rank in range(2):
        own = {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)}
        at = folder / f"task{rank}"
        at.mkdir()
        with open(at / "out", "w") as out, open(at / "err", "w") as err:
            process = warm.start(
                [sys.executable, "-c", code, *arguments],
                env={**os.environ, **step, **own},
                stdout=out,
                stderr=err,
            )
        tasks.append(Task(process, at))
    return tasks


def rank_script(body: Callable, arguments: dict[str, Any], directory: str | Path) -> list[str]:
    """Return Python code with which a rank calls ``body(**arguments)``, a module-level function."""
    call = Path(directory, "call.pickle")
    path = inspect.getsourcefile(inspect.unwrap(body))
    call.write_bytes(pickle.dumps((path, body.__name__, arguments)))
    return [__file__, str(call)]


def end_marked(
    variable: str, value: str, *, grace_s: float, known: frozenset[int] = frozenset()
) -> list[str]:
    """Kill processes that started with this environment variable and still run after ``grace_s``.

    Returns their command lines. Processes in ``known`` are skipped.
    """
    processes = [
        process
        for pid in psutil.pids()
        if pid not in known and (process := _process(pid)) and _has_mark(process, variable, value)
    ]
    _, alive = psutil.wait_procs(processes, timeout=grace_s)
    names = []
    for process in alive:
        try:
            names.append(f"{process.pid}: {' '.join(process.cmdline())[:200]}")
            process.kill()
        except psutil.Error:
            continue
    psutil.wait_procs(alive, timeout=5)
    return names


def reserved_port() -> int:
    """Reserve a port for a minute: the kernel gives it to no process that asks for any free port.

    A closed connection stays in TIME_WAIT on it. A server that names the port may still listen, as
    torch's store does, because it reuses addresses.
    """
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client:
            server.accept()[0].close()  # before the client does, so that this end waits
            client.recv(1)
    return port


def wait_until(condition: Callable[[], Any], what: object = "", timeout_s: float = 100.0) -> Any:
    """Wait until ``condition()`` is true, and return its value.

    Args:
        what: for the message of the error, or a function that returns it.
    """
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(
                f"not within {timeout_s:g} s: {what() if callable(what) else what}"
            )
        time.sleep(0.01)
    return value


def is_helper(process: psutil.Process) -> bool:
    """Whether it is a helper process of multiprocessing, or forks a torchrun's ranks.

    Both end with their parents, and compute nothing.
    """
    words = process.cmdline()
    return warm.SERVER in words or "multiprocessing.resource_tracker" in " ".join(words)


def _process(pid: int) -> psutil.Process | None:
    try:
        return psutil.Process(pid)
    except psutil.Error:
        return None


def _has_mark(process: psutil.Process, variable: str, value: str) -> bool:
    try:
        return (
            process.environ().get(variable) == value
            and process.pid != os.getpid()
            and process.status() != psutil.STATUS_ZOMBIE
            and not is_helper(process)
        )
    except (psutil.Error, OSError):
        return False


def _read_logs(directory: str) -> list[dict[int, str]]:
    attempts = sorted(Path(directory, "logs").glob("*/attempt_*"))
    return [
        {
            int(rank.name): "".join(p.read_text(errors="replace") for p in sorted(rank.iterdir()))
            for rank in attempt.iterdir()
            if rank.name.isdigit()
        }
        for attempt in attempts
    ]


def _run_rank(call: str) -> None:
    path, name, arguments = pickle.loads(Path(call).read_bytes())
    # Like pytest, which puts a test's folder on the path and imports it by its bare name.
    sys.path.insert(0, str(Path(path).parent))
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    inspect.unwrap(getattr(module, name))(**arguments)


if __name__ == "__main__":
    _run_rank(sys.argv[1])


def stop(pid: int) -> None:
    """Stop another process, and wait until all of its threads have stopped."""
    os.kill(pid, signal.SIGSTOP)
    states = lambda: [  # noqa: E731
        thread.read_text().rpartition(")")[2].split()[0]
        for thread in Path(f"/proc/{pid}/task").glob("*/stat")
    ]
    wait_until(lambda: set(states()) <= {"T", "t"}, f"process {pid} stops")


def stop_self() -> None:
    """Stop this process, and return when it is continued.

    The signal may reach another thread first, which stops this one a moment later, so do nothing
    until then.
    """
    os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(1.0)
