"""What travels between a client of a replay buffer and its hosts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import NestedKey

from torchrl_dist.replay.row.packing import Part, spec_from_text, unpack
from torchrl_dist.replay.row.rows import tensors


@dataclass(frozen=True)
class Write:
    """Append rows: of one ``extend``, or of several that were merged.

    Attributes:
        spec: the row spec as text, see ``packing``.
        count: number of rows.
        packed: their columns.
        priority: float64 [count], before alpha and eps; None: the largest one seen.
        parts: number and rows of each ``extend``; the number, unique in a request, is for
            ``SetWrittenPriorities``.
    """

    spec: str
    count: int
    packed: Sequence[Part]
    priority: np.ndarray | None
    parts: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class SetPriorities:
    """New priorities, float64 [n], for slots; rows of other generations are left alone.

    ``parts``: how many entries each of the updates has that were merged.
    """

    slot: np.ndarray
    generation: np.ndarray | None
    priority: np.ndarray
    parts: tuple[int, ...] = ()


@dataclass(frozen=True)
class SetWrittenPriorities:
    """New priorities for the rows of an earlier ``extend`` in the same request, whose slots the
    client does not know yet."""

    number: int
    priority: np.ndarray


@dataclass(frozen=True)
class SetAlpha:
    """Change the priority exponent, for everybody."""

    alpha: float


@dataclass(frozen=True)
class UsePriorities:
    """See ``ReplayHost.use_priorities``."""

    alpha: float
    eps: float


@dataclass(frozen=True)
class Empty:
    """Drop all rows, for everybody."""

    reset_write_count: bool
    era: int


@dataclass(frozen=True)
class CountSamples:
    """So many rows of this host were returned by samples; for the rate limiter."""

    rows: int


@dataclass(frozen=True)
class ReturnDraws:
    """Drawn rows that nobody is going to use, with the leaves they were drawn by, [n] each; they
    are not to count for ``max_times_sampled``."""

    slot: np.ndarray
    generation: np.ndarray
    leaf: np.ndarray


@dataclass(frozen=True)
class Invoke:
    """Call a method of the host, in order with the operations; the reply brings its result."""

    method: str
    args: tuple[Any, ...]


Operation = (
    Write
    | SetPriorities
    | SetWrittenPriorities
    | SetAlpha
    | UsePriorities
    | Empty
    | CountSamples
    | ReturnDraws
    | Invoke
)


# ---- messages


@dataclass(frozen=True)
class SliceLaw:
    """Which slices of trajectories are drawn; see ``SharedSliceSampler``.

    ``consecutive``: rows of a trajectory may be missing, because other shards have them.
    """

    slice_len: int
    traj_key: NestedKey | None
    step_key: NestedKey
    fragmented: bool
    strict_length: bool
    span: tuple[bool | int, bool | int]
    consecutive: bool


@dataclass(frozen=True)
class Law:
    """What is drawn: rows or slices of trajectories, by priority or uniformly."""

    prioritized: bool
    slices: SliceLaw | None = None


UNIFORM, PRIORITIZED = Law(False), Law(True)


@dataclass(frozen=True)
class Request:
    """What a client sends.

    Attributes:
        operations: applied in this order, whatever becomes of the others.
        draw: rows wanted, or slices; 0: the state only; None: neither.
        law: by which these are drawn.
        max_priority: the largest priority that the client knows of, NaN for none: in a sharded
            buffer the other shards' rows count, too.
        era: of that priority; in another one the host leaves it alone.
    """

    operations: tuple[Operation, ...] = ()
    draw: int | None = None
    law: Law = PRIORITIZED
    max_priority: float = math.nan
    era: int = 0


class HostState(NamedTuple):
    """A host's directory at one instant.

    ``mass`` and ``minimum``: sum of the masses of what can be drawn, 0 if there is nothing, and the
    smallest of all rows, inf if there are none.
    ``max_priority``: before alpha; NaN before the first. ``era``: another number after each
    emptying and restore of the buffer, equal in all its shards; -1 while one is under way. Largest
    priorities go from shard to shard within an era only: a client that remembers one from before
    does not bring it back. The last three are for the rate limiter.
    """

    length: int
    high: int
    cursor: int
    write_count: int
    mass: float
    minimum: float
    max_priority: float
    alpha: float
    era: int
    inserts: int = 0
    samples: int = 0
    size: int = 0


class Failure(NamedTuple):
    """Something of a request that raised; the rest of it was done. ``position``: of the operation;
    -1 for the largest priority, which comes before them all, and their number for the draw."""

    position: int
    message: str
    trace: str


@dataclass(frozen=True)
class Reply:
    """The host's answer.

    Attributes:
        written: slot and generation, int64 [n] each, of every ``Write`` in the request; -1 for
            rows that were not kept.
        results: of every ``Invoke`` in the request; None for one that failed.
        failures: of the largest priority and the operations.
        draw_failure: of the draw, which then has no state and no rows.
        state: at the draw; None if none was asked for.
        count: rows or slices drawn: as many as wanted; fewer if those that may be sampled do not
            have so many draws left; 0 if the buffer is empty, or has no slice.
        spec: row spec of the drawn rows as text.
        lengths: of slices, how many rows each has.
        packed: slot, generation and leaf of each row, then the rows; see ``unpack_rows``.
    """

    written: tuple[tuple[np.ndarray, np.ndarray], ...] = ()
    results: tuple[Any, ...] = ()
    failures: tuple[Failure, ...] = ()
    draw_failure: Failure | None = None
    state: HostState | None = None
    count: int = 0
    lengths: np.ndarray | None = None
    spec: str = ""
    packed: Sequence[Part] = ()

    def unpack_rows(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[torch.Tensor]]:
        """``(slot, generation, leaf, tensors)``: int64, int64, float64 [count], rows [count, ...]
        in the order of the spec."""
        slot, generation, leaf, *rows = unpack(self.packed)
        handles = torch.from_numpy(slot), torch.from_numpy(generation), torch.from_numpy(leaf)
        return *handles, tensors(rows, spec_from_text(self.spec))
