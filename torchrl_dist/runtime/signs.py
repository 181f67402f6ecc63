"""Signs of life between nodes, on separate connections.

On the connection for calls, a sign would wait behind long calls and, after a network failure, for
TCP's retransmission. For each sign, a process therefore opens a new connection to a port of the
driver. The process sends a few bytes, which prove that it belongs to the job. The driver answers
whether the job has ended or the process is lost.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import secrets
import selectors
import socket
import time
from collections.abc import Callable
from typing import Any

_TOKEN, _RANK = 16, 4
_MOST_ANSWER = 1 << 16
# A connection that has not sent a whole sign after this many seconds is dropped.
_PATIENCE_S = 5.0
_NO_DESCRIPTOR_S = 0.1


class SignPost:
    """Receive the signs of life on the driver.

    Only a few bytes are read from each connection. The bytes are used only if they begin with this
    session's secret.

    Args:
        address: address of the interface to listen on.
        size: number of processes that give signs.
    """

    def __init__(self, address: str, size: int) -> None:
        self._ask, self._answer = secrets.token_bytes(_TOKEN), secrets.token_bytes(_TOKEN)
        self._listener = socket.create_server(
            (address, 0), family=_family(address), backlog=max(128, 2 * size)
        )
        self._listener.setblocking(False)
        self._most = 64 + 2 * size
        self._since: dict[socket.socket, float] = {}  # connections in order of arrival
        self._read: dict[socket.socket, bytes] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        port = self._listener.getsockname()[1]
        self.card = json.dumps([address, port, self._ask.hex(), self._answer.hex()])

    def serve(self, timeout_s: float, heard: Callable[[int], Any]) -> bool:
        """Answer signs for ``timeout_s``; return False after ``close``. Called in one thread.

        ``heard(rank)`` returns the answer, a value that JSON can express.
        """
        until = time.monotonic() + timeout_s
        while (left_s := until - time.monotonic()) > 0:
            for key, _ in self._selector.select(left_s):
                connection = key.fileobj
                assert isinstance(connection, socket.socket)
                if connection is not self._listener:
                    self._take(connection, heard)
                elif not self._accept():
                    return False
            while self._since:
                oldest, since = next(iter(self._since.items()))
                late = time.monotonic() - since > _PATIENCE_S
                if not late and len(self._since) <= self._most:
                    break
                self._drop(oldest)
        return True

    def close(self) -> None:
        """Let ``serve`` return in its thread. Idempotent."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)

    def release(self) -> None:
        """Close all connections. Called when no thread is in ``serve`` any more."""
        for connection in list(self._since):
            self._drop(connection)
        self._selector.close()
        self._listener.close()

    def _accept(self) -> bool:
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, ConnectionError):
            return True
        except OSError:
            if self._listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                time.sleep(_NO_DESCRIPTOR_S)  # no descriptor left, or no memory: try again later
                return True
            return False
        connection.setblocking(False)
        self._since[connection] = time.monotonic()
        self._read[connection] = b""
        self._selector.register(connection, selectors.EVENT_READ)
        return True

    def _take(self, connection: socket.socket, heard: Callable[[int], Any]) -> None:
        if connection not in self._since:
            return  # the connection was dropped earlier in this loop
        try:
            more = connection.recv(_TOKEN + _RANK - len(self._read[connection]))
        except BlockingIOError:
            return
        except OSError:
            more = b""
        said = self._read[connection] = self._read[connection] + more
        if more and len(said) < _TOKEN + _RANK:
            return
        if len(said) == _TOKEN + _RANK and hmac.compare_digest(said[:_TOKEN], self._ask):
            answer = json.dumps(heard(int.from_bytes(said[_TOKEN:], "big"))).encode()
            with contextlib.suppress(OSError):
                connection.send(self._answer + answer[:_MOST_ANSWER])
        self._drop(connection)

    def _drop(self, connection: socket.socket) -> None:
        del self._since[connection], self._read[connection]
        self._selector.unregister(connection)
        connection.close()


def give_sign(card: str, rank: int, timeout_s: float) -> Any:
    """Give the driver a sign of life, and return the driver's answer.

    Args:
        card: the card of the driver's ``SignPost``.

    Raises:
        OSError: there was no valid answer.
    """
    address, port, ask, answer = json.loads(card)
    until = time.monotonic() + timeout_s
    with socket.create_connection((address, port), timeout_s) as connection:
        connection.sendall(bytes.fromhex(ask) + rank.to_bytes(_RANK, "big"))
        said = b""
        while len(said) < _TOKEN + _MOST_ANSWER:
            connection.settimeout(max(1e-3, until - time.monotonic()))
            more = connection.recv(_MOST_ANSWER)
            if not more:
                break
            said += more
    if not hmac.compare_digest(said[:_TOKEN], bytes.fromhex(answer)):
        raise ConnectionError(f"not the driver, but another program listens at {address}:{port}")
    try:
        return json.loads(said[_TOKEN:])
    except ValueError as error:
        raise ConnectionError("the driver's answer was cut off") from error


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET
