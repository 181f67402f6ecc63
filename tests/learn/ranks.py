"""Runs a function in all ranks of a local cluster at once."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from torchrl_dist import Session, local_cluster

RESULT_S = 90.0  # for busy machines; failures are found by their own deadlines


class LearningRanks:
    """A local cluster. This process is rank 0, and the others are its children."""

    def __init__(self, session: Session) -> None:
        self.session = session

    @classmethod
    @contextlib.contextmanager
    def start(cls, count: int, fork_server: Any, **options: Any) -> Iterator[LearningRanks]:
        """Start ``count`` ranks. ``options`` are those of ``local_cluster``."""
        options = {
            "timeout_s": RESULT_S,
            "process_group": "gloo",
            "fork_server": fork_server,
            **options,
        }
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # as in the children, because more would leave them no core
        try:
            with local_cluster({"learner": count}, **options) as session:
                yield cls(session)
        finally:
            torch.set_num_threads(threads)

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Call ``function(*args)`` on each rank, and return the results in rank order."""
        others = [self.session.submit(p, function, *args) for p in self.session.peers[1:]]
        mine = function(*args)
        return [mine, *[other.result(RESULT_S) for other in others]]
