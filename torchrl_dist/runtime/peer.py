"""The processes of a job, as values."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Peer:
    """A process of the job: the ``index``-th of its ``role``.

    Example:
        >>> with session({"learner": 1}) as me:
        ...     me.me.role, me.me.index, me.me.name
        ('learner', 0, 'learner0')
    """

    role: str
    index: int
    global_rank: int
    host: str

    @property
    def name(self) -> str:
        return f"{self.role}{self.index}"

    def __str__(self) -> str:
        return f"{self.name} on {self.host}"
