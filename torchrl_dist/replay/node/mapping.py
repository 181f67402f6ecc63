"""Allocate and map files that processes share as memory, and refuse network file systems."""

from __future__ import annotations

import json
import mmap
import os
from pathlib import Path
from typing import Any

from torchrl_dist import own_files
from torchrl_dist.errors import DirectoryError
from torchrl_dist.replay.node.files import damaged

_NETWORK_FILE_SYSTEMS = frozenset(
    "nfs nfs4 cifs smb3 smbfs lustre gpfs beegfs ceph glusterfs afs 9p ncpfs orangefs".split()
)


def allocate(path: Path, size: int) -> None:
    """Create a file of zeros and reserve its blocks. With a sparse file, a full disk would cause
    SIGBUS at a later write."""
    path.unlink(missing_ok=True)
    fd = own_files.open_new(path)
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError:
        os.unlink(path)
        raise
    finally:
        os.close(fd)


def map_file(path: Path, size: int) -> mmap.mmap:
    try:
        fd = own_files.open_ours(path, os.O_RDWR)
    except FileNotFoundError as error:
        raise damaged(path.parent, f"{path.name} is missing") from error
    except IsADirectoryError as error:
        raise damaged(path.parent, f"{path.name} is a folder") from error
    except own_files.NotOurs as error:
        raise damaged(path.parent, str(error)) from error
    try:
        actual = os.fstat(fd).st_size
        if actual != size:
            raise damaged(path.parent, f"{path.name} has {actual} bytes, expected {size}")
        return mmap.mmap(fd, size)
    finally:
        os.close(fd)


def write_json(path: Path, value: dict[str, Any]) -> None:
    text = json.dumps(value, indent=1)
    own_files.atomic_write(path, lambda file: file.write(text.encode()))


def file_system_of(
    folder: str | os.PathLike[str], mounts: str | os.PathLike[str] = "/proc/self/mounts"
) -> tuple[str, str]:
    """Return the type of a folder's file system, and its mount point."""
    resolved = os.path.realpath(folder)
    best, kind = "", ""
    with open(mounts) as lines:
        for line in lines:
            _, point, this_kind = line.split()[:3]
            point = point.replace("\\040", " ")
            inside = resolved == point or resolved.startswith(point.rstrip("/") + "/")
            if inside and len(point) >= len(best):
                best, kind = point, this_kind
    return kind, best


def is_network_file_system(kind: str) -> bool:
    """Return whether locks and mappings fail on this type of file system, even within one
    machine."""
    return kind in _NETWORK_FILE_SYSTEMS or kind.startswith("fuse.sshfs")


def refuse_network_file_system(folder: Path) -> None:
    kind, mount = file_system_of(folder)
    if is_network_file_system(kind):
        raise DirectoryError(
            f"{folder} is on a network file system ({kind} at {mount}); choose a scratch_dir on a "
            "file system of this machine, for example under /dev/shm"
        )
