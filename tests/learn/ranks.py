"""Runs a function in all ranks of a local cluster at once."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from torchrl_dist import Session, local_cluster

RESULT_S = 90.0  # for machines with much else to do; failures are found by deadlines of their own


class LearningRanks:
    """This process is rank 0; the others are children."""

    def __init__(self, session: Session) -> None:
        self.session = session

    @classmethod
    @contextlib.contextmanager
    def start(cls, count: int, fork_server: Any, **options: Any) -> Iterator[LearningRanks]:
        """``options`` are those of ``local_cluster``."""
        options = {
            "timeout_s": RESULT_S,
            "process_group": "gloo",
            "fork_server": fork_server,
            **options,
        }
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # as in the children, for which more would leave no core
        try:
            with local_cluster({"learner": count}, **options) as session:
                yield cls(session)
        finally:
            torch.set_num_threads(threads)

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """``function(*args)`` of each rank, in rank order."""
        others = [self.session.submit(p, function, *args) for p in self.session.peers[1:]]
        mine = function(*args)
        return [mine, *[other.result(RESULT_S) for other in others]]
