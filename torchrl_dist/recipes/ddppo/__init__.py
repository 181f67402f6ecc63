"""PPO with several learners that average their gradients (DD-PPO)."""

from ..parts.lazy import lazily
from .config import DDPPOConfig as DDPPOConfig

__getattr__ = lazily(__name__)
