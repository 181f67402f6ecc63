"""TorchRL's replay buffer and collector, shared by many processes."""

from __future__ import annotations

__version__ = "0.1.0"
