"""Show what each guard of the package is for: without it, a test fails.

    python -m tests.guards                   # all, one after another; half an hour
    python -m tests.guards tree-marks ...    # these

A guard is a line or two without which a promise of ``replay``, ``collect`` or ``learn`` does not
hold. ``guards.txt`` names for each the promise, the text that holds it, a replacement that does
not, and a test that must then fail. The script copies package and tests, runs the tests on the
unchanged copy, then applies one revert at a time. It prints a table, names the guards whose tests
pass without them, and exits with their number.

``tests/test_guards.py`` checks that every text is found once, so that a guard is adapted here if
its lines are rewritten.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = "torchrl_dist"
_LIMIT_S = 120
_PRELOAD = ("torch", "torch.distributed.rpc", "torchrl.objectives", "torchrl.collectors", "pytest")
_KERNEL = "TORCHRL_DIST_KERNEL"


@dataclass(frozen=True)
class Guard:
    """One line that holds a promise.

    Attributes:
        name: for the command line.
        promise: what does not hold without it.
        folder: of the package, where the text is looked for in all files.
        reverts: texts, and their replacements. Each text is found once.
        test: fails without the guard.
        kernel: the implementation that has it, ``c`` or ``numpy``; ``any``: both need it.
    """

    name: str
    promise: str
    folder: str
    kernel: str
    reverts: dict[str, str]
    test: str


def read_guards(text: str) -> tuple[Guard, ...]:
    """Parse ``guards.txt``."""
    guards = []
    for block in re.split(r"\n\n(?=# )", text.rstrip("\n"))[1:]:
        title, where, *lines = block.split("\n")
        name, promise = title.removeprefix("# ").split(": ", 1)
        folder, kernel, test = where.split(" ")
        reverts: list[tuple[list[str], list[str]]] = []
        for line in lines:
            if line.startswith("-") and (not reverts or reverts[-1][1]):
                reverts.append(([], []))
            reverts[-1][line.startswith("+")].append(line[1:])
        texts = {"\n".join(old): "\n".join(new) for old, new in reverts}
        guards.append(Guard(name, promise, folder, kernel, texts, test))
    return tuple(guards)


GUARDS = read_guards(Path(__file__).with_suffix(".txt").read_text())


class RottenError(AssertionError):
    """The text of a guard is not in the package once."""


def reverted(guard: Guard, package: Path) -> dict[Path, str]:
    """Return the files that change, with their text after the revert.

    Args:
        package: the folder ``torchrl_dist``.

    Raises:
        RottenError: a text is missing, or is there several times.
    """
    folder = package / guard.folder
    files = sorted(path for path in folder.rglob("*") if path.suffix in (".py", ".c"))
    texts = {path: path.read_text() for path in files}
    changed = {}
    for old, new in guard.reverts.items():
        found = [path for path in files for _ in range(texts[path].count(old))]
        if len(found) != 1:
            where = [str(path.relative_to(package)) for path in found]
            raise RottenError(
                f"{guard.name}: expected this text once in {guard.folder}/, found it in {where}; "
                f"adapt the guard to the lines that hold its promise now:\n{old}"
            )
        changed[found[0]] = texts[found[0]] = texts[found[0]].replace(old, new)
    return changed


@contextmanager
def _changed(changes: dict[Path, str]) -> Iterator[None]:
    before = {path: path.read_text() for path in changes}
    kernels = [path for path in changes if path.suffix == ".c"]
    try:
        for path, text in changes.items():
            _write(path, text)
        for path in kernels:
            _build(path)
        yield
    finally:
        for path, text in before.items():
            _write(path, text)
        for path in kernels:
            _build(path)


def _write(path: Path, text: str) -> None:
    path.write_text(text)
    for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*"):
        compiled.unlink()  # it would count as current if the new text is as long and as old


def _build(source: Path) -> None:
    compiler = (sysconfig.get_config_var("CC") or "cc").split()
    include = f"-I{sysconfig.get_path('include')}"
    target = source.with_suffix(".abi3.so")
    target.unlink(missing_ok=True)  # a process that has it open keeps the old one
    command = [*compiler, "-O3", "-shared", "-fPIC", include, str(source), "-o", str(target)]
    subprocess.run(command, check=True)


def _copy(to: Path) -> None:
    rubbish = shutil.ignore_patterns("__pycache__", ".hypothesis")
    for name in (PACKAGE, "tests"):
        shutil.copytree(ROOT / name, to / name, ignore=rubbish)
    for name in ("pyproject.toml", "README.md", "tutorials", ".github"):
        (to / name).symlink_to(ROOT / name)


@dataclass(frozen=True)
class Outcome:
    failed: tuple[str, ...]
    seconds: float
    output: str


def _run(tests: Sequence[str], folder: Path, kernel: str) -> Outcome:
    """Run the tests in the copy until they end. A test that does not end has failed."""
    begun = time.monotonic()
    with tempfile.TemporaryFile("w+") as output:
        pid = os.fork()
        if not pid:
            status = 3
            try:
                _be_pytest(tests, folder, kernel, output.fileno())
            except SystemExit as end:
                status = int(end.code or 0)
            finally:
                for stream in (sys.stdout, sys.stderr):
                    stream.flush()
                os._exit(status)
        status = None
        while status is None and time.monotonic() - begun < _LIMIT_S + 60:
            time.sleep(0.05)
            status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) if _has_ended(pid) else None
        if status is None:
            os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        output.seek(0)
        said = output.read()
    failed = re.findall(r"^(?:FAILED|ERROR) \S*?(\w+\.py::[^\s\[]+)", said, re.MULTILINE)
    if not failed and status != 0:
        if status is not None and "Timeout" not in said:
            raise RuntimeError(f"pytest ended with {status}:\n{said[-3000:]}")
        failed = ["(no end within the time)"]
    return Outcome(tuple(dict.fromkeys(failed)), time.monotonic() - begun, said)


def _has_ended(pid: int) -> bool:
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _be_pytest(tests: Sequence[str], folder: Path, kernel: str, output: int) -> None:
    """Run ``python -m pytest`` in the copy, without the imports that the parent has made."""
    os.setsid()
    for standard in (1, 2):
        os.dup2(output, standard)
    os.chdir(folder)
    os.environ["PYTHONPATH"] = str(folder)
    if kernel != "any":
        os.environ[_KERNEL] = kernel
    for name in [name for name in sys.modules if name.split(".")[0] in ("tests", PACKAGE)]:
        del sys.modules[name]
    others = [entry for entry in sys.path if entry and Path(entry).resolve() != ROOT]
    sys.path[:] = [str(folder), *others]
    options = f"-n 0 -q -rfE -p no:cacheprovider -x --timeout {_LIMIT_S}".split()
    sys.argv[:] = ["pytest", *options, *tests]
    runpy._run_module_as_main("pytest")  # type: ignore[attr-defined]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.guards", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("names", nargs="*", metavar="NAME", help="guards; default: all")
    parser.add_argument("--show", action="store_true", help="print what pytest says")
    parser.add_argument("--no-baseline", action="store_true", help="trust that the tests pass")
    arguments = parser.parse_args()
    unknown = set(arguments.names) - {guard.name for guard in GUARDS}
    if unknown:
        parser.error(f"no guard is called {', '.join(sorted(unknown))}")
    guards = [guard for guard in GUARDS if guard.name in arguments.names or not arguments.names]
    with tempfile.TemporaryDirectory(prefix="torchrl_dist-guards-") as name:
        return _try_all(guards, Path(name), arguments.show, not arguments.no_baseline)


def _try_all(guards: Sequence[Guard], folder: Path, show: bool, baseline: bool) -> int:
    _copy(folder)
    for module in _PRELOAD:
        importlib.import_module(module)
    for kernel in sorted({guard.kernel for guard in guards}) if baseline else ():
        tests = dict.fromkeys(guard.test for guard in guards if guard.kernel == kernel)
        outcome = _run(list(tests), folder, kernel)
        if outcome.failed:
            print(outcome.output)
            sys.exit(f"fails before anything was reverted: {', '.join(outcome.failed)}")
    print("guard | promise | reverted | test that fails | seconds", flush=True)
    survivors = []
    for guard in guards:
        with _changed(reverted(guard, folder / PACKAGE)):
            outcome = _run([guard.test], folder, guard.kernel)
        if show:
            print(outcome.output)
        if not outcome.failed:
            survivors.append(guard.name)
        what = " ".join(next(iter(guard.reverts)).split())
        fails = ", ".join(outcome.failed) or f"NONE of {guard.test}"
        line = f"{guard.name} | {guard.promise} | `{what}` | {fails} | {outcome.seconds:.1f}"
        print(line, flush=True)
    print(f"{len(guards)} guards; the tests of {len(survivors)} pass without them: {survivors}")
    return len(survivors)


if __name__ == "__main__":
    sys.exit(main())
