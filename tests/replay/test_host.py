"""A host of a replay directory, called directly: the order of calls, and the reply to a draw."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.replay.conftest import folder, make_rows  # noqa: F401
from torchrl_dist import DeadlineError, RateLimiter, SharedMemmapStorage
from torchrl_dist.replay.hosts.host import ReplayHost
from torchrl_dist.replay.hosts.merging import merged, parts_of
from torchrl_dist.replay.hosts.messages import (
    CountSamples,
    Invoke,
    Law,
    Operation,
    Request,
    SetPriorities,
    Write,
)
from torchrl_dist.replay.node.tables import Word
from torchrl_dist.replay.row import rows
from torchrl_dist.replay.row.packing import pack, spec_from_text, unpack
from torchrl_dist.runtime import wire
from torchrl_dist.tensors import array_of

CAPACITY = 32
EPS = 1e-8


@pytest.fixture
def host(folder: Path) -> Iterator[ReplayHost]:  # noqa: F811
    host = ReplayHost(SharedMemmapStorage(CAPACITY, scratch_dir=folder, job_id="test"))
    host.use_priorities(1.0, EPS)
    yield host
    host.close()


def write(values: range, number: int = 1, priority: list[float] | None = None) -> Write:
    data = make_rows(values)
    spec = rows.spec_of(data)
    packed = pack(rows.matching_columns(data, spec), copy=True)
    raw = None if priority is None else np.array(priority, dtype=np.float64)
    return Write(spec.text, len(values), packed, raw, ((number, len(values)),))


def priorities(slots: list[int], values: list[float], generation: int | None = 1) -> SetPriorities:
    stamps = None if generation is None else np.full(len(slots), generation)
    return SetPriorities(np.array(slots), stamps, np.array(values, dtype=np.float64))


def content(host: ReplayHost) -> dict[int, float]:
    """Return the leaf of each published row, by id."""
    stored = host.storage[:]
    leaves = host.storage.directory.tree.leaves
    return dict(zip(stored["id"].tolist(), leaves[: len(stored)].tolist(), strict=True))


def test_operations_are_applied_in_order_and_the_draw_comes_last(host) -> None:
    operations = (
        write(range(4), 1),
        priorities([0, 1, 2, 3], [1, 2, 3, 4]),
        write(range(10, 12), 2, [7, 9]),
        priorities([3], [5]),
    )
    reply = host.serve(Request(operations, draw=64))
    assert content(host) == pytest.approx({0: 1, 1: 2, 2: 3, 3: 5, 10: 7, 11: 9})
    assert [slot.tolist() for slot, _ in reply.written] == [[0, 1, 2, 3], [4, 5]]
    assert reply.state.length == 6 and reply.state.write_count == 6
    assert reply.state.mass == pytest.approx(27) and reply.state.minimum == pytest.approx(1)
    assert reply.state.max_priority == 9 and not reply.failures
    slot, generation, leaf = reply.rows.index, reply.rows.generation, reply.rows.leaf
    assert (generation == 1).all() and len(slot) == 64
    spec = spec_from_text(reply.spec)
    drawn = rows.build(reply.rows.tensors, spec, (64,))
    of_slot = torch.tensor([0, 1, 2, 3, 10, 11])
    assert (drawn["id"] == of_slot[slot]).all()
    assert (drawn["next", "obs"][:, 0] == of_slot[slot] + 0.5).all()
    assert leaf.tolist() == pytest.approx([content(host)[i] for i in drawn["id"].tolist()])


def test_an_operation_that_fails_is_named_and_the_others_are_applied(host) -> None:
    wrong = make_rows(range(2)).exclude("obs")
    spec = rows.spec_of(wrong)
    packed = pack(rows.matching_columns(wrong, spec), copy=True)
    operations = (
        write(range(2), 1),
        Write(spec.text, 2, packed, None, ((2, 2),)),
        priorities([0], [-1.0]),
        write(range(5, 6), 3),
    )
    reply = host.serve(Request(operations, draw=4))
    assert sorted(content(host)) == [0, 1, 5] and reply.count == 4
    assert [slot.tolist() for slot, _ in reply.written] == [[0, 1], [-1, -1], [2]]
    assert "missing 'obs'" in reply.failures[0].message
    assert "finite numbers >= 0" in reply.failures[1].message and "update" in (
        reply.failures[1].trace
    )
    assert host.serve(Request((), draw=4)).failures == ()


def test_a_draw_that_fails_late_is_answered_and_the_client_goes_on(host, monkeypatch) -> None:
    with monkeypatch.context() as broken:
        broken.setattr(ReplayHost, "_pack", lambda *_: 1 / 0)
        reply = host.serve(Request((write(range(3)),), draw=4))
    assert reply.state is None and "ZeroDivisionError" in reply.draw_failure.message
    assert not reply.failures
    assert len(reply.written) == 1
    assert host.serve(Request(draw=4)).count == 4
    assert host.storage.write_count == 3


def test_a_larger_priority_of_another_shard_is_what_new_rows_get(host) -> None:
    host.serve(Request((write(range(1)),)))
    host.serve(Request((write(range(1, 2), 2),), max_priority=7.0))
    host.serve(Request((write(range(2, 3), 3),), max_priority=2.0))
    assert content(host) == pytest.approx({0: 1, 1: 7, 2: 7})


def test_after_an_emptying_that_failed_largest_priorities_travel_again(host, monkeypatch) -> None:
    def fail(**_: object) -> None:
        raise DeadlineError("the lock was held")

    with monkeypatch.context() as broken:
        broken.setattr(host.storage, "empty", fail)
        reply = host.serve(Request((Invoke("empty", (True, 5)),), draw=0))
    assert "the lock was held" in reply.failures[0].message and reply.state.era >= 0
    host.serve(Request((write(range(1)),), max_priority=7.0, era=reply.state.era))
    assert content(host) == pytest.approx({0: 7})


# ---- merging


@st.composite
def _operations(draw: st.DrawFn) -> list[Operation]:
    found: list[Operation] = []
    for number in range(draw(st.integers(1, 12))):
        kind = draw(st.sampled_from(["write"] * 2 + ["priorities"] * 2 + ["alpha", "count"]))
        if kind == "write":
            count = draw(st.integers(1, 3))
            raw = draw(st.sampled_from([None, [0.5] * count, [7.0] * count]))
            found.append(write(range(100 * number, 100 * number + count), number, raw))
        elif kind == "priorities":
            slots = draw(st.lists(st.integers(-1, 5), min_size=1, max_size=3))
            values = [draw(st.sampled_from([1.0, 3.0, 9.0])) for _ in slots]
            found.append(priorities(slots, values, draw(st.sampled_from([1, None]))))
        else:
            found.append(Invoke("set_alpha", (2.0,)) if kind == "alpha" else CountSamples(number))
    return found


@settings(max_examples=40, deadline=None)
@given(operations=_operations())
def test_merged_operations_do_what_they_would_do_one_by_one(tmp_path_factory, operations) -> None:
    few = merged(operations, 4)
    assert sum(count for _, count in few) == len(operations)
    found = []
    for request in operations, [operation for operation, _ in few]:
        folder = tmp_path_factory.mktemp("host") / "rows"  # noqa: F811
        host = ReplayHost(SharedMemmapStorage(CAPACITY, scratch_dir=folder, job_id="test"))
        host.use_priorities(1.5, EPS)
        reply = host.serve(Request(tuple(request), draw=0))
        slots = np.concatenate([slot for slot, _ in reply.written] or [np.empty(0)])
        rows_ = content(host) if reply.state.length else {}
        state = reply.state._replace(mass=round(reply.state.mass, 6))
        found.append((rows_, slots.tolist(), reply.failures, str(state), host.counters()))
        host.close()
    assert found[0] == found[1]
    parts = [part for operation, _ in few for part in parts_of(operation)]
    assert [type(each) for each in parts if not isinstance(each, CountSamples)] == [
        type(each) for each in operations if not isinstance(each, CountSamples)
    ]


def test_only_the_wrong_one_of_merged_operations_is_refused(host) -> None:
    host.serve(Request((Invoke("set_alpha", (2.0,)),)))
    raw = [1.0, 1e150, 3.0]  # the second one's square is too large
    writes = [write(range(n, n + 1), n, [raw[n]]) for n in range(3)]
    ((operation, count),) = merged(writes, 8)
    reply = host.serve(Request((operation,)))
    assert count == 3 and sorted(content(host)) == [0, 2]
    slots = reply.written[0][0]
    assert (slots < 0).tolist() == [False, True, False]
    assert [failure.position for failure in reply.failures] == [0]
    updates = [priorities([int(slots[n])], [raw[(n + 1) % 3]], None) for n in (0, 2)]
    ((operation, count),) = merged(updates, 8)
    reply = host.serve(Request((operation,)))
    assert count == 2 and len(reply.failures) == 1
    assert host.storage.directory.tree.leaves[slots[2]] == pytest.approx(1)


def test_many_small_operations_become_few(host) -> None:
    writes = [write(range(number, number + 1), number) for number in range(20)]
    few = merged(writes, 8)
    assert [each.count for each, _ in few] == [8, 8, 4] and [n for _, n in few] == [8, 8, 4]
    host.serve(Request(tuple(operation for operation, _ in few)))
    assert sorted(content(host)) == list(range(20))
    updates = [priorities([number], [2.0]) for number in (0, 1, 2, 1, 3)]
    assert [n for _, n in merged(updates, 8)] == [3, 2]  # a row's priorities stay apart


# ---- packing

DTYPES = [torch.uint8, torch.bool, torch.float16, torch.bfloat16, torch.float32, torch.complex128]


@settings(max_examples=60, deadline=None)
@given(
    columns=st.lists(
        st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 5), max_size=2)), max_size=5
    ),
    count=st.sampled_from([1, 3, 1000, 5000]),
)
def test_packed_rows_come_back_as_they_were(columns, count: int) -> None:
    tensors = [
        torch.randint(0, 2, (count, *shape)).to(dtype) if dtype != torch.complex128
        else torch.rand(count, *shape, dtype=dtype)
        for dtype, shape in columns
    ]  # fmt: skip
    arrays = [array_of(tensor) for tensor in tensors]
    back = unpack(wire.loads(*wire.dumps(pack(arrays, copy=True))))
    for one, other in zip(arrays, back, strict=True):
        assert one.dtype == other.dtype and one.shape == other.shape and other.flags.writeable
        assert np.array_equal(one, other)


@pytest.mark.parametrize("count", [4, 100_000])
def test_packing_copies_what_the_caller_may_change(count: int) -> None:
    tensor = torch.zeros(count, dtype=torch.int32)
    packed = pack([tensor.numpy()], copy=True)
    tensor += 1
    (back,) = unpack(packed)
    assert not back.any()


@pytest.mark.parametrize("prioritized", [True, False])
def test_returned_draws_leave_the_rows_as_they_were(
    folder: Path,  # noqa: F811
    prioritized: bool,
) -> None:
    limiter = RateLimiter(max_times_sampled=2)
    host = ReplayHost(
        SharedMemmapStorage(CAPACITY, scratch_dir=folder, job_id="test", limiter=limiter)
    )
    host.use_priorities(1.0, EPS)
    host.serve(Request((write(range(4)), priorities([0, 1, 2, 3], [1, 2, 3, 4]))))
    directory = host.storage.directory
    before = directory.tree.leaves.copy()
    reply = host.serve(Request(draw=9, law=Law(prioritized)))
    assert reply.count == 8 and not directory.tree.leaves.any()  # all that there is
    slot, generation, leaf = reply.rows.index, reply.rows.generation, reply.rows.leaf
    assert np.bincount(slot).tolist() == [2, 2, 2, 2]
    assert leaf.tolist() == before[slot].tolist()
    back = Invoke("return_draws", (slot.numpy()[1:], generation.numpy()[1:], leaf[1:]))
    host.serve(Request((write(range(10, 12), 2), back)))
    assert directory.words[Word.AVAILABLE] == 6
    assert directory.tree.leaves[:4].tolist() == before[:4].tolist()
    reply = host.serve(Request(draw=20, law=Law(prioritized)))
    assert reply.count == 11
    directory.tree.refresh()
    assert directory.tree.total == 0 and directory.words[Word.AVAILABLE] == 0
    stale = Invoke("return_draws", (np.array([0, 5]), np.array([7, 1]), np.array([1.0, 1.0])))
    reply = host.serve(Request((stale,), draw=20, law=Law(prioritized)))
    assert reply.count == 1 and reply.rows.index.tolist() == [5]
    host.close()
