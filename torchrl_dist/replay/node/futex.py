"""Waiting for another process to change shared memory, without looking again and again.

A Linux futex (``man 2 futex``) on a word of the mapping: waiting costs no CPU time, waking one
system call, and a process that is killed while it waits leaves nothing behind.
"""

from __future__ import annotations

import ctypes
import platform
import time

_NUMBERS = {"x86_64": 202, "amd64": 202, "aarch64": 98, "arm64": 98, "riscv64": 98}
_NUMBER = _NUMBERS.get(platform.machine().lower())
_WAIT, _WAKE = 0, 1
_EVERYBODY = 2**31 - 1
_PAUSE_S = 5e-3  # between two looks, where the system call's number is not known

_syscall = ctypes.CDLL(None).syscall  # gives up the GIL during the call
_syscall.restype = ctypes.c_long


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class Bell:
    """Wakes the threads, of all processes, that wait at two words of shared memory.

    To wait: under the lock that guards the state look at it, then :meth:`arm`; leave the lock, then
    :meth:`wait`. To wake: change the state under the lock, leave it, :meth:`ring`. No ring is
    missed in between.

    Args:
        words: int64, shared, zeroed at first.
        waited: index of the word that says whether anybody waits.
        rung: index of the word that changes with every ring.
        address: of ``words[0]``.
    """

    def __init__(self, words: memoryview, waited: int, rung: int, address: int) -> None:
        self._words, self._waited, self._rung = words, waited, rung
        self._address = address + 8 * rung  # the low half: little endian

    def arm(self) -> int:
        """Announce that the caller is going to wait; returns what :meth:`wait` needs."""
        self._words[self._waited] = 1
        return self._words[self._rung]

    def ring(self) -> None:
        """Wake everybody who waits; next to nothing if nobody does."""
        words = self._words
        if words[self._waited]:
            words[self._waited] = 0
            words[self._rung] += 1
            if _NUMBER is not None:
                _call(self._address, _WAKE, _EVERYBODY, None)

    def wait(self, armed: int, timeout_s: float) -> None:
        """Block until the next ring after :meth:`arm`, ``timeout_s`` or a signal; it may also
        return early, so look again."""
        if _NUMBER is None:
            time.sleep(min(timeout_s, _PAUSE_S))
            return
        limit = _Timespec(int(timeout_s), int(timeout_s % 1 * 1e9))
        _call(self._address, _WAIT, armed, ctypes.byref(limit))


def _call(address: int, operation: int, value: int, limit: object) -> None:
    _syscall(
        ctypes.c_long(_NUMBER or 0), ctypes.c_void_p(address), ctypes.c_int(operation),
        ctypes.c_int(value & 0xFFFFFFFF), limit, None, ctypes.c_int(0),
    )  # fmt: skip
