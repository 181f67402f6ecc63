"""Actors that run ahead of one learner, which corrects for the lag with V-trace (IMPALA)."""

from ..parts.lazy import lazily
from .config import ImpalaConfig as ImpalaConfig

__getattr__ = lazily(__name__)
