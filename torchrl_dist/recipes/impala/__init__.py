"""Actors that run ahead of one learner, corrected by V-trace (IMPALA)."""

from ..parts.lazy import lazily
from .config import ImpalaConfig as ImpalaConfig

__getattr__ = lazily(__name__)
