"""Open, find and release the hosts of this process."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from tensordict import NestedKey

from torchrl_dist import own_files
from torchrl_dist.errors import ConfigurationError
from torchrl_dist.replay.hosts.host import ReplayHost
from torchrl_dist.replay.hosts.lifetimes import LOCKS
from torchrl_dist.replay.hosts.messages import Reply, Request
from torchrl_dist.replay.law.limiter import RateLimiter
from torchrl_dist.replay.node.gate import set_limiter
from torchrl_dist.replay.node.leftovers import (
    LEFT,
    MAY_COME_BACK,
    look,
    remove,
    remove_leftovers,
)
from torchrl_dist.replay.parts.storage import SharedMemmapStorage
from torchrl_dist.runtime import Remote, current_session
from torchrl_dist.runtime.world import World, is_stamp

_hosts: dict[tuple[str, str], KeptHost] = {}
"""The hosts of this process, by session and name."""


@dataclass(frozen=True)
class HostAddress:
    """The address of one host: a handle for calls, and the path of its directory for processes of
    its node."""

    host: Remote[Any]
    path: str
    job_id: str
    identity: tuple[str, int, int]
    """Boot id of the machine, device and inode of the lock file. These values are the same in all
    processes that can access the file."""

    def is_here(self) -> bool:
        """Return whether this process can use the host's directory directly."""
        try:
            return _identity(Path(self.path)) == self.identity
        except OSError:
            return False


class HostTerms(NamedTuple):
    """The arguments with which a host is created, see ``owner.host_replay``."""

    capacity: int
    scratch_dir: str | None
    resume: bool
    keep: bool
    limiter: RateLimiter | None
    frames: Mapping[NestedKey, int] | None = None


class KeptHost(ReplayHost):
    """A host that knows where its directory is, and can be released.

    Args:
        key: the host's session and name.
        terms: the arguments with which :func:`open_host` created the host.
    """

    def __init__(
        self, storage: SharedMemmapStorage, key: tuple[str, str], terms: HostTerms
    ) -> None:
        super().__init__(storage)
        self._key = key
        self._terms = terms
        self._released = False
        self._releasing = threading.RLock()

    def check(self, terms: HostTerms) -> None:
        """Check that a process asks for this host with the arguments that created it.

        Raises:
            ConfigurationError: the host was created with other arguments.
        """
        if terms != self._terms:
            raise ConfigurationError(
                f"process {current_session().me.name} still has replay buffer {self._key[1]!r} in "
                f"{self.storage.directory.path} with {self._terms}, but this call asks for "
                f"{terms}; use the same arguments, release that buffer, or use another name"
            )

    def serve(self, request: Request) -> Reply:
        if self._released:
            raise ConfigurationError(
                f"replay buffer {self._key[1]!r} was released; build it again to use it"
            )
        return super().serve(request)

    def release(self) -> bool:
        """Close the directory now. Idempotent.

        Returns:
            True if the directory should be removed, but still exists because another process uses
            it.

        Raises:
            DeadlineError: a write did not end in time. Nothing has changed, and the call can be
                repeated.
        """
        return self._release(clean=True)

    def give_up(self) -> None:
        """Release the host of a buffer that could not be built, but keep rows of an earlier job."""
        self._release(clean=self._released or not self.storage.write_count)

    def _release(self, clean: bool) -> bool:
        with self._releasing:
            if self._released:
                return False
            directory = self.storage.directory
            path, stays = directory.path, directory.stays
            try:
                _close_host(self._key, clean)
            except BaseException:
                with LOCKS.hosts:  # the next call, or the session's end, tries again
                    _hosts.setdefault(self._key, self)
                raise
            self._released = True
            # free the storage's memory now, because the session keeps a reference to this object
            del self._storage, self._cursor, self._prioritized, self._slicers, self._passes
        return not stays and path.exists()

    def whereabouts(self) -> tuple[str, str, tuple[str, int, int]]:
        directory = self.storage.directory
        return str(directory.path), directory.job_id, _identity(directory.path)


def open_host(name: str, terms: HostTerms) -> ReplayHost:
    """Open or find the host of this name. Runs in the host's process.

    Raises:
        ConfigurationError: the host of this name was created with other arguments.
    """
    session = current_session()
    with LOCKS.hosts:
        host = _hosts.get((session.session_id, name))
        if host is None:
            world = session.world
            job_id = _job_here(world)
            # After a restart without some of the hosts, global ranks and shards may have other
            # numbers. The directory's name contains none of these numbers, so that this node finds
            # the directory again.
            place = f"{name}-{world.local_rank}"
            # If the directory is for later jobs, later jobs must be able to derive its name.
            # Otherwise each job has its own directory, which is useless once the job cannot be
            # restarted.
            parent = terms.scratch_dir
            named = parent is not None or terms.keep or terms.resume
            prefix = _prefix()
            # The host name is needed, because a launcher may present one machine as several nodes.
            folder = prefix + (place if named else f"{job_id}-{place}-{session.me.host}")
            parent = parent or _default_parent()
            if not named:
                remove_leftovers(Path(parent), prefix)
            storage = SharedMemmapStorage(
                terms.capacity,
                scratch_dir=Path(parent, quote(folder, safe="")),
                job_id=job_id,
                resume=terms.resume,
                keep=terms.keep,
                timeout_s=session.timeout_s,
                frames=terms.frames,
            )
            try:
                set_limiter(storage.directory, terms.limiter)
            except BaseException:
                storage.close()
                raise
            key = session.session_id, name
            host = _hosts[key] = KeptHost(storage, key, terms)
            session.on_end(lambda clean: _close_host(key, clean))
        else:
            host.check(terms)
    return host


def _close_host(key: tuple[str, str], clean: bool) -> None:
    with LOCKS.hosts:
        host = _hosts.pop(key, None)
    if host is not None:  # the host was not released before
        host.close(clean)
        own_files.leave_user_folder()


def _prefix() -> str:
    return f"torchrl_dist-{os.getuid()}-"


def _job_here(world: World) -> str:
    """Return the job id that the job's directories on this machine carry.

    The job's id may be the stamp (``process_stamp``) of a process of another machine. This machine
    cannot check whether that process is alive, and the id changes if rank 0 moves to another
    machine. If the job's id is a stamp, return instead the stamp of this machine's launcher, which
    stays the same process in all restarts."""
    return (is_stamp(world.job_id) and world.starter) or world.job_id


def remove_what_the_dead_left(world: World, name: str) -> None:
    """Remove directories that dead processes of the job left on this machine. Call this function
    when a job ends cleanly.

    Directories that were built with ``keep`` stay, and so do directories that a process has
    open."""
    prefix, job_id = _prefix(), _job_here(world)
    with contextlib.suppress(OSError):
        for each in [each for folder in own_files.user_folders() for each in folder.iterdir()]:
            if not each.name.startswith(prefix) or each.lstat().st_uid != os.getuid():
                continue
            found = look(each) if quote(f"{name}-", safe="") in each.name else None
            if (
                found is not None
                and found.job_id == job_id
                and found.state in (LEFT, MAY_COME_BACK)
            ):
                remove(found)
    own_files.leave_user_folder()


def _default_parent() -> str:
    return str(own_files.user_folder())


def _identity(path: Path) -> tuple[str, int, int]:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    status = os.stat(path / "lock")
    return boot, status.st_dev, status.st_ino
