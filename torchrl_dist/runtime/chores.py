"""Run work in the thread that serves other processes.

Some environments must run in one thread from beginning to end. Environments that use signal
handlers, event loops or windows need the main thread.
"""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from collections import deque
from collections.abc import Callable

from ..forks import now_and_in_children
from .signals import Latch, say, wait_any

Chore = Callable[[], None]

# When the job ends, a call that is running has this long before it is interrupted, as if by Ctrl-C.
_END_S = 1.0
# If the call still runs this long after the interrupt, another thread ends the process.
_INTERRUPT_S = 5.0


class Chores:
    """A queue of calls (chores) for the thread that serves. At most one owner at a time submits
    calls."""

    def __init__(self) -> None:
        self.expected = False  # whether this process is in a session in which it may serve
        now_and_in_children(self, Chores._renew)

    def _renew(self) -> None:
        self._cond = threading.Condition()
        self._work: deque[Chore] = deque()
        self._wake_fd: int | None = None
        self._serves = self._claimed = self._busy = False

    def claim(self, patience_s: float) -> bool:
        """Become the owner of the queue if this process serves, or starts to serve within
        ``patience_s``.

        Returns False if the process does not serve, or if the queue has another owner.
        """
        until = time.monotonic() + patience_s
        with self._cond:
            while self.expected and not self._claimed and not self._serves:
                if not self._cond.wait(max(0.0, until - time.monotonic())):
                    return False
            if self._claimed or not self._serves:
                return False
            self._claimed = True
            return True

    def submit(self, chore: Chore) -> None:
        """Run ``chore`` soon, after the chores that were submitted earlier. Does not block.
        ``chore`` must not raise."""
        with self._cond:
            self._work.append(chore)
            if self._wake_fd is not None:
                os.eventfd_write(self._wake_fd, 1)

    def close(self) -> None:
        """Give up ownership of the queue. Chores that were submitted before still run."""
        with self._cond:
            self._claimed = False

    def run_until(self, end: Latch, interrupt: Callable[[], None]) -> None:
        """Run submitted chores until the latch is set.

        Args:
            interrupt: called if a chore still runs some time after the latch was set. SIGINT is
                then sent to the main thread, so ``interrupt`` must ensure that the handler of
                SIGINT raises KeyboardInterrupt.
        """
        wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        poller = select.poll()
        poller.register(wake_fd, select.POLLIN)
        watched = end.add_to(poller)
        in_main = threading.current_thread() is threading.main_thread()
        with self._cond:
            self._wake_fd, self._serves = wake_fd, in_main
            if self._work:
                os.eventfd_write(wake_fd, 1)
            self._cond.notify_all()
        guard = threading.Thread(
            target=self._guard, args=(end, interrupt), name="torchrl_dist-end", daemon=True
        )
        started = False
        try:
            while watched and not end.is_set():
                poller.poll()
                while not end.is_set() and (chore := self._next(wake_fd)) is not None:
                    if not started:
                        started = True
                        guard.start()
                    chore()
                    del chore
        except KeyboardInterrupt:
            if not end.is_set():
                raise
        finally:
            with self._cond:
                self._wake_fd, self._serves, self._busy = None, False, False
                self._cond.notify_all()
            os.close(wake_fd)

    def _next(self, wake_fd: int) -> Chore | None:
        with self._cond:
            self._busy = bool(self._work)
            self._cond.notify_all()
            if self._work:
                return self._work.popleft()
            try:
                os.eventfd_read(wake_fd)
            except BlockingIOError:
                pass
            return None

    def _guard(self, end: Latch, interrupt: Callable[[], None]) -> None:
        wait_any((end,), None)
        with self._cond:
            if self._cond.wait_for(lambda: not self._busy, _END_S):
                return
        interrupt()
        main = threading.main_thread().ident
        assert main is not None
        signal.pthread_kill(main, signal.SIGINT)
        with self._cond:
            if self._cond.wait_for(lambda: not self._busy, _INTERRUPT_S):
                return
        say("torchrl_dist: the job has ended, but a call in this process does not return: exiting")
        os._exit(1)


CHORES = Chores()
