"""Running moments of observations and returns, for scaling observations and rewards."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from ...errors import TorchRLDistError

if TYPE_CHECKING:  # `play` needs none of these imports
    from tensordict import TensorDictBase

    from ...learn.ranks import Ranks

Floats = np.ndarray[Any, np.dtype[np.float64]]
Ints = np.ndarray[Any, np.dtype[np.int64]]

_BOUND = 10.0  # bound of scaled values, as in CleanRL's ppo_continuous_action.py
_EPSILON = 1e-8  # added to a variance, as in gymnasium
_REMEMBERED = 1 << 16  # maximum number of trajectories whose running return is kept
_PRIOR = 1e-4  # gymnasium's RunningMeanStd begins with this count, mean 0 and variance 1


class Moments(nn.Module):
    """Count, mean and sum of squared deviations (M2) of all values so far, as the module's buffers.

    The buffers are saved, and sent to collectors, together with the weights. ``forward`` normalizes
    values ``[..., size]`` of any real dtype to float32, and clips them to -10 .. 10, as gymnasium's
    ``NormalizeObservation`` and CleanRL do.
    """

    count: Tensor  # float64 []
    mean: Tensor  # float64 [size]
    m2: Tensor  # float64 [size]

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("count", torch.tensor(_PRIOR, dtype=torch.float64))
        self.register_buffer("mean", torch.zeros(size, dtype=torch.float64))
        self.register_buffer("m2", torch.full((size,), _PRIOR, dtype=torch.float64))

    @property
    def deviation(self) -> Tensor:
        """The standard deviation, float64 ``[size]``, above 0."""
        return (self.m2 / self.count + _EPSILON).sqrt()

    def forward(self, values: Tensor) -> Tensor:
        scaled = (values - self.mean) / self.deviation
        return scaled.clamp(-_BOUND, _BOUND).to(torch.float32)

    @torch.no_grad()
    def update(self, values: Tensor, ranks: Ranks, what: str) -> None:
        """Add the ``values`` ``[B, size]`` of all ranks. Blocks until all ranks have called.

        All ranks get the same moments, bit for bit. The ranks first sum up their values, and then
        the squared deviations from the common mean. The formula of Chan, Golub and LeVeque
        1979 ("Updating formulae and a pairwise algorithm for computing sample variances") adds the
        results to the earlier moments.

        Args:
            what: the name of the values in errors.

        Raises:
            TorchRLDistError: the values are not finite, or their squares are too large for float64.
        """
        values = values.to(torch.float64)
        mine = [float(len(values)), *values.sum(0).tolist()]
        count, *total = ranks.add_up(f"the mean of {what}", mine)
        mean = self.mean.new_tensor(total) / count
        squares = (values - mean).square().sum(0).tolist()
        m2 = self.m2.new_tensor(ranks.add_up(f"the variance of {what}", squares))
        if not m2.isfinite().all():
            raise TorchRLDistError(
                f"{what} are too large or not finite; check what step() and reset() of the "
                "environment return"
            )
        change, together = mean - self.mean, self.count + count
        self.m2 += m2 + change.square() * (self.count * count / together)
        self.mean += change * (count / together)
        self.count.copy_(together)


def moments_of(network: nn.Module) -> Moments | None:
    """Return the moments by which ``network`` normalizes observations, or None."""
    return next((part for part in network.modules() if isinstance(part, Moments)), None)


class RewardScale:
    """Divide rewards by the standard deviation of the running discounted return, as gymnasium's
    ``NormalizeReward`` does, and clip them to -10 .. 10, as CleanRL does.

    The running return of a step is its reward plus, within a trajectory, ``gamma`` times the
    running return of the step before. Other batches may lie between two parts of a trajectory,
    because the batches of several collectors alternate.

    Attributes:
        moments: the moments of the running returns of all ranks.
    """

    def __init__(self, gamma: float, ranks: Ranks, env: str = "the environment") -> None:
        self.moments = Moments(1)
        self._gamma, self._ranks, self._what = gamma, ranks, f"returns of {env}"
        self._last: dict[int, float] = {}  # the last running return of each trajectory

    def __call__(self, batch: TensorDictBase) -> Tensor:
        """Return the scaled rewards of ``batch [N, T]``, float32 ``[N, T, 1]``, after adding the
        batch's returns to the moments. Blocks until all ranks have called.

        Rows of trajectory -1 are padding, and must be at the end of an environment's rows."""
        reward = batch["next", "reward"].to(torch.float64)
        ids = batch["collector", "traj_ids"].cpu()
        returns = torch.from_numpy(self._running(reward.squeeze(-1).cpu().numpy(), ids.numpy()))
        self.moments.update(returns[ids >= 0].unsqueeze(-1), self._ranks, self._what)
        scaled = reward / self.moments.deviation.to(reward.device)
        return scaled.clamp(-_BOUND, _BOUND).to(torch.float32)

    def _running(self, reward: Floats, ids: Ints) -> Floats:
        returns = np.empty_like(reward)
        before = ids[:, 0]
        running = np.array([self._last.pop(id, 0.0) for id in before.tolist()])
        for step in range(reward.shape[1]):
            running = reward[:, step] + self._gamma * running * (ids[:, step] == before)
            returns[:, step], before = running, ids[:, step]
        env, last = np.arange(len(ids)), (ids >= 0).sum(1) - 1
        self._last |= zip(ids[env, last].tolist(), returns[env, last].tolist(), strict=True)
        # A trajectory that ended with its batch would stay here, so forget the oldest ones.
        for _ in range(len(self._last) - _REMEMBERED):
            del self._last[next(iter(self._last))]
        return returns
