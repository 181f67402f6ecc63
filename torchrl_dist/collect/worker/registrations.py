"""Register gymnasium environments of one process in another process."""

from __future__ import annotations

import contextlib

import cloudpickle
import gymnasium

Registrations = dict[str, bytes]


def dump_registrations() -> Registrations:
    """Return the environments registered in this process, except gymnasium's own."""
    specs: Registrations = {}
    for env_id, spec in gymnasium.registry.items():
        if isinstance(spec.entry_point, str) and spec.entry_point.startswith("gymnasium."):
            continue
        with contextlib.suppress(Exception):  # leave out specs that cannot be pickled
            specs[env_id] = cloudpickle.dumps(spec)
    return specs


def adopt_registrations(specs: Registrations) -> None:
    """Register the environments that are not registered in this process yet."""
    for env_id, spec in specs.items():
        if env_id not in gymnasium.registry:
            with contextlib.suppress(Exception):  # the env's module may be missing on this node
                gymnasium.registry[env_id] = cloudpickle.loads(spec)
