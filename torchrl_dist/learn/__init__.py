"""Learners that work together: a TorchRL loss whose gradients are averaged over ranks.

    loss = DistributedLoss(DQNLoss(...))     # on each rank; loss(batch)["loss"].backward() as usual

``gradients.py`` averages gradients, ``ranks.py`` knows which processes take part and which are
missing, and ``loss.py`` applies these modules to a TorchRL loss.
"""

from __future__ import annotations

from .loss import DistributedLoss
from .ranks import Rank, Ranks

__all__ = ["DistributedLoss", "Rank", "Ranks"]
