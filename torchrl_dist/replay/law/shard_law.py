"""The law of a buffer over shards: which rows of which shards make up one batch.

This module does only arithmetic on NumPy arrays. Other modules send the messages.

*Terms.* A shard's **mass** is the sum of its rows' leaves ``p`` at one instant. In a prioritized
buffer, ``p = (priority + eps) ** alpha``. In a uniform buffer, ``p = 1``, so the mass is the
length. A shard that is empty or lost has mass 0. The **law of the masses** ``r`` draws row ``x`` of
shard ``s`` with probability ``p(x) / sum(r)``: shard ``s`` with probability ``r[s] / sum(r)``, then
``x`` with ``p(x) / r[s]``. This is the law of a single buffer that holds the rows of all shards.

*The problem.* A client exchanges messages with the shards only once per batch. It therefore chooses
the shard of each draw before it asks the shards, by the masses ``r_old`` that it saw last. Each
reply has rows that were drawn independently, and the shard's mass ``r_new`` at the instant of the
draw. If the client simply took these rows, the shards' shares of the batch would follow ``r_old``,
which is outdated.

*The correction* is the maximal coupling of two discrete laws (Lindvall 2002, "Lectures on the
Coupling Method", I.5). The laws are the shares ``P`` of ``r_old`` and ``Q`` of ``r_new``. A draw of
shard ``s`` keeps its shard with probability ``min(1, Q[s] / P[s])``. Otherwise the draw gets a new
shard, drawn from ``(Q - P)+``, normalized. Then

    Pr(shard = s) = P[s] * min(1, Q[s] / P[s]) + d * (Q[s] - P[s])+ / d
                  = min(P[s], Q[s]) + (Q[s] - P[s])+ = Q[s],

where ``d = sum((P - Q)+) = sum((Q - P)+)`` is the probability of a new shard. This probability is
the total variation distance of ``P`` and ``Q``. No correction can give fewer draws a new shard.
Each draw uses its own random numbers, so the shards of a batch stay independent. The ``k``-th draw
of a shard takes the ``k``-th row of its reply. This choice does not depend on the contents of the
rows, so given the shards, the rows are independent draws from their shards. Therefore the batch
consists of independent draws by the law of ``r_new``, exactly, however old ``r_old`` is. Only the
number of rows that are missing in the replies depends on the age of ``r_old``. To have enough rows,
a request asks for spare rows, and a redraw fetches the rows that are still missing.

*One batch*, with ``uniforms(n)`` giving float64 [n] in [0, 1)::

    if not known.has_mass: ask every shard for 0 rows; known.learn(masses)  # the first batch
    request = known.plan(batch_size, uniforms)
    ask shard s for request.rows[s] rows, for every s                     # even for 0 rows
    known.learn(masses, request)  # the masses in the replies; 0 for a shard that did not answer
    shards = request.correct(masses, uniforms)
    row, missing = number_rows(shards, rows_received)                     # -1 where missing
    ask shard s for missing[s] more rows where that is above 0            # rarely
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from torchrl_dist.errors import ConfigurationError

Uniforms = Callable[[int], np.ndarray]
"""``uniforms(n)`` returns float64 [n], independent and uniform in [0, 1)."""

# The number of spare rows is computed from the largest recent rise of a shard's share. Each batch
# multiplies that rise by this factor. Example: 8 shards, batches of 256 rows, and masses that
# change at random by 2 % per batch. Then 0.4 % of the batches need a redraw, and the shards send
# 13 % more rows than a batch has.
_FADE = 0.95
# The rise that is assumed until a change has been seen, as a fraction of the share.
_FIRST_RISE = 0.05


def shares(masses: np.ndarray) -> np.ndarray:
    """Return the probability of each shard, float64 [shards].

    Args:
        masses: [shards], floats or integers >= 0; 0 for a lost or empty shard.

    Raises:
        ConfigurationError: a mass is negative or not finite, or all masses are 0, so there is
            nothing to draw.
    """
    masses = np.asarray(masses, dtype=np.float64)
    if not ((masses >= 0) & (masses < np.inf)).all():  # NaN also fails
        raise ConfigurationError(
            "the masses of shards (sums of priority ** alpha) must be finite and >= 0, got "
            f"{masses.tolist()}"
        )
    largest = masses.max(initial=0.0)
    if largest == 0:
        raise ConfigurationError(
            f"there are no rows to draw, because all {masses.size} shards have mass 0 (the sum of "
            "their priorities ** alpha); write rows first"
        )
    scaled = masses / largest  # so that the sum does not overflow, and denormal masses count
    return scaled / scaled.sum()


def choose_shards(masses: np.ndarray, count: int, uniforms: Uniforms) -> np.ndarray:
    """Draw ``count`` independent shards by ``masses``, int64 [count], but never a shard of mass 0.

    Raises:
        ConfigurationError: as ``shares`` does.
    """
    return _select(shares(masses), uniforms(count))


def correct_shards(
    shards: np.ndarray, old_masses: np.ndarray, new_masses: np.ndarray, uniforms: Uniforms
) -> np.ndarray:
    """Turn independent draws by ``old_masses`` into independent draws by ``new_masses``.

    As few draws as possible get another shard (maximal coupling, see the module's docstring).

    Args:
        shards: int64 [n], from ``choose_shards(old_masses, ...)``.
        old_masses, new_masses: [shards].

    Returns:
        int64 [n]; ``shards`` itself if nothing changed.

    Raises:
        ConfigurationError: as ``shares`` does.
    """
    old, new = shares(old_masses), shares(new_masses)
    rise = np.maximum(new - old, 0.0)
    total_rise = rise.sum()
    if total_rise == 0.0:
        return shards
    # u < Q / P, without the division. If a share did not fall, its draws are kept, even if the
    # products are rounded.
    keep = (uniforms(shards.size) * old[shards] < new[shards]) | (new[shards] >= old[shards])
    moved = np.flatnonzero(~keep)
    if not moved.size:
        return shards
    shards = shards.copy()
    shards[moved] = _select(rise / total_rise, uniforms(moved.size))
    return shards


def number_rows(shards: np.ndarray, received: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Assign rows of the shards' replies: the ``k``-th draw of a shard takes the ``k``-th row.

    Args:
        shards: int64 [n], the corrected shard of each draw.
        received: int64 [shards], the number of rows that each shard has sent, including redraws.

    Returns:
        ``(row, missing)``. ``row`` is int64 [n], and -1 where the shard has sent too few rows.
        ``missing`` is int64 [shards], the number of rows that each shard must still send. Ask these
        shards again, and call this function again with the new counts; rows that were assigned
        before keep their draws. If such a shard is lost, first assign its draws to other shards by
        their masses (``choose_shards``).
    """
    received = np.asarray(received, dtype=np.int64)
    needed = np.bincount(shards, minlength=received.size)
    order = np.argsort(shards, kind="stable")
    first = np.cumsum(needed) - needed
    row = np.empty(shards.size, dtype=np.int64)
    row[order] = np.arange(shards.size) - np.repeat(first, needed)
    row[row >= received[shards]] = -1
    return row, np.maximum(needed - received, 0)


def spare_rows(expected: np.ndarray) -> np.ndarray:
    """Return the number of spare rows that suffices in 999 of 1,000 batches, if ``expected`` spare
    rows are needed on average.

    A shard whose share rises from ``P`` to ``Q`` gets Binomial(n, Q - P) further draws in a batch
    of ``n``. The result is the sum of three terms, rounded up: the mean of this distribution, 3.3
    standard deviations of the Poisson distribution with the same mean, and a half. The Poisson
    distribution is used because it has heavier tails than the binomial distribution. Means below 1
    need the half. If the mean is 0, the result is 0.

    Args:
        expected: float64 [shards], the means.

    Returns:
        int64 [shards].
    """
    enough = np.ceil(expected + 3.3 * np.sqrt(expected) + 0.5).astype(np.int64)
    return np.where(expected > 0, enough, 0)


@dataclass(frozen=True)
class ShardRequest:
    """The first request to each shard for one batch.

    Attributes:
        shards: int64 [batch_size], the shard of each draw, by ``masses``.
        masses: float64 [shards], the masses known before the request.
        rows: int64 [shards], the number of rows to ask each shard for, including spare rows. Ask
            all shards, even for 0 rows, because every reply has the shard's mass.
    """

    shards: np.ndarray
    masses: np.ndarray
    rows: np.ndarray

    def correct(self, new_masses: np.ndarray, uniforms: Uniforms) -> np.ndarray:
        """Return a shard for each draw, int64 [batch_size]. The shards are chosen by the masses in
        the replies instead of those that were known before the request.

        Raises:
            ConfigurationError: all masses are 0, because every shard was lost or emptied meanwhile.
        """
        return correct_shards(self.shards, self.masses, new_masses, uniforms)


class KnownMasses:
    """The masses that a client saw last, and how fast they change.

    Several requests may be in flight at the same time, because each request remembers the masses by
    which it was planned. Method calls must not overlap, so the caller must hold a lock.

    Args:
        shard_count: number of shards, including lost shards.
    """

    def __init__(self, shard_count: int) -> None:
        if shard_count < 1:
            raise ConfigurationError(f"shard_count must be at least 1, got {shard_count}")
        self.masses = np.zeros(shard_count)
        """float64 [shards]. This array is replaced, never changed in place."""
        # by how much each shard's share may rise between a request and its reply
        self._rise: np.ndarray | None = None

    @property
    def has_mass(self) -> bool:
        """Whether any shard is known to have rows. If not, first ask all shards for their
        masses."""
        return bool((self.masses > 0).any())

    def plan(self, batch_size: int, uniforms: Uniforms) -> ShardRequest:
        """Choose the shard of each draw, and how many rows to ask for.

        Raises:
            ConfigurationError: no mass is known, or all masses are 0.
        """
        old = shares(self.masses)
        chosen = choose_shards(self.masses, batch_size, uniforms)
        draws = np.bincount(chosen, minlength=old.size)
        rise = _FIRST_RISE * old * (1 - old) if self._rise is None else self._rise
        spare = np.minimum(spare_rows(batch_size * rise), batch_size - draws)
        return ShardRequest(chosen, self.masses, draws + spare)

    def learn(self, masses: np.ndarray, request: ShardRequest | None = None) -> None:
        """Store the masses that the shards reported.

        Args:
            masses: [shards], 0 for a shard that is empty or did not reply.
            request: the request that was answered; None if the client asked only for masses.
        """
        self.masses = np.array(masses, dtype=np.float64)
        if request is None or not self.has_mass:
            return
        rise = np.maximum(shares(masses) - shares(request.masses), 0.0)
        self._rise = rise if self._rise is None else np.maximum(_FADE * self._rise, rise)


def largest_priority(*seen: float | np.ndarray) -> float:
    """Return the largest priority in the job that the replies and this client have seen.

    As in a single buffer, new rows get this priority in every shard. Therefore send it with each
    request, and let each shard keep the larger of this priority and its own. NaN means that there
    is no priority yet.
    """
    known = np.concatenate([np.atleast_1d(np.asarray(part, dtype=np.float64)) for part in seen])
    known = known[~np.isnan(known)]
    return float(known.max()) if known.size else float("nan")


def global_index(shard: np.ndarray | int, slot: np.ndarray, shard_capacity: int) -> np.ndarray:
    """Return the index of a row in the whole buffer, ``shard * shard_capacity + slot``, int64."""
    return np.asarray(shard, dtype=np.int64) * shard_capacity + slot


def split_index(index: np.ndarray, shard_capacity: int) -> tuple[np.ndarray, np.ndarray]:
    """Return ``(shard, slot)`` of global indices, int64. For the index -1, which means that there
    is no row, the shard is -1."""
    return np.divmod(np.asarray(index, dtype=np.int64), shard_capacity)


def _select(probabilities: np.ndarray, uniforms: np.ndarray) -> np.ndarray:
    """Return the shard at each quantile, int64, but never a shard of probability 0."""
    cumulative = np.cumsum(probabilities)
    chosen = np.searchsorted(cumulative, uniforms * cumulative[-1], side="right")
    # rounding may put the product at the end of the last interval
    return np.minimum(chosen, np.flatnonzero(probabilities)[-1])
