"""The result of a draw from a directory or over hosts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from torchrl_dist.errors import ConfigurationError
from torchrl_dist.replay.row.rows import tensors
from torchrl_dist.replay.row.spec import RowSpec


@dataclass(eq=False, slots=True)
class Drawn:
    """Units that were drawn, with copies of their rows. A unit is a row, a slice or a window.

    Attributes:
        spec: the row spec.
        index, generation: int64 [n], slot and generation of each row. In a batch over hosts, the
            index is an index into the whole buffer.
        leaf: float64 [units], ``(priority + eps) ** alpha`` of each row, of the first row of each
            slice, or of the anchor of each window; 1 in uniform sampling.
        tensors: the rows, one tensor [n, ...] per column of the row spec; or their stored form, see
            ``row.stacks``.
        minimum: the smallest leaf in the buffer at the time of the draw.
        mass: the mass of all units that could be drawn, at the time of the first draw.
        lengths: int64 [units], the number of rows of each slice or window; None if the units are
            rows.
        shape: for slices, their description by TorchRL's sampler, see
            ``SliceSampler._finalize_index``.
        scale: float64 [units], factors by which leaves are multiplied for the weights, see
            ``hosts.batches``; None if all factors are 1.
        anchors: int64 [n, 3], if the units are windows: for each row, index and generation of its
            anchor, and whether the row is valid, see ``windows``.
        second: int64 [n], the second coordinate of each row, if the storage has two dimensions and
            ``sample`` has replaced the slots in ``index`` with first coordinates; otherwise None.
    """

    spec: RowSpec
    index: torch.Tensor
    generation: torch.Tensor
    leaf: np.ndarray
    tensors: list[torch.Tensor]
    minimum: float = 1.0
    mass: float = 0.0
    lengths: torch.Tensor | None = None
    shape: dict[str, Any] | None = None
    scale: np.ndarray | None = None
    anchors: torch.Tensor | None = None
    second: torch.Tensor | None = None

    @classmethod
    def of(
        cls,
        spec: RowSpec | None,
        slots: np.ndarray,
        generation: np.ndarray,
        leaf: np.ndarray,
        columns: list[np.ndarray],
        *more: Any,
    ) -> Drawn:
        """Build units from rows that were read as arrays. ``spec`` is not None, because rows
        exist."""
        assert spec is not None
        index, stamps = torch.from_numpy(slots), torch.from_numpy(generation)
        return cls(spec, index, stamps, leaf, tensors(columns, spec), *more)

    @property
    def units(self) -> int:
        """The number of units."""
        return self.leaf.size

    @property
    def nbytes(self) -> int:
        """The size of the rows in bytes."""
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def weighed(self) -> np.ndarray:
        """The leaves from which importance weights are computed, float64 [units]."""
        return self.leaf if self.scale is None else self.leaf * self.scale

    def weights(self, beta: float) -> torch.Tensor:
        """Return importance weights ``(p / min p) ** -beta``, float32 [n], as if one buffer had all
        rows. All rows of a slice have the weight of its first row.

        The formula is that of Schaul et al. 2016, "Prioritized Experience Replay", section 3.4,
        with TorchRL's normalization."""
        weight = ((self.weighed / self.minimum) ** -float(beta)).astype(np.float32)
        if self.lengths is not None:
            weight = np.repeat(weight, self.lengths.numpy())
        return torch.from_numpy(weight)

    def chosen(
        self,
        take: Callable[[torch.Tensor], torch.Tensor],
        units: slice | np.ndarray,
        lengths: torch.Tensor | None = None,
    ) -> Drawn:
        """Return the chosen units. ``units`` selects them from an array with one entry per unit,
        and ``take`` selects their rows from a tensor with one entry per row."""
        return replace(
            self,
            index=take(self.index),
            generation=take(self.generation),
            leaf=self.leaf[units],
            tensors=[take(tensor) for tensor in self.tensors],
            lengths=lengths,
            scale=None if self.scale is None else self.scale[units],
            anchors=None if self.anchors is None else take(self.anchors),
        )

    def part(self, start: int, stop: int) -> Drawn:
        """Return the units ``start`` to ``stop - 1``."""
        units = slice(start, stop)
        if start == 0 and stop == self.units:
            return self
        if self.lengths is None:
            return self.chosen(lambda tensor: tensor[units], units)
        lengths = self.lengths[units]
        first = int(self.lengths[:start].sum())
        rows = slice(first, first + int(lengths.sum()))
        return self.chosen(lambda tensor: tensor[rows], units, lengths)

    def select(self, units: np.ndarray) -> Drawn:
        """Return the units with these numbers, int64 [n]."""
        places, lengths = torch.from_numpy(units), None
        if self.lengths is not None:
            lengths = self.lengths[places]
            begin = (self.lengths.cumsum(0) - self.lengths)[places]
            places = (begin - lengths.cumsum(0) + lengths).repeat_interleave(lengths)
            places += torch.arange(places.numel())
        return self.chosen(lambda tensor: tensor.index_select(0, places), units, lengths)


def joined(parts: Sequence[Drawn]) -> Drawn:
    """Join the draws of several shards.

    Raises:
        ConfigurationError: the shards hold different rows.
    """
    spec = parts[0].spec
    for part in parts[1:]:
        if part.spec != spec:
            raise ConfigurationError(
                f"the shards hold different rows: {spec} and {part.spec}; every writer of a "
                "buffer must write the same keys, shapes and dtypes"
            )
    if len(parts) == 1:
        return parts[0]
    lengths = [part.lengths for part in parts if part.lengths is not None]
    scales = [part.scale for part in parts if part.scale is not None]
    anchors = [part.anchors for part in parts if part.anchors is not None]
    return replace(
        parts[0],
        index=torch.cat([part.index for part in parts]),
        generation=torch.cat([part.generation for part in parts]),
        leaf=np.concatenate([part.leaf for part in parts]),
        tensors=[torch.cat(column) for column in zip(*(p.tensors for p in parts), strict=True)],
        lengths=torch.cat(lengths) if lengths else None,
        scale=np.concatenate(scales) if scales else None,
        anchors=torch.cat(anchors) if anchors else None,
    )
