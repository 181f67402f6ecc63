"""Packages whose configuration can be read without torch."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any


def lazily(package: str) -> Callable[[str], Any]:
    """Return ``__getattr__`` for an algorithm's package.

    The package's configuration needs no torch; ``build`` and ``run`` import torch."""

    def named(name: str) -> Any:
        if name not in ("build", "run"):
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"{package}.recipe"), name)

    return named
