"""The action-value network, in plain torch so that ``play`` needs nothing else."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor, nn


class QNetwork(nn.Sequential):
    """MLP from observations to one value per action.

    ``forward``: any real dtype ``[..., observation_size]`` -> float32 ``[..., num_actions]``.
    """

    def __init__(self, observation_size: int, num_actions: int, hidden: Sequence[int]) -> None:
        sizes = [observation_size, *hidden]
        layers: list[nn.Module] = []
        for before, after in itertools.pairwise(sizes):
            layers += [nn.Linear(before, after), nn.ReLU()]
        super().__init__(*layers, nn.Linear(sizes[-1], num_actions))

    def forward(self, observation: Tensor) -> Tensor:
        return super().forward(observation.to(torch.float32))
