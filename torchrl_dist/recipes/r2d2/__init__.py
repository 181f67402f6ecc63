"""Recurrent replay for environments that hide a part of their state (R2D2)."""

from ..parts.lazy import lazily
from .config import R2D2Config as R2D2Config

__getattr__ = lazily(__name__)
