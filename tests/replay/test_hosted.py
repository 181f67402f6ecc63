"""Buffers over hosts: their promises beyond those that every buffer makes."""

from __future__ import annotations

import gc
import os
import pickle
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from tensordict import NonTensorData, TensorDict

from tests.replay.conftest import make_rows
from tests.replay.hosted_helpers import (
    build_here,
    descriptors_here,
    extend_twice,
    slow_down,
    written_here,
)
from tests.replay.test_shard_law import assert_follows
from tests.replay.test_slices import assert_slices, trajectory
from tests.spawn import stop
from torchrl_dist import (
    ConfigurationError,
    DeadlineError,
    HostedReplayBuffer,
    PeerLostError,
    RateLimiter,
    RemoteError,
    RemoteStorage,
    RPCPrioritizedSampler,
    RPCRandomSampler,
    RPCSamplerWithoutReplacement,
    Session,
    SharedMemmapStorage,
    SharedPrioritizedSampler,
    host_replay,
    local_cluster,
    own_files,
    replay_buffer,
    session,
)
from torchrl_dist.replay.hosts import keeper
from torchrl_dist.replay.hosts.batches import BatchSource
from torchrl_dist.replay.hosts.keeper import HostAddress
from torchrl_dist.replay.hosts.messages import PRIORITIZED, UNIFORM, Write
from torchrl_dist.replay.node.leftovers import find

pytestmark = pytest.mark.timeout(90)
ROLES = {"learner": 1, "owner": 2}
DELAY_S = 0.2


@pytest.fixture
def alone(folder: Path) -> Iterator[Session]:
    with session(timeout_s=20) as job:
        yield job


Make = Callable[..., HostedReplayBuffer]


@pytest.fixture
def make(make_hosted: Make) -> Make:
    def make(shards: int = 1, **options) -> HostedReplayBuffer:
        defaults = {"capacity": 64 * shards, "alpha": 1.0, "beta": 0.5}
        return make_hosted(shards, **{**defaults, **options})

    return make


def shorten_deadlines(buffer: HostedReplayBuffer, timeout_s: float) -> None:
    """Shorten deadlines only now, because building a buffer takes longer on a busy machine."""
    client = buffer.storage.client
    client.timeout_s = timeout_s
    for link in client.links:
        link._timeout_s = timeout_s


def with_priority(rows: TensorDict, priority: torch.Tensor | list[float]) -> TensorDict:
    rows["td_error"] = torch.as_tensor(priority, dtype=torch.float64)
    return rows


# ---- never blocking


@pytest.mark.alone
def test_nothing_but_a_sample_waits_for_a_slow_owner(make, cluster) -> None:
    buffer = make(capacity=1024)
    buffer.extend(make_rows(range(8)))
    batch = buffer.sample()
    cluster.call(cluster.of_role("owner")[0], slow_down, DELAY_S)
    link = buffer.storage.client.links[0]
    before = link.messages
    durations = []
    for step in range(40):
        batch["td_error"] = torch.rand(16)
        for call in (
            lambda: buffer.update_tensordict_priority(batch),
            lambda s=step: buffer.extend(make_rows(range(10 * s, 10 * s + 10))),
        ):
            begin = time.monotonic()
            call()
            durations.append(time.monotonic() - begin)
    # one by one they would take 80 delays
    assert sum(durations) < 20 * DELAY_S
    assert np.median(durations) < DELAY_S / 10
    buffer.flush()
    assert link.messages - before < 40
    stored = buffer[8:]["id"].tolist()
    assert stored == list(range(400))  # in the order of the calls


def test_one_message_carries_the_priorities_and_several_batches(make, monkeypatch) -> None:
    # however slow this machine is
    monkeypatch.setattr("torchrl_dist.replay.hosts.remote_link._COMPANY_S", 5.0)
    for per_call, most in ((1, 70), (4, 20)):
        buffer = make(prefetch=4, batches_per_call=per_call, name=f"by-{per_call}")
        buffer.extend(make_rows(range(32)))
        buffer.flush()
        link = buffer.storage.client.links[0]
        before = link.messages
        for _ in range(64):
            batch = buffer.sample()
            batch["td_error"] = torch.rand(16)
            buffer.update_tensordict_priority(batch)
        assert link.messages - before <= most


# ---- in order, exactly once, errors later


def test_operations_sent_to_a_late_owner_are_applied_once(make, cluster) -> None:
    buffer = make(capacity=1024)
    buffer.extend(make_rows(range(10)))
    buffer.flush()
    shorten_deadlines(buffer, 0.5)
    cluster.call(cluster.of_role("owner")[0], slow_down, 1.2, 2)  # two calls are late, and run
    indices = [buffer.extend(make_rows(range(s, s + 10))) for s in range(10, 50, 10)]
    with pytest.raises(DeadlineError):
        buffer.flush()
    deadline = time.monotonic() + 20
    while (indices[-1] < 0).any() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert torch.cat(indices).tolist() == list(range(10, 50))
    assert cluster.call(cluster.of_role("owner")[0], written_here) == 50


def test_an_error_at_the_owner_is_raised_by_a_later_call(make) -> None:
    buffer = make()
    buffer.extend(make_rows(range(4)))
    buffer.flush()
    buffer.storage.client.links[0].put(Write("{}", 4, [], None, ((1, 4),)))
    with pytest.raises(RemoteError, match="KeyError") as caught:
        buffer.flush()
    assert caught.value.peer == "owner0" and "from_json" in caught.value.remote_traceback
    assert len(buffer) == 4


def test_a_sample_reads_what_the_process_wrote_before(make) -> None:
    buffer = make(prefetch=0)
    for start in range(0, 40, 8):
        batch_of_new = with_priority(make_rows(range(start, start + 8)), [10.0**start] * 8)
        buffer.extend(batch_of_new.exclude("td_error"))
        index = torch.arange(start, start + 8)
        buffer.update_priority(index, torch.full((8,), 10.0 ** (start + 1)))
        assert min(buffer.sample()["id"].tolist()) >= start


def test_the_index_is_filled_in_and_priorities_of_an_extend_arrive(make) -> None:
    exact = make()
    index = exact.extend(make_rows(range(6)), update_priority=False)
    assert index.shape == (6,) and set(index.tolist()) <= {-1, *range(6)}
    exact.update_priority(index, torch.tensor([1.0, 2, 3, 4, 5, 1e6]))
    exact.flush()
    assert index.tolist() == list(range(6))
    batch = exact.sample()
    assert batch["id"].tolist().count(5) >= 14
    assert exact.storage.counters["unverified_updates"] == 0


@pytest.mark.parametrize("shortcut", [False, True])
def test_priorities_for_rows_that_were_replaced_are_exact(make, shortcut: bool) -> None:
    buffer = make(shortcut=shortcut)
    index = buffer.extend(make_rows(range(6)))
    buffer.flush()
    buffer.writer.write_at(index, make_rows(range(10, 16)))
    buffer.update_priority(index, torch.tensor([1.0, 2, 3, 4, 5, 1e6]))
    buffer.update_priority(index.clone(), torch.tensor([1.0, 2, 3, 4, 5, 1e6]))
    buffer.flush()
    counters = buffer.storage.counters
    assert counters["stale_updates"] == counters["unverified_updates"] == 0
    assert buffer.sample()["id"].tolist().count(15) >= 14
    with pytest.raises(IndexError, match="got slots from -1"):
        buffer.writer.write_at(torch.tensor([-1]), make_rows(range(1)))
    with pytest.raises(ConfigurationError, match="2 rows for 1 slots"):
        buffer.writer.write_at(torch.tensor([0]), make_rows(range(2)))


def test_priorities_for_an_index_that_is_being_filled_in_are_exact(make, monkeypatch) -> None:
    exact = make()
    recent, filling, go_on = exact.storage.client.recent, threading.Event(), threading.Event()
    remember = recent.remember

    def remember_late(*arguments: torch.Tensor, written: bool) -> None:
        filling.set()
        assert go_on.wait(20)
        remember(*arguments, written=written)

    monkeypatch.setattr(recent, "remember", remember_late)
    index = exact.extend(make_rows(range(6)), update_priority=False)
    assert filling.wait(20)
    exact.update_priority(index, torch.tensor([1.0, 2, 3, 4, 5, 1e6]))
    go_on.set()
    exact.flush()
    assert exact.storage.counters["unverified_updates"] == 0
    assert exact.sample()["id"].tolist().count(5) >= 14


# ---- what is sampled


def test_beta_is_applied_when_a_batch_is_used(make) -> None:
    buffer = make(prefetch=3)
    buffer.extend(with_priority(make_rows(range(8)), [1.0] * 4 + [4.0] * 4))
    buffer.sample()
    buffer.sampler.beta = 1.0
    batch = buffer.sample()  # was drawn before
    expected = torch.where(batch["id"] < 4, 1.0, 0.25)
    assert torch.allclose(batch["priority_weight"], expected)


# ---- the law, through the whole stack


@pytest.mark.parametrize("uniform", [False, True])
@pytest.mark.parametrize(("shards", "alike"), [(2, True), (8, False)])
def test_batches_have_the_law_of_one_buffer(
    make, cluster, shards: int, alike: bool, uniform: bool
) -> None:
    """Shards are alike, or have very different sizes and masses. The last one may be empty."""
    rng = np.random.default_rng(shards)
    sizes = np.full(shards, 20) if alike else rng.integers(1, 40, shards)
    scale = np.ones(shards) if alike else 10.0 ** rng.uniform(-3, 3, shards)
    sizes[-1] *= alike
    rows = int(sizes.sum())
    priority = rng.exponential(size=rows) * np.repeat(scale, sizes)
    law = np.ones(rows) if uniform else (priority + 1e-8) ** 0.7
    more = {"alpha": 0.7, "beta": 0.6, "prefetch": 4, "batches_per_call": 2, "write_to": "all"}
    hosts = cluster.of_role("owner")[:1] * shards
    buffer = make(hosts=hosts, capacity=40 * shards, batch_size=256, uniform=uniform, **more)
    for part in np.split(np.arange(rows), np.cumsum(sizes)[:-1]):
        if part.size:
            buffer.extend(with_priority(make_rows(part.tolist()), priority[part]))
    buffer.flush()
    batches = [buffer.sample() for _ in range(50)]
    drawn = np.concatenate([batch["id"].numpy() for batch in batches])
    assert_follows(np.bincount(drawn, minlength=rows), law / law.sum(), 1e-6)
    if not uniform:
        weights = np.concatenate([batch["priority_weight"].numpy() for batch in batches])
        np.testing.assert_allclose(weights, (law[drawn] / law.min()) ** -0.6, rtol=1e-5)
    first = np.zeros(rows, dtype=np.int64)
    for _ in range(40):  # each begins without knowing a mass
        source = BatchSource(
            buffer.storage.client,
            law=lambda size: (UNIFORM if uniform else PRIORITIZED, size),
            prefetch=0,
            batches_per_call=1,
            uniforms=rng.random,
        )
        batch = source.next(256)
        column = [leaf.key for leaf in batch.spec.columns].index(("id",))
        first += np.bincount(batch.tensors[column].numpy(), minlength=rows)
    assert_follows(first, law / law.sum(), 1e-6)


@pytest.mark.parametrize(("rows", "lost"), [(65, 0), (150, 22)])
def test_an_extend_that_no_shard_has_room_for_is_divided(make, rows: int, lost: int) -> None:
    buffer = make(2, write_to="all", prefetch=0)
    made = with_priority(make_rows(range(rows)), torch.arange(1.0, rows + 1))
    index = buffer.extend(made)
    assert len(buffer) == rows - lost
    assert (index[:lost] == -1).all()
    assert sorted(buffer[:]["id"].tolist()) == list(range(lost, rows))
    kept = index[lost:]
    assert buffer[kept]["id"].tolist() == list(range(lost, rows))
    one = torch.zeros(rows)
    one[lost + 3] = 1
    buffer.update_priority(index, one)
    assert set(buffer.sample()["id"].tolist()) == {lost + 3}
    assert buffer.storage.counters["stale_updates"] == 0


def test_an_extend_larger_than_the_writers_own_shard_warns(cluster, folder) -> None:
    owners = cluster.of_role("owner")[:2]
    buffer = replay_buffer(
        cluster, hosts=owners, capacity=128, batch_size=8, shortcut=False, scratch_dir=folder
    )
    with pytest.warns(UserWarning, match="write_to='all'"):
        index = buffer.extend(make_rows(range(100)))
    buffer.flush()
    assert len(buffer) == 64 and index.ge(0).sum() == 64


@pytest.mark.parametrize("how", ["restored", "emptied"])
def test_the_largest_priority_of_dropped_rows_does_not_come_back(
    make, how: str, tmp_path: Path
) -> None:
    buffer, other = (make(2, write_to="all", prefetch=0) for _ in range(2))
    for first in (0, 4):  # to both shards
        index = buffer.extend(make_rows(range(first, first + 4)))
        buffer.update_priority(index, torch.full((4,), 2.0))
    buffer.dumps(tmp_path)
    for user in (buffer, other):
        user.update_priority(user.sample()["index"], torch.full((16,), 50.0))
        user.flush()
    assert other.sampler.default_priority == 50.0
    if how == "restored":
        buffer.loads(tmp_path)
    else:
        buffer.empty()
    for user in (other, buffer, other, buffer):
        user.extend(make_rows(range(10, 14)))
        user.flush()
        user.sample()
    expected = 2.0 if how == "restored" else 1.0
    assert buffer.sampler.default_priority == other.sampler.default_priority == expected
    other.update_priority(other.sample()["index"], torch.full((16,), 3.0))
    other.flush()
    buffer.sample()  # learns it, and takes it everywhere
    buffer.flush()
    buffer.sample()
    assert [state.max_priority for state in other.storage.client.states()] == [3.0, 3.0]


def test_rows_go_to_the_shard_of_the_writers_node(cluster, folder, monkeypatch) -> None:
    common = {"capacity": 128, "batch_size": 8, "scratch_dir": folder}
    buffer = replay_buffer(cluster, hosts=cluster.of_role("owner")[:2], shortcut=False, **common)
    indices = cluster.call(cluster.of_role("owner")[1], extend_twice, buffer)
    assert (indices >= 64).all()  # the writer keeps the second shard
    monkeypatch.setattr(HostAddress, "is_here", lambda self: False)
    elsewhere = replay_buffer(cluster, hosts=cluster.of_role("owner")[:2], **common)
    assert sorted(extend_twice(elsewhere).unique().tolist())[::8] == [0, 80]


# ---- losing hosts


def test_a_lost_owner_is_an_error_soon_and_the_session_ends(make, cluster) -> None:
    buffer = make(prefetch=1, scratch_dir=None)
    assert [each for each in find(own_files.user_folders()) if each.job_id == cluster.world.job_id]
    buffer.extend(make_rows(range(8)))
    buffer.sample()
    os.kill(cluster.pid_of(cluster.of_role("owner")[0]), signal.SIGKILL)
    begin = time.monotonic()
    with pytest.raises(PeerLostError, match="owner0"):
        for _ in range(100):
            buffer.sample()
    for call in (lambda: buffer.extend(make_rows(range(4))), buffer.flush, lambda: len(buffer)):
        with pytest.raises(PeerLostError, match="owner0"):
            call()
    assert time.monotonic() - begin < 10


@pytest.mark.parametrize("of", ["rows", "uniform rows", "slices", "uniform slices", "a pass"])
def test_a_lost_shard_is_reported_once_and_the_other_goes_on(make, cluster, of: str) -> None:
    slices = {"slice_len": 4, "traj_key": ("collector", "traj_ids")} if "slices" in of else None
    buffer = make(2, write_to="all", prefetch=2, uniform="uniform" in of, slices=slices)
    if of == "a pass":
        owner = buffer.storage.owner
        sampler = RPCSamplerWithoutReplacement(owner=owner)
        buffer = HostedReplayBuffer(storage=RemoteStorage(owner), sampler=sampler, batch_size=16)
    for number in range(4):  # to the shards in turn
        buffer.extend(trajectory(number, range(20)))
    buffer.flush()
    key = ("collector", "traj_ids")
    seen = torch.cat([buffer.sample()[key] for _ in range(1 if of == "a pass" else 60)])
    assert of == "a pass" or set(seen.tolist()) == {0, 1, 2, 3}
    os.kill(cluster.pid_of(cluster.of_role("owner")[1]), signal.SIGKILL)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(30):
            batch = buffer.sample()
            if slices:
                assert_slices(batch, 4)
            batch["td_error"] = torch.rand(len(batch))
            buffer.update_tensordict_priority(batch)
            buffer.extend(trajectory(10 + step, range(1)))
            if step > 5:
                assert (batch["index"] < 64).all()
        buffer.flush()
        assert len(buffer) == 64
        if of == "a pass":
            assert len([*buffer])  # the rest of the pass
            for _ in range(2):
                rows = torch.cat([batch["index"] for batch in buffer]).tolist()
                assert sorted(rows) == [*range(64)]
    reports = [str(each.message) for each in caught if "replay shard 1" in str(each.message)]
    assert len(reports) == 1 and "owner1" in reports[0], reports
    assert "continues with the other 1" in reports[0]
    warnings.simplefilter("ignore")  # closing a client of the lost host is one more warning


def test_a_shard_that_hangs_is_left_out_and_comes_back(make, cluster) -> None:
    buffer = make(2, write_to="all", prefetch=0)
    for start in (0, 20):
        buffer.extend(make_rows(range(start, start + 20)))
    buffer.flush()
    shorten_deadlines(buffer, 2.0)
    pid = cluster.pid_of(cluster.of_role("owner")[0])
    stop(pid)
    try:
        with pytest.warns(UserWarning, match="replay shard 0 .owner0"):
            drawn = torch.cat([buffer.sample()["id"] for _ in range(4)])
        assert (drawn >= 20).all()
    finally:
        os.kill(pid, signal.SIGCONT)
    with pytest.warns(UserWarning, match="answers again"):
        deadline = time.monotonic() + 20
        while (buffer.sample()["id"] >= 20).all() and time.monotonic() < deadline:
            time.sleep(0.05)
        assert len(buffer) == 40  # a call tells what was noticed since the one before


# ---- where the rows are


def test_processes_of_the_owners_node_use_its_directory(cluster, folder, monkeypatch) -> None:
    common = {"capacity": 64, "batch_size": 8, "scratch_dir": folder}
    buffer = replay_buffer(cluster, hosts=cluster.of_role("owner")[:1], **common)
    assert isinstance(buffer.storage, SharedMemmapStorage)
    assert isinstance(buffer.sampler, SharedPrioritizedSampler)
    assert buffer.extend(make_rows(range(8))).tolist() == list(range(8))
    far = replay_buffer(cluster, hosts=cluster.of_role("owner")[:1], shortcut=False, **common)
    assert isinstance(far.storage, RemoteStorage) and len(far) == 8
    carried = pickle.dumps(buffer)
    monkeypatch.setattr(HostAddress, "is_here", lambda self: False)
    there = pickle.loads(carried)
    assert isinstance(there.storage, RemoteStorage)
    assert isinstance(there.sampler, RPCPrioritizedSampler) and len(there) == 8
    assert set(there.sample()["id"].tolist()) <= set(range(8))


def test_the_directories_end_with_the_session_and_the_next_starts_empty(
    folder,
    fork_server,
) -> None:
    for _ in range(2):
        with local_cluster(ROLES, timeout_s=20, fork_server=fork_server) as job:
            options = {"capacity": 64, "batch_size": 8, "scratch_dir": folder}
            buffer = replay_buffer(job, hosts=job.of_role("owner"), shortcut=False, **options)
            assert len(buffer) == 0
            near = replay_buffer(job, "here", **options)
            for each in (buffer, near):
                each.extend(make_rows(range(4)))
                assert len(each) == 4
            assert len(list(folder.iterdir())) == 3
        assert not list(folder.iterdir())


def test_operations_queued_at_the_end_of_the_session_are_sent(folder, fork_server) -> None:
    with local_cluster(ROLES, timeout_s=20, fork_server=fork_server) as job:
        options = {"capacity": 64, "batch_size": 8, "scratch_dir": folder, "shortcut": False}
        buffer = replay_buffer(job, hosts=job.of_role("owner")[:1], keep=True, **options)
        buffer.extend(make_rows(range(4)))
        path = buffer.storage.owner.hosts[0].path
    left = SharedMemmapStorage(64, scratch_dir=path, job_id="look", resume=True)
    assert left[:]["id"].tolist() == [0, 1, 2, 3]
    left.close()


def test_copies_of_a_buffer_that_are_gone_leave_nothing_behind(make, cluster) -> None:
    buffer = make(prefetch=0)
    text = pickle.dumps(buffer)
    before = set(threading.enumerate())
    for _ in range(4):
        copy = pickle.loads(text)
        copy.extend(make_rows(range(4)))
        batch = copy.sample()
        batch["td_error"] = torch.rand(16)
        copy.update_tensordict_priority(batch)
        del copy
        gc.collect()
    new = set(threading.enumerate()) - before
    assert sum("torchrl_dist-replay" in each.name for each in new) <= 3
    assert buffer.storage.write_count == 16


@pytest.mark.parametrize("shards", [1, 2])
def test_copies_of_a_buffer_of_this_node_that_are_gone_are_closed(make, shards: int) -> None:
    buffer = make(shards, shortcut=True)
    text = pickle.dumps(buffer)
    for _ in range(4):
        copy = pickle.loads(text)
        copy.extend(make_rows(range(4)))
        assert len(copy.sample()) == 16
        del copy
        gc.collect()
    storage = buffer.storage if shards == 1 else buffer.storage.client.links[0]._host.storage
    assert storage.directory.sharers <= 3
    pickle.loads(text).close()
    gc.collect()
    pickle.loads(text)  # one that was closed is not closed again
    assert 1 < storage.directory.sharers <= 3
    assert len(buffer) == 16


def test_processes_that_disagree_about_a_buffer_get_an_error(cluster, folder) -> None:
    owners = cluster.of_role("owner")[:2]
    common = {"capacity": 64, "batch_size": 8, "scratch_dir": folder, "shortcut": False}
    first = cluster.call(owners[1], build_here, hosts=owners[:1], **common)
    for differs, message in [
        ({"write_to": "all"}, "write_to='own', but here write_to='all'"),
        ({"uniform": True}, "here sampling=.'uniform'"),
        ({"alpha": 0.5}, "'alpha', 0.6.*'alpha', 0.5"),
        ({"hosts": owners[1:]}, "hosts=.'owner0'., but here hosts=.'owner1'."),  # none in common
        ({"hosts": owners}, "hosts="),
        ({"limiter": RateLimiter(8)}, "limiter=None, but here limiter=RateLimiter"),
        ({"keep": True}, "keep=False, but here keep=True"),
        ({"resume": True}, "resume=False, .*here .*resume=True"),
        ({"capacity": 65}, "capacity=64, .*here .*capacity=65"),
    ]:
        with pytest.raises(ConfigurationError, match=message):
            replay_buffer(cluster, **{"hosts": owners[:1], **common, **differs})
    own = {"batch_size": 4, "beta": 1.0, "prefetch": 0, "timeout_s": 5.0, "shortcut": True}
    mine = replay_buffer(cluster, **{"hosts": owners[:1], **common, **own})
    assert str(mine.storage.directory.path) == first.hosts[0].path
    Path(folder, "file").touch()
    wrong = {**common, "scratch_dir": folder / "file"}
    with pytest.raises(RemoteError):
        replay_buffer(cluster, "again", **wrong)
    replay_buffer(cluster, "again", **common)  # no process has agreed on what failed


def test_a_released_buffer_leaves_no_files_descriptors_or_name(cluster, folder) -> None:
    owners = cluster.of_role("owner")[:2]
    common = {"batch_size": 8, "scratch_dir": folder}

    def in_use() -> list[tuple[int, list[str]]]:
        return [cluster.call(peer, descriptors_here) for peer in cluster.peers]

    def each_form() -> Iterator[HostedReplayBuffer]:
        yield replay_buffer(cluster, capacity=64, hosts=owners, shortcut=False, **common)
        yield replay_buffer(cluster, capacity=32, hosts=owners, **common)
        yield replay_buffer(cluster, capacity=16, hosts=owners[:1], **common)
        yield replay_buffer(cluster, capacity=8, **common)

    for buffer in each_form():
        buffer.release()  # what stays open for good is open now
        del buffer
    before = in_use()
    for buffer in each_form():
        buffer.extend(make_rows(range(4)))
        assert len(buffer.sample()) == 8 and in_use() != before
        buffer.release()
        assert not list(folder.iterdir())
        del buffer
        # what earlier tests of this process have not closed is mapped still
        for (now, mapped), (was, then) in zip(in_use(), before, strict=True):
            assert now <= was and len(mapped) <= len(then)
    first = replay_buffer(cluster, capacity=64, hosts=owners[:1], shortcut=False, **common)
    other = pickle.loads(pickle.dumps(first))
    other.extend(make_rows(range(4)))
    other.flush()
    near = replay_buffer(cluster, capacity=64, hosts=owners[:1], **common)
    with pytest.warns(UserWarning, match="still in use by another process"):
        first.release()
    with pytest.raises(RemoteError, match="was released"):
        len(other)
    near.close()
    assert not list(folder.iterdir())


def test_hosts_of_a_buffer_that_could_not_be_made_are_closed(alone, folder) -> None:
    taken = folder / f"torchrl_dist-{os.getuid()}-replay-1-0"
    folder.mkdir(exist_ok=True)
    taken.touch()
    both = [alone.me, alone.me]
    with pytest.raises(RemoteError):
        host_replay(alone, 2000, hosts=both, scratch_dir=folder)
    assert list(folder.iterdir()) == [taken]
    with replay_buffer(alone, capacity=10, batch_size=4, scratch_dir=folder, keep=True) as buffer:
        buffer.extend(make_rows(range(20)))
        assert buffer.storage.max_size == len(buffer) == 10
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # it stays there, as was asked: no warning
            buffer.release()
    with pytest.raises(RemoteError):
        host_replay(alone, 20, hosts=both, scratch_dir=folder, resume=True)
    found = replay_buffer(alone, capacity=10, batch_size=4, scratch_dir=folder, resume=True)
    assert len(found) == 10  # rows of an earlier job are not lost by such a mistake


def test_a_release_that_ran_out_of_time_can_be_tried_again(alone, folder, monkeypatch) -> None:
    def be_late(*_: object, **__: object) -> None:
        raise DeadlineError("a write did not end")

    kept = keeper.open_host("replay-0", keeper.HostTerms(64, str(folder), False, False, None))
    with monkeypatch.context() as late:
        late.setattr(SharedMemmapStorage, "close", be_late)
        with pytest.raises(DeadlineError):
            kept.release()
    assert keeper._hosts[alone.session_id, "replay-0"] is kept and list(folder.iterdir())
    assert kept.release() is False
    assert not keeper._hosts and not list(folder.iterdir())
    assert kept.release() is False


def test_shards_that_are_one_folder_are_refused(cluster, folder, monkeypatch) -> None:
    """A launcher may treat one machine as several nodes, whose processes have equal local ranks."""
    monkeypatch.setattr(keeper, "_identity", lambda path: ("boot", 1, 2))
    me = cluster.me
    with pytest.raises(ConfigurationError, match=r"shards 0 and 1 \(learner0 .* share one folder"):
        replay_buffer(cluster, "apart", capacity=64, batch_size=4, hosts=[me, me])
    monkeypatch.undo()
    buffer = replay_buffer(cluster, "apart", capacity=64, batch_size=4, hosts=[me, me])
    assert len(buffer) == 0


def test_wrong_arguments_say_what_is_expected(alone, folder) -> None:
    common = {"capacity": 64, "batch_size": 8, "scratch_dir": folder, "shortcut": False}
    for wrong, message in [
        ({"capacity": 0}, "capacity=0 over 1 hosts"),
        ({"write_to": "any"}, "expected 'own' or 'all'"),
        ({"min_shards": 2}, "expected 1 to 1"),
        ({"storage": 1}, "builds the storage itself"),
        ({"prefetch": 2, "batches_per_call": 3}, "pass prefetch= of at least"),
        ({"prefetch": -1}, "prefetch=-1"),
        ({"batches_per_call": 0}, "batches_per_call"),
        ({"beta": -1.0}, "must be >= 0"),
    ]:
        with pytest.raises(ConfigurationError, match=message):
            replay_buffer(alone, **{**common, **wrong})
    replay_buffer(alone, **common)
    with pytest.raises(ConfigurationError, match="with capacity=64, but here capacity=65"):
        replay_buffer(alone, **{**common, "capacity": 65})
    owner = host_replay(alone, 64, scratch_dir=folder, shortcut=False)
    storage = SharedMemmapStorage(64, scratch_dir=folder / "own", job_id="test")
    with pytest.raises(ConfigurationError, match="pass the same owner to the sampler"):
        RPCRandomSampler(owner=owner).sample(storage, 4)
    storage.close()


def test_text_has_the_room_that_the_first_writer_of_all_gave_it(make) -> None:
    def rows(text: str) -> TensorDict:
        return make_rows(range(2)).set("text", NonTensorData(text, batch_size=[2]))

    one = make()
    other = pickle.loads(pickle.dumps(one))
    one.extend(rows("x" * 400))
    one.storage.flush()
    other.extend(rows("short"))
    other.extend(rows("y" * 400))
    other.storage.flush()
    assert len(other) == 6 and set(other[4:6]["text"]) == {"y" * 400}
    other.close()
