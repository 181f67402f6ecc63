"""Checkpoints on disk. A crash leaves the last complete checkpoint valid.

::

    checkpoint.json     the format, the name of the folder with the rows, and all checksums
    rows-<unique>/      shard-0/ ...: a file per array of the rows' stored form (``row.stacks``),
                        priority.bin, runs.bin;
                        extra/: tensors of the buffer's transforms and random generator
    .torchrl_dist-rows  only during a write: the names of the new folder and the earlier one

A new checkpoint is written to its own folder and synced. Then one file is renamed to
``checkpoint.json``, which makes the new checkpoint valid, and the earlier folder is removed. After
a crash, the next writer removes the folder of the interrupted checkpoint, which
``.torchrl_dist-rows`` names. A writer removes only folders that ``.torchrl_dist-rows`` or
``checkpoint.json`` names. Numbers are little-endian, as in memory. Nothing is pickled, and reading
runs no code.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
import uuid
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from torchrl_dist import own_files
from torchrl_dist.errors import CheckpointError, ConfigurationError
from torchrl_dist.replay.node.lock import close_lock_file, open_lock_file
from torchrl_dist.replay.row.spec import ColumnSpec, RowSpec
from torchrl_dist.replay.row.stacks import as_columns, renumbered
from torchrl_dist.replay.saving.snapshot import Chunk, Head, SavedShard
from torchrl_dist.tensors import array_of

MANIFEST = "checkpoint.json"
FORMAT = "torchrl_dist.replay"
FORMAT_VERSION, FORMAT_WITH_FRAMES = 2, 3
_FOLDER = "rows-"
_MADE_HERE = ".torchrl_dist-rows"
_PRIORITY, _RUNS = "priority.bin", "runs.bin"
_TENSOR = "tensor of the extra folder"
_MOST = 1 << 28  # largest size of a manifest in bytes


@contextlib.contextmanager
def writing(path: Path) -> Iterator[DumpWriter]:
    """Write a checkpoint. The earlier checkpoint stays valid until ``DumpWriter.commit``.

    Args:
        path: folder of the checkpoint, which is made if it does not exist. Only one process may
            write there at a time.

    Raises:
        CheckpointError: another process is writing there, another user could change the folder, or
            the files cannot be written, for example because the disk is full. The files that this
            call has written are removed.
    """
    path = Path(os.path.abspath(path))
    try:
        path = own_files.resolved(path)
        own_files.make_folder(path)
        with _only_writer(path):
            writer = DumpWriter(path)
            try:
                yield writer
            finally:
                writer.remove_unless_valid()
    except (TimeoutError, ConnectionError):
        raise  # an error of a shard, not of the disk
    except own_files.NotOurs as error:
        raise CheckpointError(
            f"could not write the checkpoint {path}: {error}; choose another folder"
        ) from error
    except OSError as error:
        raise CheckpointError(
            f"could not write the checkpoint {path}: {error}; an earlier checkpoint in this folder "
            "is unchanged. Free space, or choose another folder"
        ) from error


class DumpWriter:
    """The files of one checkpoint. :func:`writing` creates it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._earlier = _folder_of(path)
        for name in _noted(path):
            if name != self._earlier:
                _remove_folder(path / name)
        self._folder = path / f"{_FOLDER}{uuid.uuid4().hex[:12]}"
        try:
            self._note_folders()
            self._folder.mkdir(0o700)
        except BaseException:
            self.remove_unless_valid()
            raise

    def _note_folders(self) -> None:
        """Store the names of the new and the earlier folder before making the new folder. After a
        crash, the next writer finds the new folder by its name."""
        made = [self._folder.name] + ([] if self._earlier is None else [self._earlier])
        text = "\n".join(made).encode()
        own_files.atomic_write(
            self._path / _MADE_HERE,
            lambda file: file.write(text),
            meanwhile=self._path / (_MADE_HERE + ".tmp"),
        )
        sync_folder(self._path)

    @contextlib.contextmanager
    def shard(self, number: int, head: Head) -> Iterator[ShardFiles]:
        """Yield the files of one shard. They are synced at the end of the block, or removed if the
        block raises."""
        folder = self._folder / f"shard-{number}"
        folder.mkdir(0o700)
        try:
            with contextlib.ExitStack() as steps:
                files = ShardFiles(folder, head, steps)
                yield files
                files.sync()
        except BaseException:
            _remove_part(folder)
            raise

    def commit(self, shards: Sequence[dict[str, Any] | None], extra: Mapping[str, Any]) -> None:
        """Make this checkpoint the valid one.

        Args:
            shards: :meth:`ShardFiles.entry` of each shard, or None if the shard is missing.
            extra: tensors, values that JSON can hold, and dictionaries and lists of these.

        Raises:
            ConfigurationError: ``extra`` holds another kind of value.
        """
        tensors: list[torch.Tensor] = []
        has_frames = any(each and each["frames"] for each in shards)
        manifest = {
            "format": FORMAT,
            "format_version": FORMAT_WITH_FRAMES if has_frames else FORMAT_VERSION,
            "folder": self._folder.name,
            "unix_time_s": time.time(),
            "shards": list(shards),
            "extra": _without_tensors(extra, "extra", tensors),
            "tensors": self._write_tensors(tensors),
        }
        manifest["checksum"] = _sum_of(manifest)
        for each in [*self._folder.iterdir(), self._folder]:
            sync_folder(each)
        text = json.dumps(manifest, indent=1).encode()
        own_files.atomic_write(
            self._path / MANIFEST, lambda file: file.write(text), meanwhile=self._folder / MANIFEST
        )
        sync_folder(self._path)
        sync_folder(self._path.parent)
        if self._earlier is not None:
            _remove_folder(self._path / self._earlier)
        (self._path / _MADE_HERE).unlink()

    def _write_tensors(self, tensors: Sequence[torch.Tensor]) -> list[dict[str, Any]]:
        folder = self._folder / "extra"
        folder.mkdir(0o700)
        entries = []
        for number, tensor in enumerate(tensors):
            column = ColumnSpec((str(number),), tensor.dtype, tuple(tensor.shape))
            with open(own_files.open_new(folder / column.file_name), "wb") as file:
                # a copy, so that bytes and checksum agree even if the tensor changes meanwhile
                content = _bytes_of(np.array(array_of(tensor), order="C"))
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            entries.append(column.as_json() | {"checksum": zlib.crc32(content)})
        return entries

    def remove_unless_valid(self) -> None:
        """Remove the new folder unless it was committed."""
        if _folder_of(self._path) != self._folder.name:
            _remove_folder(self._folder)
            (self._path / _MADE_HERE).unlink(missing_ok=True)


def _files(spec: RowSpec | None, folder: Path) -> dict[Path, ColumnSpec]:
    """Return the files of rows. If a column's file would have the name ``priority.bin`` or
    ``runs.bin``, it gets the prefix ``=``."""
    return {
        folder / (f"={name}" if name in (_PRIORITY, _RUNS) else name): column
        for name, column in (spec.stored if spec else {}).items()
    }


Ends = tuple[int, ...]
"""For each file, the number of rows or frames before the next write."""


class RowFiles:
    """The files of a shard's rows, one per array of their stored form. Any process that can access
    the folder may write the files.

    Attributes:
        parts: for each file, the length and the CRC-32 of the last array written to it.

    Args:
        steps: closing this stack closes the files.
        flags: for ``os.open``. By default the files must exist already, because this process must
            not create the files of an abandoned checkpoint again.
    """

    def __init__(
        self, folder: Path, spec: RowSpec | None, steps: contextlib.ExitStack, flags: int = 0
    ) -> None:
        self._spec = spec or RowSpec(())
        self._files = [
            (_open(file, steps, flags), column.row_bytes)
            for file, column in _files(spec, folder).items()
        ]
        self.parts: tuple[tuple[int, int], ...] = ()

    def write(self, ends: Ends, stored: list[np.ndarray]) -> None:
        """Write rows at the positions ``ends``."""
        stored = renumbered(stored, self._spec, ends[len(self._spec.columns) :])
        for (fd, row_bytes), end, array in zip(self._files, ends, stored, strict=True):
            _write_at(fd, end * row_bytes, array)
        self.parts = tuple((len(array), _sum(array)) for array in stored)

    def end(self, ends: Ends) -> None:
        """Cut the files off at ``ends``, and sync them. A file is longer than its end if its last
        chunk was written again with fewer rows."""
        for (fd, row_bytes), end in zip(self._files, ends, strict=True):
            os.ftruncate(fd, end * row_bytes)
            os.fsync(fd)


def after(ends: Ends, parts: Sequence[tuple[int, int]]) -> Ends:
    """Return the ends after a write at ``ends``; see :attr:`RowFiles.parts` for ``parts``."""
    return tuple(end + length for end, (length, _) in zip(ends, parts, strict=True))


class ShardFiles:
    """The sink for one shard's rows. :meth:`DumpWriter.shard` creates it."""

    def __init__(self, folder: Path, head: Head, steps: contextlib.ExitStack) -> None:
        self.folder: Path | None = folder.resolve()
        self._head = head
        self._runs: list[np.ndarray] = []
        self._masses_sum = 0
        self._sums: list[list[int]] = []
        self._rows = 0
        spec = head.spec or RowSpec(())
        self._ends: Ends = (0,) * len(spec.stored)
        self._columns_of_rows = len(spec.columns)
        new = os.O_CREAT | os.O_EXCL
        self._files = RowFiles(folder, head.spec, steps, new)
        self._priority = _open(folder / _PRIORITY, steps, new)
        self._runs_file = _open(folder / _RUNS, steps, new)

    def write(self, stored: list[np.ndarray]) -> None:
        self._files.write(self._ends, stored)

    def append(self, chunk: Chunk) -> None:
        _write_at(self._priority, self._rows * 8, chunk.leaf)
        self._masses_sum = zlib.crc32(_bytes_of(chunk.leaf), self._masses_sum)
        parts = chunk.parts or self._files.parts
        self._ends = after(self._ends, parts)
        lengths, sums = zip(*parts, strict=True)
        self._sums.append([chunk.leaf.size, *sums, *lengths[self._columns_of_rows :]])
        self._runs.append(chunk.runs)
        self._rows += chunk.leaf.size

    def sync(self) -> None:
        """Wait until everything is on the disk."""
        _write_at(self._runs_file, 0, self._all_runs())
        self._files.end(self._ends)
        for fd in (self._runs_file, self._priority):
            os.fsync(fd)

    def _all_runs(self) -> np.ndarray:
        return np.concatenate([np.empty((0, 3), np.int64), *self._runs])

    def entry(self) -> dict[str, Any]:
        """Return the entry of the shard in the manifest."""
        return {
            "rows": self._rows,
            "runs": len(self._all_runs()),
            "frames": list(self._ends[self._columns_of_rows :]),
            "overwritten": max(0, self._head.length - self._rows),
            "head": self._head.as_json(),
            "checksums": {
                "runs": _sum(self._all_runs()),
                "priority": self._masses_sum,
                # for each chunk: number of rows, a checksum per file, frames per file of frames
                "rows": self._sums,
            },
        }


def read_dump(
    path: Path, *, check_rows: bool = True
) -> tuple[list[SavedShard | None], dict[str, Any]]:
    """Return the checkpoint in a folder, ``(shards, extra)``. Its rows are memory-mapped.

    The result stays usable after a new checkpoint has replaced this one.

    Args:
        check_rows: whether to read all rows once, to compare their checksums.

    Raises:
        CheckpointError: there is no checkpoint, or it has another format or is damaged.
    """
    for _ in range(10):
        manifest = read_manifest(path)
        folder = Path(path, manifest["folder"])
        try:
            shards = [
                None
                if entry is None
                else _read_shard(folder / f"shard-{number}", entry, check_rows)
                for number, entry in enumerate(manifest["shards"])
            ]
            tensors = _read_tensors(folder / "extra", manifest["tensors"])
            return shards, _with_tensors(manifest["extra"], tensors)
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
            missing: Exception = error
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(
                f"checkpoint {path} is damaged: {error!r}; use another checkpoint"
            ) from error
        if _folder_of(path) == folder.name:  # otherwise read the checkpoint that replaced this one
            break
    raise CheckpointError(f"checkpoint {path} is damaged: {missing}; use another checkpoint")


def read_manifest(path: Path) -> dict[str, Any]:
    """Return the content of :data:`MANIFEST` in the folder.

    Raises:
        CheckpointError: there is no manifest, or it has another format or is damaged.
    """
    file = Path(path, MANIFEST)
    try:
        manifest = json.loads(own_files.read_plain(file, _MOST))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CheckpointError(
            f"{path} holds no checkpoint of a replay buffer, because there is no {MANIFEST}; "
            "choose a folder to which dumps() has written"
        ) from error
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} is damaged: {error}; use another checkpoint") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise CheckpointError(
            f"{file} was not written by a replay buffer of torchrl_dist; choose a folder to which "
            "dumps() has written"
        )
    version = manifest.get("format_version")
    known = (FORMAT_VERSION, FORMAT_WITH_FRAMES)
    if type(version) is int and version not in known:
        raise CheckpointError(
            f"{path} has format version {version}, but this version of torchrl_dist reads only "
            f"{known[0]} and {known[1]}; use the version of torchrl_dist that wrote the checkpoint"
        )
    sound = (
        version in known
        and manifest.pop("checksum", None) == _sum_of(manifest)
        and all(isinstance(manifest.get(name), list) for name in ("shards", "tensors"))
        and isinstance(manifest.get("extra"), dict)
        and _is_our_name(manifest.get("folder"))
        and isinstance(manifest.get("unix_time_s"), int | float)
    )
    if not sound:
        raise CheckpointError(
            f"{file} is damaged: its checksum or content is wrong; use another checkpoint"
        )
    return manifest


def _read_shard(folder: Path, entry: dict[str, Any], check_rows: bool) -> SavedShard:
    head, count = Head.from_json(entry["head"]), entry["rows"]
    runs = _read(folder / _RUNS, (entry["runs"], 3), np.dtype(np.int64))
    leaf = _read(folder / _PRIORITY, (count,), np.dtype(np.float64))
    spec = head.spec or RowSpec(())
    files = _files(spec, folder)
    lengths = [count] * len(spec.columns) + entry.get("frames", [])
    stored = [
        _read(file, (length, *each.shape), _seen_as(each.dtype))
        for length, (file, each) in zip(lengths, files.items(), strict=True)
    ]
    shard = SavedShard(head, runs, leaf, as_columns(stored, spec))
    sums = entry["checksums"]
    _compare(folder / _RUNS, runs, sums["runs"])
    _compare(folder / _PRIORITY, leaf, sums["priority"])
    shard.check()
    if check_rows:
        ends: Ends = (0,) * len(stored)
        for size, *more in sums["rows"]:
            parts = [size] * len(spec.columns) + more[len(stored) :]
            for file, array, end, length, wanted in zip(
                files, stored, ends, parts, more[: len(stored)], strict=True
            ):
                _compare(file, array[end : end + length], wanted)
            ends = tuple(map(sum, zip(ends, parts, strict=True)))
        if ends != tuple(lengths):
            raise CheckpointError(
                f"checkpoint {folder} is damaged: its checksums are for {list(ends)} rows and "
                f"frames, expected {lengths}; use another checkpoint"
            )
    return shard


def _compare(file: Path, array: np.ndarray, wanted: int) -> None:
    if _sum(array) != wanted:
        raise CheckpointError(
            f"checkpoint {file} is damaged: its bytes differ from those that were written (wrong "
            "checksum); use another checkpoint"
        )


def _read_tensors(folder: Path, entries: list[dict[str, Any]]) -> list[torch.Tensor]:
    found = []
    for entry in entries:
        column = ColumnSpec.from_json(entry)
        array = _read(folder / column.file_name, column.shape, _seen_as(column.dtype))
        _compare(folder / column.file_name, array, entry["checksum"])
        tensor = torch.from_numpy(array.copy())
        found.append(tensor if tensor.dtype == column.dtype else tensor.view(column.dtype))
    return found


def _without_tensors(value: Any, where: str, tensors: list[torch.Tensor]) -> Any:
    """Return ``value`` in a form that JSON can hold. ``{_TENSOR: i}`` stands for ``tensors[i]``."""
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return {_TENSOR: len(tensors) - 1}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {
            key: _without_tensors(item, f"{where}.{key}", tensors) for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [_without_tensors(item, f"{where}[{i}]", tensors) for i, item in enumerate(value)]
    raise ConfigurationError(
        f"{where} is a {type(value).__name__}, but a checkpoint can hold only tensors, numbers, "
        "strings, and lists and dictionaries (with string keys) of these; convert the value to one "
        "of these types, or leave it out"
    )


def _with_tensors(value: Any, tensors: list[torch.Tensor]) -> Any:
    """Invert :func:`_without_tensors`."""
    if isinstance(value, dict):
        if value.keys() == {_TENSOR}:
            return tensors[value[_TENSOR]]
        return {key: _with_tensors(item, tensors) for key, item in value.items()}
    if isinstance(value, list):
        return [_with_tensors(item, tensors) for item in value]
    return value


def _seen_as(dtype: torch.dtype) -> np.dtype:
    return array_of(torch.empty(0, dtype=dtype, device="cpu")).dtype


def _read(file: Path, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    wanted = int(np.prod(shape)) * dtype.itemsize
    with open(own_files.open_plain(file), "rb") as opened:
        size = os.fstat(opened.fileno()).st_size
        if size != wanted:
            raise CheckpointError(
                f"checkpoint {file} is damaged: it has {size} bytes, expected {wanted}; use "
                "another checkpoint"
            )
        if not size:
            return np.empty(shape, dtype)
        # copy on write, because torch expects writable arrays
        return np.asarray(np.memmap(opened, dtype, "c", shape=shape))


def _folder_of(path: Path) -> str | None:
    """Return the folder that the manifest names, or None if there is no manifest."""
    return read_manifest(path)["folder"] if (path / MANIFEST).exists() else None


def _is_our_name(name: Any) -> bool:
    return isinstance(name, str) and re.fullmatch(_FOLDER + "[0-9a-f]{12}", name) is not None


def _noted(path: Path) -> list[str]:
    """Return the folders that an interrupted writer made, or was about to make."""
    try:
        text = own_files.read_ours(path / _MADE_HERE)
        return [line for line in text.splitlines() if _is_our_name(line)]
    except (OSError, ValueError):
        return []


def _remove_folder(folder: Path) -> None:
    """Remove the rows of a checkpoint. If the folder has other files, these and the folder stay."""
    if folder.is_symlink() or not folder.is_dir():
        return
    for part in folder.iterdir():
        if re.fullmatch(r"shard-\d+|extra", part.name) and not part.is_symlink():
            _remove_part(part)
    with contextlib.suppress(OSError):
        (folder / MANIFEST).unlink(missing_ok=True)
        folder.rmdir()


def _remove_part(folder: Path) -> None:
    with contextlib.suppress(OSError):
        for file in folder.glob("*.bin"):
            file.unlink()
        folder.rmdir()


def _sum(array: np.ndarray) -> int:
    return zlib.crc32(_bytes_of(np.ascontiguousarray(array)))


def _sum_of(manifest: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(manifest, sort_keys=True).encode())


def _bytes_of(array: np.ndarray) -> memoryview:
    return array.reshape(-1).view(np.uint8).data


def _open(file: Path, steps: contextlib.ExitStack, flags: int) -> int:
    fd = own_files.open_ours(file, os.O_WRONLY | flags)
    steps.callback(os.close, fd)
    return fd


def _write_at(fd: int, offset: int, array: np.ndarray) -> None:
    if not array.nbytes:
        return
    left = _bytes_of(array)
    while left:
        done = os.pwrite(fd, left, offset)
        left, offset = left[done:], offset + done


@contextlib.contextmanager
def _only_writer(path: Path) -> Iterator[None]:
    # lock the folder itself; forked children do not keep this lock
    fd = open_lock_file(path, os.O_DIRECTORY, access=os.O_RDONLY)
    try:
        if not own_files.lock_folder(fd):
            raise CheckpointError(
                f"another process or thread is writing a checkpoint to {path}: write to another "
                "folder, or wait until it has finished"
            )
        yield
    finally:
        close_lock_file(fd)


def sync_folder(path: Path) -> None:
    """Wait until the folder's list of names is on the disk."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
