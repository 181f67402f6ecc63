"""Write a trained policy as one file that other programs run without this package."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ... import own_files
from ...errors import ConfigurationError, TorchRLDistError
from .environments import needs
from .networks import PolicySpec, checkpoint_in, saved_policy
from .trained import TrainedPolicy

_CHECKED = 100  # observations on which the file is compared with the policy
_CLOSE = 1e-4  # tolerance relative to the values' range, because other kernels round differently

Run = Callable[[Sequence[Tensor]], list[np.ndarray]]


def export(path: str | os.PathLike[str], out: str | os.PathLike[str]) -> dict[str, Any]:
    """Write a checkpoint's policy to ``out``, and return plain values that describe the file.

    The file maps ``observation`` ``[batch, ...]`` to the greedy ``action``. For a policy with a
    memory, it also maps the states of the LSTM to the next states. The file is written only if it
    gives the same actions as the policy for 100 random observations.

    Args:
        path: a checkpoint, or the folder of its run.
        out: a file for ``torch.export.load`` (.pt2) or an ONNX file (.onnx). It is replaced if it
            exists.

    Raises:
        CheckpointError: the checkpoint is missing or damaged, or holds no policy of a recipe.
        ConfigurationError: ``out`` has another suffix or cannot be written, a package is not
            installed, or torch cannot export the policy.
        TorchRLDistError: the exported policy and the original chose different actions."""
    out = Path(out)
    written = {".pt2": _pt2, ".onnx": _onnx}.get(out.suffix)
    if written is None:
        raise ConfigurationError(f"OUT: got {out}, expected a name that ends in .pt2 or .onnx")
    if written is _onnx:
        with needs("onnx", "a .onnx file"):
            import onnx  # noqa: F401
            import onnxscript  # noqa: F401
    spec, network = saved_policy(path)
    policy = TrainedPolicy(spec, network)
    inputs = dict(zip(policy.in_keys, _inputs(spec), strict=True))
    names = [key if isinstance(key, str) else "_".join(key) for key in policy.out_keys]
    expected = policy.module(*inputs.values())
    outputs = dict(
        zip(names, expected if isinstance(expected, tuple) else (expected,), strict=True)
    )
    try:
        with _quiet():
            content, run = written(policy.module, inputs, names)
            got = run(list(inputs.values()))
    except Exception as error:
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise ConfigurationError(f"torch cannot export the policy in {path}: {reason}") from error
    if not all(map(_same, got, outputs.values())):
        raise TorchRLDistError(
            f"{out} was not written, because the exported policy and the original gave different "
            f"actions in a test with {_CHECKED} random observations; check that your "
            "--network always gives equal outputs for equal inputs"
        )
    try:
        own_files.atomic_write(out, lambda file: file.write(content))
    except OSError as error:
        raise ConfigurationError(
            f"OUT: cannot write {out} ({error.strerror}); choose another file"
        ) from error
    return {
        "output": str(out),
        "inputs": {name: _described(value) for name, value in inputs.items()},
        "outputs": {name: _described(value) for name, value in outputs.items()},
        "observations_checked": _CHECKED,
        "env": spec.env,
        "checkpoint": str(checkpoint_in(path)),
    }


def _inputs(spec: PolicySpec) -> list[Tensor]:
    """Return random observations, and states of an LSTM if the policy has one."""
    random = torch.Generator().manual_seed(0)
    if spec.images is None:
        rows = torch.randn(_CHECKED, spec.observation_size, generator=random)
    else:
        shape, most = (_CHECKED, *spec.images.shape), int(spec.images.high) + 1
        rows = torch.randint(0, most, shape, dtype=torch.uint8, generator=random)
    size = spec.state_size
    states = [torch.rand(_CHECKED, 1, size, generator=random) - 0.5 for _ in range(2 * bool(size))]
    return [rows, *states]


def _pt2(policy: nn.Module, inputs: dict[str, Tensor], names: list[str]) -> tuple[bytes, Run]:
    program = torch.export.export(policy, tuple(inputs.values()), dynamic_shapes=_any_batch(inputs))
    file = io.BytesIO()
    torch.export.save(program, file)
    loaded = torch.export.load(io.BytesIO(file.getvalue())).module()

    def run(values: Sequence[Tensor]) -> list[np.ndarray]:
        found = loaded(*values)
        return [each.numpy() for each in (found if isinstance(found, tuple) else (found,))]

    return file.getvalue(), run


def _onnx(policy: nn.Module, inputs: dict[str, Tensor], names: list[str]) -> tuple[bytes, Run]:
    import onnx
    from onnx.reference import ReferenceEvaluator

    program: Any = torch.onnx.export(
        policy,
        tuple(inputs.values()),
        dynamo=True,
        dynamic_shapes=_any_batch(inputs),
        input_names=list(inputs),
        output_names=names,
        verbose=False,
    )
    content = program.model_proto.SerializeToString()
    loaded = ReferenceEvaluator(onnx.load_from_string(content))

    def run(values: Sequence[Tensor]) -> list[np.ndarray]:
        arrays = {name: each.numpy() for name, each in zip(inputs, values, strict=True)}
        return list(loaded.run(None, arrays))

    return content, run


def _any_batch(inputs: dict[str, Tensor]) -> tuple[Any, ...]:
    batch = torch.export.Dim("batch")
    return tuple({0: batch} for _ in inputs)


def _same(got: np.ndarray, expected: Tensor) -> bool:
    right = expected.numpy()
    if got.shape != right.shape or got.dtype != right.dtype:
        return False
    if not expected.is_floating_point():
        return np.array_equal(got, right)
    return np.allclose(got, right, rtol=_CLOSE, atol=_CLOSE * np.ptp(right))


def _described(values: Tensor) -> dict[str, Any]:
    dtype = str(values.dtype).removeprefix("torch.")
    return {"shape": ["batch", *values.shape[1:]], "dtype": dtype}


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Send what exporters print to stderr, because stdout must contain only the result. Hide their
    warnings, because these are about their own code."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with contextlib.redirect_stdout(sys.stderr), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)
