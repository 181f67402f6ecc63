"""The errors that torchrl_dist raises on purpose.

    TorchRLDistError (RuntimeError)
    +-- ConfigurationError (ValueError)   an argument or an environment variable is invalid
    +-- DeadlineError (TimeoutError)      a wait reached its deadline; the message says for what
    |   +-- RateLimitError                a sample or a write waited for a buffer's rate limiter
    +-- PeerLostError (ConnectionError)   another process of the job is gone
    +-- RemoteError                       a call raised in another process; has the traceback
    +-- DirectoryError                    a replay directory cannot be used as requested
    +-- CheckpointError                   a checkpoint is missing, damaged or not from this package
    +-- DriftError                        tensors that must be equal on all ranks differ

Each class also derives from a built-in error. An ``except`` clause for the built-in error therefore
also catches errors of the class.
"""

from __future__ import annotations


class TorchRLDistError(RuntimeError):
    """Base class of all errors of this package.

    Example:
        >>> try:
        ...     RateLimiter(min_size_to_sample=0)
        ... except TorchRLDistError as error:
        ...     type(error).__name__, isinstance(error, ValueError)
        ('ConfigurationError', True)
    """


class ConfigurationError(TorchRLDistError, ValueError):
    """An argument, a combination of arguments or an environment variable is invalid."""


class DeadlineError(TorchRLDistError, TimeoutError):
    """A wait reached its deadline. The message says for what the process waited, and for how
    long."""


class RateLimitError(DeadlineError):
    """A sample or a write waited for a replay buffer's rate limiter until the deadline of the call,
    or would have waited indefinitely.

    The message says what was missing. Nothing was sampled or written.
    """


class PeerLostError(TorchRLDistError, ConnectionError):
    """Another process of this job died or cannot be reached."""


class RemoteError(TorchRLDistError):
    """A call raised an error in another process.

    Attributes:
        peer: name of that process, such as ``"collector2"``.
        host: name of its machine.
        remote_traceback: the traceback of the error, as formatted in that process.
    """

    def __init__(self, message: str, *, peer: str, host: str, remote_traceback: str) -> None:
        super().__init__(message, peer, host, remote_traceback)
        self.message = message
        self.peer = peer
        self.host = host
        self.remote_traceback = remote_traceback

    def __str__(self) -> str:
        return (
            f"{self.message}\n--- raised in {self.peer} on {self.host} ---\n{self.remote_traceback}"
        )

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild_remote_error, (self.message, self.peer, self.host, self.remote_traceback)


def _rebuild_remote_error(message: str, peer: str, host: str, remote_traceback: str) -> RemoteError:
    return RemoteError(message, peer=peer, host=host, remote_traceback=remote_traceback)


class DirectoryError(TorchRLDistError):
    """A replay directory is used by another job, does not match the buffer, or is in an unsuitable
    place."""


class CheckpointError(TorchRLDistError):
    """A checkpoint is missing, damaged, or was not written by this package."""


class DriftError(TorchRLDistError):
    """Tensors that must be equal on all ranks differ.

    Attributes:
        names: names of these tensors.
    """

    def __init__(self, message: str, *, names: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.names = names
