"""Every error that torchrl_dist raises on purpose.

    TorchRLDistError (RuntimeError)
    +-- ConfigurationError (ValueError)   an argument or an environment variable cannot be right
    +-- DeadlineError (TimeoutError)      a bounded wait ran out; names what was waited for
    |   +-- RateLimitError                a buffer's limiter did not let a sample or a write begin
    +-- PeerLostError (ConnectionError)   another process of the job is gone
    +-- RemoteError                       another process raised; carries its traceback
    +-- DirectoryError                    a replay directory cannot be used as asked
    +-- CheckpointError                   a checkpoint is missing, damaged or of another kind
    +-- DriftError                        tensors that must be equal on all ranks are not

Each class also derives from the built-in error that a caller would catch without knowing us.
"""

from __future__ import annotations


class TorchRLDistError(RuntimeError):
    """Base of all errors of this package.

    Example:
        >>> try:
        ...     RateLimiter(min_size_to_sample=0)
        ... except TorchRLDistError as error:
        ...     type(error).__name__, isinstance(error, ValueError)
        ('ConfigurationError', True)
    """


class ConfigurationError(TorchRLDistError, ValueError):
    """An argument, or a combination of arguments, that cannot work."""


class DeadlineError(TorchRLDistError, TimeoutError):
    """A wait ended at its deadline. The message says for what and for how long."""


class RateLimitError(DeadlineError):
    """A replay buffer's limiter let a sample or a write wait until its deadline, or it would have
    waited for ever. The message says what was missing. Nothing was sampled or written."""


class PeerLostError(TorchRLDistError, ConnectionError):
    """Another process of this job died or cannot be reached."""


class RemoteError(TorchRLDistError):
    """A call raised in another process.

    Attributes:
        peer: name of the process, such as ``"collector2"``.
        host: name of its machine.
        remote_traceback: the traceback as it was formatted there.
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
    """A replay directory is in use by another job, does not match, or lies where it cannot work."""


class CheckpointError(TorchRLDistError):
    """A checkpoint is missing, damaged, or was not written by this package."""


class DriftError(TorchRLDistError):
    """Tensors that must be equal on all ranks are not.

    Attributes:
        names: of the tensors.
    """

    def __init__(self, message: str, *, names: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.names = names
