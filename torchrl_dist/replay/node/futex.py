"""Wait for another process to change shared memory, without polling.

This is a Linux futex (``man 2 futex``) on a word of the shared memory. Waiting costs no CPU time,
and waking costs one system call. A process that is killed while it waits leaves nothing behind.
"""

from __future__ import annotations

import ctypes
import platform
import time

_NUMBERS = {"x86_64": 202, "amd64": 202, "aarch64": 98, "arm64": 98, "riscv64": 98}
_NUMBER = _NUMBERS.get(platform.machine().lower())
_WAIT, _WAKE = 0, 1
_EVERYBODY = 2**31 - 1
_PAUSE_S = 5e-3  # polling interval, if the system call's number on this machine is unknown

_syscall = ctypes.CDLL(None).syscall  # releases the GIL during the call
_syscall.restype = ctypes.c_long


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class Bell:
    """Wakes the waiting threads of all processes by means of two words of shared memory.

    To wait, check the state under its lock, call :meth:`arm`, release the lock, and call
    :meth:`wait`. To wake, change the state under the lock, release the lock, and call :meth:`ring`.
    A ring between :meth:`arm` and :meth:`wait` is not missed.

    Args:
        words: int64, shared, initially zero.
        waited: index of the word that tells whether a thread waits.
        rung: index of the word that changes with every ring.
        address: address of ``words[0]``.
    """

    def __init__(self, words: memoryview, waited: int, rung: int, address: int) -> None:
        self._words, self._waited, self._rung = words, waited, rung
        self._address = address + 8 * rung  # a futex has 32 bits: the word's low half

    def arm(self) -> int:
        """Announce that the caller will wait. Return the argument of :meth:`wait`."""
        self._words[self._waited] = 1
        return self._words[self._rung]

    def ring(self) -> None:
        """Wake all waiting threads. If no thread waits, the call is cheap."""
        words = self._words
        if words[self._waited]:
            words[self._waited] = 0
            words[self._rung] += 1
            if _NUMBER is not None:
                _call(self._address, _WAKE, _EVERYBODY, None)

    def wait(self, armed: int, timeout_s: float) -> None:
        """Block until the next ring after :meth:`arm`, until a signal arrives, or until
        ``timeout_s`` has passed.

        This method may return early, so check the state again."""
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
