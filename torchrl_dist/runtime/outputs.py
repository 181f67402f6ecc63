"""Let a job outlive the readers of its standard output and standard error."""

from __future__ import annotations

import errno
import io
import os
import select
import sys
from typing import Any, TextIO

# Errors that mean that the reader has ended, or that the terminal or the descriptor was closed.
_GONE = (errno.EPIPE, errno.EIO, errno.EBADF, errno.ENXIO)
_replaced: list[TextIO] = []  # kept, because deleting a stream may close its descriptor
_FULL_S = 1.0  # how long a write to a non-blocking descriptor waits while the pipe is full


class _Lasting(io.FileIO):
    """A file that drops output that cannot be written.

    Once the reader is gone, the descriptor is replaced by /dev/null, so that other libraries and
    child processes can still write to the descriptor.

    Attributes:
        problem: the first error that made this file drop output.
    """

    problem: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            written = super().write(data)
            if written is None:  # another program has made the descriptor non-blocking
                writable = select.poll()  # select fails for descriptors above 1,023
                writable.register(self.fileno(), select.POLLOUT)
                writable.poll(1000 * _FULL_S)
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
    """From now on, failed writes to ``sys.stdout`` and ``sys.stderr`` do not raise.

    Call this function only in processes that belong to this package, before they run user code. A
    stream that other code has replaced is left alone.
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
    """Return the error that made a stream of :func:`outlive_readers` drop output."""
    buffer = getattr(stream, "buffer", None)
    return getattr(getattr(buffer, "raw", buffer), "problem", None)


def flush(*streams: TextIO | None) -> None:
    """Flush the streams as far as possible. A stream is None if its output was closed (``>&-``)."""
    for stream in streams:
        if stream is not None:
            try:
                stream.flush()
            except Exception:  # the stream is closed or the disk is full, and nothing can be done
                pass


class BestEffort:
    """A wrapper of any stream that drops what cannot be written."""

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        if self._stream is not None:
            try:
                self._stream.write(text)
            except (OSError, ValueError):  # ValueError: the stream was closed
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
