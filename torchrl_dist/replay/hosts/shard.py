"""A replay host's directory, for checkpoints: few chunks at a time, so that every call is short."""

from __future__ import annotations

import itertools
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from torchrl_dist.errors import RemoteError, TorchRLDistError
from torchrl_dist.replay.hosts.client import ReplayClient
from torchrl_dist.replay.row.packing import pack, unpack
from torchrl_dist.replay.row.spec import RowSpec
from torchrl_dist.replay.saving.shards import Sink
from torchrl_dist.replay.saving.snapshot import Chunk, Head

_CHUNKS_AHEAD = 2


_CHUNKS_WRITTEN = 16  # what has to reach the disk within the deadline of one call


class RemoteShard:
    """A host's directory, for saving: few chunks at a time, so that every call is short.

    Args:
        era: that a restore begins, the same for all shards; see ``HostState``.
        host_writes: a host that sees the folder of a checkpoint writes its rows there itself;
            ``False``, for measurements: they are sent, as by one that does not.
    """

    def __init__(
        self, client: ReplayClient, shard: int, era: int, host_writes: bool = True
    ) -> None:
        self._client = client
        self._shard = shard
        self._era = era
        self._host_writes = host_writes

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
        ranges, row = head.chunks(), 0
        while some := list(itertools.islice(ranges, _CHUNKS_WRITTEN)):
            try:
                chunks: list[Chunk] = self._call(
                    "save_chunks_to", folder, row, head.cursor, head.alpha, some
                )
            except RemoteError as error:
                cause = error.__cause__
                if isinstance(cause, OSError) and not isinstance(cause, TorchRLDistError):
                    where = f"{cause.strerror} (in {error.peer} on {error.host})"
                    raise OSError(cause.errno, where) from error
                raise
            for chunk in chunks:
                sink.append(chunk)
                row += chunk.leaf.size

    def _fetch(self, head: Head, sink: Sink) -> None:
        def ask(chunk: tuple[int, int]) -> Any:
            return self._call("save_chunk", head.cursor, head.alpha, *chunk)

        assert head.spec is not None
        # the next chunks are on their way while one is being written
        with ThreadPoolExecutor(_CHUNKS_AHEAD, "torchrl_dist-checkpoint") as pool:
            chunks = head.chunks()
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
        return self._client.order(self._shard, "begin_restore", head, self._era)

    def restore_rows(
        self,
        since: int,
        slot: int,
        version: int,
        leaf: np.ndarray,
        alpha: float | None,
        arrays: list[np.ndarray],
    ) -> None:
        packed = pack(arrays, copy=False)
        size = sum(part.nbytes for part in packed)
        self._client.order(
            self._shard, "restore_rows", since, slot, version, leaf, alpha, packed, size=size
        )
