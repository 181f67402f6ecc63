"""The law of a sharded batch, checked against the law of one buffer that holds every row."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy.stats import chi2, chi2_contingency, chisquare, kstest

from tests.replay import test_link
from tests.replay.conftest import make_rows
from tests.replay.test_link import HeldHost, batches_of, connect, storage_of
from torchrl_dist import RPCPrioritizedSampler
from torchrl_dist.errors import ConfigurationError
from torchrl_dist.replay.hosts.client import ReplayClient
from torchrl_dist.replay.hosts.messages import Answer
from torchrl_dist.replay.law.shard_law import (
    KnownMasses,
    choose_shards,
    correct_shards,
    global_index,
    largest_priority,
    number_rows,
    shares,
    spare_rows,
    split_index,
)
from torchrl_dist.replay.parts.drawn import Drawn

CAPACITY = 8  # rows per shard in these tests
HOST_ROWS = test_link.CAPACITY  # of those with hosts
ALARM = 1e-7  # of a true law, where threads make each run another


class Shards:
    """Tables of leaves in place of shards, and a client that samples as the module describes."""

    def __init__(self, leaves: list[np.ndarray], seed: int = 0) -> None:
        self.leaves = leaves
        self.random = np.random.default_rng(seed)
        self.known = KnownMasses(len(leaves))
        self.second_rounds = 0

    @property
    def masses(self) -> np.ndarray:
        return np.array([leaves.sum() for leaves in self.leaves])

    def law(self) -> np.ndarray:
        everything = np.concatenate(self.leaves)
        return everything / everything.sum()

    def reply(self, shard: int, count: int) -> np.ndarray:
        leaves = self.leaves[shard]
        if not count:
            return np.empty(0, dtype=np.int64)
        return self.random.choice(leaves.size, count, p=leaves / leaves.sum())

    def sample(self, batch_size: int, *, believed: np.ndarray | None = None) -> np.ndarray:
        """Return global indices of one batch. ``believed`` replaces the known masses."""
        if believed is not None:
            self.known.masses = np.asarray(believed, dtype=float)
        if not self.known.has_mass:
            self.known.learn(self.masses)
        request = self.known.plan(batch_size, self.random.random)
        masses = self.masses
        asked = np.where(masses > 0, request.rows, 0)
        replies = [self.reply(shard, count) for shard, count in enumerate(asked)]
        self.known.learn(masses, request)
        shards = request.correct(masses, self.random.random)
        row, missing = number_rows(shards, asked)
        if missing.any():
            self.second_rounds += 1
            replies = [
                np.append(rows, self.reply(shard, missing[shard]))
                for shard, rows in enumerate(replies)
            ]
            row, missing = number_rows(shards, asked + missing)
        assert not missing.any() and (row >= 0).all()
        slots = np.array([replies[shard][k] for shard, k in zip(shards, row, strict=True)])
        return global_index(shards, slots, CAPACITY)


def tables(scales: list[float], seed: int = 1) -> list[np.ndarray]:
    random = np.random.default_rng(seed)
    return [scale * random.exponential(size=CAPACITY) for scale in scales]


def assert_follows(counts: np.ndarray, law: np.ndarray, alarm: float = 1e-4) -> None:
    assert counts[law == 0].sum() == 0
    expected = law * counts.sum()
    rare = expected < 5  # together one cell: the statistic needs a few counts in each
    cells = [np.append(values[~rare], values[rare].sum()) for values in (counts, expected)]
    present = cells[1] > 0
    if present.sum() > 1:
        assert chisquare(cells[0][present], cells[1][present]).pvalue > alarm


CASES = {
    "one shard": ([1.0], [7.0]),
    "two equal": ([1.0] * 2, [1.0] * 2),
    "two, stale ten times": ([1.0] * 2, [1000.0, 100.0]),
    "two, very unequal": ([1.0, 500.0], [3.0, 40.0]),
    "four equal": ([1.0] * 4, [2.0, 1.0, 1.0, 2.0]),
    "four, one was empty": ([1.0, 2.0, 3.0, 4.0], [1.0, 0.0, 3.0, 4.0]),
    "four, one is lost": ([1.0, 2.0, 0.0, 4.0], [1.0, 2.0, 3.0, 4.0]),
    "eight, unequal and stale": (
        [1.0, 1e3, 2.0, 0.0, 5.0, 1e-3, 10.0, 300.0],
        [10.0, 1e2, 0.2, 3.0, 5.0, 1.0, 10.0, 0.0],
    ),
    "eight, first batch": ([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0], None),
}


@pytest.mark.parametrize("name", CASES)
def test_a_batch_has_the_law_of_the_masses_in_the_replies(name: str) -> None:
    scales, believed = CASES[name]
    shards = Shards(tables(scales))
    counts = np.zeros(len(scales) * CAPACITY)
    for _ in range(300):
        if believed is None:
            shards.known = KnownMasses(len(scales))
        drawn = shards.sample(256, believed=None if believed is None else np.array(believed))
        counts += np.bincount(drawn, minlength=counts.size)
    assert_follows(counts, shards.law())


def test_a_uniform_buffer_is_the_case_of_the_length_as_mass() -> None:
    lengths = [8, 3, 0, 5]
    shards = Shards([np.ones(length) for length in lengths])
    counts = np.zeros((4, CAPACITY))
    for _ in range(200):
        drawn = shards.sample(256, believed=np.array([2, 8, 1, 0], dtype=np.int64))
        counts += np.bincount(drawn, minlength=counts.size).reshape(counts.shape)
    published = np.arange(CAPACITY) < np.array(lengths)[:, None]
    assert_follows(counts.ravel(), (published / 16).ravel())


@pytest.mark.parametrize("believed", [[1.0, 1.0], [30.0, 1.0], [1.0, 30.0]])
def test_two_draws_of_one_batch_are_independent_in_shard_and_row(believed: list[float]) -> None:
    """Over many batches, the table of (row of draw a, row of draw b) is the product of the laws."""
    shards = Shards([np.array([4.0, 1.0]), np.array([1.0, 2.0, 3.0])])
    batches = np.stack([shards.sample(3, believed=np.array(believed)) for _ in range(3_000)])
    # rows of second rounds are part of the test; they are rare if the masses are known well
    assert shards.second_rounds > 0 or max(believed) == 1
    code = np.full(2 * CAPACITY, -1)
    code[[0, 1, 8, 9, 10]] = np.arange(5)
    rows = code[batches]
    law = np.array([4, 1, 1, 2, 3]) / 11
    for a, b in ((0, 1), (0, 2), (1, 2)):
        table = np.zeros((5, 5))
        np.add.at(table, (rows[:, a], rows[:, b]), 1)
        assert chi2_contingency(table).pvalue > 1e-4
        assert_follows(table.ravel(), np.outer(law, law).ravel())


def test_whether_a_draw_kept_its_shard_says_nothing_about_its_row() -> None:
    shards = Shards([np.array([4.0, 1.0]), np.array([1.0, 3.0])])
    believed = np.array([1.0, 20.0])
    table = np.zeros((2, 2))  # (kept, row) of the draws that end in shard 0
    for _ in range(1500):
        shards.known.masses = believed
        request = shards.known.plan(16, shards.random.random)
        final = request.correct(shards.masses, shards.random.random)
        row, missing = number_rows(final, request.rows)
        reply = shards.reply(0, int(request.rows[0] + missing[0]))
        row, _ = number_rows(final, request.rows + missing)
        mine = final == 0
        kept = (request.shards[mine] == 0).astype(int)
        np.add.at(table, (kept, reply[row[mine]]), 1)
    assert table.min() > 100
    assert chi2_contingency(table).pvalue > 1e-4


@pytest.mark.parametrize("shard_count", [2, 8])
@pytest.mark.parametrize("step", [0.0, 0.0005, 0.02], ids=["still", "slow", "fast"])
def test_a_second_round_is_rare_while_masses_drift(shard_count: int, step: float) -> None:
    """Each mass changes at random, by the fraction ``step`` per batch. Spare rows suffice."""
    random = np.random.default_rng(shard_count)
    masses, known = np.full(shard_count, 1e5), KnownMasses(shard_count)
    known.learn(masses)
    batches, second_rounds, asked = 1500, 0, 0
    for _ in range(batches):
        request = known.plan(256, random.random)
        asked += request.rows.sum()
        masses = masses * np.exp(step * random.standard_normal(shard_count))
        known.learn(masses, request)
        _, missing = number_rows(request.correct(masses, random.random), request.rows)
        second_rounds += missing.any()
    assert second_rounds / batches < 0.01
    assert asked / (batches * 256) < 1 + 0.02 * shard_count + 4 * step * shard_count


def test_a_jump_of_the_masses_costs_one_second_round_and_fades() -> None:
    random, known = np.random.default_rng(0), KnownMasses(2)
    known.learn(np.array([1000.0, 100.0]))
    second_rounds, asked = [], []
    for _ in range(150):
        request = known.plan(256, random.random)
        asked.append(request.rows.sum() - 256)
        masses = np.array([100.0, 100.0])
        known.learn(masses, request)
        _, missing = number_rows(request.correct(masses, random.random), request.rows)
        second_rounds.append(bool(missing.any()))
    assert second_rounds[0] and not any(second_rounds[1:])
    assert asked[1] > 50 and asked[-1] <= 6


@pytest.mark.parametrize("expected", [0.001, 0.05, 0.5, 1.0, 10.0, 100.0])
def test_spare_rows_are_too_few_in_one_batch_of_a_thousand_at_most(expected: float) -> None:
    random = np.random.default_rng(0)
    needed = random.binomial(256, expected / 256, size=1_000_000)
    assert (needed > spare_rows(np.array([expected]))[0]).mean() < 1.1e-3


masses_of = st.integers(1, 8).flatmap(
    lambda shards: st.tuples(
        *[
            arrays(np.float64, shards, elements=st.floats(0, 1e300, allow_subnormal=True)).filter(
                lambda masses: masses.max() > 0
            )
        ]
        * 2
    )
)


@settings(deadline=None, max_examples=300)
@given(masses_of, st.integers(0, 300), st.integers(0, 2**32 - 1))
def test_any_masses_give_a_whole_batch_from_shards_that_hold_rows(masses, batch_size, seed) -> None:
    old, new = masses
    random = np.random.default_rng(seed)
    known = KnownMasses(old.size)
    known.learn(old)
    request = known.plan(batch_size, random.random)
    assert (request.rows <= batch_size).all() and request.rows.sum() >= batch_size
    assert (old[request.shards] > 0).all()
    known.learn(new, request)
    final = request.correct(new, random.random)
    assert final.dtype == np.int64 and (new[final] > 0).all()
    before, after = shares(old), shares(new)
    changed = final != request.shards
    slack = 1e-15
    assert (after <= before + slack)[request.shards[changed]].all()
    assert (after >= before - slack)[final[changed]].all()
    received = np.minimum(request.rows, random.integers(0, batch_size + 1, old.size))
    row, missing = number_rows(final, received)
    assert missing.sum() == (row < 0).sum()
    taken = list(zip(final[row >= 0].tolist(), row[row >= 0].tolist(), strict=True))
    assert len(set(taken)) == len(taken)  # no row serves two draws
    assert (row < received[final]).all()
    known.plan(batch_size, random.random)


@settings(deadline=None, max_examples=50)
@given(masses_of)
def test_the_corrected_shares_are_the_new_ones_by_arithmetic(masses) -> None:
    """Without random numbers: count every combination of two quantiles from a fine grid."""
    old, new = masses
    grid = (np.arange(400) + 0.5) / 400
    start = np.repeat(choose_shards(old, 400, lambda n: grid), 400)
    answers = iter([np.tile(grid, 400)])

    def uniforms(count: int) -> np.ndarray:
        # the refused ones: any spread over [0, 1) that does not depend on where they come from
        return next(answers, (np.arange(count) * 0.6180339887498949) % 1.0)

    final = correct_shards(start, old, new, uniforms)
    reached = np.bincount(final, minlength=new.size) / final.size
    assert abs(reached - shares(new)).max() < 0.01


def test_the_last_quantile_meets_a_shard_that_holds_rows() -> None:
    masses = np.array([0.0, 0.1, 0.2, 0.7, 0.0])
    last = np.nextafter(1.0, 0.0)
    ends = choose_shards(masses, 2, lambda n: np.array([0.0, last]))
    assert ends.tolist() == [1, 3]


def test_lengths_beyond_2_31_and_sums_beyond_the_largest_float_are_shares() -> None:
    assert shares(np.array([2**40, 3 * 2**40])).tolist() == [0.25, 0.75]
    assert shares(np.array([1.5e308, 1.5e308])).tolist() == [0.5, 0.5]
    assert shares(np.array([5e-324, 0.0])).tolist() == [1.0, 0.0]


@pytest.mark.parametrize("masses", [[1.0, -1.0], [np.nan, 1.0], [np.inf, 1.0]])
def test_masses_that_cannot_be_are_refused(masses: list[float]) -> None:
    with pytest.raises(ConfigurationError, match="finite and >= 0"):
        shares(np.array(masses))


def test_no_rows_anywhere_is_an_error_and_recovers() -> None:
    known = KnownMasses(2)
    assert not known.has_mass
    with pytest.raises(ConfigurationError, match="all 2 shards have mass 0"):
        known.plan(4, np.random.default_rng(0).random)
    known.learn(np.array([0.0, 3.0]))
    request = known.plan(4, np.random.default_rng(0).random)
    known.learn(np.zeros(2), request)  # both were lost while they were asked
    with pytest.raises(ConfigurationError, match="no rows to draw"):
        request.correct(np.zeros(2), np.random.default_rng(0).random)
    assert not known.has_mass
    with pytest.raises(ConfigurationError, match="shard_count"):
        KnownMasses(0)


def test_the_largest_priority_travels_past_shards_that_have_none() -> None:
    assert np.isnan(largest_priority(np.array([np.nan, np.nan]), float("nan")))
    assert largest_priority(np.array([np.nan, 2.0]), 3.0) == 3.0
    assert largest_priority(np.array([np.nan, 4.0]), float("nan")) == 4.0


@given(st.integers(1, 2**40), st.integers(0, 2**20), st.data())
def test_a_global_index_names_shard_and_slot(capacity: int, shard: int, data) -> None:
    slot = np.array([data.draw(st.integers(0, capacity - 1))])
    index = global_index(shard, slot, capacity)
    assert index.dtype == np.int64 and index[0] == shard * capacity + slot[0]
    assert [int(part[0]) for part in split_index(index, capacity)] == [shard, slot[0]]
    assert split_index(np.array([-1]), capacity)[0].tolist() == [-1]


# ---- through clients and hosts that are busy at the same time


class ThreadedHost(HeldHost):
    """Serves each call in its own thread, and keeps the leaves that each draw used."""

    def __init__(self, folder: Path, number: int, threads: ThreadPoolExecutor) -> None:
        super().__init__(folder, number)
        self.host.use_priorities(1.0, 1e-8)
        assert self.host._prioritized is not None
        self.host._prioritized._random = np.random.default_rng(number)
        self._threads = threads
        tree = self.host.storage.directory.tree
        sample = tree.sample
        self.leaves_of_mass: dict[float, np.ndarray] = {}

        def sample_and_note(uniforms: np.ndarray) -> tuple:  # under the directory's lock
            found = sample(uniforms)
            self.leaves_of_mass[found[-1]] = tree.leaves.copy()
            return found

        tree.sample = sample_and_note  # type: ignore[method-assign]

    def submit(self, method: str, *args: Any, timeout_s: float) -> Future:
        return self._threads.submit(getattr(self.host, method), *args)


MakeHosts = Callable[[int], list[ThreadedHost]]


@pytest.fixture
def make_hosts(folder: Path) -> Iterator[MakeHosts]:
    """Make hosts full of rows."""
    hosts: list[ThreadedHost] = []
    with ThreadPoolExecutor(16) as threads:

        def make(count: int) -> list[ThreadedHost]:
            for number in range(count):
                hosts.append(ThreadedHost(folder / str(number), number, threads))
                hosts[-1].host.storage.append(make_rows(range(HOST_ROWS)))
            return hosts

        yield make
    for each in hosts:
        each.host.close()


def keep_changing(client: ReplayClient, end: threading.Event) -> None:
    """Set priorities of a whole shard, whose scale varies up to tenfold, and write rows to all."""
    random = np.random.default_rng(1)
    rows = make_rows(range(3))
    while not end.is_set():
        shard = random.integers(len(client.links))
        scale = 10 ** random.uniform(-0.5, 0.5)
        index = torch.arange(HOST_ROWS) + shard * HOST_ROWS
        client.set_priorities(index, None, scale * random.exponential(size=HOST_ROWS))
        client.write(rows, scale * random.exponential(size=3))
        client.flush()


def place_in_law(
    drawn: np.ndarray, law: np.ndarray, before: np.ndarray, spread: np.ndarray
) -> np.ndarray:
    """The quantile of each draw, spread evenly over its own probability: uniform in [0, 1) if
    ``law`` is its law.

    What can be drawn comes in the order in which its share rose since the law ``before``, so that
    draws which stay behind lie low in every batch, whichever shards rise."""
    order = np.argsort(law - before)
    start = np.empty(law.size)
    start[order] = np.cumsum(law[order]) - law[order]
    return start[drawn] + spread * law[drawn]


def place_in_shard(
    batch: Drawn, rounds: list[list[Answer]], hosts: list[ThreadedHost], spread: np.ndarray
) -> np.ndarray:
    """As :func:`place_in_law`, of each row among those of its shard in the order of their leaves,
    which are those that the shard had when it drew the row for that reply."""
    shard, slot = split_index(batch.index.numpy(), HOST_ROWS)
    place = np.empty(shard.size)
    for number, host in enumerate(hosts):
        mine = np.flatnonzero(shard == number)  # the k-th of them is the k-th row of the replies
        for answer in [answers[number] for answers in rounds if answers[number]]:
            count = 0 if answer.rows is None else answer.rows.units
            part, mine = mine[:count], mine[count:]
            if part.size:
                law = host.leaves_of_mass[answer.state.mass] / answer.state.mass
                place[part] = place_in_law(slot[part], law, np.zeros_like(law), spread[part])
        assert not mine.size
    return place


@pytest.mark.timeout(60)
def test_each_batch_has_the_law_of_its_replies_while_others_change_the_shards(
    make_hosts: MakeHosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard_count = 4
    hosts, random = make_hosts(shard_count), np.random.default_rng(0)
    client, other = connect(hosts), connect(hosts)
    source, batch_size = batches_of(client), 64
    rounds: list[list[Answer]] = []
    take_in = client.answers

    def take_in_and_note(futures: list[Any]) -> list[Answer]:
        rounds.append(take_in(futures))
        return rounds[-1]

    monkeypatch.setattr(client, "answers", take_in_and_note)
    masses, counts, second_rounds = [], [], 0
    places: dict[str, list[np.ndarray]] = {"by replies": [], "by those before": [], "rows": []}
    end = threading.Event()
    changes = threading.Thread(target=keep_changing, args=(other, end))
    changes.start()
    try:
        for _ in range(600):
            rounds.clear()
            batch = source.next(batch_size)
            if not masses:  # the first draw asks for the masses alone before
                masses.append(np.array([answer.state.mass for answer in rounds.pop(0)]))
            masses.append(np.array([answer.state.mass for answer in rounds[0]]))
            second_rounds += len(rounds) > 1
            before, law = shares(masses[-2]), shares(masses[-1])
            shard = split_index(batch.index.numpy(), HOST_ROWS)[0]
            counts.append(np.bincount(shard, minlength=shard_count))
            spread = random.random((2, batch_size))
            places["by replies"].append(place_in_law(shard, law, before, spread[0]))
            places["by those before"].append(place_in_law(shard, before, law, spread[0]))
            places["rows"].append(place_in_shard(batch, rounds, hosts, spread[1]))
    finally:
        end.set()
        changes.join()
        client.close()
        other.close()
    assert (np.max(masses, 0) > 2 * np.min(masses, 0)).all()
    law = np.stack([shares(each) for each in masses[1:]])
    excess = (np.stack(counts) - batch_size * law).sum(0)
    covariance = batch_size * (np.diag(law.sum(0)) - law.T @ law)
    statistic = excess @ np.linalg.pinv(covariance) @ excess
    assert chi2.sf(statistic, shard_count - 1) > ALARM
    alarm = {name: kstest(np.concatenate(each), "uniform").pvalue for name, each in places.items()}
    assert alarm["by replies"] > ALARM and alarm["rows"] > ALARM
    assert alarm["by those before"] < ALARM  # else the masses moved too little to tell
    assert second_rounds > 0  # their rows are part of what was tested


def excess_of(batches: np.ndarray, law: np.ndarray) -> np.ndarray:
    """How much oftener than expected each class is in each batch, [batches, classes]; the squares
    of a batch add up to Pearson's statistic."""
    expected = law * batches.shape[1]
    counts = np.stack([np.bincount(batch, minlength=law.size) for batch in batches])
    return (counts - expected) / np.sqrt(expected)


@pytest.mark.timeout(60)
def test_clients_that_sample_at_the_same_time_with_equal_seeds_draw_independently(
    make_hosts: MakeHosts,
) -> None:
    """The law changes between two values, so that every batch is corrected."""
    hosts = make_hosts(4)
    clients, batches, batch_size = 3, 300, 64
    spread = np.random.default_rng(0).uniform(0.5, 1.5, (4, HOST_ROWS))
    laws = [(spread * np.array(scales)[:, None]).ravel() for scales in ([1, 2, 4, 8], [3, 9, 2, 1])]
    laws = [law / law.sum() for law in laws]
    other, steps = connect(hosts), itertools.count()

    def change_the_law() -> None:
        other.set_priorities(torch.arange(4 * HOST_ROWS), None, laws[next(steps) % 2])
        other.flush()

    together = threading.Barrier(clients, change_the_law, timeout=20)

    def sample(_: int) -> np.ndarray:
        client = connect(hosts)
        storage = storage_of(client)
        storage.owner.capacity, storage.owner.direct = storage.max_size, lambda: None
        torch.manual_seed(0)
        np.random.seed(0)
        sampler = RPCPrioritizedSampler(storage.max_size, 1.0, 0.5, owner=storage.owner, prefetch=0)
        drawn = np.empty((batches, batch_size), dtype=np.int64)
        for batch in range(batches):
            together.wait()
            torch.manual_seed(batch)
            np.random.seed(batch)
            drawn[batch] = sampler.sample(storage, batch_size)[0]
        client.close()
        return drawn

    with ThreadPoolExecutor(clients) as threads:
        drawn = np.stack(list(threads.map(sample, range(clients))))
    other.close()

    half = HOST_ROWS // 2
    for which, law in enumerate(laws):
        mine = drawn[:, which::2]
        assert_follows(np.bincount(mine.ravel(), minlength=law.size), law, ALARM)
        coarse = law.reshape(-1, half).sum(1)  # of the halves of the shards
        excess = [excess_of(each // half, coarse) for each in mine]
        for a, b in itertools.combinations(range(clients), 2):
            pairs = coarse.size * (mine[a] // half) + mine[b] // half
            table = np.bincount(pairs.ravel(), minlength=coarse.size**2)
            assert_follows(table, np.outer(coarse, coarse).ravel(), ALARM)
            # the same of all draws of a batch with all of the other's
            statistic = ((excess[a].T @ excess[b]) ** 2).sum() / len(mine[a])
            assert chi2.sf(statistic, (coarse.size - 1) ** 2) > ALARM
