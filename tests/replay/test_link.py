"""Links of a client to hosts whose answers the test holds back."""

from __future__ import annotations

import contextlib
import math
import signal
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, InvalidStateError
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from tests.replay.conftest import make_rows
from tests.replay.faults import wait_until
from torchrl_dist import (
    ConfigurationError,
    DeadlineError,
    PeerLostError,
    RemoteError,
    RemoteStorage,
    SharedMemmapStorage,
)
from torchrl_dist.replay.hosts.batches import BatchSource
from torchrl_dist.replay.hosts.client import ReplayClient
from torchrl_dist.replay.hosts.host import ReplayHost
from torchrl_dist.replay.hosts.local_link import LocalLink
from torchrl_dist.replay.hosts.messages import (
    PRIORITIZED,
    UNIFORM,
    CountSamples,
    Invoke,
    Reply,
    Request,
    SetPriorities,
    Write,
)
from torchrl_dist.replay.hosts.remote_link import RemoteLink
from torchrl_dist.replay.hosts.totals_gate import TotalsGate
from torchrl_dist.replay.law.limiter import RateLimiter
from torchrl_dist.replay.node.tables import Word
from torchrl_dist.replay.row.rows import spec_of
from torchrl_dist.runtime import Peer, wire

pytestmark = pytest.mark.timeout(60)
CAPACITY = 32


class HeldHost:
    """Stands for a ``Remote`` of a host. It answers calls at once, but later while ``held``."""

    def __init__(self, folder: Path, number: int = 0, limiter: RateLimiter | None = None) -> None:
        self.peer = Peer("owner", number, number, "here")
        storage = SharedMemmapStorage(CAPACITY, scratch_dir=folder, job_id="test", limiter=limiter)
        self.host = ReplayHost(storage)
        self.held = False
        self.lost: Exception | None = None
        self.served = 0
        self._lock = threading.Lock()
        self._waiting: list[tuple[Future, str, tuple]] = []

    def submit(self, method: str, *args: Any, timeout_s: float) -> Future:
        future: Future = Future()
        with self._lock:
            self._waiting.append((future, method, args))
        if timeout_s < math.inf:
            threading.Timer(timeout_s, self._give_up, (future,)).start()
        if not self.held:
            self.release()
        return future

    def release(self) -> None:
        self.held = False
        while True:
            with self._lock:
                if not self._waiting:
                    return
                future, method, args = self._waiting.pop(0)
                self.served += 1
            if self.lost is not None:
                future.set_exception(self.lost)
            else:
                result = getattr(self.host, method)(*args)
                with contextlib.suppress(InvalidStateError):  # its deadline has passed
                    future.set_result(result)

    def _give_up(self, future: Future) -> None:
        with contextlib.suppress(InvalidStateError):  # it was answered
            future.set_exception(DeadlineError(f"{self.peer} did not answer"))

    def fall_silent(self, link: RemoteLink) -> None:
        """Let the host be silent for longer than a deadline."""
        self.held = True
        link.ask(None, None)
        self.come()
        link._since -= link._timeout_s  # type: ignore[operator]

    def come(self) -> None:
        """Wait for a call to arrive. The call is held."""
        wait_until(lambda: bool(self._waiting))

    def lose(self) -> None:
        self.lost = PeerLostError(f"{self.peer} is lost")
        self.release()


@pytest.fixture
def make_hosts(folder: Path) -> Iterator[Callable[..., list[HeldHost]]]:
    made: list[HeldHost] = []

    def make(count: int, limiter: RateLimiter | None = None) -> list[HeldHost]:
        made.extend(HeldHost(folder / str(number), number, limiter) for number in range(count))
        for held in made:
            held.host.use_priorities(1.0, 1e-8)
        return made

    yield make
    for held in made:
        held.host.close()


@pytest.fixture
def hosts(make_hosts) -> list[HeldHost]:
    return make_hosts(2)


_CONNECTED: list[ReplayClient] = []


@pytest.fixture(autouse=True)
def clients_end() -> Iterator[None]:
    """End the threads that send for a test's clients."""
    yield
    for client in _CONNECTED:
        for link in client.links:
            link._host.lose()  # type: ignore[attr-defined]
        with warnings.catch_warnings(), contextlib.suppress(PeerLostError):
            warnings.simplefilter("ignore")
            client.close()
    _CONNECTED.clear()


def connect(hosts: list[HeldHost], min_shards: int = 1, timeout_s: float = 5.0) -> ReplayClient:
    links = [
        RemoteLink(held, timeout_s=timeout_s, max_queued_bytes=2**20, merged_rows=CAPACITY // 8)  # type: ignore[arg-type]
        for held in hosts
    ]
    client = ReplayClient(
        links,
        CAPACITY,
        own_shard=None,
        first_shard=0,
        min_shards=min_shards,
        timeout_s=timeout_s,
    )
    if len(links) == 1:  # so that writes ask nothing, while the host holds its answers
        client._spec = spec_of(make_rows(range(1)))
    _CONNECTED.append(client)
    return client


def storage_of(client: ReplayClient) -> RemoteStorage:
    storage = object.__new__(RemoteStorage)
    storage._set_up(CAPACITY * len(client.links))
    storage.client = client
    storage.owner = SimpleNamespace(shard_capacity=CAPACITY)  # type: ignore[assignment]
    storage.gate = None
    storage._samplers, storage.emptied = weakref.WeakSet(), 0
    return storage


def batches_of(client: ReplayClient, prefetch: int = 0) -> BatchSource:
    return BatchSource(
        client,
        law=lambda size: (PRIORITIZED, size),
        prefetch=prefetch,
        batches_per_call=1,
        uniforms=np.random.default_rng(0).random,
    )


def test_a_draw_keeps_its_kind_when_others_ask_with_it(hosts) -> None:
    client = connect(hosts[:1])
    client.write(make_rows(range(2)), np.array([1.0, 3.0]))
    client.write(make_rows(range(2)), np.array([0.0, 0.0]))
    client.flush()
    (link,) = client.links
    hosts[0].held = True
    link.ask(None, None)
    length = link.ask(0, None)  # as len() of another thread
    uniform, prioritized = link.ask(256, UNIFORM), link.ask(256, PRIORITIZED)
    hosts[0].release()
    assert length.result(5).state.length == 4
    assert set(prioritized.result(5).rows.leaf.tolist()) >= {1.00000001, 3.00000001}
    assert prioritized.result(5).state.mass == pytest.approx(4)
    assert (uniform.result(5).rows.leaf == 1).all() and uniform.result(5).state.mass == 4


def test_too_few_shards_are_an_error_at_every_call(hosts) -> None:
    client = connect(hosts, min_shards=2)
    source = batches_of(client)
    for _ in hosts:
        client.write(make_rows(range(4)), None)
    assert len(source.next(8).index) == 8
    hosts[1].lose()
    for _ in range(3):
        with pytest.raises(PeerLostError, match="owner1"):
            source.next(8)
    with pytest.raises(PeerLostError, match="owner1"):
        client.write(make_rows(range(4)), None)


def test_a_shard_that_is_lost_while_rows_travel_is_reported(hosts) -> None:
    client = connect(hosts)
    client.agreed_spec(make_rows(range(1)))
    hosts[0].held = True
    client.write(make_rows(range(4)), None)  # to the first
    hosts[0].come()
    hosts[0].lose()
    with pytest.warns(UserWarning, match="replay shard 0 .*1 operations of this process were not"):
        client.write(make_rows(range(4)), None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        client.write(make_rows(range(4)), None)
        assert len(batches_of(client).next(8).index) == 8


@pytest.mark.parametrize("how", ["lost", "silent"])
def test_rows_for_a_shard_that_goes_just_then_reach_another(hosts, monkeypatch, how: str) -> None:
    client = connect(hosts, timeout_s=0.2)
    client.agreed_spec(make_rows(range(1)))
    hosts[0].held = True
    client.links[0].put(SetPriorities(np.array([0]), None, np.array([1.0])), size=2**20)
    choose = client._shard_to_write

    def choose_one_that_goes() -> int:
        shard = choose()
        if shard == 0:
            hosts[0].lose() if how == "lost" else hosts[0].fall_silent(client.links[0])
        return shard

    monkeypatch.setattr(client, "_shard_to_write", choose_one_that_goes)
    with pytest.warns(UserWarning, match="shard 0 .* is left out"):
        index, _ = client.write(make_rows(range(4)), None)
    wait_until(lambda: bool((index >= CAPACITY).all()))
    hosts[0].release()


@pytest.mark.parametrize("when", ["while they are sent", "with the rows on their way"])
def test_priorities_for_a_shard_that_is_lost_just_then_are_dropped(
    hosts, monkeypatch, when: str
) -> None:
    client = connect(hosts)
    client.agreed_spec(make_rows(range(1)))
    if when == "with the rows on their way":
        hosts[0].held = True
        index, _ = client.write(make_rows(range(4)), None)
        hosts[0].come()
        hosts[0].lose()
    else:
        index, _ = client.write(make_rows(range(4)), None)
        client.write(make_rows(range(4)), None)
        client.flush()
        answers_now = client.answers_now

        def answers_for_the_last_time(shard: int) -> bool:
            answer = answers_now(shard)
            if shard == 0 and hosts[0].lost is None:
                hosts[0].lose()
                client.links[0].ask(None, None)
                wait_until(lambda: client.links[0].problem is not None)
            return answer

        monkeypatch.setattr(client, "answers_now", answers_for_the_last_time)
    with pytest.warns(UserWarning, match="shard 0 .* is left out"):
        client.set_priorities(index, None, np.ones(4))
    client.set_priorities(index, None, np.ones(4))


def test_batches_drawn_ahead_do_not_wait_for_a_slow_host(hosts) -> None:
    client = connect(hosts[:1])
    client.write(make_rows(range(4)), None)
    source = batches_of(client, prefetch=2)
    source.next(8)
    client.flush()  # after the draws ahead
    hosts[0].held = True
    assert len(source.next(8).index) == 8
    hosts[0].release()


@pytest.mark.parametrize("when", ["with the rows", "while the rows are under way"])
def test_priorities_of_many_writes_on_their_way_all_arrive(hosts, monkeypatch, when: str) -> None:
    monkeypatch.setattr(f"{RemoteLink.__module__}._MOST_OPERATIONS", 5)  # several messages
    client = connect(hosts[:1])
    serve = hosts[0].host.serve
    hosts[0].held = True
    client.links[0].ask(None, None)
    indices = [client.write(make_rows([number]), None)[0] for number in range(12)]

    def set_priorities() -> None:
        for number, index in enumerate(indices):
            client.set_priorities(index, None, np.array([2.0 + number]))

    def serve_late(request: Request) -> Reply:
        if any(isinstance(operation, Write) for operation in request.operations):
            set_priorities()
        return serve(request)

    if when == "with the rows":
        set_priorities()
    else:
        monkeypatch.setattr(hosts[0].host, "serve", serve_late)
    hosts[0].release()
    client.flush()
    leaves = hosts[0].host.storage.directory.tree.leaves
    assert leaves[:12].tolist() == pytest.approx([2.0 + number for number in range(12)])


def test_a_limited_sample_from_shards_that_are_all_lost_says_so(hosts) -> None:
    client = connect(hosts)
    for held, link in zip(hosts, client.links, strict=True):
        held.lose()
        link.ask(None, None)
    gate = TotalsGate(client, RateLimiter(8))
    with pytest.raises(PeerLostError, match="owner"):
        gate.sample(8, batches_of(client), storage_of(client))


def test_a_process_that_comes_after_a_shard_was_lost_waits_for_nothing_of_it(make_hosts) -> None:
    limiter = RateLimiter(8, samples_per_insert=4.0, error_buffer=64.0)
    hosts = make_hosts(2, limiter)

    def gate_of(client: ReplayClient) -> TotalsGate:
        for link in client.links:
            link.limited = True
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            client.states()
        return TotalsGate(client, limiter)

    early = connect(hosts)
    gate = gate_of(early)
    for _ in hosts:
        early.write(make_rows(range(32)), None)
    early.links[0].put(CountSamples(256))
    early.flush()
    early.states()
    hosts[1].lose()
    late = connect(hosts)
    for client in (early, late):
        client.links[1].ask(None, None)
    assert limiter.difference(gate.counts()) == 0  # with those of the lost shard
    gate = gate_of(late)
    assert limiter.difference(gate.counts()) == limiter.range[0]
    late.write(make_rows(range(8)), None)
    late.flush()
    late.states()
    assert limiter.difference(gate.counts()) == limiter.range[0] + 32


def test_draws_that_come_after_the_deadline_are_returned(make_hosts) -> None:
    limiter = RateLimiter(1, max_times_sampled=1)
    hosts = make_hosts(2, limiter)
    client = connect(hosts, timeout_s=0.05)
    client.counts_draws = True
    for link in client.links:
        link.limited = True
        client.write(make_rows(range(16)), None)
    source, used = batches_of(client), 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the second is left out, and answers again
        for late in (False, True, False):
            hosts[1].held = late
            used += len(source.next(6).index)
            hosts[1].release()
        source.drop()
        client.flush()
    left = [held.host.storage.directory.words[Word.AVAILABLE] for held in hosts]
    assert sum(left) == 32 - used


def test_a_shard_of_this_node_that_was_late_once_counts_again(hosts, monkeypatch) -> None:
    links = [
        LocalLink(hosts[0].host, "this node"),
        RemoteLink(hosts[1], timeout_s=5.0, max_queued_bytes=2**20, merged_rows=4),
    ]
    client = ReplayClient(
        links, CAPACITY, own_shard=None, first_shard=0, min_shards=1, timeout_s=5.0
    )

    def be_late(*_: object) -> None:
        raise DeadlineError("the lock was held")

    with monkeypatch.context() as broken, pytest.warns(UserWarning, match="shard 0 .* left out"):
        broken.setattr(hosts[0].host, "draw", be_late)
        assert len(client.states()) == 1
    with pytest.warns(UserWarning, match="shard 0 .* answers again"):
        assert len(client.states()) == len(client.states()) == 2
    hosts[1].lose()
    with pytest.warns(UserWarning, match="shard 1 .* left out"):
        assert len(client.states()) == len(client.states()) == 1


@pytest.mark.parametrize("how", ["lost", "emptied"])
def test_a_batch_is_whole_without_a_shard_that_goes_before_its_second_round(
    hosts, monkeypatch, how: str
) -> None:
    client = connect(hosts)
    for _ in hosts:
        client.write(make_rows(range(4)), None)
    source = batches_of(client)
    source.next(8)
    client.set_priorities(torch.arange(CAPACITY, CAPACITY + 4), None, np.full(4, 1e6))
    client.flush()
    submit, rounds = hosts[1].submit, []

    def submit_or_go(*args: Any, timeout_s: float) -> Future:
        rounds.append(args)
        if len(rounds) == 2:
            hosts[1].lose() if how == "lost" else hosts[1].host.storage.empty()
        return submit(*args, timeout_s=timeout_s)

    monkeypatch.setattr(hosts[1], "submit", submit_or_go)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        index = source.next(64).index
    assert len(index) == 64 and len(rounds) == 2
    of_second = int((index >= CAPACITY).sum())
    assert 16 < of_second < 64  # those of the first round; the others are the first shard's
    reports = [str(each.message) for each in caught]
    assert [("shard 1" in report) for report in reports] == [True] * (how == "lost"), reports


def test_rows_of_a_second_round_weigh_by_the_state_in_which_their_shard_was_chosen(
    hosts, monkeypatch
) -> None:
    client = connect(hosts)
    for _ in hosts:
        client.write(make_rows(range(4)), np.full(4, 1.0))
    source = batches_of(client)
    source.next(8)
    swinging = torch.arange(CAPACITY, CAPACITY + 4)
    client.set_priorities(swinging, None, np.full(4, 1e3))
    client.flush()
    submit, rounds = hosts[1].submit, []

    def submit_and_change(*args: Any, timeout_s: float) -> Future:
        rounds.append(args)
        if len(rounds) == 2:  # each row falls by another factor
            slots, fallen = np.arange(4), np.array([1.0, 2.0, 4.0, 8.0])
            hosts[1].host.apply(SetPriorities(slots, None, fallen))
        return submit(*args, timeout_s=timeout_s)

    monkeypatch.setattr(hosts[1], "submit", submit_and_change)
    batch = source.next(4096)
    assert len(rounds) == 2
    leaf, weighed = torch.from_numpy(batch.leaf), torch.from_numpy(batch.weighed)
    late = (batch.index >= CAPACITY) & (leaf < 1e3)
    assert late.sum() > 1500
    assert weighed[~late].equal(leaf[~late])
    # a row of leaf p was drawn with the probability 4000 / 4004 * p / 15
    expected = leaf[late] * (4e3 / 15.0)
    assert torch.allclose(weighed[late], expected) and batch.minimum <= weighed.min()
    # so the mean of a value, weighed, is its mean over the rows of both shards
    value = torch.where(batch.index < CAPACITY, 0.0, batch.index - CAPACITY + 1.0)
    estimate = (value / weighed * 4004 / 8).mean().item()
    assert estimate == pytest.approx(10 / 8, rel=0.1)


def test_batches_asked_for_while_the_buffer_was_empty_are_forgotten(hosts) -> None:
    for number in (1, 2):
        client = connect(hosts[:number])
        source = batches_of(client, prefetch=2)
        hosts[0].host.storage.empty()
        with pytest.raises(RuntimeError, match="sample"):
            source.next(8)
        client.write(make_rows(range(4)), None)
        client.flush()
        assert len(source.next(8).index) == 8
        client.close()


def test_closing_reports_the_last_failure(hosts) -> None:
    client = connect(hosts[:1])
    client.write(make_rows(range(4)), None)
    client.flush()
    client.links[0].put(SetPriorities(np.array([99]), None, np.array([1.0])), urgent=False)
    with pytest.warns(UserWarning, match="there is no slot 99"):
        client.close()


def test_priorities_of_queued_rows_are_copies(hosts) -> None:
    client = connect(hosts[:1])
    hosts[0].held = True
    client.links[0].ask(None, None)
    priority = np.array([1.0, 3.0])
    client.write(make_rows(range(2)), priority)
    priority[:] = 100.0
    hosts[0].release()
    client.flush()
    leaves = hosts[0].host.storage.directory.tree.leaves
    assert leaves[:2].tolist() == pytest.approx([1, 3])
    index, generation, priority = torch.tensor([0, 1]), torch.tensor([1, 1]), np.array([5.0, 7.0])
    client.set_priorities(index, generation, priority)  # it waits for company
    for given in (index, generation, priority):
        given[:] = 0
    client.flush()
    assert leaves[:2].tolist() == pytest.approx([5, 7])


def test_queued_rows_are_found_by_a_view_of_all_their_indices_and_by_no_other(hosts) -> None:
    client = connect(hosts[:1])
    hosts[0].held = True
    client.links[0].ask(None, None)
    index, _ = client.write(make_rows(range(2)), np.array([1.0, 1.0]))
    client.set_priorities(index.view(1, 2).view(2), None, np.array([2.0, 3.0]))
    for other in (index[:1], index[:1].expand(2)):
        client.set_priorities(other, None, np.full(other.numel(), 9.0))
    hosts[0].release()
    client.flush()
    leaves = hosts[0].host.storage.directory.tree.leaves
    assert leaves[:2].tolist() == pytest.approx([2, 3])


def test_rows_that_found_no_room_leave_nothing_behind(hosts) -> None:
    client = connect(hosts[:1], timeout_s=0.05)
    hosts[0].held = True
    client.links[0].put(SetPriorities(np.array([0]), None, np.array([1.0])), size=2**20)
    for _ in range(3):
        with pytest.raises(DeadlineError, match="no room"):
            client.write(make_rows(range(2)), None)
    assert not client._pending
    hosts[0].release()
    client.flush()


def test_a_shard_that_was_silent_gets_alpha_priorities_and_empty_before_it_draws(hosts) -> None:
    for held in hosts:
        held.host._prioritized = None
    client = connect(hosts, timeout_s=0.5)
    client.write(make_rows(range(4)), np.array([4.0] * 4))
    client.write(make_rows(range(4)), np.array([9.0] * 4))
    client.flush()
    hosts[0].held = True
    hosts[0].fall_silent(client.links[0])
    with pytest.warns(UserWarning, match="replay shard 0 .* is left out"):
        client.invoke_everywhere("use_priorities", 1.0, 1e-8)
    client.invoke_everywhere("set_alpha", 0.5)
    with pytest.raises(DeadlineError, match="2 operations .* shard 0 .* are not applied yet"):
        client.flush()  # of the other
    assert hosts[1].host.storage.directory.tree.leaves[:4].tolist() == pytest.approx([3.0] * 4)
    hosts[0].release()
    with pytest.warns(UserWarning, match="shard 0 .* answers again"):
        client.flush()
    answers = client.answers(client.ask([8, 8], PRIORITIZED))
    assert [answer.rows.leaf[0].item() for answer in answers] == pytest.approx([2.0, 3.0])
    hosts[0].held = True
    hosts[0].fall_silent(client.links[0])
    with pytest.warns(UserWarning, match="left out"):
        client.invoke_everywhere("empty", True, 1)
    hosts[0].release()
    assert [answer.state.length for answer in client.answers(client.ask([0, 0], None))] == [0, 0]


def test_several_shards_that_hang_cost_one_deadline_together(make_hosts) -> None:
    hosts = make_hosts(5)
    timeout_s = 0.4
    index = torch.arange(5) * CAPACITY
    for attempt in (
        lambda client: client.states(),
        lambda client: client.flush(),
        lambda client: storage_of(client).empty(),
        lambda client: storage_of(client).generations_of(index),
        lambda client: storage_of(client).get(index),
        lambda client: batches_of(client).next(8),
        lambda client: client.close(),
    ):
        client = connect(hosts, timeout_s=timeout_s)
        for _ in hosts:
            client.write(make_rows(range(1)), None)
        client.flush()
        for held in hosts[1:]:
            held.held = True
        begin = time.monotonic()
        with warnings.catch_warnings(), contextlib.suppress(DeadlineError):
            warnings.simplefilter("ignore")
            attempt(client)
        assert time.monotonic() - begin < 3 * timeout_s  # not one after the other
        for held in hosts:
            held.release()


def test_indices_below_0_count_from_the_last_row_of_the_last_shard(hosts) -> None:
    client = connect(hosts)
    client.write(make_rows(range(5)), None)
    client.write(make_rows(range(10, 13)), None)
    client.flush()
    storage = storage_of(client)
    found = storage._slots_named(torch.tensor([-1, -3, -4, -8, 2]))
    assert found.tolist() == [CAPACITY + 2, CAPACITY, 4, 0, 2]
    with pytest.raises(IndexError, match="before the first of the 8 slots"):
        storage._slots_named(-9)


def test_hosts_that_all_hang_are_an_error_at_the_deadline(hosts) -> None:
    client = connect(hosts, timeout_s=0.1)
    for held in hosts:
        held.held = True
    with pytest.raises(DeadlineError, match="owner[01] .* within 0.1 s"):
        client.flush()
    for held in hosts:
        held.release()


@pytest.mark.parametrize("method", ["exchange", "the call itself"])
@pytest.mark.parametrize("question", ["counters", "generations_of"])
def test_questions_to_those_that_answer_outlive_a_loss_just_then(
    hosts, monkeypatch, question: str, method: str
) -> None:
    client = connect(hosts)
    for _ in hosts:
        client.write(make_rows(range(4)), None)
    client.flush()
    submit = hosts[1].submit

    def lost_at(name: str, *args: Any, timeout_s: float) -> Future:
        if (name == question) == (method == "the call itself"):
            hosts[1].lost = PeerLostError(f"{hosts[1].peer} is lost")
        return submit(name, *args, timeout_s=timeout_s)

    monkeypatch.setattr(hosts[1], "submit", lost_at)
    storage = storage_of(client)
    with pytest.warns(UserWarning, match="shard 1 .* left out"):
        if question == "counters":
            found = storage.counters
            assert found == {name: found[name] for name in hosts[0].host.counters()}
        else:
            index = torch.tensor([0, CAPACITY])
            assert storage.generations_of(index).tolist() == [1, -1]
    hosts[0].lose()
    with pytest.raises(PeerLostError, match="owner"):
        for _ in range(3):
            storage.counters  # noqa: B018


def test_a_draw_and_a_largest_priority_that_both_fail_are_both_reported(hosts, monkeypatch) -> None:
    client = connect(hosts[:1])
    source = batches_of(client)
    client.write(make_rows(range(2)), None)
    client.flush()
    client.links[0].max_priority = 2.0
    with monkeypatch.context() as broken:
        broken.setattr(ReplayHost, "draw", lambda *_, **__: 1 / 0)
        broken.setattr(ReplayHost, "raise_max_priority", lambda *_: {}["largest"])
        with pytest.raises(RemoteError, match="ZeroDivisionError"):
            source.next(8)
    with pytest.raises(RemoteError, match="KeyError: 'largest'"):
        source.next(8)
    assert len(source.next(8).index) == 8


@pytest.mark.parametrize("own", [False, True], ids=["by RPC", "in this process"])
def test_only_a_priority_that_a_host_applied_is_what_new_rows_get(hosts, own: bool) -> None:
    if own:
        links = [LocalLink(held.host, str(held.peer)) for held in hosts]
        options = {"own_shard": 0, "first_shard": 0, "min_shards": 1, "timeout_s": 5.0}
        client = ReplayClient(links, CAPACITY, **options)  # type: ignore[arg-type]
    else:
        client = connect(hosts)

    def leaf_of_a_new_row() -> float:  # in the second shard
        client.own_shard = 1
        slot = client.write(make_rows(range(1)), None)[0]
        client.flush()
        return hosts[1].host.storage.directory.tree.leaves[int(slot) - CAPACITY]

    client.own_shard = 0
    index, generation = client.write(make_rows(range(4)), None)
    client.flush()
    client.set_priorities(index, generation - 1, np.full(4, 9.0))  # too late
    client.flush()
    assert leaf_of_a_new_row() == pytest.approx(1)
    with pytest.raises((RemoteError, ConfigurationError), match="finite numbers"):
        client.own_shard = 0
        client.write(make_rows(range(2)), np.array([9.0, -1.0]))
        client.flush()
    assert leaf_of_a_new_row() == pytest.approx(1)
    client.set_priorities(index, generation, np.full(4, 7.0))
    client.flush()
    assert leaf_of_a_new_row() == pytest.approx(7)


# ---- one row spec


def other_rows(count: int) -> TensorDict:
    return TensorDict({"other": torch.zeros(count)}, [count])


def test_first_writers_of_different_rows_agree_before_the_first_row(hosts) -> None:
    clients = [connect(hosts) for _ in range(8)]
    errors: list[Exception] = []

    def write(number: int) -> None:
        try:
            for _ in hosts:
                clients[number].write(make_rows(range(2)) if number % 2 else other_rows(2), None)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    for client in clients:
        client.flush()
    assert [type(error) for error in errors] == [ConfigurationError] * 4  # at the call, all of one
    assert all("does not match the rows" in str(error) for error in errors)
    specs = [held.host.storage.directory.rows for held in hosts]
    assert specs[0] == specs[1] is not None
    assert [held.host.storage.write_count for held in hosts] == [8, 8]
    for held in hosts:
        held.host.use_priorities(1.0, 1e-8)
    assert len(batches_of(clients[0]).next(32).index) == 32


def test_the_others_agree_without_a_shard_that_is_lost_or_silent(hosts) -> None:
    client, other = connect(hosts), connect(hosts)
    hosts[0].lose()
    with pytest.warns(UserWarning, match="shard 0 .* left out"):
        client.write(make_rows(range(2)), None)
    with pytest.warns(UserWarning), pytest.raises(ConfigurationError, match="unknown 'other'"):
        other.write(other_rows(2), None)
    hosts[1].lose()
    with pytest.warns(UserWarning), pytest.raises(PeerLostError, match="owner"):
        connect(hosts).write(make_rows(range(2)), None)


def test_writes_at_slots_agree_on_the_rows_too(hosts) -> None:
    first, second = (storage_of(connect(hosts)) for _ in range(2))
    first.write_at(torch.tensor([0]), make_rows(range(1)))
    with pytest.raises(ConfigurationError, match="missing 'id'"):
        second.write_at(torch.tensor([CAPACITY]), other_rows(1))
    assert hosts[1].host.storage.directory.length == 0


# ---- in order, once, and by progress


def ids_of(held: HeldHost) -> list[int]:
    return held.host.storage[:]["id"].tolist()


def test_operations_under_way_or_queued_when_a_client_closed_are_applied_once(hosts) -> None:
    client = connect(hosts[:1], timeout_s=0.2)
    client.agreed_spec(make_rows(range(1)))
    hosts[0].held = True
    client.write(make_rows(range(3)), None)
    hosts[0].come()
    client.write(make_rows(range(3, 6)), None)
    with pytest.warns(UserWarning, match="owner0 .* did not answer within 0.2 s"):
        client.close()
    assert hosts[0].served == 0 and len(hosts[0]._waiting) == 1  # no second copy is on its way
    hosts[0].release()
    (link,) = client.links
    wait_until(lambda: not link._queue and link._under_way is None)
    assert ids_of(hosts[0]) == list(range(6)) and hosts[0].host.storage.write_count == 6
    wait_until(lambda: not link._sender.is_alive())


def test_many_small_operations_are_sent_in_bounded_requests_of_few(hosts) -> None:
    client = connect(hosts[:1])
    link, requests = client.links[0], []
    serve = hosts[0].host.serve
    hosts[0].host.serve = lambda request: requests.append(request) or serve(request)
    hosts[0].held = True
    link.ask(None, None)
    hosts[0].come()
    link._max_queued_bytes = 2**30
    for number in range(1500):
        client.write(make_rows(range(number, number + 1)), None)
    assert link._bytes > 1500 * 2**10  # what an operation costs by itself counts
    hosts[0].release()
    client.flush()
    assert hosts[0].host.storage.write_count == 1500
    assert sorted(ids_of(hosts[0])) == list(range(1500 - CAPACITY, 1500))
    sizes = [len(request.operations) for request in requests]
    assert max(sizes) == 512 // (CAPACITY // 8) and len(sizes) <= 16, sizes


def test_a_checkpoint_goes_over_a_connection_that_needs_many_deadlines(
    hosts, tmp_path, monkeypatch
) -> None:
    client = connect(hosts[:1], timeout_s=0.8)
    client._spec = None
    storage, host = storage_of(client), hosts[0].host
    client.write(make_rows(range(24), width=2**13), None)  # 3 MiB
    client.flush()
    line = threading.Lock()

    def slow(call: Callable[..., Any]) -> Callable[..., Any]:
        def over_the_line(*args: Any) -> Any:
            result = call(*args)
            moved = args[-1].arrays if result is None else result[1]
            with line:
                time.sleep(sum(part.nbytes for part in moved) / (3 * 2**20))
            return result

        return over_the_line

    monkeypatch.setattr(host, "reaches", lambda _: False, raising=False)
    monkeypatch.setattr(host, "save_chunk", slow(host.save_chunk))
    monkeypatch.setattr(host, "restore_rows", slow(host.restore_rows))
    monkeypatch.setattr(host, "read", slow(host.read))
    begin = time.monotonic()
    storage.dumps(tmp_path)
    host.storage.empty()
    storage.loads(tmp_path)
    assert time.monotonic() - begin > 2 * 0.8
    assert ids_of(hosts[0]) == list(range(24))
    assert storage[torch.arange(24).flip(0)]["id"].tolist() == list(range(23, -1, -1))


def test_a_host_that_goes_on_answering_is_not_late(hosts) -> None:
    """Every request takes most of a deadline, and all together take many deadlines."""
    client = connect(hosts[:1], timeout_s=0.8)
    link = client.links[0]
    serve = hosts[0].host.serve

    def slow(request: Request) -> Reply:
        time.sleep(0.25)
        return serve(request)

    client.agreed_spec(make_rows(range(1)))
    hosts[0].host.serve = slow
    link._most = 2
    begin = time.monotonic()
    for number in range(5):
        client.write(make_rows(range(number, number + 1)), np.array([1.0 + number]))
        client.set_priorities(torch.tensor([number]), None, np.array([2.0]))  # nothing to merge
    client.flush()
    assert time.monotonic() - begin > 2 * 0.8
    assert ids_of(hosts[0]) == list(range(5)) and link._most == 1


def test_waiters_for_room_take_turns_and_have_a_deadline_by_progress(hosts) -> None:
    client = connect(hosts[:1], timeout_s=1.0)
    link = client.links[0]
    hosts[0].held = True
    link.put(Invoke("empty", (False, 1)), size=2**20)  # all the room
    hosts[0].come()
    turns: list[int] = []

    def write(number: int) -> None:
        link.put(Invoke("empty", (False, 1)), size=2**20)
        turns.append(number)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for number, thread in enumerate(threads):
        thread.start()
        wait_until(lambda n=number: len(link._line) == n + 1)
    for number in range(4):
        time.sleep(0.5)  # together more than the deadline
        hosts[0].release()
        hosts[0].held = True
        wait_until(lambda n=number: len(turns) == n + 1)
        hosts[0].come()
    assert turns == list(range(4))
    hosts[0].release()


def test_a_caller_that_gave_up_waiting_leaves_no_draw_behind(hosts) -> None:
    client = connect(hosts[:1], timeout_s=0.1)
    source = batches_of(client, prefetch=2)
    client.write(make_rows(range(4)), None)
    client.flush()
    hosts[0].held = True
    client.links[0].ask(None, None)
    hosts[0].come()
    for _ in range(3):
        with pytest.raises(DeadlineError, match="owner0"):
            source.next(8)
    asked = [each for each in client.links[0]._queue if not each.future.cancelled()]
    assert not asked
    hosts[0].release()
    assert len(source.next(8).index) == 8


def test_an_exception_of_a_signal_handler_leaves_the_link_whole(hosts) -> None:
    """At any point: calls that returned were applied once, in order, and the link still works."""

    class Struck(Exception):
        pass

    def strike(*_: object) -> None:
        raise Struck

    client = connect(hosts[:1])
    client.agreed_spec(make_rows(range(1)))
    applied: list[int] = []
    write = hosts[0].host._write

    def note(operation: Write, known: Any) -> Any:
        slots, generations = write(operation, known)
        applied.extend(hosts[0].host.storage.get(torch.from_numpy(slots))["id"].tolist())
        return slots, generations

    hosts[0].host._write = note
    before = signal.signal(signal.SIGALRM, strike)
    returned, strikes, number = [], 0, -1
    rng = np.random.default_rng(0)
    try:
        # A faster machine is struck less often
        while (number < 600 or strikes <= 50) and number < 20_000:
            number += 1
            data = make_rows(range(number, number + 1))
            try:
                signal.setitimer(signal.ITIMER_REAL, float(rng.uniform(1e-5, 1e-3)))
                client.write(data, None)
                returned.append(number)
                if number % 3 == 0:
                    client.links[0].ask(2, PRIORITIZED)
                if number % 7 == 0:
                    client.flush()
                signal.setitimer(signal.ITIMER_REAL, 0)
            except Exception:  # tensordict makes another one of it
                strikes += 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    client.flush()
    assert strikes > 50
    assert applied == sorted(set(applied)) and set(returned) <= set(applied)
    assert client.links[0]._bytes == 0


def test_only_the_call_that_cannot_be_sent_fails(hosts, monkeypatch) -> None:
    client = connect(hosts[:1])
    (link,) = client.links
    submit = hosts[0].submit

    def pack_and_submit(method: str, *args: Any, timeout_s: float) -> Future:
        wire.dumps(args)
        return submit(method, *args, timeout_s=timeout_s)

    monkeypatch.setattr(hosts[0], "submit", pack_and_submit)
    for _ in range(2):
        with pytest.raises(TypeError, match="on meta cannot be sent"):
            client.order(0, "read", torch.zeros(2, device="meta"), size=2**20)
    client.write(make_rows(range(4)), None)
    client.flush()  # the caller has the error already
    assert hosts[0].host.storage.write_count == 4 and link.problem is None
    assert link._bytes == 0


def test_a_later_call_reports_an_operation_that_cannot_be_sent(hosts) -> None:
    client = connect(hosts[:1])
    (link,) = client.links

    def fail() -> Invoke:
        raise TypeError("cannot be made")

    link.put(fail)
    wait_until(lambda: not link.fine)
    with pytest.raises(TypeError, match="cannot be made"):
        client.flush()
    client.flush()
    assert link.problem is None


def test_the_end_of_the_session_is_a_loss(hosts, monkeypatch) -> None:
    def refuse(*_: Any, timeout_s: float) -> Future:
        raise ConfigurationError("This session is closed.")

    client = connect(hosts[:1])
    monkeypatch.setattr(hosts[0], "submit", refuse)
    for _ in range(2):
        with pytest.raises(PeerLostError, match="session is closed"):
            client.flush()
    assert isinstance(client.links[0].problem, PeerLostError)


def test_a_cancelled_order_makes_room_for_a_waiter(hosts) -> None:
    client = connect(hosts[:1], timeout_s=20.0)
    (link,) = client.links
    link._sender = threading.current_thread()  # nothing is sent but by this test
    link.order("counters", size=2**20).cancel()
    waiter = threading.Thread(
        target=link.put, args=(Invoke("set_alpha", (1.0,)),), kwargs={"size": 2**20}
    )
    waiter.start()
    wait_until(lambda: bool(link._line))
    link._pump()
    waiter.join(5)
    assert not waiter.is_alive()
    link._sender = None
    client.flush()  # by a sender of its own, for which the client's end would wait
