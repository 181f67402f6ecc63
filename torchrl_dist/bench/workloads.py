"""The rows that the replay benchmarks write and sample."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tensordict import TensorDict


@dataclass(frozen=True)
class Kind:
    """A kind of row, and the default number of rows of a buffer."""

    name: str
    capacity: int
    row_bytes: int
    fill_batch: int
    """Rows per call when a buffer is filled before a measurement."""


KINDS = {
    "S": Kind("S", capacity=1_000_000, row_bytes=45, fill_batch=4096),
    "L": Kind("L", capacity=50_000, row_bytes=28_237, fill_batch=256),
}


def make_rows(kind: str, count: int, seed: int = 0) -> TensorDict:
    """Return ``count`` rows of a kind.

    A row of kind S is a CartPole transition. A row of kind L has four stacked 84 x 84 frames, an
    action, a reward and a ``done`` flag. Three of these frames are also in the previous row.

    Returns:
        A TensorDict [count], in the layout of TorchRL's collectors.
    """
    import torch
    from tensordict import TensorDict

    random = torch.Generator().manual_seed(seed)
    if kind == "S":
        observation = torch.rand(count, 4, generator=random)
        following = {"observation": torch.rand(count, 4, generator=random)}
    else:
        shape = (count + 3, 84, 84)
        frames = torch.randint(0, 256, shape, dtype=torch.uint8, generator=random)
        observation = torch.stack([frames[i : i + count] for i in range(4)], 1)
        following = {}
    following["reward"] = torch.rand(count, generator=random)
    following["done"] = torch.zeros(count, dtype=torch.bool)
    action = torch.zeros(count, dtype=torch.int64)
    return TensorDict({"observation": observation, "action": action, "next": following}, [count])
