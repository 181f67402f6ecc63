"""Save and restore a replay host's directory, a few chunks at a time to keep every call short.

Each call has a deadline, and the speed of connection and disk is unknown. The first calls are
therefore small, and the time that they take decides how large the next calls are.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from torchrl_dist.errors import RemoteError, TorchRLDistError
from torchrl_dist.replay.hosts.client import ReplayClient
from torchrl_dist.replay.row.packing import pack, unpack
from torchrl_dist.replay.row.spec import RowSpec
from torchrl_dist.replay.saving.disk import Ends, after
from torchrl_dist.replay.saving.shards import RestoredRows, Shard, Sink
from torchrl_dist.replay.saving.snapshot import CHUNK_BYTES, Chunk, Head

_CHUNKS_AHEAD = 2
_CHUNKS_WRITTEN = 16  # the most chunks that one call writes to the disk
_FIRST_BYTES, _LEAST_BYTES = 2**18, 2**14
# A fraction of the deadline. After a call that takes longer than this fraction, the next calls move
# fewer bytes.
_LONG_CALL = 0.25


class Pace:
    """Chooses how many bytes of rows a call moves, so that a call takes a small part of its
    deadline."""

    def __init__(self, deadline_s: float, most: int) -> None:
        self.bytes = min(_FIRST_BYTES, most)
        self._deadline_s = deadline_s
        self._most = most

    def note(self, begin: float, moved: int) -> None:
        """Record that a call moved ``moved`` bytes and began when ``time.monotonic()`` was
        ``begin``."""
        took = time.monotonic() - begin
        if took > _LONG_CALL * self._deadline_s:
            self.bytes = max(_LEAST_BYTES, self.bytes // 2)
        elif took < _LONG_CALL / 2 * self._deadline_s and 2 * moved > self.bytes:
            self.bytes = min(self._most, 2 * self.bytes)


def _some(ranges: Iterator[tuple[int, int]], rows: int) -> list[tuple[int, int]]:
    """Take the next ranges of slots until together they have at least ``rows`` slots."""
    found = []
    for start, stop in itertools.islice(ranges, _CHUNKS_WRITTEN):
        found.append((start, stop))
        rows -= stop - start
        if rows <= 0:
            break
    return found


class RemoteShard(Shard):
    """A host's directory. It is saved and restored a few chunks at a time, to keep every call
    short.

    Args:
        era: the era that a restore begins. It is the same for all shards; see ``HostState``.
        host_writes: whether a host that can access the checkpoint's folder writes its rows there
            itself. With ``False``, which is for measurements, the host always sends its rows.
    """

    def __init__(
        self, client: ReplayClient, shard: int, era: int, host_writes: bool = True
    ) -> None:
        self._client = client
        self._shard = shard
        self._era = era
        self._host_writes = host_writes
        self._pace: Pace | None = None  # the pace of the restore

    def _call(self, method: str, *args: Any) -> Any:
        return self._client.call(self._shard, method, *args)

    def head(self) -> Head:
        return self._call("head")

    def save(self, head: Head, sink: Sink) -> None:
        if head.spec is None:
            return
        folder = sink.folder if self._host_writes else None
        if folder is not None and self._call("reaches", str(folder)):
            self._have_written(str(folder), head, sink)
        else:
            self._fetch(head, sink)

    def _have_written(self, folder: str, head: Head, sink: Sink) -> None:
        assert head.spec is not None
        pace = Pace(self._client.timeout_s, _CHUNKS_WRITTEN * CHUNK_BYTES)
        ranges = head.chunks(lambda: min(pace.bytes, CHUNK_BYTES))
        ends: Ends = (0,) * len(head.spec.stored)
        row_bytes = head.spec.stored_row_bytes
        while some := _some(ranges, pace.bytes // row_bytes):
            begin = time.monotonic()
            try:
                chunks: list[Chunk] = self._call(
                    "save_chunks_to", folder, ends, head.cursor, head.alpha, some
                )
            except RemoteError as error:
                cause = error.__cause__
                if isinstance(cause, OSError) and not isinstance(cause, TorchRLDistError):
                    where = f"{cause.strerror} (in {error.peer} on {error.host})"
                    raise OSError(cause.errno, where) from error
                raise
            pace.note(begin, sum(chunk.leaf.size for chunk in chunks) * row_bytes)
            for chunk in chunks:
                sink.append(chunk)
                ends = after(ends, chunk.parts)

    def _fetch(self, head: Head, sink: Sink) -> None:
        pace = Pace(self._client.timeout_s, CHUNK_BYTES)

        def ask(chunk: tuple[int, int]) -> Any:
            begin = time.monotonic()
            found = self._call("save_chunk", head.cursor, head.alpha, *chunk)
            pace.note(begin, sum(part.nbytes for part in found[1]))
            return found

        assert head.spec is not None
        # the next chunks are in transit while one is being written
        with ThreadPoolExecutor(_CHUNKS_AHEAD, "torchrl_dist-checkpoint") as pool:
            chunks = head.chunks(lambda: pace.bytes)
            asked = deque(
                pool.submit(ask, each) for each in itertools.islice(chunks, _CHUNKS_AHEAD)
            )
            while asked:
                chunk, packed = asked.popleft().result()
                asked.extend(pool.submit(ask, each) for each in itertools.islice(chunks, 1))
                sink.write(unpack(packed))
                sink.append(chunk)

    def row_spec(self, spec: RowSpec) -> RowSpec:
        return self._call("row_spec", spec)

    def make_room(self, spec: RowSpec) -> None:
        self._client.order(self._shard, "make_room", spec)

    def begin_restore(self, head: Head) -> int:
        return self._client.order(self._shard, "begin_restore_of", head, self._era)

    def restore_rows(self, rows: RestoredRows) -> None:
        if self._pace is None:
            self._pace = Pace(self._client.timeout_s, CHUNK_BYTES)
        leaf, arrays = rows.leaf, rows.arrays
        row_bytes = max(1, sum(array.nbytes for array in arrays) // max(1, leaf.size))
        done = 0
        while done < leaf.size:
            part = slice(done, done + max(1, self._pace.bytes // row_bytes))
            packed = pack([array[part] for array in arrays], copy=False)
            some = rows._replace(slot=rows.slot + done, leaf=leaf[part], arrays=packed)
            size, begin = sum(each.nbytes for each in packed), time.monotonic()
            self._client.order(self._shard, "restore_rows", some, size=size)
            self._pace.note(begin, size)
            done += some.leaf.size
