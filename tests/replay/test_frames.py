"""Frames that are stored once: the same batches as a plain storage, in an eighth of the memory."""

from __future__ import annotations

import copy
import itertools
import multiprocessing
import threading
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from torchrl_dist import RemoteStorage, host_replay, session
from torchrl_dist.errors import CheckpointError, ConfigurationError, DeadlineError
from torchrl_dist.replay import SharedMemmapStorage, SharedPrioritizedSampler, SharedReplayBuffer
from torchrl_dist.replay.hosts import merging
from torchrl_dist.replay.hosts.host import ReplayHost
from torchrl_dist.replay.hosts.merging import parts_of
from torchrl_dist.replay.hosts.messages import UNIFORM, Request, Write
from torchrl_dist.replay.inspection import inspect
from torchrl_dist.replay.node import frames as node_frames
from torchrl_dist.replay.node.frames import Frames
from torchrl_dist.replay.node.tables import Word
from torchrl_dist.replay.row import stacks
from torchrl_dist.replay.row.packing import pack, unpack
from torchrl_dist.replay.row.rows import build, matching_columns, spec_of
from torchrl_dist.replay.row.spec import ColumnSpec, RowSpec
from torchrl_dist.replay.saving import snapshot
from torchrl_dist.replay.saving.disk import read_manifest

STACK, SIDE = 4, 3


class Episodes:
    """Make rows of an env with stacks of frames, padded by the first frame or by zeros."""

    def __init__(self, seed: int, steps: int = 1, zeros: bool = False, mean: int = 20) -> None:
        self.random = np.random.default_rng(seed)
        self.steps, self.zeros, self.mean = steps, zeros, mean
        self.rows: list[tuple[np.ndarray, np.ndarray, int]] = []

    def _frame(self) -> np.ndarray:
        return self.random.integers(0, 256, (SIDE, SIDE), np.uint8)

    def _episode(self) -> None:
        length = 1 + int(self.random.geometric(1 / self.mean))
        frames = [self._frame() for _ in range(length + 1)]
        pad = np.zeros_like(frames[0]) if self.zeros else frames[0]
        padded = [pad] * (STACK - 1) + frames
        stacks = [np.stack(padded[at : at + STACK]) for at in range(length + 1)]
        for at in range(length):
            later = min(at + self.steps, length)
            self.rows.append((stacks[at], stacks[later], int(self.random.integers(2**62))))

    def take(self, count: int) -> TensorDict:
        while len(self.rows) < count:
            self._episode()
        taken, self.rows = self.rows[:count], self.rows[count:]
        now, later, number = zip(*taken, strict=True)
        return TensorDict(
            {
                "pixels": torch.from_numpy(np.stack(now)),
                "next": {"pixels": torch.from_numpy(np.stack(later))},
                "number": torch.tensor(number),
            },
            [count],
        )


def storage_at(path: Path, capacity: int, frames: Any = ..., **options: Any) -> SharedMemmapStorage:
    if frames is ...:
        frames = {"pixels": STACK}
    return SharedMemmapStorage(
        capacity, scratch_dir=path, job_id="frames", frames=frames, **options
    )


def same(one: TensorDict, other: TensorDict) -> bool:
    return bool((one == other).all())


@pytest.mark.parametrize("kernel", ["c", "numpy"])
@pytest.mark.parametrize("steps", [1, 3, 5])
def test_samples_equal_those_of_a_plain_storage_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kernel: str, steps: int
) -> None:
    """Actors take turns for several laps. Extends have any length. Rows are also read by index."""
    monkeypatch.setenv("TORCHRL_DIST_KERNEL", kernel)
    capacity, random = 200, np.random.default_rng(steps)
    buffers = []
    for name, frames in (("frames", {"pixels": STACK}), ("plain", None)):
        buffer = SharedReplayBuffer(
            storage=storage_at(tmp_path / name, capacity, frames),
            sampler=SharedPrioritizedSampler(capacity, alpha=0.7, beta=0.5),
            batch_size=32,
        )
        buffer.set_rng(torch.Generator().manual_seed(0))
        buffers.append(buffer)
    actors = [Episodes(seed, steps, zeros=seed % 2 == 0) for seed in range(3)]
    for _ in range(60):
        rows = actors[int(random.integers(3))].take(int(random.integers(1, 40)))
        priority = torch.from_numpy(random.random(32))
        found = []
        for buffer in buffers:
            index = buffer.extend(rows.clone())
            batch = buffer.sample()
            buffer.update_priority(batch["index"], priority, generation=batch["index_generation"])
            found.append((index, batch, buffer.sample(5), buffer[:]))
        for one, other in zip(*found, strict=True):
            assert same(one, other) if isinstance(one, TensorDict) else one.equal(other)
    assert buffers[0].storage.counters["dropped_rows"] == 0
    frames = buffers[0].storage.directory.frames
    stored = buffers[0].storage.directory.words[Word.FRAME_CURSOR]
    assert stored < 1.35 * buffers[0].storage.write_count  # some 1 / 20 per episode, and few starts
    assert frames is not None and frames.size < 2**13


def test_rows_that_repeat_nothing_die_early_and_are_never_torn(tmp_path: Path) -> None:
    capacity = 5_000
    storage = storage_at(tmp_path / "frames", capacity)
    sampler = SharedPrioritizedSampler(capacity, alpha=0.7, beta=0.5)
    buffer = SharedReplayBuffer(storage=storage, sampler=sampler, batch_size=64)
    generator = torch.Generator().manual_seed(0)
    written = {}

    def extend(count: int) -> None:
        shape = (count, STACK, SIDE, SIDE)
        rows = TensorDict(
            {
                "pixels": torch.randint(256, shape, generator=generator, dtype=torch.uint8),
                "number": torch.randint(2**62, (count,), generator=generator),
            },
            [count],
        )
        buffer.extend(rows)
        written.update(zip(rows["number"].tolist(), rows["pixels"], strict=True))

    with pytest.warns(UserWarning, match=r"of the oldest rows were dropped.*larger max_size"):
        for _ in range(20):
            extend(500)
            for row in buffer.sample():
                assert row["pixels"].equal(written[int(row["number"])])
    frames = storage.directory.frames
    assert frames is not None
    room = frames.size // STACK
    assert 0.9 * room - 500 <= len(buffer) <= room
    assert storage.counters["dropped_rows"] == 10_000 - len(buffer)
    assert len(buffer[:]) == len(buffer)  # the newest rows
    assert set(buffer[:]["number"].tolist()) == set(list(written)[-len(buffer) :])


@pytest.mark.parametrize("kernel", ["c", "numpy"])
@pytest.mark.parametrize("seed", range(4))
def test_rows_stay_whole_where_old_frames_return_and_the_ring_is_small(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kernel: str, seed: int
) -> None:
    """Rows have new frames, frames of dropped rows, or both. The buffer is sometimes emptied."""
    monkeypatch.setenv("TORCHRL_DIST_KERNEL", kernel)
    monkeypatch.setattr(node_frames, "_FEW", 64)
    storage = storage_at(tmp_path / "frames", 50)
    random, numbers = np.random.default_rng(seed), itertools.count()
    known = random.integers(0, 256, (8, SIDE, SIDE), np.uint8)
    written: dict[int, torch.Tensor] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # rows are dropped
        for _ in range(400):
            count = int(random.integers(1, 6))
            new = random.integers(0, 256, (count, STACK, SIDE, SIDE), np.uint8)
            old = known[random.integers(len(known), size=(count, STACK))]
            share = random.choice([0.0, 0.2, 1.0])
            pixels = np.where(random.random((count, STACK, 1, 1)) < share, old, new)
            known = np.concatenate([known, pixels.reshape(-1, SIDE, SIDE)])[-120:]
            number = torch.tensor([next(numbers) for _ in range(count)])
            rows = TensorDict({"pixels": torch.from_numpy(pixels), "number": number}, [count])
            if random.random() < 0.03:
                storage.empty()
            storage.append(rows)
            written |= zip(number.tolist(), rows["pixels"], strict=True)
            found = storage[:]
            expected = [written[each] for each in found["number"].tolist()]
            assert found["pixels"].equal(torch.stack(expected))
    assert storage.counters["dropped_rows"]


def test_a_large_buffer_takes_little_more_than_one_frame_per_row(tmp_path: Path) -> None:
    capacity, pixels = 130_000, torch.zeros(1, STACK, 20, 20, dtype=torch.uint8)
    storage = storage_at(tmp_path / "frames", capacity)
    storage.append(TensorDict({"pixels": pixels, "next": {"pixels": pixels}}, [1]))
    size = sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
    assert size < 1.11 * capacity * 20 * 20 + capacity * (8 * 4 + 8 + 8 + 9)  # see ``file_sizes``
    found = inspect(tmp_path / "frames")
    assert found["row_bytes"] == 8 * 20 * 20 and found["stored_row_bytes"] < 1.25 * 20 * 20


@pytest.mark.parametrize(
    ("frames", "words"),
    [
        ({"pixels": 3}, "not a stack of 3 frames.*multiple of 3"),
        ({"image": 4}, "no 'image', only"),
        ({"pixels": 0}, "to the number of frames"),
        ({"pixels": True}, "to the number of frames"),
        ({("next", "pixels"): 4}, "to the number of frames"),
        (["pixels"], "to the number of frames"),
        ({1: 4}, "to the number of frames"),
    ],
)
def test_values_that_are_not_stacks_of_frames_are_refused(
    tmp_path: Path, frames: Any, words: str
) -> None:
    with pytest.raises(ConfigurationError, match=words):
        storage_at(tmp_path / "frames", 10, frames).append(Episodes(0).take(2))


def test_rows_of_several_dimensions_and_empty_frames_are_refused(tmp_path: Path) -> None:
    lines = TensorDict({"pixels": torch.zeros(4, 3, 2, 8)}, [4, 3])
    empty = TensorDict({"pixels": torch.zeros(4, 2, 0, 8)}, [4])
    for data, words in ((lines, r"batch size \[n, 3\]"), (empty, "have no elements")):
        with pytest.raises(ConfigurationError, match=words):
            storage_at(tmp_path / "frames", 12, {"pixels": 2}).append(data)


def test_processes_that_ask_for_other_frames_are_refused(tmp_path: Path) -> None:
    storage = storage_at(tmp_path / "frames", 10)
    with pytest.raises(ConfigurationError, match="was set up with frames={'pixels': 4}"):
        storage_at(tmp_path / "frames", 10, {"pixels": 2})
    other = storage_at(tmp_path / "frames", 10, None)  # has the directory's
    other.append(Episodes(0).take(3))
    assert storage.directory.frames is not None
    plain = storage_at(tmp_path / "plain", 10, None)
    plain.append(Episodes(0).take(3))
    with pytest.raises(ConfigurationError, match="with no frames; pass the same"):
        storage_at(tmp_path / "plain", 10)
    assert len(plain) == 3


def test_later_rows_of_another_kind_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    storage = storage_at(tmp_path / "frames", 10)
    rows = Episodes(0).take(2)
    storage.append(rows)
    for wrong in (rows["pixels"].float(), torch.zeros(2, STACK, 5, 5, dtype=torch.uint8)):
        with pytest.raises(ConfigurationError, match="does not match the rows"):
            storage.append(rows.clone().set("pixels", wrong))
    assert len(storage) == 2 and same(storage[:], rows)


def test_checkpoints_are_read_with_and_without_frames(tmp_path: Path) -> None:
    rows = Episodes(0).take(60)
    for kinds in ((..., None), (None, ...), (..., ...)):
        before, after = (
            SharedReplayBuffer(
                storage=storage_at(tmp_path / f"{kinds} {at}", 100, kind), batch_size=4
            )
            for at, kind in enumerate(kinds)
        )
        before.extend(rows)
        before.dumps(tmp_path / f"{kinds} saved")
        after.loads(tmp_path / f"{kinds} saved")
        assert same(after[:], rows)
        after.storage.empty()
        after.load_state_dict(before.state_dict())
        assert same(after[:], rows)
        assert (after.storage.directory.frames is not None) == (kinds[1] is ...)
        before.storage.close(), after.storage.close()


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*.bin"))


@pytest.mark.parametrize("kernel", ["c", "numpy"])
def test_a_checkpoint_has_each_frame_once_and_fits_other_capacities(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kernel: str
) -> None:
    """It is saved in several chunks, after several laps of two actors that take turns."""
    monkeypatch.setenv("TORCHRL_DIST_KERNEL", kernel)
    monkeypatch.setattr(snapshot, "_CHUNK_ROWS", 150)
    buffers = []
    for name, kind in (("frames", ...), ("plain", None)):
        buffer = SharedReplayBuffer(storage=storage_at(tmp_path / name, 500, kind), batch_size=4)
        actors = [Episodes(0), Episodes(1)]
        for turn in range(40):
            buffer.extend(actors[turn % 2].take(30))
        buffer.dumps(tmp_path / f"saved {name}")
        buffers.append(buffer)
    # 8 + 8 * 9 bytes of 8 * 9 pixels and other columns; an episode of 20 steps has 3 more frames
    once, plain = (_size(tmp_path / f"saved {name}") for name in ("frames", "plain"))
    numbers = 8 * 2 * STACK * 500
    assert once - numbers < plain / 2.5
    assert read_manifest(tmp_path / "saved frames")["format_version"] == 3
    assert read_manifest(tmp_path / "saved plain")["format_version"] == 2
    before = buffers[1][:]
    for capacity, kind in ((500, None), (500, ...), (700, ...), (200, None)):
        path = tmp_path / f"{capacity} {kind}"
        other = SharedReplayBuffer(storage=storage_at(path, capacity, kind), batch_size=4)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # 200 have no room for all
            other.loads(tmp_path / "saved frames")
        rows = other[:]
        assert len(rows) == min(capacity, 500)
        # the plain rows with the same numbers
        places = (before["number"][None] == rows["number"][:, None]).int().argmax(1)
        assert same(rows, before[places])


def _numbers(state: dict[str, Any]) -> torch.Tensor:
    """Return the frame numbers of the first column with frames, from a state_dict."""
    shard = state["shards"][0]
    stacks = [column.get("stack", 0) > 0 for column in shard["head"]["spec"]["leaves"]]
    return shard["rows"][stacks.index(True)]


_WRONG = {
    "a frame that is missing": lambda state: _numbers(state).fill_(10**6),
    "a frame before the first": lambda state: _numbers(state).fill_(-1),
    "no frames": lambda state: state["shards"][0]["rows"].pop(),
    "smaller frames": lambda state: state["shards"][0]["rows"].append(
        state["shards"][0]["rows"].pop()[..., :1].contiguous()
    ),
    "other stacks": lambda state: state["shards"][0]["head"]["spec"]["leaves"][0].update(stack=2),
}


@pytest.mark.parametrize("what", _WRONG)
def test_a_state_with_damaged_frames_changes_nothing(tmp_path: Path, what: str) -> None:
    buffer = SharedReplayBuffer(storage=storage_at(tmp_path / "frames", 100), batch_size=4)
    buffer.extend(Episodes(0).take(30))
    state = copy.deepcopy(buffer.storage.state_dict())
    buffer.storage.load_state_dict(copy.deepcopy(state))  # it is sound
    _WRONG[what](state)
    before = buffer[:].clone()
    with pytest.raises(CheckpointError, match="damaged|missing or wrong entries"):
        buffer.storage.load_state_dict(state)
    assert same(buffer[:], before)


def test_a_flipped_bit_of_a_saved_frame_is_noticed(tmp_path: Path) -> None:
    buffer = SharedReplayBuffer(storage=storage_at(tmp_path / "frames", 100), batch_size=4)
    buffer.extend(Episodes(0).take(30))
    buffer.dumps(tmp_path / "saved")
    (file,) = (tmp_path / "saved").rglob("frames=*.bin")
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 4
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match="checksum"):
        buffer.loads(tmp_path / "saved")
    assert len(buffer) == 30


def test_a_host_reads_whole_rows_while_others_overwrite_them(tmp_path: Path) -> None:
    """After each copy and before the comparison of versions, some rows are overwritten."""
    storage, actor = storage_at(tmp_path / "frames", 50), Episodes(0)
    written: dict[tuple[int, int], TensorDict] = {}  # by slot and generation

    def append(count: int) -> None:
        rows = actor.take(count)
        places = (each.tolist() for each in storage.append(rows))
        written.update(zip(zip(*places, strict=True), rows, strict=True))

    append(50)
    gather, more = storage._gather_stored, iter([20, 7, 50])

    def overwritten(slots: np.ndarray) -> list[np.ndarray]:
        found = gather(slots)
        if count := next(more, 0):
            append(count)
        return found

    storage._gather_stored = overwritten  # type: ignore[method-assign]
    reply = ReplayHost(storage).serve(Request((), 64, UNIFORM))
    assert storage.counters["reread_rows"] > 0 and reply.draw_failure is None
    plain = 64 * (2 * STACK * SIDE**2 + 8)
    assert sum(part.nbytes for part in reply.packed[3:]) < 0.9 * plain + 64 * 2 * STACK * 8
    drawn = reply.rows
    rows = build(drawn.tensors, drawn.spec, (64,))
    places = zip(drawn.index.tolist(), drawn.generation.tolist(), strict=True)
    for place, row in zip(places, rows, strict=True):
        assert same(row, written[place])


@pytest.mark.parametrize("kernel", ["c", "numpy"])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [0, 1, 5])
def test_rows_come_back_from_their_stored_form(
    monkeypatch: pytest.MonkeyPatch, kernel: str, dtype: torch.dtype, count: int
) -> None:
    monkeypatch.setenv("TORCHRL_DIST_KERNEL", kernel)
    data = Episodes(0).take(5)[:count]
    data["pixels"], data["next", "pixels"] = (
        data["pixels"].to(dtype),
        data["next", "pixels"].to(dtype),
    )
    spec = node_frames.with_stacks(spec_of(data), {("pixels",): STACK})
    columns = matching_columns(data, spec)
    values = stacks.values(node_frames.each_once(columns, spec), spec)
    for value, column in zip(values, columns, strict=True):
        assert value.dtype == column.dtype and np.array_equal(value, column)


@pytest.mark.parametrize("kernel", ["c", "numpy"])
def test_a_message_with_rows_has_each_frame_once(
    monkeypatch: pytest.MonkeyPatch, kernel: str
) -> None:
    monkeypatch.setenv("TORCHRL_DIST_KERNEL", kernel)
    actor, operations, given = Episodes(0), [], []
    for number, count in enumerate((30, 5, 1)):
        data = actor.take(count)
        spec = node_frames.with_stacks(spec_of(data), {("pixels",): STACK})
        columns = matching_columns(data, spec)
        stored = node_frames.each_once(columns, spec)
        frames = {frame.tobytes() for key in ("pixels", ("next", "pixels"))
                  for frame in data[key].reshape(-1, SIDE, SIDE).numpy()}  # fmt: skip
        assert len(stored[-1]) == len(frames)
        packed = pack(stored, copy=True)
        operations.append(Write(spec.text, count, packed, None, ((number, count),)))
        given.append(columns)
    merged = merging._joined(operations)
    whole = stacks.values(unpack(merged.packed), spec)
    for column, parts in zip(whole, zip(*given, strict=True), strict=True):
        assert np.array_equal(column, np.concatenate(parts))
    for part, columns in zip(parts_of(merged), given, strict=True):
        for column, expected in zip(stacks.values(unpack(part.packed), spec), columns, strict=True):
            assert np.array_equal(column, expected)


def test_a_single_frame_that_only_next_repeats(tmp_path: Path) -> None:
    storage = storage_at(tmp_path / "frames", 100, {"pixels": 1, ("of", "camera"): 2})
    pixels = torch.randint(256, (41, 2, 3), dtype=torch.uint8)
    camera = torch.rand(41, 4, 2)
    rows = TensorDict(
        {
            "pixels": pixels[:-1],
            "of": {"camera": camera[:-1]},
            "next": {"pixels": pixels[1:], "of": {"camera": camera[1:]}},
        },
        [40],
    )
    storage.append(rows)
    assert same(storage[:], rows)
    assert (
        storage.directory.words[Word.FRAME_CURSOR] == 82
    )  # of the camera, each half is another frame


def test_frames_of_a_writer_that_has_stopped_are_not_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other writers wait for it, up to their deadline."""
    storage = storage_at(tmp_path / "frames", 50, timeout_s=1)
    rows = Episodes(0).take(6)
    storage.append(rows[:1])
    may_go_on, reserved = threading.Event(), threading.Event()
    write = Frames.write

    def slow(*args: Any) -> Any:
        if threading.current_thread() is not threading.main_thread():
            reserved.set()
            assert may_go_on.wait(60)
        return write(*args)

    monkeypatch.setattr(Frames, "write", slow)
    writer = threading.Thread(target=storage.append, args=(rows[1:],))
    writer.start()
    assert reserved.wait(60)
    frames = storage.directory.frames
    assert frames is not None
    others = np.random.default_rng(1)
    with pytest.raises(DeadlineError, match="are writing to slots all over"):
        for _ in range(frames.size):  # each row has 4 new frames
            pixels = torch.from_numpy(others.integers(0, 256, (1, STACK, SIDE, SIDE), np.uint8))
            row = {"pixels": pixels, "next": {"pixels": pixels}, "number": torch.zeros(1).long()}
            storage.append(TensorDict(row, [1]))
    may_go_on.set()
    writer.join(60)
    mine = storage[:]
    assert same(mine[torch.isin(mine["number"], rows["number"][1:])], rows[1:])


@pytest.mark.parametrize("shortcut", [True, False])
def test_hosts_store_each_frame_once(tmp_path: Path, shortcut: bool) -> None:
    with session() as me:
        options: dict[str, Any] = {"scratch_dir": tmp_path, "shortcut": shortcut}
        owner = host_replay(me, 100, frames={"pixels": STACK}, **options)
        with pytest.raises(ConfigurationError, match="frames"):
            host_replay(me, 100, **options)
        storage = RemoteStorage(owner)
        rows = Episodes(0).take(40)
        storage.append(rows)
        storage.flush()
        assert same(storage[:], rows)
        (folder,) = tmp_path.iterdir()
        assert inspect(folder)["row"]["leaves"][0]["stack"] == STACK
        storage.close()
        owner.release()


def test_more_frames_than_a_row_can_name_are_refused_before_anything_is_written() -> None:
    spec = RowSpec((ColumnSpec(("x",), torch.uint8, (4, 2), stack=4),))
    with pytest.raises(ConfigurationError, match=r"room for at most 2147483647"):
        node_frames.file_sizes(2**31, spec)


class Numbered:
    """Makes rows whose numbers determine their frames, so that a reader recognises torn rows."""

    def __init__(self, seed: int, repeats: bool) -> None:
        self.random, self.repeats = np.random.default_rng(seed), repeats

    @staticmethod
    def frames(first: torch.Tensor) -> torch.Tensor:
        """uint8 [n, STACK, 84, 84] for int64 [n]. Avoids torch, whose threads a fork loses."""
        values = (first.numpy()[:, None] + np.arange(STACK)) * 0x9E3779B97F4A7C1
        bytes_ = np.repeat(values[..., None], 84 * 84 // 8, -1).view(np.uint8)
        return torch.from_numpy(bytes_.reshape(-1, STACK, 84, 84))

    def take(self, count: int) -> TensorDict:
        start = int(self.random.integers(2**40))
        first = start + torch.arange(count) * (1 if self.repeats else 2 * STACK)
        return TensorDict(
            {
                "first": first,
                "pixels": self.frames(first),
                "next": {"pixels": self.frames(first + (1 if self.repeats else STACK))},
            },
            [count],
        )

    @classmethod
    def are_whole(cls, rows: TensorDict, repeats: bool) -> bool:
        first = rows["first"]
        after = cls.frames(first + (1 if repeats else STACK))
        return rows["pixels"].equal(cls.frames(first)) and rows["next", "pixels"].equal(after)


def write_for_a_while(storage: SharedMemmapStorage, seed: int, repeats: bool, rows: int) -> None:
    warnings.simplefilter("ignore")
    actor = Numbered(seed, repeats)
    while rows > 0:
        count = 1 + int(actor.random.integers(64))
        storage.append(actor.take(count))
        rows -= count


@pytest.mark.parametrize("repeats", [True, False])
def test_no_sampled_row_is_torn_while_writers_overtake_and_are_killed(
    tmp_path: Path, repeats: bool
) -> None:
    """If frames do not repeat, rows are dropped before their slots are used again."""
    capacity = 2_000
    storage = storage_at(tmp_path / "frames", capacity)
    sampler = SharedPrioritizedSampler(capacity, alpha=0.7, beta=0.5)
    buffer = SharedReplayBuffer(storage=storage, sampler=sampler, batch_size=64)
    buffer.extend(Numbered(0, repeats).take(100))
    fork = multiprocessing.get_context("fork")

    def start(seed: int, rows: int) -> Any:
        writer = fork.Process(target=write_for_a_while, args=(storage, seed, repeats, rows))
        writer.start()
        return writer

    writers = [start(seed, 4_000) for seed in (1, 2)]
    victim, batches, kills = start(3, 10**9), 0, 0
    random = np.random.default_rng(0)
    while any(writer.is_alive() for writer in writers) or batches < 100 or kills < 5:
        batch = buffer.sample()
        assert Numbered.are_whole(batch, repeats)
        buffer.update_priority(batch["index"], torch.rand(64), generation=batch["index_generation"])
        batches += 1
        if random.random() < 0.05:
            victim.kill()
            victim.join(20)
            kills += 1
            victim = start(10 + kills, 10**9)
    victim.kill()
    victim.join(20)
    assert all(writer.exitcode == 0 for writer in writers)
    rows = buffer[:]
    assert Numbered.are_whole(rows, repeats) and len(rows) == len(buffer) > 100
    assert bool(storage.counters["dropped_rows"]) is not repeats
