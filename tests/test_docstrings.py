"""Every public name has an example, and the examples run."""

from __future__ import annotations

import doctest
import functools
import importlib
import inspect
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torchrl.data import TensorDictReplayBuffer

import torchrl_dist
from torchrl_dist import TorchRLDistError

PACKAGES = (
    "torchrl_dist",
    *(f"torchrl_dist.{p}" for p in ("replay", "collect", "learn", "runtime")),
)
PUBLIC: dict[str, Any] = {
    name: getattr(importlib.import_module(package), name)
    for package in PACKAGES
    for name in importlib.import_module(package).__all__
    if name != "__version__"
}
# The base class has the example of all errors, and conftest's fork server serves all tests.
WITHOUT = {n for n, v in PUBLIC.items() if inspect.isclass(v) and issubclass(v, TorchRLDistError)}
WITHOUT = WITHOUT - {"TorchRLDistError"} | {"ForkServer"}


@pytest.mark.parametrize("name", sorted(PUBLIC.keys() - WITHOUT))
def test_the_example_of_a_public_name_runs(name: str, fork_server, tmp_path) -> None:
    text = inspect.getdoc(PUBLIC[name]) or ""
    found = {"torch": torch, "TensorDict": TensorDict, **PUBLIC}
    found["TensorDictReplayBuffer"] = TensorDictReplayBuffer
    found["local_cluster"] = functools.partial(torchrl_dist.local_cluster, fork_server=fork_server)
    text = text.replace("/dev/shm/example", str(tmp_path / "replay"))
    test = doctest.DocTestParser().get_doctest(text, found, name, None, 0)
    assert test.examples, f"{name} has no example"
    outcome, said = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS), list[str]()
    failed, _ = outcome.run(test, out=said.append, clear_globs=False)
    if "storage" in test.globs:  # the end of a process would do so
        test.globs["storage"].close()
    assert not failed, "".join(said)


def test_every_error_has_a_description() -> None:
    for name in WITHOUT:
        assert len((inspect.getdoc(PUBLIC[name]) or "").split()) > 5, name
