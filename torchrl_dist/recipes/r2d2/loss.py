"""The loss of recurrent double Q-learning, on windows of replay rows."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torch.nn.utils.rnn import pack_padded_sequence
from torchrl.objectives import LossModule

from ...learn.reductions import computes_each_row
from ..parts.networks import CELL, HIDDEN, RecurrentQNetwork, State
from ..parts.targets import target_of

EPSILON = 1e-3


def squeezed(value: Tensor) -> Tensor:
    """Return sign(x) (sqrt(|x| + 1) - 1) + eps x (Pohlen et al. 2018, arXiv:1805.11593)."""
    return value.sign() * ((value.abs() + 1).sqrt() - 1) + EPSILON * value


def stretched(value: Tensor) -> Tensor:
    """Return the inverse of :func:`squeezed` (proposition A.2 of the same paper)."""
    root = (1 + 4 * EPSILON * (value.abs() + 1 + EPSILON)).sqrt()
    return value.sign() * (((root - 1) / (2 * EPSILON)) ** 2 - 1)


@computes_each_row
class R2D2Loss(LossModule):
    """n-step double Q-learning of a network with an LSTM (Kapturowski et al. 2019, section 2.3).

    ``forward`` reads windows of ``burn_in + length + n_steps - 1`` rows, ``[B * size]``, as
    ``Sequence(length, burn_in=burn_in, bootstrap=n_steps - 1, episode_boundary="stop")`` samples
    them. It returns ``"loss"``: half the mean of the weighted squared errors of the rows to learn
    from. It writes ``"td_error"``, float32 ``[B * size, 1]``: the |TD error| of each of these rows,
    and 0 for the other rows. It replaces the stored states of the first row to learn from
    with those that the burn-in has computed.

    Both networks start from the stored state of a window's first valid row. From there, each
    computes its own state at the first row to learn from, without gradients. Values are squeezed
    (:func:`squeezed`). An episode that was cut off, or whose next rows are not in the buffer, is
    bootstrapped from its true last observation, with fewer than ``n_steps`` rewards.

    Args:
        network: the network whose weights are trained. The loss uses this module itself, not a
            copy.
    """

    def __init__(
        self, network: RecurrentQNetwork, *, gamma: float, n_steps: int, burn_in: int, length: int
    ) -> None:
        super().__init__()
        self.gamma, self.n_steps = gamma, n_steps
        self.burn_in, self.length = burn_in, length
        self.size = burn_in + length + n_steps - 1  # rows of a window
        self.network, self.target = network, target_of(network)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        def column(key: Any) -> Tensor:
            value = tensordict.get(key)
            return value.reshape(-1, self.size, *value.shape[1:])

        burn_in, length = self.burn_in, self.length
        valid = column("validity_mask").reshape(-1, self.size)
        window = torch.arange(len(valid), device=valid.device)
        states = torch.stack([column(HIDDEN), column(CELL)])[:, :, :, 0]  # [2, B, size, H]
        observation, after = column("observation"), column(("next", "observation"))
        reward = column(("next", "reward")).reshape(valid.shape)[:, burn_in:]
        terminated = column(("next", "terminated")).reshape(valid.shape)[:, burn_in:]
        there = valid[:, burn_in:].sum(1)  # number of the episode's rows after the burn-in

        # one more observation, after the last row of the episode
        seen = torch.cat([observation[:, burn_in:], after[:, -1:]], 1)
        seen[window, there] = after[window, burn_in + there - 1]
        with torch.no_grad():
            begin = self._burnt_in(self.target, observation, valid, states)
            target = self.target(seen, begin)[0]
        begin = self._burnt_in(self.network, observation, valid, states)
        value = self.network(seen, begin)[0]
        for key, state in zip((HIDDEN, CELL), begin, strict=True):
            column(key)[:, burn_in] = state.transpose(0, 1)

        step = torch.arange(length, device=valid.device)
        best = value.detach().argmax(-1, keepdim=True)
        bootstrap = stretched(target.gather(-1, best).squeeze(-1))
        bootstrap[window, there] *= ~terminated[window, there - 1]
        reward = reward * (torch.arange(reward.shape[1], device=valid.device) < there[:, None])
        total = sum(self.gamma**n * reward[:, n : n + length] for n in range(self.n_steps))
        last = torch.minimum(step + self.n_steps, there[:, None])  # [B, length]
        discount = self.gamma ** (last - step).to(torch.float32)
        goal = squeezed(total + discount * bootstrap.gather(1, last))
        action = column("action")[:, burn_in : burn_in + length, None]
        chosen = value[:, :length].gather(-1, action).squeeze(-1)
        error = (goal - chosen) ** 2 * (step < there[:, None])
        weight = column("priority_weight").reshape(valid.shape)[:, :1]
        errors = torch.zeros_like(valid, dtype=torch.float32)
        errors[:, burn_in : burn_in + length] = error.detach().sqrt()
        tensordict.set("td_error", errors.reshape(-1, 1))
        return TensorDict({"loss": (weight * error).mean() / 2})

    @torch.no_grad()
    def _burnt_in(
        self, network: RecurrentQNetwork, observation: Tensor, valid: Tensor, states: Tensor
    ) -> State:
        """Return the state at the first row to learn from.

        Args:
            states: ``[2, B, size, H]``, the stored states before each row."""
        burn_in = self.burn_in
        count = valid[:, :burn_in].sum(1)  # the valid rows are at the end of the burn-in
        first = burn_in - count
        window = torch.arange(len(valid), device=valid.device)
        stored = states[:, window, first]
        hidden, cell = stored[0][None].contiguous(), stored[1][None].contiguous()
        if not burn_in or not count.any():
            return hidden, cell
        order = (first[:, None] + torch.arange(burn_in, device=valid.device)).clamp(max=burn_in - 1)
        features = network.features(observation[window[:, None], order])
        packed = pack_padded_sequence(
            features, count.clamp(min=1).cpu(), batch_first=True, enforce_sorted=False
        )
        _, (after, cells) = network.memory.lstm(packed, (hidden, cell))
        some = (count > 0)[:, None]
        return torch.where(some, after, hidden), torch.where(some, cells, cell)
