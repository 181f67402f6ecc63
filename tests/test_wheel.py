"""What a user's pip gets: one wheel for every Python from 3.10 on, with the kernel in it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# kernel.py alone: its package would import torch.
LOAD_KERNEL = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("kernel", sys.argv[1])
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
print(module.find_kernel()._name)
"""


def run(*command: str, **options: object) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def clone(tree: Path) -> None:
    """Copy the sources, because building leaves files next to them."""
    leave = shutil.ignore_patterns("*.so", "__pycache__")
    shutil.copytree(ROOT / "torchrl_dist", tree / "torchrl_dist", ignore=leave)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which(os.environ.get("CC", "cc")) is None:
        pytest.skip("no C compiler")
    folder = tmp_path_factory.mktemp("wheel")
    clone(tree := folder / "tree")
    build = ("wheel", "-q", "--no-build-isolation", "--no-deps", "-w", str(folder), str(tree))
    run(sys.executable, "-m", "pip", *build)
    (path,) = folder.glob("*.whl")
    return path


def test_one_wheel_is_for_every_python_and_its_kernel_loads(wheel: Path, tmp_path: Path) -> None:
    _, _, python, abi, platform = wheel.stem.split("-")
    assert (python, abi) == ("cp310", "abi3") and "linux" in platform
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
        compiled = [name for name in archive.namelist() if name.endswith(".so")]
    assert compiled == ["torchrl_dist/replay/law/_kernel.abi3.so"]
    kernel = tmp_path / "torchrl_dist" / "replay" / "law" / "kernel.py"
    env = {"PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)]), "PATH": ""}
    env["TORCHRL_DIST_KERNEL"] = "c"
    loaded = run(sys.executable, "-c", LOAD_KERNEL, str(kernel), env=env)
    assert Path(loaded.strip()) == kernel.with_name("_kernel.abi3.so")


def test_next_to_its_clone_an_editable_install_is_the_package_and_not_the_clone(tmp_path) -> None:
    """``git clone``, ``pip install -e torchrl_dist``, and python from the folder of the clone."""
    clone(tmp_path / "torchrl_dist")
    build = (
        "import sys; from setuptools.build_meta import build_editable; build_editable(sys.argv[1])"
    )
    env = {**os.environ, "CC": "false"}  # the kernel is optional
    folder = tmp_path / "site"
    folder.mkdir()
    run(sys.executable, "-c", build, str(folder), cwd=tmp_path / "torchrl_dist", env=env)
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as archive:
        archive.extractall(folder)
    script = f"import site; site.addsitedir({str(folder)!r}); import torchrl_dist as t; print(t)"
    # -S: without what is installed here. Of sys.path only the folder of the clone is in front.
    told = run(sys.executable, "-S", "-c", script, cwd=tmp_path, env={"PATH": ""})
    assert str(tmp_path / "torchrl_dist" / "torchrl_dist" / "__init__.py") in told, told


def test_the_kernel_uses_nothing_beyond_the_limited_api_of_python_3_10() -> None:
    text = (ROOT / "torchrl_dist" / "replay" / "law" / "_kernel.c").read_text()
    assert "#define Py_LIMITED_API 0x030A0000" in text


def test_a_free_threaded_python_is_refused_with_advice() -> None:
    script = "import sys; sys._is_gil_enabled = lambda: False; import torchrl_dist"
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT)
    error = done.stderr.splitlines()[-1]
    assert error.startswith("ImportError: torchrl_dist needs Python's global"), error
    assert done.returncode == 1 and "PYTHON_GIL=1" in done.stderr
