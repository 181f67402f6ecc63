from __future__ import annotations

import resource

import pytest
import torch
from tensordict import TensorDict

from torchrl_dist.replay.batch_memory import BatchMemory

SHAPE = (64, 512)


def address(memory: BatchMemory) -> int:
    return memory.empty(SHAPE, torch.float32).data_ptr()


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
    tensor = memory.empty(SHAPE, torch.float32).fill_(1.0)
    first = tensor.data_ptr()
    kept = keep(tensor)
    del tensor
    assert address(memory) != first
    del kept
    assert address(memory) == first


def test_every_dtype_and_an_exhausted_pool_still_give_a_tensor() -> None:
    memory = BatchMemory()
    tensors = [
        memory.empty(SHAPE, dtype).zero_()
        for dtype in (torch.bool, torch.bfloat16, torch.float64, torch.int32, torch.uint8)
        for _ in range(20)
    ]
    assert len({tensor.data_ptr() for tensor in tensors}) == len(tensors)
    assert all(tensor.shape == SHAPE for tensor in tensors)


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
