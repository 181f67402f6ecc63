"""One data set per node, and batches of offline and online rows in an exact ratio."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from scipy.stats import chisquare
from tensordict import TensorDict
from torchrl.data import (
    ImmutableDatasetWriter,
    LazyTensorStorage,
    TensorDictReplayBuffer,
    TensorStorage,
)
from torchrl.data.replay_buffers import Sequence
from torchrl.data.replay_buffers.samplers import RandomSampler
from torchrl.envs import DoubleToFloat

from tests.replay.faults import end_of, kill_self, run_forked, start
from torchrl_dist import SharedOfflineToOnlineReplayBuffer
from torchrl_dist.errors import ConfigurationError, DeadlineError, DirectoryError
from torchrl_dist.replay import (
    RateLimiter,
    SharedMemmapStorage,
    SharedPrioritizedSampler,
    SharedReplayBuffer,
    SharedSamplerWithoutReplacement,
)


def rows(first: int, count: int) -> TensorDict:
    return TensorDict(
        {"id": torch.arange(first, first + count), "td_error": torch.ones(count)}, [count]
    )


def storage_in(folder: Path, capacity: int = 100, **options: Any) -> SharedMemmapStorage:
    return SharedMemmapStorage(capacity, scratch_dir=folder, job_id="test", **options)


@pytest.fixture
def pair(folder: Path) -> Iterator[tuple[SharedReplayBuffer, SharedReplayBuffer]]:
    def build(name: str) -> SharedReplayBuffer:
        return SharedReplayBuffer(
            storage=storage_in(folder / name),
            sampler=SharedPrioritizedSampler(100, alpha=1.0, beta=1.0),
            batch_size=4,
        )

    offline, online = build("offline"), build("online")
    offline.storage.fill_once(rows(0, 50))
    yield offline, online
    for buffer in (offline, online):
        buffer.storage.close()


# --- the ratio -----------------------------------------------------------------------------------


@pytest.mark.parametrize("fraction", [0.1, 0.25, 0.5, 0.99])
def test_each_batch_has_the_exact_number_of_offline_rows(pair, fraction: float) -> None:
    offline, online = pair
    rb = SharedOfflineToOnlineReplayBuffer(
        offline, online, offline_fraction=fraction, batch_size=40
    )
    assert rb.sample()["offline"].all()  # there is no online row yet
    rb.extend(rows(1000, 30))
    assert len(rb) == 80 and len(online) == 30
    for step in range(0, 11):
        rb.anneal(step, 10)
        batch = rb.sample()
        wanted = round(fraction * (1 - step / 10) * 40)
        assert batch.shape == (40,) and batch["offline"].sum() == wanted
        assert (batch["offline"] == (batch["id"] < 1000)).all()
        assert batch["offline"][:wanted].all()
    assert rb.sample(7).shape == (7,)


def test_each_buffer_samples_by_its_own_priorities(pair) -> None:
    offline, online = pair
    rb = SharedOfflineToOnlineReplayBuffer(offline, online, batch_size=400)
    rb.extend(rows(1000, 50))
    batch = rb.sample()
    batch["td_error"] = 1.0 + (batch["id"] % 1000) / 10
    for part in (batch[:150], batch[150:]):
        rb.update_tensordict_priority(part)
    while True:  # until every row has been drawn
        batch = rb.sample()
        batch["td_error"] = 1.0 + (batch["id"] % 1000) / 10
        rb.update_tensordict_priority(batch)
        leaves = [buffer.storage.directory.tree.leaves[:50] for buffer in (offline, online)]
        law = 1.0 + np.arange(50) / 10
        if all(np.allclose(each, law, rtol=1e-5) for each in leaves):
            break
    counts = np.zeros((2, 50))
    for _ in range(20):
        batch = rb.sample()
        number = (batch["id"] % 1000).numpy()
        for part, mine in enumerate((batch["offline"], ~batch["offline"])):
            counts[part] += np.bincount(number[mine.numpy()], minlength=50)
        weight = (law[number] / law.min()) ** -1.0
        np.testing.assert_allclose(batch["priority_weight"], weight, rtol=1e-4)
    for each in counts:
        assert each.sum() == 4000 and chisquare(each, law / law.sum() * 4000).pvalue > 1e-6


def test_a_memory_mapped_data_set_of_torchrl_is_the_offline_part(folder: Path, pair) -> None:
    rows(0, 60).exclude("td_error").memmap(str(folder / "data"))
    data = TensorDictReplayBuffer(
        storage=TensorStorage(TensorDict.load_memmap(str(folder / "data"))),
        writer=ImmutableDatasetWriter(),
        sampler=RandomSampler(),
        batch_size=4,
    )
    online = SharedReplayBuffer(
        storage=storage_in(folder / "more"), sampler=SharedPrioritizedSampler(100, 1.0, 1.0)
    )
    rb = SharedOfflineToOnlineReplayBuffer(data, online, batch_size=20)
    rb.extend(rows(1000, 30).exclude("td_error"))
    batch = rb.sample()
    assert batch["offline"].sum() == 10 and (batch["priority_weight"] == 1).all()
    assert (batch["index_generation"] == torch.where(batch["offline"], -1, 1)).all()
    batch["td_error"] = torch.full((20,), 3.0)
    rb.update_tensordict_priority(batch)
    drawn = batch["index"][~batch["offline"]]
    assert np.allclose(online.storage.directory.tree.leaves[drawn], 3.0)
    online.storage.close()


def test_other_keys_and_other_objects_are_refused(pair, folder: Path) -> None:
    offline, online = pair
    rb = SharedOfflineToOnlineReplayBuffer(offline, online, batch_size=8)
    rb.extend(rows(0, 20).set("more", torch.zeros(20)))
    with pytest.raises(ConfigurationError, match=r"only online rows have the keys \['more'\]"):
        rb.sample()
    with pytest.raises(ConfigurationError, match="no entry 'offline'"):
        rb.update_tensordict_priority(online.sample())
    with pytest.raises(ConfigurationError, match="expected a SharedReplayBuffer"):
        SharedOfflineToOnlineReplayBuffer(offline, TensorDictReplayBuffer())
    with pytest.raises(ConfigurationError, match="batch_size="):
        SharedOfflineToOnlineReplayBuffer(offline, online).sample()
    ahead = SharedReplayBuffer(storage=online.storage, prefetch=2, batch_size=4)
    with pytest.raises(ConfigurationError, match="prefetch=..., so it draws"):
        SharedOfflineToOnlineReplayBuffer(offline, ahead)
    passes = SharedReplayBuffer(
        storage=offline.storage, sampler=SharedSamplerWithoutReplacement(), batch_size=40
    )
    mixed = SharedOfflineToOnlineReplayBuffer(passes, online, batch_size=80)
    with pytest.raises(ConfigurationError, match=r"batch of size \[10\], expected \[40\]"):
        for _ in range(2):
            passes.sample(40)
            mixed.sample()
    windows = SharedReplayBuffer(storage=storage_in(folder / "w"), sample_unit=Sequence(2))
    with pytest.raises(ConfigurationError, match="without sample_unit="):
        SharedOfflineToOnlineReplayBuffer(offline, windows)
    windows.storage.close()


def test_other_dtypes_are_refused_unless_a_transform_converts_them(pair) -> None:
    offline, online = pair
    rb = SharedOfflineToOnlineReplayBuffer(offline, online, batch_size=8)
    data = rows(0, 20)
    rb.extend(data.set("td_error", data["td_error"].double()))
    with pytest.raises(ConfigurationError, match="'td_error' is torch.float32 in offline rows"):
        rb.sample()
    online.append_transform(DoubleToFloat(in_keys=["td_error"]))
    assert rb.sample()["td_error"].dtype == torch.float32


# --- one data set per node -----------------------------------------------------------------------


class Slow:
    """A data set whose parts take a while, and which calls a function after some of them."""

    def __init__(self, count: int, after: int = 10**9, then: Any = None) -> None:
        self._count, self._after, self._then = count, after, then

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, part: slice) -> TensorDict:
        time.sleep(0.02)
        self._after -= 1
        if self._after == 0:
            self._then()
        return rows(part.start, part.stop - part.start)


def fill(folder: Path, data: Any) -> None:
    storage = storage_in(folder, 1000)
    storage.fill_once(data, rows_at_once=50)
    assert len(storage) == 1000 and storage.write_count == 1000
    assert storage[:]["id"].tolist() == list(range(1000))
    storage.close()


def test_one_of_many_processes_writes_the_rows(folder: Path) -> None:
    first = storage_in(folder, 1000)  # holds the directory
    processes = [start(fill, folder, Slow(1000)) for _ in range(6)]
    assert [end_of(pid) for pid in processes] == [0] * 6
    assert first.write_count == 1000  # once
    first.fill_once(Slow(1000))
    assert first.write_count == 1000
    first.close()


def test_another_process_takes_over_if_the_first_is_killed(folder: Path) -> None:
    storage = storage_in(folder, 1000)
    victim = start(fill, folder, Slow(1000, 9, kill_self))
    while not storage.write_count:
        time.sleep(0.01)
    storage.fill_once(Slow(1000), rows_at_once=50)
    assert end_of(victim) == -signal.SIGKILL
    assert storage[:]["id"].tolist() == list(range(1000))
    storage.close()


def test_an_error_leaves_an_empty_storage_that_can_be_filled(folder: Path) -> None:
    storage = storage_in(folder, 1000)
    with pytest.raises(ZeroDivisionError):
        storage.fill_once(Slow(1000, 5, lambda: 1 / 0), rows_at_once=50)
    assert len(storage) == 0
    storage.fill_once(rows(0, 1000))
    assert len(storage) == 1000
    with pytest.raises(ConfigurationError, match="this data set has 10"):
        storage.fill_once(rows(0, 10))
    with pytest.raises(ConfigurationError, match="rows_at_once=-1"):
        storage.fill_once(rows(0, 1000), rows_at_once=-1)
    storage.close()


def test_parts_that_are_too_short_are_an_error(folder: Path) -> None:
    class Short(Slow):
        def __getitem__(self, part: slice) -> TensorDict:
            return super().__getitem__(part)[1:]

    storage = storage_in(folder)
    with pytest.raises(ConfigurationError, match="98 rows were written .* but len.data. is 100"):
        storage.fill_once(Short(100), rows_at_once=50)
    assert len(storage) == 0
    source = TensorDictReplayBuffer(storage=LazyTensorStorage(100), batch_size=4)
    source.extend(rows(0, 100))  # which stores an index with each row
    storage.fill_once(source)
    assert storage[:]["id"].tolist() == list(range(100)) and "index" not in storage[:].keys()
    storage.close()


def test_waiting_for_a_stopped_process_ends_at_the_deadline(folder: Path) -> None:
    storage = storage_in(folder, 1000, timeout_s=1.0)
    victim = start(fill, folder, Slow(1000, 5, lambda: signal.raise_signal(signal.SIGSTOP)))
    while psutil.Process(victim).status() != psutil.STATUS_STOPPED:
        time.sleep(0.01)
    try:
        with pytest.raises(DeadlineError, match=f"process {victim}, which fills"):
            storage.fill_once(rows(0, 1000))
    finally:
        psutil.Process(victim).send_signal(signal.SIGCONT)
    assert end_of(victim) == 0
    storage.close()


def test_folders_with_other_rows_limiters_and_little_room_are_refused(folder: Path) -> None:
    storage = storage_in(folder / "1")
    with pytest.raises(ConfigurationError, match="has max_size=100"):
        storage.fill_once(rows(0, 101))
    SharedReplayBuffer(storage=storage).extend(rows(0, 3))
    with pytest.raises(ConfigurationError, match="rows that fill_once did not write"):
        storage.fill_once(rows(0, 50))
    limited = storage_in(folder / "2", limiter=RateLimiter(min_size_to_sample=2))
    with pytest.raises(ConfigurationError, match="no limiter"):
        limited.fill_once(rows(0, 50))
    for each in (storage, limited):
        each.close()
    with pytest.raises(DirectoryError, match="was closed in this process"):
        storage.fill_once(rows(0, 50))


def test_a_later_job_finds_the_rows_of_a_kept_folder(folder: Path) -> None:
    def earlier() -> None:
        storage = SharedMemmapStorage(100, scratch_dir=folder, job_id="1", keep=True)
        storage.fill_once(rows(0, 100))
        storage.close()

    assert run_forked(earlier) == 0
    later = SharedMemmapStorage(100, scratch_dir=folder, job_id="2", resume=True)
    later.fill_once(Slow(100, 1, lambda: 1 / 0))
    assert later[:]["id"].tolist() == list(range(100))
    later.close()
