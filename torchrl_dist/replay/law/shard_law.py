"""The law of a buffer over shards: which rows of which shard make one batch.

Pure arithmetic on NumPy arrays. Other modules send the messages.

*Terms.* A shard's **mass** is the sum of its rows' leaves ``p`` at one instant: ``p = (priority +
eps) ** alpha`` for a prioritized buffer, 1 for a uniform one, whose mass is therefore its length.
A shard that is empty or lost has mass 0. The **law of the masses** ``r`` draws row ``x`` of shard
``s`` with probability ``p(x) / sum(r)``: shard ``s`` with probability ``r[s] / sum(r)``, then ``x``
with ``p(x) / r[s]``. It is the law of a single buffer that holds the rows of all shards.

*The problem.* To need only one exchange of messages, a client chooses the shard of each draw before
it asks, by the masses ``r_old`` that it saw last. Each reply carries rows that were drawn
independently, and the shard's mass ``r_new`` of that same instant. Taking the rows as they come
would leave the shards' shares at ``r_old``.

*The correction* is the maximal coupling of two discrete laws (Lindvall 2002, "Lectures on the
Coupling Method", I.5), here the shares ``P`` of ``r_old`` and ``Q`` of ``r_new``: a draw of shard
``s`` keeps it with probability ``min(1, Q[s] / P[s])``; one that does not gets a shard from
``(Q - P)+``, normalized. Then

    Pr(shard = s) = P[s] * min(1, Q[s] / P[s]) + d * (Q[s] - P[s])+ / d
                  = min(P[s], Q[s]) + (Q[s] - P[s])+ = Q[s],

where ``d = sum((P - Q)+) = sum((Q - P)+)`` is the probability of not keeping, the smallest that any
correction can have: the total variation distance of ``P`` and ``Q``. Each draw uses random numbers
of its own, so the shards of a batch stay independent. The ``k``-th draw of a shard takes the
``k``-th row of its reply: which one does not depend on what the rows are, so given the shards the
rows are independent draws of their shards, and the batch is independent draws of the law of
``r_new``, exactly, however old ``r_old`` is. Only the number of rows that a shard lacks depends on
that age; spare rows are asked for in advance, and a redraw fetches the rest.

(Keeping the draws and dividing their weights by the shares used would be right at ``beta = 1``
only, and would make weights above 1.)

*One batch*, with ``uniforms(n)`` giving float64 [n] in [0, 1)::

    if not known.has_mass: ask every shard for 0 rows; known.learn(masses)  # the first batch
    request = known.plan(batch_size, uniforms)
    ask shard s for request.rows[s] rows, for every s                     # also where it is 0
    known.learn(masses, request)          # of the replies; 0 for a shard that did not answer
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

# Spare rows are sized by the largest recent rise of a shard's share; each batch lets that memory
# fade by this factor. With masses that walk at random by 2 % per batch, 0.4 % of the batches of 256
# need a redraw and 8 shards send 13 % more rows; with 0.9 it is 0.9 % and 12 %.
_FADE = 0.95
# Before anything was seen to move: a twentieth of the share.
_FIRST_RISE = 0.05


def shares(masses: np.ndarray) -> np.ndarray:
    """The probability of each shard, float64 [shards].

    Args:
        masses: [shards], >= 0, floats or integers; a lost or empty shard has 0.

    Raises:
        ConfigurationError: a mass is negative or not finite, or all are 0 (nothing to draw from).
    """
    masses = np.asarray(masses, dtype=np.float64)
    if not ((masses >= 0) & (masses < np.inf)).all():  # NaN also fails
        raise ConfigurationError(f"masses must be finite and >= 0, got {masses.tolist()}")
    largest = masses.max(initial=0.0)
    if largest == 0:
        raise ConfigurationError(
            f"cannot draw: all {masses.size} shards have mass 0; expected rows in one of them"
        )
    scaled = masses / largest  # so that the sum neither overflows nor loses what is denormal
    return scaled / scaled.sum()


def choose_shards(masses: np.ndarray, count: int, uniforms: Uniforms) -> np.ndarray:
    """``count`` independent shards by ``masses``, int64 [count]; never one of mass 0.

    Raises:
        ConfigurationError: as ``shares`` does.
    """
    return _select(shares(masses), uniforms(count))


def correct_shards(
    shards: np.ndarray, old_masses: np.ndarray, new_masses: np.ndarray, uniforms: Uniforms
) -> np.ndarray:
    """Turn independent shards by ``old_masses`` into independent shards by ``new_masses``.

    As few as possible change (maximal coupling, see the module).

    Args:
        shards: int64 [n], from ``choose_shards(old_masses, ...)``.
        old_masses, new_masses: [shards].

    Returns:
        int64 [n]; ``shards`` itself where nothing changed.

    Raises:
        ConfigurationError: as ``shares`` does.
    """
    old, new = shares(old_masses), shares(new_masses)
    rise = np.maximum(new - old, 0.0)
    total_rise = rise.sum()
    if total_rise == 0.0:
        return shards
    # u < Q / P, without the division; a share that did not fall is kept whatever rounding says
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
        received: int64 [shards], rows in each reply (of all rounds so far, in their order).

    Returns:
        ``(row, missing)``: int64 [n], -1 where the reply has too few rows, and int64 [shards], how
        many rows each shard still has to give. Ask those shards again and call this again with
        the new counts: the rows that were there keep their draws. If such a shard is lost by
        then, give its draws shards by the masses of the others (``choose_shards``) first.
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
    """Return the rows that suffice in all but 1 of 1,000 batches, if ``expected`` are needed.

    A shard whose share rises from ``P`` to ``Q`` gets Binomial(n, Q - P) further draws in a batch
    of ``n``. Its mean plus 3.3 standard deviations of the Poisson law, which has heavier tails,
    plus a half for means below 1; 0 where nothing is expected.

    Args:
        expected: float64 [shards], the mean.

    Returns:
        int64 [shards].
    """
    enough = np.ceil(expected + 3.3 * np.sqrt(expected) + 0.5).astype(np.int64)
    return np.where(expected > 0, enough, 0)


@dataclass(frozen=True)
class ShardRequest:
    """The first round of one batch.

    Attributes:
        shards: int64 [batch_size], the shard of each draw by the masses known then.
        masses: float64 [shards], those masses.
        rows: int64 [shards], rows to ask of each shard, spare ones included. Ask also those that
            have to give none: their replies carry the mass.
    """

    shards: np.ndarray
    masses: np.ndarray
    rows: np.ndarray

    def correct(self, new_masses: np.ndarray, uniforms: Uniforms) -> np.ndarray:
        """The shard of each draw by the masses in the replies, int64 [batch_size].

        Raises:
            ConfigurationError: all masses are 0: every shard was lost or emptied meanwhile.
        """
        return correct_shards(self.shards, self.masses, new_masses, uniforms)


class KnownMasses:
    """The masses that a client saw last, and how fast they move.

    Several requests may be on their way at once (each remembers the masses it was made with), but
    calls must not overlap: the caller holds a lock.

    Args:
        shard_count: number of shards, lost ones included.
    """

    def __init__(self, shard_count: int) -> None:
        if shard_count < 1:
            raise ConfigurationError(f"shard_count must be at least 1, got {shard_count}")
        self.masses = np.zeros(shard_count)
        """float64 [shards]; replaced, never changed in place."""
        self._rise: np.ndarray | None = None  # the share that each shard may gain until it replies

    @property
    def has_mass(self) -> bool:
        """Whether some shard is known to hold rows; if not, ask all for their masses first."""
        return bool((self.masses > 0).any())

    def plan(self, batch_size: int, uniforms: Uniforms) -> ShardRequest:
        """Choose the shard of each draw, and how many rows to ask for.

        Raises:
            ConfigurationError: no mass is known, or all are 0.
        """
        old = shares(self.masses)
        chosen = choose_shards(self.masses, batch_size, uniforms)
        draws = np.bincount(chosen, minlength=old.size)
        rise = _FIRST_RISE * old * (1 - old) if self._rise is None else self._rise
        spare = np.minimum(spare_rows(batch_size * rise), batch_size - draws)
        return ShardRequest(chosen, self.masses, draws + spare)

    def learn(self, masses: np.ndarray, request: ShardRequest | None = None) -> None:
        """Take over the masses of replies.

        Args:
            masses: [shards], 0 for a shard that is empty or did not reply.
            request: what they answer; None if only masses were asked for.
        """
        self.masses = np.array(masses, dtype=np.float64)
        if request is None or not self.has_mass:
            return
        rise = np.maximum(shares(masses) - shares(request.masses), 0.0)
        self._rise = rise if self._rise is None else np.maximum(_FADE * self._rise, rise)


def importance_weights(leaves: np.ndarray, minima: np.ndarray, beta: float) -> np.ndarray:
    """The weights of a single buffer that holds all shards: ``(p / min p) ** -beta``.

    Schaul et al. 2016, "Prioritized Experience Replay", section 3.4, with the normalization of
    TorchRL. All shards must use one alpha and eps.

    Args:
        leaves: float64 [n], ``p`` of each drawn row, > 0.
        minima: float64 [replies], the smallest ``p`` of each shard at its reply, of all rounds;
            ``inf`` for an empty one.
        beta: >= 0.

    Returns:
        float32 [n], at most 1.
    """
    return ((leaves / np.min(minima)) ** -float(beta)).astype(np.float32)


def largest_priority(*seen: float | np.ndarray) -> float:
    """The largest priority of the job, from what the replies and this client have seen.

    New rows get it in every shard, as in a single buffer: send it with each request, and let each
    shard keep the larger of that and its own. NaN stands for "none yet".
    """
    known = np.concatenate([np.atleast_1d(np.asarray(part, dtype=np.float64)) for part in seen])
    known = known[~np.isnan(known)]
    return float(known.max()) if known.size else float("nan")


def global_index(shard: np.ndarray | int, slot: np.ndarray, shard_capacity: int) -> np.ndarray:
    """``shard * shard_capacity + slot``, int64: the index of a row in the whole buffer."""
    return np.asarray(shard, dtype=np.int64) * shard_capacity + slot


def split_index(index: np.ndarray, shard_capacity: int) -> tuple[np.ndarray, np.ndarray]:
    """``(shard, slot)`` of global indices, int64. An index of -1, which means no row, gives
    shard -1."""
    return np.divmod(np.asarray(index, dtype=np.int64), shard_capacity)


def _select(probabilities: np.ndarray, uniforms: np.ndarray) -> np.ndarray:
    """The shard at each quantile, int64; never one of probability 0."""
    cumulative = np.cumsum(probabilities)
    chosen = np.searchsorted(cumulative, uniforms * cumulative[-1], side="right")
    # the product may be rounded up to the very end
    return np.minimum(chosen, np.flatnonzero(probabilities)[-1])
