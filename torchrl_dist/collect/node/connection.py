"""A node worker's end of its connection to an env process."""

from __future__ import annotations

import os
import socket
from multiprocessing.connection import Connection

# Up to this size, ``Connection`` writes a message by one system call, and a Unix socket takes all
# of it or nothing. Therefore an interrupt cannot leave it half sent.
_ONE_PIECE_BYTES = 16384


class WholeMessages(Connection):
    """A connection that shuts down once a message was left half sent or half received.

    Ctrl-C, or another exception of a signal handler, can stop the caller inside a message. The next
    read would then begin in the middle of it.
    """

    _cut_off = False

    def send_bytes(self, buf: bytes) -> None:  # type: ignore[override]  # of bytes alone
        """Send a message, as ``Connection.send_bytes`` does.

        Raises:
            ConnectionError: the other end is closed or stopped, this one is closed, or an earlier
                message was left unfinished.
        """
        if self._cut_off or self.closed:
            raise BrokenPipeError
        try:
            super().send_bytes(buf)
        except ConnectionError:  # not interrupted: messages that have arrived are complete
            raise
        except BaseException as error:
            if isinstance(error, OSError) and self.closed:  # another thread closed it meanwhile
                raise BrokenPipeError from None
            if len(buf) > _ONE_PIECE_BYTES:
                self._cut()
            if isinstance(error, BlockingIOError):  # the socket's timeout has passed
                raise BrokenPipeError from None
            raise

    def recv_bytes(self) -> bytes:  # type: ignore[override]  # of any length
        """Receive a message, as ``Connection.recv_bytes`` does. If this call is interrupted, the
        message counts as unfinished, because it is unknown how much of it was read.

        Raises:
            EOFError: an earlier message was left unfinished, or the other end is closed.
        """
        if self._cut_off:
            raise EOFError("was left in the middle of a message, for example by an interrupt")
        try:
            return super().recv_bytes()
        except BaseException:
            self._cut()
            raise

    def _cut(self) -> None:
        """Shut the socket down, so that the other end notices it and calls that wait for this end
        return."""
        self._cut_off = True
        with socket.socket(fileno=os.dup(self.fileno())) as end:
            end.shutdown(socket.SHUT_RDWR)
