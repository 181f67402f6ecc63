"""A sum and minimum tree over plain NumPy arrays, updated and drawn from in batches.

The law is proportional prioritization (Schaul et al. 2016, "Prioritized Experience Replay", eq. 1):
slot ``i`` is drawn with probability ``leaf[i] / sum(leaf)``. The caller stores ``leaf = (priority +
eps) ** alpha``. A leaf of 0 is never drawn and is left out of the minimum.

Every node has 32 children. Three decisions make the tree fast and safe:

- *Lazy*: a write stores leaves and marks their blocks of 32. Before a draw,
  :meth:`PriorityTree.refresh` recomputes the ancestors of marked blocks once, however many writes
  there were.
- *Recomputed, never adjusted*: a parent is always computed as the sum of its children, so rounding
  errors do not accumulate.
- *Marks are set first and cleared last*: a process that is killed in between leaves the marks of
  the unfinished blocks, and the next refresh completes them.

The arrays may lie in shared memory. The tree has no lock, so threads and processes that share
it must hold a common lock.
"""

from __future__ import annotations

from mmap import mmap

import numpy as np

from torchrl_dist.replay.law.kernel import address, find_kernel

FANOUT = 32
_SHIFT = 5
_TOP_SIZE = 1024  # a level with at most this many nodes is the top level


def level_sizes(capacity: int) -> list[int]:
    """Return the number of nodes per level, leaves first. Every level except the top is padded to
    whole blocks of 32."""
    sizes = [-(-capacity // FANOUT) * FANOUT]
    while sizes[-1] > _TOP_SIZE or len(sizes) == 1:
        nodes = sizes[-1] // FANOUT
        sizes.append(nodes if nodes <= _TOP_SIZE else -(-nodes // FANOUT) * FANOUT)
    return sizes


def tree_bytes(capacity: int) -> int:
    """Return the size in bytes of the buffer that :class:`PriorityTree` needs."""
    sizes = level_sizes(capacity)
    return 8 * (sizes[0] + 2 * sum(sizes[1:])) + _mark_bytes(sizes)


def _mark_bytes(sizes: list[int]) -> int:
    return -(-sizes[1] // 8) * 8


class PriorityTree:
    """The tree over ``capacity`` slots, in a byte buffer that may be shared memory.

    Args:
        capacity: number of slots.
        buffer: writable buffer of :func:`tree_bytes` bytes; a new one by default. A buffer
            of zeros is an empty tree.
    """

    def __new__(cls, *_: object, **__: object) -> PriorityTree:
        # ``_CTree`` implements the methods below in C
        return super().__new__(cls if find_kernel() is None else _CTree)

    def __init__(self, capacity: int, buffer: memoryview | bytearray | mmap | None = None) -> None:
        if capacity < 1:
            raise ValueError(f"capacity must be at least 1, got {capacity}")
        self.capacity = capacity
        sizes = level_sizes(capacity)
        raw = np.frombuffer(
            bytearray(tree_bytes(capacity)) if buffer is None else buffer, dtype=np.uint8
        )
        self._sums: list[np.ndarray] = []
        self._minima: list[np.ndarray] = []
        offset = 0
        for level, size in enumerate(sizes):
            for wanted in (self._sums, self._minima):
                if level == 0 and wanted is self._minima:
                    wanted.append(self._sums[0])  # leaves are their own minima
                    continue
                wanted.append(raw[offset : offset + 8 * size].view(np.float64))
                offset += 8 * size
        marks = raw[offset : offset + _mark_bytes(sizes)]
        self.marks = marks[: sizes[0] // FANOUT]
        """uint8 [blocks of leaves]: 1 if a leaf of the block was stored since the last refresh, or
        is being stored."""
        self.leaves: np.ndarray = self._sums[0][:capacity]
        """float64 [capacity]. Read it freely, but write only by the methods."""

    # --- writing -----------------------------------------------------------------------------

    def set(self, slots: np.ndarray, values: np.ndarray | float) -> None:
        """Store leaves at ``slots`` (int64 [n]). If a slot occurs twice, its last value stays."""
        self.marks[slots >> _SHIFT] = 1
        self.leaves[slots] = values

    def set_range(self, start: int, stop: int, values: np.ndarray | float) -> None:
        """Store leaves at slots ``start`` to ``stop - 1``: one value for all, or ``stop - start``
        values."""
        self.marks[start >> _SHIFT : ((stop - 1) >> _SHIFT) + 1] = 1
        self.leaves[start:stop] = values

    def mark_all(self) -> None:
        """Let the next refresh recompute every node from the leaves."""
        self.marks[:] = 1

    def refresh(self) -> None:
        """Recompute the ancestors of leaves that were written since the last call. The cost grows
        with the number of blocks of leaves that were written."""
        marked = blocks = np.flatnonzero(self.marks)
        if not blocks.size:
            return
        for level in range(1, len(self._sums)):
            children = _children(self._sums[level - 1], blocks)
            self._sums[level][blocks] = np.einsum("ij->i", children)  # takes half as long as sum(1)
            if level > 1:
                children = _children(self._minima[level - 1], blocks)
            # a value of 0 is a leaf without a row, or a padding node, which is never computed
            np.putmask(children, children <= 0, np.inf)
            self._minima[level][blocks] = children.min(1)
            parents = blocks >> _SHIFT
            first = np.ones(parents.size, dtype=bool)
            np.not_equal(parents[1:], parents[:-1], out=first[1:])
            blocks = parents[first]
        self.marks[marked] = 0

    # --- reading (after refresh) -------------------------------------------------------------

    @property
    def total(self) -> float:
        """Sum of all leaves."""
        return float(self._sums[-1].sum())

    @property
    def minimum(self) -> float:
        """Smallest leaf above 0; ``inf`` if all leaves are 0."""
        minima = self._minima[-1]
        positive = minima[minima > 0]
        return float(positive.min()) if positive.size else float("inf")

    def draw(self, uniforms: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the slots at the given quantiles.

        Args:
            uniforms: float64 [n] in [0, 1).

        Returns:
            ``(slots, leaves)``, int64 [n] and float64 [n]. If a returned leaf is 0, draw again.
            Rounding at the edge of a node causes this in about one draw in 1e15.

        Raises:
            ValueError: all leaves are 0.
        """
        cumulative = np.cumsum(self._sums[-1])
        if not cumulative[-1] > 0:
            raise ValueError(_EMPTY)
        mass = uniforms * cumulative[-1]
        node = np.minimum(np.searchsorted(cumulative, mass, side="right"), cumulative.size - 1)
        mass -= cumulative[node] - self._sums[-1][node]
        row = np.arange(node.size)
        for level in range(len(self._sums) - 2, -1, -1):
            children = _children(self._sums[level], node)
            running = _cumulative(children)
            running[:, -1] = np.inf  # rounding may leave more mass than all children have
            child = (running > mass[:, None]).argmax(1)
            mass -= np.where(child > 0, running[row, child - 1], 0.0)
            node = (node << _SHIFT) + child
        slots = np.minimum(node, self.capacity - 1)
        return slots, self.leaves[slots]

    def sample(self, uniforms: np.ndarray) -> tuple[np.ndarray, np.ndarray, float, float]:
        """Refresh and draw.

        Args:
            uniforms: float64 [n] in [0, 1).

        Returns:
            ``(slots, leaves, minimum, total)``: int64 [n], float64 [n], and the values of the
            properties :attr:`minimum` and :attr:`total`. As in :meth:`draw`, draw again if a
            returned leaf is 0.

        Raises:
            ValueError: all leaves are 0.
        """
        self.refresh()
        slots, leaves = self.draw(uniforms)
        return slots, leaves, self.minimum, self.total


class _CTree(PriorityTree):
    """The tree with its methods in C."""

    def __init__(self, capacity: int, buffer: memoryview | bytearray | mmap | None = None) -> None:
        super().__init__(capacity, buffer)
        library = find_kernel()
        assert library is not None
        self._refresh = library.replay_refresh
        self._draw = library.replay_draw
        self._sample = library.replay_sample
        # computed per process, because processes that share the buffer map it at different
        # addresses
        self._kept = (
            _addresses(self._sums),
            _addresses(self._minima),
            self.marks,
            np.empty(self.marks.size, dtype=np.int64),
        )
        self._record = np.array(
            [
                *map(address, self._kept),
                len(self._sums),
                self.marks.size,
                self._sums[-1].size,
                capacity,
            ]
        )
        self._at = address(self._record)
        self._summary = np.empty(2)
        self._summary_at = address(self._summary)

    def refresh(self) -> None:
        self._refresh(self._at)

    def draw(self, uniforms: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        uniforms = np.ascontiguousarray(uniforms, dtype=np.float64)
        count = uniforms.size
        out = np.empty(2 * count)
        if self._draw(self._at, address(uniforms), count, address(out)) < 0:
            raise ValueError(_EMPTY)
        return out[:count].view(np.int64), out[count:]

    def sample(self, uniforms: np.ndarray) -> tuple[np.ndarray, np.ndarray, float, float]:
        uniforms = np.ascontiguousarray(uniforms, dtype=np.float64)
        count = uniforms.size
        out = np.empty(2 * count)
        if self._sample(self._at, address(uniforms), count, address(out), self._summary_at) < 0:
            raise ValueError(_EMPTY)
        minimum, total = self._summary.tolist()
        return out[:count].view(np.int64), out[count:], minimum, total


_EMPTY = (
    "there are no rows to draw, because all leaves (powers of priorities) are 0; write rows first"
)
_UPPER = np.triu(np.ones((FANOUT, FANOUT)))
_BLAS_ROWS = 256  # with more rows at once, BLAS may start threads


def _children(level: np.ndarray, nodes: np.ndarray) -> np.ndarray:
    """Return a copy [n, 32] of the children of ``nodes``, int64 [n]."""
    return level.reshape(-1, FANOUT).take(nodes, 0)


def _cumulative(children: np.ndarray) -> np.ndarray:
    """Return cumulative sums along the rows of [n, 32], in half the time of ``cumsum``."""
    if len(children) <= _BLAS_ROWS:
        return children @ _UPPER
    running = np.empty_like(children)
    for start in range(0, len(children), _BLAS_ROWS):
        part = slice(start, start + _BLAS_ROWS)
        np.matmul(children[part], _UPPER, out=running[part])
    return running


def _addresses(levels: list[np.ndarray]) -> np.ndarray:
    return np.array([address(level) for level in levels], np.uint64)
