"""Learners that work together: a TorchRL loss whose gradients are averaged over ranks.

    loss = DistributedLoss(DQNLoss(...))     # in every rank; loss(batch)["loss"].backward() as ever

``gradients.py`` averages, ``ranks.py`` says who takes part and who is missing, ``loss.py`` puts
both behind TorchRL's interface.
"""

from __future__ import annotations

from .loss import DistributedLoss
from .ranks import Rank, Ranks

__all__ = ["DistributedLoss", "Rank", "Ranks"]
