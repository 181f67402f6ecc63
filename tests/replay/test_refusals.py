"""Impossible arguments and calls that come too early: a helpful error comes at once."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torchrl.data import LazyTensorStorage, ReplayBuffer, TensorDictReplayBuffer
from torchrl.data.replay_buffers import SamplerWithoutReplacement, TensorDictRoundRobinWriter

from tests.replay.conftest import make_rows
from torchrl_dist import (
    RemoteStorage,
    RPCPrioritizedSampler,
    RPCPrioritizedSliceSampler,
    Session,
    SharedCursorWriter,
    SharedMemmapStorage,
    SharedPrioritizedSampler,
    SharedRandomSampler,
    SharedReplayBuffer,
    anneal_beta,
    host_replay,
    replay_buffer,
    session,
)
from torchrl_dist.errors import ConfigurationError

NAN, INF = math.nan, math.inf


def storage_at(folder: Path, **more: Any) -> SharedMemmapStorage:
    return SharedMemmapStorage(16, scratch_dir=folder, job_id="test", **more)


@pytest.mark.parametrize(
    ("exponents", "words"),
    [((value, 0.4, 1e-8), "alpha and beta must be >= 0 and finite") for value in (-1, NAN, INF)]
    + [((0.6, value, 1e-8), "alpha and beta must be >= 0 and finite") for value in (-1, NAN, INF)]
    + [((0.6, 0.4, value), "eps must be above 0 and finite") for value in (0, -1, NAN, INF)],
)
def test_exponents_that_give_no_law(exponents, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        SharedPrioritizedSampler(16, *exponents)


@pytest.mark.parametrize("value", [-1.0, NAN, INF])
def test_an_alpha_that_gives_no_law_changes_nothing(folder: Path, value: float) -> None:
    sampler = SharedPrioritizedSampler(16, 0.6, 0.4)
    with pytest.raises(ConfigurationError, match="alpha must be >= 0 and finite"):
        sampler.alpha = value
    buffer = SharedReplayBuffer(storage=storage_at(folder), sampler=sampler, batch_size=4)
    buffer.extend(make_rows(range(8)))
    with pytest.raises(ConfigurationError, match="alpha must be >= 0 and finite"):
        sampler.alpha = value
    assert sampler.alpha == 0.6 and len(buffer.sample()) == 4
    buffer.storage.close()


def test_impossible_arguments_of_parts_are_refused(folder: Path) -> None:
    theirs = LazyTensorStorage(16)
    refused: list[tuple[str, Callable[[], Any]]] = [
        ("gather_threads must be at least 1", lambda: storage_at(folder, gather_threads=0)),
        ("steps must be at least 1", lambda: anneal_beta(sampler(), 1, steps=0)),
        ("expected a prioritized", lambda: anneal_beta(SamplerWithoutReplacement(), 1, steps=9)),
        ("SharedMemmapStorage", lambda: sampler().attach(theirs)),
        ("SharedMemmapStorage", lambda: SharedRandomSampler().sample(theirs, 4)),
        ("not bound to a storage", lambda: sampler().update_priority(torch.tensor([1]), 1.0)),
        ("SharedCursorWriter", lambda: over(writer=TensorDictRoundRobinWriter())),
        ("checkpointers", lambda: over().storage.register_save_hook(print)),
        ("stores TensorDicts", lambda: over().extend([1, 2])),
        ("stores TensorDicts", lambda: over().add("row")),
        ("no 'index'", lambda: over().update_tensordict_priority(make_rows(range(2)))),
    ]

    def sampler() -> SharedPrioritizedSampler:
        return SharedPrioritizedSampler(16, 0.6, 0.4)

    built: list[SharedReplayBuffer] = []

    def over(**more: Any) -> SharedReplayBuffer:
        storage = storage_at(folder)
        try:
            built.append(SharedReplayBuffer(storage=storage, sampler=sampler(), **more))
        except ConfigurationError:
            storage.close()
            raise
        return built[-1]

    for words, call in refused:
        with pytest.raises(ConfigurationError, match=words):
            call()
    for buffer in built:
        assert len(buffer) == 0
        buffer.storage.close()
    assert not folder.exists()


@pytest.fixture
def alone() -> Iterator[Session]:
    with session() as me:
        yield me


def test_impossible_arguments_of_parts_by_rpc_are_refused(alone: Session, folder: Path) -> None:
    owner = host_replay(alone, 64, scratch_dir=folder, shortcut=False)
    with pytest.raises(ConfigurationError, match="capacity 16, but the buffer of its owner has 64"):
        RPCPrioritizedSampler(16, 0.6, 0.4, owner=owner)
    sampler = RPCPrioritizedSampler(64, 0.6, 0.4, owner=owner)
    with pytest.raises(ConfigurationError, match="not bound to a storage"):
        sampler.update_priority(torch.tensor([1]), 1.0)
    options = {"slice_len": 2, "traj_key": "episode", "max_priority_within_buffer": True}
    sampler = RPCPrioritizedSliceSampler(64, 0.6, 0.4, owner=owner, **options)
    storage = RemoteStorage(owner)
    with pytest.raises(
        ConfigurationError, match="max_priority_within_buffer=True does not work over hosts"
    ):
        TensorDictReplayBuffer(
            storage=storage, sampler=sampler, writer=SharedCursorWriter(), batch_size=4
        )
    storage.close()
    owner.release()
    buffer = replay_buffer(
        alone, capacity=64, batch_size=4, shortcut=False, scratch_dir=folder, name="other"
    )
    assert "alpha=0.6" in repr(buffer.sampler) and "max_size=64" in repr(buffer.storage)
    plain = ReplayBuffer(storage=LazyTensorStorage(16))
    with pytest.raises(ConfigurationError, match="RemoteStorage"):
        buffer.sampler.sample(plain.storage, 4)
    with pytest.raises(RuntimeError, match="no rows|empty"):
        buffer.sample()
    buffer.release()
