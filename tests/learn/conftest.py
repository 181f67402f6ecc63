"""Two ranks that learn together: this process and a child."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.learn.ranks import LearningRanks


@pytest.fixture(scope="module")
def two_ranks(fork_server) -> Iterator[LearningRanks]:
    """The same two ranks for a module whose tests do not end in an error of one rank alone.

    From its first use to the module's end this process is a rank, so tests without other ranks
    come before.
    """
    with LearningRanks.start(2, fork_server) as ranks:
        yield ranks


@pytest.fixture
def three_ranks(fork_server) -> Iterator[LearningRanks]:
    with LearningRanks.start(3, fork_server) as ranks:
        yield ranks
