from __future__ import annotations

import resource

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from torchrl_dist.replay.batch_memory import BatchMemory

SHAPE = (64, 512)


def floats(memory: BatchMemory) -> torch.Tensor:
    return torch.from_numpy(memory.empty(SHAPE, np.dtype(np.float32)))


def address(memory: BatchMemory) -> int:
    return floats(memory).data_ptr()


def test_a_dropped_tensor_is_used_again() -> None:
    memory = BatchMemory()
    assert address(memory) == address(memory)


@pytest.mark.parametrize(
    "keep",
    [
        lambda t: t,
        lambda t: t[3:5],
        lambda t: t.reshape(-1)[7],
        lambda t: t.numpy(),
        lambda t: t.untyped_storage(),
        lambda t: {"a": [t.view(torch.int32)]},
        lambda t: t.float().requires_grad_().sum(),
    ],
)
def test_memory_that_anybody_still_refers_to_is_left_alone(keep) -> None:
    memory = BatchMemory()
    tensor = floats(memory).fill_(1.0)
    first = tensor.data_ptr()
    kept = keep(tensor)
    del tensor
    assert address(memory) != first
    del kept
    assert address(memory) == first


def test_every_dtype_and_an_exhausted_pool_still_give_an_array() -> None:
    memory = BatchMemory()
    arrays = [
        memory.empty(SHAPE, np.dtype(dtype))
        for dtype in (bool, np.int16, np.float64, np.int32, np.uint8)
        for _ in range(20)
    ]
    assert len({array.ctypes.data for array in arrays}) == len(arrays)
    assert all(array.shape == SHAPE for array in arrays)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads_gather_the_same_rows(make_buffer, threads: int) -> None:
    rb = make_buffer(64, batch_size=100, gather_threads=threads)
    pixels = torch.randint(0, 255, (64, 4, 84, 84), dtype=torch.uint8)
    rb.extend(TensorDict({"pixels": pixels, "id": torch.arange(64)}, [64]))
    for _ in range(5):
        batch = rb.sample()
        assert (batch["pixels"] == pixels[batch["id"]]).all()


def test_sampling_large_rows_causes_no_page_fault_per_batch(make_buffer) -> None:
    rb = make_buffer(64, batch_size=32)
    rb.extend(TensorDict({"pixels": torch.zeros(64, 4, 84, 84, dtype=torch.uint8)}, [64]))
    for _ in range(20):
        rb.sample()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(50):
        rb.sample()
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    assert faults < 50 * 10  # 220 per batch with fresh memory
