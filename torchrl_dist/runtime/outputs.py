"""Standard output and error of this package's own processes: a job outlives their readers."""

from __future__ import annotations

import errno
import io
import os
import select
import sys
from typing import Any, TextIO

# The reader has ended, the terminal was closed, or the descriptor was.
_GONE = (errno.EPIPE, errno.EIO, errno.EBADF, errno.ENXIO)
_replaced: list[TextIO] = []  # the end of such an object may close its descriptor
_FULL_S = 1.0  # how long a write waits for a reader of a non-blocking descriptor


class _Lasting(io.FileIO):
    """Drops what cannot be written. Once the reader is gone, the descriptor is /dev/null's, so
    that other libraries and child processes can write, too.

    Attributes:
        problem: why something was dropped.
    """

    problem: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            written = super().write(data)
            if written is None:  # another program has made the descriptor non-blocking
                select.select([], [self], [], _FULL_S)
                written = super().write(data)
            return memoryview(data).nbytes if written is None else written
        except OSError as error:
            self.problem = self.problem or error
            if error.errno in _GONE:
                null = os.open(os.devnull, os.O_WRONLY)
                os.dup2(null, self.fileno())
                os.close(null)
            return memoryview(data).nbytes


def outlive_readers() -> None:
    """From here on no write to ``sys.stdout`` or ``sys.stderr`` raises because it fails.

    For processes that belong to this package, before they run any code of the user's. Streams that
    are not Python's own are left alone.
    """
    for name, number in (("stdout", 1), ("stderr", 2)):
        stream = getattr(sys, name)
        if type(stream) is not io.TextIOWrapper:
            continue
        raw = getattr(stream.buffer, "raw", stream.buffer)
        if type(raw) is not io.FileIO or raw.fileno() != number:
            continue
        flush(stream)
        _replaced.append(stream)
        lasting: Any = _Lasting(number, "wb", closefd=False)
        lasting.name = f"<{name}>"
        unbuffered = raw is stream.buffer  # python -u
        new = io.TextIOWrapper(
            lasting if unbuffered else io.BufferedWriter(lasting),
            stream.encoding,
            stream.errors,
            newline="\n",
            line_buffering=stream.line_buffering,
            write_through=stream.write_through,
        )
        setattr(sys, name, new)
        setattr(sys, f"__{name}__", new)


def problem_of(stream: Any) -> OSError | None:
    """Why something that was written to a stream of :func:`outlive_readers` was dropped."""
    buffer = getattr(stream, "buffer", None)
    return getattr(getattr(buffer, "raw", buffer), "problem", None)


def flush(*streams: TextIO | None) -> None:
    """Flush them as far as that is possible. Without an output (``>&-``) there is no stream."""
    for stream in streams:
        if stream is not None:
            try:
                stream.flush()
            except Exception:  # closed, a full disk: there is nobody to tell
                pass


class BestEffort:
    """Writes to a stream of any kind, and drops what cannot be written."""

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        if self._stream is not None:
            try:
                self._stream.write(text)
            except (OSError, ValueError):  # ValueError: it was closed
                pass
        return len(text)

    def flush(self) -> None:
        flush(self._stream)

    def isatty(self) -> bool:
        try:
            return self._stream is not None and self._stream.isatty()
        except (OSError, ValueError):
            return False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_stream"], name)
