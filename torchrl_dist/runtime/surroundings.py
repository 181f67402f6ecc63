"""What a process forked from a server must be given of the one it works for."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Surroundings:
    """Environment, working directory, ``sys.argv``, ``sys.path`` and torch threads; crosses as a
    pickle."""

    environment: dict[str, str]
    directory: str
    arguments: list[str]
    path: list[str]
    threads: int

    @classmethod
    def of_this_process(cls, threads: int, env: Mapping[str, str] | None = None) -> Surroundings:
        """Those of the caller, with ``env`` added to the environment."""
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads), **(env or {})}
        return cls(environment, os.getcwd(), list(sys.argv), list(sys.path), threads)

    def adopt(self) -> None:
        """Called once in the new process, before anything of the user's runs."""
        import numpy
        import torch

        os.environ.clear()
        os.environ.update(self.environment)
        os.chdir(self.directory)
        sys.argv[:] = self.arguments
        sys.path[:] = self.path
        torch.set_num_threads(self.threads)
        # Else every child has the server's; Python does so by itself.
        numpy.random.seed()
        torch.default_generator.seed()
