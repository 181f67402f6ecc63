"""Batches on the way from the replay buffer or the collectors to the learner's device."""

from __future__ import annotations

from collections.abc import Callable

import torch
from tensordict import TensorDictBase


class Feed:
    """Return the batches of ``draw`` on ``device``.

    On a GPU, :meth:`prepare` draws, pins and copies the next batch while the kernels of the last
    update run. The learner calls :meth:`prepare` as soon as it has enqueued these kernels. It sets
    the new priorities afterwards, because the kernels compute them. The draw therefore does not see
    the priorities of the last batch. On a CPU, an update ends before a draw could begin, so
    :meth:`take` draws each batch.

    Args:
        draw: returns a batch in host memory, or None if no batch is available now. The learner
            gets every batch that was drawn.
        ahead: whether :meth:`prepare` draws. By default, it does if ``device`` is a GPU.
    """

    def __init__(
        self,
        draw: Callable[[], TensorDictBase | None],
        device: torch.device,
        *,
        ahead: bool | None = None,
    ) -> None:
        self._draw = draw
        self._device = device
        self._ahead = device.type == "cuda" if ahead is None else ahead
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._next: TensorDictBase | None = None

    def prepare(self) -> None:
        """If drawing ahead is on and a batch is available, draw it and begin its copy."""
        if self._ahead and self._next is None:
            self._next = self._drawn()

    def take(self) -> TensorDictBase | None:
        """Return the next batch, ready for the current stream, or None if no batch is available."""
        batch, self._next = self._next, None
        if batch is None:
            batch = self._drawn()
        if batch is not None and self._stream is not None:
            current = torch.cuda.current_stream(self._device)
            current.wait_stream(self._stream)
            for leaf in batch.values(True, True):
                # so that the memory is not reused before this stream has read it
                leaf.record_stream(current)
        return batch

    def _drawn(self) -> TensorDictBase | None:
        batch = self._draw()
        if batch is None:
            return None
        with torch.cuda.stream(self._stream):  # does nothing if the stream is None
            return moved(batch, self._device)


def moved(data: TensorDictBase, device: torch.device) -> TensorDictBase:
    """Return ``data`` on ``device``. This is ``data`` itself if all of it is on the CPU already.

    If ``device`` is a GPU, its current stream copies from pinned memory, and the caller does not
    wait."""
    if device.type == "cpu" and all(leaf.is_cpu for leaf in data.values(True, True)):
        return data  # ``to`` would build a new TensorDict
    if device.type != "cuda":
        return data.to(device)
    return data.pin_memory(num_threads=0).to(device, non_blocking=True)
