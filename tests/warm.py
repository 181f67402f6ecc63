"""Python programs that start in a tenth of a second, with torch and TorchRL imported.

    process = warm.start([sys.executable, "-m", "torch.distributed.run", ...], env=..., stdout=file)

Importing both takes five seconds of a core, and the suite starts hundreds of processes. So one
process imports them once per run and forks the others. A fork resembles a new interpreter as
closely as possible. It is a child of the caller, with the environment, folder, command line (also
in /proc) and ``sys.path`` that an interpreter would have. It has its own session and random
numbers, no open files except its output, and the normal exit of a Python program. An agent of
torchrun has such a process for its ranks.

It is not a new interpreter, though. Tests of import order and of settings that libraries read when
they are imported (threads, logging), and README's commands, start a real interpreter with
``subprocess``. With TORCHRL_DIST_TESTS_COLD=1 everything does.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import os
import pickle
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import types
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

COLD = "TORCHRL_DIST_TESTS_COLD"
DOOR = "TORCHRL_DIST_TESTS_DOOR"  # see tests/children/sitecustomize.py
SERVER = "tests.warm"  # in the command line of the processes that fork others
_PRELOAD = (
    "numpy",
    "torch",
    "torch.distributed.launcher.api",  # what torchrun imports
    "torch.distributed.elastic.rendezvous.c10d_rendezvous_backend",
    "torch.distributed.elastic.rendezvous.dynamic_rendezvous",
    "torch.distributed.rpc",
    "tensordict",
    "torchrl.data",
    "torchrl.envs",
    "torchrl.modules",
    "torchrl.collectors",
    "gymnasium",
    "psutil",
    "pytest",
    "torchrl_dist.cli",
    "torchrl_dist.runtime.local",
)
# The memory for a process's command line and environment keeps its initial size.
_ROOM = 16 * 1024
_LARGE_PAGE = 2**21
_MADV_COLLAPSE = 25  # since Linux 6.1
_BOOT_S = 120.0
_PR_SET_CHILD_SUBREAPER = 36
_CLONE_NEWNS, _CLONE_NEWUTS = 0x00020000, 0x04000000
_MS_BIND, _MS_REC, _MS_PRIVATE = 4096, 16384, 1 << 18
_OWN_MOUNTS = "/proc/self/ns/mnt"
# Some tests send them to all processes that they find. Processes that fork others block them.
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Program:
    """A program to run. ``command`` is an interpreter's: a script, ``-m module`` or ``-c code``.

    Attributes:
        host: the host to run on, None for this one.
        mounts: the mount namespace to enter, a file in /proc.
    """

    command: list[str]
    env: dict[str, str]
    cwd: str
    host: Host | None = None
    mounts: str = _OWN_MOUNTS

    @property
    def is_agent(self) -> bool:
        return self.command[1:3] == ["-m", "torch.distributed.run"]

    def become(self, output: Sequence[int]) -> None:
        """Turn this process into the program's process, without running the program."""
        if self.host is not None:
            self.host.become()
        if os.readlink(self.mounts) != os.readlink(_OWN_MOUNTS):
            with open(self.mounts) as mounts:
                _call("setns", mounts.fileno(), _CLONE_NEWNS)
        os.setsid()
        null = os.open(os.devnull, os.O_RDONLY)
        for standard, own in enumerate((null, *output)):
            os.dup2(own, standard)
        os.closerange(3, max(map(int, os.listdir("/proc/self/fd"))) + 1)
        os.chdir(self.cwd)
        os.environ.clear()
        os.environ.update(self.env)
        _describe(self.command)
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)

    def run(self, installed: list[str]) -> None:
        """Run it as ``__main__``; its exceptions propagate.

        Args:
            installed: the ``sys.path`` of an interpreter, without the first entry.
        """
        numpy, torch = sys.modules["numpy"], sys.modules["torch"]
        numpy.random.seed()  # otherwise all would have the same state; Python reseeds its own
        torch.default_generator.seed()
        tempfile.tempdir = None  # an import has cached it
        torch.set_num_threads(int(self.env.get("OMP_NUM_THREADS", torch.get_num_threads())))
        sys.orig_argv[:] = self.command
        arguments = self.command[1:]
        if arguments[0] == "-u":
            arguments = arguments[1:]
            for stream in (sys.stdout, sys.stderr):
                stream.reconfigure(write_through=True)
        path = [entry for entry in self.env.get("PYTHONPATH", "").split(os.pathsep) if entry]
        sys.path[:] = ["", *path, *installed]
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        if arguments[0] == "-m":
            sys.path[0] = self.cwd
            sys.argv[:] = arguments[1:]
            runpy._run_module_as_main(arguments[1])  # type: ignore[attr-defined]
        elif arguments[0] == "-c":
            sys.argv[:] = ["-c", *arguments[2:]]
            exec(compile(arguments[1], "<string>", "exec"), main.__dict__)
        else:
            sys.path[0] = os.path.dirname(os.path.realpath(arguments[0]))
            sys.argv[:] = arguments
            main.__file__ = os.path.abspath(arguments[0])
            code = Path(arguments[0]).read_bytes()
            exec(compile(code, arguments[0], "exec"), main.__dict__)


@dataclass(frozen=True)
class Host:
    """Namespaces that put a process on a host; see ``netns``.

    Attributes:
        mounts: which file systems are mounted where.
    """

    name: str
    network: str
    mounts: dict[str, str]

    def become(self) -> None:
        with open(self.network) as network:
            _call("setns", network.fileno(), 0)
        _call("unshare", _CLONE_NEWNS | _CLONE_NEWUTS)
        _call("mount", b"none", b"/", None, _MS_REC | _MS_PRIVATE, None)
        socket.sethostname(self.name)
        for target, source in self.mounts.items():
            _call("mount", source.encode(), target.encode(), None, _MS_BIND, None)


class Process:
    """The part of ``subprocess.Popen`` that tests and torchrun use, for another process's fork."""

    def __init__(self, args: Sequence[str], pid: int) -> None:
        self.args = list(args)
        self.pid = pid
        self.returncode: int | None = None
        self._end = os.pidfd_open(pid)
        weakref.finalize(self, os.close, self._end)
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        poller = select.poll()
        poller.register(self._end, select.POLLIN)
        if not poller.poll(None if timeout is None else max(0, timeout * 1000)):
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        with self._lock:
            if self.returncode is None:
                try:
                    self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
                except ChildProcessError:  # psutil has waited for it
                    self.returncode = 0  # as subprocess.Popen reports it
            return self.returncode

    def send_signal(self, number: int) -> None:
        with self._lock:
            if self.returncode is None:
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


Running = Process | subprocess.Popen


class _Server:
    """The caller's side of a process that forks."""

    def __init__(self, link: socket.socket, process: subprocess.Popen | None = None) -> None:
        self._link = link
        self._process = process
        self._lock = threading.Lock()

    def start(self, program: Program, output: Sequence[int]) -> Process:
        """Start the program with these descriptors for stdout and stderr."""
        with self._lock:
            # An orphan's new parent is the nearest ancestor that adopts orphans.
            _call("prctl", _PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
            try:
                socket.send_fds(self._link, [pickle.dumps(program)], list(output))
                answer = self._link.recv(64)
            except (BrokenPipeError, ConnectionResetError):
                answer = b""
            finally:
                _call("prctl", _PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
        if not answer:
            raise RuntimeError("the process that forks programs has died")
        return Process(program.command, int(answer))


_server: _Server | None = None


def start(
    args: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    cwd: str | os.PathLike[str] | None = None,
    stdout: IO[Any] | None = None,
    stderr: IO[Any] | int | None = None,
    start_new_session: bool = True,
    host: Host | None = None,
    mounts: str = _OWN_MOUNTS,
) -> Running:
    """Like ``subprocess.Popen(args, ...)``, for a Python program without input, in a new session.

    Outputs that are not given are the caller's.
    """
    global _server
    if is_cold() and host is None:
        return subprocess.Popen(
            args, env=env, cwd=cwd, stdout=stdout, stderr=stderr, start_new_session=True
        )
    assert args[0] == sys.executable, f"no Python program: {args}"
    assert start_new_session, "a program that is started here has a session of its own"
    environment = dict(os.environ if env is None else env)
    directory = os.getcwd() if cwd is None else os.fspath(cwd)
    if _server is None:
        _server = _boot()
    sys.stdout.flush()
    sys.stderr.flush()
    out = 1 if stdout is None else stdout.fileno()
    if stderr == subprocess.STDOUT:
        err = out
    else:
        err = 2 if stderr is None else stderr.fileno()  # type: ignore[union-attr]
    return _server.start(Program(list(args), environment, directory, host, mounts), (out, err))


@contextlib.contextmanager
def door(path: Path) -> Iterator[dict[str, str]]:
    """Within this context, programs with these variables are forks: see ``tests/children``.

    ``path`` is the path of a socket.
    """
    if is_cold():
        yield {}
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(os.fspath(path))
        listener.listen()
        threading.Thread(target=_answer, args=(listener,), daemon=True).start()
        try:
            yield {DOOR: os.fspath(path)}
        finally:
            listener.shutdown(socket.SHUT_RDWR)  # accept() returns
            path.unlink()


def _answer(listener: socket.socket) -> None:
    with contextlib.suppress(OSError):  # closed
        while True:
            link, _ = listener.accept()
            threading.Thread(target=_run_for, args=(link,), daemon=True).start()


def _run_for(link: socket.socket) -> None:
    """Wait until the program or the process that asked for it has ended."""
    with link:
        data, output, _, _ = socket.recv_fds(link, 2**18, 2)
        arguments, env, cwd, mounts = pickle.loads(data)
        command = [sys.executable, *arguments]
        out, err = (open(descriptor, "wb") for descriptor in output)
        with out, err:
            process = start(command, env=env, cwd=cwd, stdout=out, stderr=err, mounts=mounts)
        while True:
            if select.select([link], [], [], 0.02)[0]:
                number = link.recv(64)
                if not number:  # the program that asked has ended
                    process.terminate()
                    process.wait()
                    return
                process.send_signal(int(number))
            if process.poll() is not None:
                link.send(b"%d" % process.poll())
                return


def is_cold() -> bool:
    """Whether all tests must start real interpreters."""
    return bool(os.environ.get(COLD))


def _boot() -> _Server:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    code = (
        f"import sys; own, sys.path[:] = sys.path[1:], {sys.path!r}; "
        f"from {SERVER} import serve; serve({theirs.fileno()}, own)"
    )
    environment = {
        **{name: text for name, text in os.environ.items() if not name.startswith("TORCHRL_DIST")},
        "OMP_NUM_THREADS": "1",
        "ROOM": " " * _ROOM,
    }
    process = subprocess.Popen(
        [sys.executable, "-c", code, " " * _ROOM],
        pass_fds=[theirs.fileno()],
        stdin=subprocess.DEVNULL,
        env=environment,
        start_new_session=True,  # a terminal's Ctrl-C does not come there
    )
    theirs.close()
    ours.settimeout(_BOOT_S)
    return _Server(ours, process)


# ---- the forking process and its children


def serve(fd: int, paths: list[str]) -> None:
    """Run the forking process, and in its children the program, from start to end.

    ``paths`` are the ``sys.path`` of an interpreter without PYTHONPATH, and the entries that this
    one has from PYTHONPATH.
    """
    # Not ignored: a fork would lose a signal that arrives before it has become its program.
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    gc.disable()
    for name in _PRELOAD:
        importlib.import_module(name)
    assert len(os.listdir("/proc/self/task")) == 1, "a library has started a thread"
    gc.collect()
    gc.freeze()  # otherwise garbage collection in children would copy every page
    gc.enable()
    large_pages()
    added = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    installed = [path for path in paths if path not in added]
    program = _fork_programs(socket.socket(fileno=fd))
    if program.is_agent:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        if os.fork():
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
            theirs.close()
            _have_agent_use(_Server(ours))
        else:
            ours.close()
            os.setsid()
            _describe([sys.executable, "-m", SERVER])
            null = os.open(os.devnull, os.O_RDWR)
            for standard in range(3):
                os.dup2(null, standard)
            program = _fork_programs(theirs)
    program.run(installed)


def _fork_programs(link: socket.socket) -> Program:
    """Fork for the process at the other end until it closes; in the children, return."""
    while True:
        data, output, _, _ = socket.recv_fds(link, 2**18, 2)
        if not data:
            os._exit(0)
        answer, question = os.pipe()
        between = os.fork()  # ends at once, which makes the program a child of the caller
        if not between:
            between = os.getpid()
            pid = os.fork()
            if pid:
                os.write(question, b"%d" % pid)
                os._exit(0)
            while os.getppid() == between:
                time.sleep(0.001)
            program: Program = pickle.loads(data)
            program.become(output)
            link.detach()  # closed
            return program
        os.waitpid(between, 0)
        link.send(os.read(answer, 64))
        for descriptor in (answer, question, *output):
            os.close(descriptor)


def _describe(command: list[str]) -> None:
    """Let /proc show this command line and this process's environment, as far as there is room."""
    *_, first, last, first_variable, last_variable, _ = (
        Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    )
    # first the ones that tests look for
    variables = sorted(os.environ.items(), key=lambda item: not item[0].startswith("TORCHRL_DIST"))
    for texts, begin, end in (
        (command, int(first), int(last)),
        ([f"{name}={text}" for name, text in variables], int(first_variable), int(last_variable)),
    ):
        room = end - begin
        content = b"".join(os.fsencode(text) + b"\0" for text in texts)[: room - 1]
        ctypes.memmove(begin, content.ljust(room, b"\0"), room)


def _have_agent_use(server: _Server) -> None:
    """Prepare for the ranks that this process, an agent of torchrun, is about to start."""
    global _server
    _server = server
    module = importlib.import_module(
        "torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler"
    )

    def start_rank(args: Sequence[str], **options: Any) -> Running:
        own = args[0] == sys.executable  # --no-python starts any program
        return start(args, **options) if own else subprocess.Popen(args, **options)

    assert module.Popen is subprocess.Popen
    module.Popen = start_rank


def large_pages() -> None:
    """Move memory to large pages, because a fork mainly costs one entry per page.

    A few hundred large pages hold as much as a hundred thousand small ones.
    """
    madvise = _libc.madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, rights, _, _, file, *_ = line.split()
        if rights != "rw-p" or file != "0":
            continue
        first, last = (int(address, 16) for address in span.split("-"))
        for at in range(
            -(-first // _LARGE_PAGE) * _LARGE_PAGE, last - _LARGE_PAGE + 1, _LARGE_PAGE
        ):
            madvise(at, _LARGE_PAGE, _MADV_COLLAPSE)  # if the kernel cannot, nothing changes


def _call(name: str, *arguments: Any) -> None:
    """Call a function of the C library that returns -1 if it fails."""
    if getattr(_libc, name)(*arguments) == -1:
        raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")
