"""The settings that a process forked from a server copies from the process that requested it."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Surroundings:
    """Environment, working directory, ``sys.argv``, ``sys.path`` and number of torch threads. Sent
    as a pickle."""

    environment: dict[str, str]
    directory: str
    arguments: list[str]
    path: list[str]
    threads: int

    @classmethod
    def of_this_process(cls, threads: int, env: Mapping[str, str] | None = None) -> Surroundings:
        """Return the settings of this process, with ``env`` added to the environment."""
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads), **(env or {})}
        return cls(environment, os.getcwd(), list(sys.argv), list(sys.path), threads)

    def adopt(self) -> None:
        """Apply these settings. Called once in the new process, before any user code runs."""
        import numpy
        import torch

        os.environ.clear()
        os.environ.update(self.environment)
        os.chdir(self.directory)
        sys.argv[:] = self.arguments
        sys.path[:] = self.path
        torch.set_num_threads(self.threads)
        # Otherwise all children would have the server's random state. The state of ``random`` needs
        # no code, because Python reseeds it after a fork.
        numpy.random.seed()
        torch.default_generator.seed()
