"""Takes gymnasium environments that one process has registered to another."""

from __future__ import annotations

import contextlib

import cloudpickle
import gymnasium

Registrations = dict[str, bytes]


def dump_registrations() -> Registrations:
    """This process's own gymnasium environments: all but gymnasium's."""
    specs: Registrations = {}
    for env_id, spec in gymnasium.registry.items():
        if isinstance(spec.entry_point, str) and spec.entry_point.startswith("gymnasium."):
            continue
        with contextlib.suppress(Exception):  # a spec that does not pickle cannot be made there
            specs[env_id] = cloudpickle.dumps(spec)
    return specs


def adopt_registrations(specs: Registrations) -> None:
    """Register what is not known here; what this process has registered itself stays."""
    for env_id, spec in specs.items():
        if env_id not in gymnasium.registry:
            with contextlib.suppress(Exception):  # a module that this host has not
                gymnasium.registry[env_id] = cloudpickle.loads(spec)
