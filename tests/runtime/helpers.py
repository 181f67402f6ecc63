"""Helpers for the tests of the runtime. It imports little, because every rank imports it."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path


class Counter:
    """A counter with a lock, which objects need if other processes call them."""

    def __init__(self, start: int = 0) -> None:
        self._lock = threading.Lock()
        self.value = start

    def add(self, n: int) -> int:
        with self._lock:
            self.value += n
            return self.value

    def sleep(self, seconds: float) -> int:
        time.sleep(seconds)
        return os.getpid()

    def fail(self) -> None:
        raise ValueError("no such thing")


class Meeting:
    """Calls that return when there are ``parties`` of them."""

    def __init__(self, parties: int) -> None:
        self._barrier = threading.Barrier(parties)

    def meet(self) -> None:
        self._barrier.wait(60)

    def waiting(self) -> int:
        return self._barrier.n_waiting


def listening_addresses(pids: list[int]) -> set[str]:
    """Return the addresses on which these processes listen for TCP, from /proc."""
    inodes = set()
    for pid in pids:
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            try:
                target = os.readlink(fd)
            except FileNotFoundError:  # closed since
                continue
            if target.startswith("socket:["):
                inodes.add(target[8:-1])
    addresses = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:  # 0A: LISTEN
                addresses.add(fields[1].rpartition(":")[0])
    return addresses
