"""Files and folders that no other user of the machine prepared, changed or can exchange.

Several users share ``/tmp`` and ``/dev/shm``, where each of them can make a folder that another one
is going to use, with links, pipes or huge files in it. So a folder is used only if this process
made it, with mode 0700, or if it belongs to this user and no other user can write to it; and a file
is opened only if it is a plain file of this user. Everything else is refused with the reason
(:class:`NotOurs`). What lies above a folder counts, too, from the first folder on that everybody
can write to: there another user could exchange it later.

``TORCHRL_DIST_GROUP`` names a Unix group whose members this user trusts: folders of that group may
belong to any of them, and the group may write to them.
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
    """A file or folder that another user owns, prepared or can change. Says why."""

    def __init__(self, path: str | os.PathLike[str], why: str) -> None:
        super().__init__(errno.EPERM, why, os.fspath(path))

    def __str__(self) -> str:
        return f"{self.filename} {self.strerror}"


# ---- folders


def resolved(path: str | os.PathLike[str]) -> Path:
    """The path without its links; it need not exist.

    Raises:
        NotOurs: another user put one of the links into a folder that everybody can write to.
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
    """Make a folder with mode 0700, and those above it; False if it is there and is ours.

    Raises:
        NotOurs: it is there, or one above it is, and another user could change what lies in it.
        OSError: it cannot be made.
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
    """As :func:`make_folder`, of a folder that is there.

    Raises:
        NotOurs: another user could change what lies in it.
        OSError: there is none.
    """
    folder = resolved(path)
    _check_above(folder)
    _check_folder(folder)


def lock_folder(fd: int) -> bool:
    """Whether nothing else had locked the folder; it stays locked until all copies of ``fd`` are
    closed. Some network file systems lock no folders: there the answer is always True."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


def is_ours(folder: Path) -> bool:
    """Whether it is a folder, no link to one, that :func:`check_folder` accepts."""
    try:
        if not stat.S_ISDIR(os.lstat(folder).st_mode):
            return False
        check_folder(folder)
    except OSError:
        return False
    return True


def _check_above(folder: Path) -> None:
    """Nobody else can exchange the folder, or one above it."""
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
        raise NotADirectoryError(errno.ENOTDIR, "is no folder", str(folder))
    trusted = _is_trusted(status)
    if status.st_uid != os.geteuid() and not trusted:
        raise NotOurs(
            folder, f"belongs to {_owner(status)}: expected a new folder, or one of this user"
        )
    group_writes = status.st_mode & stat.S_IWGRP and not trusted
    if status.st_mode & stat.S_IWOTH or (group_writes and not _is_alone_in(status, folder)):
        raise NotOurs(
            folder,
            f"can be written to by other users: chmod go-w {folder}"
            + (f", or {GROUP}=NAME if you trust all members of its group" if group_writes else ""),
        )


def _is_strange(status: os.stat_result) -> bool:
    """Whether another user than this one and root owns it."""
    return status.st_uid not in _administrators() | {os.geteuid()} and not _is_trusted(status)


@functools.cache
def _administrators() -> frozenset[int]:
    """Root; where user ids are mapped, root outside is seen as the user "nobody"."""
    try:
        mapped = Path("/proc/self/uid_map").read_text().split() != ["0", "0", "4294967295"]
        nobody = int(Path("/proc/sys/kernel/overflowuid").read_text())
    except (OSError, ValueError):
        return frozenset({0})
    return frozenset({0, nobody} if mapped else {0})


def _is_trusted(status: os.stat_result) -> bool:
    name = os.environ.get(GROUP)
    if not name:
        return False
    try:
        number = int(name) if name.isdigit() else grp.getgrnam(name).gr_gid
    except KeyError:
        raise NotOurs(f"{GROUP}={name}:", "there is no such group") from None
    return status.st_gid == number


def _is_alone_in(status: os.stat_result, folder: Path) -> bool:
    """Whether the group that may write is this user's own, which distributions make per user."""
    try:
        user, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(status.st_gid)
        others = "system.posix_acl_access" in os.listxattr(folder)
    except KeyError:
        return False
    except OSError:  # no such attributes here
        others = False
    return not others and group.gr_name == user.pw_name and set(group.gr_mem) <= {user.pw_name}


def _owner(status: os.stat_result) -> str:
    try:
        return f"user {pwd.getpwuid(status.st_uid).pw_name}"
    except KeyError:
        return f"user {status.st_uid}"


# ---- this user's own folder


def user_folder() -> Path:
    """This user's folder for what has no other place, in memory; made with mode 0700.

    Another user can take its name first. Then it gets one that nobody can know.

    Raises:
        OSError: it cannot be made.
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
    """Those that :func:`user_folder` made and that are there."""
    try:
        return sorted(each for each in _memory().iterdir() if is_user_folder(each))
    except OSError:
        return []


def is_user_folder(path: Path) -> bool:
    """Whether it is one of :func:`user_folders`, wherever it lies."""
    pattern = rf"torchrl_dist-{os.geteuid()}(\.[0-9a-f]{{16}})?"
    return re.fullmatch(pattern, path.name) is not None and is_ours(path)


def leave_user_folder() -> None:
    """Remove it if nothing is in it."""
    for each in user_folders():
        with contextlib.suppress(OSError):
            each.rmdir()


def _memory() -> Path:
    return Path(_MEMORY if os.access(_MEMORY, os.W_OK) else tempfile.gettempdir())


# ---- files


def open_new(path: str | os.PathLike[str]) -> int:
    """A descriptor of a file that is made now, for reading and writing by this user alone.

    Raises:
        FileExistsError: there is one.
    """
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def open_ours(path: str | os.PathLike[str], flags: int = os.O_RDONLY) -> int:
    """A descriptor of a plain file of this user's; of a folder with ``os.O_DIRECTORY``.

    Raises:
        NotOurs: it is a link, a pipe or the like, or another user's.
    """
    # without O_NONBLOCK, opening a pipe waits for its other end
    try:
        fd = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):  # a pipe, for writing
            raise NotOurs(path, "is no plain file") from error
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
        raise NotOurs(path, f"belongs to {_owner(status)}" if plain else "is no plain file")
    return fd


def open_named(path: str | os.PathLike[str], *, append: bool) -> TextIO:
    """A file that the user has named for results, to write text into; made if there is none.

    Raises:
        NotOurs: it is another user's, or a link or a pipe that another user may have put there.
    """
    if Path(path).is_relative_to("/dev") and not Path(path).is_relative_to(_MEMORY):
        return open(path, "w")  # /dev/stdout
    fd = open_ours(resolved(path), os.O_WRONLY | os.O_CREAT | (os.O_APPEND if append else 0))
    if not append:
        os.ftruncate(fd, 0)
    return open(fd, "w")


def read_ours(path: str | os.PathLike[str], most: int = _SMALL) -> str:
    """The text of a small file of this user's.

    Raises:
        NotOurs: it is no plain file, or another user's.
        OSError: there is none, or it has more than ``most`` bytes.
    """
    return _read(open_ours(path), path, most)


def open_plain(path: str | os.PathLike[str]) -> int:
    """A descriptor to read a plain file, of whatever user, that the caller chose by name.

    Raises:
        NotOurs: it is a pipe or the like.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        if os.path.isdir(path):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
        raise NotOurs(path, "is no plain file")
    return fd


def read_plain(path: str | os.PathLike[str], most: int = _SMALL) -> str:
    """As :func:`read_ours`, of a file that :func:`open_plain` opens."""
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
    beside: Path | None = None,
    sync: bool = True,
) -> None:
    """Have ``write`` write a new file, which then takes the place of ``path`` at once.

    One writer per path at a time. What a killed writer left, the next one removes.

    Args:
        path: in a folder of this user's. A link there is replaced, not followed.
        write: is given the file, open for bytes.
        beside: the new file's name until it is whole; default: ``.NAME.tmp`` in the same folder.
        sync: whether the bytes are on the disk before the new file takes its place.
    """
    path = Path(path)
    beside = beside or temporary(path)
    try:
        beside.unlink(missing_ok=True)
        with open(open_new(beside), "w+b") as file:
            write(file)
            file.flush()
            if sync:
                os.fsync(file.fileno())
        os.replace(beside, path)
    except BaseException:
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)
        raise


def temporary(path: Path) -> Path:
    """Where :func:`atomic_write` writes."""
    return path.with_name(f".{path.name}.tmp")


# ---- what files and folders are called


def printable(text: str, *, lines: bool = False) -> str:
    """The text with control characters, which a terminal would obey, as Python writes them; ends
    of ``lines`` stay."""
    return "".join(
        each
        if each.isprintable() or (lines and each == "\n")
        else each.encode("unicode_escape").decode()
        for each in text
    )
