"""Copy the registrations of gymnasium environments from one process to another."""

from __future__ import annotations

import contextlib

import cloudpickle
import gymnasium

Registrations = dict[str, bytes]


def dump_registrations() -> Registrations:
    """Return the pickled specs of the environments that are registered in this process, except
    gymnasium's own environments."""
    specs: Registrations = {}
    for env_id, spec in gymnasium.registry.items():
        if isinstance(spec.entry_point, str) and spec.entry_point.startswith("gymnasium."):
            continue
        with contextlib.suppress(Exception):  # leave out specs that cannot be pickled
            specs[env_id] = cloudpickle.dumps(spec)
    return specs


def adopt_registrations(specs: Registrations) -> None:
    """Register those environments of ``specs`` that are not yet registered in this process."""
    for env_id, spec in specs.items():
        if env_id not in gymnasium.registry:
            with contextlib.suppress(Exception):  # the env's module may be missing on this node
                gymnasium.registry[env_id] = cloudpickle.loads(spec)
