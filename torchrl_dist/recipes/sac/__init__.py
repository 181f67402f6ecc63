"""Soft actor-critic with a set number of updates per frame."""

from ..parts.lazy import lazily
from .config import SACConfig as SACConfig

__getattr__ = lazily(__name__)
