"""Functions that tests run in other processes. It imports little, because each imports it."""

from __future__ import annotations

import gc
import itertools
import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from tests.spawn import stop_self
from torchrl_dist.errors import RateLimitError
from torchrl_dist.replay import HostedReplayBuffer, ReplayOwner, replay_buffer
from torchrl_dist.replay.hosts import keeper
from torchrl_dist.replay.hosts.host import ReplayHost
from torchrl_dist.replay.hosts.messages import Reply, Request
from torchrl_dist.runtime import current_session


def settle(buffer: Any) -> None:
    """Wait until the hosts, if there are any, have stored what was written."""
    getattr(buffer.storage, "flush", lambda: None)()


def slow_down(delay_s: float, calls: int | None = None) -> None:
    """In an owner, delay the next ``calls`` calls, or all calls from now on."""
    serve = ReplayHost.serve
    counter = itertools.count()

    def slow_serve(self: ReplayHost, request: Request) -> Reply:
        if calls is None or next(counter) < calls:
            time.sleep(delay_s)
        return serve(self, request)

    ReplayHost.serve = slow_serve  # type: ignore[method-assign]


def when_rows_are_saved(what: str, writes: int) -> None:
    """In an owner that saves its rows, cause a failure after ``writes`` writes to files: the disk
    is full once, or the process is killed or paused."""
    pwrite, counter = os.pwrite, itertools.count()

    def fail(fd: int, data: memoryview, offset: int) -> int:
        if next(counter) == writes:
            if what == "full":
                raise OSError(28, "No space left on device")
            stop_self() if what == "paused" else os.kill(os.getpid(), signal.SIGKILL)
        return pwrite(fd, data, offset)

    os.pwrite = fail  # type: ignore[assignment]


_synced: list[str] = []


def note_syncs() -> None:
    """In an owner, record which files it syncs, for :func:`synced_here`."""
    fsync = os.fsync

    def note(fd: int) -> None:
        _synced.append(os.readlink(f"/proc/self/fd/{fd}"))
        fsync(fd)

    os.fsync = note  # type: ignore[assignment]


def synced_here() -> list[str]:
    """In an owner, return the files that it synced, with one entry per sync."""
    return _synced


def written_here() -> int:
    """In an owner, return the number of rows ever written to its buffers."""
    return sum(host.storage.write_count for host in keeper._hosts.values())


def build_here(**options: Any) -> ReplayOwner:
    """In any process, build its buffer and return the buffer's owner."""
    return replay_buffer(current_session(), **options).storage.owner


def descriptors_here() -> tuple[int, list[str]]:
    """In any process, count open descriptors, and list the mapped files of replay buffers."""
    gc.collect()
    maps = Path("/proc/self/maps").read_text().splitlines()
    rows = [line.split()[-1] for line in maps if "torchrl_dist-" in line and ".bin" in line]
    return len(os.listdir("/proc/self/fd")), sorted(rows)


def extend_twice(buffer: HostedReplayBuffer) -> torch.Tensor:
    """Return the indices of two extends of 8 rows."""
    value = torch.arange(8)
    rows = {"id": value, "obs": value[:, None].expand(8, 4).double()}
    rows["next"] = TensorDict({"obs": rows["obs"] + 0.5}, [8])
    found = [buffer.extend(TensorDict(rows, [8])) for _ in range(2)]
    buffer.flush()
    return torch.cat(found)


def write_by_rpc(buffer: HostedReplayBuffer, number: int) -> None:
    """Extend indefinitely with rows of ``faults.rows_of``. Each ``number`` has its own keys."""
    from tests.replay.faults import rows_of

    for first in itertools.count(number << 40, 40):
        buffer.extend(rows_of(range(first, first + 40)))
        if first % 400 == 0:
            buffer.flush()


def write_until(buffer: HostedReplayBuffer, rows: int, extend: int) -> int:
    """Write ``rows`` rows, ``extend`` at a time. Return the number of extends."""
    value = torch.arange(extend)
    data = {"id": value, "obs": value[:, None].expand(extend, 4).double()}
    data["next"] = TensorDict({"obs": data["obs"] + 0.5}, [extend])
    for _ in range(0, rows, extend):
        buffer.extend(TensorDict(data, [extend]))
    settle(buffer)
    return rows // extend


def sample_times(buffer: HostedReplayBuffer, times: int) -> list[int]:
    """Return the ids of ``times`` samples."""
    found = []
    for _ in range(times):
        found += buffer.sample()["id"].tolist()
    settle(buffer)
    return found


def sample_until_refused(buffer: HostedReplayBuffer, timeout_s: float) -> list[int]:
    """Return the ids of samples until the limiter refuses one for ``timeout_s``."""
    buffer.storage.client.timeout_s = timeout_s
    found = []
    while True:
        try:
            found += buffer.sample()["id"].tolist()
        except RateLimitError:
            return found


def write_trajectories(buffer: HostedReplayBuffer, writer: int, seconds: float) -> int:
    """Extend with parts of random trajectories for ``seconds``. Return the number of rows."""
    from tests.replay.test_slices import trajectory

    random, end, rows = np.random.default_rng(writer), time.monotonic() + seconds, 0
    for number in itertools.count():
        steps = int(random.integers(8, 30))
        for start in range(0, steps, 12):
            buffer.extend(trajectory(10 * number + writer, range(start, min(start + 12, steps))))
        rows += steps
        if number % 10 == 0:
            buffer.flush()
            if time.monotonic() > end:
                return rows
