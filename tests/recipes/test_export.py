"""``export``: files that other programs run, with the actions of the original policy."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from torchrl_dist.checkpoint import Checkpoint, save_checkpoint
from torchrl_dist.cli import main
from torchrl_dist.learn.ranks import Ranks
from torchrl_dist.recipes.parts.environments import Images
from torchrl_dist.recipes.parts.moments import moments_of
from torchrl_dist.recipes.parts.networks import PolicySpec
from torchrl_dist.recipes.parts.trained import load_policy

VECTOR = PolicySpec("CartPole-v1", 4, (8,), num_actions=2)
IMAGES = Images((2, 36, 36), 255.0)
SPECS = {
    "values": VECTOR,
    "categorical": replace(VECTOR, kind="categorical"),
    "images": replace(VECTOR, observation_size=2 * 36 * 36, num_actions=3, images=IMAGES),
    "squashed_gaussian": replace(
        VECTOR, kind="squashed_gaussian", num_actions=0, action_low=(-2.0, 0.0), action_high=(2, 9)
    ),
    "normalized": replace(VECTOR, kind="categorical", normalized=True),
    "gaussian": replace(
        VECTOR,
        kind="gaussian",
        num_actions=0,
        action_low=(-0.05, -math.inf),
        action_high=(0.05, math.inf),
        normalized=True,
    ),
    "memory": replace(VECTOR, kind="recurrent_values", state_size=6),
}


class Noisy(nn.Linear):
    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return super().forward(rows) + 100 * torch.randn(rows.shape[0], self.out_features)


class Branching(nn.Linear):
    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return super().forward(rows) if rows.sum() > 0 else -super().forward(rows)


def saved(folder: Path, spec: PolicySpec) -> str:
    torch.manual_seed(0)
    network = spec.network()
    if spec.normalized:
        moments_of(network).update(0.3 + torch.randn(9, spec.observation_size), Ranks(), "x")
    if spec.kind == "gaussian":
        torch.nn.init.normal_(network.layers[-1].weight)  # actions beyond the bounds
    checkpoint = Checkpoint("mine", {}, network.state_dict(), policy_info=spec.as_plain())
    save_checkpoint(folder / "checkpoint.pt", checkpoint)
    return str(folder)


def exported(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> dict:
    assert main(["export", *arguments]) == 0, capsys.readouterr().err
    printed = capsys.readouterr()
    assert printed.err == ""
    return json.loads(printed.out)


def inputs_of(spec: PolicySpec, rows: int) -> list[torch.Tensor]:
    if spec.images is not None:
        return [torch.randint(0, 256, (rows, *spec.images.shape), dtype=torch.uint8)]
    states = [torch.rand(rows, 1, spec.state_size) for _ in range(2 if spec.state_size else 0)]
    return [torch.randn(rows, spec.observation_size), *states]


@pytest.mark.parametrize("kind", SPECS)
@pytest.mark.parametrize("suffix", ["pt2", "onnx"])
def test_the_file_gives_the_actions_without_this_package(
    kind: str, suffix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if suffix == "onnx":
        pytest.importorskip("onnxscript")
    spec, out = SPECS[kind], tmp_path / f"policy.{suffix}"
    out.write_text("an older file")
    told = exported([saved(tmp_path, spec), str(out)], capsys)
    assert (told["output"], told["observations_checked"]) == (str(out), 100)
    policy = load_policy(tmp_path)
    names = [key if isinstance(key, str) else "_".join(key) for key in policy.out_keys]
    assert list(told["inputs"]) == policy.in_keys and list(told["outputs"]) == names
    assert told["inputs"]["observation"]["shape"] == ["batch", *policy.observation_shape]
    batches = [inputs_of(spec, rows) for rows in (1, 7)]
    for values, found in zip(batches, run_elsewhere(out, batches, policy.in_keys), strict=True):
        expected = policy.module(*values)
        expected = expected if isinstance(expected, tuple) else (expected,)
        for name, got, right in zip(names, found, expected, strict=True):
            shape = ["batch", *got.shape[1:]]
            assert told["outputs"][name] == {"shape": shape, "dtype": str(got.dtype)}
            np.testing.assert_allclose(got, right.numpy(), rtol=1e-4, atol=1e-4)


def run_elsewhere(
    out: Path, batches: list[list[torch.Tensor]], names: list[str]
) -> list[list[np.ndarray]]:
    """Run an exported file in a process that cannot import torchrl_dist, torchrl or tensordict."""
    code = f"""
import sys
for name in ("torchrl_dist", "torchrl", "tensordict"):
    sys.modules[name] = None
import numpy as np
for number in range({len(batches)}):
    arrays = list(np.load(f"in{{number}}.npz").values())
    if {out.suffix == ".pt2"}:
        import torch
        found = torch.export.load({str(out)!r}).module()(*map(torch.from_numpy, arrays))
        found = [each.numpy() for each in (found if isinstance(found, tuple) else (found,))]
    else:
        from onnx.reference import ReferenceEvaluator
        found = ReferenceEvaluator({str(out)!r}).run(None, dict(zip({names!r}, arrays)))
    np.savez(f"out{{number}}.npz", *found)
"""
    for number, values in enumerate(batches):
        np.savez(out.with_name(f"in{number}.npz"), *(each.numpy() for each in values))
    subprocess.run([sys.executable, "-c", code], check=True, cwd=out.parent, timeout=120)
    files = [out.with_name(f"out{number}.npz") for number in range(len(batches))]
    return [list(np.load(each).values()) for each in files]


@pytest.mark.parametrize(
    ("make", "code", "says"),
    [
        ("Noisy", 1, "was not written, because the exported policy and the original"),
        ("Branching", 2, "torch cannot export the policy in "),
    ],
)
def test_a_policy_that_cannot_be_exported_leaves_the_older_file(
    make: str, code: int, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec, out = replace(VECTOR, make=f"tests.recipes.test_export:{make}"), tmp_path / "policy.pt2"
    out.write_text("an older file")
    assert main(["export", saved(tmp_path, spec), str(out)]) == code
    printed = capsys.readouterr()
    assert says in printed.err and printed.out == ""
    assert out.read_text() == "an older file"
    assert sorted(each.name for each in tmp_path.iterdir()) == ["checkpoint.pt", "policy.pt2"]


@pytest.mark.parametrize(
    ("out", "says"),
    [
        ("policy.txt", "expected a name that ends in .pt2 or .onnx"),
        ("no/such/policy.pt2", "cannot write no/such/policy.pt2 (No such file"),
    ],
)
def test_a_wrong_file_is_refused(
    out: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", saved(tmp_path, VECTOR), out]) == 2
    assert says in capsys.readouterr().err


def test_onnx_names_the_extra(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setitem(sys.modules, "onnx", None)
    assert main(["export", saved(tmp_path, VECTOR), str(tmp_path / "policy.onnx")]) == 2
    assert "pip install 'torchrl-dist[onnx]'" in capsys.readouterr().err
