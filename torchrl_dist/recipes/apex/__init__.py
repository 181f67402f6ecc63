"""Distributed prioritized n-step double DQN (Ape-X)."""

from ..parts.lazy import lazily
from .config import ApexConfig as ApexConfig

__getattr__ = lazily(__name__)
