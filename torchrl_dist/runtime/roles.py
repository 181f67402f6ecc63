"""Assign roles to ranks. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Mapping

from ..errors import ConfigurationError

DEFAULT_ROLES = {"worker": -1}


def assign_roles(roles: Mapping[str, int], world_size: int) -> list[tuple[str, int]]:
    """Return the (role, index) of every rank, in rank order.

    ``{"learner": 1, "collector": -1}`` makes rank 0 the learner and all other ranks collectors. A
    count of -1 (allowed once) gives its role the remaining ranks, if any. The first rank of the
    first role is the driver.

    Raises:
        ConfigurationError: the counts do not add up to ``world_size``.
    """
    counts = dict(roles)
    rest = [role for role, count in counts.items() if count == -1]
    if len(rest) > 1 or any(count < -1 for count in counts.values()):
        raise ConfigurationError(
            f"roles={counts}: expected counts of 0 or more; a single "
            "count may be -1, for all remaining processes"
        )
    if rest:
        counts[rest[0]] = max(0, world_size - sum(n for n in counts.values() if n != -1))
    total = sum(counts.values())
    if total != world_size:
        raise ConfigurationError(
            f"roles={dict(roles)} need {total} processes, but the job has {world_size}. Change the "
            "counts, set one count to -1 (all remaining processes), or start a different number "
            "of processes."
        )
    return [(role, index) for role, count in counts.items() for index in range(count)]
