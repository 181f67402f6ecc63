"""Save and load a training state in one file. A crash cannot leave the file half written.

``torch.save`` writes the file, so ``torch.load(path, weights_only=True)`` reads it without this
package. The file holds only tensors, numbers, strings and containers of these, so reading it runs
no code. The rows of a replay buffer stay in the buffer's own directory.
"""

from __future__ import annotations

import os
import platform
import random
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch

from . import own_files
from .errors import CheckpointError

FORMAT = "torchrl_dist.checkpoint"
FORMAT_VERSION = 1


@dataclass(frozen=True)
class Checkpoint:
    """Everything needed to play a policy or to continue training.

    Attributes:
        recipe: name of the recipe that wrote the checkpoint, such as ``"apex"``.
        config: the recipe's configuration as plain values.
        policy: weights to act with. A recipe may choose the weights that had the best evaluation.
        policy_info: how ``policy`` was chosen, and the results of its evaluation.
        model: weights of the learner, including target networks, at the time of writing.
        optimizer: ``state_dict`` of the optimizer at the time of writing.
        counters: frames, updates, seconds and similar counts.
        rng: state of the random number generators of the learner's process, from :func:`rng_state`.
        extra: anything else that the recipe needs to continue, as plain values or tensors.
        versions: versions of the packages that wrote the file; set by :func:`save_checkpoint`.
    """

    recipe: str
    config: Mapping[str, Any]
    policy: Mapping[str, torch.Tensor]
    policy_info: Mapping[str, Any] = field(default_factory=dict)
    model: Mapping[str, Any] = field(default_factory=dict)
    optimizer: Mapping[str, Any] = field(default_factory=dict)
    counters: Mapping[str, Any] = field(default_factory=dict)
    rng: Mapping[str, Any] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)


_FIELDS = tuple(Checkpoint.__dataclass_fields__)


def save_checkpoint(path: str | os.PathLike[str], checkpoint: Checkpoint) -> Path:
    """Write ``checkpoint`` to ``path``. An older file at ``path`` stays intact until the new file
    is complete.

    Blocks until the bytes are on disk. Only one process may write to a path at a time.

    Raises:
        CheckpointError: a part of ``checkpoint`` could not be read back without running code, or
            another user could change the contents of the folder.
        OSError: the file cannot be written.
    """
    path = Path(path)
    content: dict[str, Any] = {name: _plain(getattr(checkpoint, name), name) for name in _FIELDS}
    content |= {"format": FORMAT, "format_version": FORMAT_VERSION, "versions": _versions()}
    try:
        own_files.make_folder(path.parent)
    except own_files.NotOurs as error:
        raise CheckpointError(f"checkpoint {path}: {error}; choose another folder") from error
    own_files.atomic_write(path, lambda file: _save(content, file))
    _sync_directory(path.parent)
    return path


def load_checkpoint(
    path: str | os.PathLike[str], *, recipe: str | None = None, map_location: Any = "cpu"
) -> Checkpoint:
    """Read a checkpoint and put its tensors on ``map_location``. Runs no code from the file.

    Args:
        path: the file.
        recipe: the recipe that must have written the checkpoint; ``None`` accepts any recipe.
        map_location: as for ``torch.load``.

    Raises:
        CheckpointError: the file does not exist, was not written by this package, is damaged, has a
            newer format, or belongs to another recipe.
    """
    path = Path(path)
    if not path.is_file():
        what = "is a directory" if path.is_dir() else "does not exist"
        raise CheckpointError(
            f"checkpoint {path} {what}; expected the checkpoint.pt of a training run; pass its path"
        )
    content = _read(path, map_location)
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise CheckpointError(
            f"{path} is not a torchrl_dist checkpoint; expected the checkpoint.pt of a training run"
        )
    written = content.get("format_version", FORMAT_VERSION)
    if type(written) is not int:
        raise CheckpointError(
            f"checkpoint {path} is damaged: its format version is {written!r}, expected a whole "
            "number; use another checkpoint"
        )
    if written > FORMAT_VERSION:
        raise CheckpointError(
            f"{path} has format version {written}, but this torchrl_dist reads versions up to "
            f"{FORMAT_VERSION}; update torchrl_dist"
        )
    missing = [name for name in ("format_version", *_FIELDS) if name not in content]
    if missing:
        raise CheckpointError(
            f"checkpoint {path} is damaged: it lacks {', '.join(missing)}; use another checkpoint"
        )
    for name in _FIELDS:
        expected = str if name == "recipe" else Mapping
        if not isinstance(content[name], expected):
            raise CheckpointError(
                f"checkpoint {path} is damaged: {name} is a {type(content[name]).__name__}, "
                f"expected a {expected.__name__}; use another checkpoint"
            )
    if recipe is not None and content["recipe"] != recipe:
        raise CheckpointError(
            f"{path} was written by the recipe {content['recipe']!r}, expected {recipe!r}; use "
            "another checkpoint"
        )
    return Checkpoint(**{name: content[name] for name in _FIELDS})


class _Noting:
    """A writable file that keeps the error of a failed write, because torch raises another error
    instead."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.error: BaseException | None = None

    def write(self, data: Any) -> int:
        try:
            return self._file.write(data)
        except BaseException as error:  # including Ctrl-C
            self.error = error
            raise

    def flush(self) -> None:
        self._file.flush()


def _save(content: dict[str, Any], file: BinaryIO) -> None:
    noting = _Noting(file)
    try:
        torch.save(content, noting)  # type: ignore[arg-type]  # torch only writes and flushes
    except RuntimeError as error:
        raise noting.error or error from error


def rng_state() -> dict[str, Any]:
    """Return the states of this process's torch (CPU), NumPy and Python generators."""
    numpy_state: Any = np.random.get_state(legacy=True)
    name, keys, position, has_gauss, cached = numpy_state
    version_, internal, gauss_next = random.getstate()
    return {
        "torch": torch.get_rng_state(),
        "numpy": [name, torch.from_numpy(keys.astype(np.int64)), position, has_gauss, cached],
        "python": [version_, list(internal), gauss_next],
    }


def set_rng_state(state: Mapping[str, Any]) -> None:
    """Restore a state that :func:`rng_state` returned."""
    torch.set_rng_state(state["torch"].cpu())
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    version_, internal, gauss_next = state["python"]
    random.setstate((version_, tuple(internal), gauss_next))


def _read(path: Path, map_location: Any) -> Any:
    try:
        # torch.load does not notice changed bytes in a tensor, so check the checksums of the zip
        # archive.
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
    except Exception as error:  # a flipped bit makes zipfile raise many kinds of errors
        raise CheckpointError(
            f"checkpoint {path} is damaged or not a checkpoint ({error}); use another checkpoint"
        ) from error
    if damaged is not None:
        raise CheckpointError(
            f"checkpoint {path} is damaged (wrong checksum of {damaged}); use another checkpoint"
        )
    try:
        return torch.load(path, map_location=map_location, weights_only=True)
    except Exception as error:
        first_line = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
        raise CheckpointError(
            f"checkpoint {path} cannot be read without running code ({first_line}); "
            "expected a file written by torchrl_dist"
        ) from error


# Call the conversions of the built-in types directly, because subclasses may override the methods
# behind ``int()`` or ``str()``. For example, str() of an enum member returns the member's name.
_NUMBERS_AND_TEXT: tuple[tuple[Any, Any], ...] = (
    (np.bool_, bool),
    (int, int.__int__),
    (np.integer, int),
    (float, float.__float__),
    (np.floating, float),
    (str, str.__str__),
)


def _plain(value: Any, where: str) -> Any:
    """Convert ``value`` to types that ``torch.load(weights_only=True)`` accepts. Tensors become
    copies on the CPU.

    Values of subclasses (such as NumPy's float64) become values of the built-in types, because
    ``torch.load`` refuses other classes.
    """
    if isinstance(value, torch.Tensor):
        # Without the clone, torch would write the whole storage of a view.
        return value.detach().as_subclass(torch.Tensor).cpu().clone()
    if value is None or type(value) in (bool, int, float, str):
        return value
    for kinds, convert in _NUMBERS_AND_TEXT:
        if isinstance(value, kinds):
            return convert(value)
    if isinstance(value, Mapping):
        return {_plain_key(key, where): _plain(v, f"{where}.{key}") for key, v in value.items()}
    if isinstance(value, list | tuple):
        items = [_plain(item, f"{where}[{i}]") for i, item in enumerate(value)]
        return items if isinstance(value, list) else tuple(items)
    raise CheckpointError(
        f"{where} is a {type(value).__name__}; a checkpoint may contain tensors, numbers, strings, "
        "lists, tuples and dictionaries. Convert this value to one of these types"
    )


def _plain_key(key: Any, where: str) -> Any:
    plain = _plain(key, f"a key of {where}")
    if isinstance(plain, torch.Tensor):
        raise CheckpointError(f"a key of {where} is a Tensor; expected a string or a number")
    return plain


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for package in ("torchrl-dist", "torch", "torchrl", "tensordict", "gymnasium", "numpy"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "unknown"
    return versions
