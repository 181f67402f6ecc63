"""A node worker's end of its connection to an env process."""

from __future__ import annotations

import os
import socket
from multiprocessing.connection import Connection

# ``Connection`` writes a message up to this size by one system call, of which a Unix socket takes
# all or nothing. An interrupt therefore cannot leave such a message half sent.
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
        except ConnectionError:  # messages that have arrived are complete
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
        """Receive a message, as ``Connection.recv_bytes`` does. After an interrupted call, the
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
        """Shut the socket down. The other end notices this, and calls that wait on this end
        return."""
        self._cut_off = True
        with socket.socket(fileno=os.dup(self.fileno())) as end:
            end.shutdown(socket.SHUT_RDWR)
