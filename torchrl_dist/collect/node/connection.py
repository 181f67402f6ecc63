"""A node worker's end of its connection to an env process."""

from __future__ import annotations

import os
import socket
from multiprocessing.connection import Connection

# Up to here ``Connection`` hands a message to the kernel in one piece, which a Unix socket takes
# whole or not at all: who is interrupted has sent it, or has not.
_ONE_PIECE_BYTES = 16384


class WholeMessages(Connection):
    """A connection that ends where a message was left half sent or half received.

    Ctrl-C, or what else a signal handler raises, can stop the caller inside of a message. What
    follows would be read from its middle on.
    """

    _cut_off = False

    def send_bytes(self, buf: bytes) -> None:  # type: ignore[override]  # of bytes alone
        """As ``Connection.send_bytes``.

        Raises:
            ConnectionError: the other end is closed, or stopped, or this one is closed, or an
                earlier message was left half way.
        """
        if self._cut_off or self.closed:
            raise BrokenPipeError
        try:
            super().send_bytes(buf)
        except ConnectionError:  # what has come is whole
            raise
        except BaseException as error:
            if isinstance(error, OSError) and self.closed:  # meanwhile, by another thread
                raise BrokenPipeError from None
            if len(buf) > _ONE_PIECE_BYTES:
                self._cut()
            if isinstance(error, BlockingIOError):  # the socket's time-out
                raise BrokenPipeError from None
            raise

    def recv_bytes(self) -> bytes:  # type: ignore[override]  # of any length
        """As ``Connection.recv_bytes``. Whoever is interrupted in here may have taken all of a
        message, or nothing: it counts as half way.

        Raises:
            EOFError: an earlier message was left half way, or the other end is closed.
        """
        if self._cut_off:
            raise EOFError("was left in the middle of a message, by an interrupt say")
        try:
            return super().recv_bytes()
        except BaseException:
            self._cut()
            raise

    def _cut(self) -> None:
        """The other end is told, and this one becomes readable: somebody may wait for that."""
        self._cut_off = True
        with socket.socket(fileno=os.dup(self.fileno())) as end:
            end.shutdown(socket.SHUT_RDWR)
