"""Checkpoints of buffers over hosts, restored to the same or another number of shards."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

from tests.replay.conftest import make_rows
from tests.replay.hosted_helpers import note_syncs, synced_here, when_rows_are_saved
from torchrl_dist import (
    CheckpointError,
    DeadlineError,
    HostedReplayBuffer,
    PeerLostError,
    Session,
    SharedMemmapStorage,
)
from torchrl_dist.replay.hosts.shard import RemoteShard
from torchrl_dist.replay.saving import disk, snapshot
from torchrl_dist.replay.saving.disk import read_dump, read_manifest
from torchrl_dist.replay.saving.snapshot import Head

pytestmark = pytest.mark.timeout(90)
SHARD = 48
Make = Callable[..., HostedReplayBuffer]


@pytest.fixture
def make(make_hosted: Make, monkeypatch) -> Make:
    """Make a buffer over some shards, with 48 rows each by default."""
    monkeypatch.setattr(snapshot, "_CHUNK_ROWS", 8)
    names = iter("abcdef")

    def make(shards: int, capacity: int | None = None, **options) -> HostedReplayBuffer:
        defaults = {"name": next(names), "capacity": capacity or SHARD * shards, "prefetch": 0}
        defaults |= {"alpha": 1.0, "beta": 0.5, "write_to": "all"}
        return make_hosted(shards, **{**defaults, **options})

    return make


def rows_of(ids: range | list[int]) -> TensorDict:
    """Make rows, each with its own priority."""
    data = make_rows(ids)
    data["td_error"] = 1.0 + data["id"].double()
    return data


def fill(buffer: HostedReplayBuffer, extends: int) -> None:
    """Extend ``extends`` times with 10 rows of different priorities, to the shards in turn."""
    for extend in range(extends):
        buffer.extend(rows_of(range(10 * extend, 10 * extend + 10)))
    buffer.flush()


def law(buffer: HostedReplayBuffer) -> dict[int, float]:
    """Estimate the mass of each row from many draws: weights are (p / p_min) ** -beta."""
    found: dict[int, float] = {}
    for _ in range(100):
        batch = buffer.sample()
        found |= dict(zip(batch["id"].tolist(), batch["priority_weight"].tolist(), strict=True))
    return found


@pytest.mark.parametrize("saved, restored", [(1, 2), (3, 2)])
def test_another_number_of_shards_keeps_rows_priorities_and_counts(
    make, tmp_path: Path, saved: int, restored: int
) -> None:
    buffer = make(saved)
    fill(buffer, 4 * saved)
    handles = buffer.sample()
    buffer.dumps(tmp_path)
    other = make(restored, capacity=SHARD * 3)
    other.loads(tmp_path)
    ids = sorted(other[:]["id"].tolist())
    assert ids == list(range(40 * saved))
    assert other.write_count == buffer.write_count
    lengths = [state.length for state in other.storage.client.states()]
    assert max(lengths) - min(lengths) <= 1
    weights = law(other)
    least = min(weights)
    for row, weight in weights.items():
        assert weight == pytest.approx(((row + 1) / (least + 1)) ** -0.5 * weights[least], rel=1e-4)
    assert other.sampler.default_priority == 40.0 * saved
    # handles of the old buffer name no row of the new one
    handles["td_error"] = torch.full((16,), 1e6)
    other.update_tensordict_priority(handles)
    other.flush()
    assert other.storage.counters["stale_updates"] == 16
    other.extend(rows_of(range(900, 910)))
    other.flush()
    assert len(other) == 40 * saved + 10


def test_one_nodes_checkpoint_goes_to_shards_and_back(make, folder: Path, tmp_path: Path) -> None:
    one = SharedMemmapStorage(SHARD, scratch_dir=folder / "one", job_id="test")
    one.append(make_rows(range(40)))
    one.dumps(tmp_path / "one")
    buffer = make(2)
    buffer.loads(tmp_path / "one")
    assert sorted(buffer[:]["id"].tolist()) == list(range(40))
    buffer.storage.dumps(tmp_path / "two")
    one.empty()
    one.loads(tmp_path / "two")
    assert sorted(one[:]["id"].tolist()) == list(range(40))
    one.close()


def hide_folders(monkeypatch) -> None:
    """Hide folders from the hosts, as if the hosts were on other machines."""
    shard = disk.DumpWriter.shard

    @contextlib.contextmanager
    def hidden(*args) -> Iterator[disk.ShardFiles]:
        with shard(*args) as files:
            files.folder = Path("/nowhere", *files.folder.parts[1:])
            yield files

    monkeypatch.setattr(disk.DumpWriter, "shard", hidden)


def contents(path: Path) -> dict[str, bytes]:
    """Return the content of the rows' files, by name."""
    (rows,) = path.glob("rows-*")
    return {str(each.relative_to(rows)): each.read_bytes() for each in rows.rglob("*.bin")}


def test_hosts_that_see_the_folder_write_the_same_files_themselves(
    make, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "link").symlink_to("elsewhere")
    buffer = make(2)
    fill(buffer, 14)
    received, write = [], disk.ShardFiles.write

    def count(self: disk.ShardFiles, arrays) -> None:
        received.append(len(arrays[0]))
        write(self, arrays)

    monkeypatch.setattr(disk.ShardFiles, "write", count)
    buffer.dumps("link/seen")
    assert not received
    hide_folders(monkeypatch)
    buffer.dumps("sent")
    assert sum(received) == 2 * SHARD
    seen, sent = contents(tmp_path / "elsewhere" / "seen"), contents(tmp_path / "sent")
    assert seen == sent and len(seen) > 6
    one, other = (read_manifest(Path(each))["shards"] for each in ("link/seen", "sent"))
    assert one == other


def test_a_host_syncs_what_it_writes_as_it_goes(make, cluster: Session, tmp_path: Path) -> None:
    buffer = make(1, capacity=8 * 40)  # 40 chunks: not all are synced at once
    fill(buffer, 32)
    owner = cluster.of_role("owner")[0]
    cluster.submit(owner, note_syncs).result(20)
    buffer.dumps(tmp_path)
    (saved,) = read_dump(tmp_path)[0]
    assert saved is not None and saved.columns[0].tolist() == list(range(320))
    files = [str(each) for each in tmp_path.glob("rows-*/shard-0/*.bin")]
    rows = [each for each in files if not each.endswith(("/runs.bin", "/priority.bin"))]
    assert sorted(cluster.submit(owner, synced_here).result(20)) == sorted(3 * rows)


@pytest.mark.parametrize(("what", "shards"), [("killed", 2), ("paused", 1), ("full", 2)])
def test_a_host_that_fails_while_it_writes(
    make, cluster: Session, tmp_path: Path, what: str, shards: int
) -> None:
    buffer = make(shards, timeout_s=5 if what == "paused" else 20)
    fill(buffer, 4 * shards)
    buffer.dumps(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    last = cluster.of_role("owner")[shards - 1]
    cluster.submit(last, when_rows_are_saved, what, 5).result(20)
    if what == "full":
        with pytest.raises(CheckpointError, match=f"No space left on device .in {last.name} on "):
            buffer.dumps(tmp_path)
    elif shards == 1:
        with pytest.raises(PeerLostError if what == "killed" else DeadlineError):
            buffer.dumps(tmp_path)
    else:
        with pytest.warns(UserWarning, match="replay shard 1 .* is left out"):
            buffer.dumps(tmp_path)
        kept, missing = read_dump(tmp_path)[0]
        assert kept is not None and kept.leaf.size == 40 and missing is None
        assert not list(tmp_path.glob("rows-*/shard-1"))
        before = sorted(tmp_path.rglob("*"))
    if what == "paused":
        os.kill(cluster.pid_of(last), signal.SIGCONT)
        cluster.submit(last, os.getpid).result(20)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("seen", [True, False])
def test_writers_go_on_while_shards_are_saved(
    make, tmp_path: Path, monkeypatch, seen: bool
) -> None:
    buffer = make(2)
    fill(buffer, 8)
    lock, new = threading.Lock(), iter(range(1000, 10**6))
    append, head, delays = disk.ShardFiles.append, RemoteShard.head, [0.5]

    def late_head(self: RemoteShard) -> Head:
        if delays:
            time.sleep(delays.pop())  # the other shard could begin to save meanwhile
        return head(self)

    monkeypatch.setattr(RemoteShard, "head", late_head)

    def extend_and_append(self: disk.ShardFiles, chunk) -> None:
        with lock:
            buffer.extend(rows_of([next(new)]))
        append(self, chunk)

    monkeypatch.setattr(disk.ShardFiles, "append", extend_and_append)
    if not seen:
        hide_folders(monkeypatch)
    buffer.dumps(tmp_path)
    buffer.flush()
    found = set()
    for saved in read_dump(tmp_path)[0]:
        assert saved is not None
        found |= set(saved.columns[0].tolist())
        assert saved.leaf.size + saved.overwritten == saved.head.length
    assert found <= set(range(80)) and len(found) > 60
    assert len(buffer) > 80


def test_a_lost_shard_is_left_out_and_the_checkpoint_says_so(
    make, cluster: Session, tmp_path: Path
) -> None:
    buffer = make(2)
    fill(buffer, 8)
    kept = {row for turn in range(0, 8, 2) for row in range(10 * turn, 10 * turn + 10)}
    os.kill(cluster.pid_of(cluster.of_role("owner")[1]), signal.SIGKILL)
    with pytest.warns(UserWarning, match="replay shard 1 .* is left out"):
        buffer.dumps(tmp_path)
        buffer.sample()  # if the loss is noticed only now
        buffer.dumps(tmp_path)
    shards, _ = read_dump(tmp_path)
    assert shards[1] is None and shards[0] is not None
    assert set(shards[0].columns[0].tolist()) in (kept, set(range(80)) - kept)
    with pytest.raises(PeerLostError, match="replay shard 1 does not answer"):
        buffer.loads(tmp_path)
    other = make(1)
    other.loads(tmp_path)
    assert len(other) == 40
