"""Use only files and folders that no other user of the machine has made or changed, or can replace.

Several users share ``/tmp`` and ``/dev/shm``. Any user can create a folder there that another user
is about to use, and put links, pipes or huge files into this folder. Therefore this module uses a
folder only if this process made it, with mode 0700, or if the folder belongs to this user and other
users cannot write to it. Only plain files of this user are opened. Everything else is refused with
a reason (:class:`NotOurs`). If all users can write to a parent of the folder, the owners of this
parent and of all folders between the parent and the folder are checked, too, because another user
could replace one of these folders.

``TORCHRL_DIST_GROUP`` names a Unix group whose members this user trusts. Folders of that group may
belong to any member and be writable by all members.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import grp
import os
import pwd
import re
import secrets
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, TextIO

GROUP = "TORCHRL_DIST_GROUP"
_MEMORY = "/dev/shm"
_MOST_LINKS = 40
_SMALL = 1 << 20


class NotOurs(PermissionError):
    """Another user owns or made this file or folder, or can change it. The message says which of
    these is the case."""

    def __init__(self, path: str | os.PathLike[str], why: str) -> None:
        super().__init__(errno.EPERM, why, os.fspath(path))

    def __str__(self) -> str:
        return f"{self.filename} {self.strerror}"


# ---- folders


def resolved(path: str | os.PathLike[str]) -> Path:
    """Return the path with all links resolved. The path need not exist.

    Raises:
        NotOurs: another user made one of the links, in a folder that all users can write to.
    """
    at, links = Path("/"), 0
    left = list(reversed(Path(os.getcwd(), path).parts[1:]))
    while left:
        name = left.pop()
        if name == "..":
            at = at.parent
            continue
        place = at / name
        try:
            status = os.lstat(place)
        except FileNotFoundError:
            at = place
            continue
        if not stat.S_ISLNK(status.st_mode):
            at = place
            continue
        links += 1
        if links > _MOST_LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), os.fspath(path))
        if os.lstat(at).st_mode & stat.S_IWOTH and _is_strange(status):
            raise NotOurs(place, f"is a link that {_owner(status)} made")
        target = Path(os.readlink(place))
        if target.is_absolute():
            at = Path("/")
        left += reversed(target.parts[1:] if target.is_absolute() else target.parts)
    return at


def make_folder(path: str | os.PathLike[str]) -> bool:
    """Make a folder (mode 0700) and its missing parents. Return False if the folder existed and may
    be used.

    Raises:
        NotOurs: the folder or a parent of it exists, and another user could change the contents.
        OSError: the folder cannot be made.
    """
    folder = resolved(path)
    _check_above(folder)
    missing = [each for each in folder.parents if not os.path.lexists(each)]
    for each in reversed(missing):
        with contextlib.suppress(FileExistsError):
            each.mkdir(0o755)
    if missing:
        _check_above(folder)
    try:
        folder.mkdir(0o700)
        return True
    except FileExistsError:
        _check_folder(folder)
        return False


def check_folder(path: str | os.PathLike[str]) -> None:
    """Check an existing folder as :func:`make_folder` does.

    Raises:
        NotOurs: another user could change the folder's contents.
        OSError: the folder does not exist.
    """
    folder = resolved(path)
    _check_above(folder)
    _check_folder(folder)


def lock_folder(fd: int) -> bool:
    """Lock the folder that ``fd`` refers to; return False if another process holds the lock.

    The lock lasts until all copies of ``fd`` are closed. On network file systems that cannot lock
    folders, the result is always True.
    """
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


def is_ours(folder: Path) -> bool:
    """Whether ``folder`` is a folder (not a link to one) that :func:`check_folder` accepts."""
    try:
        if not stat.S_ISDIR(os.lstat(folder).st_mode):
            return False
        check_folder(folder)
    except OSError:
        return False
    return True


def _check_above(folder: Path) -> None:
    """Raise NotOurs if another user could replace the folder or one of its parents."""
    shared = False
    for each in reversed(folder.parents):
        try:
            status = os.stat(each)
        except FileNotFoundError:
            return
        open_to_all = bool(status.st_mode & stat.S_IWOTH)
        if (shared or open_to_all) and _is_strange(status):
            raise NotOurs(folder, f"lies in {each}, which belongs to {_owner(status)}")
        shared = shared or open_to_all


def _check_folder(folder: Path) -> None:
    status = os.lstat(folder)
    if not stat.S_ISDIR(status.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, "is not a folder", str(folder))
    trusted = _is_trusted(status)
    if status.st_uid != os.geteuid() and not trusted:
        raise NotOurs(
            folder, f"belongs to {_owner(status)}; expected a new folder, or a folder of this user"
        )
    group_writes = status.st_mode & stat.S_IWGRP and not trusted
    if status.st_mode & stat.S_IWOTH or (group_writes and not _is_alone_in(status, folder)):
        raise NotOurs(
            folder,
            f"can be written to by other users: run chmod go-w {folder}"
            + (
                f", or set {GROUP}=NAME if you trust all members of the folder's group"
                if group_writes
                else ""
            ),
        )


def _is_strange(status: os.stat_result) -> bool:
    """Whether the owner is neither this user nor root, and is not trusted."""
    return status.st_uid not in _administrators() | {os.geteuid()} and not _is_trusted(status)


@functools.cache
def _administrators() -> frozenset[int]:
    """Return root's user ids. In a user namespace, the root user outside of the namespace appears
    as the overflow id."""
    try:
        mapped = Path("/proc/self/uid_map").read_text().split() != ["0", "0", "4294967295"]
        overflow = int(Path("/proc/sys/kernel/overflowuid").read_text())
    except (OSError, ValueError):
        return frozenset({0})
    return frozenset({0, overflow} if mapped else {0})


def _is_trusted(status: os.stat_result) -> bool:
    name = os.environ.get(GROUP)
    if not name:
        return False
    try:
        number = int(name) if name.isdigit() else grp.getgrnam(name).gr_gid
    except KeyError:
        raise NotOurs(
            f"{GROUP}={name}:",
            "there is no such group; expected the name or number of a Unix group",
        ) from None
    return status.st_gid == number


def _is_alone_in(status: os.stat_result, folder: Path) -> bool:
    """Whether the group that may write to ``folder`` is this user's private group, as Linux
    distributions create it for each user."""
    try:
        user, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(status.st_gid)
        others = "system.posix_acl_access" in os.listxattr(folder)
    except KeyError:
        return False
    except OSError:  # this file system has no access lists
        others = False
    return not others and group.gr_name == user.pw_name and set(group.gr_mem) <= {user.pw_name}


def _owner(status: os.stat_result) -> str:
    try:
        return f"user {pwd.getpwuid(status.st_uid).pw_name}"
    except KeyError:
        return f"user {status.st_uid}"


# ---- this user's own folder


def user_folder() -> Path:
    """Return this user's folder in memory (mode 0700), for files that have no other place.

    If another user has taken the usual name, the folder gets a random name.

    Raises:
        OSError: the folder cannot be made.
    """
    found = user_folders()
    if found:
        return found[0]
    usual = _memory() / f"torchrl_dist-{os.geteuid()}"
    with contextlib.suppress(NotOurs, NotADirectoryError):
        make_folder(usual)
        return usual
    another = usual.with_name(f"{usual.name}.{secrets.token_hex(8)}")
    make_folder(another)
    return another


def user_folders() -> list[Path]:
    """Return the existing folders that :func:`user_folder` made."""
    try:
        return sorted(each for each in _memory().iterdir() if is_user_folder(each))
    except OSError:
        return []


def is_user_folder(path: Path) -> bool:
    """Whether ``path`` has the name of a user folder, and :func:`is_ours` accepts it. The folder
    may be anywhere."""
    pattern = rf"torchrl_dist-{os.geteuid()}(\.[0-9a-f]{{16}})?"
    return re.fullmatch(pattern, path.name) is not None and is_ours(path)


def leave_user_folder() -> None:
    """Remove this user's folder if it is empty."""
    for each in user_folders():
        with contextlib.suppress(OSError):
            each.rmdir()


def _memory() -> Path:
    return Path(_MEMORY if os.access(_MEMORY, os.W_OK) else tempfile.gettempdir())


# ---- files


def open_new(path: str | os.PathLike[str]) -> int:
    """Create a file with mode 0600; return a descriptor to read and write the file.

    Raises:
        FileExistsError: the file exists.
    """
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def open_ours(path: str | os.PathLike[str], flags: int = os.O_RDONLY) -> int:
    """Open a plain file of this user, or with ``os.O_DIRECTORY`` a folder; return a descriptor.

    Raises:
        NotOurs: the path is a link, a pipe or another special file, or belongs to another user.
    """
    # Without O_NONBLOCK, opening a pipe would wait until its other end is opened.
    try:
        fd = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):  # a link, or a pipe opened for writing
            raise NotOurs(path, "is not a plain file") from error
        raise
    status = os.fstat(fd)
    if flags & os.O_DIRECTORY:
        return fd
    ours = status.st_uid == os.geteuid() or flags & os.O_EXCL or _is_trusted(status)
    if not stat.S_ISREG(status.st_mode) or not ours:
        os.close(fd)
        if stat.S_ISDIR(status.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
        plain = stat.S_ISREG(status.st_mode)
        raise NotOurs(path, f"belongs to {_owner(status)}" if plain else "is not a plain file")
    return fd


def open_named(path: str | os.PathLike[str], *, append: bool) -> TextIO:
    """Open a file that the user named for results, to write text; create the file if it is missing.

    Raises:
        NotOurs: the file belongs to another user, or is a link or a pipe that another user may have
            made.
    """
    if Path(path).is_relative_to("/dev") and not Path(path).is_relative_to(_MEMORY):
        return open(path, "w")  # such as /dev/stdout
    fd = open_ours(resolved(path), os.O_WRONLY | os.O_CREAT | (os.O_APPEND if append else 0))
    if not append:
        os.ftruncate(fd, 0)
    return open(fd, "w")


def read_ours(path: str | os.PathLike[str], most: int = _SMALL) -> str:
    """Return the text of a small file of this user.

    Raises:
        NotOurs: the file is not a plain file, or belongs to another user.
        OSError: the file does not exist, or has more than ``most`` bytes.
    """
    return _read(open_ours(path), path, most)


def open_plain(path: str | os.PathLike[str]) -> int:
    """Open a plain file that the caller chose by name and that may belong to any user. Return a
    descriptor to read the file.

    Raises:
        NotOurs: the file is a pipe or another special file.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        if os.path.isdir(path):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
        raise NotOurs(path, "is not a plain file")
    return fd


def read_plain(path: str | os.PathLike[str], most: int = _SMALL) -> str:
    """Like :func:`read_ours`, for a file that :func:`open_plain` opens."""
    return _read(open_plain(path), path, most)


def _read(fd: int, path: str | os.PathLike[str], most: int) -> str:
    with open(fd, "rb") as file:
        content = file.read(most + 1) if os.fstat(fd).st_size <= most else b""
        if not 0 <= os.fstat(fd).st_size <= most or len(content) > most:
            raise OSError(errno.EFBIG, f"has more than {most} bytes", os.fspath(path))
    return content.decode()


def atomic_write(
    path: str | os.PathLike[str],
    write: Callable[[BinaryIO], object],
    *,
    meanwhile: Path | None = None,
    sync: bool = True,
) -> None:
    """Call ``write`` for a new file, which then replaces ``path`` atomically.

    Only one process may write to a path at a time. The next writer removes the unfinished file of a
    killed writer.

    Args:
        path: the file to replace, in a folder of this user. If ``path`` is a link, the new file
            replaces the link, not its target.
        write: a function that is called with the new file, open for bytes.
        meanwhile: the new file's path until the file is complete. The default is ``.NAME.tmp`` next
            to ``path``.
        sync: whether the bytes must be on disk before the new file replaces ``path``.
    """
    path = Path(path)
    meanwhile = meanwhile or temporary(path)
    try:
        meanwhile.unlink(missing_ok=True)
        with open(open_new(meanwhile), "w+b") as file:
            write(file)
            file.flush()
            if sync:
                os.fsync(file.fileno())
        os.replace(meanwhile, path)
    except BaseException as error:
        if isinstance(error, OSError):
            name_file(error, path)  # errors of write() and fsync() name no file
        with contextlib.suppress(OSError):
            meanwhile.unlink(missing_ok=True)
        raise


def name_file(error: OSError, path: Path) -> None:
    """Add ``path`` to an error of the operating system that names no file."""
    if error.errno is not None and error.filename is None:
        error.filename = str(path)


def temporary(path: Path) -> Path:
    """Return the path that :func:`atomic_write` writes to before it replaces ``path``."""
    return path.with_name(f".{path.name}.tmp")


# ---- printing names


def printable(text: str, *, lines: bool = False) -> str:
    """Escape control characters, because a terminal would obey them. With ``lines``, line ends are
    kept."""
    return "".join(
        each
        if each.isprintable() or (lines and each == "\n")
        else each.encode("unicode_escape").decode()
        for each in text
    )
