from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict
from torchrl.data import TensorDictReplayBuffer

from torchrl_dist.replay import (
    SharedCursorWriter,
    SharedMemmapStorage,
    SharedPrioritizedSampler,
    SharedRandomSampler,
)


@pytest.fixture
def folder() -> Iterator[Path]:
    """A replay directory in memory, removed afterwards."""
    path = Path("/dev/shm") / f"torchrl_dist-test-{os.getpid()}-{uuid.uuid4().hex[:8]}"
    yield path
    shutil.rmtree(path, ignore_errors=True)


def make_rows(values: torch.Tensor | range, width: int = 4) -> TensorDict:
    """Rows whose fields all repeat one value, so that a mix of two rows is recognised."""
    value = torch.as_tensor(list(values), dtype=torch.int64)
    n = value.numel()
    return TensorDict(
        {
            "id": value,
            "obs": value[:, None].expand(n, width).double().clone(),
            "next": {"obs": value[:, None].expand(n, width).double() + 0.5},
        },
        batch_size=[n],
    )


@pytest.fixture
def make_buffer(folder: Path) -> Iterator[Callable[..., TensorDictReplayBuffer]]:
    built: list[TensorDictReplayBuffer] = []

    def make(
        capacity: int = 64,
        *,
        uniform: bool = False,
        alpha: float = 0.6,
        beta: float = 0.4,
        kind: type[TensorDictReplayBuffer] = TensorDictReplayBuffer,
        **kwargs,
    ) -> TensorDictReplayBuffer:
        storage_arguments = {
            name: kwargs.pop(name)
            for name in ("resume", "keep", "timeout_s", "gather_threads", "limiter")
            if name in kwargs
        }
        buffer = kind(
            storage=SharedMemmapStorage(
                capacity, scratch_dir=folder, job_id="test", **storage_arguments
            ),
            sampler=SharedRandomSampler()
            if uniform
            else SharedPrioritizedSampler(capacity, alpha=alpha, beta=beta),
            writer=SharedCursorWriter(),
            batch_size=kwargs.pop("batch_size", 16),
            priority_key=kwargs.pop("priority_key", "td_error"),
            **kwargs,
        )
        built.append(buffer)
        return buffer

    yield make
    for buffer in built:
        buffer.storage.close()
