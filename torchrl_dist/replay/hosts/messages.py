"""The messages between a client of a replay buffer and its hosts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import NestedKey

from torchrl_dist.replay.parts.drawn import Drawn
from torchrl_dist.replay.parts.windows import Window
from torchrl_dist.replay.row.packing import Part, spec_from_text, unpack
from torchrl_dist.replay.row.stacks import values


@dataclass(frozen=True)
class Write:
    """Append the rows of one ``extend``, or of several calls of ``extend`` that were merged.

    Attributes:
        spec: the row spec as text, see ``packing``.
        count: number of rows.
        packed: the stored form of the rows, see ``row.stacks``.
        priority: float64 [count], without alpha and eps. None stands for the largest priority seen.
        parts: for each ``extend``, its number and its count of rows. The number is unique in the
            request, because ``SetWrittenPriorities`` refers to it.
    """

    spec: str
    count: int
    packed: Sequence[Part]
    priority: np.ndarray | None
    parts: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class SetPriorities:
    """Set the priorities, float64 [n], of the rows in slots. Skip a slot that holds a row of
    another generation.

    ``parts``: the number of entries of each merged update.
    """

    slot: np.ndarray
    generation: np.ndarray | None
    priority: np.ndarray
    parts: tuple[int, ...] = ()


@dataclass(frozen=True)
class SetWrittenPriorities:
    """Set priorities of the rows of an earlier ``extend`` in the same request.

    The client does not know the slots of these rows yet."""

    number: int
    priority: np.ndarray


@dataclass(frozen=True)
class CountSamples:
    """Tell the rate limiter how many rows of this host were returned by samples."""

    rows: int


@dataclass(frozen=True)
class Invoke:
    """Call a method of the host, in its turn among the operations. The reply has the method's
    result."""

    method: str
    args: tuple[Any, ...]


Operation = Write | SetPriorities | SetWrittenPriorities | CountSamples | Invoke


# ---- messages


@dataclass(frozen=True)
class SliceLaw:
    """Defines which slices of trajectories are drawn; see ``SharedSliceSampler``.

    ``consecutive``: whether neighbouring rows of a slice must be consecutive steps. True with
    several shards, because the steps between two neighbours may be in another shard.
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
    """Defines the units of a draw (rows, slices of trajectories, or windows around rows), and
    whether rows, or the first rows of slices, are drawn by priority or uniformly."""

    prioritized: bool
    slices: SliceLaw | None = None
    window: Window | None = None


UNIFORM, PRIORITIZED = Law(False), Law(True)


@dataclass(frozen=True)
class Request:
    """A client's message.

    Attributes:
        operations: applied in the order of the tuple, even if some of them fail.
        draw: number of rows or slices; 0 for the state only; None for neither rows nor state.
        law: the law of the draw.
        max_priority: the largest priority that the client knows, or NaN. In a sharded buffer, it
            may be the priority of a row in another shard.
        era: the era of that priority. A host in another era ignores the priority.
    """

    operations: tuple[Operation, ...] = ()
    draw: int | None = None
    law: Law = PRIORITIZED
    max_priority: float = math.nan
    era: int = 0


class HostState(NamedTuple):
    """A host's directory at one instant. The last three values are for the rate limiter.

    ``mass``: the sum of the masses of all units that can be drawn, 0 if there are none.
    ``minimum``: the smallest mass of a row, inf without rows. ``max_priority``: the largest
    priority, to which alpha is not applied; NaN if there is none. ``era``: a number that changes
    with each emptying and restore of the buffer. All shards have the same era. The era is -1 while
    the rows are being dropped. Clients pass the largest priority from one shard to another only if
    both are in the same era, so that a priority of an earlier era cannot come back.
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
    """A part of a request that raised an error. The other parts of the request were done.

    ``position``: the position of the operation. -1 stands for setting the largest priority, which
    is done first. A position equal to the number of operations stands for the draw."""

    position: int
    message: str
    trace: str


@dataclass(frozen=True)
class Reply:
    """The host's answer.

    Attributes:
        written: slot and generation, int64 [n] each, of every ``Write`` in the request; -1 for
            rows that were not kept.
        results: results of every ``Invoke`` in the request; None for an ``Invoke`` that failed.
        failures: failures of the operations, and of setting the largest priority.
        draw_failure: failure of the draw; the reply then has no state and no rows.
        largest: the largest priority that the host has seen, or NaN, and its era.
        state: the state at the draw; None if none was requested.
        count: number of rows or slices drawn. It is smaller than requested if the rows that may be
            sampled have too few draws left, and 0 if the buffer is empty or has no slice.
        spec: row spec of the drawn rows as text.
        lengths: number of rows of each slice or window.
        anchors: see ``Drawn``.
        packed: slot and generation of each row, leaf of each unit, and the stored form of the rows
            (``row.stacks``); see the method ``rows``.
    """

    written: tuple[tuple[np.ndarray, np.ndarray], ...] = ()
    results: tuple[Any, ...] = ()
    failures: tuple[Failure, ...] = ()
    draw_failure: Failure | None = None
    largest: tuple[float, int] = (math.nan, 0)
    state: HostState | None = None
    count: int = 0
    lengths: np.ndarray | None = None
    anchors: np.ndarray | None = None
    spec: str = ""
    packed: Sequence[Part] = ()

    @cached_property
    def rows(self) -> Drawn:
        """The drawn units. There must be at least one unit."""
        slot, generation, leaf, *stored = unpack(self.packed)
        spec = spec_from_text(self.spec)
        drawn = Drawn.of(spec, slot, generation, leaf, values(stored, spec))
        if self.lengths is not None:
            drawn.lengths = torch.from_numpy(self.lengths)
        if self.anchors is not None:
            drawn.anchors = torch.from_numpy(self.anchors)
        return drawn


class Answer(NamedTuple):
    """The answer to one draw. ``rows`` may have fewer units than requested, or be None."""

    state: HostState
    rows: Drawn | None
