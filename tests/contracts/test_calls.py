"""Promises of every peer: this process alone, this process in a job, another process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from tensordict import TensorDict

from torchrl_dist import ConfigurationError, Peer, RemoteError, Session, local_cluster, session


class Counter:
    def __init__(self, start: int) -> None:
        self.value = start

    def add(self, amount: int) -> int:
        self.value += amount
        return self.value

    def fail(self) -> None:
        raise LookupError("nothing here")


@pytest.fixture(params=["alone", "self", "other"])
def peer(request: pytest.FixtureRequest, fork_server) -> Iterator[tuple[Session, Peer]]:
    if request.param == "alone":
        with session() as alone:
            yield alone, alone.me
        return
    with local_cluster({"learner": 1, "collector": 1}, fork_server=fork_server) as job:
        yield job, job.me if request.param == "self" else job.of_role("collector")[0]


def test_a_call_returns_the_result(peer) -> None:
    job, there = peer
    assert job.call(there, lambda a, b: a - b, 5, b=3) == 2


def test_an_object_lives_at_its_peer_and_keeps_its_state(peer) -> None:
    job, there = peer
    counter = job.remote(there, Counter, 10)
    assert [counter.call("add", 1), counter.submit("add", 5).result(20)] == [11, 16]
    assert job.remote(there, Counter, 0).call("add", 1) == 1


def test_tensordicts_arrive_as_they_were_sent(peer) -> None:
    job, there = peer
    sent = TensorDict({"a": torch.arange(6).reshape(3, 2), "b": {"c": torch.ones(3, 0)}}, [3])
    back = job.call(there, lambda td: td, sent)
    assert back.batch_size == sent.batch_size and (back == sent).all()


def test_an_exception_names_peer_and_host_and_shows_where_it_was_raised(peer) -> None:
    job, there = peer
    counter = job.remote(there, Counter, 0)
    for attempt in (lambda: counter.call("fail"), lambda: counter.submit("fail").result(20)):
        with pytest.raises(RemoteError, match="nothing here") as caught:
            attempt()
        assert caught.value.peer == there.name and caught.value.host == there.host
        assert "in fail" in caught.value.remote_traceback
        assert isinstance(caught.value.__cause__, LookupError)
    assert counter.call("add", 1) == 1


@pytest.mark.parametrize("timeout_s", [0.0, -1.0, float("inf")])
def test_a_deadline_that_is_not_positive_and_finite_is_refused(peer, timeout_s: float) -> None:
    job, there = peer
    with pytest.raises(ConfigurationError, match="timeout_s"):
        job.call(there, len, "abc", timeout_s=timeout_s)
