from __future__ import annotations

import os
import resource
import threading

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from torchrl_dist.replay.row.batch_memory import BatchMemory
from torchrl_dist.replay.row.gather import Gatherer

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
def test_memory_that_is_still_referred_to_is_not_used_again(keep) -> None:
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


def gather_threads() -> set[threading.Thread]:
    return {each for each in threading.enumerate() if each.name == "torchrl_dist-gather"}


def test_threads_end_with_their_gatherer_and_start_anew_after_a_fork() -> None:
    rows = np.arange(2**21, dtype=np.uint8).reshape(-1, 2**14)
    slots = np.arange(rows.shape[0])[::-1].copy()
    gatherer, before = Gatherer(3, timeout_s=5), gather_threads()
    assert (gatherer.gather([rows], slots)[0] == rows[::-1]).all()
    started = gather_threads() - before
    assert len(started) == 2
    child = os.fork()
    if not child:
        os._exit(not (gatherer.gather([rows], slots)[0] == rows[::-1]).all())
    assert os.waitpid(child, 0)[1] == 0
    del gatherer
    for thread in started:
        thread.join(5)
        assert not thread.is_alive()


def test_an_error_in_a_thread_is_raised() -> None:
    class Fails:
        shape, dtype = (1, 2**21), np.dtype(np.uint8)

        def take(self, slots: np.ndarray, *_: object) -> None:
            if threading.current_thread() is not threading.main_thread():
                raise MemoryError("no room")

    with pytest.raises(MemoryError, match="no room"):
        Gatherer(2, timeout_s=5).gather([Fails()], np.zeros(4, np.int64))  # type: ignore[list-item]


def test_sampling_large_rows_causes_no_page_fault_per_batch(make_buffer) -> None:
    rb = make_buffer(64, batch_size=32)
    rb.extend(TensorDict({"pixels": torch.zeros(64, 4, 84, 84, dtype=torch.uint8)}, [64]))
    for _ in range(20):
        rb.sample()
    faults = []
    for _ in range(50):
        before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
        rb.sample()
        faults.append(resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before)
    # 220 with fresh memory; a collection of garbage may cause as many, once, after a fork
    assert np.median(faults) < 10, faults
