"""Imports point down, without circles; RPC stays in one folder; public names are pinned."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import torchrl_dist
from torchrl_dist.replay.node import tables

ROOT = Path(torchrl_dist.__file__).parent
LAYERS = {
    "errors": 0,
    "forks": 0,
    "own_files": 0,
    "stopping": 0,
    "tensors": 0,
    "ui": 0,
    "runtime": 1,
    "weights": 2,
    "checkpoint": 2,
    "planner": 2,
    "replay": 3,
    "collect": 3,
    "learn": 3,
    "recipes": 4,
    "ops": 5,
    "plan": 5,
    "bench": 6,
    "cli": 7,
    "__main__": 8,
}
# Inside a package, from the lowest up: each may import those before it.
FOLDERS = {
    "replay": ["law", "row", "node", "saving", "parts", "hosts"],
    "collect": ["loop", "worker", "node", "learner"],
    "recipes": ["parts", "training", "apex", "ddppo", "impala", "r2d2", "sac"],
}
PUBLIC_NAMES = """
    CheckpointError CollectReport ConfigurationError DeadlineError DirectoryError DistributedLoss
    DriftError FirstReady HostedReplayBuffer Peer PeerLostError Preempt Quorum RPCBatchedCollector
    RPCPrioritizedSampler RPCPrioritizedSliceSampler RPCRandomSampler
    RPCSamplerWithoutReplacement RPCSliceSampler
    RateLimitError RateLimiter Remote RemoteError
    RemoteStorage ReplayOwner Session SharedCursorWriter SharedMaxValueWriter SharedMemmapStorage
    SharedOfflineToOnlineReplayBuffer
    SharedPrioritizedSampler SharedPrioritizedSliceSampler SharedRandomSampler
    SharedReplayBuffer SharedSamplerWithoutReplacement SharedSliceSampler TorchRLDistError WaitAll
    World anneal_beta host_replay load_policy local_cluster replay_buffer session __version__
""".split()
MODULES = [
    path for path in sorted(ROOT.rglob("*.py")) if path != ROOT / "__init__.py"
]  # the package's own __init__ names everything, lazily


@functools.cache
def imports_of(path: Path) -> set[str]:
    """Absolute names of all that a module imports, also inside functions."""
    package = ["torchrl_dist", *path.relative_to(ROOT).parts[:-1]]
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            found |= {module} | {f"{module}.{alias.name}" for alias in node.names}
    return found


def imports() -> Iterator[tuple[Path, str, str]]:
    """Yield each import: the module's path, the layer of the module, and what it imports."""
    for path in MODULES:
        for name in imports_of(path):
            yield path, path.relative_to(ROOT).parts[0].removesuffix(".py"), name


def test_imports_point_down() -> None:
    for path, own, name in imports():
        if not name.startswith("torchrl_dist.") or name == "torchrl_dist.__version__":
            continue
        assert own in LAYERS, f"{own} has no layer yet: add it to LAYERS"
        other = name.split(".")[1]
        assert other in LAYERS, f"{path} imports {name}: import it from the module that defines it"
        assert other == own or LAYERS[other] < LAYERS[own], f"{path} imports {name}"


@pytest.mark.parametrize("package", FOLDERS)
def test_folders_of_a_package_import_lower_ones_only(package: str) -> None:
    order = FOLDERS[package]
    folders = {path.name for path in (ROOT / package).iterdir() if (path / "__init__.py").exists()}
    assert folders == set(order), "name each folder in FOLDERS, where it belongs"
    for path, own, name in imports():
        parts = path.relative_to(ROOT).parts
        # modules next to the folders may use them all
        if own == package and len(parts) > 2 and name.startswith(f"torchrl_dist.{package}."):
            other = name.split(".")[2]
            assert other in order, f"{path} imports {name}, which lies above the folders"
            assert order.index(other) <= order.index(parts[1]), f"{path} imports {name}"


def test_no_modules_import_one_another_in_a_circle() -> None:
    """Not even for type checkers, so that a reader can understand one module before the other."""
    modules = {
        ".".join((ROOT.name, *p.relative_to(ROOT).with_suffix("").parts)): p for p in MODULES
    }
    below = {name: imports_of(path) & modules.keys() for name, path in modules.items()}
    while leaves := {name for name, others in below.items() if not others}:
        below = {name: others - leaves for name, others in below.items() if name not in leaves}
    assert not below, f"in circles, or above one: {sorted(below)}"


def test_only_runtime_imports_rpc_and_nothing_imports_ray() -> None:
    for path, own, name in imports():
        assert name.split(".")[0] != "ray", path
        assert own == "runtime" or not name.startswith("torch.distributed.rpc"), path


def test_public_names_are_pinned_and_exist() -> None:
    assert sorted(torchrl_dist.__all__) == sorted(PUBLIC_NAMES)
    for name in PUBLIC_NAMES:
        assert getattr(torchrl_dist, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        torchrl_dist.nonsense  # noqa: B018


def test_importing_the_package_has_no_side_effects_and_costs_nothing() -> None:
    code = (
        "import sys, threading, os, signal\n"
        # what recipes and commands need, and nothing else (tutorials/reference/faq.md)
        "sys.modules |= dict.fromkeys('matplotlib tensorboard tqdm yaml rich'.split())\n"
        "before = dict(os.environ), signal.getsignal(signal.SIGINT)\n"
        "import torchrl_dist\n"
        "assert not {'torch', 'torchrl', 'numpy', 'tensordict'} & set(sys.modules)\n"
        "import torchrl_dist.replay, torchrl_dist.collect, torchrl_dist.learn\n"
        "assert threading.active_count() == 1, threading.enumerate()\n"
        "assert (dict(os.environ), signal.getsignal(signal.SIGINT)) == before\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


DOCUMENTS = ["torchrl_dist/ARCHITECTURE.md", ".github/CONTRIBUTING.md"]


@pytest.mark.parametrize("document", DOCUMENTS)
def test_files_that_a_document_names_exist(document: str) -> None:
    text = re.sub(r"\]\(.*?\)", "]", (ROOT.parent / document).read_text())  # links: test_site.py
    base = ROOT if document.startswith("torchrl_dist/") else ROOT.parent
    named = re.findall(r"(?<![\w/.])(?:[\w.]+/)*[\w]+\.(?:py|c|md)\b|(?:[\w.]+/)+(?=`)", text)
    named += re.findall(r"-m pytest -n 0 (\S+)", text)
    named = [name for name in named if "NAME" not in name]
    assert len(named) > 10
    for name in named:
        found = [root / name for root in (base, ROOT.parent) if (root / name).exists()]
        inside = [ROOT / package / name for package in FOLDERS]  # folders named with their package
        assert found or any(path.is_dir() for path in inside), f"{document} names {name}"


def test_the_page_on_architecture_names_each_layer_and_folder() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    for layer in LAYERS:
        path = ROOT / layer
        name = f"{layer}/" if path.is_dir() else f"{layer}.py"
        assert f"`{name}`" in text or layer == "__main__", name
    for package, folders in FOLDERS.items():
        order = [
            text.index(f"`{folder}/`", text.index(f"Inside `{package}/`")) for folder in folders
        ]
        assert order == sorted(order), package


def test_commands_that_the_page_for_contributors_names_exist() -> None:
    from torchrl_dist.cli import _parser

    text = (ROOT.parent / ".github" / "CONTRIBUTING.md").read_text()
    commands = set(re.findall(r"torchrl-dist (\w+)", text))
    assert commands
    usage = _parser().format_help()
    for command in commands:
        assert re.search(rf"^    {command}\b", usage, re.MULTILINE), command


def test_c_and_python_agree_on_the_numbers_of_shared_tables() -> None:
    text = (ROOT / "replay" / "law" / "_kernel.c").read_text()
    said = re.search(r"/\* tables\.Word.*?\*/(.*?)\n\n", text, re.DOTALL)
    assert said is not None
    words, columns, states = re.findall(r"enum \{(.*?)\};", said[1], re.DOTALL)
    numbers = dict(pair.split(" = ") for pair in re.split(r",\s+", words.strip()))
    assert {name: int(number) for name, number in numbers.items()} == {
        name: int(tables.Word[name]) for name in numbers
    }
    for number, name in enumerate(columns.strip().split(", ")[:-1]):
        assert getattr(tables, f"CLAIM_{name}") == number
    for name, number in (pair.split(" = ") for pair in states.strip().split(", ")):
        assert getattr(tables, f"CLAIM_{name}") == int(number)
